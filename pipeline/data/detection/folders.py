"""How folders of images are laid out: where the splits are, and where the classes.

Each way is a mapping for `source.splits`. Where several ways are possible, the error names the
setting that decides.
"""

from __future__ import annotations

import posixpath
import shlex
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from pipeline.data.detection.data_set import splits_setting
from pipeline.data.detection.words import (
    NO_CLASSES,
    PERHAPS_NO_CLASSES,
    WITHOUT_LABELS,
    WRAPPERS,
    is_called,
)
from pipeline.data.formats.folder import LABEL
from pipeline.data.listing import Folder
from pipeline.data.names import listed, quoted
from pipeline.data.splits import (
    IGNORE,
    SPLITS,
    WEAK_WORDS,
    SplitUnclear,
    plain_word,
    read_words,
    rest_is_generic,
    rest_of,
    role_in,
    role_of,
    tokens_of,
)
from workers.errors import UserError

MOST_PAIRED = 20_000  # images whose names are compared
SHARE_PAIRED = 0.9  # of the images of a folder that have another one of the same name


class Layout(NamedTuple):
    """One way in which folders hold a data set.

    Attributes:
        splits: For `source.splits`, paths below the source.
        text: In a few words.
        notes: On folders that are left out.
    """

    splits: dict[str, list[str]]
    text: str
    notes: tuple[str, ...] = ()


class NoClasses(UserError):
    """There are images, and no folders of classes."""


def is_deep(folder: Folder) -> bool:
    """Whether a folder has folders with images."""
    return bool(folder.with_images)


def layout_of(folder: Folder) -> Layout | list[Folder]:
    """Return how a folder holds a data set, or the folders that hold one each.

    Raises:
        SplitUnclear: If it can be read in several ways.
        NoClasses: If its images lie in no folders of classes.
    """
    all_children = folder.with_images
    children, notes = _without_others(folder, all_children)
    ignored = [child for child in all_children if child not in children]
    if not children:
        raise NoClasses("no folder of a class")
    splits = _split_children(children)
    layout: Layout | list[Folder] | None = None
    if splits:
        layout = _with_splits(children, splits)
    layout = layout or _split_in_names(children)
    if layout is None and len(children) == 1 and is_deep(children[0]):
        layout = layout_of(children[0])
    if layout is None and _is_wrapped(children):
        raise NoClasses("no folder of a class")
    if layout is None:
        layout = _class_folders(folder, children)
    if isinstance(layout, Layout):
        return _ignoring(layout, folder, ignored, notes)
    return layout


def _is_wrapped(children: Sequence[Folder]) -> bool:
    """Whether the only folder is one such as `images`, with images and no folders of classes."""
    return (
        len(children) == 1
        and is_called(children[0].base_name, WRAPPERS)
        and not is_deep(children[0])
    )


def _ignoring(
    layout: Layout, folder: Folder, ignored: Sequence[Folder], notes: Iterable[str]
) -> Layout:
    """Return a layout that leaves out folders which would be classes otherwise."""
    splits = dict(layout.splits)
    top = [""] if folder.name == "" else [folder.name]
    if ignored and any(part in (".", *top) or LABEL in part for part in splits["train"]):
        splits[IGNORE] = [*splits.get(IGNORE, ()), *(child.name for child in ignored)]
    return Layout(splits, layout.text, (*layout.notes, *notes))


# ---- folders that are no classes -----------------------------------------------------------------
def _without_others(folder: Folder, children: list[Folder]) -> tuple[list[Folder], list[str]]:
    """Return the folders that may be classes or splits, and notes on the others.

    Raises:
        SplitUnclear: If a folder may be a class or not.
    """
    kept = [child for child in children if not is_called(child.base_name, NO_CLASSES)]
    if not kept:
        return children, []
    known = {child.base_name for child in kept}
    are_flat = [child for child in kept if not is_deep(child)]
    for child in [*kept]:
        below = {one.base_name for one in child.with_images}
        is_copy = bool(below) and below <= known - {child.base_name}
        if is_called(child.base_name, PERHAPS_NO_CLASSES) and len(kept) > 1:
            others = [other for other in kept if other is not child]
            below_others = {one.base_name for other in others for one in other.with_images}
            is_copy = is_copy or (bool(below) and below <= below_others)
            if not (is_copy or _differs(child, others) or _pairs(child, others)):
                raise _class_or_not(folder, child)
            kept.remove(child)
        elif is_copy and len(are_flat) >= len(kept) - 1 and role_of(child.base_name) is None:
            raise _class_or_not(folder, child)
    left_out = [child.base_name for child in children if child not in kept]
    notes = [f"folders {listed(left_out)} are not read: their names are not those of classes"]
    return kept, notes if left_out else []


