"""Reusable host tensors, and the division of a batch into parts that fit into the CPU cache."""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

MAX_FREE = 4  # maximum number of unused memory blocks that a pool keeps
PART_VALUES = 1 << 18  # number of values that a CPU processes at once, so that they fit its cache


def split_parts(batch: Tensor, start: int, stop: int) -> Iterator[slice]:
    """Yield slices that divide the rows `start` to `stop` of a batch (b, ...) into parts.

    On a CPU, a part fits into its cache. On other devices, all rows are one part.
    """
    step = max(1, stop - start)
    if batch.device.type == "cpu":
        step = max(1, PART_VALUES // math.prod(batch.shape[1:]))
    for first in range(start, stop, step):
        yield slice(first, min(first + step, stop))


class TensorPool:
    """Pool of reusable memory for host tensors of similar sizes. Thread-safe.

    The memory is reused after the tensor, and all that shares its memory, is deleted.
    """

    def __init__(self) -> None:
        self._free: deque[NDArray[np.uint8]] = deque(maxlen=MAX_FREE)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return an uninitialized tensor."""
        num_bytes = math.prod(shape) * dtype.itemsize
        memory = self._take(num_bytes)
        # The tensor and everything derived from it, for example by autograd, hold this array.
        part = memory[:num_bytes]
        weakref.finalize(part, self._free.append, memory).atexit = False
        return torch.from_numpy(part).view(dtype).view(*shape)

    def _take(self, num_bytes: int) -> NDArray[np.uint8]:
        """Return memory of at least `num_bytes`. Smaller free blocks are dropped, not kept."""
        while True:
            try:
                memory = self._free.pop()
            except IndexError:
                # allocated by PyTorch, which aligns memory for its kernels
                aligned: NDArray[np.uint8] = torch.empty(num_bytes, dtype=torch.uint8).numpy()
                return aligned
            if len(memory) >= num_bytes:
                return memory
