"""The order of an epoch: the sample at each position of each global batch.

The order is a pure function of the number of rows, their mean size, the batch size, the number of
repeats, the seed and the epoch. It does not depend on the location of a row's bytes.

Consecutive rows of a table form runs of equal length. The runs are shuffled and distributed to C
shuffle streams, here called streams (they have nothing to do with the stream of tasks). Within a
stream, the rows of a block of runs are shuffled. Position p of every global batch belongs to stream
p mod C. Therefore a rank reads a few long ranges of rows, and computes only the blocks it reads.

Letters: n rows, k rows in a run, m whole runs, C streams, B samples of a full global batch.
"""

from __future__ import annotations

from functools import cached_property
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workers.rng import derive_seed

MAX_STREAMS = 512
RUNS_PER_STREAM = 16  # minimum, so that a small data set is shuffled as finely as a large one
RUN_BYTES = 2 << 20  # approximate bytes of a run, which is one request to a bucket
MAX_RUNS = 1 << 22  # each needs 8 bytes of memory; the runs of a larger data set are longer
# Maximum number of runs whose rows are shuffled together: BLOCK_RUNS in one stream, WINDOW_RUNS in
# all streams. 8192 runs of 2 MiB are 16 GiB, distributed over the nodes of a job.
BLOCK_RUNS = 64
WINDOW_RUNS = 8192

Ints = NDArray[np.int64]


