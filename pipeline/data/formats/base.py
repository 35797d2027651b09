"""Common parts of all formats: items, units that read items, and the files of a split."""

from __future__ import annotations

import io
import os
import posixpath
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any, NamedTuple

from PIL import Image
from pyarrow import fs

from pipeline.data.cards import Card
from pipeline.data.labels import ClassNames, Label
from pipeline.data.listing import (
    HIDDEN,
    Entry,
    absolute_uri,
    open_file,
    open_source,
    remedy,
)
from pipeline.data.names import get_suffix, listed, printable
from pipeline.data.splits import IGNORE, SPLIT_KEYS, Split, SplitUnclear, is_yes
from workers.errors import UserError
from workers.storage.artifact import is_local, join

LIBRARIES = ("sklearn", "torchvision")  # formats whose data a Python package contains or downloads
UNIT_ITEMS = 4096  # maximum number of files, members or rows of a unit
MIN_UNIT_BYTES = 8 << 20
MAX_UNIT_BYTES = 256 << 20
UNITS = 64  # approximate number of units of a source of medium size
RUN_GAP = 64 << 10  # maximum unneeded bytes between two images that are read together
RUN_BYTES = 8 << 20  # maximum bytes of one read of several images
AHEAD_BYTES = 64 << 20  # bytes read ahead from a bucket
READERS = 8  # concurrent reads from a bucket
# Maximum bytes of one encoded image. An uncompressed image with the default `max_pixels` and 16
# bits per channel has up to 400 MB.
MAX_IMAGE_BYTES = 512 << 20
# A table can store a value once and repeat it in a million rows. Therefore the bytes of all images
# are limited to MAX_UNFOLDING times the bytes of the files. MAX_UNFOLDED_BYTES are always allowed.
MAX_UNFOLDING = 100
MAX_UNFOLDED_BYTES = 4 << 30

# `map_fn(function, items)` returns the results in order. It may run in parallel.
MapFn = Callable[[Callable[[Any], Any], Iterable[Any]], Iterable[Any]]


@dataclass(slots=True)
class Item:
    """One image of a source.

    Attributes:
        split: Split, or IGNORE if the card excludes it.
        name: Name in messages and lists (path or row).
        stem: The name without folder and extension, for the key in the shards.
        label: Label as written in the source, or None.
        problem: Reason why the image cannot be used, if it is known without decoding the image.
        uri: File from which the bytes can be read again. Empty if this is impossible.
        offset: Offset of the bytes in the file.
        size: Number of bytes. None: the whole file.
        stamp: Identifies the bytes: name, size and modification time of the file, and the position
            of the image in the file. For rows of a table, this is the position of all rows that
            are read together. Equal stamps mean equal bytes, so ingest does not read a known image
            again (see `pipeline.data.known_images`). Empty if the time is unknown.
    """

    split: str
    name: str
    stem: str
    label: Label
    problem: str | None = None
    uri: str = ""
    offset: int = 0
    size: int | None = None
    stamp: str = ""


ItemBytes = tuple[Item, bytes | None]  # an item and its bytes; None if there is a problem
LabelCounts = Counter[tuple[str, Label]]  # number of images by split and label


class Unit(NamedTuple):
    """A part of a source that is read in one call, and in parallel with other units.

    Attributes:
        read: `read(*args)` yields items with their bytes.
        args: Arguments of `read`.
        num_items: Number of items, or 0 if it is not known before reading.
        file: URI of the file, if the items are rows of one file.
        first_row: Index of the first of these rows in the file.
        stamp: Stamp of all items without their own stamp, see `Item`.
    """

    read: Callable[..., Iterator[ItemBytes]]
    args: tuple[Any, ...]
    num_items: int
    file: str = ""
    first_row: int = 0
    stamp: str = ""


def row_name(file: str, row: int | str) -> str:
    """Return the name of a row, for example `data.parquet:7`. `file` is a path or URI."""
    return f"{file.rsplit('/', 1)[-1]}:{row}"


