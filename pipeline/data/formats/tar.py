"""Uncompressed tars in WebDataset's layout: `key.jpg` with `key.cls`, which contains the class.

Ingest copies the images into new shards. The format `webdataset` uses the tars in place instead.
"""

from __future__ import annotations

import json
import posixpath
import re
import tarfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple, Protocol

import pyarrow as pa

from pipeline.data.cards import Card
from pipeline.data.file_kinds import IMAGE_SUFFIXES, LITTER, TAR_SUFFIX, is_hidden
from pipeline.data.formats.base import (
    Format,
    Item,
    LabelCounts,
    MapFn,
    SplitValues,
    Unit,
    build_units,
    class_names,
    find_archives,
    find_size_problem,
)
from pipeline.data.labels import MAX_LABEL_BYTES, ClassNames, Label, normalize_label
from pipeline.data.listing import Entry, open_file, open_source
from pipeline.data.names import check_unicode_forms, printable
from pipeline.data.splits import IGNORE, SPLITS
from workers.errors import UserError
from workers.storage.artifact import is_local

SUFFIXES = frozenset((TAR_SUFFIX,))
LABEL_SUFFIX = "cls"
NAME_SUFFIX = "txt"  # suffix of the member with the name of the class
JSON_PREFIX = "json:"
# usual extensions of labels, to recognise samples without the card
LABEL_ENDINGS = ("cls", "txt", "json", "class", "label")
MAX_HEADER_BYTES = 1 << 20  # bytes of the headers of one member
MAX_JSON_BYTES = 1 << 20  # bytes of a JSON member that contains the label
BLOCK_BYTES = 1 << 20  # bytes of one request to a bucket
PEEKED_MEMBERS = 16  # first members of a tar, used to recognise keys with dots
HIDDEN_SAMPLE = "hidden: its name begins with a dot"
TWO_IMAGES = "corrupt: two images for one key"
NO_SAMPLE = "other file: neither an image nor a label"
IMAGE_ENDINGS = frozenset(suffix.lstrip(".") for suffix in IMAGE_SUFFIXES)
MORE_DATA = "data follows its end mark; the file may be several archives in one"
# exceptions that reading a damaged tar can raise; malicious headers cause the last two
DAMAGE = (tarfile.TarError, EOFError, ValueError, RecursionError)


def damaged_tar_error(uri: str, error: Exception) -> UserError:
    """Return the error for a tar that `tarfile` cannot read. `error` is one of DAMAGE."""
    return UserError(
        f"{printable(uri)} cannot be read as an uncompressed tar "
        f"({printable(str(error))[:200]}); fetch or write it again, without compression"
    )


# ---- members -------------------------------------------------------------------------------------
def split_name(uri: str, member: tarfile.TarInfo, has_dots: bool = False) -> tuple[str, str]:
    """Return the key of a member and its extension.

    Args:
        uri: URI of the tar, for errors.
        member: The member.
        has_dots: Whether keys contain dots. If so, the extension begins at the last dot of the file
            name, otherwise at the first dot, as in WebDataset.

    Raises:
        UserError: If the member is not a plain file inside the archive.
    """
    is_outside = member.name.startswith("/") or ".." in member.name.split("/")
    if is_outside or not member.isreg() or member.issparse():
        raise UserError(
            f"{printable(uri)}: member {member.name!r:.200} is not a plain file (a link, device or "
            "sparse file), or its name points outside the archive; write the tar again with plain "
            "files and relative names"
        )
    folder, _, name = member.name.removeprefix("./").rpartition("/")
    stem, _, suffix = name.rpartition(".") if has_dots else name.partition(".")
    first, _, rest = suffix.partition(".")
    # a later key with a dot, such as img.0001.jpg, in a tar that `peek_dots` judged to have none
    while rest and first.isdecimal():
        stem, suffix = f"{stem}.{first}", rest
        first, _, rest = suffix.partition(".")
    return f"{folder}/{stem}" if folder else stem, suffix.lower()


def is_skipped_member(member: tarfile.TarInfo) -> bool:
    """Return whether to skip a member: a folder, or a file of an operating system (`._x.jpg`)."""
    name = member.name.removeprefix("./")
    is_litter = any(part.lower() in LITTER or part.startswith("._") for part in name.split("/"))
    return member.isdir() or is_litter


