"""Calls to MLflow, in batches: the only module that imports it."""

from __future__ import annotations

import errno
import logging
import os
import re
import sqlite3
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import parse_qsl

from pipeline.tracking.database import prepare, sqlite_path, sqlite_uri
from pipeline.tracking.points import Point, key_name
from workers.errors import UserError
from workers.storage.artifact import join, make_dirs
from workers.storage.secrets import redact

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

    from pipeline.config import TrackingSettings

# Calls are not repeated by MLflow itself: whoever makes them knows how long it wants to try.
ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}  # it would print the password too
BATCH = 900  # MLflow takes at most 1000 metrics in a call, and 100 parameters
# Of a database, in the words of SQLite, PostgreSQL and MySQL, and of a disk: what waiting does not
# mend.
FINAL = re.compile(
    r"already exists|disk is full|No space left|[Qq]uota exceeded|readonly "
    r"database|[Rr]ead-only|no such (table|column)|does not exist"
    r"|unable to open database file|not a database|malformed|out-of-date database "
    r"schema|authentication failed|Access denied"
)
FINAL_ERRNOS = (
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EROFS,
    errno.EACCES,
    errno.EPERM,
    errno.ENOENT,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.ENAMETOOLONG,
)
DRIVERS = {
    "psycopg2": "psycopg2-binary",
    "psycopg": "psycopg[binary]",
    "MySQLdb": "mysqlclient",
}  # module of a driver -> its package, where the names differ
BROKEN_PASSWORD = re.compile(r"https?://[^\s/?#@:]*:[^\s@]*[/?#]\S*@", re.IGNORECASE)
HOST_AND_PORT = re.compile(r"https?://[^\s/?#@:]*:\d*(?:[/?#]|$)", re.IGNORECASE)
BUSY = (408, 409, 429)  # refusals of a server that it may not repeat


def tracking_uri(storage: str, uri: str = "") -> str:
    """Where records go: `uri`, else MLFLOW_TRACKING_URI, else SQLite in the storage folder."""
    found = uri or os.environ.get("MLFLOW_TRACKING_URI", "")
    if found:
        check_password(found)
        return found
    if "://" in storage and not storage.startswith("file://"):
        raise UserError(
            f"storage {storage!r} cannot hold MLflow's SQLite database; name a tracking server "
            "in tracking.uri or "
            "MLFLOW_TRACKING_URI, or set tracking=off"
        )
    folder = Path(storage.removeprefix("file://")).absolute()
    make_dirs(str(folder))
    return sqlite_uri(folder / "mlflow.db")


def open_store(
    storage: str, uri: str = "", experiment: str = "accrete"
) -> tuple[MlflowClient, str, str]:
    """A client, the tracking URI and the id of the experiment; the database and the experiment are
    created if need be.

    Only one process may do that for a new database, so the driver calls this before anything else
    opens it.
    """
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    for name in ("alembic", "mlflow.store.db.utils"):
        # what goes wrong is told by whoever asked
        logging.getLogger(name).setLevel(logging.CRITICAL)
    from mlflow import MlflowClient
    from mlflow.store.db import utils

    utils.MAX_RETRY_COUNT = 1  # by itself it tries a database that does not answer for 100 s
    address = tracking_uri(storage, uri)
    with drivers_told(address):
        return _opened(MlflowClient, address, storage, experiment)


def _opened(
    client_of: type[MlflowClient], address: str, storage: str, experiment: str
) -> tuple[MlflowClient, str, str]:
    from mlflow.store.db import utils

    if database := sqlite_path(address):
        prepare(database, make_tables, utils._get_latest_schema_revision)
    client = client_of(address)
    found = client.get_experiment_by_name(experiment)
    if found is not None:
        if found.lifecycle_stage == "deleted":
            client.restore_experiment(found.experiment_id)
        return client, address, found.experiment_id
    artifacts = None  # a tracking server has its own place
    if not address.startswith(("http://", "https://")):
        local = "://" not in storage or storage.startswith("file://")
        artifacts = (
            Path(storage.removeprefix("file://")).absolute().joinpath("mlartifacts").as_uri()
            if local
            else bucket_folder(storage)
        )
    return client, address, client.create_experiment(experiment, artifact_location=artifacts)


def make_tables(uri: str) -> None:
    """All tables of MLflow in a new database, which is closed afterwards."""
    from mlflow.store.db import utils
    from sqlalchemy import event

    engine = utils.create_sqlalchemy_engine(uri)
    # Nobody sees it before it is whole and synced: a sync after each of its statements would cost
    # seconds.
    event.listen(
        engine, "connect", lambda connection, _: connection.execute("PRAGMA synchronous = OFF")
    )
    try:
        utils._initialize_tables(engine)
    finally:
        engine.dispose()


