"""What trials of a population take over from each other is a function of their records, for any
number side by side."""

from __future__ import annotations

from typing import Any

import pytest

from pipeline.search.population import lineage, start_of
from pipeline.search.space import Space, Uniform

SPACE = Space({"methods.meat.lambda": Uniform(dist="uniform", low=0.0, high=1.0)})


def record(number: int, *accuracies: float) -> dict[str, Any]:
    rounds = [
        {"params": {"methods.meat.lambda": number / 10}, "accuracy": accuracy}
        for accuracy in accuracies
    ]
    return {"number": number, "rounds": rounds, "results": [], "history": {}}


def parents(records: list[dict[str, Any]], position: int = 1, seed: int = 0) -> list[int]:
    return [start_of(r["number"], position, records, SPACE, seed).parent for r in records]


def test_the_lower_quarter_takes_over_from_the_upper_one() -> None:
    records = [
        record(n, accuracy) for n, accuracy in enumerate((0.5, 0.9, 0.1, 0.8, 0.6, 0.2, 0.7, 0.4))
    ]
    found = parents(records)
    assert {n for n, parent in enumerate(found) if parent != n} == {2, 5}
    assert {found[2], found[5]} <= {1, 3}
    assert {parents(records, seed=seed)[2] for seed in range(20)} == {1, 3}
    for number in (2, 5):
        start = start_of(number, 1, records, SPACE, 0)
        assert start == start_of(number, 1, records[::-1], SPACE, 0), (
            "the order in which records are read says nothing"
        )
        assert start.params != records[start.parent]["rounds"][0]["params"]
    assert start_of(1, 1, records, SPACE, 0).params == {"methods.meat.lambda": 0.1}


@pytest.mark.parametrize(
    ("accuracies", "expected"),
    [([0.3], [0]), ([0.3, 0.3], [0, 1]), ([0.2, 0.3], [1, 1]), ([0.3, 0.2, 0.1], [0, 1, 0])],
)
def test_small_and_equal_populations(accuracies: list[float], expected: list[int]) -> None:
    assert parents([record(n, accuracy) for n, accuracy in enumerate(accuracies)]) == expected


def test_what_came_later_and_who_is_behind_change_nothing() -> None:
    records = [record(0, 0.9, 0.0), record(1, 0.1), record(2)]
    assert start_of(1, 1, records, SPACE, 0).parent == 0


def test_a_lineage_is_cut_at_the_tasks_that_come_before() -> None:
    body = {"results": ["a", "b", "c"], "history": {"one": 1, "two": 2, "three": 3}}
    assert lineage(body, ("one", "two")) == {"results": ["a", "b"], "history": {"one": 1, "two": 2}}
    assert lineage(body, ()) == {"results": [], "history": {}}
