"""Detect the layout of folders of images: split folders and class folders.

A layout is a mapping for `source.splits`, for example `train/CLASS` and `test/CLASS`. If several
layouts are possible, the error names the setting that decides.
"""

from __future__ import annotations

import posixpath
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

from pipeline.data.detection.data_set import format_splits
from pipeline.data.detection.words import (
    NO_CLASSES,
    PERHAPS_NO_CLASSES,
    WITHOUT_LABELS,
    WRAPPERS,
    is_called,
    is_part,
)
from pipeline.data.formats.folder import LABEL
from pipeline.data.listing import Folder
from pipeline.data.names import listed, quoted
from pipeline.data.splits import (
    IGNORE,
    SPLITS,
    WEAK_WORDS,
    SplitUnclear,
    find_role,
    find_split_word,
    is_generic_split_name,
    normalize_word,
    parse_role,
    parse_split_words,
    remove_split_words,
    tokenize_name,
)
from workers.errors import UserError

MAX_PAIRED = 20_000  # image names compared per folder
SHARE_PAIRED = 0.9  # minimum share of the image names of a folder that occur in other folders


class Layout(NamedTuple):
    """The layout of a data set in folders.

    Attributes:
        splits: Value for `source.splits`: split -> paths below the source.
        text: Short description, for example `class folders in train/ and test/`.
        notes: Notes on skipped folders.
    """

    splits: dict[str, list[str]]
    text: str
    notes: tuple[str, ...] = ()


class NoClasses(UserError):
    """The source has images but no class folders."""


class MaybeNoClass(SplitUnclear):
    """A folder can be a class, or not part of the data.

    Attributes:
        folder: Path of the folder below the source.
    """

    def __init__(self, folder: str):
        super().__init__(f"folder {quoted(folder)} can be a class, or not part of the data")
        self.folder = folder


def has_subfolders(folder: Folder) -> bool:
    """Return whether a folder has subfolders with images."""
    return bool(folder.with_images)


def find_layout(folder: Folder) -> Layout | list[Folder]:
    """Find the layout of a folder.

    Returns:
        The layout of the data set in the folder, or the subfolders if each contains a data set.

    Raises:
        SplitUnclear: If the folder can be read in several ways.
        NoClasses: If the images are not in class folders.
    """
    all_children = folder.with_images
    children, notes = _drop_other_folders(folder, all_children)
    ignored = [child for child in all_children if child not in children]
    if not children:
        raise NoClasses("no folder of a class")
    splits = _find_split_folders(children)
    layout: Layout | list[Folder] | None = None
    if splits:
        layout = _read_split_folders(children, splits)
    layout = layout or _read_splits_in_names(children)
    if layout is None and len(children) == 1 and has_subfolders(children[0]):
        layout = find_layout(children[0])
    if layout is None and _is_wrapped(children):
        raise NoClasses("no folder of a class")
    if layout is None:
        layout = _read_class_folders(folder, children)
    if isinstance(layout, Layout):
        return _add_ignored(layout, folder, ignored, notes)
    return layout


def find_class_layout(folder: Folder, classes: Iterable[str]) -> Layout | None:
    """Return the layout of the folders that contain folders of all given classes, or None.

    None is also returned if there are several such folders, unless they are named like different
    splits, one of them train.
    """
    names = {*classes}
    parents = [one for one in folder.walk() if names <= {c.base_name for c in one.with_images}]
    splits: dict[str, list[str]] = {}
    for parent in parents:
        split = "train" if len(parents) == 1 else str(parse_role(parent.base_name))
        splits.setdefault(split, []).append(parent.name or ".")
    if "train" not in splits or not {*splits} <= {*SPLITS} or len(splits) < len(parents):
        return None
    others = [child.name for one in parents for child in one.with_images]
    ignored = [name for name in others if name.rpartition("/")[2] not in names]
    if ignored:
        splits[IGNORE] = ignored
    return Layout(splits, "folders of the given classes")


