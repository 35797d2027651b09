"""Merge the graphs of a run's replicas into one graph. Stages with equal keys become one stage."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from pipeline.graph.stage import Graph, Stage
from pipeline.graph.store import compute_key
from workers.job import StageJob

REPORT_REVISION = 4  # part of the key: increase it if the content of the replicas' report changes


def unite_graphs(name: str, graphs: Mapping[str, Graph]) -> Graph:
    """Return one graph with the stages of all replicas, and one report instead of one per replica.

    A stage that all replicas share, such as an ingest, keeps its id. The id of any other stage is
    prefixed with the name of the first replica that has the stage.

    Args:
        name: Name of the run.
        graphs: Graph of each replica, by replica name.
    """
    num_replicas_of: Counter[str] = Counter()  # key of a stage -> number of replicas with it
    for graph in graphs.values():
        num_replicas_of.update({stage.key for stage in graph})
    stages: dict[str, Stage] = {}  # by key
    for replica, graph in graphs.items():
        for stage in graph:
            if stage.key in stages or stage.step == "report":
                continue
            is_shared = num_replicas_of[stage.key] == len(graphs)
            owner = "" if is_shared else replica
            parents = tuple(stages[graph[parent].key].id for parent in stage.parents)
            stages[stage.key] = _move_to_union(stage, owner, parents)
    evaluations = [stage for stage in stages.values() if stage.step == "evaluate"]
    inputs = {"revision": REPORT_REVISION, "name": name, "replicas": list(graphs)}
    key = compute_key({"step": "report", **inputs}, [stage.key for stage in evaluations])
    parents = tuple(stage.id for stage in evaluations)
    is_provisional = any(stage.is_provisional for stage in evaluations)
    report = Stage("report", "report", key, inputs, parents, is_provisional=is_provisional)
    return Graph.of(name, [*stages.values(), report])


def _move_to_union(stage: Stage, replica: str, parents: tuple[str, ...]) -> Stage:
    """Return a copy of a stage for the merged graph.

    Args:
        stage: The stage in the graph of a replica.
        replica: First replica with the stage. Empty if all replicas share the stage.
        parents: Ids of the parents in the merged graph.
    """
    stage_id = f"{replica}/{stage.id}" if replica else stage.id
    job = stage.job
    if isinstance(job, StageJob):  # workers send this id in their reports
        job = replace(job, id=stage_id)
    return replace(stage, id=stage_id, parents=parents, job=job, replica=replica)
