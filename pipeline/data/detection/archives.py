"""Data sets in files that hold many images: Parquet and Arrow files, and tars of WebDataset."""

from __future__ import annotations

import json
import posixpath
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from glob import escape
from itertools import islice
from typing import Any

import pyarrow as pa

from pipeline.data.braces import with_braces
from pipeline.data.column_files import Schema, batches_of, schema_of
from pipeline.data.detection.columns import (
    MOST_VALUES,
    Columns,
    label_column,
    listed_columns,
    split_columns,
)
from pipeline.data.detection.data_set import DataSet, Request, read_as
from pipeline.data.detection.folders import setting
from pipeline.data.detection.packed_files import unpack_command
from pipeline.data.detection.words import IMAGE_COLUMNS
from pipeline.data.file_kinds import TAR_SUFFIX
from pipeline.data.formats.tar import (
    IMAGE_ENDINGS,
    JSON_PREFIX,
    LABEL_MEMBERS,
    LABEL_SUFFIX,
    MAX_JSON_BYTES,
    NAME_SUFFIX,
    field_of,
    image_member,
    read_samples,
)
from pipeline.data.labels import MAX_LABEL_BYTES, label_of, sorted_labels
from pipeline.data.names import counted, listed, printable, quoted, suffix_of
from pipeline.data.source_classes import FEW_CLASSES, MAX_CLASSES
from pipeline.data.splits import (
    SPLIT_COLUMNS,
    SplitUnclear,
    plain_word,
    read_words,
    role_in,
    role_of,
    tokens_of,
)
from workers.errors import UserError
from workers.storage.artifact import join

FIRST_ROWS = 512  # of a batch by which columns are told apart
MOST_BATCHES = 4
MOST_SAMPLES = 2_000_000  # of all shards together, whose labels are read
MOST_FOLDERS = 50
LABEL_FIELDS = ("label", "class", "cls", "category", "target")  # of JSON
IN_PLACE = frozenset(("jpg", "jpeg", "png", "webp"))  # used where they lie


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


# ---- splits by the names of files ----------------------------------------------------------------
def split_files(files: Files) -> tuple[dict[str, list[str]], list[str]]:
    """Return the files of each split by the words in their paths, and those that are not used.

    If no path has such a word, all are train.

    Raises:
        SplitUnclear: If there are none of train, or a word can be validation or test.
    """
    by_word: dict[str, list[str]] = {}
    for name in files.names:
        by_word.setdefault(_split_word(name), []).append(name)
    unnamed = by_word.pop("", [])
    if not by_word:
        return {"train": [*files.names]}, []
    suffix = suffix_of(files.names[0])
    try:
        words = read_words(by_word)
    except SplitUnclear as error:
        example = setting(train="train*", test="test*")
        raise SplitUnclear(
            f"{files.where}: {error}; say which files are which, as in {example}"
        ) from None
    if "train" not in words.splits:
        raise SplitUnclear(
            f"{files.where} holds {suffix} files of {listed(by_word)} and none of train"
            f"{f', beside {listed(unnamed)}' if unnamed else ''}; say which are train, as in "
            f"{setting(train='FILES*', test=f'{next(iter(by_word))}*')}"
        )
    splits: dict[str, list[str]] = {}
    for split, of_split in words.splits.items():
        splits[split] = sorted(name for word in of_split for name in by_word[word])
    return splits, unnamed


def _unused_note(names: Sequence[str]) -> list[str]:
    if not names:
        return []
    return [f"{counted(len(names), 'file')} not read, not called by a split: {listed(names)}"]


def _split_word(name: str) -> str:
    """Return the word of a split in the path of a file; empty without one."""
    stem = name.rpartition(".")[0]
    *folders, base = stem.split("/")
    if role_of(base):
        return base
    words = [word for word in tokens_of(base) if role_of(word)]
    if words and role_in(base):
        return words[0]
    return next((folder for folder in reversed(folders) if role_of(folder)), "")


