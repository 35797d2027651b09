"""The loader processes of a rank, which make images on other cores than the rank's own threads.

The interpreter lock lets a process make images on about two cores, and the thread that trains needs
the same lock. A loader needs nothing of the rank but a token in a pipe for each chunk of images:
the requests and the pixels lie in memory that both have mapped (`workers/data/shared_blocks.py`).

Nothing of them outlives the rank. The memory and the pipes have no names, and loaders end when the
rank's end of a pipe is closed, which the kernel does even for a process that is killed.
"""

from __future__ import annotations

import functools
import math
import mmap
import os
import pickle
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from workers.data.loader_process import Recipe
from workers.data.order import Ints
from workers.data.shared_blocks import DIED, PAGE, READY, TOKEN, Block, padded

# CPU seconds that this process makes images itself before it starts loaders, which take about as
# long to start
START_AFTER_S = 2.0
LEAST_AUTO = 2
MOST_FREE = 8  # blocks that are kept while nobody uses them
LONGEST_END_S = 5.0
WASTE = 4  # a block is not used for less than this part of it
RECEIVED_BYTES = TOKEN.size * 512
CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")  # microseconds in each period, and the period


class Cancel(Protocol):
    """Says whether nobody waits any more, as `threading.Event` does."""

    def is_set(self) -> bool:
        """Return whether nobody waits any more."""


class LoaderEnded(RuntimeError):
    """A loader process ended by itself."""


class Lease(Block):
    """A block that a rank has laid out.

    Attributes:
        num_pending: Chunks that loaders have not made yet.
    """

    num_pending = 0


class Loaders:
    """Loader processes, started at once; thread-safe.

    Args:
        count: How many there are.

    Raises:
        LoaderEnded: From any method, once one of them has ended by itself.
    """

    def __init__(self, count: int):
        self.count = count
        self._memory = os.memfd_create("images", os.MFD_CLOEXEC)
        self._num_pages = 0
        self._free: list[Lease] = []
        self._returned: deque[Lease] = deque()  # by whoever drops the last reference, in any thread
        self._running: dict[int, Lease] = {}  # by page: those with pending chunks
        self._allocating = threading.Lock()
        self._receiving = threading.Lock()
        self._num_ready = 0
        self._failure = ""
        requests, self._requests = os.pipe()
        self._replies, replies = os.pipe()
        arguments = [str(number) for number in (self._memory, requests, replies, count)]
        self._server = subprocess.Popen(
            [sys.executable, "-P", "-m", "workers.data.loader_process", *arguments],
            stdin=subprocess.DEVNULL,
            pass_fds=(self._memory, requests, replies),
            env=_environment(),
        )
        os.close(requests)
        os.close(replies)
        self._poll = select.poll()
        self._poll.register(self._replies, select.POLLIN)
        # also at the end of this process
        descriptors = (self._requests, self._replies, self._memory)
        self.close = weakref.finalize(self, _end, descriptors, self._server)

    @property
    def have_failed(self) -> bool:
        """Whether one has ended by itself, so that others are needed."""
        return bool(self._failure)

    def are_ready(self, timeout: float = 0.0) -> bool:
        """Whether a loader has started, within `timeout` seconds."""
        with self._receiving:
            if not self._num_ready:
                self._receive(timeout)
            return self._num_ready > 0

    def store(self, recipe: Recipe) -> Lease:
        """Return a block with a recipe, which loaders keep while it is used."""
        data = pickle.dumps(recipe)
        block = self._make_block(Block.size(0, 0, len(data)))
        block.lay_out(np.zeros(1, np.int64), 0)
        block.header["recipe_bytes"] = len(data)
        block.data()[: len(data)] = data
        return block

    def take(self, borders: Ints, slot_bytes: int, recipe: Lease, data_bytes: int = 0) -> Lease:
        """Return a block of any contents, laid out.

        Args:
            borders: (m + 1,) Of its chunks.
            slot_bytes: Bytes of the pixels of an image.
            recipe: What `store` returned.
            data_bytes: Bytes of image files that this process reads itself.
        """
        num_bytes = Block.size(int(borders[-1]), slot_bytes, data_bytes)
        with self._allocating:
            block = self._reused(num_bytes)
        block = block or self._make_block(num_bytes)
        block.lay_out(borders, slot_bytes)
        block.header["recipe_page"] = recipe.page
        block.header["recipe_bytes"] = recipe.get("recipe_bytes")
        block.requests["is_made"] = False
        block.num_pending = 0
        return block

    def pixels(self, block: Lease) -> Tensor:
        """Return uint8 (n * slot_bytes,), all pixels of a block.

        The block is used again when nothing refers to them, or to what is made of them without a
        copy, any more.
        """
        pixels = block.pixels()
        weakref.finalize(pixels, self._returned.append, block).atexit = False
        return torch.from_numpy(pixels)

    def start(self, block: Lease, first: int, last: int) -> None:
        """Let loaders make the chunks from `first` to before `last`."""
        with self._receiving:
            if not block.num_pending:
                self._running[block.page] = block
            block.num_pending += last - first
        tokens = b"".join(TOKEN.pack(block.page, chunk) for chunk in range(first, last))
        try:
            os.write(self._requests, tokens)
        except BrokenPipeError:  # no loader is left
            with self._receiving:
                self._fail(self._server.wait())

    def wait(self, block: Lease, cancel: Cancel, timeout: float) -> None:
        """Wait until all chunks that were started are made, or `cancel` is set.

        timeout: seconds after which it looks whether it is set.
        """
        while block.num_pending and not cancel.is_set():
            with self._receiving:
                if block.num_pending:
                    self._receive(timeout)
        if block.num_pending and self._failure:
            raise LoaderEnded(self._failure)  # of which `cancel` was set in another thread

    def _receive(self, timeout: float) -> None:
        """Note replies, which are waited for; the caller holds `_receiving`."""
        if self._failure:
            raise LoaderEnded(self._failure)
        if not self._poll.poll(1000 * timeout):
            if self._server.poll() is not None:
                self._fail(self._server.returncode)
            return
        replies = os.read(self._replies, RECEIVED_BYTES)
        if not replies:
            self._fail(self._server.wait())
        for page, number in TOKEN.iter_unpack(replies):
            if page == READY:
                self._num_ready += 1
            elif page == DIED:
                self._fail(os.waitstatus_to_exitcode(number))
            else:
                block = self._running[page]
                block.num_pending -= 1
                if not block.num_pending:
                    del self._running[page]

    def _fail(self, code: int) -> None:
        """Raise `LoaderEnded`, now and from now on; end the others."""
        # Their pipe is closed. The descriptor stays one of this object's: a thread may be about to
        # write to it.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._requests, inheritable=False)
        os.close(nowhere)
        how = f"with status {code}"
        if code < 0:
            how = f"by signal {signal.Signals(-code).name}"
        self._failure = (
            f"a process that makes images for this rank has ended {how}; if the machine ran out "
            f"of memory, set cluster.loader_workers to fewer than {self.count}, or to 0 for none"
        )
        if not self._num_ready:
            self._failure = (
                f"the processes that make images for this rank could not start, they ended {how}; "
                "its log says why; set cluster.loader_workers to 0 for none"
            )
        raise LoaderEnded(self._failure)

    def _reused(self, num_bytes: int) -> Lease | None:
        """Return the smallest free block that suits, or None."""
        for _ in range(len(self._returned)):
            block = self._returned.popleft()
            # those of an epoch that was dropped are still being made
            (self._returned if block.num_pending else self._free).append(block)
        suits = [block for block in self._free if num_bytes <= block.num_bytes < WASTE * num_bytes]
        if suits:
            best = min(suits, key=lambda block: block.num_bytes)
            self._free.remove(best)
            return best
        while len(self._free) > MOST_FREE:
            give_back(self._free.pop(0))
        return None

    def _make_block(self, num_bytes: int) -> Lease:
        with self._allocating:
            page = self._num_pages
            self._num_pages += padded(num_bytes) // PAGE
            os.ftruncate(self._memory, self._num_pages * PAGE)
            return Lease(self._memory, page, padded(num_bytes))


