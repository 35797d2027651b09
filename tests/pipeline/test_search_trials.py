"""Tests of search trials: the winner, the Pareto front, phases, and damaged records."""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import fake_search
import numpy as np
import pytest

from pipeline.results import metrics
from pipeline.results.trials import (
    best,
    compute_trial_forgetting,
    gpu_hours,
    load_search_record,
    pareto,
    score,
    size,
)
from workers.errors import UserError


def points(*pairs: Any, status: Any = "finished") -> Any:
    """Return trials 0, 1, ... with these pairs of accuracy and bytes."""
    trials = []
    for number, (accuracy, num_bytes) in enumerate(pairs):
        trial = fake_search.trial(number, {}, status, accuracy=accuracy, bytes=num_bytes)
        trials.append(trial)
    return trials


# ---- the winner ----------------------------------------------------------------------------------
def test_without_tolerance_the_highest_accuracy_wins() -> None:
    assert best(points((0.80, 100), (0.90, 900), (0.85, 1)), 0.0) == 1


def test_within_the_tolerance_the_fewest_bytes_win() -> None:
    some = points((0.90, 900), (0.895, 500), (0.889, 10), (0.891, 300))
    assert best(some, 0.005) == 1
    assert best(some, 0.009) == 3
    assert best(some, 0.02) == 2


def test_tolerance_includes_its_end_despite_rounding_errors() -> None:
    for top in range(20, 100):
        assert best(points((top / 100, 900), ((top - 1) / 100, 1)), 0.01) == 1
        assert best(points((top / 100, 900), ((top - 1) / 100 - 1e-6, 1)), 0.01) == 0


def test_rounding_errors_of_accuracy_do_not_decide_the_winner() -> None:
    assert best(points((0.1 + 0.2, 900), (0.3, 100)), 0.0) == 1


def test_ties_go_to_fewer_bytes_then_to_the_lower_number() -> None:
    assert best(points((0.9, 200), (0.9, 100), (0.9, 100)), 0.0) == 1
    assert best(list(reversed(points((0.9, 100), (0.9, 100)))), 0.0) == 0


@pytest.mark.parametrize("status", ["stopped", "running", "failed"])
def test_only_finished_trials_win_or_are_on_the_front(status: str) -> None:
    some = [*points((0.8, 100)), fake_search.trial(1, {}, status, accuracy=0.99, bytes=1)]
    assert best(some, 0.0) == 0
    assert pareto(some) == [0]
    assert best(some[1:], 0.0) is None
    assert pareto(some[1:]) == []


def test_trial_missing_accuracy_or_bytes_never_beats_a_complete_one() -> None:
    without_results = fake_search.trial(0, {}, results=[])
    without_bytes = fake_search.trial(1, {}, accuracy=0.9, bytes=None)
    with_both = points((0.1, 1), (0.9, 1), (0.9, 1))[2]
    assert math.isnan(score(without_results))
    assert math.isnan(size(without_results))
    assert math.isnan(size(without_bytes))
    assert best([without_results]) is None
    assert best([without_results, without_bytes, with_both]) == 2
    assert best([without_results, without_bytes]) == 1
    assert math.isnan(score(fake_search.trial(0, {}, accuracy=math.inf)))


def test_the_score_is_the_last_accuracy_not_the_best() -> None:
    trial = fake_search.trial(0)
    first = trial["results"][0]
    last = trial["results"][-1]
    assert score(trial) == last["accuracy"] < first["accuracy"]
    assert size(trial) == last["bytes"]


# ---- the Pareto front ----------------------------------------------------------------------------
def test_trial_forgetting_matches_the_accuracy_matrix() -> None:
    rng = np.random.default_rng(3)
    for count in (1, 2, 5):
        rates = np.tril(rng.uniform(0, 1, (count, count)))
        results: Any = []
        for position in range(count):
            per_task = {f"t{i}": float(rates[position, i]) for i in range(position + 1)}
            results.append({"task": f"t{position}", "position": position, "per_task": per_task})
        assert compute_trial_forgetting(results) == pytest.approx(
            metrics.METRICS["forgetting"](rates)
        ), count
    assert math.isnan(compute_trial_forgetting([]))
    assert math.isnan(compute_trial_forgetting(results[1:])), (
        "the first task was not measured when it was new"
    )
    del results[2]["per_task"]["t1"]
    assert math.isnan(compute_trial_forgetting(results))


def test_gpu_hours_sum_all_trials_and_default_to_zero() -> None:
    some = [fake_search.trial(0, gpu_s=1800.0), fake_search.trial(1, gpu_s=5400.0)]
    assert gpu_hours(some) == 2
    assert gpu_hours([fake_search.trial(2)]) == 0


def test_front_holds_trials_not_dominated_in_accuracy_and_bytes() -> None:
    assert pareto(
        points((0.9, 900), (0.8, 100), (0.85, 500), (0.84, 600), (0.79, 100), (0.9, 950))
    ) == [0, 1, 2]


def test_equal_trials_are_all_on_the_front_in_ascending_order() -> None:
    assert pareto(list(reversed(points((0.9, 100), (0.9, 100), (0.8, 50), (0.8, 60))))) == [0, 1, 2]


def test_the_winner_within_any_tolerance_is_on_the_front() -> None:
    some = fake_search.trials(60)
    for tolerance in (0.0, 0.003, 0.01, 0.1):
        assert best(some, tolerance) in pareto(some)


def test_without_trials_there_is_no_winner_and_no_front() -> None:
    assert best([], 0.1) is None
    assert pareto([]) == []


