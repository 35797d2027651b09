"""The space of a search: settings of a config with distributions of their values.

A dimension is one setting (a dotted key of the config) with its distribution. A point has one value
for each dimension that applies. The base config with these values is the config of a trial. See
`Space`. A space is checked against the schema of the config before a search starts.
"""

from __future__ import annotations

import copy
import itertools
import math
import random
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt, field_validator, model_validator

from pipeline.config import settings as configs
from pipeline.config.yaml_files import put
from workers.errors import UserError, did_you_mean
from workers.job import Frozen
from workers.rng import derive_seed

if TYPE_CHECKING:
    from optuna.trial import Trial

# The only key of a space that is not a setting. Its value is the label of the trial's method, which
# is one of the methods in the base config.
METHOD = "method"
# Keys of the base config that do not change results, except by randomness (`seed`).
NOT_SEARCHABLE = ("name", "storage", "cluster", "tracking", "seed")
REDRAW_PROBABILITY = 0.25  # probability that `Space.perturb` draws a value again
Params = dict[str, Any]  # dotted key -> value


# ---- dimensions ----------------------------------------------------------------------------------
class BaseDimension(Frozen, ABC):
    """Base class of the dimensions of a space.

    A dimension applies only to points that match its conditions `when`. Without conditions it
    applies to all points.
    """

    when: dict[str, Any] = Field(
        default_factory=dict,
        description="keys of the space, each with the value "
        "or the list of values for which this dimension applies",
    )

    @abstractmethod
    def draw(self, rng: random.Random) -> Any:
        """Return a random value."""

    @abstractmethod
    def suggest(self, trial: Trial, key: str) -> Any:
        """Return the value that Optuna suggests for the trial, under the name `key`."""

    @abstractmethod
    def grid(self) -> list[Any]:
        """Return the values of this dimension in a grid search."""

    @property
    @abstractmethod
    def size(self) -> int:
        """Number of values in a grid search."""

    @abstractmethod
    def bounds(self) -> list[Any]:
        """Return the values to validate: both ends of a range, or all values of a choice."""

    @abstractmethod
    def perturb(self, value: Any, rng: random.Random) -> Any:
        """Return a value close to `value`, for population-based training."""


class Uniform(BaseDimension):
    """Real numbers from `low` to `high`, with uniform probability."""

    dist: Literal["uniform"]
    low: float
    high: float
    points: PositiveInt = Field(3, description="values of a grid")

    @model_validator(mode="after")
    def _ordered(self) -> Uniform:
        _check_order(self.low, self.high)
        return self

    def draw(self, rng: random.Random) -> Any:
        return rng.uniform(self.low, self.high)

    def suggest(self, trial: Trial, key: str) -> Any:
        return trial.suggest_float(key, self.low, self.high)

    def grid(self) -> list[Any]:
        gaps = max(self.points - 1, 1)
        values = [self.low + (self.high - self.low) * i / gaps for i in range(self.points)]
        # rounding can exceed `high`
        return [min(value, self.high) for value in values]

    @property
    def size(self) -> int:
        return self.points

    def bounds(self) -> list[Any]:
        return [self.low, self.high]

    def perturb(self, value: Any, rng: random.Random) -> Any:
        """Return a 20 % smaller or larger value, clipped to the range."""
        return min(max(value * rng.choice((0.8, 1.2)), self.low), self.high)


class LogUniform(Uniform):
    """Positive numbers from `low` to `high`, whose logarithm has uniform probability."""

    dist: Literal["loguniform"]  # type: ignore[assignment]
    low: PositiveFloat

    def draw(self, rng: random.Random) -> Any:
        value = math.exp(rng.uniform(math.log(self.low), math.log(self.high)))
        return min(max(value, self.low), self.high)

    def suggest(self, trial: Trial, key: str) -> Any:
        return trial.suggest_float(key, self.low, self.high, log=True)

    def grid(self) -> list[Any]:
        ratio = self.high / self.low
        gaps = max(self.points - 1, 1)
        values = [self.low * ratio ** (i / gaps) for i in range(self.points)]
        # rounding can exceed `high`
        return [min(value, self.high) for value in values]


