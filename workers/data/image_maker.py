"""Decode image files, cut crops and normalise them.

The threads of a rank and its loader processes run this code, and produce identical results.
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
from workers.data.memory import PART_VALUES, split_parts
from workers.data.order import Ints


class Decode(Protocol):
    """Decodes an image file.

    The returned pixels can be a view of the arena (reusable memory), valid until it is cleared.
    """

    def __call__(self, data: bytes, limits: ImageLimits, arena: Arena) -> Picture:
        """Return the decoded picture."""

    @property
    def most_bytes(self) -> int:
        """Maximum size of the decoded pixels in bytes."""


class ReadPicture(NamedTuple):
    """Decodes a whole image. Images longer than `longest_side` pixels are reduced to that side.

    With `longest_side` None, no image is reduced.
    """

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


class Normalisation(NamedTuple):
    """The function (pixels / 255 - mean) / std, computed as pixels * scale + shift.

    Attributes:
        scale: 1 / (255 * std), float32 (3, 1, 1).
        shift: -mean / std, float32 (3, 1, 1).
    """

    scale: Tensor
    shift: Tensor

    @classmethod
    def from_statistics(cls, mean: Sequence[float], std: Sequence[float]) -> Normalisation:
        """Compute scale and shift from the mean and standard deviation of each colour channel."""
        scale = torch.tensor([1 / (255 * value) for value in std])
        shift = torch.tensor([-m / s for m, s in zip(mean, std, strict=True)])
        return cls(scale.view(3, 1, 1), shift.view(3, 1, 1))

    def apply(self, pixels: Tensor, images: Tensor) -> None:
        """Write normalised pixels to `images` on the CPU, in parts that fit into its cache.

        Args:
            pixels: uint8 (b, 3, s, s).
            images: Output, float32 (b, 3, s, s).
        """
        for part in split_parts(images, 0, len(images)):
            images[part].copy_(pixels[part]).mul_(self.scale).add_(self.shift)


class ImageMaker:
    """Makes images of one size from decoded pictures. Not thread-safe: it reuses its buffers.

    Args:
        view: Size and crop of the images.
        normalisation: Applied to the images; None keeps them uint8.
    """

    def __init__(self, view: View, normalisation: Normalisation | None = None):
        self.view = view
        self.normalisation = normalisation
        self.cutter = Cutter(view.side)
        self.arena = Arena()
        # number of images that fit into the cache of the CPU
        count = max(1, PART_VALUES // (3 * view.side**2))
        self._pixels = torch.empty((count, 3, view.side, view.side), dtype=torch.uint8)

    @property
    def dtype(self) -> torch.dtype:
        """Type of the images."""
        return torch.uint8 if self.normalisation is None else torch.float32

    def make(
        self,
        pictures: Iterator[Picture],
        images: Tensor,
        slots: Ints,
        crops: CropDraws | None,
        indices: Ints,
    ) -> None:
        """Write some images of a step.

        Args:
            pictures: The k pictures. The central square of a repeated object is resized once.
            images: All images of the step, (n, 3, side, side), of type `dtype`.
            slots: Index in `images` of each written image, (k,).
            crops: Random numbers of the crops. None: central squares.
            indices: Index in `crops` of each written image, (k,).
        """
        if self.normalisation is None:
            self._cut(pictures, images.numpy(), slots.tolist(), crops, indices)
            return
        for start in range(0, len(slots), len(self._pixels)):
            of_part = slice(start, start + len(self._pixels))
            self._make_part(pictures, images, slots[of_part].tolist(), crops, indices[of_part])

    def _make_part(
        self,
        pictures: Iterator[Picture],
        images: Tensor,
        slots: list[int],
        crops: CropDraws | None,
        indices: Ints,
    ) -> None:
        """Write normalised images, as many as fit into the cache of the CPU; see `make`."""
        assert self.normalisation is not None
        pixels = self._pixels[: len(slots)]
        self._cut(pictures, pixels.numpy(), range(len(slots)), crops, indices)
        if slots == list(range(slots[0], slots[0] + len(slots))):  # adjacent: one call for all
            self.normalisation.apply(pixels, images[slots[0] : slots[-1] + 1])
            return
        for number, slot in enumerate(slots):
            self.normalisation.apply(pixels[number : number + 1], images[slot : slot + 1])

    def _cut(
        self,
        pictures: Iterator[Picture],
        images: NDArray[np.uint8],
        slots: Sequence[int],
        crops: CropDraws | None,
        indices: Ints,
    ) -> None:
        last_picture = None
        # The iterator `pictures` can continue with the pictures of the next part. It is the last
        # argument of `zip`, so `zip` stops at the end of `indices` before it takes a picture.
        for index, slot, picture in zip(indices.tolist(), slots, pictures, strict=False):
            if crops is not None:
                self.cutter.cut(crops, index, picture, images[slot])
                continue
            if picture is not last_picture:
                whole = Image.fromarray(picture.pixels)
                square = resize_square(whole, self.view.side, self.view.interpolation)
            images[slot] = square.transpose(2, 0, 1)
            last_picture = picture
