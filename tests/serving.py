"""Finished runs of a few seconds to serve, their bundles, and their test images as files have
them."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import torch
from stage_lab import TINY, Lab, Run

from workers.data.rows import select
from workers.serving.bundle import Bundle
from workers.serving.server import Predictor

THREE = ("two", "three")


@dataclass(frozen=True)
class Finished:
    """A run whose every stage stands."""

    run: Run
    bundle: Bundle

    @functools.cached_property
    def served(self) -> Predictor:
        return Predictor(self.bundle)

    @property
    def names(self) -> list[str]:
        return [t.name for t in self.bundle.tasks]

    def images(self, name: str) -> tuple[list[bytes], list[str]]:
        """The test images of a task as the shards hold them, and the names of their classes."""
        task = self.bundle.task(name)
        rows = select(self.run.lab.store.root, (task,), "test", 0.1)
        data = [rows.bytes_of(row) for row in range(len(rows))]
        return data, [task.classes[label] for label in rows.labels.tolist()]

    def recorded(self) -> dict[str, int]:
        """Task -> how many test images the last evaluation that measured it got right."""
        return {
            row["task"]: row["correct"]
            for index in range(len(self.run.order))
            for row in self.run.evaluated(index)["rows"]
        }


def finished(
    lab: Lab, method: str, scenario: str = "", settings: dict[str, Any] | None = None, **train: Any
) -> Finished:
    """Two tasks under a method, every evaluation done."""
    rest: dict[str, Any] = {"methods": {method: settings}} if settings else {}
    body = {"optimizer": "adamw", "lr": 1e-2, "weight_decay": 0.05, **train}
    if scenario:
        rest["stream"] = {
            "scenario": scenario,
            "tasks": [
                {"card": str(lab.card), "name": n, "classes": c}
                for n, c in (("two", ["0", "1"]), ("three", ["2", "3", "4"]))
            ],
        }
    run = lab.run_of(method, body, **rest)
    for index in range(len(run.order)):
        run.evaluated(index)
    last, jobs = (
        run.evaluate_job(len(run.order) - 1),
        [run.evaluate_job(index) for index in range(len(run.order))],
    )
    tasks = tuple(dict.fromkeys(t for job in jobs for t in job.tasks))
    return Finished(
        run,
        Bundle.of_job(
            replace(last, tasks=tasks, states={k: v for job in jobs for k, v in job.states.items()})
        ),
    )


def exact(
    served: Predictor, images: list[Any], tasks: Any, **rest: Any
) -> list[tuple[str, str, float]]:
    return [(a.task, a.class_, a.probability) for a in served.predict(images, tasks, **rest)]


__all__ = ["THREE", "TINY", "Finished", "exact", "finished", "torch"]
