"""The executor for `cluster.workers >= 1`: worker groups on Ray. Lost groups are replaced.

A worker group is a Ray Train run with up to `cluster.workers` ranks (train.py) that takes stage
after stage from a queue (queue.py). The driver starts as many groups as its share of the cluster
allows. It checks the state of the cluster every LOOK_S seconds. A running group is resized or
stopped only between two stages, unless a stage exceeds its time limit, or a node or this driver is
taken away.
"""

from __future__ import annotations

import atexit
import math
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from pipeline.config.settings import ClusterSettings, StageLimits
from pipeline.config.text import format_count
from pipeline.graph import failures
from pipeline.graph.retries import RetryPolicy
from pipeline.graph.run import Executor
from pipeline.graph.stage import IngestJob, Stage
from pipeline.graph.store import Store
from pipeline.graph.walk import Event, EventKind
from pipeline.launch import dead_workers, ray_internals
from pipeline.launch.attempt import Manifest, Progress, RunOnDriver, attempt_stage, run_ingest
from pipeline.launch.cluster import (
    ClusterState,
    Node,
    check_nodes,
    connect,
    get_address,
    make_actor_name,
    make_unfit_error,
    register_actor,
)
from pipeline.launch.limits import Deadline, describe_timeout
from pipeline.launch.pools import Pools
from pipeline.launch.queue import ReadyStage
from pipeline.launch.queue_actor import QueueActor
from pipeline.launch.shares import format_resources, resources_per_worker
from pipeline.launch.train import NO_ROOM, run_worker_group
from workers import preemption
from workers.errors import UserError, describe_error
from workers.storage import checkpoint
from workers.storage.artifact import join, temporary_name

LOOK_S = 5.0  # seconds between two checks of the cluster's state
TIME_CHECK_S = 1.0  # seconds between two checks of time limits
WAITING_NOTE_S = 8.0  # seconds after which a group without workers is reported as waiting
ANSWER_TIMEOUT_S = 45.0  # less than the 60 s after which Ray ends a driver without a head node
GRACE_S = 60.0  # maximum seconds that a preempted driver waits for groups to save their state
CLOSE_TIMEOUT_S = 10.0  # seconds to wait for groups, and then for ingest threads, in `close`
CLOSED_S = 0.5  # seconds between two checks of an ingest thread whether the executor is closed
INGEST_THREADS = 8  # threads of the driver; each waits for Ray tasks, which do the work


@dataclass(frozen=True)
class RaySession:
    """The connection of a driver to Ray.

    Attributes:
        ray: The module `ray`, connected to a cluster.
        queue: Handle of the queue actor.
        name: Name of the queue actor.
        state: State of the cluster at the start.
        is_ours: Whether this run connected to the cluster, so that it disconnects at its end.
    """

    ray: Any
    queue: Any
    name: str
    state: ClusterState
    is_ours: bool = True


@dataclass
class WorkerGroup:
    """The driver's data about a worker group.

    Attributes:
        cluster: Settings with the resources of a rank.
        task: Reference to the Ray task that runs the group's trainer.
        workers: Number of ranks.
        starts: Number of attempts to start the group since its workers were last up.
        waiting_since: Time of the start, or of the loss of a node of the group. None once its
            workers are up or the wait is reported.
        is_cancelled: Whether the driver has cancelled the task.
    """

    cluster: ClusterSettings
    task: Any
    workers: int
    starts: int
    waiting_since: float | None
    is_cancelled: bool = False


