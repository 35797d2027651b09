"""SLCA: a slowly trained backbone, and heads that are aligned on Gaussians of all classes.

Zhang, Wang, Kang, Chen, Wei: SLCA: Slow Learner with Classifier Alignment for Continual Learning on
a Pre-trained Model, ICCV 2023.
"""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from workers.job import ActiveIf
from workers.methods.base import MethodSettings, ParamGroup, Step, StepContext
from workers.methods.bases.alignment import ALIGN, AlignmentPlan, AlignsHeads
from workers.methods.finetune import collect_tensors, weight_groups
from workers.methods.train_defaults import TrainDefaults
from workers.storage.taskstate import Carried, TaskState

BACKBONE = "backbone"


class SlcaSettings(MethodSettings):
    """Settings of `slca`."""

    backbone_rate: PositiveFloat = Field(
        0.01, description="learning rate of the backbone, relative to the head's"
    )
    align_epochs: NonNegativeInt = Field(
        5, description="epochs of the alignment; 0: heads stay as they were trained"
    )
    align_draws: Annotated[PositiveInt, ActiveIf("align_epochs", but=(0,))] = Field(
        256,
        description="features drawn of each class in an epoch of the alignment, and in its batches",
    )
    align_lr: Annotated[PositiveFloat, ActiveIf("align_epochs", but=(0,))] = Field(
        0.01, description="initial learning rate of the alignment (SGD)"
    )
    tau: Annotated[PositiveFloat, ActiveIf("align_epochs", but=(0,))] = Field(
        0.1,
        description="temperature of the logits in the alignment, after a division by their mean "
        "length over tasks; 0.05 in the paper for Cars",
    )


class Slca(AlignsHeads[SlcaSettings]):
    """A chain of three steps: `train`, `statistics`, `align`.

    - `train` trains the backbone and the task's new head with the cross-entropy over the task's own
      classes. The learning rate of the backbone is `backbone_rate` times that of the head.
    - `statistics` fits a Gaussian to the features of each class under the current network. The
      Gaussian is never updated.
    - `align`, from the second task on: all heads are trained on features drawn from N(rho_c mu_c,
      Sigma_c + 1e-4 I), with rho_c = 0.9 + 0.1 (t_c + 1) / (t + 1) for a class of task t_c. Tasks
      count from 0, and t is the newest. The loss is the cross-entropy of z / (nu tau). nu is the
      mean over tasks s of |z_s|, where z_s are the logits of task s.

    Each alignment starts from the heads as they were trained, and training never uses an aligned
    head, so the chain carries both. Stored per task: its aligned head.

    Differences from the released code: t_c is the task of the class, while the code computes it by
    a division by the size of the newest task; heads of earlier tasks have no weight decay while a
    task trains.
    """

    name = "slca"
    has_constant_step = True
    family = "class statistics"
    keeps = "a head"
    paper = (
        "SLCA: Slow Learner with Classifier Alignment for Continual Learning on a Pre-trained "
        "Model, ICCV 2023"
    )
    train_defaults = TrainDefaults(
        lr=1e-2,
        optimizer="sgd",
        weight_decay=5e-4,
        warmup=0.0,
        epochs=20,
        batch_size=128,
        source="released code of SLCA on CIFAR-100, with a cosine for its step at epoch 18 of 20",
    )
    Settings = SlcaSettings
    steps = (
        Step("train"),
        Step("statistics", trains=False),
        Step(ALIGN, trains=False, measured=True, later=True),
    )
    carries = ("weights", *AlignsHeads.carries)
    scenarios = frozenset({"class"})
    freezes_backbone = False
    per_task = frozenset({"backbone_rate", "align_epochs", "align_draws", "align_lr", "tau"})

    @classmethod
    def steps_for(cls, settings: SlcaSettings, position: int) -> tuple[Step, ...]:
        """Return the steps; a base task has only the step `statistics`."""
        return cls.steps if position >= 0 else cls.steps[1:2]

    @classmethod
    def ignored_settings(cls, step: str) -> frozenset[str]:
        used = {"train": {"backbone_rate"}, "statistics": set()}
        return frozenset(cls.Settings.model_fields) - used.get(step, cls.per_task)

    # ---- training --------------------------------------------------------------------------------
    def begin(self, context: StepContext) -> list[ParamGroup]:
        groups = super().begin(context)
        settings = self.settings
        if context.step == "statistics":
            self.fit_classes(context)
        elif context.step == ALIGN:
            draws, epochs, lr = settings.align_draws, settings.align_epochs, settings.align_lr
            self.align(AlignmentPlan(epochs, draws, draws, lr, settings.tau, shrinks=True))
        else:
            weights = weight_groups(self.backbone, context.optim)
            for group in weights:
                group["lr"] = context.optim.lr * settings.backbone_rate
            return groups + weights
        return []

    def finish(self) -> tuple[TaskState, Carried]:
        carried = self.carry_heads()
        backbone = collect_tensors(self.backbone).items()
        carried.tensors.update({f"{BACKBONE}/{key}": tensor for key, tensor in backbone})
        return self.state(), carried

    # ---- serving ---------------------------------------------------------------------------------
    @torch.no_grad()
    def load_carried(self, carried: Carried) -> None:
        super().load_carried(carried)
        backbone = {}
        for path, tensor in carried.tensors.items():
            owner, _, name = path.partition("/")
            if owner == BACKBONE:
                backbone[name] = tensor
        self.backbone.load_state_dict(backbone)
