"""Raw data of cards: the content that results were made from, and its changes.

The key of the ingest stage contains the paths and sizes of the raw files. Files that were edited in
place have the same paths and sizes, but other modification times. They are read again, once, and
compared by digest. Equal content changes nothing. Other content gets an `edition`, which enters the
key, so that results of both contents are kept apart. The knowledge is kept in `<storage>/sources/`,
per card and fingerprint.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeGuard

from pipeline.config.settings import Config
from pipeline.config.text import format_count
from pipeline.data import card_files, ingest
from pipeline.data.cards import Card
from pipeline.data.digests import ClassDigests, digest_classes
from pipeline.data.formats import get_format, is_local_source, list_source, source_state
from pipeline.data.listing import Entry, describe_left_out
from pipeline.data.names import printable
from pipeline.data.packs import ImageChecker
from pipeline.graph import run_record
from pipeline.graph.store import Store, compute_key
from workers.errors import DamagedArtifact, UserError
from workers.storage.artifact import Artifact
from workers.storage.filesystem import FIRST_CONTACT_S, StorageUnavailable, patience

ClassFiles = dict[str, tuple[int, str]]  # label -> number of files, digest of names, sizes, times
READ_THREADS = 16
MAX_CLASSES = 8  # named in a sentence
GONE = (
    "its raw files are gone, so it cannot be ingested again; the ingested data is used as long as "
    "it exists"
)
REWRITTEN = (
    "its raw files were written again since they were ingested (same paths and sizes); "
    "`run` reads them to see whether they are the same images"
)


@dataclass(frozen=True)
class KnownSource:
    """The raw data of a card as the storage knows it.

    Attributes:
        fingerprint: Digest of paths and sizes.
        modified: Digest of the modification times; "" if unknown.
        edition: "" for the content ingested first, else the start of the digest.
        contents: Edition -> digest of the raw content.
        present: Whether the files exist.
        note: Text for people.
        entries: The files; None if they were not listed this time.
    """

    fingerprint: str
    modified: str = ""
    edition: str = ""
    contents: dict[str, str] = field(default_factory=dict)
    present: bool = True
    note: str = ""
    entries: list[Entry] | None = field(default=None, compare=False, repr=False)

    @property
    def text(self) -> str:
        """Text that enters the key of the ingest stage."""
        return f"{self.fingerprint}+{self.edition}" if self.edition else self.fingerprint


def describe_source(store: Store, card: Card, ask: bool = True) -> KnownSource:
    """Return the source of a card.

    If the files are gone or unreachable, the last known source is returned, so that results stay
    valid.

    Args:
        store: Remembers sources.
        card: The card.
        ask: If false, open no connection to another machine for a source with an ingested result.

    Raises:
        UserError: If the files are gone and were never known.
    """
    last = store.remembered(card.identity())
    known_last = KnownSource(**_recall(store, card, last)) if isinstance(last, str) else None
    if known_last and not ask and not is_local_source(card) and _stands(store, card, known_last):
        return known_last
    try:
        with patience(FIRST_CONTACT_S):
            entries = list_source(card) or []
            listed = source_state(card, entries)
    except StorageUnavailable:
        if known_last is None:
            raise
        return known_last
    fingerprint = listed[0] if listed else last
    if not isinstance(fingerprint, str):
        reasons = describe_left_out((entry.name, entry.problem) for entry in entries)
        raise UserError(
            f"card {card.name!r}: its source {card.source.path or card.source.name!r} does not "
            f"exist, or holds no images in its splits{reasons}, and was never ingested into this "
            "storage; put the data there or fix `source.path` or `source.splits` on the card"
        )
    known = _recall(store, card, fingerprint)
    if listed is None:
        return KnownSource(**known, present=False, note=GONE)
    if store.remembered(card.identity()) != fingerprint:
        store.remember(card.identity(), fingerprint)
    if not known["modified"]:
        known["modified"] = listed[1]
        _remember(store, card, known)
    note = ""
    if known["modified"] != listed[1]:
        note = REWRITTEN
    return KnownSource(**known, note=note, entries=entries)


def read_sources_again(config: Config, store: Store, say: Callable[[str], None]) -> None:
    """Read the raw data of a config's cards again, if it was rewritten in place.

    A card that does not fit its data is skipped: building the graph reports it.

    Args:
        config: The config.
        store: Remembers sources.
        say: Prints a line.
    """
    for name in dict.fromkeys(entry.card for entry in config.stream.tasks):
        try:
            card = card_files.load(name, store)
        except UserError:
            continue
        read_again(store, card, say)


def read_again(store: Store, card: Card, say: Callable[[str], None]) -> None:
    """Read the rewritten raw files of a card, and note their content.

    Do nothing if the files were not rewritten, are gone, or cannot be listed.

    Args:
        store: Remembers sources.
        card: The card.
        say: Prints a line.
    """
    try:
        with patience(FIRST_CONTACT_S):
            listed = source_state(card)
    except UserError:  # `describe_source` refuses the source, or uses the last known one
        return
    if listed is None:
        return
    known = _recall(store, card, listed[0])
    if not known["modified"] or known["modified"] == listed[1]:
        return
    known["modified"] = listed[1]
    before = known["contents"].get(known["edition"])
    inputs = stage_inputs(card, KnownSource(**known))
    if before is None and Artifact.open(store.root, compute_key(inputs, ())) is None:
        pass  # listed before, but not ingested yet
    elif before is None:
        say(
            f"data/{card.name}: its raw files were written again; "
            "they are treated as the same images, because no digest of the earlier ones was kept"
        )
    else:
        say(
            f"data/{card.name}: its raw files were written again "
            "(same paths and sizes), they are read to compare their content"
        )
        with ThreadPoolExecutor(READ_THREADS, "raw") as pool:
            content = ingest.raw_content(card, pool.map)
        editions = {digest: edition for edition, digest in known["contents"].items()}
        known["edition"] = editions.get(content, content[:16])
        known["contents"][known["edition"]] = content
        if content == before:
            say(f"data/{card.name}: they are the same images")
        else:
            say(
                f"data/{card.name}: the images changed; their results get new keys, and earlier "
                "results stay"
            )
    _remember(store, card, known)


def _stands(store: Store, card: Card, source: KnownSource) -> bool:
    return Artifact.open(store.root, compute_key(stage_inputs(card, source), ())) is not None


def stage_inputs(card: Card, source: KnownSource) -> dict[str, Any]:
    """Return the inputs for the key of the card's ingest stage."""
    return {
        "step": "ingest",
        "card": card.identity(),
        "source": source.text,
        "revision": ingest.REVISION,
    }


