"""Check that file and folder names do not contradict the layout of a detected data set.

A possible layout may still be wrong: for example, `test_images` can be a class or the test images.
Each check examines the images of the data set, or files that it does not read. Its error names the
setting with which the user can decide. A check is skipped if the user has given this setting.
"""

from __future__ import annotations

import posixpath
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import NamedTuple

from pipeline.config.text import format_count
from pipeline.data.detection.data_set import DataSet, Request, format_splits
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
from pipeline.data.file_kinds import COLUMN_FILES, IMAGE_FILES, TAR_SUFFIX, is_packed
from pipeline.data.formats import get_format
from pipeline.data.formats.folder import LABEL
from pipeline.data.listing import HIDDEN, Entry, Folder
from pipeline.data.names import get_suffix, listed, nfc, printable, quoted
from pipeline.data.splits import (
    IGNORE,
    Role,
    SplitUnclear,
    find_role,
    is_generic_split_name,
    is_weak,
    parse_role,
    tokenize_name,
)

MAX_IMAGES = 200_000  # maximum number of images to check
# An error needs this number of suspicious file names, and this share of all images.
MIN_NAMES = 2
MIN_SHARE = 0.01
SHARE_PAIRED = 0.9  # minimum share of equal image names of two classes, for an error
MIN_PAIRED = 4  # a class with fewer image names is not compared with others
MAX_PATHS = 20  # paths in a suggested command
MAX_COMPARED = 300  # if there are more classes, no class is compared with others
# suffixes of files that can list the images of a split
LISTS = frozenset((".txt", ".csv", ".tsv", ".json", ".jsonl", ".lst", ".mat", ".npy", ".pkl"))
# example of `source.splits` in an error
TABLES = {"train": ["train.csv"], "test": ["test.csv"]}
SIZE = re.compile(r"(?<![0-9])[0-9]{2,4}x[0-9]{2,4}(?![0-9])")  # such as `224x224` in a file name
ARCHIVES = frozenset((*COLUMN_FILES, TAR_SUFFIX))  # files with images that some format reads
FORMAT_FILES = {  # format -> files of ARCHIVES that it reads
    "parquet": frozenset(COLUMN_FILES),
    "tar": frozenset((TAR_SUFFIX,)),
    "webdataset": frozenset((TAR_SUFFIX,)),
    "folder": frozenset[str](),
    "csv": frozenset(COLUMN_FILES),  # as tables
}
STRANGE = ("_", "@", "~", "#recycle", "#snapshot")  # unusual prefixes of class names


class ReadImage(NamedTuple):
    """An image of the data set.

    Attributes:
        path: Path of the image below the source.
        split: Its split.
        label: Its label, or "" if it has none.
    """

    path: str
    split: str
    label: str

    @property
    def folders(self) -> list[str]:
        """The folders on its path."""
        return self.path.split("/")[:-1]

    @property
    def stem(self) -> str:
        """Its name without the extension."""
        return self.path.rpartition("/")[2].rpartition(".")[0]


def check_reading(request: Request, data_set: DataSet, files: Sequence[Entry]) -> None:
    """Check that file and folder names do not contradict the detected layout.

    Args:
        request: The user's request with its settings.
        data_set: The only data set below the path, in any format.
        files: All files below the requested path.

    Raises:
        SplitUnclear: If names contradict the layout.
    """
    images = [*_list_readable_images(data_set)]
    checks = Checks(request, data_set, images)
    is_folder = data_set.card.source.format == "folder"
    if not {"split", "splits"} & request.given.keys():
        checks.check_splits()
        if "format" not in request.given:
            check_lists(request, [data_set], files)
        # the note of `SourceFolder._choose_table_or_folders` on a table that is not read
        has_left_out = any(note.startswith("table ") for note in data_set.notes)
        if not is_folder and not has_left_out:
            checks.check_unread(files)
    if "splits" not in request.given and not request.classes:
        checks.check_folders()
        checks.check_file_names()
        if is_folder:
            checks.check_classes()
            checks.check_pairs()


def _list_readable_images(data_set: DataSet) -> Iterator[ReadImage]:
    """Yield the first MAX_IMAGES images; none if the format lacks `list_items`."""
    list_items = get_format(data_set.card).list_items
    if list_items is None:
        return
    number = 0
    for item in list_items(data_set.card, [*data_set.entries]):
        if item.problem is None and item.split != IGNORE and number < MAX_IMAGES:
            number += 1
            yield ReadImage(
                nfc(item.name), item.split, "" if item.label is None else str(item.label)
            )