def keys_have_dots(names: Sequence[str]) -> bool:
    """Return whether the keys of a tar contain dots, judged by the names of the first members.

    Keys contain dots if an image and a label differ only in their last extension, and the part
    before this extension has a dot. An example is `img.0001.jpg` and `img.0001.cls`, but not
    `0001.image.jpg` and `0001.cls`.
    """
    endings: dict[str, set[str]] = {}
    for name in names:
        stem, _, ending = name.rpartition(".")
        endings.setdefault(stem, set()).add(ending.lower())
    has_dots = False
    for stem, found in endings.items():
        if found & IMAGE_ENDINGS and found & set(LABEL_ENDINGS):
            if "." not in stem.rpartition("/")[2]:
                return False
            has_dots = True
    return has_dots


def is_image_ending(suffix: str, endings: frozenset[str] | tuple[str, ...]) -> bool:
    """Return whether an extension like `jpg` or `image.jpg` belongs to an image."""
    return suffix in endings or suffix.rpartition(".")[2] in endings


def image_suffixes(suffixes: Iterable[str], endings: frozenset[str] | tuple[str, ...]) -> list[str]:
    """Return the extensions in a sample that can be its image.

    Extensions such as `seg.png` are returned only if no plain one such as `png` exists.
    """
    suffixes = [suffix for suffix in suffixes if is_image_ending(suffix, endings)]
    return [suffix for suffix in suffixes if suffix in endings] or suffixes


def image_endings(card: Card) -> frozenset[str]:
    """Return the extensions of images, without a dot."""
    # "image" is the default of the setting, the name of a column; here it means any extension
    if card.source.image == "image":
        return IMAGE_ENDINGS
    parts = re.split(r"[;\s]+", card.source.image.lower())
    return frozenset(part.lstrip(".") for part in parts if part)


def label_suffix(card: Card) -> str | None:
    """Return the extension of the member that holds the label, or `json:FIELD`.

    None: images have no labels.
    """
    # "label" is the default of the setting, the name of a column; here it means LABEL_SUFFIX. For
    # members `*.label` a card writes ".label".
    label = card.source.label
    return LABEL_SUFFIX if label == "label" else label and label.removeprefix(".")


def member_suffix(source: str) -> str:
    """Return the extension of the member for `json:FIELD`, or an extension unchanged."""
    return "json" if source.startswith(JSON_PREFIX) else source


def read_field(source: str, data: bytes, keep_flags: bool = False) -> Any:
    """Return the value of a member: a field of the JSON, or its text.

    Args:
        source: `json:FIELD`, or the extension of a text.
        data: Content of the member.
        keep_flags: Return true and false, which can name splits. Otherwise None is returned
            instead, because they are no labels.

    Returns:
        The value. None if the JSON cannot be parsed, or its field is missing or null.
    """
    if not source.startswith(JSON_PREFIX):
        return data.decode("utf-8", "replace")
    try:
        body = json.loads(data)
    except (ValueError, RecursionError):
        return None
    value = body.get(source.removeprefix(JSON_PREFIX)) if isinstance(body, dict) else None
    return None if isinstance(value, bool) and not keep_flags else value


def find_contradiction(names: ClassNames, label: Label, text: Any) -> str | None:
    """Return the problem of a sample if its `.txt` names another class than its label."""
    said = normalize_label(text)
    if said is None or said not in names.by_name or label is None:
        return None
    found = names.find(label)
    if found == names.by_name[said]:
        return None
    return f"corrupt: its label says {found!r:.60} and its .{NAME_SUFFIX} {said!r:.60}"


# ---- reading headers -----------------------------------------------------------------------------
class HeaderStream(Protocol):
    """A file that `tarfile` reads headers from.

    Attributes:
        header_bytes: Bytes read since the last member.
    """

    header_bytes: int


def check_header_size(header_bytes: int) -> None:
    """Raise `tarfile.ReadError` if the headers of one member have more than MAX_HEADER_BYTES."""
    if header_bytes > MAX_HEADER_BYTES:
        raise tarfile.ReadError(f"headers of {header_bytes} bytes for one file")


