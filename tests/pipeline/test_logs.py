"""Tests of `logs`: events and tracebacks of a stage, and invalid log files."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from pipeline import cli
from pipeline.graph import event_log, failures
from pipeline.graph.event_log import EventLog
from pipeline.graph.store import Store
from pipeline.report import log_text
from pipeline.results import stage_log

STAGE = "m/a/train"
KEY = "k-a"


@pytest.fixture
def storage(tmp_path: Path) -> str:
    """Return a storage with the record of run `r`, which has two stages."""
    stages: list[dict[str, Any]] = [
        {"id": "data/a", "key": "k-data", "step": "ingest", "parents": [], "label": None},
        {"id": STAGE, "key": KEY, "step": "train", "parents": ["data/a"], "label": "m"},
    ]
    for stage in stages:
        stage |= {"task": "a", "inputs": {}}
    record: Any = {"name": "r", "key_version": 1, "config": {}, "tasks": [], "stages": stages}
    record["created"] = "2026-01-02T03:04:05+0000"
    Store(str(tmp_path)).save_record(record)
    return str(tmp_path)


def fail(storage: str, message: str, name: str) -> None:
    """Write the file of a failed try. Tries are ordered by `name`."""
    try:
        raise RuntimeError(message)
    except RuntimeError as error:
        path = Path(failures.keep(storage, STAGE, KEY, error, rank=1, world=2))
    path.rename(path.with_name(f"{name}{failures.SUFFIX}"))


def write_events(storage: str) -> None:
    """Write the events of a stage that fails once and then succeeds."""
    log = EventLog(storage, "r")
    log.write("run_started", run="r", stages=2, to_run=2, host="node-1", pid=7)
    log.write("decision_launch", stage=STAGE)
    log.write("started", stage=STAGE, where="node-2", nodes=["node-2"], gpus=["3"])
    log.write("progress", stage=STAGE, progress={"task": "a", "done": 1, "of": 3})
    log.write("checkpoint", stage=STAGE, epoch=2, step=0)
    origin = {"host": "node-2", "rank": 1, "log": "/logs/w.err"}
    log.write("failed", stage=STAGE, message="RuntimeError: no more memory", **origin)
    log.write("decision_retry", stage=STAGE, reason="try 2 of 3")
    log.write("done", stage=STAGE, key=KEY, wall_s=61.0)
    log.write("started", stage="data/a", where="node-3")
    log.close()


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Return the output of the command."""
    assert cli.main(["logs", *arguments]) == 0
    return capsys.readouterr().out


def test_stage_log_shows_events_and_full_traceback_per_failed_try(
    storage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_events(storage)
    fail(storage, "the second one", "20260102T2")
    fail(storage, "the first one", "20260102T1")
    text = printed(capsys, "r", STAGE, "--storage", storage)
    lines = [line.split("  ", 1)[-1] for line in text.splitlines()]
    assert lines[1:8] == [
        "queued",
        "started in node-2",
        "a 1/3",
        "checkpoint before step 0 of epoch 2",
        "failed: RuntimeError: no more memory (rank 1 on node-2, log /logs/w.err)",
        "retry: try 2 of 3",
        "done in 1 min 01 s",
    ]
    assert "node-3" not in text, "node-3 is in an event of another stage"
    assert text.index("failed try 1 of 2") < text.index("the first one")
    assert text.index("the first one") < text.index("failed try 2 of 2")
    assert text.count("rank: 1 of 2") == text.count("Traceback (most recent call last):") == 2
    assert "raise RuntimeError(message)\nRuntimeError: the first one" in text


def test_run_log_lists_failures_with_command_to_print_them(
    storage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_events(storage)
    fail(storage, "no more memory", "20260102T1")
    text = printed(capsys, "r", "--storage", storage)
    assert "run started: 2 of 2 stages, process 7 on node-1" in text
    assert "queued" not in text
    assert "a 1/3" not in text
    assert "a 1/3" in printed(capsys, "r", "--storage", storage, "--all")
    command = text.splitlines()[-1].split(": ", 1)[1]
    arguments = command.split(" logs ")[1].split()
    assert "RuntimeError: no more memory" in printed(capsys, *arguments)


def test_old_events_and_tries_are_hidden_without_all_option(
    storage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    log = EventLog(storage, "r")
    for number in range(log_text.MAX_EVENTS + 5):
        log.write("note", stage=STAGE, message=f"number {number}.")
    log.close()
    for number in range(log_text.MAX_TRIES + 1):
        fail(storage, f"failure {number}.", f"20260102T{number}")
    text = printed(capsys, "r", STAGE, "--storage", storage)
    assert "5 earlier events: --all" in text
    assert "1 earlier failed tries: --all" in text
    assert ("number 4." in text, "number 5." in text) == (False, True)
    assert ("failure 0." in text, "failure 1." in text) == (False, True)
    text = printed(capsys, "r", STAGE, "--storage", storage, "--all")
    assert "number 0." in text
    assert "failure 0." in text


def test_rotated_log_file_is_read_before_current_file(
    storage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    log = EventLog(storage, "r", max_bytes=200)
    for number in range(3):
        log.write("note", stage=STAGE, message=f"{number}" * 60)
    log.close()
    assert Path(storage, "runs", "r", event_log.ROTATED_FILE).exists()
    text = printed(capsys, "r", STAGE, "--storage", storage)
    assert text.index("1" * 60) < text.index("2" * 60)


def test_malformed_log_files_do_not_break_the_command(
    storage: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test lines that are not events, huge files, FIFOs, and control codes."""
    folder = Path(storage, "runs", "r")
    good = {
        "time": "2026-01-02T03:04:05",
        "event": "note",
        "stage": STAGE,
        "message": "\x1b[31mred",
    }
    odd: list[Any] = [
        [],
        "text",
        None,
        {"event": 3},
        {"event": "done", "stage": STAGE, "wall_s": "long"},
        {"event": "progress", "stage": STAGE, "progress": {"epoch": []}},
        {"event": "progress", "stage": STAGE, "progress": "far"},
        {"event": "run_started", "stage": STAGE},
        good,
    ]
    lines = [json.dumps(value) for value in odd]
    lines += ["{", "[" * 100_000, '{"event": NaN}', "\x00"]
    (folder / event_log.FILE).write_text("\n".join(lines))
    monkeypatch.setattr(stage_log, "MAX_FAILURE_BYTES", 1000)
    tries = Path(storage, failures.FOLDER, KEY)
    tries.mkdir(parents=True)
    (tries / "1.txt").write_bytes(b"\xff\x1b]0;title\x07")
    (tries / "2.txt").write_bytes(b"x" * 1001)
    os.mkfifo(tries / "3.txt")
    for arguments in (["r"], ["r", STAGE], ["r", STAGE, "--all"]):
        text = printed(capsys, *arguments, "--storage", storage)
        assert "\x1b" not in text
        assert "x" * 1001 not in text
    assert "red" in text
    assert "it cannot be read" in text


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["r", "m/a/trian"], "run 'r' has no stage 'm/a/trian'; did you mean 'm/a/train'?"),
        (["r", "zzz"], "its stages are: data/a, m/a/train"),
        (["rr"], "has no record of a run 'rr'; did you mean 'r'?"),
    ],
)
def test_unknown_run_or_stage_error_suggests_known_names(
    arguments: list[str], expected: str, storage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["logs", *arguments, "--storage", storage]) == 2
    assert expected in capsys.readouterr().err


def test_run_without_logged_events_is_reported(
    storage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "no event of it is in the log" in printed(capsys, "r", "--storage", storage)
