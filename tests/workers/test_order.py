"""Tests of the order of an epoch: every row once, a pure function, quality of the shuffle, cost."""

from __future__ import annotations

import copy
import hashlib
import tracemalloc
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pytest

from workers.data import order
from workers.data.order import (
    MAX_RUNS,
    RUN_BYTES,
    RUNS_PER_STREAM,
    Deal,
    EpochOrder,
    Ints,
    TableOrder,
    draw,
    find_partner_positions,
    num_streams,
)
from workers.rng import derive_seed

SMALL = 10_000  # rows
SIZE = 20_000  # bytes per row


def deal_of(
    num_rows: int = SMALL, batch: int = 64, seed: int = 5, repeats: int = 1, size: int = SIZE
) -> Deal:
    return Deal(num_rows, num_rows * size, batch, seed, repeats)


def line(deal: Deal, epoch: int = 0, start: int = 0) -> list[Ints]:
    """Return the rows of each global batch."""
    epoch_order = deal.epoch(epoch)
    steps = range(start, epoch_order.num_steps)
    return [epoch_order.rows(s, np.arange(epoch_order.size(s))) for s in steps]


def joined(batches: list[Ints]) -> Ints:
    """Concatenate the rows of all batches; the list may be empty."""
    return np.concatenate([*batches, np.zeros(0, np.int64)])


def rows_of_rank(epoch_order: EpochOrder, rank: int, world: int) -> Iterator[tuple[int, Ints]]:
    """Yield each step and the rows of a rank in it."""
    for step in range(epoch_order.num_steps):
        yield step, epoch_order.rows(step, np.arange(rank, epoch_order.size(step), world))


class Computed(list[tuple[int, int]]):
    """List of (stream, block) in the order in which blocks are computed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        block = EpochOrder.block

        def note(epoch_order: EpochOrder, stream: int, number: int) -> Ints:
            self.append((stream, number))
            return block(epoch_order, stream, number)

        monkeypatch.setattr(EpochOrder, "block", note)


@pytest.fixture(params=[order.BLOCK_RUNS, 2, 1], ids="{}-runs".format)
def block_runs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Set the number of runs in a block. With few, streams of a small data set have many blocks."""
    number: int = request.param
    monkeypatch.setattr(order, "BLOCK_RUNS", number)
    return number


# ---- streams and partners ------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("batch", "expected"),
    [(2, 1), (4, 2), (64, 32), (100, 50), (96, 48), (128, 64), (1024, 512), (4096, 512), (63, 1)],
)
def test_number_of_streams_divides_half_batch(batch: int, expected: int) -> None:
    assert num_streams(batch) == expected


