"""FGVC-Aircraft: `data/images/*.jpg` and a list of names and variants for each split.

At the bottom of the official images, a banner of 20 pixels names their owner. It is not removed.
"""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.data.preparation.base import (
    LabelledImage,
    OfficialLayout,
    look_up_value,
    map_class_folders,
)
from pipeline.data.preparation.official import OfficialFolder
from pipeline.data.splits import Split

VARIANTS = "variants.txt"
LISTS: dict[Split, str] = {
    "train": "images_variant_trainval.txt",
    "test": "images_variant_test.txt",
}


def read(files: OfficialFolder) -> Iterator[LabelledImage]:
    """Yield all images; train includes validation. The variant `F/A-18` becomes class `F-A-18`."""
    where = files.where(VARIANTS)
    classes = map_class_folders(((name, name) for (name,) in files.rows(VARIANTS, 1)), where)
    for split, name in LISTS.items():
        for image, variant in files.rows(name, 2):
            label = look_up_value(classes, variant, where)
            yield LabelledImage(split, label, f"images/{image}.jpg")


NEEDS = (("images",), (VARIANTS,), (LISTS["train"],), (LISTS["test"],))
LAYOUTS = (OfficialLayout(NEEDS, read),)
