"""Sizes of a few images of a data set, read from their headers."""

from __future__ import annotations

import io
from collections.abc import Iterable
from itertools import islice

from PIL import Image

from pipeline.data.listing import open_file

MOST_IMAGES = 16
HEADER_BYTES = 1 << 18  # sizes stand before that in every format

Sizes = tuple[tuple[int, int], ...]


def sizes_of_files(uris: Iterable[str]) -> Sizes:
    """Return (width, height) of the first images in pixels; what is no image is passed over."""
    headers: list[bytes] = []
    for uri in islice(uris, MOST_IMAGES):
        try:
            with open_file(uri) as stream:
                headers.append(stream.read(HEADER_BYTES))
        except OSError:
            continue
    return sizes_of(headers)


def sizes_of(headers: Iterable[bytes]) -> Sizes:
    """Return (width, height) of images in pixels, of each of which the first bytes are given."""
    sizes: list[tuple[int, int]] = []
    for header in islice(headers, MOST_IMAGES):
        try:
            with Image.open(io.BytesIO(header)) as image:
                sizes.append(image.size)
        except Exception:  # Pillow raises errors of many kinds for files that are damaged
            continue
    return tuple(sizes)
