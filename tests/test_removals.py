"""Tests of `accrete remove`: no trace is left, and other results equal those of a fresh run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from pipeline import cli
from pipeline.graph.store import Store
from tests import small_run
from tests.test_growing_data import Animals
from tests.traces import Trace, find_traces

METHODS = ("linear", "ewc")
TASKS = {"one": ["ant", "bee", "cow"], "two": ["cat", "dog", "eel"]}
CLASSES = [name for of_task in TASKS.values() for name in of_task]


class Zoo(Animals):
    """Class folders with a card and a config in files, and a run of two tasks."""

    def write(
        self, tasks: Mapping[str, Sequence[str]] = TASKS, storage: str = "storage", **changes: Any
    ) -> str:
        """Write the card and the config; return the path of the config."""
        experiment = self.load(tasks, CLASSES, storage, **changes)
        assert not isinstance(experiment.source, str)
        return small_run.write_config(self.folder / "zoo.yaml", experiment.source)

    def trace(self, *patterns: str) -> list[Trace]:
        """Return the traces of the raw images that match the patterns."""
        return [Trace.of(path, self.raw) for pattern in patterns for path in self.raw.glob(pattern)]

    def card(self) -> Any:
        """Return the content of the card's file."""
        return yaml.safe_load((self.folder / "animals.yaml").read_text())

    def tasks(self) -> dict[str, Any]:
        """Return the classes of the tasks in the config."""
        config = yaml.safe_load((self.folder / "zoo.yaml").read_text())
        return {entry["name"]: entry["classes"] for entry in config["stream"]["tasks"]}

    def results(self, storage: str = "storage", like: str = "") -> dict[str, Any]:
        """Return the results of the stages with `like` in their id."""
        found = small_run.results(self.folder / storage)
        return {stage: body for stage, body in found.items() if like in stage}


@pytest.fixture
def zoo(tmp_path: Path, quick: None) -> Zoo:
    made = Zoo(tmp_path, train=6)
    for name in CLASSES:
        made.draw(name)
    return made


def run(*argv: str | Path, code: int = 0) -> None:
    assert cli.main([*map(str, argv)]) == code


def name_images(zoo: Zoo, kind: str) -> tuple[str, list[Trace]]:
    """Write a file that names two images, and return its path and their traces."""
    paths = [zoo.raw / "train" / "bee" / "0001.png", zoo.raw / "test" / "bee" / "0000.png"]
    lines = [path.relative_to(zoo.raw).as_posix() for path in paths]
    if kind == "digests":
        lines = [hashlib.sha256(path.read_bytes()).hexdigest() for path in paths]
    file = zoo.folder / "list.txt"
    file.write_text("\n".join(lines))
    return str(file), [Trace.of(path, zoo.raw) for path in paths]


