"""Promises of `import pipeline`: what is public, light to import, and what it gives as pandas."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import fake_run
import numpy as np
import pytest

import pipeline
from pipeline import app, cli
from pipeline.graph.store import Store
from pipeline.results.frames import Results
from pipeline.results.tables import RunTables
from pipeline.yaml_files import override_of, parse_override
from tests import small_run
from tests.pipeline.test_start_up import HEAVY
from workers.errors import UserError

PUBLIC = ["Experiment", "Model", "Results", "UserError", "load", "runs"]


# ---- the module ----------------------------------------------------------------------------------
def test_what_is_public_is_listed_and_documented() -> None:
    assert pipeline.__all__ == PUBLIC
    for name in PUBLIC:
        assert getattr(pipeline, name).__doc__
    assert pipeline.UserError is UserError
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = pipeline.nothing


def test_the_import_is_light_from_any_folder(tmp_path: Path) -> None:
    script = "import json, sys, pipeline; print(json.dumps(sorted(sys.modules)))"
    command = [sys.executable, "-c", script]
    result = subprocess.run(command, check=True, capture_output=True, timeout=100)
    modules = json.loads(result.stdout)
    assert [name for name in (*HEAVY, "pandas", "numpy", "pyarrow") if name in modules] == []


@pytest.mark.parametrize(
    "value",
    [1, 2.5, 1e-05, True, None, "a: b", "yes", "01", "é", [0, 1], {"lr": 1e-3, "steps": {}}],
)
def test_an_override_is_what_set_reads(value: Any) -> None:
    assert parse_override(override_of("train.x", value)) == ("train.x", value)


def test_paths_and_numbers_of_numpy_are_plain_values() -> None:
    assert override_of("storage", Path("a")) == 'storage="a"'
    assert override_of("seeds", [np.int64(3)]) == "seeds=[3]"


@pytest.mark.parametrize("value", [object(), {1, 2}, np.zeros(2), float("nan")])
def test_a_value_that_no_config_can_hold_is_refused(value: Any) -> None:
    with pytest.raises(UserError, match=r"^seed is .*which a config cannot hold"):
        override_of("seed", value)


# ---- a config ------------------------------------------------------------------------------------
@pytest.fixture
def config_path(tmp_path: Path) -> str:
    body = small_run.make_body(tmp_path, small_run.make_cards(tmp_path, "ab"), ["meat", "linear"])
    return small_run.write_config(tmp_path / "config.yaml", body)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"sede": 1}, "sede"),
        ({"train.epochs": "many"}, "train.epochs"),
        ({"methods": {"nothing": {}}}, "nothing"),
    ],
)
def test_a_mistake_is_the_sentence_of_the_command_line(
    overrides: dict[str, Any], words: str, config_path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UserError, match=words) as raised:
        pipeline.load(config_path, **overrides)
    options = [override_of(*override) for override in overrides.items()]
    assert cli.main(["plan", config_path, "--set", *options]) == 2
    assert capsys.readouterr().err == f"accrete: {raised.value}\n"


def test_a_plan_is_a_row_for_each_stage(config_path: str) -> None:
    experiment = pipeline.load(Path(config_path), seed=7)
    assert experiment.name == "small-seed-7"
    plan = experiment.plan()
    prepared = app.prepare(config_path, ["seed=7"])
    assert dict(zip(plan["stage"], plan["key"], strict=True)) == prepared.keys
    assert set(plan["status"]) == {"miss"}
    assert {"data", "meat", "linear"} >= set(plan["label"].dropna())


def test_runs_are_a_row_for_each_method(storage: str, tmp_path: Path) -> None:
    Store(storage).save_record(fake_run.record())
    runs = pipeline.runs(Path(storage))
    assert list(runs["label"]) == list(fake_run.METHODS)
    assert runs["average_accuracy"].between(0.2, 1).all()
    with pytest.raises(UserError, match="does not exist; give the folder"):
        pipeline.runs(tmp_path / "nothing")


# ---- results -------------------------------------------------------------------------------------
def no_model(replica: str, label: str) -> Any:
    raise AssertionError(f"{label} of {replica} is not asked for")


@pytest.fixture(scope="module")
def results(storage: str) -> Results:
    """The results of the fake run, and the same under another seed."""
    tables = {}
    for seed in (0, 1):
        record = fake_run.record()
        record["config"]["seed"] = seed
        tables[f"seed-{seed}"] = RunTables.load(storage, record)
    return Results("tiny", tables, no_model, "")


def test_tables_have_the_rows_of_every_replica_and_method(results: Results) -> None:
    one = results.tables["seed-0"]
    frames = {"summary": results.summary, "matrix": results.matrix, "sizes": results.sizes}
    for name, frame in frames.items():
        assert list(frame.columns[:3]) == ["replica", "seed", "label"]
        assert len(frame) == 2 * len(one.tables()[name])
    assert len(results.metrics) == 2 * len(one.tables()["averages"])
    last = results.metrics[results.metrics["seed"] == 1].groupby("label").last()
    expected = one.matrix("meat").final["average_accuracy"]
    assert last.loc["meat", "average_accuracy"] == expected


def test_the_matrix_of_a_method_has_tasks_on_both_axes(results: Results) -> None:
    matrix = results.accuracy_matrix("finetune", "seed-1")
    assert list(matrix.index) == list(matrix.columns) == results.tables["seed-0"].tasks("finetune")
    expected = results.tables["seed-0"].matrix("finetune").rates
    np.testing.assert_array_equal(matrix.to_numpy(), expected)
    assert (matrix.index.name, matrix.columns.name) == ("after", "task")


def test_masks_are_shares_and_arrays(results: Results) -> None:
    masks = results.masks("birds")
    arrays = results.mask_arrays("birds", "meat", "seed-0")
    rows = masks[(masks["label"] == "meat") & (masks["seed"] == 0)]
    assert rows["kept"].sum() == sum(int(array.sum()) for array in arrays.values()) > 0
    assert set(results.masks("birds", "meat")["label"]) == {"meat"}


@pytest.mark.parametrize(
    ("ask", "words"),
    [
        (lambda r: r.accuracy_matrix(), "has several methods; choose one with label: meat, "),
        (lambda r: r.accuracy_matrix("met", "seed-0"), "label is 'met', which run "),
        (lambda r: r.accuracy_matrix("meat"), "has 2 replicas, .* give one of seed-0, seed-1"),
        (lambda r: r.masks("bird"), "task is 'bird', .* did you mean 'birds'"),
    ],
)
def test_what_the_run_does_not_have_is_one_sentence(ask: Any, words: str, results: Results) -> None:
    with pytest.raises(UserError, match=words):
        ask(results)


def test_without_pandas_one_sentence_says_so(
    results: Results, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="needs the package pandas, which is not installed"):
        _ = results.matrix


# ---- a run in this process -----------------------------------------------------------------------
def test_a_run_goes_on_where_it_stopped_and_names_the_command(
    tmp_path: Path, quick: None, capsys: pytest.CaptureFixture[str]
) -> None:
    cards = small_run.make_cards(tmp_path, "a")
    body = small_run.make_body(tmp_path, cards, ["linear"], train={"epochs": 1})
    experiment = pipeline.load(small_run.write_config(tmp_path / "config.yaml", body))
    with pytest.raises(UserError, match="finish the run with `python -m pipeline run` first"):
        experiment.results().model()
    results = experiment.run()
    assert "linear/a/evaluate: a " in capsys.readouterr().out
    assert list(results.matrix["source"]) == ["measured"]
    assert experiment.results().matrix.equals(results.matrix)
    image = next((tmp_path / "raw" / "a" / "test").rglob("*.png"))
    answer = results.model().predict([image], "a").iloc[0]
    assert answer["class"] in ("2", "3")


@pytest.mark.slow
def test_a_run_of_two_seeds_and_its_models_answer_as_it_was_evaluated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cards = small_run.make_cards(tmp_path, "ab")
    body = small_run.make_body(tmp_path, cards, ["meat"])
    path = small_run.write_config(tmp_path / "config.yaml", body)
    experiment = pipeline.load(path, seeds=[0, 1])
    assert experiment.results().metrics.empty
    results = experiment.run(quiet=True)
    assert capsys.readouterr().out == ""
    assert Path(results.report).exists()
    assert set(experiment.plan()["status"]) == {"hit"}
    assert list(results.metrics["seed"]) == [0, 0, 1, 1]
    images = sorted((tmp_path / "raw" / "a" / "test").rglob("*.png"))
    for replica in ("seed-0", "seed-1"):
        model = experiment.results().model("meat", replica)
        assert (model.tasks, model.classes("a")) == (["a", "b"], ("2", "3"))
        answers = model.predict(images, task="a")
        right = answers["class"] == [image.parent.name for image in images]
        assert right.mean() == results.accuracy_matrix("meat", replica).loc["a", "a"]
    with pytest.raises(UserError, match="needs to be told the task of each image"):
        model.predict(images)
    with pytest.raises(UserError, match="images is a single one; give a list"):
        model.predict(images[0], task="a")  # type: ignore[arg-type]
