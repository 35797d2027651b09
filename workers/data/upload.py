"""Asynchronous copies from the host to the device, and a second stream on which they run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from workers.data.accelerator import functions, is_accelerator

T = TypeVar("T")
ALIGNMENT = 16  # bytes; a tensor of any dtype can start at a multiple of this


def to_device(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Copy host tensors of any dtype and shape to the device, in one transfer from pinned memory.

    If the device is the CPU, the tensors are returned unchanged.
    """
    if not is_accelerator(device):
        return list(tensors)
    if len(tensors) == 1:
        return [tensors[0].pin_memory().to(device, non_blocking=True)]
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


class Pending(NamedTuple, Generic[T]):
    """Result of `SideStream.run`, and the event after its last kernel (None on the CPU)."""

    result: T
    event: Any


class SideStream:
    """A second stream of a GPU, on which several threads copy and compute during training.

    A CPU has no streams, so everything runs inline.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.stream = functions().Stream(device) if is_accelerator(device) else None

    def run(self, make: Callable[[], T]) -> Pending[T]:
        """Call `make` with its kernels on the side stream."""
        if self.stream is None:
            return Pending(make(), None)
        with functions().stream(self.stream):
            result = make()
            return Pending(result, self.stream.record_event())

    def fork(self) -> None:
        """Make the side stream wait for the kernels launched on the caller's stream so far."""
        if self.stream is not None:
            self.stream.wait_stream(functions().current_stream(self.device))

    def join(self) -> None:
        """Make the caller's stream wait for the kernels launched on the side stream so far."""
        if self.stream is not None:
            functions().current_stream(self.device).wait_stream(self.stream)

    def hand_over(self, event: Any, tensors: Iterable[Tensor]) -> None:
        """Let the caller's stream use tensors of the side stream, after `event`.

        The allocator does not reuse their memory before the caller's stream has used them.
        """
        if event is None:
            return
        stream = functions().current_stream(self.device)
        stream.wait_event(event)
        for tensor in tensors:
            tensor.record_stream(stream)
