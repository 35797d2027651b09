"""Readers: read records (image files in shards) from a disk or a bucket, and verify their bytes.

From a disk, records are read one by one. From a bucket, a few threads fetch longer ranges of bytes
before they are needed, into the cache of the node or into memory. `make_sequential_reader`,
`make_random_reader` and `make_shuffled_reader` choose the reader and its ranges. A range is one of:

- a run: consecutive rows of the table, as `workers/data/order.py` shuffles them;
- a piece: all records of a part of a shard, also those of other tasks and splits;
- one record.
"""

from __future__ import annotations

import os
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from threading import Lock
from typing import BinaryIO, NamedTuple, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from workers.data.cache import Cache, LocalFile
from workers.data.order import RUN_BYTES, Deal, Ints
from workers.data.rows import Locations, SampleTable
from workers.storage import filesystem
from workers.storage.filesystem import StorageUnavailable

GAP_BYTES = 256 << 10  # a larger gap of unneeded bytes between two rows ends a range
PIECE_BYTES = 8 << 20  # approximate bytes of a piece: a part of a shard that one request fetches
PIECES_AHEAD = 4  # number of pieces to fetch before they are needed
SPARSE = 4  # runs are fetched instead of pieces if pieces have more than this many times the bytes
RECORDS_AHEAD_BYTES = 32 << 20  # approximate bytes of records to fetch before they are needed
MEMORY_BYTES = 256 << 20  # limit of fetched ranges in memory, per rank, without a cache
FETCH_THREADS = 8
ROWS_AT_ONCE = 1 << 20  # rows processed at a time, to limit the memory


class Reader(Protocol):
    """The verified bytes of a table's rows."""

    reads_disks: bool  # whether other processes of this node can read the records from a disk, too

    def read(self, row: int) -> bytes:
        """Return the bytes of a row's image; thread-safe.

        Raises:
            DamagedArtifact: If the bytes differ from the ingested bytes.
        """

    def ahead(self, steps: Iterator[Ints]) -> Generator[Ints]:
        """Yield the rows of each step, and fetch the rows of later steps in the background.

        If the generator is closed, running fetches end, and no further fetch starts. Only the
        latest call fetches in advance.
        """

    def close(self) -> None:
        """End the threads after their current fetch. Afterwards nothing can be read."""


class DiskReader:
    """Reads shards on a disk of this node, or on one that it has mounted."""

    reads_disks = True

    def __init__(self, samples: SampleTable):
        self.samples = samples

    def read(self, row: int) -> bytes:
        """See `Reader.read`."""
        return self.samples.read_bytes(row)

    def ahead(self, steps: Iterator[Ints]) -> Generator[Ints]:
        """See `Reader.ahead`. This reader does not fetch in advance."""
        yield from steps

    def close(self) -> None:
        """See `Reader.close`. This reader has no threads."""


