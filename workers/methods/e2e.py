"""E2E: distillation from every earlier task, then fine-tuning on a balanced set of images.

The balanced set has as many images of each new class as of each old one.

Castro, Marin-Jimenez, Guil, Schmid, Alahari: End-to-End Incremental Learning, ECCV 2018.
"""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import Field, PositiveFloat
from torch import Tensor

from workers.data.batch import Batch
from workers.job import Neutral
from workers.methods.base import ParamGroup, Progress, Step, StepContext
from workers.methods.bases.rehearsal import Rehearsal, RehearsalSettings
from workers.methods.train_defaults import TrainDefaults
from workers.model.distill import Teacher, kd_bce, kd_ce


class E2eSettings(RehearsalSettings):
    """Settings of `e2e`."""

    selection: Literal["herding", "rebuffi", "closest", "random"] = Field(
        "closest",
        description="how exemplars are chosen: `herding`: iCaRL's Algorithm 4; `rebuffi`: "
        "herding as in iCaRL's released code; `closest`: nearest to the class mean; `random`: "
        "uniformly",
    )
    tau: PositiveFloat = Field(
        2.0,
        description="temperature of the softmax of student and teacher in the distillation loss",
    )
    kd: Literal["bce", "ce"] = Field(
        "bce",
        description="distillation loss of a task's softmax outputs: `bce`: binary "
        "cross-entropy of each class; `ce`: cross-entropy over the classes",
    )
    over_tasks: Annotated[Literal["mean", "sum"], Neutral("mean")] = Field(
        "mean",
        description="whether the distillation losses of the tasks are averaged, or summed as in "
        "the paper, so that their weight grows with the number of tasks",
    )
    noise: bool = Field(
        False,
        description="whether to add Gaussian noise of variance 0.3 / (1 + iteration)^0.55 to "
        "all gradients, as in the paper",
    )


class E2e(Rehearsal[E2eSettings]):
    """L = CE over all classes + mean (or sum, see `over_tasks`) over tasks s of KD_s.

    KD_s is the cross-entropy (see `kd`) of softmax(z_s / tau) with the teacher's
    softmax(y_s / tau) as the target, over the classes of s only. z and y are the logits of the
    network and the teacher. M = `memory` is the number of exemplars. O_t is the number of classes
    before task t, and A_t this number with the classes of t.

    - `train`: the teacher is the network before the task, and s runs over earlier tasks.
    - `balance` selects as many images of each new class as there are exemplars of each old one:
      floor(M / O_t), or `per_class`.
    - `finetune` trains all weights again on these images and the old exemplars. The teacher is the
      network after `train`, and s runs over all tasks.
    - `herd` creates the memory for the next task: floor(M / A_t), or `per_class`, exemplars of each
      class. Exemplars of new classes are selected again, with the network after `finetune`.

    By default `finetune` has a tenth of the learning rate of `train`, as in the paper. A `train.lr`
    in the config applies to both steps unless `steps` sets another for `finetune`. The paper has
    `steps: {finetune: {epochs: 40, lr: 0.01}}` with `train: {epochs: 60, lr: 0.1}`.

    The paper's loss is `kd: ce` with `over_tasks: sum`. The defaults are those of public code: the
    mean over tasks and, with `kd: bce`, over classes. Other differences from the paper: gradients
    are noisy only with `noise`; images are augmented when they are read, instead of stored in
    twelve augmented versions.
    """

    name = "e2e"
    has_constant_step = True
    family = "rehearsal"
    keeps = "a head"
    paper = "End-to-End Incremental Learning, ECCV 2018"
    train_defaults = TrainDefaults(
        lr=1e-4,
        scratch_lr=1e-3,
        steps={"finetune": {"lr": 1e-5, "scratch_lr": 1e-4}},
        source="measured on 25 classes of CIFAR-100 at 64 px: configs/RESULTS.md; a tenth of the "
        "rate in the balanced step is the paper's",
    )
    steps = (
        Step("train"),
        Step("balance", trains=False, later=True),
        Step("finetune", later=True),
        Step("herd", trains=False),
    )
    distills = True
    Settings = E2eSettings
    per_task = Rehearsal.per_task | {"tau", "kd", "over_tasks", "noise"}
    later_settings = frozenset({"kd", "over_tasks", "tau"})

    def memory(self, context: StepContext) -> dict[str, list[str]]:
        if context.step == "balance":
            return {}
        return super().memory(context)

    def begin(self, context: StepContext) -> list[ParamGroup]:
        groups = super().begin(context)
        if context.step == "balance":
            num_old_classes = self.class_slices()[context.task.name].start
            self.herd(context.task, sharers=num_old_classes)
        if context.step == "finetune":
            heads = {name: self.heads[name] for name in self.class_slices()}
            self.teacher = Teacher(self.backbone, heads)
        return groups

    def program(self, progress: Progress) -> int | None:
        """Return the step if noise is added, because the noise's deviation depends on it."""
        return progress.global_step if self.settings.noise else None

    def loss(self, batch: Batch, progress: Progress) -> tuple[Tensor, dict[str, Tensor]]:
        self.draw = batch.draw
        self.global_step = progress.global_step
        features = self.features(batch.images)
        ce = self.classification_loss(features, batch)
        if self.teacher is None:
            return ce, {"ce": ce.detach()}
        kd_loss = kd_bce if self.settings.kd == "bce" else kd_ce
        kd_losses = []
        for name, teacher_logits in self.teacher.logits(batch.images).items():
            student_logits = self.heads[name](features)
            kd_losses.append(kd_loss(student_logits, teacher_logits, self.settings.tau))
        stacked = torch.stack(kd_losses)
        kd = stacked.sum() if self.settings.over_tasks == "sum" else stacked.mean()
        return ce + kd, {"ce": ce.detach(), "kd": kd.detach()}

    def after_backward(self) -> None:
        """Add noise to gradients: g <- g + N(0, variance), variance 0.3 / (1 + iteration)^0.55.

        The gradients are already summed over ranks, and all ranks draw the same noise.
        """
        if not self.settings.noise:
            return
        deviation = (0.3 / (1 + self.global_step) ** 0.55) ** 0.5
        for name, parameter in self.named_parameters():
            if parameter.grad is None:
                continue
            device = parameter.device
            generator = self.draw.generator(f"gradient.{name}", device)
            noise = torch.randn(parameter.shape, generator=generator, device=device)
            parameter.grad.add_(noise, alpha=deviation)
