"""Cosine heads of UCIR and PODNet, and their losses.

The logit of a class is the cosine of the features and a vector of the class, multiplied by a
learned scale, which all classes share. A class can have several vectors (proxies).

Axes: b images, d features, A classes so far, P proxies of a class.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from workers.model.exemplars import normalise
from workers.model.heads import Heads
from workers.rng import derive_seed

MAX_KMEANS_ROUNDS = 100  # maximum number of k-means rounds; most runs converge earlier


class CosineHead(nn.Module):
    """Features h (b, d) -> logits eta s (b, classes).

    s_c = sum_p softmax_p(<h, w_cp>) <h, w_cp> over the proxies p of class c, for h and w of unit
    length. With one proxy s_c is the cosine. s is computed in fp32 even under autocast, because a
    scale eta in the tens would magnify the rounding errors of bf16.
    """

    def __init__(self, width: int, classes: int, proxies: int, scale: nn.Parameter):
        super().__init__()
        self.out_features = classes
        self.weight = nn.Parameter(torch.zeros(classes, proxies, width))
        self.scale = scale

    def forward(self, features: Tensor) -> Tensor:
        return self.scale * self.similarity(features)

    def similarity(self, features: Tensor) -> Tensor:
        """Return s (b, classes) in [-1, 1] for features (b, d)."""
        with torch.autocast(features.device.type, enabled=False):
            unit = F.normalize(features.float(), dim=1)
            vectors = F.normalize(self.weight, dim=2).flatten(0, 1)  # (classes P, d)
            flat_cosines: Tensor = F.linear(unit, vectors)  # (b, classes P)
            cosines: Tensor = flat_cosines.unflatten(1, self.weight.shape[:2])  # (b, classes, P)
            shares = cosines.softmax(2)
            return (shares * cosines).sum(2)


class CosineHeads(Heads):
    """A `CosineHead` for each task, with P vectors per class. All heads share the scale eta.

    eta is stored with every head; the head that is restored last determines its value. A stored
    head without eta is the linear head of a base task. `restore` ignores it, because the classes of
    the base task get their vectors from `imprint`.
    """

    def __init__(self, width: int, proxies: int = 1, scale: float = 1.0):
        super().__init__(width)
        self.proxies = proxies
        self.scale = nn.Parameter(torch.tensor(float(scale)))

    def layer(self, classes: int) -> CosineHead:
        return CosineHead(self.width, classes, self.proxies, self.scale)

    def start(self, layer: Any, generator: torch.Generator) -> None:
        """Draw class vectors uniformly in +-1 / sqrt(d)."""
        bound = self.width**-0.5
        nn.init.uniform_(layer.weight, -bound, bound, generator=generator)

    def restore(self, task: str, tensors: dict[str, Tensor]) -> None:
        if "scale" in tensors:
            super().restore(task, tensors)


# ---- initial class vectors -----------------------------------------------------------------------
def imprint(
    features: Tensor, labels: Tensor, classes: int, proxies: int, length: float, seed: int
) -> Tensor:
    """Return initial class vectors (classes, P, d) from the features of images.

    The features of a class are scaled to unit length and grouped into P clusters. The vectors of
    the class have the directions of the cluster centres. With one cluster, this is the direction of
    the class mean.

    Args:
        features: Features, (n, d).
        labels: Labels, (n,).
        classes: Number of classes.
        proxies: Number P of vectors per class.
        length: Length of the vectors.
        seed: Seed of the k-means initialisation.
    """
    unit = normalise(features)
    directions = []
    for label in range(classes):
        generator = torch.Generator().manual_seed(derive_seed(seed, "proxies", label))
        centres = k_means(unit[labels == label], proxies, generator)
        directions.append(normalise(centres))
    return length * torch.stack(directions).to(features.dtype)


def k_means(points: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Return `count` centres (count, d) of points (n, d), by Lloyd's algorithm after k-means++.

    An empty cluster keeps its centre. A point with several nearest centres belongs to the first of
    these. If there are fewer points than centres, some centres are equal.
    """
    first = torch.randint(len(points), (1,), generator=generator)
    centres = points[first]
    while len(centres) < count:
        distances = _distances(points, centres).amin(1)
        weights = distances.square() + 1e-12  # not all 0, even if every point is a centre
        drawn = torch.multinomial(weights, 1, generator=generator)
        centres = torch.cat([centres, points[drawn]])
    nearest = torch.full((len(points),), -1)
    for _ in range(MAX_KMEANS_ROUNDS):
        previous = nearest
        nearest = _distances(points, centres).argmin(1)
        if torch.equal(previous, nearest):
            break
        sizes = nearest.bincount(minlength=count)[:, None]
        sums = torch.zeros_like(centres).index_add_(0, nearest, points)
        centres = torch.where(sizes > 0, sums / sizes.clamp(min=1), centres)
    return centres


def _distances(points: Tensor, centres: Tensor) -> Tensor:
    return torch.cdist(points, centres, compute_mode="donot_use_mm_for_euclid_dist")


# ---- losses on similarities ----------------------------------------------------------------------
def margin_rank(similarity: Tensor, labels: Tensor, old: int, top: int, margin: float) -> Tensor:
    """Return UCIR's margin loss of each sample, (b,).

    For a sample of an old class y, the loss is the mean of relu(margin - s_y + s_k) over the `top`
    most similar new classes k. For any other sample it is 0.

    Args:
        similarity: Similarities s, (b, A).
        labels: Labels, (b,).
        old: Number of old classes, which come first.
        top: Number of new classes to compare.
        margin: The margin.
    """
    true_class = similarity.gather(1, labels[:, None])  # (b, 1)
    new_classes = similarity[:, old:].topk(top, 1).values  # (b, top)
    losses = F.relu(margin - true_class + new_classes).mean(1)
    is_old = labels < old
    return losses * is_old


def nca(
    similarity: Tensor, labels: Tensor, scale: Tensor | float, margin: float, hinge: bool = True
) -> Tensor:
    """Return the NCA loss -log(exp(eta (s_y - margin)) / sum_{c != y} exp(eta s_c)).

    The sum excludes the class y. The loss is averaged over the samples.

    Args:
        similarity: Similarities s, (b, A).
        labels: Labels y, (b,).
        scale: The scale eta.
        margin: The margin.
        hinge: Clamp the loss of a sample at 0.
    """
    columns = labels[:, None]
    true_class = scale * (similarity.gather(1, columns).squeeze(1) - margin)  # (b,)
    scaled = (scale * similarity).scatter(1, columns, -torch.inf)  # without the class y
    other_classes = scaled.logsumexp(1)  # (b,)
    losses = other_classes - true_class
    if hinge:
        losses = F.relu(losses)
    return losses.mean()
