"""Image folders: `<split>/<class>/**/<image>`, or patterns with `{label}` in `source.splits`."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from fnmatch import translate
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from pipeline.data.cards import Card
from pipeline.data.file_kinds import IMAGE_FILES
from pipeline.data.formats.base import (
    Format,
    Item,
    LabelCounts,
    MapFn,
    Unit,
    base_uri,
    build_units,
    describe_other_file,
    find_size_problem,
    source_uri,
    visible,
)
from pipeline.data.listing import Entry, list_entries, list_folders
from pipeline.data.names import check_unicode_forms, get_suffix, nfc, printable
from pipeline.data.splits import IGNORE, SPLIT_KEYS, SPLITS, Split
from workers.errors import UserError
from workers.storage.artifact import is_local, join

LABEL = "{label}"


class SplitFolder(NamedTuple):
    """The path of a split's folder, which may contain patterns.

    Attributes:
        split: Split, or IGNORE.
        parts: A regular expression for each part of the path between slashes. The expression of a
            part with the class has a group `label`.
        names: Names of the folders before the first pattern.
    """

    split: str
    parts: tuple[re.Pattern[str], ...]
    names: tuple[str, ...]

    @classmethod
    def of(cls, split: str, text: str) -> SplitFolder:
        """Parse a path on a card, which may contain globs and `{label}` for a class."""
        texts = [part for part in text.split("/") if part not in ("", ".")]
        names: list[str] = []
        for part in texts:
            if re.search(r"[*?\[{]", part):
                break
            names.append(part)
        return cls(split, tuple(map(_compile_part, texts)), tuple(names))

    def match(self, path: Sequence[str]) -> tuple[bool, str | None]:
        """Match the path of a file, split at slashes.

        Returns:
            Whether the file is in this folder, and its label or None. The label is the text that
            `{label}` matches, or the folder directly below this one if no part has `{label}`.
        """
        if len(path) < len(self.parts):
            return False, None
        label = None
        has_label = False
        for pattern, part in zip(self.parts, path, strict=False):
            match = pattern.fullmatch(part)
            if match is None:
                return False, None
            if "label" in pattern.groupindex:
                has_label = True
                label = match["label"]
        if not has_label and len(path) > len(self.parts) + 1:
            label = path[len(self.parts)]
        return True, label


def _compile_part(text: str) -> re.Pattern[str]:
    if LABEL in text:
        before, _, after = text.partition(LABEL)
        return re.compile(f"{_glob(before)}(?P<label>.+){_glob(after)}", re.DOTALL)
    return re.compile(_glob(text), re.DOTALL)


def _glob(text: str) -> str:
    """Return a regular expression for a glob, without the flag and the anchor of `translate`."""
    return re.sub(r"^\(\?s:(.*)\)\\[zZ]$", r"\1", translate(text), flags=re.DOTALL)


class LabelledEntry(NamedTuple):
    """A file below the folder of a split. `label` is None if the file is in no class folder."""

    split: str
    label: str | None
    entry: Entry


@lru_cache(maxsize=64)
def _split_folders(splits: tuple[tuple[str, str], ...]) -> tuple[SplitFolder, ...]:
    """Return the folders of all splits, paths with more parts first.

    Args:
        splits: Pairs of a split and a path on the card, which may contain patterns.
    """
    folders = [SplitFolder.of(split, text) for split, text in splits]
    return tuple(sorted(folders, key=lambda folder: -len(folder.parts)))


class Root(NamedTuple):
    """A folder that a card reads: its source, or a folder in `source.more`.

    Attributes:
        prefix: Prefix of the file names, for example `../more/`. Empty for the source.
        card: The card with this folder as its source.
    """

    prefix: str
    card: Card


def find_roots(card: Card) -> list[Root]:
    """Return the folders that a card reads: the folders in `source.more`, then the source.

    The source is last, because its empty prefix matches the names of all files.
    """
    source = card.source
    roots: list[Root] = []
    for folder in source.more:
        prefix = folder.path
        if is_local(prefix) and is_local(source.path):
            prefix = Path(os.path.relpath(prefix, source.path)).as_posix()
        changes = {"path": folder.path, "splits": folder.splits, "more": ()}
        source_of_root = source.model_copy(update=changes)
        card_of_root = card.model_copy(update={"source": source_of_root})
        roots.append(Root(f"{prefix.rstrip('/')}/", card_of_root))
    return [*roots, Root("", card)]


def list_files(card: Card, most: int | None) -> list[Entry] | None:
    """List the files of all folders that a card reads.

    Args:
        card: The card.
        most: Stop after this number of files of each folder; only for local folders.

    Returns:
        The files, or None if the source of the card does not exist.

    Raises:
        UserError: If a folder in `source.more` does not exist.
    """
    entries: list[Entry] = []
    for prefix, card_of_root in find_roots(card):
        names = first_folders(card_of_root)
        found = list_entries(source_uri(card_of_root), names, IMAGE_FILES, most)
        if found is None:
            if not prefix:
                return None
            raise UserError(
                f"card {card.name!r}: the further folder {card_of_root.source.path} does not "
                "exist; put the data there, or fix source.more of the card"
            )
        entries += (
            [entry._replace(name=prefix + entry.name) for entry in found] if prefix else found
        )
    return entries


def split_folders(card: Card) -> tuple[SplitFolder, ...]:
    """Return the folders of a card's splits. A file belongs to the first folder that matches.

    Raises:
        UserError: If a folder is not below the source.
    """
    pairs = [(key, text) for key in SPLIT_KEYS for text in card.source.list_parts(key) if text]
    for split, text in pairs:
        if ".." in text.split("/"):
            raise UserError(
                f"card {card.name!r}: source.splits.{split} is {printable(text)!r}, but only "
                "folders below source.path are read; give a path below it, or use source.more"
            )
    return _split_folders(tuple(pairs))


def labelled_entries(card: Card, entries: Sequence[Entry]) -> Iterator[LabelledEntry]:
    """Yield the files in the folders of splits, in the order of the entries."""
    roots = [(prefix, split_folders(card_of_root)) for prefix, card_of_root in find_roots(card)]
    # folder -> split and label of all files in it
    by_parent: dict[str, tuple[str, str | None] | None] = {}
    for entry in visible(entries):
        parent = entry.name.rpartition("/")[0]
        if parent in by_parent:
            found = by_parent[parent]
        else:
            found, is_same_for_parent = _find_split(entry.name, roots)
            if is_same_for_parent:
                by_parent[parent] = found
        if found is not None:
            yield LabelledEntry(*found, entry)


def _find_split(
    name: str, roots: Sequence[tuple[str, tuple[SplitFolder, ...]]]
) -> tuple[tuple[str, str | None] | None, bool]:
    """Find the split and the label of a file.

    Args:
        name: Name of the file.
        roots: Prefix and split folders of each root.

    Returns:
        Split and label, or None if the file is in no split, and whether this holds for all files
        in the same folder.
    """
    prefix, folders = next(root for root in roots if name.startswith(root[0]))
    path = name[len(prefix) :].split("/")
    # no pattern reaches the file name, so only the folders decide
    is_same_for_parent = all(len(path) > len(folder.parts) for folder in folders)
    for folder in folders:
        is_inside, label = folder.match(path)
        if is_inside:
            return (folder.split, label), is_same_for_parent
    return None, is_same_for_parent


def entries_of_split(card: Card, split: Split, entries: list[Entry]) -> list[Entry]:
    """Return the files below the folders of a split."""
    return [found.entry for found in labelled_entries(card, entries) if found.split == split]


def first_folders(card: Card) -> list[str]:
    """Return the folders to list first: those of the splits, cut before the first pattern."""
    folders = [folder for folder in split_folders(card) if folder.split != IGNORE]
    return ["/".join(folder.names) for folder in folders]


def class_folders(card: Card, split: Split) -> list[str]:
    """Return the sorted names of the classes that have a folder in a split.

    Files are not listed, so a class may have no images.
    """
    names: set[str] = set()
    for _, card_of_root in find_roots(card):
        names |= _class_folders(card_of_root, split)
    return sorted(names)


def _class_folders(card: Card, split: Split) -> set[str]:
    """Return the names of the classes that have a folder in a split of the card's source."""
    folders = split_folders(card)
    base = source_uri(card).rstrip("/")
    names: set[str] = set()
    for folder in folders:
        if folder.split != split:
            continue
        patterns = [*folder.parts]
        if not any("label" in pattern.groupindex for pattern in patterns):
            patterns.append(_compile_part(LABEL))
        waiting: list[tuple[str, ...]] = [folder.names]
        for pattern in patterns[len(folder.names) :]:
            below: list[tuple[str, ...]] = []
            for path in waiting:
                children = list_folders(join(base, *path) if path else base)
                below += [(*path, name) for name in children if pattern.fullmatch(name)]
            waiting = below
            if "label" in pattern.groupindex:
                break
        for path in waiting:
            # match an invented file "x": the first folder that matches owns the class folder, and
            # it may belong to another split
            matches = ((one, *one.match((*path, "x"))) for one in folders)
            owner, _, label = next((m for m in matches if m[1]), (folder, True, None))
            if owner == folder and label is not None:
                names.add(label)
    return names


