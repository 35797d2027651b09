"""What a step of a task starts from, for tests that take a method step by step."""

from __future__ import annotations

from typing import Any

from workers.job import Task
from workers.methods.base import OptimPlan, StepContext, StepData
from workers.storage.taskstate import Carried


def feed_data(feed: Any, has_validation: bool = False) -> StepData:
    """Data of which every split is `feed`."""
    return StepData(lambda split, training: feed, has_validation=has_validation)


def keys_data(keys: dict[str, list[str]]) -> StepData:
    """Data of which every task has these keys, by class."""
    return StepData(task_keys=lambda task: keys)


def step_context(
    task: Task,
    step: str = "train",
    carried: Carried | None = None,
    optim: OptimPlan = OptimPlan(1e-3, 0.0, 8, 6.0),  # noqa: B008 (frozen)
    tasks: tuple[Task, ...] = (),
    data: StepData = StepData(),  # noqa: B008 (frozen)
) -> StepContext:
    """A context in the middle of a stream; `tasks`: those that batches have samples of."""
    return StepContext(
        task, optim, step, training_tasks=tasks or (task,), carried=carried, data=data
    )
