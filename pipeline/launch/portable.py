"""Write a config as files that do not depend on other files of this machine.

The files contain the config with all its base configs (`extends`) and overrides, and the data cards
that it names by path. A run of these files has the same keys on any machine.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.config import settings as configs
from pipeline.config.settings import Config
from pipeline.config.yaml_files import (
    absolute,
    dump_yaml,
    expand,
    is_path_of_card,
    read_yaml,
)
from pipeline.data import card_files
from workers.errors import UserError
from workers.storage.artifact import is_local

CACHE = "/tmp"  # cache folder on the disk of each node


@dataclass(frozen=True)
class Portable:
    """A config as files.

    Attributes:
        config: The validated config with the settings in the files.
        file: Name of the file with the config.
        files: File name -> content.
    """

    config: Config
    file: str
    files: dict[str, str]


def make_portable(
    source: str, overrides: Sequence[str], shared: str | None = None, groups: int = 0
) -> Portable:
    """Return a config as files that run on a cluster.

    Args:
        source: Path of the config.
        overrides: Settings, `key=value`.
        shared: The only folder that this machine and the nodes share; "" for none; None if they
            share all folders. If the storage is a local folder outside of the shared folder, the
            shared folder becomes the storage of the run.
        groups: Default of `cluster.groups`; 0: do not set it.

    Raises:
        UserError: If the config is invalid, or the nodes cannot access a data set or the weights.
    """
    config = configs.load(source, list(overrides))
    body = configs.read_values(source, overrides)
    body["name"] = config.name
    body["storage"] = absolute(config.storage)
    if shared and is_local(body["storage"]) and not is_inside(body["storage"], shared):
        body["storage"] = shared
    cluster = dict(body.get("cluster") or {})
    cluster["workers"] = max(1, config.cluster.workers)
    cluster.pop("address", None)  # the run joins the cluster that these files start
    if groups:
        cluster["groups"] = config.cluster.groups or groups
    if is_local(body["storage"]):
        cluster.setdefault("cache", CACHE)
    elif not config.tracking.uri:  # without a server, MLflow needs a database file in the storage
        body["tracking"] = "off"
    body["cluster"] = cluster
    files: dict[str, str] = {}
    _take_cards(body["stream"]["tasks"], files, shared)
    weights = config.backbone.weights
    if shared is not None and weights.endswith(".safetensors"):
        _check_is_shared("backbone.weights", expand(weights), shared)
    file = f"{config.name}.yaml"
    files[file] = dump_yaml(body)
    return Portable(configs.check(body, source), file, files)


def _take_cards(tasks: list[Any], files: dict[str, str], shared: str | None) -> None:
    """Add the cards that a stream names by path to `files`. Let the stream refer to the copies.

    Cards that a stream names without a path belong to Accrete, so the nodes have them.

    Raises:
        UserError: If the nodes cannot access the data of a card, or two cards have the same name.
    """
    for index, entry in enumerate(tasks):
        task = {"card": entry} if isinstance(entry, str) else entry
        card = card_files.load_without_source(task["card"])
        if shared is not None and card.source.path:
            for source_path in (card.source.path, *(more.path for more in card.source.more)):
                _check_is_shared(f"card {card.name!r}", source_path, shared)
        if not is_path_of_card(task["card"]):
            continue
        path = Path(task["card"])
        if path.is_dir():
            path /= "card.yaml"
        body = read_yaml(path, "a card")
        if body["source"].get("path"):
            body["source"]["path"] = card.source.path
        for further, more in zip(body["source"].get("more", ()), card.source.more, strict=True):
            further["path"] = more.path
        if card.without_images:
            images_file = f"{card.name}-without-images.txt"
            body["without_images"] = images_file
            files[images_file] = f"{card.without_images}\n"
        file = f"{card.name}-card.yaml"
        text = dump_yaml(body)
        if files.setdefault(file, text) != text:
            raise UserError(f"two cards are called {card.name!r}; give one another name")
        tasks[index] = {**task, "card": f"./{file}"}


def is_inside(path: str, folder: str) -> bool:
    """Return whether a path is `folder` itself or is inside it.

    Example:
        >>> is_inside("/storage/team", "/storage"), is_inside("/storage2", "/storage")
        (True, False)
    """
    return os.path.join(path, "").startswith(os.path.join(folder, ""))


def _check_is_shared(name: str, path: str, folder: str) -> None:
    """Check that the nodes can access a path.

    Args:
        name: Name of the setting or card, for the message.
        path: A path or URI.
        folder: The only shared folder; empty for none.

    Raises:
        UserError: If the path is neither a URI nor inside `folder`.
    """
    if "://" in path or (folder and is_inside(path, folder)):
        return
    remedy = "put it into a bucket, and name that: s3://bucket/folder"
    if folder:
        remedy += f"; or into the volume that the nodes see as {folder}"
    raise UserError(f"{name} names {path!r}, which the nodes do not see; {remedy}")
