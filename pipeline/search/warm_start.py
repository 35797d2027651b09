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
from pipeline.results.trials import Trial, as_number, score, size
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
    count: int,
    seed: int,
    evaluate_key: EvaluateKey,
    path: str,
) -> WarmStart:
    """Return what a search takes from an earlier one.

    count: how many of the best points are tried first. seed: draws settings that the earlier search
    does not know. path: of the search file. Raise `UserError` when none of its points is in
    `space`.
    """
    finished = [
        trial
        for trial in earlier.trials
        if trial["status"] == "finished"
        and not trial.get("history")
        and not math.isnan(score(trial))
    ]
    finished.sort(key=lambda trial: (-score(trial), trial["number"]))
    points: dict[str, EarlierPoint] = {}
    judged_alike: set[str] = set()
    for trial in finished:
        params = point_in(space, trial, earlier.record["config"], seed)
        if params is None or repr(params) in points:
            continue
        points[repr(params)] = EarlierPoint(trial["number"], params, score(trial), size(trial))
        if evaluate_key(params) == _last_key(trial):
            judged_alike.add(repr(params))
    if not points:
        raise UserError(
            f"{path}: warm_start names search {earlier.name!r}, and of its {len(finished)} "
            "finished trials with the same settings for all tasks none is a point of this space; "
            "widen the space, or leave warm_start out"
        )
    first = list(points)[:count]
    rest = [name for name in points if name not in first and name in judged_alike]
    return WarmStart(
        earlier.name,
        tuple(points[name] for name in first),
        tuple(points[name] for name in rest),
    )


def point_in(space: Space, trial: Trial, body: Mapping[str, Any], seed: int) -> Params | None:
    """Return the point of `space` with the settings of a trial; None when it is outside.

    body: the base config of the trial's search. A setting that neither the trial nor that base
    names is drawn.
    """
    known = configs.flatten(with_params(body, trial["params"])) | trial["params"]
    labels = list(with_params(body, trial["params"]).get("methods") or {})
    if len(labels) == 1:
        known["method"] = labels[0]
    drawn = space.draw_point(seed, trial["number"])
    params: Params = {}
    for key, dimension in space.dimensions.items():
        if not space.applies(key, params):
            continue
        value = MISSING
        if key in known:
            value = value_in(dimension, known[key])
            if value is MISSING:
                return None
        elif key in drawn:
            value = drawn[key]
        if value is MISSING:
            return None
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
