"""Python functions behind the commands: they run in the driver and return values.

They print only progress, on a screen or on stderr. `prepare` turns a config into a `PreparedRun`;
`execute` runs and records it. The command line parses arguments, calls these functions and prints
their results.
"""

from __future__ import annotations

import logging
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from pipeline.app.prepared import PreparedRun, RunPlan, make_replica_records, provenance
from pipeline.app.reports import (
    WrittenReport,
    add_analysis,
    export,
    log_models,
    make_report,
    open_recorder,
    read_or_build_report,
    report_failures,
    report_files,
)
from pipeline.app.screen import OpenScreen, Screen
from pipeline.config import settings as configs
from pipeline.config.invocation import logs_command, this_command
from pipeline.config.settings import Config, ConfigSource
from pipeline.config.yaml_files import absolute
from pipeline.data.account import ACCOUNT, Account
from pipeline.data.preview import PREVIEW
from pipeline.graph import diagram, graph_cache, raw_data
from pipeline.graph.gpu_use import GpuUse, gpu_sentences
from pipeline.graph.journal import Journal, keep_journal
from pipeline.graph.raw_data import KnownSource
from pipeline.graph.replica_configs import make_replica_configs, refuse_replicas
from pipeline.graph.replicas import unite_graphs
from pipeline.graph.retries import RetryPolicy
from pipeline.graph.run import (
    Outcome,
    look_up_all,
    look_up_each,
    mark_outdated,
    raise_if_failed,
    run_graph,
    stages_to_run,
)
from pipeline.graph.run_log import RunLog, driver_log
from pipeline.graph.run_record import RunRecord, make_record
from pipeline.graph.selection import (
    EVERYTHING,
    StageSelection,
    find_stages,
    force,
    select_stages_to_run,
)
from pipeline.graph.stage import Graph, Stage
from pipeline.graph.store import Lookup, Store, version_notes
from pipeline.launch.cluster import is_submitted_job
from pipeline.results import runs as stored_runs
from pipeline.results.runs import RunOverview
from pipeline.results.tables import RunTables
from pipeline.shell.console import at_work
from pipeline.tracking import complete
from pipeline.tracking.database import sqlite_path
from pipeline.tracking.prometheus import announce_metrics, run_metrics
from workers.errors import UserError
from workers.job import Task
from workers.storage.artifact import (
    Artifact,
    compute_content_digest,
)

if TYPE_CHECKING:
    from pipeline.graph.run import Executor
    from pipeline.graph.walk import Event
    from pipeline.tracking.recorder import Recorder

LOG = logging.getLogger("accrete.app")
BUILD_MODULE = "pipeline.graph.build"
FP32_ON_GPU = (
    "stages train in fp32 on a GPU; train.precision=tf32 or bf16 is usually faster, with slightly "
    "different results (docs/launch.md)"
)


@dataclass(frozen=True)
class RunResult:
    """A finished run: its tables, the outcome of the stages, and its report.

    Attributes:
        tables: Tables of results. For a run with replicas, the tables of the first replica.
        outcome: How the stages ended.
        report: The written report.
        run: The run, with the final keys: keys change if data is ingested during the run.
        replicas: Name -> tables of each replica, for a run with several seeds or class orders.
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
        counts: Number of images, by split.
        rejected: Number of rejected images, by reason.
        account: Lines that account for every file of the source.
        preview: Path or URI of a page with some of the images. Empty if there is none.
    """

    stage: str
    counts: Mapping[str, int]
    rejected: Mapping[str, int]
    account: Sequence[str] = ()
    preview: str = ""

    @property
    def rejected_text(self) -> str:
        """The rejected images by reason, as text; empty without rejected images."""
        return format_counts(self.rejected)


