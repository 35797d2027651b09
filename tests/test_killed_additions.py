"""Tests of `add` killed at any moment and then run again: nothing is lost or damaged."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

import pipeline
from pipeline import cli
from pipeline.config.yaml_files import parse_yaml
from tests import small_run
from tests.growing_run import GrowingRun

KILLS = 20
CALLS = 100  # an `add` makes more durable system calls than this


class Addition:
    """A run with its model, and two new classes; `begin` restores the initial state."""

    def __init__(self, folder: Path):
        self.saved = folder / "saved"
        self.folder = folder / "work"
        self.run = GrowingRun(self.folder)
        self.argv = ["add", self.run.config, str(self.run.raw), "--model", str(self.model)]
        assert cli.main([*self.argv, "--method", "ewc"]) == 0
        for digit in "45":
            self.run.put(self.run.raw, digit)
        self.folder.rename(self.saved)
        self.begin()
        assert cli.main(self.argv) == 0
        self.expected = small_run.results(self.run.storage)

    @property
    def model(self) -> Path:
        return self.folder / "model"

    def begin(self) -> None:
        if self.folder.exists():
            shutil.rmtree(self.folder)
        shutil.copytree(self.saved, self.folder)

    def served(self) -> list[str]:
        model = pipeline.open_model(self.model)
        model.predict([next(self.run.raw.rglob("*.png"))], task="one")
        return model.tasks


@pytest.fixture(scope="module")
def addition(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from pipeline.report import page

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(page, "build_run_report", lambda *_: {"report.html": b"a page"})
        yield Addition(tmp_path_factory.mktemp("addition"))


@pytest.mark.slow
@pytest.mark.parametrize("kill", range(KILLS))
def test_killed_addition_resumes_with_equal_results(
    addition: Addition, kill: int, tmp_path: Path
) -> None:
    addition.begin()
    calls = 1 + kill * CALLS // KILLS
    process = small_run.start(addition.argv, tmp_path / "out", kill_before=calls)
    process.join(900)
    assert process.exitcode == -signal.SIGKILL, (tmp_path / "out").read_text()
    parse_yaml(addition.run.text, "config")
    assert addition.served()[:2] == ["one", "two"]
    small_run.run(addition.argv, tmp_path / "out")
    assert addition.served() == ["one", "two", "digits-2"]
    assert small_run.results(addition.run.storage) == addition.expected
    tasks = parse_yaml(addition.run.text, "config")["stream"]["tasks"]
    assert [task["name"] for task in tasks] == ["one", "two", "digits-2"]
    leftovers = [path for path in addition.folder.rglob("*") if path.suffix == ".part"]
    assert leftovers == []


def test_concurrent_additions_run_one_after_the_other(addition: Addition, tmp_path: Path) -> None:
    addition.begin()
    outs = [tmp_path / name for name in ("first", "second")]
    processes = [small_run.start(addition.argv, out) for out in outs]
    for process in processes:
        process.join(900)
    texts = [out.read_text() for out in outs]
    assert [process.exitcode for process in processes] == [0, 0], texts
    assert sum("another command changes run small" in text for text in texts) == 1
    assert sum("model: version 2 serves" in text for text in texts) == 1
    assert addition.served() == ["one", "two", "digits-2"]
    assert small_run.results(addition.run.storage) == addition.expected
