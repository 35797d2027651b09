"""Find the classes of a source.

This is needed for cards with `classes: from_source`, and for the detection of the layout of data
that has no card yet.
"""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from pipeline.data.cards import MAX_CLASS_CHARACTERS, Card, Numbers
from pipeline.data.column_files import read_schema
from pipeline.data.formats import count_labels, list_source, source_state
from pipeline.data.formats.base import LIBRARIES, LabelCounts, source_uri
from pipeline.data.formats.folder import class_folders
from pipeline.data.formats.parquet import list_parquet_files
from pipeline.data.formats.torchvision import load_data_set
from pipeline.data.labels import Label, check_spelling, sort_labels
from pipeline.data.listing import Entry
from pipeline.data.names import check_unicode_forms, nfc, printable, quoted
from pipeline.data.splits import Split
from workers.errors import UserError
from workers.storage.filesystem import FIRST_CONTACT_S, StorageUnavailable, patience

MAX_CLASSES = 20_000  # a column or a folder with more values is not a set of classes
MIN_CLASSES = 2  # minimum number of classes of a new data set
MIN_IMAGES = 2  # minimum average number of images per class
FEW_CLASSES = 50  # up to this number of classes, MIN_IMAGES does not apply


class Memory(Protocol):
    """An object that remembers values by name, for example `pipeline.graph.store.Store`."""

    def remember(self, identity: str, value: Any) -> None: ...
    def remembered(self, identity: str) -> Any: ...


class SourceClasses(NamedTuple):
    """The classes of a source in order, and the meaning of numeric labels (`Source.numbers`).

    A number is a position in `classes` (`places`) or the name of a class (`names`).
    """

    classes: tuple[str, ...]
    numbers: Numbers | None


def find_source_classes(card: Card, where: str, memory: Memory | None) -> SourceClasses:
    """Return the classes of the train split of a source, or of test if the card has no train.

    Args:
        card: The card.
        where: File of the card, for errors.
        memory: Remembers the classes for a source that no longer exists, cannot be reached, or is
            unchanged. None: nothing is remembered.

    Raises:
        UserError: If no classes are found or remembered.
    """
    if card.source.label is None:
        raise UserError(
            f"{where}: source.label is null, so that no image names a class; list the one that all "
            "images belong to, such as `classes: [image]`"
        )
    if card.source.format == "folder":
        return SourceClasses(_classes_of_folders(card, where, memory), card.source.numbers)
    source = card.source.model_dump(mode="json", exclude={"path", "range"})
    # Earlier versions had the default `places`. Keep their digest, so that the classes that they
    # remembered are found.
    body = [card.name, source | {"numbers": card.source.numbers or "places"}]
    digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    identity = f"classes-{digest[:24]}"
    stored = memory.remembered(identity) if memory is not None else None
    state, remembered = _parse_remembered(stored)
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
                f"its splits ({dict(card.source.splits)}); put the data there, or fix the card"
            )
        return remembered
    if remembered is not None and state == list(current):
        return remembered
    # count labels as they are written; the meaning of numbers is decided from the labels
    by_name = card.model_copy(
        update={"source": card.source.model_copy(update={"numbers": "names"})}
    )
    source_classes = find_counted_classes(
        by_name, entries, count_labels(by_name, entries), _choose_class_split(card)
    )
    if source_classes.numbers is None:
        numbers = "names" if card.source.format == "parquet" else card.source.numbers
        source_classes = source_classes._replace(numbers=numbers)
    if memory is not None:
        value = {
            "state": list(current),
            "classes": list(source_classes.classes),
            "numbers": source_classes.numbers,
        }
        memory.remember(identity, value)
    return source_classes


def _parse_remembered(stored: Any) -> tuple[list[str], SourceClasses | None]:
    """Parse a remembered value: the `SourceState` as a list, and the classes; else [] and None."""
    if not isinstance(stored, dict):
        return [], None
    state = stored.get("state")
    classes = stored.get("classes")
    numbers = stored.get("numbers")
    if not isinstance(state, list) or numbers not in ("places", "names", None):
        return [], None
    if not isinstance(classes, list) or not all(isinstance(name, str) for name in classes):
        return [], None
    return state, SourceClasses(tuple(classes), numbers)


def _classes_of_folders(card: Card, where: str, memory: Memory | None) -> tuple[str, ...]:
    """Return the sorted names of the class folders.

    If there are none, or the source cannot be reached, the remembered names are returned.
    """
    digest = hashlib.sha256(f"{card.name}\n{card.num_classes}".encode()).hexdigest()
    identity = f"classes-{digest[:24]}"
    remembered = memory.remembered(identity) if memory is not None else None
    uri = source_uri(card)
    try:
        with patience(FIRST_CONTACT_S):
            folders = class_folders(card, _choose_class_split(card))
    except StorageUnavailable:
        if not remembered:
            raise
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


