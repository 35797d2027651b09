"""Format `csv`: tables of image paths and labels, as CSV, JSON lines, Parquet or Arrow.

A path is relative to the folder of the table, unless `source.files` of the card has other patterns
(see `pipeline.data.file_index`). A file outside the source is never read: a table may be untrusted,
and the content of the files is copied into shards.
"""

from __future__ import annotations

import os
import posixpath
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from pipeline.config.text import format_count
from pipeline.data.cards import Card
from pipeline.data.file_index import NO_FILE, FileFinder, FileIndex, NamedRow, ambiguous_files_error
from pipeline.data.file_kinds import IMAGE_FILES, TABLE_SUFFIXES
from pipeline.data.formats.base import (
    Format,
    Item,
    LabelCounts,
    MapFn,
    SplitValues,
    Unit,
    build_units,
    describe_other_file,
    find_size_problem,
    source_uri,
    visible,
)
from pipeline.data.labels import Label, normalize_label
from pipeline.data.listing import Entry, find_unread_links, is_folder, list_entries, open_source
from pipeline.data.names import get_suffix, listed, nfc, printable, quoted
from pipeline.data.splits import IGNORE, SPLITS, Split, parse_role
from pipeline.data.tables import read_rows
from workers.errors import UserError
from workers.storage.artifact import is_local, join, parent

MAX_NAME = 200  # characters shown of the path of a missing file


class Table(NamedTuple):
    """One table.

    Attributes:
        split: Split of all rows. None if a column or the path of each image gives it.
        name: Name below the source.
    """

    split: str | None
    name: str


class TableImage(NamedTuple):
    """An image that a table names, in one row or several.

    Attributes:
        split: Split, or IGNORE.
        row: Number of the first row.
        text: Path in that row.
        label: Label.
        name: Name of the file below the source. Empty if there is a problem.
        problem: Reason why the row has no file.
    """

    split: str
    row: int
    text: str
    label: Label
    name: str
    problem: str | None


def list_tables(card: Card) -> tuple[str, list[Table]]:
    """Return the folder of a source as a path or URI, and its tables.

    If the source is a single table, `source.split` names its split column. Without a split column,
    all rows are train. The folder is the parent of the table, or higher by one level for each `../`
    in the patterns of `source.files` (the pattern with the most levels decides).

    Raises:
        UserError: If `source.split` is a column, but the source is not a single table.
    """
    uri = source_uri(card)
    source = card.source
    if get_suffix(uri) in TABLE_SUFFIXES and not is_folder(uri):
        steps = max(pattern.count("../") for pattern in source.file_patterns())
        base = parent(uri)
        for _ in range(steps):
            base = parent(base)
        name = uri[len(base) :].lstrip("/")
        return base, [Table(None if source.split is not None else "train", name)]
    if source.split is not None and source.split != source.image:
        raise UserError(
            f"card {card.name!r}: source.split is {source.split!r}, a column of a single table, "
            f"but source.path is a folder; set source.path to the table"
        )
    tables = [Table(s, name) for s in SPLITS for name in source.list_parts(s) if name]
    return uri.rstrip("/"), tables


class TableRow(NamedTuple):
    """A row of a table.

    Attributes:
        number: Number of the row, from 1.
        text: Path of the image.
        label: Label as written in the table, or None.
        split: Split from its table or column. None if the path of the image gives it.
        split_value: Value of the split column, or "".
    """

    number: int
    text: str
    label: str | None
    split: str | None
    split_value: str


def read_table_rows(card: Card, base: str, table: Table) -> Iterator[TableRow]:
    """Yield the rows of a table, without rows whose split column has an ignored value."""
    source = card.source
    values = SplitValues(card, printable(join(base, table.name)))
    by_path = source.split == source.image  # the path of each image gives its split
    columns = [source.image, *filter(None, (source.label,))]
    first = len(columns)
    columns += () if by_path else source.split_columns()
    for number, row in read_rows(join(base, table.name), columns):
        split = table.split
        split_value = ""
        if split is None and not by_path:
            split_value = values.value(row[first:])
            split = values.find(split_value, number)
        if split != IGNORE:
            label = row[1] if source.label is not None else None
            yield TableRow(number, row[0] or "", label, split, split_value)


class _LastImages:
    """Cache of the last call of `list_images`.

    Detection, counting and ingest call `list_images` in sequence with the same arguments.
    """

    card: Card | None = None
    entries: list[Entry] | None = None
    images: list[TableImage] | None = None


def list_images(card: Card, entries: list[Entry]) -> list[TableImage]:
    """Return the images of all tables, in the order of their rows, without ignored images.

    Several rows of the same file become one image. The result is shared: do not change it.

    Raises:
        UserError: If a row names several files, or rows give one file two labels or two splits.
    """
    last = _LastImages
    if last.images is None or last.card != card or last.entries is not entries:
        last.images = _read_table_images(card, entries)
        last.card = card
        last.entries = entries
    return last.images


def _read_table_images(card: Card, entries: list[Entry]) -> list[TableImage]:
    base, tables = list_tables(card)
    index = FileIndex(
        entry.name for entry in visible(entries) if get_suffix(entry.name) in IMAGE_FILES
    )
    links = {
        name.rpartition("/")[2]: problem for name, problem in find_unread_links(entries).items()
    }
    images: list[TableImage] = []
    first_image_by_file: dict[str, TableImage] = {}
    contradictions: list[tuple[TableImage, TableImage]] = []
    for table in tables:
        for image in _images_of_table(card, base, table, index, links):
            first = first_image_by_file.setdefault(image.name, image) if image.name else image
            if first is image:
                images.append(image)
            elif (first.label, first.split) != (image.label, image.split):
                contradictions.append((first, image))
    if contradictions:
        raise _contradiction_error(base, contradictions)
    return [image for image in images if image.split != IGNORE]


