"""Ingest: convert raw data of any format to WebDataset tars and a Parquet index.

`ingest` works in two passes. First, each unit of the source (a part that one call reads, see
`formats.base.Unit`) is read once, and its images are checked and written to packs (intermediate
files, see packs.py). Then shards are written from the packs. The calls of a pass can run in
parallel, and finished work is not repeated after a kill. An image that cannot be used is listed in
rejected.csv with the reason. Shards that are used in place are indexed by in_place.py instead.
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipeline.data.account import ACCOUNT, Account, build_account
from pipeline.data.cards import Card
from pipeline.data.csv_text import to_csv
from pipeline.data.digests import digest_index, digest_rows
from pipeline.data.formats import SourceState, get_format, require_entries, source_state, units
from pipeline.data.formats.base import UNIT_ITEMS, MapFn, Unit, check_unfolding, unit_slices
from pipeline.data.known_images import (
    SOURCE,
    Changes,
    DividedUnit,
    KnownImages,
    digest_reading,
    encode_source_rows,
    stamp_units,
)
from pipeline.data.listing import Entry
from pipeline.data.packs import (
    LEFT_OUT,
    TABLE_SUFFIX,
    DamagedPack,
    PackedImages,
    RawJob,
    UnitJob,
    hash_unit,
    mark_left_out,
    raw_rows,
    read_unit_rows,
    write_unit,
)
from pipeline.data.preview import PREVIEW, PreviewImage, render_preview, sample_rows
from pipeline.data.selection import (
    REJECTED,
    REJECTED_CSV,
    count_reasons,
    divide_left_out,
    rejected_rows,
    select_rows,
)
from pipeline.data.shard_writer import (
    ShardJob,
    WrittenShard,
    divide_into_shards,
    group_shards,
    mark_name,
    read_mark,
    write_shards,
)
from pipeline.data.splits import SPLITS
from workers.data.shards import GROUP_ROWS, INDEX, SCHEMA
from workers.errors import UserError
from workers.storage.artifact import (
    Artifact,
    Attempt,
    Manifest,
    delete_dir,
    is_local,
    join,
    list_files,
    read_bytes,
    read_withdrawn_attempt,
    resolve,
    write_bytes,
)

REVISION = 2  # increase it if a change of the code gives other images or keys for the same source
NONCE = "nonce"  # a file in a folder of packs, see `_attempt_name`
SMALL_BYTES = 8 << 20  # maximum size of a source that is packed by this process, see `is_small`
TABLE_READERS = 8  # tables of finished units read in parallel

# Called with `doing` (name of the pass), `images` (finished) and, if known, `of` (total),
# `images_per_s` and `left_s` (seconds left).
Report = Callable[[dict[str, Any]], None]


@dataclass
class IngestProgress:
    """Reports the number of finished images and the remaining time of one pass of ingest.

    Args:
        report: Called with each report.
        doing: Name of the pass.
        total: Number of images.
        num_before: Number of images finished before this process started.
    """

    report: Report
    doing: str
    total: int
    num_before: int = 0
    num_done: int = 0
    started: float = field(default_factory=time.monotonic)

    def add(self, images: int) -> None:
        """Add the number of newly finished images, and report the progress."""
        self.num_done += images
        elapsed_s = max(time.monotonic() - self.started, 1e-9)
        images_per_s = self.num_done / elapsed_s
        num_left = max(self.total - self.num_before - self.num_done, 0)
        body: dict[str, Any] = {
            "doing": self.doing,
            "images": self.num_before + self.num_done,
            "of": self.total,
        }
        if self.num_done:
            body |= {"images_per_s": images_per_s, "left_s": num_left / images_per_s}
        self.report(body)


def ingest(
    card: Card,
    root: str,
    key: str,
    map_fn: MapFn,
    extra: dict[str, Any],
    progress: Report | None = None,
    previous: str = "",
) -> Manifest:
    """Write the shards, the index and the reports of a card as the artifact `key`.

    The shards have the same bytes for any parallelism. Packs and shards of an interrupted ingest
    are reused.

    Args:
        card: Card of the data.
        root: Folder or URI of the stages.
        key: Key of the stage.
        map_fn: `map_fn(function, items)` returns the results in order. It may run in parallel.
        extra: Further fields of the manifest.
        progress: Called with a report of the progress, or None.
        previous: Key of an earlier ingest of the same data, or "". Its unchanged images are not
            read again, see `KnownImages`.

    Returns:
        The manifest of the artifact.

    Raises:
        UserError: If the source is missing, too many images are bad, or the source does not match
            its card. In this case, nothing is published.
    """
    report = progress or (lambda event: None)
    started = time.monotonic()
    entries = require_entries(card)
    state = source_state(card, entries)
    # The digest in the name of the folder changes with the source and the card. Then the packs of
    # an interrupted ingest are not reused.
    state_digest = hashlib.sha256(
        json.dumps([state, card.identity(), card.source.path, REVISION]).encode()
    ).hexdigest()
    file_bytes = sum(entry.size for entry in entries)
    source_units = mark_left_out(units(card, map_fn, entries), card)
    source_units = stamp_units(source_units, card, entries)
    known = KnownImages.open(root, previous, card)
    fields = {**extra, "fingerprint": get_fingerprint(state), "started": started}
    fields["reading"] = digest_reading(card)

    def write(packs: str, map_fn: MapFn) -> None:
        rows = read_source(source_units, card, packs, map_fn, report, file_bytes, known)
        _write_artifact(
            card, entries, rows, Attempt(root, key), packs, map_fn, report, fields, known
        )

    packs = join(root, key, f"packs-{state_digest[:16]}")
    has_local_packs = not is_local(root) and is_small(source_units, file_bytes)
    try:
        if has_local_packs:
            # Packs in a local folder need no requests to the bucket. They are lost after a kill,
            # but packing a small source again is little work.
            with TemporaryDirectory(prefix="accrete-packs-") as local_packs:
                write(local_packs, map)
            return Artifact.need(root, key).manifest
        write(packs, map_fn)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT) and not has_local_packs:
            raise _full_storage_error(card, root, packs) from None
        raise
    except DamagedPack:
        if Artifact.open(root, key) is None:
            if known is None:
                raise
            # A shard of the earlier ingest may be damaged or missing: read all images again.
            return ingest(card, root, key, map_fn, extra, progress)
        # A bucket has no locks: another process has published the artifact and deleted the packs.
    delete_dir(packs)
    return Artifact.need(root, key).manifest


def is_small(units: list[Unit], file_bytes: int) -> bool:
    """Return whether a source has at most UNIT_ITEMS images and SMALL_BYTES bytes.

    If the storage is a bucket, such a source is packed by this process, without parallel calls.
    """
    num_items = sum(unit.num_items for unit in units)
    return num_items <= UNIT_ITEMS and file_bytes <= SMALL_BYTES


def _write_artifact(
    card: Card,
    entries: list[Entry],
    rows: pa.Table,
    attempt: Attempt,
    packs: str,
    map_fn: MapFn,
    report: Report,
    fields: dict[str, Any],
    known: KnownImages | None,
) -> None:
    """Select rows of a source, write the shards, and publish the artifact.

    `fields` are further fields of the manifest.
    """
    try:
        before = known.rows if known is not None else None
        contents = select_contents(card, rows, entries, before)
    except UserError:
        delete_dir(packs)
        raise
    plan = f"{contents.fields['content']} {card.identity()} {REVISION} by class"
    attempt.name = _attempt_name(attempt.root, attempt.key, packs, plan)
    pictures = list(_read_pictures(card, sample_rows(contents.selected), packs))
    index = _write_all(contents.selected, card, attempt, packs, map_fn, report, known)
    attempt.write(SOURCE, encode_source_rows(contents.rows, rows, index))
    commit_ingest(attempt, index, contents, pictures, fields)


def _read_pictures(card: Card, rows: pa.Table, packs: str) -> Iterator[PreviewImage]:
    """Yield the images of some rows for the preview, with few bytes in memory at a time."""
    sizes = rows["bytes"].to_pylist()
    for part in unit_slices(sizes):
        images = PackedImages(packs, rows[part])
        for row in rows[part].to_pylist():
            data = images.image(row["pack"], row["offset"], row["bytes"])
            yield PreviewImage.from_image(card, row["split"], row["label"], row["name"], data)


class Contents(NamedTuple):
    """The result of reading a source.

    Attributes:
        card: Card of the source.
        rows: Rows of the source, without those that the card excludes.
        selected: Rows of the images to write.
        rejected: Rows of rejected.csv.
        account: Outcome for every file.
        fields: Fields of the manifest.
    """

    card: Card
    rows: pa.Table
    selected: pa.Table
    rejected: pa.Table
    account: Account
    fields: dict[str, Any]


def select_contents(
    card: Card, rows: pa.Table, entries: list[Entry], before: pa.Table | None = None
) -> Contents:
    """Select the rows of a source to write.

    Args:
        card: Card of the source.
        rows: All rows of the source, with the columns of `packs.ROWS`.
        entries: All files below the source.
        before: The rows of an earlier ingest of the same data.

    Raises:
        UserError: If too many images are bad, or the images do not match the counts or the digest
            on the card.
    """
    rows, left_out = divide_left_out(card, rows)
    raw_content_digest = digest_rows(rows["raw"].drop_null())
    selected, rejected, notes = select_rows(card, rows.drop_columns(["raw", "stamp"]))
    if before is not None:
        notes = [*notes, Changes.between(before, rows).text()]
    account = _account(card, entries, selected, rejected, left_out, notes)
    account.check(card)
    counts = _count_by_split(selected)
    content = digest_index(selected.rename_columns({"label": "class"}))
    check_promises(card, counts, content)
    fields = {
        "kind": "ingest",
        "card": card.name,
        "classes": list(card.order()),
        "counts": counts,
        "content": content,
        "rejected": count_reasons(rejected),
        "raw_content": raw_content_digest,
        "max_pixels": card.max_pixels,
    }
    if card.source.range is not None:
        fields["range"] = list(card.source.range)
    if card.hold_out != "rank":
        fields["hold_out"] = card.hold_out
    return Contents(card, rows, selected, rejected, account, fields)


def _account(
    card: Card,
    entries: list[Entry],
    selected: pa.Table,
    rejected: pa.Table,
    left_out: pa.Table,
    notes: list[str],
) -> Account:
    """Return the outcome for every file; if files contain many images, also numbers of images.

    Images that the card excludes are counted and not named.
    """
    not_kept = rejected.filter(pc.equal(rejected["kept"], "no"))
    if get_format(card).list_items is None:
        counts = {"used": len(selected), **count_reasons(not_kept)}
        counts.pop("other file", None)
        if len(left_out):
            counts[LEFT_OUT] = len(left_out)
        return build_account(card, entries, {}, notes, counts)
    images: dict[str, str | None] = dict(
        zip(not_kept["source"].to_pylist(), not_kept["reason"].to_pylist(), strict=True)
    )
    images |= dict.fromkeys(left_out["name"].to_pylist(), LEFT_OUT)
    images |= dict.fromkeys(selected["name"].to_pylist())
    return build_account(card, entries, images, notes)


def commit_ingest(
    attempt: Attempt,
    index: pa.Table,
    contents: Contents,
    pictures: list[PreviewImage],
    extra: dict[str, Any],
) -> None:
    """Write the index, the reports and the preview, and commit the attempt.

    Args:
        attempt: The attempt with its shards.
        index: Index of the shards.
        contents: The result of reading the source.
        pictures: Images for the preview.
        extra: Further fields of the manifest; `started` is the start of the ingest in seconds of
            `time.monotonic`.
    """
    attempt.write(INDEX, _encode_index(index))
    attempt.write(REJECTED_CSV, to_csv(REJECTED.names, rejected_rows(contents.rejected)))
    attempt.write(ACCOUNT, contents.account.to_json())
    groups = contents.selected.group_by(["split", "label"]).aggregate([([], "count_all")])
    counts = {(row["split"], row["label"]): row["count_all"] for row in groups.to_pylist()}
    page = render_preview(contents.card, contents.account, counts, pictures)
    attempt.write(PREVIEW, page.encode())
    fields = {**extra, **contents.fields}
    fields["wall_s"] = round(time.monotonic() - fields.pop("started"), 3)
    attempt.commit(fields)


def get_fingerprint(state: SourceState | None) -> str | None:
    """Return the fingerprint of a source for the manifest."""
    return state.fingerprint if state else None


def _attempt_name(root: str, key: str, packs: str, plan: str) -> str:
    """Return the name of the attempt that writes the shards of a plan.

    The name depends on the plan and on a random number in the folder of packs, so that a repeated
    ingest reuses the shards of an interrupted one. If the attempt with this name was published and
    found damaged, a new random number is chosen.

    Args:
        root: Folder or URI of the stages.
        key: Key of the stage.
        packs: Folder of packs.
        plan: Text that identifies the inputs of the shards.
    """
    uri = join(packs, NONCE)
    nonce = ""
    with suppress(FileNotFoundError):
        nonce = read_bytes(uri).decode("ascii", "replace")
    name = _hash_attempt_name(plan, nonce)
    if not nonce or name == read_withdrawn_attempt(root, key):
        nonce = uuid.uuid4().hex
        write_bytes(uri, nonce.encode())
    return _hash_attempt_name(plan, nonce)


def _hash_attempt_name(plan: str, nonce: str) -> str:
    digest = hashlib.sha256(f"{plan} {nonce}".encode()).hexdigest()
    return f"a-{digest[:12]}"


def _count_by_split(rows: pa.Table) -> dict[str, int]:
    """Return the number of rows of each split; `val` is left out if it has none."""
    counts: dict[str, int] = {}
    for split in SPLITS:
        counts[split] = pc.sum(pc.equal(rows["split"], split)).as_py() or 0
    if not counts["val"]:
        del counts["val"]
    return counts


def _full_storage_error(card: Card, root: str, packs: str) -> UserError:
    gigabytes = sum(list_files(packs).values()) / 1e9
    free = ""
    if is_local(root):
        free = f", {shutil.disk_usage(resolve(root)[1]).free / 1e9:.2f} GB are free"
    return UserError(
        f"storage {root!r} is full ({os.strerror(errno.ENOSPC)}{free}): ingest of card "
        f"{card.name!r} writes its images twice, into packs that are deleted at the end "
        f"({gigabytes:.2f} GB so far) and into shards; free twice the size of the source there, or "
        "choose another folder with --set storage=PATH, and run the same command again: "
        "what is packed is kept"
    )


# ---- first pass: every unit of the source is read once -------------------------------------------
def read_source(
    units: list[Unit],
    card: Card,
    packs: str,
    map_fn: MapFn,
    report: Report,
    file_bytes: int,
    known: KnownImages | None = None,
) -> pa.Table:
    """Check and pack all images, and return the rows of all units in order.

    The rows have the columns of `packs.ROWS`. Units with a table in the folder of packs are not
    read again.

    Args:
        units: Units of the source.
        card: Card of the source.
        packs: Folder of packs.
        map_fn: See `ingest`.
        report: Called with the progress.
        file_bytes: Size of all files of the source, 0 if the data comes from a Python
            package.
        known: Images of an earlier ingest.

    Raises:
        UserError: If the images have far more bytes than the files.
    """
    divided: list[DividedUnit | None] = [None] * len(units)
    if known is not None:
        divided = known.divide(units, card)
    units = [unit if one is None else one.rest for unit, one in zip(units, divided, strict=True)]
    names = [hash_unit(unit) for unit in units]
    sizes = list_files(packs)
    tables: dict[str, pa.Table | None] = {}
    done = [name for name in names if name + TABLE_SUFFIX in sizes]
    if done:
        with ThreadPoolExecutor(TABLE_READERS, "tables") as pool:
            read = partial(read_unit_rows, packs, sizes=sizes)
            tables.update(zip(done, pool.map(read, done), strict=True))
    jobs: list[UnitJob] = []
    num_before = 0
    for unit, name, one in zip(units, names, divided, strict=True):
        if tables.get(name) is None:
            earlier = None if one is None else one.earlier
            jobs.append(UnitJob(unit, card, packs, name, earlier))
        else:
            num_before += unit.num_items
    total = sum(unit.num_items for unit in units)
    progress = IngestProgress(report, "checking images", total, num_before)
    progress.add(0)
    image_bytes = 0
    for job, table in zip(jobs, map_fn(write_unit, jobs), strict=True):
        tables[job.name] = table
        image_bytes += pc.sum(table["bytes"]).as_py() or 0
        if file_bytes:
            check_unfolding(card.source.path, image_bytes, file_bytes)
        progress.add(job.unit.num_items)
    merged = [
        tables[name] if one is None else one.merge(tables[name])
        for name, one in zip(names, divided, strict=True)
    ]
    return pa.concat_tables(merged)


def raw_content(card: Card, map_fn: MapFn) -> str:
    """Compute the digest of the current raw images of a source, without decoding them.

    It equals `raw_content` in the manifest of an ingest if, since then, no image was added or
    removed, and the names, labels, splits and bytes of all images are unchanged.
    """
    all_units = mark_left_out(units(card, map_fn), card)
    parts = map_fn(raw_rows, [RawJob(unit, card) for unit in all_units])
    return digest_rows(pa.chunked_array(parts, pa.large_binary()))


# ---- second pass: the shards ---------------------------------------------------------------------
def _write_all(
    rows: pa.Table,
    card: Card,
    attempt: Attempt,
    packs: str,
    map_fn: MapFn,
    report: Report,
    known: KnownImages | None,
) -> pa.Table:
    """Write all missing shards, and return the index."""
    shards = list(divide_into_shards(rows, card.shard_images))
    written = _find_written_shards([shard.name for shard in shards], attempt, packs)
    if known is not None:
        same = known.find_shards([shard for shard in shards if shard.name not in written])
        for taken in same.values():
            try:
                known.link_shard(attempt, taken)
            except FileNotFoundError as error:
                raise DamagedPack(f"a shard of the earlier ingest is missing ({error})") from None
        written |= same
    pending = [shard for shard in shards if shard.name not in written]
    jobs = [
        ShardJob(attempt.root, attempt.key, attempt.name, packs, group)
        for group in group_shards(pending)
    ]
    num_before = len(rows) - sum(len(shard.rows) for shard in pending)
    progress = IngestProgress(report, "writing shards", len(rows), num_before)
    progress.add(0)
    try:
        for results in map_fn(write_shards, jobs):
            for shard in results:
                written[shard.name] = shard
                progress.add(len(shard.index))
    except DamagedPack:
        delete_dir(packs)
        raise
    tables: list[pa.Table] = [SCHEMA.empty_table()]
    for shard in shards:
        attempt.files[shard.name] = written[shard.name].info
        tables.append(written[shard.name].index)
    return pa.concat_tables(tables).combine_chunks()


def _find_written_shards(
    names: Iterable[str], attempt: Attempt, packs: str
) -> dict[str, WrittenShard]:
    """Return the shards that an interrupted ingest has finished for this attempt, by name."""
    marks = list_files(packs)
    marked = [name for name in names if mark_name(attempt.name, name) in marks]
    if not marked:
        return {}
    sizes = list_files(join(attempt.root, attempt.key, attempt.name))
    with ThreadPoolExecutor(TABLE_READERS, "marks") as pool:
        read = partial(read_mark, packs, attempt.name, sizes=sizes)
        shards = list(pool.map(read, marked))
    return {shard.name: shard for shard in shards if shard is not None}


# ---- checks of the result ------------------------------------------------------------------------
def check_promises(card: Card, counts: dict[str, int], content: str) -> None:
    """Raise UserError if the counts or the digest of the content differ from the card."""
    promised = card.counts.by_split() if card.counts else {}
    if any(counts.get(split, 0) != number for split, number in promised.items()):
        named = " and ".join(f"{number} {split}" for split, number in promised.items())
        found = " and ".join(str(counts.get(split, 0)) for split in promised)
        raise UserError(
            f"card {card.name!r} promises {named} images, its source has {found}; fetch the data "
            "again, or fix `counts` on the card"
        )
    if card.content and card.content != content:
        raise UserError(
            f"card {card.name!r} promises content {card.content[:12]}..., its source has "
            f"{content}; fetch the data again, or fix `content` on the card if the change is meant"
        )


def _encode_index(index: pa.Table) -> bytes:
    buffer = io.BytesIO()
    pq.write_table(index, buffer, row_group_size=GROUP_ROWS, compression="zstd")
    return buffer.getvalue()
