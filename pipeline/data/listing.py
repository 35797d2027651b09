"""List and open the files of a source.

Cards and formats use this module, so it must not depend on them.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

import pyarrow as pa
from pyarrow import fs

from pipeline.config.yaml_files import CARDS
from pipeline.data.file_kinds import IMAGE_FILES, START_BYTES, is_hidden, starts_as_image
from pipeline.data.names import MAX_NAMED, get_suffix, is_utf8, printable
from workers.errors import UserError, describe_error
from workers.storage.artifact import is_local, resolve
from workers.storage.filesystem import access_remedy
from workers.storage.hub_files import open_hub

SPECIAL_FILES = {
    stat.S_ISFIFO: "a named pipe",
    stat.S_ISSOCK: "a socket",
    stat.S_ISCHR: "a device",
    stat.S_ISBLK: "a device",
}
NOT_A_URI = "corrupt: `?` or `#` in its name, which no URI can hold; rename it"
OUTSIDE_LINK = (
    "link: to a folder outside the source; "
    "move that folder into the source, or let source.path name one that holds both"
)
HIDDEN = "hidden"  # the problem of a hidden file
OTHER_FILE = "other file"  # start of the problem of an entry that is not an image file
NO_EXTENSION = f"{OTHER_FILE}: no extension"
# end of the problem of a link to a folder that is also read without the link
READ_ANYWAY = "read anyway"


class Entry(NamedTuple):
    """One file below a source, or a link that is not followed.

    Attributes:
        name: Path below the source.
        size: Size in bytes; 0 if it is not a regular file.
        modified: Modification time in nanoseconds, 0 if it is unknown.
        problem: Reason why the entry is not used; HIDDEN for hidden files.
    """

    name: str
    size: int
    modified: int = 0
    problem: str | None = None


def find_unread_links(entries: Iterable[Entry]) -> dict[str, str]:
    """Map the name of each link to a folder that was not followed to the reason."""
    return {
        entry.name: entry.problem
        for entry in entries
        if entry.problem is not None
        and (entry.problem == OUTSIDE_LINK or entry.problem.endswith(READ_ANYWAY))
    }


def describe_left_out(problems: Iterable[tuple[str, str | None]]) -> str:
    """Describe the first skipped files by reason, for the end of a sentence.

    Args:
        problems: Name and reason of each file; files without a reason are ignored.

    Returns:
        The text, or "" if no file has a reason.
    """
    names: dict[str, list[str]] = {}
    for name, problem in problems:
        if problem and problem != HIDDEN:
            names.setdefault(problem, []).append(printable(name))
    parts = []
    for problem, group in list(names.items())[:MAX_NAMED]:
        more = " ..." if len(group) > MAX_NAMED else ""
        parts.append(f"{', '.join(group[:MAX_NAMED])}{more}, {problem}")
    return f" (left out: {'; '.join(parts)})" if parts else ""


# ---- opening -------------------------------------------------------------------------------------
def absolute_uri(path: str) -> str:
    """Return a URI unchanged. A relative path starts at the folder that contains `datasets/`."""
    return path if "://" in path else os.path.normpath(os.path.join(CARDS.parent, path))


def open_source(uri: str) -> tuple[fs.FileSystem, str]:
    """Return the filesystem of a URI and the path inside it.

    `hf://`, which pyarrow does not support, is opened through fsspec.

    Raises:
        StorageUnavailable: If the hub cannot be reached.
    """
    if not uri.startswith("hf://"):
        return resolve(uri)
    system, path = open_hub(uri)
    return fs.PyFileSystem(fs.FSSpecHandler(system)), path


def open_file(uri: str) -> pa.NativeFile:
    """Open a file of a source for reading.

    pyarrow accepts only names in UTF-8. Local files with other names are opened by Python.
    """
    system, path = open_source(uri)
    if isinstance(system, fs.LocalFileSystem) and not is_utf8(path):
        return pa.PythonFile(open(path, "rb"), "r")
    return system.open_input_file(path)


def is_folder(uri: str) -> bool:
    """Return whether a path or URI is a folder."""
    system, path = open_source(uri)
    if isinstance(system, fs.LocalFileSystem):
        return os.path.isdir(path)
    return bool(system.get_file_info(path).type == fs.FileType.Directory)


def remedy(uri: str) -> str:
    """Describe what to check if a source cannot be read."""
    if is_local(uri) or uri.startswith("hf://"):
        return "check the path, the network and your permissions"
    return access_remedy(uri)


# ---- listing -------------------------------------------------------------------------------------
def list_folders(uri: str) -> list[str]:
    """Return the sorted names of the visible folders in a folder."""
    system, folder = open_source(uri)
    names: list[str] = []
    if not isinstance(system, fs.LocalFileSystem):
        infos = system.get_file_info(fs.FileSelector(folder, allow_not_found=True))
        names = [info.base_name for info in infos if info.type == fs.FileType.Directory]
    elif os.path.isdir(folder):
        names = [entry.name for entry in os.scandir(folder) if entry.is_dir()]
    return sorted(name for name in names if not is_hidden(name))


def list_entries(
    uri: str, folders: Sequence[str], suffixes: frozenset[str], most: int | None = None
) -> list[Entry] | None:
    """List all files below a source, sorted, including hidden ones.

    Args:
        uri: URI of a folder, or of a single file, which is listed under its base name.
        folders: Folders below the source to visit first; "" is the source. A link in these folders
            to a folder of the source is followed, unless the target is also in these folders.
        suffixes: Suffixes of the files to read. They only affect the problem of a broken link.
        most: Stop after this number of files; only for local folders.

    Returns:
        The entries, or None if the source does not exist.

    Raises:
        UserError: If the source cannot be listed.
    """
    system, path = open_source(uri)
    try:
        if isinstance(system, fs.LocalFileSystem):
            return _list_local(path, folders, suffixes, most)
        return _list_remote(system, path)
    except UserError:
        raise
    except Exception as error:  # the hub's HTTP client has its own kinds of errors
        if not isinstance(error, OSError) and not uri.startswith("hf://"):
            raise
        reason = getattr(error, "strerror", None) or describe_error(error)
        where = printable(getattr(error, "filename", None) or uri)
        reason = printable(reason.splitlines()[0])
        raise UserError(f"{where} cannot be listed ({reason}); {remedy(uri)}") from None


def _list_local(
    path: str, folders: Sequence[str], suffixes: frozenset[str], most: int | None
) -> list[Entry] | None:
    if not os.path.exists(path):
        return None
    if os.path.isdir(path):
        return FolderWalk(path, suffixes, most).list_entries(folders)
    info = os.stat(path)
    return [Entry(os.path.basename(path), info.st_size, info.st_mtime_ns)]


def _list_remote(system: fs.FileSystem, path: str) -> list[Entry] | None:
    top = system.get_file_info(path)
    if top.type == fs.FileType.File:
        return [Entry(top.base_name, top.size, top.mtime_ns or 0)]
    if top.type == fs.FileType.NotFound:
        return None
    base = path.rstrip("/") + "/"
    entries: list[Entry] = []
    for info in system.get_file_info(fs.FileSelector(path, recursive=True)):
        if info.type != fs.FileType.File:
            continue
        name = info.path.removeprefix(base)
        problem = HIDDEN if is_hidden(name) else None
        if problem is None and set(name) & set("?#"):
            problem = NOT_A_URI
        elif problem is None and not get_suffix(name):
            problem = NO_EXTENSION
        entries.append(Entry(name, info.size, info.mtime_ns or 0, problem))
    return sorted(entries, key=lambda entry: entry[:3])


class FolderWalk:
    """Lists the files below a source on a disk.

    A link to a file is treated as the file. A link to a folder is followed if it leads to a folder
    of the source that is not read without the link. Each folder is read once, so that no image is
    read a second time with the label of the folder that contains the link. Hidden folders are read
    last, because links can lead into them.
    """

    def __init__(self, root: str, suffixes: frozenset[str], most: int | None = None):
        self.root = root
        self.base = os.path.realpath(root)
        self.suffixes = suffixes
        self.most = most
        self.visited: dict[str, str] = {}  # real path of each folder -> its name below the source
        self.ancestors: set[str] = set()  # real paths of the parents of visited folders
        self.entries: list[Entry] = []
        self.links: list[str] = []  # links to folders, which are followed after the folders
        self.followed: set[str] = set()  # links already read, or skipped with a reason
        self.hidden: list[str] = []  # hidden folders

    def list_entries(self, folders: Sequence[str]) -> list[Entry]:
        """Return all sorted entries; the given folders are read first."""
        for first in (sorted(set(folders)), [""]):  # the given folders, then the whole source
            for name in first:
                real = self._real(name)
                if not os.path.isdir(real) or real in self.visited:
                    continue
                # equal if no link is in the path
                if real == os.path.join(self.base, name).rstrip("/"):
                    self._visit(name)
                else:
                    self.links.append(name)
            self.links = sorted(set(self.links) - self.followed)
            for name in self.links:  # the list grows while links are followed
                self.followed.add(name)
                self._follow(name)
            self.links = []
        for name in self.hidden:
            if self._real(name) not in self.visited:
                self._visit(name)
        return sorted(self.entries)

    def _real(self, name: str) -> str:
        return os.path.realpath(os.path.join(self.root, name))

    def _visit(self, start: str) -> None:
        """Add the files of a folder and its subfolders.

        Links to folders and hidden folders are only collected, in `links` and `hidden`.
        """
        waiting = [(start, self._real(start))]
        while waiting:
            name, real = waiting.pop()
            if real in self.visited:
                continue
            self.visited[real] = name
            self._add_ancestors(real)
            for child in sorted(os.scandir(real), key=lambda child: child.name):
                if self.most is not None and len(self.entries) >= self.most:
                    return
                child_name = f"{name}/{child.name}" if name else child.name
                if child.is_dir(follow_symlinks=False):
                    # "x" stands for the source: it is not hidden, whatever its name
                    if is_hidden(child.name) and not is_hidden(name or "x"):
                        self.hidden.append(child_name)
                    else:
                        waiting.append((child_name, child.path))
                elif child.is_symlink() and os.path.isdir(child.path):
                    if not is_hidden(child_name):
                        self.links.append(child_name)
                else:
                    self.entries.append(_file_entry(child_name, child, self.suffixes))

    def _add_ancestors(self, real: str) -> None:
        folder = os.path.dirname(real)
        while folder not in self.ancestors:
            self.ancestors.add(folder)
            folder = os.path.dirname(folder)

    def _follow(self, name: str) -> None:
        """Read the folder behind a link, or add an entry with the reason why it is not read."""
        real = self._real(name)
        if real in self.visited:
            target = f"{self.visited[real]}, which is"
            self._skip(name, f"{OTHER_FILE}: a link to {target} {READ_ANYWAY}")
        elif real in self.ancestors:
            self._skip(
                name, f"{OTHER_FILE}: a link to a folder that holds others which are {READ_ANYWAY}"
            )
        elif not real.startswith(self.base.rstrip("/") + "/"):
            self._skip(name, OUTSIDE_LINK)
        else:
            self._visit(name)

    def _skip(self, name: str, problem: str) -> None:
        self.entries.append(Entry(name, 0, 0, problem))


def _file_entry(name: str, child: os.DirEntry[str], suffixes: frozenset[str]) -> Entry:
    """Return the entry of a file, a special file such as a pipe, or a broken link."""
    try:
        info = child.stat()
    except OSError as error:
        return Entry(name, 0, 0, _link_problem(name, error, suffixes))
    if not stat.S_ISREG(info.st_mode):
        kinds = (kind for is_kind, kind in SPECIAL_FILES.items() if is_kind(info.st_mode))
        return Entry(name, 0, 0, f"{OTHER_FILE}: {next(kinds, 'no plain file')}")
    problem = None
    if is_hidden(name):
        problem = HIDDEN
    elif not get_suffix(name) and not _is_image_file(child.path):
        problem = NO_EXTENSION
    return Entry(name, info.st_size, info.st_mtime_ns, problem)


def _is_image_file(path: str) -> bool:
    try:
        with open(path, "rb") as stream:
            return starts_as_image(stream.read(START_BYTES))
    except OSError:
        return False


def _link_problem(name: str, error: OSError, suffixes: frozenset[str]) -> str:
    if error.errno == errno.ENOENT:
        reason = "to nothing"
    elif error.errno == errno.ELOOP:
        reason = "to itself"
    else:
        reason = f"that cannot be followed ({error.strerror})"
    if get_suffix(name) and get_suffix(name) in suffixes:
        return f"link: {reason}"
    return f"{OTHER_FILE}: a link {reason}"


# ---- folders -------------------------------------------------------------------------------------
class Folder:
    """One folder of a source, with the files and folders in it.

    Args:
        name: Path below the source, empty for the source itself.
    """

    def __init__(self, name: str):
        self.name = name
        self.entries: list[Entry] = []
        self.folders: dict[str, Folder] = {}

    @property
    def base_name(self) -> str:
        """The last part of the path."""
        return self.name.rpartition("/")[2]

    @cached_property
    def images(self) -> list[str]:
        """Names of the images directly in this folder."""
        return [
            entry.name.rpartition("/")[2]
            for entry in self.entries
            if not entry.problem and get_suffix(entry.name) in IMAGE_FILES
        ]

    @cached_property
    def with_images(self) -> list[Folder]:
        """The subfolders that have images, directly or in their own subfolders."""
        return [child for child in self.folders.values() if child.images or child.with_images]

    def walk(self) -> Iterator[Folder]:
        """Yield this folder and all folders below it, parents first."""
        waiting = [self]
        for folder in waiting:  # the list grows in the loop
            yield folder
            waiting.extend(folder.folders.values())


def folder_tree(entries: Iterable[Entry]) -> Folder:
    """Build the tree of folders from listed files, without hidden files."""
    root = Folder("")
    known = {"": root}
    for entry in entries:
        if entry.problem == HIDDEN:
            continue
        path = entry.name.rpartition("/")[0]
        folder = known.get(path)
        if folder is None:
            folder = root
            for part in path.split("/"):
                name = f"{folder.name}/{part}" if folder.name else part
                folder = folder.folders.setdefault(part, Folder(name))
            known[path] = folder
        folder.entries.append(entry)
    return root
