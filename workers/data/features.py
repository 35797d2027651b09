"""Features of images, with their labels and keys, on the CPU."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from itertools import chain
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from workers.data.feed import Feed
from workers.storage.parquet import read_table


class FeatureBatch(NamedTuple):
    """Features of n images, with their labels, tasks and keys in the same order, on the CPU."""

    features: Tensor  # (n, d), fp32
    labels: Tensor  # (n,), indices into the class list of each image's task
    tasks: Tensor  # (n,), indices into the tasks of the feed; 0 after `from_parquet`
    keys: list[str]  # keys of the images in their splits

    @classmethod
    def join(cls, parts: Sequence[FeatureBatch]) -> FeatureBatch:
        """Concatenate parts in order."""
        return cls(
            torch.cat([part.features for part in parts]),
            torch.cat([part.labels for part in parts]),
            torch.cat([part.tasks for part in parts]),
            list(chain(*(part.keys for part in parts))),
        )

    def take(self, rows: list[int]) -> FeatureBatch:
        """Return the rows with these indices, in this order."""
        keys = [self.keys[row] for row in rows]
        return FeatureBatch(self.features[rows], self.labels[rows], self.tasks[rows], keys)

    def to_parquet(self) -> bytes:
        """Return the features of a single task as a Parquet file, without the column `tasks`."""
        values = pa.array(self.features.flatten().numpy())
        columns = {
            "key": self.keys,
            "label": self.labels.numpy(),
            "features": pa.FixedSizeListArray.from_arrays(values, self.features.shape[1]),
        }
        buffer = io.BytesIO()
        pq.write_table(pa.table(columns), buffer, compression="zstd")
        return buffer.getvalue()

    @classmethod
    def from_parquet(cls, data: bytes) -> FeatureBatch:
        """Read the bytes of `to_parquet`. All task indices are 0."""
        table = read_table(data)
        column = table["features"].combine_chunks()
        # a copy, because Arrow's memory is read-only and tensors are writable
        values = column.flatten().to_numpy().copy()
        labels = torch.from_numpy(table["label"].to_numpy().copy())
        features = torch.from_numpy(values).view(len(labels), column.type.list_size)
        return cls(features, labels, torch.zeros_like(labels), table["key"].to_pylist())


@torch.no_grad()
def extract_features(compute: Callable[[Tensor], Tensor], feed: Feed) -> FeatureBatch:
    """Return the features of all images of a feed, under the evaluation transform.

    Each rank computes its share of the images. The result is sorted by task and key, so every rank
    returns the same rows in the same order, for any number of ranks.

    Args:
        compute: Function from images (b, 3, H, W) to features (b, d), in evaluation mode.
        feed: A feed that does not augment.
    """
    rank_parts: list[FeatureBatch] = []
    for batch in feed.evaluate():
        features = compute(batch.images).float().cpu()
        keys = list(batch.keys or [])
        rank_parts.append(FeatureBatch(features, batch.labels.cpu(), batch.tasks.cpu(), keys))
    joined = FeatureBatch.join(list(chain(*feed.group.gather(rank_parts))))
    task_indices = joined.tasks.tolist()
    order = sorted(range(len(joined.keys)), key=lambda row: (task_indices[row], joined.keys[row]))
    return joined.take(order)
