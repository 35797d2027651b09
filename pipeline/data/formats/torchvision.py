"""Data sets that torchvision downloads, such as CIFAR100."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from pipeline.data.cards import Card
from pipeline.data.formats.base import (
    Format,
    Item,
    ItemBytes,
    MapFn,
    Unit,
    class_of,
    png,
    source_uri,
)
from pipeline.data.listing import SPLITS, Entry
from workers.errors import UserError

IMAGES_PER_UNIT = 1024  # they are small


def units(card: Card, entries: list[Entry], map_fn: MapFn) -> list[Unit]:
    """Return units of both splits; the data set is downloaded where it is missing."""
    path = source_uri(card)
    name = card.source.name
    units: list[Unit] = []
    for split in SPLITS:
        words = card.source.splits.get(split, "")
        if not words:
            continue
        size = len(torchvision_set(path, name, words, True))
        for start in range(0, size, IMAGES_PER_UNIT):
            stop = min(start + IMAGES_PER_UNIT, size)
            args = (path, name, split, words, start, stop, card.classes)
            units.append(Unit(read_torchvision, args, stop - start))
    return units


def check(card: Card, entries: list[Entry]) -> None:
    """Raise UserError where torchvision has no such data set; nothing is downloaded."""
    _kind_of(card.source.name)


@lru_cache(maxsize=2)
def torchvision_set(path: str, name: str, words: str, download: bool) -> Any:
    """Return a data set of torchvision, or several splits of it after each other.

    words: what torchvision calls the split, such as `train-standard`; several with `+` between.
    Raise UserError where there is no such data set or split, or it cannot be fetched.
    """
    parts = [_one_split(path, name, word, download) for word in words.split("+")]
    if len(parts) == 1:
        return parts[0]
    from torch.utils.data import ConcatDataset  # seconds

    joined: Any = ConcatDataset(parts)
    joined.classes = getattr(parts[0], "classes", None)
    return joined


def _one_split(path: str, name: str, word: str, download: bool) -> Any:
    kind = _kind_of(name)
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


def _kind_of(name: str) -> Any:
    from torchvision import datasets  # seconds

    kind = getattr(datasets, name, None)
    options = inspect.signature(kind).parameters if inspect.isclass(kind) else {}
    can_download = {"root", "download"} <= options.keys()
    has_splits = bool({"train", "split"} & options.keys())
    if kind is None or not can_download or not has_splits:
        raise UserError(
            f"source.name is {name!r}, which is no data set of torchvision with train and test "
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
    classes: tuple[str, ...],
) -> Iterator[ItemBytes]:
    """Yield images `start` to `stop` of a split as PNG. words: as in `torchvision_set`."""
    data = torchvision_set(path, name, words, False)
    for row in range(start, stop):
        image, label = data[row]
        item = Item(split, f"{split}:{row}", f"{row:08d}", class_of(int(label), classes))
        yield item, png(image)


FORMAT = Format(units, check=check)
