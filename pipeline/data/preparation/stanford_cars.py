"""Stanford Cars: images with annotations in .mat files, in one of two forms.

The first form has an image folder and an annotation file for each split, and a file of class names;
the second has one folder and one file. Boxes count pixels from 1 and include the right and bottom
pixels.
"""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.data.preparation import matlab
from pipeline.data.preparation.base import (
    ImageBox,
    LabelledImage,
    OfficialLayout,
    choose_split,
    look_up_value,
    map_class_folders,
)
from pipeline.data.preparation.matlab import Value
from pipeline.data.preparation.official import OfficialFolder

META = ("devkit/cars_meta.mat", "cars_meta.mat")
TRAIN = ("devkit/cars_train_annos.mat", "cars_train_annos.mat")
TEST = ("cars_test_annos_withlabels.mat", "devkit/cars_test_annos_withlabels.mat")
ALL = ("cars_annos.mat",)
TRAIN_IMAGES = ("cars_train",)
TEST_IMAGES = ("cars_test",)
ALL_IMAGES = ("car_ims",)
SIDES = ("bbox_x1", "bbox_y1", "bbox_x2", "bbox_y2")


def read_two_folders(files: OfficialFolder) -> Iterator[LabelledImage]:
    """Yield all images of cars_train and cars_test."""
    meta = files.need(META)
    classes = _map_classes(files.matlab(meta, ["class_names"]), files.where(meta))
    for split, names in (("train", TRAIN), ("test", TEST)):
        name = files.need(names)
        where = files.where(name)
        for row in _annotations(files.matlab(name, ["annotations"]), where, "fname"):
            path = f"cars_{split}/{matlab.require_text(row['fname'], where)}"
            label = _find_label(row, classes, where)
            yield LabelledImage(choose_split(split == "train"), label, path, _box(row, where))


def read_one_folder(files: OfficialFolder) -> Iterator[LabelledImage]:
    """Yield all images of car_ims."""
    where = files.where(ALL[0])
    values = files.matlab(ALL[0], ["annotations", "class_names"])
    classes = _map_classes(values, where)
    for row in _annotations(values, where, "relative_im_path", "test"):
        is_train = matlab.require_integer(row["test"], where) == 0
        path = matlab.require_text(row["relative_im_path"], where)
        yield LabelledImage(
            choose_split(is_train), _find_label(row, classes, where), path, _box(row, where)
        )


# ---- values of .mat files ------------------------------------------------------------------------
def _map_classes(values: dict[str, Value], where: str) -> dict[str, str]:
    names = matlab.require_texts(values["class_names"], where)
    return map_class_folders(((str(number), name) for number, name in enumerate(names, 1)), where)


def _annotations(values: dict[str, Value], where: str, *fields: str) -> list[dict[str, Value]]:
    return matlab.require_structs(values["annotations"], where, ["class", *SIDES, *fields])


def _find_label(row: dict[str, Value], classes: dict[str, str], where: str) -> str:
    return look_up_value(classes, str(matlab.require_integer(row["class"], where)), where)


def _box(row: dict[str, Value], where: str) -> ImageBox:
    left, top, right, bottom = (matlab.require_integer(row[side], where) for side in SIDES)
    return ImageBox(left - 1, top - 1, right, bottom)


LAYOUTS = (
    OfficialLayout((TRAIN_IMAGES, TEST_IMAGES, META, TRAIN, TEST), read_two_folders),
    OfficialLayout((ALL_IMAGES, ALL), read_one_folder),
)
