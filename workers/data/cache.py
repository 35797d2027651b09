"""Files that a node copies from storage: parts of shards and decoded images.

They are in one folder with a size limit. Each is made once and shared by the node's processes.

A disk can silently return other bytes than were written. Therefore data are checked when they are
read: the records of shards against the index (`workers/data/reader.py`), decoded images against
checksums in their file (`Blocks`). Damaged data are made again.
"""

from __future__ import annotations

import errno
import fcntl
import io
import os
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from workers.errors import UserError
from workers.storage import filesystem

try:
    from isal.isal_zlib import crc32  # the same numbers as zlib's, at a tenth of the time
except ImportError:  # a machine with only the packages for training
    from zlib import crc32

Write = Callable[[BinaryIO], None]
CHECKSUM = np.dtype("<u4")  # CRC-32: against damage by a disk; a fraction of the time of sha256
FILLED = 0.9  # share of the limit that is kept after eviction, so that evictions are rare
GROWTH = 64 << 20  # bytes requested at once for a file of unknown size
_swept: set[str] = set()  # folders that this process has looked through


class LocalFile(io.FileIO):
    """A file that threads read by offset, closed when nobody has it any more.

    As long as a file of the cache is open it is in use, and is not deleted to make room.
    """

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return os.fstat(self.fileno()).st_size

    def read_at(self, size: int, offset: int) -> bytes:
        """`size` bytes at `offset`, fewer at the end; thread-safe."""
        return os.pread(self.fileno(), size, offset)

    def __del__(self) -> None:
        self.close()  # readers do not know which read is the last


