"""Detect data sets in Parquet and Arrow files; `shards` detects those in tar files.

`assign_files` assigns the files of a source to splits; `shards` uses it, too.

A role is the part of a data set that a word in a name stands for: train, val, test or held out. A
weak word, for example `dev` or `learn`, often names a class instead. `parse_role` expects a whole
word, `find_role` a name of one or more words (see `pipeline.data.splits`).
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from glob import escape
from itertools import islice
from typing import Any

import pyarrow as pa

from pipeline.config.text import format_count
from pipeline.data.column_files import (
    ARROW_SUFFIX,
    Schema,
    read_batches,
    read_schema,
    to_python_list,
)
from pipeline.data.detection.columns import (
    MAX_SPLIT_VALUES,
    Columns,
    LabelUnclear,
    classify_split_column,
    find_label_column,
    find_split_columns,
    format_columns,
    note_label,
)
from pipeline.data.detection.data_set import DataSet, Request, format_splits, read_labelled
from pipeline.data.detection.words import IMAGE_COLUMNS, LABEL_COLUMNS, is_part
from pipeline.data.names import get_suffix, listed, printable, quoted
from pipeline.data.splits import (
    IGNORE,
    SplitUnclear,
    SplitWords,
    find_role,
    is_generic_split_name,
    is_weak,
    normalize_word,
    parse_role,
    parse_split_words,
    tokenize_name,
)
from pipeline.data.tables import MAX_TEXT
from workers.data.in_place import expand_patterns
from workers.errors import UserError
from workers.storage.artifact import join

SAMPLE_BATCH_ROWS = 512  # rows per batch of the sample that distinguishes columns
MAX_SAMPLE_BATCHES = 4
MAX_FOLDERS = 10_000  # distinct folders read from a column of paths


@dataclass(frozen=True)
class Files:
    """Files of one kind, for example all Parquet files below a folder.

    Attributes:
        request: The user's request.
        base: Path or URI of the folder that contains the files.
        name: Name of the data set.
        names: Paths of the files below `base`, sorted.
        path: Path of the source: `base`, or the file if the source is a single file.
    """

    request: Request
    base: str
    name: str
    names: Sequence[str]
    path: str

    @property
    def where(self) -> str:
        """The path of the source in errors."""
        return printable(self.path)

    def uris(self, names: Sequence[str]) -> list[str]:
        """Return the paths or URIs of files."""
        return [join(self.base, name) for name in names]

    def with_splits(self, splits: Mapping[str, Sequence[str]]) -> Files:
        """Return a copy with these splits in place of the setting `splits` of the request.

        Settings of the request override a proposed source (see `build_data_set`), so the patterns
        that the user gave must be replaced by the files that they match. Without the setting, the
        copy is unchanged.
        """
        settings = dict(self.request.given)
        if "splits" in settings:
            settings["splits"] = splits
        return replace(self, request=replace(self.request, given=settings))


# ---- splits by file names ------------------------------------------------------------------------
def assign_files(files: Files) -> tuple[dict[str, list[str]], list[str]]:
    """Assign files to splits.

    With the setting `split`, a column or field inside the files gives the splits, and all files are
    returned as train. Otherwise the setting `splits` decides, or else words in the paths, for
    example `train-00.parquet`. Without such words, all files are train.

    Returns:
        The files of each split, and the unused files.

    Raises:
        SplitUnclear: If no file is train, a path can be read in several ways, or a pattern of the
            setting `splits` matches no file.
    """
    settings = files.request.given
    if settings.get("split"):
        return {"train": [*files.names]}, []
    if "splits" in settings:
        return _assign_given_files(files, settings["splits"])
    by_word: dict[str, list[str]] = {}
    for name in files.names:
        by_word.setdefault(_find_split_word(files, name), []).append(name)
    unnamed = by_word.pop("", [])
    _check_variants(files)
    if not by_word:
        likely = [name for name in files.names if "train" in name.lower()]
        if likely and len(likely) < len(files.names):
            raise SplitUnclear(
                f"{files.where}: {listed(likely)} may be the train files, but not "
                f"{listed(name for name in files.names if name not in likely)}; assign the files, "
                f"as in {_format_splits_command(files, likely[0])}"
            )
        return {"train": [*files.names]}, []
    try:
        words = parse_split_words(by_word, exact=False)
    except SplitUnclear as error:
        raise SplitUnclear(
            f"{files.where}: {error}; assign the files, as in {_format_splits_command(files)}"
        ) from None
    if "train" not in words.splits:
        raise SplitUnclear(
            f"{files.where} holds {get_suffix(files.names[0])} files of {listed(by_word)} and none "
            f"of train{f', beside {listed(unnamed)}' if unnamed else ''}; assign the files, as "
            f"in {_format_splits_command(files, *unnamed[:1])}"
        )
    splits: dict[str, list[str]] = {}
    for split, of_split in words.splits.items():
        splits[split] = sorted(name for word in of_split for name in by_word[word])
    return splits, unnamed


def _format_splits_command(files: Files, train: str = "", test: str = "") -> str:
    """Format the command that assigns a file to train and another one to test."""
    test = test or next((name for name in files.names if name != train), "test*")
    splits = {"train": [escape(train or files.names[0])], "test": [escape(test)]}
    return f"`{files.request.command(format_splits(splits))}`"


def _assign_given_files(
    files: Files, named: Mapping[str, str | Sequence[str]]
) -> tuple[dict[str, list[str]], list[str]]:
    """Assign files by the setting `splits`: paths, globs or braces.

    Returns:
        The files of each split, and the unused files.
    """
    splits: dict[str, list[str]] = {}
    used: set[str] = set()
    for split, given in named.items():
        patterns = (given,) if isinstance(given, str) else tuple(given)
        has_braces = any("{" in pattern for pattern in patterns)
        expanded = expand_patterns(patterns) if has_braces else [*patterns]
        names = {name for pattern in expanded for name in _match_names(pattern, files.names)}
        names |= {name for name in files.names if name in expanded}
        if not names and split != IGNORE:
            raise SplitUnclear(
                f"{files.where}: no file matches {listed(patterns)} of source.splits.{split}; the "
                f"files are {listed(files.names)}"
            )
        used |= names
        if split != IGNORE:
            splits[split] = sorted(names)
    if "train" not in splits:
        raise SplitUnclear(f"{files.where}: source.splits names no train files; add `train`")
    return splits, [name for name in files.names if name not in used]


def _check_variants(files: Files) -> None:
    """Raise SplitUnclear if several folders contain files with equal names that name splits.

    For example, `full/train.parquet` and `small/train.parquet` are two variants of a data set.
    """
    # parent folders whose names contain no split word, joined -> the other parts of each such path
    # (folders with a split word, and the file name), joined
    names_by_top: dict[str, set[str]] = {}
    for name in files.names:
        *folders, base = name.split("/")
        top = "/".join(part for part in folders if find_role(part) is None)
        rest = "/".join([part for part in folders if find_role(part) is not None] + [base])
        if find_role(rest) or any(map(find_role, rest.split("/"))):
            names_by_top.setdefault(top, set()).add(rest)
    first = next(iter(names_by_top.values()), set[str]())
    same = [top for top, names in names_by_top.items() if names == first]
    if len(same) < 2 or all(map(is_part, same)):
        return  # part_1/train and part_2/train are pieces of one data set, not variants
    path = posixpath.join(files.request.path, same[0])
    raise SplitUnclear(
        f"{files.where}: {listed(same)} hold files of the same names; give the path of one, as in "
        f"`{files.request.command(path=path)}`, or read all: "
        f"`{files.request.command(format_splits({'train': [f'{top}/*' for top in same]}))}`"
    )


def note_unused(names: Sequence[str]) -> list[str]:
    """Return a note on files that belong to no split, or [] if there are none."""
    if not names:
        return []
    if len(names) == 1:
        return [f"1 file is not read because it belongs to no split: {listed(names)}"]
    return [f"{len(names)} files are not read because they belong to no split: {listed(names)}"]


def _find_split_word(files: Files, name: str) -> str:
    """Return the split word in the path of a file, for example `train`, or "".

    The file name is searched first, then its folders from the innermost outwards. In a name of
    several words, a weak word counts only if there is no other split word.

    Raises:
        SplitUnclear: If one name contains words of several splits.
    """
    stem = name.rpartition(".")[0]
    for part in reversed(stem.split("/")):
        if parse_role(part):
            return part
        words = [word for word in tokenize_name(part) if parse_role(word)]
        words = [word for word in words if not is_weak(word)] or words
        if len({parse_role(word) for word in words}) > 1:
            raise SplitUnclear(
                f"{files.where}: the name of {quoted(name)} contains several splits, "
                f"{listed(words)}; assign the files, as in {_format_splits_command(files)}"
            )
        if words:
            return words[0]
    return ""


def build_patterns(
    splits: Mapping[str, Sequence[str]], names: Sequence[str]
) -> dict[str, list[str]]:
    """Build short patterns for a card that match the files of each split and no others.

    If no short pattern fits, the files are named one by one.

    Args:
        splits: Split -> its files.
        names: All files of the source.
    """
    patterns: dict[str, list[str]] = {}
    for split, of_split in splits.items():
        if sorted(of_split) == sorted(names):
            kinds = sorted({f"*{posixpath.splitext(name)[1]}" for name in names})
            patterns[split] = [escape(names[0])] if len(names) == 1 else kinds
            continue
        prefix = posixpath.commonprefix([*of_split])
        patterns[split] = [escape(name) for name in of_split]
        for end in ("-", "_", ".", "/", ""):
            start = prefix.rpartition(end)[0] if end else prefix
            for pattern in (escape(start), f"{escape(start)}*"):
                if start and _match_names(pattern, names) == sorted(of_split):
                    patterns[split] = [pattern]
                    break
            else:
                continue
            break
    return patterns


def _match_names(pattern: str, names: Sequence[str]) -> list[str]:
    """Return the names that match a glob, or begin with it and `/`, `-`, `_` or `.`."""
    globs = (pattern, f"{pattern}/*", f"{pattern}-*", f"{pattern}_*", f"{pattern}.*")
    return sorted(name for name in names if any(fnmatch(name, glob) for glob in globs))


# ---- Parquet and Arrow ---------------------------------------------------------------------------
def read_columns(files: Files) -> DataSet:
    """Read the data set in Parquet or Arrow files with columns of image bytes and labels.

    Raises:
        UserError: If the files contain no labelled images, or can be read in several ways.
    """
    request = files.request
    all_names = files.names
    files = replace(files, names=[name for name in all_names if not is_cache(name)] or all_names)
    splits, unused = assign_files(files)
    first = join(files.base, splits["train"][0])
    schema = read_schema(first)
    columns = _sample_columns(files, first, schema)
    for name in schema.names:  # raises an error for duplicate names
        columns.check(name)
    image = _choose_image_column(files, schema, columns)
    split: tuple[str, ...] = ()
    words: SplitWords | None = None
    if "splits" not in request.given or request.given.get("split"):
        labels = [
            name
            for name in schema.classes
            if len(splits) > 1 or classify_split_column(name) != "column"
        ]
        split, words = find_split_columns(columns, [image, *labels])
    _check_nested(files, schema, image)
    label = find_label_column(columns, [image, *split], schema.classes)
    if label is None:
        raise UserError(
            f"{files.where} has no column of labels (of names or whole numbers), only "
            f"{format_columns(schema.names)}; add one"
        )
    source: dict[str, Any] = {"format": "parquet", "path": files.path}
    source |= {"image": image, "label": label}
    notes = note_unused(unused)
    caches = [name for name in all_names if name not in files.names]
    if caches:
        notes.append(f"caches of the library `datasets` are not read: {listed(caches)}")
    is_one_split = words is not None and set(words.splits) == {"train"} and len(files.names) > 1
    if is_one_split and "split" not in request.given:
        # a column with only `train` is no split column of several files: their names decide
        split = ()
    if split and words:
        if len(splits) > 1:
            none = request.command("source.split=null")
            raise SplitUnclear(
                f"{files.where}: both the names of its files and the column {quoted(split[0])} "
                f"define splits; choose one: to ignore the column, `{none}`"
            )
        source |= {"split": [*split], "splits": words.splits}
    else:
        if not {"split", "splits"} & request.given.keys():
            _check_other_columns(files, splits["train"][0], schema)
            if len(splits) == 1:
                _check_paths(files, schema, columns, image)
        source["splits"] = build_patterns(splits, all_names)
    others = [name for name in schema.classes if name != label]
    if others:
        notes.append(f"labels in {listed(others)} are not read")
    else:
        notes += note_label(columns, label, [image, *split])
    num_files = sum(len(names) for names in splits.values())
    noun = "Arrow file" if get_suffix(first) == ARROW_SUFFIX else "Parquet file"
    layout = (
        f"{format_count(num_files, noun)}, images in column {quoted(image)}, labels in "
        f"{quoted(label)}"
        f"{f', splits in {listed(split)}' if split else ''}"
    )
    return read_labelled(request, files.name, layout, source, notes)


def _check_nested(files: Files, schema: Schema, image: str) -> None:
    """Raise LabelUnclear if only a list or a struct has labels, for example `meta: {label}`."""
    usual = [name for name in schema.names if normalize_word(name) in LABEL_COLUMNS]
    if "label" in files.request.given or any(_may_be_label(schema.types[one]) for one in usual):
        return
    for name, arrow_type in schema.types.items():
        names = [name]
        if pa.types.is_struct(arrow_type):
            names += [field.name for field in arrow_type if field.name != "y"]  # a coordinate
        is_nested = pa.types.is_nested(arrow_type) and name != image and name not in schema.images
        if is_nested and any(normalize_word(one) in LABEL_COLUMNS for one in names):
            raise LabelUnclear(
                f"{files.where}: column {quoted(name)} has the type {arrow_type}, and labels are "
                "not read from lists or structs; write the label of an image as a column of its "
                "own, or name another column, as in "
                f"`{files.request.command('source.label=COLUMN')}`"
            )


def is_cache(name: str) -> bool:
    """Return whether a file is a cache of the library `datasets`, for example `cache-1f.arrow`."""
    base = name.rpartition("/")[2]
    return base.startswith("cache-") and get_suffix(base) == ARROW_SUFFIX


def _check_other_columns(files: Files, first: str, schema: Schema) -> None:
    """Raise SplitUnclear if a file has a split column that the schema of `first` lacks."""
    for name, uri in zip(files.names, files.uris(files.names), strict=True):
        for column in read_schema(uri).names:
            if column not in schema.names and classify_split_column(column):
                raise SplitUnclear(
                    f"{files.where}: {quoted(name)} has a column {quoted(column)}, which looks "
                    f"like a split, but {quoted(first)} has not; add it there, or say that it is "
                    f"not a split: `{files.request.command('source.split=null')}`"
                )


def _check_paths(files: Files, schema: Schema, columns: Columns, image: str) -> None:
    """Raise SplitUnclear if a column of paths names another split, for example `test/1.png`."""
    paths = [name for name, texts in columns.sample.items() if any("/" in (t or "") for t in texts)]
    arrow_type = schema.types[image]
    if pa.types.is_struct(arrow_type) and arrow_type.get_field_index("path") >= 0:
        paths.append(f"{image}.path")
    for column in paths:
        parts = {part for folder in _list_path_folders(files, column) for part in folder.split("/")}
        words = [part for part in parts if find_role(part) and not is_weak(part)]
        # only folders named by a split and neutral words: `test_images`, but not `test_drive`
        words = [part for part in words if is_generic_split_name(part)]
        if {find_role(word) for word in words} - {"train"}:
            raise SplitUnclear(
                f"{files.where}: the paths in column {quoted(column)} lie in "
                f"{listed(sorted(words))}, which looks like a split, but all rows would be train; "
                "write a file for each split, add a column `split`, or declare that there is none: "
                f"`{files.request.command('source.split=null')}`"
            )


def _list_path_folders(files: Files, column: str) -> Iterator[str]:
    """Yield the first MAX_FOLDERS distinct folders of the paths in a column or a struct field."""
    seen: set[str] = set()
    for uri in files.uris(files.names):
        name, _, field = column.partition(".")
        is_field = bool(field) and column not in read_schema(uri).names
        # one field of a struct can be read only from Parquet; from Arrow, the whole struct is read
        is_whole = is_field and get_suffix(uri) == ARROW_SUFFIX
        for batch in read_batches(uri, [name if is_whole else column]):
            values = batch[name if is_field else column]
            if is_field:
                values = values.field(field)
            for path in to_python_list(values):
                folder = str(path or "").replace("\\", "/").rpartition("/")[0]
                if folder not in seen and len(seen) < MAX_FOLDERS:
                    seen.add(folder)
                    yield folder


def holds_images(uri: str) -> bool:
    """Return whether a Parquet or Arrow file has a column of image bytes, not only of paths."""
    schema = read_schema(uri)
    return bool(schema.images) and not _has_only_paths(uri, schema)


def _has_only_paths(uri: str, schema: Schema) -> bool:
    """Return whether the image structs in the first rows have a path but no bytes."""
    column = schema.images[0]
    if schema.names.count(column) > 1 or not pa.types.is_struct(schema.types[column]):
        return False
    for batch in islice(read_batches(uri, [column], 8), 1):
        rows = [row for row in to_python_list(batch[column]) if row is not None]
        return bool(rows) and all(row.get("bytes") is None and row.get("path") for row in rows)
    return False


def _sample_columns(files: Files, uri: str, schema: Schema) -> Columns:
    """Sample the columns that may be labels or splits, from the first rows of the file `uri`.

    The columns and their types come from this file. `distinct` reads the column in all files.
    """
    types = schema.types.items()
    names = [name for name, arrow_type in types if _may_be_label(arrow_type)]
    names = [name for name in names if schema.names.count(name) == 1]
    sample: dict[str, list[str | None]] = {name: [] for name in names}
    batches = read_batches(uri, names, SAMPLE_BATCH_ROWS) if names else iter(())
    for batch in islice(batches, MAX_SAMPLE_BATCHES):
        for name in names:
            sample[name] += [_to_short_text(value) for value in to_python_list(batch[name])]

    def read_distinct(column: str) -> set[str] | None:
        values = _read_distinct(files, column)
        return None if len(values) > MAX_SPLIT_VALUES else values

    return Columns(
        files.request,
        files.where,
        schema.names,
        sample,
        distinct=read_distinct,
        find_row=lambda *_: 0,  # the numbers of rows are unknown
    )


def _to_short_text(value: Any) -> str | None:
    return None if value is None else str(value)[:MAX_TEXT].strip()


def _choose_image_column(files: Files, schema: Schema, columns: Columns) -> str:
    """Return the requested image column, or the only possible one, or the one called `image`."""
    requested = files.request.given.get("image")
    if requested is not None:
        return columns.check(requested)
    if not schema.images:
        types = schema.types.items()
        arrays = [name for name, arrow_type in types if _is_array(arrow_type)]
        if arrays:
            raise UserError(
                f"{files.where}: column {quoted(arrays[0])} has the type "
                f"{schema.types[arrays[0]]}, an array instead of an encoded image; write the "
                "images as PNG or JPEG bytes"
            )
        raise UserError(
            f"{files.where} has no column of image bytes, only {format_columns(schema.names)}; "
            "add one, or give a table of paths"
        )
    known = [name for name in schema.images if normalize_word(name) == IMAGE_COLUMNS[0]]
    if len(schema.images) > 1 and len(known) != 1:
        raise columns.ambiguous_error("image", schema.images)
    return (known or schema.images)[0]


def _is_array(arrow_type: pa.DataType) -> bool:
    is_list = pa.types.is_list(arrow_type) or pa.types.is_large_list(arrow_type)
    return bool(
        is_list
        or pa.types.is_fixed_size_list(arrow_type)
        or isinstance(arrow_type, pa.ExtensionType)
    )


def _may_be_label(arrow_type: pa.DataType) -> bool:
    is_text = pa.types.is_string(arrow_type) or pa.types.is_large_string(arrow_type)
    is_text = is_text or pa.types.is_string_view(arrow_type)
    is_number = pa.types.is_integer(arrow_type) or pa.types.is_floating(arrow_type)
    return bool(
        is_text
        or is_number
        or pa.types.is_boolean(arrow_type)
        or pa.types.is_dictionary(arrow_type)
    )


def _read_distinct(files: Files, column: str) -> set[str]:
    """Read the distinct values of a column in all files; stop after MAX_SPLIT_VALUES."""
    values: set[str] = set()
    for uri in files.uris(files.names):
        if column not in read_schema(uri).names:
            raise UserError(
                f"{printable(uri)} has no column {column!r}, but other files do; add it"
            )
        for batch in read_batches(uri, [column]):
            values.update(_to_short_text(value) or "" for value in {*to_python_list(batch[column])})
            if len(values) > MAX_SPLIT_VALUES:
                return values
    return values
