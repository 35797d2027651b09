"""Tests of role `pretrained`: the classifier in the backbone's weights is the head of the task."""

from __future__ import annotations

from typing import Any

import pytest
import safetensors.torch
import torch

from pipeline.testing.lab import OPTIMIZERS, TINY, Lab, Run, compute_task_logits
from workers.data.feed import Feed
from workers.errors import UserError
from workers.storage.taskstate import TaskState

TRAIN = {**OPTIMIZERS["adamw"], "epochs": 2}


def stream(lab: Lab, role: str, scenario: str = "task") -> dict[str, Any]:
    """Return a stream of two tasks. The first has the given role."""
    tasks = [
        {"card": str(lab.card), "name": "base", "classes": ["0", "1"], "role": role},
        {"card": str(lab.card), "name": "later", "classes": ["2", "3", "4"]},
    ]
    return {"scenario": scenario, "tasks": tasks}


def run_with(lab: Lab, method: str, role: str, scenario: str = "task", **rest: Any) -> Run:
    """Return the run of a method on the two tasks."""
    sections = {"stream": stream(lab, role, scenario), **rest}
    return lab.run_of(method, TRAIN, ("base", "later"), {}, scenario, **sections)


@pytest.fixture(scope="module")
def checkpoint(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a file with weights trained on the base task, and their classifier."""
    trained = lab.stage(run_with(lab, "linear", "base").jobs["backbone"])
    tensors = safetensors.torch.load(trained.read("state.safetensors"))
    head = TaskState.from_bytes(trained.read("task.safetensors")).head
    tensors |= {f"head.{name}": tensor for name, tensor in head.items()}
    path = tmp_path_factory.mktemp("weights") / "checkpoint.safetensors"
    safetensors.torch.save_file(tensors, str(path))
    return str(path)


@pytest.mark.parametrize(
    ("method", "scenario"), [("linear", "task"), ("meat", "task"), ("lwf", "task"), ("er", "class")]
)
def test_pretrained_head_answers_like_base_task_with_same_weights(
    lab: Lab, checkpoint: str, method: str, scenario: str
) -> None:
    trained = run_with(lab, method, "base", scenario)
    taken = run_with(lab, method, "pretrained", scenario, backbone={**TINY, "weights": checkpoint})
    job = taken.evaluate_job(0)
    assert job.task is not None
    images = next(iter(Feed(job, (job.task,), "test", lab.group, training=False).evaluate())).images
    for position in (0, 1):
        expected = compute_task_logits(trained.served(position), images, "base")
        logits = compute_task_logits(taken.served(position), images, "base")
        assert torch.allclose(logits, expected, atol=1e-5)


def test_pretrained_head_needs_no_training_and_no_data(lab: Lab, checkpoint: str) -> None:
    taken = run_with(lab, "linear", "pretrained", backbone={**TINY, "weights": checkpoint})
    artifact = lab.stage(taken.jobs["backbone"])
    assert artifact.manifest["length"] == {}
    assert artifact.manifest["warnings"] == []
    assert "history.parquet" not in artifact.manifest["files"]
    assert not taken.jobs["backbone"].parents


def test_pretrained_role_without_weights_is_refused(lab: Lab) -> None:
    with pytest.raises(UserError, match=r"role `pretrained`, and backbone\.weights is `none`"):
        run_with(lab, "linear", "pretrained")


def test_two_base_tasks_are_refused(lab: Lab, checkpoint: str) -> None:
    two = stream(lab, "pretrained")
    two["tasks"][1]["role"] = "base"
    with pytest.raises(UserError, match="both have role `base` or `pretrained`"):
        lab.run_of(
            "linear",
            TRAIN,
            ("base", "later"),
            {},
            "task",
            stream=two,
            backbone={**TINY, "weights": checkpoint},
        )


def test_domains_follow_the_order_of_the_classifier(lab: Lab, checkpoint: str) -> None:
    """The classes of all tasks are in the order of the outputs, also if the task is not first."""
    tasks = [
        {"card": str(lab.card), "name": "later", "classes": ["1", "0"]},
        {"card": str(lab.card), "name": "base", "classes": ["0", "1"], "role": "pretrained"},
    ]
    run = lab.run_of(
        "er",
        TRAIN,
        ("base", "later"),
        {},
        "domain",
        stream={"scenario": "domain", "tasks": tasks},
        backbone={**TINY, "weights": checkpoint},
    )
    job = run.evaluate_job(1)
    assert {task.name: task.classes for task in job.tasks} == {
        "base": ("0", "1"),
        "later": ("0", "1"),
    }
