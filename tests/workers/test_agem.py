"""Tests of A-GEM and GEM: worked values, quadratic program, and steps on any number of ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from class_incremental_steps import START, A, B, C, begun, moved
from torch import Tensor

from workers import loop
from workers.data.batch import Batch
from workers.dist import Group
from workers.job import TrainSettings
from workers.methods import METHODS, agem, gem
from workers.methods.protocols import CombinesGradients
from workers.rng import StepRng

COMBINING = sorted(name for name, cls in METHODS.items() if issubclass(cls, CombinesGradients))
JOB: Any = SimpleNamespace(train=TrainSettings(lr=1.0))
# Worked values of the reference (section 7).
GRADIENT = torch.tensor([1.0, -2.0, 3.0]).double()
REFERENCES = torch.tensor([[-1, 1, 0.5], [0.5, 1, -1]]).double()
OTHER = torch.tensor([[-1, 1, 0.5], [2, 1, 0]]).double()


# ---- A-GEM ---------------------------------------------------------------------------------------
def test_agem_projection_matches_worked_example() -> None:
    reference = REFERENCES[0]
    assert float(GRADIENT @ reference) == -1.5
    projected = agem.project_gradient(GRADIENT, reference)
    assert projected.tolist() == pytest.approx([0.333333, -1.333333, 3.333333], abs=1e-6)
    assert abs(float(projected @ reference)) < 1e-12
    assert projected.norm() <= GRADIENT.norm()
    assert torch.allclose(agem.project_gradient(projected, reference), projected, atol=1e-12), (
        "the projection must be idempotent"
    )
    assert torch.equal(agem.project_gradient(GRADIENT, -reference), GRADIENT), (
        "there is no conflict"
    )
    assert torch.equal(agem.project_gradient(GRADIENT, 0 * reference), GRADIENT), (
        "a zero reference has no effect"
    )


# ---- GEM -----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("references", "gamma", "eps", "weights", "projected"),
    [
        (REFERENCES, 0.0, 0.0, [0.666667, 2], [1.333333, 0.666667, 1.333333]),
        (REFERENCES, 0.5, 0.0, [0.666667, 2], [1.333333, 0.666667, 1.333333]),
        (REFERENCES, 0.5, 1e-3, [0.666371, 1.999112], [1.333185, 0.665482, 1.334074]),
        (OTHER, 0.0, 0.0, [0.731707, 0.146341], [0.560976, -1.121951, 3.365854]),
        (OTHER, 0.5, 1e-3, [0.888494, 0.5], [1.111506, -0.611506, 3.444247]),
    ],
)
def test_gem_projection_matches_worked_examples(
    references: Tensor, gamma: float, eps: float, weights: list[float], projected: list[float]
) -> None:
    found = gem.solve_dual(references @ references.T, references @ GRADIENT, gamma, eps)
    assert found.tolist() == pytest.approx(weights, abs=1e-6)
    assert (GRADIENT + found @ references).tolist() == pytest.approx(projected, abs=1e-6)
    scale = float(references.square().sum(1).max())  # eps is relative to it
    step = gem.project(GRADIENT, references, gamma, eps / scale)
    assert step.tolist() == pytest.approx(projected, abs=1e-6)
    assert (references @ step > -2e-3 * scale).all()


def test_gem_keeps_gradient_without_conflict() -> None:
    assert torch.equal(gem.project(GRADIENT, -REFERENCES, 0.5, 1e-3), GRADIENT)
    assert torch.equal(gem.project(GRADIENT, 0 * REFERENCES, 0.5, 1e-3), GRADIENT)


def test_gem_of_one_task_without_gamma_is_agem() -> None:
    for scale in (1e-6, 1.0, 1e6):
        expected = scale * agem.project_gradient(GRADIENT, REFERENCES[0])
        found = gem.project(scale * GRADIENT, scale * REFERENCES[:1], 0.0, 1e-12)
        assert torch.allclose(found, expected, rtol=1e-9)


@pytest.mark.parametrize("rank", [3, 50])
def test_gem_dual_solution_satisfies_kkt_conditions(rank: int) -> None:
    """Check the KKT conditions: feasible, no descent direction, and each variable at its bound or
    stationary. With rank 3, large matrices are positive definite only because of `eps`."""
    for seed in range(60):
        draw = torch.Generator().manual_seed(seed)
        size = 1 + seed % 30
        rows = torch.randn(size, rank, generator=draw).double()
        rows /= rows.norm(dim=1).max()
        linear = rows @ torch.randn(rank, generator=draw).double()
        gamma, eps = (0.0, 0.5)[seed % 2], 1e-3
        weights = gem.solve_dual(rows @ rows.T, linear, gamma, eps)
        slope = rows @ (rows.T @ weights) + eps * weights + linear
        assert (weights >= gamma).all()
        assert slope.min() > -1e-9
        assert ((weights - gamma) * slope).abs().max() < 1e-9 * (1 + weights.max())


# ---- a step --------------------------------------------------------------------------------------
def part(positions: Tensor, task_indices: Tensor, seed: int) -> Batch:
    """Return the given positions of a global batch with two classes per task."""
    size = len(task_indices)
    draw = torch.Generator().manual_seed(seed)
    images = torch.randn(size, 3, 16, 16, generator=draw)[positions]
    labels = torch.arange(size)[positions] % 2
    rng = StepRng(seed, 0, 0, positions, size, torch.device("cpu"))
    counts = tuple(task_indices.bincount(minlength=3).tolist())
    return Batch(
        images,
        labels,
        task_indices[positions],
        rng,
        weight=len(positions) / size,
        counts=counts,
        slots=(7 * positions) % size,
    )


def step(name: str, parts: int, scenario: str) -> list[Tensor]:
    """Return the gradients of a step of the third task with `parts` micro-batches."""
    method = begun(name, A, B, C)
    method.scenario = scenario
    moved(method)
    batches = []
    for first in range(parts):
        own = part(torch.arange(8)[first::parts], torch.full((8,), 2), 1)
        replayed = torch.arange(7) % 2  # indices of tasks a and b
        positions = torch.arange(7)[first::parts]
        if len(positions):
            own.replay = part(positions, replayed, 2)
        else:  # a stand-in, like that of the feed
            own.replay = part(torch.zeros(1, dtype=torch.long), replayed, 2)
            own.replay.weight = 0.0
        batches.append(own)
    optimizer = torch.optim.SGD([p for p in method.parameters() if p.requires_grad], lr=0.0)
    for group in optimizer.param_groups:
        group["peak"] = 0.0
    terms = loop.train_step(method, optimizer, batches, START, JOB, Group())
    assert {"ce", "replay"} <= terms.keys()
    return [p.grad for p in method.parameters() if p.grad is not None]


@pytest.mark.parametrize("scenario", ["class", "task"])
@pytest.mark.parametrize("name", COMBINING)
def test_a_step_does_not_depend_on_ranks_or_micro_batches(name: str, scenario: str) -> None:
    """Micro-batches stand for ranks, because both are summed. Of eight parts, the last has no
    replayed sample. Of four parts, some have no sample of one task."""
    whole = step(name, 1, scenario)
    for parts in (2, 4, 8):
        for found, expected in zip(step(name, parts, scenario), whole, strict=True):
            assert torch.allclose(found, expected, atol=1e-5, rtol=1e-3)


def opposed(name: str) -> tuple[Tensor, Tensor]:
    """Return a step's direction (P,) and the gradients of the replay parts (K, P)."""
    seen: dict[str, Tensor] = {}
    cls = METHODS[name]
    original = cls.combine  # type: ignore[attr-defined]

    def combine(method: Any, gradient: Tensor, replayed: Tensor) -> Tensor:
        gradient = gradient - 2 * replayed.sum(0)  # opposes the old tasks
        seen["step"], seen["replayed"] = original(method, gradient, replayed), replayed
        return seen["step"]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cls, "combine", combine)
        step(name, 2, "class")
    return seen["step"], seen["replayed"]


@pytest.mark.parametrize(("name", "parts"), [("agem", 1), ("gem", 2)])
def test_step_direction_opposes_no_replayed_gradient(name: str, parts: int) -> None:
    direction, replayed = opposed(name)
    assert len(replayed) == parts
    largest = replayed.square().sum(1).max()
    assert (replayed @ direction >= -1e-2 * largest).all(), (
        "the tolerance is eps times weights up to 10"
    )
