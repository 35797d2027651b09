"""A data set as it lies at a path: a way to read it, and what comes out of that.

A way to read is the `source` of a card. It is judged by the code that ingest runs, so that `init`
and `ingest` cannot differ.
"""

from __future__ import annotations

import io
import re
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from PIL import Image

from pipeline.config import checked
from pipeline.data.account import Account, account_of, image_files
from pipeline.data.cards import LIST_MARK, Card, Source
from pipeline.data.formats import count_labels, format_of, list_source, require_entries, units
from pipeline.data.formats.base import LIBRARIES, Item, LabelCounts, read_items
from pipeline.data.formats.folder import LABEL, class_folders
from pipeline.data.labels import check_meaning, check_spelling
from pipeline.data.listing import Entry
from pipeline.data.names import counted, listed, nfc, printable, quoted
from pipeline.data.packs import ImageChecker
from pipeline.data.preview import Picture, most_of_group
from pipeline.data.source_classes import labels_of_counts
from pipeline.data.splits import IGNORE, SPLITS, SplitUnclear
from pipeline.yaml_files import dump_yaml
from workers.errors import UserError

TEST_FRACTION = 0.2  # held out by hash if a source has no test images
MOST_FILES = 1_000_000  # that `init` looks at below one path
MOST_SIZED = 16  # images whose size is looked at
MOST_READ = 4000  # images of a file of many that are looked at for a preview
MOST_READ_BYTES = 64 << 20
FROM_SOURCE = "from_source"  # in place of classes on a card


@dataclass(frozen=True)
class Request:
    """What a person asks to look at.

    Attributes:
        path: As it was given.
        program: How a person starts Accrete.
        given: Settings of the card's source that were given, such as `label`.
        classes: That were given.
    """

    path: str
    program: str = "accrete"
    given: Mapping[str, Any] = field(default_factory=dict)
    classes: tuple[str, ...] = ()

    def command(self, *settings: str, path: str = "") -> str:
        """Return what a person types to ask again, with settings such as `source.split=fold`."""
        words = ["init", path or self.path]
        for setting in settings:
            words += ["--set", setting]
        return f"{self.program} {shlex.join(words)}"


@dataclass(frozen=True)
class DataSet:
    """One data set.

    Attributes:
        name: For cards and tasks.
        layout: What lies there, in a few words.
        card: As it would be written, with classes; its path is that of the source.
        entries: All files below the source.
        counts: Number of images by split.
        are_folders: Whether the card can take its classes from the folders of its source.
        is_exact: False if there are at least so many images.
        notes: Sentences on what is left out.
        bad_fraction: Share of images that are known to be left out.
        sizes: (width, height) of a few images in pixels.
        account: What became of every file.
        images: Number of images by split and class.
    """

    name: str
    layout: str
    card: Card
    entries: Sequence[Entry]
    counts: Mapping[str, int]
    are_folders: bool
    is_exact: bool
    notes: tuple[str, ...]
    bad_fraction: float
    sizes: tuple[tuple[int, int], ...]
    account: Account
    images: Mapping[tuple[str, str], int]

    @property
    def has_test(self) -> bool:
        """Whether the source itself has test images."""
        return "test" in self.counts

    @property
    def classes(self) -> tuple[str, ...]:
        """The classes in the order of the card."""
        return self.card.classes

    @property
    def source(self) -> dict[str, Any]:
        """The source of the card as it is written: what differs from the defaults."""
        return source_body(self.card.source)

    def pictures(self) -> list[Picture]:
        """Return some images of each split and class, for a preview."""
        most = most_of_group(len(self.images))
        wanted = {group: min(number, most) for group, number in self.images.items()}
        checker = ImageChecker(self.card)
        pictures: list[Picture] = []
        for item, data in _some_items(self.card, [*self.entries], wanted):
            group = (item.split, checker.label(item) or "")
            if wanted.get(group) and data is not None:
                wanted[group] -= 1
                pictures.append(Picture.of(self.card, *group, item.name, data))
        return pictures


def yaml_text(text: str) -> str:
    """Return a text as YAML has it in a list."""
    return dump_yaml([text], default_flow_style=True).strip()[1:-1]


def splits_setting(splits: Mapping[str, Sequence[str]]) -> str:
    """Return the setting that says what the splits are, as `Request.command` takes it."""
    body = (f"{split}: [{', '.join(map(yaml_text, parts))}]" for split, parts in splits.items())
    return f"source.splits={{{', '.join(body)}}}"


def source_body(source: Source) -> dict[str, Any]:
    """Return a source as a card writes it: settings that differ from their defaults."""
    body = source.model_dump(exclude_defaults=True)
    body["splits"] = {
        split: parts[0] if len(parts) == 1 else list(parts)
        for split in (*SPLITS, "ignore")
        if (parts := source.parts_of(split))  # type: ignore[arg-type]
    }
    if source.files != "{}" and len(source.file_patterns()) > 1:
        body["files"] = list(source.file_patterns())
    if len(source.split_columns()) > 1:
        body["split"] = list(source.split_columns())
    if source.range is not None:
        body["range"] = list(source.range)
    return body


