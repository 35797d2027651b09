"""Uncompressed tars in WebDataset's layout: `key.jpg` beside `key.cls`, which holds the class."""

from __future__ import annotations

import posixpath
import tarfile
from typing import Any, NamedTuple

import pyarrow as pa

from pipeline.data.cards import Card
from pipeline.data.formats.base import (
    IMAGE_SUFFIXES,
    MAX_LABEL_BYTES,
    Format,
    Item,
    MapFn,
    Unit,
    archives_of_split,
    class_of,
    size_problem,
    units_of_items,
)
from pipeline.data.listing import (
    SPLITS,
    Entry,
    check_unicode_forms,
    open_file,
    open_source,
    printable,
)
from workers.errors import UserError
from workers.storage.artifact import is_local

SUFFIXES = frozenset((".tar",))
LABEL_SUFFIX = "cls"
MAX_HEADER_BYTES = 1 << 20  # of one header in a tar
BLOCK_BYTES = 1 << 20  # of one request to a bucket
# what reading a damaged tar raises; the last two come from headers that no program writes
DAMAGE = (tarfile.TarError, EOFError, ValueError, RecursionError)


class TarJob(NamedTuple):
    """One tar to list. label_suffix: extension of the members that hold labels; None: no labels.
    classes: as the card lists them."""

    split: str
    uri: str
    label_suffix: str | None
    classes: tuple[str, ...]


class TarSamples(NamedTuple):
    """What a tar holds. members: by the sample's key and their extension. labels: text by key."""

    members: dict[str, dict[str, tarfile.TarInfo]]
    labels: dict[str, str]


def damaged_tar(uri: str, error: Exception) -> UserError:
    """Return the error of a tar that `tarfile` cannot read. error: one of DAMAGE."""
    return UserError(
        f"{printable(uri)} is cut short or no uncompressed tar ({error}); fetch it again, "
        "or unpack its compression"
    )


def units(card: Card, entries: list[Entry], map_fn: MapFn) -> list[Unit]:
    """Return the units of all samples; every tar is listed once, by `map_fn`."""
    # `label` is the default of a column's name in Parquet, and nobody's extension
    label_suffix = LABEL_SUFFIX if card.source.label == "label" else card.source.label
    jobs: list[TarJob] = []
    items: list[Item] = []
    for split in SPLITS:
        uris, other_items = archives_of_split(card, split, entries, SUFFIXES)
        jobs += [TarJob(split, uri, label_suffix, card.classes) for uri in uris]
        items += other_items
    for samples in map_fn(list_tar, jobs):
        check_unicode_forms(f"source of card {card.name!r}", [item.name for item in samples])
        items += samples
    return units_of_items(items)


def list_tar(job: TarJob) -> list[Item]:
    """List the samples of one tar. Raise UserError where it is cut short or hostile."""
    try:
        samples = _read_headers(job)
    except UserError:
        raise
    except DAMAGE as error:
        raise damaged_tar(job.uri, error) from None
    archive = posixpath.basename(open_source(job.uri)[1])
    return [_item(job, archive, key, samples) for key in samples.members]


def _read_headers(job: TarJob) -> TarSamples:
    members: dict[str, dict[str, tarfile.TarInfo]] = {}
    labels: dict[str, str] = {}
    with open_file(job.uri) as file:
        stream = HeaderReader(file, is_in_bucket=not is_local(job.uri))
        tar = open_tar(stream)
        for member in tar:
            if member.isdir():
                continue
            key, suffix = split_name(job.uri, member)
            members.setdefault(key, {})[suffix] = member
            if not 0 <= member.size <= file.size() - member.offset_data:
                raise tarfile.ReadError(
                    f"member {member.name!r:.80} has {member.size} bytes, and so many do not follow"
                )
            if suffix == job.label_suffix:
                data = stream.read_at(min(member.size, MAX_LABEL_BYTES), member.offset_data)
                labels[key] = data.decode("utf-8", "replace").strip()
        if file.size() < tar.offset + tarfile.BLOCKSIZE:
            raise tarfile.ReadError("it ends without an end mark")
    return TarSamples(members, labels)


def open_tar(stream: HeaderReader) -> tarfile.TarFile:
    file: Any = stream  # tarfile uses no more of a file
    return tarfile.open(fileobj=file, mode="r:")


def _item(job: TarJob, archive: str, key: str, samples: TarSamples) -> Item:
    label = class_of(samples.labels.get(key), job.classes)
    name = f"{archive}:{key}"
    stem = key.rsplit("/", 1)[-1]
    for suffix, image in samples.members[key].items():
        if f".{suffix}" in IMAGE_SUFFIXES:
            problem = size_problem(image.size)
            offset = image.offset_data
            return Item(job.split, name, stem, label, problem, job.uri, offset, image.size)
    return Item(job.split, name, stem, label, "corrupt: no image in the sample")


class HeaderReader:
    """A file that `tarfile` reads headers from; a header that claims to be huge is refused.

    From a bucket, BLOCK_BYTES are read at a time, as a request for each header takes far longer.
    """

    def __init__(self, file: pa.NativeFile, is_in_bucket: bool):
        self.file = file
        self.is_in_bucket = is_in_bucket
        self.position = 0
        self.block = b""
        self.block_start = 0

    def seek(self, offset: int) -> None:
        self.position = offset

    def tell(self) -> int:
        return self.position

    def read(self, size: int) -> bytes:
        if size > MAX_HEADER_BYTES:
            raise tarfile.ReadError(f"a header of {size} bytes")
        data = self.read_at(size, self.position)
        self.position += len(data)
        return data

    def read_at(self, size: int, offset: int) -> bytes:
        first = offset - self.block_start
        if not (first >= 0 and first + size <= len(self.block)):
            num_bytes = size
            if self.is_in_bucket:
                num_bytes = max(size, BLOCK_BYTES)
            self.block = self.file.read_at(num_bytes, offset)
            self.block_start = offset
            first = 0
        return self.block[first : first + size]


def split_name(uri: str, member: tarfile.TarInfo) -> tuple[str, str]:
    """Return WebDataset's key of a member (all up to the first dot of its file name) and its
    extension. Raise UserError where it is no plain file inside the archive."""
    is_outside = member.name.startswith("/") or ".." in member.name.split("/")
    if is_outside or not member.isreg() or member.issparse():
        raise UserError(
            f"{printable(uri)}: member {member.name!r:.200} is a link, or points outside "
            "the archive; shards hold plain files with relative names, write this one anew"
        )
    folder, _, name = member.name.removeprefix("./").rpartition("/")
    stem, _, suffix = name.partition(".")
    return f"{folder}/{stem}" if folder else stem, suffix.lower()


FORMAT = Format(units, SUFFIXES)
