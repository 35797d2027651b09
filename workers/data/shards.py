"""Shards: tar files with an index that ingest wrote.

Records are read by their offsets, from disks and from buckets. The shards are in the store, or are
used in place (`workers/data/in_place.py`).
"""

from __future__ import annotations

import errno
import math
import resource
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from threading import RLock

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyarrow import fs

from workers.data import in_place
from workers.data.cache import LocalFile
from workers.data.decoding import MAX_PIXELS, ImageLimits
from workers.data.held_out import HoldOut
from workers.data.range_files import ObjectFile, RangeFile, open_range_file
from workers.errors import DamagedArtifact, SourceChanged, UserError
from workers.job import ShardUrls
from workers.storage.artifact import Artifact, FileInfo, is_local, resolve, withdraw
from workers.storage.filesystem import access_remedy
from workers.storage.regular_file import regular_descriptor

INDEX = "index.parquet"
GROUP_ROWS = 1 << 16  # rows of the index that ingest writes, and a rank reads, at a time
OPEN_SHARE = 4  # shards use at most 1 / OPEN_SHARE of the file descriptors of a process
SCHEMA = pa.schema(
    [
        (name, pa.int64() if name in ("offset", "bytes") else pa.string())
        for name in ("split", "key", "class", "shard", "offset", "bytes", "sha256", "ext")
    ]
)


