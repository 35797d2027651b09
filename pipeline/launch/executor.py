"""Chooses the executor of a run: this process, or worker groups on Ray.

The protocol that both follow is `Executor` in pipeline/graph/run.py, beside the code that uses it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from pipeline.config.settings import ClusterSettings
from pipeline.graph.run import Executor
from pipeline.graph.stage import Graph, Stage
from pipeline.graph.store import Store
from pipeline.graph.walk import Event
from pipeline.launch.attempt import Progress, RunOnDriver
from pipeline.launch.local import LocalExecutor


def make_executor(
    store: Store,
    cluster: ClusterSettings,
    graph: Graph,
    todo: set[str],
    progress: Progress,
    run_on_driver: RunOnDriver,
    sample_s: float = 0.0,
) -> Executor:
    """Return what runs the stages `todo` of a graph.

    progress: called with events that change no state: how far a stage is, notes about the cluster.
    run_on_driver: runs stages without a job (the report) and returns their manifests. sample_s:
    seconds between two samples of the use of the workers' machines; 0: none.
    """
    if cluster.workers == 0:
        return LocalExecutor(store, cluster, run_on_driver, progress, sample_s=sample_s)
    from pipeline.launch.groups import start_ray_executor  # a run without Ray needs none of it

    width = width_of(graph, todo)
    return start_ray_executor(store, cluster, run_on_driver, progress, width, sample_s)


class SharedExecutor:
    """An executor that several walks use, one after the other; it starts with the first stage.

    make: makes the executor, once.
    """

    def __init__(self, make: Callable[[], Executor]):
        self._make = make
        self._executor: Executor | None = None

    def submit(self, stage: Stage, depth: int) -> None:
        """Queue a stage."""
        if self._executor is None:
            self._executor = self._make()
        self._executor.submit(stage, depth)

    def poll(self) -> list[Event]:
        """Return what has happened since the last call."""
        return [] if self._executor is None else self._executor.poll()

    def close(self) -> None:
        """Stop the running stages. A later stage starts a new executor."""
        executor, self._executor = self._executor, None
        if executor is not None:
            executor.close()

    def lend(self) -> Executor:
        """Return a view for a walk that is not the last: its `close` does nothing."""
        return _Lent(self)


@dataclass(frozen=True)
class _Lent:
    owner: SharedExecutor

    def submit(self, stage: Stage, depth: int) -> None:
        self.owner.submit(stage, depth)

    def poll(self) -> list[Event]:
        return self.owner.poll()

    def close(self) -> None:
        """Do nothing: the owner is closed at its end."""


def width_of(graph: Graph, todo: set[str]) -> int:
    """Return the most stages of `todo` that can run side by side: its widest level."""
    levels: dict[str, int] = {}
    for stage in graph:
        if stage.id in todo:
            parent_levels = [levels[parent] for parent in stage.parents if parent in levels]
            levels[stage.id] = max(parent_levels, default=-1) + 1
    stages_per_level = Counter(levels.values())
    return max(stages_per_level.values(), default=1)
