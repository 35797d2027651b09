"""Classifiers from statistics of frozen features: one pass over the images, and no gradients."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from workers.data.features import FeatureBatch, extract_features
from workers.errors import UserError
from workers.job import Task, TrainSettings
from workers.methods.base import OptimPlan, ParamGroup, S, Step, StepContext
from workers.methods.bases.class_incremental import ClassIncremental
from workers.methods.train_defaults import TrainDefaults
from workers.model.heads import Heads
from workers.storage.taskstate import TaskState


class ClassStatistics(ClassIncremental[S]):
    """A frozen backbone, and a classifier from sums over the features of each class.

    The step `statistics` reads the features of the task's images once, under the evaluation
    transform. Sums are in fp64, over the images in the order of their keys: the result does not
    depend on batches or on the number of ranks. A subclass defines `collect`.
    """

    family = "class statistics"
    steps: ClassVar[tuple[Step, ...]] = (Step("statistics", trains=False, reads_features=True),)
    scenarios = frozenset({"task", "class", "domain"})
    train_defaults = TrainDefaults(lr=1e-3, source="nothing is trained")

    @classmethod
    def unused_train_settings(cls, settings: S) -> Mapping[str, str]:
        return dict.fromkeys(TrainSettings.model_fields, "it trains nothing")

    @classmethod
    def steps_for(cls, settings: S, position: int) -> tuple[Step, ...]:
        """Return the steps of a task. A base task has the same: its trained head is replaced."""
        return cls.steps

    def begin(self, context: StepContext) -> list[ParamGroup]:
        """Compute the statistics of the task's classes. No parameter is trained."""
        if context.carried is not None:
            self.load_carried(context.carried)
        groups = super().begin(context)
        self.read_statistics(context)
        return groups

    def read_statistics(self, context: StepContext) -> None:
        """Pass the features of the task's images to `collect`."""
        batch = self.read_features(context)
        with torch.no_grad():
            self.collect(context.task, batch)

    def read_features(self, context: StepContext) -> FeatureBatch:
        """Return the features of the task's images.

        The features come from the stage `features`, which all methods share. In a step that does
        not read that stage (`Step.reads_features` is False) they are computed here.
        """
        if context.data.load_features is not None:
            return context.data.load_features()
        self.eval()
        return extract_features(self.features, context.data.feed("train"))

    def head_groups(self, optim: OptimPlan, names: list[str]) -> list[ParamGroup]:
        return []

    def load_task(self, state: TaskState) -> None:
        if state.method == "base":  # the head that was trained with the backbone: not used
            return
        super().load_task(state)
        if isinstance(self.heads, DerivedHeads):
            self.heads.add(state.task, len(state.classes), self.seed)
        elif state.task not in self.heads.names:
            raise UserError(
                f"task {state.task!r}: its state has no class means; export it again, or write a "
                "new model folder with `accrete bundle`"
            )
        self.load_statistics(state)

    def load_statistics(self, state: TaskState) -> None:
        """Load the statistics of a finished task, if its state has more than a head."""

    @abstractmethod
    def collect(self, task: Task, batch: FeatureBatch) -> None:
        """Add the features of a task, which are on the CPU, to the classifier."""


class DerivedHeads(Heads):
    """Heads that are computed from other tensors: the state of a task does not contain its head."""

    def assign(self, task: str, weight: Tensor, bias: Tensor | None = None) -> None:
        """Set the head of a task, and create it first if it does not exist.

        Args:
            task: Name of the task.
            weight: (K, width).
            bias: (K,). None: zero.

        Raises:
            RuntimeError: If the width differs from that of the heads.
        """
        if bias is None:
            bias = torch.zeros(len(weight))
        head = self.add(task, len(weight), seed=0)
        head.load_state_dict({"weight": weight, "bias": bias})

    def export(self, task: str) -> dict[str, Tensor]:
        return {}

    def restore(self, task: str, tensors: dict[str, Tensor]) -> None:
        """Do nothing: the method computes the head."""


def sum_by_class(features: Tensor, labels: Tensor, num_classes: int) -> tuple[Tensor, Tensor]:
    """Return the number of samples (K,) and the sum of features (K, d) of each class, in fp64.

    Args:
        features: Features, (n, d).
        labels: Labels from 0 to K - 1, (n,).
        num_classes: K.
    """
    counts = labels.bincount(minlength=num_classes).double()
    sums = torch.zeros(num_classes, features.shape[1], dtype=torch.float64)
    return counts, sums.index_add_(0, labels, features.double())


def class_means(features: Tensor, labels: Tensor, num_classes: int) -> Tensor:
    """Return the mean feature of each class (K, d) in fp64; zero for a class without samples.

    See `sum_by_class` for the arguments.
    """
    counts, sums = sum_by_class(features, labels, num_classes)
    return sums / counts.clamp(min=1)[:, None]
