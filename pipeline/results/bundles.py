"""A finished run becomes a bundle: one model that serves all tasks of a method."""

from __future__ import annotations

from dataclasses import replace

from pipeline.graph.stage import Graph
from pipeline.graph.store import Store
from workers.data.decoding import MAX_PIXELS
from workers.errors import UserError
from workers.job import StageJob, Task
from workers.serving.bundle import Bundle
from workers.storage.artifact import Artifact


def bundle_of(graph: Graph, store: Store, label: str) -> Bundle:
    """Return the bundle that serves all tasks of a method.

    It is the model that the method's last evaluation loads, with the states of every task. Raise
    `UserError` when the run is not finished.
    """
    stages = [stage for stage in graph if stage.step == "evaluate" and stage.method == label]
    for stage in stages:
        if Artifact.open(store.root, stage.key) is None:
            raise UserError(
                f"run {graph.name!r}: stage {stage.id} has no result yet; "
                "finish the run with `python -m pipeline run` first"
            )
    jobs = [stage.job for stage in stages if isinstance(stage.job, StageJob)]
    states: dict[str, str] = {}
    tasks: dict[Task, None] = {}
    for job in jobs:
        states |= job.states
        tasks |= dict.fromkeys(job.tasks)
    max_pixels = []
    for key in dict.fromkeys(task.data for task in tasks):
        shards = Artifact.open(store.root, key)
        if shards is not None:
            max_pixels.append(int(shards.manifest.get("max_pixels", MAX_PIXELS)))
    job = replace(jobs[-1], tasks=tuple(tasks), states=states)
    bundle = Bundle.of_job(job, max(max_pixels, default=MAX_PIXELS))
    return replace(bundle, where=f"run {graph.name!r}, method {label!r}")
