"""Tests of the search space: drawn points, conditional dimensions, and errors before a run."""

from __future__ import annotations

import math
import random
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import TypeAdapter

from pipeline.search.space import Dimension, Space, check_against_config, with_params
from pipeline.search.trial import with_history
from workers.errors import UserError

ADAPTER: TypeAdapter[Any] = TypeAdapter(Dimension)
BODY: dict[str, Any] = {
    "name": "x",
    "stream": {"tasks": [{"card": "digits"}]},
    "methods": {"meat": {"lambda": 0.9}, "hat": {}},
}


def space(**dimensions: dict[str, Any]) -> Space:
    """Return a space. A double underscore in an argument name stands for a dot in the key."""
    by_key = {}
    for name, dimension in dimensions.items():
        by_key[name.replace("__", ".")] = ADAPTER.validate_python(dimension)
    return Space(by_key)


WIDE: dict[str, dict[str, Any]] = {
    "methods__meat__lambda": {"dist": "uniform", "low": 0.5, "high": 1.0},
    "methods__meat__alpha": {"dist": "choice", "values": [0.5, 1, 2]},
    "methods__meat__mask_lr": {"dist": "loguniform", "low": 1e-4, "high": 1e-1},
    "train__epochs": {"dist": "int", "low": 1, "high": 3},
}


def test_search_points_are_deterministic_and_in_bounds() -> None:
    wide = space(**WIDE)
    points = [wide.draw_point(7, n) for n in range(300)]
    assert points == [wide.draw_point(7, n) for n in range(300)]
    assert points[:20] != [wide.draw_point(8, n) for n in range(20)]
    assert all(
        0.5 <= p["methods.meat.lambda"] <= 1 and 1e-4 <= p["methods.meat.mask_lr"] <= 1e-1
        for p in points
    )
    assert {p["methods.meat.alpha"] for p in points} == {0.5, 1, 2}
    assert {p["train.epochs"] for p in points} == {1, 2, 3}
    logs = [math.log10(p["methods.meat.mask_lr"]) for p in points]
    assert sum(-4 <= v < -3 for v in logs) == pytest.approx(100, abs=30), (
        "each order of magnitude must be equally likely"
    )


@pytest.mark.parametrize(("low", "high"), [(1e-3, 10), (10, 1000)])
def test_rounding_of_logarithms_does_not_leave_the_bounds(low: float, high: float) -> None:
    """In floating point, exp(log(10)) is greater than 10."""
    dimension = ADAPTER.validate_python({"dist": "loguniform", "low": low, "high": high})
    for end in (0, 1):
        rng: Any = SimpleNamespace(uniform=lambda *ends, end=end: ends[end])
        assert low <= dimension.draw(rng) <= high


def test_dimensions_are_drawn_independently() -> None:
    two = space(
        a={"dist": "uniform", "low": 0, "high": 1}, b={"dist": "uniform", "low": 0, "high": 1}
    )
    assert all(abs(p["a"] - p["b"]) > 1e-6 for p in (two.draw_point(0, n) for n in range(20)))


def test_additional_dimension_does_not_change_other_draws() -> None:
    few = space(**{k: v for k, v in WIDE.items() if k != "methods__meat__alpha"})
    for n in range(10):
        assert few.draw_point(0, n).items() <= space(**WIDE).draw_point(0, n).items()


def test_a_grid_has_every_point_once() -> None:
    points = space(
        a={"dist": "choice", "values": [1, 2]},
        b={"dist": "int", "low": 0, "high": 2},
        c={"dist": "uniform", "low": 0, "high": 1, "points": 2},
        d={"dist": "loguniform", "low": 1, "high": 100},
    ).grid()
    assert len(points) == 2 * 3 * 2 * 3 == len({repr(p) for p in points})
    assert {p["c"] for p in points} == {0, 1}
    assert sorted({p["d"] for p in points}) == pytest.approx([1, 10, 100])


def test_points_contain_only_settings_of_their_method() -> None:
    both = space(
        method={"dist": "choice", "values": ["meat", "hat"]},
        methods__hat__c={"dist": "choice", "values": [1, 2]},
        methods__meat__alpha={"dist": "choice", "values": [1, 2, 4]},
    )
    assert {tuple(p) for p in both.grid()} == {
        ("method", "methods.hat.c"),
        ("method", "methods.meat.alpha"),
    }
    assert len(both.grid()) == 5
    for n in range(20):
        point = both.draw_point(0, n)
        assert all(
            key == "method" or key.startswith(f"methods.{point['method']}.") for key in point
        )
        assert list(with_params(BODY, point)["methods"]) == [point["method"]]


def test_when_makes_dimension_conditional_in_any_line_order() -> None:
    one = space(
        methods__hat__c={
            "dist": "uniform",
            "low": 0,
            "high": 1,
            "when": {"methods.hat.start": ["dense", "uniform"]},
        },
        methods__hat__start={"dist": "choice", "values": ["normal", "dense", "uniform"]},
    )
    points = [one.draw_point(0, n) for n in range(60)]
    assert {p["methods.hat.start"] for p in points if "methods.hat.c" not in p} == {"normal"}
    assert {p["methods.hat.start"] for p in points if "methods.hat.c" in p} == {"dense", "uniform"}


