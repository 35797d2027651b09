"""Sources of pixels: they give the feed the square images of the samples of a step.

`Resident` keeps square images that are decoded once. `PictureSource` makes images from pictures in
each step; the pictures are kept decoded, or decoded again (`workers/data/pictures.py`). Both give
the same pixels for a sample, whatever the order in which samples are requested.
"""

from __future__ import annotations

import hashlib
import io
import math
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import BinaryIO, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workers.data.accelerator import count_free_bytes, is_accelerator
from workers.data.arena import Arena
from workers.data.cache import Blocks, Cache
from workers.data.crops import CropDraws, View
from workers.data.decoding import DECODING
from workers.data.image_maker import ImageMaker, Normalisation, ReadSquare
from workers.data.loaders import Loaders, OwnedBlock, get_loaders, measure_work
from workers.data.memory import TensorPool
from workers.data.order import Ints
from workers.data.pictures import (
    CHUNK,
    KEPT_REMEDY,
    MAX_THREADS,
    Pictures,
    SharedSpec,
    abandon,
    decode_rows,
    prefetched,
)
from workers.data.rows import SampleTable
from workers.data.upload import to_device

AHEAD = 2  # number of steps whose images are made in advance
MAX_LOADED_CHUNK = 32  # maximum images per request; the rank processes one reply per request
MAX_CHUNKS = 512  # maximum chunks of a step; messages of several steps must fit into a pipe
QUICK_SIDE = 64  # images up to this side, in pixels, are made faster than a thread wakes up
DROPPED_S = 0.1  # seconds between two checks whether a wait for images was cancelled

# Function from positions in the global batch (b,) to pixels (b, 3, side, side): uint8, or float32
# if the source normalises, in any memory format, on the CPU or on the device of the source.
Pixels = Callable[[Ints], Tensor]


class StepSamples(NamedTuple):
    """The samples that a rank needs in a step.

    Attributes:
        positions: Positions in the global batch, ascending, (k,).
        rows: Rows of the sample table, (k,). Copies of an image have the same row.
        crops: Random numbers of crops from the original images. None: a sample is the central
            square of the image.
    """

    positions: Ints
    rows: Ints
    crops: CropDraws | None = None


class PixelSource(Protocol):
    """Source of pixels for a feed."""

    def steps(self, steps: Iterator[StepSamples]) -> Generator[Pixels]:
        """Yield, for each step, a function that returns the pixels at given positions.

        When the generator ends or is closed, the functions that still wait for images raise
        `CancelledError`, or `TimeoutError` if a job of theirs is running.

        Args:
            steps: The samples of each step. The iterator is advanced before they are needed.
        """


class Resident:
    """The central squares of all images, decoded once to uint8 (n, side, side, 3).

    They are in device memory if it has room for twice as many. Otherwise they are in a memory map
    that the ranks of a node share, or in plain memory without a `cache`.

    Args:
        samples: The n rows.
        view: Side and interpolation of the squares.
        workers: Number of loader processes that decode the images.
        cache: Cache for the memory map, if any.
        device: Device of the rank.
    """

    def __init__(
        self,
        samples: SampleTable,
        view: View,
        workers: int,
        cache: Cache | None,
        device: torch.device,
    ):
        self.samples = samples
        self.view = view
        self.workers = workers
        self.cache = cache
        self.device = device
        self.shape = (len(samples), view.side, view.side, 3)
        self.blocks = self._mapped(cache) if cache else None  # `_read` verifies its rows
        if self.blocks is None:
            self.pixels = self._in_memory()
        else:
            self.pixels = self.blocks.data.reshape(self.shape)
        self.on_device: Tensor | None = None
        if is_accelerator(device) and 2 * self.pixels.nbytes < count_free_bytes(device):
            everything = self._read(np.arange(len(samples)))
            self.on_device = torch.from_numpy(everything).to(device)
            self.blocks = None
            del self.pixels

    def steps(self, steps: Iterator[StepSamples]) -> Generator[Pixels]:
        """See `PixelSource.steps`. All rows are already decoded."""
        for samples in steps:
            yield partial(self._gather, samples)

    def _gather(self, samples: StepSamples, positions: Ints) -> Tensor:
        rows = samples.rows[np.searchsorted(samples.positions, positions)]
        if self.on_device is not None:
            (index,) = to_device([torch.from_numpy(rows)], self.device)
            return self.on_device[index].permute(0, 3, 1, 2)
        pixels = self._read(rows)
        return torch.from_numpy(pixels).permute(0, 3, 1, 2)

    def _read(self, rows: Ints) -> NDArray[np.uint8]:
        """Return a copy of some rows. Rows from a disk are verified first."""
        if self.blocks is not None:
            self.blocks.verify(rows)
        return self.pixels[rows]

    def _decoded(self) -> Iterator[NDArray[np.uint8]]:
        pictures = decode_rows(self.samples, self.workers, self.cache, ReadSquare(self.view))
        return (picture.pixels for picture in pictures)

    def _decode(self, row: int) -> NDArray[np.uint8]:
        """Decode one row again, from its image file in storage."""
        limits = self.samples.limits(row)
        return ReadSquare(self.view)(self.samples.read_bytes(row), limits, Arena()).pixels

    def _in_memory(self) -> NDArray[np.uint8]:
        pixels = np.empty(self.shape, np.uint8)
        for row, decoded in enumerate(self._decoded()):
            pixels[row] = decoded
        return pixels

    def _mapped(self, cache: Cache) -> Blocks:
        """Open the file `<cache>/<hash of samples and view>.npy`, and write it if it is missing."""
        form = f"{self.view.side}|{self.view.interpolation}|crc32"
        contents = f"{DECODING}|{self.samples.digest()}|{form}"
        name = hashlib.sha256(contents.encode()).hexdigest()[:32] + ".npy"
        header = io.BytesIO()
        np.lib.format.write_array_header_1_0(
            header, {"descr": "|u1", "fortran_order": False, "shape": self.shape}
        )

        def write(stream: BinaryIO) -> None:
            stream.write(header.getvalue())
            Blocks.write(stream, self._decoded())

        # The file stays open as long as this object exists, so the cache does not evict it.
        size = header.tell() + Blocks.size(self.shape)
        file = cache.open_file(name, size, write, KEPT_REMEDY)
        row_bytes = math.prod(self.shape[1:])
        borders = row_bytes * np.arange(self.shape[0] + 1)
        return Blocks(cache, file, header.tell(), borders, self._decode)


