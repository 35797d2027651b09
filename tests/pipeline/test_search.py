"""Tests of searches: the search file, errors, suggested points, budgets, and runs on Ray Tune."""

from __future__ import annotations

import io
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import fake_search
import pytest
import yaml
from ray.tune.execution.tune_controller import TuneController
from ray.tune.experiment import Trial as TuneTrial
from ray.tune.search import Searcher

import pipeline
from pipeline.config import settings as config
from pipeline.results.trials import SeedTest, Trial, best, load_search_record
from pipeline.search import run, spec, trial, tune
from pipeline.search.screen import SearchScreen
from tests import small_run
from tests.pipeline.nodes import nodes_of
from tests.pipeline.small_search import SPACE, prepared, written
from workers.errors import UserError
from workers.storage.lock import stage_lock

BAD = [
    ({"spce": {}}, ["spce", "did you mean 'space'"]),
    (
        {"space": {"methods.meat.lambda": {"dist": "normal"}}},
        ["space.methods.meat.lambda", "uniform"],
    ),
    (
        {"space": {"methods.meat.lambda": {"dist": "uniform", "low": 1, "high": 0.5}}},
        ["low 1.0 is not below high 0.5"],
    ),
    ({"space": {}}, ["space"]),
    ({"base": "bse.yaml"}, ["base 'bse.yaml' does not exist"]),
    ({"budget": {}}, ["budget", "no bound"]),
    ({"protocol": "first_k_tasks"}, ["first_tasks"]),
    ({"protocol": "first_k_tasks", "first_tasks": 2}, ["first_tasks is 2", "2 tasks"]),
    ({"first_tasks": 1}, ["first_tasks belongs to protocol first_k_tasks"]),
    ({"protocol": "two_streams"}, ["stream belongs to protocol two_streams"]),
    ({"algorithm": "grid"}, ["budget.trials"]),
    ({"scheduler": "pbt", "algorithm": "tpe"}, ["pbt", "random"]),
    ({"protocol": "per_task", "scheduler": "asha"}, ["per_task", "scheduler none"]),
    (
        {"protocol": "per_task", "space": {"train.epochs": {"dist": "choice", "values": [1]}}},
        ["train.epochs", "from task to task"],
    ),
    ({"scheduler": "asha", "grace": 2}, ["grace is 2", "2 tasks", "scheduler none"]),
    (
        {"scheduler": "asha", "protocol": "first_k_tasks", "first_tasks": 1},
        ["grace is 1", "1 tasks"],
    ),
    ({"scheduler": "pbt", "budget": {"trials": 1}}, ["budget.trials is 1"]),
    ({"scheduler": "pbt", "protocol": "first_k_tasks", "first_tasks": 1}, ["between tasks"]),
    ({"scheduler": "asha", "objectives": ["accuracy", "bytes"]}, ["uses only accuracy"]),
    ({"objectives": ["bytes"]}, ["objectives"]),
    (
        {
            "algorithm": "grid",
            "budget": {"hours": 1},
            "space": {"train.epochs": {"dist": "int", "low": 1, "high": 10**5}},
        },
        ["100000 points"],
    ),
    ({"seeds": [1, 1]}, ["list each once"]),
    ({"budget": {"gpu_hours": 0}}, ["budget.gpu_hours", "0"]),
    (
        {"budget": {"gpu_hours": 2}},
        ["gpu_hours is 2", "take no GPU", "--set cluster.gpus_per_worker=1"],
    ),
    ({"warm_start": "small"}, ["warm_start is 'small'", "this search itself"]),
    ({"warm_start": "nothing"}, ["there is no search 'nothing'"]),
    ({"warm_start": "../nothing"}, ["warm_start"]),
    ({"warm_start": "a", "warm_points": 0}, ["warm_points"]),
    ({"warm_points": 2}, ["warm_points is 2", "leave warm_points out"]),
    ({"warm_start": "a", "algorithm": "grid"}, ["grid", "leave warm_start out"]),
    ({"warm_start": "a", "protocol": "per_task"}, ["per_task", "leave warm_start out"]),
    ({"max_forgetting": 2}, ["max_forgetting", "1"]),
    ({"max_forgetting": 0.1, "protocol": "per_task"}, ["per_task", "max_forgetting"]),
    ({"max_forgetting": 0.1, "scheduler": "pbt"}, ["pbt", "max_forgetting"]),
    (
        {"max_forgetting": 0.1, "protocol": "first_k_tasks", "first_tasks": 1},
        ["1 task", "leave it out"],
    ),
    ({"set": {"data.val_fraction": 0}}, ["validation images", "data.val_fraction"]),
]


