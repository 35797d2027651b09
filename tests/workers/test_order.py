"""Promises of the order of an epoch: exactly once, a pure function, well shuffled, lazily made."""

from __future__ import annotations

import copy
import hashlib
import tracemalloc
from typing import Any, NamedTuple

import numpy as np
import pytest

from workers.data import order
from workers.data.order import (
    GAP_BYTES,
    RUN_BYTES,
    Deal,
    Ints,
    TableOrder,
    cut_runs,
    num_streams,
    partner_positions,
)


class Index(NamedTuple):
    """Where the rows of a made-up index lie, and their classes."""

    shards: Any
    offsets: Ints
    sizes: Ints
    classes: Ints


def sorted_index(num_classes: int, per_class: int, num_shards: int, size: int) -> Index:
    """An index in the worst order there is: class after class."""
    n = num_classes * per_class
    rows = np.arange(n)
    per_shard = -(-n // num_shards)
    return Index(
        (rows // per_shard).astype(np.int32),
        (rows % per_shard) * (size + 1536) + 512,
        np.full(n, size),
        rows // per_class,
    )


def deal_of(index: Index, batch: int = 64, seed: int = 5, repeats: int = 1) -> Deal:
    return Deal(index.shards, index.offsets, index.sizes, batch, seed, repeats)


def line(deal: Deal, epoch: int = 0, start: int = 0) -> list[Ints]:
    """The rows of each global batch."""
    epoch_order = deal.epoch(epoch)
    steps = range(start, epoch_order.num_steps)
    return [epoch_order.rows(s, np.arange(epoch_order.size(s))) for s in steps]


SMALL = sorted_index(100, 100, 10, 20_000)


# ---- streams and partners ------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("batch", "expected"),
    [(2, 1), (4, 2), (64, 32), (100, 50), (96, 48), (128, 64), (1024, 512), (4096, 512), (63, 1)],
)
def test_streams_divide_half_a_batch_with_as_many_factors_of_two_as_they_can(
    batch: int, expected: int
) -> None:
    assert num_streams(batch) == expected


@pytest.mark.parametrize("batch", [2, 3, 4, 7, 64, 96, 100])
def test_partners_come_in_pairs_of_one_stream_and_of_one_rank(batch: int) -> None:
    for size in {1, 2, batch // 2 + 1, batch - 1, batch}:
        partners = partner_positions(batch, size)
        positions = np.arange(size)
        assert (partners[partners].numpy() == positions).all(), "an involution"
        distance = (partners.numpy() - positions) % num_streams(batch)
        assert not distance.any(), "of the same stream"
    alone = (partner_positions(batch, batch).numpy() == np.arange(batch)).sum()
    assert alone == batch % 2


@pytest.mark.parametrize("repeats", [2, 3, 9])
def test_copies_of_an_image_are_in_one_stream_and_are_never_partners(repeats: int) -> None:
    deal = deal_of(SMALL, 64, repeats=repeats)
    assert deal.num_streams <= 32 / repeats
    repeated = deal.epoch(0)
    once = copy.copy(deal)
    once.repeats = 1
    for stream in range(deal.num_streams):
        rows = once.epoch(0).stream(stream)
        copies = [row for row in rows.tolist() for _ in range(repeats)][: len(rows)]
        assert repeated.stream(stream).tolist() == copies
    for rows in line(deal):
        partners = partner_positions(64, len(rows)).numpy()
        mixed = partners != np.arange(len(rows))
        assert (rows[partners] != rows)[mixed].all()
    assert len(line(deal)) == len(line(once))


# ---- exactly once, a pure function ---------------------------------------------------------------
@pytest.mark.parametrize("batch", [1, 4, 7, 64, 96, 1000, 20_000])
def test_every_row_comes_once_in_every_epoch(batch: int) -> None:
    deal = deal_of(SMALL, batch)
    for epoch in (0, 3):
        batches = line(deal, epoch)
        assert [len(rows) for rows in batches[:-1]] == [batch] * (len(batches) - 1)
        assert sorted(np.concatenate(batches).tolist()) == list(range(10_000))
    assert np.concatenate(line(deal, 0)).tolist() != np.concatenate(line(deal, 3)).tolist()


@pytest.mark.parametrize("n", [0, 1, 2, 31, 33, 100])
def test_fewer_rows_than_streams_or_a_ragged_end_lose_nothing(n: int) -> None:
    index = Index(*(column[:n] for column in SMALL))
    batches = line(deal_of(index, 64))
    assert sorted(np.concatenate([*batches, np.zeros(0, int)]).tolist()) == list(range(n))


def test_the_order_of_a_fixed_index_never_changes() -> None:
    """Stored results follow from it: another digest is another TRAIN_REVISION."""
    digest = hashlib.sha256()
    for epoch in (0, 1):
        for rows in line(deal_of(SMALL, 64, seed=7), epoch):
            digest.update(rows.astype("<i8").tobytes())
    assert digest.hexdigest()[:16] == "a3659ca650e9922d"


def test_the_order_changes_with_the_seed_and_goes_on_in_the_middle() -> None:
    whole = np.concatenate(line(deal_of(SMALL, 64)))
    assert (whole != np.concatenate(line(deal_of(SMALL, 64, seed=6)))).any()
    resumed = np.concatenate(line(deal_of(SMALL, 64), start=100))
    assert (resumed == whole[100 * 64 :]).all()


@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
def test_a_rank_computes_its_streams_alone_and_they_are_those_of_the_whole(world: int) -> None:
    deal = deal_of(SMALL, 64)
    whole = line(deal)
    computed = []
    for rank in range(world):
        epoch_order = deal.epoch(0)
        for step in range(epoch_order.num_steps):
            positions = np.arange(rank, epoch_order.size(step), world)
            assert (epoch_order.rows(step, positions) == whole[step][positions]).all()
        computed.append(int(epoch_order._is_computed.sum()))
    if deal.num_streams % world == 0:
        assert computed == [deal.num_streams // world] * world
    else:
        assert min(computed) > deal.num_streams // world, "it needs rows of more streams"


def test_table_order_is_the_table() -> None:
    table = TableOrder(10, 4)
    rows = [table.rows(step, np.arange(table.size(step))).tolist() for step in range(3)]
    assert rows == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert table.num_steps == 3


# ---- runs ----------------------------------------------------------------------------------------
def test_runs_are_short_ranges_of_one_shard_without_wide_gaps() -> None:
    shards = np.array([0] * 8 + [1] * 4, np.int32)
    offsets = np.array([0, 10, 20, 30, 40, 50, 60 + GAP_BYTES, 70 + GAP_BYTES, 0, 10, 5, 2**22])
    sizes = np.full(12, 9)
    assert cut_runs(shards, offsets, sizes, 4).tolist() == [0, 4, 6, 8, 10, 11, 12]
    index = sorted_index(100, 100, 10, 90_000)
    borders = cut_runs(index.shards, index.offsets, index.sizes, 10_000)
    starts, lasts = borders[:-1], borders[1:] - 1
    spans = index.offsets[lasts] + index.sizes[lasts] - index.offsets[starts]
    assert (index.shards[starts] == index.shards[lasts]).all()
    assert spans.max() <= RUN_BYTES + 90_000
    assert np.median(spans) > RUN_BYTES - 100_000, "runs are as long as they can be"


# ---- how good the shuffle is ---------------------------------------------------------------------
class Mixing(NamedTuple):
    """How an epoch mixes classes and shards; shares are between 0 and 1."""

    neighbours: float  # share of neighbours of one class
    longest: int  # longest run of one class
    shard: float  # largest share of a batch from one shard, mean over batches
    partners: float  # share of partners of the same class


def mixing(index: Index, batches: list[Ints], batch: int) -> Mixing:
    full = np.stack(batches[:-1])  # (steps, batch)
    classes = index.classes[full]
    labels = classes.reshape(-1)
    changes = np.flatnonzero(np.diff(labels, prepend=-1, append=-1))
    shards = index.shards[full]
    largest = [np.bincount(row).max() / batch for row in shards]
    half = batch // 2
    return Mixing(
        float((labels[1:] == labels[:-1]).mean()),
        int(np.diff(changes).max()),
        float(np.mean(largest)),
        float((classes[:, :half] == classes[:, half:]).mean()),
    )


@pytest.mark.parametrize(
    ("num_classes", "per_class", "num_shards", "batch"),
    [(100, 100, 10, 64), (100, 100, 10, 128), (1000, 1280, 1024, 128), (1000, 1280, 1024, 1024)],
)
def test_an_index_sorted_by_class_is_mixed_almost_as_by_a_uniform_shuffle(
    num_classes: int, per_class: int, num_shards: int, batch: int
) -> None:
    index = sorted_index(num_classes, per_class, num_shards, 20_000)
    deal = deal_of(index, batch)
    n = len(index.classes)
    uniform_rows = np.random.default_rng(0).permutation(n)
    uniform = [uniform_rows[first : first + batch] for first in range(0, n, batch)]
    actual = mixing(index, line(deal), batch)
    expected = mixing(index, uniform, batch)
    # Neighbours are of different streams, which hold different runs: as in a uniform shuffle.
    assert actual.neighbours < 1.5 * expected.neighbours + 0.001
    assert actual.longest <= expected.longest + 2
    assert actual.shard < 1.25 * expected.shard
    # Partners share a stream and so a block: they are of one run with a chance of 1 / its runs.
    runs_per_block = min(deal.block_runs, order.RUNS_PER_STREAM)
    assert actual.partners < expected.partners + 1.5 / runs_per_block


# ---- what it costs -------------------------------------------------------------------------------
def test_an_order_needs_little_memory_beyond_the_index() -> None:
    """Counted bytes of a tenth of ImageNet, beside 100 MB for the whole of it."""
    index = sorted_index(1000, 128, 120, 110_000)
    tracemalloc.start()
    try:
        epoch_order = deal_of(index, 1024).epoch(0)
        for step in range(epoch_order.num_steps):
            epoch_order.rows(step, np.arange(epoch_order.size(step)))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 10e6
