"""Tests of images with more than 8 bits: they are scaled by the range of the format or the card."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from pipeline.data.cards import Card
from pipeline.data.image_checks import check_image, encode_for_storage
from pipeline.data.ingest import ingest
from workers.data.decoding import ImageLimits, open_image, read_picture, to_rgb
from workers.errors import UserError

SIDE = 6
TWELVE_BITS = (0.0, 4095.0)


def noise(top: int, *shape: int) -> NDArray[np.uint16]:
    """Return random values from 0 to `top`, including both."""
    values = np.random.default_rng(top).integers(0, top + 1, shape or (SIDE, SIDE))
    values.flat[0], values.flat[1] = 0, top
    return values.astype(np.uint16)


def encoded(values: NDArray[Any], form: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(values).save(buffer, form, **options)
    return buffer.getvalue()


def pgm(values: NDArray[Any], maximum: int, kind: bytes = b"P5") -> bytes:
    """Return a 16-bit PGM (kind P5) or PPM (kind P6)."""
    return kind + b"\n%d %d\n%d\n" % (SIDE, SIDE, maximum) + values.astype(">u2").tobytes()


def png_in_colours(values: NDArray[np.uint16]) -> bytes:
    """Return a 16-bit PNG with three channels."""
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)
    header = struct.pack(">IIBBBBB", SIDE, SIDE, 16, 2, 0, 0, 0)
    parts = [(b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")]
    data = b"\x89PNG\r\n\x1a\n"
    for kind, body in parts:
        data += struct.pack(">I", len(body)) + kind + body
        data += struct.pack(">I", zlib.crc32(kind + body))
    return data


def tiff(values: NDArray[Any], photometric: int = 1) -> bytes:
    """Return an uncompressed TIFF with one channel."""
    bits = 8 * values.itemsize
    sample_format = {"u": 1, "i": 2, "f": 3}[values.dtype.kind]
    body = values.tobytes()
    tags = [
        (256, SIDE),
        (257, SIDE),
        (258, bits),
        (259, 1),
        (262, photometric),
        (273, 8),
        (277, 1),
        (278, SIDE),
        (279, len(body)),
        (339, sample_format),
    ]
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags)
    head = struct.pack("<2sHI", b"II", 42, 8 + len(body))
    return head + body + struct.pack("<H", len(tags)) + entries + bytes(4)


def pixels(data: bytes, value_range: tuple[float, float] | None = None) -> NDArray[Any]:
    """Return the first channel of a stored image; check that training reads the same pixels."""
    limits = ImageLimits(value_range=value_range)
    assert check_image(data, limits).problem is None
    stored, _ = encode_for_storage(data, limits)
    seen = read_picture(stored, None, limits).pixels
    assert np.array_equal(seen, np.asarray(to_rgb(open_image(data), value_range)))
    channel: NDArray[Any] = seen[..., 0].astype(float)
    return channel


FULL = noise(65535)
DARK = noise(4095)
UNIT = np.linspace(0, 1, SIDE * SIDE, dtype=np.float32).reshape(SIDE, SIDE)
HUGE = np.array(FULL, np.uint32) * 65536
SIGNED = (np.array(FULL, np.int32) - 32768).astype(np.int16)

SCALED: dict[str, tuple[bytes, tuple[float, float] | None, NDArray[Any]]] = {
    "PNG": (encoded(FULL, "PNG"), None, FULL / 257),
    "PNG of 12 bits": (encoded(DARK, "PNG"), TWELVE_BITS, DARK / 4095 * 255),
    "PGM": (pgm(FULL, 65535), None, FULL / 257),
    "PGM of 12 bits": (pgm(DARK, 4095), None, DARK / 4095 * 255),
    "PGM of 12 bits, range given": (pgm(DARK, 4095), TWELVE_BITS, DARK / 4095 * 255),
    "PGM that says 16 bits": (pgm(DARK, 65535), TWELVE_BITS, DARK / 4095 * 255),
    "TIFF": (tiff(FULL), None, FULL / 257),
    "TIFF, 0 is white": (tiff(FULL, 0), None, 255 - FULL / 257),
    "float": (tiff(UNIT), None, UNIT * 255),
    "float, 0 is white": (tiff(UNIT, 0), None, 255 - UNIT * 255),
    "float to 255": (tiff(UNIT * 255), (0.0, 255.0), UNIT * 255),
    "32 bits": (tiff(HUGE), (0.0, 65535.0 * 65536), HUGE / 65535 / 65536 * 255),
    "signed": (tiff(SIGNED), (-32768.0, 32767.0), (SIGNED + 32768.0) / 65535 * 255),
}


@pytest.mark.parametrize("case", SCALED)
def test_values_are_scaled_by_range_of_format_or_card(case: str) -> None:
    data, value_range, expected = SCALED[case]
    assert np.abs(pixels(data, value_range) - expected).max() <= 1


def test_transparent_16_bit_value_becomes_white() -> None:
    values = FULL.copy()
    values[2, 3] = 1234
    data = encoded(values, "PNG", transparency=1234)
    seen = pixels(data)
    assert seen[2, 3] == 255
    assert np.abs(seen[values != 1234] - values[values != 1234] / 257).max() <= 1


@pytest.mark.parametrize(
    ("data", "value_range", "expected"),
    [
        (tiff(UNIT * 9), None, "outside of 0 to 1"),
        (tiff(np.where(UNIT > 0.5, np.float32(np.nan), UNIT)), (0.0, 1.0), "not all finite"),
        (tiff(HUGE), None, "declare no range"),
        (png_in_colours(noise(4095, SIDE, SIDE, 3)), TWELVE_BITS, "reduced to 8 bits"),
        (pgm(noise(4095, SIDE, SIDE, 3), 65535, b"P6"), TWELVE_BITS, "reduced to 8 bits"),
    ],
)
def test_image_without_valid_range_is_rejected(
    data: bytes, value_range: tuple[float, float] | None, expected: str
) -> None:
    problem = check_image(data, ImageLimits(value_range=value_range)).problem
    assert problem is not None
    assert expected in problem


DARK_FILES: dict[str, Callable[[], bytes]] = {
    "png": lambda: encoded(DARK, "PNG"),
    "tif": lambda: tiff(DARK),
    "ppm": lambda: pgm(noise(4095, SIDE, SIDE, 3), 65535, b"P6"),
    "PNG": lambda: png_in_colours(noise(4095, SIDE, SIDE, 3)),
}


@pytest.mark.parametrize("ending", DARK_FILES)
def test_dark_16_bit_images_require_source_range(ending: str, tmp_path: Path) -> None:
    for name in ("ant", "bee"):
        for split in ("train", "test"):
            (tmp_path / "zoo" / split / name).mkdir(parents=True)
            for number in range(2):
                path = tmp_path / "zoo" / split / name / f"{number}.{ending.lower()}"
                path.write_bytes(DARK_FILES[ending]())
    body = {
        "name": "zoo",
        "licence": "x",
        "classes": ["ant", "bee"],
        "leaks": "allow",
        "source": {"format": "folder", "path": str(tmp_path / "zoo")},
    }
    with pytest.raises(UserError, match=r"source\.range on the card.*\[0, 4095\]"):
        ingest(Card.model_validate(body), str(tmp_path / "store"), "key", map, {})