# ---- no trace is left ----------------------------------------------------------------------------
@pytest.mark.few("class")
@pytest.mark.parametrize("what", ["class", "task", "names", "digests"])
def test_removal_leaves_no_trace_and_other_results_equal(
    what: str, zoo: Zoo, capsys: pytest.CaptureFixture[str]
) -> None:
    config = zoo.write()
    run("run", config)
    before = zoo.results(like="linear/two/train")
    run("bundle", config, "--method", "linear", "--out", zoo.folder / "model")
    if what == "class":
        target, traces = ["--class", "bee"], zoo.trace("*/bee/*.png")
    elif what == "task":
        target, traces = ["--task", "one"], zoo.trace(*(f"*/{name}/*.png" for name in TASKS["one"]))
    else:
        file, traces = name_images(zoo, what)
        target = ["--images", file]
    folders = [zoo.folder / "storage", zoo.folder / "model"]
    assert find_traces(folders, traces)
    capsys.readouterr()
    run("remove", config, *target, "--model", zoo.folder / "model", "--yes")
    output = capsys.readouterr().out
    assert "deleted:\n" in output
    assert f"{zoo.raw}" in output.partition("left to you:")[2]
    assert find_traces(folders, traces) == []
    sources = [path.read_text() for path in (zoo.folder / "storage" / "sources").iterdir()]
    if what in ("class", "task"):  # the notes about sources name classes
        assert not any('"bee"' in text for text in sources)
    assert zoo.results(like="linear/two/train") == before
    assert (zoo.raw / "train" / "bee" / "0001.png").exists()
    served = json.loads((zoo.folder / "model" / "model.json").read_text())
    assert [task["name"] for task in served["tasks"]] == [*zoo.tasks()]
    assert len([*(zoo.folder / "model" / "versions").glob("*.json")]) == 1

    body = yaml.safe_load(Path(config).read_text()) | {"storage": str(zoo.folder / "fresh")}
    fresh = small_run.write_config(zoo.folder / "fresh.yaml", body)
    run("run", fresh)
    assert zoo.results() == zoo.results("fresh")
    capsys.readouterr()
    stages = {path.name for path in (zoo.folder / "storage" / "stages").iterdir()}
    if what == "task":
        run("remove", config, *target, "--yes", code=2)
        assert "there is nothing to remove" in capsys.readouterr().err
    else:
        run("remove", config, *target, "--yes")
        assert "there is nothing to remove" in capsys.readouterr().out
    assert {path.name for path in (zoo.folder / "storage" / "stages").iterdir()} == stages
    assert not Store(str(zoo.folder / "storage")).earlier_names()


@pytest.mark.slow
def test_removal_rewrites_reports_and_mlflow_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    zoo = Zoo(tmp_path, train=6)
    for name in CLASSES:
        zoo.draw(name)
    config = zoo.write(methods=["meat"], tracking=True)
    run("run", config)
    run("analyse", config, "--maps", "1", "--images", "6")
    (tmp_path / "zoo-preview.html").write_text("<!doctype html>")
    traces = zoo.trace("*/cat/*.png")
    storage = tmp_path / "storage"
    assert find_traces([storage], traces)
    old = {path.name for path in (storage / "mlartifacts").rglob("*") if path.is_file()}
    assert {"report.html", "model.json", "task.safetensors"} <= old
    models = [*storage.glob("mlartifacts/*/models/*")]
    capsys.readouterr()
    run("remove", config, "--class", "cat", "--yes")
    output = capsys.readouterr().out
    assert find_traces([storage], traces) == []
    assert "MLflow: the files of" in output
    assert not any(any(model.rglob("*")) for model in models)
    assert (storage / "runs" / "small" / "report.html").exists()
    assert not (storage / "runs" / "small" / "analysis.json").exists()
    assert len([*storage.glob("mlartifacts/**/report.html")]) == 1
    run("remove", config, "--class", "cat", "--yes")
    assert "there is nothing to remove" in capsys.readouterr().out


# ---- later tasks and other runs ------------------------------------------------------------------
def test_removal_retrains_later_tasks_only_in_a_chain(
    zoo: Zoo, capsys: pytest.CaptureFixture[str]
) -> None:
    config = zoo.write()
    run("run", config)
    before = small_run.attempts(zoo.folder / "storage")
    capsys.readouterr()
    run("remove", config, "--class", "ant", "--yes")
    output = capsys.readouterr().out
    assert "linear trains one (each by itself)" in output
    assert "ewc trains one, two (a chain" in output
    after = small_run.attempts(zoo.folder / "storage")
    assert after["linear/two/train"] == before["linear/two/train"]
    assert zoo.tasks() == {"one": ["bee", "cow"], "two": TASKS["two"]}
    assert zoo.card()["without_classes"] == ["ant"]


def test_removal_writes_split_tasks_to_the_config(zoo: Zoo) -> None:
    config = zoo.write()
    body = yaml.safe_load(Path(config).read_text())
    body["stream"]["tasks"] = [{"card": "animals.yaml", "name": "pets", "split": 3}]
    body["methods"] = {"linear": {"tasks": {"pets-1": {"train": {"epochs": 1}}}}}
    small_run.write_config(Path(config), body)
    run("run", config)
    run("remove", config, "--task", "pets-1", "--yes")
    assert zoo.tasks() == {"pets-0": CLASSES[:2], "pets-2": CLASSES[4:]}
    assert zoo.card()["without_classes"] == CLASSES[2:4]
    assert "linear/pets-1/train" not in small_run.attempts(zoo.folder / "storage")


