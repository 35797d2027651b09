"""Worker groups on Ray as the driver has them: as many as its share of the cluster allows, started
anew when they are lost."""

from __future__ import annotations

import atexit
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from pipeline.config import ClusterSettings
from pipeline.graph import failures
from pipeline.graph.retries import RetryPolicy
from pipeline.graph.stage import IngestJob, Stage
from pipeline.graph.store import Store
from pipeline.graph.walk import Event, EventKind
from pipeline.launch.cluster import (
    ClusterState,
    DriverRegistration,
    actor_name,
    address_of,
    check_fits,
    check_nodes,
    connect,
    in_words,
    register_actor,
    resources_per_worker,
    sizes_of_groups,
)
from pipeline.launch.executor import NO_ROOM, Local, attempt, run_ingest, run_segment
from pipeline.launch.queue import Queue, ReadyStage
from workers import preemption
from workers.errors import UserError
from workers.storage import checkpoint
from workers.storage.artifact import delete_dir, is_leftover, join, temporary_name

LOOK_S = 5.0  # how often the driver looks what has become of the cluster
WAIT_S = 30.0  # after so long without a worker group, a person is told what is waited for
ANSWER_S = 45.0  # Ray ends a driver whose head node has been away for 60 s
GRACE_S = 60.0  # how long a driver that was told to leave waits for its groups to save what they do


class QueueActor(DriverRegistration, Queue):
    """The queue as an actor, which also gives back what a group that is gone had reserved: its
    controller may have been killed."""

    def __init__(self) -> None:
        super().__init__()
        self.reserved: dict[int, Any] = {}  # group -> its placement group

    def joined(self, group: int, places: list[str], reserved: Any = None) -> None:
        super().joined(group, places)
        self.reserved[group] = reserved

    def abandon(self, group: int, message: str, moved: bool = False) -> None:
        super().abandon(group, message, moved)
        if (reserved := self.reserved.pop(group, None)) is not None:
            from ray.util import remove_placement_group

            remove_placement_group(reserved)


@dataclass
class Running:
    """A worker group. task: that runs its trainer. since: when it was started; None as soon as its
    workers came up, or it was told that they do not."""

    task: Any
    workers: int
    starts: int
    since: float | None
    cancelled: bool = False


