"""Locate the pretrained backbone weights of a config: a local file or a Hugging Face hub model.

The setting is `backbone.weights`: `none` (random), `hub` (timm's own pretrained weights),
`hf-hub:OWNER/NAME[@REVISION]` (a "hub model" in this module), or the path of a .safetensors file.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from pipeline.config.settings import Config
from pipeline.config.yaml_files import CARDS, describe_variables, expand
from pipeline.graph.store import Store
from workers.errors import UserError
from workers.storage import hub
from workers.storage.regular_file import open_regular, read_regular

CONFIG_FILE, WEIGHTS_FILE = "config.json", "model.safetensors"  # files of a timm model on the hub
MAX_CONFIG_BYTES = 1 << 20  # maximum size of config.json
# Maximum size of the weights file of a hub model. The exact limit depends on the architecture in
# config.json, which is read later.
MAX_HUB_BYTES = 1 << 37


@dataclass(frozen=True)
class HubModel:
    """A timm model on the Hugging Face hub, at the commit of the last look-up.

    Attributes:
        commit: Commit of the repository.
        digest: sha256 of the safetensors file.
        body: Content of config.json.
    """

    commit: str
    digest: str
    body: dict[str, Any]


def weights_path(config: Config) -> str:
    """Return `none`, `hub`, `hf-hub:...`, or the absolute path of the weights file.

    A relative path starts at the folder above `datasets` (in a wheel: at the package `pipeline`).
    """
    weights = config.backbone.weights
    if weights in ("none", "hub") or hub.is_hub_model(weights):
        return weights
    return os.path.normpath(CARDS.parent / expand(weights))


def hub_model(config: Config, store: Store, may_connect: bool) -> HubModel | None:
    """Return the hub model that the config names, or None if the config does not name one.

    If the model cannot be found now or its config.json is invalid, the model of the last look-up
    is returned.

    Args:
        config: The config.
        store: Stores the last look-up.
        may_connect: Contact the hub. If false, only files in the cache of the hub's client are
            used.

    Raises:
        UserError: If the model cannot be found or its config.json is invalid, and no earlier
            look-up succeeded.
    """
    weights = config.backbone.weights
    if not hub.is_hub_model(weights):
        return None
    try:
        path = hub.model_file(weights, CONFIG_FILE, may_connect)
        # the path in the cache of the hub's client ends with snapshots/COMMIT/config.json
        commit = os.path.basename(os.path.dirname(path))
        pinned = hub.pinned(weights, commit)  # both files must come from the same commit
        digest = _file_digest(hub.model_file(pinned, WEIGHTS_FILE, may_connect), store)
        model = HubModel(commit, digest, _read_config(weights, path))
    except UserError:
        remembered = store.remembered(_identity(weights))
        if not isinstance(remembered, Mapping):
            raise
        return HubModel(**remembered)
    store.remember(_identity(weights), asdict(model))
    return model


def _read_config(weights: str, path: str) -> dict[str, Any]:
    """Return the content of config.json. Raise `UserError` if it does not describe a timm model."""
    try:
        body = json.loads(read_regular(os.path.realpath(path), MAX_CONFIG_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(
            f"backbone.weights is {weights!r}, and its {CONFIG_FILE} is not readable "
            f"({error!s:.100}); choose a model that timm has stored there"
        ) from None
    if not isinstance(body, dict) or not isinstance(body.get("architecture"), str):
        raise UserError(
            f"backbone.weights is {weights!r}, and its {CONFIG_FILE} names no `architecture`; "
            "choose a model that timm has stored there, or set backbone.weights to `hub` and "
            "backbone.name to its name in timm"
        )
    return body


def _file_digest(path: str, store: Store) -> str:
    """Return the sha256 of a file in the cache of the hub's client.

    The digest is stored. An unchanged file is not read again.
    """
    status = os.stat(path)
    state = [path, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns]
    identity = _identity(f"file {path}")
    remembered = store.remembered(identity)
    if isinstance(remembered, Mapping) and remembered.get("state") == state:
        return str(remembered["digest"])
    with open_regular(os.path.realpath(path), MAX_HUB_BYTES) as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    store.remember(identity, {"state": state, "digest": digest})
    return digest


def find_weights_digest(config: Config, store: Store, max_bytes: int) -> str:
    """Return the sha256 of the weights file, or `none` or `hub` if the config names no file.

    For a missing file, the digest of the last look-up is returned.

    Args:
        config: The config. It must not name a hub model, see `hub_model`.
        store: Stores digests.
        max_bytes: Maximum size of the file in bytes.

    Raises:
        UserError: If the file cannot be read, or is missing and was never read.
    """
    path = weights_path(config)
    if path in ("none", "hub"):
        return path
    if os.path.isdir(path):
        raise UserError(
            f"backbone.weights is {path!r}, a folder; give a .safetensors file, `hub` or `none`"
        )
    if not os.path.exists(path):
        digest = store.remembered(_identity(path))
        if digest is None:
            weights = config.backbone.weights
            remedy = describe_variables(weights)
            if not remedy and not os.path.isabs(weights):
                remedy = f"a relative path starts at {CARDS.parent}; "
            raise UserError(
                f"backbone.weights is {path!r}, which does not exist; {remedy}"
                "give a .safetensors file, `hub` or `none`"
            )
        return str(digest)
    try:
        with open_regular(path, max_bytes) as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise UserError(
            f"backbone.weights is {path!r}, which cannot be read ({error.strerror}); "
            "give a .safetensors file, `hub` or `none`"
        ) from None
    store.remember(_identity(path), digest)
    return digest


def find_weights_state(config: Config, store: Store, may_connect: bool) -> list[Any]:
    """Return a value that changes if the weights file changes.

    For a local file, the value contains the inode, the size, and the times of the last modification
    and status change. (Programs cannot set the time of the status change.) The file is not read. If
    it is missing, the value contains the digest of the last look-up.

    For a hub model, the value contains its commit, its config and the digest of its file. The model
    may be downloaded, and its file is hashed once.

    Args:
        config: The config.
        store: Stores digests.
        may_connect: See `hub_model`.
    """
    model = hub_model(config, store, may_connect)
    if model is not None:
        return [config.backbone.weights, asdict(model)]
    path = weights_path(config)
    if path in ("none", "hub"):
        return [path]
    try:
        status = os.stat(path)
    except OSError:
        return [path, store.remembered(_identity(path))]
    return [path, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns]


def _identity(subject: str) -> str:
    """Return the name under which the store remembers a look-up.

    Args:
        subject: The path of a local weights file, `file PATH` for a file in the cache of the hub's
            client, or `hf-hub:OWNER/NAME`.
    """
    return "weights-" + hashlib.sha256(subject.encode()).hexdigest()[:24]
