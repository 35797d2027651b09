"""What `benchmarks.gpu` compares: results of stages as values, how far two of them are apart,
errors as sentences."""

from __future__ import annotations

import io
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

from pipeline.graph.store import flatten
from workers.errors import UserError
from workers.storage.artifact import Artifact
from workers.storage.taskstate import KINDS, Carried, TaskState

ROOT = Path(__file__).resolve().parent.parent
SPARSE = "/sparse"  # at the end of the name of what was stored as positions and values
ROUNDING = 1e-3  # relative: of what nothing was trained between; of probabilities absolute
LONGEST_SENTENCE = 240
ENFORCED = re.compile(r"^\[enforce fail [^\]]*\] [^.]*\. ")  # PyTorch puts it before some sentences


def stage_tensors(artifact: Artifact) -> dict[str, Tensor]:
    """All tensors that a training step left, by kind and name: masks as booleans, sparse tensors as
    vectors without their
    last zeros."""
    state = TaskState.from_bytes(artifact.read("task.safetensors"))
    tensors = {
        f"carried/{name}": t
        for name, t in Carried.from_bytes(artifact.read("carried.safetensors")).tensors.items()
    }
    for kind in KINDS:
        tensors |= {f"{kind}/{name}": t for name, t in getattr(state, kind).items()}
    for name in [name for name in tensors if name.endswith("/values")]:
        prefix = name.removesuffix("/values")
        values = tensors.pop(name)
        at = tensors.pop(f"{prefix}/at", None)
        places = (
            torch.from_numpy(bits_of(tensors.pop(f"{prefix}/bits")))
            .nonzero()
            .squeeze(1)[: len(values)]
            if at is None
            else at.long()
        )
        tensors[f"{prefix}{SPARSE}"] = torch.zeros(
            int(places.max()) + 1 if len(places) else 0
        ).index_put_((places,), values)
    return tensors


def stage_metadata(artifact: Artifact) -> dict[str, Any]:
    """Metadata of state and carried state, as values by dotted key."""
    state = TaskState.from_bytes(artifact.read("task.safetensors"))
    carried = Carried.from_bytes(artifact.read("carried.safetensors"))
    return flatten({"state": state.meta, "carried": carried.meta})


def history(artifact: Artifact) -> list[dict[str, Any]]:
    """A row per epoch, without its seconds."""
    rows = pq.read_table(io.BytesIO(artifact.read("history.parquet"))).to_pylist()
    return [{name: value for name, value in row.items() if name != "seconds"} for row in rows]


def predictions(artifact: Artifact) -> list[dict[str, Any]]:
    """A row per test image."""
    return pq.read_table(io.BytesIO(artifact.read("predictions.parquet"))).to_pylist()


def bits_of(tensor: Tensor) -> np.ndarray:
    """Booleans and other integers as they are; bytes as their bits, because masks are packed."""
    values = tensor.numpy()
    return np.unpackbits(values.reshape(-1)) if values.dtype == np.uint8 else values.reshape(-1)


def largest(values: Iterable[float]) -> float:
    """0 where there are none; not a number where one is."""
    return float(np.max(list(values), initial=0.0))


def relative(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> float:
    """|a - b| / |b|, over all tensors together. Vectors may end in zeros that the other side
    lacks."""
    difference = size = 0.0
    for name, a in ours.items():
        b = theirs[name]
        if a.shape != b.shape:
            length = max(len(a), len(b))
            a, b = (functional.pad(t, (0, length - len(t))) for t in (a, b))
        difference += float((a.double() - b.double()).square().sum())
        size += float(b.double().square().sum())
    return (difference / size) ** 0.5 if size else difference**0.5


def other_values(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> float:
    """Share of the values that the other side has not. Numbers may differ by rounding; other lists
    are compared as sets."""
    different = count = 0.0
    for name in {**ours, **theirs}:
        a, b = (
            values if isinstance(values, list) else [values]
            for values in (ours.get(name), theirs.get(name))
        )
        count += max(len(a), len(b))
        if len(a) == len(b) and all(isinstance(value, float) for value in [*a, *b]):
            different += sum(
                abs(x - y) > ROUNDING * (1 + abs(y)) for x, y in zip(a, b, strict=True)
            )
        else:
            different += len({str(value) for value in a} ^ {str(value) for value in b}) / 2
    return different / count if count else 0.0


# ---- errors --------------------------------------------------------------------------------------
def sentence_of(error: BaseException) -> str:
    """The first sentence of an error, in one line."""
    lines = ENFORCED.sub("", str(error).strip()).splitlines() or [""]
    sentence = (
        lines[0]
        if isinstance(error, UserError)
        else f"{type(error).__name__}: {lines[0].split('. ')[0]}"
    )
    return (
        sentence if len(sentence) <= LONGEST_SENTENCE else f"{sentence[: LONGEST_SENTENCE - 4]} ..."
    )


def frame_of(error: BaseException) -> str:
    """The deepest line of this project that the error went through, as FILE:LINE below the
    checkout."""
    frame = ""
    for entry in traceback.extract_tb(error.__traceback__):
        path = Path(entry.filename)
        if path.is_relative_to(ROOT) and "site-packages" not in path.parts:
            frame = f"{path.relative_to(ROOT)}:{entry.lineno}"
    return frame
