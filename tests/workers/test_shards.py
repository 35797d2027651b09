"""Tests of the index of an ingest stage: a rank reads only its task's rows."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from workers.data.rows import select
from workers.data.shards import INDEX, SCHEMA, Shards
from workers.job import Task
from workers.storage.artifact import Attempt

GROUP = 100  # rows in a row group
CLASSES = 10  # each has two row groups in the train split, and one in the test split


@pytest.fixture
def root(tmp_path: Path) -> str:
    """Write an artifact with an index of 30 row groups, sorted as by ingest; return its root."""
    attempt = Attempt(str(tmp_path), "key")
    tables = []
    for split, count in (("test", GROUP), ("train", 2 * GROUP)):
        for label in range(CLASSES):
            shard = f"{split}-{label}.tar"
            attempt.write(shard, bytes(count * 10))
            columns = {
                "split": [split] * count,
                "key": [f"{split}/{label}/{row}" for row in range(count)],
                "class": [str(label)] * count,
                "shard": [shard] * count,
                "offset": [10 * row for row in range(count)],
                "bytes": [10] * count,
                "sha256": [f"{row:064x}" for row in range(count)],
                "ext": ["png"] * count,
            }
            tables.append(pa.table(columns, SCHEMA))
    buffer = io.BytesIO()
    pq.write_table(pa.concat_tables(tables), buffer, row_group_size=GROUP)
    attempt.write(INDEX, buffer.getvalue())
    attempt.commit({"kind": "ingest"})
    return str(tmp_path)


@pytest.fixture
def read_groups(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list of the row groups read with all columns."""
    numbers: list[int] = []
    read = pq.ParquetFile.read_row_group

    def reading(
        file: pq.ParquetFile, number: int, columns: object = None, **rest: object
    ) -> object:
        if columns is None:
            numbers.append(number)
        return read(file, number, columns, **rest)

    monkeypatch.setattr(pq.ParquetFile, "read_row_group", reading)
    return numbers


def test_row_groups_without_task_rows_are_not_read(root: str, read_groups: list[int]) -> None:
    table = Shards.open(root, "key").select("train", ["7", "3"])
    assert read_groups == [16, 17, 24, 25]
    index = Shards.open(root, "key").read_index()
    assert index.num_rows == 30 * GROUP
    is_selected = pc.and_(
        pc.equal(index["split"], "train"), pc.is_in(index["class"], pa.array(["3", "7"]))
    )
    assert table.equals(index.filter(is_selected))


def test_samples_of_a_task_keep_no_index(root: str) -> None:
    task = Task("t", "card", "key", ("7", "3"))
    samples = select(root, (task,), "train", 0.0)
    assert len(samples) == 4 * GROUP
    assert samples.labels.tolist() == [0] * (2 * GROUP) + [1] * (2 * GROUP)
    assert samples.keys(np.flatnonzero(samples.labels))[:2] == [
        "train/3/0",
        "train/3/1",
    ]
    [shards] = samples.shards
    assert shards._index is None
    assert samples.table.nbytes < 150 * len(samples)
