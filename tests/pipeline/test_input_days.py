"""Tests of `report MODEL`: the finding for shifted inputs, input counts, and unknown distances."""

from __future__ import annotations

import json
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from pipeline import cli
from pipeline.results.input_days import exceeds, find_median
from tests import small_run
from workers.serving.input_counts import DayCounts, new_file, read_counts, write_counts


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A finished run of two tasks."""
    folder = tmp_path_factory.mktemp("inputs")
    body = small_run.make_body(
        folder, small_run.make_cards(folder, ("a", "b")), ["linear"], tracking="off"
    )
    config = small_run.write_config(folder / "config.yaml", body)
    assert cli.main(["run", config]) == 0
    return folder, config


@pytest.fixture
def model(run: Any, tmp_path: Path) -> str:
    folder = str(tmp_path / "model")
    assert cli.main(["bundle", run[1], "--out", folder]) == 0
    return folder


def output_of(capsys: pytest.CaptureFixture[str], *argv: object, code: int = 0) -> str:
    capsys.readouterr()
    assert cli.main([str(a) for a in argv]) == code
    captured = capsys.readouterr()
    return captured.err if code else captured.out


def images_of(folder: Path, task: str) -> list[Path]:
    return sorted((folder / "raw" / task / "test").rglob("*.png"))


def inverted(images: list[Path], folder: Path) -> list[Path]:
    paths = []
    for index, image in enumerate(images):
        paths.append(folder / f"{index}.png")
        Image.fromarray(255 - np.asarray(Image.open(image).convert("RGB"))).save(paths[-1])
    return paths


# ---- the rule ------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("expected", "count", "measured", "test_images", "is_more"),
    [
        (0.05, 49, 49, 1000, False),  # too few inputs
        (0.05, 50, 50, 0, False),  # no test images to compare with
        (0.05, 50, 50, 1000, True),
        (0.05, 94, 230, 256, True),
        (0.05, 12, 230, 256, False),
        (0.05, 5000, 100_000, 10_000, False),  # exactly as expected
        (0.05, 6000, 100_000, 10_000, True),
        (0.05, 6000, 100_000, 100, False),  # too few test images to know the limit well
        (0.5, 100, 100, 256, True),
        (0.5, 60, 100, 256, False),
    ],
)
def test_shift_rule_matches_worked_cases(
    expected: float, count: int, measured: int, test_images: int, is_more: bool
) -> None:
    assert exceeds(expected, count, measured, test_images) == is_more


def test_shift_rule_raises_at_most_one_false_alarm_per_thousand() -> None:
    rng = np.random.default_rng(0)
    wrong = 0
    for _ in range(5000):
        limit = np.quantile(rng.random(256), 0.95)
        wrong += exceeds(0.05, int((rng.random(200) > limit).sum()), 200, 256)
    assert wrong <= 5


def test_median_of_a_histogram() -> None:
    assert find_median([0, 0, 0], 0.1) is None
    assert find_median([2, 2, 0, 0], 0.1) == pytest.approx(0.1)
    assert find_median([0, 4, 0], 0.1) == pytest.approx(0.15)
    assert find_median([0, 0, 9], 0.1) == pytest.approx(0.2)


# ---- the command ---------------------------------------------------------------------------------
def test_only_shifted_inputs_give_a_finding(
    run: Any, model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    images = images_of(run[0], "a")
    usual = (images * 60)[:60]
    output_of(capsys, "predict", model, "--task", "a", *usual)
    text = output_of(capsys, "report", model)
    assert "of its test images" not in text
    shifted = (inverted(images, tmp_path) * 100)[:120]
    output_of(capsys, "predict", model, "--task", "a", *shifted)
    file = tmp_path / "inputs.json"
    text = output_of(capsys, "report", model, "--json", file)
    (sentence,) = [line for line in text.splitlines() if line.startswith("task a: ")]
    assert "% of 180 inputs on" in sentence
    body = json.loads(file.read_text())
    (row,) = body["rows"]
    assert (row["task"], row["inputs"], row["measured"], row["picked"]) == ("a", 180, 180, 0.0)
    assert row["distance"] > 1
    assert body["findings"] == [row["finding"]] == [sentence]
    assert row["model"] == body["model"]


def test_predict_counts_inputs_unless_no_record_is_set(
    run: Any, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    image = images_of(run[0], "a")[0]
    output_of(capsys, "predict", model, "--no-record", image, "--task", "a")
    output_of(capsys, "predict", run[1], image, "--task", "a")
    assert not Path(model, "inputs").exists()
    assert "no inputs were counted" in output_of(capsys, "report", model)
    output_of(capsys, "predict", model, image, "--rule", "confident")
    files, _ = read_counts(f"{model}/inputs")
    (counts,) = files.values()
    (tasks,) = counts.models.values()
    assert sum(task.inputs for task in tasks.values()) == 1
    assert sum(task.picked for task in tasks.values()) == 1


def test_unwritable_counts_folder_is_reported_once(
    run: Any, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path(model, "inputs").write_text("a file in the way")
    images = images_of(run[0], "a")[:2]
    assert cli.main(["predict", model, *map(str, images), "--task", "a"]) == 0
    captured = capsys.readouterr()
    assert captured.err.count("inputs are not counted") == 1
    assert len(captured.out.splitlines()) >= 3


def test_unknown_distances_are_explained(
    run: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from pipeline.app import reports
    from pipeline.app import runs as app

    model = str(tmp_path / "old")
    reports.write_bundle(app.prepare(run[1]), "linear", model)  # without reference distances
    output_of(capsys, "predict", model, *images_of(run[0], "a"), "--task", "a")
    text = output_of(capsys, "report", model)
    assert "distances of task a are unknown: the model folder was written without" in text
    assert f" {len(images_of(run[0], 'a'))} " in text


def test_report_lists_each_model_in_its_own_row(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(model, "inputs")
    folder.mkdir()
    for digit in "12":
        counts = DayCounts(day=date(2026, 11, 26))
        counts.task(digit * 64, "a").add_answer("x", 0.4, True)
        write_counts(new_file(str(folder), counts.day), counts)
    text = output_of(capsys, "report", model)
    rows = [line.split() for line in text.splitlines() if line.startswith("2026-11-26")]
    assert [row[1] for row in rows] == ["1" * 8, "2" * 8]
    assert rows[0][2:8] == ["a", "1", "100", "%", "100", "%"]


def test_invalid_arguments_give_one_line_errors(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "is not a model folder" in output_of(capsys, "report", tmp_path, code=2)
    assert "leave out --set" in output_of(capsys, "report", model, "--set", "seed=1", code=2)
    file = tmp_path / "none" / "inputs.json"
    error = output_of(capsys, "report", model, "--json", file, code=2)
    assert len(error.splitlines()) == 1
