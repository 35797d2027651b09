"""MEAT: hard masks per task on image tokens (as attention keys) and FFN weights of a frozen ViT.

The masks are trained by Gumbel-softmax. On a ResNet they act on channels and convolutions.

Xue, Zhang, Song, Song: Meta-attention for ViT-backed Continual Learning, CVPR 2022. Equation
numbers are the paper's.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Annotated, Literal

import torch
from pydantic import BeforeValidator, ConfigDict, Field, NonNegativeFloat, PositiveFloat
from torch import Tensor, nn

from workers.data.batch import Batch
from workers.errors import UserError
from workers.job import ActiveIf, DataSettings, Task, TrainSettings, key_inputs
from workers.methods.base import (
    Method,
    MethodSettings,
    OptimPlan,
    ParamGroup,
    Progress,
    StepContext,
    require_adamw,
)
from workers.methods.train_defaults import TrainDefaults
from workers.model.masks import GumbelHard, compute_share_of_ones
from workers.model.sites import Sites, find_sites
from workers.rng import StepRng
from workers.storage.taskstate import Carried, TaskState

# Adam's eps for mask logits. At keep probability 0.9997 their gradients are far below the usual
# eps, 1e-8. Measured on two tasks of photographs with two seeds: accuracy 81.1 %, with eps 1e-8
# 81.0 %. The other eps changes 1.3 % of the mask bits; a different rounding alone changes 1.8 %.
ADAM_EPS = 1e-15


class MeatSettings(MethodSettings):
    """Settings of MEAT, which cover the paper's ablation.

    M1 (classifier): token_masks false, ffn_masks off. M2 (tokens without drop control): ffn_masks
    off, alpha 0. M3 (with it): ffn_masks off. M4 (FFN): token_masks false. M5 (all): defaults. On a
    ResNet `token_masks` are masks of channels, and `ffn_masks` are masks of convolutions, per
    weight.
    """

    model_config = ConfigDict(populate_by_name=True)

    lambda_: Annotated[float, ActiveIf("alpha", but=(0,))] = Field(
        0.9,
        alias="lambda",
        ge=0,
        le=1,
        description="target share of tokens or channels that are KEPT (Eq. 10)",
    )
    alpha: NonNegativeFloat = Field(
        2.0, description="weight of the drop-control loss (Eq. 9); 0: off"
    )
    gamma: PositiveFloat = Field(
        4.0, description="initial mask logits: +gamma for keep, -gamma for drop"
    )
    tau: PositiveFloat = Field(1.0, description="temperature of the Gumbel-softmax")
    token_masks: Annotated[
        Literal[True, False, "nested", "shared"],
        BeforeValidator(lambda value: True if value == "free" else value),
    ] = Field(
        True,
        description="whether to mask image tokens as keys and values of attention; on a "
        "ResNet: channels inside residual blocks. `free`, as `true`: each block has its own "
        "mask; `nested`: each block keeps a part of the tokens of the block before; `shared`: "
        "one mask for all blocks. With the last two, inference skips more tokens",
    )
    token_mask_blocks: Annotated[
        Literal["all"] | tuple[int, ...], ActiveIf("token_masks", but=(False,))
    ] = Field(
        "all",
        description="indices, from 0, of the blocks with token masks (on a ResNet: channel masks)",
    )
    ffn_masks: Literal["weight", "neuron", "off"] = Field(
        "weight",
        description="masks of fc1 and fc2: `weight`: one value per weight; `neuron`: per "
        "hidden neuron; `off`; on a ResNet `weight` masks the blocks' convolutions",
    )
    self_loop: Annotated[bool, ActiveIf("token_masks", but=(False,))] = Field(
        False,
        description="whether a query always attends to its own token, as in the released code "
        "but not in the paper",
    )
    mask_lr: PositiveFloat | Literal["auto", "paper"] = Field(
        "auto",
        description="peak learning rate of each mask logit; `paper`: 0.1 * batch size / 1024; "
        "`auto`: derived from mask_travel and the number of steps",
    )
    mask_travel: Annotated[PositiveFloat, ActiveIf("mask_lr", ("auto",))] = Field(
        8.0,
        description="for `mask_lr: auto`: largest distance that Adam can move a logit over "
        "all steps, in units of its initial distance to the decision boundary",
    )


class Meat(Method[MeatSettings]):
    """A star: the backbone is shared and frozen, each task stores packed mask bits and a head.

    Differences from the paper: one logit per entry (see GumbelHard); logits start at +-gamma, as in
    the released code (with uniform logits half of all entries would start dropped); the learning
    rate of masks follows from the number of steps, because the paper's rate flips no entry in a
    short training.

    EVA-02, DINOv3 and BEiT have the same masks as a ViT; a gated FFN packs its gates and values in
    fc1. On these backbones masked parts are still computed, because `compact` does not support
    them.

    On a ResNet channels replace tokens and convolutions replace the FFN; see `ChannelSites`. This
    is our reading of the paper's figure 4, which transfers the method to CNNs: by default both
    kinds are trained, as on a ViT.
    """

    name = "meat"
    revision = 2
    has_constant_step = True
    family = "masks"
    keeps = "bits, head"
    paper = "Meta-attention for ViT-backed Continual Learning, CVPR 2022"
    train_defaults = TrainDefaults(
        lr=2e-3,
        source="measured on seven real tasks at 64 px: configs/RESULTS.md",
    )
    Settings = MeatSettings
    per_task = frozenset({"lambda", "alpha", "gamma", "tau", "mask_lr", "mask_travel"})

    @classmethod
    def validate(
        cls, settings: MeatSettings, train: TrainSettings, data: DataSettings, scenario: str
    ) -> None:
        """Check that `mask_lr: auto` is used with Adam.

        The automatic rate is derived from the largest step of Adam. The steps of SGD depend on the
        gradients.
        """
        masked = settings.token_masks or settings.ffn_masks != "off"
        if masked:
            require_adamw(settings.mask_lr, train)

    @classmethod
    def check_backbone(
        cls, settings: MeatSettings, backbone: nn.Module, tasks: tuple[Task, ...] = ()
    ) -> None:
        _sites(backbone, settings)  # raises `UserError` if the backbone cannot have these masks

    def __init__(self, backbone: nn.Module, settings: MeatSettings, seed: int):
        super().__init__(backbone, settings, seed)
        # Names and shapes of masks: `gates` of tokens or channels, `entries` of weights or neurons.
        self.sites = _sites(backbone, settings)
        self.masks: dict[str, GumbelHard] = {}  # name -> mask of the task in training
        self.loaded: dict[str, dict[str, Tensor]] = {}  # finished task -> boolean masks by name

    def mask_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return name -> shape of every mask that these settings train."""
        return self.sites.gates | self.sites.entries

    # ---- training --------------------------------------------------------------------------------
    def begin(self, context: StepContext) -> list[ParamGroup]:
        groups = super().begin(context)
        device = self.device
        self.loaded.pop(context.task.name, None)
        self.masks = {
            name: GumbelHard(shape, self.settings.gamma, self.settings.tau, device)
            for name, shape in self.mask_shapes().items()
        }
        if self.settings.token_masks == "shared":
            for name, (_, tokens) in self.sites.gates.items():
                self.masks[name] = GumbelHard(
                    (1, tokens), self.settings.gamma, self.settings.tau, device
                )
        # Registers the masks for `state_dict` and `to`, which ignore the dict.
        self.mask_modules = nn.ModuleList(self.masks.values())
        if self.masks:
            groups.append(
                {
                    "name": "masks",
                    "params": [m.logits for m in self.masks.values()],
                    "lr": self.rate(context.optim),
                    "weight_decay": 0.0,
                    "eps": ADAM_EPS,
                }
            )
        return groups

    def rate(self, optim: OptimPlan) -> float:
        """Return the peak learning rate of the mask logits u = t1 - t2 (see `GumbelHard`).

        A number in `mask_lr`, or `paper`, is the rate of t1 and t2; the rate of u is twice that.
        Adam moves an entry by at most the rate per step, so `auto` sets rate * full_rate_steps =
        mask_travel * 2 gamma: long and short trainings reach equally far.
        """
        if self.settings.mask_lr == "auto":
            return (
                self.settings.mask_travel
                * 2
                * self.settings.gamma
                / max(optim.full_rate_steps, 1e-9)
            )
        return 2 * (
            0.1 * optim.batch_size / 1024
            if self.settings.mask_lr == "paper"
            else self.settings.mask_lr
        )

    def loss(self, batch: Batch, progress: Progress) -> tuple[Tensor, dict[str, Tensor]]:
        """Return CE + alpha * L_dc (Eq. 9).

        Masks of tokens or channels are sampled per image, masks of weights and neurons once per
        forward pass.
        """
        gates = self.sample_gates(batch.draw)
        masks = {name: gate[batch.draw.positions_on_device] for name, gate in gates.items()}
        masks |= {
            name: self.masks[name].sample(batch.draw.shared(f"meat.{name}", *shape))
            for name, shape in self.sites.entries.items()
        }
        self.active_task, self.weight_overrides = None, self.sites.weights(masks)
        with self.sites.sampled(masks):
            ce = self.classification_loss(self.features(batch.images), batch)
        if not gates:
            return ce, {"ce": ce.detach()}
        control = drop_control([*gates.values()], self.settings.lambda_)
        return ce + self.settings.alpha * control, {
            "ce": ce.detach(),
            "drop_control": control.detach(),
        }

    def sample_gates(self, draw: StepRng) -> dict[str, Tensor]:
        """Sample masks of tokens or channels of the WHOLE global batch, (size, *shape).

        Each rank knows the noise of all ranks, so the keep ratio over the global batch needs no
        communication and does not depend on ranks or accumulation.
        """
        gates: dict[str, Tensor] = {}
        for name in self.sites.gates:
            mask = self.masks[name]
            gates[name] = self.tie(
                name, mask.sample(draw.every_sample(f"meat.{name}", *mask.logits.shape))
            )
        return gates

    def hard(self) -> dict[str, Tensor]:
        """Return the boolean masks of the task in training, without noise, by name (Eq. 7)."""
        return {name: self.tie(name, mask.hard()) for name, mask in self.masks.items()}

    def tie(self, name: str, mask: Tensor) -> Tensor:
        """Compute the masks of all blocks from a trained mask, according to `token_masks`.

        Args:
            name: Name of the mask; only gates are tied.
            mask: (..., blocks, n), or (..., 1, n) of `shared`; 0/1 floats or booleans.

        Returns:
            (..., blocks, n). With `nested`, the mask of a block is the product of the trained masks
            up to this block.
        """
        if name in self.sites.gates and self.settings.token_masks == "shared":
            return mask.expand(*mask.shape[:-2], *self.sites.gates[name]).contiguous()
        if name in self.sites.gates and self.settings.token_masks == "nested":
            return torch.stack([*accumulate(mask.unbind(-2), torch.mul)], dim=-2)
        return mask

    def metrics(self) -> dict[str, float]:
        """Return the share of kept entries for each kind of mask, and `flipped`.

        The kinds are `token_keep` and `ffn_density` (on a ResNet `channel_keep` and
        `convolution_density`). `flipped` is the share of all entries that left their initial state,
        in which all are kept.
        """
        masks = self.hard()
        gate, entry = (kind.lower() for kind in self.sites.kinds)
        values = {f"{gate}_keep": self.sites.gates, f"{entry}_density": self.sites.entries}
        if not masks:
            return {}
        shares: dict[str, float] = {}
        for metric, names in values.items():
            if names:
                shares[metric] = compute_share_of_ones([masks[name] for name in names])
        shares["flipped"] = 1 - compute_share_of_ones(list(masks.values()))
        return shares

    def warnings(self) -> list[str]:
        """Warn about each kind of mask if all its entries are in their initial state.

        Some tokens or channels nearly always flip under drop control; masks of weights need a high
        enough rate.
        """
        masks = self.hard()
        if self.task is None or not masks:
            return []
        warnings: list[str] = []
        mask_names = (self.sites.gates, self.sites.entries)
        for kind, names in zip(self.sites.kinds, mask_names, strict=True):
            if names and compute_share_of_ones([masks[name] for name in names]) == 1:
                warnings.append(
                    f"task {self.task.name!r}: no {kind} mask entry left its initial state, so "
                    "these masks do nothing; raise mask_travel or mask_lr, or train for more steps"
                )
        return warnings

    def finish(self) -> tuple[TaskState, Carried]:
        meta = {"settings": key_inputs(self.settings), **self.sites.meta}
        return self.state(
            masks={name: m.cpu() for name, m in self.hard().items()}, meta=meta
        ), Carried()

    # ---- serving ---------------------------------------------------------------------------------
    def load_task(self, state: TaskState) -> None:
        """Load the masks of a finished task. A base task has no masks."""
        super().load_task(state)
        shapes = self.mask_shapes() if state.method == self.name else {}
        for name in {**shapes, **state.masks}:
            shape = tuple(state.masks[name].shape) if name in state.masks else None
            if shape != shapes.get(name):
                raise UserError(
                    f"task {state.task!r}: its state has {name} of shape {shape}, this backbone "
                    f"and these settings need {shapes.get(name)}; "
                    "use the backbone, the img_size and the settings of its run"
                )
        blocks = self.sites.meta["token_blocks"]
        if shapes and state.meta.get("token_blocks") != blocks:
            raise UserError(
                f"task {state.task!r}: its state has {self.sites.kinds[0]} masks for blocks "
                f"{state.meta.get('token_blocks')}, these settings "
                f"have them in {blocks}; use token_mask_blocks of its run"
            )
        self.loaded[state.task] = dict(state.masks)

    def serving_weights(self, task: str) -> dict[str, Tensor]:
        """Apply the token masks to the network's attention, and return the masked weights.

        Modules without masked entries compute exactly as in timm.
        """
        return self.sites.folded(self.hard_masks(task))

    def hard_masks(self, task: str) -> dict[str, Tensor]:
        """Return the masks of a loaded task or of the task in training, by name."""
        return self.loaded[task] if task in self.loaded else self.hard()

    def compact(self, task: str) -> nn.Module:
        """Return a module images -> logits of a task that computes only the unmasked parts."""
        return self.sites.compact(self.hard_masks(task), self.heads[task])

    def flops_share(self, state: TaskState) -> float:
        """Return the multiply-adds of `compact` with these masks, relative to no masks."""
        return self.sites.flops_share(state.masks)


def _sites(backbone: nn.Module, settings: MeatSettings) -> Sites:
    sites = find_sites(
        backbone,
        settings.token_mask_blocks if settings.token_masks else (),
        settings.ffn_masks,
        settings.self_loop,
    )
    if isinstance(settings.token_masks, str) and sites.kinds[0] != "token":
        raise UserError(
            f"token_masks is {settings.token_masks!r}, which relates the masks of tokens in "
            f"different blocks, but a {type(backbone).__name__} has masks of {sites.kinds[0]}s, "
            "and each block has its own; choose `free`, or a ViT"
        )
    return sites


def drop_control(gates: list[Tensor], keep: float) -> Tensor:
    """Return L_dc = mean over layers of (lambda - share of kept tokens or channels)^2 (Eq. 10).

    Args:
        gates: 0/1 tensors (b, layers, n) without the class token, or (b, n) of a single layer.
        keep: The target share lambda.
    """
    shares = torch.cat([gate.mean(dim=(0, -1)).reshape(-1) for gate in gates])
    return (keep - shares).square().mean()
