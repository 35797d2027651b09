"""Describable Textures: `images/CLASS/*.jpg`, and lists of ten partitions; the first is used."""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.data.preparation.base import LabelledImage, OfficialLayout, class_name
from pipeline.data.preparation.official import OfficialFolder
from pipeline.data.splits import Split

LISTS: dict[str, Split] = {
    "labels/train1.txt": "train",
    "labels/val1.txt": "train",
    "labels/test1.txt": "test",
}


def read(files: OfficialFolder) -> Iterator[LabelledImage]:
    """Yield all images of the partition; train includes validation."""
    for name, split in LISTS.items():
        for label, image in files.rows(name, 2, separator="/"):
            path = f"images/{label}/{image}"
            yield LabelledImage(split, class_name(label, files.where(name)), path)


LAYOUTS = (OfficialLayout((("images",), *((name,) for name in LISTS)), read),)