def start_ray_executor(
    store: Store,
    cluster: ClusterSettings,
    run_on_driver: RunOnDriver,
    progress: Progress,
    width: int,
    sample_s: float = 0.0,
) -> RayExecutor:
    """Connect to Ray, check the nodes, and return the executor.

    Args:
        store: Store of the results.
        cluster: Cluster settings of the config.
        run_on_driver: Runs a stage without a job (the report).
        progress: Called with events that do not change the state of a stage.
        width: Number of stages that can run in parallel.
        sample_s: See `run_worker_group`.

    Raises:
        UserError: If Ray does not work, or a node cannot run this project.
    """
    loaded = sys.modules.get("ray")
    is_connected = loaded is not None and loaded.is_initialized()  # as in a trial of a search
    ray = connect(cluster)
    name = make_actor_name(ray)
    queue = register_actor(ray, QueueActor, name)
    try:
        state = ray.get(queue.get_cluster_state.remote())
    except (ray.exceptions.RayError, ConnectionError) as error:
        raise describe_breakdown(ray, error) from None
    session = RaySession(ray, queue, name, state, is_ours=not is_connected)
    if session.is_ours and get_address(cluster) != "local":
        check_nodes(ray, state.nodes, store.storage)
    return RayExecutor(store, cluster, run_on_driver, progress, width, session, sample_s=sample_s)


