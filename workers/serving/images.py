"""Decode the images of a request to pixels, in the same way as for evaluation.

An image may be a path, bytes, base64, an array, or a Pillow image. An invalid image raises
`UserError` with one sentence. The functions for one image leave out the subject of this sentence
("is too large: ..."), because `read_pixels` prepends the index of the image.
"""

from __future__ import annotations

import base64
import binascii
import errno
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from workers.data.decoding import MAX_PIXELS, open_image, resize_square, to_rgb
from workers.errors import UserError, describe_error
from workers.job import Interpolation
from workers.storage.regular_file import read_regular

FORMATS = ("JPEG", "PNG", "WEBP")
MAX_PATH_CHARACTERS = 4096
MAX_SIDE = 65_535  # pixels, the limit of JPEG; a line of millions of pixels takes seconds to resize
IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff")


@dataclass(frozen=True)
class Limits:
    """Limits of a request.

    Attributes:
        max_pixels: Maximum number of pixels of one image.
        total_pixels: Maximum number of pixels of all images, according to their headers; None: no
            limit.
        value_range: The values of black and white in images of more than 8 bits. None: the range
            that the format of each image declares.
        paths: Whether a string may be the path of a local file. A server must not read local files
            for clients.
        images: Maximum number of images.
        image_bytes: Maximum bytes of one encoded image.
        body_bytes: Maximum bytes of all images in the form in which they are sent.
    """

    max_pixels: int = MAX_PIXELS
    total_pixels: int | None = None
    value_range: tuple[float, float] | None = None
    paths: bool = False
    images: int = 1024
    image_bytes: int = 32 << 20
    body_bytes: int = 128 << 20


class PixelBudget:
    """Limits the memory that threads use for decoding.

    Args:
        limit: Maximum number of pixels of all images decoded at the same time.
    """

    def __init__(self, limit: int):
        self.limit = limit
        self.used = 0
        self.changed = threading.Condition()

    @contextmanager
    def reserve(self, pixels: int) -> Iterator[None]:
        """Context manager that waits until the pixels fit into the budget, and reserves them.

        Args:
            pixels: Number of pixels. An image that exceeds the limit gets the whole budget.
        """
        pixels = min(pixels, self.limit)
        with self.changed:
            self.changed.wait_for(lambda: self.used + pixels <= self.limit)
            self.used += pixels
        try:
            yield
        finally:
            with self.changed:
                self.used -= pixels
                self.changed.notify_all()


def read_pixels(
    images: Sequence[Any],
    side: int,
    limits: Limits,
    budget: PixelBudget | None = None,
    interpolation: Interpolation = "bicubic",
    is_cancelled: Callable[[], bool] = lambda: False,
) -> NDArray[np.uint8]:
    """Decode and resize images of any kind, with the same result as for images from shards.

    Args:
        images: The images of one request.
        side: Height and width of the result, in pixels.
        limits: Limits of a request.
        budget: Budget that all decoding threads share. It has no effect if
            `limits.total_pixels` is None.
        interpolation: Interpolation of the resize.
        is_cancelled: Function that returns whether the request was cancelled; then no further
            image is decoded.

    Returns:
        uint8 (n, 3, side, side).

    Raises:
        UserError: If an image cannot be used, with the index of the first one; if a limit is
            exceeded; or if the request is cancelled.
    """
    if isinstance(images, (str, bytes, bytearray)):
        raise UserError("images is a single image; give a list of images")
    if len(images) > limits.images:
        raise UserError(
            f"{len(images)} images in one request are more than {limits.images}; send them in "
            "several requests"
        )
    size = sum(map(count_bytes, images))
    if size > limits.body_bytes:
        raise UserError(
            f"the images of this request take {size} bytes, more than {limits.body_bytes}; send "
            "them in several requests"
        )
    areas = [0] * len(images)
    if limits.total_pixels is not None:
        for index, image in enumerate(images):
            with _prefix_errors(index, image):
                areas[index] = count_pixels(image, limits)
        check_total(areas, limits.total_pixels)
    out = np.empty((len(images), 3, side, side), np.uint8)
    for index, image in enumerate(images):
        reservation: AbstractContextManager[None] = nullcontext()
        if budget:
            reservation = budget.reserve(areas[index])
        with _prefix_errors(index, image), reservation:
            if is_cancelled():
                raise UserError("is not decoded: the request was cancelled")
            square = resize_square(to_pillow(image, limits), side, interpolation)
            out[index] = square.transpose(2, 0, 1)
    return out


