"""Run a graph: look up the results in the store, and let an executor run the other stages.

The scheduler is the walk (walk.py), a state machine that decides when each stage runs. This module
carries out the decisions of the walk. A stage is a node of the graph. A result is valid if it is
complete and was computed from the currently stored results of the parents.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

from pipeline.graph.run_record import RunRecord
from pipeline.graph.stage import Graph, Stage
from pipeline.graph.store import Lookup, Store, Verify, explain_outdated
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
from workers.storage.artifact import compute_content_digest

LOOK_UP_THREADS = 16  # each thread holds at most 64 MiB of a file in memory
OTHER_IMAGES = (
    "its raw files hold other images than when they were ingested before, with the same paths and "
    "sizes; run the same command again to use them"
)
Manifests = dict[str, Mapping[str, Any] | None]  # by stage id; None for a stage without a result


class Executor(Protocol):
    """Runs stages and reports events.

    Stages with the longest path of descendants run first. `LocalExecutor` prefers evaluations.
    """

    def submit(self, stage: Stage, depth: int) -> None:
        """Queue a stage.

        Args:
            stage: The stage.
            depth: Number of stages on the longest path of descendants, as the priority.
        """

    def poll(self) -> list[Event]:
        """Return the events since the last call, without waiting for further events.

        An executor without worker processes runs a stage inside this call.
        """

    def close(self) -> None:
        """Stop running stages and release all resources."""


class Watcher(Protocol):
    """Observes a run. The terminal and the MLflow recorder are watchers.

    A watcher receives the events that `Executor.poll` returns. Other events, such as the start of a
    stage, go to the callback `progress` of `pipeline.launch.executor.make_executor`.
    """

    def on_event(self, walk: Walk, event: Event) -> None:
        """Handle an event, after the walk has recorded it."""

    def on_decision(self, walk: Walk, decision: Decision) -> None:
        """Handle a decision, after the walk has recorded it."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of a run.

    Attributes:
        states: Final state of each stage, by id.
        failures: Error messages of the failed stages, by id.
        seconds: Duration of the run.
        manifests: Manifests of the results, by id, from the executor or the look-up.
        left_out: Ids of missing stages that were not selected.
    """

    states: dict[str, State]
    failures: dict[str, str]
    seconds: float
    manifests: Manifests = field(default_factory=dict)
    left_out: frozenset[str] = frozenset()

    @property
    def ran(self) -> int:
        """Number of stages that this run computed."""
        return self._count(State.DONE)

    @property
    def reused(self) -> int:
        """Number of stages that did not have to run."""
        return self._count(State.REUSED) - len(self.left_out)

    def _count(self, state: State) -> int:
        return list(self.states.values()).count(state)


# ---- look-ups ------------------------------------------------------------------------------------
def collect_content_digests(lookups: Mapping[str, Lookup]) -> dict[str, str]:
    """Return the content digest of each stored result, by stage id."""
    contents = {}
    for stage_id, lookup in lookups.items():
        if lookup.manifest:
            contents[stage_id] = compute_content_digest(dict(lookup.manifest))
    return contents


def look_up_all(
    graph: Graph, store: Store, previous: RunRecord | None, verify: Verify = "digests"
) -> dict[str, Lookup]:
    """Look up every stage of a graph, and mark outdated results.

    Args:
        graph: The graph.
        store: Holds the results.
        previous: Record of an earlier run of this config, to explain why a result is missing. See
            `pipeline.app.runs.find_previous_record`.
        verify: How to verify the files of a result: by their digests, by their sizes, or not.
    """
    return mark_outdated(graph, look_up_each(graph, store, previous, verify))


def look_up_each(
    graph: Graph, store: Store, previous: RunRecord | None, verify: Verify = "digests"
) -> dict[str, Lookup]:
    """Look up each stage, without a check whether the result is outdated.

    See `look_up_all` for the arguments. In a bucket, a look-up needs several round trips, so
    threads look up stages in parallel. On a disk, threads would cost more time than they save.
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
    """Return the look-ups, with outdated results as misses that must be withdrawn.

    A result is outdated if the content of a parent's result differs from the content that the
    result was computed from. Descendants of an outdated result are checked later, after that result
    was computed again.
    """
    contents = collect_content_digests(lookups)
    marked = dict(lookups)
    for stage in graph:
        reason = explain_outdated(graph, stage, lookups[stage.id].manifest, contents)
        if reason:
            marked[stage.id] = Lookup(hit=False, reason=reason, must_withdraw=True)
    return marked


