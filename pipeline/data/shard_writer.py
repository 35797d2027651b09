"""Divide the selected images into shards, and write the shards from packs."""

from __future__ import annotations

import hashlib
import io
import itertools
import tarfile
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipeline.data.packs import DamagedPack, PackedImages
from workers.data.shards import SCHEMA
from workers.storage.artifact import Attempt, FileInfo, join, read_bytes, write_bytes
from workers.storage.parquet import read_table

MIN_GROUP_BYTES = 32 << 20
MAX_GROUP_BYTES = 512 << 20  # bytes of images that one call of `write_shards` holds in memory
GROUPS = 32  # approximate number of groups for a data set of medium size
CLASS_DIGITS = 16  # digits of the sha256 of a class's name in the names of the shards
MARK_SUFFIX = ".written"  # suffix of the file that marks a finished shard


class Shard(NamedTuple):
    """One shard; `rows` are its images in order, as returned by `selection.select_rows`."""

    name: str
    rows: pa.Table


class ShardJob(NamedTuple):
    """Shards that one call of `write_shards` writes.

    Attributes:
        root: Folder or URI of the stages.
        key: Key of the ingest stage.
        attempt: Name of the attempt to write to.
        packs: Folder of packs.
        shards: The shards.
    """

    root: str
    key: str
    attempt: str
    packs: str
    shards: list[Shard]


class WrittenShard(NamedTuple):
    """A written shard: its name, its size and digest, and its rows of the index."""

    name: str
    info: FileInfo
    index: pa.Table


def divide_into_shards(rows: pa.Table, shard_images: int) -> Iterator[Shard]:
    """Yield the shards of the selected rows, which are sorted by split and class.

    A shard contains images of one class and one split. Its name does not depend on other classes.
    Therefore a new class only adds shards, and a removed class only removes its own shards.
    """
    is_first = np.zeros(len(rows) + 1, bool)
    is_first[[0, -1]] = True
    for name in ("split", "label"):
        codes = rows[name].combine_chunks().dictionary_encode().indices.to_numpy()
        is_first[1:-1] |= codes[1:] != codes[:-1]
    for start, stop in itertools.pairwise(np.flatnonzero(is_first).tolist()):
        split, label = rows["split"][start].as_py(), rows["label"][start].as_py()
        digest = hashlib.sha256(label.encode()).hexdigest()[:CLASS_DIGITS]
        for number, first in enumerate(range(start, stop, shard_images)):
            part = rows.slice(first, min(shard_images, stop - first))
            yield Shard(f"{split}-{digest}-{number:05d}.tar", part)


def group_shards(shards: list[Shard]) -> Iterator[list[Shard]]:
    """Yield groups of consecutive shards.

    One call of `write_shards` writes a group and holds its images in memory. Each call reads one
    range of each pack, so larger groups need fewer requests.
    """
    sizes = [pc.sum(shard.rows["bytes"]).as_py() for shard in shards]
    most = min(max(sum(sizes) // GROUPS, MIN_GROUP_BYTES), MAX_GROUP_BYTES)
    group: list[Shard] = []
    num_bytes = 0
    for shard, size in zip(shards, sizes, strict=True):
        if group and num_bytes + size > most:
            yield group
            group = []
            num_bytes = 0
        group.append(shard)
        num_bytes += size
    if group:
        yield group


def write_shards(job: ShardJob) -> list[WrittenShard]:
    """Write shards, and a mark after each shard. Return the written shards.

    After a kill, a shard with a mark is not written again.

    Raises:
        DamagedPack: If a pack is missing, or its content has changed.
    """
    rows = pa.concat_tables([shard.rows for shard in job.shards])
    images = PackedImages(job.packs, rows)
    written: list[WrittenShard] = []
    for shard in job.shards:
        result = _write_shard(job, shard, images)
        _write_mark(job, result)
        written.append(result)
    return written


def _write_shard(job: ShardJob, shard: Shard, images: PackedImages) -> WrittenShard:
    """Write one tar with `key.ext` and `key.txt` for each image. The text is the class name.

    The number of a class (`.cls`) is not written, because it would depend on the other classes.
    """
    buffer = io.BytesIO()
    offsets: list[int] = []
    names = ("key", "label", "sha256", "ext", "pack", "offset", "bytes")
    columns = [shard.rows[name].to_pylist() for name in names]
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for key, label, sha256, extension, pack, start, size in zip(*columns, strict=True):
            data = images.image(pack, start, size)
            if hashlib.sha256(data).hexdigest() != sha256:
                raise DamagedPack(
                    f"{join(job.packs, pack)} does not hold what was put into it (image {key!r}); "
                    "run the same command again to rebuild it"
                )
            offsets.append(_add_member(tar, f"{key}.{extension}", data))
            _add_member(tar, f"{key}.txt", label.encode())
    info = Attempt(job.root, job.key, job.attempt).write(shard.name, buffer.getvalue())
    return WrittenShard(shard.name, info, _build_index(shard, offsets))


def _build_index(shard: Shard, offsets: list[int]) -> pa.Table:
    rows = shard.rows
    columns = {
        "split": rows["split"],
        "key": rows["key"],
        "class": rows["label"],
        "shard": pa.array([shard.name] * len(offsets)),
        "offset": pa.array(offsets, pa.int64()),
        "bytes": rows["bytes"],
        "sha256": rows["sha256"],
        "ext": rows["ext"],
    }
    return pa.table(columns).cast(SCHEMA)


def _add_member(tar: tarfile.TarFile, name: str, data: bytes) -> int:
    """Add a member and return the offset of the data in the tar.

    The member has no time and no owner, so that equal images give equal bytes.
    """
    member = tarfile.TarInfo(name)
    member.size = len(data)
    member.mtime = 0
    member.mode = 0o644
    tar.addfile(member, io.BytesIO(data))
    blocks = -(-len(data) // tarfile.BLOCKSIZE)
    return tar.offset - blocks * tarfile.BLOCKSIZE


# ---- shards that an interrupted ingest has written -----------------------------------------------
def mark_name(attempt: str, shard: str) -> str:
    """Return the name of a shard's mark in the folder of packs."""
    return f"{attempt}-{shard}{MARK_SUFFIX}"


def _write_mark(job: ShardJob, shard: WrittenShard) -> None:
    metadata = {"bytes": str(shard.info["bytes"]), "sha256": shard.info["sha256"]}
    sink = io.BytesIO()
    pq.write_table(shard.index.replace_schema_metadata(metadata), sink, compression="zstd")
    write_bytes(join(job.packs, mark_name(job.attempt, shard.name)), sink.getvalue())


def read_mark(packs: str, attempt: str, name: str, sizes: Mapping[str, int]) -> WrittenShard | None:
    """Return a finished shard, or None if its mark is missing or damaged.

    The result is also None if the shard is missing or does not have the size in the mark.

    Args:
        packs: Folder of packs.
        attempt: Name of the attempt.
        name: Name of the shard.
        sizes: Sizes of the files of the attempt, by name.
    """
    try:
        table = read_table(read_bytes(join(packs, mark_name(attempt, name))))
        metadata = table.schema.metadata or {}
        info: FileInfo = {
            "bytes": int(metadata[b"bytes"]),
            "sha256": metadata[b"sha256"].decode(),
        }
    except (pa.ArrowException, OSError, KeyError, ValueError):
        return None
    if sizes.get(name) != info["bytes"]:
        return None
    return WrittenShard(name, info, table.replace_schema_metadata(None))
