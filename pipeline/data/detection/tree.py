"""The folders below a path and what kinds of files they hold, looked at in bounds.

Hidden files are ignored, and links to folders are not followed.
"""

from __future__ import annotations

import os
import stat
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from pyarrow import fs

from pipeline.data.formats.base import IMAGE_SUFFIXES
from pipeline.data.listing import LITTER_FOLDERS, open_source, printable, remedy, suffix_of
from workers.errors import UserError
from workers.storage.artifact import join

MOST_NAMES = 1_000_000  # names that are looked at below one path
MOST_NAMES_REMOTE = 100_000
MOST_LEVELS = 12
SAMPLES = 2  # images of a folder whose names are noted
MOST_OF_A_KIND = 20_000  # tables, shards or other files of a folder whose names are noted
TABLE_SUFFIXES = frozenset((".csv", ".tsv"))
KINDS = {
    ".csv": "tables",
    ".tsv": "tables",
    ".parquet": "parquet",
    ".tar": "tars",
}
# of programs, not of people
LITTER_FILES = frozenset(("thumbs.db", "desktop.ini"))


@dataclass
class Folder:
    """One folder. name: path below the folder that was looked at, empty for that itself.

    images: number of image files in it. samples: names of the first of them. tables, parquet, tars,
    other_files: names. links: to folders. unused: folders that programs leave behind.
    is_read: False where the bound on names was reached before it.
    """

    name: str
    images: int = 0
    samples: list[str] = field(default_factory=list)
    tables: list[str] = field(default_factory=list)
    parquet: list[str] = field(default_factory=list)
    tars: list[str] = field(default_factory=list)
    other_files: list[str] = field(default_factory=list)
    links: list[str] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)
    folders: dict[str, Folder] = field(default_factory=dict)
    is_read: bool = False

    @property
    def base_name(self) -> str:
        """The name without the folders above."""
        return self.name.rpartition("/")[2]

    def walk(self) -> Iterator[Folder]:
        """Yield this folder and all below it, those above first."""
        waiting = deque([self])
        while waiting:
            folder = waiting.popleft()
            yield folder
            waiting.extend(folder.folders.values())

    def all_images(self) -> int:
        """Return the number of images in this folder and below."""
        return sum(folder.images for folder in self.walk())

    def is_complete(self) -> bool:
        """Whether this folder and all below it were read."""
        return all(folder.is_read for folder in self.walk())

    def holds_images(self) -> bool:
        """Whether there are images here or below; of what was not read, it is assumed."""
        return any(folder.images or not folder.is_read for folder in self.walk())


class Child(NamedTuple):
    """A name in a folder. kind: `folder`, `link` (to a folder), `file` or `special`."""

    name: str
    kind: str


def read_tree(uri: str) -> Folder | None:
    """Return the folder at a path or URI with what is below it; None where there is no folder.

    Raise `UserError` where it cannot be listed.
    """
    system, path = open_source(uri)
    try:
        if isinstance(system, fs.LocalFileSystem):
            if not os.path.isdir(path):
                return None
            return _LocalTree(path).read()
        if system.get_file_info(path).type != fs.FileType.Directory:
            return None
        return _RemoteTree(system, path).read()
    except UserError:
        raise
    except Exception as error:  # the hub's HTTP client raises kinds of its own
        if not isinstance(error, OSError) and not uri.startswith("hf://"):
            raise
        reason = getattr(error, "strerror", None) or str(error).strip() or type(error).__name__
        reason = printable(reason.splitlines()[0])
        where = printable(getattr(error, "filename", None) or uri)
        raise UserError(f"{where} cannot be listed ({reason}); {remedy(uri)}") from None


class _Tree:
    """Reads folders level by level, so that a bound on names leaves out the lowest."""

    most_names = MOST_NAMES

    def children(self, name: str) -> Iterator[Child]:
        """Yield what is in a folder, in any order."""
        raise NotImplementedError

    def read(self) -> Folder:
        root = Folder("")
        waiting = deque([(root, 0)])
        names_left = self.most_names
        while waiting and names_left > 0:
            folder, level = waiting.popleft()
            children = sorted(islice(self.children(folder.name), names_left))
            names_left -= max(len(children), 1)
            for child in children:
                _add(folder, child)
            folder.is_read = True
            if level < MOST_LEVELS:
                waiting.extend((below, level + 1) for below in folder.folders.values())
        return root


def _add(folder: Folder, child: Child) -> None:
    name, kind = child
    if name.startswith("."):
        return
    if kind == "link":
        folder.links.append(name)
    elif kind == "folder" and name.lower() in LITTER_FOLDERS:
        folder.unused.append(name)
    elif kind == "folder":
        path = f"{folder.name}/{name}" if folder.name else name
        folder.folders[name] = Folder(path)
    elif kind == "special":
        folder.other_files.append(name)
    elif suffix_of(name) in IMAGE_SUFFIXES:
        folder.images += 1
        if len(folder.samples) < SAMPLES:
            folder.samples.append(name)
    elif name.lower() not in LITTER_FILES:
        names: list[str] = getattr(folder, KINDS.get(suffix_of(name), "other_files"))
        if len(names) < MOST_OF_A_KIND:
            names.append(name)


class _LocalTree(_Tree):
    def __init__(self, root: str):
        self.root = root

    def children(self, name: str) -> Iterator[Child]:
        with os.scandir(os.path.join(self.root, name)) as entries:
            for entry in entries:
                yield Child(entry.name, self.kind_of(entry))

    @staticmethod
    def kind_of(entry: os.DirEntry[str]) -> str:
        """Return the kind of a child."""
        if entry.is_dir(follow_symlinks=False):
            return "folder"
        try:
            mode = entry.stat().st_mode
        except OSError:  # a link to nothing
            return "special"
        if stat.S_ISDIR(mode):
            return "link"
        return "file" if stat.S_ISREG(mode) else "special"


class _RemoteTree(_Tree):
    most_names = MOST_NAMES_REMOTE

    def __init__(self, system: fs.FileSystem, root: str):
        self.system = system
        self.root = root

    def children(self, name: str) -> Iterator[Child]:
        path = join(self.root, name) if name else self.root
        for info in self.system.get_file_info(fs.FileSelector(path, allow_not_found=True)):
            kind = "folder" if info.type == fs.FileType.Directory else "file"
            yield Child(info.base_name, kind)