@dataclass(frozen=True)
class Ranges:
    """Ranges of bytes, each fetched by one request and cached as one file.

    Attributes:
        find: Function from rows of a table to their ranges, of the same shape.
        shards: Indices into `Locations.files`, (k,).
        starts: First byte of each range, (k,).
        sizes: Bytes of each range, (k,).
    """

    find: Callable[[Ints], Ints]
    shards: NDArray[np.int32]
    starts: Ints
    sizes: Ints

    @classmethod
    def of_runs(cls, samples: SampleTable, rows_per_run: int | None = None) -> Ranges:
        """Cut the table into runs, and split a run where its rows are far apart (`cut_ranges`).

        Args:
            samples: n rows.
            rows_per_run: See `Deal`. Default: a run has the rows that start within the same
                RUN_BYTES of a shard.
        """
        locations = samples.locations
        borders = cut_ranges(locations, rows_per_run)
        firsts = borders[:-1]
        starts = locations.offsets[firsts]
        sizes = find_range_ends(locations, borders) - starts

        def find(rows: Ints) -> Ints:
            return np.searchsorted(borders, rows, side="right") - 1

        return cls(find, locations.shards[firsts], starts, sizes)

    @classmethod
    def of_pieces(cls, samples: SampleTable) -> Ranges:
        """Cut shards into pieces: the records that start within the same PIECE_BYTES of a shard.

        Only pieces that contain a row of the table are returned. Their borders depend on the whole
        index, and not on the rows of the table. Therefore other rows of the same shards, for
        example of another split or task, use the same files of a cache.
        """
        locations = samples.locations
        owners = np.array([samples.shards.index(shards) for shards, _ in locations.files])
        names = [name for _, name in locations.files]
        of_row = np.empty(len(samples), np.int64)
        starts: list[Ints] = []
        sizes: list[Ints] = []
        num_pieces = 0
        for number, shards in enumerate(samples.shards):
            rows = np.flatnonzero(owners[locations.shards] == number)
            pieces = IndexPieces.of(shards.read_index())
            found = pieces.find(names, locations.shards[rows], locations.offsets[rows])
            used, piece_of_row = np.unique(found, return_inverse=True)
            of_row[rows] = num_pieces + piece_of_row
            starts.append(pieces.starts[used])
            sizes.append(pieces.ends[used] - pieces.starts[used])
            num_pieces += len(used)
        shard_of_piece = np.empty(num_pieces, np.int32)
        shard_of_piece[of_row] = locations.shards
        starts_of_all, sizes_of_all = np.concatenate(starts), np.concatenate(sizes)
        return cls(of_row.__getitem__, shard_of_piece, starts_of_all, sizes_of_all)

    @classmethod
    def of_records(cls, samples: SampleTable) -> Ranges:
        """Make one range for each record."""
        locations = samples.locations
        return cls(lambda rows: rows, locations.shards, locations.offsets, locations.sizes)

    @property
    def total_bytes(self) -> int:
        """Bytes of all ranges."""
        return int(self.sizes.sum())

    def estimate_bytes(self, count: int) -> int:
        """Estimate the bytes of `count` random ranges: `count` times the mean, plus the longest.

        The longest range is added because a single long record can make one range a hundred times
        longer than the others.
        """
        longest = int(self.sizes.max(initial=0))
        return count * self.total_bytes // max(1, len(self.starts)) + longest


def cut_ranges(locations: Locations, rows_per_run: int | None = None) -> Ints:
    """Return the borders of ranges of n rows, (m + 1,): range j is rows [borders[j], borders[j+1]).

    The rows of a range are in one shard and one run, in ascending order of their offsets, without a
    gap of more than GAP_BYTES.

    Args:
        locations: Locations of the bytes of the rows.
        rows_per_run: See `Ranges.of_runs`.
    """
    _, shards, offsets, sizes = locations
    num_rows = len(offsets)
    is_first = np.ones(num_rows, bool)
    for start in range(1, num_rows, ROWS_AT_ONCE):
        stop = min(start + ROWS_AT_ONCE, num_rows)
        rows, previous = slice(start, stop), slice(start - 1, stop - 1)
        gaps = offsets[rows] - offsets[previous]
        is_first[rows] = gaps < 0
        is_first[rows] |= gaps - sizes[previous] > GAP_BYTES
        is_first[rows] |= shards[rows] != shards[previous]
        if rows_per_run is None:
            is_first[rows] |= offsets[rows] // RUN_BYTES != offsets[previous] // RUN_BYTES
    if rows_per_run is not None:
        is_first[::rows_per_run] = True
    return np.append(np.flatnonzero(is_first), num_rows)


def find_range_ends(locations: Locations, borders: Ints) -> Ints:
    """Return the ends of the ranges of `cut_ranges` in their shards, (m,)."""
    ends = np.empty(len(borders) - 1, np.int64)
    start = 0
    while start < len(ends):
        stop = np.searchsorted(borders, borders[start] + ROWS_AT_ONCE, side="right") - 1
        stop = max(int(stop), start + 1)  # a range can have more rows
        rows = slice(borders[start], borders[stop])
        ends_of_rows = locations.offsets[rows] + locations.sizes[rows]
        firsts = borders[start:stop] - borders[start]
        ends[start:stop] = np.maximum.reduceat(ends_of_rows, firsts)
        start = stop
    return ends