def iterate_members(
    tar: tarfile.TarFile, stream: HeaderStream, size: int
) -> Iterator[tarfile.TarInfo]:
    """Yield the members of a tar in bounded memory, except skipped ones (`is_skipped_member`).

    Args:
        tar: The open tar. Its lists of members and of global headers are emptied.
        stream: The file that `tar` reads from.
        size: Bytes of the file.

    Raises:
        tarfile.ReadError: If a member is truncated.
    """
    state = vars(tar)
    for member in tar:
        stream.header_bytes = 0
        member.pax_headers = {}
        state["members"] = []  # a shard may have millions of members
        state["pax_headers"] = {}  # global headers; a malicious file can have gigabytes
        if not 0 <= member.size <= size - member.offset_data:
            raise tarfile.ReadError(
                f"member {member.name!r:.80} has {member.size} bytes, and so many do not follow"
            )
        if not is_skipped_member(member):
            yield member


class HeaderReader:
    """A file that `tarfile` reads headers from. A header with a huge declared size is refused.

    From a bucket BLOCK_BYTES are read at a time, because one request for each header takes far
    longer.
    """

    def __init__(self, file: pa.NativeFile, is_in_bucket: bool):
        self.file = file
        self.is_in_bucket = is_in_bucket
        self.header_bytes = 0
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
        self.header_bytes += size
        check_header_size(self.header_bytes)
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


def open_tar(stream: HeaderReader) -> tarfile.TarFile:
    """Open a tar for reading its headers."""
    file: Any = stream  # tarfile needs only these methods of a file
    return tarfile.open(fileobj=file, mode="r:")


class OpenTar(NamedTuple):
    """A tar that is being read: its bytes, and whether its keys contain dots."""

    stream: HeaderReader
    has_dots: bool

    def read_start(self, member: tarfile.TarInfo, max_bytes: int) -> bytes:
        """Return at most the first `max_bytes` bytes of a member."""
        return self.stream.read_at(min(member.size, max_bytes), member.offset_data)


def peek_dots(file: pa.NativeFile, is_in_bucket: bool) -> bool:
    """Return whether the keys of a tar contain dots, judged by its first members.

    If the first file name has at most one dot, no further header is read.
    """
    names: list[str] = []
    for member in islice(open_tar(HeaderReader(file, is_in_bucket)), PEEKED_MEMBERS):
        if not is_skipped_member(member):
            names.append(member.name)
        if len(names) == 1 and names[0].rpartition("/")[2].count(".") < 2:
            return False
    return keys_have_dots(names)


Members = dict[str, tarfile.TarInfo]  # extension -> member of a sample


def _is_whole_sample(members: Members) -> bool:
    """Return whether a sample has an image and a label."""
    return bool(members.keys() & set(LABEL_ENDINGS) and image_suffixes(members, IMAGE_ENDINGS))


def read_samples(uri: str) -> Iterator[tuple[str, Members, OpenTar]]:
    """Yield the key, the members and the open tar for each run of members with the same key.

    A run ends at a member with another key. It also ends if its first extension comes again after
    an image and a label, because then another sample with the same key begins. The members of one
    sample can be in several runs, which `list_tar` joins.

    Raises:
        UserError: If the tar is truncated, malicious or unreadable.
    """
    try:
        with open_file(uri) as file:
            is_in_bucket = not is_local(uri)
            shard = OpenTar(HeaderReader(file, is_in_bucket), peek_dots(file, is_in_bucket))
            tar = open_tar(shard.stream)
            current = ""
            members: Members = {}
            for member in iterate_members(tar, shard.stream, file.size()):
                key, suffix = split_name(uri, member, shard.has_dots)
                begins = suffix == next(iter(members), "") and _is_whole_sample(members)
                if suffix in members and key == current and not begins:
                    raise tarfile.ReadError(
                        f"key {key!r:.80} has two members .{suffix:.20}, and it is not clear which "
                        "belongs to its label; each sample needs a key of its own"
                    )
                if members and (key != current or suffix in members):
                    yield current, members, shard
                    members = {}
                current = key
                members[suffix] = member
            if members:
                yield current, members, shard
            if file.size() < tar.offset + tarfile.BLOCKSIZE:
                raise tarfile.ReadError("it ends without an end mark")
            # only zeros may follow the end mark
            for start in range(tar.offset, file.size(), BLOCK_BYTES):
                if shard.stream.read_at(BLOCK_BYTES, start).strip(b"\0"):
                    raise tarfile.ReadError(MORE_DATA)
    except UserError:
        raise
    except DAMAGE as error:
        raise damaged_tar_error(uri, error) from None


