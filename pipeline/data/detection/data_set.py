"""Build a data set from a possible `source` of a card.

Detection proposes sources. This module reads a proposed source with the code of ingest, so that
`init` and `ingest` agree.
"""

from __future__ import annotations

import io
import math
import re
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from PIL import Image

from pipeline.config.settings import checked
from pipeline.config.text import format_count
from pipeline.config.yaml_files import dump_yaml
from pipeline.data.account import Account, build_account, collect_problems
from pipeline.data.cards import FROM_SOURCE, LIST_MARK, Card, Source
from pipeline.data.formats import count_labels, get_format, list_source, require_entries, units
from pipeline.data.formats.base import LIBRARIES, Item, LabelCounts, read_items
from pipeline.data.formats.folder import LABEL, class_folders
from pipeline.data.labels import NUMBER, check_meaning, check_spelling
from pipeline.data.listing import Entry
from pipeline.data.names import listed, nfc, printable, quoted
from pipeline.data.packs import ImageChecker
from pipeline.data.preview import PreviewImage, PreviewSheet, limit_per_group
from pipeline.data.source_classes import MIN_CLASSES, find_counted_classes
from pipeline.data.splits import IGNORE, SPLITS, SplitUnclear
from workers.errors import UserError

TEST_FRACTION = 0.2  # held out by hash if a source has no test images
MAX_FILES = 1_000_000  # files that `init` lists below one path
ABOUT_FILES = ("source.format", "source.splits", "source.files")
MAX_SIZED = 16  # images whose size is read
MAX_PREVIEWED = 4000  # images read from archives for a preview
MAX_PREVIEW_BYTES = 64 << 20  # bytes read from one archive for a preview


@dataclass(frozen=True)
class Request:
    """A user's request to detect data sets.

    Attributes:
        path: The path, as it was given.
        program: The command that starts Accrete, for messages.
        given: Settings of the card's source that the user gave, for example `label`. They override
            what is detected.
        classes: Classes that the user gave; () to find them.
        min_classes: Minimum number of classes of a data set.
    """

    path: str
    program: str = "accrete"
    given: Mapping[str, Any] = field(default_factory=dict)
    classes: tuple[str, ...] = ()
    min_classes: int = MIN_CLASSES

    def command(self, *settings: str, path: str = "") -> str:
        """Format the command that repeats the request with other settings.

        Settings of the request that are not among these are repeated.

        Args:
            settings: Settings, for example `source.split=fold`.
            path: Another path, or "" to keep the path.
        """
        words = ["init", path or self.path]
        changed = {setting.partition("=")[0] for setting in settings}
        given = {f"source.{key}": value for key, value in self.given.items()}
        if path:  # these settings are about the files below the old path
            given = {k: v for k, v in given.items() if k not in ABOUT_FILES}
        if self.classes:
            given["classes"] = [*self.classes]
        repeated = [
            f"{key}={_to_flow(value)}" for key, value in given.items() if key not in changed
        ]
        for setting in (*repeated, *settings):
            words += ["--set", setting]
        return f"{self.program} {shlex.join(words)}"


