"""LoRA on the fused query, key and value projection of every block of a ViT: W + s B A, merged
into W or as a branch beside it.

Axes: L blocks, P parts of the projection's rows with an update each, r rank, d width in, o rows of
a part.
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
    """Shapes of the factors of all blocks: a (L, P, r, d), b (L, P, o, r).

    `qkv`: one update of all rows. `qv`: one of the queries, the first third of the rows, and one of
    the values, the last third.
    """
    if target == "qkv":
        return {"a": (blocks, 1, rank, width), "b": (blocks, 1, rows, rank)}
    return {"a": (blocks, 2, rank, width), "b": (blocks, 2, rows // 3, rank)}


class LowRank(nn.Module):
    """The trained factors. `a` starts as PyTorch's Linear does (Kaiming-uniform, slope sqrt 5), `b`
    at zero."""

    def __init__(self, a: tuple[int, ...], b: tuple[int, ...]):
        super().__init__()
        self.a = nn.Parameter(torch.empty(a).uniform_(-1, 1) / math.sqrt(a[-1]))
        self.b = nn.Parameter(torch.zeros(b))

    def tensors(self) -> dict[str, Tensor]:
        """Both factors by name."""
        return dict(self.named_parameters())


def factors(a: Tensor, b: Tensor, rows: int, scale: float) -> dict[str, Tensor]:
    """The factors that `branch` takes: A (L, P r, d) and s B (L, rows, P r).

    With two parts B is block diagonal: queries in the first rows, values in the last ones.
    """
    if b.shape[1] == 1:
        return {"a": a[:, 0], "b": scale * b[:, 0]}
    blocks, _, part, rank = b.shape
    block_diagonal = b.new_zeros(blocks, rows, 2 * rank)  # (L, rows, 2 r)
    block_diagonal[:, :part, :rank] = b[:, 0]  # (L, o, r)
    block_diagonal[:, rows - part :, rank:] = b[:, 1]  # (L, o, r)
    return {"a": a.flatten(1, 2), "b": scale * block_diagonal}


def merged_weights(backbone: Any, a: Tensor, b: Tensor) -> dict[str, Tensor]:
    """W + s B A of each block, by parameter name. a: (L, R, d); b: (L, O, R)."""
    weights = {}
    for index, block in enumerate(backbone.blocks):
        name = f"blocks.{index}.{PROJECTION}.weight"
        weights[name] = torch.addmm(weight_of(block), b[index], a[index])
    return weights


def weight_of(block: Any) -> Tensor:
    """The weight of a block's projection, (O, d)."""
    weight: Tensor = block.get_submodule(PROJECTION).weight
    return weight
