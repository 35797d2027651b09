"""The scheduler of a run: a state machine that walks over the graph of stages.

Events of the executor change the state. The state determines the decisions. States, events and
decisions are plain values. This module reads no store, starts no process and uses no clock, so that
tests can step through a walk.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from heapq import heappop, heappush
from typing import Any

from pipeline.graph.retries import MAX_MOVES
from pipeline.graph.stage import Graph, Stage


class State(Enum):
    """The state of a stage in a walk."""

    WAITING = "waiting"
    RUNNING = "running"
    REUSED = "reused"
    DONE = "done"
    FAILED = "failed"
    BLOCKED = "blocked"  # an ancestor failed


FINISHED = (State.REUSED, State.DONE)  # the stage has a result, or does not have to run
NEVER_FINISHES = (State.FAILED, State.BLOCKED)
ENDED = (*FINISHED, *NEVER_FINISHES)


class EventKind(StrEnum):
    """Kind of an event that an executor reports."""

    DONE = "done"  # the stage has a result; body: its manifest
    FAILED = "failed"  # the stage raised an error
    LOST = "lost"  # the workers of the stage died
    MOVED = "moved"  # the node of the stage was lost or preempted; not a try (up to MAX_MOVES)
    DAMAGED = "damaged"  # a file of an input is damaged; `key`: key of the damaged result
    STARTED = "started"  # a worker has started the stage; body: `where`, `nodes`, `gpus`
    PROGRESS = "progress"  # body: progress of the stage
    CHECKPOINT = "checkpoint"  # a checkpoint was saved; body: `epoch` and `step` of the next step
    NOTE = "note"  # a message about the cluster; no stage
    SAMPLE = "sample"  # body: use of a worker's machine; no stage
    GROUPS = "groups"  # body: number of worker groups in state `up` and `starting`; no stage


@dataclass(frozen=True)
class Event:
    """An event that an executor reports.

    Attributes:
        kind: Kind of the event.
        stage: Id of the stage; empty if the event concerns no stage.
        message: Text for the user.
        final: Whether a retry would fail with the same error. If so, the stage is not tried again.
        key: Key of a damaged result.
        body: Further values; see `EventKind`.
    """

    kind: EventKind
    stage: str
    message: str = ""
    final: bool = False
    key: str = ""
    body: dict[str, Any] = field(default_factory=dict)


class DecisionKind(StrEnum):
    """Kind of a decision."""

    LAUNCH = "launch"  # submit the stage to the executor
    RETRY = "retry"  # run the stage again; the failure counts as a try
    MOVE = "move"  # run the stage again; the loss of a node does not count as a try
    RECOMPUTE = "recompute"  # run the stage again, because its result is damaged or outdated
    FAIL = "fail"  # do not try the stage again
    BLOCK = "block"  # never run the stage, because an ancestor failed


@dataclass(frozen=True)
class Decision:
    """The next action for a stage.

    Attributes:
        kind: Kind of the decision.
        stage: Id of the stage.
        reason: Reason for the decision.
        depth: Number of stages on the longest path of descendants.
    """

    kind: DecisionKind
    stage: str
    reason: str = ""
    depth: int = 0


@dataclass
class Walk:
    """The state of one walk over the graph.

    `decide` returns the next decisions. `record` records that a decision was carried out, and
    `apply` records an event. Each change of a stage marks the stages that it can affect, so the
    cost of `decide` does not depend on the size of the graph.

    Attributes:
        graph: The graph.
        retries: Maximum number of retries of a stage.
        states: State of each stage, by id.
        tries: Number of failed tries, by stage id.
        moves: Number of lost nodes, by stage id.
        messages: Why a stage failed or is blocked, by stage id.
    """

    graph: Graph
    retries: int
    states: dict[str, State]  # only `_set_state` writes it
    tries: dict[str, int] = field(default_factory=dict)
    moves: dict[str, int] = field(default_factory=dict)
    messages: dict[str, str] = field(default_factory=dict)

    @classmethod
    def over(cls, graph: Graph, reused: Iterable[str], retries: int) -> Walk:
        """Return a walk at its start: all stages wait, except the stages in `reused`.

        Args:
            graph: The graph.
            reused: Ids of stages that have a result or do not have to run.
            retries: Maximum number of retries of a stage.
        """
        states = {stage.id: State.WAITING for stage in graph}
        for stage_id in reused:
            states[stage_id] = State.REUSED
        return cls(graph, retries, states)

    def __post_init__(self) -> None:
        self._stages = list(self.graph)
        self._index = {stage.id: index for index, stage in enumerate(self._stages)}
        self._counts = Counter(self.states.values())
        self._unfinished_parents: dict[str, int] = {}
        self._same_key: dict[str, list[Stage]] = {}  # by key; such stages have the same result
        self._running_keys: set[str] = set()
        self._changed: set[str] = set()  # ids of waiting stages that `decide` must check
        for stage in self._stages:
            unfinished = [p for p in set(stage.parents) if self.states[p] not in FINISHED]
            self._unfinished_parents[stage.id] = len(unfinished)
            self._same_key.setdefault(stage.key, []).append(stage)
            if self.states[stage.id] is State.RUNNING:
                self._running_keys.add(stage.key)
            if self.states[stage.id] is State.WAITING:
                self._changed.add(stage.id)

    # ---- decisions -------------------------------------------------------------------------------
    def decide(self) -> list[Decision]:
        """Return the decisions to block stages, in graph order, then the decisions to launch.

        Stages with the longest path of descendants are launched first.
        """
        blocked: dict[str, Decision] = {}
        ready: dict[str, Stage] = {}  # by key: of stages with equal keys, only one is launched
        # a heap of positions in the graph, so that children of blocked stages are checked, too
        indices = sorted(self._index[stage_id] for stage_id in self._changed)
        while indices:
            stage = self._stages[heappop(indices)]
            if stage.id in blocked:
                continue
            culprit = self._find_failed_parent(stage, blocked)
            if culprit is not None:
                reason = f"{culprit} did not finish"
                blocked[stage.id] = Decision(DecisionKind.BLOCK, stage.id, reason)
                for child in self._waiting_children(stage.id):
                    heappush(indices, self._index[child.id])
            elif self._unfinished_parents[stage.id] or stage.key in self._running_keys:
                self._changed.discard(stage.id)  # until the state of another stage changes
            else:
                ready.setdefault(stage.key, stage)
        return [*blocked.values(), *self._make_launches(ready.values())]

    def _find_failed_parent(self, stage: Stage, blocked: Container[str]) -> str | None:
        for parent in stage.parents:
            if parent in blocked or self.states[parent] in NEVER_FINISHES:
                return parent
        return None

    def _waiting_children(self, stage_id: str) -> list[Stage]:
        children = self.graph.children(stage_id)
        return [child for child in children if self.states[child.id] is State.WAITING]

    def _make_launches(self, ready: Iterable[Stage]) -> list[Decision]:
        depths = self.graph.depths
        deepest_first = sorted(ready, key=lambda stage: -depths[stage.id])
        return [
            Decision(DecisionKind.LAUNCH, stage.id, depth=depths[stage.id])
            for stage in deepest_first
        ]

    def record(self, decision: Decision) -> None:
        """Record that a decision of `decide` was carried out."""
        if decision.kind is DecisionKind.LAUNCH:
            self._set_state(decision.stage, State.RUNNING)
        else:
            self._set_state(decision.stage, State.BLOCKED, decision.reason)

    # ---- events ----------------------------------------------------------------------------------
    def apply(self, event: Event) -> Decision | None:
        """Record an event.

        Returns:
            The decision that follows from a failure, a loss or a damaged input, else None. After a
            damaged input, the decision can be to recompute the stage that the input came from.
        """
        match event.kind:
            case EventKind.DONE:
                self._set_state(event.stage, State.DONE)
                return None
            case EventKind.STARTED | EventKind.PROGRESS | EventKind.CHECKPOINT:
                return None
            case EventKind.NOTE | EventKind.SAMPLE | EventKind.GROUPS:
                return None
            case EventKind.DAMAGED:
                return self._recompute_parent(event) or self._fail(event)
            case EventKind.MOVED:
                return self._move(event) or self._retry(event) or self._fail(event)
            case EventKind.FAILED | EventKind.LOST:
                return self._retry(event) or self._fail(event)

    def fail(self, stage_id: str, message: str) -> None:
        """Record that a stage failed before this walk."""
        self._set_state(stage_id, State.FAILED, message)

    def rerun(self, stage_id: str, reason: str) -> Decision:
        """Record that the result of a finished stage is damaged or outdated: the stage waits again.

        Args:
            stage_id: Id of the stage.
            reason: Why the stage must run again.
        """
        self._set_state(stage_id, State.WAITING)
        return Decision(DecisionKind.RECOMPUTE, stage_id, reason)

    def _recompute_parent(self, event: Event) -> Decision | None:
        """Run the stage with the damaged result again. The stage that read this result waits.

        Return None if the result belongs to no stage of the graph, or the reader has no try left.
        """
        writers = self._same_key.get(event.key)
        if not writers or not self._count_try(event.stage):
            return None
        self._set_state(event.stage, State.WAITING)
        writer = writers[0].id
        if self.states[writer] not in FINISHED:
            # another reader has already reported the damage, and the result is being recomputed
            return Decision(DecisionKind.RETRY, event.stage, event.message)
        return self.rerun(writer, event.message)

    def _move(self, event: Event) -> Decision | None:
        moves = self.moves.get(event.stage, 0) + 1
        self.moves[event.stage] = moves
        if moves > MAX_MOVES:
            return None
        self._set_state(event.stage, State.WAITING)
        return Decision(DecisionKind.MOVE, event.stage, event.message)

    def _retry(self, event: Event) -> Decision | None:
        has_try_left = self._count_try(event.stage)
        if event.final or not has_try_left:
            return None
        self._set_state(event.stage, State.WAITING)
        return Decision(DecisionKind.RETRY, event.stage, event.message)

    def _fail(self, event: Event) -> Decision:
        self._set_state(event.stage, State.FAILED, event.message)
        return Decision(DecisionKind.FAIL, event.stage, event.message)

    def _count_try(self, stage_id: str) -> bool:
        """Count a failed try of a stage. Return whether it can be tried again."""
        tries = self.tries.get(stage_id, 0) + 1
        self.tries[stage_id] = tries
        return tries <= self.retries

    # ---- states ----------------------------------------------------------------------------------
    def _set_state(self, stage_id: str, state: State, message: str | None = None) -> None:
        """Change the state of a stage. All changes of `states` must use this method.

        It also updates the counts, and marks children of the stage and stages with the same key
        that may be able to run or must be blocked now.
        """
        before = self.states[stage_id]
        self.states[stage_id] = state
        if message is not None:
            self.messages[stage_id] = message
        self._counts[before] -= 1
        self._counts[state] += 1
        self._changed.discard(stage_id)
        if state is State.WAITING:
            self._changed.add(stage_id)
        self._update_same_key(self.graph[stage_id].key, before, state)
        self._update_children(stage_id, before, state)

    def _update_same_key(self, key: str, before: State, state: State) -> None:
        if state is State.RUNNING:
            self._running_keys.add(key)
        elif before is State.RUNNING:
            self._running_keys.discard(key)
            for twin in self._same_key[key]:
                if self.states[twin.id] is State.WAITING:
                    self._changed.add(twin.id)

    def _update_children(self, stage_id: str, before: State, state: State) -> None:
        newly_finished = state in FINISHED and before not in FINISHED
        no_longer_finished = before in FINISHED and state not in FINISHED
        for child in self.graph.children(stage_id):
            if newly_finished:
                self._unfinished_parents[child.id] -= 1
            elif no_longer_finished:
                self._unfinished_parents[child.id] += 1
        for child in self._waiting_children(stage_id):
            may_run = newly_finished and not self._unfinished_parents[child.id]
            if may_run or state in NEVER_FINISHES:
                self._changed.add(child.id)

    @property
    def ended(self) -> bool:
        """Whether every stage is finished, failed or blocked."""
        return self.count(*ENDED) == len(self.states)

    def count(self, *states: State) -> int:
        """Return the number of stages in one of these states."""
        return sum(self._counts[state] for state in states)
