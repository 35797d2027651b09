"""Ingest: raw data of any format becomes WebDataset tars and a Parquet index.

An image that cannot be used is listed in rejected.csv with the reason.
"""

from __future__ import annotations

import hashlib
import io
import re
import tarfile
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.data.cards import Card
from pipeline.data.csv_text import to_csv
from pipeline.data.formats import fingerprint, units
from pipeline.data.formats.base import Item, MapFn, Unit, read_at
from pipeline.data.image_checks import problem_of, to_stored
from pipeline.data.listing import SPLITS, Split, describe_left_out, nfc, printable
from workers.data.shards import INDEX, SCHEMA
from workers.errors import UserError
from workers.storage.artifact import (
    Artifact,
    Attempt,
    FileInfo,
    Manifest,
    delete_dir,
    join,
    write_bytes,
)

REVISION = 2  # raise it when the same source gives other shards
REJECTED = "rejected.csv"
MAX_KEY_PART = 255  # characters of a part of a key, as many as a file system gives a name
NAMED_IMAGES = 3  # images that an error lists

Report = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Record:
    """One image between the source and its shard.

    split, name, stem, label, problem, uri, offset, size: as in `Item`; the label is a class of the
    card. sha256, ext: of the bytes that are stored. key: in the shard. raw: see `raw_row`.
    """

    split: str
    name: str
    stem: str
    label: str | None
    problem: str | None
    sha256: str = ""
    ext: str = ""
    uri: str = ""
    offset: int = 0
    size: int | None = None
    key: str = ""
    raw: str = ""


class RejectedRow(NamedTuple):
    """A row of rejected.csv. kept: "yes" for an image that is listed and written all the same."""

    key: str
    split: str
    label: str
    reason: str
    kept: str
    source: str


class ExamineJob(NamedTuple):
    """A unit to check. staged: where bytes that cannot be read again are put."""

    unit: Unit
    card: Card
    staged: str


class ShardJob(NamedTuple):
    """A shard to write, below an attempt at the artifact `key`.

    classes: as the card lists them; the number of a class is its place in them.
    """

    root: str
    key: str
    attempt: str
    shard: str
    records: list[Record]
    max_pixels: int
    classes: tuple[str, ...]


def ingest(
    card: Card,
    root: str,
    key: str,
    map_fn: MapFn,
    extra: dict[str, Any],
    progress: Report | None = None,
) -> Manifest:
    """Write the artifact `key` below `root` and return its manifest.

    map_fn(function, items): results in order. The shards are the same bytes whatever it does in
    parallel. extra: what else goes into the manifest. Raise UserError where the source is missing,
    too much of it is bad, or it is not what the card promises; then nothing is published.
    """
    report = progress or (lambda event: None)
    attempt = Attempt(root, key)
    staged = join(root, key, f"{attempt.name}-staged")
    try:
        records = _examine_all(units(card, map_fn), card, staged, map_fn, report)
        raw_content_digest = digest_of_rows(record.raw for record in records if record.raw)
        records, rejected = select_records(card, records)
        table = _write_shards(records, card, attempt, map_fn, report)
        splits = table["split"].to_pylist()
        counts: dict[str, int] = {split: splits.count(split) for split in SPLITS}
        content = index_digest(table)
        check_promises(card, counts, content)
        attempt.write(INDEX, _to_parquet(table))
        header = ("key", "split", "class", "reason", "kept", "source")
        attempt.write(REJECTED, to_csv(header, rejected))
        reasons = Counter(row.reason.split(":")[0] for row in rejected)
        attempt.commit(
            {
                **extra,
                "kind": "ingest",
                "card": card.name,
                "classes": list(card.order()),
                "counts": counts,
                "content": content,
                "rejected": dict(sorted(reasons.items())),
                "fingerprint": fingerprint(card),
                "raw_content": raw_content_digest,
                "max_pixels": card.max_pixels,
            }
        )
    except BaseException:
        attempt.discard()
        raise
    finally:
        delete_dir(staged)
    return Artifact.need(root, key).manifest


