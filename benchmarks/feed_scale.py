"""Measure the order of an epoch and the reading of records at the size of ImageNet, with tiny
images.

Command: `python -m benchmarks.feed_scale`. It takes about three minutes and writes 0.4 GB to a
temporary folder: an index of 1.28 million rows over 1290 shards, each with images of one class.
Times are CPU times of one thread.
"""

from __future__ import annotations

import hashlib
import io
import tempfile
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from benchmarks.harness import Report, interleave, start
from workers.data.feed import Feed
from workers.data.order import Deal, EpochOrder, Ints, num_streams
from workers.data.reader import DiskReader, cut_ranges
from workers.data.rows import Locations
from workers.data.shards import INDEX, SCHEMA
from workers.dist import Group
from workers.job import BackboneSettings, DataSettings, StageJob, Task, TrainSettings
from workers.storage.artifact import Attempt

IMAGENET_ROWS = 1_281_000
IMAGENET_BYTES = 110_000  # average per image
ROWS_OF_21K, SHARDS_OF_21K = 13_000_000, 21_841  # one shard per class
SHARD_ROWS, SMALL_ROWS, SIDE, BATCH = 1000, 1000, 8, 128
CLASSES = 10  # per generated store
DISTINCT = 100  # distinct images per generated store; each is repeated many times
RANKS = 64
NODES, RANKS_PER_NODE, LARGE_BATCH = (1, 2, 8, 64), 8, 4096
ORDER_DEMAND_S = 1.0  # the order of 1.28 million rows
ORDER_DEMAND_MB = 100.0  # in addition to the index
BATCH_DEMAND = 1.2  # a batch at 1.28 million rows / at 1000
RATE_DEMAND = 0.9  # records per second of a rank among 64 / of a single rank
BYTES_DEMAND = 1.1  # bytes that one of N nodes reads / its share of all bytes


