"""The order of stages, and the queue between the driver and its worker groups.

This is plain Python without Ray, so that tests can step through it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from heapq import heappop, heappush
from typing import NamedTuple

from pipeline.graph.stage import Stage
from pipeline.graph.walk import Event, EventKind

STOP = "stop"  # sent in place of a stage: the group must end
STRIDE = 1_000_000  # group g belongs to pool g // STRIDE


class ReadyStage(NamedTuple):
    """A stage whose parents are finished.

    Attributes:
        depth: Stages on the longest path of descendants; the largest depth goes first.
        stage: The stage.
        pool: Number of the pool of worker groups that can run it.
    """

    depth: int
    stage: Stage
    pool: int = 0


class Reservation(NamedTuple):
    """A stage reserved for one idle group.

    Attributes:
        ready: The stage.
        until_request: Number of the request at which the reservation expires.
    """

    ready: ReadyStage
    until_request: int


class ReadyQueue:
    """Ready stages, the deepest first.

    The cost of adding and taking does not depend on their number.

    A chain stays on its group: the first child of a group's last stage is reserved for that group
    while it is idle. The group asks again within moments, unless its workers are gone. So other
    groups get the stage after each idle group could have asked twice.
    """

    def __init__(self) -> None:
        self.waiting: dict[int, dict[str, Stage]] = {}  # depth -> stages by id, oldest first
        # (depth, parent) -> ids of waiting children; a dict as an ordered set
        self.children: dict[tuple[int, str], dict[str, None]] = {}
        self.depths: list[int] = []  # a heap of the depths in `waiting`, negative
        self.idle_after: set[str] = set()  # last stages of the groups that got no stage
        self.reserved: dict[str, Reservation] = {}  # by the last stage of the group
        self.requests = 0

    def __len__(self) -> int:
        return sum(map(len, self.waiting.values())) + len(self.reserved)

    def append(self, ready: ReadyStage) -> None:
        """Add a stage, or reserve it for the idle group whose last stage is a parent."""
        for parent in ready.stage.parents:
            if parent in self.idle_after and parent not in self.reserved:
                until_request = self.requests + 2 * len(self.idle_after)
                self.reserved[parent] = Reservation(ready, until_request)
                return
        self._add(ready)

    def take(self, last: Stage | None = None) -> Stage | None:
        """Remove and return the next stage for a group.

        It is the stage reserved for the group, or else the deepest; among equals a child of `last`.

        Args:
            last: The last stage of the group.

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
        """Give up the reservation of a group that will not ask again soon.

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
            heappop(self.depths)  # `depth` is the deepest: only `take` removes
            del self.waiting[depth]
        return stage


class RunningStage(NamedTuple):
    """A stage that a group runs, and the seconds since its start."""

    stage: Stage
    seconds: float


class QueueNews(NamedTuple):
    """The answer of the queue to the driver.

    Attributes:
        events: Events since the last answer.
        rank_nodes: Nodes of the ranks of each group with running workers.
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
    """Hands stages from the driver to worker groups, and their events back. It runs in an actor.

    Args:
        clock: Returns seconds; only differences count.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.ready: dict[int, ReadyQueue] = {}  # by pool
        self.running: dict[int, Stage] = {}  # group -> the stage it runs
        self.started: dict[int, float] = {}  # group -> when it took that stage, by the clock
        self.last: dict[int, Stage] = {}  # group -> the stage it ran last
        self.events: list[Event] = []
        self.ranks: dict[int, list[Rank]] = {}  # by group, once its workers run
        self.abandoned: set[int] = set()  # groups that the driver gave up and restarts
        self.dismissed: dict[int, bool] = {}  # group that must end -> whether at once
        self.closed = False

    # ---- called by the driver --------------------------------------------------------------------
    def offer(self, stages: list[ReadyStage]) -> QueueNews:
        """Add stages. Return the events since the last call."""
        for ready in stages:
            self._get_ready(ready.pool).append(ready)
        events = self.events
        self.events = []
        rank_nodes = {group: [rank.node for rank in ranks] for group, ranks in self.ranks.items()}
        return QueueNews(events, rank_nodes)

    def dismiss(self, groups: list[int], at_once: bool) -> None:
        """Let groups end.

        Args:
            groups: Numbers of the groups.
            at_once: End as soon as the state of the current stage is saved; else after that stage.
        """
        for group in groups:
            self.dismissed[group] = at_once or self.dismissed.get(group, False)

    def abandon(self, group: int, message: str, moved: bool = False) -> None:
        """Give up a lost group. The driver starts a new one under the same number.

        Args:
            group: Number of the group.
            message: Why it is gone.
            moved: The loss is not the fault of the stage that it ran.
        """
        self._lose(group, message, moved)
        if group in self.last:
            self._get_ready(group // STRIDE).release(self.last[group].id)
        self.ranks.pop(group, None)
        self.dismissed.pop(group, None)
        self.abandoned.add(group)

    def get_stage(self, group: int) -> Stage | None:
        """Return the stage that a group runs, or else its last one."""
        return self.running.get(group) or self.last.get(group)

    def close(self) -> None:
        """Let every group end at its next request."""
        self.closed = True

    def list_running_stages(self) -> dict[int, RunningStage]:
        """Return the running stage of each group, and the seconds since its start."""
        now = self.clock()
        stages = {}
        for group, stage in self.running.items():
            stages[group] = RunningStage(stage, now - self.started[group])
        return stages

    def time_out(self, group: int, stage_id: str, message: str) -> bool:
        """Give up a group because its stage takes too long. The stage has failed.

        Args:
            group: Number of the group.
            stage_id: Id of the stage.
            message: The message of the failure.

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
        """Register a group that has come up; called by its rank 0.

        If the group ran a stage, that stage is lost, because the workers died.

        Args:
            group: Number of the group.
            ranks: Places of the ranks.
        """
        self._lose(group, "its workers died")
        self.ranks[group] = ranks
        self.abandoned.discard(group)

    def next_stage(self, group: int) -> Stage | str | None:
        """Return the next stage of a group, or STOP. Called by rank 0 of the group.

        None means that no stage is ready yet.

        A group that asks while it runs a stage was restarted, because its workers died.
        """
        self._lose(group, "its workers died")
        if self.closed or group in self.dismissed:
            return STOP
        if group in self.abandoned:  # a rest of the old group; the new one has not joined yet
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
        """Take an event from a rank.

        If several ranks fail together, the first event counts. Events of a stage that the group no
        longer runs are ignored: the group was abandoned and has not ended yet.

        Args:
            group: Number of the group.
            event: Event of the group's stage.

        Returns:
            Whether the group must leave at once.
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
