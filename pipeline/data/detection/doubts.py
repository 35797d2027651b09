"""Doubts about a reading: names of files and folders that speak against it.

A reading that is possible may still be wrong: `test_images` can be a class or the test images. Each
check looks at the images as they were read, and raises an error that names the setting which
decides. A person who has given that setting is not asked again.
"""

from __future__ import annotations

import posixpath
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import NamedTuple

from pipeline.data.detection.data_set import DataSet, Request, splits_setting
from pipeline.data.detection.words import (
    NO_CLASS_TOKENS,
    NO_CLASSES,
    NO_IMAGE_TOKENS,
    NO_LABEL_TABLES,
    PERHAPS_NO_CLASSES,
    SPLIT_LISTS,
    is_called,
    is_part,
)
from pipeline.data.file_kinds import IMAGE_FILES
from pipeline.data.formats import format_of
from pipeline.data.formats.folder import LABEL
from pipeline.data.listing import HIDDEN, Entry, Folder
from pipeline.data.names import counted, listed, nfc, printable, quoted, suffix_of
from pipeline.data.splits import (
    IGNORE,
    Role,
    SplitUnclear,
    is_weak,
    rest_is_generic,
    role_in,
    role_of,
    tokens_of,
)

MOST_LOOKED_AT = 200_000  # images
LEAST_NAMES = 2  # files whose names have a word, before it is a doubt
LEAST_SHARE = 0.01  # of the images
SHARE_PAIRED = 0.9  # of the images of two classes that are called alike
LEAST_PAIRED = 4
MOST_PATHS = 20  # that a command names
MOST_COMPARED = 300  # classes whose names of images are compared
LISTS = frozenset((".txt", ".csv", ".tsv", ".json", ".jsonl", ".lst", ".mat", ".npy", ".pkl"))
TABLES = {"train": ["train.csv"], "test": ["test.csv"]}
SIZE = re.compile(r"(?<![0-9])[0-9]{2,4}x[0-9]{2,4}(?![0-9])")
STRANGE = (
    "_",
    "@",
    "~",
    "#recycle",
    "#snapshot",
)  # beginnings of names that people do not give to classes


class Seen(NamedTuple):
    """An image as it was read. path: below the source; label: empty if there is none."""

    path: str
    split: str
    label: str

    @property
    def folders(self) -> list[str]:
        """The names of its folders."""
        return self.path.split("/")[:-1]

    @property
    def stem(self) -> str:
        """Its name without the extension."""
        return self.path.rpartition("/")[2].rpartition(".")[0]


def check_reading(request: Request, data_set: DataSet, files: Sequence[Entry]) -> None:
    """Raise SplitUnclear if names speak against the way in which a data set was read.

    Args:
        request: What the person asked, with the settings that are given.
        data_set: Of folders, or of a table.
        files: All files of the place that the person gave.
    """
    images = [*_images_of(data_set)]
    check = Checks(request, data_set, images)
    is_folder = data_set.card.source.format == "folder"
    if not {"split", "splits"} & request.given.keys():
        check.splits()
        if "format" not in request.given:
            check_lists(request, [data_set], files)
        has_left_out = any(note.startswith("table ") for note in data_set.notes)
        if not is_folder and not has_left_out:
            check.unread(files)
    if "splits" not in request.given and not request.classes:
        check.folders()
        check.names()
        if is_folder:
            check.classes()
            check.pairs()


def _images_of(data_set: DataSet) -> Iterator[Seen]:
    list_items = format_of(data_set.card).list_items
    if list_items is None:
        return
    number = 0
    for item in list_items(data_set.card, [*data_set.entries]):
        if item.problem is None and item.split != IGNORE and number < MOST_LOOKED_AT:
            number += 1
            yield Seen(nfc(item.name), item.split, "" if item.label is None else str(item.label))


