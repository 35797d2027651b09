"""Data sets in files that hold many images: which files are of which split, and Parquet and Arrow
files. Tars are in `shards`."""

from __future__ import annotations

import posixpath
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from glob import escape
from itertools import islice
from typing import Any

import pyarrow as pa

from pipeline.data.column_files import (
    ARROW_SUFFIX,
    Schema,
    batches_of,
    column_values,
    schema_of,
)
from pipeline.data.detection.columns import (
    MOST_VALUES,
    Columns,
    label_column,
    listed_columns,
    says_a_split,
    split_columns,
)
from pipeline.data.detection.data_set import DataSet, Request, read_labelled, splits_setting
from pipeline.data.detection.words import IMAGE_COLUMNS, is_part
from pipeline.data.names import counted, listed, printable, quoted, suffix_of
from pipeline.data.splits import (
    IGNORE,
    SplitUnclear,
    SplitWords,
    is_weak,
    plain_word,
    read_words,
    rest_is_generic,
    role_in,
    role_of,
    tokens_of,
)
from pipeline.data.tables import MAX_TEXT
from workers.data.in_place import expand
from workers.errors import UserError
from workers.storage.artifact import join

FIRST_ROWS = 512  # of a batch by which columns are told apart
MOST_BATCHES = 4
MOST_PATHS = 10_000  # folders of paths in a column that are looked at


@dataclass(frozen=True)
class Files:
    """Files of one kind.

    Attributes:
        request: What the person asked.
        base: Path or URI of the source.
        name: Of the data set.
        names: Of the files below the source, sorted.
        path: Of the source; a file if the source is one.
    """

    request: Request
    base: str
    name: str
    names: Sequence[str]
    path: str

    @property
    def where(self) -> str:
        """The source in a sentence."""
        return printable(self.path)

    def uris(self, names: Sequence[str]) -> list[str]:
        """Return the paths or URIs of files."""
        return [join(self.base, name) for name in names]

    def with_splits(self, splits: Mapping[str, Sequence[str]]) -> Files:
        """Return the same files, asked for with other splits if any were asked for."""
        given = dict(self.request.given)
        if "splits" in given:
            given["splits"] = splits
        return replace(self, request=replace(self.request, given=given))


# ---- splits by the names of files ----------------------------------------------------------------
def split_files(files: Files) -> tuple[dict[str, list[str]], list[str]]:
    """Return the files of each split, and those that are not used.

    They follow from the setting `splits` if it is given, else from the words in their paths. If no
    path has such a word, all are train.

    Raises:
        SplitUnclear: If there are none of train, or a path can be read in several ways.
    """
    settings = files.request.given
    if settings.get("split"):
        return {"train": [*files.names]}, []
    if "splits" in settings:
        return _given_files(files, settings["splits"])
    by_word: dict[str, list[str]] = {}
    for name in files.names:
        by_word.setdefault(_split_word(files, name), []).append(name)
    unnamed = by_word.pop("", [])
    _check_configs(files)
    if not by_word:
        parts = [name for name in files.names if "train" in name.lower()]
        if parts and len(parts) < len(files.names):
            raise SplitUnclear(
                f"{files.where}: {listed(parts)} can be train, beside "
                f"{listed(name for name in files.names if name not in parts)}; say which are "
                f"which, as in {_splits_command(files, parts[0])}"
            )
        return {"train": [*files.names]}, []
    try:
        words = read_words(by_word, exact=False)
    except SplitUnclear as error:
        raise SplitUnclear(
            f"{files.where}: {error}; say which files are which, as in {_splits_command(files)}"
        ) from None
    if "train" not in words.splits:
        raise SplitUnclear(
            f"{files.where} holds {suffix_of(files.names[0])} files of {listed(by_word)} and none "
            f"of train{f', beside {listed(unnamed)}' if unnamed else ''}; say which are train, as "
            f"in {_splits_command(files, *unnamed[:1])}"
        )
    splits: dict[str, list[str]] = {}
    for split, of_split in words.splits.items():
        splits[split] = sorted(name for word in of_split for name in by_word[word])
    return splits, unnamed


