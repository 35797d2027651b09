"""Checkpoints within a stage: safetensors and JSON files that are written atomically.

All random numbers are a function of (seed, epoch, step, position), so a checkpoint contains the
epoch and the step instead of the states of random generators. A resumed stage gives exactly the
same result as an uninterrupted stage.
"""

from __future__ import annotations

import json
import re
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from workers.errors import UserError
from workers.storage.artifact import (
    CHECKPOINTS,
    LATEST,
    delete_dir,
    file_info,
    join,
    parent,
    read_bytes,
    read_json,
    resolve,
    write_bytes,
)
from workers.storage.taskstate import load_tensors

FILE = re.compile(r"e\d{5,}-s\d{6,}-[0-9a-f]{8}\.safetensors")


@dataclass
class Checkpoint:
    """The state of a stage between two steps.

    Attributes:
        epoch: Epoch of the next step.
        step: Next step within the epoch.
        history: Metrics of each finished epoch.
        sums: Running sums of the unfinished epoch.
        best: Record of the best epoch.
        tensors: "kind/name" -> tensor; the kinds are `model`, `optimizer`, and `best` (tensors of
            the best epoch).
    """

    epoch: int
    step: int
    history: list[dict[str, Any]]
    sums: dict[str, float]
    best: dict[str, Any]
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def restore(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        """Load the state into model and optimizer. Return the tensors of the best epoch by name."""
        parts: dict[str, dict[str, Tensor]] = {"model": {}, "optimizer": {}, "best": {}}
        for name, tensor in self.tensors.items():
            kind, rest = name.split("/", 1)
            parts[kind][rest] = tensor
        model_tensors = trained_state(model)
        with torch.no_grad():
            for name, tensor in parts["model"].items():
                model_tensors[name].copy_(tensor)
        state = optimizer.state_dict()
        for name, tensor in parts["optimizer"].items():
            index, field_name = name.split("/", 1)
            state["state"].setdefault(int(index), {})[field_name] = tensor
        optimizer.load_state_dict(state)
        return parts["best"]


def trained_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the trained parameters and the buffers, except buffers of a frozen backbone.

    The tensors are the model's own, not copies.
    """
    trained = {name: p.data for name, p in model.named_parameters() if p.requires_grad}
    buffers = dict(model.named_buffers())
    if getattr(model, "freezes_backbone", False):
        buffers = {name: b for name, b in buffers.items() if not name.startswith("backbone.")}
    return trained | buffers


def get_folder(root: str, key: str) -> str:
    """Return the folder of a stage's checkpoints, which is next to the folder of the stages."""
    return join(parent(root), CHECKPOINTS, key)


def save_checkpoint(
    root: str,
    key: str,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    best: dict[str, Tensor],
    mark: Checkpoint,
) -> None:
    """Write one file with the whole state, then `latest.json` with its name, size and sha256.

    Args:
        root: Folder or URI of the stages.
        key: Key of the stage.
        model: The model.
        optimizer: The optimizer.
        best: Tensors of the best epoch: name -> tensor.
        mark: The epoch, step and metrics. Its field `tensors` is ignored.
    """
    tensors: dict[str, Tensor] = {}
    for name, tensor in trained_state(model).items():
        tensors[f"model/{name}"] = tensor
    for name, tensor in best.items():
        tensors[f"best/{name}"] = tensor
    for index, values in optimizer.state_dict()["state"].items():
        for field_name, value in values.items():
            if value is not None:
                tensors[f"optimizer/{index}/{field_name}"] = torch.as_tensor(value)
    position = {
        "epoch": mark.epoch,
        "step": mark.step,
        "history": mark.history,
        "sums": mark.sums,
        "best": mark.best,
    }
    copies = {name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()}
    data = safetensors.torch.save(copies, {"accrete": json.dumps(position)})
    folder = get_folder(root, key)
    info = file_info(data)
    file_name = f"e{mark.epoch:05d}-s{mark.step:06d}-{info['sha256'][:8]}.safetensors"
    previous = _latest(folder)
    # Files are missing if another run has finished the same stage and dropped its checkpoints.
    with suppress(FileNotFoundError):
        write_bytes(join(folder, file_name), data)
        write_bytes(join(folder, LATEST), json.dumps({"file": file_name, **info}).encode())
        if previous and previous["file"] != file_name:
            system, path = resolve(join(folder, previous["file"]))
            system.delete_file(path)


def load_checkpoint(root: str, key: str) -> Checkpoint | None:
    """Return the last checkpoint of a stage, or None if it is missing or damaged."""
    folder = get_folder(root, key)
    latest = _latest(folder)
    if latest is None:
        return None
    try:
        data = read_bytes(join(folder, latest["file"]))
    except (FileNotFoundError, NotADirectoryError):
        return None
    if {"file": latest["file"], **file_info(data)} != latest:
        return None
    try:
        tensors, position = load_tensors(data, f"checkpoint {latest['file']}")
        return Checkpoint(**position, tensors=tensors)
    except (UserError, TypeError):
        return None


def age_s(root: str, key: str) -> float | None:
    """Return the age in seconds of the last checkpoint of a stage; None without a checkpoint."""
    system, path = resolve(join(get_folder(root, key), LATEST))
    written = system.get_file_info(path).mtime
    if written is None:
        return None
    seconds: float = time.time() - written.timestamp()
    return max(0.0, seconds)


def drop(root: str, key: str) -> None:
    """Delete the checkpoints of a stage with a stored result."""
    delete_dir(get_folder(root, key))


def _latest(folder: str) -> dict[str, Any] | None:
    """Return the content of `latest.json`, or None if the file is missing or invalid."""
    try:
        latest = read_json(join(folder, LATEST))
    except (FileNotFoundError, ValueError):
        return None
    if not isinstance(latest, dict) or latest.keys() != {"file", "bytes", "sha256"}:
        return None
    # only names of checkpoints are accepted, because `save_checkpoint` deletes the named file
    if not isinstance(latest["file"], str) or not FILE.fullmatch(latest["file"]):
        return None
    return latest
