"""Data sets in tars of WebDataset: what the members of samples say of labels and splits."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pipeline.data.braces import with_braces
from pipeline.data.detection.archives import Files, split_files, split_patterns, unused_note
from pipeline.data.detection.columns import MOST_VALUES, LabelUnclear, says_a_split
from pipeline.data.detection.data_set import DataSet, read_labelled, splits_setting, yaml_text
from pipeline.data.detection.packed_files import unpack_command
from pipeline.data.detection.words import LABEL_COLUMNS
from pipeline.data.formats.tar import (
    IMAGE_ENDINGS,
    JSON_PREFIX,
    LABEL_MEMBERS,
    LABEL_SUFFIX,
    MAX_JSON_BYTES,
    NAME_SUFFIX,
    field_of,
    image_suffixes,
    read_samples,
)
from pipeline.data.labels import MAX_LABEL_BYTES, Label, label_of, sorted_labels
from pipeline.data.names import counted, listed, printable, quoted
from pipeline.data.source_classes import FEW_CLASSES, MAX_CLASSES
from pipeline.data.splits import (
    SPLIT_COLUMNS,
    Role,
    SplitUnclear,
    flag_role,
    is_no,
    is_weak,
    is_yes,
    plain_word,
    read_words,
    role_of,
    tokens_of,
)
from workers.errors import UserError

MOST_SAMPLES = 2_000_000  # of all shards together, whose labels are read
MOST_COMPARED = 20_000  # samples of a split whose labels are compared
IN_PLACE = frozenset(("jpg", "jpeg", "png", "webp"))  # used where they lie
FOLDER = "folder"  # of a sample, where it stands among its labels
KEY = "key"


@dataclass
class Survey:
    """What the members of shards say.

    Attributes:
        samples: Number of samples.
        images: Number of images by extension.
        several: Extensions of a sample that has several images.
        labels: Number of samples by label, for each member that may be one.
        compared: Labels of some samples, by member.
        splits: What looks like a split, by the member, folder or key that says it.
        folders: That images lie in.
        endings: Extensions of members, with their numbers.
    """

    samples: int = 0
    images: Counter[str] = field(default_factory=Counter)
    several: tuple[str, ...] = ()
    labels: dict[str, Counter[Label]] = field(default_factory=dict)
    compared: list[dict[str, Label]] = field(default_factory=list)
    splits: dict[str, set[str]] = field(default_factory=dict)
    folders: set[str] = field(default_factory=set)
    endings: Counter[str] = field(default_factory=Counter)

    def add(self, key: str, images: Sequence[str], texts: Mapping[str, Any]) -> None:
        """Add a sample. texts: what its members say, by member or field of JSON."""
        self.images[images[0].rpartition(".")[2]] += 1
        if len(images) > 1:
            self.several = tuple(images)
        *folders, stem = key.split("/")
        labels: dict[str, Label] = {}
        for source, text in texts.items():
            if _is_label(source):
                labels[source] = label_of(text)
            elif _is_split(source, text):
                self._add_split(source, str(text).strip())
        for source, label in labels.items():
            counter = self.labels.setdefault(source, Counter())
            if label is not None and (label in counter or len(counter) <= MAX_CLASSES):
                counter[label] += 1
        said = {str(label) for label in labels.values()}
        for source, word in (*((FOLDER, part) for part in folders), (KEY, _first_word(stem))):
            if role_of(word) and not is_weak(word) and word not in said:
                self._add_split(source, word)
        if len(self.folders) <= MAX_CLASSES:
            self.folders.add("/".join(folders))
        if len(self.compared) < MOST_COMPARED:
            self.compared.append({**labels, FOLDER: folders[-1] if folders else None})

    def _add_split(self, source: str, value: str) -> None:
        values = self.splits.setdefault(source, set())
        if len(values) <= MOST_VALUES:
            values.add(value)


def _first_word(stem: str) -> str:
    tokens = tokens_of(stem)
    return tokens[0] if len(tokens) > 1 and stem.startswith(tokens[0]) else ""


def _is_label(source: str) -> bool:
    if source.startswith(JSON_PREFIX):
        name = plain_word(source.removeprefix(JSON_PREFIX))
        return name in LABEL_COLUMNS or name == LABEL_SUFFIX
    return source in LABEL_MEMBERS


def _is_split(source: str, text: Any) -> bool:
    """Whether a member or a field of JSON says a split, by its name or by its text."""
    name = source.removeprefix(JSON_PREFIX)
    if plain_word(name) in SPLIT_COLUMNS and not isinstance(text, str):
        return says_a_split(name) == "column"
    is_flag = bool(says_a_split(name)) and (is_yes(text) or is_no(text))
    is_word = isinstance(text, str) and role_of(text) is not None and not is_weak(text)
    return says_a_split(name) == "column" or is_flag or is_word


def read_shards(files: Files) -> DataSet:
    """Return the data set of tars.

    Raises:
        UserError: If they hold no images with labels, or can be read in several ways.
    """
    settings = files.request.given
    splits, unused = split_files(files)
    surveys = {split: _survey(files, names) for split, names in splits.items()}
    train = surveys["train"]
    if not train.images:
        raise UserError(
            f"{files.where} holds {counted(len(files.names), 'tar')} with {train.samples} samples "
            f"and no images, only members {listed(train.endings)}; give WebDataset shards (key.jpg "
            "beside key.cls), or unpack them"
        )
    _check_images(files, surveys)
    _check_splits(files, surveys)
    label, classes, numbers = _labels_of(files, surveys)
    images = {ending for survey in surveys.values() for ending in survey.images}
    is_in_place = (
        images <= IN_PLACE and not settings.get("split") and settings.get("format") != "tar"
    )
    is_in_place = is_in_place or settings.get("format") == "webdataset"
    source: dict[str, Any] = {"format": "webdataset" if is_in_place else "tar"}
    source["label"] = f".{label}" if label == "label" else label
    if numbers is not None:
        source["numbers"] = numbers
    if is_in_place:
        source["path"] = files.base
        source["splits"] = {split: with_braces(sorted(names)) for split, names in splits.items()}
        files = files.with_splits(source["splits"])
    else:
        source["path"] = files.path
        source["splits"] = split_patterns(splits, files.names)
        if settings.get("split") and "splits" not in settings:
            values = {v for s in surveys.values() for v in s.splits.get(str(settings["split"]), ())}
            source["splits"] = read_words(values).splits
    num_tars = sum(len(names) for names in splits.values())
    note = ", used where they lie" if is_in_place else ""
    layout = f"{counted(num_tars, 'WebDataset tar')} with labels in .{label}{note}"
    return read_labelled(files.request, files.name, layout, source, unused_note(unused), classes)


def _check_images(files: Files, surveys: Mapping[str, Survey]) -> None:
    """Raise LabelUnclear if samples have several images, and it is not said which counts."""
    several = next((survey.several for survey in surveys.values() if survey.several), ())
    if several and "image" not in files.request.given:
        command = files.request.command(f"source.image={yaml_text(several[0])}")
        raise LabelUnclear(
            f"{files.where}: samples hold several images ({', '.join(several)}), and it is not "
            f"clear which counts; say it, as in `{command}`"
        )


# ---- splits --------------------------------------------------------------------------------------
def _check_splits(files: Files, surveys: Mapping[str, Survey]) -> None:
    """Raise SplitUnclear if samples say another split than their shards."""
    request = files.request
    if {"split", "splits"} & request.given.keys():
        return
    for split, survey in surveys.items():
        for source, values in survey.splits.items():
            roles = {value: _role(source, value) for value in values}
            if all(role is not None and _agrees(role, split, surveys) for role in roles.values()):
                continue
            none = request.command("source.split=null")
            remedy = f"write shards for each split, or say that it is no split: `{none}`"
            if source.startswith(JSON_PREFIX):
                known = sorted({v for s in surveys.values() for v in s.splits.get(source, ())})
                by_split = dict[str, list[str]](read_words(known).splits)  # type: ignore[arg-type]
                example = request.command(
                    "source.format=tar",
                    f"source.split={yaml_text(source)}",
                    splits_setting(by_split or {"train": known[:1], "test": known[1:]}),
                )
                remedy = f"say what the values mean, as in `{example}`, or: `{none}`"
            raise SplitUnclear(
                f"{files.where}: {source} of its samples looks like a split "
                f"({listed(sorted(values))}), and they would all be {split}; {remedy}"
            )


def _role(source: str, value: str) -> Role | None:
    flag = flag_role(source.removeprefix(JSON_PREFIX))
    if flag is not None and (is_yes(value) or is_no(value)):
        other: Role = "test" if flag == "train" else "train"
        return flag if is_yes(value) else other
    return role_of(value)


def _agrees(role: Role, split: str, surveys: Mapping[str, Survey]) -> bool:
    if role == "held out":
        return split != "train"
    return role == split or (role == "val" and split == "test" and "val" not in surveys)


# ---- labels --------------------------------------------------------------------------------------
def _labels_of(
    files: Files, surveys: Mapping[str, Survey]
) -> tuple[str, tuple[str, ...], str | None]:
    """Return the member that holds the label, its classes, and what its numbers are.

    The classes are empty if they follow from the labels.

    Raises:
        UserError: If no member is a label, or two of them disagree.
    """
    asked = files.request.given.get("label")
    known = {source for survey in surveys.values() for source in survey.labels}
    if asked is not None:
        source = str(asked).removeprefix(".")
        if source not in known:
            raise UserError(
                f"{files.where}: no sample has a member {asked!r}; labels may be in "
                f"{', '.join(map(repr, sorted(known))) or 'none'}"
            )
        return source, (), None
    train = surveys["train"]
    of_train = candidates = _candidates(train)
    if not candidates:
        raise _no_label(files, train)
    for survey in surveys.values():  # of a split that has labels at all, in which they must be
        if any(sum(counter.values()) for counter in survey.labels.values()):
            candidates = [source for source in candidates if survey.labels.get(source)]
    if not candidates:
        raise LabelUnclear(
            f"{files.where}: the labels of train and of other splits are in different members "
            f"({listed(sorted(known))}); write them in the same one"
        )
    rows = [row for survey in surveys.values() for row in survey.compared]
    for index, other in enumerate(candidates):
        for first in candidates[:index]:
            _check_agree(files, rows, first, other)
    _check_folders(files, rows, candidates[0])
    if candidates[0] == LABEL_SUFFIX and NAME_SUFFIX in of_train:
        _check_agree(files, rows, LABEL_SUFFIX, NAME_SUFFIX)
        numbers = _numbered_names(train, [*_pairs(rows, LABEL_SUFFIX, NAME_SUFFIX)])
        if numbers or NAME_SUFFIX in candidates:
            return (LABEL_SUFFIX, numbers, "places") if numbers else (NAME_SUFFIX, (), None)
    names = [s for s in candidates if any(not isinstance(v, int) for v in train.labels[s])]
    return (names or candidates)[0], (), None


def _candidates(survey: Survey) -> list[str]:
    """Return the members that may be the label: those with few values, and not with one alone."""
    num_images = sum(survey.images.values())
    candidates = [
        source
        for source, counter in survey.labels.items()
        if 0 < len(counter) <= MAX_CLASSES
        and (len(counter) <= FEW_CLASSES or len(counter) * 2 <= num_images)
        and not (len(counter) > 1 and len(counter) * 2 > num_images and len(survey.labels) > 1)
    ]
    return [source for source in candidates if len(survey.labels[source]) > 1] or candidates


def _pairs(
    rows: Sequence[Mapping[str, Label]], first: str, second: str
) -> Iterator[tuple[str, str]]:
    """Yield the different pairs of labels that two members of a sample say."""
    pairs = dict.fromkeys((row.get(first), row.get(second)) for row in rows)
    yield from ((str(a), str(b)) for a, b in pairs if a is not None and b is not None)


def _check_agree(
    files: Files, rows: Sequence[Mapping[str, Label]], first: str, second: str
) -> None:
    """Raise LabelUnclear if two members say different classes."""
    pairs = [*_pairs(rows, first, second)]
    differ = [(a, b) for a, b in pairs if a != b]
    have_same_names = bool({a for a, _ in pairs} & {b for _, b in pairs})
    is_one_to_one = len(pairs) == len({a for a, _ in pairs}) == len({b for _, b in pairs})
    if not differ or (is_one_to_one and not have_same_names):
        return
    commands = " or ".join(
        f"`{files.request.command(f'source.label={yaml_text(source)}')}`"
        for source in (first, second)
    )
    one = differ[0][0]
    beside: dict[tuple[str, str], set[str]] = {}
    for a, b in pairs:
        beside.setdefault((first, a), set()).add(b)
        beside.setdefault((second, b), set()).add(a)
    example = next((key for key, others in beside.items() if len(others) > 1), (first, one))
    others = listed(sorted(beside[example]))
    raise LabelUnclear(
        f"{files.where}: .{first} and .{second} contradict each other: {quoted(example[1])} in "
        f".{example[0]} stands beside {others} in the other; say which is the class: {commands}"
    )


def _check_folders(files: Files, rows: Sequence[Mapping[str, Label]], source: str) -> None:
    """Raise LabelUnclear if samples lie in folders that are called as other classes."""
    pairs = [*_pairs(rows, FOLDER, source)]
    labels = {label for _, label in pairs}
    differ = [(folder, label) for folder, label in pairs if folder in labels and folder != label]
    if differ:
        folder, label = differ[0]
        command = files.request.command(f"source.label={yaml_text(source)}")
        raise LabelUnclear(
            f"{files.where}: samples in folder {quoted(folder)} have the label {quoted(label)} in "
            f".{source}; mend them, or say that the member counts: `{command}`"
        )


def _numbered_names(train: Survey, pairs: Sequence[tuple[str, str]]) -> tuple[str, ...]:
    """Return the classes whose places are the numbers in `.cls`; empty if numbers are missing."""
    names = dict(pairs)
    numbers = sorted_labels(names)
    in_train = {str(number) for number in train.labels[LABEL_SUFFIX]}
    if numbers != [str(place) for place in range(len(numbers))] or in_train != {*numbers}:
        return ()
    return tuple(names[number] for number in numbers)


def _no_label(files: Files, survey: Survey) -> UserError:
    num_images = sum(survey.images.values())
    if len(survey.folders) > 1:
        paths = files.uris(files.names)
        command = unpack_command(paths, "", files.request.program) if len(paths) == 1 else None
        advice = f"unpack it: `{command}`" if command else "unpack them and give the folder"
        return UserError(
            f"{files.where}: its {counted(num_images, 'image')} have no label beside them and lie "
            f"in {listed(sorted(survey.folders))}; {advice}"
        )
    known = ", ".join(f".{name}" for name in LABEL_MEMBERS)
    found = listed(sorted(ending for ending in survey.endings if ending not in survey.images))
    beside = f"; there are members {found}, which are no labels or do not follow their images"
    return UserError(
        f"{files.where}: its {counted(num_images, 'image')} have no label beside them ({known}, "
        f"with a field such as label or class in .json){beside if found else ''}; write key.cls "
        "with the name of the class behind key.jpg"
    )


# ---- reading -------------------------------------------------------------------------------------
def _survey(files: Files, names: Sequence[str]) -> Survey:
    """Return what the members of some shards say."""
    survey = Survey()
    for uri in files.uris(names):
        for key, members, headers in read_samples(uri):
            survey.samples += 1
            survey.endings.update([*members])
            if survey.samples > MOST_SAMPLES:
                raise UserError(
                    f"{printable(uri)} and others have more than {MOST_SAMPLES} samples; "
                    "write the card by hand, see datasets/README.md"
                )
            images = image_suffixes(members, IMAGE_ENDINGS)
            if not images:
                continue
            texts: dict[str, Any] = {}
            for suffix, member in members.items():
                if suffix == "json" and member.size <= MAX_JSON_BYTES:
                    texts |= _fields(headers.text(member, MAX_JSON_BYTES))
                elif suffix in LABEL_MEMBERS or plain_word(suffix) in SPLIT_COLUMNS:
                    texts[suffix] = field_of(suffix, headers.text(member, MAX_LABEL_BYTES))
            order = {source: place for place, source in enumerate(LABEL_MEMBERS)}
            texts = dict(sorted(texts.items(), key=lambda one: order.get(one[0], len(order))))
            survey.add(key, images, texts)
    return survey


def _fields(data: bytes) -> dict[str, Any]:
    """Return the texts, numbers and flags in the JSON of a sample."""
    try:
        body = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    if not isinstance(body, dict):
        return {}
    has_place = "x" in body  # y is then one, and no label
    return {
        f"{JSON_PREFIX}{name}": value
        for name, value in body.items()
        if isinstance(value, (str, int, float)) and not (has_place and name == "y")
    }
