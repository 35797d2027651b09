"""Promises of the schedule: a linear start, a cosine, a floor, and one factor for all groups."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn

from workers.job import TrainSettings
from workers.optim import build, factor, mean_rate_steps, set_rate


def factors(total: int, **settings: float) -> list[float]:
    return [factor(step, total, TrainSettings.model_validate(settings)) for step in range(total)]


def test_the_rate_rises_linearly_to_its_peak_and_falls_as_a_cosine_towards_its_floor():
    found = factors(100, warmup=0.1, floor=0.01)
    assert found[:10] == pytest.approx([i / 11 for i in range(1, 11)])
    assert found[10] == max(found) == 1
    assert found[55] == pytest.approx(0.01 + 0.99 / 2)
    assert all(a > b for a, b in itertools.pairwise(found[10:]))
    assert 0.01 <= found[-1] < 0.011


@pytest.mark.parametrize("total", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize("warmup", [0.0, 0.1, 0.99])
@pytest.mark.parametrize("floor", [0.0, 0.3, 1.0])
def test_no_step_is_without_a_rate_or_above_the_peak(total: int, warmup: float, floor: float):
    found = factors(total, warmup=warmup, floor=floor)
    assert all(0 < f <= 1 for f in found)
    assert floor < 1 or all(f == 1 for f in found[int(warmup * total):])


def test_the_sum_of_all_factors_is_what_methods_are_told():
    train = TrainSettings(warmup=0.2, floor=0.05)
    assert mean_rate_steps(37, train) == pytest.approx(sum(factors(37, warmup=0.2, floor=0.05)))
    assert mean_rate_steps(0, train) == 0
    assert mean_rate_steps(10_000, TrainSettings(warmup=0, floor=0)) == pytest.approx(5_000, rel=1e-3)


def layers(count: int) -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(2)) for _ in range(count)]


def test_every_group_follows_the_schedule_from_its_own_peak():
    own, configured = layers(2)
    optimizer = build([{"params": [own], "lr": 0.5}, {"params": [configured]}], TrainSettings(lr=0.01))
    for scale in (1.0, 0.25, 0.5):
        set_rate(optimizer, scale)
        assert [g["lr"] for g in optimizer.param_groups] == [0.5 * scale, 0.01 * scale]


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_groups_take_what_they_do_not_name_from_the_settings(kind: str):
    own, configured = layers(2)
    train = TrainSettings.model_validate({"optimizer": kind, "lr": 0.01, "weight_decay": 0.3, "momentum": 0.7})
    groups: list[dict[str, Any]] = [{"params": [own], "weight_decay": 0.0}, {"params": [configured]}, {"params": []}]
    optimizer = build(groups, train)
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.0, 0.3]
    assert kind == "adamw" or all(g["momentum"] == 0.7 for g in optimizer.param_groups)
    assert "lr" not in groups[0], "the method's own groups are not changed"


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_a_new_optimizer_has_no_past(kind: str):
    (p,) = layers(1)
    train = TrainSettings.model_validate({"optimizer": kind, "lr": 0.1, "weight_decay": 0.0})
    for _ in range(3):
        optimizer = build([{"params": [p]}], train)
        assert not optimizer.state
        p.grad = torch.ones(2)
        optimizer.step()
        assert optimizer.state
    optimizer = build([{"params": [p]}], train)
    before, p.grad = p.detach().clone(), torch.zeros(2)
    optimizer.step()
    assert torch.equal(p, before), "without a gradient, momentum alone would move it"
