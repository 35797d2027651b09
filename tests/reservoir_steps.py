"""Helpers for methods that replay a reservoir: runs, feeds, and batches with given logits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from class_incremental_steps import START, begun
from torch import nn

from pipeline.testing.lab import OPTIMIZERS, Lab, Run
from workers.data.batch import Batch
from workers.data.feed import Feed, ReplayFeed
from workers.dist import Group
from workers.job import Task
from workers.methods.bases.reservoir import list_slots
from workers.rng import StepRng

QUICK = {**OPTIMIZERS["adamw"], "epochs": 1}
# Worked values of the reference (section 7).
Z = [[0.5, -0.2, 0.1], [1.0, 0.0, -1.0]]
Z1 = [[0.2, 0.4, -0.1], [0.0, 0.3, 0.3]]
H1 = [[0.5, 0.1, 0.0], [-0.2, 0.6, 0.0]]
Z2 = [[1.2, -0.3, 0.0], [0.1, 0.1, 0.9]]


def run_of(lab: Lab, method: str = "er", scenario: str = "class", **settings: Any) -> Run:
    """Return the run of a method in a scenario, with one epoch per task."""
    return lab.run_of(method, QUICK, settings=settings, scenario=scenario)


def feed_of(run: Run, group: Group, accumulate: int = 1) -> Feed:
    """Return the feed of the second task, including replay."""
    job = run.stages(1)[0]
    job = replace(job, train=job.train.model_copy(update={"accumulate": accumulate}))
    keys: dict[str, list[str]] = {}
    for task, key in list_slots(run.carried(0).meta["memory"]):
        keys.setdefault(task, []).append(key)
    feed = Feed(job, job.tasks, "train", group, True, {"two": []})
    feed.replay = ReplayFeed(job, job.tasks, group, keys, (5, 5), feed.steps_per_epoch)
    return feed


def rows(logits: list[list[float]], labels: list[int], **parts: Any) -> Batch:
    """Return a batch with the given logits as images. All samples have task index 0."""
    count = len(labels)
    draw = StepRng(0, 0, 0, torch.arange(count), count, torch.device("cpu"))
    zeros = torch.zeros(count, dtype=torch.long)
    return Batch(torch.tensor(logits), torch.tensor(labels), zeros, draw, **parts)


def identity(name: str, tasks: tuple[Task, ...], scenario: str = "class", **settings: Any) -> Any:
    """Return a method with an identity backbone. Each head selects its classes' columns."""
    method = begun(name, *tasks, **settings)
    width = sum(task.num_classes for task in tasks)
    method.scenario = scenario
    method.backbone = nn.Identity()
    columns = torch.eye(width).split([task.num_classes for task in tasks])
    for task, weight in zip(tasks, columns, strict=True):
        head = {"weight": weight, "bias": torch.zeros(task.num_classes)}
        method.heads.width = width
        method.heads.restore(task.name, head)
    return method


ONE = Task("one", "card", "", ("0", "1", "2"))
OLD, NEW = Task("old", "card", "", ("0",)), Task("new", "card", "", ("1", "2"))


def losses(method: Any, batch: Batch) -> tuple[float, float]:
    return float(method.loss(batch, START)[0]), float(method.replay_loss(batch, START)[0])
