"""Detect a data set in WebDataset tars: find its labels and splits among the members of samples.

For example, the sample `0001` can have the members `0001.jpg`, `0001.cls` and `0001.json`. A member
is named by its extension. A *role* is the part of a data set that a split word such as `training`
names. A *weak* word, such as `dev`, can be a split word but often means something else (see
`pipeline.data.splits`).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pipeline.config.text import format_count
from pipeline.data.braces import format_braces
from pipeline.data.detection.archives import Files, assign_files, build_patterns, note_unused
from pipeline.data.detection.columns import MAX_SPLIT_VALUES, LabelUnclear, classify_split_column
from pipeline.data.detection.data_set import DataSet, format_splits, read_labelled, to_yaml
from pipeline.data.detection.packed_files import build_unpack_command
from pipeline.data.detection.words import LABEL_COLUMNS
from pipeline.data.formats.tar import (
    IMAGE_ENDINGS,
    JSON_PREFIX,
    LABEL_ENDINGS,
    LABEL_SUFFIX,
    MAX_JSON_BYTES,
    NAME_SUFFIX,
    image_suffixes,
    read_field,
    read_samples,
)
from pipeline.data.labels import MAX_LABEL_BYTES, Label, normalize_label, sort_labels
from pipeline.data.names import listed, printable, quoted
from pipeline.data.source_classes import FEW_CLASSES, MAX_CLASSES
from pipeline.data.splits import (
    SPLIT_COLUMNS,
    Role,
    SplitUnclear,
    is_no,
    is_weak,
    is_yes,
    normalize_word,
    parse_flag_column,
    parse_role,
    parse_split_words,
    tokenize_name,
)
from workers.errors import UserError

MAX_SAMPLES = 2_000_000  # samples in all shards of a split
MAX_COMPARED = 20_000  # samples per split, used to compare labels from several members
# Tars with only these image extensions are used in place. From others, ingest copies the images.
IN_PLACE = frozenset(("jpg", "jpeg", "png", "webp"))
FOLDER = "folder"  # a source in `Survey`: the folder of a sample
KEY = "key"  # a source in `Survey`: the key of a sample


@dataclass
class Survey:
    """Counts of the labels, splits and images in the shards of a split.

    A "source" of labels or splits is a member (`cls`), a JSON field (`json:label`), FOLDER or KEY.
    Collections stop growing one value above MAX_CLASSES (labels, folders) or MAX_SPLIT_VALUES.

    Attributes:
        samples: Number of samples, with or without images.
        images: Extension -> number of samples whose first image has it.
        several: Extensions of the images of a sample with several; () if there is none.
        labels: Source -> label -> number of samples.
        compared: For each of the first MAX_COMPARED samples: source -> label, and FOLDER -> name of
            the innermost folder.
        splits: Source -> values that look like splits.
        folders: Folders that contain images.
        endings: Extension -> number of members.
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
        """Add a sample with at least one image.

        Args:
            key: Key of the sample, for example `train/0001`.
            images: Extensions of the images.
            texts: Values of the members and JSON fields, by source.
        """
        self.images[images[0].rpartition(".")[2]] += 1
        if len(images) > 1:
            self.several = tuple(images)
        *folders, stem = key.split("/")
        labels: dict[str, Label] = {}
        for source, text in texts.items():
            if _is_label(source):
                labels[source] = normalize_label(text)
            elif _is_split(source, text):
                self._add_split(source, str(text).strip())
        for source, label in labels.items():
            counter = self.labels.setdefault(source, Counter())
            if label is not None and (label in counter or len(counter) <= MAX_CLASSES):
                counter[label] += 1
        # A word that is also the label of the sample names its class, not a split.
        label_texts = {str(label) for label in labels.values()}
        for source, word in (*((FOLDER, part) for part in folders), (KEY, _find_first_word(stem))):
            if parse_role(word) and not is_weak(word) and word not in label_texts:
                self._add_split(source, word)
        if len(self.folders) <= MAX_CLASSES:
            self.folders.add("/".join(folders))
        if len(self.compared) < MAX_COMPARED:
            self.compared.append({**labels, FOLDER: folders[-1] if folders else None})

    def _add_split(self, source: str, value: str) -> None:
        values = self.splits.setdefault(source, set())
        if len(values) <= MAX_SPLIT_VALUES:
            values.add(value)


