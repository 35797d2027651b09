"""Tests of a search trial without Ray: its data, reuse of stages, records, kills and rounds."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pipeline.app.garbage import find_garbage
from pipeline.config import settings as config
from pipeline.graph import build
from pipeline.graph.store import Store
from pipeline.graph.walk import Event, EventKind, Walk
from pipeline.launch import local
from pipeline.results.trials import Trial, TrialResult, best
from pipeline.search import trial
from pipeline.search.space import with_params
from tests import small_run
from workers import evaluate, loop
from workers.data import feed
from workers.dist import Group
from workers.errors import UserError
from workers.job import StageJob

PARAMS = {"methods.meat.lambda": 0.8}


@pytest.fixture
def plan(tmp_path: Path) -> trial.PhasePlan:
    body = small_run.make_body(
        tmp_path,
        small_run.make_cards(tmp_path, ["a", "b", "c"]),
        methods=["meat"],
        data={"val_fraction": 0.2},
    )
    return trial.PhasePlan("s", body["storage"], body, {}, ("a", "b", "c"))


def run(
    plan: trial.PhasePlan,
    number: int = 0,
    params: dict[str, Any] = PARAMS,
    parent: int | None = None,
) -> list[TrialResult]:
    """Run a trial; return the results that it reports."""
    results: list[TrialResult] = []
    trial.run_trial(plan, number, params, results.append, parent)
    return results


def record(plan: trial.PhasePlan, number: int = 0) -> Trial:
    """Return the stored record of a trial."""
    body = trial.read_trial_record(plan.storage, plan.name, number)
    assert body is not None
    return body


def stage_keys(plan: trial.PhasePlan, number: int = 0) -> dict[str, str]:
    """Return stage id -> key of a trial's graph."""
    graph = record(plan, number)["graph"]
    assert graph is not None
    return {stage["id"]: stage["key"] for stage in graph["stages"]}


def tasks_of(results: list[TrialResult]) -> list[str]:
    return [result["task"] for result in results]


