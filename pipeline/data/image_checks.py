"""Check that a file is a usable image, and encode it for storage."""

from __future__ import annotations

import re
import struct
import zlib
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from PIL import Image

from pipeline.data.cards import MAX_PIXELS_PER_BYTE
from pipeline.data.formats.base import png
from workers.data.decoding import (
    ANY_RANGE,
    EIGHT_BITS,
    IMAGE_FORMATS,
    MAXIMUM,
    SIXTEEN_BITS,
    ImageLimits,
    is_deep,
    is_reduced,
    open_image,
    to_rgb,
)

# Pillow format -> extension in the shard, for files stored unchanged
STORED_FORMATS = {"JPEG": "jpg", "MPO": "jpg", "PNG": "png", "WEBP": "webp"}
MODERN_FORMATS = ("AVIF", "HEIF")  # read only by ingest, which stores them as PNG
SMALL_PIXELS = 1_000_000  # images with more pixels must satisfy max_pixels_per_byte
# passes of an interlaced PNG: first column, first row, column step, row step
ADAM7 = (
    (0, 0, 8, 8),
    (4, 0, 8, 8),
    (0, 4, 4, 8),
    (2, 0, 4, 4),
    (0, 2, 2, 4),
    (1, 0, 2, 2),
    (0, 1, 1, 2),
)
CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}  # PNG colour type -> number of channels
INFLATE_BYTES = 1 << 20  # maximum bytes per decompression step


class CheckedImage(NamedTuple):
    """The result of decoding an image.

    Attributes:
        problem: The reason why the image cannot be used, or None.
        is_blank: Whether all pixels have one colour.
        became_blank: Whether the image is blank only after conversion to 8 bits: it is transparent,
            or its values are a small part of their range.
        top: The largest value of an image with 16-bit integers, 0 to 65535. A lower bound if
            Pillow has reduced the values to 8 bits. None for other images.
    """

    problem: str | None = None
    is_blank: bool = False
    became_blank: bool = False
    top: float | None = None


def check_image(
    data: bytes, limits: ImageLimits = ANY_RANGE, per_byte: int = MAX_PIXELS_PER_BYTE
) -> CheckedImage:
    """Decode a complete image and check it. A problem is returned, not raised.

    Args:
        data: Bytes of the file.
        limits: Limits of the data set.
        per_byte: Maximum number of pixels per byte.
    """
    try:
        image = open_any(data, limits.max_pixels)
        width, height = image.size
        if width * height > max(SMALL_PIXELS, per_byte * len(data)):
            return CheckedImage(
                f"{width} x {height} pixels in {len(data)} bytes are more "
                f"than max_pixels_per_byte = {per_byte}; if the image is valid, raise the limit on "
                "the card"
            )
        image.verify()
        if image.format == "PNG" and not has_all_rows(data):
            return CheckedImage("image file is truncated (its data ends before its last row)")
        image = open_any(data, limits.max_pixels)  # Pillow cannot load an image after `verify`
        image.load()
        return _examine_image(image, limits)
    except MemoryError:  # not a problem of the image
        raise
    except Exception as error:  # Pillow's plugins raise almost anything on damaged files
        return CheckedImage(_describe_decoding_error(error))


def _examine_image(image: Image.Image, limits: ImageLimits) -> CheckedImage:
    is_plain = image.mode in ("L", "RGB", "CMYK", "YCbCr") and "transparency" not in image.info
    has_one_value = _has_one_value(image)
    is_blank = has_one_value if is_plain else _has_one_value(to_rgb(image, limits.value_range))
    top = None
    if is_reduced(image) and limits.value_range is not None:
        return CheckedImage(
            "its 16 bits in several channels are reduced to 8 bits, so source.range has no "
            "effect; convert it to 8 bits, or remove source.range"
        )
    if image.info.get(MAXIMUM) == SIXTEEN_BITS:
        if is_reduced(image):
            # Pillow has reduced the values to 8 bits, so this is a lower bound of the maximum
            highest = float(np.asarray(image.convert("RGB")).max())
            top = max(highest - 0.5, 0.0) * SIXTEEN_BITS / EIGHT_BITS
        else:
            top = float(np.asarray(image).max(initial=0))
    return CheckedImage(None, is_blank, is_blank and not has_one_value, top)


def _has_one_value(image: Image.Image) -> bool:
    if is_deep(image):
        values = np.asarray(image)
        return bool((values == values.flat[0]).all())
    extrema = image.getextrema()
    bands = extrema if isinstance(extrema[0], tuple) else (extrema,)
    return all(low == high for low, high in bands)


def open_any(data: bytes, max_pixels: int) -> Image.Image:
    """Open an image in any format that ingest reads, including HEIC and AVIF.

    Raises:
        ValueError: If the image is HEIC and pillow-heif is not installed.
    """
    formats: tuple[str, ...] = IMAGE_FORMATS
    if data[4:8] == b"ftyp":
        formats = MODERN_FORMATS
        if data[8:11] != b"avi" and not can_read_heic():
            raise ValueError("HEIC is read with the package pillow-heif; pip install pillow-heif")
    return open_image(data, max_pixels, formats)


@lru_cache(maxsize=1)
def can_read_heic() -> bool:
    """Return whether the optional package pillow-heif is installed, and register it in Pillow."""
    try:
        from pillow_heif import register_heif_opener
    except ImportError:
        return False
    register_heif_opener()
    return True


def _describe_decoding_error(error: Exception) -> str:
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    if "cannot identify" in text:
        return "not an image"
    return re.sub(r"\s*<[^>]*at 0x[0-9a-f]+>", "", text)  # without addresses of objects


def has_all_rows(data: bytes) -> bool:
    """Return whether the compressed data of a valid PNG has all rows that its header declares.

    Pillow silently leaves missing rows black. Source: PNG specification (ISO/IEC 15948), sections
    7 to 10.

    Raises:
        zlib.error: If the data cannot be decompressed.
    """
    missing = _count_raw_bytes(data)
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


def _count_raw_bytes(data: bytes) -> int:
    """Compute the size of all rows of a PNG from its header; a row has a filter byte and pixels."""
    width, height, bits, color, _, _, interlaced = struct.unpack(">IIBBBBB", data[16:29])
    passes = ADAM7 if interlaced else ((0, 0, 1, 1),)
    total = 0
    for first_column, first_row, column_step, row_step in passes:
        columns = -(-(width - first_column) // column_step)
        rows = -(-(height - first_row) // row_step)
        if columns > 0 and rows > 0:
            total += rows * (1 + (columns * bits * CHANNELS[color] + 7) // 8)
    return total


def encode_for_storage(data: bytes, limits: ImageLimits) -> tuple[bytes, str]:
    """Encode an image for the shard.

    Returns:
        The original bytes and their extension. The image is encoded as PNG instead if its format
        is not in STORED_FORMATS, or if the card sets the value range of an image with more than
        8 bits.
    """
    image = open_any(data, limits.max_pixels)
    extension = STORED_FORMATS.get(image.format or "")
    if extension and not (limits.value_range is not None and is_deep(image)):
        return data, extension
    return png(to_rgb(image, limits.value_range)), "png"
