"""Tests of the MLflow record of a search: nested trials, curves, the winner, and rebuilding it from
the store without duplicates."""

import json
import shutil
from pathlib import Path
from typing import Any

import fake_run
import pytest
from fake_mlflow import FakeMlflow

from pipeline.config.settings import TrackingSettings
from pipeline.results.trials import Winner
from pipeline.tracking import mlflow_client, outbox, ui
from pipeline.tracking.search_recorder import SearchRecorder, search_identity
from workers.errors import UserError

CHILDREN = 1 + 3 + 3 * 4  # runs below a trial with a graph: backbone, methods, tasks


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox, "FIRST_S", 0.001)
    monkeypatch.setattr(outbox, "LONGEST_S", 0.005)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


def search_record(**changes: Any) -> Any:
    graph = fake_run.record("base")
    provenance = {"git_commit": "abc123", "packages": {"torch": "2.14.1"}, "python": "3.11"}
    return {
        "name": "find",
        "created": "2026-01-02T03:04:05+0000",
        "base": "configs/x.yaml",
        "config": graph["config"],
        "space": {
            "methods.meat.lambda": {"dist": "uniform", "low": 0.5, "high": 1.0},
            "train.lr": {"dist": "loguniform", "low": 1e-4, "high": 0.1},
        },
        "settings": {
            "protocol": "end_of_stream",
            "algorithm": "tpe",
            "scheduler": "asha",
            "objectives": ["accuracy"],
            "tolerance": 0.0,
            "budget": {"trials": 5, "hours": None},
            "seed": 1,
        },
        "provenance": provenance,
        "sessions": [],
        **changes,
    }


def trial_record(number: Any, accuracies: Any, status: Any = "finished", **changes: Any) -> Any:
    results = [
        {"task": t["name"], "position": i, "accuracy": a, "bytes": 1000.0 * (i + 1), "per_task": {}}
        for i, (t, a) in enumerate(zip(fake_run.TASKS, accuracies, strict=False))
    ]
    return {
        "number": number,
        "phase": "",
        "params": {"methods.meat.lambda": 0.5 + 0.1 * number, "train.lr": 0.001},
        "status": status,
        "message": "",
        "results": results,
        "stages": {"run": 4, "reused": 3},
        "device_s": 3.5,
        "wall_s": 4.0,
        "started": "2026-01-02T03:04:05",
        "ended": None,
        "graph": fake_run.record(f"find-{number:04d}"),
        **changes,
    }


TRIALS = [
    trial_record(0, [0.9, 0.7]),
    trial_record(1, [0.9, 0.8]),
    trial_record(2, [0.5], "stopped"),
    trial_record(3, [], "failed", message="stage meat/birds/train failed: no memory", graph=None),
    trial_record(4, [0.9, 0.75]),
]
WINNER: Winner = {
    "trial": 1,
    "params": TRIALS[1]["params"],
    "accuracy": 0.8,
    "bytes": 2000.0,
    "config": "winner.yaml",
    "tests": [
        {
            "seed": 0,
            "run": "find-winner-0",
            "average_accuracy": 0.78,
            "forgetting": 0.0,
            "bytes_per_task": 1.0,
        }
    ],
    "pareto": [1],
}
FILES = {"search.html": b"a page", "winner.yaml": b"name: x\n"}


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A storage with the search's records and results; its trials share all stages."""
    folder = tmp_path_factory.mktemp("storage")
    fake_run.write(str(folder))
    search_folder = folder / "searches" / "find"
    (search_folder / "trials").mkdir(parents=True)
    (search_folder / "search.json").write_text(json.dumps(search_record()))
    (search_folder / "winner.json").write_text(json.dumps(WINNER))
    for name, data in FILES.items():
        (search_folder / name).write_bytes(data)
    for trial in TRIALS:
        (search_folder / "trials" / f"{trial['number']:04d}.json").write_text(json.dumps(trial))
    return str(folder)


def record_into(
    fake: Any,
    storage: Any,
    monkeypatch: pytest.MonkeyPatch,
    trials: Any = TRIALS,
    winner: Any = WINNER,
    **changes: Any,
) -> Any:
    monkeypatch.setattr(mlflow_client, "open_store", fake.open_store)
    lines: list[str] = []
    recorder = SearchRecorder(TrackingSettings(), storage, lines.append)
    recorder.start(search_record(**changes))
    for trial in trials:
        recorder.trial(trial)
    recorder.finish(FILES, winner)
    return recorder