def _is_wrapped(children: Sequence[Folder]) -> bool:
    """Return whether the only folder is a wrapper (`images`) without class folders in it."""
    return (
        len(children) == 1
        and is_called(children[0].base_name, WRAPPERS)
        and not has_subfolders(children[0])
    )


def _add_ignored(
    layout: Layout, folder: Folder, ignored: Sequence[Folder], notes: Iterable[str]
) -> Layout:
    """Return the layout with skipped folders added to `ignore` if they would become classes."""
    splits = dict(layout.splits)
    top = [""] if folder.name == "" else [folder.name]
    if ignored and any(part in (".", *top) or LABEL in part for part in splits["train"]):
        splits[IGNORE] = [*splits.get(IGNORE, ()), *(child.name for child in ignored)]
    return Layout(splits, layout.text, (*layout.notes, *notes))


# ---- folders other than classes ------------------------------------------------------------------
def _drop_other_folders(folder: Folder, children: list[Folder]) -> tuple[list[Folder], list[str]]:
    """Drop folders like `annotations` or `thumbnails`, unless all folders are like this.

    Returns:
        The folders that may be classes or splits, and notes on the dropped folders.

    Raises:
        MaybeNoClass: If it is ambiguous whether a folder is a class, for example `masks`.
    """
    kept = [child for child in children if not is_called(child.base_name, NO_CLASSES)]
    if not kept:
        return children, []
    known = {child.base_name for child in kept}
    are_flat = [child for child in kept if not has_subfolders(child)]
    for child in [*kept]:
        below = {one.base_name for one in child.with_images}
        # a folder of folders with the names of its siblings is probably a copy of them
        is_copy = bool(below) and below <= known - {child.base_name}
        if is_called(child.base_name, PERHAPS_NO_CLASSES) and len(kept) > 1:
            others = [other for other in kept if other is not child]
            below_others = {one.base_name for other in others for one in other.with_images}
            is_copy = is_copy or (bool(below) and below <= below_others)
            if not (is_copy or _is_only_flat(child, others) or _matches_names(child, others)):
                raise MaybeNoClass(child.name)
            kept.remove(child)
        elif is_copy and len(are_flat) >= len(kept) - 1 and parse_role(child.base_name) is None:
            raise MaybeNoClass(child.name)
    left_out = [child.base_name for child in children if child not in kept]
    notes = [f"folders {listed(left_out)} are not read: these are not names of classes"]
    return kept, notes if left_out else []


def _is_only_flat(child: Folder, others: Sequence[Folder]) -> bool:
    """Return whether a folder has only images, and all others have only folders of images."""
    are_nested = all(has_subfolders(other) and not other.images for other in others)
    return are_nested and not has_subfolders(child)


def _matches_names(child: Folder, others: Sequence[Folder]) -> bool:
    """Return whether most image names of a folder also occur in the other folders.

    Such images are derived from those of the other folders, for example masks. If two of the other
    folders share names, equal names mean nothing, and the result is False.
    """
    stems = set(_iterate_stems(child))
    known: set[str] = set()
    for other in others:
        other_stems = set(_iterate_stems(other))
        if known & other_stems:
            return False  # for example, numbers that restart in each class
        known |= other_stems
    return bool(stems) and len(stems & known) >= SHARE_PAIRED * len(stems)


def _iterate_stems(folder: Folder) -> Iterator[str]:
    """Yield the names of the first MAX_PAIRED images below a folder, without their extensions."""
    number = 0
    for below in folder.walk():
        for name in below.images:
            number += 1
            if number > MAX_PAIRED:
                return
            yield name.rpartition(".")[0].lower()


def format_option(**splits: str) -> str:
    """Format the option `--set source.splits=...`. `splits` maps each split to a folder."""
    return f"--set {shlex.quote(format_splits({split: [path] for split, path in splits.items()}))}"