@pytest.mark.parametrize(("body", "sentences"), BAD)
def test_invalid_search_is_refused_in_one_sentence(
    tmp_path: Path, body: dict[str, Any], sentences: list[str]
) -> None:
    with pytest.raises(UserError) as error:
        prepared(tmp_path, **body)
    assert "\n" not in str(error.value)
    for text in ("small.yaml", *sentences):
        assert text in str(error.value)
    assert not (tmp_path / "storage" / "searches").exists()


def test_search_stream_replaces_base_stream_and_is_validated(
    tmp_path: Path,
) -> None:
    stream = {"tasks": [{"card": "x"}]}
    with pytest.raises(UserError, match="'x'"):
        prepared(tmp_path, protocol="two_streams", stream=stream)
    with pytest.raises(UserError, match=r"small\.yaml: stream is \[1\]"):
        prepared(tmp_path, protocol="two_streams", stream=stream, set={"stream": [1]})


def test_run_config_is_refused_as_a_search_file(tmp_path: Path) -> None:
    written(tmp_path)
    with pytest.raises(UserError, match="pipeline run"):
        spec.prepare_search(str(tmp_path / "base.yaml"), [])
    with pytest.raises(UserError, match=r"did you mean .*small.yaml"):
        spec.prepare_search(str(tmp_path / "smal.yaml"), [])


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        ([], "this is a config, with no `space`; name one method to search with --method NAME"),
        (["methods=[meat, hat]"], "name one method to search with --method NAME"),
        (["methods=[mete]"], "method 'mete' has no predefined search; did you mean 'meat'"),
    ],
)
def test_search_of_a_config_requires_one_known_method(overrides: list[str], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        spec.load_search_file("configs/streams/digits.yaml", overrides)


def test_method_search_uses_its_predefined_space_and_overrides(tmp_path: Path) -> None:
    more = ["methods=[meat]", f"storage={tmp_path}", "budget.trials=3", "seed=4"]
    settings, body, _ = spec.load_search_file("configs/streams/digits.yaml", more)
    assert settings.name == "digits-meat"
    assert {key.rpartition(".")[2] for key in settings.space} == {
        "lambda", "alpha", "mask_travel", "token_mask_blocks"
    }  # fmt: skip
    assert settings.budget.trials == 3
    assert settings.budget.hours == 6
    assert settings.seed == 4
    assert (body["storage"], body["cluster"]["workers"]) == (str(tmp_path), 1)
    space = "space={methods.meat.alpha: {dist: choice, values: [1, 2]}}"
    changed, _, _ = spec.load_search_file("configs/streams/digits.yaml", [*more, space])
    assert [*changed.space] == ["methods.meat.alpha"]
    conditional, _, _ = spec.load_search_file("configs/streams/digits.yaml", ["methods=adapter"])
    assert conditional.space["methods.adapter.dropout"].when == {
        "methods.adapter.kind": "adaptformer"
    }
    config = tmp_path / "mine.yaml"
    stream = Path.cwd() / "configs" / "streams" / "digits.yaml"
    config.write_text(
        f"extends: {stream}\nname: mine\ncluster: {{workers: 2}}\nmethods: {{hat: }}\n"
    )
    settings, body, _ = spec.load_search_file(str(config), ["methods=[linear]"])
    assert settings.name == "mine-linear"
    assert [*body["methods"]] == ["linear"]
    assert body["cluster"]["workers"] == 2


def test_overrides_reach_the_search_and_its_base(tmp_path: Path) -> None:
    search = prepared(tmp_path, "budget.trials=9", "set={train.epochs: 1}", "name=other")
    assert search.name == "other"
    assert search.settings.budget.trials == 9
    assert search.body["train"]["epochs"] == 1


def test_overrides_unknown_to_the_search_apply_to_its_base(
    tmp_path: Path,
) -> None:
    elsewhere = str(tmp_path / "elsewhere")
    search = prepared(
        tmp_path,
        f"storage={elsewhere}",
        "cluster.workers=2",
        "set.cluster.cpus_per_worker=3",
        "methods.meat.gamma=3",
        "seed=7",
        "set.seed=5",
        set={"train.epochs": 1, "cluster": {"workers": 4, "retries": 1}},
    )
    assert search.storage == elsewhere
    assert search.cluster.workers == 2, "keys are replaced one by one, and the last value counts"
    assert search.cluster.cpus_per_worker == 3
    assert search.cluster.retries == 1
    assert search.settings.seed == 7, "a key of the search itself has priority"
    assert search.body["seed"] == 5
    assert search.body["methods"]["meat"]["gamma"] == 3
    assert search.body["train"]["epochs"] == 1


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("storag=x", "did you mean 'storage'"),
        ("spce.x=1", "did you mean 'space'"),
        ("zzz=1", "neither of a search nor of its base config; there are name, base"),
        ("stream.scenario=class", "set.stream changes that of the base"),
        ("storage", "is not of the form key=value"),
        ("cluster.wrokers=2", "did you mean 'workers'"),
        ("set.zzz=1", "zzz"),
        ("name.x=1", "name"),
    ],
)
def test_an_invalid_override_is_refused_in_one_sentence(
    tmp_path: Path, override: str, sentence: str
) -> None:
    with pytest.raises(UserError) as error:
        prepared(tmp_path, override)
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)