def check_password(uri: str) -> None:
    """Raise UserError where the password of a server's address ends the part of the URI that it
    stands in."""
    if BROKEN_PASSWORD.match(uri) and not HOST_AND_PORT.match(uri):
        raise UserError(
            "the tracking URI (tracking.uri or MLFLOW_TRACKING_URI) has a password with `/`, "
            "`?` or `#` in it, which end the host's part of "
            "a URI; write them as %2F, %3F and %23, or give MLFLOW_TRACKING_USERNAME and "
            "MLFLOW_TRACKING_PASSWORD instead"
        )


@contextmanager
def drivers_told(address: str) -> Iterator[None]:
    """Raises UserError for a database that SQLAlchemy has no driver for here."""
    from sqlalchemy.exc import ArgumentError, NoSuchModuleError

    scheme = address.partition("://")[0]
    try:
        yield
    except ImportError as error:
        name = error.name or str(error)
        package = DRIVERS.get(name.partition(".")[0], name.partition(".")[0])
        raise UserError(
            f"the database of {redact(address)} needs the Python package {name!r}, which is not "
            "installed; install it beside MLflow "
            f"(pip install {package}), or name another tracking URI"
        ) from None
    except NoSuchModuleError:
        raise UserError(
            f"no database is known by the scheme {scheme!r} of the tracking URI; MLflow knows "
            "sqlite, postgresql, mysql, mssql, and servers "
            "by http and https"
        ) from None
    except ArgumentError:
        raise UserError(
            f"the tracking URI {redact(address)} is not of the form "
            f"{scheme}://user:password@host:port/database; mend tracking.uri or "
            "MLFLOW_TRACKING_URI"
        ) from None


@contextmanager
def refusals_told(storage: str, uri: str = "") -> Iterator[None]:
    """For a person who asks MLflow something: what it answers instead is a UserError of one
    sentence."""
    try:
        yield
    except Exception as error:
        from mlflow.exceptions import MlflowException  # not before the environment is set
        from sqlalchemy.exc import SQLAlchemyError

        if not isinstance(error, (MlflowException, SQLAlchemyError)):
            raise
        reason = " ".join(redact(str(error)).split())[:300]
        raise UserError(
            f"MLflow at {redact(tracking_uri(storage, uri))} does not show its runs ({reason}); "
            "start it, or mend MLFLOW_TRACKING_URI"
        ) from None


def bucket_folder(storage: str) -> str:
    """Where MLflow keeps its artifacts in a storage that is no disk. It finds the server in the
    environment alone, so what the URI says goes there."""
    place, _, query = join(storage, "mlartifacts").partition("?")
    options = dict(parse_qsl(query))
    if endpoint := options.get("endpoint_override"):
        address = (
            endpoint if "://" in endpoint else f"{options.get('scheme', 'https')}://{endpoint}"
        )
        os.environ.setdefault("MLFLOW_S3_ENDPOINT_URL", address)
    if region := options.get("region"):
        os.environ.setdefault("AWS_DEFAULT_REGION", region)
    return place


def transient(error: Exception) -> bool:
    """Whether the same call may succeed later: no connection, no answer, a server or a database in
    trouble. A full disk, and a database that is not as it should be, stay as they are for as long
    as anybody waits."""
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import OperationalError

    if FINAL.search(str(error)) or getattr(error, "errno", None) in FINAL_ERRNOS:
        return False
    if isinstance(error, MlflowException):
        status = error.get_http_status_code()
        return status >= 500 or status in BUSY
    if type(error).__module__.partition(".")[0] in (
        "boto3",
        "botocore",
    ):  # of artifacts in a bucket
        return not any(
            code in str(error)
            for code in (
                "AccessDenied",
                "NoSuchBucket",
                "InvalidAccessKeyId",
                "SignatureDoesNotMatch",
                "Credentials",
            )
        )
    return isinstance(error, (OSError, OperationalError, sqlite3.OperationalError))


class Data(NamedTuple):
    """Data that a run has read. context: what for, e.g. `train`."""

    name: str
    digest: str
    source: str
    context: str


