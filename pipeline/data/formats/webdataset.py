"""WebDataset shards used in place: ingest reads each from start to end, and copies nothing.

`pipeline.data.in_place` calls `read_shard` and writes the index. Training reads the images from the
same shards, by their offsets. A sample is `key.jpg` with `key.cls`, `key.txt` or `key.json`; its
members are consecutive. The offsets come from the headers, which are read while a shard is hashed,
so an `.idx` file would save no time.
"""

from __future__ import annotations

import hashlib
import os
import posixpath
import re
import tarfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pyarrow import fs

from pipeline.data.cards import Card
from pipeline.data.file_kinds import is_hidden
from pipeline.data.formats.base import (
    Format,
    Item,
    ItemBytes,
    LabelCounts,
    MapFn,
    Unit,
    class_names,
    find_size_problem,
)
from pipeline.data.formats.tar import (
    DAMAGE,
    HIDDEN_SAMPLE,
    JSON_PREFIX,
    LABEL_SUFFIX,
    MAX_HEADER_BYTES,
    MAX_JSON_BYTES,
    MORE_DATA,
    NAME_SUFFIX,
    NO_SAMPLE,
    SUFFIXES,
    TWO_IMAGES,
    TarJob,
    check_header_size,
    damaged_tar_error,
    find_contradiction,
    image_endings,
    is_image_ending,
    iterate_members,
    label_suffix,
    list_tar,
    member_suffix,
    peek_dots,
    read_field,
    split_name,
)
from pipeline.data.labels import MAX_LABEL_BYTES, ClassNames, Label, normalize_label
from pipeline.data.listing import Entry, absolute_uri, open_source, remedy
from pipeline.data.names import printable
from pipeline.data.splits import SPLITS, Split
from workers.data.in_place import urls_by_name
from workers.data.range_files import RangeFile, open_range_file
from workers.errors import UserError
from workers.job import ShardUrls
from workers.storage.artifact import is_local, join, parent
from workers.storage.hub_files import list_hub_folder
from workers.storage.web import FileVersion, WebFile, is_web

