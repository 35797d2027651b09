"""Every config that ships can be planned, and every method has one for each setting, with a search space beside it."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline import config, searchfile
from pipeline.space import Space, check
from pipeline.trial import with_history
from workers.methods import METHODS
from workers.methods.base import Method

CONFIGS = Path(__file__).parent.parent / "configs"
RUNNABLE = sorted(p for p in CONFIGS.rglob("*.yaml") if p.parent.name not in ("streams", "search", "cluster"))
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
def test_a_search_has_points_that_a_run_accepts_an_end_and_says_how_to_run_it(path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ACCRETE_DATA", "nowhere")
    settings, body, _ = searchfile.load(str(path), [])
    space = Space(settings.space)
    check(space, body, path.name)
    if settings.protocol == "per_task":
        for params in space.corners():
            config.check(with_history(body, params, {"any": params}), path.name)
    assert settings.algorithm == "grid" or settings.budget.trials or settings.budget.hours
    assert f"configs/search/{path.name}" in path.read_text(), "the command names the file"
    assert "# ranges    " in path.read_text()
