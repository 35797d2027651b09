"""Find the file that a row of a table names.

Ingest uses `FileFinder` with the patterns of a card. Detection uses `find_placements` to find these
patterns.

Paths are relative to the folder of the table, or follow the patterns in `source.files`. In a
pattern, `{}` is the path in the row, and `{label}` and `{split}` are its label and split. Names are
compared in Unicode form NFC. If no file matches exactly, case is ignored. If no row leads to a
file, the paths are probably from another machine, for example `/home/ann/zoo/cat/1.png`. In this
case, the leading folders of all paths are replaced by one folder of the source.
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
from pipeline.data.names import get_suffix, nfc, printable
from pipeline.data.splits import ROLES, parse_role
from workers.errors import UserError
from workers.storage.artifact import is_local

# problems of rows without a file, see `formats.base.Item`
ADDRESS = "corrupt: an address, and a table names files; download it and name the file"
NO_FILE = "corrupt: there is no such file"
NO_PATH = "corrupt: its row names no file"
ANYWHERE = "**/"  # start of a pattern that matches in any folder below the source
DRIVE = re.compile(r"[A-Za-z]:(?=[\\/])")
MAX_PATTERNS = 8  # patterns on a card that name folders instead of using placeholders
MAX_CANDIDATES = 50  # candidate files of a row


class NamedRow(NamedTuple):
    """A row of a table.

    Attributes:
        text: Path or id of the image, as written in the table.
        label: Label of the image, or "".
        split: Split word of the image, from the row or from the name of the table, or "".
    """

    text: str
    label: str
    split: str


class FileIndex:
    """An index of the files below a source that rows may name."""

    def __init__(self, names: Iterable[str]):
        self._by_path: dict[str, list[str]] = {}
        self._by_base: dict[str, list[str]] = {}
        for name in names:
            folded = _fold(name)
            self._by_path.setdefault(folded, []).append(name)
            base = folded.rpartition("/")[2]
            self._by_base.setdefault(base, []).append(name)
            if get_suffix(base) in IMAGE_SUFFIXES:  # a row can name it without the extension
                self._by_base.setdefault(base[: base.rfind(".")], []).append(name)

    def __len__(self) -> int:
        return sum(map(len, self._by_path.values()))

    def find_path(self, path: str) -> list[str]:
        """Return the files at a path below the source; several if they differ only in case."""
        return _prefer_exact(self._by_path.get(_fold(path), []), path)

    def find_by_suffix(self, path: str) -> list[str]:
        """Return the files whose paths end with a path, with or without their extension."""
        folded = _fold(path)
        names = self._by_base.get(folded.rpartition("/")[2], [])
        tail = f"/{folded}"
        matches: list[str] = []
        for name in names[: MAX_CANDIDATES * 20]:  # thousands of files can share a base name
            whole = f"/{_fold(name)}"
            if whole.endswith(tail) or whole[: whole.rfind(".")].endswith(tail):
                matches.append(name)
        return _prefer_exact(matches, path)


def _fold(path: str) -> str:
    return nfc(path).casefold()


def _prefer_exact(names: list[str], path: str) -> list[str]:
    """Return the names that end with a path in its exact case, or all names if none does."""
    if len(names) < 2:
        return names
    tail = f"/{nfc(path)}"
    exact = [name for name in names if f"/{nfc(name)}".endswith(tail)]
    return exact or names


# ---- paths in tables -----------------------------------------------------------------------------
class RowPath(NamedTuple):
    """A path in a table.

    Attributes:
        text: The path with `/` as separator and without a drive.
        is_absolute: Whether it is absolute.
    """

    text: str
    is_absolute: bool


def parse_path(text: str, base: str) -> RowPath | None:
    r"""Parse the path in a row.

    Args:
        text: Text in the table, for example `img/1.png` or `C:\zoo\1.png`.
        base: Path or URI of the source. It is removed from the start of a path.

    Returns:
        The path, or None for a URL.
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


def join_inside(folder: str, path: str) -> str | None:
    """Join a folder below the source and a path, or return None if the result is outside."""
    name = posixpath.normpath(posixpath.join(folder, path))
    return None if name == ".." or name.startswith(("../", "/")) else name


