"""Measure the cost of the index of 13 million images in the ranks of a node.

Command: `python -m benchmarks.shared_index`. It takes about three minutes, 8 GB of memory and 3 GB
of a temporary folder. The images are made up, and none is read.

The first rank of a node reads the index and writes the sample table to the cache of the node; the
other ranks, and later stages on the same images, map this file into memory. Each rank is a process
of its own. It runs to its first batch: its feed, the byte ranges that it would request from a
bucket, and the locations and digests of the images of its first step.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from threading import Event, Thread
from typing import NamedTuple

import numpy as np

from benchmarks.feed_cluster import name_classes, write_index
from benchmarks.feed_scale import ROWS_OF_21K, streamed_feed
from benchmarks.harness import Report, start
from workers.data.reader import Ranges
from workers.dist import Group

RANK, WORLD = 3, 8
SECONDS_DEMAND = 1.0  # CPU seconds of a later rank to its first batch
MEMORY_DEMAND = 100.0  # MB of its own memory
SAMPLE_S = 0.002  # seconds between two samples of the memory


class RankCost(NamedTuple):
    """The cost of a rank to its first batch.

    Attributes:
        seconds: CPU seconds.
        own_mb: Largest growth of the memory that belongs to the process alone.
        mapped_mb: Growth of the mapped pages of files, which the processes of a node share.
    """

    seconds: float
    own_mb: float
    mapped_mb: float


def read_resident_mb(kind: str) -> float:
    """Return the resident memory of this process: `RssAnon` (its own) or `RssFile` (mapped)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{kind}:"):
            return int(line.split()[1]) * 1024 / 1e6
    raise RuntimeError(f"/proc/self/status has no {kind}")


@contextmanager
def sampled_own_memory() -> Iterator[list[float]]:
    """Append samples of the process's own memory to the returned list."""
    samples = [read_resident_mb("RssAnon")]
    is_over = Event()

    def sample() -> None:
        while not is_over.wait(SAMPLE_S):
            samples.append(read_resident_mb("RssAnon"))

    thread = Thread(target=sample)
    thread.start()
    try:
        yield samples
    finally:
        is_over.set()
        thread.join()


def run_rank(folder: str, cache: str, num_rows: int) -> RankCost:
    """Run one rank to the images of its first step."""
    classes = name_classes(num_rows)
    mapped_mb = read_resident_mb("RssFile")
    with sampled_own_memory() as samples:
        began = time.process_time()
        feed = streamed_feed(Path(folder), "index", classes, Group(RANK, WORLD), cache)
        ranges = Ranges.of_runs(feed.samples, feed.deal.rows_per_run)
        order = feed.deal.epoch(0)
        rows = order.rows(0, np.arange(RANK, order.size(0), WORLD))
        locations = feed.samples.locations
        assert (ranges.starts[ranges.find(rows)] <= locations.offsets[rows]).all()
        assert feed.samples.digests(rows).all()
        assert len(feed.samples) == num_rows
        seconds = time.process_time() - began
    own_mb = max(samples) - samples[0]
    return RankCost(seconds, own_mb, read_resident_mb("RssFile") - mapped_mb)


def main() -> None:
    """Measure the first rank of a node and a later one."""
    start()
    report = Report()
    with tempfile.TemporaryDirectory() as folder:
        write_index(Path(folder), "index", ROWS_OF_21K)
        costs = []
        for name in ("the first rank", "a later rank"):
            with get_context("spawn").Pool(1) as pool:
                cost = pool.apply(run_rank, (folder, f"{folder}/cache", ROWS_OF_21K))
            report.note(
                f"{name} of a node, {ROWS_OF_21K:,} rows",
                f"{cost.seconds:.2f} s; {cost.own_mb:.0f} MB of its own, "
                f"{cost.mapped_mb:.0f} MB mapped",
            )
            costs.append(cost)
        (table,) = Path(folder, "cache", "tables").iterdir()
        report.note("the table in the cache", f"{table.stat().st_size / 1e9:.2f} GB")
    report.below("a later rank: CPU seconds to its first batch", costs[1].seconds, SECONDS_DEMAND)
    report.at_most("a later rank: own memory / 100 MB", costs[1].own_mb / MEMORY_DEMAND, 1.0)
    report.exit()


if __name__ == "__main__":
    main()
