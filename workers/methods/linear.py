"""Linear probe: the backbone is frozen, each task trains only its head. MEAT's `Classifier`
column."""

from __future__ import annotations

from torch import Tensor

from workers.data.feed import Feed
from workers.methods.base import Method, MethodSettings


class Linear(Method[MethodSettings]):
    """A frozen backbone and one head per task (a star, zero forgetting).

    Where augmentation leaves images as they are, so are their features in every epoch: they are
    computed once per stage and the head is trained on them, with the same batches and, up to the
    order of summation, the same numbers.
    """

    name = "linear"
    revision = 2

    def precompute(self, feed: Feed) -> None:
        if not any(p.requires_grad for p in self.backbone.parameters()):
            feed.cache_features(super().features)

    def features(self, images: Tensor) -> Tensor:
        """images (b, 3, H, W), or what a feed holds in their place (b, d), -> (b, d)."""
        return images if images.ndim == 2 else super().features(images)