class RayExecutor(Executor):
    """Runs training and evaluation in worker groups, ingest in Ray tasks, and the report here.

    If a group or a node is lost, its stage is queued again and continues from its last checkpoint.

    Args:
        store: Store of the results.
        cluster: Cluster settings of the config.
        run_on_driver: Runs a stage without a job (the report).
        progress: Called with events that do not change the state of a stage.
        width: Number of stages that can run in parallel.
        session: The connection to Ray.
        clock: Returns the time in seconds, from an arbitrary start.
        sample_s: See `run_worker_group`.
    """

    def __init__(
        self,
        store: Store,
        cluster: ClusterSettings,
        run_on_driver: RunOnDriver,
        progress: Progress,
        width: int,
        session: RaySession,
        clock: Callable[[], float] = time.monotonic,
        sample_s: float = 0.0,
    ):
        self.store = store
        self.cluster = cluster
        self.run_on_driver = run_on_driver
        self.progress = progress
        self.width = width
        self.sample_s = sample_s
        self.session = session
        self.ray = session.ray
        self.queue = session.queue
        self.clock = clock
        self.state = session.state
        self.last_look = clock()
        self.owner = temporary_name()  # part of the names of the folders of this driver's groups
        self.num_folders = 0
        self.pools = Pools(cluster)
        self.checked_pools: set[int] = set()  # pools with a group that fits into the cluster
        self.outstanding: dict[str, ReadyStage] = {}  # submitted to groups and not ended, by id
        self.groups: dict[int, WorkerGroup] = {}
        self.rank_nodes: dict[int, list[str]] = {}  # running group -> node id of each rank
        self.used_nodes: set[str] = set()  # ids of nodes that have run a group
        self.stages: dict[str, Stage] = {}  # all stages submitted to groups, by id
        self.outbox: list[ReadyStage] = []  # submitted stages to send to the queue
        self.last_time_check = -math.inf
        self.reported_groups: dict[str, int] = {}  # body of the last event of kind GROUPS
        self.driver_stages: deque[Stage] = deque()  # stages without a job, to run in this process
        self.leaving_since: float | None = None  # time at which this driver was preempted
        self.is_broken = False  # whether Ray itself has failed
        self.map = RayMap(self.ray, self._count_ingest_tasks())
        self.threads = ThreadPoolExecutor(INGEST_THREADS, "ingest")
        self.ingests: list[Future[Event]] = []
        store.delete_group_folders(self.owner)
        self.stop_listening = preemption.listen()  # after Ray has set its own signal handlers

    def _run_ingest(self, stage: Stage) -> Manifest:
        """Run an ingest stage in Ray tasks, and return its manifest."""
        deadline = Deadline(self.cluster, stage.step)
        map_fn = partial(self.map, deadline=deadline)
        return run_ingest(self.store, stage, map_fn, self.progress, deadline)

    def _count_ingest_tasks(self) -> int:
        """Return the number of ingest tasks that can run in parallel."""
        cpus = self.ray.cluster_resources().get("CPU", 1)
        cpus_per_task = self.cluster.stages.get("ingest", StageLimits()).cpus or 1
        return max(1, int(cpus / cpus_per_task))

    def submit(self, stage: Stage, depth: int) -> None:
        """Queue a stage."""
        if isinstance(stage.job, IngestJob):
            run = partial(self._run_ingest, stage)
            future = self.threads.submit(attempt_stage, stage, run, self.store.storage)
            self.ingests.append(future)
            self._report_start(stage.id, "tasks of Ray")
        elif stage.job is None:
            self.driver_stages.append(stage)
        else:
            self.stages[stage.id] = stage
            ready = ReadyStage(depth, stage, self.pools.of_step(stage.step))
            self.outstanding[stage.id] = ready
            self.outbox.append(ready)

    def poll(self) -> list[Event]:
        """Return the events since the last call.

        Raises:
            UserError: If Ray itself has failed, if a group has no room or does not start, or if a
                new node is unfit.
            Preempted: If this driver is preempted, after its groups have saved their state.
        """
        try:
            return self._poll()
        except (self.ray.exceptions.RayError, ConnectionError) as error:
            # Ray Client (ray://) raises ConnectionError.
            self.is_broken = True
            raise describe_breakdown(self.ray, error) from None

    def _poll(self) -> list[Event]:
        events = self._ended_ingests()
        if self.outbox and not preemption.requested.is_set():
            self._make_room()
        if self.groups:
            events += self._poll_groups()
        if preemption.requested.is_set():
            self._leave()
        if self.driver_stages and not events:  # it blocks this process, so other events go first
            stage = self.driver_stages.popleft()
            run = partial(self.run_on_driver, stage)
            self._report_start(stage.id, "the driver")
            events.append(attempt_stage(stage, run, self.store.storage))
        return events

    def _make_room(self) -> None:
        """Start groups for submitted stages of pools without a group.

        Raises:
            UserError: If the cluster has no room for a group.
        """
        pools = {ready.pool for ready in self.outbox}
        if self.groups:
            pools -= self.checked_pools
        if not pools:
            return
        for pool in sorted(pools):
            self.pools.check_fit(pool, self.state)
        self.checked_pools |= pools
        self._adjust_groups()

    def _ended_ingests(self) -> list[Event]:
        ended = [future for future in self.ingests if future.done()]
        self.ingests = [future for future in self.ingests if future not in ended]
        return [future.result() for future in ended]

    def _poll_groups(self) -> list[Event]:
        outbox = self.outbox
        self.outbox = []
        was_any_up = bool(self.rank_nodes)
        events, self.rank_nodes = self._answer(self.queue.offer.remote(outbox))
        for nodes in self.rank_nodes.values():
            self.used_nodes.update(nodes)
        for event in events:
            if event.kind is EventKind.SAMPLE:
                self.progress(event)
            elif event.kind is EventKind.STARTED:
                self._report_group_start(event)
            elif event.kind not in (EventKind.PROGRESS, EventKind.CHECKPOINT):
                self.outstanding.pop(event.stage, None)
        reported = (EventKind.SAMPLE, EventKind.STARTED)
        events = [event for event in events if event.kind not in reported]
        self._replace_ended_groups()
        if self.rank_nodes and not was_any_up:
            self._adjust_groups()
        self._report_groups()
        self._report_waiting_groups()
        self._end_overdue_stages()
        is_stage_lost = any(event.kind is EventKind.LOST for event in events)
        if is_stage_lost or self.clock() - self.last_look > LOOK_S:
            self._look_at_cluster()
        return [self._explain_loss(event) for event in events]

    def _answer(self, reference: Any) -> Any:
        """Return an answer of the queue actor, which runs on the head node.

        If the head node is dead, this call raises `GetTimeoutError` before Ray ends this process.
        """
        return self.ray.get(reference, timeout=ANSWER_TIMEOUT_S)

    def _note(self, text: str) -> None:
        self.progress(Event(EventKind.NOTE, "", text))

    # ---- groups ----------------------------------------------------------------------------------
    def _sizes(self, state: ClusterState) -> dict[int, int]:
        """Return the number of workers of each group that can run now, by group number.

        Until the first group is up, there are at most as many groups as outstanding stages, because
        simultaneous starts slow each other down. If `cluster.groups` is set, all groups start
        immediately: an autoscaler may have to add nodes, which takes longer.
        """
        width = self.width
        if not self.rank_nodes and not self.cluster.groups:
            width = min(width, max(1, len(self.outstanding)))
        groups = {index: group.workers for index, group in self.groups.items()}
        name = self.session.name
        outstanding = self.outstanding.values()
        return self.pools.sizes(state, name, width, outstanding, groups)

    def _adjust_groups(self) -> None:
        """Start groups that fit. Stop surplus or wrongly sized groups after their current stage."""
        sizes = self._sizes(self.state)
        for index, workers in sizes.items():
            if index not in self.groups:
                self._start(index, workers)
        for index, group in self.groups.items():
            is_up = index in self.rank_nodes
            if not is_up and index in sizes and group.workers > sizes[index]:
                self._cancel(group)  # its placement group would wait for a lost node
        misfits = []
        for index in self.rank_nodes:
            is_extra = index not in sizes
            if is_extra or (index in self.groups and self.groups[index].workers != sizes[index]):
                misfits.append(index)
        if misfits:
            self.queue.dismiss.remote(misfits, False)

    def _start(self, index: int, workers: int, starts: int = 0) -> None:
        self.num_folders += 1
        # SPREAD: the task must not run inside the placement group of a search trial.
        cluster = self.pools.get_settings(index)
        remote = self.ray.remote(num_cpus=0, max_retries=0, scheduling_strategy="SPREAD")
        task = remote(run_worker_group).remote(
            self.queue,
            index,
            cluster,
            workers,
            join(self.store.storage, "ray"),
            f"group-{self.owner}-{self.num_folders}",
            self.sample_s,
        )
        self.groups[index] = WorkerGroup(cluster, task, workers, starts + 1, self.clock())

    def _cancel(self, group: WorkerGroup) -> None:
        group.is_cancelled = True
        self.ray.cancel(group.task, force=True)

    def _replace_ended_groups(self) -> None:
        for index in self.rank_nodes:
            if index in self.groups:
                self.groups[index].starts = 0
                self.groups[index].waiting_since = None
        tasks = [group.task for group in self.groups.values()]
        ended, _ = self.ray.wait(tasks, num_returns=len(tasks), timeout=0)
        for index, group in list(self.groups.items()):
            if group.task in ended:
                self._replace(index, group)

    def _replace(self, index: int, group: WorkerGroup) -> None:
        """Abandon a group that ended, and start a new group if there is room for it.

        Raises:
            UserError: If the workers of the group did not start in several attempts.
        """
        message = "its worker group ended"
        moved = group.is_cancelled  # whether the end was not caused by the stage
        try:
            if self.ray.get(group.task) == NO_ROOM:
                moved = True
        except self.ray.exceptions.NodeDiedError:
            message = "its node was lost"
            moved = True
        except Exception as error:
            message = "its workers cannot be reached, their node may be lost"
            moved = moved or ray_internals.has_only_unreachable_workers(error)
            if not moved:
                message = self._explain_end(index, error)
        if group.starts > RetryPolicy.of(self.cluster).group and not moved:
            raise UserError(
                f"worker {self.pools.describe_group(index)} could not be started in {group.starts} "
                f"tries: {message}; fix what it says, or use fewer workers with "
                "--set cluster.workers=N"
            )
        self._answer(self.queue.abandon.remote(index, message, moved))
        self.rank_nodes.pop(index, None)
        del self.groups[index]
        # `self.state` stays unchanged, so that the next check of the cluster reports lost nodes.
        self.last_look = -math.inf
        sizes = self._sizes(self._answer(self.queue.get_cluster_state.remote()))
        if self.leaving_since is None and index in sizes:
            self._start(index, sizes[index], group.starts)

    def _explain_end(self, index: int, error: Exception) -> str:
        """Return the reason why a group ended with `error`."""
        workers = dead_workers.list_dead_workers(error)
        if not workers:
            return failures.describe_exception(error)
        stage = self._answer(self.queue.get_stage.remote(index))
        nodes = self.rank_nodes.get(index, [])
        return dead_workers.describe_dead_workers(
            self.ray, workers, nodes, stage, self.store.storage
        )

    def _report_groups(self) -> None:
        """Report the number of groups if it has changed."""
        num_up = len(self.rank_nodes)
        counts = {"up": num_up, "starting": max(0, len(self.groups) - num_up)}
        if counts != self.reported_groups:
            self.reported_groups = counts
            self.progress(Event(EventKind.GROUPS, "", body=counts))

    def _report_waiting_groups(self) -> None:
        """Tell the user once about each group without workers after WAITING_NOTE_S."""
        late = []
        for group in self.groups.values():
            since = group.waiting_since
            if since is not None and self.clock() - since > WAITING_NOTE_S:
                late.append(group)
                group.waiting_since = None
        if not late:
            return
        if not self._answer(self.queue.count_waiting_placement_groups.remote()):
            workers = sum(group.workers for group in late)
            self._note(f"starting {format_count(workers, 'worker process')}")
            return
        available = self.ray.available_resources()
        for pool in self.pools.pools:
            groups = [group for group in late if group.cluster is pool.cluster]
            per_worker = resources_per_worker(pool.cluster)
            free = {name: available.get(name, 0.0) for name in per_worker}
            if groups:
                self._note(
                    f"waiting for room for {format_count(len(groups), 'group')} of "
                    f"{format_count(groups[0].workers, 'worker')} that take "
                    f"{format_resources(per_worker)} each; "
                    f"free now: {format_resources(free)}"
                )

    def _report_group_start(self, event: Event) -> None:
        """Report that a group has started a stage, with its nodes and GPUs."""
        nodes = [self.state.nodes.get(node) for node in event.body["nodes"]]
        addresses = list(dict.fromkeys(node.address for node in nodes if node is not None))
        where = f"{self.pools.describe_group(event.body['group'])} on {', '.join(addresses)}"
        gpus = event.body["gpus"]
        if gpus:
            where += f" (GPU {', '.join(gpus)})"
        body = {"where": where, "nodes": addresses, "gpus": gpus}
        self.progress(replace(event, body=body))

    def _end_overdue_stages(self) -> None:
        """Cancel the groups whose stage exceeds its time limit."""
        if self.clock() - self.last_time_check < TIME_CHECK_S:
            return
        self.last_time_check = self.clock()
        running = self._answer(self.queue.list_running_stages.remote())
        for group, (stage, seconds) in running.items():
            limit_s = self.cluster.time_limit(stage.step)
            if limit_s is not None and seconds > limit_s:
                self._time_out(group, stage, limit_s)

    def _time_out(self, index: int, stage: Stage, limit_s: float) -> None:
        """Cancel a group because its stage exceeds its time limit.

        The attempt at the stage counts as failed. Another group is started.
        """
        message = describe_timeout(stage.step, limit_s)
        if self._answer(self.queue.time_out.remote(index, stage.id, message)):
            self.rank_nodes.pop(index, None)
            if index in self.groups:
                self._cancel(self.groups[index])

    def _report_start(self, stage_id: str, where: str) -> None:
        self.progress(Event(EventKind.STARTED, stage_id, body={"where": where}))

    # ---- nodes -----------------------------------------------------------------------------------
    def _look_at_cluster(self) -> None:
        """Report nodes that joined, were lost or are draining. Adjust the groups."""
        before = self.state.nodes
        self.queue.release_orphans.remote()
        self.state = self._answer(self.queue.get_cluster_state.remote())
        self.last_look = self.clock()
        for node in self.state.nodes.values():
            old = before.get(node.id)
            if old is None:
                if node.alive:
                    self._node_joined(node)
            elif old.alive and not node.alive:
                self._node_lost(node)
            elif node.leaves and not old.leaves:
                self._node_leaves(node)
        if self.leaving_since is None:
            self._adjust_groups()

    def _find_groups(self, node: Node) -> list[int]:
        """Return the numbers of the running groups with a rank on a node."""
        indices = []
        for index, nodes in self.rank_nodes.items():
            if node.id in nodes and index in self.groups:
                indices.append(index)
        return indices

    def _node_joined(self, node: Node) -> None:
        devices = {name: node.resources[name] for name in ("CPU", "GPU") if name in node.resources}
        self._note(f"node {node} joined ({format_resources(devices)})")
        if get_address(self.cluster) != "local":
            check_nodes(self.ray, {node.id: node}, self.store.storage)

    def _node_lost(self, node: Node) -> None:
        groups = self._find_groups(node)
        if node.id not in self.used_nodes:
            consequence = "nothing of this run was on it"
        elif groups:
            consequence = "its stages continue from their last checkpoints"
        else:
            consequence = "its stages have continued elsewhere"
        self._note(f"node {node} was lost; {consequence}")
        # Ray notices the death of the workers later. An idle group can take the stage now.
        for index in groups:
            self._answer(self.queue.abandon.remote(index, f"node {node} was lost", True))
            del self.rank_nodes[index]
            self.groups[index].waiting_since = self.clock()

    def _node_leaves(self, node: Node) -> None:
        groups = self._find_groups(node)
        if not groups:
            self._note(f"node {node} will be taken away; nothing of this run is on it")
            return
        self._note(f"node {node} will be taken away; its stages are saved and moved")
        self.queue.dismiss.remote(groups, True)

    def _explain_loss(self, event: Event) -> Event:
        """Add the reason and the amount of lost work to the event of a lost stage.

        If the stage did not cause the loss, the kind of the event becomes MOVED. Other events are
        returned unchanged.
        """
        if event.kind is not EventKind.LOST:
            return event
        stage = self.stages[event.stage]
        age_s = checkpoint.age_s(self.store.root, stage.key)
        loss = "and the stage has no checkpoint yet"
        if age_s is not None:
            loss = f"and at most {age_s:.0f} s of work is lost"
        for node_id in event.body["nodes"]:
            node = self.state.nodes.get(node_id)
            if node is not None and not node.alive:
                message = f"node {node} was lost, {loss}"
                return replace(event, kind=EventKind.MOVED, message=message)
        kind = EventKind.MOVED if event.body["moved"] else EventKind.LOST
        return replace(event, kind=kind, message=f"{event.message}, {loss}")

    # ---- the end ---------------------------------------------------------------------------------
    def _leave(self) -> None:
        """Let the groups save their state, because this driver is preempted.

        Raises:
            Preempted: After all groups have ended, or after GRACE_S.
        """
        if self.leaving_since is None:
            self.leaving_since = self.clock()
            self.queue.dismiss.remote(list(self.groups), True)
            for index, group in self.groups.items():
                if index not in self.rank_nodes:
                    self._cancel(group)
            self._note("asked to leave; saving the running stages")
        if not self.groups or self.clock() - self.leaving_since > GRACE_S:
            raise preemption.Preempted

    def close(self) -> None:
        """End all groups and tasks, and disconnect from the cluster if this run connected to it."""
        self.stop_listening()
        self.map.close()
        self.threads.shutdown(wait=False, cancel_futures=True)
        if self.is_broken:
            # `ray.shutdown` would wait for a cluster that does not answer. Ray's client ends with
            # this process.
            atexit.unregister(self.ray.shutdown)
            return
        # An error here must not hide the reason why the run ended.
        with suppress(self.ray.exceptions.RayError, ConnectionError):
            if self.groups:
                self.ray.get(self.queue.close.remote())
                tasks = [group.task for group in self.groups.values()]
                self.ray.wait(tasks, num_returns=len(tasks), timeout=CLOSE_TIMEOUT_S)
        # If a thread waited for a Ray task during Ray's shutdown, this process would never end.
        wait([run for run in self.ingests if not run.cancelled()], timeout=CLOSE_TIMEOUT_S)
        self.store.delete_group_folders(self.owner)
        if self.session.is_ours:
            self.ray.shutdown()


