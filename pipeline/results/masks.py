"""What the masks of finished tasks look like: kept shares per layer, overlap between tasks,
capacity used so far."""

# Packed bits are compared byte by byte; a mask that grew (wider layers for later tasks) keeps its
# old entries in front.

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workers.storage.taskstate import TaskState

BINS = 192


@dataclass
class MaskView:
    """The masks of one task, small enough to hold those of a whole stream.

    tokens: (blocks, patches) boolean, or None. bits: every mask as packed bits by name. kept,
    sizes: set and all entries. profile: kept share of each output unit of a mask, by name, in at
    most BINS bins. prompts: learned tokens, (tokens, width) each, by name.
    """

    label: str
    task: str
    tokens: NDArray[np.bool_] | None = None
    bits: dict[str, NDArray[np.uint8]] = field(default_factory=dict)
    kept: dict[str, int] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    profile: dict[str, NDArray[np.float32]] = field(default_factory=dict)
    prompts: dict[str, NDArray[np.float32]] = field(default_factory=dict)

    @classmethod
    def of(
        cls, label: str, state: TaskState, masks: Mapping[str, Tensor] | None = None
    ) -> MaskView:
        """masks: those to show, where they are not simply the state's."""
        view = cls(label, state.task)
        for name, mask in sorted(
            (state.masks if masks is None else masks).items(), key=lambda item: _place(item[0])
        ):
            values = mask.numpy()
            if name == "tokens":
                view.tokens = values
            else:
                units = values.reshape(len(values), -1).mean(1, dtype=np.float32)
                view.profile[name] = np.array(
                    [part.mean() for part in np.array_split(units, min(BINS, len(units)))],
                    np.float32,
                )
            view.bits[name], view.kept[name], view.sizes[name] = (
                np.packbits(values.reshape(-1)),
                int(values.sum()),
                values.size,
            )
        for name, tokens in state.tokens.items():
            if tokens.ndim and tokens.numel():
                view.prompts[name] = tokens.to(torch.float32).reshape(-1, tokens.shape[-1]).numpy()
        return view

    def rows(self) -> list[dict[str, Any]]:
        """Per mask (token masks: per block) how many entries it keeps."""
        found = []
        if self.tokens is not None:
            found = [
                self._row("tokens", block, int(row.sum()), row.size)
                for block, row in enumerate(self.tokens)
            ]
        return found + [
            self._row(mask_kind(n), mask_block(n), self.kept[n], self.sizes[n])
            for n in self.bits
            if n != "tokens"
        ]

    def _row(self, kind: str, block: int | None, kept: int, size: int) -> dict[str, Any]:
        return {
            "label": self.label,
            "task": self.task,
            "kind": kind,
            "block": block,
            "kept": kept,
            "size": size,
            "share": kept / size if size else 1.0,
        }


def mask_kind(name: str) -> str:
    """`blocks.3.fc1` -> `fc1`; a name without a block is its own kind."""
    return re.sub(r"^blocks\.\d+\.", "", name)


def mask_block(name: str) -> int | None:
    found = re.match(r"blocks\.(\d+)\.", name)
    return int(found.group(1)) if found else None


def _place(name: str) -> tuple[bool, str, int, str]:
    """Order of masks: tokens first, then kind by kind, block by block."""
    return (
        name != "tokens",
        mask_kind(name),
        -1 if (block := mask_block(name)) is None else block,
        name,
    )


def kinds(views: list[MaskView]) -> list[str]:
    return list(dict.fromkeys(mask_kind(name) for view in views for name in view.bits))


def overlap(views: list[MaskView], kind: str) -> NDArray[np.float64]:
    """Jaccard index |A and B| / |A or B| of each pair of tasks over all blocks, shape (tasks,
    tasks); NaN where the two have no mask of this kind and shape in common, 1 where both keep
    nothing."""
    result = np.full((len(views), len(views)), np.nan)
    for a, first in enumerate(views):
        for b in range(a, len(views)):
            second = views[b]
            names = [
                n
                for n in first.bits
                if mask_kind(n) == kind and first.sizes[n] == second.sizes.get(n)
            ]
            if names:
                both = sum(
                    int(np.bitwise_count(first.bits[n] & second.bits[n]).sum()) for n in names
                )
                either = sum(
                    int(np.bitwise_count(first.bits[n] | second.bits[n]).sum()) for n in names
                )
                result[a, b] = result[b, a] = both / either if either else 1.0
    return result


def overlap_rows(views: list[MaskView]) -> list[dict[str, Any]]:
    """One row per kind and pair of tasks."""
    rows = []
    for kind in kinds(views):
        values = overlap(views, kind)
        rows += [
            {
                "label": a.label,
                "kind": kind,
                "task": a.task,
                "other": b.task,
                "jaccard": float(values[i, j]),
            }
            for i, a in enumerate(views)
            for j, b in enumerate(views)
            if i < j and not np.isnan(values[i, j])
        ]
    return rows


def capacity(views: list[MaskView], kind: str) -> list[dict[str, Any]]:
    """Per task, of all entries of a kind: those it is the first to use, those it uses again, and
    all that are used by now."""
    rows, used = [], dict[str, NDArray[np.uint8]]()
    for view in views:
        fresh = again = 0
        for name in (n for n in view.bits if mask_kind(n) == kind):
            bits, before = view.bits[name], used.get(name, view.bits[name][:0])
            length = max(len(bits), len(before))
            bits, before = (np.pad(b, (0, length - len(b))) for b in (bits, before))
            fresh += int(np.bitwise_count(bits & ~before).sum())
            again += int(np.bitwise_count(bits & before).sum())
            used[name] = bits | before
        size = sum(n for name, n in view.sizes.items() if mask_kind(name) == kind)
        if size:
            rows.append(
                {
                    "label": view.label,
                    "task": view.task,
                    "kind": kind,
                    "fresh": fresh,
                    "again": again,
                    "used": sum(int(np.bitwise_count(b).sum()) for b in used.values()),
                    "size": size,
                }
            )
    return rows


def similarity(views: list[MaskView], name: str) -> tuple[NDArray[np.float64], list[str]]:
    """Cosine similarity between the learned tokens `name` of all tasks, (all tokens, all tokens),
    and who owns each row."""
    stacks = [(v.task, v.prompts[name]) for v in views if name in v.prompts]
    width = stacks[-1][1].shape[1]
    stacks = [(task, rows) for task, rows in stacks if rows.shape[1] == width]
    rows = np.concatenate([r for _, r in stacks]).astype(float)
    rows /= np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)
    return rows @ rows.T, [task for task, r in stacks for _ in r]
