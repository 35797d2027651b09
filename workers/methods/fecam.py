"""FeCAM: classify by Mahalanobis distance, with a covariance per class. Nothing is trained.

Goswami, Liu, Twardowski, van de Weijer: FeCAM: Exploiting the Heterogeneity of Class Distributions
in Exemplar-Free Continual Learning, NeurIPS 2023.
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor, nn

from workers.data.features import FeatureBatch
from workers.errors import UserError
from workers.job import Task
from workers.methods.base import MethodSettings
from workers.methods.bases.statistics import ClassStatistics, DerivedHeads, class_means
from workers.model.exemplars import normalise
from workers.storage.taskstate import Carried, TaskState

# Names of the stored tensors. A precision is the inverse C^-1 of a correlation matrix C.
MEANS, PRECISIONS = "means", "precisions"


class FecamSettings(MethodSettings):
    """Settings of `fecam`."""

    diagonal: float = Field(
        1.0,
        gt=0,
        description="gamma_1: share of the mean variance added to the diagonal of a covariance",
    )
    off_diagonal: float = Field(
        0.0,
        ge=0,
        description="gamma_2: share of the mean covariance added to the other entries; "
        "the paper has 0 for vision transformers and 1 for ResNets",
    )


class Fecam(ClassStatistics[FecamSettings]):
    """Tasks are independent (a star). The logit of class c is -(f - mu_c)^T C_c^-1 (f - mu_c).

    f are features of unit length, mu_c their mean over the class, and Sigma_c their unbiased
    covariance. Sigma_c is shrunk to Sigma_c + gamma_1 V_1 I + gamma_2 V_2 (1 - I), where V_1 and
    V_2 are the means of the diagonal and of the other entries of Sigma_c, and 1 is the matrix of
    ones. C_c is the correlation matrix of the shrunk covariance.
    """

    name = "fecam"
    keeps = "class means, covariances"
    paper = (
        "FeCAM: Exploiting the Heterogeneity of Class Distributions in Exemplar-Free Continual "
        "Learning, NeurIPS 2023"
    )
    Settings = FecamSettings
    starts_as_backbone = False
    per_task = frozenset({"diagonal", "off_diagonal"})

    def __init__(self, backbone: nn.Module, settings: FecamSettings, seed: int):
        super().__init__(backbone, settings, seed)
        # The heads only define the number of classes of each task. Their weights are not used.
        self.heads = DerivedHeads(self.heads.width)
        self.means: dict[str, Tensor] = {}  # task -> (K, d)
        self.precisions: dict[str, Tensor] = {}  # task -> C^-1 per class, (K, d, d)

    def collect(self, task: Task, batch: FeatureBatch) -> None:
        unit = normalise(batch.features)
        means = class_means(unit, batch.labels, task.num_classes)
        precisions = []
        for label in range(task.num_classes):
            centred = unit[batch.labels == label] - means[label]
            covariance = centred.T @ centred / max(len(centred) - 1, 1)
            precisions.append(torch.linalg.inv(self.correlation(covariance)))
        self.means[task.name] = means.float()
        self.precisions[task.name] = torch.stack(precisions).float()

    def correlation(self, covariance: Tensor) -> Tensor:
        """Shrink a covariance (d, d), and return the correlation matrix of the result."""
        width = len(covariance)
        diagonal = covariance.diagonal()
        off_diagonal_sum = covariance.sum() - diagonal.sum()
        identity = torch.eye(width, dtype=covariance.dtype)
        shrunk = covariance + self.settings.diagonal * diagonal.mean() * identity
        if width > 1 and self.settings.off_diagonal:
            mean = off_diagonal_sum / (width * (width - 1))
            shrunk = shrunk + self.settings.off_diagonal * mean * (1 - identity)
        # If all images of a class are equal, the result is the identity: a Euclidean distance.
        deviation = shrunk.diagonal().clamp(min=torch.finfo(shrunk.dtype).tiny).sqrt()
        correlation = shrunk / deviation[:, None] / deviation
        return correlation + torch.diag((correlation.diagonal() == 0).to(shrunk.dtype))

    def finish(self) -> tuple[TaskState, Carried]:
        assert self.task is not None
        name = self.task.name
        copies = {MEANS: self.means[name], PRECISIONS: self.precisions[name]}
        return self.state(copies=copies), Carried()

    # ---- serving ---------------------------------------------------------------------------------
    def load_statistics(self, state: TaskState) -> None:
        means, precisions = state.copies[MEANS], state.copies[PRECISIONS]
        shape = (len(state.classes), self.heads.width)
        if (means.shape, precisions.shape) != (shape, (*shape, shape[1])):
            raise UserError(
                f"task {state.task!r}: its state has means of shape {tuple(means.shape)} and "
                f"covariances of shape {tuple(precisions.shape)} for {shape[0]} classes of "
                f"{shape[1]} features; export it again, or write a new model folder with "
                "`accrete bundle`"
            )
        self.means[state.task] = means.to(self.device)
        self.precisions[state.task] = precisions.to(self.device)

    def logits(self, images: Tensor, task: str | None) -> Tensor:
        features = self.features(images)
        return self.all_logits(features) if task is None else self.task_logits(features, task)

    def all_logits(self, features: Tensor) -> Tensor:
        return torch.cat([self.task_logits(features, name) for name in self.class_slices()], 1)

    def task_logits(self, features: Tensor, task: str) -> Tensor:
        """Return minus the squared distances (b, K) of features (b, d) to the classes of a task."""
        self.heads[task]  # raises `UserError` for an unknown task
        means, precisions = self.means[task], self.precisions[task]
        means, precisions = means.to(features.device), precisions.to(features.device)
        unit = nn.functional.normalize(features.float(), dim=1)
        logits = []
        for mean, precision in zip(means, precisions, strict=True):
            centred = unit - mean
            logits.append(-((centred @ precision) * centred).sum(1))
        return torch.stack(logits, 1)