class MlflowClientAdapter:
    """The runs of one experiment. Every method raises what MLflow raises, and may be called again
    with the same values: that adds nothing."""

    def __init__(self, storage: str, settings: TrackingSettings):
        self.client, self.uri, self.experiment = open_store(
            storage, settings.uri, settings.experiment
        )

    def find(self, tags: Mapping[str, str]) -> list[Run]:
        """All runs with these tags."""
        wanted = " and ".join(f"tags.`{name}` = '{value}'" for name, value in tags.items())
        found: list[Run] = []
        token = None
        while True:
            page = self.client.search_runs(
                [self.experiment], wanted, max_results=1000, page_token=token
            )
            found += page
            token = page.token
            if not token:
                return found

    def create(self, name: str, tags: Mapping[str, str]) -> Run:
        return self.client.create_run(
            self.experiment, tags={k: v for k, v in tags.items() if v}, run_name=name
        )

    def open(self, run: Run) -> None:
        """It goes on: what had failed or was stopped is running again."""
        self.client.update_run(run.info.run_id, "RUNNING")
        run.info._status = "RUNNING"

    def close(self, run: Run, status: str) -> None:
        self.client.set_terminated(run.info.run_id, status)
        run.info._status = status

    def tag(self, run: Run, tags: Mapping[str, str]) -> None:
        """Sets tags that differ; an empty value takes the tag away."""
        for name, value in tags.items():
            if run.data.tags.get(name, "") == value:
                continue
            if value:
                self.client.set_tag(run.info.run_id, name, value)
                run.data.tags[name] = value
            else:
                self.client.delete_tag(run.info.run_id, name)
                del run.data.tags[name]

    def points(
        self, run: Run, points: Iterable[Point], tags: Mapping[str, str] | None = None
    ) -> None:
        """Points get the same time stamp whenever they are written, so that MLflow drops one that
        is there already. Tags come with the last ones."""
        from mlflow.entities import Metric, RunTag

        begun = run.info.start_time
        metrics = [Metric(p.name, p.value, begun + int(1000 * p.after_s), p.step) for p in points]
        if not metrics and not tags:
            return
        for start in range(0, max(len(metrics), 1), BATCH):
            last = start + BATCH >= len(metrics)
            self.client.log_batch(
                run.info.run_id,
                metrics[start : start + BATCH],
                tags=[RunTag(k, v) for k, v in (tags or {}).items()] if last else [],
            )
        run.data.tags.update(tags or {})

    def params(self, run: Run, values: Mapping[str, Any]) -> None:
        """Those that the run does not have yet: MLflow never changes one."""
        from mlflow.entities import Param

        named = {key_name(k)[:250]: str(v)[:500] for k, v in values.items()}
        params = [Param(k, v) for k, v in named.items() if k not in run.data.params]
        for start in range(0, len(params), 100):
            self.client.log_batch(run.info.run_id, params=params[start : start + 100])
        run.data.params.update(named)

    def inputs(self, run: Run, data: Iterable[Data]) -> None:
        from mlflow.data.http_dataset_source import HTTPDatasetSource
        from mlflow.data.meta_dataset import MetaDataset
        from mlflow.entities import DatasetInput, InputTag

        entries = [
            DatasetInput(
                MetaDataset(
                    HTTPDatasetSource(d.source), name=d.name, digest=d.digest
                )._to_mlflow_entity(),  # type: ignore[abstract]
                [InputTag("mlflow.data.context", d.context)],
            )
            for d in data
        ]
        if entries:
            self.client.log_inputs(run.info.run_id, entries)

    def files(self, run: Run, files: Mapping[str, bytes]) -> None:
        if not files:
            return
        with tempfile.TemporaryDirectory(prefix="accrete-") as folder:
            for name, data in files.items():
                path = Path(folder, name)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)
            self.client.log_artifacts(run.info.run_id, folder)


class SystemMetrics:
    """CPU, memory, disk, network and GPUs of this machine, sampled into a run by a thread of
    MLflow's own. Raises UserError without psutil."""

    def __init__(self, run: Run, uri: str):
        try:
            import psutil  # noqa: F401
        except ImportError:
            raise UserError(
                "tracking.system_metrics needs the package psutil, which is not installed; "
                "install `.[monitor]`, or leave the setting "
                "off"
            ) from None
        from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

        # what it cannot write is left out
        logging.getLogger("mlflow.system_metrics").setLevel(logging.CRITICAL)
        self.monitor = SystemMetricsMonitor(run.info.run_id, resume_logging=True, tracking_uri=uri)
        self.monitor.start()

    @property
    def alive(self) -> bool:
        """False once it has ended, as it does by itself when MLflow does not answer."""
        thread = self.monitor._process
        return thread is not None and thread.is_alive()

    def end(self) -> None:
        self.monitor.finish()
