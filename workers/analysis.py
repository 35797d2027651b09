"""Analyses of a trained method on test images: attention maps, and robustness of the accuracy.

The command `analyse` calls this module. Robustness is the accuracy on occluded images, adversarial
images, and images of another data source.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
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
HIDDEN = (0.0, 0.1, 0.2, 0.25, 0.3, 0.4, 0.5)  # occluded shares of the image area
EPSILONS = (0.0, 1.0, 2.0, 4.0, 8.0)  # strengths of the attack, for pixels in [0, 255]


def spread(job: StageJob, task: Task, most: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield at most `most` test images of a task with their labels, batch by batch.

    The images are every k-th image of the test split, with the smallest k that respects the limit.
    Labels (b,) are positions in the class list of the task.
    """
    feed = Feed(job, (task,), "test", Group(), training=False)
    stride = max(1, -(-feed.num_samples // most))
    batch_start = 0
    for batch in feed.evaluate():
        first = -batch_start % stride  # position in the batch of its first image to yield
        batch_start += len(batch)
        if first < len(batch):
            yield batch.images[first::stride], batch.labels[first::stride]


@torch.no_grad()
def attention_rows(method: Method, job: StageJob, task: Task, most: int) -> list[Row]:
    """Return rows of entropy, distance and scale per head (see `AttentionStatistics.rows`).

    Attention is measured while the method classifies at most `most` images of `task`, with the task
    given. If a method passes an image through the network twice, both passes count.
    """
    with record_attention(method) as layers:
        for images, _ in spread(job, task, most):
            logits_with_task(method, images, task.name)
    rows: list[Row] = []
    for layer in layers:
        rows += layer.rows()
    return rows


@dataclass
class Maps:
    """Images of a task with attention maps.

    Attributes:
        images: Float tensor (n, H, W, 3) in [0, 1].
        right: True class of each image.
        answered: Predicted class of each image.
        looks: Title of a map -> attention of the class token to the patches, (n, h, w) for a grid
            of h x w patches. Uniform attention has the value 1 (see `ClassAttention`).
        selected: Weight with which top-down feedback selects each patch, (n, h, w) in [0, 1]. None
            for methods without feedback.
    """

    images: Tensor
    right: list[str]
    answered: list[str]
    looks: dict[str, Tensor]
    selected: Tensor | None = None


@torch.no_grad()
def compute_attention_maps(method: Method, job: StageJob, task: Task, most: int) -> Maps | None:
    """Return attention maps of `method` on at most `most` images of `task`.

    Return None if no ViT that processes these images has a class token.
    """
    batches = list(spread(job, task, most))
    images = torch.cat([batch_images for batch_images, _ in batches])
    labels = torch.cat([batch_labels for _, batch_labels in batches])
    with record_class_attention(method) as recorded:
        logits_with_task(method, images, task.name)
    # Drop networks that did not run, or whose last pass did not have all images.
    blocks = [block for block in recorded if block.passes and len(block.passes[-1]) == len(images)]
    has_feedback = isinstance(getattr(method, "top_down", None), TopDown)
    looks = _choose_titled_maps(blocks, has_feedback)
    if not looks:
        return None
    names = _list_column_classes(method, job, task)
    answered = answers(method, images, task.name).argmax(1)
    return Maps(
        pixels(images, job.backbone_settings),
        [task.classes[label] for label in labels.tolist()],
        [names[answer] for answer in answered.tolist()],
        looks,
        _selected(method, images, task.name),
    )


def _choose_titled_maps(blocks: Sequence[ClassAttention], has_feedback: bool) -> dict[str, Tensor]:
    """Return the maps to show, by title, each (n, h, w).

    - Several networks: the last block of each.
    - One network: a middle block and the last block.
    - One network with top-down feedback: both passes of the last block that ran twice, and the last
      block of the network if it is a different one.
    """
    last_blocks = {block.network: block for block in blocks}  # the last one is kept
    titled: dict[str, Tensor] = {}
    if len(last_blocks) > 1:
        for index, block in enumerate(last_blocks.values()):
            titled[f"network {index}, block {block.block}"] = block.passes[-1]
        return titled
    twice_run = [block for block in blocks if has_feedback and len(block.passes) == 2]
    if twice_run:
        first_pass, second_pass = twice_run[-1].passes
        titled[f"block {twice_run[-1].block}, first look"] = first_pass
        titled[f"block {twice_run[-1].block}, second look"] = second_pass
        other_blocks = [block for block in last_blocks.values() if block is not twice_run[-1]]
    else:
        middle = len(blocks) // 2
        other_blocks = [*blocks[middle - 1 : middle], *last_blocks.values()]
    for block in other_blocks:
        titled[f"block {block.block}"] = block.passes[-1]
    return titled


def _selected(method: Method, images: Tensor, task: str) -> Tensor | None:
    """Return the weight of each patch in the top-down feedback, (n, h, w).

    The weights are computed from the output tokens of the first pass (see `selection`). Return None
    if the method has no top-down feedback for this task.
    """
    top_down = getattr(method, "top_down", None)
    if not isinstance(top_down, TopDown):
        return None
    method.activate_task(task)
    if "prior" not in method.weight_overrides:  # a base task (see `Task.role`) has no feedback
        return None
    grid = tuple(top_down.backbone.patch_embed.grid_size)
    num_patches = math.prod(grid)
    first_tokens = top_down.first_pass(images)[1]
    weights: Tensor = selection(first_tokens, method.weight_overrides["prior"])  # (n, N)
    patch_weights: Tensor = weights[:, -num_patches:].unflatten(1, grid)
    return patch_weights.cpu()


def _list_column_classes(method: Method, job: StageJob, task: Task) -> list[str]:
    """Return the class of each column in the logits of `answers`."""
    if method.scenario != "class":
        return list(task.classes)
    assert isinstance(method, ClassIncremental)
    classes = {known.name: known.classes for known in job.tasks}
    names: list[str] = []
    for task_name in method.class_slices():
        names += classes[task_name]
    return names


def pixels(images: Tensor, backbone: BackboneSettings) -> Tensor:
    """Undo the normalisation of images: (n, 3, H, W) -> (n, H, W, 3) in [0, 1], on the CPU."""
    mean = torch.tensor(backbone.mean, device=images.device).view(3, 1, 1)
    std = torch.tensor(backbone.std, device=images.device).view(3, 1, 1)
    return (images * std + mean).clamp(0, 1).permute(0, 2, 3, 1).cpu()


def logits_with_task(method: Method, images: Tensor, task: str) -> Tensor:
    """Return the logits of images of `task`, with the task given.

    A method that infers the task (`InfersTask`) computes them as if it had inferred `task`. Then
    they can also have columns of other tasks.
    """
    if isinstance(method, InfersTask):
        for choice, tasks in enumerate(method.candidates().values()):
            if task in tasks:
                return method.answer(images, torch.full((len(images),), choice), task)
    return method.logits(images, task)


def measure_robustness(method: Method, job: StageJob, task: Task, most: int) -> list[Row]:
    """Measure the accuracy for each occluded share of the image and each strength of the attack.

    The predicted class is chosen among the outputs that compete in the scenario (see `answers`). A
    method is not attacked if its logits have no gradient with respect to the images.

    Args:
        method: The method.
        job: A job of the evaluation stage.
        task: The task.
        most: Maximum number of images.

    Returns:
        Rows with `kind` ("occlusion" or "fgsm"), `level` (the share or epsilon) and the accuracy.
    """
    num_correct: Counter[tuple[str, float]] = Counter()  # by kind and level
    num_images: Counter[tuple[str, float]] = Counter()

    def count(kind: str, level: float, images: Tensor, targets: Tensor) -> None:
        with torch.no_grad():
            is_correct = answers(method, images, task.name).argmax(1) == targets
        num_correct[kind, level] += int(is_correct.sum())
        num_images[kind, level] += len(is_correct)

    for images, labels in spread(job, task, most):
        targets = labels + first_column(method, task.name)
        for share in HIDDEN:
            count("occlusion", share, occluded(images, share), targets)
        gradient_sign = slope(method, images, targets, task.name)
        if gradient_sign is None:
            continue
        for epsilon in EPSILONS:
            adversarial = attacked(images, gradient_sign, epsilon / 255, job.backbone_settings)
            count("fgsm", epsilon, adversarial, targets)
    rows: list[Row] = []
    for (kind, level), total in num_images.items():
        correct = num_correct[kind, level]
        counts = {"correct": correct, "total": total, "accuracy": correct / total}
        rows.append({"kind": kind, "level": level, **counts})
    return rows


@torch.no_grad()
def measure_shifted_accuracy(
    method: Method, job: StageJob, task: Task, other_tasks: Sequence[Task]
) -> list[Row]:
    """Measure the accuracy on test images of the same classes from other data sources.

    The method chooses only among the classes that both sources have. There are two rows for each
    other source: first, for comparison, the accuracy on the images of `task` with these classes;
    then the accuracy on the images of the other source. The column `card` names the other source
    in both rows, and `images` the source of the images.

    Args:
        method: The method.
        job: A job of the evaluation stage.
        task: The task.
        other_tasks: Tasks of other sources. A task with a class that `task` lacks is skipped.
    """
    rows: list[Row] = []
    for other in other_tasks:
        if not covers(task, other):
            continue
        class_indices = torch.tensor([task.classes.index(name) for name in other.classes])
        columns = class_indices + first_column(method, task.name)
        same_classes = replace(task, classes=other.classes, role="task")
        for measured in (same_classes, other):
            correct = 0
            total = 0
            for images, labels in spread(job, measured, sys.maxsize):
                logits = answers(method, images, task.name)[:, columns.to(images.device)]
                correct += int((logits.argmax(1) == labels).sum())
                total += len(labels)
            counts = {"correct": correct, "total": total, "accuracy": correct / total}
            sources = {"card": other.card, "images": measured.card}
            rows.append({"kind": "shifted", **sources, **counts})
    return rows


def covers(task: Task, other: Task) -> bool:
    """Return whether `task` has all classes of `other`, by name."""
    return set(other.classes) <= set(task.classes)


def occluded(images: Tensor, share: float) -> Tensor:
    """Return a copy of images (b, 3, H, W) with a central rectangle set to 0.

    The rectangle covers `share` of the area. The images are normalised, so 0 is the mean colour.
    """
    height = round(images.shape[-2] * math.sqrt(share))
    width = round(images.shape[-1] * math.sqrt(share))
    top = (images.shape[-2] - height) // 2
    left = (images.shape[-1] - width) // 2
    hidden = images.clone()
    hidden[..., top : top + height, left : left + width] = 0
    return hidden


def slope(method: Method, images: Tensor, targets: Tensor, task: str) -> Tensor | None:
    """Return the sign of the gradient of the cross-entropy with respect to the images.

    The result has the shape of the images. Return None if the logits do not require a gradient.

    Args:
        method: The method.
        images: Batch (b, 3, H, W).
        targets: Column of each image's class in the logits of `answers`, (b,).
        task: Name of the task.
    """
    images = images.clone().requires_grad_()
    with torch.enable_grad():
        logits = answers(method, images, task)
        if not logits.requires_grad:
            return None
        return torch.autograd.grad(F.cross_entropy(logits.float(), targets), images)[0].sign()


def attacked(
    images: Tensor, gradient_sign: Tensor, epsilon: float, backbone: BackboneSettings
) -> Tensor:
    """Return the images after an FGSM attack (Goodfellow et al., ICLR 2015).

    Each pixel value moves by `epsilon` in the direction of `gradient_sign`, and is clipped to
    [0, 1].

    Args:
        images: Normalised images (b, 3, H, W).
        gradient_sign: Result of `slope`.
        epsilon: Step for pixel values in [0, 1].
        backbone: Mean and standard deviation of the normalisation.
    """
    mean = torch.tensor(backbone.mean, device=images.device).view(3, 1, 1)
    std = torch.tensor(backbone.std, device=images.device).view(3, 1, 1)
    return (images + epsilon / std * gradient_sign).clamp(-mean / std, (1 - mean) / std)
