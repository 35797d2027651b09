"""The space of a search: dimensions of a config with their distributions, checked against the
config's schema before anything runs."""

from __future__ import annotations

import copy
import difflib
import itertools
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt, field_validator, model_validator

from pipeline import config as configs
from pipeline.yaml_files import put
from workers.errors import UserError
from workers.job import Frozen
from workers.rng import derive_seed

if TYPE_CHECKING:
    from optuna.trial import Trial

# the one key of a space that is no setting: which of the base's methods a trial has
METHOD = "method"
Params = dict[str, Any]  # dotted key -> value


class Conditional(Frozen):
    when: dict[str, Any] = Field(
        default_factory=dict,
        description="keys of the space with the value, or a list of values, for which this "
        "dimension is there",
    )


class Uniform(Conditional):
    dist: Literal["uniform"]
    low: float
    high: float
    points: PositiveInt = Field(3, description="of a grid")

    @model_validator(mode="after")
    def _ordered(self) -> Uniform:
        _check_order(self.low, self.high)
        return self

    def draw(self, rng: random.Random) -> Any:
        return rng.uniform(self.low, self.high)

    def suggest(self, trial: Trial, key: str) -> Any:
        return trial.suggest_float(key, self.low, self.high)

    def grid(self) -> list[Any]:
        return [
            min(self.low + (self.high - self.low) * i / max(self.points - 1, 1), self.high)
            for i in range(self.points)
        ]

    @property
    def size(self) -> int:
        return self.points

    def near(self, value: Any, rng: random.Random) -> Any:
        """For population-based training: a fifth more or less, inside the bounds."""
        return min(max(value * rng.choice((0.8, 1.2)), self.low), self.high)


class LogUniform(Uniform):
    dist: Literal["loguniform"]  # type: ignore[assignment]
    low: PositiveFloat

    def draw(self, rng: random.Random) -> Any:
        return min(
            max(math.exp(rng.uniform(math.log(self.low), math.log(self.high))), self.low), self.high
        )

    def suggest(self, trial: Trial, key: str) -> Any:
        return trial.suggest_float(key, self.low, self.high, log=True)

    def grid(self) -> list[Any]:
        return [
            min(self.low * (self.high / self.low) ** (i / max(self.points - 1, 1)), self.high)
            for i in range(self.points)
        ]


class Int(Conditional):
    """Whole numbers from low to high, both included."""

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

    def near(self, value: Any, rng: random.Random) -> Any:
        step = max(1, round(abs(value) / 5))  # a fifth, as for other ranges
        return min(max(value + rng.choice((-step, step)), self.low), self.high)


class Choice(Conditional):
    dist: Literal["choice"]
    values: tuple[Any, ...] = Field(min_length=1)

    @field_validator("values")
    @classmethod
    def _different(cls, values: tuple[Any, ...]) -> tuple[Any, ...]:
        twice = next((v for i, v in enumerate(values) if v in values[:i]), None)
        if twice is not None:
            raise ValueError(f"{twice!r} stands twice among them")
        return values

    def draw(self, rng: random.Random) -> Any:
        return self.values[rng.randrange(len(self.values))]

    def suggest(self, trial: Trial, key: str) -> Any:
        return self.values[
            trial.suggest_categorical(key, list(range(len(self.values))))
        ]  # values may be lists, Optuna's may not

    def grid(self) -> list[Any]:
        return list(self.values)

    @property
    def size(self) -> int:
        return len(self.values)

    def near(self, value: Any, rng: random.Random) -> Any:
        """A neighbour in the list."""
        place = self.values.index(value) + rng.choice((-1, 1))
        return self.values[min(max(place, 0), len(self.values) - 1)]


Dimension = Annotated[Uniform | LogUniform | Int | Choice, Field(discriminator="dist")]


def _check_order(low: float, high: float) -> None:
    if not low < high:
        raise ValueError(f"low {low} is not below high {high}")


