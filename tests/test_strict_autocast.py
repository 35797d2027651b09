"""Tests of bf16 training on the simulated device: casts as on CUDA, and fp32 where required."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests import on_strict_device, strict_autocast
from tests.on_strict_device import Case
from tests.strict_device import NAME, StrictDevice, strict_device
from workers import loop
from workers.data.batch import Batch
from workers.methods import METHODS
from workers.methods.base import Progress
from workers.methods.finetune import FineTune

# cuDNN operations and one matrix operation that the header does not list.
OUTSIDE_LISTS = {
    "_cudnn_rnn",
    "cudnn_convolution",
    "cudnn_convolution_transpose",
    "linalg_matrix_sqrth",
}
BF16, FP32 = torch.bfloat16, torch.float32


def attend(x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x, x, x)


# Operation -> a call with x (4, 4) in fp32 and y (4, 4) in bf16, and the result's dtype.
RESULTS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], torch.dtype]] = {
    "matmul": (lambda x, y: x @ x, BF16),
    "linear": (lambda x, y: F.linear(x, x, x[0]), BF16),
    "einsum": (lambda x, y: torch.einsum("ij,jk->ik", x, x), BF16),
    "conv2d": (lambda x, y: F.conv2d(x[None, None], x[None, None]), BF16),
    "bmm": (lambda x, y: x[None].bmm(x[None]), BF16),
    "attention": (lambda x, y: attend(x[None, None]), BF16),
    "softmax": (lambda x, y: y.softmax(-1), FP32),
    "softmax to a type": (lambda x, y: y.softmax(-1, dtype=BF16), BF16),
    "layer_norm": (lambda x, y: F.layer_norm(y, (4,)), FP32),
    "group_norm": (lambda x, y: F.group_norm(y, 2), FP32),
    "norm": (lambda x, y: y.norm(), FP32),
    "norm of rows": (lambda x, y: y.norm(dim=1), FP32),
    "exp": (lambda x, y: y.exp(), FP32),
    "pow": (lambda x, y: y.pow(2), FP32),
    "sum": (lambda x, y: y.sum(), FP32),
    "cumsum": (lambda x, y: y.cumsum(0), FP32),
    "cross_entropy": (lambda x, y: F.cross_entropy(y, y.argmax(1)), FP32),
    "mse_loss": (lambda x, y: F.mse_loss(y, y), FP32),
    "addcmul": (lambda x, y: torch.addcmul(y, y, x), FP32),
    "addcmul of bf16": (lambda x, y: torch.addcmul(y, y, y), BF16),
    "cat": (lambda x, y: torch.cat([x, y]), FP32),
    "stack": (lambda x, y: torch.stack([x, y]), FP32),
    "add": (lambda x, y: x + y, FP32),
    "relu": (lambda x, y: y.relu(), BF16),
    "mean": (lambda x, y: y.mean(), BF16),
    "of double": (lambda x, y: x.double() @ x.double(), torch.float64),
    "of int": (lambda x, y: x.long().sum(), torch.int64),
}
# Methods with attention masks, and with unit masks and statistics. The other tests are slow.
KINDS = ("meat", "hat")
# Kernels of norms, losses and masks. In a ViT, only masks use a sigmoid.
IN_FP32 = {
    "aten.native_layer_norm.default",
    "aten.native_group_norm.default",
    "aten._log_softmax.default",
    "aten.nll_loss_forward.default",
    "aten.sigmoid.default",
    "aten.sigmoid_.default",
}
PRODUCTS = {"aten.mm.default", "aten.addmm.default", "aten.bmm.default"}


class Types(NamedTuple):
    """dtypes in the training steps of a case.

    steps: dtypes by group of tensors: `loss`, `gradients`, `parameters` and so on. kernels: dtypes
    of arguments, by operation. stored: dtypes of the stored tensors, by stage and name.
    """

    steps: dict[str, set[torch.dtype]]
    kernels: dict[str, set[torch.dtype]]
    stored: dict[str, str]


class LosesPrecision(FineTune):
    """A method with a loss in bf16."""

    def loss(self, batch: Batch, progress: Progress) -> Any:
        loss, terms = super().loss(batch, progress)
        return loss.bfloat16(), terms


def train_without_precision() -> Types:
    """Train `LosesPrecision`. Runs in the device's process."""
    with mock.patch.dict(METHODS, {"finetune": LosesPrecision}):
        return train(Case("finetune", "task", train={"precision": "bf16", "batch_size": 24}))


def find_types(values: Any) -> set[torch.dtype]:
    """Return the dtypes of the floating-point tensors among the values."""
    tensors = [value for value in values if isinstance(value, Tensor)]
    return {tensor.dtype for tensor in tensors if tensor.is_floating_point()}