def _find_first_word(stem: str) -> str:
    """Return the first word of a name like `train_0001`, or "" for a name of one word."""
    tokens = tokenize_name(stem)
    return tokens[0] if len(tokens) > 1 and stem.startswith(tokens[0]) else ""


def _is_label(source: str) -> bool:
    """Return whether a member or a JSON field has a usual name for a label."""
    if source.startswith(JSON_PREFIX):
        name = normalize_word(source.removeprefix(JSON_PREFIX))
        return name in LABEL_COLUMNS or name == LABEL_SUFFIX
    return source in LABEL_ENDINGS


def _is_split(source: str, text: Any) -> bool:
    """Return whether a member or a JSON field looks like a split.

    It does if its name is that of a split column (`split`), if its name and value are those of a
    flag (`is_train: 1`), or if its value is a word for a split (`train`).
    """
    name = source.removeprefix(JSON_PREFIX)
    if normalize_word(name) in SPLIT_COLUMNS and not isinstance(text, str):
        return classify_split_column(name) == "column"
    is_flag = bool(classify_split_column(name)) and (is_yes(text) or is_no(text))
    is_word = isinstance(text, str) and parse_role(text) is not None and not is_weak(text)
    return classify_split_column(name) == "column" or is_flag or is_word


def read_shards(files: Files) -> DataSet:
    """Read the data set in WebDataset tars.

    Raises:
        UserError: If the tars contain no labelled images, or can be read in several ways.
    """
    settings = files.request.given
    splits, unused = assign_files(files)
    surveys = {split: _survey_shards(files, names) for split, names in splits.items()}
    train = surveys["train"]
    if not train.images:
        raise UserError(
            f"{files.where} holds {format_count(len(files.names), 'tar')} with "
            f"{train.samples} samples "
            f"and no images, only members {listed(train.endings)}; give WebDataset shards (key.jpg "
            "and key.cls), or unpack them"
        )
    _check_image_members(files, surveys)
    _check_sample_splits(files, surveys)
    label, classes, numbers = _choose_label_member(files, surveys)
    images = {ending for survey in surveys.values() for ending in survey.images}
    is_in_place = (
        images <= IN_PLACE and not settings.get("split") and settings.get("format") != "tar"
    )
    is_in_place = is_in_place or settings.get("format") == "webdataset"
    source: dict[str, Any] = {"format": "webdataset" if is_in_place else "tar"}
    # `source.label: label` is the default and means `.cls`, so a member `label` is written `.label`
    # (see `formats.tar.label_suffix`)
    source["label"] = f".{label}" if label == "label" else label
    if numbers is not None:
        source["numbers"] = numbers
    if is_in_place:
        source["path"] = files.base
        source["splits"] = {split: format_braces(sorted(names)) for split, names in splits.items()}
        files = files.with_splits(source["splits"])
    else:
        source["path"] = files.path
        source["splits"] = build_patterns(splits, files.names)
        if settings.get("split") and "splits" not in settings:
            values = {v for s in surveys.values() for v in s.splits.get(str(settings["split"]), ())}
            source["splits"] = parse_split_words(values).splits
    num_tars = sum(len(names) for names in splits.values())
    note = ", used in place" if is_in_place else ""
    layout = f"{format_count(num_tars, 'WebDataset tar')} with labels in .{label}{note}"
    return read_labelled(files.request, files.name, layout, source, note_unused(unused), classes)


