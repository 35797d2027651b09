"""Linear probe: the backbone is frozen and each task trains only its head.

The tables of MEAT's paper list it as `Classifier`.
"""

from __future__ import annotations

from torch import Tensor

from workers.data.feed import Feed
from workers.methods.base import Method, MethodSettings
from workers.methods.train_defaults import TrainDefaults


class Linear(Method[MethodSettings]):
    """A frozen backbone and one head per task. Tasks are independent, so nothing is forgotten.

    Without augmentation an image has the same features in every epoch. They are computed once per
    stage, and the head is trained on them (`precompute`). The batches are the same as without this
    cache, and the results are equal up to the order of summation.
    """

    name = "linear"
    has_constant_step = True
    family = "baseline"
    keeps = "a head"
    train_defaults = TrainDefaults(
        lr=2e-3,
        source="measured on seven real tasks at 64 px: configs/RESULTS.md",
    )
    revision = 2

    def precompute(self, feed: Feed) -> None:
        """Let the feed cache the features of the frozen backbone; see `PrecomputesFeatures`."""
        if not any(p.requires_grad for p in self.backbone.parameters()):
            feed.cache_features(super().features)

    def features(self, images: Tensor) -> Tensor:
        """Return features (b, d) of images (b, 3, H, W), or cached features (b, d) unchanged."""
        if images.ndim == 2:
            return images
        return super().features(images)
