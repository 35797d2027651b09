"""The memory of a GPU, of which a process may have a part."""

from __future__ import annotations

import torch


def limit_memory(device: torch.device, gpus: float) -> None:
    """Let this process allocate its part of a GPU's memory and no more.

    gpus: that the process takes, where it is less than one: the part. More than that raises
    torch's OutOfMemoryError here, and in no other process that shares the GPU.
    """
    if device.type == "cuda":
        torch.cuda.set_per_process_memory_fraction(min(1.0, gpus), device)


def free_bytes(device: torch.device) -> int:
    """Return how many bytes this process may still allocate on a device that is no CPU."""
    free, total = torch.get_device_module(device).mem_get_info(device)
    if device.type == "cuda":
        allowed = torch.cuda.get_per_process_memory_fraction(device) * total
        free = min(free, allowed - torch.cuda.memory_reserved(device))
    return max(0, int(free))
