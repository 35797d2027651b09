"""A config as files of its own: what it extends and `--set` are in it, and its cards lie beside it.

It computes what the config computes, under the same keys, wherever the files are taken.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline import config as configs
from pipeline.config import Config
from pipeline.data import card_files
from pipeline.yaml_files import (
    absolute,
    apply_override,
    dump_yaml,
    expand,
    is_path_of_card,
    read_with_bases,
    read_yaml,
)
from workers.errors import UserError
from workers.storage.artifact import is_local

CACHE = "/tmp"  # of each node's own disk


@dataclass(frozen=True)
class Portable:
    """config: checked, with the settings in the files. file: name of its file. files: text by
    name."""

    config: Config
    file: str
    files: dict[str, str]


def portable(
    source: str, overrides: Sequence[str], storage: str = "", seen: str | None = None
) -> Portable:
    """Return a config as files that run on a cluster.

    storage: in place of the config's, where that is a folder of this machine. seen: the folder that
    nodes see, where they see none of this machine; None where they share its folders. Raise
    `UserError` when the config is not valid, or names data that the nodes do not see.
    """
    config = configs.load(source, list(overrides))
    body = read_with_bases(Path(source))
    for override in overrides:
        apply_override(body, override)
    body["name"] = config.name
    body["storage"] = absolute(config.storage)
    if storage and is_local(body["storage"]):
        body["storage"] = storage
    cluster = dict(body.get("cluster") or {})
    cluster["workers"] = max(1, config.cluster.workers)
    cluster.pop("address", None)
    if is_local(body["storage"]):
        cluster.setdefault("cache", CACHE)
    elif not config.tracking.uri:
        body["tracking"] = "off"
    body["cluster"] = cluster
    files: dict[str, str] = {}
    _take_cards(body["stream"]["tasks"], files, seen)
    weights = config.backbone.weights
    if seen is not None and weights.endswith(".safetensors"):
        _check_is_seen("backbone.weights", expand(weights), seen)
    file = f"{config.name}.yaml"
    files[file] = dump_yaml(body)
    return Portable(configs.check(body, source), file, files)


def _take_cards(tasks: list[Any], files: dict[str, str], seen: str | None) -> None:
    """Put the cards of a stream that are named by a path into `files`, and name those instead."""
    for index, entry in enumerate(tasks):
        task = {"card": entry} if isinstance(entry, str) else entry
        card = card_files.load_without_source(task["card"])
        if seen is not None and card.source.path:
            _check_is_seen(f"card {card.name!r}", card.source.path, seen)
        if not is_path_of_card(task["card"]):
            continue
        path = Path(task["card"])
        if path.is_dir():
            path /= "card.yaml"
        body = read_yaml(path, "a card")
        if body["source"].get("path"):
            body["source"]["path"] = card.source.path
        file = f"{card.name}-card.yaml"
        text = dump_yaml(body)
        if files.setdefault(file, text) != text:
            raise UserError(f"two cards are called {card.name!r}; give one another name")
        tasks[index] = {**task, "card": f"./{file}"}


def _check_is_seen(name: str, path: str, folder: str) -> None:
    """Raise `UserError` when nodes do not see a path. folder: all that they see of a disk."""
    if "://" in path or (folder and os.path.join(path, "").startswith(os.path.join(folder, ""))):
        return
    remedy = "put it into a bucket, and name that: s3://bucket/folder"
    if folder:
        remedy += f"; or into the volume that the nodes see as {folder}"
    raise UserError(f"{name} names {path!r}, which the nodes do not see; {remedy}")
