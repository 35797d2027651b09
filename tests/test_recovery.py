"""Tests of interrupted runs: stored results are kept, and a resumed run has the same results."""

from __future__ import annotations

import errno
import itertools
import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest

from pipeline import cli
from tests import small_run
from tests.recovery import (
    MOMENTS,
    Crash,
    Reference,
    check_recovered,
    damage_file,
    published_attempts,
    steps,
)


# ---- SIGKILL of the driver -----------------------------------------------------------------------
def killed_at_a_moment(reference: Reference, folder: Path, moment: float) -> None:
    """Kill a run after `moment` seconds, run the command again, and check the results."""
    process = small_run.start(["run", reference.config(folder)], folder / "killed.txt")
    process.join(moment)
    process.kill()
    process.join()
    before = published_attempts(folder)
    output = small_run.run(["run", reference.config(folder)], folder / "again.txt")
    check_recovered(reference, folder, before, output)


def killed_at_a_call(reference: Reference, folder: Path, call: int) -> bool:
    """Kill a run before durable write number `call`, run the command again, and check the results.

    Returns: whether the run was killed. A run with fewer writes is not.
    """
    process = small_run.start(
        ["run", reference.config(folder)], folder / "killed.txt", kill_before=call
    )
    process.join(900)
    assert process.exitcode in (-9, 0)
    before = published_attempts(folder)
    output = small_run.run(["run", reference.config(folder)], folder / "again.txt")
    check_recovered(reference, folder, before, output)
    was_killed: bool = process.exitcode == -9
    return was_killed


@pytest.mark.few(1)
@pytest.mark.parametrize("trial", range(3))
def test_run_killed_at_random_time_recovers_same_results(
    trial: Any, reference: Any, tmp_path: Path
) -> None:
    killed_at_a_moment(
        reference,
        tmp_path,
        random.Random(f"{MOMENTS}-{trial}").uniform(0.1, 0.95) * reference.seconds,
    )


@pytest.mark.slow
@pytest.mark.parametrize("trial", range(3))
def test_run_killed_between_writes_recovers_same_results(
    trial: Any, reference: Any, tmp_path: Path
) -> None:
    assert killed_at_a_call(
        reference, tmp_path, random.Random(f"{MOMENTS}-call-{trial}").randrange(5, 120)
    )


@pytest.mark.slow
@pytest.mark.parametrize("trial", range(20))
def test_run_killed_throughout_its_duration_recovers_same_results(
    trial: Any, reference: Any, tmp_path: Path
) -> None:
    killed_at_a_moment(
        reference,
        tmp_path,
        (trial + random.Random(f"{MOMENTS}-slow-{trial}").random()) / 20 * reference.seconds,
    )


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_run_killed_before_every_seventh_write_recovers_same_results(
    reference: Any, tmp_path: Path
) -> None:
    """Try every seventh durable write, until a run ends before it is killed."""
    call = 1
    was_killed = True
    while was_killed:
        was_killed = killed_at_a_call(reference, tmp_path / str(call), call)
        call += 7
    assert call > 100


@pytest.mark.slow
def test_run_killed_ten_times_recovers_same_results(reference: Any, tmp_path: Path) -> None:
    """Each of the ten processes is killed a few writes later than the one before."""
    config = reference.config(tmp_path)
    before: dict[str, str] = {}
    for trial in range(10):
        process = small_run.start(["run", config], tmp_path / "out.txt", kill_before=8 + 3 * trial)
        process.join(900)
        after = published_attempts(tmp_path)
        assert before.items() <= after.items()
        before = after
    check_recovered(
        reference, tmp_path, before, small_run.run(["run", config], tmp_path / "again.txt")
    )


def test_sigterm_saves_checkpoint_and_run_resumes(reference: Any, tmp_path: Path) -> None:
    """A cluster sends SIGTERM before it preempts a machine.

    Periodic checkpoints are off, so that only the signal causes a checkpoint.
    """
    longer = {
        "methods": ["meat"],
        "train": {"epochs": 4},
        "cluster": {"workers": 0, "checkpoint_s": 0, "loader_workers": 1},
    }
    whole = reference.config(tmp_path / "whole", **longer)
    small_run.run(["run", whole], tmp_path / "whole.txt")
    config = reference.config(tmp_path, **longer)
    process = small_run.start(
        ["run", config],
        tmp_path / "out.txt",
        kill_before=1,
        by=signal.SIGTERM,
        within="meat/b/train",
    )
    process.join(900)
    assert process.exitcode == 143
    output = (tmp_path / "out.txt").read_text()
    assert (
        output.splitlines()[-1]
        == "accrete: stopped on request; running stages are saved at their last checkpoint; "
        "run the same command again to resume"
    )
    assert "Traceback" not in output
    saved = [*(tmp_path / "storage" / "checkpoints").rglob("latest.json")]
    assert len(saved) == 1
    before = published_attempts(tmp_path)
    small_run.run(["run", config], tmp_path / "again.txt")
    assert before.items() <= small_run.attempts(tmp_path / "storage").items()
    assert small_run.results(tmp_path / "storage") == small_run.results(
        tmp_path / "whole" / "storage"
    )


