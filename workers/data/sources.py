"""Where decoded pixels come from: a cache that is decoded once (Resident), or the shards anew each
epoch (Streamed).

Both give the same thing, `steps`: batch after batch, the rows that it consists of and a function
from positions in the batch to their pixels. The order of rows is a pure function of (seed, epoch):
no rank, worker or clock has a part in it.
"""

from __future__ import annotations

import hashlib
import io
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import chain, islice, repeat
from typing import Any, BinaryIO, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workers.data.cache import Blocks, Cache
from workers.data.rows import SampleTable
from workers.data.shards import decode
from workers.errors import DamagedArtifact, require_package
from workers.rng import derive_seed

# records among which a streamed epoch is shuffled; undecoded, so about 0.5 GB of ImageNet per rank
WINDOW = 4096
AHEAD = 2  # steps that a streamed epoch decodes before they are asked for
# raise it when `decode` gives other pixels: older caches are then not used, and results are made
# anew
DECODING = 1

T = TypeVar("T")
Pixels = Callable[
    [Tensor], Tensor
]  # positions in the global batch (b,) -> uint8 (b, 3, side, side) on the device
Wanted = Callable[
    [int, int], Iterable[int]
]  # (step, size of its global batch) -> positions that this rank will ask for
Decoding = Future[NDArray[np.uint8]]
Steps = Iterator[tuple[NDArray[np.int64], Pixels]]


class Source(Protocol):
    def steps(self, epoch: int | None, batch: int, start: int, wanted: Wanted) -> Steps:
        """From step `start` on: the rows of each global batch, and their pixels. Every row comes
        once, or the first rows come `repeats` times, until there are as many; the last batch is
        ragged. epoch None: every row once, in table order."""


