"""Tests of paper tables: the shipped files, the runs that they start, and the output."""

from __future__ import annotations

import csv
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

import pipeline
from pipeline import cli
from pipeline.app import reproduction
from pipeline.app.reproduction import Cell, Reproduction, count_mean_orders, count_orders
from pipeline.config import settings
from pipeline.config.paper_tables import (
    TASK,
    PaperTable,
    find_paper_table,
    list_paper_tables,
    list_runs,
    read_paper_table,
)
from pipeline.data import placeholders
from pipeline.data.card_files import load_card_file
from pipeline.report import paper_table
from pipeline.results.metrics import METRICS
from tests import small_run
from workers.errors import UserError

pytestmark = pytest.mark.usefixtures("small_pictures")

# Some values by table, row, part and column, as the papers print them.
PRINTED = {
    ("meat-table-1", "MEAT", "DeiT-Ti", "CUB"): 71.16,
    ("meat-table-1", "HAT", "DeiT-S", "WikiArt"): 70.43,
    ("meat-table-1", "Adaptor-B", "T2T-ViT-12", "CIFAR-100"): 73.58,
    ("meat-table-1", "LwF", "DeiT-S", "Cars"): 74.00,
    ("dytox-cifar100", "DyTox", "10 steps", "Avg"): 67.33,
    ("dytox-cifar100", "DER w/o P", "50 steps", "Last"): 59.08,
    ("dytox-cifar100", "PODNet", "20 steps", "Avg"): 53.97,
    ("toast-fine-grained", "TOAST", "ViT-B", "Cars"): 84.5,
    ("toast-fine-grained", "LoRA", "ViT-B", "mean"): 79.8,
    ("meat-imagenet", "LwF", "DeiT-S", "ImageNet"): 23.01,
    ("cb-imagenet", "CB - plain", "ViT-Ti", "top-1"): 1.0,
    ("cb-variants", "CB at the end of the MLP", "ViT-S", "top-1"): 0.6,
}


def test_paper_tables_contain_the_printed_values() -> None:
    for (table, row, part, column), value in PRINTED.items():
        assert read_paper_table(find_paper_table(table)).rows[row].paper[part][column] == value


@pytest.mark.parametrize("name", list_paper_tables())
def test_every_table_can_be_computed_at_each_scale(name: str) -> None:
    """The configs exist, and have the methods of the rows and the tasks and metrics of columns."""
    file = find_paper_table(name)
    table = read_paper_table(file)
    assert set(table.scales) >= {"paper", "small"}
    rates = {metric.name for metric in METRICS.values() if metric.unit == "rate"}
    for scale_name, scale in table.scales.items():
        labels: dict[str, set[str]] = {}
        for run in list_runs(file, table, scale_name):
            config = settings.load(str(run.config), run.overrides)
            if scale_name == "small":
                assert config.backbone.img_size == 16, "a larger image takes hours and gigabytes"
            labels.setdefault(run.run, set()).update(config.methods)
            tasks = {f"{TASK}{task.name or task.card}" for task in config.stream.tasks}
            assert set(scale.columns.values()) <= tasks | rates
        for row in table.rows.values():
            (run_name,) = scale.find_runs(row)
            assert row.method in labels[run_name]


BODY: dict[str, Any] = {
    "title": "A table",
    "source": "nobody",
    "rows": {
        "one": {"method": "finetune", "paper": {"here": {"second": 40.0}}},
        "two": {"method": "meat", "paper": {"here": {"second": 60.0}}},
        "gain": {"method": "meat", "minus": "one"},
    },
    "scales": {
        "paper": {
            "about": "two tasks",
            "runs": {"all": {"config": "config.yaml"}},
            "parts": {"here": [], "with one epoch": ["train.epochs=1"]},
            "columns": {"second": "task:a", "average": "average_accuracy"},
        }
    },
}


