"""Labels: the normal form of values in tables, tars and Parquet files, and their classes.

`normalize_label` converts a value to a label. `ClassNames` finds the class of a label.

The rules:

- A blank, `NaN`, `null` and `<NA>` (in any case) mean a missing label.
- Spaces around a label are removed, and names are compared in Unicode form NFC.
- `3`, `3.0` and the number 3 are equal labels; `03` is a different one.
- A label is the name of a class. It is a position in the list of classes only if the card has
  `source.numbers: places`, the file declares its classes (ClassLabel), or the data comes from
  scikit-learn or torchvision.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Sequence
from typing import Any

from pipeline.data.names import nfc, quoted
from workers.errors import UserError

Label = str | int | None
NO_LABEL = frozenset(("", "nan", "null", "<na>"))
# labels that may be classes or mean a missing label: an error asks the user
PERHAPS_NO_LABEL = frozenset(("na", "n/a", "none", "nil", "-1", "?", "-", "--", "missing"))
WHOLE = re.compile(r"-?[0-9]{1,9}")
WHOLE_AS_FLOAT = re.compile(r"(-?[0-9]{1,9})\.0+")
MAX_NUMBER_DIGITS = 18  # digits of a numeric label
NUMBER = "number "  # prefix of a numeric label without a class: `number 7`
MAX_LABEL_BYTES = 4096  # of a label in a file; also the maximum characters of a label
NUMBERS_HINT = (
    "set on the card what numbers are: `source.numbers: names` (of classes), or `places` (in the "
    "list of classes, from 0)"
)


def normalize_label(value: Any) -> Label:
    """Convert a value to the normal form of a label: a text or an integer; None if it is missing.

    Args:
        value: Value of a cell, a JSON field, a Parquet column or a member of a tar. A text that is
            not valid UTF-8 can be given as bytes.
    """
    if isinstance(value, bytes):
        value = value.decode("utf-8", "replace")
    if isinstance(value, bool):
        return int(value)
    if isinstance(value, float):
        if value != value:  # NaN
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
    """Sort class names, by number if all are integers."""
    names = [*labels]
    if all(WHOLE.fullmatch(name) for name in names):
        return sorted(names, key=lambda name: (int(name), name))
    return sorted(names)


def check_spelling(where: str, labels: Iterable[str]) -> None:
    """Check that no two labels are probably one class in two spellings.

    For example, `1` and `01`, `Cat` and `cat`, `'cat'` and `cat`, or `red ant` and `red_ant`.
    Single letters may differ in case: `A` and `a` are two classes.

    Raises:
        UserError: If there are such labels.
    """
    first: dict[str, str] = {}
    for label in sorted(labels):
        same = label
        if len(label) > 1:
            same = re.sub(r"[\s_-]+", " ", unicodedata.normalize("NFKC", label).casefold()).strip()
            same = re.sub(r"^(['\"])(.*)\1$", r"\2", same)
        reason = "the same name except for capitals, separators, quotes and the width of letters"
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
    """Check that no label can mean a missing label (`N/A`) or several labels (`cat|dog`).

    Args:
        where: Name of the table in errors.
        labels: All labels.

    Raises:
        UserError: If there is such a label.
    """
    names = {*labels}
    remedy = "or name all classes with --set 'classes=[...]'"
    for label in sorted(names):
        if label.lower() in PERHAPS_NO_LABEL and len(names) > 1:
            raise UserError(
                f"{where}: the label {quoted(label)} can be a class, or mean that there is none; "
                f"remove these rows or leave the label blank, {remedy}"
            )
        parts = [part for part in re.split(r"[\s,;|/+&]+", label) if part]
        is_list = label[:1] in "[({" and label[-1:] in "])}" and len(label) > 1
        if is_list or (len(parts) > 1 and names >= {*parts}):
            raise UserError(
                f"{where}: the label {quoted(label)} looks like several labels, but an image has "
                f"one class; remove these rows or name another column, {remedy}"
            )


class ClassNames:
    """Finds the class of a label.

    Args:
        classes: The classes of the card, in order.
        numbers: `source.numbers` of the card.
        where: Name of the source in errors.
    """

    def __init__(self, classes: Sequence[str], numbers: str | None, where: str):
        self.classes = tuple(classes)
        self.numbers = numbers
        self.where = where
        self.by_name = {nfc(name): name for name in classes}

    def find(self, label: Label) -> str | None:
        """Find the class of a label.

        Returns:
            The class, the text of a label without a class, or None if the label is missing.

        Raises:
            UserError: If the label is a number that can be both a name and the position of another
                class, and the card does not set `source.numbers`. With `places`, this is raised
                only for a text that is the name of one class and the position of another one.
        """
        if label is None:
            return None
        text = str(label)
        name = self.by_name.get(text)
        by_position = self._find_by_position(text)
        is_number = isinstance(label, int)
        if self.numbers == "names" or by_position == name:
            return name or _name_unlisted(text)
        if self.numbers == "places" and (is_number or name is None):
            return by_position or _name_unlisted(text)
        if by_position is not None and (is_number or name is None or self.numbers == "places"):
            raise self._ambiguous_error(text, name, by_position)
        return name or _name_unlisted(text)

    def _find_by_position(self, text: str) -> str | None:
        if not text.isdecimal() or len(text) > MAX_NUMBER_DIGITS:
            return None
        return self.classes[int(text)] if int(text) < len(self.classes) else None

    def _ambiguous_error(self, text: str, name: str | None, by_position: str) -> UserError:
        as_name = f"the class {quoted(name)}" if name else "a class that is not listed"
        return UserError(
            f"{self.where}: label {quoted(text)} can be {as_name}, or place {text} in the list of "
            f"classes, which is {quoted(by_position)}; {NUMBERS_HINT}"
        )


def _name_unlisted(text: str) -> str:
    """Return the text of a label without a class; a number 7 becomes `number 7`.

    This form must not change, because stored digests contain it.
    """
    is_number = text.isdecimal() and len(text) <= MAX_NUMBER_DIGITS
    return f"{NUMBER}{text}" if is_number else text