class IndexPieces(NamedTuple):
    """The pieces of the shards of one index.

    Attributes:
        shards: Names of the shards.
        numbers: Numbers of the pieces, ascending: `per_shard` times the index of the shard, plus
            the position of the piece in the shard.
        per_shard: Larger than all positions.
        starts: First byte of each piece.
        ends: End of each piece.
    """

    shards: pa.Array
    numbers: Ints
    per_shard: int
    starts: Ints
    ends: Ints

    @classmethod
    def of(cls, index: pa.Table) -> IndexPieces:
        """Cut where the records of a shard pass a multiple of PIECE_BYTES."""
        shards = index["shard"].combine_chunks().dictionary_encode()
        offsets = index["offset"].to_numpy()
        ends = offsets + index["bytes"].to_numpy()
        position = offsets // PIECE_BYTES
        per_shard = int(position.max(initial=0)) + 1
        numbers, of_row = np.unique(
            shards.indices.to_numpy() * per_shard + position, return_inverse=True
        )
        by_piece = np.argsort(of_row, kind="stable")
        lines = np.searchsorted(of_row[by_piece], np.arange(len(numbers)))
        return cls(
            shards.dictionary,
            numbers,
            per_shard,
            np.minimum.reduceat(offsets[by_piece], lines),
            np.maximum.reduceat(ends[by_piece], lines),
        )

    def find(self, names: list[str], shards: NDArray[np.int32], offsets: Ints) -> Ints:
        """Return the index of the piece of each record.

        Args:
            names: Names of shards. Records are only in shards of this index.
            shards: Indices into `names`, (n,).
            offsets: First byte of each record, (n,).
        """
        numbers = pc.index_in(pa.array(names, self.shards.type), self.shards).fill_null(-1)
        first_piece = numbers.to_numpy().astype(np.int64) * self.per_shard
        found: Ints = np.searchsorted(self.numbers, first_piece[shards] + offsets // PIECE_BYTES)
        return found


class BucketReader:
    """Fetches ranges of shards from an object store before their records are read.

    If a storage does not answer, every fetch that has not started fails with the same error.
    Otherwise each fetch would wait for the storage as long as the first one. The next call of
    `ahead` clears the error. Fetches that are running at that time are forgotten and repeated.

    Args:
        samples: The rows.
        ranges: The ranges that contain the rows.
        cache: Keeps fetched ranges. Without a cache, about MEMORY_BYTES are kept in memory. Unread
            ranges are never dropped: ranges are fetched in advance only while there is room.
        num_ahead: Number of ranges to fetch before they are needed.
        repeats: Whether steps of one call of `ahead` need the same ranges again, as in replay.
    """

    reads_disks = False

    def __init__(
        self,
        samples: SampleTable,
        ranges: Ranges,
        cache: Cache | None,
        num_ahead: int,
        repeats: bool = False,
    ):
        self.samples = samples
        self.ranges = ranges
        self.cache = cache
        self.num_ahead = num_ahead
        self.repeats = repeats
        self._threads = ThreadPoolExecutor(FETCH_THREADS)
        # Ranges to fetch next. The threads get a few at a time, because a thread pool would fetch
        # all submitted ranges even at the end of the process.
        self._planned: deque[int] = deque()
        self._latest_call: object = None  # call of `ahead` that made the plans
        self._num_running = 0
        # Running and finished fetches by range, the latest last. The result is the bytes, or None
        # if they are in a file of the cache.
        self._futures: OrderedDict[int, Future[bytes | None]] = OrderedDict()
        self._bytes_in_memory = 0
        # Number of unread rows of each range: rows that `ahead` has seen, but `read` has not.
        self._num_unread: Counter[int] = Counter()
        # Fetched ranges without unread rows, least recently read first. They can be dropped.
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._lock = Lock()
        self._mending = Lock()  # held while a thread repairs a record of the cache
        self._unavailable = ""  # error of a storage that did not answer; then fetches fail at once
        self._num_failures = 0  # number of such errors that `ahead` has cleared
        self._is_closed = False

    def ahead(self, steps: Iterator[Ints]) -> Generator[Ints]:
        """See `Reader.ahead`."""
        call = object()
        waiting: deque[tuple[Ints, int]] = deque()
        num_unread = 0  # number of ranges that the waiting steps are the first to need
        # An array, because a set of 13 million numbers needs 1.4 GB.
        is_planned = np.zeros(len(self.ranges.starts), bool)
        with self._lock:
            self._forget_failure()
            self._latest_call = call
            self._forget_plans()
        try:
            for rows in steps:
                ranges_of_rows = self.ranges.find(np.unique(rows))
                needed = np.unique(ranges_of_rows)
                if not self.repeats:
                    needed = needed[~is_planned[needed]]
                    is_planned[needed] = True
                self._plan(needed.tolist(), ranges_of_rows.tolist())
                waiting.append((rows, len(needed)))
                num_unread += len(needed)
                while num_unread > self.num_ahead:
                    first_rows, num_new = waiting.popleft()
                    num_unread -= num_new
                    yield first_rows
            for rows, _ in waiting:
                yield rows
        except GeneratorExit:
            with self._lock:
                if self._latest_call is call:
                    self._forget_plans()
            raise

    def _forget_failure(self) -> None:
        """Clear the error of a storage, so that it is tried again.

        Running fetches are forgotten, because they can fail, too.
        """
        if not self._unavailable:
            return
        self._unavailable = ""
        self._num_failures += 1
        unfinished = [number for number, future in self._futures.items() if not future.done()]
        for number in unfinished:
            self._forget(number)

    def _forget_plans(self) -> None:
        self._planned.clear()
        self._num_unread.clear()
        self._idle = OrderedDict.fromkeys(self._futures)

    def close(self) -> None:
        """See `Reader.close`."""
        with self._lock:
            self._is_closed = True
            self._planned.clear()
            self._futures.clear()
            self._idle.clear()
        self._threads.shutdown(wait=False)

    def read(self, row: int) -> bytes:
        """See `Reader.read`."""
        number = self._number(row)
        try:
            data = self._record(row, number)
            if self.samples.is_intact(row, data):
                return data
            if self.cache is None:
                return self.samples.read_bytes(row)
            return self._repair_record(row, number, self.cache)
        finally:
            self._note_read(number)

    def _record(self, row: int, number: int) -> bytes:
        """Return the fetched bytes of a row in a range, without verification."""
        locations = self.samples.locations
        offset = int(locations.offsets[row] - self.ranges.starts[number])
        size = int(locations.sizes[row])
        fetched = self._future(number).result()
        if fetched is not None:
            return fetched[offset : offset + size]
        assert self.cache is not None
        data = self.cache.read(self._name(number), offset, size)
        if data is not None:
            return data
        self._raise_failure()
        with self._open_cached(number, self.cache) as file:  # fetches the whole range again
            try:
                return file.read_at(size, offset)
            except OSError as error:
                problem = f"cannot read back the written data ({error.strerror})"
                raise self.cache.make_disk_error(problem) from None

    def _future(self, number: int) -> Future[bytes | None]:
        """Return the running or finished fetch of a range."""
        with self._lock:
            future = self._futures.get(number)
            if future is not None:
                return future
            self._raise_failure()
            return self._start(number)

    def _raise_failure(self) -> None:
        if self._is_closed:
            raise RuntimeError("this reader is closed")
        if self._unavailable:
            raise StorageUnavailable(self._unavailable)

    def _note_read(self, number: int) -> None:
        """Count a row of a range as read. A range without unread rows can be dropped."""
        with self._lock:
            self._num_unread[number] -= 1
            if self._num_unread[number] <= 0:
                del self._num_unread[number]
                if number in self._futures:
                    self._idle[number] = None
                    self._idle.move_to_end(number)
                self._start_planned()

    def _plan(self, numbers: list[int], ranges_of_rows: list[int]) -> None:
        """Plan to fetch ranges.

        Args:
            numbers: The ranges to fetch.
            ranges_of_rows: Range of each distinct row of a step.
        """
        with self._lock:
            for number in ranges_of_rows:
                self._num_unread[number] += 1
                self._idle.pop(number, None)
            self._planned += numbers
            self._start_planned()

    def _start_planned(self) -> None:
        while self._planned and self._num_running < FETCH_THREADS:
            number = self._planned[0]
            if number in self._futures or not self._num_unread[number]:
                self._planned.popleft()  # it was fetched, or read, before its turn
            elif self._has_room(number):
                self._planned.popleft()
                self._start(number)
            else:
                return

    def _start(self, number: int) -> Future[bytes | None]:
        """Start to fetch a range, even if it exceeds the limit, because it can be needed now."""
        self._has_room(number)  # called to drop ranges without unread rows
        future = self._threads.submit(self._run, number, self._num_failures)
        self._futures[number] = future
        self._bytes_in_memory += self._size(number)
        if not self._num_unread[number]:
            self._idle[number] = None
        self._num_running += 1
        return future

    def _has_room(self, number: int) -> bool:
        """Return whether a range fits, after dropping ranges without unread rows."""
        while self._is_full(self._size(number)):
            if not self._idle:
                return False
            self._forget(next(iter(self._idle)))
        return True

    def _forget(self, number: int) -> None:
        self._idle.pop(number, None)
        if self._futures.pop(number, None) is not None:
            self._bytes_in_memory -= self._size(number)

    def _is_full(self, size: int) -> bool:
        """Return whether another range of `size` bytes would exceed the limit.

        With a cache the limit is a number of ranges, without a cache MEMORY_BYTES.
        """
        if self.cache is not None:
            return len(self._futures) >= 2 * self.num_ahead + FETCH_THREADS
        return bool(self._futures) and self._bytes_in_memory + size > MEMORY_BYTES

    def _run(self, number: int, num_failures: int) -> bytes | None:
        """Fetch a range in a thread, and start the next planned one.

        This is not done in a callback of the future, because that would be a reference cycle: the
        threads of a deleted reader would remain until the garbage collector runs.

        Args:
            number: The range.
            num_failures: `_num_failures` at the start of the fetch. If it has changed, the fetch
                was forgotten, and its error is ignored.
        """
        try:
            self._raise_failure()
            return self._fetch_or_find(number)
        except BaseException as error:
            with self._lock:
                if num_failures == self._num_failures:
                    self._forget(number)
                    if isinstance(error, StorageUnavailable):
                        self._unavailable = str(error)
                        self._planned.clear()
            raise
        finally:
            with self._lock:
                self._num_running -= 1
                try:
                    self._start_planned()
                except RuntimeError:  # the process ends
                    self._planned.clear()

    def _fetch_or_find(self, number: int) -> bytes | None:
        if self.cache is None:
            return self._fetch(number)
        self._open_cached(number, self.cache).close()
        return None

    def _open_cached(self, number: int, cache: Cache) -> LocalFile:
        """Open the cached file of a range, and fetch it if it is missing."""

        def write(stream: BinaryIO) -> None:
            stream.write(self._fetch(number))

        return cache.open_file(self._name(number), self._size(number), write)

    def _fetch(self, number: int) -> bytes:
        """Read a range from storage.

        Raises:
            DamagedArtifact: If the shard ends before the range.
        """
        shards, shard = self.samples.locations.files[self.ranges.shards[number]]
        size = self._size(number)
        data: bytes = shards.read(shard, int(self.ranges.starts[number]), size)
        if len(data) < size:
            raise shards.make_truncated_error(shard)
        return data

    def _repair_record(self, row: int, number: int, cache: Cache) -> bytes:
        """Return the bytes of a row with a damaged cached copy, after fetching its range again.

        One thread fetches the range. Other threads wait for it, and find the new copy.

        Raises:
            DamagedArtifact: If the row is damaged in storage.
            UserError: If the disk does not return the written bytes.
        """
        with self._mending:
            data = self._record(row, number)
            if self.samples.is_intact(row, data):
                return data
            cache.forget(self._name(number))
            data = self.samples.read_bytes(row)
            filesystem.notify(
                f"cache: image {self.samples.table['key'][row].as_py()!r} in {cache.folder} "
                "differs from the written data; its part of the shard is downloaded again"
            )
            self._fetch_or_find(number)
            if not self.samples.is_intact(row, self._record(row, number)):
                raise cache.make_disk_error()
            return data

    def _number(self, row: int) -> int:
        return int(self.ranges.find(np.array(row)))

    def _size(self, number: int) -> int:
        return int(self.ranges.sizes[number])

    def _name(self, number: int) -> str:
        """Return the name of a range's file in the cache."""
        shards, shard = self.samples.locations.files[self.ranges.shards[number]]
        start = int(self.ranges.starts[number])
        return f"shards/{shards.digest(shard)}-{start}-{start + self._size(number)}"


def make_sequential_reader(samples: SampleTable, cache: Cache | None) -> Reader:
    """Create a reader for rows that are read once, in table order."""
    if not is_remote(samples):
        return DiskReader(samples)
    ranges = choose_pieces(samples, Ranges.of_runs(samples))
    num_in_use = 2 * PIECES_AHEAD + FETCH_THREADS
    bytes_in_use = min(ranges.estimate_bytes(num_in_use), ranges.total_bytes)
    if cache is not None and bytes_in_use > cache.limit - samples.cached_bytes:
        cache = None  # a piece would be evicted for another one before it is read
    return BucketReader(samples, ranges, cache, PIECES_AHEAD)


def make_random_reader(samples: SampleTable) -> Reader:
    """Create a reader for rows in any order."""
    if not is_remote(samples):
        return DiskReader(samples)
    return _make_record_reader(samples, repeats=True)


def _make_record_reader(samples: SampleTable, repeats: bool = False) -> Reader:
    """Create a reader of a bucket that fetches records one by one."""
    records = Ranges.of_records(samples)
    mean_bytes = max(1, records.total_bytes // len(samples))
    num_ahead = max(1, RECORDS_AHEAD_BYTES // mean_bytes)
    return BucketReader(samples, records, None, num_ahead, repeats)


def make_shuffled_reader(
    samples: SampleTable, deal: Deal, world: int, cache: Cache | None
) -> Reader:
    """Create a reader for the epochs of a deal, on one of `world` ranks.

    Runs are fetched if there is room for the current and the next block of each stream that this
    rank reads: in the cache, which the ranks of a node share, or without a cache in MEMORY_BYTES.
    Otherwise records are fetched one by one.

    Args:
        samples: The rows.
        deal: Distribution of rows to shuffle streams.
        world: Number of ranks.
        cache: The cache, if any.
    """
    if not is_remote(samples):
        return DiskReader(samples)
    ranges = Ranges.of_runs(samples, deal.rows_per_run)
    num_runs = -(-len(samples) // deal.rows_per_run)
    runs_ahead = -(-deal.num_streams // world) * deal.block_runs
    num_ahead = -(-runs_ahead * len(ranges.starts) // num_runs)
    num_in_use = 2 * num_ahead
    limit = MEMORY_BYTES
    if cache is not None:
        num_in_use *= ranks_of_node(world)
        limit = cache.limit - samples.cached_bytes
    window_bytes = ranges.estimate_bytes(num_in_use)
    if min(window_bytes, ranges.total_bytes) > limit:
        return _make_record_reader(samples)
    if world == 1:  # the only rank reads all rows, and pieces need fewer requests
        pieces = choose_pieces(samples, ranges)
        if pieces.total_bytes <= limit:
            ranges = pieces
    return BucketReader(samples, ranges, cache, num_ahead)


def ranks_of_node(world: int) -> int:
    """Return the number of ranks on this node, which share its cache.

    If the launcher does not set LOCAL_WORLD_SIZE, all ranks are assumed to be on this node.
    """
    local_world = os.environ.get("LOCAL_WORLD_SIZE", "")
    if not local_world.isdigit():
        return world
    return max(1, min(world, int(local_world)))


def choose_pieces(samples: SampleTable, runs: Ranges) -> Ranges:
    """Return the pieces of the shards, or `runs` if the runs have far fewer bytes.

    Also return `runs` if the table is mapped from the cache: finding the pieces would read the
    whole index, and needs memory for each of its rows.
    """
    if samples.cached_bytes:
        return runs
    pieces = Ranges.of_pieces(samples)
    if pieces.total_bytes > SPARSE * max(runs.total_bytes, PIECE_BYTES):
        return runs
    return pieces


def is_remote(samples: SampleTable) -> bool:
    """Return whether any shard is on an object store, or on another machine."""
    return any(shards.is_remote for shards in samples.shards)
