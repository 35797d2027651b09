"""RanPAC: ridge regression of the classes on randomly projected features.

The features may first be adapted to the first task.

McDonnell, Gong, Parvaneh, Abbasnejad, van den Hengel: RanPAC: Random Projections and Pre-trained
Models for Continual Learning, NeurIPS 2023.
"""

from __future__ import annotations

import hashlib
import math
from itertools import cycle
from typing import Annotated, Literal

import torch
from pydantic import Field, NonNegativeInt, PositiveFloat
from torch import Tensor, nn
from torch.nn import functional as F

from workers.data.features import FeatureBatch
from workers.errors import UserError
from workers.job import Task
from workers.methods.bases.first_session import (
    ADAPTATION,
    FIRST_SESSION_TRAINING,
    FirstSession,
    FirstSessionSettings,
)
from workers.methods.bases.statistics import DerivedHeads
from workers.rng import derive_seed
from workers.storage.taskstate import Carried, TaskState

# Names of entries in the carried state.
GRAM, TARGETS, WEIGHT, VALIDATED = "gram", "targets", "weight", "validated"
PENALTIES = tuple(10.0**power for power in range(-8, 9))  # candidates of `ridge: auto`
MAX_ROWS = 4096  # images that are projected at once; limits the memory for their features
VALIDATION_SHARE = 5  # one in five images is used to validate the ridge penalty


class RanpacSettings(FirstSessionSettings):
    """Settings of `ranpac`."""

    projection: NonNegativeInt = Field(
        2000,
        description="M, number of random features relu(f W); 0: the features f themselves. The "
        "paper has 10000; the carried state grows with its square",
    )
    ridge: Literal["auto"] | Annotated[PositiveFloat, Field(allow_inf_nan=False)] = Field(
        "auto",
        description="lambda, the ridge penalty; `auto`: the power of ten from 1e-8 to 1e8 with the "
        "smallest squared error on one of five images, of all tasks so far; 1 without such images",
    )


