"""Tests of the rotated and permuted variants of scikit-learn's digits."""

from __future__ import annotations

import io

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from pipeline.data.formats.sklearn import read_digits


def pixels_of(name: str) -> NDArray[np.uint8]:
    """Return the first 20 images, uint8 (20, 8, 8)."""
    items = [data for _, (_, data) in zip(range(20), read_digits(name), strict=False)]
    return np.stack([np.asarray(Image.open(io.BytesIO(data or b""))) for data in items])


def test_a_rotation_is_counterclockwise() -> None:
    plain, turned = pixels_of("digits"), pixels_of("digits-rotated-90")
    assert np.array_equal(turned, np.rot90(plain, axes=(1, 2)))
    assert not np.array_equal(pixels_of("digits-rotated-45"), plain)


def test_all_images_share_one_pixel_permutation() -> None:
    plain, permuted = pixels_of("digits"), pixels_of("digits-permuted-3")
    order = np.random.RandomState(3).permutation(64)
    assert np.array_equal(permuted.reshape(20, 64), plain.reshape(20, 64)[:, order])
    assert not np.array_equal(permuted, pixels_of("digits-permuted-4"))
