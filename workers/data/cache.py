"""Cache of a node: files with parts of shards, with decoded images and with sample tables.

The files are in one folder (`cluster.cache`) with a size limit (`cluster.cache_gb`). Each file is
written once, and is shared by the processes of the node.

A disk can silently return other bytes than were written. Therefore data are verified when they are
read: the records of shards against the index (`workers/data/reader.py`), decoded images against
checksums in their file (`Blocks`), sample tables against a checksum when they are opened
(`workers/data/rows.py`). Damaged data are fetched or made again.
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
    from isal.isal_zlib import crc32  # same results as zlib's, in a tenth of the time
except ImportError:  # a machine that only trains may lack isal
    from zlib import crc32

Write = Callable[[BinaryIO], None]
CHECKSUM = np.dtype("<u4")  # type of a CRC-32, which detects disk errors and is faster than sha256
FILLED = 0.9  # share of the limit that remains used after an eviction; makes evictions rare
CHECKED_BYTES = 1 << 20  # bytes read at a time to compute a checksum
GROWTH = 64 << 20  # bytes reserved at a time for a file of unknown size
_swept: set[str] = set()  # folders that this process has listed once; see `Cache`
# Device, inode and time of the files whose checksum this process has verified.
_verified: set[tuple[int, int, int]] = set()


class CacheUnavailable(UserError):
    """The disk of the cache is full, cannot be read or written, or damages data."""


class LocalFile(io.FileIO):
    """A local file that threads read by offset. It is closed when it is garbage-collected.

    A file from `Cache.open_file` is in use while it is open, and is not evicted.
    """

    @property
    def size(self) -> int:
        """Size of the file in bytes."""
        return os.fstat(self.fileno()).st_size

    def read_at(self, size: int, offset: int) -> bytes:
        """Return `size` bytes at `offset`, or fewer at the end of the file. Thread-safe."""
        return os.pread(self.fileno(), size, offset)

    def __del__(self) -> None:
        self.close()  # here, because no reader knows which read is the last


@dataclass(frozen=True)
class Cache:
    """A folder of cached files with a size limit.

    If a new file would exceed the limit, the least recently used files are deleted first. Files in
    use are never deleted, so the folder exceeds the limit if these files alone are larger.

    The file `room.lock` contains the total size. The folder can have 100,000 files, so it is listed
    only once per process, and if the total exceeds the limit. Listing corrects the total.

    Args:
        folder: Folder on a disk of this node.
        limit: Size limit in bytes.
    """

    folder: str
    limit: int

    def path(self, name: str) -> str:
        """Return the path of the file `name`."""
        return os.path.join(self.folder, name)

    def open_file(self, name: str, size: int | None, write: Write, remedy: str = "") -> LocalFile:
        """Open a file of the cache. If it is missing, `write` first creates its content.

        One process of the node writes the file, and the other processes wait. If `write` raises an
        error, no file is left.

        Args:
            name: Name of the file.
            size: Size in bytes. None if only `write` knows the size: then the caller must check
                that the file is complete.
            write: Function that writes the content to a stream.
            remedy: Further advice for the message about a full disk.

        Raises:
            CacheUnavailable: If the disk is full, or cannot be read or written.
        """
        path = self.path(name)
        with self._explain_disk_errors(size, remedy):
            os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
            file = _open_in_use(path, size)
            if file is None:
                with _lock_file(f"{path}.lock", is_temporary=True):
                    file = _open_in_use(path, size) or self._create(path, size, write)
            # mark the file as the most recently used one
            modified = os.fstat(file.fileno()).st_mtime_ns
            os.utime(file.fileno(), ns=(time.time_ns(), modified))
        return file

    def open_checked_file(self, name: str, write: Write) -> LocalFile:
        """Open a file that ends with its checksum. If it is missing or damaged, write it.

        Args:
            name: Name of the file.
            write: Function that writes the content through a `SummedFile`.

        Raises:
            CacheUnavailable: As for `open_file`, or if the disk does not return the written data.
        """
        for _ in range(2):
            file = self.open_file(name, None, write)
            if is_whole(file):
                return file
            filesystem.notify(
                f"cache: {self.path(name)} differs from the written data, and is written again; "
                "check that disk if this repeats"
            )
            with suppress(FileNotFoundError):
                # unless another process has written it again
                if os.stat(self.path(name)).st_ino == os.fstat(file.fileno()).st_ino:
                    self.forget(name)
        raise self.make_disk_error()

    def read(self, name: str, offset: int, size: int) -> bytes | None:
        """Read a part of a file. Return None if the file was evicted, or the disk cannot read it.

        A file that cannot be read is deleted.
        """
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

    def make_disk_error(
        self, problem: str = "gives back other bytes than were written"
    ) -> CacheUnavailable:
        """Return the error for a disk that does not return the written data."""
        return CacheUnavailable(
            f"the disk of {self.folder!r} {problem}; name another folder in cluster.cache"
        )

    def forget(self, name: str) -> None:
        """Delete a file, if it exists."""
        with suppress(FileNotFoundError):
            os.unlink(self.path(name))

    def clear(self) -> int:
        """Delete all files except those that are being written.

        A process that has a deleted file open can still read it.

        Returns:
            Number of files that are being written, which are kept.
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
        with _lock_file(self.path("room.lock")) as room:
            self._reserve(room, size or 0)
            file = LocalFile(os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
            # the lock is held until the file is closed, also after it is renamed
            fcntl.flock(file.fileno(), fcntl.LOCK_SH)
        try:
            if size is not None:
                os.truncate(file.fileno(), size)  # so that a listing counts the final size
            # A file, not a memory map: writing to a full disk raises OSError and not SIGBUS.
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
        """Count `size` more bytes for a file of unknown size that is being written."""
        with _lock_file(self.path("room.lock")) as room:
            self._reserve(room, size)

    def _reserve(self, room: BinaryIO, size: int) -> None:
        """Count `size` more bytes in `room`, the locked file with the total size.

        The size of a file that failed or was deleted elsewhere stays counted until the next
        listing.
        """
        room.seek(0)
        text = room.read()
        used = int(text) if text.isdigit() else self.limit  # an unknown total counts as full
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
        """Yield the time of the last use, the path and the bytes of each file except locks."""
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
            if error.errno is None:  # an error of the storage of a shard, not of this disk
                raise
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise CacheUnavailable(
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
            raise CacheUnavailable(
                f"the disk of {self.folder!r} has no room for {amount} shards and decoded images "
                f"({error.strerror}); {remedies}"
            ) from None


class GrowingFile(io.BufferedRandom):
    """A file that is being written. If its size is unknown, it reserves room as it grows.

    Args:
        path: Path of the existing file.
        size: Final size in bytes, or None if it is unknown.
        grow: Function that reserves room for a number of further bytes.
    """

    def __init__(self, path: str, size: int | None, grow: Callable[[int], None]):
        super().__init__(io.FileIO(path, "r+"))
        self.limit = size
        self.grow = grow
        self.room = 0

    def write(self, data: Any, /) -> int:
        """Write bytes; see `io.BufferedIOBase.write`."""
        missing = self.tell() + memoryview(data).nbytes - self.room
        if self.limit is None and missing > 0:
            size = -(-missing // GROWTH) * GROWTH
            self.grow(size)
            self.room += size
        return super().write(data)


class SummedFile(io.RawIOBase):
    """Passes writes on to a file, and computes the checksum of the written bytes."""

    def __init__(self, file: BinaryIO):
        self.file = file
        self.checksum = 0

    def writable(self) -> bool:
        """Return True."""
        return True

    def write(self, data: Any, /) -> int:
        """Write bytes; see `io.RawIOBase.write`."""
        self.checksum = crc32(data, self.checksum)
        return self.file.write(data)

    def write_checksum(self) -> None:
        """Append the checksum; see `is_whole`."""
        self.file.write(np.array(self.checksum, CHECKSUM).tobytes())


def is_whole(file: LocalFile) -> bool:
    """Return whether a file ends with the checksum of its other bytes; see `SummedFile`.

    A process computes the checksum of a file once. The file is read in parts and not mapped,
    because mapped pages would count as memory of this process.
    """
    info = os.fstat(file.fileno())
    identity = (info.st_dev, info.st_ino, info.st_mtime_ns)
    if identity in _verified:
        return True
    end = info.st_size - CHECKSUM.itemsize
    checksum = 0
    try:
        for start in range(0, end, CHECKED_BYTES):
            checksum = crc32(file.read_at(min(CHECKED_BYTES, end - start), start), checksum)
        stored = file.read_at(CHECKSUM.itemsize, max(0, end))
    except OSError:  # the disk cannot read it
        return False
    if end <= 0 or stored != np.array(checksum, CHECKSUM).tobytes():
        return False
    _verified.add(identity)
    return True


class Blocks:
    """Rows of bytes in a file of the cache or in memory, followed by a checksum of each row.

    A row is, for example, a decoded image. `verify` checks each row once in this process. A damaged
    row is made again and replaced.
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
            cache: The cache of the file. None: the file is in memory, where no row is damaged.
            file: The file.
            start: Byte offset of the first row.
            borders: Start of each row relative to `start`, and end of the last row, (n + 1,).
            make: Function that makes the bytes of a row again, to replace a damaged row.
        """
        self.cache = cache
        self.file = file
        self.start = start
        self.borders = borders
        self.make = make
        num_rows = len(borders) - 1
        self.nbytes = int(borders[-1])
        # Plain arrays, because slicing an `np.memmap` takes ten times as long.
        self.data = np.asarray(np.memmap(file, np.uint8, "r", start, (self.nbytes,)))
        checksums = np.memmap(file, CHECKSUM, "r", start + self.nbytes, (num_rows,))
        self.checksums = np.asarray(checksums)
        self.checked = np.zeros(num_rows, bool)

    @staticmethod
    def size(shape: tuple[int, ...]) -> int:
        """Return the bytes of shape[0] rows, with shape[1:] bytes each, and of their checksums."""
        return int(np.prod(shape)) + shape[0] * CHECKSUM.itemsize

    @staticmethod
    def write(stream: BinaryIO, rows: Iterator[NDArray[np.uint8]]) -> None:
        """Write the rows, and then their checksums.

        The function returns when the data are on the disk (`fsync`). If rows are lost when the
        machine crashes, `verify` finds them by their checksums.
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
        """Check the rows with these indices, and repair damaged rows.

        Raises:
            UserError: If the disk does not store the repaired rows.
        """
        bad = [
            row for row in np.unique(rows[~self.checked[rows]]).tolist() if not self._is_whole(row)
        ]
        if bad:
            assert self.cache is not None, "memory keeps what is written"
            filesystem.notify(
                f"cache: {len(bad)} decoded images in {self.cache.folder} differ from "
                "the written data, and are decoded again; check that disk if this repeats"
            )
        for row in bad:
            self._mend(row)
        self.checked[rows] = True

    def row(self, row: int) -> NDArray[np.uint8]:
        """Return the bytes of a row, (borders[row + 1] - borders[row],), without verification."""
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
            raise self.cache.make_disk_error() from None
        if self.row(row).tobytes() != data or not self._is_whole(row):
            raise self.cache.make_disk_error()


@contextmanager
def _lock_file(path: str, is_temporary: bool = False) -> Iterator[BinaryIO]:
    """Context manager that locks a file, and creates it if it is missing.

    If the process dies, the lock is released.

    Args:
        path: Path of the file.
        is_temporary: Delete the file afterwards. Waiting processes then lock a new file.
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
    """Open a file with a shared lock, which marks it as in use until it is closed.

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
    if info.st_nlink and is_whole:  # without links, it was deleted before it was locked
        return file
    file.close()
    return None


def _delete_unused(path: str) -> bool:
    """Delete a file unless a process has it in use; return whether it was deleted."""
    with (
        suppress(FileNotFoundError, BlockingIOError),
        open(path, "r+b") as file,
    ):  # opened for writing, because a network disk locks only writable files
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.unlink(path)
        return True
    return False