# ---- first pass: every image is opened once ------------------------------------------------------
def _examine_all(
    units: list[Unit], card: Card, staged: str, map_fn: MapFn, report: Report
) -> list[Record]:
    jobs = [
        ExamineJob(unit, card, join(staged, f"{number:06d}")) for number, unit in enumerate(units)
    ]
    records: list[Record] = []
    for unit_records in map_fn(examine, jobs):
        records += unit_records
        report({"doing": "checking images", "images": len(records)})
    return records


def examine(job: ExamineJob) -> list[Record]:
    """Open and decode every image of a unit.

    Images that cannot be read again (Parquet rows) are put into one temporary file in the store,
    where every node can read them.
    """
    unit, card, staged = job
    class_of_nfc = {nfc(name): name for name in card.classes}
    records: list[Record] = []
    blob = io.BytesIO()
    for item, data in unit.read(*unit.args):
        record = _record_of(item, card, class_of_nfc)
        if isinstance(data, bytes):  # a hostile Parquet row may hold anything
            record = replace(record, raw=raw_row(item, data))
        if not record.problem and record.label not in card.classes:
            record = replace(record, problem=_label_problem(record.label))
        if not record.problem and data is not None:
            record = _check_image(record, card, data, staged, blob)
        records.append(record)
    if blob.tell():
        write_bytes(staged, blob.getvalue())
    return records


def _record_of(item: Item, card: Card, class_of_nfc: dict[str, str]) -> Record:
    label = item.label
    if card.source.label is None:  # images without labels, all of one class
        label = card.classes[0]
    if label is not None and label not in card.classes:
        label = class_of_nfc.get(nfc(label), printable(label))
    problem = item.problem
    if problem is not None:
        problem = printable(problem)
    return Record(
        split=item.split,
        name=printable(item.name),
        stem=item.stem,
        label=label,
        problem=problem,
        uri=item.uri,
        offset=item.offset,
        size=item.size,
    )


def _label_problem(label: str | None) -> str:
    if label is None:
        return "unlabelled: it has no label"
    return f"unlabelled: class {label!r:.80} is not on the card"


def _check_image(record: Record, card: Card, data: bytes, staged: str, blob: io.BytesIO) -> Record:
    """Return the record with the digest of what is stored, or with the image's problem.

    Bytes that cannot be read again are appended to `blob`, which becomes the file `staged`.
    """
    problem = problem_of(data, card.max_pixels, card.max_pixels_per_byte)
    if problem:
        return replace(record, problem=f"corrupt: {problem}")
    stored, extension = to_stored(data, card.max_pixels)
    record = replace(record, sha256=hashlib.sha256(stored).hexdigest(), ext=extension)
    if not record.uri:
        record = replace(record, uri=staged, offset=blob.tell(), size=len(stored))
        blob.write(stored)
    return record


def raw_row(item: Item, data: Any) -> str:
    """Return an image as the source has it: split, name, label and digest of its bytes.

    Where a row of a table holds no bytes, the digest is of what it holds.
    """
    raw = data if isinstance(data, bytes) else repr(data).encode("utf-8", "backslashreplace")
    digest = hashlib.sha256(raw).hexdigest()
    return f"{item.split}\t{nfc(item.name)}\t{nfc(str(item.label))}\t{digest}"


def raw_content(card: Card, map_fn: MapFn) -> str:
    """Return the digest of all images of a source as they are now; they are not decoded."""
    rows: list[str] = []
    for unit_rows in map_fn(_raw_rows, units(card, map_fn)):
        rows += unit_rows
    return digest_of_rows(rows)


def _raw_rows(unit: Unit) -> list[str]:
    return [raw_row(item, data) for item, data in unit.read(*unit.args) if isinstance(data, bytes)]


def digest_of_rows(rows: Iterable[str]) -> str:
    """Return the sha256 of rows, whatever their order."""
    return hashlib.sha256("\n".join(sorted(rows)).encode("utf-8", "surrogateescape")).hexdigest()


