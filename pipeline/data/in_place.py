"""Shards that are used where they lie: each is read once, hashed and indexed; nothing is copied.

The table of a shard is written as soon as the shard was read, so that a killed run goes on with the
next one.
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
from pipeline.data.formats import format_of, require_entries, source_state, units, webdataset
from pipeline.data.formats.base import MapFn, Unit, source_uri
from pipeline.data.image_checks import STORED_FORMATS
from pipeline.data.listing import Entry, list_entries
from pipeline.data.packs import ROWS, ImageChecker, name_of, notes_of, raw_row
from pipeline.data.preview import MAX_PER_GROUP, Picture, limit_per_group
from workers.data.decoding import open_image
from workers.data.in_place import SHARDS, number_of_shard, urls_by_name, write_shards
from workers.data.shards import SCHEMA
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

INFO = b"shard"  # in the metadata of a shard's table: its size and digest
PICTURES = b"pictures"  # the same: small images for the preview, as a shard is read once
MOST_PICTURES = 40  # of a shard
SHOWN_SHARDS = 200  # about so many have pictures
TABLE_READERS = 8  # tables of shards that are read at the same time


class IndexJob(NamedTuple):
    """A shard to read. name: in the index. target: where its table is put. is_shown: whether some
    images of it are for the preview."""

    unit: Unit
    card: Card
    name: str
    target: str
    is_shown: bool


class IndexedShard(NamedTuple):
    """A shard that was read. rows: of its samples, as `packs.ROWS`; `pack` is its name."""

    rows: pa.Table
    info: FileInfo
    pictures: tuple[Picture, ...] = ()


def urls_of(card: Card) -> ShardUrls | None:
    """Return where the shards of a card lie; None where ingest writes shards of its own."""
    if format_of(card).list_shards is None:
        return None
    return webdataset.shard_urls(card)


def index_shards(
    card: Card,
    root: str,
    key: str,
    map_fn: MapFn,
    extra: dict[str, Any],
    progress: ingest.Report | None = None,
) -> Manifest:
    """Write the artifact `key` below `root` and return its manifest: the index of a card's shards.

    map_fn(function, items): results in order. The index is the same whatever it does in parallel.
    extra: what else goes into the manifest. Raise UserError where a shard is missing or damaged,
    too much is bad, or the images are not what the card promises; then nothing is published.
    """
    started = time.monotonic()
    entries = require_entries(card)
    state = source_state(card, entries)
    text = json.dumps([state, card.identity(), card.source.path, ingest.REVISION])
    folder = join(root, key, f"shards-{hashlib.sha256(text.encode()).hexdigest()[:16]}")
    shard_units = units(card, map_fn, entries)
    names = list(urls_by_name(webdataset.shard_urls(card)))
    shards = _read_all(card, names, shard_units, folder, map_fn, progress)
    rows = pa.concat_tables([shard.rows for shard in shards])
    contents = ingest.select_contents(card, rows, _all_files(card, entries))
    attempt = Attempt(root, key)
    try:
        files = {name: shard.info for name, shard in zip(names, shards, strict=True)}
        attempt.write(SHARDS, write_shards(files))
        fields = {**extra, "fingerprint": ingest.fingerprint_of(state), "started": started}
        index = index_table(names, contents.selected)
        ingest.publish(
            attempt, index, contents, _pictures(contents.selected, names, shards), fields
        )
    except BaseException:
        attempt.discard()
        raise
    delete_dir(folder)
    return Artifact.need(root, key).manifest


def _all_files(card: Card, entries: list[Entry]) -> list[Entry]:
    """Return all files beside the shards of a card on a disk; the shards alone elsewhere."""
    path = source_uri(card)
    if not card.source.path or not is_local(path) or not os.path.isdir(path):
        return entries
    return list_entries(path, [""], format_of(card).suffixes) or entries


def _pictures(
    selected: pa.Table, names: Sequence[str], shards: Sequence[IndexedShard]
) -> list[Picture]:
    """Return the pictures of images that are used, with their split; no more than are shown."""
    of_shards = dict(zip(names, (shard.pictures for shard in shards), strict=True))
    known = {picture.name for pictures in of_shards.values() for picture in pictures}
    rows = selected.filter(pc.is_in(selected["name"], pa.array(known, pa.large_string())))
    splits = {(row["pack"], row["name"]): row["split"] for row in rows.to_pylist()}
    by_group: dict[tuple[str, str], list[Picture]] = {}
    for shard, pictures in of_shards.items():
        for picture in pictures:
            split = splits.get((shard, picture.name))
            if split is not None:
                group = by_group.setdefault((split, picture.label), [])
                group.append(picture._replace(split=split))
    most = limit_per_group(len(by_group))
    return [picture for group in by_group.values() for picture in group[:most]]


def _read_all(
    card: Card,
    names: list[str],
    shard_units: list[Unit],
    folder: str,
    map_fn: MapFn,
    progress: ingest.Report | None,
) -> list[IndexedShard]:
    """Read all shards whose table does not stand yet; return them in order."""
    jobs = []
    step = -(-len(names) // SHOWN_SHARDS)
    for name, unit in zip(names, shard_units, strict=True):
        target = join(folder, f"{name_of(unit)}.parquet")
        is_shown = number_of_shard(name) % step == 0
        jobs.append(IndexJob(unit, card, name, target, is_shown))
    sizes = list_files(folder)
    with ThreadPoolExecutor(TABLE_READERS, "tables") as pool:
        standing = list(pool.map(lambda job: _read_table(job, sizes), jobs))
    shards = {job.name: shard for job, shard in zip(jobs, standing, strict=True) if shard}
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
    return [shards[name] for name in names]


def _read_table(job: IndexJob, sizes: dict[str, int]) -> IndexedShard | None:
    """Return a shard that was read by a run before; None where it must be read."""
    if job.target.partition("?")[0].rpartition("/")[2] not in sizes:
        return None
    try:
        table = read_table(read_bytes(job.target))
        info = json.loads((table.schema.metadata or {})[INFO])
        pictures = [
            Picture(split, label, name, base64.b64decode(data))
            for split, label, name, data in json.loads((table.schema.metadata or {})[PICTURES])
        ]
        rows = table.replace_schema_metadata(None)
    except (pa.ArrowException, OSError, ValueError, KeyError, TypeError):
        return None
    if rows.schema != ROWS or {"bytes", "sha256"} != info.keys():
        return None
    return IndexedShard(rows, info, tuple(pictures))


def index_shard(job: IndexJob) -> IndexedShard:
    """Read a shard to its end, decode every image of it, and write its table."""
    checker = ImageChecker(job.card)
    summary = webdataset.ShardSummary()
    rows: list[dict[str, Any]] = []
    pictures: list[Picture] = []
    num_shown: Counter[str] = Counter()
    for item, data in job.unit.read(*job.unit.args, summary):
        row = checker.row(item)
        if data is not None:
            digest = hashlib.sha256(data).hexdigest()
            row["raw"] = raw_row(item, checker.raw_label(item), digest)
            checked = checker.check(data)
            row["problem"] = row["problem"] or checked.problem
            row |= notes_of(checked)
            if row["problem"] is None:
                extension = STORED_FORMATS[open_image(data, job.card.max_pixels).format or ""]
                row |= {"sha256": digest, "ext": extension}
                row |= {"pack": job.name, "offset": item.offset, "bytes": item.size}
                num_shown[row["label"]] += 1
                is_shown = job.is_shown and num_shown[row["label"]] <= MAX_PER_GROUP
                if is_shown and len(pictures) < MOST_PICTURES:
                    split, label, name = row["split"], row["label"], row["name"]
                    pictures.append(Picture.from_image(job.card, split, label, name, data))
        rows.append(row)
    info: FileInfo = {"bytes": summary.size, "sha256": summary.sha256}
    table = pa.Table.from_pylist(rows, ROWS)
    sink = io.BytesIO()
    shown = [[*texts, base64.b64encode(data).decode()] for *texts, data in pictures]
    metadata = {INFO: json.dumps(info), PICTURES: json.dumps(shown)}
    pq.write_table(table.replace_schema_metadata(metadata), sink)
    write_bytes(job.target, sink.getvalue())
    return IndexedShard(table, info, tuple(pictures))


def index_table(names: list[str], selected: pa.Table) -> pa.Table:
    """Return the index: the rows of a shard follow each other, in the order of their offsets."""
    numbers = pc.index_in(selected["pack"], pa.array(names, pa.large_string()))
    order = np.lexsort((selected["offset"].to_numpy(), numbers.to_numpy()))
    ordered = selected.take(pa.array(order))
    sources = {"class": "label", "shard": "pack"}
    columns = [sources.get(name, name) for name in SCHEMA.names]
    return ordered.select(columns).rename_columns(SCHEMA.names).cast(SCHEMA).combine_chunks()
