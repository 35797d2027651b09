"""Data sets in WebDataset shards: tars with `key.jpg` beside `key.cls`, `key.txt` or `key.json`."""

from __future__ import annotations

import json
import posixpath
import tarfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from pipeline.data.braces import with_braces
from pipeline.data.detection.data_set import (
    MAX_CLASSES,
    DataSet,
    Request,
    check_classes,
    counted,
    listed,
    quoted,
    sorted_labels,
)
from pipeline.data.detection.image_sizes import HEADER_BYTES, sizes_of
from pipeline.data.detection.packed_files import unpack_command
from pipeline.data.detection.parquet_files import groups_of
from pipeline.data.formats.base import IMAGE_SUFFIXES, MAX_LABEL_BYTES
from pipeline.data.formats.tar import HeaderReader, open_tar, split_name
from pipeline.data.listing import open_file, printable, remedy
from workers.errors import UserError
from workers.storage.artifact import is_local, join

MOST_SAMPLES = 2_000_000  # of all shards together, whose labels are read
MOST_JSON = 1 << 16  # bytes of a member that is looked into
LABEL_MEMBERS = ("cls", "txt", "json", "class", "label")  # the first that occurs is the label
LABEL_FIELDS = ("label", "class", "cls", "category", "target")  # of json
IN_PLACE = frozenset(("jpg", "jpeg", "png", "webp"))  # used where they lie
MOST_SIZED = 16
MOST_FOLDERS = 4


@dataclass
class Survey:
    """What the members of shards say.

    labels: number of samples by label, for each member that may be one. names: label of `txt` by
    that of `cls`. headers: first bytes of a few images. folders: a few that images lie in.
    """

    samples: int = 0
    images: Counter[str] = field(default_factory=Counter)
    labels: dict[str, Counter[str]] = field(default_factory=dict)
    names: dict[str, set[str]] = field(default_factory=dict)
    headers: list[bytes] = field(default_factory=list)
    folders: set[str] = field(default_factory=set)


def shards_in(
    folder: str, names: Sequence[str], name: str, request: Request, path: str = ""
) -> DataSet:
    """Return the data set of tars.

    folder: path or URI. names: of the tars below it. path: of the source; empty: the folder. Raise
    `UserError` where they hold no images with labels.
    """
    where = printable(path or folder)
    groups, unused = groups_of(where, sorted(names), ".tar")
    surveys: dict[str, Survey] = {}
    for split, group in groups.items():
        surveys[split] = _survey([join(folder, file) for file in group.names])
    train = surveys["train"]
    if not train.images:
        raise UserError(
            f"{where} holds {counted(len(names), 'tar')} with {train.samples} samples and no "
            "images; give WebDataset shards (key.jpg beside key.cls), or unpack them"
        )
    label = request.label or _label_member(
        where, train, request, [join(folder, file) for file in names]
    )
    _check_label(where, train, label)
    classes = _classes(where, train, label)
    suffixes = {suffix for survey in surveys.values() for suffix in survey.images}
    is_in_place = suffixes <= IN_PLACE
    if not is_in_place and label.startswith("json:"):
        raise UserError(
            f"{where}: its labels are a field of JSON, and its images are not all JPEG, PNG or "
            "WebP; write the shards with members .cls, or the images as JPEG"
        )
    left_out = [f"file {quoted(file)}" for file in unused[:3]]
    counts = {split: _num_known(survey, label, classes) for split, survey in surveys.items()}
    if counts.get("test") == 0:
        left_out.append(f"{groups['test'].pattern}, whose images have no labels")
        del counts["test"], groups["test"]
    num_images = sum(sum(surveys[split].images.values()) for split in groups)
    num_known = sum(counts.values())
    if num_known < num_images:
        left_out.append(f"{counted(num_images - num_known, 'image')} without a label")
    source: dict[str, Any] = {"format": "webdataset" if is_in_place else "tar"}
    source |= {"path": path or folder}
    splits: dict[str, Any] = {split: group.pattern for split, group in groups.items()}
    if is_in_place:
        source["path"] = folder
        splits = {split: _in_place(group.names) for split, group in groups.items()}
    source |= {"splits": splits, "label": label}
    num_tars = sum(len(group.names) for group in groups.values())
    note = ", used where they lie" if is_in_place else ""
    return DataSet(
        name=name,
        layout=f"{counted(num_tars, 'WebDataset shard')}{note}, labels in .{label}",
        source=source,
        classes=classes,
        counts=counts,
        left_out=tuple(left_out),
        bad_fraction=1 - num_known / max(num_images, 1),
        sizes=sizes_of(train.headers),
    )


def _in_place(names: Sequence[str]) -> str | list[str]:
    """Return the names of shards as a card of format `webdataset` lists them."""
    patterns = with_braces(names)
    return patterns[0] if len(patterns) == 1 else patterns


# ---- members -------------------------------------------------------------------------------------
def classes_of_shards(where: str, uris: Sequence[str], label: str) -> tuple[str, ...]:
    """Return the classes of shards. label: member of the label, or `json:FIELD`.

    Raise `UserError` where no sample has it.
    """
    survey = _survey(uris)
    _check_label(where, survey, label)
    return _classes(where, survey, label)


def _check_label(where: str, survey: Survey, label: str) -> None:
    if label not in survey.labels:
        raise UserError(
            f"{where}: no sample has a member {label!r}; labels may be in "
            f"{', '.join(map(repr, survey.labels)) or 'none'}"
        )


