"""What a finished method attends to on test images, and how its accuracy falls on images that are
hidden in part, attacked, or of another source."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from workers.data.feed import Feed
from workers.dist import Group
from workers.evaluate import answers, first_column
from workers.job import BackboneSettings, StageJob, Task
from workers.methods.base import Method
from workers.methods.bases.class_incremental import ClassIncremental
from workers.methods.protocols import InfersTask
from workers.model.attention import ClassAttention, record_attention, record_class_attention
from workers.model.top_down import TopDown, selection

Row = dict[str, Any]
HIDDEN = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5)  # shares of the image's area
EPSILONS = (0.0, 1.0, 2.0, 4.0, 8.0)  # in 255ths of the range of pixels


def spread(job: StageJob, task: Task, most: int) -> Iterator[tuple[Tensor, Tensor]]:
    """About `most` test images of a task, evenly spread over all of them, with labels (b,) inside
    the task, batch by batch."""
    feed = Feed(job, (task,), "test", Group(), training=False)
    step, start = max(1, -(-feed.num_samples // most)), 0
    for batch in feed.evaluate():
        first = -start % step
        start += len(batch)
        if first < len(batch):
            yield batch.images[first::step], batch.labels[first::step]


@torch.no_grad()
def attention_rows(method: Method, job: StageJob, task: Task, most: int) -> list[Row]:
    """Return rows of entropy, distance and scale per head (see `AttentionStatistics.rows`).

    They are measured while the method classifies images of `task` and knows the task; for methods
    with two passes over both.
    """
    with record_attention(method) as layers:
        for images, _ in spread(job, task, most):
            logits_with_task(method, images, task.name)
    return [row for layer in layers for row in layer.rows()]


@dataclass
class Maps:
    """Some images of a task (n, H, W, 3) in [0, 1], what they are and were taken for, and maps over
    them by title, (n, h, w) each: what the class token looks at, 1 is uniform; and of a method with
    top-down feedback, `selected`, in [0, 1]."""

    images: Tensor
    right: list[str]
    answered: list[str]
    looks: dict[str, Tensor]
    selected: Tensor | None = None


@torch.no_grad()
def maps(method: Method, job: StageJob, task: Task, most: int) -> Maps | None:
    """What `method` looks at on about `most` images of `task`; None where no network of its has a
    class token among patches."""
    batches = [*spread(job, task, most)]
    images, labels = (torch.cat(parts) for parts in zip(*batches, strict=True))
    with record_class_attention(method) as heard:
        logits_with_task(method, images, task.name)
    looks = _looks(
        [gaze for gaze in heard if gaze.passes and len(gaze.passes[-1]) == len(images)],
        isinstance(getattr(method, "top_down", None), TopDown),
    )
    if not looks:
        return None
    names = _names(method, job, task)
    answered = answers(method, images, task.name).argmax(1)
    return Maps(
        pixels(images, job.backbone_settings),
        [task.classes[label] for label in labels.tolist()],
        [names[answer] for answer in answered.tolist()],
        looks,
        _selected(method, images, task.name),
    )


def _looks(heard: Sequence[ClassAttention], twice: bool) -> dict[str, Tensor]:
    """By title: of one network a block in the middle and the last one, of several networks the last
    block of each. twice: a method that looks two times; both looks of the last block that ran
    twice, and the last block where that is another."""
    networks = list(dict.fromkeys(gaze.network for gaze in heard))
    last = [[gaze for gaze in heard if gaze.network == network][-1] for network in networks]
    if len(networks) > 1:
        return {
            f"network {place}, block {gaze.block}": gaze.passes[-1]
            for place, gaze in enumerate(last)
        }
    both = [gaze for gaze in heard if twice and len(gaze.passes) == 2][-1:]
    if both:
        found = {
            f"block {both[0].block}, {which} look": look
            for which, look in zip(("first", "second"), both[0].passes, strict=True)
        }
        return found | {
            f"block {gaze.block}": gaze.passes[-1] for gaze in last if gaze is not both[0]
        }
    return {
        f"block {gaze.block}": gaze.passes[-1]
        for gaze in [*(heard[len(heard) // 2 - 1 : len(heard) // 2]), *last]
    }


def _selected(method: Method, images: Tensor, task: str) -> Tensor | None:
    """s_n of the first look over patches, (n, h, w), as the second one is given it. None where the
    method has none for this task."""
    top_down = getattr(method, "top_down", None)
    if not isinstance(top_down, TopDown):
        return None
    method.activate_task(task)
    if "prior" not in method.weight_overrides:  # the base task, which the backbone answers
        return None
    grid = tuple(top_down.backbone.patch_embed.grid_size)
    num_patches = math.prod(grid)
    first_tokens = top_down.first_pass(images)[1]
    weights: Tensor = selection(first_tokens, method.weight_overrides["prior"])  # (n, N)
    patch_weights: Tensor = weights[:, -num_patches:].unflatten(1, grid)
    return patch_weights.cpu()


def _names(method: Method, job: StageJob, task: Task) -> list[str]:
    """Of the classes that `answers` chooses among."""
    if method.scenario != "class":
        return list(task.classes)
    assert isinstance(method, ClassIncremental)
    classes = {known.name: known.classes for known in job.tasks}
    return [name for known in method.class_slices() for name in classes[known]]


def pixels(images: Tensor, backbone: BackboneSettings) -> Tensor:
    """Normalised (n, 3, H, W) -> (n, H, W, 3) in [0, 1]."""
    mean, std = (
        torch.tensor(values, device=images.device).view(3, 1, 1)
        for values in (backbone.mean, backbone.std)
    )
    return (images * std + mean).clamp(0, 1).permute(0, 2, 3, 1).cpu()


def logits_with_task(method: Method, images: Tensor, task: str) -> Tensor:
    """Return logits among the classes of `task`.

    A method that infers the task answers as if it had inferred this one.
    """
    if isinstance(method, InfersTask):
        for choice, tasks in enumerate(method.candidates().values()):
            if task in tasks:
                return method.answer(images, torch.full((len(images),), choice), task)
    return method.logits(images, task)


def robustness_rows(method: Method, job: StageJob, task: Task, most: int) -> list[Row]:
    """Correct answers, as the scenario asks for them, at each share of hidden centre and each
    strength of attack. A method whose answers have no gradient is not attacked."""
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
            count(
                "fgsm",
                epsilon,
                attacked(images, uphill, epsilon / 255, job.backbone_settings),
                wanted,
            )
    return [
        {
            "kind": kind,
            "level": level,
            "correct": correct,
            "total": total,
            "accuracy": correct / total,
        }
        for (kind, level), (correct, total) in counts.items()
    ]


@torch.no_grad()
def shifted_rows(method: Method, job: StageJob, task: Task, others: Sequence[Task]) -> list[Row]:
    """Correct answers on all test images of the cards of `others` whose classes `task` has, chosen
    among the classes of the card alone; and for comparison the same of the task's own images of
    these classes, once for each card."""
    rows = []
    for other in (other for other in others if covers(task, other)):
        columns = first_column(method, task.name) + torch.tensor(
            [task.classes.index(name) for name in other.classes]
        )
        own = Task(task.name, task.card, task.data, other.classes)
        for shown in (own, other):
            right = total = 0
            for images, labels in spread(job, shown, sys.maxsize):
                guess = answers(method, images, task.name)[:, columns.to(images.device)].argmax(1)
                right, total = right + int((guess == labels).sum()), total + len(labels)
            rows.append(
                {
                    "kind": "shifted",
                    "card": other.card,
                    "images": shown.card,
                    "correct": right,
                    "total": total,
                    "accuracy": right / total,
                }
            )
    return rows


def covers(task: Task, other: Task) -> bool:
    return set(other.classes) <= set(task.classes)


def occluded(images: Tensor, share: float) -> Tensor:
    """(b, 3, H, W) -> the same with a centred rectangle of that share of the area at 0, the colour
    that images are normalised by."""
    height, width = (round(side * math.sqrt(share)) for side in images.shape[-2:])
    top, left = (images.shape[-2] - height) // 2, (images.shape[-1] - width) // 2
    hidden = images.clone()
    hidden[..., top : top + height, left : left + width] = 0
    return hidden


def slope(method: Method, images: Tensor, wanted: Tensor, task: str) -> Tensor | None:
    """Sign of the gradient of the cross-entropy in the images, or None where there is none. wanted:
    (b,) among the outputs that compete."""
    images = images.clone().requires_grad_()
    with torch.enable_grad():
        logits = answers(method, images, task)
        if not logits.requires_grad:
            return None
        return torch.autograd.grad(F.cross_entropy(logits.float(), wanted), images)[0].sign()


def attacked(images: Tensor, uphill: Tensor, epsilon: float, backbone: BackboneSettings) -> Tensor:
    """FGSM (Goodfellow et al., ICLR 2015): one step of epsilon in each pixel, whose range is [0,
    1], and within that range."""
    mean, std = (
        torch.tensor(values, device=images.device).view(3, 1, 1)
        for values in (backbone.mean, backbone.std)
    )
    return (images + epsilon / std * uphill).clamp(-mean / std, (1 - mean) / std)