def test_trial_is_evaluated_only_on_validation_images(
    plan: trial.PhasePlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    splits: list[tuple[str, str]] = []

    class Watched(feed.Feed):
        def __init__(self, job: Any, tasks: Any, split: str, *rest: Any, **more: Any) -> None:
            splits.append((job.step, split))
            super().__init__(job, tasks, split, *rest, **more)

    monkeypatch.setattr(evaluate, "Feed", Watched)
    monkeypatch.setattr("workers.loop.Feed", Watched)
    results = run(plan)
    assert ("evaluate", "val") in splits
    assert "test" not in {split for _, split in splits}
    assert tasks_of(results) == ["a", "b", "c"]
    last = results[-1]
    assert last["accuracy"] == pytest.approx(sum(last["per_task"].values()) / 3)
    manifest = small_manifest(plan, "meat/c/evaluate")
    for row in manifest["result"]["rows"]:
        assert 2 <= row["total"] <= 16, "about a fifth of 40 images, selected by hash"


def small_manifest(plan: trial.PhasePlan, stage_id: str) -> dict[str, Any]:
    """Return the manifest of a stage of trial 0."""
    path = Path(plan.storage, "stages", stage_keys(plan)[stage_id], "manifest.json")
    manifest: dict[str, Any] = json.loads(path.read_text())
    return manifest


def test_trial_and_equal_run_share_training_keys(plan: trial.PhasePlan) -> None:
    run(plan)
    settings = config.check({**with_params(plan.body, PARAMS), "name": "run"}, "run")
    graph, _ = build.build_graph(settings, Store(plan.storage))
    keys = stage_keys(plan)
    for stage in graph:
        if stage.step == "report":
            assert stage.id not in keys
        else:
            assert (keys[stage.id] == stage.key) == (stage.step != "evaluate"), stage.id


def test_equal_stages_of_trials_run_once(plan: trial.PhasePlan) -> None:
    run(plan)
    assert record(plan)["stages"] == {"run": 3 + 1 + 3 + 3, "reused": 0}
    run(plan, 1, {"methods.meat.lambda": 0.9})
    assert record(plan, 1)["stages"] == {"run": 6, "reused": 4}, (
        "the data and the backbone are reused"
    )
    run(plan, 2, PARAMS)
    assert record(plan, 2)["stages"] == {"run": 0, "reused": 10}
    assert record(plan, 2)["device_s"] == 0 < record(plan)["device_s"]
    assert record(plan, 2)["results"] == record(plan)["results"]


def test_stage_run_by_another_process_counts_as_reused(
    plan: trial.PhasePlan,
) -> None:
    run(plan)
    settings = config.check({**with_params(plan.body, PARAMS), "name": "s-0000"}, "s")
    graph, _ = build.build_graph(settings, Store(plan.storage), {}, "val")
    count = trial.Count(settings.cluster, lambda: None)
    for stage in graph:
        if stage.step != "ingest":
            manifest = loop.run_stage(cast(StageJob, stage.job), Group(), lambda event: None)
            count.on_event(cast(Walk, None), Event(EventKind.DONE, stage.id, body=manifest))
    assert (count.run, count.reused, count.seconds) == (0, 7, 0.0)


def test_gpu_seconds_use_the_gpu_share_of_each_step() -> None:
    stages = {"train": {"gpus": 0.5}, "evaluate": {"gpus": 0}}
    cluster = config.ClusterSettings(workers=2, gpus_per_worker=1, stages=stages)
    steps = {"b": "backbone", "m/a/train": "train", "m/a/evaluate": "evaluate"}
    walk = cast(Walk, SimpleNamespace(graph={k: SimpleNamespace(step=v) for k, v in steps.items()}))
    count = trial.Count(cluster, lambda: None)
    for stage_id in steps:
        count.on_event(walk, Event(EventKind.DONE, stage_id, body={"wall_s": 10.0, "workers": 2}))
    assert (count.seconds, count.gpu_seconds) == (60, 20 + 10)
    body = cast(Trial, {"stages": {"run": 3, "reused": 0}, "device_s": 60.0, "gpu_s": 30.0})
    count.resume_from(body)
    assert count.gpu_seconds == 30


def test_time_of_failed_attempts_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    cluster = config.ClusterSettings(workers=2, gpus_per_worker=0.5)
    walk = cast(Walk, SimpleNamespace(graph={"m/a/train": SimpleNamespace(step="train")}))
    changes: list[str] = []
    count = trial.Count(cluster, lambda: changes.append("changed"))
    count.on_progress(Event(EventKind.STARTED, "m/a/train"))
    now[0] += 7
    count.on_event(walk, Event(EventKind.PROGRESS, "m/a/train"))
    count.on_event(walk, Event(EventKind.LOST, "m/a/train"))
    count.on_event(walk, Event(EventKind.FAILED, "m/a/train"))
    assert (count.run, count.seconds, count.gpu_seconds, changes) == (0, 14, 7, ["changed"])


def forgetful(plan: trial.PhasePlan, monkeypatch: pytest.MonkeyPatch) -> trial.PhasePlan:
    """Make each task's accuracy fall by 0.2 with each later task; allow forgetting of 0.25."""

    def fall(store: Store, graph_record: Any, label: str, task: str, position: int) -> TrialResult:
        names = plan.tasks[: position + 1]
        per_task = {name: 0.9 - 0.2 * (position - i) for i, name in enumerate(names)}
        mean = sum(per_task.values()) / len(per_task)
        return {
            "task": task,
            "position": position,
            "accuracy": mean,
            "bytes": 1.0,
            "per_task": per_task,
        }

    monkeypatch.setattr(trial, "compute_result", fall)
    return replace(plan, max_forgetting=0.25)


def test_trial_above_max_forgetting_is_stopped_and_cannot_win(
    plan: trial.PhasePlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = forgetful(plan, monkeypatch)
    results = run(plan)
    assert tasks_of(results) == ["a", "b"], (
        "the scheduler does not get the result that stops the trial"
    )
    ended = record(plan)
    assert tasks_of(ended["results"]) == ["a", "b", "c"], (
        "forgetting of 0.2 after two tasks is allowed"
    )
    assert ended["status"] == "stopped"
    assert ended["message"] == (
        "forgetting of 30.0 % after 3 tasks is more than max_forgetting, 25 %"
    )
    assert ended["ended"]
    assert best([ended]) is None
    monkeypatch.setattr(trial.Runner, "run", lambda *_: pytest.fail("ran again"))
    assert run(plan) == results, "the results of an ended trial are reported again"
    strict = replace(plan, max_forgetting=0.1, name="strict")
    monkeypatch.undo()
    forgetful(plan, monkeypatch)
    assert tasks_of(run(strict)) == ["a"]
    assert tasks_of(record(strict)["results"]) == ["a", "b"]
    assert record(strict)["status"] == "stopped"


def test_ended_trial_reports_its_results_without_running(
    plan: trial.PhasePlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = run(plan)
    monkeypatch.setattr(trial.Runner, "run", lambda *_: pytest.fail("ran again"))
    assert run(plan) == results


def test_interrupted_trial_resumes(plan: trial.PhasePlan, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(result: TrialResult) -> None:
        if result["task"] == "b":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trial.run_trial(plan, 0, PARAMS, interrupt)
    cut = record(plan)
    assert cut["status"] == "running"
    assert tasks_of(cut["results"]) == ["a", "b"]
    trained_tasks: list[str] = []

    def note_and_run(job: Any, *rest: Any) -> Any:
        if job.step == "train":
            trained_tasks.append(job.task.name)
        return loop.run_stage(job, *rest)

    monkeypatch.setattr(local, "run_stage", note_and_run)
    run(plan)
    assert record(plan)["status"] == "finished"
    assert record(plan)["stages"] == {"run": 10, "reused": 0}, (
        "stages that ran before the kill are counted as run"
    )
    assert record(plan)["device_s"] > cut["device_s"] > 0
    assert trained_tasks == ["c"]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), UserError("the evaluation failed")])
def test_stages_before_an_interruption_or_failure_are_counted(
    plan: trial.PhasePlan, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """The trial ends after task b was trained, before the result that includes it."""

    def run_until_b(job: Any, *rest: Any) -> Any:
        if job.step == "evaluate" and job.task.name == "b":
            raise error
        return loop.run_stage(job, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(local, "run_stage", run_until_b)
        with pytest.raises((KeyboardInterrupt, trial.TrialFailed)):
            run(plan)
    cut = record(plan)
    assert tasks_of(cut["results"]) == ["a"]
    published = list(Path(plan.storage, "stages").glob("*/manifest.json"))
    assert cut["stages"] == {"run": len(published), "reused": 0}
    times = [json.loads(path.read_text())["wall_s"] for path in published]
    assert cut["device_s"] >= round(sum(times), 3) > 0
    if cut["status"] == "running":
        run(plan)
        assert record(plan)["stages"] == {"run": 10, "reused": 0}
        assert record(plan)["started"] == cut["started"]
        assert record(plan).get("wall_s", 0.0) > cut.get("wall_s", 0.0) > 0


def test_failed_trial_reports_its_reason_every_time(plan: trial.PhasePlan) -> None:
    bad = {"methods.meat.train.lr": 1e30}
    for _ in range(2):
        with pytest.raises(trial.TrialFailed, match=r"lower methods\.\S+\.lr"):
            run(plan, 3, bad)
        assert record(plan, 3)["status"] == "failed"
        assert "\n" not in record(plan, 3)["message"]
    with pytest.raises(trial.TrialFailed, match="epochs"):
        run(plan, 4, {"train.epochs": -1})
    assert record(plan, 4)["graph"] is None


def test_trial_with_a_damaged_record_starts_again(plan: trial.PhasePlan) -> None:
    run(plan)
    path = Path(trial.record_path(plan.storage, plan.name, 0))
    path.write_text(path.read_text()[:100])
    run(plan)
    assert record(plan)["stages"] == {"run": 0, "reused": 10}


def test_trial_on_some_tasks_does_not_run_the_others(plan: trial.PhasePlan) -> None:
    results = run(replace(plan, tasks=("a", "b")))
    assert tasks_of(results) == ["a", "b"]
    for stage_id, key in stage_keys(plan).items():
        if "/c" in stage_id:
            assert not Path(plan.storage, "stages", key, "manifest.json").exists()


def test_trial_without_validation_images_fails(plan: trial.PhasePlan) -> None:
    with pytest.raises(trial.TrialFailed, match="val"):
        run(plan, 5, {"data.val_fraction": 0})


def test_trial_interrupted_after_its_last_task_is_finished(plan: trial.PhasePlan) -> None:
    def interrupt(result: TrialResult) -> None:
        if result["task"] == "c":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trial.run_trial(plan, 0, PARAMS, interrupt)
    assert record(plan)["status"] == "finished"
    assert record(plan)["ended"]


@pytest.mark.few(1)
def test_population_rounds_record_parameters_and_results_of_each_trial(
    plan: trial.PhasePlan,
) -> None:
    plan = replace(plan, each=True, method_tasks=plan.tasks)
    points = [{"methods.meat.lambda": share} for share in (0.6, 0.9)]
    for number, params in enumerate(points):
        run(replace(plan, until=1), number, params)
    assert [record(plan, number)["status"] for number in (0, 1)] == ["running", "running"]
    run(replace(plan, until=2), 0, points[0], parent=0)
    run(replace(plan, until=2), 1, points[0], parent=0)
    assert record(plan, 1)["results"] == record(plan, 0)["results"], (
        "both used the same parameters from the same parent"
    )
    assert record(plan, 1)["history"] == {"a": points[0], "b": points[0]}
    assert [one["params"] for one in record(plan, 1)["rounds"]] == [points[1], points[0]], (
        "the parameters that the trial itself used"
    )
    for number, params in enumerate(points):
        run(replace(plan, until=3), number, params, parent=number)
        ended = record(plan, number)
        assert ended["status"] == "finished"
        assert ended["history"]["c"] == params == ended["params"]
        accuracy = ended["results"][-1]["accuracy"]
        assert ended["rounds"][-1] == {"params": params, "accuracy": accuracy}
    results = run(replace(plan, until=2), 1, points[1], parent=0)
    assert tasks_of(results) == ["a", "b", "c"], "a finished round is reported again"
    assert record(plan, 1) == ended


def test_interrupted_round_resumes_from_the_same_parent(plan: trial.PhasePlan) -> None:
    plan = replace(plan, each=True, method_tasks=plan.tasks)
    for number in (0, 1):
        run(replace(plan, until=1), number, {"methods.meat.lambda": 0.6 + 0.3 * number})

    def interrupt(runner: trial.Runner, stage_id: str) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trial.Runner, "run", interrupt)
        with pytest.raises(KeyboardInterrupt):
            run(replace(plan, until=2), 1, PARAMS, parent=0)
    run(replace(plan, until=2), 1, PARAMS, parent=0)
    assert record(plan, 1)["history"] == {"a": {"methods.meat.lambda": 0.6}, "b": PARAMS}
    assert len(record(plan, 1)["rounds"]) == len(record(plan, 1)["results"]) == 2


def test_stages_of_a_search_are_not_garbage(plan: trial.PhasePlan, tmp_path: Path) -> None:
    run(plan)
    keys = set(stage_keys(plan).values())
    store = Store(plan.storage)
    search_folder = Path(trial.folder(plan.storage, plan.name))
    state: dict[str, Any] = {
        "space": {},
        "settings": {},
        "config": {},
        "provenance": {},
        "sessions": [],
    }
    (search_folder / "search.json").write_text(json.dumps(state))
    assert find_garbage(store) == []
    search_folder.rename(tmp_path / "elsewhere")
    assert {name.split("/")[1] for name, *_ in find_garbage(store)} == keys
    (tmp_path / "elsewhere").rename(search_folder)
    Path(trial.record_path(plan.storage, plan.name, 0)).write_text("{")
    with pytest.raises(UserError, match="its stages are not known"):
        find_garbage(store)
