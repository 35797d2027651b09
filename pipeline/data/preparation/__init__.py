"""Convert the official files of a data set to the folders that its card reads.

`prepare` is the command `accrete data prepare`. The user has downloaded the official files by hand.
To add a layout, add a module to this package and its name to `OfficialLayout` in archives.py. The
module defines `LAYOUTS`, the variants in which the files are distributed. `find_files` imports the
module.
"""

from __future__ import annotations

import os
import shlex
from collections import Counter
from collections.abc import Iterator
from importlib import import_module
from typing import NamedTuple

from pipeline.data.archives import Archive
from pipeline.data.cards import Card
from pipeline.data.listing import absolute_uri
from pipeline.data.names import get_suffix, printable
from pipeline.data.preparation.base import LabelledImage, OfficialLayout
from pipeline.data.preparation.official import OfficialFolder
from pipeline.data.preparation.target import TargetFolder
from pipeline.data.splits import Split
from workers.errors import UserError
from workers.storage.artifact import is_local

MAX_NAMED = 8  # names that a sentence lists
MAX_FOLDERS = 2000  # folders per level to search for the official files
ARCHIVES = {".zip": "unzip", ".tar": "tar -xf", ".tgz": "tar -xf", ".gz": "tar -xf"}


class Prepared(NamedTuple):
    """The prepared folder, with the number of images by split, and of classes."""

    folder: str
    counts: dict[str, int]
    num_classes: int


def prepare(card: Card, source: str, folder: str | None, copy: bool) -> Prepared:
    """Sort the official images of a card into class folders.

    The folders get links or copies of the images, or crops if the card says so (`Archive.crop`).

    Args:
        card: The card.
        source: Folder of the unpacked files.
        folder: Folder to fill. None: the folder of the card's source.
        copy: Write copies instead of links.

    Raises:
        UserError: If files are missing or do not match the card. In this case, nothing is written.
    """
    archive = require_layout(card)
    folder = target_folder(card, folder)
    target = TargetFolder(folder, get_split_folders(card))
    files, layout = find_files(card, archive, source)
    images = [*wanted_images(card, layout.read(files))]
    check_counts(card, files, images)
    check_images(files, images)
    target.write(files, images, crop=archive.crop, copy=copy)
    counts = Counter(image.split for image in images)
    num_classes = len({image.label for image in images})
    return Prepared(folder, {"train": counts["train"], "test": counts["test"]}, num_classes)


def require_layout(card: Card) -> Archive:
    """Return the official files of a card; raise UserError if the card needs no preparation."""
    if card.archive is not None and card.archive.layout is not None:
        return card.archive
    state = "is not fetched by hand"
    if card.archive is not None:
        path = absolute_uri(card.source.path)
        state = f"reads the unpacked files of {card.archive.address} as they are, from {path}"
    raise UserError(f"card {card.name!r} {state}; name it in a stream, it needs no preparation")


def get_split_folders(card: Card) -> dict[Split, str]:
    """Return the sub-folder of each split; raise UserError if a split is not one sub-folder."""
    folders: dict[Split, str] = {}
    official: tuple[Split, ...] = ("train", "test")
    for split in official:
        folder = card.source.splits.get(split, "")
        if card.source.format != "folder" or folder in ("", ".", "..") or "/" in folder:
            raise UserError(
                f"card {card.name!r}: source.splits.{split} is {folder!r:.60}, and images are "
                "sorted into a sub-folder for each split of a source of format folder; write "
                "splits: {train: train, test: test}"
            )
        folders[split] = folder
    return folders


def target_folder(card: Card, folder: str | None) -> str:
    """Return the absolute path of the folder to fill; raise `UserError` if it is not on a disk."""
    path = folder or absolute_uri(card.source.path)
    if not is_local(path):
        raise UserError(
            f"{path} is on no disk of this machine, and images are sorted on one; name a folder "
            "with --to"
        )
    return os.path.abspath(path)