class Int(BaseDimension):
    """Whole numbers from `low` to `high`, both included."""

    dist: Literal["int"]
    low: int
    high: int

    @model_validator(mode="after")
    def _ordered(self) -> Int:
        _check_order(self.low, self.high)
        return self

    def draw(self, rng: random.Random) -> Any:
        return rng.randint(self.low, self.high)

    def suggest(self, trial: Trial, key: str) -> Any:
        return trial.suggest_int(key, self.low, self.high)

    def grid(self) -> list[Any]:
        return list(range(self.low, self.high + 1))

    @property
    def size(self) -> int:
        return self.high - self.low + 1

    def bounds(self) -> list[Any]:
        return [self.low, self.high]

    def perturb(self, value: Any, rng: random.Random) -> Any:
        """Return a value smaller or larger by 20 %, at least by 1, clipped to the range."""
        step = max(1, round(abs(value) / 5))
        return min(max(value + rng.choice((-step, step)), self.low), self.high)


class Choice(BaseDimension):
    """One of the listed values, each with the same probability."""

    dist: Literal["choice"]
    values: tuple[Any, ...] = Field(min_length=1)

    @field_validator("values")
    @classmethod
    def _different(cls, values: tuple[Any, ...]) -> tuple[Any, ...]:
        for index, value in enumerate(values):
            if value in values[:index]:
                raise ValueError(f"{value!r} is listed twice")
        return values

    def draw(self, rng: random.Random) -> Any:
        return self.values[rng.randrange(len(self.values))]

    def suggest(self, trial: Trial, key: str) -> Any:
        # Optuna gets the indices of the values, because its categories cannot be lists.
        indices = list(range(len(self.values)))
        return self.values[trial.suggest_categorical(key, indices)]

    def grid(self) -> list[Any]:
        return list(self.values)

    @property
    def size(self) -> int:
        return len(self.values)

    def bounds(self) -> list[Any]:
        return list(self.values)

    def perturb(self, value: Any, rng: random.Random) -> Any:
        """Return a neighbour of the value in the list. At its ends, it can be the value itself."""
        index = self.values.index(value) + rng.choice((-1, 1))
        return self.values[min(max(index, 0), len(self.values) - 1)]


Dimension = Annotated[Uniform | LogUniform | Int | Choice, Field(discriminator="dist")]


def _check_order(low: float, high: float) -> None:
    if not low < high:
        raise ValueError(f"low {low} is not below high {high}")