def read_as(
    request: Request,
    name: str,
    layout: str,
    source: Mapping[str, Any],
    notes: Sequence[str] = (),
    classes: Sequence[str] = (),
) -> DataSet:
    """Return the data set that a way to read a path gives.

    Args:
        request: Whose settings go before those of `source`.
        name: Of the data set.
        layout: What lies there, in a few words.
        source: Of the card.
        notes: Sentences on what is left out.
        classes: In the order of the card, if they do not follow from the labels.

    Raises:
        UserError: If it does not read so.
    """
    body = {**source, **request.given}
    numbers = body.pop("numbers", None)
    card = _card(name, body | {"numbers": "names"}, (FROM_SOURCE,))
    entries = list_source(card, MOST_FILES) or []
    counts = count_labels(card, entries)
    where = printable(str(body.get("path") or name))
    splits = [split for split in SPLITS if any(of == split for of, _ in counts)]
    if "train" not in splits:
        raise _no_train(request, card, where, splits)
    if not classes and request.classes:
        classes = request.classes
    if not classes:
        labels = labels_of_counts(card, entries, counts, "train")
        classes = labels.classes
        numbers = numbers or labels.numbers
        if card.source.format != "folder":
            check_meaning(where, classes)
    if card.source.format not in ("folder", *LIBRARIES):
        body["numbers"] = numbers or "names"
    card = _card(name, body, classes)
    return _judged(card, layout, entries, counts, notes, where, request)


def read_labelled(
    request: Request,
    name: str,
    layout: str,
    source: Mapping[str, Any],
    notes: Sequence[str] = (),
    classes: Sequence[str] = (),
) -> DataSet:
    """Return the data set as `read_as`, without test images that all lack a label.

    Validation images are then the test images, and a note says so.
    """
    data_set = read_as(request, name, layout, source, notes, classes)
    read = data_set.card.source
    if "test" not in read.named_splits() or data_set.has_test or "splits" in request.given:
        return data_set
    splits: dict[str, list[str]] = {
        split: [*parts]
        for split in ("train", "val", IGNORE)
        if (parts := [part for part in read.parts_of(split) if part])
    }
    if "val" in splits:
        splits["test"] = splits.pop("val")
    if read.split is not None:
        splits.setdefault(IGNORE, []).extend(read.parts_of("test"))
    note = f"{listed(read.parts_of('test'))} is not read: its images have no labels"
    return read_as(request, name, layout, {**source, "splits": splits}, [*notes, note], classes)


def read_card(card: Card) -> DataSet:
    """Return the data set that a card reads, with its own classes."""
    entries = require_entries(card)
    where = printable(card.source.path or card.name)
    counts = count_labels(card, entries)
    return _judged(card, f"format {card.source.format}", entries, counts, (), where)


def _no_train(request: Request, card: Card, where: str, splits: Sequence[str]) -> SplitUnclear:
    """Return the error of a data set without train images, with the reason if a name is one."""
    others = f", only {' and '.join(splits)} images" if splits else ""
    parts = [part for text in card.source.splits.values() for part in text.split(LIST_MARK)]
    odd = [part for part in parts if re.search(r"[\[?*]|^\s|\s$", part.replace(LABEL, ""))]
    is_listed = LIST_MARK in "".join(map(str, request.given.values()))
    if "splits" in request.given or is_listed or not odd:
        return SplitUnclear(f"{where} has no train images{others}")
    return SplitUnclear(
        f"{where}: the name {quoted(odd[0])} has signs that stand for others in patterns, or "
        "blanks at its ends; rename it"
    )


def _card(name: str, source: Mapping[str, Any], classes: Sequence[str]) -> Card:
    body = {"name": name, "licence": "unknown", "classes": [*classes], "source": {**source}}
    return checked(Card, body, "", "the card")


