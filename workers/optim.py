"""Optimizer, learning-rate schedule and length of training.

All parameter groups share one cosine schedule with linear warm-up. One rule gives tasks with few
images enough optimizer steps.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from workers.job import TrainSettings


def steps_per_epoch(train: TrainSettings, num_images: int) -> int:
    """Return the number of global batches of an epoch; the last one may be smaller."""
    return -(-num_images // train.batch_size)


def fit_to_images(train: TrainSettings, num_images: int) -> TrainSettings:
    """Return the settings with the batch size and the epochs for a task of `num_images`.

    As long as `epochs` epochs have fewer than `min_steps` optimizer steps, the batch size is
    halved, but not below `min_batch_size` or the number of micro-batches. If that is not enough,
    the number of epochs is raised, at most to `max_epochs`. With `min_steps: 0` nothing changes.

    Args:
        train: The settings.
        num_images: Samples of an epoch, including exemplars of earlier tasks.
    """
    if not train.min_steps or not num_images:
        return train
    smallest = max(train.min_batch_size or train.batch_size, train.accumulate)
    batch_size = train.batch_size
    while train.epochs * -(-num_images // batch_size) < train.min_steps:
        if batch_size // 2 < smallest:
            break
        batch_size //= 2
    fitted = train.model_copy(update={"batch_size": batch_size})
    epochs = max(train.epochs, -(-train.min_steps // steps_per_epoch(fitted, num_images)))
    if train.max_epochs is not None:
        epochs = min(epochs, train.max_epochs)
    return fitted.model_copy(update={"epochs": epochs})


def describe_length(train: TrainSettings, num_images: int) -> dict[str, int]:
    """Return batch size, epochs and optimizer steps of settings fitted to `num_images`."""
    return {
        "images": num_images,
        "batch_size": train.batch_size,
        "epochs": train.epochs,
        "steps": train.epochs * steps_per_epoch(train, num_images),
    }


def factor(step: int, total: int, per_epoch: int, train: TrainSettings) -> float:
    """Learning rate at step `step` (from 0) of `total`, relative to each group's peak.

    `schedule: epoch` has one rate per epoch: timm's cosine as DeiT and DyTox step it. They pass the
    number of the epoch that ended, so that the first two epochs have the same rate. Their cosine is
    over all epochs, so that warm-up cuts off its beginning.
    """
    if train.schedule == "epoch":
        epochs = total // per_epoch
        epoch = max(0, step // per_epoch - 1)
        warmup = round(train.warmup * epochs)
        is_warmup = epoch < warmup
        start = 0.01
        warmup_share = epoch / max(1, warmup)
        share = epoch / epochs
    else:
        warmup = int(train.warmup * total)
        is_warmup = step < warmup
        start = 0.0
        warmup_share = (step + 1) / (warmup + 1)
        share = (step - warmup) / max(1, total - warmup)
    if is_warmup:
        if train.warmup_start is not None:
            start = train.warmup_start
        return start + (1 - start) * warmup_share
    return train.floor + (1 - train.floor) * 0.5 * (1 + math.cos(math.pi * share))


def full_rate_steps(total: int, per_epoch: int, train: TrainSettings) -> float:
    """Return the sum of the schedule's factors: the equivalent number of steps at the peak rate."""
    return sum(factor(step, total, per_epoch, train) for step in range(total))


def build(groups: list[dict[str, Any]], train: TrainSettings) -> torch.optim.Optimizer:
    """Make a new optimizer; momentum never carries over to another task.

    Groups without `lr` or `weight_decay` get the configured ones; groups without parameters are
    left out.
    """
    defaults = {"lr": train.lr, "weight_decay": train.weight_decay}
    full = [{**defaults, **group} for group in groups if group["params"]]
    for group in full:
        group["peak"] = group["lr"]
    if train.optimizer == "sgd":
        return torch.optim.SGD(full, momentum=train.momentum)
    return torch.optim.AdamW(full, fused=True)


def scale_rates(optimizer: torch.optim.Optimizer, scale: float) -> None:
    """Set the learning rate of each group to `scale` times its peak."""
    for group in optimizer.param_groups:
        group["lr"] = group["peak"] * scale


@contextlib.contextmanager
def ascend(parameters: list[Tensor], rho: float) -> Iterator[None]:
    """Within the context, move each weight w to w + rho w^2 g / || |w| g ||, g its gradient.

    The norm is over all weights. This is the ascent step of ASAM (Kwon et al., ICML 2021), which is
    invariant to rescaling of weights. On exit all weights are restored to the last bit.
    """
    originals: list[tuple[Tensor, Tensor]] = []  # pairs of a parameter and a copy of the values
    with torch.no_grad():
        norms = []
        for parameter in parameters:
            if parameter.grad is not None:
                originals.append((parameter, parameter.clone()))
                norms.append((parameter.abs() * parameter.grad).norm())
        norm = torch.stack(norms).norm() + 1e-12
        for parameter, values in originals:
            assert parameter.grad is not None
            parameter.add_(values.square() * parameter.grad * (rho / norm))
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, values in originals:
                parameter.copy_(values)
