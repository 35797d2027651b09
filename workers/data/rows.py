"""Which images a feed gives, and their labels; the only place where validation data is held out."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor

from workers.data.cache import Cache
from workers.data.shards import Shards
from workers.errors import UserError
from workers.job import Task


@dataclass(frozen=True)
class SampleTable:
    """The n images of some tasks in a fixed order: by data set, then as the shards hold them.

    shards: one per data set.
    table: the index rows with the columns `data` (index into `shards`) and `position` (row of the
        index) added.
    labels: (n,) indices into the class list of each row's task.
    tasks: (n,) indices into the tasks that were asked for.
    """

    shards: tuple[Shards, ...]
    table: pa.Table
    labels: Tensor
    tasks: Tensor

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def keys(self, rows: np.ndarray) -> list[str]:
        """Keys of some rows."""
        keys: list[str] = self.table["key"].take(pa.array(rows)).to_pylist()
        return keys

    def bytes_of(self, row: int) -> bytes:
        """Read the bytes of one image by random access, and verify them."""
        names = ("data", "shard", "offset", "bytes", "key", "sha256")
        record = {name: self.table[name][row].as_py() for name in names}
        shards: Shards = self.shards[record["data"]]
        data = shards.read(record["shard"], record["offset"], record["bytes"])
        return shards.verify(record["key"], data, record["sha256"])

    def digest(self) -> str:
        """Hash of which images these are, and of their order."""
        body = hashlib.sha256()
        for name in ("key", "sha256"):
            body.update("\n".join(self.table[name].to_pylist()).encode() + b"\0")
        return body.hexdigest()


def hold_out(table: pa.Table, fraction: float) -> tuple[pa.Table, pa.Table]:
    """Split a table into (train, val).

    Of the n rows of a class, the round(fraction * n) whose keys have the lowest sha256 are val: at
    least one where n >= 2, and never all. This depends neither on the order of rows nor on other
    classes.
    """
    members: dict[str, list[tuple[bytes, int]]] = {}  # class -> (sha256 of the key, row)
    names = table["class"].to_pylist()
    keys = table["key"].to_pylist()
    for row, (name, key) in enumerate(zip(names, keys, strict=True)):
        digest = hashlib.sha256(key.encode()).digest()
        members.setdefault(name, []).append((digest, row))
    is_val = np.zeros(table.num_rows, bool)
    for ranked in members.values():
        least = 1 if fraction > 0 else 0
        count = min(max(round(fraction * len(ranked)), least), len(ranked) - 1)
        for _, row in sorted(ranked)[:count]:
            is_val[row] = True
    return table.filter(pa.array(~is_val)), table.filter(pa.array(is_val))


def select(
    root: str,
    tasks: tuple[Task, ...],
    split: str,
    val_fraction: float,
    memory: Mapping[str, Collection[str]] | None = None,
    cache: Cache | None = None,
) -> SampleTable:
    """Select the samples of `tasks` in `split` (`train`, `val` or `test`).

    memory: task name -> keys; of these tasks only the samples with these keys. cache: see
    `Shards.open`. Raise `UserError` when a split is empty, a class has no train image, or a
    remembered key is not in the split.
    """
    keys = list(dict.fromkeys(task.data for task in tasks))
    shards = tuple(Shards.open(root, key, cache) for key in keys)
    parts = []
    for index, task in enumerate(tasks):
        data = keys.index(task.data)
        part = shards[data].select("test" if split == "test" else "train", task.classes)
        if split != "test":
            train, val = hold_out(part, val_fraction)
            part = val if split == "val" else train
        _refuse_empty(task, split, part, val_fraction)
        if memory and task.name in memory:
            part = _remembered(task, split, part, memory[task.name])
        label_of = {name: label for label, name in enumerate(task.classes)}
        labels = [label_of[name] for name in part["class"].to_pylist()]
        columns = {"label": labels, "task": [index] * len(part), "data": [data] * len(part)}
        for name, values in columns.items():
            part = part.append_column(name, pa.array(values, pa.int64()))
        parts.append(part)
    table = pa.concat_tables(parts).sort_by(
        [("data", "ascending"), ("position", "ascending"), ("task", "ascending")]
    )
    return SampleTable(
        shards,
        table.combine_chunks(),
        labels=torch.from_numpy(table["label"].to_numpy().copy()),
        tasks=torch.from_numpy(table["task"].to_numpy().copy()),
    )


def keys_of(root: str, task: Task, val_fraction: float) -> dict[str, list[str]]:
    """Class -> keys of its images in the task's train split, in the order of `select`."""
    table = select(root, (task,), "train", val_fraction).table
    keys: dict[str, list[str]] = {name: [] for name in task.classes}
    for name, key in zip(table["class"].to_pylist(), table["key"].to_pylist(), strict=True):
        keys[name].append(key)
    return keys


def _remembered(task: Task, split: str, part: pa.Table, keys: Collection[str]) -> pa.Table:
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
        raise UserError(
            f"task {task.name!r} has no validation images with data.val_fraction = "
            f"{val_fraction}, as no class has more than one "
            "train image; set it to 0, or add images to the source"
        )
    missing: list[str] = []
    if split == "train":
        missing = sorted(set(task.classes) - set(part["class"].to_pylist()))
    if len(part) and not missing:
        return
    owner = f"task {task.name!r}"
    if missing:
        owner = f"class {missing[0]!r} of {owner}"
    raise UserError(
        f"{owner} has no {split} images in card {task.card!r}; take it out of the stream or add "
        "images to the source"
    )