# ---- splits above the classes --------------------------------------------------------------------
def _find_split_folders(children: Sequence[Folder]) -> list[Folder]:
    """Return the folders that are named like a split and may be one."""
    return [
        child
        for child in children
        if parse_role(child.base_name)
        and (has_subfolders(child) or normalize_word(child.base_name) not in WEAK_WORDS)
    ]


def _read_split_folders(children: Sequence[Folder], splits: Sequence[Folder]) -> Layout | None:
    """Find the layout of folders named like splits, or return None if the folders are classes."""
    others = [child for child in children if child not in splits]
    roles = {parse_role(child.base_name) for child in splits}
    train = [child for child in splits if parse_role(child.base_name) == "train"]
    are_flat = not any(map(has_subfolders, splits))
    if are_flat and others and roles == {"train"} and not any(map(has_subfolders, others)):
        return None  # for example, the classes bus, car and train
    if are_flat and others:
        names = listed(child.base_name for child in splits)
        raise SplitUnclear(
            f"{names} can be a class, or images of that split without labels, beside "
            f"{listed(child.base_name for child in others)}; leave it out with "
            f"{format_option(train=_find_parent(splits), ignore=splits[0].name)}, "
            "or name all classes "
            "with --set 'classes=[...]'"
        )
    if train and others and len(roles) == 1:
        raise SplitUnclear(
            f"{quoted(train[0].name)} can be a class, or the train images beside "
            f"{listed(child.base_name for child in others)}; say which with "
            f"{format_option(train=train[0].name)}, or name all classes with --set 'classes=[...]'"
        )
    if not train and others:
        return _read_test_beside_classes(others, splits)
    if not train:
        raise SplitUnclear(
            f"there is {listed(child.base_name for child in splits)} and no train images; rename "
            f"the folder of train images to `train`, or set it with {format_option(train='FOLDER')}"
        )
    if len(train) > 1:
        raise SplitUnclear(
            f"{listed(child.name for child in train)} are both train images; say which with "
            f"{format_option(train=train[0].name)}, or rename one"
        )
    notes = [_note_unread(others)] if others else []
    return _build_split_layout([*splits], notes)


def _note_unread(others: Iterable[Folder]) -> str:
    return f"folders {listed(child.base_name for child in others)} are not read"


def _build_split_layout(folders: Sequence[Folder], notes: list[str], exact: bool = True) -> Layout:
    """Build the layout of folders that each contain one split.

    Args:
        folders: The folders.
        notes: Notes on other folders. Notes on the given folders are appended to this list.
        exact: Whether the whole name must be a split word: `train`, not `seg_train`.

    Raises:
        NoClasses: If the train folder has no class folders.
        SplitUnclear: If two folders are the same split, or it is unclear which are classes.
    """
    labelled = {child.base_name: child for child in folders}
    train = next(c for c in folders if (parse_role if exact else find_role)(c.base_name) == "train")
    if not has_subfolders(train) or _is_wrapped(_find_class_root(train).with_images):
        raise NoClasses(f"no folder of a class in {quoted(train.name)}")
    for name, child in [*labelled.items()]:
        if not _has_labels(child, train):
            del labelled[name]
            notes.append(f"images in {quoted(name)} are not read: they have no labels")
    words = parse_split_words(labelled, exact)
    splits: dict[str, list[str]] = {}
    ignored: list[str] = []
    for split, names in words.splits.items():
        if len(names) > 1:
            raise SplitUnclear(
                f"{listed(names)} are both {split} images; say which with "
                f"{format_option(train=train.name, **{split: labelled[names[0]].name})}"
            )
        root = _find_class_root(labelled[names[0]])
        kept, more_notes = _drop_other_folders(root, root.with_images)
        splits[split] = [root.name]
        ignored += [child.name for child in root.with_images if child not in kept]
        notes += more_notes
    roots = {split: labelled[names[0]] for split, names in words.splits.items()}
    _check_depth({split: _find_class_root(root) for split, root in roots.items()})
    folder_names = " and ".join(f"{names[0]}/" for names in splits.values())
    if ignored:
        splits[IGNORE] = ignored
    return Layout(splits, f"class folders in {folder_names}", tuple(notes))


