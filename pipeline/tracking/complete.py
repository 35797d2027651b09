"""Check whether the record of a run in MLflow is complete and need not be written again.

After a record was written completely, `mark_complete` stores a digest of the content in
`runs/NAME/recorded.json`, next to `run.json`. A run without missing stages compares this digest
(`find_links`). If it is unchanged, MLflow is not imported, which would take seconds.
"""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from pipeline.config.settings import TrackingSettings
from pipeline.graph.run_record import RunRecord
from workers.storage.artifact import join, read_json, write_bytes

FILE = "recorded.json"


@dataclass(frozen=True)
class RecordState:
    """Digest of the content of a record in MLflow. Records with equal digests are equal."""

    storage: str
    name: str
    digest: str


def compute_state(
    settings: TrackingSettings,
    storage: str,
    record: RunRecord,
    manifests: Mapping[str, Mapping[str, Any] | None],
    files: Mapping[str, bytes],
) -> RecordState:
    """Compute the state of a record.

    Args:
        settings: Settings of tracking.
        storage: Folder or URI of the storage.
        record: Record of the run.
        manifests: Id of a stage -> manifest of the result; None without a result.
        files: Name -> content of the files of the report.
    """
    content = {
        "settings": settings.model_dump(mode="json"),
        "server": os.environ.get("MLFLOW_TRACKING_URI", ""),
        "config": record["config"],
        "stages": {stage["id"]: stage["key"] for stage in record["stages"]},
        "attempts": {
            stage_id: (manifest or {}).get("attempt") for stage_id, manifest in manifests.items()
        },
        "files": {name: hashlib.sha256(data).hexdigest() for name, data in files.items()},
    }
    text = json.dumps(content, sort_keys=True)
    return RecordState(storage, record["name"], hashlib.sha256(text.encode()).hexdigest())


def find_links(state: RecordState) -> list[str] | None:
    """Return the lines for the user that were stored with the record's digest.

    The result is None if the record must be written again: its content has changed, it was never
    complete, or a run was deleted in MLflow.
    """
    try:
        body = read_json(_get_mark_path(state))
        if body["digest"] != state.digest or not _are_runs_active(body["database"], body["runs"]):
            return None
        return [str(line) for line in body["links"]]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def mark_complete(
    state: RecordState, links: Iterable[str], database: str, runs: Iterable[str]
) -> None:
    """Store that a record was written completely.

    Args:
        state: State of the record.
        links: Lines with the location of the record, to print for the user.
        database: Path of MLflow's SQLite file; "" for a server.
        runs: Ids of the runs in MLflow.
    """
    body = {
        "digest": state.digest,
        "links": list(links),
        "database": database,
        "runs": list(runs),
    }
    write_bytes(_get_mark_path(state), json.dumps(body, indent=1).encode())


def _get_mark_path(state: RecordState) -> str:
    return join(state.storage, "runs", state.name, FILE)


def _are_runs_active(database: str, runs: list[str]) -> bool:
    """Return whether all runs are still in MLflow's database; always True for a server."""
    if not database:
        return True
    uri = f"file:{quote(database)}?mode=ro"
    query = "SELECT lifecycle_stage FROM runs WHERE run_uuid = ?"
    try:
        with closing(sqlite3.connect(uri, uri=True)) as connection:
            for run in runs:
                if connection.execute(query, (run,)).fetchone() != ("active",):
                    return False
    except sqlite3.Error:
        return False
    return True
