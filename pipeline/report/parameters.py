"""What a search varied: each parameter with its axis and its distribution in words, and how much of
the accuracy each explains."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.results.trials import Search, Trial, as_number

FEWEST = 4  # finished trials, below which nothing is said about importance
CONDITIONS = ("when", "if")
# the key that chooses one of several methods; settings of the others do not apply
METHOD = "method"
KNOWN = {"dist", "values", "low", "high", "q", "step", "points", *CONDITIONS}


@dataclass(frozen=True)
class Parameter:
    """One dimension of the search space.

    key: the dotted setting. name: the key without what all have in common. dist: as in the space,
    "" where the space does not have it. says: what values it could take, in words. categories: in
    order, empty for numbers. low, high: ends of the axis of numbers.
    """

    key: str
    name: str
    dist: str
    says: str
    categories: tuple[str, ...]
    log: bool = False
    low: float = 0.0
    high: float = 1.0

    def place(self, trial: Trial) -> float:
        """Where the trial lies on the axis: the number itself, or the index of the category; NaN
        where it does not have the parameter."""
        if self.key not in trial["params"]:
            return math.nan
        value = trial["params"][self.key]
        return (
            float(self.categories.index(format_setting(value)))
            if self.categories
            else as_number(value)
        )

    def at_end(self, value: Any) -> bool:
        """Whether a number lies at an end of what was searched, so that a wider range may hold
        something better."""
        if self.categories:
            try:
                order = sorted(self.categories, key=float)
            except ValueError:  # not numbers: no end
                return False
            return len(order) > 2 and format_setting(value) in (order[0], order[-1])
        low, high, at = (math.log(v) if self.log else v for v in (self.low, self.high, value))
        return min(at - low, high - at) <= 0.02 * (high - low)


def format_setting(value: Any) -> str:
    """How a value is written: 0.00123456 -> `0.001235`, [3, 6] -> `[3, 6]`."""
    if isinstance(value, float):
        return f"{value:.4g}"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def search_parameters(search: Search) -> list[Parameter]:
    """All parameters, in the order of the space; then those that trials have and the space has
    not."""
    space = search.record["space"]
    keys = list(dict.fromkeys([*space, *(key for t in search.trials for key in t["params"])]))
    names = short_names(keys)
    return [
        _parameter(
            key,
            names,
            space.get(key),
            [t["params"][key] for t in search.trials if key in t["params"]],
        )
        for key in keys
    ]


def short_names(keys: Sequence[str]) -> dict[str, str]:
    """Keys without `methods.LABEL.`, or `methods.` where several methods are searched; the whole
    key where that is not clear."""
    labels = {
        key.split(".")[1] for key in keys if key.startswith("methods.") and key.count(".") > 1
    }
    start = f"methods.{next(iter(labels))}." if len(labels) == 1 else "methods."
    short = {key: key.removeprefix(start) for key in keys}
    return {
        key: name if list(short.values()).count(name) == 1 else key for key, name in short.items()
    }


def _parameter(key: str, names: Mapping[str, str], dimension: Any, met: Sequence[Any]) -> Parameter:
    if not isinstance(dimension, Mapping):
        dimension = (
            {}
            if dimension is None
            else {
                "dist": "choice",
                "values": dimension if isinstance(dimension, list) else [dimension],
            }
        )
    dist, says = str(dimension.get("dist", "")), describe_dimension(dimension, names)
    if METHOD in names and key.startswith("methods."):
        says += f"; only where {METHOD} is {key.split('.')[1]}"
    numbers = [v for v in map(as_number, met) if not math.isnan(v)]
    if "values" in dimension or len(numbers) < len(met):
        offered = dimension["values"] if isinstance(dimension.get("values"), list) else []
        return Parameter(
            key, names[key], dist, says, tuple(dict.fromkeys(map(format_setting, [*offered, *met])))
        )
    ends = [
        v
        for v in (as_number(dimension.get("low")), as_number(dimension.get("high")), *numbers)
        if not math.isnan(v)
    ]
    low, high = min(ends, default=0.0), max(ends, default=1.0)
    log = "log" in dist and low > 0
    if low == high:
        low, high = (low / 2, high * 2) if log else (low - 0.5, high + 0.5)
    return Parameter(key, names[key], dist, says, (), log, low, high)


def describe_dimension(dimension: Mapping[str, Any], names: Mapping[str, str]) -> str:
    """What values a dimension of the space allows, and where it applies."""
    dist, says = str(dimension.get("dist", "")), []
    if isinstance(dimension.get("values"), list):
        says.append("one of " + ", ".join(map(format_setting, dimension["values"])))
    elif "low" in dimension and "high" in dimension:
        whole, step = (
            "whole numbers " if "int" in dist else "",
            dimension.get("q", dimension.get("step")),
        )
        says.append(
            f"{whole}from {format_setting(dimension['low'])} to {format_setting(dimension['high'])}"
            + (f" in steps of {format_setting(step)}" if step is not None else "")
            + (", each order of magnitude equally likely" if "log" in dist else "")
        )
    for word in CONDITIONS:
        if isinstance(condition := dimension.get(word), Mapping):
            says += [
                f"only where {names.get(k, k)} is "
                f"{' or '.join(map(format_setting, v)) if isinstance(v, list) else format_setting(v)}"
                for k, v in condition.items()
            ]
        elif condition is not None:
            says.append(f"only where {format_setting(condition)}")
    return (
        "; ".join(
            says + [f"{k}: {format_setting(v)}" for k, v in dimension.items() if k not in KNOWN]
        )
        or "not in the space any more"
    )


def measure_importance(search: Search, varied: Sequence[Parameter]) -> tuple[dict[str, float], str]:
    """Share of the variance of accuracy among finished trials that each parameter explains by
    itself or with others, by key, largest first (fANOVA, Hutter et al., ICML 2014); or nothing, and
    the sentence why.

    Of Optuna's measures this one agreed best with known functions at 12 to 40 trials. A parameter
    that a trial does not have is set to the middle of its axis, or for categories to one more
    category, as is usual for conditional spaces.
    """
    standing = search.standing()
    trials = [t for t in search.trials if t["status"] == "finished" and t["number"] in standing]
    if len(trials) < FEWEST:
        return {}, f"Which setting matters most is not said before {FEWEST} trials have finished."
    moving = [
        p
        for p in varied
        if len(
            {p.place(t) for t in trials if p.key in t["params"]}
            | {None for t in trials if p.key not in t["params"]}
        )
        > 1
    ]
    if (
        not moving
        or max(standing[t["number"]] for t in trials) - min(standing[t["number"]] for t in trials)
        < 1e-6
    ):
        return (
            {},
            "Which setting matters most cannot be said: all finished trials have the same "
            "accuracy or the same settings.",
        )
    try:
        import optuna
        from optuna import distributions as d
        from optuna.importance import FanovaImportanceEvaluator, get_param_importances
    except ImportError:
        return (
            {},
            "Which setting matters most is not said, because optuna is not installed here; pip "
            "install optuna, and write the report again.",
        )
    axes: dict[str, Any] = {
        p.key: d.CategoricalDistribution(tuple(range(len(p.categories) + 1)))
        if p.categories
        else d.FloatDistribution(p.low, p.high, log=p.log)
        for p in moving
    }
    level = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            study = optuna.create_study(direction="maximize")
            study.add_trials(
                [
                    optuna.trial.create_trial(
                        params={p.key: _imputed(p, t) for p in moving},
                        distributions=axes,
                        value=standing[t["number"]],
                    )
                    for t in trials
                ]
            )
            found = get_param_importances(study, evaluator=FanovaImportanceEvaluator(seed=0))
    finally:
        optuna.logging.set_verbosity(level)
    return {
        key: float(share) for key, share in sorted(found.items(), key=lambda kv: (-kv[1], kv[0]))
    }, ""


def _imputed(p: Parameter, trial: Trial) -> float:
    place = p.place(trial)
    if p.categories:
        return len(p.categories) if math.isnan(place) else int(place)
    middle = math.sqrt(p.low * p.high) if p.log else (p.low + p.high) / 2
    return middle if math.isnan(place) else place