def check_lists(request: Request, data_sets: Sequence[DataSet], files: Sequence[Entry]) -> None:
    """Check that no unread file looks like the list of a split, for example `test_list.txt`.

    Nothing is checked if one of the data sets has validation or test images.

    Args:
        request: The user's request.
        data_sets: The detected data sets.
        files: All files below the requested path.

    Raises:
        SplitUnclear: If a file looks like a list.
    """
    if any({"val", "test"} & data_set.counts.keys() for data_set in data_sets):
        return
    source = data_sets[0].card.source
    for entry in files:
        folder, _, base = entry.name.rpartition("/")
        stem = base.rpartition(".")[0]
        tokens = {token.lower() for token in tokenize_name(stem)}
        has_role = parse_role(folder.rpartition("/")[2]) or any(map(parse_role, tokens))
        if entry.problem == HIDDEN or get_suffix(entry.name) not in LISTS or not entry.size:
            continue
        if tokens & NO_LABEL_TABLES or not (has_role or tokens & SPLIT_LISTS):
            continue
        if base == posixpath.basename(source.path) or entry.name in source.list_parts("train"):
            continue
        # a table that was left out on purpose, see `SourceFolder._choose_table_or_folders`
        notes = [n for one in data_sets for n in one.notes if n.startswith("table ")]
        if any(quoted(entry.name) in note for note in notes):
            continue
        raise SplitUnclear(
            f"{printable(source.path)}: {quoted(entry.name)} looks like a list of a split, and "
            "cannot be read; give the splits as folders or as a column of a table; if it is not a "
            f"such list: `{request.command(f'source.format={source.format}')}`"
        )


def check_unread_parts(request: Request, data_set: DataSet, files: Sequence[Entry]) -> None:
    """Check that no link or archive that is not read looks like the images of a split.

    Data sets that have validation or test images are not checked.

    Args:
        request: The user's request.
        data_set: The data set.
        files: All files below the requested path.

    Raises:
        SplitUnclear: If there is one, for example `test.zip` beside class folders.
    """
    settings = {"split", "splits", "format"} & request.given.keys()
    if settings or {"val", "test"} & data_set.counts.keys():
        return
    source = data_set.card.source
    for entry in files:
        suffix = get_suffix(entry.name)
        is_link = "folder outside" in (entry.problem or "")
        is_other_kind = is_packed(entry.name) or suffix in ARCHIVES - FORMAT_FILES.get(
            source.format, ARCHIVES
        )
        if not is_link and not is_other_kind:
            continue
        *folders, base = entry.name.split("/")
        names = [*folders, base.partition(".")[0] if not is_link else base]
        roles = {parse_role(name) for name in names if not is_weak(name)}
        unpacked = f"{entry.name.partition('.')[0]}/"
        if not is_link and any(one.name.startswith(unpacked) for one in files):
            continue
        if roles & {"val", "test", "held out"}:
            remedy = "copy the images here" if is_link else "unpack it, or give its path"
            raise SplitUnclear(
                f"{printable(source.path)}: {quoted(entry.name)} looks like the images of a split, "
                f"and is not read; {remedy}; if it is not meant: "
                f"`{request.command(f'source.format={source.format}')}`"
            )


def check_siblings(request: Request, where: str, folders: Sequence[Folder]) -> None:
    """Check that sibling folders are separate data sets, not parts of one data set.

    Folders may be parts of one data set if their subfolders have equal names, if the folders are
    named like splits, or if a subfolder looks like a part, for example `batch_1`.

    Args:
        request: The user's request.
        where: Name of the parent folder in errors.
        folders: Folders that contain folders of images.

    Raises:
        SplitUnclear: If the folders may be parts of one data set.
    """
    below = {folder: {child.base_name for child in folder.with_images} for folder in folders}
    named = [folder.base_name for folder in folders]
    shared: set[str] = set()
    for first, second in combinations(below, 2):
        shared |= below[first] & below[second]
    parts = {name for names in below.values() for name in names if is_part(name)}
    words = [name for name in named if find_role(name) and is_generic_split_name(name)]
    if not (shared or parts or words):
        return
    problem = f"have folders of the same names ({listed(sorted(shared))})"
    if not shared:
        problem = f"hold folders such as {listed(sorted(parts))}" if parts else "look like splits"
    paths = [posixpath.join(request.path, folder.name) for folder in folders]
    each = f"`{request.program} {shlex.join(['init', *paths[:MAX_PATHS]])}`"
    top = posixpath.dirname(folders[0].name) or "."
    as_classes = request.command(format_splits({"train": [top]}))
    splits = {"train": [folders[0].name], "test": [folders[-1].name]}
    raise SplitUnclear(
        f"{where}: {listed(named)} {problem}; if they are classes, say `{as_classes}`; if they are "
        f"splits, say which, as in `{request.command(format_splits(splits))}`; if they are a task "
        f"each: {each}"
    )