def test_a_search_resumes_with_other_workers_and_other_tracking(tmp_path: Path) -> None:
    spec.write_state(prepared(tmp_path))
    prepared(tmp_path, "cluster.workers=2", "tracking=off")
    with pytest.raises(UserError, match="another space, base, data or code"):
        prepared(tmp_path, "train.epochs=1")


def test_a_different_search_of_the_same_name_is_not_resumed(tmp_path: Path) -> None:
    spec.write_state(prepared(tmp_path))
    prepared(tmp_path, budget={"trials": 50}, seeds=[1], tolerance=0.1)  # these may change
    prepared(tmp_path, "cluster.gpus_per_worker=1", budget={"gpu_hours": 3})
    with pytest.raises(UserError, match="cannot be continued"):
        prepared(tmp_path, max_forgetting=0.1)
    for change in (
        {"space": {"methods.meat.lambda": SPACE["methods.meat.lambda"]}},
        {"seed": 4},
        {"set": {"train.epochs": 1}},
    ):
        with pytest.raises(UserError, match="another space, base, data or code"):
            prepared(tmp_path, **change)
    prepared(tmp_path, name="other", seed=4)


@pytest.mark.parametrize("damage", [lambda file: file.write_bytes(b"{"), Path.unlink])
def test_trials_without_a_valid_search_file_are_refused(
    tmp_path: Path, damage: Callable[[Path], Any]
) -> None:
    search = prepared(tmp_path)
    spec.write_state(search)
    folder = Path(trial.folder(search.storage, search.name))
    (folder / "trials").mkdir()
    damage(folder / "search.json")
    with pytest.raises(UserError, match="not known whether this folder") as error:
        prepared(tmp_path)
    assert str(folder) in str(error.value)


def test_a_resumed_greedy_search_cannot_change_its_number_of_trials(
    tmp_path: Path,
) -> None:
    spec.write_state(prepared(tmp_path, protocol="per_task", budget={"trials": 2}))
    with pytest.raises(UserError, match="another space"):
        prepared(tmp_path, protocol="per_task", budget={"trials": 3})
    prepared(tmp_path, protocol="per_task", budget={"trials": 2, "hours": 1})


def test_winner_is_written_as_a_valid_run_config(tmp_path: Path) -> None:
    search = prepared(tmp_path)
    spec.write_state(search)
    _, plan = next(iter(run.phases(search, {})))
    for number, share in enumerate((0.6, 0.9)):
        params = {"methods.meat.lambda": share, "methods.meat.alpha": 1}
        trial.run_trial(plan, number, params, lambda result: None)
    records = search.records()
    winner_number = best(records)
    assert winner_number is not None
    outcome = run.SearchOutcome(winner_number, run.build_winner_config(search, winner_number, {}))
    test: SeedTest = {
        "seed": 0,
        "run": "small-winner-seed0",
        "average_accuracy": 0.5,
        "forgetting": 0.0,
        "bytes_per_task": 1.0,
    }
    path = run.write_winner(search, outcome, [test])
    settings = config.load(path)
    params = records[winner_number]["params"]
    body = config.dump(settings)
    assert body["methods"]["meat"]["lambda"] == params["methods.meat.lambda"]
    assert settings.storage == str(tmp_path / "storage")
    written_winner = json.loads(Path(path).with_name("winner.json").read_text())
    assert written_winner["trial"] == winner_number
    accuracies = [record["results"][-1]["accuracy"] for record in records]
    assert written_winner["accuracy"] == max(accuracies)
    assert written_winner["tests"] == [test]


