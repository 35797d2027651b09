"""Tests of GDumb: its balanced sampler, and training new networks on the memory."""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest
import torch
from reservoir_steps import run_of

from pipeline.testing.lab import Lab, compute_task_logits, history
from workers.data.rows import list_keys
from workers.dist import Group
from workers.errors import UserError
from workers.job import Task
from workers.loop import prepare_step_inputs
from workers.methods.gdumb import Gdumb, GdumbSettings, count_balanced


def test_sampler_keeps_the_worked_counts() -> None:
    labels = [0, 0, 0, 0, 0, 1, 1, 2, 2, 2]
    assert count_balanced(labels, 4) == {0: 1, 1: 1, 2: 2}
    assert count_balanced(labels[:5], 4) == {0: 4}
    assert count_balanced(labels, 99) == {0: 5, 1: 2, 2: 3}


def test_sampler_balances_classes_in_any_order() -> None:
    for seed in range(20):
        draw = torch.Generator().manual_seed(seed)
        labels = torch.randint(0, 6, (300,), generator=draw).tolist()
        counts = count_balanced(labels, 20)
        assert sum(counts.values()) == 20
        assert max(counts.values()) - min(counts.values()) <= 1


def keys_of(lab: Lab, task: int, memory: int) -> dict[str, list[str]]:
    """Return task name -> its image keys in the memory that task number `task` trains on."""
    run = run_of(lab, "gdumb", memory=memory)
    (job,) = run.stages(task)
    run.prepare(job)
    method: Any = run.fresh(task)
    _, context, feed = prepare_step_inputs(job, method, None, Group(), True)
    assert feed is not None
    keys: dict[str, list[str]] = method.memory(context)
    assert feed.num_samples == sum(map(len, keys.values()))
    return keys


def test_memory_is_balanced_and_part_of_the_data(lab: Lab) -> None:
    first, second = keys_of(lab, 0, 10), keys_of(lab, 1, 10)
    assert {name: len(keys) for name, keys in first.items()} == {"two": 10}
    assert {name: len(keys) for name, keys in second.items()} == {"two": 4, "three": 6}
    assert {*second["two"]} < {*first["two"]}, "older images are dropped and never added again"
    job = run_of(lab, "gdumb", memory=10).stages(1)[0]
    for task in job.tasks:
        keys = list_keys(job.root, task, job.data.val_fraction)
        assert {*second[task.name]} < {*chain(*keys.values())}
        counts = [len({*second[task.name]} & {*keys[name]}) for name in task.classes]
        assert counts == [2] * task.num_classes


def test_memory_of_all_images_equals_joint_training(lab: Lab) -> None:
    """With room for all images, results equal `joint` bit for bit. No task depends on another."""
    run, joint = run_of(lab, "gdumb", memory=10_000), run_of(lab, "joint")
    for task in (0, 1):
        found = run.artifact(run.stages(task)[0])
        expected = joint.artifact(joint.stages(task)[0])
        assert not run.stages(task)[0].previous
        assert history(found) == history(expected)
        images = run.images(task)
        name = run.order[task]
        assert torch.equal(
            compute_task_logits(run.served(1), images, name),
            compute_task_logits(joint.served(1), images, name),
        )


def test_a_memory_smaller_than_the_classes_is_refused() -> None:
    task = Task("t", "card", "", tuple("abcdef"))
    with pytest.raises(UserError, match="has 6 classes, so that some would keep no image"):
        Gdumb.check_backbone(GdumbSettings(memory=5), torch.nn.Linear(1, 1), (task,))
