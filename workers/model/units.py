"""Hidden units of a ViT that a task can switch off, and the parameter entries of each unit.

A block has three kinds of units: `qk`, channels of queries and keys; `v`, channels of values; `ff`,
hidden neurons of the FFN. A site is all units of one kind in one block, for example `blocks.0.qk`.
Channels of the residual stream are not units, because every task uses all these channels. The
biases of proj and fc2, norms, layer scales and tokens act on this stream, so they belong to all
tasks. The same holds for biases of relative positions.
"""

from __future__ import annotations

from itertools import product
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from timm.layers import Attention, AttentionRope, GluMlp, Mlp, SwiGLU
from timm.models.beit import Attention as BeitAttention
from timm.models.eva import EvaAttention
from torch import Tensor, nn

from workers.errors import UserError
from workers.model.t2t import Times

KINDS = ("qk", "v", "ff")
ATTENTIONS = (Attention, AttentionRope, EvaAttention, BeitAttention)
FFNS = (Mlp, GluMlp, SwiGLU)  # in a gated FFN, two rows of the first layer belong to a neuron
FC1 = ("fc1", "fc1_g", "fc1_x")  # first layer of an FFN; in SwiGLU, its layers for gates and values
# cache of `list_unit_rows`, by backbone
_rows_of: WeakKeyDictionary[nn.Module, list[UnitRows]] = WeakKeyDictionary()


class UnitRows(NamedTuple):
    """A parameter whose rows, or columns, belong to units.

    The rows (or columns) consist of consecutive parts of equal size, for example those of queries,
    keys and values in a fused projection. Each row of a part belongs to one unit.

    Attributes:
        name: Name of the parameter.
        kinds: Kind of the units of each part.
        num_masked: Number of leading parts that `masked_weights` multiplies by a task's mask.
        are_columns: The columns of the parameter belong to units. Otherwise its rows do.
    """

    name: str
    kinds: tuple[str, ...]
    num_masked: int = 0
    are_columns: bool = False


def unit_sites(vit: Any) -> dict[str, int]:
    """Return the number of units of each site, for example `blocks.0.qk`, in the order of blocks.

    Raises:
        UserError: If units of a block depend on each other, or its attention or FFN is missing or
            of an unsupported class (see `_has_units`). Masks could then not protect earlier tasks
            from later tasks.
    """
    sites: dict[str, int] = {}
    for index, block in enumerate(vit.blocks):
        attn: Any = getattr(block, "attn", None)
        mlp: Any = getattr(block, "mlp", None)
        if not _has_units(attn, mlp):
            raise UserError(
                f"block {index} of the backbone has no separate units: its attention or FFN is "
                "of an unsupported class, its attention is gated or has fewer key than query "
                "heads, or a norm mixes channels, so later tasks would change earlier ones; use a "
                "plain timm ViT such as vit_tiny_patch16_224"
            )
        sites[f"blocks.{index}.qk"] = attn.proj.in_features
        sites[f"blocks.{index}.v"] = attn.proj.in_features
        sites[f"blocks.{index}.ff"] = mlp.fc2.in_features
    return sites


def _has_units(attn: Any, mlp: Any) -> bool:
    """Return whether attention and FFN have known classes, and masks can separate their units.

    A gated FFN is accepted, because its gate acts on each neuron separately. Rotary embeddings mix
    pairs of channels of queries and keys. They are accepted, because the keys are masked, too (see
    `list_unit_rows`). Gated attention is not accepted, because `list_unit_rows` does not include
    the gate's weights. The first layer of the FFN must be linear, norms must not mix units, and
    attention must have as many key as query heads.
    """
    if type(attn) not in ATTENTIONS or type(mlp) not in FFNS:
        return False
    if isinstance(mlp, SwiGLU):
        layers = [mlp.fc1_g, mlp.fc1_x]
    else:
        layers = [mlp.fc1]
    is_linear = all(isinstance(layer, nn.Linear) for layer in layers)
    norms = [getattr(attn, name, None) for name in ("q_norm", "k_norm", "norm")]
    acts_by_unit = all(  # `Times` multiplies by a constant
        norm is None or isinstance(norm, nn.Identity | Times) for norm in [*norms, mlp.norm]
    )
    is_gated = getattr(attn, "gate", None) is not None
    has_equal_heads = getattr(attn, "num_kv_groups", 1) == 1  # no grouped-query attention
    return is_linear and acts_by_unit and not is_gated and has_equal_heads


