"""Read byte ranges of files on disks, web servers and object stores."""

from __future__ import annotations

from typing import Protocol

from pyarrow import fs

from workers.data.cache import LocalFile
from workers.storage.artifact import resolve
from workers.storage.filesystem import retry, unwrap_filesystem
from workers.storage.hub_files import HubFile
from workers.storage.regular_file import regular_descriptor
from workers.storage.web import WebFile, is_web


class RangeFile(Protocol):
    """A file that is read in byte ranges."""

    @property
    def size(self) -> int:
        """Size of the file in bytes."""

    def read_at(self, size: int, offset: int) -> bytes:
        """Return `size` bytes at `offset`, or fewer at the end of the file. Thread-safe."""


class ObjectFile:
    """An object in an object store. Several threads can read it by offset at the same time.

    It is opened on the unwrapped file system, because through pyarrow's `PyFileSystem` the threads
    would read one after the other.
    """

    def __init__(self, system: fs.FileSystem, path: str):
        self.where = system.handler.where
        self.path = path
        bare = unwrap_filesystem(system)
        self.file = retry(lambda: bare.open_input_file(path), self.where, f"opening {path}")
        self.size = self.file.size()

    def read_at(self, size: int, offset: int) -> bytes:
        """See `RangeFile.read_at`."""
        count = min(size, self.size - offset)
        if count <= 0:
            return b""
        data: bytes = retry(
            lambda: self.file.read_at(count, offset), self.where, f"reading {self.path}"
        )
        return data


def open_range_file(uri: str) -> RangeFile:
    """Open a file on a disk, on the Hugging Face Hub or on a web server, or an object in a bucket.

    Raises:
        OSError: If the file cannot be opened.
        UserError: If the URI is refused, a package is missing, or a server supports no ranges.
    """
    if is_web(uri):
        return WebFile(uri)
    if uri.startswith("hf://"):
        return HubFile(uri)
    system, path = resolve(uri)
    if isinstance(system, fs.LocalFileSystem):
        return LocalFile(regular_descriptor(path))
    return ObjectFile(system, path)
