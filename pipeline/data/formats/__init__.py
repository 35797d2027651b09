"""Read the raw data of a card in any format.

The functions of this module call the `Format` of the card (see base.py). To add a format, add a
module to this folder and its name to `SourceFormat` in cards.py. The module defines `FORMAT`. It is
imported when a card uses the format.
"""

from __future__ import annotations

import hashlib
from importlib import import_module
from typing import NamedTuple

from pipeline.data.cards import Card
from pipeline.data.formats.base import Format, LabelCounts, MapFn, Unit, source_uri
from pipeline.data.listing import Entry, list_entries
from pipeline.data.names import get_suffix, nfc
from pipeline.data.splits import SPLITS, Split
from workers.errors import UserError
from workers.storage.artifact import is_local


def get_format(card: Card) -> Format:
    """Return the format of a card's source."""
    module = import_module(f"pipeline.data.formats.{card.source.format}")
    assert isinstance(module.FORMAT, Format)
    return module.FORMAT


def list_source(card: Card, most: int | None = None) -> list[Entry] | None:
    """List all files below a card's source, sorted.

    For WebDataset shards that are used in place, only the shards that the card names are listed.

    Args:
        card: Card of the source.
        most: Stop after this number of files; only for local folders.

    Returns:
        The files, or None if the source does not exist. The list is empty if the data comes from a
        Python package.

    Raises:
        UserError: If the source cannot be listed.
    """
    source_format = get_format(card)
    if not source_format.suffixes:
        return []
    if source_format.list_shards:
        return source_format.list_shards(card)
    if source_format.list_files:
        return source_format.list_files(card, most)
    folders = source_format.first_folders(card)
    return list_entries(source_uri(card), folders, source_format.suffixes, most)


def units(card: Card, map_fn: MapFn, entries: list[Entry] | None = None) -> list[Unit]:
    """Divide the whole source into units, in an order that depends only on the source.

    A unit is a part of the source that is read in one call, and in parallel with other units, see
    `base.Unit`.

    Args:
        card: The card.
        map_fn: `map_fn(function, items)` returns the results in order. It may run in parallel.
        entries: Result of `require_entries`, if known.

    Raises:
        UserError: If the source is missing, empty or unreadable.
    """
    if entries is None:
        entries = require_entries(card)
    return get_format(card).units(card, entries, map_fn)


def require_entries(card: Card) -> list[Entry]:
    """Return the files of a card's source; empty if the data comes from a Python package.

    Raises:
        UserError: If the source is missing or unreadable, or has no files for its splits.
    """
    if not get_format(card).suffixes:
        return []
    entries = list_source(card)
    if entries and any(entries_of_split(card, split, entries) for split in SPLITS):
        return entries
    state = "does not exist"
    if entries is not None:
        state = f"has no files for its splits ({dict(card.source.splits)})"
    source = source_uri(card)
    if get_format(card).list_shards:
        source = f"{card.source.path} with the shards {'; '.join(card.source.splits.values()):.200}"
    raise UserError(
        f"card {card.name!r}: its source {source} {state}; put the data there, "
        "or set source.path of the card (or the environment variable in it) to the data's folder"
    )


def is_local_source(card: Card) -> bool:
    """Return whether all files of a card's source are on local or mounted disks."""
    paths = [card.source.path, *(folder.path for folder in card.source.more)]
    if get_format(card).list_shards:
        for split in SPLITS:
            paths += card.source.list_parts(split)
    return all(map(is_local, paths))


class SourceState(NamedTuple):
    """State of a source, determined without reading its files.

    Attributes:
        fingerprint: Changes if the paths or sizes of the files change. For data from a Python
            package: `FORMAT:NAME`, for example `sklearn:digits`.
        modified: Digest of the modification times. It also changes if a file is edited in place.
            `-` for data from a Python package.
    """

    fingerprint: str
    modified: str


def source_state(card: Card, entries: list[Entry] | None = None) -> SourceState | None:
    """Return the state of the files that the card's splits use, or None without such files.

    Args:
        card: The card.
        entries: Files of the source, if known.
    """
    source_format = get_format(card)
    if not source_format.suffixes:
        return SourceState(f"{card.source.format}:{card.source.name}", "-")
    if entries is None:
        entries = list_source(card) or []
    used_files: set[tuple[str, int, int]] = set()  # name, bytes, modification time
    for split in SPLITS:
        for entry in source_format.entries_of_split(card, split, entries):
            if not entry.problem and get_suffix(entry.name) in source_format.suffixes:
                used_files.add((nfc(entry.name), entry.size, entry.modified))
    if not used_files:
        return None
    rows = sorted(used_files)
    sizes = "\n".join(f"{name}\t{size}" for name, size, _ in rows)
    times = "\n".join(str(modified) for *_, modified in rows)
    return SourceState(
        hashlib.sha256(sizes.encode("utf-8", "surrogateescape")).hexdigest(),
        hashlib.sha256(times.encode()).hexdigest()[:32],
    )


def fingerprint(card: Card) -> str | None:
    """Return the fingerprint of a card's source (see `SourceState`), or None without files."""
    state = source_state(card)
    return state.fingerprint if state else None


def entries_of_split(card: Card, split: Split, entries: list[Entry]) -> list[Entry]:
    """Return the files that a split uses."""
    return get_format(card).entries_of_split(card, split, entries)


def count_labels(card: Card, entries: list[Entry]) -> LabelCounts:
    """Return the number of images of a source by split and label, without decoding images.

    Images with a known problem are not counted.

    Raises:
        UserError: If labels or splits cannot be read, or a row of a table matches several
            image files.
    """
    return get_format(card).count_labels(card, entries)
