"""Statistics of the masks of finished tasks: density per layer, overlap of tasks, used capacity.

Masks are compared as packed bits, byte by byte. A mask grows if layers become wider in later tasks.
Its old entries then stay in front of the new entries.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pipeline.results.tables import RunTables
from workers.methods import METHODS
from workers.methods.base import Method
from workers.storage.taskstate import TaskState

BINS = 192  # maximum number of bins in the profile of a mask

Bits = NDArray[np.uint8]


@dataclass
class MaskView:
    """The masks and learned tokens of one task.

    Masks are packed bits, so that the views of a whole stream fit into memory. The kind of a mask
    is its name without the block (see `mask_kind`).

    Attributes:
        label: Label of the method.
        task: Name of the task.
        tokens: Token masks, boolean (blocks, patches); None without token masks.
        bits: Name of a mask -> packed bits.
        num_kept: Name of a mask -> number of True entries.
        sizes: Name of a mask -> number of entries.
        profile: Name of a mask -> kept share of the output units, averaged into at most BINS bins.
        prompts: Name -> learned tokens, (tokens, width).
    """

    label: str
    task: str
    tokens: NDArray[np.bool_] | None = None
    bits: dict[str, Bits] = field(default_factory=dict)
    num_kept: dict[str, int] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    profile: dict[str, NDArray[np.float32]] = field(default_factory=dict)
    prompts: dict[str, NDArray[np.float32]] = field(default_factory=dict)

    @classmethod
    def of(
        cls, label: str, state: TaskState, masks: Mapping[str, Tensor] | None = None
    ) -> MaskView:
        """Create the view of a task state.

        Args:
            label: Label of the method.
            state: State of the task.
            masks: Name -> boolean mask, in place of the masks of the state. None: the masks of the
                state.
        """
        view = cls(label, state.task)
        if masks is None:
            masks = state.masks
        for name in sorted(masks, key=_sort_key):
            view._add_mask(name, masks[name].numpy())
        for name, tokens in state.tokens.items():
            if tokens.ndim and tokens.numel():
                rows = tokens.to(torch.float32).reshape(-1, tokens.shape[-1])
                view.prompts[name] = rows.numpy()
        return view

    def _add_mask(self, name: str, mask: NDArray[np.bool_]) -> None:
        if name == "tokens":
            self.tokens = mask
        else:
            self.profile[name] = _profile(mask)
        self.bits[name] = np.packbits(mask.reshape(-1))
        self.num_kept[name] = int(mask.sum())
        self.sizes[name] = mask.size

    def rows(self) -> list[dict[str, Any]]:
        """Return one row per mask, and one per block of token masks, with its kept entries."""
        rows = []
        if self.tokens is not None:
            for block, mask in enumerate(self.tokens):
                rows.append(self._row("tokens", block, int(mask.sum()), mask.size))
        for name in self.bits:
            if name != "tokens":
                kind = mask_kind(name)
                rows.append(
                    self._row(kind, mask_block(name), self.num_kept[name], self.sizes[name])
                )
        return rows

    def _row(self, kind: str, block: int | None, kept_entries: int, size: int) -> dict[str, Any]:
        return {
            "label": self.label,
            "task": self.task,
            "kind": kind,
            "block": block,
            "kept": kept_entries,
            "size": size,
            "share": kept_entries / size if size else 1.0,
        }


def load_mask_view(tables: RunTables, label: str, task: str) -> MaskView | None:
    """Load the masks (see `Method.display_masks`) and learned tokens of a task.

    The result is None if the task is not finished, or has neither masks nor learned tokens.
    """
    state = tables.state(label, task)
    if state is None:
        return None
    view = MaskView.of(label, state, _display_masks(tables, label, state))
    return view if view.bits or view.prompts else None


def load_masks(tables: RunTables, label: str, task: str) -> dict[str, NDArray[np.bool_]]:
    """Load name -> mask of a task (see `Method.display_masks`), in the original shapes.

    The result is empty if the task is not finished, or has no masks.
    """
    state = tables.state(label, task)
    if state is None:
        return {}
    masks = _display_masks(tables, label, state)
    return {name: masks[name].numpy() for name in sorted(masks, key=_sort_key)}


def _display_masks(tables: RunTables, label: str, state: TaskState) -> dict[str, Tensor]:
    # For a method that is not installed, the base class returns the boolean masks of the state.
    method = METHODS.get(state.method, Method)
    return method.display_masks(state, tables.carried(label, state.task))


def _profile(mask: NDArray[np.bool_]) -> NDArray[np.float32]:
    """Return the kept share of each output unit (first axis), averaged into at most BINS bins."""
    units = mask.reshape(len(mask), -1).mean(1, dtype=np.float32)
    bins = np.array_split(units, min(BINS, len(units)))
    return np.array([values.mean() for values in bins], np.float32)


def mask_kind(name: str) -> str:
    """Return the kind of a mask: `fc1` for `blocks.3.fc1`. Without a block it is the whole name."""
    return re.sub(r"^blocks\.\d+\.", "", name)


def mask_block(name: str) -> int | None:
    """Return the block of a mask: 3 for `blocks.3.fc1`; None for a name without a block."""
    match = re.match(r"blocks\.(\d+)\.", name)
    return int(match.group(1)) if match else None


def _sort_key(name: str) -> tuple[bool, str, int, str]:
    """Return a key that sorts token masks first, then by kind, then by block."""
    block = mask_block(name)
    return name != "tokens", mask_kind(name), -1 if block is None else block, name


def kinds(views: list[MaskView]) -> list[str]:
    """Return the kinds of all masks, in order of first appearance."""
    distinct: dict[str, None] = {}
    for view in views:
        distinct |= dict.fromkeys(map(mask_kind, view.bits))
    return list(distinct)


def overlap(views: list[MaskView], kind: str) -> NDArray[np.float64]:
    """Compute the Jaccard index |A and B| / |A or B| of each pair of tasks over all blocks.

    Returns:
        Array (tasks, tasks). An entry is NaN if the two tasks have no mask of this kind with equal
        name and size, and 1 if both tasks keep nothing.
    """
    result = np.full((len(views), len(views)), np.nan)
    for i, first in enumerate(views):
        for j in range(i, len(views)):
            jaccard = _jaccard(first, views[j], kind)
            result[i, j] = jaccard
            result[j, i] = jaccard
    return result


def _jaccard(first: MaskView, second: MaskView, kind: str) -> float:
    """Return the Jaccard index of two tasks; NaN if they have no mask with equal name and size."""
    has_common_mask = False
    intersection = 0
    union = 0
    for name, bits in first.bits.items():
        if mask_kind(name) == kind and first.sizes[name] == second.sizes.get(name):
            has_common_mask = True
            intersection += _count_set(bits & second.bits[name])
            union += _count_set(bits | second.bits[name])
    if not has_common_mask:
        return np.nan
    return intersection / union if union else 1.0


def overlap_rows(views: list[MaskView]) -> list[dict[str, Any]]:
    """Return one row per kind of mask and pair of tasks, with the Jaccard index if it exists."""
    rows = []
    for kind in kinds(views):
        values = overlap(views, kind)
        for i, j in zip(*np.triu_indices(len(views), 1), strict=True):
            if not np.isnan(values[i, j]):
                rows.append(
                    {
                        "label": views[i].label,
                        "kind": kind,
                        "task": views[i].task,
                        "other": views[j].task,
                        "jaccard": float(values[i, j]),
                    }
                )
    return rows


def capacity(views: list[MaskView], kind: str) -> list[dict[str, Any]]:
    """Return one row per task with the numbers of used entries in masks of a kind.

    The columns are `fresh` (entries that no earlier task uses), `again` (entries that an earlier
    task also uses), `used` (entries that any task uses so far) and `size` (all entries).
    """
    rows = []
    used_bits: dict[str, Bits] = {}
    for view in views:
        fresh = 0
        again = 0
        size = 0
        for name, bits in view.bits.items():
            if mask_kind(name) != kind:
                continue
            before = used_bits.get(name, bits[:0])
            length = max(len(bits), len(before))
            bits = np.pad(bits, (0, length - len(bits)))
            before = np.pad(before, (0, length - len(before)))
            fresh += _count_set(bits & ~before)
            again += _count_set(bits & before)
            used_bits[name] = bits | before
            size += view.sizes[name]
        if size:
            rows.append(
                {
                    "label": view.label,
                    "task": view.task,
                    "kind": kind,
                    "fresh": fresh,
                    "again": again,
                    "used": sum(map(_count_set, used_bits.values())),
                    "size": size,
                }
            )
    return rows


def _count_set(bits: Bits) -> int:
    """Return the number of set bits."""
    return int(np.bitwise_count(bits).sum())


def similarity(views: list[MaskView], name: str) -> tuple[NDArray[np.float64], list[str]]:
    """Compute cosine similarities between the learned tokens `name` of all tasks.

    Tasks are omitted if the width of their tokens differs from that of the last task with such
    tokens. At least one task must have them.

    Returns:
        Similarities (tokens, tokens), over the tokens of all tasks, and the task of each row.
    """
    stacks = [(view.task, view.prompts[name]) for view in views if name in view.prompts]
    width = stacks[-1][1].shape[1]
    arrays = []
    row_tasks: list[str] = []
    for task, tokens in stacks:
        if tokens.shape[1] == width:
            arrays.append(tokens)
            row_tasks += [task] * len(tokens)
    rows = np.concatenate(arrays).astype(np.float64)
    rows /= np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)
    return rows @ rows.T, row_tasks
