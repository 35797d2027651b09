"""The rule `ranpac`: the method of this name, on the frozen backbone, names the task of an image.

McDonnell, Gong, Parvaneh, Abbasnejad, van den Hengel: RanPAC: Random Projections and Pre-trained
Models for Continual Learning, NeurIPS 2023.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from workers.data.features import FeatureBatch
from workers.job import Task
from workers.methods.ranpac import Ranpac, RanpacSettings
from workers.serving.bundle import Bundle

PROJECTION = 1000  # random features; 4 kB of weights for each class
SEED = 0  # of the projection


class Router:
    """A ridge regression of all classes on random features of the frozen backbone.

    A task scores as its best class does.

    Args:
        bundle: The model; its backbone is loaded once more, without anything that a task changes.
        device: Device of the network.
        projection: Number of random features.
    """

    def __init__(self, bundle: Bundle, device: torch.device, projection: int = PROJECTION):
        backbone = bundle.backbone()
        self.method = Ranpac(backbone, RanpacSettings(projection=projection), SEED)
        self.method.to(device).requires_grad_(False).eval()

    @classmethod
    def load(cls, bundle: Bundle, weights: Mapping[str, Tensor], device: torch.device) -> Router:
        """Return the router with the weights of each task, (K, projection)."""
        (projection,) = {weight.shape[1] for weight in weights.values()}
        router = cls(bundle, device, projection)
        for name, weight in weights.items():
            router.method.heads.assign(name, weight)
        router.method.to(device)
        return router

    def add(self, task: Task, features: Tensor, labels: Tensor, keys: list[str]) -> None:
        """Learn the images of a task.

        Args:
            task: The task.
            features: `features` of its images, (n, d).
            labels: Their labels, (n,).
            keys: Their keys; a hash of them chooses those that validate the ridge penalty.
        """
        batch = FeatureBatch(features, labels, torch.zeros_like(labels), keys)
        self.method.collect(task, batch)

    def weights(self) -> dict[str, Tensor]:
        """Return the weights of each task, (K, projection)."""
        heads = self.method.heads
        return {name: heads[name].weight.detach().clone() for name in heads.names}

    @torch.no_grad()
    def features(self, images: Tensor) -> Tensor:
        """Return the features of images (b, 3, H, W) with the frozen backbone, (b, d)."""
        return self.method.features(images)

    @torch.no_grad()
    def scores(self, images: Tensor) -> dict[str, Tensor]:
        """Return how well each task fits images (b, 3, H, W), (b,); larger is better."""
        projected = self.method.project(self.method.features(images))
        heads = self.method.heads
        return {name: heads[name](projected).amax(1) for name in heads.names}