def _splits_command(files: Files, train: str = "", test: str = "") -> str:
    """Return a command that names files of train and test."""
    test = test or next((name for name in files.names if name != train), "test*")
    splits = {"train": [escape(train or files.names[0])], "test": [escape(test)]}
    return f"`{files.request.command(splits_setting(splits))}`"


def _given_files(
    files: Files, named: Mapping[str, str | Sequence[str]]
) -> tuple[dict[str, list[str]], list[str]]:
    """Return the files that the setting `splits` names by paths, globs or braces."""
    splits: dict[str, list[str]] = {}
    used: set[str] = set()
    for split, parts in named.items():
        patterns = (parts,) if isinstance(parts, str) else tuple(parts)
        expanded = expand(patterns) if any("{" in part for part in patterns) else [*patterns]
        names = {name for part in expanded for name in _taken(part, files.names)}
        names |= {name for name in files.names if name in expanded}
        if not names and split != IGNORE:
            raise SplitUnclear(
                f"{files.where}: no file is called {listed(patterns)}, which source.splits names "
                f"for {split}; there are {listed(files.names)}"
            )
        used |= names
        if split != IGNORE:
            splits[split] = sorted(names)
    if "train" not in splits:
        raise SplitUnclear(f"{files.where}: source.splits names no train files; add `train`")
    return splits, [name for name in files.names if name not in used]


def _check_configs(files: Files) -> None:
    """Raise SplitUnclear if several folders hold files of the same names that say a split."""
    inside: dict[str, set[str]] = {}
    for name in files.names:
        *folders, base = name.split("/")
        top = "/".join(part for part in folders if role_in(part) is None)
        rest = "/".join([part for part in folders if role_in(part) is not None] + [base])
        if role_in(rest) or any(map(role_in, rest.split("/"))):
            inside.setdefault(top, set()).add(rest)
    same = [top for top, names in inside.items() if names == next(iter(inside.values()))]
    if len(same) < 2 or all(map(is_part, same)):
        return
    path = posixpath.join(files.request.path, same[0])
    raise SplitUnclear(
        f"{files.where}: {listed(same)} hold files of the same names; give the one that is meant, "
        f"as in `{files.request.command(path=path)}`, or say that all count: "
        f"`{files.request.command(splits_setting({'train': [f'{top}/*' for top in same]}))}`"
    )


def unused_note(names: Sequence[str]) -> list[str]:
    """Return a note on files that are not read; none without such files."""
    if not names:
        return []
    return [f"{counted(len(names), 'file')} not read, not called by a split: {listed(names)}"]


def _split_word(files: Files, name: str) -> str:
    """Return the word of a split in the path of a file; empty without one."""
    stem = name.rpartition(".")[0]
    for part in reversed(stem.split("/")):
        if role_of(part):
            return part
        words = [word for word in tokens_of(part) if role_of(word)]
        words = [word for word in words if not is_weak(word)] or words
        if len({role_of(word) for word in words}) > 1:
            raise SplitUnclear(
                f"{files.where}: {quoted(name)} can be {listed(words)}; say which files are which, "
                f"as in {_splits_command(files)}"
            )
        if words:
            return words[0]
    return ""


def split_patterns(
    splits: Mapping[str, Sequence[str]], names: Sequence[str]
) -> dict[str, list[str]]:
    """Return the patterns by which a card takes the files of each split, and no others."""
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
                if start and _taken(pattern, names) == sorted(of_split):
                    patterns[split] = [pattern]
                    break
            else:
                continue
            break
    return patterns


def _taken(pattern: str, names: Sequence[str]) -> list[str]:
    globs = (pattern, f"{pattern}/*", f"{pattern}-*", f"{pattern}_*", f"{pattern}.*")
    return sorted(name for name in names if any(fnmatch(name, glob) for glob in globs))


