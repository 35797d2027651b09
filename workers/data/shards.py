"""Shards: the tar files and the index that ingest wrote.

Records are read by their offsets, from disks and from buckets.
"""

from __future__ import annotations

import errno
import io
import resource
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from threading import RLock
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyarrow import fs

from workers.data.cache import LocalFile
from workers.data.decoding import MAX_PIXELS
from workers.errors import DamagedArtifact, UserError
from workers.storage.artifact import Artifact, is_local, resolve
from workers.storage.filesystem import access_remedy, retry, without_retries
from workers.storage.regular_file import regular_descriptor

INDEX = "index.parquet"
OPEN_SHARE = 4  # at most this part of the files that a process may open are shards
SCHEMA = pa.schema(
    [
        (name, pa.int64() if name in ("offset", "bytes") else pa.string())
        for name in ("split", "key", "class", "shard", "offset", "bytes", "sha256", "ext")
    ]
)


class OpenFiles:
    """The shards on disks that this process has open; those used longest ago are closed.

    A file that a thread still reads is closed when the thread has read.
    """

    def __init__(self) -> None:
        self._files: OrderedDict[tuple[int, str], LocalFile] = OrderedDict()
        # Reentrant: the garbage collector may call `close_all` in a thread that holds it.
        self._lock = RLock()

    def get(self, owner: int, shard: str) -> LocalFile | None:
        """Return an open shard, or None. owner: id of the `Shards`."""
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
            while len(self._files) > max(1, allowed // OPEN_SHARE) and allowed > 0:
                self._files.popitem(last=False)
        return file

    def close(self, owner: int, shard: str) -> None:
        """Close one shard of an owner."""
        with self._lock:
            self._files.pop((owner, shard), None)

    def close_all(self, owner: int) -> None:
        """Close the shards of an owner that is gone."""
        with self._lock:
            for key in list(self._files):
                if key[0] == owner:
                    del self._files[key]


_open_files = OpenFiles()


class Shards:
    """The images of one ingest stage.

    index: one row per image, in the order in which the shards hold them: split, key, class, shard
    (file name), offset and bytes of the image inside the shard, sha256, ext.
    """

    def __init__(self, artifact: Artifact, index: pa.Table):
        self.artifact = artifact
        self.index = index
        self.is_remote = not is_local(artifact.root)
        self.max_pixels = int(artifact.manifest.get("max_pixels", MAX_PIXELS))
        # Objects have no file descriptor, and opening one is a request: all of them are kept.
        self._objects: dict[str, ObjectFile] = {}
        # A shuffled epoch opens a shard many times, which costs less than finding its path.
        self._locations: dict[str, tuple[fs.FileSystem, str]] = {}
        weakref.finalize(self, _open_files.close_all, id(self))

    @classmethod
    def open(cls, root: str, key: str) -> Shards:
        """Open the result of the ingest stage `key`.

        Raise `DamagedArtifact` when the result is missing or its index is damaged.
        """
        artifact = Artifact.need(root, key)
        return cls(artifact, read_index(artifact))

    @property
    def key(self) -> str:
        """Key of the ingest stage."""
        return self.artifact.key

    def select(self, split: str, classes: Sequence[str]) -> pa.Table:
        """The rows of a split and of `classes`, in index order, with the column `position`: the row
        in the index."""
        table = self.index.append_column("position", pa.array(np.arange(self.index.num_rows)))
        in_split = pc.equal(table["split"], split)
        in_classes = pc.is_in(table["class"], pa.array(classes, pa.string()))
        return table.filter(pc.and_(in_split, in_classes))

    def uri(self, shard: str) -> str:
        """URI of a file of the stage; of its folder for an empty name."""
        return self.artifact.uri(shard)

    def read(self, shard: str, offset: int, size: int) -> bytes:
        """Read `size` bytes at `offset` of a shard where it is stored; thread-safe.

        Return fewer when the shard is truncated, which digests find. Raise `DamagedArtifact` when
        there is no such file any more, `UserError` when it cannot be read.
        """
        try:
            return self._file(shard).read_at(size, offset)
        except OSError:
            self._close(shard)
        # Opening tells a shard that is gone from one that cannot be read, and heals a file that the
        # server of a network disk has forgotten.
        try:
            return self._file(shard).read_at(size, offset)
        except OSError as error:
            raise self._reading_error(shard, error) from None

    def damaged_record(self, record: str) -> DamagedArtifact:
        """The error for a record whose bytes are not those that ingest wrote."""
        return DamagedArtifact(
            self.key,
            f"image {record!r} in {self.uri('')}: its bytes are not those that ingest wrote "
            "(sha256 differs from the index); run the same command again to ingest anew",
        )

    def _file(self, shard: str) -> ObjectFile | LocalFile:
        """A shard that is open, or opened now. Raise `OSError` when it cannot be."""
        file = self._objects.get(shard) or _open_files.get(id(self), shard)
        if file is not None:
            return file
        if shard not in self._locations:
            self._locations[shard] = resolve(self.uri(shard))
        system, path = self._locations[shard]
        if self.is_remote:
            return self._objects.setdefault(shard, ObjectFile(system, path))
        return _open_files.add(id(self), shard, LocalFile(regular_descriptor(path)))

    def _close(self, shard: str) -> None:
        """Open a shard anew when it is next read."""
        self._objects.pop(shard, None)
        _open_files.close(id(self), shard)

    def _reading_error(self, shard: str, error: OSError) -> UserError:
        """The error for a shard that cannot be opened or read."""
        uri = self.uri(shard)
        again = "run the same command again"
        if isinstance(error, FileNotFoundError):
            return DamagedArtifact(self.key, f"{uri} is missing; {again} to ingest anew")
        if error.errno in (errno.EISDIR, errno.EINVAL):
            return DamagedArtifact(self.key, f"{uri} is no regular file; {again} to ingest anew")
        reason = " ".join(str(error.strerror or error).split())[:300]
        remedy = f"mend its permissions or its disk, and {again}"
        if self.is_remote:
            remedy = access_remedy(uri)
        return UserError(f"{uri} cannot be read ({reason}); {remedy}")


class ObjectFile:
    """An object of a storage that threads read by offset at the same time.

    pyarrow's own wrapper of a filesystem in Python would let them read one after the other.
    """

    def __init__(self, system: fs.FileSystem, path: str):
        self.where = system.handler.where
        self.path = path
        bare = without_retries(system)
        self.file = retry(lambda: bare.open_input_file(path), self.where, f"opening {path}")
        self.size = self.file.size()

    def read_at(self, size: int, offset: int) -> bytes:
        """`size` bytes at `offset`, fewer at the end; thread-safe."""
        count = min(size, self.size - offset)
        if count <= 0:
            return b""
        data: bytes = retry(
            lambda: self.file.read_at(count, offset), self.where, f"reading {self.path}"
        )
        return data


def read_index(artifact: Artifact) -> pa.Table:
    """Read the index of an ingest stage.

    Raise `DamagedArtifact` when it is not an index, or points to bytes that its shards do not have.
    """
    try:
        table = pq.read_table(io.BytesIO(artifact.read(INDEX)))
        _check_index(table, artifact.manifest["files"])
    except (pa.ArrowException, OSError) as error:
        raise DamagedArtifact(
            artifact.key,
            f"{artifact.uri(INDEX)} is not readable as an index ({str(error).splitlines()[0]}); "
            "run the same command again to ingest anew",
        ) from None
    return table


def _check_index(table: pa.Table, files: dict[str, Any]) -> None:
    """Raise `pa.ArrowInvalid` when a table is no index of the shards in a manifest's `files`."""
    if table.schema != SCHEMA:
        columns = ", ".join(f"{column.name}: {column.type}" for column in table.schema)
        raise pa.ArrowInvalid(f"its columns are {columns[:200]}")
    shards = table["shard"].combine_chunks().dictionary_encode()
    names = shards.dictionary.to_pylist()
    if any(column.null_count for column in table.columns) or not set(names) <= files.keys():
        raise pa.ArrowInvalid("it leaves out values, or names shards that are not there")
    sizes = pa.array([files[name]["bytes"] for name in names], pa.int64())
    end = pc.add_checked(table["offset"], table["bytes"])  # of the image in its shard
    remainder = pc.subtract(sizes.take(shards.indices), end)
    for column in (table["offset"], table["bytes"], remainder):
        least = pc.min(column).as_py()
        if least is not None and least < 0:
            raise pa.ArrowInvalid("it points outside its shards")