class PictureSource:
    """Makes the images of each step ahead of time, from pictures.

    As soon as the loader processes are ready, they make the images. Before that, and without
    loaders, threads of this process make them: the calling thread makes small images of kept
    pictures, a pool of threads makes all others ahead of time.

    Args:
        pictures: Source of the images.
        view: Size and crop of the images.
        workers: Number of loader processes. 0: none.
        normalisation: Applied to the images. None: they stay uint8.
    """

    def __init__(
        self,
        pictures: Pictures,
        view: View,
        workers: int,
        normalisation: Normalisation | None = None,
    ):
        self.pictures = pictures
        self.view = view
        self.normalisation = normalisation
        self.workers = workers
        self.threads = max(1, min(workers, MAX_THREADS))
        # Unused makers. They are kept here, because the threads that use them end with each epoch.
        self.free: deque[ImageMaker] = deque()
        self._turn = threading.Lock()  # held while a calling thread makes small images
        self.pool = TensorPool()
        self.spec = SharedSpec(pictures, view, normalisation)

    def steps(self, steps: Iterator[StepSamples]) -> Generator[Pixels]:
        """See `PixelSource.steps`. Only the pixels of a step's samples are available."""
        waiting: deque[StepSamples] = deque()

        def rows_of_steps() -> Iterator[Ints]:
            for samples in steps:
                waiting.append(samples)
                yield samples.rows

        rows_ahead = self.pictures.ahead(rows_of_steps())
        is_quick = self.pictures.are_kept and self.view.side <= QUICK_SIDE

        def begin(samples: StepSamples) -> Pixels:
            if not len(samples.rows):  # the feed uses cached features
                return partial(self._make_now, samples)
            loaders = get_loaders(self.workers)
            if loaders is not None:
                with suppress(OSError):  # no memory or file descriptor for a block
                    return self._request(loaders, pool, samples, is_dropped).at
            if is_quick:
                return partial(self._make_now, samples)
            return self._submit(pool, samples, is_dropped).at

        def submitted() -> Iterator[Pixels]:
            for _ in rows_ahead:
                yield begin(waiting.popleft())

        is_dropped = threading.Event()
        pool = ThreadPoolExecutor(self.threads)
        try:
            yield from prefetched(submitted(), AHEAD)
        finally:
            is_dropped.set()
            abandon(pool)
            rows_ahead.close()

    def _make_now(self, samples: StepSamples, positions: Ints) -> Tensor:
        """Make the images in the calling thread."""
        images = self._empty(samples)
        with self._turn:  # two threads would wait for the GIL at every crop
            self._make(samples, images, np.arange(len(samples.rows)))
        return pick_images(positions, samples.positions, images)

    @property
    def _dtype(self) -> torch.dtype:
        return torch.uint8 if self.normalisation is None else torch.float32

    def _empty(self, samples: StepSamples) -> Tensor:
        """Return uninitialized images (k, 3, side, side)."""
        shape = (len(samples.rows), 3, self.view.side, self.view.side)
        return self.pool.empty(shape, self._dtype)

    def _submit(
        self, pool: ThreadPoolExecutor, samples: StepSamples, is_dropped: threading.Event
    ) -> StepPixels:
        """Start to make the images of a step in the threads of `pool`."""
        images = self._empty(samples)
        jobs = [
            pool.submit(self._make, samples, images, indices)
            for indices in split_chunks(samples.rows, self.threads)
        ]
        return StepPixels(samples.positions, images, jobs, is_dropped)

    def _request(
        self,
        loaders: Loaders,
        pool: ThreadPoolExecutor,
        samples: StepSamples,
        is_dropped: threading.Event,
    ) -> LoadedPixels:
        """Request the images of a step from loaders.

        Raises:
            OSError: If there is no memory or file descriptor for them.
        """
        order = np.arange(len(samples.rows))
        if len(np.unique(samples.rows)) < len(order):
            order = np.argsort(samples.rows, kind="stable")  # copies are neighbours
        rows = samples.rows[order]
        # With this size, a step has at least about half as many chunks as there are loaders, and
        # AHEAD + 1 steps are in progress. Therefore all loaders are busy.
        size = min(MAX_LOADED_CHUNK, -(-2 * len(rows) // loaders.count))
        borders = cut_chunks(rows, size)
        shape = (len(rows), 3, self.view.side, self.view.side)
        block = loaders.take(
            borders,
            math.prod(shape[1:]) * self._dtype.itemsize,
            self.spec.on(loaders),
            self.pictures.data_bytes(rows),
        )
        images = loaders.pixels(block).view(self._dtype).view(shape)
        block.requests["slot"] = order
        if samples.crops is not None:
            samples.crops.store(block.requests, order)
        jobs = self.pictures.start(loaders, block, images, rows, pool)
        make = partial(self._make, samples, images)
        return LoadedPixels(samples.positions, images, jobs, is_dropped, loaders, block, make)

    @torch.inference_mode()  # resizing a crop skips the dispatch of autograd
    def _make(self, samples: StepSamples, images: Tensor, indices: Ints) -> None:
        """Write some images of a step. Adjacent copies of an image are decoded once."""
        try:
            maker = self.free.pop()
        except IndexError:  # other threads have taken all makers
            maker = ImageMaker(self.view, self.normalisation)
        with measure_work():
            pictures = self.pictures.read(samples.rows[indices], maker.arena)
            maker.make(pictures, images, indices, samples.crops, indices)
        self.free.append(maker)


@dataclass(frozen=True)
class StepPixels:
    """The images of a step, which threads make.

    Attributes:
        positions: Positions in the global batch, ascending, (k,).
        images: Images (k, 3, side, side), complete when all jobs are done.
        jobs: Jobs that make some of the images each.
        is_dropped: Set when the generator of the epoch's pixels ends or is closed.
    """

    positions: Ints
    images: Tensor
    jobs: list[Future[None]]
    is_dropped: threading.Event

    def at(self, positions: Ints) -> Tensor:
        """Wait for the images and return those at some positions, (b, 3, side, side)."""
        self._finish()
        return pick_images(positions, self.positions, self.images)

    def _finish(self) -> None:
        for job in self.jobs:
            while not self.is_dropped.is_set():
                if wait_for((job,), timeout=DROPPED_S).done:
                    break
            job.result(timeout=0)


@dataclass(frozen=True)
class LoadedPixels(StepPixels):
    """The images of a step, which loader processes make in a block.

    The jobs do not make images: they read image files and request the chunks.

    Attributes:
        loaders: The loader processes.
        block: The block of the images.
        make: Function that makes the images at some indices (m,) in this process. It is called for
            images that loaders failed to make, and raises the error for the user.
    """

    loaders: Loaders
    block: OwnedBlock
    make: Callable[[Ints], None]

    def _finish(self) -> None:
        super()._finish()
        self.loaders.wait(self.block, self.is_dropped, DROPPED_S)
        if self.block.num_pending:
            raise CancelledError
        requests = self.block.requests
        if not requests["is_made"].all():
            missing = np.sort(requests["slot"][~requests["is_made"]]).astype(np.int64)
            self.make(missing)
            self.loaders.note_remade(len(missing))


def pick_images(positions: Ints, made_positions: Ints, images: Tensor) -> Tensor:
    """Return the images (b, 3, side, side) of some positions of a global batch.

    Args:
        positions: The requested positions, (b,), a subset of `made_positions`.
        made_positions: Positions of `images`, ascending, (k,).
        images: Images (k, 3, side, side).
    """
    if np.array_equal(positions, made_positions):
        return images
    return images[torch.from_numpy(np.searchsorted(made_positions, positions))]


def split_chunks(rows: Ints, threads: int) -> list[Ints]:
    """Split the samples of a step into jobs, with copies of a row in the same job.

    Returns:
        The indices into `rows` for each job.
    """
    if not len(rows):
        return []
    by_row = np.argsort(rows, kind="stable")
    size = min(CHUNK, -(-len(rows) // (2 * threads)))
    return np.split(by_row, cut_chunks(rows[by_row], size)[1:-1])


def cut_chunks(rows: Ints, size: int) -> Ints:
    """Cut rows (n,), n > 0, into chunks and return their borders (m + 1,).

    Equal rows must be neighbours. They stay in one chunk, which may therefore exceed `size` rows.
    Chunks are larger if there would be more than MAX_CHUNKS.
    """
    size = max(1, size, -(-len(rows) // MAX_CHUNKS))
    firsts = np.flatnonzero(np.diff(rows, prepend=rows[0] - 1))  # first copy of each row
    starts = firsts[np.searchsorted(firsts, np.arange(0, len(rows), size), "right") - 1]
    return np.append(np.unique(starts), len(rows))