def test_results_used_by_another_run_are_kept_and_listed(
    zoo: Zoo, capsys: pytest.CaptureFixture[str]
) -> None:
    config = zoo.write()
    other = yaml.safe_load(Path(config).read_text()) | {"name": "other", "seed": 6}
    run("run", config)
    run("run", small_run.write_config(zoo.folder / "other.yaml", other))
    before = small_run.attempts(zoo.folder / "storage", "other")
    capsys.readouterr()
    run("remove", config, "--class", "bee", "--yes")
    output = capsys.readouterr().out
    assert "run other of this storage uses these images too: " in output
    assert "remove CONFIG --class bee" in output
    assert small_run.attempts(zoo.folder / "storage", "other") == before


def test_nothing_is_deleted_without_confirmation(
    zoo: Zoo, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = zoo.write(methods=["linear"])
    run("run", config)
    monkeypatch.setattr("builtins.input", lambda _: "n")
    run("remove", config, "--class", "bee")
    assert "nothing; the same command deletes it" in capsys.readouterr().out
    traces = zoo.trace("*/bee/*.png")
    assert find_traces([zoo.folder / "storage"], traces)
    run("remove", config, "--class", "bee", "--yes")
    assert find_traces([zoo.folder / "storage"], traces) == []


# ---- refusals ------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("option", "value", "sentence"),
    [
        ("--task", "on", "there is nothing to remove, as run 'small' has no such task; "),
        ("--class", "ants", "no card of run 'small' has this class"),
        ("--class", "dog", "task 'two' would keep 1 class without 'dog'"),
        ("--images", "train/bee/0009.png", "is not an image of this run"),
        ("--images", "ab" * 32, "is not an image of this run"),
        ("--images", "", "names no image"),
        ("--images", "train", "these are all train images of class 'bee'"),
        ("--images", "test", "these are all test images of class 'bee'"),
    ],
)
def test_refused_removal_changes_no_file(
    option: str, value: str, sentence: str, zoo: Zoo, capsys: pytest.CaptureFixture[str]
) -> None:
    config = zoo.write({"one": ["ant", "bee", "cow"], "two": ["cat", "dog"]})
    run("ingest", config)
    before = {path: path.read_bytes() for path in zoo.folder.glob("*.yaml")}
    if option == "--images":
        lines = [value]
        if value in ("train", "test"):
            folder = zoo.raw / value / "bee"
            lines = [path.relative_to(zoo.raw).as_posix() for path in folder.iterdir()]
        file = zoo.folder / "list.txt"
        file.write_text("\n".join(lines))
        value = str(file)
    capsys.readouterr()
    run("remove", config, option, value, "--yes", code=2)
    assert sentence in capsys.readouterr().err
    assert {path: path.read_bytes() for path in zoo.folder.glob("*.yaml")} == before


def test_removing_the_only_task_or_a_bundle_class_is_refused(
    zoo: Zoo, capsys: pytest.CaptureFixture[str]
) -> None:
    config = zoo.write({"one": TASKS["one"]}, methods=["linear"])
    run("remove", config, "--task", "one", code=2)
    assert "is the only task of run 'small'" in capsys.readouterr().err
    run("run", config)
    model = zoo.folder / "model"
    run("bundle", config, "--out", model)
    run("remove", model, "--class", "ant", code=2)
    assert "give the config of its run and --model" in capsys.readouterr().err
    run("remove", config, "--class", "ant", "--method", "linear", code=2)
    assert "--method needs a model folder" in capsys.readouterr().err