def list_classes(card: Card, entries: list[Entry]) -> ClassFiles:
    """Count the files of each label of a source, and hash their names, sizes and times.

    Images that the card leaves out do not count. The result is empty if a file contains many
    images.

    Args:
        card: The card.
        entries: The files of the source.
    """
    list_items = get_format(card).list_items
    if list_items is None:
        return {}
    known = {entry.name: (entry.size, entry.modified) for entry in entries}
    counts: Counter[str] = Counter()
    bodies: dict[str, Any] = {}
    checker = ImageChecker(card)
    for item in list_items(card, entries):
        if checker.is_left_out(item):
            continue
        label = str(item.label or "")
        counts[label] += 1
        line = f"{item.split}\t{item.name}\t{known.get(item.name)}\n"
        body = bodies.setdefault(label, hashlib.sha256())
        body.update(line.encode("utf-8", "surrogateescape"))
    return {label: (counts[label], body.hexdigest()[:16]) for label, body in bodies.items()}


def previous_key(store: Store, card: Card) -> str:
    """Return the key of the last ingest of a card with this name; empty if there was none."""
    last = store.remembered(_name_of_files(card))
    key = last.get("key") if isinstance(last, dict) else None
    return key if isinstance(key, str) and run_record.PLAIN.fullmatch(key) else ""


def read_last_files(store: Store, card: Card) -> ClassFiles:
    """Return the files of each class at the last ingest of a card with this name.

    The result is empty if there was no such ingest.
    """
    last = store.remembered(_name_of_files(card))
    files = last.get("files") if isinstance(last, dict) else None
    if not isinstance(files, dict):
        return {}
    if not all(isinstance(old, list) and len(old) == 2 for old in files.values()):
        return {}
    return {label: (old[0], old[1]) for label, old in files.items()}


