"""Tests of the driver's reports and of the worker groups that it starts, dismisses and abandons.

The tests step the driver by hand. Its fake Ray runs no task.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray.exceptions

from pipeline.config.settings import ClusterSettings
from pipeline.graph.retries import RetryPolicy
from pipeline.graph.stage import IngestJob, Stage
from pipeline.graph.store import Store
from pipeline.graph.walk import Event, EventKind
from pipeline.launch import groups
from pipeline.launch.cluster import ClusterState
from pipeline.launch.groups import LOOK_S, RayExecutor, RaySession
from pipeline.launch.queue import STRIDE, Queue, Rank
from pipeline.launch.train import NO_ROOM
from tests.pipeline.nodes import nodes_of
from workers import preemption
from workers.errors import UserError
from workers.storage.artifact import temporary_name


class QueueHandle:
    """The handle of a queue actor that answers at once.

    `get_cluster_state` returns `state`; other calls go to `queue`. releases: number of
    `release_orphans` calls.
    """

    def __init__(self, state: ClusterState) -> None:
        self.clock = Clock()
        self.queue = Queue(self.clock)
        self.state = state
        self.releases = 0

    def __getattr__(self, name: str) -> Any:
        if name == "get_cluster_state":
            return SimpleNamespace(remote=lambda: self.state)
        if name == "release_orphans":
            return SimpleNamespace(remote=self._release_orphans)
        return SimpleNamespace(remote=getattr(self.queue, name))

    def _release_orphans(self) -> None:
        self.releases += 1


class Task:
    """The Ray task that runs a group. end: what it returns or raises; None while it runs."""

    def __init__(self) -> None:
        self.end: Any = None


class IdleRay:
    """A fake of the module `ray` that runs no task. error: what `get` raises, or None.

    `get` returns answers of the queue unchanged, because `QueueHandle` returns values.
    """

    exceptions = ray.exceptions

    def __init__(self) -> None:
        self.cancelled: list[Task] = []
        self.error: Exception | None = None

    def remote(self, **options: Any) -> Callable[[Any], Any]:
        """Return a decorator of functions whose `remote` returns a new `Task`."""
        return lambda function: SimpleNamespace(remote=lambda *arguments: Task())

    def get(self, reference: Any, timeout: float = 0) -> Any:
        """Return a value or the result of a task, or raise the task's exception."""
        if self.error is not None:
            raise self.error
        if not isinstance(reference, Task):
            return reference
        if isinstance(reference.end, BaseException):
            raise reference.end
        return reference.end

    def wait(self, tasks: list[Task], **options: Any) -> tuple[list[Task], list[Task]]:
        """Return the tasks that have ended, and an empty list."""
        return [task for task in tasks if task.end is not None], []

    def cancel(self, task: Task, force: bool) -> None:
        """Record the task as cancelled."""
        self.cancelled.append(task)

    def available_resources(self) -> dict[str, float]:
        """Return one CPU."""
        return {"CPU": 1.0}

    def cluster_resources(self) -> dict[str, float]:
        """Return one CPU."""
        return {"CPU": 1.0}

    def is_initialized(self) -> bool:
        """Return True, so that tasks can be cancelled."""
        return True

    def shutdown(self) -> None:
        """Do nothing."""


