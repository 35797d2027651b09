"""Tests of frozen layers: under bf16 autocast, they cast weights once and give the same bits."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeline.testing.lab import OPTIMIZERS, Lab
from workers import loop
from workers.data.torch_internals import DispatchMode
from workers.model import frozen
from workers.model.frozen import cast_once, copy_frozen
from workers.model.masked import GatedLinear

FILES = ("task.safetensors", "carried.safetensors")


class CastCounter(DispatchMode):
    """Count the casts of tensors of a given shape."""

    def __init__(self, shape: torch.Size):
        super().__init__()  # type: ignore[no-untyped-call]
        self.shape, self.count = shape, 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.overloadpacket.__name__ == "_to_copy" and args[0].shape == self.shape:
            self.count += 1
        return func(*args, **(kwargs or {}))


def make_layer(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    arguments: tuple[int, ...] = (3, 5, 2) if issubclass(kind, nn.Conv2d) else (3, 5)
    return kind(*arguments).requires_grad_(False)


def run_bf16(layer: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the output y under autocast, and the gradient of |y|^2 with respect to x."""
    x = x.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        output = layer(x)
    output.float().square().sum().backward()
    return output.detach(), x.grad


@pytest.mark.parametrize("kind", frozen.LAYERS)
def test_frozen_layer_gives_the_bits_of_autocast_with_one_cast(kind: type[nn.Module]) -> None:
    layer = make_layer(kind)
    x = torch.randn(4, 3, 6, 6) if isinstance(layer, nn.Conv2d) else torch.randn(4, 3)
    expected = run_bf16(layer, x)
    with cast_once(nn.Sequential(layer)):
        run_bf16(layer, x)  # casts weight and bias
        with CastCounter(layer.weight.shape) as counter:  # type: ignore[arg-type]
            outputs = [run_bf16(layer, x) for _ in range(3)]
        in_fp32 = layer(x)
    assert counter.count == 0
    for output, gradient in outputs:
        assert output.dtype == torch.bfloat16
        assert torch.equal(output, expected[0])
        assert torch.equal(gradient, expected[1])  # type: ignore[arg-type]
    assert torch.equal(in_fp32, layer(x))
    assert "forward" not in vars(layer)


def test_frozen_layer_applies_its_gate() -> None:
    layer = make_layer(GatedLinear)
    assert isinstance(layer, GatedLinear)
    layer.gate = torch.tensor([1.0, 0.0, 1.0])
    x = torch.randn(4, 3)
    expected, _ = run_bf16(layer, x)
    with cast_once(layer):
        assert torch.equal(run_bf16(layer, x)[0], expected)


def test_layers_with_trained_parameters_are_left_alone() -> None:
    layer = nn.Linear(3, 5)
    layer.weight.requires_grad_(False)
    with cast_once(layer):
        assert "forward" not in vars(layer)


def test_replaced_or_changed_parameters_are_used() -> None:
    layer = make_layer(nn.Linear)
    x = torch.randn(4, 3)
    with cast_once(layer), torch.autocast("cpu", torch.bfloat16):
        before = layer(x)
        for other in ({"weight": torch.randn(5, 3)}, {"bias": torch.randn(5)}):
            assert not torch.equal(torch.func.functional_call(layer, other, (x,)), before)
        assert torch.equal(layer(input=x), before)
        with torch.no_grad():
            layer.weight.mul_(2)  # type: ignore[operator]
        changed = layer(x)
        assert not torch.equal(changed, before)
        layer.bias = nn.Parameter(torch.randn(5), requires_grad=False)
        other_bias = layer(x)
        assert not torch.equal(other_bias, changed)
        layer.bias.data.mul_(2)
        layer.bias = nn.Parameter(layer.bias.data, requires_grad=False)  # in the same memory
        assert not torch.equal(layer(x), other_bias)


def test_parameters_thawed_later_get_a_gradient() -> None:
    layer = make_layer(nn.Linear)
    x = torch.randn(4, 3)
    with cast_once(layer):
        run_bf16(layer, x)
        layer.requires_grad_(True)
        run_bf16(layer, x)
    assert layer.weight.grad is not None


def test_float16_autocast_does_not_reuse_bf16_casts() -> None:
    layer = make_layer(nn.Linear)
    x = torch.randn(4, 3)
    with torch.autocast("cpu", torch.float16):
        expected = layer(x)
    with cast_once(layer):
        run_bf16(layer, x)
        with torch.autocast("cpu", torch.float16):
            assert torch.equal(layer(x), expected)


