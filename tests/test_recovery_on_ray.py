"""Tests of the recovery of runs on Ray after any of their processes is killed.

The run ends with the same results and leaves no process behind.
"""

from __future__ import annotations

import contextlib
import functools
import json
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import safetensors.torch
import torch

from tests import small_run
from tests.recovery import MOMENTS, Reference, check_recovered, published_attempts


def on_ray(reference: Reference, folder: Path, workers: int = 1, **changes: Any) -> str:
    return reference.config(
        folder,
        cluster={"workers": workers, "groups": 1, "address": "local", "retries": 3},
        **changes,
    )


@pytest.mark.few(1)
def test_one_ray_worker_gives_the_results_of_a_single_process(
    reference: Any, tmp_path: Path
) -> None:
    small_run.run(["run", on_ray(reference, tmp_path)], tmp_path / "out.txt")
    assert small_run.results(tmp_path / "storage") == reference.expected
    assert all(
        m["workers"] == 1
        for m in small_run.manifests(tmp_path / "storage").values()
        if "workers" in m
    )


@pytest.mark.slow
def test_two_ray_workers_give_equal_results_up_to_rounding(reference: Any, tmp_path: Path) -> None:
    """Gradients are summed in another order, so weights differ in their last bits.

    Predictions may differ for a few images.
    """
    small_run.run(["run", on_ray(reference, tmp_path, 2)], tmp_path / "out.txt")
    results = small_run.results(tmp_path / "storage")
    assert results.keys() == reference.expected.keys()
    for stage_id, expected in reference.expected.items():
        if stage_id.startswith("data/"):
            assert results[stage_id] == expected
        elif stage_id.endswith("/evaluate"):
            for one, two in zip(expected["rows"], results[stage_id]["rows"], strict=True):
                assert one["total"] == two["total"]
                assert abs(one["correct"] - two["correct"]) <= 2
        else:
            compare(reference.folder / "storage", tmp_path / "storage", stage_id)


def compare(one: Path, two: Path, stage_id: str) -> None:
    """Check that the tensors of a stage's files are nearly equal.

    At most one of a hundred mask bits may differ.
    """
    for file in sorted(small_run.manifests(one)[stage_id]["files"]):
        if not file.endswith(".safetensors"):
            continue
        left, right = (
            safetensors.torch.load_file(small_run.artifact(storage, stage_id, file))
            for storage in (one, two)
        )
        assert left.keys() == right.keys()
        for name, tensor in left.items():
            if tensor.is_floating_point():
                torch.testing.assert_close(tensor, right[name], rtol=1e-3, atol=1e-4)
            else:
                assert (tensor != right[name]).float().mean() <= 0.01


def descendants(pid: int) -> list[psutil.Process]:
    children: list[psutil.Process] = []
    with contextlib.suppress(psutil.NoSuchProcess):
        children = psutil.Process(pid).children(recursive=True)
    return children


