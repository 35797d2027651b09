"""Loader processes: they decode and crop images for a rank, without its interpreter lock.

Threads of one process share the lock, which limits them to about two cores and slows down the
training thread. A rank and its loaders share memory for requests and pixels
(`workers/data/shared_blocks.py`), and exchange one message per chunk of images through pipes.

No process and no memory outlives the rank. Memory and pipes have no names in the file system, and
loaders exit when the rank's end of the request pipe closes, even if the rank is killed by SIGKILL.
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
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from workers.data.loader_process import ImageSpec
from workers.data.order import Ints
from workers.data.shared_blocks import DIED, PAGE, READY, TOKEN, Block, make_memory_file, padded
from workers.storage import filesystem

START_AFTER_S = 2.0  # CPU seconds of work on images in this process before it starts loaders
MIN_LOADERS = 2  # minimum number of loader processes with `loader_workers: auto`
MAX_FREE = 8  # maximum number of unused blocks kept for reuse
MAX_END_S = 5.0  # seconds after which loaders that do not exit are killed
MAX_OVERSIZE = 4  # a reused block is smaller than this many times the requested size
RECEIVED_BYTES = TOKEN.size * 512  # maximum bytes of one read from the reply pipe
CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")  # CPU time per period, and the period, in microseconds


class LoaderEnded(RuntimeError):
    """A loader process exited unexpectedly."""


class _Descriptors:
    """Owns file descriptors and closes them when it is garbage-collected."""

    def __init__(self) -> None:
        self.numbers: list[int] = []

    def add(self, number: int) -> int:
        """Take ownership of a descriptor, and return it."""
        self.numbers.append(number)
        return number

    def close(self) -> None:
        """Close the descriptors."""
        while self.numbers:
            os.close(self.numbers.pop())

    def __del__(self) -> None:
        self.close()


class OwnedBlock(Block):
    """A block in the process of the rank, which allocates it.

    Attributes:
        num_pending: Number of requested but unfinished chunks.
        owner: Id of the process that allocated the block.
    """

    num_pending = 0

    def __init__(self, descriptor: int, page: int, num_bytes: int):
        super().__init__(descriptor, page, num_bytes)
        self.owner = os.getpid()


class Loaders:
    """A pool of loader processes. Thread-safe.

    Args:
        count: Number of processes.

    Raises:
        OSError: If the system refuses memory, a file descriptor or a process.
        LoaderEnded: From `are_ready`, `start` or `wait`, if a process has exited unexpectedly.
    """

    def __init__(self, count: int):
        self.count = count
        self._num_pages = 0
        self._free: list[OwnedBlock] = []
        self._returned: deque[OwnedBlock] = deque()  # added by finalizers, which run in any thread
        self._running: dict[int, OwnedBlock] = {}  # first page -> block with pending chunks
        self._allocating = threading.Lock()
        self._receiving = threading.Lock()
        self._num_ready = 0
        self._failure = ""
        self._has_noted = False
        # Closed only with this object: at exit, a daemon thread may still use a descriptor.
        self._descriptors = _Descriptors()
        theirs = _Descriptors()  # the loaders' ends of the pipes; closed when this method returns
        self._memory = self._descriptors.add(make_memory_file())
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
            env=_make_server_environment(),
            start_new_session=True,  # `_stop_loaders` kills the whole process group
        )
        self._poll = select.poll()
        self._poll.register(self._replies, select.POLLIN)
        # also runs when the process exits
        self.close = weakref.finalize(self, _stop_loaders, self._requests, self._server)

    @property
    def have_failed(self) -> bool:
        """Whether a process has exited unexpectedly. The pool must be replaced."""
        return bool(self._failure)

    def abandon(self) -> None:
        """Release the pool in a forked child. The loaders keep working for the parent."""
        self.close.detach()
        self._descriptors.close()
        self._failure = "a forked process cannot use the loaders of its parent"
        self._free.clear()
        self._receiving = threading.Lock()  # a thread of the parent may hold the old locks
        self._allocating = threading.Lock()

    def are_ready(self, timeout: float = 0.0) -> bool:
        """Return whether a loader has started; wait at most `timeout` seconds for the first."""
        with self._receiving:
            if not self._num_ready:
                self._receive(timeout)
            return self._num_ready > 0

    def store(self, spec: ImageSpec) -> OwnedBlock:
        """Copy a spec to a new block, and return the block."""
        data = spec.to_bytes()
        block = self._make_block(Block.size(0, 0, len(data)))
        block.lay_out(np.zeros(1, np.int64), 0)
        block.header["spec_bytes"] = len(data)
        block.data()[: len(data)] = data
        return block

    def take(
        self, borders: Ints, slot_bytes: int, spec: OwnedBlock, data_bytes: int = 0
    ) -> OwnedBlock:
        """Return a block with this layout. Its pixels and data are uninitialized.

        Args:
            borders: First request of each chunk, and number of requests, (m + 1,).
            slot_bytes: Size of an image in bytes.
            spec: Block of the spec, from `store`.
            data_bytes: Size of the space for image files that the rank reads itself, in bytes.

        Raises:
            OSError: If there is no memory or no file descriptor for a block.
        """
        num_bytes = Block.size(int(borders[-1]), slot_bytes, data_bytes)
        with self._allocating:
            block = self._take_reusable(num_bytes)
        block = block or self._make_block(num_bytes)
        block.lay_out(borders, slot_bytes)
        block.header["spec_page"] = spec.page
        block.header["spec_bytes"] = spec.get("spec_bytes")
        block.requests["is_made"] = False
        block.num_pending = 0
        return block

    def pixels(self, block: OwnedBlock) -> Tensor:
        """Return all pixels of a block, uint8 (n * slot_bytes,).

        The block is reused after the last tensor or array that shares its memory is deleted.
        """
        pixels = block.pixels()
        weakref.finalize(pixels, self._returned.append, block).atexit = False
        return torch.from_numpy(pixels)

    def start(self, block: OwnedBlock, first: int, last: int) -> None:
        """Request chunks `first` to `last` - 1 of a block."""
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

    def wait(self, block: OwnedBlock, cancel: threading.Event, timeout: float) -> None:
        """Wait until all requested chunks are finished or `cancel` is set.

        Args:
            block: The block of the chunks.
            cancel: Ends the wait.
            timeout: Seconds between two checks of `cancel`.
        """
        while block.num_pending and not cancel.is_set():
            with self._receiving:
                if block.num_pending:
                    self._receive(timeout)
        if block.num_pending and self._failure:
            raise LoaderEnded(self._failure)  # another thread found the failure and set `cancel`

    def note_remade(self, count: int) -> None:
        """Log, once, that this process had to make images that loaders could not make."""
        if not self._has_noted:
            self._has_noted = True
            filesystem.notify(
                f"the loader processes failed to make {count} images of a step; the training "
                "process makes such images itself, which is slower; the first error of each "
                "loader process is in the log of the worker"
            )

    def _receive(self, timeout: float) -> None:
        """Process replies; wait at most `timeout` seconds. The caller holds `_receiving`."""
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
        """Stop all loaders and raise `LoaderEnded`.

        Args:
            code: Exit status of the process that ended; minus the signal number if a signal ended
                it.
        """
        _close_pipe(self._requests)
        how = f"with status {code}"
        if code < 0:
            names = {int(number): number.name for number in signal.Signals}  # some have no name
            how = f"by signal {names.get(-code, -code)}"
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

    def _take_reusable(self, num_bytes: int) -> OwnedBlock | None:
        """Return the smallest free block of a suitable size.

        If there is none, release surplus free blocks and return None.
        """
        for _ in range(len(self._returned)):
            block = self._returned.popleft()
            # chunks of an abandoned epoch may still be running
            (self._returned if block.num_pending else self._free).append(block)
        suits = [
            block for block in self._free if num_bytes <= block.num_bytes < MAX_OVERSIZE * num_bytes
        ]
        if suits:
            best = min(suits, key=lambda block: block.num_bytes)
            self._free.remove(best)
            return best
        while len(self._free) > MAX_FREE:
            give_back(self._free.pop(0))
        return None

    def _make_block(self, num_bytes: int) -> OwnedBlock:
        with self._allocating:
            page = self._num_pages
            self._num_pages += padded(num_bytes) // PAGE
            os.ftruncate(self._memory, self._num_pages * PAGE)
            return OwnedBlock(self._memory, page, padded(num_bytes))


def _close_pipe(requests: int) -> None:
    """Close the rank's end of the request pipe, so that loaders read its end and exit.

    The descriptor is redirected to /dev/null, not closed, because a thread may still write to it.
    """
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, requests, inheritable=False)
    os.close(nowhere)


def _stop_loaders(requests: int, server: subprocess.Popen[bytes]) -> None:
    """Stop the loaders and wait for them."""
    _close_pipe(requests)
    try:
        server.wait(MAX_END_S)
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def give_back(block: OwnedBlock) -> None:
    """Return the memory of a block to the system. Its pages in the file are not reused."""
    if block.owner == os.getpid():  # a forked child must not free memory of the parent
        block.memory.madvise(mmap.MADV_REMOVE)


def _make_server_environment() -> dict[str, str]:
    """Return the environment of the server process: the module search path of this process.

    Numerical libraries use one thread, and no GPU is visible.
    """
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
    """State that all feeds of this process share.

    Attributes:
        loaders: Pools by number of processes.
        seconds: CPU seconds that this process has spent on making images.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Remove all pools, and set the time to 0."""
        self.loaders: dict[int, Loaders] = {}
        self.seconds = 0.0
        self.lock = threading.Lock()


_shared = _Shared()


def get_loaders(count: int) -> Loaders | None:
    """Return the pool that all feeds of this process share, or None if threads must do the work.

    The pool starts after this process has spent START_AFTER_S CPU seconds on images. Threads
    continue until the first loader is ready.

    Args:
        count: Number of loaders, from `count_loaders`.
    """
    if not count or not hasattr(os, "memfd_create") or _shared.seconds < START_AFTER_S:
        return None
    return start_loaders(count, 0.0)


def start_loaders(count: int, timeout: float) -> Loaders | None:
    """Start the pool if it is not running, and wait for its first loader.

    Args:
        count: Number of loaders.
        timeout: Maximum wait in seconds.

    Returns:
        The pool. None if no loader is ready in time, or if the system refuses to start processes.
    """
    with _shared.lock:
        loaders = _shared.loaders.get(count)
        if loaders is None or loaders.have_failed:
            try:
                loaders = _shared.loaders[count] = Loaders(count)
            except OSError:  # the next step tries again
                return None
    return loaders if loaders.are_ready(timeout) else None


def release_pools() -> None:
    """Release the pools of the parent in a forked child."""
    for loaders in _shared.loaders.values():
        loaders.abandon()
    _shared.reset()


os.register_at_fork(after_in_child=release_pools)


@contextmanager
def measure_work() -> Generator[None]:
    """Context manager that adds this thread's CPU time to `_Shared.seconds`."""
    began = time.thread_time()
    yield
    _shared.seconds += time.thread_time() - began


def count_loaders(setting: int | Literal["auto"], cores: int | None = None) -> int:
    """Return the number of loaders of a rank.

    Args:
        setting: `cluster.loader_workers`. `auto`: one loader per core, at least MIN_LOADERS. 0: no
            loaders.
        cores: Cores of the rank; None: all cores of this process.
    """
    if setting != "auto":
        return setting
    return max(MIN_LOADERS, count_cores() if cores is None else cores)


@functools.cache
def count_cores() -> int:
    """Return the number of cores of this process: CPU affinity, limited by the cgroup quota."""
    if not hasattr(os, "sched_getaffinity"):  # macOS
        return os.cpu_count() or 1
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = CPU_QUOTA.read_text().split()
        cores = min(cores, math.ceil(int(quota) / int(period)))
    except (OSError, ValueError):  # no quota
        pass
    return cores