def check_lists(request: Request, data_sets: Sequence[DataSet], files: Sequence[Entry]) -> None:
    """Raise SplitUnclear if a file is called like a list of a split, and was not read.

    If the data sets have test images anyway, that is no doubt.

    Args:
        request: What the person asked.
        data_sets: That were read.
        files: All files of the place that the person gave.
    """
    if any({"val", "test"} & data_set.counts.keys() for data_set in data_sets):
        return
    source = data_sets[0].card.source
    for entry in files:
        folder, _, base = entry.name.rpartition("/")
        stem = base.rpartition(".")[0]
        tokens = {token.lower() for token in tokens_of(stem)}
        says = role_of(folder.rpartition("/")[2]) or len({role_of(t) for t in tokens} - {None})
        if entry.problem == HIDDEN or suffix_of(entry.name) not in LISTS or not entry.size:
            continue
        if tokens & NO_LABEL_TABLES or not (says or tokens & SPLIT_LISTS):
            continue
        if base == posixpath.basename(source.path) or entry.name in source.parts_of("train"):
            continue
        notes = [n for one in data_sets for n in one.notes if n.startswith("table ")]
        if any(quoted(entry.name) in note for note in notes):
            continue
        raise SplitUnclear(
            f"{printable(source.path)}: {quoted(entry.name)} looks like a list of a split, and is "
            "not understood; name the splits in a column of a table, or by folders; if it is no "
            f"such list: `{request.command(f'source.format={source.format}')}`"
        )


def check_siblings(request: Request, where: str, folders: Sequence[Folder]) -> None:
    """Raise SplitUnclear if folders that would be a data set each may be parts of one.

    Such have folders of the same names, or names of splits, or hold what are no classes.

    Args:
        request: What the person asked.
        where: What to call the folder that holds them.
        folders: That hold folders of images.
    """
    below = {folder: {child.base_name for child in folder.with_images} for folder in folders}
    named = [folder.base_name for folder in folders]
    shared: set[str] = set()
    for first, second in combinations(below, 2):
        shared |= below[first] & below[second]
    parts = {name for names in below.values() for name in names if is_part(name)}
    words = [name for name in named if role_in(name) and rest_is_generic(name)]
    if not (shared or parts or words):
        return
    what = f"have folders of the same names ({listed(sorted(shared))})"
    if not shared:
        what = f"hold folders such as {listed(sorted(parts))}" if parts else "look like splits"
    paths = [posixpath.join(request.path, folder.name) for folder in folders]
    each = f"`{request.program} {shlex.join(['init', *paths[:MOST_PATHS]])}`"
    top = posixpath.dirname(folders[0].name) or "."
    as_classes = request.command(splits_setting({"train": [top]}))
    splits = {"train": [folders[0].name], "test": [folders[-1].name]}
    raise SplitUnclear(
        f"{where}: {listed(named)} {what}; if they are classes, say `{as_classes}`; if they are "
        f"splits, say which, as in `{request.command(splits_setting(splits))}`; if they are a task "
        f"each: {each}"
    )


