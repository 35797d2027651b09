"""Tests of the training settings in `plan` and the report, before and after a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.app import reports
from pipeline.app import runs as app
from pipeline.cli import main
from pipeline.launch import training_plan
from pipeline.results.training import StageInfo, group_steps
from workers.job import TrainSettings, key_inputs
from workers.methods import METHODS

pytestmark = pytest.mark.usefixtures("small_pictures")

RULE = TrainSettings(**METHODS["linear"].train_defaults.of_step("train", True))


def inputs(train: TrainSettings) -> dict[str, Any]:
    return {"train": key_inputs(train)}


def test_training_steps_with_equal_settings_are_grouped() -> None:
    other = RULE.model_copy(update={"lr": 0.5})
    stages = [
        StageInfo(
            "linear", "train", "a", inputs(RULE), {"steps": 300, "epochs": 6, "batch_size": 16}
        ),
        StageInfo(
            "linear", "train", "b", inputs(RULE), {"steps": 500, "epochs": 5, "batch_size": 32}
        ),
        StageInfo("linear", "train", "c", inputs(other), None),
        StageInfo("linear", "evaluate", "a", {}, None),
    ]
    together, apart = group_steps(stages)
    assert together.tasks == ["a", "b"]
    assert (
        together.format_length()
        == "300 to 500 optimizer steps per task: 5 to 6 epochs, batch size 16 to 32"
    )
    assert together.format_optimizer() == "adamw, lr 0.002, weight decay 0.05"
    assert apart.tasks == ["c"]
    assert apart.format_optimizer() == "adamw, lr 0.5, weight decay 0.05"


def test_plan_shows_step_rule_before_images_are_counted() -> None:
    (step,) = group_steps([StageInfo("linear", "train", "a", inputs(RULE), None)])
    assert step.format_length() == (
        "5 epochs, batch size 64; if that gives fewer than 300 optimizer steps, batches down to 16 "
        "and up to 100 epochs"
    )
    (step,) = group_steps([StageInfo("linear", "train", "a", inputs(TrainSettings()), None)])
    assert step.format_length() == "10 epochs, batch size 64"


@pytest.fixture
def silent_config(tmp_path: Path) -> str:
    body = {
        "name": "silent",
        "storage": str(tmp_path / "storage"),
        "stream": {"tasks": [{"card": "digits", "classes": ["0", "1"]}]},
        "backbone": {
            "img_size": 16,
            "options": {"patch_size": 8, "embed_dim": 16, "depth": 1, "num_heads": 1},
        },
        "methods": {"linear": {}},
        "tracking": "off",
    }
    path = tmp_path / "silent.yaml"
    path.write_text(yaml.safe_dump(body))
    return str(path)


@pytest.mark.slow
def test_plan_and_report_show_default_training_settings(
    silent_config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", silent_config]) == 0
    before = capsys.readouterr().out
    assert "linear: adamw, lr 0.002, weight decay 0.05; 300 to" not in before
    assert "linear: adamw, lr 0.002, weight decay 0.05;" in before
    assert main(["run", silent_config]) == 0
    capsys.readouterr()
    assert main(["plan", silent_config]) == 0
    after = capsys.readouterr().out
    run = app.prepare(silent_config, [])
    (step,) = training_plan.plan_training(
        run.graph, app.plan(run).lookups, set(), run.store, run.tasks
    )
    (length,) = step.lengths.values()
    assert length["batch_size"] == 16
    assert length["steps"] >= 300
    text = step.format_length()
    assert text.startswith(f"{length['steps']} optimizer steps per task: ")
    assert text in after
    page = reports.report_files(run)["report.html"].decode()
    assert text in page
    assert "adamw, lr 0.002, weight decay 0.05" in page
