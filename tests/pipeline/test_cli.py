"""Tests of the command line: plan, run, ingest, report and gc, and their printed output."""

from __future__ import annotations

import copy
import errno
import io
import json
import re
import shutil
import threading
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from pipeline import cli
from pipeline.app import garbage, runs
from pipeline.app.garbage import delete_garbage, find_garbage
from pipeline.app.prepared import provenance
from pipeline.config import version
from pipeline.graph import raw_data, run, run_record, store
from pipeline.graph.stage import Graph, Stage
from pipeline.graph.store import Lookup
from pipeline.graph.walk import Event, EventKind, Walk
from pipeline.report import page
from pipeline.results.tables import RunTables
from pipeline.shell import console
from pipeline.tracking import ui
from tests import small_run
from workers.loop import WAITING
from workers.storage import artifact, lock
from workers.storage.lock import stage_lock

STAGES = 8  # 2 cards, the backbone, training and evaluation of 2 tasks, the report


@dataclass
class Run:
    folder: Path
    body: dict[str, Any]
    text: str

    def config(self, **changes: Any) -> str:
        return small_run.write_config(
            self.folder / "config.yaml", {**copy.deepcopy(self.body), **changes}
        )

    @property
    def storage(self) -> Path:
        return self.folder / "storage"


@pytest.fixture(autouse=True)
def pages(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replace reports by stubs, because pictures take longer than everything else.

    Return the names of the runs with a new report.
    """
    made: list[str] = []

    def build(storage: str, record: dict[str, Any], *_: Any) -> dict[str, bytes]:
        made.append(record["name"])
        return {"report.html": b"a page", "tables/matrix.csv": b"a table"}

    monkeypatch.setattr(page, "build_run_report", build)
    return made


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("cli")
    body = small_run.make_body(folder, small_run.make_cards(folder, "ab"), ["meat"])
    config = small_run.write_config(folder / "config.yaml", body)
    return Run(folder, body, small_run.run(["run", config], folder / "out.txt"))


@pytest.fixture
def run_copy(finished: Run, tmp_path: Path) -> Run:
    """Return a copy of the finished run that a test may change."""
    shutil.copytree(finished.storage, tmp_path / "storage")
    return Run(tmp_path, {**finished.body, "storage": str(tmp_path / "storage")}, finished.text)


def output(capsys: pytest.CaptureFixture[str], *argv: str, code: int = 0) -> str:
    capsys.readouterr()
    assert cli.main(list(argv)) == code
    return capsys.readouterr().out


# ---- plan ----------------------------------------------------------------------------------------
def table(text: str) -> dict[str, tuple[str, str]]:
    """Parse the output of plan. Return stage id -> (hit or miss, reason)."""
    rows = [re.match(r"(hit|miss) +(\S+) +[0-9a-f]{12} *(.*)$", line) for line in text.splitlines()]
    return {row[2]: (row[1], row[3]) for row in rows if row}


def test_plan_of_new_run_lists_all_stages_and_runs_none(
    finished: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(tmp_path, {**finished.body, "storage": str(tmp_path / "storage")}, "")
    text = output(capsys, "plan", run.config())
    assert set(table(text).values()) == {("miss", "new"), ("miss", "unknown until ingest")}
    assert f"{STAGES} stages: 0 up to date, {STAGES} to run" in text
    assert not (run.storage / "stages").exists()


def test_plan_of_a_finished_run_has_hits_only(
    run_copy: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    text = output(capsys, "plan", run_copy.config())
    assert set(table(text).values()) == {("hit", "")}
    assert f"{STAGES} stages: {STAGES} up to date, 0 to run" in text


def test_plan_shows_old_and_new_values_of_changed_settings(
    run_copy: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    before = small_run.attempts(run_copy.storage)
    rows = table(output(capsys, "plan", run_copy.config(), "--set", "methods.meat.lambda=0.8"))
    assert rows["data/a"][0] == rows["backbone"][0] == "hit"
    assert re.fullmatch(r"changed settings\.lambda: [\d.]+ -> 0\.8", rows["meat/a/train"][1])
    assert rows["report"] == ("miss", "changed name: 'small' -> 'small-methods.meat.lambda-0.8'")
    rows = table(output(capsys, "plan", run_copy.config(), "--set", "backbone.img_size=32"))
    assert rows["backbone"] == ("miss", "changed backbone.img_size: 16 -> 32")
    assert rows["meat/b/train"] == ("miss", "an earlier stage changed")
    assert small_run.attempts(run_copy.storage) == before


def test_plan_reports_a_stage_without_result_as_not_finished(
    run_copy: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(
        run_copy.storage / "stages" / small_run.manifests(run_copy.storage)["meat/b/train"]["key"]
    )
    rows = table(output(capsys, "plan", run_copy.config()))
    assert {i: row for i, row in rows.items() if row[0] == "miss"} == {
        "meat/b/train": ("miss", "not finished")
    }


@pytest.mark.parametrize("change", ["gone", "shorter"])
def test_plan_reports_missing_and_truncated_result_files_as_damaged(
    change: str, run_copy: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = small_run.manifests(run_copy.storage)["meat/b/train"]
    folder = run_copy.storage / "stages" / manifest["key"] / manifest["attempt"]
    path = folder / "task.safetensors"
    if change == "gone":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-1])
    kind, reason = table(output(capsys, "plan", run_copy.config()))["meat/b/train"]
    assert kind == "miss"
    assert reason.startswith("damaged: task.safetensors ")


def test_plan_reports_deleted_data_that_no_missing_stage_needs(
    run_copy: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(
        run_copy.storage / "stages" / small_run.manifests(run_copy.storage)["data/a"]["key"]
    )
    assert table(output(capsys, "plan", run_copy.config()))["data/a"] == (
        "hit",
        "the result was deleted, and no missing stage needs it",
    )


def test_plan_reports_the_missing_source_folder_of_a_card(
    finished: Any, run_copy: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    raw = finished.folder / "raw" / "a"
    raw.rename(f"{raw}-moved")
    try:
        assert table(output(capsys, "plan", run_copy.config()))["data/a"] == ("hit", raw_data.GONE)
    finally:
        Path(f"{raw}-moved").rename(raw)


def test_run_executes_exactly_the_stages_that_plan_lists(
    run_copy: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    override = ["--set", "methods.meat.train.lr=0.01"]
    rows = table(output(capsys, "plan", run_copy.config(), *override))
    before = small_run.attempts(run_copy.storage)
    output(capsys, "run", run_copy.config(), *override)
    after = small_run.attempts(run_copy.storage, "small-methods.meat.train.lr-0.01")
    assert {i for i in after if after[i] != before[i]} == {
        i for i, row in rows.items() if row[0] == "miss"
    }
    assert small_run.attempts(run_copy.storage) == before, (
        "the run without the override is unchanged"
    )


def test_plan_writes_the_graph_as_svg(
    run_copy: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = output(capsys, "plan", run_copy.config(), "--svg", str(tmp_path / "graph.svg"))
    assert f"picture: {tmp_path / 'graph.svg'}" in text
    titles = [
        t.text or ""
        for t in ElementTree.parse(tmp_path / "graph.svg").iter("{http://www.w3.org/2000/svg}title")
    ]
    assert {t.split()[0] for t in titles} == set(table(text))
    assert all(t.endswith(" hit") for t in titles)
    assert (
        cli.main(["plan", run_copy.config(), "--svg", str(tmp_path / "nowhere" / "graph.svg")]) == 2
    )
    assert "name a file in an existing folder" in capsys.readouterr().err


# ---- ingest, report ------------------------------------------------------------------------------
def test_ingest_command_stores_data_and_trains_nothing(
    finished: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(tmp_path, {**finished.body, "storage": str(tmp_path / "storage")}, "")
    text = output(capsys, "ingest", run.config())
    for name in "ab":
        assert (
            f"data/{name}: 20 test, 40 train; none rejected" in text
            or f"data/{name}: 40 train, 20 test; none rejected" in text
        )
    assert len(list((run.storage / "stages").iterdir())) == 2
    rows = table(output(capsys, "plan", run.config()))
    assert {i for i, row in rows.items() if row[0] == "hit"} == {"data/a", "data/b"}
    modified_before = {
        p: p.stat().st_mtime_ns for p in (run.storage / "stages").rglob("*") if p.is_file()
    }
    output(capsys, "ingest", run.config())
    assert modified_before == {
        p: p.stat().st_mtime_ns for p in (run.storage / "stages").rglob("*") if p.is_file()
    }


def test_report_rebuilds_a_deleted_page_from_the_store(
    run_copy: Any, pages: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(run_copy.storage / "runs" / "small")
    assert cli.main(["run", run_copy.config()]) == 0
    assert not pages, "the report stage is up to date, so its files are copied"
    page_path = run_copy.storage / "runs" / "small" / "report.html"
    assert page_path.read_bytes() == b"a page"
    page_path.unlink()
    text = output(capsys, "report", run_copy.config())
    assert pages == ["small"]
    assert f"report: {page_path}" in text
    assert page_path.exists()
    assert (page_path.parent / "tables" / "matrix.csv").exists()


def test_report_json_option_writes_results_as_one_file(
    run_copy: Any, pages: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from pipeline.results.results_file import read_results

    path = tmp_path / "small.json"
    assert f"results: {path}" in output(capsys, "report", run_copy.config(), "--json", str(path))
    (read,) = read_results(str(path))
    record = store.Store(str(run_copy.storage)).record("small")
    assert record is not None
    tables = RunTables.load(str(run_copy.storage), record)
    assert read.matrix("meat").final == tables.matrix("meat").final
    assert read.image_digests() == tables.image_digests() != {}


def test_report_of_an_unfinished_run_is_built_without_running_stages(
    run_copy: Any, pages: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    for stage_id in ("meat/b/evaluate", "report"):
        shutil.rmtree(
            run_copy.storage / "stages" / small_run.manifests(run_copy.storage)[stage_id]["key"]
        )
    output(capsys, "report", run_copy.config())
    assert pages == ["small"]
    assert "meat/b/evaluate" not in small_run.attempts(run_copy.storage)


# ---- gc ------------------------------------------------------------------------------------------
@pytest.fixture
def littered(run_copy: Run, capsys: pytest.CaptureFixture[str]) -> Run:
    """Return a run with a removed record, so that no run needs five of the results."""
    output(
        capsys,
        "run",
        run_copy.config(),
        "--set",
        "methods.meat.train.lr=0.01",
        "--set",
        "name=faster",
    )
    shutil.rmtree(run_copy.storage / "runs" / "small")
    return run_copy


def folders(run: Run) -> set[str]:
    return {p.name for p in (run.storage / "stages").iterdir()}


@pytest.mark.parametrize("answer", ["n", "", "nope", None])
def test_gc_deletes_nothing_without_confirmation(
    answer: str | None,
    littered: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def reply(question: str) -> str:
        if answer is None:
            raise EOFError
        return answer

    before = folders(littered)
    monkeypatch.setattr("builtins.input", reply)
    text = output(capsys, "gc", "--storage", str(littered.storage))
    assert re.search(r"5 results .* are needed by no run and no search", text)
    assert "nothing was deleted" in text
    assert folders(littered) == before


@pytest.mark.parametrize("way", ["y", "Yes ", "--yes"])
def test_gc_deletes_exactly_the_results_that_no_run_needs(
    way: str, littered: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("builtins.input", lambda question: way)
    faster_attempts = small_run.attempts(littered.storage, "faster")
    text = output(
        capsys, "gc", "--storage", str(littered.storage), *(["--yes"] if way == "--yes" else [])
    )
    assert "deleted" in text.splitlines()[-1]
    assert folders(littered) == {
        m["key"] for m in small_run.manifests(littered.storage, "faster").values()
    }
    assert small_run.attempts(littered.storage, "faster") == faster_attempts
    assert "nothing to do" in output(
        capsys,
        "run",
        littered.config(),
        "--set",
        "methods.meat.train.lr=0.01",
        "--set",
        "name=faster",
    )
    assert "nothing to delete" in output(capsys, "gc", "--storage", str(littered.storage))


@pytest.mark.parametrize(
    ("name", "reason"),
    [("nowhere", "does not exist"), ("run.json", "is not a folder"), ("", "an empty text")],
)
def test_gc_refuses_a_path_that_is_not_a_storage(
    name: str, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.json").write_text("{}")
    storage = name and str(tmp_path / name)
    assert cli.main(["gc", "--storage", storage]) == 2
    error = capsys.readouterr().err
    assert reason in error
    assert "give the folder that holds the runs" in error
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


@pytest.mark.parametrize("size", ["-1", "nan", "1e400", "inf", "many"])
def test_gc_refuses_an_invalid_size_to_keep(
    size: str, littered: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    before = folders(littered)
    command = ["gc", "--yes", "--storage", str(littered.storage), f"--keep-gb={size}"]
    assert cli.main(command) == 2
    error = capsys.readouterr().err
    assert f"'{size}' is not a number of gigabytes; give a finite number of at least 0" in error
    assert folders(littered) == before


def test_gc_refuses_a_read_only_storage(
    littered: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(path: str) -> int:
        raise OSError(errno.EROFS, "Read-only file system", path)

    before = folders(littered)
    monkeypatch.setattr(lock, "_try_lock", refuse)
    assert cli.main(["gc", "--yes", "--storage", str(littered.storage)]) == 2
    message = capsys.readouterr().err
    assert f"storage '{littered.storage}' is read-only here (Read-only file system)" in message
    assert "with write access to it" in message
    assert folders(littered) == before


def test_gc_leaves_a_stray_file_and_does_not_count_it(
    finished: Any, run_copy: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    stray = run_copy.storage / "stages" / "notes.txt"
    stray.write_text("mine")
    assert "nothing to delete" in output(capsys, "gc", "--yes", "--storage", str(run_copy.storage))
    assert stray.read_text() == "mine"


def test_gc_uses_the_singular_for_one_result(
    littered: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    record = json.loads((littered.storage / "runs" / "faster" / "run.json").read_text())
    lost = sorted(folders(littered) - {stage["key"] for stage in record["stages"]})
    for key in lost[1:]:
        shutil.rmtree(littered.storage / "stages" / key)
    text = output(capsys, "gc", "--dry-run", "--storage", str(littered.storage))
    assert text.startswith("1 result or remains of an interrupted one, ")
    assert " MB, is needed by no run and no search\n" in text


# ---- printed output ------------------------------------------------------------------------------
def test_a_run_prints_a_line_per_stage_and_a_summary(finished: Any) -> None:
    lines = finished.text.splitlines()
    stages = [line for line in lines if line.startswith("[") and ": warning: " not in line]
    assert len(stages) == STAGES
    assert [line.split("]")[0] for line in stages] == [
        f"[{i}/{STAGES}" for i in range(1, STAGES + 1)
    ]
    assert all(re.fullmatch(r"\[\d+/\d+\] \S+: .+ in [\d.]+ s", line) for line in stages)
    assert len(lines) < STAGES + 24
    assert "\r" not in finished.text
    assert "\x1b" not in finished.text
    assert "meat: accuracy in %, row = after task, column = on task" in finished.text
    assert re.search(r"8 stages run, 0 reused, [\d.]+ s", finished.text)
    assert f"report: {finished.storage / 'runs' / 'small' / 'report.html'}" in finished.text


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def watched(stream: io.StringIO) -> tuple[console.Console, Walk]:
    graph = Graph.of("g", [Stage("meat/a/train", "train", "k", {})])
    return console.Console(graph, {"meat/a/train": Lookup(False, "new")}, stream), Walk.over(
        graph, [], 2
    )


def epoch(number: int) -> Event:
    return Event(
        EventKind.PROGRESS,
        "meat/a/train",
        body={
            "epoch": number,
            "epochs": 100,
            "loss": 1.5,
            "accuracy": 0.25,
            "images_per_s": 10.0,
            "left_s": 3600.0,
        },
    )


def beats(screen: console.Console, now: list[float], seconds: int) -> None:
    """Let `seconds` seconds pass. now: the value that the patched `time.monotonic` returns."""
    for _ in range(seconds):
        now[0] += 1
        screen.heartbeat.beat()


def test_console_reports_waiting_for_and_results_of_another_process() -> None:
    stream = Terminal()
    screen, walk = watched(stream)
    screen.progress(Event(EventKind.PROGRESS, "meat/a/train", body=dict(WAITING)))
    assert "meat/a/train: waits for another process, which computes" in stream.getvalue()
    body = {"kind": "backbone", "parameters": 5, "wall_s": 61.0, "reused": True}
    for decision in walk.decide():
        walk.record(decision)
    screen.on_event(walk, Event(EventKind.DONE, "meat/a/train", body=body))
    text = "backbone of 5 parameters in 1 min 01 s, by another process"
    assert f"meat/a/train: {text}\n" in stream.getvalue()


def test_long_silent_commands_print_their_activity(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(console, "QUIET_S", 0.0)
    monkeypatch.setattr(console, "LOOK_S", 0.001)
    is_printed = threading.Event()
    lines: list[str] = []

    def say(text: str) -> None:
        lines.append(text)
        is_printed.set()

    with console.at_work(lambda: "comparing", say):
        assert is_printed.wait(60)
    assert re.fullmatch(r"comparing \(\d+\.\d s so far\)", lines[0])


def test_output_without_terminal_has_a_line_every_ten_seconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream, now = io.StringIO(), [1000.0]
    monkeypatch.setattr(console.Heartbeat, "_watch", lambda self, ended: None)
    ids = ["meat/a/train", "meat/b/train"]
    with monkeypatch.context() as patch:
        patch.setattr(time, "monotonic", lambda: now[0])
        graph = Graph.of("g", [Stage(name, "train", name, {}) for name in ids])
        screen = console.Console(graph, {}, stream)
        walk = Walk.over(graph, [], 2)
        with screen.activity(lambda: "starting"):
            beats(screen, now, 18)
            for decision in walk.decide():
                walk.record(decision)
                screen.on_decision(walk, decision)
            beats(screen, now, 9)
            screen.on_event(walk, epoch(30))
            screen.on_event(walk, replace(epoch(5), stage=ids[1]))
            beats(screen, now, 27)
            screen.say("a line")
            beats(screen, now, 8)
            done = Event(EventKind.DONE, ids[0], body={"kind": "report", "wall_s": 1.0})
            walk.apply(done)
            screen.on_event(walk, done)
            beats(screen, now, 9)
            with screen.activity(lambda: "recording in MLflow, 3 parts left"):
                walk.apply(replace(done, stage=ids[1]))
                screen.on_event(walk, replace(done, stage=ids[1]))
                beats(screen, now, 55)
    rest = "loss 1.5000, validation 0.250, 10 images/s, 1 h 00 min left"
    first = f"[0/2] meat/a/train: epoch 30/100, {rest}"
    second = f"meat/b/train: epoch 5/100, {rest}"
    lines = stream.getvalue().splitlines()
    assert lines[:9] == [
        "[0/2] starting (9.0 s so far)",
        "[0/2] starting (18.0 s so far)",
        "[0/2] stages that wait for a worker: 2",
        first,
        f"[0/2] {second}",
        first,
        "[0/2] a line",
        "[1/2] meat/a/train: done in 1.0 s",
        f"[1/2] {second}",
    ]
    assert lines[9] == "[2/2] meat/b/train: done in 1.0 s"
    assert lines[10] == "[2/2] recording in MLflow, 3 parts left (9.0 s so far)"
    assert len(lines) == 16


def test_terminal_line_shows_the_activity_while_no_stage_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream, now = Terminal(), [1000.0]
    monkeypatch.setattr(console.Heartbeat, "_watch", lambda self, ended: None)
    with monkeypatch.context() as patch:
        patch.setattr(time, "monotonic", lambda: now[0])
        screen, walk = watched(stream)
        with screen.activity(lambda: "starting"):
            beats(screen, now, 25)
            assert screen_text(stream) == ["[0/1] starting (18.0 s so far)"]
            screen.on_event(walk, epoch(3))
            beats(screen, now, 25)
    assert len(screen_text(stream)) == 1
    assert "epoch 3/100" in screen_text(stream)[0]


def test_heartbeat_thread_runs_only_during_activities(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "LOOK_S", 0.01)
    monkeypatch.setattr(console, "QUIET_S", 0.05)
    is_shown = threading.Event()
    beat = console.Heartbeat(lambda text, seconds: is_shown.set())
    threads = threading.active_count()
    with beat.activity(lambda: "outer"), beat.activity(lambda: "inner"):
        assert threading.active_count() == threads + 1
        assert is_shown.wait(60)
    assert threading.active_count() == threads


def test_progress_rewrites_one_line_on_a_terminal() -> None:
    stream = Terminal()
    screen, walk = watched(stream)
    for number in range(50):
        screen.on_event(walk, epoch(number))
    assert stream.getvalue().count("\n") == 0
    assert stream.getvalue().count("\r") == 50
    screen.on_event(
        walk,
        Event(
            EventKind.DONE,
            "meat/a/train",
            body={"kind": "train", "sizes": {"masks": 2000}, "wall_s": 61.0},
        ),
    )
    assert stream.getvalue().endswith("meat/a/train: trained, 2 kB for the task in 1 min 01 s\n")


def screen_text(stream: io.StringIO) -> list[str]:
    """Return the lines that a terminal shows for the text in `stream`."""
    lines = [""]
    for part in re.split(r"(\r|\n|\x1b\[2K|\x1b\[1A)", stream.getvalue()):
        match part:
            case "\n":
                lines.append("")
            case "\x1b[2K":
                lines[-1] = ""
            case "\x1b[1A":
                assert lines.pop() == ""
            case "\r":
                pass
            case _:
                assert "\x1b" not in part
                lines[-1] += part
    return lines


def test_each_running_stage_has_a_line_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    stream = Terminal()
    ids = [f"m/{number}/train" for number in range(3)]
    graph = Graph.of("g", [Stage(name, "train", name, {}) for name in ids])
    screen = console.Console(graph, {}, stream)
    walk = Walk.over(graph, [], 1)
    for decision in walk.decide():
        walk.record(decision)
        screen.on_decision(walk, decision)
    assert screen_text(stream) == [""]  # they wait for a worker
    for name in ids:
        screen.progress(Event(EventKind.STARTED, name, body={"where": "group 0"}))
    assert screen_text(stream) == [f"[0/3] {name} ..." for name in ids]
    body = {**epoch(7).body, "loss": 1.0}
    screen.progress(Event(EventKind.PROGRESS, ids[1], body=body))
    screen.say("a note")
    lines = screen_text(stream)
    assert lines[:2] == ["[0/3] a note", "[0/3] m/0/train ..."]
    assert lines[2].startswith("[0/3] m/1/train: epoch 7/100, loss 1.0000")
    assert max(map(len, lines)) == 59
    done = Event(EventKind.DONE, ids[1], body={"kind": "report", "wall_s": 1.0})
    walk.apply(done)
    screen.on_event(walk, done)
    assert screen_text(stream) == [
        "[0/3] a note",
        "[1/3] m/1/train: done in 1.0 s",
        "[1/3] m/0/train ...",
        "[1/3] m/2/train ...",
    ]
    for name in (ids[0], ids[2]):
        failed = Event(EventKind.FAILED, name, "it broke", final=True)
        decision_after = walk.apply(failed)
        screen.on_event(walk, failed)
        assert decision_after is not None
        screen.on_decision(walk, decision_after)
    assert screen_text(stream)[2:] == [
        "[2/3] m/0/train: failed: it broke",
        "[3/3] m/2/train: failed: it broke",
        "",
    ]


def test_terminal_counts_running_stages_beyond_the_line_limit() -> None:
    stream = Terminal()
    graph = Graph.of("g", [Stage(str(number), "train", str(number), {}) for number in range(40)])
    screen = console.Console(graph, {}, stream)
    for stage in graph:
        screen.progress(Event(EventKind.STARTED, stage.id))
    lines = screen_text(stream)
    assert len(lines) == console.MAX_LIVE_LINES
    assert lines[-1] == "[0/40] and 29 more stages run"


def test_retry_prints_its_reason_and_try_number() -> None:
    stream = io.StringIO()
    screen, walk = watched(stream)
    for decision in walk.decide():
        walk.record(decision)
    retry = walk.apply(Event(EventKind.LOST, "meat/a/train", "its workers died"))
    assert retry is not None
    screen.on_decision(walk, retry)
    assert (
        stream.getvalue()
        == "[0/1] meat/a/train: its workers died; tried again from its last checkpoint (try 2 "
        "of 3)\n"
    )


def test_run_record_lists_stages_tasks_and_config(finished: Any) -> None:
    record = json.loads((finished.storage / "runs" / "small" / "run.json").read_text())
    assert {s["id"] for s in record["stages"]} == set(small_run.attempts(finished.storage))
    assert [t["name"] for t in record["tasks"]] == ["a", "b"]
    assert record["config"]["methods"]["meat"]["method"] == "meat"


def answering(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """Patch `input` to call `act` and then answer yes."""

    def reply(question: str) -> str:
        act()
        return "y"

    monkeypatch.setattr("builtins.input", reply)


def test_gc_keeps_results_that_became_needed_during_its_prompt(
    littered: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = folders(littered)
    record = json.loads((littered.storage / "runs" / "faster" / "run.json").read_text())
    lost = before - {stage["key"] for stage in record["stages"]}
    assert len(lost) == 5
    needed = sorted(lost)[:2]
    stages = [{"id": key, "key": key, "step": "train"} for key in needed]

    def begin() -> None:
        record: Any = {"name": "begun", "stages": stages}
        store.Store(str(littered.storage)).save_record(record)

    answering(monkeypatch, begin)
    text = output(capsys, "gc", "--storage", str(littered.storage))
    assert "2 of them are needed by a run or a search now, or already deleted" in text
    assert folders(littered) == before - (lost - {*needed})


def test_gc_keeps_results_locked_by_another_process(
    littered: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = folders(littered)
    record = json.loads((littered.storage / "runs" / "faster" / "run.json").read_text())
    lost = sorted(before - {stage["key"] for stage in record["stages"]})
    root = str(littered.storage / "stages")
    with stage_lock(root, lost[0]):
        text = output(capsys, "gc", "--yes", "--storage", str(littered.storage))
    assert "1 of them is in use by another process" in text
    assert folders(littered) == before - {*lost[1:]}


def test_run_waits_for_gc_before_look_up(
    littered: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Otherwise it would find results that gc deletes a moment later."""
    order: list[str] = []
    run_store = store.Store(str(littered.storage))
    delete_dir = artifact.delete_dir
    begun = threading.Thread(target=lambda: cli.main(["run", littered.config()]))

    def delete(path: str) -> None:
        if not order:
            begun.start()
            time.sleep(1)  # the run reaches its record and must wait
        order.append("delete")
        delete_dir(path)

    def look_up(*arguments: Any) -> Any:
        order.append("look up")
        return run.look_up_all(*arguments)

    monkeypatch.setattr(garbage, "delete_dir", delete)
    monkeypatch.setattr(runs, "look_up_all", look_up)
    delete_garbage(run_store, [path for path, *_ in find_garbage(run_store)])
    assert order == ["delete"] * 5
    begun.join(900)
    assert order[5] == "look up"
    assert len(small_run.attempts(littered.storage)) == STAGES, (
        "the run computes all deleted results again"
    )


# ---- runs with changed settings ------------------------------------------------------------------
def test_seed_override_creates_a_separate_run(
    run_copy: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (run_copy.storage / "runs" / "small" / "run.json").read_text()
    text = output(capsys, "run", run_copy.config(), "--set", "seed=7")
    assert (
        "run small-seed-7: --set changes the settings of small, so this is a run of its own" in text
    )
    assert (run_copy.storage / "runs" / "small" / "run.json").read_text() == before
    record = json.loads((run_copy.storage / "runs" / "small-seed-7" / "run.json").read_text())
    assert (record["name"], record["config"]["seed"]) == ("small-seed-7", 7)
    assert (run_copy.storage / "runs" / "small-seed-7" / "report.html").exists()
    assert "nothing to delete" in output(capsys, "gc", "--yes", "--storage", str(run_copy.storage))
    assert "nothing to do" in output(capsys, "run", run_copy.config(), "--set", "seed=7")
    assert "nothing to do" in output(capsys, "run", run_copy.config())
    text = output(capsys, "compare", "small", "small-seed-7", "--storage", str(run_copy.storage))
    assert "small-seed-7" in text


def test_changed_config_keeps_earlier_results_until_gc_earlier(
    run_copy: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    before = folders(run_copy)
    methods = {"meat": {"train": {"lr": 0.01}}}
    output(capsys, "run", run_copy.config(methods=methods))
    text = output(capsys, "gc", "--yes", "--storage", str(run_copy.storage))
    assert (
        "results that runs needed before their config files or images were changed are kept "
        "(runs: small)" in text
    )
    assert len(before - folders(run_copy)) == 1, "only the old report, which is cheap to rebuild"
    text = output(capsys, "run", run_copy.config())
    assert re.search(r"\n1 stages run, 7 reused", text)
    output(capsys, "run", run_copy.config(methods=methods))
    text = output(capsys, "gc", "--yes", "--earlier", "--storage", str(run_copy.storage))
    assert folders(run_copy) == {m["key"] for m in small_run.manifests(run_copy.storage).values()}
    assert "nothing to delete" in output(
        capsys, "gc", "--earlier", "--storage", str(run_copy.storage)
    )


def test_added_method_leaves_no_earlier_run_record(
    run_copy: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    output(capsys, "run", run_copy.config(methods={"meat": {}, "linear": {}}))
    assert not (run_copy.storage / "runs" / "small" / "earlier").exists()


def test_gc_deletes_nothing_if_an_earlier_record_is_unreadable(
    run_copy: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    output(capsys, "run", run_copy.config(methods={"meat": {"train": {"lr": 0.01}}}))
    path = next((run_copy.storage / "runs" / "small" / "earlier").iterdir())
    path.write_text("{")
    before = folders(run_copy)
    assert cli.main(["gc", "--yes", "--storage", str(run_copy.storage)]) == 2
    assert (
        "what run 'small' needed before its config was changed is not known"
        in capsys.readouterr().err
    )
    assert folders(run_copy) == before


# ---- upgrades ------------------------------------------------------------------------------------
def test_plan_counts_valid_results_made_by_other_versions(
    run_copy: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "other versions" not in output(capsys, "plan", run_copy.config())
    now = provenance()
    newer = {**now, "packages": {**now["packages"], "torch": "99.0"}}
    monkeypatch.setattr(runs, "provenance", lambda: newer)
    text = output(capsys, "plan", run_copy.config())
    change = f"torch {now['packages']['torch']} -> 99.0"
    assert f"5 of {STAGES} valid results were made by other versions ({change})" in text
    assert "they stay valid" in text
    assert set(table(text).values()) == {("hit", "")}


def test_provenance_is_unchanged_if_source_files_change_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = provenance()
    monkeypatch.setattr(version, "git_commit", lambda: "files that changed later")
    assert provenance() == {**first, "created": provenance()["created"]}


def test_plan_reports_a_raised_key_version(
    run_copy: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run_record, "KEY_VERSION", 2)
    text = output(capsys, "plan", run_copy.config())
    assert "the last run of this name had key version 1, this code has 2" in text
    assert set(table(text).values()) == {
        ("miss", "key version 1 -> 2"),
        ("miss", "unknown until ingest"),
    }


def test_lost_connection_is_not_reported_as_file_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def lost(*_: Any) -> None:
        raise ConnectionError("Client is shutting down.")

    monkeypatch.setattr(ui, "serve_ui", lost)
    assert cli.main(["ui", "--storage", str(tmp_path)]) == 2
    assert capsys.readouterr().err == (
        "accrete: a connection was lost or refused (Client is shutting down.); finished stages "
        "are kept, run the same command again when the other side answers\n"
    )
