"""LoRA (Hu et al., ICLR 2022): W + s B A, merged into W or computed in a parallel branch.

If the target is the fused projection of queries, keys and values of a timm VisionTransformer, the
updates of all blocks are stacked (`LowRank`). Otherwise (target `linear`, or another backbone) each
layer has separate tensors (`LinearUpdates`).

Axes: L blocks, P parts of the projection's rows with one update each, r rank, d input width, o rows
of a part, O rows of the whole projection, R rows of all factors A of a projection together.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Target = Literal["qkv", "qv", "linear"]
# last component of the names of attention projections in timm's models: fused, then split
FUSED = ("qkv",)
QUERIES, KEYS, VALUES = ("q", "q_proj"), ("k", "k_proj"), ("v", "v_proj")
PROJECTION = "attn.qkv"  # path of the fused projection in a block


def branch(out: Tensor, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Return W x + B A x for a projection W.

    Args:
        out: W x, (B, N, O).
        x: Input of the projection, (B, N, d).
        a: A, (R, d).
        b: B, (O, R).
    """
    return out + F.linear(F.linear(x, a), b)


def shapes(
    blocks: int, rows: int, width: int, rank: int, target: Target
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the factors of all blocks: a (L, P, r, d), b (L, P, o, r).

    Args:
        blocks: Number of blocks L.
        rows: Number of rows of the projection.
        width: Input width d.
        rank: Rank r.
        target: Updated rows. `qkv`: one update of all rows. Otherwise (`qv`) two updates: one of
            the queries (the first third of the rows) and one of the values (the last third).
    """
    if target == "qkv":
        return {"a": (blocks, 1, rank, width), "b": (blocks, 1, rows, rank)}
    return {"a": (blocks, 2, rank, width), "b": (blocks, 2, rows // 3, rank)}


class LowRank(nn.Module):
    """The trained factors of all blocks.

    `a` is initialised like PyTorch's Linear (Kaiming-uniform, slope sqrt 5), `b` with zeros.

    Args:
        a: Shape of `a`, see `shapes`.
        b: Shape of `b`.
    """

    def __init__(self, a: tuple[int, ...], b: tuple[int, ...]):
        super().__init__()
        self.a = nn.Parameter(torch.empty(a).uniform_(-1, 1) / math.sqrt(a[-1]))
        self.b = nn.Parameter(torch.zeros(b))

    def tensors(self) -> dict[str, Tensor]:
        """Return both factors by name."""
        return dict(self.named_parameters())


def factors(a: Tensor, b: Tensor, rows: int, scale: float) -> dict[str, Tensor]:
    """Return the factors for `branch` in each block: A (L, P r, d) and s B (L, rows, P r).

    With two parts, B is block diagonal: the rows of the queries are first, those of the values
    last.

    Args:
        a: Stacked factors, (L, P, r, d).
        b: Stacked factors, (L, P, o, r).
        rows: Number of rows of the projection.
        scale: The factor s.
    """
    if b.shape[1] == 1:
        return {"a": a[:, 0], "b": scale * b[:, 0]}
    blocks, _, part, rank = b.shape
    block_diagonal = b.new_zeros(blocks, rows, 2 * rank)  # (L, rows, 2 r)
    block_diagonal[:, :part, :rank] = b[:, 0]  # (L, o, r)
    block_diagonal[:, rows - part :, rank:] = b[:, 1]  # (L, o, r)
    return {"a": a.flatten(1, 2), "b": scale * block_diagonal}


def expand_key_value_factor(b: Tensor) -> Tensor:
    """Convert B (L, 2, o, r) of keys and values to B (L, 3 o, r) of the fused projection.

    The result is a factor for `branch`. The rows of the queries are zero. Keys and values share one
    A (L, r, d).
    """
    keys, values = b.unbind(1)
    return torch.cat([torch.zeros_like(keys), keys, values], 1)


def merge_updates(backbone: Any, a: Tensor, b: Tensor) -> dict[str, Tensor]:
    """Return W + B A of the projection of each block, by parameter name.

    Args:
        backbone: A timm VisionTransformer.
        a: A, (L, R, d).
        b: B, (L, O, R). It must include the factor s, as in the result of `factors`.
    """
    weights = {}
    for index, block in enumerate(backbone.blocks):
        name = f"blocks.{index}.{PROJECTION}.weight"
        weights[name] = torch.addmm(get_projection_weight(block), b[index], a[index])
    return weights


def get_projection_weight(block: Any) -> Tensor:
    """Return the weight of a block's projection, (O, d)."""
    weight: Tensor = block.get_submodule(PROJECTION).weight
    return weight


def linear_sites(backbone: nn.Module, target: Target) -> dict[str, int]:
    """Return the names of the linear layers to update, with the number P of row parts of each.

    Args:
        backbone: Any timm model.
        target: `linear`: all linear layers and 1 x 1 convolutions (which are linear layers on each
            pixel), each with one part. `qkv`, `qv`: the projections of attention, fused or split.
            For `qv`, a fused projection has two parts: the first and the last third of the rows.
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
    """Return whether a module is a 1 x 1 convolution without groups."""
    return isinstance(module, nn.Conv2d) and module.kernel_size == (1, 1) and module.groups == 1


class LinearUpdates(nn.Module):
    """The trained factors of linear layers: A (P, r, d) and B (P, o, r) for each layer.

    The rank is reduced to the smaller side of a layer (or part) if that is less than `rank`. The
    factors are initialised like those of `LowRank`. For the layer SITE, they have the names
    `SITE.a` and `SITE.b`, also in a task's state.

    Args:
        backbone: The backbone.
        sites: Result of `linear_sites`.
        rank: Rank r.
    """

    def __init__(self, backbone: nn.Module, sites: dict[str, int], rank: int):
        super().__init__()
        self.names: list[str] = []
        self.values = nn.ParameterList()
        for name, shape in compute_factor_shapes(backbone, sites, rank).items():
            start = torch.zeros(shape)
            if name.endswith(".a"):
                start.uniform_(-1, 1).div_(math.sqrt(shape[-1]))
            self.names.append(name)
            self.values.append(nn.Parameter(start))

    def tensors(self) -> dict[str, Tensor]:
        """Return both factors of each site by name."""
        return dict(zip(self.names, self.values, strict=True))


def compute_factor_shapes(
    backbone: nn.Module, sites: dict[str, int], rank: int
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the factors of `LinearUpdates` by name."""
    shapes_by_name: dict[str, tuple[int, ...]] = {}
    for site, parts in sites.items():
        rows, width = get_layer_weight(backbone, site).shape[:2]
        part_rows = rows if parts == 1 else rows // 3
        own_rank = min(rank, part_rows, width)
        shapes_by_name[f"{site}.a"] = (parts, own_rank, width)
        shapes_by_name[f"{site}.b"] = (parts, part_rows, own_rank)
    return shapes_by_name


def get_layer_weight(backbone: nn.Module, site: str) -> Tensor:
    """Return the weight of a linear layer (rows, d) or of a convolution (rows, d, 1, 1)."""
    weight: Tensor = backbone.get_submodule(site).weight  # type: ignore[assignment]
    return weight


def compute_updated_weights(
    backbone: nn.Module, sites: dict[str, int], update: dict[str, Tensor], scale: float
) -> dict[str, Tensor]:
    """Return W + s B A of each site by parameter name, differentiable in the factors.

    Args:
        backbone: The backbone.
        sites: Result of `linear_sites`.
        update: Factors by name, as in `LinearUpdates.tensors`.
        scale: The factor s.
    """
    weights = {}
    for site, parts in sites.items():
        weight = get_layer_weight(backbone, site)
        change = scale * (update[f"{site}.b"] @ update[f"{site}.a"])  # (P, o, d)
        of_rows = change[0]
        if parts == 2:
            keys = change.new_zeros(len(weight) - 2 * change.shape[1], change.shape[2])
            of_rows = torch.cat([change[0], keys, change[1]])
        weights[f"{site}.weight"] = weight + of_rows.view_as(weight)
    return weights