def _choose_class_split(card: Card) -> Split:
    """Return the split that defines the classes: train, or test for a card without train."""
    return "train" if card.source.splits.get("train") else "test"


# ---- from labels to classes ----------------------------------------------------------------------
def find_counted_classes(
    card: Card,
    entries: list[Entry],
    counts: LabelCounts,
    split: Split,
    min_classes: int = MIN_CLASSES,
) -> SourceClasses:
    """Return the classes named by the labels of a split.

    Args:
        card: Card whose `source.numbers` is `names`.
        entries: Files of the source.
        counts: Number of images by split and label.
        split: Split that defines the classes.
        min_classes: Minimum number of classes.

    Raises:
        UserError: If the labels are not classes.
    """
    where = printable(card.source.path or card.source.name)
    labels = {label: n for (of, label), n in counts.items() if of == split and label is not None}
    declared = find_declared_classes(card, entries)
    if declared is not None:
        classes, numbers = declared
        missing = [name for name in classes if nfc(name) not in labels]
        if missing and labels and card.source.format not in LIBRARIES:
            raise UserError(
                f"{where}: class {quoted(missing[0])} of column {card.source.label!r} has no "
                f"{split} images; add some, or give files in which the label is the name of the "
                "class"
            )
        return SourceClasses(check_classes(where, classes, min_classes), numbers)
    names = sort_labels({str(label) for label in labels})
    num_images = sum(labels.values())
    is_many = len(names) > FEW_CLASSES and MIN_IMAGES * len(names) > num_images
    if len(names) > MAX_CLASSES or is_many:
        raise TooManyLabels(
            f"{where}: the values of column {quoted(card.source.label or '')} are not classes "
            f"({len(names)} different values for {num_images} images); give a table with a class "
            "for each image"
        )
    check_spelling(where, names)
    return SourceClasses(check_classes(where, names, min_classes), _describe_numbers(labels, names))


class TooManyLabels(UserError):
    """A label column has too many distinct values to name classes."""


def _describe_numbers(labels: Iterable[Label], names: Sequence[str]) -> Numbers | None:
    """Return the meaning of numeric labels.

    The result is None if each number is also the position of its own class (`0`, `1`, ...), so that
    both meanings agree, or if no label is a number. Otherwise it is `names`.
    """
    numbers = [label for label in labels if isinstance(label, int)]
    if any(names[label : label + 1] != [str(label)] for label in numbers):
        return "names"
    return None


def find_declared_classes(card: Card, entries: list[Entry]) -> SourceClasses | None:
    """Return the classes that the files or the library declare, or None without such classes.

    The meaning of numbers is `places` if all files list the classes in the same order, `names` if
    the orders differ, and None for a library.
    """
    source = card.source
    if source.format == "sklearn":
        return SourceClasses(tuple(map(str, range(10))), None)
    if source.format == "torchvision":
        split = _choose_class_split(card)
        data = load_data_set(
            source_uri(card), source.name, "+".join(source.list_parts(split)), download=True
        )
        names = getattr(data, "classes", None)
        if isinstance(names, (list, tuple)) and all(isinstance(name, str) for name in names):
            return SourceClasses(tuple(names), None)
        return None
    if source.format != "parquet":
        return None
    column = source.label or ""
    lists = [
        read_schema(file.uri).classes.get(column, ())
        for file in list_parquet_files(card, entries)[0]
    ]
    if not lists or not all(lists):
        return None
    classes = tuple(dict.fromkeys(name for names in lists for name in names))
    return SourceClasses(classes, "places" if len(set(lists)) == 1 else "names")


def check_classes(
    where: str, names: Sequence[str], min_classes: int = MIN_CLASSES
) -> tuple[str, ...]:
    """Return the classes of a source; raise `UserError` if they are not valid on a card."""
    if len(names) > MAX_CLASSES:
        raise UserError(
            f"{where} has {len(names)} classes, and a card is proposed for at most {MAX_CLASSES}; "
            "write the card by hand, see datasets/README.md"
        )
    for name in names:
        if not (name.isprintable() and 0 < len(name) <= MAX_CLASS_CHARACTERS):
            raise UserError(
                f"{where}: class {quoted(name)} is empty, too long or not printable; rename "
                f"it to 1 to {MAX_CLASS_CHARACTERS} printable characters"
            )
    check_unicode_forms(where, names)
    if len(names) < min_classes:
        found = f"one class, {quoted(names[0])}" if names else "no class"
        raise UserError(
            f"{where} has {found}, and a task tells at least two apart; "
            "give the folder or file that holds all classes"
        )
    return tuple(names)
