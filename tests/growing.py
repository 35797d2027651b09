"""A method of scenario `class` in the middle of a stream of tiny tasks, without stages; and streams
of the laboratory for it."""

from __future__ import annotations

from typing import Any

import torch
from laboratory import TASKS, Lab, Run
from torch import Tensor, nn

from workers.data.batch import Batch
from workers.data.feed import Feed
from workers.dist import Group
from workers.job import BackboneSettings, Task
from workers.methods import METHODS
from workers.methods.base import Method, OptimPlan, Progress
from workers.model.vit import build
from workers.rng import StepRng

SMALL = BackboneSettings(
    img_size=16,
    options={"patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 2, "weight_init": "jax"},
)
RATES = OptimPlan(lr=1e-2, weight_decay=0.05, batch_size=6, mean_rate_steps=10.0)
A, B, C = (
    Task(name, "card", "", tuple(name + c for c in "123"[:count]))
    for name, count in (("a", 2), ("b", 3), ("c", 2))
)
START = Progress(0, 0, 1, 10)
TRAIN = {"optimizer": "adamw", "lr": 1e-2, "weight_decay": 0.05, "epochs": 1}


def begun(name: str, *tasks: Task, step: str = "train", **settings: Any) -> Any:
    """A method that knows the heads of `tasks`, and is at `step` of the last of them; all tasks
    have samples in its batches."""
    torch.manual_seed(0)
    method = METHODS[name](build(SMALL), METHODS[name].Settings(**settings), 0)
    method.scenario, method.stream = "class", tasks
    for task in tasks[: -1 if step == "train" else None]:
        method.heads.restore(task.name, nn.Linear(32, task.num_classes).state_dict())
    method.groups = method.begin(tasks[-1], step, None, RATES, tasks)  # type: ignore[assignment]
    trained = {id(p) for group in method.groups for p in group["params"]}  # type: ignore[union-attr]
    for p in method.parameters():
        p.requires_grad_(id(p) in trained)
    return method.train()


def batch(*tasks: Task, step: int = 0, rows: slice = slice(None), **parts: Any) -> Batch:
    """Six images; the tasks in turn, and of each its classes in turn. rows: those that this rank
    holds."""
    places = torch.arange(6) % len(tasks)
    labels = torch.tensor(
        [i // len(tasks) % tasks[place].num_classes for i, place in enumerate(places.tolist())]
    )
    pictures = torch.randn(6, 3, 16, 16, generator=torch.Generator().manual_seed(step))
    draw = StepRng(7, 0, step, torch.arange(6)[rows], 6, torch.device("cpu"))
    return Batch(pictures[rows], labels[rows], places[rows], draw, **parts)


def wide(batch: Batch, *tasks: Task) -> Tensor:
    """(b,) the labels of `batch` among all classes of `tasks`."""
    first = [sum(t.num_classes for t in tasks[:i]) for i in range(len(tasks))]
    return torch.tensor(
        [
            first[place] + label
            for place, label in zip(batch.tasks.tolist(), batch.labels.tolist(), strict=True)
        ]
    )


def moved(method: Method) -> None:
    """As training would: student and teacher are not the same any more."""
    with torch.no_grad():
        for i, p in enumerate(method.parameters()):
            p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(i)), alpha=0.05)


def stream(lab: Lab, method: str, base: str | None = None, **settings: Any) -> Run:
    """Both tasks of the laboratory in scenario `class`, one epoch each; `base` names the one that
    the backbone is trained on."""
    tasks = [
        {
            "card": str(lab.card),
            "name": name,
            "classes": list(classes),
            "role": "base" if name == base else "task",
        }
        for name, classes in TASKS.items()
    ]
    return lab.run_of(
        method, TRAIN, methods={method: settings}, stream={"scenario": "class", "tasks": tasks}
    )


def remembered(
    run: Run, task: int, memory: dict[str, dict[str, list[str]]]
) -> dict[str, tuple[Tensor, list[str]]]:
    """Of each class in `memory`, its exemplars' images (n, 3, 16, 16) and their keys, looked up as
    a stage of `task` would."""
    job = run.stages(task)[0]
    keys = {
        name: [key for found in classes.values() for key in found]
        for name, classes in memory.items()
    }
    tasks = tuple(t for t in job.tasks if t.name in memory)
    batches = [*Feed(job, tasks, "train", Group(), False, keys).evaluate()]
    images = {
        key: image for b in batches for key, image in zip(b.keys or [], b.images, strict=True)
    }
    return {
        name: (torch.stack([images[key] for key in found]), found)
        for classes in memory.values()
        for name, found in classes.items()
    }
