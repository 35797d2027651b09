"""Stanford Cars: images beside annotations in .mat files, in one of two forms.

The first has a folder and a file for each split, the labels of test in a file of its own; the
second has one folder and one file. Boxes count pixels from 1, the last ones included.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from pipeline.data.listing import Split
from pipeline.data.preparation.base import (
    Box,
    LabelledImage,
    Layout,
    class_names,
    finite,
    split_of,
    value_of,
)
from pipeline.data.preparation.official import OfficialFolder
from workers.errors import UserError

META = ("devkit/cars_meta.mat", "cars_meta.mat")
TRAIN = ("devkit/cars_train_annos.mat", "cars_train_annos.mat")
TEST = ("cars_test_annos_withlabels.mat", "devkit/cars_test_annos_withlabels.mat")
ALL = ("cars_annos.mat",)
TRAIN_IMAGES = ("cars_train",)
TEST_IMAGES = ("cars_test",)
ALL_IMAGES = ("car_ims",)


def read_two_folders(files: OfficialFolder) -> Iterator[LabelledImage]:
    """Yield all images of cars_train and cars_test."""
    meta = files.need(META)
    classes = _classes(files.matlab(meta, ["class_names"]), files.where(meta))
    yield from _read_split(files, "train", TRAIN, "cars_train", classes)
    yield from _read_split(files, "test", TEST, "cars_test", classes)


def _read_split(
    files: OfficialFolder,
    split: Split,
    names: tuple[str, ...],
    folder: str,
    classes: dict[str, str],
) -> Iterator[LabelledImage]:
    name = files.need(names)
    where = files.where(name)
    for row in _annotations(files.matlab(name, ["annotations"]), where):
        label = value_of(classes, _number(row, "class", where), where)
        yield LabelledImage(
            split, label, f"{folder}/{_field(row, 'fname', where)}", _box(row, where)
        )


def read_one_folder(files: OfficialFolder) -> Iterator[LabelledImage]:
    """Yield all images of car_ims."""
    name = ALL[0]
    where = files.where(name)
    values = files.matlab(name, ["annotations", "class_names"])
    classes = _classes(values, where)
    for row in _annotations(values, where):
        label = value_of(classes, _number(row, "class", where), where)
        is_train = _number(row, "test", where) == "0"
        path = str(_field(row, "relative_im_path", where))
        yield LabelledImage(split_of(is_train), label, path, _box(row, where))


# ---- values of .mat files ------------------------------------------------------------------------
def _classes(values: dict[str, Any], where: str) -> dict[str, str]:
    names = [str(name) for name in np.atleast_1d(values["class_names"])]
    return class_names(((str(number), name) for number, name in enumerate(names, 1)), where)


def _annotations(values: dict[str, Any], where: str) -> Any:
    rows = np.atleast_1d(values["annotations"])
    if rows.dtype.names is None:
        raise UserError(f"{where}: `annotations` has no fields; fetch the official file again")
    return rows


def _field(row: Any, name: str, where: str) -> Any:
    if name not in row.dtype.names:
        raise UserError(
            f"{where}: `annotations` has no field {name!r}, which the official file with labels "
            "has; fetch that"
        )
    return row[name]


def _number(row: Any, name: str, where: str) -> str:
    value = _field(row, name, where)
    if np.ndim(value) != 0 or not str(value).isdecimal():
        raise UserError(f"{where}: {name} {value!r:.60} is no whole number; fetch it again")
    return str(int(value))


def _box(row: Any, where: str) -> Box:
    names = ("bbox_x1", "bbox_y1", "bbox_x2", "bbox_y2")
    left, top, right, bottom = (float(_number(row, name, where)) for name in names)
    return finite(Box(left - 1, top - 1, right, bottom), where)


LAYOUTS = (
    Layout((TRAIN_IMAGES, TEST_IMAGES, META, TRAIN, TEST), read_two_folders),
    Layout((ALL_IMAGES, ALL), read_one_folder),
)
