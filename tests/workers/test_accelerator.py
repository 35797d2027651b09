"""Tests of devices: index, memory limits on a shared GPU, generators, and precision."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from workers.data import accelerator
from workers.data.accelerator import (
    choose_memory_format,
    count_free_bytes,
    describe_device,
    limit_memory,
    make_device,
    make_named_device,
)

GIB = 1 << 30


class SharedGpu:
    """A GPU of 16 GiB. This process and other processes hold some of the memory."""

    def __init__(self, free: int = 16, reserved: int = 0, allocated: int = 0):
        self.free = free * GIB
        self.reserved = reserved * GIB
        self.allocated = allocated * GIB
        self.fraction = 1.0
        self.seed = 0

    def current_device(self) -> int:
        return 3

    def get_device_name(self, device: torch.device) -> str:
        return f"GPU {device.index}"

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        return self.free, 16 * GIB

    def memory_reserved(self, device: torch.device) -> int:
        return self.reserved

    def memory_allocated(self, device: torch.device) -> int:
        return self.allocated

    def empty_cache(self) -> None:
        self.free += self.reserved - self.allocated
        self.reserved = self.allocated

    def manual_seed_all(self, seed: int) -> None:
        self.seed = seed

    def set_per_process_memory_fraction(self, fraction: float, device: torch.device) -> None:
        self.fraction = fraction

    def get_per_process_memory_fraction(self, device: torch.device) -> float:
        return self.fraction


def use(monkeypatch: pytest.MonkeyPatch, gpu: Any) -> torch.device:
    monkeypatch.setattr(accelerator, "functions", lambda: gpu)
    return make_device(1)


@pytest.mark.parametrize(
    ("gpus", "free", "reserved", "allocated", "allowed"),
    [
        (1, 10, 2, 2, 10),
        (2, 10, 2, 2, 10),
        (1, 10, 4, 1, 13),  # 3 GiB are kept for later allocations
        (0.25, 10, 1, 1, 3),
        (0.25, 10, 4, 1, 3),
        (0.25, 2, 1, 1, 2),  # others hold more than their part
        (0.25, 10, 4, 4, 0),
    ],
)
def test_gpu_share_limits_the_free_memory(
    monkeypatch: pytest.MonkeyPatch,
    gpus: float,
    free: int,
    reserved: int,
    allocated: int,
    allowed: int,
) -> None:
    device = use(monkeypatch, SharedGpu(free, reserved, allocated))
    limit_memory(device, gpus)
    assert count_free_bytes(device) == allowed * GIB


def test_release_memory_frees_cached_gpu_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = SharedGpu(free=6, reserved=10, allocated=1)
    accelerator.release_memory(use(monkeypatch, gpu))
    assert gpu.mem_get_info(make_device(1))[0] == 15 * GIB


def test_cpu_and_gpu_generators_are_seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(7)
    expected = torch.rand(3)
    gpu = SharedGpu()
    device = use(monkeypatch, gpu)
    accelerator.seed_generators(7, torch.device("cpu"))
    assert torch.equal(torch.rand(3), expected)
    assert gpu.seed == 0
    accelerator.seed_generators(7, device)
    assert torch.equal(torch.rand(3), expected)
    assert gpu.seed == 7


def test_a_device_has_an_index_and_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    device = use(monkeypatch, SharedGpu())
    assert device == make_named_device("cuda") == torch.device("cuda", 3)
    assert describe_device(device) == "GPU 3"
    assert make_device(0) == make_named_device("cpu") == torch.device("cpu")
    assert describe_device(torch.device("cpu")).startswith("cpu (")


def test_memory_functions_do_nothing_on_a_cpu() -> None:
    limit_memory(torch.device("cpu"), 0)
    accelerator.release_memory(torch.device("cpu"))


@pytest.mark.parametrize(
    ("convolutions", "device", "precision", "is_channels_last"),
    [
        (2, "cuda", "bf16", True),
        (2, "cuda", "tf32", True),
        (2, "cuda", "fp32", False),
        (2, "cpu", "bf16", False),
        (1, "cuda", "bf16", False),  # a ViT
    ],
)
def test_cnns_use_channels_last_on_tensor_cores(
    convolutions: int, device: str, precision: str, is_channels_last: bool
) -> None:
    network = nn.Sequential(*[nn.Conv2d(3, 3, 1) for _ in range(convolutions)])
    memory_format = choose_memory_format(network, torch.device(device), precision)
    assert (memory_format == torch.channels_last) is is_channels_last


def test_convolution_algorithms_are_deterministic() -> None:
    with torch.backends.cudnn.flags(deterministic=False, benchmark=True):
        accelerator.use_fp32()
        assert torch.backends.cudnn.deterministic
        assert not torch.backends.cudnn.benchmark


def test_training_uses_the_set_precision_and_evaluation_fp32(
    lab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []
    use_fp32 = accelerator.use_fp32

    def use(tf32: bool = False) -> None:
        asked.append(tf32)
        use_fp32(tf32)

    monkeypatch.setattr(accelerator, "use_fp32", use)
    train = {"optimizer": "adamw", "lr": 1e-2, "epochs": 1, "batch_size": 32}
    runs = {
        precision: lab.run_of("finetune", {**train, "precision": precision})
        for precision in ("fp32", "tf32")
    }
    states = {}
    for precision, run in runs.items():
        asked.clear()
        (job,) = run.stages(0)
        states[precision] = run.artifact(job).read("task.safetensors")
        assert asked[-1] == torch.backends.cudnn.allow_tf32 == (precision == "tf32")
        run.evaluated(0)
        assert not torch.backends.cudnn.allow_tf32
        assert not torch.backends.cuda.matmul.allow_tf32
    assert states["fp32"] == states["tf32"], "a CPU has no TF32"


def test_step_without_epochs_uses_fp32(lab: Any) -> None:
    """The key of such a step does not contain the precision."""
    train = {"optimizer": "adamw", "lr": 1e-2, "epochs": 1, "batch_size": 32}
    run = lab.run_of("slca", {**train, "precision": "tf32"}, scenario="class")
    trained, statistics = run.stages(0)
    run.artifact(trained)
    assert torch.backends.cudnn.allow_tf32
    run.artifact(statistics)
    assert not torch.backends.cudnn.allow_tf32
    run.evaluated(0)