# ---- selection: which images are written, under which key, in which split ------------------------
def select_records(card: Card, records: list[Record]) -> tuple[list[Record], list[RejectedRow]]:
    """Return the records to write, in the order of the shards, and the rows of rejected.csv.

    Raise UserError where too many images are bad, or a class has none.
    """
    if not records:
        raise UserError(
            f"card {card.name!r}: its source holds no images below source.splits "
            f"({dict(card.source.splits)}); mend the splits, or the path of the source"
        )
    rejected = [_rejected(record, record.problem) for record in records if record.problem]
    check_bad_fraction(card, records)
    selected = _with_keys(card, [record for record in records if not record.problem])
    selected.sort(key=lambda r: (r.split != "train", hashlib.sha256(r.key.encode()).digest()))
    duplicates, rows = find_duplicates(card, selected)
    rejected += rows
    if card.duplicates == "drop":
        selected = [record for record in selected if record.key not in duplicates]
    if card.per_class:
        selected, surplus = limit_per_class(card.per_class.model_dump(), selected)
        reason = "left out: its class has per_class images"
        rejected += [_rejected(record, reason) for record in surplus]
    check_classes(card, records, selected)
    rejected.sort(key=lambda row: (row.split != "train", row.source, row.reason))
    return selected, rejected


def find_duplicates(card: Card, records: list[Record]) -> tuple[set[str], list[RejectedRow]]:
    """Return the keys of exact copies within a split, and rows that list all exact copies.

    An image of test that is in train too is listed, and is no duplicate within its split.
    """
    first_keys: dict[str, dict[str, str]] = {"train": {}, "test": {}}  # split -> sha256 -> key
    duplicates: set[str] = set()
    rows: list[RejectedRow] = []
    for record in sorted(records, key=lambda r: (r.split != "train", r.key)):
        keys = first_keys[record.split]
        train_keys = first_keys["train"]
        if record.sha256 in keys:
            reason = f"duplicate: of {keys[record.sha256]}"
            rows.append(_rejected(record, reason, is_kept=card.duplicates == "keep"))
            duplicates.add(record.key)
        elif record.split == "test" and record.sha256 in train_keys:
            reason = f"in train too: {train_keys[record.sha256]}"
            rows.append(_rejected(record, reason, is_kept=True))
        keys.setdefault(record.sha256, record.key)
    return duplicates, rows


def limit_per_class(
    limits: dict[str, int], records: list[Record]
) -> tuple[list[Record], list[Record]]:
    """Return the first images of each class, at most `limits[split]` of them, and the others."""
    counts: Counter[tuple[str, str | None]] = Counter()
    selected: list[Record] = []
    surplus: list[Record] = []
    for record in records:
        counts[record.split, record.label] += 1
        if counts[record.split, record.label] <= limits[record.split]:
            selected.append(record)
        else:
            surplus.append(record)
    return selected, surplus


def check_bad_fraction(card: Card, records: list[Record]) -> None:
    """Raise UserError where more images are corrupt or unlabelled than the card allows."""
    images = [r for r in records if not (r.problem or "").startswith("other file")]
    bad = [record for record in images if record.problem]
    if len(bad) <= card.max_bad_fraction * len(images):
        return
    examples = "; ".join(f"{record.name} ({record.problem})" for record in bad[:NAMED_IMAGES])
    more = "; ..." if len(bad) > NAMED_IMAGES else ""
    raise UserError(
        f"card {card.name!r}: {len(bad)} of {len(images)} images are corrupt or unlabelled, "
        f"and max_bad_fraction allows a share of {card.max_bad_fraction}: {examples}{more}; mend "
        "or remove them, or raise max_bad_fraction on the card if they are meant to be left out"
    )


def check_classes(card: Card, records: list[Record], selected: list[Record]) -> None:
    """Raise UserError where a class has no train images, or where there are no test images."""
    for split in SPLITS:
        present = {record.label for record in selected if record.split == split}
        missing = sorted(set(card.classes) - present)
        if split == "train":
            # a card without train is there to be tested on
            is_complete = not missing or "train" not in card.source.splits
        else:
            is_complete = card.source.label is None or len(missing) < len(card.classes)
        if not is_complete:
            raise _missing_images(card, records, split, missing)


