"""Exemplars: how many images a memory keeps of each class, and which.

Deterministic: among equals the first is taken.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

REBUFFI_ROUNDS = 1000  # after so many the original code fills up in any order

# features (n, d) of one class, how many, noise -> row indices, best first
Selection = Callable[[Tensor, int, torch.Generator], list[int]]


def quota(memory: int, per_class: int, classes: int) -> int:
    """Return m, the images of each class: `per_class`, or where it is 0 floor(memory / classes)."""
    return per_class or memory // classes


def normalise(features: Tensor) -> Tensor:
    """Return the rows of (n, d) as unit vectors, in fp64.

    Which one is nearest must not depend on the order of a sum.
    """
    features = features.double()
    lengths: Tensor = features.norm(dim=1, keepdim=True)
    return features / (lengths + 1e-8)


def herding(features: Tensor, count: int, generator: torch.Generator) -> list[int]:
    """Choose so that the mean of the chosen features is nearest to the class mean.

    Rebuffi et al., iCaRL, CVPR 2017, Alg. 4. For unit vectors the next one is the largest d_i . (k
    mu - S) among the unused, S the sum of those chosen. A selection of fewer is the start of a
    selection of more.
    """
    unit = normalise(features)
    mean = unit.mean(0)
    total = torch.zeros_like(unit[0])
    free = torch.ones(len(unit), dtype=torch.bool, device=unit.device)
    chosen: list[int] = []
    for k in range(1, min(count, len(unit)) + 1):
        gains = (unit @ (k * mean - total)).masked_fill(~free, -torch.inf)
        best = int(gains.argmax())
        chosen.append(best)
        free[best] = False
        total += unit[best]
    return chosen


def rebuffi_herding(features: Tensor, count: int, generator: torch.Generator) -> list[int]:
    """Choose by herding as the authors' code does (and DyTox, UCIR, PODNet, DER).

    An image can win again; this chooses nothing, and changes the direction. After 1000 rounds the
    first unused images fill up.
    """
    unit = normalise(features)
    mean = unit.mean(0)
    direction = mean.clone()
    chosen: dict[int, None] = {}  # in order of choice
    for _ in range(REBUFFI_ROUNDS):
        if len(chosen) >= min(count, len(unit)):
            break
        best = int((unit @ direction).argmax())
        chosen.setdefault(best)
        direction += mean - unit[best]
    unused = [index for index in range(len(unit)) if index not in chosen]
    return [*chosen, *unused][:count]


def closest(features: Tensor, count: int, generator: torch.Generator) -> list[int]:
    """Choose the images nearest to the mean of the unnormalised features (E2E, ECCV 2018)."""
    features = features.double()
    distances = (features - features.mean(0)).square().sum(1)  # (n,)
    return distances.argsort(stable=True)[:count].tolist()


def at_random(features: Tensor, count: int, generator: torch.Generator) -> list[int]:
    """Choose at random, without replacement."""
    return torch.randperm(len(features), generator=generator)[:count].tolist()


SELECTIONS: dict[str, Selection] = {
    "herding": herding,
    "rebuffi": rebuffi_herding,
    "closest": closest,
    "random": at_random,
}


def class_means(features: Tensor, labels: Tensor, classes: int) -> Tensor:
    """Return nu, (classes, d): the unit vectors along the mean of each class's unit vectors."""
    unit = normalise(features)
    sums = torch.zeros(classes, unit.shape[1], dtype=unit.dtype, device=unit.device)
    sums.index_add_(0, labels, unit)
    return normalise(sums).to(features.dtype)


def nearest_mean(features: Tensor, means: Tensor) -> Tensor:
    """Return logits (b, classes): minus the squared distance of unit features to class means.

    For unit vectors it is 2 cos - 2.
    """
    unit = F.normalize(features.float(), dim=1)  # (b, d)
    return 2 * unit @ means.T - 2
