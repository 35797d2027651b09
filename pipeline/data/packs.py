"""Packs: intermediate files with the checked images of a source, from which shards are written.

Each unit of a source is read once. Its images are stored one after another in packs, in the likely
order of the shards, so that a shard usually needs only one range of each pack. The table of the
unit's rows is written last. A unit with a table is finished and is not read again.
"""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from pyarrow import fs

from pipeline.data.cards import Card
from pipeline.data.formats.base import Item, Unit, class_names, read_items
from pipeline.data.image_checks import CheckedImage, check_image, encode_for_storage
from pipeline.data.labels import NUMBER
from pipeline.data.names import key_part, nfc, printable
from workers.data.decoding import ImageLimits
from workers.data.range_files import ObjectFile
from workers.errors import UserError
from workers.storage import parquet
from workers.storage.artifact import is_local, join, read_bytes, resolve, write_bytes

PACK_BYTES = 256 << 20  # a pack is written when its images have this size
PACK_ROWS = 1 << 16  # or when it has this number of rows
TABLE_SUFFIX = ".parquet"
RANGE_GAP = 64 << 10  # maximum unneeded bytes between two images that are read together
RANGE_BYTES = 8 << 20  # bytes of one request, unless a single image is larger
LEFT_OUT = "left out by the card"  # problem of images in `without_classes` or `without_images`
READERS = 8  # concurrent requests to a bucket
_TEXT = ("split", "name", "label", "problem", "key", "sha256", "ext", "pack")
# One row per image, in the order of the source. split, name, label, problem: as in `Item`, but the
# label is a class of the card if there is one. key: the key without the split. sha256, ext: digest
# and extension of the stored bytes. pack, offset, bytes: location of the stored bytes; null for an
# image with a problem. raw: see `raw_row`. blank: "yes" for an image with one colour, "became" if
# its original values differ. top: largest value of a 16-bit image. stamp: see `Item`.
ROWS = pa.schema(
    [
        *((name, pa.large_string()) for name in _TEXT),
        ("offset", pa.int64()),
        ("bytes", pa.int64()),
        ("raw", pa.large_binary()),
        ("blank", pa.large_string()),
        ("top", pa.float64()),
        ("stamp", pa.large_string()),
    ]
)


class DamagedPack(UserError):
    """A pack is missing, or its content has changed."""


class UnitJob(NamedTuple):
    """A unit to check and to pack.

    Attributes:
        unit: The unit.
        card: Card of the source.
        packs: Folder of packs.
        name: Name of the unit's table and packs.
        earlier: Rows of images of an earlier ingest that may have the same bytes as images of the
            unit.
    """

    unit: Unit
    card: Card
    packs: str
    name: str
    earlier: pa.Table | None = None


class StoredImage(NamedTuple):
    """The stored form of an image, or the reason why it is not used.

    See ROWS for `blank` and `top`.
    """

    problem: str | None
    sha256: str = ""
    ext: str = ""
    blank: str = ""
    top: float | None = None


class PackedRange(NamedTuple):
    """The location of an image in a pack: `bytes` is the number of bytes from `offset`."""

    pack: str
    offset: int
    bytes: int


def hash_unit(unit: Unit) -> str:
    """Return a name for a unit: a hash of the function that reads it and of its arguments."""
    text = repr((unit.read.__module__, unit.read.__qualname__, unit.args))
    digest = hashlib.sha256(text.encode("utf-8", "backslashreplace"))
    return f"unit-{digest.hexdigest()[:24]}"


# ---- writing -------------------------------------------------------------------------------------
def write_unit(job: UnitJob) -> pa.Table:
    """Open and decode every image of a unit, write its packs and its table, and return the table.

    About two packs are in memory at most: the images of a pack, and the pack made of them.
    """
    writer = _PackWriter(job)
    for item, data in job.unit.read(*job.unit.args):
        writer.add(item, data)
    table = writer.finish()
    sink = io.BytesIO()
    pq.write_table(table, sink, compression="zstd")
    write_bytes(join(job.packs, job.name + TABLE_SUFFIX), sink.getvalue())
    return table


