"""Runs a graph: looks up what stands in the store, has the rest run by an executor, and carries out
what the walk decides."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

from pipeline.graph.run_record import RunRecord
from pipeline.graph.stage import Graph, Stage
from pipeline.graph.store import Lookup, Store, outdated
from pipeline.graph.walk import (
    FINISHED,
    Decision,
    DecisionKind,
    Event,
    EventKind,
    State,
    Walk,
)
from workers.errors import UserError
from workers.storage.artifact import content_digest

LOOK_UP_THREADS = 16  # each holds one file of a stage at a time, of at most 64 MiB
Manifests = dict[str, Mapping[str, Any] | None]  # by stage id


class Executor(Protocol):
    """Runs stages somewhere, those with the longest path behind them first, and reports events."""

    def submit(self, stage: Stage, depth: int) -> None:
        """Have a stage run. depth: stages on the longest path behind it."""

    def poll(self) -> list[Event]:
        """Return what happened since the last call, without waiting for more."""

    def close(self) -> None:
        """Stop what runs and release what the executor holds."""


class Watcher(Protocol):
    """Observes a run: the terminal, the MLflow record."""

    def event(self, walk: Walk, event: Event) -> None:
        """Called after the walk has recorded an event."""

    def decision(self, walk: Walk, decision: Decision) -> None:
        """Called after the walk has recorded a decision."""


@dataclass(frozen=True)
class Outcome:
    """How a run ended. manifests: of the results that stand at its end, as far as known."""

    states: dict[str, State]
    failures: dict[str, str]
    seconds: float
    manifests: Manifests = field(default_factory=dict)

    @property
    def ran(self) -> int:
        """Stages that this run computed."""
        return self._count(State.DONE)

    @property
    def reused(self) -> int:
        """Stages whose result stood before this run."""
        return self._count(State.REUSED)

    def _count(self, state: State) -> int:
        return list(self.states.values()).count(state)


# ---- what stands ---------------------------------------------------------------------------------
def contents_of(lookups: Mapping[str, Lookup]) -> dict[str, str]:
    """Return the content digest of each result that stands, by stage id."""
    contents = {}
    for stage_id, lookup in lookups.items():
        if lookup.manifest:
            contents[stage_id] = content_digest(dict(lookup.manifest))
    return contents


def look_up_all(
    graph: Graph, store: Store, previous: RunRecord | None, verify: bool = True
) -> dict[str, Lookup]:
    """Look up every stage of a whole graph, and mark results that are outdated."""
    return mark_outdated(graph, look_up_each(graph, store, previous, verify))


def look_up_each(
    graph: Graph, store: Store, previous: RunRecord | None, verify: bool = True
) -> dict[str, Lookup]:
    """Look up every stage by itself; with `verify`, compare every file with its digest.

    An object store takes several round trips per stage, so threads look up side by side there. On a
    disk threads would cost more than they save.
    """
    previous_by_stage = {}
    if previous:
        for stage_record in previous["stages"]:
            previous_by_stage[stage_record["id"]] = {**previous, "stages": [stage_record]}

    def look_up(stage: Stage) -> Lookup:
        return store.look_up(stage, previous_by_stage.get(stage.id), verify)

    if "://" not in store.storage:
        return {stage.id: look_up(stage) for stage in graph}
    with ThreadPoolExecutor(LOOK_UP_THREADS, "look-up") as pool:
        return dict(zip(graph.stages, pool.map(look_up, graph), strict=True))


def mark_outdated(graph: Graph, lookups: dict[str, Lookup]) -> dict[str, Lookup]:
    """Return the look-ups with outdated results as misses, to be withdrawn and run again.

    A result is outdated where a parent has another content now than when the result was made.
    """
    contents = contents_of(lookups)
    marked = dict(lookups)
    for stage in graph:
        reason = outdated(graph, stage, lookups[stage.id].manifest, contents)
        if reason:
            marked[stage.id] = Lookup(False, reason, damaged=True)
    return marked


def stages_to_run(graph: Graph, lookups: dict[str, Lookup]) -> set[str]:
    """Return the ids of the stages to run: every missing one, except data that no stage reads.

    Ingested data runs only where a missing stage is its child, or where it has no children: what
    was learned from deleted data stands.
    """
    missing = {stage.id for stage in graph if not lookups[stage.id].hit}
    todo = set()
    for stage_id in missing:
        if graph[stage_id].step != "ingest" or not graph.children(stage_id):
            todo.add(stage_id)
    for stage_id in list(todo):
        todo.update(missing.intersection(graph[stage_id].parents))
    return todo


# ---- running -------------------------------------------------------------------------------------
def run_graph(
    graph: Graph,
    store: Store,
    executor_of: Callable[[set[str]], Executor],
    retries: int,
    watchers: list[Watcher],
    lookups: dict[str, Lookup],
    poll_s: float = 0.02,
) -> Outcome:
    """Run what is missing.

    executor_of: makes the executor from the ids to run; called once, and only if there are any.
    retries: tries of a stage after the first one. poll_s: pause after a poll without events.
    """
    started = time.monotonic()
    todo = stages_to_run(graph, lookups)
    reused = [stage.id for stage in graph if stage.id not in todo]
    manifests: Manifests = {stage.id: lookups[stage.id].manifest for stage in graph}
    contents = contents_of({stage.id: lookups[stage.id] for stage in graph})
    run = GraphRun(store, Walk.over(graph, reused, retries), watchers, manifests, contents)
    if todo:
        for stage_id in todo:
            if lookups[stage_id].damaged:
                store.withdraw(graph[stage_id].key)
        run.to_the_end(executor_of(todo), poll_s)
    failures = {}
    for stage_id, state in run.walk.states.items():
        if state is State.FAILED:
            failures[stage_id] = run.walk.messages[stage_id]
    return Outcome(run.walk.states, failures, time.monotonic() - started, manifests)


@dataclass(frozen=True)
class GraphRun:
    """Carries out what a walk decides. manifests, contents: by stage id, of the results that
    stand; kept up to date."""

    store: Store
    walk: Walk
    watchers: list[Watcher]
    manifests: Manifests
    contents: dict[str, str]

    def to_the_end(self, executor: Executor, poll_s: float) -> None:
        """Launch stages and handle events until every stage has ended, then close the executor."""
        try:
            while not self.walk.ended:
                self._carry_out_decisions(executor)
                events = executor.poll()
                for event in events:
                    self._handle(event)
                if not events:
                    time.sleep(poll_s)
        finally:
            executor.close()

    def _carry_out_decisions(self, executor: Executor) -> None:
        for decision in self.walk.decide():
            self.walk.carry_out(decision)
            self._notify(decision)
            if decision.kind is DecisionKind.LAUNCH:
                executor.submit(self.walk.graph[decision.stage], decision.depth)

    def _handle(self, event: Event) -> None:
        decision = self.walk.apply(event)
        for watcher in self.watchers:
            watcher.event(self.walk, event)
        if event.kind is EventKind.DONE:
            self.manifests[event.stage] = event.body
            self.contents[event.stage] = content_digest(event.body)
            for rerun in self._run_outdated_again(event.stage):
                self._withdraw(rerun.stage)
                self._notify(rerun)
        if decision is not None:
            if decision.kind is DecisionKind.RECOMPUTE and self._is_damaged(decision.stage):
                self._withdraw(decision.stage)
            self._notify(decision)

    def _run_outdated_again(self, stage_id: str) -> list[Decision]:
        """After a stage finished: itself, where a parent got another content while it ran; else its
        finished children that were made of another content of it."""
        reason = self._why_outdated(stage_id)
        if reason:
            return [self.walk.run_again(stage_id, reason)]
        reruns: list[Decision] = []
        for child in self.walk.graph.children(stage_id):
            reason = self._why_outdated(child.id)
            if reason and self.walk.states[child.id] in FINISHED:
                reruns.append(self.walk.run_again(child.id, reason))
        return reruns

    def _why_outdated(self, stage_id: str) -> str | None:
        graph = self.walk.graph
        return outdated(graph, graph[stage_id], self.manifests.get(stage_id), self.contents)

    def _is_damaged(self, stage_id: str) -> bool:
        return self.store.look_up(self.walk.graph[stage_id]).damaged

    def _withdraw(self, stage_id: str) -> None:
        self.store.withdraw(self.walk.graph[stage_id].key)

    def _notify(self, decision: Decision) -> None:
        for watcher in self.watchers:
            watcher.decision(self.walk, decision)


def raise_failures(outcome: Outcome, command: str) -> None:
    """Raise `UserError` with the first failed stage's message and the command that resumes."""
    if not outcome.failures:
        return
    stage_id, message = next(iter(outcome.failures.items()))
    more = ""
    if len(outcome.failures) > 1:
        more = f" ({len(outcome.failures) - 1} more stages failed)"
    raise UserError(
        f"stage {stage_id} failed: {message}{more}; what finished is kept, resume with: {command}"
    )
