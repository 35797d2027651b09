"""The catalogue of the cards in `datasets`: sizes, licences, and how to get the data."""

from __future__ import annotations

import os
import shlex
from typing import NamedTuple

from pipeline.data import card_files
from pipeline.data.cards import Card
from pipeline.data.listing import absolute_uri
from workers.errors import UserError
from workers.storage.artifact import is_local

UNKNOWN = "-"  # shown for a value that a card does not state
HEADING = ["card", "classes", "train", "test", "how it is obtained", "verified", "licence"]
PREPARED = "by hand, then prepared"  # downloaded by hand, then `accrete data prepare`
LEFT = ("card", "how it is obtained", "verified", "licence")


class CatalogueEntry(NamedTuple):
    """A row of the catalogue. `train` and `test` are None if the card does not state them."""

    card: str
    classes: int
    train: int | None
    test: int | None
    obtained: str
    verified: bool
    licence: str

    @property
    def cells(self) -> list[str]:
        """The texts of the columns in HEADING."""
        verified = "no"
        if self.verified:
            verified = "yes"
        counts = [UNKNOWN if count is None else str(count) for count in (self.train, self.test)]
        return [self.card, str(self.classes), *counts, self.obtained, verified, self.licence]


class Catalogue(NamedTuple):
    """The rows of the readable cards, and an error message for each unreadable card."""

    entries: list[CatalogueEntry]
    problems: list[str]


def read_catalogue() -> Catalogue:
    """Return the catalogue of the cards in `datasets`, sorted by name. Sources are not read."""
    catalogue = Catalogue([], [])
    for name in card_files.list_card_names():
        try:
            catalogue.entries.append(make_entry(card_files.load_without_source(name)))
        except UserError as error:
            catalogue.problems.append(str(error))
    return catalogue


def note(program: str) -> str:
    """Return the explanation below the list of cards. `program` is the command for Accrete."""
    return (
        "verified no: the card was written without the data, from the statements of its authors.\n"
        f"by hand: {program} data list cub200 prints where to download the files of cub200.\n"
        "Any other data set: torchvision:NAME or hf://datasets/OWNER/NAME in place of a path: "
        f"{program} run torchvision:SVHN"
    )


def make_entry(card: Card) -> CatalogueEntry:
    """Return the catalogue entry of a card."""
    train = None
    test = None
    if card.counts:
        train = card.counts.train
        test = card.counts.test
    is_verified = bool(card.verified)
    return CatalogueEntry(
        card.name, num_classes(card), train, test, how(card), is_verified, card.licence
    )


def num_classes(card: Card) -> int:
    """Return the number of classes of a card whose source is not read.

    A card with `classes: from_source` must state `num_classes`: its `classes` has one placeholder.
    """
    return card.num_classes or len(card.classes)


def how(card: Card) -> str:
    """Describe in a few words how to get the data of a card."""
    if card.source.format == "sklearn":
        return "with scikit-learn"
    if card.source.format == "torchvision":
        return "automatic, torchvision"
    if card.source.path.startswith("hf://"):
        return "automatic, hub"
    if card.archive is not None and card.archive.layout is not None:
        return PREPARED
    if card.archive is not None:
        return "by hand"
    return "a folder of yours"


def describe_card(name: str, program: str) -> str:
    """Describe the data of a card, and their location or download.

    Args:
        name: Name or path of the card.
        program: Command that starts Accrete.

    Raises:
        UserError: If no such card exists.
    """
    card = card_files.load_without_source(name)
    row = dict(zip(HEADING, make_entry(card).cells, strict=True))
    verified = card.verified or "nothing was checked against the real data"
    lines = [
        f"{card.name}: {card.title}",
        f"  {row['classes']} classes, {row['train']} train and {row['test']} test images",
        f"  licence: {card.licence}",
        f"  cite: {card.cite or UNKNOWN}",
        f"  verified: {verified}",
        f"  obtained: {row['how it is obtained']}",
    ]
    if card.archive is not None:
        lines.append(f"  official files: {card.archive.address}")
    if how(card) == PREPARED:
        lines.append(f"  next: {program} data prepare {shlex.quote(name)} FROM")
    if card.source.path:
        lines.append(f"  read from: {absolute_uri(card.source.path)}{_describe_state(card)}")
    return "\n".join(lines)


def _describe_state(card: Card) -> str:
    """Return ` (there)` or ` (missing)` for a source on this machine, and "" for other sources."""
    path = absolute_uri(card.source.path)
    if not is_local(path):
        return ""
    return " (there)" if os.path.exists(path) else " (missing)"
