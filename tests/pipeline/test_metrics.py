"""Tests of the metrics: worked examples, and unusual shapes and values of the accuracy matrix."""

from typing import Any

import numpy as np
import pytest

from pipeline.results import metrics
from pipeline.results.metrics import METRICS
from workers.errors import UserError

R = [
    [0.90, 0.97, 0.12, 0.08],
    [0.93, 0.80, 0.15, 0.11],
    [0.85, 0.86, 0.92, 0.14],
    [0.60, 0.75, 0.95, 0.88],
]
COUNTS = np.rint(np.array(R) * 100).astype(int)
TOTALS = np.full((4, 4), 100)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("average_accuracy", 0.795),
        ("micro_average_accuracy", 0.795),
        ("last_accuracy", 0.795),
        ("average_incremental_accuracy", (0.9 + 0.865 + 2.63 / 3 + 0.795) / 4),
        ("forgetting", 0.136667),
        ("forgetting_first", 0.106667),
        ("backward_transfer", -0.106667),
        ("learning_accuracy", 0.875),
        ("forgetting_continuum_pre_2022_05", (0.93 - 0.60 + 0.80 - 0.75) / 3),
        ("lower_triangle_accuracy", 0.844),
        ("average_over_time", (0.9 + 0.865 + 2.63 / 3 + 0.795) / 4),
        ("backward_transfer_all_pairs", -0.28 / 6),
        ("positive_backward_transfer", 0.0),
        ("remembering", 1 - 0.28 / 6),
    ],
)
def test_metrics_match_the_worked_example(name: str, value: Any) -> None:
    assert metrics.all_metrics(COUNTS, TOTALS)[name] == pytest.approx(value, abs=1e-6)
    assert metrics.all_metrics(R)[name] == pytest.approx(value, abs=1e-6)


def test_worked_example_has_average_incremental_accuracy_0_859() -> None:
    assert round(METRICS["average_incremental_accuracy"](R), 3) == 0.859


CLASS_INCREMENTAL = [[0.9, 0, 0, 0], [0.7, 0.8, 0, 0], [0.75, 0.6, 0.85, 0], [0.5, 0.4, 0.6, 0.8]]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("average_incremental_accuracy", 0.7395833),
        ("last_accuracy", 0.575),
        ("forgetting", 0.35),
        ("forgetting_continuum_pre_2022_05", 0.2666667),
        ("backward_transfer", -0.35),
        ("backward_transfer_all_pairs", -0.2666667),
    ],
)
def test_metrics_match_the_class_incremental_worked_example(name: str, value: float) -> None:
    """The average includes the first task. DyTox's tables use the older formula of forgetting."""
    assert metrics.all_metrics(CLASS_INCREMENTAL)[name] == pytest.approx(value, abs=1e-7)
    assert metrics.pooled_accuracies(metrics.measure(CLASS_INCREMENTAL)) == pytest.approx(
        [0.9, 0.75, 0.7333333, 0.575], abs=1e-7
    )


def test_old_continuum_forgetting_ignores_second_last_task() -> None:
    r = [[0.9, 0, 0], [0.8, 0.7, 0], [0.6, 0.5, 0.8]]
    assert [
        row["forgetting_continuum_pre_2022_05"] for row in metrics.over_time(r)
    ] == pytest.approx([0, 0, 0.15])
    assert [row["forgetting"] for row in metrics.over_time(r)] == pytest.approx([0, 0.1, 0.25])


def test_unequal_tasks_are_pooled_except_in_average_accuracy() -> None:
    correct, total = [[9, 0], [5, 900]], [[10, 1000], [10, 1000]]
    assert METRICS["average_accuracy"](correct, total) == pytest.approx(0.7)
    assert METRICS["micro_average_accuracy"](correct, total) == pytest.approx(905 / 1010)
    assert METRICS["last_accuracy"](correct, total) == pytest.approx(905 / 1010)
    assert METRICS["average_incremental_accuracy"](correct, total) == pytest.approx(
        (0.9 + 905 / 1010) / 2
    )


