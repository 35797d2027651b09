"""Files that a node copies from storage: shards and decoded images in one folder below a size
limit, each made once and shared by the node's processes.

A disk may silently return other bytes than were written. Therefore files have digests, which a
process checks when it first reads them: a shard as a whole (`Cache.open_file`), decoded images one
by one (`Blocks`). What is damaged is made again.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import os
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from workers.errors import UserError
from workers.storage import filesystem

Write = Callable[[BinaryIO], None]
PIECE = 16 << 20  # bytes that are hashed at a time
DIGEST = hashlib.sha256().digest_size
# (device, inode, time of change) of files whose digest this process has checked
_checked: set[tuple[int, int, int]] = set()


class CachedFile(io.FileIO):
    """A file of the cache, open for reading. As long as it is open it is in use, and is not deleted
    to make room."""

    def read_at(self, size: int, offset: int) -> bytes:
        """`size` bytes at `offset`, fewer at the end; thread-safe."""
        return os.pread(self.fileno(), size, offset)

    def __del__(self) -> None:
        self.close()  # whoever reads rows does not know when the last one is read


@dataclass(frozen=True)
class Cache:
    """folder: on a disk of this node. limit: bytes; what was not used for longest is deleted before
    it is passed, and never what is in use: if that alone is more, it is passed."""

    folder: str
    limit: int

    def open_file(self, name: str, size: int, write: Write, sha256: str = "") -> CachedFile:
        """Open the file `name` of `size` bytes; `write` fills it first where it is missing.

        One process of the node writes, the others wait. sha256: digest of the contents; a file with
        another one is made again. Raise `UserError` when the disk has no room, or returns other
        bytes than were written. What `write` raises goes through; then there is no file.
        """
        path = os.path.join(self.folder, name)
        for _ in range(3):
            with self._explain_disk_errors(size):
                os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
                with _locked(f"{path}.lock"):
                    file = _open_in_use(path, size) or self._create(path, size, write)
                # from now on it is the file that was used last
                modified = os.fstat(file.fileno()).st_mtime_ns
                os.utime(file.fileno(), ns=(time.time_ns(), modified))
                if not sha256 or _has_digest(file, sha256):
                    return file
            file.close()
            filesystem.notify(
                f"cache: {path} is not what was written there, and is made again; look after "
                "that disk if this "
                "comes again"
            )
            self.forget(name)
        raise self.bad_disk()

    def bad_disk(self) -> UserError:
        """The error for a disk that returns other bytes than were written."""
        return UserError(
            f"the disk of {self.folder!r} gives back other bytes than were written; name "
            "another folder in cluster.cache"
        )

    def forget(self, name: str) -> None:
        """Delete a file, if it exists."""
        with suppress(FileNotFoundError):
            os.unlink(os.path.join(self.folder, name))

    def _create(self, path: str, size: int, write: Write) -> CachedFile:
        part = f"{path}.{uuid.uuid4().hex[:8]}.part"
        with _locked(os.path.join(self.folder, "room.lock")):
            self._make_room(size)
            descriptor = os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            # held until it is closed: also under its later name
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            os.truncate(descriptor, size)  # counted as a whole from now on
        file = CachedFile(descriptor)
        try:
            # Written as a file, not through a map: a full disk is then an error and not a SIGBUS.
            with open(part, "r+b") as stream:
                write(stream)
                if stream.tell() != size:
                    raise OSError(f"{stream.tell()} bytes were made of {size}")
                stream.flush()
                # its size was set before: after a machine went down nothing else tells that it is
                # whole
                os.fsync(stream.fileno())
            os.replace(part, path)
        except BaseException:
            file.close()
            os.unlink(part)
            raise
        return file

    def _make_room(self, size: int) -> None:
        """Make room for `size` bytes below the limit.

        Delete what dead processes left behind, then the files that were used longest ago.
        """
        files = sorted(self._files())
        total = sum(part for _, _, part in files) + size
        for _, path, part in sorted(files, key=lambda file: not file[1].endswith(".part")):
            if (total > self.limit or path.endswith(".part")) and _delete_unused(path):
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
    def _explain_disk_errors(self, size: int) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno is None:  # not of the disk: of the storage that a shard comes from
                raise
            raise UserError(
                f"shards and decoded images cannot be kept in {self.folder!r} ({error}); "
                f"{size / 2**30:.2f} GiB are needed there: free the space, "
                "name another folder in cluster.cache, or lower data.resident_mb so that images "
                "are not kept decoded"
            ) from None


class Blocks:
    """Rows of bytes in a file of the cache, followed by the sha256 of each row.

    A row is checked when this process first reads it; a damaged one is made again and replaced.
    """

    def __init__(
        self,
        cache: Cache,
        file: CachedFile,
        start: int,
        shape: tuple[int, ...],
        make: Callable[[int], NDArray[np.uint8]],
    ):
        """start: byte offset of the first of shape[0] rows of shape[1:] bytes. make: returns a row,
        to replace a damaged one."""
        self.cache = cache
        self.file = file
        self.start = start
        self.make = make
        self.rows = np.memmap(file, np.uint8, "r", start, shape)
        self.digests = np.memmap(file, np.uint8, "r", start + self.rows.nbytes, (shape[0], DIGEST))
        self.checked = np.zeros(shape[0], bool)

    @staticmethod
    def size(shape: tuple[int, ...]) -> int:
        """Bytes of the rows and their digests."""
        return int(np.prod(shape)) + shape[0] * DIGEST

    @staticmethod
    def write(stream: BinaryIO, rows: Iterator[NDArray[np.uint8]]) -> None:
        """Writes the rows, and then their digests."""
        digests = []
        for row in rows:
            data = np.ascontiguousarray(row).data
            digests.append(hashlib.sha256(data).digest())
            stream.write(data)
        stream.write(b"".join(digests))

    @property
    def nbytes(self) -> int:
        """Bytes of the rows, without digests."""
        return int(self.rows.nbytes)

    def __getitem__(self, rows: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Read some rows, verified. Raise `UserError` when the disk cannot hold them."""
        bad = [
            row for row in np.unique(rows[~self.checked[rows]]).tolist() if not self._is_whole(row)
        ]
        if bad:
            filesystem.notify(
                f"cache: {len(bad)} decoded images in {self.cache.folder} are not what was "
                "written there, and are "
                "made again; look after that disk if this comes again"
            )
        for row in bad:
            self._mend(row)
        self.checked[rows] = True
        return np.asarray(self.rows[rows])

    def _is_whole(self, row: int) -> bool:
        expected: bytes = self.digests[row].tobytes()
        return hashlib.sha256(self.rows[row].data).digest() == expected

    def _mend(self, row: int) -> None:
        data = np.ascontiguousarray(self.make(row)).tobytes()
        try:
            os.pwrite(self.file.fileno(), data, self.start + row * len(data))
            os.pwrite(
                self.file.fileno(),
                hashlib.sha256(data).digest(),
                self.start + self.nbytes + row * DIGEST,
            )
        except OSError:
            raise self.cache.bad_disk() from None
        if self.rows[row].tobytes() != data or not self._is_whole(row):
            raise self.cache.bad_disk()


