"""Index shards in place: each shard is read once and hashed, and nothing is copied.

After a shard is read, its rows (one per sample) are written as a table. Therefore an ingest that
was killed continues with the next shard. Shards of an earlier ingest with the same URL, size and
time are not read again. `index_shards` is the entry point, as `ingest.ingest` is for sources that
are copied.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipeline.data import ingest
from pipeline.data.cards import Card
from pipeline.data.formats import get_format, require_entries, source_state, units, webdataset
from pipeline.data.formats.base import MapFn, Unit, source_uri
from pipeline.data.image_checks import STORED_FORMATS
from pipeline.data.known_images import (
    SOURCE,
    are_read_alike,
    digest_reading,
    encode_source,
    find_runs,
    read_num_rows,
)
from pipeline.data.listing import Entry, list_entries
from pipeline.data.packs import ROWS, ImageChecker, collect_notes, hash_unit, raw_row
from pipeline.data.preview import MAX_PER_GROUP, PreviewImage, limit_per_group
from workers.data.decoding import open_image
from workers.data.in_place import (
    SHARDS,
    encode_shard_list,
    parse_shard_number,
    read_shard_list,
    urls_by_name,
)
from workers.data.shards import SCHEMA
from workers.errors import UserError
from workers.job import ShardUrls
from workers.storage.artifact import (
    Artifact,
    Attempt,
    FileInfo,
    Manifest,
    delete_dir,
    is_local,
    join,
    list_files,
    read_bytes,
    write_bytes,
)
from workers.storage.parquet import read_table

INFO = b"shard"  # metadata key of a shard's table: size and digest of the shard
# Metadata key of this table and of SOURCE: small images for the preview. They are made while the
# shard is read, because it is read only once.
PICTURES = b"pictures"
# Settings of a source with the location of the shards. They do not affect how a sample is read.
PLACES = ("more", "path", "splits")
MAX_PICTURES = 40  # preview images per shard
SHOWN_SHARDS = 200  # approximate number of shards with preview images
TABLE_READERS = 8  # tables of shards read in parallel


class IndexJob(NamedTuple):
    """A shard to read.

    Attributes:
        unit: The shard as a unit.
        card: Card of the source.
        name: Name of the shard in the index.
        target: Path or URI of the table to write.
        is_shown: Whether some images of the shard are in the preview.
        stamp: Stamp of all samples (see `base.Item`). Empty if the time of the shard is unknown.
    """

    unit: Unit
    card: Card
    name: str
    target: str
    is_shown: bool
    stamp: str


class IndexedShard(NamedTuple):
    """A shard that was read.

    `rows` are its samples, with the columns of `packs.ROWS`. `pack` is the name of the shard.
    """

    rows: pa.Table
    info: FileInfo
    pictures: tuple[PreviewImage, ...] = ()


def get_shard_urls(card: Card) -> ShardUrls | None:
    """Return the URLs of the shards that a card uses in place, or None if ingest writes shards."""
    if get_format(card).list_shards is None:
        return None
    return webdataset.shard_urls(card)


def index_shards(
    card: Card,
    root: str,
    key: str,
    map_fn: MapFn,
    extra: dict[str, Any],
    progress: ingest.Report | None = None,
    previous: str = "",
) -> Manifest:
    """Write the index of a card's shards as the artifact `key` and return its manifest.

    Args:
        card: Card of the source.
        root: Folder or URI of the storage.
        key: Key of the ingest stage.
        map_fn: `map_fn(function, items)` returns the results in order. It may run in parallel; the
            index does not depend on this.
        extra: Further fields of the manifest.
        progress: Called with a report of the progress, or None.
        previous: Key of an earlier ingest of this card, or "". Its unchanged shards are not read
            again.

    Raises:
        UserError: If a shard is missing or damaged, too many images are bad, or the images do not
            match the counts or the digest on the card. In this case, nothing is published.
    """
    started = time.monotonic()
    entries = require_entries(card)
    state = source_state(card, entries)
    # The digest in the name of the folder changes with the source and the card. Then the tables of
    # an interrupted ingest are not reused.
    text = json.dumps([state, card.identity(), card.source.path, ingest.REVISION])
    folder = join(root, key, f"shards-{hashlib.sha256(text.encode()).hexdigest()[:16]}")
    shard_units = units(card, map_fn, entries)
    names = list(urls_by_name(webdataset.shard_urls(card)))
    jobs = _build_jobs(card, names, shard_units, entries, folder)
    before = KnownShards.open(root, previous, card)
    shards = _read_all(jobs, before, folder, map_fn, progress)
    rows = pa.concat_tables([shard.rows for shard in shards])
    contents = ingest.select_contents(
        card, rows, _all_files(card, entries), before.rows if before is not None else None
    )
    attempt = Attempt(root, key)
    try:
        files = {name: shard.info for name, shard in zip(names, shards, strict=True)}
        attempt.write(SHARDS, encode_shard_list(files))
        fields = {**extra, "fingerprint": ingest.get_fingerprint(state), "started": started}
        fields["reading"] = digest_reading(card, PLACES)
        index = index_table(names, contents.selected)
        attempt.write(SOURCE, _encode_source_with_pictures(contents.rows, rows, jobs, shards))
        ingest.commit_ingest(
            attempt, index, contents, _choose_pictures(contents.selected, names, shards), fields
        )
    except BaseException:
        attempt.discard()
        raise
    delete_dir(folder)
    return Artifact.need(root, key).manifest


def _all_files(card: Card, entries: list[Entry]) -> list[Entry]:
    """Return all files in the folder of a local source, otherwise the shards of the card.

    The account (the outcome for every file) also lists files that are not shards of the card.
    """
    path = source_uri(card)
    if not card.source.path or not is_local(path) or not os.path.isdir(path):
        return entries
    return list_entries(path, [""], get_format(card).suffixes) or entries


def _choose_pictures(
    selected: pa.Table, names: Sequence[str], shards: Sequence[IndexedShard]
) -> list[PreviewImage]:
    """Return the pictures of used images, at most `limit_per_group` for each split and class.

    Their split is that of `selected`: an image of a train shard can be held out as test.
    """
    of_shards = dict(zip(names, (shard.pictures for shard in shards), strict=True))
    known = {picture.name for pictures in of_shards.values() for picture in pictures}
    rows = selected.filter(pc.is_in(selected["name"], pa.array(known, pa.large_string())))
    splits = {(row["pack"], row["name"]): row["split"] for row in rows.to_pylist()}
    by_group: dict[tuple[str, str], list[PreviewImage]] = {}
    for shard, pictures in of_shards.items():
        for picture in pictures:
            split = splits.get((shard, picture.name))
            if split is not None:
                group = by_group.setdefault((split, picture.label), [])
                group.append(picture._replace(split=split))
    most = limit_per_group(len(by_group))
    return [picture for group in by_group.values() for picture in group[:most]]


# ---- shards of an earlier ingest -----------------------------------------------------------------
def _encode_source_with_pictures(
    kept: pa.Table, rows: pa.Table, jobs: Sequence[IndexJob], shards: Sequence[IndexedShard]
) -> bytes:
    """Return the bytes of the file SOURCE, with the pictures of kept images.

    For `kept` and `rows`, see `known_images.encode_source`.
    """
    names = {picture.name for shard in shards for picture in shard.pictures}
    pictured = kept.filter(pc.is_in(kept["name"], pa.array(names, pa.large_string())))
    images = set(zip(pictured["pack"].to_pylist(), pictured["name"].to_pylist(), strict=True))
    pictures = {
        job.stamp: _encode_pictures([p for p in shard.pictures if (job.name, p.name) in images])
        for job, shard in zip(jobs, shards, strict=True)
        if job.stamp
    }
    return encode_source(kept, rows, {PICTURES: json.dumps(pictures)})


class KnownShards(NamedTuple):
    """The shards of an earlier ingest stage.

    Attributes:
        rows: Rows of the samples that the earlier card did not exclude, with the columns of
            `packs.ROWS`.
        runs: Stamp of a shard -> index of the first row, and index after the last row.
        num_rows: Number of rows by stamp, see `known_images.read_num_rows`.
        pictures: Stamp of a shard -> encoded pictures.
        infos: Name of a shard in the earlier ingest -> its size and digest.
    """

    rows: pa.Table
    runs: dict[str, tuple[int, int]]
    num_rows: dict[str, int]
    pictures: dict[str, Any]
    infos: dict[str, FileInfo]

    @classmethod
    def open(cls, root: str, key: str, card: Card) -> KnownShards | None:
        """Load the shards of the stage `key`.

        Returns:
            The shards, or None if the stage is missing or damaged, or if its card had other
            settings for reading samples.
        """
        artifact = Artifact.open(root, key) if key else None
        if artifact is None or artifact.manifest.get("reading") != digest_reading(card, PLACES):
            return None
        try:
            table = read_table(artifact.read(SOURCE))
            num_rows = read_num_rows(table)
            pictures = json.loads((table.schema.metadata or {})[PICTURES])
            infos = read_shard_list(artifact)
        except (UserError, pa.ArrowException, OSError, KeyError, ValueError):
            return None
        rows = table.replace_schema_metadata(None)
        if rows.schema != ROWS or not isinstance(pictures, dict):
            return None
        return cls(rows, find_runs(rows["stamp"]), num_rows, pictures, infos)

    def find(self, job: IndexJob, checker: ImageChecker) -> IndexedShard | None:
        """Return the earlier result for a shard, or None if the shard must be read again."""
        start, stop = self.runs.get(job.stamp, (0, 0))
        rows = self.rows.slice(start, stop - start)
        # rows that the earlier card excluded are missing
        if not len(rows) or self.num_rows.get(job.stamp, 1) != len(rows):
            return None
        names = rows["pack"].drop_null().unique().to_pylist()
        if len(names) != 1 or names[0] not in self.infos:
            return None
        # the storage may be untrusted: exactly the used images must have an offset
        has_place = [number is not None and number >= 0 for number in rows["offset"].to_pylist()]
        is_used = pc.is_null(rows["problem"]).to_pylist()
        if has_place != is_used:
            return None
        position = rows.schema.get_field_index("pack")
        pack = pa.scalar(job.name, pa.large_string())
        packs = pc.if_else(pc.is_valid(rows["pack"]), pack, rows["pack"])
        rows = rows.set_column(position, "pack", packs)
        if not are_read_alike(rows, checker):
            return None
        try:
            pictures = _decode_pictures(self.pictures.get(job.stamp, []))
        except (ValueError, TypeError):
            return None
        return IndexedShard(checker.mark_left_out(rows), self.infos[names[0]], pictures)


def _build_jobs(
    card: Card,
    names: Sequence[str],
    shard_units: Sequence[Unit],
    entries: Sequence[Entry],
    folder: str,
) -> list[IndexJob]:
    """Return the jobs that read all shards, in order. Their tables are written to `folder`."""
    urls = urls_by_name(webdataset.shard_urls(card))
    versions = {entry.name: entry for entry in entries}
    step = -(-len(names) // SHOWN_SHARDS)
    jobs: list[IndexJob] = []
    for name, unit in zip(names, shard_units, strict=True):
        target = join(folder, f"{hash_unit(unit)}.parquet")
        is_shown = parse_shard_number(name) % step == 0
        entry = versions[name]
        stamp = ""
        if entry.modified:
            # The URL is hashed, so that the storage does not reveal the location of the data.
            digest = hashlib.sha256(urls[name].encode("utf-8", "backslashreplace")).hexdigest()
            split = name.rpartition("-")[0]
            stamp = f"{split}-{digest[:24]}\t{entry.size}\t{entry.modified}"
        jobs.append(IndexJob(unit, card, name, target, is_shown, stamp))
    return jobs


# ---- reading -------------------------------------------------------------------------------------
def _read_all(
    jobs: Sequence[IndexJob],
    before: KnownShards | None,
    folder: str,
    map_fn: MapFn,
    progress: ingest.Report | None,
) -> list[IndexedShard]:
    """Read the shards that neither `before` nor a table in `folder` has.

    Returns:
        All shards, in the order of the jobs.
    """
    shards: dict[str, IndexedShard] = {}
    if before is not None and jobs:
        checker = ImageChecker(jobs[0].card)
        found = {job.name: before.find(job, checker) for job in jobs}
        shards = {name: shard for name, shard in found.items() if shard is not None}
    sizes = list_files(folder)
    unknown = [job for job in jobs if job.name not in shards]
    with ThreadPoolExecutor(TABLE_READERS, "tables") as pool:
        standing = list(pool.map(lambda job: _read_indexed_shard(job, sizes), unknown))
    shards |= {job.name: shard for job, shard in zip(unknown, standing, strict=True) if shard}
    pending = [job for job in jobs if job.name not in shards]
    num_images = sum(len(shard.rows) for shard in shards.values())
    num_before = num_images
    started = time.monotonic()
    for number, (job, shard) in enumerate(zip(pending, map_fn(index_shard, pending), strict=True)):
        shards[job.name] = shard
        num_images += len(shard.rows)
        elapsed_s = max(time.monotonic() - started, 1e-9)
        left_s = elapsed_s / (number + 1) * (len(pending) - number - 1)
        if progress is not None:
            body: dict[str, Any] = {"doing": "indexing shards", "images": num_images}
            body |= {"images_per_s": (num_images - num_before) / elapsed_s, "left_s": left_s}
            progress(body)
    return [shards[job.name] for job in jobs]


def _read_indexed_shard(job: IndexJob, sizes: dict[str, int]) -> IndexedShard | None:
    """Return a shard that an interrupted ingest has read, or None if it must be read."""
    if job.target.partition("?")[0].rpartition("/")[2] not in sizes:
        return None
    try:
        table = read_table(read_bytes(job.target))
        info = json.loads((table.schema.metadata or {})[INFO])
        pictures = _decode_pictures(json.loads((table.schema.metadata or {})[PICTURES]))
        rows = table.replace_schema_metadata(None)
    except (pa.ArrowException, OSError, ValueError, KeyError, TypeError):
        return None
    if rows.schema != ROWS or {"bytes", "sha256"} != info.keys():
        return None
    return IndexedShard(rows, info, pictures)


def _encode_pictures(pictures: Sequence[PreviewImage]) -> list[list[str]]:
    """Convert pictures to values that JSON can contain."""
    return [[*texts, base64.b64encode(data).decode()] for *texts, data in pictures]


def _decode_pictures(body: Any) -> tuple[PreviewImage, ...]:
    """Decode the pictures of `_encode_pictures`. Raise ValueError or TypeError for other data."""
    return tuple(
        PreviewImage(split, label, name, base64.b64decode(data))
        for split, label, name, data in body
    )


def index_shard(job: IndexJob) -> IndexedShard:
    """Read a whole shard, decode every image, and write its table."""
    checker = ImageChecker(job.card)
    summary = webdataset.ShardSummary()
    rows: list[dict[str, Any]] = []
    pictures: list[PreviewImage] = []
    num_shown: Counter[str] = Counter()
    for item, data in job.unit.read(*job.unit.args, summary):
        row = checker.row(item)
        row["stamp"] = job.stamp or None
        if data is not None:
            digest = hashlib.sha256(data).hexdigest()
            row["raw"] = raw_row(item, checker.raw_label(item), digest)
            checked = checker.check(data)
            row["problem"] = row["problem"] or checked.problem
            row |= collect_notes(checked)
            if row["problem"] is None:
                extension = STORED_FORMATS[open_image(data, job.card.max_pixels).format or ""]
                row |= {"sha256": digest, "ext": extension}
                row |= {"pack": job.name, "offset": item.offset, "bytes": item.size}
                num_shown[row["label"]] += 1
                is_shown = job.is_shown and num_shown[row["label"]] <= MAX_PER_GROUP
                if is_shown and len(pictures) < MAX_PICTURES:
                    split, label, name = row["split"], row["label"], row["name"]
                    pictures.append(PreviewImage.from_image(job.card, split, label, name, data))
        rows.append(row)
    info: FileInfo = {"bytes": summary.size, "sha256": summary.sha256}
    table = pa.Table.from_pylist(rows, ROWS)
    sink = io.BytesIO()
    metadata = {INFO: json.dumps(info), PICTURES: json.dumps(_encode_pictures(pictures))}
    pq.write_table(table.replace_schema_metadata(metadata), sink)
    write_bytes(job.target, sink.getvalue())
    return IndexedShard(table, info, tuple(pictures))


def index_table(names: list[str], selected: pa.Table) -> pa.Table:
    """Return the index. The rows of a shard are consecutive, in the order of their offsets."""
    numbers = pc.index_in(selected["pack"], pa.array(names, pa.large_string()))
    order = np.lexsort((selected["offset"].to_numpy(), numbers.to_numpy()))
    ordered = selected.take(pa.array(order))
    sources = {"class": "label", "shard": "pack"}
    columns = [sources.get(name, name) for name in SCHEMA.names]
    return ordered.select(columns).rename_columns(SCHEMA.names).cast(SCHEMA).combine_chunks()
