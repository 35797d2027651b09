"""Choose the executor of a run: this process, or worker groups on Ray.

Both executors implement the protocol `Executor` of pipeline/graph/run.py.
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
    """Return the executor that runs the stages `todo` of a graph.

    Args:
        store: Store of the results.
        cluster: Cluster settings of the config.
        graph: The graph of the run.
        todo: Ids of the stages to run.
        progress: Called with events that do not change the state of a stage, such as its start.
        run_on_driver: Runs a stage without a job for workers (the report); returns its manifest.
        sample_s: Seconds between samples of the resource usage of the workers' machines; 0: none.
    """
    if cluster.workers == 0:
        return LocalExecutor(store, cluster, run_on_driver, progress, sample_s=sample_s)
    from pipeline.launch.groups import start_ray_executor  # a run without Ray must not import Ray

    width = count_parallel_stages(graph, todo)
    return start_ray_executor(store, cluster, run_on_driver, progress, width, sample_s)


class SharedExecutor:
    """An executor that several walks over a graph use one after another.

    A walk closes its executor at its end. Therefore a walk that is followed by another gets a view
    whose `close` does nothing (`lend`).

    Args:
        make: Creates the executor. It is called when the first stage is submitted, and again when a
            stage is submitted after `close`.
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
        """Return the events since the last call."""
        return [] if self._executor is None else self._executor.poll()

    def close(self) -> None:
        """Stop the running stages. A stage submitted later gets a new executor."""
        executor, self._executor = self._executor, None
        if executor is not None:
            executor.close()

    def lend(self) -> Executor:
        """Return a view of this executor for one walk. Its `close` does nothing."""
        return _Lent(self)


@dataclass(frozen=True)
class _Lent:
    owner: SharedExecutor

    def submit(self, stage: Stage, depth: int) -> None:
        self.owner.submit(stage, depth)

    def poll(self) -> list[Event]:
        return self.owner.poll()

    def close(self) -> None:
        """Do nothing: the owner is closed after the last walk."""


def count_parallel_stages(graph: Graph, todo: set[str]) -> int:
    """Return the number of stages in the widest level of the graph of `todo`.

    The level of a stage is the length of the longest path from a stage without a parent in `todo`.
    The result estimates how many stages can run in parallel.
    """
    levels: dict[str, int] = {}
    for stage in graph:
        if stage.id in todo:
            parent_levels = [levels[parent] for parent in stage.parents if parent in levels]
            levels[stage.id] = max(parent_levels, default=-1) + 1
    stages_per_level = Counter(levels.values())
    return max(stages_per_level.values(), default=1)
