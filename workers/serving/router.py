"""The rule `ranpac`: the method RanPAC on the frozen backbone chooses the task of an image.

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

PROJECTION = 1000  # number of random features; each class has 4 kB of weights
SEED = 0  # seed of the random projection


class Router:
    """A ridge regression of all classes of all tasks on random features of the frozen backbone.

    The score of a task is the highest score of its classes. A new router has no tasks: fill it with
    `add`, or create it with `load`.

    Args:
        bundle: The model. The router loads its own copy of the frozen backbone, without weights
            of tasks.
        device: Device of the network.
        projection: Number of random features.
    """

    def __init__(self, bundle: Bundle, device: torch.device, projection: int = PROJECTION):
        backbone = bundle.backbone()
        self.method = Ranpac(backbone, RanpacSettings(projection=projection), SEED)
        self.method.to(device).requires_grad_(False).eval()

    @classmethod
    def load(cls, bundle: Bundle, weights: Mapping[str, Tensor], device: torch.device) -> Router:
        """Create a router from the weights of each task: name -> (classes, projection)."""
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
            features: Result of `features` for the images, (n, d).
            labels: Labels of the images, (n,).
            keys: Keys of the images. A hash of the key chooses images that validate the ridge
                penalty.
        """
        batch = FeatureBatch(features, labels, torch.zeros_like(labels), keys)
        self.method.collect(task, batch)

    def weights(self) -> dict[str, Tensor]:
        """Return name of a task -> weights, (classes, projection)."""
        heads = self.method.heads
        return {name: heads[name].weight.detach().clone() for name in heads.names}

    @torch.no_grad()
    def features(self, images: Tensor) -> Tensor:
        """Return the features of images (b, 3, H, W) with the frozen backbone, (b, d)."""
        return self.method.features(images)

    @torch.no_grad()
    def scores(self, images: Tensor) -> dict[str, Tensor]:
        """Compute scores of images (b, 3, H, W): name of a task -> (b,); larger is better."""
        projected = self.method.project(self.method.features(images))
        heads = self.method.heads
        return {name: heads[name](projected).amax(1) for name in heads.names}
