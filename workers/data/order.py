"""The order of an epoch: which sample stands at which position of which global batch.

It is a pure function of the index, the batch size, the seed and the epoch, and it is computed in
two steps. Neighbouring rows of a shard form runs, which are shuffled and dealt to C streams. Inside
a stream, the rows of a block of runs are shuffled. Position p of every global batch belongs to
stream p mod C, so that a rank reads few long ranges of bytes, and knows which.

Letters: n rows, m runs, C streams, B samples of a full global batch.
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
RUNS_PER_STREAM = 16  # at least, so that a small data set is mixed as finely as a large one
RUN_BYTES = 2 << 20  # a run is one request to a bucket
GAP_BYTES = 256 << 10  # so many bytes between two rows that nobody asked for end a run
# Runs whose rows are shuffled together: in one stream, and in all streams together. 8192 runs of
# 2 MiB are 16 GiB, which the nodes of a job share.
BLOCK_RUNS = 64
WINDOW_RUNS = 8192

Ints = NDArray[np.int64]


def num_streams(batch_size: int, repeats: int = 1) -> int:
    """Return C: of the divisors of B / 2 up to 512, the largest of those with most factors of two.

    An odd batch has one stream. With `repeats`, copies of an image are neighbours in a stream, so
    that C is at most B / 2 / repeats: a sample and its partner are then different images. More
    copies than B / 2 leave one stream, where they may be the same image.
    """
    if batch_size % 2:
        return 1
    half = batch_size // 2
    largest = max(1, min(MAX_STREAMS, half // repeats))
    divisors = [number for number in range(1, largest + 1) if half % number == 0]
    return max(divisors, key=lambda number: (number & -number, number))


def partner_positions(batch_size: int, size: int) -> Tensor:
    """(size,) on the CPU: the position in the global batch of each sample's mixing partner.

    It is half a batch away, and so in the same stream, and on the same rank where their number
    divides half the batch. A sample of a ragged last batch without such a partner, and the middle
    of an odd batch, is its own partner.
    """
    half = batch_size // 2
    positions = torch.arange(size)
    partners = torch.where(positions < half, positions + half, positions - half)
    is_alone = (partners >= size) | (positions >= 2 * half)
    return torch.where(is_alone, positions, partners)


def cut_runs(shards: NDArray[np.int32], offsets: Ints, sizes: Ints, max_rows: int) -> Ints:
    """Return the borders of the runs, (m + 1,): run j is rows [borders[j], borders[j + 1]).

    shards, offsets, sizes: (n,) of the rows in table order: where their bytes lie. A run is of one
    shard, has at most `max_rows` rows, and spans at most RUN_BYTES and the rest of its last row. It
    ends before a gap of more than GAP_BYTES.
    """
    n = len(offsets)
    if not n:
        return np.zeros(1, np.int64)
    is_first = np.ones(n, bool)
    gaps = offsets[1:] - offsets[:-1]
    is_first[1:] = gaps < 0
    gaps -= sizes[:-1]
    is_first[1:] |= gaps > GAP_BYTES
    is_first[1:] |= shards[1:] != shards[:-1]
    pieces = offsets // RUN_BYTES
    is_first[1:] |= pieces[1:] != pieces[:-1]
    firsts = np.flatnonzero(is_first)
    lengths = np.diff(firsts, append=n)
    rank_in_run = np.arange(n)
    rank_in_run -= np.repeat(firsts, lengths)
    is_first |= rank_in_run % max_rows == 0
    return np.append(np.flatnonzero(is_first), n)


class Order(Protocol):
    """The rows of each global batch of an epoch."""

    num_steps: int

    def size(self, step: int) -> int:
        """Return the number of samples of a global batch; the last one may have fewer."""

    def rows(self, step: int, positions: Ints) -> Ints:
        """Return the rows at some positions of a global batch, in the same shape."""


class TableOrder:
    """Every row once, in table order."""

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


class Deal:
    """How the rows of a table are dealt to streams in every epoch.

    borders: of the runs, see `cut_runs`. repeats: r > 1: the first ceil(k / r) rows of a stream of
    k come r times in a row, cut off after k. Difference to DeiT's sampler: copies of an image are
    in the same global batch as there (where the batch does not end between them), but on one rank,
    which decodes the image once.
    """

    def __init__(
        self,
        shards: NDArray[np.int32],
        offsets: Ints,
        sizes: Ints,
        batch_size: int,
        seed: int,
        repeats: int = 1,
    ):
        self.num_rows = len(offsets)
        self.batch_size = batch_size
        self.seed = seed
        self.repeats = repeats
        self.num_streams = num_streams(batch_size, repeats)
        max_rows = max(1, -(-self.num_rows // (RUNS_PER_STREAM * self.num_streams)))
        self.borders = cut_runs(shards, offsets, sizes, max_rows)

    @property
    def block_runs(self) -> int:
        """Runs of a stream whose rows are shuffled together, at most."""
        return min(BLOCK_RUNS, WINDOW_RUNS // self.num_streams)

    def epoch(self, epoch: int) -> EpochOrder:
        """Return the order of an epoch."""
        return EpochOrder(self, epoch)


class EpochOrder:
    """The order of one epoch. A stream is computed when one of its rows is first asked for.

    Sample i = step * B + p of the epoch is row i // C of stream i mod C.
    """

    def __init__(self, deal: Deal, epoch: int):
        self.deal = deal
        self.epoch = epoch
        self.num_rows = deal.num_rows
        self.batch_size = deal.batch_size
        self.num_steps = -(-deal.num_rows // deal.batch_size)

    def size(self, step: int) -> int:
        """See `Order.size`."""
        return min(self.batch_size, self.num_rows - step * self.batch_size)

    def rows(self, step: int, positions: Ints) -> Ints:
        """See `Order.rows`."""
        samples = step * self.batch_size + positions
        streams = samples % self.deal.num_streams
        for stream in np.unique(streams[~self._is_computed[streams]]).tolist():
            rows = self.stream(stream)
            self._grid[stream, : len(rows)] = rows
            self._is_computed[stream] = True
        return self._grid[streams, samples // self.deal.num_streams]

    def stream(self, stream: int) -> Ints:
        """Return the rows of a stream in their order."""
        count = self.num_rows // self.deal.num_streams
        extra = self.num_rows % self.deal.num_streams
        start = stream * count + min(stream, extra)
        stop = start + count + int(stream < extra)
        if start == stop:
            return np.zeros(0, np.int64)
        first = int(np.searchsorted(self._ends, start, "right"))
        last = int(np.searchsorted(self._ends, stop, "left"))
        runs = self._runs[first : last + 1]
        begins = self.deal.borders[runs]
        ends = self.deal.borders[runs + 1]
        line_start = self._ends[first] - (ends[0] - begins[0])
        begins[0] += start - line_start  # the first and the last run may belong to two streams
        ends[-1] -= self._ends[last] - stop
        rows, run_of_row = expand(begins, ends)
        shuffled = rows[self._shuffle_blocks(stream, run_of_row, len(runs))]
        repeats = self.deal.repeats
        if repeats > 1:
            distinct = -(-len(rows) // repeats)
            shuffled = np.repeat(shuffled[:distinct], repeats)[: len(rows)]
        return shuffled

    def _shuffle_blocks(self, stream: int, run_of_row: Ints, num_runs: int) -> Ints:
        """Return a permutation of a stream's rows that keeps each in its block of runs.

        Blocks have equally many runs, so that the last one is mixed as well as the others.
        """
        num_blocks = -(-num_runs // self.deal.block_runs)
        blocks = run_of_row * num_blocks // num_runs
        seed = derive_seed(self.deal.seed, "rows", self.epoch, stream)
        keys = np.random.PCG64(seed).random_raw(len(run_of_row))
        return np.lexsort((keys, blocks))

    @cached_property
    def _runs(self) -> Ints:
        """(m,) all runs, shuffled. NumPy guarantees the numbers of `random_raw` in all versions."""
        seed = derive_seed(self.deal.seed, "runs", self.epoch)
        keys = np.random.PCG64(seed).random_raw(len(self.deal.borders) - 1)
        return np.argsort(keys, kind="stable")

    @cached_property
    def _ends(self) -> Ints:
        """(m,) where each run ends in the line of all rows of the epoch."""
        lengths = np.diff(self.deal.borders)
        return np.cumsum(lengths[self._runs])

    @cached_property
    def _grid(self) -> Ints:
        """(C, rows of the longest stream); memory is used only by the streams that are computed."""
        longest = -(-self.num_rows // self.deal.num_streams)
        return np.empty((self.deal.num_streams, longest), np.int64)

    @cached_property
    def _is_computed(self) -> NDArray[np.bool_]:
        return np.zeros(self.deal.num_streams, bool)


def expand(begins: Ints, ends: Ints) -> tuple[Ints, Ints]:
    """Return the numbers of the ranges [begins[j], ends[j]) in a line, and j of each of them."""
    lengths = ends - begins
    index = np.repeat(np.arange(len(begins)), lengths)
    line_starts = np.cumsum(lengths) - lengths
    numbers = np.arange(len(index)) + (begins - line_starts)[index]
    return numbers, index
