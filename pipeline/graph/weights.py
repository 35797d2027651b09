"""The file of pretrained backbone weights that a config names."""

from __future__ import annotations

import hashlib
import os
from typing import Any

from pipeline.config import Config
from pipeline.data.listing import CARDS
from pipeline.graph.store import Store
from pipeline.yaml_files import expand
from workers.errors import UserError
from workers.storage.regular_file import open_regular


def weights_path(config: Config) -> str:
    """Return `none`, `hub`, or the absolute path of the weights file.

    A relative path starts at the checkout, as on cards.
    """
    weights = config.backbone.weights
    if weights in ("none", "hub"):
        return weights
    return os.path.normpath(CARDS.parent / expand(weights))


def weights_digest(config: Config, store: Store, max_bytes: int) -> str:
    """Return the digest of the weights file; `none` or `hub` where there is no file.

    The digest of a file that is gone is the one that it had last. Raise `UserError` when the file
    cannot be read.
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
            raise UserError(
                f"backbone.weights is {path!r}, which does not exist; "
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


def weights_state(config: Config, store: Store) -> list[Any]:
    """Return what changes when the weights file changes, without reading the file.

    The time of the last status change is in it, which no program can set back.
    """
    path = weights_path(config)
    if path in ("none", "hub"):
        return [path]
    try:
        status = os.stat(path)
    except OSError:
        return [path, store.remembered(_identity(path))]
    return [path, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns]


def _identity(path: str) -> str:
    """Return the name under which the storage remembers the digest of a weights file."""
    return "weights-" + hashlib.sha256(path.encode()).hexdigest()[:24]