class FileFinder:
    """Finds the files that the rows of a table name.

    Args:
        index: Index of the source's files.
        folder: Folder of the table, below the source.
        base: Path or URI of the source.
        patterns: `source.files` of the card.
    """

    def __init__(self, index: FileIndex, folder: str, base: str, patterns: Sequence[str]):
        self.index = index
        self.folder = folder
        self.base = base
        self.patterns = tuple(patterns)
        # (leading folders in the table, folder of the source that replaces them)
        self.moved: tuple[str, str] | None = None

    def find(self, row: NamedRow) -> tuple[list[str], str | None]:
        """Find the files that a row may name.

        Returns:
            The files, several if the row is ambiguous, and the problem if there are none.
        """
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
        """Yield the files that a row names according to one pattern.

        Moved folders replace all patterns. An absolute path is searched below the source, unless
        the pattern changes the path in the table.
        """
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
            target = pattern.replace("{split}", word).replace("{label}", row.label)
            target = target.replace("{}", path.text)
            if target.startswith(ANYWHERE):
                yield from self.index.find_by_suffix(target.removeprefix(ANYWHERE))
                continue
            name = join_inside(self.folder, target)
            if name is not None:
                yield from self.index.find_path(name)

    def _is_plain(self, pattern: str) -> bool:
        """Return whether a pattern leaves the path in the table unchanged."""
        return pattern == "{}" or (
            pattern.endswith("/{}")
            and join_inside(self.folder, pattern) == join_inside(self.folder, "{}")
        )

    def find_moved_folders(self, rows: Sequence[NamedRow]) -> None:
        """Set `moved` for paths from another machine.

        Nothing is done if a row leads to a file, or if a pattern changes the paths in the table.
        Of all possible replacements, the one that removes the fewest characters is used. `moved`
        stays None if there is no such replacement, or more than one.
        """
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
        """Return the replacements (old prefix, new prefix) that keep the longest tail of a path.

        The result is empty if no file ends with a tail of the path, or the path has no extension.
        """
        start = path.text.find("/") + 1
        while 0 < start < len(path.text):
            tail = path.text[start:]
            names = [name for name in self.index.find_by_suffix(tail) if get_suffix(tail)]
            if names:
                return [(path.text[:start], name[: len(name) - len(tail)]) for name in names]
            start = path.text.find("/", start) + 1
        return []


def _list_split_names(split: str) -> list[str]:
    """Return the possible names of a split folder: the word itself and its synonyms."""
    role = parse_role(split)
    synonyms = ROLES[role] if role is not None else frozenset()
    return [split, *sorted(synonyms - {split.lower()})]


# ---- the image files of a table ------------------------------------------------------------------
class Placement(NamedTuple):
    """One way to map the rows of a table to files.

    Attributes:
        patterns: Value for `source.files`.
        files: The file of each row, or None for a row without a file.
    """

    patterns: tuple[str, ...]
    files: tuple[str | None, ...]

    @property
    def num_found(self) -> int:
        """Number of rows with a file."""
        return sum(file is not None for file in self.files)


def find_placements(
    rows: Sequence[NamedRow], index: FileIndex, folder: str, base: str
) -> list[Placement]:
    """Find the consistent ways to read the paths of a table.

    A way is consistent if each row leads to at most one file and no file gets two labels or two
    splits. Paths relative to the folder of the table are preferred if they find all images.

    Args:
        rows: Rows of the table.
        index: Index of the image files.
        folder: Folder of the table, below the source.
        base: Path or URI of the source.

    Returns:
        One placement, several if the paths are ambiguous, or [] if they lead to no files.
    """
    direct = _build_placement(rows, FileFinder(index, folder, base, ("{}",)))
    candidates = [_find_candidate_files(row, index, base) for row in rows]
    num_possible = sum(map(bool, candidates))
    if direct is not None and direct.num_found >= num_possible:
        return [direct]
    by_files: dict[tuple[str | None, ...], Placement] = {}
    for pattern in _find_shared_patterns(rows, candidates, folder):
        placement = _build_placement(rows, FileFinder(index, folder, base, (pattern,)))
        if placement is not None and placement.num_found >= num_possible:
            by_files.setdefault(placement.files, placement)
    literal = _build_literal_placement(rows, candidates, folder)
    if literal is not None and _is_consistent(rows, literal.files):
        by_files.setdefault(literal.files, literal)
    if len(by_files) == 1:
        files = next(iter(by_files))
        for other in _find_other_placements(rows, candidates, files, folder):
            by_files.setdefault(other.files, other)
    if by_files:
        return [*by_files.values()]
    finder = FileFinder(index, folder, base, ("{}",))
    finder.find_moved_folders(rows)
    moved = _build_placement(rows, finder) if finder.moved else None
    return [moved] if moved is not None else []


def _build_placement(rows: Sequence[NamedRow], finder: FileFinder) -> Placement | None:
    """Build the placement with the files of a finder, or return None if it is not consistent."""
    files: list[str | None] = []
    for row in rows:
        names, _ = finder.find(row)
        if len(names) > 1:
            return None
        files.append(names[0] if names else None)
    return Placement(finder.patterns, tuple(files)) if _is_consistent(rows, files) else None


