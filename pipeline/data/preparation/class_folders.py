"""Class folders in a folder per split: `train/CLASS/*.jpg` and `test/CLASS/*.jpg`.

In this layout, the authors of Piggyback published WikiArt and Sketches.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from pipeline.data.preparation.base import LabelledImage, OfficialLayout, class_name
from pipeline.data.preparation.official import OfficialFolder
from pipeline.data.splits import Split


def read(files: OfficialFolder) -> Iterator[LabelledImage]:
    """Yield the images of train and test."""
    return read_folders(files, {"train": "train", "test": "test"})


def read_with_val(files: OfficialFolder) -> Iterator[LabelledImage]:
    """Yield the images of train and val; the official validation set is test."""
    return read_folders(files, {"train": "train", "test": "val"})


def read_folders(files: OfficialFolder, folders: Mapping[Split, str]) -> Iterator[LabelledImage]:
    """Yield the images of all class folders; `folders` has the folder of each split."""
    for split, name in folders.items():
        for folder in files.subfolders(name):
            label = class_name(folder, files.where(name))
            for path in files.images(f"{name}/{folder}"):
                yield LabelledImage(split, label, path)


LAYOUTS = (OfficialLayout((("train",), ("test",)), read),)
