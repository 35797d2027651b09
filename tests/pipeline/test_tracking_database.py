"""Tests of the MLflow database: atomic creation, recovery after a kill, paths, and errors."""

from __future__ import annotations

import errno
import os
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.settings import TrackingSettings
from pipeline.graph.store import Store
from pipeline.tracking import mlflow_client
from pipeline.tracking.database import is_whole, prepare_database, sqlite_path, sqlite_uri
from pipeline.tracking.outbox import Outbox
from workers.errors import UserError
from workers.storage import filesystem

REVISION = "latest"
MAKE_AND_DIE = """
import os, signal, sys
from sqlalchemy import event
from sqlalchemy.engine import Engine
from pipeline.tracking import mlflow_client, mlflow_internals
left = [int(sys.argv[2])]
@event.listens_for(Engine, "before_cursor_execute")
def count(*_):
    left[0] -= 1
    if not left[0]:
        os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[3] == "beside":
    mlflow_client.open_store(sys.argv[1])
else:  # as MLflow alone does it
    mlflow_internals.create_tables(f"sqlite:///{sys.argv[1]}/mlflow.db")
"""


def initialize(uri: str) -> None:
    """Create a database with two tables, as MLflow would."""
    path = sqlite_path(uri)
    assert path
    with closing(sqlite3.connect(path)) as database, database:
        database.executescript(
            "CREATE TABLE runs (id); CREATE TABLE alembic_version (version_num); INSERT INTO "
            f"alembic_version VALUES ('{REVISION}')"
        )


def prepare_two_tables(path: Path) -> None:
    prepare_database(path, initialize, lambda: REVISION)


def test_new_database_is_created_atomically_without_leftovers(tmp_path: Path) -> None:
    seen: list[list[str]] = []

    def watched(uri: str) -> None:
        initialize(uri)
        seen.append([entry.name for entry in tmp_path.iterdir()])

    prepare_database(tmp_path / "mlflow.db", watched, lambda: REVISION)
    assert len(seen) == 1
    assert "mlflow.db" not in seen[0], "the file must not exist before it is complete"
    assert [entry.name for entry in tmp_path.iterdir()] == ["mlflow.db"]
    prepare_two_tables(tmp_path / "mlflow.db")
    assert len(seen) == 1