def _is_consistent(rows: Sequence[NamedRow], files: Sequence[str | None]) -> bool:
    """Return whether at least one row has a file, and no file has two labels or two splits."""
    first: dict[str, tuple[str, str]] = {}
    for row, file in zip(rows, files, strict=True):
        if file is None:
            continue
        if first.setdefault(file, (row.label, row.split)) != (row.label, row.split):
            return False
    return bool(first)


def _find_candidate_files(row: NamedRow, index: FileIndex, base: str) -> list[str]:
    """Return the files that end with the path in a row."""
    path = parse_path(row.text, base) if row.text and "\0" not in row.text else None
    if path is None:
        return []
    text = posixpath.normpath(path.text.removeprefix("/"))
    return [] if text.startswith("..") else index.find_by_suffix(text)[:MAX_CANDIDATES]


def _find_shared_patterns(
    rows: Sequence[NamedRow], candidates: Sequence[list[str]], folder: str
) -> list[str]:
    """Return the patterns that map the first row with candidates to a candidate."""
    patterns: dict[str, None] = {}
    for row, names in zip(rows, candidates, strict=True):
        for name in names:
            patterns.update(dict.fromkeys(_iterate_patterns(row, name, folder)))
        if patterns:
            break
    return [*patterns]


def _iterate_patterns(row: NamedRow, name: str, folder: str) -> Iterator[str]:
    """Yield the patterns that map a row to a file, patterns with few placeholders first."""
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
    """Split the path of a file around the path of a row.

    For example, the row `cat/1` and the file `raw/cat/1.png` give `("raw",)` and `{}.png`.
    """
    path = posixpath.normpath(text.replace("\\", "/").strip().removeprefix("/"))
    parts = nfc(name).split("/")
    num_folders = len(parts) - path.count("/") - 1
    is_whole = _fold(parts[-1]) == _fold(path.rpartition("/")[2])
    extension = "" if is_whole else parts[-1][parts[-1].rfind(".") :]
    return tuple(parts[:num_folders]), "{}" + extension


def _format_prefix(prefix: Sequence[str], folder: str) -> str:
    """Format folders below the source, relative to the folder of a table, with a final `/`."""
    path = "/".join(prefix)
    if folder:
        path = posixpath.relpath(path or ".", folder)
    return "" if path in ("", ".") else f"{path}/"


def _build_literal_placement(
    rows: Sequence[NamedRow], candidates: Sequence[list[str]], folder: str
) -> Placement | None:
    """Build the placement in which each row leads to the only file that ends with its path.

    Its patterns contain the names of folders instead of `{label}` and `{split}`, or `**/` in place
    of more than MAX_PATTERNS patterns. If a row has several such files, the file in a folder that
    other rows use is chosen.

    Returns:
        The placement, or None if a row stays ambiguous or there are too many extensions.
    """
    known = {
        _split_around(row.text, names[0])
        for row, names in zip(rows, candidates, strict=True)
        if len(names) == 1
    }
    patterns: dict[str, None] = {}
    suffixes: dict[str, None] = {}
    files: list[str | None] = []
    for row, names in zip(rows, candidates, strict=True):
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
    rows: Sequence[NamedRow],
    candidates: Sequence[list[str]],
    files: tuple[str | None, ...],
    folder: str,
) -> Iterator[Placement]:
    """Yield a placement that shares no folder with the given files, if there is one.

    It shows that the rows can be read in two ways.

    Args:
        rows: Rows of the table.
        candidates: Possible files of each row.
        files: The files of the rows in another placement.
        folder: Folder of the table, below the source.
    """
    used: set[tuple[str, ...]] = set()
    for row, file in zip(rows, files, strict=True):
        if file is not None:
            used.add(_split_around(row.text, file)[0])
    patterns: dict[str, None] = {}
    others: list[str | None] = []
    for row, names in zip(rows, candidates, strict=True):
        rest = [name for name in names if _split_around(row.text, name)[0] not in used]
        if names and not rest:
            return
        others.append(rest[0] if rest else None)
        if rest:
            prefix, suffix = _split_around(row.text, rest[0])
            patterns[_format_prefix(prefix, folder) + suffix] = None
    yield Placement(tuple(patterns), tuple(others))


def ambiguous_files_error(where: str, row: int, text: str, names: Sequence[str]) -> UserError:
    """Return the error for a row that names several files.

    Args:
        where: Name of the table.
        row: Number of the row.
        text: Path in the row.
        names: The files, at least two.
    """
    return UserError(
        f"{where}: row {row} names {printable(text)!r:.80}, and there are both "
        f"{printable(names[0])!r:.120} and {printable(names[1])!r:.120}; set the path of images "
        "with source.files, as in `images/{}` or `{label}/{}`"
    )