# ---- phases --------------------------------------------------------------------------------------
def test_each_phase_has_a_winner_in_stream_order(tmp_path: Path) -> None:
    some = fake_search.per_task(4)
    for trial in some:  # so that the last task's trials have the lowest numbers
        trial["number"] = 15 - trial["number"]
    fake_search.write(tmp_path, fake_search.record("greedy", protocol="per_task"), some)
    search = load_search_record(str(tmp_path), "greedy")
    assert search.phases == fake_search.TASKS[:4]
    assert list(search.chosen()) == fake_search.TASKS[:4]
    for phase, number in search.chosen().items():
        assert number == best(search.of(phase), search.tolerance)
    standing = search.standing()
    for phase in search.phases:
        assert max(standing[trial["number"]] for trial in search.of(phase)) == 0.0


def test_winner_is_read_from_winner_json(tmp_path: Path) -> None:
    some = points((0.9, 100), (0.95, 100), (0.8, 1))
    fake_search.write(tmp_path, fake_search.record("said"), some, fake_search.winner(some[2]))
    assert load_search_record(str(tmp_path), "said").chosen() == {"": 2}


def test_standing_is_accuracy_in_a_single_phase_search(tmp_path: Path) -> None:
    fake_search.write(
        tmp_path,
        fake_search.record("one"),
        [*points((0.9, 100), (0.7, 1)), fake_search.trial(2, {}, "failed", accuracy=0.99)],
    )
    assert load_search_record(str(tmp_path), "one").standing() == {0: 0.9, 1: 0.7}


# ---- files ---------------------------------------------------------------------------------------
def test_trials_are_sorted_and_missing_fields_have_defaults(tmp_path: Path) -> None:
    fake_search.write(
        tmp_path,
        fake_search.record("some"),
        [{"number": 10000, "status": "running"}, fake_search.trial(9999), *points((0.9, 1))],
    )
    search = load_search_record(str(tmp_path), "some")
    assert [t["number"] for t in search.trials] == [0, 9999, 10000]
    assert (
        search.trials[2]
        | {"stages": {"run": 0, "reused": 0}, "results": [], "params": {}, "phase": ""}
        == search.trials[2]
    )
    assert search.problems == []
    assert search.winner is None
    assert search.trial(10000) is search.trials[2]


DAMAGE = {
    "0001.json": b'{"number": 1, "status": "fini',
    "0002.json": b"[1, 2]",
    "0003.json": b'{"number": 4, "status": "finished"}',
    "0004.json": b'{"number": 4, "status": "done"}',
    "0005.json": b'{"number": 5, "status": "finished", "results": [3]}',
    "0006.json": b"\xff\xfe\x00",
    "0007.json": b"",
    "0008.json": b'{"number": 8, "status": "finished", "params": []}',
    "notes.txt": b"hello",
    "0009.json": b'{"status": "finished"}',
    "0011.json": b'{"number": 11, "status": "finished", "device_s": "long"}',
}


def test_damaged_and_foreign_files_are_reported_and_skipped(tmp_path: Path) -> None:
    fake_search.write(tmp_path, fake_search.record("hurt"), points((0.9, 1)))
    folder = tmp_path / "searches/hurt"
    for name, data in DAMAGE.items():
        (folder / "trials" / name).write_bytes(data)
    # A running search is writing this file.
    (folder / "trials/0010.json.ab12cd34.part").write_bytes(b"{")
    (folder / "winner.json").write_text('{"trial": "the third"}')
    search = load_search_record(str(tmp_path), "hurt")
    assert [t["number"] for t in search.trials] == [0]
    assert search.winner is None
    assert len(search.problems) == len(DAMAGE) + 1
    for name in [*DAMAGE, "winner.json"]:
        assert sum(name in p for p in search.problems) == 1, name
    assert all("\n" not in p and "left out" in p for p in search.problems)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"settings": 3, "space": []}', b"null"])
def test_trials_are_read_when_search_json_is_damaged(tmp_path: Path, body: bytes) -> None:
    fake_search.write(tmp_path, fake_search.record("hurt"), points((0.9, 1), (0.8, 1)))
    (tmp_path / "searches/hurt/search.json").write_bytes(body)
    search = load_search_record(str(tmp_path), "hurt")
    assert len(search.trials) == 2
    assert search.problems
    assert all("search.json" in p for p in search.problems)
    assert search.settings == {}
    assert search.tolerance == 0
    assert search.chosen() == {"": 0}


def test_a_missing_search_json_is_reported(tmp_path: Path) -> None:
    fake_search.write(tmp_path, fake_search.record("lost"), points((0.9, 1)))
    (tmp_path / "searches/lost/search.json").unlink()
    search = load_search_record(str(tmp_path), "lost")
    assert len(search.trials) == 1
    assert len(search.problems) == 1


def test_the_error_for_an_unknown_search_lists_the_searches(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"there is no search 'x' in .*; no search was started there"
    ):
        load_search_record(str(tmp_path), "x")
    fake_search.write(tmp_path, fake_search.record("meat-real"), [])
    with pytest.raises(UserError, match=r"there is no search 'x' in .*; it has meat-real"):
        load_search_record(str(tmp_path), "x")
    assert load_search_record(str(tmp_path), "meat-real").trials == []


def test_records_are_read_from_a_file_uri(tmp_path: Path) -> None:
    fake_search.write(tmp_path, fake_search.record("uri"), points((0.9, 1)))
    assert len(load_search_record(f"file://{tmp_path}", "uri").trials) == 1


def test_reading_the_records_loads_no_heavy_package() -> None:
    code = (
        "import sys, json, pipeline.results.trials; "
        "print(json.dumps([m for m in ('matplotlib', 'ray', 'mlflow', 'optuna', 'torch', "
        "'numpy') if m in sys.modules]))"
    )
    output = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
    ).stdout
    assert set(json.loads(output)) <= {"numpy"}  # pyarrow may import it
