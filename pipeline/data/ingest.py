"""Ingest: raw data of any format becomes WebDataset tars and a Parquet index; what cannot be used
is listed with a reason."""

from __future__ import annotations

import hashlib
import io
import re
import struct
import tarfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.data.cards import MAX_PIXELS_PER_BYTE, Card, nfc
from pipeline.data.csv_text import to_csv
from pipeline.data.formats import (
    Item,
    MapFn,
    Unit,
    fingerprint,
    left_out,
    look,
    png,
    printable,
    read_at,
    safe,
    units,
)
from workers.data.rows import hold_out
from workers.data.shards import INDEX, SCHEMA, open_image, to_rgb
from workers.errors import UserError
from workers.storage.artifact import Artifact, Attempt, delete_dir, join, write_bytes

__all__ = ["REVISION", "fingerprint", "ingest", "look"]

REVISION = 1  # raise it when the same source gives other shards
KEPT = {
    "JPEG": "jpg",
    "MPO": "jpg",
    "PNG": "png",
    "WEBP": "webp",
}  # formats whose bytes are kept as they are
SMALL_PIXELS = 1_000_000  # an image of no more may be of one colour, in as few bytes as it takes
# first column, row; steps
ADAM7 = (
    (0, 0, 8, 8),
    (4, 0, 8, 8),
    (0, 4, 4, 8),
    (2, 0, 4, 4),
    (0, 2, 2, 4),
    (1, 0, 2, 2),
    (0, 1, 1, 2),
)
CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}  # of PNG's colour types
PIECE = 1 << 20  # bytes that are inflated at a time
REJECTED = "rejected.csv"

Report = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Record:
    """One image on its way into a shard: where it came from, what was found, where its bytes can be
    read again."""

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
    raw: str = ""  # see `raw_row`


