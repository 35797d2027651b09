"""The account of a source: each file is used, rejected with a reason, or unread with a reason.

The three numbers add up to the number of files. Ingest stores the account as ACCOUNT.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from pipeline.config.text import format_count
from pipeline.data.cards import Card
from pipeline.data.file_kinds import IMAGE_FILES, describe_kind
from pipeline.data.formats import csv, get_format, webdataset
from pipeline.data.formats.base import source_uri
from pipeline.data.formats.folder import labelled_entries
from pipeline.data.listing import HIDDEN, OTHER_FILE, Entry
from pipeline.data.names import get_suffix, printable
from pipeline.data.packs import LEFT_OUT
from pipeline.data.splits import IGNORE, SPLITS
from workers.data.in_place import urls_by_name
from workers.errors import UserError

ACCOUNT = "account.json"  # file of the ingest stage's result
MAX_NAMED_PLACES = 5  # folders or files listed in one line
MAX_LINES = 12  # printed lines each for used, rejected and unread files
MAX_PLACE_LENGTH = 40  # characters of a folder or file name in a line


@dataclass(frozen=True)
class Account:
    """The outcome for every file below a source.

    Attributes:
        files: Number of files; 0 if the data comes from a Python package.
        used: Kind (`image`, `table` or `archive`) -> number of files.
        rejected: Reason -> number of files.
        not_read: Reason -> number of files.
        places: Reason -> the first few top-level folders and files that it concerns.
        images: `used` or a reason -> number of images inside tables, archives or a library. For a
            csv table that names missing files, `used` or a reason -> number of named images. Empty
            otherwise.
        notes: Sentences for the user.
    """

    files: int = 0
    used: Mapping[str, int] = field(default_factory=dict)
    rejected: Mapping[str, int] = field(default_factory=dict)
    not_read: Mapping[str, int] = field(default_factory=dict)
    places: Mapping[str, Sequence[str]] = field(default_factory=dict)
    images: Mapping[str, int] = field(default_factory=dict)
    notes: Sequence[str] = ()

    def to_json(self) -> bytes:
        """Return the content of the file stored with the data set."""
        return json.dumps(asdict(self), indent=1, sort_keys=True).encode()

    @classmethod
    def from_json(cls, data: bytes) -> Account:
        """Load a stored account.

        Raises:
            ValueError, TypeError or AttributeError: If the data is not an account.
        """
        try:
            body = _make_printable(json.loads(data))
        except RecursionError:
            raise ValueError("it is nested too deep") from None
        account = cls(**{name: value for name, value in body.items() if name in _FIELDS})
        for numbers in (account.used, account.rejected, account.not_read, account.images):
            if not all(type(number) is int for number in numbers.values()):
                raise ValueError("a number of files is not a whole number")
        return account

    def check(self, card: Card) -> None:
        """Raise UserError if the numbers do not add up to the number of files."""
        total = sum(sum(part.values()) for part in (self.used, self.rejected, self.not_read))
        if total != self.files:
            raise UserError(
                f"card {card.name!r}: its source has {self.files} files, and {total} of them are "
                "accounted for; it changed while it was read, so run the same command again"
            )

    def lines(self) -> list[str]:
        """Format the account as a short table."""
        lines: list[str] = []
        if self.files:
            numbers = [sum(part.values()) for part in (self.used, self.rejected, self.not_read)]
            lines.append(
                f"{format_count(self.files, 'file')} = {numbers[0]} used + {numbers[1]} rejected + "
                f"{numbers[2]} not read"
            )
            lines += _format_rows("used", self.used, {})
            lines += _format_rows("rejected", self.rejected, self.places)
            lines += _format_rows("not read", self.not_read, self.places)
        if self.images:
            parts = [f"{number} {reason}" for reason, number in self.images.items()]
            lines.append(f"images: {', '.join(parts)}")
        return [*lines, *(f"note: {note}" for note in self.notes)]


def _make_printable(value: Any) -> Any:
    """Return a JSON value with all texts made safe to print."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, dict):
        return {printable(name): _make_printable(one) for name, one in value.items()}
    return [*map(_make_printable, value)] if isinstance(value, list) else value


_FIELDS = frozenset(Account.__dataclass_fields__)


def _format_rows(
    title: str, numbers: Mapping[str, int], places: Mapping[str, Sequence[str]]
) -> Iterator[str]:
    rows = sorted(numbers.items(), key=lambda row: (-row[1], row[0]))
    for reason, number in rows[:MAX_LINES]:
        named = ", ".join(places.get(reason, ()))
        yield f"  {title:<9}{number:>7}  {reason}{f': {named}' if named else ''}"
    if len(rows) > MAX_LINES:
        more = sum(number for _, number in rows[MAX_LINES:])
        yield f"  {title:<9}{more:>7}  for {len(rows) - MAX_LINES} other reasons"


