"""Tests of image input: all forms give the pixels of evaluation, and bad input is refused early."""

from __future__ import annotations

import base64
import io
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from workers.data import decoding
from workers.errors import UserError
from workers.serving.images import Limits, read_pixels

PICTURE = Image.fromarray(
    np.random.default_rng(0).integers(0, 255, (9, 12, 3), np.uint8).astype(np.uint8)
)


def encoded(kind: str, picture: Image.Image = PICTURE) -> bytes:
    stream = io.BytesIO()
    picture.save(stream, kind)
    return stream.getvalue()


def text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def bomb(side: int, height: int = 0) -> bytes:
    """Return a PNG with a header that claims side x side pixels, or side x height."""

    def chunk(name: bytes, body: bytes) -> bytes:
        return (
            struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))
        )

    size = struct.pack(">IIBBBBB", side, height or side, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", size)
        + chunk(b"IDAT", zlib.compress(b""))
        + chunk(b"IEND", b"")
    )


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_files_bytes_and_base64_decode_as_in_evaluation(kind: str, tmp_path: Path) -> None:
    data = encoded(kind)
    (tmp_path / "picture").write_bytes(data)
    url = f"data:image/{kind.lower()};base64,{text(data)}"
    for image in (data, text(data), url, str(tmp_path / "picture"), tmp_path / "picture"):
        assert np.array_equal(
            read_pixels([image], 6, Limits(paths=True))[0].transpose(1, 2, 0),
            decoding.decode(data, 6),
        )


def test_arrays_lists_and_pictures_give_the_same_pixels() -> None:
    array = np.asarray(PICTURE)
    nested = np.empty(9, object)
    nested[:] = [[*row] for row in array]
    pixels = read_pixels([PICTURE, array, array.tolist(), nested, encoded("PNG")], 6, Limits())
    assert pixels.shape == (5, 3, 6, 6)
    assert all(np.array_equal(pixels[0], other) for other in pixels)


BAD = {
    "nothing": (b"", "image 1 is not an image that can be read here"),
    "no image": (
        b"hello, I am no image",
        "image 1 is not an image that can be read here .20 bytes.; give a JPEG, PNG or WebP file",
    ),
    "another format": (encoded("BMP"), "image 1 is not an image that can be read here"),
    "postscript": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "image 1 is not an image"),
    "truncated": (encoded("JPEG")[:-60], r"image 1 is damaged \(.*\); give a complete JPEG"),
    "truncated base64": (text(encoded("JPEG")[:-60]), "image 1 is damaged"),
    "bomb": (
        bomb(60_000),
        r"image 1 is too large: 60000 x 60000 is more than max_pixels = 1000; send a smaller one",
    ),
    "large array": (
        np.zeros((40, 40, 3), np.uint8),
        "image 1 is too large: 40 x 40 is more than max_pixels = 1000",
    ),
    "large picture": (Image.new("RGB", (40, 40)), "image 1 is too large"),
    "grey": (np.zeros((4, 4), np.uint8), r"image 1 has shape \(4, 4\); give \(height, width, 3\)"),
    "channels first": (np.zeros((3, 4, 4), np.uint8), r"image 1 has shape \(3, 4, 4\)"),
    "empty": (np.zeros((0, 4, 3), np.uint8), r"image 1 has shape \(0, 4, 3\)"),
    "floats": (np.zeros((4, 4, 3)), "image 1 has dtype float64; give uint8"),
    "int64": (np.zeros((4, 4, 3), np.int64), "image 1 has dtype int64; give uint8"),
    "list of floats": (
        [[[0.5, 0.5, 0.5]]],
        "image 1 holds float64 values, not only integers from 0 to 255",
    ),
    "list above 255": ([[[0, 0, 256]]], "image 1 holds int64 values, not only"),
    "list of words": ([[["a", "b", "c"]]], "image 1 holds .* values, not only"),
    "ragged": ([[[1, 2, 3]], [[1, 2]]], "image 1 is a list with rows of different lengths"),
    "number": (3, "image 1 is a int; give the bytes of"),
    "none": (None, "image 1 is a NoneType"),
    "words": ("no base64!", "image 1 is text that is not base64"),
    "path": (
        "/etc/passwd",
        r"image 1 \(/etc/passwd\) is the name of a file, but no files are read here; send the "
        r"bytes of the image as base64",
    ),
    "address": (
        "http://127.0.0.1/a.png",
        "image 1 .* is the name of a file, but no files are read here",
    ),
    "many bytes": (b"x" * 3000, "image 1 takes 3000 bytes, more than 2000"),
    "much base64": (text(b"x" * 3000), "image 1 takes 3000 bytes, more than 2000"),
}


@pytest.mark.parametrize("kind", [*BAD])
def test_invalid_image_gives_a_one_line_error(kind: Any) -> None:
    image, message = BAD[kind]
    with pytest.raises(UserError, match=message) as error:
        read_pixels([encoded("PNG"), image], 6, Limits(max_pixels=1000, image_bytes=2000))
    assert "\n" not in str(error.value)


def test_too_many_pixels_are_refused_before_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image.Image, "load", lambda self: pytest.fail("it was decoded"))
    with pytest.raises(UserError, match="too large"):
        read_pixels([bomb(60_000)], 6, Limits())
    for width, height in ((1, 40_000_000), (40_000_000, 1)):
        with pytest.raises(UserError, match="too long"):
            read_pixels([bomb(width, height)], 6, Limits())


def test_file_path_is_read_only_if_allowed(tmp_path: Path) -> None:
    image_path = tmp_path / "a.png"
    image_path.write_bytes(encoded("PNG"))
    read_pixels([str(image_path)], 6, Limits(paths=True))
    with pytest.raises(UserError, match="no files are read here"):
        read_pixels([str(image_path)], 6, Limits())
    with pytest.raises(
        UserError, match=r"image 0 \(.*b.png\) cannot be read \(No such file or directory\)"
    ):
        read_pixels([str(tmp_path / "b.png")], 6, Limits(paths=True))


def test_number_and_total_bytes_of_images_are_limited() -> None:
    data = encoded("PNG")
    with pytest.raises(UserError, match="3 images in one request are more than 2"):
        read_pixels([data] * 3, 6, Limits(images=2))
    with pytest.raises(
        UserError,
        match=f"the images of this request take {2 * len(data)} bytes, more than {len(data)}",
    ):
        read_pixels([data] * 2, 6, Limits(body_bytes=len(data)))
    with pytest.raises(UserError, match="give a list of images"):
        read_pixels(data, 6, Limits())
