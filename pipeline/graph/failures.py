"""What is written about a failed try of a stage: its traceback, and the line that raised the error.

Layout: `<storage>/failures/<key of the stage>/<time>-<host>-rank<rank>-<process>.txt`. `gc` deletes
the files of stages that have a result, and of stages that no run needs.
"""

from __future__ import annotations

import os
import platform
import re
import stat
import time
import traceback
from pathlib import Path

from workers.storage.artifact import join, write_bytes
from workers.storage.secrets import redact

FOLDER = "failures"
SUFFIX = ".txt"
ROOT = str(Path(__file__).resolve().parents[2])
PACKAGES = (f"pipeline{os.sep}", f"workers{os.sep}")
REMOTE_FRAME = re.compile(
    r'File "(?!.*site-packages)[^"\n]*?(?P<module>(?:pipeline|workers)/[^"\n]*\.py)", line '
    r"(?P<line>\d+), in (?P<name>\S+)"
)  # a line of this project in the text of a traceback
MAX_MESSAGE = 500  # characters of an error's message in `describe`; the file has all of them
MAX_WRITE_ERROR = 200  # characters of the reason why the file was not written
STDERR = 2


def describe(error: Exception) -> str:
    """Return the type and message of an error, with the innermost line of this project that
    raised it or passed it on."""
    message = " ".join(redact(str(error)).split())
    text = f"{type(error).__name__}: {message[:MAX_MESSAGE]}"
    frame = innermost_frame(error)
    if frame:
        text += f" (at {frame})"
    return text


def innermost_frame(error: BaseException) -> str:
    """Return the innermost frame below `pipeline/` or `workers/`; empty when there is none.

    The form is `workers/loop.py:120 in train_step`. Where Ray has brought the error from another
    process, it is the frame in that process.
    """
    # a RayTaskError holds the traceback of the other process as text
    remote_traceback = getattr(error.__cause__, "traceback_str", "")
    remote_frames = list(REMOTE_FRAME.finditer(remote_traceback))
    if remote_frames:
        match = remote_frames[-1]
        return f"{match['module']}:{match['line']} in {match['name']}"
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = os.path.relpath(os.path.abspath(frame.filename), ROOT)
        if path.startswith(PACKAGES):
            return f"{path}:{frame.lineno} in {frame.name}"
    return ""


def keep(
    storage: str, stage_id: str, key: str, error: Exception, rank: int = 0, world: int = 1
) -> str:
    """Write the whole traceback of a failed stage below `storage`, with host, rank and log.

    Return the path of the file, or the reason why it was not written: a storage that cannot be
    reached must not hide the error itself.
    """
    host = platform.node()
    process = os.getpid()
    file_name = f"{time.strftime('%Y%m%dT%H%M%S')}-{host}-rank{rank}-{process}{SUFFIX}"
    path = join(storage, FOLDER, key, file_name)
    log = log_path() or "the terminal of this process"
    lines = [
        f"stage: {stage_id}",
        f"key: {key}",
        f"time: {time.strftime('%Y-%m-%dT%H:%M:%S%z')}",
        f"host: {host}",
        f"rank: {rank} of {world}",
        f"process: {process}",
        f"log: {log}",
    ]
    heading = "\n".join(lines)
    trace = "".join(traceback.format_exception(error))
    text = f"{heading}\n\n{trace}"
    try:
        write_bytes(path, redact(text).encode(errors="replace"))
    except Exception as write_error:
        reason = " ".join(str(write_error).split())
        return f"not kept: {reason[:MAX_WRITE_ERROR]}"
    return path


def log_path() -> str:
    """Return the file that stderr of this process goes to; empty when it goes to no file.

    Workers of Ray and jobs of Slurm have such a file.
    """
    try:
        if stat.S_ISREG(os.fstat(STDERR).st_mode):
            return os.readlink(f"/proc/self/fd/{STDERR}")
    except OSError:
        pass
    return ""