def list_unit_rows(vit: Any) -> list[UnitRows]:
    """Return the parameters whose rows or columns belong to units.

    In each block, weights come before biases.

    For `qk` units it is enough to mask the queries, because scores are products of queries and
    keys. Rotary embeddings mix pairs of channels after the projection, so with these the keys are
    masked, too.
    """
    if vit not in _rows_of:  # cached, because it is called in every training step
        _rows_of[vit] = _find_unit_rows(vit)
    return _rows_of[vit]


def _find_unit_rows(vit: Any) -> list[UnitRows]:
    is_rotary = getattr(vit, "rope", None) is not None
    parameters: list[UnitRows] = []
    for index, block in enumerate(vit.blocks):
        rows = [*_list_attention_parameters(block.attn, is_rotary), *_ffn_rows(block.mlp)]
        # Keep this position, after `attn.qkv.weight`: `hat` passes the weights to its optimizer in
        # this order, and checkpoints identify them by their position.
        rows.insert(1, UnitRows("attn.proj.weight", ("v",), 1, are_columns=True))
        rows.append(UnitRows("mlp.fc2.weight", ("ff",), 1, are_columns=True))
        existing = dict(block.named_parameters())
        rows = [entry for entry in rows if entry.name in existing]
        rows.sort(key=lambda entry: entry.name.endswith("bias"))  # the sort is stable
        parameters += [entry._replace(name=f"blocks.{index}.{entry.name}") for entry in rows]
    return parameters


def _list_attention_parameters(attn: Any, is_rotary: bool) -> list[UnitRows]:
    """Return the rows of queries, keys and values, with biases, for a fused or a split projection.

    Some of these parameters do not exist in a given model; `_find_unit_rows` drops them.
    """
    num_masked = 2 if is_rotary else 1  # queries and keys, or queries only
    kinds = ("qk", "qk", "v")
    rows = [UnitRows(f"attn.qkv.{end}", kinds, num_masked) for end in ("weight", "bias")]
    for index, (part, kind) in enumerate(zip("qkv", kinds, strict=True)):
        names = (f"{part}_proj.weight", f"{part}_proj.bias", f"{part}_bias")
        rows += [UnitRows(f"attn.{name}", (kind,), int(index < num_masked)) for name in names]
    return rows


def _ffn_rows(mlp: Any) -> list[UnitRows]:
    """Return the rows of neurons in the first layers of an FFN.

    In a `GluMlp`, one layer has two parts: gates and values. Parameters that do not exist in a
    given model are dropped by `_find_unit_rows`.
    """
    parts = 2 if isinstance(mlp, GluMlp) else 1
    names = [f"mlp.{layer}.{end}" for layer, end in product(FC1, ("weight", "bias"))]
    return [UnitRows(name, ("ff",) * parts) for name in names]


