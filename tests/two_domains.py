"""Two domains that could not look more different, stripes and colours, and SupSup trained on them
step by step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import tabletop
import torch
from torch import Tensor

from workers.data.batch import Batch
from workers.dist import Group
from workers.job import BackboneSettings, Task
from workers.methods.base import Method, OptimPlan
from workers.model.vit import build
from workers.rng import StepRng
from workers.storage.taskstate import Carried, TaskState

SMALL = BackboneSettings(
    img_size=16,
    options={"patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 2, "weight_init": "jax"},
)
STRIPES = Task("stripes", "card", "", ("across", "along"))
COLOURS = Task("colours", "card", "", ("red", "blue", "green"))
SIZE = 24  # of a batch


def samples(task: Task, count: int, seed: int = 5) -> tuple[Tensor, Tensor]:
    """Images (count, 3, 16, 16) and labels, each class in turn, in noise."""
    labels = torch.arange(count) % task.num_classes
    images = 0.3 * torch.randn(count, 3, 16, 16, generator=torch.Generator().manual_seed(seed))
    if task.name == "stripes":
        wave = torch.sin(1.6 * torch.arange(16.0)).expand(16, 16)
        return images + torch.stack([wave.T, wave])[labels][:, None], labels
    return images + torch.tensor([[1.5, 0.0, -1.5], [-1.5, 0.0, 1.5], [0.0, 2.0, 0.0]])[labels][
        :, :, None, None
    ], labels


def batch(task: Task, step: int) -> Batch:
    images, labels = samples(task, SIZE, 100 + step)
    return Batch(
        images,
        labels,
        torch.zeros(SIZE, dtype=torch.long),
        StepRng(7, 0, step, torch.arange(SIZE), SIZE, torch.device("cpu")),
    )


class Stream:
    """A feed with one batch per step, as methods know it."""

    def __init__(self, task: Task, steps: int, group: Group | None = None) -> None:
        self.task, self.steps_per_epoch, self.group, self.accumulate = (
            task,
            steps,
            group or Group(),
            4,
        )

    def epoch(self, epoch: int, start_step: int = 0) -> Iterator[list[Batch]]:
        yield [batch(self.task, epoch * self.steps_per_epoch + start_step)]


def vit() -> Any:
    torch.manual_seed(0)
    return build(SMALL).eval()


def begun(
    method: Method, task: Task, steps: int = 30, carried: Carried | None = None, feed: Any = None
) -> list[dict[str, Any]]:
    torch.manual_seed(2)
    method.feed_of = lambda split, training: feed or Stream(task, steps)
    return tabletop.begun(method, task, carried, rates=OptimPlan(1e-2, 0.05, SIZE, steps / 2))


def learned(
    method: Method,
    task: Task,
    steps: int = 30,
    carried: Carried | None = None,
    optimizer: Any = None,
    feed: Any = None,
) -> tuple[TaskState, Carried]:
    """What a method hands out after `steps` steps on a task; optimizer: groups -> optimizer, by
    default AdamW."""
    groups = begun(method, task, steps, carried, feed)
    tabletop.train(
        method,
        (optimizer or torch.optim.AdamW)(groups),
        lambda progress: batch(task, progress.step),
        steps,
    )
    return method.eval().finish()
