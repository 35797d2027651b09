"""Common parts of all official layouts: labelled images, and the files that identify a layout."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pipeline.data.cards import MAX_CLASS_CHARACTERS
from pipeline.data.preparation.official import OfficialFolder
from pipeline.data.splits import Split
from workers.errors import UserError


class ImageBox(NamedTuple):
    """A box in pixels from the upper left corner of an image; right and bottom are exclusive."""

    left: float
    top: float
    right: float
    bottom: float


class LabelledImage(NamedTuple):
    """An image of the official files.

    Attributes:
        split: Split of the image.
        label: Class of the image.
        path: Path relative to the folder of the official files.
        box: Bounding box, or None.
    """

    split: Split
    label: str
    path: str
    box: ImageBox | None = None


@dataclass(frozen=True)
class OfficialLayout:
    """One layout of official files.

    Attributes:
        needs: Files and folders that identify the layout. Each is a tuple of alternative names, of
            which one must exist.
        read: Yields all labelled images, and raises `UserError` if a list is damaged.
    """

    needs: tuple[tuple[str, ...], ...]
    read: Callable[[OfficialFolder], Iterator[LabelledImage]]

    def missing(self, files: OfficialFolder) -> list[str]:
        """Return the required names that a folder lacks; of alternative names, the first."""
        return [names[0] for names in self.needs if files.first(names) is None]


def class_name(text: str, where: str) -> str:
    """Return the name of a class as the name of a folder: a slash becomes a dash.

    Args:
        text: The name.
        where: Name of the list, for the error.

    Raises:
        UserError: If the text cannot be the name of a folder.
    """
    name = text.strip().strip("/").replace("/", "-")
    is_folder = name.isprintable() and 0 < len(name) <= MAX_CLASS_CHARACTERS
    if not is_folder or name.startswith("."):
        raise UserError(
            f"{where}: {text!r:.60} is not a name of a class that a folder can have; fetch the "
            "official files again"
        )
    return name


def map_class_folders(names: Iterable[tuple[str, str]], where: str) -> dict[str, str]:
    """Map the number of each class in the lists to the name of the class folder.

    Args:
        names: Number and name of each class. The number is any text that the lists use for it.
        where: Name of the list, for the error.

    Raises:
        UserError: If two classes would share a folder, or a name cannot be the name of a folder.
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


def choose_split(is_train: bool) -> Split:
    """Return `train` or `test`."""
    return "train" if is_train else "test"


def look_up_value(table: dict[str, str], key: str, where: str) -> str:
    """Return the value of an image or class in a list; raise `UserError` if it is missing.

    Args:
        table: The list, from the image or class to the value.
        key: Number or name of the image or class.
        where: Name of the list, for the error.
    """
    value = table.get(key)
    if value is None:
        raise UserError(
            f"{where} says nothing about {key!r:.60}, which another list names; fetch the official "
            "files again"
        )
    return value


def parse_box(numbers: Sequence[str], where: str) -> ImageBox:
    """Parse a box from four numbers: left, top, width, height.

    Raises:
        UserError: If the values are not four finite numbers.
    """
    try:
        left, top, width, height = map(float, numbers)
    except ValueError:
        raise UserError(
            f"{where}: {' '.join(numbers)!r:.80} is not a box; fetch the official files again"
        ) from None
    return finite(ImageBox(left, top, left + width, top + height), where)


def finite(box: ImageBox, where: str) -> ImageBox:
    """Return a box; raise `UserError` if a side is not a finite number."""
    if not all(map(math.isfinite, box)):
        raise UserError(f"{where}: {tuple(box)} is not a box; fetch the official files again")
    return box
