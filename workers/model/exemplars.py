"""Exemplars: how many images a memory keeps of each class, and which. Deterministic: of equals the
first is taken."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

REBUFFI_ROUNDS = 1000  # after so many the original code fills up in any order

Selection = Callable[
    [Tensor, int, torch.Generator], list[int]
]  # features (n, d) of one class, how many, noise -> places, best first


def quota(memory: int, per_class: int, classes: int) -> int:
    """m: images of each of `classes` classes; per_class of each where that is not 0, else
    floor(memory / classes)."""
    return per_class or memory // classes


def normalise(features: Tensor) -> Tensor:
    """Rows of (n, d) as unit vectors, in fp64: which one is nearest must not hang on the order of a
    sum."""
    features = features.double()
    lengths: Tensor = features.norm(dim=1, keepdim=True)
    return features / (lengths + 1e-8)


def herding(features: Tensor, count: int, generator: torch.Generator) -> list[int]:
    """Rebuffi et al., iCaRL, CVPR 2017, Alg. 4: each next one brings the mean of those chosen
    nearest to the class mean. Of unit vectors that is the largest d_i . (k mu - S) among the
    unused, one product per pick. What is chosen for a smaller count is the start of what is chosen
    for a larger one."""
    unit = normalise(features)
    mean, total, free = (
        unit.mean(0),
        torch.zeros_like(unit[0]),
        torch.ones(len(unit), dtype=torch.bool, device=unit.device),
    )
    chosen: list[int] = []
    for k in range(1, min(count, len(unit)) + 1):
        gains = (unit @ (k * mean - total)).masked_fill(~free, -torch.inf)
        best = int(gains.argmax())
        chosen.append(best)
        free[best] = False
        total += unit[best]
    return chosen


def rebuffi_herding(features: Tensor, count: int, generator: torch.Generator) -> list[int]:
    """The same as the authors' code does it (and DyTox, UCIR, PODNet, DER): an image can win
    again, which chooses nothing and turns the direction; after 1000 rounds the first unused ones
    fill up."""
    unit = normalise(features)
    mean = unit.mean(0)
    direction, chosen = mean.clone(), dict[int, None]()
    for _ in range(REBUFFI_ROUNDS):
        if len(chosen) >= min(count, len(unit)):
            break
        best = int((unit @ direction).argmax())
        chosen.setdefault(best)
        direction += mean - unit[best]
    return [*chosen, *(i for i in range(len(unit)) if i not in chosen)][:count]


def closest(features: Tensor, count: int, generator: torch.Generator) -> list[int]:
    """Nearest to the mean of the features as they are first (E2E, ECCV 2018)."""
    features = features.double()
    return (features - features.mean(0)).square().sum(1).argsort(stable=True)[:count].tolist()


def at_random(features: Tensor, count: int, generator: torch.Generator) -> list[int]:
    """Without replacement."""
    return torch.randperm(len(features), generator=generator)[:count].tolist()


SELECTIONS: dict[str, Selection] = {
    "herding": herding,
    "rebuffi": rebuffi_herding,
    "closest": closest,
    "random": at_random,
}


def class_means(features: Tensor, labels: Tensor, classes: int) -> Tensor:
    """nu: of each class the unit vector along the mean of its exemplars' unit vectors, (classes,
    d)."""
    unit = normalise(features)
    sums = torch.zeros(classes, unit.shape[1], dtype=unit.dtype, device=unit.device).index_add_(
        0, labels, unit
    )
    return normalise(sums).to(features.dtype)


def nearest_mean(features: Tensor, means: Tensor) -> Tensor:
    """Logits (b, classes): minus the squared distance of each feature's unit vector to each class
    mean, which for unit vectors is 2 cos - 2."""
    return 2 * F.normalize(features.float(), dim=1) @ means.T - 2
