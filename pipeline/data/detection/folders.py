"""Data sets among folders: class folders with or without splits, and folders of such."""

from __future__ import annotations

import os
import posixpath
import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass, replace

from pipeline.data.detection.columns import LabelUnclear, TableMeant
from pipeline.data.detection.data_set import (
    DataSet,
    Request,
    check_classes,
    choose_splits,
    counted,
    listed,
    name_of,
    quoted,
    split_of,
)
from pipeline.data.detection.image_folders import TableFile, split_word
from pipeline.data.detection.image_sizes import sizes_of_files
from pipeline.data.detection.image_tables import table_at, tables_in, tables_of
from pipeline.data.detection.packed_files import is_packed, unpack_command
from pipeline.data.detection.parquet_files import parquet_in, read_schema
from pipeline.data.detection.shard_files import shards_in
from pipeline.data.detection.tree import Folder
from pipeline.data.listing import nfc, printable, suffix_of
from workers.errors import UserError
from workers.storage.artifact import is_local, join

MOST_DATA_SETS = 200  # in one folder
WORD = re.compile(r"[a-z0-9]+")
# of a test folder's only folder: a loader of class folders asks for one
NO_CLASSES = frozenset(("all", "images", "imgs", "test", "testing", "unknown", "unlabeled"))
WHAT_WOULD_DO = (
    "what would do: class folders (CLASS/*.jpg), with or without train/ and test/ above them, a "
    "CSV file of paths and labels, Parquet files, or WebDataset tars"
)


@dataclass(frozen=True)
class Candidate:
    """A folder that may hold data sets. uri: where it lies. name: for the data set in it."""

    uri: str
    folder: Folder
    name: str
    request: Request

    def below(self, folder: Folder, name: str) -> Candidate:
        """Return a folder directly below, with the name that a data set in it would have."""
        return Candidate(join(self.uri, folder.base_name), folder, name, self.request)


def data_sets_in(candidate: Candidate) -> list[DataSet]:
    """Return the data sets of a folder: one, or one for each folder in it.

    Raise `UserError` where there is none.
    """
    try:
        return _data_sets_in(candidate)
    except UserError:
        data_set = _listed_in_text(candidate)
        if data_set is None:
            raise
        return [data_set]


def _listed_in_text(candidate: Candidate) -> DataSet | None:
    """Return the data set of train.txt or such, with paths and labels; None without one."""
    folder = candidate.folder
    names = [name for name in folder.other_files if suffix_of(name) == ".txt"]
    if not names:
        return None
    try:
        return tables_in(
            candidate.uri, replace(folder, tables=names), candidate.name, candidate.request
        )
    except UserError:
        return None


def _data_sets_in(candidate: Candidate) -> list[DataSet]:
    """Return what a table in the folder says, or else what its folders are."""
    folder = candidate.folder
    if not folder.tables:
        return _data_sets_by_folders(candidate)
    table_error: UserError
    try:
        return [tables_in(candidate.uri, folder, candidate.name, candidate.request)]
    except UserError as error:
        table_error = error
    has_images = any(below.holds_images() for below in folder.folders.values())
    is_asked = candidate.request.label is not None or candidate.request.image is not None
    if isinstance(table_error, TableMeant) or is_asked or not has_images:
        raise table_error
    try:
        return _data_sets_by_folders(candidate)
    except UserError:
        is_train = any(split_word(name) == "train" for name in folder.tables)
        if is_train or isinstance(table_error, LabelUnclear):
            raise table_error from None
        raise


def _data_sets_by_folders(candidate: Candidate) -> list[DataSet]:
    folder = candidate.folder
    with_content = [below for below in folder.folders.values() if _has_content(below)]
    splits = [below for below in with_content if split_of(below.base_name)]
    if all(split_of(below.base_name) == "val" for below in splits):
        splits = _folders_with_words_of_splits(with_content)
    if splits:
        return [_with_split_folders(candidate, splits)]
    if folder.parquet or folder.tars:
        return [_archives(candidate)]
    with_images = [below for below in with_content if below.images or not below.is_read]
    if with_images:
        return [_class_folders(candidate)]
    if len(with_content) == 1:
        return data_sets_in(candidate.below(with_content[0], candidate.name))
    if with_content:
        return _data_set_each(candidate, with_content)
    raise nothing_fits(candidate)


def _folders_with_words_of_splits(folders: list[Folder]) -> list[Folder]:
    """Return the folders that are called as splits but for the same other words, as in seg_train
    and seg_test; none where there is no train among them, or nothing else."""
    by_rest: dict[str, list[Folder]] = {}
    for folder in folders:
        words = WORD.findall(folder.base_name.lower())
        other_words = [word for word in words if split_of(word) is None]
        if len(words) - len(other_words) == 1:
            by_rest.setdefault(" ".join(other_words), []).append(folder)
    for group in by_rest.values():
        splits = {_split_in(folder.base_name) for folder in group}
        if "train" in splits and len(splits) > 1:
            return group
    return []


