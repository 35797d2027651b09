"""Make the `StepContext` of a training step, for tests that run a method step by step."""

from __future__ import annotations

from typing import Any

from workers.job import Task
from workers.methods.base import OptimPlan, StepContext, StepData
from workers.storage.taskstate import Carried


def feed_data(feed: Any, has_validation: bool = False) -> StepData:
    """Return data that uses `feed` for every split."""
    return StepData(lambda split, training: feed, has_validation=has_validation)


def keys_data(keys: dict[str, list[str]]) -> StepData:
    """Return data in which every task has the same sample keys. keys: class -> keys."""
    return StepData(task_keys=lambda task: keys)


def step_context(
    task: Task,
    step: str = "train",
    carried: Carried | None = None,
    optim: OptimPlan = OptimPlan(1e-3, 0.0, 8, 6.0),  # noqa: B008 (frozen)
    tasks: tuple[Task, ...] = (),
    data: StepData = StepData(),  # noqa: B008 (frozen)
) -> StepContext:
    """Return the context of a step in the middle of a stream.

    tasks: the tasks whose samples are in training batches, `task` alone by default.
    """
    return StepContext(
        task, optim, step, training_tasks=tasks or (task,), carried=carried, data=data
    )