class Clock:
    """A clock in seconds. Only tests change `now`."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Driver:
    """A `RayExecutor` on a fake Ray. `notes` collects the messages that it reports."""

    def __init__(self, folder: Path, cpus: list[float], width: int = 9, **cluster: Any) -> None:
        self.notes: list[str] = []
        self.starts: dict[str, str] = {}  # stage -> reported place
        self.group_counts: list[dict[str, int]] = []  # as reported
        self.ray = IdleRay()
        state = nodes_of([{"CPU": count} for count in cpus])
        self.handle = QueueHandle(state)
        self.clock = self.handle.clock
        self.queue = self.handle.queue
        self.executor = RayExecutor(
            Store(str(folder)),
            ClusterSettings(**{"workers": 1, **cluster}),
            run_on_driver=lambda stage: {},
            progress=self.report,
            width=width,
            session=RaySession(self.ray, self.handle, "01-a", state),
            clock=self.clock,
        )
        self.groups = self.executor.groups
        self.poll = self.executor.poll

    def report(self, event: Event) -> None:
        """Record an event that the executor reports."""
        if event.kind is EventKind.STARTED:
            self.starts[event.stage] = event.body["where"]
        elif event.kind is EventKind.GROUPS:
            self.group_counts.append(event.body)
        else:
            self.notes.append(event.message)

    def sizes(self) -> dict[int, int]:
        """Return group -> its number of workers."""
        return {index: group.workers for index, group in self.groups.items()}

    def end_group(self, index: int, end: Any) -> None:
        """End the task of a group: `end` is what it returns or raises."""
        self.groups[index].task.end = end

    def submit(self, name: str, step: str = "train") -> Stage:
        """Submit a stage to the executor, and return it."""
        stage = Stage(name, step, f"key-{name}", {}, (), job=SimpleNamespace())
        self.executor.submit(stage, 0)
        self.poll()
        return stage

    def run_stage_on(self, index: int, *nodes: str, gpu: str = "") -> Stage:
        """Start a group on these nodes, let it take a new stage, and return the stage."""
        stage = self.submit(f"s{index}")
        self.queue.join(index, [Rank(node, gpu) for node in nodes])
        taken = self.queue.next_stage(index)
        assert isinstance(taken, Stage)
        assert taken.id == stage.id
        self.poll()
        return stage

    def change_cluster(self, state: ClusterState) -> list[Event]:
        """Change the cluster, let the executor read its state, and return the events."""
        self.handle.state = state
        self.clock.now += LOOK_S + 1
        return self.poll()


@pytest.fixture
def make_driver(tmp_path: Path) -> Iterator[Callable[..., Driver]]:
    """Return a function that makes a `Driver`; all are closed after the test."""
    drivers = []

    def make(cpus: list[float], width: int = 9, **cluster: Any) -> Driver:
        drivers.append(Driver(tmp_path, cpus, width, **cluster))
        return drivers[-1]

    yield make
    for driver in drivers:
        driver.ray.error = None
        driver.executor.close()


def cpus(*counts: float, **how: Any) -> Any:
    """Return a cluster of nodes with these numbers of CPUs. how: arguments of `nodes_of`."""
    return nodes_of([{"CPU": count} for count in counts], **how)


def test_stage_start_reports_group_node_and_gpu(make_driver: Any) -> None:
    driver = make_driver([1.0, 1.0])
    driver.run_stage_on(0, "0")
    driver.run_stage_on(1, "1", gpu="3")
    assert driver.starts == {"s0": "group 0 on 10.0.0.0", "s1": "group 1 on 10.0.0.1 (GPU 3)"}


def test_the_number_of_groups_is_reported_when_it_changes(make_driver: Any) -> None:
    driver = make_driver([1.0], width=1)
    driver.submit("first")
    for _ in range(3):
        driver.poll()
    driver.queue.join(0, [Rank("0")])
    for _ in range(3):
        driver.poll()
    assert driver.group_counts == [{"up": 0, "starting": 1}, {"up": 1, "starting": 0}]


def test_groups_fill_cluster_and_increase_when_nodes_join(
    make_driver: Any,
) -> None:
    driver = make_driver([1.0, 1.0], address="local")
    driver.submit("first")
    assert driver.sizes() == {0: 1}, "a second group would slow down the start of the first"
    driver.queue.join(0, [Rank("0")])
    driver.poll()
    assert driver.sizes() == {0: 1, 1: 1}
    driver.change_cluster(cpus(1.0, 1.0, 2.0))
    assert driver.sizes() == {0: 1, 1: 1, 2: 1, 3: 1}
    assert driver.notes[-1] == "node 10.0.0.2 (2) joined (2 CPUs)"


def test_groups_for_separate_stages_start_concurrently(make_driver: Any) -> None:
    driver = make_driver([1.0, 1.0, 1.0], address="local")
    for name in ("one", "two"):
        stage = Stage(name, "train", f"key-{name}", {}, (), job=SimpleNamespace())
        driver.executor.submit(stage, 0)
    driver.poll()
    assert driver.sizes() == {0: 1, 1: 1}
    asked = make_driver([1.0, 1.0, 1.0], groups=3)
    asked.submit("one")
    assert asked.sizes() == {0: 1, 1: 1, 2: 1}, "the cluster may add nodes for the requested groups"


def test_stage_of_lost_node_moves_without_using_a_retry(
    make_driver: Any,
) -> None:
    driver = make_driver([1.0, 1.0])
    stage = driver.run_stage_on(0, "0")
    driver.change_cluster(cpus(1.0, 1.0, lost=[0]))
    [event] = driver.poll()
    assert (event.kind, event.stage) == ("moved", stage.id)
    assert event.message == "node 10.0.0.0 (0) was lost, and the stage has no checkpoint yet"
    assert (
        driver.notes[0]
        == "node 10.0.0.0 (0) was lost; its stages continue from their last checkpoints"
    )


def test_unreachable_group_moves_stage_without_retry(
    make_driver: Any,
) -> None:
    """Ray may declare the node dead only half a minute later."""
    driver = make_driver([1.0, 1.0], retries=0)
    stage = driver.run_stage_on(0, "0")
    failure = ray.exceptions.ActorUnavailableError("connection reset", b"0" * 16)
    error: Any = ValueError("Training failed due to worker errors")
    error.worker_failures = {0: failure}
    driver.end_group(0, error)
    driver.poll()
    [event] = driver.poll()
    assert (event.kind, event.stage) == ("moved", stage.id)
    assert event.message == (
        "its workers cannot be reached, their node may be lost, and the stage has no checkpoint yet"
    )
    assert 0 in driver.groups, "another group must be started"


def test_node_lost_after_its_group_ended_is_reported(
    make_driver: Any,
) -> None:
    driver = make_driver([1.0, 1.0])
    driver.run_stage_on(0, "0")
    driver.end_group(0, "")
    driver.poll()
    driver.change_cluster(cpus(1.0, 1.0, lost=[0]))
    driver.poll()
    assert "node 10.0.0.0 (0) was lost; its stages have continued elsewhere" in driver.notes


def test_node_events_are_reported_when_group_ends(
    make_driver: Any,
) -> None:
    driver = make_driver([1.0, 1.0, 1.0])
    driver.run_stage_on(0, "0")
    other = driver.run_stage_on(1, "1")
    driver.end_group(0, "")
    driver.change_cluster(cpus(1.0, 1.0, 1.0, leaving=[1], lost=[2]))
    driver.poll()
    assert "node 10.0.0.1 (1) will be taken away; its stages are saved and moved" in driver.notes
    assert any(
        line.startswith("node 10.0.0.2 (2) was lost; nothing of this run") for line in driver.notes
    )
    assert driver.queue.post(1, Event(EventKind.PROGRESS, other.id)) is True, (
        "the group must be told to stop"
    )


def test_time_limit_ends_workers_and_counts_attempt(
    make_driver: Any,
) -> None:
    driver = make_driver([1.0], stages={"train": {"timeout_s": 60}})
    stage = driver.run_stage_on(0, "0")
    task = driver.groups[0].task
    driver.clock.now += 59
    assert driver.poll() == []
    assert driver.ray.cancelled == []
    driver.clock.now += 2
    driver.poll()
    assert driver.ray.cancelled == [task]
    [event] = driver.poll()
    assert (event.kind, event.stage, event.final) == ("failed", stage.id, False)
    assert event.message.startswith("this attempt at a stage of kind 'train' took longer than 60 s")
    driver.queue.post(0, Event(EventKind.DONE, stage.id))
    assert driver.poll() == [], "events of cancelled workers must be ignored"
    driver.submit(stage.id)
    driver.end_group(0, ray.exceptions.WorkerCrashedError())
    driver.poll()
    assert driver.groups[0].task is not task
    assert driver.groups[0].starts == 1, "the end of the group must not count as a failed start"
    driver.queue.join(0, [Rank("0")])
    assert driver.queue.next_stage(0).id == stage.id
    driver.clock.now += 59
    assert driver.poll() == [], "the second attempt has its own time limit"


def test_stage_kind_without_time_limit_is_not_cancelled(make_driver: Any) -> None:
    driver = make_driver([1.0], stages={"evaluate": {"timeout_s": 60}})
    driver.run_stage_on(0, "0")
    driver.clock.now += 1e6
    driver.poll()
    assert driver.ray.cancelled == []


def test_stages_with_other_resources_run_on_separate_groups(make_driver: Any) -> None:
    driver = make_driver([4.0], stages={"evaluate": {"cpus": 2}})
    driver.run_stage_on(0, "0")
    assert driver.sizes() == {0: 1}
    driver.submit("e", "evaluate")
    assert driver.sizes() == {0: 1, STRIDE: 1}
    assert driver.groups[STRIDE].cluster.cpus_per_worker == 2
    driver.queue.join(STRIDE, [Rank("0")])
    assert driver.queue.next_stage(0) is None or driver.queue.running == {}
    assert driver.queue.next_stage(STRIDE).id == "e"
    driver.poll()
    assert driver.starts["e"] == "group 0 for evaluate on 10.0.0.0"


def test_an_idle_group_ends_for_stages_that_need_its_resources(make_driver: Any) -> None:
    driver = make_driver([2.0], stages={"evaluate": {"cpus": 2}})
    stage = driver.run_stage_on(0, "0")
    driver.queue.post(0, Event(EventKind.DONE, stage.id))
    driver.poll()
    driver.submit("e", "evaluate")
    assert driver.queue.dismissed == {0: False}
    assert STRIDE in driver.groups, "the new group must wait for free resources"
    driver.end_group(0, "")
    driver.poll()
    assert driver.sizes() == {STRIDE: 1}
    driver.submit("t2")
    assert driver.sizes() == {STRIDE: 1} or 0 in driver.groups


def test_stage_that_fits_no_node_is_refused_when_submitted(make_driver: Any) -> None:
    driver = make_driver([2.0], stages={"evaluate": {"cpus": 3}})
    driver.run_stage_on(0, "0")
    with pytest.raises(UserError, match=r"for stages of kind evaluate with 3 CPUs each"):
        driver.submit("e", "evaluate")


def test_number_of_ingest_tasks_follows_configured_cpus(make_driver: Any) -> None:
    driver = make_driver([1.0])
    driver.ray.cluster_resources = lambda: {"CPU": 9.0}
    assert driver.executor._count_ingest_tasks() == 9
    driver = make_driver([1.0], stages={"ingest": {"cpus": 4}})
    driver.ray.cluster_resources = lambda: {"CPU": 9.0}
    assert driver.executor._count_ingest_tasks() == 2


def test_an_elastic_group_grows_and_shrinks_between_two_stages(make_driver: Any) -> None:
    driver = make_driver([2.0], width=1, workers=4, min_workers=1)
    driver.run_stage_on(0, "0")
    assert driver.sizes() == {0: 2}
    for count in (4.0, 1.0):
        driver.change_cluster(cpus(count))
        assert driver.queue.dismissed == {0: False}, "the group may finish its stage"
        driver.end_group(0, "")
        driver.poll()
        assert driver.sizes() == {0: int(count)}
        driver.queue.join(0, [Rank("0")])
        driver.poll()


def test_waiting_group_restarts_on_live_nodes(
    make_driver: Any,
) -> None:
    driver = make_driver([1.0, 1.0], width=1, workers=2, min_workers=1)
    driver.submit("s")
    first = driver.groups[0].task
    driver.change_cluster(cpus(1.0, 1.0, lost=[1]))
    assert driver.ray.cancelled == [first]
    releases = driver.handle.releases
    driver.end_group(0, ray.exceptions.WorkerCrashedError())
    driver.poll()
    driver.poll()
    assert driver.sizes() == {0: 1}
    assert driver.handle.releases > releases, "the reservation of the first group was not released"


def test_failed_starts_end_run_and_waiting_does_not(
    make_driver: Any,
) -> None:
    driver = make_driver([1.0], width=1, workers=2, min_workers=1, retries=1)
    policy = RetryPolicy.of(driver.executor.cluster)
    driver.submit("s")
    for _ in range(5):
        driver.end_group(0, NO_ROOM)
        driver.poll()
    while driver.groups[0].starts <= policy.group:
        driver.end_group(0, ValueError("no disk"))
        driver.poll()
    driver.end_group(0, ValueError("no disk"))
    with pytest.raises(UserError, match=r"could not be started in \d+ tries: ValueError: no disk"):
        driver.poll()


def test_unresponsive_head_node_ends_run_with_error(
    make_driver: Any,
) -> None:
    driver = make_driver([1.0])
    driver.run_stage_on(0, "0")
    driver.ray.error = ray.exceptions.GetTimeoutError("Get timed out")
    with pytest.raises(
        UserError,
        match=rf"has not answered for {groups.ANSWER_TIMEOUT_S:.0f} s\); finished stages are kept",
    ):
        driver.poll()
    assert driver.executor.is_broken


@pytest.mark.parametrize(
    ("traceback_text", "message"),
    [
        (
            "The actor with name Queue failed to import on the worker.\n\n"
            "\x1b[36mray::Queue.__init__()\x1b[39m (pid=7, ip=10.0.0.1)\n"
            "\x1b[31mModuleNotFoundError\x1b[0m: No module named 'pipeline'",
            r"the head node of the Ray cluster cannot run this project's code "
            r"\(ModuleNotFoundError: No module named 'pipeline'\); .*constraints\.txt",
        ),
        (None, r"Ray itself broke down \(The actor died unexpectedly"),
    ],
)
def test_missing_project_on_head_node_is_distinguished_from_ray_failure(
    traceback_text: str | None, message: str
) -> None:
    error = ray.exceptions.ActorDiedError()
    if traceback_text is not None:
        arguments = ("Queue.__init__", traceback_text, RuntimeError(), "ray::Queue", 7, "10.0.0.1")
        error = ray.exceptions.ActorDiedError(ray.exceptions.RayTaskError(*arguments))
    sentence = str(groups.describe_breakdown(ray, error))
    assert re.match(message, sentence)
    assert "\x1b" not in sentence


def test_lost_client_connection_ends_run_with_error(
    make_driver: Any,
) -> None:
    driver = make_driver([1.0])
    driver.run_stage_on(0, "0")
    driver.ray.error = ConnectionError("Failed to reconnect within the grace period (30s)")
    with pytest.raises(
        UserError,
        match=r"the connection to the Ray cluster was lost \(Failed to reconnect .*; finished "
        "stages are kept",
    ):
        driver.poll()
    assert driver.executor.is_broken


def test_preempted_driver_dismisses_groups_and_exits_after_they_end(
    make_driver: Any,
) -> None:
    driver = make_driver([1.0, 1.0])
    driver.run_stage_on(0, "0")
    preemption.requested.set()
    try:
        driver.poll()
        assert driver.queue.dismissed == {0: True, 1: True}
        assert driver.ray.cancelled == [driver.groups[1].task], (
            "a group that has not started yet has nothing to save"
        )
        for group in driver.groups.values():
            group.task.end = ""
        with pytest.raises(preemption.Preempted):
            driver.poll()
        assert driver.groups == {}, "no group may be restarted"
    finally:
        preemption.requested.clear()


def test_closing_executor_cancels_waiting_ingest_before_ray_shutdown(
    make_driver: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that still waited for a Ray task would never end, and the process would hang."""
    driver = make_driver([1.0])
    calls = []

    def get_in_vain(task: Task, timeout: float | None = None) -> None:
        calls.append("get")
        time.sleep(20 if timeout is None else timeout)
        raise ray.exceptions.GetTimeoutError

    monkeypatch.setattr(driver.ray, "get", get_in_vain)
    monkeypatch.setattr(driver.ray, "shutdown", lambda: calls.append("shutdown"))
    monkeypatch.setattr(groups, "run_ingest", lambda store, stage, map_fn, *_: list(map_fn(0, [1])))
    stage = Stage("data/a", "ingest", "key", {}, (), job=object.__new__(IngestJob))
    driver.executor.submit(stage, 0)
    while not calls:
        time.sleep(0.01)
    [ingest] = driver.executor.ingests
    driver.executor.close()
    assert calls[-1] == "shutdown"
    assert ingest.done()
    assert len(driver.ray.cancelled) == 1


def test_only_folders_of_killed_local_drivers_are_deleted(
    tmp_path: Path,
) -> None:
    dead_pid = os.fork()
    if not dead_pid:
        os._exit(0)
    os.waitpid(dead_pid, 0)
    owner = temporary_name()

    def folder_of(name: str) -> str:
        return f"group-{name}-0"

    def owner_with_pid(pid: int) -> str:
        return owner.replace(f"-{os.getpid()}-", f"-{pid}-")

    killed = {folder_of(owner_with_pid(dead_pid))}
    to_keep = {
        folder_of(temporary_name()),
        folder_of("elsewhere-9-0"),
        folder_of(owner_with_pid(1)),
        "search-small",
    }
    own = {folder_of(owner)}
    for name in killed | own | to_keep:
        (tmp_path / "ray" / name).mkdir(parents=True)
    store = Store(str(tmp_path))
    store.sweep()  # every run does this at its start, even without Ray
    assert {path.name for path in (tmp_path / "ray").iterdir()} == own | to_keep
    store.delete_group_folders(owner)
    assert {path.name for path in (tmp_path / "ray").iterdir()} == to_keep
