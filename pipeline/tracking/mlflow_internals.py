"""All uses of names of MLflow that are private or not documented as its API.

tests/pipeline/test_mlflow_internals.py has a contract test for each name. It fails if an upgrade of
MLflow changes the name.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlflow.entities import Dataset, Run
    from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor


def try_databases_once() -> None:
    """Make MLflow try only once to connect to a database.

    By default it retries for about 100 s before it raises the error.
    """
    from mlflow.store.db import utils

    utils.MAX_RETRY_COUNT = 1


def latest_schema_revision() -> str:
    """Return the revision of the tables that this version of MLflow creates."""
    from mlflow.store.db import utils

    revision: str = utils._get_latest_schema_revision()
    return revision


def create_tables(uri: str) -> None:
    """Create all tables of MLflow in a new SQLite database, and close it."""
    from mlflow.store.db import utils
    from sqlalchemy import event

    engine = utils.create_sqlalchemy_engine(uri)
    # A sync after each statement would take seconds. The caller syncs the complete database before
    # other processes see it.
    event.listen(
        engine, "connect", lambda connection, _: connection.execute("PRAGMA synchronous = OFF")
    )
    try:
        utils._initialize_tables(engine)
    finally:
        engine.dispose()


def set_status(run: Run, status: str) -> None:
    """Set the status of a run in memory, so that the run need not be requested again."""
    run.info._status = status


def dataset_entity(name: str, digest: str, source: str) -> Dataset:
    """Create MLflow's entity of a data set at the URI `source`."""
    from mlflow.data.http_dataset_source import HTTPDatasetSource
    from mlflow.data.meta_dataset import MetaDataset

    # MetaDataset does not implement the abstract property `profile` (MLflow 3.17)
    uri_source = HTTPDatasetSource(source)
    dataset = MetaDataset(uri_source, name=name, digest=digest)  # type: ignore[abstract]
    return dataset._to_mlflow_entity()


@contextmanager
def without_requirements_check() -> Iterator[None]:
    """Context manager that turns off MLflow's comparison of requirements with the environment.

    MLflow would read the files of every installed package, which takes a second. The comparison is
    not needed, because our requirements are the installed versions.
    """
    from mlflow.utils import environment

    module: Any = environment
    check = module.warn_dependency_requirement_mismatches
    module.warn_dependency_requirement_mismatches = lambda requirements: None
    try:
        yield
    finally:
        module.warn_dependency_requirement_mismatches = check


def is_sampling(monitor: SystemMetricsMonitor) -> bool:
    """Return whether the thread of a monitor of system metrics still runs."""
    thread = monitor._process
    return thread is not None and thread.is_alive()


def delete_artifacts(artifact_uri: str, tracking_uri: str) -> None:
    """Delete all artifacts of a run or a model. MLflow's client has no method for it."""
    from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

    get_artifact_repository(artifact_uri, tracking_uri=tracking_uri).delete_artifacts()