class RayExecutor:
    """`cluster.workers >= 1`: worker groups on a Ray cluster, ingest over Ray tasks, the report
    here.

    The groups are as many, and of as many ranks, as this driver's share of the cluster allows:
    looked at every LOOK_S, and changed between two stages of a group. Whoever is lost, its stage is
    offered again and goes on from its last checkpoint.
    """

    def __init__(
        self,
        store: Store,
        cluster: ClusterSettings,
        local: Local,
        progress: Callable[[Event], None],
        width: int,
    ):
        loaded = sys.modules.get("ray")
        # inside a search: whoever started Ray ends it
        self.joined = loaded is not None and loaded.is_initialized()
        ray = connect(cluster)
        self.ray, self.store, self.cluster, self.local, self.progress = (
            ray,
            store,
            cluster,
            local,
            progress,
        )
        self.width = width  # most stages that can run side by side
        self.name, self.own, self.books = actor_name(ray), temporary_name(), 0
        self.queue = register_actor(ray, QueueActor, self.name)
        try:
            self.around: ClusterState = ray.get(self.queue.get_cluster_state.remote())
        except (ray.exceptions.RayError, ConnectionError) as error:
            raise broke_down(ray, error) from None
        self.looked = time.monotonic()
        sweep(store, self.own)
        if not self.joined and address_of(cluster) != "local":
            check_nodes(ray, self.around.nodes, store.storage)
        self.groups: dict[int, Running] = {}
        self.places: dict[int, list[str]] = {}  # of the ranks of groups that are up
        self.used: set[str] = set()  # nodes that any of them has been on
        self.stages: dict[str, Stage] = {}  # that were submitted, by id
        self.outbox: list[ReadyStage] = []
        self.local_waiting: deque[Stage] = deque()
        self.listening = preemption.listen()  # after Ray, which listens too
        self.left_since: float | None = None
        self.broken = False
        self.map = RayMap(ray, max(1, int(ray.cluster_resources().get("CPU", 1))))
        self.threads = ThreadPoolExecutor(8, "ingest")  # they wait for Ray tasks, which do the work
        self.ingests: list[Future[Event]] = []

    def submit(self, stage: Stage, depth: int) -> None:
        if isinstance(stage.job, IngestJob):
            self.ingests.append(
                self.threads.submit(
                    attempt,
                    stage,
                    lambda: run_ingest(self.store, stage, self.map, self.progress),
                    self.store.storage,
                )
            )
        elif stage.job is None:
            self.local_waiting.append(stage)
        else:
            self.stages[stage.id] = stage
            self.outbox.append(ReadyStage(depth, stage))

    def poll(self) -> list[Event]:
        try:
            return self._poll()
        except (
            self.ray.exceptions.RayError,
            ConnectionError,
        ) as error:  # the client of ray:// raises the latter
            self.broken = True
            raise broke_down(self.ray, error) from None

    def _answer(self, call: Any) -> Any:
        """What the queue says, which is on the head node. Raises GetTimeoutError before Ray gives
        up on a dead one, and ends this process."""
        return self.ray.get(call, timeout=ANSWER_S)

    def _poll(self) -> list[Event]:
        events = self._ingested()
        if self.outbox and not self.groups and not preemption.requested.is_set():
            check_fits(self.around, self.cluster)
            self._adjust()
        if self.groups:
            outbox, self.outbox = self.outbox, []
            news, self.places = self._answer(self.queue.offer.remote(outbox))
            self.used |= {node for nodes in self.places.values() for node in nodes}
            self._mind_groups()
            if time.monotonic() - self.looked > LOOK_S or any(
                event.kind is EventKind.LOST for event in news
            ):
                self._look_around()
            events += [self._explained(event) for event in news]
        if preemption.requested.is_set():
            self._leave()
        if self.local_waiting and not events:
            stage = self.local_waiting.popleft()
            events.append(attempt(stage, lambda: self.local(stage), self.store.storage))
        return events

    def _ingested(self) -> list[Event]:
        ready = [f for f in self.ingests if f.done()]
        self.ingests = [f for f in self.ingests if f not in ready]
        return [f.result() for f in ready]

    # ---- groups ----------------------------------------------------------------------------------
    def _adjust(self) -> None:
        """Starts the groups that there is room for; those for which there is none any more, or that
        may be larger, end with what they do."""
        sizes = sizes_of_groups(self.around, self.cluster, self.name, self.width)
        for index, workers in enumerate(sizes):
            if index not in self.groups:
                self._start(index, workers)
        for index, group in self.groups.items():
            if (
                index not in self.places and index < len(sizes) and group.workers > sizes[index]
            ):  # it would wait for a node that is gone
                self._cancel(group)
        outgrown = [
            i
            for i in self.places
            if i >= len(sizes) or (i in self.groups and self.groups[i].workers != sizes[i])
        ]
        if outgrown:
            self.queue.dismiss.remote(outgrown, False)

    def _start(self, index: int, workers: int, starts: int = 0) -> None:
        # not within what a trial of a search has reserved
        fn = self.ray.remote(num_cpus=0, max_retries=0, scheduling_strategy="SPREAD")(run_segment)
        self.books += 1
        task = fn.remote(
            self.queue,
            index,
            self.cluster,
            workers,
            join(self.store.storage, "ray"),
            f"group-{self.own}-{self.books}",
        )
        self.groups[index] = Running(task, workers, starts + 1, time.monotonic())

    def _cancel(self, group: Running) -> None:
        group.cancelled = True
        self.ray.cancel(group.task, force=True)

    def _mind_groups(self) -> None:
        """Groups that ended before the queue was closed are started anew where there is room for
        them, and what they held is offered again. Raises UserError where a group's workers never
        come up."""
        for index in self.places:
            if index in self.groups:
                self.groups[index].starts, self.groups[index].since = 0, None
        done, _ = self.ray.wait(
            [group.task for group in self.groups.values()], num_returns=len(self.groups), timeout=0
        )
        for index, group in [*self.groups.items()]:
            if group.task in done:
                self._replace(index, group)
        late = [
            group
            for group in self.groups.values()
            if group.since is not None and time.monotonic() - group.since > WAIT_S
        ]
        if late:
            free = self.ray.available_resources()
            per_worker = resources_per_worker(self.cluster)
            self._say(
                f"waiting for {len(late)} groups of {late[0].workers} workers that take "
                f"{in_words(per_worker)} each; free now: "
                f"{in_words({name: free.get(name, 0.0) for name in per_worker})}"
            )
        for group in late:
            group.since = None  # told once

    def _replace(self, index: int, group: Running) -> None:
        message, moved = "its worker group ended", group.cancelled
        try:
            moved |= self.ray.get(group.task) == NO_ROOM
        except self.ray.exceptions.NodeDiedError:
            message, moved = "its node was lost", True
        except Exception as error:
            message = failures.describe(error)
        if group.starts > RetryPolicy.of(self.cluster).group and not moved:
            raise UserError(
                f"worker group {index} could not be started in {group.starts} tries: {message}; "
                "mend what it says, "
                "or use fewer workers with --set cluster.workers=N"
            )
        self._answer(self.queue.abandon.remote(index, message, moved))
        self.places.pop(index, None)
        self.looked = 0.0  # what was lost with it is told at the next look
        sizes = sizes_of_groups(
            self._answer(self.queue.get_cluster_state.remote()), self.cluster, self.name, self.width
        )
        del self.groups[index]
        if self.left_since is None and index < len(sizes):
            self._start(index, sizes[index], group.starts)

    # ---- what becomes of the cluster -------------------------------------------------------------
    def _look_around(self) -> None:
        """Says what has changed, has groups leave nodes that are going to be taken away, and takes
        the room that there is now."""
        before, self.around = self.around, self._answer(self.queue.get_cluster_state.remote())
        self.looked = time.monotonic()
        for node in self.around.nodes.values():
            old = before.nodes.get(node.id)
            groups = [
                index
                for index, nodes in self.places.items()
                if node.id in nodes and index in self.groups
            ]
            if node.alive and old is None:
                devices = {n: node.resources[n] for n in ("CPU", "GPU") if n in node.resources}
                self._say(f"node {node} joined ({in_words(devices)})")
                if address_of(self.cluster) != "local":
                    check_nodes(self.ray, {node.id: node}, self.store.storage)
            elif not node.alive and old is not None and old.alive:
                here = (
                    "has gone on elsewhere"
                    if node.id in self.used and not groups
                    else "goes on from its last checkpoint"
                )
                self._say(
                    f"node {node} was lost; "
                    + (
                        f"what ran on it {here}"
                        if node.id in self.used
                        else "nothing of this run was on it"
                    )
                )
                # not when its workers are found dead: another group may have time for its stage at
                # once
                for index in groups:
                    self._answer(self.queue.abandon.remote(index, f"node {node} was lost", True))
                    del self.places[index]
                    self.groups[index].since = time.monotonic()
            elif node.leaves and old is not None and not old.leaves:
                self._say(
                    f"node {node} is going to be taken away; "
                    + (
                        "what runs on it is saved and moved"
                        if groups
                        else "nothing of this run is on it"
                    )
                )
                if groups:
                    self.queue.dismiss.remote(groups, True)
        if self.left_since is None:
            self._adjust()

    def _explained(self, event: Event) -> Event:
        """Of a stage whose workers are gone: why, and what was lost with them."""
        if event.kind is not EventKind.LOST:
            return event
        stage = self.stages[event.stage]
        age = checkpoint.age_s(self.store.root, stage.key)
        lost = (
            "and it has no checkpoint yet"
            if age is None
            else f"and with it at most {age:.0f} s of work"
        )
        gone = [
            node
            for node in (self.around.nodes.get(name) for name in event.body["nodes"])
            if node and not node.alive
        ]
        if gone:
            return replace(event, kind=EventKind.MOVED, message=f"node {gone[0]} was lost, {lost}")
        return replace(
            event,
            kind=EventKind.MOVED if event.body["moved"] else EventKind.LOST,
            message=f"{event.message}, {lost}",
        )

    def _leave(self) -> None:
        """This driver was told to go: its groups save what they do. Raises Leaving when they have,
        or did not in time."""
        if self.left_since is None:
            self.left_since = time.monotonic()
            self.queue.dismiss.remote([*self.groups], True)
            for index, group in self.groups.items():
                if index not in self.places:
                    self._cancel(group)
            self._say("told to leave; saving what is under way")
        if not self.groups or time.monotonic() - self.left_since > GRACE_S:
            raise preemption.Preempted

    def _say(self, text: str) -> None:
        self.progress(Event(EventKind.NOTE, "", text))

    def close(self) -> None:
        self.listening()
        self.threads.shutdown(wait=False, cancel_futures=True)
        if (
            self.broken
        ):  # a good end would wait for what does not answer; Ray's processes end with this one
            atexit.unregister(self.ray.shutdown)
            return
        with suppress(
            self.ray.exceptions.RayError, ConnectionError
        ):  # whatever it is, closing does not hide why the run ended
            if self.groups:
                self.ray.get(self.queue.close.remote())
                self.ray.wait(
                    [group.task for group in self.groups.values()],
                    num_returns=len(self.groups),
                    timeout=10,
                )
        sweep(self.store, self.own)
        if not self.joined:
            self.ray.shutdown()


