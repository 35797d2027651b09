"""Continual learning for vision transformers: the Python interface.

A config becomes a graph of stages, the stages produce results, and the results are recorded. `load`
reads a config, like the commands `plan` and `run`, and returns an `Experiment`. `load_search` does
the same for a search. The other functions correspond to commands of the command line.
`import pipeline` works in any current folder, and does not import heavy packages such as torch.
Invalid input raises `UserError` with the same one-sentence message as on the command line. Tables
are pandas data frames.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd

    from pipeline.app.analysis import AnalysisResult
    from pipeline.app.experiment import Experiment
    from pipeline.app.reports import WrittenReport
    from pipeline.config.settings import ConfigSource
    from pipeline.growing.stream_edits import Kind
    from pipeline.report.comparison_files import ComparisonResult, RunSource
    from pipeline.results.frames import Results
    from pipeline.results.model import Model
    from pipeline.search.experiment import SearchExperiment, SearchResults
    from workers.data.batch import Batch
    from workers.errors import UserError
    from workers.job import Task
    from workers.methods.base import (
        Method,
        MethodSettings,
        OptimPlan,
        ParamGroup,
        Progress,
        Step,
        StepContext,
    )
    from workers.methods.registration import register
    from workers.methods.train_defaults import TrainDefaults
    from workers.storage.taskstate import Carried, TaskState

__all__ = [
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
AnyPath = str | os.PathLike[str]
# argument of `load`: a config as a path or a mapping, or one or several paths of data
LoadSource = AnyPath | Sequence[AnyPath] | Mapping[str, Any]
# public name -> its module, which is imported when the name is first used
MODULES = {
    "AnalysisResult": "pipeline.app.analysis",
    "Batch": "workers.data.batch",
    "Carried": "workers.storage.taskstate",
    "ComparisonResult": "pipeline.report.comparison_files",
    "Experiment": "pipeline.app.experiment",
    "Method": "workers.methods.base",
    "MethodSettings": "workers.methods.base",
    "Model": "pipeline.results.model",
    "OptimPlan": "workers.methods.base",
    "ParamGroup": "workers.methods.base",
    "Progress": "workers.methods.base",
    "Results": "pipeline.results.frames",
    "SearchExperiment": "pipeline.search.experiment",
    "SearchResults": "pipeline.search.experiment",
    "Step": "workers.methods.base",
    "StepContext": "workers.methods.base",
    "Task": "workers.job",
    "TaskState": "workers.storage.taskstate",
    "TrainDefaults": "workers.methods.train_defaults",
    "UserError": "workers.errors",
    "WrittenReport": "pipeline.app.reports",
    "register": "workers.methods.registration",
}


def __getattr__(name: str) -> Any:
    """Import and return a public name of `MODULES`. Raise AttributeError for any other name."""
    if name not in MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(MODULES[name]), name)


def __dir__() -> list[str]:
    """Return the names of the module and all public names, so that notebooks can complete them."""
    return sorted({*globals(), *__all__})


def load(config: LoadSource, /, **overrides: Any) -> Experiment:
    """Read a config and check it. Nothing is run.

    Args:
        config: Path of a YAML file, or a mapping with the content of such a file. Paths in a
            mapping are relative to the current folder. A card in a mapping can be a mapping too;
            the card is then written to the current folder as `NAME-card.yaml`. `config` can also be
            a path of data, or a list of such paths, as for `accrete run`: a card and a config are
            written to the current folder unless they exist, and the detected layout is printed.
        **overrides: Settings that replace settings of the config, like `--set`. Pass a dotted name
            as `**{"train.epochs": 3}`. If overrides change the results, the run gets another name.

    Raises:
        UserError: If the config is invalid.

    Example:
        >>> experiment = pipeline.load("configs/demo.yaml", seed=1)
        >>> experiment.plan()
    """
    from pipeline.app.experiment import Experiment
    from pipeline.config import settings as configs
    from pipeline.config.yaml_files import format_override

    texts = tuple(format_override(key, value) for key, value in overrides.items())
    source = _resolve_config(config)
    return Experiment(source, texts, configs.load(source, list(texts)))


def load_search(path: AnyPath, /, **overrides: Any) -> SearchExperiment:
    """Read a search file and its base config. Nothing is run.

    Args:
        path: Path of the search file; or of a config, with the name of one method as `methods`.
        **overrides: Settings of the search file or the base config, like `--set`.

    Raises:
        UserError: If one of the files is invalid.

    Example:
        >>> search = pipeline.load_search("configs/search/meat-lambda-alpha.yaml")
        >>> search.run().winner
    """
    from pipeline.config.yaml_files import format_override
    from pipeline.search import spec  # lazy import: loads torch
    from pipeline.search.experiment import SearchExperiment

    texts = tuple(format_override(key, value) for key, value in overrides.items())
    source = os.fspath(path)
    return SearchExperiment(source, texts, spec.load_search_file(source, list(texts)).settings)


# ---- adding and removing data --------------------------------------------------------------------
def add_data(
    config: AnyPath,
    data: AnyPath,
    kind: Kind | None = None,
    *,
    into: str = "",
    name: str = "",
    model: AnyPath = "",
    method: str | None = None,
    max_drop: float = 1.0,
    quiet: bool = False,
) -> Results:
    """Add new classes or images to a run, like `accrete add`, and return all results.

    Args:
        config: Path of the config file, which is changed.
        data: Path of new data, or the source of a card of the config if new files were added there.
        kind: How to use ambiguous data: as a new `task`, as `classes` (known ones get more images),
            or as `images` of known classes only. None: ambiguous data are an error.
        into: Task for the new classes. Empty: the new classes become a new task.
        name: Name of the new task. Empty: the next free name.
        model: Model folder that gets a new version, or is created. Empty: none.
        method: Label of the method that the folder serves, if the run has several.
        max_drop: Largest accepted loss of test accuracy of a served task, in percentage points.
        quiet: Print nothing.

    Raises:
        UserError: If the data cannot be added, a stage fails, or a task of the model gets worse.
    """
    from pipeline.app.experiment import choose_stream, make_console, make_printer
    from pipeline.config.invocation import this_command
    from pipeline.growing.add import AddRequest, add  # lazy import: loads torch
    from pipeline.shell.console import ending

    source = os.fspath(config)
    say = make_printer(choose_stream(quiet))
    request = AddRequest(
        source, os.fspath(data), kind, into, name, os.fspath(model), method, max_drop
    )
    add(
        request,
        make_console(choose_stream(quiet)),
        this_command(),
        say,
        lambda result: say("\n".join(ending(result.outcome, result.report.lines))),
    )
    return load(source).results()


def remove_data(
    config: AnyPath,
    *,
    task: str = "",
    class_name: str = "",
    images: AnyPath = "",
    model: AnyPath = "",
    method: str | None = None,
    quiet: bool = False,
) -> Results:
    """Remove a task, a class or images from a run, like `accrete remove --yes`.

    All results trained on the removed data are deleted without confirmation. Pass exactly one of
    `task`, `class_name` and `images`.

    Args:
        config: Path of the config file, which is changed.
        task: The task to remove.
        class_name: The class to remove, from every task that has it.
        images: Text file with the images to remove, one per line: the path below the source, or the
            sha256 of the file.
        model: Model folder that gets a new version and loses all earlier ones. Empty: none.
        method: Label of the method that the folder serves, if the run has several.
        quiet: Print nothing.

    Returns:
        All results of the changed run.

    Raises:
        UserError: If the data cannot be removed, or a stage fails.
    """
    from pipeline.app.experiment import choose_stream, make_console, make_printer
    from pipeline.config import settings as configs
    from pipeline.config.invocation import this_command
    from pipeline.growing.add import change_lock  # lazy import: loads torch
    from pipeline.growing.removals import Target
    from pipeline.growing.remove import RemoveRequest, remove

    source = os.fspath(config)
    say = make_printer(choose_stream(quiet))
    target = Target(task, class_name, os.fspath(images))
    request = RemoveRequest(source, target, os.fspath(model), method)
    with change_lock(configs.load(source), say):
        remove(
            request, make_console(choose_stream(quiet)), this_command(), say, lambda question: True
        )
    return load(source).results()


# ---- runs and models -----------------------------------------------------------------------------
def runs(storage: AnyPath = "storage") -> pd.DataFrame:
    """Return a row for each run of a storage and each method, latest first.

    `done` of `total` stages have a result (the report is not counted). `average_accuracy` is the
    average accuracy after the last finished task, averaged over seeds and class orders.

    Args:
        storage: Folder or URI of the storage.

    Raises:
        UserError: If the storage does not exist.

    Example:
        >>> pipeline.runs("storage")[["run", "label", "average_accuracy"]]
    """
    from pipeline.app import runs as app
    from pipeline.results.data_frame import data_frame

    columns = ("run", "state", "started", "done", "total", "label", "average_accuracy")
    rows = []
    for run in app.list_runs(os.fspath(storage)):
        head = (run.name, run.state, run.started, run.done, run.total)
        methods = run.methods or ((None, None),)
        rows += [dict(zip(columns, (*head, *method), strict=True)) for method in methods]
    return data_frame(rows, columns)


def compare(
    *runs: AnyPath | Results | Experiment, storage: AnyPath = "storage"
) -> ComparisonResult:
    """Compare two or more runs, and write an HTML page and its tables as CSV.

    Args:
        *runs: Experiments, results, names of runs in a storage, paths of configs, files that
            `Results.save` wrote, or accuracy matrices as CSV or JSON.
        storage: Storage of the runs given by name.

    Raises:
        UserError: If a run cannot be read, or the runs have no common task.

    Example:
        >>> pipeline.compare("demo", "demo-seed-1").tables["summary"]
    """
    from pipeline.report import comparison_files

    return comparison_files.compare([_run_source(run) for run in runs], os.fspath(storage))


def reproduce(
    table: AnyPath, scale: str = "small", run: bool = True, quiet: bool = False, **overrides: Any
) -> pd.DataFrame:
    """Compute a table of a paper, with a row for each cell.

    `value` is the value computed here, and `paper` is the published one. Both are in %, and NaN if
    unknown.

    Args:
        table: Name of a table in `configs/papers`, or path of a file.
        scale: `paper`: the data of the paper. `real`, `small`: smaller data, which can only show
            whether the methods have the same order as in the paper.
        run: Run the missing stages. If false, only stored values are returned.
        quiet: Print nothing.
        **overrides: Settings of all runs of the table, as for `load`.

    Raises:
        UserError: If there is no such table or scale, or a run fails.

    Example:
        >>> pipeline.reproduce("meat-table-1", "small").pivot(index="row", columns="column")
    """
    from pipeline.app import reproduction  # lazy import: loads torch
    from pipeline.app.experiment import choose_stream, make_console
    from pipeline.config.paper_tables import as_scale
    from pipeline.config.yaml_files import format_override
    from pipeline.results.data_frame import data_frame

    texts = [format_override(key, value) for key, value in overrides.items()]
    name = os.fspath(table)
    if run:
        result = reproduction.reproduce(
            name,
            as_scale(scale),
            texts,
            make_console(choose_stream(quiet)),
            "the same `pipeline.reproduce(...)`",
        )
    else:
        result = reproduction.read_table(name, as_scale(scale), texts)
    return data_frame([cell._asdict() for cell in result.cells], reproduction.Cell._fields)


def open_model(folder: AnyPath) -> Model:
    """Open the model in a folder, or URI, that `Model.save` or `accrete bundle` wrote.

    Raises:
        UserError: If `folder` is not a model folder, or its files were changed.

    Example:
        >>> pipeline.open_model("model").predict(["leaf.png"], task="oaks")
    """
    from pipeline.results.bundles import open_folder  # lazy import: loads torch
    from pipeline.results.model import Model

    return Model(open_folder(os.fspath(folder)))


def import_task(folder: AnyPath, file: AnyPath, replace: bool = False) -> str:
    """Add an exported task to a model folder.

    Args:
        folder: The model folder.
        file: File that `Model.export_task` wrote.
        replace: Whether a task of the same name is replaced.

    Returns:
        The name of the task.

    Raises:
        UserError: If the task does not fit the model, or the folder has a task of this name and
            `replace` is false.
    """
    from pipeline.results import bundles  # lazy import: loads torch

    return bundles.import_task(os.fspath(folder), os.fspath(file), replace).name


def remove_task(folder: AnyPath, task: str) -> str:
    """Remove a task from a model folder.

    Args:
        folder: The model folder.
        task: Name of the task.

    Returns:
        A note about remaining traces of the task and about deleted versions, or "".

    Raises:
        UserError: If the task is missing or the only one, or other tasks need its state.
    """
    from pipeline.results import bundles  # lazy import: loads torch

    return bundles.remove_task(os.fspath(folder), task)


def model_inputs(folder: AnyPath) -> pd.DataFrame:
    """Return the counts of images that a model classified: a row for each day, model and task.

    `predict` and `serve` store these counts in the model folder. Damaged count files are left out.
    `finding` says how the images differ from the test images; "" without a significant shift.

    Raises:
        UserError: If `folder` is not a model folder, or not on a disk.
    """
    from dataclasses import asdict, fields

    from pipeline.config.yaml_files import absolute
    from pipeline.results.data_frame import data_frame
    from pipeline.results.input_days import InputRow, read_inputs

    rows = [asdict(row) for row in read_inputs(absolute(os.fspath(folder))).rows]
    return data_frame(rows, [field.name for field in fields(InputRow)])


def model_versions(folder: AnyPath) -> pd.DataFrame:
    """Return a row for each version in a model folder; the last row is the current version.

    `written` is in seconds since the epoch, and `tasks` is a tuple of names.

    Raises:
        UserError: If `folder` is not a model folder, or the file of a version is damaged.
    """
    from pipeline.config.yaml_files import absolute
    from pipeline.results.data_frame import data_frame
    from workers.serving import versions

    rows = [version._asdict() for version in versions.list_versions(absolute(os.fspath(folder)))]
    return data_frame(rows)


def rollback_model(folder: AnyPath) -> int:
    """Restore the previous version of a model folder, and drop the current one.

    Returns:
        The number of the restored version.

    Raises:
        UserError: If no earlier version is kept, or a file of that version is missing.
    """
    from pipeline.config.yaml_files import absolute
    from workers.serving import versions

    return versions.rollback(absolute(os.fspath(folder))).number


def collect_garbage(
    storage: AnyPath = "storage",
    earlier: bool = False,
    dry_run: bool = True,
    older_than_days: float = 0.0,
    keep_gb: float = 0.0,
) -> pd.DataFrame:
    """Find stage results that no recorded run and no search needs, and optionally delete them.

    Args:
        storage: Folder or URI of the storage.
        earlier: Include results that runs needed only before their configs or images were changed.
        dry_run: Only list the results. False deletes them.
        older_than_days: Include only results last written at least so many days ago. 0: all.
        keep_gb: Leave out the newest results, up to this total size in GB (1e9 bytes).

    Returns:
        A row for each folder: its `path` in the storage, `bytes`, `written` (seconds since the
        epoch) and `deleted`. `deleted` is False after a dry run, if a new run or search needs the
        result, or if another process uses or has deleted it.

    Raises:
        UserError: If the storage does not exist, a record in it cannot be read, or a limit is
            negative.
    """
    from pipeline.app.garbage import delete_garbage, find_garbage
    from pipeline.config.yaml_files import absolute
    from pipeline.graph.store import Store
    from pipeline.results.data_frame import data_frame

    store = Store(absolute(os.fspath(storage)))
    changed = store.earlier_names() if earlier else []
    garbage = find_garbage(store, changed, older_than_days * 86400, keep_gb * 1e9)
    paths = [folder.path for folder in garbage]
    staying = {*paths}
    if not dry_run:
        needed_again, busy = delete_garbage(store, paths, changed)
        staying = {*needed_again, *busy}
    rows = []
    for path, size_bytes, written in garbage:
        is_deleted = path not in staying
        rows.append({"path": path, "bytes": size_bytes, "written": written, "deleted": is_deleted})
    return data_frame(rows, ("path", "bytes", "written", "deleted"))


# ---- methods and data ----------------------------------------------------------------------------
def methods() -> pd.DataFrame:
    """Return a row for each method: scenarios, needed images, trained part, removal, stored state.

    Example:
        >>> pipeline.methods().query("not forgets and `old images` == 'none'")
    """
    from pipeline.app import method_list  # lazy import: loads pydantic
    from pipeline.results.data_frame import data_frame

    return data_frame(method_list.method_rows())


def method_settings(method: str) -> pd.DataFrame:
    """Return a row for each setting of a method: kind, default, bounds, the paper's value, meaning.

    Values are strings, as in YAML.

    Raises:
        UserError: If the method does not exist.

    Example:
        >>> pipeline.method_settings("meat")
    """
    from pipeline.app import method_list  # lazy import: loads pydantic
    from pipeline.results.data_frame import data_frame

    settings = method_list.list_settings(method)
    return data_frame([setting._asdict() for setting in settings], method_list.Setting._fields)


def data_sets() -> pd.DataFrame:
    """Return a row for each card of `datasets`: classes, images, how it is obtained, its licence.

    A number that a card does not state is NaN. A card that cannot be read is left out, with a
    warning.
    """
    from pipeline.data import catalogue  # lazy import: loads pyarrow
    from pipeline.results.data_frame import data_frame

    entries, problems = catalogue.read_catalogue()
    for problem in problems:
        warnings.warn(problem, stacklevel=2)
    return data_frame([entry._asdict() for entry in entries])


def prepare_data(
    card: str, source: AnyPath, folder: AnyPath | None = None, copy: bool = False
) -> pd.DataFrame:
    """Sort manually downloaded official files into class folders, like `data prepare`.

    Args:
        card: Name or path of the card.
        source: Folder of the unpacked files.
        folder: Folder to fill. None: the folder that the card reads.
        copy: Write copies instead of links.

    Returns:
        A row with the folder, its classes, and its train and test images.

    Raises:
        UserError: If files are missing or do not belong to the card.
    """
    from pipeline.data import card_files, preparation  # lazy import: loads pyarrow
    from pipeline.results.data_frame import data_frame

    target = None
    if folder is not None:
        target = os.fspath(folder)
    loaded = card_files.load_without_source(card)
    prepared = preparation.prepare(loaded, os.fspath(source), target, copy)
    counts = {"folder": prepared.folder, "classes": prepared.num_classes, **prepared.counts}
    return data_frame([{"card": loaded.name, **counts}])


def shards(card: str, storage: AnyPath | None = None) -> pd.DataFrame:
    """Return the locations of the shards of a card, or of all cards of a config.

    Args:
        card: Name or path of a card, or path of a config.
        storage: Storage with the ingested data. None: `storage`, or the storage of the config.

    Returns:
        A row for each `url`. A URL with braces means several shards, as in WebDataset.

    Raises:
        UserError: If the data have not been ingested yet.
    """
    from pipeline.results import shard_urls  # lazy import: loads pyarrow
    from pipeline.results.data_frame import data_frame

    folder = None
    if storage is not None:
        folder = os.fspath(storage)
    return data_frame([shard._asdict() for shard in shard_urls.find_requested(card, folder)])


def write_config(
    *paths: AnyPath,
    name: str = "",
    image: str | None = None,
    label: str | None = None,
    settings: Mapping[str, Any] | None = None,
) -> str:
    """Inspect data, print the detected layout, and write a card, a config and a preview.

    `load(paths)` does this too, so no earlier call of `write_config` is needed.

    Args:
        *paths: Paths of data, as for `accrete init`. Several data sets become a task each. A single
            data set is divided into tasks by its classes, if it has enough of them.
        name: Name of the run. Empty: the name of the data.
        image: Column of the image in a table, if it is ambiguous.
        label: Column of the label in a table, if it is ambiguous.
        settings: Settings of the card for ambiguous data, for example `{"source.split": "fold",
            "source.splits": {"train": [1, 2], "test": [0]}}`.

    Returns:
        The path of the config.

    Raises:
        UserError: If the data cannot be used, or another file with the same name exists.
    """
    from pipeline.config.invocation import this_command
    from pipeline.config.yaml_files import format_override
    from pipeline.data import starter  # lazy import: loads pyarrow

    given = [format_override(key, value) for key, value in (settings or {}).items()]
    return starter.start(
        _parse_paths(paths),
        this_command(),
        print,
        name=name,
        settings=starter.format_column_settings(image, label) + given,
    )


def preview_data(card: str) -> str:
    """Write a page with images of each class and split of a card, and return its path.

    The page is in the current folder. It shows the data that `ingest` would read, a summary of all
    files, and the skipped files.

    Args:
        card: Name or path of the card.

    Raises:
        UserError: If the card or its source cannot be read.
    """
    from pipeline.data import card_files, starter  # lazy import: loads pyarrow

    return starter.preview_card(card_files.load_card_file(card))


# ---- arguments -----------------------------------------------------------------------------------
def _run_source(run: AnyPath | Results | Experiment) -> RunSource:
    """Convert a run to an argument of `comparison_files.compare`."""
    from pipeline.app.experiment import Experiment
    from pipeline.results.frames import Results

    if isinstance(run, Experiment):
        run = run.results()
    if isinstance(run, Results):
        return [*run.tables.values()]
    return os.fspath(run)


def _resolve_config(source: LoadSource) -> ConfigSource:
    """Return the path or the values of a config.

    For paths of data, return the path of their config; it is written if it does not exist. Cards
    inside a mapping are written to files.
    """
    if isinstance(source, Mapping):
        from pipeline.config.yaml_files import to_plain_values
        from pipeline.data.inline_cards import write_inline_cards  # lazy import: loads pydantic

        body = to_plain_values(source)
        write_inline_cards(body)
        return body
    from pipeline.config.invocation import this_command
    from pipeline.data import starter  # lazy import: loads pyarrow

    return starter.find_or_write_config(_parse_paths(source), this_command(), print)


def _parse_paths(source: AnyPath | Sequence[AnyPath]) -> list[str]:
    """Return paths as strings. Raise `UserError` for an empty list or another type."""
    from workers.errors import UserError

    paths: list[Any] = [source]
    if isinstance(source, (list, tuple)):
        paths = list(source)
    if not paths or not all(isinstance(path, (str, os.PathLike)) for path in paths):
        raise UserError(
            f"config is {source!r:.80}; give the path of a config or of data, a list of paths of "
            "data, or the values of a config as a mapping"
        )
    return [os.fspath(path) for path in paths]
