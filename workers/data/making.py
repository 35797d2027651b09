"""Making images: the bytes of an image file, or a picture that is kept decoded, become pixels.

The threads of a rank and its loader processes run the same code, and give the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from workers.data.arena import Arena
from workers.data.crops import CropDraws, Cutter, View
from workers.data.decoding import ImageLimits, Picture, decode, read_picture, resize_square
from workers.data.memory import PART_VALUES, parts_of
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


class Statistics(NamedTuple):
    """How pixels become the input of a network: (pixels / 255 - mean) / deviation, as one product
    and one sum.

    scale, shift: (3, 1, 1) float32.
    """

    scale: Tensor
    shift: Tensor

    @classmethod
    def of(cls, mean: Sequence[float], deviation: Sequence[float]) -> Statistics:
        """Return the statistics of three colours."""
        scale = torch.tensor([1 / (255 * value) for value in deviation])
        shift = torch.tensor([-m / d for m, d in zip(mean, deviation, strict=True)])
        return cls(scale.view(3, 1, 1), shift.view(3, 1, 1))

    def normalise(self, pixels: Tensor, images: Tensor) -> None:
        """Write uint8 pixels (b, 3, s, s) of a CPU into float32 images, in parts that fit its
        cache."""
        for part in parts_of(images, 0, len(images)):
            images[part].copy_(pixels[part]).mul_(self.scale).add_(self.shift)


class ImageMaker:
    """Makes the images of a view from pictures; not thread-safe, as it uses its memory again.

    statistics: of the network that images are normalised for; None: they stay uint8.
    """

    def __init__(self, view: View, statistics: Statistics | None = None):
        self.view = view
        self.statistics = statistics
        self.cutter = Cutter(view.side)
        self.arena = Arena()
        # as many as a CPU normalises at once, while they are in its cache
        count = max(1, PART_VALUES // (3 * view.side**2))
        self._pixels = torch.empty((count, 3, view.side, view.side), dtype=torch.uint8)

    @property
    def dtype(self) -> torch.dtype:
        """Of images."""
        return torch.uint8 if self.statistics is None else torch.float32

    def make(
        self,
        pictures: Iterator[Picture],
        images: Tensor,
        places: Ints,
        crops: CropDraws | None,
        indices: Ints,
    ) -> None:
        """Write images.

        Args:
            pictures: Of k images; neighbours may be the same picture.
            images: (n, 3, side, side) All images of a step, float32 where they are normalised.
            places: (k,) Which of them are written.
            crops: The draws of their crops; None: they are central squares.
            indices: (k,) Which of the draws belong to them.
        """
        if self.statistics is None:
            self._cut(pictures, images.numpy(), places.tolist(), crops, indices)
            return
        for start in range(0, len(places), len(self._pixels)):
            of_part = slice(start, start + len(self._pixels))
            self._make_part(pictures, images, places[of_part].tolist(), crops, indices[of_part])

    def _make_part(
        self,
        pictures: Iterator[Picture],
        images: Tensor,
        places: list[int],
        crops: CropDraws | None,
        indices: Ints,
    ) -> None:
        assert self.statistics is not None
        pixels = self._pixels[: len(places)]
        self._cut(pictures, pixels.numpy(), range(len(places)), crops, indices)
        if places == list(range(places[0], places[0] + len(places))):
            self.statistics.normalise(pixels, images[places[0] : places[-1] + 1])
            return
        for number, place in enumerate(places):
            self.statistics.normalise(pixels[number : number + 1], images[place : place + 1])

    def _cut(
        self,
        pictures: Iterator[Picture],
        images: NDArray[np.uint8],
        places: Sequence[int],
        crops: CropDraws | None,
        indices: Ints,
    ) -> None:
        last_picture = None
        for index, place, picture in zip(indices.tolist(), places, pictures, strict=False):
            if crops is not None:
                self.cutter.cut(crops, index, picture, images[place])
                continue
            if picture is not last_picture:
                whole = Image.fromarray(picture.pixels)
                square = resize_square(whole, self.view.side, self.view.interpolation)
            images[place] = square.transpose(2, 0, 1)
            last_picture = picture
