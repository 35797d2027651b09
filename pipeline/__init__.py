"""The driver: a config becomes a graph, the graph becomes stages, results become records.

What a notebook or a script needs is in this module; `import pipeline` works from any folder of the
environment, and imports nothing heavy. `load` reads a config, as the commands `plan` and `run` do;
`runs` lists what a storage holds. A mistake in the input raises `UserError`, whose text is one
sentence, the same as on the command line. Tables are data frames of pandas.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd

    from pipeline.app import PreparedRun
    from pipeline.config import Config, ConfigSource
    from pipeline.results.frames import Results
    from pipeline.results.model import Model
    from pipeline.results.tables import RunTables
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
    "Batch",
    "Carried",
    "Experiment",
    "Method",
    "MethodSettings",
    "Model",
    "OptimPlan",
    "ParamGroup",
    "Progress",
    "Results",
    "Step",
    "StepContext",
    "Task",
    "TaskState",
    "TrainDefaults",
    "UserError",
    "load",
    "register",
    "runs",
]
AnyPath = str | os.PathLike[str]
# what `load` takes: a config as a file or a mapping, or data, as one path or several
LoadSource = AnyPath | Sequence[AnyPath] | Mapping[str, Any]
RUN_AGAIN = "the same `pipeline.load(...).run()`"  # where no command could do the same
# public name -> its module, which is imported when the name is first used
MODULES = {
    "Batch": "workers.data.batch",
    "Carried": "workers.storage.taskstate",
    "Method": "workers.methods.base",
    "MethodSettings": "workers.methods.base",
    "Model": "pipeline.results.model",
    "OptimPlan": "workers.methods.base",
    "ParamGroup": "workers.methods.base",
    "Progress": "workers.methods.base",
    "Results": "pipeline.results.frames",
    "Step": "workers.methods.base",
    "StepContext": "workers.methods.base",
    "Task": "workers.job",
    "TaskState": "workers.storage.taskstate",
    "TrainDefaults": "workers.methods.train_defaults",
    "UserError": "workers.errors",
    "register": "workers.methods.registration",
}


def __getattr__(name: str) -> Any:
    """Return a public class. Raise AttributeError for another name."""
    if name not in MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(MODULES[name]), name)


def load(config: LoadSource, /, **overrides: Any) -> Experiment:
    """Read a config and check it; nothing is run.

    config: path of a YAML file, or a mapping of what such a file holds, whose paths start at the
    current folder; a card in it may be a mapping too, and is written there as `NAME-card.yaml`.
    Or a path of data, or a list of such, as `accrete run` takes: a card and a config for it are
    written into the current folder unless they are there, and what was detected is printed.

    overrides: settings that replace those of the config, as `--set` does: `load(path, seed=1)`, or
    with a dotted name `load(path, **{"train.epochs": 3})`. A run whose overrides change what is
    computed has a name of its own. Raise `UserError` when the config cannot be used.
    """
    from pipeline import config as configs
    from pipeline.yaml_files import override_of

    texts = tuple(override_of(key, value) for key, value in overrides.items())
    source = _config_of(config)
    return Experiment(source, texts, configs.load(source, list(texts)))


def runs(storage: str | os.PathLike[str] = "storage") -> pd.DataFrame:
    """Return a row for each run of a storage and each of its methods, those started last first.

    `done` of `total` stages have a result; `average_accuracy` is that after the last finished task,
    the mean over several seeds. storage: a folder or URI. Raise `UserError` when there is none.
    """
    from pipeline import app
    from pipeline.results.data_frame import data_frame

    columns = ("run", "state", "started", "done", "total", "label", "average_accuracy")
    rows = []
    for run in app.list_runs(os.fspath(storage)):
        head = (run.name, run.state, run.started, run.done, run.total)
        methods = run.methods or ((None, None),)
        rows += [dict(zip(columns, (*head, *method), strict=True)) for method in methods]
    return data_frame(rows, columns)


def _config_of(source: LoadSource) -> ConfigSource:
    """Return the path of a config, or its values; for data, that of the config that is written."""
    if isinstance(source, Mapping):
        from pipeline.data.inline_cards import write_inline_cards  # start-up time: imports pyarrow
        from pipeline.yaml_files import plain_values

        body = plain_values(source)
        write_inline_cards(body)
        return body
    from pipeline.data import starter  # start-up time: imports pyarrow
    from pipeline.shell.invocation import this_command

    return starter.config_of(_paths_of(source), this_command(), print)


def _paths_of(source: AnyPath | Sequence[AnyPath]) -> list[str]:
    """Return paths as texts. Raise `UserError` when there is none, or something else."""
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


@dataclass(frozen=True)
class Experiment:
    """A config that can be planned, run and looked at, any number of times.

    source: path of the config, or its values. overrides: as `--set` takes them. config: all
    settings, as they were when it was loaded. folder: where relative paths start, the current
    folder when it was loaded; while it is at work, the process is in that folder.
    """

    source: ConfigSource
    overrides: tuple[str, ...]
    config: Config
    folder: str = field(default_factory=os.getcwd)

    def __repr__(self) -> str:
        from pipeline import config as configs

        words = [f"{self.name}:", configs.name_of_source(self.source), *self.overrides]
        return f"<Experiment {' '.join(words)}>"

    @property
    def name(self) -> str:
        """The name of the run in its storage."""
        return self.config.name

    def plan(self) -> pd.DataFrame:
        """Return a row for each stage with its key, and whether it is a `hit` or a `miss` and why.

        Nothing is run. Raise `UserError` when the config or its storage cannot be used.
        """
        from pipeline import app
        from pipeline.results.data_frame import data_frame

        with self._in_folder():
            plan = app.plan(self._prepare())
        status = plan.status
        rows = [
            {
                "stage": stage.id,
                "step": stage.step,
                "replica": stage.replica,
                "label": stage.method,
                "task": stage.task,
                "key": stage.key,
                "status": status[stage.id],
                "reason": plan.lookups[stage.id].reason,
            }
            for stage in plan.run.graph
        ]
        return data_frame(rows)

    def run(self, quiet: bool = False) -> Results:
        """Run the stages that have no result yet, record the run, and return all results.

        They run where `cluster` says: with `workers: 0` in this process, else on Ray. quiet:
        whether nothing is printed: no line for a stage when it ends, and every 30 s of a long one;
        no warnings, and not where the report and the record in MLflow are. Raise `UserError` when a
        stage fails.
        """
        from io import StringIO

        from pipeline import app
        from pipeline.console import Console, ending

        stream = StringIO() if quiet else sys.stdout
        with self._in_folder() as change_folder:
            run = self._prepare(to_run=True, say=lambda line: print(line, file=stream))
            result = app.execute(
                run,
                lambda graph, lookups: Console(graph, lookups, stream),
                self._command("run", run, change_folder),
                self._command("report", run, change_folder),
            )
        print(*ending(result.outcome, result.published.lines), sep="\n", file=stream)
        return self._results(run, result.replicas or {"": result.tables})

    def results(self) -> Results:
        """Return the results that the storage holds; of an unfinished run, those that exist.

        Nothing is run. Raise `UserError` when the config or its storage cannot be used.
        """
        from pipeline import app

        with self._in_folder():
            run = self._prepare()
            tables = app.tables_of(run)
        return self._results(run, tables)

    def _prepare(self, **options: Any) -> PreparedRun:
        from pipeline import app

        return app.prepare(self.source, self.overrides, with_jobs=False, several=True, **options)

    def _command(self, command: str, run: PreparedRun, change_folder: str) -> str:
        """Return what a person types to give a command on this config.

        change_folder: what they type before it, where the current folder is another one.
        """
        from pipeline import app

        if not isinstance(self.source, str) or run.graph.has_outside_code:
            return RUN_AGAIN
        return change_folder + app.command_text(command, self.source, self.overrides)

    def _results(self, run: PreparedRun, tables: Mapping[str, RunTables]) -> Results:
        from pipeline import app
        from pipeline.results.frames import Results
        from workers.storage.artifact import join

        def open_model(replica: str, label: str) -> Model:
            from pipeline.results.bundles import bundle_of  # start-up time: imports torch
            from pipeline.results.model import Model

            with self._in_folder():
                whole = app.with_jobs(run.replicas.get(replica, run))
                return Model(bundle_of(whole.graph, whole.store, label))

        report = join(run.store.storage, "runs", run.config.name, "report.html")
        return Results(run.config.name, tables, open_model, report)

    @contextlib.contextmanager
    def _in_folder(self) -> Iterator[str]:
        """Be in the folder in which the experiment was loaded; yield the command that goes there.

        So relative paths of the config, its cards, its weights and its storage stay what they were.
        The command is empty in that folder. Raise `UserError` when the folder is gone.
        """
        from workers.errors import UserError

        if os.getcwd() == self.folder:
            yield ""
            return
        folder = shlex.quote(self.folder)
        if not os.path.isdir(self.folder):
            raise UserError(
                f"the folder {folder}, in which {self!r} was loaded, is gone; "
                "call `pipeline.load` again"
            )
        with contextlib.chdir(self.folder):
            yield f"cd {folder} && "