class ImageChecker:
    """Creates the rows of a card's images, and checks the images."""

    def __init__(self, card: Card):
        self.card = card
        self.names = class_names(card)
        self.classes = frozenset(card.classes)
        self.classes_left_out = frozenset(map(nfc, card.without_classes))
        self.images_left_out = card.images_left_out()
        self.limits = ImageLimits(card.max_pixels, card.source.range)

    def is_left_out(self, item: Item) -> bool:
        """Return whether the card leaves out an image, by its class or by its name."""
        if not self.classes_left_out and not self.images_left_out:
            return False
        if item.problem is not None and item.problem.startswith("other file"):
            return False
        if nfc(self.label(item) or "") in self.classes_left_out:
            return True
        return nfc(printable(item.name)) in self.images_left_out

    def label(self, item: Item) -> str | None:
        """Return the class of an image, or its label if the card has no such class."""
        if self.card.source.label is None:  # images without labels, all of one class
            return self.card.classes[0]
        return self.names.find(item.label)

    def raw_label(self, item: Item) -> str | None:
        """Return the label for `raw_row`.

        It is the result of `label`, or for a card without labels the label of the item itself.
        """
        if self.card.source.label is None:
            return None if item.label is None else str(item.label)
        return self.names.find(item.label)

    def row(self, item: Item) -> dict[str, Any]:
        """Return the row of an image before its bytes are known."""
        label = self.label(item)
        if label is not None and label not in self.classes:
            label = printable(label)
        problem = item.problem
        if self.is_left_out(item):
            problem = LEFT_OUT
        elif problem is not None:
            problem = printable(problem)
        elif label not in self.classes:
            problem = self._label_problem(label)
        return {
            "split": item.split,
            "name": printable(item.name),
            "label": label,
            "problem": problem,
            "key": f"{key_part(label or '')}/{key_part(item.stem)}",
            "stamp": item.stamp or None,
        }

    def mark_left_out(self, rows: pa.Table) -> pa.Table:
        """Set the problem of the rows that the card leaves out. `rows` has the columns of ROWS."""
        if not self.classes_left_out and not self.images_left_out:
            return rows
        columns = (rows[name].to_pylist() for name in ("label", "name", "problem"))
        problems = [
            LEFT_OUT
            if not (problem or "").startswith("other file")
            and (nfc(label or "") in self.classes_left_out or nfc(name) in self.images_left_out)
            else problem
            for label, name, problem in zip(*columns, strict=True)
        ]
        column = pa.array(problems, pa.large_string())
        return rows.set_column(rows.schema.get_field_index("problem"), "problem", column)

    def _label_problem(self, label: str | None) -> str:
        if label is None:
            return "unlabelled: it has no label"
        text = label.removeprefix(NUMBER)
        near = [name for name in self.card.classes if name.casefold() == text.casefold()]
        hint = f", and {near[0]!r:.80} is" if near else ""
        return f"unlabelled: class {text!r:.80} is not on the card{hint}"

    def check(self, data: bytes) -> CheckedImage:
        """Decode and check an image. A problem begins with `corrupt`."""
        checked = check_image(data, self.limits, self.card.max_pixels_per_byte)
        if checked.problem is None:
            return checked
        problem = checked.problem.encode("utf-8", "backslashreplace").decode()
        return checked._replace(problem=f"corrupt: {problem}")


def mark_left_out(units: Sequence[Unit], card: Card) -> list[Unit]:
    """Set the problem of images that a card excludes, so that they are not read.

    Units whose images cannot be read one by one are not changed; `ImageChecker` handles them.
    """
    if not card.without_classes and not card.without_images:
        return [*units]
    checker = ImageChecker(card)
    marked: list[Unit] = []
    for unit in units:
        if unit.read is read_items:
            items = [
                replace(item, problem=LEFT_OUT) if checker.is_left_out(item) else item
                for item in unit.args[0]
            ]
            unit = unit._replace(args=(items,))
        marked.append(unit)
    return marked


def collect_notes(checked: CheckedImage) -> dict[str, Any]:
    """Return the columns `blank` and `top` of ROWS for an image."""
    blank = "yes" if checked.is_blank else ""
    return {"blank": "became" if checked.became_blank else blank, "top": checked.top}