def build_account(
    card: Card,
    entries: Sequence[Entry],
    images: Mapping[str, str | None],
    notes: Sequence[str] = (),
    rows: Mapping[str, int] | None = None,
) -> Account:
    """Build the account of a source.

    Args:
        card: Card of the source.
        entries: All files below the source; empty if the data comes from a Python package.
        images: Image file -> None if it is used, otherwise the reason. A row of a csv table without
            a file has an entry, too (`row N: ...`). Other files of the source have none, and the
            dict is empty if the images are inside tables, archives or a library.
        notes: Sentences for the user.
        rows: `used` or a reason -> number of images inside tables, archives or a library.
    """
    used: Counter[str] = Counter()
    rejected: Counter[str] = Counter()
    not_read: Counter[str] = Counter()
    places: dict[str, dict[str, None]] = {}
    containers = _find_containers(card, entries)
    ignored = _find_ignored(card, entries)
    names = {printable(entry.name) for entry in entries}
    # A reason is `kind: detail` or a kind. Images that a table names and the source does not have
    # are counted by detail, rejected files by kind.
    missing: Counter[str] = Counter()
    for name, reason in images.items():
        if reason and name not in names:
            missing[reason.partition(":")[2].strip() or reason] += 1
    if missing and not rows:
        rows = {"used": sum(reason is None for reason in images.values())} | missing
    for entry in entries:
        name = printable(entry.name)
        if entry.name in containers:
            used["table" if get_suffix(name) != ".tar" else "archive"] += 1
            continue
        reason = images.get(name, "")  # "": not an image of the source
        if reason == LEFT_OUT:
            not_read[LEFT_OUT] += 1
            continue
        if reason is None:
            used["image"] += 1
            continue
        if reason and not reason.startswith(OTHER_FILE):
            group = reason.partition(":")[0]
            rejected[group] += 1
        else:
            group = _explain_not_read(card, entry, ignored)
            not_read[group] += 1
        places.setdefault(group, {}).setdefault(_top_folder(name), None)
    return Account(
        len(entries),
        dict(used),
        dict(rejected),
        dict(not_read),
        {group: _shorten_names(list(named)) for group, named in places.items()},
        dict(rows or {}),
        tuple(notes),
    )


def _find_containers(card: Card, entries: Sequence[Entry]) -> set[str]:
    """Return the names of the containers: archives, and tables of images or of their paths."""
    source_format = get_format(card)
    if card.source.format == "csv":
        return {table.name for table in csv.list_tables(card)[1]}
    if card.source.format == "folder" or not source_format.suffixes:
        return set()
    if source_format.list_shards is not None:
        urls = urls_by_name(webdataset.shard_urls(card))
        base = f"{source_uri(card).rstrip('/')}/"
        # An entry has the shard's name in the index if `list_shards` listed it, else its path.
        return {*urls, *(url.removeprefix(base) for url in urls.values())}
    names: set[str] = set()
    for split in SPLITS:
        for entry in source_format.entries_of_split(card, split, [*entries]):
            if not entry.problem and get_suffix(entry.name) in source_format.suffixes:
                names.add(entry.name)
    return names


def _find_ignored(card: Card, entries: Sequence[Entry]) -> set[str]:
    """Return the files that `ignore` of the card excludes; only for format `folder`."""
    if card.source.format != "folder" or not card.source.list_parts(IGNORE):
        return set()
    labelled = labelled_entries(card, entries)
    return {one.entry.name for one in labelled if one.split == IGNORE}


def _explain_not_read(card: Card, entry: Entry, ignored: set[str]) -> str:
    """Return the reason why a file was not read. `ignored`: see `_find_ignored`."""
    if entry.problem == HIDDEN:
        return "hidden"
    if entry.problem is not None and "link" in entry.problem:
        return "link that is not followed"
    if entry.name in ignored:
        return "ignored by the card"
    if get_suffix(entry.name) in IMAGE_FILES and not entry.problem:
        if card.source.format == "csv":
            return "image that no row names"
        return "image in another folder" if "/" in entry.name else "image in no folder"
    return describe_kind(entry.name)


def _top_folder(name: str) -> str:
    """Return the first folder on the path of a file, or the file itself."""
    folder, _, rest = name.partition("/")
    return f"{folder}/" if rest else name


def _shorten_names(names: list[str]) -> list[str]:
    limit = MAX_PLACE_LENGTH
    short = [name if len(name) <= limit else f"{name[:limit]}..." for name in names]
    return [*short[:MAX_NAMED_PLACES], "..."] if len(short) > MAX_NAMED_PLACES else short


def collect_problems(items: Iterable[tuple[str, str | None]]) -> dict[str, str | None]:
    """Map each file to its problem, or to None if at least one row of the file has no problem.

    Args:
        items: A pair (file, problem) per row.
    """
    files: dict[str, str | None] = {}
    for name, problem in items:
        if problem is None or name not in files:
            files[name] = problem
    return files
