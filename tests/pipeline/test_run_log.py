"""Tests of the driver's log: the lines of driver.log, and the lines that `--log-level` prints."""

from __future__ import annotations

import json
import logging
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from benchmarks import scale
from pipeline import cli
from pipeline.graph import event_log, run_log
from pipeline.graph.stage import Graph, Stage
from pipeline.graph.store import Store
from pipeline.graph.walk import Decision, DecisionKind, Event, EventKind, Walk
from tests import small_run
from workers.errors import UserError
from workers.storage import artifact
from workers.storage.filesystem import StorageUnavailable

WALK = cast(Walk, None)  # the log does not read it


@pytest.fixture(autouse=True)
def project_logger() -> Iterator[logging.Logger]:
    """Yield the logger `accrete`, and restore its handlers and level afterwards."""
    logger = logging.getLogger("accrete")
    before = [*logger.handlers], logger.level, logger.propagate
    yield logger
    logger.handlers[:], logger.level, logger.propagate = before


def read_log(storage: Path, name: str) -> str:
    return (storage / "runs" / name / run_log.FILE).read_text()


def test_run_log_lists_stages_or_nothing_to_do(tmp_path: Path) -> None:
    body = small_run.make_body(tmp_path, small_run.make_cards(tmp_path, "a"), ["linear"])
    path = small_run.write_config(tmp_path / "config.yaml", body)
    for _ in range(2):
        assert cli.main(["run", path]) == 0
    log = read_log(tmp_path / "storage", body["name"])
    assert log.count("linear/a/train: launch") == 1
    assert log.count("linear/a/train: done in ") == 1
    assert log.count(", 0 to run\n") == 1, "the second run appends to the log of the first"


def test_failures_retries_and_end_of_run_are_logged(tmp_path: Path) -> None:
    log = run_log.RunLog()

    def fail() -> None:
        with run_log.driver_log(str(tmp_path), "r"):
            log.on_event(WALK, Event(EventKind.FAILED, "a/train", "no room"))
            log.on_decision(WALK, Decision(DecisionKind.RETRY, "a/train", "no room"))
            log.progress(Event(EventKind.NOTE, "", "node n1 joined"))
            log.progress(Event(EventKind.PROGRESS, "a/train", body={"epoch": 1}))
            saved = Event(EventKind.CHECKPOINT, "a/train", body={"epoch": 1, "step": 30})
            log.on_event(WALK, saved)
            raise UserError("stage a/train failed")

    with pytest.raises(UserError):
        fail()
    lines = [line.split(" ", 2)[2] for line in read_log(tmp_path, "r").splitlines()]
    assert lines == [
        "WARNING accrete.run: a/train: failed: no room",
        "INFO accrete.run: a/train: retry: no room",
        "INFO accrete.run: node n1 joined",
        "INFO accrete.run: a/train: checkpoint before step 30 of epoch 1",
        "INFO accrete.run: the run ended with UserError: stage a/train failed",
    ]