class _PackWriter:
    """Checks the images of one unit, and collects its rows and packs."""

    def __init__(self, job: UnitJob):
        self.job = job
        self.card = job.card
        self.checker = ImageChecker(job.card)
        self.num_packs = 0
        self.parts: list[pa.Table] = []
        rows = [] if job.earlier is None else job.earlier.to_pylist()
        self.earlier = {read_raw_digest(row["raw"]): row for row in rows if row["pack"]}
        self._clear()

    def _clear(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.checked: dict[str, StoredImage] = {}  # sha256 of the source bytes -> result
        # sha256 of the stored bytes -> likely rank, stored bytes
        self.images: dict[str, tuple[tuple[str, str, str], bytes]] = {}
        self.num_bytes = 0

    def add(self, item: Item, data: Any) -> None:
        """Add one image of the source. `data` is bytes, or any value from a malformed table."""
        row = self.checker.row(item)
        row["stamp"] = row["stamp"] or self.job.unit.stamp or None
        if isinstance(data, bytes):
            raw_digest = hashlib.sha256(data).hexdigest()
            row["raw"] = raw_row(item, self.checker.raw_label(item), raw_digest)
            if row["problem"] is None:
                self._add_image(row, data, raw_digest)
        self.rows.append(row)
        if self.num_bytes >= PACK_BYTES or len(self.rows) >= PACK_ROWS:
            self._flush()

    def _add_image(self, row: dict[str, Any], data: bytes, raw_digest: str) -> None:
        """Check an image and store it, unless this pack already contains the same bytes.

        Therefore a table that repeats one value a million times does not create a pack with a
        million images. An image with the bytes of an earlier ingested image is not decoded: for
        example, a file can have a new modification time and the same bytes.
        """
        earlier = self.earlier.get(raw_digest)
        if earlier is not None:
            row |= {name: earlier[name] for name in (*StoredImage._fields, *PackedRange._fields)}
            return
        image = self.checked.get(raw_digest)
        if image is None:
            image = self._check(row, data)
            self.checked[raw_digest] = image
        row |= image._asdict()

    def _check(self, row: Mapping[str, Any], data: bytes) -> StoredImage:
        checked = self.checker.check(data)
        if checked.problem is not None:
            return StoredImage(checked.problem)
        stored, extension = encode_for_storage(data, self.checker.limits)
        digest = hashlib.sha256(stored).hexdigest()
        if digest not in self.images:
            self.images[digest] = (self._likely_rank(row, digest), stored)
            self.num_bytes += len(stored)
        return StoredImage(None, digest, extension, **collect_notes(checked))

    def _likely_rank(self, row: Mapping[str, Any], digest: str) -> tuple[str, str, str]:
        """Return a sort key that approximates the order in the shards.

        The exact order is not known yet: a key can still get a suffix, and the choice of held-out
        images depends on all images.
        """
        split = row["split"]
        share = int.from_bytes(hashlib.sha256(row["key"].encode()).digest()[:4]) / 2**32
        if split == "train" and share < self.card.test_fraction:
            split = "test"
        return split, row["label"], digest

    def _flush(self) -> None:
        ranges: dict[str, PackedRange] = {}
        if self.images:
            ranges = self._write_pack()
        for row in self.rows:
            if row["problem"] is None and row.get("sha256") and not row.get("pack"):
                row["pack"], row["offset"], row["bytes"] = ranges[row["sha256"]]
        self.parts.append(pa.Table.from_pylist(self.rows, ROWS))
        self._clear()

    def _write_pack(self) -> dict[str, PackedRange]:
        """Write the pack and return the range of each image in it, by its digest.

        The name contains the digest of the pack. If another process packs the same unit at the same
        time, it writes the same bytes or uses another name.
        """
        images = sorted(self.images.items(), key=lambda entry: entry[1][0])
        self.images = {}
        data = b"".join([stored for _, (_, stored) in images])
        digest = hashlib.sha256(data).hexdigest()[:16]
        pack = f"{self.job.name}-{self.num_packs:03d}-{digest}.pack"
        ranges: dict[str, PackedRange] = {}
        offset = 0
        for sha256, (_, stored) in images:
            ranges[sha256] = PackedRange(pack, offset, len(stored))
            offset += len(stored)
        images.clear()
        write_bytes(join(self.job.packs, pack), data)
        self.num_packs += 1
        return ranges

    def finish(self) -> pa.Table:
        """Write the remaining images, and return the rows of the unit."""
        self._flush()
        return pa.concat_tables(self.parts)


def raw_row(item: Item, label: str | None, digest: str) -> bytes:
    """Return the line of an image for the digest of the raw content (see `ingest.raw_content`).

    It has the split, the name, the label and the digest of the image's bytes in the source.
    """
    row = f"{item.split}\t{nfc(item.name)}\t{nfc(str(label))}\t{digest}"
    return row.encode("utf-8", "surrogateescape")


def read_raw_digest(raw: bytes | None) -> str:
    """Return the digest of the bytes of an image from its `raw_row`, or "" for None."""
    return (raw or b"").rpartition(b"\t")[2].decode()


class RawJob(NamedTuple):
    """A unit with images that are read but not decoded."""

    unit: Unit
    card: Card


def raw_rows(job: RawJob) -> pa.Array:
    """Return the `raw_row` of each image of a unit."""
    checker = ImageChecker(job.card)
    rows: list[bytes] = []
    for item, data in job.unit.read(*job.unit.args):
        if not isinstance(data, bytes) or checker.is_left_out(item):
            continue
        digest = hashlib.sha256(data).hexdigest()
        if digest not in checker.images_left_out:
            rows.append(raw_row(item, checker.raw_label(item), digest))
    return pa.array(rows, pa.large_binary())


# ---- reading -------------------------------------------------------------------------------------
def read_unit_rows(packs: str, name: str, sizes: Mapping[str, int]) -> pa.Table | None:
    """Return the rows of a finished unit, or None if it must be read again.

    It must be read again if its table is missing or damaged, if a pack is missing, or if a row
    refers to a shard of an earlier ingest.

    Args:
        packs: Folder of packs.
        name: Name of the unit.
        sizes: Sizes of the files in the folder of packs, by name.
    """
    if name + TABLE_SUFFIX not in sizes:
        return None
    try:
        table = parquet.read_table(read_bytes(join(packs, name + TABLE_SUFFIX)))
    except (pa.ArrowException, OSError):
        return None
    if table.schema != ROWS:
        return None
    ends = table.select(["pack", "offset", "bytes"]).drop_null().group_by("pack")
    for pack in ends.aggregate([])["pack"].to_pylist():
        if not sizes.get(pack):
            return None
    return table


class Range(NamedTuple):
    """Bytes `start` to `stop` of a pack."""

    pack: str
    start: int
    stop: int


class PackedImages:
    """Images of packs, in memory.

    A pack is a file in the folder of packs. `pack` of a row can also be the URI of a shard of an
    earlier ingest, from which the bytes are copied.
    """

    def __init__(self, packs: str, rows: pa.Table):
        """Read the images of `rows` with few requests.

        Args:
            packs: Folder of packs.
            rows: Rows with the columns `pack`, `offset` and `bytes`, without nulls.

        Raises:
            DamagedPack: If a pack is missing.
        """
        self.packs = packs
        self.ranges: dict[str, tuple[NDArray[np.int64], list[bytes]]] = {}
        ranges = list(merge_ranges(rows))
        if is_local(packs):
            parts = [self._read(part) for part in ranges]
        else:
            with ThreadPoolExecutor(READERS, "packs") as pool:
                parts = list(pool.map(self._read, ranges))
        starts: dict[str, list[int]] = {}
        data: dict[str, list[bytes]] = {}
        for part, part_data in zip(ranges, parts, strict=True):
            starts.setdefault(part.pack, []).append(part.start)
            data.setdefault(part.pack, []).append(part_data)
        for pack, pack_data in data.items():
            self.ranges[pack] = (np.array(starts[pack], np.int64), pack_data)

    def image(self, pack: str, offset: int, size: int) -> bytes:
        """Return the bytes of one image, or fewer bytes if the pack is truncated."""
        starts, parts = self.ranges[pack]
        index = int(np.searchsorted(starts, offset, "right")) - 1
        first = offset - int(starts[index])
        return parts[index][first : first + size]

    def _read(self, part: Range) -> bytes:
        uri = part.pack if is_uri(part.pack) else join(self.packs, part.pack)
        size = part.stop - part.start
        try:
            if not is_local(uri):
                return read_object(uri, size, part.start)
            _, path = resolve(uri)
            with open(path, "rb") as stream:
                return os.pread(stream.fileno(), size, part.start)
        except FileNotFoundError:
            raise DamagedPack(
                f"{uri} is missing, which ingest wrote for its own use; "
                "run the same command again to rebuild it"
            ) from None


def is_uri(pack: str) -> bool:
    """Return whether `pack` of a row is the URI of a file, not a name in the folder of packs."""
    return "/" in pack


def read_object(uri: str, size: int, offset: int) -> bytes:
    """Read a part of a pack in a bucket."""
    try:
        return open_pack(uri).read_at(size, offset)
    except OSError:
        # opening distinguishes a missing object from an unreadable one
        open_pack.cache_clear()
        return open_pack(uri).read_at(size, offset)


@lru_cache(maxsize=4096)
def open_pack(uri: str) -> ObjectFile:
    """Open a pack in a bucket. It is cached, because the name of a pack identifies its content."""
    system, path = resolve(uri)
    assert isinstance(system, fs.PyFileSystem)
    return ObjectFile(system, path)


def merge_ranges(rows: pa.Table) -> Iterator[Range]:
    """Yield the ranges of packs that contain the images of `rows`, sorted by pack and offset.

    Images with at most RANGE_GAP bytes between them are read together, up to RANGE_BYTES.
    """
    columns = rows.select(["pack", "offset", "bytes"]).sort_by(
        [("pack", "ascending"), ("offset", "ascending")]
    )
    packs, offsets, sizes = (column.to_pylist() for column in columns.columns)
    current: Range | None = None
    for pack, offset, size in zip(packs, offsets, sizes, strict=True):
        stop = offset + size
        if (
            current is not None
            and current.pack == pack
            and offset - current.stop <= RANGE_GAP
            and stop - current.start <= RANGE_BYTES
        ):
            current = current._replace(stop=max(stop, current.stop))
            continue
        if current is not None:
            yield current
        current = Range(pack, offset, stop)
    if current is not None:
        yield current
