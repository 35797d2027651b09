"""A trial of a search, without Ray: what it reads, what it shares, and what its record says however
it ended."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline import config
from pipeline.graph import build
from pipeline.graph.run import Event
from pipeline.graph.store import Store
from pipeline.launch import executor
from pipeline.search import trial
from pipeline.search.space import with_params
from tests import small_run
from workers import evaluate
from workers.data import feed
from workers.dist import Group
from workers.errors import UserError

PARAMS = {"methods.meat.lambda": 0.8}


@pytest.fixture
def plan(tmp_path: Path) -> trial.Plan:
    body = small_run.make_body(
        tmp_path,
        small_run.make_cards(tmp_path, ["a", "b", "c"]),
        methods=["meat"],
        data={"val_fraction": 0.2},
    )
    return trial.Plan("s", body["storage"], body, {}, ("a", "b", "c"))


def run(
    plan: trial.Plan, number: int = 0, params: dict[str, Any] = PARAMS, **more: Any
) -> list[dict[str, Any]]:
    told: list[dict[str, Any]] = []
    trial.run_trial(plan, number, params, told.append, **more)
    return told


def record(plan: trial.Plan, number: int = 0) -> dict[str, Any]:
    found = trial.read_record(plan.storage, plan.name, number)
    assert found is not None
    return found


def test_a_trial_is_judged_on_validation_images_alone(
    plan: trial.Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    splits = []

    class Watched(feed.Feed):
        def __init__(self, job: Any, tasks: Any, split: str, *rest: Any, **more: Any) -> None:
            splits.append((job.step, split))
            super().__init__(job, tasks, split, *rest, **more)

    monkeypatch.setattr(evaluate, "Feed", Watched)
    monkeypatch.setattr("workers.loop.Feed", Watched)
    told = run(plan)
    assert ("evaluate", "val") in splits
    assert not {split for _, split in splits} & {"test"}
    assert [t["task"] for t in told] == ["a", "b", "c"]
    assert told[-1]["accuracy"] == pytest.approx(sum(told[-1]["per_task"].values()) / 3)
    manifest = small_manifest(plan, "meat/c/evaluate")
    assert {row["total"] for row in manifest["result"]["rows"]} <= set(range(2, 17)), (
        "a fifth of 40 images, by hash"
    )


def small_manifest(plan: trial.Plan, stage_id: str) -> dict[str, Any]:
    key = next(s["key"] for s in record(plan)["graph"]["stages"] if s["id"] == stage_id)
    return json.loads(Path(plan.storage, "stages", key, "manifest.json").read_text())


def test_what_is_trained_is_what_a_run_of_the_same_settings_trains(plan: trial.Plan) -> None:
    run(plan)
    settings = config.check({**with_params(plan.body, PARAMS), "name": "run"}, "run")
    graph, _ = build.graph_of(settings, Store(plan.storage))
    keys = {s["id"]: s["key"] for s in record(plan)["graph"]["stages"]}
    for stage in graph:
        if stage.step == "report":
            assert stage.id not in keys
        else:
            assert (keys[stage.id] == stage.key) == (stage.step != "evaluate"), stage.id


def test_equal_prefixes_are_run_once(plan: trial.Plan) -> None:
    run(plan)
    assert record(plan)["stages"] == {"run": 3 + 1 + 3 + 3, "reused": 0}
    run(plan, 1, {"methods.meat.lambda": 0.9})
    assert record(plan, 1)["stages"] == {"run": 6, "reused": 4}, "the data and the backbone stand"
    run(plan, 2, PARAMS)
    assert record(plan, 2)["stages"] == {"run": 0, "reused": 10}
    assert record(plan, 2)["device_s"] == 0 < record(plan)["device_s"]
    assert record(plan, 2)["results"] == record(plan)["results"]


def test_a_stage_that_another_process_has_run_by_now_counts_as_reused(plan: trial.Plan) -> None:
    run(plan)
    settings = config.check({**with_params(plan.body, PARAMS), "name": "s-0000"}, "s")
    graph, _ = build.graph_of(settings, Store(plan.storage), {}, "val")
    count = trial.Count()
    for stage in graph:
        if stage.step != "ingest":
            count.event(
                None,
                Event(
                    "done",
                    stage.id,
                    body=executor.run_stage(stage.job, Group(), lambda event: None),
                ),
            )  # type: ignore[arg-type]
    assert (count.run, count.reused, count.seconds) == (0, 7, 0.0)


def test_a_trial_that_ended_tells_again_what_it_found_and_runs_nothing(
    plan: trial.Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = run(plan)
    monkeypatch.setattr(trial.Runner, "run", lambda *_: pytest.fail("ran again"))
    again = run(plan)
    assert [{k: v for k, v in t.items() if k != "record"} for t in again] == [
        {k: v for k, v in t.items() if k != "record"} for t in told
    ]


def test_a_trial_that_was_killed_goes_on(plan: trial.Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(result: dict[str, Any]) -> None:
        if result["task"] == "b":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trial.run_trial(plan, 0, PARAMS, killed)
    cut = record(plan)
    assert cut["status"] == "running"
    assert [r["task"] for r in cut["results"]] == ["a", "b"]
    ran: list[str] = []
    step = executor.run_stage

    def noted(job: Any, *rest: Any) -> Any:
        ran.extend([job.task.name] if job.step == "train" else [])
        return step(job, *rest)

    monkeypatch.setattr(executor, "run_stage", noted)
    run(plan)
    assert record(plan)["status"] == "finished"
    assert record(plan)["stages"] == {"run": 10, "reused": 0}, (
        "what it ran before it was killed is its own"
    )
    assert record(plan)["device_s"] > cut["device_s"] > 0
    assert ran == ["c"]


def test_a_trial_that_fails_says_why_each_time(plan: trial.Plan) -> None:
    bad = {"methods.meat.train.lr": 1e30}
    for _ in range(2):
        with pytest.raises(trial.TrialFailed, match=r"lower train\.lr"):
            run(plan, 3, bad)
        assert record(plan, 3)["status"] == "failed"
        assert "\n" not in record(plan, 3)["message"]
    with pytest.raises(trial.TrialFailed, match="epochs"):
        run(plan, 4, {"train.epochs": -1})
    assert record(plan, 4)["graph"] is None


def test_a_damaged_record_begins_anew(plan: trial.Plan) -> None:
    run(plan)
    path = Path(trial.record_path(plan.storage, plan.name, 0))
    path.write_text(path.read_text()[:100])
    run(plan)
    assert record(plan)["stages"] == {"run": 0, "reused": 10}


def test_fewer_tasks_leave_the_others_alone(plan: trial.Plan) -> None:
    from dataclasses import replace

    told = run(replace(plan, tasks=("a", "b")))
    assert [t["task"] for t in told] == ["a", "b"]
    done = {
        s["id"]
        for s in record(plan)["graph"]["stages"]
        if Path(plan.storage, "stages", s["key"], "manifest.json").exists()
    }
    assert not {i for i in done if "/c" in i}


def test_a_search_without_validation_images_cannot_be_judged(plan: trial.Plan) -> None:
    with pytest.raises(trial.TrialFailed, match="val"):
        run(plan, 5, {"data.val_fraction": 0})


def test_a_trial_that_is_stopped_after_its_last_task_is_finished(plan: trial.Plan) -> None:
    def stopped(result: dict[str, Any]) -> None:
        if result["task"] == "c":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trial.run_trial(plan, 0, PARAMS, stopped)
    assert record(plan)["status"] == "finished"
    assert record(plan)["ended"]


def test_a_population_learns_in_rounds_and_keeps_what_each_trial_found_last(
    plan: trial.Plan,
) -> None:
    plan = replace(plan, each=True, own=plan.tasks)
    points = [{"methods.meat.lambda": share} for share in (0.6, 0.9)]
    for number, params in enumerate(points):
        trial.run_trial(replace(plan, until=1), number, params, lambda result: None)
    assert [record(plan, n)["status"] for n in (0, 1)] == ["running"] * 2
    trial.run_trial(replace(plan, until=2), 0, points[0], lambda result: None, parent=0)
    trial.run_trial(replace(plan, until=2), 1, points[0], lambda result: None, parent=0)
    assert record(plan, 1)["results"] == record(plan, 0)["results"], (
        "the same parameters on the same first task"
    )
    assert record(plan, 1)["history"] == {"a": points[0], "b": points[0]}
    assert [one["params"] for one in record(plan, 1)["rounds"]] == [points[1], points[0]], (
        "what it has tried itself"
    )
    for number, params in enumerate(points):
        trial.run_trial(replace(plan, until=3), number, params, lambda result: None, parent=number)
    ended = [record(plan, n) for n in (0, 1)]
    assert [one["status"] for one in ended] == ["finished"] * 2
    assert [one["history"]["c"] for one in ended] == points
    assert all(
        one["rounds"][-1] == {"params": one["params"], "accuracy": one["results"][-1]["accuracy"]}
        for one in ended
    )
    told: list[dict[str, Any]] = []
    trial.run_trial(replace(plan, until=2), 1, points[1], told.append, parent=0)
    assert ([r["task"] for r in told], record(plan, 1)) == (["a", "b", "c"], ended[1]), (
        "a round that is over is told again"
    )


def test_a_round_that_was_killed_goes_on_from_the_same_parent(plan: trial.Plan) -> None:
    plan = replace(plan, each=True, own=plan.tasks)
    for number in (0, 1):
        trial.run_trial(
            replace(plan, until=1),
            number,
            {"methods.meat.lambda": 0.6 + 0.3 * number},
            lambda result: None,
        )

    def killed(self: Any, stage_id: str) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trial.Runner, "run", killed)
        with pytest.raises(KeyboardInterrupt):
            trial.run_trial(replace(plan, until=2), 1, PARAMS, lambda result: None, parent=0)
    trial.run_trial(replace(plan, until=2), 1, PARAMS, lambda result: None, parent=0)
    assert record(plan, 1)["history"] == {"a": {"methods.meat.lambda": 0.6}, "b": PARAMS}
    assert len(record(plan, 1)["rounds"]) == len(record(plan, 1)["results"]) == 2


def test_garbage_is_what_no_run_and_no_search_needs(plan: trial.Plan, tmp_path: Path) -> None:
    run(plan)
    keys = {s["key"] for s in record(plan)["graph"]["stages"]}
    store, place = Store(plan.storage), Path(trial.folder(plan.storage, plan.name))
    (place / "search.json").write_text(
        json.dumps({"space": {}, "settings": {}, "config": {}, "provenance": {}, "sessions": []})
    )
    assert store.garbage() == []
    place.rename(tmp_path / "elsewhere")
    assert {name.split("/")[1] for name, _ in store.garbage()} == keys
    (tmp_path / "elsewhere").rename(place)
    Path(trial.record_path(plan.storage, plan.name, 0)).write_text("{")
    with pytest.raises(UserError, match="what it needs is not known"):
        store.garbage()