class Checks:
    """The checks of one data set.

    Args:
        request: The user's request.
        data_set: The detected data set.
        images: Its images.
    """

    def __init__(self, request: Request, data_set: DataSet, images: Sequence[ReadImage]):
        self.request = request
        self.source = data_set.card.source
        self.images = images
        self.where = printable(self.source.path)
        self.is_folder = self.source.format == "folder"
        self.labels = {image.label for image in images}
        self.splits_read = {image.split for image in images}

    def _format_command(self, splits: Mapping[str, Iterable[str]]) -> str:
        return f"`{self.request.command(format_splits({s: [*p] for s, p in splits.items()}))}`"

    def _current_splits(self, ignore: Iterable[str] = ()) -> dict[str, list[str]]:
        """Return the splits of the card, with more paths to ignore."""
        splits = {split: [*self.source.list_parts(split)] for split in self.source.named_splits()}
        left_out = [*self.source.list_parts(IGNORE), *ignore]
        return splits | ({IGNORE: left_out} if left_out else {})

    def _list_in_classes(self, name: str) -> list[str]:
        """Return the patterns of a file or folder in the class folders of all splits."""
        patterns: dict[str, None] = {}
        for split, parts in self._current_splits().items():
            for part in parts if split != IGNORE else ():
                folder = part if LABEL in part else posixpath.join(part.lstrip("."), LABEL)
                patterns[posixpath.join(folder, name)] = None
        return [*patterns]

    # ---- splits ----------------------------------------------------------------------------------
    def check_splits(self) -> None:
        """Raise SplitUnclear if the folder or the name of an image names another split."""
        roles_by_folder: dict[str, Role] = {}
        conflicts: dict[str, ReadImage] = {}  # folder -> its first image of another split
        names: Counter[Role] = Counter()
        for image in self.images:
            for depth, part in enumerate(image.folders):
                role = self._find_role(part, is_label=self.is_folder and part == image.label)
                if role is None:
                    continue
                folder = "/".join(image.folders[: depth + 1])
                roles_by_folder[folder] = role
                if not self._agrees(role, image.split):
                    conflicts.setdefault(folder, image)
            names.update(self._find_conflicting_roles(image))
        roles = {*roles_by_folder.values()}
        if conflicts and not (len(roles) == 1 and self._has_splits_outside_folders()):
            raise self._other_split_error(*next(iter(conflicts.items())), roles_by_folder)
        for role, number in names.items():
            if number >= max(MIN_NAMES, MIN_SHARE * len(self.images)):
                raise self._split_in_names_error(role, number)

    def _find_role(self, part: str, is_label: bool) -> Role | None:
        """Return the role of a folder name, or None.

        Args:
            part: The name.
            is_label: Whether the folder is a class. Then only a generic name has a role, for
                example `test_images`, but not `test_drive`.
        """
        if is_weak(part) or not find_role(part):
            return None
        return find_role(part) if not is_label or is_generic_split_name(part) else None

    def _find_conflicting_roles(self, image: ReadImage) -> set[Role]:
        """Return the roles of the image name's first and last word that contradict its split."""
        tokens = [token for token in tokenize_name(image.stem) if not token.isdecimal()]
        ends = [token for token in {*tokens[:1], *tokens[-1:]} if not is_weak(token)]
        roles = {role for token in ends if (role := parse_role(token)) is not None}
        return {role for role in roles if not self._agrees(role, image.split)}

    def _agrees(self, role: Role, split: str) -> bool:
        """Return whether a folder of a role may contain images of a split."""
        if role == "held out":
            return split != "train"
        serves_as_test = role == "val" and "val" not in self.splits_read
        return role == split or (serves_as_test and split == "test")

    def _has_splits_outside_folders(self) -> bool:
        """Return whether the splits come from a column or from several tables, not from folders."""
        source = self.source
        by_column = source.split is not None and source.split != source.image
        return not self.is_folder and (by_column or len(source.named_splits()) > 1)

    def _other_split_error(
        self, folder: str, image: ReadImage, roles: Mapping[str, Role]
    ) -> SplitUnclear:
        remedy = f"if that is not a split, say `{self.request.command('source.split=null')}`"
        if self.is_folder:
            as_it_is = self._format_command(self._current_splits())
            remedy = f"if that is not a split, say {as_it_is}"
            by_split: dict[str, list[str]] = {}
            for name, role in roles.items():
                by_split.setdefault("test" if role == "held out" else role, []).append(name)
            if "train" in by_split and len(by_split) > 1:
                remedy = f"if they are splits, say {self._format_command(by_split)}; {remedy}"
        return SplitUnclear(
            f"{self.where}: {quoted(image.path)} would be a {image.split} image, and "
            f"{quoted(folder)} looks like another split; {remedy}"
        )

    def _split_in_names_error(self, role: Role, number: int) -> SplitUnclear:
        as_it_is = f"`{self.request.command('source.split=null')}`"
        remedy = "add a column `split`"
        if self.is_folder:
            as_it_is = self._format_command(self._current_splits())
            splits = {"train": [f"{LABEL}/*train*"], "test": [f"{LABEL}/*test*"]}
            remedy = f"say which are which, as in {self._format_command(splits)}"
        return SplitUnclear(
            f"{self.where}: the names of {format_count(number, 'image')} say {role}, but they "
            "would not "
            f"be {role} images; {remedy}, or that it is not a split: {as_it_is}"
        )

    def check_unread(self, files: Sequence[Entry]) -> None:
        """Raise SplitUnclear if an image without a row is in a folder like `test`.

        Only splits of which no image was read count.
        """
        unread_roles = {"val", "test"} - self.splits_read
        if not self.splits_read & {"val", "test"}:
            unread_roles.add("held out")
        read = {image.path.rpartition("/")[2] for image in self.images}
        for entry in files:
            folders = entry.name.split("/")[:-1]
            role = next((role for part in folders if (role := self._find_role(part, False))), None)
            is_image = not entry.problem and get_suffix(entry.name) in IMAGE_FILES
            if (
                is_image
                and role in unread_roles
                and folders
                and nfc(entry.name.rpartition("/")[2]) not in read
            ):
                raise SplitUnclear(
                    f"{self.where}: no row names {quoted(entry.name)}, which looks like a {role} "
                    "image; name the table of each split, as in "
                    f"`{self.request.command(format_splits(TABLES))}`, or set none: "
                    f"`{self.request.command('source.split=null')}`"
                )

    # ---- masks, thumbnails and other derived images ----------------------------------------------
    def check_folders(self) -> None:
        """Raise SplitUnclear if some images are in a folder like `masks` or `thumbs`."""
        inside: Counter[str] = Counter()
        for image in self.images:
            below = image.folders
            if self.is_folder and image.label in below:
                below = below[below.index(image.label) + 1 :]
            inside.update({part for part in below if _is_not_photo(part)})
        for part, number in inside.items():
            if number == len(self.images):
                continue
            remedy = "take these rows out of the table"
            if self.is_folder:
                ignore = self._list_in_classes(part)
                remedy = f"leave them out with {self._format_command(self._current_splits(ignore))}"
            raise SplitUnclear(
                f"{self.where}: {format_count(number, 'image')} are in folders {quoted(part)}, "
                "which "
                f"may hold something other than training photos; {remedy}, or name all "
                "classes with --set 'classes=[...]'"
            )

    def check_file_names(self) -> None:
        """Raise SplitUnclear if files in a folder come in pairs like `1.png` and `1_mask.png`."""
        stems: dict[str, set[str]] = {}
        for image in self.images:
            stems.setdefault(posixpath.dirname(image.path), set()).add(image.stem)
        words: Counter[str] = Counter()
        for of_folder in stems.values():
            for stem in of_folder:
                word = _find_extra_word(stem)
                if word and _remove_word(stem, word) in of_folder:
                    words[word.lower()] += 1
        for word, number in words.items():
            if number < max(MIN_NAMES, MIN_SHARE * len(self.images)):
                continue
            remedy = "take them out of the table"
            if self.is_folder:
                ignore = self._list_in_classes(f"*{word}*")
                remedy = f"leave them out with {self._format_command(self._current_splits(ignore))}"
            raise SplitUnclear(
                f"{self.where}: {format_count(number, 'image')} are named like another image plus "
                f"{quoted(word)}, and may be something other than training photos; {remedy}, "
                "or name all classes with --set 'classes=[...]'"
            )

    def check_classes(self) -> None:
        """Raise SplitUnclear if some, not all, classes are named like `masks`, or any is a part."""
        strange = {name for name in self.labels if _is_not_class(name) or is_part(name)}
        generic = {name for name in strange if is_part(name)}
        if not strange or (strange == self.labels and not generic):
            return
        raise self._no_class_error(sorted(strange))

    def check_pairs(self) -> None:
        """Raise SplitUnclear if the images of two classes have equal names.

        Classes whose images are only numbered are not compared.
        """
        stems: dict[str, set[str]] = {}
        for image in self.images:
            stems.setdefault(image.label, set()).add(image.stem)
        named = {label: of for label, of in stems.items() if len(of) >= MIN_PAIRED}
        named = {label: of for label, of in named.items() if not _are_counted(of)}
        if len(named) > MAX_COMPARED:
            return
        paired: list[tuple[str, str]] = []
        for (first, of_first), (second, of_second) in combinations(sorted(named.items()), 2):
            shared = len(of_first & of_second)
            if shared >= SHARE_PAIRED * max(len(of_first), len(of_second)):
                paired.append((first, second))
        # if every class pairs with every other, equal names mean nothing, for example front.jpg and
        # back.jpg in every class
        is_habit = len(paired) > 1 and len(paired) == len(stems) * (len(stems) - 1) // 2
        if paired and not is_habit:
            raise self._no_class_error(paired[0], "have images of the same names")

    def _no_class_error(self, names: Sequence[str], why: str = "") -> SplitUnclear:
        splits = self._current_splits()
        parts = [part for split in splits if split != IGNORE for part in splits[split]]
        parts = [part for part in parts if LABEL not in part] or ["."]
        ignore = [posixpath.normpath(posixpath.join(part, names[-1])) for part in parts]
        command = self._format_command(self._current_splits(ignore))
        why = why or "may be something other than classes"
        return SplitUnclear(
            f"{self.where}: folders {listed(names)} {why}; leave one out as in {command}, or name "
            "all classes with --set 'classes=[...]'"
        )


