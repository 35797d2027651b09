"""Reusable memory for decoded pixels. New memory pages cost as much time as writing the pixels."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

ARENA_BYTES = 64 << 20  # largest memory that an arena keeps for reuse


class Arena:
    """Memory for pixels. `take` allocates a part, `clear` frees all parts. Not thread-safe.

    Parts that do not fit into the memory are allocated separately, until `clear` enlarges it.
    """

    def __init__(self) -> None:
        self._memory = np.empty(0, np.uint8)
        self._num_used = 0

    def take(self, num_bytes: int) -> NDArray[np.uint8]:
        """Return an uninitialized array uint8 (num_bytes,), which is valid until `clear`."""
        start = self._num_used
        self._num_used += num_bytes
        if self._num_used > len(self._memory):
            return np.empty(num_bytes, np.uint8)
        return self._memory[start : self._num_used]

    def clear(self) -> None:
        """Free all parts. Enlarge the memory if it was too small, up to ARENA_BYTES."""
        if len(self._memory) < self._num_used <= ARENA_BYTES:
            self._memory = np.empty(self._num_used, np.uint8)
        self._num_used = 0
