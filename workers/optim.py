"""Optimizer and learning-rate schedule: one cosine with a linear start scales all parameter
groups."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from workers.job import TrainSettings


def factor(step: int, total: int, per_epoch: int, train: TrainSettings) -> float:
    """Learning rate of step `step` (from 0) of `total`, relative to each group's peak.

    `schedule: epoch`: one rate for a whole epoch, timm's cosine as DeiT and DyTox step it. It is
    told the number of the epoch that ended, so that the first two have the same rate; and the
    cosine is over all epochs, so that warm-up cuts off its beginning.
    """
    if train.schedule == "epoch":
        epochs, epoch = total // per_epoch, max(0, step // per_epoch - 1)
        warm = round(train.warmup * epochs)
        step, start, rising, share = epoch, 0.01, epoch / max(1, warm), epoch / epochs
    else:
        warm = int(train.warmup * total)
        start, rising, share = 0.0, (step + 1) / (warm + 1), (step - warm) / max(1, total - warm)
    if step < warm:
        start = start if train.warmup_start is None else train.warmup_start
        return start + (1 - start) * rising
    return train.floor + (1 - train.floor) * 0.5 * (1 + math.cos(math.pi * share))


def mean_rate_steps(total: int, per_epoch: int, train: TrainSettings) -> float:
    """Sum of the factors over all steps: how many steps at the peak rate the schedule amounts
    to."""
    return sum(factor(step, total, per_epoch, train) for step in range(total))


def build(groups: list[dict[str, Any]], train: TrainSettings) -> torch.optim.Optimizer:
    """A new optimizer (momentum never crosses a task). Groups without a rate or decay take the
    configured ones."""
    full = [
        {"lr": train.lr, "weight_decay": train.weight_decay, **g} for g in groups if g["params"]
    ]
    for group in full:
        group["peak"] = group["lr"]
    if train.optimizer == "sgd":
        return torch.optim.SGD(full, momentum=train.momentum)
    return torch.optim.AdamW(full, fused=True)


def set_rate(optimizer: torch.optim.Optimizer, scale: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = group["peak"] * scale


@contextlib.contextmanager
def ascend(parameters: list[Tensor], rho: float) -> Iterator[None]:
    """Inside, each w stands at w + rho w^2 g / || |w| g ||, g its gradient on entry, the norm over
    all of them: the step uphill of ASAM (Kwon et al., ICML 2021), which no rescaling of weights
    changes. Afterwards all are back to the last bit."""
    with torch.no_grad():
        moved = [(p, p.clone(), p.grad) for p in parameters if p.grad is not None]
        norm = torch.stack([(old.abs() * g).norm() for _, old, g in moved]).norm() + 1e-12
        for p, old, g in moved:
            p.add_(old.square() * g * (rho / norm))
    try:
        yield
    finally:
        with torch.no_grad():
            for p, old, _ in moved:
                p.copy_(old)
