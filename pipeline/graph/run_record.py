"""The record of a named run, `<storage>/runs/NAME/run.json`: its config, its tasks and the keys of
its stages."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from typing import Any, NotRequired, TypedDict

from pipeline.config.settings import Config, dump
from pipeline.graph.replica_configs import replica_configs
from pipeline.graph.stage import UNKNOWN, Graph, Stage
from workers.job import Task

KEY_VERSION = 1  # raise it when `store.key_of` changes: every result is then computed anew
# A key names a folder: a record from elsewhere must not lead out of the store.
PLAIN = re.compile(r"[\w-]+")
MAX_NAME_LENGTH = 1000  # characters of what a record calls a stage


class StageRecord(TypedDict):
    """A stage of a run.

    label, method: names of the method's entry in the config and of the method itself; None for a
    stage of no method. task: None for a stage of no task. parents: ids. inputs: what the key was
    made of, besides the parents' keys. replica: as `Stage` has it; absent where it is empty.
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
    """A task of a run. data: key of the ingest stage of its card."""

    name: str
    card: str
    role: str
    classes: list[str]
    data: str


class RunRecord(TypedDict):
    """What a named run consisted of when it was last started.

    config: every setting, defaults included; of the backbone the values that were used.
    created: ISO 8601. provenance: git commit and versions of packages. replicas: of a run of
    several seeds or class orders, the names of its replicas' runs, by replica.
    """

    name: str
    key_version: int
    config: dict[str, Any]
    created: str
    stages: list[StageRecord]
    tasks: list[TaskRecord]
    provenance: NotRequired[dict[str, Any]]
    replicas: NotRequired[dict[str, str]]


def record_of(
    graph: Graph, config: Config, tasks: list[Task], provenance: dict[str, Any]
) -> RunRecord:
    """Return the record of a run that starts now."""
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
    task_records: list[TaskRecord] = [
        {
            "name": task.name,
            "card": task.card,
            "role": task.role,
            "classes": list(task.classes),
            "data": task.data,
        }
        for task in tasks
    ]
    record: RunRecord = {
        "name": graph.name,
        "key_version": KEY_VERSION,
        "config": recorded_config(graph, config),
        "created": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "stages": stages,
        "tasks": task_records,
        "provenance": provenance,
    }
    replicas = replica_configs(config)
    if replicas:
        record["replicas"] = {name: replica.name for name, replica in replicas.items()}
    return record


def recorded_config(graph: Graph, config: Config) -> dict[str, Any]:
    """Return every setting; of the backbone the values that were used, also where none was set."""
    body = dump(config)
    for stage in graph:
        if stage.step == "backbone":
            used = {k: v for k, v in stage.inputs["backbone"].items() if k != "weights"}
            body["backbone"] |= used
    return body


def graph_of_record(record: RunRecord) -> Graph:
    """Return the graph of a run as its record has it, to be looked at: without jobs, and without
    stages whose parents the record lacks."""
    stages: dict[str, Stage] = {}
    for entry in record["stages"]:  # parents come first
        stage = _stage_of(entry)
        if stages.keys() >= {*stage.parents}:
            stages[stage.id] = stage
    return Graph.of(record["name"], list(stages.values()))


def _stage_of(entry: StageRecord) -> Stage:
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
    """Return the keys of a run's results, without its report, which is made again at no cost."""
    return {
        stage["key"]
        for stage in record["stages"]
        if is_stage(stage) and stage["step"] != "report" and not is_provisional(stage)
    }


def is_provisional(entry: Mapping[str, Any]) -> bool:
    """Return whether the key of a recorded stage was provisional: see `Stage`."""
    inputs = entry.get("inputs")
    images = inputs.get("images") if isinstance(inputs, Mapping) else None
    return isinstance(images, Mapping) and any(
        str(digest).startswith(UNKNOWN) for digest in images.values()
    )


def can_be_shown(record: RunRecord) -> bool:
    """Return whether a record has all that is read to show a run, in its form: the storage may be a
    stranger's. What a run needs is known from less: see `needed_keys`."""
    return isinstance(record.get("config"), dict) and all(map(_is_complete, record["stages"]))


def _is_complete(entry: Mapping[str, Any]) -> bool:
    """Return whether an entry of a record, which is a stage, has the form that is read."""
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
    """Return whether an entry of a record names a stage, by a key that leads nowhere else."""
    return (
        isinstance(entry, Mapping)
        and all(isinstance(entry.get(name), str) for name in ("id", "key", "step"))
        and bool(PLAIN.fullmatch(entry["key"]))
    )