class OpenFiles:
    """The open shards of this process that are on disks.

    Above a limit, the least recently used files are closed.

    A file that a thread is reading is closed after the read.
    """

    def __init__(self) -> None:
        self._files: OrderedDict[tuple[int, str], LocalFile] = OrderedDict()
        # Reentrant: the garbage collector may call `close_all` in a thread that holds it.
        self._lock = RLock()

    def get(self, owner: int, shard: str) -> LocalFile | None:
        """Return a shard if it is open, else None.

        Args:
            owner: `id` of the `Shards` object.
            shard: Name of the shard.
        """
        with self._lock:
            file = self._files.get((owner, shard))
            if file is not None:
                self._files.move_to_end((owner, shard))
            return file

    def add(self, owner: int, shard: str, file: LocalFile) -> LocalFile:
        """Keep a shard open, and return it."""
        allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        with self._lock:
            self._files[owner, shard] = file
            # `allowed` is -1 (RLIM_INFINITY) if the system has no limit
            while len(self._files) > max(1, allowed // OPEN_SHARE) and allowed > 0:
                self._files.popitem(last=False)
        return file

    def close(self, owner: int, shard: str) -> None:
        """Close one shard of an owner."""
        with self._lock:
            self._files.pop((owner, shard), None)

    def close_all(self, owner: int) -> None:
        """Close the shards of a deleted owner."""
        with self._lock:
            for key in list(self._files):
                if key[0] == owner:
                    del self._files[key]


_open_files = OpenFiles()


class Shards:
    """The images of one ingest stage.

    Attributes:
        files: Size and digest of each shard, by name.
        urls: Location of each shard that is used in place, by name. The locations come from the
            user's own card.
        is_in_place: Whether the shards are used in place.
        is_remote: Whether a shard is in an object store or on a server, not on a disk.
        limits: Limits for all images.
        hold_out: How validation images are held out of the train images.
    """

    def __init__(
        self,
        artifact: Artifact,
        files: Mapping[str, FileInfo] | None = None,
        urls: Mapping[str, str] | None = None,
    ):
        self.artifact = artifact
        self.files = artifact.manifest["files"] if files is None else files
        self.urls = urls
        self.is_in_place = in_place.is_in_place(artifact)
        self.is_remote = not is_local(artifact.root)
        if self.is_in_place:
            self.is_remote = not all(map(is_local, (urls or {}).values()))
        self.limits = get_limits(artifact)
        self.hold_out = read_hold_out(artifact)
        self._index: IndexFile | None = None
        # Open objects are all kept: they need no file descriptor, and opening one is a request.
        self._objects: dict[str, RangeFile] = {}
        # Paths are kept, because a shuffled epoch opens a shard many times, and resolving its path
        # takes longer than opening it.
        self._locations: dict[str, tuple[fs.FileSystem, str]] = {}
        weakref.finalize(self, _open_files.close_all, id(self))

    @classmethod
    def open(cls, root: str, key: str, urls: ShardUrls | None = None) -> Shards:
        """Open the result of the ingest stage `key`.

        Args:
            root: Folder or URI of the stages.
            key: Key of the stage.
            urls: Locations of the shards, needed to read shards that are used in place.

        Raises:
            DamagedArtifact: If the result is missing.
        """
        artifact = Artifact.need(root, key)
        files = artifact.manifest["files"]
        shard_urls: dict[str, str] | None = None
        if in_place.is_in_place(artifact):
            files = in_place.read_shard_list(artifact)
            if urls is not None:
                shard_urls = in_place.urls_by_name(urls)
        return cls(artifact, files, shard_urls)

    @property
    def key(self) -> str:
        """Key of the ingest stage."""
        return self.artifact.key

    def select(self, split: str, classes: Sequence[str]) -> pa.Table:
        """Return the rows of a split and of `classes` in the index, see `read_index`.

        The file of the index stays in memory until `release_index`.
        """
        if self._index is None:
            self._index = IndexFile(self.artifact, self.files)
        return self._index.read(split, classes)

    def read_index(self) -> pa.Table:
        """Return the whole index, see `read_index`."""
        return read_index(self.artifact, self.files)

    def release_index(self) -> None:
        """Free the memory of the index file. The next call of `select` reads it again."""
        self._index = None

    def uri(self, shard: str) -> str:
        """Return the URI of a file of the stage, or of the folder for an empty name.

        Raises:
            SourceChanged: If the shard is used in place and no card gives its location.
        """
        if not self.is_in_place or not shard:
            return self.artifact.uri(shard)
        url = (self.urls or {}).get(shard)
        if url is None:
            raise SourceChanged(
                f"shard {shard!r:.100} of data set {self.artifact.manifest.get('card')!r:.100} is "
                "used in place, and no card says where it lies; run a config whose stream has the "
                "card that names it"
            )
        return url

    def digest(self, shard: str) -> str:
        """Return the sha256 of a shard, 64 hexadecimal digits."""
        return self.files[shard]["sha256"]

    def read(self, shard: str, offset: int, size: int) -> bytes:
        """Read bytes of a shard. Thread-safe.

        The result is shorter if the shard is truncated; callers detect this by size or digest.

        Args:
            shard: Name of the shard.
            offset: First byte.
            size: Number of bytes.

        Raises:
            DamagedArtifact: If the file no longer exists, or is not a regular file.
            UserError: If it cannot be read.
            SourceChanged: In both cases, for a shard that is used in place.
        """
        try:
            return self._file(shard).read_at(size, offset)
        except OSError:
            self._close(shard)
        # Opening the file distinguishes a missing shard from an unreadable one, and repairs a stale
        # handle of a network disk.
        try:
            return self._file(shard).read_at(size, offset)
        except OSError as error:
            raise self._make_reading_error(shard, error) from None

    def local_path(self, shard: str) -> str:
        """Return the path of a shard on a disk, or an empty string for another location."""
        uri = self.uri(shard)
        return resolve(uri)[1] if is_local(uri) else ""

    def make_damaged_error(self, record: str, shard: str) -> UserError:
        """Return the error for a record with other bytes than at ingest.

        If the shard is used in place, also withdraw the stage's result, so that the stage runs
        again.

        Args:
            record: Key of the image.
            shard: Name of the shard.
        """
        if self.is_in_place:
            # Without this the stage might not run again, because the size and the modification time
            # of the shard can be unchanged.
            with suppress(OSError, UserError):
                withdraw(self.artifact.root, self.key)
            return self._changed(shard, f"image {record!r} has other bytes")
        return DamagedArtifact(
            self.key,
            f"image {record!r} in {self.uri('')}: its bytes are not those that ingest wrote "
            "(sha256 differs from the index); run the same command again to repeat the ingest",
        )

    def make_truncated_error(self, shard: str) -> UserError:
        """Return the error for a shard that ends before bytes that its index names."""
        if self.is_in_place:
            return self._changed(shard, "it is cut short")
        return DamagedArtifact(
            self.key,
            f"{self.uri(shard)} is cut short; run the same command again to repeat the ingest",
        )

    def _changed(self, shard: str, difference: str) -> SourceChanged:
        return SourceChanged(
            f"{self.uri(shard)} changed after it was indexed ({difference}); put the shard back as "
            "it was, or run the same command again to index the new one, whose results are separate"
        )

    def _file(self, shard: str) -> RangeFile:
        """Return an open shard; raise `OSError` if it cannot be opened."""
        file = self._objects.get(shard) or _open_files.get(id(self), shard)
        if file is not None:
            return file
        if self.is_in_place:
            opened = open_range_file(self.uri(shard))
            expected = self.files[shard]["bytes"]
            if opened.size != expected:
                raise self._changed(shard, f"{opened.size} bytes, {expected} were indexed")
        else:
            opened = self._open_stored(shard)
        if isinstance(opened, LocalFile):
            return _open_files.add(id(self), shard, opened)
        return self._objects.setdefault(shard, opened)

    def _open_stored(self, shard: str) -> RangeFile:
        if shard not in self._locations:
            self._locations[shard] = resolve(self.uri(shard))
        system, path = self._locations[shard]
        if self.is_remote:
            return ObjectFile(system, path)
        return LocalFile(regular_descriptor(path))

    def _close(self, shard: str) -> None:
        """Close a shard, so that the next read opens it again."""
        self._objects.pop(shard, None)
        _open_files.close(id(self), shard)

    def _make_reading_error(self, shard: str, error: OSError) -> UserError:
        """Return the error for a shard that cannot be opened or read."""
        uri = self.uri(shard)
        again = "run the same command again"
        reason = " ".join(str(error.strerror or error).split())[:300]
        remedy = f"fix its permissions or its disk, and {again}"
        if not is_local(uri):
            remedy = access_remedy(uri)
        if self.is_in_place:
            if isinstance(error, FileNotFoundError):
                reason = "it is missing"
                remedy = f"put it back, or fix source.path of the card, and {again}"
            return SourceChanged(
                f"{uri}, which is used in place, cannot be read ({reason}); {remedy}"
            )
        if isinstance(error, FileNotFoundError):
            return DamagedArtifact(self.key, f"{uri} is missing; {again} to repeat the ingest")
        if error.errno in (errno.EISDIR, errno.EINVAL):
            return DamagedArtifact(
                self.key, f"{uri} is not a regular file; {again} to repeat the ingest"
            )
        return UserError(f"{uri} cannot be read ({reason}); {remedy}")


def read_hold_out(artifact: Artifact) -> HoldOut:
    """Return how validation images are held out of the train images of an ingest stage."""
    return "threshold" if artifact.manifest.get("hold_out") == "threshold" else "rank"


def get_limits(artifact: Artifact) -> ImageLimits:
    """Return the limits for all images of an ingest stage.

    Raises:
        DamagedArtifact: If the stage's manifest has an invalid range of values.
    """
    manifest = artifact.manifest
    limits = ImageLimits(int(manifest.get("max_pixels", MAX_PIXELS)))
    if "range" not in manifest:
        return limits
    try:
        low, high = map(float, manifest["range"])
    except (TypeError, ValueError):
        low, high = 0.0, 0.0
    if not (low < high and math.isfinite(high - low)):
        raise DamagedArtifact(
            artifact.key,
            f"the manifest of {artifact.uri(INDEX)} has no range of values in `range`; "
            "run the same command again to repeat the ingest",
        )
    return limits._replace(value_range=(low, high))


def read_index(artifact: Artifact, files: Mapping[str, FileInfo]) -> pa.Table:
    """Read the index of an ingest stage.

    Args:
        artifact: Result of the stage.
        files: Its shards, by name.

    Returns:
        One row per image, in the order of the shards: split, key, class, shard (name), offset and
        bytes of the image in the shard, sha256, ext.

    Raises:
        DamagedArtifact: If the file is not an index, or refers to bytes outside of the shards.
    """
    return IndexFile(artifact, files).read()


class IndexFile:
    """The index of an ingest stage, in memory as compressed bytes.

    Args:
        artifact: Result of the stage.
        files: Its shards, by name.

    Raises:
        DamagedArtifact: If the file is not an index.
    """

    def __init__(self, artifact: Artifact, files: Mapping[str, FileInfo]):
        self.artifact = artifact
        self.files = files
        with self._explain_damage():
            self.file = pq.ParquetFile(pa.BufferReader(artifact.read(INDEX)))
            schema = self.file.schema_arrow
            if schema != SCHEMA:
                columns = ", ".join(f"{column.name}: {column.type}" for column in schema)
                raise pa.ArrowInvalid(f"its columns are {columns[:200]}")

    def read(self, split: str | None = None, classes: Sequence[str] = ()) -> pa.Table:
        """Return the rows, or only those of a split and of `classes`, in the order of the index.

        One group of rows after the other is read, so that other rows need no memory. pyarrow's own
        threads are not used, see `read_table`.

        Raises:
            DamagedArtifact: If a row refers to bytes outside of the shards.
        """
        parts = [SCHEMA.empty_table()]
        with self._explain_damage():
            for number in range(self.file.num_row_groups):
                if split is None:
                    rows = self.file.read_row_group(number, use_threads=False)
                else:
                    rows = self._read_selected(number, split, classes)
                _check_rows(rows, self.files)
                parts.append(rows)
        return pa.concat_tables(parts).combine_chunks()

    def _read_selected(self, number: int, split: str, classes: Sequence[str]) -> pa.Table:
        names = ["split", "class"]
        table = self.file.read_row_group(number, names, use_threads=False)
        in_classes = pc.is_in(table["class"], pa.array(classes, pa.string()))
        if any(column.null_count for column in table.columns):
            raise pa.ArrowInvalid("it leaves out values")
        is_selected = pc.and_(pc.equal(table["split"], split), in_classes)
        if not pc.any(is_selected).as_py():
            return SCHEMA.empty_table()
        return self.file.read_row_group(number, use_threads=False).filter(is_selected)

    @contextmanager
    def _explain_damage(self) -> Iterator[None]:
        try:
            yield
        except (pa.ArrowException, OSError) as error:
            raise DamagedArtifact(
                self.artifact.key,
                f"{self.artifact.uri(INDEX)} is not readable as an index "
                f"({str(error).splitlines()[0]}); run the same command again to repeat the ingest",
            ) from None


def _check_rows(rows: pa.Table, files: Mapping[str, FileInfo]) -> None:
    """Raise `pa.ArrowInvalid` if rows of an index do not fit the shards in `files`."""
    shards = rows["shard"].combine_chunks().dictionary_encode()
    names = shards.dictionary.to_pylist()
    if any(column.null_count for column in rows.columns) or not set(names) <= files.keys():
        raise pa.ArrowInvalid("it leaves out values, or names shards that are not there")
    sizes = pa.array([files[name]["bytes"] for name in names], pa.int64())
    end = pc.add_checked(rows["offset"], rows["bytes"])  # end of the image in its shard
    remainder = pc.subtract(sizes.take(shards.indices), end)
    for column in (rows["offset"], rows["bytes"], remainder):
        least = pc.min(column).as_py()
        if least is not None and least < 0:
            raise pa.ArrowInvalid("it points outside its shards")
