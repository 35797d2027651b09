"""scikit-learn's handwritten digits, which come with the package."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np
from PIL import Image

from pipeline.data.cards import Card
from pipeline.data.formats.base import Format, Item, ItemBytes, LabelCounts, MapFn, Unit, png
from pipeline.data.listing import Entry
from workers.errors import UserError

NUM_DIGITS = 1797


def units(card: Card, entries: list[Entry], map_fn: MapFn) -> list[Unit]:
    """Return one unit with all digits. Raise UserError for other data sets."""
    check(card, entries)
    return [Unit(read_digits, (), NUM_DIGITS)]


def check(card: Card, entries: list[Entry]) -> None:
    """Raise UserError for other data sets than the digits."""
    if card.source.name != "digits":
        raise UserError(
            f"card {card.name!r}: source.name is {card.source.name!r}; "
            "of scikit-learn's data sets `digits` is images"
        )


def read_digits() -> Iterator[ItemBytes]:
    """Yield the digits as PNG."""
    from sklearn.datasets import load_digits  # seconds

    digits = load_digits()  # images: (n, 8, 8), 0 to 16
    for row, (values, label) in enumerate(zip(digits.images, digits.target, strict=True)):
        image = Image.fromarray((values * 255 / 16).round().astype(np.uint8))
        item = Item("train", f"digits:{row}", f"{row:08d}", int(label))
        yield item, png(image)


def count_labels(card: Card, entries: list[Entry]) -> LabelCounts:
    """Return the number of digits by split and label."""
    check(card, entries)
    return Counter((item.split, item.label) for item, _ in read_digits())


FORMAT = Format(units, count_labels, check=check)
