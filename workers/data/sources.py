"""Sources of decoded pixels: a cache that is decoded once (Resident), or the shards, decoded anew
in each epoch (Streamed).

Both give the same pixels of the rows that they are asked for, and know nothing of their order.
"""

from __future__ import annotations

import hashlib
import io
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import islice
from typing import Any, BinaryIO, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workers.data.cache import Blocks, Cache
from workers.data.order import Ints
from workers.data.reader import Reader, sequential_reader
from workers.data.rows import SampleTable
from workers.data.shards import decode

AHEAD = 2  # steps that a streamed epoch decodes before they are asked for
# raise it when `decode` gives other pixels: older caches are then not used, and results are made
# anew
DECODING = 1

T = TypeVar("T")
Decoding = Future[NDArray[np.uint8]]
# rows (b,) -> uint8 (b, 3, side, side) on the device
Pixels = Callable[[Ints], Tensor]


class Source(Protocol):
    """What a feed reads from."""

    def steps(self, rows_of_steps: Iterator[Ints]) -> Iterator[Pixels]:
        """Yield, for each step, the function that gives the pixels of its rows.

        rows_of_steps: the rows whose pixels will be asked for in each step, which is read ahead.
        """


class Resident:
    """All pixels, decoded once to uint8 (n, side, side, 3).

    They lie in device memory where it has room for twice as many, else in a memory map that the
    ranks of a node share, or in plain memory where there is no `cache`.
    """

    def __init__(
        self,
        samples: SampleTable,
        side: int,
        workers: int,
        cache: Cache | None,
        device: torch.device,
    ):
        self.samples = samples
        self.side = side
        self.workers = workers
        self.cache = cache
        self.device = device
        self.shape = (len(samples), side, side, 3)
        self.pixels: Any = self._mapped(cache) if cache else self._in_memory()
        if device.type != "cpu":
            free_bytes, _ = torch.get_device_module(device).mem_get_info(device)
            if 2 * self.pixels.nbytes < free_bytes:
                everything = np.arange(len(samples))
                self.pixels = torch.from_numpy(self.pixels[everything]).to(device)

    def steps(self, rows_of_steps: Iterator[Ints]) -> Iterator[Pixels]:
        """See `Source.steps`; all rows are decoded already."""
        for _ in rows_of_steps:
            yield self._gather

    def _gather(self, rows: Ints) -> Tensor:
        if isinstance(self.pixels, Tensor):
            pixels = self.pixels[torch.from_numpy(rows).to(self.device)]
        else:
            # a copy, checked where it comes from a disk
            pixels = torch.from_numpy(self.pixels[rows]).to(self.device)
        return pixels.permute(0, 3, 1, 2).contiguous()  # (b, 3, side, side)

    def _decoded(self) -> Iterator[NDArray[np.uint8]]:
        """Yield every row's pixels in table order; threads decode some rows ahead."""
        reader = sequential_reader(self.samples, self.cache)
        threads = max(1, self.workers)

        def submitted() -> Iterator[Decoding]:
            every_row = np.arange(len(self.samples)).reshape(-1, 1)
            for (row,) in reader.ahead(iter(every_row)):
                yield pool.submit(decode_row, self.samples, reader, int(row), self.side)

        pool = ThreadPoolExecutor(threads)
        try:
            for future in _prefetched(submitted(), 4 * threads):
                yield future.result()
        finally:
            _abandon(pool)
            reader.close()

    def _decode(self, row: int) -> NDArray[np.uint8]:
        """Decode one row again, from where it is stored."""
        return decode(self.samples.bytes_of(row), self.side, self.samples.max_pixels(row))

    def _in_memory(self) -> NDArray[np.uint8]:
        pixels = np.empty(self.shape, np.uint8)
        for row, decoded in enumerate(self._decoded()):
            pixels[row] = decoded
        return pixels

    def _mapped(self, cache: Cache) -> Blocks:
        """The file `<cache>/<hash of samples and side>.npy`, which is written first if missing."""
        contents = f"{DECODING}|{self.samples.digest()}|{self.side}|digests"
        name = hashlib.sha256(contents.encode()).hexdigest()[:32] + ".npy"
        header = io.BytesIO()
        np.lib.format.write_array_header_1_0(
            header, {"descr": "|u1", "fortran_order": False, "shape": self.shape}
        )

        def write(stream: BinaryIO) -> None:
            stream.write(header.getvalue())
            Blocks.write(stream, self._decoded())

        # in use for as long as this source is
        size = header.tell() + Blocks.size(self.shape)
        remedy = "lower data.resident_mb so that images are not kept decoded"
        file = cache.open_file(name, size, write, remedy)
        return Blocks(cache, file, header.tell(), self.shape, self._decode)


class Streamed:
    """Shards, of which every rank reads and decodes what it needs, anew in each epoch."""

    def __init__(
        self, samples: SampleTable, side: int, workers: int, reader: Reader, device: torch.device
    ):
        self.samples = samples
        self.side = side
        self.workers = workers
        self.reader = reader
        self.device = device

    def steps(self, rows_of_steps: Iterator[Ints]) -> Iterator[Pixels]:
        """See `Source.steps`; other rows than those are not decoded."""

        steps = self.reader.ahead(rows_of_steps)

        def submitted() -> Iterator[dict[int, Decoding]]:
            for rows in steps:
                decoding: dict[int, Decoding] = {}  # copies of an image are decoded once
                for row in rows.tolist():
                    if row not in decoding:
                        decoding[row] = pool.submit(self._decode, row)
                yield decoding

        pool = ThreadPoolExecutor(max(1, self.workers))
        try:
            for decoding in _prefetched(submitted(), AHEAD):
                yield partial(self._stack, decoding)
        finally:
            _abandon(pool)
            steps.close()

    def _stack(self, decoding: dict[int, Decoding], rows: Ints) -> Tensor:
        images = [decoding[row].result() for row in rows.tolist()]
        pixels = torch.from_numpy(np.stack(images)).to(self.device)  # (b, side, side, 3)
        return pixels.permute(0, 3, 1, 2).contiguous()

    def _decode(self, row: int) -> NDArray[np.uint8]:
        return decode_row(self.samples, self.reader, row, self.side)


def decode_row(samples: SampleTable, reader: Reader, row: int, side: int) -> NDArray[np.uint8]:
    """Return the pixels of a row, uint8 (side, side, 3)."""
    return decode(reader.read(row), side, samples.max_pixels(row))


def _abandon(pool: ThreadPoolExecutor) -> None:
    """Start nothing more in a pool, and do not wait: a storage that is away would delay it."""
    pool.shutdown(wait=False, cancel_futures=True)


def _prefetched(items: Iterator[T], depth: int) -> Iterator[T]:
    """Yield the same items, each taken from `items` before it is needed, `depth` items ahead."""
    waiting = deque(islice(items, depth))
    while waiting:
        waiting.extend(islice(items, 1))
        yield waiting.popleft()