def _missing_images(
    card: Card, records: list[Record], split: Split, missing: list[str]
) -> UserError:
    problem = "there are no test images"
    if split == "train":
        problem = f"class {missing[0]!r} has no train images"
    left_out: list[tuple[str, str]] = []
    for record in records:
        if record.split != split or not record.problem:
            continue
        if not record.problem.startswith("unlabelled"):
            left_out.append((record.name, record.problem))
    return UserError(
        f"card {card.name!r}: {problem} in {card.source.path or card.source.name}"
        f"{describe_left_out(left_out)}; add them, mend `classes` and source.splits of the card, "
        "or set test_fraction to hold some out"
    )


def _with_keys(card: Card, records: list[Record]) -> list[Record]:
    """Return the records with their keys `split/class/stem`.

    Keys are unique, and independent of the other classes. Test images are held out of train where
    the source has none and the card asks for it.
    """
    named = [
        replace(record, key=f"{key_part(record.label or '')}/{key_part(record.stem)}")
        for record in records
    ]
    records = _with_unique_keys(named)
    if card.test_fraction and not any(record.split == "test" for record in records):
        keys = [record.key for record in records]
        table = pa.table({"key": keys, "class": [record.label for record in records]})
        from workers.data.rows import hold_out  # start-up time: imports torch

        _, held_out = hold_out(table, card.test_fraction)
        test_keys = set(held_out["key"].to_pylist())
        for index, record in enumerate(records):
            split = "test" if record.key in test_keys else "train"
            records[index] = replace(record, split=split)
    return [replace(record, key=f"{record.split}/{record.key}") for record in records]


def _with_unique_keys(records: list[Record]) -> list[Record]:
    """Return the records with a hash behind every key that occurs more than once in a split.

    The hash is of the source's name. Where names are the same too (two archives may have one name,
    in two folders), the number of the image follows.
    """
    counts = Counter((record.split, record.key) for record in records)
    numbers: Counter[tuple[str, str]] = Counter()
    unique = []
    for record in records:
        if counts[record.split, record.key] > 1:
            digest = hashlib.sha256(nfc(record.name).encode()).hexdigest()
            key = f"{record.key}-{digest[:12]}"
            numbers[record.split, key] += 1
            number = numbers[record.split, key]
            if number > 1:
                key = f"{key}-{number}"
            record = replace(record, key=key)
        unique.append(record)
    return unique


def key_part(text: str) -> str:
    """Return a name without dots, slashes and blanks, bounded, and of one Unicode form.

    WebDataset ends a key at the first dot.
    """
    return re.sub(r"[^\w\-]+", "_", nfc(text))[:MAX_KEY_PART] or "_"


def _rejected(record: Record, reason: str | None, is_kept: bool = False) -> RejectedRow:
    kept = "yes" if is_kept else "no"
    return RejectedRow(
        key=record.key,
        split=record.split,
        label=record.label or "",
        reason=reason or "",
        kept=kept,
        source=record.name,
    )


# ---- second pass: the shards ---------------------------------------------------------------------
def _write_shards(
    records: list[Record], card: Card, attempt: Attempt, map_fn: MapFn, report: Report
) -> pa.Table:
    """Write all shards and return the index."""
    jobs: list[ShardJob] = []
    for split in SPLITS:
        split_records = [record for record in records if record.split == split]
        for number, start in enumerate(range(0, len(split_records), card.shard_images)):
            shard = f"{split}-{number:05d}.tar"
            part = split_records[start : start + card.shard_images]
            jobs.append(
                ShardJob(
                    attempt.root,
                    attempt.key,
                    attempt.name,
                    shard,
                    part,
                    card.max_pixels,
                    card.classes,
                )
            )
    tables: list[pa.Table] = []
    for job, (info, rows) in zip(jobs, map_fn(write_shard, jobs), strict=True):
        attempt.files[job.shard] = info
        tables.append(pa.Table.from_pylist(rows, SCHEMA))
        num_written = sum(map(len, tables))
        report({"doing": "writing shards", "images": num_written, "of": len(records)})
    return pa.concat_tables(tables).combine_chunks()


