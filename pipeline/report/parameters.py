"""The parameters of a search: their axis, their distribution in words, and their importance."""

from __future__ import annotations

import json
import math
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.results.trials import SearchRecord, Trial, as_number

FEWEST = 4  # finished trials for which importance is measured
MAX_TRIALS = 1000  # finished trials that importance is measured on: seconds, not minutes
CONDITIONS = ("when", "if")
# the key that chooses one of several methods; settings of the other methods do not apply
METHOD = "method"
KNOWN = {"dist", "values", "low", "high", "q", "step", "points", *CONDITIONS}


@dataclass(frozen=True)
class Parameter:
    """One dimension of the search space.

    key: the dotted setting. name: the key without the prefix that all keys share. dist: as in the
    space, "" when the space does not have it. says: the values it could take, in words. categories:
    in order, empty for numbers. low, high: ends of the axis of numbers.
    """

    key: str
    name: str
    dist: str
    says: str
    categories: tuple[str, ...]
    log: bool = False
    low: float = 0.0
    high: float = 1.0

    def position(self, trial: Trial) -> float:
        """Return the number, or the index of the category; NaN when the trial does not have it."""
        if self.key not in trial["params"]:
            return math.nan
        value = trial["params"][self.key]
        if self.categories:
            return float(self.categories.index(format_setting(value)))
        return as_number(value)

    def axis_share(self, position: float) -> float:
        """Return a position as a share of the axis, from 0 to 1."""
        if self.categories:
            return (position + 0.5) / len(self.categories)
        if self.log:
            return math.log(position / self.low) / math.log(self.high / self.low)
        return (position - self.low) / (self.high - self.low)

    def at_end(self, value: Any) -> bool:
        """Return whether a number lies at an end of the axis, so that a wider range may help."""
        if not self.categories:
            return not 0.02 < self.axis_share(value) < 0.98
        try:
            order = sorted(self.categories, key=float)
        except ValueError:  # not numbers: no end
            return False
        return len(order) > 2 and format_setting(value) in (order[0], order[-1])


def format_setting(value: Any) -> str:
    """0.00123456 -> `0.001235`, [3, 6] -> `[3, 6]`."""
    if isinstance(value, float):
        return f"{value:.4g}"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def search_parameters(search: SearchRecord) -> list[Parameter]:
    """Return all parameters: those of the space in its order, then those that only trials have."""
    space = search.record["space"]
    keys = dict.fromkeys(space)
    for trial in search.trials:
        keys |= dict.fromkeys(trial["params"])
    names = short_names(list(keys))
    parameters = []
    for key in keys:
        values = [trial["params"][key] for trial in search.trials if key in trial["params"]]
        parameters.append(_parameter(key, names, space.get(key), values))
    return parameters


def short_names(keys: Sequence[str]) -> dict[str, str]:
    """Return keys without `methods.LABEL.`, or without `methods.` for several methods.

    A name that two keys would share stays the whole key.
    """
    labels = set()
    for key in keys:
        if key.startswith("methods.") and key.count(".") > 1:
            labels.add(key.split(".")[1])
    prefix = f"methods.{labels.pop()}." if len(labels) == 1 else "methods."
    short = {key: key.removeprefix(prefix) for key in keys}
    counts = Counter(short.values())
    return {key: name if counts[name] == 1 else key for key, name in short.items()}


def _parameter(
    key: str, names: Mapping[str, str], dimension: Any, values: Sequence[Any]
) -> Parameter:
    """Return a parameter. dimension: its entry in the space. values: those of the trials."""
    if dimension is None:
        dimension = {}
    elif isinstance(dimension, list):
        dimension = {"dist": "choice", "values": dimension}
    elif not isinstance(dimension, Mapping):
        dimension = {"dist": "choice", "values": [dimension]}
    dist = str(dimension.get("dist", ""))
    says = describe_dimension(dimension, names)
    if METHOD in names and key.startswith("methods."):
        says += f"; only where {METHOD} is {key.split('.')[1]}"
    numbers = [value for value in map(as_number, values) if not math.isnan(value)]
    if "values" in dimension or len(numbers) < len(values):
        offered = dimension.get("values")
        if not isinstance(offered, list):
            offered = []
        categories = dict.fromkeys(map(format_setting, [*offered, *values]))
        return Parameter(key, names[key], dist, says, tuple(categories))
    ends = [as_number(dimension.get("low")), as_number(dimension.get("high"))]
    numbers += [end for end in ends if not math.isnan(end)]
    low = min(numbers, default=0.0)
    high = max(numbers, default=1.0)
    log = "log" in dist and low > 0
    if low == high:
        low, high = (low / 2, high * 2) if log else (low - 0.5, high + 0.5)
    return Parameter(key, names[key], dist, says, (), log, low, high)


