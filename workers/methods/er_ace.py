"""ER-ACE: experience replay in which new images do not push down the outputs of old classes.

Caccia et al.: New Insights on Reducing Abrupt Representation Change in Online Continual Learning,
ICLR 2022.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from workers.data.batch import Batch
from workers.methods.base import ParamGroup, Progress, StepContext
from workers.methods.bases.rehearsal import list_task_keys
from workers.methods.bases.reservoir import Reservoir, ReservoirSettings
from workers.methods.train_defaults import TrainDefaults


class ErAce(Reservoir[ReservoirSettings]):
    """L = CE(task's images, over its own classes) + CE(exemplars, over all classes so far).

    This is the asymmetric cross-entropy. The first term has no gradient for outputs of earlier
    classes. In scenario `task` the second term is over the classes of an exemplar's task, so that
    the loss differs from that of `er` only in the factors of its two terms.

    Differences from the paper: the classes of the first term are all classes of the current task,
    not the classes of the mini-batch, which would differ between ranks. `train` replays one fixed
    memory: the memory after this task (`next_memory`), which already has images of this task. A
    task may have several epochs.
    """

    name = "er_ace"
    has_constant_step = True
    paper = (
        "New Insights on Reducing Abrupt Representation Change in Online Continual Learning, "
        "ICLR 2022"
    )
    train_defaults = TrainDefaults(
        lr=1e-4, scratch_lr=1e-3, source="the learning rates of method `replay`"
    )

    @classmethod
    def ignored_settings(cls, step: str) -> frozenset[str]:
        """See `Method`. Unlike in `er`, `train` depends on `memory`, the size of the memory."""
        return frozenset() if step == "train" else cls.per_task

    def memory(self, context: StepContext) -> dict[str, list[str]]:
        """In `train`, return the memory with images of the current task.

        Without these images no term of the loss would compare new classes with old classes.
        """
        if context.step == "train":
            return list_task_keys(self.next_memory(context))
        return super().memory(context)

    def begin(self, context: StepContext) -> list[ParamGroup]:
        groups = super().begin(context)
        task = context.task
        # bool (K,): True for classes without images in this task. None: all classes have images.
        # Only a slice of a stream (`Task.parts`) can lack images of a class.
        self.is_absent: Tensor | None = None
        if task.parts is not None:
            absent = [name not in task.shares for name in task.classes]
            self.is_absent = torch.tensor(absent, device=self.device)
        return groups

    def loss(self, batch: Batch, progress: Progress) -> tuple[Tensor, dict[str, Tensor]]:
        assert self.task is not None
        logits = self.heads[self.task.name](self.features(batch.images)).float()
        if self.is_absent is not None:
            logits = logits.masked_fill(self.is_absent, -torch.inf)
        ce = F.cross_entropy(logits, batch.labels)
        return ce, {"ce": ce.detach()}

    def competing_outputs(self) -> int:
        """Return the number of the task's classes with images; `loss` masks all others."""
        assert self.task is not None
        return len(self.task.shares)