def masked_weights(vit: Any, masks: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the parameters of `vit` that a mask changes, multiplied by the mask, by name.

    The mask changes the rows of queries with their bias (with rotary embeddings also those of
    keys), and the columns of proj and fc2. The network then computes the same as with masked
    outputs of units, but the mask is multiplied by weights instead of activations.

    Args:
        vit: The backbone.
        masks: Boolean or soft masks, by site.
    """
    tensors: dict[str, Tensor] = {}
    factors: dict[tuple[str, ...], Tensor] = {}  # factors of weights, used again for biases
    ones: dict[int, Tensor] = {}  # factors of unmasked parts, by their length
    for rows in list_unit_rows(vit):
        if not rows.num_masked:
            continue
        sites = _list_sites(rows)
        if sites not in factors:
            parts = [masks[site] for site in sites[: rows.num_masked]]
            unmasked = sum(len(masks[site]) for site in sites[rows.num_masked :])
            if unmasked not in ones:
                ones[unmasked] = parts[0].new_ones(unmasked)
            factors[sites] = _joined([*parts, ones[unmasked]] if unmasked else parts)
        factor = factors[sites]
        parameter = vit.get_parameter(rows.name)
        if parameter.ndim == 2 and not rows.are_columns:
            factor = factor[:, None]
        tensors[rows.name] = parameter * factor
    return tensors


def _list_sites(rows: UnitRows) -> tuple[str, ...]:
    """Return the name of the site of each part."""
    block = ".".join(rows.name.split(".")[:2])
    return tuple(f"{block}.{kind}" for kind in rows.kinds)


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def sum_by_site(values: Tensor, sizes: list[int]) -> Tensor:
    """Sum a value per unit over the units of each site.

    Args:
        values: Values of all units (units,), in the order of `unit_sites`.
        sizes: Number of units of each site.

    Returns:
        Sums (sites,), bitwise equal to a separate sum for each site.
    """
    block_sizes = sizes[: len(KINDS)]
    num_blocks = len(sizes) // len(KINDS)
    if sizes != block_sizes * num_blocks:
        return torch.stack([part.sum() for part in values.split(sizes)])
    parts = values.view(num_blocks, -1).split(block_sizes, 1)  # equal blocks: few operators
    return torch.stack([part.sum(1) for part in parts], 1).flatten()


def block_values(values: dict[str, Tensor], index: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the values of the units `qk`, `v` and `ff` of one block.

    Args:
        values: A value per unit, by site.
        index: Index of the block.
    """
    qk, v, ff = (values[f"blocks.{index}.{kind}"] for kind in KINDS)
    return qk, v, ff


def spread_unit_values(vit: Any, values: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the value of the unit that each parameter entry belongs to, by parameter name.

    A value can be whether earlier tasks use the unit; then the results are locks for `Protector`.
    Or it can be the number of tasks that use the unit. Each result broadcasts to its parameter.

    In HAT, the value of a weight between two layers of units is the minimum of the values of both
    units (Eq. 2). Here each weight connects a unit with the residual stream. All tasks use this
    stream, so the minimum is the value of the unit.

    Args:
        vit: The backbone.
        values: A value per unit, by site.
    """
    tensors: dict[str, Tensor] = {}
    joined: dict[tuple[str, ...], Tensor] = {}  # values for weights, used again for biases
    for rows in list_unit_rows(vit):
        sites = _list_sites(rows)
        if sites not in joined:
            joined[sites] = _joined([values[site] for site in sites])
        of_rows = joined[sites]
        if vit.get_parameter(rows.name).ndim == 1:
            tensors[rows.name] = of_rows
        elif rows.are_columns:
            tensors[rows.name] = of_rows[None]
        else:
            tensors[rows.name] = of_rows[:, None]
    return tensors


def magnitudes(vit: Any) -> dict[str, Tensor]:
    """Return the magnitude of each unit by site, (units,).

    The magnitude is the norm of the weights into the unit (including its bias), times the norm of
    the weights out of the unit. For `qk` it is the norm of the query's row (including its bias),
    times the norm of the key's row. The bias of the key is ignored, because it adds the same number
    to all scores of a query, which does not change the softmax.

    Args:
        vit: A VisionTransformer with a fused projection of queries, keys and values.
    """
    by_site: dict[str, Tensor] = {}
    for index, block in enumerate(vit.blocks):
        name = f"blocks.{index}"
        qkv = block.attn.qkv
        query, key, value = append_bias_column(qkv).chunk(3)
        key_weights = key[:, : qkv.in_features]
        neuron = append_bias_column(block.mlp.fc1)
        out_of_values = block.attn.proj.weight.detach().norm(dim=0)
        out_of_neurons = block.mlp.fc2.weight.detach().norm(dim=0)
        by_site[f"{name}.qk"] = query.norm(dim=1) * key_weights.norm(dim=1)
        by_site[f"{name}.v"] = value.norm(dim=1) * out_of_values
        by_site[f"{name}.ff"] = neuron.norm(dim=1) * out_of_neurons
    return by_site


def append_bias_column(linear: nn.Linear) -> Tensor:
    """Return the weights of a layer with the bias as the last column, (out, in + 1).

    Without a bias, the result is (out, in).
    """
    weight = linear.weight.detach()
    if linear.bias is None:
        return weight
    bias = linear.bias.detach()[:, None]
    return torch.cat([weight, bias], 1)


# ---- a ViT without the units that its masks switch off -------------------------------------------
def pack(vit: Any, masks: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return all parameters of `vit` by name, without the entries of units that are off.

    A parameter that has entries of units becomes a vector of the remaining entries.

    Args:
        vit: The backbone.
        masks: Boolean masks, by site.
    """
    kept_entries = spread_unit_values(vit, masks)
    tensors = {}
    for name, parameter in vit.named_parameters():
        if name in kept_entries:
            tensors[name] = parameter.detach()[kept_entries[name].expand_as(parameter)]
        else:
            tensors[name] = parameter.detach().clone()
    return tensors


def unpack(
    vit: Any, tensors: dict[str, Tensor], masks: dict[str, Tensor], fill: bool
) -> dict[str, Tensor]:
    """Invert `pack`: return parameters in the shapes of `vit`.

    Args:
        vit: The backbone.
        tensors: The packed parameters.
        masks: The masks of `pack`.
        fill: Whether entries of units that are off get the values of `vit`. Otherwise they are 0.

    Raises:
        UserError: If tensors, masks and `vit` do not belong together.
    """
    sizes = {site: tuple(mask.shape) for site, mask in masks.items()}
    expected_sizes = {site: (size,) for site, size in unit_sites(vit).items()}
    parameters = dict(vit.named_parameters())
    if sizes != expected_sizes or tensors.keys() != parameters.keys():
        raise UserError(
            f"a pruned network has {sum(map(len, masks.values()))} units in {len(masks)} sites "
            f"and {len(tensors)} parameters, which are not those of this backbone; use the "
            "backbone of its run"
        )
    unpacked: dict[str, Tensor] = {}
    kept_entries = spread_unit_values(vit, masks)
    for name, tensor in tensors.items():
        parameter = parameters[name]
        size = tuple(parameter.shape)
        if name in kept_entries:
            is_kept = kept_entries[name].expand_as(parameter)
            size = (int(is_kept.sum()),)
        if tuple(tensor.shape) != size:
            raise UserError(
                f"a pruned network's {name} has shape {tuple(tensor.shape)}, and its masks and "
                f"this backbone leave {size}; use the backbone of its run"
            )
        if name not in kept_entries:
            unpacked[name] = tensor
            continue
        values = parameter.detach().to(tensor.device)
        if not fill:
            values = torch.zeros_like(values)
        unpacked[name] = values.masked_scatter(is_kept, tensor)
    return unpacked


@torch.no_grad()
def cut_units(vit: Any, masks: dict[str, Tensor]) -> None:
    """Remove units that are off from the layers of `vit`, in place.

    All heads of a block keep the same number of channels of queries, keys and values. This number
    is the largest number of active units in a head, at least 1. A head with fewer active units also
    keeps some inactive units, and an FFN keeps at least one neuron. Therefore the weights must be
    masked already (results of `masked_weights`, or of `unpack` without `fill`).

    timm divides scores by the square root of the number of channels, which is smaller now, so the
    queries are scaled to compensate.

    Args:
        vit: A VisionTransformer with a fused projection of queries, keys and values.
        masks: Boolean masks, by site.
    """
    for index, block in enumerate(vit.blocks):
        attn = block.attn
        mlp = block.mlp
        qk, v, ff = block_values(masks, index)
        heads: int = attn.num_heads
        width: int = attn.head_dim
        total: int = attn.attn_dim
        qk_per_head = qk.view(heads, width)
        v_per_head = v.view(heads, width)
        most = max(1, int(qk_per_head.sum(1).max()), int(v_per_head.sum(1).max()))
        qk_rows = _pick_channels(qk_per_head, most)
        v_rows = _pick_channels(v_per_head, most)
        neurons = ff.nonzero()[:, 0]
        if not len(neurons):
            neurons = torch.zeros(1, dtype=torch.int64, device=ff.device)
        _cut(attn.qkv, torch.cat([qk_rows, qk_rows + total, v_rows + 2 * total]), None)
        _cut(attn.proj, None, v_rows)
        _cut(mlp.fc1, neurons, None)
        _cut(mlp.fc2, None, neurons)
        attn.head_dim = most
        attn.attn_dim = heads * most
        attn.scale = most**-0.5
        for p in attn.qkv.parameters():
            p[: heads * most] *= (most / width) ** 0.5


def _pick_channels(mask: Tensor, count: int) -> Tensor:
    """Return the indices (heads * count,) of `count` channels of each head, active ones first.

    Args:
        mask: Active channels, (heads, width).
        count: Channels per head.
    """
    heads, width = mask.shape
    order = mask.int().argsort(dim=1, descending=True, stable=True)[:, :count]
    offsets = width * torch.arange(heads, device=mask.device)[:, None]
    return (order + offsets).flatten()


def _cut(linear: nn.Linear, rows: Tensor | None, columns: Tensor | None) -> None:
    """Keep only some rows of a layer with their biases, or only some columns, in place."""
    weight = linear.weight[rows] if columns is None else linear.weight[:, columns]
    linear.weight = nn.Parameter(weight)
    if rows is not None and linear.bias is not None:
        linear.bias = nn.Parameter(linear.bias[rows])
    linear.out_features, linear.in_features = linear.weight.shape
