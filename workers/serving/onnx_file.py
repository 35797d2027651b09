"""One task of a bundle as an ONNX file, which any runtime of ONNX computes without Accrete.

The file holds what the method computes for the task: its weights with masks in effect, tokens,
prompts and adapters too.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from workers.errors import UserError
from workers.methods.base import Method
from workers.serving.bundle import Bundle
from workers.storage.artifact import write_bytes

PACKAGES = ("onnx", "onnxruntime", "onnxscript")  # the extra `onnx`
CONSTRAINTS = Path(__file__).resolve().parents[2] / "constraints.txt"
INPUT, OUTPUT = "images", "logits"
OPSET = 18
TOLERANCE = 1e-5  # of the largest logit, or of 1
TRACED_IMAGES = 2  # one image would be taken for a fixed size
CHECKED_IMAGES = (1, 5)  # of noise, on which both models are compared
LARGEST = (1 << 31) - (1 << 20)  # bytes of weights; ONNX allows 2 GiB in a file


class TaskModel(nn.Module):
    """images (b, 3, H, W) -> logits (b, classes) of one task of a method."""

    def __init__(self, method: Method, task_name: str):
        super().__init__()
        self.method = method
        self.task_name = task_name

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits of images that are normalised."""
        return self.method.logits(images, self.task_name)


def write(bundle: Bundle, task_name: str, uri: str) -> None:
    """Write the bytes of `onnx_bytes` into a file. Raise `UserError` as it does."""
    write_bytes(uri, onnx_bytes(bundle, task_name))


def onnx_bytes(bundle: Bundle, task_name: str) -> bytes:
    """Return one task as an ONNX model: float32 `images` (N, 3, H, W), normalised -> `logits`.

    Raise `UserError` where a package is missing, where the task cannot be exported, and where
    onnxruntime does not give the task's logits.
    """
    _need_packages()
    bundle.task(task_name)
    method = bundle.method()
    side = int(bundle.body["preprocessing"]["crop"])
    weights = [*method.parameters(), *method.buffers()]
    nbytes = sum(tensor.nbytes for tensor in weights)
    if nbytes > LARGEST:
        raise _cannot(bundle, task_name, f"an ONNX file holds 2 GiB, its weights {nbytes} bytes")
    try:
        with torch.no_grad(), _silence():
            data = _exported(method, task_name, side, metadata_of(bundle, task_name))
            difference = _difference(data, method, task_name, side)
    except Exception as error:  # exporter and runtime raise many kinds, all of this one task
        cause = error.__cause__ or error
        detail = " ".join(str(cause).split())
        reason = f"{type(cause).__name__}: {detail:.200}"
        raise _cannot(bundle, task_name, reason) from None
    if not difference <= TOLERANCE:
        reason = f"onnxruntime gives logits that differ by {difference:.1e}"
        raise _cannot(bundle, task_name, reason)
    return data


def metadata_of(bundle: Bundle, task_name: str) -> dict[str, str]:
    """Return what the file says of itself, as JSON by key."""
    preprocessing = bundle.body["preprocessing"]
    values = {
        "method": bundle.body["method"],
        "task": task_name,
        "classes": list(bundle.task(task_name).classes),
        "input": INPUT,
        "output": OUTPUT,
        "opset": OPSET,
        **preprocessing,
    }
    return {name: json.dumps(value) for name, value in values.items()}


def _need_packages() -> None:
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        versions = f" -c {CONSTRAINTS}" if CONSTRAINTS.exists() else ""  # a wheel has none
        raise UserError(
            f"--onnx needs the packages {', '.join(PACKAGES)}, and {', '.join(missing)} is not "
            f"installed; run `{sys.executable} -m pip install {' '.join(PACKAGES)}{versions}`"
        )


def _cannot(bundle: Bundle, task_name: str, reason: str) -> UserError:
    return UserError(
        f"{bundle.where}: task {task_name!r} cannot be written as ONNX: {reason}; leave out "
        "--onnx, and a bundle serves it"
    )


@contextmanager
def _silence() -> Iterator[None]:
    """Inside, drop warnings and logs of the exporter, which are of its parts, not of the task."""
    previous = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(previous)


def _exported(method: Method, task_name: str, side: int, metadata: dict[str, str]) -> bytes:
    """Return a task as an ONNX model, with metadata."""
    import onnx

    images = torch.zeros(TRACED_IMAGES, 3, side, side)
    model = TaskModel(method, task_name).eval()
    model(images)  # its weights are in effect before they are traced
    program = torch.onnx.export(
        model,
        (images,),
        input_names=[INPUT],
        output_names=[OUTPUT],
        opset_version=OPSET,
        dynamo=True,
        dynamic_shapes=({0: torch.export.Dim("n")},),
        verbose=False,
    )
    assert program is not None
    proto = program.model_proto
    onnx.helper.set_model_props(proto, metadata)
    data: bytes = proto.SerializeToString()
    return data


def _difference(data: bytes, method: Method, task_name: str, side: int) -> float:
    """Return how far onnxruntime's logits are from the task's, relative to the largest."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors
    session: Any = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    generator = torch.Generator().manual_seed(0)
    worst = 0.0
    for count in CHECKED_IMAGES:
        images = torch.randn((count, 3, side, side), generator=generator)
        expected = method.logits(images, task_name)
        (answer,) = session.run([OUTPUT], {INPUT: images.numpy()})
        largest = max(1.0, float(expected.abs().max()))
        difference = float((torch.from_numpy(answer) - expected).abs().max()) / largest
        worst = max(worst, difference)
    return worst
