"""Helpers for tests of class-incremental methods on tiny tasks, with and without stages."""

from __future__ import annotations

from itertools import chain
from types import SimpleNamespace
from typing import Any

import torch
from step_contexts import step_context
from torch import Tensor, nn

from pipeline.testing.lab import TASKS, Lab, Run
from workers import loop, optim
from workers.data.batch import Batch
from workers.data.feed import Feed
from workers.dist import Group
from workers.job import BackboneSettings, Task, TrainSettings
from workers.methods import METHODS
from workers.methods.base import Method, OptimPlan, Progress
from workers.model.vit import build
from workers.rng import StepRng

SMALL = BackboneSettings(
    img_size=16,
    options={"patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 2, "weight_init": "jax"},
)
RATES = OptimPlan(lr=1e-2, weight_decay=0.05, batch_size=6, full_rate_steps=10.0)
A = Task("a", "card", "", ("a1", "a2"))
B = Task("b", "card", "", ("b1", "b2", "b3"))
C = Task("c", "card", "", ("c1", "c2"))
START = Progress(0, 0, 1, 10)
TRAIN = {"optimizer": "adamw", "lr": 1e-2, "weight_decay": 0.05, "epochs": 1}


def begun(name: str, *tasks: Task, step: str = "train", **settings: Any) -> Any:
    """Return a method at the start of `step` of the last of `tasks`.

    It has heads of the earlier tasks, and in steps other than `train` also of the last task. Its
    batches contain samples of all tasks.
    """
    torch.manual_seed(0)
    method = METHODS[name](build(SMALL), METHODS[name].Settings(**settings), 0)
    method.scenario, method.stream = "class", tasks
    for task in tasks[: -1 if step == "train" else None]:
        method.heads.restore(task.name, nn.Linear(32, task.num_classes).state_dict())
    groups = method.begin(step_context(tasks[-1], step, None, RATES, tasks))
    loop.freeze_others(method, groups)
    method.groups = groups  # type: ignore[assignment]
    return method.train()


def batch(*tasks: Task, step: int = 0, rows: slice = slice(None), **parts: Any) -> Batch:
    """Return a batch of six images that alternate between tasks, and between a task's classes.

    rows: the rows of the batch that this rank holds.
    """
    task_indices = torch.arange(6) % len(tasks)
    labels = torch.zeros(6, dtype=torch.long)
    for i, task_index in enumerate(task_indices.tolist()):
        labels[i] = i // len(tasks) % tasks[task_index].num_classes
    images = torch.randn(6, 3, 16, 16, generator=torch.Generator().manual_seed(step))
    rng = StepRng(7, 0, step, torch.arange(6)[rows], 6, torch.device("cpu"))
    return Batch(images[rows], labels[rows], task_indices[rows], rng, **parts)


def wide(batch: Batch, *tasks: Task) -> Tensor:
    """Return the labels of `batch` (b,) as positions among all classes of `tasks`."""
    sizes = torch.tensor([task.num_classes for task in tasks])
    offsets = sizes.cumsum(0) - sizes  # position of the first class of each task
    return offsets[batch.tasks] + batch.labels


def moved(method: Method) -> None:
    """Move all parameters as training would, so that student and teacher differ."""
    with torch.no_grad():
        for i, p in enumerate(method.parameters()):
            p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(i)), alpha=0.05)


def stepped(method: Any, *tasks: Task) -> set[str]:
    """Take a training step, and return the names of the changed parameters."""
    before = {name: p.detach().clone() for name, p in method.named_parameters()}
    train = TrainSettings(optimizer="sgd", lr=0.1)
    optimizer = optim.build_optimizer(method.groups, train)
    job: Any = SimpleNamespace(train=train)
    loop.train_step(method, optimizer, [batch(*tasks)], START, job, Group())
    return {name for name, p in method.named_parameters() if not torch.equal(p, before[name])}


def stream(lab: Lab, method: str, base: str | None = None, **settings: Any) -> Run:
    """Run both tasks of `Lab` in scenario `class`, one epoch each.

    base: the name of the task that the backbone is trained on.
    """
    tasks = []
    for name, classes in TASKS.items():
        role = "base" if name == base else "task"
        task = {"card": str(lab.card), "name": name, "classes": list(classes), "role": role}
        tasks.append(task)
    return lab.run_of(
        method, TRAIN, methods={method: settings}, stream={"scenario": "class", "tasks": tasks}
    )


def remembered(
    run: Run, task: int, memory: dict[str, dict[str, list[str]]]
) -> dict[str, tuple[Tensor, list[str]]]:
    """Return the exemplars of each class in `memory`: images (n, 3, 16, 16), and their keys.

    They are looked up in the same way as in a stage of `task`.
    """
    job = run.stages(task)[0]
    keys_by_task: dict[str, list[str]] = {}
    keys_by_class: dict[str, list[str]] = {}
    for name, classes in memory.items():
        keys_by_task[name] = list(chain.from_iterable(classes.values()))
        keys_by_class |= classes
    tasks = tuple(t for t in job.tasks if t.name in memory)
    images: dict[str, Tensor] = {}
    for b in Feed(job, tasks, "train", Group(), False, keys_by_task).evaluate():
        images |= zip(b.keys or [], b.images, strict=True)
    exemplars = {}
    for name, keys in keys_by_class.items():
        exemplars[name] = (torch.stack([images[key] for key in keys]), keys)
    return exemplars
