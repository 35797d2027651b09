"""Which file a row of a table names.

A path starts at the folder of its table, or where `source.files` says. Names are compared in
Unicode form NFC, and without regard to capitals if no file is spelled exactly so. If not one row
leads to a file from there, the leading folders of the paths are those of another machine: they are
exchanged for a folder of the source, the same for all rows.
"""

from __future__ import annotations

import os
import posixpath
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from typing import NamedTuple

from pipeline.data.file_kinds import IMAGE_SUFFIXES
from pipeline.data.names import nfc, printable, suffix_of
from pipeline.data.splits import ROLES, parse_role
from workers.errors import UserError
from workers.storage.artifact import is_local

ADDRESS = "corrupt: an address, and a table names files; download it and name the file"
NO_FILE = "corrupt: there is no such file"
NO_PATH = "corrupt: its row names no file"
ANYWHERE = "**/"  # the beginning of a pattern: in any folder below the source
DRIVE = re.compile(r"[A-Za-z]:(?=[\\/])")
MAX_PATTERNS = 8  # literal ones that are written on a card
MAX_PLACES = 50  # files of one name that are looked at


class NamedRow(NamedTuple):
    """A row of a table.

    Attributes:
        text: What it says of its image.
        label: Its label, empty without one.
        split: What it, or its table, says of its split; empty if nothing.
    """

    text: str
    label: str
    split: str


class FileIndex:
    """The files below a source that rows may name."""

    def __init__(self, names: Iterable[str]):
        self._by_path: dict[str, list[str]] = {}
        self._by_base: dict[str, list[str]] = {}
        for name in names:
            folded = _fold(name)
            self._by_path.setdefault(folded, []).append(name)
            base = folded.rpartition("/")[2]
            self._by_base.setdefault(base, []).append(name)
            if suffix_of(base) in IMAGE_SUFFIXES:
                self._by_base.setdefault(base[: base.rfind(".")], []).append(name)

    def __len__(self) -> int:
        return sum(map(len, self._by_path.values()))

    def find_path(self, path: str) -> list[str]:
        """Return the files at a path below the source: one, unless capitals alone tell them
        apart."""
        return _prefer_exact(self._by_path.get(_fold(path), []), path)

    def find_by_suffix(self, path: str) -> list[str]:
        """Return the files whose path ends with another one, or with that and an extension."""
        folded = _fold(path)
        names = self._by_base.get(folded.rpartition("/")[2], [])
        tail = f"/{folded}"
        found: list[str] = []
        for name in names[: MAX_PLACES * 20]:
            whole = f"/{_fold(name)}"
            if whole.endswith(tail) or whole[: whole.rfind(".")].endswith(tail):
                found.append(name)
        return _prefer_exact(found, path)


def _fold(path: str) -> str:
    return nfc(path).casefold()


def _prefer_exact(names: list[str], path: str) -> list[str]:
    """Return the names that end exactly with a path, if there are any; else all."""
    if len(names) < 2:
        return names
    tail = f"/{nfc(path)}"
    exact = [name for name in names if f"/{nfc(name)}".endswith(tail)]
    return exact or names


# ---- paths in tables -----------------------------------------------------------------------------
class RowPath(NamedTuple):
    """A path in a table: with `/`, without a drive, and whether it is absolute."""

    text: str
    is_absolute: bool


def parse_path(text: str, base: str) -> RowPath | None:
    """Return the path that a row gives; None for an address.

    Args:
        text: As in the table; paths of Windows have other signs.
        base: Path or URI of the source; a path below it is taken from there.
    """
    text = text.strip().removeprefix("file://")
    if text.startswith(f"{base.rstrip('/')}/"):
        return RowPath(f"/{text[len(base.rstrip('/')) + 1 :]}", True)
    if "://" in text:
        return None
    has_drive = DRIVE.match(text) is not None
    if has_drive or ("\\" in text and "/" not in text):
        text = DRIVE.sub("", text, count=1).replace("\\", "/")
    return RowPath(text, text.startswith("/"))


