"""Tests of `compare`: seed groups, means and differences, common tasks, the page, and errors."""

import copy
import csv
import errno
import math
import re
import statistics
from pathlib import Path
from typing import Any

import fake_run
import pytest

from pipeline import cli
from pipeline.graph.store import Store
from pipeline.report import comparison_files
from pipeline.report.comparison import Spread, compare_runs, group_runs
from pipeline.report.comparison_page import render_comparison_page
from pipeline.results.metrics import METRICS
from pipeline.results.tables import RunTables
from workers.errors import UserError
from workers.storage.artifact import Artifact

pytestmark = pytest.mark.usefixtures("small_pictures")

TASKS = [t["name"] for t in fake_run.TASKS]


def run_of(
    storage: Any,
    name: Any,
    seed: Any = 3,
    labels: Any = ("meat",),
    shift: Any = 0,
    tasks: Any = TASKS,
    commit: Any = "",
    **settings: Any,
) -> Any:
    """Return a run of some methods.

    Args:
        shift: Number of correct test images to add to each stored task result.
    """
    record = copy.deepcopy(fake_run.record(name))
    record["config"] |= {
        "seed": seed,
        **settings,
        "methods": {label: {"method": fake_run.METHODS[label]} for label in labels},
    }
    record["provenance"] = {"git_commit": commit} if commit else {}
    record["tasks"] = [next(t for t in record["tasks"] if t["name"] == name) for name in tasks]
    record["stages"] = [
        s
        for s in record["stages"]
        if s["label"] in (None, *labels) and (s["task"] in (None, *tasks) or not s["label"])
    ]
    tables = RunTables.load(storage, record)
    for stage_id, artifact in list(tables.artifacts.items()):
        if stage_id.endswith("/evaluate"):
            manifest = copy.deepcopy(artifact.manifest)
            result = manifest["result"]
            result["rows"] = [row for row in result["rows"] if row["task"] in tasks]
            for row in [*result["rows"], *([result["canary"]] if result["canary"] else [])]:
                row["correct"] += shift
            tables.artifacts[stage_id] = Artifact(artifact.root, artifact.key, manifest)
    return tables


def accuracy(run: Any, label: Any = "meat") -> Any:
    return run.matrix(label).final["average_accuracy"]


def text_of(html: Any) -> Any:
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", re.sub(r"<style>.*?</style>", "", html)))


# ---- numbers -------------------------------------------------------------------------------------
def test_runs_differing_only_in_seed_and_name_form_one_group(storage: Any) -> None:
    runs = [
        run_of(storage, "a", 0),
        run_of(storage, "b", 1),
        run_of(storage, "c", 0, train={"lr": 0.5}),
        run_of(storage, "d", 1, cluster={"workers": 4}),
    ]
    assert [[r.record["name"] for r in g.runs.values()] for g in group_runs(runs)] == [
        ["a", "b"],
        ["c"],
        ["d"],
    ]  # d is not in the first group, which already has seed 1
    assert [g.name for g in group_runs(runs)] == ["a (2 seeds)", "c", "d"]


def test_mean_and_deviation_are_sample_statistics(storage: Any) -> None:
    runs = [
        run_of(storage, name, seed, shift=shift)
        for name, seed, shift in (("a", 0, 0), ("b", 1, 2), ("c", 2, 6))
    ]
    comparison = compare_runs(runs)
    values = [accuracy(r) for r in runs]
    spread = comparison.entries[0].spread("average_accuracy")
    assert spread.n == 3
    assert spread.mean == pytest.approx(statistics.fmean(values))
    assert spread.deviation == pytest.approx(statistics.stdev(values))
    assert math.isnan(
        compare_runs([runs[0], run_of(storage, "x", 0, train={})])
        .entries[0]
        .spread("average_accuracy")
        .deviation
    )
    assert (
        comparison.entries[0].spread("bytes_per_task").mean
        == runs[0].summary()[0]["bytes_per_task"]
    )


def test_differences_are_paired_by_seed_where_seeds_match(storage: Any) -> None:
    first = [run_of(storage, "a", 0, shift=0), run_of(storage, "b", 1, shift=6)]
    second = [
        run_of(storage, "c", 1, shift=7, train={}),
        run_of(storage, "d", 0, shift=2, train={}),
        run_of(storage, "e", 5, shift=50, train={}),
    ]
    comparison = compare_runs([*first, *second])
    pairs = [accuracy(second[1]) - accuracy(first[0]), accuracy(second[0]) - accuracy(first[1])]
    spread = comparison.entries[1].difference(comparison.entries[0], "average_accuracy")
    assert (spread.n, spread.paired) == (2, True)
    assert spread.mean == pytest.approx(statistics.fmean(pairs))
    assert spread.deviation == pytest.approx(statistics.stdev(pairs))


