"""Select train images to hold out, for data sets without validation or test images.

This module does not import torch, because ingest uses it to hold out test images.
"""

from __future__ import annotations

import hashlib
import math
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

HoldOut = Literal["rank", "threshold"]  # see `Card.hold_out`
SHARE_DIGITS = 12  # number of hexadecimal digits that decide whether an image is held out


def find_held_out(
    digests: pa.ChunkedArray, fraction: float, purpose: Literal["test", "val"]
) -> Any:
    """Return a mask of the held-out images.

    Digits of an image's sha256 decide whether the image is held out. No other image matters.

    Args:
        digests: sha256 of the images in hexadecimal digits, (n,).
        fraction: Expected share of held-out images.
        purpose: `test` and `val` use different digits, so the two choices are independent.

    Returns:
        Boolean pyarrow array (n,).
    """
    start = {"test": 0, "val": SHARE_DIGITS}[purpose]
    digits = pc.utf8_slice_codeunits(digests, start, start + SHARE_DIGITS)
    bound = f"{math.ceil(fraction * 16**SHARE_DIGITS):0{SHARE_DIGITS}x}"
    return pc.less(digits, pa.scalar(bound, digits.type))


def hold_out(table: pa.Table, fraction: float, rule: HoldOut = "rank") -> tuple[pa.Table, pa.Table]:
    """Split a table into (train, val).

    With `threshold`, only the digest of an image decides, see `find_held_out`.

    With `rank`, round(fraction * n) of the n images of a class are val: those whose keys have the
    lowest sha256. At least one image is val if n >= 2 and fraction > 0, and never all. Exact copies
    stay together: they count as one image, with the key that has the lowest sha256. The result does
    not depend on the order of rows. It does not depend on other classes, unless they have copies of
    images of this class.

    Args:
        table: Table with the columns key, class, and sha256 of the image.
        fraction: Share of the images for val.
        rule: The entry `hold_out` of the card (the description of the data set).
    """
    if not fraction:
        return table, table.slice(0, 0)
    if rule == "threshold":
        below = find_held_out(table["sha256"], fraction, "val")
        return table.filter(pc.invert(below)), table.filter(below)
    keys = table["key"].to_pylist()
    digests = pa.array([hashlib.sha256(key.encode()).hexdigest() for key in keys])
    ranked = pa.table({"digest": digests, "class": table["class"], "image": table["sha256"]})
    ranked = ranked.sort_by([(name, "ascending") for name in ranked.column_names])
    # the first row of each image: of its copies, the one whose key has the lowest sha256
    firsts = ranked.take(np.sort(np.unique(_encode(ranked["image"]), return_index=True)[1]))
    classes = _encode(firsts["class"])
    by_class = np.argsort(classes, kind="stable")
    sizes = np.bincount(classes)
    num_val = [min(max(round(fraction * size), 1), size - 1) for size in sizes.tolist()]
    ranks = np.arange(len(classes)) - (np.cumsum(sizes) - sizes)[classes[by_class]]
    val = firsts["image"].take(by_class[ranks < np.array(num_val, int)[classes[by_class]]])
    is_val = pc.is_in(table["sha256"], val.combine_chunks())
    return table.filter(pc.invert(is_val)), table.filter(is_val)


def _encode(column: pa.ChunkedArray) -> NDArray[np.int32]:
    """Return one number per row: equal values of the column have equal numbers."""
    codes: NDArray[np.int32] = column.combine_chunks().dictionary_encode().indices.to_numpy()
    return codes