def join_below(folder: str, path: str) -> str | None:
    """Return a path below the source from a folder of it; None if it leads out."""
    name = posixpath.normpath(posixpath.join(folder, path))
    return None if name == ".." or name.startswith(("../", "/")) else name


class FileFinder:
    """Finds the files that the rows of a table name.

    Args:
        index: Of the source's files.
        folder: Of the table, below the source.
        base: Path or URI of the source.
        patterns: `source.files` of the card.
    """

    def __init__(self, index: FileIndex, folder: str, base: str, patterns: Sequence[str]):
        self.index = index
        self.folder = folder
        self.base = base
        self.patterns = tuple(patterns)
        self.moved: tuple[str, str] | None = None  # leading folders in the table, in the source

    def find(self, row: NamedRow) -> tuple[list[str], str | None]:
        """Return the files that a row can mean, and the problem of a row that means none."""
        if not row.text or "\0" in row.text:
            return [], NO_PATH
        path = parse_path(row.text, self.base)
        if path is None:
            return [], ADDRESS
        names: list[str] = []
        for pattern in self.patterns:
            names += [
                name for name in self._find_by_pattern(pattern, path, row) if name not in names
            ]
        return names, None if names else NO_FILE

    def _find_by_pattern(self, pattern: str, path: RowPath, row: NamedRow) -> Iterator[str]:
        if self.moved is not None:
            before, after = self.moved
            if path.text.startswith(before):
                yield from self.index.find_path(posixpath.join(after, path.text[len(before) :]))
            return
        if path.is_absolute and self._is_plain(pattern):
            text = path.text.removeprefix("/")
            if is_local(self.base) and path.text.startswith(f"{os.path.realpath(self.base)}/"):
                text = os.path.relpath(path.text, os.path.realpath(self.base))
            yield from self.index.find_path(posixpath.normpath(text))
            return
        for word in _list_split_names(row.split) if "{split}" in pattern else ("",):
            place = pattern.replace("{split}", word).replace("{label}", row.label)
            place = place.replace("{}", path.text)
            if place.startswith(ANYWHERE):
                yield from self.index.find_by_suffix(place.removeprefix(ANYWHERE))
                continue
            name = join_below(self.folder, place)
            if name is not None:
                yield from self.index.find_path(name)

    def _is_plain(self, pattern: str) -> bool:
        """Whether a pattern is the path as it stands in the table, from the table's folder."""
        return pattern == "{}" or (
            pattern.endswith("/{}")
            and join_below(self.folder, pattern) == join_below(self.folder, "{}")
        )

    def find_moved_folders(self, rows: Sequence[NamedRow]) -> None:
        """Exchange leading folders of the rows for a folder of the source, if none is found."""
        if not all(map(self._is_plain, self.patterns)) or any(self.find(row)[0] for row in rows):
            return
        moves: Counter[tuple[str, str]] = Counter()
        for row in rows:
            path = parse_path(row.text, self.base)
            if path is not None and "\0" not in path.text:
                moves.update(self._find_moves(path))
        if moves:
            fewest = min(len(before) for before, _ in moves)
            nearest = [move for move in moves if len(move[0]) == fewest]
            if len(nearest) == 1:
                self.moved = nearest[0]

    def _find_moves(self, path: RowPath) -> list[tuple[str, str]]:
        """Return the exchanges that lead from a path to a file, those that drop least."""
        start = path.text.find("/") + 1
        while 0 < start < len(path.text):
            tail = path.text[start:]
            names = [name for name in self.index.find_by_suffix(tail) if suffix_of(tail)]
            if names:
                return [(path.text[:start], name[: len(name) - len(tail)]) for name in names]
            start = path.text.find("/", start) + 1
        return []


def _list_split_names(split: str) -> list[str]:
    """Return the names that a folder of a split can have: the word itself, and its synonyms."""
    role = parse_role(split)
    synonyms = ROLES[role] if role is not None else frozenset()
    return [split, *sorted(synonyms - {split.lower()})]


