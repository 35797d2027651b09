"""Tests of the sample tables that the ranks of a node map from a file in the cache."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any, BinaryIO

import pytest
from test_feed import COLOURS, SHAPES, feed_of, root, samples

from workers.data import rows
from workers.data.cache import Cache
from workers.data.rows import SampleTable, select
from workers.data.shards import IndexFile
from workers.errors import UserError
from workers.storage import filesystem

__all__ = ["root"]  # a fixture


@pytest.fixture(autouse=True)
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat every index as large."""
    monkeypatch.setattr(rows, "LARGE_INDEX_BYTES", 0)


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(str(tmp_path / "cache"), 1 << 30)


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


def test_empty_selection_is_refused_and_leaves_no_file(root: Path, cache: Cache) -> None:
    for _ in range(2):
        with pytest.raises(UserError, match="has no validation images"):
            select(str(root), (COLOURS,), "val", 0.0, cache=cache)
    assert not table_files(cache)


@pytest.mark.parametrize("damage", ["flipped", "truncated", "short", "garbage", "zeros"])
def test_damaged_file_is_written_again(
    damage: str, root: Path, cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr(filesystem, "notify", told.append)
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


def test_disk_that_damages_every_file_is_named(
    root: Path, cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "is_whole", lambda file: False)
    with pytest.raises(UserError, match="gives back other bytes than were written") as caught:
        select_both(root, cache)
    assert "cluster.cache" in str(caught.value)


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
