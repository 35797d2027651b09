"""Oxford Flowers-102: `jpg/image_NNNNN.jpg`, and labels and splits in .mat files.

As in papers that learn several data sets, train includes the official validation images.
"""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.data.preparation import matlab
from pipeline.data.preparation.base import LabelledImage, OfficialLayout
from pipeline.data.preparation.official import OfficialFolder
from pipeline.data.splits import Split
from workers.errors import UserError

LABELS = "imagelabels.mat"
SPLITS = "setid.mat"
VARIABLES: dict[str, Split] = {"trnid": "train", "valid": "train", "tstid": "test"}


def read(files: OfficialFolder) -> Iterator[LabelledImage]:
    """Yield all images. A class is named by its three-digit number, because no list has names."""
    labels = matlab.require_integers(
        files.matlab(LABELS, ["labels"])["labels"], files.where(LABELS)
    )
    numbers = files.matlab(SPLITS, list(VARIABLES))
    where = files.where(SPLITS)
    for name, split in VARIABLES.items():
        for number in matlab.require_integers(numbers[name], where):
            if not 1 <= number <= len(labels):
                raise UserError(
                    f"{where}: image {number} is none of the {len(labels)} that {LABELS} has; "
                    "fetch both again"
                )
            yield LabelledImage(split, f"{labels[number - 1]:03d}", f"jpg/image_{number:05d}.jpg")


LAYOUTS = (OfficialLayout((("jpg",), (LABELS,), (SPLITS,)), read),)
