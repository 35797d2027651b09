"""Decode the bytes of an image file into upright RGB pixels.

If simplejpeg is installed, it decodes JPEGs. It is several times as fast as Pillow and returns the
same pixels. Pillow decodes all other formats, and JPEGs that simplejpeg cannot decode. Both can
decode a JPEG at a reduced size (DCT scaling).
"""

from __future__ import annotations

import hashlib
import io
import re
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from workers.data.arena import Arena
from workers.errors import UserError
from workers.job import Interpolation

try:
    import simplejpeg
except ImportError:  # Pillow decodes all images
    simplejpeg = None

# Version of the decoding, a part of the keys of stages and caches. Increase it if `decode` or
# `read_picture` returns different pixels: then old caches are not used, and stages run again.
DECODING = 2
MAX_PIXELS = 50_000_000  # default of `max_pixels`
# Accepted formats of Pillow. PostScript is excluded because it is a program, and other formats
# because their decoders are rarely maintained.
IMAGE_FORMATS = (
    "BMP",
    "GIF",
    "JPEG",
    "PNG",
    "PPM",
    "TIFF",
    "WEBP",
)
BITS_PER_SAMPLE = 258  # TIFF tag
PHOTOMETRIC = 262  # TIFF tag
SAMPLE_FORMAT = 339  # TIFF tag
EIGHT_BITS = 255  # largest value of 8 bits
SIXTEEN_BITS = 65535  # largest value of 16 bits
# Key that `open_image` adds to Pillow's `info`: largest value that the format declares, if it needs
# more than 8 bits.
MAXIMUM = "maximum"
TILE = (322, 323)  # TIFF tags of width and height of a tile
RESAMPLING = {"bicubic": Image.Resampling.BICUBIC, "bilinear": Image.Resampling.BILINEAR}
ORIENTATION = 274  # EXIF tag of the orientation
TURNED = (5, 6, 7, 8)  # orientations that exchange width and height
JPEG_START = b"\xff\xd8\xff"
SCAN = b"\xff\xda"  # JPEG marker of a scan
END_OF_IMAGE = b"\xd9"  # second byte of the JPEG marker EOI
# a JPEG marker with a segment, or EOI: not the escapes and restart markers in the data of a scan
MARKER = re.compile(rb"\xff+([^\x00\x01\xd0-\xd8\xff])", re.DOTALL)
MAX_SCANS = 100  # a progressive JPEG has about 10
MAX_SCANNED_PIXELS = 2_000_000_000  # limit of scans * pixels; takes half a second to decode
# Bytes that precede an orientation in a JPEG. The search for them takes a few microseconds.
ORIENTATION_MARKS = (b"Exif\0\0", b"tiff:Orientation")
DCT_SCALES = (8, 4, 2)  # divisors of height and width that both decoders support
# A JPEG whose long side is shorter is not reduced. simplejpeg gets the reduced size instead of the
# scale, and in such a small image two scales can result in the same size.
SHORTEST_SCALED = 16
# Pillow's limit is off. `open_image` applies `max_pixels` before it decodes pixels.
Image.MAX_IMAGE_PIXELS = None

Pixels = NDArray[np.uint8]


class ImageLimits(NamedTuple):
    """Limits for all images of a data set.

    Attributes:
        max_pixels: Largest number of pixels of an image.
        value_range: Values of black and white in images with more than 8 bits per channel. None:
            the range that the format declares (see `to_rgb`).
    """

    max_pixels: int = MAX_PIXELS
    value_range: tuple[float, float] | None = None


ANY_RANGE = ImageLimits()  # the default limits


class Picture(NamedTuple):
    """A decoded image.

    Attributes:
        pixels: uint8 (h, w, 3), upright.
        height: Height of the original, at least h.
        width: Width of the original, at least w.
    """

    pixels: Pixels
    height: int
    width: int


def is_intact(data: bytes, digest: bytes) -> bool:
    """Return whether the sha256 of `data` is `digest`, given as hexadecimal digits."""
    return hashlib.sha256(data).hexdigest().encode() == digest


