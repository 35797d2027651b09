"""Classifier alignment: heads are trained on features drawn from a Gaussian of each class.

No images of earlier tasks are needed. Zhang, Wang, Kang, Chen, Wei: SLCA: Slow Learner with
Classifier Alignment for Continual Learning on a Pre-trained Model, ICCV 2023.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from workers.methods.bases.statistics import class_means
from workers.rng import derive_seed

RIDGE = 1e-4  # added to the diagonal of a covariance
EPS = 1e-7  # added to a length of logits
MOMENTUM, WEIGHT_DECAY = 0.9, 5e-4  # of SGD


class ClassGaussians(NamedTuple):
    """Gaussians of the features of a task's classes: N(mu_c, L_c L_c^T), in fp32 on the CPU.

    Attributes:
        means: mu_c, (K, d).
        factors: L_c, the lower Cholesky factor of Sigma_c + 1e-4 I, (K, d, d). Sigma_c is the
            unbiased covariance.
    """

    means: Tensor
    factors: Tensor

    def draw(self, count: int, seeds: Sequence[int], shrink: float = 1.0) -> Tensor:
        """Draw features (K, count, d) from N(shrink mu_c, Sigma_c + 1e-4 I).

        Args:
            count: Draws of each class.
            seeds: A seed for each class, (K,).
            shrink: Factor of the means.
        """
        draws = []
        for mean, factor, seed in zip(self.means, self.factors, seeds, strict=True):
            generator = torch.Generator().manual_seed(seed)
            noise = torch.randn(count, len(mean), generator=generator)
            draws.append(shrink * mean + noise @ factor.T)
        return torch.stack(draws)


def fit_gaussians(features: Tensor, labels: Tensor, num_classes: int) -> ClassGaussians:
    """Return the Gaussians of classes, computed in fp64.

    Args:
        features: Features, (n, d).
        labels: Labels from 0 to K - 1, (n,).
        num_classes: K.
    """
    means = class_means(features, labels, num_classes)
    identity = torch.eye(features.shape[1], dtype=torch.float64)
    factors = []
    for label in range(num_classes):
        centred = features[labels == label].double() - means[label]
        covariance = centred.T @ centred / max(len(centred) - 1, 1)
        factors.append(torch.linalg.cholesky(covariance + RIDGE * identity))
    return ClassGaussians(means.float(), torch.stack(factors).float())


@dataclass(frozen=True)
class AlignmentPlan:
    """Settings of an alignment.

    Attributes:
        epochs: Number of epochs, each with new draws.
        draws: Features drawn of each class in an epoch.
        batch_size: Features in a step.
        lr: Initial rate of SGD. It falls along a cosine over the epochs.
        tau: Temperature of logits of unit length (`normalised_loss`). None: plain cross-entropy.
        shrinks: Shrink the means of earlier tasks (`shrink_factors`).
    """

    epochs: int
    draws: int
    batch_size: int
    lr: float
    tau: float | None = None
    shrinks: bool = False


@torch.enable_grad()
def align_heads(
    heads: Mapping[str, tuple[Tensor, Tensor]],
    gaussians: Mapping[str, ClassGaussians],
    plan: AlignmentPlan,
    seed: int,
) -> dict[str, tuple[Tensor, Tensor]]:
    """Return new weights and biases of linear heads, trained together on drawn features.

    The result depends on the arguments alone. It is computed where the heads are; the noise is
    drawn on the CPU, by class, so that all ranks draw the same.

    Args:
        heads: Weight (K, d) and bias (K,) of each task, in stream order. They are not changed.
        gaussians: Gaussians of each task's classes.
        plan: The settings.
        seed: The seed of the run.
    """
    counts = [len(bias) for _, bias in heads.values()]
    weight = torch.cat([weight.detach() for weight, _ in heads.values()]).requires_grad_(True)
    bias = torch.cat([bias.detach() for _, bias in heads.values()]).requires_grad_(True)
    optimizer = torch.optim.SGD(
        [weight, bias], plan.lr, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY
    )
    labels = torch.arange(sum(counts)).repeat_interleave(plan.draws)
    shrinks = shrink_factors(len(heads)) if plan.shrinks else [1.0] * len(heads)
    for epoch in range(plan.epochs):
        optimizer.param_groups[0]["lr"] = (
            plan.lr * (1 + math.cos(math.pi * epoch / plan.epochs)) / 2
        )
        parts = []
        for name, count, shrink in zip(heads, counts, shrinks, strict=True):
            seeds = [derive_seed(seed, "align", name, label, epoch) for label in range(count)]
            parts.append(gaussians[name].draw(plan.draws, seeds, shrink).flatten(0, 1))
        features = torch.cat(parts)
        shuffle = torch.Generator().manual_seed(derive_seed(seed, "align", epoch))
        order = torch.randperm(len(features), generator=shuffle)
        for rows in order.split(plan.batch_size):
            drawn, targets = features[rows].to(weight.device), labels[rows].to(weight.device)
            logits = F.linear(drawn, weight, bias).split(counts, 1)
            if plan.tau is None:
                loss = F.cross_entropy(torch.cat(logits, 1), targets)
            else:
                loss = normalised_loss(logits, targets, plan.tau)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    weights, biases = weight.detach().split(counts), bias.detach().split(counts)
    return dict(zip(heads, zip(weights, biases, strict=True), strict=True))


def normalised_loss(logits: Sequence[Tensor], labels: Tensor, tau: float) -> Tensor:
    """Return the mean cross-entropy of z / (nu tau), nu = mean over tasks s of |z_s| + 1e-7.

    Args:
        logits: z_s of each task, (b, classes of the task).
        labels: Labels among all classes, (b,).
        tau: The temperature.
    """
    lengths = torch.stack([part.norm(dim=1) + EPS for part in logits], 1)  # (b, tasks)
    nu = lengths.mean(1, keepdim=True)
    return F.cross_entropy(torch.cat([*logits], 1) / (nu * tau), labels)


def shrink_factors(tasks: int) -> list[float]:
    """Return rho of each task, 0.9 + 0.1 (t + 1) / tasks, for t from 0; 1 for the newest."""
    return [0.9 + 0.1 * (task + 1) / tasks for task in range(tasks)]
