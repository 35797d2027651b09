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
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Generator
from contextlib import contextmanager, suppress
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


class Stored(Protocol):
    """A recipe in the memory of loaders."""

    def on(self, loaders: Loaders) -> Lease:
        """Return its block, which `Loaders.store` made."""


class _Descriptors:
    """File descriptors, closed when nothing refers to this object."""

    def __init__(self) -> None:
        self.numbers: list[int] = []

    def add(self, number: int) -> int:
        """Own a descriptor, and return it."""
        self.numbers.append(number)
        return number

    def __del__(self) -> None:
        while self.numbers:
            os.close(self.numbers.pop())


class Lease(Block):
    """A block that a rank has laid out.

    Attributes:
        num_pending: Chunks that loaders have not made yet.
    """

    num_pending = 0

    def __init__(self, descriptor: int, page: int, num_bytes: int):
        super().__init__(descriptor, page, num_bytes)
        self.owner = os.getpid()


class Loaders:
    """Loader processes, started at once; thread-safe.

    Args:
        count: How many there are.

    Raises:
        LoaderEnded: From any method, once one of them has ended by itself.
    """

    def __init__(self, count: int):
        self.count = count
        self._num_pages = 0
        self._free: list[Lease] = []
        self._returned: deque[Lease] = deque()  # by whoever drops the last reference, in any thread
        self._running: dict[int, Lease] = {}  # by page: those with pending chunks
        self._allocating = threading.Lock()
        self._receiving = threading.Lock()
        self._num_ready = 0
        self._failure = ""
        # Closed with this object, and not before: at the end of this process a thread may still be
        # about to use one.
        self._descriptors = _Descriptors()
        theirs = _Descriptors()
        self._memory = self._descriptors.add(os.memfd_create("images", os.MFD_CLOEXEC))
        (requests, self._requests), (self._replies, replies) = os.pipe(), os.pipe()
        self._descriptors.add(self._requests)
        self._descriptors.add(self._replies)
        passed = (self._memory, theirs.add(requests), theirs.add(replies))
        self._server = subprocess.Popen(
            [
                sys.executable,
                "-P",
                "-m",
                "workers.data.loader_process",
                *map(str, (*passed, count)),
            ],
            stdin=subprocess.DEVNULL,
            pass_fds=passed,
            env=_environment(),
            start_new_session=True,
        )
        self._poll = select.poll()
        self._poll.register(self._replies, select.POLLIN)
        # also at the end of this process
        self.close = weakref.finalize(self, _end, self._requests, self._server)

    @property
    def have_failed(self) -> bool:
        """Whether one has ended by itself, so that others are needed."""
        return bool(self._failure)

    def abandon(self) -> None:
        """Close what a forked process has of them; they go on working for its parent."""
        self.close.detach()
        self._descriptors.__del__()
        self._failure = "a forked process has no loaders of its own"
        self._free.clear()
        self._receiving = threading.Lock()  # a thread of the parent may have held them
        self._allocating = threading.Lock()

    def are_ready(self, timeout: float = 0.0) -> bool:
        """Whether a loader has started, within `timeout` seconds."""
        with self._receiving:
            if not self._num_ready:
                self._receive(timeout)
            return self._num_ready > 0

    def store(self, recipe: Recipe) -> Lease:
        """Return a block with a recipe, which loaders keep while it is used."""
        data = recipe.to_bytes()
        block = self._make_block(Block.size(0, 0, len(data)))
        block.lay_out(np.zeros(1, np.int64), 0)
        block.header["recipe_bytes"] = len(data)
        block.data()[: len(data)] = data
        return block

    def take(
        self, borders: Ints, slot_bytes: int, recipe: Stored, data_bytes: int = 0
    ) -> Lease | None:
        """Return a block of any contents, laid out; None where the system gives no more.

        Args:
            borders: (m + 1,) Of its chunks.
            slot_bytes: Bytes of the pixels of an image.
            recipe: How the images are made.
            data_bytes: Bytes of image files that this process reads itself.
        """
        num_bytes = Block.size(int(borders[-1]), slot_bytes, data_bytes)
        try:
            stored = recipe.on(self)
            with self._allocating:
                block = self._reused(num_bytes)
            block = block or self._make_block(num_bytes)
        except OSError:  # each block takes a file descriptor, of which there may be no more
            return None
        block.lay_out(borders, slot_bytes)
        block.header["recipe_page"] = stored.page
        block.header["recipe_bytes"] = stored.get("recipe_bytes")
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
        _close_pipe(self._requests)
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


def _close_pipe(requests: int) -> None:
    """Have loaders see the end of their pipe. The descriptor leads nowhere from now on: a thread
    may be about to write to it."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, requests, inheritable=False)
    os.close(nowhere)


def _end(requests: int, server: subprocess.Popen[bytes]) -> None:
    """Close the pipe of loaders, and wait until they have ended."""
    _close_pipe(requests)
    try:
        server.wait(LONGEST_END_S)
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def give_back(block: Lease) -> None:
    """Return the memory of a block to the system. Its pages are not used again."""
    if block.owner == os.getpid():  # not a process that was forked from the one that uses it
        block.memory.madvise(mmap.MADV_REMOVE)


def _environment() -> dict[str, str]:
    """Return the variables of the server's process: as here, with the same modules."""
    paths = [path for path in sys.path if path]
    root = str(Path(__file__).parents[2])
    if root not in paths:
        paths.append(root)
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
    None after `timeout` seconds, and where the system has no room for them."""
    with _shared.lock:
        loaders = _shared.loaders.get(count)
        if loaders is None or loaders.have_failed:
            try:
                loaders = _shared.loaders[count] = Loaders(count)
            except OSError:  # no descriptor, memory or process: tried again with the next step
                return None
    return loaders if loaders.are_ready(timeout) else None


def forget_loaders() -> None:
    """Leave the loaders to the parent of this process, which was forked from it."""
    for loaders in _shared.loaders.values():
        loaders.abandon()
    _shared.__init__()  # type: ignore[misc]


os.register_at_fork(after_in_child=forget_loaders)


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
