"""Tests of the sample tables that the ranks of a node map from a file in the cache."""

from __future__ import annotations

import errno
import gc
import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pytest
from counted_bucket import URI, Bucket
from test_feed import COLOURS, SHAPES, feed_of, root, samples
from test_shards import root as sorted_root

from workers.data import cache as cache_files
from workers.data import rows
from workers.data.cache import Cache, LocalFile
from workers.data.order import Deal
from workers.data.reader import make_sequential_reader, make_shuffled_reader
from workers.data.rows import SampleTable, select
from workers.data.shards import IndexFile, Shards
from workers.errors import DamagedArtifact, UserError
from workers.job import Task
from workers.storage import filesystem
from workers.storage.artifact import Attempt

__all__ = ["root", "sorted_root"]  # fixtures


@pytest.fixture(autouse=True)
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat every index as large."""
    monkeypatch.setattr(rows, "LARGE_INDEX_BYTES", 0)


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(str(tmp_path / "cache"), 1 << 30)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list of the notices."""
    notices: list[str] = []
    monkeypatch.setattr(filesystem, "notify", notices.append)
    return notices


def table_files(cache: Cache) -> list[Path]:
    return sorted(Path(cache.folder).glob("tables/*"))


def select_both(root: Path, cache: Cache | None) -> SampleTable:
    return select(str(root), (COLOURS, SHAPES), "train", 0.25, cache=cache)


def describe(samples: SampleTable) -> tuple[object, ...]:
    """Return all that a table contains."""
    locations = samples.locations
    files = [(shards.key, name) for shards, name in locations.files]
    columns = (samples.labels, samples.tasks, *locations[1:])
    numbers = [column.tolist() for column in columns]
    return samples.digest(), samples.num_bytes, files, numbers, samples.table["class"].to_pylist()


def test_mapped_table_equals_table_in_memory(root: Path, cache: Cache) -> None:
    expected = describe(select_both(root, None))
    assert not table_files(cache)
    assert describe(select_both(root, cache)) == expected
    assert len(table_files(cache)) == 1
    assert describe(select_both(root, cache)) == expected


