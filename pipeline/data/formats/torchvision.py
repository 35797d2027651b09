"""Data sets that torchvision downloads, for example CIFAR100."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from pipeline.data.cards import Card
from pipeline.data.formats.base import (
    Format,
    Item,
    ItemBytes,
    LabelCounts,
    MapFn,
    Unit,
    png,
    source_uri,
)
from pipeline.data.labels import normalize_label
from pipeline.data.listing import Entry
from pipeline.data.splits import SPLITS, Split
from workers.errors import UserError

IMAGES_PER_UNIT = 1024  # they are small
LABEL_LISTS = ("targets", "labels", "_labels")  # attributes of the data sets


def units(card: Card, entries: list[Entry], map_fn: MapFn) -> list[Unit]:
    """Return units of both splits; the data set is downloaded where it is missing."""
    path = source_uri(card)
    name = card.source.name
    units: list[Unit] = []
    for split in SPLITS:
        words = _words(card, split)
        if not words:
            continue
        size = len(torchvision_set(path, name, words, True))
        for start in range(0, size, IMAGES_PER_UNIT):
            stop = min(start + IMAGES_PER_UNIT, size)
            args = (path, name, split, words, start, stop)
            units.append(Unit(read_torchvision, args, stop - start))
    return units


def _words(card: Card, split: Split) -> str:
    """Return torchvision's name of a split; several names are joined by `+`."""
    return "+".join(card.source.list_parts(split))


def check(card: Card, entries: list[Entry]) -> None:
    """Raise UserError where torchvision has no such data set; nothing is downloaded."""
    _get_kind(card.source.name)


@lru_cache(maxsize=2)
def torchvision_set(path: str, name: str, words: str, download: bool) -> Any:
    """Return a data set of torchvision, or several of the splits in sequence.

    Args:
        path: Folder of the data.
        name: Name of the data set.
        words: torchvision's name of the split, for example `train-standard`; several are joined by
            `+`.
        download: Download missing files.

    Raises:
        UserError: If there is no such data set or split, or it cannot be downloaded.
    """
    parts = [_one_split(path, name, word, download) for word in words.split("+")]
    if len(parts) == 1:
        return parts[0]
    from torch.utils.data import ConcatDataset  # seconds

    joined: Any = ConcatDataset(parts)
    joined.classes = getattr(parts[0], "classes", None)
    return joined


def _one_split(path: str, name: str, word: str, download: bool) -> Any:
    kind = _get_kind(name)
    split_argument: dict[str, Any] = {"split": word}
    if "train" in inspect.signature(kind).parameters:
        split_argument = {"train": word == "train"}
    try:
        return kind(root=path, download=download, **split_argument)
    except (OSError, RuntimeError, ValueError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        if "argument split" in reason:
            raise UserError(
                f"torchvision's {name} has no split {word!r} ({reason}); name its splits in "
                "source.splits of the card, e.g. {train: train+val, test: test}"
            ) from None
        raise UserError(
            f"torchvision's {name} is not below {path} and cannot be downloaded ({reason}); "
            "put its files there, or run this once on a machine with a network"
        ) from None


def _get_kind(name: str) -> Any:
    from torchvision import datasets  # seconds

    kind = getattr(datasets, name, None)
    options = inspect.signature(kind).parameters if inspect.isclass(kind) else {}
    can_download = {"root", "download"} <= options.keys()
    has_splits = bool({"train", "split"} & options.keys())
    if kind is None or not can_download or not has_splits:
        raise UserError(
            f"source.name is {name!r}, which is not a data set of torchvision with train and test "
            "splits that can be downloaded; some are CIFAR10, CIFAR100, MNIST, SVHN"
        )
    return kind


def read_torchvision(
    path: str,
    name: str,
    split: str,
    words: str,
    start: int,
    stop: int,
) -> Iterator[ItemBytes]:
    """Yield images `start` to `stop` of a split as PNG. words: as in `torchvision_set`."""
    data = torchvision_set(path, name, words, False)
    for row in range(start, stop):
        image, label = data[row]
        item = Item(split, f"{split}:{row}", f"{row:08d}", int(label))
        yield item, png(image)


def count_labels(card: Card, entries: list[Entry]) -> LabelCounts:
    """Return the number of images by split and label, as far as torchvision knows without pixels.

    A data set that keeps no list of labels counts all images of a split without one.
    """
    counts: LabelCounts = Counter()
    for split in filter(card.source.splits.get, SPLITS):
        data = torchvision_set(source_uri(card), card.source.name, _words(card, split), True)
        labels = next(filter(len, (getattr(data, name, ()) for name in LABEL_LISTS)), ())
        counts.update((split, normalize_label(int(label))) for label in labels)
        counts[split, None] += len(data) - len(labels)
    return +counts


FORMAT = Format(units, count_labels, check=check)
