"""Track the raw data of cards: which content was ingested, and whether it has changed since.

The key of an ingest stage contains a digest of the paths and sizes of the raw files (the
fingerprint). Files that were rewritten in place can have the same paths and sizes, but their
modification times differ. Such files are read again, once, and compared by digest. If the content
is equal, the key stays the same. Otherwise the new content gets an `edition`, which is a prefix of
its digest and part of the key. Therefore the results of both contents have different keys. This
information is stored in `<storage>/sources/`, per card and fingerprint.

`find_source` returns the known state of a source. `compare_rewritten_sources` reads rewritten files
again. `record_ingest` saves the digests after an ingest.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
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

# label -> (number of files, digest of their names, sizes and modification times)
ClassFiles = dict[str, tuple[int, str]]
READ_THREADS = 16  # threads that read raw files
MAX_NAMED_CLASSES = 8  # maximum number of classes that a message names
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
    """The known state of a card's raw data.

    Attributes:
        fingerprint: Digest of the paths and sizes of the files (see `SourceState`).
        modified: Digest of the modification times that the files had when `edition` was last
            determined; "" if unknown.
        edition: "" for the first ingested content, else a prefix of the digest of the raw
            content.
        contents: Edition -> digest of the raw content.
        present: Whether the files exist.
        note: Warning for the user, or "".
        entries: The files. None if this look-up did not list them.
    """

    fingerprint: str
    modified: str = ""
    edition: str = ""
    contents: dict[str, str] = field(default_factory=dict)
    present: bool = True
    note: str = ""
    entries: list[Entry] | None = field(default=None, compare=False, repr=False)

    @property
    def key_text(self) -> str:
        """Fingerprint and edition: the text that stands for the content in the ingest key."""
        return f"{self.fingerprint}+{self.edition}" if self.edition else self.fingerprint


def find_source(store: Store, card: Card, check_remote: bool = True) -> KnownSource:
    """List the files of a card's source, save the state of the source, and return this state.

    If the files do not exist any more or cannot be reached, the last known state is returned, so
    that existing results stay valid. If files were rewritten, the state has a `note`; this function
    does not read them.

    Args:
        store: Stores the state of sources.
        card: The card.
        check_remote: If false, return the last known state of a source on another machine without
            contacting it, if its data was ingested.

    Raises:
        UserError: If the splits of the card have no files, and no earlier state is known.
        StorageUnavailable: If the source cannot be reached and no earlier state is known.
    """
    last_fingerprint = store.remembered(card.identity())
    last_source = None
    if isinstance(last_fingerprint, str):
        last_source = KnownSource(**_load_known(store, card, last_fingerprint))
    if (
        last_source
        and not check_remote
        and not is_local_source(card)
        and _is_ingested(store, card, last_source)
    ):
        return last_source
    try:
        with patience(FIRST_CONTACT_S):
            entries = list_source(card) or []
            state = source_state(card, entries)
    except StorageUnavailable:
        if last_source is None:
            raise
        return last_source
    fingerprint = state.fingerprint if state else last_fingerprint
    if not isinstance(fingerprint, str):
        reasons = describe_left_out((entry.name, entry.problem) for entry in entries)
        raise UserError(
            f"card {card.name!r}: its source {card.source.path or card.source.name!r} does not "
            f"exist or has no images in its splits{reasons}, and it was never ingested into this "
            "storage; add the data, or correct `source.path` or `source.splits` on the card"
        )
    known = _load_known(store, card, fingerprint)
    if state is None:
        return KnownSource(**known, present=False, note=GONE)
    if store.remembered(card.identity()) != fingerprint:
        store.remember(card.identity(), fingerprint)
    if not known["modified"]:
        known["modified"] = state.modified
        _save_known(store, card, known)
    note = ""
    if known["modified"] != state.modified:
        note = REWRITTEN
    return KnownSource(**known, note=note, entries=entries)


def compare_rewritten_sources(config: Config, store: Store, say: Callable[[str], None]) -> None:
    """Call `compare_rewritten_source` for each card of a config.

    A card that cannot be loaded is skipped: building the graph reports the error.

    Args:
        config: The config.
        store: Stores the state of sources.
        say: Prints a line.
    """
    for name in dict.fromkeys(entry.card for entry in config.stream.tasks):
        try:
            card = card_files.load_card_file(name, store)
        except UserError:
            continue
        compare_rewritten_source(store, card, say)


def compare_rewritten_source(store: Store, card: Card, say: Callable[[str], None]) -> None:
    """Read the raw files of a card again if they were rewritten in place, and compare the content.

    If the content differs, it becomes another edition of the source. Nothing happens if the files
    were not rewritten, do not exist, or cannot be listed.

    Args:
        store: Stores the state of sources.
        card: The card.
        say: Prints a line.
    """
    try:
        with patience(FIRST_CONTACT_S):
            state = source_state(card)
    except UserError:  # `find_source` raises the error, or uses the last known state
        return
    if state is None:
        return
    known = _load_known(store, card, state.fingerprint)
    if not known["modified"] or known["modified"] == state.modified:
        return
    known["modified"] = state.modified
    before = known["contents"].get(known["edition"])
    inputs = stage_inputs(card, KnownSource(**known))
    if before is None and Artifact.open(store.root, compute_key(inputs, ())) is None:
        pass  # the source was never ingested, so it has no earlier content to compare with
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
    _save_known(store, card, known)


def _is_ingested(store: Store, card: Card, source: KnownSource) -> bool:
    """Return whether the store has the result of ingesting a source."""
    return Artifact.open(store.root, compute_key(stage_inputs(card, source), ())) is not None


def stage_inputs(card: Card, source: KnownSource) -> dict[str, Any]:
    """Return the inputs for the key of the card's ingest stage."""
    return {
        "step": "ingest",
        "card": card.identity(),
        "source": source.key_text,
        "revision": ingest.REVISION,
    }


