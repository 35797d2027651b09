"""The event log of a run: `<storage>/runs/NAME/events.jsonl`, with one JSON line per event.

On a local disk, each event is appended immediately with a single write, so that readers see only
complete lines. In a bucket, `EventLog.flush` rewrites the whole file. The size of the file is
limited: a full file is renamed to `events.1.jsonl` and replaces the previous file of that name.
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
ROTATED_FILE = "events.1.jsonl"
MAX_BYTES = 8 << 20  # per file
MAX_TEXT = 2000  # characters per string in an event


class EventLog:
    """Appends events to the log of a run.

    Errors are ignored: an event that cannot be written is lost. (If the disk is full, the run fails
    when it writes results, and reports it.)

    A log in a bucket is not overwritten before its old lines have been read. If that log is larger
    than `max_bytes`, it stays unchanged, and new events are lost.

    Args:
        storage: URI of the storage.
        name: Name of the run.
        max_bytes: Maximum size of the file in bytes.
    """

    def __init__(self, storage: str, name: str, max_bytes: int = MAX_BYTES):
        folder = join(storage, "runs", name)
        self.uri = join(folder, FILE)
        self.rotated_uri = join(folder, ROTATED_FILE)
        self.max_bytes = max_bytes
        self.is_local = is_local(storage)
        self.size = 0
        self.stream: TextIO | None = None
        # only for a log in a bucket: all its lines, because the file is rewritten as a whole
        self.lines: list[bytes] = []
        self.has_old_lines = False  # whether `lines` begins with the old content of the file
        self.has_unflushed_lines = False
        with suppress(OSError, UserError):
            self._open()

    def write(self, kind: str, **values: Any) -> None:
        """Append an event with the current time.

        Args:
            kind: Kind of the event.
            values: JSON values of the event. Strings are redacted and truncated. The values "",
                None and {} are left out.
        """
        event: dict[str, Any] = {"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "event": kind}
        for name, value in values.items():
            if value not in ("", None, {}):
                event[name] = redact_texts(value, MAX_TEXT)
        line = json.dumps(event, ensure_ascii=False) + "\n"
        with suppress(OSError, UserError):
            self._append(line)

    def flush(self) -> None:
        """Rewrite the file of a log in a bucket if there are new events."""
        if not self.has_unflushed_lines:
            return
        with suppress(OSError, UserError):
            self._read_old_lines()
            write_bytes(self.uri, b"".join(self.lines))
            self.has_unflushed_lines = False

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
            self._read_old_lines()

    def _read_old_lines(self) -> None:
        """Read the existing log in the bucket, once. Raise `OSError` if it cannot be read."""
        if self.has_old_lines:
            return
        with suppress(FileNotFoundError):
            old = read_bytes(self.uri, self.max_bytes)
            self.lines.insert(0, old)
            self.size += len(old)
        self.has_old_lines = True

    def _append(self, line: str) -> None:
        data = line.encode(errors="replace")
        if self.size + len(data) > self.max_bytes:
            self._rotate()
        if self.stream is not None:
            self.size += os.write(self.stream.fileno(), data)
        elif not self.is_local:
            self.lines.append(data)
            self.size += len(data)
            self.has_unflushed_lines = True

    def _rotate(self) -> None:
        if self.stream is not None:
            # if the rename fails, the stream stays usable for the next event
            os.rename(resolve(self.uri)[1], resolve(self.rotated_uri)[1])
            full, self.stream = self.stream, None
            full.close()
            self._open()
        elif not self.is_local:
            self._read_old_lines()
            write_bytes(self.rotated_uri, b"".join(self.lines))
            self.lines = []
        self.size = 0


def open_log(path: str) -> TextIO:
    """Open a log on a disk for appending.

    If the folder is shared with a group, the group can read and write the log.

    Raises:
        OSError: If the log cannot be written, or is not a regular file. (A symbolic link could lead
            out of the storage, and opening a FIFO would block.)
    """
    make_dirs(os.path.dirname(path))
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    stream = os.fdopen(os.open(path, flags, 0o644), "a", encoding="utf-8")
    if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
        stream.close()
        raise OSError(errno.EINVAL, "it is not a regular file", path)
    with suppress(PermissionError):  # only the owner of the file can change its mode
        share_file(path)
    return stream
