"""A search: its file, what it refuses, points that a kill does not change; and whole searches on
Ray Tune."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from pipeline import config
from pipeline.search import run, spec, trial, tune
from pipeline.search.screen import SearchScreen
from tests import small_run
from tests.pipeline.nodes import nodes_of
from workers.errors import UserError
from workers.storage.lock import stage_lock

SPACE = {
    "methods.meat.lambda": {"dist": "uniform", "low": 0.5, "high": 1.0},
    "methods.meat.alpha": {"dist": "choice", "values": [0.5, 1, 2]},
}


def written(
    folder: Path,
    cards: Any = ("a", "b"),
    changes: dict[str, Any] | None = None,
    method: str = "meat",
    **body: Any,
) -> str:
    """A search file over a small base of digits."""
    if not (folder / "base.yaml").exists():
        settings = small_run.make_body(
            folder,
            small_run.make_cards(folder, cards),
            methods=[method],
            data={"val_fraction": 0.3},
            **(changes or {}),
        )
        small_run.write_config(folder / "base.yaml", settings)
    return small_run.write_config(
        folder / "small.yaml",
        {"base": "base.yaml", "space": SPACE, "budget": {"trials": 3}, "seeds": [], **body},
    )


def prepared(folder: Path, *overrides: str, **body: Any) -> spec.Search:
    return spec.prepare(written(folder, **body), list(overrides), {})


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
    ({"scheduler": "asha", "objectives": ["accuracy", "bytes"]}, ["accuracy alone"]),
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
    ({"set": {"data.val_fraction": 0}}, ["validation images", "data.val_fraction"]),
]


@pytest.mark.parametrize(("body", "said"), BAD)
def test_a_search_that_cannot_work_is_refused_in_one_sentence(
    tmp_path: Path, body: dict[str, Any], said: list[str]
) -> None:
    with pytest.raises(UserError) as error:
        prepared(tmp_path, **body)
    assert "\n" not in str(error.value)
    for text in ("small.yaml", *said):
        assert text in str(error.value)
    assert not (tmp_path / "storage" / "searches").exists()


def test_a_stream_of_its_own_replaces_what_is_set_of_the_base_and_is_checked_itself(
    tmp_path: Path,
) -> None:
    with pytest.raises(UserError, match=r"card 'x'|'x'"):
        prepared(
            tmp_path, protocol="two_streams", stream={"tasks": [{"card": "x"}]}, set={"stream": [1]}
        )


def test_a_config_to_run_is_no_search(tmp_path: Path) -> None:
    written(tmp_path)
    with pytest.raises(UserError, match="pipeline run"):
        spec.prepare(str(tmp_path / "base.yaml"), [], {})
    with pytest.raises(UserError, match=r"did you mean .*small.yaml"):
        spec.prepare(str(tmp_path / "smal.yaml"), [], {})


def test_overrides_reach_the_search_and_its_base(tmp_path: Path) -> None:
    found = prepared(tmp_path, "budget.trials=9", "set={train.epochs: 1}", "name=other")
    assert (found.name, found.settings.budget.trials, found.body["train"]["epochs"]) == (
        "other",
        9,
        1,
    )


def test_overrides_without_set_reach_the_base_where_the_search_has_no_such_key(
    tmp_path: Path,
) -> None:
    elsewhere = str(tmp_path / "elsewhere")
    found = prepared(
        tmp_path,
        f"storage={elsewhere}",
        "cluster.workers=2",
        "set.cluster.cpus_per_worker=3",
        "methods.meat.gamma=3",
        "seed=7",
        "set.seed=5",
        set={"train.epochs": 1, "cluster": {"workers": 4, "retries": 1}},
    )
    assert found.storage == elsewhere
    assert (found.cluster.workers, found.cluster.cpus_per_worker, found.cluster.retries) == (
        2,
        3,
        1,
    ), "one key by another, the last one counts"
    assert (found.settings.seed, found.body["seed"]) == (7, 5), "the search's own key first"
    assert (found.body["methods"]["meat"]["gamma"], found.body["train"]["epochs"]) == (3, 1)


@pytest.mark.parametrize(
    ("override", "said"),
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
def test_an_override_that_means_nothing_is_refused_in_one_sentence(
    tmp_path: Path, override: str, said: str
) -> None:
    with pytest.raises(UserError) as error:
        prepared(tmp_path, override)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_a_search_goes_on_with_other_workers_and_another_record(tmp_path: Path) -> None:
    run.write_state(prepared(tmp_path))
    prepared(tmp_path, "cluster.workers=2", "tracking=off")
    with pytest.raises(UserError, match="another space, base, data or code"):
        prepared(tmp_path, "train.epochs=1")


def test_another_search_of_the_same_name_is_not_gone_on_with(tmp_path: Path) -> None:
    run.write_state(prepared(tmp_path))
    prepared(tmp_path, budget={"trials": 50}, seeds=[1], tolerance=0.1)  # these may change
    for change in (
        {"space": {"methods.meat.lambda": SPACE["methods.meat.lambda"]}},
        {"seed": 4},
        {"set": {"train.epochs": 1}},
    ):
        with pytest.raises(UserError, match="another space, base, data or code"):
            prepared(tmp_path, **change)
    prepared(tmp_path, name="other", seed=4)


def test_a_greedy_search_keeps_its_number_of_trials_as_that_says_which_task_a_trial_is_for(
    tmp_path: Path,
) -> None:
    run.write_state(prepared(tmp_path, protocol="per_task", budget={"trials": 2}))
    with pytest.raises(UserError, match="another space"):
        prepared(tmp_path, protocol="per_task", budget={"trials": 3})
    prepared(tmp_path, protocol="per_task", budget={"trials": 2, "hours": 1})


def test_the_winner_is_a_config_that_run_accepts(tmp_path: Path) -> None:
    found = prepared(tmp_path)
    run.write_state(found)
    plan = next(iter(run.phases(found, {})))[1]
    for number, point in enumerate((0.6, 0.9)):
        trial.run_trial(
            plan,
            number,
            {"methods.meat.lambda": point, "methods.meat.alpha": 1},
            lambda result: None,
        )
    records = found.records()
    winner = run.best(records)
    path = run.write_winner(
        found, run.Outcome(winner, run.winner_config(found, winner, {})), [{"seed": 0}]
    )
    settings = config.load(path)
    assert (
        config.dump(settings)["methods"]["meat"]["lambda"]
        == records[winner]["params"]["methods.meat.lambda"]
    )
    assert settings.storage == str(tmp_path / "storage")
    said = json.loads(Path(path).with_name("winner.json").read_text())
    assert said["trial"] == winner
    assert said["accuracy"] == max(r["results"][-1]["accuracy"] for r in records)
    assert said["tests"] == [{"seed": 0}]


def test_points_of_a_parzen_estimator_do_not_change_by_a_kill(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    found = prepared(tmp_path, algorithm="tpe")

    def points(
        asked: tune.Optuna, numbers: range, known: list[dict[str, Any]]
    ) -> list[dict[str, Any]]:
        for n in numbers:
            params = asked.ask(n, known[n] if n < len(known) else None)
            assert n >= len(known) or params == known[n]
            known = [*known[:n], params, *known[n + 1 :]]
            asked.tell(
                n, {"accuracy": params["methods.meat.lambda"], "bytes": 1.0} if n % 7 else None
            )
        return known

    whole = points(tune.Optuna(found), range(25), [])
    assert points(tune.Optuna(found), range(25), whole[:14]) == whole
    assert len({repr(point) for point in whole[:10]}) == 10, (
        "before it knows anything, each point is another one"
    )
    late = [p["methods.meat.lambda"] for p in whole[15:]]
    assert sum(late) / 10 > 0.85, "it looks where accuracy was high"


@pytest.mark.parametrize("count", range(2, 11))
def test_successive_halving_stops_no_trial_that_has_learned_all_tasks(count: int) -> None:
    settings = SimpleNamespace(scheduler="asha", grace=1, reduction=2)
    scheduler = tune.scheduler_of(
        SimpleNamespace(settings=settings, tasks=tuple(map(str, range(count))))
    )  # type: ignore[arg-type]
    trials = [SimpleNamespace(trial_id=str(n)) for n in range(8)]
    for one in trials:
        scheduler.on_trial_add(None, one)
    stopped: set[str] = set()
    for task in range(1, count + 1):
        for place, one in enumerate(trials):
            # each better than those before it, but for the last
            rising = 0.0 if one is trials[-1] else place / 10
            result = {"task": task, "accuracy": rising if task < count else 1 - place / 10}
            if (
                one.trial_id not in stopped
                and scheduler.on_trial_result(None, one, result) == "STOP"
            ):
                stopped.add(one.trial_id)
    assert stopped == {trials[-1].trial_id}


def test_what_a_first_rung_cannot_say_of_independent_tasks_is_said(tmp_path: Path) -> None:
    for method, body, said in (
        ("meat", {"scheduler": "asha"}, "meat learns every task by itself"),
        ("meat", {}, ""),
        ("hat", {"scheduler": "asha"}, ""),
    ):
        space = {f"methods.{method}.train.lr": {"dist": "uniform", "low": 1e-4, "high": 1e-3}}
        found = prepared(tmp_path / f"{method}{len(body)}", method=method, space=space, **body)
        assert (said in found.note, bool(found.note)) == (True, bool(said))
        assert (f"note: {found.note}" in SearchScreen(found).head()) == bool(said)


def test_room_in_the_cluster() -> None:
    def room(resources: dict[str, float], *others: str, **own: Any) -> int:
        around = nodes_of(
            [resources], **{"01": ("01-search",), **{job: (f"{job}-x",) for job in others}}
        )
        return tune.room_for(around, config.ClusterSettings(**own), "01-search")

    assert room({"CPU": 8.0}, workers=0) == 8
    assert room({"CPU": 8.0}, workers=2, cpus_per_worker=2) == 2
    assert room({"CPU": 8.0, "GPU": 1.0}, workers=1, gpus_per_worker=0.25) == 4
    assert room({"CPU": 8.0}, "02", workers=0) == 4, "a run has the other half"
    assert tune.resources_of(config.ClusterSettings(workers=1, gpus_per_worker=0.25)) == {
        "CPU": 1,
        "GPU": 0.25,
    }
    with pytest.raises(UserError, match="1 workers that take 1 CPUs, 1 GPUs each do not fit"):
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
    assert process.wait(500) == 0, out.read_text()
    assert "Traceback" not in out.read_text()
    return out.read_text()


def records(folder: Path) -> list[dict[str, Any]]:
    return [
        json.loads(path.read_text())
        for path in sorted((folder / "storage" / "searches" / "small" / "trials").glob("*.json"))
    ]


def winner(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "storage" / "searches" / "small" / "winner.json").read_text())


def essence(found: list[dict[str, Any]]) -> list[Any]:
    return [(r["number"], r["params"], r["status"], r["results"]) for r in found]


@pytest.mark.slow
def test_a_killed_search_goes_on_and_has_the_same_winner(tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    more = {"budget": {"trials": 5}, "seeds": [5], "changes": {"train": {"epochs": 6}}}
    searched(written(whole, **more), tmp_path / "out")
    path = written(killed, **more)
    process = started(path, tmp_path / "killed.out")
    deadline = time.monotonic() + 300
    while sum(r["status"] == "finished" for r in records(killed)) < 2:
        assert time.monotonic() < deadline
        assert process.poll() is None, (tmp_path / "killed.out").read_text()
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    before = {r["number"]: r for r in records(killed)}
    assert 2 <= sum(r["status"] == "finished" for r in before.values()) < 5
    said = searched(path, tmp_path / "again")
    assert "known from before" in said
    after = {r["number"]: r for r in records(killed)}
    assert [after[n] for n, r in before.items() if r["status"] == "finished"] == [
        r for r in before.values() if r["status"] == "finished"
    ]
    assert essence(records(killed)) == essence(records(whole))
    assert winner(killed) == winner(whole)
    assert winner(whole)["tests"][0]["run"] == "small-winner-seed5"
    assert not list((killed / "storage" / "ray").glob("*"))
    assert (
        yaml.safe_load((killed / "storage" / "searches" / "small" / "winner.yaml").read_text())[
            "name"
        ]
        == "small-winner"
    )


@pytest.mark.slow
def test_halving_stops_poor_trials_and_failed_ones_stop_nothing(tmp_path: Path) -> None:
    space = {"methods.individual.train.lr": {"dist": "choice", "values": [1e-9, 1e-8, 3e-3, 1e30]}}
    more = {
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
    found = records(tmp_path)
    by_rate: dict[float, set[str]] = {}
    for r in found:
        by_rate.setdefault(r["params"]["methods.individual.train.lr"], set()).add(r["status"])
    assert by_rate[1e30] == {"failed"}
    assert "stopped" in by_rate[1e-9] | by_rate[1e-8]
    assert winner(tmp_path)["params"] == {"methods.individual.train.lr": 3e-3}
    assert all(len(r["results"]) < 3 for r in found if r["status"] == "stopped")
    assert all("lower train.lr" in r["message"] for r in found if r["status"] == "failed")


@pytest.mark.slow
def test_first_tasks_two_streams_and_several_workers(tmp_path: Path) -> None:
    cards = small_run.make_cards(tmp_path, ["a", "b", "c"])
    path = written(
        tmp_path,
        cards=("a", "b", "c"),
        protocol="first_k_tasks",
        first_tasks=2,
        budget={"trials": 2},
        seeds=[5],
    )
    said = searched(path, tmp_path / "out")
    assert all([x["task"] for x in r["results"]] == ["a", "b"] for r in records(tmp_path))
    assert "on test data" in said
    assert set(small_run.manifests(tmp_path / "storage", "small-winner-seed5")) >= {
        "meat/c/evaluate"
    }
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
    assert all([x["task"] for x in r["results"]] == ["other"] for r in records(tmp_path / "two"))
    assert {
        i.split("/")[1]
        for i in small_run.manifests(tmp_path / "two" / "storage", "small-winner-seed5")
        if i.startswith("meat")
    } == {"a", "b"}


@pytest.mark.slow
def test_each_task_in_turn_chooses_for_itself(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        cards=("base", "a", "b"),
        protocol="per_task",
        budget={"trials": 2},
        seeds=[5],
        changes={"train": {"epochs": 4}},
    )
    searched(path, tmp_path / "out")
    found = records(tmp_path)
    assert [(r["number"], r["phase"]) for r in found] == [(0, "a"), (1, "a"), (2, "b"), (3, "b")], (
        "the base task is the backbone's"
    )
    chosen = {
        phase: max(
            (r for r in found if r["phase"] == phase), key=lambda r: r["results"][-1]["accuracy"]
        )
        for phase in "ab"
    }
    body = yaml.safe_load((tmp_path / "storage" / "searches" / "small" / "winner.yaml").read_text())
    own = body["methods"]["meat"]["tasks"]
    for phase in "ab":
        assert {f"methods.meat.{key}": value for key, value in own[phase].items()} == chosen[phase][
            "params"
        ]
    assert "lambda" not in body["methods"]["meat"], "common settings stay the base's"
    first = next(s["key"] for s in chosen["a"]["graph"]["stages"] if s["id"] == "meat/a/train")
    for r in found[2:]:
        assert {s["id"]: s["key"] for s in r["graph"]["stages"]}["meat/a/train"] == first, (
            "the next task goes on from the first one's choice"
        )
    keys = {
        i: m["key"]
        for i, m in small_run.manifests(tmp_path / "storage", "small-winner-seed5").items()
    }
    assert (
        keys["meat/b/train"]
        == {s["id"]: s["key"] for s in chosen["b"]["graph"]["stages"]}["meat/b/train"]
    ), "the winner is what was chosen"


@pytest.mark.slow
def test_a_population_takes_over_what_better_ones_have_learned(tmp_path: Path) -> None:
    space = {"methods.individual.train.lr": {"dist": "choice", "values": [1e-9, 3e-3]}}
    more = {
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
    begun = [tune.points_of(spec.prepare(path, [], {}), n, 0) for n in range(2)]
    searched(path, tmp_path / "out")
    found = records(tmp_path)
    assert {r["status"] for r in found} == {"finished"}
    assert all(list(r["history"]) == ["a", "b", "c"] for r in found)
    assert begun == [{"methods.individual.train.lr": rate} for rate in (3e-3, 1e-9)], (
        "one of them learns nothing"
    )
    assert found[1]["history"]["a"] == found[0]["history"]["a"] == begun[0], (
        "and takes over what the other one has learned"
    )
    assert found[1]["rounds"][0]["params"] == begun[1]
    assert found[1]["rounds"][0]["accuracy"] < found[0]["rounds"][0]["accuracy"]
    assert all(r["results"][-1]["accuracy"] == r["rounds"][-1]["accuracy"] for r in found), (
        "nothing is taken over after the last task"
    )
    assert found[1]["results"][0] == found[0]["results"][0]
    won = found[winner(tmp_path)["trial"]]
    body = yaml.safe_load((tmp_path / "storage" / "searches" / "small" / "winner.yaml").read_text())
    assert [body["methods"]["individual"]["tasks"][t]["train"]["lr"] for t in "abc"] == [
        own["methods.individual.train.lr"] for own in won["history"].values()
    ]
    keys = {
        i: m["key"]
        for i, m in small_run.manifests(tmp_path / "storage", "small-winner-seed5").items()
    }
    assert (
        keys["individual/c/train"]
        == {s["id"]: s["key"] for s in won["graph"]["stages"]}["individual/c/train"]
    )


def test_a_second_process_leaves_a_running_search_and_its_record_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, storage = written(tmp_path), tmp_path / "storage"
    monkeypatch.setattr(
        run,
        "SearchRecorder",
        lambda *a, **k: pytest.fail("it opened the record of a search that another process runs"),
    )
    with (
        stage_lock(str(storage / "searches"), "search-small", wait=False),
        pytest.raises(UserError, match="being run by another process"),
    ):
        run.command(argparse.Namespace(config=path, overrides=[]))
