"""Optimizer, learning-rate schedule and length of training.

All parameter groups share one cosine schedule with linear warm-up. `fit_to_images` reduces the
batch size, or adds epochs, for tasks with few images.
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
    halved, but not below `min_batch_size` or the number of micro-batches (`accumulate`). Without
    `min_batch_size` it is not halved. If that is not enough, the number of epochs is raised.
    `max_epochs` limits the result, even if `epochs` is larger. With `min_steps: 0` the settings are
    returned unchanged.

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
    """Return the length of a training as a dict: `images`, `batch_size`, `epochs` and `steps`.

    Args:
        train: The settings, fitted to `num_images`.
        num_images: Samples of an epoch.
    """
    return {
        "images": num_images,
        "batch_size": train.batch_size,
        "epochs": train.epochs,
        "steps": train.epochs * steps_per_epoch(train, num_images),
    }


def compute_lr_factor(step: int, total: int, per_epoch: int, train: TrainSettings) -> float:
    """Return the learning rate at a step, relative to the peak of each parameter group.

    With `schedule: epoch` the rate changes only between epochs, as with timm's cosine scheduler in
    the training scripts of DeiT and DyTox. Those call `scheduler.step(epoch)` after epoch `epoch`;
    therefore the first two epochs have the same rate. The cosine covers all epochs, and warm-up
    replaces its beginning.

    Args:
        step: Index of the optimizer step, from 0.
        total: Number of optimizer steps.
        per_epoch: Optimizer steps per epoch.
        train: The settings.
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
    return sum(compute_lr_factor(step, total, per_epoch, train) for step in range(total))


def build_optimizer(groups: list[dict[str, Any]], train: TrainSettings) -> torch.optim.Optimizer:
    """Return a new optimizer, without state from earlier tasks.

    Groups without `lr` or `weight_decay` get the configured values; groups without parameters are
    omitted. Each group stores its learning rate as `peak`, which `scale_rates` multiplies.
    """
    defaults = {"lr": train.lr, "weight_decay": train.weight_decay}
    full = [{**defaults, **group} for group in groups if group["params"]]
    for group in full:
        group["peak"] = group["lr"]
    is_captured = train.compile == "step"
    if train.optimizer == "sgd":
        # A captured step needs the learning rate in a tensor, which only the fused form reads.
        return torch.optim.SGD(full, momentum=train.momentum, fused=is_captured)
    return torch.optim.AdamW(full, fused=True, capturable=is_captured)


def scale_rates(optimizer: torch.optim.Optimizer, scale: float) -> None:
    """Set the learning rate of each group to `scale` times its peak.

    A learning rate that is a tensor is changed in place, because captured steps read this tensor.
    """
    for group in optimizer.param_groups:
        rate = group["peak"] * scale
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


@contextlib.contextmanager
def ascend(parameters: list[Tensor], rho: float) -> Iterator[None]:
    """Perturb the weights along their gradients inside the context.

    Each weight w with gradient g becomes w + rho w^2 g / || |w| g ||; the norm is over all weights.
    This is the ascent step of ASAM (Kwon et al., ICML 2021), which is invariant to rescaling of
    weights. On exit, the weights are restored exactly.

    Args:
        parameters: The weights; at least one must have a gradient.
        rho: Size of the perturbation.
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
