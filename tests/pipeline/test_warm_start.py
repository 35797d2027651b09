"""Tests of searches that start with the best points of an earlier search."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, cast

import fake_search
import pytest
from pydantic import TypeAdapter

from pipeline.results import trials
from pipeline.results.trials import Trial, load_search_record
from pipeline.search import spec, trial, tune
from pipeline.search.space import Dimension, Space
from pipeline.search.warm_start import (
    WarmStart,
    WarmStartSettings,
    choose_warm_start,
    convert_point,
)
from tests.pipeline.small_search import prepared
from workers.errors import UserError

LAMBDA = "methods.meat.lambda"
ALPHA = "methods.meat.alpha"
DIMENSIONS = {
    "method": {"dist": "choice", "values": ["meat", "hat"]},
    "train.epochs": {"dist": "int", "low": 1, "high": 5},
    LAMBDA: {"dist": "uniform", "low": 0.5, "high": 1.0},
    "methods.meat.token_mask_blocks": {"dist": "choice", "values": ["all", [3, 6]]},
    "methods.hat.s_max": {"dist": "loguniform", "low": 10, "high": 1000},
}


def space_of(dimensions: dict[str, Any]) -> Space:
    return Space(TypeAdapter(dict[str, Dimension]).validate_python(dimensions))


def earlier_trial(number: int, params: dict[str, Any], accuracy: float, **more: Any) -> Trial:
    return cast(Trial, fake_search.trial(number, params, accuracy=accuracy, **more))


# ---- points --------------------------------------------------------------------------------------
BASE = {"methods": {"meat": {"lambda": 0.75, "token_mask_blocks": (3, 6)}}, "train": {"epochs": 3}}


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        (
            {LAMBDA: 0.6},
            {
                "method": "meat",
                "train.epochs": 3,
                LAMBDA: 0.6,
                "methods.meat.token_mask_blocks": [3, 6],
            },
        ),
        ({LAMBDA: 0.4}, None),
        ({"train.epochs": 6}, None),
        ({"methods.meat.token_mask_blocks": [3]}, None),
        ({LAMBDA: "most"}, None),
    ],
)
def test_point_takes_trial_settings_then_base_settings(
    params: dict[str, Any], expected: dict[str, Any] | None
) -> None:
    assert convert_point(space_of(DIMENSIONS), earlier_trial(0, params, 0.5), BASE, 0) == expected


def test_setting_unknown_to_earlier_search_is_drawn() -> None:
    dimensions = {
        LAMBDA: DIMENSIONS[LAMBDA],
        ALPHA: {"dist": "uniform", "low": 1.0, "high": 2.0},
    }
    points = [
        convert_point(space_of(dimensions), earlier_trial(number, {}, 0.5), BASE, 7)
        for number in (0, 1, 1)
    ]
    assert all(point is not None and point[LAMBDA] == 0.75 for point in points)
    assert points[0] != points[1] == points[2], "the point depends only on the trial and the seed"


def test_trial_of_another_method_is_used_if_in_space() -> None:
    body = {"methods": {"hat": {"s_max": 400.0}, "meat": {}}, "train": {"epochs": 2}}
    params = {"method": "hat"}
    space = space_of(DIMENSIONS)
    assert convert_point(space, earlier_trial(0, params, 0.5), body, 0) == {
        "method": "hat",
        "train.epochs": 2,
        "methods.hat.s_max": 400.0,
    }
    assert convert_point(space, earlier_trial(0, {"method": "meat"}, 0.5), body, 0) is not None
    assert convert_point(space, earlier_trial(0, {"method": "ewc"}, 0.5), body, 0) is None


def test_drawn_setting_respects_its_condition_on_other_settings() -> None:
    """The space has `gamma` for only one value of `alpha`, and the earlier trial has no `gamma`.

    It is drawn for the trial's own `alpha`, not for the `alpha` of a point drawn from the space.
    """
    keep = {"dist": "uniform", "low": 0.1, "high": 0.9, "when": {ALPHA: [2]}}
    alpha = {"dist": "choice", "values": [0.5, 1, 2]}
    space = space_of({ALPHA: alpha, "methods.meat.gamma": keep})
    for number in range(8):
        point = convert_point(space, earlier_trial(number, {ALPHA: 2}, 0.5), BASE, 0)
        assert point is not None
        assert 0.1 <= point["methods.meat.gamma"] <= 0.9


def taken(
    some: list[Trial], count: int = 2, key: str = "other", max_forgetting: float | None = None
) -> WarmStart:
    """Return the warm start of a search over lambda from these trials."""
    record = fake_search.record("first") | {"config": {"methods": {"meat": {}}}}
    earlier = trials.SearchRecord("first", record, some, None, [])
    space = space_of({LAMBDA: DIMENSIONS[LAMBDA]})
    settings = WarmStartSettings(count, 0, max_forgetting)
    return choose_warm_start(earlier, space, settings, lambda params: key, "second.yaml")


def judged(number: int, params: dict[str, Any], accuracy: float, key: str) -> Trial:
    """Return a trial of task flowers with this evaluation key."""
    stages = [
        {"id": "meat/flowers/evaluate", "step": "evaluate", "task": "flowers", "key": key},
        {"id": "meat/birds/evaluate", "step": "evaluate", "task": "birds", "key": "same"},
    ]
    return earlier_trial(number, params, accuracy, graph={"stages": stages})


def test_best_finished_trials_come_first_without_duplicates() -> None:
    some = [
        earlier_trial(0, {LAMBDA: 0.6}, 0.5),
        earlier_trial(1, {LAMBDA: 0.7}, 0.9),
        earlier_trial(2, {LAMBDA: 0.7}, 0.8),
        earlier_trial(3, {LAMBDA: 0.2}, 0.99),
        earlier_trial(4, {LAMBDA: 0.8}, 0.95, status="stopped"),
        earlier_trial(5, {LAMBDA: 0.9}, 0.95, history={"flowers": {LAMBDA: 0.6}}),
        earlier_trial(6, {LAMBDA: 1.0}, float("nan")),
        earlier_trial(7, {LAMBDA: 0.8}, 0.95, phase="flowers"),
    ]
    assert [point.trial for point in taken(some).points] == [1, 0]
    assert [point.trial for point in taken(some, 1).points] == [1]
    assert taken(some, 9) == taken(some)
    with pytest.raises(UserError, match=r"second\.yaml: warm_start names search 'first'.* space;"):
        taken(some[3:])
    with pytest.raises(UserError, match=r"none of its 4 trials finished .*wait until one has"):
        taken(some[4:])


def test_trial_above_the_forgetting_limit_is_not_taken() -> None:
    some = []
    for number, rate in enumerate((0.3, 0.7)):
        results = [
            {"task": "a", "position": 0, "accuracy": 0.8, "bytes": 1.0, "per_task": {"a": 0.8}},
            {"task": "b", "position": 1, "accuracy": 0.9, "bytes": 1.0, "per_task": {"a": rate}},
        ]
        params = {LAMBDA: 0.6 + number / 10}
        some.append(cast(Trial, fake_search.trial(number, params, results=results)))
    assert [point.trial for point in taken(some).points] == [0, 1]
    assert [point.trial for point in taken(some, max_forgetting=0.4).points] == [1]


def test_only_trials_with_the_same_evaluation_are_observations() -> None:
    some = [
        judged(0, {LAMBDA: 0.6}, 0.9, "same"),
        judged(1, {LAMBDA: 0.7}, 0.8, "same"),
        judged(2, {LAMBDA: 0.8}, 0.7, "other"),
        earlier_trial(3, {LAMBDA: 0.9}, 0.6),
    ]
    warm_start = taken(some, 1, "same")
    assert [point.trial for point in warm_start.points] == [0]
    assert [point.trial for point in warm_start.observations] == [1]
    assert taken(some, 1, "new").observations == ()


# ---- searches ------------------------------------------------------------------------------------
@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with a search `first` of four finished trials."""
    search = prepared(tmp_path, name="first")
    spec.write_state(search)
    plan = trial.PhasePlan(search.name, search.storage, search.body, {}, search.tasks)
    for number, share in enumerate((0.6, 0.7, 0.8, 0.95)):
        trial.run_trial(plan, number, {LAMBDA: share, ALPHA: 1}, lambda result: None)
    return tmp_path