def test_unpaired_difference_subtracts_means_and_combines_deviations(storage: Any) -> None:
    comparison = compare_runs(
        [
            run_of(storage, "a", 0),
            run_of(storage, "b", 1, shift=4),
            run_of(storage, "c", 2, train={}),
            run_of(storage, "d", 3, shift=2, train={}),
        ]
    )
    first_spread, base = (comparison.entries[i].spread("average_accuracy") for i in (1, 0))
    spread = comparison.entries[1].difference(comparison.entries[0], "average_accuracy")
    assert not spread.paired
    assert spread.mean == pytest.approx(first_spread.mean - base.mean)
    assert spread.deviation == pytest.approx(math.hypot(first_spread.deviation, base.deviation))


def test_mean_is_nan_if_a_run_has_no_value() -> None:
    assert math.isnan(Spread.of([0.5, math.nan]).mean)
    assert Spread.of([0.5]).mean == 0.5


def test_baseline_is_the_first_runs_same_or_only_method(storage: Any) -> None:
    both = run_of(storage, "both", labels=("meat", "finetune"))
    comparison = compare_runs(
        [
            both,
            run_of(storage, "one", labels=("finetune",)),
            run_of(storage, "other", labels=("hat-small",)),
        ]
    )
    assert [e.name for e in comparison.entries] == ["both: meat", "both: finetune", "one", "other"]
    assert [b.name if (b := comparison.base(e)) else None for e in comparison.entries] == [
        None,
        None,
        "both: finetune",
        None,
    ]
    comparison = compare_runs([run_of(storage, "one", labels=("finetune",)), both])
    assert [b.name if (b := comparison.base(e)) else None for e in comparison.entries] == [
        None,
        "one",
        "one",
    ]


# ---- tasks ---------------------------------------------------------------------------------------
def test_only_common_tasks_are_compared_with_a_note(storage: Any) -> None:
    whole, part = run_of(storage, "a"), run_of(storage, "b", tasks=["shapes", "birds", "roots"])
    comparison = compare_runs([whole, part])
    assert comparison.tasks == ["shapes", "birds", "roots"]
    assert "Left out: leaves" in comparison.notes[0]
    rates = [whole.matrix("meat").rates[i, i] for i in (0, 1, 3)]
    assert comparison.entries[0].spread("average_accuracy").mean == pytest.approx(
        statistics.fmean(rates)
    )
    assert (
        comparison.entries[0].spread("average_accuracy").mean
        == comparison.entries[1].spread("average_accuracy").mean
    )


def test_runs_without_a_common_task_are_refused(storage: Any) -> None:
    with pytest.raises(
        UserError,
        match=r"runs a and b have no task in common \(the first has shapes, birds\); compare runs "
        r"on the same tasks",
    ):
        compare_runs(
            [
                run_of(storage, "a", tasks=["shapes", "birds"]),
                run_of(storage, "b", tasks=["leaves", "roots"]),
            ]
        )
    other = run_of(storage, "b", tasks=["birds"])
    other.record["tasks"][0]["classes"] = [
        "wren",
        "owl",
        "swan",
    ]  # same name, other classes
    with pytest.raises(UserError, match="no task in common"):
        compare_runs([run_of(storage, "a", tasks=["birds"]), other])


def test_tasks_in_another_order_are_matched_by_name(storage: Any) -> None:
    turned = run_of(
        storage, "b", labels=("finetune",), tasks=["shapes", "leaves", "birds", "roots"]
    )
    comparison = compare_runs([run_of(storage, "a", labels=("finetune",)), turned])
    assert any("different orders" in note for note in comparison.notes)
    rows = {(r["entry"], r["after"], r["task"]): r["accuracy"] for r in comparison.matrix_rows()}
    assert rows["b", "roots", "leaves"] == turned.matrix("finetune").rates[3, 1]


def test_unfinished_run_has_no_averages_and_a_note(storage: Any) -> None:
    run = run_of(storage, "b", train={})
    del run.artifacts["meat/roots/evaluate"]
    comparison = compare_runs([run_of(storage, "a"), run])
    assert math.isnan(comparison.entries[1].spread("average_accuracy").mean)
    assert any("meat of run b has finished 3 of these 4 tasks" in note for note in comparison.notes)
    assert "finished 3 of these 4" in text_of(render_comparison_page(comparison))


# ---- other differences ---------------------------------------------------------------------------
def test_only_differing_settings_and_provenance_are_shown(
    storage: Any,
) -> None:
    comparison = compare_runs(
        [
            run_of(storage, "a", train={"epochs": 6, "lr": 0.1}),
            run_of(storage, "b", train={"epochs": 6, "lr": 0.2}, commit="feed"),
        ]
    )
    assert comparison.setting_rows() == [{"name": "train.lr", "a": "0.1", "b": "0.2"}]
    assert comparison.provenance_rows() == [
        {"name": "git_commit", "a": "0123456789abcdef", "b": "feed, 0123456789abcdef"}
    ]