# ---- Parquet and Arrow ---------------------------------------------------------------------------
def read_columns(files: Files) -> DataSet:
    """Return the data set of Parquet or Arrow files with columns of image bytes and labels.

    Raises:
        UserError: If they hold no images with labels, or can be read in several ways.
    """
    request = files.request
    all_names = files.names
    files = replace(files, names=[name for name in all_names if not is_cache(name)] or all_names)
    splits, unused = split_files(files)
    first = join(files.base, splits["train"][0])
    schema = schema_of(first)
    columns = _columns_of(files, first, schema)
    for name in schema.names:  # each once
        columns.check(name)
    image = _image_column(files, schema, columns)
    split: tuple[str, ...] = ()
    words: SplitWords | None = None
    if "splits" not in request.given or request.given.get("split"):
        split, words = split_columns(columns, [image, *schema.classes])
    label = label_column(columns, [image, *split], schema.classes)
    if label is None:
        raise UserError(
            f"{files.where} has no column of labels (of names or whole numbers), only "
            f"{listed_columns(schema.names)}; add one"
        )
    source: dict[str, Any] = {"format": "parquet", "path": files.path}
    source |= {"image": image, "label": label}
    notes = unused_note([*unused, *(name for name in all_names if name not in files.names)])
    is_one_split = words is not None and set(words.splits) == {"train"} and len(files.names) > 1
    if is_one_split and "split" not in request.given:  # each file has the name of its own
        split = ()
    if split and words:
        if len(splits) > 1:
            none = request.command("source.split=null")
            raise SplitUnclear(
                f"{files.where}: the names of its files say a split, and so does its column "
                f"{quoted(split[0])}; say which, as in `{none}`"
            )
        source |= {"split": [*split], "splits": words.splits}
    else:
        if not {"split", "splits"} & request.given.keys():
            _check_columns_of_others(files, schema)
            if len(splits) == 1:
                _check_paths(files, schema, columns, image)
        source["splits"] = split_patterns(splits, all_names)
    others = [name for name in schema.classes if name != label]
    if others:
        notes.append(f"labels in {listed(others)} are not read")
    num_files = sum(len(names) for names in splits.values())
    kind = "Arrow file" if suffix_of(first) == ".arrow" else "Parquet file"
    layout = (
        f"{counted(num_files, kind)}, images in column {quoted(image)}, labels in {quoted(label)}"
        f"{f', splits in {listed(split)}' if split else ''}"
    )
    return read_labelled(request, files.name, layout, source, notes)


def is_cache(name: str) -> bool:
    """Whether an Arrow file is one that the library `datasets` keeps beside the data."""
    base = name.rpartition("/")[2]
    return base.startswith("cache-") and suffix_of(base) == ".arrow"


def _check_columns_of_others(files: Files, schema: Schema) -> None:
    """Raise SplitUnclear if a file has a column of splits that the first one lacks."""
    for name, uri in zip(files.names, files.uris(files.names), strict=True):
        for column in schema_of(uri).names:
            if column not in schema.names and says_a_split(column):
                raise SplitUnclear(
                    f"{files.where}: {quoted(name)} has a column {quoted(column)}, which looks "
                    "like a split, and other files have none; add it there, or say that it is no "
                    f"split: `{files.request.command('source.split=null')}`"
                )


def _check_paths(files: Files, schema: Schema, columns: Columns, image: str) -> None:
    """Raise SplitUnclear if the paths that rows hold beside the images say a split."""
    paths = [name for name, texts in columns.sample.items() if any("/" in (t or "") for t in texts)]
    kind = schema.types[image]
    if pa.types.is_struct(kind) and kind.get_field_index("path") >= 0:
        paths.append(f"{image}.path")
    for column in paths:
        parts = {part for path in _paths_of(files, column) for part in path.split("/")[:-1]}
        words = [part for part in parts if role_in(part) and not is_weak(part)]
        words = [part for part in words if rest_is_generic(part)]
        if {role_in(word) for word in words} - {"train"}:
            raise SplitUnclear(
                f"{files.where}: the paths in column {quoted(column)} lie in "
                f"{listed(sorted(words))}, which looks like a split, and all rows would be train; "
                "write a file for each split or add a column `split`, or say that there is none: "
                f"`{files.request.command('source.split=null')}`"
            )