def _survey(uris: Sequence[str]) -> Survey:
    survey = Survey()
    for uri in uris:
        try:
            with open_file(uri) as stream:
                tar = open_tar(HeaderReader(stream, is_in_bucket=not is_local(uri)))
                for members in _samples(uri, tar):
                    _add(survey, members, stream)
                    if survey.samples > MOST_SAMPLES:
                        raise UserError(
                            f"{printable(uri)} and others have more than {MOST_SAMPLES} samples; "
                            "write the card by hand, see datasets/README.md"
                        )
        except UserError:
            raise
        except (tarfile.TarError, EOFError, ValueError, RecursionError) as error:
            raise UserError(
                f"{printable(uri)} is cut short or no uncompressed tar "
                f"({printable(str(error))[:200]}); fetch it again, or unpack its compression"
            ) from None
        except OSError as error:
            reason = printable(str(error.strerror or error).splitlines()[0])
            raise UserError(f"{printable(uri)} cannot be read ({reason}); {remedy(uri)}") from None
    return survey


def _samples(uri: str, tar: tarfile.TarFile) -> Iterator[dict[str, tarfile.TarInfo]]:
    """Yield the members of each key, by their extension; they follow each other."""
    current = ""
    members: dict[str, tarfile.TarInfo] = {}
    for member in tar:
        vars(tar)["members"] = []  # a shard may have millions
        if member.isdir():
            continue
        key, suffix = split_name(uri, member)
        if key != current and members:
            yield members
            members = {}
        current = key
        members[suffix] = member
    if members:
        yield members


def _add(survey: Survey, members: dict[str, tarfile.TarInfo], stream: pa.NativeFile) -> None:
    survey.samples += 1
    images = [suffix for suffix in members if f".{suffix}" in IMAGE_SUFFIXES]
    if not images:
        return
    survey.images[images[0]] += 1
    if len(survey.folders) < MOST_FOLDERS:
        survey.folders.add(posixpath.dirname(members[images[0]].name))
    if len(survey.headers) < MOST_SIZED:
        image = members[images[0]]
        survey.headers.append(stream.read_at(min(image.size, HEADER_BYTES), image.offset_data))
    texts: dict[str, str] = {}
    for suffix in LABEL_MEMBERS:
        member = members.get(suffix)
        if member is None:
            continue
        if suffix == "json":
            texts |= _fields(member, stream)
        else:
            data = stream.read_at(min(member.size, MAX_LABEL_BYTES), member.offset_data)
            texts[suffix] = data.decode("utf-8", "replace").strip()
    for source, text in texts.items():
        counter = survey.labels.setdefault(source, Counter())
        if text and (text in counter or len(counter) <= MAX_CLASSES):
            counter[text] += 1
    if "cls" in texts and "txt" in texts:
        names = survey.names.setdefault(texts["cls"], set())
        if len(names) < 2:
            names.add(texts["txt"])


def _fields(member: tarfile.TarInfo, stream: pa.NativeFile) -> dict[str, str]:
    if member.size > MOST_JSON:
        return {}
    try:
        body = json.loads(stream.read_at(member.size, member.offset_data))
    except (ValueError, RecursionError):
        return {}
    if not isinstance(body, dict):
        return {}
    texts: dict[str, str] = {}
    for name in LABEL_FIELDS:
        value = body.get(name)
        if isinstance(value, (str, int)) and not isinstance(value, bool):
            texts[f"json:{name}"] = str(value)
    return texts


def _label_member(where: str, survey: Survey, request: Request, paths: Sequence[str]) -> str:
    """Return the member that holds the label: the first of the known ones that has few values.

    paths: of the tars.
    """
    num_images = sum(survey.images.values())
    for label, counter in survey.labels.items():
        is_few = len(counter) <= 50 or len(counter) * 2 <= num_images
        if counter and is_few and len(counter) <= MAX_CLASSES:
            return label
    if len(survey.folders) > 1:
        command = unpack_command(paths, "", request.program) if len(paths) == 1 else None
        advice = f"unpack it: `{command}`" if command else "unpack them and give the folder"
        raise UserError(
            f"{where}: its {counted(num_images, 'image')} have no label beside them and lie in "
            f"{listed(sorted(survey.folders))}; {advice}"
        )
    known = ", ".join(f".{name}" for name in LABEL_MEMBERS)
    raise UserError(
        f"{where}: its {counted(num_images, 'image')} have no label beside them ({known}, with a "
        f"field {', '.join(LABEL_FIELDS)} in .json); write key.cls beside key.jpg"
    )


def _classes(where: str, survey: Survey, label: str) -> tuple[str, ...]:
    """Return the classes: the labels, or their names in `.txt` where they are numbers from 0."""
    counter = survey.labels[label]
    labels = sorted_labels(counter)
    are_numbers = labels == [str(number) for number in range(len(labels))]
    names = [survey.names.get(text, set()) for text in labels]
    if label == "cls" and are_numbers and all(len(texts) == 1 for texts in names):
        in_order = [next(iter(texts)) for texts in names]
        if len(set(in_order)) == len(in_order):
            return check_classes(where, in_order)
    return check_classes(where, labels)


def _num_known(survey: Survey, label: str, classes: tuple[str, ...]) -> int:
    total = 0
    for text, count in survey.labels.get(label, Counter()).items():
        is_class_number = text.isdecimal() and len(text) < 10 and int(text) < len(classes)
        if text in classes or is_class_number:
            total += count
    return total