# ---- listing -------------------------------------------------------------------------------------
def find_files(card: Card, archive: Archive, source: str) -> tuple[OfficialFolder, OfficialLayout]:
    """Find the official files at `source`, or up to two folders below.

    Returns:
        The folder, and the first layout that it matches.

    Raises:
        UserError: If these files are missing; the message lists the existing and required files.
    """
    if not os.path.isdir(source):
        raise _no_folder(source, archive)
    layouts: tuple[OfficialLayout, ...] = import_module(f"{__name__}.{archive.layout}").LAYOUTS
    nearest = layouts[0].missing(OfficialFolder(source))
    for path in _folders(source):
        files = OfficialFolder(path)
        for layout in layouts:
            missing = layout.missing(files)
            if not missing:
                return files, layout
            if len(missing) < len(nearest):
                nearest = missing
    names = sorted(os.listdir(source))
    listed = ", ".join(map(printable, names[:MAX_NAMED])) or "nothing"
    more = ", ..." if len(names) > MAX_NAMED else ""
    raise UserError(
        f"{printable(source)} holds {listed}{more}, and card {card.name!r} needs also "
        f"{', '.join(nearest)}; fetch them from {archive.address} and unpack them there"
    )


def _no_folder(source: str, archive: Archive) -> UserError:
    command = ARCHIVES.get(get_suffix(source))
    if os.path.isfile(source) and command:
        return UserError(
            f"{printable(source)} is an archive; unpack it, and name the folder: "
            f"{command} {shlex.quote(source)}"
        )
    return UserError(
        f"{printable(source)} is not a folder; name the one that holds the unpacked files of "
        f"{archive.address}"
    )


def _folders(source: str) -> Iterator[str]:
    """Yield a folder, then its subfolders, then their subfolders."""
    level = [source]
    for depth in range(3):
        yield from level
        if depth < 2:
            level = [path for folder in level for path in _subfolders(folder)][:MAX_FOLDERS]


def _subfolders(folder: str) -> list[str]:
    with os.scandir(folder) as entries:
        paths = [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]
    return sorted(path for path in paths if not os.path.basename(path).startswith("."))


# ---- checks against the card ---------------------------------------------------------------------
def wanted_images(card: Card, images: Iterator[LabelledImage]) -> Iterator[LabelledImage]:
    """Yield the images with classes on the card, or all images if it lists no classes."""
    if card.classes == ("from_source",):
        yield from images
        return
    classes = set(card.classes)
    for image in images:
        if image.label in classes:
            yield image


def check_counts(card: Card, files: OfficialFolder, images: list[LabelledImage]) -> None:
    """Raise UserError if the lists have other numbers of images or classes than the card."""
    counts = Counter(image.split for image in images)
    num_classes = len({image.label for image in images})
    named = f"{counts['train']} train and {counts['test']} test images of {num_classes} classes"
    expected = f"{card.num_classes} classes"
    is_same = card.num_classes in (None, num_classes)
    if card.counts is not None:
        expected = f"{card.counts.train} train and {card.counts.test} test images of {expected}"
        promised = card.counts.by_split()
        is_same &= promised == {split: counts[split] for split in promised}
    if not is_same or not images:
        raise UserError(
            f"{printable(files.path)} has {named}, and card {card.name!r} says {expected}; fetch "
            "the official files again, or fix `counts` and `num_classes` of the card"
        )


def check_images(files: OfficialFolder, images: list[LabelledImage]) -> None:
    """Raise UserError if images in the lists are missing or are outside of the folder."""
    problems: list[str] = []
    for image in images:
        problem = files.find_problem(image.path)
        if problem is not None:
            problems.append(f"{image.path[:200]!r} {problem}")
    if problems:
        raise UserError(
            f"{len(problems)} of {len(images)} images that the lists in {printable(files.path)} "
            f"name cannot be used: {problems[0]}; fetch the archive of the images again, and "
            "unpack all of it there"
        )
