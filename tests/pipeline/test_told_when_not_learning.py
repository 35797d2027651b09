"""Tests of the warnings about tasks that were not learned, in terminal, report and MLflow."""

from __future__ import annotations

import contextlib
import copy
import io
import math
import re
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
import yaml
from fake_mlflow import FakeMlflow
from markupsafe import escape
from scipy.stats import binom

from pipeline.app import runs as app
from pipeline.app.prepared import find_or_make_record
from pipeline.cli import main
from pipeline.config.settings import TrackingSettings
from pipeline.report.plots import draw_averages, draw_comparison, draw_matrix
from pipeline.results.chance import FEW_STEPS, LearnedTask, max_correct_by_chance
from pipeline.results.tables import RunTables
from pipeline.shell import console
from pipeline.tracking import mlflow_client
from pipeline.tracking.recorder import Recorder
from pipeline.tracking.run_writer import RunIdentity
from workers.methods.train_defaults import TrainDefaults

LEARNS_NOTHING = {"lr": 1e-12, "epochs": 1, "batch_size": 64}
TASK_WARNING = "task 'digits': "


# ---- chance --------------------------------------------------------------------------------------
@pytest.mark.parametrize("classes", [2, 3, 20, 1000])
@pytest.mark.parametrize("images", [1, 10, 72, 400, 5000])
def test_chance_interval_is_the_binomial_interval(images: int, classes: int) -> None:
    upper = binom.interval(0.95, images, 1 / classes)[1]
    assert max_correct_by_chance(images, classes) == upper


def test_task_within_the_chance_interval_gets_a_matching_remedy() -> None:
    at_chance = LearnedTask("mine", "meat", "a", 44, 72, 2)
    assert LearnedTask("mine", "meat", "a", 45, 72, 2).sentence() == ""
    assert "44 of 72 test images" in at_chance.sentence()
    assert at_chance.sentence().endswith("--set methods.mine.train.min_steps=1000")
    with_rate = LearnedTask("mine", "meat", "a", 36, 72, 2, has_rate=True)
    assert "leave the learning rate out" in with_rate.sentence()
    assert "train for longer" not in with_rate.sentence()
    long = replace(with_rate, steps=300)
    assert long.sentence() == with_rate.sentence()
    few = LearnedTask("mine", "meat", "a", 8, 10, 2)
    assert few.sentence().endswith("give the task more test images")


def test_longer_training_is_suggested_before_another_learning_rate() -> None:
    sentence = LearnedTask("mine", "meat", "a", 36, 72, 2, has_rate=True, steps=12).sentence()
    longer = sentence.index("first train for longer, for example --set methods.mine.train.min")
    assert longer < sentence.index("if that does not help, leave the learning rate out")
    assert TrainDefaults.min_steps == FEW_STEPS


def test_method_without_training_gets_no_training_remedy() -> None:
    learned = LearnedTask("mine", "ncm", "a", 36, 72, 2, has_rate=True, is_trained=False)
    assert "ncm trained nothing for it" in learned.sentence()
    assert "learning rate" not in learned.sentence()


def test_pretrained_task_gets_advice_about_the_order_of_its_classes() -> None:
    learned = LearnedTask("mine", "meat", "a", 36, 72, 2, is_trained=False, is_pretrained=True)
    assert "in the order of the classifier's outputs" in learned.sentence()
    assert "more similar images" not in learned.sentence()
    assert replace(learned, correct=72).sentence() == ""


def test_one_class_task_gets_no_warning() -> None:
    assert LearnedTask("mine", "meat", "a", 5, 5, 1).sentence() == ""


# ---- a run that learns nothing -------------------------------------------------------------------
class Finished(NamedTuple):
    """A finished run: its config, its output, its tables and its report page."""

    path: str
    text: str
    tables: RunTables
    page: str


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, small_pictures: None) -> Finished:
    folder = tmp_path_factory.mktemp("nothing")
    body: dict[str, Any] = {
        "name": "nothing",
        "storage": str(folder / "storage"),
        "stream": {"tasks": [{"card": "digits", "classes": ["0", "1"]}]},
        "backbone": {
            "img_size": 16,
            "options": {"patch_size": 8, "embed_dim": 16, "depth": 1, "num_heads": 1},
        },
        "train": LEARNS_NOTHING,
        "methods": {
            "finetune": {"train": {"lr": 10.0, "epochs": 3, "batch_size": 16}},
            "linear": {},
            "supsup": {"mask_lr": 1e-12},
            "meat": {"mask_lr": 1e-12},
            "ncm": {},
            "learner": {"method": "linear", "train": {"lr": 0.05, "epochs": 30, "batch_size": 8}},
        },
        "tracking": "off",
    }
    path = folder / "nothing.yaml"
    path.write_text(yaml.safe_dump(body))
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert main(["run", str(path)]) == 0
    run = app.prepare(str(path), [])
    tables = RunTables.load(run.store.storage, find_or_make_record(run))
    page = (folder / "storage" / "runs" / "nothing" / "report.html").read_text()
    return Finished(str(path), printed.getvalue(), tables, page)


def sentences(finished: Finished, label: str) -> list[str]:
    rows = finished.tables.warnings()
    return [row["warning"] for row in rows if row["stage"].startswith(f"{label}/")]


def test_task_at_chance_suggests_removing_the_learning_rate(finished: Finished) -> None:
    (sentence,) = [text for text in sentences(finished, "linear") if "has not learned" in text]
    assert "guessing among 2 classes" in sentence
    assert "leave the learning rate out of the config" in sentence


