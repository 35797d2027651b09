"""Small finished runs for serving tests, with their bundles and encoded test images."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import torch

from pipeline.testing.lab import TINY, Lab, Run
from workers.data.rows import select
from workers.job import Task
from workers.serving.bundle import Bundle
from workers.serving.server import Predictor

THREE = ("two", "three")


@dataclass(frozen=True)
class Finished:
    """A run with the results of all stages, and the bundle of all its tasks."""

    run: Run
    bundle: Bundle

    @functools.cached_property
    def served(self) -> Predictor:
        """A predictor of the bundle."""
        return Predictor(self.bundle)

    @property
    def names(self) -> list[str]:
        """The names of the bundle's tasks."""
        return [task.name for task in self.bundle.tasks]

    def images(self, name: str) -> tuple[list[bytes], list[str]]:
        """Return the test images of a task, encoded as in the shards, and their class names."""
        task = self.bundle.task(name)
        rows = select(self.run.lab.store.root, (task,), "test", 0.1)
        data = [rows.read_bytes(row) for row in range(len(rows))]
        return data, [task.classes[label] for label in rows.labels.tolist()]

    def recorded(self) -> dict[str, int]:
        """Return task -> number of correct answers in the last evaluation that measured it."""
        correct = {}
        for index in range(len(self.run.order)):
            for row in self.run.evaluated(index)["rows"]:
                correct[row["task"]] = row["correct"]
        return correct


def finished(
    lab: Lab, method: str, scenario: str = "", settings: dict[str, Any] | None = None, **train: Any
) -> Finished:
    """Train and evaluate two tasks with a method.

    scenario: `task` or `class`; by default, one that the method supports. train: training settings.
    """
    rest: dict[str, Any] = {}
    if settings:
        rest["methods"] = {method: settings}
    if scenario:
        tasks = [
            {"card": str(lab.card), "name": "two", "classes": ["0", "1"]},
            {"card": str(lab.card), "name": "three", "classes": ["2", "3", "4"]},
        ]
        rest["stream"] = {"scenario": scenario, "tasks": tasks}
    body = {"optimizer": "adamw", "lr": 1e-2, "weight_decay": 0.05, **train}
    run = lab.run_of(method, body, **rest)
    all_tasks: dict[Task, None] = {}  # an ordered set
    states = {}
    for index in range(len(run.order)):
        run.evaluated(index)
        job = run.evaluate_job(index)
        all_tasks.update(dict.fromkeys(job.tasks))
        states.update(job.states)
    last = run.evaluate_job(len(run.order) - 1)
    return Finished(run, Bundle.of_job(replace(last, tasks=tuple(all_tasks), states=states)))


def exact(
    served: Predictor, images: list[Any], tasks: Any, **rest: Any
) -> list[tuple[str, str, float]]:
    """Return (task, class, probability) of each answer, without rounding."""
    return [(a.task, a.class_, a.probability) for a in served.predict(images, tasks, **rest)]


__all__ = ["THREE", "TINY", "Finished", "exact", "finished", "torch"]
