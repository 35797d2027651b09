"""Tests of bootstrap draws of metrics: stored predictions, pairing of methods, and class orders."""

from __future__ import annotations

import math
from typing import Any

import fake_run
import numpy as np
import pytest

from pipeline.results import answers, metrics
from pipeline.results.answers import RightAnswers, draw_metrics, find_strata, right_answers
from pipeline.results.intervals import percentile_interval
from pipeline.results.tables import RunTables

TASKS = [task["name"] for task in fake_run.TASKS]


def one_task(right: Any, name: str = "a") -> RightAnswers:
    """Return the answers on a single task."""
    return RightAnswers({(0, 0): np.asarray(right, bool)}, [[(name, str(i)) for i in range(400)]])


def test_draws_of_a_single_replica_match_binomial_interval() -> None:
    right = np.arange(400) < 300
    drawn = draw_metrics({"m": {"0": one_task(right)}}, draws=20_000)["m"]
    reach = 1.96 * math.sqrt(0.75 * 0.25 / 400)
    interval = percentile_interval(drawn["average_accuracy"])
    assert interval == pytest.approx((0.75 - reach, 0.75 + reach), abs=3e-3)
    assert (drawn["forgetting"] == 0).all()


def test_methods_with_equal_answers_have_equal_draws() -> None:
    right = [np.arange(400) % 5 < 4, np.arange(400) % 7 < 5, np.arange(400) % 3 < 2]
    by_replica = {str(i): one_task(values) for i, values in enumerate(right)}
    drawn = draw_metrics({"one": by_replica, "other": dict(by_replica)})
    assert (drawn["one"]["average_accuracy"] == drawn["other"]["average_accuracy"]).all()


def test_draws_over_all_or_nothing_replicas_are_binomial() -> None:
    """One of three replicas is right: the drawn means k/3 follow a binomial distribution."""
    values = [np.zeros(400), np.ones(400), np.zeros(400)]
    by_replica = {str(i): one_task(value) for i, value in enumerate(values)}
    drawn = draw_metrics({"m": by_replica}, draws=20_000)["m"]["average_accuracy"]
    for hits in range(4):
        share = float(np.isclose(drawn, hits / 3).mean())
        expected = math.comb(3, hits) * (1 / 3) ** hits * (2 / 3) ** (3 - hits)
        assert share == pytest.approx(expected, abs=0.015)


@pytest.mark.parametrize("label", ["meat", "finetune"])
def test_right_answers_match_counts_of_accuracy_matrix(storage: Any, label: str) -> None:
    run = RunTables.load(storage, fake_run.record())
    right = right_answers(run, label, TASKS)
    assert right is not None
    matrix = run.matrix(label)
    for (t, i), values in right.right.items():
        assert (values.sum(), len(values)) == (matrix.correct[t, i], matrix.total[t, i])
    assert len(right.right) == len(TASKS) * (len(TASKS) + 1) // 2


def test_order_of_stored_predictions_does_not_matter(
    storage: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunTables.load(storage, fake_run.record())
    expected = right_answers(run, "finetune", TASKS)
    assert expected is not None
    read = RunTables.table
    rng = np.random.default_rng(0)

    def shuffled(tables: RunTables, *source: Any) -> Any:
        table = read(tables, *source)
        assert table is not None
        return table.take(rng.permutation(len(table)))

    monkeypatch.setattr(RunTables, "table", shuffled)
    right = right_answers(run, "finetune", TASKS)
    assert right is not None
    assert right.images == expected.images
    for pair, values in expected.right.items():
        assert (right.right[pair] == values).all()


def test_run_with_missing_evaluation_has_no_answers(storage: Any) -> None:
    run = RunTables.load(storage, fake_run.record())
    del run.artifacts[f"meat/{TASKS[-1]}/evaluate"]
    assert right_answers(run, "meat", TASKS) is None


def test_strata_group_images_by_task_in_every_class_order() -> None:
    """With two class orders, a group holds the images that share a task in both orders."""
    images = {letter: [(letter, str(i)) for i in range(10)] for letter in "abcd"}
    first = [images["a"] + images["b"], images["c"] + images["d"]]
    second = [images["b"] + images["a"], images["d"] + images["c"]]
    third = [images["a"] + images["c"], images["b"] + images["d"]]
    rng = np.random.default_rng(0)
    together = find_strata({"first": first, "second": second}, rng, 50)
    assert [len(stratum.counts) for stratum in together] == [20, 20]
    apart = find_strata({"first": first, "third": third}, rng, 50)
    assert [len(stratum.counts) for stratum in apart] == [10, 10, 10, 10]
    for stratum in together:
        parts = {"first": first, "second": second}
        chosen = [
            [parts[replica][task][row] for row in rows]
            for (replica, task), rows in stratum.rows.items()
        ]
        assert chosen[0] == chosen[1]


def test_images_of_two_tasks_count_in_both() -> None:
    images = [[("a", str(i)) for i in range(100)], [("a", str(i)) for i in range(50, 150)]]
    right = np.ones(100, bool)
    methods = {"m": {"0": RightAnswers({(0, 0): right, (1, 0): right, (1, 1): right}, images)}}
    drawn = draw_metrics(methods)["m"]
    assert (drawn["average_accuracy"] == 1).all()


def test_batched_metrics_equal_metrics_of_each_matrix() -> None:
    rng = np.random.default_rng(3)
    totals = np.array([40, 10, 25, 30])
    correct = rng.integers(0, totals + 1, (5, 4, 4)).astype(float)
    rates = correct / totals
    drawn = answers.compute_metrics(rates, totals.astype(float))
    for row in range(5):
        for name in (
            "average_accuracy",
            "average_incremental_accuracy",
            "forgetting",
            "learning_accuracy",
        ):
            expected = metrics.METRICS[name](correct[row], np.tile(totals, (4, 1)))
            assert drawn[name][row] == pytest.approx(expected)
        over_time = metrics.over_time(correct[row], np.tile(totals, (4, 1)))
        assert drawn["average_accuracy after 2"][row] == pytest.approx(
            over_time[2]["average_accuracy"]
        )
        assert drawn["forgetting after 2"][row] == pytest.approx(over_time[2]["forgetting"])
