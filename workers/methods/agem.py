"""A-GEM: the gradient of a step is projected if it would raise the loss on old images.

Chaudhry, Ranzato, Rohrbach, Elhoseiny: Efficient Lifelong Learning with A-GEM, ICLR 2019.
"""

from __future__ import annotations

import torch
from torch import Tensor

from workers.data.batch import Batch
from workers.dist import Group
from workers.methods.bases.reservoir import Reservoir, ReservoirSettings
from workers.methods.train_defaults import TrainDefaults


class Agem(Reservoir[ReservoirSettings]):
    """g' = g - (g.r / r.r) r if g.r < 0, else g: equation 11 of the paper.

    g is the gradient of the cross-entropy on the task's images, and r is its gradient on random
    exemplars of all earlier tasks. Each gradient is one vector over all trained weights. In
    scenario `class` the cross-entropy is over all classes so far, in scenario `task` over the
    classes of an image's task.

    With plain SGD a small step then does not raise the loss of these exemplars. Momentum, weight
    decay and AdamW change the direction after the projection, so there is no such guarantee for
    them.

    Differences from the paper: the memory is a reservoir over all images; the paper keeps a fixed
    number of images of each class. A task may have several epochs.
    """

    name = "agem"
    has_constant_step = True
    paper = "Efficient Lifelong Learning with A-GEM, ICLR 2019"
    train_defaults = TrainDefaults(lr=1e-4, scratch_lr=1e-3, source="the rates of replay")

    def replay_parts(self, replays: list[Batch], group: Group) -> list[list[Batch]]:
        """Return the replay batch as the only part."""
        return [replays]

    def combine(self, gradient: Tensor, replayed: Tensor) -> Tensor:
        """See `CombinesGradients`: (P,) and (1, P) -> (P,)."""
        return project_gradient(gradient, replayed[0])


def project_gradient(gradient: Tensor, reference: Tensor) -> Tensor:
    """Return the vector closest to `gradient` (P,) that does not oppose `reference` (P,).

    The dot product of the result with `reference` is at least 0.
    """
    product = gradient @ reference
    square = reference @ reference
    # For a reference of zeros, 0 / 0 would be NaN.
    share = torch.where((product < 0) & (square > 0), product / square, 0.0)
    return gradient - share * reference
