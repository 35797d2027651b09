"""A data set as it lies at a path: what its card has to say, and what a person wants to know."""

from __future__ import annotations

import re
import shlex
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from pipeline.data.cards import MAX_CLASS_CHARACTERS
from pipeline.data.listing import nfc, printable
from workers.errors import UserError

TEST_FRACTION = 0.2  # held out by hash where a source has no test images
MAX_NAME = 60  # characters of a data set's name
MAX_NAMED = 3  # names that a sentence lists
# how people call the parts of a data set, in lower case
TRAIN_NAMES = ("train", "training", "trn", "train_set", "trainset")
VALIDATION_NAMES = ("val", "valid", "validation", "dev", "val_set", "valset")
TEST_NAMES = ("test", "testing", "tst", "eval", "evaluation", "test_set", "testset")
MAX_CLASSES = 20_000  # of one data set: a column or a folder of more is no set of classes


@dataclass(frozen=True)
class DataSet:
    """One data set.

    name: for cards and tasks. layout: what lies there, in a few words. source: that of the card.
    classes: in the order of the card; are_folders: whether the card takes them from the folders of
    its source. counts: images of `train` and `test`; is_exact: False where they are at least so
    many. left_out: a sentence part each on what is there and not used. bad_fraction: share of
    images that are known to be left out. sizes: (width, height) of a few images in pixels.
    """

    name: str
    layout: str
    source: dict[str, Any]
    classes: tuple[str, ...]
    counts: dict[str, int]
    are_folders: bool = False
    is_exact: bool = True
    left_out: tuple[str, ...] = ()
    bad_fraction: float = 0.0
    sizes: tuple[tuple[int, int], ...] = ()

    @property
    def has_test(self) -> bool:
        """Whether the source itself has test images."""
        return "test" in self.counts


@dataclass(frozen=True)
class SplitNames:
    """What the splits of a data set are called where it lies.

    train, test: None without one. unused: those that no split of the card is.
    """

    train: str | None
    test: str | None
    unused: tuple[str, ...] = ()


@dataclass(frozen=True)
class Request:
    """What a person asks to look at.

    path: as it was given. program: how a person starts Accrete. image, label: the columns that were
    named; None: they are guessed.
    """

    path: str
    program: str = "accrete"
    image: str | None = None
    label: str | None = None

    def command(self, **options: str) -> str:
        """Return what a person types to ask again, with options."""
        words = ["init", self.path]
        for name, value in options.items():
            words += [f"--{name}", value]
        return f"{self.program} {shlex.join(words)}"


def split_of(name: str) -> str | None:
    """Return `train`, `val` or `test` where a name is how people call that part of a data set."""
    word = name.lower()
    if word in TRAIN_NAMES:
        return "train"
    if word in VALIDATION_NAMES:
        return "val"
    return "test" if word in TEST_NAMES else None


def choose_splits(
    names: Iterable[str], split_of_name: Callable[[str], str | None] = split_of
) -> SplitNames:
    """Return which names are train and test. Validation images serve as test without any.

    split_of_name: what a name says.
    """
    by_split: dict[str, list[str]] = {}
    for name in sorted(names):
        split = split_of_name(name)
        if split is not None:
            by_split.setdefault(split, []).append(name)
    for split, group in by_split.items():
        if len(group) > 1:
            raise UserError(
                f"{quoted(group[0])} and {quoted(group[1])} are both {split} images; rename one"
            )
    first = {split: group[0] for split, group in by_split.items()}
    test = first.get("test", first.get("val"))
    unused = tuple(name for name in first.values() if name not in (first.get("train"), test))
    return SplitNames(first.get("train"), test, unused)


def name_of(text: str, default: str = "data") -> str:
    """Return a name that cards, tasks and files can have, made of any text."""
    plain = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()
    name = re.sub(r"[^A-Za-z0-9_.-]+", "-", plain)
    name = re.sub(r"^[^A-Za-z0-9]+|[^A-Za-z0-9]+$", "", name)[:MAX_NAME]
    return name or default


def check_classes(where: str, classes: Iterable[str]) -> tuple[str, ...]:
    """Return classes of a source. Raise `UserError` where they cannot be those of a card."""
    names = tuple(classes)
    if len(names) > MAX_CLASSES:
        raise UserError(
            f"{where} has {len(names)} classes, and more than {MAX_CLASSES} are not proposed; "
            "write the card by hand, see datasets/README.md"
        )
    for name in names:
        if not (name.isprintable() and 0 < len(name) <= MAX_CLASS_CHARACTERS):
            raise UserError(
                f"{where}: class {quoted(name)} is no name that can be shown and filed; rename it "
                f"to 1 to {MAX_CLASS_CHARACTERS} printable characters"
            )
    counts = Counter(map(nfc, names))
    for name in names:
        if counts[nfc(name)] > 1:
            raise UserError(
                f"{where}: two classes are called {quoted(name)} in two Unicode forms (NFC and "
                "NFD); merge them, or rename one"
            )
    if len(names) < 2:
        listed = f"one class, {quoted(names[0])}" if names else "no class"
        raise UserError(
            f"{where} has {listed}, and a task tells at least two apart; "
            "give the folder or file that holds all classes"
        )
    return names


def sorted_labels(labels: Iterable[str]) -> list[str]:
    """Return the names of classes in order: by number where all are whole numbers."""
    names = [*labels]
    if all(re.fullmatch(r"-?[0-9]{1,9}", name) for name in names):
        return sorted(names, key=lambda name: (int(name), name))
    return sorted(names)


def quoted(name: str) -> str:
    """Return a stranger's name for a sentence: escaped, in quotes, not too long."""
    text = printable(name)
    if len(text) > 60:
        text = f"{text[:57]}..."
    return f"'{text}'"


def listed(names: Iterable[str], most: int = MAX_NAMED) -> str:
    """Return the first of some names for a sentence."""
    all_names = [*names]
    text = ", ".join(map(quoted, all_names[:most]))
    more = len(all_names) - most
    return f"{text} and {more} more" if more > 0 else text


def counted(number: int, noun: str, is_exact: bool = True) -> str:
    """Return a number with its noun: `1 image`, `2 images`, `more than 1000 images`."""
    plural = noun if number == 1 else f"{noun}{'es' if noun.endswith('s') else 's'}"
    prefix = "" if is_exact else "more than "
    return f"{prefix}{number} {plural}"