def write_shard(job: ShardJob) -> tuple[FileInfo, list[dict[str, Any]]]:
    """Write one tar with `key.ext`, `key.cls` and `key.txt` of each record.

    `.cls` holds the number of the class and `.txt` its name, as WebDataset's decoders expect.
    Return size and digest of the file, and its rows of the index. Raise UserError where a source
    file changed since it was examined.
    """
    numbers = {name: number for number, name in enumerate(job.classes)}
    buffer = io.BytesIO()
    rows: list[dict[str, Any]] = []
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for record in job.records:
            data, extension = _read_again(record, job.max_pixels)
            offset = _add_member(tar, f"{record.key}.{extension}", data)
            assert record.label is not None  # `examine` gives a record without one a problem
            _add_member(tar, f"{record.key}.cls", b"%d" % numbers[record.label])
            _add_member(tar, f"{record.key}.txt", record.label.encode())
            rows.append(
                {
                    "split": record.split,
                    "key": record.key,
                    "class": record.label,
                    "shard": job.shard,
                    "offset": offset,
                    "bytes": len(data),
                    "sha256": record.sha256,
                    "ext": extension,
                }
            )
    attempt = Attempt(job.root, job.key, job.attempt)
    return attempt.write(job.shard, buffer.getvalue()), rows


def _read_again(record: Record, max_pixels: int) -> tuple[bytes, str]:
    """Return what is stored of an image, and its extension."""
    try:
        source_bytes = read_at(record.uri, record.offset, record.size)
        data, extension = to_stored(source_bytes, max_pixels)
    except UserError:
        raise
    except (OSError, ValueError):  # no image any more
        data = b""
        extension = record.ext
    if hashlib.sha256(data).hexdigest() != record.sha256:
        raise UserError(
            f"{record.name} changed while it was ingested; "
            "run the same command again when nobody writes there"
        )
    return data, extension


def _add_member(tar: tarfile.TarFile, name: str, data: bytes) -> int:
    """Add a member without time or owner, and return the offset of its data.

    So the same images give the same bytes.
    """
    member = tarfile.TarInfo(name)
    member.size = len(data)
    member.mtime = 0
    member.mode = 0o644
    tar.addfile(member, io.BytesIO(data))
    blocks = -(-len(data) // tarfile.BLOCKSIZE)
    return tar.offset - blocks * tarfile.BLOCKSIZE


# ---- what was written ----------------------------------------------------------------------------
def index_digest(table: pa.Table) -> str:
    """Return the sha256 of the sorted rows (split, key, class, sha256), whatever their shards."""
    columns = (table[name].to_pylist() for name in ("split", "key", "class", "sha256"))
    rows = sorted("\t".join(row) for row in zip(*columns, strict=True))
    return hashlib.sha256("\n".join(rows).encode()).hexdigest()


def check_promises(card: Card, counts: dict[str, int], content: str) -> None:
    """Raise UserError where the card names other counts, or another digest of the content."""
    if card.counts and card.counts.model_dump() != counts:
        raise UserError(
            f"card {card.name!r} promises {card.counts.train} train and {card.counts.test} test "
            f"images, its source has {counts['train']} and {counts['test']}; fetch the data again, "
            "or mend `counts` on the card"
        )
    if card.content and card.content != content:
        raise UserError(
            f"card {card.name!r} promises content {card.content[:12]}..., its source has "
            f"{content}; fetch the data again, or mend `content` on the card if the change is meant"
        )


def _to_parquet(table: pa.Table) -> bytes:
    buffer = io.BytesIO()
    pq.write_table(table, buffer, compression="zstd")
    return buffer.getvalue()
