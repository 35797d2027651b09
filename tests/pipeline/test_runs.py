"""Tests of the commands `runs` and `status`, and of the journal, event log and estimate of the time
left behind them."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import shutil
import signal
import threading
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from pipeline import cli
from pipeline.app import runs as app
from pipeline.graph import event_log, live_status
from pipeline.graph.event_log import EventLog
from pipeline.graph.journal import Journal, TimeLeft, keep_journal
from pipeline.graph.live_status import LiveStatus, read_status, write_status
from pipeline.graph.stage import Graph, Stage
from pipeline.graph.store import Lookup, Store
from pipeline.graph.walk import Event, EventKind, Walk
from pipeline.launch.time_left import TimeLeftEstimator, estimate_time_left
from pipeline.report import run_text
from pipeline.results import runs
from tests import small_run
from workers import preemption
from workers.errors import UserError
from workers.storage.artifact import join, write_bytes
from workers.storage.lock import is_locked, stage_lock
from workers.storage.secrets import printable

RECORD = {"key_version": 1, "config": {}, "created": "2026-01-02T03:04:05+0000", "tasks": []}


def make_graph(name: str = "r") -> Graph:
    """Return a graph with ingest of one card, and training and evaluation of two tasks."""
    stages = [
        Stage("data/a", "ingest", "k-data", {}),
        Stage("m/a/train", "train", "k-a", {"train": {"epochs": 2}}, ("data/a",), "m", "a"),
        Stage("m/a/evaluate", "evaluate", "k-ea", {"seen": [1]}, ("m/a/train",), "m", "a"),
        Stage("m/b/train", "train", "k-b", {"train": {"epochs": 4}}, ("m/a/train",), "m", "b"),
        Stage("m/b/evaluate", "evaluate", "k-eb", {"seen": [1, 2]}, ("m/b/train",), "m", "b"),
    ]
    return Graph.of(name, stages)


def save_record(store: Store, graph: Graph) -> None:
    """Write the record of a run."""
    stages: list[dict[str, Any]] = []
    for stage in graph:
        parents = list(stage.parents)
        entry = {"id": stage.id, "key": stage.key, "step": stage.step, "parents": parents}
        stages.append({**entry, "label": stage.method, "task": stage.task, "inputs": {}})
    record: Any = {"name": graph.name, **RECORD, "stages": stages}
    store.save_record(record)


def put_result(store: Store, key: str) -> None:
    """Write a result for a key."""
    folder = Path(store.root) / key
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text("{}")


def misses(graph: Graph) -> dict[str, Lookup]:
    """Return a miss for each stage."""
    return {stage.id: Lookup(False, "new") for stage in graph}


def no_estimate(stages: Any) -> TimeLeft:
    """Return an unknown time."""
    return TimeLeft(None, 0)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Return the store of an empty storage."""
    (tmp_path / "storage").mkdir()
    return Store(str(tmp_path / "storage"))


def events_of(store: Store, name: str = "r") -> list[dict[str, Any]]:
    """Return the events of a run."""
    path = Path(store.storage) / "runs" / name / "events.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def step(a_journal: Journal, walk: Walk, *events: Event) -> None:
    """Launch ready stages, and pass events to the walk and the journal, as a run does."""
    for decision in walk.decide():
        walk.record(decision)
        a_journal.on_decision(walk, decision)
    for event in events:
        decision_after = walk.apply(event)
        a_journal.on_event(walk, event)
        if decision_after is not None:
            a_journal.on_decision(walk, decision_after)