def test_tpe_suggests_the_same_points_after_a_restart(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    search = prepared(tmp_path, algorithm="tpe")

    def ask_for_points(
        asked: tune.Optuna, numbers: range, known: list[dict[str, Any]]
    ) -> list[dict[str, Any]]:
        points = list(known)
        for n in numbers:
            if n < len(points):
                params = asked.ask(n, points[n])
                assert params == points[n]
            else:
                params = asked.ask(n, None)
                points.append(params)
            has_failed = n % 7 == 0
            result = {"accuracy": params["methods.meat.lambda"], "bytes": 1.0}
            asked.tell(n, None if has_failed else result)
        return points

    whole = ask_for_points(tune.Optuna(search), range(25), [])
    assert ask_for_points(tune.Optuna(search), range(25), whole[:14]) == whole
    assert len({repr(point) for point in whole[:10]}) == 10, (
        "the first points, chosen without results, must differ"
    )
    late = [p["methods.meat.lambda"] for p in whole[15:]]
    assert sum(late) / 10 > 0.85, "it must suggest points where accuracy was high"


def test_tpe_avoids_regions_of_early_stopped_trials(tmp_path: Path) -> None:
    """Trials above 0.75 are stopped after one task, with a higher accuracy than finished trials."""
    pytest.importorskip("optuna")
    search = prepared(tmp_path, algorithm="tpe", budget={"trials": 60})
    spec.write_state(search)
    asked = asking(search)
    stopped = []
    for number in range(40):
        share = asked.suggest(str(number))["params"]["methods.meat.lambda"]
        is_stopped = share > 0.75
        accuracy = 0.9 if is_stopped else 0.6 + share / 10
        status = "stopped" if is_stopped else "finished"
        body = fake_search.trial(number, status=status, accuracy=accuracy)
        trial.write_record(search.storage, search.name, cast(Trial, body))
        asked.on_trial_complete(str(number))
        stopped.append(is_stopped)
    assert sum(stopped[20:]) <= 10, "random points would give about 10"


@pytest.mark.parametrize("count", range(2, 11))
def test_successive_halving_stops_no_trial_that_trained_on_all_tasks(count: int) -> None:
    settings = SimpleNamespace(scheduler="asha", grace=1, reduction=2)
    tasks = tuple(str(task) for task in range(count))
    search = cast(spec.Search, SimpleNamespace(settings=settings, tasks=tasks))
    scheduler = tune.make_scheduler(search)
    assert scheduler is not None
    controller = cast(TuneController, None)
    trials = [cast(TuneTrial, SimpleNamespace(trial_id=str(n))) for n in range(8)]
    worst = trials[-1]
    for one in trials:
        scheduler.on_trial_add(controller, one)
    stopped: set[str] = set()
    for task in range(1, count + 1):
        for index, one in enumerate(trials):
            accuracy = index / 10  # each better than those before it ...
            if one is worst:
                accuracy = 0.0  # ... except the last
            if task == count:
                accuracy = 1 - index / 10
            if one.trial_id in stopped:
                continue
            result = {"task": task, "accuracy": accuracy}
            if scheduler.on_trial_result(controller, one, result) == "STOP":
                stopped.add(one.trial_id)
    assert stopped == {worst.trial_id}


def test_a_first_rung_that_cannot_compare_independent_tasks_is_reported(tmp_path: Path) -> None:
    for method, body, note in (
        ("meat", {"scheduler": "asha"}, "meat learns every task by itself"),
        ("meat", {}, ""),
        ("hat", {"scheduler": "asha"}, ""),
    ):
        space = {f"methods.{method}.train.lr": {"dist": "uniform", "low": 1e-4, "high": 1e-3}}
        search = prepared(tmp_path / f"{method}{len(body)}", method=method, space=space, **body)
        assert note in search.note
        has_note = bool(note)
        assert bool(search.note) == has_note
        assert (f"note: {search.note}" in SearchScreen(search).head()) == has_note


def test_gpu_hour_budget_ends_the_search_when_used_up(tmp_path: Path) -> None:
    more = ["cluster.stages={evaluate: {gpus: 0.5}}"]  # the only stages on a GPU
    search = prepared(tmp_path, *more, budget={"gpu_hours": 2})
    spec.write_state(search)
    used: list[bool] = []
    for number in range(3):
        used.append(search.is_budget_used)
        record = cast(Trial, fake_search.trial(number, gpu_s=3600.0))
        search.add_cost(record)
    assert used == [False, False, True]
    stopper = tune.GpuBudgetStopper(search)
    assert stopper("x", {})
    assert not stopper.stop_all(), "new trials must end at their own results"
    assert not tune.GpuBudgetStopper(prepared(tmp_path, *more, budget={"gpu_hours": 4}))("x", {})


def on_gpus(tmp_path: Path, count: int, gpu_s: float, **more: Any) -> spec.Search:
    """Return a search with running trials, each with a result and some GPU time."""
    stages = "cluster.stages={evaluate: {gpus: 0.5}}"
    search = prepared(tmp_path, stages, **{"budget": {"gpu_hours": 2}, **more})
    spec.write_state(search)
    for number in range(count):
        params = search.space.draw_point(0, number)
        body = fake_search.trial(number, params, status="running", gpu_s=gpu_s, accuracy=0.5)
        trial.write_record(search.storage, search.name, cast(Trial, body))
    return search


def asking(search: spec.Search, until: int | None = None) -> tune.AskingSearcher:
    plan = trial.PhasePlan(search.name, search.storage, search.body, {}, search.tasks, until=until)
    return tune.AskingSearcher(search, plan, 0)


def test_interrupted_trials_wait_for_a_larger_gpu_budget(tmp_path: Path) -> None:
    search = on_gpus(tmp_path, 2, gpu_s=3600.0)
    assert asking(search).suggest("x") == Searcher.FINISHED
    more = prepared(tmp_path, "cluster.stages={evaluate: {gpus: 0.5}}", budget={"gpu_hours": 3})
    asked = asking(more)
    assert [asked.suggest(str(number))["number"] for number in range(3)] == [0, 1, 2]


def test_population_search_ends_when_gpu_hours_are_used_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds: list[int | None] = []

    def run_round(search: spec.Search, plan: trial.PhasePlan, *_: Any) -> None:
        rounds.append(plan.until)
        for number in range(2):
            body = fake_search.trial(number, status="running", gpu_s=3600.0)
            body["rounds"] = [{}] * (plan.until or 0)
            trial.write_record(search.storage, search.name, cast(Trial, body))

    monkeypatch.setattr(tune, "run_phase", run_round)
    budget = {"trials": 2, "gpu_hours": 2}
    search = on_gpus(tmp_path, 0, gpu_s=0.0, scheduler="pbt", budget=budget)
    plan = trial.PhasePlan(search.name, search.storage, search.body, {}, ("a", "b", "c"))
    tune.run_population(search, plan, 0, lambda record: None)
    assert rounds == [1], "the first round must use up the budget"
    assert asking(search, until=2).suggest("x") == Searcher.FINISHED


def test_search_ends_when_trials_run_no_new_stages(tmp_path: Path) -> None:
    search = prepared(tmp_path, budget={"stages": 1000})
    spec.write_state(search)
    asked = asking(search)
    for number in range(spec.IDLE_TRIALS + 1):
        assert asked.suggest(str(number)) != Searcher.FINISHED
        body = fake_search.trial(number, status="failed")
        body["stages"] = {"run": int(number == 0), "reused": 0}
        search.add_cost(cast(Trial, body))
    assert asked.suggest("x") == Searcher.FINISHED
    bounded = prepared(tmp_path / "bounded", budget={"trials": 1000})
    bounded.costs = search.costs
    assert asking(bounded).suggest("x") != Searcher.FINISHED, "`budget.trials` must be reached"


def test_parallel_trials_depend_on_cluster_resources() -> None:
    def room(resources: dict[str, float], *other_jobs: str, **cluster: Any) -> int:
        drivers = {"01": ("01-search",)}
        for job in other_jobs:
            drivers[job] = (f"{job}-x",)
        cluster_state = nodes_of([resources], drivers=drivers)
        return tune.count_parallel_trials(
            cluster_state, config.ClusterSettings(**cluster), "01-search"
        )

    assert room({"CPU": 8.0}, workers=0) == 8
    assert room({"CPU": 8.0}, workers=2, cpus_per_worker=2) == 2
    assert room({"CPU": 8.0, "GPU": 1.0}, workers=1, gpus_per_worker=0.25) == 4
    assert room({"CPU": 8.0}, "02", workers=0) == 4, "the other job must get half of the CPUs"
    assert tune.compute_resources(config.ClusterSettings(workers=1, gpus_per_worker=0.25)) == {
        "CPU": 1,
        "GPU": 0.25,
    }
    stages = {"train": {"gpus": 0.5}, "evaluate": {"cpus": 4}}
    assert room({"CPU": 8.0, "GPU": 4.0}, workers=1, stages=stages) == 2
    assert tune.compute_resources(config.ClusterSettings(workers=1, stages=stages)) == {
        "CPU": 4,
        "GPU": 0.5,
    }, "a trial runs all kinds of stages in one process"
    with pytest.raises(UserError, match="no room for 1 worker with 1 CPU, 1 GPU each"):
        room({"CPU": 8.0}, gpus_per_worker=1)


# ---- on Ray Tune ---------------------------------------------------------------------------------
def started(path: str, out: Path, *more: str) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "pipeline", "search", path, *more],
        stdout=out.open("wb"),
        stderr=subprocess.STDOUT,
        env=environment,
        start_new_session=True,
    )