def _check_depth(roots: Mapping[str, Folder]) -> None:
    """Raise SplitUnclear if the splits have two levels of folders, and both can be the classes.

    The inner level can be the classes if more than half of the names in the other splits also occur
    in train. Names of patients or videos, for example, do not.

    Args:
        roots: Split -> folder of its classes.
    """
    root = roots["train"]
    children = root.with_images
    if not all(has_subfolders(child) and not child.images for child in children):
        return
    inner = [_list_inner(child) for child in children]
    below_others = {
        name
        for split, other in roots.items()
        if split != "train"
        for child in other.with_images
        for name in _list_inner(child)
    }
    recurring = {*chain(*inner)} & below_others
    if max(map(len, inner)) > 1 and len(recurring) * 2 > len(below_others):
        outer = {split: one.name for split, one in roots.items()}
        below = {split: f"{one.name}/*/{LABEL}" for split, one in roots.items()}
        raise SplitUnclear(
            f"in {quoted(root.name)}, the folders {listed(child.base_name for child in children)} "
            f"hold folders such as {listed(sorted(recurring))}, and both can be the classes; for "
            f"the outer ones: {format_option(**outer)}; for the inner ones: "
            f"{format_option(**below)}"
        )


def _list_inner(folder: Folder) -> list[str]:
    """Return the names of subfolders that can be classes, and not wrappers or parts."""
    names = [child.base_name for child in folder.with_images]
    return [name for name in names if not is_called(name, WRAPPERS) and not is_part(name)]


def _has_labels(child: Folder, train: Folder) -> bool:
    """Return whether a split folder has class folders, not just one folder like `unknown`."""
    classes = {below.base_name for below in _find_class_root(train).with_images}
    below = [one.base_name for one in _find_class_root(child).with_images]
    return len(below) > 1 or any(
        name in classes or not is_called(name, WITHOUT_LABELS) for name in below
    )


def _find_parent(children: Sequence[Folder]) -> str:
    """Return the common parent folder of siblings; "." for the source itself."""
    return posixpath.dirname(children[0].name) or "."


def _find_class_root(folder: Folder) -> Folder:
    """Return the folder that contains the classes: a folder, or its wrapper or only subfolder."""
    below = [c for c in folder.with_images if not is_called(c.base_name, NO_CLASSES)]
    wrappers = [child for child in below if is_called(child.base_name, WRAPPERS)]
    if len(wrappers) == 1 and has_subfolders(wrappers[0]):
        below = wrappers
    if folder.images or len(below) != 1 or len(below[0].with_images) < 2:
        return folder
    return _find_class_root(below[0])


def _read_test_beside_classes(classes: Sequence[Folder], splits: Sequence[Folder]) -> Layout:
    """Find the layout of class folders next to folders of val or test images.

    Raises:
        SplitUnclear: If such a folder has no folder of one of the classes.
    """
    names = {child.base_name for child in classes}
    for child in splits:
        below = {one.base_name for one in _find_class_root(child).with_images}
        if not below & names:
            raise SplitUnclear(
                f"{quoted(child.name)} can be a class, or the images of a split, and has no folder "
                f"of the classes {listed(sorted(names))}; leave it out with "
                f"{format_option(train=_find_parent(classes), ignore=child.name)}, "
                "or name all classes "
                "with --set 'classes=[...]'"
            )
    words = parse_split_words([*(child.base_name for child in splits), "train"])
    by_name = {child.base_name: child for child in splits}
    layout: dict[str, list[str]] = {"train": [_find_parent(classes)]}
    for split in SPLITS[1:]:
        if split in words.splits:
            layout[split] = [_find_class_root(by_name[name]).name for name in words.splits[split]]
    tests = listed(child.base_name for child in splits)
    return Layout(layout, f"class folders, and {tests} with folders of the same classes")