@pytest.mark.parametrize(("level", "count"), [("warning", 0), ("info", 1)])
def test_a_failure_that_the_screen_shows_is_not_printed_twice(
    level: str, count: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_log.log_to_stderr(level)
    with run_log.driver_log(str(tmp_path), "r"):
        run_log.RunLog().on_event(WALK, Event(EventKind.LOST, "a/train", "its node was lost"))
    assert capsys.readouterr().err.count("a/train: lost") == count
    assert "WARNING accrete.run: a/train: lost: its node was lost" in read_log(tmp_path, "r")


def test_secrets_are_redacted_in_the_log_and_on_stderr(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_log.log_to_stderr("warning")
    with run_log.driver_log(str(tmp_path), "r"):
        run_log.LOG.warning("postgresql://me:hunter2@db/x refuses")
    for text in (read_log(tmp_path, "r"), capsys.readouterr().err):
        assert "refuses" in text
        assert "hunter2" not in text


@pytest.mark.parametrize(("level", "count"), [("debug", 3), ("info", 2), ("warning", 1)])
def test_log_level_affects_only_printed_lines(
    level: str, count: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_log.log_to_stderr("error")
    run_log.log_to_stderr(level)  # it replaces the earlier level
    with run_log.driver_log(str(tmp_path), "r"):
        run_log.LOG.debug("one")
        run_log.LOG.info("two")
        run_log.LOG.warning("three")
    assert len(capsys.readouterr().err.splitlines()) == count
    assert len(read_log(tmp_path, "r").splitlines()) == 2


def test_unknown_log_level_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--log-level", "loud", "plan", "x.yaml"]) == 2
    assert "argument --log-level: invalid choice: 'loud'" in capsys.readouterr().err


def test_log_in_a_bucket_is_written_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: dict[str, bytes] = {}

    def write_bytes(path: str, data: bytes, **options: Any) -> None:
        written[path] = data

    monkeypatch.setattr(artifact, "write_bytes", write_bytes)
    with run_log.driver_log("s3://bucket/storage", "r"):
        run_log.LOG.info("started")
    assert [*written] == ["s3://bucket/storage/runs/r/driver.log"]
    assert written["s3://bucket/storage/runs/r/driver.log"].endswith(b"accrete.run: started\n")


def test_unreachable_bucket_does_not_hide_the_run_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(path: str, data: bytes) -> None:
        raise StorageUnavailable("the storage does not answer")

    def end() -> None:
        with run_log.driver_log("s3://bucket/storage", "r"):
            raise UserError("stage a/train failed")

    monkeypatch.setattr(artifact, "write_bytes", fail)
    with pytest.raises(UserError, match="stage a/train failed"):
        end()


# ---- logs that cannot be written -----------------------------------------------------------------
def put_symlink(path: Path) -> None:
    (path.parent / "outside.txt").write_text("theirs")
    path.symlink_to(path.parent / "outside.txt")


@pytest.mark.parametrize(
    "put", [put_symlink, os.mkfifo, Path.mkdir], ids=["link", "FIFO", "folder"]
)
def test_irregular_driver_log_is_left_alone(
    put: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A storage folder may come from an untrusted source."""
    folder = tmp_path / "runs" / "r"
    folder.mkdir(parents=True)
    put(folder / run_log.FILE)
    run_log.log_to_stderr("warning")
    with run_log.driver_log(str(tmp_path), "r"):
        run_log.LOG.info("started")
    [line] = capsys.readouterr().err.splitlines()
    assert "driver.log cannot be written" in line
    assert "the run continues without it" in line
    if put is put_symlink:
        assert (folder / "outside.txt").read_text() == "theirs"


def test_full_disk_silently_ends_the_log_but_not_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "runs").mkdir()
    with run_log.driver_log(str(tmp_path), "r"):
        [handler] = [h for h in logging.getLogger("accrete").handlers if h.name == run_log.FILE]
        stream = cast(logging.StreamHandler[Any], handler).stream
        os.dup2(os.open("/dev/full", os.O_WRONLY), stream.fileno())
        run_log.LOG.info("no room for this")
    assert capsys.readouterr().err == ""


def test_log_in_shared_storage_is_group_writable(tmp_path: Path) -> None:
    tmp_path.chmod(0o2775)
    umask = os.umask(0o077)
    try:
        with run_log.driver_log(str(tmp_path), "r"):
            run_log.LOG.info("started")
    finally:
        os.umask(umask)
    mode = (tmp_path / "runs" / "r" / run_log.FILE).stat().st_mode
    assert mode & 0o660 == 0o660


def test_a_message_is_one_line_without_escape_sequences(tmp_path: Path) -> None:
    with run_log.driver_log(str(tmp_path), "r"):
        run_log.LOG.info("a\n2026-11-23 00:00:00,000 INFO accrete.run: forged \x1b[2J")
    [line] = read_log(tmp_path, "r").splitlines()
    assert "forged" in line
    assert "\x1b" not in line


# ---- many stages ---------------------------------------------------------------------------------
def test_run_of_thousand_stages_logs_few_lines_per_stage(tmp_path: Path) -> None:
    stages = [Stage(f"m{n}/a/train", "train", f"key{n}", {}) for n in range(1000)]
    graph = Graph.of("many", stages)
    observed = scale.observed_run(Store(str(tmp_path)), graph)
    assert observed.screen == 1000, "without a terminal, one line when a stage is done"
    assert observed.log == 3 * 1000, "launched, started, done"
    assert observed.events == 4 * 1000 + 2, "the same and progress; start and end of the run"
    events = tmp_path / "runs" / "many" / event_log.FILE
    assert max(map(len, events.read_text().splitlines())) < 400
    kinds = Counter(json.loads(line)["event"] for line in events.read_text().splitlines())
    assert kinds == {
        "run_started": 1,
        "decision_launch": 1000,
        "started": 1000,
        "progress": 1000,
        "done": 1000,
        "run_ended": 1,
    }