# ---- from a config to a graph --------------------------------------------------------------------
def prepare(
    source: ConfigSource,
    overrides: Sequence[str] = (),
    to_run: bool = False,
    say: Callable[[str], None] = LOG.info,
    with_jobs: bool = True,
    allow_replicas: bool = False,
) -> PreparedRun:
    """Read a config, open its storage and build its graph.

    Args:
        source: Path of the config, or its values.
        overrides: Overrides in the form of `--set`.
        to_run: Prepare to run stages: check that the storage is writable, delete temporary files of
            killed processes, and compare the content of raw data that was rewritten in place (same
            paths and sizes, other modification times). If false, a data source on another machine
            is not contacted if its data was ingested.
        say: Called with each line about progress and about raw data rewritten in place, if `to_run`
            is true.
        with_jobs: Build stages that can be run. If false, the graph comes from the cache, without
            importing torch, unless an input of the graph has changed.
        allow_replicas: Accept a config with several seeds or class orders.

    Raises:
        UserError: If the config or its storage cannot be used.
    """
    if not to_run:
        return _prepare(source, overrides, to_run, say, with_jobs, allow_replicas)

    with at_work(lambda: "reading the config and looking at its data", say):
        return _prepare(source, overrides, to_run, say, with_jobs, allow_replicas)


