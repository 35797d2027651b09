"""Commands that unpack compressed archives, which Accrete does not read."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Sequence

from pipeline.data.file_kinds import PACKED_SUFFIXES
from workers.storage.artifact import is_local

ZIP_SUFFIXES = (".zip",)
TAR_SUFFIXES = (
    ".tar",
    ".tgz",
    ".tar.gz",
    ".tbz2",
    ".tar.bz2",
    ".txz",
    ".tar.xz",
    ".tar.zst",
)
MAX_COMMANDS = 5  # maximum number of archives that one command unpacks


def build_unpack_command(paths: Sequence[str], init_path: str, program: str) -> str | None:
    """Build the shell command that unpacks archives and then runs the subcommand `init`.

    Args:
        paths: Paths of the archives.
        init_path: Path for `init`; "" for the folder of the last unpacked archive.
        program: The command that starts Accrete.

    Returns:
        The command, or None if an archive is not local or has an unknown format. The command leaves
        out archives whose folder already exists, and those after the first MAX_COMMANDS.
    """
    commands: list[str] = []
    target = ""
    for path in paths[:MAX_COMMANDS]:
        target = _choose_target(path)
        command = _format_unpack(path, target)
        if command is None or not is_local(path):
            return None
        if not os.path.isdir(target):
            commands.append(command)
    commands.append(f"{program} {shlex.join(['init', init_path or target])}")
    return " && ".join(commands)


def _choose_target(path: str) -> str:
    """Choose the folder to unpack into.

    It is next to the archive, or in the current folder if that place is read-only.
    """
    suffix = _find_suffix(path)
    folder, name = os.path.split(path)
    stem = name[: len(name) - len(suffix)] or "unpacked"
    if os.access(folder or os.curdir, os.W_OK):
        return os.path.join(folder, stem)
    return stem


def _find_suffix(path: str) -> str:
    """Return the longest known suffix of an archive, for example `.tar.gz`, or ""."""
    endings = [
        suffix for suffix in (*PACKED_SUFFIXES, *TAR_SUFFIXES) if path.lower().endswith(suffix)
    ]
    return max(endings, key=len, default="")


def _format_unpack(path: str, target: str) -> str | None:
    """Format the command that unpacks an archive into a new folder; None for other formats."""
    suffix = _find_suffix(path)
    if suffix in ZIP_SUFFIXES:
        if shutil.which("unzip"):
            return shlex.join(["unzip", "-q", path, "-d", target])
        return shlex.join([sys.executable, "-m", "zipfile", "-e", path, target])
    if suffix in TAR_SUFFIXES:
        return (
            f"{shlex.join(['mkdir', target])} && {shlex.join(['tar', '-xf', path, '-C', target])}"
        )
    return None