@dataclass(frozen=True)
class Format:
    """One format of raw data. Each module of this folder defines a format as `FORMAT`.

    Attributes:
        units: Divides a source into units, from its card, its entries and a map function.
        count_labels: Counts images by split and label, without decoding images.
        suffixes: Suffixes of the files with images or labels. Empty if the data comes from a Python
            package.
        first_folders: Returns the folders of a source to list before the others.
        list_shards: Lists the shards that the card names. Only for WebDataset shards that are used
            in place.
        list_files: Lists the files of a source, if they are not only in the folder at its path.
        entries_of_split: Returns the files that a split uses.
        list_items: Lists all images with their labels. Only for formats that can do this without
            reading images.
        check: Quick check that raises `UserError` for a source that `units` would refuse.
    """

    units: Callable[[Card, list[Entry], MapFn], list[Unit]]
    count_labels: Callable[[Card, list[Entry]], LabelCounts]
    suffixes: frozenset[str] = frozenset()
    first_folders: Callable[[Card], list[str]] = lambda card: [""]
    list_shards: Callable[[Card], list[Entry] | None] | None = None
    list_files: Callable[[Card, int | None], list[Entry] | None] | None = None
    entries_of_split: Callable[[Card, Split, list[Entry]], list[Entry]] = (
        lambda card, split, entries: find_matching_entries(card, split, entries)
    )
    list_items: Callable[[Card, list[Entry]], Iterator[Item]] | None = None
    check: Callable[[Card, list[Entry]], None] | None = None


# ---- files of a split ----------------------------------------------------------------------------
def source_uri(card: Card) -> str:
    """Return the path or URI of a card's source."""
    return absolute_uri(card.source.path)


def base_uri(card: Card) -> str:
    """Return the prefix of file names of a source: a path for a local disk, otherwise a URI."""
    system, path = open_source(source_uri(card))
    return path if isinstance(system, fs.LocalFileSystem) else source_uri(card).rstrip("/")


def is_single_file(card: Card, entries: Sequence[Entry]) -> bool:
    """Return whether the source of a card is a single file, not a folder."""
    _, path = open_source(source_uri(card))
    return len(entries) == 1 and entries[0].name == posixpath.basename(path)


def find_matching_entries(card: Card, split: Split, entries: Sequence[Entry]) -> list[Entry]:
    """Return the files of a split.

    The card names them by folders, files, globs or prefixes of file names. With a split column,
    every split can use rows of all files.
    """
    if card.source.split is not None:
        return visible(entries) if split in card.source.named_splits() else []
    patterns = card.source.list_parts(split)
    if not "".join(patterns):
        return []
    if is_single_file(card, entries):  # the whole file is train
        return [*entries] if split == "train" else []
    globs = _globs(patterns)
    ignored = _globs(card.source.list_parts(IGNORE))
    return [
        entry
        for entry in visible(entries)
        if _matches(entry.name, globs) and not _matches(entry.name, ignored)
    ]


def visible(entries: Iterable[Entry]) -> list[Entry]:
    """Return the entries without hidden files."""
    return [entry for entry in entries if entry.problem != HIDDEN]


def _globs(patterns: Sequence[str]) -> list[str]:
    """Return the globs of a split's files.

    For example, the pattern `train` stands for the file or folder `train`, and for files such as
    `train-0.tar`, `train_0.tar` and `train.tar`.
    """
    globs: list[str] = []
    for text in filter(None, patterns):
        globs += [text, f"{text}/*", f"{text}-*", f"{text}_*", f"{text}.*"]
    return globs


def _matches(name: str, globs: Sequence[str]) -> bool:
    return any(fnmatch(name, glob) for glob in globs)


def find_archives(
    card: Card, split: Split, entries: Sequence[Entry], suffixes: frozenset[str]
) -> tuple[list[str], list[Item]]:
    """Return the URIs of a split's files that contain many images, and items for its other files.

    Each of these items has a problem, so that the file is listed as unused.

    Raises:
        UserError: If a file has a problem, because it may contain many images.
    """
    uris: list[str] = []
    other_items: list[Item] = []
    base = base_uri(card)
    is_single = is_single_file(card, entries)
    for entry in find_matching_entries(card, split, entries):
        if entry.problem and not entry.problem.startswith("other file"):
            raise UserError(
                f"card {card.name!r}: {printable(entry.name)} in its source {source_uri(card)} is "
                f"left out ({entry.problem}), and it may hold many images; fix or remove it"
            )
        if entry.problem or get_suffix(entry.name) not in suffixes:
            problem = entry.problem or describe_other_file(entry.name)
            other_items.append(Item(split, entry.name, "", None, problem))
        else:
            uris.append(base if is_single else join(base, entry.name))
    return uris, other_items


