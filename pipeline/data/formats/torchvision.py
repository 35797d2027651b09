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

IMAGES_PER_UNIT = 1024  # many, because the images of these data sets are small
LABEL_LISTS = ("targets", "labels", "_labels")  # attributes of data sets with the list of labels


def units(card: Card, entries: list[Entry], map_fn: MapFn) -> list[Unit]:
    """Return the units of all splits of the card. Downloads the data set if it is missing."""
    path = source_uri(card)
    name = card.source.name
    result: list[Unit] = []
    for split in SPLITS:
        split_names = _get_split_names(card, split)
        if not split_names:
            continue
        size = len(load_data_set(path, name, split_names, True))
        for start in range(0, size, IMAGES_PER_UNIT):
            stop = min(start + IMAGES_PER_UNIT, size)
            args = (path, name, split, split_names, start, stop)
            result.append(Unit(read_torchvision, args, stop - start))
    return result


def _get_split_names(card: Card, split: Split) -> str:
    """Return torchvision's name of a split; several names are joined by `+`."""
    return "+".join(card.source.list_parts(split))


def check(card: Card, entries: list[Entry]) -> None:
    """Raise UserError if torchvision has no such data set. Downloads nothing."""
    _find_data_set_class(card.source.name)


@lru_cache(maxsize=2)
def load_data_set(path: str, name: str, split_names: str, download: bool) -> Any:
    """Return a data set of torchvision. Several official splits are concatenated.

    Args:
        path: Folder of the data.
        name: Name of the data set.
        split_names: torchvision's name of the split, for example `train-standard`; several are
            joined by `+`.
        download: Download missing files.

    Raises:
        UserError: If the data set or split does not exist or cannot be loaded.
    """
    parts = [_load_split(path, name, part, download) for part in split_names.split("+")]
    if len(parts) == 1:
        return parts[0]
    from torch.utils.data import ConcatDataset  # slow import

    joined: Any = ConcatDataset(parts)
    joined.classes = getattr(parts[0], "classes", None)
    return joined


def _load_split(path: str, name: str, split_name: str, download: bool) -> Any:
    data_set_class = _find_data_set_class(name)
    split_argument: dict[str, Any] = {"split": split_name}
    # classes such as CIFAR100 have an argument `train` (bool) instead of `split`
    if "train" in inspect.signature(data_set_class).parameters:
        split_argument = {"train": split_name == "train"}
    try:
        return data_set_class(root=path, download=download, **split_argument)
    except (OSError, RuntimeError, ValueError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        if "argument split" in reason:  # torchvision's message for an unknown split
            raise UserError(
                f"torchvision's {name} has no split {split_name!r} ({reason}); name its splits in "
                "source.splits of the card, e.g. {train: train+val, test: test}"
            ) from None
        raise UserError(
            f"cannot load torchvision's {name} from {path} ({reason}); put its files there, or run "
            "this once with internet access"
        ) from None


def _find_data_set_class(name: str) -> Any:
    """Return the class of a data set of torchvision.

    Raises:
        UserError: If no such class exists, or its splits cannot be downloaded.
    """
    from torchvision import datasets  # slow import

    data_set_class: Any = getattr(datasets, name, None)
    is_class = inspect.isclass(data_set_class)
    options = inspect.signature(data_set_class).parameters if is_class else {}
    can_download = {"root", "download"} <= options.keys()
    has_splits = bool({"train", "split"} & options.keys())
    if data_set_class is None or not can_download or not has_splits:
        raise UserError(
            f"source.name is {name!r}, which is not a data set of torchvision with train and test "
            "splits that can be downloaded; some are CIFAR10, CIFAR100, MNIST, SVHN"
        )
    return data_set_class


def read_torchvision(
    path: str,
    name: str,
    split: str,
    split_names: str,
    start: int,
    stop: int,
) -> Iterator[ItemBytes]:
    """Yield images `start` to `stop` of a split as PNG.

    Args:
        path: Folder of the data.
        name: Name of the data set.
        split: Split of the card.
        split_names: torchvision's names of the split, as in `load_data_set`.
        start: Index of the first image.
        stop: Index after the last image.
    """
    data = load_data_set(path, name, split_names, False)
    for row in range(start, stop):
        image, label = data[row]
        item = Item(split, f"{split}:{row}", f"{row:08d}", int(label))
        yield item, png(image)


def count_labels(card: Card, entries: list[Entry]) -> LabelCounts:
    """Return the number of images by split and label. Downloads the data set if it is missing.

    No image is decoded. If a data set has no list of labels, all its images have the label None.
    """
    counts: LabelCounts = Counter()
    for split in filter(card.source.splits.get, SPLITS):
        data = load_data_set(
            source_uri(card), card.source.name, _get_split_names(card, split), True
        )
        labels = next(filter(len, (getattr(data, name, ()) for name in LABEL_LISTS)), ())
        counts.update((split, normalize_label(int(label))) for label in labels)
        counts[split, None] += len(data) - len(labels)
    return +counts  # without zeros


FORMAT = Format(units, count_labels, check=check)