@dataclass(frozen=True)
class Cache:
    """A folder of cached files with a size limit.

    Before the limit is exceeded, the least recently used files are deleted, but never files in use:
    if these alone exceed the limit, it is exceeded.

    `room.lock` contains the total size. The folder, which can have 100,000 files, is listed when
    the total passes the limit, and once in each process, which corrects the total.

    Args:
        folder: Folder on a disk of this node.
        limit: Size limit in bytes.
    """

    folder: str
    limit: int

    def path(self, name: str) -> str:
        """Path of the file `name`."""
        return os.path.join(self.folder, name)

    def open_file(self, name: str, size: int | None, write: Write, remedy: str = "") -> LocalFile:
        """Open a file of the cache, and let `write` fill it first if it is missing.

        One process of the node writes, the others wait. Errors of `write` are raised; then there is
        no file.

        Args:
            name: Name of the file.
            size: Size in bytes. None if only `write` knows it; then the caller checks that the file
                is complete.
            write: Fills the file.
            remedy: Further advice for the message about a full disk.

        Raises:
            UserError: If the disk has no room.
        """
        path = self.path(name)
        with self._explain_disk_errors(size, remedy):
            os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
            file = _open_in_use(path, size)
            if file is None:
                with _locked(f"{path}.lock", is_temporary=True):
                    file = _open_in_use(path, size) or self._create(path, size, write)
            # now it is the most recently used file
            modified = os.fstat(file.fileno()).st_mtime_ns
            os.utime(file.fileno(), ns=(time.time_ns(), modified))
        return file

    def read(self, name: str, offset: int, size: int) -> bytes | None:
        """Read a part of a file. Return None when it made room for others, or its disk failed."""
        path = self.path(name)
        try:
            with LocalFile(path) as file:
                return file.read_at(size, offset)
        except FileNotFoundError:
            return None
        except OSError as error:
            filesystem.notify(
                f"cache: {path} cannot be read ({error.strerror}), and is fetched again; "
                "look after that disk if this comes again"
            )
            self.forget(name)
            return None

    def bad_disk(self, problem: str = "gives back other bytes than were written") -> UserError:
        """Return the error for a disk that does not keep its data."""
        return UserError(
            f"the disk of {self.folder!r} {problem}; name another folder in cluster.cache"
        )

    def forget(self, name: str) -> None:
        """Delete a file, if it exists."""
        with suppress(FileNotFoundError):
            os.unlink(self.path(name))

    def clear(self) -> int:
        """Delete all files except those being written; return the number of these.

        Readers of a deleted file can continue: it disappears when no process has it open.
        """
        num_written = 0
        for _, path, _ in list(self._files()):
            if not path.endswith(".part"):
                with suppress(FileNotFoundError):
                    os.unlink(path)
            elif not _delete_unused(path):
                num_written += os.path.exists(path)
        return num_written

    def _create(self, path: str, size: int | None, write: Write) -> LocalFile:
        part = f"{path}.{uuid.uuid4().hex[:8]}.part"
        with _locked(self.path("room.lock")) as room:
            self._reserve(room, size or 0)
            file = LocalFile(os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
            # held until it is closed: also under its later name
            fcntl.flock(file.fileno(), fcntl.LOCK_SH)
        try:
            if size is not None:
                os.truncate(file.fileno(), size)  # looks count it as a whole from now on
            # Written as a file, not through a map: a full disk is then an error and not a SIGBUS.
            with GrowingFile(part, size, self._grow) as stream:
                write(stream)
                if size is not None and stream.tell() != size:
                    raise OSError(f"{stream.tell()} bytes were made of {size}")
            os.replace(part, path)
        except BaseException:
            file.close()
            os.unlink(part)
            raise
        return file

    def _grow(self, size: int) -> None:
        """Count `size` more bytes of a file that is being written."""
        with _locked(self.path("room.lock")) as room:
            self._reserve(room, size)

    def _reserve(self, room: BinaryIO, size: int) -> None:
        """Count `size` more bytes in `room`, the locked file with the total size.

        The size of a file that failed or was deleted elsewhere stays counted until the next
        listing.
        """
        room.seek(0)
        text = room.read()
        used = int(text) if text.isdigit() else self.limit
        if self.folder not in _swept or used + size > self.limit:
            used = self._make_room(size)
            _swept.add(self.folder)
        room.seek(0)
        room.truncate()
        room.write(b"%d" % (used + size))

    def _make_room(self, size: int) -> int:
        """Make room for `size` bytes below the limit; return the bytes of the remaining files.

        Leftovers of dead processes are deleted. If the limit is exceeded, the least recently used
        files are deleted until FILLED of the limit remains.
        """
        files = sorted(self._files(), key=lambda file: (not file[1].endswith(".part"), file[0]))
        used = sum(part for _, _, part in files)
        most = self.limit - size
        if used > most:
            most = min(most, int(FILLED * self.limit))
        for _, path, part in files:
            if (used > most or path.endswith(".part")) and _delete_unused(path):
                used -= part
        return used

    def _files(self) -> Iterator[tuple[int, str, int]]:
        """(when it was last used, path, bytes) of each file."""
        for folder, _, names in os.walk(self.folder):
            for name in names:
                if not name.endswith(".lock"):
                    with suppress(FileNotFoundError):
                        info = os.stat(os.path.join(folder, name))
                        yield info.st_atime_ns, os.path.join(folder, name), info.st_size

    @contextmanager
    def _explain_disk_errors(self, size: int | None, remedy: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno is None:  # not of the disk: of the storage that a shard comes from
                raise
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise UserError(
                    f"shards and decoded images cannot be kept in {self.folder!r} ({error}); "
                    "fix its permissions or its disk, or name another folder in cluster.cache"
                ) from None
            remedies = (
                f"free some there, lower cluster.cache_gb ({self.limit / 2**30:g} now) to what "
                "that disk can hold, or name another folder in cluster.cache"
            )
            if remedy:
                remedies += f", or {remedy}"
            amount = "more" if size is None else f"{size:,} bytes more of"
            raise UserError(
                f"the disk of {self.folder!r} has no room for {amount} shards and decoded images "
                f"({error.strerror}); {remedies}"
            ) from None


class GrowingFile(io.BufferedRandom):
    """A file that is being written; if its size is unknown, room is made for it as it grows.

    Args:
        grow: Makes room for a number of further bytes.
    """

    def __init__(self, path: str, size: int | None, grow: Callable[[int], None]):
        super().__init__(io.FileIO(path, "r+"))
        self.limit = size
        self.grow = grow
        self.room = 0

    def write(self, data: Any, /) -> int:
        """Write bytes; see `io.BufferedIOBase.write`."""
        count = super().write(data)
        if self.limit is None and self.tell() > self.room:
            self.grow(GROWTH)
            self.room += GROWTH
        return count


class Blocks:
    """Rows of bytes in a file of the cache, followed by the checksum of each row.

    A row is checked when this process first reads it; a damaged one is made again and replaced.
    """

    def __init__(
        self,
        cache: Cache | None,
        file: LocalFile,
        start: int,
        borders: NDArray[np.int64],
        make: Callable[[int], NDArray[np.uint8]],
    ):
        """Open the rows of a file.

        Args:
            cache: The cache, for repairs.
            file: The file.
            start: Byte offset of the first row.
            borders: Begin of each row relative to `start`, and end of the last row, (n + 1,).
            make: Returns a row, to replace a damaged one.
        """
        self.cache = cache
        self.file = file
        self.start = start
        self.borders = borders
        self.make = make
        num_rows = len(borders) - 1
        self.nbytes = int(borders[-1])
        # Plain arrays: slicing them costs a tenth of slicing a `np.memmap`.
        self.data = np.asarray(np.memmap(file, np.uint8, "r", start, (self.nbytes,)))
        checksums = np.memmap(file, CHECKSUM, "r", start + self.nbytes, (num_rows,))
        self.checksums = np.asarray(checksums)
        self.checked = np.zeros(num_rows, bool)

    @staticmethod
    def size(shape: tuple[int, ...]) -> int:
        """Bytes of shape[0] rows of shape[1:] bytes, and of their checksums."""
        return int(np.prod(shape)) + shape[0] * CHECKSUM.itemsize

    @staticmethod
    def write(stream: BinaryIO, rows: Iterator[NDArray[np.uint8]]) -> None:
        """Write the rows, and then their checksums.

        The checksums wait for the disk. If the machine crashes, lost rows are made one by one.
        """
        checksums = []
        for row in rows:
            data = np.ascontiguousarray(row).data
            checksums.append(crc32(data))
            stream.write(data)
        stream.write(np.array(checksums, CHECKSUM).tobytes())
        stream.flush()
        os.fsync(stream.fileno())

    def verify(self, rows: NDArray[np.int64]) -> None:
        """Check some rows, and repair them.

        Raises:
            UserError: If the disk cannot store them.
        """
        bad = [
            row for row in np.unique(rows[~self.checked[rows]]).tolist() if not self._is_whole(row)
        ]
        if bad:
            assert self.cache is not None, "memory keeps what is written"
            filesystem.notify(
                f"cache: {len(bad)} decoded images in {self.cache.folder} are not what was "
                "written there, and are "
                "made again; look after that disk if this comes again"
            )
        for row in bad:
            self._mend(row)
        self.checked[rows] = True

    def row(self, row: int) -> NDArray[np.uint8]:
        """The bytes of a row, (borders[row + 1] - borders[row],); they are not verified."""
        return self.data[self.borders[row] : self.borders[row + 1]]

    def _is_whole(self, row: int) -> bool:
        return crc32(self.row(row).data) == int(self.checksums[row])

    def _mend(self, row: int) -> None:
        assert self.cache is not None
        data = np.ascontiguousarray(self.make(row)).tobytes()
        try:
            os.pwrite(self.file.fileno(), data, self.start + int(self.borders[row]))
            os.pwrite(
                self.file.fileno(),
                np.array(crc32(data), CHECKSUM).tobytes(),
                self.start + self.nbytes + row * CHECKSUM.itemsize,
            )
        except OSError:
            raise self.cache.bad_disk() from None
        if self.row(row).tobytes() != data or not self._is_whole(row):
            raise self.cache.bad_disk()


@contextmanager
def _locked(path: str, is_temporary: bool = False) -> Iterator[BinaryIO]:
    """Context manager that locks a file, which is created first. The lock ends with the process.

    Args:
        path: Path of the file.
        is_temporary: Delete the file afterwards. Waiting processes then use a new file.
    """
    while True:
        with open(path, "a+b") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not os.fstat(lock.fileno()).st_nlink:
                continue
            try:
                yield lock
            finally:
                if is_temporary:
                    os.unlink(path)
            return


def _open_in_use(path: str, size: int | None) -> LocalFile | None:
    """Open a file and mark it as used.

    Args:
        path: Path of the file.
        size: Expected size. None: any size except 0.

    Returns:
        The file, or None if it is missing or has another size, for example after a crash.
    """
    try:
        file = LocalFile(path, "r+")
    except FileNotFoundError:
        return None
    fcntl.flock(file.fileno(), fcntl.LOCK_SH)
    info = os.fstat(file.fileno())
    is_whole = info.st_size > 0 if size is None else info.st_size == size
    if info.st_nlink and is_whole:  # else it was deleted before it was locked
        return file
    file.close()
    return None


def _delete_unused(path: str) -> bool:
    """Delete a file unless a process uses it; return whether it was deleted."""
    with (
        suppress(FileNotFoundError, BlockingIOError),
        open(path, "r+b") as file,
    ):  # a network disk locks only writable files
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.unlink(path)
        return True
    return False