@pytest.mark.slow
@pytest.mark.parametrize("call", [20, 60])
def test_interrupted_run_prints_one_line_and_resumes(
    call: int, reference: Any, tmp_path: Path
) -> None:
    process = small_run.start(
        ["run", reference.config(tmp_path)],
        tmp_path / "out.txt",
        kill_before=call,
        by=signal.SIGINT,
    )
    process.join(900)
    assert process.exitcode == 130
    last = (tmp_path / "out.txt").read_text().splitlines()[-1]
    assert (
        last
        == "accrete: interrupted; finished stages are kept; run the same command again to resume"
    )
    check_recovered(
        reference,
        tmp_path,
        published_attempts(tmp_path),
        small_run.run(["run", reference.config(tmp_path)], tmp_path / "again.txt"),
    )


@pytest.mark.few(1)
@pytest.mark.parametrize("call", [1, 3, 4, 9, 40, 90])
def test_full_disk_prints_one_line_error_and_run_resumes(
    call: int,
    reference: Any,
    tmp_path: Path,
    quick: Any,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    config, calls = reference.config(tmp_path), itertools.count(1)

    def full(descriptor: int) -> None:
        if next(calls) >= call:
            raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        assert cli.main(["run", config]) == 2
    output = capfd.readouterr().err
    assert len(output.splitlines()) == 1
    assert "No space left on device" in output
    assert not list((tmp_path / "storage").rglob("*.part")), "partial files must be removed"
    assert cli.main(["run", config]) == 0
    check_recovered(reference, tmp_path, {}, capfd.readouterr().out)


# ---- checkpoints inside a stage ------------------------------------------------------------------
@pytest.mark.few(1)
@pytest.mark.parametrize("crash_at", [2, 5, 6, 7, 8, 12, 15])
def test_crashed_stage_resumes_at_step_of_last_checkpoint(
    crash_at: int, reference: Any, tmp_path: Path, quick: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stage has two epochs of three steps, and a checkpoint after every step but the last."""
    config = reference.config(tmp_path)
    with pytest.raises(Crash), steps(monkeypatch, crash_at) as first:
        cli.main(["run", config])
    with steps(monkeypatch) as second:
        assert cli.main(["run", config]) == 0
    together = [*first, *second]
    # two classes with 20 images each, 2 for validation, in batches of 16
    per_stage = 2 * -(-2 * (20 - 2) // 16)
    assert all(together.count(stage) == per_stage for stage in together), (
        "a step was repeated or skipped"
    )
    assert small_run.results(tmp_path / "storage") == reference.expected
    assert not list((tmp_path / "storage" / "checkpoints").rglob("*.safetensors")), (
        "checkpoints must be deleted after the result is stored"
    )


@pytest.mark.slow
def test_without_checkpoints_a_stage_starts_again(
    reference: Any, tmp_path: Path, quick: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = reference.config(tmp_path, cluster={"checkpoint_s": 0.0})
    with pytest.raises(Crash), steps(monkeypatch, 5):
        cli.main(["run", config])
    with steps(monkeypatch) as second:
        assert cli.main(["run", config]) == 0
    assert second.count(second[0]) == 6
    assert small_run.results(tmp_path / "storage") == reference.expected


@pytest.mark.few(1)
@pytest.mark.parametrize("harm", ["flip", "truncate", "remove", "meta"])
def test_damaged_checkpoint_restarts_stage_from_beginning(
    harm: str, reference: Any, tmp_path: Path, quick: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = reference.config(tmp_path)
    with pytest.raises(Crash), steps(monkeypatch, 5):
        cli.main(["run", config])
    (tensors,) = (tmp_path / "storage" / "checkpoints").rglob("*.safetensors")
    damage_file(
        tensors.with_name("latest.json") if harm == "meta" else tensors,
        "truncate" if harm == "meta" else harm,
    )
    with steps(monkeypatch) as second:
        assert cli.main(["run", config]) == 0
    assert second.count(second[0]) == 6, "the stage must start from the beginning"
    assert small_run.results(tmp_path / "storage") == reference.expected


# ---- two drivers ---------------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.parametrize("trial", range(2))
def test_simultaneous_drivers_publish_every_stage_once(
    trial: Any, reference: Any, tmp_path: Path
) -> None:
    configs = [reference.config(tmp_path), reference.config(tmp_path)]
    processes = [
        small_run.start(["run", config], tmp_path / f"out{i}.txt")
        for i, config in enumerate(configs)
    ]
    for i, process in enumerate(processes):
        process.join(900)
        assert process.exitcode == 0, (tmp_path / f"out{i}.txt").read_text()
        assert "tried again" not in (tmp_path / f"out{i}.txt").read_text()
    storage = tmp_path / "storage"
    assert small_run.results(storage) == reference.expected
    for folder in (storage / "stages").iterdir():
        assert len(list(folder.iterdir())) == 2, f"{folder} must hold one attempt and its manifest"
