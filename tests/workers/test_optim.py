"""Tests of the schedule: linear warm-up, cosine, floor, and one factor for all groups."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from timm.scheduler import CosineLRScheduler
from torch import nn

from workers.job import TrainSettings
from workers.optim import build_optimizer, compute_lr_factor, full_rate_steps, scale_rates


def factors(total: int, **settings: Any) -> list[float]:
    return [
        compute_lr_factor(step, total, total, TrainSettings.model_validate(settings))
        for step in range(total)
    ]


def test_learning_rate_warms_up_and_decays_as_cosine() -> None:
    rates = factors(100, warmup=0.1, floor=0.01)
    assert rates[:10] == pytest.approx([i / 11 for i in range(1, 11)])
    assert rates[10] == max(rates) == 1
    assert rates[55] == pytest.approx(0.01 + 0.99 / 2)
    assert all(a > b for a, b in itertools.pairwise(rates[10:]))
    assert 0.01 <= rates[-1] < 0.011


@pytest.mark.parametrize("schedule", ["step", "epoch"])
@pytest.mark.parametrize("total", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize("warmup", [0.0, 0.1, 0.99])
@pytest.mark.parametrize("floor", [0.0, 0.3, 1.0])
def test_every_rate_is_positive_and_at_most_the_peak(
    total: int, warmup: float, floor: float, schedule: str
) -> None:
    train = TrainSettings.model_validate({"warmup": warmup, "floor": floor, "schedule": schedule})
    rates = [compute_lr_factor(step, total, 1, train) for step in range(total)]
    assert all(0 < f <= 1 for f in rates)
    risen = int(warmup * total) if schedule == "step" else round(warmup * total) + 1
    assert floor < 1 or all(f == 1 for f in rates[risen:])


def test_full_rate_steps_equal_the_sum_of_factors() -> None:
    train = TrainSettings(warmup=0.2, floor=0.05)
    assert full_rate_steps(37, 37, train) == pytest.approx(sum(factors(37, warmup=0.2, floor=0.05)))
    assert full_rate_steps(0, 0, train) == 0
    assert full_rate_steps(10_000, 100, TrainSettings(warmup=0, floor=0)) == pytest.approx(
        5_000, rel=1e-3
    )


def test_warmup_starts_at_warmup_start() -> None:
    rates = factors(100, warmup=0.1, warmup_start=0.5)
    assert rates[:10] == pytest.approx([0.5 + i / 22 for i in range(1, 11)])


def test_epoch_schedule_equals_timm() -> None:
    """DyTox's options are 500 epochs with 5 of warm-up from 1e-6, and a floor of 1e-5.

    The first two epochs have the rate 1e-6.
    """
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.AdamW([weight], lr=2.5e-4)
    timm_optimizer, schedule = (
        list[float](),
        CosineLRScheduler(optimizer, t_initial=500, lr_min=1e-5, warmup_t=5, warmup_lr_init=1e-6),
    )
    for epoch in range(500):
        timm_optimizer.append(optimizer.param_groups[0]["lr"])
        schedule.step(epoch)
    train = TrainSettings(
        schedule="epoch", warmup=0.01, warmup_start=1e-6 / 2.5e-4, floor=1e-5 / 2.5e-4
    )
    our_rates = [
        [2.5e-4 * compute_lr_factor(3 * epoch + step, 1500, 3, train) for step in range(3)]
        for epoch in range(500)
    ]
    assert [rates[0] for rates in our_rates] == pytest.approx(timm_optimizer, rel=1e-9)
    assert all(len(set(rates)) == 1 for rates in our_rates)
    assert our_rates[0] == our_rates[1] == pytest.approx([1e-6] * 3)


def layers(count: int) -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(2)) for _ in range(count)]


def test_every_group_follows_the_schedule_from_its_own_peak() -> None:
    own_layer, configured = layers(2)
    optimizer = build_optimizer(
        [{"params": [own_layer], "lr": 0.5}, {"params": [configured]}], TrainSettings(lr=0.01)
    )
    for scale in (1.0, 0.25, 0.5):
        scale_rates(optimizer, scale)
        assert [g["lr"] for g in optimizer.param_groups] == [0.5 * scale, 0.01 * scale]


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_groups_inherit_unset_options_from_the_settings(kind: str) -> None:
    own_layer, configured = layers(2)
    train = TrainSettings.model_validate(
        {"optimizer": kind, "lr": 0.01, "weight_decay": 0.3, "momentum": 0.7}
    )
    groups: list[dict[str, Any]] = [
        {"params": [own_layer], "weight_decay": 0.0},
        {"params": [configured]},
        {"params": []},
    ]
    optimizer = build_optimizer(groups, train)
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.0, 0.3]
    assert kind == "adamw" or all(g["momentum"] == 0.7 for g in optimizer.param_groups)
    assert "lr" not in groups[0], "the method's own groups are not changed"


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_new_optimizer_has_no_state(kind: str) -> None:
    (p,) = layers(1)
    train = TrainSettings.model_validate({"optimizer": kind, "lr": 0.1, "weight_decay": 0.0})
    for _ in range(3):
        optimizer = build_optimizer([{"params": [p]}], train)
        assert not optimizer.state
        p.grad = torch.ones(2)
        optimizer.step()
        assert optimizer.state
    optimizer = build_optimizer([{"params": [p]}], train)
    before, p.grad = p.detach().clone(), torch.zeros(2)
    optimizer.step()
    assert torch.equal(p, before), "with a zero gradient, only old momentum could move it"
