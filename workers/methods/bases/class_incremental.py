"""One output space over the classes of all tasks: scenarios `class` and `domain`."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from workers.data.batch import Batch
from workers.methods.base import Method, OptimPlan, ParamGroup, S, StepContext


class ClassIncremental(Method[S]):
    """A method that can answer without being given the task: the heads of all tasks compete.

    In scenario `task` it works as any other `Method`. In scenario `domain` all tasks have the same
    classes: with `shares_head` one head has an output for each class, otherwise the output space
    has the classes of each task, as in scenario `class`.
    """

    _starts: Tensor | None = None  # of each task's classes, on the device
    _start_numbers: tuple[int, ...] = ()

    def begin(self, context: StepContext) -> list[ParamGroup]:
        """Unless the task is given, train the heads of all tasks, since they answer together."""
        groups = super().begin(context)
        if self.scenario == "task":
            return groups
        return self.head_groups(context.optim, self.head_names())

    def classification_loss(self, features: Tensor, batch: Batch) -> Tensor:
        """Unless the task is given, the cross-entropy is over the outputs of all tasks so far."""
        if self.scenario == "task":
            return super().classification_loss(features, batch)
        logits = self.all_logits(features).float()
        if batch.targets is None:
            return F.cross_entropy(logits, self.global_labels(batch))
        return F.cross_entropy(logits, self.global_targets(batch))

    def competing_outputs(self) -> int:
        if self.scenario == "task":
            return super().competing_outputs()
        return sum(self.heads[name].out_features for name in self.head_names())

    def logits(self, images: Tensor, task: str | None) -> Tensor:
        """With task None: logits over all classes so far, in the order of `class_slices`."""
        if task is None:
            return self.all_logits(self.features(images))
        return super().logits(images, task)

    def all_logits(self, features: Tensor) -> Tensor:
        """Features (b, d) -> (b, classes so far), in the order of `class_slices`."""
        return torch.cat([self.heads[name](features) for name in self.head_names()], 1)

    def head_names(self) -> list[str]:
        """Return the names of the heads that form the output space, in column order."""
        names = list(self.class_slices())
        return names[:1] if self.heads.is_shared else names

    def class_slices(self) -> dict[str, slice]:
        """Return the positions of each task's classes in the one output space.

        They are the loaded tasks and the current one, in stream order. With a shared head all have
        the same positions.
        """
        names = [task.name for task in self.stream if task.name in self.heads.names]
        slices = {}
        start = 0
        for name in names or self.heads.names:
            stop = start + self.heads[name].out_features
            slices[name] = slice(start, stop)
            start = 0 if self.heads.is_shared else stop
        return slices

    def global_labels(self, batch: Batch) -> Tensor:
        """Return each sample's class among all classes so far, (b,)."""
        slices = self.class_slices()
        starts = tuple(slices[task.name].start for task in self.training_tasks)
        device = batch.tasks.device
        if self._starts is None or self._starts.device != device or self._start_numbers != starts:
            self._start_numbers = starts
            self._starts = torch.tensor(starts, device=device)  # once: the host waits for it
        return batch.labels + self._starts[batch.tasks]

    def global_targets(self, batch: Batch) -> Tensor:
        """Return each sample's targets over all classes so far, one-hot or soft, (b, classes)."""
        slices = self.class_slices()
        num_classes = max(task_slice.stop for task_slice in slices.values())
        if batch.targets is None:
            return F.one_hot(self.global_labels(batch), num_classes).float()
        if len(self.training_tasks) > 1:  # the feed gave targets over all classes
            return batch.targets
        task_slice = slices[self.training_tasks[0].name]
        return F.pad(batch.targets, (task_slice.start, num_classes - task_slice.stop))


class SeparateHeads(ClassIncremental[S]):
    """Each task trains its own head, with the cross-entropy over its own classes, in any scenario.

    The heads of finished tasks stay as they are while another task trains.
    """

    def head_groups(self, optim: OptimPlan, names: list[str]) -> list[ParamGroup]:
        """Return the parameter groups of the head of the task in training."""
        assert self.task is not None
        return super().head_groups(optim, [self.task.name])

    def classification_loss(self, features: Tensor, batch: Batch) -> Tensor:
        return Method.classification_loss(self, features, batch)

    def competing_outputs(self) -> int:
        return Method.competing_outputs(self)
