"""Tests of random resized crops: boxes relative to the original image, and torchvision's pixels."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import v2

from workers.data.crops import Box, CropDraws, Cutter, make_central_box, scale_box
from workers.data.decoding import Picture, read_picture
from workers.rng import StepRng

CPU = torch.device("cpu")


def draws(
    size: int,
    scale: tuple[float, float] = (0.08, 1.0),
    flip: float = 0.5,
    step: tuple[int, int, int] = (1, 0, 0),
) -> CropDraws:
    """Draw the crops of a step. step: seed, epoch and step."""
    rng = StepRng(*step, torch.arange(0), size, CPU)
    return CropDraws.draw(rng, torch.arange(size), scale, flip)


def photograph(height: int, width: int, seed: int = 0) -> np.ndarray:
    """Return coarse shapes with fine noise, like a photograph, uint8 (height, width, 3)."""
    generator = np.random.default_rng(seed)
    rough = Image.fromarray(generator.integers(0, 256, (9, 7, 3), np.uint8))
    smooth = np.asarray(rough.resize((width, height), Image.Resampling.BICUBIC)).astype(np.int64)
    noise = generator.integers(-20, 21, smooth.shape)
    return (smooth + noise).clip(0, 255).astype(np.uint8)


def resized(pixels: np.ndarray, box: Box, side: int) -> np.ndarray:
    """Return the resized box of an image, uint8 (side, side, 3)."""
    return Cutter(side).resize(pixels, box)


def distance(one: np.ndarray, other: np.ndarray) -> float:
    """Return the mean absolute difference of pixels, from 0 to 255."""
    return float(np.abs(one.astype(np.int64) - other.astype(np.int64)).mean())


@pytest.mark.parametrize("side", [32, 128, 224])
@pytest.mark.parametrize("sides", [(400, 400), (375, 500), (61, 32)])
def test_resized_crop_matches_torchvision_pixels(side: int, sides: Any) -> None:
    pixels = photograph(*sides)
    planes = torch.from_numpy(pixels).permute(2, 0, 1)
    boxes = draws(6)
    for position in range(6):
        box = boxes.box(position, *sides)
        expected = v2.functional.resized_crop(planes, *box, size=[side, side], antialias=True)
        assert distance(resized(pixels, box, side), expected.permute(1, 2, 0).numpy()) <= 2


def test_a_mirrored_crop_is_the_mirror_of_the_crop() -> None:
    picture = Picture(photograph(40, 50), 40, 50)
    cutter = Cutter(8)
    crops = [np.empty((3, 8, 8), np.uint8) for _ in range(2)]
    for crop, flip in zip(crops, (0.0, 1.0), strict=True):
        cutter.cut(draws(3, flip=flip), 2, picture, crop)
    assert np.array_equal(crops[0], crops[1][:, :, ::-1])
    assert np.array_equal(crops[1], cutter.crop[:, ::-1].transpose(2, 0, 1))
    assert not np.array_equal(crops[0], crops[1])


@pytest.mark.slow
def test_crop_boxes_match_distribution_of_torchvision() -> None:
    height, width, scale = 100, 300, (0.1, 0.3)
    drawn = np.array([draws(2000, scale).box(i, height, width) for i in range(2000)])
    reference = v2.RandomResizedCrop(8, scale)
    image = torch.zeros(3, height, width)
    torch.manual_seed(0)
    boxes = [reference.make_params([image]) for _ in range(2000)]
    expected = np.array([[b["top"], b["left"], b["height"], b["width"]] for b in boxes])
    assert (drawn[:, 0] + drawn[:, 2]).max() <= height
    assert (drawn[:, 1] + drawn[:, 3]).max() <= width
    assert drawn[:, :2].min() == 0
    for share in (0.1, 0.5, 0.9):
        ours, theirs = (np.quantile(b, share, axis=0) for b in (drawn, expected))
        assert np.abs(ours - theirs).max() <= 6, share


@pytest.mark.parametrize(
    ("sides", "expected"),
    [
        ((10, 100), Box(0, 43, 10, 13)),
        ((100, 10), Box(43, 0, 13, 10)),
        ((10, 10), Box(0, 0, 10, 10)),
        ((1, 1), Box(0, 0, 1, 1)),
    ],
)
def test_largest_central_box_is_used_if_no_box_fits(sides: Any, expected: Box) -> None:
    assert make_central_box(*sides) == expected
    if sides[0] != sides[1]:
        assert draws(1, (1.0, 1.0)).box(0, *sides) == expected


def test_box_of_a_sample_is_independent_of_other_samples() -> None:
    rng = StepRng(1, 0, 0, torch.arange(0), 8, CPU)
    some = CropDraws.draw(rng, torch.tensor([2, 5]), (0.08, 1.0), 0.5)
    everything = draws(8)
    for index, position in enumerate((2, 5)):
        assert some.box(index, 50, 60) == everything.box(position, 50, 60)
        assert some.flips[index] == everything.flips[position]


def test_crop_draws_depend_only_on_seed_epoch_step_and_position() -> None:
    torch.manual_seed(1)
    first = draws(8)
    torch.manual_seed(2)
    boxes = [first.box(i, 50, 60) for i in range(8)]
    assert boxes == [draws(8).box(i, 50, 60) for i in range(8)]
    assert len(set(boxes)) == 8
    for step in ((2, 0, 0), (1, 1, 0), (1, 0, 1)):
        assert boxes != [draws(8, step=step).box(i, 50, 60) for i in range(8)]


def test_reduced_image_gives_same_crop_region() -> None:
    buffer = io.BytesIO()
    Image.fromarray(photograph(300, 400)).save(buffer, "JPEG", quality=95)
    whole = read_picture(buffer.getvalue())
    reduced = read_picture(buffer.getvalue(), 120)
    assert reduced.pixels.shape == (90, 120, 3)
    boxes = draws(20, (0.3, 1.0))
    for position in range(20):
        box = boxes.box(position, 300, 400)
        assert boxes.box(position, reduced.height, reduced.width) == box
        crop = resized(reduced.pixels, scale_box(box, reduced), 24)
        assert distance(crop, resized(whole.pixels, box, 24)) < 4


@pytest.mark.parametrize("box", [Box(0, 0, 1, 1), Box(999, 0, 1, 1), Box(998, 3, 2, 1)])
def test_smallest_box_contains_a_pixel_of_reduced_image(box: Box) -> None:
    picture = Picture(photograph(9, 3), 1000, 4)
    assert resized(picture.pixels, scale_box(box, picture), 5).any()
