"""Tests of a running server that follows its model: changed folders and moved aliases."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from serving import Finished, finished

from benchmarks.serve_load import server
from pipeline.serving import updates
from pipeline.serving.client import Client
from pipeline.serving.model_source import FixedModel, FolderModel, RegisteredModel
from pipeline.serving.updates import Updates, following
from pipeline.tracking import publish
from pipeline.tracking.mlflow_client import open_store
from tests.several_nodes import wait_for
from workers.errors import UserError
from workers.serving import single_tasks
from workers.serving.bundle import Bundle


@pytest.fixture(scope="module")
def run(lab: Any) -> Finished:
    return finished(lab, "meat", epochs=1)


@pytest.fixture
def tracking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return client, URI and experiment of a new MLflow database, and set MLFLOW_TRACKING_URI."""
    client, uri, experiment = open_store(str(tmp_path / "tracking"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    return SimpleNamespace(client=client, uri=uri, experiment=experiment)


@dataclass
class Source:
    """A model source with version, bundle and errors set by the test."""

    bundle: Bundle
    number: str = "1"
    error: Exception | None = None
    opened: list[str] = field(default_factory=list)

    def version(self) -> str:
        if self.error is not None:
            raise self.error
        return self.number

    def open(self) -> Bundle:
        self.opened.append(self.number)
        return self.bundle


def test_new_version_is_deployed_once(run: Finished, capfd: pytest.CaptureFixture[str]) -> None:
    source = Source(run.bundle)
    deployed: list[Bundle] = []
    follower = Updates(source, "1", deployed.append)
    follower.check()
    assert (source.opened, deployed) == ([], [])
    source.number = "2"
    follower.check()
    follower.check()
    assert (source.opened, deployed) == (["2"], [run.bundle])
    assert capfd.readouterr().err == "accrete: now serving two, three\n"


def test_failed_update_is_reported_once_and_retried(
    run: Finished, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    outcomes: list[Exception | None] = [UserError("no such method"), UserError("no such method")]

    def deploy(bundle: Bundle) -> None:
        if outcomes:
            raise outcomes.pop() or AssertionError

    source = Source(run.bundle, "2")
    follower = Updates(source, "1", deploy)
    follower.check()
    assert capfd.readouterr().err == (
        "accrete: the previous model is still served: no such method\n"
    )
    follower.check()
    assert source.opened == ["2"], "it must wait before it tries again"
    monkeypatch.setattr(updates, "RETRY_S", 0.0)
    follower.paused_until = 0.0
    follower.check()
    assert capfd.readouterr().err == ""
    follower.check()
    assert (follower.version, source.opened) == ("2", ["2"] * 3)
    source.error = UserError("the storage is away")
    follower.check()
    assert "the storage is away" in capfd.readouterr().err


def test_update_watcher_survives_errors(
    run: Finished, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(updates, "POLL_S", 0.01)
    served = threading.Event()
    source = Source(run.bundle, "2", RuntimeError("a fault"))

    def deploy(bundle: Bundle) -> None:
        served.set()

    with following(Updates(source, "1", deploy)):
        assert not served.wait(0.1)
        source.error = None
        assert served.wait(60)
    assert "RuntimeError: a fault" in capfd.readouterr().err


def test_folder_version_changes_with_its_tasks(run: Finished, tmp_path: Path) -> None:
    folder = str(tmp_path / "model")
    run.bundle.write(folder)
    source = FolderModel(folder)
    both = source.version()
    assert both == FixedModel(run.bundle).version() == source.open().body["sha256"]
    data = single_tasks.export_task(run.bundle, "three")
    single_tasks.remove_task(folder, "three")
    one = source.version()
    assert [task.name for task in source.open().tasks] == ["two"]
    single_tasks.import_task(folder, data, "three.task")
    assert len({both, one, source.version()}) >= 2
    assert [task.name for task in source.open().tasks] == ["two", "three"]


def test_moved_alias_resolves_to_its_new_version(
    run: Finished, tracking: Any, tmp_path: Path
) -> None:
    bundles_by_version = {}
    for version, tasks in (("1", run.bundle.tasks), ("2", run.bundle.tasks[:1])):
        folder = str(tmp_path / version)
        changed = run.bundle.with_tasks(tasks)
        changed.write(folder)
        run_id = tracking.client.create_run(tracking.experiment).info.run_id
        assert publish.log(tracking.uri, run_id, folder, "digits").version == version
        bundles_by_version[version] = changed.body
    source = RegisteredModel("models:/digits@champion", "storage")
    assert source.version() == "2"
    assert source.open().body == bundles_by_version["2"]
    tracking.client.set_registered_model_alias("digits", "champion", "1")
    assert source.version() == "1"
    opened = source.open()
    assert opened.body == bundles_by_version["1"]
    assert opened.read("backbone.safetensors") == run.bundle.read("backbone.safetensors")
    assert RegisteredModel("models:/digits/2", "storage").version() == "2"
    with pytest.raises(UserError, match="models:/digits@chief cannot be found"):
        RegisteredModel("models:/digits@chief", "storage").version()


def test_invalid_mlflow_model_uri_raises_user_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    for uri in ("models:/", "models:/digits", "models:/a/b/c", "models:/digits@"):
        with pytest.raises(UserError, match="is not a model of MLflow; give models:/NAME@ALIAS"):
            RegisteredModel(uri, "storage")
    with pytest.raises(UserError, match=r"there is no database .*; give the storage folder"):
        RegisteredModel("models:/digits@champion", str(tmp_path)).version()


@pytest.mark.slow
def test_moved_alias_is_served_without_lost_requests(
    run: Finished, tracking: Any, tmp_path: Path
) -> None:
    for version, tasks in (("1", run.bundle.tasks), ("2", run.bundle.tasks[:1])):
        folder = str(tmp_path / version)
        run.bundle.with_tasks(tasks).write(folder)
        run_id = tracking.client.create_run(tracking.experiment).info.run_id
        publish.log(tracking.uri, run_id, folder, "digits")
    images = run.images("two")[0][:2]
    expected = [answer.class_ for answer in run.served.predict(images, "two")]
    stop, problems = threading.Event(), list[str]()

    def keep_asking(url: str) -> None:
        client = Client(url, patience_s=0)
        while not stop.is_set():
            try:
                assert [row["class"] for row in client.predict(images, "two")] == expected
            except Exception as error:
                problems.append(repr(error))

    with server("models:/digits@champion") as (url, _):
        thread = threading.Thread(target=keep_asking, args=(url,))
        thread.start()
        try:
            client = Client(url)
            seen = [client.tasks()]
            for version, count in (("1", 2), ("2", 1)):
                tracking.client.set_registered_model_alias("digits", "champion", version)
                wait_for(lambda n=count: len(client.tasks()["tasks"]) == n, 300)
                seen.append(client.tasks())
        finally:
            stop.set()
            thread.join(300)
    assert problems == []
    assert [len(answer["tasks"]) for answer in seen] == [1, 2, 1]
    assert seen[0]["model"] == seen[2]["model"] != seen[1]["model"]
