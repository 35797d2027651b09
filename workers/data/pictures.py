"""Pictures: the decoded images from which samples are made, either streamed or kept decoded.

Both give the same pixels. Streamed pictures are read and decoded in every epoch. Kept pictures are
stored one after the other, each with its own height and width: in a memory-mapped file of the
cache, which the ranks of a node share, or without a cache in memory.
"""

from __future__ import annotations

import hashlib
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice, pairwise
from typing import BinaryIO, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from workers.data.arena import Arena
from workers.data.cache import CHECKSUM, Blocks, Cache, LocalFile
from workers.data.crops import View
from workers.data.decoding import DECODING, Picture, Pixels, read_picture
from workers.data.image_maker import Decode, Normalisation, ReadPicture
from workers.data.loader_process import ImageSpec
from workers.data.loaders import Loaders, OwnedBlock, get_loaders, give_back, measure_work
from workers.data.order import Ints
from workers.data.reader import Reader, make_sequential_reader
from workers.data.rows import SampleTable
from workers.data.shared_blocks import make_memory_file

CHUNK = 16  # most samples per thread job; a job's overhead equals the decoding of a small image
CHUNK_BYTES = 64 << 10  # approximate limit of the bytes of image files per job of a thread
MAX_THREADS = 2  # maximum image threads of a rank; more would wait for the interpreter lock
WAIT_S = 1.0  # seconds between two checks whether loaders have exited
ESTIMATE_ROWS = 32  # number of rows decoded to estimate the total size
ESTIMATE_THREADS = 8
DIGEST_BYTES = hashlib.sha256().digest_size
KEPT_REMEDY = "lower data.resident_mb so that images are not kept decoded"

T = TypeVar("T")


class Pictures(Protocol):
    """The pictures of a table's rows."""

    @property
    def are_kept(self) -> bool:
        """Whether all pictures are already decoded, so that `read` does not wait."""

    def ahead(self, steps: Iterator[Ints]) -> Generator[Ints]:
        """Yield the same rows; see `Reader.ahead`."""

    def read(self, rows: Ints, arena: Arena) -> Iterator[Picture]:
        """Yield the picture of each row in `rows` (k,). Consecutive equal rows are decoded once.

        A picture can be a view of `arena`, which belongs to the calling thread. It is valid until
        the next picture is requested.
        """

    def spec(self) -> ImageSpec:
        """Return the spec for loader processes, without view and normalisation (`SharedSpec`)."""

    def data_bytes(self, rows: Ints) -> int:
        """Return the bytes that `start` copies from image files to a block for some rows."""

    def start(
        self,
        loaders: Loaders,
        block: OwnedBlock,
        pixels: Tensor,
        rows: Ints,
        pool: ThreadPoolExecutor,
    ) -> list[Future[None]]:
        """Request the images of a block from loaders.

        Args:
            loaders: The loader processes.
            block: A block with k requests. This method sets their location fields.
            pixels: The pixels of the block. The returned jobs keep a reference, so that the block
                is not reused before they end.
            rows: Row of each request, (k,).
            pool: Runs the jobs that read image files.

        Returns:
            Jobs that request chunks after reading image files. All chunks are requested when the
            jobs have ended.
        """


