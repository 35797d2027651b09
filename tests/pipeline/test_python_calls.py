"""Tests of the Python API (`import pipeline`): its results match the output of the commands."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fake_search
import numpy as np
import pytest

import pipeline
from pipeline import cli
from pipeline.data import card_files
from pipeline.report import page
from pipeline.results import trials
from pipeline.search.experiment import SearchResults
from tests import small_run
from workers.errors import UserError
from workers.methods import METHODS

SHORT_PAGE = {"report.html": b"<html><body></body></html>"}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[pipeline.Experiment]:
    """Run two methods on two tasks; the report is a stub, to save seconds."""
    folder = tmp_path_factory.mktemp("finished")
    body = small_run.make_body(folder, small_run.make_cards(folder, "ab"), ["meat", "linear"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(page, "build_run_report", lambda *_: dict(SHORT_PAGE))
        experiment = pipeline.load(small_run.write_config(folder / "config.yaml", body))
        experiment.run(quiet=True)
        yield experiment


@pytest.fixture
def other(finished: pipeline.Experiment, tmp_path: Path) -> pipeline.Experiment:
    """Return the same run with a copied storage that a test may change."""
    storage = tmp_path / "storage"
    shutil.copytree(finished.config.storage, storage)
    return pipeline.load(str(finished.source), storage=storage)


def printed(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """Run a command and return its output."""
    capsys.readouterr()
    assert cli.main([*argv]) == 0
    return capsys.readouterr().out


# ---- before and during a run ---------------------------------------------------------------------
def test_ingest_counts_images_and_trains_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    card = small_run.make_card(tmp_path, "a", "23", train=6, test=4, max_bad_fraction=0.5)
    (tmp_path / "raw/a/train/2/broken.png").write_bytes(b"no image")
    body = small_run.make_body(tmp_path, {"a": card}, ["linear"])
    experiment = pipeline.load(body)
    (row,) = experiment.ingest(quiet=True).to_dict("records")
    assert capsys.readouterr().out == ""
    assert (row["stage"], row["train"], row["test"], row["rejected"]) == ("data/a", 12, 8, 1)
    path = small_run.write_config(tmp_path / "config.yaml", body)
    assert row["reasons"] == "1 corrupt"
    assert "12 train; 1 corrupt\n" in printed(capsys, "ingest", path)
    statuses = experiment.plan().set_index("stage")["status"]
    assert statuses["data/a"] == "hit"
    assert statuses["linear/a/train"] == "miss"


def test_until_only_and_force_run_selected_stages(tmp_path: Path, quick: None) -> None:
    body = small_run.make_body(
        tmp_path, small_run.make_cards(tmp_path, "a"), ["linear"], train={"epochs": 1}
    )
    experiment = pipeline.load(body)
    assert set(experiment.plan()["status"]) == {"miss"}
    with pytest.raises(UserError, match=r"has no record of a run .small.*, or run it first"):
        experiment.status()
    experiment.run(quiet=True, until="linear/a/train")
    states = experiment.status().set_index("id")["state"]
    assert states["linear/a/train"] == "done"
    assert states["linear/a/evaluate"] == "missing"
    forecast = experiment.cost().set_index("label")
    assert (
        forecast.loc["together", "stages"] == (states == "missing").sum() - 1
    )  # without the report
    experiment.run(quiet=True, only=["linear/a/evaluate"])
    assert experiment.run(quiet=True, force="linear/a/evaluate").matrix["rate"].notna().all()
    with pytest.raises(UserError, match="--until"):
        experiment.run(quiet=True, until="nothing")


def test_experiment_gives_training_table_and_graph_picture(
    finished: pipeline.Experiment, capsys: pytest.CaptureFixture[str]
) -> None:
    text = printed(capsys, "plan", str(finished.source))
    for row in finished.training().to_dict("records"):
        assert f"  {row['label']}: {row['optimizer']}; {row['length']}" in text
    assert set(finished.training()["label"]) == {"meat", "linear"}
    assert finished.picture().startswith("<svg")
    assert "linear/a/train" in finished.picture()
    assert finished.picture("status") != finished.picture()


# ---- after a run ---------------------------------------------------------------------------------
def test_status_and_logs_match_the_commands(
    finished: pipeline.Experiment, capsys: pytest.CaptureFixture[str]
) -> None:
    status = finished.status().set_index("id")
    assert set(status["state"]) == {"done"}
    assert (status.loc["meat/a/train", ["step", "label", "task"]] == ["train", "meat", "a"]).all()
    assert status.loc["meat/a/train", "wall_s"] > 0
    for stage in ("", "meat/a/train"):
        words = ["logs", str(finished.source), *filter(None, [stage])]
        assert finished.logs(stage or None) + "\n" == printed(capsys, *words)
    assert "meat/a/train: done in" in finished.logs()
    with pytest.raises(UserError, match="did you mean 'meat/a/train'"):
        finished.logs("meat/a/trian")


def test_report_rewrites_a_deleted_page(other: pipeline.Experiment) -> None:
    results = other.results()
    Path(results.report).unlink(missing_ok=True)
    written = other.report()
    assert written == pipeline.WrittenReport(results.report, [], [])
    assert Path(results.report).read_bytes() == SHORT_PAGE["report.html"]


@pytest.mark.usefixtures("small_pictures")
def test_an_analysis_has_tables_and_pictures(other: pipeline.Experiment) -> None:
    analysis = other.analyse(images=8, maps=1, quiet=True)
    assert set(analysis.attention["label"]) == {"meat", "linear"}
    assert set(analysis.attention["task"]) == {"a", "b"}
    assert analysis.robustness.empty
    assert all(Path(picture).exists() for picture in analysis.pictures.values())
    assert analysis.report.page == other.results().report
    with pytest.raises(UserError, match=r"two of these configs are runs called 'small'"):
        other.analyse(other, images=8, quiet=True)


@pytest.mark.usefixtures("small_pictures")
def test_compare_accepts_experiments_names_results_and_files(
    finished: pipeline.Experiment, other: pipeline.Experiment, tmp_path: Path
) -> None:
    file = tmp_path / "results.json"
    finished.results().save(file)
    comparison = pipeline.compare(other, file, storage=tmp_path / "nothing")
    assert Path(comparison.page).read_text().startswith("<!doctype html>")
    assert Path(comparison.page).is_relative_to(other.config.storage)
    summary = comparison.tables["summary"]
    means = summary[summary["number"] == "average_accuracy"].groupby("label")["mean"]
    expected = finished.results().summary.set_index("label")["average_accuracy"]
    for label, values in means:
        np.testing.assert_allclose(values, [expected[label]] * 2)
    named = pipeline.compare("small", finished.results(), storage=other.config.storage)
    assert named.tables["summary"]["mean"].equals(summary["mean"])
    assert (Path(named.folder) / "summary.csv").exists()
    for runs, words in (([], "no run is named"), ([file], "'small' is one run")):
        with pytest.raises(UserError, match=f"compare: {words}; give two or more"):
            pipeline.compare(*runs)
    with pytest.raises(UserError, match=r"path '.*nowhere/a' cannot be written"):
        finished.results().save(tmp_path / "nowhere/a")


def test_tasks_of_a_model_folder_are_exported_removed_and_imported(
    finished: pipeline.Experiment, tmp_path: Path
) -> None:
    model = finished.results().model("linear")
    images = sorted((Path(str(finished.source)).parent / "raw/a/test").rglob("*.png"))
    folder = tmp_path / "model"
    model.save(folder)
    opened = pipeline.open_model(folder)
    answers = model.predict(images, "a")
    assert opened.predict(images, "a").equals(answers)
    assert list(opened.sizes["task"]) == opened.tasks == ["a", "b"]
    assert (opened.sizes["bytes"] > 0).all()
    opened.export_task("a", tmp_path / "a.task")
    assert pipeline.remove_task(folder, "a") == ""
    assert pipeline.open_model(folder).tasks == ["b"]
    assert pipeline.import_task(folder, tmp_path / "a.task") == "a"
    assert pipeline.open_model(folder).predict(images, "a").equals(answers)
    versions = pipeline.model_versions(folder)
    assert list(versions["tasks"]) == [("b",), ("b", "a")]
    assert pipeline.rollback_model(folder) == versions["number"][0]
    assert pipeline.open_model(folder).tasks == ["b"]
    with pytest.raises(UserError, match="is not a model folder"):
        pipeline.open_model(tmp_path)


def test_a_task_is_written_for_timm(finished: pipeline.Experiment, tmp_path: Path) -> None:
    import timm

    model = finished.results().model("linear")
    model.save_timm(tmp_path / "timm", "a")
    network = timm.create_model(f"local-dir:{tmp_path / 'timm'}", pretrained=True)
    assert network.num_classes == 2
    with pytest.raises(UserError, match="task 'c' is not in"):
        model.save_timm(tmp_path / "more", "c")


@pytest.mark.slow
def test_a_task_is_written_as_onnx(finished: pipeline.Experiment, tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    finished.results().model("linear").save_onnx(tmp_path / "a.onnx", "a")
    session = onnxruntime.InferenceSession(str(tmp_path / "a.onnx"))
    (logits,) = session.run(None, {"images": np.zeros((3, 3, 16, 16), np.float32)})
    assert logits.shape == (3, 2)


# ---- the storage ---------------------------------------------------------------------------------
def test_collect_garbage_lists_then_deletes(other: pipeline.Experiment) -> None:
    storage = Path(other.config.storage)
    assert pipeline.collect_garbage(storage).empty
    shutil.rmtree(storage / "runs" / "small")
    garbage = pipeline.collect_garbage(storage)
    assert not garbage["deleted"].any()
    assert garbage["bytes"].sum() > 1000
    assert all((storage / path).exists() for path in garbage["path"])
    deleted = pipeline.collect_garbage(storage, dry_run=False)
    assert deleted["deleted"].all()
    assert list(deleted["path"]) == list(garbage["path"])
    assert not any((storage / path).exists() for path in garbage["path"])


def test_shards_are_listed_as_urls(finished: pipeline.Experiment) -> None:
    shards = pipeline.shards(str(finished.source))
    assert list(shards["card"].unique()) == ["a", "b"]
    assert set(shards["split"]) == {"train", "test"}
    assert shards["url"].str.startswith(finished.config.storage).all()


# ---- methods and data ----------------------------------------------------------------------------
def test_methods_and_their_settings_are_tables() -> None:
    methods = pipeline.methods().set_index("method")
    assert set(methods.index) == set(METHODS)
    assert methods.loc["meat", "forgets"] == METHODS["meat"].may_forget
    settings = pipeline.method_settings("meat").set_index("name")
    assert settings.loc["lambda", ["kind", "default", "bounds"]].tolist() == [
        "number",
        "0.9",
        ">= 0, <= 1",
    ]
    assert settings["meaning"].str.len().min() > 0
    with pytest.raises(UserError, match="there is no method 'met'; did you mean"):
        pipeline.method_settings("met")


def test_data_sets_table_skips_unreadable_cards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        data_sets = pipeline.data_sets().set_index("card")
    assert list(data_sets.index) == card_files.list_card_names()
    assert data_sets.loc["digits", "classes"] == 10
    monkeypatch.setattr(card_files, "list_card_names", lambda: ["digits", "nothing"])
    with pytest.warns(UserWarning, match="nothing"):
        assert list(pipeline.data_sets()["card"]) == ["digits"]


def test_write_config_uses_the_given_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    small_run.make_card(tmp_path, "a", "0123")
    path = pipeline.write_config(Path("raw/a"), name="mine")
    assert path == "mine.yaml"
    assert "4 classes: 0, 1, 2, 3" in capsys.readouterr().out
    assert pipeline.load(path).name == "mine"


# ---- a search ------------------------------------------------------------------------------------
def test_trials_of_a_search_are_a_table(tmp_path: Path) -> None:
    some = fake_search.trials(12)
    name = fake_search.write(tmp_path, fake_search.record(), some)
    results = SearchResults(name, trials.load_search_record(str(tmp_path), name), str(tmp_path), "")
    table = results.trials.set_index("number")
    assert list(table.index) == [trial["number"] for trial in some]
    for trial in some:
        expected = trial["results"][-1]["accuracy"] if trial["results"] else np.nan
        np.testing.assert_equal(table.loc[trial["number"], "accuracy"], expected)
    assert results.tests.empty
    with pytest.raises(UserError, match="has no winner yet"):
        _ = results.winner
    pytest.importorskip("optuna")
    assert results.importance["share"].sum() == pytest.approx(1)
    few = fake_search.write(tmp_path, fake_search.record("few"), some[:1])
    records = trials.load_search_record(str(tmp_path), few)
    with pytest.raises(UserError, match="Importance of settings is measured once 4 trials"):
        _ = SearchResults(few, records, str(tmp_path), "").importance


def search_file(folder: Path) -> str:
    """Write a search of two points over a small base; return its path."""
    body = small_run.make_body(
        folder,
        small_run.make_cards(folder, "a"),
        ["meat"],
        data={"val_fraction": 0.3},
        train={"epochs": 1},
    )
    small_run.write_config(folder / "base.yaml", body)
    space = {"methods.meat.lambda": {"dist": "choice", "values": [0.5, 0.9]}}
    search: dict[str, Any] = {"base": "base.yaml", "space": space, "algorithm": "grid"}
    return small_run.write_config(folder / "tiny.yaml", {**search, "seeds": [3]})


def test_load_search_applies_and_checks_overrides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = search_file(tmp_path)
    monkeypatch.chdir(tmp_path)
    search = pipeline.load_search(Path("tiny.yaml"), **{"seeds": [1, 2], "train.epochs": 2})
    assert (search.name, search.settings.seeds) == ("tiny", (1, 2))
    assert repr(search) == "<SearchExperiment tiny: tiny.yaml seeds=[1, 2] train.epochs=2>"
    monkeypatch.chdir("/")
    with pytest.raises(UserError, match="there is no search 'tiny'"):
        search.results()
    with pytest.raises(UserError, match="'seedz' is a key neither of a search nor"):
        pipeline.load_search(path, seedz=[1])


@pytest.mark.slow
def test_a_search_is_run_and_its_winner_is_a_config(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    search = pipeline.load_search(search_file(tmp_path))
    results = search.run(quiet=True)
    assert capsys.readouterr().out == ""
    assert list(results.trials["status"]) == ["finished", "finished"]
    assert Path(results.report).exists()
    winner = pipeline.load(results.winner, seed=3)
    assert winner.config.methods["meat"].settings["lambda"] in (0.5, 0.9)
    (test,) = results.tests.to_dict("records")
    metrics = winner.run(quiet=True).metrics
    assert metrics["average_accuracy"].iloc[-1] == test["average_accuracy"]
    assert search.results().trials.equals(results.trials)
    assert search.report().page == results.report