# ---- the space -----------------------------------------------------------------------------------
class Space:
    """A search space: dimensions by dotted key.

    A dimension `methods.LABEL...` applies only to points with the method LABEL, and a dimension
    with `when` only to points that match its conditions. A point contains only the dimensions that
    apply, so each key has an effect.
    """

    def __init__(self, dimensions: Mapping[str, Dimension]):
        for key in dimensions:
            _check_when(dimensions, key)
        self.dimensions = _sort_dimensions(dimensions)

    def applies(self, key: str, params: Mapping[str, Any]) -> bool:
        """Return whether the dimension `key` applies to a point.

        Args:
            key: Key of the dimension.
            params: Values of the point in the dimensions before `key`.
        """
        is_of_a_method = METHOD in params and key.startswith("methods.")
        if is_of_a_method and not key.startswith(f"methods.{params[METHOD]}."):
            return False
        for other, condition in self.dimensions[key].when.items():
            if other not in params or params[other] not in _as_list(condition):
                return False
        return True

    @property
    def size(self) -> int:
        """Upper bound of the number of points of the grid. Equal points are counted separately."""
        return math.prod(dimension.size for dimension in self.dimensions.values())

    def draw_point(self, seed: int, number: int) -> Params:
        """Return point `number` of a random search. It depends only on the number and the seed."""
        params: Params = {}
        for key in self.dimensions:
            if self.applies(key, params):
                params[key] = self.draw(key, seed, number)
        return params

    def draw(self, key: str, seed: int, number: int) -> Any:
        """Return the value of point `number` of a random search in one dimension."""
        rng = random.Random(derive_seed(seed, "search", number, key))
        return self.dimensions[key].draw(rng)

    def suggest(self, trial: Trial) -> Params:
        """Return the point that Optuna suggests for a trial."""
        params: Params = {}
        for key, dimension in self.dimensions.items():
            if self.applies(key, params):
                params[key] = dimension.suggest(trial, key)
        return params

    def to_optuna(self, params: Mapping[str, Any]) -> Params:
        """Return a point as Optuna stores it: with the index of a choice instead of the value."""
        stored: Params = {}
        for key, value in params.items():
            dimension = self.dimensions[key]
            stored[key] = value
            if isinstance(dimension, Choice):
                stored[key] = dimension.values.index(value)
        return stored

    def grid(self) -> list[Params]:
        """Return every point of the grid once. The last dimension changes fastest."""
        points: dict[str, Params] = {}
        grids = [dimension.grid() for dimension in self.dimensions.values()]
        for values in itertools.product(*grids):
            params: Params = {}
            for key, value in zip(self.dimensions, values, strict=True):
                if self.applies(key, params):
                    params[key] = value
            points.setdefault(repr(params), params)
        return list(points.values())

    def perturb(self, params: Mapping[str, Any], rng: random.Random) -> Params:
        """Return a point close to `params`.

        Each value is drawn again with probability REDRAW_PROBABILITY, or if `params` does not have
        it. Otherwise, the dimension's `perturb` changes it.
        """
        point: Params = {}
        for key, dimension in self.dimensions.items():
            if not self.applies(key, point):
                continue
            if key not in params or rng.random() < REDRAW_PROBABILITY:
                point[key] = dimension.draw(rng)
            else:
                point[key] = dimension.perturb(params[key], rng)
        return point

    def corners(self) -> Iterator[Params]:
        """Yield points that cover both ends of every range and every value of every choice.

        Each point sets one dimension to one of its `bounds`. If this dimension has conditions
        (`when`), the dimensions that they name get matching values. All other dimensions have their
        first value. If the space has the dimension `method`, there are such points for each method.
        """
        labels: list[Any] = [None]
        if METHOD in self.dimensions:
            labels = self.dimensions[METHOD].grid()
        for label in labels:
            points: dict[str, Params] = {}
            for key, dimension in self.dimensions.items():
                for value in dimension.bounds():
                    fixed = {**self._find_condition(key), key: value}
                    if label is not None:
                        fixed[METHOD] = label
                    point = self._build_corner(fixed)
                    points.setdefault(repr(point), point)
            yield from points.values()

    def _build_corner(self, fixed: Params) -> Params:
        """Return a point with the `fixed` values. Other dimensions have their first value."""
        point: Params = {}
        for key, dimension in self.dimensions.items():
            if self.applies(key, point):
                point[key] = fixed.get(key, dimension.bounds()[0])
        return point

    def _find_condition(self, key: str) -> Params:
        """Return values of other dimensions for which the dimension `key` applies."""
        params: Params = {}
        for other, condition in self.dimensions[key].when.items():
            params |= self._find_condition(other)
            params[other] = _as_list(condition)[0]
        return params


def _as_list(condition: Any) -> list[Any]:
    """Return the value or values of a condition in `when` as a list."""
    return list(condition) if isinstance(condition, (list, tuple)) else [condition]


def _check_when(dimensions: Mapping[str, Dimension], key: str) -> None:
    """Raise `UserError` if a condition in `when` of a dimension cannot be met.

    A condition must name another dimension of the space, which must be a choice, and some of its
    values.
    """
    conditions = dimensions[key].when
    for other in conditions:
        if other not in dimensions:
            remedy = did_you_mean(other, [name for name in dimensions if name != key], "add it")
            raise UserError(
                f"space.{key}.when names {other!r}, which is not a key of the space; {remedy}"
            )
    for other, condition in conditions.items():
        dimension = dimensions[other]
        if not isinstance(dimension, Choice):
            raise UserError(
                f"space.{key}.when asks for a value of {other!r}, which is not a choice; "
                "make that a choice, or take it out"
            )
        for value in _as_list(condition):
            if value not in dimension.values:
                raise UserError(
                    f"space.{key}.when asks for {other}={value!r}, which is not among "
                    f"its values {list(dimension.values)}; use one of them"
                )


