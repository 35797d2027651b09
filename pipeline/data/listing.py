"""Files of a source: list them, open them, and print names that come from strangers.

Cards and formats both stand on this module, so it knows neither.
"""

from __future__ import annotations

import errno
import os
import posixpath
import stat
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from itertools import compress
from pathlib import Path
from typing import Literal, NamedTuple

import pyarrow as pa
from pyarrow import fs

from workers.errors import UserError
from workers.storage.artifact import is_local, join, resolve
from workers.storage.filesystem import access_remedy
from workers.storage.hub_files import open_hub

Split = Literal["train", "test"]
SPLITS: tuple[Split, ...] = ("train", "test")
CARDS = Path(__file__).resolve().parents[2] / "datasets"
SPECIAL_FILES = {
    stat.S_ISFIFO: "a named pipe",
    stat.S_ISSOCK: "a socket",
    stat.S_ISCHR: "a device",
    stat.S_ISBLK: "a device",
}
# of programs, not of people; in lower case
LITTER_FOLDERS = frozenset(("__macosx", "$recycle.bin", "system volume information", "lost+found"))
MAX_NAMED = 3  # reasons that an error lists for files that are left out, and names per reason
NOT_A_URI = "corrupt: `?` or `#` in its name, which no URI can hold; rename it"
OUTSIDE_LINK = (
    "link: to a folder outside the source; "
    "move that folder into the source, or let source.path name one that holds both"
)


class Entry(NamedTuple):
    """One file below a source, or a link that is not followed.

    name: path below the source. size: bytes. modified: modification time in nanoseconds, 0 where
    it is unknown. problem: why the entry is not used.
    """

    name: str
    size: int
    modified: int = 0
    problem: str | None = None


# ---- names ---------------------------------------------------------------------------------------
def nfc(name: str) -> str:
    """Return a name in Unicode's form NFC: some disks store names in NFD, which looks the same."""
    return name if name.isascii() else unicodedata.normalize("NFC", name)


