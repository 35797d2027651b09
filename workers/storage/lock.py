"""Who computes a result: of several processes of a machine that want the same one, one does the
work and the others wait for it."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from workers.storage.artifact import join, make_dirs, share_file

if TYPE_CHECKING:
    from workers import dist  # start-up time: imports torch

POLL_S = 0.02
TOGETHER_S = 10.0  # how long ranks wait for rank 0 at a time: their collectives have a timeout


@contextmanager
def stage_lock(
    root: str, key: str, group: dist.Group | None = None, wait: bool = True
) -> Iterator[None]:
    """Holds the claim on the result `key` below `root`, which is freed when this process ends in
    whatever way. Ranks of a group hold it together. wait: else BlockingIOError where another
    process has it.

    It saves work and decides nothing: between machines whose disks know no common locks two may
    compute the same result, and one of them is discarded (see artifact.py). On an object store
    nothing is claimed: it has no lock that is freed when whoever held it dies, and one that runs
    out after a time would need clocks that agree and a writer that never stops; computing twice,
    now and then, costs less.
    """
    if "://" in root and not root.startswith("file://"):
        yield
        return
    is_first = group is None or group.rank == 0
    path = join(os.path.dirname(root.removeprefix("file://").rstrip("/")), "claims", key)
    held: int | None = None
    try:
        while True:
            until = time.monotonic() + (TOGETHER_S if wait else 0.0)
            while is_first and (held := _take(path)) is None and time.monotonic() < until:
                time.sleep(POLL_S)
            is_held = held is not None
            if group is not None:
                is_held = group.share(is_held)
            if is_held:
                break
            if not wait:
                raise BlockingIOError(f"another process has the claim on {key!r}")
        yield
    finally:
        if held is not None:
            with suppress(FileNotFoundError):
                os.unlink(path)
            os.close(held)


def _take(path: str) -> int | None:
    """An open, locked file; None where another process has it."""
    make_dirs(os.path.dirname(path))
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    with suppress(PermissionError):  # of another user, who has shared it already
        share_file(path)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if (
            os.stat(path).st_ino == os.fstat(file).st_ino
        ):  # else whoever had it has removed it since
            return file
    except (BlockingIOError, FileNotFoundError):
        pass
    except OSError:  # a disk without locks: everyone goes ahead
        return file
    os.close(file)
    return None
