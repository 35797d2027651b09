"""Tests of decoding: the same bits from both JPEG decoders at every scale, limits, and scans."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from PIL import Image

from pipeline.data.image_checks import check_image
from workers.data import decoding
from workers.data.arena import Arena
from workers.data.decoding import ImageLimits, Picture, count_scans, decode, read_picture
from workers.errors import UserError

ORIENTATION = 274


def photograph(height: int, width: int, mode: str = "RGB") -> Image.Image:
    generator = np.random.default_rng(0)
    rough = Image.fromarray(generator.integers(0, 256, (5, 6, 3), np.uint8))
    smooth = np.asarray(rough.resize((width, height), Image.Resampling.BICUBIC)).astype(np.int64)
    noisy = smooth + generator.integers(-30, 31, smooth.shape)
    return Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).convert(mode)


def encoded(image: Image.Image, form: str = "JPEG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, form, **options)
    return buffer.getvalue()


def turned(image: Image.Image, orientation: int) -> bytes:
    """Return a JPEG with an EXIF orientation."""
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    return encoded(image, exif=exif)


def by_pillow(data: bytes, longest_side: int | None = None) -> Picture:
    """Read a picture as on a machine without simplejpeg."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoding, "simplejpeg", None)
        return read_picture(data, longest_side)


def assert_same(one: Picture, other: Picture) -> None:
    assert one[1:] == other[1:]
    assert np.array_equal(one.pixels, other.pixels)


def test_a_picture_in_an_arena_has_the_same_pixels() -> None:
    arena = Arena()
    for height, width in ((90, 120), (20, 30), (200, 10), (90, 120)):
        data = encoded(photograph(height, width))
        assert_same(read_picture(data, None, arena=arena), read_picture(data))
        arena.clear()


KINDS: dict[str, Any] = {
    "4:4:4": {"subsampling": 0},
    "4:2:2": {"subsampling": 1},
    "4:2:0": {"subsampling": 2},
    "progressive": {"progressive": True},
    "coarse": {"quality": 20},
    "restarts": {"restart_marker_rows": 1},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("longest_side", [None, 200, 90, 41, 13, 2])
def test_both_decoders_give_the_same_bits_at_every_scale(kind: str, longest_side: Any) -> None:
    for sides in ((83, 97), (96, 64), (33, 190), (17, 16), (5, 3), (1, 97)):
        data = encoded(photograph(*sides), **KINDS[kind])
        assert_same(read_picture(data, longest_side), by_pillow(data, longest_side))


@pytest.mark.parametrize("longest_side", [None, 30])
def test_unusual_jpegs_are_decoded_like_pillow(longest_side: Any) -> None:
    image = photograph(70, 90)
    files = [
        encoded(image.convert("L")),
        encoded(image.convert("CMYK")),
        encoded(image, keep_rgb=True),
        encoded(image) + b"bytes after the end",
        *(turned(image, orientation) for orientation in range(1, 9)),
    ]
    for data in files:
        assert_same(read_picture(data, longest_side), by_pillow(data, longest_side))


def test_simplejpeg_is_used_for_supported_images(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("simplejpeg")
    monkeypatch.setattr(decoding, "_read_with_pillow", lambda *_: pytest.fail("Pillow decoded"))
    image = photograph(70, 90)
    for data in (encoded(image), encoded(image.convert("L")), turned(image, 1)):
        assert read_picture(data, 50).pixels.shape == (39, 50, 3)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_rotated_images_are_decoded_upright(orientation: int) -> None:
    picture = read_picture(turned(photograph(200, 120), orientation), 50)
    is_turned = orientation >= 5
    assert picture[1:] == ((120, 200) if is_turned else (200, 120))
    assert picture.pixels.shape == ((30, 50, 3) if is_turned else (50, 30, 3))


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("longest_side", [300, 100, 99, 30])
def test_only_images_above_the_longest_side_are_reduced(form: str, longest_side: int) -> None:
    data = encoded(photograph(100, 60), form)
    picture = read_picture(data, longest_side)
    assert picture[1:] == (100, 60)
    height = min(100, longest_side)
    assert picture.pixels.shape == (height, round(0.6 * height), 3)
    if longest_side >= 100:
        assert np.array_equal(picture.pixels, read_picture(data).pixels)


@pytest.mark.parametrize(
    ("interpolation", "resampling"),
    [("bicubic", Image.Resampling.BICUBIC), ("bilinear", Image.Resampling.BILINEAR)],
)
def test_square_crop_is_bit_identical_to_pillow(interpolation: Any, resampling: Any) -> None:
    image = photograph(61, 83)
    data = encoded(image)
    decoded = Image.open(io.BytesIO(data))
    box = (11, 0, 72, 61)
    expected = np.asarray(decoded.resize((24, 24), resampling, box=box))
    assert np.array_equal(decode(data, 24, interpolation=interpolation), expected)
    assert np.array_equal(decode(data, 24), expected) == (interpolation == "bicubic")


@pytest.mark.parametrize("has_simplejpeg", [True, False])
def test_pixel_limit_is_checked_before_decoding(
    has_simplejpeg: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_simplejpeg:
        monkeypatch.setattr(decoding, "simplejpeg", None)
    data = encoded(photograph(50, 51))
    monkeypatch.setattr(Image.Image, "load", lambda self: pytest.fail("it was decoded"))
    with pytest.raises(UserError, match=r"51 x 50 is more than max_pixels = 100\)"):
        read_picture(data, 4, ImageLimits(max_pixels=100))


@pytest.mark.parametrize("has_simplejpeg", [True, False])
def test_damaged_image_is_reported_in_one_sentence(
    has_simplejpeg: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_simplejpeg:
        monkeypatch.setattr(decoding, "simplejpeg", None)
    data = encoded(photograph(50, 51))
    for damaged in (data[:60], data[: len(data) // 2], data[:3], b"no image", b""):
        with pytest.raises(UserError, match=r"cannot be decoded here \(.*\), though") as error:
            read_picture(damaged)
        assert "\n" not in str(error.value)


# ---- scans ---------------------------------------------------------------------------------------
def jpeg_with_scans(repeats: int, side: int = 64) -> bytes:
    """Return a progressive JPEG with `repeats` additional copies of the last scan."""
    pixels = np.random.default_rng(0).integers(0, 256, (side, side, 3), np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "JPEG", progressive=True)
    data = buffer.getvalue()
    last = data.rfind(b"\xff\xda")
    return data[:-2] + data[last:-2] * repeats + data[-2:]


@pytest.mark.parametrize("repeats", [0, 5, 90])
def test_scans_are_counted_by_their_markers(repeats: int) -> None:
    data = jpeg_with_scans(repeats)
    assert count_scans(data) == 10 + repeats
    # the scans of a thumbnail are not decoded
    thumbnail = data[:2] + b"\xff\xe1\x00\x0a" + b"\xff\xda" * 4 + data[2:]
    assert count_scans(thumbnail) == 10 + repeats


@pytest.mark.parametrize(("repeats", "side", "is_refused"), [(90, 64, 0), (91, 64, 1)])
def test_jpeg_with_too_many_scans_is_refused(repeats: int, side: int, is_refused: bool) -> None:
    data = jpeg_with_scans(repeats, side)
    problem = check_image(data).problem
    assert (problem is not None) == bool(is_refused)
    if problem is not None:
        assert "101 scans" in problem


def test_pixels_of_all_scans_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "MAX_SCANNED_PIXELS", 11 * 64 * 64)
    assert check_image(jpeg_with_scans(1)).problem is None
    assert "pixels in all scans" in (check_image(jpeg_with_scans(2)).problem or "")