@contextmanager
def _prefix_errors(index: int, image: Any) -> Iterator[None]:
    """Prepend the index of an image, and its path if it has one, to a `UserError`."""
    try:
        yield
    except UserError as error:
        name = f"image {index}"
        if is_path(image):
            name += f" ({image})"
        raise UserError(f"{name} {error}") from None


def check_total(areas: Sequence[int], limit: int) -> None:
    """Raise `UserError` if the images of a request have more than `limit` pixels in total."""
    if sum(areas) > limit:
        raise UserError(
            f"the {len(areas)} images of this request have {sum(areas)} pixels together, more "
            f"than {limit}; send smaller or fewer images"
        )


def count_pixels(image: Any, limits: Limits) -> int:
    """Return the number of pixels of one image of any kind, without decoding it.

    Raises:
        UserError: If the image is invalid or exceeds a limit.
    """
    if isinstance(image, Image.Image):
        return image.width * image.height
    if isinstance(image, (list, tuple, np.ndarray)):
        height, width, _ = to_array(image, limits).shape
        return int(height * width)
    header = open_header(read_encoded(image, limits), limits)
    return header.width * header.height


def count_bytes(image: Any) -> int:
    """Return the bytes of one image as it was sent; 0 for lists, Pillow images and path objects."""
    if isinstance(image, (str, bytes, bytearray)):
        return len(image)
    if isinstance(image, np.ndarray):
        return image.nbytes
    return 0


def to_pillow(image: Any, limits: Limits) -> Image.Image:
    """Decode one image of any kind to a Pillow image in RGB.

    Raises:
        UserError: If the image is invalid or exceeds a limit.
    """
    if isinstance(image, Image.Image):
        check_pixels(image.width, image.height, limits)
        return _load_image(lambda: to_rgb(image, limits.value_range))
    if isinstance(image, (list, tuple, np.ndarray)):
        return Image.fromarray(to_array(image, limits))
    return decode_file(read_encoded(image, limits), limits)


def read_encoded(image: Any, limits: Limits) -> bytes:
    """Return the bytes of an image file, given as a path, a string or bytes.

    Raises:
        UserError: If the image has another type, is too large, or cannot be read.
    """
    if isinstance(image, os.PathLike):
        image = _read_image_file(os.fspath(image), limits)
    if isinstance(image, str):
        image = read_text(image, limits)
    if not isinstance(image, (bytes, bytearray)):
        raise UserError(
            f"is a {type(image).__name__}; give the bytes of a JPEG, PNG or WebP file, its "
            "base64, or a uint8 array (height, width, 3)"
        )
    if len(image) > limits.image_bytes:
        raise UserError(
            f"takes {len(image)} bytes, more than {limits.image_bytes}; send a smaller one"
        )
    return bytes(image)


def decode_file(data: bytes, limits: Limits) -> Image.Image:
    """Decode the bytes of an image file to RGB.

    Raises:
        UserError: If the bytes are not an image, or the image has too many pixels. The pixels are
            counted before they are decoded.
    """
    image = open_header(data, limits)
    return _load_image(lambda: to_rgb(image, limits.value_range))


def open_header(data: bytes, limits: Limits) -> Image.Image:
    """Open an image file and read only its header.

    Raises:
        UserError: If the bytes are not an image, or the image has too many pixels.
    """
    try:
        image = open_image(data, limits.max_pixels, FORMATS)
    except ValueError as error:
        raise UserError(f"is too large: {error}; send a smaller one") from None
    except Exception:  # Pillow's plugins raise many kinds of errors
        raise UserError(
            f"is not an image that can be read here ({len(data)} bytes); give a JPEG, PNG or "
            "WebP file"
        ) from None
    check_pixels(image.width, image.height, limits)
    return image


def _load_image(load: Callable[[], Image.Image]) -> Image.Image:
    """Call `load`, and raise `UserError` if it fails."""
    try:
        return load()
    except Exception as error:
        reason = describe_error(error, only_first_line=True)
        raise UserError(f"is damaged ({reason}); give a complete JPEG, PNG or WebP file") from None