def describe_breakdown(ray: Any, error: Exception) -> UserError:
    """Return the error to raise if Ray itself has failed, and not only a worker.

    Args:
        ray: The module `ray`.
        error: Error of Ray.
    """
    if isinstance(error, ConnectionError):
        reason = describe_error(error)[:300]
        return UserError(
            f"the connection to the Ray cluster was lost ({reason}); finished stages are kept, "
            "run the same command again when the head node and its client port answer"
        )
    if getattr(error, "actor_init_failed", False):
        return make_unfit_error("the head node of the Ray cluster", error)
    reason = failures.ANSI.sub("", str(error)).strip().splitlines()[0]
    if isinstance(error, ray.exceptions.GetTimeoutError):
        reason = f"its head node has not answered for {ANSWER_TIMEOUT_S:.0f} s"
    return UserError(
        f"Ray itself broke down ({reason}); finished stages are kept, run the same command again"
    )


class RayMap:
    """A parallel `map` on Ray tasks, which several threads can use. Results are in order.

    All threads together run at most `limit` tasks at a time. Otherwise each of many small data sets
    would start its own Ray processes. After `close`, each thread gets `Preempted` within CLOSED_S.

    Args:
        ray: The module `ray`.
        limit: Maximum number of tasks at a time.
    """

    def __init__(self, ray: Any, limit: int):
        self.ray = ray
        self.free = threading.BoundedSemaphore(limit)
        self.is_closed = False

    def __call__(
        self, fn: Callable[[Any], Any], items: Iterable[Any], deadline: Deadline
    ) -> Iterable[Any]:
        """Yield the results of `fn`, in order.

        Args:
            fn: Function to run in Ray tasks.
            items: The argument of each call.
            deadline: Deadline of the attempt at the stage.

        Raises:
            StageTimeout: After the deadline. Running tasks are cancelled.
            Preempted: If this map is closed.
        """
        remote = self.ray.remote(num_cpus=0, scheduling_strategy="SPREAD")(fn)
        under_way: deque[Any] = deque()
        try:
            for item in items:
                # Wait for a slot only if this call has no running task. Otherwise wait for the
                # result of a task, which frees a slot.
                while not self._acquire(under_way, deadline):
                    yield self._next_result(under_way, deadline)
                under_way.append(remote.remote(item))
            while under_way:
                yield self._next_result(under_way, deadline)
        finally:
            for task in under_way:
                if self.ray.is_initialized():  # otherwise the call would start Ray again
                    self.ray.cancel(task, force=True)
                self.free.release()

    def close(self) -> None:
        """Let all calls cancel their tasks and raise `Preempted`."""
        self.is_closed = True

    def _acquire(self, under_way: deque[Any], deadline: Deadline) -> bool:
        """Acquire a slot, and return whether that succeeded.

        If this call has no running task, wait until a slot is free. Otherwise do not wait.
        """
        while not self.free.acquire(timeout=0 if under_way else self._compute_wait_s(deadline)):
            if under_way:
                return False
            deadline.check()
        if self.is_closed:
            self.free.release()
            raise preemption.Preempted
        return True

    def _next_result(self, under_way: deque[Any], deadline: Deadline) -> Any:
        while True:
            try:
                result = self.ray.get(under_way[0], timeout=self._compute_wait_s(deadline))
            except self.ray.exceptions.GetTimeoutError:
                deadline.check()
                continue
            except self.ray.exceptions.RayTaskError as error:
                # Keep the message of the cause and the traceback of the remote process.
                raise error.cause from error
            under_way.popleft()
            self.free.release()
            return result

    def _compute_wait_s(self, deadline: Deadline) -> float:
        """Return the seconds to wait until the next check of the deadline and of `is_closed`.

        Raises:
            Preempted: If this map is closed.
        """
        if self.is_closed:
            raise preemption.Preempted
        return CLOSED_S if deadline.left_s is None else min(CLOSED_S, deadline.left_s)
