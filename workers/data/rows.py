"""Sample tables: the images of a feed, their labels and their locations."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from numpy.typing import NDArray
from torch import Tensor

from workers.data.decoding import ImageLimits, is_intact
from workers.data.held_out import hold_out
from workers.data.shards import Shards
from workers.errors import UserError
from workers.job import Task

HEX_DIGITS = 64  # number of hexadecimal digits of a sha256


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
        table: Columns of the shards' indexes, and `data` (index into `shards`).
        labels: Indices into the class list of each row's task, (n,).
        tasks: Indices into the argument `tasks` of `select`, (n,).
    """

    shards: tuple[Shards, ...]
    table: pa.Table
    labels: Tensor
    tasks: Tensor

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def keys(self, rows: np.ndarray) -> list[str]:
        """Return the keys of some rows."""
        keys: list[str] = self.table["key"].take(pa.array(rows)).to_pylist()
        return keys

    @cached_property
    def locations(self) -> Locations:
        """Locations of the bytes of all rows."""
        shard_names = _column(self.table, "shard").dictionary_encode()
        names = shard_names.dictionary.to_pylist()
        data = _column(self.table, "data").to_numpy().astype(np.int64)
        # each pair (data set, shard name) as one number
        pairs = data * len(names) + shard_names.indices.to_numpy()
        occurs = np.zeros(len(self.shards) * len(names), bool)
        occurs[pairs] = True
        codes = np.cumsum(occurs, dtype=np.int32) - 1
        files = [
            (self.shards[pair // len(names)], names[pair % len(names)])
            for pair in np.flatnonzero(occurs).tolist()
        ]
        return Locations(
            files,
            codes[pairs],
            _column(self.table, "offset").to_numpy(),
            _column(self.table, "bytes").to_numpy(),
        )

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
        return is_intact(data, self.digests[row].tobytes())

    def limits(self, row: int) -> ImageLimits:
        """Return the limits for the images of a row's data set."""
        shards: Shards = self.locations.files[self.locations.shards[row]][0]
        return shards.limits

    @cached_property
    def digests(self) -> NDArray[np.uint8]:
        """Hexadecimal digits of the sha256 of all rows, (n, HEX_DIGITS). Usually not a copy."""
        column = _column(self.table, "sha256")
        _, starts_buffer, text = column.buffers()
        starts = np.frombuffer(starts_buffer, np.int32)[column.offset :][: len(column) + 1]
        if (np.diff(starts) == HEX_DIGITS).all() and len(column):
            digits = np.frombuffer(text, np.uint8)[starts[0] : starts[-1]]
            return digits.reshape(len(column), HEX_DIGITS)
        # a damaged digest becomes zeros, which match no image
        digits = np.zeros((len(column), HEX_DIGITS), np.uint8)
        for row, digest in enumerate(column.to_pylist()):
            if len(digest.encode()) == HEX_DIGITS:
                digits[row] = np.frombuffer(digest.encode(), np.uint8)
        return digits

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


def select(
    root: str,
    tasks: tuple[Task, ...],
    split: str,
    val_fraction: float,
    memory: Mapping[str, Collection[str]] | None = None,
) -> SampleTable:
    """Select the samples of tasks in a split.

    Args:
        root: Folder or URI of the stages.
        tasks: The tasks.
        split: `train`, `val` or `test`.
        val_fraction: Share of the train images that is held out for validation, for tasks without
            validation images of their own.
        memory: Keys of samples by task name. For these tasks, only the samples with these keys are
            selected; an empty collection selects none.

    Raises:
        UserError: If a split is empty, a class has no train image, or a remembered key is missing.
    """
    keys = list(dict.fromkeys(task.data for task in tasks))
    urls = {task.data: task.shard_urls for task in tasks}
    shards = tuple(Shards.open(root, key, urls[key]) for key in keys)
    in_order: list[pa.Table] = []
    labels: list[NDArray[np.int64]] = []
    tasks_of_rows: list[NDArray[np.int64]] = []
    for index, task in enumerate(tasks):
        if memory and not memory.get(task.name, True):
            continue
        data = keys.index(task.data)
        part = _find_rows(shards[data], task, split, val_fraction)
        _refuse_empty(task, split, part, val_fraction)
        if memory and task.name in memory:
            part = _select_remembered(task, split, part, memory[task.name])
        names = pc.index_in(part["class"], pa.array(task.classes, pa.string()))
        part = _sort_rows(part.append_column("label", names), shards[data].is_in_place)
        labels.append(part["label"].to_numpy().astype(np.int64))
        tasks_of_rows.append(np.full(len(part), index))
        in_order.append(_drop_columns(part, data))
        del part, names
    for opened in shards:
        opened.release_index()
    table = pa.concat_tables(in_order).unify_dictionaries().combine_chunks()
    return SampleTable(
        shards,
        table,
        labels=torch.from_numpy(np.concatenate(labels)),
        tasks=torch.from_numpy(np.concatenate(tasks_of_rows)),
    )


def _drop_columns(part: pa.Table, data: int) -> pa.Table:
    """Return the columns of `SampleTable.table`, with few bytes per row."""
    columns = {name: part[name] for name in ("key", "offset", "bytes", "sha256")}
    for name in ("class", "shard"):
        columns[name] = part[name].dictionary_encode()
    columns["data"] = pa.array(np.full(len(part), data, np.int32))
    return pa.table(columns)


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