def units(card: Card, entries: list[Entry], map_fn: MapFn) -> list[Unit]:
    """Return the units of all files, train first."""
    items = _sorted_items(card, entries)
    units: list[Unit] = []
    for split in SPLITS:
        units += build_units([item for item in items if item.split == split])
    return units


def list_items(card: Card, entries: list[Entry]) -> Iterator[Item]:
    """Yield all files of a source as items, train first.

    Raises:
        UserError: If two names differ only in their Unicode form.
    """
    yield from _sorted_items(card, entries)


def _sorted_items(card: Card, entries: list[Entry]) -> list[Item]:
    found = [one for one in labelled_entries(card, entries) if one.split != IGNORE]
    names = [one.entry.name for one in found]
    check_unicode_forms(f"source of card {card.name!r}", names)
    base = base_uri(card)
    items = [_make_folder_item(base, one) for one in found]
    return sorted(items, key=lambda item: SPLITS.index(item.split))


def _make_folder_item(base: str, found: LabelledEntry) -> Item:
    entry = found.entry
    stem = os.path.splitext(entry.name.rpartition("/")[2])[0]
    problem = entry.problem
    if not problem and get_suffix(entry.name) in IMAGE_FILES:
        problem = find_size_problem(entry.size)
    elif not problem:
        problem = describe_other_file(entry.name)
    label = None if found.label is None else nfc(found.label)
    uri = entry.name if "://" in entry.name else join(base, entry.name)
    return Item(found.split, entry.name, stem, label, problem, uri, 0, entry.size)


def count_labels(card: Card, entries: list[Entry]) -> LabelCounts:
    """Return the number of images by split and class folder.

    Raises:
        UserError: If the names of two folders differ only in their Unicode form.
    """
    counts: LabelCounts = Counter()
    all_found = list(labelled_entries(card, entries))
    labels = {found.label for found in all_found if found.label is not None}
    check_unicode_forms(f"source of card {card.name!r}", sorted(labels))
    for found in all_found:
        is_image = get_suffix(found.entry.name) in IMAGE_FILES and not found.entry.problem
        if found.split != IGNORE and is_image:
            label = None if found.label is None else nfc(found.label)
            counts[found.split, label] += 1
    return counts


FORMAT = Format(
    units,
    count_labels,
    IMAGE_FILES,
    first_folders=first_folders,
    list_files=list_files,
    entries_of_split=entries_of_split,
    list_items=list_items,
)
