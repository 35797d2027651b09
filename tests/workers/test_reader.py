"""Tests of readers: they read each range of a bucket once, ahead of use, verify it, and read no
more than a rank needs."""

from __future__ import annotations

import gc
import itertools
import os
import resource
import threading
import time
import tracemalloc
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from counted_bucket import MANY, URI, Bucket
from test_feed import CLASSES, COLOURS, SHAPES, feed_of, publish, samples

from tests.shard_names import shard_name
from workers.data import order, reader
from workers.data.cache import Cache
from workers.data.crops import View
from workers.data.image_maker import ReadPicture
from workers.data.order import RUN_BYTES, Deal, DrawnOrder, EpochOrder, Ints
from workers.data.pictures import StreamedPictures
from workers.data.reader import (
    FETCH_THREADS,
    GAP_BYTES,
    BucketReader,
    DiskReader,
    Ranges,
    Reader,
    cut_ranges,
    find_range_ends,
    make_sequential_reader,
    make_shuffled_reader,
)
from workers.data.rows import Locations, SampleTable, select
from workers.data.shards import OPEN_SHARE, Shards
from workers.data.sources import PictureSource, Resident, StepSamples
from workers.errors import DamagedArtifact, UserError
from workers.job import Task
from workers.storage import filesystem
from workers.storage.filesystem import StorageUnavailable


