"""Readers: each range of a bucket once, ahead of its use, verified; no more than a rank needs."""

from __future__ import annotations

import gc
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
    """Sizes that make of small images what those of real ones are made of large ones."""
    monkeypatch.setattr(order, "RUN_BYTES", 600)  # two images
    monkeypatch.setattr(order, "BLOCK_RUNS", 4)
    monkeypatch.setattr(reader, "RUN_BYTES", 4 << 10)  # with what a tar has beside them
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
    """The bytes of all rows as they are on the disk."""
    records = []
    attempt = Path(table.shards[0].uri("")).name
    for row in table.table.select(["shard", "offset", "bytes"]).to_pylist():
        with open(folder / "colours" / attempt / row["shard"], "rb") as file:
            file.seek(row["offset"])
            records.append(file.read(row["bytes"]))
    return records


def read_and_compare(
    table: SampleTable, counted_bucket: Bucket, made: Reader, steps: Iterator[Ints]
) -> list[int]:
    """Read all rows of all steps, and return them in their order."""
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
def test_ranges_are_of_one_run_and_shard_without_wide_gaps() -> None:
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


def test_ranges_of_a_whole_table_are_as_long_as_a_request() -> None:
    rows, per_shard, size = np.arange(10_000), 1000, 90_000
    shards = (rows // per_shard).astype(np.int32)
    offsets = (rows % per_shard) * (size + 1536) + 512
    borders = cut_ranges(Locations([], shards, offsets, np.full(len(rows), size)))
    starts, lasts = borders[:-1], borders[1:] - 1
    spans = offsets[lasts] + size - offsets[starts]
    assert (shards[starts] == shards[lasts]).all()
    assert spans.max() <= RUN_BYTES + size
    assert np.median(spans) > RUN_BYTES - size - 10_000, "they are as long as they can be"


@pytest.mark.parametrize("rows_per_run", [None, 1, 7])
def test_records_lie_in_the_ranges_of_their_rows(
    rows_per_run: int | None, colours: SampleTable
) -> None:
    locations = colours.locations
    for ranges in (Ranges.of_runs(colours, rows_per_run), Ranges.of_pieces(colours)):
        of_row = ranges.of_row
        assert (ranges.shards[of_row] == locations.shards).all()
        assert (ranges.starts[of_row] <= locations.offsets).all()
        assert (ranges.ends[of_row] >= locations.offsets + locations.sizes).all()


# ---- how much is read ----------------------------------------------------------------------------
@pytest.mark.few(3)
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("cached", [True, False])
def test_a_node_of_several_reads_its_share_of_the_bytes(
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
            assert counted_bucket.requests() == requests, "the second time it comes from the cache"
    assert sorted(rows) == list(range(900))


def test_a_single_rank_reads_whole_pieces_once_and_other_feeds_find_them(
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
    assert not counted_bucket.requests(), "other rows of the same shards are in the same pieces"


def test_a_few_rows_of_large_shards_are_read_by_themselves(
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


def test_where_two_blocks_have_no_room_records_are_read_by_themselves(
    colours: SampleTable, counted_bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fine_runs(monkeypatch)
    deal = deal_of(colours)
    made = make_shuffled_reader(colours, deal, 2, Cache(str(tmp_path / "cache"), 10_000))
    rows = read_and_compare(colours, counted_bucket, made, steps_of(deal, 0, 2))
    assert counted_bucket.bytes_read() == colours.locations.sizes[rows].sum()
    assert len(rows) == 450


def test_one_long_record_does_not_make_all_others_be_read_by_themselves(
    colours: SampleTable, counted_bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fine_runs(monkeypatch)
    deal = deal_of(colours)
    runs = runs_of(colours, deal)
    runs.ends[-1] += 50 * runs.total_bytes // len(runs.ends)
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
    assert num_ranges[""] == num_ranges["4"] == 900, "records by themselves"
    assert num_ranges["1"] == len(runs.starts)


def test_runs_that_shards_cut_need_little_more_room(
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
    """What is read ahead makes no room for itself in the place of what is counted now."""
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


def test_what_is_not_read_yet_is_not_forgotten_for_what_is_fetched_ahead(
    colours: SampleTable, counted_bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reading waits until nothing more is fetched: the memory has room for 60 of 900 rows."""
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


def test_replay_is_fetched_a_few_steps_ahead_although_records_repeat(
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
        assert drawn <= number + 5, "all steps were drawn before the first one"
        read_all(made, rows.tolist())


def test_an_epoch_of_single_records_is_planned_in_a_few_bytes_of_each(
    colours: SampleTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    n = 100_000
    rows = np.random.default_rng(0).permutation(n)
    ranges = Ranges(np.arange(n), np.zeros(n, np.int32), np.arange(n), np.arange(n) + 1)
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


def test_ranges_are_fetched_before_they_are_needed_and_not_all_at_once(
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
    assert counted_bucket.requests() == 7, "six more than this step needs"
    steps.close()
    assert not made._planned


@pytest.mark.parametrize("end", ["closed", "dropped"])
def test_an_epoch_that_ends_late_takes_nothing_from_the_next_one(
    end: str, colours: SampleTable, counted_bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    fine_runs(monkeypatch)
    deal = deal_of(colours)
    made = BucketReader(colours, runs_of(colours, deal), None, num_ahead=40)
    with counted_bucket.lock:  # nothing arrives meanwhile
        first = made.ahead(steps_of(deal, 0, 2))
        next(first)
        second = made.ahead(steps_of(deal, 0, 2, epoch=1))
        rows = next(second)
        planned = set(made._planned)
        if end == "closed":
            first.close()
        else:
            del first
    assert len(planned) > 20, "more than the threads fetch at once"
    while made._planned or made._num_running:
        time.sleep(0.001)
    assert planned <= made._futures.keys()
    counted_bucket.seen.clear()
    read_all(made, rows.tolist())
    assert not counted_bucket.requests()


def test_an_evaluation_reads_whole_pieces_that_other_feeds_find(
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
def test_two_ranks_stream_the_same_through_failing_requests_and_go_on_when_stopped(
    counted_bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """5 % of the reads fail; one rank stops in the middle of the epoch, without a cache then."""
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
        assert len(samples([feed], 0)) == feed.steps_per_epoch, "a new epoch asks the storage again"


def test_a_fetch_that_fails_late_does_not_end_the_next_epoch(
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
            time.sleep(0.2)  # the late ones fail before this one is read
        return read(shards, shard, offset, size)

    monkeypatch.setattr(Shards, "read", fail_one_at_once)
    feed = feed_of(URI, "streamed", 0, 2, batch=64)
    is_away.set()
    with pytest.raises(StorageUnavailable, match="no answer"):
        list(feed.epoch(0))
    is_away.clear()
    assert len(samples([feed], 0)) == feed.steps_per_epoch


def test_an_epoch_that_is_dropped_does_not_wait_for_the_storage(
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


def test_an_epoch_of_batches_that_is_dropped_does_not_wait_for_the_storage(
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


def test_a_reader_that_is_dropped_or_closed_leaves_no_thread(
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
            assert not thread.is_alive(), "it waits for the garbage collector"
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
def test_a_damaged_record_is_damage_and_one_that_only_the_cache_has_heals(
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
def test_a_shard_that_is_gone_or_cut_short_is_damage(
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


def test_a_disk_that_keeps_nothing_is_a_sentence(
    colours: SampleTable, counted_bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make_sequential_reader(colours, Cache(str(tmp_path / "cache"), 10**9))
    monkeypatch.setattr(BucketReader, "_record", lambda reader, row: b"other bytes")
    with pytest.raises(UserError, match=r"gives back other bytes .*; name another folder in clus"):
        made.read(3)


def test_what_made_room_while_it_was_needed_is_fetched_again(
    colours: SampleTable, counted_bucket: Bucket, tmp_path: Path
) -> None:
    made = make_sequential_reader(colours, Cache(str(tmp_path / "cache"), 10**9))
    record = made.read(3)
    for path in (tmp_path / "cache" / "shards").iterdir():
        path.unlink()
    assert made.read(3) == record


# ---- disks ---------------------------------------------------------------------------------------
def test_few_files_are_open_however_many_shards_and_data_sets_there_are(
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
    assert len(os.listdir("/proc/self/fd")) <= num_open, "they are closed with the data sets"


def test_an_object_is_opened_once_however_many_shards_there_are(
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


def test_shards_say_whether_they_are_on_a_disk(
    counted_bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(counted_bucket.folder, "colours", CLASSES)
    assert Shards.open(URI, "colours").is_remote
    monkeypatch.undo()
    assert not Shards.open(f"file://{counted_bucket.folder}", "colours").is_remote
    assert feed_of(counted_bucket.folder, "streamed").num_samples == 17
