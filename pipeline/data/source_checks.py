"""Apply the checks of ingest to the listing of a source, before any image is read.

Therefore `plan` finds many errors of `ingest` in the time of a listing, with the same messages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import pyarrow as pa

from pipeline.data.cards import Card
from pipeline.data.formats import entries_of_split, get_format
from pipeline.data.formats.base import Item, find_archives
from pipeline.data.ingest import check_promises
from pipeline.data.labels import Label
from pipeline.data.listing import Entry
from pipeline.data.names import printable
from pipeline.data.packs import ImageChecker
from pipeline.data.selection import CLASSES, check_class_images, check_listed
from pipeline.data.splits import SPLITS

_PROBLEMS = pa.schema([(name, pa.large_string()) for name in ("split", "name", "problem")])


def check_source(card: Card, entries: list[Entry]) -> None:
    """Raise `UserError` if ingest would refuse a source regardless of the content of the images.

    Args:
        card: The card.
        entries: Files of the source; empty if the data comes from a Python package.
    """
    source_format = get_format(card)
    if source_format.check is not None:
        source_format.check(card, entries)
    if source_format.list_items is not None:
        _check_items(card, source_format.list_items(card, entries))
    elif source_format.suffixes:
        _check_splits(card, entries)


def _check_items(card: Card, items: Iterable[Item]) -> None:
    """Check the images of a format that lists them with their labels."""
    checker = ImageChecker(card)
    # label -> row of one image with this label; equal labels have the same class or problem
    rows: dict[Label, dict[str, Any]] = {}
    counts: Counter[tuple[str, str]] = Counter()
    problems: list[dict[str, Any]] = []
    for item in items:
        if checker.is_left_out(item):
            continue
        row = rows.get(item.label)
        if row is None or item.problem:
            row = checker.row(item)
        if item.problem is None:
            rows[item.label] = row
        if row["problem"] is None:
            counts[item.split, row["label"]] += 1
        else:
            problems.append(_problem_row(item, row["problem"]))
    totals = check_listed(card, counts, pa.Table.from_pylist(problems, _PROBLEMS))
    # `totals` are upper limits, so more images than promised are not an error yet. The digest of
    # the content is unknown: passing the card's own value skips its check.
    promised = card.counts.by_split() if card.counts else {}
    if any(totals.get(split, 0) < number for split, number in promised.items()):
        check_promises(card, totals, card.content or "")


def _check_splits(card: Card, entries: list[Entry]) -> None:
    """Check the files of each split, for a format whose labels are known only after reading.

    Each file may hold images of any class. Therefore a split with a file passes.
    """
    source_format = get_format(card)
    problems: list[dict[str, Any]] = []
    possible: list[dict[str, Any]] = []
    for split in SPLITS:
        if source_format.list_shards is not None:
            has_files = bool(entries_of_split(card, split, entries))
        else:
            uris, items = find_archives(card, split, entries, source_format.suffixes)
            has_files = bool(uris)
            problems += [_problem_row(item, item.problem) for item in items]
        if has_files or (split == "test" and card.test_fraction):
            possible += [{"split": split, "label": name} for name in card.order()]
    check_class_images(
        card,
        pa.Table.from_pylist(problems, _PROBLEMS),
        pa.Table.from_pylist(possible, CLASSES),
    )


def _problem_row(item: Item, problem: str | None) -> dict[str, Any]:
    return {"split": item.split, "name": printable(item.name), "problem": problem}
