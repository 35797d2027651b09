"""Failure files: the traceback of each failed try of a stage, and the end of the process's log.

Layout: `<storage>/failures/<key of the stage>/<time>-<host>-rank<rank>-<process>.txt`. The time has
nanoseconds, so that each try has its own file. `gc` deletes the files of stages that have a result,
and of stages that no run needs.

`keep` writes the file of an error in this process. `find_frame` finds the line of code that raised
an error.
"""

from __future__ import annotations

import os
import platform
import re
import stat
import sysconfig
import time
import traceback
from pathlib import Path
from typing import NamedTuple

from workers.storage.artifact import join, write_bytes
from workers.storage.secrets import printable, redact

FOLDER = "failures"
SUFFIX = ".txt"
ROOT = str(Path(__file__).resolve().parents[2])
PACKAGES = (f"pipeline{os.sep}", f"workers{os.sep}")
# a frame in the text of a traceback, and the path of a file of this project in such a frame
REMOTE_FRAME = re.compile(r'File "([^"\n]+)", line (\d+), in (\S+)')
REMOTE_MODULE = re.compile(r"(?!.*site-packages).*?(?P<module>(?:pipeline|workers)/.*\.py)")
# folders of the standard library and of installed packages
LIBRARIES = tuple({f"{path}{os.sep}" for path in sysconfig.get_paths().values()})
MAX_MESSAGE = (
    500  # characters of an error message in `describe_exception`; the file has the full message
)
MAX_WRITE_ERROR = 200  # characters of the reason why a file was not written
STDERR = 2  # file descriptor of stderr
LOG_LINES = 50  # number of lines to copy from the end of a log
LOG_BYTES = 16 << 10  # maximum size of these lines
ANSI = re.compile(r"\x1b\[[0-9;]*m")  # colour codes, which Ray inserts into tracebacks


def describe_exception(error: Exception) -> str:
    """Return the type and message of an error, and the line of code that `find_frame` finds."""
    message = printable(" ".join(ANSI.sub("", str(error)).split()))
    text = f"{type(error).__name__}: {message[:MAX_MESSAGE]}"
    frame = find_frame(error)
    if frame:
        text += f" (at {frame})"
    return text


def find_frame(error: BaseException) -> str:
    """Return the innermost traceback frame in the user's code, such as a method in a notebook.

    Without such a frame, return the innermost frame below `pipeline/` or `workers/`, or else "". If
    Ray transferred the error from another process, the frames of that process are searched.

    Example of a result: `workers/loop.py:120 in train_step`.
    """
    # a RayTaskError contains the traceback of the other process as text
    remote_traceback = getattr(error.__cause__, "traceback_str", "")
    # (path, line, function), outermost frame first
    frames = [match.groups() for match in REMOTE_FRAME.finditer(remote_traceback)] or [
        (frame.filename, frame.lineno, frame.name)
        for frame in traceback.extract_tb(error.__traceback__)
    ]
    own = ""
    for path, line, name in reversed(frames):
        module = _own_module(path, bool(remote_traceback))
        if module:
            own = own or f"{module}:{line} in {name}"
        elif _is_users(path):
            return f"{path}:{line} in {name}"
    return own


def _own_module(path: str, is_remote: bool) -> str:
    """Return the path of a source file relative to this project, for example `workers/loop.py`.

    Args:
        path: Path in a traceback.
        is_remote: Whether the traceback is from another process, where the project can be in
            another folder.

    Returns:
        The path, or an empty string if the file does not belong to this project.
    """
    if is_remote:
        match = REMOTE_MODULE.fullmatch(path)
        return match["module"] if match else ""
    module = os.path.relpath(os.path.abspath(path), ROOT)
    return module if module.startswith(PACKAGES) else ""


def _is_users(path: str) -> bool:
    """Return whether a source file belongs neither to a library nor to the interpreter."""
    is_library = path.startswith(LIBRARIES) or "-packages/" in path or "/lib/python3" in path
    return not is_library and not path.startswith("<")


class Origin(NamedTuple):
    """The process in which a try of a stage failed.

    Attributes:
        stage: Id of the stage.
        key: Key of the stage.
        host: Name or address of the machine.
        rank: Rank in the worker group.
        world: Number of ranks.
        process: Process id.
        log: Path of the file with stderr of the process; empty if stderr is not a file.
    """

    stage: str
    key: str
    host: str
    rank: int
    world: int
    process: int
    log: str


def keep(
    storage: str, stage_id: str, key: str, error: Exception, rank: int = 0, world: int = 1
) -> str:
    """Write the failure file of a stage that failed in this process. See `write_failure`.

    Args:
        storage: URI of the storage.
        stage_id: Id of the stage.
        key: Key of the stage.
        error: The error.
        rank: Rank of this process.
        world: Number of ranks.

    Returns:
        The path of the file, or the reason why it was not written.
    """
    log = log_path()
    origin = Origin(stage_id, key, platform.node(), rank, world, os.getpid(), log)
    trace = "".join(traceback.format_exception(error))
    return write_failure(storage, origin, trace, read_last_log_lines(log))


def write_failure(storage: str, origin: Origin, text: str, log_end: str) -> str:
    """Write the failure file of a try.

    An error while writing is not raised: it must not hide the error of the stage.

    Args:
        storage: URI of the storage.
        origin: The process in which the try failed.
        text: The traceback or another explanation.
        log_end: Last lines of the log.

    Returns:
        The path of the file, or the reason why it was not written.
    """
    host = re.sub(r"[^\w.-]", "_", origin.host)  # IPv6 addresses contain colons
    process = f"rank{origin.rank}-{origin.process}"
    now = time.time_ns()
    second = time.strftime("%Y%m%dT%H%M%S", time.localtime(now // 10**9))
    file_name = f"{second}.{now % 10**9:09d}-{host}-{process}{SUFFIX}"
    path = join(storage, FOLDER, origin.key, file_name)
    lines = [
        f"stage: {origin.stage}",
        f"key: {origin.key}",
        f"time: {time.strftime('%Y-%m-%dT%H:%M:%S%z')}",
        f"host: {origin.host}",
        f"rank: {origin.rank} of {origin.world}",
        f"process: {origin.process}",
        f"log: {origin.log or 'the terminal of this process'}",
        "",
        ANSI.sub("", text).rstrip(),
    ]
    if log_end:
        lines += ["", f"the end of its log ({origin.log}):", ANSI.sub("", log_end).rstrip()]
    body = "\n".join([*lines, ""])
    try:
        write_bytes(path, redact(body).encode(errors="replace"))
    except Exception as write_error:
        reason = " ".join(str(write_error).split())
        return f"not kept: {reason[:MAX_WRITE_ERROR]}"
    return path


def read_last_log_lines(path: str) -> str:
    """Return the last lines of a log, or an empty string if the log cannot be read."""
    if not path:
        return ""
    try:
        with open(path, "rb") as stream:
            size = stream.seek(0, os.SEEK_END)
            stream.seek(max(0, size - LOG_BYTES))
            text = stream.read(LOG_BYTES).decode(errors="replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-LOG_LINES:])


def log_path() -> str:
    """Return the path of the file that stderr of this process is redirected to.

    Ray workers and Slurm jobs have such a file. The result is empty if stderr is not a file.
    """
    try:
        if stat.S_ISREG(os.fstat(STDERR).st_mode):
            return os.readlink(f"/proc/self/fd/{STDERR}")
    except OSError:
        pass
    return ""