def open_image(
    data: bytes, max_pixels: int = MAX_PIXELS, formats: tuple[str, ...] = IMAGE_FORMATS
) -> Image.Image:
    """Open an image: read its header, but not its pixels.

    A small TIFF image can be a part of one huge tile, which is decoded completely. Therefore the
    limit applies to tiles, too. `info[MAXIMUM]` is set for 16 bits, and for a PPM above 8 bits.

    Args:
        data: Bytes of the file.
        max_pixels: Largest number of pixels.
        formats: Accepted formats.

    Raises:
        ValueError: If it is not an image, or has too many pixels or scans.
        OSError: If it is not an image.
    """
    image = Image.open(io.BytesIO(data), formats=formats)
    tags = getattr(image, "tag_v2", {})
    tile = [tags.get(tag, 0) for tag in TILE]
    for width, height in (image.size, tile):
        _check_pixel_count(width, height, max_pixels)
    if image.format in ("JPEG", "MPO"):
        _check_scans(data, image.width * image.height)
    # The arguments that Pillow passes to its decoder. They contain the format of the stored values,
    # for example "I;16B" or "RGB;16L". For a PPM they are (format, largest value).
    arguments = image.tile[0][3] if image.tile else None
    if ";16" in str(arguments):
        image.info[MAXIMUM] = SIXTEEN_BITS
    elif image.format == "PPM" and isinstance(arguments, tuple) and arguments[1] > EIGHT_BITS:
        image.info[MAXIMUM] = arguments[1]
    return image


def _check_pixel_count(width: int, height: int, max_pixels: int) -> None:
    if width * height > max_pixels:
        raise ValueError(f"{width} x {height} is more than max_pixels = {max_pixels}")


def _check_scans(data: bytes, pixels: int) -> None:
    """Raise ValueError for a JPEG with so many scans that decoding takes too long."""
    # An upper bound first, which is fast: `SCAN` can also occur inside a segment.
    if data.count(SCAN) <= MAX_SCANS and data.count(SCAN) * pixels <= MAX_SCANNED_PIXELS:
        return
    scans = count_scans(data)
    if scans > MAX_SCANS or scans * pixels > MAX_SCANNED_PIXELS:
        raise ValueError(
            f"{scans} scans of {pixels} pixels, more than {MAX_SCANS} scans or "
            f"{MAX_SCANNED_PIXELS} pixels in all scans; save it again"
        )


def count_scans(data: bytes) -> int:
    """Count the scans of a JPEG by its markers. Source: ITU-T T.81, annex B."""
    scans = 0
    position = 2  # after the marker SOI
    while True:
        marker = MARKER.search(data, position)
        if marker is None or marker[1] == END_OF_IMAGE:
            return scans
        scans += marker[1] == SCAN[1:]
        position = marker.end() + int.from_bytes(data[marker.end() : marker.end() + 2], "big")


def is_deep(image: Image.Image) -> bool:
    """Return whether Pillow holds values of more than 8 bits, which `to_rgb` scales."""
    return image.mode == "F" or image.mode.startswith("I")


def is_reduced(image: Image.Image) -> bool:
    """Return whether Pillow reads values of more than 8 bits as 8 bits (several channels)."""
    return not is_deep(image) and MAXIMUM in image.info


def to_rgb(image: Image.Image, value_range: tuple[float, float] | None = None) -> Image.Image:
    """Convert an image of any mode to RGB, upright. Transparent pixels are blended with white.

    Values of more than 8 bits are scaled by a fixed range, not by the minimum and maximum of the
    image.

    Args:
        image: Result of `open_image`.
        value_range: The values of black and white. None: the range that the format declares, which
            is 0 to 65535 for 16 bits (to 4095 for a TIFF of 12 bits, to the declared maximum for a
            PGM), and 0 to 1 for float.

    Raises:
        ValueError: If a float value is not finite, or if `value_range` is None and the format
            declares no range or a float value is outside of 0 to 1.
    """
    if is_deep(image):
        image = ImageOps.exif_transpose(_scale_to_8_bits(image, value_range))
    else:
        image = ImageOps.exif_transpose(image)
    if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        layer = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer)
    return image.convert("RGB")