@dataclass(frozen=True)
class StreamedPictures:
    """Pictures that are read and decoded each time they are needed."""

    samples: SampleTable
    reader: Reader
    decode: Decode
    are_kept: bool = False

    def ahead(self, steps: Iterator[Ints]) -> Generator[Ints]:
        """See `Pictures.ahead`."""
        return self.reader.ahead(steps)

    def read(self, rows: Ints, arena: Arena) -> Iterator[Picture]:
        """See `Pictures.read`."""
        last_row = -1
        for row in rows.tolist():
            if row != last_row:
                arena.clear()
                picture = self.decode(self.reader.read(row), self.samples.limits(row), arena)
                last_row = row
            yield picture

    def spec(self) -> ImageSpec:
        """See `Pictures.spec`."""
        files = self.samples.locations.files
        paths = [""] * len(files)
        if self.reader.reads_disks:
            paths = [shards.local_path(name) for shards, name in files]
        return ImageSpec(
            tuple(paths),
            tuple(shards.files[name]["bytes"] for shards, name in files),
            tuple(shards.limits for shards, _ in files),
            self.decode,
        )

    def data_bytes(self, rows: Ints) -> int:
        """See `Pictures.data_bytes`. The result is 0 for disks, which loaders read themselves."""
        if self.reader.reads_disks:
            return 0
        return int(self.samples.locations.sizes[np.unique(rows)].sum())

    def start(
        self,
        loaders: Loaders,
        block: OwnedBlock,
        pixels: Tensor,
        rows: Ints,
        pool: ThreadPoolExecutor,
    ) -> list[Future[None]]:
        """See `Pictures.start`."""
        locations = self.samples.locations
        requests = block.requests
        requests["file"] = locations.shards[rows]
        requests["size"] = locations.sizes[rows]
        requests["is_inline"] = not self.reader.reads_disks
        if self.reader.reads_disks:
            requests["offset"] = locations.offsets[rows]
            requests["digest"] = self.samples.digests(rows).view("S64")[:, 0]
            loaders.start(block, 0, len(block.borders) - 1)
            return []
        distinct, inverse = np.unique(rows, return_inverse=True)
        sizes = locations.sizes[distinct]
        requests["offset"] = (np.cumsum(sizes) - sizes)[inverse]
        borders = block.borders.tolist()
        return [
            pool.submit(self._start_chunk, loaders, block, pixels, chunk, rows[start:stop])
            for chunk, (start, stop) in enumerate(pairwise(borders))
        ]

    def _start_chunk(
        self, loaders: Loaders, block: OwnedBlock, pixels: Tensor, chunk: int, rows: Ints
    ) -> None:
        """Copy the image files of a chunk to its block and request the chunk."""
        start = int(block.borders[chunk])
        offsets = block.requests["offset"][start : start + len(rows)].tolist()
        data = block.data()
        last_row = -1
        for row, offset in zip(rows.tolist(), offsets, strict=True):
            if row != last_row:
                record = self.reader.read(row)
                data[offset : offset + len(record)] = record
                last_row = row
        loaders.start(block, chunk, chunk + 1)


class KeptPictures:
    """Pictures that are decoded once.

    Their file contains, in this order, the pixels of all rows, a checksum of each row, the sides of
    all rows and the sha256 of the sides. The sides are (n, 4) little-endian uint32: height and
    width of the pixels, and height and width of the original image.

    Args:
        samples: The n rows.
        longest_side: Limit of the long side of a picture in pixels.
        workers: Number of loader processes.
        cache: The cache with the file. None: the file is in memory.
    """

    are_kept = True

    def __init__(self, samples: SampleTable, longest_side: int, workers: int, cache: Cache | None):
        self.samples = samples
        self.decode = ReadPicture(longest_side)
        self.workers = workers
        self.cache = cache
        self._has_written = False
        self.blocks, sides = self._mapped(cache) if cache else self._in_memory()
        # (n, 5): start and sides of each picture, in one array for one look-up per picture
        self.layout = np.column_stack((self.blocks.borders[:-1], sides))

    def ahead(self, steps: Iterator[Ints]) -> Generator[Ints]:
        """See `Pictures.ahead`. Nothing is fetched, because all rows are decoded."""
        yield from steps

    def read(self, rows: Ints, arena: Arena) -> Iterator[Picture]:
        """See `Pictures.read`. Pictures from a disk are verified first."""
        self._verify(rows)
        data = self.blocks.data
        for start, pixel_height, pixel_width, height, width in self.layout[rows].tolist():
            pixels = data[start : start + 3 * pixel_height * pixel_width]
            yield Picture(pixels.reshape(pixel_height, pixel_width, 3), height, width)

    def spec(self) -> ImageSpec:
        """See `Pictures.spec`. It names the open file, not its path, which can be replaced."""
        kept = f"/proc/{os.getpid()}/fd/{self.blocks.file.fileno()}"
        return ImageSpec((), (), (), self.decode, kept)

    def data_bytes(self, rows: Ints) -> int:
        """See `Pictures.data_bytes`."""
        return 0

    def start(
        self,
        loaders: Loaders,
        block: OwnedBlock,
        pixels: Tensor,
        rows: Ints,
        pool: ThreadPoolExecutor,
    ) -> list[Future[None]]:
        """See `Pictures.start`. Pictures from a disk are verified first."""
        self._verify(rows)
        layout = self.layout[rows]
        block.requests["offset"] = layout[:, 0]
        block.requests["shape"] = layout[:, 1:]
        loaders.start(block, 0, len(block.borders) - 1)
        return []

    def _verify(self, rows: Ints) -> None:
        if not self.blocks.checked[rows].all():
            self.blocks.verify(rows)

    def _make(self, row: int) -> Pixels:
        """Decode one row again, from its image file in storage."""
        limits = self.samples.limits(row)
        return self.decode(self.samples.read_bytes(row), limits, Arena()).pixels

    def _in_memory(self) -> tuple[Blocks, NDArray[np.uint32]]:
        """Write an anonymous file in memory."""
        file = LocalFile(make_memory_file(), "r+")
        with open(file.fileno(), "r+b", closefd=False) as stream:
            self._write(stream)
        sides = read_sides(file, len(self.samples))
        assert sides is not None, "memory gives back what is written"
        blocks = Blocks(self.cache, file, 0, compute_borders(sides), self._make)
        blocks.checked[:] = True
        return blocks, sides

    def _mapped(self, cache: Cache) -> tuple[Blocks, NDArray[np.uint32]]:
        """Open the file `<cache>/<hash of samples and longest side>.pictures`.

        The file is written first if it is missing, or if the part with the sides is damaged.
        """
        contents = f"{DECODING}|{self.samples.digest()}|{self.decode.longest_side}|crc32"
        name = hashlib.sha256(contents.encode()).hexdigest()[:32] + ".pictures"
        for _ in range(2):  # if a file has damaged sides, it is deleted and written again, once
            # The file stays open as long as this object exists, so the cache does not evict it.
            file = cache.open_file(name, None, self._write, KEPT_REMEDY)
            sides = read_sides(file, len(self.samples))
            if sides is not None:
                blocks = Blocks(cache, file, 0, compute_borders(sides), self._make)
                # Do not verify data that we just wrote: the read would come from memory.
                blocks.checked[:] = self._has_written
                return blocks, sides
            file.close()
            cache.forget(name)
        raise cache.make_disk_error()

    def _write(self, stream: BinaryIO) -> None:
        sides = np.zeros((len(self.samples), 4), "<u4")

        def rows() -> Iterator[Pixels]:
            decoded = decode_rows(self.samples, self.workers, self.cache, self.decode)
            for row, picture in enumerate(decoded):
                sides[row] = *picture.pixels.shape[:2], picture.height, picture.width
                yield picture.pixels

        Blocks.write(stream, rows())
        data = sides.tobytes()
        stream.write(data + hashlib.sha256(data).digest())
        stream.flush()
        os.fsync(stream.fileno())
        self._has_written = True


