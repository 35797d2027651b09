"""Data sets in Parquet files: images as bytes beside labels, also as the hub writes them."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from glob import escape
from itertools import islice
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipeline.data.cards import Numbers
from pipeline.data.detection.columns import (
    columns_of_classes,
    image_column,
    label_column,
    too_many_values,
)
from pipeline.data.detection.data_set import (
    MAX_CLASSES,
    DataSet,
    Request,
    check_classes,
    choose_splits,
    counted,
    quoted,
    sorted_labels,
    split_of,
)
from pipeline.data.detection.image_sizes import Sizes, sizes_of
from pipeline.data.listing import open_file, printable, remedy
from workers.errors import UserError
from workers.storage.artifact import join

MOST_METADATA = 16 << 20  # bytes of the hub's description of the columns
MOST_FILES = 2000  # whose labels are read
MOST_SIZED_ROWS = 16
FIRST_ROWS = 200  # that columns are guessed from
MOST_TEXT = 200  # characters of a value
LONGEST_IMAGE = 16 << 20  # bytes of an image whose size is looked at
WORD = re.compile(r"[A-Za-z]+")


@dataclass(frozen=True)
class Schema:
    """What the columns of a file are. classes: names by label column, as the hub writes them."""

    names: tuple[str, ...]
    images: tuple[str, ...]
    labels: tuple[str, ...]
    classes: dict[str, tuple[str, ...]]

    def declared_classes(self) -> dict[str, tuple[str, ...]]:
        """Return the classes of the label columns that the file has."""
        return {name: self.classes[name] for name in self.labels}


@dataclass(frozen=True)
class Group:
    """The files of a split. names: below the source. pattern: of the card."""

    names: tuple[str, ...]
    pattern: str


def read_schema(uri: str) -> Schema:
    """Return what the columns of a file are. Raise `UserError` where it is no Parquet."""
    with reading(uri), open_file(uri) as stream, pq.ParquetFile(stream) as file:
        schema = file.schema_arrow
    features = _hub_features(schema.metadata or {})
    images = [name for name, body in features.items() if body.get("_type") == "Image"]
    classes: dict[str, tuple[str, ...]] = {}
    for name, body in features.items():
        class_names = body.get("names")
        if body.get("_type") != "ClassLabel" or not isinstance(class_names, list):
            continue
        if all(isinstance(class_name, str) for class_name in class_names):
            classes[name] = tuple(class_names)
    names = schema.names
    if not any(name in names for name in images):
        images = [field.name for field in schema if _holds_bytes(field.type)]
    return Schema(
        tuple(names),
        tuple(name for name in images if name in names),
        tuple(name for name in classes if name in names),
        classes,
    )


def _hub_features(metadata: Mapping[bytes, bytes]) -> dict[str, dict[str, Any]]:
    text = metadata.get(b"huggingface", b"")
    if not 0 < len(text) <= MOST_METADATA:
        return {}
    try:
        body = json.loads(text)
        features = body["info"]["features"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return {}
    if not isinstance(features, dict):
        return {}
    return {name: value for name, value in features.items() if isinstance(value, dict)}


def _holds_bytes(kind: pa.DataType) -> bool:
    if pa.types.is_struct(kind):
        names = [kind.field(index).name for index in range(kind.num_fields)]
        return "bytes" in names
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


class reading:
    """Turns errors of reading Parquet into one sentence."""

    def __init__(self, uri: str):
        self.uri = uri

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: Any, trace: Any) -> None:
        if not isinstance(error, (pa.ArrowException, OSError)):
            return
        reason = printable((str(error).strip() or type(error).__name__).splitlines()[0])
        advice = remedy(self.uri)
        if isinstance(error, pa.ArrowInvalid):
            advice = "fetch it again"
        raise UserError(
            f"{printable(self.uri)} is not readable as Parquet ({reason}); {advice}"
        ) from None


# ---- splits --------------------------------------------------------------------------------------
def groups_of(where: str, names: Sequence[str], suffix: str) -> tuple[dict[str, Group], list[str]]:
    """Return the files of `train` and `test` by the words in their names, and names not used.

    names: below the source. suffix: of the files, with its dot. Where no name has such a word, all
    are train. Raise `UserError` where the groups cannot be told apart on a card.
    """
    by_word: dict[str, list[str]] = {}
    for name in names:
        by_word.setdefault(_split_prefix(name), []).append(name)
    prefixes = {_last_word(prefix): prefix for prefix in by_word if prefix}
    splits = choose_splits(prefixes)
    if splits.train is None:
        if splits.test is not None:
            raise UserError(
                f"{where} holds {suffix} files of {quoted(splits.test)} and none of train; call "
                "those that are learned from train-0.. or so"
            )
        pattern = escape(names[0]) if len(names) == 1 else f"*{suffix}"
        return {"train": Group(tuple(names), pattern)}, []
    groups: dict[str, Group] = {}
    words = {"train": splits.train, "test": splits.test}
    for split, word in words.items():
        if word is None:
            continue
        prefix = prefixes[word]
        group = by_word[prefix]
        glob = _pattern(prefix, group, names)
        if glob is None:
            raise UserError(
                f"{where}: the names of its files, such as {quoted(group[0])}, do not tell train "
                "from test by how they begin; put them into folders train and test"
            )
        groups[split] = Group(tuple(group), glob)
    used = {name for group in groups.values() for name in group.names}
    return groups, [name for name in names if name not in used]


def _split_prefix(name: str) -> str:
    """Return a name up to its first word that says a split; empty without one."""
    stem = name.rpartition(".")[0]
    for match in WORD.finditer(stem):
        if split_of(match.group()):
            return stem[: match.end()]
    return ""


def _last_word(prefix: str) -> str:
    return str(WORD.findall(prefix)[-1])


def _pattern(prefix: str, group: Sequence[str], names: Sequence[str]) -> str | None:
    """Return the pattern by which a card takes the files of a group and no others."""
    for pattern in (escape(prefix), f"{escape(prefix)}*"):
        globs = (pattern, f"{pattern}/*", f"{pattern}-*", f"{pattern}_*", f"{pattern}.*")
        taken = [name for name in names if any(fnmatch(name, glob) for glob in globs)]
        if taken == list(group):
            return pattern
    return None


# ---- the data set --------------------------------------------------------------------------------
def parquet_in(
    folder: str, names: Sequence[str], name: str, request: Request, path: str = ""
) -> DataSet:
    """Return the data set of Parquet files.

    folder: path or URI. names: of the files below it. path: of the source; empty: the folder. Raise
    `UserError` where they hold no images with labels.
    """
    where = printable(path or folder)
    groups, unused = groups_of(where, sorted(names), ".parquet")
    first = join(folder, groups["train"].names[0])
    schema = read_schema(first)
    if not schema.images and request.image is None:
        raise UserError(
            f"{printable(first)} has no column of image bytes, only "
            f"{', '.join(map(printable, schema.names[:12]))}; name one, or give a table of paths"
        )
    image = image_column(request, where, schema.names, schema.images)
    likely = _likely_labels(first, image)
    label = label_column(request, where, schema.names, image, schema.declared_classes(), likely)
    other_columns = [name for name in likely if name != label]
    no_classes = too_many_values(where, label, other_columns, request)
    counts: dict[str, Counter[Any]] = {}
    for split, group in groups.items():
        uris = [join(folder, file) for file in group.names]
        counts[split] = label_counts(uris, label, no_classes)
    left_out = [f"file {quoted(file)}" for file in unused[:3]]
    left_out += [f"labels in {quoted(name)}" for name in schema.labels if name != label]
    if len(unused) > 3:
        left_out.append(f"{len(unused) - 3} more files")
    class_names = schema.classes.get(label)
    classes, numbers = classes_of_labels(where, label, class_names, counts["train"])
    known = {split: _known(labels, classes, numbers) for split, labels in counts.items()}
    if known.get("test") == 0:
        left_out.append(f"{groups['test'].pattern}, whose images have no labels")
        del groups["test"], known["test"]
    num_all = sum(sum(counts[split].values()) for split in groups)
    num_known = sum(known.values())
    if num_known < num_all:
        rows = counted(num_all - num_known, "row")
        left_out.append(f"{rows} without a label, or with one that train lacks")
    source: dict[str, Any] = {"format": "parquet", "path": path or folder}
    source |= {"splits": {split: group.pattern for split, group in groups.items()}}
    source |= {"image": image, "label": label}
    if numbers == "names":
        source["numbers"] = numbers
    num_files = sum(len(group.names) for group in groups.values())
    return DataSet(
        name=name,
        layout=f"{counted(num_files, 'Parquet file')}, images in column {quoted(image)}, labels in "
        f"{quoted(label)}",
        source=source,
        classes=classes,
        counts=known,
        left_out=tuple(left_out),
        bad_fraction=1 - num_known / max(num_all, 1),
        sizes=_sizes(first, image),
    )


def _likely_labels(uri: str, image: str) -> list[str]:
    """Return the columns whose values repeat in the first rows, the likeliest labels last."""
    values: dict[str, list[str | None]] = {}
    with reading(uri), open_file(uri) as stream, pq.ParquetFile(stream) as file:
        schema = file.schema_arrow
        names = [column.name for column in schema if _may_be_label(column.type)]
        for batch in islice(file.iter_batches(FIRST_ROWS, columns=names), 1):
            for name in names:
                with suppress(UnicodeDecodeError):
                    values[name] = [_short_text(value) for value in batch[name].to_pylist()]
    values.pop(image, None)
    return columns_of_classes(values)


def _may_be_label(kind: pa.DataType) -> bool:
    is_text = pa.types.is_string(kind) or pa.types.is_large_string(kind)
    is_number = pa.types.is_integer(kind) or pa.types.is_floating(kind)
    return bool(is_text or is_number or pa.types.is_boolean(kind) or pa.types.is_dictionary(kind))


def _short_text(value: Any) -> str | None:
    return None if value is None else str(value)[:MOST_TEXT]


def label_counts(uris: Sequence[str], label: str, no_classes: UserError) -> Counter[Any]:
    """Return how many rows of some files have each label. Nothing else of them is read.

    Raise `UserError` where one lacks the column, and `no_classes` where its values are no classes.
    """
    counts: Counter[Any] = Counter()
    for uri in islice(uris, MOST_FILES):
        with reading(uri), open_file(uri) as stream, pq.ParquetFile(stream) as file:
            if label not in file.schema_arrow.names:
                raise UserError(
                    f"{printable(uri)} has no column {label!r}, only "
                    f"{', '.join(map(printable, file.schema_arrow.names[:12]))}; mend the file"
                )
            if pa.types.is_nested(file.schema_arrow.field(label).type):
                raise no_classes
            for batch in file.iter_batches(columns=[label]):
                for pair in pc.value_counts(batch[label]):
                    value = pair["values"].as_py()
                    is_whole = isinstance(value, float) and value.is_integer()
                    if is_whole or isinstance(value, bool):
                        value = int(value)
                    if not isinstance(value, (str, int, type(None))):
                        raise no_classes
                    counts[value] += pair["counts"].as_py()
                if len(counts) > MAX_CLASSES:
                    raise no_classes
    return counts


def classes_of_labels(
    where: str, label: str, names: tuple[str, ...] | None, train: Mapping[Any, int]
) -> tuple[tuple[str, ...], Numbers]:
    """Return the classes of a label column, and what its numbers are (see `Source.numbers`).

    names: as the files declare them. train: number of images by label. Raise `UserError` where a
    declared class has none.
    """
    values = [value for value in train if value is not None]
    if names is None or not all(isinstance(value, int) for value in values):
        classes = check_classes(where, sorted_labels(map(str, values)))
        return classes, "names"
    classes = check_classes(where, names)
    missing = [name for number, name in enumerate(names) if number not in train]
    if missing:
        raise UserError(
            f"{where}: class {quoted(missing[0])} of column {label!r} has no train images; "
            "add some, or give files in which the label is the name of the class"
        )
    return classes, "places"


def _known(counts: Mapping[Any, int], classes: tuple[str, ...], numbers: str) -> int:
    """Return how many rows have the label of a class."""
    names = set(classes)
    total = 0
    for value, count in counts.items():
        is_class_number = (
            numbers == "places" and isinstance(value, int) and 0 <= value < len(classes)
        )
        if is_class_number or str(value) in names:
            total += count
    return total


def _sizes(uri: str, image: str) -> Sizes:
    headers: list[bytes] = []
    try:
        with open_file(uri) as stream, pq.ParquetFile(stream) as file:
            for batch in islice(file.iter_batches(1, columns=[image]), MOST_SIZED_ROWS):
                value = batch[image][0].as_py()
                data = value.get("bytes") if isinstance(value, dict) else value
                if isinstance(data, bytes) and len(data) <= LONGEST_IMAGE:
                    headers.append(data)
    except (pa.ArrowException, OSError, UnicodeDecodeError):
        return ()
    return sizes_of(headers)