def test_methods_without_training_are_identified_from_the_record(finished: Finished) -> None:
    is_trained = {
        label: [task.is_trained for task in finished.tables.learned_tasks(label)]
        for label in ("ncm", "linear", "learner")
    }
    assert is_trained == {"ncm": [False], "linear": [True], "learner": [True]}


def test_pretrained_task_is_identified_from_the_record(finished: Finished) -> None:
    record = copy.deepcopy(finished.tables.record)
    record["config"]["stream"]["tasks"][0]["role"] = "pretrained"
    record["tasks"][0]["role"] = "base"
    tables = replace(finished.tables, record=record)
    (task,) = tables.learned_tasks("linear")
    assert not task.is_pretrained, "the method has learned the task, with a head of its own"
    record["stages"] = [
        stage
        for stage in record["stages"]
        if stage["label"] != "linear" or stage["step"] == "evaluate"
    ]
    (task,) = tables.learned_tasks("linear")
    assert task.is_pretrained


def test_few_steps_warning_suggests_a_working_override(finished: Finished) -> None:
    (sentence,) = [text for text in sentences(finished, "linear") if "few" in text]
    assert sentence.startswith(f"{TASK_WARNING}5 optimizer steps of 'train' are few")
    (override,) = re.findall(r"--set (\S+)", sentence)
    train = app.prepare(finished.path, [override]).config.merge_train("linear")
    assert train.min_steps == 300


def test_diverged_loss_warning_suggests_a_smaller_learning_rate(finished: Finished) -> None:
    (sentence,) = [text for text in sentences(finished, "finetune") if "diverged" in text]
    assert "guessing gives 0.693" in sentence
    assert sentence.endswith("--set methods.finetune.train.lr=1")


def test_unchanged_masks_give_a_warning(finished: Finished) -> None:
    assert any("no mask entry changed" in text for text in sentences(finished, "supsup"))
    assert any("left its initial state" in text for text in sentences(finished, "meat"))


def test_divergence_warning_compares_with_chance_over_all_shared_outputs(
    finished: Finished,
) -> None:
    (stage_id,) = [i for i in finished.tables.artifacts if i == "supsup/digits/train"]
    assert finished.tables.history(stage_id)[-1]["ce"] > math.log(2) + 1
    assert not any("diverged" in text for text in sentences(finished, "supsup"))


def test_learning_method_gets_no_warning(finished: Finished) -> None:
    assert sentences(finished, "learner") == []


def test_warnings_are_shown_in_terminal_and_report(finished: Finished) -> None:
    rows = finished.tables.warnings()
    assert len(rows) >= 5
    for row in rows:
        assert row["warning"] in finished.text
        assert str(escape(row["warning"])) in finished.page


def test_warnings_are_stored_in_mlflow(
    finished: Finished, monkeypatch: pytest.MonkeyPatch, small_pictures: None
) -> None:
    fake = FakeMlflow()
    monkeypatch.setattr(mlflow_client, "open_store", fake.open_store)
    recorder = Recorder(TrackingSettings(), finished.tables.storage, identity=RunIdentity())
    recorder.start(finished.tables.record, "")
    recorder.finish({})
    texts = ""
    for run in fake.runs.values():
        files = {name: data for name, data in run.files.items() if name.startswith("warnings")}
        texts += "".join(data.decode() for name, data in files.items() if name.endswith(".txt"))
    for row in finished.tables.warnings():
        assert row["warning"] in texts


# ---- chance and the number of images in tables and plots -----------------------------------------
def test_tables_show_chance_level_and_number_of_test_images(finished: Finished) -> None:
    tables = finished.tables
    (row,) = [row for row in tables.summary() if row["label"] == "linear"]
    assert row["chance"] == 0.5
    assert row["test_images"] == tables.matrix("linear").total[0, 0] > 0
    assert {entry["chance"] for entry in tables.tables()["matrix"]} == {0.5}
    text = console.matrix_text(tables, "linear").splitlines()
    assert text[-2].split() == ["chance", "50.0"]
    assert text[-1].split() == ["test", "images", str(row["test_images"])]


def test_plots_show_chance_level_and_number_of_test_images(finished: Finished) -> None:
    matrix = finished.tables.matrix("linear")
    (tick,) = draw_matrix(matrix).axes[0].get_xticklabels()
    assert "chance 50" in tick.get_text()
    assert f"n {matrix.test_images[0]}" in tick.get_text()
    texts = [text.get_text() for text in draw_averages([matrix]).axes[0].texts]
    assert "chance" in texts
    unfinished = replace(matrix, total=np.full_like(matrix.total, np.nan))
    assert unfinished.test_images == [None]
    accuracies = draw_comparison(finished.tables.summary()).axes[0]
    assert accuracies.get_xlabel() == "higher is better; dotted: chance"
    assert np.asarray(accuracies.lines[0].get_xdata()).tolist() == [0.5, 0.5]


def test_class_incremental_chance_level_counts_all_classes_so_far(
    finished: Finished, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = finished.tables
    records = [{"name": name, "classes": list("abcd"), "role": "task"} for name in ("a", "b")]
    monkeypatch.setattr(RunTables, "scenario", "class")
    monkeypatch.setattr(tables, "task", {entry["name"]: entry for entry in records}.__getitem__)
    chance = tables._chance(["a", "b"], "correct")
    assert chance[np.tril_indices(2)].tolist() == [1 / 4, 1 / 8, 1 / 8]
    assert math.isnan(chance[0, 1])
    assert tables._chance(["a", "b"], "correct_task_aware")[1].tolist() == [1 / 4, 1 / 4]
    assert tables._chance(["a", "b"], "correct_top5")[1].tolist() == [5 / 8, 5 / 8]
