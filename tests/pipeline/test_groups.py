"""Promises of the driver's worker groups, stepped by hand with a Ray that is none: who is started,
dismissed, given up, and what is said of it."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray.exceptions

from pipeline.config import ClusterSettings
from pipeline.graph.stage import Stage
from pipeline.graph.store import Store
from pipeline.graph.walk import Event, EventKind
from pipeline.launch import groups
from pipeline.launch.executor import NO_ROOM
from pipeline.launch.groups import RayExecutor, Running, sweep
from pipeline.launch.queue import Queue
from tests.pipeline.nodes import nodes_of
from workers import preemption
from workers.errors import UserError
from workers.storage.artifact import temporary_name


class Remote:
    """The queue as an actor: its methods answer at once, `get_cluster_state` with what stands in
    `around`."""

    def __init__(self, around: Any) -> None:
        self.queue, self.around = Queue(), around

    def __getattr__(self, name: str) -> Any:
        call = (lambda: self.around) if name == "get_cluster_state" else getattr(self.queue, name)
        return SimpleNamespace(remote=call)


class Task:
    """Of a group's trainer; `end` is what it returns or raises."""

    def __init__(self, workers: int) -> None:
        self.workers, self.end = workers, None


class Driver(RayExecutor):
    """On a Ray in which nothing runs."""

    def __init__(self, tmp_path: Any, cpus: list[float], width: int = 9, **cluster: Any) -> None:
        self.said: list[str] = []
        self.cluster, self.width, self.name, self.broken = (
            ClusterSettings(**{"workers": 1, **cluster}),
            width,
            "01-a",
            False,
        )
        self.store, self.progress = (
            Store(str(tmp_path)),
            lambda event: self.said.append(event.message),
        )
        self.around = nodes_of([{"CPU": n} for n in cpus])
        self.queue = Remote(self.around)
        self.groups, self.places, self.used, self.stages, self.outbox, self.ingests = (
            {},
            {},
            set(),
            {},
            [],
            [],
        )
        self.local_waiting, self.left_since, self.looked = [], None, time.monotonic()
        self.cancelled: list[Task] = []
        self.ray = SimpleNamespace(
            exceptions=ray.exceptions,
            get=self.got,
            wait=self.waited,
            cancel=lambda task, force: self.cancelled.append(task),
            available_resources=lambda: {"CPU": 1.0},
        )

    def got(self, answer: Any, timeout: float = 0) -> Any:
        if isinstance(answer, Task):
            if isinstance(answer.end, BaseException):
                raise answer.end
            return answer.end
        return answer

    def waited(self, tasks: list[Task], **_: Any) -> tuple[list[Task], list[Task]]:
        return [task for task in tasks if task.end is not None], []

    def _start(self, index: int, workers: int, starts: int = 0) -> None:
        self.groups[index] = Running(Task(workers), workers, starts + 1, time.monotonic())

    def sizes(self) -> dict[int, int]:
        return {index: group.workers for index, group in self.groups.items()}

    def holding(self, index: int, *nodes: str) -> Stage:
        """Group `index` comes up on these nodes and takes a stage."""
        stage = Stage(f"s{index}", "train", f"key{index}", {}, ())
        self.submit(replace(stage, job=SimpleNamespace()), 0)
        self.poll()
        self.queue.queue.joined(index, list(nodes))
        assert self.queue.queue.next(index).id == stage.id
        self.poll()
        return stage

    def changed(self, around: Any) -> list[Any]:
        """The cluster is another one, and it is time to look."""
        self.queue.around, self.looked = around, 0.0
        return self.poll()


def cpus(*counts: float, **how: Any) -> Any:
    return nodes_of([{"CPU": n} for n in counts], **how)


def test_there_are_as_many_groups_as_there_is_room_for_and_more_when_nodes_join(
    tmp_path: Path,
) -> None:
    driver = Driver(tmp_path, [1.0, 1.0], address="local")
    driver.holding(0, "0")
    assert driver.sizes() == {0: 1, 1: 1}
    driver.changed(cpus(1.0, 1.0, 2.0))
    assert driver.sizes() == {0: 1, 1: 1, 2: 1, 3: 1}
    assert driver.said[-1] == "node 10.0.0.2 (2) joined (2 CPUs)"


def test_what_a_lost_node_held_is_offered_again_at_once_and_has_used_no_try(tmp_path: Path) -> None:
    driver = Driver(tmp_path, [1.0, 1.0])
    stage = driver.holding(0, "0")
    driver.changed(cpus(1.0, 1.0, lost=[0]))
    [event] = driver.poll()
    assert (event.kind, event.stage) == ("moved", stage.id)
    assert event.message == "node 10.0.0.0 (0) was lost, and it has no checkpoint yet"
    assert (
        driver.said[0]
        == "node 10.0.0.0 (0) was lost; what ran on it goes on from its last checkpoint"
    )