def searched(path: str, out: Path, *more: str) -> str:
    process = started(path, out, *more)
    assert process.wait(900) == 0, out.read_text()
    assert "Traceback" not in out.read_text()
    return out.read_text()


def search_folder(folder: Path) -> Path:
    return folder / "storage" / "searches" / "small"


def records(folder: Path) -> list[Trial]:
    paths = sorted((search_folder(folder) / "trials").glob("*.json"))
    return [json.loads(path.read_text()) for path in paths]


def winner(folder: Path) -> dict[str, Any]:
    body: dict[str, Any] = json.loads((search_folder(folder) / "winner.json").read_text())
    return body


def winner_body(folder: Path) -> dict[str, Any]:
    """Return the plain values of the winner's config."""
    body: dict[str, Any] = yaml.safe_load((search_folder(folder) / "winner.yaml").read_text())
    return body


def winner_keys(folder: Path) -> dict[str, str]:
    """Return stage id -> key of the winner's run with seed 5."""
    manifests = small_run.manifests(folder / "storage", "small-winner-seed5")
    return {stage_id: manifest["key"] for stage_id, manifest in manifests.items()}


def stage_keys(record: Trial) -> dict[str, str]:
    """Return stage id -> key of a trial's graph."""
    graph = record["graph"]
    assert graph is not None
    return {stage["id"]: stage["key"] for stage in graph["stages"]}


