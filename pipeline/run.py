"""Walks the graph: reuse, launch, retry. States and decisions are values; the walk is stepped in tests without a cluster."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

from pipeline.graph import Graph, Stage
from pipeline.store import Lookup, Store
from workers.errors import UserError


class State(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    REUSED = "reused"
    DONE = "done"
    FAILED = "failed"
    BLOCKED = "blocked"  # an ancestor failed


FINISHED = (State.REUSED, State.DONE)
MOST_MOVES = 20  # a stage that loses more nodes than this is suspected of it
ENDED = (*FINISHED, State.FAILED, State.BLOCKED)


@dataclass(frozen=True)
class Event:
    """What an executor reports. kind: `done` (manifest), `failed` (message; final=True: trying again cannot help), `lost` (its workers died),
    `moved` (its node was lost or is taken away: no fault of its own, so it counts as no try), `damaged` (message, key: a parent's files are
    not what they were), `progress` (body). `note` is of no stage: something to say."""

    kind: str
    stage: str
    message: str = ""
    final: bool = False
    key: str = ""
    body: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Decision:
    """launch a stage, retry it, fail it, or block it because of another. depth: how many stages still follow it."""

    kind: str
    stage: str
    reason: str = ""
    depth: int = 0


class Executor(Protocol):
    """Runs stages somewhere, those with most work behind them first, and reports events."""

    def submit(self, stage: Stage, depth: int) -> None: ...
    def poll(self) -> list[Event]: ...
    def close(self) -> None: ...


@dataclass
class Walk:
    """The state of one walk over the graph. `apply` takes events, `decide` says what to do next; neither does anything else."""

    graph: Graph
    retries: int
    states: dict[str, State]
    tries: dict[str, int] = field(default_factory=dict)
    moves: dict[str, int] = field(default_factory=dict)
    messages: dict[str, str] = field(default_factory=dict)

    @classmethod
    def over(cls, graph: Graph, hits: Iterable[str], retries: int) -> Walk:
        reused = set(hits)
        return cls(graph, retries, {s.id: State.REUSED if s.id in reused else State.WAITING for s in graph})

    def decide(self) -> list[Decision]:
        """Stages to launch now, those with most work behind them first; stages that can never run."""
        decisions, ready, states = [], [], dict(self.states)
        busy = {s.key for s in self.graph if states[s.id] is State.RUNNING}
        for stage in self.graph:
            if states[stage.id] is not State.WAITING:
                continue
            bad = next((p for p in stage.parents if states[p] in (State.FAILED, State.BLOCKED)), None)
            if bad is not None:
                states[stage.id] = State.BLOCKED  # so that what waits for this one is blocked in the same pass
                decisions.append(Decision("block", stage.id, f"{bad} did not finish"))
            elif all(states[p] in FINISHED for p in stage.parents) and stage.key not in busy:
                busy.add(stage.key)  # two stages that are the same work: one does it, the other then finds it done
                ready.append(stage)
        depth = self._depths()
        ready.sort(key=lambda s: -depth[s.id])
        return decisions + [Decision("launch", s.id, depth=depth[s.id]) for s in ready]

    def _depths(self) -> dict[str, int]:
        depth: dict[str, int] = {}
        for stage in reversed(list(self.graph)):
            depth.setdefault(stage.id, 0)
            for parent in stage.parents:
                depth[parent] = max(depth.get(parent, 0), depth[stage.id] + 1)
        return depth

    def carry_out(self, decision: Decision) -> None:
        """Records that a decision was carried out."""
        if decision.kind == "launch":
            self.states[decision.stage] = State.RUNNING
        else:
            self.states[decision.stage], self.messages[decision.stage] = State.BLOCKED, decision.reason

    def apply(self, event: Event) -> Decision | None:
        """A new state from an event; returns the decision that a failure calls for."""
        if event.kind == "done":
            self.states[event.stage] = State.DONE
            return None
        if event.kind == "progress":
            return None
        if event.kind == "damaged":
            owner = next((s.id for s in self.graph if s.key == event.key), None)
            if owner is not None and self._try_again(event.stage):
                self.states[event.stage] = State.WAITING
                if self.states[owner] not in FINISHED:  # another reader has found it before, and it is being computed
                    return Decision("retry", event.stage, event.message)
                self.states[owner] = State.WAITING
                return Decision("recompute", owner, event.message)
        elif event.kind == "moved" and self._move(event.stage):
            self.states[event.stage] = State.WAITING
            return Decision("move", event.stage, event.message)
        elif not event.final and self._try_again(event.stage):
            self.states[event.stage] = State.WAITING
            return Decision("retry", event.stage, event.message)
        self.states[event.stage], self.messages[event.stage] = State.FAILED, event.message
        return Decision("fail", event.stage, event.message)

    def _move(self, stage_id: str) -> bool:
        self.moves[stage_id] = self.moves.get(stage_id, 0) + 1
        return self.moves[stage_id] <= MOST_MOVES

    def _try_again(self, stage_id: str) -> bool:
        self.tries[stage_id] = self.tries.get(stage_id, 0) + 1
        return self.tries[stage_id] <= self.retries

    @property
    def ended(self) -> bool:
        return all(s in ENDED for s in self.states.values())

    def count(self, *states: State) -> int:
        return sum(s in states for s in self.states.values())


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    states: dict[str, State]
    failures: dict[str, str]
    seconds: float

    @property
    def ran(self) -> int:
        return sum(s is State.DONE for s in self.states.values())

    @property
    def reused(self) -> int:
        return sum(s is State.REUSED for s in self.states.values())


class Watcher(Protocol):
    """Whoever wants to know: the terminal, MLflow."""

    def event(self, walk: Walk, event: Event) -> None: ...
    def decision(self, walk: Walk, decision: Decision) -> None: ...


def look_up_all(graph: Graph, store: Store, previous: dict[str, Any] | None, verify: bool = True) -> dict[str, Lookup]:
    """A look-up per stage; with `verify`, every file is compared with its digest."""
    return {stage.id: store.look_up(stage, previous, verify) for stage in graph}


def needed(graph: Graph, lookups: dict[str, Lookup]) -> set[str]:
    """Stages to run: all that are missing, but data only where it is wanted for itself, or one of them waits for it: what was
    learned stands without."""
    missing = {s.id for s in graph if not lookups[s.id].hit}
    want = {i for i in missing if graph[i].step != "ingest" or not graph.children(i)}
    return want | {p for i in want for p in graph[i].parents if p in missing}


def run_graph(graph: Graph, store: Store, executor_of: Callable[[set[str]], Executor], retries: int, watchers: list[Watcher],
              lookups: dict[str, Lookup], poll_s: float = 0.02) -> Outcome:
    """Runs what is missing. executor_of is called once, with the ids to run, and only if there are any."""
    started = time.monotonic()
    todo = needed(graph, lookups)
    walk = Walk.over(graph, (s.id for s in graph if s.id not in todo), retries)
    if not todo:
        return Outcome(walk.states, {}, time.monotonic() - started)
    for stage_id in todo:
        if lookups[stage_id].damaged:
            store.withdraw(graph[stage_id].key)
    executor = executor_of(todo)
    try:
        while not walk.ended:
            for decision in walk.decide():
                walk.carry_out(decision)
                tell(watchers, walk, decision)
                if decision.kind == "launch":
                    executor.submit(graph[decision.stage], decision.depth)
            events = executor.poll()
            for event in events:
                follow_up = walk.apply(event)
                for watcher in watchers:
                    watcher.event(walk, event)
                if follow_up:
                    if follow_up.kind == "recompute" and store.look_up(graph[follow_up.stage]).damaged:
                        store.withdraw(graph[follow_up.stage].key)
                    tell(watchers, walk, follow_up)
            if not events:
                time.sleep(poll_s)
    finally:
        executor.close()
    failures = {i: walk.messages[i] for i, s in walk.states.items() if s is State.FAILED}
    return Outcome(walk.states, failures, time.monotonic() - started)


def tell(watchers: list[Watcher], walk: Walk, decision: Decision) -> None:
    for watcher in watchers:
        watcher.decision(walk, decision)


def raise_failures(outcome: Outcome, command: str) -> None:
    """Raises UserError with the worker's own sentence and the command that resumes."""
    if outcome.failures:
        stage, message = next(iter(outcome.failures.items()))
        more = f" ({len(outcome.failures) - 1} more stages failed)" if len(outcome.failures) > 1 else ""
        raise UserError(f"stage {stage} failed: {message}{more}; what finished is kept, resume with: {command}")
