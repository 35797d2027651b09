"""Whether bytes are a usable image, and which bytes of it are stored."""

from __future__ import annotations

import re
import struct
import zlib

from pipeline.data.cards import MAX_PIXELS_PER_BYTE
from pipeline.data.formats.base import png
from workers.data.decoding import open_image, to_rgb

# Pillow's formats that are stored as they are, and the extension in the shard
STORED_FORMATS = {"JPEG": "jpg", "MPO": "jpg", "PNG": "png", "WEBP": "webp"}
SMALL_PIXELS = 1_000_000  # an image of no more may be of one colour, in as few bytes as it takes
# passes of an interlaced PNG: first column, first row, step of columns, step of rows
ADAM7 = (
    (0, 0, 8, 8),
    (4, 0, 8, 8),
    (0, 4, 4, 8),
    (2, 0, 4, 4),
    (0, 2, 2, 4),
    (1, 0, 2, 2),
    (0, 1, 1, 2),
)
CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}  # of PNG's colour types
INFLATE_BYTES = 1 << 20  # at a time


def problem_of(data: bytes, max_pixels: int, per_byte: int = MAX_PIXELS_PER_BYTE) -> str | None:
    """Return why the bytes are no usable image; None where they decode to the last pixel.

    per_byte: the most pixels that a byte may stand for.
    """
    try:
        image = open_image(data, max_pixels)
        width, height = image.size
        if width * height > max(SMALL_PIXELS, per_byte * len(data)):
            return (
                f"{width} x {height} pixels in {len(data)} bytes are more "
                f"than max_pixels_per_byte = {per_byte}; if they are meant, raise it on the card"
            )
        image.verify()
        if image.format == "PNG" and not has_all_rows(data):
            return "image file is truncated (its data ends before its last row)"
        open_image(data, max_pixels).load()
    except MemoryError:
        raise
    except Exception as error:  # Pillow's plugins raise almost anything on damaged files
        return _pillow_problem(error)
    return None


def _pillow_problem(error: Exception) -> str:
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    if "cannot identify" in text:
        return "not an image"
    return re.sub(r"\s*<[^>]*at 0x[0-9a-f]+>", "", text)  # objects in memory


def has_all_rows(data: bytes) -> bool:
    """Whether the compressed data of a sound PNG holds as many bytes as its header says.

    Pillow leaves missing rows black, without a word. Raise zlib.error where the data is not
    compressed. Source: PNG specification (ISO/IEC 15948), sections 7 to 10.
    """
    missing = _raw_bytes(data)
    inflate = zlib.decompressobj()
    position = 8
    while missing > 0 and position + 12 <= len(data):
        size, kind = struct.unpack(">I4s", data[position : position + 8])
        body = b""
        if kind == b"IDAT":
            body = data[position + 8 : position + 8 + size]
        position += 12 + size
        while body and missing > 0 and not inflate.eof:
            missing -= len(inflate.decompress(body, INFLATE_BYTES))
            body = inflate.unconsumed_tail
    return missing <= 0


def _raw_bytes(data: bytes) -> int:
    """Return how many bytes the rows of a PNG have, by its header: a filter byte and pixels."""
    width, height, bits, color, _, _, interlaced = struct.unpack(">IIBBBBB", data[16:29])
    passes = ADAM7 if interlaced else ((0, 0, 1, 1),)
    total = 0
    for first_column, first_row, column_step, row_step in passes:
        columns = -(-(width - first_column) // column_step)
        rows = -(-(height - first_row) // row_step)
        if columns > 0 and rows > 0:
            total += rows * (1 + (columns * bits * CHANNELS[color] + 7) // 8)
    return total


def to_stored(data: bytes, max_pixels: int) -> tuple[bytes, str]:
    """Return the bytes that go into the shard, and their extension.

    They are the original bytes, or PNG where few programs read the original format.
    """
    image = open_image(data, max_pixels)
    extension = STORED_FORMATS.get(image.format or "")
    if extension:
        return data, extension
    return png(to_rgb(image)), "png"
