"""Data sets that a library fetches: `hf://datasets/NAME` and `torchvision:NAME`."""

from __future__ import annotations

import os
import re

from pipeline.data.detection.data_set import DataSet, Request, build_data_set
from pipeline.data.listing import open_source
from pipeline.data.names import name_of, printable
from pipeline.yaml_files import expand
from workers.errors import UserError

HUB = "hf://"
TORCHVISION = "torchvision:"
HUB_NAME = re.compile(r"hf://datasets/([\w.-]+(?:/[\w.-]+)?)(@[\w.~/-]+)?(/.*)?/?")
CONVERTED = "@~parquet"  # the revision in which the hub has a data set as Parquet
# where torchvision puts files; relative to the folder of the card
TORCHVISION_PATH = "${ACCRETE_TORCHVISION:-torchvision}"
# what torchvision calls the splits of a data set, where that is not train and test
TORCHVISION_SPLITS = {
    "OxfordIIITPet": {"train": "trainval", "test": "test"},
    "Places365": {"train": "train-standard", "test": "val"},
}


def resolve_hub_address(path: str) -> str:
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


def read_torchvision_set(path: str, request: Request) -> DataSet:
    """Return the data set `torchvision:NAME`, which is downloaded if it is missing.

    Raises:
        UserError: If there is none of this name, or it cannot be fetched.
    """
    name = path.removeprefix(TORCHVISION)
    splits = TORCHVISION_SPLITS.get(name, {"train": "train", "test": "test"})
    root = os.path.abspath(expand(TORCHVISION_PATH))
    source = {"format": "torchvision", "name": name, "path": root, "splits": splits}
    layout = f"images of torchvision, below {printable(expand(TORCHVISION_PATH))}"
    return build_data_set(request, name_of(name).lower(), layout, source)
