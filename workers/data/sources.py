"""Sources of decoded pixels: a cache that is decoded once (Resident), or the shards, decoded anew
in each epoch (Streamed).

Both yield the rows of one global batch after another, with a function from positions in the batch
to their pixels. The order of rows is a pure function of (seed, epoch); it depends on no rank,
loader thread or clock.
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
# positions in the global batch (b,) -> uint8 (b, 3, side, side) on the device
Pixels = Callable[[Tensor], Tensor]
# (step, size of its global batch) -> positions whose pixels this rank will ask for
PositionsOf = Callable[[int, int], Iterable[int]]
Decoding = Future[NDArray[np.uint8]]
Steps = Iterator[tuple[NDArray[np.int64], Pixels]]


class Source(Protocol):
    """What a feed reads from."""

    def steps(self, epoch: int | None, batch: int, start: int, positions_of: PositionsOf) -> Steps:
        """Yield (rows, pixels) of each global batch of `batch` samples from step `start` on.

        Every row comes once. With `repeats` r > 1 the first ceil(n / r) rows come r times in a row,
        cut off after n. The last batch may be smaller. epoch None: every row once, in table order.
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
        seed: int,
        workers: int,
        cache: Cache | None,
        device: torch.device,
        repeats: int = 1,
    ):
        self.samples = samples
        self.side = side
        self.seed = seed
        self.workers = workers
        self.device = device
        self.repeats = repeats
        self.shape = (len(samples), side, side, 3)
        self.pixels: Any = self._mapped(cache) if cache else self._in_memory()
        if device.type != "cpu":
            free_bytes, _ = torch.get_device_module(device).mem_get_info(device)
            if 2 * self.pixels.nbytes < free_bytes:
                everything = np.arange(len(samples))
                self.pixels = torch.from_numpy(self.pixels[everything]).to(device)

    def steps(self, epoch: int | None, batch: int, start: int, positions_of: PositionsOf) -> Steps:
        """See `Source.steps`; all positions are decoded already."""
        n = len(self.samples)
        order = torch.arange(n)
        if epoch is not None:
            shuffle = torch.Generator().manual_seed(derive_seed(self.seed, "order", epoch))
            order = torch.randperm(n, generator=shuffle)
            distinct = -(-n // self.repeats)
            order = order[:distinct].repeat_interleave(self.repeats)[:n]
        for first in range(start * batch, n, batch):
            rows = order[first : first + batch]
            yield rows.numpy(), partial(self._gather, rows)

    def _gather(self, batch_rows: Tensor, positions: Tensor) -> Tensor:
        rows = batch_rows[positions]
        if isinstance(self.pixels, Tensor):
            pixels = self.pixels[rows.to(self.device)]
        else:
            # a copy, checked where it comes from a disk
            pixels = torch.from_numpy(self.pixels[rows.numpy()]).to(self.device)
        return pixels.permute(0, 3, 1, 2).contiguous()  # (b, 3, side, side)

    def _decoded(self) -> Iterator[NDArray[np.uint8]]:
        """Yield every row's pixels in table order; threads decode some rows ahead."""
        threads = max(1, self.workers)
        with ThreadPoolExecutor(threads) as pool:
            futures = (pool.submit(self._decode, row) for row in range(len(self.samples)))
            for future in _prefetched(futures, 4 * threads):
                yield future.result()

    def _decode(self, row: int) -> NDArray[np.uint8]:
        shards = self.samples.shards[self.samples.table["data"][row].as_py()]
        return decode(self.samples.bytes_of(row), self.side, shards.max_pixels)

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
        file = cache.open_file(name, header.tell() + Blocks.size(self.shape), write)
        return Blocks(cache, file, header.tell(), self.shape, self._decode)


class Streamed:
    """Shards that WebDataset reads from end to end in each epoch, with an explicit seed.

    Every rank reads all bytes, which is cheap, and decodes its own images only, which is not.
    Shards are shuffled, data sets are mixed in proportion to what is left of each, and records are
    shuffled in a window.
    """

    def __init__(
        self,
        samples: SampleTable,
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
        self.samples = samples
        self.side = side
        self.seed = seed
        self.workers = workers
        self.device = device
        self.repeats = repeats
        # Per data set: key -> rows. One record serves several rows where two tasks share a class.
        self.rows_of: list[dict[str, list[int]]] = [{} for _ in samples.shards]
        # Per data set: shards that hold any of the rows, in order.
        self.names: list[dict[str, None]] = [{} for _ in samples.shards]
        columns = (samples.table[name].to_pylist() for name in ("data", "key", "shard"))
        for row, (data, key, shard) in enumerate(zip(*columns, strict=True)):
            self.rows_of[data].setdefault(key, []).append(row)
            self.names[data][shard] = None

    def steps(self, epoch: int | None, batch: int, start: int, positions_of: PositionsOf) -> Steps:
        """See `Source.steps`; positions that `positions_of` does not name are not decoded."""

        def submitted() -> Iterator[tuple[NDArray[np.int64], dict[int, Decoding]]]:
            records = self._repeated_records(epoch)
            step = -1
            while batch_records := list(islice(records, batch)):
                step += 1
                if step < start:
                    continue
                decoding: dict[int, Decoding] = {}  # copies of an image are decoded once
                for position in positions_of(step, len(batch_records)):
                    row, data = batch_records[position]
                    if row not in decoding:
                        decoding[row] = pool.submit(self._decode, row, data)
                yield np.array([row for row, _ in batch_records]), decoding

        with ThreadPoolExecutor(max(1, self.workers)) as pool:
            for rows, decoding in _prefetched(submitted(), AHEAD):
                yield rows, partial(self._stack, rows, decoding)

    def _stack(
        self, rows: NDArray[np.int64], decoding: dict[int, Decoding], positions: Tensor
    ) -> Tensor:
        images = [decoding[row].result() for row in rows[positions.numpy()].tolist()]
        pixels = torch.from_numpy(np.stack(images)).to(self.device)  # (b, side, side, 3)
        return pixels.permute(0, 3, 1, 2).contiguous()

    def _decode(self, row: int, data: bytes) -> NDArray[np.uint8]:
        table = self.samples.table
        shards = self.samples.shards[table["data"][row].as_py()]
        shards.verify(table["key"][row].as_py(), data, table["sha256"][row].as_py())
        return decode(data, self.side, shards.max_pixels)

    def _repeated_records(self, epoch: int | None) -> Iterator[tuple[int, bytes]]:
        """(row, image bytes), as often as `Source.steps` says."""
        records = self._records(epoch)
        if epoch is None or self.repeats == 1:
            return records
        copies = (repeat(record, self.repeats) for record in records)
        return islice(chain.from_iterable(copies), len(self.samples))

    def _records(self, epoch: int | None) -> Iterator[tuple[int, bytes]]:
        """(row, image bytes) of every row once."""
        if epoch is None:
            for data in range(len(self.samples.shards)):
                yield from self._data_set(data, None)
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
        streams = [self._data_set(data, epoch) for data in range(len(left))]
        choose = random.Random(derive_seed(self.seed, "mix", epoch))
        while any(left):
            data = choose.choices(range(len(left)), left)[0]
            left[data] -= 1
            yield next(streams[data])

    def _data_set(self, data: int, epoch: int | None) -> Iterator[tuple[int, bytes]]:
        """(row, image bytes) of one data set.

        The index is the authority: records that it lacks are skipped. Raise `DamagedArtifact` when
        the shards lack a record that it has.
        """
        shards = self.samples.shards[data]
        rows_of = self.rows_of[data]
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


def _prefetched(items: Iterator[T], depth: int) -> Iterator[T]:
    """Yield the same items, each taken from `items` before it is needed, `depth` items ahead."""
    waiting = deque(islice(items, depth))
    while waiting:
        waiting.extend(islice(items, 1))
        yield waiting.popleft()