def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    return [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


def gone_within(processes: list[psutil.Process], seconds: float) -> list[str]:
    """Wait until no process runs; kill the remaining ones, and return their command lines."""
    deadline = time.monotonic() + seconds
    while alive(processes) and time.monotonic() < deadline:
        time.sleep(0.2)
    left = []
    for process in alive(processes):
        with contextlib.suppress(psutil.NoSuchProcess):
            left.append(" ".join(process.cmdline())[:120])
            process.kill()
    return left


def train_workers(pid: int) -> list[psutil.Process]:
    processes = []
    for process in descendants(pid):
        with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            if "TrainWorker" in " ".join(process.cmdline()):
                processes.append(process)
    return processes


def kill(process: psutil.Process) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.kill()


@pytest.fixture(scope="module")
def ray_seconds(reference: Any, tmp_path_factory: pytest.TempPathFactory) -> float:
    """Return how many seconds an uninterrupted run takes on Ray."""
    folder = tmp_path_factory.mktemp("ray")
    started = time.monotonic()
    small_run.run(["run", on_ray(reference, folder)], folder / "out.txt")
    return time.monotonic() - started


VICTIMS = ["driver", "worker", "tree"]


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("victim", VICTIMS)
@pytest.mark.parametrize("trial", range(4))
def test_ray_run_recovers_from_any_killed_process(
    trial: Any, victim: Any, workers: int, reference: Any, ray_seconds: Any, tmp_path: Path
) -> None:
    """The 24 trials draw their moments from the part of the run in which workers exist.

    With two workers, the reference is an uninterrupted run with two workers.
    """
    config = on_ray(reference, tmp_path, workers)
    moment = random.Random(f"{MOMENTS}-{victim}-{workers}-{trial}").uniform(0.4, 1.0) * ray_seconds
    process = small_run.start(["run", config], tmp_path / "killed.txt")
    started = time.monotonic()
    family: list[psutil.Process] = []
    while time.monotonic() - started < moment and process.is_alive():
        family = descendants(process.pid) or family
        time.sleep(0.1)
    family = descendants(process.pid) or family
    if victim == "worker":
        processes = train_workers(process.pid)
        if processes:
            kill(random.Random(trial).choice(processes))
        process.join(900)
        output = (tmp_path / "killed.txt").read_text()
        assert process.exitcode == 0, output
    else:
        process.kill()
        for child in family if victim == "tree" else []:
            kill(child)
        process.join()
    before = published_attempts(tmp_path)
    output = small_run.run(["run", config], tmp_path / "again.txt")
    # two agents of Ray check only once a minute whether to exit
    assert not gone_within(family, 100), "processes of the run are left behind"
    after = small_run.attempts(tmp_path / "storage")
    assert before.items() <= after.items()
    assert victim != "worker" or "nothing to do" in output
    assert small_run.results(tmp_path / "storage") == (
        reference.expected if workers == 1 else two_workers(reference)
    )


@pytest.mark.slow
def test_killed_worker_and_driver_end_with_equal_digests(chain: Any, tmp_path: Path) -> None:
    """One of two workers is killed after a checkpoint of the second task, and the run recovers.

    Then all processes are killed in its balanced step, and the same command resumes the run. The
    reference is an uninterrupted run with two workers.
    """
    longer = {
        "train": {"epochs": 60},
        "methods": {"dytox": {"memory": 8, "steps": {"finetune": {"epochs": 200}}}},
    }
    small_run.run(["run", on_ray(chain, tmp_path / "whole", 2, **longer)], tmp_path / "whole.txt")
    config = on_ray(chain, tmp_path, 2, **longer)
    process = small_run.start(["run", config], tmp_path / "killed.txt")
    until_checkpoint(tmp_path, "dytox/b/train", process)
    kill(train_workers(process.pid)[-1])
    until_checkpoint(tmp_path, "dytox/b/finetune", process)
    family = descendants(process.pid)
    process.kill()
    for child in family:
        kill(child)
    process.join()
    before = published_attempts(tmp_path)
    assert "dytox/b/herd" in before
    assert "dytox/b/finetune" not in before
    small_run.run(["run", config], tmp_path / "again.txt")
    assert not gone_within(family, 100)
    assert before.items() <= small_run.attempts(tmp_path / "storage").items()
    assert small_run.results(tmp_path / "storage") == small_run.results(
        tmp_path / "whole" / "storage"
    )


def until_checkpoint(folder: Path, stage_id: str, process: Any, out: str = "killed.txt") -> None:
    """Wait until a stage in training has a checkpoint."""
    record = folder / "storage" / "runs" / "small" / "run.json"
    while process.is_alive():
        keys = (
            {stage["id"]: stage["key"] for stage in json.loads(record.read_text())["stages"]}
            if record.exists()
            else {}
        )
        if (
            stage_id in keys
            and (folder / "storage" / "checkpoints" / keys[stage_id] / "latest.json").exists()
        ):
            return
        time.sleep(0.02)
    raise AssertionError(f"{stage_id} came to its end: {(folder / out).read_text()}")


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["ray::QueueActor", "raylet/raylet", "gcs_server"])
def test_killed_ray_is_reported_and_same_command_resumes(
    victim: str, reference: Any, tmp_path: Path
) -> None:
    config = on_ray(reference, tmp_path)
    process, killed = small_run.start(["run", config], tmp_path / "killed.txt"), False
    while process.is_alive() and not killed:
        if (
            len(published_attempts(tmp_path)) >= 4
        ):  # the data and the backbone are done: a worker group runs
            for child in descendants(process.pid):
                with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                    if victim in " ".join(child.cmdline()):
                        child.kill()
                        killed = True
        time.sleep(0.05)
    process.join(900)
    output = (tmp_path / "killed.txt").read_text()
    assert killed
    assert "Traceback" not in output
    if process.exitcode:  # without a raylet, running workers may still finish
        assert process.exitcode == 2, output
        assert output.splitlines()[-1].startswith("accrete: Ray itself broke down")
    check_recovered(
        reference,
        tmp_path,
        published_attempts(tmp_path),
        small_run.run(["run", config], tmp_path / "again.txt"),
    )


@pytest.mark.slow
def test_run_ends_if_terminated_during_ingest(tmp_path: Path) -> None:
    """The run is started as by a user, and its process must also end by itself."""
    cards = {"base": small_run.make_card(tmp_path, "base", "01")}
    for name in "ab":
        cards[name] = small_run.make_card(tmp_path, name, "0123456789", train=160)
    body = small_run.make_body(tmp_path, cards, cluster={"workers": 1, "address": "local"})
    config = small_run.write_config(tmp_path / "config.yaml", body)
    out = tmp_path / "out.txt"
    with out.open("w") as stream:
        process = subprocess.Popen(
            [sys.executable, "-m", "pipeline", "run", config],
            stdout=stream,
            stderr=subprocess.STDOUT,
        )
    while process.poll() is None and "data/base: " not in out.read_text():
        time.sleep(0.02)
    process.terminate()
    try:
        code = process.wait(900)
    finally:
        process.kill()
    output = out.read_text()
    assert code == 143, output
    assert "accrete: stopped on request; " in output
    assert not ("data/a: " in output and "data/b: " in output), "the stop came after both ingests"


@functools.cache
def reference_of_two(folder: Path, config: str) -> dict[str, Any]:
    small_run.run(["run", config], folder / "two.txt")
    return small_run.results(folder / "two" / "storage")


def two_workers(reference: Reference) -> dict[str, Any]:
    return reference_of_two(reference.folder, on_ray(reference, reference.folder / "two", 2))