def _prepare(
    source: ConfigSource,
    overrides: Sequence[str],
    to_run: bool,
    say: Callable[[str], None],
    with_jobs: bool,
    allow_replicas: bool,
) -> PreparedRun:
    """Prepare a run without a progress message. See `prepare`."""
    # The cache of graphs avoids the imports of BUILD_MODULE (torch, timm). It is not needed if this
    # module is already imported.
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
        # check the config completely, so that no storage folder is created for an invalid config
        config = configs.load(source, list(overrides))
    store = Store(storage)
    store.check_usable(to_write=to_run)
    if to_run:
        store.sweep()
    if not allow_replicas:
        refuse_replicas(config, configs.get_source_name(source), "this needs one model")
    if to_run:
        raw_data.compare_rewritten_sources(config, store, say)

    def build_replica(name: str, config: Config) -> PreparedRun:
        def checked() -> Config:
            # `name` is the name of a replica, or "" for a run without replicas
            whole = configs.load(source, list(overrides))
            return make_replica_configs(whole).get(name, whole)

        return _with_graph(config, store, to_run, with_jobs, may_use_cache, checked)

    replicas = make_replica_configs(config)
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
        may_use_cache: Whether the cache can be used. If true, `config` may not be fully checked.
        checked: Loads the config with all checks, including the ones that need torch.
    """
    inputs = graph_cache.collect_inputs(config, store, to_run) if may_use_cache else None
    if inputs is not None and not with_jobs:
        cached = graph_cache.read_graph(store, inputs, config.name)
        if cached is not None:
            return PreparedRun(config, store, cached.graph, cached.tasks, has_jobs=False)
    if may_use_cache:
        config = checked()
    sources = inputs.sources if inputs is not None else {}
    graph, tasks = _build_stages(config, store, to_run, sources)
    if inputs is not None:
        graph_cache.write_graph(store, inputs, graph, tasks)
    return PreparedRun(config, store, graph, tasks)


def _with_replicas(config: Config, replicas: Mapping[str, PreparedRun]) -> PreparedRun:
    """Return a run of several replicas, with one graph for all."""
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
    graph, tasks = _build_stages(
        run.config, run.store, True, {} if inputs is None else inputs.sources
    )
    if inputs is not None:
        graph_cache.write_graph(run.store, inputs, graph, tasks)
    return PreparedRun(run.config, run.store, graph, tasks)


def _build_stages(
    config: Config, store: Store, ask_sources: bool, sources: Mapping[str, KnownSource]
) -> tuple[Graph, list[Task]]:
    from pipeline.graph import build  # keeps the start-up fast: imports torch and timm

    return build.build_graph(config, store, provenance(), ask_sources=ask_sources, sources=sources)


def format_command(
    command: str, config_path: str, overrides: Sequence[str], options: Sequence[str] = ()
) -> str:
    """Return the command line that runs a command on a config.

    Args:
        command: Name of the command, for example `run`.
        config_path: Path of the config.
        overrides: Values of `--set`.
        options: Further options and arguments.
    """
    words = [command, config_path, *options]
    for override in overrides:
        words += ["--set", override]
    return f"{this_command()} {shlex.join(words)}"


def plan(run: PreparedRun) -> RunPlan:
    """Look up every stage, and return the plan of a run.

    The files of results are checked by size only, not by digest.
    """
    previous = find_previous_record(run.store, run.config)
    lookups = look_up_all(run.graph, run.store, previous, "sizes")
    return RunPlan(
        run,
        lookups,
        stages_to_run(run.graph, lookups),
        version_notes(lookups, previous, provenance()),
    )


def find_previous_record(store: Store, config: Config) -> RunRecord | None:
    """Return the record of an earlier run that is used to explain why results are missing.

    It is the last record of this run, or else of the run of the same config without `--set`.
    """
    return store.record(config.name) or store.record(config.base_name)


# ---- running -------------------------------------------------------------------------------------
def execute(
    run: PreparedRun,
    open_screen: OpenScreen,
    resume_command: str,
    report_command: str,
    selection: StageSelection = EVERYTHING,
) -> RunResult:
    """Run the missing stages, write the report, and log the run to MLflow.

    Events are also logged to the file driver.log of the run.

    Args:
        run: The prepared run.
        open_screen: Creates the screen.
        resume_command: Command that resumes the run, for messages.
        report_command: Command that writes the MLflow record again, for messages.
        selection: Part of the graph to run.

    Raises:
        UserError: If a stage fails, or `selection` names an unknown stage.
    """
    for option, names in selection.options:
        find_stages(run.graph, names, option)  # checks the names before anything is written
    with driver_log(run.store.storage, run.config.name):
        return _execute(run, open_screen, resume_command, report_command, selection)


def _execute(
    run: PreparedRun,
    open_screen: OpenScreen,
    resume_command: str,
    report_command: str,
    selection: StageSelection,
) -> RunResult:
    """Look up all stages, and run and record what is missing. See `execute`."""
    config = run.config
    store = run.store
    graph = run.graph
    previous = find_previous_record(run.store, run.config)
    record = make_record(graph, config, run.tasks, provenance())
    records = make_replica_records(run)
    # before the look-up, because from now on `gc` keeps the results that this run needs
    for saved in (record, *records.values()):
        store.save_record(saved)
    with at_work(lambda: "looking for results in the storage"):
        lookups = force(graph, look_up_all(graph, store, previous), selection)
    todo = select_stages_to_run(graph, lookups, selection)
    left_out = stages_to_run(graph, lookups) - todo  # missing, but not selected
    LOG.info("run %s: %d stages, %d to run", config.name, len(graph), len(todo))
    screen = open_screen(graph, lookups)
    if not todo and not left_out:
        # If the MLflow record is complete too, neither torch nor MLflow has to be imported.
        files = add_analysis(report_files(run), record, store)
        manifests = {stage_id: lookup.manifest for stage_id, lookup in lookups.items()}
        state = complete.compute_state(config.tracking, store.storage, record, manifests, files)
        links = complete.find_links(state) if config.tracking.enabled else []
        if links is not None:  # None: the record must be written again, below
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
        screen.say(
            f"{stage_id}: {_describe_forced_result(lookups[stage_id], result.outcome, stage_id)}"
        )
    return result


def _describe_forced_result(before: Lookup, outcome: Outcome, stage_id: str) -> str:
    """Describe whether the result of a forced stage is the same as before.

    Args:
        before: Look-up of the stage before the run, from `force`.
        outcome: Outcome of the run.
        stage_id: Id of the stage.
    """
    after = outcome.manifests[stage_id]
    if before.manifest is None or after is None:
        return "it had no result before"
    if compute_content_digest(before.manifest) == compute_content_digest(after):
        return "run again, with the same content as before"
    return "run again with a different result; the stages that depend on it were run again"


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
    """Run the stages `todo` and log the run to MLflow at the same time.

    The ingest stages run first: the keys of other stages depend on the ingested data, so the graph
    is built again after them. Only a whole run, which leaves out no missing stage, is logged as
    finished, with its models.
    """
    # imported here to keep the start-up fast
    from pipeline.graph.walk import State
    from pipeline.launch.time_left import TimeLeftEstimator

    run = with_jobs(run)
    config = run.config
    store = run.store
    graph = run.graph
    missing = stages_to_run(graph, lookups) | todo
    groups = config.cluster.groups if config.cluster.workers else 1
    files: dict[str, bytes] = {}
    status = "KILLED"  # of the run in MLflow, if an exception or `selection` ends it early
    with (
        keep_journal(
            store, graph, lookups, missing, resume_command, TimeLeftEstimator(graph, groups)
        ) as journal,
        announce_metrics(
            config.tracking.prometheus,
            lambda: run_metrics(journal.snapshot(), graph),
            screen.say,
        ),
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
            # before the look-up: `gc` keeps the results with the new keys
            for saved in (record, *make_replica_records(run).values()):
                store.save_record(saved)
            lookups = _look_up_again(graph, store, before, lookups, ingested)
            lookups = force(graph, lookups, selection)
            todo = select_stages_to_run(graph, lookups, selection)
            todo -= {name for name, state in ingested.states.items() if state is State.DONE}
            missing = stages_to_run(graph, lookups) | todo
            journal.take_up(lookups, missing)
        is_whole = missing == todo
        recorder = open_recorder(run, screen.say, report_command)
        recorder.start(record, diagram.to_svg(graph, {}), watch=True)
        try:
            outcome = walks.run(run, record, lookups, todo, ingested, recorder)
            if outcome.failures:
                status = "FAILED"
                files = report_failures(run, record, outcome.failures, screen)
            elif is_whole:
                status = "FINISHED"
            raise_if_failed(outcome, resume_command, logs_command(store.storage, graph.name))
            with screen.activity(lambda: "building the report"):
                files = read_or_build_report(run, record)
                files = add_analysis(files, record, store)
            if is_whole:
                log_models(recorder, run)
        finally:
            with screen.activity(recorder.describe_rest):
                recorder.finish(files, status)
            if status != "FINISHED":
                for warning in recorder.warnings:
                    LOG.warning("%s", warning)
        links = recorder.links()
        location = recorder.writer.location
        if config.tracking.enabled and is_whole and not recorder.warnings:
            # The manifests in `outcome` come from events of the executor. They can lack the name of
            # the attempt, which `Attempt.commit` adds and the state needs, so read the stored ones.
            stored = look_up_all(graph, store, None, "nothing")
            manifests = {stage_id: lookup.manifest for stage_id, lookup in stored.items()}
            state = complete.compute_state(config.tracking, store.storage, record, manifests, files)
            path = None if location is None else sqlite_path(location.uri)
            complete.mark_complete(
                state, links, "" if path is None else str(path), recorder.run_ids
            )
        return _finish(run, record, outcome, files, recorder.warnings, links)


def _look_up_again(
    graph: Graph,
    store: Store,
    before: Graph,
    lookups: Mapping[str, Lookup],
    ingested: Outcome,
) -> dict[str, Lookup]:
    """Look up the stages of a graph after ingest. Only stages with a changed key are read.

    Args:
        graph: Graph with the current keys.
        store: Store of the run.
        before: Graph before the ingest.
        lookups: Look-up of each stage before the ingest.
        ingested: Outcome of the ingest stages. Their results are not looked up again.
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


