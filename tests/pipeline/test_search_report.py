"""Tests of the report of a search: files, self-contained page, and pictures, for finished and
unfinished searches."""

import csv
import io
import math
import re
import sys
import warnings
from collections.abc import Iterator
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, cast

import fake_search as fake
import numpy as np
import pyarrow.parquet as pq
import pytest
from matplotlib.lines import Line2D
from PIL import Image

from pipeline.report import plots, search_page, search_plots
from pipeline.report.parameters import measure_importance, search_parameters, short_names
from pipeline.results.trials import (
    SearchRecord,
    Trial,
    best,
    get_search_lock_key,
    load_search_record,
    pareto,
    score,
)
from workers.errors import UserError
from workers.storage.lock import stage_lock

pytestmark = pytest.mark.usefixtures("small_pictures")

PICTURES = {
    "history.png",
    "parallel.png",
    "importance.png",
    "slices.png",
    "curves.png",
    "pareto.png",
}
VOID = {"meta", "img", "br"}


@pytest.fixture(autouse=True)
def _no_warnings() -> Iterator[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def made(
    tmp_path: Path, some: Any, won: Any = True, tests: Any = 3, drawn: Any = True, **settings: Any
) -> Any:
    """Return (search, report files). drawn: with pictures, which take seconds."""
    body = fake.record(**settings)
    number = best(
        [t for t in some if not some or t["phase"] == some[-1]["phase"]],
        body["settings"]["tolerance"],
    )
    winner = (
        fake.winner(next(t for t in some if t["number"] == number), tests)
        if won and number is not None
        else None
    )
    name = fake.write(tmp_path, body, some, winner)
    search_result = load_search_record(str(tmp_path), name)
    if drawn:
        return search_result, search_page.build_search_report(str(tmp_path), name)
    varied = search_parameters(search_result)
    return search_result, {
        "search.html": search_page.render_search_page(
            search_result, varied, [], measure_importance(search_result, varied)[1]
        ).encode()
    }


@pytest.fixture(scope="module")
def forty(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return made(tmp_path_factory.mktemp("forty"), fake.trials(40))


@pytest.fixture(scope="module")
def greedy(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return made(
        tmp_path_factory.mktemp("greedy"),
        fake.per_task(5),
        protocol="per_task",
        scheduler="none",
        algorithm="random",
    )


def page_of(search_result: Any) -> Any:
    return search_result[1]["search.html"].decode()


def words(search_result: Any) -> Any:
    """Return the visible text of the page."""
    text = re.sub(r"<style>.*?</style>|<img[^>]*>", "", page_of(search_result), flags=re.DOTALL)
    return " ".join(unescape(re.sub(r"<[^>]*>", " ", text)).replace("\u00a0", " ").split())


def x_values(line: Line2D) -> list[float]:
    return list(map(float, np.asarray(line.get_xdata())))


def y_values(line: Line2D) -> list[float]:
    return list(map(float, np.asarray(line.get_ydata())))


class Balance(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: Any, attrs: Any) -> None:
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: Any) -> None:
        assert self.open.pop() == tag


def check_page(search_result: Any) -> None:
    """Check that the page is well-formed and self-contained, without NaN, None or blank images."""
    page = page_of(search_result)
    parser = Balance()
    parser.feed(page)
    assert parser.open == []
    assert not re.findall(r'(?:src|href)="(?!data:image/png;base64,|#)', page)
    for anchor in re.findall(r"""href=["']#([^"']*)["']""", page):
        assert f'id="{anchor}"' in page
    assert " nan" not in words(search_result)
    assert "None" not in words(search_result)
    for name, data in search_result[1].items():
        if name.endswith(".png"):
            assert np.asarray(Image.open(io.BytesIO(data)).convert("L")).std() > 3, name


# ---- files ---------------------------------------------------------------------------------------
def test_finished_search_gives_page_tables_and_all_pictures(forty: Any) -> None:
    assert set(forty[1]) == {"search.html", "trials.csv", "trials.parquet"} | PICTURES
    check_page(forty)


def test_tables_list_every_trial_with_settings_as_columns(forty: Any) -> None:
    rows = list(csv.DictReader(io.StringIO(forty[1]["trials.csv"].decode())))
    table = pq.read_table(io.BytesIO(forty[1]["trials.parquet"])).to_pylist()
    assert list(rows[0]) == [
        "number",
        "phase",
        "status",
        *fake.SPACE,
        "accuracy",
        "forgetting",
        "bytes",
        "tasks_completed",
        "stages_run",
        "stages_reused",
        "device_s",
        "gpu_s",
        "origin",
        "message",
    ]
    assert list(table[0]) == list(rows[0])
    for t, row, line in zip(forty[0].trials, rows, table, strict=True):
        assert int(row["number"]) == line["number"] == t["number"]
        assert row["status"] == t["status"]
        assert line["methods.meat.mask_lr"] == t["params"]["methods.meat.mask_lr"]
        assert line["methods.meat.keep"] == t["params"].get("methods.meat.keep")
        assert line["methods.meat.token_mask_blocks"] == (
            "all" if t["params"]["methods.meat.token_mask_blocks"] == "all" else "[3, 6, 9]"
        )
        assert line["tasks_completed"] == len(t["results"])
        assert line["accuracy"] == (None if math.isnan(score(t)) else score(t))
        assert (line["stages_run"], line["stages_reused"], line["device_s"]) == (
            t["stages"]["run"],
            t["stages"]["reused"],
            t["device_s"],
        )
        assert row["message"] == t["message"]


@pytest.mark.slow
def test_the_same_records_give_the_same_files(tmp_path: Path) -> None:
    some = fake.trials(6, "none")
    assert made(tmp_path / "a", some)[1] == made(tmp_path / "b", some)[1]


# ---- the page ------------------------------------------------------------------------------------
def test_page_explains_winner_and_its_test_accuracy(forty: Any) -> None:
    text, won = words(forty), forty[0].trial(forty[0].winner["trial"])
    top = forty[0].trial(best(forty[0].trials))
    assert top["number"] != won["number"]
    assert f"Winner: trial {won['number']}" in text
    assert f"is {100 * score(top):.1f} % (trial {top['number']})" in text
    assert "up to the tolerance of 0.5 points count as equal" in text
    assert (
        f"Of these trial {won['number']}, with {100 * score(won):.1f} %, stores the fewest bytes "
        "per task: " in text
    )
    assert f"{100 * score(won) - 0.7:.1f} ± 0.4 %" in text
    assert "tested on test images, which were not read before the choice was made" in text
    assert (
        f"Its validation accuracy in the search was {100 * score(won):.1f} %, 0.7 points above that"
        in text
    )
    for seed in range(3):
        assert f"meat-real-winner-{seed}" in text
    assert "winner.yaml" in text


def test_the_page_explains_space_protocol_budget_and_cost(forty: Any) -> None:
    text = words(forty)
    for says in (
        "mask_lr loguniform from 0.0025 to 0.025, each order of magnitude equally likely "
        "methods.meat.mask_lr",
        "alpha choice one of 0.5, 1, 2, 4",
        "from 0.1 to 0.9; only where token_mask_blocks is [3, 6, 9]",
        "Every trial learns the whole stream",
        "(TPE)",
        "(ASHA)",
        "40 of 40 used",
        "1.85 of 4 used",
        "1 h 51 min in 2 sessions",
        "configs/real7-vit-tiny.yaml",
        "git_commit",
        "The search optimizes both accuracy and bytes",
    ):
        assert says in text, says
    run, reused, device = (
        sum(v)
        for v in zip(
            *((t["stages"]["run"], t["stages"]["reused"], t["device_s"]) for t in forty[0].trials),
            strict=True,
        )
    )
    assert f"stages computed {run} stages reused {reused}" in text
    assert (
        f"{100 * reused / (run + reused):.0f} % of the stages that trials needed were reused"
        in text
    )
    assert f"({device / 3600:.3g} device-hours)" in text


@pytest.mark.parametrize(
    ("protocol", "says"),
    [
        ("first_k_tasks", "learns the first 5 tasks of the stream"),
        ("two_streams", "tested on the other stream"),
        ("per_task", "The choice is greedy"),
    ],
)
def test_every_protocol_is_explained(tmp_path: Path, protocol: str, says: str) -> None:
    text = words(made(tmp_path, fake.trials(3, "none"), drawn=False, protocol=protocol))
    assert says in text
    assert ("so the two cannot be compared" in text) == (protocol != "per_task")


def test_trial_table_is_sorted_by_status_and_accuracy(forty: Any) -> None:
    page = page_of(forty)
    rows = re.findall(r"<tr><td class=left>(\d+)</td>(.*?)</tr>", page[page.index('id="trials"') :])
    order = [int(n) for n, _ in rows]
    by_number = {t["number"]: t for t in forty[0].trials}
    assert sorted(order) == sorted(by_number)
    states = [by_number[n]["status"] for n in order]
    assert states == sorted(states, key=["finished", "stopped", "running", "failed"].index)
    finished = [score(by_number[n]) for n in order if by_number[n]["status"] == "finished"]
    assert finished == sorted(finished, reverse=True)
    stopped = [len(by_number[n]["results"]) for n in order if by_number[n]["status"] == "stopped"]
    assert stopped == sorted(stopped, reverse=True)
    assert [int(n) for n, rest in rows if "<b>winner</b>" in rest] == [forty[0].winner["trial"]]


def test_error_of_failed_trials_is_shown_once_and_escaped(forty: Any) -> None:
    page, failed = page_of(forty), [t["number"] for t in forty[0].trials if t["status"] == "failed"]
    assert page.count("lower train.lr &lt;or&gt; mask_lr &amp; try again") == 1
    assert fake.ERROR not in page
    assert f"(trials {', '.join(map(str, failed))})" in words(forty)


def test_record_text_is_escaped_on_the_page(tmp_path: Path) -> None:
    evil = '<script>alert("x")</script>'
    some = [
        fake.trial(
            n,
            {"methods.meat.kind": evil, evil: 1.0 + n},
            "failed" if n == 2 else "finished",
            message=evil,
            accuracy=0.5 + n / 10,
            bytes=n + 1.0,
        )
        for n in range(5)
    ]
    for t in some:
        t["results"][0]["task"] = evil
    body = fake.record("evil", protocol=evil, algorithm=evil, scheduler=evil, seed=evil)
    body |= {
        "created": evil,
        "base": evil,
        "space": {evil: {"dist": evil, "low": 1, "high": 9, evil: evil}},
        "provenance": {evil: evil},
    }
    won = fake.winner(some[1]) | {"config": evil}
    won["tests"][0] |= {"seed": evil, "run": evil}
    fake.write(tmp_path, body, some, won)
    (tmp_path / "searches/evil/trials" / "<b>.json").write_text("{")
    search_result = (
        load_search_record(str(tmp_path), "evil"),
        search_page.build_search_report(str(tmp_path), "evil"),
    )
    assert "<script" not in page_of(search_result)
    assert "<b>.json" not in page_of(search_result)
    assert "&lt;b&gt;.json" in page_of(search_result)
    check_page(search_result)


def test_page_lists_phases_of_greedy_search_in_task_order(greedy: Any) -> None:
    text = words(greedy)
    at = [
        text.index(f" {task} mask_lr ", text.index("The settings chosen for each task"))
        for task in fake.TASKS[:4]
    ]
    assert at == sorted(at)
    assert "5 of 5" in text
    for phase, number in greedy[0].chosen().items():
        t = greedy[0].trial(number)
        assert re.search(
            rf" {phase} mask_lr [\d.]+, lambda {t['params']['methods.meat.lambda']:.4g}, [^%]* "
            rf"{number} 5 of 5 {100 * score(t):.1f} %",
            text,
        )
    assert "5 finished trials of those for aircraft" in text
    assert "budget of trials for each task 5 of 40 used" in text
    assert [
        r["tasks_completed"]
        for r in pq.read_table(io.BytesIO(greedy[1]["trials.parquet"])).to_pylist()
    ] == [1] * 5 + [2] * 5 + [3] * 5 + [4] * 5
    check_page(greedy)


def test_page_of_unfinished_search_shows_partial_results(tmp_path: Path) -> None:
    search_result = made(tmp_path, fake.trials(14), won=False, drawn=False)
    text = words(search_result)
    assert "not finished: there is no winner yet" in text
    assert "14 trials of 40 planned" in text
    assert "Leading so far: trial" in text
    assert "On test images" not in text
    check_page(search_result)


def test_search_with_only_failed_trials_is_reported_as_failed(tmp_path: Path) -> None:
    failed = [fake.trial(n, status="failed", results=[], message="no memory") for n in range(3)]
    text = words(made(tmp_path, failed, won=False, drawn=False))
    assert "failed: every trial failed, the table of trials says why" in text
    assert "no memory" in text
    assert "not finished" not in text


def test_page_shows_whether_search_is_running(tmp_path: Path) -> None:
    some = [*fake.trials(3), fake.trial(3, status="running", results=[])]
    fake.write(tmp_path, fake.record(), some)
    name = fake.record()["name"]

    def page() -> str:
        search_result = load_search_record(str(tmp_path), name)
        varied = search_parameters(search_result)
        return search_page.render_search_page(search_result, varied, [], "")

    with stage_lock(str(tmp_path / "searches"), get_search_lock_key(name), wait=False):
        running = page()
    assert '<meta http-equiv="refresh" content="20">' in running
    assert "loads itself again while the search runs" in running
    assert "1 running." in running
    assert ">running<" in running
    assert "interrupted" not in running
    killed = page()  # the system frees the lock of a killed process
    assert "refresh" not in killed
    assert "1 interrupted." in killed
    assert ">running" not in killed
    assert "not finished: there is no winner yet" in killed
    whole = search_page.build_search_report(str(tmp_path), name, is_running=True)[
        "search.html"
    ].decode()
    assert "loads itself again" in whole, "a bucket has no lock, so the argument decides"
    check_page((None, {"search.html": running.encode()}))


def test_trials_with_points_of_an_earlier_search_are_marked(tmp_path: Path) -> None:
    points = [{"trial": 7}, {"trial": 3}]
    body = fake.record() | {"warm_start": {"search": "earlier", "points": points}}
    fake.write(tmp_path, body, fake.trials(4))
    files = search_page.build_search_report(str(tmp_path), body["name"])
    rows = csv.DictReader(io.StringIO(files["trials.csv"].decode()))
    assert [row["origin"] for row in rows] == ["earlier 7", "earlier 3", "", ""]
    text = words((None, files))
    assert "The first 2 trials have points of search earlier" in text
    assert "of earlier 7" in text
    check_page((None, {"search.html": files["search.html"]}))


def test_search_with_no_or_one_trial_gives_a_report(tmp_path: Path) -> None:
    none = made(tmp_path / "none", [])
    assert set(none[1]) == {"search.html", "trials.csv", "trials.parquet"}
    assert "no trial has finished yet" in words(none)
    assert "mask_lr" in words(none)
    assert none[1]["trials.csv"].decode().startswith("number,phase,status,methods.meat.mask_lr")
    assert pq.read_table(io.BytesIO(none[1]["trials.parquet"])).num_rows == 0
    check_page(none)
    one = made(tmp_path / "one", [fake.trial(0)], tests=1)
    assert {"history.png", "slices.png", "curves.png"} <= set(one[1])
    assert "highest validation accuracy, " in words(one)
    assert "±" not in words(one)
    assert "2 seeds of 3 not tested yet" in words(one)
    check_page(one)


@pytest.mark.parametrize("status", ["failed", "running", "stopped"])
def test_search_without_finished_trials_gives_a_page(tmp_path: Path, status: str) -> None:
    search_result = made(tmp_path, [fake.trial(n, None, status, results=[]) for n in range(5)])
    assert "no trial has finished yet" in words(search_result)
    check_page(search_result)


def test_row_of_stopped_trial_gives_the_reason(tmp_path: Path) -> None:
    reason = "forgetting of 30.0 % after 3 tasks is more than max_forgetting, 25 %"
    stopped = fake.trial(5, None, "stopped", message=reason)
    search_result = made(
        tmp_path, [*fake.trials(4, "none"), stopped, fake.trial(6, None, "stopped")]
    )
    assert words(search_result).count(reason) == 1
    assert f"stopped early {reason}" in words(search_result)
    check_page(search_result)


def test_damaged_records_are_named_on_the_page(tmp_path: Path) -> None:
    name = fake.write(tmp_path, fake.record(), fake.trials(6), fake.winner(fake.trial(77)))
    (tmp_path / "searches" / name / "trials/0003.json").write_text("{")
    search_result = (
        load_search_record(str(tmp_path), name),
        {"search.html": search_page.build_search_report(str(tmp_path), name)["search.html"]},
    )
    assert "1 file could not be used" in words(search_result)
    assert "0003.json cannot be read" in words(search_result)
    check_page(search_result)


def test_missing_record_of_winner_is_reported_on_the_page(tmp_path: Path) -> None:
    fake.write(tmp_path, fake.record(), [], fake.winner(fake.trial(7)))
    search_result = (
        load_search_record(str(tmp_path), "meat-real"),
        search_page.build_search_report(str(tmp_path), "meat-real"),
    )
    assert "the record of trial 7 of winner.json is missing" in words(search_result)
    check_page(search_result)


def test_page_reports_winner_that_differs_from_rule(tmp_path: Path) -> None:
    some = [fake.trial(n, {}, accuracy=0.8 + n / 100) for n in range(3)]
    fake.write(tmp_path, fake.record(), some, fake.winner(some[0]))
    search_result = load_search_record(str(tmp_path), "meat-real")
    text = words(
        (
            search_result,
            {"search.html": search_page.render_search_page(search_result, [], [], "").encode()},
        )
    )
    assert "names trial 0 (80.0 %). The rule of this page gives trial 2" in text


def test_unknown_search_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no search 'x'"):
        search_page.build_search_report(str(tmp_path), "x")


@pytest.mark.slow
def test_page_of_five_hundred_trials_has_bounded_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # it would take seconds for 500 trials
    monkeypatch.setattr(search_page, "measure_importance", lambda *_: ({}, "not now"))
    search_result = made(tmp_path, fake.trials(500))
    without_pictures = re.sub(r"base64,[^\"]*", "", page_of(search_result))
    assert len(without_pictures) < 500_000
    assert len(re.findall(r"<tr>", without_pictures)) > 500
    assert (
        max(
            Image.open(io.BytesIO(v)).width
            for k, v in search_result[1].items()
            if k.endswith(".png")
        )
        <= 10.5 * plots.DPI
    )


def test_only_most_important_of_many_parameters_are_drawn(tmp_path: Path) -> None:
    space = {f"methods.meat.s{i}": {"dist": "uniform", "low": 0, "high": 1} for i in range(20)}
    some = [
        fake.trial(
            n,
            {k: ((n * 7 + i * 3) % 11) / 11 for i, k in enumerate(space)},
            accuracy=0.5 + ((n * 7 + 57) % 11) / 30,
        )
        for n in range(8)
    ]
    body = fake.record()
    fake.write(tmp_path, body | {"space": space}, some)
    search_result = (
        load_search_record(str(tmp_path), "meat-real"),
        search_page.build_search_report(str(tmp_path), "meat-real"),
    )
    assert "Only the 12 most important settings of 20 are drawn" in words(search_result)
    check_page(search_result)


# ---- parameters and their importance -------------------------------------------------------------
def of(tmp_path: Path, some: Any, space: Any = None) -> Any:
    body = fake.record()
    fake.write(tmp_path, body | ({"space": space} if space is not None else {}), some)
    return load_search_record(str(tmp_path), "meat-real")


def test_short_names_drop_shared_prefix_but_stay_distinct() -> None:
    assert short_names(["methods.meat.lambda", "methods.meat.train.lr", "train.epochs"]) == {
        "methods.meat.lambda": "lambda",
        "methods.meat.train.lr": "train.lr",
        "train.epochs": "train.epochs",
    }
    assert short_names(["methods.a.lr", "methods.b.lr"]) == {
        "methods.a.lr": "a.lr",
        "methods.b.lr": "b.lr",
    }
    assert short_names(["methods.a.train.lr", "train.lr"]) == {
        "methods.a.train.lr": "methods.a.train.lr",
        "train.lr": "train.lr",
    }


def test_axes_have_scale_and_limits_of_their_dimension(tmp_path: Path) -> None:
    lr, lam, alpha, blocks, keep = search_parameters(of(tmp_path, fake.trials(10)))
    assert (lr.log, lr.low, lr.high, lr.categories) == (True, 0.0025, 0.025, ())
    assert (lam.log, lam.low, lam.high) == (False, 0.5, 1)
    assert alpha.categories == ("0.5", "1", "2", "4")
    assert blocks.categories == ("all", "[3, 6, 9]")
    assert math.isnan(keep.position(cast(Trial, {"params": {}})))
    assert alpha.position(cast(Trial, {"params": {"methods.meat.alpha": 2.0}})) == 2
    assert lr.axis_share(math.sqrt(0.0025 * 0.025)) == pytest.approx(0.5)
    assert [lr.at_end(v) for v in (0.0025, 0.00252, 0.008, 0.025)] == [True, True, False, True]
    assert [alpha.at_end(v) for v in (0.5, 1, 4)] == [True, False, True]
    assert not blocks.at_end("all")


def test_method_specific_settings_name_their_method(tmp_path: Path) -> None:
    space = {
        "method": {"dist": "choice", "values": ["meat", "hat"]},
        "methods.meat.lambda": fake.SPACE["methods.meat.lambda"],
        "methods.hat.s_max": {"dist": "int", "low": 100, "high": 400, "when": {}},
    }
    search_result = search_parameters(of(tmp_path, [], space))
    assert [(p.name, p.says) for p in search_result] == [
        ("method", "one of meat, hat"),
        ("meat.lambda", "from 0.5 to 1; only where method is meat"),
        ("hat.s_max", "whole numbers from 100 to 400; only where method is hat"),
    ]


def test_parameters_removed_from_space_are_kept(tmp_path: Path) -> None:
    search_result = search_parameters(
        of(
            tmp_path,
            [
                fake.trial(0, {"train.lr": 1e-3}, accuracy=0.5),
                fake.trial(1, {"train.lr": "high"}, accuracy=0.5),
            ],
            {},
        )
    )
    assert [(p.key, p.categories, p.says) for p in search_result] == [
        ("train.lr", ("0.001", "high"), "not in the space any more")
    ]


def test_importance_is_highest_for_the_decisive_setting(tmp_path: Path) -> None:
    search_result = of(
        tmp_path,
        [
            t | {"status": "finished", "results": fake.trial(t["number"])["results"]}
            for t in fake.trials(40)
        ],
    )
    shares, reason = measure_importance(search_result, search_parameters(search_result))
    assert reason == ""
    assert next(iter(shares)) == "methods.meat.mask_lr"
    assert shares["methods.meat.mask_lr"] > 0.6
    assert sum(shares.values()) == pytest.approx(1)
    assert set(shares) == set(fake.SPACE)  # includes conditional settings
    assert measure_importance(search_result, search_parameters(search_result)) == (shares, "")


def test_importance_ignores_unfinished_trials(tmp_path: Path) -> None:
    some = [
        fake.trial(
            n,
            {"methods.meat.lambda": n / 10, "methods.meat.alpha": n % 2 + 1},
            accuracy=0.5 + n % 2 / 10,
        )
        for n in range(8)
    ]
    some += [
        fake.trial(n, {"methods.meat.lambda": 5.0, "methods.meat.alpha": 1}, status, accuracy=0.01)
        for n, status in ((8, "stopped"), (9, "failed"))
    ]
    search_result = of(tmp_path, some, {})
    assert (
        next(iter(measure_importance(search_result, search_parameters(search_result))[0]))
        == "methods.meat.alpha"
    )


def test_missing_importance_is_explained_for_few_or_equal_trials(tmp_path: Path) -> None:
    few = made(tmp_path / "few", fake.trials(3, "none"), drawn=False)
    assert "measured once 4 trials have finished" in words(few)
    equal = made(tmp_path / "equal", [fake.trial(n, accuracy=0.5) for n in range(6)])
    assert "all finished trials have the same accuracy" in words(equal)
    check_page(equal)


def test_without_optuna_only_importance_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    search_result = made(tmp_path, fake.trials(6, "none"))
    assert set(search_result[1]) == {"search.html", "trials.csv", "trials.parquet"} | PICTURES - {
        "importance.png"
    }
    assert "optuna is not installed; pip install optuna" in words(search_result)
    check_page(search_result)


# ---- pictures ------------------------------------------------------------------------------------
def test_parallel_plot_lines_end_at_accuracy_with_winner_on_top(forty: Any) -> None:
    search_result: SearchRecord = forty[0]
    axes = search_plots.draw_parallel(search_result, search_parameters(search_result)).axes[0]
    trials = [line for line in axes.lines if len(x_values(line)) >= len(fake.SPACE)]
    assert len(trials) == len(search_result.trials)
    (winner,) = [line for line in trials if line.get_color() == search_plots.WINNER]
    assert winner.get_zorder() > max(line.get_zorder() for line in trials if line is not winner)
    whole = [line for line in trials if len(x_values(line)) == len(fake.SPACE) + 1]
    assert len(whole) == len(search_result.standing())
    heights = [y_values(line)[-1] for line in whole]
    assert min(heights) >= 0
    assert max(heights) <= 1
    absent = sum(y_values(line)[4] == search_plots.ABSENT for line in trials)
    assert absent == sum("methods.meat.keep" not in t["params"] for t in search_result.trials)
    assert all(0 <= y <= 1 for line in trials for y in y_values(line) if y != search_plots.ABSENT)


def test_curves_end_where_a_trial_was_stopped(forty: Any) -> None:
    axes = search_plots.draw_trial_curves(forty[0]).axes[0]
    drawn = sorted(len(x_values(line)) for line in axes.lines if line.get_linestyle() == "-")
    assert drawn == sorted(len(t["results"]) for t in forty[0].trials if t["results"])
    assert [t.get_text() for t in axes.get_xticklabels()] == fake.TASKS


def test_history_line_never_falls_within_a_phase(greedy: Any) -> None:
    axes = search_plots.draw_history(greedy[0]).axes[0]
    steps = [line for line in axes.lines if line.get_drawstyle() == "steps-post"]
    assert len(steps) == 4
    for line, phase in zip(steps, greedy[0].phases, strict=True):
        assert (np.diff(y_values(line)) >= 0).all()
        assert y_values(line)[-1] == max(score(t) for t in greedy[0].of(phase))


def test_failed_trials_lie_at_the_bottom_of_the_history(forty: Any) -> None:
    axes = search_plots.draw_history(forty[0]).axes[0]
    low = [line for line in axes.lines if line.get_marker() == "x"]
    assert [int(n) for line in low for n in x_values(line)] == [
        t["number"] for t in forty[0].trials if t["status"] == "failed"
    ]
    assert {y for line in low for y in y_values(line)} == {axes.get_ylim()[0]}


def test_pareto_front_is_drawn_only_if_sizes_differ(tmp_path: Path) -> None:
    some = [fake.trial(n, accuracy=0.5 + n / 10, bytes=1000.0) for n in range(4)]
    some += [fake.trial(4, None, "stopped", accuracy=0.5, bytes=5.0)]
    assert not search_plots.sizes_differ(of(tmp_path / "equal", some))
    assert search_plots.sizes_differ(
        of(tmp_path / "other", [*some, fake.trial(5, accuracy=0.5, bytes=5.0)])
    )
    assert "pareto.png" not in made(tmp_path / "drawn", some[:1])[1]


def test_front_plot_shows_exactly_the_pareto_trials(forty: Any) -> None:
    axes = search_plots.draw_front(forty[0]).axes[0]
    (line,) = [line for line in axes.lines if line.get_drawstyle() == "steps-post"]
    assert {int(t.get_text()) for t in axes.texts} == set(pareto(forty[0].trials))
    assert (np.diff(x_values(line)) > 0).all()
    assert (np.diff(y_values(line)) > 0).all()
    assert axes.get_xscale() == "log"


def test_slices_show_each_parameter_on_its_own_scale(forty: Any) -> None:
    varied = search_parameters(forty[0])
    axes = search_plots.draw_slices(forty[0], varied).axes[:5]
    assert [a.get_title(loc="left") for a in axes] == [p.name for p in varied]
    assert [a.get_xscale() for a in axes] == ["log", "linear", "linear", "linear", "linear"]
    finished_trials = [t for t in forty[0].trials if t["number"] in forty[0].standing()]
    points = [sum(len(x_values(line)) for line in a.lines) for a in axes]
    assert points == [len(finished_trials)] * 4 + [
        sum("methods.meat.keep" in t["params"] for t in finished_trials)
    ]
    assert axes[1].get_xlim()[0] < 0.5 < 1 < axes[1].get_xlim()[1]
