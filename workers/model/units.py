"""Hidden units of a ViT that a task can switch off: where they are, what their masks do to weights,
and which entries belong to them.

Per block: `qk`, channels of queries and keys; `v`, channels of values; `ff`, hidden neurons. The
residual stream has no units: every task uses all of it, so what writes to it besides weights
(biases of proj and fc2, norms, tokens) belongs to all tasks.
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
    """Return site (`blocks.0.qk`) -> number of units, in order; together (2 + r) d L.

    Raise `UserError` when units of a block read each other: no mask could then protect them from
    later tasks.
    """
    sites: dict[str, int] = {}
    for index, block in enumerate(vit.blocks):
        attn: Any = getattr(block, "attn", None)
        mlp: Any = getattr(block, "mlp", None)
        plain = type(attn) is Attention and type(mlp) is Mlp and isinstance(mlp.fc1, nn.Linear)
        if not plain or attn.gate is not None or not _acts_by_unit(attn, mlp):
            raise UserError(
                f"block {index} of the backbone has no separate units: its attention or FFN is "
                "gated, fused, or normalises across channels, "
                "so that later tasks would change earlier ones; use a plain timm ViT such as "
                "vit_tiny_patch16_224"
            )
        sites[f"blocks.{index}.qk"] = attn.attn_dim
        sites[f"blocks.{index}.v"] = attn.attn_dim
        sites[f"blocks.{index}.ff"] = mlp.fc2.in_features
    return sites


def _acts_by_unit(attn: Any, mlp: Any) -> bool:
    """Return whether no norm inside attention or FFN mixes units."""
    norms = (attn.q_norm, attn.k_norm, attn.norm, mlp.norm)
    return all(isinstance(norm, nn.Identity | Times) for norm in norms)


def masked_weights(vit: Any, masks: dict[str, Tensor]) -> dict[str, Tensor]:
    """What stands in for parameters of `vit` under masks by site, boolean or soft: rows of queries,
    with their bias, columns of proj and of fc2. The same as masking the units' outputs, at the
    price of weights instead of activations."""
    tensors: dict[str, Tensor] = {}
    for index, block in enumerate(vit.blocks):
        at, qkv = f"blocks.{index}.", block.attn.qkv
        qk, v, ff = (masks[at + kind] for kind in KINDS)
        # a masked query is enough: it meets no key
        rows = torch.cat([qk, qk.new_ones(2 * len(qk))])
        tensors |= {
            at + "attn.qkv.weight": qkv.weight * rows[:, None],
            at + "attn.proj.weight": block.attn.proj.weight * v,
            at + "mlp.fc2.weight": block.mlp.fc2.weight * ff,
        }
        if qkv.bias is not None:
            tensors[at + "attn.qkv.bias"] = qkv.bias * rows
    return tensors


def unit_values(vit: Any, values: dict[str, Tensor]) -> dict[str, Tensor]:
    """Parameter -> the value of the units that its entries belong to, in a shape that broadcasts to
    it. values: by site, a number per unit: whether earlier tasks use it (then this is the lock), by
    how many tasks it is used."""
    tensors: dict[str, Tensor] = {}
    for index, block in enumerate(vit.blocks):
        at = f"blocks.{index}."
        qk, v, ff = (values[at + kind] for kind in KINDS)
        rows = torch.cat([qk, qk, v])
        tensors |= {
            at + "attn.qkv.weight": weight_values(rows, None),
            at + "attn.proj.weight": weight_values(None, v),
            at + "mlp.fc1.weight": weight_values(ff, None),
            at + "mlp.fc2.weight": weight_values(None, ff),
        }
        if block.attn.qkv.bias is not None:
            tensors[at + "attn.qkv.bias"] = rows
        if block.mlp.fc1.bias is not None:
            tensors[at + "mlp.fc1.bias"] = ff
    return tensors


def magnitudes(vit: Any) -> dict[str, Tensor]:
    """Site -> (units,): of each unit the length of what leads into it, its bias included, times
    that of the weights out of it. Of a query: times the length of its key's weights; a key's
    bias is left out, because it adds the same to all scores of a query, which the softmax does
    not see."""
    sizes: dict[str, Tensor] = {}
    for index, block in enumerate(vit.blocks):
        at = f"blocks.{index}."
        query, key, value = into_units(block.attn.qkv).chunk(3)
        neuron = into_units(block.mlp.fc1)
        sizes[at + "qk"] = query.norm(dim=1) * key[:, : block.attn.qkv.in_features].norm(dim=1)
        sizes[at + "v"] = value.norm(dim=1) * block.attn.proj.weight.detach().norm(dim=0)
        sizes[at + "ff"] = neuron.norm(dim=1) * block.mlp.fc2.weight.detach().norm(dim=0)
    return sizes


def into_units(linear: nn.Linear) -> Tensor:
    """(out, in + 1): weights and, in the last column, the bias of each output; (out, in) without
    one."""
    weight = linear.weight.detach()
    return weight if linear.bias is None else torch.cat([weight, linear.bias.detach()[:, None]], 1)


def weight_values(out: Tensor | None, into: Tensor | None) -> Tensor:
    """min(out_i, in_j), HAT Eq. 2: the value of a weight between two layers of units, (out, in).
    None: the residual stream on that side, which counts as used by all; the result then broadcasts
    along it."""
    if out is None or into is None:
        assert out is not None or into is not None
        return into[None] if out is None else out[:, None]  # type: ignore[index]
    return torch.minimum(out[:, None], into[None])


# ---- a ViT without the units that its masks switch off -------------------------------------------
def pack(vit: Any, masks: dict[str, Tensor]) -> dict[str, Tensor]:
    """All parameters of `vit` by name; of those with entries that belong to units, the entries of
    kept units alone, in a row. masks: boolean, by site."""
    locks = unit_values(vit, masks)
    tensors = {}
    for name, parameter in vit.named_parameters():
        if name in locks:
            tensors[name] = parameter.detach()[locks[name].expand_as(parameter)]
        else:
            tensors[name] = parameter.detach().clone()
    return tensors


def unpack(
    vit: Any, tensors: dict[str, Tensor], masks: dict[str, Tensor], fill: bool
) -> dict[str, Tensor]:
    """The inverse of `pack`: parameters in the shapes of `vit`.

    Entries of other units are those of `vit` where `fill` is true, else 0. Raise `UserError` when
    tensors, masks and `vit` do not belong together.
    """
    sizes = {site: tuple(mask.shape) for site, mask in masks.items()}
    expected_sizes = {site: (size,) for site, size in unit_sites(vit).items()}
    parameters = dict(vit.named_parameters())
    if sizes != expected_sizes or tensors.keys() != parameters.keys():
        raise UserError(
            f"a pruned network has {sum(map(len, masks.values()))} units in {len(masks)} sites "
            f"and {len(tensors)} parameters, which are "
            "not those of this backbone; use the backbone of its run"
        )
    unpacked: dict[str, Tensor] = {}
    locks = unit_values(vit, masks)
    for name, tensor in tensors.items():
        parameter = parameters[name]
        size = tuple(parameter.shape)
        if name in locks:
            lock = locks[name].expand_as(parameter)
            size = (int(lock.sum()),)
        if tuple(tensor.shape) != size:
            raise UserError(
                f"a pruned network's {name} has shape {tuple(tensor.shape)}, and its masks and "
                f"this backbone leave {size}; use the backbone "
                "of its run"
            )
        if name not in locks:
            unpacked[name] = tensor
            continue
        values = parameter.detach().to(tensor.device)
        if not fill:
            values = torch.zeros_like(values)
        unpacked[name] = values.masked_scatter(lock, tensor)
    return unpacked


@torch.no_grad()
def cut_units(vit: Any, masks: dict[str, Tensor]) -> None:
    """Cut units whose weights are 0, in place.

    All heads of a block keep as many channels of queries, keys and values as the head that keeps
    most, at least one: those of its units that are on, then zeros. timm divides the scores by the
    root of that number, so queries are scaled.
    """
    for index, block in enumerate(vit.blocks):
        attn, mlp = block.attn, block.mlp
        qk, v, ff = (masks[f"blocks.{index}.{kind}"] for kind in KINDS)
        heads, width, total = attn.num_heads, attn.head_dim, attn.attn_dim
        qk_per_head = qk.view(heads, width)
        v_per_head = v.view(heads, width)
        most = max(1, int(qk_per_head.sum(1).max()), int(v_per_head.sum(1).max()))
        qk_rows = _channels_on(qk_per_head, most)
        v_rows = _channels_on(v_per_head, most)
        neurons = ff.nonzero()[:, 0]
        if not len(neurons):
            neurons = torch.zeros(1, dtype=torch.int64, device=ff.device)
        _cut(attn.qkv, torch.cat([qk_rows, qk_rows + total, v_rows + 2 * total]), None)
        _cut(attn.proj, None, v_rows)
        _cut(mlp.fc1, neurons, None)
        _cut(mlp.fc2, None, neurons)
        attn.head_dim, attn.attn_dim, attn.scale = most, heads * most, most**-0.5
        for p in attn.qkv.parameters():
            p[: heads * most] *= (most / width) ** 0.5


def _channels_on(mask: Tensor, count: int) -> Tensor:
    """mask (heads, width) -> indices (heads * count,): `count` channels of each head, first those
    that are on."""
    heads, width = mask.shape
    order = mask.int().argsort(dim=1, descending=True, stable=True)[:, :count]
    offsets = width * torch.arange(heads, device=mask.device)[:, None]
    return (order + offsets).flatten()


def _cut(linear: nn.Linear, out: Tensor | None, into: Tensor | None) -> None:
    """Keep rows `out` with their bias, or columns `into`, in place."""
    weight = linear.weight[out] if into is None else linear.weight[:, into]
    linear.weight = nn.Parameter(weight)
    if out is not None and linear.bias is not None:
        linear.bias = nn.Parameter(linear.bias[out])
    linear.out_features, linear.in_features = linear.weight.shape
