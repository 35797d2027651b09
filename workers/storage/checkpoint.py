"""Checkpoints inside a stage: everything that decides how training goes on, as safetensors and
JSON, written atomically.

All randomness is a function of (seed, epoch, step, position), so the position stands for the state
of every generator of every rank: a resumed stage meets exactly what the uninterrupted one would
have met.
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
    """epoch, step: the next step to run. history: finished epochs. sums: running numbers of the
    unfinished epoch."""

    epoch: int
    step: int
    history: list[dict[str, Any]]
    sums: dict[str, float]
    best: dict[str, Any]
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def restore(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        """Puts model and optimizer back; returns the best epoch's tensors."""
        parts: dict[str, dict[str, Tensor]] = {"model": {}, "optimizer": {}, "best": {}}
        for name, tensor in self.tensors.items():
            kind, rest = name.split("/", 1)
            parts[kind][rest] = tensor
        own = trained_state(model)
        with torch.no_grad():
            for name, tensor in parts["model"].items():
                own[name].copy_(tensor)
        state = optimizer.state_dict()
        for name, tensor in parts["optimizer"].items():
            index, field_name = name.split("/", 1)
            state["state"].setdefault(int(index), {})[field_name] = tensor
        optimizer.load_state_dict(state)
        return parts["best"]


def trained_state(model: nn.Module) -> dict[str, Tensor]:
    """Parameters that are trained and all buffers outside a frozen backbone; live tensors, not
    copies."""
    frozen = "backbone." if getattr(model, "freezes_backbone", False) else "\0"
    trained = {n: p.data for n, p in model.named_parameters() if p.requires_grad}
    return trained | {n: b for n, b in model.named_buffers() if not n.startswith(frozen)}


def folder_of(root: str, key: str) -> str:
    """Checkpoints live beside the stages, below the key of the stage that they belong to."""
    return join(parent(root), "checkpoints", key)


def save(
    root: str,
    key: str,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    best: dict[str, Tensor],
    mark: Checkpoint,
) -> None:
    """One file with everything, under a name of its own; then `latest.json`, which names it with
    size and sha256."""
    tensors = {f"model/{n}": t for n, t in trained_state(model).items()} | {
        f"best/{n}": t for n, t in best.items()
    }
    for index, values in optimizer.state_dict()["state"].items():
        tensors |= {
            f"optimizer/{index}/{n}": torch.as_tensor(v) for n, v in values.items() if v is not None
        }
    where = {
        "epoch": mark.epoch,
        "step": mark.step,
        "history": mark.history,
        "sums": mark.sums,
        "best": mark.best,
    }
    data = safetensors.torch.save(
        {n: t.detach().cpu().contiguous().clone() for n, t in tensors.items()},
        {"accrete": json.dumps(where)},
    )
    folder, info = folder_of(root, key), file_info(data)
    name = f"e{mark.epoch:05d}-s{mark.step:06d}-{info['sha256'][:8]}.safetensors"
    before = _latest(folder)
    with suppress(
        FileNotFoundError
    ):  # another run of the same stage was faster, and its checkpoints are dropped
        write_bytes(join(folder, name), data)
        write_bytes(join(folder, "latest.json"), json.dumps({"file": name, **info}).encode())
        if before and before["file"] != name:
            system, path = resolve(join(folder, before["file"]))
            system.delete_file(path)


def load(root: str, key: str) -> Checkpoint | None:
    """The last checkpoint of a stage; None where there is none or where it is damaged (the stage
    then starts anew)."""
    folder = folder_of(root, key)
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
        tensors, where = load_tensors(data, f"checkpoint {latest['file']}")
        return Checkpoint(**where, tensors=tensors)
    except (UserError, TypeError):
        return None


def age_s(root: str, key: str) -> float | None:
    """Seconds since the last checkpoint of a stage was written; None where it has none."""
    system, path = resolve(join(folder_of(root, key), "latest.json"))
    written = system.get_file_info(path).mtime
    return None if written is None else max(0.0, time.time() - written.timestamp())


def drop(root: str, key: str) -> None:
    """Once the stage's result stands, its checkpoints serve nothing."""
    delete_dir(folder_of(root, key))


def _latest(folder: str) -> dict[str, Any] | None:
    try:
        latest = read_json(join(folder, "latest.json"))
    except (FileNotFoundError, ValueError):
        return None
    whole = (
        isinstance(latest, dict)
        and latest.keys() == {"file", "bytes", "sha256"}
        and isinstance(latest["file"], str)
    )
    # else `save` would delete what a stranger names
    return latest if whole and FILE.fullmatch(latest["file"]) else None
