"""Export one task of a bundle as an ONNX file, which runs in any ONNX runtime without Accrete.

The file contains the complete computation of the method for the task: weights with their masks
applied, and tokens, prompts and adapters.
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

PACKAGES = ("onnx", "onnxruntime", "onnxscript")  # of the extra `onnx` in pyproject.toml
CONSTRAINTS = Path(__file__).resolve().parents[2] / "constraints.txt"
INPUT, OUTPUT = "images", "logits"
OPSET = 18
TOLERANCE = 1e-5  # largest accepted result of `_compute_onnx_difference`
TRACED_IMAGES = 2  # batch size of the export; with 1 the exporter would fix the batch size
CHECKED_IMAGES = (1, 5)  # sizes of the batches of noise on which both models are compared
MAX_WEIGHT_BYTES = (1 << 31) - (1 << 20)  # an ONNX file can have 2 GiB; 1 MiB is for the rest


class TaskModel(nn.Module):
    """One task of a method as a module: images (b, 3, H, W) -> logits (b, classes).

    Args:
        method: The method.
        task_name: Name of the task.
    """

    def __init__(self, method: Method, task_name: str):
        super().__init__()
        self.method = method
        self.task_name = task_name

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits of normalised images."""
        return self.method.logits(images, self.task_name)


def write_onnx_file(bundle: Bundle, task_name: str, uri: str) -> None:
    """Write one task into an ONNX file.

    Args:
        bundle: The bundle.
        task_name: Name of the task.
        uri: Path or URI of the file.

    Raises:
        UserError: See `export_onnx`.
    """
    write_bytes(uri, export_onnx(bundle, task_name))


def export_onnx(bundle: Bundle, task_name: str) -> bytes:
    """Export one task as an ONNX model, and compare its logits with those of the method.

    The input `images` is float32 (N, 3, H, W), normalised. The output is `logits` (N, classes).

    Raises:
        UserError: If a package is missing, the task cannot be exported, or the logits of
            onnxruntime differ by more than `TOLERANCE`.
    """
    _need_packages()
    bundle.task(task_name)
    method = bundle.method()
    side = int(bundle.body["preprocessing"]["crop"])
    weights = [*method.parameters(), *method.buffers()]
    nbytes = sum(tensor.nbytes for tensor in weights)
    if nbytes > MAX_WEIGHT_BYTES:
        reason = f"an ONNX file holds 2 GiB, its weights {nbytes} bytes"
        raise _make_onnx_error(bundle, task_name, reason)
    try:
        with torch.no_grad(), _silence():
            data = _trace_onnx(method, task_name, side, build_metadata(bundle, task_name))
            difference = _compute_onnx_difference(data, method, task_name, side)
    except Exception as error:  # exporter and runtime raise many kinds of errors
        cause = error.__cause__ or error
        detail = " ".join(str(cause).split())
        reason = f"{type(cause).__name__}: {detail:.200}"
        raise _make_onnx_error(bundle, task_name, reason) from None
    if not difference <= TOLERANCE:
        reason = f"onnxruntime gives logits that differ by {difference:.1e}"
        raise _make_onnx_error(bundle, task_name, reason)
    return data


def build_metadata(bundle: Bundle, task_name: str) -> dict[str, str]:
    """Return the metadata of the file: key -> JSON text."""
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
    """Raise `UserError` if a package of the extra `onnx` is not installed."""
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        # an installed wheel has no constraints file
        versions = f" -c {CONSTRAINTS}" if CONSTRAINTS.exists() else ""
        raise UserError(
            f"--onnx needs the packages {', '.join(PACKAGES)}, but {', '.join(missing)} is not "
            f"installed; run `{sys.executable} -m pip install {' '.join(PACKAGES)}{versions}`"
        )


def _make_onnx_error(bundle: Bundle, task_name: str, reason: str) -> UserError:
    """Return the error for a task that cannot be exported."""
    return UserError(
        f"{bundle.where}: task {task_name!r} cannot be written as ONNX: {reason}; leave out "
        "--onnx and serve the bundle instead"
    )


@contextmanager
def _silence() -> Iterator[None]:
    """Context manager that drops warnings and logs of the exporter's internals."""
    previous = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(previous)


def _trace_onnx(method: Method, task_name: str, side: int, metadata: dict[str, str]) -> bytes:
    """Return a task as an ONNX model with metadata."""
    import onnx

    images = torch.zeros(TRACED_IMAGES, 3, side, side)
    model = TaskModel(method, task_name).eval()
    model(images)  # activates the weights of the task before they are traced
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


def _compute_onnx_difference(data: bytes, method: Method, task_name: str, side: int) -> float:
    """Return the largest absolute difference between the logits of onnxruntime and the method.

    The difference is divided by the largest absolute logit, or by 1 if all logits are smaller.
    """
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