def _find_declared_range(image: Image.Image) -> tuple[float, float]:
    """Return the declared values of black and white, on the scale of the values that Pillow read.

    Raises:
        ValueError: If the format declares no range.
    """
    if image.mode == "F":
        return (0.0, 1.0)
    bits = getattr(image, "tag_v2", {}).get(BITS_PER_SAMPLE, (16,))[0]
    if image.mode == "I" and image.format not in ("PPM", "PNG"):
        raise ValueError(
            "its values are whole numbers of 32 bits, which declare no range; say the values of "
            "black and white in source.range on the card, as in [0, 4095]"
        )
    return (0.0, 4095.0) if bits == 12 else (0.0, float(SIXTEEN_BITS))


def _read_raw_values(image: Image.Image) -> NDArray[Any]:
    """Return the values of a deep image as they are in the file."""
    values: NDArray[Any] = np.asarray(image)
    tags = getattr(image, "tag_v2", {})
    if image.mode == "I" and image.format == "TIFF" and tags.get(SAMPLE_FORMAT, (1,))[0] == 1:
        values = values.view(np.uint32)
    maximum = image.info.get(MAXIMUM, SIXTEEN_BITS)
    if image.format == "PPM" and maximum != SIXTEEN_BITS:  # Pillow has scaled them to 16 bits
        values = np.rint(values * (maximum / SIXTEEN_BITS))
    return values


def _scale_to_8_bits(image: Image.Image, value_range: tuple[float, float] | None) -> Image.Image:
    """Scale a deep image (see `is_deep`) to 8 bits. Transparent pixels become white."""
    if value_range is None:
        low, high = _find_declared_range(image)
        values = np.asarray(image)
    else:
        low, high = value_range
        values = _read_raw_values(image)
    if image.mode == "F" and not np.isfinite(values).all():
        raise ValueError("its float values are not all finite")
    if image.mode == "F" and value_range is None and not 0 <= values.min() <= values.max() <= 1:
        raise ValueError(
            f"its float values go from {values.min():g} to {values.max():g}, outside of 0 to 1; "
            "say the values of black and white in source.range on the card, as in [0, 255]"
        )
    if value_range is None and high == SIXTEEN_BITS:
        scaled = (values.astype(np.int64) >> 8).clip(0, 255).astype(np.uint8)
    else:
        spread = (values.astype(np.float64) - low) * (255 / (high - low))
        scaled = spread.round().clip(0, 255).astype(np.uint8)
    # A TIFF in which 0 is white. Pillow does not invert deep images.
    if getattr(image, "tag_v2", {}).get(PHOTOMETRIC) == 0:
        scaled = 255 - scaled
    transparent = image.info.get("transparency")
    if isinstance(transparent, int):
        scaled = np.where(np.asarray(image) == transparent, np.uint8(255), scaled)
    result = Image.fromarray(scaled)
    result.getexif().update(image.getexif())  # with the orientation
    return result


def decode(
    data: bytes,
    side: int,
    limits: ImageLimits = ANY_RANGE,
    arena: Arena | None = None,
    interpolation: Interpolation = "bicubic",
) -> Pixels:
    """Decode an image and resize its central square to `side` x `side` pixels.

    Args:
        data: Bytes of the file.
        side: Side of the result in pixels.
        limits: Limits of the data set.
        arena: Memory for intermediate pixels.
        interpolation: Interpolation of the resize, which is antialiased.

    Returns:
        Pixels, uint8 (side, side, 3).

    Raises:
        UserError: If the bytes cannot be decoded.
    """
    picture = read_picture(data, None, limits, arena)
    return resize_square(Image.fromarray(picture.pixels), side, interpolation)


def resize_square(
    image: Image.Image, side: int, interpolation: Interpolation = "bicubic"
) -> Pixels:
    """Resize the central square of an RGB image, antialiased; return uint8 (side, side, 3)."""
    square = min(image.size)
    left = (image.width - square) / 2
    top = (image.height - square) / 2
    box = (left, top, left + square, top + square)
    return np.asarray(image.resize((side, side), RESAMPLING[interpolation], box=box))


