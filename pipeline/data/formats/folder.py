"""Image folders: `<split>/<class>/**/<image>`."""

from __future__ import annotations

import os
from collections.abc import Iterator

from pipeline.data.cards import Card
from pipeline.data.formats.base import (
    IMAGE_SUFFIXES,
    MAX_IMAGE_BYTES,
    Format,
    Item,
    ItemBytes,
    MapFn,
    Unit,
    base_uri,
    entries_in_folder,
    other_file,
    read_items,
    size_problem,
    unit_slices,
)
from pipeline.data.listing import SPLITS, Entry, check_unicode_forms
from workers.storage.artifact import join


def units(card: Card, entries: list[Entry], map_fn: MapFn) -> list[Unit]:
    """Return the units of all files; the first folder below a split is the class."""
    check_unicode_forms(f"source of card {card.name!r}", [entry.name for entry in entries])
    base = base_uri(card)
    units: list[Unit] = []
    for split in SPLITS:
        folder = card.source.splits.get(split, "")
        split_entries = entries_in_folder(card, split, entries)
        for part in unit_slices([_bytes_to_read(entry) for entry in split_entries]):
            files = split_entries[part]
            units.append(Unit(read_files, (base, split, folder, files), len(files)))
    return units


def list_items(card: Card, entries: list[Entry]) -> Iterator[Item]:
    """Yield all files of a source as items, those of train first.

    Raise UserError where two names differ in their Unicode form alone.
    """
    check_unicode_forms(f"source of card {card.name!r}", [entry.name for entry in entries])
    base = base_uri(card)
    for split in SPLITS:
        folder = card.source.splits.get(split, "")
        for entry in entries_in_folder(card, split, entries):
            yield _item(base, split, folder, entry)


def _bytes_to_read(entry: Entry) -> int:
    is_read = not entry.problem and entry.size <= MAX_IMAGE_BYTES
    return entry.size if is_read else 0


def read_files(base: str, split: str, folder: str, files: list[Entry]) -> Iterator[ItemBytes]:
    """Yield the items of files below the folder of a split. base: path or URI of the source."""
    return read_items([_item(base, split, folder, file) for file in files])


def _item(base: str, split: str, folder: str, entry: Entry) -> Item:
    path = entry.name
    if folder != ".":
        path = path.removeprefix(folder).lstrip("/")
    class_folder, is_below, _ = path.partition("/")
    stem, suffix = os.path.splitext(entry.name.rpartition("/")[2])
    problem = entry.problem
    if not problem and suffix.lower() in IMAGE_SUFFIXES:
        problem = size_problem(entry.size)
    elif not problem:
        problem = other_file(entry.name)
    label = class_folder if is_below else None
    return Item(split, entry.name, stem, label, problem, join(base, entry.name), 0, entry.size)


FORMAT = Format(units, IMAGE_SUFFIXES, splits_are_folders=True, list_items=list_items)
