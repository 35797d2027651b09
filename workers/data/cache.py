"""What a node keeps of the storage: shards and decoded images in one folder, each made once, shared by its processes, below a size."""

from __future__ import annotations

import fcntl
import io
import os
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import BinaryIO

from workers.errors import UserError

Write = Callable[[BinaryIO], None]


class Kept(io.FileIO):
    """A file of the cache, open for reading. As long as it is open it is in use, and is not deleted to make room."""

    def read_at(self, size: int, offset: int) -> bytes:
        """`size` bytes at `offset`, fewer at the end; thread-safe."""
        return os.pread(self.fileno(), size, offset)

    def __del__(self) -> None:
        self.close()  # whoever reads rows does not know when the last one is read


@dataclass(frozen=True)
class Cache:
    """folder: on a disk of this node. limit: bytes; what was not used for longest is deleted before it is passed, and never what is in use:
    if that alone is more, it is passed."""

    folder: str
    limit: int

    def kept(self, name: str, size: int, write: Write) -> Kept:
        """The file `name` of `size` bytes, which `write` fills where it is not there whole: one process of the node does, the others wait.
        Raises UserError where the disk has no room, and whatever `write` raises; then there is no file."""
        path = os.path.join(self.folder, name)
        with self._sentence(size):
            os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
            with _locked(f"{path}.lock"):
                found = _in_use(path, size) or self._made(path, size, write)
            os.utime(found.fileno(), ns=(time.time_ns(), os.fstat(found.fileno()).st_mtime_ns))  # from now on it is the one that was used last
        return found

    def forget(self, name: str) -> None:
        """Takes away a file that is not what it should be."""
        with suppress(FileNotFoundError):
            os.unlink(os.path.join(self.folder, name))

    def _made(self, path: str, size: int, write: Write) -> Kept:
        part = f"{path}.{uuid.uuid4().hex[:8]}.part"
        with _locked(os.path.join(self.folder, "room.lock")):
            self._make_room(size)
            descriptor = os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            fcntl.flock(descriptor, fcntl.LOCK_SH)  # held until it is closed: also under its later name
            os.truncate(descriptor, size)  # counted as a whole from now on
        found = Kept(descriptor)
        try:
            # Written as a file, not through a map: a full disk is then an error and not a SIGBUS.
            with open(part, "r+b") as stream:
                write(stream)
                if stream.tell() != size:
                    raise OSError(f"{stream.tell()} bytes were made of {size}")
                stream.flush()
                os.fsync(stream.fileno())  # its size was set before: after a machine went down nothing else tells that it is whole
            os.replace(part, path)
        except BaseException:
            found.close()
            os.unlink(part)
            raise
        return found

    def _make_room(self, size: int) -> None:
        """Deletes what processes that died left behind, and then what was used longest ago until `size` bytes more are below the limit."""
        files = sorted(self._files())
        total = sum(part for _, _, part in files) + size
        for _, path, part in sorted(files, key=lambda file: not file[1].endswith(".part")):
            if (total > self.limit or path.endswith(".part")) and _deleted(path):
                total -= part

    def _files(self) -> Iterator[tuple[int, str, int]]:
        """(when it was last used, path, bytes) of each file."""
        for folder, _, names in os.walk(self.folder):
            for name in names:
                if not name.endswith(".lock"):
                    with suppress(FileNotFoundError):
                        info = os.stat(os.path.join(folder, name))
                        yield info.st_atime_ns, os.path.join(folder, name), info.st_size

    @contextmanager
    def _sentence(self, size: int) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno is None:  # not of the disk: of the storage that a shard comes from
                raise
            raise UserError(f"shards and decoded images cannot be kept in {self.folder!r} ({error}); {size / 2**30:.2f} GiB are needed there: free the space, "
                            "name another folder in cluster.cache, or lower data.resident_mb so that images are not kept decoded") from None


@contextmanager
def _locked(path: str) -> Iterator[None]:
    with open(path, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # freed if this process dies
        yield


def _in_use(path: str, size: int) -> Kept | None:
    """The file, open; None where it is not there, or cut short by a machine that went down."""
    try:
        found = Kept(path)
    except FileNotFoundError:
        return None
    fcntl.flock(found.fileno(), fcntl.LOCK_SH)
    info = os.fstat(found.fileno())
    if info.st_nlink and info.st_size == size:  # else it was deleted before it was locked
        return found
    found.close()
    return None


def _deleted(path: str) -> bool:
    """Deletes a file unless somebody uses it."""
    with suppress(FileNotFoundError, BlockingIOError), open(path, "r+b") as file:  # a network disk locks only what may be written
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.unlink(path)
        return True
    return False
