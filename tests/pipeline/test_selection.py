"""Tests of `run --only`, `--from`, `--until` and `--force`: the selected stages, and their keys."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from pipeline import cli
from pipeline.graph.selection import EVERYTHING, StageSelection, force, select_stages_to_run
from pipeline.graph.stage import Graph, Stage
from pipeline.graph.store import Lookup
from pipeline.report import page
from tests import small_run
from workers.errors import UserError


def make_graph() -> Graph:
    """Return a graph with two tasks (ingest, train and evaluate stages) and a report."""
    return Graph.of(
        "r",
        [
            Stage("data/a", "ingest", "1", {}),
            Stage("data/b", "ingest", "2", {}),
            Stage("m/a/train", "train", "3", {}, ("data/a",)),
            Stage("m/a/evaluate", "evaluate", "4", {}, ("m/a/train", "data/a")),
            Stage("m/b/train", "train", "5", {}, ("m/a/train", "data/b")),
            Stage("m/b/evaluate", "evaluate", "6", {}, ("m/b/train", "data/a", "data/b")),
            Stage("report", "report", "7", {}, ("m/a/evaluate", "m/b/evaluate")),
        ],
    )


def todo(standing: str = "", **names: list[str]) -> set[str]:
    """Return the ids of the stages that a selection runs. standing: ids of stages with results,
    separated by spaces."""
    graph = make_graph()
    selection = StageSelection(**names)
    lookups = {stage.id: Lookup(stage.id in standing.split(), "", {}) for stage in graph}
    return select_stages_to_run(graph, force(graph, lookups, selection), selection)


def test_until_runs_stage_and_its_dependencies() -> None:
    assert todo(until=["m/a/train"]) == {"data/a", "m/a/train"}
    assert todo("m/a/train", until=["m/b/train"]) == {"data/b", "m/b/train"}
    assert todo(until=["ingest"]) == {"data/a", "data/b"}


def test_from_runs_stage_and_its_dependents() -> None:
    standing = "data/a data/b m/a/train"
    following = {"m/b/train", "m/b/evaluate"}
    assert todo(f"{standing} m/a/evaluate", start=["m/b/train"]) == {*following, "report"}
    assert todo(standing, start=["m/b"], until=["m/b/evaluate"]) == following


def test_only_runs_the_named_stages_alone() -> None:
    standing = "data/a data/b m/a/train m/b/train"
    assert todo(standing, only=["m/a/evaluate"]) == {"m/a/evaluate"}
    assert todo(standing, only=["evaluate"]) == {"m/a/evaluate", "m/b/evaluate"}
    assert todo(standing, only=["m/*/evaluate"]) == {"m/a/evaluate", "m/b/evaluate"}
    assert todo(standing, only=["m"]) == {"m/a/evaluate", "m/b/evaluate"}
    assert todo(standing, only=["data/a"]) == set()


def test_forced_stage_runs_despite_existing_result() -> None:
    everything = " ".join(make_graph().stages)
    assert todo(everything, force=["m/a/train"]) == {"m/a/train"}
    assert todo(everything, force=["data/a"]) == {"data/a"}
    assert todo(everything, only=["m/a"], force=["m/a/train"]) == {"m/a/train"}
    graph = make_graph()
    lookups = {stage.id: Lookup(True, "", {"a": 1}) for stage in graph}
    forced = force(graph, lookups, StageSelection(force=["report"]))
    assert forced["report"].must_withdraw
    assert forced["report"].manifest == {"a": 1}
    assert force(graph, lookups, EVERYTHING) == lookups


@pytest.mark.parametrize(
    ("names", "sentence"),
    [
        ({"only": ["m/b/train"]}, "stage m/b/train needs m/a/train, which has no result"),
        ({"start": ["m/b/train"]}, "--until m/b/train also runs its dependencies"),
        (
            {"until": ["m/a/trian"]},
            "'m/a/trian' is not a stage of run 'r'; did you mean 'm/a/train'",
        ),
        (
            {"start": ["xyz"]},
            r"--from 'xyz' is not a stage .* there are: data/a, .* a step \(ingest, train",
        ),
        ({"force": ["m/*/herd"]}, r"--force 'm/\*/herd' is not a stage"),
        (
            {"only": ["data/a"], "force": ["data/b"]},
            "--force names data/b, but --only, --from or --until leaves it out",
        ),
    ],
)
def test_impossible_selection_raises_user_error(names: Any, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        todo(**names)


# ---- the command ---------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a finished run."""
    folder = tmp_path_factory.mktemp("selection")
    body = small_run.make_body(folder, small_run.make_cards(folder, "ab"), ["linear"])
    config = small_run.write_config(folder / "config.yaml", body)
    small_run.run(["run", config], folder / "out.txt")
    return folder


@pytest.fixture(autouse=True)
def stub_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the report, because its pictures take longer than the rest of a run."""
    monkeypatch.setattr(page, "build_run_report", lambda *_: {"report.html": b"a page"})


def run(
    capsys: pytest.CaptureFixture[str], folder: Path, storage: Path, *options: str, code: int = 0
) -> str:
    """Run the config with options, and return the output."""
    capsys.readouterr()
    argv = ["run", str(folder / "config.yaml"), "--set", f"storage={storage}", *options]
    assert cli.main(argv) == code
    captured = capsys.readouterr()
    return captured.out + captured.err


def test_partial_run_is_completed_by_a_later_run(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    storage = tmp_path / "storage"
    text = run(capsys, finished, storage, "--until", "linear/a/train")
    assert set(small_run.manifests(storage)) == {"data/a", "backbone", "linear/a/train"}
    assert "3 stages run, 0 reused" in text
    assert "; 5 missing stages were not selected" in text
    assert (storage / "runs" / "small" / "report.html").exists()
    capsys.readouterr()
    assert cli.main(["status", "small", "--storage", str(storage)]) == 0
    assert "run small: stopped" in capsys.readouterr().out
    text = run(capsys, finished, storage, "--only", "linear/b/train", code=2)
    assert "stage linear/b/train needs data/b, which has no result" in text
    before = small_run.attempts(storage)
    text = run(capsys, finished, storage)
    assert "5 stages run, 3 reused" in text
    after = small_run.attempts(storage)
    assert {stage: after[stage] for stage in before} == before


def test_forced_stage_keeps_key_and_content_with_new_attempt(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    storage = tmp_path / "storage"
    shutil.copytree(finished / "storage", storage)
    before = small_run.manifests(storage)
    text = run(capsys, finished, storage, "--force", "linear/a/train")
    assert "linear/a/train: run again, with the same content as before" in text
    after = small_run.manifests(storage)
    changed = {stage for stage in before if before[stage]["attempt"] != after[stage]["attempt"]}
    assert changed == {"linear/a/train"}
    assert after["linear/a/train"]["key"] == before["linear/a/train"]["key"]
    assert "1 stages run, 7 reused" in text


def test_unknown_forced_stage_prints_one_line_error_and_runs_nothing(
    tmp_path: Path, finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = run(capsys, finished, tmp_path / "storage", "--force", "linear/a/trian", code=2)
    assert re.search(
        r"^accrete: --force 'linear/a/trian' is not a stage .*'linear/a/train'\?$", text
    )
    assert not (tmp_path / "storage" / "runs").exists()