def finished(trials: Iterable[Trial]) -> list[Trial]:
    return [record for record in trials if record["status"] == "finished"]


def learned_tasks(record: Trial) -> list[str]:
    return [result["task"] for result in record["results"]]


def essence(trials: list[Trial]) -> list[Any]:
    """Return the values that must not depend on interruptions of a search."""
    return [
        (record["number"], record["params"], record["status"], record["results"])
        for record in trials
    ]


@pytest.mark.slow
def test_a_killed_search_resumes_and_has_the_same_winner(tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    more: dict[str, Any] = {
        "budget": {"trials": 5},
        "seeds": [5],
        "changes": {"train": {"epochs": 6}},
    }
    searched(written(whole, **more), tmp_path / "out")
    path = written(killed, **more)
    process = started(path, tmp_path / "killed.out")
    deadline = time.monotonic() + 900
    while len(finished(records(killed))) < 2:
        assert time.monotonic() < deadline
        assert process.poll() is None, (tmp_path / "killed.out").read_text()
        time.sleep(0.01)
    live = (search_folder(killed) / "search.html").read_text()
    assert 'http-equiv="refresh"' in live, "the page is there while the search runs"
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    pipeline.load_search(path).report()
    assert 'http-equiv="refresh"' not in (search_folder(killed) / "search.html").read_text()
    finished_before = finished(records(killed))
    assert 2 <= len(finished_before) < 5
    output = searched(path, tmp_path / "again")
    assert "known from before" in output
    assert f"its page, from now on: {search_folder(killed) / 'search.html'}" in output
    assert 'http-equiv="refresh"' not in (search_folder(killed) / "search.html").read_text()
    after = {record["number"]: record for record in records(killed)}
    for record in finished_before:
        assert after[record["number"]] == record
    assert essence(records(killed)) == essence(records(whole))
    assert winner(killed) == winner(whole)
    assert winner(whole)["tests"][0]["run"] == "small-winner-seed5"
    assert not list((killed / "storage" / "ray").glob("*"))
    assert winner_body(killed)["name"] == "small-winner"


@pytest.mark.slow
def test_halving_stops_poor_trials_and_failed_trials_are_tolerated(tmp_path: Path) -> None:
    space = {"methods.individual.train.lr": {"dist": "choice", "values": [1e-9, 1e-8, 3e-3, 1e30]}}
    more: dict[str, Any] = {
        "method": "individual",
        "scheduler": "asha",
        "budget": {"trials": 10},
        "seed": 1,
        "concurrent": 1,
    }
    path = written(
        tmp_path, cards=("a", "b", "c"), changes={"train": {"epochs": 80}}, space=space, **more
    )
    searched(path, tmp_path / "out")
    statuses_by_rate: dict[float, set[str]] = {}
    for record in records(tmp_path):
        rate = record["params"]["methods.individual.train.lr"]
        statuses_by_rate.setdefault(rate, set()).add(record["status"])
        if record["status"] == "stopped":
            assert len(record["results"]) < 3
        if record["status"] == "failed":
            assert "lower methods.individual.train.lr" in record["message"]
    assert statuses_by_rate[1e30] == {"failed"}
    assert "stopped" in statuses_by_rate[1e-9] | statuses_by_rate[1e-8]
    assert winner(tmp_path)["params"] == {"methods.individual.train.lr": 3e-3}


@pytest.mark.slow
def test_first_k_tasks_and_two_streams_protocols_choose_their_tasks(tmp_path: Path) -> None:
    cards = small_run.make_cards(tmp_path, ["a", "b", "c"])
    path = written(
        tmp_path,
        cards=("a", "b", "c"),
        protocol="first_k_tasks",
        first_tasks=2,
        budget={"trials": 2},
        seeds=[5],
    )
    output = searched(path, tmp_path / "out")
    assert all(learned_tasks(record) == ["a", "b"] for record in records(tmp_path))
    assert "on test data" in output
    assert "meat/c/evaluate" in winner_keys(tmp_path)
    stream = {"tasks": [{"name": "other", "card": cards["c"]}]}
    other = written(
        tmp_path / "two",
        cards=("a", "b"),
        protocol="two_streams",
        stream=stream,
        budget={"trials": 2},
        seeds=[5],
        set={"cluster.workers": 2},
    )
    searched(other, tmp_path / "out2")
    assert all(learned_tasks(record) == ["other"] for record in records(tmp_path / "two"))
    method_stages = [name for name in winner_keys(tmp_path / "two") if name.startswith("meat")]
    assert {name.split("/")[1] for name in method_stages} == {"a", "b"}


@pytest.mark.slow
def test_a_per_task_search_chooses_a_winner_for_each_task(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        cards=("base", "a", "b"),
        protocol="per_task",
        budget={"trials": 2},
        seeds=[5],
        changes={"train": {"epochs": 4}},
    )
    searched(path, tmp_path / "out")
    trials = records(tmp_path)
    phases = [(record["number"], record["phase"]) for record in trials]
    assert phases == [(0, "a"), (1, "a"), (2, "b"), (3, "b")], "the base task has no trials"
    settings = winner_body(tmp_path)["methods"]["meat"]
    chosen: dict[str, Trial] = {}
    for phase in "ab":
        of_phase = [record for record in trials if record["phase"] == phase]
        chosen[phase] = max(of_phase, key=lambda record: record["results"][-1]["accuracy"])
        task_params = {f"methods.meat.{k}": v for k, v in settings["tasks"][phase].items()}
        assert task_params == chosen[phase]["params"]
    assert "lambda" not in settings, "common settings must stay those of the base config"
    first_key = stage_keys(chosen["a"])["meat/a/train"]
    for record in trials[2:]:
        assert stage_keys(record)["meat/a/train"] == first_key, (
            "the second task must continue from the winner of the first one"
        )
    winner_key = winner_keys(tmp_path)["meat/b/train"]
    assert winner_key == stage_keys(chosen["b"])["meat/b/train"], (
        "the winner must be the chosen trial"
    )


@pytest.mark.slow
def test_poor_trial_of_a_population_continues_from_better_one(tmp_path: Path) -> None:
    space = {"methods.individual.train.lr": {"dist": "choice", "values": [1e-9, 3e-3]}}
    more: dict[str, Any] = {
        "method": "individual",
        "scheduler": "pbt",
        "budget": {"trials": 2},
        "seeds": [5],
        "seed": 7,
        "concurrent": 1,
    }
    path = written(
        tmp_path, cards=("a", "b", "c"), changes={"train": {"epochs": 80}}, space=space, **more
    )
    search = spec.prepare_search(path, [])
    first_points = [tune.draw_point(search, number, 0) for number in range(2)]
    searched(path, tmp_path / "out")
    trials = records(tmp_path)
    good, poor = trials
    assert first_points == [{"methods.individual.train.lr": rate} for rate in (3e-3, 1e-9)], (
        "one learning rate must be too low to learn"
    )
    assert poor["history"]["a"] == good["history"]["a"] == first_points[0], (
        "the poor trial must take over the first task of the good one"
    )
    assert poor["rounds"][0]["params"] == first_points[1]
    # It has the lower accuracy until it takes over, after the first task.
    assert poor["rounds"][0]["accuracy"] < good["rounds"][0]["accuracy"]
    assert poor["rounds"][1]["params"] == first_points[0]
    for record in trials:
        assert record["status"] == "finished"
        assert list(record["history"]) == ["a", "b", "c"]
        assert record["results"][-1]["accuracy"] == record["rounds"][-1]["accuracy"], (
            "nothing may be taken over after the last task"
        )
    assert poor["results"][0] == good["results"][0]
    best_trial = trials[winner(tmp_path)["trial"]]
    tasks = winner_body(tmp_path)["methods"]["individual"]["tasks"]
    rates = [params["methods.individual.train.lr"] for params in best_trial["history"].values()]
    assert [tasks[task]["train"]["lr"] for task in "abc"] == rates
    winner_key = winner_keys(tmp_path)["individual/c/train"]
    assert winner_key == stage_keys(best_trial)["individual/c/train"]


def test_second_process_on_a_running_search_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, storage = written(tmp_path), tmp_path / "storage"
    monkeypatch.setattr(
        run,
        "SearchRecorder",
        lambda *a, **k: pytest.fail("it opened the record of a search that another process runs"),
    )
    search = spec.prepare_search(path, [])
    with (
        stage_lock(str(storage / "searches"), "search-small", wait=False),
        pytest.raises(UserError, match="being run by another process"),
    ):
        run.execute(search, SearchScreen(search), "", "")


# ---- the page, the winner and the end of a search ------------------------------------------------
class QuietRecorder:
    """A stub of the recorder that keeps the final status of the search."""

    warnings: tuple[str, ...] = ()
    statuses: tuple[str, ...] = ()

    def __init__(self, *_: Any, **__: Any) -> None:
        """Record nothing."""

    def start(self, state: Any) -> None:
        """Do nothing."""

    def links(self) -> list[str]:
        """Return no links."""
        return []

    def finish(self, files: Any, winner: Any, status: str) -> None:
        """Keep the status."""
        QuietRecorder.statuses = (*QuietRecorder.statuses, status)


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> type[QuietRecorder]:
    monkeypatch.setattr(run, "SearchRecorder", QuietRecorder)
    monkeypatch.setattr(QuietRecorder, "statuses", ())
    return QuietRecorder


def test_prometheus_port_in_use_is_reported_and_search_fails(
    tmp_path: Path, recorder: type[QuietRecorder]
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        tracking = f"{{enabled: false, prometheus: {port}}}"
        search = prepared(tmp_path, f"set.tracking={tracking}")
        with pytest.raises(UserError, match="nothing can listen there"):
            run.execute(search, SearchScreen(search, io.StringIO()), "", "")
    assert recorder.statuses == ("FAILED",)


def test_page_shows_running_search_until_winner_is_measured(
    tmp_path: Path, recorder: type[QuietRecorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread writes the page when the winner is known, and after each seed of the winner."""
    search = prepared(tmp_path, seeds=[0, 1])
    pages: list[tuple[bool | None, int]] = []
    written = threading.Semaphore(0)
    monkeypatch.setattr("pipeline.search.live_page.CHANGED_S", 0.0)
    monkeypatch.setattr("pipeline.search.live_page.LOOK_S", 0.001)

    def export(search: spec.Search, is_running: bool | None = None) -> dict[str, bytes]:
        winner = load_search_record(search.storage, search.name).winner
        pages.append((is_running, len(winner["tests"]) if winner else -1))
        written.release()
        return {}

    def one_trial(search: spec.Search, *_: Any) -> run.SearchOutcome:
        assert written.acquire(timeout=60), "the first page must precede the first trial"
        trial.write_record(search.storage, search.name, cast(Trial, fake_search.trial(0)))
        return run.SearchOutcome(0, {})

    def measure(search: spec.Search, outcome: run.SearchOutcome, seed: int, *_: Any) -> SeedTest:
        assert written.acquire(timeout=60)
        return {
            "seed": seed,
            "run": f"seed{seed}",
            "average_accuracy": 0.5,
            "forgetting": 0.0,
            "bytes_per_task": 1.0,
        }

    monkeypatch.setattr(run, "write_search_report", export)
    monkeypatch.setattr(run, "run_search", one_trial)
    monkeypatch.setattr(run, "evaluate_winner", measure)
    run.execute(search, SearchScreen(search, io.StringIO()), "", "")
    assert pages[:3] == [(True, -1), (True, 0), (True, 1)]
    assert pages[-1] == (False, 2)
    assert recorder.statuses == ("FINISHED",)


def test_missing_winner_explanation_names_the_limiting_setting(tmp_path: Path) -> None:
    search = on_gpus(tmp_path, 2, gpu_s=3600.0)
    assert "--set budget.gpu_hours=N" in run.explain_no_winner(search, "", "")
    for number in range(2):
        body = fake_search.trial(number, status="stopped", message="it forgets 30 %")
        trial.write_record(search.storage, search.name, cast(Trial, body))
    text = run.explain_no_winner(search, "", "")
    assert "it forgets 30 %" in text
    assert "a larger max_forgetting under another name" in text
