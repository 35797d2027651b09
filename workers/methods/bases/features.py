"""Features of all images that a step reads, gathered from all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from workers.data.feed import Feed
from workers.methods.base import Method


class FeatureBatch(NamedTuple):
    """Features of images, with their labels, tasks and keys in the same order, on the CPU."""

    features: Tensor  # (n, d), fp32
    labels: Tensor  # (n,), counted within the task
    tasks: Tensor  # (n,), positions of the tasks among `training_tasks`
    keys: list[str]  # n keys of samples

    @classmethod
    def join(cls, parts: Sequence[FeatureBatch]) -> FeatureBatch:
        """Return all parts as one, in their order."""
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


@torch.no_grad()
def extract_features(method: Method, feed: Feed) -> FeatureBatch:
    """Return the features of all images of a feed, under the evaluation transform.

    Each rank computes its share. The result is sorted by task, then by key: every rank gets the
    same rows in the same order, for any number of ranks.

    Args:
        method: The method, which is put in evaluation mode.
        feed: A feed that does not augment.
    """
    method.eval()
    rank_parts: list[FeatureBatch] = []
    for batch in feed.evaluate():
        features = method.features(batch.images).float().cpu()
        keys = list(batch.keys or [])
        rank_parts.append(FeatureBatch(features, batch.labels.cpu(), batch.tasks.cpu(), keys))
    joined = FeatureBatch.join(list(chain(*feed.group.gather(rank_parts))))
    task_indices = joined.tasks.tolist()
    order = sorted(range(len(joined.keys)), key=lambda row: (task_indices[row], joined.keys[row]))
    return joined.take(order)