def test_only_first_rank_of_a_node_reads_the_index(
    root: Path, cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = select_both(root, cache)
    monkeypatch.setattr(IndexFile, "__init__", lambda *_: pytest.fail("the index was read"))
    second = select_both(root, cache)
    assert describe(first) == describe(second)
    data = [second.read_bytes(row) for row in range(len(second))]
    assert second.num_bytes == sum(map(len, data))


def test_damaged_digest_is_zeros_for_the_loaders(root: Path) -> None:
    samples = select_both(root, None)
    texts = samples.table["sha256"].to_pylist()
    texts[3] = "ab"
    index = samples.table.column_names.index("sha256")
    table = samples.table.set_column(index, "sha256", pa.array(texts))
    digits = replace(samples, table=table).digests(np.array([4, 3, 0, 3]))
    assert digits[[0, 2]].tobytes().decode() == texts[4] + texts[0]
    assert not digits[[1, 3]].any()


def test_columns_are_not_copied_from_the_file(root: Path, cache: Cache) -> None:
    samples = select_both(root, cache)
    column = samples.table["offset"].chunk(0)
    assert samples.locations.offsets.ctypes.data == column.buffers()[1].address
    assert not samples.labels.flags.owndata


def test_each_selection_has_its_own_file(root: Path, cache: Cache) -> None:
    for tasks, split, fraction in (
        ((COLOURS,), "train", 0.25),
        ((SHAPES,), "train", 0.25),
        ((COLOURS, SHAPES), "train", 0.25),
        ((SHAPES, COLOURS), "train", 0.25),
        ((COLOURS,), "train", 0.5),
        ((COLOURS,), "val", 0.25),
        ((COLOURS,), "test", 0.25),
    ):
        before = len(table_files(cache))
        expected = select(str(root), tasks, split, fraction)
        assert describe(select(str(root), tasks, split, fraction, {}, cache)) == describe(expected)
        assert len(table_files(cache)) == before + 1


def test_selection_by_keys_is_not_stored(root: Path, cache: Cache) -> None:
    key = select_both(root, None).table["key"][0].as_py()
    few = select(str(root), (COLOURS, SHAPES), "train", 0.25, {"colours": [key]}, cache)
    assert few.table["key"].to_pylist()[0] == key
    assert not table_files(cache)
    only = select(str(root), (COLOURS, SHAPES), "train", 0.25, {"colours": []}, cache)
    assert set(only.tasks.tolist()) == {1}
    assert len(table_files(cache)) == 1


def test_small_index_is_read_by_each_rank(
    root: Path, cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    select_both(root, cache)
    assert not table_files(cache)


@pytest.mark.parametrize("has_cache", [True, False])
def test_result_without_an_index_is_damaged(has_cache: bool, root: Path, cache: Cache) -> None:
    attempt = Attempt(str(root), "bare")
    attempt.write("train-00000.tar", b"")
    attempt.commit({"kind": "ingest"})
    task = Task("bare", "bare", "bare", ("a",))
    with pytest.raises(DamagedArtifact, match="is not in the manifest"):
        select(str(root), (task,), "train", 0.0, cache=cache if has_cache else None)


def test_empty_selection_is_refused_and_leaves_no_file(root: Path, cache: Cache) -> None:
    for _ in range(2):
        with pytest.raises(UserError, match="has no validation images"):
            select(str(root), (COLOURS,), "val", 0.0, cache=cache)
    assert not table_files(cache)


@pytest.mark.parametrize("damage", ["flipped", "truncated", "short", "garbage", "zeros"])
def test_damaged_file_is_written_again(
    damage: str, root: Path, cache: Cache, told: list[str]
) -> None:
    expected = describe(select_both(root, cache))
    gc.collect()
    (path,) = table_files(cache)
    data = path.read_bytes()
    damaged = {
        "flipped": data[:2000] + bytes([data[2000] ^ 1]) + data[2001:],
        "truncated": data[: len(data) // 2],
        "short": b"x",
        "garbage": bytes(len(data)),
        "zeros": bytes(4),
    }[damage]
    path.write_bytes(damaged)
    assert describe(select_both(root, cache)) == expected
    (line,) = told
    assert str(path) in line
    assert "written again" in line
    assert path.read_bytes() == data
    assert describe(select_both(root, cache)) == expected
    assert len(told) == 1


@pytest.mark.parametrize("fault", ["damages", "full", "unreadable", "not a folder"])
def test_table_stays_in_memory_if_the_cache_cannot_be_used(
    fault: str, root: Path, cache: Cache, monkeypatch: pytest.MonkeyPatch, told: list[str]
) -> None:
    def fail(*_: Any) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def fill(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    expected = describe(select_both(root, None))
    if fault == "damages":
        monkeypatch.setattr(cache_files, "is_whole", lambda file: False)
    elif fault == "full":
        monkeypatch.setattr(cache_files.GrowingFile, "write", fill)
    elif fault == "unreadable":
        select_both(root, cache)
        gc.collect()
        cache_files._verified.clear()
        monkeypatch.setattr(LocalFile, "read_at", fail)
    else:
        Path(cache.folder).write_text("")
    samples = select_both(root, cache)
    assert samples.cached_bytes == 0
    assert describe(samples) == expected
    assert "each rank keeps its table of images in memory, because" in told[-1]
    assert "cluster.cache" in told[-1]


def test_ranks_that_start_together_write_one_table(
    root: Path, cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    make = rows._make_table

    def count(*arguments: Any) -> Any:
        made.append(1)
        return make(*arguments)

    monkeypatch.setattr(rows, "_make_table", count)
    with ThreadPoolExecutor(4) as pool:
        tables = [*pool.map(lambda _: describe(select_both(root, cache)), range(4))]
    assert made == [1]
    assert tables == tables[:1] * 4


def test_cache_that_is_too_small_for_the_table_is_not_used(root: Path, tmp_path: Path) -> None:
    cache = Cache(str(tmp_path / "cache"), 5000)
    assert select_both(root, cache).cached_bytes == 0
    assert not table_files(cache)


def test_readers_of_a_bucket_do_not_read_the_index_again(
    colours: SampleTable, counted_bucket: Bucket, cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = select(URI, (COLOURS,), "train", 0.0, cache=cache)
    assert table.cached_bytes
    monkeypatch.setattr(Shards, "read_index", lambda *_: pytest.fail("the index was read"))
    deal = Deal(len(table), table.num_bytes, 16, seed=5)
    for made in (
        make_sequential_reader(table, cache),
        *(make_shuffled_reader(table, deal, world, cache) for world in (1, 2)),
    ):
        (rows_read,) = made.ahead(iter([np.arange(20)]))
        read = [made.read(row) for row in rows_read.tolist()]
        assert read == [colours.read_bytes(row) for row in range(20)]
        made.close()


def test_room_for_large_writes_is_reserved_first(tmp_path: Path) -> None:
    cache = Cache(str(tmp_path), 5 * cache_files.GROWTH)
    cache.open_file("old", None, lambda stream: extend(stream, 3 * cache_files.GROWTH)).close()
    cache.open_file("new", None, lambda stream: extend(stream, 3 * cache_files.GROWTH)).close()
    assert not (tmp_path / "old").exists(), "it must be evicted, because both do not fit"
    assert int((tmp_path / "room.lock").read_text()) >= 3 * cache_files.GROWTH


def extend(stream: BinaryIO, size: int) -> None:
    stream.write(bytes(size))


def test_result_of_a_selection_changes_only_with_the_revision(
    sorted_root: str, cache: Cache
) -> None:
    """Otherwise tables in caches would have other rows than tables in memory."""
    task = Task("t", "card", "key", ("7", "3"))
    contents = [describe(select(sorted_root, (task,), s, 0.25)) for s in ("train", "val", "test")]
    digest = hashlib.sha256(repr(contents).encode()).hexdigest()[:16]
    assert (rows.TABLE_REVISION, digest) == (1, "8ee9d376266192a9")


def test_table_in_use_is_not_evicted(root: Path, cache: Cache) -> None:
    samples = select_both(root, cache)
    expected = describe(samples)
    full = Cache(cache.folder, 1)
    gc.collect()

    def write(stream: BinaryIO) -> None:
        stream.write(b"1")

    full.open_file("other", 1, write)
    assert len(table_files(cache)) == 1
    cache.clear()
    assert not table_files(cache)
    assert describe(samples) == expected, "the mapping must survive the deletion of the file"


def test_batches_are_the_same_with_a_mapped_table(root: Path, cache: Cache) -> None:
    def read(folder: str) -> list[Any]:
        steps: list[Any] = samples(
            [
                feed_of(root, "streamed", rank, 2, tasks=(COLOURS, SHAPES), cache=folder)
                for rank in range(2)
            ]
        )
        return steps

    assert read(cache.folder) == read("")
    assert len(table_files(cache)) == 1
