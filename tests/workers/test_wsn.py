"""Tests of WSN: selected weights, weights locked by earlier tasks, and stored states."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from method_steps import (
    ONE,
    THREE,
    TRAININGS,
    TWO,
    Left,
    answers,
    begun,
    each_step,
    in_turn,
    rates,
    serving,
    vit,
)
from step_contexts import step_context
from torch import nn

from workers import optim
from workers.job import BackboneSettings, Task
from workers.methods.base import OptimPlan
from workers.methods.wsn import Wsn, WsnSettings
from workers.model.protect import Protector
from workers.model.vit import build, compute_digest
from workers.storage.taskstate import Carried, TaskState, unpack_mask

TASKS = [ONE, TWO, THREE]
OF_ANY = pytest.mark.parametrize("optimizer", TRAININGS)
STEPS = 4
BACKBONE = vit(embed_dim=16)


def wsn(**settings: Any) -> Wsn:
    torch.manual_seed(2)
    return Wsn(copy.deepcopy(BACKBONE), WsnSettings(**{"mask_lr": 2e-2, **settings}), seed=1)


def training(
    method: Wsn, task: Task, carried: Carried | None, optimizer: str = "adamw"
) -> Iterator[int]:
    """Train a task with `each_step`, and yield its values."""
    train = TRAININGS[optimizer]
    groups = begun(method, task, carried, rates=rates(STEPS, train))
    if optimizer == "sgd":  # scores have small gradients, and the default rate is for adamw
        next(group for group in groups if group["name"] == "masks")["lr"] = 10.0
    yield from each_step(method, optim.build_optimizer(groups, train), task, STEPS)


def stream(
    tasks: list[Task], optimizer: str = "adamw", **settings: Any
) -> tuple[list[TaskState], list[Carried]]:
    def learn(task: Task, carried: Carried | None) -> Left:
        method = wsn(**settings)
        for _ in training(method, task, carried, optimizer):
            pass
        return method.finish()

    done = in_turn(tasks, learn)
    return [state for state, _ in done], [carried for _, carried in done]


def served(states: list[TaskState], carried: Carried) -> Wsn:
    method: Wsn = serving(wsn(), states, carried)
    return method


# ---- selected weights ----------------------------------------------------------------------------
@pytest.mark.parametrize("density", [0.1, 0.5, 0.9])
def test_a_task_uses_exactly_its_share_of_every_layer(density: float) -> None:
    (state,), _ = stream([ONE], density=density)
    assert state.masks.keys() == wsn().sites.keys()
    for mask in state.masks.values():
        assert int(mask.sum()) == mask.numel() - int((1 - density) * mask.numel())


def test_training_starts_from_the_largest_weights() -> None:
    method = wsn()
    next(training(method, ONE, None))
    for site, weight in method.sites.items():
        mask = method.hard()[site]
        assert weight[~mask].abs().max() <= weight[mask].abs().min()


def test_wsn_scores_are_redrawn_per_task_and_seeded() -> None:
    scores_by_seed = []
    for task in (ONE, ONE, TWO):
        method = wsn(start="random")
        next(training(method, ONE, None))
        if task is TWO:
            next(training(method, TWO, method.finish()[1]))
        scores_by_seed.append(method.hard())
    first, again, later = scores_by_seed
    for site, mask in first.items():
        assert torch.equal(mask, again[site])
        assert not torch.equal(mask, later[site])


@pytest.mark.parametrize("start", ["magnitude", "random"])
def test_weights_and_scores_have_the_gradients_of_their_product(start: str) -> None:
    """dW = m .* g where nothing is locked, and d|s| = W .* g, also for unselected entries."""
    method = wsn(start=start)
    for _ in training(method, ONE, None):
        break
    effective = {site: method.weight_overrides[f"{site}.weight"] for site in method.sites}
    for site, weight in method.sites.items():
        parametrisation: Any = method.masks[site]
        mask = parametrisation.hard()
        scores = parametrisation.scores
        assert torch.equal(effective[site], weight * mask)
        assert isinstance(scores, nn.Parameter)
        assert weight.grad is not None
        assert scores.grad is not None
        assert not bool(weight.grad[~mask].any())
        assert torch.allclose(scores.grad[mask], (scores.sign() * weight * weight.grad)[mask])
        assert bool(scores.grad[~mask].any())


def test_training_changes_only_weights_and_scores() -> None:
    method = wsn()
    for at in training(method, ONE, None):
        if at == 0:
            start = method.hard()
    before, now = BACKBONE.state_dict(), method.backbone.state_dict()
    moved = {name for name, t in now.items() if not torch.equal(t, before[name])}
    assert moved == {f"{site}.weight" for site in method.sites}
    assert any(not torch.equal(mask, start[site]) for site, mask in method.hard().items())


# ---- locked weights ------------------------------------------------------------------------------
def forgotten(optimizer: str) -> list[str]:
    """Return the tasks in a stream of three with answers that change after a later task."""
    states, carried = stream(TASKS, optimizer)
    right = [answers(served(states[: at + 1], carried[at]), task) for at, task in enumerate(TASKS)]
    late = [
        (at, answers(served(states[: after + 1], carried[after]), TASKS[at]))
        for after in (1, 2)
        for at in range(after)
    ]
    return [TASKS[at].name for at, answers_now in late if not torch.equal(answers_now, right[at])]


@OF_ANY
def test_old_answers_stay_bit_identical_after_later_tasks(optimizer: str) -> None:
    assert forgotten(optimizer) == []


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_weight_decay_causes_forgetting_without_restore(
    optimizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Protector, "restore", lambda self: None)
    assert forgotten(optimizer)


@OF_ANY
def test_training_without_locks_forgets(optimizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Protector, "restore", lambda self: None)
    monkeypatch.setattr(Protector, "gate", lambda self: None)
    assert forgotten(optimizer)


def gradients_stay_outside(carried: Carried) -> bool:
    """Return whether weights of an earlier task have no gradient before each optimizer step."""
    method = wsn()
    return not any(
        bool(weight.grad[method.union[site]].any())
        for at in training(method, TWO, carried)
        if at % 2 == 0
        for site, weight in method.sites.items()
        if weight.grad is not None
    )


def test_weights_of_earlier_tasks_get_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    _, (first,) = stream([ONE])
    assert gradients_stay_outside(first)
    monkeypatch.setattr(Protector, "gate", lambda self: None)
    assert not gradients_stay_outside(first)


@OF_ANY
def test_wsn_locked_weights_keep_their_bits(
    optimizer: str,
) -> None:
    (one,), (first,) = stream([ONE], optimizer)
    method = wsn()
    for at in training(method, TWO, first, optimizer):
        for site, weight in method.sites.items() if at % 2 else ():
            old, mask = first.tensors[f"weights/{site}"], one.masks[site]
            assert torch.equal(weight[mask], old[mask])
            assert not torch.equal(weight, old)
    metrics = method.metrics()
    assert metrics["density"] == pytest.approx(0.5, abs=2e-3)
    assert 0 < metrics["reused"] < metrics["density"] < metrics["used"] < 1
    assert metrics["used"] == pytest.approx(0.5 + metrics["density"] - metrics["reused"], abs=2e-3)


def test_task_that_selects_no_free_weights_gets_a_warning() -> None:
    (one,), (first,) = stream([ONE])
    method = wsn(mask_lr=1e-9)
    with torch.no_grad():
        for site, mask in one.masks.items():
            # so that |W| selects the same weights as the previous task
            first.tensors[f"weights/{site}"][~mask] = 0
    for _ in training(method, TWO, first):
        pass
    assert "all weights that it uses belong to earlier tasks" in method.warnings()[0]
    method = wsn()
    assert method.warnings() == []
    for _ in training(method, TWO, stream([ONE])[1][0]):
        pass
    assert method.warnings() == []


def test_union_grows_by_the_selection_of_each_task() -> None:
    states, carried = stream(TASKS)
    shapes = {site: tuple(weight.shape) for site, weight in wsn().sites.items()}
    unions = [
        {
            site: unpack_mask(handed.tensors[f"union/{site}"], shape)
            for site, shape in shapes.items()
        }
        for handed in carried
    ]
    for site in shapes:
        assert torch.equal(unions[0][site], states[0].masks[site])
        for (before, after), state in zip(pairwise(unions), states[1:], strict=True):
            assert torch.equal(after[site], before[site] | state.masks[site])


def test_later_task_leaves_carried_and_loaded_states_unchanged() -> None:
    (one,), (first,) = stream([ONE])
    before, method = first.to_bytes(), wsn()
    method.load_task(one)
    for _ in training(method, TWO, first):
        pass
    assert first.to_bytes() == before
    assert torch.equal(answers(method, ONE), answers(served([one], first), ONE)), (
        "the loaded task is served even in the middle of training"
    )


def test_serving_does_not_change_the_weights() -> None:
    states, carried = stream([ONE, TWO])
    method = served(states, carried[-1])
    before = compute_digest(method.backbone)
    assert torch.equal(answers(method, ONE), answers(served(states[:1], carried[0]), ONE))
    assert compute_digest(method.backbone) == before


# ---- stored states -------------------------------------------------------------------------------
def test_sizes_are_those_of_the_reference() -> None:
    """A task stores its head and one bit per weight, 5,455,872 bits on DeiT-Ti.

    The carried state has all weights and one bit for each.
    """
    method = Wsn(build(BackboneSettings(options={"weight_init": "skip"})), WsnSettings(), seed=0)
    method.begin(step_context(ONE, "train", None, OptimPlan(1e-3, 0.05, 8, 10.0), (ONE,)))
    state, carried = method.finish()
    assert state.sizes() == {
        "masks": 5_455_872 // 8,
        "tokens": 0,
        "head": 4 * 2 * (192 + 1),
        "copies": 0,
    }
    assert (
        sum(t.numel() * t.element_size() for t in carried.tensors.values())
        == 5_455_872 * 4 + 5_455_872 // 8
    )
