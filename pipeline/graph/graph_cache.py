"""Cache of graphs: a command that runs no stage need not import torch.

Building a graph imports torch, timm and all methods, which takes seconds. The rest of a start takes
tenths of a second. Therefore a built graph is written to `<storage>/graphs/<digest>.json`. The
digest covers everything that a graph is built from: the config, the cards (descriptions of data
sets), the state of the raw data and of the weights file, the code of this project, and the versions
of Python and of packages. A damaged file, or a file of another graph, is ignored. Jobs
(`Stage.job`) are not cached: to run stages, the driver builds the graph again.

`collect_inputs` computes the digest, `read_graph` reads the cache, and `write_graph` fills it.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import logging
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pyarrow import fs

from pipeline.config.settings import Config, dump
from pipeline.data import card_files
from pipeline.data.cards import Card
from pipeline.data.digests import ClassDigests
from pipeline.graph import raw_data, run_record
from pipeline.graph.raw_data import KnownSource
from pipeline.graph.stage import Graph, Stage
from pipeline.graph.store import Store
from pipeline.graph.weights import find_weights_state
from workers.errors import UserError
from workers.job import Task
from workers.storage.artifact import join, read_json, resolve, write_bytes

LOG = logging.getLogger("accrete.graph")
REPOSITORY = Path(__file__).resolve().parents[2]
FOLDER = "graphs"
MAX_FILES = 64  # the oldest files above this number are deleted
# packages whose versions enter the digest
PACKAGES = ("torch", "torchvision", "timm", "numpy", "pydantic", "pillow", "PyYAML", "safetensors")


@dataclass(frozen=True)
class BuildInputs:
    """Digest of everything that a graph is built from, and the state of the raw data.

    Attributes:
        digest: Digest of all inputs.
        sources: Name of a card -> state of the raw data, so that the build need not look it up
            again.
    """

    digest: str
    sources: dict[str, KnownSource]


@dataclass(frozen=True)
class CachedGraph:
    """A graph without jobs, and the tasks of the run."""

    graph: Graph
    tasks: list[Task]


def collect_inputs(config: Config, run_store: Store, ask_sources: bool) -> BuildInputs | None:
    """Return the inputs that the graph of a config is built from.

    Args:
        config: The config.
        run_store: Store of the run.
        ask_sources: If false, contact neither the Hugging Face hub, nor a data source on another
            machine if its data was ingested.

    Returns:
        The inputs, or None if the cache cannot be used. This is the case if a card, the raw data or
        the weights cannot be used (the build reports the error), or if raw data is missing (the
        graph then also depends on the results in the store).
    """
    loaded: dict[str, Card] = {}
    sources: dict[str, KnownSource] = {}
    images: dict[str, ClassDigests | None] = {}
    class_orders: list[Sequence[str]] = []
    try:
        for entry in config.stream.tasks:
            card = loaded.get(entry.card)
            if card is None:
                card = card_files.load_card_file(entry.card, run_store)
                loaded[entry.card] = card
                source = raw_data.find_source(run_store, card, ask_sources)
                sources[card.name] = source
                images[card.name] = raw_data.class_digests(run_store, card, source)
            if entry.order:
                class_orders.append(card_files.order_classes(entry.order, card.classes))
        weights = find_weights_state(config, run_store, ask_sources)
    except UserError:
        return None
    if not all(source.present for source in sources.values()):
        return None
    inputs = {
        "config": dump(config),
        "base_name": config.base_name,
        "cards": {name: card.model_dump(mode="json") for name, card in loaded.items()},
        "sources": {name: [source.key_text, source.note] for name, source in sources.items()},
        "images": images,
        "class_orders": class_orders,
        "weights": weights,
        "key_version": run_record.KEY_VERSION,
        "code": compute_project_digest(),
        "versions": package_versions(),
    }
    return BuildInputs(_compute_json_digest(inputs), sources)


@functools.cache
def compute_project_digest() -> str:
    """Return a digest of all Python files in `pipeline` and `workers`."""
    digest = hashlib.sha256()
    for folder in ("pipeline", "workers"):
        for path in sorted((REPOSITORY / folder).rglob("*.py")):
            data = path.read_bytes()
            name = path.relative_to(REPOSITORY).as_posix()
            digest.update(f"{name}\n{len(data)}\n".encode())
            digest.update(data)
    return digest.hexdigest()


def package_versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that affect settings and backbones."""
    versions = {"python": sys.version}
    for name in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


