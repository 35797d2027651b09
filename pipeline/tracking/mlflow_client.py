"""Client of MLflow: opens the tracking store, classifies errors and logs in batches.

The tracking store is MLflow's SQLite database in the storage folder, another database, or a
tracking server. `open_store` opens it; `MlflowClientAdapter` writes runs.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import sqlite3
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import parse_qsl

from pipeline.tracking import mlflow_internals
from pipeline.tracking.database import prepare_database, sqlite_path, sqlite_uri
from workers.errors import UserError
from workers.storage.artifact import is_local, join, make_dirs
from workers.storage.secrets import redact

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

    from pipeline.config.settings import TrackingSettings

# MLflow must not repeat failed calls, because the caller decides how long to retry. It must not
# print the tracking URI, which can contain a password.
ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}
# MLflow accepts at most 1000 metrics and tags together, and 100 parameters, in one call.
METRICS_PER_CALL = 900
PARAMS_PER_CALL = 100
MAX_PARAM_NAME = 250  # characters
MAX_PARAM_VALUE = 500  # characters
# Messages of permanent errors of a disk, SQLite, PostgreSQL and MySQL.
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
# Module of a database driver -> its package, if the names differ.
DRIVERS = {
    "psycopg2": "psycopg2-binary",
    "psycopg": "psycopg[binary]",
    "MySQLdb": "mysqlclient",
}
# Error codes of a bucket for requests that can never succeed.
FINAL_BUCKET_ERRORS = (
    "AccessDenied",
    "NoSuchBucket",
    "InvalidAccessKeyId",
    "SignatureDoesNotMatch",
    "Credentials",
)
# A URI with a password that contains `/`, `?` or `#` before the `@`.
BROKEN_PASSWORD = re.compile(r"https?://[^\s/?#@:]*:[^\s@]*[/?#]\S*@", re.IGNORECASE)
# A URI without a password. BROKEN_PASSWORD also matches it if its path contains `@`.
HOST_AND_PORT = re.compile(r"https?://[^\s/?#@:]*:\d*(?:[/?#]|$)", re.IGNORECASE)
BUSY = (408, 409, 429)  # HTTP statuses of a server that may accept the same request later


class Point(NamedTuple):
    """One value of a metric curve. `after_s` is its time in seconds since the start of the run."""

    name: str
    value: float
    step: int
    after_s: float


class InputData(NamedTuple):
    """A data set that a run has read. `context` is its purpose, for example `train`."""

    name: str
    digest: str
    source: str
    context: str


def key_name(text: str) -> str:
    """Replace characters that MLflow does not accept: all except letters, digits and `_-. :/`."""
    return re.sub(r"[^\w\-. :/]", "_", text)


def round_for_display(value: float) -> float:
    """Round a value to six significant digits; integers, for example bytes, stay unchanged.

    MLflow's pages show all digits of a metric. The artifacts contain the exact numbers.

    Example:
        >>> round_for_display(0.92128814517)
        0.921288
    """
    return value if float(value).is_integer() else float(f"{value:.6g}")


# ---- the tracking store --------------------------------------------------------------------------
def tracking_uri(storage: str, uri: str = "") -> str:
    """Return the URI of the tracking store.

    The URI is `uri`, else MLFLOW_TRACKING_URI, else SQLite in the storage folder.

    Raises:
        UserError: If a password in the URI is not quoted, or a non-local storage has no
            tracking server.
    """
    configured = uri or os.environ.get("MLFLOW_TRACKING_URI", "")
    if configured:
        check_password(configured)
        return configured
    if not is_local(storage):
        raise UserError(
            f"storage {storage!r} cannot hold MLflow's SQLite database; "
            "name a tracking server in tracking.uri or MLFLOW_TRACKING_URI, or set tracking=off"
        )
    folder = Path(storage.removeprefix("file://")).absolute()
    make_dirs(str(folder))
    return sqlite_uri(folder / "mlflow.db")


def open_store(
    storage: str, uri: str = "", experiment: str = "accrete"
) -> tuple[MlflowClient, str, str]:
    """Open the tracking store, and create its database and experiment if they are missing.

    The driver calls this function before any other process opens the database.

    Args:
        storage: Folder or URI of the storage.
        uri: The setting `tracking.uri`.
        experiment: Name of the experiment.

    Returns:
        A client, the tracking URI and the id of the experiment.
    """
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    for name in ("alembic", "mlflow.store.db.utils"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # the caller reports errors
    from mlflow import MlflowClient  # reads the environment variables during its import

    mlflow_internals.try_databases_once()
    address = tracking_uri(storage, uri)
    with explain_missing_drivers(address):
        database = sqlite_path(address)
        if database is not None:
            prepare_database(
                database, mlflow_internals.create_tables, mlflow_internals.latest_schema_revision
            )
        client = MlflowClient(address)
        return client, address, _experiment_id(client, address, storage, experiment)


def _experiment_id(client: MlflowClient, address: str, storage: str, name: str) -> str:
    """Return the id of an experiment. Create it, or restore it after a deletion, if necessary."""
    from mlflow.exceptions import MlflowException

    experiment = client.get_experiment_by_name(name)
    if experiment is None:
        artifacts = _artifact_location(address, storage)
        try:
            return client.create_experiment(name, artifact_location=artifacts)
        except MlflowException:
            # Another driver may have created the experiment after the look-up.
            experiment = client.get_experiment_by_name(name)
            if experiment is None:
                raise
    if experiment.lifecycle_stage == "deleted":
        client.restore_experiment(experiment.experiment_id)
    return experiment.experiment_id


def tag_experiment(client: MlflowClient, experiment: str, name: str, value: str) -> None:
    """Set a tag of an experiment, given by its id, unless it has this value. Ignore errors."""
    from mlflow.exceptions import MlflowException

    with suppress(MlflowException):
        if client.get_experiment(experiment).tags.get(name) != value:
            client.set_experiment_tag(experiment, name, value)


def _artifact_location(address: str, storage: str) -> str | None:
    """Return the URI of the folder for artifacts, or None for a tracking server."""
    if address.startswith(("http://", "https://")):
        return None
    if not is_local(storage):
        return get_bucket_folder(storage)
    return Path(storage.removeprefix("file://")).absolute().joinpath("mlartifacts").as_uri()


def check_password(uri: str) -> None:
    """Check that the password in a tracking URI is quoted.

    Raises:
        UserError: If the password has a character that ends the host part of a URI.
    """
    if BROKEN_PASSWORD.match(uri) and not HOST_AND_PORT.match(uri):
        raise UserError(
            "the tracking URI (tracking.uri or MLFLOW_TRACKING_URI) has a password with `/`, "
            "`?` or `#` in it, which end the host's part of a URI; write them as %2F, "
            "%3F and %23, or give MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD instead"
        )


@contextmanager
def explain_missing_drivers(address: str) -> Iterator[None]:
    """Context manager that raises `UserError` if SQLAlchemy cannot use the URI of a database."""
    from sqlalchemy.exc import ArgumentError, NoSuchModuleError

    scheme = address.partition("://")[0]
    try:
        yield
    except ImportError as error:
        name = error.name or str(error)
        module = name.partition(".")[0]
        package = DRIVERS.get(module, module)
        raise UserError(
            f"the database of {redact(address)} needs the Python package {name!r}, "
            "which is not installed; install it beside MLflow "
            f"(pip install {package}), or name another tracking URI"
        ) from None
    except NoSuchModuleError:
        raise UserError(
            f"no database is known by the scheme {scheme!r} of the tracking URI; "
            "MLflow knows sqlite, postgresql, mysql, mssql, and servers by http and https"
        ) from None
    except ArgumentError:
        raise UserError(
            f"the tracking URI {redact(address)} "
            f"is not of the form {scheme}://user:password@host:port/database; "
            "fix tracking.uri or MLFLOW_TRACKING_URI"
        ) from None


@contextmanager
def explain_refusals(storage: str, uri: str = "") -> Iterator[None]:
    """Context manager that turns an error of MLflow or its database into a `UserError`."""
    try:
        yield
    except Exception as error:
        from mlflow.exceptions import MlflowException  # after the environment is set
        from sqlalchemy.exc import SQLAlchemyError

        if not isinstance(error, (MlflowException, SQLAlchemyError)):
            raise
        reason = " ".join(redact(str(error)).split())[:300]
        raise UserError(
            f"MLflow at {redact(tracking_uri(storage, uri))} does not show its runs ({reason}); "
            "start it, or fix MLFLOW_TRACKING_URI"
        ) from None


def get_bucket_folder(storage: str) -> str:
    """Return the URI of MLflow's artifacts in an object store.

    MLflow reads the endpoint and the region only from environment variables, so this function sets
    these variables, if they are missing, to the values in the storage's URI.
    """
    folder, _, query = join(storage, "mlartifacts").partition("?")
    options = dict(parse_qsl(query))
    endpoint = options.get("endpoint_override")
    if endpoint:
        if "://" not in endpoint:
            endpoint = f"{options.get('scheme', 'https')}://{endpoint}"
        os.environ.setdefault("MLFLOW_S3_ENDPOINT_URL", endpoint)
    region = options.get("region")
    if region:
        os.environ.setdefault("AWS_DEFAULT_REGION", region)
    return folder


def transient(error: Exception) -> bool:
    """Return whether the same call can succeed later, after this error.

    It can if there was no connection or no answer, or if a server or database had an internal
    error. It cannot if a disk is full or a database is damaged.
    """
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import OperationalError

    if FINAL.search(str(error)) or getattr(error, "errno", None) in FINAL_ERRNOS:
        return False
    if isinstance(error, MlflowException):
        status = error.get_http_status_code()
        return status >= 500 or status in BUSY
    library = type(error).__module__.partition(".")[0]
    if library in ("boto3", "botocore"):  # artifacts in a bucket
        return not any(code in str(error) for code in FINAL_BUCKET_ERRORS)
    return isinstance(error, (OSError, OperationalError, sqlite3.OperationalError))


def describe_login_refusal(error: Exception) -> str:
    """Return a message if a server refuses the login or forbids a change; "" for other errors."""
    from mlflow.exceptions import MlflowException

    if not isinstance(error, MlflowException) or error.get_http_status_code() not in (401, 403):
        return ""
    problem = "the login (status 401): nothing is recorded"
    if error.get_http_status_code() == 403:
        problem = "this account a change (status 403): the record is not complete"
    return (
        f"MLflow refuses {problem}; set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or "
        "MLFLOW_TRACKING_TOKEN, to an account that may write, and send the record with "
        "`report CONFIG`"
    )


# ---- runs ----------------------------------------------------------------------------------------
class MlflowClientAdapter:
    """Client for the runs of one experiment.

    Every method raises the errors of MLflow. A repeated call of a method with the same values adds
    nothing, except `create`, which creates another run.
    """

    def __init__(self, storage: str, settings: TrackingSettings):
        self.client, self.uri, self.experiment = open_store(
            storage, settings.uri, settings.experiment
        )

    def find(self, tags: Mapping[str, str]) -> list[Run]:
        """Return all runs with these tags."""
        conditions = [f"tags.`{name}` = '{value}'" for name, value in tags.items()]
        runs: list[Run] = []
        token = None
        while True:
            page = self.client.search_runs(
                [self.experiment], " and ".join(conditions), max_results=1000, page_token=token
            )
            runs += page
            token = page.token
            if not token:
                return runs

    def create(self, name: str, tags: Mapping[str, str]) -> Run:
        """Create a run. Empty tags are left out."""
        tags = {key: value for key, value in tags.items() if value}
        return self.client.create_run(self.experiment, tags=tags, run_name=name)

    def reopen(self, run: Run) -> None:
        """Set the status of a failed or stopped run to RUNNING."""
        self.client.update_run(run.info.run_id, "RUNNING")
        mlflow_internals.set_status(run, "RUNNING")

    def close(self, run: Run, status: str) -> None:
        """End a run with a status: FINISHED, FAILED or KILLED."""
        self.client.set_terminated(run.info.run_id, status)
        mlflow_internals.set_status(run, status)

    def tag(self, run: Run, tags: Mapping[str, str]) -> None:
        """Set the tags that have changed. An empty value deletes the tag."""
        for name, value in tags.items():
            if run.data.tags.get(name, "") == value:
                continue
            if value:
                self.client.set_tag(run.info.run_id, name, value)
                run.data.tags[name] = value
            else:
                self.client.delete_tag(run.info.run_id, name)
                del run.data.tags[name]

    def log_points(
        self, run: Run, points: Iterable[Point], tags: Mapping[str, str] | None = None
    ) -> None:
        """Log points. The tags are set in the same call as the last points.

        Therefore a tag can mark that all points were logged.

        The time of a point is relative to the start of the run, so a repeated point has the same
        time and MLflow drops it.
        """
        from mlflow.entities import Metric, RunTag

        start_ms = run.info.start_time
        metrics = []
        for point in points:
            time_ms = start_ms + int(1000 * point.after_s)
            metrics.append(Metric(point.name, round_for_display(point.value), time_ms, point.step))
        new_tags = dict(tags or {})
        last_tags = [RunTag(name, value) for name, value in new_tags.items()]
        full_batches = max(len(metrics) - 1, 0) // METRICS_PER_CALL
        for index in range(full_batches):
            first = index * METRICS_PER_CALL
            self.client.log_batch(
                run.info.run_id, metrics[first : first + METRICS_PER_CALL], tags=[]
            )
        last_metrics = metrics[full_batches * METRICS_PER_CALL :]
        if last_metrics or last_tags:
            self.client.log_batch(run.info.run_id, last_metrics, tags=last_tags)
        run.data.tags.update(new_tags)

    def log_params(self, run: Run, values: Mapping[str, Any]) -> None:
        """Log the parameters that the run does not have yet. MLflow never changes a parameter.

        Names and values are cut to the lengths that MLflow accepts.
        """
        from mlflow.entities import Param

        named = {}
        for name, value in values.items():
            named[key_name(name)[:MAX_PARAM_NAME]] = str(value)[:MAX_PARAM_VALUE]
        params = [Param(key, value) for key, value in named.items() if key not in run.data.params]
        for first in range(0, len(params), PARAMS_PER_CALL):
            batch = params[first : first + PARAMS_PER_CALL]
            self.client.log_batch(run.info.run_id, params=batch)
        run.data.params.update(named)

    def log_inputs(self, run: Run, inputs: Iterable[InputData]) -> None:
        """Log the data sets that a run has read."""
        from mlflow.entities import DatasetInput, InputTag

        entries = []
        for data in inputs:
            entity = mlflow_internals.dataset_entity(data.name, data.digest, data.source)
            tag = InputTag("mlflow.data.context", data.context)
            entries.append(DatasetInput(entity, [tag]))
        if entries:
            self.client.log_inputs(run.info.run_id, entries)

    def log_files(self, run: Run, files: Mapping[str, bytes]) -> None:
        """Upload artifacts of a run: path -> content."""
        if not files:
            return
        with tempfile.TemporaryDirectory(prefix="accrete-") as folder:
            for name, data in files.items():
                path = Path(folder, name)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)
            self.client.log_artifacts(run.info.run_id, folder)


class SystemMetrics:
    """Thread of MLflow that logs the use of this machine to a run.

    It samples CPU, memory, disk, network and GPUs. Workers' machines are sampled elsewhere, see
    `Recorder.sample`.

    Raises:
        UserError: If psutil is not installed.
    """

    def __init__(self, run: Run, uri: str):
        try:
            import psutil  # noqa: F401
        except ImportError:
            raise UserError(
                "tracking.system_metrics needs the package psutil, which is not installed; "
                "install `.[monitor]`, or leave the setting off"
            ) from None
        from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

        # A sample that cannot be written is dropped.
        logging.getLogger("mlflow.system_metrics").setLevel(logging.CRITICAL)
        self.monitor = SystemMetricsMonitor(run.info.run_id, resume_logging=True, tracking_uri=uri)
        self.monitor.start()

    @property
    def alive(self) -> bool:
        """Whether the thread still samples. It ends for example if MLflow does not answer."""
        return mlflow_internals.is_sampling(self.monitor)

    def end(self) -> None:
        """Stop sampling."""
        self.monitor.finish()