class Ranpac(FirstSession[RanpacSettings]):
    """A chain that carries G = sum h h^T and Q = sum h y^T over the images of all tasks so far.

    h = relu(f W) with a fixed random W, y is one-hot, and the logits are h^T (G + lambda I)^-1 Q.
    G and Q are sums, so the result does not depend on the order of tasks, up to rounding. For
    `ridge: auto` there are separate sums over images for fitting and images for validation; a hash
    of the key assigns each image.

    In scenario `domain` a class has one column of Q, a sum over the tasks.

    With `first_session`, the paper's first phase, f are the features that the first task adapted.
    The result then depends on which task is the first one.
    """

    name = "ranpac"
    keeps = "nothing"
    shares_head = True
    paper = "RanPAC: Random Projections and Pre-trained Models for Continual Learning, NeurIPS 2023"
    Settings = RanpacSettings
    train_defaults = FIRST_SESSION_TRAINING
    carries = (ADAPTATION, GRAM, "heads")
    training_only = (GRAM, f"heads/*/{TARGETS}", VALIDATED)
    may_forget = True  # later tasks change G, and so the logits of earlier tasks
    projection: Tensor  # (d, M); only if the setting `projection` is above 0

    def __init__(self, backbone: nn.Module, settings: RanpacSettings, seed: int):
        super().__init__(backbone, settings, seed)
        width = self.heads.width
        self.heads: DerivedHeads = DerivedHeads(settings.projection or width)
        if settings.projection:
            generator = torch.Generator().manual_seed(derive_seed(seed, "projection"))
            projection = torch.randn(width, settings.projection, generator=generator)
            self.register_buffer("projection", projection, persistent=False)
        # Sums in fp64: index 0 over the images for fitting, index 1 over those for validation.
        self.gram = torch.zeros(0, dtype=torch.float64)  # (2, M, M); empty before the first task
        self.targets: dict[str, Tensor] = {}  # task -> (2, M, K)
        self.num_validated = 0

    # ---- statistics ------------------------------------------------------------------------------
    def collect(self, task: Task, batch: FeatureBatch) -> None:
        width = self.heads.width
        gram = torch.zeros(2, width, width, dtype=torch.float64)
        if len(self.gram):
            gram = self.gram.clone()
        targets = torch.zeros(2, width, task.num_classes, dtype=torch.float64)
        one_hot = F.one_hot(batch.labels, task.num_classes).double()
        validates = torch.tensor([is_validated(key) for key in batch.keys], dtype=torch.bool)
        for part, chosen in enumerate((~validates, validates)):
            for rows in chosen.nonzero().squeeze(1).split(MAX_ROWS):
                projected = self.project(batch.features[rows].to(self.device)).cpu().double()
                gram[part].addmm_(projected.T, projected)
                targets[part].addmm_(projected.T, one_hot[rows])
        self.gram = gram
        self.targets[task.name] = targets
        self.num_validated += int(validates.sum())
        self.update_heads()

    def update_heads(self) -> None:
        """Compute the heads of all tasks from the sums."""
        parts = [*self.targets.values()]
        if self.heads.is_shared:
            parts = [torch.stack(parts).sum(0)]
        targets = torch.cat(parts, 2)
        weights = solve_ridge(self.gram.sum(0), targets.sum(0), self.choose_penalty(targets))
        counts = [part.shape[2] for part in parts]
        columns = weights.float().split(counts, 1)
        # A shared head has one part, which `cycle` repeats for each task.
        for name, weight in zip(self.targets, cycle(columns), strict=False):
            self.heads.assign(name, weight.T)

    def project(self, features: Tensor) -> Tensor:
        """Return random features (b, M) of features (b, d); with `projection: 0` the input.

        Features are not projected for the temporary head of the first session.
        """
        if self.is_adapting or not self.settings.projection:
            return features.float()
        return F.relu(features.float() @ self.projection)

    def choose_penalty(self, targets: Tensor) -> float:
        """Return the ridge penalty for targets (2, M, classes)."""
        if self.settings.ridge != "auto":
            return float(self.settings.ridge)
        if not self.num_validated:
            return 1.0
        errors = [
            compute_ridge_error(self.gram, targets, self.num_validated, penalty)
            for penalty in PENALTIES
        ]
        return PENALTIES[errors.index(min(errors))]

    def finish(self) -> tuple[TaskState, Carried]:
        state, carried = super().finish()
        tensors = {**carried.tensors, GRAM: self.gram}
        for name, targets in self.targets.items():
            # Removing a task from a model folder deletes the tensors below heads/NAME/.
            tensors[f"heads/{name}/{TARGETS}"] = targets
            tensors[f"heads/{name}/{WEIGHT}"] = self.heads[name].weight.detach().clone()
        return state, Carried(tensors, {VALIDATED: self.num_validated})

    # ---- serving ---------------------------------------------------------------------------------
    @torch.no_grad()
    def load_carried(self, carried: Carried) -> None:
        super().load_carried(carried)
        # A bundle has only the weights of the heads, not the sums (see `training_only`).
        self.gram = carried.tensors.get(GRAM, torch.zeros(0, dtype=torch.float64)).cpu()
        self.num_validated = int(carried.meta.get(VALIDATED, 0))
        self.targets = {}
        loaded = set()
        for path, tensor in carried.tensors.items():
            _, _, rest = path.partition("heads/")
            name, _, kind = rest.rpartition("/")
            if kind == TARGETS:
                self.targets[name] = tensor.cpu()
            elif kind == WEIGHT:
                self.heads.assign(name, tensor)
                loaded.add(name)
        for name in self.heads.names:
            if name not in loaded:
                raise UserError(
                    f"task {name!r}: the carried state lacks its weights; write a new model folder "
                    "with `accrete bundle`"
                )

    def logits(self, images: Tensor, task: str | None) -> Tensor:
        features = self.features(images)
        if task is None:
            return self.all_logits(features)
        return self.heads[task](self.project(features))  # type: ignore[no-any-return]

    def all_logits(self, features: Tensor) -> Tensor:
        return super().all_logits(self.project(features))


def is_validated(key: str) -> bool:
    """Return whether an image is used for validation, by a hash of the key."""
    digest = hashlib.sha256(key.encode()).digest()
    return int.from_bytes(digest[:8], "big") % VALIDATION_SHARE == 0


def solve_ridge(gram: Tensor, targets: Tensor, penalty: float) -> Tensor:
    """Return (G + lambda I)^-1 Q, (M, C). NaN if G + lambda I is not positive definite.

    Args:
        gram: G, (M, M), fp64.
        targets: Q, (M, C), fp64.
        penalty: lambda.
    """
    identity = torch.eye(len(gram), dtype=gram.dtype)
    factor, failure = torch.linalg.cholesky_ex(gram + penalty * identity)
    if failure:
        return torch.full_like(targets, torch.nan)
    return torch.cholesky_solve(targets, factor)


def compute_ridge_error(gram: Tensor, targets: Tensor, num_validated: int, penalty: float) -> float:
    """Return the mean squared error on the validation images; infinite without a solution.

    It is computed from sums over images: (tr(W^T G_v W) - 2 tr(W^T Q_v) + N_v) / (N_v C).

    Args:
        gram: G of the images for fitting and of those for validation, (2, M, M).
        targets: Q of both, (2, M, C).
        num_validated: N_v, the number of validation images.
        penalty: lambda.
    """
    weights = solve_ridge(gram[0], targets[0], penalty)
    squares = ((gram[1] @ weights) * weights).sum() - 2 * (weights * targets[1]).sum()
    error = float(squares + num_validated) / (num_validated * targets.shape[2])
    return error if math.isfinite(error) else math.inf