def test_list_of_removed_images_in_another_folder_is_refused(
    zoo: Zoo, capsys: pytest.CaptureFixture[str]
) -> None:
    config = zoo.write()
    elsewhere = zoo.folder / "home"
    elsewhere.mkdir()
    elsewhere.joinpath("profile").write_text("export A=b\n")
    card = zoo.folder / "animals.yaml"
    card.write_text(card.read_text() + "without_images: home/profile\n")
    run("ingest", config)
    file, _ = name_images(zoo, "names")
    run("remove", config, "--images", file, "--yes", code=2)
    assert "must be in the folder of its card" in capsys.readouterr().err
    assert elsewhere.joinpath("profile").read_text() == "export A=b\n"


# ---- kills ---------------------------------------------------------------------------------------
@pytest.mark.few(1)
@pytest.mark.parametrize("calls", range(3, 143, 7))
def test_killed_removal_can_be_resumed(calls: int, zoo: Zoo) -> None:
    config = zoo.write(methods=["linear"])
    model = zoo.folder / "model"
    run("run", config)
    run("bundle", config, "--out", model)
    command = ["remove", config, "--class", "bee", "--model", str(model), "--yes"]
    process = small_run.start(command, zoo.folder / "out.txt", kill_before=calls)
    process.join(900)
    assert process.exitcode == -9, (zoo.folder / "out.txt").read_text()
    small_run.run(command, zoo.folder / "again.txt")
    assert find_traces([zoo.folder / "storage", model], zoo.trace("*/bee/*.png")) == []
    assert zoo.tasks()["one"] == ["ant", "cow"]
    output = small_run.run(command, zoo.folder / "third.txt")
    assert "there is nothing to remove" in output
    body = yaml.safe_load(Path(config).read_text()) | {"storage": str(zoo.folder / "fresh")}
    run("run", small_run.write_config(zoo.folder / "fresh.yaml", body))
    assert zoo.results() == zoo.results("fresh")


# ---- other layouts -------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["names", "digests"])
def test_images_in_tables_can_be_removed_by_row_or_digest(
    kind: str, zoo: Zoo, capsys: pytest.CaptureFixture[str]
) -> None:
    rows: list[dict[str, Any]] = []
    for path in sorted(zoo.raw.glob("*/*/*.png")):
        image = {"bytes": path.read_bytes(), "path": None}
        rows.append({"image": image, "label": path.parent.name, "part": path.parent.parent.name})
    table = zoo.folder / "tables"
    for split in ("train", "test"):
        table.joinpath(split).mkdir(parents=True)
        part = [row for row in rows if row["part"] == split]
        pq.write_table(pa.Table.from_pylist(part), table / split / f"{split}.parquet")
    source = {"format": "parquet", "path": str(table)}
    config = zoo.write(methods=["linear"], card={"source": source})
    run("run", config)
    first = rows[[row["part"] for row in rows].index("train")]["image"]["bytes"]
    digest = hashlib.sha256(first).hexdigest()
    file = zoo.folder / "list.txt"
    file.write_text(digest if kind == "digests" else "train.parquet:0")
    capsys.readouterr()
    if kind == "names":
        (table / "test" / "test.parquet").rename(table / "test" / "train.parquet")
        run("remove", config, "--images", file, code=2)
        assert "is the name of several images of card 'animals'" in capsys.readouterr().err
        (table / "test" / "train.parquet").rename(table / "test" / "test.parquet")
    run("remove", config, "--images", file, "--yes")
    traces = [t for t in zoo.trace("train/*/*.png") if digest.encode() in t.texts]
    traces = [
        replace(trace, texts=trace.texts[2:]) for trace in traces
    ]  # rows of a table have other names
    assert len(traces) == 1
    assert find_traces([zoo.folder / "storage"], traces) == []
    run("remove", config, "--images", file, "--yes")
    assert "there is nothing to remove" in capsys.readouterr().out


def test_a_removed_class_is_not_added_again(zoo: Zoo, capsys: pytest.CaptureFixture[str]) -> None:
    config = zoo.write(methods=["linear"])
    run("run", config)
    run("remove", config, "--class", "bee", "--yes")
    capsys.readouterr()
    before = zoo.tasks()
    run("add", config, zoo.raw)
    assert "no new class" in capsys.readouterr().out
    assert zoo.tasks() == before