def _end(descriptors: tuple[int, ...], server: subprocess.Popen[bytes]) -> None:
    """Close the pipes of loaders and their memory, and wait until they have ended."""
    for descriptor in descriptors:
        os.close(descriptor)
    try:
        server.wait(LONGEST_END_S)
    except subprocess.TimeoutExpired:
        server.kill()


def give_back(block: Block) -> None:
    """Return the memory of a block to the system. Its pages are not used again."""
    block.memory.madvise(mmap.MADV_REMOVE)


def _environment() -> dict[str, str]:
    """Return the variables of the server's process: as here, with the same modules."""
    paths = [str(Path(__file__).parents[2]), *filter(None, sys.path)]
    single = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    return {
        **os.environ,
        **single,
        "PYTHONPATH": os.pathsep.join(paths),
        "CUDA_VISIBLE_DEVICES": "",
    }


class _Shared:
    """The loaders of this process, by their number, and how long it has made images itself."""

    def __init__(self) -> None:
        self.loaders: dict[int, Loaders] = {}
        self.seconds = 0.0
        self.lock = threading.Lock()


_shared = _Shared()


def find_loaders(count: int) -> Loaders | None:
    """Return the loaders of this process, which all of its feeds share; None where there are none.

    They are started when this process has made images for START_AFTER_S seconds, and there are none
    until one of them is ready: nobody waits for them.

    Args:
        count: Of loaders; see `count_loaders`.
    """
    if not count or not hasattr(os, "memfd_create") or _shared.seconds < START_AFTER_S:
        return None
    return start_loaders(count, 0.0)


def start_loaders(count: int, timeout: float) -> Loaders | None:
    """Start the loaders of this process, unless there are any; return them once one is ready, or
    None after `timeout` seconds."""
    with _shared.lock:
        loaders = _shared.loaders.get(count)
        if loaders is None or loaders.have_failed:
            loaders = _shared.loaders[count] = Loaders(count)
    return loaders if loaders.are_ready(timeout) else None


@contextmanager
def count_seconds() -> Generator[None]:
    """Count the CPU time of a thread that makes images in this process."""
    began = time.thread_time()
    yield
    _shared.seconds += time.thread_time() - began


def count_loaders(setting: int | Literal["auto"], cores: int | None = None) -> int:
    """Return how many loaders a rank has.

    Args:
        setting: `cluster.loader_workers`; `auto`: one for each core of the rank, and at least
            LEAST_AUTO.
        cores: Of the rank; None: all that this process may use.
    """
    if setting != "auto":
        return setting
    return max(LEAST_AUTO, count_cores() if cores is None else cores)


@functools.cache
def count_cores() -> int:
    """Return the cores that this process may use, by its affinity and its container's quota."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = CPU_QUOTA.read_text().split()
        cores = min(cores, math.ceil(int(quota) / int(period)))
    except (OSError, ValueError):  # no container, or no limit
        pass
    return cores
