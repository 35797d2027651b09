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
# files that this process found to be what they should be
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
        """The file `name` of `size` bytes, which `write` fills where it is not there whole: one
        process of the node does, the others wait. sha256: what the file must hold; one that holds
        anything else is made again. Raises UserError where the disk has no room, or gives back
        other bytes than were written, and whatever `write` raises; then there is no file."""
        path = os.path.join(self.folder, name)
        for _ in range(3):
            with self._explain_disk_errors(size):
                os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
                with _locked(f"{path}.lock"):
                    found = _open_in_use(path, size) or self._create(path, size, write)
                # from now on it is the one that was used last
                os.utime(found.fileno(), ns=(time.time_ns(), os.fstat(found.fileno()).st_mtime_ns))
                if not sha256 or _has_digest(found, sha256):
                    return found
            found.close()
            filesystem.notify(
                f"cache: {path} is not what was written there, and is made again; look after "
                "that disk if this "
                "comes again"
            )
            self.forget(name)
        raise self.bad_disk()

    def bad_disk(self) -> UserError:
        """What is raised where a disk cannot be relied on."""
        return UserError(
            f"the disk of {self.folder!r} gives back other bytes than were written; name "
            "another folder in "
            "cluster.cache"
        )

    def forget(self, name: str) -> None:
        """Takes away a file that is not what it should be."""
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
        found = CachedFile(descriptor)
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
            found.close()
            os.unlink(part)
            raise
        return found

    def _make_room(self, size: int) -> None:
        """Deletes what processes that died left behind, and then what was used longest ago until
        `size` bytes more are below the limit."""
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
    """Rows of bytes in a file of the cache, behind them the sha256 of each. A row is checked when
    it is first read here; a damaged one is made again, and written into its place."""

    def __init__(
        self,
        cache: Cache,
        file: CachedFile,
        start: int,
        shape: tuple[int, ...],
        make: Callable[[int], NDArray[np.uint8]],
    ):
        """start: where the first of shape[0] rows of shape[1:] bytes begins. make: gives what row i
        should be."""
        self.cache, self.file, self.start, self.make = cache, file, start, make
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
        return int(self.rows.nbytes)

    def __getitem__(self, rows: NDArray[np.int64]) -> NDArray[np.uint8]:
        """These rows, as they were written. Raises UserError where the disk does not keep them."""
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
        return hashlib.sha256(self.rows[row].data).digest() == self.digests[row].tobytes()

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
    """Whether a file holds what it should; each is read once in a process."""
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
    """The file, open; None where it is not there, or cut short by a machine that went down."""
    try:
        found = CachedFile(path, "r+")
    except FileNotFoundError:
        return None
    fcntl.flock(found.fileno(), fcntl.LOCK_SH)
    info = os.fstat(found.fileno())
    if info.st_nlink and info.st_size == size:  # else it was deleted before it was locked
        return found
    found.close()
    return None


def _delete_unused(path: str) -> bool:
    """Deletes a file unless somebody uses it."""
    with (
        suppress(FileNotFoundError, BlockingIOError),
        open(path, "r+b") as file,
    ):  # a network disk locks only what may be written
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.unlink(path)
        return True
    return False
