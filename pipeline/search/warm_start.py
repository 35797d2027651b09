"""Start a search with results of an earlier search in the same storage.

The best points of the earlier search are tried first. If the configs of their trials are unchanged,
their stages are in the store and are reused. Optuna also learns from the other trials of the
earlier search, but only if the stage of their last evaluation has the same key in the new search.
An equal key proves that a trial of the new search would give the same result.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from pipeline.config import settings as configs
from pipeline.results import trials
from pipeline.results.trials import Trial, as_number, compute_trial_forgetting, score, size
from pipeline.search.space import Choice, Dimension, Int, Params, Space, with_params
from workers.errors import UserError

MISSING = object()  # result of `convert_value` for a value that the dimension does not contain
EvaluateKey = Callable[[Params], str]  # point -> key of the evaluation after the last task


@dataclass(frozen=True)
class EarlierPoint:
    """A trial of an earlier search, as a point of the new space.

    Attributes:
        trial: Number of the trial in the earlier search.
        params: The point, converted to the space of the new search.
        accuracy: Validation accuracy of the trial, 0 to 1.
        bytes: Stored bytes per task of the trial.
    """

    trial: int
    params: Params
    accuracy: float
    bytes: float


@dataclass(frozen=True)
class WarmStartSettings:
    """Settings of a warm start.

    Attributes:
        count: Maximum number of points to try first.
        seed: Seed for drawing values of settings that the earlier search does not have.
        max_forgetting: Setting `max_forgetting` of the new search; None: no limit.
    """

    count: int
    seed: int
    max_forgetting: float | None = None


@dataclass(frozen=True)
class WarmStart:
    """Results that a new search takes from an earlier search. They are stored in search.json.

    Attributes:
        search: Name of the earlier search.
        points: Points to try first, in this order.
        observations: Points that are not tried again, but whose results are given to Optuna.
    """

    search: str
    points: tuple[EarlierPoint, ...]
    observations: tuple[EarlierPoint, ...] = ()

    @classmethod
    def of_record(cls, record: Any) -> WarmStart | None:
        """Parse the entry `warm_start` of search.json. Return None if it is missing or invalid."""
        try:
            points = tuple(EarlierPoint(**point) for point in record["points"])
            observations = tuple(EarlierPoint(**point) for point in record["observations"])
            return cls(record["search"], points, observations)
        except (KeyError, TypeError):
            return None

    def record(self) -> dict[str, Any]:
        """Return the entry `warm_start` of search.json."""
        body: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return body


def choose_warm_start(
    earlier: trials.SearchRecord,
    space: Space,
    settings: WarmStartSettings,
    evaluate_key: EvaluateKey | None,
    path: str,
) -> WarmStart:
    """Select the results that a new search takes from an earlier search.

    Args:
        earlier: The earlier search.
        space: Space of the new search.
        settings: Settings of the warm start.
        evaluate_key: Computes the key of a point's last evaluation in the new search; None: select
            no observations.
        path: Path of the search file, for messages.

    Raises:
        UserError: If the earlier search has no suitable trial.
    """
    candidates = [trial for trial in earlier.trials if is_reusable_trial(trial, settings)]
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
        params = convert_point(space, trial, earlier.record["config"], settings.seed)
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


def is_reusable_trial(trial: Trial, settings: WarmStartSettings) -> bool:
    """Return whether a trial can be reused.

    The trial must have finished with a score and the same parameters for all tasks, and must never
    have exceeded `max_forgetting` of the new search.
    """
    if trial["status"] != "finished" or trial["phase"] or trial.get("history"):
        return False
    if math.isnan(score(trial)):
        return False
    if settings.max_forgetting is None:
        return True
    results = trial["results"]
    averages = [compute_trial_forgetting(results[: count + 1]) for count in range(len(results))]
    return not any(average > settings.max_forgetting for average in averages)


def convert_point(space: Space, trial: Trial, body: Mapping[str, Any], seed: int) -> Params | None:
    """Return the point of `space` with the settings of an earlier trial.

    The result is None if a setting of the trial is outside the space.

    Args:
        space: Space of the new search.
        trial: The earlier trial.
        body: Base config of the earlier search, as plain values.
        seed: Seed for drawing settings that neither the trial nor its base config contains.
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
            value = convert_value(dimension, known[key])
            if value is MISSING:
                return None
        else:
            value = space.draw(key, seed, trial["number"])
        params[key] = value
    return params


def convert_value(dimension: Dimension, value: Any) -> Any:
    """Return `value` in the type of the dimension, or MISSING if the dimension does not contain it.

    For example, 3.0 becomes 3 in an `int` dimension.
    """
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
    """Return the key of the evaluation that gave the last result of a trial.

    The result is None if the record has no graph, or the graph has no such evaluation.
    """
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
