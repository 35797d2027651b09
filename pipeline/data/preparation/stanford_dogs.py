"""Stanford Dogs: `Images/WORDNET_ID-BREED/*.jpg`, and a .mat file with the paths of each split."""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.data.preparation import matlab
from pipeline.data.preparation.base import LabelledImage, OfficialLayout, class_name
from pipeline.data.preparation.official import OfficialFolder
from pipeline.data.splits import Split

LISTS: dict[Split, tuple[str, ...]] = {
    "train": ("train_list.mat", "lists/train_list.mat"),
    "test": ("test_list.mat", "lists/test_list.mat"),
}


def read(files: OfficialFolder) -> Iterator[LabelledImage]:
    """Yield all images. A class has the name of the folder, e.g. `n02085620-Chihuahua`."""
    for split, names in LISTS.items():
        name = files.need(names)
        paths = files.matlab(name, ["file_list"])["file_list"]
        for path in matlab.require_texts(paths, files.where(name)):
            label = class_name(path.partition("/")[0], files.where(name))
            yield LabelledImage(split, label, f"Images/{path}")


LAYOUTS = (OfficialLayout((("Images",), LISTS["train"], LISTS["test"]), read),)
