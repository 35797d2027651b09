"""Placeholders of data sets that are not on this machine, to plan a run before a download."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.config.yaml_files import dump_yaml
from pipeline.data import card_files
from pipeline.data.cards import FROM_SOURCE
from pipeline.data.catalogue import num_classes
from pipeline.data.formats.base import source_uri
from workers.errors import UserError
from workers.storage.artifact import is_local


def is_missing(name: str) -> bool:
    """Return whether the source of a card is not on this machine.

    Args:
        name: Name or path of a card.
    """
    card = card_files.load_without_source(name)
    if not card.source.path:
        return False  # ships with a package
    uri = source_uri(card)
    return not (is_local(uri) and os.path.exists(uri))


def write_placeholder(name: str, folder: Path) -> Path:
    """Write a card with the classes and image counts of another card, and tables of empty images.

    Args:
        name: Name or path of the card.
        folder: New folder for the card and its files.

    Returns:
        Path of the new card.

    Raises:
        UserError: If the card does not have `counts`.
    """
    card = card_files.load_without_source(name)
    if card.counts is None:
        raise UserError(f"card {name!r} has no `counts`, so that its cost cannot be forecast")
    names = list(card.classes)
    if names == [FROM_SOURCE]:
        names = [f"class-{number:05}" for number in range(num_classes(card))]
    numbers = {split: number for split, number in card.counts.by_split().items() if number}
    folder.mkdir(parents=True)
    for split, number in numbers.items():
        labels = pa.array(np.arange(number) % len(names))
        images = pa.repeat(pa.scalar(b"", pa.binary()), number)
        pq.write_table(pa.table({"image": images, "label": labels}), folder / f"{split}.parquet")
    body = {
        "name": card.name,
        "title": card.title,
        "source": {
            "format": "parquet",
            "path": str(folder),
            "splits": {split: f"{split}.parquet" for split in numbers},
            "numbers": "places",
        },
        "licence": card.licence,
        "counts": card.counts.by_split(),
        "classes": names,
    }
    path = folder / "card.yaml"
    path.write_text(dump_yaml(body))
    return path
