"""Build the reports of runs from the store, write them to the storage, and log them to MLflow."""

from __future__ import annotations

import hashlib
import json
import logging
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from pipeline.app.prepared import PreparedRun, make_replica_records, provenance
from pipeline.app.screen import Screen
from pipeline.graph import diagram
from pipeline.graph.gpu_use import gpu_sentences, read_gpu_use
from pipeline.graph.live_status import read_status
from pipeline.graph.run_log import ON_SCREEN
from pipeline.graph.run_record import RunRecord, make_record
from pipeline.graph.stage import Stage
from pipeline.graph.store import Store
from pipeline.results.tables import RunTables
from pipeline.shell.console import at_work, print_to_stderr
from workers.storage.artifact import (
    Artifact,
    Attempt,
    cache_artifacts,
    exists,
    join,
    read_bytes,
    read_json,
    resolve,
    write_bytes,
)

if TYPE_CHECKING:
    from pipeline.tracking.recorder import Recorder

LOG = logging.getLogger("accrete.app")
REPORT_FILES = "report-files.json"  # file with the names and digests of the files of the report


# Paths that `export` may delete: relative and without `..`, because anyone can edit REPORT_FILES.
REPORT_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*(/[A-Za-z0-9][A-Za-z0-9_.-]*)*")


# This file exists if the run was analysed, alone or as the first of several runs. The name is
# repeated from `analysis_section.LIST_FILE`, because that module imports torch.
ANALYSIS_FILE = "analysis.json"


@dataclass(frozen=True)
class WrittenReport:
    """A written report, and messages about its MLflow record.

    Attributes:
        page: Path or URI of the HTML page.
        warnings: Messages about missing parts of the MLflow record.
        links: Lines with the location of the MLflow record.
    """

    page: str
    warnings: list[str]
    links: list[str]

    @property
    def lines(self) -> list[str]:
        """Lines for the user: warnings, and the locations of the page and the MLflow record."""
        return [*self.warnings, f"report: {self.page}", *self.links]


def report(run: PreparedRun, report_command: str) -> WrittenReport:
    """Write the report and the MLflow record again from the store, also for an unfinished run.

    Args:
        run: The prepared run.
        report_command: Command that writes the record again, for messages.
    """
    from pipeline.report import analysis_section  # imports torch and matplotlib

    store = run.store
    store.check_writable()
    record = store.record(run.config.name)
    if record is None:
        record = make_record(run.graph, run.config, run.tasks, provenance())
    picture = diagram.to_svg(run.graph, {})
    with at_work(lambda: "building the report"):
        files = build_report(run, record, _find_earlier_failures(run))
        if not run.replicas:
            files = analysis_section.add_section(files, record, store)
    recorder = open_recorder(run, print_to_stderr, report_command)
    with at_work(recorder.describe_rest):
        recorder.start(record, picture)
        evaluations = [stage for stage in run.graph if stage.step == "evaluate"]
        if all(Artifact.open(store.root, stage.key) for stage in evaluations):
            log_models(recorder, run)
        recorder.finish(files)
    page_path = export(store, run.config.name, files)
    return WrittenReport(page_path, recorder.warnings, recorder.links())


def _find_earlier_failures(run: PreparedRun) -> dict[str, str]:
    """Return the error messages of stages that failed in the last start of the run, by id.

    Stages that have a result by now are left out.
    """
    status = read_status(run.store.storage, run.config.name)
    failures = {}
    for stage_id, stage in (status["stages"] if status else {}).items():
        key = run.graph[stage_id].key if stage_id in run.graph.stages else ""
        if stage["state"] == "failed" and key and not Artifact.open(run.store.root, key):
            failures[stage_id] = stage.get("message", "")
    return failures


def make_report(run: PreparedRun, record: RunRecord, stage: Stage) -> dict[str, Any]:
    """Run the report stage: build and commit the files of the report, and return its manifest.

    If several drivers run the same stage, one driver builds the report. The others wait for it and
    return its manifest.
    """
    return run.store.compute_once(stage.key, lambda: _make_report(run, record, stage))


def _make_report(run: PreparedRun, record: RunRecord, stage: Stage) -> dict[str, Any]:
    """Build and commit the report, and return its manifest.

    `made_of` in the manifest maps the key of each input result to the digest of its content.
    """
    started = time.monotonic()
    store = run.store
    attempt = Attempt(store.root, stage.key)
    parent_keys = [run.graph[parent].key for parent in stage.parents]
    with cache_artifacts(store.root, parent_keys) as made_of:
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


