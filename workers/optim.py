"""Optimizer and learning-rate schedule: one cosine with a linear start scales all parameter groups."""

from __future__ import annotations

import math
from typing import Any

import torch

from workers.job import TrainSettings


def factor(step: int, total: int, train: TrainSettings) -> float:
    """Learning rate of step `step` (from 0) of `total`, relative to each group's peak."""
    warm = int(train.warmup * total)
    if step < warm:
        return (step + 1) / (warm + 1)
    share = (step - warm) / max(1, total - warm)
    return train.floor + (1 - train.floor) * 0.5 * (1 + math.cos(math.pi * share))


def mean_rate_steps(total: int, train: TrainSettings) -> float:
    """Sum of the factors over all steps: how many steps at the peak rate the schedule amounts to."""
    return sum(factor(step, total, train) for step in range(total))


def build(groups: list[dict[str, Any]], train: TrainSettings) -> torch.optim.Optimizer:
    """A new optimizer (momentum never crosses a task). Groups without a rate or decay take the configured ones."""
    full = [{"lr": train.lr, "weight_decay": train.weight_decay, **g} for g in groups if g["params"]]
    for group in full:
        group["peak"] = group["lr"]
    if train.optimizer == "sgd":
        return torch.optim.SGD(full, momentum=train.momentum)
    return torch.optim.AdamW(full, fused=True)


def set_rate(optimizer: torch.optim.Optimizer, scale: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = group["peak"] * scale
