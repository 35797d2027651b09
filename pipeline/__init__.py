"""The driver: a config becomes a graph, the graph becomes stages, results become records.

What a notebook or a script needs is in this module; `import pipeline` works from any folder of the
environment, and imports nothing heavy. `load` reads a config, as the commands `plan` and `run` do;
`runs` lists what a storage holds. A mistake in the input raises `UserError`, whose text is one
sentence, the same as on the command line. Tables are data frames of pandas.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd

    from pipeline.app import PreparedRun
    from pipeline.config import Config
    from pipeline.results.frames import Results
    from pipeline.results.model import Model
    from pipeline.results.tables import RunTables
    from workers.errors import UserError

__all__ = ["Experiment", "Model", "Results", "UserError", "load", "runs"]
# public name -> its module, which is imported when the name is first used
MODULES = {
    "Model": "pipeline.results.model",
    "Results": "pipeline.results.frames",
    "UserError": "workers.errors",
}


def __getattr__(name: str) -> Any:
    """Return a public class. Raise AttributeError for another name."""
    if name not in MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(MODULES[name]), name)


def load(config: str | os.PathLike[str], /, **overrides: Any) -> Experiment:
    """Read a config and check it; nothing is run.

    config: path of a YAML file. overrides: settings that replace those of the file, as `--set`
    does: `load(path, seed=1)`, or with a dotted name `load(path, **{"train.epochs": 3})`. A run
    whose overrides change what is computed has a name of its own. Raise `UserError` when the config
    cannot be used.
    """
    from pipeline import config as configs
    from pipeline.yaml_files import override_of

    path = os.fspath(config)
    texts = tuple(override_of(key, value) for key, value in overrides.items())
    return Experiment(path, texts, configs.load(path, list(texts)))


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


@dataclass(frozen=True)
class Experiment:
    """A config that can be planned, run and looked at, any number of times.

    path: of the config. overrides: as `--set` takes them. config: all settings, as they were when
    it was loaded.
    """

    path: str
    overrides: tuple[str, ...]
    config: Config

    def __repr__(self) -> str:
        return f"<Experiment {self.name}: {self.path} {' '.join(self.overrides)}".rstrip() + ">"

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

        plan = app.plan(self._prepare(with_jobs=False))
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
        whether nothing is printed of the progress. Raise `UserError` when a stage fails.
        """
        from io import StringIO

        from pipeline import app
        from pipeline.console import Console

        run = self._prepare(to_run=True, with_jobs=False)
        resume_command = app.command_text("run", self.path, self.overrides)
        report_command = app.command_text("report", self.path, self.overrides)
        stream = StringIO() if quiet else None
        result = app.execute(
            run,
            lambda graph, lookups: Console(graph, lookups, stream),
            resume_command,
            report_command,
        )
        return self._results(run, result.replicas or {"": result.tables})

    def results(self) -> Results:
        """Return the results that the storage holds; of an unfinished run, those that exist.

        Nothing is run. Raise `UserError` when the config or its storage cannot be used.
        """
        from pipeline import app
        from pipeline.results.tables import RunTables

        run = self._prepare(with_jobs=False)
        records = app.records_of(run) or {"": app.current_record(run)}
        storage = run.store.storage
        tables = {name: RunTables.load(storage, record) for name, record in records.items()}
        return self._results(run, tables)

    def _prepare(self, to_run: bool = False, with_jobs: bool = True) -> PreparedRun:
        from pipeline import app

        return app.prepare(
            self.path, self.overrides, to_run=to_run, with_jobs=with_jobs, several=True
        )

    def _results(self, run: PreparedRun, tables: Mapping[str, RunTables]) -> Results:
        from pipeline import app
        from pipeline.results.frames import Results
        from workers.storage.artifact import join

        def open_model(replica: str, label: str) -> Model:
            from pipeline.results.bundles import bundle_of  # start-up time: imports torch
            from pipeline.results.model import Model

            whole = app.with_jobs(run.replicas.get(replica, run))
            return Model(bundle_of(whole.graph, whole.store, label))

        report = join(run.store.storage, "runs", run.config.name, "report.html")
        return Results(run.config.name, tables, open_model, report)
