"""Simulate the feed of ImageNet-21k on a cluster, without its pixels.

The data set has 13 million rows in 21,841 shards, one per class, for 64 nodes of 8 ranks.

Command: `python -m benchmarks.feed_cluster`. It takes about 25 seconds and 2 GB of memory.

The order, the byte ranges and the requests are computed by the code of the feed, for two of the 64
nodes (the other nodes differ only in their streams). The cache of a node is simulated. CPU times
are measured on one core with generated images of the size of photographs. The speeds of the network
and the bucket are assumptions, which are printed with the results.
"""

from __future__ import annotations

import hashlib
import io
import os
import tempfile
import time
import tracemalloc
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from benchmarks.feed_scale import (
    CLASSES,
    DISTINCT,
    compute_order,
    made_up_index,
    make_deal,
    rows_of_stream,
    write_store,
)
from benchmarks.harness import Report, start
from workers.data.cache import FILLED
from workers.data.decoding import decode
from workers.data.order import Deal, EpochOrder, Ints
from workers.data.reader import FETCH_THREADS, cut_ranges
from workers.data.rows import Locations, SampleTable, select
from workers.data.shards import GROUP_ROWS, INDEX, SCHEMA
from workers.job import Task
from workers.storage.artifact import Artifact, Attempt

ROWS, SHARDS, NODES, RANKS, CORES = 13_000_000, 21_841, 64, 8, 16
BATCH = 4096  # global: 8 images of each of 512 ranks
SAMPLED_NODES = (0, 37)
EPOCHS = 8
CACHES_GIB = (50, 500, 2000)  # the default of cluster.cache_gb; a large disk; all shards
BYTES_DEMAND = 1.1  # bytes that a node reads in an epoch / its share
# Assumptions about the network and the bucket.
NODE_GBIT = 10.0  # speed of a node's network card
FIRST_BYTE_S = 0.1  # from a request to its first byte
CONNECTION_MB = 85.0  # per second and connection
# Generated photographs that are read and decoded.
WIDTH, HEIGHT, QUALITY, GRAIN, SIDE = 500, 375, 92, 24, 224

INDEX_ROWS, CLASS_ROWS = 1_300_000, 1000  # size of the index that a rank reads
SHARD_BYTES = 200_000_000


class ByteRanges(NamedTuple):
    """Byte ranges of shards; each is fetched by one request.

    Attributes:
        of_row: (n,) number of the range that contains each row.
        sizes: (m,) bytes of each range.
    """

    of_row: np.ndarray
    sizes: Ints


class CpuCosts(NamedTuple):
    """Seconds of one core per image."""

    order: float
    read: float
    decode: float

    @property
    def total(self) -> float:
        """Seconds per image, from its position in the batch to its pixels."""
        return self.order + self.read + self.decode


class NodeCache:
    """Simulate which ranges are in a node's cache. Evicts like `workers/data/cache.py`."""

    def __init__(self, limit: int):
        self.limit = limit
        self.used = 0
        self.sizes: OrderedDict[int, int] = (
            OrderedDict()
        )  # range -> bytes, least recently used first

    def find_or_add(self, number: int, size: int) -> bool:
        """Return whether a range was in the cache. Add it if not, and mark it as used last."""
        if number in self.sizes:
            self.sizes.move_to_end(number)
            return True
        if self.used + size > self.limit:
            most = min(self.limit - size, int(FILLED * self.limit))
            while self.used > most and self.sizes:
                _, freed = self.sizes.popitem(last=False)
                self.used -= freed
        self.sizes[number] = size
        self.used += size
        return False


def cut(deal: Deal, index: Locations) -> ByteRanges:
    """Return the ranges of the runs of a deal."""
    borders = cut_ranges(index, deal.rows_per_run)
    firsts = borders[:-1]
    ends = np.maximum.reduceat(index.offsets + index.sizes, firsts)
    of_row = np.repeat(np.arange(len(firsts), dtype=np.int32), np.diff(borders))
    return ByteRanges(of_row, ends - index.offsets[firsts])


