"""Tests of the private MLflow names in use: each exists and behaves as expected."""

from __future__ import annotations

import sqlite3
import time
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy.exc import SQLAlchemyError

from pipeline.tracking import mlflow_internals
from pipeline.tracking.mlflow_client import open_store


def test_unreachable_database_is_tried_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow.store.db import utils

    assert isinstance(utils.MAX_RETRY_COUNT, int)
    monkeypatch.setattr(utils, "MAX_RETRY_COUNT", utils.MAX_RETRY_COUNT)  # restored afterwards
    mlflow_internals.try_databases_once()
    start = time.monotonic()
    with pytest.raises(SQLAlchemyError):
        utils.create_sqlalchemy_engine_with_retry(f"sqlite:///{tmp_path}")
    assert time.monotonic() - start < 5


def test_created_tables_have_latest_revision_and_database_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "mlflow.db"
    mlflow_internals.create_tables(f"sqlite:///{path}")
    with closing(sqlite3.connect(path)) as database:
        versions = database.execute("SELECT version_num FROM alembic_version").fetchall()
        tables = database.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
    assert versions == [(mlflow_internals.latest_schema_revision(),)]
    assert {("runs",), ("experiments",), ("metrics",)} <= set(tables)
    assert [file.name for file in tmp_path.iterdir()] == ["mlflow.db"]


def test_set_status_changes_only_the_run_in_memory(tmp_path: Path) -> None:
    client, _, experiment = open_store(str(tmp_path))
    run = client.create_run(experiment)
    mlflow_internals.set_status(run, "KILLED")
    assert run.info.status == "KILLED"
    assert client.get_run(run.info.run_id).info.status == "RUNNING"


def test_a_data_set_keeps_its_name_digest_and_source() -> None:
    dataset = mlflow_internals.dataset_entity("birds", "12ab", "s3://bucket/birds")
    assert (dataset.name, dataset.digest) == ("birds", "12ab")
    assert "s3://bucket/birds" in dataset.source


def test_is_sampling_is_true_between_monitor_start_and_finish(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("psutil")
    from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

    monkeypatch.setenv("MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL", "0.02")
    client, uri, experiment = open_store(str(tmp_path))
    run_id = client.create_run(experiment).info.run_id
    monitor = SystemMetricsMonitor(run_id, resume_logging=True, tracking_uri=uri)
    assert not mlflow_internals.is_sampling(monitor)
    monitor.start()
    try:
        assert mlflow_internals.is_sampling(monitor)
    finally:
        monitor.finish()
    assert not mlflow_internals.is_sampling(monitor)


def test_requirements_check_is_disabled_only_inside_context_manager(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from mlflow.utils import environment, requirements_utils

    checks: list[str] = []
    monkeypatch.setattr(requirements_utils, "_check_requirement_satisfied", checks.append)
    with mlflow_internals.without_requirements_check():
        environment._process_pip_requirements([], ["torch==1.0"])
    assert checks == []
    environment._process_pip_requirements([], ["torch==1.0"])
    assert "torch==1.0" in checks


def test_all_files_of_a_run_are_deleted(tmp_path: Path) -> None:
    client, uri, experiment = open_store(str(tmp_path))
    run = client.create_run(experiment)
    client.log_text(run.info.run_id, "a page", "report/page.html")
    assert client.list_artifacts(run.info.run_id)
    for _ in range(2):  # the second time, the run has no files
        mlflow_internals.delete_artifacts(run.info.artifact_uri, uri)
        assert client.list_artifacts(run.info.run_id) == []
