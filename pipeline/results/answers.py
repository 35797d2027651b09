"""Correct predictions of each method, and bootstrap draws of metrics over images and replicas.

`right_answers` loads the predictions of a method, `draw_metrics` computes the draws (bootstrap: see
`pipeline.results.intervals`). A replica is the part of a run with one seed and one class order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from pipeline.results import intervals, metrics
from pipeline.results.intervals import Array
from pipeline.results.metrics import Accuracies
from pipeline.results.tables import RunTables

ImageId = tuple[str, str]  # key of the ingested data, key of the image
# names of values drawn in addition to metrics; `{}` is the position of a task
ACCURACY_AFTER = "average_accuracy after {}"
FORGETTING_AFTER = "forgetting after {}"
ACCURACY_ON = "accuracy on {}"


@dataclass(frozen=True)
class RightAnswers:
    """The correct predictions of one method in one replica.

    Attributes:
        right: (t, i) -> boolean array (images of task i,): whether the prediction for each test
            image of task i is correct after task t.
        images: Test images of each task, in the order of the arrays.
    """

    right: Mapping[tuple[int, int], NDArray[np.bool_]]
    images: Sequence[Sequence[ImageId]]


@dataclass(frozen=True)
class Stratum:
    """A stratum of the bootstrap: test images that belong to the same tasks in each replica.

    Each draw resamples the images within a stratum, so the number of images of a task is constant.

    Attributes:
        rows: (replica, index of a task in its stream) -> positions (images,) of the images in the
            arrays of the task.
        counts: How often each image is in each draw, (images, draws).
    """

    rows: Mapping[tuple[str, int], NDArray[np.int64]]
    counts: NDArray[np.uint8]


def right_answers(run: RunTables, label: str, tasks: Sequence[str]) -> RightAnswers | None:
    """Load the correct predictions of one method of a run.

    Args:
        run: Results of the run.
        label: Label of the method.
        tasks: Tasks in stream order.

    Returns:
        The correct predictions, or None if the stored predictions do not cover all tasks.
    """
    right: dict[tuple[int, int], NDArray[np.bool_]] = {}
    known_keys: list[list[str]] = []
    for t, after in enumerate(tasks):
        table = run.table(run.artifacts.get(f"{label}/{after}/evaluate"), "predictions.parquet")
        result = run.result(label, after)
        if table is None or result is None:
            return None
        # sorted by key, so that the order is the same after every task and in every replica
        table = table.sort_by([("task", "ascending"), ("key", "ascending")])
        rows_by_task = find_runs(table["task"].to_pylist())
        keys = table["key"].to_pylist()
        is_right = table["label"].to_numpy() == table["prediction"].to_numpy()
        for i, task in enumerate(tasks[: t + 1]):
            # `rewrites` is false: the predictions on earlier tasks cannot change, so they were not
            # measured again
            if i < t and not result["rewrites"]:
                right[t, i] = right[i, i]
                continue
            rows = rows_by_task.get(task, slice(0))
            if t == i:
                known_keys.append(keys[rows])
            if not known_keys[i] or keys[rows] != known_keys[i]:
                return None
            right[t, i] = is_right[rows]
    data = [str(run.task(task).get("data", "")) for task in tasks]
    images = [[(key, name) for name in names] for key, names in zip(data, known_keys, strict=True)]
    return RightAnswers(right, images)


def find_runs(values: Sequence[str]) -> dict[str, slice]:
    """Return the slice of each value in a sequence where equal values are adjacent."""
    runs = {}
    start = 0
    for value, group in groupby(values):
        stop = start + len(list(group))
        runs[value] = slice(start, stop)
        start = stop
    return runs


def find_strata(
    images: Mapping[str, Sequence[Sequence[ImageId]]], rng: np.random.Generator, draws: int
) -> list[Stratum]:
    """Group test images that share a task in every replica into strata, and draw from each.

    With one class order, each task is a stratum. With several class orders, a task of one replica
    may be split over several strata.

    Args:
        images: Replica -> images of each task.
        rng: Random generator of the draws.
        draws: Number of draws.
    """
    # image -> (replica, index of a task) -> position in the task
    rows_of: dict[ImageId, dict[tuple[str, int], int]] = {}
    for replica, tasks in images.items():
        for index, task_images in enumerate(tasks):
            for row, image in enumerate(task_images):
                rows_of.setdefault(image, {})[replica, index] = row
    groups: dict[tuple[tuple[str, int], ...], list[dict[tuple[str, int], int]]] = {}
    for rows_by_task in rows_of.values():
        groups.setdefault(tuple(rows_by_task), []).append(rows_by_task)
    strata = []
    for group, members in groups.items():
        rows = {task: np.array([member[task] for member in members]) for task in group}
        strata.append(Stratum(rows, intervals.draw_counts(len(members), rng, draws)))
    return strata


def compute_drawn_rates(answers: RightAnswers, replica: str, strata: Sequence[Stratum]) -> Array:
    """Compute the accuracy matrix of one method in each draw.

    Args:
        answers: Correct predictions of the method in the replica.
        replica: Name of the replica.
        strata: Groups of test images with their draws.

    Returns:
        Accuracy matrices, (draws, T, T).
    """
    size = len(answers.images)
    draws = strata[0].counts.shape[1]
    hits = np.zeros((draws, size, size))
    for stratum in strata:
        for (name, task), rows in stratum.rows.items():
            if name == replica:
                right = [answers.right[t, task][rows] for t in range(task, size)]
                counts = stratum.counts.astype(np.float32)
                hits[:, task:, task] += (np.array(right, np.float32) @ counts).T
    # Each stratum is drawn at its own size, so a task has the same number of images in every draw.
    totals = np.array([len(task_images) for task_images in answers.images], float)
    rates: Array = hits / totals
    return rates


def compute_metrics(rates: Array, totals: Array) -> dict[str, Array]:
    """Compute, for each draw, the metrics with bootstrap intervals.

    Args:
        rates: Accuracy matrices, (draws, T, T).
        totals: Test images of each task, (T,).

    Returns:
        Name of a metric -> values, (draws,).
    """
    accuracies = Accuracies(rates * totals, np.broadcast_to(totals, rates.shape), rates)
    values = {}
    for metric in metrics.metrics_for("draws"):
        if metric.function is not None:
            values[metric.name] = metric.function(accuracies)
    for t in range(rates.shape[-1]):
        leading = accuracies.until(t)
        values[ACCURACY_AFTER.format(t)] = metrics.average_accuracy(leading)
        values[FORGETTING_AFTER.format(t)] = metrics.forgetting(leading)
        values[ACCURACY_ON.format(t)] = rates[:, -1, t]
    return values


def draw_metrics(
    methods: Mapping[str, Mapping[str, RightAnswers]], draws: int = intervals.DRAWS
) -> dict[str, dict[str, Array]]:
    """Compute the metrics of each method in each draw, averaged over the drawn replicas.

    All methods use the same draws of images, and methods with the same replicas use the same draws
    of replicas. Their differences are therefore paired.

    Args:
        methods: Method -> replica -> correct predictions.
        draws: Number of draws.

    Returns:
        Method -> name of a metric -> values, (draws,).
    """
    rng = np.random.default_rng(intervals.SEED)
    images: dict[str, Sequence[Sequence[ImageId]]] = {}
    for by_replica in methods.values():
        for replica, answers in by_replica.items():
            images.setdefault(replica, answers.images)
    strata = find_strata(images, rng, draws)
    picked: dict[tuple[str, ...], NDArray[np.int64]] = {}
    drawn: dict[str, dict[str, Array]] = {}
    for method, by_replica in methods.items():
        replicas = tuple(by_replica)
        if replicas not in picked:
            picked[replicas] = intervals.draw_replicas(len(replicas), rng, draws)
        values: dict[str, list[Array]] = {}
        for replica, answers in by_replica.items():
            totals = np.array([len(task_images) for task_images in answers.images], float)
            rates = compute_drawn_rates(answers, replica, strata)
            for name, metric in compute_metrics(rates, totals).items():
                values.setdefault(name, []).append(metric)
        drawn[method] = {
            name: intervals.mean_over_replicas(np.stack(rows), picked[replicas])
            for name, rows in values.items()
        }
    return drawn
