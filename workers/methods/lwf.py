"""LwF: the whole network is trained, and distillation keeps the outputs of the old heads.

The distillation uses images of the new task.

Li, Hoiem: Learning without Forgetting, ECCV 2016.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from pydantic import ConfigDict, Field, NonNegativeFloat, PositiveFloat
from torch import Tensor
from torch.nn import functional as F

from workers.data.batch import Batch
from workers.methods.base import (
    MethodSettings,
    ParamGroup,
    Progress,
    StepContext,
)
from workers.methods.bases.class_incremental import ClassIncremental
from workers.methods.finetune import restore_network, save_network, weight_groups
from workers.methods.train_defaults import TrainDefaults
from workers.model.distill import Teacher, kd_ce
from workers.storage.taskstate import Carried, TaskState


class LwfSettings(MethodSettings):
    """Settings of `lwf`."""

    model_config = ConfigDict(populate_by_name=True)

    lambda_: NonNegativeFloat = Field(
        1.0, alias="lambda", description="weight of the distillation loss"
    )
    tau: PositiveFloat = Field(
        2.0,
        description="temperature of the softmax of student and teacher in the distillation loss",
    )
    head_first: float = Field(
        0.0,
        ge=0,
        le=1,
        description="share of the steps, at the start, that train the new head alone",
    )


class Lwf(ClassIncremental[LwfSettings]):
    """L = CE(new head) + lambda * sum over old heads of KD_ce(tau), on images of the new task.

    KD_ce is `distill.kd_ce`, with the network before the task as teacher. The old heads, including
    that of a base task, are trained too. In scenario `class` the old heads' outputs form one
    softmax, and the cross-entropy uses only the new outputs. In scenario `domain` one head is
    trained with both losses. Stored per task: the head after its own training. The chain carries
    the weights and the older heads in their latest state.

    Differences from the paper: the first phase, which trains only the new head, is off unless
    `head_first` is set.
    """

    name = "lwf"
    has_constant_step = True
    family = "regularization"
    keeps = "a head"
    paper = "Learning without Forgetting, ECCV 2016"
    train_defaults = TrainDefaults(
        lr=1e-4,
        scratch_lr=1e-3,
        source="measured on seven real tasks at 64 px: configs/RESULTS.md",
    )
    carries = ("weights", "heads")
    needs_states = True  # the head of the previous task comes from its state
    freezes_backbone = False
    may_forget = True
    scenarios = frozenset({"task", "class", "domain"})
    shares_head = True
    Settings = LwfSettings
    penalty_terms: ClassVar[Mapping[str, str]] = {"kd": "lambda"}
    per_task = frozenset({"lambda", "tau", "head_first"})
    later_settings = frozenset({"lambda", "tau"})

    # ---- training --------------------------------------------------------------------------------
    def begin(self, context: StepContext) -> list[ParamGroup]:
        if context.carried is not None:
            self.load_carried(context.carried)
        self.old = [name for name in self.head_names() if name != context.task.name]
        self.teacher = (
            Teacher(self.backbone, {name: self.heads[name] for name in self.old})
            if self.old
            else None
        )
        super().begin(context)
        return self.head_groups(context.optim, self.head_names()) + weight_groups(
            self.backbone, context.optim
        )

    def program(self, progress: Progress) -> bool:
        """Return whether the step is one of the first (`head_first`): only the new head learns."""
        return progress.global_step < self.settings.head_first * progress.total

    def loss(self, batch: Batch, progress: Progress) -> tuple[Tensor, dict[str, Tensor]]:
        assert self.task is not None
        self.head_alone = self.program(progress)
        with torch.set_grad_enabled(not self.head_alone):
            features = self.features(batch.images)
        logits = self.heads[self.task.name](features).float()
        ce = F.cross_entropy(logits, batch.labels if batch.targets is None else batch.targets)
        if self.head_alone or self.teacher is None:
            return ce, {"ce": ce.detach()}
        kd = self.distillation(features, self.teacher.logits(batch.images))
        return ce + self.settings.lambda_ * kd, {"ce": ce.detach(), "kd": kd.detach()}

    def distillation(self, features: Tensor, taught: dict[str, Tensor]) -> Tensor:
        """Return the sum of KD_ce over old heads; in scenario `class` these form one head.

        Args:
            features: Features of the network in training, (b, d).
            taught: Logits of the teacher by task.
        """
        students = [self.heads[name](features) for name in self.old]
        teachers = [taught[name] for name in self.old]
        if self.scenario != "task":
            students, teachers = [torch.cat(students, 1)], [torch.cat(teachers, 1)]
        return torch.stack(
            [kd_ce(z, y, self.settings.tau) for z, y in zip(students, teachers, strict=True)]
        ).sum()

    def after_backward(self) -> None:
        """Remove all gradients except those of the new head, in the steps of `head_first`.

        The optimizer skips a parameter without a gradient: neither weight decay nor momentum
        changes it.
        """
        if self.head_alone:
            assert self.task is not None
            new = {id(p) for p in self.heads[self.task.name].parameters()}
            for p in self.parameters():
                if id(p) not in new:
                    p.grad = None

    def finish(self) -> tuple[TaskState, Carried]:
        return self.state(), Carried(save_network(self, self.old))

    # ---- serving ---------------------------------------------------------------------------------
    def load_carried(self, carried: Carried) -> None:
        """Load the weights, and the older heads in place of those in the tasks' states."""
        restore_network(self, carried.tensors)