class Checks:
    """The checks of one data set.

    Args:
        request: What the person asked.
        data_set: That was read.
        images: Of it.
    """

    def __init__(self, request: Request, data_set: DataSet, images: Sequence[Seen]):
        self.request = request
        self.source = data_set.card.source
        self.images = images
        self.where = printable(self.source.path)
        self.is_folder = self.source.format == "folder"
        self.labels = {image.label for image in images}
        self.splits_read = {image.split for image in images}

    def _command(self, splits: Mapping[str, Iterable[str]]) -> str:
        return f"`{self.request.command(splits_setting({s: [*p] for s, p in splits.items()}))}`"

    def _as_read(self, ignore: Iterable[str] = ()) -> dict[str, list[str]]:
        """Return the splits of the card, and what else is left out."""
        splits = {split: [*self.source.parts_of(split)] for split in self.source.named_splits()}
        left_out = [*self.source.parts_of(IGNORE), *ignore]
        return splits | ({IGNORE: left_out} if left_out else {})

    # ---- splits ----------------------------------------------------------------------------------
    def splits(self) -> None:
        """Raise SplitUnclear if images lie where a word names another split than theirs."""
        places: dict[str, Role] = {}  # folders that say a split -> which
        against: dict[str, Seen] = {}
        names: Counter[Role] = Counter()
        for image in self.images:
            for depth, part in enumerate(image.folders):
                role = self._role(part, is_label=self.is_folder and part == image.label)
                if role is None:
                    continue
                place = "/".join(image.folders[: depth + 1])
                places[place] = role
                if not self._agrees(role, image.split):
                    against.setdefault(place, image)
            names.update(self._roles_of_name(image))
        roles = {*places.values()}
        if against and not (len(roles) == 1 and self._says_splits_elsewhere()):
            raise self._other_split(*next(iter(against.items())), places)
        for role, number in names.items():
            if number >= max(LEAST_NAMES, LEAST_SHARE * len(self.images)):
                raise self._split_in_names(role, number)

    def _role(self, part: str, is_label: bool) -> Role | None:
        if is_weak(part) or not role_in(part):
            return None
        return role_in(part) if not is_label or rest_is_generic(part) else None

    def _roles_of_name(self, image: Seen) -> set[Role]:
        """Return the splits other than its own that the beginning or end of a name says."""
        tokens = [token for token in tokens_of(image.stem) if not token.isdecimal()]
        ends = [token for token in {*tokens[:1], *tokens[-1:]} if not is_weak(token)]
        roles = {role for token in ends if (role := role_of(token)) is not None}
        return {role for role in roles if not self._agrees(role, image.split)}

    def _agrees(self, role: Role, split: str) -> bool:
        """Whether a word may stand above images of a split."""
        if role == "held out":
            return split != "train"
        serves_as_test = role == "val" and "val" not in self.splits_read
        return role == split or (serves_as_test and split == "test")

    def _says_splits_elsewhere(self) -> bool:
        """Whether a column or several tables say the splits, and not the folders."""
        source = self.source
        by_column = source.split is not None and source.split != source.image
        return not self.is_folder and (by_column or len(source.named_splits()) > 1)

    def _other_split(self, place: str, image: Seen, places: Mapping[str, Role]) -> SplitUnclear:
        remedy = f"if that is no split, say `{self.request.command('source.split=null')}`"
        if self.is_folder:
            as_it_is = self._command(self._as_read())
            remedy = f"if that is no split, say {as_it_is}"
            by_split: dict[str, list[str]] = {}
            for folder, role in places.items():
                by_split.setdefault("test" if role == "held out" else role, []).append(folder)
            if "train" in by_split and len(by_split) > 1:
                remedy = f"if they are splits, say {self._command(by_split)}; {remedy}"
        return SplitUnclear(
            f"{self.where}: {quoted(image.path)} would be a {image.split} image, and "
            f"{quoted(place)} looks like another split; {remedy}"
        )

    def _split_in_names(self, role: Role, number: int) -> SplitUnclear:
        as_it_is = f"`{self.request.command('source.split=null')}`"
        remedy = "add a column `split`"
        if self.is_folder:
            as_it_is = self._command(self._as_read())
            splits = {"train": [f"{LABEL}/*train*"], "test": [f"{LABEL}/*test*"]}
            remedy = f"say which are which, as in {self._command(splits)}"
        return SplitUnclear(
            f"{self.where}: the names of {counted(number, 'image')} say {role}, and they would not "
            f"be {role} images; {remedy}, or that it is no split: {as_it_is}"
        )

    def unread(self, files: Sequence[Entry]) -> None:
        """Raise SplitUnclear if images that no row names lie where a word names test images."""
        if self.splits_read & {"val", "test"}:
            return
        read = {image.path.rpartition("/")[2] for image in self.images}
        for entry in files:
            folders = entry.name.split("/")[:-1]
            role = next((role for part in folders if (role := self._role(part, False))), None)
            is_image = not entry.problem and suffix_of(entry.name) in IMAGE_FILES
            if (
                is_image
                and role not in (None, "train")
                and folders
                and nfc(entry.name.rpartition("/")[2]) not in read
            ):
                raise SplitUnclear(
                    f"{self.where}: no row names {quoted(entry.name)}, which looks like a {role} "
                    "image; name the table of each split, as in "
                    f"`{self.request.command(splits_setting(TABLES))}`, or say that there is none: "
                    f"`{self.request.command('source.split=null')}`"
                )

    # ---- what is no photo ------------------------------------------------------------------------
    def folders(self) -> None:
        """Raise SplitUnclear if some images lie in a folder of masks, thumbnails or the like."""
        inside: Counter[str] = Counter()
        for image in self.images:
            below = image.folders
            if self.is_folder and image.label in below:
                below = below[below.index(image.label) + 1 :]
            inside.update({part for part in below if _is_no_photo(part)})
        for part, number in inside.items():
            if number == len(self.images):
                continue
            remedy = "take these rows out of the table"
            if self.is_folder:
                splits = self._as_read()
                prefixes = [p for p in splits["train"] if p != "." and LABEL not in p] or [""]
                ignore = [posixpath.join(p, LABEL, part) for p in prefixes]
                remedy = f"leave them out with {self._command(self._as_read(ignore))}"
            raise SplitUnclear(
                f"{self.where}: {counted(number, 'image')} lie in folders {quoted(part)}, which "
                f"can hold something other than photos to learn from; {remedy}, or name all "
                "classes with --set 'classes=[...]'"
            )

    def names(self) -> None:
        """Raise SplitUnclear if files are called like others with a word such as `mask`."""
        stems: dict[str, set[str]] = {}
        for image in self.images:
            stems.setdefault(posixpath.dirname(image.path), set()).add(image.stem)
        words: Counter[str] = Counter()
        for of_folder in stems.values():
            for stem in of_folder:
                word = _extra_word(stem)
                if word and _without(stem, word) in of_folder:
                    words[word.lower()] += 1
        for word, number in words.items():
            if number < max(LEAST_NAMES, LEAST_SHARE * len(self.images)):
                continue
            remedy = "take them out of the table"
            if self.is_folder:
                ignore = [f"{LABEL}/*{word}*"]
                remedy = f"leave them out with {self._command(self._as_read(ignore))}"
            raise SplitUnclear(
                f"{self.where}: {counted(number, 'image')} are called like another one and "
                f"{quoted(word)}, and can be something other than photos to learn from; {remedy}, "
                "or name all classes with --set 'classes=[...]'"
            )

    def classes(self) -> None:
        """Raise SplitUnclear if some classes are called like folders of something else."""
        strange = {name for name in self.labels if _is_no_class(name) or is_part(name)}
        generic = {name for name in strange if is_part(name)}
        if not strange or (strange == self.labels and not generic):
            return
        raise self._no_class(sorted(strange))

    def pairs(self) -> None:
        """Raise SplitUnclear if the images of two classes are called alike, and not just by
        numbers."""
        stems: dict[str, set[str]] = {}
        for image in self.images:
            stems.setdefault(image.label, set()).add(image.stem)
        named = {label: of for label, of in stems.items() if len(of) >= LEAST_PAIRED}
        named = {label: of for label, of in named.items() if not _are_counted(of)}
        if len(named) > MOST_COMPARED:
            return
        paired: list[tuple[str, str]] = []
        for (first, of_first), (second, of_second) in combinations(sorted(named.items()), 2):
            shared = len(of_first & of_second)
            if shared >= SHARE_PAIRED * max(len(of_first), len(of_second)):
                paired.append((first, second))
        is_habit = len(paired) > 1 and len(paired) == len(stems) * (len(stems) - 1) // 2
        if paired and not is_habit:  # front.jpg and back.jpg in each class are a habit
            raise self._no_class(paired[0], "have images of the same names")

    def _no_class(self, names: Sequence[str], why: str = "") -> SplitUnclear:
        train = [part for part in self.source.parts_of("train") if LABEL not in part] or ["."]
        ignore = [posixpath.normpath(posixpath.join(train[0], name)) for name in names[-1:]]
        command = self._command(self._as_read(ignore))
        why = why or "can be something other than classes"
        return SplitUnclear(
            f"{self.where}: folders {listed(names)} {why}; leave one out as in {command}, or name "
            "all classes with --set 'classes=[...]'"
        )


