"""Tests of workers/data/torch_internals.py: each private name exists and works as needed."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.nn import functional as F

from workers.data import torch_internals


class Block(nn.Module):
    """The smallest block with an operation to compile."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 1


def test_only_batch_norms_have_the_common_base_class() -> None:
    batch_norms = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
    for kind in batch_norms:
        assert isinstance(kind(4), torch_internals.BatchNormBase), kind
    for norm in (nn.LayerNorm(4), nn.GroupNorm(2, 4), nn.InstanceNorm2d(4)):
        assert not isinstance(norm, torch_internals.BatchNormBase), norm


def test_shape_inference_computes_nothing() -> None:
    linear = nn.Linear(8, 3)
    with torch_internals.shapes_only():
        images = torch.empty(1 << 40, 8)  # 32 TiB if it were allocated
        assert linear(images).shape == (1 << 40, 3)
        assert torch_internals.has_no_values(linear(images))
    assert linear(torch.zeros(2, 8)).shape == (2, 3), "operations must compute again afterwards"
    assert not torch_internals.has_no_values(linear(torch.zeros(2, 8)))


def test_ordinary_tensors_have_values_and_can_be_trained() -> None:
    with torch_internals.shapes_only(), torch.inference_mode():
        with torch_internals.ordinary_tensors():
            ordinary = torch.tensor([1.0, 2.0])
        assert torch_internals.has_no_values(torch.zeros(2))
    assert ordinary.tolist() == [1, 2]
    assert not ordinary.is_inference()


def test_dispatch_mode_sees_each_operator() -> None:
    names: list[str] = []

    class Recorder(torch_internals.DispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            names.append(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    with Recorder():  # type: ignore[no-untyped-call]
        torch.zeros(2) + torch.ones(2)
    assert names == ["zeros", "ones", "add"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradient_is_kept_above_the_threshold_in_place(dtype: torch.dtype) -> None:
    values = torch.tensor([[-1.0, 0.0, 0.5], [1.0, 2.0, -0.0]], dtype=dtype).T
    gradient = torch.arange(1.0, 7.0).view(3, 2)
    kept = torch_internals.keep_gradient_above(gradient, values, 0.0)
    assert kept is gradient
    assert torch.equal(gradient, torch.tensor([[0.0, 2.0], [0.0, 4.0], [5.0, 0.0]]))


@pytest.mark.parametrize("size", [(5, 7), (40, 3)])
def test_resize_into_matches_interpolate(size: tuple[int, int]) -> None:
    image = torch.arange(3 * 20 * 30, dtype=torch.uint8).view(1, 20, 30, 3).permute(0, 3, 1, 2)
    out = torch.zeros(1, *size, 3, dtype=torch.uint8).permute(0, 3, 1, 2)
    torch_internals.resize_into(image, out, list(size))
    expected = F.interpolate(image, size, mode="bilinear", antialias=True)
    assert torch.equal(out, expected)
    assert out.any()


def test_cpu_attention_matches_public_function_and_returns_logsumexp() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 3, 9, 4).unbind(0)
    mask = torch.zeros(2, 3, 1, 9)
    mask[0, :, :, 3:8] = -torch.inf
    output, log_total = torch_internals.attend_on_cpu(q, k, v, mask, 0.5)
    expected = F.scaled_dot_product_attention(q, k, v, mask, scale=0.5)
    assert torch.equal(output, expected)
    scores = 0.5 * q @ k.transpose(2, 3) + mask
    assert torch.allclose(log_total, scores.logsumexp(-1, keepdim=True), atol=1e-6)


def test_compile_options_are_set() -> None:
    from torch._dynamo import config

    with config.patch(skip_nnmodule_hook_guards=True, recompile_limit=8):  # restored afterwards
        torch_internals.set_compile_options(max_variants=3)
        assert config.skip_nnmodule_hook_guards is False
        assert config.recompile_limit == 3


def test_compiled_code_depends_on_hooks() -> None:
    from torch._dynamo import config

    plain_block = Block()
    hooked_block = Block()
    hooked_block.register_forward_hook(lambda module, arguments, output: output * 10)
    torch.compiler.reset()
    with config.patch(skip_nnmodule_hook_guards=True, recompile_limit=8):  # restored afterwards
        torch_internals.set_compile_options(max_variants=8)
        for block in (plain_block, hooked_block):
            # A module's own hooks run outside its compiled code, so a parent is compiled.
            parent = nn.Sequential(block)
            parent.compile(backend="eager")
            expected = nn.Sequential(block)(torch.zeros(2))
            assert torch.equal(parent(torch.zeros(2)), expected)


def test_block_runs_uncompiled_beyond_the_variant_limit() -> None:
    from torch._dynamo import config

    compiled_graphs = []

    def count(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> torch.fx.GraphModule:
        compiled_graphs.append(graph)
        return graph

    torch.compiler.reset()
    with config.patch(skip_nnmodule_hook_guards=True, recompile_limit=8):  # restored afterwards
        torch_internals.set_compile_options(max_variants=2)
        block = Block()
        block.compile(backend=count)
        for dimensions in range(1, 6):
            assert block(torch.zeros([2] * dimensions)).eq(1).all()
    assert len(compiled_graphs) == 2


def test_host_collectives_have_a_separate_time_limit(tmp_path: Path) -> None:
    whole = timedelta(seconds=60)
    meeting = f"file://{tmp_path}/meet"
    distributed.init_process_group("gloo", meeting, timeout=whole, rank=0, world_size=1)
    try:
        torch_internals.limit_host_waits(2.5)
        group = distributed.group.WORLD
        assert group is not None
        backend = group._get_backend(torch.device("cpu"))
        assert backend.options._timeout == timedelta(seconds=2.5)
    finally:
        distributed.destroy_process_group()
