"""Tests of classifiers from statistics of frozen features: equations, sums, features, ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from rank_runs import on_ranks, small_batches
from torch import Tensor, nn

from pipeline.testing.lab import OPTIMIZERS, TASKS, Lab, again
from workers.data.features import FeatureBatch, extract_features
from workers.data.feed import Feed
from workers.data.rows import list_keys
from workers.dist import Group
from workers.errors import UserError
from workers.feature_stage import load_features
from workers.job import StageJob, Task
from workers.methods import METHODS
from workers.methods.base import OptimPlan, StepContext, StepData
from workers.methods.bases.statistics import ClassStatistics
from workers.methods.ranpac import compute_ridge_error, is_validated, solve_ridge
from workers.storage.artifact import Artifact

X = torch.tensor([[2.0, 1], [1, 2], [4, 0], [0, -1], [-2, 0], [-1, -1]])
LABELS = torch.tensor([0, 0, 1, 1, 2, 2])
PROBE = torch.tensor([[1.0, 0.5]])
THREE = Task("three", "card", "key", ("a", "b", "c"))
PLAN = OptimPlan(1.0, 0.0, 1, 1.0)


class Identity(nn.Module):
    """A backbone that returns its images as features."""

    def __init__(self, width: int):
        super().__init__()
        self.num_features = width
        self.unused = nn.Parameter(torch.zeros(1))

    def forward(self, images: Tensor) -> Tensor:
        return images


def method_of(name: str, width: int = 2, **settings: Any) -> Any:
    cls = METHODS[name]
    return cls(Identity(width), cls.Settings(**settings), 0)


def learn(method: ClassStatistics[Any], task: Task, features: Tensor, labels: Tensor) -> None:
    """Compute the statistics of a task from these features."""
    keys = [f"{task.name}/{row}" for row in range(len(features))]
    batch = FeatureBatch(features, labels, torch.zeros_like(labels), keys)
    stream = (*method.stream, task)
    method.stream = stream
    data = StepData(load_features=lambda: batch)
    method.begin(StepContext(task, PLAN, stream=stream, training_tasks=(task,), data=data))


def scores(method: ClassStatistics[Any], features: Tensor) -> list[float]:
    return method.logits(features, None)[0].tolist()


def close(*expected: float, digits: float = 1e-6) -> Any:
    return pytest.approx(list(expected), abs=digits)


def test_simplecil_scores_are_cosines_to_raw_feature_means() -> None:
    method = method_of("simplecil")
    learn(method, THREE, X, LABELS)
    means = method.heads["three"].weight[:, 0].flatten().tolist()
    assert means == close(1.5, 1.5, 2, -0.5, -1.5, -0.5)
    assert scores(method, PROBE) == close(0.94868330, 0.75925660, -0.98994949)
    assert scores(method, 7 * PROBE) == close(0.94868330, 0.75925660, -0.98994949)


def test_ncm_scores_are_euclidean_distances_to_class_means() -> None:
    method = method_of("ncm")
    learn(method, THREE, X, LABELS)
    means = torch.tensor([[1.5, 1.5], [2, -0.5], [-1.5, -0.5]])
    distances = -(PROBE - means).square().sum(1) / 2 + PROBE.square().sum() / 2
    assert scores(method, PROBE) == close(*distances.tolist())


def test_slda_scores_follow_the_equation() -> None:
    method = method_of("slda", shrinkage=0.01)
    learn(method, THREE, X, LABELS)
    assert method.scatter.flatten().tolist() == close(9, 1, 1, 1.5)
    assert scores(method, PROBE) == close(-1.29721514, -2.25898878, -2.53415563)


def test_fecam_distances_follow_the_equation() -> None:
    features = torch.tensor([[2.0, 1, 0], [1, 2, 1], [3, 1, 1], [1, 1, -1]])
    method = method_of("fecam", width=3)
    learn(method, Task("one", "card", "key", ("a",)), features, torch.zeros(4, dtype=torch.long))
    assert method.means["one"][0].tolist() == close(0.69613995, 0.53564295, 0.03310234)
    correlation = torch.linalg.inv(method.precisions["one"][0].double())
    off_diagonal = [float(correlation[i, j]) for i, j in ((0, 1), (0, 2), (1, 2))]
    assert off_diagonal == close(-0.32765852, 0.02118338, 0.03171065)
    assert scores(method, torch.ones(1, 3)) == close(-0.31357457)


def test_fecam_uses_euclidean_distance_without_feature_variance() -> None:
    method = method_of("fecam")
    task = Task("one", "card", "key", ("a", "b"))
    learn(method, task, torch.tensor([[3.0, 4]] * 3 + [[1.0, 0]]), torch.tensor([0, 0, 0, 1]))
    assert scores(method, PROBE) == close(
        -float((PROBE[0] / PROBE.norm() - torch.tensor([0.6, 0.8])).square().sum()),
        -float((PROBE[0] / PROBE.norm() - torch.tensor([1.0, 0])).square().sum()),
    )


PROJECTION = torch.tensor([[1.0, -1, 0.5], [0, 1, -1]])


def test_ranpac_weights_follow_the_equation() -> None:
    method = method_of("ranpac", projection=3, ridge=1.0)
    method.projection = PROJECTION
    learn(method, THREE, X, LABELS)
    gram, targets = method.gram.sum(0), method.targets["three"].sum(0)
    assert gram.flatten().tolist() == close(21, 1, 8, 1, 5, 0, 8, 0, 5.25)
    assert targets.flatten().tolist() == close(3, 4, 0, 1, 0, 2, 0, 3, 0.5)
    assert method.heads["three"].weight.T.flatten().tolist() == close(
        *(0.24439333, 0.01380104, -0.08395630),
        *(0.12593445, -0.00230017, 0.34732605),
        *(-0.31282346, 0.46233468, 0.18746406),
    )
    assert scores(method, PROBE) == close(0.24439333, 0.01380104, -0.08395630)
    assert torch.allclose((gram + torch.eye(3)) @ solve_ridge(gram, targets, 1.0), targets)


def test_ridge_error_is_computed_from_the_sums() -> None:
    projected = (X @ PROJECTION).relu().double()
    one_hot = nn.functional.one_hot(LABELS).double()
    fits, validates = [0, 2, 4], [1, 3, 5]
    gram = torch.stack([projected[rows].T @ projected[rows] for rows in (fits, validates)])
    targets = torch.stack([projected[rows].T @ one_hot[rows] for rows in (fits, validates)])
    errors = [compute_ridge_error(gram, targets, 3, penalty) for penalty in (0.01, 0.1, 1, 10, 100)]
    assert errors == close(0.33727106, 0.31636846, 0.27979113, 0.30387441, 0.32611455)
    weights = solve_ridge(gram[0], targets[0], 10)
    direct = (projected[validates] @ weights - one_hot[validates]).square().mean()
    assert errors[3] == pytest.approx(float(direct))


def test_ranpac_selects_the_ridge_penalty_with_the_smallest_validation_error() -> None:
    """The validation images are not in the fit; the final weights are computed from all images."""
    method = method_of("ranpac", projection=0)
    generator = torch.Generator().manual_seed(3)
    labels = torch.arange(3).repeat(20)
    features = torch.randn(60, 2, generator=generator) + X[::2][labels]
    learn(method, THREE, features, labels)
    validates = torch.tensor([is_validated(f"three/{row}") for row in range(60)])
    x, y = features.double(), nn.functional.one_hot(labels).double()
    errors = {}
    for penalty in (10.0**power for power in range(-8, 9)):
        fitted = solve_ridge(
            x[~validates].T @ x[~validates], x[~validates].T @ y[~validates], penalty
        )
        errors[penalty] = float((x[validates] @ fitted - y[validates]).square().mean())
    best = min(errors, key=lambda penalty: errors[penalty])
    assert 1e-8 < best < 1e8
    expected = solve_ridge(x.T @ x, x.T @ y, best)
    assert torch.allclose(method.heads["three"].weight.T, expected.float(), atol=1e-6)


def test_ranpac_without_projection_is_ridge_regression_on_the_features() -> None:
    method = method_of("ranpac", projection=0, ridge=2.0)
    learn(method, THREE, X, LABELS)
    x, y = X.double(), nn.functional.one_hot(LABELS).double()
    expected = torch.linalg.solve(x.T @ x + 2 * torch.eye(2).double(), x.T @ y)
    assert scores(method, PROBE) == close(*(PROBE.double() @ expected)[0].tolist())


def test_ridge_validation_uses_about_one_fifth_of_images() -> None:
    share = sum(is_validated(f"images/{number}.png") for number in range(5000)) / 5000
    assert share == pytest.approx(0.2, abs=0.02)


# ---- sums ----------------------------------------------------------------------------------------
def tasks_of_noise() -> Iterator[tuple[Task, Tensor, Tensor]]:
    """Yield three tasks with different numbers of classes, with their features and labels."""
    generator = torch.Generator().manual_seed(0)
    for name, count in (("a", 2), ("b", 3), ("c", 4)):
        classes = tuple(f"{name}{number}" for number in range(count))
        centres = torch.randn(count, 6, generator=generator)
        labels = torch.arange(count).repeat(30)
        features = centres[labels] + torch.randn(len(labels), 6, generator=generator)
        yield Task(name, "card", "key", classes), features, labels


STATISTICS = sorted(
    name
    for name, cls in METHODS.items()
    if issubclass(cls, ClassStatistics) and not cls.has_training()
)


@pytest.mark.parametrize("name", STATISTICS)
def test_order_of_tasks_and_samples_changes_only_rounding(name: str) -> None:
    settings = {"projection": 20} if name == "ranpac" else {}
    forward, backward = (method_of(name, 6, **settings) for _ in range(2))
    for task, features, labels in tasks_of_noise():
        learn(forward, task, features, labels)
    for task, features, labels in reversed([*tasks_of_noise()]):
        learn(backward, task, features, labels)
    images = torch.randn(5, 6, generator=torch.Generator().manual_seed(1))
    for task, *_ in tasks_of_noise():
        expected = forward.logits(images, task.name)
        assert torch.allclose(backward.logits(images, task.name), expected, atol=1e-5)


@pytest.mark.parametrize("name", STATISTICS)
def test_base_task_has_a_statistics_step(name: str) -> None:
    base = Task("base", "card", "key", ("a", "b"), role="base")
    settings = METHODS[name].Settings()
    METHODS[name].check_backbone(settings, Identity(2), (base, THREE))
    steps = METHODS[name].steps_for(settings, -1)
    assert [step.name for step in steps] == ["statistics"]
    assert METHODS[name].steps_for(settings, 0) == steps


@pytest.mark.parametrize("scenario", ["task", "class"])
@pytest.mark.parametrize("name", STATISTICS)
def test_base_task_is_classified_by_its_statistics(lab: Lab, name: str, scenario: str) -> None:
    tasks: list[dict[str, Any]] = [
        {"card": str(lab.card), "name": task, "classes": list(classes)}
        for task, classes in TASKS.items()
    ]
    tasks[0]["role"] = "base"
    run = lab.run_of(
        name,
        {"optimizer": "adamw", "lr": 1e-2, "epochs": 3},
        settings={"projection": 100} if name == "ranpac" else {},
        stream={"scenario": scenario, "tasks": tasks},
    )
    assert [[job.step for job in run.stages(task)] for task in (0, 1)] == [["statistics"]] * 2
    (row,) = run.evaluated(0)["rows"]
    assert row["correct"] / row["total"] > 0.6, "the backbone was trained on these two classes"
    rows = {row["task"]: row for row in run.evaluated(1)["rows"]}
    assert tasks[1]["name"] in rows
    assert (scenario == "class") <= (tasks[0]["name"] in rows)
    assert run.state(0).method == name, (
        "the statistics replace the state of the backbone's training"
    )


def test_registered_statistics_methods_are_complete() -> None:
    assert STATISTICS == ["fecam", "ncm", "ranpac", "simplecil", "slda"]


# ---- the feature stage ---------------------------------------------------------------------------
def test_feature_batch_round_trips_through_parquet() -> None:
    batch = FeatureBatch(X, LABELS, torch.zeros_like(LABELS), list("abcdef"))
    again_read = FeatureBatch.from_parquet(batch.to_parquet())
    assert again_read.keys == batch.keys
    for tensor, expected in zip(again_read[:3], batch[:3], strict=True):
        assert tensor.dtype == expected.dtype
        assert torch.equal(tensor, expected)


def test_statistics_step_skips_features_of_held_out_images(lab: Lab) -> None:
    run = lab.run_of("ncm", OPTIMIZERS["adamw"], scenario="class")
    run.trained(0)
    (job,) = run.stages(0)
    assert job.task is not None
    everything = {key for keys in list_keys(job.root, job.task, 0.0).values() for key in keys}
    for fraction in (0.0, 0.5):
        held_out = replace(job, data=job.data.model_copy(update={"val_fraction": fraction}))
        kept = {key for keys in list_keys(job.root, job.task, fraction).values() for key in keys}
        batch = load_features(held_out)
        assert batch.keys == sorted(kept)
        assert (kept == everything) == (fraction == 0)
        assert len(batch.features) == len(batch.labels) == len(kept)


def test_stored_features_equal_features_extracted_from_images(lab: Lab) -> None:
    run = lab.run_of("ncm", OPTIMIZERS["adamw"], scenario="class")
    run.trained(0)
    (job,) = run.stages(0)
    assert job.task is not None
    batch = load_features(job)
    method = run.fresh()
    method.eval()
    feed = Feed(job, (job.task,), "train", Group(), training=False)
    expected = extract_features(method.features, feed)
    assert batch.keys == expected.keys
    assert torch.equal(batch.labels, expected.labels)
    assert torch.allclose(batch.features, expected.features, atol=1e-5)


# ---- ranks ---------------------------------------------------------------------------------------
def test_any_number_of_ranks_stores_the_same_bytes(lab: Lab) -> None:
    stages: list[tuple[StageJob, StageJob]] = []
    run = lab.run_of("ncm", OPTIMIZERS["adamw"], scenario="class")
    features = run.jobs[f"features/{run.order[1]}"]
    stages.append((again(features, "1 rank"), again(features, "3 ranks")))
    for name in (*STATISTICS, "aper", "slca", "ease", "mos"):  # stages of the second task
        run = lab.run_of(name, OPTIMIZERS["adamw"], scenario="class")
        run.trained(0)
        steps = ("statistics", "align")  # `align` is the second step of `mos`
        job = next(job for job in run.stages(1) if job.step in steps)
        run.prepare(job)
        stages.append((again(job, "1 rank"), again(job, "3 ranks")))
    for alone, _ in stages:
        with small_batches():
            lab.stage(alone)
    on_ranks([many for _, many in stages], 3, lab.folder / "ranks-statistics")
    for alone, many in stages:
        expected = Artifact.need(alone.root, alone.key)
        for file in set(expected.manifest["files"]) - {"history.parquet"}:
            stored = Artifact.need(many.root, many.key).read(file)
            assert stored == expected.read(file), f"{alone.id}: {file}"


# ---- damaged states ------------------------------------------------------------------------------
def load_cut(method: Any, learned: Any) -> None:
    """Load a state and carried state with only the first column of each tensor."""
    state, carried = learned.finish()
    for tensors in (state.head, state.copies, carried.tensors):
        for name, tensor in tensors.items():
            tensors[name] = tensor[..., :1]
    method.load_task(state)
    if carried.tensors:
        method.load_carried(carried)


def load_empty(method: Any, learned: Any) -> None:
    """Load a state and carried state without tensors."""
    state, carried = learned.finish()
    state.head, state.copies = {}, {}
    method.load_task(state)
    if carried.tensors:
        kept = {name: t for name, t in carried.tensors.items() if name == "gram"}
        method.load_carried(replace(carried, tensors=kept))


@pytest.mark.parametrize("name", STATISTICS)
@pytest.mark.parametrize("load", [load_cut, load_empty])
def test_a_damaged_state_is_refused(name: str, load: Any) -> None:
    settings = {"projection": 3} if name == "ranpac" else {}
    learned, method = (method_of(name, **settings) for _ in range(2))
    learn(learned, THREE, X, LABELS)
    with pytest.raises((UserError, RuntimeError, LookupError)):
        load(method, learned)
