"""The record of a named run, `<storage>/runs/NAME/run.json`: config, tasks, keys of the stages."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from typing import Any, NotRequired, TypedDict

from pipeline.config.settings import Config, dump
from pipeline.graph.replica_configs import make_replica_configs
from pipeline.graph.stage import UNKNOWN, Graph, Stage
from workers.job import Task

KEY_VERSION = 1  # increase it if `store.compute_key` changes: all results are computed again then
# A key names a folder: a foreign record must not lead out of the store.
PLAIN = re.compile(r"[\w-]+")
MAX_NAME_LENGTH = 1000  # of a stage, a label or a task in a record


class StageRecord(TypedDict):
    """A stage of a run.

    Attributes:
        id: Id of the stage.
        key: Its key.
        step: Kind of the stage.
        label: Label of the method in the config; None without a method.
        task: Name of the task; None without a task.
        parents: Ids of the parents.
        method: Name of the method; None without a method.
        inputs: Inputs of the key, besides the parents' keys.
        replica: See `Stage`; absent if empty.
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
        role: Role of the task.
        classes: Its classes.
        data: Key of the ingest stage of the card.
        shares: Of a slice of a stream, the share of the images of each class that it has.
    """

    name: str
    card: str
    role: str
    classes: list[str]
    data: str
    shares: NotRequired[dict[str, float]]


class RunRecord(TypedDict):
    """The contents of a named run when it was last started.

    Attributes:
        name: Name of the run.
        key_version: KEY_VERSION of the code.
        config: All settings, including defaults; for the backbone the values that were used.
        created: Time in ISO 8601.
        stages: The stages.
        tasks: The tasks.
        provenance: Git commit and versions of packages.
        replicas: Names of the replicas' runs, by replica, if there are several seeds or class
            orders.
    """

    name: str
    key_version: int
    config: dict[str, Any]
    created: str
    stages: list[StageRecord]
    tasks: list[TaskRecord]
    provenance: NotRequired[dict[str, Any]]
    replicas: NotRequired[dict[str, str]]


def make_record(
    graph: Graph, config: Config, tasks: list[Task], provenance: dict[str, Any]
) -> RunRecord:
    """Return the record of a run that starts now.

    Args:
        graph: The graph of the run.
        config: Its config.
        tasks: Its tasks.
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
    """Return all settings; for the backbone the values that were used, also if unset."""
    body = dump(config)
    for stage in graph:
        if stage.step == "backbone":
            used = {k: v for k, v in stage.inputs["backbone"].items() if k != "weights"}
            body["backbone"] |= used
    return body


def graph_of_record(record: RunRecord) -> Graph:
    """Return the graph of a recorded run, for display.

    Stages have no jobs. Stages are left out if the record lacks their parents.
    """
    stages: dict[str, Stage] = {}
    for entry in record["stages"]:  # parents come first
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
    """Return the keys of a run's results, without its report, which is cheap to make again."""
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
    """Return whether a record has the complete form that displaying a run requires.

    The storage can be a stranger's. `needed_keys` works with less.
    """
    return isinstance(record.get("config"), dict) and all(map(_is_complete, record["stages"]))


def _is_complete(entry: Mapping[str, Any]) -> bool:
    """Return whether an entry of a record, which is a stage, has the form that readers expect."""
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
    """Return whether an entry of a record names a stage, with a key that stays in the store."""
    return (
        isinstance(entry, Mapping)
        and all(isinstance(entry.get(name), str) for name in ("id", "key", "step"))
        and bool(PLAIN.fullmatch(entry["key"]))
    )
