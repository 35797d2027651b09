"""UCIR (LUCIR): cosine heads, features that keep their direction, and a margin between classes.

The margin separates each old class from the most similar new classes.

Hou, Pan, Loy, Wang, Lin: Learning a Unified Classifier Incrementally via Rebalancing, CVPR 2019.
"""

from __future__ import annotations

import math

import torch
from pydantic import ConfigDict, Field, NonNegativeFloat, PositiveInt
from torch import Tensor, nn

from workers.data.batch import Batch
from workers.errors import UserError
from workers.job import DataSettings, Task, TrainSettings
from workers.methods.base import Progress
from workers.methods.bases.cosine import CosineRehearsal, CosineSettings
from workers.methods.train_defaults import TrainDefaults
from workers.model.cosine import margin_rank
from workers.model.pod import cosine_distance


class UcirSettings(CosineSettings):
    """Settings of `ucir`."""

    model_config = ConfigDict(populate_by_name=True)

    lambda_: NonNegativeFloat = Field(
        5.0,
        alias="lambda",
        description="weight of the distillation of features; it is multiplied by sqrt(old "
        "classes / new classes)",
    )
    margin: NonNegativeFloat = Field(
        0.5,
        description="margin by which the cosine of an old class must exceed those of new classes",
    )
    top_k: PositiveInt = Field(
        2,
        description="K: the margin loss compares each old sample with its K most similar new "
        "classes",
    )


class Ucir(CosineRehearsal[UcirSettings]):
    """L = CE(eta s) + lambda sqrt(O_t / N_t) (1 - cos(h, h_teacher)) + margin_loss.

    s_c is the cosine of the features h and the vector of class c, and eta a learnt scale. O_t and
    N_t are the numbers of old and new classes, and h_teacher the features of the network before the
    task. margin_loss is the mean of relu(margin - s_y + s_k) over the samples of old classes y in
    the global batch, and over their K most similar new classes k. Records store it under the name
    `rank`. With `finetune` the classifier is then trained with CE only.

    Differences from the paper: no activation is removed from the backbone, because a ViT's features
    have both signs; eta starts at 10.
    """

    name = "ucir"
    has_constant_step = True
    family = "rehearsal"
    keeps = "class vectors"
    paper = "Learning a Unified Classifier Incrementally via Rebalancing, CVPR 2019"
    train_defaults = TrainDefaults(
        lr=1e-4,
        scratch_lr=1e-3,
        source="measured on 25 classes of CIFAR-100 at 64 px: configs/RESULTS.md",
    )
    Settings = UcirSettings
    per_task = CosineRehearsal.per_task | {"lambda", "margin"}
    later_settings = frozenset({"lambda", "margin", "top_k"})

    @classmethod
    def validate(
        cls, settings: UcirSettings, train: TrainSettings, data: DataSettings, scenario: str
    ) -> None:
        if data.mixup or data.cutmix:
            raise UserError(
                "data.mixup or data.cutmix is above 0, but ucir's margin separates the class of an "
                "image from others, and a mixed image has two classes; set both to 0 for this "
                "method"
            )

    @classmethod
    def check_backbone(
        cls, settings: UcirSettings, backbone: nn.Module, tasks: tuple[Task, ...] = ()
    ) -> None:
        super().check_backbone(settings, backbone, tasks)
        small = next((task for task in tasks[1:] if task.num_classes < settings.top_k), None)
        if small is not None:
            raise UserError(
                f"top_k is {settings.top_k}, but task {small.name!r} has fewer new classes "
                f"({small.num_classes}); set top_k to {small.num_classes} or less, or give the "
                "task more classes"
            )

    def loss(self, batch: Batch, progress: Progress) -> tuple[Tensor, dict[str, Tensor]]:
        if self.teacher is None:
            return super().loss(batch, progress)
        assert self.task is not None
        new_classes = self.class_slices()[self.task.name]
        features = self.features(batch.images)
        with torch.no_grad():
            taught = self.teacher.backbone(batch.images)
        ce = self.classification_loss(features, batch)
        distance = cosine_distance(features, taught)
        margin_losses = margin_rank(
            self.similarity(features),
            self.global_labels(batch),
            new_classes.start,
            self.settings.top_k,
            self.settings.margin,
        )
        # `margin_losses` is 0 for samples of new classes. The loop scales the loss by b / global
        # batch size and sums over ranks, so this becomes a mean over all old samples of the global
        # batch.
        num_old = batch.number("old samples", lambda batch: max(self.count_old_samples(batch), 1))
        margin_loss = margin_losses.mean() * batch.draw.size / num_old
        growth = math.sqrt(new_classes.start / (new_classes.stop - new_classes.start))
        weight = self.settings.lambda_ * growth
        return ce + weight * distance + margin_loss, {
            "ce": ce.detach(),
            "distance": distance.detach(),
            "rank": margin_loss.detach(),
        }

    def count_old_samples(self, batch: Batch) -> int:
        """Return the number of samples of old classes in the global batch, over all ranks."""
        assert batch.counts is not None
        return sum(
            count
            for task, count in zip(self.training_tasks, batch.counts, strict=True)
            if task.name in self.old
        )
