"""Pictures: the decoded images that samples are made of, from shards each time, or kept decoded.

Both give the same pixels. Kept pictures lie one after the other, each with its own sides, in a
memory map that the ranks of a node share, or in plain memory where there is no cache.
"""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import cycle, islice
from typing import BinaryIO, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from workers.data.arena import Arena
from workers.data.cache import CHECKSUM, Blocks, Cache, LocalFile
from workers.data.decoding import DECODING, ImageLimits, Picture, Pixels, read_picture
from workers.data.order import Ints
from workers.data.reader import Reader, sequential_reader
from workers.data.rows import SampleTable

CHUNK = 16  # samples that a thread makes at once: a job costs as much as decoding a small image
CHUNK_BYTES = 64 << 10  # of images in a file that a thread decodes at once: fewer large ones
ESTIMATE_ROWS = 32  # that are decoded to tell how large all are
ESTIMATE_THREADS = 8
DIGEST_BYTES = hashlib.sha256().digest_size
KEPT_REMEDY = "lower data.resident_mb so that images are not kept decoded"

T = TypeVar("T")


class Pictures(Protocol):
    """The pictures of a table's rows."""

    @property
    def are_kept(self) -> bool:
        """Whether they are decoded already, so that nobody waits for one."""

    def ahead(self, steps: Iterator[Ints]) -> Generator[Ints]:
        """Yield the same rows; see `Reader.ahead`."""

    def read(self, rows: Ints, arena: Arena) -> Iterator[Picture]:
        """Yield the picture of each of some rows (k,); neighbours of one row are decoded once.

        A picture may lie in `arena`, one of the calling thread, until the next one is asked for.
        """


@dataclass(frozen=True)
class StreamedPictures:
    """Pictures that are read and decoded each time.

    longest_side: what longer images are reduced to; None: they are not.
    """

    samples: SampleTable
    reader: Reader
    longest_side: int | None
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
                data = self.reader.read(row)
                limits = self.samples.limits(row)
                picture = read_picture(data, self.longest_side, limits, arena)
                last_row = row
            yield picture


class KeptPictures:
    """Pictures that are decoded once.

    The file has the pixels of each row, a checksum of each, and then the sides of all: (n, 4) of
    little-endian uint32, height and width of the pixels and of the original, and their sha256.
    """

    are_kept = True

    def __init__(self, samples: SampleTable, longest_side: int, workers: int, cache: Cache | None):
        self.samples = samples
        self.longest_side = longest_side
        self.workers = workers
        self.cache = cache
        self.pictures: list[Picture] = []  # of all rows, where there is no cache
        self._has_written = False
        if cache is None:
            for picture in self._decoded():
                self.pictures.append(picture._replace(pixels=picture.pixels.copy()))
        else:
            self.blocks, sides = self._mapped(cache)
            # (n, 5): where each picture begins, and its sides; read as one, as it is for each
            self.layout = np.column_stack((self.blocks.borders[:-1], sides))

    def ahead(self, steps: Iterator[Ints]) -> Generator[Ints]:
        """See `Pictures.ahead`; all rows are decoded already."""
        yield from steps

    def read(self, rows: Ints, arena: Arena) -> Iterator[Picture]:
        """See `Pictures.read`; they are checked where they come from a disk."""
        if self.pictures:
            for row in rows.tolist():
                yield self.pictures[row]
            return
        if not self.blocks.checked[rows].all():
            self.blocks.verify(rows)
        data = self.blocks.data
        for start, pixel_height, pixel_width, height, width in self.layout[rows].tolist():
            pixels = data[start : start + 3 * pixel_height * pixel_width]
            yield Picture(pixels.reshape(pixel_height, pixel_width, 3), height, width)

    def _decoded(self) -> Iterator[Picture]:
        def read(data: bytes, limits: ImageLimits, arena: Arena) -> Picture:
            return read_picture(data, self.longest_side, limits, arena)

        return decoded_rows(self.samples, self.workers, self.cache, read)

    def _make(self, row: int) -> Pixels:
        """Decode one row again, from where it is stored."""
        data = self.samples.bytes_of(row)
        return read_picture(data, self.longest_side, self.samples.limits(row)).pixels

    def _mapped(self, cache: Cache) -> tuple[Blocks, NDArray[np.uint32]]:
        """Open the file `<cache>/<hash of samples and longest side>.pictures`; write it first where
        it is missing or damaged where the sides stand."""
        contents = f"{DECODING}|{self.samples.digest()}|{self.longest_side}|crc32"
        name = hashlib.sha256(contents.encode()).hexdigest()[:32] + ".pictures"
        for _ in range(2):
            # in use for as long as these pictures are
            file = cache.open_file(name, None, self._write, KEPT_REMEDY)
            sides = read_sides(file, len(self.samples))
            if sides is not None:
                blocks = Blocks(cache, file, 0, borders_of(sides), self._make)
                # What this process has just written it would read from memory, not from the disk.
                blocks.checked[:] = self._has_written
                return blocks, sides
            file.close()
            cache.forget(name)
        raise cache.bad_disk()

    def _write(self, stream: BinaryIO) -> None:
        sides = np.zeros((len(self.samples), 4), "<u4")

        def rows() -> Iterator[Pixels]:
            for row, picture in enumerate(self._decoded()):
                sides[row] = *picture.pixels.shape[:2], picture.height, picture.width
                yield picture.pixels

        Blocks.write(stream, rows())
        data = sides.tobytes()
        stream.write(data + hashlib.sha256(data).digest())
        stream.flush()
        os.fsync(stream.fileno())
        self._has_written = True