def compute_borders(sides: NDArray[np.uint32]) -> Ints:
    """Return the byte offset of each picture, and the end of the last one, (n + 1,).

    Args:
        sides: Height and width of the pixels and of the original image, (n, 4).
    """
    sizes = 3 * sides[:, 0].astype(np.int64) * sides[:, 1]
    return np.append(0, np.cumsum(sizes))


def read_sides(file: LocalFile, num_rows: int) -> NDArray[np.uint32] | None:
    """Read the sides (n, 4) in a file of pictures. Return None if it is damaged or truncated."""
    num_bytes = 16 * num_rows
    start = os.fstat(file.fileno()).st_size - num_bytes - DIGEST_BYTES
    if start < 0:
        return None
    data = file.read_at(num_bytes + DIGEST_BYTES, start)
    if hashlib.sha256(data[:num_bytes]).digest() != data[num_bytes:]:
        return None
    sides = np.frombuffer(data[:num_bytes], "<u4").reshape(num_rows, 4)
    if compute_borders(sides)[-1] + num_rows * CHECKSUM.itemsize != start:
        return None
    return sides


def are_small(samples: SampleTable, longest_side: int, most_bytes: int) -> bool:
    """Return whether the pictures of all rows need at most about `most_bytes`.

    If the smallest and largest possible size do not decide this, the size is estimated from
    ESTIMATE_ROWS evenly spaced rows.
    """
    num_rows = len(samples)
    if 3 * longest_side**2 * num_rows <= most_bytes:
        return True
    if 3 * num_rows > most_bytes:
        return False
    rows = np.unique(np.linspace(0, num_rows - 1, ESTIMATE_ROWS).astype(np.int64))

    def size(row: int) -> int:
        data = samples.read_bytes(row)
        return read_picture(data, longest_side, samples.limits(row)).pixels.nbytes

    with ThreadPoolExecutor(ESTIMATE_THREADS) as pool:
        mean_bytes = sum(pool.map(size, rows.tolist())) / len(rows)
    return num_rows * mean_bytes <= most_bytes


