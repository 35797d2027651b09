"""TFM (ternary feature masks): hidden layers grow with every task; what earlier tasks learned is
used, renormalised, and never changed.

Masana, Tuytelaars, van de Weijer: Ternary Feature Masks: zero-forgetting for task-incremental
learning, CVPR Workshops 2021. A RECONSTRUCTION: no code was ever released, and what is not in the
abstract is ours.

Axes: parts (q, k, v of an attention; one of an FFN), n units, d width of the residual stream.
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
from workers.model.compact import multiply_adds
from workers.model.context import uniform_multiply_adds
from workers.storage.taskstate import Carried, TaskState

ALIGNED = 8  # new FFN units come in multiples of this, which matrix products like
NORM = (".gamma", ".beta")  # at the end of the names of what renormalises a site
WEIGHTS = "weights/"  # in front of a parameter's name: the backbone as the first task left it

Units = tuple[
    Tensor, Tensor, Tensor
]  # rows that make them (parts, n, d), their biases (parts, n), columns that read them (d, n)


class TfmSettings(MethodSettings):
    growth: float = Field(
        0.1,
        ge=0,
        le=1,
        description="new FFN units of a block per task, as a share of the backbone's; up to a "
        "multiple of 8",
    )
    heads_every: NonNegativeInt = Field(
        0,
        description="each attention gets a new head at every so many tasks, from the first; 0: "
        "never",
    )
    norm_lr: PositiveFloat = Field(
        1e-2,
        description="peak learning rate of gamma and beta, which start at 1 and 0, far above the "
        "scale of weights",
    )
    first: Literal["adapted", "trained"] = Field(
        "adapted",
        description="`adapted`: the backbone's units are frozen from the start; `trained`: the "
        "first task trains the whole backbone",
    )


@dataclass(frozen=True)
class Pair:
    """Two linear layers with units between them. `sites`: whose normalisation acts on each part of
    the rows of `into`."""

    name: str
    into: str
    out: str
    sites: tuple[str | None, ...]


class Tfm(Method[TfmSettings]):
    """A unit is, for a task, 0 unused (it came later), 1 forward-only (an earlier task learned it:
    used and frozen), or 2 normal (new: used and trained). Forward-only units get a scale and a
    shift per task: y <- gamma y + beta, folded into the rows in effect. New units read the residual
    stream and write to it, so no weight leads from a new unit to an old one, and what is left out
    for an older task is all that came later. Their columns start at 0: a task starts from what
    there is.

    Sites per block: `qk` and `v` (channels of the attention), `ff` (hidden units). Of q and k only
    q is renormalised: attention sees their product, where a scale of k is one of q, and a shift of
    k adds the same to all keys. Layer norms, embeddings and the biases of the two layers that write
    to the residual stream belong to all tasks and stay frozen. Stored per task: two bits per unit
    (`used`, `own`: trained by this task), gamma and beta of forward-only units, the head. Carried:
    the rows, biases and columns that tasks added; with `first: trained` also the backbone as the
    first task left it.
    """

    name = "tfm"
    paper = (
        "Ternary Feature Masks: zero-forgetting for task-incremental learning, CVPR Workshops 2021"
    )
    needs_vit = True
    carries = ("units",)
    Settings = TfmSettings
    per_task = frozenset({"growth", "norm_lr"})

    def __init__(self, backbone: nn.Module, settings: TfmSettings, seed: int):
        super().__init__(backbone, settings, seed)
        self.pairs = pairs_of(backbone)
        self.original = dict(backbone.named_parameters())
        self.shared: dict[str, Tensor] = {}  # what earlier tasks left: added units by pair, weights
        self.new: dict[str, nn.Parameter] = {}  # what the task in training trains beside its head
        self.masks: dict[str, Tensor] = {}  # of the task in training
        self.loaded: dict[str, TaskState] = {}

    # ---- training --------------------------------------------------------------------------------
    def begin(self, context: StepContext) -> list[ParamGroup]:
        groups = super().begin(context)
        self.loaded.pop(context.task.name, None)
        self.load_carried(context.carried or Carried())
        self.position = context.carried.meta["tasks"] if context.carried else 0
        whole = self.settings.first == "trained" and context.carried is None
        start = (
            {f"{WEIGHTS}{name}": p.detach().clone() for name, p in self.original.items()}
            if whole
            else {}
        )
        for pair in self.pairs:
            rows, bias, columns = self.units(pair)
            old, added = columns.shape[1], 0 if whole else self.growth(pair)
            if added:
                noise = torch.randn(rows.shape[0], added, rows.shape[2]) * float(rows.std())
                start |= {
                    f"{pair.name}.rows": noise.to(rows),
                    f"{pair.name}.bias": bias.new_zeros(len(bias), added),
                    f"{pair.name}.columns": columns.new_zeros(len(columns), added),
                }
            for site in filter(None, pair.sites):
                self.masks[f"{site}.used"] = torch.ones(
                    old + added, dtype=torch.bool, device=self.device
                )
                self.masks[f"{site}.own"] = torch.arange(old + added, device=self.device) >= (
                    0 if whole else old
                )
                if not whole:
                    start |= {
                        f"{site}.gamma": bias.new_ones(old),
                        f"{site}.beta": bias.new_zeros(old),
                    }
        self.new = {name: nn.Parameter(tensor) for name, tensor in start.items()}
        # a dict alone would hide them from state_dict and .to
        self.trained = nn.ParameterList(self.new.values())
        kinds: dict[str, list[nn.Parameter]] = {"units": [], "units.exempt": [], "norm": []}
        for name, p in self.new.items():
            exempt = p.ndim == 1 or name.endswith((".bias", "cls_token", "pos_embed"))
            kinds["norm" if name.endswith(NORM) else "units.exempt" if exempt else "units"].append(
                p
            )
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
        """How many units the task in training adds between the two layers."""
        if len(pair.sites) == 1:
            return (
                math.ceil(
                    self.settings.growth * self.original[f"{pair.into}.weight"].shape[0] / ALIGNED
                )
                * ALIGNED
            )
        every, attention = self.settings.heads_every, self.backbone.get_submodule(pair.name)
        return attention.head_dim if every and self.position % every == 0 else 0  # type: ignore[return-value]

    def training_weights(self, batch: Batch, progress: Progress) -> dict[str, Tensor]:
        return self.in_effect(self.masks, self.new)

    def metrics(self) -> dict[str, float]:
        """How far the normalisation is from doing nothing: mean |gamma - 1| over all forward-only
        units."""
        scales = [p.detach() for name, p in self.new.items() if name.endswith(".gamma")]
        return {"gamma_moved": float((torch.cat(scales) - 1).abs().mean())} if scales else {}

    def finish(self) -> tuple[TaskState, Carried]:
        copies = {name: p.detach().clone() for name, p in self.new.items() if name.endswith(NORM)}
        handed = {name: t.clone() for name, t in self.shared.items()}
        for name, p in self.new.items():
            if name not in copies:
                handed[name] = (
                    torch.cat([handed[name], p.detach()], 1)
                    if name in handed
                    else p.detach().clone()
                )
        return self.state(
            masks={name: m.cpu() for name, m in self.masks.items()}, copies=copies
        ), Carried(handed, {"tasks": self.position + 1})

    # ---- weights in effect -----------------------------------------------------------------------
    def weight(self, name: str) -> Tensor | None:
        """A parameter of the backbone as all tasks see it; None for a bias that the layer does not
        have."""
        return self.new.get(
            WEIGHTS + name, self.shared.get(WEIGHTS + name, self.original.get(name))
        )

    def units(self, pair: Pair) -> Units:
        """All units between two layers: the backbone's, those that each earlier task added, those
        of the task in training."""
        rows, bias, columns = (
            self.weight(name)
            for name in (f"{pair.into}.weight", f"{pair.into}.bias", f"{pair.out}.weight")
        )
        assert rows is not None
        assert columns is not None
        bias = rows.new_zeros(len(rows)) if bias is None else bias
        found = [
            (rows.view(len(pair.sites), -1, rows.shape[1]), bias.view(len(pair.sites), -1), columns)
        ]
        found += [
            (t[f"{pair.name}.rows"], t[f"{pair.name}.bias"], t[f"{pair.name}.columns"])
            for t in (self.shared, self.new)
            if f"{pair.name}.rows" in t
        ]
        rows, bias, columns = (torch.cat(t, 1) for t in zip(*found, strict=True))
        return rows, bias, columns

    def in_effect(
        self, masks: Mapping[str, Tensor], copies: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """What stands in for the backbone's parameters under a task's masks, gamma and beta;
        without the units that came later."""
        found = {
            name: t
            for name, own in self.original.items()
            if (t := self.weight(name)) is not None and t is not own
        }
        for pair in self.pairs:
            rows, bias, columns = self.units(pair)
            width = len(masks[f"{pair.sites[-1]}.used"])
            if width > columns.shape[1]:
                raise UserError(
                    f"{pair.name}: a task's state has {width} units, the carried weights have "
                    f"{columns.shape[1]}; use those that this "
                    "task or a later one handed on"
                )
            if width < columns.shape[1]:
                # bit for bit as if nothing had come later
                rows, bias, columns = (t[:, :width].contiguous() for t in (rows, bias, columns))
            scale, shift = (
                torch.stack(t)
                for t in zip(
                    *(_normalisation(site, masks, copies, bias[0]) for site in pair.sites),
                    strict=True,
                )
            )
            found |= {
                f"{pair.into}.weight": (rows * scale[..., None]).flatten(0, 1),
                f"{pair.into}.bias": (bias * scale + shift).flatten(),
                f"{pair.out}.weight": columns,
            }
        return found

    def features(self, images: Tensor) -> Tensor:
        self.split_heads(self.weight_overrides)
        try:
            return super().features(images)
        finally:
            self.split_heads({})

    def split_heads(self, weights: dict[str, Tensor]) -> None:
        """timm's attention splits channels into heads by numbers of its own: here they become those
        of `weights`, else of the backbone."""
        for pair in self.pairs:
            if len(pair.sites) > 1:
                attention: Any = self.backbone.get_submodule(pair.name)
                attention.attn_dim = weights.get(
                    f"{pair.out}.weight", self.original[f"{pair.out}.weight"]
                ).shape[1]
                attention.num_heads = attention.attn_dim // attention.head_dim

    # ---- serving ---------------------------------------------------------------------------------
    def load_carried(self, carried: Carried) -> None:
        """From here on nothing is in training: what a task in training added is a part of what it
        handed on."""
        super().load_carried(carried)
        self.shared, self.new, self.masks = dict(carried.tensors), {}, {}

    def load_task(self, state: TaskState) -> None:
        """A base task has no masks: it is served by the backbone itself."""
        super().load_task(state)
        self.loaded[state.task] = state

    def serving_weights(self, task: str) -> dict[str, Tensor]:
        if task not in self.loaded:
            return self.in_effect(self.masks, self.new)
        state = self.loaded[task]
        return self.in_effect(state.masks, state.copies) if state.masks else {}

    def train(self, mode: bool = True) -> Tfm:
        """Where the first task trains the whole backbone, stochastic depth acts on it."""
        super().train(mode)
        self.backbone.train(mode and any(name.startswith(WEIGHTS) for name in self.new))
        return self

    # ---- bookkeeping -----------------------------------------------------------------------------
    def flops_share(self, state: TaskState) -> float:
        """Multiply-adds of the patch embedding and the blocks at this task's widths, relative to
        the backbone's."""
        vit: Any = self.backbone
        tokens = vit.num_prefix_tokens + vit.patch_embed.num_patches
        embedding = multiply_adds(vit.patch_embed, vit.in_chans, *vit.patch_embed.img_size)
        plain = grown = embedding + uniform_multiply_adds(vit)
        for pair in self.pairs:
            columns, parts = self.original[f"{pair.out}.weight"], len(pair.sites)
            # of one unit: rows, column, attention
            each = tokens * ((parts + 1) * len(columns) + (2 * tokens if parts > 1 else 0))
            plain += each * columns.shape[1]
            grown += each * int(state.masks[f"{pair.sites[-1]}.used"].sum())
        return grown / plain

    @classmethod
    def display_masks(cls, state: TaskState, carried: Carried) -> dict[str, Tensor]:
        """The units that a task uses, by site."""
        return {
            name.removesuffix(".used"): mask
            for name, mask in state.masks.items()
            if name.endswith(".used")
        }