@pytest.mark.parametrize("algorithm", ["tpe"])
def test_optuna_suggests_enqueued_point_unchanged(algorithm: str) -> None:
    optuna = pytest.importorskip("optuna")
    one = space(
        **WIDE, methods__meat__token_mask_blocks={"dist": "choice", "values": ["all", [3, 6, 9]]}
    )
    study = optuna.create_study()
    for n in range(5):
        point = one.draw_point(3, n)
        study.enqueue_trial(one.to_optuna(point))
        assert one.suggest(study.ask()) == point


def test_perturbed_points_vary_within_bounds() -> None:
    wide, rng = space(**WIDE), random.Random(0)
    point = wide.draw_point(0, 0)
    seen = []
    for _ in range(200):
        point = wide.perturb(point, rng)
        seen.append(point)
        assert 0.5 <= point["methods.meat.lambda"] <= 1
        assert 1e-4 <= point["methods.meat.mask_lr"] <= 1e-1
        assert point["methods.meat.alpha"] in (0.5, 1, 2)
        assert point["train.epochs"] in (1, 2, 3)
    assert len({repr(p) for p in seen}) > 100


def test_trial_parameters_are_merged_into_config() -> None:
    body = with_params(
        {**BODY, "methods": {"meat": {"lambda": 0.9}}},
        {"methods.meat.lambda": 0.5, "train.epochs": 2},
    )
    assert body["methods"]["meat"]["lambda"] == 0.5
    assert body["train"] == {"epochs": 2}
    assert BODY["methods"]["meat"] == {"lambda": 0.9}, "the base config must not change"
    body_per_task = with_history(
        BODY,
        {"methods.meat.lambda": 0.7},
        {"a.v1": {"methods.meat.lambda": 0.5, "methods.meat.train.lr": 1}},
    )
    assert body_per_task["methods"]["meat"] == {
        "lambda": 0.9,
        "tasks": {"a.v1": {"lambda": 0.5, "train": {"lr": 1}}},
    }


CHOICE: dict[str, Any] = {"dist": "choice", "values": [1]}
MEAT: dict[str, dict[str, Any]] = {"method": {"dist": "choice", "values": ["meat"]}}
BAD: list[tuple[dict[str, dict[str, Any]], list[str]]] = [
    (
        {"methods__meat__lamda": {"dist": "uniform", "low": 0, "high": 1}, **MEAT},
        ["lamda", "did you mean 'lambda'"],
    ),
    (
        {"methods__meat__lambda": {"dist": "uniform", "low": 0.5, "high": 7}, **MEAT},
        ["methods.meat.lambda=7.0", "points"],
    ),
    ({"methods__meat__lambda": {"dist": "choice", "values": [0.5, "much"]}, **MEAT}, ["'much'"]),
    ({"train__epochs": CHOICE}, ["2 methods", "method: {dist: choice, values: [meat, hat]}"]),
    (
        {"train__epochs": CHOICE, "method": {"dist": "choice", "values": ["met"]}},
        ["'met'", "meat, hat"],
    ),
    ({"methods__hat__c": CHOICE, **MEAT}, ["'hat'", "no trial has"]),
    ({"cluster__workers": CHOICE, **MEAT}, ["cluster.workers", "cannot be searched"]),
    ({"method": {"dist": "uniform", "low": 0, "high": 1}}, ["space.method must be a choice"]),
    ({"stream__tasks__0__name": CHOICE, **MEAT}, ["stream.tasks.0.name", "cannot be compared"]),
    (
        {
            "methods__meat__ffn_masks": {"dist": "choice", "values": ["weight", "neuron"]},
            **MEAT,
            "methods__meat__nonsense": {
                "dist": "choice",
                "values": [1],
                "when": {"methods.meat.ffn_masks": "neuron"},
            },
        },
        ["nonsense"],
    ),
]


@pytest.mark.parametrize(("dimensions", "texts"), BAD)
def test_invalid_search_space_is_refused(
    dimensions: dict[str, dict[str, Any]], texts: list[str]
) -> None:
    with pytest.raises(UserError) as error:
        check_against_config(space(**dimensions), BODY, "s.yaml")
    assert "\n" not in str(error.value)
    for text in ["s.yaml", *texts]:
        assert text in str(error.value)


def test_invalid_or_circular_when_is_refused() -> None:
    with pytest.raises(UserError, match="did you mean 'abc'"):
        space(abc=CHOICE, b={**CHOICE, "when": {"abd": 1}})
    with pytest.raises(UserError, match="which is not among its values"):
        space(a=CHOICE, b={**CHOICE, "when": {"a": 7}})
    with pytest.raises(UserError, match="which is not a choice"):
        space(a={"dist": "uniform", "low": 0, "high": 1}, b={**CHOICE, "when": {"a": 0.5}})
    with pytest.raises(UserError, match="circle"):
        space(a={**CHOICE, "when": {"b": 1}}, b={**CHOICE, "when": {"a": 1}})


def test_integers_are_perturbed_in_proportion_to_their_range() -> None:
    wide, rng = space(a={"dist": "int", "low": 1, "high": 1000}), random.Random(0)
    values = {wide.perturb({"a": 500}, rng)["a"] for _ in range(100)}
    assert {400, 600} <= values
    assert not {499, 501} & values


def test_perturbed_points_respect_when_conditions() -> None:
    one = space(
        a={"dist": "choice", "values": [False, True]},
        b={"dist": "uniform", "low": 0, "high": 1, "when": {"a": True}},
    )
    rng = random.Random(0)
    for start in ({"a": False}, {"a": True, "b": 0.5}):
        points = [one.perturb(start, rng) for _ in range(40)]
        assert all(("b" in point) == point["a"] for point in points)
        assert {point["a"] for point in points} == {False, True}
