"""Two hundred kills, of whatever takes part in a run: the same digests at the end, nobody left
behind, nothing half-written left."""

from __future__ import annotations

import random
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests import small_run
from tests.recovery import MOMENTS, Reference, judge, standing
from tests.several_nodes import Nodes, nodes_up, title

pytestmark = [pytest.mark.slow, pytest.mark.timeout(5400)]
IN_PROCESS, ON_RAY = 120, 80
KINDS = {
    "worker": "TrainWorker",
    "controller": "TrainController",
    "segment": "run_segment",
    "queue": "QueueActor",
    "driver": "",
    "node": "",
}
OURS = [
    *filter(None, KINDS.values()),
    "PlacementGroupCleaner",
    "DatasetManager",
    "SynchronizationActor",
]


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """A star and a chain beside each other."""
    return Reference.made_in(
        tmp_path_factory.mktemp("both"),
        ("base", "a", "b"),
        methods={"meat": {}, "hat": {}},
        train={"epochs": 6},
    )


def leftovers(storage: Path, before: set[str]) -> list[str]:
    """Files that only a process under way may have, and attempts beside the one that stands."""
    parts = [
        str(path)
        for path in storage.rglob("*")
        if path.suffix == ".part" or path.parent.name == "ray" or path.name.startswith(".probe")
    ]
    parts += [
        str(stage)
        for stage in (storage / "stages").iterdir()
        if sum(path.is_dir() for path in stage.iterdir()) != 1
    ]
    return parts + [
        name
        for name in {path.name for path in Path(tempfile.gettempdir()).iterdir()} - before
        if "accrete" in name
    ]


def names_in_tmp() -> set[str]:
    return {path.name for path in Path(tempfile.gettempdir()).iterdir()}


def test_a_run_in_one_process_is_killed_at_120_moments(both: Any, tmp_path: Path) -> None:
    """Life after life of one storage, until it is done, and then of the next one."""
    rng, kills, storages, before = random.Random(MOMENTS), 0, 0, names_in_tmp()
    while kills < IN_PROCESS:
        storage_folder = tmp_path / str(storages)
        config, storages = both.config(storage_folder), storages + 1
        while kills < IN_PROCESS:
            process = small_run.start(["run", config], storage_folder / "killed.txt")
            process.join(rng.uniform(0.05, 0.6) * both.seconds)
            if not process.is_alive():
                break
            process.kill()
            process.join()
            kills += 1
        attempts = standing(storage_folder)
        judge(
            both,
            storage_folder,
            attempts,
            small_run.run(["run", config], storage_folder / "again.txt"),
        )
        assert leftovers(storage_folder / "storage", before) == []


def test_80_kills_of_drivers_workers_controllers_queues_and_nodes_end_with_the_same_digests(
    both: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rng, kills, storages, before = (
        random.Random(MOMENTS + 1),
        dict.fromkeys(KINDS, 0),
        0,
        names_in_tmp(),
    )
    with nodes_up([1, 1]) as nodes, capsys.disabled():
        while sum(kills.values()) < ON_RAY:
            storage_folder, storages = tmp_path / str(storages), storages + 1
            config = both.config(
                storage_folder,
                cluster={
                    "workers": 1,
                    "address": nodes.address,
                    "retries": 100,
                    "checkpoint_s": 1e-6,
                },
            )
            done: dict[str, str] = {}
            driver = small_run.start(["run", config], storage_folder / "out.txt")
            while sum(kills.values()) < ON_RAY and (kind := struck(rng, nodes, driver)):
                kills[kind] += 1
                print(kills, flush=True)
                if not driver.is_alive():
                    driver.join()
                    assert done.items() <= (done := standing(storage_folder)).items()
                    driver = small_run.start(["run", config], storage_folder / "out.txt")
            driver.join(240)
            assert driver.exitcode in (0, 2), (storage_folder / "out.txt").read_text()
            small_run.run(["run", config], storage_folder / "again.txt")
            assert done.items() <= small_run.attempts(storage_folder / "storage").items(), (
                "a result that stood was computed again"
            )
            assert small_run.results(storage_folder / "storage") == both.expected
        assert all(kills.values()), kills
        until = time.monotonic() + 120
        while (left := our_processes(nodes)) and time.monotonic() < until:
            time.sleep(0.5)
        assert not left, "processes that only a run needs are left behind"
    for number in range(storages):
        assert leftovers(tmp_path / str(number) / "storage", before) == []


def our_processes(nodes: Nodes) -> list[psutil.Process]:
    return [
        process for process in nodes.all_processes() if any(name in title(process) for name in OURS)
    ]


def struck(rng: random.Random, nodes: Nodes, driver: Any) -> str:
    """Waits until a worker is at work, or for so long that something hangs, and a moment more; then
    kills something. What it was; empty where the driver has ended."""
    until = time.monotonic() + 120
    while driver.is_alive() and not any(
        "TrainWorker" in title(process) for process in our_processes(nodes)
    ):
        assert time.monotonic() < until, "no worker came up"
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
            return struck(rng, nodes, driver)
        rng.choice(targets).kill()
    return kind