def _images_of_table(
    card: Card, base: str, table: Table, index: FileIndex, links: Mapping[str, str]
) -> Iterator[TableImage]:
    """Yield the images of a table.

    Args:
        card: Card of the source.
        base: Folder of the source.
        table: The table.
        index: Index of the image files.
        links: Name of an unread linked folder -> the reason. It becomes the problem of
            missing files in this folder.
    """
    source = card.source
    where = printable(join(base, table.name))
    finder = FileFinder(index, posixpath.dirname(table.name), base, source.file_patterns())
    values = SplitValues(card, where)
    rows = list(read_table_rows(card, base, table))
    label_is_folder = source.label == source.image
    named = [_make_named_row(row) for row in rows]
    finder.find_moved_folders(named)
    for row, named_row in zip(rows, named, strict=True):
        names, problem = finder.find(named_row)
        if problem == NO_FILE:
            problem = next((links[part] for part in row.text.split("/") if part in links), problem)
        if len(names) > 1:
            raise ambiguous_files_error(where, row.number, row.text, names)
        name = names[0] if names else ""
        split = row.split
        if split is None:
            # a missing file has no path that names a split, so it is reported under train
            split = values.find_in_path(name, row.number) if name else SPLITS[0]
        label = normalize_label(row.label)
        if label_is_folder:
            label = _folder_label(name, values.splits)
        yield TableImage(split, row.number, row.text, label, name, problem)


def _make_named_row(row: TableRow) -> NamedRow:
    """Return the text, label and split that the patterns of `source.files` can use.

    The split is the value of the split column if this is a known split word. Otherwise it is the
    split that the card assigns to the row.
    """
    label = normalize_label(row.label)
    has_known_word = parse_role(row.split_value) is not None
    split = row.split_value if has_known_word else row.split
    return NamedRow(row.text, "" if label is None else str(label), split or "")


def _folder_label(name: str, splits: dict[str, str]) -> str | None:
    """Return the last folder of a path that is not a split."""
    folders = [part for part in name.split("/")[:-1] if part not in splits]
    return nfc(folders[-1]) if folders else None


def _contradiction_error(base: str, pairs: list[tuple[TableImage, TableImage]]) -> UserError:
    """Return the error for rows that give one file two labels, or if none does, two splits."""
    by_label = [(first, second) for first, second in pairs if first.label != second.label]
    pairs = by_label or pairs
    first, second = pairs[0]
    kind = "splits"
    both: list[Label] = [first.split, second.split]
    if by_label:
        kind = "labels"
        both = [first.label, second.label]
    num_files = len({first.name for first, _ in pairs})
    has = "has" if num_files == 1 else "have"
    return UserError(
        f"{printable(base)}: {format_count(num_files, 'image')} {has} two {kind}, such as "
        f"{quoted(first.name)} with {listed(str(value) for value in both)} (rows {first.row} and "
        f"{second.row}); an image needs one, so name another column or fix the table"
    )


# ---- the format ----------------------------------------------------------------------------------
def list_files(card: Card, most: int | None = None) -> list[Entry] | None:
    """List the files below the folder of a source; None if a table is missing."""
    base, tables = list_tables(card)
    entries = list_entries(base, [""], IMAGE_FILES | TABLE_SUFFIXES, most)
    names = {entry.name for entry in entries or ()}
    return entries if all(table.name in names for table in tables) else None


def entries_of_split(card: Card, split: Split, entries: list[Entry]) -> list[Entry]:
    """Return the tables of a card and the files that they name.

    `split` is not used: a table can name files of all splits.
    """
    _, tables = list_tables(card)
    names = {table.name for table in tables}
    if not names <= {entry.name for entry in entries}:
        return []
    names.update(image.name for image in list_images(card, entries))
    return [entry for entry in entries if entry.name in names]


def units(card: Card, entries: list[Entry], map_fn: MapFn) -> list[Unit]:
    """Divide the rows into units of work."""
    return build_units(list(list_items(card, entries)))


def list_items(card: Card, entries: list[Entry]) -> Iterator[Item]:
    """Yield the images of all rows as items, train first."""
    base, _ = list_tables(card)
    _, path = open_source(base)
    root = path if is_local(base) else base
    by_name = {entry.name: entry for entry in entries}
    images = list_images(card, entries)
    places = {str(split): place for place, split in enumerate(SPLITS)}
    for image in sorted(images, key=lambda image: places[image.split]):
        name = image.name or f"row {image.row}: {image.text[:MAX_NAME]}"
        stem = os.path.splitext(posixpath.basename(name))[0]
        entry = by_name.get(image.name)
        if entry is None:
            yield Item(image.split, name, stem, image.label, image.problem)
            continue
        problem = entry.problem or find_size_problem(entry.size)
        if problem is None and get_suffix(name) not in IMAGE_FILES:
            problem = describe_other_file(name)
        uri = join(root, name)
        yield Item(image.split, name, stem, image.label, problem, uri, 0, entry.size)


def count_labels(card: Card, entries: list[Entry]) -> LabelCounts:
    """Return the number of images with an existing file, by split and label."""
    return Counter(
        (image.split, image.label) for image in list_images(card, entries) if image.problem is None
    )


FORMAT = Format(
    units,
    count_labels,
    IMAGE_FILES | TABLE_SUFFIXES,
    list_files=list_files,
    entries_of_split=entries_of_split,
    list_items=list_items,
)
