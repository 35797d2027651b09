"""Hidden units of a ViT that a task can switch off: where they are, what their masks do to weights, and which entries belong to them.

Per block: `qk`, channels of queries and keys; `v`, channels of values; `ff`, hidden neurons. The residual stream has no units: every
task uses all of it, so what writes to it besides weights (biases of proj and fc2, norms, tokens) belongs to all tasks.
"""

from __future__ import annotations

from typing import Any

import torch
from timm.layers import Attention, Mlp
from torch import Tensor, nn

from workers.errors import UserError
from workers.model.t2t import Times

KINDS = ("qk", "v", "ff")


def unit_sites(vit: Any) -> dict[str, int]:
    """Site (`blocks.0.qk`) -> number of units, in order; together (2 + r) d L. Raises UserError where a block lets units read each
    other, so that no mask could keep a later task out."""
    sites: dict[str, int] = {}
    for index, block in enumerate(vit.blocks):
        attn: Any = getattr(block, "attn", None)
        mlp: Any = getattr(block, "mlp", None)
        plain = type(attn) is Attention and type(mlp) is Mlp and isinstance(mlp.fc1, nn.Linear)
        if not plain or attn.gate is not None or not all(isinstance(m, nn.Identity | Times) for m in (attn.q_norm, attn.k_norm, attn.norm, mlp.norm)):
            raise UserError(f"block {index} of the backbone has no separate units: its attention or FFN is gated, fused, or normalises across channels, "
                            "so that later tasks would change earlier ones; use a plain timm ViT such as vit_tiny_patch16_224")
        sites |= {f"blocks.{index}.{kind}": size for kind, size in zip(KINDS, (attn.attn_dim, attn.attn_dim, mlp.fc2.in_features), strict=True)}
    return sites


def masked_weights(vit: Any, masks: dict[str, Tensor]) -> dict[str, Tensor]:
    """What stands in for parameters of `vit` under masks by site, boolean or soft: rows of queries, with their bias, columns of proj
    and of fc2. The same as masking the units' outputs, at the price of weights instead of activations."""
    tensors: dict[str, Tensor] = {}
    for index, block in enumerate(vit.blocks):
        at, qkv = f"blocks.{index}.", block.attn.qkv
        qk, v, ff = (masks[at + kind] for kind in KINDS)
        rows = torch.cat([qk, qk.new_ones(2 * len(qk))])  # a masked query is enough: it meets no key
        tensors |= {at + "attn.qkv.weight": qkv.weight * rows[:, None], at + "attn.proj.weight": block.attn.proj.weight * v,
                    at + "mlp.fc2.weight": block.mlp.fc2.weight * ff}
        if qkv.bias is not None:
            tensors[at + "attn.qkv.bias"] = qkv.bias * rows
    return tensors


def owned(vit: Any, values: dict[str, Tensor]) -> dict[str, Tensor]:
    """Parameter -> the value of the units that its entries belong to, in a shape that broadcasts to it. values: by site, a number per
    unit: whether earlier tasks use it (then this is the lock), by how many tasks it is used."""
    tensors: dict[str, Tensor] = {}
    for index, block in enumerate(vit.blocks):
        at = f"blocks.{index}."
        qk, v, ff = (values[at + kind] for kind in KINDS)
        rows = torch.cat([qk, qk, v])
        tensors |= {at + "attn.qkv.weight": between(rows, None), at + "attn.proj.weight": between(None, v),
                    at + "mlp.fc1.weight": between(ff, None), at + "mlp.fc2.weight": between(None, ff)}
        tensors |= {name: value for name, value, linear in ((at + "attn.qkv.bias", rows, block.attn.qkv), (at + "mlp.fc1.bias", ff, block.mlp.fc1))
                    if linear.bias is not None}
    return tensors


def between(out: Tensor | None, into: Tensor | None) -> Tensor:
    """min(out_i, in_j), HAT Eq. 2: the value of a weight between two layers of units, (out, in). None: the residual stream on that
    side, which counts as used by all; the result then broadcasts along it."""
    if out is None or into is None:
        assert out is not None or into is not None
        return into[None] if out is None else out[:, None]  # type: ignore[index]
    return torch.minimum(out[:, None], into[None])