def list_streams(node: int, deal: Deal) -> list[int]:
    """Return the streams that the ranks of a node read."""
    first = node * RANKS
    ranks = range(first, first + RANKS)
    return [stream for stream in range(deal.num_streams) if stream % (NODES * RANKS) in ranks]


def ranges_of_node(order: EpochOrder, node: int, ranges: ByteRanges) -> list[int]:
    """Return the ranges that a node reads in an epoch, without repeats, in order of first use."""
    used: list[Ints] = []
    first_uses: list[Ints] = []
    for stream in list_streams(node, order.deal):
        of_row = ranges.of_row[rows_of_stream(order, stream)]
        of_stream, first_use = np.unique(of_row, return_index=True)
        used.append(of_stream)
        first_uses.append(first_use)
    in_order = np.concatenate(used)[np.argsort(np.concatenate(first_uses), kind="stable")]
    return list(dict.fromkeys(in_order.tolist()))


def measure_order(report: Report, index: Locations) -> tuple[Deal, ByteRanges, float]:
    """Measure the time and memory that one rank of 512 needs for the order.

    Returns:
        The deal, the ranges of the runs, and the seconds to compute the order of an epoch.
    """
    began = time.process_time()
    deal = make_deal(index.sizes, BATCH)
    ranges = cut(deal, index)
    deal_s = time.process_time() - began
    began = time.process_time()
    compute_order(deal, 0, NODES * RANKS)
    epoch_s = time.process_time() - began
    tracemalloc.start()
    compute_order(deal, 0, NODES * RANKS)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    num_runs = -(-deal.num_rows // deal.rows_per_run)
    report.note("runs", f"{num_runs:,} in {len(ranges.sizes):,} ranges, {deal.num_streams} streams")
    report.note("ranges, once in a stage", f"{deal_s:.2f} s of one core, in each rank")
    report.note(
        "order, in each epoch, the streams of one rank",
        f"{epoch_s:.2f} s of one core; {peak / 1e6:.0f} MB at most, of which those of streams that "
        "nobody asks for are never touched",
    )
    return deal, ranges, epoch_s


def name_classes(num_rows: int) -> tuple[str, ...]:
    """Return the classes of an index of `num_rows` rows."""
    return tuple(f"n{label:08d}" for label in range(num_rows // CLASS_ROWS))


def write_index(folder: Path, key: str, num_rows: int) -> None:
    """Write an artifact without pixels: an index of `num_rows` rows with a shard per class."""
    generator = np.random.default_rng(0)
    attempt = Attempt(str(folder), key)
    tables = []
    for name in name_classes(num_rows):
        shard = f"train-{hashlib.sha256(name.encode()).hexdigest()[:16]}-00000.tar"
        attempt.write(shard, b"")
        path = folder / key / attempt.name / shard
        os.truncate(path, SHARD_BYTES)
        attempt.files[shard]["bytes"] = SHARD_BYTES
        digests = sorted(generator.bytes(32).hex() for _ in range(CLASS_ROWS))
        columns = {
            "split": pa.array(["train"] * CLASS_ROWS),
            "key": pa.array([f"train/{name}/{name}_{row}" for row in range(CLASS_ROWS)]),
            "class": pa.array([name] * CLASS_ROWS),
            "shard": pa.array([shard] * CLASS_ROWS),
            "offset": pa.array(np.sort(generator.integers(0, 120_000_000, CLASS_ROWS))),
            "bytes": pa.array(generator.integers(30_000, 300_000, CLASS_ROWS)),
            "sha256": pa.array(digests),
            "ext": pa.array(["jpg"] * CLASS_ROWS),
        }
        tables.append(pa.table(columns, SCHEMA))
    buffer = io.BytesIO()
    index = pa.concat_tables(tables)
    pq.write_table(index, buffer, row_group_size=GROUP_ROWS, compression="zstd")
    attempt.write(INDEX, buffer.getvalue())
    attempt.commit({"kind": "ingest"})


def measure_index(report: Report) -> None:
    """Measure the time and memory of a rank that selects the samples of a task from an index."""
    pool = pa.default_memory_pool()
    with tempfile.TemporaryDirectory() as folder:
        pa.set_memory_pool(pa.system_memory_pool())  # excludes the writing from the measured memory
        write_index(Path(folder), "index", INDEX_ROWS)
        pa.set_memory_pool(pool)
        stored = Artifact.need(folder, "index").manifest["files"][INDEX]["bytes"]
        report.note(f"the index of {INDEX_ROWS:,} rows", f"{stored / 1e6:.0f} MB in the storage")
        classes = name_classes(INDEX_ROWS)
        num_classes = len(classes)
        for count in (num_classes // 100, num_classes // 10, num_classes):
            task = Task("t", "card", "index", classes[:count])
            before = pool.bytes_allocated()
            began = time.process_time()
            samples = select(folder, (task,), "train", 0.0)
            seconds = time.process_time() - began
            kept = samples.table.nbytes
            peak = (
                pool.max_memory() - before + stored
            )  # maximum over this task and the smaller tasks before it
            report.note(
                f"the rows of {count} of its {num_classes} classes, in each rank",
                f"{seconds:.2f} s of one core; at most {peak / 1e6:.0f} MB, "
                f"{kept / 1e6:.0f} MB kept",
            )
            del samples


def measure_requests(report: Report, deal: Deal, ranges: ByteRanges) -> tuple[float, float]:
    """Count the bytes and requests of the sampled nodes in an epoch; return the mean of each."""
    share = int(ranges.sizes.sum()) / NODES
    all_bytes: list[int] = []
    all_requests: list[int] = []
    for node in SAMPLED_NODES:
        order = deal.epoch(0)
        used = ranges_of_node(order, node, ranges)
        num_bytes = int(ranges.sizes[used].sum())
        report.at_most(
            f"bytes of node {node} of {NODES} in an epoch / its share",
            num_bytes / share,
            BYTES_DEMAND,
        )
        all_bytes.append(num_bytes)
        all_requests.append(len(used))
    mean_bytes, mean_requests = float(np.mean(all_bytes)), float(np.mean(all_requests))
    report.note(
        "a node in an epoch",
        f"{mean_bytes / 1e9:.1f} GB in {mean_requests:,.0f} requests of "
        f"{mean_bytes / mean_requests / 2**20:.2f} MiB, "
        f"{mean_requests / (ROWS / NODES):.3f} of an image",
    )
    return mean_bytes, mean_requests


def measure_cache(report: Report, deal: Deal, ranges: ByteRanges) -> None:
    """Measure the share of ranges that a node finds in its cache. Each epoch has new streams."""
    node = SAMPLED_NODES[0]
    caches = {size: NodeCache(size << 30) for size in CACHES_GIB}
    shares: dict[int, list[float]] = {size: [] for size in CACHES_GIB}
    for epoch in range(EPOCHS):
        used = ranges_of_node(deal.epoch(epoch), node, ranges)
        sizes = ranges.sizes[used].tolist()
        for gib, cache in caches.items():
            hits = sum(map(cache.find_or_add, used, sizes))
            shares[gib].append(hits / len(used))
    for gib, hit_shares in shares.items():
        report.note(
            f"cache of {gib:,} GiB, ranges that are found in it",
            f"{100 * hit_shares[1]:.1f} % in the second epoch, {100 * hit_shares[-1]:.1f} % in "
            f"epoch {EPOCHS}; it holds {caches[gib].used / 2**30:,.0f} GiB then",
        )


def photographs() -> Iterator[bytes]:
    """Yield JPEG images of about 110 kB, the average size in ImageNet."""
    for number in range(DISTINCT):
        generator = np.random.default_rng(number)
        coarse = generator.integers(0, 256, (12, 16, 3), np.uint8)
        smooth = Image.fromarray(coarse).resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC)
        grain = generator.normal(0, GRAIN, (HEIGHT, WIDTH, 3))
        pixels = (np.asarray(smooth) + grain).clip(0, 255).astype(np.uint8)
        buffer = io.BytesIO()
        Image.fromarray(pixels).save(buffer, "JPEG", quality=QUALITY)
        yield buffer.getvalue()


def cpu_seconds(call: Callable[[int], object], rows: range) -> float:
    """Return the CPU seconds of a call for one row, as the median of three rounds."""
    rounds = []
    for _ in range(3):
        began = time.process_time()
        for row in rows:
            call(row)
        rounds.append((time.process_time() - began) / len(rows))
    return sorted(rounds)[1]


def measure_cpu(report: Report, epoch_s: float) -> CpuCosts:
    """Measure the CPU seconds per image of the order, of reading with digest, and of decoding."""
    with tempfile.TemporaryDirectory() as folder:
        records = list(photographs())
        write_store(Path(folder), "photographs", 1000, records, "jpg")
        task = Task("t", "card", "photographs", tuple(str(number) for number in range(CLASSES)))
        samples = select(folder, (task,), "train", 0.0)
        costs = CpuCosts(
            epoch_s / (ROWS / (NODES * RANKS)),
            cpu_seconds(samples.read_bytes, range(len(samples))),
            cpu_seconds(lambda row: decode_record(samples, row), range(DISTINCT)),
        )
    costs = costs._replace(decode=costs.decode - costs.read)
    size = sum(map(len, records)) / len(records)
    report.note(
        f"one core, JPEG of {WIDTH} x {HEIGHT} and {size / 1000:.0f} kB",
        f"order {costs.order * 1e6:.1f} us, read and digest {costs.read * 1e6:.0f} us, decode to "
        f"{SIDE} px {costs.decode * 1e6:.0f} us: {1 / costs.total:,.0f} images/s",
    )
    return costs


def decode_record(samples: SampleTable, row: int) -> np.ndarray:
    """Read and decode a row."""
    return decode(samples.read_bytes(row), SIDE)


def report_rates(report: Report, costs: CpuCosts, node_bytes: float, node_requests: float) -> None:
    """Report the rate of a node as limited by its cores, its network and its requests."""
    images = ROWS / NODES
    by_cores = CORES / costs.total
    by_network = NODE_GBIT * 1e9 / 8 / (node_bytes / images)
    request_s = FIRST_BYTE_S + node_bytes / node_requests / (CONNECTION_MB * 1e6)
    by_requests = RANKS * FETCH_THREADS / request_s / (node_requests / images)
    report.note(
        f"a node of {CORES} cores can feed, by its cores",
        f"{by_cores:,.0f} images/s (assumed: cores scale, nothing else runs on them, "
        "augmentation is done on the device)",
    )
    report.note(
        "by its network card", f"{by_network:,.0f} images/s (assumed: {NODE_GBIT:g} Gbit/s)"
    )
    report.note(
        f"by {RANKS * FETCH_THREADS} requests at a time",
        f"{by_requests:,.0f} images/s (assumed: {1000 * FIRST_BYTE_S:g} ms to the first byte, "
        f"{CONNECTION_MB:g} MB/s of a connection)",
    )
    rate = min(by_cores, by_network, by_requests)
    step_s = BATCH / NODES / rate
    report.note(
        f"a step of {BATCH} images, {BATCH // NODES} of a node",
        f"{1000 * step_s:.1f} ms of feeding, of which order and reading take "
        f"{1000 * (costs.order + costs.read) * BATCH / NODES / CORES:.2f} ms; an epoch "
        f"{images / rate:,.0f} s with {node_requests / (images / rate):,.0f} requests/s of a node",
    )


def main() -> None:
    """Measure the order, the requests and the cache, then report the rate of a node."""
    start()
    report = Report()
    index = made_up_index(ROWS, SHARDS)
    mean = index.sizes.mean() / 1000
    report.note(
        "assumed", f"{ROWS:,} images of {mean:.0f} kB on average, {index.sizes.sum() / 1e12:.2f} TB"
    )
    deal, ranges, epoch_s = measure_order(report, index)
    measure_index(report)
    node_bytes, node_requests = measure_requests(report, deal, ranges)
    measure_cache(report, deal, ranges)
    costs = measure_cpu(report, epoch_s)
    report_rates(report, costs, node_bytes, node_requests)
    report.exit()


if __name__ == "__main__":
    main()