def _normalisation(
    site: str | None, masks: Mapping[str, Tensor], copies: Mapping[str, Tensor], like: Tensor
) -> tuple[Tensor, Tensor]:
    """Scale and shift of the units of a site, (n,) each: gamma and beta of forward-only units, 1
    and 0 of normal ones, 0 and 0 of those that are not used, which are then 0 after the activation
    too. Forward-only units stand in front."""
    kept, shift = torch.ones_like(like), torch.zeros_like(like)
    if site is None:
        return kept, shift
    used, own = masks[f"{site}.used"].to(like.device), masks[f"{site}.own"].to(like.device)
    kept = kept * used
    if f"{site}.gamma" not in copies:
        return kept, shift
    gamma, beta = (copies[f"{site}.{kind}"].to(like.device) for kind in ("gamma", "beta"))
    missing = (0, len(like) - len(gamma))
    return torch.where(used & ~own, F.pad(gamma, missing), kept), torch.where(
        used & ~own, F.pad(beta, missing), shift
    )


def pairs_of(backbone: nn.Module) -> list[Pair]:
    """The layers that units can be put between, block by block. Raises UserError where a block is
    no plain one."""
    found = []
    for i, block in enumerate(backbone.blocks):  # type: ignore[arg-type]
        attention: Any = getattr(block, "attn", None)
        mlp: Any = getattr(block, "mlp", None)
        plain = isinstance(attention, Attention) and isinstance(mlp, Mlp) and attention.gate is None
        if not plain or not all(
            isinstance(norm, nn.Identity) for norm in (attention.norm, mlp.norm)
        ):
            raise UserError(
                f"block {i} of the backbone has no plain attention and FFN, whose units are "
                "independent of each other, as tfm needs; choose "
                "a plain ViT such as vit_tiny_patch16_224 or deit_small_patch16_224"
            )
        found += [
            Pair(
                f"blocks.{i}.attn",
                f"blocks.{i}.attn.qkv",
                f"blocks.{i}.attn.proj",
                (f"blocks.{i}.qk", None, f"blocks.{i}.v"),
            ),
            Pair(
                f"blocks.{i}.mlp", f"blocks.{i}.mlp.fc1", f"blocks.{i}.mlp.fc2", (f"blocks.{i}.ff",)
            ),
        ]
    return found