def _split_in(name: str) -> str | None:
    """Return the split that a word in a name says."""
    splits = filter(None, map(split_of, WORD.findall(name.lower())))
    return split_of(name) or next(splits, None)


def _inner(folder: Folder) -> Folder:
    """Return the only folder in a split's folder, where that holds the classes."""
    below = [child for child in folder.folders.values() if child.holds_images()]
    if folder.images or len(below) != 1:
        return folder
    num_classes = sum(child.holds_images() for child in below[0].folders.values())
    return below[0] if num_classes > 1 else folder


def _has_content(folder: Folder) -> bool:
    for below in folder.walk():
        if not below.is_read or below.images or below.parquet or below.tars:
            return True
    return False


# ---- class folders -------------------------------------------------------------------------------
def _class_folders(candidate: Candidate) -> DataSet:
    return _class_data_set(candidate, {"train": "."}, candidate.folder, None, [], "class folders")


def _with_split_folders(candidate: Candidate, folders: list[Folder]) -> DataSet:
    by_name = {below.base_name: below for below in folders}
    splits = choose_splits(by_name, _split_in)
    if splits.train is None:
        raise UserError(
            f"{printable(candidate.uri)} holds {listed(by_name)} and no train images; "
            "name the folder that is learned from `train`"
        )
    train = by_name[splits.train]
    test = by_name[splits.test] if splits.test else None
    if train.parquet or train.tars:
        return _archives(candidate)
    has_classes = any(below.holds_images() for below in train.folders.values())
    if train.tables and not has_classes:
        return _tables_of_splits(candidate, train, test)
    unused = [f"validation images in {quoted(name)}" for name in splits.unused]
    if test is not None and _is_unlabelled(test):
        images = counted(test.all_images(), "image")
        unused = [f"{images} without labels in {quoted(test.base_name)}"]
        test = by_name.get(splits.unused[0]) if splits.unused else None
    train = _inner(train)
    source_splits = {"train": _path_below(candidate, train)}
    if test is not None:
        test = _inner(test)
        source_splits["test"] = _path_below(candidate, test)
    layout = f"class folders in {' and '.join(f'{n}/' for n in source_splits.values())}"
    return _class_data_set(candidate, source_splits, train, test, unused, layout)


def _path_below(candidate: Candidate, folder: Folder) -> str:
    return folder.name.removeprefix(candidate.folder.name).lstrip("/")


def _is_unlabelled(test: Folder) -> bool:
    """Whether the images of a test folder lie in no folders, or in one that is no class."""
    names = [below.base_name.lower() for below in test.folders.values() if below.holds_images()]
    is_flat = not names or (len(names) == 1 and names[0] in NO_CLASSES)
    return is_flat and test.holds_images()


def _tables_of_splits(candidate: Candidate, train: Folder, test: Folder | None) -> DataSet:
    """Return the data set of tables that lie in the folders of their splits."""
    names = train.tables
    if test is not None:
        names = [name for name in names if name in test.tables] or names
    parts = {"train": TableFile(candidate.uri, f"{train.base_name}/{names[0]}")}
    if test is not None and names[0] in test.tables:
        parts["test"] = TableFile(candidate.uri, f"{test.base_name}/{names[0]}")
    return tables_of(parts, train, candidate.name, candidate.request)


def _class_data_set(
    candidate: Candidate,
    splits: dict[str, str],
    train: Folder,
    test: Folder | None,
    left_out: list[str],
    layout: str,
) -> DataSet:
    class_folders = [below for below in train.folders.values() if below.holds_images()]
    if not class_folders:
        raise nothing_fits(replace(candidate, folder=train))
    names = [nfc(below.base_name) for below in class_folders]
    classes = check_classes(printable(candidate.uri), sorted(names))
    counts = {"train": sum(below.all_images() for below in class_folders)}
    num_outside = train.images
    if test is not None:
        known = [below for below in test.folders.values() if nfc(below.base_name) in classes]
        counts["test"] = sum(below.all_images() for below in known)
        num_outside += test.all_images() - counts["test"]
        if counts["test"] == 0 and test.is_complete():
            raise UserError(
                f"{printable(candidate.uri)}: {quoted(test.base_name)} has no images of the "
                f"classes in {quoted(train.base_name)} ({listed(classes)}); name its folders "
                "alike, or move it away: then some images of each class are held out as test"
            )
    left_out = left_out + _left_out(train, class_folders, num_outside)
    total = sum(counts.values()) + num_outside
    is_complete = train.is_complete() and (test is None or test.is_complete())
    return DataSet(
        name=candidate.name,
        layout=layout,
        source={"format": "folder", "path": candidate.uri, "splits": splits},
        classes=classes,
        counts=counts,
        are_folders=len(train.folders) == len(class_folders) and not train.links,
        is_exact=is_complete,
        left_out=tuple(left_out),
        bad_fraction=(num_outside + len(train.links)) / max(total, 1),
        sizes=sizes_of_files(_samples(candidate, splits["train"], class_folders)),
    )


