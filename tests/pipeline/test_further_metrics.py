"""Tests of metrics that need more than the accuracy matrix: balanced accuracy, intransigence, and
forward transfer."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

import pipeline
from pipeline.config.settings import check
from pipeline.graph.build import build_graph
from pipeline.graph.store import Store
from pipeline.results.tables import RunTables
from tests import small_run
from workers.errors import UserError

pytestmark = pytest.mark.usefixtures("small_pictures")


def run_domains(folder: Path, scenario: str, methods: tuple[str, ...], **stream: Any) -> Any:
    """Run methods on two tasks of digits, and return the results."""
    classes = ("234", "234") if scenario == "domain" else ("23", "456")
    tasks = []
    for name, digits in zip("ab", classes, strict=True):
        # classes of unequal size, so that balanced accuracy differs from accuracy
        card = small_run.make_card(folder, name, digits, train=12, test=9)
        for path in sorted((folder / "raw" / name / "test" / digits[0]).iterdir())[3:]:
            path.unlink()
        tasks.append({"name": name, "card": card})
    body = small_run.make_body(
        folder, {}, methods, stream={"scenario": scenario, "tasks": tasks, **stream}
    )
    return pipeline.load(body).run(quiet=True)


def count_by_hand(folder: Path, label: str, scenario: str) -> float:
    """Return the balanced accuracy from the stored predictions, without the code under test."""
    rates = defaultdict(list)
    record = small_run.manifests(folder / "storage")
    rewrites = record[f"{label}/b/evaluate"]["result"]["rewrites"]
    stages = ["b"] if rewrites else ["a", "b"]
    for after in stages:
        path = small_run.artifact(
            folder / "storage", f"{label}/{after}/evaluate", "predictions.parquet"
        )
        for row in pq.read_table(path).to_pylist():
            place = (row["task"] if scenario == "task" else "", row["label"])
            rates[place].append(row["label"] == row["prediction"])
    return float(np.mean([np.mean(hits) for hits in rates.values()]))


def learned_rate(folder: Path, label: str, task: str) -> float:
    """Return the accuracy on a task immediately after it was learned."""
    result = small_run.manifests(folder / "storage")[f"{label}/{task}/evaluate"]["result"]
    (row,) = [row for row in result["rows"] if row["task"] == task]
    rate: float = row["correct"] / row["total"]
    return rate


@pytest.mark.parametrize("scenario", ["task", "class", "domain"])
def test_balanced_accuracy_and_intransigence_match_counts_by_hand(
    tmp_path: Path, scenario: str
) -> None:
    other = "linear" if scenario == "task" else "er"
    results = run_domains(tmp_path, scenario, ("joint", other))
    summary = results.summary.set_index("label")
    for label in ("joint", other):
        value = summary.loc[label, "balanced_accuracy"]
        assert value == pytest.approx(count_by_hand(tmp_path, label, scenario))
    differences = [
        learned_rate(tmp_path, "joint", task) - learned_rate(tmp_path, other, task) for task in "ab"
    ]
    expected = np.mean(differences)
    assert summary.loc[other, "intransigence"] == pytest.approx(expected)
    assert np.isnan(summary.loc["joint", "intransigence"])
    classes = results.classes
    assert set(classes["class"]) == ({*"234"} if scenario == "domain" else {*"23456"})
    few = classes["class"].isin(["2"] if scenario == "domain" else ["2", "4"])
    assert (classes["total"] == np.where(few, 3, 9)).all()


def test_predictions_are_read_once_and_only_for_class_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The console summary reads only manifests, because a bucket takes one request per file."""
    results = run_domains(tmp_path, "task", ("linear",))
    (tables,) = results.tables.values()
    read: list[str] = []
    original = RunTables.table

    def table(self: RunTables, artifact: Any, name: str) -> Any:
        read.append(name)
        return original(self, artifact, name)

    monkeypatch.setattr(RunTables, "table", table)
    fresh = RunTables(tables.storage, tables.record, tables.artifacts)
    assert "balanced_accuracy" not in fresh.summary(with_classes=False)[0]
    assert read == []
    assert "balanced_accuracy" in fresh.summary()[0]
    fresh.summary()
    fresh.class_rows("linear")
    assert read == ["predictions.parquet"] * 2


def test_forward_transfer_is_measured_if_asked_for(tmp_path: Path) -> None:
    results = run_domains(tmp_path, "domain", ("er",), measure_next=True)
    (row,) = results.summary.to_dict("records")
    counts = small_run.results(tmp_path / "storage")["er/a/evaluate"]["next"]
    assert counts["task"] == "b"
    rate = counts["correct"] / counts["total"]
    assert row["next_task_accuracy"] == pytest.approx(rate)
    assert row["forward_transfer"] == pytest.approx(rate - 1 / 3)


@pytest.mark.parametrize("scenario", ["task", "class"])
def test_measure_next_is_refused_outside_scenario_domain(tmp_path: Path, scenario: str) -> None:
    cards = small_run.make_cards(tmp_path, ("base", "a"))
    body = small_run.make_body(tmp_path, cards, scenario=scenario)
    body["stream"]["measure_next"] = True
    with pytest.raises(UserError, match=r"measure_next.*domain"):
        check(body, "test")


def test_evaluation_is_provisional_until_the_next_task_is_ingested(tmp_path: Path) -> None:
    tasks = [
        {"name": name, "card": small_run.make_card(tmp_path, name, "234", train=12, test=9)}
        for name in "ab"
    ]

    def make_body(num_tasks: int) -> dict[str, Any]:
        stream = {"scenario": "domain", "tasks": tasks[:num_tasks], "measure_next": True}
        return small_run.make_body(tmp_path, {}, ("er",), stream=stream)

    def is_provisional(stage: str) -> bool:
        graph, _ = build_graph(check(make_body(2), "test"), Store(str(tmp_path / "storage")))
        return graph[stage].is_provisional

    pipeline.load(make_body(1)).ingest()
    assert not is_provisional("er/a/train")
    assert is_provisional("er/a/evaluate")
    pipeline.load(make_body(2)).ingest()
    assert not is_provisional("er/a/evaluate")
