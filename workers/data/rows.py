"""Rows: which images a feed gives, with what label; validation data is held out of train here and
nowhere else."""

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
    """The images of some tasks in a fixed order: by data set, then as the shards hold them.

    shards: one per data set. table: the index rows with two more columns, `data` (place in
    `shards`) and `position`. labels: (n,) positions in the class list of each row's task. tasks:
    (n,) places in the tasks that were asked for.
    """

    shards: tuple[Shards, ...]
    table: pa.Table
    labels: Tensor
    tasks: Tensor

    def __len__(self) -> int:
        return self.table.num_rows

    def keys(self, rows: np.ndarray) -> list[str]:
        return self.table["key"].take(pa.array(rows)).to_pylist()

    def bytes_of(self, row: int) -> bytes:
        """The bytes of one image by random access, verified."""
        record = {
            name: self.table[name][row].as_py()
            for name in ("data", "shard", "offset", "bytes", "key", "sha256")
        }
        shards = self.shards[record["data"]]
        data = shards.read(record["shard"], record["offset"], record["bytes"])
        return shards.verify(record["key"], data, record["sha256"])

    def digest(self) -> str:
        """Hash of which images these are, in which order."""
        body = hashlib.sha256()
        for name in ("key", "sha256"):
            body.update("\n".join(self.table[name].to_pylist()).encode() + b"\0")
        return body.hexdigest()


def hold_out(table: pa.Table, fraction: float) -> tuple[pa.Table, pa.Table]:
    """(train, val). Of each class, the round(fraction * n) rows whose key has the lowest sha256 are
    val: at least one where there are two or more, and never all. Depends neither on the order of
    rows nor on the other classes."""
    members: dict[str, list[tuple[bytes, int]]] = {}
    for row, (name, key) in enumerate(
        zip(table["class"].to_pylist(), table["key"].to_pylist(), strict=True)
    ):
        members.setdefault(name, []).append((hashlib.sha256(key.encode()).digest(), row))
    held = np.zeros(table.num_rows, bool)
    for ranked in members.values():
        count = min(max(round(fraction * len(ranked)), int(fraction > 0)), len(ranked) - 1)
        held[[row for _, row in sorted(ranked)[:count]]] = True
    return table.filter(pa.array(~held)), table.filter(pa.array(held))


def select(
    root: str,
    tasks: tuple[Task, ...],
    split: str,
    val_fraction: float,
    memory: Mapping[str, Collection[str]] | None = None,
    cache: Cache | None = None,
) -> SampleTable:
    """The rows of `tasks` in `split` (`train`, `val`, `test`); of a task in `memory`, those of the
    named keys alone. cache: see `Shards.open`. Raises UserError where a split is empty, or a class
    in train, or where a remembered key is not in the split."""
    keys = list(dict.fromkeys(task.data for task in tasks))
    shards = tuple(Shards.open(root, key, cache) for key in keys)
    parts = []
    for index, task in enumerate(tasks):
        data = keys.index(task.data)
        part = shards[data].select("test" if split == "test" else "train", task.classes)
        if split != "test":
            part = hold_out(part, val_fraction)[split == "val"]
        _refuse_empty(task, split, part, val_fraction)
        if memory and task.name in memory:
            part = _remembered(task, split, part, memory[task.name])
        label_of = {name: label for label, name in enumerate(task.classes)}
        labels = [label_of[name] for name in part["class"].to_pylist()]
        for name, values in (
            ("label", labels),
            ("task", [index] * len(part)),
            ("data", [data] * len(part)),
        ):
            part = part.append_column(name, pa.array(values, pa.int64()))
        parts.append(part)
    table = pa.concat_tables(parts).sort_by(
        [("data", "ascending"), ("position", "ascending"), ("task", "ascending")]
    )
    labels_of, tasks_of = (
        torch.from_numpy(table[name].to_numpy().copy()) for name in ("label", "task")
    )
    return SampleTable(shards, table.combine_chunks(), labels_of, tasks_of)


def keys_of(root: str, task: Task, val_fraction: float) -> dict[str, list[str]]:
    """Class -> keys of its images in the task's train split, in the order of `select`."""
    table = select(root, (task,), "train", val_fraction).table
    found: dict[str, list[str]] = {name: [] for name in task.classes}
    for name, key in zip(table["class"].to_pylist(), table["key"].to_pylist(), strict=True):
        found[name].append(key)
    return found


def _remembered(task: Task, split: str, part: pa.Table, keys: Collection[str]) -> pa.Table:
    found = part.filter(pc.is_in(part["key"], pa.array(sorted(set(keys)), pa.string())))
    if len(found) < len(set(keys)):
        lost = min(set(keys) - set(found["key"].to_pylist()))
        raise UserError(
            f"task {task.name!r}: sample {lost!r} is in the memory and not in its {split} "
            "split; memory holds keys of the "
            "same card and the same data.val_fraction, so give all stages of the method the same"
        )
    return found


def _refuse_empty(task: Task, split: str, part: pa.Table, val_fraction: float) -> None:
    if split == "val" and not len(part):
        raise UserError(
            f"task {task.name!r} has no validation images with data.val_fraction = "
            f"{val_fraction}, as no class has more than one "
            "train image; set it to 0, or add images to the source"
        )
    missing = sorted(set(task.classes) - set(part["class"].to_pylist())) if split == "train" else []
    if missing or not len(part):
        what = (
            f"class {missing[0]!r} of task {task.name!r} has"
            if missing
            else f"task {task.name!r} has"
        )
        raise UserError(
            f"{what} no {split} images in card {task.card!r}; take it out of the stream or add "
            "images to the source"
        )
