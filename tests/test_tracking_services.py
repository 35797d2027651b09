"""Tests of MLflow on PostgreSQL and S3: the record is complete after an outage of both."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from mlflow.store.artifact import s3_artifact_repo

from pipeline.config.invocation import this_command
from tests import mlflow_server, postgres, s3, small_run
from tests.mlflow_server import MlflowServer, RecordedRun
from tests.recovery import Reference

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(postgres.why_missing()), reason=postgres.why_missing()),
]
SECRETS = (s3.KEY, s3.SECRET, postgres.PASSWORD)
EXPERIMENT = "disturbed"


@dataclass
class Services:
    """The services of a record: a database, and a bucket behind a proxy that counts requests.

    uri: address of the tracking store.
    """

    database: postgres.Postgres
    server: s3.Server
    bucket: s3.Proxy
    uri: str

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables for a driver. No file has a password."""
        return {
            **s3.environment(self.bucket.port),
            "AWS_MAX_ATTEMPTS": "1",  # boto3 reports each failure at once
            "MLFLOW_TRACKING_URI": self.uri,
        }

    def stop(self) -> None:
        """Stop both services."""
        self.database.stop()
        self.server.stop()

    def start(self) -> None:
        """Start both services again."""
        self.database.start()
        self.server.start()

    def count(self) -> int:
        """Return the number of requests for artifacts so far."""
        return self.bucket.counts("mlartifacts").total()


@contextlib.contextmanager
def services_up(folder: Path, monkeypatch: pytest.MonkeyPatch, way: str) -> Iterator[Services]:
    """Context manager that runs the services and sets the environment variables.

    way: `database`: the driver writes to both services. `server`: it knows only `mlflow server`.
    """
    server = s3.Server(str(folder / "bucket.pickle"))
    server.start()
    web: MlflowServer | None = None
    try:
        with (
            postgres.postgres_up() as database,
            s3.Proxy(server.port, bucket="records").served() as bucket,
        ):
            s3.client_of(server.port).create_bucket(Bucket=bucket.bucket)
            artifacts = f"s3://{bucket.bucket}/mlartifacts"
            services = Services(database, server, bucket, database.uri)
            for name, value in services.environment.items():
                monkeypatch.setenv(name, value)
            # MLflow caches S3 clients for minutes. A cached client would use another test's proxy.
            s3_artifact_repo._cached_get_s3_client.cache_clear()
            if way == "server":
                web = MlflowServer(folder / "web", database.uri, artifacts)
                web.start()
                services.uri = web.uri.replace("//", f"//{postgres.USER}:{postgres.PASSWORD}@")
            else:
                for experiment in (EXPERIMENT, "undisturbed"):
                    create_experiment(services.uri, experiment, artifacts)
            yield services
    finally:
        if web:
            web.kill()
        server.stop()


def create_experiment(uri: str, name: str, artifacts: str) -> None:
    """Create an experiment with its artifacts in a bucket, as a user would."""
    from mlflow import MlflowClient

    MlflowClient(uri).create_experiment(name, artifact_location=artifacts)


def write_config(reference: Reference, folder: Path, experiment: str, **tracking: Any) -> str:
    """Write the config of a run that takes some seconds and is recorded in an experiment."""
    body = small_run.make_body(folder, reference.cards, train={"epochs": 40})
    body["tracking"] = {"experiment": experiment, **tracking}
    return small_run.write_config(folder.with_name(f"{folder.name}.yaml"), body)


def wait_for(condition: Callable[[], object], process: Any, output: Path) -> None:
    """Wait until a condition holds. Raises AssertionError after 900 s, or if the process ends
    first."""
    deadline = time.monotonic() + 900
    while not condition():
        assert process.is_alive(), output.read_text()
        assert time.monotonic() < deadline, output.read_text()
        time.sleep(0.02)


def finished_stages(folder: Path) -> int:
    """Return the number of published stages of the run in a folder."""
    return len(list((folder / "storage" / "stages").glob("*/manifest.json")))


def essence(recorded: dict[tuple[str, str], RecordedRun]) -> dict[tuple[str, str], Any]:
    """Return the parts of a record that equal runs share: all but times and speeds."""
    common = {}
    for name, run in recorded.items():
        points = {
            metric: [step for step, _ in values]
            for metric, values in run.metrics.items()
            if not metric.startswith("system/")
        }
        results = {
            metric: values for metric, values in run.metrics.items() if metric.startswith("acc")
        }
        params = {key: value for key, value in run.params.items() if "storage" not in key}
        common[name] = (
            run.status,
            points,
            results,
            params.keys(),
            sorted(run.tags.keys()),
            run.inputs,
            run.files,
            run.models,
        )
    return common


def finish(process: Any, output: Path) -> str:
    """Wait for a process to succeed, and return its output."""
    process.join(900)
    assert process.exitcode == 0, output.read_text()
    return output.read_text()


@pytest.mark.parametrize("way", ["database", "server"])
def test_mlflow_record_is_complete_if_services_return_during_run(
    reference: Reference, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    with services_up(tmp_path, monkeypatch, way) as services:
        folder, output = tmp_path / "disturbed", tmp_path / "disturbed.txt"
        whole = write_config(reference, tmp_path / "whole", "undisturbed")
        finish(
            s3.start(["run", whole], tmp_path / "whole.txt", services.environment),
            tmp_path / "whole.txt",
        )
        before = services.count()
        config = write_config(reference, folder, EXPERIMENT)
        process = s3.start(["run", config], output, services.environment)
        wait_for(lambda: services.count() > before, process, output)
        services.stop()
        num_finished = finished_stages(folder)
        wait_for(lambda: "does not answer" in output.read_text(), process, output)
        wait_for(lambda: finished_stages(folder) > num_finished, process, output)
        services.start()
        text = finish(process, output)
        assert "incomplete" not in text
        assert small_run.results(folder / "storage") == small_run.results(
            tmp_path / "whole" / "storage"
        )
        recorded = mlflow_server.contents(services.uri, EXPERIMENT)
        expected = mlflow_server.contents(services.uri, "undisturbed")
    assert essence(recorded) == essence(expected)
    assert {run.status for run in recorded.values()} == {"FINISHED"}
    assert any(run.models for run in recorded.values())
    assert s3.leaks(folder, SECRETS) == []
    assert not any(secret in text for secret in SECRETS)


def test_printed_report_command_completes_mlflow_record_after_outage(
    reference: Reference, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with services_up(tmp_path, monkeypatch, "database") as services:
        folder, output = tmp_path / "disturbed", tmp_path / "disturbed.txt"
        config = write_config(reference, folder, EXPERIMENT, patience_s=0.5)
        process = s3.start(["run", config], output, services.environment)
        wait_for(lambda: services.count() > 0, process, output)
        services.stop()
        text = finish(process, output)
        command = f"{this_command()} report {config}"
        assert f"is incomplete; when MLflow is back, {command} writes it" in text
        services.start()
        again = tmp_path / "again.txt"
        written = finish(s3.start(["report", config], again, services.environment), again)
        assert "incomplete" not in written
        whole = write_config(reference, tmp_path / "whole", "undisturbed")
        finish(s3.start(["run", whole], output, services.environment), output)
        recorded = mlflow_server.contents(services.uri, EXPERIMENT)
        expected = mlflow_server.contents(services.uri, "undisturbed")
    assert essence(recorded) == essence(expected)
    assert s3.leaks(folder, SECRETS) == []
    assert not any(secret in text + written for secret in SECRETS)
