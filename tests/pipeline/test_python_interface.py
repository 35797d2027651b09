"""Tests of the Python interface: public names, import time, experiments, and pandas results."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import fake_run
import grimp
import numpy as np
import pytest
import yaml

import pipeline
from pipeline import cli
from pipeline.app import analysis, garbage, method_list, prepared, reports, reproduction
from pipeline.app import runs as app
from pipeline.app.prepared import PreparedRun
from pipeline.cli import serving as serving_commands
from pipeline.cli.help import list_subparsers
from pipeline.config.yaml_files import format_override, parse_override
from pipeline.data import catalogue, preparation, starter
from pipeline.graph import diagram, run_record
from pipeline.graph.store import Store
from pipeline.growing import add, remove
from pipeline.launch import cost, step_memory, training_plan
from pipeline.report import comparison_files, log_text, run_text
from pipeline.results import bundles, frames, input_days, model, results_file, runs, shard_urls
from pipeline.results.frames import Results
from pipeline.results.tables import RunTables
from pipeline.search import run as searches
from pipeline.search import spec
from tests import small_run
from tests.pipeline.test_start_up import HEAVY
from workers.errors import UserError
from workers.serving import versions

REPOSITORY = Path(__file__).resolve().parents[2]
PUBLIC = [
    "AnalysisResult",
    "Batch",
    "Carried",
    "ComparisonResult",
    "Experiment",
    "Method",
    "MethodSettings",
    "Model",
    "OptimPlan",
    "ParamGroup",
    "Progress",
    "Results",
    "SearchExperiment",
    "SearchResults",
    "Step",
    "StepContext",
    "Task",
    "TaskState",
    "TrainDefaults",
    "UserError",
    "WrittenReport",
    "add_data",
    "collect_garbage",
    "compare",
    "data_sets",
    "import_task",
    "load",
    "load_search",
    "method_settings",
    "methods",
    "model_inputs",
    "model_versions",
    "open_model",
    "prepare_data",
    "preview_data",
    "register",
    "remove_data",
    "remove_task",
    "reproduce",
    "rollback_model",
    "runs",
    "shards",
    "write_config",
]


# ---- the module ----------------------------------------------------------------------------------
@pytest.mark.parametrize("items", [{}, {"task": "a", "class_name": "b"}])
def test_remove_data_requires_exactly_one_item(items: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="exactly one"):
        pipeline.remove_data("config.yaml", **items)


def test_public_names_are_listed_and_documented() -> None:
    assert pipeline.__all__ == PUBLIC
    assert set(PUBLIC) <= set(dir(pipeline))
    for name in PUBLIC:
        assert getattr(pipeline, name).__doc__
    assert pipeline.UserError is UserError
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = pipeline.nothing


def test_package_import_loads_no_heavy_modules(tmp_path: Path) -> None:
    script = "import json, sys, pipeline; print(json.dumps(sorted(sys.modules)))"
    command = [sys.executable, "-c", script]
    result = subprocess.run(command, check=True, capture_output=True, timeout=900)
    modules = json.loads(result.stdout)
    assert [name for name in (*HEAVY, "pandas", "numpy", "pyarrow") if name in modules] == []


@pytest.mark.parametrize(
    "value",
    [1, 2.5, 1e-05, True, None, "a: b", "yes", "01", "é", [0, 1], {"lr": 1e-3, "steps": {}}],
)
def test_formatted_override_is_parsed_back_unchanged(value: Any) -> None:
    assert parse_override(format_override("train.x", value)) == ("train.x", value)


def test_paths_and_numpy_numbers_are_formatted_as_plain_values() -> None:
    assert format_override("storage", Path("a")) == 'storage="a"'
    assert format_override("seeds", [np.int64(3)]) == "seeds=[3]"


@pytest.mark.parametrize("value", [object(), {1, 2}, np.zeros(2), float("nan")])
def test_a_value_that_no_config_can_hold_is_refused(value: Any) -> None:
    with pytest.raises(UserError, match=r"^seed is .*which a config cannot hold"):
        format_override("seed", value)


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
def test_python_and_command_line_give_the_same_error(
    overrides: dict[str, Any], words: str, config_path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UserError, match=words) as raised:
        pipeline.load(config_path, **overrides)
    options = [format_override(*override) for override in overrides.items()]
    assert cli.main(["plan", config_path, "--set", *options]) == 2
    assert capsys.readouterr().err == f"accrete: {raised.value}\n"


def test_plan_has_a_row_for_each_stage(config_path: str) -> None:
    experiment = pipeline.load(Path(config_path), seed=7)
    assert experiment.name == "small-seed-7"
    plan = experiment.plan()
    prepared = app.prepare(config_path, ["seed=7"])
    assert dict(zip(plan["stage"], plan["key"], strict=True)) == prepared.keys
    assert set(plan["status"]) == {"miss"}
    assert {"data", "meat", "linear"} >= set(plan["label"].dropna())


# ---- a mapping, data, and other folders ----------------------------------------------------------
def test_mapping_gives_the_same_run_as_a_config_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    cards = {"a": os.path.relpath(small_run.make_card(tmp_path, "a", "23"))}
    body = small_run.make_body(tmp_path, cards, ["linear"], storage="results")
    from_file = pipeline.load(small_run.write_config(Path("config.yaml"), body), seed=7)
    body["train"]["epochs"] = np.int64(2)
    body["stream"]["tasks"] = tuple(body["stream"]["tasks"])
    from_mapping = pipeline.load(MappingProxyType(body), seed=7)
    body.clear()  # `load` has copied it
    assert from_mapping.config == from_file.config
    assert from_mapping.name == "small-seed-7"
    assert from_mapping.plan().equals(from_file.plan())
    prepared = [app.prepare(each.source, each.overrides) for each in (from_file, from_mapping)]
    records = [run_record.make_record(run.graph, run.config, run.tasks, {}) for run in prepared]
    assert records[0] == records[1]
    assert repr(from_mapping) == "<Experiment small-seed-7: the config seed=7>"


def test_mapping_can_extend_a_config_in_the_current_folder(
    config_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(config_path).parent)
    config = pipeline.load({"extends": "config.yaml", "seed": 3}).config
    assert (config.name, config.seed, len(config.methods)) == ("small", 3, 2)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"name": "a"}, "^the config: stream is missing; add it"),
        ({"name": {1, 2}}, "^name is {1, 2}, which a config cannot hold"),
        ({"extends": "nothing.yaml"}, "^the config: extends 'nothing.yaml', which does not exist"),
        ({"storage": "https://user:word@host/x"}, "^the config: .*password"),
        ([], r"^config is \[\]; give the path"),
        (5, r"^config is 5; give the path"),
        (["a.yaml", "b"], "^a.yaml is a config, given together with 1 other paths"),
        ("nothing.yaml", "^config 'nothing.yaml' does not exist"),
        ("nothing", "^nothing does not exist"),
    ],
)
def test_config_that_cannot_be_loaded_gives_a_user_error(
    config: Any, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=words):
        pipeline.load(config)


def test_loading_data_writes_same_files_as_the_init_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in "ab":
        small_run.make_card(tmp_path, name, small_run.TASKS[name])
    paths = [Path("raw") / name for name in "ab"]
    experiment = pipeline.load(paths)
    assert [task.name for task in experiment.config.stream.tasks] == ["a", "b"]
    assert experiment.source == "a.yaml"
    assert "2 classes: 2, 3" in capsys.readouterr().out
    assert cli.main(["init", *map(str, paths)]) == 0
    assert "unchanged: a-a-card.yaml" in capsys.readouterr().out
    Path("a.yaml").write_text(Path("a.yaml").read_text().replace("seed: 0", "seed: 8"))
    assert pipeline.load(paths).config.seed == 8


def test_card_in_a_mapping_is_written_to_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = small_run.make_card(tmp_path, "a", "23")
    card = yaml.safe_load(Path(path).read_text())
    body = small_run.make_body(tmp_path, {"a": path}, ["linear"])
    keys = pipeline.load(body).plan()["key"]
    card["source"]["path"] = Path("raw/a")  # relative to the current folder
    body["stream"]["tasks"][0]["card"] = card
    assert list(pipeline.load(body).plan()["key"]) == list(keys)
    assert yaml.safe_load(Path("a-card.yaml").read_text())["source"]["path"] == "raw/a"
    card["classes"] = "from_source"
    pipeline.load(body).plan()  # the file is written again
    Path("a-card.yaml").write_text("name: mine\n")
    with pytest.raises(UserError, match="was not written from a mapping; name that file"):
        pipeline.load(body)
    del card["licence"]
    with pytest.raises(UserError, match=r"^stream\.tasks\.0\.card\.licence is missing"):
        pipeline.load(body)


def test_experiment_works_in_the_folder_where_it_was_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    cards = {"a": os.path.relpath(small_run.make_card(tmp_path, "a", "23"))}
    body = small_run.make_body(tmp_path, cards, ["linear"], storage="results")
    experiment = pipeline.load(small_run.write_config(Path("config.yaml"), body))
    plan = experiment.plan()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    assert experiment.plan().equals(plan)
    assert experiment.results().metrics.empty
    assert Path.cwd() == elsewhere
    assert list(elsewhere.iterdir()) == []
    gone = replace(experiment, folder=str(tmp_path / "gone"))
    with pytest.raises(
        UserError, match=r"gone no longer exists; <Experiment small: config\.yaml> was"
    ):
        gone.plan()


def test_a_deleted_working_directory_is_a_user_error(
    config_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    monkeypatch.chdir(folder)
    loaded_in_deleted = pipeline.load(config_path)
    loaded_elsewhere = replace(loaded_in_deleted, folder=str(tmp_path))
    folder.rmdir()
    with pytest.raises(UserError, match=r"folder no longer exists; <Experiment small: .* was"):
        loaded_in_deleted.plan()
    with pytest.raises(UserError, match=r"^the working directory of this process no longer exists"):
        loaded_elsewhere.plan()


def test_a_failed_analysis_restores_the_working_directory(
    config_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[Any] = []

    def analyse(runs: Any, *arguments: Any) -> None:
        kept.append(runs)  # keep a reference, as a traceback does: the generator is not collected
        next(runs)
        assert Path.cwd() == tmp_path
        raise UserError("the run is not finished")

    monkeypatch.setattr(analysis, "analyse", analyse)
    experiment = replace(pipeline.load(config_path), folder=str(tmp_path))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    with pytest.raises(UserError, match="the run is not finished"):
        experiment.analyse(quiet=True)
    assert Path.cwd() == elsewhere


def test_resume_command_works_from_the_current_folder(
    config_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[str] = []

    def execute(run: Any, open_screen: Any, resume: str, report: str, selection: Any) -> Any:
        commands.extend([resume, report])
        raise UserError("a stage failed")

    monkeypatch.setattr(app, "execute", execute)
    monkeypatch.chdir(tmp_path)
    from_file = pipeline.load("config.yaml", seed=1)
    from_mapping = pipeline.load(yaml.safe_load(Path(config_path).read_text()))
    with pytest.raises(UserError, match="a stage failed"):
        from_file.run()
    monkeypatch.chdir("/")
    for experiment in (from_file, from_mapping):
        with pytest.raises(UserError, match="a stage failed"):
            experiment.run()
    assert commands[0].endswith(" -m pipeline run config.yaml --set seed=1")
    assert commands[1].endswith(" -m pipeline report config.yaml --set seed=1")
    assert commands[2:4] == [f"cd {tmp_path} && {command}" for command in commands[:2]]
    again = "the same `pipeline.load(...).{}()`"
    assert commands[4:] == [again.format("run"), again.format("report")]


def test_runs_table_has_a_row_for_each_method(storage: str, tmp_path: Path) -> None:
    Store(storage).save_record(fake_run.record())
    frame = pipeline.runs(Path(storage))
    assert list(frame["label"]) == list(fake_run.METHODS)
    assert frame["average_accuracy"].between(0.2, 1).all()
    with pytest.raises(UserError, match="does not exist; give the folder"):
        pipeline.runs(tmp_path / "nothing")


# ---- the command line ----------------------------------------------------------------------------
class Entered(Exception):
    """Raised by a function that the command and the Python call must both enter."""


# module and function, the command that calls the function, and the Python call that does so too
PAIRS: list[tuple[Any, str, list[str], Any]] = [
    (app, "prepare", ["plan", "CONFIG"], lambda e: e.plan()),
    (app, "prepare", ["run", "CONFIG"], lambda e: e.run()),
    (app, "prepare", ["report", "CONFIG"], lambda e: e.results()),
    (app, "plan", ["plan", "CONFIG"], lambda e: e.plan()),
    (training_plan, "plan_training", ["plan", "CONFIG"], lambda e: e.training()),
    (cost, "forecast", ["plan", "CONFIG", "--cost"], lambda e: e.cost()),
    (step_memory, "forecast_memory", ["plan", "CONFIG", "--memory"], lambda e: e.memory()),
    (diagram, "to_svg", ["plan", "CONFIG", "--svg", "a.svg"], lambda e: e.picture()),
    (app, "ingest", ["ingest", "CONFIG"], lambda e: e.ingest()),
    (app, "execute", ["run", "CONFIG"], lambda e: e.run()),
    (reports, "report", ["report", "CONFIG"], lambda e: e.report()),
    (analysis, "analyse", ["analyse", "CONFIG"], lambda e: e.analyse()),
    (prepared, "read_run_tables", ["report", "CONFIG", "--json", "a.json"], lambda e: e.results()),
    (
        results_file,
        "write_results",
        ["report", "CONFIG", "--json", "a.json"],
        lambda e: e.results().save("a.json"),
    ),
    (runs, "run_status", ["status", "CONFIG"], lambda e: e.status()),
    (run_text, "run_picture", ["status", "CONFIG", "--svg", "a"], lambda e: e.picture("status")),
    (log_text, "log_text", ["logs", "CONFIG"], lambda e: e.logs()),
    (app, "list_runs", ["runs"], lambda e: pipeline.runs()),
    (comparison_files, "compare", ["compare", "a", "b"], lambda e: pipeline.compare("a", e)),
    (garbage, "find_garbage", ["gc"], lambda e: pipeline.collect_garbage()),
    (starter, "find_or_write_config", ["plan", "DATA"], lambda e: pipeline.load("DATA")),
    (starter, "start", ["init", "DATA"], lambda e: pipeline.write_config("DATA")),
    (spec, "prepare_search", ["search", "search.yaml"], lambda e: a_search().run()),
    (searches, "execute", ["search", "search.yaml"], lambda e: a_search().run()),
    (searches, "report", ["report", "search.yaml"], lambda e: a_search().report()),
    (
        bundles,
        "build_run_bundle",
        ["predict", "CONFIG", "a.png", "--method", "meat"],
        lambda e: e.results().model("meat"),
    ),
    (frames, "choose_label", ["bundle", "CONFIG", "--out", "a"], lambda e: e.results().model()),
    (bundles, "open_folder", ["predict", ".", "a.png"], lambda e: pipeline.open_model(".")),
    (
        bundles,
        "import_task",
        ["tasks", ".", "import", "a"],
        lambda e: pipeline.import_task(".", "a"),
    ),
    (
        bundles,
        "remove_task",
        ["remove", ".", "--task", "a"],
        lambda e: pipeline.remove_task(".", "a"),
    ),
    (input_days, "read_inputs", ["report", "."], lambda e: pipeline.model_inputs(".")),
    (versions, "list_versions", ["tasks", ".", "versions"], lambda e: pipeline.model_versions(".")),
    (versions, "rollback", ["tasks", ".", "rollback"], lambda e: pipeline.rollback_model(".")),
    (add, "add", ["add", "CONFIG", "DATA"], lambda e: pipeline.add_data(e.source, "DATA")),
    (
        remove,
        "remove",
        ["remove", "CONFIG", "--class", "a", "--yes"],
        lambda e: pipeline.remove_data(e.source, class_name="a"),
    ),
    (
        reproduction,
        "reproduce",
        ["reproduce", "meat-table-1", "--scale", "small"],
        lambda e: pipeline.reproduce("meat-table-1", "small"),
    ),
    (method_list, "method_rows", ["methods"], lambda e: pipeline.methods()),
    (method_list, "list_settings", ["methods", "meat"], lambda e: pipeline.method_settings("meat")),
    (catalogue, "read_catalogue", ["data", "list"], lambda e: pipeline.data_sets()),
    (
        preparation,
        "prepare",
        ["data", "prepare", "digits", "."],
        lambda e: pipeline.prepare_data("digits", "."),
    ),
    (shard_urls, "find_requested", ["shards", "digits"], lambda e: pipeline.shards("digits")),
]
# Commands without a Python call: they start processes, or serve the shell, editors, the tools of a
# cluster or the documents of a checkout.
ON_THE_COMMAND_LINE_ALONE = {
    "serve",
    "ui",
    "launch",
    "completion",
    "schema",
    "measure",
    "convert",
}


def a_search() -> pipeline.SearchExperiment:
    """Return a search in the current folder over the config there."""
    body = {
        "base": "config.yaml",
        "set": {"data": {"val_fraction": 0.3}, "methods": {"meat": {}}},
        "space": {"methods.meat.lambda": {"dist": "uniform", "low": 0.5, "high": 1.0}},
        "budget": {"trials": 2},
    }
    return pipeline.load_search(small_run.write_config(Path("search.yaml"), body))


@pytest.mark.parametrize(("module", "function", "command", "call"), PAIRS)
def test_commands_and_python_calls_use_the_same_functions(
    module: Any,
    function: str,
    command: list[str],
    call: Any,
    config_path: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    experiment = pipeline.load(config_path)

    plans = []  # stage id -> key, for each run passed to the function

    def enter(*args: Any, **options: Any) -> Any:
        plans.append([run.keys for run in args if isinstance(run, PreparedRun)])
        raise Entered

    monkeypatch.setattr(reports, "report", lambda *_: reports.WrittenReport("", [], []))
    monkeypatch.setattr(module, function, enter)
    monkeypatch.chdir(Path(config_path).parent)
    with pytest.raises(Entered):
        call(experiment)
    with pytest.raises(Entered):
        cli.main([config_path if word == "CONFIG" else word for word in command])
    assert plans[0] == plans[1]


def test_every_command_has_a_python_call_or_is_exempt() -> None:
    commands = set(list_subparsers(cli.parser()).choices)
    assert commands == {command[0] for _, _, command, _ in PAIRS} | ON_THE_COMMAND_LINE_ALONE


# modules of the Python interface
INTERFACE = (
    "pipeline",
    "pipeline.app.experiment",
    "pipeline.report.comparison_files",
    "pipeline.results.frames",
    "pipeline.results.model",
    "pipeline.search.experiment",
)
# other modules or whole packages that the command modules import -> their purpose
FOR_COMMANDS_ALONE = {
    "pipeline.app.measuring": "measure",
    "pipeline.data.csv_text": "predict --csv; from Python, `to_csv` of the data frame",
    "pipeline.data.errors": "the command after an error about data",
    "pipeline.data.source_advice": "the same",
    "pipeline.growing.training": "plan: the text on which tasks train again",
    "pipeline.launch.training_plan": "plan: the text on how each step is trained",
    "pipeline.launch.platforms": "launch: files that start the command line on a cluster",
    "pipeline.launch.portable": "launch",
    "pipeline.launch.sizes": "launch",
    "pipeline.report.inputs_text": "report of a model folder: the text",
    "pipeline.report.replicas": "the text at the end of a run of several seeds",
    "pipeline.graph.live_status": "ui: whether the storage is there",
    "pipeline.graph.run_log": "--log-level",
    "pipeline.search.schema": "schema",
    "pipeline.serving": "serve",
    "pipeline.cli.question": "questions before something is deleted",
    "pipeline.app.method_package": "methods new: a package, which Python programs do not write",
    "pipeline.app.schema": "schema",
    "pipeline.config.version": "--version",
    "pipeline.tracking.mlflow_client": "ui",
    "workers.plugins": "--plugin; Python programs import the module",
    "workers.preemption": "the exit code after SIGTERM",
    "workers.serving.input_counts": "predict counts the inputs of a model folder",
    "workers.serving.recorder": "the same",
    "workers.storage.filesystem": "the sentence of an error",
    "workers.storage.regular_file": "--svg, --out: files that an option names",
    "workers.storage.secrets": "what is redacted when it is printed",
}


def test_command_line_imports_only_the_interface_and_listed_modules() -> None:
    graph = grimp.build_graph(
        "pipeline",
        "workers",
        include_external_packages=True,
        exclude_type_checking_imports=True,
        cache_dir=None,
    )

    def find_imports(modules: Iterable[str]) -> set[str]:
        """Return the project modules that `modules` import, also inside functions."""
        found = {name for one in modules for name in graph.find_modules_directly_imported_by(one)}
        return {name for name in found if name.startswith(("pipeline.", "workers."))}

    commands = graph.find_modules_that_directly_import("argparse")
    assert "pipeline.cli.main" in commands
    others = find_imports(commands) - commands - {*INTERFACE} - find_imports(INTERFACE)
    assert {exception_of(module) for module in others} == set(FOR_COMMANDS_ALONE)


def exception_of(module: str) -> str:
    """Return the entry of FOR_COMMANDS_ALONE that covers a module, else the module itself."""
    for name in FOR_COMMANDS_ALONE:
        if f"{module}.".startswith(f"{name}."):
            return name
    return module


def test_predict_command_and_model_use_the_same_function(monkeypatch: pytest.MonkeyPatch) -> None:
    def enter(*args: Any) -> Any:
        raise Entered

    monkeypatch.setattr(model, "predict_in_chunks", enter)
    monkeypatch.setattr(serving_commands, "open_bundle", lambda args: None)
    monkeypatch.setattr("workers.serving.server.Predictor", lambda bundle: None)
    monkeypatch.setattr(model, "Predictor", lambda bundle: None)
    bundle: Any = None
    with pytest.raises(Entered):
        model.Model(bundle).predict(["a.png"])
    with pytest.raises(Entered):
        cli.main(["predict", "config.yaml", "a.png"])


# ---- results -------------------------------------------------------------------------------------
def no_model(replica: str, label: str) -> Any:
    raise AssertionError(f"{label} of {replica} is not asked for")


@pytest.fixture(scope="module")
def results(storage: str) -> Results:
    """Return the results of the fake run under two seeds."""
    tables = {}
    for seed in (0, 1):
        record = fake_run.record()
        record["config"]["seed"] = seed
        tables[f"seed-{seed}"] = RunTables.load(storage, record)
    return Results("tiny", tables, no_model, "")


def test_tables_have_rows_for_every_replica_and_method(results: Results) -> None:
    one = results.tables["seed-0"]
    frames = {"summary": results.summary, "matrix": results.matrix, "sizes": results.sizes}
    for name, frame in frames.items():
        assert list(frame.columns[:3]) == ["replica", "seed", "label"]
        assert len(frame) == 2 * len(one.tables()[name])
    assert len(results.metrics) == 2 * len(one.tables()["averages"])
    last = results.metrics[results.metrics["seed"] == 1].groupby("label").last()
    expected = one.matrix("meat").final["average_accuracy"]
    assert last.loc["meat", "average_accuracy"] == expected


def test_accuracy_matrix_has_tasks_on_both_axes(results: Results) -> None:
    matrix = results.accuracy_matrix("finetune", "seed-1")
    assert list(matrix.index) == list(matrix.columns) == results.tables["seed-0"].tasks("finetune")
    expected = results.tables["seed-0"].matrix("finetune").rates
    np.testing.assert_array_equal(matrix.to_numpy(), expected)
    assert (matrix.index.name, matrix.columns.name) == ("after", "task")


def test_masks_are_available_as_shares_and_arrays(results: Results) -> None:
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
def test_unknown_or_ambiguous_selection_gives_a_user_error(
    ask: Any, words: str, results: Results
) -> None:
    with pytest.raises(UserError, match=words):
        ask(results)


def test_missing_pandas_gives_a_user_error(
    results: Results, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="needs the package pandas, which is not installed"):
        _ = results.matrix


# ---- a run in this process -----------------------------------------------------------------------
def test_model_needs_a_finished_run_and_rerun_reuses_results(
    tmp_path: Path,
    quick: None,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cards = small_run.make_cards(tmp_path, "a")
    body = small_run.make_body(tmp_path, cards, ["linear"], train={"epochs": 1})
    experiment = pipeline.load(small_run.write_config(tmp_path / "config.yaml", body))
    with pytest.raises(UserError, match="finish the run with `python -m pipeline run` first"):
        experiment.results().model()
    capsys.readouterr()
    monkeypatch.setenv(
        "TERM", "xterm-color"
    )  # as in a notebook, where the output is not a terminal
    results = experiment.run()
    printed = capsys.readouterr().out
    assert "linear/a/evaluate: a " in printed
    assert printed.endswith(f"\nreport: {results.report}\n")
    assert all(character.isprintable() or character == "\n" for character in printed)
    assert list(results.matrix["source"]) == ["measured"]
    assert experiment.results().matrix.equals(results.matrix)
    assert experiment.run(quiet=True).matrix.equals(results.matrix)
    assert capsys.readouterr() == ("", "")
    image = next((tmp_path / "raw" / "a" / "test").rglob("*.png"))
    answer = results.model().predict([image], "a").iloc[0]
    assert answer["class"] in ("2", "3")


@pytest.mark.slow
def test_models_of_two_seeds_answer_as_evaluated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cards = small_run.make_cards(tmp_path, "ab")
    body = small_run.make_body(tmp_path, cards, ["meat"])
    path = small_run.write_config(tmp_path / "config.yaml", body)
    experiment = pipeline.load(path, seeds=[0, 1])
    assert experiment.results().metrics.empty
    results = experiment.run(quiet=True)
    assert capsys.readouterr() == ("", "")
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
    with pytest.raises(UserError, match="images is a single image; give a list"):
        model.predict(images[0], task="a")  # type: ignore[arg-type]