class Walks:
    """Runs the two walks of a run on one executor: the ingest stages, then all other stages.

    A walk (`graph.walk.Walk`) schedules the stages of one graph. Two are needed because the keys of
    the other stages depend on the ingested data. The screen, the log and the journal observe both
    walks; the MLflow recorder and the measurement of GPU use observe the second one.

    Args:
        run: The run before its data is ingested.
        todo: Ids of the stages to run.
        screen: Shows the run to the user.
        journal: Records the status of the run.
    """

    def __init__(self, run: PreparedRun, todo: set[str], screen: Screen, journal: Journal):
        # imported here to keep the start-up fast: they import torch
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
        """Pass an event of a worker to all observers."""
        for watch in self.watching:
            watch(event)

    def ingest(self, lookups: dict[str, Lookup], todo: set[str]) -> Outcome:
        """Run the ingest stages in `todo`, and return how they ended."""
        stages = [stage for stage in self.graph if stage.id in todo and stage.step == "ingest"]
        with self.screen.activity(lambda: "starting"):
            return run_graph(
                Graph.of(self.graph.name, stages),
                self.store,
                lambda todo: self.executor.lend(),  # the second walk uses the executor again
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
        recorder: Recorder,
    ) -> Outcome:
        """Run all other stages, log them to MLflow, and return how all stages ended.

        Args:
            run: The run, with keys for the ingested data.
            record: Record of the run.
            lookups: Look-up of each stage.
            todo: Ids of the stages to run.
            ingested: Outcome of the ingest stages. None if no ingest stage ran.
            recorder: Logs to MLflow.
        """
        # imported here to keep the start-up fast: the executor imports torch
        from pipeline.graph.walk import Event, EventKind
        from pipeline.launch.executor import count_parallel_stages

        chains = count_parallel_stages(run.graph, todo)
        gpu_use = GpuUse(run.graph, run.config.cluster, chains, self.journal.set_gpu_use)
        self.watching += [recorder.progress, gpu_use.progress]

        def write_report(stage: Stage) -> dict[str, Any]:
            if gpu_use.figures():
                self.journal.save()  # the report reads the figures from the status file
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
                [self.screen, recorder, self.run_log, self.journal, gpu_use],
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
    """Write the report to the folder of the run, and return the results of the run."""
    page = export(run.store, run.config.name, files)
    written = WrittenReport(page, warnings, links)
    if not run.replicas:
        return RunResult(RunTables.load(run.store.storage, record), outcome, written, run)
    tables = RunTables.load_all(run.store.storage, make_replica_records(run))
    return RunResult(next(iter(tables.values())), outcome, written, run, tables)


