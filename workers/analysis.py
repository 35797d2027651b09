"""What a finished method attends to on test images, and how its accuracy falls when their centre is hidden or when they are attacked."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from workers.data.feed import Feed
from workers.dist import Group
from workers.evaluate import answers, first_column
from workers.job import BackboneSettings, StageJob, Task
from workers.methods.base import Method
from workers.model.attention import watched

Row = dict[str, Any]
HIDDEN = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5)  # shares of the image's area
EPSILONS = (0.0, 1.0, 2.0, 4.0, 8.0)  # in 255ths of the range of pixels


def spread(job: StageJob, task: Task, most: int) -> Iterator[tuple[Tensor, Tensor]]:
    """About `most` test images of a task, evenly spread over all of them, with labels (b,) inside the task, batch by batch."""
    feed = Feed(job, (task,), "test", Group(), training=False)
    step, start = max(1, -(-feed.num_samples // most)), 0
    for batch in feed.evaluate():
        first = -start % step
        start += len(batch)
        if first < len(batch):
            yield batch.images[first::step], batch.labels[first::step]


@torch.no_grad()
def attention_rows(method: Method, job: StageJob, task: Task, most: int) -> list[Row]:
    """Entropy, distance and scale of each head (see `Layer.rows`) while the method answers on images of `task` and is told so."""
    with watched(method) as layers:
        for images, _ in spread(job, task, most):
            told(method, images, task.name)
    return [row for layer in layers for row in layer.rows()]


def told(method: Method, images: Tensor, task: str) -> Tensor:
    """Logits among the classes of `task`; a method that finds out the task itself answers as if it had found this one."""
    place = next((place for place, tasks in enumerate(method.candidates().values()) if task in tasks), None)
    return method.logits(images, task) if place is None else method.answer(images, torch.full((len(images),), place), task)


def robustness_rows(method: Method, job: StageJob, task: Task, most: int) -> list[Row]:
    """Correct answers, as the scenario asks for them, at each share of hidden centre and each strength of attack. A method whose answers
    have no gradient is not attacked."""
    counts: dict[tuple[str, float], list[int]] = {}

    def count(kind: str, level: float, images: Tensor, wanted: Tensor) -> None:
        with torch.no_grad():
            right = answers(method, images, task.name).argmax(1) == wanted
        correct, total = counts.get((kind, level), [0, 0])
        counts[kind, level] = [correct + int(right.sum()), total + len(right)]

    for images, labels in spread(job, task, most):
        wanted = labels + first_column(method, task.name)
        for share in HIDDEN:
            count("occlusion", share, occluded(images, share), wanted)
        uphill = slope(method, images, wanted, task.name)
        for epsilon in EPSILONS if uphill is not None else ():
            assert uphill is not None
            count("fgsm", epsilon, attacked(images, uphill, epsilon / 255, job.backbone_settings), wanted)
    return [{"kind": kind, "level": level, "correct": correct, "total": total, "accuracy": correct / total}
            for (kind, level), (correct, total) in counts.items()]


def occluded(images: Tensor, share: float) -> Tensor:
    """(b, 3, H, W) -> the same with a centred rectangle of that share of the area at 0, the colour that images are normalised by."""
    height, width = (round(side * math.sqrt(share)) for side in images.shape[-2:])
    top, left = (images.shape[-2] - height) // 2, (images.shape[-1] - width) // 2
    hidden = images.clone()
    hidden[..., top : top + height, left : left + width] = 0
    return hidden


def slope(method: Method, images: Tensor, wanted: Tensor, task: str) -> Tensor | None:
    """Sign of the gradient of the cross-entropy in the images, or None where there is none. wanted: (b,) among the outputs that compete."""
    images = images.clone().requires_grad_()
    with torch.enable_grad():
        logits = answers(method, images, task)
        if not logits.requires_grad:
            return None
        return torch.autograd.grad(F.cross_entropy(logits.float(), wanted), images)[0].sign()


def attacked(images: Tensor, uphill: Tensor, epsilon: float, backbone: BackboneSettings) -> Tensor:
    """FGSM (Goodfellow et al., ICLR 2015): one step of epsilon in each pixel, whose range is [0, 1], and within that range."""
    mean, std = (torch.tensor(values, device=images.device).view(3, 1, 1) for values in (backbone.mean, backbone.std))
    return (images + epsilon / std * uphill).clamp(-mean / std, (1 - mean) / std)
