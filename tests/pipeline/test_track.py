"""Promises of the record: everything is in MLflow once, whatever was interrupted, and MLflow never stops a run."""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import fake_run

from pipeline import browse, track
from pipeline.report import entries, page, plots
from workers.errors import UserError

SETTINGS = SimpleNamespace(enabled=True, uri="", experiment="accrete")


@pytest.fixture(scope="module", autouse=True)
def _small_pictures():
    usual, plots.DPI = plots.DPI, 40
    yield
    plots.DPI = usual


@pytest.fixture(autouse=True)
def _no_server(monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A run that was killed after five stages, went on, finished, and was started once more."""
    storage = str(tmp_path_factory.mktemp("storage"))
    record = fake_run.record()
    os.environ.pop("MLFLOW_TRACKING_URI", None)
    first = track.Recorder(SETTINGS, storage)
    first.start(record, "<svg>graph</svg>")
    ids = [s.id for s in fake_run.stages() if s.step != "report"]
    for stage, _ in fake_run.write(storage, set(ids[:6])):
        first.stage(stage, {"stage": stage.id})  # as workers report it: without the list of files
    second = track.Recorder(SETTINGS, storage)
    second.start(record, "<svg>graph</svg>")
    for stage, manifest in fake_run.write(storage, set(ids[6:])):
        second.stage(stage, manifest)
    files = page.build(storage, record)
    second.finish(files)
    before = contents(storage)
    third = track.Recorder(SETTINGS, storage)
    third.start(record, "<svg>graph</svg>")
    third.finish(files)
    assert first.warnings == second.warnings == third.warnings == []
    return SimpleNamespace(storage=storage, recorder=third, before=before, after=contents(storage))


def contents(storage):
    """(label, task) -> run, every run of the experiment; and the length of each metric's history."""
    client, _, experiment = track.open_store(storage)
    runs = client.search_runs([experiment], max_results=1000)
    histories = {(r.info.run_id, name): len(client.get_metric_history(r.info.run_id, name)) for r in runs for name in r.data.metrics}
    return SimpleNamespace(client=client, count=len(runs), histories=histories, ended={r.info.run_id: r.info.end_time for r in runs},
                           runs={(r.data.tags.get("label", ""), r.data.tags.get("task", "")): r for r in runs})


def artifacts(found, label, task=""):
    return {f.path for f in found.client.list_artifacts(found.runs[label, task].info.run_id)}


def test_there_is_one_run_per_graph_method_and_task_nested_in_each_other(recorded):
    runs = recorded.after.runs
    assert recorded.after.count == len(runs) == 1 + 1 + 3 + 3 * 4  # graph, backbone, methods, tasks
    parent = runs["", ""].info.run_id
    assert runs["", "backbone"].data.tags["mlflow.parentRunId"] == parent
    for label in fake_run.METHODS:
        assert runs[label, ""].data.tags["mlflow.parentRunId"] == parent
        assert runs[label, "birds"].data.tags["mlflow.parentRunId"] == runs[label, ""].info.run_id
    assert runs["", ""].info.run_name == "tiny"
    assert {r.info.status for r in runs.values()} == {"FINISHED"}


def test_a_command_given_twice_adds_nothing(recorded):
    assert recorded.before.histories == recorded.after.histories
    assert recorded.before.ended == recorded.after.ended


def test_an_interrupted_run_has_every_point_once(recorded):
    histories, runs = recorded.after.histories, recorded.after.runs
    for label in fake_run.METHODS:
        run = runs[label, ""].info.run_id
        assert [histories[run, f"acc/{t['name']}"] for t in fake_run.TASKS] == [4, 3, 2, 1]
        assert histories[run, "average_accuracy"] == histories[run, "forgetting"] == histories[run, "growth"] == 4
        assert histories[runs[label, "leaves"].info.run_id, "train/loss"] == 6
    assert histories[runs["", ""].info.run_id, "average_accuracy/meat"] == 4


def test_values_are_those_of_the_store(recorded):
    metrics = recorded.after.runs["finetune", ""].data.metrics
    assert metrics["acc/birds"] == pytest.approx(round(120 * fake_run.accuracy("finetune", 3, 1)) / 120)
    assert metrics["forgetting"] > .3
    assert recorded.after.runs["meat", ""].data.metrics["forgetting"] == 0
    task = recorded.after.runs["meat", "birds"].data.metrics
    assert task["flops_share"] == .83
    assert 0 < task["keep/tokens"] < 1
    assert task["train/val_accuracy"] > .8


def test_what_people_look_at_is_there_as_pictures_tables_and_page(recorded):
    found = recorded.after
    assert {"report.html", "graph.svg", "comparison.png", "averages.png", "size_accuracy.png", "environment.json", "tables"} <= artifacts(found, "")
    assert {"accuracy_matrix.png", "accuracy_matrix.json", "accuracy_matrix.parquet", "sizes.csv", "report"} <= artifacts(found, "meat")
    assert {"token_masks.png", "density.png", "overlap.png", "overlap.csv", "confusion.png", "confusion.csv",
            "task.safetensors"} <= artifacts(found, "meat", "leaves")
    assert "tokens.png" in artifacts(found, "hat-small", "leaves")
    path = found.client.download_artifacts(found.runs["finetune", ""].info.run_id, "accuracy_matrix.json")
    assert len(json.loads(Path(path).read_text())["accuracy"]) == 4


def test_runs_can_be_found_by_their_tags_and_compared_by_their_settings(recorded):
    tags = recorded.after.runs["hat-small", "birds"].data.tags
    assert (tags["method"], tags["scenario"], tags["backbone"], tags["seed"]) == ("hat", "task", "vit_tiny_patch16_224", "3")
    key = next(s.key for s in fake_run.stages() if s.id == "hat-small/birds/train")
    assert tags["stage.train"] == key
    assert recorded.after.runs["hat-small", ""].data.params["settings.lam"] == "0.75"
    assert recorded.after.runs["", ""].data.params["backbone.img_size"] == "32"
    assert {d.dataset.name for d in recorded.after.runs["", ""].inputs.dataset_inputs} == {"shapes", "birds", "plants"}


def test_links_open_mlflow_on_its_pages_for_training(recorded):
    assert recorded.recorder.links() == [f"record: {browse.this_python()} -m pipeline ui --storage {recorded.storage}"]
    run = recorded.after.runs["", ""].info
    one, many = recorded.recorder.links("http://127.0.0.1:5000")
    assert one.endswith(f"http://127.0.0.1:5000/#/experiments/{run.experiment_id}/runs/{run.run_id}?workflowType=machine_learning")
    assert all(recorded.after.runs[label, ""].info.run_id in many for label in fake_run.METHODS)
    client, _, experiment = track.open_store(recorded.storage)
    assert browse.recorded(client, experiment) == [("tiny", run.run_id, [recorded.after.runs[label, ""].info.run_id for label in fake_run.METHODS])]


def test_another_graph_of_the_same_name_gets_runs_of_its_own():
    record = fake_run.record()
    changed = {**record, "stages": [{**record["stages"][0], "key": "other"}, *record["stages"][1:]]}
    assert track.identity(changed) != track.identity(record) == track.identity(fake_run.record())


# ---- when MLflow fails -------------------------------------------------------------------------------------------------
def test_a_tracking_server_that_does_not_answer_costs_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    recorder = track.Recorder(SimpleNamespace(enabled=True, uri="http://127.0.0.1:9", experiment="x"), str(tmp_path))
    recorder.start(fake_run.record())
    for stage, manifest in fake_run.write(str(tmp_path), {"data/shapes", "backbone"}):
        recorder.stage(stage, manifest)
    recorder.finish({})
    assert len(recorder.warnings) == 1
    assert "the run goes on" in recorder.warnings[0]
    assert recorder.links() == []


def test_what_failed_in_between_is_written_at_the_end(recorded, monkeypatch):
    for name in ("task_files", "method_files", "confusion_files"):  # pictures take time and are not the point here
        monkeypatch.setattr(entries, name, lambda *_: {})
    record = fake_run.record("again")
    recorder = track.Recorder(SETTINGS, recorded.storage)
    real, down = track.Recorder._points, [True]

    def points(self, *args, **kwargs):
        if down[0]:
            raise ConnectionError("database is locked")
        return real(self, *args, **kwargs)

    monkeypatch.setattr(track.Recorder, "_points", points)
    recorder.start(record)
    down[0] = False
    recorder.finish({})
    assert len(recorder.warnings) == 1
    assert "database is locked" in recorder.warnings[0]
    run = recorder.runs["meat", "birds"].info.run_id
    assert recorder.client.get_run(run).data.metrics["flops_share"] == .83
    assert len(recorder.client.get_metric_history(run, "train/loss")) == 6


def test_tracking_that_is_off_writes_nothing(tmp_path):
    recorder = track.Recorder(SimpleNamespace(enabled=False, uri="", experiment="x"), str(tmp_path))
    recorder.start(fake_run.record())
    recorder.finish({})
    assert list(tmp_path.iterdir()) == []


def test_an_object_store_needs_a_tracking_server_and_says_so(tmp_path):
    with pytest.raises(UserError, match=r"name a tracking server in tracking\.uri"):
        track.tracking_uri("s3://bucket/runs")
    assert track.tracking_uri("s3://bucket/runs", "http://server") == "http://server"
    assert track.tracking_uri(str(tmp_path)) == f"sqlite:///{tmp_path}/mlflow.db"


def test_a_port_that_is_taken_is_named(tmp_path):
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"port {port} on 127.0.0.1 cannot be used"):
            browse.free_port("127.0.0.1", port)
    assert browse.free_port("127.0.0.1") > 0


def test_the_server_works_without_job_processes(tmp_path):
    assert browse.server_command("sqlite:///x", str(tmp_path), "127.0.0.1", 5000)[-2:] == ["--workers", "1"]
    assert track.ENVIRONMENT["MLFLOW_SERVER_ENABLE_JOB_EXECUTION"] == "false"