def _no_executor(stages_to_run: set[str]) -> Executor:
    raise AssertionError(f"nothing is to be run, and {stages_to_run} are")


def ingest(run: PreparedRun, open_screen: OpenScreen, resume_command: str) -> list[IngestedData]:
    """Run the missing ingest stages of a run, and describe the data of all its ingest stages.

    Args:
        run: The prepared run.
        open_screen: Creates the screen.
        resume_command: Command that resumes the ingest, for messages.

    Raises:
        UserError: If a stage fails.
    """
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
    """Return the lines of an ingest stage's account, and the location of the preview page.

    Both are empty if the result lacks one of the files, as results of older versions do, or if the
    account cannot be parsed.
    """
    artifact = Artifact.open(store.root, key)
    if artifact is None or not {ACCOUNT, PREVIEW} <= artifact.manifest["files"].keys():
        return [], ""
    try:
        lines = Account.from_json(artifact.read(ACCOUNT)).lines()
    except (ValueError, TypeError, AttributeError):
        return [], ""
    return lines, artifact.uri(PREVIEW)


def format_counts(counts: Mapping[str, int]) -> str:
    """Format counts with their names, for example `20 train, 10 test`."""
    return ", ".join(f"{count} {name}" for name, count in counts.items())


def bring(
    ingest_graph: Graph,
    config: Config,
    store: Store,
    open_screen: OpenScreen,
    resume_command: str,
) -> None:
    """Run the missing stages of a graph of ingest stages, without a report or an MLflow record.

    Args:
        ingest_graph: The graph.
        config: The config.
        store: The store.
        open_screen: Creates the screen.
        resume_command: Command that resumes the ingest, for messages.

    Raises:
        UserError: If a stage fails.
    """
    from pipeline.launch import executor as launch  # imports torch

    previous = find_previous_record(store, config)
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
    """Return all runs of a storage, the most recently started first."""
    return stored_runs.list_runs(absolute(storage))
