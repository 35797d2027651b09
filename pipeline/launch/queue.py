"""The order of ready stages, and the queue between the driver and its worker groups.

`ReadyQueue` decides which stage a group gets next. `Queue` passes stages and events between the
driver and its groups; as a Ray actor it is `queue_actor.QueueActor`. This module does not use Ray,
so that tests can step through it.

A pool is a set of worker groups with equal resources per rank (module `pools`). Each stage runs in
one pool.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from heapq import heappop, heappush
from typing import NamedTuple

from pipeline.graph.stage import Stage
from pipeline.graph.walk import Event, EventKind

STOP = "stop"  # returned instead of a stage if the group must end
# Group number g belongs to pool g // STRIDE.
STRIDE = 1_000_000


class ReadyStage(NamedTuple):
    """A stage whose parents are finished.

    Attributes:
        depth: Number of stages on the longest path of descendants. Larger depths run first.
        stage: The stage.
        pool: Index of the pool of worker groups that runs the stage.
    """

    depth: int
    stage: Stage
    pool: int = 0


class Reservation(NamedTuple):
    """A stage reserved for one idle group.

    Attributes:
        ready: The stage.
        until_request: The reservation expires after the request with this number. Calls of `take`
            are counted as requests.
    """

    ready: ReadyStage
    until_request: int


class ReadyQueue:
    """A queue of ready stages, ordered by depth.

    The cost of adding or removing a stage does not depend on the number of stages.

    A chain of stages stays on one group: while a group is idle, the first child of its last stage
    is reserved for it. An idle group calls `take` again and again (every 20 ms, see `QUEUE_POLL_S`
    in `launch.train`). Therefore a reservation expires after two requests per idle group: a group
    that has not asked by then has probably lost its workers. Other groups can then take the stage.
    Only the oldest reservation is checked; a later one is checked once it has become the oldest.
    """

    def __init__(self) -> None:
        self.waiting: dict[int, dict[str, Stage]] = {}  # depth -> stages by id, oldest first
        # (depth, parent) -> ids of waiting children; a dict as an ordered set
        self.children: dict[tuple[int, str], dict[str, None]] = {}
        self.depths: list[int] = []  # a heap of the depths in `waiting`, negative
        self.idle_after: set[str] = set()  # ids of the last stages of idle groups
        self.reserved: dict[str, Reservation] = {}  # by the id of the group's last stage
        self.requests = 0  # number of calls of `take`

    def __len__(self) -> int:
        return sum(map(len, self.waiting.values())) + len(self.reserved)

    def append(self, ready: ReadyStage) -> None:
        """Add a stage, or reserve it for an idle group whose last stage is a parent of it."""
        for parent in ready.stage.parents:
            if parent in self.idle_after and parent not in self.reserved:
                until_request = self.requests + 2 * len(self.idle_after)
                self.reserved[parent] = Reservation(ready, until_request)
                return
        self._add(ready)

    def take(self, last: Stage | None = None) -> Stage | None:
        """Remove and return the next stage for a group.

        This is the stage reserved for the group, or else a stage of the largest depth.
        Among stages of equal depth, a child of `last` is preferred.

        Args:
            last: The last stage that the group ran; None for a new group.

        Returns:
            The stage, or None if no stage is ready.
        """
        self.requests += 1
        last_id = last.id if last else ""
        self.idle_after.discard(last_id)
        if last_id in self.reserved:
            return self.reserved.pop(last_id).ready.stage
        self._release_expired()
        if not self.depths:
            if last_id:
                self.idle_after.add(last_id)
            return None
        depth = -self.depths[0]
        candidates: Iterable[str] = self.children.get((depth, last_id), ())
        if not candidates:
            candidates = self.waiting[depth]
        return self._remove(depth, next(iter(candidates)))

    def release(self, last_id: str) -> None:
        """Cancel the reservation for a group that was lost or has not asked in time.

        Args:
            last_id: Id of the last stage of the group.
        """
        self.idle_after.discard(last_id)
        if last_id in self.reserved:
            self._add(self.reserved.pop(last_id).ready)

    def _release_expired(self) -> None:
        while self.reserved:
            oldest = next(iter(self.reserved))
            if self.reserved[oldest].until_request >= self.requests:
                return
            self.release(oldest)

    def _add(self, ready: ReadyStage) -> None:
        depth = ready.depth
        stage = ready.stage
        if depth not in self.waiting:
            self.waiting[depth] = {}
            heappush(self.depths, -depth)
        self.waiting[depth][stage.id] = stage
        for parent in stage.parents:
            self.children.setdefault((depth, parent), {})[stage.id] = None

    def _remove(self, depth: int, stage_id: str) -> Stage:
        stage = self.waiting[depth].pop(stage_id)
        for parent in set(stage.parents):
            siblings = self.children[depth, parent]
            del siblings[stage_id]
            if not siblings:
                del self.children[depth, parent]
        if not self.waiting[depth]:
            heappop(self.depths)  # this is `depth`: `take` removes only stages of the largest depth
            del self.waiting[depth]
        return stage


class RunningStage(NamedTuple):
    """A running stage, and the seconds since its start."""

    stage: Stage
    seconds: float


class QueueNews(NamedTuple):
    """The answer of the queue to the driver.

    Attributes:
        events: Events since the previous answer.
        rank_nodes: Number of a group with running workers -> node id of each rank.
    """

    events: list[Event]
    rank_nodes: dict[int, list[str]]


class Rank(NamedTuple):
    """The place of a rank.

    Attributes:
        node: Id of the node.
        gpu: Number of the GPU on the node; empty without a GPU.
    """

    node: str
    gpu: str = ""


class Queue:
    """Passes stages from the driver to worker groups, and events back. Runs in a Ray actor.

    Args:
        clock: Returns the time in seconds, from an arbitrary start.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.ready: dict[int, ReadyQueue] = {}  # index of a pool -> its ready stages
        self.running: dict[int, Stage] = {}  # group -> its running stage
        self.started: dict[int, float] = {}  # group -> start of its last stage, by the clock
        self.last: dict[int, Stage] = {}  # group -> its last stage, running or not
        self.events: list[Event] = []
        self.ranks: dict[int, list[Rank]] = {}  # group with running workers -> its ranks
        self.abandoned: set[int] = set()  # lost groups, until a new group of this number joins
        self.dismissed: dict[int, bool] = {}  # group that must end -> `at_once` of `dismiss`
        self.closed = False

    # ---- called by the driver --------------------------------------------------------------------
    def offer(self, stages: list[ReadyStage]) -> QueueNews:
        """Add stages. Return a `QueueNews` with the events since the last call.

        The answer also contains the nodes of all groups with running workers.
        """
        for ready in stages:
            self._get_ready(ready.pool).append(ready)
        events = self.events
        self.events = []
        rank_nodes = {group: [rank.node for rank in ranks] for group, ranks in self.ranks.items()}
        return QueueNews(events, rank_nodes)

    def dismiss(self, groups: list[int], at_once: bool) -> None:
        """Make groups end.

        Args:
            groups: Numbers of the groups.
            at_once: Whether a group saves the state of the current stage and ends immediately.
                Otherwise, it finishes this stage first.
        """
        for group in groups:
            self.dismissed[group] = at_once or self.dismissed.get(group, False)

    def abandon(self, group: int, message: str, moved: bool = False) -> None:
        """Abandon a lost group. The driver can start a new group with the same number.

        If the group was running a stage, an event of kind LOST is added for it.

        Args:
            group: Number of the group.
            message: Reason of the loss.
            moved: Whether the loss was not caused by the stage that the group ran. The stage then
                counts as MOVED and not as a failed try.
        """
        self._lose(group, message, moved)
        if group in self.last:
            self._get_ready(group // STRIDE).release(self.last[group].id)
        self.ranks.pop(group, None)
        self.dismissed.pop(group, None)
        self.abandoned.add(group)

    def get_stage(self, group: int) -> Stage | None:
        """Return the running stage of a group, or else its last stage."""
        return self.running.get(group) or self.last.get(group)

    def close(self) -> None:
        """Make every group end at its next request for a stage."""
        self.closed = True

    def list_running_stages(self) -> dict[int, RunningStage]:
        """Return the running stage of each group, and the seconds since its start."""
        now = self.clock()
        stages = {}
        for group, stage in self.running.items():
            stages[group] = RunningStage(stage, now - self.started[group])
        return stages

    def time_out(self, group: int, stage_id: str, message: str) -> bool:
        """Abandon a group because its stage takes too long. The stage counts as failed.

        Args:
            group: Number of the group.
            stage_id: Id of the stage.
            message: Message of the failure.

        Returns:
            False if the group no longer runs the stage.
        """
        stage = self.running.get(group)
        if stage is None or stage.id != stage_id:
            return False
        del self.running[group]
        self.events.append(Event(EventKind.FAILED, stage_id, message))
        self.abandon(group, message)
        return True

    # ---- called by worker groups -----------------------------------------------------------------
    def join(self, group: int, ranks: list[Rank]) -> None:
        """Register a group whose workers have started. Called by rank 0 of the group.

        If a group with this number was running a stage, the stage is lost: its workers died.

        Args:
            group: Number of the group.
            ranks: Node and GPU of each rank.
        """
        self._lose(group, "its workers died")
        self.ranks[group] = ranks
        self.abandoned.discard(group)

    def next_stage(self, group: int) -> Stage | str | None:
        """Return the next stage of a group. Called by rank 0 of the group.

        A group asks only when it has ended its last stage. If this stage still counts as running,
        its workers died and new workers ask, so the stage is lost.

        Returns:
            The stage, STOP if the group must end, or None if no stage is ready yet.
        """
        self._lose(group, "its workers died")
        if self.closed or group in self.dismissed:
            return STOP
        if group in self.abandoned:  # a worker of the old group; the new group has not joined yet
            return None
        stage = self._get_ready(group // STRIDE).take(self.last.get(group))
        if stage is not None:
            self.running[group] = stage
            self.started[group] = self.clock()
            self.last[group] = stage
            ranks = self.ranks.get(group, [])
            body = {
                "group": group,
                "nodes": [rank.node for rank in ranks],
                "gpus": [rank.gpu for rank in ranks if rank.gpu],
            }
            self.events.append(Event(EventKind.STARTED, stage.id, body=body))
        return stage

    def post(self, group: int, event: Event) -> bool:
        """Receive an event from a rank.

        Progress, checkpoints and samples of the use of the machine are always passed to the driver.
        An event that ends a stage is ignored if the group does not run this stage any longer. This
        happens if several ranks failed (only the first event counts), or if the group was abandoned
        and has not ended yet.

        Args:
            group: Number of the group.
            event: Event of the group's stage, or of kind SAMPLE.

        Returns:
            Whether the group must save its state and end immediately.
        """
        stage = self.running.get(group)
        if event.kind in (EventKind.PROGRESS, EventKind.CHECKPOINT, EventKind.SAMPLE):
            self.events.append(event)
        elif stage is not None and stage.id == event.stage:
            if event.kind is EventKind.LOST:
                self._lose(group, event.message)
            else:
                del self.running[group]
                self.events.append(event)
        return self.dismissed.get(group, False)

    def _get_ready(self, pool: int) -> ReadyQueue:
        return self.ready.setdefault(pool, ReadyQueue())

    def _lose(self, group: int, message: str, moved: bool = False) -> None:
        stage = self.running.pop(group, None)
        if stage is not None:
            nodes = [rank.node for rank in self.ranks.get(group, [])]
            body = {"nodes": nodes, "moved": moved}
            self.events.append(Event(EventKind.LOST, stage.id, message, body=body))
