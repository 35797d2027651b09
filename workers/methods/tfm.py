"""TFM (ternary feature masks): hidden layers grow with every task.

Features of earlier tasks are used and renormalised, and never change.

Masana, Tuytelaars, van de Weijer: Ternary Feature Masks: zero-forgetting for task-incremental
learning, CVPR Workshops 2021. A RECONSTRUCTION: no code was ever released, and all details beyond
the abstract are ours.

Axes: parts (three in an attention: q, k and v; one in an FFN), n units, d width of the residual
stream.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from pydantic import Field, NonNegativeInt, PositiveFloat
from timm.layers import Attention, Mlp
from torch import Tensor, nn
from torch.nn import functional as F

from workers.data.batch import Batch
from workers.errors import UserError
from workers.methods.base import (
    Method,
    MethodSettings,
    ParamGroup,
    Progress,
    StepContext,
)
from workers.methods.train_defaults import TrainDefaults
from workers.model.compact import count_multiply_adds
from workers.model.context import count_uniform_multiply_adds
from workers.storage.taskstate import Carried, TaskState

ALIGNED = 8  # new FFN units come in multiples of this, for fast matrix products
NORM = (".gamma", ".beta")  # suffixes of the tensors that renormalise a site
WEIGHTS = "weights/"  # prefix of backbone parameters that the first task trained

# Rows that compute units (parts, n, d), their biases (parts, n), and columns that read the units
# (d, n).
Units = tuple[Tensor, Tensor, Tensor]


class TfmSettings(MethodSettings):
    """Settings of `tfm`."""

    growth: float = Field(
        0.1,
        ge=0,
        le=1,
        description="number of FFN units that a task adds to a block, as a share of the "
        "backbone's, rounded up to a multiple of 8",
    )
    heads_every: NonNegativeInt = Field(
        0,
        description="every so many tasks, from the first one on, each attention gets a new "
        "head; 0: never",
    )
    norm_lr: PositiveFloat = Field(
        1e-2,
        description="peak learning rate of gamma and beta, which start at 1 and 0 and are far "
        "larger than weights",
    )
    first: Literal["adapted", "trained"] = Field(
        "adapted",
        description="parameters that the first task trains: `adapted`: new units only, the "
        "backbone is frozen; `trained`: also the whole backbone",
    )


@dataclass(frozen=True)
class Pair:
    """Two linear layers with units between them.

    Attributes:
        name: Path of the attention or FFN with the two layers.
        into: Path of the first layer, whose rows compute the units.
        out: Path of the second layer, whose columns read the units.
        sites: For each part of the rows of `into`, the site with its gamma and beta. None: the part
            is not renormalised.
    """

    name: str
    into: str
    out: str
    sites: tuple[str | None, ...]


@dataclass(frozen=True)
class PairGroup:
    """Pairs of the same sizes, whose units a task renormalises at once.

    Attributes:
        pairs: The pairs.
        forward_only: True for forward-only units, (pairs * parts, n). Parts without a site have no
            such units.
        used: 1 for used units, otherwise 0; of the same shape.
    """

    pairs: list[Pair]
    forward_only: Tensor
    used: Tensor


class Tfm(Method[TfmSettings]):
    """For each task, a unit is 0 unused, 1 forward-only, or 2 normal.

    Unused units were added by later tasks. Forward-only units were learned by earlier tasks; they
    are used, but frozen. Normal units are new: used and trained. Forward-only units get a scale and
    a shift per task: y <- gamma y + beta before the activation, folded into the rows that compute
    them. New units read the residual stream and write to it, so no weight leads directly from a new
    unit to an old unit. An older task is served without any later units. The columns of new units,
    through which they write, start at 0. So a task starts from the existing network.

    Sites per block: `qk` and `v` (channels of the attention), `ff` (hidden units). Of q and k only
    q is renormalised: attention uses their product, in which a scale of k is a scale of q, and a
    shift of k adds the same value to the scores of all keys. Layer norms, embeddings and the biases
    of the two layers that write to the residual stream belong to all tasks and stay frozen. Stored
    per task: two bits per unit (`used`, `own`: trained by this task), gamma and beta of
    forward-only units, the head. Carried: the rows, biases and columns that tasks added; with
    `first: trained` also the backbone after the first task.
    """

    name = "tfm"
    has_constant_step = True
    family = "parameter isolation"
    keeps = "2 bits a unit, norms, head"
    paper = (
        "Ternary Feature Masks: zero-forgetting for task-incremental learning, CVPR Workshops 2021"
    )
    train_defaults = TrainDefaults(
        lr=1e-3,
        source="measured on seven real tasks at 64 px: configs/RESULTS.md",
    )
    needs_vit = True
    why_no_other_vit = (
        "it renormalises queries in place of keys, which rotary embeddings do not allow, and adds "
        "heads and neurons, for which biases of relative positions and gated FFNs define none"
    )
    carries = ("units",)
    Settings = TfmSettings
    per_task = frozenset({"growth", "norm_lr"})

    def __init__(self, backbone: nn.Module, settings: TfmSettings, seed: int):
        super().__init__(backbone, settings, seed)
        self.pairs = find_pairs(backbone)
        self.original = dict(backbone.named_parameters())
        # Carried state of earlier tasks: added units by pair, and the backbone if it was trained.
        self.shared: dict[str, Tensor] = {}
        # Trained parameters of the current task, without its head.
        self.new: dict[str, nn.Parameter] = {}
        self.masks: dict[str, Tensor] = {}  # masks of the task in training
        self.groups: list[PairGroup] = []  # of the task in training
        self.loaded: dict[str, TaskState] = {}

    # ---- training --------------------------------------------------------------------------------
    def begin(self, context: StepContext) -> list[ParamGroup]:
        groups = super().begin(context)
        self.loaded.pop(context.task.name, None)
        self.load_carried(context.carried or Carried())
        self.position = context.carried.meta["tasks"] if context.carried else 0
        # Whether this is the first task, and it trains the whole backbone instead of new units.
        whole = self.settings.first == "trained" and context.carried is None
        start: dict[str, Tensor] = {}
        if whole:
            for name, p in self.original.items():
                start[f"{WEIGHTS}{name}"] = p.detach().clone()
        for pair in self.pairs:
            rows, bias, columns = self.units(pair)
            old = columns.shape[1]
            added = 0 if whole else self.growth(pair)
            first_own = 0 if whole else old
            if added:
                noise = torch.randn(rows.shape[0], added, rows.shape[2]) * float(rows.std())
                start |= {
                    f"{pair.name}.rows": noise.to(rows),
                    f"{pair.name}.bias": bias.new_zeros(len(bias), added),
                    f"{pair.name}.columns": columns.new_zeros(len(columns), added),
                }
            for site in filter(None, pair.sites):
                index = torch.arange(old + added, device=self.device)
                self.masks[f"{site}.used"] = torch.ones_like(index, dtype=torch.bool)
                self.masks[f"{site}.own"] = index >= first_own
                if not whole:
                    start[f"{site}.gamma"] = bias.new_ones(old)
                    start[f"{site}.beta"] = bias.new_zeros(old)
        self.new = {name: nn.Parameter(tensor) for name, tensor in start.items()}
        self.groups = self.group_pairs(self.masks, self.new)
        # Registers the parameters for `state_dict` and `to`, which ignore the dict.
        self.trained = nn.ParameterList(self.new.values())
        kinds: dict[str, list[nn.Parameter]] = {"units": [], "units.exempt": [], "norm": []}
        for name, p in self.new.items():
            if name.endswith(NORM):
                kind = "norm"
            elif p.ndim == 1 or name.endswith((".bias", "cls_token", "pos_embed")):
                kind = "units.exempt"
            else:
                kind = "units"
            kinds[kind].append(p)
        return [
            *groups,
            {"name": "units", "params": kinds["units"], "weight_decay": context.optim.weight_decay},
            {"name": "units.exempt", "params": kinds["units.exempt"], "weight_decay": 0.0},
            {
                "name": "norm",
                "params": kinds["norm"],
                "weight_decay": 0.0,
                "lr": self.settings.norm_lr,
            },
        ]

    def growth(self, pair: Pair) -> int:
        """Return the number of units that the current task adds between the two layers."""
        if len(pair.sites) == 1:  # an FFN
            width = self.original[f"{pair.into}.weight"].shape[0]
            return math.ceil(self.settings.growth * width / ALIGNED) * ALIGNED
        attention: Any = self.backbone.get_submodule(pair.name)
        every = self.settings.heads_every
        if every == 0 or self.position % every != 0:
            return 0
        return int(attention.head_dim)

    def training_weights(self, batch: Batch, progress: Progress) -> dict[str, Tensor]:
        return self.in_effect(self.masks, self.new)

    def metrics(self) -> dict[str, float]:
        """Return `gamma_moved`, the mean |gamma - 1| over all forward-only units."""
        scales = [p.detach() for name, p in self.new.items() if name.endswith(".gamma")]
        if not scales:
            return {}
        return {"gamma_moved": float((torch.cat(scales) - 1).abs().mean())}

    def finish(self) -> tuple[TaskState, Carried]:
        copies: dict[str, Tensor] = {}
        carried = {name: t.clone() for name, t in self.shared.items()}
        for name, p in self.new.items():
            tensor = p.detach()
            if name.endswith(NORM):
                copies[name] = tensor.clone()
            elif name in carried:
                carried[name] = torch.cat([carried[name], tensor], 1)
            else:
                carried[name] = tensor.clone()
        masks = {name: mask.cpu() for name, mask in self.masks.items()}
        state = self.state(masks=masks, copies=copies)
        return state, Carried(carried, {"tasks": self.position + 1})

    # ---- weights in effect -----------------------------------------------------------------------
    def weight(self, name: str) -> Tensor | None:
        """Return a parameter of the backbone as all tasks use it; None for a missing bias."""
        key = WEIGHTS + name
        if key in self.new:
            return self.new[key]
        if key in self.shared:
            return self.shared[key]
        return self.original.get(name)

    def units(self, pair: Pair) -> Units:
        """Return all units between two layers.

        The order is: units of the backbone, units that each earlier task added, units of the task
        in training.
        """
        weight = self.weight(f"{pair.into}.weight")
        columns = self.weight(f"{pair.out}.weight")
        bias = self.weight(f"{pair.into}.bias")
        assert weight is not None
        assert columns is not None
        if bias is None:
            bias = weight.new_zeros(len(weight))
        parts = len(pair.sites)
        all_rows = [weight.view(parts, -1, weight.shape[1])]
        all_biases = [bias.view(parts, -1)]
        all_columns = [columns]
        for tensors in (self.shared, self.new):
            if f"{pair.name}.rows" in tensors:
                all_rows.append(tensors[f"{pair.name}.rows"])
                all_biases.append(tensors[f"{pair.name}.bias"])
                all_columns.append(tensors[f"{pair.name}.columns"])
        if len(all_rows) == 1:
            return all_rows[0], all_biases[0], all_columns[0]
        return torch.cat(all_rows, 1), torch.cat(all_biases, 1), torch.cat(all_columns, 1)

    def group_pairs(
        self, masks: Mapping[str, Tensor], copies: Mapping[str, Tensor]
    ) -> list[PairGroup]:
        """Return the groups of pairs for a task's masks, gamma and beta, on the device."""
        by_size: dict[tuple[int, ...], list[Pair]] = {}
        for pair in self.pairs:
            site = pair.sites[-1]
            gamma = copies.get(f"{site}.gamma")
            old = 0 if gamma is None else len(gamma)
            size = (len(pair.sites), len(masks[f"{site}.used"]), old)
            by_size.setdefault(size, []).append(pair)
        groups = []
        for (_, width, _), pairs in by_size.items():
            all_used, all_forward_only = [], []
            for site in [site for pair in pairs for site in pair.sites]:
                used = masks.get(f"{site}.used", torch.ones(width, dtype=torch.bool))
                own = masks.get(f"{site}.own", torch.ones(width, dtype=torch.bool))
                is_normalised = f"{site}.gamma" in copies
                all_used.append(used.to(self.device))
                all_forward_only.append(all_used[-1] & ~own.to(self.device) & is_normalised)
            used = torch.stack(all_used).float()
            groups.append(PairGroup(pairs, torch.stack(all_forward_only), used))
        return groups

    def in_effect(
        self, masks: Mapping[str, Tensor], copies: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Return the parameters that replace the backbone's for a task's masks, gamma and beta.

        Units that later tasks added are left out.
        """
        overrides: dict[str, Tensor] = {}
        for name, original in self.original.items():
            weight = self.weight(name)
            if weight is not None and weight is not original:
                overrides[name] = weight
        is_training_it = masks is self.masks
        for group in self.groups if is_training_it else self.group_pairs(masks, copies):
            scales, shifts = _normalise(group, copies)
            width = group.used.shape[1]
            for pair, scale, shift in zip(group.pairs, scales, shifts, strict=True):
                rows, bias, columns = self.units(pair)
                if width > columns.shape[1]:
                    raise UserError(
                        f"{pair.name}: a task's state has {width} units, the carried weights have "
                        f"{columns.shape[1]}; use the carried state of this task or of a later one"
                    )
                if width < columns.shape[1]:
                    # Contiguous, so that outputs equal those before the later tasks bit for bit.
                    rows = rows[:, :width].contiguous()
                    bias = bias[:, :width].contiguous()
                    columns = columns[:, :width].contiguous()
                overrides[f"{pair.into}.weight"] = (rows * scale[..., None]).flatten(0, 1)
                overrides[f"{pair.into}.bias"] = (bias * scale + shift).flatten()
                if columns is not self.original[f"{pair.out}.weight"]:
                    overrides[f"{pair.out}.weight"] = columns
        return overrides

    def features(self, images: Tensor) -> Tensor:
        self.split_heads(self.weight_overrides)
        try:
            return super().features(images)
        finally:
            self.split_heads({})

    def split_heads(self, weights: dict[str, Tensor]) -> None:
        """Set the width and the number of heads of timm's attention modules from `weights`.

        Without an entry in `weights`, the values of the backbone are set. timm splits channels into
        heads by these two attributes, not by the shapes of the weights.
        """
        for pair in self.pairs:
            if len(pair.sites) > 1:
                name = f"{pair.out}.weight"
                attention: Any = self.backbone.get_submodule(pair.name)
                attention.attn_dim = weights.get(name, self.original[name]).shape[1]
                attention.num_heads = attention.attn_dim // attention.head_dim

    # ---- serving ---------------------------------------------------------------------------------
    def load_carried(self, carried: Carried) -> None:
        """Load the carried units, and reset the state of training."""
        super().load_carried(carried)
        self.shared = dict(carried.tensors)
        self.new = {}
        self.masks = {}
        self.groups = []

    def load_task(self, state: TaskState) -> None:
        """Load a finished task. A base task has no masks: the plain backbone serves it."""
        super().load_task(state)
        self.loaded[state.task] = state

    def serving_weights(self, task: str) -> dict[str, Tensor]:
        if task not in self.loaded:
            return self.in_effect(self.masks, self.new)
        state = self.loaded[task]
        return self.in_effect(state.masks, state.copies) if state.masks else {}

    def train(self, mode: bool = True) -> Tfm:
        """Set the mode. The backbone has stochastic depth only while the first task trains it."""
        super().train(mode)
        self.backbone.train(mode and any(name.startswith(WEIGHTS) for name in self.new))
        return self

    # ---- bookkeeping -----------------------------------------------------------------------------
    def flops_share(self, state: TaskState) -> float:
        """Return the multiply-adds at this task's widths, divided by those of the backbone.

        Patch embedding and blocks are counted.
        """
        vit: Any = self.backbone
        tokens = vit.num_prefix_tokens + vit.patch_embed.num_patches
        embedding = count_multiply_adds(vit.patch_embed, vit.in_chans, *vit.patch_embed.img_size)
        plain = embedding + count_uniform_multiply_adds(vit)
        grown = plain
        for pair in self.pairs:
            columns = self.original[f"{pair.out}.weight"]  # (d, n)
            parts = len(pair.sites)
            per_unit = tokens * (parts + 1) * len(columns)  # its rows and its column
            if parts > 1:
                per_unit += 2 * tokens * tokens  # attention scores, and their sum of values
            plain += per_unit * columns.shape[1]
            grown += per_unit * int(state.masks[f"{pair.sites[-1]}.used"].sum())
        return grown / plain

    @classmethod
    def display_masks(cls, state: TaskState, carried: Carried) -> dict[str, Tensor]:
        """Return masks of the units that a task uses, by site."""
        return {
            name.removesuffix(".used"): mask
            for name, mask in state.masks.items()
            if name.endswith(".used")
        }


def _normalise(group: PairGroup, copies: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return scale and shift of the units of a group, (pairs, parts, n) each.

    They are gamma and beta for forward-only units, which come first, and 1 and 0 for normal units.
    Unused units get 0 and 0, so that they are 0 after the activation, too.
    """
    sites = [site for pair in group.pairs for site in pair.sites]
    scale, shift = group.used, torch.zeros_like(group.used)
    if f"{sites[-1]}.gamma" in copies:
        old = len(copies[f"{sites[-1]}.gamma"])
        missing = (0, group.used.shape[1] - old)
        without = group.used[0, :old]  # any values: parts without a site have no forward-only units
        selected = []
        for name, other in (("gamma", scale), ("beta", shift)):
            tensors = [copies.get(f"{site}.{name}", without).to(scale.device) for site in sites]
            selected.append(
                torch.where(group.forward_only, F.pad(torch.stack(tensors), missing), other)
            )
        scale, shift = selected
    shape = (len(group.pairs), -1, group.used.shape[1])
    return scale.view(shape), shift.view(shape)


def find_pairs(backbone: nn.Module) -> list[Pair]:
    """Return the pairs of layers between which units can be added, block by block.

    Raises:
        UserError: If a block has no plain attention or no plain FFN.
    """
    pairs = []
    for i, block in enumerate(backbone.blocks):  # type: ignore[arg-type]
        attention: Any = getattr(block, "attn", None)
        mlp: Any = getattr(block, "mlp", None)
        is_plain = isinstance(attention, Attention) and attention.gate is None
        is_plain = is_plain and isinstance(mlp, Mlp)
        if is_plain:
            norms = (attention.norm, mlp.norm)
            is_plain = all(isinstance(norm, nn.Identity) for norm in norms)
        if not is_plain:
            raise UserError(
                f"block {i} of the backbone has no plain attention and FFN, whose units are "
                "independent of each other, as tfm needs; choose "
                "a plain ViT such as vit_tiny_patch16_224 or deit_small_patch16_224"
            )
        attn = f"blocks.{i}.attn"
        attention_sites = (f"blocks.{i}.qk", None, f"blocks.{i}.v")
        pairs.append(Pair(attn, f"{attn}.qkv", f"{attn}.proj", attention_sites))
        ffn = f"blocks.{i}.mlp"
        pairs.append(Pair(ffn, f"{ffn}.fc1", f"{ffn}.fc2", (f"blocks.{i}.ff",)))
    return pairs
