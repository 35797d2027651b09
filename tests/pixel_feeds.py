"""Helpers that train and serve a chain of steps on random images, without stages or files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import method_steps
import torch
from method_steps import TASKS, vit
from torch import Tensor

from workers.data.batch import Batch
from workers.dist import Group
from workers.job import Task
from workers.methods import METHODS
from workers.methods.base import StepData
from workers.rng import StepRng
from workers.storage.taskstate import Carried, TaskState


def pixels_of(task: Task) -> tuple[Tensor, Tensor]:
    """Return images and labels of a task, four of each class."""
    seed = torch.Generator().manual_seed(task.num_classes)
    labels = torch.arange(task.num_classes).repeat(4)
    return torch.randn(len(labels), 3, 16, 16, generator=seed), labels


class PixelFeed:
    """A feed over `pixels_of` in batches of `size`."""

    def __init__(self, task: Task, size: int = 5):
        self.group = Group()
        self.images, self.labels = pixels_of(task)
        self.size = size

    def evaluate(self) -> Iterator[Batch]:
        for rows in torch.arange(len(self.labels)).split(self.size):
            rng = StepRng(7, 0, 0, rows, len(rows), torch.device("cpu"))
            keys = [f"{row:03d}" for row in rows.tolist()]
            tasks = torch.zeros_like(rows)
            yield Batch(self.images[rows], self.labels[rows], tasks, rng, keys=keys)


def data_of(task: Task) -> StepData:
    """Return step data with only the train split of `task`."""

    def make_feed(split: str, training: bool) -> Any:
        assert (split, training) == ("train", False)
        return PixelFeed(task)

    return StepData(make_feed)


def make(name: str, tasks: Sequence[Task] = TASKS, scenario: str = "class", **settings: Any) -> Any:
    """Return a method on a tiny ViT for a stream of `tasks`."""
    method = METHODS[name](vit(), METHODS[name].Settings(**settings), 1)
    method.scenario, method.stream = scenario, tuple(tasks)
    return method


def learn_all(
    name: str, tasks: Sequence[Task], optimizer: str = "adam", **settings: Any
) -> tuple[list[TaskState], Carried]:
    """Run all steps of a stream; return the state of each task and the last carried state."""
    states: list[TaskState] = []
    carried: Carried | None = None
    for position, task in enumerate(tasks):
        steps = METHODS[name].steps_for(METHODS[name].Settings(**settings), position)
        for step in steps:
            if step.later and position == 0:
                continue
            torch.manual_seed(position)
            method = make(name, tasks[: position + 1], **settings)
            for state in states:
                method.load_task(state)
            groups = method_steps.begun(method, task, carried, step.name, data=data_of(task))
            if step.trains:
                method_steps.train(method, method_steps.OPTIMIZERS[optimizer](groups), task)
            state, carried = method.eval().finish()
        states.append(state)
    assert carried is not None
    return states, carried


def serve(
    name: str,
    states: Sequence[TaskState],
    carried: Carried,
    scenario: str = "class",
    **settings: Any,
) -> Any:
    """Return a method with these states, read from their bytes."""
    tasks = [Task(state.task, "card", "", state.classes) for state in states]
    return method_steps.serving(make(name, tasks, scenario, **settings), states, carried)