def decode_rows(
    samples: SampleTable, workers: int, cache: Cache | None, decode: Decode
) -> Iterator[Picture]:
    """Yield the picture of every row, in table order. Loaders or threads decode rows in advance.

    A picture can be overwritten when the next picture is requested.

    Args:
        samples: The rows.
        workers: Number of loader processes.
        cache: Cache for the bytes of remote shards, if any.
        decode: Decodes an image file.
    """
    pictures = StreamedPictures(samples, make_sequential_reader(samples, cache), decode)
    mean_bytes = max(1, samples.num_bytes // len(samples))
    chunk = max(1, min(CHUNK, CHUNK_BYTES // mean_bytes))
    threads = max(1, min(workers, MAX_THREADS))
    spec = SharedSpec(pictures)

    def chunks() -> Iterator[Ints]:
        for first in range(0, len(samples), chunk):
            yield np.arange(first, min(first + chunk, len(samples)))

    def decode_chunk(rows: Ints, arena: Arena) -> list[Picture]:
        with measure_work():
            arena.clear()
            reader = pictures.reader
            return [decode(reader.read(row), samples.limits(row), arena) for row in rows.tolist()]

    def make_chunk(rows: Ints, arena: Arena) -> Callable[[], list[Picture]]:
        loaders = get_loaders(workers)
        if loaders is None:
            return pool.submit(decode_chunk, rows, arena).result
        borders = np.array([0, len(rows)])
        try:
            stored = spec.on(loaders)
            block = loaders.take(borders, decode.most_bytes, stored, pictures.data_bytes(rows))
        except OSError:  # no memory or file descriptor for a block
            return pool.submit(decode_chunk, rows, arena).result
        slots = loaders.pixels(block).view(len(rows), -1)
        block.requests["slot"] = np.arange(len(rows))
        jobs = pictures.start(loaders, block, slots, rows, pool)
        return partial(finish_chunk, rows, arena, loaders, block, slots.numpy(), jobs)

    def finish_chunk(
        rows: Ints,
        arena: Arena,
        loaders: Loaders,
        block: OwnedBlock,
        slots: NDArray[np.uint8],
        jobs: list[Future[None]],
    ) -> list[Picture]:
        for job in jobs:
            job.result()
        loaders.wait(block, threading.Event(), WAIT_S)
        if not block.requests["is_made"].all():
            decoded = decode_chunk(rows, arena)
            loaders.note_remade(len(rows))
            return decoded
        shapes = block.requests["shape"].tolist()
        return [
            Picture(slot[: 3 * height * width].reshape(height, width, 3), *sides)
            for slot, (height, width, *sides) in zip(slots, shapes, strict=True)
        ]

    def submitted() -> Iterator[Callable[[], list[Picture]]]:
        for rows, arena in zip(pictures.ahead(chunks()), cycle(arenas), strict=False):
            yield make_chunk(rows, arena)

    num_ahead = 2 * max(threads, workers)
    arenas = [Arena() for _ in range(num_ahead + 1)]  # for the chunks ahead and the one in use
    pool = ThreadPoolExecutor(threads)
    try:
        for finish in prefetched(submitted(), num_ahead):
            yield from finish()
    finally:
        abandon(pool)
        pictures.reader.close()


class SharedSpec:
    """The `ImageSpec` of a feed, which is copied to the shared memory of loaders on first use.

    Args:
        pictures: Source of the images.
        view: Size and crop of the images. None: the pictures themselves.
        normalisation: Applied to the images. None: they stay uint8.
    """

    def __init__(
        self,
        pictures: Pictures,
        view: View | None = None,
        normalisation: Normalisation | None = None,
    ):
        self.pictures = pictures
        self.view = view
        self.normalisation = normalisation
        self._stored: tuple[Loaders, OwnedBlock] | None = None

    def on(self, loaders: Loaders) -> OwnedBlock:
        """Return the block of the spec in the memory of `loaders`."""
        if self._stored is None or self._stored[0] is not loaders:
            spec = self.pictures.spec()
            block = loaders.store(spec._replace(view=self.view, normalisation=self.normalisation))
            weakref.finalize(self, give_back, block).atexit = False
            self._stored = (loaders, block)
        return self._stored[1]


def abandon(pool: ThreadPoolExecutor) -> None:
    """Cancel the jobs of a pool without waiting for running jobs, which storage can delay."""
    pool.shutdown(wait=False, cancel_futures=True)


def prefetched(items: Iterator[T], depth: int) -> Iterator[T]:
    """Yield the same items, but take each from the iterator `depth` items before it is yielded."""
    waiting = deque(islice(items, depth))
    while waiting:
        waiting.extend(islice(items, 1))
        yield waiting.popleft()
