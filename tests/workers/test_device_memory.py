"""A process that has a part of a GPU takes that part of its memory."""

from __future__ import annotations

import pytest
import torch

from workers.data.device_memory import free_bytes, limit_memory

GIB = 1 << 30


class SharedGpu:
    """The memory of a GPU of 16 GiB, of which others and this process hold some."""

    def __init__(self, free: int, reserved: int):
        self.free = free
        self.reserved = reserved
        self.fraction = 1.0

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        return self.free, 16 * GIB

    def memory_reserved(self, device: torch.device) -> int:
        return self.reserved

    def set_per_process_memory_fraction(self, fraction: float, device: torch.device) -> None:
        self.fraction = fraction

    def get_per_process_memory_fraction(self, device: torch.device) -> float:
        return self.fraction


@pytest.mark.parametrize(
    ("gpus", "free", "reserved", "allowed"),
    [
        (1, 10, 2, 10),
        (2, 10, 2, 10),
        (0.25, 10, 1, 3),
        (0.25, 2, 1, 2),  # others took more than their part
        (0.25, 10, 4, 0),
    ],
)
def test_a_part_of_a_gpu_has_that_part_of_its_memory(
    monkeypatch: pytest.MonkeyPatch, gpus: float, free: int, reserved: int, allowed: int
) -> None:
    gpu = SharedGpu(free * GIB, reserved * GIB)
    for name in dir(gpu):
        if "memory" in name or "mem_" in name:
            monkeypatch.setattr(torch.cuda, name, getattr(gpu, name))
    device = torch.device("cuda", 0)
    monkeypatch.setattr(torch, "get_device_module", lambda device: torch.cuda)
    limit_memory(device, gpus)
    assert free_bytes(device) == allowed * GIB


def test_a_cpu_has_no_such_limit() -> None:
    limit_memory(torch.device("cpu"), 0)
