"""Walks the graph: reuse, launch, retry. States and decisions are values; the walk is stepped in
tests without a cluster."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import Enum
from heapq import heappop, heappush
from typing import Any, Protocol

from pipeline.graph.stage import Graph, Stage
from pipeline.graph.store import Lookup, Store, outdated
from workers.errors import UserError
from workers.storage.artifact import content_digest


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
LOOK_UP_THREADS = 16  # each holds one file of a stage at a time, of at most 64 MiB


@dataclass(frozen=True)
class Event:
    """What an executor reports. kind: `done` (manifest), `failed` (message; final=True: trying
    again cannot help), `lost` (its workers died), `moved` (its node was lost or is taken away: no
    fault of its own, so it counts as no try), `damaged` (message, key: a parent's files are not
    what they were), `progress` (body). `note` is of no stage: something to say."""

    kind: str
    stage: str
    message: str = ""
    final: bool = False
    key: str = ""
    body: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Decision:
    """launch a stage, retry it, fail it, or block it because of another. depth: how many stages
    still follow it."""

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
    """The state of one walk over the graph. `apply` takes events, `decide` says what to do next;
    neither does anything else.

    What a change of one stage may let happen is noted when it changes, so that a decision costs the
    same in a graph of any size.
    """

    graph: Graph
    retries: int
    states: dict[str, State]  # read it; `_become` alone changes it
    tries: dict[str, int] = field(default_factory=dict)
    moves: dict[str, int] = field(default_factory=dict)
    messages: dict[str, str] = field(default_factory=dict)

    @classmethod
    def over(cls, graph: Graph, hits: Iterable[str], retries: int) -> Walk:
        reused = set(hits)
        return cls(
            graph, retries, {s.id: State.REUSED if s.id in reused else State.WAITING for s in graph}
        )

    def __post_init__(self) -> None:
        self._stages = list(self.graph)
        self._place = {s.id: i for i, s in enumerate(self._stages)}
        self._counts = Counter(self.states.values())
        self._unmet = {
            s.id: sum(self.states[p] not in FINISHED for p in {*s.parents}) for s in self._stages
        }  # parents that are not finished
        self._twins: dict[str, list[Stage]] = {}  # key -> stages that are the same work
        for stage in self._stages:
            self._twins.setdefault(stage.key, []).append(stage)
        self._busy = {s.key for s in self._stages if self.states[s.id] is State.RUNNING}
        self._news = {
            i for i, s in self.states.items() if s is State.WAITING
        }  # stages of which `decide` may have something to say

    def decide(self) -> list[Decision]:
        """Stages that can never run, in the order of the graph; stages to launch now, those with
        most work behind them first."""
        blocked: dict[str, Decision] = {}
        ready: dict[
            str, Stage
            # by key: of two stages that are the same work one does it, the other then finds it done
        ] = {}
        places = sorted(self._place[i] for i in self._news)
        while places:
            stage = self._stages[heappop(places)]
            bad = next(
                (
                    p
                    for p in stage.parents
                    if p in blocked or self.states[p] in (State.FAILED, State.BLOCKED)
                ),
                None,
            )
            if bad is not None:
                for child in self.graph.children(stage.id) if stage.id not in blocked else ():
                    if (
                        self.states[child.id] is State.WAITING
                    ):  # what waits for this one is blocked in the same pass
                        heappush(places, self._place[child.id])
                blocked[stage.id] = Decision("block", stage.id, f"{bad} did not finish")
            elif not self._unmet[stage.id] and stage.key not in self._busy:
                ready.setdefault(stage.key, stage)
            else:
                self._news.discard(stage.id)  # until something changes
        depth = self.graph.depths
        first = sorted(ready.values(), key=lambda s: -depth[s.id])
        return [*blocked.values(), *(Decision("launch", s.id, depth=depth[s.id]) for s in first)]

    def carry_out(self, decision: Decision) -> None:
        """Records that a decision was carried out."""
        if decision.kind == "launch":
            self._become(decision.stage, State.RUNNING)
        else:
            self._become(decision.stage, State.BLOCKED, decision.reason)

    def apply(self, event: Event) -> Decision | None:
        """A new state from an event; returns the decision that a failure calls for."""
        if event.kind == "done":
            self._become(event.stage, State.DONE)
            return None
        if event.kind == "progress":
            return None
        if event.kind == "damaged":
            owner = next((s.id for s in self._twins.get(event.key, ())), None)
            if owner is not None and self._try_again(event.stage):
                self._become(event.stage, State.WAITING)
                if (
                    self.states[owner] not in FINISHED
                ):  # another reader has found it before, and it is being computed
                    return Decision("retry", event.stage, event.message)
                self._become(owner, State.WAITING)
                return Decision("recompute", owner, event.message)
        elif event.kind == "moved" and self._move(event.stage):
            self._become(event.stage, State.WAITING)
            return Decision("move", event.stage, event.message)
        elif not event.final and self._try_again(event.stage):
            self._become(event.stage, State.WAITING)
            return Decision("retry", event.stage, event.message)
        self._become(event.stage, State.FAILED, event.message)
        return Decision("fail", event.stage, event.message)

    def run_again(self, stage_id: str, reason: str) -> Decision:
        """A finished stage whose result no longer goes with those of its parents."""
        self._become(stage_id, State.WAITING)
        return Decision("recompute", stage_id, reason)

    def _move(self, stage_id: str) -> bool:
        self.moves[stage_id] = self.moves.get(stage_id, 0) + 1
        return self.moves[stage_id] <= MOST_MOVES

    def _try_again(self, stage_id: str) -> bool:
        self.tries[stage_id] = self.tries.get(stage_id, 0) + 1
        return self.tries[stage_id] <= self.retries

    def _become(self, stage_id: str, state: State, message: str | None = None) -> None:
        """The one way in which a stage changes: with it change the counts, and what its children
        and its twins wait for."""
        before, self.states[stage_id] = self.states[stage_id], state
        if message is not None:
            self.messages[stage_id] = message
        self._counts[before] -= 1
        self._counts[state] += 1
        self._news.discard(stage_id)
        if state is State.WAITING:
            self._news.add(stage_id)
        key, children = self.graph[stage_id].key, self.graph.children(stage_id)
        if state is State.RUNNING:
            self._busy.add(key)
        elif before is State.RUNNING:
            self._busy.discard(key)
            self._news |= {s.id for s in self._twins[key] if self.states[s.id] is State.WAITING}
        step = (before in FINISHED) - (state in FINISHED)
        for child in children:
            self._unmet[child.id] += step
        if step < 0 or state in (State.FAILED, State.BLOCKED):
            self._news |= {
                c.id
                for c in children
                if self.states[c.id] is State.WAITING and (step == 0 or not self._unmet[c.id])
            }

    @property
    def ended(self) -> bool:
        return self.count(*ENDED) == len(self.states)

    def count(self, *states: State) -> int:
        return sum(self._counts[s] for s in states)


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    states: dict[str, State]
    failures: dict[str, str]
    seconds: float
    # of what stands at the end, as far as it is known
    manifests: dict[str, Mapping[str, Any] | None] = field(default_factory=dict)

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


def contents_of(lookups: Mapping[str, Lookup]) -> dict[str, str]:
    """Stage id -> content, of the results that stand."""
    return {
        i: content_digest(dict(lookup.manifest)) for i, lookup in lookups.items() if lookup.manifest
    }


def look_up_all(
    graph: Graph, store: Store, previous: dict[str, Any] | None, verify: bool = True
) -> dict[str, Lookup]:
    """A look-up per stage of a whole graph, by itself and beside those of its parents."""
    return compared(graph, look_up_each(graph, store, previous, verify))


def look_up_each(
    graph: Graph, store: Store, previous: dict[str, Any] | None, verify: bool = True
) -> dict[str, Lookup]:
    """A look-up per stage; with `verify`, every file is compared with its digest. On an object
    store, where each is some round trips, in threads; on a disk they would cost more than they
    save."""
    before = {s["id"]: {**previous, "stages": [s]} for s in previous["stages"]} if previous else {}

    def look_up(stage: Stage) -> Lookup:
        return store.look_up(stage, before.get(stage.id), verify)

    if "://" not in store.storage:
        return {stage.id: look_up(stage) for stage in graph}
    with ThreadPoolExecutor(LOOK_UP_THREADS, "look-up") as pool:
        return dict(zip(graph.stages, pool.map(look_up, graph), strict=True))


def compared(graph: Graph, lookups: dict[str, Lookup]) -> dict[str, Lookup]:
    """The same, where results that were made of other contents of their parents than stand now are
    misses, to be withdrawn and run again."""
    contents = contents_of(lookups)
    reasons = {
        stage.id: outdated(graph, stage, lookups[stage.id].manifest, contents) for stage in graph
    }
    return lookups | {
        i: Lookup(False, reason, damaged=True) for i, reason in reasons.items() if reason
    }


def needed(graph: Graph, lookups: dict[str, Lookup]) -> set[str]:
    """Stages to run: all that are missing, but data only where it is wanted for itself, or one of
    them waits for it: what was learned stands without."""
    missing = {s.id for s in graph if not lookups[s.id].hit}
    want = {i for i in missing if graph[i].step != "ingest" or not graph.children(i)}
    return want | {p for i in want for p in graph[i].parents if p in missing}


def run_graph(
    graph: Graph,
    store: Store,
    executor_of: Callable[[set[str]], Executor],
    retries: int,
    watchers: list[Watcher],
    lookups: dict[str, Lookup],
    poll_s: float = 0.02,
) -> Outcome:
    """Runs what is missing. executor_of is called once, with the ids to run, and only if there are
    any."""
    started = time.monotonic()
    todo = needed(graph, lookups)
    walk = Walk.over(graph, (s.id for s in graph if s.id not in todo), retries)
    if not todo:
        return Outcome(
            walk.states,
            {},
            time.monotonic() - started,
            {i: lookups[i].manifest for i in graph.stages},
        )
    for stage_id in todo:
        if lookups[stage_id].damaged:
            store.withdraw(graph[stage_id].key)
    manifests: dict[str, Mapping[str, Any] | None] = {i: lookups[i].manifest for i in graph.stages}
    contents = contents_of({i: lookups[i] for i in graph.stages})
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
                if event.kind == "done":
                    manifests[event.stage], contents[event.stage] = (
                        event.body,
                        content_digest(event.body),
                    )
                    for decision in overtaken(graph, walk, manifests, contents, event.stage):
                        store.withdraw(graph[decision.stage].key)
                        tell(watchers, walk, decision)
                if follow_up:
                    if (
                        follow_up.kind == "recompute"
                        and store.look_up(graph[follow_up.stage]).damaged
                    ):
                        store.withdraw(graph[follow_up.stage].key)
                    tell(watchers, walk, follow_up)
            if not events:
                time.sleep(poll_s)
    finally:
        executor.close()
    failures = {i: walk.messages[i] for i, s in walk.states.items() if s is State.FAILED}
    return Outcome(walk.states, failures, time.monotonic() - started, manifests)


def overtaken(
    graph: Graph,
    walk: Walk,
    manifests: Mapping[str, Mapping[str, Any] | None],
    contents: Mapping[str, str],
    stage_id: str,
) -> list[Decision]:
    """Stages to run again since `stage_id` has just finished: the stage itself, where a parent got
    another content while it ran; else those finished children that were made of another content of
    it."""
    reason = outdated(graph, graph[stage_id], manifests[stage_id], contents)
    if reason:
        return [walk.run_again(stage_id, reason)]
    children = [child for child in graph.children(stage_id) if walk.states[child.id] in FINISHED]
    reasons = {
        child.id: outdated(graph, child, manifests.get(child.id), contents) for child in children
    }
    return [walk.run_again(child_id, text) for child_id, text in reasons.items() if text]


def tell(watchers: list[Watcher], walk: Walk, decision: Decision) -> None:
    for watcher in watchers:
        watcher.decision(walk, decision)


def raise_failures(outcome: Outcome, command: str) -> None:
    """Raises UserError with the worker's own sentence and the command that resumes."""
    if outcome.failures:
        stage, message = next(iter(outcome.failures.items()))
        more = (
            f" ({len(outcome.failures) - 1} more stages failed)"
            if len(outcome.failures) > 1
            else ""
        )
        raise UserError(
            f"stage {stage} failed: {message}{more}; what finished is kept, resume with: {command}"
        )