class Space:
    """Dimensions by dotted key. A dimension `methods.LABEL...` is there only where a trial has that
    method, and one with `when` only where that holds; so a point has just the keys that mean
    something for it."""

    def __init__(self, dimensions: Mapping[str, Any]):
        for key, dimension in dimensions.items():
            unknown = next((other for other in dimension.when if other not in dimensions), None)
            if unknown is not None:
                near = difflib.get_close_matches(unknown, [k for k in dimensions if k != key], 1)
                raise UserError(
                    f"space.{key}.when names {unknown!r}, which is not a key of the space; "
                    + (f"did you mean {near[0]!r}?" if near else "add it")
                )
            for other, wanted in dimension.when.items():
                if not isinstance(dimensions[other], Choice):
                    raise UserError(
                        f"space.{key}.when asks for a value of {other!r}, which is no choice; "
                        "make that a choice, or take it out"
                    )
                strange = next(
                    (value for value in _listed(wanted) if value not in dimensions[other].values),
                    None,
                )
                if strange is not None:
                    raise UserError(
                        f"space.{key}.when waits for {other}={strange!r}, which is not among "
                        f"its values {list(dimensions[other].values)}; mend it"
                    )
        self.dimensions = dict(_sorted(dimensions))

    def applies(self, key: str, params: Mapping[str, Any]) -> bool:
        """Whether `key` is there, given those that come before it."""
        if (
            METHOD in params
            and key.startswith("methods.")
            and not key.startswith(f"methods.{params[METHOD]}.")
        ):
            return False
        return all(
            other in params and params[other] in _listed(wanted)
            for other, wanted in self.dimensions[key].when.items()
        )

    @property
    def size(self) -> int:
        """Points of the grid, before those that are the same are taken together."""
        return math.prod(dimension.size for dimension in self.dimensions.values())

    def drawn(self, seed: int, number: int) -> Params:
        """Point `number` of a random search: a function of these two alone."""
        params: Params = {}
        for key, dimension in self.dimensions.items():
            if self.applies(key, params):
                params[key] = dimension.draw(
                    random.Random(derive_seed(seed, "search", number, key))
                )
        return params

    def suggest(self, trial: Trial) -> Params:
        """A point as Optuna has it."""
        params: Params = {}
        for key, dimension in self.dimensions.items():
            if self.applies(key, params):
                params[key] = dimension.suggest(trial, key)
        return params

    def asked(self, params: Mapping[str, Any]) -> Params:
        """The same point in Optuna's own values."""
        return {
            key: self.dimensions[key].values.index(value)
            if isinstance(self.dimensions[key], Choice)
            else value
            for key, value in params.items()
        }

    def grid(self) -> list[Params]:
        """Every point of the grid once, the last dimension the fastest."""
        points: dict[str, Params] = {}
        for values in itertools.product(
            *(dimension.grid() for dimension in self.dimensions.values())
        ):
            params: Params = {}
            for key, value in zip(self.dimensions, values, strict=True):
                if self.applies(key, params):
                    params[key] = value
            points.setdefault(repr(params), params)
        return list(points.values())

    def near(self, params: Mapping[str, Any], rng: random.Random) -> Params:
        """A point beside this one, or in each dimension with a chance of a quarter anywhere."""
        found: Params = {}
        for key, dimension in self.dimensions.items():
            if self.applies(key, found):
                anew = key not in params or rng.random() < 0.25
                found[key] = dimension.draw(rng) if anew else dimension.near(params[key], rng)
        return found

    def corners(self) -> Iterator[Params]:
        """Points that together have both ends of every range and every value of every choice; the
        others stand at the first value for which it is there."""
        for label in self.dimensions[METHOD].grid() if METHOD in self.dimensions else [None]:
            seen: dict[str, Params] = {}
            for key in self.dimensions:
                for value in _ends(self.dimensions[key]):
                    forced = {
                        **self._reached(key),
                        key: value,
                        **({METHOD: label} if label is not None else {}),
                    }
                    point: Params = {}
                    for other, dimension in self.dimensions.items():
                        if self.applies(other, point):
                            point[other] = forced.get(other, _ends(dimension)[0])
                    seen.setdefault(repr(point), point)
            yield from seen.values()

    def _reached(self, key: str) -> Params:
        """Values of other dimensions for which `key` is there."""
        found: Params = {}
        for other, wanted in self.dimensions[key].when.items():
            found |= {**self._reached(other), other: _listed(wanted)[0]}
        return found


