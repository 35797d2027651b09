"""The state of a walk over the graph: events change it, decisions come out of it.

States, events and decisions are values. Nothing here reads a store, starts a process or looks at a
clock, so tests step a walk by hand.
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


FINISHED = (State.REUSED, State.DONE)  # they have a result, or need none
NEVER_FINISHES = (State.FAILED, State.BLOCKED)
ENDED = (*FINISHED, *NEVER_FINISHES)


class EventKind(StrEnum):
    """What an executor reports of a stage."""

    DONE = "done"  # body: its manifest
    FAILED = "failed"  # it raised an error
    LOST = "lost"  # its workers died
    MOVED = "moved"  # its node was lost or is preempted: this counts as no try
    DAMAGED = "damaged"  # a file of a parent's result, named by `key`, is damaged
    STARTED = "started"  # a worker has begun with it; body: `where`, `nodes`, `gpus`
    PROGRESS = "progress"  # body: how far it is
    CHECKPOINT = "checkpoint"  # its state was saved; body: `epoch` and `step` of the next step
    NOTE = "note"  # a message about the cluster, of no stage
    SAMPLE = "sample"  # body: use of a worker's machine, of no stage
    GROUPS = "groups"  # body: how many worker groups are `up` and `starting`, of no stage


@dataclass(frozen=True)
class Event:
    """A report of an executor. final: the same error would come again, so there is no retry."""

    kind: EventKind
    stage: str
    message: str = ""
    final: bool = False
    key: str = ""
    body: dict[str, Any] = field(default_factory=dict)


class DecisionKind(StrEnum):
    """What is to be done with a stage."""

    LAUNCH = "launch"
    RETRY = "retry"  # run it again: the failure counts as a try
    MOVE = "move"  # run it again: the loss of a node counts as no try
    RECOMPUTE = "recompute"  # its stored result is damaged or outdated
    FAIL = "fail"
    BLOCK = "block"  # an ancestor failed, so it never runs


@dataclass(frozen=True)
class Decision:
    """What is to be done with a stage, and why. depth: stages on the longest path behind it."""

    kind: DecisionKind
    stage: str
    reason: str = ""
    depth: int = 0


@dataclass
class Walk:
    """The state of one walk over the graph. `decide` says what to do next, `carry_out` and `apply`
    record what was done and what came of it.

    Each change of a stage notes which stages it may concern. So a decision costs the same in a
    graph of any size.
    """

    graph: Graph
    retries: int  # tries of a stage after the first one
    states: dict[str, State]  # only `_set_state` writes it
    tries: dict[str, int] = field(default_factory=dict)
    moves: dict[str, int] = field(default_factory=dict)
    messages: dict[str, str] = field(default_factory=dict)

    @classmethod
    def over(cls, graph: Graph, reused: Iterable[str], retries: int) -> Walk:
        """Return a walk in which the results of `reused` stand and all else waits."""
        states = {stage.id: State.WAITING for stage in graph}
        for stage_id in reused:
            states[stage_id] = State.REUSED
        return cls(graph, retries, states)

    def __post_init__(self) -> None:
        self._stages = list(self.graph)
        self._index = {stage.id: index for index, stage in enumerate(self._stages)}
        self._counts = Counter(self.states.values())
        self._unfinished_parents: dict[str, int] = {}
        self._same_key: dict[str, list[Stage]] = {}  # stages with one key are the same work
        self._running_keys: set[str] = set()
        self._changed: set[str] = set()  # waiting stages that `decide` has to look at
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
        """Return the stages to block, in the order of the graph, and then those to launch, the ones
        with the longest path behind them first."""
        blocked: dict[str, Decision] = {}
        ready: dict[str, Stage] = {}  # by key: of stages that are the same work one is launched
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
        """Record that a stage has failed before this walk."""
        self._set_state(stage_id, State.FAILED, message)

    def run_again(self, stage_id: str, reason: str) -> Decision:
        """Record that the result of a finished stage is outdated: it waits to be run again."""
        self._set_state(stage_id, State.WAITING)
        return Decision(DecisionKind.RECOMPUTE, stage_id, reason)

    def _recompute_parent(self, event: Event) -> Decision | None:
        """The reader of a damaged result waits until the stage that wrote it has run again."""
        writers = self._same_key.get(event.key)
        if not writers or not self._has_try_left(event.stage):
            return None
        self._set_state(event.stage, State.WAITING)
        writer = writers[0].id
        if self.states[writer] not in FINISHED:
            # Another reader met the damage before, and it is being computed.
            return Decision(DecisionKind.RETRY, event.stage, event.message)
        return self.run_again(writer, event.message)

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
        """Count a failed try of a stage. Return whether it may be tried again."""
        tries = self.tries.get(stage_id, 0) + 1
        self.tries[stage_id] = tries
        return tries <= self.retries

    # ---- states ----------------------------------------------------------------------------------
    def _set_state(self, stage_id: str, state: State, message: str | None = None) -> None:
        """The one way in which a stage changes. With it change the counts, and what its children
        and the stages of its key wait for."""
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
        """Return how many stages are in one of these states."""
        return sum(self._counts[state] for state in states)
