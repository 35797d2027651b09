"""Find new classes, and new images of known classes, in data to be added to a run.

A class is known if a task of the run has it. Start reading at `find_new_data`.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.config.settings import Config
from pipeline.config.text import format_count
from pipeline.data import card_files
from pipeline.data.cards import FROM_SOURCE, Card
from pipeline.data.detection.data_set import DataSet, Request
from pipeline.data.detection.detect import detect
from pipeline.data.formats import count_labels, list_source
from pipeline.data.formats.folder import class_folders, labelled_entries
from pipeline.data.listing import Entry
from pipeline.data.names import listed, nfc, printable
from pipeline.data.source_classes import find_counted_classes
from pipeline.data.splits import IGNORE, SPLITS
from pipeline.graph import raw_data
from pipeline.graph.store import Store
from workers.errors import UserError


@dataclass(frozen=True)
class UsedCard:
    """A card of a stream.

    Attributes:
        path: Name of a card in `datasets`, or path of the card, relative to the working directory.
        card: Content of the card. `classes` is `(FROM_SOURCE,)` if its classes come from the
            source.
        entries: Positions in `stream.tasks` of the entries that use the card.
    """

    path: str
    card: Card
    entries: tuple[int, ...]


@dataclass(frozen=True)
class NewData:
    """New classes and images in the data given by the user.

    The data is either the source of a card in the stream, which has grown, or a separate data set.

    Attributes:
        card: The card whose source has grown. None for a separate data set.
        data_set: The separate data set. None if a source has grown.
        classes: New classes: no task has them.
        images: Known class -> number of new images; 0 if files were only changed or removed. Empty
            if the files of a grown source contain several images each, or were never ingested.
        all_classes: All classes of the data.
        passed_over: Classes of a grown source that no task has, but that are not new: the card
            lists them, or an earlier ingest has read them.
    """

    card: UsedCard | None
    data_set: DataSet | None
    classes: tuple[str, ...]
    images: Mapping[str, int] = field(default_factory=dict)
    all_classes: tuple[str, ...] = ()
    passed_over: tuple[str, ...] = ()

    def describe(self) -> str:
        """Return a clause that describes the new data, for example `1 new class ('owl')`."""
        parts: list[str] = []
        if self.classes:
            parts.append(f"{format_count(len(self.classes), 'new class')} ({listed(self.classes)})")
        if self.images:
            number = sum(self.images.values())
            parts.append(f"{format_count(number, 'new image')} of {listed(sorted(self.images))}")
        text = " and ".join(parts) or "no new class, and no new file of a class"
        if not self.passed_over:
            return text
        return (
            f"{text}; {listed(self.passed_over)} are not new and in no task: `--as classes` takes "
            "them in"
        )


def list_used_cards(config: Config) -> list[UsedCard]:
    """Return the cards of a stream, each once."""
    positions: dict[str, list[int]] = {}
    for index, entry in enumerate(config.stream.tasks):
        positions.setdefault(entry.card, []).append(index)
    return [
        UsedCard(path, card_files.load_without_source(path), tuple(places))
        for path, places in positions.items()
    ]


def find_new_data(
    data: str,
    cards: Sequence[UsedCard],
    task_classes: Mapping[str, Sequence[str]],
    store: Store,
    program: str,
    takes_all: bool = False,
) -> NewData:
    """Find the classes and images in some data that the tasks of a run do not have.

    Args:
        data: Path of the data. If it is the source of a card, or inside the source of a card, that
            card has grown. Otherwise the data is a separate data set.
        cards: Cards of the stream.
        task_classes: Classes of each task.
        store: Store of the run, with the state of the last ingest.
        program: Command that starts Accrete, for messages.
        takes_all: Treat all classes of a grown source that no task has as new. If false, classes
            that the card lists, or that an earlier ingest in this storage has read, are not new
            (see `NewData.passed_over`).

    Raises:
        UserError: If the data cannot be read, or contains several data sets.
    """
    known = {nfc(name) for classes in task_classes.values() for name in classes}
    grown = next((used for used in cards if _is_source(used.card, data)), None)
    if grown is None:
        return _find_elsewhere(data, known, cards, program)
    return _find_in_source(grown, known, store, data, takes_all)


def _is_source(card: Card, data: str) -> bool:
    """Return whether a path is the source of a card, or a file or folder inside the source."""
    sources = [card.source.path, *(folder.path for folder in card.source.more)]
    for source in filter(None, sources):
        if "://" in source or "://" in data:
            if data.rstrip("/") == source.rstrip("/"):
                return True
            continue
        folder, path = os.path.realpath(source), os.path.realpath(data)
        if path == folder or path.startswith(folder.rstrip("/") + "/"):
            return True
    return False


def _holds(folder: str, path: str) -> bool:
    """Return whether a local path is equal to a folder, or inside the folder."""
    if "://" in folder:
        return False
    return f"{os.path.realpath(path)}/".startswith(f"{os.path.realpath(folder).rstrip('/')}/")


def _check_is_read(card: Card, data: str, entries: Sequence[Entry]) -> None:
    """Raise `UserError` if a path in a source does not exist, or the card reads no image there."""
    if "://" in data:
        return
    if not os.path.exists(data):
        raise UserError(
            f"{printable(data)} does not exist; give the path of the new data, or that of the "
            f"source of card {card.name!r}, {printable(card.source.path)}"
        )
    if card.source.format != "folder":
        return
    base = os.path.realpath(card.source.path)
    name = Path(os.path.relpath(os.path.realpath(data), base)).as_posix()
    folders = [
        Path(os.path.relpath(os.path.realpath(more.path), base)) for more in card.source.more
    ]
    if name in (".", *(folder.as_posix() for folder in folders)):
        return
    for found in labelled_entries(card, entries):
        if found.split != IGNORE and f"{found.entry.name}/".startswith(f"{name}/"):
            return
    raise UserError(
        f"{printable(data)} is inside the source of card {card.name!r}, which reads no image "
        "there; "
        "move it out of this folder, or put its images into the folders of the splits, and repeat "
        "the command"
    )


def _find_in_source(
    used: UsedCard, known: set[str], store: Store, data: str, takes_all: bool
) -> NewData:
    """Find what is new in the grown source of a card. See `find_new_data`."""
    card = used.card
    entries = list_source(card) or []
    _check_is_read(card, data, entries)
    if not entries:
        raise UserError(
            f"card {card.name!r}: its source {printable(card.source.path)} does not exist, or "
            "holds no files; put the data there, or fix source.path of the card"
        )
    # labels that are numbers are read as names, because a position in `classes` names no new class
    by_name = card.model_copy(
        update={"source": card.source.model_copy(update={"numbers": "names"})}
    )
    if card.source.format == "folder":
        classes = tuple(sorted(map(nfc, class_folders(card, "train"))))
    else:
        counts = count_labels(by_name, entries)
        classes = find_counted_classes(by_name, entries, counts, "train", min_classes=1).classes
    before = raw_data.read_last_files(store, card)
    on_card = () if card.classes == (FROM_SOURCE,) else card.classes
    left_out = {*map(nfc, card.without_classes)}
    candidates = [name for name in classes if nfc(name) not in known | left_out]
    seen = set() if takes_all else {nfc(name) for name in (*before, *on_card)}
    new = tuple(name for name in candidates if nfc(name) not in seen)
    passed_over = tuple(name for name in candidates if nfc(name) in seen)
    images: Counter[str] = Counter()
    as_read = card if on_card else by_name.model_copy(update={"classes": classes})
    for label, (number, digest) in raw_data.fingerprint_classes(as_read, entries).items():
        old_number, old_digest = before.get(label, (0, ""))
        if nfc(label) in known and before and digest != old_digest:
            images[label] = max(number - old_number, 0)
    return NewData(used, None, new, dict(images), classes, passed_over)


def _find_elsewhere(data: str, known: set[str], cards: Sequence[UsedCard], program: str) -> NewData:
    """Find what is new in a separate data set. See `find_new_data`."""
    data_sets = detect(Request(data, program, min_classes=1))
    if len(data_sets) > 1:
        names = listed([data_set.name for data_set in data_sets])
        raise UserError(
            f"{printable(data)} holds {len(data_sets)} data sets ({names}); add one at a time"
        )
    data_set = data_sets[0]
    for used in cards:
        source = used.card.source.path
        if source and "://" not in source and _holds(data_set.card.source.path, source):
            raise UserError(
                f"{printable(data)} holds the source of card {used.card.name!r}, which the run "
                f"has; give {printable(source)} if this has grown, or the path of the new data"
            )
    new = tuple(name for name in data_set.classes if nfc(name) not in known)
    images = {
        name: sum(data_set.images.get((split, name), 0) for split in SPLITS)
        for name in data_set.classes
        if nfc(name) in known
    }
    return NewData(None, data_set, new, images, data_set.classes)
