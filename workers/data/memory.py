"""Reusable host tensors, and the parts in which a CPU computes a batch."""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

MAX_FREE = 4  # tensors that a pool holds while nobody uses them
PART_VALUES = 1 << 18  # values of a batch that a CPU computes at once, so that they fit its cache


def split_parts(batch: Tensor, start: int, stop: int) -> Iterator[slice]:
    """Yield the rows from start to stop of a batch (b, ...) in the parts in which to compute them.

    On a CPU, a part is as large as its cache holds; elsewhere all rows are one.
    """
    step = max(1, stop - start)
    if batch.device.type == "cpu":
        step = max(1, PART_VALUES // math.prod(batch.shape[1:]))
    for first in range(start, stop, step):
        yield slice(first, min(first + step, stop))


class TensorPool:
    """Host tensors of about the same size with reusable memory; thread-safe.

    The memory is used again when nothing refers to the tensor any more.
    """

    def __init__(self) -> None:
        self._free: deque[NDArray[np.uint8]] = deque(maxlen=MAX_FREE)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a tensor of any values."""
        num_bytes = math.prod(shape) * dtype.itemsize
        memory = self._take(num_bytes)
        # The tensor and everything derived from it, for example by autograd, hold this array.
        part = memory[:num_bytes]
        weakref.finalize(part, self._free.append, memory).atexit = False
        return torch.from_numpy(part).view(dtype).view(*shape)

    def _take(self, num_bytes: int) -> NDArray[np.uint8]:
        while True:
            try:
                memory = self._free.pop()
            except IndexError:
                # by PyTorch, which aligns it as its kernels like it
                aligned: NDArray[np.uint8] = torch.empty(num_bytes, dtype=torch.uint8).numpy()
                return aligned
            if len(memory) >= num_bytes:
                return memory
