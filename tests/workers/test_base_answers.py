"""Tests that answers on a base task do not change if later evaluations do not measure them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pipeline.testing.lab import OPTIMIZERS, Lab, compute_task_logits
from workers.data.feed import Feed
from workers.errors import UserError
from workers.methods import METHODS

# methods with evaluations that skip earlier tasks, and PackNet with steps for the base task
CASES: list[tuple[str, dict[str, Any]]] = [
    *(
        (name, {})
        for name, cls in METHODS.items()
        if "task" in cls.scenarios and not cls.changes_past_predictions("task")
    ),
    ("packnet", {"base_mode": "prune_retrain"}),
]


@pytest.mark.parametrize(("method", "settings"), CASES)
def test_later_task_does_not_change_answers_on_base_task(
    lab: Lab, method: str, settings: dict[str, Any]
) -> None:
    tasks = [
        {"card": str(lab.card), "name": "base", "classes": ["0", "1"], "role": "base"},
        {"card": str(lab.card), "name": "later", "classes": ["2", "3", "4"]},
    ]
    stream = {"scenario": "task", "tasks": tasks}
    train = {**OPTIMIZERS["adamw"], "epochs": 2}
    try:
        run = lab.run_of(method, train, ("base", "later"), settings, "task", stream=stream)
    except UserError as error:
        pytest.skip(str(error))  # the method refuses a base task
    job = run.evaluate_job(0)
    assert job.task is not None
    feed = Feed(job, (job.task,), "test", lab.group, training=False)
    images = next(iter(feed.evaluate())).images
    before = compute_task_logits(run.served(0), images, "base")
    after = compute_task_logits(run.served(1), images, "base")
    assert torch.equal(before, after)
