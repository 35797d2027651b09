"""Small image data sets in common layouts, as users have them before any preparation."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from PIL import Image


def make_image(path: Path, seed: int, size: tuple[int, int] = (12, 10)) -> Path:
    """Write an image of noise, (width, height) pixels, and return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    pixels = rng.integers(0, 256, (size[1], size[0], 3), np.uint8)
    Image.fromarray(pixels).save(path)
    return path


def class_folders(
    folder: Path, classes: Iterable[str], images: int = 3, size: tuple[int, int] = (12, 10)
) -> Path:
    """Write `images` images into a folder per class, and return `folder`.

    Folders with different names, such as train and test, get different images.
    """
    start = zlib.crc32(folder.name.encode())
    for number, name in enumerate(classes):
        for index in range(images):
            make_image(folder / name / f"{index}.png", start + 1000 * number + index, size)
    return folder