class Resident:
    """All pixels decoded once to uint8 (n, side, side, 3): on the GPU where there is one with room,
    else a memory map that the ranks of a node share, else (no `cache` folder) plain memory."""

    def __init__(
        self,
        rows: SampleTable,
        side: int,
        seed: int,
        workers: int,
        cache: Cache | None,
        device: torch.device,
        repeats: int = 1,
    ):
        self.rows, self.side, self.seed, self.workers, self.device, self.repeats = (
            rows,
            side,
            seed,
            workers,
            device,
            repeats,
        )
        self.shape = (len(rows), side, side, 3)
        self.pixels: Any = self._mapped(cache) if cache else self._in_memory()
        if (
            device.type != "cpu"
            and 2 * self.pixels.nbytes < torch.get_device_module(device).mem_get_info(device)[0]
        ):
            self.pixels = torch.from_numpy(self.pixels[np.arange(len(rows))]).to(device)

    def steps(self, epoch: int | None, batch: int, start: int, wanted: Wanted) -> Steps:
        n = len(self.rows)
        order = torch.arange(n)
        if epoch is not None:
            order = torch.randperm(
                n, generator=torch.Generator().manual_seed(derive_seed(self.seed, "order", epoch))
            )
            order = order[: -(-n // self.repeats)].repeat_interleave(self.repeats)[:n]
        for first in range(start * batch, n, batch):
            rows = order[first : first + batch]
            yield rows.numpy(), partial(self._gather, rows)

    def _gather(self, batch: Tensor, positions: Tensor) -> Tensor:
        rows = batch[positions]
        if isinstance(self.pixels, Tensor):
            found = self.pixels[rows.to(self.device)]
        else:
            # a copy, checked where it comes from a disk
            found = torch.from_numpy(self.pixels[rows.numpy()]).to(self.device)
        return found.permute(0, 3, 1, 2).contiguous()

    def _decoded(self) -> Iterator[NDArray[np.uint8]]:
        """Every row's pixels in table order, decoded by threads that run a bounded way ahead."""
        with ThreadPoolExecutor(max(1, self.workers)) as pool:
            futures = (pool.submit(self._decode, row) for row in range(len(self.rows)))
            yield from (future.result() for future in _ahead(futures, 4 * max(1, self.workers)))

    def _decode(self, row: int) -> NDArray[np.uint8]:
        shards = self.rows.shards[self.rows.table["data"][row].as_py()]
        return decode(self.rows.bytes_of(row), self.side, shards.max_pixels)

    def _in_memory(self) -> NDArray[np.uint8]:
        pixels = np.empty(self.shape, np.uint8)
        for row, decoded in enumerate(self._decoded()):
            pixels[row] = decoded
        return pixels

    def _mapped(self, cache: Cache) -> Blocks:
        """The file `<cache>/<hash of rows and side>.npy`, written first where it is not there
        yet."""
        what = f"{DECODING}|{self.rows.digest()}|{self.side}|digests"
        name = hashlib.sha256(what.encode()).hexdigest()[:32] + ".npy"
        header = io.BytesIO()
        np.lib.format.write_array_header_1_0(
            header, {"descr": "|u1", "fortran_order": False, "shape": self.shape}
        )

        def write(stream: BinaryIO) -> None:
            stream.write(header.getvalue())
            Blocks.write(stream, self._decoded())

        # in use for as long as this source is
        file = cache.open_file(name, header.tell() + Blocks.size(self.shape), write)
        return Blocks(cache, file, header.tell(), self.shape, self._decode)


class Streamed:
    """Shards read from end to end each epoch through WebDataset, by a pipeline built anew with an
    explicit seed.

    Every rank reads all bytes, which is cheap, and decodes its own images only, which is not.
    Shards are shuffled, data sets mixed in proportion to what is left of each, records shuffled in
    a window.
    """

    def __init__(
        self,
        rows: SampleTable,
        side: int,
        seed: int,
        workers: int,
        device: torch.device,
        repeats: int = 1,
    ):
        require_package(
            "webdataset",
            "a task whose decoded images exceed data.resident_mb",
            "raise data.resident_mb",
        )
        self.rows, self.side, self.seed, self.workers, self.device, self.repeats = (
            rows,
            side,
            seed,
            workers,
            device,
            repeats,
        )
        # One record serves several rows where two tasks share a class.
        self.rows_of: list[dict[str, list[int]]] = [{} for _ in rows.shards]
        self.names: list[dict[str, None]] = [
            {} for _ in rows.shards
        ]  # shards that hold any of the rows, in order
        columns = (rows.table[name].to_pylist() for name in ("data", "key", "shard"))
        for row, (data, key, shard) in enumerate(zip(*columns, strict=True)):
            self.rows_of[data].setdefault(key, []).append(row)
            self.names[data][shard] = None

    def steps(self, epoch: int | None, batch: int, start: int, wanted: Wanted) -> Steps:
        def submitted() -> Iterator[tuple[NDArray[np.int64], dict[int, Decoding]]]:
            records: Iterator[tuple[int, bytes]] = self._records(epoch)
            if epoch is not None and self.repeats > 1:
                records = islice(
                    chain.from_iterable(repeat(record, self.repeats) for record in records),
                    len(self.rows),
                )
            for step, group in enumerate(iter(lambda: list(islice(records, batch)), [])):
                if step >= start:
                    # copies of an image are decoded once
                    mine = dict(group[position] for position in wanted(step, len(group)))
                    yield (
                        np.array([row for row, _ in group]),
                        {row: pool.submit(self._decode, row, data) for row, data in mine.items()},
                    )

        with ThreadPoolExecutor(max(1, self.workers)) as pool:
            for rows, decoding in _ahead(submitted(), AHEAD):
                yield rows, partial(self._stack, rows, decoding)

    def _stack(
        self, rows: NDArray[np.int64], decoding: dict[int, Decoding], positions: Tensor
    ) -> Tensor:
        pixels = np.stack([decoding[row].result() for row in rows[positions.numpy()].tolist()])
        return torch.from_numpy(pixels).to(self.device).permute(0, 3, 1, 2).contiguous()

    def _decode(self, row: int, data: bytes) -> NDArray[np.uint8]:
        table = self.rows.table
        shards = self.rows.shards[table["data"][row].as_py()]
        shards.verify(table["key"][row].as_py(), data, table["sha256"][row].as_py())
        return decode(data, self.side, shards.max_pixels)

    def _records(self, epoch: int | None) -> Iterator[tuple[int, bytes]]:
        """(row, image bytes) of every row once."""
        if epoch is None:
            for data in range(len(self.rows.shards)):
                yield from self._of(data, None)
            return
        import webdataset as wds

        yield from wds.DataPipeline(
            partial(self._mixed, epoch),
            wds.detshuffle(
                bufsize=WINDOW,
                initial=WINDOW,
                seed=derive_seed(self.seed, "window", epoch),
                epoch=-1,
            ),
        )

    def _mixed(self, epoch: int) -> Iterator[tuple[int, bytes]]:
        left = [sum(map(len, rows_of.values())) for rows_of in self.rows_of]
        streams = [self._of(data, epoch) for data in range(len(left))]
        choose = random.Random(derive_seed(self.seed, "mix", epoch))
        while any(left):
            data = choose.choices(range(len(left)), left)[0]
            left[data] -= 1
            yield next(streams[data])

    def _of(self, data: int, epoch: int | None) -> Iterator[tuple[int, bytes]]:
        """The rows of one data set. The index is the authority: what it lacks is skipped, and all
        that it has must come."""
        shards, rows_of = self.rows.shards[data], self.rows_of[data]
        missing = sum(map(len, rows_of.values()))
        seed = None if epoch is None else derive_seed(self.seed, "shards", data, epoch)
        for key, image in shards.stream([*self.names[data]], seed):
            for row in rows_of.get(key, ()):
                missing -= 1
                yield row, image
        if missing:
            raise DamagedArtifact(
                shards.key,
                f"the shards in {shards.uri('')} lack {missing} of the images in their index; "
                "run the same command again to ingest anew",
            )


def _ahead(items: Iterator[T], depth: int) -> Iterator[T]:
    """The same items, each taken `depth` items before it is given."""
    waiting = deque(islice(items, depth))
    while waiting:
        waiting.extend(islice(items, 1))
        yield waiting.popleft()
