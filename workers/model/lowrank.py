"""Low-rank updates of the fused query, key and value projection of every block of a ViT: W + s B A,
merged or as a branch beside W.

Axes: L blocks, P parts of the projection's rows that have an update of their own, r rank, d width
in, o rows of a part.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Target = Literal["qkv", "qv"]
PROJECTION = "attn.qkv"  # of a block


def branch(out: Tensor, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """W x -> W x + B A x. x: (B, N, d); out: (B, N, O); a: (R, d); b: (O, R)."""
    return out + F.linear(F.linear(x, a), b)


def shapes(
    blocks: int, rows: int, width: int, rank: int, target: Target
) -> dict[str, tuple[int, ...]]:
    """Of the factors of all blocks: a (L, P, r, d), b (L, P, o, r). `qkv`: one update of all rows;
    `qv`: one of the queries', the first third of them, and one of the values', the last."""
    parts, part = (1, rows) if target == "qkv" else (2, rows // 3)
    return {"a": (blocks, parts, rank, width), "b": (blocks, parts, part, rank)}


class LowRank(nn.Module):
    """The trained factors: a starts as PyTorch's Linear does (Kaiming-uniform with a slope of sqrt
    5), b at zero."""

    def __init__(self, a: tuple[int, ...], b: tuple[int, ...]):
        super().__init__()
        self.a = nn.Parameter(torch.empty(a).uniform_(-1, 1) / math.sqrt(a[-1]))
        self.b = nn.Parameter(torch.zeros(b))

    def tensors(self) -> dict[str, Tensor]:
        return dict(self.named_parameters())


def factors(a: Tensor, b: Tensor, rows: int, scale: float) -> dict[str, Tensor]:
    """What `branch` takes, for each block: A (L, P r, d) and s B (L, rows, P r), whose parts write
    to rows of their own."""
    if b.shape[1] == 1:
        return {"a": a[:, 0], "b": scale * b[:, 0]}
    part, rank = b.shape[2:]
    return {
        "a": a.flatten(1, 2),
        "b": scale
        * (F.pad(b[:, 0], (0, rank, 0, rows - part)) + F.pad(b[:, 1], (rank, 0, rows - part, 0))),
    }


def merged_weights(backbone: Any, a: Tensor, b: Tensor) -> dict[str, Tensor]:
    """W + s B A of each block, by parameter name. a: (L, R, d); b: (L, O, R)."""
    return {
        f"blocks.{i}.{PROJECTION}.weight": torch.addmm(weight_of(block), b[i], a[i])
        for i, block in enumerate(backbone.blocks)
    }


def weight_of(block: Any) -> Tensor:
    return block.get_submodule(PROJECTION).weight