def num_streams(batch_size: int, repeats: int = 1) -> int:
    """Return the number of streams C for a batch size B.

    C is a divisor of B / 2, so that a sample and its mixing partner, which is B / 2 positions away,
    are in the same stream. C is at most MAX_STREAMS: of the divisors with the most factors of two,
    the largest. An odd B gives one stream.

    With `repeats` > 1, the copies of an image are consecutive in a stream. Then C is at most B / 2
    / repeats, so that a sample and its partner are different images. If `repeats` exceeds B / 2, C
    is 1, and the two can be copies of one image.
    """
    if batch_size % 2:
        return 1
    half = batch_size // 2
    largest = max(1, min(MAX_STREAMS, half // repeats))
    divisors = [number for number in range(1, largest + 1) if half % number == 0]
    return max(divisors, key=lambda number: (number & -number, number))


def find_partner_positions(batch_size: int, size: int) -> Tensor:
    """Return the position in the global batch of each sample's mixing partner.

    The partner is half a batch away. It is in the same stream, and on the same rank if the number
    of ranks divides half the batch. A sample without such a partner is its own partner: the last
    sample of an odd batch, and samples of a smaller last batch.

    Args:
        batch_size: Size of a full global batch.
        size: Size of this global batch.

    Returns:
        Positions (size,) on the CPU.
    """
    half = batch_size // 2
    positions = torch.arange(size)
    partners = torch.where(positions < half, positions + half, positions - half)
    is_alone = (partners >= size) | (positions >= 2 * half)
    return torch.where(is_alone, positions, partners)


class Order(Protocol):
    """The rows of each global batch of an epoch."""

    num_steps: int

    def size(self, step: int) -> int:
        """Return the number of samples of a global batch. The last batch can be smaller."""

    def rows(self, step: int, positions: Ints) -> Ints:
        """Return the rows at some positions of a global batch, in the same shape."""


class TableOrder:
    """Order with every row once, in table order."""

    def __init__(self, num_rows: int, batch_size: int):
        self.num_rows = num_rows
        self.batch_size = batch_size
        self.num_steps = -(-num_rows // batch_size)

    def size(self, step: int) -> int:
        """See `Order.size`."""
        return min(self.batch_size, self.num_rows - step * self.batch_size)

    def rows(self, step: int, positions: Ints) -> Ints:
        """See `Order.rows`."""
        return step * self.batch_size + positions


class DrawnOrder:
    """Order with random rows in each step, for replay from a memory.

    Each draw is uniform and without replacement. Draws and steps are independent of each other. A
    global batch contains the rows of the first draw, then the rows of the second draw, and so on.

    Args:
        num_rows: Number of rows.
        draws: Number of rows in each draw. A larger number than `num_rows` is reduced to it.
        num_steps: Number of steps of the epoch.
        seed: Seed of the feed.
        epoch: The epoch.
    """

    def __init__(
        self, num_rows: int, draws: tuple[int, ...], num_steps: int, seed: int, epoch: int
    ):
        self.num_rows = num_rows
        self.draws = tuple(min(count, num_rows) for count in draws)
        self.num_steps = num_steps
        self.seed = seed
        self.epoch = epoch

    def size(self, step: int) -> int:
        """See `Order.size`."""
        return sum(self.draws)

    def rows(self, step: int, positions: Ints) -> Ints:
        """See `Order.rows`."""
        parts = []
        for index, count in enumerate(self.draws):
            words = draw(derive_seed(self.seed, "replay", self.epoch, step, index), self.num_rows)
            # The rows with the `count` smallest words, then sorted, because `argpartition` leaves
            # their order undefined.
            chosen = np.argpartition(words, count - 1)[:count]
            parts.append(chosen[np.lexsort((chosen, words[chosen]))])
        rows: Ints = np.concatenate(parts)[positions]
        return rows


class Deal:
    """The parameters by which the rows of a table are distributed to streams in every epoch.

    Args:
        num_rows: Number of rows n.
        num_bytes: Bytes of all rows together.
        batch_size: Size of a full global batch B.
        seed: Seed of the feed.
        repeats: Number r of consecutive copies of an image. With r > 1, a stream of l samples has
            only its first ceil(l / r) rows, each r times, cut off after l samples. As with DeiT's
            sampler, copies of an image are in the same global batch, unless the batch ends between
            them. Unlike with DeiT's sampler, they are on one rank, which decodes the image once, if
            the number of ranks divides the number of streams.
    """

    def __init__(self, num_rows: int, num_bytes: int, batch_size: int, seed: int, repeats: int = 1):
        self.num_rows = num_rows
        self.batch_size = batch_size
        self.seed = seed
        self.repeats = repeats
        self.num_streams = num_streams(batch_size, repeats)
        # largest number of rows at which a stream has RUNS_PER_STREAM runs
        most = max(1, -(-num_rows // (RUNS_PER_STREAM * self.num_streams)))
        of_bytes = max(1, RUN_BYTES * num_rows // max(1, num_bytes))  # rows in RUN_BYTES
        self.rows_per_run = max(min(most, of_bytes), -(-num_rows // MAX_RUNS))  # k

    @property
    def block_runs(self) -> int:
        """Maximum number of runs of a stream whose rows are shuffled together."""
        return min(BLOCK_RUNS, WINDOW_RUNS // self.num_streams)

    def epoch(self, epoch: int) -> EpochOrder:
        """Return the order of an epoch."""
        return EpochOrder(self, epoch)


class EpochOrder:
    """The order of one epoch. A block of a stream is computed when a row of the block is requested.

    Sample i = step * B + p of the epoch is sample i // C of stream i mod C.
    """

    def __init__(self, deal: Deal, epoch: int):
        self.deal = deal
        self.epoch = epoch
        self.num_rows = deal.num_rows
        self.batch_size = deal.batch_size
        self.num_steps = -(-deal.num_rows // deal.batch_size)
        # Start of each stream in the sequence of all rows of the epoch, and its length.
        streams = np.arange(deal.num_streams)
        count, num_longer = divmod(deal.num_rows, deal.num_streams)
        self.starts = streams * count + np.minimum(streams, num_longer)
        self.lengths = count + (streams < num_longer)
        # A step has B / C samples of a stream. They are in at most two blocks, which `_rows` keeps:
        # if a stream has several blocks, each has more than block_rows / 2 >= B / C rows.
        per_step = -(-deal.batch_size // deal.num_streams)
        block_rows = max(deal.block_runs * deal.rows_per_run, 2 * per_step)
        self.num_blocks = np.maximum(1, -(-self.lengths // block_rows))

    def size(self, step: int) -> int:
        """See `Order.size`."""
        return min(self.batch_size, self.num_rows - step * self.batch_size)

    def rows(self, step: int, positions: Ints) -> Ints:
        """See `Order.rows`."""
        samples = step * self.batch_size + positions
        streams = samples % self.deal.num_streams
        places = samples // self.deal.num_streams // self.deal.repeats  # in the stream
        # the inverse of `_block_start`
        blocks = ((places + 1) * self.num_blocks[streams] - 1) // self.lengths[streams]
        slots = blocks % 2
        is_missing = self._held[streams, slots] != blocks
        missing = set(zip(streams[is_missing].tolist(), blocks[is_missing].tolist(), strict=True))
        for stream, block in missing:
            rows = self.block(stream, block)
            self._rows[stream, block % 2, : len(rows)] = rows
            self._held[stream, block % 2] = block
        asked: Ints = self._rows[streams, slots, places - self._block_start(streams, blocks)]
        return asked

    def block(self, stream: int, block: int) -> Ints:
        """Return the rows of a block of a stream, shuffled."""
        start, stop = self._block_start(np.int64(stream), np.array([block, block + 1])).tolist()
        line: Ints = self.starts[stream] + np.arange(start, stop)
        seed = derive_seed(self.deal.seed, "rows", self.epoch, stream, block)
        return self._rows_in_line(line)[np.argsort(draw(seed, len(line)), kind="stable")]

    def _block_start(self, streams: Ints | np.int64, blocks: Ints) -> Ints:
        """Return the starts of blocks in their streams. Blocks divide a stream into equal parts."""
        starts: Ints = blocks * self.lengths[streams] // self.num_blocks[streams]
        return starts

    def _rows_in_line(self, places: Ints) -> Ints:
        """Return the rows at some places in the sequence of all runs of the epoch.

        The rows after the last whole run form a shorter run. It is inserted before whole run number
        `_short_run` of the sequence.
        """
        size = self.deal.rows_per_run
        num_short = self.num_rows % size
        start = self._short_run * size  # place of the short run
        behind = places - num_short * (places >= start)
        is_short = (places >= start) & (places < start + num_short)
        runs = self._runs[np.where(is_short, 0, behind // size)]
        return np.where(
            is_short, self.num_rows - num_short + places - start, runs * size + behind % size
        )

    @cached_property
    def _runs(self) -> Ints:
        """Indices of the whole runs, shuffled, (m,). Without a whole run, (1,)."""
        seed = derive_seed(self.deal.seed, "runs", self.epoch)
        num_runs = max(1, self.num_rows // self.deal.rows_per_run)
        return np.argsort(draw(seed, num_runs), kind="stable")

    @cached_property
    def _short_run(self) -> int:
        seed = derive_seed(self.deal.seed, "short", self.epoch)
        return int(draw(seed, 1)[0]) % (self.num_rows // self.deal.rows_per_run + 1)

    @cached_property
    def _rows(self) -> Ints:
        """Rows of the two most recent blocks of each stream, (C, 2, rows of the longest block).

        Only requested streams use physical memory, because the array is uninitialized.
        """
        longest = int((-(-self.lengths // self.num_blocks)).max())
        return np.empty((self.deal.num_streams, 2, longest), np.int64)

    @cached_property
    def _held(self) -> Ints:
        """Numbers of the blocks that `_rows` contains, (C, 2). -1: none."""
        return np.full((self.deal.num_streams, 2), -1, np.int64)


def draw(seed: int, count: int) -> NDArray[np.uint64]:
    """Draw (count,) random words. NumPy guarantees the same `random_raw` in all versions."""
    words: NDArray[np.uint64] = np.random.PCG64(seed).random_raw(count)
    return words
