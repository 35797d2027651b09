"""One test image per task, for pictures of masks; none where the shards are gone."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.results.tables import RunTables
from workers.errors import UserError

SIDE = 192  # pixels of a picture


def sample_image(tables: RunTables, task: str) -> NDArray[np.uint8] | None:
    """The first test image of `task` as evaluation sees it, (SIDE, SIDE, 3); None where it cannot
    be read."""
    from workers.data.shards import Shards, decode

    about = tables.task(task)
    key = next(
        (s["key"] for s in tables.record["stages"] if s["id"] == f"data/{about['card']}"), None
    )
    if key is None:
        return None
    try:
        shards = Shards.open(tables.root, key)
        rows = shards.select("test", about["classes"])
        if not rows.num_rows:
            return None
        row: dict[str, Any] = rows.slice(0, 1).to_pylist()[0]
        image = decode(
            shards.read(row["shard"], row["offset"], row["bytes"]), SIDE, shards.max_pixels
        )
    except (UserError, OSError, KeyError):  # gone or damaged: the grid is drawn bare
        return None
    return _cropped(image, float(tables.record["config"].get("backbone", {}).get("crop_pct", 1.0)))


def _cropped(image: NDArray[np.uint8], share: float) -> NDArray[np.uint8]:
    """The middle that evaluation crops, enlarged back to the same size, nearest neighbour."""
    inner = max(1, round(SIDE * share))
    start = (SIDE - inner) // 2
    index = start + np.arange(SIDE) * inner // SIDE
    return image[np.ix_(index, index)]
