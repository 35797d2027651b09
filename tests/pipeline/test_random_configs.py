"""Tests of random configs from the JSON schema: `plan` refuses them, or they run to the end.

Some errors can only be found when a stage runs; the stage then stops with a known message.
"""

from __future__ import annotations

import contextlib
import re
from random import Random
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError
from schema_draws import draw

from pipeline.app.schema import build_config_schema
from pipeline.config.settings import Config
from pipeline.testing.lab import TASKS, TINY, Lab
from workers.errors import UserError
from workers.job import DataSettings, TrainSettings
from workers.methods import METHODS

NUM_RUNS = 300
NUM_QUICK = 20  # number of these runs in `make test`
OF_EVERY_METHOD = ("method", "train", "data", "steps", "tasks")
SENTENCES = (  # errors of a stage that a plan cannot foresee
    r"the loss became .*, and training cannot continue; lower methods\..*train\.lr",
    "has one step per epoch, and masks are hardened .*; lower train.batch_size",
)
SCHEMA = build_config_schema()
DEFINITIONS = SCHEMA["definitions"]


def subset(schema: dict[str, Any], rng: Random, share: float) -> dict[str, Any]:
    """Return drawn values for a random subset of the properties of an object's schema."""
    return {
        name: draw(part, DEFINITIONS, rng)
        for name, part in schema["properties"].items()
        if rng.random() < share and name not in OF_EVERY_METHOD
    }


def random_body(rng: Random) -> dict[str, Any]:
    """Return random sections of a config with two toy tasks and one method."""
    method = rng.choice(sorted(METHODS))
    scenarios = sorted(METHODS[method].scenarios - {"domain"}) * 5 + ["task", "class"]
    settings = subset(DEFINITIONS[method], rng, 0.3)
    train = subset(DEFINITIONS["TrainSettings"], rng, 0.15)
    if rng.random() < 0.2:
        task = DEFINITIONS[method]["properties"]["tasks"]["additionalProperties"]
        settings["tasks"] = {rng.choice([*TASKS]): subset(task, rng, 0.3)}
    return {
        "method": method,
        "settings": settings,
        "train": {"epochs": 1, "batch_size": 32, "min_steps": 0, **train, "compile": False},
        "data": subset(DEFINITIONS["DataSettings"], rng, 0.15),
        "scenario": rng.choice(scenarios),
        "seed": rng.randint(0, 9),
        "backbone": TINY
        | ({} if rng.random() < 0.7 else {"context": {"kind": rng.choice(["cb", "cbs"])}}),
    }


@pytest.mark.few(7)
@pytest.mark.parametrize(
    "number",
    [n if n < NUM_QUICK else pytest.param(n, marks=pytest.mark.slow) for n in range(NUM_RUNS)],
)
def test_a_random_config_is_refused_or_runs_to_its_end(lab: Lab, number: int) -> None:
    body = random_body(Random(number))
    try:
        run = lab.run_of(**body)
    except UserError:
        return
    try:
        for task in range(2):
            run.trained(task)
            assert run.evaluated(task)
    except UserError as error:
        assert any(re.search(words, str(error)) for words in SENTENCES)  # noqa: PT017


def test_at_least_a_third_of_random_configs_are_accepted(lab: Lab) -> None:
    num_runs = 0
    for number in range(NUM_QUICK):
        with contextlib.suppress(UserError):
            num_runs += bool(lab.run_of(**random_body(Random(number))))
    assert num_runs >= NUM_QUICK / 3


SETTINGS: dict[str, type[BaseModel]] = {
    "DataSettings": DataSettings,
    "TrainSettings": TrainSettings,
    **{name: cls.Settings for name, cls in METHODS.items()},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_setting_values_allowed_by_schema_are_accepted(name: str) -> None:
    rng = Random(0)
    refused = {}
    for key, part in DEFINITIONS[name]["properties"].items():
        if key in OF_EVERY_METHOD:
            continue
        for extreme in (True, False) * 10:
            value = draw(part, DEFINITIONS, rng, extreme)
            if key == "crop_scale":  # a schema cannot require sorted values
                value = sorted(value)
            try:
                SETTINGS[name].model_validate({key: value})
            except ValidationError as error:
                refused[key] = (value, str(error).splitlines()[2])
    assert refused == {}


def test_config_schema_limits_every_number() -> None:
    def check(part: Any) -> None:
        if isinstance(part, list):
            for item in part:
                check(item)
        elif isinstance(part, dict):
            if part.get("type") in ("integer", "number"):
                assert {"maximum", "exclusiveMaximum"} & part.keys(), part
            for item in part.values():
                check(item)

    check(SCHEMA)
    assert SCHEMA["properties"]["seed"]["maximum"] == Config.largest_whole