@pytest.fixture
def table_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the file of a table with two parts, in the current folder."""
    cards = small_run.make_cards(tmp_path, ("base", "a"))
    small_run.write_config(tmp_path / "config.yaml", small_run.make_body(tmp_path, cards))
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(BODY, sort_keys=False))
    monkeypatch.chdir(tmp_path)
    return path


def read_cells(folder: Path) -> dict[tuple[str, str, str], tuple[float, str]]:
    with (folder / "storage" / "papers" / "tiny-paper.csv").open(newline="") as file:
        return {
            (row["part"], row["row"], row["column"]): (float(row["value"]), row["paper"])
            for row in csv.DictReader(file)
        }


def test_second_reproduction_of_a_table_runs_nothing(
    table_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing runs without `--scale`, and a second call runs nothing again."""
    assert cli.main(["reproduce", str(table_file)]) == 0
    before = capsys.readouterr().out
    assert "not measured yet" in before
    assert not (table_file.parent / "storage" / "stages").exists()

    assert cli.main(["reproduce", str(table_file), "--scale", "paper"]) == 0
    output = capsys.readouterr().out
    cells = read_cells(table_file.parent)
    parts = BODY["scales"]["paper"]["parts"]
    assert len(cells) == len(parts) * 3 * 2
    for part, name in {"here": "here", "with one epoch": "with-one-epoch"}.items():
        results = small_run.results(table_file.parent / "storage", f"tiny-paper-{name}")
        for row, label in {"one": "finetune", "two": "meat"}.items():
            (last,) = [
                entry for entry in results[f"{label}/a/evaluate"]["rows"] if entry["task"] == "a"
            ]
            assert cells[part, row, "second"][0] == pytest.approx(
                100 * last["correct"] / last["total"]
            )
        for column in ("second", "average"):
            one, two, gain = (cells[part, row, column][0] for row in ("one", "two", "gain"))
            assert gain == pytest.approx(two - one)
    assert cells["here", "two", "second"][1] == "60.0"
    value = cells["here", "two", "second"][0]
    assert f"two   {value:6.1f}  60.00" in output
    assert (table_file.parent / "storage" / "papers" / "tiny-paper.png").stat().st_size > 1000

    attempts = small_run.attempts(table_file.parent / "storage", "tiny-paper-here")
    assert cli.main(["reproduce", str(table_file), "--scale", "paper"]) == 0
    assert small_run.attempts(table_file.parent / "storage", "tiny-paper-here") == attempts
    assert read_cells(table_file.parent) == cells
    capsys.readouterr()
    assert cli.main(["reproduce", str(table_file)]) == 0
    assert f"{value:.1f}" in capsys.readouterr().out, "stored values are shown without a scale"
    frame = pipeline.reproduce(table_file, "paper", run=False)
    assert [*frame.columns] == ["part", "row", "column", "value", "paper"]
    by_cell = {(row.part, row.row, row.column): row.value for row in frame.itertuples()}
    assert by_cell == {cell: values[0] for cell, values in cells.items()}
    with pytest.raises(UserError, match="one of paper, real, small"):
        pipeline.reproduce(table_file, "large")


def test_row_order_is_compared_per_column() -> None:
    def cell(row: str, column: str, value: float, paper: float) -> Cell:
        return Cell("", row, column, value, paper)

    cells = [
        cell("a", "x", 1, 10),
        cell("b", "x", 2, 20),
        cell("c", "x", 3, 15),
        cell("a", "y", 5, 1),
        cell("b", "y", 6, 2),
        cell("c", "y", math.nan, 3),
    ]
    # x: a < b and a < c agree, c < b does not; y: a < b agrees, and c is unknown
    assert count_orders(cells) == (3, 4)
    assert count_orders([cell("a", "x", 1, 7), cell("b", "x", 2, 7)]) == (0, 0)


def test_mean_order_uses_only_parts_that_both_rows_have() -> None:
    """Row `c` has a value in the easy part only, which must not put it before the others."""
    rows = {
        "a": {"method": "a", "paper": {"easy": {"x": 90.0}, "hard": {"x": 10.0}}},
        "b": {"method": "b", "paper": {"easy": {"x": 80.0}, "hard": {"x": 30.0}}},
        "c": {"method": "c", "paper": {"easy": {"x": 70.0}}},
    }
    scale = {"about": "", "runs": {"all": {"config": "c"}}, "columns": {"y": "average_accuracy"}}
    table = PaperTable.model_validate(
        {"title": "", "source": "", "rows": rows, "scales": {"small": scale}}
    )
    cells = [
        Cell("", row, "y", value, math.nan) for row, value in (("a", 2.0), ("b", 3.0), ("c", 1.0))
    ]
    result = Reproduction("t", "small", table, cells, "")
    # a and b are compared by both parts (50 < 55), and c with a and b by the easy part
    assert count_mean_orders(result) == (3, 3)