@pytest.mark.parametrize("left", ["empty", "no version", "no tables", "another version", "no row"])
def test_incomplete_database_without_runs_is_replaced(
    left: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    monkeypatch.setattr(filesystem, "notify", lines.append)
    path = tmp_path / "mlflow.db"
    statements = {
        "empty": "",
        "no version": "CREATE TABLE runs (id)",
        "no tables": "CREATE TABLE alembic_version (version_num)",
        "no row": "CREATE TABLE runs (id); CREATE TABLE alembic_version (version_num)",
        "another version": "CREATE TABLE alembic_version (version_num); INSERT INTO "
        "alembic_version VALUES ('older')",
    }[left]
    with closing(sqlite3.connect(path)) as database, database:
        database.executescript(statements)
    path.touch()
    prepare_two_tables(path)
    assert is_whole(path, lambda: REVISION)
    aside = [entry for entry in tmp_path.iterdir() if "incomplete" in entry.name]
    assert len(aside) == len(lines) == (left != "empty")
    assert all(
        "was incomplete and without runs" in line and aside[0].name in line for line in lines
    )


def test_database_with_runs_is_kept_and_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "mlflow.db"
    with closing(sqlite3.connect(path)) as database, database:
        database.executescript("CREATE TABLE runs (id); INSERT INTO runs VALUES (1)")
    before = path.read_bytes()
    prepare_two_tables(path)
    assert path.read_bytes() == before
    (tmp_path / "no.db").write_bytes(b"no database at all" * 100)
    with pytest.raises(UserError, match=r"no\.db is not a SQLite database"):
        prepare_two_tables(tmp_path / "no.db")


def test_concurrent_creation_keeps_the_first_database(tmp_path: Path) -> None:
    path = tmp_path / "mlflow.db"

    def slower(uri: str) -> None:
        initialize(uri)
        # Act as another process on a disk without locks.
        database_path = sqlite_path(uri)
        assert database_path is not None
        os.link(database_path, path)
        inodes.append(path.stat().st_ino)

    inodes: list[int] = []
    prepare_database(path, slower, lambda: REVISION)
    assert [path.stat().st_ino] == inodes
    assert [entry.name for entry in tmp_path.iterdir()] == ["mlflow.db"]


def test_concurrent_drivers_use_the_same_experiment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow import MlflowClient

    find_experiment = MlflowClient.get_experiment_by_name
    of_the_other: list[str] = []

    def find_just_before_the_other_creates(self: MlflowClient, name: str) -> Any:
        experiment = find_experiment(self, name)
        if not of_the_other:
            of_the_other.append(self.create_experiment(name))
        return experiment

    monkeypatch.setattr(MlflowClient, "get_experiment_by_name", find_just_before_the_other_creates)
    _, _, experiment = mlflow_client.open_store(str(tmp_path))
    assert [experiment] == of_the_other


@pytest.mark.parametrize(
    "name",
    ["a?b", "a#b", "a%3Fb", "a b", "a%b", "\N{LATIN SMALL LETTER A WITH DIAERESIS}", "plain"],
)
def test_path_survives_conversion_to_a_uri_and_back(name: str, tmp_path: Path) -> None:
    path = tmp_path / name / "mlflow.db"
    path.parent.mkdir()
    uri = sqlite_uri(path)
    assert sqlite_path(uri) == path
    initialize(uri)
    assert path.exists()
    assert mlflow_client.tracking_uri(str(path.parent)) == uri
    assert [entry.name for entry in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize(
    "uri",
    [
        "sqlite://",
        "sqlite:///:memory:",
        "sqlite:///file:x?uri=true",
        "postgresql://host/db",
        "http://host",
        "sqlite:///",
    ],
)
def test_uri_without_a_sqlite_file_has_no_path(uri: str) -> None:
    assert sqlite_path(uri) is None


def test_record_of_storage_named_with_question_mark_is_inside_it(tmp_path: Path) -> None:
    storage = tmp_path / "a?b"
    client, _, experiment = mlflow_client.open_store(str(storage))
    run = client.create_run(experiment)
    (tmp_path / "note.txt").write_text("x")
    client.log_artifact(run.info.run_id, str(tmp_path / "note.txt"))
    assert [entry.path for entry in client.list_artifacts(run.info.run_id)] == ["note.txt"]
    assert {entry.name for entry in tmp_path.iterdir()} == {"a?b", "note.txt"}
    assert (storage / "mlflow.db").stat().st_size


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("statement", "where"),
    [
        (53, "beside"),
        pytest.param(1, "beside", marks=pytest.mark.slow),
        pytest.param(150, "beside", marks=pytest.mark.slow),
        (53, "at its place"),
        pytest.param(22, "at its place", marks=pytest.mark.slow),
        pytest.param(150, "at its place", marks=pytest.mark.slow),
    ],
)
def test_killed_database_creation_is_recovered(
    statement: Any, where: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    monkeypatch.setattr(filesystem, "notify", lines.append)
    killed = subprocess.run(
        [sys.executable, "-c", MAKE_AND_DIE, str(tmp_path), str(statement), where],
        timeout=900,
        check=False,
    )
    assert killed.returncode == -signal.SIGKILL
    assert (tmp_path / "mlflow.db").exists() == (where != "beside")
    client, _, experiment = mlflow_client.open_store(str(tmp_path))
    assert client.create_run(experiment).info.status == "RUNNING"
    assert len(lines) == (where != "beside")
    Store(str(tmp_path)).sweep()
    left = [
        entry.name
        for entry in tmp_path.iterdir()
        if entry.name.startswith("mlflow.db") and "incomplete" not in entry.name
    ]
    assert left == ["mlflow.db"]


# ---- permanent errors ----------------------------------------------------------------------------
def failures() -> list[Exception]:
    from mlflow.exceptions import MlflowException
    from mlflow.protos.databricks_pb2 import TEMPORARILY_UNAVAILABLE
    from sqlalchemy.exc import OperationalError

    words = [
        "table runs already exists",
        "database or disk is full",
        "attempt to write a readonly database",
        "no such table: runs",
        "unable to open database file",
    ]
    wrapped = [
        MlflowException(f"(sqlite3.OperationalError) {text}", TEMPORARILY_UNAVAILABLE)
        for text in words
    ]
    return [
        OSError(errno.ENOSPC, "No space left on device"),
        PermissionError(errno.EACCES, "Permission denied"),
        *wrapped,
        *(OperationalError("insert", {}, Exception(text)) for text in words),
        *(sqlite3.OperationalError(text) for text in words),
    ]


def test_permanent_database_errors_are_not_transient() -> None:
    for error in failures():
        assert not mlflow_client.transient(error), error
    assert mlflow_client.transient(sqlite3.OperationalError("database is locked"))


def test_permanent_errors_are_reported_without_waiting(tmp_path: Path) -> None:
    def full() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def asked() -> bool:
        raise AssertionError("a full disk is not a server that may come back")

    lines: list[str] = []
    outbox = Outbox("MLflow", asked, lambda: None, mlflow_client.transient, lines.append)
    outbox.put(full)
    assert outbox.close(TrackingSettings().patience_s) == 0
    assert lines == []
    assert "No space left on device; this part is not in the record" in outbox.warnings[0]


def test_mlflow_database_retries_are_disabled(tmp_path: Path) -> None:
    """By default, MLflow would retry for 100 s and warn about each attempt."""
    from mlflow.store.db import utils

    mlflow_client.open_store(str(tmp_path))
    assert utils.MAX_RETRY_COUNT == 1
