"""Images of requests (paths, bytes, base64, arrays, Pillow images) -> the pixels of evaluation.

An image that cannot be used raises `UserError` with one sentence.
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
from workers.errors import UserError
from workers.job import Interpolation
from workers.storage.regular_file import read_regular

FORMATS = ("JPEG", "PNG", "WEBP")
LONGEST_PATH = 4096
LONGEST_SIDE = 65_535  # of JPEG; resizing a line of millions of pixels costs seconds
ENDINGS = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff")


@dataclass(frozen=True)
class Limits:
    """What a request may contain.

    Attributes:
        max_pixels: Most pixels of one image.
        total_pixels: Most pixels of all images of a request, by their headers; None: any number.
        value_range: The values of black and white in images of more than 8 bits.
        paths: Whether strings may name local files. A server must not read its host's files for
            strangers.
        images: Most images of a request.
        image_bytes: Most bytes of one encoded image.
        body_bytes: Most bytes of all images of a request as they are sent.
    """

    max_pixels: int = MAX_PIXELS
    total_pixels: int | None = None
    value_range: tuple[float, float] | None = None
    paths: bool = False
    images: int = 1024
    image_bytes: int = 32 << 20
    body_bytes: int = 128 << 20


class PixelBudget:
    """Bounds the memory of decoding.

    Images that threads decode at the same moment have at most `most` pixels together.
    """

    def __init__(self, most: int):
        self.most = most
        self.used = 0
        self.changed = threading.Condition()

    @contextmanager
    def reserved(self, pixels: int) -> Iterator[None]:
        """Wait until there is room. An image that exceeds the budget is decoded alone."""
        pixels = min(pixels, self.most)
        with self.changed:
            self.changed.wait_for(lambda: self.used + pixels <= self.most)
            self.used += pixels
        try:
            yield
        finally:
            with self.changed:
                self.used -= pixels
                self.changed.notify_all()


def pixels_of(
    images: Sequence[Any],
    side: int,
    limits: Limits,
    budget: PixelBudget | None = None,
    interpolation: Interpolation = "bicubic",
    is_cancelled: Callable[[], bool] = lambda: False,
) -> NDArray[np.uint8]:
    """Return images of any kind as uint8 (n, 3, side, side), as `decode` reads them from shards.

    Args:
        images: Of one request.
        side: Of the result, in pixels.
        limits: Of a request.
        budget: Shared by the threads that decode.
        interpolation: Of the resize.
        is_cancelled: Whether nobody waits for the result any more; no further image is then
            decoded.

    Raises:
        UserError: With the index of the first image that cannot be used; or if it is cancelled.
    """
    if isinstance(images, (str, bytes, bytearray)):
        raise UserError("images is a single one; give a list of images")
    if len(images) > limits.images:
        raise UserError(
            f"{len(images)} images in one request are more than {limits.images}; send them in "
            "several requests"
        )
    size = sum(map(size_of, images))
    if size > limits.body_bytes:
        raise UserError(
            f"the images of this request take {size} bytes, more than {limits.body_bytes}; send "
            "them in several requests"
        )
    areas = [0] * len(images)
    if limits.total_pixels is not None:
        for index, image in enumerate(images):
            with _named(index, image):
                areas[index] = area(image, limits)
        check_total(areas, limits.total_pixels)
    out = np.empty((len(images), 3, side, side), np.uint8)
    for index, image in enumerate(images):
        reservation: AbstractContextManager[None] = nullcontext()
        if budget:
            reservation = budget.reserved(areas[index])
        with _named(index, image), reservation:
            if is_cancelled():
                raise UserError("is not decoded: the request was cancelled")
            square = resize_square(to_pillow(image, limits), side, interpolation)
            out[index] = square.transpose(2, 0, 1)
    return out


@contextmanager
def _named(index: int, image: Any) -> Iterator[None]:
    """Put the index of an image, and its path, in front of a `UserError` about it."""
    try:
        yield
    except UserError as error:
        name = f"image {index}"
        if is_path(image):
            name += f" ({image})"
        raise UserError(f"{name} {error}") from None


def check_total(areas: Sequence[int], most: int) -> None:
    """Raise `UserError` when the images of a request have too many pixels together."""
    if sum(areas) > most:
        raise UserError(
            f"the {len(areas)} images of this request have {sum(areas)} pixels together, more "
            f"than {most}; send smaller ones, or fewer"
        )


def area(image: Any, limits: Limits) -> int:
    """Return the pixels of one image without decoding it. Raise `UserError` if it is invalid."""
    if isinstance(image, Image.Image):
        return image.width * image.height
    if isinstance(image, (list, tuple, np.ndarray)):
        height, width, _ = array_of(image, limits).shape
        return int(height * width)
    header = opened(encoded(image, limits), limits)
    return header.width * header.height


def size_of(image: Any) -> int:
    """Return the bytes of one image as it was sent; 0 for lists, whose pixels are limited."""
    if isinstance(image, (str, bytes, bytearray)):
        return len(image)
    if isinstance(image, np.ndarray):
        return image.nbytes
    return 0


def to_pillow(image: Any, limits: Limits) -> Image.Image:
    """Return one image of any kind as a Pillow image in RGB.

    Raise `UserError` with a text that follows the image's name.
    """
    if isinstance(image, Image.Image):
        check_pixels(image.width, image.height, limits)
        return _decoded(lambda: to_rgb(image, limits.value_range))
    if isinstance(image, (list, tuple, np.ndarray)):
        return Image.fromarray(array_of(image, limits))
    return decoded(encoded(image, limits), limits)


def encoded(image: Any, limits: Limits) -> bytes:
    """Return the bytes of an image file from a path, text or bytes. Raise `UserError` otherwise."""
    if isinstance(image, os.PathLike):
        image = _read(os.fspath(image), limits)
    if isinstance(image, str):
        image = from_text(image, limits)
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


def decoded(data: bytes, limits: Limits) -> Image.Image:
    """Decode an image file to RGB. Raise `UserError` for too many pixels before decoding."""
    image = opened(data, limits)
    return _decoded(lambda: to_rgb(image, limits.value_range))


def opened(data: bytes, limits: Limits) -> Image.Image:
    """Open an image and read only its header.

    Raise `UserError` when it is no image or has too many pixels.
    """
    try:
        image = open_image(data, limits.max_pixels, FORMATS)
    except ValueError as error:
        raise UserError(f"is too large: {error}; send a smaller one") from None
    except Exception:  # Pillow's plugins raise almost anything
        raise UserError(
            f"is not an image that can be read here ({len(data)} bytes); give a JPEG, PNG or "
            "WebP file"
        ) from None
    check_pixels(image.width, image.height, limits)
    return image


def _decoded(load: Callable[[], Image.Image]) -> Image.Image:
    try:
        return load()
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(f"is damaged ({reason}); give a whole JPEG, PNG or WebP file") from None


def array_of(image: Any, limits: Limits) -> NDArray[np.uint8]:
    """Return an array, or nested lists of whole numbers from 0 to 255, as uint8 (H, W, 3)."""
    if isinstance(image, np.ndarray) and image.dtype == object:  # what data frames make of lists
        image = image.tolist()
    try:
        array = np.asarray(image)
    except ValueError:
        raise UserError(
            "is a list whose rows differ in length; give (height, width, 3) whole numbers from "
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
            f"holds {array.dtype} values, not all of them whole numbers from 0 to 255; give such"
        )
    return np.ascontiguousarray(array, np.uint8)


def check_pixels(width: int, height: int, limits: Limits) -> None:
    """Raise `UserError` when an image has too many pixels or a side is too long."""
    if max(width, height) > LONGEST_SIDE:
        raise UserError(
            f"is too long: {width} x {height}, and a side may have {LONGEST_SIDE} pixels; send "
            "a smaller one"
        )
    if width * height > limits.max_pixels:
        raise UserError(
            f"is too large: {width} x {height} is more than max_pixels = {limits.max_pixels}; "
            "send a smaller one"
        )


def from_text(text: str, limits: Limits) -> bytes:
    """Return the bytes of base64, of a `data:` URL, or of a file if `limits` allows paths."""
    body = text.partition(",")[2] if text.startswith("data:") else text
    if len(body) * 3 // 4 > limits.image_bytes + 3:
        raise UserError(
            f"takes {len(body) * 3 // 4} bytes, more than {limits.image_bytes}; send a smaller one"
        )
    try:
        data = base64.b64decode("".join(body.split()), validate=True)
    except (binascii.Error, ValueError):
        data = None
    if limits.paths and len(text) <= LONGEST_PATH and (data is None or os.path.exists(text)):
        return _read(text, limits)
    if data is None and is_path(text):
        raise UserError(
            "names a file, and no files are read here; send the bytes of the image as base64"
        )
    if data is None:
        raise UserError(
            "is text that is not base64; give the bytes of a JPEG, PNG or WebP file as base64"
        )
    return data


def is_path(image: Any) -> bool:
    """Return whether text looks like the name of a file, which errors then mention."""
    if isinstance(image, os.PathLike):
        return True
    if not isinstance(image, str) or not 0 < len(image) <= 256 or not image.isprintable():
        return False
    return (
        image.lower().endswith(ENDINGS)
        or "://" in image
        or image.startswith(("./", "../", "~"))
        or (image.startswith("/") and "=" not in image)
    )


def _read(path: str, limits: Limits) -> bytes:
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
