"""What all official layouts share: labelled images, and by which files a layout is recognised."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pipeline.data.cards import MAX_CLASS_CHARACTERS
from pipeline.data.preparation.official import OfficialFolder
from pipeline.data.splits import Split
from workers.errors import UserError


class Box(NamedTuple):
    """A part of an image in pixels from its upper left corner; right and bottom are beyond it."""

    left: float
    top: float
    right: float
    bottom: float


class LabelledImage(NamedTuple):
    """An image of the official files. path: below their folder. box: None where they have none."""

    split: Split
    label: str
    path: str
    box: Box | None = None


@dataclass(frozen=True)
class Layout:
    """One layout of official files.

    needs: files and folders that it is recognised by, each a tuple of names one of which is there.
    read: yields all labelled images. Raise UserError where a list is damaged.
    """

    needs: tuple[tuple[str, ...], ...]
    read: Callable[[OfficialFolder], Iterator[LabelledImage]]

    def missing(self, files: OfficialFolder) -> list[str]:
        """Return what a folder lacks; of alternatives, the first one is named."""
        return [names[0] for names in self.needs if files.first(names) is None]


def class_name(text: str, where: str) -> str:
    """Return the name of a class as a folder can have it: a slash becomes a dash.

    where: for the error. Raise UserError where the text cannot be the name of a folder.
    """
    name = text.strip().strip("/").replace("/", "-")
    is_folder = name.isprintable() and 0 < len(name) <= MAX_CLASS_CHARACTERS
    if not is_folder or name.startswith("."):
        raise UserError(
            f"{where}: {text!r:.60} is no name of a class that a folder can have; fetch the "
            "official files again"
        )
    return name


def class_names(names: Iterable[tuple[str, str]], where: str) -> dict[str, str]:
    """Return the folder of each class by its number in the lists.

    names: number and name. Raise UserError where two classes would share a folder.
    """
    folders: dict[str, str] = {}
    numbers: dict[str, str] = {}
    for number, text in names:
        folder = class_name(text, where)
        other = numbers.setdefault(folder, number)
        if other != number:
            raise UserError(
                f"{where}: classes {other!r:.60} and {number!r:.60} are both called "
                f"{folder!r:.60}; fetch the official files again"
            )
        folders[number] = folder
    return folders


def split_of(is_train: bool) -> Split:
    """Return the split of an image in a list that says whether it is for training."""
    return "train" if is_train else "test"


def value_of(table: dict[str, str], key: str, where: str) -> str:
    """Return what a list says of an image or class. Raise UserError where it says nothing."""
    value = table.get(key)
    if value is None:
        raise UserError(
            f"{where} says nothing of {key!r:.60}, which another list names; fetch the official "
            "files again"
        )
    return value


def box_of(numbers: Sequence[str], where: str) -> Box:
    """Return the box of four numbers in a list: left, top, width, height.

    Raise UserError where they are none.
    """
    try:
        left, top, width, height = map(float, numbers)
    except ValueError:
        raise UserError(
            f"{where}: {' '.join(numbers)!r:.80} is no box; fetch the official files again"
        ) from None
    return finite(Box(left, top, left + width, top + height), where)


def finite(box: Box, where: str) -> Box:
    """Return a box. Raise UserError where one of its sides is no number of pixels."""
    if not all(map(math.isfinite, box)):
        raise UserError(f"{where}: {tuple(box)} is no box; fetch the official files again")
    return box
