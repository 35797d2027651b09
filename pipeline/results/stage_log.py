"""Read the events of a run, and the tracebacks of failed tries of the stages.

The storage may be untrusted: the size of files is limited, and invalid events are skipped.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

from pipeline.graph import event_log, failures
from workers.storage.artifact import join, list_files, read_bytes

MAX_FAILURE_BYTES = 1 << 20  # maximum size of the file of a failed try


class RunEvent(NamedTuple):
    """A line of a run's event log.

    Attributes:
        time: Time in ISO 8601.
        kind: Kind of the event, such as `started`.
        stage: Id of the stage; empty for an event of the whole run.
        values: All fields of the line.
    """

    time: str
    kind: str
    stage: str
    values: dict[str, Any]


class FailedTry(NamedTuple):
    """A failed try of a stage: the URI of the file, and the text in it or a read error."""

    uri: str
    text: str


def read_events(storage: str, name: str) -> list[RunEvent]:
    """Return the events in the log of a run, oldest first. The log may cover several starts."""
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


def find_failures(storage: str) -> dict[str, list[str]]:
    """Return key of a stage -> names of the files of its failed tries, oldest first."""
    files: dict[str, list[str]] = {}
    for path in sorted(list_files(join(storage, failures.FOLDER))):
        key, _, file = path.partition("/")
        if file.endswith(failures.SUFFIX):
            files.setdefault(key, []).append(file)
    return files


def read_failure(storage: str, key: str, file: str) -> FailedTry:
    """Read the file of a failed try of the stage with this key."""
    uri = join(storage, failures.FOLDER, key, file)
    try:
        text = read_bytes(uri, MAX_FAILURE_BYTES).decode(errors="replace")
    except OSError as error:
        text = f"it cannot be read: {error.strerror or error}"
    return FailedTry(uri, text)
