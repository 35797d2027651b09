"""WA: after distillation, one factor gives new weight vectors the mean length of old ones.

Zhao, Xiao, Gan, Zhang, Xia: Maintaining Discrimination and Fairness in Class Incremental Learning,
CVPR 2020.
"""

from __future__ import annotations

import torch
from pydantic import Field, PositiveFloat
from torch import Tensor

from workers.data.batch import Batch
from workers.job import Task
from workers.methods.base import ParamGroup, Progress, Step, StepContext
from workers.methods.bases.rehearsal import Rehearsal, RehearsalSettings
from workers.methods.train_defaults import TrainDefaults
from workers.model.align import compute_weight_ratio
from workers.model.distill import kd_ce


class WaSettings(RehearsalSettings):
    """Settings of `wa`."""

    tau: PositiveFloat = Field(
        2.0,
        description="temperature of the softmax of student and teacher in the distillation loss",
    )
    nonnegative: bool = Field(
        False,
        description="whether to clamp the weights of all heads at 0 after each step, as in "
        "the paper, so that the length of a vector measures the size of its output",
    )


class Wa(Rehearsal[WaSettings]):
    """L = (1 - a) CE over all classes + a KD_ce(tau) over old classes, with a = old / all classes.

    After `train`, the step `align` multiplies the weight vectors of the task's classes by gamma,
    the mean length of old vectors divided by that of new vectors. Directions, biases and old heads
    stay unchanged. The aligned network is the next task's teacher.

    Differences from the paper: weights are not clamped at 0 unless `nonnegative` is set, because a
    ViT's features have both signs. The paper's premise, that new classes have the longer vectors,
    can fail in short training with AdamW; `warnings` reports a gamma above 1.
    """

    name = "wa"
    has_constant_step = True
    family = "rehearsal"
    keeps = "a head"
    paper = "Maintaining Discrimination and Fairness in Class Incremental Learning, CVPR 2020"
    train_defaults = TrainDefaults(
        lr=1e-4,
        scratch_lr=1e-3,
        source="measured on 25 classes of CIFAR-100 at 64 px: configs/RESULTS.md",
    )
    steps = (
        Step("train"),
        Step("align", trains=False, measured=True, later=True),
        Step("herd", trains=False),
    )
    distills = True
    Settings = WaSettings
    per_task = Rehearsal.per_task | {"tau", "nonnegative"}
    later_settings = frozenset({"tau"})
    gamma: float | None = None  # factor of the alignment; None in steps other than `align`

    def begin(self, context: StepContext) -> list[ParamGroup]:
        groups = super().begin(context)
        if context.step == "align":
            self.align(context.task)
        return groups

    @torch.no_grad()
    def align(self, task: Task) -> None:
        """Scale the weight vectors of `task` by one factor to the mean length of old ones."""
        new = self.heads[task.name].weight  # (new classes, d)
        old = torch.cat([self.heads[name].weight for name in self.old])  # (old classes, d)
        gamma = compute_weight_ratio(old, new)
        new.mul_(gamma)
        self.gamma = float(gamma)

    def loss(self, batch: Batch, progress: Progress) -> tuple[Tensor, dict[str, Tensor]]:
        features = self.features(batch.images)
        ce = self.classification_loss(features, batch)
        if self.teacher is None:
            return ce, {"ce": ce.detach()}
        taught = self.teacher.joined(batch.images)  # (b, old classes)
        a = self.old_share
        kd = kd_ce(self.all_logits(features)[:, : taught.shape[1]], taught, self.settings.tau)
        return (1 - a) * ce + a * kd, {"ce": ce.detach(), "kd": kd.detach()}

    def after_step(self, progress: Progress) -> None:
        if self.settings.nonnegative:
            with torch.no_grad():
                for name in self.class_slices():
                    self.heads[name].weight.clamp_(min=0)

    def metrics(self) -> dict[str, float]:
        """Return gamma; below 1 means that the new vectors were longer than the old vectors."""
        if self.gamma is None:
            return {}
        return {"gamma": self.gamma}

    def warnings(self) -> list[str]:
        if self.task is None or self.gamma is None or self.gamma <= 1:
            return []
        return [
            f"task {self.task.name!r}: gamma is {self.gamma:.4g}, above 1: WA expects new "
            "classes to have longer weight vectors than old ones, and theirs are shorter, so that "
            "alignment lengthens them and favours new classes still more; train longer or at a "
            "higher rate, or use replay or bic"
        ]
