"""Reusable memory for decoded pixels, because new pages cost as much as filling them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

ARENA_BYTES = 64 << 20  # largest size of an unused arena


class Arena:
    """Memory for pixels, given out in parts and used again as a whole; not thread-safe."""

    def __init__(self) -> None:
        self._memory = np.empty(0, np.uint8)
        self._num_used = 0

    def take(self, num_bytes: int) -> NDArray[np.uint8]:
        """Return uint8 (num_bytes,) of any values; it is overwritten after `clear`."""
        start = self._num_used
        self._num_used += num_bytes
        if self._num_used > len(self._memory):
            return np.empty(num_bytes, np.uint8)
        return self._memory[start : self._num_used]

    def clear(self) -> None:
        """Make all memory available again, and enlarge it if it was too small."""
        if len(self._memory) < self._num_used <= ARENA_BYTES:
            self._memory = np.empty(self._num_used, np.uint8)
        self._num_used = 0
