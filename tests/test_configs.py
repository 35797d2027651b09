"""Every config that ships can be planned, and every method has one for each setting, with a search space beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

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


@pytest.mark.parametrize("path", SPACES, ids=lambda p: p.stem)
def test_every_value_of_a_search_space_is_accepted(path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ACCRETE_DATA", "nowhere")
    body = config.read_yaml(path, "a search space")
    assert body.keys() == {"base", "space"}
    for key, choice in body["space"].items():
        for value in ends_of(choice):
            config.load(str(path.parent / body["base"]), [f"{key}={value}"])


def ends_of(choice: dict[str, Any]) -> list[Any]:
    """The values that bound a space: all choices, or both ends of a range."""
    if choice["dist"] == "choice":
        assert choice.keys() == {"dist", "values"}
        return list(choice["values"])
    assert choice["dist"] in ("uniform", "loguniform", "int"), choice
    assert choice.keys() == {"dist", "low", "high"}
    assert choice["low"] < choice["high"]
    return [choice["low"], choice["high"]]
