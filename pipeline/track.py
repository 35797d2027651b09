"""The record of a run in MLflow, and the only module that imports mlflow: one run per graph, method and task, nested.

The driver is the only writer, and a run is found again by its tags, so that a command that is given twice, or goes on
after an interruption, writes into the same runs and adds nothing twice. Whatever goes wrong here never stops a run: it
becomes one sentence in `Recorder.warnings`, and what was not written is tried once more at the end.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.browse import compare_link, run_link, this_python
from pipeline.store import flatten
from workers.artefact import Artefact, join
from workers.errors import UserError

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

    from pipeline.config import TrackingSettings
    from pipeline.graph import Graph, Stage
    from pipeline.report.entries import Point
    from pipeline.report.masks import MaskView
    from pipeline.report.tables import RunTables
    from pipeline.run import Decision, Event, Walk

ENVIRONMENT = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
               "MLFLOW_HTTP_REQUEST_TIMEOUT": "20"}
BATCH = 900  # MLflow takes at most 1000 metrics in a call, and 100 parameters
STATE_BYTES = 32 << 20  # a larger task state stays in the store, its address in a tag
CACHE_BYTES = 256 << 20  # masks kept in memory for the overlap with later tasks


# ---- the store of records ----------------------------------------------------------------------------------------------
def tracking_uri(storage: str, uri: str = "") -> str:
    """Where records go: `uri`, else MLFLOW_TRACKING_URI, else SQLite in the storage folder."""
    found = uri or os.environ.get("MLFLOW_TRACKING_URI", "")
    if found:
        return found
    if "://" in storage and not storage.startswith("file://"):
        raise UserError(f"storage {storage!r} cannot hold MLflow's SQLite database; name a tracking server in tracking.uri or "
                        "MLFLOW_TRACKING_URI, or set tracking=off")
    folder = Path(storage.removeprefix("file://")).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    return f"sqlite:///{folder / 'mlflow.db'}"


def open_store(storage: str, uri: str = "", experiment: str = "accrete") -> tuple[MlflowClient, str, str]:
    """A client, the tracking URI and the id of the experiment; the database and the experiment are created if need be.

    Only one process may do that for a new database, so the driver calls this before anything else opens it.
    """
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    for name in ("alembic", "mlflow.store.db.utils"):
        logging.getLogger(name).setLevel(logging.WARNING)
    from mlflow import MlflowClient

    address = tracking_uri(storage, uri)
    client = MlflowClient(address)
    found = client.get_experiment_by_name(experiment)
    if found is not None:
        if found.lifecycle_stage == "deleted":
            client.restore_experiment(found.experiment_id)
        return client, address, found.experiment_id
    artefacts = None  # a tracking server has its own place
    if not address.startswith(("http://", "https://")):
        local = "://" not in storage or storage.startswith("file://")
        artefacts = Path(storage.removeprefix("file://")).absolute().joinpath("mlartifacts").as_uri() if local else join(storage, "mlartifacts")
    return client, address, client.create_experiment(experiment, artifact_location=artefacts)


def identity(record: Mapping[str, Any]) -> str:
    """What makes two runs the same run: the name and the keys of all stages."""
    keys = "\n".join(sorted(s["key"] for s in record["stages"]))
    return f"{record['name']}-{hashlib.sha256(keys.encode()).hexdigest()[:16]}"


# ---- writing -----------------------------------------------------------------------------------------------------------
class Recorder:
    """Writes the record of one run. `start` first, `stage` for each stage that finishes, `finish` at the end.

    Stages that stood before are recorded by `start`, so a run that has nothing to do still has its whole record.
    """

    def __init__(self, settings: TrackingSettings, storage: str):
        self.settings, self.storage = settings, storage
        self.warnings: list[str] = []
        self.record: Mapping[str, Any] = {}
        self.graph_svg = ""
        self.pending: list[str] = []
        self.broken = False
        self.known: dict[str, Artefact] = {}
        self.runs: dict[tuple[str, str], Run] = {}  # (label, task); ("", "") is the graph, (label, "") a method
        self.logged: set[tuple[str, str, int]] = set()
        self.views: OrderedDict[tuple[str, str], MaskView | None] = OrderedDict()
        self.experiment = self.uri = ""
        self.client: MlflowClient

    def start(self, record: Mapping[str, Any], graph_svg: str = "") -> None:
        """Opens the runs of this graph, or finds them, and records what stands already."""
        if not self.settings.enabled:
            return
        self.record, self.graph_svg = record, graph_svg
        self.pending = [s["id"] for s in record["stages"] if s["step"] != "report"]
        self._attempt(self._flush)

    def stage(self, stage: Stage, manifest: Mapping[str, Any] | None = None) -> None:
        """Records a stage that has just finished. `manifest` is read from the store where it is not complete."""
        if not self.settings.enabled or not self.record or stage.step == "report":
            return
        if manifest and "attempt" in manifest:
            self.known[stage.id] = Artefact(join(self.storage, "stages"), stage.key, dict(manifest))
        self.pending.append(stage.id)
        if not self.broken:
            self._attempt(self._flush)

    def finish(self, files: Mapping[str, bytes], status: str = "FINISHED") -> None:
        """Adds the report and closes the runs; `status` is FINISHED, FAILED or KILLED. Tries again what failed before."""
        if not self.settings.enabled or not self.record:
            return
        if self.broken:
            todo, self.pending, self.broken = self.pending, [], False
            self._attempt(self._reach)
            if self.broken:
                return
            for stage_id in todo:  # one by one: a stage that fails twice does not hold up the others
                self.pending = [stage_id]
                self._attempt(self._flush)
            self.pending = []
        self._attempt(lambda: self._finish(files, status))

    def analysed(self, files: Mapping[str, bytes], points: Mapping[str, Iterable[Point]]) -> None:
        """Adds what `analyse` found: files to the run of the graph, below `analysis/`, and points by label to the runs of its methods."""
        def add() -> None:
            self._files(self.runs["", ""], {f"analysis/{name}": data for name, data in files.items()})
            for label, some in points.items():
                self._points(self._run(label, ""), some)

        if self.settings.enabled and ("", "") in self.runs:
            self._attempt(add)

    def links(self, base: str = "") -> list[str]:
        """Where to look at the record of this run; `base` is the address of a running `mlflow server`."""
        parent = self.runs.get(("", ""))
        if parent is None:
            return []
        base = base or (self.uri.rstrip("/") if self.uri.startswith("http") else "")
        if not base:
            return [f"record: {this_python()} -m pipeline ui --storage {self.storage}"]
        methods = [self.runs[label, ""].info.run_id for label in self._tables().labels]
        return [f"record: {run_link(base, self.experiment, parent.info.run_id)}",
                *([f"methods side by side: {compare_link(base, self.experiment, methods)}"] if len(methods) > 1 else [])]

    def _attempt(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # a record is never worth a run
            self.broken = True
            sentence = f"MLflow: {type(error).__name__}: {' '.join(str(error).split())[:300]}; the run goes on, and its record is tried again at the end"
            if sentence not in self.warnings:
                self.warnings.append(sentence)

    def _flush(self) -> None:
        if ("", "") not in self.runs:
            self._open_runs()
        while self.pending:
            self._record(self.pending[0])
            self.pending.pop(0)

    def _reach(self) -> None:
        if ("", "") not in self.runs:
            self._open_runs()
        self.client.get_run(self.runs["", ""].info.run_id)

    # ---- runs --------------------------------------------------------------------------------------------------------
    def _open_runs(self) -> None:
        self.client, self.uri, self.experiment = open_store(self.storage, self.settings.uri, self.settings.experiment)
        token = None
        found: dict[tuple[str, str], Run] = {}
        while True:
            page = self.client.search_runs([self.experiment], f"tags.`accrete.run` = '{identity(self.record)}'", max_results=1000, page_token=token)
            found |= {(r.data.tags.get("label", ""), r.data.tags.get("task", "")): r for r in page}
            token = page.token
            if not token:
                break
        parent = found.get(("", "")) or self._create("", "", None)
        if parent.info.status not in ("RUNNING", "FINISHED"):  # it had failed or was stopped, and goes on now
            self.client.update_run(parent.info.run_id, "RUNNING")
            parent.info._status = "RUNNING"
        self.runs = found | {("", ""): parent}
        for label in self._tables().labels:
            self._run(label, "")

    def _run(self, label: str, task: str) -> Run:
        """The run of a method, or of a task below it; created when it is first needed."""
        if (label, task) not in self.runs:
            above = self.runs[("", "")] if not task or not label else self._run(label, "")
            self.runs[label, task] = self._create(label, task, above)
        return self.runs[label, task]

    def _create(self, label: str, task: str, above: Run | None) -> Run:
        from pipeline.report.tables import RunTables

        record, config = self.record, self.record["config"]
        tables = RunTables(self.storage, record, {})
        tags = {"accrete.run": identity(record), "accrete.kind": "task" if task else "method" if label else "run", "label": label, "task": task,
                "method": tables.method(label) if label else "", "stream": ", ".join(t["name"] for t in record["tasks"])[:4000], "scenario": tables.scenario,
                "backbone": str(config.get("backbone", {}).get("name", "")), "seed": str(config.get("seed", "")),
                "mlflow.note.content": note_of(record, label, task), "mlflow.source.name": "python -m pipeline run",
                "git_commit": str((record.get("provenance") or {}).get("git_commit", ""))}
        tags["mlflow.source.git.commit"] = tags["git_commit"]
        if above is not None:
            tags["mlflow.parentRunId"] = above.info.run_id
        name = task or label or record["name"]
        run = self.client.create_run(self.experiment, tags={k: v for k, v in tags.items() if v}, run_name=name)
        inputs: Mapping[str, Any] = next((s["inputs"] for s in record["stages"] if s["label"] == label and s["step"] not in ("evaluate", "report")), {})
        params = flatten(config) if not label and not task else flatten({k: v for k, v in inputs.items() if k != "seen"}) if not task else {}
        self._params(run, params)
        if above is None:
            self._files(run, {"graph.svg": self.graph_svg.encode()} if self.graph_svg else {})
        return run

    # ---- one stage ---------------------------------------------------------------------------------------------------
    def _record(self, stage_id: str) -> None:
        stage = next(s for s in self.record["stages"] if s["id"] == stage_id)
        artefact = self.known.get(stage_id) or Artefact.open(join(self.storage, "stages"), stage["key"])
        if artefact is None:
            return  # not finished yet
        self.known[stage_id] = artefact
        label, task = stage["label"] or "", stage["task"] or ""
        if stage["step"] == "evaluate":
            self._evaluated(stage, label, task)
        elif stage["step"] == "ingest":
            self._ingested(stage, artefact)
        else:
            self._trained(stage, artefact, label, task if label else "backbone")

    def _stands(self, run: Run, stage: Mapping[str, Any]) -> bool:
        return run.data.tags.get(tag_of(stage)) == stage["key"]

    def _mark(self, run: Run, stage: Mapping[str, Any], points: Iterable[Point], tags: Mapping[str, str] | None = None) -> None:
        """Points and the tag that says they are there, in one call; the tag comes last."""
        self._points(run, points, {**(tags or {}), tag_of(stage): stage["key"]})
        run.data.tags[tag_of(stage)] = stage["key"]

    def _ingested(self, stage: Mapping[str, Any], artefact: Artefact) -> None:
        from mlflow.data.http_dataset_source import HTTPDatasetSource
        from mlflow.data.meta_dataset import MetaDataset
        from mlflow.entities import DatasetInput, InputTag

        run = self.runs[("", "")]
        if self._stands(run, stage):
            return
        data = MetaDataset(  # type: ignore[abstract]
            HTTPDatasetSource(join(self.storage, "stages", stage["key"])), name=stage["id"].removeprefix("data/"),
                           digest=str(artefact.manifest.get("content", stage["key"]))[:32])
        self.client.log_inputs(run.info.run_id, [DatasetInput(data._to_mlflow_entity(), [InputTag("mlflow.data.context", "stream")])])
        self._mark(run, stage, [])

    def _trained(self, stage: Mapping[str, Any], artefact: Artefact, label: str, task: str) -> None:
        from pipeline.report import entries

        run = self._run(label, task)
        if self._stands(run, stage):
            return
        tables, manifest = self._tables(), artefact.manifest
        points = entries.history_points(tables.history(stage["id"]), stage["step"])
        points += [entries.Point(f"size/{kind}", float(size), 0, 0) for kind, size in (manifest.get("sizes") or {}).items()]
        points += [entries.Point(name, float(manifest[name]), 0, 0) for name in ("trained_parameters", "flops_share", "wall_s")
                   if manifest.get(name) is not None]
        files: dict[str, bytes] = {}
        if label:
            views = self._views(tables, label, task)
            files = entries.task_files(tables, label, task, [v for v in views if v is not None])
            points += entries.keep_points(views[-1] if views else None)
        if label and manifest["files"].get("task.safetensors", {"bytes": STATE_BYTES + 1})["bytes"] <= STATE_BYTES:
            files["task.safetensors"] = artefact.read("task.safetensors")
        if manifest.get("warnings"):
            files["warnings.txt"] = "\n".join(manifest["warnings"]).encode()
        self._files(run, files)
        self._mark(run, stage, points, {"store": artefact.uri("")})
        if not label:
            self._close(run)

    def _views(self, tables: RunTables, label: str, task: str) -> list[MaskView | None]:
        """Masks of the tasks up to `task` that are finished, from memory or from the store."""
        from pipeline.report.figures import view_of

        tasks = tables.tasks(label)
        found = []
        for name in tasks[: tasks.index(task) + 1]:
            if tables.state_stage(label, name) is None:
                continue
            if (label, name) not in self.views or name == task:
                self.views[label, name] = view_of(tables, label, name)
            found.append(self.views[label, name])
        while sum(b.nbytes for v in self.views.values() if v for b in v.bits.values()) > CACHE_BYTES:
            self.views.popitem(last=False)
        return found

    def _evaluated(self, stage: Mapping[str, Any], label: str, task: str) -> None:
        from pipeline.report import entries

        tables, run = self._tables(), self._run(label, task)
        matrix = tables.matrix(label)
        points = entries.matrix_points(matrix) + entries.size_points(tables.sizes(label)) + entries.pick_points(tables.picks(label))
        new = [p for p in points if (label, p.name, p.step) not in self.logged]
        self.logged |= {(label, p.name, p.step) for p in new}
        if self._stands(run, stage):
            return
        method = self._run(label, "")
        self._files(method, entries.method_files(tables, label))
        self._points(method, new)
        shown = [p._replace(name=entries.key_name(f"{p.name}/{label}")) for p in new if p.name in ("average_accuracy", "forgetting")]
        self._points(self.runs[("", "")], shown)
        self._files(run, entries.confusion_files(tables, label, task))
        index = matrix.tasks.index(task)
        own = [entries.Point("accuracy", float(matrix.rates[index, index]), 0, 0)] if matrix.source[index, index] == "measured" else []
        self._mark(run, stage, own)
        self._close(run)

    # ---- the end -----------------------------------------------------------------------------------------------------
    def _finish(self, report: Mapping[str, bytes], status: str) -> None:
        from pipeline.report import entries, files

        parent, tables = self.runs[("", "")], self._tables()
        if status == "FINISHED" and any(s["step"] == "evaluate" and s["id"] not in self.known for s in self.record["stages"]):
            status = "KILLED"  # the report of a run that was stopped half-way
        digest = hashlib.sha256(b"".join(hashlib.sha256(report[name]).digest() for name in sorted(report))).hexdigest()[:32]
        if parent.info.status == status and parent.data.tags.get("accrete.report") == digest:
            return
        environment = [{"name": name, "value": ", ".join(values)} for name, values in tables.environment().items()]
        extra = {"environment.json": json.dumps(tables.environment(), indent=1).encode(), "environment.csv": files.as_csv(environment)} if environment else {}
        self._files(parent, {**entries.of_run(report), **extra})
        for label in tables.labels:
            self._files(self._run(label, ""), entries.of_label(report, label))
        self.client.set_tag(parent.info.run_id, "accrete.report", digest)
        for (label, task), run in self.runs.items():
            if not task or run.info.status == "RUNNING":
                self._close(self.runs[label, task], status)

    def _close(self, run: Run, status: str = "FINISHED") -> None:
        self.client.set_terminated(run.info.run_id, status)
        run.info._status = status

    def _tables(self) -> RunTables:
        from pipeline.report.tables import RunTables

        return RunTables(self.storage, self.record, dict(self.known))

    # ---- calls to MLflow, in batches ---------------------------------------------------------------------------------
    def _points(self, run: Run, points: Iterable[Point], tags: Mapping[str, str] | None = None) -> None:
        """Points get the same time stamp whenever they are written, so that MLflow drops one that is there already."""
        from mlflow.entities import Metric, RunTag

        begun = run.info.start_time
        metrics = [Metric(p.name, p.value, begun + int(1000 * p.after_s), p.step) for p in points]
        for start in range(0, max(len(metrics), 1), BATCH):
            last = start + BATCH >= len(metrics)
            self.client.log_batch(run.info.run_id, metrics[start : start + BATCH],
                                  tags=[RunTag(k, v) for k, v in (tags or {}).items()] if last else [])

    def _params(self, run: Run, values: Mapping[str, Any]) -> None:
        from mlflow.entities import Param

        from pipeline.report.entries import key_name

        params = [Param(key_name(k)[:250], str(v)[:500]) for k, v in values.items()]
        for start in range(0, len(params), 100):
            self.client.log_batch(run.info.run_id, params=params[start : start + 100])

    def _files(self, run: Run, files: Mapping[str, bytes]) -> None:
        if not files:
            return
        with tempfile.TemporaryDirectory(prefix="accrete-") as folder:
            for name, data in files.items():
                path = Path(folder, name)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)
            self.client.log_artifacts(run.info.run_id, folder)


class Background:
    """Watches a walk and has finished stages recorded by one thread of its own, so that no stage waits for MLflow."""

    def __init__(self, recorder: Recorder, graph: Graph, record: Mapping[str, Any], graph_svg: str):
        self.recorder, self.graph = recorder, graph
        self.thread = ThreadPoolExecutor(1, "record")
        self.thread.submit(recorder.start, record, graph_svg)

    def event(self, walk: Walk, event: Event) -> None:
        if event.kind == "done":
            self.thread.submit(self.recorder.stage, self.graph[event.stage], event.body)

    def decision(self, walk: Walk, decision: Decision) -> None:
        """Nothing to record: MLflow hears of results only."""

    def finish(self, files: Mapping[str, bytes], status: str) -> Recorder:
        """Waits until everything is written."""
        self.thread.submit(self.recorder.finish, files, status)
        self.thread.shutdown(wait=True)
        return self.recorder


def tag_of(stage: Mapping[str, Any]) -> str:
    """The tag whose value is the key of a recorded stage."""
    return f"stage.{stage['step']}" if stage["label"] else f"stage.{stage['id']}"


def note_of(record: Mapping[str, Any], label: str, task: str) -> str:
    """What MLflow shows as the description of a run (Markdown)."""
    if task:
        owner = f"method **{label}**" if label else "all methods"
        return (f"Task **{task}** of run **{record['name']}**, as learned by {owner}. Model metrics: curves over epochs. Artifacts: what the task left behind "
                "(masks, tokens, confusion matrix, task state).")
    if label:
        return (f"Method **{label}** of run **{record['name']}**. `accuracy_matrix.png` among the artifacts: row = after learning a task, column = accuracy on "
                "a task. Model metrics have step = number of tasks learned before. One child run per task.")
    return (f"Run **{record['name']}**. Open `report.html` among the artifacts for the whole story, `graph.svg` for the stages. One child run per method, "
            "and below each one run per task. To compare methods, select their runs and press Compare.")
