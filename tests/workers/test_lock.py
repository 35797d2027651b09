"""Tests of the lock of a result: one holder at a time, release when the holder dies, and no files
left behind."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from workers.storage import lock
from workers.storage.lock import stage_lock

CONTEXT = multiprocessing.get_context("fork")


def hold(root: str, inside: Any, leave: Any) -> None:
    with stage_lock(root, "k"):
        inside.set()
        leave.wait(60)


def held(root: str) -> tuple[Any, Any, Any]:
    inside, leave = CONTEXT.Event(), CONTEXT.Event()
    process = CONTEXT.Process(target=hold, args=(root, inside, leave))
    process.start()
    assert inside.wait(60)
    return process, inside, leave


def taken(root: str) -> threading.Event:
    """Start a thread that takes the lock; return an event that is set when it holds the lock."""
    got = threading.Event()

    def take() -> None:
        with stage_lock(root, "k"):
            got.set()

    threading.Thread(target=take, daemon=True).start()
    return got


def test_lock_file_that_vanishes_while_it_is_shared_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def delete_first(path: str) -> None:
        calls.append(path)
        if len(calls) == 1:
            os.unlink(path)
            os.stat(path)

    monkeypatch.setattr(lock, "share_file", delete_first)
    with stage_lock(str(tmp_path), "k"):
        assert len(calls) == 2


def test_lock_waits_until_the_holder_releases_it(tmp_path: Path) -> None:
    root = str(tmp_path / "stages")
    process, _, leave = held(root)
    got = taken(root)
    assert not got.wait(0.3)
    leave.set()
    assert got.wait(60)
    process.join(900)
    assert not any((tmp_path / "claims").iterdir())


def test_waiting_for_lock_is_reported_repeatedly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "ROUND_S", 0.05)
    root = str(tmp_path / "stages")
    process, _, leave = held(root)
    calls: list[int] = []

    def say() -> None:
        calls.append(len(calls))
        if len(calls) == 3:
            leave.set()

    with stage_lock(root, "k", on_wait=say):
        assert len(calls) >= 3
    process.join(900)
    calls.clear()
    with stage_lock(root, "k", on_wait=say):
        assert calls == [], "no process holds the lock"


def test_lock_of_a_killed_process_is_released(tmp_path: Path) -> None:
    root = str(tmp_path / "stages")
    process, _, _ = held(root)
    got = taken(root)
    process.kill()
    assert got.wait(60)


def test_other_keys_and_object_stores_do_not_wait(tmp_path: Path) -> None:
    root = str(tmp_path / "stages")
    with (
        stage_lock(root, "k"),
        stage_lock(root, "other"),
        stage_lock("s3://bucket/stages", "k"),
        stage_lock("s3://bucket/stages", "k"),
    ):
        assert {p.name for p in (tmp_path / "claims").iterdir()} == {"k", "other"}
    assert not os.listdir(tmp_path / "claims")


def test_lock_without_waiting_raises_if_it_is_held(tmp_path: Path) -> None:
    root = str(tmp_path / "stages")
    with stage_lock(root, "k"), pytest.raises(BlockingIOError), stage_lock(root, "k", wait=False):
        pass
    with stage_lock(root, "k", wait=False):
        pass


def test_lock_on_a_replaced_file_is_not_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = str(tmp_path / "stages")
    path = tmp_path / "claims" / "k"
    real_flock = fcntl.flock
    descriptors: list[int] = []  # of the process that replaces and locks the file

    def flock(file: int, how: int) -> None:
        if not descriptors:
            # After the file is opened and before it is locked, the holder removes it, and another
            # process creates and locks a new one.
            path.unlink()
            descriptors.append(os.open(path, os.O_RDWR | os.O_CREAT))
            real_flock(descriptors[0], fcntl.LOCK_EX)
        real_flock(file, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    got = taken(root)
    assert not got.wait(0.3)
    os.close(descriptors[0])
    assert got.wait(60)


def work(root: str, log: str, rounds: int) -> None:
    for _ in range(rounds):
        with stage_lock(root, "k"), open(log, "r+") as stream:
            count = int(stream.read())
            stream.seek(0)
            stream.write(str(count + 1))


def test_lock_has_at_most_one_holder(tmp_path: Path) -> None:
    log = tmp_path / "count"
    log.write_text("0")
    processes = [
        CONTEXT.Process(target=work, args=(str(tmp_path / "stages"), str(log), 50))
        for _ in range(4)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(900)
    assert log.read_text() == "200"