def _judged(
    card: Card,
    layout: str,
    entries: list[Entry],
    counts: LabelCounts,
    notes: Sequence[str],
    where: str,
    request: Request | None = None,
) -> DataSet:
    """Return a data set whose labels were read; what fits no class is left out and said."""
    checker = ImageChecker(card)
    images: Counter[tuple[str, str]] = Counter()
    unknown: Counter[tuple[str, str]] = Counter()
    num_unlabelled = 0
    for (split, label), number in counts.items():
        name = checker.names.find(label)
        if name is None:
            num_unlabelled += number
        elif name in card.classes:
            images[split, name] += number
        else:
            unknown[split, str(label)] += number
    totals = {split: sum(n for (of, _), n in images.items() if of == split) for split in SPLITS}
    found = [*notes]
    for split in SPLITS[1:]:
        others = {label: n for (of, label), n in unknown.items() if of == split}
        without = sum(n for (of, label), n in counts.items() if of == split and label is None)
        if others and not totals[split]:
            raise UserError(
                f"{where}: no {split} image has a label of train; {split} has labels such as "
                f"{listed(sorted(others))}, and train {listed(card.classes)}; write them alike, or "
                f"leave the {split} images out{_without_split(request, card, split)}"
            )
        if others or without:
            lost = counted(sum(others.values()) + without, f"{split} image")
            named = f" ({_named(sorted(others))})" if others else ""
            found.append(
                f"{lost} without a label, or with one that train lacks{named} are left out"
            )
    check_spelling(where, {str(label) for _, label in counts if label is not None})
    unlisted = sorted(label for of, label in unknown if of == "train")
    if unlisted:
        found.append(
            f"train images of {_named(unlisted)}, which the card does not list, are left out"
        )
    without = sum(n for (of, label), n in counts.items() if of == "train" and label is None)
    if without:
        found.append(f"{counted(without, 'train image')} without a label are left out")
    folders = _folders_of(card)
    empty = [name for name in folders if name not in card.classes and ("train", name) not in counts]
    if empty:
        found.append(f"folders without train images are no classes: {listed(empty)}")
    is_exact = len(entries) < MOST_FILES
    problems: dict[str, str | None] = {}
    source_format = format_of(card)
    if source_format.list_items is not None:
        rows = ((item, checker.row(item)) for item in source_format.list_items(card, entries))
        problems = image_files((row["name"], row["problem"]) for _, row in rows)
    rows_of_files = {}
    if source_format.list_items is None:
        rows_of_files = {"used": sum(totals.values())}
        if unknown or num_unlabelled:
            rows_of_files["unlabelled"] = sum(unknown.values()) + num_unlabelled
    account = account_of(card, entries, problems, (), rows_of_files)
    num_bad = sum(account.rejected.values()) or sum(unknown.values()) + num_unlabelled
    return DataSet(
        name=card.name,
        layout=layout,
        card=card,
        entries=entries,
        counts={split: number for split, number in totals.items() if number},
        are_folders=folders == [*card.classes],
        is_exact=is_exact,
        notes=tuple(found),
        bad_fraction=num_bad / max(sum(totals.values()) + num_bad, 1),
        sizes=_sizes(card, entries),
        account=account,
        images=images,
    )


def _without_split(request: Request | None, card: Card, left_out: str) -> str:
    """Return the command that leaves out the images of a split, for the end of a sentence."""
    if request is None:
        return ""
    splits = {str(s): [*card.source.parts_of(s)] for s in card.source.named_splits()}
    parts = splits.pop(left_out)
    if card.source.split is not None:
        splits[IGNORE] = [*card.source.parts_of(IGNORE), *parts]
    settings = [f"source.format={card.source.format}", splits_setting(splits)]
    if card.source.split is not None:
        settings.append(f"source.split={yaml_text(card.source.split)}")
    return f": `{request.command(*settings)}`"


def _named(labels: Sequence[str]) -> str:
    """Return classes for a sentence: `class 'a'`, `classes 'a', 'b' and 3 more`."""
    return f"{'class' if len(labels) == 1 else 'classes'} {listed(labels)}"


def _folders_of(card: Card) -> list[str]:
    """Return the class folders of the train split, empty ones too; none for other formats."""
    if card.source.format != "folder":
        return []
    return sorted(map(nfc, class_folders(card, "train")))


# ---- some images ---------------------------------------------------------------------------------
def _some_items(
    card: Card, entries: list[Entry], wanted: Mapping[tuple[str, str], int]
) -> Iterator[tuple[Item, bytes | None]]:
    """Yield a few images of each split and class, with their bytes."""
    source_format = format_of(card)
    checker = ImageChecker(card)
    left = dict(wanted)
    if source_format.list_items is not None:
        items: list[Item] = []
        for item in source_format.list_items(card, entries):
            row = checker.row(item)
            group = (item.split, row["label"])
            if row["problem"] is None and left.get(group, 0) > 0:
                left[group] -= 1
                items.append(item)
        yield from read_items(items)
        return
    all_units = units(card, map, entries)
    per_unit = max(MOST_READ // max(len(all_units), 1), 1)
    for unit in all_units:
        num_bytes = 0
        for item, data in islice(unit.read(*unit.args), per_unit):
            group = (item.split, checker.label(item) or "")
            if data is not None and left.get(group, 0) > 0:
                left[group] -= 1
                yield item, data
            num_bytes += len(data or b"")
            if num_bytes > MOST_READ_BYTES or not any(left.values()):
                break


def _sizes(card: Card, entries: list[Entry]) -> tuple[tuple[int, int], ...]:
    """Return (width, height) of the first images in pixels; other files are skipped."""
    sizes: list[tuple[int, int]] = []
    for _, data in _first_items(card, entries):
        try:
            with Image.open(io.BytesIO(data or b"")) as image:
                sizes.append(image.size)
        except Exception:  # Pillow raises errors of many kinds for damaged files
            continue
    return tuple(sizes)


def _first_items(card: Card, entries: list[Entry]) -> list[tuple[Item, bytes | None]]:
    source_format = format_of(card)
    if source_format.list_items is None:
        first = next(iter(units(card, map, entries)), None)
        return [] if first is None else list(islice(first.read(*first.args), MOST_SIZED))
    items = (item for item in source_format.list_items(card, entries) if item.problem is None)
    return list(read_items(list(islice(items, MOST_SIZED))))