def asking(search: spec.Search) -> tune.AskingSearcher:
    plan = trial.PhasePlan(search.name, search.storage, search.body, {}, search.tasks)
    return tune.AskingSearcher(search, plan, 0)


def test_earlier_points_are_tried_first_without_running_stages(folder: Path) -> None:
    search = prepared(folder, warm_start="first", warm_points=2)
    ranked = sorted(
        load_search_record(search.storage, "first").trials, key=lambda t: -trials.score(t)
    )
    asked = asking(search)
    points = [asked.suggest(str(number))["params"] for number in range(3)]
    assert points[:2] == [record["params"] for record in ranked[:2]]
    assert points[2] == tune.draw_point(search, 2, 0), (
        "the next point is drawn as without a warm start"
    )
    plan = trial.PhasePlan(search.name, search.storage, search.body, {}, search.tasks)
    trial.run_trial(plan, 0, points[0], lambda result: None)
    record = trial.read_trial_record(search.storage, search.name, 0)
    assert record is not None
    assert record["stages"]["run"] == 0
    assert record["results"] == ranked[0]["results"]


@pytest.mark.slow
def test_tpe_learns_from_other_comparable_trials(folder: Path) -> None:
    pytest.importorskip("optuna")
    search = prepared(folder, warm_start="first", warm_points=1, algorithm="tpe")
    study = asking(search).optuna
    assert study is not None
    values = sorted(told.values[0] for told in study.study.trials)
    records = load_search_record(search.storage, "first").trials
    ranked = sorted((trials.score(record), -record["number"]) for record in records)
    assert values == [score for score, _ in ranked[:-1]], "the best one is a point to try"
    longer = prepared(
        folder, "set.train.epochs=3", name="longer", warm_start="first", algorithm="tpe"
    )
    assert longer.warm_start is not None
    assert len(longer.warm_start.points) == 4
    assert longer.warm_start.observations == (), "the earlier trials have fewer epochs"
    assert asking(longer).optuna.study.trials == []  # type: ignore[union-attr]


def test_continued_search_keeps_its_warm_start(folder: Path) -> None:
    more = {"warm_start": "first", "warm_points": 2}
    search = prepared(folder, **more)
    spec.write_state(search)
    assert search.warm_start is not None
    shutil.rmtree(folder / "storage" / "searches" / "first")
    again = prepared(folder, budget={"trials": 9}, **more)
    assert again.warm_start == search.warm_start
    assert load_search_record(search.storage, "small").origins() == {
        number: f"first {point.trial}" for number, point in enumerate(search.warm_start.points)
    }
    for other in ({}, {"warm_start": "first", "warm_points": 3}):
        with pytest.raises(UserError, match="cannot be continued"):
            prepared(folder, **other)


@pytest.mark.parametrize("damage", [3, {}, {"search": "x", "points": [{"trial": 1}]}, None])
def test_damaged_warm_start_record_is_ignored(damage: Any) -> None:
    assert WarmStart.of_record(damage) is None
    search = trials.SearchRecord("x", {"warm_start": damage}, [], None, [])
    assert set(search.origins()) <= {0}
