"""Find the images that the lines of a text file name, for `remove --images`.

A line is the path of an image below the source of its card, or the sha256 of the image.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import pyarrow as pa

from pipeline.data import card_files
from pipeline.data.cards import Card
from pipeline.data.formats import fingerprint, get_format, list_source, units
from pipeline.data.known_images import SOURCE
from pipeline.data.names import nfc, printable, quoted
from pipeline.data.packs import ImageChecker, read_raw_digest
from pipeline.graph import raw_data
from pipeline.graph.store import Store
from pipeline.growing.new_data import UsedCard
from workers.errors import DamagedArtifact, UserError
from workers.storage.artifact import Artifact
from workers.storage.parquet import read_table

DIGEST = re.compile("[0-9a-f]{64}")


class SourceImage(NamedTuple):
    """An image of a source.

    Attributes:
        name: Path relative to the source, as in `rejected.csv`, a file that ingest writes.
        group: Split and class.
        digest: sha256 of the bytes in the source. Empty if the bytes were not read.
        stored: sha256 of the bytes in the shards. Empty if no shard contains the image.
    """

    name: str
    group: tuple[str, str]
    digest: str = ""
    stored: str = ""


@dataclass
class NamedImages:
    """The images of a card that a text file names.

    Attributes:
        used: The card.
        lines: Lines to add to the card's list of images to leave out: names, and digests of the
            bytes in the source.
        names: Names of the images, for messages.
        found: Lines of the text file that name an image of this card, including images that the
            card leaves out already.
    """

    used: UsedCard
    lines: set[str] = field(default_factory=set)
    names: set[str] = field(default_factory=set)
    found: set[str] = field(default_factory=set)


def find_named_images(
    file: str, lines: Sequence[str], cards: Sequence[UsedCard], store: Store
) -> list[NamedImages]:
    """Find the images that the lines of a text file name, in some cards.

    Args:
        file: Name of the text file, for messages.
        lines: Lines of the text file.
        cards: Cards of a stream.
        store: Store of the run.

    Returns:
        The named images of each card that has named images. This includes images that the card
        leaves out already.

    Raises:
        UserError: If a line names no image, if a name is ambiguous, or if a class would lose all
            its train images or all its test images.
    """
    by_card = [_find_in_card(used, lines, store) for used in cards]
    for line in lines:
        owners = [named.used.card.name for named in by_card if line in named.found]
        if not owners:
            raise UserError(
                f"{file}: {quoted(line)} is not an image of this run; give a path below the source "
                "of a card, as rejected.csv writes it, or the sha256 of an image (64 hexadecimal "
                "digits), one a line"
            )
        if len(owners) > 1 and not DIGEST.fullmatch(line):
            raise UserError(
                f"{file}: {quoted(line)} is an image of several cards ({', '.join(owners)}); give "
                "its sha256 in place of its path"
            )
    return [named for named in by_card if named.found]


def _find_in_card(used: UsedCard, lines: Sequence[str], store: Store) -> NamedImages:
    """Find the images of one card.

    Lines are looked for in the cheapest place first: the result of the last ingest, then the names
    of the files in the source, then the content of the complete source.

    Raises:
        UserError: If a name is ambiguous, or if a class would lose all its train or test images.
    """
    card = card_files.load_card_file(used.path, store)
    named = NamedImages(used)
    named.found |= card.images_left_out() & {*lines}
    ingested = [*_list_ingested(store, card)]
    is_listed = get_format(card).list_items is not None
    has_names = is_listed or _has_ingested_files(store, card)
    _match(named, lines if has_names else [*filter(DIGEST.fullmatch, lines)], ingested)
    missing = [line for line in lines if line not in named.found]
    if any(not DIGEST.fullmatch(line) for line in missing):
        _match(named, missing, _list_source_images(card))
    missing = [line for line in lines if line not in named.found]
    if missing and (not is_listed or any(map(DIGEST.fullmatch, missing))):
        _match(named, missing, _read_source_images(card))
    _check_remaining_classes(named, ingested)
    return named


def _match(named: NamedImages, lines: Sequence[str], images: Iterable[SourceImage]) -> None:
    """Add the images that some lines name to `named`.

    Args:
        named: The named images of a card so far.
        lines: Lines of the text file: names and digests.
        images: Images of the card.

    Raises:
        UserError: If several images have the same name, for example rows of two tables.
    """
    line_set = {*lines}
    names: set[str] = set()
    for image in images:
        name = nfc(image.name)
        if name in line_set:
            if name in names:
                raise UserError(
                    f"{quoted(name)} is the name of several images of card "
                    f"{named.used.card.name!r}; give the sha256 of the image in place of it"
                )
            names.add(name)
            named.found.add(name)
            named.lines.add(name)
            named.names.add(image.name)
        for digest in {image.digest, image.stored} & line_set:
            named.found.add(digest)
            # the digest is empty if an earlier version of Accrete ingested the image
            named.lines.add(image.digest or name)
            named.names.add(image.name)


def _list_ingested(store: Store, card: Card) -> Iterator[SourceImage]:
    """Yield the images of the last ingest, or nothing if it did not store their names."""
    artifact = Artifact.open(store.root, raw_data.previous_key(store, card))
    if artifact is None or SOURCE not in artifact.manifest["files"]:
        return
    try:
        rows = read_table(artifact.read(SOURCE))
    except (DamagedArtifact, pa.ArrowException):
        return
    for row in rows.select(["name", "split", "label", "raw", "sha256"]).to_pylist():
        digest = read_raw_digest(row["raw"])
        yield SourceImage(row["name"], (row["split"], row["label"]), digest, row["sha256"] or "")


def _has_ingested_files(store: Store, card: Card) -> bool:
    """Return whether the files of a source have the same names and sizes as at the last ingest.

    If not, a name such as `a.parquet:3` can mean another image now.
    """
    artifact = Artifact.open(store.root, raw_data.previous_key(store, card))
    return artifact is not None and artifact.manifest.get("fingerprint") == fingerprint(card)


def _list_source_images(card: Card) -> Iterator[SourceImage]:
    """Yield the images of a source without reading them, so without digests.

    Nothing is yielded if the format stores several images in one file.
    """
    list_items = get_format(card).list_items
    if list_items is None:
        return
    checker = ImageChecker(card)
    for item in list_items(card, list_source(card) or []):
        yield SourceImage(printable(item.name), (item.split, checker.label(item) or ""))


def _read_source_images(card: Card) -> Iterator[SourceImage]:
    """Yield all images of a source. This reads the complete source."""
    checker = ImageChecker(card)
    for unit in units(card, map):
        for item, data in unit.read(*unit.args):
            digest = hashlib.sha256(data).hexdigest() if isinstance(data, bytes) else ""
            group = (item.split, checker.label(item) or "")
            yield SourceImage(printable(item.name), group, digest)


def _check_remaining_classes(named: NamedImages, ingested: Sequence[SourceImage]) -> None:
    """Raise `UserError` if a class would lose all its train images or all its test images."""
    groups = Counter(image.group for image in ingested if image.stored)
    for image in ingested:
        is_named = nfc(image.name) in named.lines or image.digest in named.lines
        if image.stored and is_named:
            groups[image.group] -= 1
    for (split, label), number in groups.items():
        if number or split == "val":
            continue
        remedy = f"remove the class (--class {label})"
        if split == "test":
            remedy += ", or add other test images of it first, because nothing would measure it"
        raise UserError(
            f"these are all {split} images of class {quoted(label)} of card "
            f"{named.used.card.name!r}; {remedy}"
        )
