"""A search that begins with what an earlier search of the storage has learned.

The best points of the earlier search are tried first. Their stages stand in the store, so where
nothing else has changed they cost nothing. Optuna also learns from the other trials of the earlier
search, but only where the keys of the stages say that a trial here would give the same result.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from pipeline import config as configs
from pipeline.results import trials
from pipeline.results.trials import Trial, as_number, forgetting, score, size
from pipeline.search.space import Choice, Dimension, Int, Params, Space, with_params
from workers.errors import UserError

MISSING = object()
EvaluateKey = Callable[[Params], str]  # point -> key of the evaluation after its last task


@dataclass(frozen=True)
class EarlierPoint:
    """A point of this space, from a trial of an earlier search. trial: the number of that trial.

    accuracy, bytes: the result of that trial.
    """

    trial: int
    params: Params
    accuracy: float
    bytes: float


@dataclass(frozen=True)
class WarmStartSettings:
    """count: how many of the best points are tried first. seed: draws settings that the earlier
    search does not know. max_forgetting: of the search that begins; None: no such bound."""

    count: int
    seed: int
    max_forgetting: float | None = None


@dataclass(frozen=True)
class WarmStart:
    """What a search takes from an earlier one when it begins. It does not change afterwards.

    search: the name of the earlier one. points: are tried first, in this order. observations:
    results that Optuna is told, and that are not tried again.
    """

    search: str
    points: tuple[EarlierPoint, ...]
    observations: tuple[EarlierPoint, ...] = ()

    @classmethod
    def of_record(cls, record: Any) -> WarmStart | None:
        """Return what search.json holds under `warm_start`; None when that is damaged."""
        try:
            points = tuple(EarlierPoint(**point) for point in record["points"])
            observations = tuple(EarlierPoint(**point) for point in record["observations"])
            return cls(record["search"], points, observations)
        except (KeyError, TypeError):
            return None

    def record(self) -> dict[str, Any]:
        """Return what search.json holds under `warm_start`."""
        body: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return body


def warm_start_of(
    earlier: trials.Search,
    space: Space,
    settings: WarmStartSettings,
    evaluate_key: EvaluateKey | None,
    path: str,
) -> WarmStart:
    """Return what a search takes from an earlier one.

    evaluate_key: None where nothing is told the results of the earlier search. path: of the search
    file. Raise `UserError` when the earlier search has no trial to take from.
    """
    candidates = [trial for trial in earlier.trials if can_be_taken(trial, settings)]
    if not candidates:
        raise UserError(
            f"{path}: warm_start names search {earlier.name!r}, and none of its "
            f"{len(earlier.trials)} trials finished with one setting for all tasks and within "
            "max_forgetting; wait until one has, or leave warm_start out"
        )
    candidates.sort(key=lambda trial: (-score(trial), trial["number"]))
    points: dict[str, EarlierPoint] = {}
    observations: list[EarlierPoint] = []
    for trial in candidates:
        params = point_in(space, trial, earlier.record["config"], settings.seed)
        if params is None or repr(params) in points:
            continue
        point = EarlierPoint(trial["number"], params, score(trial), size(trial))
        is_first = len(points) < settings.count
        points[repr(params)] = point
        if is_first or evaluate_key is None:
            continue
        if evaluate_key(params) == _last_key(trial):
            observations.append(point)
    if not points:
        raise UserError(
            f"{path}: warm_start names search {earlier.name!r}, and none of its "
            f"{len(candidates)} finished trials is a point of this space; widen the space, or "
            "leave warm_start out"
        )
    first = tuple(points.values())[: settings.count]
    return WarmStart(earlier.name, first, tuple(observations))


def can_be_taken(trial: Trial, settings: WarmStartSettings) -> bool:
    """Return whether a trial has a result for all tasks, learned with one point, and never forgot
    more than this search allows."""
    if trial["status"] != "finished" or trial["phase"] or trial.get("history"):
        return False
    if math.isnan(score(trial)):
        return False
    if settings.max_forgetting is None:
        return True
    results = trial["results"]
    averages = [forgetting(results[: count + 1]) for count in range(len(results))]
    return not any(average > settings.max_forgetting for average in averages)


def point_in(space: Space, trial: Trial, body: Mapping[str, Any], seed: int) -> Params | None:
    """Return the point of `space` with the settings of a trial; None when it is outside.

    body: the base config of the trial's search. A setting that neither the trial nor that base
    names is drawn.
    """
    known = configs.flatten(with_params(body, trial["params"])) | trial["params"]
    labels = list(with_params(body, trial["params"]).get("methods") or {})
    if len(labels) == 1:
        known["method"] = labels[0]
    params: Params = {}
    for key, dimension in space.dimensions.items():
        if not space.applies(key, params):
            continue
        if key in known:
            value = value_in(dimension, known[key])
            if value is MISSING:
                return None
        else:
            value = space.draw(key, seed, trial["number"])
        params[key] = value
    return params


def value_in(dimension: Dimension, value: Any) -> Any:
    """Return a value as this dimension has it; `MISSING` when it is outside."""
    if isinstance(dimension, Choice):
        text = json.dumps(value, default=str)
        equal = [own for own in dimension.values if json.dumps(own, default=str) == text]
        return equal[0] if equal else MISSING
    number = as_number(value)
    if not dimension.low <= number <= dimension.high:
        return MISSING
    if isinstance(dimension, Int):
        return int(number) if number == int(number) else MISSING
    return number


def _last_key(trial: Trial) -> str | None:
    """Return the key of the evaluation that gave the last result of a trial."""
    graph = trial.get("graph")
    if graph is None:
        return None
    task = trial["results"][-1]["task"]
    keys = [
        stage["key"]
        for stage in graph["stages"]
        if stage["step"] == "evaluate" and stage["task"] == task
    ]
    return keys[0] if keys else None