def describe_dimension(dimension: Mapping[str, Any], names: Mapping[str, str]) -> str:
    """Return in words which values a dimension allows, and under which conditions it applies."""
    parts = []
    if isinstance(dimension.get("values"), list):
        parts.append("one of " + ", ".join(map(format_setting, dimension["values"])))
    elif "low" in dimension and "high" in dimension:
        parts.append(_describe_range(dimension))
    for word in CONDITIONS:
        condition = dimension.get(word)
        if isinstance(condition, Mapping):
            for key, value in condition.items():
                options = value if isinstance(value, list) else [value]
                text = " or ".join(map(format_setting, options))
                parts.append(f"only where {names.get(key, key)} is {text}")
        elif condition is not None:
            parts.append(f"only where {format_setting(condition)}")
    for key, value in dimension.items():
        if key not in KNOWN:
            parts.append(f"{key}: {format_setting(value)}")
    return "; ".join(parts) or "not in the space any more"


def _describe_range(dimension: Mapping[str, Any]) -> str:
    dist = str(dimension.get("dist", ""))
    text = f"from {format_setting(dimension['low'])} to {format_setting(dimension['high'])}"
    if "int" in dist:
        text = f"whole numbers {text}"
    step = dimension.get("q", dimension.get("step"))
    if step is not None:
        text += f" in steps of {format_setting(step)}"
    if "log" in dist:
        text += ", each order of magnitude equally likely"
    return text


def measure_importance(
    search: SearchRecord, varied: Sequence[Parameter]
) -> tuple[dict[str, float], str]:
    """Return the importance of parameters by key, largest first; or nothing and a reason.

    Importance is the share of the variance of accuracy between finished trials, at most the last
    MAX_TRIALS, that a parameter explains, alone or with others (fANOVA, Hutter et al., ICML 2014).
    Of Optuna's measures this one agreed best with known functions at 12 to 40 trials.
    """
    standing = search.standing()
    finished = [trial for trial in search.trials if trial["status"] == "finished"]
    trials = [trial for trial in finished if trial["number"] in standing][-MAX_TRIALS:]
    scores = {trial["number"]: standing[trial["number"]] for trial in trials}
    if len(trials) < FEWEST:
        return {}, f"Importance of settings is measured once {FEWEST} trials have finished."
    moving = [parameter for parameter in varied if _is_moving(parameter, trials)]
    if not moving or max(scores.values()) - min(scores.values()) < 1e-6:
        return {}, (
            "Importance of settings cannot be measured: all finished trials have the same accuracy "
            "or the same settings."
        )
    try:
        import optuna  # an extra
    except ImportError:
        return {}, (
            "Importance of settings is not measured, because optuna is not installed; "
            "pip install optuna, and write the report again."
        )
    level = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            shares = _fanova(moving, trials, scores)
    finally:
        optuna.logging.set_verbosity(level)
    keys = sorted(shares, key=lambda key: (-shares[key], key))
    return {key: float(shares[key]) for key in keys}, ""


def _is_moving(parameter: Parameter, trials: Sequence[Trial]) -> bool:
    """Return whether trials differ in a parameter, or only some trials have it."""
    positions: set[float | None] = set()
    for trial in trials:
        has_parameter = parameter.key in trial["params"]
        positions.add(parameter.position(trial) if has_parameter else None)
    return len(positions) > 1


def _fanova(
    parameters: Sequence[Parameter], trials: Sequence[Trial], scores: Mapping[int, float]
) -> dict[str, float]:
    """Return importances by key, from Optuna. scores: by trial number."""
    import optuna
    from optuna.distributions import CategoricalDistribution, FloatDistribution
    from optuna.importance import FanovaImportanceEvaluator, get_param_importances

    distributions: dict[str, Any] = {}
    for parameter in parameters:
        if parameter.categories:
            categories = tuple(range(len(parameter.categories) + 1))
            distributions[parameter.key] = CategoricalDistribution(categories)
        else:
            distributions[parameter.key] = FloatDistribution(
                parameter.low, parameter.high, log=parameter.log
            )
    study = optuna.create_study(direction="maximize")
    for trial in trials:
        study.add_trial(
            optuna.trial.create_trial(
                params={parameter.key: _imputed(parameter, trial) for parameter in parameters},
                distributions=distributions,
                value=scores[trial["number"]],
            )
        )
    return get_param_importances(study, evaluator=FanovaImportanceEvaluator(seed=0))


def _imputed(parameter: Parameter, trial: Trial) -> float:
    """Return the position of a trial.

    A trial without the parameter is in the middle of the axis, or in one more category, as is usual
    for conditional spaces.
    """
    position = parameter.position(trial)
    if parameter.categories:
        return len(parameter.categories) if math.isnan(position) else int(position)
    if not math.isnan(position):
        return position
    if parameter.log:
        return math.sqrt(parameter.low * parameter.high)
    return (parameter.low + parameter.high) / 2