def test_shared_stages_are_those_with_the_same_key(storage: Any) -> None:
    other = run_of(storage, "b", train={})
    for stage in other.record["stages"]:
        if stage["label"]:
            stage["key"] = "x" + stage["key"][1:]
    comparison = compare_runs([run_of(storage, "a"), other])
    assert [row["stage"] for row in comparison.stage_rows()] == [
        "data/shapes",
        "data/birds",
        "data/plants",
        "backbone",
    ]
    assert {row["runs"] for row in comparison.stage_rows()} == {"a, b"}


# ---- the page and the command --------------------------------------------------------------------
def test_comparison_page_is_self_contained_and_explains_its_metrics(storage: Any) -> None:
    html = render_comparison_page(
        compare_runs(
            [
                run_of(storage, "a<b>", 0),
                run_of(storage, "b", 1, shift=3),
                run_of(storage, "c", 0, shift=2, train={"lr": 0.1}),
            ]
        )
    )
    assert not re.search(r'(src|href)="(?!data:|#)', html)
    text = text_of(html)
    for words in (
        "Comparison of 3 runs",
        "Differences from a&lt;b&gt; (2 seeds)",
        "1 pair",
        "pp",
        "train.lr",
        "Shared stages",
        "Averages after each task",
    ):
        assert words in text
    assert html.count("<img") == 2
    assert all(
        METRICS[name].meaning in text
        for name in ("average_accuracy", "forgetting", "bytes_per_task")
    )


@pytest.fixture
def stored(storage: Any) -> Any:
    for name, seed, lr in (("one", 0, 0.1), ("two", 1, 0.1), ("three", 0, 0.2)):
        run = run_of(storage, name, seed, train={"lr": lr})
        Store(storage).save_record(run.record)
    return storage


def test_command_writes_page_and_tables_and_prints_a_summary(
    stored: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "page.html"
    assert cli.main(["compare", "one", "two", "three", "--storage", stored, "--out", str(out)]) == 0
    output = capsys.readouterr().out
    assert re.search(r"one \(2 seeds\) +2 +\d\d\.\d ± 0\.0 %", output)
    assert re.search(r"three +1 +\d\d\.\d % .*\+0\.0 pp", output)
    assert re.search(r"train\.lr +0\.1 +0\.2", output)
    folder = Path(stored) / "compare" / "one~two~three"
    assert out.read_bytes() == (folder / "compare.html").read_bytes()
    assert {p.name for p in folder.iterdir()} == {
        "compare.html",
        *(
            f"{n}.csv"
            for n in ("summary", "differences", "matrices", "curves", "settings", "stages")
        ),
    }
    with (folder / "summary.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    assert {r["entry"] for r in rows} == {"one (2 seeds)", "three"}


def test_read_only_storage_error_names_the_out_option(
    stored: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(path: str, data: bytes) -> None:
        raise OSError(errno.EROFS, "Read-only file system", path)

    monkeypatch.setattr(comparison_files, "write_bytes", refuse)
    command = ["compare", "one", "two", "--storage", stored]
    assert cli.main(command) == 2
    assert capsys.readouterr().err == (
        f"accrete: storage '{stored}' may only be read here (Read-only file system), and the page "
        "belongs into it; write the page to another file with --out FILE\n"
    )
    assert cli.main([*command, "--out", str(tmp_path / "page.html")]) == 0


def test_folder_name_of_many_runs_is_short_and_unique() -> None:
    from pipeline.report.comparison_files import make_folder_name

    names = [f"a-rather-long-name-{i}" for i in range(40)]
    assert len(make_folder_name(names)) < 140
    assert make_folder_name(names) != make_folder_name([*names[:-1], "other"])
    assert make_folder_name(["a", "b"]) == "a~b"


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["one"], "compare: 'one' is one run; give two or more"),
        (["one", "one"], "compare: run 'one' is named twice; name each run once"),
        (["one", "twoo"], "has no record of a run 'twoo'; did you mean 'two'?"),
        (["one", "zzzzzz"], "has no record of a run 'zzzzzz'; there are: one, three, two"),
        (["one", "x.yaml"], "config 'x.yaml' does not exist"),
        (["one", "two", "--out", "/nowhere/x.html"], "--out '/nowhere/x.html' cannot be written"),
    ],
)
def test_invalid_arguments_give_a_one_line_error(
    stored: Any, argv: Any, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["compare", *argv, "--storage", stored]) == 2
    output = capsys.readouterr().err
    assert sentence in output
    assert output.count("\n") == 1


@pytest.mark.parametrize(
    "record",
    [
        "{",
        '{"name": "two", "stages": [1]}',
        '{"stages": []}',
        '{"name": "../../../escape", "stages": []}',
    ],
)
def test_damaged_run_record_is_named_in_the_error(
    stored: Any, record: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = Path(stored) / "runs" / "two" / "run.json"
    path.write_text(record)
    assert cli.main(["compare", "one", "two", "--storage", stored]) == 2
    output = capsys.readouterr().err
    assert "the record of run 'two'" in output
    assert output.count("\n") == 1