def read_picture(
    data: bytes,
    longest_side: int | None = None,
    limits: ImageLimits = ANY_RANGE,
    arena: Arena | None = None,
) -> Picture:
    """Decode an image, and reduce it if its long side exceeds `longest_side`.

    A JPEG is decoded at the smallest of the scales 1, 1/2, 1/4 and 1/8 at which its long side has
    at least `longest_side` pixels. If the result is still longer, it is resized (bilinear,
    antialiased).

    Args:
        data: Bytes of the file.
        longest_side: Limit of the long side in pixels. None: no limit.
        limits: Limits of the data set.
        arena: Memory for the pixels. The result can be a view into the arena, valid until
            `arena.clear`.

    Raises:
        UserError: If the bytes cannot be decoded.
    """
    try:
        picture = _read_jpeg(data, longest_side, limits.max_pixels, arena or Arena())
        if picture is None:
            picture = _read_with_pillow(data, longest_side, limits)
    except (OSError, ValueError, SyntaxError) as error:
        raise UserError(
            f"an image of {len(data)} bytes cannot be decoded here ({error}), though ingest could; "
            "use the same version of Pillow on all machines"
        ) from None
    if longest_side is None:
        return picture
    return _reduce_picture(picture, longest_side)


def _read_jpeg(
    data: bytes, longest_side: int | None, max_pixels: int, arena: Arena
) -> Picture | None:
    """Decode a JPEG with simplejpeg. Return None if Pillow must decode the image.

    Pillow decodes other formats and colour spaces, JPEGs that are not upright, and JPEGs that
    simplejpeg cannot decode.

    Raises:
        ValueError: If the image has too many pixels.
    """
    if simplejpeg is None or not data.startswith(JPEG_START):
        return None
    try:
        height, width, colours, _ = simplejpeg.decode_jpeg_header(data)
    except ValueError:
        return None
    if colours not in ("YCbCr", "Gray"):
        return None
    _check_pixel_count(width, height, max_pixels)
    if not _is_upright(data):
        return None
    scale = _choose_dct_scale(height, width, longest_side)
    scaled_height = -(-height // scale)
    scaled_width = -(-width // scale)
    try:
        pixels: Pixels = simplejpeg.decode_jpeg(
            data,
            "RGB",
            min_height=scaled_height,
            min_width=scaled_width,
            buffer=arena.take(3 * scaled_height * scaled_width),
        )
    except ValueError:
        return None
    assert pixels.shape == (scaled_height, scaled_width, 3), pixels.shape
    return Picture(pixels, height, width)


def _read_with_pillow(data: bytes, longest_side: int | None, limits: ImageLimits) -> Picture:
    image = open_image(data, limits.max_pixels)
    width, height = image.size
    scale = _choose_dct_scale(height, width, longest_side)
    if scale > 1:
        image.draft(None, (width // scale, height // scale))  # has an effect only on JPEGs
        try:
            image.load()  # decodes now, to catch the error here
        except OSError:  # a lossless JPEG cannot be decoded at a smaller scale
            image = open_image(data, limits.max_pixels)
    is_turned = image.getexif().get(ORIENTATION) in TURNED
    pixels = np.asarray(to_rgb(image, limits.value_range))
    if is_turned:
        return Picture(pixels, width, height)
    return Picture(pixels, height, width)


def _is_upright(data: bytes) -> bool:
    """Return whether a JPEG has no orientation tag, or an upright orientation."""
    if not any(mark in data for mark in ORIENTATION_MARKS):
        return True
    try:
        image = Image.open(io.BytesIO(data), formats=("JPEG",))
        orientation = image.getexif().get(ORIENTATION, 1)
    except (OSError, ValueError, SyntaxError):
        return False
    return bool(orientation == 1)


def _choose_dct_scale(height: int, width: int, longest_side: int | None) -> int:
    """Return the factor by which the decoder reduces an image: 8, 4, 2 or 1."""
    if longest_side is None or max(height, width) < SHORTEST_SCALED:
        return 1
    for scale in DCT_SCALES:
        if max(height, width) >= scale * longest_side and min(height, width) >= scale:
            return scale
    return 1


def _reduce_picture(picture: Picture, longest_side: int) -> Picture:
    """Resize a picture if the long side of its pixels exceeds `longest_side`."""
    height, width, _ = picture.pixels.shape
    if max(height, width) <= longest_side:
        return picture
    share = longest_side / max(picture.height, picture.width)
    size = (max(1, round(share * picture.width)), max(1, round(share * picture.height)))
    image = Image.fromarray(picture.pixels).resize(size, Image.Resampling.BILINEAR)
    return picture._replace(pixels=np.asarray(image))
