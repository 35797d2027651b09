"""Tests of the MLflow record: complete without duplicates after interruptions; failures of MLflow
do not stop a run."""

import json
import os
import re
import sys
import time
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fake_run
import pytest

from pipeline.config.invocation import this_command
from pipeline.config.settings import TrackingSettings
from pipeline.report import page
from pipeline.tracking import mlflow_client, run_writer, ui
from pipeline.tracking import recorder as recorder_module
from pipeline.tracking.mlflow_client import Point
from pipeline.tracking.points import drop_constant_curves
from pipeline.tracking.recorder import Recorder
from workers import preemption
from workers.errors import UserError

pytestmark = pytest.mark.usefixtures("small_pictures")

SETTINGS = TrackingSettings()
EDITED = ("hat-small", "")  # label and task of the run with an edited description


@pytest.fixture(autouse=True)
def _no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Record a run killed after six stages, resumed, finished, and run once more.

    Between the kill and the next start, a user edits the description of `EDITED`.
    """
    storage = str(tmp_path_factory.mktemp("storage"))
    record: Any = {
        **fake_run.record(),
        "provenance": {"git_commit": "feed", "packages": {"torch": "2.14.1"}, "python": "3.11.7"},
    }
    os.environ.pop("MLFLOW_TRACKING_URI", None)
    first = Recorder(SETTINGS, storage)
    first.start(record, "<svg>graph</svg>")
    ids = [s.id for s in fake_run.stages() if s.step != "report"]
    for stage, _ in fake_run.write(storage, set(ids[:6])):
        first.stage(stage, {"stage": stage.id})  # as workers report it: without the list of files
    assert first.outbox.close(0) == 0  # as if killed here: `finish` is not called
    state = contents(storage)
    state.client.set_tag(state.runs[EDITED].info.run_id, "mlflow.note.content", "my own words")
    second = Recorder(SETTINGS, storage)
    second.start(record, "<svg>graph</svg>")
    for stage, manifest in fake_run.write(storage, set(ids[6:])):
        second.stage(stage, manifest)
    files = page.build_run_report(storage, record)
    second.finish(files)
    before = contents(storage)
    third = Recorder(SETTINGS, storage)
    third.start(record, "<svg>graph</svg>")
    third.finish(files)
    assert first.warnings == second.warnings == third.warnings == []
    return SimpleNamespace(storage=storage, recorder=third, before=before, after=contents(storage))


def contents(storage: Any) -> Any:
    """Return the runs of the experiment by (label, task), and the lengths of metric histories."""
    client, _, experiment = mlflow_client.open_store(storage)
    runs = client.search_runs([experiment], max_results=1000)
    histories = {
        (r.info.run_id, name): len(client.get_metric_history(r.info.run_id, name))
        for r in runs
        for name in r.data.metrics
    }
    return SimpleNamespace(
        client=client,
        count=len(runs),
        histories=histories,
        ended={r.info.run_id: r.info.end_time for r in runs},
        runs={(r.data.tags.get("label", ""), r.data.tags.get("task", "")): r for r in runs},
    )


def artifacts(state: Any, label: Any, task: Any = "") -> Any:
    return {f.path for f in state.client.list_artifacts(state.runs[label, task].info.run_id)}


def test_graph_method_and_task_runs_are_nested(recorded: Any) -> None:
    runs = recorded.after.runs
    assert recorded.after.count == len(runs) == 1 + 1 + 3 + 3 * 4  # graph, backbone, methods, tasks
    parent = runs["", ""].info.run_id
    assert runs["", "backbone"].data.tags["mlflow.parentRunId"] == parent
    for label in fake_run.METHODS:
        assert runs[label, ""].data.tags["mlflow.parentRunId"] == parent
        assert runs[label, "birds"].data.tags["mlflow.parentRunId"] == runs[label, ""].info.run_id
    assert runs["", ""].info.run_name == "tiny"
    assert {r.info.status for r in runs.values()} == {"FINISHED"}


def test_recording_a_run_twice_adds_nothing(recorded: Any) -> None:
    assert recorded.before.histories == recorded.after.histories
    assert recorded.before.ended == recorded.after.ended


def test_interrupted_run_records_every_point_once(recorded: Any) -> None:
    histories, runs = recorded.after.histories, recorded.after.runs
    for label in fake_run.METHODS:
        run = runs[label, ""].info.run_id
        forgets = label == "finetune"  # a constant metric has one point
        lengths = [histories[run, f"acc/{task['name']}"] for task in fake_run.TASKS]
        assert lengths == ([4, 3, 2, 1] if forgets else [1, 1, 1, 1])
        assert histories[run, "average_accuracy"] == histories[run, "growth"] == 4
        assert histories[run, "forgetting"] == (4 if forgets else 1)
        assert histories[runs[label, "leaves"].info.run_id, "train/loss"] == 6
    assert histories[runs["", ""].info.run_id, "average_accuracy/meat"] == 4


def test_recorded_metrics_match_the_stored_results(recorded: Any) -> None:
    metrics = recorded.after.runs["finetune", ""].data.metrics
    assert metrics["acc/birds"] == pytest.approx(
        round(120 * fake_run.accuracy("finetune", 3, 1)) / 120
    )
    assert metrics["forgetting"] > 0.3
    assert recorded.after.runs["meat", ""].data.metrics["forgetting"] == 0
    task = recorded.after.runs["meat", "birds"].data.metrics
    assert task["flops_share"] == 0.83
    assert 0 < task["keep/tokens"] < 1
    assert task["train/val_accuracy"] > 0.8


def test_pictures_tables_and_the_report_are_artifacts(recorded: Any) -> None:
    state = recorded.after
    assert {
        "report.html",
        "graph.svg",
        "comparison.png",
        "averages.png",
        "size_accuracy.png",
        "environment.json",
        "config.yaml",
        "tables",
    } <= artifacts(state, "")
    assert {
        "accuracy_matrix.png",
        "accuracy_matrix.json",
        "accuracy_matrix.parquet",
        "sizes.csv",
        "report",
    } <= artifacts(state, "meat")
    assert {
        "token_masks.png",
        "density.png",
        "masks.csv",
        "overlap.csv",
        "confusion.png",
        "confusion.csv",
        "task.safetensors",
    } <= artifacts(state, "meat", "leaves")
    assert {"tokens.png", "tokens.csv"} <= artifacts(state, "hat-small", "leaves")
    path = state.client.download_artifacts(
        state.runs["finetune", ""].info.run_id, "accuracy_matrix.json"
    )
    assert len(json.loads(Path(path).read_text())["accuracy"]) == 4


def test_run_names_identify_methods_and_metrics_are_rounded(recorded: Any) -> None:
    runs = recorded.after.runs
    assert runs["meat", ""].info.run_name == "meat (tiny)"
    assert runs["meat", "birds"].info.run_name == "birds"
    accuracy = runs["meat", ""].data.metrics["average_accuracy"]
    assert len(str(accuracy)) <= len("0.123456")
    assert runs["meat", ""].data.metrics["size/backbone"].is_integer()
    assert mlflow_client.round_for_display(123456789.0) == 123456789.0
    assert mlflow_client.round_for_display(0.92128814517) == 0.921288


def test_descriptions_link_to_pages_and_pictures(recorded: Any) -> None:
    state = recorded.after
    run = state.runs["meat", ""]
    note = run.data.tags["mlflow.note.content"]
    links, _, text = note.partition("\n\n")
    root = f"(#/experiments/{run.info.experiment_id}/runs/{run.info.run_id}/artifacts/"
    assert f"[masks]{root}report/masks.png?workflowType=machine_learning)" in links.split(" | ")
    assert text == run_writer.format_run_note(fake_run.record(), "meat", "")
    linked = set(re.findall(r"/artifacts/([^?]+)", links))
    stored = {f.path for f in state.client.list_artifacts(run.info.run_id, "report")}
    assert linked == stored
    links = state.runs["", ""].data.tags["mlflow.note.content"].partition("\n\n")[0]
    assert "[report](#/" in links


def test_an_edited_description_is_kept(recorded: Any) -> None:
    runs = recorded.after.runs
    assert runs[EDITED].data.tags["mlflow.note.content"] == "my own words"
    assert "[matrix]" in runs["finetune", ""].data.tags["mlflow.note.content"]


def test_runs_record_tags_settings_and_data_sets(recorded: Any) -> None:
    tags = recorded.after.runs["hat-small", "birds"].data.tags
    assert (tags["method"], tags["scenario"], tags["backbone"], tags["seed"]) == (
        "hat",
        "task",
        "vit_tiny_patch16_224",
        "3",
    )
    key = next(s.key for s in fake_run.stages() if s.id == "hat-small/birds/train")
    assert tags["stage.train"] == key
    assert recorded.after.runs["hat-small", ""].data.params["settings.lam"] == "0.75"
    params = recorded.after.runs["", ""].data.params
    assert params["backbone.img_size"] == "32"
    assert params["methods"] == ", ".join(fake_run.METHODS)
    assert len(params) <= 20
    assert {d.dataset.name for d in recorded.after.runs["", ""].inputs.dataset_inputs} == {
        "shapes",
        "birds",
        "plants",
    }


def test_constant_metric_has_a_single_point(recorded: Any) -> None:
    state = recorded.after
    lengths = {}
    for (label, task), run in state.runs.items():
        for name in run.data.metrics:
            history = state.client.get_metric_history(run.info.run_id, name)
            lengths[label, task, name] = len(history)
            if len(history) > 1:
                assert len({point.value for point in history}) > 1, (label, task, name)
    assert lengths["hat-small", "", "size/backbone"] == 1
    assert lengths["hat-small", "", "size/total"] > 1
    assert lengths["hat-small", "", "average_accuracy"] > 1
    assert lengths["", "", "average_accuracy/hat-small"] > 1
    assert lengths["hat-small", "", "forgetting"] == 1, (
        "it forgets nothing, so the metric is constant"
    )
    assert lengths["", "", "forgetting/hat-small"] == 1
    assert lengths["finetune", "", "forgetting"] > 1


def test_late_changing_curve_keeps_all_points() -> None:
    constant = [Point("a", 1.0, step, step) for step in range(3)]
    varying = [Point("b", float(step == 2), step, step) for step in range(3)]
    assert drop_constant_curves([*constant, *varying]) == [constant[0], *varying]
    assert drop_constant_curves(varying[:2]) == varying[:1]


def test_mean_of_equal_values_is_constant_despite_rounding() -> None:
    rates = [0.1, 0.1, 0.1]
    means = [sum(rates[:count]) / count for count in (1, 2, 3)]
    assert len({*means}) == 2
    points = [Point("average_accuracy", mean, step, step) for step, mean in enumerate(means)]
    assert drop_constant_curves(points) == points[:1]


def test_shared_view_shows_method_runs_with_existing_columns(recorded: Any) -> None:
    client, _, experiment = mlflow_client.open_store(recorded.storage)
    ui.share_view(client, experiment)
    tags = client.get_experiment(experiment).tags
    view = json.loads(tags["mlflow.sharedViewState.accrete"])
    method = recorded.after.runs["meat", ""].data
    for column in view["selectedColumns"]:
        kind, _, name = column.partition(".")
        assert name.strip("`") in {"metrics": method.metrics, "tags": method.tags}[kind]
    methods = client.search_runs([experiment], view["searchFilter"])
    assert {run.data.tags["label"] for run in methods} == set(fake_run.METHODS)
    assert ui.make_runs_link("http://x", experiment).endswith("&viewStateShareKey=accrete")


def test_links_open_the_training_view_of_mlflow(recorded: Any) -> None:
    assert recorded.recorder.links() == [
        f"record: {this_command()} ui --storage {recorded.storage}"
    ]
    run = recorded.after.runs["", ""].info
    one, many = recorded.recorder.links("http://127.0.0.1:5000")
    assert one.endswith(
        f"http://127.0.0.1:5000/#/experiments/{run.experiment_id}/runs/{run.run_id}"
        "?workflowType=machine_learning"
    )
    assert all(recorded.after.runs[label, ""].info.run_id in many for label in fake_run.METHODS)
    client, _, experiment = mlflow_client.open_store(recorded.storage)
    assert ui.list_recorded_runs(client, experiment) == [
        (
            "tiny",
            run.run_id,
            [recorded.after.runs[label, ""].info.run_id for label in fake_run.METHODS],
        )
    ]


def test_another_graph_of_the_same_name_gets_separate_runs() -> None:
    record = fake_run.record()
    first, *rest = record["stages"]
    changed: Any = {**record, "stages": [{**first, "key": "other"}, *rest]}
    assert (
        run_writer.run_key(changed)
        != run_writer.run_key(record)
        == run_writer.run_key(fake_run.record())
    )


# ---- when MLflow fails ---------------------------------------------------------------------------
def test_unreachable_tracking_server_gives_a_message_and_a_warning(
    tmp_path: Path,
) -> None:
    lines: list[str] = []
    settings = TrackingSettings(uri="http://127.0.0.1:9", experiment="x", patience_s=0)
    recorder = Recorder(settings, str(tmp_path), lines.append, "python -m pipeline report x.yaml")
    recorder.start(fake_run.record())
    for stage, manifest in fake_run.write(str(tmp_path), {"data/shapes", "backbone"}):
        recorder.stage(stage, manifest)
    while not lines:  # until the first attempt failed
        time.sleep(0.01)
    recorder.finish({})
    assert len(lines) == 1
    assert "does not answer" in lines[0]
    assert recorder.warnings == [
        "MLflow did not answer for 0 s at the end: the record of run 'tiny' is incomplete; when "
        "MLflow is back, "
        "python -m pipeline report x.yaml writes it"
    ]
    assert recorder.links() == []


@pytest.mark.parametrize("stop", [preemption.Preempted, KeyboardInterrupt])
def test_stopped_run_does_not_wait_for_server(
    stop: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder_module, "STOPPED_PATIENCE_S", 0.1)
    settings = TrackingSettings(uri="http://127.0.0.1:9", experiment="x", patience_s=20)
    recorder = Recorder(settings, str(tmp_path), lambda line: None)
    recorder.start(fake_run.record())

    def run() -> None:
        try:
            raise stop
        finally:
            recorder.finish({}, "KILLED")

    started = time.monotonic()
    with pytest.raises(stop):
        run()
    assert time.monotonic() - started < settings.patience_s
    assert "is incomplete" in recorder.warnings[0]


def test_disabled_tracking_writes_nothing(tmp_path: Path) -> None:
    recorder = Recorder(TrackingSettings(enabled=False), str(tmp_path))
    recorder.start(fake_run.record())
    recorder.finish({})
    assert list(tmp_path.iterdir()) == []


def test_object_store_requires_a_tracking_server(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"name a tracking server in tracking\.uri"):
        mlflow_client.tracking_uri("s3://bucket/runs")
    assert mlflow_client.tracking_uri("s3://bucket/runs", "http://server") == "http://server"
    assert mlflow_client.tracking_uri(str(tmp_path)) == f"sqlite:///{tmp_path}/mlflow.db"


def test_the_error_for_a_port_in_use_names_the_port(tmp_path: Path) -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"port {port} on 127.0.0.1 cannot be used"):
            ui.find_port("127.0.0.1", port)
    assert ui.find_port("127.0.0.1") > 0


def test_mlflow_server_runs_one_worker_without_job_execution(tmp_path: Path) -> None:
    assert ui.build_server_command(str(tmp_path), "127.0.0.1", 5000)[-2:] == ["--workers", "1"]
    assert mlflow_client.ENVIRONMENT["MLFLOW_SERVER_ENABLE_JOB_EXECUTION"] == "false"


# ---- tags, data, this machine --------------------------------------------------------------------
def test_runs_can_be_filtered_and_sorted_by_tags_and_metrics(
    recorded: Any,
) -> None:
    runs = recorded.after.runs
    keys = {s.id: s.key for s in fake_run.stages()}
    run, method = runs["", ""].data.tags, runs["hat-small", ""].data.tags
    shared = {
        "stream": "shapes, birds, leaves, roots",
        "scenario": "task",
        "backbone": "vit_tiny_patch16_224",
        "seed": "3",
        "protocol": "test",
        "git_commit": "feed",
        "mlflow.source.git.commit": "feed",
        "version.torch": "2.14.1",
        "version.python": "3.11.7",
    }
    assert {
        **shared,
        "accrete.kind": "run",
        "methods": "meat, hat, finetune",
        "stage.backbone": keys["backbone"],
    }.items() <= run.items()
    assert {
        **shared,
        "accrete.kind": "method",
        "methods": "hat",
        "stage.birds/train": keys["hat-small/birds/train"],
        "stage.roots/evaluate": keys["hat-small/roots/evaluate"],
    }.items() <= method.items()
    client, _, experiment = mlflow_client.open_store(recorded.storage)
    best = client.search_runs(
        [experiment],
        "tags.`accrete.kind` = 'method' and tags.seed = '3' and dataset.name = 'plants' and "
        "dataset.context = 'test'",
        order_by=["metrics.average_accuracy DESC"],
    )
    assert [r.data.tags["label"] for r in best] == ["meat", "hat-small", "finetune"]


def test_runs_record_their_data_sets_with_context(recorded: Any) -> None:
    def read(label: Any, task: Any = "") -> Any:
        return {
            (d.dataset.name, d.tags[0].value)
            for d in recorded.after.runs[label, task].inputs.dataset_inputs
        }

    assert read("meat", "birds") == {("birds", "train"), ("birds", "test")}
    assert read("meat", "leaves") == {("plants", "train"), ("plants", "test")}
    assert read("meat") == {
        (card, context) for card in ("birds", "plants") for context in ("train", "test")
    }
    assert read("", "backbone") == {("shapes", "train")}
    assert read("", "") == {(card, "stream") for card in ("shapes", "birds", "plants")}


def test_local_system_metrics_are_recorded_during_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL", "0.02")
    recorder = Recorder(
        TrackingSettings(system_metrics=True),
        str(tmp_path),
        identity=run_writer.RunIdentity(pictures=False),
    )
    record: Any = {**fake_run.record(), "stages": []}
    recorder.start(record, watch=True)
    client, _, experiment = mlflow_client.open_store(str(tmp_path))

    def sampled() -> Any:
        runs = client.search_runs([experiment], "tags.`accrete.kind` = 'run'")
        return {name for r in runs for name in r.data.metrics if name.startswith("system/")}

    while not sampled():
        time.sleep(0.05)
    machine = recorder.system_metrics
    recorder.finish({})
    assert {
        "system/cpu_utilization_percentage",
        "system/system_memory_usage_megabytes",
        "system/network_receive_megabytes",
    } <= sampled()
    assert machine is not None
    assert not machine.alive
    assert recorder.warnings == []


@pytest.mark.parametrize("is_on", [True, False])
def test_worker_system_metrics_are_recorded_only_if_enabled(is_on: bool, tmp_path: Path) -> None:
    recorder = Recorder(
        TrackingSettings(system_metrics=is_on),
        str(tmp_path),
        identity=run_writer.RunIdentity(pictures=False),
    )
    record: Any = {**fake_run.record(), "stages": []}
    recorder.start(record)
    for cpu in (0.25, 0.5):
        sample = {"node": "node-7", "cpu": cpu, "memory_bytes": 2_000_000, "gpus": {}}
        recorder.sample(sample)
    recorder.finish({})
    client, _, experiment = mlflow_client.open_store(str(tmp_path))
    [run] = client.search_runs([experiment], "tags.`accrete.kind` = 'run'")
    name = "system/node-7/cpu_utilization_percentage"
    if not is_on:
        assert name not in run.data.metrics
        return
    history = client.get_metric_history(run.info.run_id, name)
    assert sorted(point.value for point in history) == [25.0, 50.0]
    assert run.data.metrics["system/node-7/system_memory_usage_megabytes"] == 2.0
    assert recorder.warnings == []


def test_sampler_restarts_after_outage_and_respects_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[bool] = []

    class Sampler:
        def __init__(self, run: Any, uri: Any) -> None:
            self.alive = len(started) > 0  # the first one ends at once
            started.append(True)

        def end(self) -> None:
            started.append(False)

    monkeypatch.setattr("pipeline.tracking.recorder.SystemMetrics", Sampler)
    for settings, watch, expected in (
        (TrackingSettings(system_metrics=True), True, [True, True, False]),
        (TrackingSettings(), True, []),
        (TrackingSettings(system_metrics=True), False, []),
    ):
        started.clear()
        recorder = Recorder(
            settings, str(tmp_path), identity=run_writer.RunIdentity(pictures=False)
        )
        name = f"x{len(list(tmp_path.iterdir()))}{watch}{settings.system_metrics}"
        record: Any = {**fake_run.record(name), "stages": []}
        recorder.start(record, watch=watch)
        recorder.finish({})
        assert started == expected


def test_missing_psutil_gives_a_warning_and_a_complete_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "psutil", None)
    recorder = Recorder(
        TrackingSettings(system_metrics=True),
        str(tmp_path),
        identity=run_writer.RunIdentity(pictures=False),
    )
    record: Any = {**fake_run.record(), "stages": []}
    recorder.start(record, watch=True)
    recorder.finish({"report.html": b"a page"})
    assert recorder.warnings == [
        "tracking.system_metrics needs the package psutil, which is not installed; install "
        "`.[monitor]`, or leave the setting off"
    ]
    client, _, experiment = mlflow_client.open_store(str(tmp_path))
    assert [r.info.status for r in client.search_runs([experiment])] == ["FINISHED"]


def test_warning_is_suppressed_even_if_filters_change_meanwhile() -> None:
    from pipeline.tracking import publish

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with publish.without_warning("Failed to infer"):
            warnings.simplefilter("always", UserWarning)  # as some packages do on import
            warnings.warn("Failed to infer signature", stacklevel=1)
            warnings.warn("another one", stacklevel=1)
    assert [str(entry.message) for entry in caught] == ["another one"]