def read_graph(run_store: Store, inputs: BuildInputs, name: str) -> CachedGraph | None:
    """Return the cached graph built from these inputs, or None if there is no valid one.

    Args:
        run_store: Store of the run.
        inputs: Result of `collect_inputs`.
        name: Name of the run.
    """
    try:
        body = read_json(_get_graph_path(run_store, inputs))
        content = body["content"]
        if body["sha256"] != _compute_json_digest(content) or content["inputs"] != inputs.digest:
            return None
        if content["name"] != name:
            return None
        return _from_json(content)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, UserError):
        return None


def write_graph(run_store: Store, inputs: BuildInputs, graph: Graph, tasks: Sequence[Task]) -> None:
    """Store a graph built from these inputs, and delete the oldest graphs above MAX_FILES.

    An error while writing is only logged, because the cache only saves time. A graph with an
    external method is not stored, because a later start cannot know whether the code of the method
    is unchanged.

    Args:
        run_store: Store of the run.
        inputs: Result of `collect_inputs`.
        graph: The graph.
        tasks: The tasks of the run.
    """
    if graph.has_outside_code:
        return
    content = {
        "inputs": inputs.digest,
        "name": graph.name,
        "stages": [_stage_json(stage) for stage in graph],
        "tasks": [_task_json(task) for task in tasks],
    }
    data = json.dumps({"sha256": _compute_json_digest(content), "content": content}).encode()
    try:
        write_bytes(_get_graph_path(run_store, inputs), data)
        _delete_oldest(run_store)
    except OSError as error:
        LOG.info("the graph was not cached: %s", error)


def _stage_json(stage: Stage) -> dict[str, Any]:
    return {
        "id": stage.id,
        "step": stage.step,
        "key": stage.key,
        "inputs": stage.inputs,
        "parents": stage.parents,
        "method": stage.method,
        "task": stage.task,
        "note": stage.note,
        "is_provisional": stage.is_provisional,
    }


def _task_json(task: Task) -> dict[str, Any]:
    """Return a task without shard locations.

    They are not cached, because a job must read shards only from places that the card names.
    """
    fields = asdict(task)
    del fields["shard_urls"]
    return fields


def _from_json(content: Mapping[str, Any]) -> CachedGraph:
    stages = []
    for entry in content["stages"]:
        if not run_record.is_stage(entry):
            raise ValueError("an entry is not a stage")
        stages.append(Stage(**{**entry, "parents": tuple(entry["parents"])}))
    tasks = []
    for entry in content["tasks"]:
        if "shard_urls" in entry:
            raise ValueError("a task places its shards")
        parts = entry.get("parts")
        if parts is not None:
            parts = tuple(tuple(part) for part in parts)
        tasks.append(Task(**{**entry, "classes": tuple(entry["classes"]), "parts": parts}))
    return CachedGraph(Graph.of(content["name"], stages), tasks)


def _compute_json_digest(value: Any) -> str:
    """Return the digest of a JSON value. The order of keys matters, because methods are ordered."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def _get_graph_path(run_store: Store, inputs: BuildInputs) -> str:
    return join(run_store.storage, FOLDER, f"{inputs.digest[:32]}.json")


def _delete_oldest(run_store: Store) -> None:
    system, folder = resolve(join(run_store.storage, FOLDER))
    files = system.get_file_info(fs.FileSelector(folder))
    if len(files) <= MAX_FILES:
        return
    newest_first = sorted(files, key=lambda file: -(file.mtime_ns or 0))
    for file in newest_first[MAX_FILES:]:
        with suppress(FileNotFoundError):  # another driver may have deleted it
            system.delete_file(file.path)