def train(case: Case) -> Types:
    """Run the stages of a case on the strict device, and record dtypes. Runs in the device's
    process."""
    steps: dict[str, set[torch.dtype]] = {}
    kernels: dict[str, set[torch.dtype]] = {}
    train_step = loop.train_step
    execute = StrictDevice.execute

    def noting_execute(self: StrictDevice, func: Any, args: Any, kwargs: Any) -> Any:
        kernels.setdefault(str(func), set()).update(find_types(args))
        return execute(self, func, args, kwargs)

    def noting_step(method: Any, optimizer: Any, *rest: Any) -> Any:
        with mock.patch.object(StrictDevice, "execute", noting_execute):
            terms = train_step(method, optimizer, *rest)
        parameters = [*method.parameters()]
        states = [value for state in optimizer.state.values() for value in state.values()]
        values = {
            "loss": terms.values(),
            "parameters": parameters,
            "gradients": [p.grad for p in parameters],
            "buffers": method.buffers(),
            "optimizer": states,
        }
        for name, tensors in values.items():
            steps.setdefault(name, set()).update(find_types(tensors))
        return terms

    with strict_device(), mock.patch.object(loop, "train_step", noting_step):
        results = on_strict_device.results(case, NAME)
    stored = {}
    for stage, data in results.items():
        if stage.endswith(("state", "carried")):
            for name, dtype in read_types(data).items():
                stored[f"{stage}/{name}"] = dtype
    return Types(steps, kernels, stored)


def read_types(data: bytes) -> dict[str, str]:
    """Return the dtype of each tensor in a safetensors file, by name."""
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    return {name: entry["dtype"] for name, entry in header.items() if name != "__metadata__"}


def apply_under_autocast(name: str, enabled: bool = True) -> torch.dtype:
    """Return the dtype of the result of RESULTS[name]. Runs in the device's process."""
    with strict_device():
        x = torch.ones(4, 4).to(NAME)
        with torch.autocast(NAME, BF16, enabled=enabled):
            return RESULTS[name][0](x, x.bfloat16()).dtype


def refuse_loss() -> None:
    """Compute a loss that CUDA refuses under autocast. Runs in the device's process."""
    with strict_device(), torch.autocast(NAME, BF16):
        x = torch.ones(4).to(NAME)
        F.binary_cross_entropy(x, x)


# ---- the device ----------------------------------------------------------------------------------
@pytest.mark.parametrize("name", RESULTS)
def test_operation_is_cast_as_on_cuda(device: Any, name: str) -> None:
    assert device.submit(apply_under_autocast, name).result() == RESULTS[name][1]


@pytest.mark.parametrize("name", ["matmul", "linear", "conv2d"])
def test_nothing_is_cast_without_autocast(device: Any, name: str) -> None:
    assert device.submit(apply_under_autocast, name, enabled=False).result() == FP32


def test_loss_that_is_unsafe_in_bf16_is_refused(device: Any) -> None:
    with pytest.raises(RuntimeError, match="unsafe to autocast"):
        device.submit(refuse_loss).result()


def test_lists_name_every_operation_that_cuda_casts() -> None:
    registered = torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCUDA")
    listed = {name for names in strict_autocast.read_lists().values() for name in names}
    of_torch = {name.removeprefix("aten::") for name in registered if name.startswith("aten::")}
    assert listed | {strict_autocast.REFUSED} == of_torch - OUTSIDE_LISTS


# ---- methods -------------------------------------------------------------------------------------
@pytest.mark.few(1)
@pytest.mark.parametrize(
    "method",
    [
        pytest.param(name, marks=() if name in KINDS else pytest.mark.slow)
        for name, cls in METHODS.items()
        if cls.has_training()
    ],
)
def test_method_keeps_weights_masks_losses_and_norms_in_fp32(device: Any, method: str) -> None:
    case = Case(method, max(METHODS[method].scenarios - {"domain"}))
    in_fp32 = device.submit(train, case).result()
    types = device.submit(train, replace(case, train={"precision": "bf16"})).result()
    computed = types.steps | {name: types.kernels.get(name, set()) for name in IN_FP32}
    low = {name: found for name, found in computed.items() if found - {FP32}}
    assert not low, f"not in fp32: {low}"
    assert types.steps["loss"] == types.steps["parameters"] == {FP32}
    assert any(BF16 in types.kernels.get(name, ()) for name in PRODUCTS), (
        "no matrix product is in bf16"
    )
    assert types.stored == in_fp32.stored


def test_method_that_loses_precision_is_found(device: Any) -> None:
    types = device.submit(train_without_precision).result()
    assert BF16 in types.steps["loss"]