def test_a_copy_of_a_layer_is_independent() -> None:
    layer = copy.deepcopy(make_layer(nn.Linear))
    x = torch.randn(4, 3)
    with cast_once(layer), torch.autocast("cpu", torch.bfloat16):
        layer(x)
        early = copy.deepcopy(layer)
        with torch.no_grad():
            layer.weight.zero_()  # type: ignore[operator]
            layer.bias.zero_()  # type: ignore[operator]
        late = copy.deepcopy(layer)
        assert early(x).abs().sum() > 0
        assert late(x).abs().sum() == 0


def test_subclasses_and_layers_with_a_replaced_forward_are_left_alone() -> None:
    class Sum(nn.Linear):
        """A layer that could use its weight elsewhere."""

    network = nn.Sequential(Sum(3, 5), nn.Linear(5, 2)).requires_grad_(False)
    with cast_once(network):
        assert "forward" not in vars(network[0])
        outer = vars(network[1])["forward"]
        with cast_once(network):
            assert vars(network[1])["forward"] is outer
        assert vars(network[1])["forward"] is outer


def test_error_restores_the_original_layer() -> None:
    layer = make_layer(nn.Linear)

    def fail() -> None:
        with cast_once(layer), torch.autocast("cpu", torch.bfloat16):
            layer(torch.randn(4, 3))
            layer(torch.randn(4, 2))

    with pytest.raises(RuntimeError, match="shape"):
        fail()
    assert "forward" not in vars(layer)
    assert layer.weight.dtype == torch.float32


def test_frozen_copy_casts_lazily_and_is_freed_without_gc() -> None:
    layer = nn.Linear(3, 5)
    twin = copy_frozen(layer)
    twin(torch.randn(4, 3))
    assert not vars(twin)["forward"]._copies  # no casts without autocast
    run_bf16(twin, torch.randn(4, 3))
    assert vars(twin)["forward"]._copies
    reference = weakref.ref(twin)
    gc.disable()
    try:
        del twin
        assert reference() is None
    finally:
        gc.enable()


def test_frozen_copy_casts_once() -> None:
    layer = nn.Linear(3, 5)
    twin = copy_frozen(layer)
    assert not twin.training
    run_bf16(twin, torch.randn(4, 3))
    with CastCounter(layer.weight.shape) as counter:
        run_bf16(twin, torch.randn(4, 3))
    assert counter.count == 0
    assert layer.weight.requires_grad


@pytest.mark.parametrize(
    "method", ["linear", "lora", "meat", "piggyback", "lwf", "der", "dytox", "toast", "l2p"]
)
def test_casting_frozen_layers_once_keeps_training_bit_identical(
    lab: Lab, method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = {**OPTIMIZERS["adamw"], "lr": 3e-3, "epochs": 1, "precision": "bf16"}
    run = lab.run_of(method, train)
    cast = [run.trained(1).read(name) for name in FILES]
    monkeypatch.setattr(loop, "cast_frozen_layers", lambda job, method: nullcontext())
    monkeypatch.setattr(frozen, "_replace_forward", lambda network: [])
    plain = Lab(tmp_path).run_of(method, train)
    assert [plain.trained(1).read(name) for name in FILES] == cast


@pytest.mark.parametrize(("precision", "expected"), [("bf16", ["linear"]), ("fp32", [])])
def test_training_casts_frozen_layers_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str, expected: list[str]
) -> None:
    trained: list[str] = []
    replace_forward = frozen._replace_forward

    def record(network: Any) -> list[nn.Module]:
        layers = replace_forward(network)
        assert layers
        trained.append(network.name)
        return layers

    monkeypatch.setattr(frozen, "_replace_forward", record)
    train = {**OPTIMIZERS["adamw"], "epochs": 1, "precision": precision}
    run = Lab(tmp_path).run_of("linear", train)
    run.trained(0)
    assert trained == expected
    (job,) = run.stages(0)
    compiled = replace(job, train=job.train.model_copy(update={"compile": True}))
    with loop.cast_frozen_layers(compiled, run.fresh(0)):
        assert trained == expected


def test_teacher_casts_once(lab: Lab) -> None:
    live = lab.run_of("lwf", {**OPTIMIZERS["adamw"], "lr": 3e-3, "epochs": 1}).live(1)
    assert any("forward" in vars(layer) for layer in live.teacher.backbone.modules())