def borders_of(sides: NDArray[np.uint32]) -> Ints:
    """sides (n, 4) -> (n + 1,): the byte where each picture begins, and where the last one ends."""
    sizes = 3 * sides[:, 0].astype(np.int64) * sides[:, 1]
    return np.append(0, np.cumsum(sizes))


def read_sides(file: LocalFile, num_rows: int) -> NDArray[np.uint32] | None:
    """Read the sides (n, 4) at the end of a file of pictures; None where it is damaged or cut."""
    num_bytes = 16 * num_rows
    start = os.fstat(file.fileno()).st_size - num_bytes - DIGEST_BYTES
    if start < 0:
        return None
    data = file.read_at(num_bytes + DIGEST_BYTES, start)
    if hashlib.sha256(data[:num_bytes]).digest() != data[num_bytes:]:
        return None
    sides = np.frombuffer(data[:num_bytes], "<u4").reshape(num_rows, 4)
    if borders_of(sides)[-1] + num_rows * CHECKSUM.itemsize != start:
        return None
    return sides


def are_small(samples: SampleTable, longest_side: int, most_bytes: int) -> bool:
    """Whether the pictures of all rows take at most about `most_bytes`.

    It is told from ESTIMATE_ROWS of them, spread evenly, unless it is certain.
    """
    num_rows = len(samples)
    if 3 * longest_side**2 * num_rows <= most_bytes:
        return True
    if 3 * num_rows > most_bytes:
        return False
    rows = np.unique(np.linspace(0, num_rows - 1, ESTIMATE_ROWS).astype(np.int64))

    def size(row: int) -> int:
        data = samples.bytes_of(row)
        return read_picture(data, longest_side, samples.limits(row)).pixels.nbytes

    with ThreadPoolExecutor(ESTIMATE_THREADS) as pool:
        mean_bytes = sum(pool.map(size, rows.tolist())) / len(rows)
    return num_rows * mean_bytes <= most_bytes


def decoded_rows(
    samples: SampleTable,
    workers: int,
    cache: Cache | None,
    decode: Callable[[bytes, ImageLimits, Arena], T],
) -> Iterator[T]:
    """Yield every row decoded, in table order; threads decode some rows ahead.

    decode: is given the bytes of a row, the limits of its data set, and memory for the pixels,
    which is overwritten after the next row is asked for.
    """
    reader = sequential_reader(samples, cache)
    threads = max(1, workers)
    mean_bytes = max(1, int(samples.locations.sizes.mean()))
    chunk = max(1, min(CHUNK, CHUNK_BYTES // mean_bytes))

    def chunks() -> Iterator[Ints]:
        for first in range(0, len(samples), chunk):
            yield np.arange(first, min(first + chunk, len(samples)))

    def decode_chunk(rows: Ints, arena: Arena) -> list[T]:
        arena.clear()
        return [decode(reader.read(row), samples.limits(row), arena) for row in rows.tolist()]

    def submitted() -> Iterator[Future[list[T]]]:
        for rows, arena in zip(reader.ahead(chunks()), cycle(arenas), strict=False):
            yield pool.submit(decode_chunk, rows, arena)

    num_ahead = 4 * threads
    arenas = [Arena() for _ in range(num_ahead + 1)]  # of the chunks ahead and of the one in use
    pool = ThreadPoolExecutor(threads)
    try:
        for future in prefetched(submitted(), num_ahead):
            yield from future.result()
    finally:
        abandon(pool)
        reader.close()


def abandon(pool: ThreadPoolExecutor) -> None:
    """Start nothing more in a pool, and do not wait: a storage that is away would delay it."""
    pool.shutdown(wait=False, cancel_futures=True)


def prefetched(items: Iterator[T], depth: int) -> Iterator[T]:
    """Yield the same items, each taken from `items` before it is needed, `depth` items ahead."""
    waiting = deque(islice(items, depth))
    while waiting:
        waiting.extend(islice(items, 1))
        yield waiting.popleft()