def made_up_index(num_rows: int, num_shards: int) -> Locations:
    """Return an index with random sizes like those of photographs: a third to three times the
    average."""
    generator = np.random.default_rng(0)
    spread = generator.uniform(-1.1, 1.1, num_rows)
    sizes = (np.exp(spread) * IMAGENET_BYTES / 1.2).astype(np.int64)
    per_shard = -(-num_rows // num_shards)
    shards = (np.arange(num_rows) // per_shard).astype(np.int32)
    ends = np.cumsum(sizes + 1536)
    firsts = np.flatnonzero(np.diff(shards, prepend=-1))
    shard_starts = (ends - sizes - 1536)[firsts]
    offsets = ends - sizes - 1024 - shard_starts[shards]
    return Locations([], shards, offsets, sizes)


def make_deal(sizes: Ints, batch: int) -> Deal:
    """Return the deal for rows with these sizes in bytes."""
    return Deal(len(sizes), int(sizes.sum()), batch, seed=1)


def compute_order(deal: Deal, rank: int = 0, world: int = 1) -> int:
    """Compute the rows of a rank in all steps of an epoch and return their number."""
    order = deal.epoch(0)
    num_rows = 0
    for step in range(order.num_steps):
        num_rows += len(order.rows(step, np.arange(rank, order.size(step), world)))
    return num_rows


def rows_of_stream(order: EpochOrder, stream: int) -> Ints:
    """Return the rows of a stream, block by block."""
    blocks = range(int(order.num_blocks[stream]))
    return np.concatenate([order.block(stream, block) for block in blocks])


def measure_order(report: Report) -> None:
    """Measure the time and memory of the order of 1.28 million and of 13 million rows."""
    for name, rows, shards in (
        ("1.28 million rows", IMAGENET_ROWS, 1281),
        ("13 million rows", ROWS_OF_21K, SHARDS_OF_21K),
    ):
        index = made_up_index(rows, shards)
        began = time.process_time()
        compute_order(make_deal(index.sizes, 1024))
        seconds = time.process_time() - began
        tracemalloc.start()
        compute_order(make_deal(index.sizes, 1024))
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        if rows == IMAGENET_ROWS:
            report.below(f"order of {name}", seconds, ORDER_DEMAND_S)
            report.at_most(f"order of {name}, 100 MB", peak / 1e6 / ORDER_DEMAND_MB, 1.0)
        began = time.process_time()
        compute_order(make_deal(index.sizes, LARGE_BATCH), 0, RANKS * RANKS_PER_NODE)
        one_rank = time.process_time() - began
        report.note(f"order of {name}", f"{seconds:.2f} s, {peak / 1e6:.0f} MB at most")
        report.note(f"order of {name}, one rank of 512", f"{one_rank:.2f} s")


def measure_bytes(report: Report) -> None:
    """Measure the bytes of the ranges that the ranks of one node read in an epoch of ImageNet."""
    index = made_up_index(IMAGENET_ROWS, 1281)
    deal = make_deal(index.sizes, LARGE_BATCH)
    borders = cut_ranges(index, deal.rows_per_run)
    ends = np.maximum.reduceat(index.offsets + index.sizes, borders[:-1])
    range_bytes = ends - index.offsets[borders[:-1]]
    range_of_row = np.repeat(np.arange(len(range_bytes)), np.diff(borders))
    order = deal.epoch(0)
    for nodes in NODES:
        world = nodes * RANKS_PER_NODE
        if num_streams(LARGE_BATCH) % world:
            continue
        streams = [s for s in range(deal.num_streams) if s % world < RANKS_PER_NODE]
        rows = np.concatenate([rows_of_stream(order, stream) for stream in streams])
        ranges = np.unique(range_of_row[rows])
        share = float(range_bytes[ranges].sum() / (range_bytes.sum() / nodes))
        report.at_most(f"bytes of one node of {nodes} / its share", share, BYTES_DEMAND)
        report.note(
            f"one node of {nodes}",
            f"{range_bytes[ranges].sum() / 1e9:.1f} GB in {len(ranges):,} requests",
        )


def small_images() -> list[bytes]:
    """Return DISTINCT PNG images of noise."""
    records = []
    for number in range(DISTINCT):
        buffer = io.BytesIO()
        noise = np.random.default_rng(number).integers(0, 256, (SIDE, SIDE, 3), np.uint8)
        Image.fromarray(noise).save(buffer, "PNG")
        records.append(buffer.getvalue())
    return records


def write_store(root: Path, key: str, num_rows: int, records: list[bytes], ext: str) -> None:
    """Write an artifact of `num_rows` images of ten classes, as ingest would.

    Args:
        root: Folder of the stages.
        key: Key of the artifact.
        num_rows: Number of images.
        records: Encoded images. They are repeated, and the row number is appended to each copy.
        ext: File extension of their format.
    """
    attempt = Attempt(str(root), key)
    tables: list[pa.Table] = []
    for label in range(CLASSES):
        images = []
        for row in range(label, num_rows, CLASSES):
            data = records[row % len(records)] + row.to_bytes(4)
            images.append((hashlib.sha256(data).hexdigest(), row, data))
        images.sort()
        for number, first in enumerate(range(0, len(images), SHARD_ROWS)):
            digests, rows, contents = zip(*images[first : first + SHARD_ROWS], strict=True)
            name = f"train-{label}-{number:05d}.tar"
            attempt.write(name, b"".join(data + bytes(64) for data in contents))
            sizes = np.array([len(data) for data in contents])
            columns = {
                "split": pa.array(["train"] * len(rows)),
                "key": pa.array([f"train/{label}/{row}" for row in rows]),
                "class": pa.array([str(label)] * len(rows)),
                "shard": pa.array([name] * len(rows)),
                "offset": pa.array(np.cumsum(sizes + 64) - sizes - 64),
                "bytes": pa.array(sizes),
                "sha256": pa.array(digests),
                "ext": pa.array([ext] * len(rows)),
            }
            tables.append(pa.table(columns, SCHEMA))
    index = io.BytesIO()
    pq.write_table(pa.concat_tables(tables), index)
    attempt.write(INDEX, index.getvalue())
    attempt.commit({"kind": "ingest"})


def streamed_feed(
    root: Path,
    key: str,
    classes: tuple[str, ...] = tuple(map(str, range(CLASSES))),
    group: Group | None = None,
    cache: str = "",
) -> Feed:
    """Return a training feed over an artifact (default: of `write_store`, in a single rank)."""
    task = Task("t", "card", key, classes)
    job = StageJob(
        "id",
        "key",
        "train",
        str(root),
        "linear",
        {},
        BackboneSettings(img_size=SIDE, crop_pct=1.0),
        DataSettings(val_fraction=0.0, resident_mb=0, crop="pad", flip=0.5),
        TrainSettings(batch_size=BATCH),
        "task",
        1,
        task,
        (task,),
        loader_workers=0,
        cache=cache,
    )
    return Feed(job, (task,), "train", group or Group(), training=True)


def make_batches(feed: Feed, order: EpochOrder, steps: range) -> int:
    """Make the batches of some steps on a single rank; return the number of images."""
    num_images = 0
    for batches in feed._batches(0, order, steps, feed._micro_batches):
        num_images += sum(len(batch) for batch in batches)
    return num_images


def read_share(feed: Feed, rank: int, world: int) -> int:
    """Read the records of one of `world` ranks in the order of an epoch; return their number."""
    samples = feed.samples
    order = make_deal(samples.locations.sizes, LARGE_BATCH).epoch(0)
    reader = DiskReader(samples)
    num_records = 0
    for step in range(order.num_steps):
        for row in order.rows(step, np.arange(rank, order.size(step), world)).tolist():
            reader.read(row)
            num_records += 1
    return num_records


def repeated(steps: range, times: int) -> Iterator[range]:
    """Yield the same steps several times."""
    for _ in range(times):
        yield steps


def measure_reading(report: Report, folder: Path) -> None:
    """Time batches from a large and a small store, and the reads of a rank among many."""
    num_rows = IMAGENET_ROWS // SHARD_ROWS * SHARD_ROWS
    records = small_images()
    write_store(folder, "large", num_rows, records, "png")
    write_store(folder, "small", SMALL_ROWS, records, "png")
    began = time.process_time()
    large = streamed_feed(folder, "large")
    feed_s = time.process_time() - began
    report.note(f"making the feed of {num_rows:,} rows, once in a stage", f"{feed_s:.1f} s")
    small = streamed_feed(folder, "small")
    orders = {"large": large.deal.epoch(0), "small": small.deal.epoch(0)}
    steps = range(SMALL_ROWS // BATCH)

    def batches(feed: Feed, name: str) -> None:
        for part in repeated(steps, 20):
            make_batches(feed, orders[name], part)

    timing = interleave(
        {"large": lambda: batches(large, "large"), "small": lambda: batches(small, "small")},
        rounds=9,
    )
    report.at_most(
        f"a batch of {BATCH} at {num_rows:,} rows / at {SMALL_ROWS:,}",
        timing.ratio("large", "small"),
        BATCH_DEMAND,
    )
    counts = {"alone": 0, "among": 0}

    def alone() -> None:
        counts["alone"] = read_share(large, 0, 1)

    def among() -> None:
        counts["among"] = sum(read_share(large, rank, RANKS) for rank in range(4))

    timing = interleave({"alone": alone, "among": among}, rounds=3, warmup=0)
    rates = {name: counts[name] / timing.median(name) for name in counts}
    report.at_least(
        f"records per second of a rank among {RANKS} / of a single one",
        rates["among"] / rates["alone"],
        RATE_DEMAND,
    )
    for name, rate in rates.items():
        report.note(f"records per second, a rank {name}", f"{rate:,.0f}")


def main() -> None:
    """Measure the order, the bytes and the reading."""
    start()
    report = Report()
    measure_order(report)
    measure_bytes(report)
    with tempfile.TemporaryDirectory() as folder:
        measure_reading(report, Path(folder))
    report.exit()


if __name__ == "__main__":
    main()
