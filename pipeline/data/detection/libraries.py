"""Data sets that a library fetches: `hf://datasets/NAME` and `torchvision:NAME`."""

from __future__ import annotations

import os
import re
from collections import Counter
from typing import Any

from pipeline.data.detection.data_set import (
    DataSet,
    Request,
    check_classes,
    counted,
    name_of,
)
from pipeline.data.formats.torchvision import torchvision_set
from pipeline.data.listing import open_source, printable
from pipeline.yaml_files import expand
from workers.errors import UserError

HUB = "hf://"
TORCHVISION = "torchvision:"
HUB_NAME = re.compile(r"hf://datasets/([\w.-]+(?:/[\w.-]+)?)(@[\w.~/-]+)?(/.*)?/?")
CONVERTED = "@~parquet"  # the revision in which the hub has a data set as Parquet
# where torchvision puts files; relative to the folder of the card
TORCHVISION_PATH = "${ACCRETE_TORCHVISION:-torchvision}"
MOST_LABELS = 5_000_000  # that are looked at one by one
# what torchvision calls the splits of a data set, where that is not train and test
TORCHVISION_SPLITS = {
    "OxfordIIITPet": {"train": "trainval", "test": "test"},
    "Places365": {"train": "train-standard", "test": "val"},
}


def hub_address(path: str) -> str:
    """Return the address of a data set on the hub whose files are Parquet, tars or folders.

    Where it has none of them, that is the revision that the hub has converted to Parquet.
    """
    match = HUB_NAME.fullmatch(path)
    if match is None:
        raise UserError(
            f"{printable(path)} is no data set on the hub; write hf://datasets/OWNER/NAME, or a "
            "folder in it: hf://datasets/OWNER/NAME/FOLDER"
        )
    address = path.rstrip("/")
    if match[2] or match[3] or _has_files(address):
        return address
    return f"{address}{CONVERTED}"


def _has_files(address: str) -> bool:
    """Whether files of a data set on the hub, in its first folders, can be read as they are."""
    from pyarrow import fs  # beside the client of the hub, which takes longer

    system, path = open_source(address)
    waiting = [path]
    for _ in range(3):
        below: list[str] = []
        for folder in waiting[:20]:
            for info in system.get_file_info(fs.FileSelector(folder, allow_not_found=True)):
                if info.type == fs.FileType.Directory:
                    below.append(info.path)
                elif info.extension in ("parquet", "tar", "csv", "jpg", "jpeg", "png"):
                    return True
        waiting = below
    return False


def torchvision_set_at(path: str, request: Request) -> DataSet:
    """Return the data set `torchvision:NAME`, which is downloaded where it is missing.

    Raise `UserError` where there is none of this name, or it cannot be fetched.
    """
    name = path.removeprefix(TORCHVISION)
    root = expand(TORCHVISION_PATH)
    folder = os.path.abspath(root)
    splits = TORCHVISION_SPLITS.get(name, {"train": "train", "test": "test"})
    train = torchvision_set(folder, name, splits["train"], True)
    test = torchvision_set(folder, name, splits["test"], True)
    source: dict[str, Any] = {"format": "torchvision", "name": name, "path": TORCHVISION_PATH}
    if name in TORCHVISION_SPLITS:
        source["splits"] = splits
    classes = torchvision_classes(path, train)
    return DataSet(
        name=name_of(name).lower(),
        layout=f"{counted(len(train), 'train image')} and {counted(len(test), 'test image')} of "
        f"torchvision, below {printable(root)}",
        source=source,
        classes=classes,
        counts={"train": len(train), "test": len(test)},
    )


def torchvision_classes(path: str, data: Any) -> tuple[str, ...]:
    """Return the classes of a data set of torchvision. path: for errors.

    Raise `UserError` where it says none.
    """
    names = getattr(data, "classes", None)
    if isinstance(names, (list, tuple)) and all(isinstance(name, str) for name in names):
        return check_classes(path, names)
    for attribute in ("targets", "labels", "_labels"):
        labels = getattr(data, attribute, None)
        if labels is not None:
            counts = Counter(int(label) for label in labels[:MOST_LABELS])
            return check_classes(path, map(str, range(max(counts, default=-1) + 1)))
    raise UserError(
        f"{printable(path)} says neither classes nor labels; write a card by hand, see "
        "datasets/README.md"
    )