def _is_no_photo(name: str) -> bool:
    return name.startswith(("@", ".")) or _is_no_class(name)


def _is_no_class(name: str) -> bool:
    """Whether a folder is called like one of masks, thumbnails, or images without labels."""
    tokens = {token.lower() for token in tokens_of(name)}
    return (
        name.startswith(STRANGE)
        or bool(tokens & NO_CLASS_TOKENS)
        or is_called(name, NO_CLASSES | PERHAPS_NO_CLASSES)
    )


def _extra_word(stem: str) -> str:
    """Return a word at the beginning or end of a name by which people mark what is no photo."""
    size = SIZE.search(stem)
    if size is not None:
        return size[0]
    tokens = tokens_of(stem)
    return next((t for t in (*tokens[:1], *tokens[-1:]) if t.lower() in NO_IMAGE_TOKENS), "")


def _without(stem: str, word: str) -> str:
    before, _, after = stem.partition(word) if stem.startswith(word) else stem.rpartition(word)
    return after.lstrip("_-. ") if not before else f"{before.rstrip('_-. ')}{after}"


def _are_counted(stems: Iterable[str]) -> bool:
    """Whether names are numbers that follow each other, as they are in each class by itself."""
    numbers = sorted(int(match[0]) for stem in stems if (match := re.search(r"[0-9]+$", stem)))
    if len(numbers) < len([*stems]):
        return False
    return numbers[-1] - numbers[0] < 2 * len(numbers)
