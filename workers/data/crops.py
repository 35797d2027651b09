"""Random resized crops (`crop: resized`): draw the box of a sample, and cut and resize its pixels.

The box is relative to the size of the original image, as in torchvision's RandomResizedCrop
(Szegedy et al. 2015, arXiv 1409.4842). Crops are resized on the host, because images have different
sizes, and in integer arithmetic, so that the pixels are the same on every machine.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workers.data.decoding import Picture, Pixels
from workers.data.order import Ints
from workers.data.torch_internals import resize_into
from workers.job import Interpolation
from workers.rng import StepRng

CPU = torch.device("cpu")
ATTEMPTS = 10  # random boxes per sample; if none fits, the central box is used
RATIO = (3 / 4, 4 / 3)  # smallest and largest width / height
MAX_WINDOWS = 2048  # maximum number of cached `Window` objects, one per size of a box


@dataclass(frozen=True)
class View:
    """How the square pixels of a sample are taken from an image.

    Attributes:
        side: Side of the sample's square in pixels.
        longest_side: Limit in pixels of the longest side of the image that random crops are cut
            from; larger images are reduced. None: a sample is the central square of the image.
        interpolation: Interpolation that resizes the central square. Crops are always bilinear.
    """

    side: int
    longest_side: int | None = None
    interpolation: Interpolation = "bicubic"


class Box(NamedTuple):
    """A rectangle in whole pixels."""

    top: int
    left: int
    height: int
    width: int


@dataclass(frozen=True)
class CropDraws:
    """The random numbers of the crops of k samples.

    Attributes:
        sides: Height and width of the candidate boxes for an image of area 1, (k, ATTEMPTS, 2).
        corners: Position of the box from top to bottom and from left to right, in [0, 1), (k, 2).
        flips: Whether the crop is mirrored, (k,).
    """

    sides: NDArray[np.float64]
    corners: NDArray[np.float64]
    flips: NDArray[np.bool_]

    @classmethod
    def draw(
        cls, rng: StepRng, positions: Tensor, scale: tuple[float, float], flip: float
    ) -> CropDraws:
        """Draw the numbers of some samples of a step's global batch.

        The logarithm of width / height is uniform within RATIO.

        Args:
            rng: Random numbers of the step.
            positions: Positions in the global batch, (k,).
            scale: Range of the share of the image area that the box covers. The share is uniform.
            flip: Probability of mirroring.
        """
        boxes = rng.generator("crop.box", CPU)
        uniform = torch.rand((rng.size, ATTEMPTS, 2), generator=boxes, dtype=torch.float64)
        share, exponent = uniform[positions].unbind(-1)
        area = scale[0] + (scale[1] - scale[0]) * share
        low, high = math.log(RATIO[0]), math.log(RATIO[1])
        ratio = torch.exp(low + (high - low) * exponent)
        sides = torch.stack(((area / ratio).sqrt(), (area * ratio).sqrt()), -1)
        corner = rng.generator("crop.corner", CPU)
        corners = torch.rand((rng.size, 2), generator=corner, dtype=torch.float64)[positions]
        flips = torch.rand(rng.size, generator=rng.generator("flip", CPU))[positions] < flip
        return cls(sides.numpy(), corners.numpy(), flips.numpy())

    def store(self, requests: NDArray[Any], indices: Ints) -> None:
        """Write the numbers of some samples into requests to loader processes.

        Args:
            requests: Rows of a structured array, see `shared_blocks`.
            indices: Indices of the samples among the k samples.
        """
        requests["sides"] = self.sides[indices]
        requests["corner"] = self.corners[indices]
        requests["flip"] = self.flips[indices]

    @classmethod
    def load(cls, requests: NDArray[Any]) -> CropDraws:
        """Read the numbers from requests, which `store` has filled."""
        return cls(requests["sides"], requests["corner"], requests["flip"])

    # Flat lists: reading an item is faster than from an array, and the garbage collector does not
    # track the items, as it would track nested lists.
    @cached_property
    def _first_sides(self) -> list[float]:
        """Height and width of the first attempt, which fits most images, as one list (k * 2,)."""
        return _flat(self.sides[:, 0])

    @cached_property
    def _flat_corners(self) -> list[float]:
        """The corners as one list, (k * 2,)."""
        return _flat(self.corners)

    @cached_property
    def are_flipped(self) -> list[bool]:
        """Whether each crop is mirrored, (k,)."""
        flips: list[bool] = self.flips.tolist()
        return flips

    def box(self, index: int, height: int, width: int) -> Box:
        """Return the box of a sample in an image of `height` x `width`.

        The box is the first of ATTEMPTS random boxes that fits. If none fits, it is the largest
        central box within RATIO.
        """
        root = math.sqrt(height * width)
        box_height = round(root * self._first_sides[2 * index])
        box_width = round(root * self._first_sides[2 * index + 1])
        attempt = 1
        while not (0 < box_height <= height and 0 < box_width <= width):
            if attempt == ATTEMPTS:
                return make_central_box(height, width)
            sides = self.sides[index, attempt].tolist()
            box_height = round(root * sides[0])
            box_width = round(root * sides[1])
            attempt += 1
        top = int(self._flat_corners[2 * index] * (height - box_height + 1))
        left = int(self._flat_corners[2 * index + 1] * (width - box_width + 1))
        return Box(top, left, box_height, box_width)


def _flat(values: NDArray[np.float64]) -> list[float]:
    numbers: list[float] = values.flatten().tolist()
    return numbers


def make_central_box(height: int, width: int) -> Box:
    """Return the largest central box of an image with width / height within RATIO."""
    box_height = height
    box_width = width
    if width < RATIO[0] * height:
        box_height = round(width / RATIO[0])
    elif width > RATIO[1] * height:
        box_width = round(height * RATIO[1])
    top = (height - box_height) // 2
    left = (width - box_width) // 2
    return Box(top, left, box_height, box_width)


def scale_box(box: Box, picture: Picture) -> Box:
    """Convert a box of the original image to pixels of its picture, which can be smaller."""
    height, width, _ = picture.pixels.shape
    if (height, width) == (picture.height, picture.width):
        return box
    top, scaled_height = _scale_interval(box.top, box.height, height, picture.height)
    left, scaled_width = _scale_interval(box.left, box.width, width, picture.width)
    return Box(top, left, scaled_height, scaled_width)


def _scale_interval(start: int, length: int, side: int, original_side: int) -> tuple[int, int]:
    """Scale an interval from `original_side` to `side` pixels; return its start and length."""
    first = min(round(start * side / original_side), side - 1)
    end = round((start + length) * side / original_side)
    return first, max(1, end - first)


class Window(NamedTuple):
    """Memory for the pixels of a box: uint8 (h, w, 3), and a view as planes (1, 3, h, w)."""

    pixels: Pixels
    planes: Tensor


class Cutter:
    """Cuts crops of `side` x `side` pixels. Not thread-safe, because it reuses its arrays."""

    def __init__(self, side: int):
        self.size = [side, side]
        self.crop = np.empty((side, side, 3), np.uint8)
        self.crop_planes = self.crop.transpose(2, 0, 1)
        self.mirrored_planes = self.crop[:, ::-1].transpose(2, 0, 1)
        self.planes = view_as_planes(torch.from_numpy(self.crop), side, side)
        self.memory = torch.empty(0, dtype=torch.uint8)
        self.windows: dict[tuple[int, int], Window] = {}  # views of `memory` by height and width

    def cut(self, crops: CropDraws, index: int, picture: Picture, out: Pixels) -> None:
        """Write the crop of a sample into `out`, uint8 (3, side, side)."""
        box = crops.box(index, picture.height, picture.width)
        self.resize(picture.pixels, scale_box(box, picture))
        out[...] = self.mirrored_planes if crops.are_flipped[index] else self.crop_planes

    def resize(self, pixels: Pixels, box: Box) -> Pixels:
        """Resize a box of pixels to a square, bilinear and antialiased.

        The next call overwrites the result.

        Args:
            pixels: uint8 (h, w, 3).
            box: The box.

        Returns:
            uint8 (side, side, 3).
        """
        top, left, height, width = box
        window = self.windows.get((height, width)) or self._window(height, width)
        # a copy, because PyTorch does not support read-only arrays, such as memory-mapped files
        window.pixels[...] = pixels[top : top + height, left : left + width]
        resize_into(window.planes, self.planes, self.size)
        return self.crop

    def _window(self, height: int, width: int) -> Window:
        num_bytes = 3 * height * width
        if len(self.memory) < num_bytes:
            self.memory = torch.empty(num_bytes, dtype=torch.uint8)
            self.windows.clear()
        if len(self.windows) >= MAX_WINDOWS:
            self.windows.clear()
        pixels = self.memory.numpy()[:num_bytes].reshape(height, width, 3)
        window = Window(pixels, view_as_planes(self.memory, height, width))
        self.windows[height, width] = window
        return window


def view_as_planes(pixels: Tensor, height: int, width: int) -> Tensor:
    """View the first h * w pixels as planes (1, 3, h, w) in channels-last memory format.

    PyTorch resizes this format fastest.
    """
    return pixels.as_strided((1, 3, height, width), (1, 1, 3 * width, 3))