class SplitValues:
    """Finds the split of a row from the values of the split column or columns.

    Args:
        card: Card with `source.split`.
        where: Name of the source in errors.
    """

    def __init__(self, card: Card, where: str):
        self.columns = card.source.split_columns()
        self.where = where
        self.splits: dict[str, str] = {}
        for split in SPLIT_KEYS:
            for value in card.source.list_parts(split):
                self.splits[value] = split

    def value(self, values: Sequence[str | None]) -> str:
        """Return the value of the split column, or the name of the only flag column that is 1.

        The result is "" if the value is missing, or not exactly one flag column is 1.
        """
        if len(self.columns) == 1:
            return values[0] or ""
        pairs = zip(self.columns, values, strict=True)
        names = [name for name, text in pairs if is_yes(text)]
        return names[0] if len(names) == 1 else ""

    def find(self, value: str, row: int) -> str:
        """Return the split that a value names, or IGNORE.

        Args:
            value: Result of the method `value`.
            row: Number of the row, for errors.

        Raises:
            SplitUnclear: If the card does not name the value.
        """
        split = self.splits.get(value)
        if split is None and len(self.columns) > 1:
            raise SplitUnclear(
                f"{self.where}: of the columns {listed(self.columns)} not exactly one is 1 in row "
                f"{row}; name one column in source.split"
            )
        if split is None:
            column = repr(self.columns[0])
            raise SplitUnclear(
                f"{self.where}: row {row} has {printable(value)!r:.60} in column {column}, which "
                "source.splits of the card does not name; add it there, to train, val, test or "
                "ignore"
            )
        return split

    def find_in_path(self, path: str, row: int) -> str:
        """Return the split named by a folder of the path, or by the beginning of the file name.

        Raises:
            SplitUnclear: If the card names neither a folder nor the beginning.
        """
        *folders, name = path.split("/")
        for folder in folders:
            if folder in self.splits:
                return self.splits[folder]
        for value, split in self.splits.items():
            if value and name.startswith(value) and not name[len(value) :][:1].isalnum():
                return split
        raise SplitUnclear(
            f"{self.where}: row {row} names {printable(path)!r:.120}, but source.splits of the "
            "card has none of its folders, nor its name; add one there, to train, val, test or "
            "ignore"
        )


def class_names(card: Card) -> ClassNames:
    """Return the `ClassNames` of a card. Numbers from a library are positions in `classes`."""
    numbers = card.source.numbers
    if numbers is None and card.source.format in LIBRARIES:
        numbers = "places"
    return ClassNames(card.classes, numbers, f"card {card.name!r}")


# ---- items ---------------------------------------------------------------------------------------
def describe_other_file(name: str) -> str:
    """Return the problem of a file that is not an image of this format."""
    return f"other file: {os.path.splitext(name)[1] or 'no extension'}"


def find_size_problem(size: int) -> str | None:
    """Return the problem of an image with more than MAX_IMAGE_BYTES, or None."""
    if size > MAX_IMAGE_BYTES:
        return f"corrupt: {size} bytes are more than {MAX_IMAGE_BYTES}"
    return None


