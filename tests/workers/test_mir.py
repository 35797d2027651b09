"""Tests of MIR: the worked scores of the reference, and the choice of replayed exemplars."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_si import THETA_1, B, flat, points, regression
from torch import Tensor

from workers.data.batch import Batch
from workers.dist import Group
from workers.errors import UserError
from workers.job import DataSettings, TrainSettings
from workers.methods.mir import Mir, MirSettings
from workers.rng import StepRng

START: Any = None  # the loss does not use the progress
CANDIDATES = [[1.0, 0.2], [0.3, -0.8], [-1.0, 0.4]]
SCORES = [0.203694, -0.04744, 0.071203]


def candidates(rows: list[int]) -> Batch:
    """Return the candidates of `rows`, with their slots in the opposite order."""
    positions = torch.tensor(rows)
    draw = StepRng(0, 0, 0, positions, 3, torch.device("cpu"))
    labels = torch.tensor([0, 2, 1])[positions]
    images = torch.tensor(CANDIDATES)[positions]
    tasks = torch.zeros_like(positions)
    return Batch(images, labels, tasks, draw, weight=len(rows) / 3, slots=2 - positions)


def after_backward(rate: float | str = "auto", **settings: Any) -> Any:
    """Return the regression at theta_1, with the gradient of the second task's points."""
    method = regression("mir", B, virtual_lr=rate, **settings)
    with torch.no_grad():
        theta = torch.tensor([*THETA_1, -0.089738])
        method.backbone.weight.copy_(theta[:6].reshape(3, 2))
        method.backbone.bias.copy_(theta[6:])
    for parameter in method.heads.parameters():
        parameter.requires_grad_(False)
    method.loss(points(B, torch.arange(3)), START)[0].backward()
    return method.train()


@pytest.mark.parametrize("rate", ["auto", 0.5])
def test_scores_are_the_worked_values(rate: Any) -> None:
    method = after_backward(rate)
    before = flat(method.parameters()).clone()
    (scores,) = method.score_samples([candidates([0, 1, 2])])
    assert scores.tolist() == pytest.approx(SCORES, abs=2e-6)
    assert torch.equal(flat(method.parameters()), before), "the virtual step is undone"
    assert method.training


@pytest.mark.parametrize("parts", [[[0, 1, 2]], [[2, 0], [1]], [[0], [1], [2]]])
@pytest.mark.parametrize(("count", "expected"), [(1, [0]), (2, [0, 2]), (3, [0, 1, 2])])
def test_largest_scores_of_all_micro_batches_are_replayed(
    parts: list[list[int]], count: int, expected: list[int]
) -> None:
    method = after_backward(replay_batch=count)
    ((*chosen,),) = method.replay_parts([candidates(rows) for rows in parts], Group())
    real = [batch for batch in chosen if batch.weight]
    found = torch.cat([batch.draw.positions for batch in real])
    assert sorted(found.tolist()) == expected
    assert sum(batch.weight for batch in chosen) == pytest.approx(1)
    images: Tensor = torch.cat([batch.images for batch in real])
    assert torch.equal(images, torch.tensor(CANDIDATES)[found])


def test_equal_scores_are_chosen_by_slot() -> None:
    method = after_backward(replay_batch=1)
    method.score_samples = lambda replays: [torch.ones(len(replay)) for replay in replays]
    ((chosen,),) = method.replay_parts([candidates([0, 1, 2])], Group())
    assert chosen.slots is not None
    assert chosen.slots.tolist() == [0]


def test_fewer_candidates_than_replayed_exemplars_are_refused() -> None:
    settings = MirSettings(candidates=9, replay_batch=10)
    with pytest.raises(UserError, match="chosen among the candidates"):
        Mir.validate(settings, TrainSettings(lr=1.0), DataSettings(), "class")