def _check_image_members(files: Files, surveys: Mapping[str, Survey]) -> None:
    """Raise LabelUnclear if samples have several images and `source.image` does not choose one."""
    several = next((survey.several for survey in surveys.values() if survey.several), ())
    if several and "image" not in files.request.given:
        command = files.request.command(f"source.image={to_yaml(several[0])}")
        raise LabelUnclear(
            f"{files.where}: samples hold several images ({', '.join(several)}); choose one, as "
            f"in `{command}`"
        )


# ---- splits --------------------------------------------------------------------------------------
def _check_sample_splits(files: Files, surveys: Mapping[str, Survey]) -> None:
    """Raise SplitUnclear if samples and the names of their shards do not agree on the split.

    This includes values that look like splits, but name no known split.
    """
    request = files.request
    if {"split", "splits"} & request.given.keys():
        return
    for split, survey in surveys.items():
        for source, values in survey.splits.items():
            roles = {value: _parse_sample_role(source, value) for value in values}
            if all(role is not None and _agrees(role, split, surveys) for role in roles.values()):
                continue
            none = request.command("source.split=null")
            remedy = f"write shards for each split, or say that it is not a split: `{none}`"
            if source.startswith(JSON_PREFIX):
                known = sorted({v for s in surveys.values() for v in s.splits.get(source, ())})
                words = parse_split_words(known).splits
                by_split = {str(name): values for name, values in words.items()}
                example = request.command(
                    "source.format=tar",
                    f"source.split={to_yaml(source)}",
                    format_splits(by_split or {"train": known[:1], "test": known[1:]}),
                )
                remedy = f"declare the meaning of the values, as in `{example}`, or: `{none}`"
            raise SplitUnclear(
                f"{files.where}: {source} of its samples looks like a split "
                f"({listed(sorted(values))}), but all samples would be {split}; {remedy}"
            )


def _parse_sample_role(source: str, value: str) -> Role | None:
    """Return the role that a value names, or None.

    A flag that is off names test if it is a flag of train (`is_train: 0`), otherwise train.
    """
    flag_role = parse_flag_column(source.removeprefix(JSON_PREFIX))
    if flag_role is not None and (is_yes(value) or is_no(value)):
        other: Role = "test" if flag_role == "train" else "train"
        return flag_role if is_yes(value) else other
    return parse_role(value)


def _agrees(role: Role, split: str, surveys: Mapping[str, Survey]) -> bool:
    """Return whether samples of a role may be in the shards of a split.

    Samples with role `held out` may be in any split except train. Validation samples may be in test
    if there is no split val.
    """
    if role == "held out":
        return split != "train"
    return role == split or (role == "val" and split == "test" and "val" not in surveys)


# ---- labels --------------------------------------------------------------------------------------
def _choose_label_member(
    files: Files, surveys: Mapping[str, Survey]
) -> tuple[str, tuple[str, ...], str | None]:
    """Choose the member that holds the label.

    Returns:
        The member or `json:FIELD`, its classes, and the setting `source.numbers` or None. If `.cls`
        has numbers and `.txt` has their names, the classes are these names and the setting is
        `places` (a number is a position in the classes). Otherwise the classes are empty and the
        setting is None.

    Raises:
        UserError: If no member holds a label, the requested member is missing, or members or
            folders contradict each other.
    """
    requested = files.request.given.get("label")
    known = {source for survey in surveys.values() for source in survey.labels}
    if requested is not None:
        source = str(requested).removeprefix(".")
        if source not in known:
            raise UserError(
                f"{files.where}: no sample has a member {requested!r}; labels may be in "
                f"{', '.join(map(repr, sorted(known))) or 'none'}"
            )
        return source, (), None
    train = surveys["train"]
    train_candidates = candidates = _find_label_candidates(train)
    if not candidates:
        raise _no_label_error(files, train)
    for survey in surveys.values():  # every split with labels must have the member
        if any(sum(counter.values()) for counter in survey.labels.values()):
            candidates = [source for source in candidates if survey.labels.get(source)]
    if not candidates:
        raise LabelUnclear(
            f"{files.where}: the labels of train and of other splits are in different members "
            f"({listed(sorted(known))}); use one member for all splits"
        )
    rows = [row for survey in surveys.values() for row in survey.compared]
    for index, other in enumerate(candidates):
        for first in candidates[:index]:
            _check_agree(files, rows, first, other)
    _check_folders(files, rows, candidates[0])
    if candidates[0] == LABEL_SUFFIX and NAME_SUFFIX in train_candidates:
        _check_agree(files, rows, LABEL_SUFFIX, NAME_SUFFIX)
        names = _find_numbered_names(train, [*_iterate_pairs(rows, LABEL_SUFFIX, NAME_SUFFIX)])
        if names or NAME_SUFFIX in candidates:
            return (LABEL_SUFFIX, names, "places") if names else (NAME_SUFFIX, (), None)
    # prefer a member with the names of classes to one with their numbers
    with_names = [s for s in candidates if not all(str(v).isdecimal() for v in train.labels[s])]
    return (with_names or candidates)[0], (), None