# ---- the journal ---------------------------------------------------------------------------------
def test_status_follows_a_run_until_its_end(store: Store) -> None:
    graph = make_graph()
    save_record(store, graph)
    walk = Walk.over(graph, [], retries=1)
    with keep_journal(store, graph, misses(graph), {*graph.stages}, "go on", no_estimate) as notes:
        assert runs.run_status(store.storage, "r").state == "running"
        step(notes, walk, Event(EventKind.DONE, "data/a", body={"wall_s": 3.0}))
        notes.progress(Event(EventKind.STARTED, "m/a/train", body={"where": "group 0 on 10.0.0.7"}))
        step(notes, walk, Event(EventKind.LOST, "m/a/train", "its node was lost"))
        step(notes, walk)
        notes.progress(Event(EventKind.STARTED, "m/a/train", body={"where": "group 1 on 10.0.0.8"}))
        notes.progress(Event(EventKind.PROGRESS, "m/a/train", body={"left_s": 7.0}))
        notes.save()
        status = runs.run_status(store.storage, "r")
        by_id = {stage.id: stage for stage in status.stages}
        assert [stage.state for stage in status.stages] == ["done", "running"] + 3 * ["waiting"]
        assert by_id["data/a"].wall_s == 3.0
        assert by_id["m/a/train"].where == "group 1 on 10.0.0.8"
        assert by_id["m/a/train"].tries == 1
        assert by_id["m/a/train"].progress == {"left_s": 7.0}
        step(notes, walk, Event(EventKind.FAILED, "m/a/train", "out of memory", final=True))
        step(notes, walk)
    status = runs.run_status(store.storage, "r")
    assert status.state == "stopped"
    assert status.counts == {"missing": 1, "failed": 1, "blocked": 3}  # the store has no results
    assert status.driver is not None
    assert status.driver.command == "go on"
    kinds = [event["event"] for event in events_of(store)]
    assert kinds[0] == "run_started"
    assert kinds[-1] == "run_ended"
    assert {"done", "started", "lost", "progress", "failed", "decision_retry"} <= {*kinds}
    lost = next(event for event in events_of(store) if event["event"] == "lost")
    assert (lost["stage"], lost["message"]) == ("m/a/train", "its node was lost")
    assert not list(Path(store.storage).rglob("*.part"))


@pytest.mark.parametrize(
    ("error", "state"),
    [
        (KeyboardInterrupt(), "interrupted"),
        (preemption.Preempted(), "preempted"),
        (UserError("stage m/a/train failed"), "failed"),
    ],
)
def test_status_states_how_a_run_ended_early(
    error: BaseException, state: str, store: Store
) -> None:
    graph = make_graph()
    save_record(store, graph)
    with (
        pytest.raises(type(error)),
        keep_journal(store, graph, misses(graph), {*graph.stages}, "go on", no_estimate),
    ):
        raise error
    status = runs.run_status(store.storage, "r")
    assert status.state == state
    assert status.driver is not None
    assert status.driver.message == str(error)


def test_run_with_all_results_is_finished_despite_noted_failure(store: Store) -> None:
    graph = make_graph()
    save_record(store, graph)
    with (
        pytest.raises(UserError),
        keep_journal(store, graph, misses(graph), {*graph.stages}, "go on", no_estimate),
    ):
        raise UserError("broken")
    for stage in graph:
        put_result(store, stage.key)
    assert runs.run_status(store.storage, "r").state == "finished"
    assert runs.list_runs(store.storage)[0].state == "finished"


def test_secrets_are_removed_from_journal_files(store: Store) -> None:
    graph = make_graph()
    walk = Walk.over(graph, [], retries=0)
    secret = "s3://me:hunter22@host/x"
    with keep_journal(store, graph, misses(graph), {*graph.stages}, secret, no_estimate) as notes:
        notes.progress(Event(EventKind.NOTE, "", f"lost {secret}"))
        step(notes, walk, Event(EventKind.FAILED, "data/a", f"no {secret}", final=True))
    folder = Path(store.storage) / "runs" / "r"
    for name in ("events.jsonl", "status.json"):
        text = (folder / name).read_text()
        assert "host/x" in text
        assert "hunter22" not in text


def test_second_driver_leaves_the_status_to_the_first(store: Store) -> None:
    graph = make_graph()
    save_record(store, graph)
    todo = {*graph.stages}
    with (
        keep_journal(store, graph, misses(graph), todo, "first", no_estimate),
        keep_journal(store, graph, misses(graph), todo, "second", no_estimate) as second,
    ):
        second.save()
        status = read_status(store.storage, "r")
        assert status is not None
        assert status["command"] == "first"
    starts = [event["command"] for event in events_of(store) if event["event"] == "run_started"]
    assert starts == ["first", "second"]


