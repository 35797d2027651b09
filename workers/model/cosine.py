"""Cosine heads: class vectors that are compared with features by direction alone, under one learnt
scale; and the losses on such similarities.

Axes: b images, d features, A classes so far, P vectors (proxies) of a class.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from workers.model.exemplars import normalise
from workers.model.heads import Heads
from workers.rng import derive_seed

ROUNDS = 100  # of k-means, where it has not settled before


class CosineHead(nn.Module):
    """features h (b, d) -> eta s (b, classes), where s_c = sum_p softmax_p(<h, w_cp>)_p <h, w_cp>
    over unit vectors: of one vector per class its cosine. fp32 also under autocast: a scale in the
    tens would make much of what bf16 rounds off."""

    def __init__(self, width: int, classes: int, proxies: int, scale: nn.Parameter):
        super().__init__()
        self.out_features = classes
        self.weight = nn.Parameter(torch.zeros(classes, proxies, width))
        self.scale = scale

    def forward(self, features: Tensor) -> Tensor:
        return self.scale * self.similarity(features)

    def similarity(self, features: Tensor) -> Tensor:
        """(b, d) -> s (b, classes) in [-1, 1]."""
        with torch.autocast(features.device.type, enabled=False):
            unit = F.normalize(features.float(), dim=1)
            vectors = F.normalize(self.weight, dim=2).flatten(0, 1)  # (classes P, d)
            cosines: Tensor = F.linear(unit, vectors)
            cosines = cosines.unflatten(1, self.weight.shape[:2])  # (b, classes, P)
            return (cosines.softmax(2) * cosines).sum(2)


class CosineHeads(Heads):
    """Class vectors by task, P for each class, and eta, which is one for all: it is stored with
    every head, and the last one that is restored counts. A head without it is a base task's linear
    one, and passed over: its classes get vectors by imprinting."""

    def __init__(self, width: int, proxies: int = 1, scale: float = 1.0):
        super().__init__(width)
        self.proxies = proxies
        self.scale = nn.Parameter(torch.tensor(float(scale)))

    def layer(self, classes: int) -> CosineHead:
        return CosineHead(self.width, classes, self.proxies, self.scale)

    def start(self, layer: Any, generator: torch.Generator) -> None:
        """Uniform in +-1/sqrt(d)."""
        nn.init.uniform_(layer.weight, -(self.width**-0.5), self.width**-0.5, generator=generator)

    def restore(self, task: str, tensors: dict[str, Tensor]) -> None:
        if "scale" in tensors:
            super().restore(task, tensors)


# ---- where new class vectors start ---------------------------------------------------------------
def imprint(
    features: Tensor, labels: Tensor, classes: int, proxies: int, length: float, seed: int
) -> Tensor:
    """features (n, d), labels (n,) -> class vectors (classes, P, d), each of the given length,
    along the means of P clusters of the unit vectors of that class; of one cluster this is the
    class mean."""
    unit = normalise(features)
    centres = []
    for label in range(classes):
        noise = torch.Generator().manual_seed(derive_seed(seed, "proxies", label))
        centres.append(normalise(k_means(unit[labels == label], proxies, noise)))
    return length * torch.stack(centres).to(features.dtype)


def k_means(points: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Lloyd's algorithm from k-means++ starts: (n, d) -> centres (count, d). An empty cluster keeps
    its centre, of equally near centres the first counts, and where there are fewer points than
    centres some centres are the same."""
    centres = points[torch.randint(len(points), (1,), generator=generator)]
    while len(centres) < count:
        # above 0, so that there is something to draw from
        far = _distances(points, centres).amin(1).square() + 1e-12
        centres = torch.cat([centres, points[torch.multinomial(far, 1, generator=generator)]])
    nearest = torch.full((len(points),), -1)
    for _ in range(ROUNDS):
        before, nearest = nearest, _distances(points, centres).argmin(1)
        if torch.equal(before, nearest):
            break
        sizes = nearest.bincount(minlength=count)[:, None]
        sums = torch.zeros_like(centres).index_add_(0, nearest, points)
        centres = torch.where(sizes > 0, sums / sizes.clamp(min=1), centres)
    return centres


def _distances(points: Tensor, centres: Tensor) -> Tensor:
    return torch.cdist(points, centres, compute_mode="donot_use_mm_for_euclid_dist")


# ---- losses on similarities ----------------------------------------------------------------------
def margin_rank(similarity: Tensor, labels: Tensor, old: int, top: int, margin: float) -> Tensor:
    """s (b, A), labels (b,) -> (b,): for a sample of one of the `old` first classes the mean over k
    of relu(margin - s_y + s_k), where k runs over the `top` most similar new classes; for any other
    sample 0."""
    rivals = similarity[:, old:].topk(top, 1).values  # (b, top)
    return F.relu(margin - similarity.gather(1, labels[:, None]) + rivals).mean(1) * (labels < old)


def nca(
    similarity: Tensor, labels: Tensor, scale: Tensor | float, margin: float, hinge: bool = True
) -> Tensor:
    """-log(exp(eta (s_y - margin)) / sum_{c != y} exp(eta s_c)), where the sample's own class is no
    part of the sum, and `hinge` keeps it from going below 0; a mean over the batch. s (b, A),
    labels (b,)."""
    true_class = scale * (similarity.gather(1, labels[:, None]).squeeze(1) - margin)  # (b,)
    other_classes = (scale * similarity).scatter(1, labels[:, None], -torch.inf).logsumexp(1)
    losses = other_classes - true_class
    if hinge:
        losses = F.relu(losses)
    return losses.mean()
