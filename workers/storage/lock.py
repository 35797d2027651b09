"""Lock a stage: one process of a machine computes the result, and other processes wait for it."""

from __future__ import annotations

import fcntl
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from workers.storage.artifact import join, make_dirs, share_file

if TYPE_CHECKING:
    from workers import dist  # start-up time: imports torch

POLL_S = 0.02  # seconds between two tries
# Seconds that rank 0 tries before it broadcasts the state to the other ranks. It must be shorter
# than the timeout of collectives.
ROUND_S = 10.0


@contextmanager
def stage_lock(
    root: str,
    key: str,
    group: dist.Group | None = None,
    wait: bool = True,
    on_wait: Callable[[], object] | None = None,
) -> Iterator[None]:
    """Context manager that holds the lock of the result `key` in `root`.

    All ranks of a group hold the lock together. The operating system releases the lock if the
    process of rank 0 ends.

    The lock only saves work; correctness does not depend on it. Machines without shared file locks
    can compute the same result twice, and one copy is discarded (see artifact.py). Nothing is
    locked on an object store, because it has no lock that is released when its holder dies. A lock
    that expires would need synchronised clocks and a writer that never pauses. Computing a result
    twice now and then costs less.

    Args:
        root: Folder or URI of the results.
        key: Key of the result.
        group: The group of this rank, if there are several ranks.
        wait: Whether to wait for the lock.
        on_wait: Function that rank 0 calls if another process holds the lock, and then every
            ROUND_S seconds.

    Raises:
        BlockingIOError: If `wait` is false and another process holds the lock.
    """
    if "://" in root and not root.startswith("file://"):
        yield
        return
    is_first = group is None or group.rank == 0
    path = join(os.path.dirname(root.removeprefix("file://").rstrip("/")), "claims", key)
    timeout_s = 0.0  # the first try does not wait
    descriptor: int | None = None
    try:
        while True:
            if is_first:
                descriptor = _try_until(path, time.monotonic() + timeout_s)
            is_held = descriptor is not None
            if group is not None:
                is_held = group.broadcast(is_held)
            if is_held:
                break
            if not wait:
                raise BlockingIOError(f"another process holds the lock of {key!r}")
            timeout_s = ROUND_S
            if is_first and on_wait is not None:
                on_wait()
        yield
    finally:
        if descriptor is not None:
            with suppress(FileNotFoundError):
                os.unlink(path)
            os.close(descriptor)


@contextmanager
def file_lock(path: str) -> Iterator[None]:
    """Context manager that waits for the lock of a file on a disk, and holds it.

    The file is created, and deleted at the end.
    """
    descriptor = _try_until(path, math.inf)
    assert descriptor is not None
    try:
        yield
    finally:
        with suppress(FileNotFoundError):
            os.unlink(path)
        os.close(descriptor)


def _try_until(path: str, deadline: float) -> int | None:
    """Try to lock a file until the deadline, at least once. Return its descriptor or None."""
    while True:
        descriptor = _try_lock(path)
        if descriptor is not None or time.monotonic() >= deadline:
            return descriptor
        time.sleep(POLL_S)


def _try_lock(path: str) -> int | None:
    """Return the descriptor of an open, locked file; None if another process holds the lock."""
    make_dirs(os.path.dirname(path))
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    # Another user owns the file and has shared it already, or its holder has just deleted it.
    with suppress(PermissionError, FileNotFoundError):
        share_file(path)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # A holder deletes the file before it releases the lock. Then this is a deleted file.
        is_current = os.stat(path).st_ino == os.fstat(descriptor).st_ino
        if is_current:
            return descriptor
    except (BlockingIOError, FileNotFoundError):
        pass
    except OSError:  # the file system has no locks: every process continues
        return descriptor
    os.close(descriptor)
    return None


def is_locked(root: str, key: str) -> bool | None:
    """Return whether a process holds the lock of `key` in `root`, or None if this is unknown.

    It is unknown on an object store, on a disk without locks, and if the file cannot be opened.
    """
    if "://" in root and not root.startswith("file://"):
        return None
    path = join(os.path.dirname(root.removeprefix("file://").rstrip("/")), "claims", key)
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return False
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
    finally:
        os.close(descriptor)
    return False
