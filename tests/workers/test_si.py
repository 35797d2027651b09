"""Tests of SI and MAS: importance and penalty, with the worked values of the reference."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeline.testing.lab import OPTIMIZERS, Lab, history
from workers.data.batch import Batch
from workers.dist import Group
from workers.job import Task
from workers.methods import METHODS
from workers.methods.base import OptimPlan, Progress, StepContext, StepData
from workers.rng import StepRng
from workers.storage.checkpoint import trained_state
from workers.storage.taskstate import Carried

A, B = (Task(name, "card", "", tuple(name + c for c in "123")) for name in "ab")
NAMES = ("backbone/weight", "backbone/bias")
START = Progress(0, 0, 1, 10)
QUICK = {**OPTIMIZERS["adamw"], "epochs": 1}
# Softmax regression z = W x + b: rows of W (3, 2), then b. The values are those of the reference.
THETA = [0.2, -0.1, 0.0, 0.3, -0.4, 0.1, 0.1, 0.0, -0.1]
POINTS = {
    "a": [[1.0, 0.5], [-0.5, 1.0], [0.0, -1.0], [1.5, -0.5]],
    "b": [[-1.0, 0.5], [0.5, 0.5], [1.0, 1.0]],
}
LABELS = {"a": [0, 1, 2, 0], "b": [0, 1, 2]}
THETA_1 = [0.638713, -0.004516, -0.345385, 0.576729, -0.493328, -0.272213, 0.165953, -0.076215]
PATH_1 = [0.131357, 0.006087, 0.081894, 0.051628, 0.00585, 0.092816, 0.004423, 0.004706, 0.000174]
OMEGA_1 = [0.449131, 0.055783, 0.373451, 0.29238, 0.05381, 0.389096, 0.04239, 0.044477, 0.001737]
THETA_2 = [0.244981, -0.115089, -0.223744, 0.510846, -0.139065, -0.122021, 0.111753, -0.115333]
PATH_2 = [0.209623, 0.013303, 0.019489, 0.004977, 0.129689, 0.029395, 0.003749, 0.001606, 0.009514]
OMEGA_2 = [1.271103, 0.174317, 0.543224, 0.340078, 0.62892, 0.628941, 0.07881, 0.060297, 0.088895]
MAS = [0.4875, 0.325, 0.2625, 0.375, 0.8375, 0.5, 0.5, 0.45, 0.8]


def points(task: Task, rows: Tensor) -> Batch:
    rng = StepRng(0, 0, 0, rows, len(rows), torch.device("cpu"))
    labels = torch.tensor(LABELS[task.name])[rows]
    keys = [f"{task.name}/{row}" for row in rows.tolist()]
    return Batch(
        torch.tensor(POINTS[task.name])[rows], labels, torch.zeros_like(rows), rng, keys=keys
    )


class Points:
    """A feed over the points of a task, in batches of `size`."""

    group = Group()

    def __init__(self, task: Task, size: int) -> None:
        self.task = task
        self.size = size

    def evaluate(self) -> Iterator[Batch]:
        for rows in torch.arange(len(LABELS[self.task.name])).split(self.size):
            yield points(self.task, rows)


def regression(
    name: str,
    task: Task,
    carried: Carried | None = None,
    step: str = "train",
    size: int = 4,
    **s: Any,
) -> Any:
    """Return a method that has begun `step`; the backbone computes z, the head is the identity."""
    backbone: Any = nn.Linear(2, 3)
    backbone.num_features = 3
    with torch.no_grad():
        backbone.weight.copy_(torch.tensor(THETA[:6]).reshape(3, 2))
        backbone.bias.copy_(torch.tensor(THETA[6:]))
    method = METHODS[name](backbone, METHODS[name].Settings(**s), 0)
    method.heads.restore(task.name, {"weight": torch.eye(3), "bias": torch.zeros(3)})

    def task_keys(task: Task) -> dict[str, list[str]]:
        return {task.classes[0]: [f"{task.name}/{i}" for i in range(len(LABELS[task.name]))]}

    def make_feed(split: str, training: bool) -> Any:
        return Points(task, size)

    data = StepData(make_feed, task_keys)
    plan = OptimPlan(0.5, 0.0, 4, 10.0, "sgd")
    method.begin(StepContext(task, plan, step, "task", (task,), (task,), carried, data))
    return method


def flat(tensors: Any) -> Tensor:
    return torch.cat([t.detach().flatten() for t in tensors])


def weights(method: Any) -> Tensor:
    return flat(method.backbone.parameters())


def train(method: Any, task: Task, steps: int, rate: float = 0.5) -> Any:
    """Train only the backbone, with plain SGD on all points at once."""
    optimizer = torch.optim.SGD(method.backbone.parameters(), lr=rate)
    for _ in range(steps):
        optimizer.zero_grad()
        whole = points(task, torch.arange(len(LABELS[task.name])))
        method.loss(whole, START)[0].backward()
        method.after_backward()
        optimizer.step()
        method.after_step(START)
    return method


def omega(carried: Carried) -> Tensor:
    return flat(carried.tensors[f"importance/{name}"] for name in NAMES)


def close(found: Tensor, expected: list[float]) -> bool:
    return torch.allclose(found[: len(expected)], torch.tensor(expected), atol=2e-6)


# ---- SI ------------------------------------------------------------------------------------------
def after_first() -> tuple[Any, Carried]:
    method = train(regression("si", A, xi=0.1, c=1.0), A, 3)
    return method, Carried.from_bytes(method.finish()[1].to_bytes())


def test_si_gives_the_worked_values_of_the_first_task() -> None:
    method, carried = after_first()
    assert close(weights(method), THETA_1)
    assert close(flat(method.path.buffers()), PATH_1)
    assert close(omega(carried), OMEGA_1)


def test_si_gives_the_worked_values_of_the_second_task() -> None:
    """With the gradient of the penalty, the path would sum to 0.381749, not to 0.421345."""
    method = train(regression("si", B, after_first()[1], xi=0.1, c=1.0), B, 2)
    assert close(weights(method), THETA_2)
    assert float(method.penalty()) == pytest.approx(0.092842, abs=1e-6)
    assert close(flat(method.path.buffers()), PATH_2)
    assert float(flat(method.path.buffers()).sum()) == pytest.approx(0.421345, abs=2e-6)
    assert close(omega(method.finish()[1]), OMEGA_2)


def test_si_path_equals_the_loss_decrease_for_small_steps() -> None:
    method = regression("si", A)
    whole = points(A, torch.arange(4))
    before = method.loss(whole, START)[0].item()
    train(method, A, 400, rate=0.002)
    fall = before - method.loss(whole, START)[0].item()
    assert float(flat(method.path.buffers()).sum()) == pytest.approx(fall, rel=3e-3)


def test_si_importance_is_never_negative_and_zero_where_nothing_moved() -> None:
    method = train(regression("si", A), A, 1)
    for total in method.path.buffers():
        total.fill_(-1.0)
    assert (omega(method.finish()[1]) == 0).all()
    assert (omega(regression("si", A).finish()[1]) == 0).all()


# ---- MAS -----------------------------------------------------------------------------------------
@pytest.mark.parametrize("size", [1, 2, 4])
def test_mas_is_a_mean_over_images_for_any_batch_size(size: int) -> None:
    """The gradient of a batch of four as a whole would give a sum of 3.2875, not 4.5375."""
    method = regression("mas", A, step="importance", size=size)
    found = omega(method.finish()[1])
    assert close(found, MAS)
    assert float(found.sum()) == pytest.approx(4.5375, abs=1e-5)


def test_mas_adds_up_over_tasks_and_uses_the_chosen_images() -> None:
    first = regression("mas", A, step="importance").finish()[1]
    second = omega(regression("mas", A, first, step="importance").finish()[1])
    assert close(second, [2 * value for value in MAS])
    two = omega(regression("mas", A, step="importance", samples=2).finish()[1])
    assert torch.equal(
        two, omega(regression("mas", A, step="importance", samples=2, size=1).finish()[1])
    )
    assert not close(two, MAS)


# ---- the penalty of both methods -----------------------------------------------------------------
def test_penalty_gradient_matches_the_penalty_value() -> None:
    settings: dict[str, Any] = {"lambda": 0.3}
    carried = regression("mas", A, step="importance").finish()[1]
    method = regression("mas", B, carried, **settings)
    whole = points(B, torch.arange(3))
    _, terms = method.loss(whole, START)
    assert terms["penalty"] == 0, "the penalty must be zero at the anchor"
    with torch.no_grad():
        method.backbone.weight.add_(0.1)
        method.backbone.bias.sub_(0.2)
    method.zero_grad()
    loss, terms = method.loss(whole, START)
    moved = torch.tensor([0.1] * 6 + [-0.2] * 3)
    expected = 0.3 * float((torch.tensor(MAS) * moved.square()).sum())
    assert float(terms["penalty"]) == pytest.approx(expected, abs=1e-6)
    assert loss.item() == pytest.approx(float(terms["ce"]) + expected, abs=1e-6)
    loss.backward()
    before = flat(p.grad for p in method.backbone.parameters())
    method.after_backward()
    after = flat(p.grad for p in method.backbone.parameters())
    assert torch.allclose(after - before, 0.6 * torch.tensor(MAS) * moved, atol=1e-6)


def test_penalty_too_stiff_for_sgd_gives_a_warning() -> None:
    carried = regression("mas", A, step="importance").finish()[1]
    for weight, count in ((10.0, 1), (0.5, 0)):
        settings: dict[str, Any] = {"lambda": weight}
        warnings = regression("mas", B, carried, **settings).warnings()
        assert len(warnings) == count
        assert all("lower lambda or train.lr" in warning for warning in warnings)


def test_first_task_has_no_penalty_warning() -> None:
    method = regression("si", A, c=100.0)
    train(method, A, 3)
    carried = method.finish()[1]
    assert omega(carried).max() > 0
    assert method.warnings() == []


@pytest.mark.few(2)
@pytest.mark.parametrize("scenario", ["class", "task"])
@pytest.mark.parametrize(("method", "weight"), [("si", "c"), ("mas", "lambda")])
def test_zero_penalty_weight_equals_fine_tuning(
    lab: Lab, method: str, weight: str, scenario: str
) -> None:
    train_settings = QUICK | {"weight_decay": 0.0}
    plain = lab.run_of("finetune", train_settings, scenario=scenario)
    run = lab.run_of(method, train_settings, settings={weight: 0.0}, scenario=scenario)
    held = lab.run_of(method, train_settings, settings={weight: 10.0}, scenario=scenario)
    assert torch.equal(run.state(1).head["weight"], plain.state(1).head["weight"])
    assert not torch.equal(held.state(1).head["weight"], plain.state(1).head["weight"])
    assert history(held.artifact(held.stages(1)[0]))[-1]["penalty"] > 0
    importance = {n for n in held.carried(1).tensors if n.startswith("importance/")}
    assert any(name.startswith("importance/heads/") for name in importance) == (scenario == "class")


def test_si_path_is_stored_with_the_weights() -> None:
    """Checkpoints and the best epoch (`keep: best`) use this state."""
    method = regression("si", A)
    stored = trained_state(method)
    assert {"path.0", "path.1"} <= stored.keys()
