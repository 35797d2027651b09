"""Tests of held-out images against the definition, image by image."""

from __future__ import annotations

import hashlib
import random

import pyarrow as pa
import pytest

from workers.data.held_out import hold_out

NAMES = ("key", "class", "sha256")


def find_val(table: pa.Table, fraction: float) -> set[str]:
    """Return the sha256 of the images held out by rank."""
    best: dict[str, tuple[bytes, str]] = {}  # image -> its lowest key, and the class of this key
    for row in table.to_pylist():
        found = (hashlib.sha256(row["key"].encode()).digest(), row["class"])
        best[row["sha256"]] = min(best.get(row["sha256"], found), found)
    val = set()
    for name in {name for _, name in best.values()}:
        images = sorted((digest, image) for image, (digest, own) in best.items() if own == name)
        count = min(max(round(fraction * len(images)), 1), len(images) - 1)
        val |= {image for _, image in images[:count]}
    return val


@pytest.mark.parametrize("fraction", [0.05, 0.3, 0.9])
@pytest.mark.parametrize("num_images", [3, 30, 10_000])
def test_images_with_the_lowest_keys_are_held_out(num_images: int, fraction: float) -> None:
    """Few different images give copies within a class and across classes."""
    draw = random.Random(num_images)
    for num_rows in range(0, 60, 3):
        rows = [
            {
                "key": f"key-{number}",
                "class": f"class-{draw.randrange(4)}",
                "sha256": f"{draw.randrange(num_images):064x}",
            }
            for number in range(num_rows)
        ]
        table = pa.Table.from_pylist(rows, pa.schema([(name, pa.string()) for name in NAMES]))
        expected = find_val(table, fraction)
        train, val = hold_out(table, fraction)
        assert val.to_pylist() == [row for row in rows if row["sha256"] in expected]
        assert train.to_pylist() == [row for row in rows if row["sha256"] not in expected]


def test_nothing_is_held_out_without_a_fraction() -> None:
    table = pa.table({name: ["a", "b"] for name in NAMES})
    train, val = hold_out(table, 0.0)
    assert train.equals(table)
    assert not len(val)
