"""The Python interface to one config: `Experiment`, which `pipeline.load` creates."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from io import StringIO
from typing import TYPE_CHECKING, Any, Literal, TextIO

if TYPE_CHECKING:
    import pandas as pd

    from pipeline.app.analysis import AnalysisResult
    from pipeline.app.prepared import PreparedRun
    from pipeline.app.reports import WrittenReport
    from pipeline.app.screen import OpenScreen
    from pipeline.config.settings import Config, ConfigSource
    from pipeline.results.frames import Results
    from pipeline.results.model import Model
    from pipeline.results.tables import RunTables

# Replaces the command line in messages if the config or a method exists only in Python, and for
# `analyse`: its runs can have different overrides and folders, so no single command line fits.
REPEAT_IN_PYTHON = "the same `pipeline.load(...).{}()`"
Names = str | Sequence[str]  # one name or several


@dataclass(frozen=True)
class Experiment:
    """A config that can be planned, run and inspected any number of times.

    Attributes:
        source: Path of the config, or its values.
        overrides: Overrides in the form of `--set`.
        config: All settings at the time of loading, used for the name of the run and its storage.
            The functions of this class that need the stages read `source` again.
        folder: Folder that relative paths refer to: the working directory at the time of loading.
            The functions of this class that need it change the working directory of the process to
            it while they run, so they are not thread-safe.
    """

    source: ConfigSource
    overrides: tuple[str, ...]
    config: Config
    folder: str = field(default_factory=os.getcwd)

    def __repr__(self) -> str:
        from pipeline.config import settings as configs  # keeps the start-up fast: pydantic

        words = [f"{self.name}:", configs.get_source_name(self.source), *self.overrides]
        return f"<Experiment {' '.join(words)}>"

    @property
    def name(self) -> str:
        """The name of the run in its storage."""
        return self.config.name

    # ---- before a run ----------------------------------------------------------------------------
    def plan(self) -> pd.DataFrame:
        """Return a row for each stage: whether it would run, and the outcome of the look-up.

        `status` is `miss` if the stage would run, else `hit`. `reason` says why the stage has no
        valid result; with a valid result it is `stands`. An ingest stage whose result was deleted
        is a `hit` too if no stage that would run needs it, because it will not run; its `reason`
        tells what is missing. `label` is the name of the method's entry in the config, and missing
        for stages that all methods share. `replica` is the first replica (seed or class order) with
        the stage, or empty if all replicas share it. No stage runs.

        Raises:
            UserError: If the config or its storage cannot be used.

        Example:
            >>> plan = pipeline.load("configs/demo.yaml").plan()
            >>> plan[plan.status == "miss"]
        """
        from pipeline.app import runs as app
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

    def training(self) -> pd.DataFrame:
        """Return the optimizer and the training length of each method.

        There is a row for each training step of a method, for example `train` or `finetune`
        (column `step`; not a step of the optimizer), and for shared training (label `backbone`).
        The columns `optimizer` and `length` are text, as in the output of `accrete plan`. Tasks
        with equal settings share a row; tasks with other settings have a row of their own. The rows
        do not name the tasks.
        """
        from pipeline.app import runs as app
        from pipeline.results.data_frame import data_frame

        with self._in_folder():
            steps = app.plan(self._prepare()).training()
        rows = []
        for step in steps:
            texts = {"optimizer": step.format_optimizer(), "length": step.format_length()}
            rows.append({"label": step.label, "step": step.step, **texts})
        return data_frame(rows)

    def cost(self, calibrate: bool = False) -> pd.DataFrame:
        """Forecast the cost of the stages that `run` would run, like `plan --cost`.

        Args:
            calibrate: If the storage has no measurements, measure this machine for a few seconds,
                like `plan --calibrate`.

        Returns:
            A row for each method and each kind of shared stage, for example `features` (column
            `label`), and a row `together` for all. Columns: `stages`; `images`, the sum of images
            times epochs; `device_hours` and `wall_hours`, each also with `_low` and `_high`, the
            ends of the likely range; and a column for each origin of an estimate (`same method`,
            `other method`, `calibration`, `formula`, `unknown`) with its number of stages. Hours
            are NaN if no number of images is known.
        """
        from pipeline.app import runs as app
        from pipeline.launch import cost  # keeps the start-up fast: imports torch
        from pipeline.results.data_frame import data_frame

        with self._in_folder():
            forecast = app.plan(self._prepare(with_jobs=True)).forecast(calibrate)
        return data_frame([cost.make_label_row(forecast, label) for label in forecast.walls])

    def memory(self) -> pd.DataFrame:
        """Forecast the memory of a training step of each method, like `plan --memory`.

        Returns:
            A row for each training step of each method, on one rank, without the state of earlier
            tasks. Columns: `label` (of the method, or `backbone`), `step`, `task` (the first with
            the largest batch), `batch_size` (images of a micro-batch), `trained_parameters`,
            `weight_bytes` (before the first step), `peak_bytes`, `flops` (of one step) and
            `reason`. If a dry run fails, `reason` says why, and bytes and flops are NaN.
        """
        from pipeline.app import runs as app
        from pipeline.launch.step_memory import StepMemory
        from pipeline.results.data_frame import data_frame

        with self._in_folder():
            steps = app.plan(self._prepare(with_jobs=True)).forecast_memory()
        return data_frame([step._asdict() for step in steps], StepMemory._fields)

    def picture(self, of: Literal["plan", "status"] = "plan") -> str:
        """Return a drawing of the graph as SVG text.

        Args:
            of: Meaning of the colours. `plan`: hits and misses. `status`: state and duration of
                each stage of a started run.
        """
        from pipeline.app import runs as app
        from pipeline.graph import diagram

        if of == "status":
            from pipeline.report.run_text import run_picture

            return run_picture(self._storage(), self.name)
        with self._in_folder():
            plan = app.plan(self._prepare())
        return diagram.to_svg(plan.run.graph, plan.status)

    # ---- running ---------------------------------------------------------------------------------
    def ingest(self, quiet: bool = False) -> pd.DataFrame:
        """Ingest the raw data without training.

        Args:
            quiet: Print nothing on standard output.

        Returns:
            A row for each data set: the number of images in each split, the number of `rejected`
            images, and the `reasons` for the rejections.

        Raises:
            UserError: If the data cannot be used.
        """
        from pipeline.app import runs as app
        from pipeline.results.data_frame import data_frame

        stream = choose_stream(quiet)
        with self._in_folder() as cd_prefix:
            run = self._prepare(to_run=True, with_jobs=True, say=make_printer(stream))
            command = self._command("ingest", run, cd_prefix)
            ingested = app.ingest(run, make_console(stream), command)
        rows = []
        for card in ingested:
            num_rejected = sum(card.rejected.values())
            counts = {"rejected": num_rejected, "reasons": card.rejected_text}
            rows.append({"stage": card.stage, **card.counts, **counts})
        return data_frame(rows)

    def run(
        self,
        quiet: bool = False,
        only: Names = (),
        start: Names = (),
        until: Names = (),
        force: Names = (),
    ) -> Results:
        """Run the stages that have no result yet, record the run, and return all results.

        The stages run according to `cluster`: with `workers: 0` in this process, otherwise on Ray.

        Args:
            quiet: Print nothing on standard output: no progress, no warnings, and no locations of
                the report and the MLflow record.
            only: Run only these stages, if they have no result, as with `accrete run --only`.
            start: Run only these stages and their descendants, if they have no result, as with
                `--from`. (`from` is a Python keyword.)
            until: Run only these stages and their ancestors, if they have no result, as with
                `--until`.
            force: Run these stages even if they have a result, as with `--force`.

        Raises:
            UserError: If a stage fails.

        Example:
            >>> results = pipeline.load("configs/demo.yaml").run(quiet=True)
            >>> results.summary
        """
        from pipeline.app import runs as app
        from pipeline.graph.selection import StageSelection
        from pipeline.shell.console import ending

        stream = choose_stream(quiet)
        selection = StageSelection(*map(to_name_list, (only, start, until, force)))
        with self._in_folder() as cd_prefix:
            run = self._prepare(to_run=True, say=make_printer(stream))
            result = app.execute(
                run,
                make_console(stream),
                self._command("run", run, cd_prefix, selection.resume_options),
                self._command("report", run, cd_prefix),
                selection,
            )
        print(*ending(result.outcome, result.report.lines), sep="\n", file=stream)
        return self._results(result.run, result.replicas or {"": result.tables})

    # ---- looking at a run ------------------------------------------------------------------------
    def status(self) -> pd.DataFrame:
        """Return the progress of the run: a row for each stage, also while another process runs it.

        `state` is one of:

        - `reused`: the stage did not have to run.
        - `waiting`: it waits for its parents, or for another try.
        - `queued`: it waits for a worker.
        - `running`, `done`, `failed`.
        - `blocked`: a stage that it depends on failed.
        - `interrupted`: no process runs it; the next run resumes it from its checkpoint.
        - `missing`: no process runs it, and it has neither a result nor a checkpoint.

        `since_s` is the time in this state, and `wall_s` is the duration of the stage. Both are in
        seconds, and NaN if unknown.

        Raises:
            UserError: If the run has not been started.
        """
        from pipeline.report.run_text import progress_line
        from pipeline.results.data_frame import data_frame
        from pipeline.results.runs import run_status

        stages = run_status(self._storage(), self.name).stages
        return data_frame(
            [{**asdict(stage), "progress": progress_line(stage.progress)} for stage in stages]
        )

    def logs(self, stage: str | None = None, every: bool = False) -> str:
        """Return the events of the run, or the events and failure tracebacks of one stage.

        Args:
            stage: Id of a stage, as in `plan()`. None: the whole run.
            every: Include all old events and failures, as with `--all`.

        Raises:
            UserError: If the run has not been started, or has no such stage.
        """
        from pipeline.report.log_text import log_text

        return log_text(self._storage(), self.name, stage or "", every)

    def results(self) -> Results:
        """Return the results in the store; for an unfinished run, the results so far.

        No stage runs.

        Raises:
            UserError: If the config or its storage cannot be used.
        """
        from pipeline.app.prepared import read_run_tables

        with self._in_folder():
            run = self._prepare()
            tables = read_run_tables(run)
        return self._results(run, tables)

    def report(self) -> WrittenReport:
        """Write the report and the MLflow record again from the store, also for an unfinished run.

        Returns:
            The locations of the report and of the MLflow record.
        """
        from pipeline.app import reports

        with self._in_folder() as cd_prefix:
            run = self._prepare()
            return reports.report(run, self._command("report", run, cd_prefix))

    def analyse(
        self,
        *others: Experiment,
        images: int = 256,
        maps: int = 4,
        robustness: bool = False,
        on: Names = (),
        quiet: bool = False,
    ) -> AnalysisResult:
        """Measure attention, and optionally robustness, of the finished run.

        The measurements are added to its report and its MLflow record.

        Args:
            *others: Further finished runs for comparison.
            images: Maximum number of test images per task.
            maps: Maximum number of test images per task for attention maps. 0: no maps.
            robustness: Also measure accuracy on occluded and adversarial images.
            on: Cards with further test images of the same classes.
            quiet: Print nothing on standard output.

        Returns:
            Tables of the measurements, the paths of the pictures, and the report.

        Raises:
            UserError: If a run is not finished, or has several seeds or class orders.
        """
        from pipeline.app import analysis
        from pipeline.app import runs as app

        def prepared() -> Generator[PreparedRun, None, None]:
            for experiment in (self, *others):
                # While `analysis.analyse` works on this run, the working directory stays this
                # folder: the `with` block ends only when the next run is requested.
                with experiment._in_folder():
                    yield app.prepare(experiment.source, experiment.overrides)

        screen = make_console(choose_stream(quiet))
        command = REPEAT_IN_PYTHON.format("analyse")
        cards = to_name_list(on)
        # If `analyse` raises, `closing` ends the `with` block in the suspended generator.
        with contextlib.closing(prepared()) as runs:
            return analysis.analyse(runs, screen, command, images, maps, robustness, cards)

    # ---- preparation -----------------------------------------------------------------------------
    def _prepare(self, with_jobs: bool = False, **options: Any) -> PreparedRun:
        """Read `source` again and prepare its run. `options`: see `runs.prepare`."""
        from pipeline.app import runs as app

        return app.prepare(
            self.source, self.overrides, with_jobs=with_jobs, allow_replicas=True, **options
        )

    def _storage(self) -> str:
        """Return the folder or URI of the storage."""
        from pipeline.config.yaml_files import absolute

        with self._in_folder():
            return absolute(self.config.storage)

    def _command(
        self, command: str, run: PreparedRun, cd_prefix: str, options: Sequence[str] = ()
    ) -> str:
        """Return the command line that runs a command on this config, for messages.

        If the config or a method exists only in Python, return the Python call instead.

        Args:
            command: The command.
            run: The prepared run.
            cd_prefix: `cd FOLDER && `, or an empty string.
            options: Options of the command.
        """
        from pipeline.app import runs as app

        if not isinstance(self.source, str) or run.graph.has_outside_code:
            return REPEAT_IN_PYTHON.format(command)
        return cd_prefix + app.format_command(command, self.source, self.overrides, options)

    def _results(self, run: PreparedRun, tables: Mapping[str, RunTables]) -> Results:
        from pipeline.app import runs as app
        from pipeline.results.frames import Results
        from workers.storage.artifact import join

        def open_model(replica: str, label: str) -> Model:
            from pipeline.results.bundles import build_run_bundle  # keeps the start-up fast: torch
            from pipeline.results.model import Model

            with self._in_folder():
                whole = app.with_jobs(run.replicas.get(replica, run))
                return Model(build_run_bundle(whole.graph, whole.store, label))

        report = join(run.store.storage, "runs", run.config.name, "report.html")
        return Results(run.config.name, tables, open_model, report)

    def _in_folder(self) -> contextlib.AbstractContextManager[str]:
        return in_folder(self.folder, self)


# ---- experiments and searches --------------------------------------------------------------------
@contextlib.contextmanager
def in_folder(folder: str, loaded: object) -> Iterator[str]:
    """Change the working directory to `folder` inside the context.

    Relative paths of a config, its cards, its weights and its storage then keep their meaning.

    Args:
        folder: Working directory at the time of loading.
        loaded: The experiment or search loaded in `folder`, for the error message.

    Yields:
        The prefix `cd FOLDER && ` for command lines, or an empty string if `folder` already is the
        working directory.

    Raises:
        UserError: If the folder or the working directory no longer exists.
    """
    from workers.errors import UserError

    try:
        working_directory = os.getcwd()
    except FileNotFoundError:  # it was deleted
        working_directory = ""
    if working_directory == folder:
        yield ""
        return
    words = shlex.quote(folder)
    if not os.path.isdir(folder):
        raise UserError(
            f"folder {words} no longer exists; {loaded!r} was loaded in it; "
            "call `pipeline.load` again"
        )
    if not working_directory:
        raise UserError(
            "the working directory of this process no longer exists; change to another folder with "
            "`os.chdir`"
        )
    with contextlib.chdir(folder):
        yield f"cd {words} && "


def to_name_list(names: Names) -> list[str]:
    """Return one or several names as a list."""
    return [names] if isinstance(names, str) else [*names]


def choose_stream(quiet: bool) -> TextIO:
    """Return the stream for output: standard output, or a discarded buffer if `quiet`."""
    return StringIO() if quiet else sys.stdout


def make_printer(stream: TextIO) -> Callable[[str], None]:
    """Return a function that prints a line on a stream."""
    return lambda line: print(line, file=stream)


def make_console(stream: TextIO) -> OpenScreen:
    """Return a function that creates a screen which shows a run on a stream."""
    from pipeline.shell.console import Console  # keeps the start-up fast: imports pyarrow

    return lambda graph, lookups: Console(graph, lookups, stream)