def broke_down(ray: Any, error: Exception) -> UserError:
    """What is said where not a worker is lost but what the driver itself needs."""
    if isinstance(error, ConnectionError):
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        return UserError(
            f"the connection to the Ray cluster was lost ({reason}); what finished is kept, run "
            "the same command again when the head "
            "node and its client port answer"
        )
    unanswered = isinstance(error, ray.exceptions.GetTimeoutError)
    why = (
        f"its head node has not answered for {ANSWER_S:.0f} s"
        if unanswered
        else str(error).strip().splitlines()[0]
    )
    return UserError(
        f"Ray itself broke down ({why}); what finished is kept, run the same command again"
    )


def sweep(store: Store, own: str) -> None:
    """Deletes the books that Ray keeps of groups, of this driver and of those of this machine that
    were killed."""
    for folder in store.folders("ray"):
        if folder.startswith("group-") and (own in folder or is_leftover(folder)):
            delete_dir(join(store.storage, "ray", folder))


class RayMap:
    """`map` over Ray tasks, results in order; all that share one RayMap have together at most
    `limit` tasks under way, so that many small data sets do not start a process each."""

    def __init__(self, ray: Any, limit: int):
        self.ray, self.free = ray, threading.BoundedSemaphore(limit)

    def __call__(self, fn: Callable[[Any], Any], items: Iterable[Any]) -> Iterable[Any]:
        remote = self.ray.remote(num_cpus=0, scheduling_strategy="SPREAD")(fn)
        under_way: deque[Any] = deque()
        try:
            for item in items:
                while not self.free.acquire(blocking=not under_way):
                    yield self._result(under_way)
                under_way.append(remote.remote(item))
            while under_way:
                yield self._result(under_way)
        finally:
            for _ in under_way:
                self.free.release()

    def _result(self, under_way: deque[Any]) -> Any:
        try:
            value = self.ray.get(under_way[0])
        except self.ray.exceptions.RayTaskError as error:
            # its sentence is of the cause; its traceback shows the remote one
            raise error.cause from error
        under_way.popleft()
        self.free.release()
        return value