def is_utf8(text: str) -> bool:
    """Whether a file name is UTF-8; Python keeps other bytes as lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def printable(text: str) -> str:
    """Escape what terminals and tables cannot print: other bytes than UTF-8, control characters."""
    decoded = text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in decoded)


def suffix_of(name: str) -> str:
    """Return the extension of a file name in lower case, with its dot; empty where it has none."""
    dot = name.rfind(".")
    return name[dot:].lower() if dot >= 0 else ""


def check_unicode_forms(where: str, names: Iterable[str]) -> None:
    """Raise UserError where two paths look the same because one is in NFC and the other is not."""
    names = [*names]
    if all(map(str.isascii, names)):
        return
    first: dict[str, str] = {}  # path in NFC -> the path as it was met first
    for name in names:
        for path in _path_prefixes(name):
            known = first.setdefault(nfc(path), path)
            if known != path:
                raise UserError(
                    f"{where}: {known!a} and {path!a} are the same name in two Unicode forms "
                    "(NFC and NFD); merge them, or rename one"
                )


def _path_prefixes(name: str) -> Iterator[str]:
    """Yield the folders above a path from the top down, then the path itself."""
    for index, character in enumerate(name):
        if character == "/":
            yield name[:index]
    yield name


def describe_left_out(problems: Iterable[tuple[str, str | None]]) -> str:
    """Return the first files that are left out, by reason, for the end of a sentence.

    problems: name and reason of each file; files without a reason are skipped. Empty where no file
    has one.
    """
    names: dict[str, list[str]] = {}
    for name, problem in problems:
        if problem:
            names.setdefault(problem, []).append(printable(name))
    parts = []
    for problem, group in list(names.items())[:MAX_NAMED]:
        more = " ..." if len(group) > MAX_NAMED else ""
        parts.append(f"{', '.join(group[:MAX_NAMED])}{more}, {problem}")
    return f" (left out: {'; '.join(parts)})" if parts else ""


# ---- opening -------------------------------------------------------------------------------------
def absolute_uri(path: str) -> str:
    """Return a URI as it is, and a path from the folder that holds `datasets/`."""
    return path if "://" in path else os.path.normpath(os.path.join(CARDS.parent, path))


def open_source(uri: str) -> tuple[fs.FileSystem, str]:
    """Return the filesystem of a URI and the path inside it.

    What pyarrow does not know (`hf://`) is opened through fsspec. Raise StorageUnavailable where
    the hub cannot be reached.
    """
    if not uri.startswith("hf://"):
        return resolve(uri)
    system, path = open_hub(uri)
    return fs.PyFileSystem(fs.FSSpecHandler(system)), path


def open_file(uri: str) -> pa.NativeFile:
    """Open a file of a source for reading. pyarrow takes names in UTF-8 only; a disk has others."""
    system, path = open_source(uri)
    if isinstance(system, fs.LocalFileSystem) and not is_utf8(path):
        return pa.PythonFile(open(path, "rb"), "r")
    return system.open_input_file(path)


def remedy(uri: str) -> str:
    """Return what a person should check where a source cannot be read."""
    if is_local(uri) or uri.startswith("hf://"):
        return "check the path, the network and your permissions"
    return access_remedy(uri)


# ---- listing -------------------------------------------------------------------------------------
def class_folders(path: str, split: str) -> tuple[str, list[str]]:
    """Return the URI of a split and the sorted names of its folders; none where it is missing.

    Hidden folders and those that programs leave behind are passed over.
    """
    uri = join(absolute_uri(path).rstrip("/"), split)
    system, folder = open_source(uri)
    names: list[str] = []
    if not isinstance(system, fs.LocalFileSystem):
        infos = system.get_file_info(fs.FileSelector(folder, allow_not_found=True))
        names = [info.base_name for info in infos if info.type == fs.FileType.Directory]
    elif os.path.isdir(folder):
        names = [entry.name for entry in os.scandir(folder) if entry.is_dir()]
    is_class = [not name.startswith(".") and name.lower() not in LITTER_FOLDERS for name in names]
    return uri, sorted(compress(names, is_class))


def list_entries(uri: str, folders: Sequence[str], suffixes: frozenset[str]) -> list[Entry] | None:
    """List the files of a source, sorted, without hidden ones; None where it does not exist.

    folders: the folders below the source that are listed; "" is the source itself. suffixes: of the
    files that are read. A source that is a single file is listed under its base name. Raise
    UserError where it cannot be listed.
    """
    system, path = open_source(uri)
    try:
        if isinstance(system, fs.LocalFileSystem):
            return _list_local(path, folders, suffixes)
        return _list_remote(system, path, folders)
    except UserError:
        raise
    except Exception as error:  # the hub's HTTP client raises kinds of its own
        if not isinstance(error, OSError) and not uri.startswith("hf://"):
            raise
        text = str(error).strip() or type(error).__name__
        reason = printable(text.splitlines()[0])
        raise UserError(f"source {uri!r} cannot be listed ({reason}); {remedy(uri)}") from None


def _list_local(path: str, folders: Sequence[str], suffixes: frozenset[str]) -> list[Entry] | None:
    if not os.path.exists(path):
        return None
    if os.path.isdir(path):
        return FolderWalk(path, suffixes).entries_below(folders)
    info = os.stat(path)
    return [Entry(os.path.basename(path), info.st_size, info.st_mtime_ns)]


def _list_remote(system: fs.FileSystem, path: str, folders: Sequence[str]) -> list[Entry] | None:
    top = system.get_file_info(path)
    if top.type == fs.FileType.File:
        return [Entry(top.base_name, top.size, top.mtime_ns or 0)]
    if top.type == fs.FileType.NotFound:
        return None
    base = path.rstrip("/") + "/"
    entries: set[Entry] = set()  # folders may lie in each other
    for folder in folders:
        start = posixpath.join(path, folder).rstrip("/")
        selector = fs.FileSelector(start, allow_not_found=True, recursive=True)
        for info in system.get_file_info(selector):
            name = info.path.removeprefix(base)
            is_hidden = any(part.startswith(".") for part in name.split("/"))
            if info.type != fs.FileType.File or is_hidden:
                continue
            problem = NOT_A_URI if set(name) & set("?#") else None
            entries.add(Entry(name, info.size, info.mtime_ns or 0, problem))
    return sorted(entries, key=lambda entry: entry[:3])


class FolderWalk:
    """Lists the files below folders of a source on a disk.

    A link to a file stands for the file. A link to a folder is followed where it leads to a folder
    of the source that is not read anyway, and each folder is read once: else its images would come
    again, under the label of the folder that holds the link.
    """

    def __init__(self, root: str, suffixes: frozenset[str]):
        self.root = root
        self.base = os.path.realpath(root)
        self.suffixes = suffixes
        self.visited: dict[str, str] = {}  # real path of each folder -> its name below the source
        self.ancestors: set[str] = set()  # real paths of the folders above those
        self.entries: list[Entry] = []
        self.links: list[str] = []  # to folders; read after all that is no link

    def entries_below(self, folders: Sequence[str]) -> list[Entry]:
        """Return the sorted entries of these folders."""
        for name in sorted(set(folders)):
            real = self._real(name)
            if not os.path.isdir(real) or real in self.visited:
                continue
            if real == os.path.join(self.base, name).rstrip("/"):
                self._visit(name)
            else:
                self.links.append(name)
        self.links.sort()
        for name in self.links:  # it grows while links are followed
            self._follow(name)
        return sorted(self.entries)

    def _real(self, name: str) -> str:
        return os.path.realpath(os.path.join(self.root, name))

    def _visit(self, start: str) -> None:
        waiting = [(start, self._real(start))]
        while waiting:
            name, real = waiting.pop()
            self.visited[real] = name
            self._add_ancestors(real)
            for child in sorted(os.scandir(real), key=lambda child: child.name):
                child_name = f"{name}/{child.name}" if name else child.name
                if child.name.startswith("."):
                    pass
                elif child.is_dir(follow_symlinks=False):
                    waiting.append((child_name, child.path))
                elif child.is_symlink() and os.path.isdir(child.path):
                    self.links.append(child_name)
                else:
                    self.entries.append(_file_entry(child_name, child, self.suffixes))

    def _add_ancestors(self, real: str) -> None:
        folder = os.path.dirname(real)
        while folder not in self.ancestors:
            self.ancestors.add(folder)
            folder = os.path.dirname(folder)

    def _follow(self, name: str) -> None:
        """Read the folder behind a link, or add an entry that says why it is not read."""
        real = self._real(name)
        if real in self.visited:
            target = f"{self.visited[real]}, which is"
            self._skip(name, f"other file: a link to {target} read anyway")
        elif real in self.ancestors:
            self._skip(
                name, "other file: a link to a folder that holds others which are read anyway"
            )
        elif not real.startswith(self.base.rstrip("/") + "/"):
            self._skip(name, OUTSIDE_LINK)
        else:
            self._visit(name)

    def _skip(self, name: str, problem: str) -> None:
        self.entries.append(Entry(name, 0, 0, problem))


def _file_entry(name: str, child: os.DirEntry[str], suffixes: frozenset[str]) -> Entry:
    """Return the entry of what is no folder."""
    try:
        info = child.stat()
    except OSError as error:
        return Entry(name, 0, 0, _link_problem(name, error, suffixes))
    if stat.S_ISREG(info.st_mode):
        return Entry(name, info.st_size, info.st_mtime_ns)
    kinds = (kind for is_kind, kind in SPECIAL_FILES.items() if is_kind(info.st_mode))
    return Entry(name, 0, 0, f"other file: {next(kinds, 'no plain file')}")


def _link_problem(name: str, error: OSError, suffixes: frozenset[str]) -> str:
    if error.errno == errno.ENOENT:
        reason = "to nothing"
    elif error.errno == errno.ELOOP:
        reason = "to itself"
    else:
        reason = f"that cannot be followed ({error.strerror})"
    if suffix_of(name) in suffixes:
        return f"link: {reason}"
    return f"other file: a link {reason}"
