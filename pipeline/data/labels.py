"""Labels: one normal form for what tables, members of tars and Parquet files say, and its class.

The rule:

- Blank, `NaN`, `null` and `<NA>` (in any case) are no label.
- Blanks around a label do not count, and names are compared in Unicode form NFC.
- `3`, `3.0` and the number 3 are the same label; `03` is another.
- A label is the name of a class. It is a place in the list of classes only if the card says
  `source.numbers: places`, or if the file declares its classes (ClassLabel).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from pipeline.data.names import nfc, quoted
from workers.errors import UserError

Label = str | int | None
NO_LABEL = frozenset(("", "nan", "null", "<na>"))
PERHAPS_NO_LABEL = frozenset(("na", "n/a", "none", "nil", "-1", "?", "-", "--", "missing"))
WHOLE = re.compile(r"-?[0-9]{1,9}")
WHOLE_AS_FLOAT = re.compile(r"(-?[0-9]{1,9})\.0+")
MAX_NUMBER_DIGITS = 18  # of a label that is a number
NUMBER = "number "  # before a label that is a number, and no class
MAX_LABEL_BYTES = 4096  # of a class name in a source
NUMBERS_HINT = (
    "say on the card what numbers are: `source.numbers: names` (of classes), or `places` (in the "
    "list of classes, from 0)"
)


def normalize_label(value: Any) -> Label:
    """Return a label in its normal form: text, a whole number, or None if there is none.

    Args:
        value: Of a cell, a field of JSON, a Parquet column or a member of a tar. Text that is not
            UTF-8 may be bytes.
    """
    if isinstance(value, bytes):
        value = value.decode("utf-8", "replace")
    if isinstance(value, bool):
        return int(value)
    if isinstance(value, float):
        if value != value:
            return None
        return int(value) if value.is_integer() else repr(value)
    if isinstance(value, int):
        return value
    if not isinstance(value, str):
        return None
    text = nfc(value.strip())[:MAX_LABEL_BYTES]
    if text.lower() in NO_LABEL:
        return None
    match = WHOLE_AS_FLOAT.fullmatch(text)
    return match[1] if match else text


def sort_labels(labels: Iterable[str]) -> list[str]:
    """Return the names of classes in order: by number if all are whole numbers."""
    names = [*labels]
    if all(WHOLE.fullmatch(name) for name in names):
        return sorted(names, key=lambda name: (int(name), name))
    return sorted(names)


def check_spelling(where: str, labels: Iterable[str]) -> None:
    """Raise UserError if two labels are probably one class, written in two ways.

    Such are `1` and `01`, `Cat` and `cat`, and `red ant` and `red_ant`. Single letters may differ
    in case: `A` and `a`.
    """
    first: dict[str, str] = {}
    for label in sorted(labels):
        same = re.sub(r"[\s_-]+", " ", label.casefold()) if len(label) > 1 else label
        reason = "the same name but for capitals and the signs between words"
        if WHOLE.fullmatch(label):
            same = str(int(label))
            reason = "the same number"
        known = first.setdefault(same, label)
        if known != label:
            raise UserError(
                f"{where}: the labels {quoted(known)} and {quoted(label)} are {reason}, written in "
                "two ways; write it in one way, or list both in `classes` of a card"
            )


def check_meaning(where: str, labels: Iterable[str]) -> None:
    """Raise UserError if labels of a table look like no label (`N/A`), or like several (`cat|dog`).

    Args:
        where: What to call the table in errors.
        labels: All labels.
    """
    names = {*labels}
    remedy = "or name all classes with --set 'classes=[...]'"
    for label in sorted(names):
        if label.lower() in PERHAPS_NO_LABEL and len(names) > 1:
            raise UserError(
                f"{where}: the label {quoted(label)} can be a class, or say that there is none; "
                f"leave these rows out or blank, {remedy}"
            )
        parts = [part for part in re.split(r"[\s,;|/+&]+", label) if part]
        is_list = label[:1] in "[({" and label[-1:] in "])}" and len(label) > 1
        if is_list or (len(parts) > 1 and names >= {*parts}):
            raise UserError(
                f"{where}: the label {quoted(label)} looks like several labels, and an image has "
                f"one class; leave these rows out or name another column, {remedy}"
            )


class ClassNames:
    """Finds the class that a label means.

    Args:
        classes: The classes as the card lists them.
        numbers: `source.numbers` of the card.
        where: What to call the source in errors.
    """

    def __init__(self, classes: Sequence[str], numbers: str | None, where: str):
        self.classes = tuple(classes)
        self.numbers = numbers
        self.where = where
        self.by_name = {nfc(name): name for name in classes}

    def find(self, label: Label) -> str | None:
        """Return a class, or what the label says if no class is called so; None without a label.

        Raises:
            UserError: If the label is a number, could be the name of one class and the place of
                another, and the card does not say which.
        """
        if label is None:
            return None
        text = str(label)
        name = self.by_name.get(text)
        place = self._find_by_position(text)
        is_number = isinstance(label, int)
        if self.numbers == "names" or place == name:
            return name or _name_unlisted(text)
        if self.numbers == "places" and (is_number or name is None):
            return place or _name_unlisted(text)
        if place is not None and (is_number or name is None or self.numbers == "places"):
            raise self._ambiguous_error(text, name, place)
        return name or _name_unlisted(text)

    def _find_by_position(self, text: str) -> str | None:
        if not text.isdecimal() or len(text) > MAX_NUMBER_DIGITS:
            return None
        return self.classes[int(text)] if int(text) < len(self.classes) else None

    def _ambiguous_error(self, text: str, name: str | None, place: str) -> UserError:
        as_name = f"the class {quoted(name)}" if name else "a class that is not listed"
        return UserError(
            f"{self.where}: label {quoted(text)} can be {as_name}, or place {text} in the list of "
            f"classes, which is {quoted(place)}; {NUMBERS_HINT}"
        )


def _name_unlisted(text: str) -> str:
    """Return the label of no class, as digests of older versions have it."""
    is_number = text.isdecimal() and len(text) <= MAX_NUMBER_DIGITS
    return f"{NUMBER}{text}" if is_number else text