def fine_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reduce the sizes of runs, blocks and pieces to suit the small test images."""
    monkeypatch.setattr(order, "RUN_BYTES", 600)  # two images
    monkeypatch.setattr(order, "BLOCK_RUNS", 4)
    monkeypatch.setattr(reader, "RUN_BYTES", 4 << 10)  # with the other bytes of the tar
    monkeypatch.setattr(reader, "PIECE_BYTES", 16 << 10)


def deal_of(table: SampleTable, batch: int = 16) -> Deal:
    return Deal(len(table), int(table.locations.sizes.sum()), batch, seed=5)


def runs_of(table: SampleTable, deal: Deal) -> Ranges:
    return Ranges.of_runs(table, deal.rows_per_run)


def steps_of(deal: Deal, rank: int, world: int, epoch: int = 0) -> Iterator[Ints]:
    epoch_order = deal.epoch(epoch)
    for step in range(epoch_order.num_steps):
        yield epoch_order.rows(step, np.arange(rank, epoch_order.size(step), world))


def stored_records(table: SampleTable, folder: Path) -> list[bytes]:
    """Return the bytes of all rows as stored on disk."""
    records = []
    attempt = Path(table.shards[0].uri("")).name
    for row in table.table.select(["file", "offset", "bytes"]).to_pylist():
        _, shard = table.files[row["file"]]
        with open(folder / "colours" / attempt / shard, "rb") as file:
            file.seek(row["offset"])
            records.append(file.read(row["bytes"]))
    return records


def read_and_compare(
    table: SampleTable, counted_bucket: Bucket, made: Reader, steps: Iterator[Ints]
) -> list[int]:
    """Read all rows of all steps, compare their bytes, and return the rows in order."""
    records = stored_records(table, counted_bucket.folder)
    rows_read = []
    for rows in made.ahead(steps):
        for row in rows.tolist():
            assert made.read(row) == records[row]
            rows_read.append(row)
    return rows_read


def read_all(made: Reader, rows: Iterable[int]) -> None:
    for row in rows:
        made.read(row)


# ---- ranges -------------------------------------------------------------------------------------
def test_ranges_do_not_cross_runs_shards_or_wide_gaps() -> None:
    shards = np.array([0] * 8 + [1] * 4, np.int32)
    offsets = np.array([0, 10, 20, 30, 40, 50, 60 + GAP_BYTES, 70 + GAP_BYTES, 0, 10, 5, 2**22])
    sizes = np.full(12, 9)
    locations = Locations([], shards, offsets, sizes)
    assert cut_ranges(locations, 4).tolist() == [0, 4, 6, 8, 10, 11, 12]
    assert cut_ranges(locations, 3).tolist() == [0, 3, 6, 8, 9, 10, 11, 12]
    assert cut_ranges(locations, 100).tolist() == [0, 6, 8, 10, 11, 12]
    nothing = Locations([], shards[:0], offsets[:0], sizes[:0])
    assert cut_ranges(nothing, 4).tolist() == cut_ranges(nothing).tolist() == [0]


def test_ranges_end_only_where_they_must() -> None:
    generator = np.random.default_rng(0)
    n = 10_000
    shards = np.sort(generator.integers(0, 50, n)).astype(np.int32)
    sizes = generator.integers(1, 200_000, n)
    steps = sizes + generator.choice(
        [0, 1000, 2 * GAP_BYTES, -500_000], n, p=[0.6, 0.3, 0.05, 0.05]
    )
    offsets = np.cumsum(steps) + 10**10
    borders = cut_ranges(Locations([], shards, offsets, sizes), 16)
    assert (borders[0], borders[-1]) == (0, n)
    is_border = np.zeros(n, bool)
    is_border[borders[:-1]] = True
    for row in range(1, n):
        gap = offsets[row] - offsets[row - 1] - sizes[row - 1]
        is_needed = (
            row % 16 == 0
            or shards[row] != shards[row - 1]
            or offsets[row] < offsets[row - 1]
            or gap > GAP_BYTES
        )
        assert is_border[row] == is_needed


@pytest.mark.parametrize("rows_per_run", [None, 5, 40])
def test_ranges_do_not_depend_on_the_rows_processed_at_once(
    rows_per_run: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = np.random.default_rng(1)
    n = 500
    shards = np.sort(generator.integers(0, 9, n)).astype(np.int32)
    offsets = np.cumsum(generator.integers(1, 2 * GAP_BYTES, n))
    locations = Locations([], shards, offsets, generator.integers(1, GAP_BYTES, n))
    borders = cut_ranges(locations, rows_per_run)
    ends = find_range_ends(locations, borders).tolist()
    ends_of_rows = offsets + locations.sizes
    assert ends == [max(ends_of_rows[start:stop]) for start, stop in itertools.pairwise(borders)]
    for at_once in (1, 7, n - 1, n):
        monkeypatch.setattr(reader, "ROWS_AT_ONCE", at_once)
        assert cut_ranges(locations, rows_per_run).tolist() == borders.tolist()
        assert find_range_ends(locations, borders).tolist() == ends


def test_ranges_of_whole_table_have_length_of_a_request() -> None:
    rows, per_shard, size = np.arange(10_000), 1000, 90_000
    shards = (rows // per_shard).astype(np.int32)
    offsets = (rows % per_shard) * (size + 1536) + 512
    borders = cut_ranges(Locations([], shards, offsets, np.full(len(rows), size)))
    starts, lasts = borders[:-1], borders[1:] - 1
    spans = offsets[lasts] + size - offsets[starts]
    assert (shards[starts] == shards[lasts]).all()
    assert spans.max() <= RUN_BYTES + size
    assert np.median(spans) > RUN_BYTES - size - 10_000, "ranges must be as long as possible"


@pytest.mark.parametrize("rows_per_run", [None, 1, 7])
def test_records_lie_in_the_ranges_of_their_rows(
    rows_per_run: int | None, colours: SampleTable
) -> None:
    locations = colours.locations
    for ranges in (Ranges.of_runs(colours, rows_per_run), Ranges.of_pieces(colours)):
        of_row = ranges.find(np.arange(len(colours)))
        assert (ranges.shards[of_row] == locations.shards).all()
        assert (ranges.starts[of_row] <= locations.offsets).all()
        ends = ranges.starts + ranges.sizes
        assert (ends[of_row] >= locations.offsets + locations.sizes).all()


# ---- how much is read ----------------------------------------------------------------------------
@pytest.mark.few(3)
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("cached", [True, False])
def test_each_node_reads_only_its_share_of_bytes(
    world: int,
    cached: bool,
    colours: SampleTable,
    counted_bucket: Bucket,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fine_runs(monkeypatch)
    deal = deal_of(colours)
    runs = runs_of(colours, deal)
    rows = []
    for rank in range(world):
        counted_bucket.seen.clear()
        cache = Cache(str(tmp_path / f"node-{rank}"), 10**9) if cached else None
        made = make_shuffled_reader(colours, deal, world, cache)
        rows += read_and_compare(colours, counted_bucket, made, steps_of(deal, rank, world))
        assert counted_bucket.bytes_read() <= 1.1 * runs.total_bytes / world
        requests = counted_bucket.requests()
        assert requests <= 1.1 * len(runs.starts) / world + 2
        if cached:
            read_and_compare(colours, counted_bucket, made, steps_of(deal, rank, world))
            assert counted_bucket.requests() == requests, (
                "the second time, all rows must come from the cache"
            )
    assert sorted(rows) == list(range(900))


def test_single_rank_reads_pieces_once_for_all_feeds(
    colours: SampleTable, counted_bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fine_runs(monkeypatch)
    deal, cache = deal_of(colours), Cache(str(tmp_path / "cache"), 10**9)
    pieces = Ranges.of_pieces(colours)
    made = make_shuffled_reader(colours, deal, 1, cache)
    read_and_compare(colours, counted_bucket, made, steps_of(deal, 0, 1))
    assert counted_bucket.requests() == len(pieces.starts)
    assert counted_bucket.bytes_read() == pieces.total_bytes
    counted_bucket.seen.clear()
    monkeypatch.setattr(reader, "RUN_BYTES", 2 << 20)
    red = select(URI, (Task("t", "colours", "colours", ("red",)),), "train", 0.0)
    one_by_one = iter(np.arange(len(red)).reshape(-1, 1))
    read_and_compare(red, counted_bucket, make_sequential_reader(red, cache), one_by_one)
    assert not counted_bucket.requests(), "the pieces must also hold the other rows of the shards"


def test_sparse_rows_of_large_shards_are_read_individually(
    colours: SampleTable, counted_bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    fine_runs(monkeypatch)
    monkeypatch.setattr(reader, "GAP_BYTES", 1000)
    keys = [f"train/{name}/{number:03d}" for name in MANY for number in range(0, 300, 50)]
    few = select(URI, (COLOURS,), "train", 0.0, {"colours": keys})
    sizes = few.locations.sizes
    counted_bucket.seen.clear()
    one_by_one = iter(np.arange(len(few)).reshape(-1, 1))
    assert (
        len(read_and_compare(few, counted_bucket, make_sequential_reader(few, None), one_by_one))
        == 18
    )
    assert counted_bucket.bytes_read() == sizes.sum()


def test_records_are_read_individually_if_cache_is_too_small(
    colours: SampleTable, counted_bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fine_runs(monkeypatch)
    deal = deal_of(colours)
    made = make_shuffled_reader(colours, deal, 2, Cache(str(tmp_path / "cache"), 10_000))
    rows = read_and_compare(colours, counted_bucket, made, steps_of(deal, 0, 2))
    assert counted_bucket.bytes_read() == colours.locations.sizes[rows].sum()
    assert len(rows) == 450


def test_one_long_record_does_not_prevent_range_reads(
    colours: SampleTable, counted_bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fine_runs(monkeypatch)
    deal = deal_of(colours)
    runs = runs_of(colours, deal)
    runs.sizes[-1] += 50 * runs.total_bytes // len(runs.sizes)
    monkeypatch.setattr(Ranges, "of_runs", lambda *_: runs)
    cache = Cache(str(tmp_path / "cache"), int(0.95 * runs.total_bytes))
    made = make_shuffled_reader(colours, deal, 8, cache)
    assert isinstance(made, BucketReader)
    assert made.ranges is runs


def test_cache_room_is_per_node(
    colours: SampleTable, counted_bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fine_runs(monkeypatch)
    deal = deal_of(colours)
    runs = runs_of(colours, deal)
    cache = Cache(str(tmp_path / "cache"), runs.total_bytes // 10)
    num_ranges = {}
    for ranks_of_node in ("", "4", "1"):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks_of_node)
        made = make_shuffled_reader(colours, deal, 4, cache)
        assert isinstance(made, BucketReader)
        num_ranges[ranks_of_node] = len(made.ranges.starts)
    assert num_ranges[""] == num_ranges["4"] == 900, "each record must be a range of its own"
    assert num_ranges["1"] == len(runs.starts)


def test_runs_cut_by_shards_need_few_extra_ranges(
    counted_bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fine_runs(monkeypatch)
    publish(counted_bucket.folder, "colours", MANY, shard_images=61)
    table = select(URI, (COLOURS,), "train", 0.0)
    deal = deal_of(table)
    num_runs = len(table) // deal.rows_per_run
    num_ranges = len(runs_of(table, deal).starts)
    assert num_runs < num_ranges < 1.1 * num_runs
    made = make_shuffled_reader(table, deal, 2, Cache(str(tmp_path / "cache"), 10**9))
    assert isinstance(made, BucketReader)
    runs_ahead = deal.num_streams // 2 * deal.block_runs
    assert runs_ahead <= made.num_ahead <= 1.1 * runs_ahead + 1


def test_blocks_of_several_tasks_are_computed_once(
    counted_bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading ahead must not evict the blocks of current steps and so compute them again."""
    fine_runs(monkeypatch)
    monkeypatch.setattr(order, "BLOCK_RUNS", 1)
    publish(counted_bucket.folder, "colours", MANY, shard_images=7)
    publish(counted_bucket.folder, "shapes", {"disc": 100, "ring": 100}, shard_images=7)
    computed: Counter[tuple[int, int]] = Counter()
    block = EpochOrder.block

    def count(epoch_order: EpochOrder, stream: int, number: int) -> Ints:
        computed[stream, number] += 1
        return block(epoch_order, stream, number)

    monkeypatch.setattr(EpochOrder, "block", count)
    feed = feed_of(URI, "streamed", 0, 2, batch=16, tasks=(SHAPES, COLOURS))
    list(feed.epoch(0))
    assert len(computed) == feed.deal.epoch(0).num_blocks.sum() > 100
    assert set(computed.values()) == {1}


