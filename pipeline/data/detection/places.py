"""Which data sets lie at a path or address that a person gives."""

from __future__ import annotations

import os
import posixpath

from pipeline.data.detection.data_set import Columns, DataSet, name_of
from pipeline.data.detection.folders import Place, data_sets_in
from pipeline.data.detection.tree import read_tree
from pipeline.data.listing import is_utf8, printable
from workers.errors import UserError


def detect(path: str, columns: Columns) -> list[DataSet]:
    """Return the data sets at a path.

    columns: as the person names them. Raise `UserError` where there is none, with what is there and
    what would do.
    """
    if not is_utf8(path) or "${" in path:
        raise UserError(
            f"{printable(path)} cannot be written on a card: its name is no UTF-8, or holds "
            "'${', which stands for a variable of the environment; rename it"
        )
    uri = os.path.abspath(path)
    tree = read_tree(uri)
    if tree is None:
        raise _not_there(path)
    return data_sets_in(Place(uri, tree, name_of(posixpath.basename(uri)), columns))


def _not_there(path: str) -> UserError:
    if os.path.exists(path):
        return UserError(
            f"{printable(path)} is no config and no data set: give a .yaml file, or a folder of "
            "class folders"
        )
    return UserError(f"{printable(path)} does not exist; give the path of a config or of images")
