"""Which data sets lie at a path or address that a person gives."""

from __future__ import annotations

import os
import posixpath

from pipeline.data.detection.data_set import DataSet, Request, name_of
from pipeline.data.detection.folders import Candidate, data_sets_in
from pipeline.data.detection.image_tables import table_at
from pipeline.data.detection.libraries import HUB, TORCHVISION, hub_address, torchvision_set_at
from pipeline.data.detection.packed_files import is_packed, unpack_command
from pipeline.data.detection.parquet_files import parquet_in, read_schema
from pipeline.data.detection.shard_files import shards_in
from pipeline.data.detection.tree import Folder, read_tree
from pipeline.data.listing import is_utf8, printable, suffix_of
from workers.errors import UserError, did_you_mean
from workers.storage.artifact import exists, parent
from workers.storage.secrets import refuse_secrets

# stems that say nothing: a data set in such a file is called as its folder
PLAIN_STEMS = ("train", "labels", "label", "data", "metadata", "images", "index", "all", "dataset")


def detect(request: Request) -> list[DataSet]:
    """Return the data sets at a path or address.

    Raise `UserError` where there is none, with what is there and what would do.
    """
    path = request.path
    if not is_utf8(path) or "${" in path or "\0" in path or not path.strip():
        raise UserError(
            f"{printable(path) or 'an empty path'} cannot be written on a card (no name, no UTF-8, "
            "or '${', which stands for a variable of the environment); rename it"
        )
    refuse_secrets(path)
    if path.startswith(TORCHVISION):
        return [torchvision_set_at(path, request)]
    if path.startswith(HUB):
        path = hub_address(path)
    uri = path.rstrip("/")
    if "://" not in path:
        uri = os.path.abspath(path)
    name = name_of(posixpath.basename(uri.partition("@")[0]))
    tree = read_tree(uri)
    if tree is not None:
        return data_sets_in(Candidate(uri, tree, name, request))
    if not exists(uri):
        raise _missing(path)
    return [_file(uri, request)]


def _file(uri: str, request: Request) -> DataSet:
    stem = posixpath.basename(uri).rpartition(".")[0]
    if stem.lower() in PLAIN_STEMS:
        stem = posixpath.basename(parent(uri))
    name = name_of(stem)
    match suffix_of(uri):
        case ".csv" | ".tsv" | ".txt":
            return table_at(uri, name, request, read_tree(parent(uri)) or Folder(""))
        case ".parquet" if read_schema(uri).images:
            return parquet_in(parent(uri), [posixpath.basename(uri)], name, request, uri)
        case ".parquet":
            return table_at(uri, name, request, read_tree(parent(uri)) or Folder(""))
        case ".tar":
            return shards_in(parent(uri), [posixpath.basename(uri)], name, request, uri)
    if is_packed(uri):
        raise _packed(uri, request)
    raise UserError(
        f"{printable(uri)} is no config and no data set; what would do: a .yaml config, a folder "
        "of class folders, a CSV file of paths and labels, Parquet files, or WebDataset tars"
    )


def _packed(uri: str, request: Request) -> UserError:
    command = unpack_command([request.path], "", request.program)
    remedy = f"unpack it: `{command}`" if command else "unpack it and give the folder"
    return UserError(f"{printable(uri)} is a compressed archive, which is not read; {remedy}")


def _missing(path: str) -> UserError:
    remedy = "give the path of a config or of images"
    folder = os.path.dirname(path) or "."
    if "://" not in path and os.path.isdir(folder):
        names = sorted(name for name in os.listdir(folder) if not name.startswith("."))
        remedy = did_you_mean(os.path.basename(path), names, remedy, os.path.dirname(path))
    return UserError(f"{printable(path)} does not exist; {remedy}")
