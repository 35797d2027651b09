"""Two very different domains, stripes and colours, and training steps on them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import method_steps
import torch
from step_contexts import feed_data
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
SIZE = 24  # images per batch


def samples(task: Task, count: int, seed: int = 5) -> tuple[Tensor, Tensor]:
    """Return noisy images (count, 3, 16, 16) and labels (count,), which cycle over the classes."""
    labels = torch.arange(count) % task.num_classes
    images = 0.3 * torch.randn(count, 3, 16, 16, generator=torch.Generator().manual_seed(seed))
    if task.name == "stripes":
        wave = torch.sin(1.6 * torch.arange(16.0)).expand(16, 16)
        patterns = torch.stack([wave.T, wave])  # (class, H, W)
        return images + patterns[labels][:, None], labels
    colours = torch.tensor([[1.5, 0.0, -1.5], [-1.5, 0.0, 1.5], [0.0, 2.0, 0.0]])  # (class, RGB)
    return images + colours[labels][:, :, None, None], labels


def batch(task: Task, step: int) -> Batch:
    """Return the batch of a step."""
    images, labels = samples(task, SIZE, 100 + step)
    rng = StepRng(7, 0, step, torch.arange(SIZE), SIZE, torch.device("cpu"))
    return Batch(images, labels, torch.zeros(SIZE, dtype=torch.long), rng)


class Stream:
    """A feed with one batch per step and the attributes that methods read."""

    def __init__(self, task: Task, steps: int, group: Group | None = None) -> None:
        self.task = task
        self.steps_per_epoch = steps
        self.group = group or Group()
        self.accumulate = 4

    def epoch(self, epoch: int, start_step: int = 0) -> Iterator[list[Batch]]:
        """Yield the micro-batches of one step."""
        yield [batch(self.task, epoch * self.steps_per_epoch + start_step)]


def vit() -> Any:
    """Return a small ViT with random weights, the same each time."""
    torch.manual_seed(0)
    return build(SMALL).eval()


def begun(
    method: Method, task: Task, steps: int = 30, carried: Carried | None = None, feed: Any = None
) -> list[dict[str, Any]]:
    """Begin a task with a method, and return its parameter groups."""
    torch.manual_seed(2)
    rates = OptimPlan(1e-2, 0.05, SIZE, steps / 2)
    data = feed_data(feed or Stream(task, steps))
    groups: list[dict[str, Any]] = method_steps.begun(method, task, carried, rates=rates, data=data)
    return groups


def learned(
    method: Method,
    task: Task,
    steps: int = 30,
    carried: Carried | None = None,
    optimizer: Any = None,
    feed: Any = None,
) -> tuple[TaskState, Carried]:
    """Return the task state and the carried state after `steps` steps on a task.

    Args:
        optimizer: Function that builds an optimizer from parameter groups; default AdamW.
    """
    make_optimizer = optimizer or torch.optim.AdamW
    groups = begun(method, task, steps, carried, feed)
    method_steps.train(
        method, make_optimizer(groups), lambda progress: batch(task, progress.step), steps
    )
    return method.eval().finish()