def test_readers_never_see_a_partially_written_status(store: Store) -> None:
    stages: Any = {f"m/{number}/train": {"state": "waiting"} for number in range(2000)}
    status: LiveStatus = {
        "name": "r",
        "state": "running",
        "host": "h",
        "pid": 1,
        "started": 0.0,
        "updated": 0.0,
        "command": "",
        "left_s": None,
        "left_without": 0,
        "stages": stages,
    }
    write_status(store.storage, status)
    ended = threading.Event()

    def write() -> None:
        while not ended.is_set():
            write_status(store.storage, status)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        sizes = set()
        for _ in range(50):
            reading = read_status(store.storage, "r")
            sizes.add(None if reading is None else len(reading["stages"]))
        assert sizes == {2000}
    finally:
        ended.set()
        writer.join()


# ---- the event log -------------------------------------------------------------------------------
def test_an_event_log_is_bounded_and_keeps_the_newest_events(store: Store) -> None:
    log = EventLog(store.storage, "r", max_bytes=2000)
    for number in range(100):
        log.write("note", message=f"{number} {'x' * 5000}"[:60])
    log.close()
    folder = Path(store.storage) / "runs" / "r"
    assert sorted(path.name for path in folder.iterdir()) == ["events.1.jsonl", "events.jsonl"]
    assert all(path.stat().st_size <= 2000 for path in folder.iterdir())
    assert events_of(store)[-1]["message"].startswith("99 ")
    log = EventLog(store.storage, "r")
    log.write("note", message="y" * 10_000)
    log.close()
    assert len(events_of(store)[-1]["message"]) == event_log.MAX_TEXT


def test_reopened_event_log_in_a_bucket_is_appended(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_log, "is_local", lambda uri: False)
    for number in range(2):
        log = EventLog(store.storage, "r")
        log.write("note", message=str(number))
        log.close()
    assert [event["message"] for event in events_of(store)] == ["0", "1"]