@pytest.fixture
def recorded(storage: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    fake = FakeMlflow()
    recorder = record_into(fake, storage, monkeypatch)
    assert recorder.warnings == []
    return fake, recorder


def test_trials_nest_in_search_and_graphs_in_trials(recorded: Any) -> None:
    contents = recorded[0].contents()
    assert {way[:2] for way in contents if len(way) > 1} == {
        ("find", f"find-{n:04d}") for n in range(5)
    }
    assert ("find", "find-0001", "meat (find-0001)", "birds") in contents
    assert len(contents) == 1 + 5 + 4 * CHILDREN  # one trial has no graph


def test_search_run_records_tags_parameters_files_and_data_sets(recorded: Any) -> None:
    run = recorded[0].run_named("find")
    assert (
        run.tags["accrete.search"]
        == search_identity(search_record())
        != search_identity(search_record(space={}))
    )
    expected_tags = {
        "accrete.kind": "search",
        "protocol": "end_of_stream",
        "algorithm": "tpe",
        "methods": "meat, hat, finetune",
        "stream": "shapes, birds, leaves, roots",
        "scenario": "task",
        "backbone": "vit_tiny_patch16_224",
        "git_commit": "abc123",
        "version.torch": "2.14.1",
    }
    assert expected_tags.items() <= run.tags.items()
    assert run.params["space.methods.meat.lambda"] == "{dist: uniform, high: 1.0, low: 0.5}"
    assert run.params["settings.budget.trials"] == "5"
    assert run.files == FILES
    assert {(name, context) for (name, _), context in run.inputs.items()} == {
        (c, u) for c in ("birds", "plants") for u in ("train", "validation")
    }
    assert "5 trials" in run.tags["mlflow.note.content"]
    assert "3 finished, 1 stopped, 1 failed" in run.tags["mlflow.note.content"]


def test_trial_runs_record_parameters_curves_and_status(recorded: Any) -> None:
    fake, _ = recorded
    first = fake.run_named("find-0000")
    assert first.params == {"methods.meat.lambda": "0.5", "train.lr": "0.001"}
    assert [(step, value) for step, _, value in first.points["accuracy"]] == [(1, 0.9), (2, 0.7)]
    assert [(step, value) for step, _, value in first.points["bytes"]] == [(1, 1000), (2, 2000)]
    assert [value for _, _, value in first.points["device_s"]] == [3.5]
    assert first.tags["protocol"] == "validation, end_of_stream"
    assert first.tags["methods"] == "meat, hat, finetune"
    assert [fake.run_named(f"find-{n:04d}").status for n in range(5)] == [
        "FINISHED",
        "FINISHED",
        "KILLED",
        "FAILED",
        "FINISHED",
    ]
    failed = fake.run_named("find-0003")
    assert failed.tags["message"] == "stage meat/birds/train failed: no memory"
    assert (
        "It failed: stage meat/birds/train failed: no memory" in failed.tags["mlflow.note.content"]
    )


def test_validation_results_of_trials_are_not_recorded_as_test_results(recorded: Any) -> None:
    below = [r for r in recorded[0].runs.values() if r.tags.get("label")]
    assert {r.tags["accrete.kind"] for r in below} == {"trial-method", "trial-task"}
    assert {r.tags["protocol"] for r in below} == {"validation, end_of_stream"}
    assert {context for r in below for context in r.inputs.values()} == {"train", "validation"}


def test_trials_record_no_files(recorded: Any) -> None:
    assert not any(r.files for r in recorded[0].runs.values() if r.name != "find")


def test_search_run_records_best_accuracy_of_finished_trials(recorded: Any) -> None:
    points = recorded[0].run_named("find").points
    assert [(step, value) for step, _, value in points["accuracy"]] == [
        (0, 0.7),
        (1, 0.8),
        (4, 0.75),
    ]
    assert [(step, value) for step, _, value in points["best_accuracy"]] == [
        (0, 0.7),
        (1, 0.8),
        (4, 0.8),
    ]


def test_winner_tag_moves_to_new_winner(
    recorded: Any, storage: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake, _ = recorded

    def winners() -> Any:
        return [r.name for r in fake.runs.values() if r.tags.get("winner") == "true"]

    run = fake.run_named("find")
    assert winners() == ["find-0001"]
    assert (run.tags["winner_run"], run.tags["winner_accuracy"]) == (
        fake.run_named("find-0001").id,
        "0.800000",
    )
    assert [(step, value) for step, _, value in run.points["winner_test_accuracy"]] == [(0, 0.78)]
    record_into(fake, storage, monkeypatch, winner={**WINNER, "trial": 4, "accuracy": 0.75})
    assert winners() == ["find-0004"]
    assert run.tags["winner_run"] == fake.run_named("find-0004").id
    record_into(fake, storage, monkeypatch, winner=None)
    assert winners() == []
    assert "winner_run" not in run.tags


def test_trials_recorded_while_running_end_with_the_same_record(
    storage: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = [
        trial_record(0, [], "running", graph=None),
        trial_record(0, [0.9], "running"),
        trial_record(1, [0.9, 0.8]),
    ]
    fake = FakeMlflow()
    record_into(fake, storage, monkeypatch, [*running, *TRIALS])
    whole = FakeMlflow()
    record_into(whole, storage, monkeypatch)
    assert fake.contents() == whole.contents()


def test_search_with_larger_budget_continues_the_same_run(
    recorded: Any, storage: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake, _ = recorded
    more = {**search_record()["settings"], "budget": {"trials": 6}}
    recorder = record_into(
        fake, storage, monkeypatch, [*TRIALS, trial_record(5, [0.9, 0.9])], settings=more
    )
    assert recorder.warnings == []
    run = fake.run_named("find")
    assert [(step, value) for step, _, value in run.points["best_accuracy"]][-1] == (5, 0.9)
    assert "6 trials" in run.tags["mlflow.note.content"]


def test_per_task_search_has_one_curve_per_task(
    storage: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeMlflow()
    trials = [{**t, "phase": "birds" if t["number"] < 2 else "leaves"} for t in TRIALS]
    record_into(fake, storage, monkeypatch, trials)
    points = fake.run_named("find").points
    assert [value for _, _, value in points["best_accuracy/birds"]] == [0.7, 0.8]
    assert [value for _, _, value in points["best_accuracy/leaves"]] == [0.75]
    assert fake.run_named("find-0000").tags["phase"] == "birds"


def test_rebuild_from_store_is_complete_and_idempotent(
    recorded: Any, storage: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = recorded[0].contents()
    fake = FakeMlflow()
    monkeypatch.setattr(mlflow_client, "open_store", fake.open_store)
    extra = {
        path.name: path.read_bytes()
        for path in (Path(storage) / "searches" / "find").glob("*.json")
    }
    expected["find",] = (*expected["find",][:5], {**FILES, **extra})
    for _ in range(2):
        assert SearchRecorder.rebuild(storage, "find").warnings == []
        assert fake.contents() == expected
    with pytest.raises(UserError, match="there is no search 'other'"):
        SearchRecorder.rebuild(storage, "other")


def test_rebuilt_record_of_a_search_without_a_winner_is_not_finished(
    storage: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = shutil.copytree(storage, tmp_path / "copy")
    (copy / "searches" / "find" / "winner.json").unlink()
    monkeypatch.setattr(mlflow_client, "open_store", FakeMlflow().open_store)
    statuses = []
    finish = SearchRecorder.finish

    def noting(recorder: SearchRecorder, files: Any, winner: Any, status: str) -> None:
        statuses.append(status)
        finish(recorder, files, winner, status)

    monkeypatch.setattr(SearchRecorder, "finish", noting)
    SearchRecorder.rebuild(storage, "find")
    SearchRecorder.rebuild(str(copy), "find")
    assert statuses == ["FINISHED", "KILLED"]


@pytest.mark.few(1)
@pytest.mark.parametrize("how", ["before", "after"])
def test_complete_search_is_recorded_once_despite_outage(
    recorded: Any, storage: Any, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    expected = recorded[0].contents()
    for number in range(3, len(recorded[0].calls), 97):
        fake = FakeMlflow(lambda n, name, at=number: how if at <= n < at + 3 else "")
        recorder = record_into(fake, storage, monkeypatch)
        assert recorder.warnings == []
        assert fake.contents() == expected, f"call {number}"


def test_disabled_tracking_writes_nothing(storage: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeMlflow()
    monkeypatch.setattr(mlflow_client, "open_store", fake.open_store)
    recorder = SearchRecorder(TrackingSettings(enabled=False), storage)
    recorder.start(search_record())
    recorder.trial(TRIALS[0])
    recorder.finish(FILES, WINNER)
    assert fake.calls == recorder.links() == []


@pytest.mark.slow
def test_search_in_storage_database_is_queryable_and_listed_for_ui(
    tmp_path: Path,
) -> None:
    fake_run.write(str(tmp_path))
    for _ in range(2):
        recorder = SearchRecorder(TrackingSettings(), str(tmp_path))
        recorder.start(search_record())
        for trial in (TRIALS[1], TRIALS[3]):
            recorder.trial(trial)
        recorder.finish(FILES, WINNER)
        assert recorder.warnings == []
    client, _, experiment = mlflow_client.open_store(str(tmp_path))
    trials = client.search_runs(
        [experiment],
        "tags.`accrete.kind` = 'trial' and tags.protocol like '%end_of_stream'",
        order_by=["metrics.accuracy DESC"],
    )
    assert [(t.info.run_name, t.info.status) for t in trials] == [
        ("find-0001", "FINISHED"),
        ("find-0003", "FAILED"),
    ]
    assert [
        t.info.run_name
        for t in client.search_runs(
            [experiment], "dataset.context = 'validation' and tags.`accrete.kind` = 'search'"
        )
    ] == ["find"]
    assert [
        (m.step, m.value) for m in client.get_metric_history(trials[0].info.run_id, "accuracy")
    ] == [(1, 0.9), (2, 0.8)]
    assert recorder.links("http://server")[0].startswith("record: http://server/#/experiments/")
    assert ui.list_recorded_runs(client, experiment, "search") == [
        ("find", trials[0].data.tags["mlflow.parentRunId"], [t.info.run_id for t in trials])
    ]


def test_recorded_parameter_is_not_overwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeMlflow()
    monkeypatch.setattr(mlflow_client, "open_store", fake.open_store)
    calls = mlflow_client.MlflowClientAdapter("", TrackingSettings())
    calls.log_params(calls.create("x", {"a": "b"}), {"lr": 1})
    calls.log_params(calls.find({"a": "b"})[0], {"lr": 2, "epochs": 3})
    assert fake.run_named("x").params == {"lr": "1", "epochs": "3"}
