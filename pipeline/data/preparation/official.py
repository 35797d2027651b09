"""The unpacked official files of a data set: lists and images.

The files may come from an untrusted source. Therefore the size of a list is limited, and the files
that it names must be inside the folder, also after links are resolved.
"""

from __future__ import annotations

import os
import posixpath
import stat
from collections.abc import Iterator, Sequence

from pipeline.data.file_kinds import IMAGE_SUFFIXES
from pipeline.data.names import get_suffix, printable
from pipeline.data.preparation import matlab
from workers.errors import UserError
from workers.storage.regular_file import open_regular, read_regular

MAX_LIST_BYTES = 512 << 20  # bytes of a list; Places365's list of train images has 60 MB
LONGEST_LINE = 4096  # maximum bytes of a line


class OfficialFolder:
    """The folder of official files. Names are paths relative to this folder, with slashes."""

    def __init__(self, path: str):
        self.path = path
        self._real = os.path.realpath(path)
        # name of a subfolder -> whether it is inside `path` after links are resolved
        self._is_inside: dict[str, bool] = {}

    def first(self, names: Sequence[str]) -> str | None:
        """Return the first existing name of a file or folder, or None."""
        return next((name for name in names if os.path.exists(self._join(name))), None)

    def need(self, names: Sequence[str]) -> str:
        """Return the first existing name; raise `UserError` if no name exists."""
        name = self.first(names)
        if name is None:
            raise UserError(f"{self.where(names[0])} is missing; fetch the official files again")
        return name

    def where(self, name: str) -> str:
        """Return the path of a file for a message."""
        return printable(self._join(name))

    def _join(self, name: str) -> str:
        return os.path.join(self.path, *name.split("/"))

    # ---- lists -----------------------------------------------------------------------------------
    def rows(
        self, name: str, columns: int, separator: str | None = None
    ) -> Iterator[tuple[str, ...]]:
        """Yield the lines of a list, split into columns.

        The last column has the rest of the line. Empty lines are skipped.

        Args:
            name: Name of the list.
            columns: Number of columns.
            separator: Separator of columns. None: whitespace.

        Raises:
            UserError: If a line has fewer columns, or the list cannot be read.
        """
        for number, line in enumerate(self._lines(name), start=1):
            cells = line.strip().split(separator, columns - 1)
            if not cells or not line.strip():
                continue
            if len(cells) < columns:
                raise UserError(
                    f"{self.where(name)}, line {number}: {line.strip()!r:.80} has not the "
                    f"{columns} columns of the official list; fetch it again"
                )
            yield tuple(cell.strip() for cell in cells)

    def _lines(self, name: str) -> Iterator[str]:
        self._require_inside(name)
        try:
            with open_regular(self._join(name), MAX_LIST_BYTES) as stream:
                while line := stream.readline(LONGEST_LINE + 1):
                    if len(line) > LONGEST_LINE:
                        raise UserError(
                            f"{self.where(name)} has a line of more than {LONGEST_LINE} bytes and "
                            "is not an official list; fetch it again"
                        )
                    yield line.decode("utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise self._unreadable(name, error) from None

    def table(self, name: str) -> dict[str, str]:
        """Read a list as a dict from the first column to the rest of the line."""
        rows: Iterator[tuple[str, str]] = ((key, value) for key, value in self.rows(name, 2))
        return dict(rows)

    def matlab(self, name: str, variables: Sequence[str]) -> dict[str, matlab.Value]:
        """Return variables of a .mat file; raise `UserError` if it cannot be read."""
        self._require_inside(name)
        try:
            data = read_regular(self._join(name), matlab.MAX_FILE_BYTES)
        except OSError as error:
            raise self._unreadable(name, error) from None
        return matlab.read_variables(data, self.where(name), variables)

    def _unreadable(self, name: str, error: Exception) -> UserError:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        return UserError(
            f"{self.where(name)} cannot be read ({reason}); fetch the official files again"
        )

    def _require_inside(self, name: str) -> None:
        real = os.path.realpath(self._join(name))
        if not self._holds(real):
            raise UserError(
                f"{self.where(name)} is a link out of {printable(self.path)}; put the file itself "
                "there"
            )

    def _holds(self, real: str) -> bool:
        return real == self._real or real.startswith(self._real.rstrip("/") + "/")

    # ---- images ----------------------------------------------------------------------------------
    def subfolders(self, name: str) -> list[str]:
        """Return the sorted names of the folders in a folder, without hidden ones."""
        with os.scandir(self._join(name)) as entries:
            folders = [entry.name for entry in entries if entry.is_dir()]
        return sorted(folder for folder in folders if not folder.startswith("."))

    def images(self, name: str) -> list[str]:
        """Return the paths of the image files in a folder, sorted."""
        files = sorted(os.listdir(self._join(name)))
        images = [file for file in files if get_suffix(file) in IMAGE_SUFFIXES]
        return [f"{name}/{image}" for image in images if not image.startswith(".")]

    def find_problem(self, name: str) -> str | None:
        """Return why an image in a list cannot be used, or None if it is a file in the folder."""
        if not name or "\0" in name or posixpath.isabs(name) or ".." in name.split("/"):
            return "leads out of the folder"
        if get_suffix(name) not in IMAGE_SUFFIXES:
            return "is not an image"
        folder = posixpath.dirname(name)
        if folder not in self._is_inside:
            self._is_inside[folder] = self._holds(os.path.realpath(self._join(folder)))
        try:
            info = os.lstat(self._join(name))
            if stat.S_ISLNK(info.st_mode):
                info = os.stat(self._join(name))
                if not self._holds(os.path.realpath(self._join(name))):
                    return "is a link out of the folder"
        except OSError:
            return "is missing"
        if not self._is_inside[folder]:
            return "is reached by a link that leaves the folder"
        return None if stat.S_ISREG(info.st_mode) else "is not a file"

    def absolute(self, name: str) -> str:
        """Return the absolute path of a name. For images, call `find_problem` first."""
        return os.path.join(self._real, *name.split("/"))