def _has_digest(file: CachedFile, sha256: str) -> bool:
    """Whether a file has this digest; a process reads each file once to know."""
    info = os.fstat(file.fileno())
    identity = (info.st_dev, info.st_ino, info.st_mtime_ns)
    if identity not in _checked:
        digest, at = hashlib.sha256(), 0
        while piece := file.read_at(PIECE, at):
            digest.update(piece)
            at += len(piece)
        if digest.hexdigest() != sha256:
            return False
        _checked.add(identity)
    return True


@contextmanager
def _locked(path: str) -> Iterator[None]:
    with open(path, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # freed if this process dies
        yield


def _open_in_use(path: str, size: int) -> CachedFile | None:
    """Open a file and mark it as used. Return None when it is missing or has another size, as after
    a crash of the machine."""
    try:
        file = CachedFile(path, "r+")
    except FileNotFoundError:
        return None
    fcntl.flock(file.fileno(), fcntl.LOCK_SH)
    info = os.fstat(file.fileno())
    if info.st_nlink and info.st_size == size:  # else it was deleted before it was locked
        return file
    file.close()
    return None


def _delete_unused(path: str) -> bool:
    """Delete a file unless a process uses it; return whether it was deleted."""
    with (
        suppress(FileNotFoundError, BlockingIOError),
        open(path, "r+b") as file,
    ):  # a network disk locks only what may be written
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.unlink(path)
        return True
    return False
