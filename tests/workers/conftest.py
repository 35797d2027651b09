"""Fixtures for tests that read shards from a bucket."""

from __future__ import annotations

from pathlib import Path

import pytest
from counted_bucket import MANY, URI, Bucket
from pyarrow import fs
from test_feed import COLOURS, publish

from workers.data.rows import SampleTable, select
from workers.storage import artifact, filesystem


@pytest.fixture
def counted_bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    """Provide the bucket `test://bucket/` with its objects in the folder `tmp_path / "bucket"`."""
    (tmp_path / "bucket").mkdir()
    made = Bucket(tmp_path / "bucket")
    handler = filesystem.RetryingFilesystem(fs.PyFileSystem(made), "test://bucket")
    monkeypatch.setattr(filesystem, "FIRST_S", 0.001)
    monkeypatch.setattr(artifact, "open_filesystem", lambda uri: (fs.PyFileSystem(handler), ""))
    return made


@pytest.fixture
def colours(counted_bucket: Bucket) -> SampleTable:
    """Publish 900 images in shards of 60; return their table."""
    publish(counted_bucket.folder, "colours", MANY, shard_images=60)
    return select(URI, (COLOURS,), "train", 0.0)