def stages_to_run(graph: Graph, lookups: dict[str, Lookup]) -> set[str]:
    """Return the ids of the stages to run: all missing stages, except unneeded ingest stages.

    A missing ingest stage does not run if all its children have results, because results remain
    valid if their data is deleted. It runs if it has no children.
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
    make_executor: Callable[[set[str]], Executor],
    retries: int,
    watchers: list[Watcher],
    lookups: dict[str, Lookup],
    poll_s: float = 0.02,
    selected: set[str] | None = None,
    failed: Mapping[str, str] | None = None,
) -> Outcome:
    """Run the missing stages.

    Args:
        graph: The graph.
        store: Store of the run.
        make_executor: Creates the executor, given the ids of the stages to run. It is called once,
            and only if there are stages to run.
        retries: Maximum number of retries of a stage.
        watchers: Observers of the run.
        lookups: Result of `look_up_all`.
        poll_s: Pause in seconds after a poll without events.
        selected: Ids of the stages to run. None: all missing stages.
        failed: Error messages of stages that failed in an earlier walk, by id. They and their
            descendants do not run.
    """
    started = time.monotonic()
    missing = stages_to_run(graph, lookups)
    todo = missing if selected is None else selected
    left_out = frozenset(missing - todo - (failed or {}).keys())
    not_run = [stage.id for stage in graph if stage.id not in todo]
    manifests: Manifests = {stage.id: lookups[stage.id].manifest for stage in graph}
    contents = collect_content_digests({stage.id: lookups[stage.id] for stage in graph})
    walk = Walk.over(graph, not_run, retries)
    for stage_id, message in (failed or {}).items():
        walk.fail(stage_id, message)
    graph_run = GraphRun(store, walk, watchers, manifests, contents)
    todo = todo - (failed or {}).keys()
    if todo:
        for stage_id in todo:
            if lookups[stage_id].must_withdraw:
                store.withdraw(graph[stage_id].key)
        graph_run.run_to_end(make_executor(todo), poll_s)
    failures = {}
    for stage_id, state in graph_run.walk.states.items():
        if state is State.FAILED:
            failures[stage_id] = graph_run.walk.messages[stage_id]
    seconds = time.monotonic() - started
    return Outcome(graph_run.walk.states, failures, seconds, manifests, left_out)


@dataclass(frozen=True)
class GraphRun:
    """Carries out the decisions of a walk.

    Attributes:
        store: Store of the run.
        walk: The walk.
        watchers: Observers of the run.
        manifests: Manifest of the last known result of each stage, by id. Updated during the run.
        contents: Content digest of these results, by stage id. Updated during the run.
    """

    store: Store
    walk: Walk
    watchers: list[Watcher]
    manifests: Manifests
    contents: dict[str, str]

    def run_to_end(self, executor: Executor, poll_s: float) -> None:
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
            self.walk.record(decision)
            self._notify(decision)
            if decision.kind is DecisionKind.LAUNCH:
                executor.submit(self.walk.graph[decision.stage], decision.depth)

    def _handle(self, event: Event) -> None:
        if event.kind is EventKind.DONE and self._has_other_images(event):
            event = Event(EventKind.FAILED, event.stage, OTHER_IMAGES, final=True)
        decision = self.walk.apply(event)
        for watcher in self.watchers:
            watcher.on_event(self.walk, event)
        if event.kind is EventKind.DONE:
            self.manifests[event.stage] = event.body
            self.contents[event.stage] = compute_content_digest(event.body)
            for decision_to_rerun in self._rerun_outdated(event.stage):
                self._withdraw(decision_to_rerun.stage)
                self._notify(decision_to_rerun)
        if decision is not None:
            # A child has reported that this stage's result is damaged. Look again before the result
            # is withdrawn, because it may have been replaced in the meantime.
            if decision.kind is DecisionKind.RECOMPUTE and self._is_damaged(decision.stage):
                self._withdraw(decision.stage)
            self._notify(decision)

    def _has_other_images(self, event: Event) -> bool:
        """Return whether an ingest stage found other images than before under the same key.

        The keys of its children contain the digests of the images before, so the children must not
        run on the new images.
        """
        graph = self.walk.graph
        before = self.contents.get(event.stage)
        return (
            graph[event.stage].step == "ingest"
            and bool(graph.children(event.stage))
            and before is not None
            and before != compute_content_digest(event.body)
        )

    def _rerun_outdated(self, stage_id: str) -> list[Decision]:
        """Schedule outdated stages again after a stage has finished, and return the decisions.

        If the content of a parent changed while the stage ran, the stage itself is outdated.
        Otherwise, each finished child that was computed from another content of the stage is
        outdated.
        """
        reason = self._why_outdated(stage_id)
        if reason:
            return [self.walk.rerun(stage_id, reason)]
        decisions: list[Decision] = []
        for child in self.walk.graph.children(stage_id):
            reason = self._why_outdated(child.id)
            if reason and self.walk.states[child.id] in FINISHED:
                decisions.append(self.walk.rerun(child.id, reason))
        return decisions

    def _why_outdated(self, stage_id: str) -> str | None:
        graph = self.walk.graph
        return explain_outdated(graph, graph[stage_id], self.manifests.get(stage_id), self.contents)

    def _is_damaged(self, stage_id: str) -> bool:
        return self.store.look_up(self.walk.graph[stage_id]).must_withdraw

    def _withdraw(self, stage_id: str) -> None:
        self.store.withdraw(self.walk.graph[stage_id].key)

    def _notify(self, decision: Decision) -> None:
        for watcher in self.watchers:
            watcher.on_decision(self.walk, decision)


def raise_if_failed(outcome: Outcome, command: str, logs_command: str = "") -> None:
    """Raise the error of the first failed stage, if any.

    Args:
        outcome: Outcome of the run.
        command: Command that resumes the run.
        logs_command: Command that prints the log of a stage; the message appends the id of the
            stage. Empty without logs.

    Raises:
        UserError: If a stage failed.
    """
    if not outcome.failures:
        return
    stage_id, message = next(iter(outcome.failures.items()))
    more = ""
    if len(outcome.failures) > 1:
        more = f" (other failed stages: {len(outcome.failures) - 1})"
    log = f"; its log: {logs_command} {stage_id}" if logs_command else ""
    raise UserError(
        f"stage {stage_id} failed: {message}{more}{log}; finished stages are kept, resume with: "
        f"{command}"
    )
