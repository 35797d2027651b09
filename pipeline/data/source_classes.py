"""The classes of a source, for cards that take them from there."""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from pipeline.data.cards import Card, Numbers
from pipeline.data.detection.columns import too_many_values
from pipeline.data.detection.data_set import Request, check_classes, sorted_labels
from pipeline.data.detection.libraries import torchvision_classes
from pipeline.data.detection.parquet_files import classes_of_labels, label_counts, read_schema
from pipeline.data.detection.shard_files import classes_of_shards
from pipeline.data.formats import csv, entries_of_split, format_of, list_source, source_state
from pipeline.data.formats.base import archives_of_split, source_uri
from pipeline.data.formats.sklearn import check as check_digits
from pipeline.data.formats.tar import LABEL_SUFFIX
from pipeline.data.formats.torchvision import torchvision_set
from pipeline.data.formats.webdataset import shard_urls
from pipeline.data.listing import Entry, Split, check_unicode_forms, class_folders, nfc
from workers.data.in_place import urls_by_name
from workers.errors import UserError
from workers.storage.filesystem import FIRST_CONTACT_S, StorageUnavailable, patience


class Memory(Protocol):
    """Values that were seen before, by name; the store keeps them."""

    def remember(self, identity: str, value: Any) -> None: ...
    def remembered(self, identity: str) -> Any: ...


class Labels(NamedTuple):
    """The classes of a source in order, and what its numbers are (see `Source.numbers`)."""

    classes: tuple[str, ...]
    numbers: Numbers


def labels_of_source(card: Card, where: str, memory: Memory | None) -> Labels:
    """Return the classes of the train split of a card's source, or of test without train.

    where: the card's file, for errors. memory: gives them once the source is gone, and spares
    reading labels again. Raise UserError where there are none, and none are remembered.
    """
    if card.source.label is None:
        raise UserError(
            f"{where}: source.label is null, so that no image names a class; list the one that all "
            "images belong to, such as `classes: [image]`"
        )
    if card.source.format == "folder":
        return Labels(_classes_of_folders(card, where, memory), card.source.numbers)
    body = [card.name, card.source.model_dump(mode="json", exclude={"path"})]
    digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    identity = f"classes-{digest[:24]}"
    stored = memory.remembered(identity) if memory is not None else None
    state, remembered = _recalled(stored)
    try:
        with patience(FIRST_CONTACT_S):
            entries = list_source(card) or []
            current = source_state(card, entries)
    except StorageUnavailable:
        if remembered is None:
            raise
        return remembered
    if current is None:
        if remembered is None:
            raise UserError(
                f"{where}: its classes come from {card.source.path}, and there are no images in "
                f"its splits ({dict(card.source.splits)}); put the data there, or mend the card"
            )
        return remembered
    if remembered is not None and state == list(current):
        return remembered
    labels = _READERS[card.source.format](card, entries)
    if memory is not None:
        value = {"state": list(current), "classes": list(labels.classes), "numbers": labels.numbers}
        memory.remember(identity, value)
    return labels


def _recalled(stored: Any) -> tuple[list[str], Labels | None]:
    """Return a state of the source and its labels, as the storage has them."""
    if not isinstance(stored, dict):
        return [], None
    state = stored.get("state")
    classes = stored.get("classes")
    numbers = stored.get("numbers")
    if not isinstance(state, list) or numbers not in ("places", "names"):
        return [], None
    if not isinstance(classes, list) or not all(isinstance(name, str) for name in classes):
        return [], None
    return state, Labels(tuple(classes), numbers)


def _classes_of_folders(card: Card, where: str, memory: Memory | None) -> tuple[str, ...]:
    """Return the sorted names of the folders in a split."""
    digest = hashlib.sha256(f"{card.name}\n{card.num_classes}".encode()).hexdigest()
    identity = f"classes-{digest[:24]}"
    remembered = memory.remembered(identity) if memory is not None else None
    try:
        with patience(FIRST_CONTACT_S):
            uri, folders = class_folders(card.source.path, card.source.splits[_split_of(card)])
    except StorageUnavailable:
        if not remembered:
            raise
        uri = card.source.path
        folders = []
    check_unicode_forms(f"{where}: folders in {uri}", folders)
    names = sorted(map(nfc, folders))
    if memory is not None and names and names != remembered:
        memory.remember(identity, names)
    names = names or remembered or []
    if not names:
        hint = ""
        if card.archive is not None:
            hint = f" (`accrete data list {shlex.quote(card.name)}` says how)"
        raise UserError(
            f"{where}: its classes come from the folders in {uri}, and there are none; "
            f"put the data there{hint}, or list the classes on the card"
        )
    return tuple(names)


def _split_of(card: Card) -> Split:
    return "train" if card.source.splits.get("train") else "test"


# ---- labels, by format ---------------------------------------------------------------------------
def _of_tables(card: Card, entries: list[Entry]) -> Labels:
    base, tables = csv.tables_of(card)
    split_tables = [table for table in tables if table.split == _split_of(card)]
    names: set[str] = set()
    for row in csv.rows_of(card, base, split_tables):
        if row.label is not None:
            names.add(row.label)
    return Labels(check_classes(card.source.path, sorted_labels(names)), card.source.numbers)


def _of_parquet(card: Card, entries: list[Entry]) -> Labels:
    uris = _archives(card, entries)
    label = str(card.source.label)
    declared = read_schema(uris[0]).classes.get(label)
    request = Request(card.source.path)
    counts = label_counts(uris, label, too_many_values(card.source.path, label, (), request))
    classes, numbers = classes_of_labels(card.source.path, label, declared, counts)
    return Labels(classes, numbers)


def _of_tars(card: Card, entries: list[Entry]) -> Labels:
    return _of_shards(card, _archives(card, entries))


def _of_shards_in_place(card: Card, entries: list[Entry]) -> Labels:
    urls = urls_by_name(shard_urls(card))
    return _of_shards(card, [urls[entry.name] for entry in _files(card, entries)])


def _of_shards(card: Card, uris: list[str]) -> Labels:
    label = str(card.source.label)
    if label == "label":  # the default, which is a column's name
        label = LABEL_SUFFIX
    return Labels(classes_of_shards(card.source.path, uris, label), card.source.numbers)


def _of_torchvision(card: Card, entries: list[Entry]) -> Labels:
    words = card.source.splits[_split_of(card)]
    data = torchvision_set(source_uri(card), card.source.name, words, True)
    return Labels(torchvision_classes(card.source.name, data), card.source.numbers)


def _of_digits(card: Card, entries: list[Entry]) -> Labels:
    check_digits(card, entries)
    return Labels(tuple(map(str, range(10))), card.source.numbers)


def _files(card: Card, entries: list[Entry]) -> list[Entry]:
    return entries_of_split(card, _split_of(card), entries)


def _archives(card: Card, entries: list[Entry]) -> list[str]:
    """Return the files of the split that classes come from. Raise UserError without any."""
    split = _split_of(card)
    uris, _ = archives_of_split(card, split, entries, format_of(card).suffixes)
    if not uris:
        raise UserError(
            f"card {card.name!r}: {card.source.path} has no files for source.splits.{split} "
            f"({card.source.splits[split]!r}), from which its classes come; mend the splits"
        )
    return uris


_READERS: dict[str, Callable[[Card, list[Entry]], Labels]] = {
    "csv": _of_tables,
    "parquet": _of_parquet,
    "tar": _of_tars,
    "webdataset": _of_shards_in_place,
    "torchvision": _of_torchvision,
    "sklearn": _of_digits,
}