def fingerprint_classes(card: Card, entries: list[Entry]) -> ClassFiles:
    """Count the files of each label, and hash their names, sizes and modification times.

    Images that the card leaves out are not counted. The result is empty for formats that store
    several images in one file.

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
    """Return the key of the last ingest of a card with this name, or "" if there was none."""
    last = store.remembered(_name_of_files(card))
    key = last.get("key") if isinstance(last, dict) else None
    return key if isinstance(key, str) and run_record.PLAIN.fullmatch(key) else ""


def read_last_files(store: Store, card: Card) -> ClassFiles:
    """Return the files of each label at the last ingest of a card with this name.

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
    """List the classes with changed files since the last ingest of a card with this name, as text.

    The result is empty if nothing changed, or if there was no such ingest.

    Args:
        store: Stores the `ClassFiles` of the last ingest.
        card: The card.
        now: Result of `fingerprint_classes` for the current files.
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
    more = f" and {len(parts) - MAX_NAMED_CLASSES} more" if len(parts) > MAX_NAMED_CLASSES else ""
    return f"other files than before: {', '.join(parts[:MAX_NAMED_CLASSES])}{more}" if parts else ""


def record_ingest(
    store: Store, card: Card, source: str, artifact: Artifact, files: ClassFiles | None = None
) -> None:
    """Save the digests of an ingest: of the raw content, of each class, and of the raw files.

    Args:
        store: Store of the run.
        card: Card of the data set.
        source: `KnownSource.key_text`.
        artifact: The result of the ingest stage.
        files: Result of `fingerprint_classes`.
    """
    fingerprint, _, edition = source.partition("+")
    known = _load_known(store, card, fingerprint)
    known["contents"][edition] = artifact.manifest["raw_content"]
    _save_known(store, card, known)
    store.remember(_name_of_images(card, source), _digest_artifact(artifact))
    store.remember(_name_of_files(card), {"key": artifact.key, "files": files or {}})


def class_digests(store: Store, card: Card, source: KnownSource) -> ClassDigests | None:
    """Return the digests of the ingested images of each class.

    The digests stay available if the raw files and the ingested shards do not exist any more.

    Args:
        store: Stores the digests.
        card: The card.
        source: State of the card's source.

    Returns:
        The digests, or None if the source is not ingested yet or the ingested data is damaged.
    """
    name = _name_of_images(card, source.key_text)
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
    store.remember(name, digests)
    return digests


def _digest_artifact(artifact: Artifact) -> ClassDigests:
    """Return the digests of the images of each class in the result of an ingest stage."""
    # imported here to keep the start-up fast: they import torch
    from workers.data.in_place import is_in_place, read_shard_list
    from workers.data.shards import get_limits, read_hold_out, read_index

    in_place = is_in_place(artifact)
    files = read_shard_list(artifact) if in_place else artifact.manifest["files"]
    # settings that change which images are used or how they are decoded, and so the results
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


def _name_of_source(card: Card, fingerprint: str) -> str:
    return f"{card.identity()}-{fingerprint.replace(':', '-')[:40]}"


def _load_known(store: Store, card: Card, fingerprint: str) -> dict[str, Any]:
    """Return the saved fields of a `KnownSource`; an unsaved or invalid field has its default."""
    stored = store.remembered(_name_of_source(card, fingerprint))
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


def _save_known(store: Store, card: Card, known: dict[str, Any]) -> None:
    """Save fields of a `KnownSource`."""
    store.remember(_name_of_source(card, known["fingerprint"]), known)
