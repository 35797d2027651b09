"""The events of the stages of a run, and the tracebacks of their failed tries.

The storage can be a stranger's: files are read up to a maximum size, invalid events are skipped.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

from pipeline.graph import event_log, failures
from workers.storage.artifact import join, list_files, read_bytes

MAX_FAILURE_BYTES = 1 << 20


class RunEvent(NamedTuple):
    """A line of a run's event log.

    time: ISO 8601. kind: such as `started`. stage: id of the stage; empty where it is about the
    whole run. values: all of the line.
    """

    time: str
    kind: str
    stage: str
    values: dict[str, Any]


class FailedTry(NamedTuple):
    """The file of a failed try of a stage, and its text, or why it cannot be read."""

    uri: str
    text: str


def read_events(storage: str, name: str) -> list[RunEvent]:
    """Return the events of a run in their order, of all its starts that the log still holds."""
    folder = join(storage, "runs", name)
    events: list[RunEvent] = []
    for file in (event_log.ROTATED_FILE, event_log.FILE):
        try:
            data = read_bytes(join(folder, file), 2 * event_log.MAX_BYTES)
        except OSError:
            continue
        events += _list_events(data)
    return events


def _list_events(data: bytes) -> Iterator[RunEvent]:
    for line in data.splitlines():
        try:
            values = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if not isinstance(values, dict):
            continue
        texts = [values.get(key, "") for key in ("time", "event", "stage")]
        if all(isinstance(text, str) for text in texts):
            time, kind, stage = texts
            yield RunEvent(time, kind, stage, values)


def failed_keys(storage: str) -> dict[str, list[str]]:
    """Return key of a stage -> names of the files of the failed tries, the oldest first."""
    files: dict[str, list[str]] = {}
    for path in sorted(list_files(join(storage, failures.FOLDER))):
        key, _, file = path.partition("/")
        if file.endswith(failures.SUFFIX):
            files.setdefault(key, []).append(file)
    return files


def read_failure(storage: str, key: str, file: str) -> FailedTry:
    """Return the file of a failed try of the stage `key`."""
    uri = join(storage, failures.FOLDER, key, file)
    try:
        text = read_bytes(uri, MAX_FAILURE_BYTES).decode(errors="replace")
    except OSError as error:
        text = f"it cannot be read: {error.strerror or error}"
    return FailedTry(uri, text)