def ingest(
    card: Card,
    root: str,
    key: str,
    map_fn: MapFn,
    extra: dict[str, Any],
    progress: Report | None = None,
) -> dict[str, Any]:
    """Writes the artifact `key` below `root` and returns its manifest.

    map_fn(fn, items): results in order; the shards are the same bytes whatever it does in parallel.
    Raises UserError where the source is missing, too much of it is bad, or it is not what the card
    promises; then nothing is published.
    """
    report = progress or (lambda event: None)
    attempt = Attempt(root, key)
    staged = join(root, key, f"{attempt.name}-staged")
    try:
        records = _examined(units(card, map_fn), card, staged, map_fn, report)
        raw = digest_of_rows(r.raw for r in records if r.raw)
        records, rejected = judge(card, records)
        table = _written(records, card, attempt, map_fn, report)
        counts = {split: table["split"].to_pylist().count(split) for split in ("train", "test")}
        content = content_of(table)
        check_promises(card, counts, content)
        attempt.write(INDEX, _parquet(table))
        attempt.write(
            REJECTED, to_csv(("key", "split", "class", "reason", "kept", "source"), rejected)
        )
        attempt.commit(
            {
                **extra,
                "kind": "ingest",
                "card": card.name,
                "classes": list(card.order()),
                "counts": counts,
                "content": content,
                "rejected": dict(sorted(Counter(row[3].split(":")[0] for row in rejected).items())),
                "fingerprint": fingerprint(card),
                "raw_content": raw,
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
def _examined(
    parts: list[Unit], card: Card, staged: str, map_fn: MapFn, report: Report
) -> list[Record]:
    jobs = [(unit, card, join(staged, f"{i:06d}")) for i, unit in enumerate(parts)]
    records: list[Record] = []
    for found in map_fn(examine, jobs):
        records += found
        report({"doing": "checking images", "images": len(records)})
    return records


def examine(job: tuple[Unit, Card, str]) -> list[Record]:
    """Opens and decodes every image of a unit. Images that cannot be read again at random (Parquet
    rows) are put into one temporary file in the store, where every node finds them."""
    unit, card, staged = job
    records, blob = [], io.BytesIO()
    named = {nfc(name): name for name in card.classes}
    for item, data in unit.read(*unit.args):
        label = item.label if card.source.label is not None else card.classes[0]
        if label is not None and label not in card.classes:
            label = named.get(nfc(label), printable(label))
        record = Record(
            item.split,
            printable(item.name),
            item.stem,
            label,
            item.problem and printable(item.problem),
            uri=item.uri,
            offset=item.offset,
            size=item.size,
        )
        if isinstance(data, bytes):  # a hostile Parquet row may hold anything
            record = replace(record, raw=raw_row(item, data))
        if not record.problem and label not in card.classes:
            why = "it has no label" if label is None else f"class {label!r:.80} is not on the card"
            record = replace(record, problem=f"unlabelled: {why}")
        if not record.problem and data is not None:
            problem = problem_of(data, card.max_pixels, card.max_pixels_per_byte)
            if problem:
                record = replace(record, problem=f"corrupt: {problem}")
            else:
                stored, ext = to_stored(data, card.max_pixels)
                record = replace(record, sha256=hashlib.sha256(stored).hexdigest(), ext=ext)
                if not item.uri:
                    record = replace(record, uri=staged, offset=blob.tell(), size=len(stored))
                    blob.write(stored)
        records.append(record)
    if blob.tell():
        write_bytes(staged, blob.getvalue())
    return records


def raw_row(item: Item, data: Any) -> str:
    """What an image of a source is before anything is made of it: split, name, label and digest of
    its bytes, or of whatever a row of a table holds in their place."""
    raw = data if isinstance(data, bytes) else repr(data).encode("utf-8", "backslashreplace")
    return (
        f"{item.split}\t{nfc(item.name)}\t{nfc(str(item.label))}\t{hashlib.sha256(raw).hexdigest()}"
    )


def raw_content(card: Card, map_fn: MapFn) -> str:
    """Digest of all images of a source as they are now. They are read, and not decoded."""
    return digest_of_rows(row for rows in map_fn(_raw_rows, units(card, map_fn)) for row in rows)


def _raw_rows(unit: Unit) -> list[str]:
    return [raw_row(item, data) for item, data in unit.read(*unit.args) if isinstance(data, bytes)]


def digest_of_rows(rows: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(sorted(rows)).encode("utf-8", "surrogateescape")).hexdigest()


def problem_of(data: bytes, max_pixels: int, per_byte: int = MAX_PIXELS_PER_BYTE) -> str | None:
    """Why the bytes are no usable image; None where they decode to the last pixel. per_byte: most
    pixels that a byte may stand for."""
    try:
        image = open_image(data, max_pixels)
        width, height = image.size
        if width * height > max(SMALL_PIXELS, per_byte * len(data)):
            return (
                f"{width} x {height} pixels in {len(data)} bytes are more than "
                f"max_pixels_per_byte = {per_byte}; if they are "
                "meant, raise it on the card"
            )
        image.verify()
        if image.format == "PNG" and not all_rows(data):
            return "image file is truncated (its data ends before its last row)"
        open_image(data, max_pixels).load()
    except MemoryError:
        raise
    except Exception as error:  # Pillow's plugins raise almost anything on damaged files
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        return (
            "not an image"
            if "cannot identify" in text
            else re.sub(r"\s*<[^>]*at 0x[0-9a-f]+>", "", text)
        )
    return None


def all_rows(data: bytes) -> bool:
    """Whether the compressed data of a sound PNG holds as many bytes as its header says; Pillow
    leaves rows that are not there black, without a word. Raises zlib.error where it is no such
    data. Source: PNG specification (ISO/IEC 15948), sections 7 to 10."""
    width, height, bits, color, _, _, interlaced = struct.unpack(">IIBBBBB", data[16:29])
    passes = ADAM7 if interlaced else ((0, 0, 1, 1),)
    left = 0
    for x, y, across, down in passes:
        columns, rows = -(-(width - x) // across), -(-(height - y) // down)
        if columns > 0 and rows > 0:
            left += rows * (1 + (columns * bits * CHANNELS[color] + 7) // 8)
    inflate, at = zlib.decompressobj(), 8
    while left > 0 and at + 12 <= len(data):
        size, kind = struct.unpack(">I4s", data[at : at + 8])
        body = data[at + 8 : at + 8 + size] if kind == b"IDAT" else b""
        at += 12 + size
        while body and left > 0 and not inflate.eof:
            left -= len(inflate.decompress(body, PIECE))
            body = inflate.unconsumed_tail
    return left <= 0


def to_stored(data: bytes, max_pixels: int) -> tuple[bytes, str]:
    """The bytes that go into the shard, and their extension: the original ones, or PNG where few
    programs read them."""
    image = open_image(data, max_pixels)
    ext = KEPT.get(image.format or "")
    return (data, ext) if ext else (png(to_rgb(image)), "png")


# ---- judgement: what is kept, under which key, in which split ------------------------------------
def judge(card: Card, records: list[Record]) -> tuple[list[Record], list[list[str]]]:
    """The records to write, in the order of the shards, and the rows of rejected.csv."""
    if not records:
        raise UserError(
            f"card {card.name!r}: its source holds no images below source.splits "
            f"({dict(card.source.splits)}); mend the "
            "splits, or the path of the source"
        )
    rejected = [_row(r, r.problem, False) for r in records if r.problem]
    check_share(card, records)
    kept = _keyed(card, [r for r in records if not r.problem])
    kept.sort(key=lambda r: (r.split != "train", hashlib.sha256(r.key.encode()).digest()))
    first: dict[str, dict[str, str]] = {"train": {}, "test": {}}
    dropped = set()
    for r in sorted(kept, key=lambda r: (r.split != "train", r.key)):
        if r.sha256 in first[r.split]:
            rejected.append(
                _row(r, f"duplicate: of {first[r.split][r.sha256]}", card.duplicates == "keep")
            )
            if card.duplicates == "drop":
                dropped.add(r.key)
        elif r.split == "test" and r.sha256 in first["train"]:
            rejected.append(_row(r, f"in train too: {first['train'][r.sha256]}", True))
        first[r.split].setdefault(r.sha256, r.key)
    kept = [r for r in kept if r.key not in dropped]
    if card.per_class:
        kept, beyond = at_most(card.per_class.model_dump(), kept)
        rejected += [_row(r, "left out: its class has per_class images", False) for r in beyond]
    for split in ("train", "test"):
        if split == "train" and split not in card.source.splits:
            continue  # to be tested on alone
        missing = sorted(set(card.classes) - {r.label for r in kept if r.split == split})
        if missing and (
            split == "train"
            or (card.source.label is not None and len(missing) == len(card.classes))
        ):
            what = (
                f"class {missing[0]!r} has no train images"
                if split == "train"
                else "there are no test images"
            )
            out = [
                r
                for r in records
                if r.problem and r.split == split and not r.problem.startswith("unlabelled")
            ]
            raise UserError(
                f"card {card.name!r}: {what} in "
                f"{card.source.path or card.source.name}{left_out((r.name, r.problem) for r in out)}; "
                "add them, mend `classes` and source.splits of the card, or set test_fraction "
                "to hold some out"
            )
    return kept, sorted(rejected, key=lambda row: (row[1] != "train", row[5], row[3]))


def at_most(counts: dict[str, int], records: list[Record]) -> tuple[list[Record], list[Record]]:
    """The first images of each class, so many of each split, and the others."""
    often: Counter[tuple[str, str | None]] = Counter()
    kept, beyond = list[Record](), list[Record]()
    for r in records:
        often[r.split, r.label] += 1
        (kept if often[r.split, r.label] <= counts[r.split] else beyond).append(r)
    return kept, beyond


def check_share(card: Card, records: list[Record]) -> None:
    """Raises UserError where more images are corrupt or unlabelled than the card allows."""
    images = [r for r in records if not (r.problem or "").startswith("other file")]
    bad = [r for r in images if r.problem]
    if len(bad) > card.max_bad_fraction * len(images):
        some = "; ".join(f"{r.name} ({r.problem})" for r in bad[:3])
        raise UserError(
            f"card {card.name!r}: {len(bad)} of {len(images)} images are corrupt or unlabelled, "
            "and max_bad_fraction "
            f"allows a share of {card.max_bad_fraction}: "
            f"{some}{'; ...' if len(bad) > 3 else ''}; mend or remove them, "
            "or raise max_bad_fraction on the card if they are meant to be left out"
        )


def _keyed(card: Card, records: list[Record]) -> list[Record]:
    """Keys `split/class/stem`, unique, and independent of the other classes; test images held out
    where there are none."""
    records = _unique([replace(r, key=f"{safe(r.label or '')}/{safe(r.stem)}") for r in records])
    if card.test_fraction and not any(r.split == "test" for r in records):
        table = pa.table({"key": [r.key for r in records], "class": [r.label for r in records]})
        test = set(hold_out(table, card.test_fraction)[1]["key"].to_pylist())
        records = [replace(r, split="test" if r.key in test else "train") for r in records]
    return [replace(r, key=f"{r.split}/{r.key}") for r in records]


def _unique(records: list[Record]) -> list[Record]:
    """The same with a hash of the source's name behind every key that is there more than once in a
    split, and of the number of the image behind those whose names are the same too (two archives
    may have one name, in two folders)."""
    often = Counter((r.split, r.key) for r in records)
    seen: Counter[tuple[str, str]] = Counter()
    found = []
    for r in records:
        if often[r.split, r.key] > 1:
            hashed = f"{r.key}-{hashlib.sha256(nfc(r.name).encode()).hexdigest()[:12]}"
            seen[r.split, hashed] += 1
            r = replace(
                r, key=hashed if seen[r.split, hashed] == 1 else f"{hashed}-{seen[r.split, hashed]}"
            )
        found.append(r)
    return found


def _row(record: Record, reason: str | None, kept: bool) -> list[str]:
    return [
        record.key,
        record.split,
        record.label or "",
        reason or "",
        "yes" if kept else "no",
        record.name,
    ]


# ---- second pass: the shards ---------------------------------------------------------------------
def _written(
    records: list[Record], card: Card, attempt: Attempt, map_fn: MapFn, report: Report
) -> pa.Table:
    """Writes all shards; the index."""
    jobs: list[tuple[str, str, str, str, list[Record], int]] = []
    for split in ("train", "test"):
        part = [r for r in records if r.split == split]
        for number, start in enumerate(range(0, len(part), card.shard_images)):
            jobs.append(
                (
                    attempt.root,
                    attempt.key,
                    attempt.name,
                    f"{split}-{number:05d}.tar",
                    part[start : start + card.shard_images],
                    card.max_pixels,
                )
            )
    tables: list[pa.Table] = []
    for job, (info, rows) in zip(jobs, map_fn(write_shard, jobs), strict=True):
        attempt.files[job[3]] = info
        tables.append(pa.Table.from_pylist(rows, SCHEMA))
        report({"doing": "writing shards", "images": sum(map(len, tables)), "of": len(records)})
    return pa.concat_tables(tables).combine_chunks()


def write_shard(
    job: tuple[str, str, str, str, list[Record], int],
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """One tar: `key.ext` and `key.cls` of each record. Returns size and digest of the file, and its
    rows of the index. Raises UserError where a source file changed since it was examined."""
    root, key, attempt, shard, records, max_pixels = job
    buffer, rows = io.BytesIO(), []
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for r in records:
            try:
                data, ext = to_stored(read_at(r.uri, r.offset, r.size), max_pixels)
            except (OSError, ValueError) as error:
                if isinstance(error, UserError):
                    raise
                data, ext = b"", r.ext
            if hashlib.sha256(data).hexdigest() != r.sha256:
                raise UserError(
                    f"{r.name} changed while it was ingested; run the same command again when "
                    "nobody writes there"
                )
            offset = _add(tar, f"{r.key}.{ext}", data)
            _add(tar, f"{r.key}.cls", (r.label or "").encode())
            rows.append(
                {
                    "split": r.split,
                    "key": r.key,
                    "class": r.label,
                    "shard": shard,
                    "offset": offset,
                    "bytes": len(data),
                    "sha256": r.sha256,
                    "ext": ext,
                }
            )
    return Attempt(root, key, attempt).write(shard, buffer.getvalue()), rows


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> int:
    """Adds a member without time or owner, so that the same images give the same bytes. Returns
    where its data starts."""
    member = tarfile.TarInfo(name)
    member.size, member.mtime, member.mode = len(data), 0, 0o644
    tar.addfile(member, io.BytesIO(data))
    return tar.offset - -(-len(data) // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE


# ---- what was written ----------------------------------------------------------------------------
def content_of(table: pa.Table) -> str:
    """sha256 over what the images are, whatever shards they lie in: the sorted rows (split, key,
    class, sha256)."""
    columns = (table[name].to_pylist() for name in ("split", "key", "class", "sha256"))
    return hashlib.sha256(
        "\n".join(sorted("\t".join(row) for row in zip(*columns, strict=True))).encode()
    ).hexdigest()


def check_promises(card: Card, counts: dict[str, int], content: str) -> None:
    """Raises UserError where the card names counts or a content digest and others were found."""
    if card.counts and card.counts.model_dump() != counts:
        raise UserError(
            f"card {card.name!r} promises {card.counts.train} train and {card.counts.test} test "
            "images, its source has "
            f"{counts['train']} and {counts['test']}; fetch the data again, or mend `counts` on "
            "the card"
        )
    if card.content and card.content != content:
        raise UserError(
            f"card {card.name!r} promises content {card.content[:12]}..., its source has "
            f"{content}; fetch the data "
            "again, or mend `content` on the card if the change is meant"
        )


def _parquet(table: pa.Table) -> bytes:
    buffer = io.BytesIO()
    pq.write_table(table, buffer, compression="zstd")
    return buffer.getvalue()