def _is_not_photo(name: str) -> bool:
    return name.startswith(("@", ".")) or _is_not_class(name)


def _is_not_class(name: str) -> bool:
    """Return whether a folder name suggests masks, thumbnails, or images without labels."""
    tokens = {token.lower() for token in tokenize_name(name)}
    return (
        name.startswith(STRANGE)
        or bool(tokens & NO_CLASS_TOKENS)
        or is_called(name, NO_CLASSES | PERHAPS_NO_CLASSES)
    )


def _find_extra_word(stem: str) -> str:
    """Return the size or word that marks a derived image, for example `mask` for `1_mask`.

    The word must be the first or the last word of the name.
    """
    size = SIZE.search(stem)
    if size is not None:
        return size[0]
    tokens = tokenize_name(stem)
    return next((t for t in (*tokens[:1], *tokens[-1:]) if t.lower() in NO_IMAGE_TOKENS), "")


def _remove_word(stem: str, word: str) -> str:
    """Return a name without a word at its start or end, and without the separator beside it."""
    before, _, after = stem.partition(word) if stem.startswith(word) else stem.rpartition(word)
    return after.lstrip("_-. ") if not before else f"{before.rstrip('_-. ')}{after}"


def _are_counted(stems: Iterable[str]) -> bool:
    """Return whether nearly all names end in nearly consecutive numbers.

    Such numbers restart in every class, so equal names do not mean related images.
    """
    stems = [*stems]
    numbers = sorted(int(match[0]) for stem in stems if (match := re.search(r"[0-9]+$", stem)))
    if not numbers or len(numbers) < SHARE_PAIRED * len(stems):
        return False
    return numbers[-1] - numbers[0] < 2 * len(numbers)
