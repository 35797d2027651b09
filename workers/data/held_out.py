"""Which train images are held out for validation, of data sets that bring no validation images.

It imports no torch: test images are held out by the same rule when data are ingested.
"""

from __future__ import annotations

import hashlib
import math
from typing import Any, Literal

import pyarrow as pa
import pyarrow.compute as pc

HoldOut = Literal["rank", "threshold"]  # see `Card.hold_out`
SHARE_DIGITS = 12  # hexadecimal digits that decide whether an image is held out


def find_held_out(
    digests: pa.ChunkedArray, fraction: float, purpose: Literal["test", "val"]
) -> Any:
    """Return a mask of the held-out images: each decides by digits of its own sha256.

    Args:
        digests: sha256 of the images in hexadecimal digits, (n,).
        fraction: Held-out share of all possible images.
        purpose: `test` and `val` use different digits, so they are independent.

    Returns:
        (n,) booleans of pyarrow.
    """
    start = {"test": 0, "val": SHARE_DIGITS}[purpose]
    digits = pc.utf8_slice_codeunits(digests, start, start + SHARE_DIGITS)
    bound = f"{math.ceil(fraction * 16**SHARE_DIGITS):0{SHARE_DIGITS}x}"
    return pc.less(digits, pa.scalar(bound, digits.type))


def hold_out(table: pa.Table, fraction: float, rule: HoldOut = "rank") -> tuple[pa.Table, pa.Table]:
    """Split a table into (train, val).

    With `threshold` each image decides by its own digest, see `find_held_out`.

    With `rank`, of the n images of a class, the round(fraction * n) keys with the lowest sha256 are
    val: at least one if n >= 2, and never all. Exact copies count as one image with the key of the
    lowest sha256, and stay together. The result does not depend on the order of rows, and, without
    copies in them, not on other classes.

    Args:
        table: Table with the columns key, class, and sha256 of the image.
        fraction: Share of the images for val.
        rule: `hold_out` of the card.
    """
    if rule == "threshold":
        below = find_held_out(table["sha256"], fraction, "val")
        return table.filter(pc.invert(below)), table.filter(below)
    first: dict[
        str, tuple[bytes, str]
    ] = {}  # lowest sha256 of the keys of each image, and its class
    columns = (table[name].to_pylist() for name in ("class", "key", "sha256"))
    for name, key, image in zip(*columns, strict=True):
        found = (hashlib.sha256(key.encode()).digest(), name)
        first[image] = min(first.get(image, found), found)
    members: dict[str, list[tuple[bytes, str]]] = {}  # class -> (sha256 of the key, image)
    for image, (digest, name) in first.items():
        members.setdefault(name, []).append((digest, image))
    val: list[str] = []
    for ranked in members.values():
        least = 1 if fraction > 0 else 0
        count = min(max(round(fraction * len(ranked)), least), len(ranked) - 1)
        val += [image for _, image in sorted(ranked)[:count]]
    is_val = pc.is_in(table["sha256"], pa.array(val, table["sha256"].type))
    return table.filter(pc.invert(is_val)), table.filter(is_val)
