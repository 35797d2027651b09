"""Tests of measured figures: their file, and the tables and headers generated from it."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pipeline.app import measuring
from pipeline.app.prepared import read_run_tables
from pipeline.app.runs import prepare
from pipeline.config.yaml_files import CONFIGS
from pipeline.results.measured import (
    Measurement,
    format_matrix,
    format_measurements,
    format_table,
    parse_spec,
    read_measurements,
    rewrite_header,
    rewrite_tables,
)
from tests import small_run
from workers.errors import UserError

pytestmark = pytest.mark.usefixtures("small_pictures")

CURRENT = {"meat": ("training 6", 2), "hat": ("training 6", 1)}
ONE = Measurement(
    config="streams/digits",
    overrides="",
    label="meat",
    method="meat",
    replica="",
    seed=0,
    revisions="training 6",
    method_revision=2,
    commit="abc",
    date="2026-01-02",
    device="cpu",
    cpu_seconds=90.0,
    bytes_per_task=1000.0,
    carried_bytes=0.0,
    growth=1.25,
    trained_parameters=7,
    tasks="a b",
    matrix="8/10; 6/10 3/4",
)
HAT = replace(
    ONE, label="hat", method="hat", method_revision=1, carried_bytes=5e6, matrix="9/10; 9/10 4/4"
)
TEXT = "before\n<!-- measured: {spec} -->\nold lines\n<!-- end -->\nafter\n"


def test_documents_and_config_headers_match_the_measurements() -> None:
    """If this fails after an edit of a figure or of a revision, run `accrete measure`."""
    measurements = read_measurements(measuring.MEASURED)
    current = measuring.current_revisions()
    assert measurements
    for path in measuring.list_documents():
        text = path.read_text(encoding="utf-8")
        assert rewrite_tables(text, measurements, current) == text, (
            f"run `accrete measure`, which writes the tables of {path}"
        )
    for path in measuring.list_configs():
        text = path.read_text(encoding="utf-8")
        name = measuring.name_config(path)
        assert rewrite_header(name, text, measurements, current) == text, (
            f"run `accrete measure`, which writes the header of {path}"
        )
    assert format_measurements(measurements) == measuring.MEASURED.read_text(encoding="utf-8")


def test_hand_edited_figure_is_rewritten() -> None:
    readme = (CONFIGS.parent / "README.md").read_text(encoding="utf-8")
    assert "<!-- measured: demo " in readme
    measurements = read_measurements(measuring.MEASURED)
    value = f"{100 * measurements[0].values['average_accuracy']:.1f}"
    assert value in readme
    edited = readme.replace(value, "99.9")
    assert rewrite_tables(edited, measurements, measuring.current_revisions()) == readme


def test_metrics_are_computed_from_the_accuracy_matrix() -> None:
    assert ONE.values["average_accuracy"] == pytest.approx((0.6 + 0.75) / 2)
    assert ONE.values["forgetting"] == pytest.approx(0.2)
    correct, total = ONE.counts
    assert math.isnan(correct[0, 1])
    assert format_matrix(correct, total) == ONE.matrix
    np.testing.assert_array_equal(total[1], [10, 4])


def test_measurements_file_is_sorted_and_keeps_the_newest_entry(tmp_path: Path) -> None:
    newer = replace(ONE, cpu_seconds=45.5, growth=math.nan)
    text = format_measurements([ONE, HAT, newer])
    path = tmp_path / "measured.csv"
    path.write_text(text)
    hat, meat = read_measurements(path)
    assert hat == HAT
    assert (meat.cpu_seconds, meat.seed, math.isnan(meat.growth)) == (45.5, 0, True)
    assert format_measurements([meat, hat]) == text


def test_table_is_generated_from_measurements() -> None:
    second = replace(ONE, seed=1, matrix="8/10; 8/10 4/4")
    spec = "streams/digits columns=tasks,average,forgetting,bytes,growth,CPU"
    text = rewrite_tables(TEXT.format(spec=spec), [ONE, HAT, second], CURRENT)
    assert text == (
        f"before\n<!-- measured: {spec} -->\n"
        "| method | a | b | average | forgetting | bytes | growth | CPU |\n"
        "|---|---|---|---|---|---|---|---|\n"
        "| `hat` | 90.0 | 100.0 | 95.0 | 0.0 | 1 kB + 5 MB carried | 1.25 | 1 min 30 s |\n"
        "| `meat` | 60.0 | 75.0 | 67.5, 90.0 | 20.0 | 1 kB | 1.25 | 1 min 30 s |\n"
        "\n"
        "`accrete measure configs/streams/digits.yaml`: seed 0, 1; training 6; cpu; 2026-01-02.\n"
        "<!-- end -->\nafter\n"
    )
    assert rewrite_tables(text, [ONE, HAT, second], CURRENT) == text


def test_table_shows_the_selected_methods_and_overrides() -> None:
    other = replace(ONE, overrides="train.epochs=1", matrix="1/10; 1/10 1/4")
    measurements = [ONE, HAT, other]
    table = format_table(
        parse_spec("streams/digits columns=average methods=meat"), measurements, {}
    )
    assert "67.5" in table
    assert "hat" not in table
    spec = parse_spec("streams/digits columns=average overrides=train.epochs=1")
    table = format_table(spec, measurements, CURRENT)
    assert "17.5" in table
    assert "67.5" not in table
    assert "--set train.epochs=1`" in table


@pytest.mark.parametrize("change", [{"revisions": "training 5"}, {"method_revision": 1}])
def test_measurement_of_another_revision_is_marked_outdated(change: dict[str, object]) -> None:
    old = replace(ONE, **change)  # type: ignore[arg-type]
    table = format_table(parse_spec("streams/digits columns=average"), [old, HAT], CURRENT)
    assert "| `meat` (outdated) |" in table
    assert "| `hat` |" in table
    header = rewrite_header("methods/meat", "# MEAT\nname: meat\n", [old], CURRENT)
    assert "(outdated: " in header


@pytest.mark.parametrize(
    "spec",
    [
        "streams/digits",
        "streams/digits columns=",
        "streams/digits columns=average,median",
        "streams/other columns=average",
    ],
)
def test_invalid_table_spec_is_refused(spec: str) -> None:
    with pytest.raises(UserError, match=r"measured"):
        rewrite_tables(TEXT.format(spec=spec), [ONE], CURRENT)


def test_method_header_has_one_line_per_stream() -> None:
    old = "# digits  average accuracy 1.0,\n#           more\n"
    text = f"# MEAT.\n#\n# differs   much\n{old}name: meat\n"
    line = "average accuracy 67.5 with seed 0; forgetting 20.0; 1 min 30 s of CPU\n"
    expected = f"# MEAT.\n#\n# differs   much\n# digits  {line}name: meat\n"
    assert rewrite_header("methods/meat", text, [ONE, HAT], CURRENT) == expected
    without = "# MEAT.\n#\n# differs   much\nname: meat\n"
    assert rewrite_header("methods/meat", without, [ONE], CURRENT) == expected
    assert rewrite_header("methods/lora", without, [ONE], CURRENT) == without


def test_header_of_other_configs_lists_all_methods() -> None:
    demo = [replace(one, config="demo") for one in (ONE, HAT)]
    text = "# Demo.\n# expected  not measured yet\n# source    me\nname: demo\n"
    assert rewrite_header("demo", text, demo, CURRENT) == text.replace(
        "not measured yet", "average accuracy hat 95.0, meat 67.5 (forgetting 20.0)"
    )
    elsewhere = text.replace("not measured yet", "configs/RESULTS.md")
    assert rewrite_header("demo", elsewhere, demo, CURRENT) == elsewhere


def test_a_finished_run_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The recorded values are those of the run, and the documents are updated too."""
    monkeypatch.setattr(measuring, "MEASURED", tmp_path / "measured.csv")
    monkeypatch.setattr(measuring, "CONFIGS", tmp_path / "configs")
    (tmp_path / "configs").mkdir()
    (tmp_path / "docs").mkdir()
    page = tmp_path / "README.md"
    page.write_text(TEXT.format(spec="small columns=average overrides=train.epochs=1"))
    cards = small_run.make_cards(tmp_path, ("base", "a"))
    body = small_run.make_body(tmp_path, cards, methods=("linear",))
    config = small_run.write_config(tmp_path / "configs" / "small.yaml", body)
    overrides = ["train.epochs=1", "name=short", "cluster.loader_workers=1"]

    from pipeline.shell.console import Console

    changed = measuring.measure(config, overrides, Console, "")
    assert {path.name for path in changed} == {"measured.csv", "README.md"}
    (one,) = read_measurements(tmp_path / "measured.csv")
    assert (one.config, one.overrides, one.label) == ("small", "train.epochs=1", "linear")
    assert (one.seed, one.tasks) == (5, "base a")
    tables = read_run_tables(prepare(config, overrides))[""]
    row = tables.summary_row("linear")
    assert one.values["average_accuracy"] == row["average_accuracy"]
    assert one.values["forgetting"] == row["forgetting"]
    assert f"| `linear` | {100 * row['average_accuracy']:.1f} |" in page.read_text()
    assert measuring.measure(config, overrides, Console, "") == []


def test_only_configs_of_the_checkout_are_recorded(tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    path.write_text("name: own\n")
    with pytest.raises(UserError, match=r"own\.yaml.*only shipped configs"):
        measuring.measure(str(path), [], lambda *_: None, "")  # type: ignore[arg-type]


def test_overrides_that_do_not_change_a_measurement_are_dropped() -> None:
    overrides = ["methods=[meat, hat]", "seed=1", "name=x", "storage=s", "cluster.workers=0"]
    assert measuring.select_overrides(overrides) == ""
    kept = ["train.epochs=3", "methods.meat.alpha=1", 'methods={"meat": {}}']
    expected = 'methods.meat.alpha=1 methods={"meat":{}} train.epochs=3'
    assert measuring.select_overrides(overrides + kept) == expected
