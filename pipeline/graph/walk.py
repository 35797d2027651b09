"""The state of a walk over the graph. Events change the state, and decisions follow from it.

States, events and decisions are values. This module reads no store, starts no process and uses no
clock, so tests can step through a walk.
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
    """The state of one stage in a walk."""

    WAITING = "waiting"
    RUNNING = "running"
    REUSED = "reused"
    DONE = "done"
    FAILED = "failed"
    BLOCKED = "blocked"  # an ancestor failed


FINISHED = (State.REUSED, State.DONE)  # the stage has a result, or needs none
NEVER_FINISHES = (State.FAILED, State.BLOCKED)
ENDED = (*FINISHED, *NEVER_FINISHES)


class EventKind(StrEnum):
    """Kind of a report of an executor."""

    DONE = "done"  # body: its manifest
    FAILED = "failed"  # it raised an error
    LOST = "lost"  # its workers died
    MOVED = "moved"  # its node was lost or preempted: this does not count as a try
    DAMAGED = "damaged"  # a file of a parent's result, named by `key`, is damaged
    STARTED = "started"  # a worker has started it; body: `where`, `nodes`, `gpus`
    PROGRESS = "progress"  # body: its progress
    CHECKPOINT = "checkpoint"  # its state was saved; body: `epoch` and `step` of the next step
    NOTE = "note"  # a message about the cluster; no stage
    SAMPLE = "sample"  # body: use of a worker's machine; no stage
    GROUPS = "groups"  # body: number of worker groups that are `up` and `starting`; no stage


@dataclass(frozen=True)
class Event:
    """A report of an executor.

    Attributes:
        kind: Kind of the event.
        stage: Id of the stage; empty if the event concerns no stage.
        message: Text for people.
        final: A retry would end with the same error, so there is none.
        key: Key of a damaged result.
        body: Values that depend on the kind.
    """

    kind: EventKind
    stage: str
    message: str = ""
    final: bool = False
    key: str = ""
    body: dict[str, Any] = field(default_factory=dict)


class DecisionKind(StrEnum):
    """Kind of a decision."""

    LAUNCH = "launch"
    RETRY = "retry"  # run it again: the failure counts as a try
    MOVE = "move"  # run it again: the loss of a node does not count as a try
    RECOMPUTE = "recompute"  # its stored result is damaged or outdated
    FAIL = "fail"
    BLOCK = "block"  # an ancestor failed, so it never runs


@dataclass(frozen=True)
class Decision:
    """The next action for a stage.

    Attributes:
        kind: Kind of the decision.
        stage: Id of the stage.
        reason: Why.
        depth: Number of stages on the longest path of descendants.
    """

    kind: DecisionKind
    stage: str
    reason: str = ""
    depth: int = 0


@dataclass
class Walk:
    """The state of one walk over the graph.

    `decide` returns the next actions. `record` and `apply` record actions and their outcome. Each
    change of a stage notes the stages that it can affect. So the cost of a decision does not depend
    on the size of the graph.

    Attributes:
        graph: The graph.
        retries: Tries of a stage after the first one.
        states: State of each stage, by id.
        tries: Failed tries of stages, by id.
        moves: Losses of nodes, by stage id.
        messages: Last message about stages, by id.
    """

    graph: Graph
    retries: int
    states: dict[str, State]  # only `_set_state` writes it
    tries: dict[str, int] = field(default_factory=dict)
    moves: dict[str, int] = field(default_factory=dict)
    messages: dict[str, str] = field(default_factory=dict)

    @classmethod
    def over(cls, graph: Graph, reused: Iterable[str], retries: int) -> Walk:
        """Return a walk in which `reused` stages have results and all other stages wait.

        Args:
            graph: The graph.
            reused: Ids of stages.
            retries: Tries of a stage after the first one.
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
        self._same_key: dict[str, list[Stage]] = {}  # stages with equal keys are the same work
        self._running_keys: set[str] = set()
        self._changed: set[str] = set()  # waiting stages that `decide` must check
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
        """Return the stages to block, in the order of the graph, and then the stages to launch.

        Stages with the longest path of descendants are launched first.
        """
        blocked: dict[str, Decision] = {}
        ready: dict[str, Stage] = {}  # by key: equal work is launched only once
        # A heap of positions in the graph. A blocked stage adds its children in the same pass.
        indices = sorted(self._index[stage_id] for stage_id in self._changed)
        while indices:
            stage = self._stages[heappop(indices)]
            if stage.id in blocked:
                continue
            culprit = self._parent_that_never_finishes(stage, blocked)
            if culprit is not None:
                reason = f"{culprit} did not finish"
                blocked[stage.id] = Decision(DecisionKind.BLOCK, stage.id, reason)
                for child in self._waiting_children(stage.id):
                    heappush(indices, self._index[child.id])
            elif self._unfinished_parents[stage.id] or stage.key in self._running_keys:
                self._changed.discard(stage.id)  # until something changes
            else:
                ready.setdefault(stage.key, stage)
        return [*blocked.values(), *self._launches(ready.values())]

    def _parent_that_never_finishes(self, stage: Stage, blocked: Container[str]) -> str | None:
        for parent in stage.parents:
            if parent in blocked or self.states[parent] in NEVER_FINISHES:
                return parent
        return None

    def _waiting_children(self, stage_id: str) -> list[Stage]:
        children = self.graph.children(stage_id)
        return [child for child in children if self.states[child.id] is State.WAITING]

    def _launches(self, ready: Iterable[Stage]) -> list[Decision]:
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
        """Record an event. Return the decision on a stage that failed or was lost, else None."""
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
        """Record that the result of a finished stage is outdated: the stage waits again."""
        self._set_state(stage_id, State.WAITING)
        return Decision(DecisionKind.RECOMPUTE, stage_id, reason)

    def _recompute_parent(self, event: Event) -> Decision | None:
        """Let the reader of a damaged result wait until its writer has run again."""
        writers = self._same_key.get(event.key)
        if not writers or not self._has_try_left(event.stage):
            return None
        self._set_state(event.stage, State.WAITING)
        writer = writers[0].id
        if self.states[writer] not in FINISHED:
            # Another reader found the damage before, and the result is being computed.
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
        has_try_left = self._has_try_left(event.stage)
        if event.final or not has_try_left:
            return None
        self._set_state(event.stage, State.WAITING)
        return Decision(DecisionKind.RETRY, event.stage, event.message)

    def _fail(self, event: Event) -> Decision:
        self._set_state(event.stage, State.FAILED, event.message)
        return Decision(DecisionKind.FAIL, event.stage, event.message)

    def _has_try_left(self, stage_id: str) -> bool:
        """Count a failed try of a stage. Return whether it can be tried again."""
        tries = self.tries.get(stage_id, 0) + 1
        self.tries[stage_id] = tries
        return tries <= self.retries

    # ---- states ----------------------------------------------------------------------------------
    def _set_state(self, stage_id: str, state: State, message: str | None = None) -> None:
        """Change the state of a stage. This is the only way to change it.

        It also updates the counts, and the conditions that its children and the stages of the key
        wait for.
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