def test_picture_has_either_values_or_differences(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Accuracies and their differences have no common scale."""
    drawn: list[tuple[list[str], str]] = []
    draw_cells = paper_table.draw_cells

    def draw(title: str, cells: Any, unit: str = "%") -> Any:
        drawn.append(([cell["row"] for cell in cells], unit))
        return draw_cells(title, cells, unit)

    monkeypatch.setattr(paper_table, "draw_cells", draw)
    for differences in (1, 2):
        rows: dict[str, Any] = {"plain": {"method": "a"}}
        names = [f"gain {number}" for number in range(differences)]
        rows |= {name: {"method": "b", "minus": "plain"} for name in names}
        table = PaperTable.model_validate({**BODY, "rows": rows})
        cells = [Cell("", row, "y", 50.0, math.nan) for row in rows]
        reproduction.write_files(Reproduction("t", "small", table, cells, str(tmp_path)))
    assert drawn == [(["plain"], "%"), (["gain 0", "gain 1"], "points")]


def test_reproduction_plan_needs_no_data(
    table_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A data set missing on this machine is counted from its card, and named."""
    card = table_file.parent / "cards" / "a.yaml"
    body = yaml.safe_load(card.read_text())
    body["source"]["path"] = str(table_file.parent / "nowhere")
    body["counts"] = {"train": 1000, "test": 500}
    card.write_text(yaml.safe_dump(body))
    assert cli.main(["reproduce", str(table_file), "--scale", "paper"]) == 2
    capsys.readouterr()
    assert cli.main(["reproduce", str(table_file), "--scale", "paper", "--plan"]) == 0
    output = capsys.readouterr().out
    # A tenth of the 1000 images is held out for validation. The 20 test images of one task are
    # evaluated twice, the 500 of the other one once.
    assert "2,340" in output
    assert "1,440" in output
    assert f"{card}: " in output
    assert not (table_file.parent / "storage" / "stages").exists()


def test_reproduction_plan_needs_no_weights(
    table_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Weights do not change the cost, so the plan works without their file."""
    missing = ["--set", f"backbone.weights={tmp_path / 'missing.safetensors'}"]
    command = ["reproduce", str(table_file), "--scale", "paper", *missing]
    assert cli.main(command) == 2
    assert "missing.safetensors" in capsys.readouterr().err
    assert cli.main([*command, "--plan"]) == 0
    assert "0 stages up to date" in capsys.readouterr().out


def test_placeholder_has_the_classes_and_counts_of_its_card(tmp_path: Path) -> None:
    assert placeholders.is_missing("cub200")
    assert not placeholders.is_missing("digits")
    card = load_card_file(str(placeholders.write_placeholder("cub200", tmp_path / "one")))
    assert len(set(card.classes)) == 200
    assert card.counts is not None
    assert (card.counts.train, card.counts.test) == (5994, 5794)
    orders = load_card_file(str(placeholders.write_placeholder("cifar100", tmp_path / "two")))
    assert orders.classes[0] == "apple"


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("rows", "gain", "minus"), "three", ("rows.gain.minus", "'three'")),
        (("rows", "one", "paper"), {"there": {"second": 1.0}}, ("'there'", "part")),
        (("rows", "one", "paper"), {"here": {"third": 1.0}}, ("rows.one.paper.here", "third")),
        (("scales", "large"), {}, ("scales.large",)),
        (
            ("scales", "paper", "runs", "more"),
            {"config": "config.yaml"},
            ("rows.gain", "2 fit", "all, more"),
        ),
    ],
)
def test_contradictory_table_file_is_refused(
    table_file: Path, path: tuple[str, ...], value: Any, words: tuple[str, ...]
) -> None:
    body = yaml.safe_load(table_file.read_text())
    *parents, last = path
    place = body
    for part in parents:
        place = place[part]
    place[last] = value
    table_file.write_text(yaml.safe_dump(body))
    with pytest.raises(UserError) as error:
        read_paper_table(table_file)
    for word in (str(table_file), *words):
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"x": "task:z"}, ("no task 'z'", "base, a")),
        ({"x": "bytes_per_task"}, ("no metric 'bytes_per_task'", "average_accuracy")),
    ],
)
def test_unknown_columns_are_refused_before_training(
    table_file: Path, columns: dict[str, str], words: tuple[str, ...]
) -> None:
    body = yaml.safe_load(table_file.read_text())
    body["scales"]["paper"]["columns"] = columns
    for row in body["rows"].values():
        row.pop("paper", None)
    table_file.write_text(yaml.safe_dump(body))
    with pytest.raises(UserError) as error:
        pipeline.reproduce(table_file, "paper", quiet=True)
    for word in words:
        assert word in str(error.value)
    assert not (table_file.parent / "storage" / "stages").exists(), "no training may start"


def test_parts_with_the_same_run_name_are_refused(table_file: Path) -> None:
    body = yaml.safe_load(table_file.read_text())
    body["scales"]["paper"]["parts"]["Here!"] = ["train.epochs=1"]
    table_file.write_text(yaml.safe_dump(body))
    with pytest.raises(UserError, match="same name but for capitals"):
        reproduction.read_table(str(table_file), "paper")


def test_plan_reuses_stored_stages_of_deleted_data(
    table_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The storage has the shards, so that no data is missing."""
    pipeline.reproduce(table_file, "paper", quiet=True)
    shutil.rmtree(table_file.parent / "raw")
    capsys.readouterr()
    assert cli.main(["reproduce", str(table_file), "--scale", "paper", "--plan"]) == 0
    output = capsys.readouterr().out
    assert "0 to run" in output
    assert "not on this machine" not in output


def test_unknown_tables_scales_and_invalid_options_are_refused(
    table_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["reproduce", "meat-tabel-1"]) == 2
    assert "meat-table-1" in capsys.readouterr().err
    assert cli.main(["reproduce", str(table_file), "--scale", "small"]) == 2
    assert "it has paper" in capsys.readouterr().err
    for wrong in (["--scale", "small"], ["t.yaml", "--plan"], ["t.yaml", "--record"]):
        assert cli.main(["reproduce", *wrong]) == 2
    both = ["reproduce", str(table_file), "--scale", "paper", "--plan", "--record"]
    assert cli.main(both) == 2
    assert "leave one out" in capsys.readouterr().err
    assert cli.main(["reproduce"]) == 0
    assert "dytox-cifar100" in capsys.readouterr().out
