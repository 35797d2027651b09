"""Making images: the bytes of an image file, or a picture that is kept decoded, become pixels.

The threads of a rank and its loader processes run the same code, and give the same bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from workers.data.arena import Arena
from workers.data.crops import CropDraws, Cutter, View
from workers.data.decoding import ImageLimits, Picture, decode, read_picture, resize_square
from workers.data.order import Ints


class Decode(Protocol):
    """Decodes the bytes of an image within limits; the picture may lie in the arena."""

    def __call__(self, data: bytes, limits: ImageLimits, arena: Arena) -> Picture:
        """Return the picture."""

    @property
    def most_bytes(self) -> int:
        """The most bytes that the pixels of a picture take."""


class ReadPicture(NamedTuple):
    """Decodes a whole image; one that is longer than `longest_side` is reduced to that."""

    longest_side: int | None

    def __call__(self, data: bytes, limits: ImageLimits, arena: Arena) -> Picture:
        """See `Decode`."""
        return read_picture(data, self.longest_side, limits, arena)

    @property
    def most_bytes(self) -> int:
        """See `Decode`."""
        assert self.longest_side is not None, "a whole image has no limit"
        return 3 * self.longest_side**2


class ReadSquare(NamedTuple):
    """Decodes the central square of an image, resized to the side of a view."""

    view: View

    def __call__(self, data: bytes, limits: ImageLimits, arena: Arena) -> Picture:
        """See `Decode`."""
        side = self.view.side
        return Picture(decode(data, side, limits, arena, self.view.interpolation), side, side)

    @property
    def most_bytes(self) -> int:
        """See `Decode`."""
        return 3 * self.view.side**2


class ImageMaker:
    """Makes the images of a view from pictures; not thread-safe, as it uses its memory again."""

    def __init__(self, view: View):
        self.view = view
        self.cutter = Cutter(view.side)
        self.arena = Arena()

    def make(
        self,
        pictures: Iterator[Picture],
        images: Iterable[NDArray[np.uint8]],
        crops: CropDraws | None,
        indices: Ints,
    ) -> None:
        """Write images.

        Args:
            pictures: Of k images; neighbours may be the same picture.
            images: k times uint8 (3, side, side), which are written.
            crops: The draws of their crops; None: they are central squares.
            indices: (k,) Which of the draws belong to them.
        """
        last_picture = None
        for index, image, picture in zip(indices.tolist(), images, pictures, strict=True):
            if crops is not None:
                self.cutter.cut(crops, index, picture, image)
                continue
            if picture is not last_picture:
                whole = Image.fromarray(picture.pixels)
                square = resize_square(whole, self.view.side, self.view.interpolation)
            image[...] = square.transpose(2, 0, 1)
            last_picture = picture
