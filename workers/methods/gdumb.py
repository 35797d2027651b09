"""GDumb: a memory that keeps classes balanced, and a network trained on the memory alone.

Prabhu, Torr, Dokania: GDumb: A Simple Approach that Questions Our Progress in Continual Learning,
ECCV 2020.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any, TypeVar

from pydantic import Field, PositiveInt
from torch import nn

from workers.errors import UserError
from workers.job import Task, count_classes
from workers.methods.base import MethodSettings, StepContext
from workers.methods.joint import Joint
from workers.methods.train_defaults import TrainDefaults
from workers.rng import derive_seed

Label = TypeVar("Label", bound=Hashable)


class GdumbSettings(MethodSettings):
    """Settings of `gdumb`."""

    memory: PositiveInt = Field(500, description="number of exemplars of all classes so far")


class Gdumb(Joint):
    """L = CE on the memory alone, from the common backbone: `joint` on a part of the data.

    Each task trains a new network, and the newest one serves all tasks. The memory depends only on
    the seed and the keys of all images so far. So the tasks form a star: they train in parallel.

    Images arrive task by task, those of a task in a random order. With k classes so far, an image
    is kept if there is room or its class has fewer than memory / k images. To keep it in a full
    memory, one image of the largest class is dropped (`count_balanced`).

    Differences from the paper: among equally large classes the class that came first loses an
    image, in the paper a random class. The task of an image may be given (scenario `task`), and the
    backbone may be pretrained.
    """

    name = "gdumb"
    has_constant_step = True
    family = "rehearsal"
    paper = "GDumb: A Simple Approach that Questions Our Progress in Continual Learning, ECCV 2020"
    train_defaults = TrainDefaults(lr=1e-4, scratch_lr=1e-3, source="the rates of joint")
    Settings = GdumbSettings
    revision = 1  # counted separately from that of `Joint`
    settings: GdumbSettings

    @classmethod
    def check_backbone(
        cls, settings: Any, backbone: nn.Module, tasks: tuple[Task, ...] = ()
    ) -> None:
        super().check_backbone(settings, backbone, tasks)
        classes = count_classes(tasks)
        if settings.memory < classes:
            raise UserError(
                f"memory is {settings.memory}, and the stream has {classes} classes, so that some "
                f"would keep no image; give it {classes} or more"
            )

    def memory(self, context: StepContext) -> dict[str, list[str]]:
        """Return the keys of the memory by task; see `RemembersSamples`."""
        # (task, class) of each image, in the order of arrival. The task is "" if the tasks are
        # slices of a stream, which share classes.
        arrivals: list[tuple[str, str]] = []
        keys: dict[tuple[str, str], list[tuple[str, str]]] = {}  # -> (task, key) of each image
        for task in context.stream:
            images = []
            for class_name, class_keys in context.data.keys(task).items():
                for key in class_keys:
                    priority = derive_seed(self.seed, "gdumb", task.name, key)
                    images.append((priority, class_name, key))
            for _, class_name, key in sorted(images):
                owner = task.name if task.parts is None else ""
                arrivals.append((owner, class_name))
                keys.setdefault(arrivals[-1], []).append((task.name, key))
        memory: dict[str, list[str]] = {}
        for label, count in count_balanced(arrivals, self.settings.memory).items():
            # The images of a class in one task are in random order, so its first ones are a random
            # choice. A class that several slices share keeps images of the earliest slices.
            for task_name, key in keys[label][:count]:
                memory.setdefault(task_name, []).append(key)
        return memory


def count_balanced(labels: Iterable[Label], size: int) -> dict[Label, int]:
    """Return the number of samples of each class that the greedy sampler keeps (Algorithm 1).

    Args:
        labels: The class of each sample, in the order of arrival.
        size: Size of the memory.
    """
    counts: dict[Label, int] = {}
    total = 0
    for label in labels:
        counts.setdefault(label, 0)
        if total >= size:
            if counts[label] * len(counts) >= size:
                continue
            largest = max(counts, key=lambda other: counts[other])  # the first of equals
            counts[largest] -= 1
            total -= 1
        counts[label] += 1
        total += 1
    return counts