def _differs(child: Folder, others: Sequence[Folder]) -> bool:
    """Whether a folder has images alone while all others have folders of images."""
    return not is_deep(child) and all(is_deep(other) and not other.images for other in others)


def _pairs(child: Folder, others: Sequence[Folder]) -> bool:
    """Whether the images of a folder are called as those of the others, which differ."""
    stems = set(_stems(child))
    known: set[str] = set()
    for other in others:
        of_other = set(_stems(other))
        if known & of_other:
            return False  # numbers that begin again in each class pair with anything
        known |= of_other
    return bool(stems) and len(stems & known) >= SHARE_PAIRED * len(stems)


def _stems(folder: Folder) -> Iterator[str]:
    number = 0
    for below in folder.walk():
        for name in below.images:
            number += 1
            if number > MOST_PAIRED:
                return
            yield name.rpartition(".")[0].lower()


def _class_or_not(folder: Folder, child: Folder) -> SplitUnclear:
    leave_out = setting(train=folder.name or ".", ignore=child.name)
    return SplitUnclear(
        f"folder {quoted(child.name)} can be a class, or no part of the data; leave it out with "
        f"{leave_out}, or name all classes with --set 'classes=[...]'"
    )


def setting(**splits: str) -> str:
    """Return the option that says which folders the splits are."""
    return f"--set {shlex.quote(splits_setting({split: [path] for split, path in splits.items()}))}"


# ---- splits above the classes --------------------------------------------------------------------
def _split_children(children: Sequence[Folder]) -> list[Folder]:
    """Return the folders that are called by a split, and may be one."""
    return [
        child
        for child in children
        if role_of(child.base_name)
        and (is_deep(child) or plain_word(child.base_name) not in WEAK_WORDS)
    ]


def _with_splits(children: Sequence[Folder], splits: Sequence[Folder]) -> Layout | None:
    """Return the layout of folders that are called by splits; None if they are classes."""
    others = [child for child in children if child not in splits]
    roles = {role_of(child.base_name) for child in splits}
    train = [child for child in splits if role_of(child.base_name) == "train"]
    are_flat = not any(map(is_deep, splits))
    if are_flat and others and roles == {"train"} and not any(map(is_deep, others)):
        return None  # bus, car and train are classes
    if are_flat and others:
        names = listed(child.base_name for child in splits)
        raise SplitUnclear(
            f"{names} can be a class, or images of that split without labels, beside "
            f"{listed(child.base_name for child in others)}; leave it out with "
            f"{setting(train=_top(splits), ignore=splits[0].name)}, or name all classes with "
            "--set 'classes=[...]'"
        )
    if train and others and len(roles) == 1:
        raise SplitUnclear(
            f"{quoted(train[0].name)} can be a class, or the train images beside "
            f"{listed(child.base_name for child in others)}; say which with "
            f"{setting(train=train[0].name)}, or name all classes with --set 'classes=[...]'"
        )
    if not train and others:
        return _test_beside_classes(others, splits)
    if not train:
        raise SplitUnclear(
            f"there is {listed(child.base_name for child in splits)} and no train images; name the "
            f"folder that is learned from `train`, or say {setting(train='FOLDER')}"
        )
    if len(train) > 1:
        raise SplitUnclear(
            f"{listed(child.name for child in train)} are both train images; say which with "
            f"{setting(train=train[0].name)}, or rename one"
        )
    notes = [_others_note(others)] if others else []
    return _of_splits([*splits], notes)


def _others_note(others: Iterable[Folder]) -> str:
    return f"folders {listed(child.base_name for child in others)} are not read"


def _of_splits(folders: Sequence[Folder], notes: list[str], exact: bool = True) -> Layout:
    """Return the layout of folders that are a split each."""
    labelled = {child.base_name: child for child in folders}
    train = next(c for c in folders if (role_of if exact else role_in)(c.base_name) == "train")
    if not is_deep(train) or _is_wrapped(_class_root(train).with_images):
        raise NoClasses(f"no folder of a class in {quoted(train.name)}")
    for name, child in [*labelled.items()]:
        if not _has_labels(child, train):
            del labelled[name]
            notes.append(f"images in {quoted(name)} are not read: they have no labels")
    words = read_words(labelled, exact)
    splits: dict[str, list[str]] = {}
    ignored: list[str] = []
    for split, names in words.splits.items():
        if len(names) > 1:
            raise SplitUnclear(
                f"{listed(names)} are both {split} images; say which with "
                f"{setting(train=train.name, **{split: labelled[names[0]].name})}"
            )
        root = _class_root(labelled[names[0]])
        kept, more_notes = _without_others(root, root.with_images)
        splits[split] = [root.name]
        ignored += [child.name for child in root.with_images if child not in kept]
        notes += more_notes
    folder_names = " and ".join(f"{names[0]}/" for names in splits.values())
    if ignored:
        splits[IGNORE] = ignored
    return Layout(splits, f"class folders in {folder_names}", tuple(notes))


