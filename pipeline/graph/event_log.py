"""The events of a run as JSON lines, `<storage>/runs/NAME/events.jsonl`: one line per event.

On a disk each line is appended at once, with one write, so that a reader never sees a part of a
line. In a bucket the whole file is rewritten from time to time. The size of the file is bounded: a
full file is renamed to `events.1.jsonl` and replaces the previous file of that name.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import time
from contextlib import suppress
from typing import Any, TextIO

from workers.errors import UserError
from workers.storage.artifact import (
    is_local,
    join,
    make_dirs,
    read_bytes,
    resolve,
    share_file,
    write_bytes,
)
from workers.storage.secrets import redact_texts

FILE = "events.jsonl"
FULL_FILE = "events.1.jsonl"
MAX_BYTES = 8 << 20
MAX_TEXT = 2000  # characters of a text in an event


class EventLog:
    """Appends events to the log of a run.

    If a log cannot be written, it stops silently: on a full disk the run itself reports it.

    Args:
        storage: URI of the storage.
        name: Name of the run.
        max_bytes: Largest size of the file.
    """

    def __init__(self, storage: str, name: str, max_bytes: int = MAX_BYTES):
        folder = join(storage, "runs", name)
        self.uri = join(folder, FILE)
        self.full_uri = join(folder, FULL_FILE)
        self.max_bytes = max_bytes
        self.is_local = is_local(storage)
        self.size = 0
        self.stream: TextIO | None = None
        self.lines: list[bytes] = []  # for a log in a bucket
        self.is_flushed = True
        with suppress(OSError, UserError):
            self._open()

    def write(self, kind: str, **values: Any) -> None:
        """Append an event.

        Args:
            kind: Kind of the event.
            values: JSON values. Texts are redacted, and empty values are left out.
        """
        event: dict[str, Any] = {"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "event": kind}
        for name, value in values.items():
            if value not in ("", None, {}):
                event[name] = redact_texts(value, MAX_TEXT)
        line = json.dumps(event, ensure_ascii=False) + "\n"
        with suppress(OSError, UserError):
            self._append(line)

    def flush(self) -> None:
        """Rewrite the file of a log in a bucket if events were added."""
        if self.is_local or self.is_flushed:
            return
        with suppress(OSError, UserError):
            write_bytes(self.uri, b"".join(self.lines))
            self.is_flushed = True

    def close(self) -> None:
        """Write the remaining events, and close the file."""
        self.flush()
        if self.stream is not None:
            with suppress(OSError):
                self.stream.close()
            self.stream = None

    def _open(self) -> None:
        if self.is_local:
            self.stream = open_log(resolve(self.uri)[1])
            self.size = os.fstat(self.stream.fileno()).st_size
        else:
            with suppress(FileNotFoundError):
                self.lines = [read_bytes(self.uri, self.max_bytes)]
            self.size = sum(map(len, self.lines))

    def _append(self, line: str) -> None:
        data = line.encode(errors="replace")
        if self.size + len(data) > self.max_bytes:
            self._rotate()
        self.size += len(data)
        if self.stream is not None:
            os.write(self.stream.fileno(), data)
        elif not self.is_local:
            self.lines.append(data)
            self.is_flushed = False

    def _rotate(self) -> None:
        if self.stream is not None:
            self.stream.close()
            os.rename(resolve(self.uri)[1], resolve(self.full_uri)[1])
            self._open()
        elif not self.is_local:
            write_bytes(self.full_uri, b"".join(self.lines))
            self.lines = []
        self.size = 0


def open_log(path: str) -> TextIO:
    """Open a log on a disk for appending. The group can read it if it can read the folder.

    Raises:
        OSError: If the log cannot be written, or is not a regular file: a link could lead out of
            the storage, and a FIFO would wait for a reader.
    """
    make_dirs(os.path.dirname(path))
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    stream = os.fdopen(os.open(path, flags, 0o644), "a", encoding="utf-8")
    if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
        stream.close()
        raise OSError(errno.EINVAL, "it is not a regular file", path)
    with suppress(PermissionError):  # the file belongs to another user, who shared it
        share_file(path)
    return stream