def test_prefetching_does_not_evict_unread_ranges(
    colours: SampleTable, counted_bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each step is read only when no fetch is running. The memory has room for 60 of 900 rows."""
    records = Ranges.of_records(colours)
    monkeypatch.setattr(reader, "MEMORY_BYTES", 60 * records.total_bytes // 900)
    made = BucketReader(colours, records, None, num_ahead=256)
    for rows in made.ahead(steps_of(deal_of(colours, 64), 0, 1)):
        while made._num_running:
            time.sleep(0.001)
        assert made._bytes_in_memory <= reader.MEMORY_BYTES
        read_all(made, rows.tolist())
    assert counted_bucket.requests() == 900
    assert not made._num_unread
    assert not made._planned


def test_replay_is_fetched_only_a_few_steps_ahead(
    colours: SampleTable, counted_bucket: Bucket
) -> None:
    made = reader.make_random_reader(colours)
    assert isinstance(made, BucketReader)
    made.num_ahead = 100
    drawn = 0

    def steps() -> Iterator[np.ndarray]:
        nonlocal drawn
        order = DrawnOrder(50, (32,), 200, seed=0, epoch=0)
        for step in range(200):
            drawn += 1
            yield order.rows(step, np.arange(32))

    for number, rows in enumerate(made.ahead(steps())):
        assert drawn <= number + 5, "only a few steps must be drawn ahead"
        read_all(made, rows.tolist())


def test_planning_single_records_needs_few_bytes_per_record(
    colours: SampleTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    n = 100_000
    rows = np.random.default_rng(0).permutation(n)
    ranges = Ranges(lambda rows: rows, np.zeros(n, np.int32), np.arange(n), np.ones(n, np.int64))
    made = BucketReader(colours, ranges, None, num_ahead=256)
    monkeypatch.setattr(made, "_plan", lambda *_: None)
    tracemalloc.start()
    try:
        for _ in made.ahead(rows[first : first + 100] for first in range(0, n, 100)):
            pass
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 8 * n


def test_limited_number_of_ranges_is_fetched_ahead(
    colours: SampleTable, counted_bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fine_runs(monkeypatch)
    deal = deal_of(colours)
    ranges = runs_of(colours, deal)
    made = BucketReader(colours, ranges, Cache(str(tmp_path / "cache"), 10**9), num_ahead=6)
    steps = made.ahead(iter(np.arange(900).reshape(-1, 1)))
    first = next(steps)
    made._threads.submit(lambda: None).result()
    while made._num_running:
        pass
    assert first.tolist() == [0]
    assert counted_bucket.requests() == 7, "six ranges more than this step needs are expected"
    steps.close()
    assert not made._planned


@pytest.mark.parametrize("end", ["closed", "dropped"])
def test_late_end_of_epoch_keeps_fetches_of_next_epoch(
    end: str, colours: SampleTable, counted_bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    fine_runs(monkeypatch)
    deal = deal_of(colours)
    made = BucketReader(colours, runs_of(colours, deal), None, num_ahead=40)
    with counted_bucket.lock:  # no fetch can finish meanwhile
        first = made.ahead(steps_of(deal, 0, 2))
        next(first)
        second = made.ahead(steps_of(deal, 0, 2, epoch=1))
        rows = next(second)
        planned = set(made._planned)
        if end == "closed":
            first.close()
        else:
            del first
    assert len(planned) > 20, "more ranges than the threads fetch at once must be planned"
    while made._planned or made._num_running:
        time.sleep(0.001)
    assert planned <= made._futures.keys()
    counted_bucket.seen.clear()
    read_all(made, rows.tolist())
    assert not counted_bucket.requests()


def test_evaluation_reads_whole_pieces_that_other_feeds_reuse(
    counted_bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fine_runs(monkeypatch)
    publish(counted_bucket.folder, "colours", MANY, shard_images=60)
    folder = str(tmp_path / "cache")
    feeds = [feed_of(URI, "streamed", rank, 2, training=False, cache=folder) for rank in range(2)]
    counted_bucket.seen.clear()
    sizes = [len(batch.labels) for feed in feeds for batch in feed.evaluate()]
    assert sum(sizes) == 675
    assert counted_bucket.requests() == len(Ranges.of_pieces(feeds[0].samples).starts)
    counted_bucket.seen.clear()
    feed_of(URI, "resident", cache=folder)  # decodes all images
    assert not counted_bucket.requests()


# ---- failures ------------------------------------------------------------------------------------
def test_streaming_survives_failing_requests_and_resumes_after_a_stop(
    counted_bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """5 % of the reads fail. One rank stops within an epoch, and resumes without a cache."""
    fine_runs(monkeypatch)
    publish(counted_bucket.folder, "colours", MANY, shard_images=60)
    local = samples([feed_of(counted_bucket.folder, "resident", batch=16)], 1)
    counted_bucket.share = 0.05

    def rank_feed(rank: int, cache: str) -> Any:
        return feed_of(URI, "streamed", rank, 2, batch=16, cache=cache)

    caches = [str(tmp_path / f"node-{rank}") for rank in range(2)]
    assert samples([rank_feed(rank, caches[rank]) for rank in range(2)], 1) == local
    fresh = [str(tmp_path / "fresh"), ""]
    stopped = rank_feed(1, fresh[0]).epoch(1)
    next(stopped)
    del stopped
    again = samples([rank_feed(rank, fresh[rank]) for rank in range(2)], 1, start=7)
    assert again == local[7:]


@pytest.mark.parametrize("source", ["resident", "streamed"])
def test_unavailable_storage_is_awaited_once_per_reader(
    source: str, counted_bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    fine_runs(monkeypatch)
    publish(counted_bucket.folder, "colours", MANY, shard_images=60)
    monkeypatch.setattr(filesystem, "PATIENCE_S", 0.05)
    read = Shards.read
    failed: list[str] = []

    def count_failures(shards: Shards, shard: str, offset: int, size: int) -> bytes:
        try:
            return read(shards, shard, offset, size)
        except StorageUnavailable:
            failed.append(shard)
            raise

    monkeypatch.setattr(Shards, "read", count_failures)
    if source == "resident":
        table = select(URI, (COLOURS,), "train", 0.0)
        counted_bucket.share = 1.0
        with pytest.raises(StorageUnavailable, match="does not answer"):
            Resident(table, View(8), 2, None, torch.device("cpu"))
    else:
        feed = feed_of(URI, source, 0, 2, batch=64)
        counted_bucket.share = 1.0
        with pytest.raises(StorageUnavailable, match="does not answer"):
            list(feed.epoch(0))
    assert len(failed) <= FETCH_THREADS
    if source == "streamed":
        counted_bucket.share = 0.0
        assert len(samples([feed], 0)) == feed.steps_per_epoch, (
            "a new epoch must ask the storage again"
        )


def test_late_fetch_failure_does_not_end_next_epoch(
    counted_bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    fine_runs(monkeypatch)
    publish(counted_bucket.folder, "colours", MANY, shard_images=60)
    read = Shards.read
    is_away = threading.Event()
    is_next_epoch = threading.Event()
    is_second_running = threading.Event()
    lock = threading.Lock()
    begun: list[str] = []
    late: list[str] = []  # fetches that still run after the first has failed

    def fail_one_at_once(shards: Shards, shard: str, offset: int, size: int) -> bytes:
        if is_away.is_set():
            with lock:
                begun.append(shard)
                is_first = len(begun) == 1
            if is_first:
                assert is_second_running.wait(30)
            else:
                late.append(shard)
                is_second_running.set()
                assert is_next_epoch.wait(30)
            raise StorageUnavailable("no answer")
        if not is_next_epoch.is_set():
            is_next_epoch.set()
            time.sleep(0.2)  # the late fetches fail before this read
        return read(shards, shard, offset, size)

    monkeypatch.setattr(Shards, "read", fail_one_at_once)
    feed = feed_of(URI, "streamed", 0, 2, batch=64)
    is_away.set()
    with pytest.raises(StorageUnavailable, match="no answer"):
        list(feed.epoch(0))
    is_away.clear()
    assert len(samples([feed], 0)) == feed.steps_per_epoch


def test_closing_steps_of_a_source_does_not_wait_for_storage(
    colours: SampleTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = threading.Event()
    monkeypatch.setattr(DiskReader, "read", lambda reader, row: answers.wait(60))
    pictures = StreamedPictures(colours, DiskReader(colours), ReadPicture(None))
    source = PictureSource(pictures, View(8), 2)
    rows = np.arange(900).reshape(9, 100)
    steps = source.steps(StepSamples(np.arange(100), rows_of_step) for rows_of_step in rows)
    next(steps)
    dropping = threading.Thread(target=steps.close)
    dropping.start()
    dropping.join(5)
    has_waited = dropping.is_alive()
    answers.set()
    dropping.join()
    assert not has_waited


def test_closing_an_epoch_of_batches_does_not_wait_for_storage(
    counted_bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(counted_bucket.folder, "colours", MANY, shard_images=60)
    answers = threading.Event()
    feed = feed_of(str(counted_bucket.folder), "streamed", batch=64)
    read = DiskReader.read
    rows_of_first_step = set(feed.deal.epoch(0).rows(0, np.arange(64)).tolist())

    def slow(reader: DiskReader, row: int) -> bytes:
        if row not in rows_of_first_step:
            answers.wait(60)
        return read(reader, row)

    monkeypatch.setattr(DiskReader, "read", slow)
    batches = feed.epoch(0)
    next(batches)
    dropping = threading.Thread(target=batches.close)
    dropping.start()
    dropping.join(10)
    has_waited = dropping.is_alive()
    answers.set()
    dropping.join()
    assert not has_waited


def test_deleted_or_closed_reader_leaves_no_thread(
    colours: SampleTable, counted_bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    fine_runs(monkeypatch)
    gc.disable()
    try:
        made = make_shuffled_reader(colours, deal_of(colours), 2, None)
        made.read(0)
        threads = made._threads._threads  # type: ignore[attr-defined]
        del made
        for thread in list(threads):
            thread.join(10)
            assert not thread.is_alive(), "it must end without the garbage collector"
    finally:
        gc.enable()
    closed = make_shuffled_reader(colours, deal_of(colours), 2, None)
    closed.read(0)
    closed.close()
    for thread in list(closed._threads._threads):  # type: ignore[attr-defined]
        thread.join(10)
        assert not thread.is_alive()
    with pytest.raises(RuntimeError, match="closed"):
        closed.read(0)


@pytest.mark.parametrize("where", ["storage", "cache"])
def test_damaged_record_is_reported_in_storage_and_repaired_in_cache(
    where: str,
    colours: SampleTable,
    counted_bucket: Bucket,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    fine_runs(monkeypatch)
    deal, cache = deal_of(colours), Cache(str(tmp_path / "cache"), 10**9)
    made = make_shuffled_reader(colours, deal, 2, cache)
    rows = read_and_compare(colours, counted_bucket, made, steps_of(deal, 0, 2))
    row = rows[5]
    record = stored_records(colours, counted_bucket.folder)[row]
    key = colours.table["key"][row].as_py()
    folder = tmp_path / "cache"
    if where == "storage":
        folder = counted_bucket.folder
    (file,) = (path for path in folder.rglob("*") if path.is_file() and record in path.read_bytes())
    file.write_bytes(file.read_bytes().replace(record, record[:-9] + b"?" + record[-8:]))
    if where == "cache":
        read_and_compare(colours, counted_bucket, made, steps_of(deal, 0, 2))
        assert capfd.readouterr().err.count(f"image {key!r} in") == 1
        assert record in file.read_bytes()
        return
    for path in (tmp_path / "cache" / "shards").iterdir():
        path.unlink()
    for _ in range(2):
        again = make_shuffled_reader(colours, deal, 2, cache)
        with pytest.raises(DamagedArtifact, match=key):
            read_all(again, rows)
    assert not capfd.readouterr().err


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("left", [None, 0, 5000])
def test_missing_or_truncated_shard_is_reported_as_damaged(
    left: int | None, cached: bool, colours: SampleTable, counted_bucket: Bucket, tmp_path: Path
) -> None:
    shard = shard_name("train", "red", 1)
    path = next(counted_bucket.folder.rglob(shard))
    if left is None:
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:left])
    cache = Cache(str(tmp_path / "cache"), 10**9) if cached else None
    deal = deal_of(colours)
    for made in (
        make_sequential_reader(colours, cache),
        make_shuffled_reader(colours, deal, 2, cache),
    ):
        with pytest.raises(DamagedArtifact, match=rf"{shard} is .*run the same command"):
            read_all(made, range(900))
    assert not list(tmp_path.glob("cache/**/*.part"))


def test_cache_disk_that_returns_other_bytes_is_reported(
    colours: SampleTable, counted_bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make_sequential_reader(colours, Cache(str(tmp_path / "cache"), 10**9))
    monkeypatch.setattr(BucketReader, "_record", lambda *_: b"other bytes")
    with pytest.raises(UserError, match=r"gives back other bytes .*; name another folder in clus"):
        made.read(3)


def test_deleted_cache_file_is_fetched_again(
    colours: SampleTable, counted_bucket: Bucket, tmp_path: Path
) -> None:
    made = make_sequential_reader(colours, Cache(str(tmp_path / "cache"), 10**9))
    record = made.read(3)
    for path in (tmp_path / "cache" / "shards").iterdir():
        path.unlink()
    assert made.read(3) == record


# ---- disks ---------------------------------------------------------------------------------------
def test_number_of_open_files_is_limited_for_many_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(tmp_path, "colours", CLASSES, shard_images=1)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (40, 40))
    num_open = len(os.listdir("/proc/self/fd"))
    tables = [select(str(tmp_path), (COLOURS,), "train", 0.0) for _ in range(3)]
    for table in tables:
        read_all(make_shuffled_reader(table, deal_of(table), 1, None), range(23))
        assert len(os.listdir("/proc/self/fd")) <= num_open + 40 // OPEN_SHARE
    del table, tables
    assert len(os.listdir("/proc/self/fd")) <= num_open, (
        "the files must be closed with the data sets"
    )


def test_each_object_is_opened_only_once(
    counted_bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each opening is a request to a bucket."""
    publish(counted_bucket.folder, "colours", {"red": 260, "green": 5, "blue": 5}, shard_images=1)
    table = select(URI, (COLOURS,), "train", 0.0)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (4, 4))
    opened: Counter[str] = Counter()
    open_file = Bucket.open_input_file

    def count(handler: Bucket, path: str) -> pa.NativeFile:
        opened[path] += 1
        return open_file(handler, path)

    monkeypatch.setattr(Bucket, "open_input_file", count)
    for _ in range(2):
        for row in range(270):
            table.read_bytes(row)
    assert set(opened.values()) == {1}
    assert len(opened) == 270


def test_shards_know_whether_they_are_remote(
    counted_bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(counted_bucket.folder, "colours", CLASSES)
    assert Shards.open(URI, "colours").is_remote
    monkeypatch.undo()
    assert not Shards.open(f"file://{counted_bucket.folder}", "colours").is_remote
    assert feed_of(counted_bucket.folder, "streamed").num_samples == 17