CHUNK_BYTES = 8 << 20  # bytes of one request; the next chunk is read in the background
LOOKUPS = 16  # concurrent requests to a web server
MAX_SAMPLES = 1_000_000  # samples of a shard; each needs about 1 KB until the index is written
# first bytes of the formats that every reader of shards can decode: JPEG, PNG and WebP
MAGIC = (b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n")
WEBP = re.compile(rb"RIFF.{4}WEBP", re.DOTALL)
METADATA = re.compile(r"__[^/]*__(/|$)")  # keys that WebDataset skips


# ---- URLs of the shards --------------------------------------------------------------------------
def shard_urls(card: Card) -> ShardUrls:
    """Return the URLs of a card's shards, in brace notation: `train-{000..007}.tar`."""
    return ShardUrls(*(tuple(_list_patterns(card, split)) for split in ("train", "test", "val")))


def _list_patterns(card: Card, split: Split) -> Iterator[str]:
    # each part of a split is a pattern of shards, for example train-{000..007}.tar
    for pattern in filter(None, card.source.list_parts(split)):
        if "://" in pattern or os.path.isabs(pattern):
            yield pattern
        else:
            # escape the folder, because braces are expanded only in the pattern
            base = re.sub(r"([{}\\,])", r"\\\1", absolute_uri(card.source.path))
            yield join(base.rstrip("/"), pattern)


def list_shards(card: Card) -> list[Entry] | None:
    """List the shards of a card under their names in the index, for example `train-000000.tar`.

    Returns:
        The shards, or None if all are missing.

    Raises:
        UserError: If some shards are missing, or a server or storage does not answer.
    """
    urls = urls_by_name(shard_urls(card))
    versions = _look_up(list(urls.values()))
    entries: list[Entry] = []
    missing: list[str] = []
    for name, url in urls.items():
        version = versions[url]
        if version is None:
            missing.append(url)
        else:
            entries.append(Entry(name, version.size, version.number))
    if missing and entries:
        raise UserError(
            f"card {card.name!r}: {len(missing)} of its {len(urls)} shards are missing, the first "
            f"is {printable(missing[0])}; put them there, or fix source.splits of the card"
        )
    return entries or None


def _look_up(urls: list[str]) -> dict[str, FileVersion | None]:
    """Return size and version of files, or None for a missing file.

    A folder in a bucket or on the hub is listed once. A web server gets one request per file.
    """
    by_folder: dict[str, list[str]] = {}
    for url in urls:
        by_folder.setdefault(parent(url), []).append(url)
    versions: dict[str, FileVersion | None] = {}
    for folder, group in by_folder.items():
        try:
            versions |= _look_up_folder(folder, group)
        except UserError:
            raise
        except OSError as error:
            raise UserError(
                f"cannot find out whether shard {printable(group[0])} exists "
                f"({printable(str(error).splitlines()[0])}); {remedy(group[0])}"
            ) from None
    return versions


def _look_up_folder(folder: str, urls: list[str]) -> dict[str, FileVersion | None]:
    if is_web(folder):
        with ThreadPoolExecutor(LOOKUPS, "shards") as pool:
            # The context contains the time limit for a server. Each call gets its own copy, because
            # a context cannot be entered twice at once.
            contexts = [copy_context() for _ in urls]
            answers = pool.map(
                lambda url, context: context.run(_fetch_version, url), urls, contexts
            )
            return dict(zip(urls, answers, strict=True))
    if folder.startswith("hf://"):
        listed = list_hub_folder(folder)
        return {url: listed.get(_base_name(url)) for url in urls}
    system, path = open_source(folder)
    if len(urls) == 1 or is_local(folder):
        infos = system.get_file_info([open_source(url)[1] for url in urls])
    else:
        selector = fs.FileSelector(path, allow_not_found=True)
        by_name = {info.base_name: info for info in system.get_file_info(selector)}
        infos = [by_name.get(_base_name(url)) for url in urls]
    versions: dict[str, FileVersion | None] = {}
    for url, info in zip(urls, infos, strict=True):
        versions[url] = None
        if info is not None and info.type != fs.FileType.NotFound:
            versions[url] = FileVersion(info.size or 0, info.mtime_ns or 0)
    return versions


def _fetch_version(url: str) -> FileVersion | None:
    try:
        return WebFile(url).version
    except FileNotFoundError:
        return None


def _base_name(url: str) -> str:
    if "://" in url:
        url = url.partition("?")[0]
    return posixpath.basename(url)


# ---- one shard -----------------------------------------------------------------------------------
class ReadJob(NamedTuple):
    """A shard to read.

    Attributes:
        card: Card with the classes.
        split: Split of the shard.
        url: Path or URL of the shard.
        endings: Extensions of images, without dots.
        label: Extension of the label member, or `json:FIELD`; None for images without labels.
    """

    card: Card
    split: str
    url: str
    endings: tuple[str, ...]
    label: str | None


@dataclass
class ShardSummary:
    """Summary of a completely read shard."""

    size: int = 0
    sha256: str = ""


def units(card: Card, entries: list[Entry], map_fn: MapFn) -> list[Unit]:
    """Return one unit for each shard."""
    urls = urls_by_name(shard_urls(card))
    endings = image_endings(card)
    label = label_suffix(card)
    jobs = [
        ReadJob(card, split, urls[entry.name], tuple(sorted(endings)), label)
        for split in SPLITS
        for entry in entries_of_split(card, split, entries)
    ]
    return [Unit(read_shard, (job,), num_items=0) for job in jobs]  # unknown before reading


def entries_of_split(card: Card, split: Split, entries: list[Entry]) -> list[Entry]:
    """Return the shards of a split. Their names in the index begin with the split."""
    return [entry for entry in entries if entry.name.startswith(f"{split}-")]


def read_shard(job: ReadJob, summary: ShardSummary | None = None) -> Iterator[ItemBytes]:
    """Yield the samples of a shard, and fill in the summary at its end.

    If a key occurs again later, it is another sample, as in WebDataset.

    Raises:
        UserError: If the shard is truncated, malicious or unreadable.
    """
    archive = printable(_base_name(job.url))
    names = class_names(job.card)
    num_samples = 0
    has_dots: bool | None = None  # whether keys contain dots; decided at the first member
    try:
        file = open_range_file(job.url)
        with ShardStream(file) as stream:
            sample: Sample | None = None
            for member in _members(stream, job.url):
                if has_dots is None:
                    has_dots = member.name.count(".") > 1 and _peek(job.url)
                key, suffix = split_name(job.url, member, has_dots)
                if METADATA.match(key):
                    continue
                if sample is None or sample.key != key or sample.precedes(suffix):
                    if sample is not None:
                        yield sample.item(job, archive, names), sample.data
                    num_samples += 1
                    if num_samples > MAX_SAMPLES:
                        raise UserError(
                            f"{printable(job.url)} has more than {MAX_SAMPLES} samples; "
                            "cut it into smaller shards"
                        )
                    sample = Sample(key)
                sample.add(suffix, member, stream, job)
            if sample is not None:
                yield sample.item(job, archive, names), sample.data
            digest = stream.finish()
    except UserError:
        raise
    except DAMAGE as error:
        raise damaged_tar_error(job.url, error) from None
    except OSError as error:
        reason = printable(" ".join(str(error).split())[:300])
        raise UserError(
            f"{printable(job.url)} cannot be read ({reason}); {remedy(job.url)}, "
            "then run the same command again"
        ) from None
    if summary is not None:
        summary.size = file.size
        summary.sha256 = digest


def _members(stream: ShardStream, url: str) -> Iterator[tarfile.TarInfo]:
    """Yield the complete members of a tar in bounded memory, and check its end mark."""
    source: Any = stream  # tarfile needs only these methods of a file
    with tarfile.open(fileobj=source, mode="r:") as tar:
        yield from iterate_members(tar, stream, stream.size)
        # tarfile treats an invalid header as the end of the tar
        if stream.last_header != bytes(tarfile.BLOCKSIZE):
            raise tarfile.ReadError(f"no header and no end mark at byte {tar.offset}")


def _peek(url: str) -> bool:
    """Return whether the keys of a shard contain dots, judged by its first members."""
    file: Any = _Bytes(open_range_file(url))
    # Read large blocks, as from a bucket: the shard may be remote.
    return peek_dots(file, is_in_bucket=True)


class _Bytes:
    """A range file as the argument of `peek_dots`, which calls only `read_at`."""

    def __init__(self, file: RangeFile):
        self.file = file

    def read_at(self, size: int, offset: int) -> bytes:
        return self.file.read_at(max(min(size, self.file.size - offset), 0), offset)


@dataclass
class Sample:
    """The members of one key.

    Attributes:
        key: Key of the sample.
        data: Bytes of the image.
        problem: Reason why the sample cannot be used.
        image_problem: Reason why its image cannot be used. A preferred image replaces it.
        label: Label from its member.
        text: Text of the member with the name of the class.
        offset: Offset of the image in the shard.
        size: Size of the image.
        found: Kinds of used members: the extension of the image, and `label`.
        suffixes: Extensions of all its members, in order.
    """

    key: str
    data: bytes | None = None
    problem: str | None = None
    image_problem: str | None = None
    label: Label = None
    text: Any = None
    offset: int = 0
    size: int = 0
    found: set[str] = field(default_factory=set)
    suffixes: dict[str, None] = field(default_factory=dict)

    def precedes(self, suffix: str) -> bool:
        """Return whether a member with this extension begins the next sample of the same key.

        This is the case if the sample has an image and a label and began with this extension.
        """
        has_image = bool(self.found - {"label"})  # the rest are extensions of images
        return suffix == next(iter(self.suffixes), "") and "label" in self.found and has_image

    def add(self, suffix: str, member: tarfile.TarInfo, stream: ShardStream, job: ReadJob) -> None:
        """Add the needed part of a member: the image, the label, or the name of the class."""
        self.suffixes[suffix] = None
        if job.label is not None and suffix == member_suffix(job.label):
            if "label" in self.found:
                self._reject("corrupt: two labels for one key")
                return
            self.found.add("label")
            self.label = normalize_label(_read_member_field(job.label, member, stream))
        elif is_image_ending(suffix, job.endings):
            self._add_image(suffix, member, stream, job)
        elif suffix == NAME_SUFFIX and job.label == LABEL_SUFFIX:
            self.text = _read_member_field(NAME_SUFFIX, member, stream)

    def _add_image(
        self, suffix: str, member: tarfile.TarInfo, stream: ShardStream, job: ReadJob
    ) -> None:
        """Add an image. `jpg` is preferred to `seg.jpg`; two images of one kind are a problem."""
        known = self.found - {"label"}
        is_plain = suffix in job.endings
        has_plain = any(one in job.endings for one in known)
        if has_plain and not is_plain:
            return
        if known and has_plain == is_plain:
            self._reject(TWO_IMAGES)
            return
        self.found.add(suffix)
        self._take_image(member, stream)

    def _take_image(self, member: tarfile.TarInfo, stream: ShardStream) -> None:
        self.offset = member.offset_data
        self.size = member.size
        self.image_problem = find_size_problem(member.size)
        if self.image_problem is None:
            stream.seek(member.offset_data)
            self.data = stream.take(member.size)
            if not self.data.startswith(MAGIC) and not WEBP.match(self.data):
                self.image_problem = "corrupt: not an image in JPEG, PNG or WebP"

    def _reject(self, problem: str) -> None:
        self.problem = self.problem or problem
        self.data = None

    def item(self, job: ReadJob, archive: str, names: ClassNames) -> Item:
        """Return the sample as an item of the source."""
        has_image = bool(self.found - {"label"})
        if self.image_problem:
            self._reject(self.image_problem)
        if is_hidden(self.key) and has_image:
            # `hidden` replaces any other problem, because the sample is left out in any case
            self.problem = None
            self._reject(HIDDEN_SAMPLE)
        elif not has_image:
            self._reject("corrupt: no image in the sample" if "label" in self.found else NO_SAMPLE)
        contradiction = find_contradiction(names, self.label, self.text)
        if contradiction is not None:
            self._reject(contradiction)
        return Item(
            job.split,
            f"{archive}:{self.key}",
            self.key.rsplit("/", 1)[-1],
            self.label,
            self.problem,
            job.url,
            self.offset,
            self.size,
        )


def _read_member_field(source: str, member: tarfile.TarInfo, stream: ShardStream) -> Any:
    """Return the value of a member, or None if it cannot be read."""
    stream.seek(member.offset_data)
    if not source.startswith(JSON_PREFIX):
        return read_field(source, stream.take(min(member.size, MAX_LABEL_BYTES)))
    if member.size > MAX_JSON_BYTES:
        return None
    return read_field(source, stream.take(member.size))


class ShardStream:
    """A file that is read once, from start to end, and hashed.

    `tarfile` reads headers from it, and a header with a huge size is refused.

    Attributes:
        header_bytes: Bytes that `tarfile` has read since the last member; `iterate_members` sets
            it to 0 after each member.
        last_header: Bytes of the last `read`.
    """

    def __init__(self, file: RangeFile):
        self.file = file
        self.size = file.size
        self.header_bytes = 0
        self.last_header = b""
        self.sha256 = hashlib.sha256()
        self._threads = ThreadPoolExecutor(1)
        self._position = 0
        self._chunk = memoryview(b"")
        self._next_start = 0  # start of the next chunk, which is read in the background
        self._next_chunk = self._request()

    def __enter__(self) -> ShardStream:
        return self

    def __exit__(self, *_: Any) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def read(self, size: int) -> bytes:
        """Return the next `size` bytes of a header, or fewer at the end of the file."""
        self.header_bytes += size
        if size > MAX_HEADER_BYTES:
            raise tarfile.ReadError(f"a header of {size} bytes")
        check_header_size(self.header_bytes)
        self.last_header = self.take(min(size, self.size - self._position))
        return self.last_header

    def take(self, size: int) -> bytes:
        """Return the next `size` bytes; raise `tarfile.ReadError` if the file ends before."""
        if size <= len(self._chunk):
            return bytes(self._advance(size))
        parts = bytearray()
        while len(parts) < size:
            self._fill()
            parts += self._advance(min(size - len(parts), len(self._chunk)))
        return bytes(parts)

    def seek(self, position: int) -> int:
        """Skip to a later position."""
        if not self._position <= position:
            raise tarfile.ReadError("its members do not follow each other")
        while self._position < min(position, self.size):
            self._fill()
            self._advance(min(position - self._position, len(self._chunk)))
        return self._position

    def tell(self) -> int:
        """Return the current position."""
        return self._position

    def finish(self) -> str:
        """Read to the end, where only zeros may follow, and return the sha256 of the file."""
        while self._position < self.size:
            self._fill()
            if bytes(self._advance(len(self._chunk))).strip(b"\0"):
                raise tarfile.ReadError(MORE_DATA)
        return self.sha256.hexdigest()

    def _advance(self, size: int) -> memoryview:
        part = self._chunk[:size]
        self._chunk = self._chunk[size:]
        self._position += size
        return part

    def _fill(self) -> None:
        """Load the next chunk if the current one is used up."""
        if len(self._chunk):
            return
        data = self._next_chunk.result()
        expected = min(CHUNK_BYTES, self.size - self._next_start)
        if len(data) < expected or not data:
            raise tarfile.ReadError(f"it ends at byte {self._next_start + len(data)}")
        self.sha256.update(data)
        self._chunk = memoryview(data)
        self._next_start += len(data)
        self._next_chunk = self._request()

    def _request(self) -> Future[bytes]:
        return self._threads.submit(self.file.read_at, CHUNK_BYTES, self._next_start)


def count_labels(card: Card, entries: list[Entry]) -> LabelCounts:
    """Return the number of samples by split and label."""
    urls = urls_by_name(shard_urls(card))
    counts: LabelCounts = Counter()
    for split in SPLITS:
        for entry in entries_of_split(card, split, entries):
            items = list_tar(TarJob(card, split, urls[entry.name]))
            counts.update((item.split, item.label) for item in items if not item.problem)
    return counts


FORMAT = Format(
    units,
    count_labels,
    SUFFIXES,
    list_shards=list_shards,
    entries_of_split=entries_of_split,
)