def read_or_build_report(run: PreparedRun, record: RunRecord) -> dict[str, bytes]:
    """Return the files of the report stage, or build them if the stage has no result."""
    if Artifact.open(run.store.root, run.graph["report"].key):
        return report_files(run)
    return build_report(run, record)


def report_files(run: PreparedRun) -> dict[str, bytes]:
    """Return the files of the report stage, by name.

    Raises:
        UserError: If the stage has no result.
    """
    artifact = Artifact.need(run.store.root, run.graph["report"].key)
    return {name: artifact.read(name) for name in artifact.manifest["files"]}


def build_report(
    run: PreparedRun, record: RunRecord, failures: Mapping[str, str] | None = None
) -> dict[str, bytes]:
    """Build the report of a run. A run with replicas has one report for all replicas.

    Args:
        run: The run.
        record: Its record.
        failures: Error messages of failed stages, by id.

    Returns:
        The content of each file, by name.
    """
    from pipeline.report import page, replicas_page  # keeps the start-up fast: matplotlib

    gpu_use = gpu_sentences(read_gpu_use(run.store.storage, record["name"]))
    if not run.replicas:
        return page.build_run_report(run.store.storage, record, failures, gpu_use)
    tables = RunTables.load_all(run.store.storage, make_replica_records(run))
    return replicas_page.build_replicas_report(record, tables, failures, gpu_use)


def report_failures(
    run: PreparedRun, record: RunRecord, failures: Mapping[str, str], screen: Screen
) -> dict[str, bytes]:
    """Write the report of a run with failed stages, and return its files.

    An error in the report must not hide the errors of the stages. Therefore it is only shown on the
    screen, and the result is empty.
    """
    try:
        with screen.activity(lambda: "building the report"):
            files = add_analysis(build_report(run, record, failures), record, run.store)
        page = export(run.store, run.config.name, files)
    except Exception as error:
        LOG.warning("no report", exc_info=True, extra={ON_SCREEN: True})
        screen.say(f"no report of the finished stages: {type(error).__name__}: {error}")
        return {}
    screen.say(f"report of the finished stages: {page}")
    return files


def add_analysis(files: dict[str, bytes], record: RunRecord, store: Store) -> dict[str, bytes]:
    """Add the section on attention to the page of a report if the run was analysed."""
    if not exists(join(store.storage, "runs", record["name"], ANALYSIS_FILE)):
        return files
    from pipeline.report import analysis_section  # keeps the start-up fast: torch and matplotlib

    return analysis_section.add_section(files, record, store)


def open_recorder(run: PreparedRun, say: Callable[[str], None], report_command: str) -> Recorder:
    """Create the object that logs a run and all its replicas to MLflow.

    Args:
        run: The run.
        say: Called with a line if MLflow stops answering, and when it answers again.
        report_command: Command that writes the record again, for messages.
    """
    from pipeline.tracking.recorder import Recorder  # keeps the start-up fast
    from pipeline.tracking.replicas import ReplicatedRecorder

    storage = run.store.storage
    if not run.replicas:
        return Recorder(run.config.tracking, storage, say, report_command)
    records = make_replica_records(run)
    return ReplicatedRecorder(run.config.tracking, storage, records, say, report_command)


def log_models(recorder: Recorder, run: PreparedRun) -> None:
    """Log the trained model of each method of a finished run to MLflow, for each replica."""
    for replica in run.replicas.values() or (run,):
        bundle = partial(write_bundle, replica)
        recorder.models(replica.graph, bundle)


def write_bundle(run: PreparedRun, label: str, folder: str) -> None:
    """Write a model folder that serves all tasks of one method of a finished run.

    Args:
        run: The finished run.
        label: Label of the method.
        folder: The folder to write.
    """
    from pipeline.results.bundles import build_run_bundle  # imports torch

    build_run_bundle(run.graph, run.store, label).write(folder)


def export(store: Store, name: str, files: Mapping[str, bytes]) -> str:
    """Write the files of a report to `<storage>/runs/NAME/`, and return the path of the page.

    Files of an earlier report that the new report does not have are deleted, because they are
    outdated. A file stays if someone has changed it since. Files of an analysis stay, too.
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
    """Delete a file if its sha256 equals `digest`."""
    try:
        is_unchanged = hashlib.sha256(read_bytes(uri)).hexdigest() == digest
    except FileNotFoundError:
        return
    if is_unchanged:
        system, path = resolve(uri)
        system.delete_file(path)