# ---- where the images of a table lie -------------------------------------------------------------
class Placement(NamedTuple):
    """One way to read the paths of a table.

    Attributes:
        patterns: For `source.files`.
        files: The file of each row; None for a row that leads nowhere.
    """

    patterns: tuple[str, ...]
    files: tuple[str | None, ...]

    @property
    def num_found(self) -> int:
        """Number of rows that lead to a file."""
        return sum(file is not None for file in self.files)


def find_placements(
    rows: Sequence[NamedRow], index: FileIndex, folder: str, base: str
) -> list[Placement]:
    """Return all consistent ways to read the paths of a table; none if they lead to no files.

    A way is consistent if every row that leads to a file at all leads to one, and no file gets two
    labels or two splits.

    Args:
        rows: Of the table.
        index: Of the files that may be images.
        folder: Of the table, below the source.
        base: Path or URI of the source.
    """
    direct = _build_placement(rows, FileFinder(index, folder, base, ("{}",)))
    places = [_find_candidates(row, index, base) for row in rows]
    num_possible = sum(map(bool, places))
    if direct is not None and direct.num_found >= num_possible:
        return [direct]
    found: dict[tuple[str | None, ...], Placement] = {}
    for pattern in _find_shared_patterns(rows, places, folder):
        placement = _build_placement(rows, FileFinder(index, folder, base, (pattern,)))
        if placement is not None and placement.num_found >= num_possible:
            found.setdefault(placement.files, placement)
    literal = _build_literal_placement(rows, places, folder)
    if literal is not None and _is_consistent(rows, literal.files):
        found.setdefault(literal.files, literal)
    if len(found) == 1:
        for other in _find_other_placements(rows, places, *found):
            found.setdefault(other.files, other)
    if found:
        return [*found.values()]
    finder = FileFinder(index, folder, base, ("{}",))
    finder.find_moved_folders(rows)
    moved = _build_placement(rows, finder) if finder.moved else None
    return [moved] if moved is not None else []


def _build_placement(rows: Sequence[NamedRow], finder: FileFinder) -> Placement | None:
    """Return the files that rows lead to; None if that is not consistent."""
    files: list[str | None] = []
    for row in rows:
        names, _ = finder.find(row)
        if len(names) > 1:
            return None
        files.append(names[0] if names else None)
    return Placement(finder.patterns, tuple(files)) if _is_consistent(rows, files) else None


def _is_consistent(rows: Sequence[NamedRow], files: Sequence[str | None]) -> bool:
    """Whether no file has rows of two labels or two splits, and there is a file at all."""
    first: dict[str, tuple[str, str]] = {}
    for row, file in zip(rows, files, strict=True):
        if file is None:
            continue
        if first.setdefault(file, (row.label, row.split)) != (row.label, row.split):
            return False
    return bool(first)


def _find_candidates(row: NamedRow, index: FileIndex, base: str) -> list[str]:
    """Return the files that end with the path that a row gives."""
    path = parse_path(row.text, base) if row.text and "\0" not in row.text else None
    if path is None:
        return []
    text = posixpath.normpath(path.text.removeprefix("/"))
    return [] if text.startswith("..") else index.find_by_suffix(text)[:MAX_PLACES]


def _find_shared_patterns(
    rows: Sequence[NamedRow], places: Sequence[list[str]], folder: str
) -> list[str]:
    """Return the patterns by which the first row with files leads to one of them."""
    patterns: dict[str, None] = {}
    for row, names in zip(rows, places, strict=True):
        for name in names:
            patterns.update(dict.fromkeys(_iterate_patterns(row, name, folder)))
        if patterns:
            break
    return [*patterns]


