"""Parquet tables with a column of images (bytes, or a struct with `bytes`) and one of labels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate
from pathlib import PurePosixPath
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.data.cards import Card
from pipeline.data.formats.base import (
    MAX_LABEL_BYTES,
    Format,
    Item,
    ItemBytes,
    MapFn,
    Unit,
    archives_of_split,
    class_of,
    size_problem,
    units_of_items,
)
from pipeline.data.listing import SPLITS, Entry, open_file, printable
from workers.errors import UserError

SUFFIXES = frozenset((".parquet",))


def units(card: Card, entries: list[Entry], map_fn: MapFn) -> list[Unit]:
    """Return one unit for each row group."""
    units: list[Unit] = []
    for split in SPLITS:
        uris, other_items = archives_of_split(card, split, entries, SUFFIXES)
        units += units_of_items(other_items)
        for uri in uris:
            units += _units_of_file(card, split, uri)
    return units


def _units_of_file(card: Card, split: str, uri: str) -> list[Unit]:
    columns = [card.source.image]
    if card.source.label is not None:
        columns.append(card.source.label)
    try:
        with _open_parquet(uri) as file:
            metadata = file.metadata
            names = file.schema_arrow.names
            sizes = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
    except (pa.ArrowInvalid, OSError) as error:
        raise UserError(
            f"{printable(uri)} is not readable as Parquet "
            f"({str(error).splitlines()[0]}); fetch it again"
        ) from None
    missing = [column for column in columns if column not in names]
    if missing:
        raise UserError(
            f"{printable(uri)} has no column {missing[0]!r}, only {', '.join(names)}; "
            f"name the columns in source.image and source.label of card {card.name!r}"
        )
    first_rows = list(accumulate(sizes, initial=0))
    return [
        Unit(read_parquet, (split, uri, group, first_rows[group], tuple(columns), card.classes))
        for group in range(len(sizes))
    ]


@contextmanager
def _open_parquet(uri: str) -> Iterator[pq.ParquetFile]:
    with open_file(uri) as stream, pq.ParquetFile(stream) as file:
        yield file


def read_parquet(
    split: str, uri: str, group: int, first: int, columns: tuple[str, ...], classes: tuple[str, ...]
) -> Iterator[ItemBytes]:
    """Yield the items of one row group; first: number of its first row in the file.

    Rows are read one after the other, so that a group of any size needs little memory. So do rows
    that all hold the same huge value, which a file stores once. columns: of the image, and of the
    label if there is one. Raise UserError where the group cannot be read to its end.
    """
    row = first
    try:
        with _open_parquet(uri) as file:
            for batch in file.iter_batches(1, row_groups=[group], columns=list(columns)):
                values = [_python_value(batch[column][0]) for column in columns]
                label = values[1] if len(values) > 1 else None
                yield _item(split, uri, row, values[0], label, classes)
                row += 1
    except (pa.ArrowException, OSError) as error:
        raise UserError(
            f"{printable(uri)} is not readable as Parquet beyond row {row} "
            f"({str(error).splitlines()[0]}); fetch it again"
        ) from None


def _item(
    split: str, uri: str, row: int, image: Any, label: Any, classes: tuple[str, ...]
) -> ItemBytes:
    if isinstance(label, (str, bytes)) and len(label) > MAX_LABEL_BYTES:
        raise UserError(
            f"{printable(uri)}: the label of row {row} has {len(label)} characters, "
            f"and no class has a name of more than {MAX_LABEL_BYTES}; "
            "fetch the file again, or name another column in source.label"
        )
    path = None
    data = image
    if isinstance(image, dict):
        path = image.get("path")
        data = image.get("bytes")
    problem: str | None = "corrupt: the row holds no bytes"
    if isinstance(data, bytes):
        problem = size_problem(len(data))
    stem = f"{row:08d}"
    if isinstance(path, str) and path:
        stem = PurePosixPath(path).stem
    name = f"{uri.rsplit('/', 1)[-1]}:{row}"
    return Item(split, name, stem, class_of(label, classes), problem), data


def _python_value(scalar: pa.Scalar) -> Any:
    """Return a scalar as a Python value; text that is no UTF-8 becomes bytes."""
    try:
        return scalar.as_py()
    except UnicodeDecodeError:
        if isinstance(scalar, pa.StructScalar):
            return {name: _python_value(scalar[name]) for name in scalar}
        return scalar.as_buffer().to_pybytes()


FORMAT = Format(units, SUFFIXES)
