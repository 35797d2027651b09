"""Tests of the commands in config headers and docs: they parse, and their configs are valid."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from copy import deepcopy
from functools import cache
from pathlib import Path

import pytest
from torch import nn

from pipeline import cli
from pipeline.config import settings as config
from pipeline.config.settings import Config
from pipeline.graph.backbone import resolve_backbone
from pipeline.graph.store import Store
from pipeline.search import spec
from workers.job import BackboneSettings, Task
from workers.methods import METHODS
from workers.model import vit

REPOSITORY = Path(__file__).resolve().parent.parent
SOURCES = [
    *sorted((REPOSITORY / "configs").rglob("*.yaml")),
    *sorted((REPOSITORY / "configs").rglob("*.md")),
    *sorted((REPOSITORY / "docs").glob("*.md")),
    REPOSITORY / "README.md",
    REPOSITORY / "datasets" / "README.md",
]
COMMAND = re.compile(r"(?:python -m pipeline|(?:^|[`/])accrete) +([^`;\n]+)", re.MULTILINE)
PLACEHOLDER = re.compile(r"[$<>]|\.\.\.|\b(?:NAME|FILE|METHOD|TASK|CONFIG|SEED)\b|\{\w[\w-]*,")


def commands_of(path: Path) -> Iterator[list[str]]:
    """Yield the arguments of each command in a file that names a config of this repository."""
    text = path.read_text(encoding="utf-8").replace("\\\n", " ")
    for command in COMMAND.findall(text):
        if PLACEHOLDER.search(command):
            continue
        words = shlex.split(command, comments=True)
        if any(word.startswith("configs/") for word in words):
            yield words


COMMANDS = list(dict.fromkeys(shlex.join(words) for path in SOURCES for words in commands_of(path)))


@cache
def outline(settings: str) -> nn.Module:
    """Return a backbone without weights. settings: `BackboneSettings` as JSON."""
    return vit.outline(BackboneSettings.model_validate_json(settings))


def check_methods(run: Config, folder: Path) -> None:
    """Raise `UserError` if a method of a config does not support its backbone."""
    backbone = resolve_backbone(run, Store(str(folder)), may_connect=False).settings
    tasks = [Task(str(n), "", "", ("a", "b"), e.role) for n, e in enumerate(run.stream.tasks)]
    for method in run.methods.values():
        cls = METHODS[method.method]
        settings = cls.Settings.model_validate(method.settings)
        shapes = deepcopy(outline(backbone.model_dump_json()))
        cls.check_backbone(settings, shapes, tuple(tasks))


def test_printed_commands_are_found() -> None:
    assert len(COMMANDS) > 80
    assert any("resnet50" in command for command in COMMANDS)


@pytest.mark.few(6)
@pytest.mark.parametrize("command", COMMANDS)
def test_a_printed_command_is_accepted(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(REPOSITORY)
    monkeypatch.setenv("ACCRETE_DATA", "nowhere")
    monkeypatch.setenv("ACCRETE_IMAGES", "nowhere")
    words = shlex.split(command)
    arguments = cli.parser().parse_args(words)
    if words[0] not in ("run", "plan", "report", "search"):
        return
    paths = arguments.config
    path = paths if isinstance(paths, str) else paths[0]
    if words[0] == "search" or "/search/" in path:
        spec.load_search_file(path, arguments.overrides)
        return
    run = config.load(path, arguments.overrides)
    if run.backbone.weights not in ("none", "hub"):  # only shapes are needed
        run = config.load(path, [*arguments.overrides, "backbone.weights=none"])
    check_methods(run, tmp_path)