@pytest.mark.parametrize("batch", [2, 3, 4, 7, 64, 96, 100])
def test_partners_are_mutual_pairs_in_the_same_stream(batch: int) -> None:
    for size in {1, 2, batch // 2 + 1, batch - 1, batch}:
        partners = find_partner_positions(batch, size)
        positions = np.arange(size)
        assert (partners[partners].numpy() == positions).all(), "an involution"
        distance = (partners.numpy() - positions) % num_streams(batch)
        assert not distance.any(), "partners are in the same stream"
    alone = (find_partner_positions(batch, batch).numpy() == np.arange(batch)).sum()
    assert alone == batch % 2


@pytest.mark.parametrize("repeats", [2, 3, 9])
def test_copies_of_an_image_share_a_stream_without_being_partners(
    repeats: int, block_runs: int
) -> None:
    deal = deal_of(repeats=repeats)
    assert deal.num_streams <= 32 / repeats
    once = copy.copy(deal)
    once.repeats = 1
    repeated_rows, rows_once = joined(line(deal)), joined(line(once))
    for stream in range(deal.num_streams):
        rows = rows_once[stream :: deal.num_streams]
        copies = [row for row in rows.tolist() for _ in range(repeats)][: len(rows)]
        assert repeated_rows[stream :: deal.num_streams].tolist() == copies
    for rows in line(deal):
        partners = find_partner_positions(64, len(rows)).numpy()
        mixed = partners != np.arange(len(rows))
        assert (rows[partners] != rows)[mixed].all()
    assert len(line(deal)) == len(line(once))


# ---- exactly once, a pure function ---------------------------------------------------------------
@pytest.mark.few(8)
@pytest.mark.parametrize("batch", [1, 4, 7, 64, 96, 1000, 4097, 20_000])
def test_every_row_comes_once_in_every_epoch(batch: int, block_runs: int) -> None:
    deal = deal_of(batch=batch)
    epochs = [line(deal, epoch) for epoch in (0, 3)]
    for batches in epochs:
        assert [len(rows) for rows in batches[:-1]] == [batch] * (len(batches) - 1)
        assert sorted(joined(batches).tolist()) == list(range(SMALL))
    assert joined(epochs[0]).tolist() != joined(epochs[1]).tolist()


@pytest.mark.parametrize("n", [0, 1, 2, 31, 33, 100, 1009])
@pytest.mark.parametrize("batch", [7, 64, 96])
def test_small_tables_and_ragged_ends_lose_no_rows(n: int, batch: int, block_runs: int) -> None:
    for size in (SIZE, RUN_BYTES // 10):
        batches = line(deal_of(n, batch, size=size))
        assert sorted(joined(batches).tolist()) == list(range(n))


@pytest.mark.few("1", "3")
@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_a_million_rows_come_once_for_any_number_of_ranks(world: int) -> None:
    n = 1_000_000
    count = np.zeros(n, np.int64)
    deal = deal_of(n, 1000, size=100_000)
    for rank in range(world):
        for _, rows in rows_of_rank(deal.epoch(0), rank, world):
            np.add.at(count, rows, 1)
    assert (count == 1).all()


def test_the_order_of_a_fixed_index_never_changes() -> None:
    """Stored results depend on the order: a new digest requires a new TRAIN_REVISION."""
    digests = []
    for deal in (deal_of(seed=7), deal_of(50_003, batch=8, seed=7)):
        digest = hashlib.sha256()
        for epoch in (0, 1):
            for rows in line(deal, epoch):
                digest.update(rows.astype("<i8").tobytes())
        digests.append(digest.hexdigest()[:16])
    assert digests == ["0b6d2d04f2874482", "abd2f9767c97b4b5"]


def test_order_depends_on_the_seed_and_resumes_mid_epoch(block_runs: int) -> None:
    whole = joined(line(deal_of()))
    assert (whole != joined(line(deal_of(seed=6)))).any()
    resumed = joined(line(deal_of(), start=100))
    assert (resumed == whole[100 * 64 :]).all()


def by_the_book(deal: Deal, epoch: int) -> list[int]:
    """Return the order by its definition, from lists that contain the whole epoch."""

    def drawn(count: int, *names: str | int) -> Ints:
        return draw(derive_seed(deal.seed, names[0], epoch, *names[1:]), count).astype(object)

    n, size = deal.num_rows, deal.rows_per_run
    whole = n // size
    runs = [range(first, min(first + size, n)) for first in range(0, n, size)]
    runs_in_line = [runs[number] for number in np.argsort(drawn(whole, "runs"), kind="stable")]
    if n % size:
        runs_in_line.insert(drawn(1, "short")[0] % (whole + 1), runs[-1])
    rows_in_line = [row for run in runs_in_line for row in run]
    streams = [part.tolist() for part in np.array_split(rows_in_line, deal.num_streams)]
    for stream, rows in enumerate(streams):
        shuffled: list[int] = []
        num_blocks = int(deal.epoch(epoch).num_blocks[stream])
        borders = [block * len(rows) // num_blocks for block in range(num_blocks + 1)]
        for block in range(num_blocks):
            part = rows[borders[block] : borders[block + 1]]
            places = np.argsort(drawn(len(part), "rows", stream, block), kind="stable")
            shuffled += [part[place] for place in places]
        streams[stream] = [row for row in shuffled for _ in range(deal.repeats)][: len(rows)]
    return [streams[i % deal.num_streams][i // deal.num_streams] for i in range(n)]


@pytest.mark.few(20)
@pytest.mark.parametrize("n", [1, 31, 33, 100, 1009, SMALL])
@pytest.mark.parametrize(("batch", "repeats"), [(7, 1), (64, 1), (96, 3), (2000, 1)])
def test_order_matches_the_reference_implementation(
    n: int, batch: int, repeats: int, block_runs: int
) -> None:
    deal = deal_of(n, batch, repeats=repeats, size=RUN_BYTES // 10)
    for epoch in (0, 2):
        assert joined(line(deal, epoch)).tolist() == by_the_book(deal, epoch)


@pytest.mark.few(4)
@pytest.mark.parametrize(("batch", "repeats"), [(7, 1), (64, 1), (64, 3), (96, 1)])
def test_steps_in_any_order_give_the_same_rows(
    batch: int, repeats: int, block_runs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In reverse and random order, blocks are dropped and computed again."""
    deal = deal_of(2000, batch, repeats=repeats)
    whole = line(deal)
    generator = np.random.default_rng(0)
    steps = np.arange(len(whole))
    computed = Computed(monkeypatch)
    for asked in (steps[::-1], generator.permutation(steps), generator.choice(steps, 300)):
        epoch_order = deal.epoch(0)
        for step in asked.tolist():
            size = epoch_order.size(step)
            positions = generator.permutation(size)[: generator.integers(size + 1)]
            assert (epoch_order.rows(step, positions) == whole[step][positions]).all()
    if block_runs == 1:
        assert len(set(computed)) < len(computed) / 3, "blocks were computed again"


# ---- blocks --------------------------------------------------------------------------------------
@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
def test_rank_computes_only_its_blocks_and_each_once(
    world: int, block_runs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    deal = deal_of()
    whole = line(deal)
    num_blocks = deal.epoch(0).num_blocks
    for rank in range(world):
        computed = Computed(monkeypatch)
        for step, rows in rows_of_rank(deal.epoch(0), rank, world):
            assert (rows == whole[step][rank::world]).all()
        assert len(set(computed)) == len(computed)
        streams = np.unique([stream for stream, _ in computed])
        assert len(computed) == num_blocks[streams].sum()
        if deal.num_streams % world == 0:
            assert streams.tolist() == list(range(rank, deal.num_streams, world))
        else:
            assert len(streams) > deal.num_streams // world, "a rank needs rows of more streams"
        monkeypatch.undo()
        monkeypatch.setattr(order, "BLOCK_RUNS", block_runs)


@pytest.mark.few(7)
@pytest.mark.parametrize("batch", [7, 64, 96, 130, 1001, 1026, 4096])
def test_step_needs_at_most_two_blocks_per_stream(
    batch: int, block_runs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An order holds two blocks per stream; a third would overwrite one that is still needed."""
    for n in (batch + 1, 2 * batch + 3, 9999, 20_011):
        deal = deal_of(n, batch, size=RUN_BYTES // 3)
        num_steps = deal.epoch(0).num_steps
        for step in {*range(0, num_steps, 1 + num_steps // 20), num_steps - 1}:
            computed = Computed(monkeypatch)
            epoch_order = deal.epoch(0)
            epoch_order.rows(step, np.arange(epoch_order.size(step)))
            monkeypatch.undo()
            monkeypatch.setattr(order, "BLOCK_RUNS", block_runs)
            assert max(np.bincount([stream for stream, _ in computed])) <= 2
            assert len(set(computed)) == len(computed)


def test_table_order_yields_rows_in_table_order() -> None:
    table = TableOrder(10, 4)
    rows = [table.rows(step, np.arange(table.size(step))).tolist() for step in range(3)]
    assert rows == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert table.num_steps == 3


# ---- runs ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("size", [1, 3000, 110_000, RUN_BYTES, RUN_BYTES + 1, 1 << 30])
@pytest.mark.parametrize("n", [1, 10_000, 1_281_167, 13_000_000, 10**9])
@pytest.mark.parametrize("batch", [63, 64, 1024])
def test_runs_are_as_long_as_the_request_limit_allows(n: int, size: int, batch: int) -> None:
    """There are at most MAX_RUNS runs, and at least RUNS_PER_STREAM for each stream."""
    deal = deal_of(n, batch, size=size)
    length = deal.rows_per_run
    least = RUNS_PER_STREAM * deal.num_streams
    assert n / length <= MAX_RUNS
    assert length <= max(1, RUN_BYTES // size, -(-n // MAX_RUNS))
    assert (length - 1) * least < n
    assert (length + 1) * size > RUN_BYTES or length * least >= n, "runs could be longer"


@pytest.mark.parametrize(("n", "batch"), [(1_281_167, 128), (1_281_167, 1024), (13_000_000, 4096)])
def test_blocks_have_few_runs_and_fit_into_a_cluster(n: int, batch: int) -> None:
    deal = deal_of(n, batch, size=110_000)
    epoch_order = deal.epoch(0)
    for block in range(int(epoch_order.num_blocks[3])):
        runs = np.unique(epoch_order.block(3, block) // deal.rows_per_run)
        assert len(runs) <= deal.block_runs + 2, "two runs may be shared with other blocks"
    window_runs = deal.num_streams * deal.block_runs
    assert window_runs * deal.rows_per_run * 110_000 <= 16 << 30


# ---- quality of the shuffle ----------------------------------------------------------------------
class Mixing(NamedTuple):
    """How an epoch mixes classes and shards; shares are between 0 and 1."""

    neighbours: float  # share of neighbours with the same class
    longest: int  # length of the longest sequence of one class
    shard: float  # largest share of a batch from one shard, mean over batches
    partners: float  # share of partners with the same class


def mixing(batches: list[Ints], batch: int, per_class: int, per_shard: int) -> Mixing:
    """Return the mixing of a table sorted by class and shard, which is the worst order."""
    full = np.stack(batches[:-1])  # (steps, batch)
    classes = full // per_class
    labels = classes.reshape(-1)
    changes = np.flatnonzero(np.diff(labels, prepend=-1, append=-1))
    largest = [np.bincount(row).max() / batch for row in full // per_shard]
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
def test_a_table_sorted_by_class_is_mixed_almost_uniformly(
    num_classes: int, per_class: int, num_shards: int, batch: int
) -> None:
    n = num_classes * per_class
    per_shard = -(-n // num_shards)
    deal = deal_of(n, batch)
    uniform_rows = np.random.default_rng(0).permutation(n)
    uniform = [uniform_rows[first : first + batch] for first in range(0, n, batch)]
    actual = mixing(line(deal), batch, per_class, per_shard)
    expected = mixing(uniform, batch, per_class, per_shard)
    # Neighbours are in different streams, so they are from different runs, as in a uniform shuffle.
    assert actual.neighbours < 1.5 * expected.neighbours + 0.001
    assert actual.longest <= expected.longest + 2
    assert actual.shard < 1.25 * expected.shard
    # Partners are in the same block, so they are from the same run with probability 1 / its runs.
    runs_per_block = min(deal.block_runs, RUNS_PER_STREAM)
    assert actual.partners < expected.partners + 1.5 / runs_per_block


# ---- memory --------------------------------------------------------------------------------------
def test_an_order_needs_little_memory() -> None:
    """The order has as many rows as a tenth of ImageNet."""
    tracemalloc.start()
    try:
        epoch_order = deal_of(128_000, 1024, size=110_000).epoch(0)
        for step in range(epoch_order.num_steps):
            epoch_order.rows(step, np.arange(epoch_order.size(step)))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 10e6


def test_order_of_a_billion_rows_needs_little_memory() -> None:
    """Computes the first batch of one of eight ranks, for a data set of 100 TB."""
    tracemalloc.start()
    try:
        epoch_order = deal_of(10**9, 1024, size=100_000).epoch(0)
        rows = epoch_order.rows(0, np.arange(0, 1024, 8))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(set(rows.tolist())) == 128
    assert rows.min() >= 0
    assert rows.max() < 10**9
    assert peak < 300e6
