"""Parquet tables with a column of images (bytes, or a struct with `bytes`) and one of labels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate
from pathlib import PurePosixPath
from typing import Any, NamedTuple

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
    check_unfolding,
    class_of,
    size_problem,
    unit_slices,
    units_of_items,
)
from pipeline.data.listing import SPLITS, Entry, open_file, printable
from workers.errors import UserError

SUFFIXES = frozenset((".parquet",))


class ParquetJob(NamedTuple):
    """One file to look into. columns: of the image, and of the label if there is one."""

    card: str
    uri: str
    columns: tuple[str, ...]


class RowGroup(NamedTuple):
    """Rows of a file that are read together. size: bytes of all columns, as the file says."""

    rows: int
    size: int


def units(card: Card, entries: list[Entry], map_fn: MapFn) -> list[Unit]:
    """Return units of consecutive row groups; every file is looked into once, by `map_fn`."""
    columns = _columns_of(card)
    units: list[Unit] = []
    for split in SPLITS:
        uris, other_items = archives_of_split(card, split, entries, SUFFIXES)
        units += units_of_items(other_items)
        jobs = [ParquetJob(card.name, uri, columns) for uri in uris]
        for job, groups in zip(jobs, map_fn(list_row_groups, jobs), strict=True):
            units += _units_of_file(job, split, groups, card.classes, card.source.numbers)
    return units


def check(card: Card, entries: list[Entry]) -> None:
    """Raise UserError where the first file of a split cannot be read, or lacks a column."""
    columns = _columns_of(card)
    for split in SPLITS:
        uris, _ = archives_of_split(card, split, entries, SUFFIXES)
        for uri in uris[:1]:
            list_row_groups(ParquetJob(card.name, uri, columns))


def _columns_of(card: Card) -> tuple[str, ...]:
    label = card.source.label
    return (card.source.image,) if label is None else (card.source.image, label)


def list_row_groups(job: ParquetJob) -> list[RowGroup]:
    """Return the row groups of a file.

    Raise UserError where it is no Parquet, or lacks a column.
    """
    try:
        with _open_parquet(job.uri) as file:
            metadata = file.metadata
            names = file.schema_arrow.names
            groups: list[RowGroup] = []
            for index in range(metadata.num_row_groups):
                group = metadata.row_group(index)
                groups.append(RowGroup(group.num_rows, max(group.total_byte_size, 0)))
    except (pa.ArrowInvalid, OSError) as error:
        raise UserError(
            f"{printable(job.uri)} is not readable as Parquet "
            f"({str(error).splitlines()[0]}); fetch it again"
        ) from None
    missing = [column for column in job.columns if column not in names]
    if missing:
        raise UserError(
            f"{printable(job.uri)} has no column {missing[0]!r}, only {', '.join(names)}; "
            f"name the columns in source.image and source.label of card {job.card!r}"
        )
    return groups


def _units_of_file(
    job: ParquetJob, split: str, groups: list[RowGroup], classes: tuple[str, ...], numbers: str
) -> list[Unit]:
    first_rows = list(accumulate([group.rows for group in groups], initial=0))
    units: list[Unit] = []
    for part in unit_slices([group.size for group in groups]):
        first = first_rows[part.start]
        args = (split, job.uri, part.start, first, job.columns, classes, part.stop, numbers)
        units.append(Unit(read_parquet, args, first_rows[part.stop] - first))
    return units


@contextmanager
def _open_parquet(uri: str) -> Iterator[pq.ParquetFile]:
    with open_file(uri) as stream, pq.ParquetFile(stream) as file:
        yield file


def read_parquet(
    split: str,
    uri: str,
    group: int,
    first: int,
    columns: tuple[str, ...],
    classes: tuple[str, ...],
    stop: int | None = None,
    numbers: str = "places",
) -> Iterator[ItemBytes]:
    """Yield the items of the row groups from `group` to `stop`, or of `group` alone.

    first: number of its first row in the file.

    Rows are read one after the other, so that a group of any size needs little memory. So do rows
    that all hold the same huge value, which a file stores once. columns: of the image, and of the
    label if there is one. numbers: as in `Source`. Raise UserError where the group cannot be read
    to its end.
    """
    row = first
    num_bytes = 0
    groups = list(range(group, stop or group + 1))
    try:
        with open_file(uri) as stream, pq.ParquetFile(stream) as file:
            for batch in file.iter_batches(1, row_groups=groups, columns=list(columns)):
                values = [_python_value(batch[column][0]) for column in columns]
                label = values[1] if len(values) > 1 else None
                label_class = _class_of_row(uri, row, label, classes, numbers)
                item, data = _item(split, uri, row, values[0], label_class)
                if isinstance(data, bytes):
                    num_bytes += len(data)
                check_unfolding(uri, num_bytes, stream.size())
                yield item, data
                row += 1
    except (pa.ArrowException, OSError) as error:
        raise UserError(
            f"{printable(uri)} is not readable as Parquet beyond row {row} "
            f"({str(error).splitlines()[0]}); fetch it again"
        ) from None


def _class_of_row(
    uri: str, row: int, label: Any, classes: tuple[str, ...], numbers: str
) -> str | None:
    if isinstance(label, (str, bytes)) and len(label) > MAX_LABEL_BYTES:
        raise UserError(
            f"{printable(uri)}: the label of row {row} has {len(label)} characters, "
            f"and no class has a name of more than {MAX_LABEL_BYTES}; "
            "fetch the file again, or name another column in source.label"
        )
    return class_of(label, classes, numbers)


def _item(split: str, uri: str, row: int, image: Any, label: str | None) -> ItemBytes:
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
    return Item(split, name, stem, label, problem), data


def _python_value(scalar: pa.Scalar) -> Any:
    """Return a scalar as a Python value; text that is no UTF-8 becomes bytes."""
    try:
        return scalar.as_py()
    except UnicodeDecodeError:
        if isinstance(scalar, pa.StructScalar):
            return {name: _python_value(scalar[name]) for name in scalar}
        return scalar.as_buffer().to_pybytes()


FORMAT = Format(units, SUFFIXES, check=check)
