"""Helpers to train a method with cosine heads on a stream of tiny tasks, without stages."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from class_incremental_steps import RATES, SMALL, batch
from step_contexts import feed_data, step_context

from workers import loop, optim
from workers.data.batch import Batch
from workers.dist import Group
from workers.job import Task, TrainSettings
from workers.methods import METHODS
from workers.methods.base import Progress
from workers.model.vit import build

TRAIN = TrainSettings(optimizer="sgd", lr=0.05, momentum=0.9, weight_decay=0.05)


def begun(name: str, *tasks: Task, step: str = "train", **settings: Any) -> Any:
    """Return a method after `begin` for `step` of the last task, with class vectors of all tasks.

    Its feed is `feed_of_three_batches(*tasks)`.
    """
    torch.manual_seed(0)
    method: Any = METHODS[name](build(SMALL), METHODS[name].Settings(**settings), 0)
    method.scenario, method.stream = "class", tasks
    for task in tasks[: -1 if step == "train" else None]:
        method.heads.add(task.name, task.num_classes, 0)
    data = feed_data(feed_of_three_batches(*tasks))
    method.groups = method.begin(step_context(tasks[-1], step, None, RATES, tasks, data))
    loop.freeze_others(method, method.groups)
    return method.train()


def feed_of_three_batches(*tasks: Task) -> Any:
    """Return a feed of three batches of six images without augmentation."""
    batches = []
    for i in range(3):
        keys = [f"{i}-{row}" for row in range(6)]
        batches.append(batch(*tasks, step=10 + i, keys=keys))
    return SimpleNamespace(group=Group(), evaluate=lambda: batches)


def counted(b: Batch, *tasks: Task) -> Batch:
    """Set the number of samples per task, as if the batch were the global batch; return it."""
    b.counts = tuple(b.tasks.bincount(minlength=len(tasks)).tolist())
    return b


def trained(method: Any, *tasks: Task, steps: int = 2) -> Any:
    """Train the method for `steps` steps of SGD with momentum and weight decay; return it."""
    optimizer = optim.build_optimizer(method.groups, TRAIN)
    job: Any = SimpleNamespace(train=TRAIN)
    for step in range(steps):
        batches = [counted(batch(*tasks, step=step), *tasks)]
        loop.train_step(method, optimizer, batches, Progress(0, step, 1, 10), job, Group())
    return method