def _read_splits_in_names(children: Sequence[Folder]) -> Layout | None:
    """Find the layout of folders with a split word in their names, or return None.

    For example, `seg_train` and `seg_test` contain class folders, or `cat_train` and `cat_test`
    contain the images of one class.
    """
    called = [child for child in children if find_role(child.base_name)]
    roles_called = [find_role(child.base_name) for child in called]
    if len(called) > 1 and len({*roles_called}) == len(called) and "train" in roles_called:
        train = called[roles_called.index("train")]
        classes = {below.base_name for below in _find_class_root(train).with_images}
        rest = [child for child in called if child is not train]
        if all(_shares_classes(child, classes) for child in rest):
            others = [child for child in children if child not in called]
            notes = [_note_unread(others)] if others else []
            return _build_split_layout(called, notes, exact=False)
    by_rest: dict[str, list[Folder]] = {}
    for child in called:
        by_rest.setdefault(remove_split_words(child.base_name), []).append(child)
    groups = [
        group
        for group in by_rest.values()
        if "train" in (roles := {find_role(child.base_name) for child in group}) and len(roles) > 1
    ]
    if len(groups) > 1 and len(called) == len(children) == sum(map(len, groups)):
        return _read_label_and_split(children)
    if groups:
        raise SplitUnclear(
            f"{listed(child.base_name for child in groups[0])} can be splits or classes; set the "
            f"splits with {format_option(train='FOLDER', test='FOLDER')}, or name all classes with "
            "--set 'classes=[...]'"
        )
    return None


def _shares_classes(folder: Folder, classes: set[str]) -> bool:
    """Return whether a folder has some of these class folders, or is a split without labels."""
    below = {child.base_name for child in _find_class_root(folder).with_images}
    return bool(below & classes) or (not below and is_generic_split_name(folder.base_name))


def _read_label_and_split(children: Sequence[Folder]) -> Layout:
    """Find the layout of folders named after a class and a split: `cat_train`, `cat_test`."""
    deep = [child for child in children if has_subfolders(child)]
    if deep:
        by_split: dict[str, list[str]] = {}
        for child in children:
            by_split.setdefault(str(find_role(child.base_name)), []).append(child.name)
        raise SplitUnclear(
            f"{listed(child.base_name for child in children)} can be splits of classes that are "
            f"folders in them, such as {quoted(deep[0].with_images[0].name)}; say so with "
            f"--set {shlex.quote(format_splits(by_split))}"
        )
    patterns: dict[str, str] = {}
    for child in children:
        start, stop = find_split_word(child.base_name)
        word = child.base_name[start:stop]
        before, after = child.base_name[:start], child.base_name[stop:]
        if before and after:
            raise SplitUnclear(
                f"{quoted(child.name)} has a split inside its name; say the splits with "
                f"{format_option(train=f'{LABEL}_train')}, or rename the folders"
            )
        pattern = f"{LABEL}{_find_separators(before)}{word}"
        if not before:
            pattern = f"{word}{_find_separators(after)}{LABEL}"
        patterns[posixpath.join(posixpath.dirname(child.name), pattern)] = word
    words_of = parse_split_words(patterns.values())
    splits: dict[str, list[str]] = {
        split: [pattern for pattern, word in patterns.items() if word in words]
        for split, words in words_of.splits.items()
    }
    return Layout(splits, "folders that are called by a class and a split")


def _find_separators(text: str) -> str:
    """Return the separators between class and split in a folder name, for example `_`."""
    stripped = text.strip("_-. ")
    return text.replace(stripped, "") if stripped else text


