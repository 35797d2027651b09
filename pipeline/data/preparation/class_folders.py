"""Class folders in train and test, as the authors of Piggyback pass WikiArt and Sketches on."""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.data.listing import SPLITS
from pipeline.data.preparation.base import LabelledImage, Layout, class_name
from pipeline.data.preparation.official import OfficialFolder


def read(files: OfficialFolder) -> Iterator[LabelledImage]:
    """Yield the images of all class folders."""
    for split in SPLITS:
        for folder in files.subfolders(split):
            label = class_name(folder, files.where(split))
            for path in files.images(f"{split}/{folder}"):
                yield LabelledImage(split, label, path)


LAYOUTS = (Layout((("train",), ("test",)), read),)
