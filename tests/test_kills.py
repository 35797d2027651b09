"""Tests of 200 kills of processes and nodes that take part in a run.

The digests of the results stay the same, and no process or partial file is left behind.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests import small_run
from tests.recovery import MOMENTS, Reference, check_recovered, published_attempts
from tests.several_nodes import Nodes, nodes_up, title

pytestmark = [pytest.mark.slow, pytest.mark.timeout(5400)]
IN_PROCESS, ON_RAY = 120, 80
KINDS = {
    "worker": "TrainWorker",
    "controller": "TrainController",
    "segment": "run_worker_group",
    "queue": "QueueActor",
    "driver": "",
    "node": "",
}
PROCESS_TITLES = [
    *filter(None, KINDS.values()),
    "PlacementGroupCleaner",
    "DatasetManager",
    "SynchronizationActor",
]


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """Make an uninterrupted run of two methods: a star and a chain."""
    return Reference.made_in(
        tmp_path_factory.mktemp("both"),
        ("base", "a", "b"),
        methods={"meat": {}, "hat": {}},
        train={"epochs": 6},
    )


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Create a separate folder for temporary files, because other tests run at the same time."""
    with tempfile.TemporaryDirectory(prefix="acc", dir="/tmp") as folder:
        monkeypatch.setenv("TMPDIR", folder)  # for the nodes that the test starts
        yield folder


def leftovers(storage: Path, temporary: str) -> list[str]:
    """Return the paths that a finished run must not leave behind.

    These are temporary files in the storage, stages without exactly one attempt, and temporary
    files of this project in the folder `temporary`.
    """
    paths = []
    for path in storage.rglob("*"):
        is_temporary = path.suffix == ".part" or path.name.startswith(".probe")
        if is_temporary or path.parent.name == "ray":
            paths.append(str(path))
    for stage in (storage / "stages").iterdir():
        attempts = [path for path in stage.iterdir() if path.is_dir()]
        if len(attempts) != 1:
            paths.append(str(stage))
    paths += [str(path) for path in Path(temporary).iterdir() if "accrete" in path.name]
    return paths


def test_run_in_one_process_recovers_from_120_kills(
    both: Any, tmp_path: Path, temporary: str
) -> None:
    """A run is killed and started again until it is done; then the next run starts."""
    rng = random.Random(MOMENTS)
    kills = 0
    storages = 0
    while kills < IN_PROCESS:
        storage_folder = tmp_path / str(storages)
        config = both.config(storage_folder)
        storages += 1
        while kills < IN_PROCESS:
            out = storage_folder / "killed.txt"
            process = small_run.start(["run", config], out, temporary=temporary)
            process.join(rng.uniform(0.05, 0.6) * both.seconds)
            if not process.is_alive():
                break
            process.kill()
            process.join()
            kills += 1
        attempts = published_attempts(storage_folder)
        again = storage_folder / "again.txt"
        output = small_run.run(["run", config], again, temporary=temporary)
        check_recovered(both, storage_folder, attempts, output)
        assert leftovers(storage_folder / "storage", temporary) == []


def test_eighty_kills_end_with_equal_digests(
    both: Any, tmp_path: Path, temporary: str, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = random.Random(MOMENTS + 1)
    kills = dict.fromkeys(KINDS, 0)
    storages = 0
    with nodes_up([1, 1]) as nodes, capsys.disabled():
        while sum(kills.values()) < ON_RAY:
            storage_folder = tmp_path / str(storages)
            storages += 1
            cluster = {
                "workers": 1,
                "address": nodes.address,
                "retries": 100,
                "checkpoint_s": 1e-6,
            }
            config = both.config(storage_folder, cluster=cluster)
            done: dict[str, str] = {}
            out = storage_folder / "out.txt"
            driver = small_run.start(["run", config], out, temporary=temporary)
            while sum(kills.values()) < ON_RAY:
                kind = kill_at_random(rng, nodes, driver)
                if not kind:
                    break
                kills[kind] += 1
                print(kills, flush=True)
                if not driver.is_alive():
                    driver.join()
                    done_before = done
                    done = published_attempts(storage_folder)
                    assert done_before.items() <= done.items()
                    driver = small_run.start(["run", config], out, temporary=temporary)
            driver.join(900)
            assert driver.exitcode in (0, 2), out.read_text()
            small_run.run(["run", config], storage_folder / "again.txt", temporary=temporary)
            assert done.items() <= small_run.attempts(storage_folder / "storage").items(), (
                "a published result was computed again"
            )
            assert small_run.results(storage_folder / "storage") == both.expected
        assert all(kills.values()), kills
        deadline = time.monotonic() + 900
        while our_processes(nodes) and time.monotonic() < deadline:
            time.sleep(0.5)
        assert not our_processes(nodes), "processes of a run are left behind"
    for number in range(storages):
        assert leftovers(tmp_path / str(number) / "storage", temporary) == []


def our_processes(nodes: Nodes) -> list[psutil.Process]:
    """Return the processes that only a run of this project starts."""
    processes = []
    for process in nodes.all_processes():
        command = title(process)
        if any(name in command for name in PROCESS_TITLES):
            processes.append(process)
    return processes


def has_worker(nodes: Nodes) -> bool:
    """Return whether a training worker runs on any node."""
    return any("TrainWorker" in title(process) for process in our_processes(nodes))


def kill_at_random(rng: random.Random, nodes: Nodes, driver: Any) -> str:
    """Kill a random process or node, up to 1.5 s after a training worker has started.

    Returns:
        Its kind, a key of KINDS, or "" if the driver has ended.

    Raises:
        AssertionError: if no worker starts within 900 s.
    """
    deadline = time.monotonic() + 900
    while driver.is_alive() and not has_worker(nodes):
        assert time.monotonic() < deadline, "no training worker started"
        time.sleep(0.1)
    driver.join(rng.uniform(0, 1.5))
    if not driver.is_alive():
        return ""
    kind = rng.choice([*KINDS])
    if kind == "driver":
        driver.kill()
        driver.join()
    elif kind == "node":
        nodes.kill(rng.choice(sorted(nodes.cluster.worker_nodes, key=lambda node: node.node_id)))
        nodes.add(1)
    else:
        targets = [process for process in our_processes(nodes) if KINDS[kind] in title(process)]
        if not targets:
            return kill_at_random(rng, nodes, driver)
        rng.choice(targets).kill()
    return kind
