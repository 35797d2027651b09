"""Copies from the host to the device that the host does not wait for."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

ALIGNMENT = 16  # bytes; a tensor of any type may start at such a place


def to_device(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Return host tensors of any types and shapes on the device.

    They travel as one copy, from pinned memory. On the CPU they are returned as they are.
    """
    if device.type == "cpu":
        return list(tensors)
    starts = []
    total = 0
    for tensor in tensors:
        starts.append(total)
        total += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    packed = torch.empty(total, dtype=torch.uint8)
    for tensor, start in zip(tensors, starts, strict=True):
        packed[start : start + tensor.nbytes] = tensor.contiguous().view(-1).view(torch.uint8)
    uploaded = packed.pin_memory().to(device, non_blocking=True)
    unpacked = []
    for tensor, start in zip(tensors, starts, strict=True):
        raw = uploaded[start : start + tensor.nbytes]
        unpacked.append(raw.view(tensor.dtype).view(tensor.shape))
    return unpacked
