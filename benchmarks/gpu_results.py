"""Helpers of `benchmarks.gpu`: load results of stages, compute differences and format errors."""

from __future__ import annotations

import io
import math
import re
import traceback
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
from torch import Tensor
from torch.nn import functional

from pipeline.config.settings import flatten
from workers.errors import UserError
from workers.storage.artifact import Artifact
from workers.storage.taskstate import KINDS, Carried, TaskState

ROOT = Path(__file__).resolve().parent.parent
SPARSE = "/sparse"  # suffix of tensors that are stored as positions and values
ROUNDING = 1e-3  # tolerance without training: relative for tensors, absolute for probabilities
LONGEST_SENTENCE = 240
ENFORCED = re.compile(r"^\[enforce fail [^\]]*\] [^.]*\. ")  # prefix of some messages of PyTorch


def stage_tensors(artifact: Artifact) -> dict[str, Tensor]:
    """Return all tensors of a training step's result, by kind and name.

    Masks are boolean. Sparse tensors are vectors without trailing zeros.
    """
    state = TaskState.from_bytes(artifact.read("task.safetensors"))
    carried = Carried.from_bytes(artifact.read("carried.safetensors"))
    tensors = {f"carried/{name}": tensor for name, tensor in carried.tensors.items()}
    for kind in KINDS:
        tensors |= {f"{kind}/{name}": tensor for name, tensor in getattr(state, kind).items()}
    for name in [name for name in tensors if name.endswith("/values")]:
        merge_sparse(tensors, name.removesuffix("/values"))
    return tensors


def merge_sparse(tensors: dict[str, Tensor], prefix: str) -> None:
    """Replace the parts of a sparse tensor (values, and positions or bits) by a dense vector."""
    values = tensors.pop(f"{prefix}/values")
    positions = tensors.pop(f"{prefix}/at", None)
    if positions is None:
        bits = torch.from_numpy(unpack_bits(tensors.pop(f"{prefix}/bits")))
        positions = bits.nonzero().squeeze(1)[: len(values)]
    positions = positions.long()
    length = 0
    if len(positions):
        length = int(positions.max()) + 1
    tensors[f"{prefix}{SPARSE}"] = torch.zeros(length).index_put_((positions,), values)


def stage_metadata(artifact: Artifact) -> dict[str, Any]:
    """Return the metadata of task state and carried state, as values by dotted key."""
    state = TaskState.from_bytes(artifact.read("task.safetensors"))
    carried = Carried.from_bytes(artifact.read("carried.safetensors"))
    return flatten({"state": state.meta, "carried": carried.meta})


def history(artifact: Artifact) -> list[dict[str, Any]]:
    """Return the training history: a row per epoch, without the column `seconds`."""
    table = pq.read_table(io.BytesIO(artifact.read("history.parquet")))
    columns = [name for name in table.column_names if name != "seconds"]
    rows: list[dict[str, Any]] = table.select(columns).to_pylist()
    return rows


def predictions(artifact: Artifact) -> list[dict[str, Any]]:
    """Return the predictions: a row per test image."""
    table = pq.read_table(io.BytesIO(artifact.read("predictions.parquet")))
    rows: list[dict[str, Any]] = table.to_pylist()
    return rows


def unpack_bits(tensor: Tensor) -> np.ndarray:
    """Flatten a tensor; unpack bytes into bits, because masks are packed."""
    values = tensor.numpy().reshape(-1)
    if values.dtype == np.uint8:
        return np.unpackbits(values)
    return values


def largest(values: Iterable[float]) -> float:
    """Return the largest value; 0 if there are no values, and NaN if one is NaN."""
    return float(np.max(list(values), initial=0.0))


def relative(tensors: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> float:
    """Return |a - b| / |b| over all tensors together.

    The shorter of two vectors is padded with zeros.
    """
    difference = 0.0
    size = 0.0
    for name, a in tensors.items():
        b = reference[name]
        if a.shape != b.shape:
            length = max(len(a), len(b))
            a = functional.pad(a, (0, length - len(a)))
            b = functional.pad(b, (0, length - len(b)))
        difference += float((a.double() - b.double()).square().sum())
        size += float(b.double().square().sum())
    if size == 0.0:
        return math.sqrt(difference)
    return math.sqrt(difference / size)


def as_list(value: Any) -> list[Any]:
    """Return a list as it is, and any other value as a list of one."""
    return value if isinstance(value, list) else [value]


def are_floats(values: Iterable[Any]) -> bool:
    """Return whether all values are floats."""
    return all(isinstance(value, float) for value in values)


def differs(a: float, b: float) -> bool:
    """Return whether two numbers differ by more than rounding."""
    return abs(a - b) > ROUNDING * (1 + abs(b))


def share_of_other_values(values: Mapping[str, Any], reference: Mapping[str, Any]) -> float:
    """Return the share of values that differ from the reference.

    Floats may differ by rounding. Other lists are compared as sets.
    """
    different = 0.0
    count = 0
    for name in {**values, **reference}:
        a = as_list(values.get(name))
        b = as_list(reference.get(name))
        count += max(len(a), len(b))
        if len(a) == len(b) and are_floats([*a, *b]):
            different += sum(map(differs, a, b))
        else:
            different += len(set(map(str, a)) ^ set(map(str, b))) / 2
    return different / max(1, count)


# ---- errors --------------------------------------------------------------------------------------
def format_error(error: BaseException) -> str:
    """Return the first sentence of an error message in one line."""
    lines = ENFORCED.sub("", str(error).strip()).splitlines() or [""]
    sentence = lines[0]
    if not isinstance(error, UserError):
        sentence = f"{type(error).__name__}: {sentence.split('. ')[0]}"
    if len(sentence) > LONGEST_SENTENCE:
        return f"{sentence[: LONGEST_SENTENCE - 4]} ..."
    return sentence


def find_frame(error: BaseException) -> str:
    """Return the innermost line of this project in a traceback as FILE:LINE, or ""."""
    frame = ""
    for entry in traceback.extract_tb(error.__traceback__):
        path = Path(entry.filename)
        if path.is_relative_to(ROOT) and "site-packages" not in path.parts:
            frame = f"{path.relative_to(ROOT)}:{entry.lineno}"
    return frame
