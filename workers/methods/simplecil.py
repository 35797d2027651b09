"""SimpleCIL: the cosine to the mean feature of each class. Nothing is trained.

Zhou, Cai, Ye, Zhan, Liu: Revisiting Class-Incremental Learning with Pre-Trained Models:
Generalizability and Adaptivity are All You Need, IJCV 2024 (arXiv 2303.07338).
"""

from __future__ import annotations

from torch import nn

from workers.data.features import FeatureBatch
from workers.job import Task
from workers.methods.base import MethodSettings
from workers.methods.bases.statistics import ClassStatistics, class_means
from workers.model.cosine import CosineHeads


class SimpleCil(ClassStatistics[MethodSettings]):
    """Tasks are independent (a star). The weight of class c is mu_c, the logit is cos(f, mu_c).

    f are the features of the frozen backbone, and mu_c is their mean over the class, without
    normalisation before the mean.
    """

    name = "simplecil"
    keeps = "class means"
    paper = (
        "Revisiting Class-Incremental Learning with Pre-Trained Models: Generalizability and "
        "Adaptivity are All You Need, IJCV 2024"
    )

    def __init__(self, backbone: nn.Module, settings: MethodSettings, seed: int):
        super().__init__(backbone, settings, seed)
        self.heads = CosineHeads(self.heads.width)

    def collect(self, task: Task, batch: FeatureBatch) -> None:
        means = class_means(batch.features, batch.labels, task.num_classes)
        self.heads[task.name].weight.copy_(means[:, None])  # (K, 1, d): one vector per class