def split_patterns(
    splits: Mapping[str, Sequence[str]], names: Sequence[str]
) -> dict[str, list[str]]:
    """Return the patterns by which a card takes the files of each split, and no others."""
    patterns: dict[str, list[str]] = {}
    suffix = suffix_of(names[0])
    for split, of_split in splits.items():
        if sorted(of_split) == sorted(names):
            patterns[split] = [escape(names[0]) if len(names) == 1 else f"*{suffix}"]
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
    splits, unused = split_files(files)
    first = join(files.base, splits["train"][0])
    schema = schema_of(first)
    columns = _columns_of(files, first, schema)
    image = _image_column(files, schema, columns)
    split, words = split_columns(columns, [image, *schema.classes])
    label = label_column(columns, [image, *split], schema.classes)
    if label is None:
        raise UserError(
            f"{files.where} has no column of labels, only {listed_columns(schema.names)}; name one"
        )
    source: dict[str, Any] = {"format": "parquet", "path": files.path}
    source |= {"image": image, "label": label}
    column = split[0] if split else None
    notes = _unused_note(unused)
    is_one_split = words is not None and set(words.splits) == {"train"} and len(files.names) > 1
    if is_one_split and "split" not in request.given:  # each file has the name of its own
        column = None
    if column and words:
        if len(splits) > 1:
            none = request.command("source.split=null")
            raise SplitUnclear(
                f"{files.where}: the names of its files say a split, and so does its column "
                f"{quoted(column)}; say which, as in `{none}`"
            )
        source |= {"split": [*split], "splits": words.splits}
    else:
        source["splits"] = split_patterns(splits, files.names)
    others = [name for name in schema.classes if name != label]
    if others:
        notes.append(f"labels in {listed(others)} are not read")
    num_files = sum(len(names) for names in splits.values())
    kind = "Arrow file" if suffix_of(first) == ".arrow" else "Parquet file"
    layout = (
        f"{counted(num_files, kind)}, images in column {quoted(image)}, labels in {quoted(label)}"
        f"{f', splits in {quoted(column)}' if column else ''}"
    )
    return _without_unlabelled(files, layout, source, notes)


def _without_unlabelled(
    files: Files, layout: str, source: dict[str, Any], notes: list[str]
) -> DataSet:
    """Return a data set; test images that all lack a label are left out, and said."""
    data_set = read_as(files.request, files.name, layout, source, notes)
    splits = data_set.card.source.named_splits()
    if "test" in splits and "test" not in data_set.counts and not data_set.card.source.split:
        names = listed(data_set.card.source.parts_of("test"))
        left = {str(split): source["splits"][split] for split in splits if split != "test"}
        if "val" in left:
            left["test"] = left.pop("val")
        note = f"{names} is not read: its images have no labels"
        return read_as(files.request, files.name, layout, source | {"splits": left}, [*notes, note])
    return data_set


def holds_images(uri: str) -> bool:
    """Whether a Parquet or Arrow file has a column of image bytes, and not of paths alone."""
    schema = schema_of(uri)
    return bool(schema.images) and not _has_paths_alone(uri, schema)


def _has_paths_alone(uri: str, schema: Schema) -> bool:
    """Whether the structs of images have a path and no bytes in the first rows."""
    column = schema.images[0]
    if not pa.types.is_struct(schema.types[column]):
        return False
    for batch in islice(batches_of(uri, [column], 8), 1):
        rows = [row for row in batch[column].to_pylist() if row is not None]
        return bool(rows) and all(row.get("bytes") is None and row.get("path") for row in rows)
    return False


def _columns_of(files: Files, uri: str, schema: Schema) -> Columns:
    """Return the columns of Parquet files that may be labels or splits."""
    names = [name for name, kind in schema.types.items() if _may_be_label(kind)]
    sample: dict[str, list[str | None]] = {name: [] for name in names}
    for batch in islice(batches_of(uri, names, FIRST_ROWS), MOST_BATCHES) if names else ():
        for name in names:
            sample[name] += [_text(value) for value in batch[name].to_pylist()]

    def distinct(column: str) -> set[str] | None:
        values = _values_of(files, column)
        return None if len(values) > MOST_VALUES else values

    return Columns(files.request, files.where, schema.names, sample, distinct, lambda *_: 0)


def _text(value: Any) -> str | None:
    return None if value is None else str(value).strip()


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
            values.update("" if v is None else str(v).strip() for v in batch[column].to_pylist())
            if len(values) > MOST_VALUES:
                return values
    return values


# ---- tars ----------------------------------------------------------------------------------------
@dataclass
class Survey:
    """What the members of shards say.

    Attributes:
        samples: Number of samples.
        images: Number of images by extension.
        labels: Number of samples by label, for each member that may be one.
        pairs: Labels of `.cls` and `.txt` that stand beside each other, with their numbers.
        splits: Values of a field of JSON that looks like a split.
        folders: A few that images lie in.
        endings: Extensions of members, with their numbers.
    """

    samples: int = 0
    images: Counter[str] = field(default_factory=Counter)
    labels: dict[str, Counter[Any]] = field(default_factory=dict)
    pairs: Counter[tuple[Any, Any]] = field(default_factory=Counter)
    splits: set[str] = field(default_factory=set)
    folders: set[str] = field(default_factory=set)
    endings: Counter[str] = field(default_factory=Counter)


