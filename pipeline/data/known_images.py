"""Images that an earlier ingest has read, and their location in the storage.

An image is identified by its stamp: the name, size and modification time of the file, and the
position of the bytes in the file. Table rows read together have the same stamp. Known
images are neither read nor decoded again; their bytes are copied from the earlier shards. Unchanged
shards are linked. If another image has the bytes of an earlier image, for example in a renamed
file, it is read but not decoded.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from pipeline.data.cards import Card
from pipeline.data.formats.base import (
    LIBRARIES,
    UNIT_ITEMS,
    Item,
    Unit,
    base_uri,
    is_single_file,
    read_items,
    row_name,
)
from pipeline.data.listing import Entry
from pipeline.data.names import printable
from pipeline.data.packs import ROWS, ImageChecker, read_raw_digest
from pipeline.data.shard_writer import Shard, WrittenShard
from workers.data.shards import read_index
from workers.errors import UserError
from workers.job import key_inputs
from workers.storage.artifact import Artifact, Attempt, FileInfo, join, link_file
from workers.storage.parquet import read_table

SOURCE = "source.parquet"  # file of an ingest stage with a row for each image that has a stamp
NUM_ROWS = b"rows"  # metadata key of SOURCE: stamp -> number of rows, if it is not 1
# A stamp (`_build_stamp`): name, size and time of the file, first byte or row, number of bytes or
# rows. The groups are the size of the file, and the position in the file.
STAMP = r"^[^\t]*\t(\d+)\t\d+(\t\d+\t\w+)$"
# Settings of a card that do not affect how a single image is read.
NOT_OF_IMAGES = (
    "title", "licence", "cite", "archive", "verified", "leaks", "classes", "num_classes",
    "class_order_seed", "test_fraction", "hold_out", "counts", "content", "duplicates",
    "per_class", "max_bad_fraction", "shard_images", "without_classes", "without_images",
)  # fmt: skip


def digest_reading(card: Card, not_of_source: tuple[str, ...] = ("more",)) -> str:
    """Return a digest of the settings of a card that affect how a single image is read.

    Args:
        card: The card.
        not_of_source: Settings of the source to ignore. By default, the path is included, because
            files in another folder can have the same names and times.
    """
    body = key_inputs(card, NOT_OF_IMAGES) | {"source": key_inputs(card.source, not_of_source)}
    if card.source.numbers == "places" or card.source.format in LIBRARIES:
        body["classes"] = list(card.classes)
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def stamp_units(units: Sequence[Unit], card: Card, entries: Sequence[Entry]) -> list[Unit]:
    """Return units with stamps, if the modification times of their files are known.

    Items that can be read one by one get their own stamps. These items are changed in place.
    """
    base = base_uri(card) if card.source.path else ""
    states = {entry.name: entry for entry in entries if entry.modified}
    start = len(base) + 1  # where the name of a file begins in its URI
    if card.source.path and is_single_file(card, entries):
        states = {entry.name: entry for entry in entries}
        start = len(base) - len(entries[0].name)
    stamped: list[Unit] = []
    for unit in units:
        if unit.file:
            entry = states.get(unit.file[start:])
            if entry is not None and entry.modified:
                unit = unit._replace(stamp=_build_stamp(entry, unit.first_row, unit.num_items))
        elif unit.read is read_items:
            for item in unit.args[0]:
                # files of a remote folder in `source.more` are listed under their full URI
                entry = states.get(item.uri[start:]) or states.get(item.uri)
                if entry is not None and entry.modified and not item.problem:
                    item.stamp = _build_stamp(entry, item.offset, item.size)
        stamped.append(unit)
    return stamped


def _build_stamp(entry: Entry, first: int, size: int | None) -> str:
    """Return the stamp of a part of a file.

    Args:
        entry: The file.
        first: First byte, or first row in a table.
        size: Number of bytes or rows. None: the whole file.
    """
    name = entry.name
    if not name.isascii():
        name = name.encode("utf-8", "backslashreplace").decode()
    return f"{name}\t{entry.size}\t{entry.modified}\t{first}\t{size}"


class DividedUnit(NamedTuple):
    """A unit, divided into known images and images that must be read.

    Attributes:
        rest: The images that must be read.
        earlier: Rows of earlier images that may have the same bytes as the images in `rest`.
        known: Rows of the known images, with the columns of `packs.ROWS`.
        is_known: Whether each item of the whole unit is known, (n,). Unused if no image is known.
    """

    rest: Unit
    earlier: pa.Table
    known: pa.Table
    is_known: NDArray[np.bool_]

    def merge(self, read: pa.Table) -> pa.Table:
        """Return the rows of the whole unit in the order of the items. `read`: rows of `rest`."""
        if not len(self.known):
            return read
        if self.is_known.all():
            return self.known
        order = np.empty(len(self.is_known), np.int64)
        order[self.is_known] = np.arange(len(self.known))
        order[~self.is_known] = len(self.known) + np.arange(len(read))
        return pa.concat_tables([self.known, read]).take(pa.array(order))


@dataclass(frozen=True)
class KnownImages:
    """The images of an earlier ingest stage.

    Attributes:
        artifact: Result of the stage.
        rows: Rows of the source, with the columns of `packs.ROWS`. `pack` is the URI of a shard.
        index: Index of the shards.
        num_rows: Number of rows by stamp, see `read_num_rows`.
    """

    artifact: Artifact
    rows: pa.Table
    index: pa.Table
    num_rows: Mapping[str, int]

    @classmethod
    def open(cls, root: str, key: str, card: Card) -> KnownImages | None:
        """Load the images of the stage `key`.

        Returns:
            The images, or None if the stage is missing or damaged, or if its card had other
            settings for reading images.
        """
        artifact = Artifact.open(root, key) if key else None
        if artifact is None or artifact.manifest.get("reading") != digest_reading(card):
            return None
        try:
            rows = read_table(artifact.read(SOURCE))
            num_rows = read_num_rows(rows)
            index = read_index(artifact, artifact.manifest["files"])
        except (UserError, pa.ArrowException, OSError, KeyError, ValueError):
            return None
        if rows.schema != ROWS:
            return None
        rows = rows.replace_schema_metadata(None)
        # The storage may be untrusted, so its rows must not refer to other files.
        files = pa.array(artifact.manifest["files"], pa.large_string())
        rows = rows.filter(pc.or_(pc.is_null(rows["pack"]), pc.is_in(rows["pack"], files)))
        folder = pa.scalar(artifact.uri("").rstrip("/"), pa.large_string())
        slash = pa.scalar("/", pa.large_string())
        shards = pc.binary_join_element_wise(folder, rows["pack"], slash)
        place = rows.schema.get_field_index("pack")
        return cls(artifact, rows.set_column(place, "pack", shards), index, num_rows)

    def divide(self, units: Sequence[Unit], card: Card) -> list[DividedUnit | None]:
        """Divide units into known and unknown images.

        An image is known if its stamp, class and split have not changed. Other images are read. If
        an image has the name of an earlier image, or the size of a removed image, its bytes are
        compared with the earlier image, and it is not decoded if they are equal.

        Returns:
            An item for each unit: the divided unit, or None to read the unit as it is.
        """
        checker = ImageChecker(card)
        parts = [unit.args[0] if unit.read is read_items else [] for unit in units]
        is_known, found = self._find([item for part in parts for item in part], checker)
        runs: dict[str, tuple[int, int]] = {}
        if any(unit.stamp for unit in units):
            runs = find_runs(self.rows["stamp"])
        gone = self.rows  # rows of images that were changed, moved or removed
        if not is_known.all():
            gone = self.rows.filter(pc.invert(pc.is_in(self.rows["stamp"], found["stamp"])))
        numbers = np.cumsum(is_known)
        divided: list[DividedUnit | None] = []
        stop = 0
        for unit, part in zip(units, parts, strict=True):
            start, stop = stop, stop + len(part)
            if unit.file:
                divided.append(self._divide_rows(unit, runs, checker))
                continue
            known = is_known[start:stop]
            rest = [item for item, k in zip(part, known.tolist(), strict=True) if not k]
            earlier = _find_candidate_rows(gone, rest)
            if not known.any() and not len(earlier):
                divided.append(None)
                continue
            # index in `found` of the first known image of this unit
            first = int(numbers[start] - is_known[start])
            unit = Unit(read_items, (rest,), len(rest))
            of_unit = found.slice(first, int(known.sum()))
            divided.append(DividedUnit(unit, earlier, of_unit, known))
        return divided

    def _divide_rows(
        self, unit: Unit, runs: dict[str, tuple[int, int]], checker: ImageChecker
    ) -> DividedUnit | None:
        """Divide a unit of rows of one file. Its rows are either all known or all read.

        If the file changed, rows near the earlier position may have the same bytes.
        """
        start, stop = runs.get(unit.stamp, (0, 0))
        rows = self.rows.slice(start, stop - start)
        is_whole = 0 < len(rows) == self.num_rows.get(unit.stamp, 1)
        if is_whole and are_read_alike(rows, checker):
            nothing = Unit(read_items, ([],), 0)
            rows = checker.mark_left_out(rows)
            return DividedUnit(nothing, self.rows.slice(0, 0), rows, np.ones(len(rows), bool))
        prefix = printable(row_name(unit.file, ""))
        of_file = self.rows.filter(pc.starts_with(self.rows["name"], prefix))
        texts = pc.utf8_slice_codeunits(of_file["name"], len(prefix))
        is_number = pc.match_substring_regex(texts, r"^\d{1,15}$")
        row_numbers = texts.filter(is_number).cast(pa.int64())
        is_near = pc.and_(
            pc.greater_equal(row_numbers, unit.first_row - UNIT_ITEMS),
            pc.less(row_numbers, unit.first_row + unit.num_items + UNIT_ITEMS),
        )
        earlier = of_file.filter(is_number).filter(is_near)
        if not len(earlier):
            return None
        return DividedUnit(unit, earlier, self.rows.slice(0, 0), np.zeros(0, bool))

    def _find(
        self, items: Sequence[Item], checker: ImageChecker
    ) -> tuple[NDArray[np.bool_], pa.Table]:
        """Return a mask (n,) of the known items, and the rows of the known items.

        If the class of an image was not on the earlier card, the image is read, because the earlier
        ingest did not decode it.
        """
        if not len(self.rows):
            return np.zeros(len(items), bool), self.rows
        stamps = pa.array([item.stamp or None for item in items], pa.large_string())
        places = pc.index_in(stamps, self.rows["stamp"], skip_nulls=True)
        names = [checker.label(item) for item in items]
        on_card = [name if name in checker.classes else None for name in names]
        labels = pa.array(on_card, pa.large_string())
        splits = pa.array([item.split for item in items], pa.large_string())
        columns = ["label", "split", "problem", "pack"]
        found = self.rows.select(columns).take(pc.fill_null(places, 0))
        is_same = pc.and_(pc.equal(found["label"], labels), pc.equal(found["split"], splits))
        was_labelled = pc.invert(pc.starts_with(pc.fill_null(found["problem"], ""), "unlabelled"))
        # an image that `per_class` left out has no pack and no problem; its bytes were not stored
        is_usable = pc.or_(pc.is_valid(found["pack"]), pc.is_valid(found["problem"]))
        known = pc.and_(pc.is_valid(places), pc.and_(is_same, is_usable))
        known = pc.and_(known, was_labelled)
        is_known: NDArray[np.bool_] = (
            pc.fill_null(known, False).to_numpy(zero_copy_only=False).astype(bool)
        )
        return is_known, self.rows.take(places.filter(pa.array(is_known)))

    def find_shards(self, shards: Sequence[Shard]) -> dict[str, WrittenShard]:
        """Return the shards of the earlier ingest that equal the new shard of the same name."""
        runs = find_runs(self.index["shard"])
        same: dict[str, WrittenShard] = {}
        for shard in shards:
            start, stop = runs.get(shard.name, (0, 0))
            if stop - start != len(shard.rows) or stop == start:
                continue
            part = self.index.slice(start, stop - start)
            if all(
                part[name].cast(pa.large_string()).equals(shard.rows[other].cast(pa.large_string()))
                for name, other in (("key", "key"), ("sha256", "sha256"), ("class", "label"))
            ):
                info: FileInfo = self.artifact.manifest["files"][shard.name]
                same[shard.name] = WrittenShard(shard.name, info, part)
        return same

    def link_shard(self, attempt: Attempt, shard: WrittenShard) -> None:
        """Add an earlier shard to an attempt: as a link on a disk, as a copy in a bucket."""
        link_file(
            self.artifact.uri(shard.name), join(attempt.root, attempt.key, attempt.name, shard.name)
        )


def find_runs(column: pa.ChunkedArray) -> dict[str, tuple[int, int]]:
    """Map each value of a column to the start and stop of its last block of consecutive rows."""
    values = column.combine_chunks().dictionary_encode()
    codes = pc.fill_null(values.indices, -1).to_numpy()
    is_first = np.ones(len(codes), bool)
    is_first[1:] = codes[1:] != codes[:-1]
    starts = np.flatnonzero(is_first)
    stops = np.append(starts[1:], len(codes))
    names = values.dictionary.to_pylist()
    return {
        names[codes[start]]: (int(start), int(stop))
        for start, stop in zip(starts, stops, strict=True)
        if codes[start] >= 0
    }


def are_read_alike(rows: pa.Table, checker: ImageChecker) -> bool:
    """Return whether the current card gives the same rows as the earlier ingest.

    This is not the case if `per_class` left out an image in the earlier ingest, because its bytes
    were not stored, or if the class of an image was added to the card or removed from it.
    """
    columns = (rows[name].to_pylist() for name in ("label", "problem", "pack"))
    for label, problem, pack in zip(*columns, strict=True):
        if problem is None and pack is None:
            return False
        was_on_card = not (problem or "").startswith("unlabelled")
        if label is not None and was_on_card != (label in checker.classes):
            return False
    return True


def _find_candidate_rows(rows: pa.Table, items: Sequence[Item]) -> pa.Table:
    """Return the rows of earlier images that may have the same bytes as one of the items.

    Such a row has an item's name, or its file size and its position in the file.
    """
    if not items or not len(rows):
        return rows.slice(0, 0)
    names = pa.array([printable(item.name) for item in items], pa.large_string())
    sizes = pa.array([_parse_size(item.stamp) for item in items if item.stamp], pa.large_string())
    row_sizes = pc.replace_substring_regex(rows["stamp"], STAMP, r"\1\2")
    return rows.filter(pc.or_(pc.is_in(rows["name"], names), pc.is_in(row_sizes, sizes)))


def _parse_size(stamp: str) -> str:
    """Return the part of a stamp that does not change when a file is renamed or copied."""
    return re.sub(STAMP, r"\1\2", stamp)


def encode_source_rows(kept: pa.Table, rows: pa.Table, index: pa.Table) -> bytes:
    """Return the bytes of the file SOURCE, with the locations of the images in the shards.

    An image that `per_class` of the card left out is in no shard and has no `pack`.

    Args:
        kept: Rows that the card does not exclude.
        rows: All rows of the source.
        index: Index of the shards.
    """
    positions = pc.index_in(
        kept["sha256"], index["sha256"].cast(pa.large_string()), skip_nulls=True
    )
    columns = {
        "pack": index["shard"].take(positions).cast(pa.large_string()),
        "offset": index["offset"].take(positions),
        "bytes": index["bytes"].take(positions),
    }
    for name, column in columns.items():
        kept = kept.set_column(kept.schema.get_field_index(name), name, column)
    return encode_source(kept, rows, {})


def encode_source(kept: pa.Table, rows: pa.Table, metadata: Mapping[bytes, str]) -> bytes:
    """Return the bytes of the file SOURCE: the rows with a stamp, and the number of rows by stamp.

    Args:
        kept: Rows that the card does not exclude.
        rows: All rows of the source.
        metadata: Metadata of the table in addition to NUM_ROWS.
    """
    counts = rows.group_by("stamp").aggregate([([], "count_all")])
    counts = counts.filter(
        pc.and_(pc.is_valid(counts["stamp"]), pc.greater(counts["count_all"], 1))
    )
    num_rows = dict(zip(counts["stamp"].to_pylist(), counts["count_all"].to_pylist(), strict=True))
    kept = kept.filter(pc.is_valid(kept["stamp"])).cast(ROWS)
    kept = kept.replace_schema_metadata({**metadata, NUM_ROWS: json.dumps(num_rows)})
    sink = io.BytesIO()
    pq.write_table(kept, sink, compression="zstd")
    return sink.getvalue()


def read_num_rows(table: pa.Table) -> dict[str, int]:
    """Read the number of rows by stamp from the metadata of SOURCE; a missing stamp means 1.

    The numbers include rows that the card excluded. The table does not contain these rows.

    Raises:
        ValueError: If the metadata is damaged.
    """
    num_rows = json.loads((table.schema.metadata or {}).get(NUM_ROWS, b"{}"))
    if not isinstance(num_rows, dict):
        raise ValueError("the numbers of rows are not a mapping")
    return num_rows


class Changes(NamedTuple):
    """Numbers of added, changed, removed and moved images of a source."""

    added: int
    changed: int
    removed: int
    moved: int

    @classmethod
    def between(cls, before: pa.Table, now: pa.Table) -> Changes:
        """Compare the rows of two ingests by the names and the bytes of the images.

        Rows without a stamp are ignored. Rows with the same stamp are the same image. Images with
        the same name are distinguished by the paths of their files.
        """
        columns = ["name", "raw", "stamp"]
        before = before.select(columns)
        now = now.select(columns).filter(pc.is_valid(now["stamp"]))
        is_same = pc.is_in(now["stamp"], before["stamp"])
        was_same = pc.is_in(before["stamp"], now["stamp"])
        before, now = before.filter(pc.invert(was_same)), now.filter(pc.invert(is_same))
        old = dict(zip(_list_image_paths(before), _bytes_digests(before), strict=True))
        new = dict(zip(_list_image_paths(now), _bytes_digests(now), strict=True))
        added = new.keys() - old.keys()
        removed = old.keys() - new.keys()
        gone = {old[name] for name in removed if old[name]}
        moved = sum(new[name] in gone for name in added)
        changed = sum(old[name] != new[name] for name in new.keys() & old.keys())
        return cls(len(added) - moved, changed, len(removed) - moved, moved)

    def text(self) -> str:
        """Return the sentence for the account."""
        return (
            f"since the last ingest: {self.added} images added, {self.changed} changed, "
            f"{self.removed} removed, {self.moved} moved"
        )


def _list_image_paths(rows: pa.Table) -> list[str]:
    """Return the path of each image: the name of the file from its stamp, and its own name."""
    files = [stamp.partition("\t")[0] for stamp in rows["stamp"].to_pylist()]
    return [f"{file}\t{name}" for file, name in zip(files, rows["name"].to_pylist(), strict=True)]


def _bytes_digests(rows: pa.Table) -> list[str]:
    """Return the digest of the source bytes of each image, or "" for a row without bytes."""
    return [read_raw_digest(raw) for raw in rows["raw"].to_pylist()]