def _iterate_patterns(row: NamedRow, name: str, folder: str) -> Iterator[str]:
    """Yield the patterns by which a row leads to a file, those with fewer placeholders first."""
    prefix, suffix = _split_around(row.text, name)
    choices: list[list[str]] = []
    for part in prefix:
        options = [part] if "{" not in part else []
        if _fold(part) == _fold(row.label):
            options.append("{label}")
        if row.split and (_fold(part) == _fold(row.split) or _is_same_role(part, row.split)):
            options.append("{split}")
        choices.append(options)
    for parts in product(*choices):
        yield _format_prefix(parts, folder) + suffix


def _is_same_role(first: str, second: str) -> bool:
    return parse_role(first) is not None and parse_role(first) == parse_role(second)


def _split_around(text: str, name: str) -> tuple[tuple[str, ...], str]:
    """Return the folders before the path of a row in the path of a file, and `{}` with the
    extension that the row leaves out."""
    path = posixpath.normpath(text.replace("\\", "/").strip().removeprefix("/"))
    parts = nfc(name).split("/")
    num_folders = len(parts) - path.count("/") - 1
    is_whole = _fold(parts[-1]) == _fold(path.rpartition("/")[2])
    extension = "" if is_whole else parts[-1][parts[-1].rfind(".") :]
    return tuple(parts[:num_folders]), "{}" + extension


def _format_prefix(prefix: Sequence[str], folder: str) -> str:
    """Return folders below the source as the folder of a table names them, with `/` at the end."""
    path = "/".join(prefix)
    if folder:
        path = posixpath.relpath(path or ".", folder)
    return "" if path in ("", ".") else f"{path}/"


def _build_literal_placement(
    rows: Sequence[NamedRow], places: Sequence[list[str]], folder: str
) -> Placement | None:
    """Return the way in which every row leads to the one file that its path can end in.

    A row that can end in several files leads to the one that lies where those of other rows do.
    """
    known = {
        _split_around(row.text, names[0])
        for row, names in zip(rows, places, strict=True)
        if len(names) == 1
    }
    patterns: dict[str, None] = {}
    suffixes: dict[str, None] = {}
    files: list[str | None] = []
    for row, names in zip(rows, places, strict=True):
        if not names:
            files.append(None)
            continue
        if len(names) > 1:
            names = [name for name in names if _split_around(row.text, name) in known]
        if len(names) != 1:
            return None
        prefix, suffix = _split_around(row.text, names[0])
        patterns[_format_prefix(prefix, folder) + suffix] = None
        suffixes[suffix] = None
        files.append(names[0])
    if len(patterns) > MAX_PATTERNS:
        patterns = {f"{ANYWHERE}{suffix}": None for suffix in suffixes}
    if len(patterns) > MAX_PATTERNS:
        return None
    return Placement(tuple(patterns), tuple(files))


def _find_other_placements(
    rows: Sequence[NamedRow], places: Sequence[list[str]], files: tuple[str | None, ...]
) -> Iterator[Placement]:
    """Yield a way to read the rows that uses no folder of another way, if there is one."""
    used: set[tuple[str, ...]] = set()
    for row, file in zip(rows, files, strict=True):
        if file is not None:
            used.add(_split_around(row.text, file)[0])
    patterns: dict[str, None] = {}
    others: list[str | None] = []
    for row, names in zip(rows, places, strict=True):
        rest = [name for name in names if _split_around(row.text, name)[0] not in used]
        if names and not rest:
            return
        others.append(rest[0] if rest else None)
        if rest:
            prefix, suffix = _split_around(row.text, rest[0])
            patterns["/".join((*prefix, suffix))] = None
    yield Placement(tuple(patterns), tuple(others))


def ambiguous_files_error(where: str, row: int, text: str, names: Sequence[str]) -> UserError:
    """Return the error of a row that names several files."""
    return UserError(
        f"{where}: row {row} names {printable(text)!r:.80}, and there are both "
        f"{printable(names[0])!r:.120} and {printable(names[1])!r:.120}; say where the images lie "
        "with source.files, as in `images/{}` or `{label}/{}`"
    )
