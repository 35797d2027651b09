"""APER, once called ADAM: class means of concatenated frozen and adapted features.

Zhou, Cai, Ye, Zhan, Liu: Revisiting Class-Incremental Learning with Pre-Trained Models:
Generalizability and Adaptivity are All You Need, IJCV 2024 (arXiv 2303.07338).
"""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field, PositiveFloat
from torch import Tensor, nn

from workers.data.features import FeatureBatch
from workers.job import Neutral, Task
from workers.methods.bases.first_session import (
    ADAPTATION,
    FIRST_SESSION_TRAINING,
    FirstSession,
    FirstSessionSettings,
    Variant,
)
from workers.methods.bases.statistics import class_means
from workers.model.cosine import CosineHeads
from workers.storage.taskstate import TaskState


class AperSettings(FirstSessionSettings):
    """Settings of `aper`."""

    first_session: Variant = Field(
        "adapter",
        description="tensors that the first task trains and all tasks use: `finetune`: a copy of "
        "all weights; `vpt-shallow`, `vpt-deep`: prompts of the first block, or of every block; "
        "`adapter`: AdaptFormer's adapters; `ssf`: a scale and a shift after each layer",
    )
    head_scale: Annotated[PositiveFloat, Neutral(1.0)] = Field(
        1.0, description=str(FirstSessionSettings.model_fields["head_scale"].description)
    )


class Aper(FirstSession[AperSettings]):
    """The first task adapts the features. Every task then stores its class means.

    The weight of class c is mu_c, the mean of [f_0; f_1]: the backbone's features f_0 and the
    adapted features f_1, concatenated and not normalised. The logit is cos([f_0; f_1], mu_c). The
    part with the larger norm dominates. The chain carries the adaptation unchanged.

    Stored per task: 2 d floats per class. An image costs two forward passes.
    """

    name = "aper"
    has_constant_step = True
    keeps = "class means"
    paper = (
        "Revisiting Class-Incremental Learning with Pre-Trained Models: Generalizability and "
        "Adaptivity are All You Need, IJCV 2024"
    )
    Settings = AperSettings
    train_defaults = FIRST_SESSION_TRAINING
    carries = (ADAPTATION,)

    def __init__(self, backbone: nn.Module, settings: AperSettings, seed: int):
        super().__init__(backbone, settings, seed)
        self.heads = CosineHeads(2 * self.heads.width)

    def collect(self, task: Task, batch: FeatureBatch) -> None:
        means = class_means(batch.features, batch.labels, task.num_classes)
        self.heads[task.name].weight.copy_(means[:, None])

    def features(self, images: Tensor) -> Tensor:
        """Return [f_0; f_1] (b, 2 d) of images (b, 3, H, W); during `adapt` only f_1 (b, d)."""
        adapted = super().features(images)
        if self.is_adapting:
            return adapted
        return torch.cat([self.backbone(images), adapted], 1)

    def flops_share(self, state: TaskState) -> float:
        return 1 + super().flops_share(state)