def _paths_of(files: Files, column: str) -> Iterator[str]:
    """Yield the different folders of paths in a column, or in a field of structs, as `a/b/x`."""
    seen: set[str] = set()
    for uri in files.uris(files.names):
        name, _, of_struct = column.partition(".")
        is_field = bool(of_struct) and column not in schema_of(uri).names
        for batch in batches_of(uri, [column if suffix_of(uri) != ARROW_SUFFIX else name]):
            values = batch[name if is_field else column]
            if is_field:
                values = values.field(of_struct)
            for path in column_values(values):
                folder = str(path or "").replace("\\", "/").rpartition("/")[0]
                if folder not in seen and len(seen) < MOST_PATHS:
                    seen.add(folder)
                    yield f"{folder}/x"


def holds_images(uri: str) -> bool:
    """Whether a Parquet or Arrow file has a column of image bytes, and not of paths alone."""
    schema = schema_of(uri)
    return bool(schema.images) and not _has_paths_alone(uri, schema)


def _has_paths_alone(uri: str, schema: Schema) -> bool:
    """Whether the structs of images have a path and no bytes in the first rows."""
    column = schema.images[0]
    if schema.names.count(column) > 1 or not pa.types.is_struct(schema.types[column]):
        return False
    for batch in islice(batches_of(uri, [column], 8), 1):
        rows = [row for row in column_values(batch[column]) if row is not None]
        return bool(rows) and all(row.get("bytes") is None and row.get("path") for row in rows)
    return False


def _columns_of(files: Files, uri: str, schema: Schema) -> Columns:
    """Return the columns of Parquet files that may be labels or splits."""
    names = [name for name, kind in schema.types.items() if _may_be_label(kind)]
    names = [name for name in names if schema.names.count(name) == 1]
    sample: dict[str, list[str | None]] = {name: [] for name in names}
    for batch in islice(batches_of(uri, names, FIRST_ROWS), MOST_BATCHES) if names else ():
        for name in names:
            sample[name] += [_text(value) for value in column_values(batch[name])]

    def distinct(column: str) -> set[str] | None:
        values = _values_of(files, column)
        return None if len(values) > MOST_VALUES else values

    return Columns(files.request, files.where, schema.names, sample, distinct, lambda *_: 0)


def _text(value: Any) -> str | None:
    return None if value is None else str(value)[:MAX_TEXT].strip()


def _image_column(files: Files, schema: Schema, columns: Columns) -> str:
    asked = files.request.given.get("image")
    if asked is not None:
        return columns.check(asked)
    if not schema.images:
        arrays = [name for name, kind in schema.types.items() if _is_array(kind)]
        if arrays:
            raise UserError(
                f"{files.where}: column {quoted(arrays[0])} has the type "
                f"{schema.types[arrays[0]]}, which is an array and no encoded image; write the "
                "images as PNG or JPEG bytes"
            )
        raise UserError(
            f"{files.where} has no column of image bytes, only {listed_columns(schema.names)}; "
            "name one, or give a table of paths"
        )
    known = [name for name in schema.images if plain_word(name) == IMAGE_COLUMNS[0]]
    if len(schema.images) > 1 and len(known) != 1:
        raise columns.unclear("image", schema.images)
    return (known or schema.images)[0]


def _is_array(kind: pa.DataType) -> bool:
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    return bool(is_list or pa.types.is_fixed_size_list(kind) or isinstance(kind, pa.ExtensionType))


def _may_be_label(kind: pa.DataType) -> bool:
    is_text = pa.types.is_string(kind) or pa.types.is_large_string(kind)
    is_text = is_text or pa.types.is_string_view(kind)
    is_number = pa.types.is_integer(kind) or pa.types.is_floating(kind)
    return bool(is_text or is_number or pa.types.is_boolean(kind) or pa.types.is_dictionary(kind))


def _values_of(files: Files, column: str) -> set[str]:
    """Return the different values of a column in all files; a few more than MOST_VALUES if many."""
    values: set[str] = set()
    for uri in files.uris(files.names):
        if column not in schema_of(uri).names:
            raise UserError(
                f"{printable(uri)} has no column {column!r}, and other files have one; mend it"
            )
        for batch in batches_of(uri, [column]):
            values.update(_text(value) or "" for value in {*column_values(batch[column])})
            if len(values) > MOST_VALUES:
                return values
    return values
