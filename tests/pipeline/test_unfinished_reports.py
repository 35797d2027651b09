"""Tests of reports on partly failed runs, skipped images, and warnings of several seeds."""

from __future__ import annotations

import errno
import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline import cli
from pipeline.app import reports
from pipeline.graph.stage import Graph, Stage
from pipeline.graph.walk import Event, EventKind, Walk
from pipeline.report import html_parts
from pipeline.results.tables import merge_warnings
from pipeline.shell import console
from tests import small_run

pytestmark = pytest.mark.usefixtures("small_pictures")


def test_failed_method_leaves_a_report_of_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    body = small_run.make_body(tmp_path, small_run.make_cards(tmp_path, "ab"), ["linear"])
    body["methods"]["finetune"] = {"train": {"lr": 1e20}}
    path = small_run.write_config(tmp_path / "config.yaml", body)
    assert cli.main(["run", path]) == 2
    output = capsys.readouterr()
    page = tmp_path / "storage" / "runs" / "small" / "report.html"
    assert f"report of the finished stages: {page}" in output.out
    assert "the loss became" in output.err
    assert "lower methods.finetune.train.lr (now 1e+20) or set methods.finetune" in output.err

    def check_page() -> None:
        text = page.read_text()
        assert "1 stage failed" in text
        assert "the loss became" in text
        assert "finetune/a/train" in text
        assert (page.parent / "matrix-linear.png").exists()

    check_page()
    page.unlink()
    assert cli.main(["report", path]) == 0
    check_page()


def test_failed_report_does_not_hide_the_stage_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full_disk(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    body = small_run.make_body(tmp_path, small_run.make_cards(tmp_path, "a"), ["finetune"])
    body["methods"] = {"finetune": {"train": {"lr": 1e20}}}
    monkeypatch.setattr(reports, "export", full_disk)
    assert cli.main(["run", small_run.write_config(tmp_path / "config.yaml", body)]) == 2
    output = capsys.readouterr()
    assert "no report of the finished stages: OSError: " in output.out
    assert "the loss became" in output.err
    assert "Traceback" not in output.out + output.err


@pytest.mark.slow
def test_run_reports_skipped_images(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cards = small_run.make_cards(tmp_path, "ab")
    body = small_run.make_body(tmp_path, cards, ["linear"])
    path = small_run.write_config(tmp_path / "config.yaml", body)
    next(tmp_path.rglob("*.png")).write_bytes(b"no image")
    for card in cards.values():
        Path(card).write_text(Path(card).read_text() + "max_bad_fraction: 0.5\n")
    assert cli.main(["run", path]) == 0
    line = next(
        line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: data/")
    )
    assert "1 image of the source left out (1 corrupt); " in line
    assert Path(line.split("; ")[1].removesuffix(" lists them")).read_text().count("corrupt") == 1
    page = tmp_path / "storage" / "runs" / "small" / "report.html"
    assert "1 image of the source left out (1 corrupt)" in page.read_text()


def rows(**warnings: str) -> Any:
    """Return run tables with these warnings, by stage."""
    found = [{"stage": name, "stages": 1, "warning": text} for name, text in warnings.items()]
    return SimpleNamespace(warnings=lambda: found)


def test_warnings_name_the_seeds_that_have_them() -> None:
    replicas = {"seed-0": rows(a="few", b="5 of 9"), "seed-1": rows(a="few", b="4 of 9", c="new")}
    merged = merge_warnings(replicas)
    assert [(row["stage"], row["warning"]) for row in merged] == [
        ("a", "few"),
        ("b of seed-0", "5 of 9"),
        ("b of seed-1", "4 of 9"),
        ("c of seed-1", "new"),
    ]
    assert html_parts.render_macro("warnings", merged).count("<li>") == 4
    assert html_parts.render_macro("warnings", []).strip() == ""


def test_failed_stage_prints_warnings_of_its_parents() -> None:
    graph = Graph.of(
        "g",
        [
            Stage("m/a/train", "train", "k", {}),
            Stage("m/b/train", "train", "l", {}, ("m/a/train",)),
            Stage("n/a/train", "train", "n", {}),
        ],
    )
    stream = io.StringIO()
    screen = console.Console(graph, {}, stream)
    walk = Walk.over(graph, [], 0)
    walk.decide()
    for stage, text in (("m/a/train", "it diverged"), ("n/a/train", "few steps")):
        done = Event(EventKind.DONE, stage, body={"kind": "train", "sizes": {}, "warnings": [text]})
        walk.apply(done)
        screen.on_event(walk, done)
        assert f"{stage}: warning: {text}" in stream.getvalue()
    failed = Event(EventKind.FAILED, "m/b/train", "the loss became nan", final=True)
    decision = walk.apply(failed)
    assert decision is not None
    screen.on_decision(walk, decision)
    lines = stream.getvalue().splitlines()
    assert lines[-2].endswith("m/b/train: failed: the loss became nan")
    assert lines[-1].endswith("m/b/train: warning of m/a/train, which it needs: it diverged")
