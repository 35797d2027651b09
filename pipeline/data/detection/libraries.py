"""Detect data sets of the Hugging Face Hub (`hf://datasets/NAME`) and of torchvision."""

from __future__ import annotations

import os
import re

from pipeline.config.yaml_files import expand
from pipeline.data.detection.data_set import DataSet, Request, build_data_set
from pipeline.data.listing import open_source
from pipeline.data.names import get_file_name, printable
from workers.errors import UserError

HUB = "hf://"
TORCHVISION = "torchvision:"
# groups: data set, @revision, /folder
HUB_NAME = re.compile(r"hf://datasets/([\w.-]+(?:/[\w.-]+)?)(@[\w.~/-]+)?(/.*)?/?")
CONVERTED = "@~parquet"  # revision with the hub's conversion of a data set to Parquet
# download folder of torchvision; a relative path starts at the current folder
TORCHVISION_PATH = "${ACCRETE_TORCHVISION:-torchvision}"
# data sets that have no splits `train` and `test` in torchvision, and the splits used instead
TORCHVISION_SPLITS = {
    "OxfordIIITPet": {"train": "trainval", "test": "test"},
    "Places365": {"train": "train-standard", "test": "val"},
}


def resolve_hub_address(path: str) -> str:
    """Return the URI of a readable revision of a data set on the Hugging Face hub.

    If the repository has no Parquet files, tars, CSV files or images, this is the revision that
    the hub converted to Parquet. A URI with a revision or a folder is returned unchanged.

    Raises:
        UserError: If the URI is malformed.
    """
    match = HUB_NAME.fullmatch(path)
    if match is None:
        raise UserError(
            f"{printable(path)} is not a data set on the hub; write hf://datasets/OWNER/NAME, or "
            "hf://datasets/OWNER/NAME/FOLDER for a folder in it"
        )
    address = path.rstrip("/")
    if match[2] or match[3] or _has_files(address):
        return address
    return f"{address}{CONVERTED}"


def _has_files(address: str) -> bool:
    """Return whether a data set on the hub has readable files.

    At most 20 folders of each of the first three levels are searched.
    """
    from pyarrow import fs  # lazy import: slow, and only needed for the hub

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
    """Read the data set `torchvision:NAME`; download it if it is missing.

    Raises:
        UserError: If torchvision has no data set of this name, or the download fails.
    """
    name = path.removeprefix(TORCHVISION)
    splits = TORCHVISION_SPLITS.get(name, {"train": "train", "test": "test"})
    root = os.path.abspath(expand(TORCHVISION_PATH))
    source = {"format": "torchvision", "name": name, "path": root, "splits": splits}
    layout = f"images of torchvision, below {printable(expand(TORCHVISION_PATH))}"
    return build_data_set(request, get_file_name(name).lower(), layout, source)
