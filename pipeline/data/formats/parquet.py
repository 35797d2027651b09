"""Parquet and Arrow files with a column of images (bytes or structs) and a column of labels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import PurePosixPath
from typing import Any, NamedTuple

import pyarrow as pa

from pipeline.data.cards import Card
from pipeline.data.column_files import (
    ARROW_SUFFIX,
    RowGroup,
    Schema,
    read_batches,
    read_row_groups,
    read_schema,
    to_python_list,
    to_python_value,
)
from pipeline.data.file_kinds import COLUMN_FILES
from pipeline.data.formats.base import (
    Format,
    Item,
    ItemBytes,
    LabelCounts,
    MapFn,
    SplitValues,
    Unit,
    build_units,
    check_unfolding,
    find_archives,
    find_size_problem,
    row_name,
    unit_slices,
)
from pipeline.data.labels import MAX_LABEL_BYTES, NUMBERS_HINT, Label, normalize_label
from pipeline.data.listing import Entry, open_file
from pipeline.data.names import nfc, printable, quoted
from pipeline.data.splits import IGNORE, SPLITS
from workers.errors import UserError

MAX_VALUES = 100_000  # distinct pairs of split and label


class ParquetFile(NamedTuple):
    """One file to inspect.

    Attributes:
        card: Card with the columns of the image, label and split.
        split: Split of all its rows. None if a column gives it.
        uri: URI of the file.
    """

    card: Card
    split: str | None
    uri: str


def list_parquet_files(card: Card, entries: list[Entry]) -> tuple[list[ParquetFile], list[Item]]:
    """Return the files of all splits, and items for the other files."""
    # with `source.split` all splits share the same files, which are listed once
    files: list[ParquetFile] = []
    other_items: list[Item] = []
    splits = SPLITS if card.source.split is None else card.source.named_splits()[:1]
    for split in splits:
        uris, items = find_archives(card, split, entries, COLUMN_FILES)
        of_file = split if card.source.split is None else None
        files += [ParquetFile(card, of_file, uri) for uri in uris]
        other_items += items
    return files, other_items


def units(card: Card, entries: list[Entry], map_fn: MapFn) -> list[Unit]:
    """Return units of consecutive row groups. The groups of each file are listed by `map_fn`."""
    files, other_items = list_parquet_files(card, entries)
    units = build_units(other_items)
    for file, groups in zip(files, map_fn(list_row_groups, files), strict=True):
        units += _divide_file(file, groups)
    return units


def check(card: Card, entries: list[Entry]) -> None:
    """Raise UserError if the first file of a split cannot be read, or lacks a column."""
    seen: set[str | None] = set()
    for file in list_parquet_files(card, entries)[0]:
        if file.split not in seen:
            seen.add(file.split)
            list_row_groups(file)


def _list_columns(card: Card) -> list[str]:
    columns = [card.source.image, *filter(None, (card.source.label,))]
    return [*columns, *card.source.split_columns()]


def list_row_groups(file: ParquetFile) -> list[RowGroup]:
    """Return the row groups of a file.

    Raises:
        UserError: If the file cannot be read, or lacks a column.
    """
    _check_card_columns(file, read_schema(file.uri))
    return read_row_groups(file.uri)


def _check_card_columns(file: ParquetFile, schema: Schema) -> None:
    missing = [column for column in _list_columns(file.card) if column not in schema.names]
    twice = [column for column in _list_columns(file.card) if schema.names.count(column) > 1]
    if twice:
        raise UserError(
            f"{printable(file.uri)} has {schema.names.count(twice[0])} columns called "
            f"{twice[0]!r}; rename all but one"
        )
    if missing:
        raise UserError(
            f"{printable(file.uri)} has no column {missing[0]!r}, only "
            f"{', '.join(map(printable, schema.names[:12]))}; name the columns in source.image and "
            f"source.label of card {file.card.name!r}"
        )


def _divide_file(file: ParquetFile, groups: list[RowGroup]) -> list[Unit]:
    first_rows = list(accumulate([group.rows for group in groups], initial=0))
    units: list[Unit] = []
    for part in unit_slices([group.size for group in groups]):
        first = first_rows[part.start]
        args = (file, part.start, part.stop, first)
        num_rows = first_rows[part.stop] - first
        units.append(Unit(read_parquet, args, num_rows, file.uri, first))
    return units


def read_parquet(file: ParquetFile, start: int, stop: int, first: int) -> Iterator[ItemBytes]:
    """Yield the items of some row groups.

    Rows are read one at a time, so a row group of any size needs little memory, even if many rows
    repeat a huge value that the file stores once.

    Args:
        file: The file.
        start: Index of the first row group.
        stop: Index after the last row group.
        first: Index, in the file, of the first row of these row groups.

    Raises:
        UserError: If the row groups cannot be read completely.
    """
    source = file.card.source
    columns = _list_columns(file.card)
    labels = DeclaredLabels(file.card, file.uri)
    values = SplitValues(file.card, printable(file.uri))
    num_bytes = 0
    with open_file(file.uri) as stream:
        file_bytes = stream.size()
    # an Arrow file is one row group
    groups = None if file.uri.endswith(ARROW_SUFFIX) else list(range(start, stop))
    for row, batch in enumerate(read_batches(file.uri, columns, 1, groups), first):
        cells = [to_python_value(batch[column][0]) for column in columns]
        label = labels.find(cells[1], row) if source.label is not None else None
        split = file.split or values.find(_split_value(values, cells), row)
        item, data = _make_row_item(split, file.uri, row, cells[0], label)
        if isinstance(data, bytes):
            num_bytes += len(data)
        check_unfolding(file.uri, num_bytes, file_bytes)
        if split != IGNORE:
            yield item, data


def _split_value(values: SplitValues, cells: Sequence[Any]) -> str:
    texts = [None if cell is None else str(cell).strip() for cell in cells]
    return values.value(texts[-len(values.columns) :])


class DeclaredLabels:
    """Maps the numbers in a file to the class names that the file declares.

    The names come from the feature `ClassLabel` in the metadata of the library `datasets`. Files
    can list their classes in different orders. A number means the class at this position in the
    list of the same file.

    Raises:
        UserError: If `source.numbers` of the card is not `names`, and a declared class has another
            position on the card.
    """

    def __init__(self, card: Card, uri: str):
        self.uri = uri
        self.column = card.source.label or ""
        declared = read_schema(uri).classes.get(self.column, ())
        known = {nfc(name): place for place, name in enumerate(card.classes)}
        self.names: tuple[str, ...] = ()
        # numbers are translated only if a declared class is on the card, or `source.numbers` is
        # `names`
        if any(nfc(name) in known for name in declared) or card.source.numbers == "names":
            self.names = declared
        if card.source.numbers == "names":
            return
        for place, name in enumerate(declared):
            if known.get(nfc(name), place) != place and place < len(card.classes):
                raise UserError(
                    f"{printable(uri)} declares class {quoted(name)} as number {place} of "
                    f"{card.source.label!r}, and it has place {known[nfc(name)]} on card "
                    f"{card.name!r}; {NUMBERS_HINT}"
                )

    def find(self, value: Any, row: int) -> Label:
        """Return the label of a row; raise `UserError` if the value cannot be a class."""
        if isinstance(value, (str, bytes)) and len(value) > MAX_LABEL_BYTES:
            raise UserError(
                f"{printable(self.uri)}: the label of row {row} has {len(value)} characters, "
                f"and no class has a name of more than {MAX_LABEL_BYTES}; "
                "fetch the file again, or name another column in source.label"
            )
        if value is not None and not isinstance(value, (str, bytes, int, float)):
            raise no_classes_error(self.uri, self.column)
        label = normalize_label(value)
        if isinstance(label, int) and 0 <= label < len(self.names):
            return nfc(self.names[label])
        return label


def _make_row_item(split: str, uri: str, row: int, image: Any, label: Label) -> ItemBytes:
    path = None
    data = image
    if isinstance(image, dict):
        path = image.get("path")
        data = image.get("bytes")
    problem: str | None = "corrupt: the row holds no bytes"
    if isinstance(data, bytes):
        problem = find_size_problem(len(data))
    stem = f"{row:08d}"
    if isinstance(path, str) and path:
        stem = PurePosixPath(path).stem
    return Item(split, row_name(uri, row), stem, label, problem), data


def count_labels(card: Card, entries: list[Entry]) -> LabelCounts:
    """Return the number of rows by split and label; the images are not read.

    Raises:
        UserError: If a file cannot be read, the values of the label column are not classes, or the
            card does not name a value of the split column.
    """
    counts: LabelCounts = Counter()
    source = card.source
    declared: dict[bool, str] = {}
    for file in list_parquet_files(card, entries)[0]:
        schema = read_schema(file.uri)
        _check_card_columns(file, schema)
        if source.label is None:
            rows = sum(group.rows for group in read_row_groups(file.uri))
            counts[file.split or SPLITS[0], None] += rows
            continue
        for column in (source.label, *source.split_columns()):
            if pa.types.is_nested(schema.types[column]):
                raise no_classes_error(file.uri, column)
        labels = DeclaredLabels(card, file.uri)
        values = SplitValues(card, printable(file.uri))
        columns = [source.label, *source.split_columns()]
        if source.numbers != "places":
            _check_declared(declared, file.uri, source.label, labels)
        row = 0
        for batch in read_batches(file.uri, columns):
            for cells, number in batch_counts(batch, columns):
                split = file.split or values.find(_split_value(values, cells), row)
                label = labels.find(cells[0], row)
                # a fraction, because `normalize_label` converts a whole number to int
                if isinstance(cells[0], float) and isinstance(label, str):
                    raise no_classes_error(file.uri, source.label)
                if split != IGNORE:
                    counts[split, label] += number
            row += len(batch)
            if len(counts) > MAX_VALUES:
                raise no_classes_error(file.uri, source.label)
    return counts


def _check_declared(
    declared: dict[bool, str], uri: str, column: str, labels: DeclaredLabels
) -> None:
    """Raise `UserError` if some files declare names for their numbers and others do not.

    Args:
        declared: Whether names are declared -> first such file. It is updated.
        uri: The file.
        column: The label column.
        labels: Its declared labels.
    """
    if not pa.types.is_integer(read_schema(uri).types[column]):
        return
    declared.setdefault(bool(labels.names), uri)
    if len(declared) > 1:
        raise UserError(
            f"{printable(declared[True])} declares the names of its numbers in {column!r} "
            f"(ClassLabel), and {printable(declared[False])} declares none, so that the same class "
            "would be a name and a number; write both alike"
        )


def batch_counts(
    batch: pa.RecordBatch, columns: Sequence[str]
) -> Iterator[tuple[tuple[Any, ...], int]]:
    """Yield the distinct values of some columns in a batch, with their number of rows."""
    cells = [to_python_list(batch[column]) for column in columns]
    yield from Counter(zip(*cells, strict=True)).items()


def no_classes_error(uri: str, label: str) -> UserError:
    """Return the error for a column whose values are not classes."""
    return UserError(
        f"{printable(uri)}: the values of column {quoted(label)} are not classes (too many, or "
        "neither names nor whole numbers); give a table with a class for each image, or name "
        "another column in source.label"
    )


FORMAT = Format(units, count_labels, COLUMN_FILES, check=check)