def _has_labels(child: Folder, train: Folder) -> bool:
    """Whether a folder has folders of classes, and not one that says that there are none."""
    classes = {below.base_name for below in _class_root(train).with_images}
    below = [one.base_name for one in _class_root(child).with_images]
    return len(below) > 1 or any(
        name in classes or not is_called(name, WITHOUT_LABELS) for name in below
    )


def _top(children: Sequence[Folder]) -> str:
    """Return the folder that holds some folders."""
    return posixpath.dirname(children[0].name) or "."


def _class_root(folder: Folder) -> Folder:
    """Return the folder that holds the classes: a split's only folder, if that holds several."""
    below = [c for c in folder.with_images if not is_called(c.base_name, NO_CLASSES)]
    wrappers = [child for child in below if is_called(child.base_name, WRAPPERS)]
    if len(wrappers) == 1 and is_deep(wrappers[0]):
        below = wrappers
    if folder.images or len(below) != 1 or len(below[0].with_images) < 2:
        return folder
    return _class_root(below[0])


def _test_beside_classes(classes: Sequence[Folder], splits: Sequence[Folder]) -> Layout:
    """Return the layout of class folders beside a folder of test images."""
    names = {child.base_name for child in classes}
    for child in splits:
        below = {one.base_name for one in _class_root(child).with_images}
        if not below & names:
            raise SplitUnclear(
                f"{quoted(child.name)} can be a class, or the images of a split, and has no folder "
                f"of the classes {listed(sorted(names))}; leave it out with "
                f"{setting(train=_top(classes), ignore=child.name)}, or name all classes with "
                "--set 'classes=[...]'"
            )
    words = read_words([*(child.base_name for child in splits), "train"])
    by_name = {child.base_name: child for child in splits}
    found: dict[str, list[str]] = {"train": [_top(classes)]}
    for split in SPLITS[1:]:
        if split in words.splits:
            found[split] = [_class_root(by_name[name]).name for name in words.splits[split]]
    tests = listed(child.base_name for child in splits)
    return Layout(found, f"class folders, and {tests} with folders of the same classes")


def _split_in_names(children: Sequence[Folder]) -> Layout | None:
    """Return the layout of folders with a word of a split in their names; None without such.

    Such are seg_train and seg_test, which hold classes, and cat_train and cat_test, which are some.
    """
    called = [child for child in children if role_in(child.base_name)]
    roles_called = [role_in(child.base_name) for child in called]
    if len(called) > 1 and len({*roles_called}) == len(called) and "train" in roles_called:
        train = called[roles_called.index("train")]
        classes = {below.base_name for below in _class_root(train).with_images}
        rest = [child for child in called if child is not train]
        if all(_shares_classes(child, classes) for child in rest):
            others = [child for child in children if child not in called]
            return _of_splits(called, [_others_note(others)] if others else [], exact=False)
    by_rest: dict[str, list[Folder]] = {}
    for child in called:
        by_rest.setdefault(rest_of(child.base_name), []).append(child)
    groups = [
        group
        for group in by_rest.values()
        if "train" in (roles := {role_in(child.base_name) for child in group}) and len(roles) > 1
    ]
    if len(groups) > 1 and len(called) == len(children) == sum(map(len, groups)):
        return _label_and_split(children)
    if groups:
        raise SplitUnclear(
            f"{listed(child.base_name for child in groups[0])} can be splits or classes; say it "
            f"with {setting(train='FOLDER', test='FOLDER')}, or name all classes with "
            "--set 'classes=[...]'"
        )
    return None


def _shares_classes(folder: Folder, classes: set[str]) -> bool:
    """Whether a folder has folders of some classes, or is the folder of a split without labels."""
    below = {child.base_name for child in _class_root(folder).with_images}
    return bool(below & classes) or (not below and rest_is_generic(folder.base_name))


def _label_and_split(children: Sequence[Folder]) -> Layout:
    """Return the layout of folders such as cat_train and cat_test."""
    deep = [child for child in children if is_deep(child)]
    if deep:
        by_split: dict[str, list[str]] = {}
        for child in children:
            by_split.setdefault(str(role_in(child.base_name)), []).append(child.name)
        raise SplitUnclear(
            f"{listed(child.base_name for child in children)} can be splits of classes that are "
            f"folders in them, such as {quoted(deep[0].with_images[0].name)}; say so with "
            f"--set {shlex.quote(splits_setting(by_split))}"
        )
    patterns: dict[str, str] = {}
    for child in children:
        words = tokens_of(child.base_name)
        word = next(word for word in words if role_of(word))
        start = child.base_name.index(word)
        before = child.base_name[:start]
        after = child.base_name[start + len(word) :]
        if before and after:
            raise SplitUnclear(
                f"{quoted(child.name)} has a split inside its name; say the splits with "
                f"{setting(train=f'{LABEL}_train')}, or rename the folders"
            )
        pattern = f"{word}{_sign(after)}{LABEL}" if not before else f"{LABEL}{_sign(before)}{word}"
        patterns[posixpath.join(posixpath.dirname(child.name), pattern)] = word
    words_of = read_words(patterns.values())
    splits: dict[str, list[str]] = {
        split: [pattern for pattern, word in patterns.items() if word in words]
        for split, words in words_of.splits.items()
    }
    return Layout(splits, "folders that are called by a class and a split")