def describe_changes(store: Store, card: Card, now: Mapping[str, tuple[int, str]]) -> str:
    """Name the classes with changes of their files since the last ingest of a card with this name.

    The result is empty if there was no such ingest.

    Args:
        store: Remembers the files of the last ingest.
        card: The card.
        now: Result of `list_classes`.
    """
    before = read_last_files(store, card)
    if not now or not before:
        return ""
    parts: list[str] = []
    for label in sorted(before.keys() | now.keys()):
        old, new = before.get(label), now.get(label)
        if new is None:
            parts.append(f"{printable(label)} (gone)")
        elif old is None:
            parts.append(f"{printable(label)} (new, {format_count(new[0], 'file')})")
        elif old != new:
            parts.append(f"{printable(label)} ({format_count(new[0], 'file')}, {old[0]} before)")
    more = f" and {len(parts) - MAX_CLASSES} more" if len(parts) > MAX_CLASSES else ""
    return f"other files than before: {', '.join(parts[:MAX_CLASSES])}{more}" if parts else ""


def ingested(
    store: Store, card: Card, source: str, artifact: Artifact, files: ClassFiles | None = None
) -> None:
    """Record the digests of an ingest: of the raw content, and of the images of each class.

    Args:
        store: Store of the run.
        card: Card of the data set.
        source: `Source.text`.
        artifact: The result of the ingest stage.
        files: See `list_classes`.
    """
    fingerprint, _, edition = source.partition("+")
    known = _recall(store, card, fingerprint)
    known["contents"][edition] = artifact.manifest["raw_content"]
    _remember(store, card, known)
    store.remember(_name_of_images(card, source), _digest_artifact(artifact))
    store.remember(_name_of_files(card), {"key": artifact.key, "files": files or {}})


def class_digests(store: Store, card: Card, source: KnownSource) -> ClassDigests | None:
    """Return the digests of the images of each class at their ingest; None before that.

    They are known even if raw files and shards are gone.

    Args:
        store: Remembers digests.
        card: The card.
        source: Its source.
    """
    name = _name_of_images(card, source.text)
    known = store.remembered(name)
    if _is_class_digests(known):
        return known
    artifact = Artifact.open(store.root, compute_key(stage_inputs(card, source), ()))
    if artifact is None:
        return None
    try:
        digests = _digest_artifact(artifact)
    except DamagedArtifact:
        return None
    with suppress(OSError):  # the storage can be read-only
        store.remember(name, digests)
    return digests


def _digest_artifact(artifact: Artifact) -> ClassDigests:
    """Return the digests of the images of each class in the result of an ingest stage."""
    # start-up time: they import torch
    from workers.data.in_place import is_in_place, read_shards
    from workers.data.shards import get_limits, read_hold_out, read_index

    in_place = is_in_place(artifact)
    files = read_shards(artifact) if in_place else artifact.manifest["files"]
    salt = [get_limits(artifact).value_range, read_hold_out(artifact)]
    return digest_classes(read_index(artifact, files), in_place, json.dumps(salt))


def _name_of_files(card: Card) -> str:
    return f"{card.name}-files"


def _name_of_images(card: Card, source: str) -> str:
    return f"{card.identity()}-{compute_key({'source': source}, ())[:24]}-images"


def _is_class_digests(value: Any) -> TypeGuard[ClassDigests]:
    return isinstance(value, dict) and all(
        isinstance(split, dict) and all(isinstance(digest, str) for digest in split.values())
        for split in value.values()
    )


def _name(card: Card, fingerprint: str) -> str:
    return f"{card.identity()}-{fingerprint.replace(':', '-')[:40]}"


def _recall(store: Store, card: Card, fingerprint: str) -> dict[str, Any]:
    stored = store.remembered(_name(card, fingerprint))
    known: dict[str, Any] = {
        "fingerprint": fingerprint,
        "modified": "",
        "edition": "",
        "contents": {},
    }
    if not isinstance(stored, dict):
        return known
    for name, default in list(known.items()):
        if type(stored.get(name)) is type(default):
            known[name] = stored[name]
    return known


def _remember(store: Store, card: Card, known: dict[str, Any]) -> None:
    store.remember(_name(card, known["fingerprint"]), known)
