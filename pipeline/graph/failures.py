"""What a failed try of a stage leaves for people: its whole traceback with where it ran, and a
sentence with our own line.

Layout: `<storage>/failures/<key of the stage>/<time>-<host>-rank<rank>-<process>.txt`. `gc` deletes
those of stages whose result stands, or that no run needs.
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
ROOT = str(Path(__file__).resolve().parents[2])
FRAME = re.compile(
    r'File "(?!.*site-packages)[^"\n]*?(?P<module>(?:pipeline|workers)/[^"\n]*\.py)", line '
    r"(?P<line>\d+), in (?P<name>\S+)"
)
LONGEST = 500  # characters of an error's own words in the sentence; the file has them all


def describe(error: Exception) -> str:
    """Return the type and message of an error, with the innermost line of this project that
    raised it or passed it on."""
    text = f"{type(error).__name__}: {' '.join(redact(str(error)).split())[:LONGEST]}"
    frame = own_frame(error)
    return f"{text} (at {frame})" if frame else text


def own_frame(error: BaseException) -> str:
    """`workers/loop.py:120 in train_step`: the innermost frame below `pipeline/` or `workers/`;
    empty where there is none. Of an error that Ray has brought from another process, the frame
    there."""
    remote = [
        *FRAME.finditer(getattr(error.__cause__, "traceback_str", ""))
    ]  # a RayTaskError has it as text
    if remote:
        return f"{remote[-1]['module']}:{remote[-1]['line']} in {remote[-1]['name']}"
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = os.path.relpath(os.path.abspath(frame.filename), ROOT)
        if path.startswith((f"pipeline{os.sep}", f"workers{os.sep}")):
            return f"{path}:{frame.lineno} in {frame.name}"
    return ""


def keep(
    storage: str, stage_id: str, key: str, error: Exception, rank: int = 0, world: int = 1
) -> str:
    """Write the whole traceback of a failed stage below `storage`, with host, rank and log.

    Return the path of the file, or why it was not written: a storage that cannot be reached must
    not hide the error itself.
    """
    host = platform.node()
    now = time.strftime("%Y%m%dT%H%M%S")
    path = join(storage, FOLDER, key, f"{now}-{host}-rank{rank}-{os.getpid()}.txt")
    lines = [
        f"stage: {stage_id}",
        f"key: {key}",
        f"time: {time.strftime('%Y-%m-%dT%H:%M:%S%z')}",
        f"host: {host}",
        f"rank: {rank} of {world}",
        f"process: {os.getpid()}",
        f"log: {log_path() or 'the terminal of this process'}",
        "",
    ]
    body = "\n".join(lines) + "\n" + "".join(traceback.format_exception(error))
    try:
        write_bytes(path, redact(body).encode(errors="replace"))
    except Exception as problem:
        return f"not kept: {' '.join(str(problem).split())[:200]}"
    return path


def log_path() -> str:
    """The file that this process writes its errors into, as a worker of Ray or Slurm does; empty
    where it is no file."""
    try:
        is_file = stat.S_ISREG(os.fstat(2).st_mode)
        return os.readlink("/proc/self/fd/2") if is_file else ""
    except OSError:
        return ""