def test_backward_transfer_is_split_by_its_sign() -> None:
    better = metrics.all_metrics([[0.5, 0], [0.7, 0.6]])
    assert better["positive_backward_transfer"] == pytest.approx(0.2)
    assert better["remembering"] == 1
    worse = metrics.all_metrics([[0.5, 0], [0.4, 0.6]])
    assert worse["positive_backward_transfer"] == 0
    assert worse["remembering"] == pytest.approx(0.9)


def test_one_task_has_no_forgetting() -> None:
    values = metrics.all_metrics([[3]], [[4]])
    assert (
        values["average_accuracy"]
        == values["average_incremental_accuracy"]
        == values["learning_accuracy"]
        == 0.75
    )
    assert values["forgetting"] == values["forgetting_first"] == values["backward_transfer"] == 0


def test_no_task_gives_nan_and_no_error() -> None:
    assert all(np.isnan(v) for v in metrics.all_metrics([]).values())


def test_many_tasks_and_classes_do_not_overflow() -> None:
    correct = np.full((100, 100), 30_000, np.int16)
    total = np.full((100, 100), 32_000, np.int16)
    assert METRICS["last_accuracy"](correct, total) == pytest.approx(30 / 32)
    assert METRICS["forgetting"](correct, total) == 0


def test_integer_rates_are_accepted() -> None:
    assert METRICS["forgetting"]([[1, 0], [0, 1]]) == 1
    assert METRICS["average_accuracy"](np.eye(2, dtype=int)) == 0.5


def test_inputs_are_not_changed() -> None:
    correct, total = COUNTS.astype(float), TOTALS.astype(float)
    correct[0, 3], total[1, 3] = np.nan, -1
    before = correct.copy(), total.copy()
    metrics.all_metrics(correct, total)
    metrics.over_time(correct, total)
    np.testing.assert_array_equal(correct, before[0])
    np.testing.assert_array_equal(total, before[1])


def test_entries_above_the_diagonal_change_nothing() -> None:
    lower = np.where(np.tril(np.ones((4, 4), bool)), R, np.nan)
    assert metrics.all_metrics(lower) == pytest.approx(metrics.all_metrics(R))


def test_every_metric_has_a_value_in_a_finished_run() -> None:
    lower = np.where(np.tril(np.ones((4, 4), bool)), COUNTS, np.nan)
    assert not np.isnan(list(metrics.all_metrics(lower, TOTALS).values())).any()


@pytest.mark.parametrize("marker", ["rate", "total", "zero"])
def test_only_metrics_that_need_a_missing_entry_are_nan(marker: str) -> None:
    correct, total = COUNTS.astype(float), TOTALS.astype(float)
    if marker == "rate":
        correct[2, 0] = np.nan
    else:
        total[2, 0] = np.nan if marker == "total" else 0
    values = metrics.all_metrics(correct, total)
    assert np.isnan(values["forgetting"])
    assert np.isnan(values["average_incremental_accuracy"])
    assert values["average_accuracy"] == pytest.approx(0.795)
    assert values["forgetting_first"] == pytest.approx(0.106667, abs=1e-6)


def test_an_unfinished_run_has_the_metrics_of_its_finished_rows() -> None:
    correct = COUNTS.astype(float)
    correct[2:] = np.nan
    rows = metrics.over_time(correct, TOTALS)
    assert rows[1] == pytest.approx(metrics.over_time(COUNTS, TOTALS)[1], nan_ok=True)
    assert np.isnan(rows[3]["average_accuracy"])


def test_non_square_matrix_is_refused_with_its_shape() -> None:
    with pytest.raises(UserError, match=r"shape \(1, 2\); it must be square"):
        METRICS["forgetting"]([[0.5, 0.5]])
    with pytest.raises(UserError, match="same entries"):
        METRICS["forgetting"]([[0.5, 0.5], [0.5, 0.5]], [[1, 1, 1]])


def test_order_disparity_is_the_range_of_each_task_over_orders() -> None:
    assert metrics.order_disparity(
        [[0.9, 0.5, 0.7], [0.6, 0.5, 0.8], [0.7, 0.5, 0.75]]
    ) == pytest.approx([0.3, 0, 0.1])
    assert np.isnan(metrics.order_disparity([[0.9, 0.5], [np.nan, 0.6]])).tolist() == [True, False]
    with pytest.raises(UserError, match="a row for each order"):
        metrics.order_disparity([0.9, 0.5])
