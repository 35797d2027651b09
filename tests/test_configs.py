"""Every config that ships can be planned, and every method has one for each setting, with a search space beside it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline import config
from workers.methods import METHODS
from workers.methods.base import Method

CONFIGS = Path(__file__).parent.parent / "configs"
RUNNABLE = sorted(p for p in CONFIGS.rglob("*.yaml") if p.parent.name not in ("streams", "search"))
SPACES = sorted((CONFIGS / "search").glob("*.yaml"))
SETTINGS = ("demo", "real7", "paper")
HEADER = ("command", "machine", "time", "expected")


def own(name: str) -> type[Method]:
    return METHODS[name]


@pytest.mark.parametrize("path", RUNNABLE, ids=lambda p: str(p.relative_to(CONFIGS)))
def test_a_config_is_valid_and_says_how_to_run_it(path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ACCRETE_DATA", "nowhere")
    found = config.load(str(path))
    assert found.name == path.stem
    header = [line.split(maxsplit=2)[1] for line in path.read_text().splitlines() if line.startswith("# ") and len(line.split()) > 2]
    assert set(HEADER) <= set(header), f"{path.name} says not {set(HEADER) - set(header)}"
    assert f"configs/{path.relative_to(CONFIGS)}" in path.read_text(), "the command names the file"


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("method", METHODS)
def test_every_method_has_a_config_for_each_setting(method: str, setting: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ACCRETE_DATA", "nowhere")
    found = config.load(str(CONFIGS / "methods" / f"{method}-{setting}.yaml"))
    assert method in {entry.method for entry in found.methods.values()}


@pytest.mark.parametrize("method", METHODS)
def test_every_method_has_a_search_space(method: str):
    assert any(f"  methods.{method}." in path.read_text() for path in SPACES if path.stem == method)


@pytest.mark.parametrize("path", SPACES, ids=lambda p: p.stem)
def test_every_value_of_a_search_space_is_accepted(path: Path, monkeypatch: pytest.MonkeyPatch):
    """By the base with one method, as a trial has it, and with that for which the dimension is there."""
    monkeypatch.setenv("ACCRETE_DATA", "nowhere")
    body = config.read_yaml(path, "a search space")
    space, base = body["space"], config.read_with_bases(path.parent / body["base"])
    labels = ends_of(space.pop("method")) if "method" in space else list(base["methods"])
    assert set(labels) <= base["methods"].keys()
    for key, dimension in space.items():
        label = key.split(".")[1] if key.startswith("methods.") else labels[0]
        assert label in labels, key
        for value in ends_of(dimension):
            trial = {**copy.deepcopy(base), "methods": {label: copy.deepcopy(base["methods"][label])}}
            needed = {other: wanted[0] if isinstance(wanted, list) else wanted for other, wanted in dimension.get("when", {}).items()}
            assert all(found in ends_of(space[other]) for other, found in needed.items()), key
            for other, found in {**body.get("set", {}), **needed, key: value}.items():
                config.apply_override(trial, f"{other}={yaml.safe_dump(found, default_flow_style=True)}")
            config.check(trial, f"{key} = {value}")


@pytest.mark.parametrize("path", SPACES, ids=lambda p: p.stem)
def test_a_search_says_how_it_goes_and_when_it_ends(path: Path):
    body = config.read_yaml(path, "a search space")
    assert body.keys() - {"base", "space"} <= {"name", "set", "protocol", "algorithm", "scheduler", "grace", "reduction", "objectives", "tolerance", "budget"}
    assert body["algorithm"] in ("random", "grid", "tpe")
    assert ("trials" in body["budget"]) == (body["algorithm"] != "grid"), "a grid has as many trials as points"
    assert "hours" in body["budget"]
    assert f"configs/search/{path.name}" in path.read_text(), "the command names the file"
    assert "# ranges    " in path.read_text()


@pytest.mark.parametrize("path", [p for p in SPACES if config.read_yaml(p, "a search space").get("protocol") == "per_task"], ids=lambda p: p.stem)
def test_what_is_searched_for_each_task_is_what_a_task_may_have_of_its_own(path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ACCRETE_DATA", "nowhere")
    body = config.read_yaml(path, "a search space")
    for key, dimension in body["space"].items():
        _, label, rest = key.split(".", 2)
        config.load(str(path.parent / body["base"]), [f"methods.{label}.tasks.any.{rest}={ends_of(dimension)[0]}"])


def ends_of(dimension: dict[str, Any]) -> list[Any]:
    """The values that bound a dimension: all choices, or both ends of a range."""
    keys = dimension.keys() - {"when"}
    if dimension["dist"] == "choice":
        assert keys == {"dist", "values"}
        return list(dimension["values"])
    assert dimension["dist"] in ("uniform", "loguniform", "int"), dimension
    assert keys == {"dist", "low", "high"}
    assert dimension["low"] < dimension["high"]
    return [dimension["low"], dimension["high"]]
