"""Tables of paths and labels, CSV or Parquet, beside the images that they name.

A path starts at the folder of its table and stays inside the source: a table may come from a
stranger, and what it names is read and copied into shards.
"""

from __future__ import annotations

import os
import posixpath
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import NamedTuple

from pyarrow import fs

from pipeline.data.cards import Card
from pipeline.data.formats.base import (
    IMAGE_SUFFIXES,
    Format,
    Item,
    MapFn,
    Unit,
    class_of,
    other_file,
    size_problem,
    source_uri,
    units_of_items,
)
from pipeline.data.listing import SPLITS, Entry, open_source, suffix_of
from pipeline.data.tables import TABLE_SUFFIXES, read_rows
from workers.errors import UserError
from workers.storage.artifact import is_local, join, parent

OUTSIDE = "link: to a file outside the source; let source.path name a folder that holds both"
ADDRESS = "corrupt: an address, and a table names files; fetch it and name the file"
NO_FILE = "corrupt: there is no such file"
NO_PATH = "corrupt: its row names no file"
MOST_NAME = 200  # characters of a name that leads to no file
ASKED_AT_ONCE = 1000  # files of a bucket


class Table(NamedTuple):
    """One table of a split. name: below the source. value: of the split column, None without."""

    split: str
    name: str
    value: str | None


class TableRow(NamedTuple):
    """A row that belongs to a split. files: names below the source, of which the first that is
    there is meant; none with a problem."""

    split: str
    number: int
    text: str
    label: str | None
    files: tuple[str, ...]
    problem: str | None


# ---- rows ----------------------------------------------------------------------------------------
def tables_of(card: Card) -> tuple[str, list[Table]]:
    """Return the folder of a source as a path or URI, and its tables.

    A source that is one table holds all splits: those of its split column, or train alone.
    """
    uri = source_uri(card)
    splits = card.source.splits
    if suffix_of(uri) in TABLE_SUFFIXES and not _is_folder(uri):
        name = posixpath.basename(uri)
        if card.source.split is None:
            return parent(uri), [Table("train", name, None)]
        return parent(uri), [Table(s, name, splits[s]) for s in SPLITS if splits.get(s)]
    if card.source.split is not None:
        raise UserError(
            f"card {card.name!r}: source.split is {card.source.split!r}, the column of one table, "
            f"and source.path is a folder; let it name the table"
        )
    return uri.rstrip("/"), [Table(s, splits[s], None) for s in SPLITS if splits.get(s)]


def _is_folder(uri: str) -> bool:
    system, path = open_source(uri)
    return bool(system.get_file_info(path).type == fs.FileType.Directory)


def rows_of(card: Card, base: str, tables: list[Table]) -> Iterator[TableRow]:
    """Yield the rows of all splits, in the order of the tables."""
    source = card.source
    columns = [source.image, *filter(None, (source.label, source.split))]
    patterns = source.file_patterns()
    for table in tables:
        folder = posixpath.dirname(table.name)
        for row in read_rows(join(base, table.name), columns):
            if table.value is not None and row.values[-1] != table.value:
                continue
            label = row.values[1] if source.label is not None else None
            text = row.values[0] or ""
            files: list[str] = []
            problem = None
            for pattern in patterns:
                file, problem = locate(text, folder, base, pattern)
                if file is not None:
                    files.append(file)
            if files:
                problem = None
            yield TableRow(table.split, row.number, text, label, tuple(files), problem)


def locate(text: str, folder: str, base: str, files: str) -> tuple[str | None, str | None]:
    """Return the name below the source of the file that a row names, and what is wrong with it.

    folder: of the table, below the source. base: the source, a path or URI. files: one of
    the patterns in `Source.files`.
    """
    if not text or "\0" in text:
        return None, NO_PATH
    if "://" in text:
        return None, ADDRESS
    path = files.replace("{}", text)
    if "/" not in path:
        path = path.replace("\\", "/")  # as programs on Windows write paths
    if posixpath.isabs(path):
        if not is_local(base):
            return None, OUTSIDE
        path = os.path.relpath(path, base)
    else:
        path = posixpath.join(folder, path)
    path = posixpath.normpath(path)
    if path == ".." or path.startswith("../"):
        return None, OUTSIDE
    return path, None