# ---- the format ----------------------------------------------------------------------------------
class TarJob(NamedTuple):
    """One tar to list. `split` is None if `source.split` is set: each sample names its split."""

    card: Card
    split: str | None
    uri: str


def list_jobs(card: Card, entries: list[Entry]) -> tuple[list[TarJob], list[Item]]:
    """Return the tars of all splits, and items for the other files."""
    jobs: list[TarJob] = []
    other_items: list[Item] = []
    # with `source.split` all splits share the same tars, which are listed once
    splits = SPLITS if card.source.split is None else card.source.named_splits()[:1]
    for split in splits:
        uris, items = find_archives(card, split, entries, SUFFIXES)
        of_tar = split if card.source.split is None else None
        jobs += [TarJob(card, of_tar, uri) for uri in uris]
        other_items += items
    return jobs, other_items


def units(card: Card, entries: list[Entry], map_fn: MapFn) -> list[Unit]:
    """Return the units of all samples: parts of the source that one call reads (see `base.Unit`).

    The samples of each tar are listed by `map_fn`.
    """
    jobs, items = list_jobs(card, entries)
    for samples in map_fn(list_tar, jobs):
        check_unicode_forms(f"source of card {card.name!r}", [item.name for item in samples])
        items += samples
    return build_units(items)


def list_tar(job: TarJob) -> list[Item]:
    """List the samples of one tar, without samples of ignored splits.

    Raises:
        UserError: If the tar is truncated or malicious, or the card does not name a split value.
    """
    source = label_suffix(job.card)
    names = class_names(job.card)
    values = SplitValues(job.card, printable(job.uri))
    archive = posixpath.basename(open_source(job.uri)[1])
    endings = image_endings(job.card)
    samples: list[tuple[str, Members, dict[str, Any]]] = []
    last: dict[str, int] = {}  # key -> index of the last sample
    wanted = [source] if source is not None else []
    split_columns = job.card.source.split_columns()
    for key, members, shard in read_samples(job.uri):
        texts: dict[str, Any] = {}
        for name in (*wanted, *split_columns, NAME_SUFFIX):
            member = members.get(member_suffix(name))
            if member is not None:
                max_bytes = MAX_JSON_BYTES if name.startswith(JSON_PREFIX) else MAX_LABEL_BYTES
                data = shard.read_start(member, max_bytes)
                texts[name] = read_field(name, data, keep_flags=name in split_columns)
        # Join the runs of one sample, whose members may not be neighbours: for example, a tar with
        # all images before all labels.
        place = last.get(key)
        if place is None or samples[place][1].keys() & members.keys():
            last[key] = len(samples)
            samples.append((key, members, texts))
        else:
            samples[place][1].update(members)
            samples[place][2].update(texts)
    items: list[Item] = []
    split: str
    problem: str | None
    for number, (key, members, texts) in enumerate(samples):
        label = normalize_label(texts.get(source or ""))
        images = image_suffixes(members, endings)
        name = f"{archive}:{key}"
        stem = key.rsplit("/", 1)[-1]
        if is_hidden(key) or not (images or label is not None):
            problem = HIDDEN_SAMPLE if images else NO_SAMPLE
            items.append(Item(job.split or SPLITS[0], name, stem, label, problem))
            continue
        if job.split is not None:
            split = job.split
        else:
            cells = [_to_label_text(texts.get(column)) for column in split_columns]
            split = values.find(values.value(cells), number)
        if split == IGNORE:
            continue
        if len(images) != 1:
            problem = TWO_IMAGES if images else "corrupt: no image in the sample"
            items.append(Item(split, name, stem, label, problem))
            continue
        image = members[images[0]]
        problem = find_size_problem(image.size)
        if source == LABEL_SUFFIX:
            problem = problem or find_contradiction(names, label, texts.get(NAME_SUFFIX))
        offset = image.offset_data
        items.append(Item(split, name, stem, label, problem, job.uri, offset, image.size))
    return items


def _to_label_text(value: Any) -> str | None:
    return None if value is None else str(value).strip()


def count_labels(card: Card, entries: list[Entry]) -> LabelCounts:
    """Return the number of samples by split and label."""
    counts: LabelCounts = Counter()
    for job in list_jobs(card, entries)[0]:
        counts.update((item.split, item.label) for item in list_tar(job) if not item.problem)
    return counts


FORMAT = Format(units, count_labels, SUFFIXES)
