"""Tests of S-Prompts: k-means, the choice of a task by its centres, and states."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from class_incremental_steps import SMALL
from test_domains import NAMES, run_of
from torch import Tensor

from pipeline.testing.lab import OPTIMIZERS, Lab
from workers.errors import UserError
from workers.job import Task
from workers.methods import METHODS
from workers.methods.s_prompts import SPrompts, SPromptsSettings
from workers.model.kmeans import find_centres
from workers.model.vit import build
from workers.storage.taskstate import TaskState

QUICK = {**OPTIMIZERS["adamw"], "epochs": 1}


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return Lab(tmp_path_factory.mktemp("s_prompts"))


def make_method(**settings: Any) -> SPrompts:
    method = SPrompts(build(SMALL), SPromptsSettings(**settings), 0)
    method.join_stream("domain", tuple(Task(name, "card", "", ("a", "b")) for name in NAMES))
    for name in NAMES:
        method.heads.add(name, 2, 0)
    return method


@pytest.mark.parametrize(("distance", "choice"), [("l1", 1), ("l2", 0)])
def test_nearest_centre_depends_on_the_distance_setting(distance: str, choice: int) -> None:
    """The distances are 1 and 0.8, or 0.70710678 and 0.8, as in the reference's example."""
    method = make_method(distance=distance)
    method.query = lambda images: torch.zeros(len(images), 2)  # type: ignore[method-assign]
    method.centres = {"two": torch.tensor([[0.5, 0.5]]), "three": torch.tensor([[0.8, 0.0]])}
    chosen, confidence = method.infer(torch.zeros(1, 3, 16, 16))
    assert chosen.tolist() == [choice]
    first, second = (1.0, 0.8) if distance == "l1" else (0.70710678, 0.8)
    expected = max(1 / first, 1 / second) / (1 / first + 1 / second)
    torch.testing.assert_close(confidence, torch.tensor([expected]))


def test_kmeans_finds_groups_of_points() -> None:
    generator = torch.Generator().manual_seed(0)
    groups = torch.tensor([[0.0, 0.0], [10.0, 0.0], [0.0, 10.0]], dtype=torch.float64)
    points = torch.cat([group + torch.randn(20, 2, generator=generator) for group in groups])
    centres = find_centres(points, 3, generator)
    expected = torch.stack([part.mean(0) for part in points.split(20)])
    order = [int((centres - group).square().sum(1).argmin()) for group in groups]
    torch.testing.assert_close(centres[order], expected)


def test_equal_points_have_one_centre() -> None:
    centres = find_centres(torch.ones(4, 2), 3, torch.Generator().manual_seed(0))
    assert centres.tolist() == [[1.0, 1.0]]


def test_domains_are_identified_and_use_their_own_prompts(lab: Lab) -> None:
    run = run_of(lab, "s_prompts", prompts=2)
    result = run.evaluated(1)["rows"]
    assert [row["picks"]["candidates"] for row in result] == [list(NAMES)] * 2
    assert sum(row["picks"]["right"] for row in result) > 30  # of 60
    served: Any = run.served(1)
    for index, name in enumerate(NAMES):
        images = run.images(index)
        with torch.no_grad():
            chosen, _ = served.infer(images)
            logits = served.logits(images, None)
            for task, other in enumerate(NAMES):
                told: Tensor = served.logits(images, other)
                rows = chosen == task
                torch.testing.assert_close(logits[rows], told[rows], rtol=1e-4, atol=1e-5)
        assert result[index]["task"] == name


def test_query_forward_pass_is_counted_unless_the_task_is_given() -> None:
    state = TaskState("two", ("a", "b"), "s_prompts", "")
    shares = {}
    for scenario in ("task", "class", "domain"):
        method = make_method()
        method.scenario = scenario
        shares[scenario] = method.flops_share(state)
    assert shares["class"] == shares["domain"] == shares["task"] + 1
    assert 1 < shares["task"] < 2


def test_a_state_without_centres_is_refused(lab: Lab) -> None:
    run = lab.run_of("s_prompts", QUICK, settings={"prompts": 2}, scenario="class")
    state = run.state(0)
    state.copies.clear()
    with pytest.raises(UserError, match=r"task 'two': .* centres of shape None .* export it again"):
        run.fresh().load_task(state)


def test_a_base_task_is_refused() -> None:
    base = Task("base", "card", "", ("a", "b"), "base")
    with pytest.raises(UserError, match=r"base task 'base'.*no prompts"):
        METHODS["s_prompts"].check_backbone(SPromptsSettings(), build(SMALL), (base,))
