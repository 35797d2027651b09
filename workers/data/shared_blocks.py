"""Layout of the memory that a rank shares with its loader processes.

A block usually holds a step: one request per image, and the finished images. It consists of a
header, the borders of the chunks, the requests, the pixels, and data: image files that the rank has
read for its loaders. A block without requests can hold a serialized `ImageSpec` as its data. All
blocks are ranges of one anonymous file. The kernel frees the file when the last process closes it.
"""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workers.data.crops import ATTEMPTS
from workers.data.order import Ints

PAGE = mmap.ALLOCATIONGRANULARITY
# A message in the pipes: the first page of a block, and the number of a chunk. All messages have
# the same size, so that a read of this size returns exactly one.
TOKEN = struct.Struct("<II")
READY = 0xFFFFFFFF  # in place of a page: a loader has started
DIED = 0xFFFFFFFE  # in place of a page: a loader has exited, with the status of `os.wait`

HEADER = np.dtype(
    [
        ("num_bytes", "<u8"),  # size of the block
        ("spec_page", "<u4"),  # first page of the block with the `ImageSpec`
        ("spec_bytes", "<u4"),  # size of the `ImageSpec`
        ("num_requests", "<u4"),
        ("num_chunks", "<u4"),
        ("slot_bytes", "<u8"),  # size of the pixels of an image
        ("data_start", "<u8"),  # offset of the image files that the rank has read
    ]
)
REQUEST = np.dtype(
    [
        ("file", "<i4"),  # index in `ImageSpec.files`
        ("is_inline", "?"),  # whether the image file is in this block
        ("flip", "?"),  # whether the crop is mirrored
        ("is_made", "?"),  # set by the loader when the image is finished
        ("slot", "<u4"),  # index of the image in the step
        # Offset of the image file in its shard, or in the data of this block. For a kept picture:
        # offset of the pixels in the file of kept pictures.
        ("offset", "<u8"),
        ("size", "<u8"),  # size of the image file
        ("digest", "S64"),  # hexadecimal sha256 of the image file
        # Height and width of the pixels and of the original image. The rank sets them for a kept
        # picture, the loader for a decoded one.
        ("shape", "<u4", 4),
        # Random numbers of the crop, see `CropDraws`.
        ("sides", "<f8", (ATTEMPTS, 2)),
        ("corner", "<f8", 2),
    ]
)


def padded(num_bytes: int) -> int:
    """Round up to whole pages."""
    return -(-num_bytes // PAGE) * PAGE


class Block:
    """A block of shared memory, mapped into this process.

    Args:
        descriptor: File descriptor of the shared memory.
        page: First page of the block.
        num_bytes: Size of the block.
    """

    def __init__(self, descriptor: int, page: int, num_bytes: int):
        self.page = page
        self.num_bytes = num_bytes
        self.memory = mmap.mmap(descriptor, num_bytes, offset=page * PAGE)
        self.header = np.frombuffer(self.memory, HEADER, 1)

    @classmethod
    def open(cls, descriptor: int, page: int) -> Block:
        """Map a block with a header written by another process."""
        with mmap.mmap(descriptor, PAGE, offset=page * PAGE) as first:
            num_bytes = int(np.frombuffer(first[: HEADER.itemsize], HEADER)["num_bytes"][0])
        return cls(descriptor, page, num_bytes)

    @staticmethod
    def size(num_requests: int, slot_bytes: int, data_bytes: int = 0) -> int:
        """Return the size of a block in bytes."""
        return _images_start(num_requests) + padded(num_requests * slot_bytes) + padded(data_bytes)

    def lay_out(self, borders: Ints, slot_bytes: int) -> None:
        """Write the header and the borders of the chunks.

        Args:
            borders: First request of each chunk, and number of requests, (m + 1,).
            slot_bytes: Size of an image in bytes.
        """
        num_requests = int(borders[-1])
        self.header["num_bytes"] = self.num_bytes
        self.header["num_requests"] = num_requests
        self.header["num_chunks"] = len(borders) - 1
        self.header["slot_bytes"] = slot_bytes
        self.header["data_start"] = Block.size(num_requests, slot_bytes)
        self.borders[:] = borders

    def get(self, name: str) -> int:
        """Return a field of the header."""
        return int(self.header[name][0])

    @property
    def borders(self) -> NDArray[np.uint32]:
        """Borders of the m chunks, (m + 1,): requests of chunk c are borders[c] to borders[c + 1].

        The end borders[c + 1] is excluded.
        """
        count = self.get("num_chunks") + 1
        return np.frombuffer(self.memory, np.uint32, count, HEADER.itemsize)

    @property
    def requests(self) -> NDArray[Any]:
        """The requests, a structured array (n,) of type `REQUEST`."""
        count = self.get("num_requests")
        return np.frombuffer(self.memory, REQUEST, count, _requests_start(count))

    def pixels(self) -> NDArray[np.uint8]:
        """Return the pixels of all images, uint8 (n * slot_bytes,)."""
        count = self.get("num_requests")
        num_bytes = count * self.get("slot_bytes")
        return np.frombuffer(self.memory, np.uint8, num_bytes, _images_start(count))

    def data(self) -> memoryview:
        """Return the space for image files that the rank has read."""
        return memoryview(self.memory)[self.get("data_start") :]


def _requests_start(num_requests: int) -> int:
    borders = np.dtype(np.uint32).itemsize * (num_requests + 1)
    return HEADER.itemsize + -(-borders // 8) * 8


def _images_start(num_requests: int) -> int:
    return padded(_requests_start(num_requests) + num_requests * REQUEST.itemsize)


def make_memory_file() -> int:
    """Create an anonymous file, in memory if the system can, and return its descriptor."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("images", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
