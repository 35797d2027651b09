"""Record of a run, `<storage>/runs/NAME/run.json`: config, tasks and keys of the stages.

The record is written when the run starts. It names the results that the run needs, so that `gc`
keeps them, and so that other commands find them without building the graph.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from typing import Any, NotRequired, TypedDict

from pipeline.config.settings import Config, dump
from pipeline.graph.collector import without_collections
from pipeline.graph.replica_configs import make_replica_configs
from pipeline.graph.stage import UNKNOWN, Graph, Stage
from workers.job import Task

# Increase it if `store.compute_key` changes. All keys then differ, so all results are recomputed.
KEY_VERSION = 1
# Valid keys. A key is the name of a folder: an untrusted record must not lead out of the store.
PLAIN = re.compile(r"[\w-]+")
MAX_NAME_LENGTH = 1000  # characters of the name of a stage, a label or a task in a record


class StageRecord(TypedDict):
    """A stage of a run.

    Attributes:
        id: Id of the stage.
        key: Key of the stage.
        step: Kind of the stage.
        label: Label of the method in the config; None if the stage belongs to no method.
        task: Name of the task; None if the stage belongs to no task.
        parents: Ids of the parents.
        method: Name of the method; None if the stage belongs to no method.
        inputs: See `Stage.inputs`.
        replica: See `Stage.replica`; absent if empty.
    """

    id: str
    key: str
    step: str
    label: str | None
    task: str | None
    parents: list[str]
    method: str | None
    inputs: dict[str, Any]
    replica: NotRequired[str]


class TaskRecord(TypedDict):
    """A task of a run.

    Attributes:
        name: Name of the task.
        card: Name of the card.
        role: Role of the task: `task`, `base` or `unlabelled` (see `workers.job.Task`).
        classes: Classes of the task.
        data: Key of the ingest stage of the card.
        shares: Share of the images of each class that the task has. Only if the setting `slices`
            divides the images among tasks.
    """

    name: str
    card: str
    role: str
    classes: list[str]
    data: str
    shares: NotRequired[dict[str, float]]


class RunRecord(TypedDict):
    """A named run as it was last started.

    Attributes:
        name: Name of the run.
        key_version: KEY_VERSION of the code that started the run.
        config: All settings, including defaults. The backbone settings contain the resolved values.
        created: Time of the start in ISO 8601.
        stages: The stages.
        tasks: The tasks.
        provenance: Git commit and versions of packages.
        replicas: Name of the run of each replica, by replica. Only if there are several seeds or
            class orders.
    """

    name: str
    key_version: int
    config: dict[str, Any]
    created: str
    stages: list[StageRecord]
    tasks: list[TaskRecord]
    provenance: NotRequired[dict[str, Any]]
    replicas: NotRequired[dict[str, str]]


@without_collections
def make_record(
    graph: Graph, config: Config, tasks: list[Task], provenance: dict[str, Any]
) -> RunRecord:
    """Return the record of a run that starts now.

    Args:
        graph: The graph of the run.
        config: Config of the run.
        tasks: Tasks of the run.
        provenance: Git commit and versions of packages.
    """
    stages: list[StageRecord] = []
    for stage in graph:
        method = config.methods[stage.method].method if stage.method else None
        entry: StageRecord = {
            "id": stage.id,
            "key": stage.key,
            "step": stage.step,
            "label": stage.method,
            "task": stage.task,
            "parents": list(stage.parents),
            "method": method,
            "inputs": dict(stage.inputs),
        }
        if stage.replica:
            entry["replica"] = stage.replica
        stages.append(entry)
    task_records: list[TaskRecord] = []
    for task in tasks:
        task_record: TaskRecord = {
            "name": task.name,
            "card": task.card,
            "role": task.role,
            "classes": list(task.classes),
            "data": task.data,
        }
        if task.parts is not None:
            task_record["shares"] = task.shares
        task_records.append(task_record)
    record: RunRecord = {
        "name": graph.name,
        "key_version": KEY_VERSION,
        "config": recorded_config(graph, config),
        "created": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "stages": stages,
        "tasks": task_records,
        "provenance": provenance,
    }
    replicas = make_replica_configs(config)
    if replicas:
        record["replicas"] = {name: replica.name for name, replica in replicas.items()}
    return record


def recorded_config(graph: Graph, config: Config) -> dict[str, Any]:
    """Return all settings of a config, with the resolved values of the backbone settings."""
    body = dump(config)
    for stage in graph:
        if stage.step == "backbone":
            used = {k: v for k, v in stage.inputs["backbone"].items() if k != "weights"}
            body["backbone"] |= used
    return body


def build_recorded_graph(record: RunRecord) -> Graph:
    """Return the graph of a recorded run, for display.

    The stages have no jobs. A stage is left out if the record lacks a parent.
    """
    stages: dict[str, Stage] = {}
    for entry in record["stages"]:  # in topological order
        stage = _make_stage(entry)
        if stages.keys() >= {*stage.parents}:
            stages[stage.id] = stage
    return Graph.of(record["name"], list(stages.values()))


def _make_stage(entry: StageRecord) -> Stage:
    return Stage(
        entry["id"],
        entry["step"],
        entry["key"],
        entry.get("inputs") or {},
        tuple(dict.fromkeys(entry.get("parents") or ())),
        entry.get("label"),
        entry.get("task"),
        replica=entry.get("replica", ""),
    )


def needed_keys(record: RunRecord) -> set[str]:
    """Return the keys of the results that a run needs.

    The report is left out, because it is cheap to build again. Provisional keys are left out, too,
    because no result has such a key.
    """
    return {
        stage["key"]
        for stage in record["stages"]
        if is_stage(stage) and stage["step"] != "report" and not is_provisional(stage)
    }


def is_provisional(entry: Mapping[str, Any]) -> bool:
    """Return whether images of a recorded stage were not ingested, so that its key is provisional.

    Unlike `Stage.is_provisional`, this ignores ancestors, and images of the next task.
    """
    inputs = entry.get("inputs")
    images = inputs.get("images") if isinstance(inputs, Mapping) else None
    return isinstance(images, Mapping) and any(
        str(digest).startswith(UNKNOWN) for digest in images.values()
    )


def can_be_shown(record: RunRecord) -> bool:
    """Return whether a record is complete enough to display the run.

    The storage may be untrusted, so the types of all values are checked. `needed_keys` accepts
    less complete records.
    """
    return isinstance(record.get("config"), dict) and all(map(_is_displayable, record["stages"]))


def _is_displayable(entry: Mapping[str, Any]) -> bool:
    """Return whether a stage of a record has all values needed to display it."""
    parents = entry.get("parents")
    names = [entry["id"], entry["step"], entry.get("replica", "")]
    names += [entry[key] for key in ("label", "task") if entry.get(key) is not None]
    return (
        "label" in entry
        and "task" in entry
        and all(isinstance(name, str) and len(name) <= MAX_NAME_LENGTH for name in names)
        and isinstance(entry.get("inputs"), (dict, type(None)))
        and isinstance(parents, (list, type(None)))
        and all(isinstance(parent, str) for parent in parents or ())
    )


def is_stage(entry: Any) -> bool:
    """Return whether an entry of a record has the id, step and valid key of a stage."""
    return (
        isinstance(entry, Mapping)
        and all(isinstance(entry.get(name), str) for name in ("id", "key", "step"))
        and bool(PLAIN.fullmatch(entry["key"]))
    )