def read_shards(files: Files) -> DataSet:
    """Return the data set of tars.

    Raises:
        UserError: If they hold no images with labels, or can be read in several ways.
    """
    splits, unused = split_files(files)
    surveys = {split: _survey(files.uris(names)) for split, names in splits.items()}
    train = surveys["train"]
    if not train.images:
        raise UserError(
            f"{files.where} holds {counted(len(files.names), 'tar')} with {train.samples} samples "
            f"and no images, only members {listed(train.endings)}; give WebDataset shards (key.jpg "
            "beside key.cls), or unpack them"
        )
    _check_splits(files, surveys)
    label, classes, numbers = _labels_of(files, surveys)
    images = {ending for survey in surveys.values() for ending in survey.images}
    is_in_place = images <= IN_PLACE
    source: dict[str, Any] = {"format": "webdataset" if is_in_place else "tar", "label": label}
    if numbers is not None:
        source["numbers"] = numbers
    if is_in_place:
        source["path"] = files.base
        source["splits"] = {split: _in_place(names) for split, names in splits.items()}
    else:
        source["path"] = files.path
        source["splits"] = split_patterns(splits, files.names)
    num_tars = sum(len(names) for names in splits.values())
    note = ", used where they lie" if is_in_place else ""
    layout = f"{counted(num_tars, 'WebDataset tar')} with labels in .{label}{note}"
    notes = _unused_note(unused)
    if not any(surveys.get("test", train).labels.get(label, {})):
        notes.append(f"{listed(splits['test'])} is not read: its images have no labels")
        del source["splits"]["test"]
        if "val" in source["splits"]:
            source["splits"]["test"] = source["splits"].pop("val")
    return read_as(files.request, files.name, layout, source, notes, classes)


def _in_place(names: Sequence[str]) -> list[str]:
    """Return the names of shards as a card of format `webdataset` lists them."""
    return with_braces(sorted(names))


def _check_splits(files: Files, surveys: Mapping[str, Survey]) -> None:
    """Raise SplitUnclear if samples say their split by a field of JSON, or by their folder."""
    values = {value for survey in surveys.values() for value in survey.splits}
    folders = {
        part for survey in surveys.values() for path in survey.folders for part in path.split("/")
    }
    words = {word for word in (*values, *folders) if role_of(word)}
    if len(surveys) > 1 or len({role_of(word) for word in words}) < 2:
        return
    raise SplitUnclear(
        f"{files.where}: its samples say a split themselves ({listed(sorted(words))}), and a shard "
        "is of one split; write a shard for each split, or say that all are train with "
        f"{setting(train='*.tar')}"
    )


def _labels_of(
    files: Files, surveys: Mapping[str, Survey]
) -> tuple[str, tuple[str, ...], str | None]:
    """Return the member that holds the label, its classes, and what its numbers are.

    The classes are empty if they follow from the labels.

    Raises:
        UserError: If no member is a label, or two of them disagree.
    """
    asked = files.request.given.get("label")
    all_labels: dict[str, Counter[Any]] = {}
    for survey in surveys.values():
        for source, counter in survey.labels.items():
            all_labels.setdefault(source, Counter()).update(counter)
    if asked is not None and asked not in all_labels:
        raise UserError(
            f"{files.where}: no sample has a member {asked!r}; labels may be in "
            f"{', '.join(map(repr, all_labels)) or 'none'}"
        )
    label = str(asked) if asked is not None else _label_member(files, surveys["train"])
    pairs = Counter[tuple[Any, Any]]()
    for survey in surveys.values():
        pairs.update(survey.pairs)
    names = {name for _, name in pairs}
    if label != LABEL_SUFFIX or asked is not None or not names or _is_caption(pairs):
        return label, (), None
    by_label: dict[Any, set[Any]] = {}
    by_name: dict[Any, set[Any]] = {}
    for number, name in pairs:
        by_label.setdefault(number, set()).add(name)
        by_name.setdefault(name, set()).add(number)
    for first, others in ((LABEL_SUFFIX, by_label), (NAME_SUFFIX, by_name)):
        for value, found in others.items():
            if len(found) > 1:
                both = sorted(map(str, found))
                command = files.request.command(f"source.label={NAME_SUFFIX}")
                raise UserError(
                    f"{files.where}: .{first} {quoted(str(value))} stands beside "
                    f"{listed(both)} in the other member, so that .cls and .txt contradict each "
                    f"other; mend the shards, or say which names the class: `{command}`"
                )
    numbers = sorted_labels(map(str, by_label))
    if numbers == [str(place) for place in range(len(numbers))]:
        by_text = {str(number): next(iter(found)) for number, found in by_label.items()}
        in_train = {str(number) for number in surveys["train"].labels[label]}
        if in_train == set(numbers):
            return label, tuple(str(by_text[number]) for number in numbers), "places"
    return NAME_SUFFIX, (), None