def _find_label_candidates(survey: Survey) -> list[str]:
    """Return the members that may be the label: members with few distinct values.

    On average, each value must occur in two images or more. This does not apply to the only member
    with a label if it has at most FEW_CLASSES values. Members with a single value are returned only
    if no other candidates exist.
    """
    num_images = sum(survey.images.values())
    candidates = [
        source
        for source, counter in survey.labels.items()
        if 0 < len(counter) <= MAX_CLASSES
        and (len(counter) <= FEW_CLASSES or len(counter) * 2 <= num_images)
        and not (len(counter) > 1 and len(counter) * 2 > num_images and len(survey.labels) > 1)
    ]
    return [source for source in candidates if len(survey.labels[source]) > 1] or candidates


def _iterate_pairs(
    rows: Sequence[Mapping[str, Label]], first: str, second: str
) -> Iterator[tuple[str, str]]:
    """Yield the distinct pairs of labels that samples have in two members."""
    pairs = dict.fromkeys((row.get(first), row.get(second)) for row in rows)
    yield from ((str(a), str(b)) for a, b in pairs if a is not None and b is not None)


def _check_agree(
    files: Files, rows: Sequence[Mapping[str, Label]], first: str, second: str
) -> None:
    """Raise LabelUnclear if two members give samples different classes.

    Two members agree if their labels are equal. They also agree if their labels map one to one and
    have no value in common, for example numbers and names.
    """
    pairs = [*_iterate_pairs(rows, first, second)]
    differ = [(a, b) for a, b in pairs if a != b]
    have_same_names = bool({a for a, _ in pairs} & {b for _, b in pairs})
    is_one_to_one = len(pairs) == len({a for a, _ in pairs}) == len({b for _, b in pairs})
    if not differ or (is_one_to_one and not have_same_names):
        return
    commands = " or ".join(
        f"`{files.request.command(f'source.label={to_yaml(source)}')}`"
        for source in (first, second)
    )
    first_label = differ[0][0]
    partners: dict[tuple[str, str], set[str]] = {}  # (member, label) -> labels in the other member
    for a, b in pairs:
        partners.setdefault((first, a), set()).add(b)
        partners.setdefault((second, b), set()).add(a)
    ambiguous = (key for key, others in partners.items() if len(others) > 1)
    example = next(ambiguous, (first, first_label))
    others = listed(sorted(partners[example]))
    raise LabelUnclear(
        f"{files.where}: .{first} and .{second} contradict each other: {quoted(example[1])} in "
        f".{example[0]} is {others} in the other; choose the class: {commands}"
    )


