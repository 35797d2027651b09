"""Load one test image per task, for pictures of masks."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.results.tables import RunTables
from workers.data.decoding import decode
from workers.data.shards import Shards
from workers.errors import UserError

SIDE = 192  # side of an image in pixels


def sample_image(tables: RunTables, task: str) -> NDArray[np.uint8] | None:
    """Return the first test image of the classes of `task`, cropped as in evaluation.

    The shape is (SIDE, SIDE, 3). The result is None if the shards are missing, damaged or used in
    place, or there is no such image.
    """
    task_record = tables.task(task)
    ingest_id = f"data/{task_record['card']}"
    keys = [stage["key"] for stage in tables.record["stages"] if stage["id"] == ingest_id]
    if not keys:
        return None
    try:
        shards = Shards.open(tables.root, keys[0])
        rows = shards.select("test", task_record["classes"])
        if not rows.num_rows:
            return None
        row: dict[str, Any] = rows.slice(0, 1).to_pylist()[0]
        data = shards.read(row["shard"], row["offset"], row["bytes"])
        image = decode(data, SIDE, shards.limits)
    except (UserError, OSError, KeyError):
        return None
    crop_share = float(tables.record["config"].get("backbone", {}).get("crop_pct", 1.0))
    return _crop_center(image, crop_share)


def _crop_center(image: NDArray[np.uint8], share: float) -> NDArray[np.uint8]:
    """Return the center crop of evaluation, resized to SIDE by nearest neighbour.

    Args:
        image: Image (SIDE, SIDE, 3).
        share: Side of the crop divided by the side of the image.
    """
    inner = max(1, round(SIDE * share))
    start = (SIDE - inner) // 2
    index = start + np.arange(SIDE) * inner // SIDE
    return image[np.ix_(index, index)]