def _sort_dimensions(dimensions: Mapping[str, Dimension]) -> dict[str, Dimension]:
    """Sort dimensions: the method first, and each dimension after those that its `when` names."""
    ordered: dict[str, Dimension] = {}
    if METHOD in dimensions:
        ordered[METHOD] = dimensions[METHOD]
    while len(ordered) < len(dimensions):
        waiting = [key for key in dimensions if key not in ordered]
        ready = [key for key in waiting if ordered.keys() >= dimensions[key].when.keys()]
        if not ready:
            raise UserError(
                f"space.{waiting[0]}.when: these dimensions wait for each other in a circle; "
                "take one `when` out"
            )
        for key in ready:
            ordered[key] = dimensions[key]
    return ordered


# ---- points and configs --------------------------------------------------------------------------
def with_params(body: Mapping[str, Any], params: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of the plain values of a config, with the values of a point inserted.

    If the point has a method, the other methods are removed.
    """
    config_body = copy.deepcopy(dict(body))
    if METHOD in params:
        label = params[METHOD]
        methods = config_body.get("methods") or {}
        config_body["methods"] = {label: methods.get(label)}
    for key, value in params.items():
        if key != METHOD:
            put(config_body, key, copy.deepcopy(value), f"space.{key}")
    return config_body


def check_against_config(space: Space, body: Mapping[str, Any], path: str) -> None:
    """Check that the config accepts the keys of the space, the ends of ranges and all choices.

    Args:
        space: The space.
        body: Plain values of the base config.
        path: Path of the search file.

    Raises:
        UserError: If a key is not a setting of the config or must not be searched (`stream` and
            NOT_SEARCHABLE), if the config rejects a value, or if a trial would not have exactly one
            method.
    """
    labels = _find_searched_labels(space, body, path)
    for key in space.dimensions:
        if key != METHOD:
            _check_key(key, labels, path)
    for params in space.corners():
        try:
            configs.check(with_params(body, params), "this point")
        except UserError as error:
            point_text = ", ".join(f"{key}={value!r}" for key, value in params.items())
            raise UserError(
                f"{path}: the space has points that no run accepts: {point_text}: {error}"
            ) from None


def _find_searched_labels(space: Space, body: Mapping[str, Any], path: str) -> list[str]:
    """Return the labels of the methods that trials can have.

    Raises:
        UserError: If a trial would have no method, or several methods.
    """
    labels = [str(label) for label in body.get("methods") or {}]
    labels_text = ", ".join(labels)
    dimension = space.dimensions.get(METHOD)
    if dimension is None:
        if len(labels) != 1:
            raise UserError(
                f"{path}: the base has {len(labels)} methods, a trial one; "
                f"add to the space `method: {{dist: choice, values: [{labels_text}]}}`"
            )
        return labels
    if not isinstance(dimension, Choice):
        raise UserError(
            f"{path}: space.method must be a choice; "
            f"write {{dist: choice, values: [{labels_text}]}}"
        )
    for label in dimension.values:
        if label not in labels:
            raise UserError(
                f"{path}: space.method has {label!r}, which is not among the base's methods "
                f"{labels_text}; take it out or add the method"
            )
    return [label for label in labels if label in dimension.values]


def _check_key(key: str, labels: Sequence[str], path: str) -> None:
    """Raise `UserError` if a key cannot be searched, or belongs to a method not in `labels`."""
    top, _, rest = key.partition(".")
    if top == "stream":
        raise UserError(
            f"{path}: space.{key} cannot be searched, because trials on different streams cannot "
            "be compared; take it out"
        )
    if top in NOT_SEARCHABLE:
        raise UserError(
            f"{path}: space.{key} cannot be searched, "
            "because it does not change the trained model (or only by chance); remove it"
        )
    label = rest.partition(".")[0]
    if top == "methods" and label not in labels:
        remedy = did_you_mean(label, labels, "take it out")
        raise UserError(
            f"{path}: space.{key} is about method {label!r}, which no trial has; {remedy}"
        )


def check_per_task(keys: Iterable[str], path: str) -> None:
    """Raise `UserError` if a key is not a setting of a method.

    Only settings of methods can differ from task to task.
    """
    for key in keys:
        if not key.startswith("methods."):
            raise UserError(
                f"{path}: space.{key} cannot differ from task to task; "
                "search it with another protocol, or give only keys `methods.LABEL...`"
            )