def _is_caption(pairs: Counter[tuple[Any, Any]]) -> bool:
    """Whether texts beside labels are captions: far more different ones than labels."""
    names = {name for _, name in pairs}
    labels = {label for label, _ in pairs}
    return len(names) > max(2 * len(labels), 4) and len(names) * 2 > sum(pairs.values()) // 2


def _label_member(files: Files, survey: Survey) -> str:
    """Return the member that holds the label: the first of the known ones that has few values."""
    num_images = sum(survey.images.values())
    for label, counter in survey.labels.items():
        is_few = len(counter) <= FEW_CLASSES or len(counter) * 2 <= num_images
        if counter and is_few and len(counter) <= MAX_CLASSES:
            return label
    if len(survey.folders) > 1:
        paths = files.uris(files.names)
        command = unpack_command(paths, "", files.request.program) if len(paths) == 1 else None
        advice = f"unpack it: `{command}`" if command else "unpack them and give the folder"
        raise UserError(
            f"{files.where}: its {counted(num_images, 'image')} have no label beside them and lie "
            f"in {listed(sorted(survey.folders))}; {advice}"
        )
    known = ", ".join(f".{name}" for name in LABEL_MEMBERS)
    raise UserError(
        f"{files.where}: its {counted(num_images, 'image')} have no label beside them ({known}, "
        f"with a field {', '.join(LABEL_FIELDS)} in .json); write key.cls beside key.jpg"
    )


def _survey(uris: Sequence[str]) -> Survey:
    survey = Survey()
    for uri in uris:
        for _, members, headers in read_samples(uri):
            survey.samples += 1
            survey.endings.update([*members])
            if survey.samples > MOST_SAMPLES:
                raise UserError(
                    f"{printable(uri)} and others have more than {MOST_SAMPLES} samples; "
                    "write the card by hand, see datasets/README.md"
                )
            image = image_member(members, IMAGE_ENDINGS)
            if image is None:
                continue
            survey.images[image.name.rpartition(".")[2].lower()] += 1
            if len(survey.folders) < MOST_FOLDERS:
                survey.folders.add(posixpath.dirname(image.name))
            texts: dict[str, Any] = {}
            for suffix in LABEL_MEMBERS:
                member = members.get(suffix)
                if member is not None and suffix == "json":
                    if member.size <= MAX_JSON_BYTES:
                        texts |= _fields(headers.text(member, MAX_JSON_BYTES), survey)
                elif member is not None:
                    texts[suffix] = label_of(
                        field_of(suffix, headers.text(member, MAX_LABEL_BYTES))
                    )
            for source, text in texts.items():
                counter = survey.labels.setdefault(source, Counter())
                if text is not None and (text in counter or len(counter) <= MAX_CLASSES):
                    counter[text] += 1
            if texts.get(LABEL_SUFFIX) is not None and texts.get(NAME_SUFFIX) is not None:
                pair = texts[LABEL_SUFFIX], texts[NAME_SUFFIX]
                if pair in survey.pairs or len(survey.pairs) <= MAX_CLASSES:
                    survey.pairs[pair] += 1
    return survey


def _fields(data: bytes, survey: Survey) -> dict[str, Any]:
    """Return the labels in the JSON of a sample, and note what looks like its split."""
    try:
        body = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    if not isinstance(body, dict):
        return {}
    for name, value in body.items():
        is_split = plain_word(name) in SPLIT_COLUMNS and isinstance(value, str)
        if is_split and len(survey.splits) < MOST_VALUES:
            survey.splits.add(value)
    texts: dict[str, Any] = {}
    for name in LABEL_FIELDS:
        value = body.get(name)
        if isinstance(value, (str, int)) and not isinstance(value, bool):
            texts[f"{JSON_PREFIX}{name}"] = label_of(value)
    return texts


def tar_names(names: Sequence[str]) -> list[str]:
    """Return the tars among some files."""
    return [name for name in names if suffix_of(name) == TAR_SUFFIX]
