"""The parameters of a search: their axes, distributions in words, and importances."""

from __future__ import annotations

import json
import math
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.results.trials import SearchRecord, Trial, as_number

MIN_TRIALS = 4  # minimum number of finished trials to measure importance
MAX_TRIALS = 1000  # maximum number of trials to measure importance on, so that it takes seconds
CONDITIONS = ("when", "if")  # keys of a dimension that hold the condition under which it applies
# parameter that chooses one of several methods; settings of the other methods do not apply
METHOD = "method"
# keys of a dimension that are put into words or left out; other keys are shown as they are
KNOWN = {"dist", "values", "low", "high", "q", "step", "points", *CONDITIONS}


@dataclass(frozen=True)
class Parameter:
    """One dimension of the search space.

    Attributes:
        key: Dotted name of the setting.
        name: Short name of the setting (see `short_names`).
        dist: Name of the distribution, such as `loguniform`; "" if the space does not contain the
            setting.
        says: Description of the possible values, in words.
        categories: The categories in order; empty for a numeric parameter.
        log: Whether the axis of a numeric parameter is logarithmic.
        low: Lower end of the axis of a numeric parameter.
        high: Upper end of the axis of a numeric parameter.
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
        """Return the value of a trial as a number, or the index of the category.

        The result is NaN if the trial does not have the parameter.
        """
        if self.key not in trial["params"]:
            return math.nan
        value = trial["params"][self.key]
        if self.categories:
            return float(self.categories.index(format_setting(value)))
        return as_number(value)

    def axis_share(self, position: float) -> float:
        """Convert a position to a share of the axis, from 0 to 1."""
        if self.categories:
            return (position + 0.5) / len(self.categories)
        if self.log:
            return math.log(position / self.low) / math.log(self.high / self.low)
        return (position - self.low) / (self.high - self.low)

    def at_end(self, value: Any) -> bool:
        """Return whether a value is at an end of the axis, so that a wider range may help."""
        if not self.categories:
            return not 0.02 < self.axis_share(value) < 0.98
        try:
            order = sorted(self.categories, key=float)
        except ValueError:  # the categories are not numbers, so they have no end
            return False
        # each of two categories is an end, which says nothing
        return len(order) > 2 and format_setting(value) in (order[0], order[-1])


def format_setting(value: Any) -> str:
    """Return a value as text: `0.001235` for 0.00123456, `[3, 6]` for the list."""
    if isinstance(value, float):
        return f"{value:.4g}"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def search_parameters(search: SearchRecord) -> list[Parameter]:
    """Return all parameters, in the order of the space.

    Parameters used by trials but missing in the space come last.
    """
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
    """Return key -> short name, which is the key without the prefix `methods.LABEL.`.

    If there are keys of several methods, only `methods.` is removed. If two keys would have the
    same short name, both keep the full key.
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
    """Build a parameter.

    Args:
        key: Dotted name of the setting.
        names: Key -> short name of all parameters.
        dimension: Entry of the setting in the space; None if the space does not contain it.
        values: Values of the setting in the trials.
    """
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
    """Describe the values that a dimension allows, and the conditions under which it applies."""
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
    """Measure the importance of the varied parameters.

    The importance of a parameter is the variance of the accuracy that it explains alone (main
    effect of fANOVA, Hutter et al., ICML 2014). Optuna omits interactions, and divides by the sum,
    so that the importances add up to 1. At most the last MAX_TRIALS finished trials are used. In
    tests with known functions and 12 to 40 trials, fANOVA was the best of Optuna's measures.

    Returns:
        Key -> importance, largest first, and "". If it cannot be measured, {} and the reason.
    """
    standing = search.standing()
    finished = [trial for trial in search.trials if trial["status"] == "finished"]
    trials = [trial for trial in finished if trial["number"] in standing][-MAX_TRIALS:]
    scores = {trial["number"]: standing[trial["number"]] for trial in trials}
    if len(trials) < MIN_TRIALS:
        return {}, f"Importance of settings is measured once {MIN_TRIALS} trials have finished."
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
    """Compute key -> importance with Optuna.

    Args:
        parameters: The parameters.
        trials: The finished trials.
        scores: Trial number -> score.
    """
    import optuna
    from optuna.distributions import CategoricalDistribution, FloatDistribution
    from optuna.importance import FanovaImportanceEvaluator, get_param_importances

    distributions: dict[str, Any] = {}
    for parameter in parameters:
        if parameter.categories:
            # the last one is for trials without the parameter, see `_impute_position`
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
                params={
                    parameter.key: _impute_position(parameter, trial) for parameter in parameters
                },
                distributions=distributions,
                value=scores[trial["number"]],
            )
        )
    return get_param_importances(study, evaluator=FanovaImportanceEvaluator(seed=0))


def _impute_position(parameter: Parameter, trial: Trial) -> float:
    """Return the position of a trial on the axis, with a substitute if the parameter is missing.

    The substitute is the middle of the axis, or an additional category. This is usual for
    conditional spaces.
    """
    position = parameter.position(trial)
    if parameter.categories:
        return len(parameter.categories) if math.isnan(position) else int(position)
    if not math.isnan(position):
        return position
    if parameter.log:
        return math.sqrt(parameter.low * parameter.high)
    return (parameter.low + parameter.high) / 2