def test_a_group_that_ends_hides_nothing_that_happens_to_other_nodes_meanwhile(
    tmp_path: Path,
) -> None:
    driver = Driver(tmp_path, [1.0, 1.0, 1.0])
    driver.holding(0, "0")
    other = driver.holding(1, "1")
    driver.groups[0].task.end = ""
    driver.queue.around = cpus(1.0, 1.0, 1.0, leaving=[1], lost=[2])
    driver.looked = 0.0
    driver.poll()
    driver.poll()
    assert (
        "node 10.0.0.1 (1) is going to be taken away; what runs on it is saved and moved"
        in driver.said
    )
    assert any(
        line.startswith("node 10.0.0.2 (2) was lost; nothing of this run") for line in driver.said
    )
    assert driver.queue.queue.post(1, Event(EventKind.PROGRESS, other.id)) is True, (
        "it is told to leave"
    )


def test_an_elastic_group_grows_and_shrinks_between_two_stages(tmp_path: Path) -> None:
    driver = Driver(tmp_path, [2.0], width=1, workers=4, min_workers=1)
    driver.holding(0, "0")
    assert driver.sizes() == {0: 2}
    for count in (4.0, 1.0):
        driver.changed(cpus(count))
        assert driver.queue.queue.going == {0: False}, "it ends with what it does"
        driver.groups[0].task.end = ""
        driver.poll()
        assert driver.sizes() == {0: int(count)}
        driver.queue.queue.joined(0, ["0"])
        driver.poll()


def test_a_group_that_waits_for_a_node_that_is_gone_is_started_anew_with_what_there_is(
    tmp_path: Path,
) -> None:
    driver = Driver(tmp_path, [1.0, 1.0], width=1, workers=2, min_workers=1)
    driver.submit(Stage("s", "train", "key", {}, (), job=SimpleNamespace()), 0)
    driver.poll()
    first = driver.groups[0].task
    driver.changed(cpus(1.0, 1.0, lost=[1]))
    assert driver.cancelled == [first]
    first.end = ray.exceptions.WorkerCrashedError()
    driver.poll()
    assert driver.sizes() == {0: 1}


def test_waiting_for_room_is_no_failed_start_and_failed_starts_end_the_run(tmp_path: Path) -> None:
    driver = Driver(tmp_path, [1.0], width=1, workers=2, min_workers=1, retries=1)
    driver.submit(Stage("s", "train", "key", {}, (), job=SimpleNamespace()), 0)
    driver.poll()
    for _ in range(5):
        driver.groups[0].task.end = NO_ROOM
        driver.poll()
    while driver.groups[0].starts <= driver.cluster.retries:
        driver.groups[0].task.end = ValueError("no disk")
        driver.poll()
    driver.groups[0].task.end = ValueError("no disk")
    with pytest.raises(UserError, match=r"could not be started in \d+ tries: ValueError: no disk"):
        driver.poll()


def test_a_head_that_does_not_answer_ends_the_run_with_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver(tmp_path, [1.0])
    driver.holding(0, "0")

    def silent(*_: Any, timeout: float = 0) -> Any:
        raise ray.exceptions.GetTimeoutError("Get timed out")

    driver.ray.get = silent
    with pytest.raises(
        UserError,
        match=rf"its head node has not answered for {groups.ANSWER_S:.0f} s\); what finished is "
        r"kept",
    ):
        driver.poll()
    assert driver.broken


def test_a_client_that_has_lost_its_cluster_says_so_and_names_no_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver(tmp_path, [1.0])
    driver.holding(0, "0")

    def lost(*_: Any, timeout: float = 0) -> Any:
        raise ConnectionError("Failed to reconnect within the reconnection grace period (30s)")

    driver.ray.get = lost
    with pytest.raises(
        UserError,
        match=r"the connection to the Ray cluster was lost \(Failed to reconnect .*; what "
        r"finished is kept",
    ):
        driver.poll()
    assert driver.broken


def test_who_is_told_to_leave_dismisses_its_groups_and_goes_when_they_have_gone(
    tmp_path: Path,
) -> None:
    driver = Driver(tmp_path, [1.0, 1.0])
    driver.holding(0, "0")
    preemption.requested.set()
    try:
        driver.poll()
        assert driver.queue.queue.going == {0: True, 1: True}
        assert driver.cancelled == [driver.groups[1].task], (
            "it was not up: nothing is saved by waiting for it"
        )
        for group in driver.groups.values():
            group.task.end = ""
        with pytest.raises(preemption.Preempted):
            driver.poll()
        assert driver.groups == {}, "none is started again"
    finally:
        preemption.requested.clear()


def test_the_books_of_drivers_that_were_killed_are_swept_and_those_of_others_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead = os.fork()
    if not dead:
        os._exit(0)
    os.waitpid(dead, 0)
    mine = temporary_name()
    others = [temporary_name(), "elsewhere-9-0", mine.replace(f"-{os.getpid()}-", "-1-")]
    names = [
        f"group-{name}-0" for name in (mine, mine.replace(f"-{os.getpid()}-", f"-{dead}-"), *others)
    ] + ["search-small"]
    for name in names:
        (tmp_path / "ray" / name).mkdir(parents=True)
    sweep(Store(str(tmp_path)), mine)
    assert {path.name for path in (tmp_path / "ray").iterdir()} == {*names[2:]}