def unit_slices(sizes: Sequence[int]) -> Iterator[slice]:
    """Divide consecutive parts of a source (files, members or row groups) into units.

    The result depends only on the sizes, so a run resumed on another cluster has the same
    units.

    Args:
        sizes: Bytes of each part.

    Yields:
        A slice of the parts for each unit.
    """
    most = min(max(sum(sizes) // UNITS, MIN_UNIT_BYTES), MAX_UNIT_BYTES)
    start = 0
    num_bytes = 0
    for index, size in enumerate(sizes):
        is_full = num_bytes + size > most or index - start >= UNIT_ITEMS
        if is_full and index > start:
            yield slice(start, index)
            start = index
            num_bytes = 0
        num_bytes += size
    if start < len(sizes):
        yield slice(start, len(sizes))


def build_units(items: list[Item]) -> list[Unit]:
    """Divide items into units that `read_items` reads.

    The bytes of each item must be readable on their own, by its `uri`, `offset` and `size`.
    """
    units: list[Unit] = []
    for part in unit_slices([_bytes_to_read(item) for item in items]):
        unit_items = items[part]
        units.append(Unit(read_items, (unit_items,), len(unit_items)))
    return units


def _bytes_to_read(item: Item) -> int:
    return 0 if item.problem else item.size or 0


class ItemRange(NamedTuple):
    """Items whose bytes are read together: bytes `start` to `stop` of a file.

    If `stop` is None, the whole file is read.
    """

    items: list[Item]
    uri: str
    start: int
    stop: int | None


def read_items(items: list[Item]) -> Iterator[ItemBytes]:
    """Yield items with their bytes, which are read from the `uri` of the items.

    Neighbouring members of an archive are read together. Several reads from a bucket run ahead.
    """
    for run, data in _read_ahead(_group_ranges(items)):
        for item in run.items:
            if item.problem:
                yield item, None
            elif item.size is None:
                yield item, data
            else:
                first = item.offset - run.start
                yield item, data[first : first + item.size]


def _group_ranges(items: list[Item]) -> Iterator[ItemRange]:
    """Group consecutive items into ranges. Items with a problem need no bytes and fit any range."""
    run = ItemRange([], "", 0, 0)
    for item in items:
        if item.problem:
            run.items.append(item)
            continue
        stop = None
        if item.size is not None:
            stop = item.offset + item.size
        if not _continues(run, item, stop):
            if run.items:
                yield run
            run = ItemRange([], item.uri, item.offset, stop)
        run.items.append(item)
        run = run._replace(stop=stop)
    if run.items:
        yield run


def _continues(run: ItemRange, item: Item, stop: int | None) -> bool:
    """Return whether an item is read together with the range before it."""
    if run.uri != item.uri or run.stop is None or stop is None:
        return False
    gap = item.offset - run.stop
    return 0 <= gap <= RUN_GAP and stop - run.start <= RUN_BYTES


def _read_ahead(runs: Iterator[ItemRange]) -> Iterator[tuple[ItemRange, bytes]]:
    """Yield ranges with their bytes, in order.

    Local files are read in this thread. Files in a bucket are read ahead by other threads.
    """
    waiting: deque[tuple[ItemRange, Future[bytes]]] = deque()
    num_bytes = 0
    with ThreadPoolExecutor(READERS, "source") as pool:
        for run in runs:
            if not waiting and is_local(run.uri):
                yield run, _read_run(run)
                continue
            num_bytes += _compute_size(run)
            waiting.append((run, pool.submit(_read_run, run)))
            while len(waiting) > READERS or (len(waiting) > 1 and num_bytes > AHEAD_BYTES):
                first, future = waiting.popleft()
                num_bytes -= _compute_size(first)
                yield first, future.result()
        for run, future in waiting:
            yield run, future.result()


def _compute_size(run: ItemRange) -> int:
    """Return the bytes of a range; a whole file of unknown size counts as AHEAD_BYTES."""
    return AHEAD_BYTES if run.stop is None else run.stop - run.start


def _read_run(run: ItemRange) -> bytes:
    if not run.uri:  # all its items have a problem
        return b""
    size = None
    if run.stop is not None:
        size = run.stop - run.start
    return read_at(run.uri, run.start, size)


def read_at(uri: str, offset: int, size: int | None) -> bytes:
    """Read a part of a file.

    Args:
        uri: Path or URI of the file.
        offset: First byte.
        size: Number of bytes. None: to the end.

    Raises:
        UserError: If the file cannot be read.
    """
    try:
        with open_file(uri) as stream:
            data: bytes = stream.read_at(stream.size() if size is None else size, offset)
            return data
    except OSError as error:
        advice = remedy(uri)
        if is_local(uri):
            advice = "check that it is there and readable for every worker"
        raise UserError(
            f"{printable(uri)} cannot be read ({printable(str(error).splitlines()[0])}); "
            f"{advice}, then run the same command again"
        ) from None


def check_unfolding(source: str, image_bytes: int, file_bytes: int) -> None:
    """Raise UserError if images have far more bytes than the files that contain them."""
    if image_bytes > max(MAX_UNFOLDED_BYTES, MAX_UNFOLDING * file_bytes):
        raise UserError(
            f"{printable(source)} unfolds: its images have {image_bytes} bytes and more, over "
            f"{MAX_UNFOLDING} times its own {file_bytes}, as it repeats some of them without end; "
            "fetch it again, or write it without the repetitions"
        )


def png(image: Image.Image) -> bytes:
    """Encode an image as PNG. Equal images give equal bytes."""
    buffer = io.BytesIO()
    image.save(buffer, "PNG", compress_level=6)
    return buffer.getvalue()
