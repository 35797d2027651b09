"""Choose the executor of a run: this process, or worker groups on Ray.

Both follow the protocol `Executor` in pipeline/graph/run.py.
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
        store: Holds the results.
        cluster: Settings of the config.
        graph: The graph of the run.
        todo: Ids of the stages to run.
        progress: Is called with events that change no state, such as the progress of a stage.
        run_on_driver: Runs stages without a job (the report) and returns their manifests.
        sample_s: Seconds between two samples of the use of the workers' machines (0: none).
    """
    if cluster.workers == 0:
        return LocalExecutor(store, cluster, run_on_driver, progress, sample_s=sample_s)
    from pipeline.launch.groups import start_ray_executor  # a run without Ray must not import Ray

    width = count_parallel_stages(graph, todo)
    return start_ray_executor(store, cluster, run_on_driver, progress, width, sample_s)


class SharedExecutor:
    """An executor that several walks use one after the other. It starts with the first stage.

    Args:
        make: Makes the executor; is called once.
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
        """Stop the running stages. A later stage starts a new executor."""
        executor, self._executor = self._executor, None
        if executor is not None:
            executor.close()

    def lend(self) -> Executor:
        """Return a view for a walk before the last one: its `close` does nothing."""
        return _Lent(self)


@dataclass(frozen=True)
class _Lent:
    owner: SharedExecutor

    def submit(self, stage: Stage, depth: int) -> None:
        self.owner.submit(stage, depth)

    def poll(self) -> list[Event]:
        return self.owner.poll()

    def close(self) -> None:
        """Do nothing: the owner is closed at the end of the last walk."""


def count_parallel_stages(graph: Graph, todo: set[str]) -> int:
    """Return the largest number of stages of `todo` that can run in parallel: the widest level."""
    levels: dict[str, int] = {}
    for stage in graph:
        if stage.id in todo:
            parent_levels = [levels[parent] for parent in stage.parents if parent in levels]
            levels[stage.id] = max(parent_levels, default=-1) + 1
    stages_per_level = Counter(levels.values())
    return max(stages_per_level.values(), default=1)