def _sign(text: str) -> str:
    """Return the signs between a class and a split in the name of a folder."""
    stripped = text.strip("_-. ")
    return text.replace(stripped, "") if stripped else text


# ---- classes -------------------------------------------------------------------------------------
def _class_folders(folder: Folder, children: Sequence[Folder]) -> Layout | list[Folder]:
    """Return the layout of class folders, or the folders that hold a data set each."""
    top = folder.name or "."
    inner = _inner_splits(top, children)
    if inner is not None:
        return inner
    if all(is_deep(child) and not child.images for child in children):
        wrappers = [child for child in children if is_called(child.base_name, WRAPPERS)]
        if len(wrappers) == 1 and len(children) > 1:
            raise SplitUnclear(
                f"{quoted(wrappers[0].name)} and "
                f"{listed(child.name for child in children if child not in wrappers)} can be "
                f"classes, or data sets of which one is meant; give the path of the one, or say "
                f"{setting(train=wrappers[0].name)}"
            )
        return [*children]
    named = _splits_in_file_names(top, children)
    return named or Layout({"train": [top]}, "class folders")


def _inner_splits(top: str, children: Sequence[Folder]) -> Layout | None:
    """Return the layout of classes with folders train and test in them; None without such."""
    words: set[str] = set()
    for child in children:
        below = child.with_images
        named = [one.base_name for one in below if role_of(one.base_name)]
        if named and all(is_deep(one) for one in below if one.base_name in named):
            return None  # a data set with splits of its own
        if named and len(named) < len(below):
            raise SplitUnclear(
                f"{quoted(child.name)} has folders {listed(named)} beside "
                f"{listed(one.base_name for one in below if one.base_name not in named)}, which "
                "can be splits or not; if they are none, say "
                f"{setting(train=posixpath.join(top, LABEL))}"
            )
        words.update(named)
    if not words:
        return None
    has_loose = any(child.images for child in children)
    base = "" if top == "." else f"{top}/"
    found: dict[str, list[str]] = {}
    if has_loose and any(role_of(word) == "train" for word in words):
        raise SplitUnclear(
            f"the classes have images beside folders {listed(sorted(words))}; move them, or say "
            f"{setting(train=f'{base}{LABEL}')} if they are no splits"
        )
    if not has_loose and not any(role_of(word) == "train" for word in words):
        raise SplitUnclear(
            f"the classes have folders {listed(sorted(words))} and no train images; say "
            f"{setting(train=f'{base}{LABEL}')} if they are no splits"
        )
    names = sorted(words) if not has_loose else [*sorted(words), "train"]
    for split, of_split in read_words(names).splits.items():
        found[split] = [
            f"{base}{LABEL}" if has_loose and name == "train" else f"{base}{LABEL}/{name}"
            for name in of_split
        ]
    return Layout(found, f"class folders with {listed(sorted(words))} in them")


def _splits_in_file_names(top: str, children: Sequence[Folder]) -> Layout | None:
    """Return the layout of images that are called train_1.png and test_1.png; None without such."""
    words: dict[str, int] = {}
    total = 0
    for child in children:
        for below in child.walk():
            for name in below.images:
                total += 1
                first = next(iter(tokens_of(name)), "")
                if role_of(first) and name.startswith(first):
                    words[first] = words.get(first, 0) + 1
    roles = {role_of(word) for word in words}
    num_named = sum(words.values())
    if len(roles) < 2 or "train" not in roles or num_named * 2 < total:
        return None
    base = "" if top == "." else f"{top}/"
    if num_named < total:
        raise SplitUnclear(
            f"{num_named} of {total} images have names that begin with {listed(sorted(words))}, "
            f"which looks like a split; say {setting(train=f'{base}{LABEL}')} if it is none, or "
            "rename the others"
        )
    splits: dict[str, list[str]] = {
        split: [f"{base}{LABEL}/{word}*" for word in of_split]
        for split, of_split in read_words(words).splits.items()
    }
    return Layout(splits, f"class folders, splits by the beginning of names: {listed(words)}")
