"""Image folders: `<split>/<class>/**/<image>`."""

from __future__ import annotations

import os
from pathlib import PurePosixPath

from pipeline.data.cards import Card
from pipeline.data.formats.base import (
    IMAGE_SUFFIXES,
    Format,
    Item,
    MapFn,
    Unit,
    base_uri,
    entries_in_folder,
    other_file,
    size_problem,
    units_of_items,
)
from pipeline.data.listing import SPLITS, Entry, Split, check_unicode_forms
from workers.storage.artifact import join


def units(card: Card, entries: list[Entry], map_fn: MapFn) -> list[Unit]:
    """Return the units of all files; the first folder below a split is the class."""
    check_unicode_forms(f"source of card {card.name!r}", [entry.name for entry in entries])
    base = base_uri(card)
    items: list[Item] = []
    for split in SPLITS:
        split_entries = entries_in_folder(card, split, entries)
        items += [_item(card, split, entry, base) for entry in split_entries]
    return units_of_items(items)


def _item(card: Card, split: Split, entry: Entry, base: str) -> Item:
    parts = PurePosixPath(entry.name).relative_to(card.source.splits[split]).parts
    stem, suffix = os.path.splitext(entry.name.rpartition("/")[2])
    problem = entry.problem
    if not problem and suffix.lower() in IMAGE_SUFFIXES:
        problem = size_problem(entry.size)
    elif not problem:
        problem = other_file(entry.name)
    label = parts[0] if len(parts) > 1 else None
    return Item(split, entry.name, stem, label, problem, join(base, entry.name), 0, entry.size)


FORMAT = Format(units, IMAGE_SUFFIXES, splits_are_folders=True)