def to_array(image: Any, limits: Limits) -> NDArray[np.uint8]:
    """Return an array, or nested lists of integers from 0 to 255, as uint8 (H, W, 3).

    Raises:
        UserError: If the values or the shape are invalid, or a limit is exceeded.
    """
    if isinstance(image, np.ndarray) and image.dtype == object:  # pandas stores lists this way
        image = image.tolist()
    try:
        array = np.asarray(image)
    except ValueError:
        raise UserError(
            "is a list with rows of different lengths; give (height, width, 3) integers from "
            "0 to 255"
        ) from None
    if array.ndim != 3 or array.shape[2] != 3 or 0 in array.shape:
        raise UserError(
            f"has shape {tuple(array.shape)}; give (height, width, 3), with at least one pixel"
        )
    check_pixels(array.shape[1], array.shape[0], limits)
    if isinstance(image, np.ndarray) and array.dtype != np.uint8:
        raise UserError(f"has dtype {array.dtype}; give uint8, values from 0 to 255")
    if array.dtype != np.uint8 and (
        array.dtype.kind not in "iu" or array.min() < 0 or array.max() > 255
    ):
        raise UserError(
            f"holds {array.dtype} values, not only integers from 0 to 255; give uint8 values"
        )
    return np.ascontiguousarray(array, np.uint8)


def check_pixels(width: int, height: int, limits: Limits) -> None:
    """Raise `UserError` if an image has too many pixels or a side is too long.

    Args:
        width: Width in pixels.
        height: Height in pixels.
        limits: Limits of the request.
    """
    if max(width, height) > MAX_SIDE:
        raise UserError(
            f"is too long: {width} x {height}, but a side may have {MAX_SIDE} pixels; send a "
            "smaller one"
        )
    if width * height > limits.max_pixels:
        raise UserError(
            f"is too large: {width} x {height} is more than max_pixels = {limits.max_pixels}; "
            "send a smaller one"
        )


def read_text(text: str, limits: Limits) -> bytes:
    """Return the bytes of base64, of a `data:` URL, or of a file if `limits` allows paths.

    Raises:
        UserError: If the text is none of these or is too long, or if the file cannot be read.
    """
    body = text.partition(",")[2] if text.startswith("data:") else text
    if len(body) * 3 // 4 > limits.image_bytes + 3:
        raise UserError(
            f"takes {len(body) * 3 // 4} bytes, more than {limits.image_bytes}; send a smaller one"
        )
    try:
        data = base64.b64decode("".join(body.split()), validate=True)
    except (binascii.Error, ValueError):
        data = None
    # a path can also be valid base64, so an existing file is preferred
    may_be_path = limits.paths and len(text) <= MAX_PATH_CHARACTERS
    if may_be_path and (data is None or os.path.exists(text)):
        return _read_image_file(text, limits)
    if data is None and is_path(text):
        raise UserError(
            "is the name of a file, but no files are read here; send the bytes of the image as "
            "base64"
        )
    if data is None:
        raise UserError(
            "is text that is not base64; give the bytes of a JPEG, PNG or WebP file as base64"
        )
    return data


def is_path(image: Any) -> bool:
    """Return whether an image is, or looks like, the name of a file.

    Errors contain such a name, but not the text of an image that is given as base64.
    """
    if isinstance(image, os.PathLike):
        return True
    if not isinstance(image, str) or not 0 < len(image) <= 256 or not image.isprintable():
        return False
    return (
        image.lower().endswith(IMAGE_SUFFIXES)
        or "://" in image
        or image.startswith(("./", "../", "~"))
        or (image.startswith("/") and "=" not in image)
    )


def _read_image_file(path: str, limits: Limits) -> bytes:
    """Return the bytes of an image file. Raise `UserError` if it cannot be read."""
    try:
        return read_regular(path, limits.image_bytes)
    except OSError as error:
        if error.errno == errno.EFBIG:
            raise UserError(
                f"takes more than {limits.image_bytes} bytes; send a smaller one"
            ) from None
        raise UserError(
            f"cannot be read ({error.strerror or error}); give the path of a JPEG, PNG or WebP file"
        ) from None
