"""Sample tables: the images of a feed, their labels and their locations.

The sample table of a large data set is a file in the cache of the node. Its ranks map this file
into memory, so that the table needs no memory of their own.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from workers.data.cache import CHECKSUM, Cache, CacheUnavailable, SummedFile
from workers.data.decoding import ImageLimits, is_intact
from workers.data.held_out import hold_out
from workers.data.shards import INDEX, Shards
from workers.errors import UserError
from workers.job import Task
from workers.storage import filesystem
from workers.storage.artifact import FileInfo

HEX_DIGITS = 64  # number of hexadecimal digits of a sha256
# Indexes with at least this many bytes (about 90,000 images) have a table in the cache. Reading a
# smaller index costs a rank at most about half a second and 100 MB.
LARGE_INDEX_BYTES = 4 << 20
# A table has about 3 times the bytes of its index. It is written to the cache if the cache has at
# least this many times the bytes of the index, so that there is room for shards, too.
CACHE_SHARE = 12
# Part of the name of a table in the cache. Increase it if the result of `_make_table` changes.
TABLE_REVISION = 1


class Locations(NamedTuple):
    """Locations of the bytes of n rows.

    Attributes:
        files: Shards, as pairs of a data set and the name of a shard.
        shards: Indices into `files`, (n,).
        offsets: Byte offsets, (n,).
        sizes: Sizes in bytes, (n,).
    """

    files: list[tuple[Shards, str]]
    shards: NDArray[np.int32]
    offsets: NDArray[np.int64]
    sizes: NDArray[np.int64]


@dataclass(frozen=True)
class SampleTable:
    """The n images of some tasks in a fixed order: by task, class and sha256 of the image.

    Images of shards that are used in place are ordered by task, and then as in the shards.

    Attributes:
        shards: One object per data set.
        table: Columns `key`, `class`, `sha256`, `offset` and `bytes` of the shards' indexes, and
            `task`, `label` and `file`, see `tasks`, `labels` and `Locations.shards`.
        files: Shards with rows of the table, see `Locations.files`.
        num_bytes: Bytes of all image files.
        cached_bytes: Bytes of the file in the cache from which the table is mapped. 0: the table is
            in memory.
    """

    shards: tuple[Shards, ...]
    table: pa.Table
    files: list[tuple[Shards, str]]
    num_bytes: int
    cached_bytes: int = 0

    def __len__(self) -> int:
        return int(self.table.num_rows)

    @cached_property
    def labels(self) -> NDArray[np.int32]:
        """Indices into the class list of each row's task, (n,)."""
        return _numbers(self.table, "label")

    @cached_property
    def tasks(self) -> NDArray[np.int32]:
        """Indices into the argument `tasks` of `select`, (n,)."""
        return _numbers(self.table, "task")

    def keys(self, rows: np.ndarray) -> list[str]:
        """Return the keys of some rows."""
        keys: list[str] = self.table["key"].take(pa.array(rows)).to_pylist()
        return keys

    @cached_property
    def locations(self) -> Locations:
        """Locations of the bytes of all rows."""
        columns = (_numbers(self.table, name) for name in ("file", "offset", "bytes"))
        return Locations(self.files, *columns)

    def read_bytes(self, row: int) -> bytes:
        """Read the bytes of one image from storage, and verify them. Thread-safe."""
        locations = self.locations
        shards, shard = locations.files[locations.shards[row]]
        data: bytes = shards.read(shard, int(locations.offsets[row]), int(locations.sizes[row]))
        if not self.is_intact(row, data):
            raise shards.make_damaged_error(self.table["key"][row].as_py(), shard)
        return data

    def is_intact(self, row: int, data: bytes) -> bool:
        """Return whether `data` are the bytes of a row that ingest wrote."""
        starts, text = self._digest_text
        return is_intact(data, text[starts[row] : starts[row + 1]].tobytes())

    def limits(self, row: int) -> ImageLimits:
        """Return the limits for the images of a row's data set."""
        shards: Shards = self.locations.files[self.locations.shards[row]][0]
        return shards.limits

    def digests(self, rows: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Return the hexadecimal digits of the sha256 of some rows, (k, HEX_DIGITS)."""
        starts, text = self._digest_text
        # a damaged digest becomes zeros, which match no image
        digits = np.zeros((len(rows), HEX_DIGITS), np.uint8)
        firsts = starts[rows]
        has_digits = starts[rows + 1] - firsts == HEX_DIGITS
        digits[has_digits] = text[firsts[has_digits][:, None] + np.arange(HEX_DIGITS)]
        return digits

    @cached_property
    def _digest_text(self) -> tuple[NDArray[np.int32], NDArray[np.uint8]]:
        """Start of each row's sha256, (n + 1,), in the text of all rows. Not copies."""
        column = _column(self.table, "sha256")
        _, starts_buffer, text = column.buffers()
        if not len(column):
            return np.zeros(1, np.int32), np.zeros(0, np.uint8)
        starts = np.frombuffer(starts_buffer, np.int32)[column.offset :][: len(column) + 1]
        return starts, np.frombuffer(text or b"", np.uint8)

    def digest(self) -> str:
        """Return a digest of the images and their order."""
        body = hashlib.sha256()
        for name in ("key", "sha256"):
            body.update("\n".join(self.table[name].to_pylist()).encode() + b"\0")
        ranges = [shards.limits.value_range for shards in self.shards]
        if any(ranges):  # a value range changes the pixels of the same bytes
            body.update(repr(ranges).encode())
        return body.hexdigest()


def _column(table: pa.Table, name: str) -> pa.Array:
    """Return a column as one array. It is copied only if it has several chunks."""
    column = table[name]
    if column.num_chunks == 1:
        return column.chunk(0)
    return pa.concat_arrays([pa.array([], column.type), *column.chunks])


def _numbers(table: pa.Table, name: str) -> NDArray[Any]:
    """Return a column of numbers as one array, which is not a copy if it has one chunk."""
    column: NDArray[Any] = _column(table, name).to_numpy()
    return column


def select(
    root: str,
    tasks: tuple[Task, ...],
    split: str,
    val_fraction: float,
    memory: Mapping[str, Collection[str]] | None = None,
    cache: Cache | None = None,
) -> SampleTable:
    """Select the samples of tasks in a split.

    With a cache, the first rank of a node selects the samples of a large data set and writes the
    table to the cache, and all ranks of the node map this file into memory. With keys in `memory`,
    or if the cache cannot be used, each rank selects the samples and keeps the table in its memory.

    Args:
        root: Folder or URI of the stages.
        tasks: The tasks.
        split: `train`, `val` or `test`.
        val_fraction: Share of the train images that is held out for validation, for tasks without
            validation images of their own.
        memory: Keys of samples by task name. For these tasks, only the samples with these keys are
            selected; an empty collection selects none.
        cache: Cache of the node, if any.

    Raises:
        UserError: If a split is empty, a class has no train image, or a remembered key is missing.
    """
    memory = memory or {}
    keys = list(dict.fromkeys(task.data for task in tasks))
    urls = {task.data: task.shard_urls for task in tasks}
    shards = tuple(Shards.open(root, key, urls[key]) for key in keys)
    selected = {index: task for index, task in enumerate(tasks) if memory.get(task.name, True)}
    make = partial(_make_table, shards, selected, split, val_fraction, memory)
    # without an index, `make` raises the error
    no_index: FileInfo = {"bytes": 0, "sha256": ""}
    indexes = [opened.artifact.manifest["files"].get(INDEX, no_index) for opened in shards]
    index_bytes = sum(info["bytes"] for info in indexes)
    limit = cache.limit // CACHE_SHARE if cache else 0
    if cache is None or any(memory.values()) or not LARGE_INDEX_BYTES <= index_bytes <= limit:
        table, cached_bytes = make(), 0
    else:
        contents = {
            "revision": TABLE_REVISION,
            "data": [
                (opened.key, info["sha256"], opened.hold_out, opened.is_in_place)
                for opened, info in zip(shards, indexes, strict=True)
            ],
            "tasks": [
                (index, task.data, task.classes, task.parts, task.has_val)
                for index, task in selected.items()
            ],
            "split": split,
            "val_fraction": val_fraction,
        }
        digest = hashlib.sha256(json.dumps(contents).encode()).hexdigest()
        table, cached_bytes = _open_mapped(cache, f"tables/{digest[:32]}.arrow", make)
    notes = json.loads(table.schema.metadata[b"accrete"])
    files = [(shards[data], shard) for data, shard in notes["files"]]
    return SampleTable(shards, table, files, notes["num_bytes"], cached_bytes)


def _make_table(
    shards: tuple[Shards, ...],
    tasks: Mapping[int, Task],
    split: str,
    val_fraction: float,
    memory: Mapping[str, Collection[str]],
) -> pa.Table:
    """Read the indexes, and return `SampleTable.table` with its other attributes as metadata.

    Args:
        shards: The data sets.
        tasks: Tasks by their value in the column `task`.
        split: See `select`.
        val_fraction: See `select`.
        memory: See `select`.
    """
    keys = [opened.key for opened in shards]
    parts: list[pa.Table] = []
    for index, task in tasks.items():
        data = keys.index(task.data)
        part = _find_rows(shards[data], task, split, val_fraction)
        _refuse_empty(task, split, part, val_fraction)
        if task.name in memory:
            part = _select_remembered(task, split, part, memory[task.name])
        labels = pc.index_in(part["class"], pa.array(task.classes, pa.string()))
        part = _sort_rows(part.append_column("label", labels), shards[data].is_in_place)
        parts.append(_choose_columns(part, data, index))
        del part, labels
    for opened in shards:
        opened.release_index()
    table = pa.concat_tables(parts).unify_dictionaries().combine_chunks()
    return _number_files(table, len(shards))


def _choose_columns(part: pa.Table, data: int, task: int) -> pa.Table:
    """Return the columns that the table needs, with few bytes per row."""
    columns = {name: part[name] for name in ("key", "offset", "bytes", "sha256", "label")}
    for name in ("class", "shard"):
        columns[name] = part[name].dictionary_encode()
    for name, number in (("data", data), ("task", task)):
        columns[name] = pa.array(np.full(len(part), number, np.int32))
    return pa.table(columns)


def _number_files(table: pa.Table, num_data: int) -> pa.Table:
    """Replace the columns `data` and `shard` by `file`, and add the metadata of `_make_table`."""
    shard_names = _column(table, "shard")
    names = shard_names.dictionary.to_pylist()
    # each pair (data set, shard name) as one number
    pairs = _numbers(table, "data").astype(np.int64) * len(names) + shard_names.indices.to_numpy()
    occurs = np.zeros(num_data * len(names), bool)
    occurs[pairs] = True
    codes = np.cumsum(occurs, dtype=np.int32) - 1
    used = np.flatnonzero(occurs).tolist()
    files = [(pair // len(names), names[pair % len(names)]) for pair in used]
    notes = {"files": files, "num_bytes": int(_numbers(table, "bytes").sum())}
    table = table.drop_columns(["data", "shard"]).append_column("file", pa.array(codes[pairs]))
    return table.replace_schema_metadata({"accrete": json.dumps(notes)})


def _open_mapped(cache: Cache, name: str, make: Callable[[], pa.Table]) -> tuple[pa.Table, int]:
    """Map a table in the cache into memory; write it if it is missing or damaged.

    Args:
        cache: The cache.
        name: Name of the file: the table in Arrow's file format, and its checksum.
        make: Function that makes the table.

    Returns:
        The table, and the bytes of its file. If the cache cannot be used, the table is in memory,
        and the second value is 0.
    """

    def write(stream: BinaryIO) -> None:
        summed = SummedFile(stream)
        table = make()
        with pa.ipc.new_file(pa.PythonFile(summed, "w"), table.schema) as writer:
            writer.write_table(table)
        summed.write_checksum()
        stream.flush()
        os.fsync(stream.fileno())
        del table
        pa.default_memory_pool().release_unused()

    try:
        file = cache.open_checked_file(name, write)
    except CacheUnavailable as error:
        filesystem.notify(f"cache: each rank keeps its table of images in memory, because {error}")
        return make(), 0
    # The mapping has a duplicate of the file descriptor. So the file stays locked as long as the
    # table exists, and the cache does not evict it.
    mapped = np.memmap(file, np.uint8, "r")
    table = pa.ipc.open_file(pa.py_buffer(mapped[: -CHECKSUM.itemsize])).read_all()
    return table, len(mapped)


def _sort_rows(part: pa.Table, is_in_place: bool) -> pa.Table:
    """Sort the rows of a task as described in `SampleTable`. Usually ingest wrote them sorted."""
    if is_in_place or _is_sorted(part):
        return part
    return part.sort_by([(name, "ascending") for name in ("label", "sha256", "key")])


def _is_sorted(part: pa.Table) -> bool:
    """Return whether rows are sorted by label and sha256, and no image is twice in a class."""
    before, after = part.slice(0, len(part) - 1), part.slice(1)
    is_next_label = pc.less(before["label"], after["label"])
    is_next_image = pc.and_(
        pc.equal(before["label"], after["label"]), pc.less(before["sha256"], after["sha256"])
    )
    is_ascending: bool = pc.all(pc.or_(is_next_label, is_next_image)).as_py()
    return is_ascending


def _find_rows(shards: Shards, task: Task, split: str, val_fraction: float) -> pa.Table:
    """Return the rows of a task in a split.

    Validation images are those in the data set's own validation split that have a class of the
    task. If there are none, they are held out of the training images.
    """
    if split == "test":
        return _select_own(shards, task, split)
    if task.has_val:
        own_val = _select_own(shards, task, "val")
        if len(own_val):
            return own_val if split == "val" else _select_own(shards, task, split)
    train, val = hold_out(shards.select("train", task.classes), val_fraction, shards.hold_out)
    if task.parts is not None:
        # held out of complete classes, because a part of a class can have as few as two images
        own = _select_own(shards, task, "train")["key"]
        train, val = (rows.filter(pc.is_in(rows["key"], own)) for rows in (train, val))
    return val if split == "val" else train


def _select_own(shards: Shards, task: Task, split: str) -> pa.Table:
    """Return the rows of a data set's split that belong to a task.

    If the task is a slice of a stream, these are parts of the task's classes (`Task.parts`). Copies
    of an image stay together.

    Raises:
        UserError: If a class of a slice has no train image in the data.
    """
    rows = shards.select(split, task.classes)
    if task.parts is None:
        return rows
    if split == "train":
        _refuse_missing(task, rows, task.shares)
    columns = ["class", "sha256"]
    images = rows.select(columns).group_by(columns).aggregate([])
    images = images.sort_by([(name, "ascending") for name in columns])
    names = images["class"].to_numpy()
    parts = [images.slice(0, 0)]
    for name, start, stop in task.parts:
        # No string is between `name` and name + "\0" in sorted order.
        first, last = np.searchsorted(names, [name, name + "\0"])
        begin, end = (first + round(share * (last - first)) for share in (start, stop))
        parts.append(images.slice(begin, end - begin))
    own = pa.concat_tables(parts)
    return rows.filter(pc.is_in(_join_class_and_digest(rows), _join_class_and_digest(own)))


def _join_class_and_digest(rows: pa.Table) -> Any:
    """Return the class and the sha256 of each row, joined to one string."""
    return pc.binary_join_element_wise(rows["class"], rows["sha256"], "/")


def has_validation(root: str, task: Task, val_fraction: float) -> bool:
    """Return whether a task has validation images, from its data set or held out of train."""
    if val_fraction:
        return True
    urls = task.shard_urls
    return task.has_val and len(_select_own(Shards.open(root, task.data, urls), task, "val")) > 0


def list_keys(root: str, task: Task, val_fraction: float) -> dict[str, list[str]]:
    """Return the keys of each class in the task's train split, in the order of `select`."""
    table = select(root, (task,), "train", val_fraction).table
    keys: dict[str, list[str]] = {name: [] for name in task.classes}
    for name, key in zip(table["class"].to_pylist(), table["key"].to_pylist(), strict=True):
        keys[name].append(key)
    return keys


def _select_remembered(task: Task, split: str, part: pa.Table, keys: Collection[str]) -> pa.Table:
    expected = set(keys)
    remembered = part.filter(pc.is_in(part["key"], pa.array(sorted(expected), pa.string())))
    if len(remembered) < len(expected):
        lost = min(expected - set(remembered["key"].to_pylist()))
        raise UserError(
            f"task {task.name!r}: sample {lost!r} is in the memory and not in its {split} "
            "split; memory holds keys of the "
            "same card and the same data.val_fraction, so give all stages of the method the same"
        )
    return remembered


def _refuse_empty(task: Task, split: str, part: pa.Table, val_fraction: float) -> None:
    if split == "val" and not len(part):
        reason = "no class has more than one train image to spare"
        if task.parts is not None:
            reason = "its slice is too small; make fewer slices"
        raise UserError(
            f"task {task.name!r} has no validation images with data.val_fraction = "
            f"{val_fraction}, as the data have none and {reason}; set it to 0 (with keep: last), "
            "or add images to the source"
        )
    if split == "train" and task.parts is None:
        _refuse_missing(task, part, task.classes)
    if len(part):
        return
    remedy = "take it out of the stream" if task.parts is None else "make fewer slices"
    raise UserError(
        f"task {task.name!r} has no {split} images in card {task.card!r}; {remedy} or add images "
        "to the source"
    )


def _refuse_missing(task: Task, rows: pa.Table, classes: Iterable[str]) -> None:
    missing = sorted({*classes} - {*rows["class"].to_pylist()})
    if missing:
        raise UserError(
            f"class {missing[0]!r} of task {task.name!r} has no train images in card "
            f"{task.card!r}; take it out of the stream or add images to the source"
        )
