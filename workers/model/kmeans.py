"""Reproducible k-means on the CPU, in fp64: equal features and seeds give equal centres."""

from __future__ import annotations

import torch
from torch import Tensor

MAX_ROUNDS = 100  # maximum number of rounds of Lloyd's algorithm


def find_centres(points: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Return the centres of clusters of points by Lloyd's algorithm, in fp64.

    The initial centres are drawn as in k-means++: each next centre is a point, drawn with a
    probability proportional to its squared distance from the nearest earlier centre. A centre
    without points does not move.

    Args:
        points: Points on the CPU, (n, d).
        count: Number of centres k. There are fewer if there are fewer different points.
        generator: Draws the initial centres.

    Returns:
        (k, d).
    """
    points = points.double()
    first = int(torch.randint(len(points), (1,), generator=generator))
    centres = points[first : first + 1]
    while len(centres) < count:
        distances = squared_distances(points, centres).amin(1)
        if not distances.sum() > 0:
            break
        drawn = int(distances.multinomial(1, generator=generator))
        centres = torch.cat([centres, points[drawn : drawn + 1]])
    nearest = torch.empty(0, dtype=torch.int64)
    for _ in range(MAX_ROUNDS):
        previous = nearest
        nearest = squared_distances(points, centres).argmin(1)
        if torch.equal(nearest, previous):
            break
        sums = torch.zeros_like(centres).index_add_(0, nearest, points)
        sizes = nearest.bincount(minlength=len(centres))[:, None]
        centres = torch.where(sizes > 0, sums / sizes.clamp(min=1), centres)
    return centres


def squared_distances(points: Tensor, centres: Tensor) -> Tensor:
    """Return the squared Euclidean distances (n, k) of points (n, d) to centres (k, d)."""
    distances = torch.cdist(points, centres, compute_mode="donot_use_mm_for_euclid_dist")
    return distances.square()
