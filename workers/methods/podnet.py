"""PODNet: an NCA loss over several proxies per class, and distillation of each block's pooled map.

Douillard, Cord, Ollion, Robert, Valle: PODNet: Pooled Outputs Distillation for Small-Tasks
Incremental Learning, ECCV 2020.
"""

from __future__ import annotations

import math

import torch
from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt
from torch import Tensor, nn

from workers.data.batch import Batch
from workers.errors import UserError
from workers.job import DataSettings, Task, TrainSettings
from workers.methods.base import BLOCK_VITS, Progress
from workers.methods.bases.cosine import CosineRehearsal, CosineSettings
from workers.methods.train_defaults import TrainDefaults
from workers.model.cosine import nca
from workers.model.pod import compute_features_and_maps, cosine_distance, pod


class PodNetSettings(CosineSettings):
    """Settings of `podnet`."""

    finetune: bool = Field(
        True,
        description="whether step `finetune` trains the classifier once more, on equally many "
        "exemplars of each class, new and old",
    )
    lambda_c: NonNegativeFloat = Field(
        3.0,
        description="weight of the distillation of pooled maps of all blocks but the last; it "
        "is multiplied by sqrt(all classes / new classes)",
    )
    lambda_f: NonNegativeFloat = Field(
        1.0,
        description="weight of the distillation of features; it is multiplied by sqrt(all "
        "classes / new classes)",
    )
    proxies: PositiveInt = Field(10, description="number of vectors (proxies) per class")
    delta: NonNegativeFloat = Field(0.6, description="margin of the NCA loss")
    hinge: bool = Field(True, description="whether the NCA loss of a sample is at least 0")
    clamp: PositiveFloat = Field(
        5.0, description="largest magnitude of a gradient entry; larger ones are clamped"
    )


class PodNet(CosineRehearsal[PodNetSettings]):
    """L = NCA + sqrt(A_t / K_t) (lambda_f (1 - cos(h, h_teacher)) + lambda_c POD).

    A_t is the number of all classes, K_t that of new ones, and h are the features. The teacher is
    the network before the task. NCA = -log(exp(eta (s_y - delta)) / sum_{c != y} exp(eta s_c)), at
    least 0. s_c is the similarity of h to the proxies of class c (`CosineHead`), y the true class,
    and eta a learnt scale. POD is the distance between the maps of student and teacher, a mean over
    blocks, after each map is squared, summed over rows and over columns, and normalised.

    `finetune` trains the classifier with NCA; the paper does so for 20 epochs at half of the rate:
    `steps: {finetune: {epochs: 20, lr: 0.05}}` with `train: {epochs: 160, lr: 0.1}`.

    Differences from the paper: the map of a block consists of the ViT's patch tokens on their grid,
    and h replaces the map of the last block; s is a cosine, and eta starts at 10. The margin and
    the exclusion of the true class have an effect here, but not in the released code.
    """

    name = "podnet"
    has_constant_step = True
    family = "rehearsal"
    keeps = "proxies"
    paper = "PODNet: Pooled Outputs Distillation for Small-Tasks Incremental Learning, ECCV 2020"
    train_defaults = TrainDefaults(
        lr=1e-4,
        scratch_lr=1e-3,
        steps={"finetune": {"epochs": 10, "lr": 1e-3, "scratch_lr": 1e-2}},
        source="measured on 25 classes of CIFAR-100 at 64 px: configs/RESULTS.md",
    )
    needs_vit = True
    vits = BLOCK_VITS
    Settings = PodNetSettings
    per_task = CosineRehearsal.per_task | {"lambda_c", "lambda_f", "delta", "hinge", "clamp"}
    later_settings = frozenset({"lambda_c", "lambda_f"})

    @classmethod
    def validate(
        cls, settings: PodNetSettings, train: TrainSettings, data: DataSettings, scenario: str
    ) -> None:
        if data.mixup or data.cutmix or data.smoothing:
            raise UserError(
                "data.mixup, data.cutmix or data.smoothing is above 0, and podnet's loss sets "
                "one class of an image against all others; set "
                "all three to 0 for this method"
            )

    @classmethod
    def check_backbone(
        cls, settings: PodNetSettings, backbone: nn.Module, tasks: tuple[Task, ...] = ()
    ) -> None:
        super().check_backbone(settings, backbone, tasks)
        if len(backbone.blocks) < 2:  # type: ignore[arg-type]
            raise UserError(
                "podnet distils the maps of all blocks but the last, and the backbone has one "
                "block; give it two or more "
                "(backbone.options.depth)"
            )
        if tasks and tasks[0].num_classes < 2:
            raise UserError(
                "podnet's loss sets a class against others, and the first task "
                f"{tasks[0].name!r} has one class; give it two or more"
            )

    def __init__(self, backbone: nn.Module, settings: PodNetSettings, seed: int):
        super().__init__(backbone, settings, seed, settings.proxies)

    def loss(self, batch: Batch, progress: Progress) -> tuple[Tensor, dict[str, Tensor]]:
        if self.teacher is None:
            loss = self.classification_loss(self.features(batch.images), batch)
            return loss, {"nca": loss.detach()}
        assert self.task is not None
        new_classes = self.class_slices()[self.task.name]
        features, maps = compute_features_and_maps(self.backbone, batch.images)
        with torch.no_grad():
            taught, taught_maps = compute_features_and_maps(self.teacher.backbone, batch.images)
        loss = self.classification_loss(features, batch)
        distance = cosine_distance(features, taught)
        spatial = pod(maps, taught_maps)
        growth = math.sqrt(new_classes.stop / (new_classes.stop - new_classes.start))
        distillation = self.settings.lambda_f * distance + self.settings.lambda_c * spatial
        terms = {"nca": loss.detach(), "distance": distance.detach(), "pod": spatial.detach()}
        return loss + growth * distillation, terms

    def classification_loss(self, features: Tensor, batch: Batch) -> Tensor:
        return nca(
            self.similarity(features),
            self.global_labels(batch),
            self.heads.scale,
            self.settings.delta,
            self.settings.hinge,
        )

    def after_backward(self) -> None:
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.clamp_(-self.settings.clamp, self.settings.clamp)