# ---- classes -------------------------------------------------------------------------------------
def _read_class_folders(folder: Folder, children: Sequence[Folder]) -> Layout | list[Folder]:
    """Find the layout of class folders, or return the folders if each one contains a data set."""
    top = folder.name or "."
    inner = _read_inner_splits(top, children)
    if inner is not None:
        return inner
    if all(has_subfolders(child) and not child.images for child in children):
        wrappers = [child for child in children if is_called(child.base_name, WRAPPERS)]
        if len(wrappers) == 1 and len(children) > 1:
            raise SplitUnclear(
                f"{quoted(wrappers[0].name)} and "
                f"{listed(child.name for child in children if child not in wrappers)} can be "
                f"classes, or data sets of which one is meant; give the path of the one, or say "
                f"{format_option(train=wrappers[0].name)}"
            )
        return [*children]
    named = _read_splits_in_file_names(top, children)
    return named or Layout({"train": [top]}, "class folders")


def _read_inner_splits(top: str, children: Sequence[Folder]) -> Layout | None:
    """Find the layout of class folders with split folders in them, or return None."""
    words: set[str] = set()
    for child in children:
        below = child.with_images
        named = [one.base_name for one in below if parse_role(one.base_name)]
        if named and all(has_subfolders(one) for one in below if one.base_name in named):
            return None  # the child is a data set with its own splits
        if named and len(named) < len(below):
            raise SplitUnclear(
                f"{quoted(child.name)} has folders {listed(named)} beside "
                f"{listed(one.base_name for one in below if one.base_name not in named)}, which "
                "can be splits or not; if they are not, say "
                f"{format_option(train=posixpath.join(top, LABEL))}"
            )
        words.update(named)
    if not words:
        return None
    has_loose = any(child.images for child in children)
    base = "" if top == "." else f"{top}/"
    layout: dict[str, list[str]] = {}
    if has_loose and any(parse_role(word) == "train" for word in words):
        raise SplitUnclear(
            f"the classes have images beside folders {listed(sorted(words))}; move the images, or "
            f"say {format_option(train=f'{base}{LABEL}')} if the folders are not splits"
        )
    if not has_loose and not any(parse_role(word) == "train" for word in words):
        raise SplitUnclear(
            f"the classes have folders {listed(sorted(words))} and no train images; say "
            f"{format_option(train=f'{base}{LABEL}')} if they are not splits"
        )
    names = sorted(words) if not has_loose else [*sorted(words), "train"]
    for split, of_split in parse_split_words(names).splits.items():
        layout[split] = [
            f"{base}{LABEL}" if has_loose and name == "train" else f"{base}{LABEL}/{name}"
            for name in of_split
        ]
    return Layout(layout, f"class folders with {listed(sorted(words))} in them")


def _read_splits_in_file_names(top: str, children: Sequence[Folder]) -> Layout | None:
    """Find the layout of images named like `train_1.png` and `test_1.png`, or return None."""
    words: dict[str, int] = {}
    total = 0
    for child in children:
        for below in child.walk():
            for name in below.images:
                total += 1
                first = next(iter(tokenize_name(name)), "")
                if parse_role(first) and name.startswith(first):
                    words[first] = words.get(first, 0) + 1
    roles = {parse_role(word) for word in words}
    num_named = sum(words.values())
    if len(roles) < 2 or "train" not in roles or num_named * 2 < total:
        return None
    base = "" if top == "." else f"{top}/"
    if num_named < total:
        raise SplitUnclear(
            f"{num_named} of {total} images have names that begin with {listed(sorted(words))}, "
            f"which looks like a split; say {format_option(train=f'{base}{LABEL}')} if it is not "
            "one, or rename the others"
        )
    splits: dict[str, list[str]] = {
        split: [f"{base}{LABEL}/{word}*" for word in of_split]
        for split, of_split in parse_split_words(words).splits.items()
    }
    return Layout(splits, f"class folders, splits by the beginning of names: {listed(words)}")