def _left_out(train: Folder, class_folders: list[Folder], num_outside: int) -> list[str]:
    parts: list[str] = []
    if num_outside:
        parts.append(f"{counted(num_outside, 'image')} in no folder of a class")
    empty = [below.base_name for below in train.folders.values() if below not in class_folders]
    if empty:
        parts.append(f"folders without images: {listed(empty)}")
    if train.links:
        parts.append(f"links to folders, which are not followed: {listed(train.links)}")
    if train.unused:
        parts.append(f"folders that programs leave behind: {listed(train.unused)}")
    other_files: list[str] = []
    for folder in train.walk():
        other_files += [*folder.other_files, *folder.tables]
    if other_files:
        parts.append(f"files that are no images: {listed(other_files)}")
    return parts


def _samples(candidate: Candidate, split: str, class_folders: list[Folder]) -> Iterable[str]:
    base = candidate.uri if split == "." else join(candidate.uri, split)
    for below in class_folders:
        for name in below.samples:
            yield join(base, below.base_name, name)


def _archives(candidate: Candidate) -> DataSet:
    """Return the data set of the Parquet files or tars in a folder and below."""
    names: dict[str, list[str]] = {"parquet": [], "tars": []}
    for below in candidate.folder.walk():
        prefix = _path_below(candidate, below)
        names["parquet"] += [f"{prefix}/{name}".lstrip("/") for name in below.parquet]
        names["tars"] += [f"{prefix}/{name}".lstrip("/") for name in below.tars]
    if names["parquet"]:
        first = join(candidate.uri, sorted(names["parquet"])[0])
        if len(names["parquet"]) == 1 and not read_schema(first).images:
            return table_at(first, candidate.name, candidate.request, candidate.folder)
        return parquet_in(candidate.uri, names["parquet"], candidate.name, candidate.request)
    return shards_in(candidate.uri, names["tars"], candidate.name, candidate.request)


# ---- several data sets ---------------------------------------------------------------------------
def _data_set_each(candidate: Candidate, folders: list[Folder]) -> list[DataSet]:
    if len(folders) > MOST_DATA_SETS:
        raise UserError(
            f"{printable(candidate.uri)} holds {len(folders)} folders of folders, and no more than "
            f"{MOST_DATA_SETS} data sets are taken at once; give the paths of those that are meant"
        )
    data_sets: list[DataSet] = []
    for below in sorted(folders, key=lambda folder: folder.name):
        data_sets += data_sets_in(candidate.below(below, name_of(below.base_name)))
    return data_sets


def nothing_fits(candidate: Candidate) -> UserError:
    """Return the error that says what is in a folder, and what would do."""
    return UserError(
        f"{printable(candidate.uri)} {contents(candidate.folder)}, which is no data set of images "
        f"with labels; {_remedy(candidate)}"
    )


def _remedy(candidate: Candidate) -> str:
    """Return what would do for a folder without a data set; a command where one helps."""
    folder = candidate.folder
    program = candidate.request.program
    packed = [join(candidate.uri, name) for name in folder.other_files if is_packed(name)]
    if packed and not folder.images and is_local(candidate.uri):
        # what several archives hold belongs together
        target = candidate.uri if len(packed) > 1 else ""
        command = unpack_command(packed, target, program)
        if command is not None:
            return f"unpack it: `{command}`"
    if folder.links and not folder.folders and is_local(candidate.uri):
        parents = {posixpath.dirname(path) for path in _link_targets(candidate)}
        if len(parents) == 1:
            return f"give the folder they lead to: `{program} {shlex.join(['init', *parents])}`"
    return WHAT_WOULD_DO


def _link_targets(candidate: Candidate) -> list[str]:
    return [os.path.realpath(os.path.join(candidate.uri, name)) for name in candidate.folder.links]


def contents(folder: Folder) -> str:
    """Return what is in a folder, as the rest of a sentence: `holds 2 folders (...)`."""
    parts: list[str] = []
    num_below = folder.all_images() - folder.images
    if folder.images:
        parts.append(f"{counted(folder.images, 'image')} in no folder of a class")
    if folder.folders:
        names = listed(folder.folders)
        parts.append(f"{counted(len(folder.folders), 'folder')} ({names})")
        if num_below:
            parts.append(f"{counted(num_below, 'image')} below")
    if folder.links:
        parts.append(f"links to folders, which are not followed ({listed(folder.links)})")
    files = [*folder.tables, *folder.parquet, *folder.tars, *folder.other_files]
    if files:
        parts.append(f"{counted(len(files), 'other file')} ({listed(files)})")
    return f"holds {', '.join(parts)}" if parts else "is empty"
