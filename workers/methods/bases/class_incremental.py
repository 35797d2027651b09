"""Base class of methods that can predict without the task: scenarios `class` and `domain`."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from workers.data.batch import Batch
from workers.methods.base import Method, OptimPlan, ParamGroup, S, StepContext


class ClassIncremental(Method[S]):
    """A method that can predict without the task: the logits of all heads form one output space.

    In scenario `task` it works like any other `Method`. In scenario `domain`, where all tasks have
    the same classes, all tasks use one head if the method has `shares_head`. Otherwise each task
    has its own head, and the output space repeats the classes for each task.
    """

    # Cache of `global_labels`: the first column of each training task, as a tensor and as a tuple.
    _first_columns: Tensor | None = None
    _first_column_key: tuple[int, ...] = ()

    def begin(self, context: StepContext) -> list[ParamGroup]:
        """Prepare a step. Heads of earlier tasks are trained, too, except in scenario `task`."""
        groups = super().begin(context)
        if self.scenario == "task":
            return groups
        return self.head_groups(context.optim, self.head_names())

    def classification_loss(self, features: Tensor, batch: Batch) -> Tensor:
        """Return the cross-entropy over the logits of all tasks so far.

        In scenario `task` the cross-entropy is over the logits of the sample's own task.
        """
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
        """Return the logits of a task's head.

        If `task` is None, return the logits over all classes so far, in the order of
        `class_slices`.
        """
        if task is None:
            return self.all_logits(self.features(images))
        return super().logits(images, task)

    def all_logits(self, features: Tensor) -> Tensor:
        """Return the logits (b, classes so far) of features (b, d), ordered as `class_slices`."""
        return torch.cat([self.heads[name](features) for name in self.head_names()], 1)

    def head_names(self) -> list[str]:
        """Return the names of the heads that form the output space, in column order."""
        names = list(self.class_slices())
        return names[:1] if self.heads.is_shared else names

    def class_slices(self) -> dict[str, slice]:
        """Return the slice of the output space of each task.

        The tasks are the loaded ones and the current one, in stream order. With a shared head, all
        slices are equal.
        """
        names = [task.name for task in self.stream if task.name in self.heads.names]
        slices = {}
        start = 0
        for name in names or self.heads.names:  # the latter if `join_stream` was not called
            stop = start + self.heads[name].out_features
            slices[name] = slice(start, stop)
            start = 0 if self.heads.is_shared else stop
        return slices

    def global_labels(self, batch: Batch) -> Tensor:
        """Return the index of each sample's class in `all_logits`, (b,)."""
        slices = self.class_slices()
        starts = tuple(slices[task.name].start for task in self.training_tasks)
        device = batch.tasks.device
        cached = self._first_columns
        if cached is None or cached.device != device or self._first_column_key != starts:
            # Created once, because a copy to the device blocks the host.
            cached = torch.tensor(starts, device=device)
            self._first_columns, self._first_column_key = cached, starts
        return batch.labels + cached[batch.tasks]

    def global_targets(self, batch: Batch) -> Tensor:
        """Return the targets over all classes so far, one-hot or soft, (b, classes so far)."""
        slices = self.class_slices()
        num_classes = max(task_slice.stop for task_slice in slices.values())
        if batch.targets is None:
            # Not `F.one_hot`: on some devices it reads the largest label on the host, which waits.
            labels = self.global_labels(batch)[:, None]
            zeros = torch.zeros((len(labels), num_classes), device=labels.device)
            return zeros.scatter_(1, labels, 1.0)
        if len(self.training_tasks) > 1:  # the feed created targets over all classes
            return batch.targets
        task_slice = slices[self.training_tasks[0].name]
        return F.pad(batch.targets, (task_slice.start, num_classes - task_slice.stop))


class SeparateHeads(ClassIncremental[S]):
    """Each task trains its own head, with the cross-entropy over its own classes, in any scenario.

    The heads of earlier tasks are frozen.
    """

    def head_groups(self, optim: OptimPlan, names: list[str]) -> list[ParamGroup]:
        """Return the parameter groups of the head of the task in training; `names` is ignored."""
        assert self.task is not None
        return super().head_groups(optim, [self.task.name])

    # The next two methods skip `ClassIncremental`, because only the current task's head is trained.
    def classification_loss(self, features: Tensor, batch: Batch) -> Tensor:
        return Method.classification_loss(self, features, batch)

    def competing_outputs(self) -> int:
        return Method.competing_outputs(self)