def _listed(wanted: Any) -> list[Any]:
    return list(wanted) if isinstance(wanted, (list, tuple)) else [wanted]


def _ends(dimension: Any) -> list[Any]:
    return (
        list(dimension.values) if isinstance(dimension, Choice) else [dimension.low, dimension.high]
    )


def _sorted(dimensions: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """The method first, and a dimension after those that its `when` names."""
    done: dict[str, Any] = {key: dimensions[key] for key in (METHOD,) if key in dimensions}
    while len(done) < len(dimensions):
        ready = [
            key
            for key in dimensions
            if key not in done and all(other in done for other in dimensions[key].when)
        ]
        if not ready:
            stuck = next(key for key in dimensions if key not in done)
            raise UserError(
                f"space.{stuck}.when: these dimensions wait for each other in a circle; take "
                "one `when` out"
            )
        done |= {key: dimensions[key] for key in ready}
    return list(done.items())


# ---- points and configs --------------------------------------------------------------------------
def with_params(body: Mapping[str, Any], params: Mapping[str, Any]) -> dict[str, Any]:
    """A config's plain values with those of a point in place."""
    found = copy.deepcopy(dict(body))
    if METHOD in params:
        found["methods"] = {params[METHOD]: (found.get("methods") or {}).get(params[METHOD])}
    for key, value in params.items():
        if key != METHOD:
            put(found, key, copy.deepcopy(value), f"space.{key}")
    return found


def check(space: Space, body: Mapping[str, Any], where: str) -> None:
    """Raises UserError where a key is no setting of the config, where an end of a range or a value
    is none that it takes, or where a trial would have several methods."""
    labels = [str(label) for label in body.get("methods") or {}]
    if METHOD in space.dimensions:
        dimension = space.dimensions[METHOD]
        if not isinstance(dimension, Choice):
            raise UserError(
                f"{where}: space.method must be a choice; write {{dist: choice, values: "
                f"[{', '.join(labels)}]}}"
            )
        unknown = next((label for label in dimension.values if label not in labels), None)
        if unknown is not None:
            raise UserError(
                f"{where}: space.method has {unknown!r}, which is not among the base's methods "
                f"{', '.join(labels)}; take it out or add the method"
            )
        labels = [label for label in labels if label in dimension.values]
    elif len(labels) != 1:
        raise UserError(
            f"{where}: the base has {len(labels)} methods, a trial one; add to the space "
            f"`method: {{dist: choice, values: [{', '.join(labels)}]}}`"
        )
    for key in space.dimensions:
        if key == METHOD:
            continue
        top, _, rest = key.partition(".")
        if top == "stream":
            raise UserError(
                f"{where}: space.{key} cannot be searched, as trials on different streams do "
                "not compare; take it out"
            )
        if top in ("name", "storage", "cluster", "tracking", "seed"):
            raise UserError(
                f"{where}: space.{key} cannot be searched, as it does not change what is "
                "learned (or only by chance); take it out"
            )
        if top == "methods" and (label := rest.partition(".")[0]) not in labels:
            near = difflib.get_close_matches(label, labels, 1)
            raise UserError(
                f"{where}: space.{key} is about method {label!r}, which no trial has; "
                + (f"did you mean {near[0]!r}?" if near else "take it out")
            )
    for params in space.corners():
        try:
            configs.check(with_params(body, params), "this point")
        except UserError as error:
            shown = ", ".join(f"{key}={value!r}" for key, value in params.items())
            raise UserError(
                f"{where}: the space has points that no run accepts: {shown}: {error}"
            ) from None


def searched_per_task(keys: Sequence[str], where: str) -> None:
    """Raises UserError where a key is not a setting of a method, as only these may differ from task
    to task."""
    bad = next((key for key in keys if not key.startswith("methods.")), None)
    if bad is not None:
        raise UserError(
            f"{where}: space.{bad} cannot differ from task to task; search it with another "
            "protocol, or give keys `methods.LABEL...` alone"
        )
