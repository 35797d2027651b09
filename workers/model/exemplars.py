"""Selection of exemplars: the number of images of each class in a memory, and which images.

The selection is deterministic: among images with equal scores, the first image is chosen. Only
`at_random` uses its random generator.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

# Maximum number of rounds of `rebuffi_herding`, as in the original code.
MAX_REBUFFI_ROUNDS = 1000

# Arguments: features (n, d) of one class, number of images, random generator. Result: indices of
# the chosen rows, in the order of choice.
Selection = Callable[[Tensor, int, torch.Generator], list[int]]


def quota(memory: int, per_class: int, classes: int) -> int:
    """Return the number of images to keep per class.

    Args:
        memory: Number of images in the whole memory, shared equally by the classes; used if
            `per_class` is 0.
        per_class: Fixed number of images per class. 0: floor(memory / classes).
        classes: Number of classes.
    """
    return per_class or memory // classes


def normalise(features: Tensor) -> Tensor:
    """Return the rows of (n, d) scaled to unit length, in fp64.

    In fp64, rounding errors, which depend on the order of summation, are too small to change which
    image is selected.
    """
    features = features.double()
    lengths: Tensor = features.norm(dim=1, keepdim=True)
    return features / (lengths + 1e-8)


def herding(features: Tensor, count: int, generator: torch.Generator) -> list[int]:
    """Choose images one by one, so that the mean of their features is near the class mean.

    Rebuffi et al., iCaRL, CVPR 2017, Alg. 4. Features d_i are scaled to unit length. Image k is the
    unused image with the largest d_i . (k mu - S), with the class mean mu and the sum S of the
    chosen features. A shorter selection is the beginning of a longer one.

    Args:
        features: Features of one class, (n, d).
        count: Number of images.
        generator: Not used.
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
    """Choose by herding like the code of iCaRL's authors (also used by DyTox, UCIR, PODNet, DER).

    Each round selects the image with the largest d_i . w, for features d_i scaled to unit length.
    The direction w is the class mean mu at first, and w <- w + mu - d_i after each round. If the
    image is already chosen, the round only changes w. After 1000 rounds, unused images are added in
    their order until there are `count` images; the original code adds them in arbitrary order.

    Args:
        features: Features of one class, (n, d).
        count: Number of images.
        generator: Not used.
    """
    unit = normalise(features)
    mean = unit.mean(0)
    direction = mean.clone()
    chosen: dict[int, None] = {}  # ordered set of indices
    for _ in range(MAX_REBUFFI_ROUNDS):
        if len(chosen) >= min(count, len(unit)):
            break
        best = int((unit @ direction).argmax())
        chosen.setdefault(best)
        direction += mean - unit[best]
    unused = [index for index in range(len(unit)) if index not in chosen]
    return [*chosen, *unused][:count]


def closest(features: Tensor, count: int, generator: torch.Generator) -> list[int]:
    """Choose the images nearest to the mean of the unnormalised features.

    Castro et al., End-to-End Incremental Learning, ECCV 2018.

    Args:
        features: Features of one class, (n, d).
        count: Number of images.
        generator: Not used.
    """
    features = features.double()
    distances = (features - features.mean(0)).square().sum(1)  # (n,)
    return distances.argsort(stable=True)[:count].tolist()


def at_random(features: Tensor, count: int, generator: torch.Generator) -> list[int]:
    """Choose images at random, without replacement.

    Args:
        features: Features of one class, (n, d); only their number is used.
        count: Number of images.
        generator: Draws the images.
    """
    return torch.randperm(len(features), generator=generator)[:count].tolist()


SELECTIONS: dict[str, Selection] = {
    "herding": herding,
    "rebuffi": rebuffi_herding,
    "closest": closest,
    "random": at_random,
}


def class_means(features: Tensor, labels: Tensor, classes: int) -> Tensor:
    """Return the mean of each class, (classes, d), scaled to unit length.

    The features are scaled to unit length before the mean. A class without images gets zeros.

    Args:
        features: Features, (n, d).
        labels: Labels, (n,).
        classes: Number of classes.
    """
    unit = normalise(features)
    sums = torch.zeros(classes, unit.shape[1], dtype=unit.dtype, device=unit.device)
    sums.index_add_(0, labels, unit)
    return normalise(sums).to(features.dtype)


def compute_nearest_mean_logits(features: Tensor, means: Tensor) -> Tensor:
    """Return logits (b, classes): the negative squared distances of unit features to class means.

    For unit vectors such a logit is 2 cos - 2.

    Args:
        features: Features (b, d) of any length.
        means: Class means as unit vectors, (classes, d).
    """
    unit = F.normalize(features.float(), dim=1)  # (b, d)
    return 2 * unit @ means.T - 2
