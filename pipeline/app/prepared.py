"""A prepared run (a config with its store and graph), its plan, and its records.

`runs.prepare` returns a `PreparedRun`, and `runs.plan` a `RunPlan`.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pipeline.config import version as versions
from pipeline.config.settings import Config
from pipeline.graph.run_record import RunRecord, make_record
from pipeline.graph.stage import Graph
from pipeline.graph.store import Lookup, Store
from pipeline.results.tables import RunTables
from workers.job import Task
from workers.plugins import describe_package

if TYPE_CHECKING:
    from pipeline.launch.cost import Forecast
    from pipeline.launch.step_memory import StepMemory
    from pipeline.results.training import StepTraining

PACKAGES = (
    "torch",
    "torchvision",
    "timm",
    "ray",
    "mlflow",
    "webdataset",
    "pyarrow",
    "numpy",
    "pillow",
)  # packages that the provenance of results lists with their versions


@dataclass(frozen=True)
class PreparedRun:
    """A checked config with its store and its graph of stages, before the run.

    Attributes:
        config: The config.
        store: Store of the results.
        graph: All stages with their keys.
        tasks: Tasks in the order of the stream; a base task is first.
        has_jobs: Whether the stages of `graph` can be run. False for a graph from the cache, which
            contains no jobs; `runs.with_jobs` builds them.
        replicas: Replicas of a run with several seeds or class orders, each a separate run; empty
            for other runs. With replicas, `graph` contains the stages of all replicas, and `tasks`
            are the tasks of the first replica.
    """

    config: Config
    store: Store
    graph: Graph
    tasks: list[Task]
    has_jobs: bool = True
    replicas: Mapping[str, PreparedRun] = field(default_factory=dict)

    @property
    def keys(self) -> dict[str, str]:
        """Stage id -> key."""
        return {stage.id: stage.key for stage in self.graph}


@dataclass(frozen=True)
class RunPlan:
    """The plan of a run.

    Attributes:
        run: The prepared run.
        lookups: Result of the look-up of each stage, by id.
        stages_to_run: Ids of the stages that would run.
        notes: Notes about the effect of an upgrade on existing results.
    """

    run: PreparedRun
    lookups: dict[str, Lookup]
    stages_to_run: set[str]
    notes: list[str]

    @property
    def status(self) -> dict[str, str]:
        """Stage id -> `hit` or `miss`."""
        status = dict.fromkeys(self.run.graph.stages, "hit")
        for stage_id in self.stages_to_run:
            status[stage_id] = "miss"
        return status

    def training(self) -> list[StepTraining]:
        """Return the optimizer and the length of each training step of each method.

        Stages that would not run are included.
        """
        from pipeline.launch.training_plan import plan_training  # keeps the start-up fast

        run = self.run
        return plan_training(run.graph, self.lookups, self.stages_to_run, run.store, run.tasks)

    def forecast(self, calibrate: bool = False) -> Forecast:
        """Forecast the cost of the stages that would run.

        Args:
            calibrate: Measure the speed of this machine for a few seconds if the storage has no
                measurements.

        Raises:
            UserError: If this machine cannot be calibrated for the config.
        """
        from pipeline.launch import cost  # keeps the start-up fast: imports torch

        run = self.run
        todo = self.stages_to_run
        return cost.forecast(run.graph, run.config, run.store, todo, run.tasks, calibrate)

    def forecast_memory(self) -> list[StepMemory]:
        """Forecast the memory of a training step of each method."""
        from pipeline.launch import step_memory  # keeps the start-up fast: imports torch
        from pipeline.launch.training_plan import compute_expected_lengths

        run = self.run
        stages = {stage.id for stage in run.graph}
        lengths = compute_expected_lengths(run.graph, run.store, stages, run.tasks)
        batch_sizes = {stage_id: length["batch_size"] for stage_id, length in lengths.items()}
        ranks = max(1, run.config.cluster.workers)
        return step_memory.forecast_memory(run.graph, ranks, batch_sizes)


def provenance() -> dict[str, Any]:
    """Return the provenance of results: git commit, versions, platform and time of the call."""
    return {**_describe_code(), "created": time.strftime("%Y-%m-%dT%H:%M:%S%z")}


@functools.cache
def _describe_code() -> dict[str, Any]:
    """Describe the code that this process has loaded.

    The result is cached, because later changes of files do not affect the loaded code.
    """
    import importlib.metadata
    import platform

    packages = {}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            packages[name] = importlib.metadata.version(name)
    # Look the module up without importing it, because it imports torch. If it is not imported yet,
    # no external method is registered.
    registration = sys.modules.get("workers.methods.registration")
    for method in registration.REGISTERED.values() if registration else ():
        package = describe_package(method.__module__)
        if package:
            packages[package["package"]] = package["version"]
    return {
        "git_commit": versions.git_commit(),
        "packages": packages,
        "python": platform.python_version(),
        "platform": platform.platform(terse=True),
    }


def find_or_make_record(run: PreparedRun) -> RunRecord:
    """Return the stored record of a run, or a new one if none is stored or its keys are outdated.

    A new record is not stored.
    """
    record = run.store.record(run.config.name)
    keys = {stage.id: stage.key for stage in run.graph}
    if record is not None and {s["id"]: s["key"] for s in record["stages"]} == keys:
        return record
    return make_record(run.graph, run.config, run.tasks, provenance())


def make_replica_records(run: PreparedRun) -> dict[str, RunRecord]:
    """Return a new record of each replica, by replica; empty for a run without replicas."""
    records = {}
    for name, replica in run.replicas.items():
        records[name] = make_record(replica.graph, replica.config, replica.tasks, provenance())
    return records


def read_run_tables(run: PreparedRun) -> dict[str, RunTables]:
    """Return the stored results of each replica of a run, by replica.

    For a run with one seed and one class order, the only key is the empty string.
    """
    return RunTables.load_all(
        run.store.storage, make_replica_records(run) or {"": find_or_make_record(run)}
    )
