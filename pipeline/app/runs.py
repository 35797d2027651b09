"""Typed functions of the driver that return values and print nothing.

`prepare` turns a config into a `PreparedRun`; `execute` runs and records it. The command line
parses arguments, calls these functions and prints their results.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import re
import shlex
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from pipeline.config import settings as configs
from pipeline.config import version as versions
from pipeline.config.invocation import logs_command, this_command
from pipeline.config.settings import Config, ConfigSource
from pipeline.config.yaml_files import absolute
from pipeline.data.account import ACCOUNT, Account
from pipeline.data.preview import PREVIEW
from pipeline.graph import diagram, graph_cache, raw_data
from pipeline.graph.gpu_use import GpuUse, gpu_sentences, read_gpu_use
from pipeline.graph.journal import Journal, keep_journal
from pipeline.graph.live_status import read_status
from pipeline.graph.raw_data import KnownSource
from pipeline.graph.replica_configs import refuse_replicas, replica_configs
from pipeline.graph.replicas import unite_graphs
from pipeline.graph.retries import RetryPolicy
from pipeline.graph.run import (
    Outcome,
    Watcher,
    look_up_all,
    look_up_each,
    mark_outdated,
    raise_if_failed,
    run_graph,
    stages_to_run,
)
from pipeline.graph.run_log import ON_SCREEN, RunLog, driver_log
from pipeline.graph.run_record import RunRecord, make_record
from pipeline.graph.selection import (
    EVERYTHING,
    StageSelection,
    find_stages,
    force,
    selected_to_run,
)
from pipeline.graph.stage import Graph, Stage
from pipeline.graph.store import Garbage, Lookup, Store, version_notes
from pipeline.launch.cluster import is_submitted_job
from pipeline.results import runs as stored_runs
from pipeline.results.data_frame import data_frame
from pipeline.results.runs import RunOverview
from pipeline.results.tables import RunTables
from pipeline.results.trials import keys_of_searches
from pipeline.shell.console import at_work
from pipeline.tracking import complete
from pipeline.tracking.database import sqlite_path
from workers.errors import UserError
from workers.job import Task
from workers.storage.artifact import (
    READ_ONLY,
    Artifact,
    Attempt,
    cached_artifacts,
    content_digest,
    delete_dir,
    exists,
    join,
    read_bytes,
    read_json,
    resolve,
    write_bytes,
)
from workers.storage.lock import stage_lock

if TYPE_CHECKING:
    import pandas as pd
    from prometheus_client import Metric

    from pipeline.graph.run import Executor
    from pipeline.graph.walk import Event
    from pipeline.report.analyse import Analysis, FinishedRun
    from pipeline.tracking.recorder import Recorder, RecordingObserver

LOG = logging.getLogger("accrete.app")
BUILD_MODULE = "pipeline.graph.build"
ANALYSIS_FILE = "analysis.json"
REPORT_FILES = "report-files.json"  # names and digests of the files of the report
REPORT_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*(/[A-Za-z0-9][A-Za-z0-9_.-]*)*")
FP32_ON_GPU = (
    "stages train in fp32 on a GPU; train.precision=tf32 or bf16 is usually faster, with slightly "
    "different results (docs/launch.md)"
)
MAX_MAP_IMAGES = 32  # test images of a task over which maps are drawn; a page shows no more
PACKAGES = (
    "torch",
    "torchvision",
    "timm",
    "ray",
    "mlflow",
    "webdataset",
    "pyarrow",
    "numpy",
    "pillow",
)  # packages with versions in the provenance of results


class Screen(Watcher, Protocol):
    """Shows the progress of a run to a person, for example `pipeline.shell.console.Console`."""

    def progress(self, event: Event) -> None:
        """Show the progress of a stage."""

    def say(self, text: str) -> None:
        """Show one line of text."""

    def activity(self, describe: Callable[[], str]) -> AbstractContextManager[None]:
        """Context manager that shows the text of `describe` after a while without output."""


OpenScreen = Callable[[Graph, dict[str, Lookup]], Screen]


@dataclass(frozen=True)
class PreparedRun:
    """A checked config with its store and its graph of stages, before the run.

    Attributes:
        has_jobs: False for a cached graph; its stages cannot be run; see `with_jobs`.
        replicas: Replicas of a run with several seeds or class orders, each like a run of its own.
            `graph` then contains all of them, and `tasks` are those of the first.
    """

    config: Config
    store: Store
    graph: Graph
    tasks: list[Task]
    has_jobs: bool = True
    replicas: Mapping[str, PreparedRun] = field(default_factory=dict)

    @property
    def keys(self) -> dict[str, str]:
        """Stage id -> key."""
        return {stage.id: stage.key for stage in self.graph}


@dataclass(frozen=True)
class RunPlan:
    """The plan of a run.

    Attributes:
        stages_to_run: Ids of the stages.
        notes: Notes about the effect of an upgrade on existing results.
    """

    run: PreparedRun
    lookups: dict[str, Lookup]
    stages_to_run: set[str]
    notes: list[str]

    @property
    def status(self) -> dict[str, str]:
        """Stage id -> `hit` or `miss`."""
        status = dict.fromkeys(self.run.graph.stages, "hit")
        for stage_id in self.stages_to_run:
            status[stage_id] = "miss"
        return status


@dataclass(frozen=True)
class WrittenReport:
    """A written report, and the messages of the recording in MLflow.

    Attributes:
        page: Path or URI of the page.
        links: Lines with the location of the record.
    """

    page: str
    warnings: list[str]
    links: list[str]

    @property
    def lines(self) -> list[str]:
        """Lines for a person: warnings, the page, and where the record is."""
        return [*self.warnings, f"report: {self.page}", *self.links]


@dataclass(frozen=True)
class RunResult:
    """A finished run: its tables, the outcome of the stages, and its report.

    Attributes:
        run: The run with the keys of the data, which may have been ingested during the run.
        replicas: Tables of each replica of a run with several seeds or class orders. `tables` are
            then those of the first.
    """

    tables: RunTables
    outcome: Outcome
    report: WrittenReport
    run: PreparedRun
    replicas: Mapping[str, RunTables] = field(default_factory=dict)


class IngestedData(NamedTuple):
    """The data of an ingest stage.

    Attributes:
        stage: Id of the stage.
        counts: Images by split.
        rejected: Images by reason.
        account: Lines about every file of the source.
        preview: Path or URI of the page with some images. Empty if there is none.
    """

    stage: str
    counts: Mapping[str, int]
    rejected: Mapping[str, int]
    account: Sequence[str] = ()
    preview: str = ""

    @property
    def rejected_text(self) -> str:
        """The rejected images by reason, as text; empty if there are none."""
        return counts_text(self.rejected)


@dataclass(frozen=True)
class AnalysisResult:
    """Results of `analyse`; `pictures` has the path of the first picture of each part."""

    analysis: Analysis = field(repr=False)
    pictures: dict[str, str]
    report: WrittenReport

    @property
    def attention(self) -> pd.DataFrame:
        """A row for each method, task and layer: where its attention looks, and how far."""
        return data_frame(self.analysis.attention)

    @property
    def robustness(self) -> pd.DataFrame:
        """A row for each method, task and kind of disturbance; empty where it was not asked for."""
        return data_frame(self.analysis.robustness)

    @property
    def notes(self) -> list[str]:
        """Notes about measurements that were not possible."""
        return self.analysis.notes


# ---- from a config to a graph --------------------------------------------------------------------
def prepare(
    source: ConfigSource,
    overrides: Sequence[str] = (),
    to_run: bool = False,
    say: Callable[[str], None] = LOG.info,
    with_jobs: bool = True,
    several: bool = False,
) -> PreparedRun:
    """Read a config, open its storage and build its graph.

    Args:
        source: Path of the config, or its values.
        overrides: Overrides in the form of `--set`.
        to_run: Read raw data that was rewritten in place. Otherwise a source on another machine
            with an existing result is not checked.
        say: Called with a line about such raw data.
        with_jobs: Build stages that can be run. False takes the graph from the cache if its config
            is unchanged, without importing torch.
        several: Accept a config with several seeds or class orders.

    Raises:
        UserError: If the config or its storage cannot be used.
    """
    if not to_run:
        return _prepare(source, overrides, to_run, say, with_jobs, several)

    with at_work(lambda: "reading the config and looking at its data", say):
        return _prepare(source, overrides, to_run, say, with_jobs, several)


def _prepare(
    source: ConfigSource,
    overrides: Sequence[str],
    to_run: bool,
    say: Callable[[str], None],
    with_jobs: bool,
    several: bool,
) -> PreparedRun:
    """Implement `prepare`."""
    # Where the builder is imported already there is nothing to save.
    may_use_cache = BUILD_MODULE not in sys.modules
    config = configs.load(source, list(overrides), with_methods=not may_use_cache)
    if is_submitted_job() and not (os.path.isabs(config.storage) or "://" in config.storage):
        raise UserError(
            f"storage {config.storage!r} is a relative path, "
            "and the folder of a submitted job is deleted when the job ends; "
            "name a folder that all nodes share, with --set storage=FOLDER"
        )
    storage = absolute(config.storage)
    if may_use_cache and "://" not in storage and not os.path.isdir(storage):
        config = configs.load(source, list(overrides))  # a bad config makes no storage folder
    store = Store(storage)
    store.check_usable(to_write=to_run)
    if to_run:
        store.sweep()
    if not several:
        refuse_replicas(config, configs.name_of_source(source), "this needs one model")
    if to_run:
        raw_data.read_sources_again(config, store, say)

    def build_replica(name: str, config: Config) -> PreparedRun:
        def checked() -> Config:
            whole = configs.load(source, list(overrides))
            return replica_configs(whole).get(name, whole)

        return _with_graph(config, store, to_run, with_jobs, may_use_cache, checked)

    replicas = replica_configs(config)
    if not replicas:
        return build_replica("", config)
    return _with_replicas(
        config, {name: build_replica(name, replica) for name, replica in replicas.items()}
    )


def _with_graph(
    config: Config,
    store: Store,
    to_run: bool,
    with_jobs: bool,
    may_use_cache: bool,
    checked: Callable[[], Config],
) -> PreparedRun:
    """Return a run with its graph, from the cache or newly built.

    Args:
        config: The config.
        store: Its store.
        to_run: See `prepare`.
        with_jobs: See `prepare`.
        may_use_cache: Whether the cache can be used.
        checked: Returns the config after the checks that import torch, which the cache saves.
    """
    inputs = graph_cache.collect_inputs(config, store, to_run) if may_use_cache else None
    if inputs is not None and not with_jobs:
        cached = graph_cache.read(store, inputs, config.name)
        if cached is not None:
            return PreparedRun(config, store, cached.graph, cached.tasks, has_jobs=False)
    if may_use_cache:
        config = checked()
    sources = inputs.sources if inputs is not None else {}
    graph, tasks = _build(config, store, to_run, sources)
    if inputs is not None:
        graph_cache.write(store, inputs, graph, tasks)
    return PreparedRun(config, store, graph, tasks)


def _with_replicas(config: Config, replicas: Mapping[str, PreparedRun]) -> PreparedRun:
    """Return a run of several replicas, with their graphs as one."""
    graph = unite_graphs(config.name, {name: run.graph for name, run in replicas.items()})
    first = next(iter(replicas.values()))
    has_jobs = all(run.has_jobs for run in replicas.values())
    return PreparedRun(config, first.store, graph, first.tasks, has_jobs, replicas)


def with_jobs(run: PreparedRun) -> PreparedRun:
    """Return the same run with a graph of stages that can be run."""
    return run if run.has_jobs else rebuild(run)


def rebuild(run: PreparedRun) -> PreparedRun:
    """Return the same run with its graph built from the current data."""
    if run.replicas:
        replicas = {name: rebuild(replica) for name, replica in run.replicas.items()}
        return _with_replicas(run.config, replicas)
    inputs = graph_cache.collect_inputs(run.config, run.store, True)
    graph, tasks = _build(run.config, run.store, True, {} if inputs is None else inputs.sources)
    if inputs is not None:
        graph_cache.write(run.store, inputs, graph, tasks)
    return PreparedRun(run.config, run.store, graph, tasks)


def _build(
    config: Config, store: Store, ask_sources: bool, sources: Mapping[str, KnownSource]
) -> tuple[Graph, list[Task]]:
    from pipeline.graph import build  # start-up time: imports torch and timm

    return build.build_graph(config, store, provenance(), ask_sources=ask_sources, sources=sources)


def provenance() -> dict[str, Any]:
    """Return the provenance of results: git commit, versions of packages and Python, time."""
    import importlib.metadata
    import platform

    packages = {}
    for name in PACKAGES:
        try:
            packages[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "git_commit": versions.git_commit(),
        "packages": packages,
        "python": platform.python_version(),
        "platform": platform.platform(terse=True),
        "created": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def version() -> versions.AccreteVersion:
    """Return the version of Accrete, the commit of the checkout, and its location."""
    return versions.get_version()


def command_text(
    command: str, config_path: str, overrides: Sequence[str], options: Sequence[str] = ()
) -> str:
    """Return the line that a person types to run a command on a config."""
    words = [command, config_path, *options]
    for override in overrides:
        words += ["--set", override]
    return f"{this_command()} {shlex.join(words)}"


def plan(run: PreparedRun) -> RunPlan:
    """Look up every stage, compare the sizes of the files, and return the plan of a run."""
    previous = previous_record(run.store, run.config)
    lookups = look_up_all(run.graph, run.store, previous, "sizes")
    return RunPlan(
        run,
        lookups,
        stages_to_run(run.graph, lookups),
        version_notes(lookups, previous, provenance()),
    )


def previous_record(store: Store, config: Config) -> RunRecord | None:
    """Return the record that explains misses: of this run, or of the config without `--set`."""
    return store.record(config.name) or store.record(config.base_name)


# ---- running -------------------------------------------------------------------------------------
def execute(
    run: PreparedRun,
    open_screen: OpenScreen,
    resume_command: str,
    report_command: str,
    selection: StageSelection = EVERYTHING,
) -> RunResult:
    """Run the missing stages, write the report, and record the run in MLflow.

    The events are logged in the run's driver.log.

    Args:
        run: The prepared run.
        open_screen: Creates the screen.
        resume_command: Command that resumes the run, for messages.
        report_command: Command that writes its record again, for messages.
        selection: Part of the graph to run.

    Raises:
        UserError: If a stage fails, or is unknown.
    """
    for option, names in selection.options:
        find_stages(run.graph, names, option)  # before anything is written
    with driver_log(run.store.storage, run.config.name):
        return _execute(run, open_screen, resume_command, report_command, selection)


def _execute(
    run: PreparedRun,
    open_screen: OpenScreen,
    resume_command: str,
    report_command: str,
    selection: StageSelection,
) -> RunResult:
    config = run.config
    store = run.store
    graph = run.graph
    previous = previous_record(run.store, run.config)
    record = make_record(graph, config, run.tasks, provenance())
    records = list_records(run)
    for saved in (record, *records.values()):
        store.save_record(
            saved
        )  # before the look-up, because from now on `gc` keeps the results that this run needs
    with at_work(lambda: "looking for results in the storage"):
        lookups = force(graph, look_up_all(graph, store, previous), selection)
    todo = selected_to_run(graph, lookups, selection)
    left_out = stages_to_run(graph, lookups) - todo
    LOG.info("run %s: %d stages, %d to run", config.name, len(graph), len(todo))
    screen = open_screen(graph, lookups)
    if not todo and not left_out:
        files = _add_analysis(report_files(run), record, store)
        manifests = {stage_id: lookup.manifest for stage_id, lookup in lookups.items()}
        state = complete.compute_state(config.tracking, store.storage, record, manifests, files)
        links = complete.find_links(state) if config.tracking.enabled else []
        if links is not None:
            outcome = run_graph(graph, store, _no_executor, 0, [screen], lookups)
            return _finish(run, record, outcome, files, [], links)
    elif not run.has_jobs:
        with screen.activity(lambda: "loading PyTorch"):
            full = with_jobs(run)
        if full.keys != run.keys:  # raw data has changed since the graph was read from the cache
            return _execute(full, open_screen, resume_command, report_command, selection)
        run = full
        graph = full.graph
    with screen.activity(lambda: "starting"):
        result = _run_and_record(
            run, record, lookups, todo, selection, screen, resume_command, report_command
        )
    for stage_id in sorted(find_stages(graph, selection.force, "--force")):
        screen.say(f"{stage_id}: {_comparison(lookups[stage_id], result.outcome, stage_id)}")
    return result


def _comparison(before: Lookup, outcome: Outcome, stage_id: str) -> str:
    """Describe whether the result of a forced stage is the same as before."""
    after = outcome.manifests[stage_id]
    if before.manifest is None or after is None:
        return "it had no result before"
    if content_digest(before.manifest) == content_digest(after):
        return "run again, with the same content as before"
    return "run again, with another content than before; what was made of it was run again"


def _run_and_record(
    run: PreparedRun,
    record: RunRecord,
    lookups: dict[str, Lookup],
    todo: set[str],
    selection: StageSelection,
    screen: Screen,
    resume_command: str,
    report_command: str,
) -> RunResult:
    """Run the stages `todo`, and record the run at the same time."""
    # start-up time: they import torch and matplotlib
    from pipeline.graph.walk import State
    from pipeline.launch.time_left import TimeLeftEstimator
    from pipeline.tracking.recorder import RecordingObserver

    run = with_jobs(run)
    config = run.config
    store = run.store
    graph = run.graph
    missing = stages_to_run(graph, lookups) | todo
    groups = config.cluster.groups if config.cluster.workers else 1
    files: dict[str, bytes] = {}
    status = "KILLED"
    with (
        keep_journal(
            store, graph, lookups, missing, resume_command, TimeLeftEstimator(graph, groups)
        ) as journal,
        _serve_metrics(config, journal, graph, screen.say),
        ExitStack() as stack,
    ):
        walks = Walks(run, todo, screen, journal)
        stack.callback(walks.executor.close)
        ingested: Outcome | None = None
        if any(graph[stage_id].step == "ingest" for stage_id in todo):
            ingested = walks.ingest(lookups, todo)
            before = graph
            run = rebuild(run)
            graph = run.graph
            record = make_record(graph, config, run.tasks, provenance())
            for saved in (record, *list_records(run).values()):
                store.save_record(saved)
            lookups = _look_up_again(graph, store, before, lookups, ingested)
            lookups = force(graph, lookups, selection)
            todo = selected_to_run(graph, lookups, selection)
            todo -= {name for name, state in ingested.states.items() if state is State.DONE}
            missing = stages_to_run(graph, lookups) | todo
            journal.take_up(lookups, missing)
        is_whole = missing == todo
        recorder = open_recorder(run, screen.say, report_command)
        recording = RecordingObserver(recorder, graph, record, diagram.to_svg(graph, {}))
        try:
            outcome = walks.run(run, record, lookups, todo, ingested, recording)
            if outcome.failures:
                status = "FAILED"
                files = _report_failures(run, record, outcome.failures, screen)
            elif is_whole:
                status = "FINISHED"
            raise_if_failed(outcome, resume_command, logs_command(store.storage, graph.name))
            with screen.activity(lambda: "building the report"):
                files = report_files_or_build(run, record)
                files = _add_analysis(files, record, store)
            if is_whole:
                log_models(recorder, run)
        finally:
            with screen.activity(recorder.describe_rest):
                recording.finish(files, status)
            if status != "FINISHED":
                for warning in recorder.warnings:
                    LOG.warning("%s", warning)
        links = recorder.links()
        location = recorder.writer.location
        if config.tracking.enabled and is_whole and not recorder.warnings:
            # An executor's report about a stage can lack the name of the attempt; the store has it.
            stored = look_up_all(graph, store, None, "nothing")
            manifests = {stage_id: lookup.manifest for stage_id, lookup in stored.items()}
            state = complete.compute_state(config.tracking, store.storage, record, manifests, files)
            path = None if location is None else sqlite_path(location.uri)
            complete.write(state, links, "" if path is None else str(path), recorder.run_ids)
        return _finish(run, record, outcome, files, recorder.warnings, links)


def _look_up_again(
    graph: Graph,
    store: Store,
    before: Graph,
    lookups: Mapping[str, Lookup],
    ingested: Outcome,
) -> dict[str, Lookup]:
    """Look up the stages with keys that changed during ingest.

    Args:
        graph: Graph with the current keys.
        store: Store of the run.
        before: Graph before the ingest.
        lookups: Results of the stages.
        ingested: Outcome of the ingest stages; their results need not be read again.
    """
    known: dict[str, Lookup] = {}
    for stage in graph:
        manifest = ingested.manifests.get(stage.id)
        if manifest is not None:
            known[stage.id] = Lookup(True, "stands", manifest)
        elif stage.id in before.stages and before[stage.id].key == stage.key:
            known[stage.id] = lookups[stage.id]
    others = Graph(graph.name, {s.id: s for s in graph if s.id not in known})
    found = known | look_up_each(others, store, None)
    return mark_outdated(graph, {stage.id: found[stage.id] for stage in graph})


@contextmanager
def _serve_metrics(
    config: Config, journal: Journal, graph: Graph, say: Callable[[str], None]
) -> Iterator[None]:
    """Inside, answer Prometheus where the config names an address."""
    if not config.tracking.prometheus:
        yield
        return
    from pipeline.tracking.prometheus import run_metrics, serving_metrics  # start-up time

    def collect() -> Iterator[Metric]:
        return run_metrics(journal.snapshot(), graph)

    with serving_metrics(config.tracking.prometheus, collect) as url:
        say(f"metrics for Prometheus: {url}")
        yield


class Walks:
    """The two walks of a run on one executor: over its ingest stages, and over all others.

    Keys of other stages follow from the result of ingest. The screen, the log and the journal
    observe both walks.

    Args:
        run: The run before its data are ingested.
        todo: Ids of the stages to run.
        screen: Shows the run to a person.
        journal: Status of the run.
    """

    def __init__(self, run: PreparedRun, todo: set[str], screen: Screen, journal: Journal):
        # start-up time: they import torch
        from pipeline.launch import executor as launch
        from pipeline.launch.machine import SAMPLE_S

        config = run.config
        self.screen = screen
        self.journal = journal
        self.run_log = RunLog()
        self.watching = [screen.progress, self.run_log.progress, journal.progress]
        self.write_report: Callable[[Stage], dict[str, Any]] = lambda stage: {}
        self.has_gpus = config.cluster.of_any_step().gpus_per_worker > 0
        self.executor = launch.SharedExecutor(
            lambda: launch.make_executor(
                run.store,
                config.cluster,
                run.graph,
                todo,
                self.progress,
                lambda stage: self.write_report(stage),
                SAMPLE_S if config.tracking.samples_machines or self.has_gpus else 0.0,
            )
        )
        self.store = run.store
        self.retries = RetryPolicy.of(config.cluster).stage
        self.graph = run.graph

    def progress(self, event: Event) -> None:
        """Hand a report of a worker to all that watch."""
        for watch in self.watching:
            watch(event)

    def ingest(self, lookups: dict[str, Lookup], todo: set[str]) -> Outcome:
        """Run the ingest stages among the stages `todo`."""
        stages = [stage for stage in self.graph if stage.id in todo and stage.step == "ingest"]
        with self.screen.activity(lambda: "starting"):
            return run_graph(
                Graph.of(self.graph.name, stages),
                self.store,
                lambda todo: self.executor.lend(),
                self.retries,
                [self.screen, self.run_log, self.journal],
                {stage.id: lookups[stage.id] for stage in stages},
                selected={stage.id for stage in stages},
            )

    def run(
        self,
        run: PreparedRun,
        record: RunRecord,
        lookups: dict[str, Lookup],
        todo: set[str],
        ingested: Outcome | None,
        recording: RecordingObserver,
    ) -> Outcome:
        """Run all other stages and record them in MLflow; return how all stages ended.

        Args:
            run: With the keys that follow from its data.
            record: Of the run.
            lookups: Of all stages.
            todo: Ids of the stages to run.
            ingested: How the ingest stages ended, if any ran.
            recording: Writes to MLflow.
        """
        # start-up time: they import torch
        from pipeline.graph.walk import Event, EventKind
        from pipeline.launch.executor import count_parallel_stages

        chains = count_parallel_stages(run.graph, todo)
        gpu_use = GpuUse(run.graph, run.config.cluster, chains, self.journal.set_gpu_use)
        self.watching += [recording.progress, gpu_use.progress]

        def write_report(stage: Stage) -> dict[str, Any]:
            if gpu_use.figures():
                self.journal.save()  # the report reads them
            return make_report(run, record, stage)

        self.write_report = write_report
        precisions = {(run.graph[name].inputs.get("train") or {}).get("precision") for name in todo}
        if self.has_gpus and "fp32" in precisions:
            self.progress(Event(EventKind.NOTE, "", FP32_ON_GPU))
        with self.screen.activity(
            lambda: "ending the workers" if self.journal.is_over else "starting"
        ):
            outcome = run_graph(
                run.graph,
                run.store,
                lambda todo: self.executor,
                self.retries,
                [self.screen, recording, self.run_log, self.journal, gpu_use],
                lookups,
                selected=todo,
                failed={} if ingested is None else ingested.failures,
            )
        figures = gpu_use.figures()
        for sentence in gpu_sentences(figures):
            self.progress(Event(EventKind.NOTE, "", sentence))
        if figures:
            self.journal.save()
        if ingested is not None:
            outcome = replace(outcome, states=outcome.states | ingested.states)
        return outcome


def _finish(
    run: PreparedRun,
    record: RunRecord,
    outcome: Outcome,
    files: Mapping[str, bytes],
    warnings: list[str],
    links: list[str],
) -> RunResult:
    """Copy the report to the folder of the run, and return the results."""
    page = export(run.store, run.config.name, files)
    written = WrittenReport(page, warnings, links)
    if not run.replicas:
        return RunResult(RunTables.load(run.store.storage, record), outcome, written, run)
    tables = RunTables.load_all(run.store.storage, list_records(run))
    return RunResult(next(iter(tables.values())), outcome, written, run, tables)


def _no_executor(stages_to_run: set[str]) -> Executor:
    raise AssertionError(f"nothing is to be run, and {stages_to_run} are")


def _add_analysis(files: dict[str, bytes], record: RunRecord, store: Store) -> dict[str, bytes]:
    """Add the section on attention to the page of a report, where the run was analysed."""
    if not exists(join(store.storage, "runs", record["name"], ANALYSIS_FILE)):
        return files
    from pipeline.report import analysis_section  # start-up time: imports torch and matplotlib

    return analysis_section.add_section(files, record, store)


def ingest(run: PreparedRun, open_screen: OpenScreen, resume_command: str) -> list[IngestedData]:
    """Run the missing ingest stages of a graph; return the data of all its ingest stages."""
    stages = [stage for stage in run.graph if stage.step == "ingest"]
    ingest_graph = Graph.of(run.graph.name, stages)
    bring(ingest_graph, run.config, run.store, open_screen, resume_command)
    ingested = []
    for stage in stages:
        manifest = run.store.look_up(stage, verify="nothing").manifest or {}
        counts = manifest.get("counts", {})
        rejected = manifest.get("rejected", {})
        account, preview = _read_account(run.store, stage.key)
        ingested.append(IngestedData(stage.id, counts, rejected, account, preview))
    return ingested


def _read_account(store: Store, key: str) -> tuple[list[str], str]:
    """Return the lines of an ingest stage's account, and its preview.

    Results of older versions have neither.
    """
    artifact = Artifact.open(store.root, key)
    if artifact is None or not {ACCOUNT, PREVIEW} <= artifact.manifest["files"].keys():
        return [], ""
    try:
        lines = Account.from_json(artifact.read(ACCOUNT)).lines()
    except (ValueError, TypeError, AttributeError):
        return [], ""
    return lines, artifact.uri(PREVIEW)


def counts_text(counts: Mapping[str, int]) -> str:
    """Format counts with their names, for example `20 train, 10 test`."""
    return ", ".join(f"{count} {name}" for name, count in counts.items())


def bring(
    ingest_graph: Graph,
    config: Config,
    store: Store,
    open_screen: OpenScreen,
    resume_command: str,
) -> None:
    """Run the missing stages of `ingest_graph`.

    Args:
        ingest_graph: Graph of ingest stages.
        config: The config.
        store: The store.
        open_screen: Creates the screen.
        resume_command: Command that resumes the run, for messages.

    Raises:
        UserError: If a stage fails.
    """
    from pipeline.launch import executor as launch  # imports torch

    previous = previous_record(store, config)
    lookups = look_up_all(ingest_graph, store, previous)
    screen = open_screen(ingest_graph, lookups)

    def make_executor(todo: set[str]) -> Executor:
        return launch.make_executor(
            store, config.cluster, ingest_graph, todo, screen.progress, lambda stage: {}
        )

    retries = RetryPolicy.of(config.cluster).stage
    with screen.activity(lambda: "starting"):
        outcome = run_graph(ingest_graph, store, make_executor, retries, [screen], lookups)
    raise_if_failed(outcome, resume_command)


# ---- looking at runs -----------------------------------------------------------------------------
def list_runs(storage: str) -> list[RunOverview]:
    """Return all runs of a storage, those started last first."""
    return stored_runs.list_runs(absolute(storage))


# ---- reports -------------------------------------------------------------------------------------
def make_report(run: PreparedRun, record: RunRecord, stage: Stage) -> dict[str, Any]:
    """Run the report stage: write pages, pictures and tables of the run; return its manifest.

    Of several drivers one makes the report. The others wait for it, and return its manifest.
    """
    return run.store.compute_once(stage.key, lambda: _make_report(run, record, stage))


def _make_report(run: PreparedRun, record: RunRecord, stage: Stage) -> dict[str, Any]:
    started = time.monotonic()
    store = run.store
    attempt = Attempt(store.root, stage.key)
    parent_keys = [run.graph[parent].key for parent in stage.parents]
    with cached_artifacts(store.root, parent_keys) as made_of:
        files = build_report(run, record)
    for name, data in files.items():
        attempt.write(name, data)
    manifest = {
        "kind": "report",
        "stage": stage.id,
        "step": "report",
        "wall_s": round(time.monotonic() - started, 3),
        "made_of": made_of,
    }
    attempt.commit(manifest)
    return manifest


def report_files(run: PreparedRun) -> dict[str, bytes]:
    """Return the files of the report stage by name; raise `UserError` if it has no result."""
    artifact = Artifact.need(run.store.root, run.graph["report"].key)
    return {name: artifact.read(name) for name in artifact.manifest["files"]}


def _report_failures(
    run: PreparedRun, record: RunRecord, failures: Mapping[str, str], screen: Screen
) -> dict[str, bytes]:
    """Write the report of a run of which stages failed, and return its files.

    An error here must not hide why the stages failed: it is a line on the screen.
    """
    try:
        with screen.activity(lambda: "building the report"):
            files = _add_analysis(build_report(run, record, failures), record, run.store)
        page = export(run.store, run.config.name, files)
    except Exception as error:
        LOG.warning("no report", exc_info=True, extra={ON_SCREEN: True})
        screen.say(f"no report of the finished stages: {type(error).__name__}: {error}")
        return {}
    screen.say(f"report of the finished stages: {page}")
    return files


def report_files_or_build(run: PreparedRun, record: RunRecord) -> dict[str, bytes]:
    """Return the files of the report stage; build them when the stage has no result."""
    if Artifact.open(run.store.root, run.graph["report"].key):
        return report_files(run)
    return build_report(run, record)


def build_report(
    run: PreparedRun, record: RunRecord, failures: Mapping[str, str] | None = None
) -> dict[str, bytes]:
    """Return the files of a report by name: of one run, or of all replicas together.

    Args:
        run: The run.
        record: Its record.
        failures: Id of a stage that failed -> why.
    """
    from pipeline.report import page, replicas_page  # they import matplotlib

    gpu_use = gpu_sentences(read_gpu_use(run.store.storage, record["name"]))
    if not run.replicas:
        return page.build(run.store.storage, record, failures, gpu_use)
    tables = RunTables.load_all(run.store.storage, list_records(run))
    return replicas_page.build(record, tables, failures, gpu_use)


def list_records(run: PreparedRun) -> dict[str, RunRecord]:
    """Return the records of the replicas of a run; empty for a run of one seed."""
    records = {}
    for name, replica in run.replicas.items():
        records[name] = make_record(replica.graph, replica.config, replica.tasks, provenance())
    return records


def read_tables(run: PreparedRun) -> dict[str, RunTables]:
    """Return the stored results of each replica of a run, by replica.

    Of a run of one seed and class order, its own, under an empty name.
    """
    return RunTables.load_all(run.store.storage, list_records(run) or {"": current_record(run)})


def open_recorder(run: PreparedRun, say: Callable[[str], None], report_command: str) -> Recorder:
    """Create the recorder of a run and all its replicas in MLflow."""
    from pipeline.tracking.recorder import Recorder  # start-up time
    from pipeline.tracking.replicas import ReplicatedRecorder

    storage = run.store.storage
    if not run.replicas:
        return Recorder(run.config.tracking, storage, say, report_command)
    records = list_records(run)
    return ReplicatedRecorder(run.config.tracking, storage, records, say, report_command)


def log_models(recorder: Recorder, run: PreparedRun) -> None:
    """Log each method of a finished run as a model, of each replica."""
    for replica in run.replicas.values() or (run,):
        bundle = partial(write_bundle, replica)
        recorder.models(replica.graph, bundle)


def export(store: Store, name: str, files: Mapping[str, bytes]) -> str:
    """Write the files of a report to `<storage>/runs/NAME/`, and return the path of the page.

    Unchanged files of an earlier report that this one does not have are removed, because they
    belong to another config. Changed files, and those of an analysis, stay.
    """
    folder = join(store.storage, "runs", name)
    list_uri = join(folder, REPORT_FILES)
    try:
        before = read_json(list_uri)
    except (FileNotFoundError, ValueError):
        before = {}
    for file, data in files.items():
        write_bytes(join(folder, file), data)
    digests = {file: hashlib.sha256(data).hexdigest() for file, data in files.items()}
    write_bytes(list_uri, json.dumps(digests, indent=1, sort_keys=True).encode())
    for file, digest in before.items() if isinstance(before, dict) else ():
        if file not in digests and REPORT_FILE.fullmatch(file):
            _remove_unchanged(join(folder, file), digest)
    return join(folder, "report.html")


def _remove_unchanged(uri: str, digest: object) -> None:
    """Remove a file if its sha256 is this one."""
    try:
        is_unchanged = hashlib.sha256(read_bytes(uri)).hexdigest() == digest
    except FileNotFoundError:
        return
    if is_unchanged:
        system, path = resolve(uri)
        system.delete_file(path)


def report(run: PreparedRun, report_command: str) -> WrittenReport:
    """Write the report and the MLflow record again from the store, also of an unfinished run."""
    from pipeline.report import analysis_section  # imports torch and matplotlib
    from pipeline.tracking.recorder import log_to_stderr

    store = run.store
    store.check_writable()
    record = store.record(run.config.name)
    if record is None:
        record = make_record(run.graph, run.config, run.tasks, provenance())
    picture = diagram.to_svg(run.graph, {})
    with at_work(lambda: "building the report"):
        files = build_report(run, record, _earlier_failures(run))
        if not run.replicas:
            files = analysis_section.add_section(files, record, store)
    recorder = open_recorder(run, log_to_stderr, report_command)
    with at_work(recorder.describe_rest):
        recorder.start(record, picture)
        evaluations = [stage for stage in run.graph if stage.step == "evaluate"]
        if all(Artifact.open(store.root, stage.key) for stage in evaluations):
            log_models(recorder, run)
        recorder.finish(files)
    page_path = export(store, run.config.name, files)
    return WrittenReport(page_path, recorder.warnings, recorder.links())


def _earlier_failures(run: PreparedRun) -> dict[str, str]:
    """Return id -> message of the stages that failed when the run was last tried."""
    status = read_status(run.store.storage, run.config.name)
    failures = {}
    for stage_id, stage in (status["stages"] if status else {}).items():
        key = run.graph[stage_id].key if stage_id in run.graph.stages else ""
        if stage["state"] == "failed" and key and not Artifact.open(run.store.root, key):
            failures[stage_id] = stage.get("message", "")
    return failures


def write_bundle(run: PreparedRun, label: str, folder: str) -> None:
    """Write a model folder that serves all tasks of one method of a finished run."""
    from pipeline.results.bundles import read_run_bundle  # imports torch

    read_run_bundle(run.graph, run.store, label).write(folder)


def current_record(run: PreparedRun) -> RunRecord:
    """Return the stored record of a run; a new one when its graph has changed since."""
    record = run.store.record(run.config.name)
    keys = {stage.id: stage.key for stage in run.graph}
    if record is not None and {s["id"]: s["key"] for s in record["stages"]} == keys:
        return record
    return make_record(run.graph, run.config, run.tasks, provenance())


def analyse(
    finished_runs: Iterable[PreparedRun],
    open_screen: OpenScreen,
    command: str,
    images: int = 256,
    map_images: int = 4,
    robustness: bool = False,
    other_cards: Sequence[str] = (),
) -> AnalysisResult:
    """Measure the attention of finished runs, and add the result to their reports and records.

    The tables and pictures go to the first run; the numbers of a method go to its own record.

    Args:
        finished_runs: The runs. Each is taken after the previous ones were checked, so it can be
            prepared lazily.
        open_screen: Creates the screen.
        command: Command that repeats this, for messages.
        images: Approximate number of test images per task.
        map_images: Approximate number of images for maps.
        robustness: Also measure occluded and adversarial images.
        other_cards: Cards to test on in addition.
    """
    # They import torch and matplotlib.
    from pipeline.graph.tasks import cards_graph
    from pipeline.report import analyse as analysis
    from pipeline.report import analysis_section

    check_image_count("images", images, 1, math.inf)
    check_image_count("maps", map_images, 0, MAX_MAP_IMAGES)
    prepared: list[PreparedRun] = []
    runs: list[FinishedRun] = []
    other_tasks: list[Task] = []
    for run in finished_runs:
        if run.config.name in {other.config.name for other in prepared}:
            raise UserError(
                f"analyse: two of these configs are runs called {run.config.name!r}, "
                "so that their numbers could not be told apart; name each config once, "
                "and give each a `name` of its own (--set changes all of them)"
            )
        run.store.check_writable()
        prepared.append(run)
        runs.append(analysis.FinishedRun(run.config, run.graph, run.store, current_record(run)))
        analysis.check_finished(runs[-1])
        card_graph, other_tasks = cards_graph(run.config, run.store, other_cards)
        analysis.check_covered(runs[-1:], other_tasks)
        bring(card_graph, run.config, run.store, open_screen, command)
    with at_work(lambda: "measuring attention"):
        measured = analysis.analyse_runs(runs, images, map_images, robustness, other_tasks)
    first = prepared[0]
    records = [run.record for run in runs]
    files = analysis_section.analysis_files(measured.parts, records, first.store)
    folder = join(first.store.storage, "runs", first.config.name)
    for file, data in files.items():
        write_bytes(join(folder, file), data)
    pages = []
    warnings: list[str] = []
    links: list[str] = []
    for run, analysed_run in zip(prepared, runs, strict=True):
        run_files = files if run is first else {}
        with at_work(lambda: "recording in MLflow"):
            written = _record_analysis(run, analysed_run.record, measured, run_files, images)
        pages.append(written.page)
        warnings += written.warnings
        links += written.links if run is first else []
    pictures = {name: f"{folder}/{part.pictures[0].name}" for name, part in measured.parts.items()}
    return AnalysisResult(measured, pictures, WrittenReport(pages[0], warnings, links))


def check_image_count(option: str, count: int, least: int, most: float) -> None:
    """Raise `UserError` if a number of test images is out of bounds."""
    if not least <= count <= most:
        bounds = f"at least {least}" if most == math.inf else f"{least} to {most}"
        raise UserError(
            f"--{option} is {count}; give the number of test images of a task, {bounds}"
        )


def _record_analysis(
    run: PreparedRun,
    record: RunRecord,
    analysis: Analysis,
    analysis_files: Mapping[str, bytes],
    images: int,
) -> WrittenReport:
    """Add an analysis to the report of one run and to its record in MLflow."""
    # They import torch and matplotlib.
    from pipeline.report import analysis_section
    from pipeline.tracking import points
    from pipeline.tracking.recorder import Recorder

    picture = diagram.to_svg(run.graph, {})
    files = report_files_or_build(run, record)
    files = analysis_section.add_section(files, record, run.store)
    recorder = Recorder(run.config.tracking, run.store.storage, remedy="the same command")
    recorder.start(record, picture)
    recorder.analysed(
        analysis_files,
        points.analysis_points(run.config.name, analysis.attention, analysis.robustness, images),
    )
    recorder.finish(files)
    page_path = export(run.store, run.config.name, files)
    return WrittenReport(page_path, recorder.warnings, recorder.links())


# ---- garbage collection --------------------------------------------------------------------------
def find_garbage(
    store: Store,
    changed: Collection[str] = (),
    older_than_s: float = 0.0,
    keep_bytes: float = 0.0,
) -> list[Garbage]:
    """Return folders of the storage that no named run and no search needs, by path.

    Args:
        store: The store.
        changed: Names of runs with earlier records; include results that only these need.
        older_than_s: Include only older folders, in seconds.
        keep_bytes: Keep the newest folders up to this size.

    Raises:
        UserError: If the storage does not exist, a record cannot be read, or a limit is negative or
            not finite.
    """
    for what, bound in (("age", older_than_s), ("size", keep_bytes)):
        if not math.isfinite(bound) or bound < 0:
            raise UserError(
                f"the {what} that bounds garbage is {bound}; it must be a finite number of at "
                "least 0"
            )
    store.check_exists()
    garbage = store.garbage(keys_of_searches(store.storage), changed)
    newest_first = sorted(garbage, key=lambda folder: folder.written, reverse=True)
    written_before = time.time() - older_than_s
    size_bytes = 0
    chosen = []
    for folder in newest_first:
        size_bytes += folder.size_bytes
        is_old = not older_than_s or folder.written <= written_before
        if is_old and size_bytes > keep_bytes:
            chosen.append(folder)
    return sorted(chosen)


def delete_garbage(
    store: Store, paths: list[str], changed: Collection[str] = ()
) -> tuple[list[str], list[str]]:
    """Delete the folders in `paths` that are still garbage.

    Args:
        store: The store.
        paths: The folders.
        changed: Names of runs; also delete their earlier records if none of their results is left.

    Returns:
        The paths that a run needs by now, and those that a process is computing.

    Raises:
        UserError: If the storage is read-only.
    """
    try:
        return _delete_garbage(store, paths, changed)
    except OSError as error:
        if error.errno not in READ_ONLY:
            raise
        raise UserError(
            f"storage {store.storage!r} may only be read here ({error.strerror or error}), and gc "
            "deletes from it; run gc as a user, and on a machine, that may write there"
        ) from None


def _delete_garbage(
    store: Store, paths: list[str], changed: Collection[str]
) -> tuple[list[str], list[str]]:
    needed_again: list[str] = []
    busy: list[str] = []
    with store.claimed_by_gc():
        remaining_paths = {folder.path for folder in find_garbage(store, changed)}
        for path in paths:
            if path not in remaining_paths:
                needed_again.append(path)
                continue
            try:
                with stage_lock(store.root, path.split("/")[1], wait=False):
                    delete_dir(join(store.storage, path))
                remaining_paths.remove(path)
            except BlockingIOError:
                busy.append(path)
        if changed:
            store.forget_earlier({path.split("/")[1] for path in remaining_paths}, changed)
    return needed_again, busy
