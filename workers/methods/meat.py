"""MEAT: per task, hard masks on image tokens (as attention keys) and FFN weights of a frozen ViT, by Gumbel-softmax.

Xue, Zhang, Song, Song: Meta-attention for ViT-backed Continual Learning, CVPR 2022. Equation numbers are the paper's.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import torch
from pydantic import ConfigDict, Field, NonNegativeFloat, PositiveFloat
from torch import Tensor, nn

from workers.data.draw import Draw
from workers.errors import UserError
from workers.job import DataSettings, Task, TrainSettings
from workers.methods.base import Batch, Method, MethodSettings, Progress, Rates
from workers.model.compact import flops, plan
from workers.model.masked import BlockMasks, mask_sites
from workers.model.masks import GumbelHard
from workers.model.vit import geometry
from workers.taskstate import Carried, TaskState

ADAM_EPS = 1e-15  # at keep probability .9997 the gradients of mask logits are far below Adam's usual 1e-8


class MeatSettings(MethodSettings):
    """The paper's ablation by settings alone. M1 (classifier): token_masks false, ffn_masks off. M2 (tokens without
    drop control): ffn_masks off, alpha 0. M3 (with it): ffn_masks off. M4 (FFN): token_masks false. M5 (all): defaults.
    """

    model_config = ConfigDict(populate_by_name=True)

    lambda_: float = Field(0.9, alias="lambda", ge=0, le=1, description="target share of KEPT tokens (Eq. 10)")
    alpha: NonNegativeFloat = Field(2.0, description="weight of the drop-control loss (Eq. 9); 0 turns it off")
    gamma: PositiveFloat = Field(4.0, description="logits start at +gamma (keep) and -gamma (drop)")
    tau: PositiveFloat = Field(1.0, description="temperature of the Gumbel-softmax")
    token_masks: bool = Field(True, description="mask image tokens as keys and values of attention")
    token_mask_blocks: Literal["all"] | tuple[int, ...] = Field(
        "all", description="blocks with token masks, counted from 0")
    ffn_masks: Literal["weight", "neuron", "off"] = Field(
        "weight", description="mask fc1 and fc2 per weight, or per hidden neuron")
    self_loop: bool = Field(False, description="queries always see themselves: the released code, not the paper")
    mask_lr: PositiveFloat | Literal["auto", "paper"] = Field(
        "auto", description="rate on each logit of the pair; `paper`: .1 * batch / 1024; `auto`: by mask_travel")
    mask_travel: PositiveFloat = Field(
        8.0, description="for mask_lr auto: how far a logit can go over all steps, in distances to the flip")


class Meat(Method):
    """A star: the backbone is shared and frozen, each task leaves packed mask bits and a head.

    Where it differs from the paper: one logit per entry (see GumbelHard); logits start at +-gamma, as in the released
    code (uniform ones would start with half of everything dropped); the learning rate of masks follows from the
    number of steps, because the paper's flips nothing in a short training.
    """

    name = "meat"
    paper = "Meta-attention for ViT-backed Continual Learning, CVPR 2022"
    Settings = MeatSettings
    settings: MeatSettings

    @classmethod
    def check(cls, settings: MethodSettings, train: TrainSettings, data: DataSettings, scenario: str) -> None:
        """`mask_lr: auto` follows from how far Adam can go in a step; SGD's way depends on the gradients."""
        assert isinstance(settings, MeatSettings)
        masked = settings.token_masks or settings.ffn_masks != "off"
        if masked and settings.mask_lr == "auto" and train.optimizer != "adamw":
            raise UserError(f"mask_lr is 'auto' with train.optimizer {train.optimizer!r}: the rate is derived for adamw; use that, or give "
                            "mask_lr a number")

    def __init__(self, backbone: nn.Module, settings: MeatSettings, seed: int):
        super().__init__(backbone, settings, seed)
        self.shape = geometry(backbone)
        depth = self.shape["depth"]
        chosen = range(depth) if settings.token_mask_blocks == "all" else settings.token_mask_blocks
        blocks = tuple(sorted(set(chosen)))
        if any(not 0 <= b < depth for b in blocks):
            raise UserError(f"token_mask_blocks is {list(blocks)}, but the backbone has blocks 0 to {depth - 1}; "
                            "name some of those, or `all`")
        self.token_blocks = blocks if settings.token_masks else ()
        self.sites = mask_sites(backbone, settings.self_loop)
        self.masks: dict[str, GumbelHard] = {}  # of the task in training, by name
        self.loaded: dict[str, tuple[dict[str, Tensor], tuple[int, ...]]] = {}  # task -> masks by name, token blocks
        self.serving: tuple[str, torch.device] | None = None

    def mask_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of every mask that these settings train."""
        shapes: dict[str, tuple[int, ...]] = {}
        if self.token_blocks:
            shapes["tokens"] = (len(self.token_blocks), self.shape["tokens"])
        for i, (fc1, fc2) in enumerate(zip(self.sites.fc1, self.sites.fc2, strict=True)):
            if self.settings.ffn_masks == "weight":
                shapes |= {f"blocks.{i}.fc1": tuple(fc1.weight.shape), f"blocks.{i}.fc2": tuple(fc2.weight.shape)}
            elif self.settings.ffn_masks == "neuron":
                shapes[f"blocks.{i}.neurons"] = (fc1.out_features,)
        return shapes

    # ---- training ----------------------------------------------------------------------------------------------------
    def begin(self, task: Task, step: str, carried: Carried | None, rates: Rates,
              tasks: tuple[Task, ...]) -> list[dict[str, Any]]:
        groups = super().begin(task, step, carried, rates, tasks)
        device = next(self.backbone.parameters()).device
        self.loaded.pop(task.name, None)
        self.serving = None
        self.masks = {name: GumbelHard(shape, self.settings.gamma, self.settings.tau, device)
                      for name, shape in self.mask_shapes().items()}
        self.mask_modules = nn.ModuleList(self.masks.values())  # a dict alone would hide them from state_dict and .to
        if self.masks:
            groups.append({"name": "masks", "params": [m.logits for m in self.masks.values()], "lr": self.rate(rates),
                           "weight_decay": 0.0, "eps": ADAM_EPS})
        return groups

    def rate(self, rates: Rates) -> float:
        """Peak learning rate of u = t1 - t2: twice that of the pair, see GumbelHard. Adam moves an entry by at most the
        rate per step, so `auto` sets rate * mean_rate_steps = mask_travel * 2 gamma: long and short trainings reach
        equally far."""
        if self.settings.mask_lr == "auto":
            return self.settings.mask_travel * 2 * self.settings.gamma / max(rates.mean_rate_steps, 1e-9)
        return 2 * (0.1 * rates.batch_size / 1024 if self.settings.mask_lr == "paper" else self.settings.mask_lr)

    def loss(self, batch: Batch, progress: Progress) -> tuple[Tensor, dict[str, Tensor]]:
        """CE + alpha * L_dc (Eq. 9). Token masks are sampled per image, FFN masks once per forward."""
        self.serving = None
        tokens = self.sample_tokens(batch.draw)
        mine = None if tokens is None else tokens[batch.draw.rows.to(tokens.device)]
        ffn = {name: mask.sample(batch.draw.shared(f"meat.{name}", *mask.logits.shape))
               for name, mask in self.masks.items() if name != "tokens"}
        with self.sites.sampled(self.by_block(mine, ffn, self.token_blocks)):
            ce = self.classification_loss(self.features(batch.images), batch)
        if tokens is None:
            return ce, {"ce": ce.detach()}
        control = drop_control(tokens, self.settings.lambda_)
        return ce + self.settings.alpha * control, {"ce": ce.detach(), "drop_control": control.detach()}

    def sample_tokens(self, draw: Draw) -> Tensor | None:
        """Token masks of the WHOLE global batch, (size, L, n): each rank knows everybody's noise, so the keep ratio
        over the global batch needs no message and does not depend on ranks or accumulation."""
        if not self.token_blocks:
            return None
        everybody = replace(draw, rows=torch.arange(draw.size))
        return self.masks["tokens"].sample(everybody.per_sample("meat.tokens", *self.masks["tokens"].logits.shape))

    def by_block(self, tokens: Tensor | None, ffn: dict[str, Tensor], blocks: tuple[int, ...]) -> list[BlockMasks]:
        """tokens: (b, L, n), its second axis in the order of `blocks`; ffn: masks by name."""
        masks = [BlockMasks(**{kind: ffn.get(f"blocks.{i}.{kind}") for kind in ("fc1", "fc2", "neurons")})
                 for i in range(self.shape["depth"])]
        if tokens is not None:
            for position, block in enumerate(blocks):
                masks[block].tokens = tokens[:, position]
        return masks

    def hard(self) -> dict[str, Tensor]:
        """The boolean masks of the task in training, by name (Eq. 7)."""
        return {name: mask.hard() for name, mask in self.masks.items()}

    def measures(self) -> dict[str, float]:
        """Shares of kept tokens and FFN entries, and of entries that left their initial state `keep`."""
        masks = self.hard()
        tokens, ffn = [m for n, m in masks.items() if n == "tokens"], [m for n, m in masks.items() if n != "tokens"]
        values = {"token_keep": tokens, "ffn_density": ffn}
        shares = {name: _share(some) for name, some in values.items() if some}
        return shares | ({"flipped": 1 - _share(list(masks.values()))} if masks else {})

    def warnings(self) -> list[str]:
        """Masks of a kind that did nothing: tokens nearly always flip under drop control, FFN masks need a rate."""
        said = []
        for kind, name in (("token_keep", "token"), ("ffn_density", "FFN")):
            if self.task is not None and self.measures().get(kind) == 1:
                said.append(f"task {self.task.name!r}: no {name} mask entry left its initial state, so these masks do nothing; "
                            "raise mask_travel or mask_lr, or train for more steps")
        return said

    def finish(self) -> tuple[TaskState, Carried]:
        chosen = self.settings.model_dump(by_alias=True, mode="json")
        meta = {"settings": chosen, "token_blocks": list(self.token_blocks), "grid": list(self.shape["grid"])}
        return self.state(masks={name: m.cpu() for name, m in self.hard().items()}, meta=meta), Carried()

    # ---- serving -----------------------------------------------------------------------------------------------------
    def load(self, state: TaskState) -> None:
        """Keeps the task's masks beside those of other tasks. A base task has none: all ones."""
        super().load(state)
        blocks = tuple(state.meta.get("token_blocks", ()))
        expected = {"tokens": (len(blocks), self.shape["tokens"]), "fc1": tuple(self.sites.fc1[0].weight.shape),
                    "fc2": tuple(self.sites.fc2[0].weight.shape), "neurons": (self.shape["hidden"],)}
        for name, mask in state.masks.items():
            fits = expected.get(name.rsplit(".", 1)[-1])
            if tuple(mask.shape) != fits:
                raise UserError(f"task {state.task!r}: its state has {name} of shape {tuple(mask.shape)}, this backbone "
                                f"needs {fits}; use the backbone and the img_size of its run")
        self.loaded[state.task] = dict(state.masks), blocks
        self.serving = None

    def logits(self, images: Tensor, task: str | None) -> Tensor:
        if task in self.heads.names:
            self.serve(task)
        return super().logits(images, task)

    def serve(self, task: str) -> None:
        """Folds the masks of `task` into the sites: once per switch, but each time for the task in training."""
        wanted = task, next(self.backbone.parameters()).device
        if self.serving == wanted:
            return
        self.sites.fold(self.block_masks(task))
        self.serving = wanted if task in self.loaded else None

    def block_masks(self, task: str) -> list[BlockMasks]:
        """Hard masks per block of a loaded task or of the task in training."""
        masks, blocks = self.loaded[task] if task in self.loaded else (self.hard(), self.token_blocks)
        tokens = masks["tokens"][None] if "tokens" in masks else None
        return self.by_block(tokens, masks, blocks)

    def flops_share(self, state: TaskState) -> float:
        """Multiply-adds that `compact` does with these masks, relative to what it does with none."""
        tokens = state.masks["tokens"][None] if "tokens" in state.masks else None
        masked = self.by_block(tokens, state.masks, tuple(state.meta.get("token_blocks", ())))
        plain = self.by_block(None, {}, ())
        return flops(self.backbone, plan(self.backbone, masked)) / flops(self.backbone, plan(self.backbone, plain))


def drop_control(tokens: Tensor, keep: float) -> Tensor:
    """L_dc = mean over blocks of (lambda - share of kept tokens)^2 (Eq. 10). tokens: 0/1, (b, L, n), no class token."""
    return (keep - tokens.mean(dim=(0, 2))).square().mean()


def _share(masks: list[Tensor]) -> float:
    """Share of ones over several masks."""
    return sum(int(m.sum()) for m in masks) / sum(m.numel() for m in masks)