@dataclass(frozen=True)
class DataSet:
    """One data set.

    Attributes:
        name: Name for cards and tasks.
        layout: Short description of the layout.
        card: The card to write, with classes and the path of the source.
        entries: All files below the source.
        counts: Split -> number of images.
        are_folders: Whether the classes are exactly the class folders, so that the card can have
            `classes: from_source`.
        is_exact: Whether the counts are exact; if False, they are lower bounds.
        notes: Sentences for the user, mostly on skipped images and files.
        bad_fraction: Share of images that are known to be rejected, or to have no known label.
        sizes: (width, height) of a few images in pixels.
        account: For every file below the source, whether it is used, rejected or not read.
        images: (split, class) -> number of images.
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
        """Whether the source has test images."""
        return "test" in self.counts

    @property
    def classes(self) -> tuple[str, ...]:
        """Classes in the order of the card."""
        return self.card.classes

    @property
    def source(self) -> dict[str, Any]:
        """The source of the card, without default settings."""
        return dump_source(self.card.source)

    def preview_sheet(self) -> PreviewSheet:
        """Return the preview of the data set, with a few images of each split and class."""
        pictures = self._pictures()
        return PreviewSheet(self.card, self.layout, self.account, self.images, pictures, self.notes)

    def _pictures(self) -> list[PreviewImage]:
        limit = limit_per_group(len(self.images))
        missing = {group: min(number, limit) for group, number in self.images.items()}
        checker = ImageChecker(self.card)
        pictures: list[PreviewImage] = []
        for item, data in _sample_items(self.card, [*self.entries], missing):
            group = (item.split, checker.label(item) or "")
            if missing.get(group) and data is not None:
                missing[group] -= 1
                pictures.append(PreviewImage.from_image(self.card, *group, item.name, data))
        return pictures


def to_yaml(text: str) -> str:
    """Format a text as YAML, quoted if a YAML list needs it."""
    return _to_flow(text)


def _to_flow(value: Any) -> str:
    """Format a value as YAML in one line."""
    return dump_yaml([value], default_flow_style=True, width=math.inf).strip()[1:-1]


def format_splits(splits: Mapping[str, Sequence[str]]) -> str:
    """Format a `source.splits=...` setting for `Request.command`."""
    body = (f"{split}: [{', '.join(map(to_yaml, parts))}]" for split, parts in splits.items())
    return f"source.splits={{{', '.join(body)}}}"


def dump_source(source: Source) -> dict[str, Any]:
    """Return a source in the form of a card, without default settings."""
    body = source.model_dump(exclude_defaults=True)
    body["splits"] = {
        split: parts[0] if len(parts) == 1 else list(parts)
        for split in (*SPLITS, "ignore")
        if (parts := source.list_parts(split))  # type: ignore[arg-type]
    }
    # "{}" is the default: the path is what the row says
    if source.files != "{}" and len(source.file_patterns()) > 1:
        body["files"] = list(source.file_patterns())
    if len(source.split_columns()) > 1:
        body["split"] = list(source.split_columns())
    if source.range is not None:
        body["range"] = list(source.range)
    return body


def build_data_set(
    request: Request,
    name: str,
    layout: str,
    source: Mapping[str, Any],
    notes: Sequence[str] = (),
    classes: Sequence[str] = (),
) -> DataSet:
    """Build the data set of a card's source.

    Args:
        request: The user's request; its settings override `source`.
        name: Name of the data set.
        layout: Short description of the layout.
        source: Source of the card.
        notes: Sentences on skipped files.
        classes: Classes in the order of the card, if they do not follow from the labels.

    Raises:
        UserError: If the files cannot be read as this source.
    """
    body = {**source, **request.given}
    # Count labels as they are written. The meaning of numbers is decided below, from the labels.
    numbers = body.pop("numbers", None)
    card = _build_card(name, body | {"numbers": "names"}, (FROM_SOURCE,))
    entries = list_source(card, MAX_FILES) or []
    counts = count_labels(card, entries)
    where = printable(str(body.get("path") or name))
    counted_splits = {split for split, _ in counts}
    splits = [split for split in SPLITS if split in counted_splits]
    if "train" not in splits:
        raise _no_train_error(request, card, where, splits)
    if not classes and request.classes:
        classes = request.classes
    if not classes:
        labels = find_counted_classes(card, entries, counts, "train", request.min_classes)
        classes = labels.classes
        numbers = numbers or labels.numbers
        if card.source.format != "folder":
            check_meaning(where, classes)
    # Labels of folders are names, and numbers of libraries are places: both leave `numbers` unset.
    if card.source.format not in ("folder", *LIBRARIES):
        body["numbers"] = numbers or "names"
    elif "numbers" in request.given:
        raise UserError(
            f"{where}: source.numbers is set, but it only applies to labels in tables and tars, "
            f"and format {card.source.format!r} has none; leave it out"
        )
    card = _build_card(name, body, classes)
    return _assemble(card, layout, entries, counts, notes, where, request)


def read_labelled(
    request: Request,
    name: str,
    layout: str,
    source: Mapping[str, Any],
    notes: Sequence[str] = (),
    classes: Sequence[str] = (),
) -> DataSet:
    """Build the data set as `build_data_set` does, but drop a test split without any labels.

    Validation images become the test images in this case, and a note is added.
    """
    data_set = build_data_set(request, name, layout, source, notes, classes)
    used_source = data_set.card.source
    if "test" not in used_source.named_splits() or data_set.has_test or "splits" in request.given:
        return data_set
    splits: dict[str, list[str]] = {
        split: [*parts]
        for split in ("train", "val", IGNORE)
        if (parts := [part for part in used_source.list_parts(split) if part])
    }
    if "val" in splits:
        splits["test"] = splits.pop("val")
    # A card must name every value of a split column, so the values of test are listed as ignored.
    # Folders need not be listed: those that the card does not name are ignored anyway.
    if used_source.split is not None:
        splits.setdefault(IGNORE, []).extend(used_source.list_parts("test"))
    note = f"{listed(used_source.list_parts('test'))} is not read: its images have no labels"
    source = {**source, "splits": splits}
    return build_data_set(request, name, layout, source, [*notes, note], classes)


def read_card(card: Card) -> DataSet:
    """Read the data set of a card, with the classes of the card."""
    entries = require_entries(card)
    where = printable(card.source.path or card.name)
    counts = count_labels(card, entries)
    return _assemble(card, f"format {card.source.format}", entries, counts, (), where)


def _no_train_error(
    request: Request, card: Card, where: str, splits: Sequence[str]
) -> SplitUnclear:
    """Return the error for a data set without train images.

    If a name with wildcard characters or outer spaces may be the cause, the error names it.
    """
    others = f", only {' and '.join(splits)} images" if splits else ""
    parts = [part for text in card.source.splits.values() for part in text.split(LIST_MARK)]
    odd = [part for part in parts if re.search(r"[\[?*]|^\s|\s$", part.replace(LABEL, ""))]
    # a list in the settings of the user, whose parts may have such characters on purpose
    has_given_list = LIST_MARK in "".join(map(str, request.given.values()))
    if "splits" in request.given or has_given_list or not odd:
        return SplitUnclear(f"{where} has no train images{others}")
    return SplitUnclear(
        f"{where}: the name {quoted(odd[0])} has wildcard characters ([, ?, *), or spaces at its "
        "ends; rename it"
    )


def _build_card(name: str, source: Mapping[str, Any], classes: Sequence[str]) -> Card:
    body = {"name": name, "licence": "unknown", "classes": [*classes], "source": {**source}}
    return checked(Card, body, "", "the card")


def _assemble(
    card: Card,
    layout: str,
    entries: list[Entry],
    counts: LabelCounts,
    notes: Sequence[str],
    where: str,
    request: Request | None = None,
) -> DataSet:
    """Assemble a data set from counted labels; images without a class are skipped and noted.

    Args:
        card: The card, with its classes.
        layout: Short description of the layout.
        entries: All files below the source.
        counts: (split, label as written) -> number of images.
        notes: Sentences on skipped files.
        where: Name of the source in errors.
        request: The user's request, for commands in errors. None: no command is given.

    Raises:
        UserError: If train has no image of any class, or of a class that the user gave; if val or
            test has labels, but none of train; or if two labels are probably one class in two
            spellings.
    """
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
    totals: dict[str, int] = {}
    for split in SPLITS:
        totals[split] = sum(n for (image_split, _), n in images.items() if image_split == split)
    given = request.classes if request is not None else ()
    missing = [name for name in given if not images["train", name]]
    if missing or not totals["train"]:
        labels = sorted({label for split, label in unknown if split == "train"})
        raise _no_class_error(request, where, missing or card.classes, labels)
    all_notes = [*notes]
    for split in SPLITS[1:]:
        others = {label: n for (image_split, label), n in unknown.items() if image_split == split}
        without = counts.get((split, None), 0)
        if others and not totals[split]:
            raise UserError(
                f"{where}: no {split} image has a label of train; {split} has labels such as "
                f"{listed(sorted(others))}, and train {listed(card.classes)}; write them alike, or "
                f"leave the {split} images out{_format_ignore_command(request, card, split)}"
            )
        if others or without:
            lost = format_count(sum(others.values()) + without, f"{split} image")
            named = f" ({_format_classes(sorted(others))})" if others else ""
            all_notes.append(
                f"{lost} without a label, or with one that train lacks{named} are left out"
            )
    check_spelling(where, {str(label) for _, label in counts if label is not None})
    unlisted = sorted(label for image_split, label in unknown if image_split == "train")
    if unlisted:
        named = _format_classes(unlisted)
        all_notes.append(f"train images of {named}, which the card does not list, are left out")
    without = counts.get(("train", None), 0)
    if without:
        all_notes.append(f"{format_count(without, 'train image')} without a label are left out")
    folders = _list_class_folders(card)
    empty = [name for name in folders if name not in card.classes and ("train", name) not in counts]
    if empty:
        all_notes.append(f"folders without train images are not classes: {listed(empty)}")
    is_exact = len(entries) < MAX_FILES
    problems: dict[str, str | None] = {}
    source_format = get_format(card)
    if source_format.list_items is not None:
        rows = ((item, checker.row(item)) for item in source_format.list_items(card, entries))
        problems = collect_problems((row["name"], row["problem"]) for _, row in rows)
    images_in_archives = {}
    if source_format.list_items is None:
        images_in_archives = {"used": sum(totals.values())}
        if unknown or num_unlabelled:
            # as at ingest, this includes labels that are not on the card
            images_in_archives["unlabelled"] = sum(unknown.values()) + num_unlabelled
    account = build_account(card, entries, problems, (), images_in_archives)
    num_bad = sum(account.rejected.values()) or sum(unknown.values()) + num_unlabelled
    return DataSet(
        name=card.name,
        layout=layout,
        card=card,
        entries=entries,
        counts={split: number for split, number in totals.items() if number},
        are_folders=folders == [*card.classes],
        is_exact=is_exact,
        notes=tuple(all_notes),
        bad_fraction=num_bad / max(sum(totals.values()) + num_bad, 1),
        sizes=_read_sizes(card, entries),
        account=account,
        images=images,
    )


def _no_class_error(
    request: Request | None, where: str, classes: Sequence[str], labels: Sequence[str]
) -> UserError:
    """Return the error for classes without a train image.

    Args:
        request: The user's request.
        where: Name of the source.
        classes: The classes.
        labels: Labels of train images that are no class.
    """
    remedy = "write the classes as the source does"
    texts = [label.removeprefix(NUMBER) for label in labels]
    if request is not None and texts and all(text.isdecimal() for text in texts):
        command = request.command("source.numbers=places")
        remedy = f"if the numbers are places in the list of classes, say so: `{command}`"
    others = f"; labels that are no class: {listed(texts)}" if texts else ""
    return UserError(f"{where}: no train image has the label {listed(classes)}{others}; {remedy}")


def _format_ignore_command(request: Request | None, card: Card, left_out: str) -> str:
    """Format the command that ignores the images of a split, for the end of an error."""
    if request is None:
        return ""
    splits = {str(s): [*card.source.list_parts(s)] for s in card.source.named_splits()}
    parts = splits.pop(left_out)
    if card.source.split is not None:
        splits[IGNORE] = [*card.source.list_parts(IGNORE), *parts]
    settings = [f"source.format={card.source.format}", format_splits(splits)]
    if card.source.split is not None:
        settings.append(f"source.split={to_yaml(card.source.split)}")
    return f": `{request.command(*settings)}`"


def _format_classes(labels: Sequence[str]) -> str:
    """Format classes for a sentence, for example `classes 'a', 'b' and 3 more`."""
    return f"{'class' if len(labels) == 1 else 'classes'} {listed(labels)}"


def _list_class_folders(card: Card) -> list[str]:
    """List the class folders of the train split, also empty ones; [] for other formats."""
    if card.source.format != "folder":
        return []
    return sorted(map(nfc, class_folders(card, "train")))


# ---- some images ---------------------------------------------------------------------------------
def _sample_items(
    card: Card, entries: list[Entry], numbers: Mapping[tuple[str, str], int]
) -> Iterator[tuple[Item, bytes | None]]:
    """Yield a few images of each split and class, with their bytes.

    Args:
        card: Card of the source.
        entries: All files below the source.
        numbers: (split, class) -> maximum number of images to yield.
    """
    source_format = get_format(card)
    checker = ImageChecker(card)
    left = dict(numbers)
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
    # A unit is a part of the source that is read in one go (`formats.base.Unit`). The built-in
    # `map` divides the source in this process, without workers.
    all_units = units(card, map, entries)
    items_per_unit = max(MAX_PREVIEWED // max(len(all_units), 1), 1)
    for unit in all_units:
        num_bytes = 0
        for item, data in islice(unit.read(*unit.args), items_per_unit):
            group = (item.split, checker.label(item) or "")
            if data is not None and left.get(group, 0) > 0:
                left[group] -= 1
                yield item, data
            num_bytes += len(data or b"")
            if num_bytes > MAX_PREVIEW_BYTES or not any(left.values()):
                break


def _read_sizes(card: Card, entries: list[Entry]) -> tuple[tuple[int, int], ...]:
    """Read (width, height) of the first images in pixels; unreadable files are skipped."""
    sizes: list[tuple[int, int]] = []
    for _, data in _read_first_items(card, entries):
        try:
            with Image.open(io.BytesIO(data or b"")) as image:
                sizes.append(image.size)
        except Exception:  # Pillow raises errors of many kinds for damaged files
            continue
    return tuple(sizes)


def _read_first_items(card: Card, entries: list[Entry]) -> list[tuple[Item, bytes | None]]:
    source_format = get_format(card)
    if source_format.list_items is None:
        first = next(iter(units(card, map, entries)), None)
        return [] if first is None else list(islice(first.read(*first.args), MAX_SIZED))
    items = (item for item in source_format.list_items(card, entries) if item.problem is None)
    return list(read_items(list(islice(items, MAX_SIZED))))
