"""ER: experience replay, with a batch from a reservoir of old images in each step.

Chaudhry et al.: On Tiny Episodic Memories in Continual Learning, 2019.
"""

from __future__ import annotations

from torch import Tensor

from workers.data.batch import Batch
from workers.methods.base import Progress
from workers.methods.bases.reservoir import Reservoir, ReservoirSettings
from workers.methods.train_defaults import TrainDefaults


class Er(Reservoir[ReservoirSettings]):
    """L = mean CE over the b images of the task and the r exemplars of a step together.

    The two parts have the weights b / (b + r) and r / (b + r). In scenario `class` the
    cross-entropy is over all classes so far, in scenario `task` over the classes of an image's
    task. Method `replay` mixes the exemplars into the epoch instead.

    Differences from the paper: exemplars are those of earlier tasks only. In the paper the memory
    also has images of the current task, and each image is seen once.
    """

    name = "er"
    has_constant_step = True
    paper = "On Tiny Episodic Memories in Continual Learning, 2019"
    train_defaults = TrainDefaults(lr=1e-4, scratch_lr=1e-3, source="the rates of replay")

    def loss(self, batch: Batch, progress: Progress) -> tuple[Tensor, dict[str, Tensor]]:
        loss, terms = super().loss(batch, progress)
        return (1 - self.replay_share(batch)) * loss, terms

    def replay_loss(self, batch: Batch, progress: Progress) -> tuple[Tensor, dict[str, Tensor]]:
        ce, terms = super().replay_loss(batch, progress)
        return self.replay_share(batch) * ce, terms
