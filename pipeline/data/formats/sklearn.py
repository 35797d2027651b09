"""scikit-learn's handwritten digits, which the package contains; also rotated or permuted."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator

import numpy as np
from PIL import Image

from pipeline.data.cards import Card
from pipeline.data.formats.base import Format, Item, ItemBytes, LabelCounts, MapFn, Unit, png
from pipeline.data.listing import Entry
from workers.errors import UserError

NUM_DIGITS = 1797
NAME = re.compile(r"digits(-(?P<change>rotated|permuted)-(?P<number>[0-9]{1,3}))?")


def units(card: Card, entries: list[Entry], map_fn: MapFn) -> list[Unit]:
    """Return one unit with all digits; raise UserError for other data sets."""
    check(card, entries)
    return [Unit(read_digits, (card.source.name,), NUM_DIGITS)]


def check(card: Card, entries: list[Entry]) -> None:
    """Raise UserError for other data sets than the digits."""
    if NAME.fullmatch(card.source.name) is None:
        raise UserError(
            f"card {card.name!r}: source.name is {card.source.name!r}; "
            "of scikit-learn's data sets `digits` is images; its variants are "
            "`digits-rotated-DEGREES` and `digits-permuted-SEED`"
        )


def make_change(name: str) -> Callable[[Image.Image], Image.Image]:
    """Return the function that a variant of the digits applies to each image.

    `digits-rotated-DEGREES` rotates the image counterclockwise; `digits-permuted-SEED` applies one
    random permutation to the pixels of all images.
    """
    match = NAME.fullmatch(name)
    assert match is not None
    number = int(match["number"] or 0)
    if match["change"] == "rotated":
        return lambda image: image.rotate(number, Image.Resampling.BILINEAR)
    if match["change"] is None:
        return lambda image: image

    def permute(image: Image.Image) -> Image.Image:
        pixels = np.asarray(image)
        order = np.random.RandomState(number).permutation(pixels.size)
        return Image.fromarray(pixels.flatten()[order].reshape(pixels.shape))

    return permute


def read_digits(name: str) -> Iterator[ItemBytes]:
    """Yield the digits of a variant as PNG."""
    from sklearn.datasets import load_digits  # lazy import: takes seconds

    change = make_change(name)
    digits = load_digits()  # images: (n, 8, 8), 0 to 16
    for row, (values, label) in enumerate(zip(digits.images, digits.target, strict=True)):
        image = Image.fromarray((values * 255 / 16).round().astype(np.uint8))
        item = Item("train", f"digits:{row}", f"{row:08d}", int(label))
        yield item, png(change(image))


def count_labels(card: Card, entries: list[Entry]) -> LabelCounts:
    """Return the number of digits by split and label."""
    check(card, entries)
    return Counter((item.split, item.label) for item, _ in read_digits(card.source.name))


FORMAT = Format(units, count_labels, check=check)
