"""Stanford Dogs: `Images/WORDNET_ID-BREED/*.jpg`, and a .mat file with the paths of each split."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from pipeline.data.listing import Split
from pipeline.data.preparation.base import LabelledImage, Layout, class_name
from pipeline.data.preparation.official import OfficialFolder

LISTS: dict[Split, tuple[str, ...]] = {
    "train": ("train_list.mat", "lists/train_list.mat"),
    "test": ("test_list.mat", "lists/test_list.mat"),
}


def read(files: OfficialFolder) -> Iterator[LabelledImage]:
    """Yield all images; a class is called as its folder, `n02085620-Chihuahua`."""
    for split, names in LISTS.items():
        name = files.need(names)
        for path in np.atleast_1d(files.matlab(name, ["file_list"])["file_list"]):
            label = class_name(str(path).partition("/")[0], files.where(name))
            yield LabelledImage(split, label, f"Images/{path}")


LAYOUTS = (Layout((("Images",), LISTS["train"], LISTS["test"]), read),)