def _check_folders(files: Files, rows: Sequence[Mapping[str, Label]], source: str) -> None:
    """Raise LabelUnclear if samples are in a folder with the name of another class."""
    pairs = [*_iterate_pairs(rows, FOLDER, source)]
    labels = {label for _, label in pairs}
    differ = [(folder, label) for folder, label in pairs if folder in labels and folder != label]
    if differ:
        folder, label = differ[0]
        command = files.request.command(f"source.label={to_yaml(source)}")
        raise LabelUnclear(
            f"{files.where}: samples in folder {quoted(folder)} have the label {quoted(label)} in "
            f".{source}; correct them, or take the label from the member: `{command}`"
        )


def _find_numbered_names(train: Survey, pairs: Sequence[tuple[str, str]]) -> tuple[str, ...]:
    """Return the class names in the order of the numbers in `.cls`.

    The result is () if the numbers with a name are not 0, 1, 2, ..., or are not exactly the numbers
    in train.

    Args:
        train: Survey of train.
        pairs: Pairs of a number in `.cls` and a name in `.txt`, from all splits.
    """
    names = dict(pairs)
    numbers = sort_labels(names)
    in_train = {str(number) for number in train.labels[LABEL_SUFFIX]}
    if numbers != [str(position) for position in range(len(numbers))] or in_train != {*numbers}:
        return ()
    return tuple(names[number] for number in numbers)


def _no_label_error(files: Files, survey: Survey) -> UserError:
    num_images = sum(survey.images.values())
    if len(survey.folders) > 1:
        paths = files.uris(files.names)
        command = None
        if len(paths) == 1:
            command = build_unpack_command(paths, "", files.request.program)
        advice = f"unpack it: `{command}`" if command else "unpack them and give the folder"
        return UserError(
            f"{files.where}: its {format_count(num_images, 'image')} have no label file and "
            f"are in {listed(sorted(survey.folders))}; {advice}"
        )
    known = ", ".join(f".{name}" for name in LABEL_ENDINGS)
    others = listed(sorted(ending for ending in survey.endings if ending not in survey.images))
    note = f"; there are members {others}, which are not labels or do not follow their images"
    return UserError(
        f"{files.where}: its {format_count(num_images, 'image')} have no label beside them "
        f"({known}, "
        f"with a field such as label or class in .json){note if others else ''}; write key.cls "
        "with the name of the class behind key.jpg"
    )


# ---- reading -------------------------------------------------------------------------------------
def _survey_shards(files: Files, names: Sequence[str]) -> Survey:
    """Count the labels, splits and images in the shards of a split."""
    survey = Survey()
    for uri in files.uris(names):
        for key, members, shard in read_samples(uri):
            survey.samples += 1
            survey.endings.update([*members])
            if survey.samples > MAX_SAMPLES:
                raise UserError(
                    f"{printable(uri)} and others have more than {MAX_SAMPLES} samples; "
                    "write the card yourself, see datasets/README.md"
                )
            images = image_suffixes(members, IMAGE_ENDINGS)
            if not images:
                continue
            texts: dict[str, Any] = {}
            for suffix, member in members.items():
                if suffix == "json" and member.size <= MAX_JSON_BYTES:
                    texts |= _parse_fields(shard.read_start(member, MAX_JSON_BYTES))
                elif suffix in LABEL_ENDINGS or normalize_word(suffix) in SPLIT_COLUMNS:
                    texts[suffix] = read_field(suffix, shard.read_start(member, MAX_LABEL_BYTES))
            # The first of several equivalent label members is chosen, so their order matters.
            order = {source: position for position, source in enumerate(LABEL_ENDINGS)}
            texts = dict(sorted(texts.items(), key=lambda one: order.get(one[0], len(order))))
            survey.add(key, images, texts)
    return survey


def _parse_fields(data: bytes) -> dict[str, Any]:
    """Return the texts, numbers and flags in the JSON member of a sample."""
    try:
        body = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    if not isinstance(body, dict):
        return {}
    has_position = "x" in body  # beside a field x, y is a coordinate and not a label
    return {
        f"{JSON_PREFIX}{name}": value
        for name, value in body.items()
        if isinstance(value, (str, int, float)) and not (has_position and name == "y")
    }
