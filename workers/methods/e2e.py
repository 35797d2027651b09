"""E2E: distillation per earlier task while training, then all weights once more on as many images
of new classes as of old ones.

Castro, Marin-Jimenez, Guil, Schmid, Alahari: End-to-End Incremental Learning, ECCV 2018.
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field, PositiveFloat
from torch import Tensor

from workers.data.batch import Batch
from workers.methods.base import ParamGroup, Progress, Step, StepContext
from workers.methods.bases.rehearsal import Rehearsal, RehearsalSettings
from workers.model.distill import Teacher, kd_bce, kd_ce


class E2eSettings(RehearsalSettings):
    selection: Literal["herding", "rebuffi", "closest", "random"] = Field(
        "closest", description="which images become exemplars"
    )
    tau: PositiveFloat = Field(
        2.0, description="temperature of both softmaxes in the distillation loss"
    )
    kd: Literal["bce", "ce"] = Field(
        "bce",
        description="how a task's softmax is held to its teacher's: `bce` for each class, or `ce` "
        "over them",
    )
    noise: bool = Field(
        False,
        description="add Gaussian noise to all gradients, of variance 0.3 / (1 + iteration)^0.55",
    )


class E2e(Rehearsal[E2eSettings]):
    """L = CE over all classes + mean over tasks s of KD_s, the distance of softmax(z_s / tau) to
    softmax(y_s / tau) over the classes of s alone. In `train` the teacher is the network before the
    task, and s runs over earlier tasks. `balance` chooses as many images of each new class as there
    are of each old one, floor(M / O_t), and on these and the old exemplars `finetune` trains all
    weights again. There the teacher is the network after `train`, and s runs over all tasks. `herd`
    makes the memory that stays: floor(M / A_t) of each class, chosen anew for the new classes by
    the network as it is then.

    Both train alike unless the config says otherwise; a tenth of the rate is what the fine-tuning
    is meant for: `steps: {finetune: {epochs: 40, lr: 0.01}}` beside `train: {epochs: 60, lr: 0.1}`.

    Where it differs from the paper: KD_s is a mean, over tasks and with `kd: bce` over classes too,
    where the paper sums cross-entropies; gradients are noisy only under `noise`; images are
    augmented as they are drawn, not twelvefold beforehand.
    """

    name = "e2e"
    paper = "End-to-End Incremental Learning, ECCV 2018"
    steps = (
        Step("train"),
        Step("balance", trains=False, later=True),
        Step("finetune", later=True),
        Step("herd", trains=False),
    )
    distills = True
    Settings = E2eSettings
    per_task = Rehearsal.per_task | {"tau", "kd", "noise"}

    def memory(self, context: StepContext) -> dict[str, list[str]]:
        return {} if context.step == "balance" else super().memory(context)

    def begin(self, context: StepContext) -> list[ParamGroup]:
        groups = super().begin(context)
        if context.step == "balance":
            self.herd(context.task, sharers=self.class_slices()[context.task.name].start)
        if context.step == "finetune":
            self.teacher = Teacher(
                self.backbone, {name: self.heads[name] for name in self.class_slices()}
            )
        return groups

    def loss(self, batch: Batch, progress: Progress) -> tuple[Tensor, dict[str, Tensor]]:
        self.now = batch.draw, progress.global_step
        features = self.features(batch.images)
        ce = self.classification_loss(features, batch)
        if self.teacher is None:
            return ce, {"ce": ce.detach()}
        held = kd_bce if self.settings.kd == "bce" else kd_ce
        kd = torch.stack(
            [
                held(self.heads[name](features), taught, self.settings.tau)
                for name, taught in self.teacher.logits(batch.images).items()
            ]
        ).mean()
        return ce + kd, {"ce": ce.detach(), "kd": kd.detach()}

    def after_backward(self) -> None:
        """g <- g + N(0, 0.3 / (1 + iteration)^0.55), the same on all ranks, which have summed their
        gradients by now."""
        if self.settings.noise:
            draw, iteration = self.now
            deviation = (0.3 / (1 + iteration) ** 0.55) ** 0.5
            for name, p in self.named_parameters():
                if p.grad is not None:
                    p.grad.add_(
                        torch.randn(
                            p.shape,
                            generator=draw.generator(f"gradient.{name}", p.device),
                            device=p.device,
                        ),
                        alpha=deviation,
                    )
