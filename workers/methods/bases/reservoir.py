"""Replay from a reservoir: each step uses a batch of the task and a batch from the memory."""

from __future__ import annotations

import heapq
from typing import Any

from pydantic import Field, PositiveInt
from torch import Tensor
from typing_extensions import TypeVar

from workers.data.batch import Batch
from workers.errors import UserError
from workers.job import DataSettings, TrainSettings
from workers.methods.base import MethodSettings, ParamGroup, Progress, StepContext
from workers.methods.bases.rehearsal import MEMORY, CarriesMemory, Memory, list_task_keys
from workers.rng import derive_seed


class ReservoirSettings(MethodSettings):
    """Settings of `er`."""

    memory: PositiveInt = Field(
        500, description="number of exemplars, a uniform sample of all images of the tasks so far"
    )
    replay_batch: PositiveInt = Field(
        32,
        description="number of exemplars in each draw of a step, independent of train.batch_size; "
        "a smaller memory is replayed as a whole",
    )


S = TypeVar("S", bound=ReservoirSettings, default=Any)


class Reservoir(CarriesMemory[S]):
    """A chain with a uniform sample of all images as memory, replayed in separate batches.

    Reservoir sampling (Vitter, 1985) keeps each image of the stream with the same probability. Here
    each image has a random priority, a hash of the seed, its task and its key, and the memory has
    the images with the largest priorities. The distribution is the same. The memory depends neither
    on the order of images nor on ranks or epochs, and a smaller memory is a subset of a larger one.

    The memory changes in `herd`, between tasks. Therefore a task replays only images of earlier
    tasks, and the first task has no replay, unless a subclass overrides this. Subclasses can
    override `loss` and `replay_loss`.
    """

    family = "rehearsal"
    keeps = "a head"
    Settings = ReservoirSettings
    needs_states = True  # all heads, also in scenario `task`
    scenarios = frozenset({"task", "class", "domain"})
    shares_head = True
    per_task = frozenset({"replay_batch"})

    @classmethod
    def validate(cls, settings: S, train: TrainSettings, data: DataSettings, scenario: str) -> None:
        if data.mixup or data.cutmix or data.smoothing:
            raise UserError(
                "data.mixup, data.cutmix or data.smoothing is above 0, and the losses of "
                f"{cls.name} need images with one class each; set all three to 0 for this method"
            )

    @classmethod
    def ignored_settings(cls, step: str) -> frozenset[str]:
        return frozenset({"memory"}) if step == "train" else cls.per_task

    def replay_draws(self) -> tuple[int, ...]:
        """See `ReplaysSamples`."""
        return (self.settings.replay_batch,)

    def memory(self, context: StepContext) -> dict[str, list[str]]:
        """Return task -> keys of all exemplars in `train`. `herd` reads no images."""
        if context.step == "herd" or not self.replay_draws():
            return {}
        return super().memory(context)

    def begin(self, context: StepContext) -> list[ParamGroup]:
        groups = super().begin(context)
        if context.step == "herd":
            self.remember(self.next_memory(context))
        return groups

    def next_memory(self, context: StepContext) -> Memory:
        """Return the memory after the task: a choice from the old memory and the task's images."""
        memory: Memory = {} if context.carried is None else context.carried.meta.get(MEMORY, {})
        samples = memory | {context.task.name: context.data.keys(context.task)}
        return keep_reservoir(samples, self.settings.memory, self.seed)

    def remember(self, memory: Memory) -> None:
        """Replace the memory."""
        self.exemplars = memory

    def replay_loss(self, batch: Batch, progress: Progress) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the mean cross-entropy of the replay batch; see `ReplaysSamples`."""
        assert batch.replay is not None
        ce = self.classification_loss(self.features(batch.replay.images), batch.replay)
        return ce, {"replay": ce.detach()}

    def replay_share(self, batch: Batch) -> float:
        """Return the share of the replay batch among all samples of the step, over all ranks."""
        if batch.replay is None:
            return 0.0
        return batch.replay.draw.size / (batch.replay.draw.size + batch.draw.size)


def keep_reservoir(samples: Memory, size: int, seed: int) -> Memory:
    """Return the `size` samples with the largest priorities.

    Tasks and classes are sorted, as in the stored memory. The keys of a class are sorted by
    priority.
    """
    priorities = []
    for task, classes in samples.items():
        for class_name, keys in classes.items():
            for key in keys:
                priority = derive_seed(seed, "reservoir", task, key)
                priorities.append((priority, task, class_name, key))
    kept: Memory = {}
    largest = heapq.nlargest(size, priorities)
    for _, task, class_name, key in sorted(largest, key=lambda sample: sample[1:3]):
        kept.setdefault(task, {}).setdefault(class_name, []).append(key)
    return kept


def list_slots(memory: Memory) -> list[tuple[str, str]]:
    """Return the task and the key of each sample of a memory: item i is slot i (`Batch.slots`)."""
    return [(task, key) for task, keys in list_task_keys(memory).items() for key in keys]
