"""Blocks of memory that a rank shares with its loader processes.

A block holds the requests of a step, one per image, and the images that are made of them. It is a
range of one anonymous file, which is gone with the last process that has it open.
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
# What is sent through the pipes: the page where a block begins, and the number of a chunk in it.
# All tokens have this size, so that a read gives a whole one.
TOKEN = struct.Struct("<II")
READY = 0xFFFFFFFF  # instead of a page: a loader has started
DIED = 0xFFFFFFFE  # instead of a page: a loader has ended, with the status of `os.wait`

HEADER = np.dtype(
    [
        ("num_bytes", "<u8"),  # of the block
        ("recipe_page", "<u4"),  # block with the `Recipe`
        ("recipe_bytes", "<u4"),
        ("num_requests", "<u4"),
        ("num_chunks", "<u4"),
        ("slot_bytes", "<u8"),  # of the pixels of an image
        ("data_start", "<u8"),  # of the bytes that the rank has read itself
    ]
)
REQUEST = np.dtype(
    [
        ("file", "<i4"),  # index into the files of the recipe
        ("is_here", "?"),  # whether the bytes lie in this block
        ("flip", "?"),
        ("is_made", "?"),  # set by the loader
        ("slot", "<u4"),  # where the image belongs
        ("offset", "<u8"),  # of its bytes: in the file, or in this block
        ("size", "<u8"),
        ("digest", "S64"),  # hexadecimal sha256 of the bytes
        # Height and width of the pixels and of the original: of a kept picture, or set by the
        # loader for one that it decoded.
        ("shape", "<u4", 4),
        ("sides", "<f8", (ATTEMPTS, 2)),  # see `CropDraws`
        ("corner", "<f8", 2),
    ]
)


def padded(num_bytes: int) -> int:
    """Return the bytes of the whole pages that `num_bytes` take."""
    return -(-num_bytes // PAGE) * PAGE


class Block:
    """A block of shared memory.

    Attributes:
        header: One `HEADER`.
        borders: (m + 1,) Chunk c has the requests borders[c] to borders[c + 1].
        requests: (n,) of `REQUEST`.
    """

    def __init__(self, descriptor: int, page: int, num_bytes: int):
        self.page = page
        self.num_bytes = num_bytes
        self.memory = mmap.mmap(descriptor, num_bytes, offset=page * PAGE)
        self.header = np.frombuffer(self.memory, HEADER, 1)

    @classmethod
    def open(cls, descriptor: int, page: int) -> Block:
        """Map a block that another process has laid out."""
        with mmap.mmap(descriptor, PAGE, offset=page * PAGE) as first:
            num_bytes = int(np.frombuffer(first[: HEADER.itemsize], HEADER)["num_bytes"][0])
        return cls(descriptor, page, num_bytes)

    @staticmethod
    def size(num_requests: int, slot_bytes: int, data_bytes: int = 0) -> int:
        """Return the bytes of a block for so many requests."""
        return _images_start(num_requests) + padded(num_requests * slot_bytes) + padded(data_bytes)

    def lay_out(self, borders: Ints, slot_bytes: int) -> None:
        """Set the borders of the chunks, see the class, and the bytes of an image."""
        num_requests = int(borders[-1])
        self.header["num_bytes"] = self.num_bytes
        self.header["num_requests"] = num_requests
        self.header["num_chunks"] = len(borders) - 1
        self.header["slot_bytes"] = slot_bytes
        self.header["data_start"] = Block.size(num_requests, slot_bytes)
        self.borders[:] = borders

    def get(self, name: str) -> int:
        """Return a number of the header."""
        return int(self.header[name][0])

    @property
    def borders(self) -> NDArray[np.uint32]:
        """(m + 1,) See the class."""
        count = self.get("num_chunks") + 1
        return np.frombuffer(self.memory, np.uint32, count, HEADER.itemsize)

    @property
    def requests(self) -> NDArray[Any]:
        """(n,) See the class."""
        count = self.get("num_requests")
        return np.frombuffer(self.memory, REQUEST, count, _requests_start(count))

    def pixels(self) -> NDArray[np.uint8]:
        """Return uint8 (n * slot_bytes,), the pixels of all images."""
        count = self.get("num_requests")
        num_bytes = count * self.get("slot_bytes")
        return np.frombuffer(self.memory, np.uint8, num_bytes, _images_start(count))

    def data(self) -> memoryview:
        """Return the bytes of image files that the rank has read itself."""
        return memoryview(self.memory)[self.get("data_start") :]


def _requests_start(num_requests: int) -> int:
    borders = np.dtype(np.uint32).itemsize * (num_requests + 1)
    return HEADER.itemsize + -(-borders // 8) * 8


def _images_start(num_requests: int) -> int:
    return padded(_requests_start(num_requests) + num_requests * REQUEST.itemsize)


def make_memory_file() -> int:
    """Return the descriptor of an anonymous file in memory."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("images", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
