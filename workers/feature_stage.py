"""The `features` stage: features of a task's images by the unchanged backbone.

All methods of class statistics share its result (`Step.reads_features`).
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any

from workers import dist
from workers.data.features import FeatureBatch, extract_features
from workers.data.feed import Feed
from workers.data.rows import list_keys
from workers.job import StageJob
from workers.restore import load_backbone
from workers.storage.artifact import Artifact

FEATURES_REVISION = 1  # part of the keys of these stages; increase it if the features change
FILE = "features.parquet"


def compute_features(
    job: StageJob, group: dist.Group, report: Callable[[dict[str, Any]], None]
) -> tuple[dict[str, bytes], dict[str, Any]]:
    """Compute the features of all train images of a task with the unchanged backbone.

    This includes images that a method holds out for validation. `load_features` omits them.

    Args:
        job: The stage. Its `data.val_fraction` is 0, so that no image is held out.
        group: The rank.
        report: Not used.

    Returns:
        The file of the features by name, and the manifest.
    """
    assert job.task is not None
    backbone = load_backbone(job).to(group.device).eval()
    feed = Feed(job, (job.task,), "train", group, training=False)
    batch = extract_features(backbone, feed)
    manifest = {"kind": "features", "images": len(batch.keys), "width": batch.features.shape[1]}
    return {FILE: batch.to_parquet()}, manifest


def load_features(job: StageJob) -> FeatureBatch:
    """Return the features of the train images for a step of a method, sorted by key.

    Images that the step holds out for validation are omitted.

    Args:
        job: The step of the method; `job.features` is the key of the stage with the features.
    """
    assert job.task is not None
    assert job.features is not None
    batch = FeatureBatch.from_parquet(Artifact.need(job.root, job.features).read(FILE))
    keys = {*chain(*list_keys(job.root, job.task, job.data.val_fraction).values())}
    step_batch = batch.take([row for row, key in enumerate(batch.keys) if key in keys])
    assert len(step_batch.keys) == len(keys), "the stage has the features of all train images"
    return step_batch
