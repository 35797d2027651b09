"""SLDA: linear discriminant analysis with one covariance for all classes. Nothing is trained.

Hayes, Kanan: Lifelong Machine Learning with Deep Streaming Linear Discriminant Analysis, CVPR
Workshops 2020.
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor, nn

from workers.data.features import FeatureBatch
from workers.job import Task
from workers.methods.base import MethodSettings
from workers.methods.bases.statistics import ClassStatistics, DerivedHeads, class_means
from workers.storage.taskstate import Carried, TaskState

SCATTER, MEANS = "scatter", "means"


class SldaSettings(MethodSettings):
    """Settings of `slda`."""

    shrinkage: float = Field(
        1e-4,
        gt=0,
        lt=1,
        description="epsilon: share of the identity matrix in the inverted covariance",
    )


class Slda(ClassStatistics[SldaSettings]):
    """A chain that carries the scatter S_w of features within classes, and the number N of images.

    With Lambda = ((1 - eps) S_w / N + eps I)^-1 and the mean feature mu_c of class c, the logit is
    mu_c^T Lambda f - mu_c^T Lambda mu_c / 2. S_w is a sum over the classes of all tasks, so the
    result does not depend on their order, up to rounding.

    The released code updates the covariance sample by sample, so its result depends on the order.
    This method computes the exact sum, without the code's prior for the first task.
    """

    name = "slda"
    keeps = "class means"
    paper = (
        "Lifelong Machine Learning with Deep Streaming Linear Discriminant Analysis, CVPR "
        "Workshops 2020"
    )
    Settings = SldaSettings
    carries = (SCATTER,)
    may_forget = True  # later tasks change the covariance, and so the logits of earlier tasks

    def __init__(self, backbone: nn.Module, settings: SldaSettings, seed: int):
        super().__init__(backbone, settings, seed)
        self.heads: DerivedHeads = DerivedHeads(self.heads.width)
        # task -> (K, d), fp64. The values are rounded to fp32, the precision of stored states.
        self.means: dict[str, Tensor] = {}
        self.scatter = torch.zeros(0, dtype=torch.float64)  # (d, d); empty before the first task
        self.num_samples = 0

    def collect(self, task: Task, batch: FeatureBatch) -> None:
        means = class_means(batch.features, batch.labels, task.num_classes).float().double()
        centred = batch.features.double() - means[batch.labels]
        if not len(self.scatter):
            self.scatter = torch.zeros(means.shape[1], means.shape[1], dtype=torch.float64)
        self.scatter = self.scatter.cpu() + centred.T @ centred
        self.num_samples += len(centred)
        self.means[task.name] = means
        self.update_heads()

    @torch.no_grad()
    def update_heads(self) -> None:
        """Compute the heads of all tasks from the means and the covariance."""
        if not len(self.scatter):
            return
        eps = self.settings.shrinkage
        covariance = (1 - eps) * self.scatter / self.num_samples
        covariance = covariance + eps * torch.eye(len(covariance), dtype=torch.float64)
        factor = torch.linalg.cholesky(covariance)
        for name, means in self.means.items():
            weight = torch.cholesky_solve(means.T, factor).T  # (K, d): mu^T Lambda
            self.heads.assign(name, weight, -(weight * means).sum(1) / 2)

    def finish(self) -> tuple[TaskState, Carried]:
        assert self.task is not None
        state = self.state(copies={MEANS: self.means[self.task.name].float()})
        return state, Carried({SCATTER: self.scatter}, {"samples": self.num_samples})

    # ---- serving ---------------------------------------------------------------------------------
    def load_statistics(self, state: TaskState) -> None:
        self.means[state.task] = state.copies[MEANS].double().cpu()
        self.update_heads()

    def load_carried(self, carried: Carried) -> None:
        super().load_carried(carried)
        self.scatter = carried.tensors[SCATTER].cpu()
        self.num_samples = int(carried.meta["samples"])
        self.update_heads()
