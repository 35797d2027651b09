"""Tests of EWC: Fisher information and penalty against values computed by hand, the carried state,
and equality with fine-tuning if lambda is 0."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeline.testing.lab import TASKS, Lab, Run, history
from workers.data.batch import Batch
from workers.dist import Group
from workers.job import Task
from workers.methods.base import OptimPlan, StepContext, StepData
from workers.methods.ewc import Ewc, EwcSettings
from workers.model.anchors import AnchoredWeights
from workers.rng import StepRng
from workers.storage.taskstate import Carried

A, B = (Task(name, "card", "", tuple(name + c for c in "123")) for name in "ab")
NAMES = ("backbone/weight", "backbone/bias")
# Softmax regression z = W x + b. The values below are computed by hand: rows of W (3, 2), then b.
THETA = [0.2, -0.1, 0.0, 0.3, -0.4, 0.1, 0.1, 0.0, -0.1]
THETA_1 = [0.638713, -0.004516, -0.345385, 0.576729, -0.493328, -0.272213, 0.165953, -0.076215]
THETA_1 += [-0.089738]
THETA_2 = [0.244981, -0.115089, -0.223744, 0.510846, -0.139065, -0.122021, 0.111753, -0.115333]
THETA_2 += [0.00594]
IMAGES = {
    "a": [[1.0, 0.5], [-0.5, 1.0], [0.0, -1.0], [1.5, -0.5]],
    "b": [[-1.0, 0.5], [0.5, 0.5], [1.0, 1.0]],
}
LABELS = {"a": [0, 1, 2, 0], "b": [0, 1, 2]}
EXACT = [0.212488, 0.140423, 0.190916, 0.135956, 0.13192, 0.127681, 0.232555, 0.219106, 0.183992]
EMPIRICAL = [0.208123, 0.099644, 0.108379, 0.125651, 0.033316, 0.15966, 0.203082, 0.168771]
EMPIRICAL += [0.172648]
MOVED = [0.1, -0.1, 0.2, 0.0, 0.05, -0.2, 0.1, 0.0, -0.1]


class Pictures:
    """A feed over the points of a task, in batches of `size`."""

    group = Group()

    def __init__(self, task: Task, size: int) -> None:
        self.task = task
        self.size = size

    def evaluate(self) -> Iterator[Batch]:
        labels = torch.tensor(LABELS[self.task.name])
        for first in range(0, len(labels), self.size):
            rows = torch.arange(first, min(first + self.size, len(labels)))
            rng = StepRng(0, 0, 0, rows, len(rows), torch.device("cpu"))
            points = torch.tensor(IMAGES[self.task.name])[rows]
            keys = [f"{self.task.name}/{row}" for row in rows.tolist()]
            yield Batch(points, labels[rows], torch.zeros_like(rows), rng, keys=keys)


def keys_by_class(task: Task) -> dict[str, list[str]]:
    keys: dict[str, list[str]] = {name: [] for name in task.classes}
    for row, label in enumerate(LABELS[task.name]):
        keys[task.classes[label]].append(f"{task.name}/{row}")
    return keys


def set_theta(method: Any, theta: list[float]) -> None:
    with torch.no_grad():
        method.backbone.weight.copy_(torch.tensor(theta[:6]).reshape(3, 2))
        method.backbone.bias.copy_(torch.tensor(theta[6:]))


def regression(theta: list[float], seed: int = 0, **settings: Any) -> Ewc:
    """Return EWC on softmax regression; the backbone computes z."""
    backbone: Any = nn.Linear(2, 3)
    backbone.num_features = 3
    method = Ewc(backbone, EwcSettings(**{"scale": "none", "lambda": 100.0} | settings), seed)
    set_theta(method, theta)
    return method


def begin(method: Ewc, task: Task, step: str, carried: Carried | None = None, size: int = 4) -> Ewc:
    """Begin a step; the head of the task is the identity."""
    method.heads.restore(task.name, {"weight": torch.eye(3), "bias": torch.zeros(3)})

    def make_feed(split: str, training: bool) -> Any:
        return Pictures(task, size)

    data = StepData(make_feed, keys_by_class)
    plan = OptimPlan(0.1, 0.0, 4, 10.0)
    method.begin(StepContext(task, plan, step, "task", (task,), (task,), carried, data))
    return method


def flat(tensors: dict[str, Tensor]) -> Tensor:
    return torch.cat([tensors[name].detach().flatten() for name in NAMES])


def importance_of(theta: list[float], size: int = 4, **settings: Any) -> Tensor:
    return flat(begin(regression(theta, **settings), A, "importance", size=size).importance)


# ---- the Fisher information ----------------------------------------------------------------------
@pytest.mark.parametrize(("fisher", "values"), [("exact", EXACT), ("empirical", EMPIRICAL)])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_fisher_matches_softmax_regression_for_any_batch_size(
    fisher: str, values: list[float], size: int
) -> None:
    """If gradients were averaged over a batch before they are squared, the sum for batches of two
    would be 0.473 instead of 1.575."""
    assert torch.allclose(
        importance_of(THETA, size, fisher=fisher), torch.tensor(values), atol=2e-6
    )


def test_exact_fisher_is_output_variance_times_squared_input() -> None:
    points = torch.tensor(IMAGES["a"])
    logits = points @ torch.tensor(THETA[:6]).reshape(3, 2).T + torch.tensor(THETA[6:])
    p = logits.softmax(1)  # (4, 3)
    by_hand = (p * (1 - p)).T @ points.square() / len(points)  # (3, 2)
    assert torch.allclose(importance_of(THETA)[:6], by_hand.flatten(), atol=1e-6)


def test_fisher_with_sampled_labels_averages_to_the_exact_fisher() -> None:
    draws = [importance_of(THETA, fisher="sampled", seed=seed) for seed in range(200)]
    assert not torch.equal(draws[0], draws[1])
    assert torch.equal(draws[0], importance_of(THETA, fisher="sampled", seed=0))
    assert torch.allclose(torch.stack(draws).mean(0), torch.tensor(EXACT), atol=0.02)


def test_fisher_is_a_mean_over_the_chosen_images() -> None:
    two = importance_of(THETA, samples=2, fisher="empirical")
    assert torch.equal(two, importance_of(THETA, 1, samples=2, fisher="empirical"))
    assert not torch.allclose(two, torch.tensor(EMPIRICAL), atol=1e-3)


# ---- the penalty ---------------------------------------------------------------------------------
def after(theta: list[float], task: Task, carried: Carried | None = None, **settings: Any) -> Ewc:
    """Return the method after the step `importance` of a task with the final weights `theta`."""
    method = regression(theta, **settings)
    if carried is not None:
        carried = Carried.from_bytes(carried.to_bytes())
        for name, tensor in zip(NAMES, (theta[:6], theta[6:]), strict=True):
            carried.tensors[name] = torch.tensor(tensor).reshape(carried.tensors[name].shape)
    return begin(method, task, "importance", carried)


def penalty_at(method: Ewc, theta: list[float]) -> tuple[float, Tensor]:
    """Return the penalty and its gradient at the weights `theta`."""
    set_theta(method, theta)
    value = method.penalty(AnchoredWeights(method.protected(), method.anchors, method.importance))
    parameters = method.protected()
    gradients = torch.autograd.grad(value, list(parameters.values()))
    return value.item(), flat(dict(zip(parameters, gradients, strict=True)))


def test_penalty_and_gradient_match_equation_3() -> None:
    method = after(THETA, A)
    value, gradient = penalty_at(method, [a + d for a, d in zip(THETA, MOVED, strict=True)])
    assert value == pytest.approx(1.038413, abs=1e-5)
    expected = [2.124882, -1.404229, 3.818327, 0.0, 0.659602, -2.553615, 2.32555, 0.0, -1.839922]
    assert torch.allclose(gradient, torch.tensor(expected), atol=1e-5)


def test_penalty_and_gradient_are_zero_at_the_anchor() -> None:
    value, gradient = penalty_at(after(THETA, A), THETA)
    assert value == 0
    assert torch.equal(gradient, torch.zeros(9))


@pytest.mark.parametrize(("online", "value"), [(False, 0.035489), (True, 0.013813)])
def test_online_and_per_task_anchors_give_different_penalties(online: bool, value: float) -> None:
    settings: dict[str, Any] = {"lambda": 1.0, "online": online}
    first = after(THETA_1, A, **settings)
    second = after(THETA_2, B, first.finish()[1], **settings)
    assert penalty_at(second, [t + 0.1 for t in THETA_2])[0] == pytest.approx(value, abs=2e-6)


def test_carried_penalty_is_the_sum_over_all_tasks() -> None:
    """Compares values and gradients far from both anchors."""
    settings: dict[str, Any] = {"lambda": 2.0}
    first = after(THETA_1, A, **settings)
    second = after(THETA_2, B, first.finish()[1], **settings)
    alone = after(THETA_2, B, **settings)
    value, gradient = penalty_at(second, THETA)
    parts = [penalty_at(method, THETA) for method in (first, alone)]
    assert value == pytest.approx(sum(part[0] for part in parts), abs=1e-5)
    assert torch.allclose(gradient, parts[0][1] + parts[1][1], atol=1e-5)


def test_online_importance_decays_by_gamma() -> None:
    settings: dict[str, Any] = {"online": True, "gamma": 0.9}
    second = after(THETA_2, B, after(THETA_1, A, **settings).finish()[1], **settings)
    expected = [0.313365, 0.232155, 0.279995, 0.221033, 0.242739, 0.204314, 0.407211, 0.384411]
    assert torch.allclose(flat(second.importance)[:8], torch.tensor(expected), atol=3e-6)
    assert torch.allclose(flat(second.anchors), torch.tensor(THETA_2))


def stiff(weight: float) -> Ewc:
    settings: dict[str, Any] = {"lambda": weight}
    return regression(THETA, **settings)


def test_penalty_too_stiff_for_sgd_gives_a_warning() -> None:
    carried = after(THETA, A).finish()[1]
    for weight, optimizer, num_warnings in (
        (1000.0, "sgd", 1),
        (10.0, "sgd", 0),
        (1000.0, "adamw", 0),
    ):
        method = begin(stiff(weight), B, "train", carried)
        optim = replace(method.context.optim, optimizer=optimizer)
        method.context = replace(method.context, optim=optim)
        warnings = method.warnings()
        assert len(warnings) == num_warnings
        assert all("plain SGD diverges above 2" in warning for warning in warnings)


# ---- in a stream ---------------------------------------------------------------------------------
def stream_of(lab: Lab, method: str, scenario: str, settings: Any, role: str = "task") -> Run:
    tasks = [
        {"card": str(lab.card), "name": name, "classes": list(classes)}
        for name, classes in TASKS.items()
    ]
    tasks[0]["role"] = role
    return lab.run_of(
        method,
        {"optimizer": "adamw", "lr": 1e-2, "epochs": 2},
        stream={"scenario": scenario, "tasks": tasks},
        methods={method: settings},
    )


@pytest.mark.few(1)
@pytest.mark.parametrize("scenario", ["task", "class"])
def test_ewc_with_zero_lambda_equals_fine_tuning_exactly(lab: Lab, scenario: str) -> None:
    plain = stream_of(lab, "finetune", scenario, {})
    ewc = stream_of(lab, "ewc", scenario, {"lambda": 0})
    for task in (0, 1):
        expected = plain.live(task).backbone.state_dict()
        weights = ewc.live(task).backbone.state_dict()
        assert weights.keys() == expected.keys()
        assert all(torch.equal(weights[name], expected[name]) for name in expected)
        assert ewc.evaluated(task)["rows"] == plain.evaluated(task)["rows"]


@pytest.mark.few(1)
@pytest.mark.parametrize("scenario", ["task", "class"])
def test_large_lambda_keeps_weights_near_the_first_task(lab: Lab, scenario: str) -> None:
    """Measures the distance that the weights move, weighted by the importance of the first task."""
    moved = {}
    for weight in (0.0, 1e4):
        run = stream_of(lab, "ewc", scenario, {"lambda": weight})
        carried = run.carried(0)
        first: Any = run.live(0)
        second: Any = run.live(1)
        parameters = second.protected()
        moved[weight] = 0.0
        for name, importance in first.importance.items():
            distance = parameters[name].detach() - carried.tensors[f"anchors/{name}"]
            moved[weight] += float((importance * distance.square()).sum())
    assert 0 < moved[1e4] < 0.1 * moved[0.0]


def test_importance_never_decreases_across_steps_and_tasks(lab: Lab) -> None:
    run = stream_of(lab, "ewc", "class", {})
    first = run.carried(0).tensors
    between = Carried.from_bytes(run.artifact(run.stages(1)[0]).read("carried.safetensors")).tensors
    last = run.carried(1).tensors
    for name in first:
        if name.startswith("importance/"):
            assert torch.equal(between[name], first[name])
            assert (last[name] >= first[name]).all()


def test_old_heads_are_protected_in_scenario_class(lab: Lab) -> None:
    names = {n for n in stream_of(lab, "ewc", "class", {}).carried(1).tensors if "heads" in n}
    assert {n for n in names if n.startswith("importance/")} == {
        f"importance/heads/{task}/{n}" for task in TASKS for n in ("weight", "bias")
    }
    assert {n for n in names if n.startswith("heads/")} == {"heads/two/weight", "heads/two/bias"}


@pytest.mark.parametrize("scenario", ["task", "class"])
def test_a_base_task_is_protected_too(lab: Lab, scenario: str) -> None:
    run = stream_of(lab, "ewc", scenario, {}, role="base")
    assert [job.step for job in run.stages(0)] == ["importance"]
    assert float(run.carried(0).tensors["importance/backbone/pos_embed"].max()) > 0
    assert history(run.artifact(run.stages(1)[0]))[-1]["penalty"] > 0


def test_importance_is_divided_by_its_mean(lab: Lab) -> None:
    def importance(**settings: Any) -> dict[str, Tensor]:
        run = lab.run_of("ewc", {"lr": 1e-2, "epochs": 1, "batch_size": 32}, settings=settings)
        tensors = run.carried(0).tensors
        return {name: t for name, t in tensors.items() if name.startswith("importance/")}

    plain, scaled = importance(scale="none"), importance()
    count = sum(values.numel() for values in plain.values())
    mean = sum(float(values.sum()) for values in plain.values()) / count
    assert sum(float(values.sum()) for values in scaled.values()) / count == pytest.approx(1)
    for name, values in plain.items():
        torch.testing.assert_close(scaled[name], values / mean)


@pytest.mark.parametrize(("method", "term"), [("ewc", "penalty"), ("lwf", "kd")])
def test_penalty_without_effect_gives_a_warning(lab: Lab, method: str, term: str) -> None:
    train = {"lr": 1e-2, "epochs": 1, "batch_size": 32}
    weak = lab.run_of(method, train, settings={"lambda": 1e-4})
    for task, number in ((0, 0), (1, 1)):
        warnings = weak.stages(task)[0], weak.artifact(weak.stages(task)[0]).manifest["warnings"]
        told = [text for text in warnings[1] if "trains as finetune does" in text]
        assert len(told) == number
        assert all(f"penalty {term!r}" in text for text in told)
        assert all(f"raise methods.{method}.lambda" in text for text in told)
    usual = lab.run_of(method, train, settings={})
    warnings_of_usual = usual.artifact(usual.stages(1)[0]).manifest["warnings"]
    assert not [text for text in warnings_of_usual if "as finetune does" in text]