def test_event_log_continues_after_a_failed_rotation(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise OSError("the disk is full")

    log = EventLog(store.storage, "r", max_bytes=260)
    log.write("note", message="x" * 100)
    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", fail)
        log.write("note", message="y" * 100)
    log.write("note", message="short")
    log.close()
    messages = [event["message"] for event in events_of(store)]
    assert messages == ["x" * 100, "short"], "only the event that needed the rotation is lost"


def test_unread_event_log_in_a_bucket_is_not_overwritten(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_log, "is_local", lambda uri: False)
    log = EventLog(store.storage, "r")
    log.write("note", message="old")
    log.close()

    def fail(*_: Any) -> bytes:
        raise OSError("the network is down")

    with monkeypatch.context() as patch:
        patch.setattr(event_log, "read_bytes", fail)
        log = EventLog(store.storage, "r")
        log.write("note", message="new")
        log.flush()
    assert [event["message"] for event in events_of(store)] == ["old"]
    log.close()
    assert [event["message"] for event in events_of(store)] == ["old", "new"]

    log = EventLog(store.storage, "r", max_bytes=10)
    log.write("note", message="lost")
    log.close()
    assert [event["message"] for event in events_of(store)] == ["old", "new"], (
        "the log exceeds max_bytes"
    )


def test_unwritable_log_does_not_stop_a_run(store: Store, tmp_path: Path) -> None:
    folder = Path(store.storage) / "runs" / "r"
    folder.mkdir(parents=True)
    (folder / "events.jsonl").symlink_to(tmp_path / "elsewhere")
    (folder / "status.json").mkdir()
    graph = make_graph()
    with keep_journal(store, graph, misses(graph), {*graph.stages}, "go on", no_estimate) as notes:
        notes.progress(Event(EventKind.NOTE, "", "a note"))
    assert not (tmp_path / "elsewhere").exists()


# ---- live and dead drivers -----------------------------------------------------------------------
def hold_run(storage: str, ready: Any) -> None:
    """Act as the driver of a run, and wait to be killed."""
    graph = make_graph()
    store = Store(storage)
    todo = {*graph.stages}
    with keep_journal(store, graph, misses(graph), todo, "accrete run r.yaml", no_estimate):
        ready.set()
        time.sleep(60)


def test_killed_driver_is_reported_as_killed(store: Store) -> None:
    save_record(store, make_graph())
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    process = context.Process(target=hold_run, args=(store.storage, ready))
    process.start()
    assert ready.wait(30)
    assert runs.run_status(store.storage, "r").state == "running"
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    status = runs.run_status(store.storage, "r")
    assert status.state == "killed"
    assert status.left_s is None
    text = run_text.status_text(status)
    assert f"run r: killed: process {process.pid} on " in text
    assert "to resume: accrete run r.yaml" in text
    assert runs.list_runs(store.storage)[0].state == "killed"


def test_remote_driver_is_alive_while_its_status_is_recent(store: Store) -> None:
    graph = make_graph()
    with keep_journal(store, graph, misses(graph), {*graph.stages}, "go on", no_estimate):
        status = read_status(store.storage, "r")
    assert status is not None
    status["state"] = "running"
    assert not live_status.is_alive(store.storage, status)  # same host, but the lock is free
    status["host"] = "elsewhere"
    assert live_status.is_alive(store.storage, status)
    status["updated"] -= 3600
    assert not live_status.is_alive(store.storage, status)


def test_is_locked_does_not_take_the_lock(store: Store) -> None:
    assert is_locked(store.root, "run-r") is False
    with stage_lock(store.root, "run-r"):
        assert is_locked(store.root, "run-r") is True
    assert is_locked(store.root, "run-r") is False
    assert is_locked("s3://bucket/stages", "run-r") is None
    with stage_lock(store.root, "run-r", wait=False):
        pass


# ---- time left -----------------------------------------------------------------------------------
def test_time_left_is_estimated_from_measured_stages_of_each_kind() -> None:
    graph = make_graph()
    stages: Any = {
        "data/a": {"state": "done", "wall_s": 5.0},
        "m/a/train": {"state": "done", "wall_s": 20.0},
        "m/a/evaluate": {"state": "running", "since": 100.0},
        "m/b/train": {"state": "waiting"},
        "m/b/evaluate": {"state": "waiting"},
    }
    left = estimate_time_left(graph, stages, 1, clock=lambda: 101.0)
    assert left == TimeLeft(40.0, 2)  # 10 s per epoch; no evaluation was measured
    stages["m/a/evaluate"] = {"state": "reused", "wall_s": 3.0}
    assert estimate_time_left(graph, stages, 1, clock=lambda: 101.0) == TimeLeft(46.0, 0)
    running = {"state": "running", "since": 101.0, "progress": {"left_s": 11.0}}
    stages["m/b/train"] = running
    assert estimate_time_left(graph, stages, 1, clock=lambda: 105.0) == TimeLeft(17.0, 0)
    stages["m/b/train"] = {"state": "running", "since": 101.0}
    assert estimate_time_left(graph, stages, 1, clock=lambda: 121.0) == TimeLeft(26.0, 0)
    late = estimate_time_left(graph, stages, 1, clock=lambda: 142.0)
    assert late == TimeLeft(6.0, 0), "1 s late, and an evaluation of 6 s follows"
    later = estimate_time_left(graph, stages, 1, clock=lambda: 148.0)
    assert later == TimeLeft(None, 0), "unknown: the delay exceeds the rest"
    assert TimeLeftEstimator(graph, 0)({key: {"state": "waiting"} for key in stages}) == (None, 5)
    stages = {key: {"state": "failed"} for key in stages}
    assert estimate_time_left(graph, stages, 1) == TimeLeft(0.0, 0)


# ---- the commands --------------------------------------------------------------------------------
def output(capsys: pytest.CaptureFixture[str], *argv: str, code: int = 0) -> str:
    """Run a command and return its output."""
    capsys.readouterr()
    assert cli.main(list(argv)) == code
    captured = capsys.readouterr()
    return captured.out + captured.err


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run a small config; return its path."""
    folder = tmp_path_factory.mktemp("runs")
    body = small_run.make_body(folder, small_run.make_cards(folder, "ab"), ["meat", "linear"])
    config = small_run.write_config(folder / "config.yaml", body)
    small_run.run(["run", config], folder / "out.txt")
    return Path(config)


def test_runs_are_listed_with_state_stages_and_accuracy(
    finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    storage = str(finished.parent / "storage")
    lines = output(capsys, "runs", "--storage", storage).splitlines()
    assert lines[0].split() == ["run", "state", "started", "stages", "average", "accuracy"]
    assert re.fullmatch(
        r"small  finished  \d{4}-\d\d-\d\d \d\d:\d\d   11/11  \w+ [\d.]+ %, \w+ [\d.]+ %", lines[1]
    )
    listed = app.list_runs(storage)
    assert [(run.name, run.done, run.total) for run in listed] == [("small", 11, 11)]
    matrix = {method.label: method.average_accuracy for method in listed[0].methods}
    results = small_run.manifests(storage)
    rows = []
    for task in "ab":
        rows += results[f"meat/{task}/evaluate"]["result"]["rows"]
    rates = {row["task"]: row["correct"] / row["total"] for row in rows}
    assert matrix["meat"] == pytest.approx((rates["a"] + rates["b"]) / 2)


def test_status_of_a_finished_run_lists_its_stages(
    finished: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = output(capsys, "status", str(finished))
    assert text.startswith("run small: finished, started 2")
    assert "12 stages: 12 done" in text
    assert re.search(r"^meat/b/train +done +[\d.]+ s$", text, re.MULTILINE)
    assert output(capsys, "status", str(finished), "--watch").startswith("run small: finished")
    monkeypatch.setattr(run_text, "MAX_STAGES", 3)
    assert "12 other stages: --all lists them" in output(capsys, "status", str(finished))
    assert "meat/b/train" in output(capsys, "status", str(finished), "--all")
    assert runs.run_status(str(finished.parent / "storage"), "small").state == "finished"


def test_status_picture_has_stage_states_and_links_to_the_report(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    storage = str(finished.parent / "storage")
    picture = tmp_path / "graph.svg"
    output(capsys, "status", "small", "--storage", storage, "--svg", str(picture))
    root = ElementTree.fromstring(picture.read_text())
    links = {link.get("href") for link in root.iter("{http://www.w3.org/2000/svg}a")}
    assert f"{storage}/runs/small/report.html#stage-meat/b/train" in links
    assert len(links) == 12
    titles = [title.text or "" for title in root.iter("{http://www.w3.org/2000/svg}title")]
    assert all(re.search(r" done [\d.]+ s$", title) for title in titles)
    wrong = str(tmp_path / "nowhere" / "x.svg")
    text = output(capsys, "status", "small", "--storage", storage, "--svg", wrong, code=2)
    assert "name a file in an existing folder" in text


def test_events_record_where_each_stage_ran(finished: Path) -> None:
    events = events_of(Store(str(finished.parent / "storage")), "small")
    started = {event["stage"]: event["where"] for event in events if event["event"] == "started"}
    done = {event["stage"] for event in events if event["event"] == "done"}
    assert set(started) == done == {*small_run.manifests(finished.parent / "storage")}
    assert all(where.startswith("this process, ") for where in started.values())
    assert events[-1]["event"] == "run_ended"
    assert events[-1]["state"] == "finished"


def test_run_with_missing_results_shows_finished_and_total_counts(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    storage = tmp_path / "storage"
    shutil.copytree(finished.parent / "storage", storage)
    key = small_run.manifests(storage)["meat/b/train"]["key"]
    shutil.rmtree(storage / "stages" / key)
    status = runs.run_status(str(storage), "small")
    assert (status.state, status.counts["missing"]) == ("unfinished", 1)
    assert "10/11" in output(capsys, "runs", "--storage", str(storage))


def test_interrupted_stage_is_reported_to_continue_from_its_checkpoint(store: Store) -> None:
    graph = make_graph()
    save_record(store, graph)
    write_bytes(join(store.storage, "checkpoints", "k-a", "latest.json"), b"{}")
    status = runs.run_status(store.storage, "r")
    assert status.counts == {"missing": 4, "interrupted": 1}
    assert re.search(
        r"m/a/train +interrupted +the next run continues from its checkpoint",
        run_text.status_text(status),
    )
    reasons = {stage.id: store.look_up(stage, store.record("r")).reason for stage in graph}
    assert reasons["m/a/train"] == "not finished, continues from its checkpoint"
    assert reasons["m/b/train"] == "not finished"


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("smal", r"has no record of a run 'smal'; did you mean 'small'\?"),
        ("other", "has no record of a run 'other'; there are: small"),
        ("../small", r"has no record of a run '../small'; did you mean 'small'\?"),
        ("missing.yaml", "config 'missing.yaml' does not exist"),
    ],
)
def test_unknown_run_is_reported_in_one_sentence(
    name: str, sentence: str, finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    storage = str(finished.parent / "storage")
    text = output(capsys, "status", name, "--storage", storage, code=2)
    assert re.search(sentence, text)
    assert len(text.splitlines()) == 1


def test_unlistable_storage_is_reported_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: False)
    for command in ("runs", "gc"):
        text = output(capsys, command, "--storage", str(tmp_path), code=2)
        assert text == (
            f"accrete: storage '{tmp_path}' cannot be listed; "
            "choose another folder or fix its permissions\n"
        )


def test_storages_without_runs_are_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = str(tmp_path / "nowhere")
    assert "does not exist; give the folder" in output(capsys, "runs", "--storage", missing, code=2)
    assert not Path(missing).exists()
    assert output(capsys, "runs", "--storage", str(tmp_path)) == f"no runs in {tmp_path}\n"
    text = output(capsys, "status", "r", "--storage", str(tmp_path), code=2)
    assert "name its storage with --storage, or run it first" in text


@pytest.mark.parametrize(
    "damage",
    [b"", b"{", b"[]", b'{"name": "small"}', b'{"name": "small", "stages": {"a": 3}}', b"\xff"],
)
def test_damaged_or_foreign_status_file_is_ignored(
    damage: bytes, finished: Path, tmp_path: Path
) -> None:
    storage = tmp_path / "storage"
    shutil.copytree(finished.parent / "storage", storage)
    (storage / "runs" / "small" / "status.json").write_bytes(damage)
    status = runs.run_status(str(storage), "small")
    assert (status.state, status.driver) == ("finished", None)


def test_control_characters_in_a_status_are_not_printed(store: Store) -> None:
    graph = make_graph()
    save_record(store, graph)
    with (
        pytest.raises(UserError),
        keep_journal(store, graph, misses(graph), {*graph.stages}, "x\x1b[2J", no_estimate),
    ):
        raise UserError("bad \x1b[31m news")
    text = printable(run_text.status_text(runs.run_status(store.storage, "r")))
    assert "\x1b" not in text
    assert "news" in text


def test_all_failed_tries_are_counted_including_the_last(store: Store) -> None:
    graph = make_graph()
    save_record(store, graph)
    walk = Walk.over(graph, [], retries=1)
    notes = Journal(store, graph, misses(graph), {*graph.stages}, "go on", no_estimate)
    for decision in walk.decide():
        walk.record(decision)
    for message in ("first", "second"):
        step(notes, walk, Event(EventKind.FAILED, "data/a", message))
    assert notes.snapshot()["stages"]["data/a"]["tries"] == 2
    assert notes.snapshot()["stages"]["data/a"]["state"] == "failed"
    assert not notes.is_over
    for decision in walk.decide():
        walk.record(decision)
        notes.on_decision(walk, decision)
    assert notes.is_over, "the other stages are blocked"


def test_watch_prints_changes_until_the_run_ends(
    store: Store, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = make_graph()
    save_record(store, graph)
    walk = Walk.over(graph, [], retries=0)
    notes = Journal(store, graph, misses(graph), {*graph.stages}, "go on", no_estimate)
    notes.start()
    for decision in walk.decide():
        walk.record(decision)
        notes.on_decision(walk, decision)
    body = {"where": "here", "nodes": ["n1"], "gpus": []}
    notes.progress(Event(EventKind.STARTED, "data/a", body=body))
    notes.progress(Event(EventKind.CHECKPOINT, "data/a", body={"epoch": 1, "step": 2}))
    notes.save()
    seconds = iter([0, 1])

    def go_on(_: float) -> None:
        if next(seconds):
            notes.end("interrupted")
        else:
            step(notes, walk, Event(EventKind.DONE, "data/a", body={"wall_s": 1.0}))
            notes.save()

    monkeypatch.setattr(time, "sleep", go_on)
    lines = output(capsys, "status", "r", "--storage", store.storage, "--watch").splitlines()
    path = Path(store.storage, "runs", "r", "events.jsonl")
    events = [json.loads(line) for line in path.read_text().splitlines()]
    [started] = [event for event in events if event["event"] == "started"]
    assert (started["where"], started["nodes"]) == ("here", ["n1"])
    [saved] = [event for event in events if event["event"] == "checkpoint"]
    assert (saved["stage"], saved["epoch"], saved["step"]) == ("data/a", 1, 2)
    assert lines[:2] == ["data/a: running, here", "data/a: done"]
    assert lines[-1].startswith("run r: interrupted ")
