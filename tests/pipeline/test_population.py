"""Tests of population-based search: the start of a trial depends only on the trial records."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from pipeline.results.trials import Trial, TrialResult, TrialRound
from pipeline.search.population import choose_start, lineage
from pipeline.search.space import Space, Uniform

SPACE = Space({"methods.meat.lambda": Uniform(dist="uniform", low=0.0, high=1.0)})


def record(number: int, *accuracies: float) -> Trial:
    """Return a running trial with one round per accuracy."""
    params = {"methods.meat.lambda": number / 10}
    rounds: list[TrialRound] = [{"params": params, "accuracy": accuracy} for accuracy in accuracies]
    return {
        "number": number,
        "phase": "",
        "params": params,
        "status": "running",
        "message": "",
        "results": [],
        "stages": {"run": 0, "reused": 0},
        "device_s": 0.0,
        "rounds": rounds,
        "history": {},
    }


def records_of(accuracies: Sequence[float]) -> list[Trial]:
    """Return trials 0, 1, ... that have learned one task with these accuracies."""
    return [record(number, accuracy) for number, accuracy in enumerate(accuracies)]


def result_of(task: str) -> TrialResult:
    """Return a result after `task`."""
    return {"task": task, "position": 0, "accuracy": 0.5, "bytes": 1.0, "per_task": {}}


def parents(records: list[Trial], position: int = 1, seed: int = 0) -> list[int]:
    """Return the parent of each trial in the round of task `position`."""
    starts = [choose_start(trial["number"], position, records, SPACE, seed) for trial in records]
    return [start.parent for start in starts]


def test_lowest_quarter_continues_from_trials_of_highest_quarter() -> None:
    records = records_of((0.5, 0.9, 0.1, 0.8, 0.6, 0.2, 0.7, 0.4))
    parent_of = parents(records)
    changed = [number for number in range(8) if parent_of[number] != number]
    assert changed == [2, 5]
    assert {parent_of[2], parent_of[5]} <= {1, 3}
    assert {parents(records, seed=seed)[2] for seed in range(20)} == {1, 3}
    for number in (2, 5):
        start = choose_start(number, 1, records, SPACE, 0)
        assert start == choose_start(number, 1, records[::-1], SPACE, 0), (
            "the order of the records must not matter"
        )
        assert start.params != records[start.parent]["rounds"][0]["params"]
    assert choose_start(1, 1, records, SPACE, 0).params == {"methods.meat.lambda": 0.1}


@pytest.mark.parametrize(
    ("accuracies", "expected"),
    [([0.3], [0]), ([0.3, 0.3], [0, 1]), ([0.2, 0.3], [1, 1]), ([0.3, 0.2, 0.1], [0, 1, 0])],
)
def test_parents_of_small_and_tied_populations(
    accuracies: list[float], expected: list[int]
) -> None:
    assert parents(records_of(accuracies)) == expected


def test_later_rounds_and_slower_trials_do_not_affect_the_start() -> None:
    records = [record(0, 0.9, 0.0), record(1, 0.1), record(2)]
    assert choose_start(1, 1, records, SPACE, 0).parent == 0


def test_lineage_holds_only_results_of_earlier_tasks() -> None:
    results = [result_of("a"), result_of("b"), result_of("c")]
    trial = record(0)
    trial["results"] = results
    trial["history"] = {"a": {"x": 1}, "b": {"x": 2}, "c": {"x": 3}}
    assert lineage(trial, ("a", "b")) == {
        "results": results[:2],
        "history": {"a": {"x": 1}, "b": {"x": 2}},
    }
    assert lineage(trial, ()) == {"results": [], "history": {}}
