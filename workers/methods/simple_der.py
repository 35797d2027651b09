"""Simple-DER: a pruned extractor for each task, and distillation of the joint classifier.

A reconstruction.

Li, Zhong, Liu, Wang, Zheng: Preserving Earlier Knowledge in Continual Learning with the Help of All
Previous Feature Extractors, arXiv 2104.13614, 2021.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from pydantic import Field, NonNegativeFloat, PositiveFloat
from torch import Tensor, nn

from workers.data.batch import Batch
from workers.methods.base import ParamGroup, Progress, StepContext
from workers.methods.der import DerSettings
from workers.methods.der_p import PrunedDer
from workers.methods.train_defaults import TrainDefaults
from workers.model.distill import kd_ce
from workers.model.masks import TopK
from workers.model.units import magnitudes, masked_weights


class SimpleDerSettings(DerSettings):
    """Settings of `simple_der`."""

    keep: float = Field(
        0.5,
        gt=0,
        le=1,
        description="share of the units that pruning keeps in each attention head and each "
        "FFN of an extractor",
    )
    prune_after: float = Field(
        0.5,
        ge=0,
        lt=1,
        description="share of the steps after which an extractor is pruned; the remaining "
        "steps train the units that are left",
    )
    distillation: NonNegativeFloat = Field(1.0, description="weight of the distillation loss")
    tau: PositiveFloat = Field(
        2.0,
        description="temperature of the softmax of student and teacher in the distillation loss",
    )


class SimpleDer(PrunedDer[SimpleDerSettings]):
    """DER's L + distillation * KD_ce(tau), with the network before the task as teacher.

    The teacher's outputs are computed by the old classifier W from the features of the frozen
    extractors, without a further forward pass. During `train`, after the share `prune_after` of all
    steps, the units with the smallest weights are pruned permanently: the same number in every
    attention head and in every FFN. The remaining units are trained further. So every extractor has
    the same small size.

    A reconstruction: no code was published. From the paper: all extractors so far are used with a
    new extractor, knowledge is distilled, and each extractor is pruned. Our choices: the loss, the
    selection, number and time of pruned units, and the balanced `finetune` of DER.
    """

    name = "simple_der"
    has_constant_step = True
    family = "expansion"
    keeps = "a pruned extractor"
    paper = (
        "Preserving Earlier Knowledge in Continual Learning with the Help of All Previous "
        "Feature Extractors, 2021 (a reconstruction)"
    )
    train_defaults = TrainDefaults(
        lr=1e-4,
        scratch_lr=1e-3,
        steps={"finetune": {"epochs": 10, "lr": 1e-2, "scratch_lr": 5e-3}},
        source="measured on 25 classes of CIFAR-100 at 64 px: configs/RESULTS.md",
    )
    revision = 2
    Settings = SimpleDerSettings
    per_task = PrunedDer.per_task | {"keep", "prune_after", "distillation", "tau"}
    kept: Tensor

    @classmethod
    def ignored_settings(cls, step: str) -> frozenset[str]:
        ignored = super().ignored_settings(step)
        if step in ("finetune", "herd"):
            ignored |= {"keep", "prune_after", "distillation", "tau"}
        return ignored

    def __init__(self, backbone: Any, settings: SimpleDerSettings, seed: int):
        super().__init__(backbone, settings, seed)
        self.register_buffer("kept", torch.ones(sum(self.sites.values()), dtype=torch.bool))
        # Heads of old tasks as they were before this task. A tuple keeps them out of `parameters`.
        self.before: tuple[nn.Module, ...] = ()

    def begin(self, context: StepContext) -> list[ParamGroup]:
        if context.step == "train" and context.carried is not None:
            # The old heads are copied here, because `super` replaces them by new ones.
            self.load_carried(context.carried)
            self.before = tuple(
                copy.deepcopy(self.heads[name]).requires_grad_(False)
                for name in self.class_slices()
                if name != context.task.name
            )
        return super().begin(context)

    def hard(self) -> Tensor:
        return self.kept

    def program(self, progress: Progress) -> int:
        """Return whether the step is before (-1), at (0) or after (1) the pruning."""
        first = int(self.settings.prune_after * progress.total)
        return min(max(progress.global_step - first, -1), 1)

    def training_weights(self, batch: Batch, progress: Progress) -> dict[str, Tensor]:
        first = int(self.settings.prune_after * progress.total)
        if self.step != "train" or progress.global_step < first:
            return {}
        if progress.global_step == first:
            sizes = magnitudes(self.backbone)
            masks = [self.largest(site, size) for site, size in sizes.items()]
            self.kept.copy_(torch.cat(masks))
        return masked_weights(self.backbone, self.by_site(self.kept))

    def largest(self, site: str, magnitude: Tensor) -> Tensor:
        """Return the mask (n,) of the units of a site to keep, equally many per attention head."""
        vit: Any = self.backbone
        heads = 1 if site.endswith("ff") else vit.blocks[0].attn.num_heads
        chunks = magnitude.chunk(heads)
        return torch.cat([TopK(sizes, self.settings.keep).hard() for sizes in chunks])

    def terms(self, u: Tensor, z: Tensor, batch: Batch) -> dict[str, tuple[float, Tensor]]:
        terms = super().terms(u, z, batch)
        if not self.before:
            return terms
        taught = torch.cat([head(u[:, : -self.dim]) for head in self.before], 1)
        kd = kd_ce(z[:, : taught.shape[1]], taught, self.settings.tau)
        return terms | {"kd": (self.settings.distillation, kd)}
