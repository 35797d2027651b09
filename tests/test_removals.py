"""`accrete remove`: what was removed leaves no trace, and the rest is as if it had never been."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline import cli
from pipeline.graph.store import Store
from tests import small_run
from tests.test_growing_data import Animals
from tests.traces import Trace, find_traces

METHODS = ("linear", "ewc")
TASKS = {"one": ["ant", "bee", "cow"], "two": ["cat", "dog", "eel"]}
CLASSES = [name for of_task in TASKS.values() for name in of_task]


class Zoo(Animals):
    """Class folders with a card and a config in files, and a run of two tasks."""

    def write(
        self, tasks: Mapping[str, Sequence[str]] = TASKS, storage: str = "storage", **changes: Any
    ) -> str:
        """Write the card and the config; return the path of the config."""
        experiment = self.load(tasks, CLASSES, storage, **changes)
        assert not isinstance(experiment.source, str)
        return small_run.write_config(self.folder / "zoo.yaml", experiment.source)

    def trace(self, *patterns: str) -> list[Trace]:
        """Return the traces of raw images."""
        return [Trace.of(path, self.raw) for pattern in patterns for path in self.raw.glob(pattern)]

    def card(self) -> Any:
        """Return the content of the card's file."""
        return yaml.safe_load((self.folder / "animals.yaml").read_text())

    def tasks(self) -> dict[str, Any]:
        """Return the classes of the tasks in the config."""
        config = yaml.safe_load((self.folder / "zoo.yaml").read_text())
        return {entry["name"]: entry["classes"] for entry in config["stream"]["tasks"]}

    def results(self, storage: str = "storage", like: str = "") -> dict[str, Any]:
        """Return the results of stages whose id holds a text."""
        found = small_run.results(self.folder / storage)
        return {stage: body for stage, body in found.items() if like in stage}


@pytest.fixture
def zoo(tmp_path: Path, quick: None) -> Zoo:
    made = Zoo(tmp_path, train=6)
    for name in CLASSES:
        made.draw(name)
    return made


def run(*argv: str, code: int = 0) -> None:
    assert cli.main([*map(str, argv)]) == code


def name_images(zoo: Zoo, kind: str) -> tuple[str, list[Trace]]:
    """Write a file that names two images, and return its path and their traces."""
    paths = [zoo.raw / "train" / "bee" / "0001.png", zoo.raw / "test" / "bee" / "0000.png"]
    lines = [path.relative_to(zoo.raw).as_posix() for path in paths]
    if kind == "digests":
        lines = [hashlib.sha256(path.read_bytes()).hexdigest() for path in paths]
    file = zoo.folder / "list.txt"
    file.write_text("\n".join(lines))
    return str(file), [Trace.of(path, zoo.raw) for path in paths]


# ---- no trace is left ----------------------------------------------------------------------------
@pytest.mark.parametrize("what", ["class", "task", "names", "digests"])
def test_nothing_is_left_and_the_rest_is_as_from_scratch(
    what: str, zoo: Zoo, capsys: pytest.CaptureFixture[str]
) -> None:
    config = zoo.write()
    run("run", config)
    before = zoo.results(like="linear/two/train")
    run("bundle", config, "--method", "linear", "--out", zoo.folder / "model")
    if what == "class":
        target, traces = ["--class", "bee"], zoo.trace("*/bee/*.png")
    elif what == "task":
        target, traces = ["--task", "one"], zoo.trace(*(f"*/{name}/*.png" for name in TASKS["one"]))
    else:
        file, traces = name_images(zoo, what)
        target = ["--images", file]
    folders = [zoo.folder / "storage", zoo.folder / "model"]
    assert find_traces(folders, traces)
    capsys.readouterr()
    run("remove", config, *target, "--model", zoo.folder / "model", "--yes")
    output = capsys.readouterr().out
    assert "deleted:\n" in output
    assert f"{zoo.raw}" in output.partition("left to you:")[2]
    assert find_traces(folders, traces) == []
    assert zoo.results(like="linear/two/train") == before
    assert (zoo.raw / "train" / "bee" / "0001.png").exists()
    served = json.loads((zoo.folder / "model" / "model.json").read_text())
    assert [task["name"] for task in served["tasks"]] == [*zoo.tasks()]
    assert len([*(zoo.folder / "model" / "versions").glob("*.json")]) == 1

    body = yaml.safe_load(Path(config).read_text()) | {"storage": str(zoo.folder / "fresh")}
    fresh = small_run.write_config(zoo.folder / "fresh.yaml", body)
    run("run", fresh)
    assert zoo.results() == zoo.results("fresh")
    capsys.readouterr()
    stages = {path.name for path in (zoo.folder / "storage" / "stages").iterdir()}
    if what == "task":
        run("remove", config, *target, "--yes", code=2)
        assert "there is nothing to remove" in capsys.readouterr().err
    else:
        run("remove", config, *target, "--yes")
        assert "there is nothing to remove" in capsys.readouterr().out
    assert {path.name for path in (zoo.folder / "storage" / "stages").iterdir()} == stages
    assert not Store(str(zoo.folder / "storage")).earlier_names()