# ---- files ---------------------------------------------------------------------------------------
def list_files(card: Card) -> list[Entry] | None:
    """List the tables of a card and the images that they name; None where a table is missing."""
    base, tables = tables_of(card)
    system, path = open_source(base)
    names = dict.fromkeys(table.name for table in tables)
    infos = system.get_file_info([join(path, name) for name in names])
    if not infos or any(info.type != fs.FileType.File for info in infos):
        return None
    entries: list[Entry] = []
    for name, info in zip(names, infos, strict=True):
        entries.append(Entry(name, info.size, info.mtime_ns or 0))
    files = {row.files: None for row in rows_of(card, base, tables) if row.files}
    file_names = list(dict.fromkeys(chain.from_iterable(files)))
    if isinstance(system, fs.LocalFileSystem):
        by_name = {entry.name: entry for entry in _local_entries(path, file_names)}
    else:
        by_name = {entry.name: entry for entry in _remote_entries(system, path, file_names)}
    used = dict.fromkeys(_first_file(candidates, by_name) for candidates in files)
    entries += [by_name[name] for name in used]
    return sorted(entries)


def _first_file(names: tuple[str, ...], entries: Mapping[str, Entry]) -> str:
    """Return the first of some names that is a file; the first of all where none is."""
    for name in names:
        if name in entries and entries[name].problem is None:
            return name
    return names[0]


def _local_entries(base: str, names: list[str]) -> Iterator[Entry]:
    """Yield an entry for each file. A link to a file stands for the file, wherever it lies; a link
    to a folder is followed inside the source alone."""
    real_base = os.path.realpath(base)
    is_inside: dict[str, bool] = {}
    for name in names:
        folder = posixpath.dirname(name)
        if folder not in is_inside:
            real = os.path.realpath(os.path.join(base, folder))
            is_inside[folder] = os.path.commonpath([real_base, real]) == real_base
        if not is_inside[folder]:
            yield Entry(name, 0, 0, OUTSIDE)
            continue
        try:
            info = os.stat(os.path.join(base, name))
        except OSError:
            yield Entry(name, 0, 0, NO_FILE)
            continue
        is_file = os.path.isfile(os.path.join(base, name))
        yield Entry(name, info.st_size, info.st_mtime_ns, None if is_file else NO_FILE)


def _remote_entries(system: fs.FileSystem, base: str, names: list[str]) -> Iterator[Entry]:
    for start in range(0, len(names), ASKED_AT_ONCE):
        part = names[start : start + ASKED_AT_ONCE]
        infos = system.get_file_info([join(base, name) for name in part])
        for name, info in zip(part, infos, strict=True):
            if info.type == fs.FileType.File:
                yield Entry(name, info.size or 0, info.mtime_ns or 0)
            else:
                yield Entry(name, 0, 0, NO_FILE)


def units(card: Card, entries: list[Entry], map_fn: MapFn) -> list[Unit]:
    """Return the units of all rows, in the order of the tables."""
    return units_of_items(list(list_items(card, entries)))


def list_items(card: Card, entries: list[Entry]) -> Iterator[Item]:
    """Yield the items of all rows, in the order of the tables."""
    base, tables = tables_of(card)
    _, path = open_source(base)
    root = path if is_local(base) else base
    by_name = {entry.name: entry for entry in entries}
    for row in rows_of(card, base, tables):
        label = class_of(row.label, card.classes, card.source.numbers)
        name = f"row {row.number}: {row.text[:MOST_NAME]}"
        if row.files:
            name = _first_file(row.files, by_name)
        stem = os.path.splitext(posixpath.basename(name))[0]
        entry = by_name.get(name)
        problem = row.problem
        if problem is None and entry is None:
            problem = NO_FILE
        if problem is not None or entry is None:
            yield Item(row.split, name, stem, label, problem)
            continue
        problem = entry.problem or size_problem(entry.size)
        if problem is None and suffix_of(name) not in IMAGE_SUFFIXES:
            problem = other_file(name)
        yield Item(row.split, name, stem, label, problem, join(root, name), 0, entry.size)


FORMAT = Format(
    units, IMAGE_SUFFIXES | TABLE_SUFFIXES, list_files=list_files, list_items=list_items
)
