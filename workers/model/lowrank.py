"""LoRA: W + s B A, merged into W or as a parallel branch.

On the fused query, key and value projection of every block of a timm VisionTransformer all updates
are stacked. On linear layers of other backbones each update has separate tensors.

Axes: L blocks, P parts of the projection's rows with one update each, r rank, d input width, o rows
of a part.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Target = Literal["qkv", "qv", "linear"]
# Last parts of the names of attention's projections in timm's models, fused or split.
FUSED = ("qkv",)
QUERIES, KEYS, VALUES = ("q", "q_proj"), ("k", "k_proj"), ("v", "v_proj")
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
    """The trained factors.

    `a` starts like PyTorch's Linear (Kaiming-uniform, slope sqrt 5), `b` at zero.
    """

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


def key_value_rows(b: Tensor) -> Tensor:
    """B (L, 2, o, r) of keys and values -> B (L, 3 o, r) of the fused projection, for `branch`.

    The rows of the queries are zero. Keys and values have one A (L, r, d).
    """
    keys, values = b.unbind(1)
    return torch.cat([torch.zeros_like(keys), keys, values], 1)


def merged_weights(backbone: Any, a: Tensor, b: Tensor) -> dict[str, Tensor]:
    """W + s B A of each block, by parameter name. a: (L, R, d); b: (L, O, R)."""
    weights = {}
    for index, block in enumerate(backbone.blocks):
        name = f"blocks.{index}.{PROJECTION}.weight"
        weights[name] = torch.addmm(compute_weight(block), b[index], a[index])
    return weights


def compute_weight(block: Any) -> Tensor:
    """The weight of a block's projection, (O, d)."""
    weight: Tensor = block.get_submodule(PROJECTION).weight
    return weight


def linear_sites(backbone: nn.Module, target: Target) -> dict[str, int]:
    """Return the names of the updated linear layers, and the number of row parts of each.

    `linear`: all layers, each with one update; a convolution of 1 x 1 is a linear layer on each
    pixel. `qkv`, `qv`: the projections of attention, fused or split; for `qv` a fused one has two
    parts, its first and its last third.
    """
    sites = {}
    for name, module in backbone.named_modules():
        last = name.rpartition(".")[2]
        if not isinstance(module, nn.Linear) and not _is_pointwise(module):
            continue
        is_split = last in (*QUERIES, *VALUES) or (target == "qkv" and last in KEYS)
        if target == "linear" or is_split:
            sites[name] = 1
        elif last in FUSED:
            sites[name] = 2 if target == "qv" else 1
    return sites


def _is_pointwise(module: nn.Module) -> bool:
    """Return whether a module is a convolution of 1 x 1 over all channels."""
    return isinstance(module, nn.Conv2d) and module.kernel_size == (1, 1) and module.groups == 1


class LinearUpdates(nn.Module):
    """The trained factors of linear layers: A (P, r, d) and B (P, o, r) for each.

    See `linear_sites`. The rank is that of the settings, or the smaller side of a layer if that is
    less. They start like those of `LowRank`. In a state they are `SITE.a` and `SITE.b`.
    """

    def __init__(self, backbone: nn.Module, sites: dict[str, int], rank: int):
        super().__init__()
        self.names: list[str] = []
        self.values = nn.ParameterList()
        for name, shape in update_shapes(backbone, sites, rank).items():
            start = torch.zeros(shape)
            if name.endswith(".a"):
                start.uniform_(-1, 1).div_(math.sqrt(shape[-1]))
            self.names.append(name)
            self.values.append(nn.Parameter(start))

    def tensors(self) -> dict[str, Tensor]:
        """Both factors of each site by name."""
        return dict(zip(self.names, self.values, strict=True))


def update_shapes(
    backbone: nn.Module, sites: dict[str, int], rank: int
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the factors of `LinearUpdates` by name."""
    shapes_by_name: dict[str, tuple[int, ...]] = {}
    for site, parts in sites.items():
        rows, width = compute_block_weight(backbone, site).shape[:2]
        part_rows = rows if parts == 1 else rows // 3
        own_rank = min(rank, part_rows, width)
        shapes_by_name[f"{site}.a"] = (parts, own_rank, width)
        shapes_by_name[f"{site}.b"] = (parts, part_rows, own_rank)
    return shapes_by_name


def compute_block_weight(backbone: nn.Module, site: str) -> Tensor:
    """The weight of a linear layer, (rows, d), or of a convolution, (rows, d, 1, 1)."""
    weight: Tensor = backbone.get_submodule(site).weight  # type: ignore[assignment]
    return weight


def updated_weights(
    backbone: nn.Module, sites: dict[str, int], update: dict[str, Tensor], scale: float
) -> dict[str, Tensor]:
    """W + s B A of each site, by parameter name; differentiable in the factors."""
    weights = {}
    for site, parts in sites.items():
        weight = compute_block_weight(backbone, site)
        change = scale * (update[f"{site}.b"] @ update[f"{site}.a"])  # (P, o, d)
        of_rows = change[0]
        if parts == 2:
            keys = change.new_zeros(len(weight) - 2 * change.shape[1], change.shape[2])
            of_rows = torch.cat([change[0], keys, change[1]])
        weights[f"{site}.weight"] = weight + of_rows.view_as(weight)
    return weights
