"""Write one graph to MLflow: a run for the graph, child runs for methods, then for their tasks.

In this module, a run is a run in MLflow, and a graph is one run of the pipeline, described by its
`RunRecord`. A run is found again by its tags. Therefore a repeated or resumed command writes to the
same runs and adds nothing twice. Every method of `RunWriter` can be called again after an error.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from pipeline.config.settings import flatten
from pipeline.config.yaml_files import dump_yaml
from pipeline.graph.gpu_use import gpu_sentences, read_gpu_use
from pipeline.graph.run_record import RunRecord
from pipeline.results.chance import describe_chance
from pipeline.tracking.mlflow_client import InputData, MlflowClientAdapter, Point, key_name
from pipeline.tracking.ui import make_artifact_links
from workers.storage.artifact import Artifact, join
from workers.storage.secrets import redact

if TYPE_CHECKING:
    from mlflow.entities import Run

    from pipeline.config.settings import TrackingSettings
    from pipeline.results.masks import MaskView
    from pipeline.results.tables import RunTables

# Maximum size of an uploaded task state. A larger state is only in the store: see the tag `store`.
MAX_STATE_BYTES = 32 << 20
MASK_CACHE_BYTES = 256 << 20  # maximum size of the masks kept in memory to compare later tasks
MAX_TAG = 4000  # characters of the value of a tag
PARENT = "mlflow.parentRunId"
NOTE = "mlflow.note.content"  # the tag with the description of a run
CONFIG_FILE = "config.yaml"
# Settings logged as parameters of a graph's run if they are set. Other settings are in
# CONFIG_FILE and in the runs of the methods, because MLflow shows a column for each parameter.
MAIN_PARAMS = (
    "seed",
    "seeds",
    "stream.scenario",
    "backbone.name",
    "backbone.weights",
    "backbone.img_size",
    "backbone.context",
    "data.crop",
    "data.val_fraction",
    "train.epochs",
    "train.batch_size",
    "train.lr",
    "train.optimizer",
    "train.schedule",
    "train.precision",
    "cluster.workers",
    "cluster.gpus_per_worker",
)
PICTURES_S = 60.0  # minimum seconds between two uploads of a method's pictures during a run
OPENED = "accrete.opened"  # tag of a run whose parameters and graph were logged completely
BACKBONE_TASK = "backbone"  # name of the run for the training of the shared backbone


class RecordLocation(NamedTuple):
    """Location of the record of a graph in MLflow.

    Attributes:
        uri: The tracking URI.
        experiment: Id of the experiment.
        run: Id of the graph's run.
        methods: Ids of the runs of the methods.
    """

    uri: str
    experiment: str
    run: str
    methods: list[str]


@dataclass(frozen=True)
class RunIdentity:
    """Tags and parameters to find or create the runs of a graph.

    Attributes:
        kind: Kind of the graph's run, the tag `accrete.kind`: `run` or `trial`. Below a `run`,
            methods and tasks have the kinds `method` and `task`; below a `trial`, `trial-method`
            and `trial-task`, so that a query for methods returns no trials of a search.
        key: Value of the tag `accrete.run`, by which the runs of the graph are found again. "": the
            result of `run_key`.
        parent: Id of the parent run; "": none.
        tags: Further tags of all runs.
        params: Parameters of the graph's run. None: the result of `main_params`.
        note: Description of the graph's run (Markdown). "": the result of `format_run_note`.
        data: Images of the evaluations, `test` or `validation`.
        pictures: Whether pictures, tables, the config, task states and report files are uploaded,
            and points of masks are logged.
    """

    kind: str = "run"
    key: str = ""
    parent: str = ""
    tags: Mapping[str, str] = field(default_factory=dict)
    params: Mapping[str, Any] | None = None
    note: str = ""
    data: str = "test"
    pictures: bool = True


def run_key(record: RunRecord) -> str:
    """Return the identity of a run of the pipeline: its name and a digest of all stage keys.

    If the config or the data change so that a stage gets another key, the graph gets new runs in
    MLflow.
    """
    keys = "\n".join(sorted(stage["key"] for stage in record["stages"]))
    return f"{record['name']}-{hashlib.sha256(keys.encode()).hexdigest()[:16]}"


class RunWriter:
    """Writes the runs of one graph in MLflow.

    Call `begin`, then `stage` for each finished stage, then `finish`. Call `forget` after a method
    raised an error, because the cached data may differ from the data of the server.

    Args:
        settings: Settings of tracking.
        storage: Folder or URI of the storage.
        identity: Tags and parameters of the runs.
    """

    def __init__(self, settings: TrackingSettings, storage: str, identity: RunIdentity):
        self.settings = settings
        self.storage = storage
        self.identity = identity
        self.record = cast(RunRecord, {})  # empty before `begin`
        self.stages: dict[str, Mapping[str, Any]] = {}
        self.graph_svg = ""
        self.location: RecordLocation | None = None
        self.artifacts: dict[str, Artifact] = {}  # id of a stage -> its result
        self.mask_views: OrderedDict[tuple[str, str], MaskView | None] = OrderedDict()
        # labels of methods with an evaluation recorded since the last `finish`
        self.newly_evaluated: set[str] = set()
        # label -> monotonic time of the last pictures; before them, of the first evaluation
        self.pictured: dict[str, float] = {}
        self.forget()

    def begin(self, record: RunRecord, graph_svg: str = "") -> None:
        """Set the graph to write. This does not call MLflow.

        Args:
            record: The run record.
            graph_svg: Picture of the graph as SVG; "": none.
        """
        self.record = record
        self.graph_svg = graph_svg
        self.stages = {stage["id"]: stage for stage in record["stages"]}

    def forget(self) -> None:
        """Forget all cached data from MLflow. The next call of `ready` finds the runs again."""
        self.client: MlflowClientAdapter | None = None
        # (label, task) -> run; ("", "") is the run of the graph, (label, "") the run of a method
        self.runs: dict[tuple[str, str], Run] = {}
        self.logged_inputs: set[tuple[str, str, str]] = set()  # (run id, data set, context)
        self.logged_points: set[tuple[str, str, int]] = set()  # (label, metric, step)
        self.recorded: set[str] = set()  # ids of recorded stages

    @property
    def parent(self) -> Run:
        """The run of the graph. KeyError before the first `ready`, and after `forget`."""
        return self.runs["", ""]

    @property
    def methods(self) -> dict[str, str]:
        """Label -> id of the method's run."""
        ids = {}
        for (label, task), run in self.runs.items():
            if label and not task:
                ids[label] = run.info.run_id
        return ids

    # ---- runs ------------------------------------------------------------------------------------
    def ready(self) -> MlflowClientAdapter:
        """Find or create the runs of this graph and its methods; return the client."""
        if self.client and self.runs:
            return self.client
        client = self.client = self.client or MlflowClientAdapter(self.storage, self.settings)
        runs = {}
        for run in client.find({"accrete.run": self._run_key()}):
            tags = run.data.tags
            runs[tags.get("label", ""), tags.get("task", "")] = run
        parent = runs.get(("", "")) or self._create("", "", self.identity.parent)
        if parent.info.status not in ("RUNNING", "FINISHED"):  # failed or stopped before
            client.reopen(parent)
        if self.identity.parent:  # the run may have been recorded before without a parent
            client.tag(parent, {PARENT: self.identity.parent})
        runs["", ""] = parent
        self.runs = runs
        for run in list(runs.values()):
            if OPENED not in run.data.tags:
                self._fill(run)
        labels = self._tables().labels
        for label in labels:
            self._run(label, "")
        self.location = RecordLocation(
            client.uri,
            client.experiment,
            parent.info.run_id,
            [self.methods[label] for label in labels],
        )
        return client

    def _run_key(self) -> str:
        return self.identity.key or run_key(self.record)

    def _run(self, label: str, task: str) -> Run:
        """Return the run of a method, or of a method's task. Create a missing run."""
        if (label, task) not in self.runs:
            parent = self._run(label, "") if label and task else self.parent
            run = self._create(label, task, parent.info.run_id)
            self.runs[label, task] = run
            self._fill(run)
        return self.runs[label, task]

    def _create(self, label: str, task: str, parent_id: str) -> Run:
        assert self.client
        record = self.record
        method = self._tables().method(label) if label else ""
        tags = make_tags(record)
        tags["protocol"] = self.identity.data
        tags["mlflow.source.name"] = "python -m pipeline run"
        tags |= self.identity.tags
        if label:
            tags["methods"] = method
        tags |= {
            "accrete.run": self._run_key(),
            "accrete.kind": self._kind(label, task),
            "label": label,
            "task": task,
            "method": method,
            PARENT: parent_id,
            NOTE: self._note(label, task),
        }
        if not task:
            tags |= make_key_tags(record, label)
        name = f"{label} ({record['name']})" if label else record["name"]
        return self.client.create(task or name, tags)

    def _kind(self, label: str, task: str) -> str:
        if not label and not task:
            return self.identity.kind
        kind = "task" if task else "method"
        if self.identity.kind == "run":
            return kind
        return f"trial-{kind}"

    def _note(self, label: str, task: str) -> str:
        if not label and not task and self.identity.note:
            return self.identity.note
        return format_run_note(self.record, label, task)

    def _fill(self, run: Run) -> None:
        """Log the parameters, picture and config of a new run. Then set the tag `OPENED`.

        The config is only logged with a picture of the graph, which replicas do not have.
        """
        assert self.client
        label = run.data.tags.get("label", "")
        task = run.data.tags.get("task", "")
        params: Mapping[str, Any] = {}
        if not label and not task:
            if self.graph_svg and self.identity.pictures:
                config = redact(dump_yaml(self.record["config"])).encode()
                files = {"graph.svg": self.graph_svg.encode(), CONFIG_FILE: config}
                self.client.log_files(run, files)
            params = self.identity.params or {}
            if self.identity.params is None:
                params = main_params(self.record)
        elif not task:
            params = self._method_params(label)
        if params:
            self.client.log_params(run, flatten(params))
        self.client.tag(run, {OPENED: "true"})

    def _method_params(self, label: str) -> dict[str, Any]:
        """Return the inputs of the first training stage of a method, except `seen` (its tasks)."""
        for stage in self.record["stages"]:
            if stage["label"] == label and stage["step"] not in ("evaluate", "report"):
                return {name: value for name, value in stage["inputs"].items() if name != "seen"}
        return {}

    # ---- one stage -------------------------------------------------------------------------------
    def stage(self, stage_id: str) -> None:
        """Record a stage if it is finished and not recorded yet."""
        self.ready()
        stage = self.stages[stage_id]
        artifact = self._artifact(stage)
        if artifact is None or stage_id in self.recorded:
            return
        run = self._run_of_stage(stage)
        if run.data.tags.get(make_key_tag(stage)) != stage["key"]:
            match stage["step"]:
                case "ingest":
                    self._record_ingest(run, stage)
                case "features":
                    self._finish_stage(run, stage, [])
                case "evaluate":
                    self._record_evaluation(run, stage)
                case _:
                    self._record_training(run, stage, artifact)
        self.recorded.add(stage_id)

    def _run_of_stage(self, stage: Mapping[str, Any]) -> Run:
        if stage["step"] in ("ingest", "features"):
            return self.parent
        if not stage["label"]:
            return self._run("", BACKBONE_TASK)
        return self._run(stage["label"], stage["task"] or "")

    def _artifact(self, stage: Mapping[str, Any]) -> Artifact | None:
        """Return the result of a stage, or None if the stage has no result yet."""
        artifact = self.artifacts.get(stage["id"])
        if artifact is None:
            artifact = Artifact.open(join(self.storage, "stages"), stage["key"])
        if artifact is not None:
            self.artifacts[stage["id"]] = artifact
        return artifact

    def _finish_stage(
        self,
        run: Run,
        stage: Mapping[str, Any],
        points: Iterable[Point],
        tags: Mapping[str, str] | None = None,
    ) -> None:
        """Log the points of a stage, and mark the stage as recorded.

        The last call to MLflow sets the tag of the stage to its key, see `make_key_tag`.
        """
        self.ready().log_points(run, points, {**(tags or {}), make_key_tag(stage): stage["key"]})

    def _input(self, stage_id: str, context: str) -> InputData:
        """Return the entry for the data of an ingest stage, with the purpose `context`."""
        stage = self.stages[stage_id]
        artifact = self._artifact(stage)
        content = stage["key"]
        if artifact is not None:
            content = str(artifact.manifest.get("content", content))
        return InputData(
            stage_id.removeprefix("data/"),
            f"{content[:24]}-{context}"[:36],  # MLflow accepts at most 36 characters
            join(self.storage, "stages", stage["key"]),
            context,
        )

    def inputs(self, run: Run, stage_ids: Iterable[str], context: str) -> None:
        """Log the data sets that a run has read, unless they were logged before.

        Args:
            run: The run.
            stage_ids: Ids of stages. Only ingest stages are used.
            context: Purpose of the data, for example `train`.
        """
        new = []
        for stage_id in stage_ids:
            if stage_id.startswith("data/"):
                data = self._input(stage_id, context)
                if (run.info.run_id, data.name, context) not in self.logged_inputs:
                    new.append(data)
        self.ready().log_inputs(run, new)
        self.logged_inputs |= {(run.info.run_id, data.name, context) for data in new}

    def _record_ingest(self, run: Run, stage: Mapping[str, Any]) -> None:
        self.inputs(run, [stage["id"]], "stream")
        self._finish_stage(run, stage, [])

    def _record_training(self, run: Run, stage: Mapping[str, Any], artifact: Artifact) -> None:
        # lazy import: needs torch and matplotlib
        from pipeline.tracking.points import drop_constant_curves, history_points

        tables = self._tables()
        manifest = artifact.manifest
        points = drop_constant_curves(history_points(tables.history(stage["id"]), stage["step"]))
        for kind, size in (manifest.get("sizes") or {}).items():
            points.append(Point(f"size/{kind}", float(size), 0, 0))
        for name in ("trained_parameters", "flops_share", "wall_s"):
            value = manifest.get(name)
            if isinstance(value, (int, float)):
                points.append(Point(name, float(value), 0, 0))
        if self.identity.pictures:
            points += self._record_task_files(run, stage, artifact, tables)
        self.inputs(run, stage["parents"], "train")
        if stage["label"]:
            self.inputs(self._run(stage["label"], ""), stage["parents"], "train")
        self._finish_stage(run, stage, points, {"store": artifact.uri("")})
        if not stage["label"]:
            self._close(run)

    def _record_task_files(
        self, run: Run, stage: Mapping[str, Any], artifact: Artifact, tables: RunTables
    ) -> list[Point]:
        """Upload pictures, tables and the state of a task; return points of the masks."""
        from pipeline.tracking.points import mask_points, task_files  # imports torch, matplotlib

        label = stage["label"] or ""
        task = stage["task"] or ""
        manifest = artifact.manifest
        files: dict[str, bytes] = {}
        views: list[MaskView | None] = []
        if label:
            views = self._mask_views(tables, label, task)
            files = task_files(tables, label, task, [view for view in views if view is not None])
            state = manifest["files"].get("task.safetensors")
            if state is not None and state["bytes"] <= MAX_STATE_BYTES:
                files["task.safetensors"] = artifact.read("task.safetensors")
        if manifest.get("warnings"):
            files[get_warnings_file(stage["step"])] = "\n".join(manifest["warnings"]).encode()
        self.ready().log_files(run, files)
        # Before the stage with the task's state is finished, the last view is of an earlier task.
        view = views[-1] if views else None
        return mask_points(view if view is not None and view.task == task else None)

    def _mask_views(self, tables: RunTables, label: str, task: str) -> list[MaskView | None]:
        """Return the masks of the finished tasks up to `task`, from the cache or from the store.

        An entry is None if the task has neither masks nor learned tokens.
        """
        from pipeline.results.masks import load_mask_view  # imports torch

        tasks = tables.tasks(label)
        views = []
        for name in tasks[: tasks.index(task) + 1]:
            if tables.state_stage(label, name) is None:
                continue
            # The masks of `task` are always loaded: each step of the task can change them.
            if (label, name) not in self.mask_views or name == task:
                self.mask_views[label, name] = load_mask_view(tables, label, name)
            views.append(self.mask_views[label, name])
        while sum(map(_mask_bytes, self.mask_views.values())) > MASK_CACHE_BYTES:
            self.mask_views.popitem(last=False)
        return views

    def _record_evaluation(self, run: Run, stage: Mapping[str, Any]) -> None:
        from pipeline.tracking.points import confusion_files  # imports torch and matplotlib

        label = stage["label"] or ""
        task = stage["task"] or ""
        tables = self._tables()
        matrix = tables.matrix(label)
        self.newly_evaluated.add(label)
        self._record_metrics(label, tables)
        learned = [one for one in tables.learned_tasks(label) if one.task == task]
        sentences = describe_chance(learned)
        if sentences:
            text = "\n".join(sentences).encode()
            self.ready().log_files(run, {get_warnings_file("evaluate"): text})
        if self.identity.pictures:
            self.ready().log_files(run, confusion_files(tables, label, task))
        self.inputs(run, stage["parents"], self.identity.data)
        self.inputs(self._run(label, ""), stage["parents"], self.identity.data)
        index = matrix.tasks.index(task)
        points = []
        if matrix.source[index, index] == "measured":
            points.append(Point("accuracy", float(matrix.rates[index, index]), 0, 0))
            points.append(Point("chance", float(matrix.chance[index, index]), 0, 0))
            points.append(Point("test_images", float(matrix.total[index, index]), 0, 0))
        self._finish_stage(run, stage, points)
        self._close(run)

    def _record_metrics(self, label: str, tables: RunTables, again: bool = False) -> None:
        """Log the matrix, averages, sizes and inferred tasks of a method, as far as they are known.

        The average accuracy and the forgetting are also logged to the run of the graph.

        Args:
            label: Label of the method.
            tables: Tables of the run.
            again: Also log points that this process has logged before.
        """
        from pipeline.tracking import points as curves  # imports torch and matplotlib

        client = self.ready()
        method = self._run(label, "")
        points = curves.drop_constant_curves(
            [
                *curves.matrix_points(tables.matrix(label)),
                *curves.size_points(tables.sizes(label)),
                *curves.pick_points(tables.picks(label)),
            ]
        )
        if not again:
            points = [p for p in points if (label, p.name, p.step) not in self.logged_points]
        if self.identity.pictures:
            now = time.monotonic()
            is_due = again or now - self.pictured.setdefault(label, now) >= PICTURES_S
            if is_due:
                self.pictured[label] = now
            client.log_files(method, curves.method_files(tables, label, with_pictures=is_due))
        client.log_points(method, points)
        compared = [p for p in points if p.name in ("average_accuracy", "forgetting")]
        graph_points = [p._replace(name=key_name(f"{p.name}/{label}")) for p in compared]
        client.log_points(self.parent, graph_points)
        self.logged_points |= {(label, point.name, point.step) for point in points}

    # ---- the end ---------------------------------------------------------------------------------
    def record_analysis(
        self, files: Mapping[str, bytes], points: Mapping[str, Iterable[Point]]
    ) -> None:
        """Add the measurements of the command `analyse`.

        Args:
            files: Name -> content of files for the run of the graph, in the folder `analysis/`.
            points: Label of a method -> points for the run of the method.
        """
        client = self.ready()
        client.log_files(self.parent, {f"analysis/{name}": data for name, data in files.items()})
        for label, method_points in points.items():
            client.log_points(self._run(label, ""), method_points)

    def finish(self, report: Mapping[str, bytes], status: str) -> None:
        """Upload the files of the report and close the runs.

        Nothing is done if the same report and status were recorded before, and no evaluation was
        recorded since.

        Args:
            report: Name -> content of the files of the report.
            status: FINISHED, FAILED or KILLED. FINISHED becomes KILLED if an evaluation is missing.
        """
        client = self.ready()
        parent = self.parent
        if status == "FINISHED" and not self._is_evaluated():
            status = "KILLED"  # the report is that of an incomplete run
        tables = self._tables()
        digest = _compute_report_digest(report)
        is_recorded = parent.data.tags.get("accrete.report") == digest
        if parent.info.status == status and is_recorded and not self.newly_evaluated:
            return
        # The last pictures may be older than the last evaluation, see PICTURES_S.
        for label in self.newly_evaluated:
            self._record_metrics(label, tables, again=True)
        if self.identity.pictures:
            self._record_report(tables, report)
        if self.identity.kind == "run":
            self._record_gpu_use()
        for (_, task), run in self.runs.items():
            is_closed = bool(task) and run.info.status in ("FINISHED", status)
            if run is not parent and not is_closed:
                self._close(run, status)
        client.tag(parent, {"accrete.report": digest})
        self._close(parent, status)
        self.newly_evaluated.clear()

    def _is_evaluated(self) -> bool:
        evaluations = [stage for stage in self.record["stages"] if stage["step"] == "evaluate"]
        return all(self._artifact(stage) is not None for stage in evaluations)

    def _record_report(self, tables: RunTables, report: Mapping[str, bytes]) -> None:
        from pipeline.report import files  # imports matplotlib
        from pipeline.tracking.points import method_report_files, run_report_files

        contents = run_report_files(report)
        environment = tables.environment()
        if environment:
            rows = []
            for name, values in environment.items():
                rows.append({"name": name, "value": ", ".join(values)})
            contents["environment.json"] = json.dumps(environment, indent=1).encode()
            contents["environment.csv"] = files.as_csv(rows)
        client = self.ready()
        client.log_files(self.parent, contents)
        pictures = {self.parent.info.run_id: [*contents]}
        for label in tables.labels:
            method = self._run(label, "")
            method_pictures = method_report_files(report, label)
            client.log_files(method, method_pictures)
            pictures[method.info.run_id] = [*method_pictures]
        self._link_pictures(pictures)

    def _record_gpu_use(self) -> None:
        """Log how busy each GPU was during training, as metrics and as a tag with sentences.

        The metrics count GPUs from 0, because numbers of GPUs and names of nodes differ between
        runs.
        """
        figures = read_gpu_use(self.storage, self.record["name"])
        points = []
        for number, figure in enumerate(figures):
            if "busy" in figure:
                after_s = figure["sampled_at"] - self.parent.info.start_time / 1000
                points.append(Point(f"gpu_busy/{number}", figure["busy"], 0, max(0.0, after_s)))
        if figures:
            text = "; ".join(gpu_sentences(figures))
            self.ready().log_points(self.parent, points, {"gpu_use": text[:MAX_TAG]})

    def _link_pictures(self, names: Mapping[str, Sequence[str]]) -> None:
        """Insert links to pages and pictures at the beginning of the descriptions of runs.

        A description that does not end with the generated text was edited by a user, and is kept.

        Args:
            names: Id of a run -> its artifacts. Only pages and pictures are linked.
        """
        client = self.ready()
        for run in client.find({"accrete.run": self._run_key()}):  # with current descriptions
            text = self._note(run.data.tags.get("label", ""), run.data.tags.get("task", ""))
            links = make_artifact_links(
                client.experiment, run.info.run_id, names.get(run.info.run_id, ())
            )
            if links and run.data.tags.get(NOTE, "").endswith(text):
                client.tag(run, {NOTE: f"{links}\n\n{text}"})

    def _close(self, run: Run, status: str = "FINISHED") -> None:
        self.ready().close(run, status)

    def _tables(self) -> RunTables:
        from pipeline.results.tables import RunTables  # imports torch

        return RunTables(self.storage, self.record, dict(self.artifacts))


def _mask_bytes(view: MaskView | None) -> int:
    if view is None:
        return 0
    return sum(bits.nbytes for bits in view.bits.values())


def _compute_report_digest(files: Mapping[str, bytes]) -> str:
    """Return the digest of the files of a report."""
    digests = [hashlib.sha256(files[name]).digest() for name in sorted(files)]
    return hashlib.sha256(b"".join(digests)).hexdigest()[:32]


# ---- parameters, tags and descriptions -----------------------------------------------------------
def main_params(record: RunRecord) -> dict[str, Any]:
    """Return the parameters of a graph's run: methods, number of tasks and `MAIN_PARAMS`."""
    labels = [stage["label"] for stage in record["stages"] if stage["label"]]
    params: dict[str, Any] = {
        "methods": ", ".join(dict.fromkeys(labels)),
        "tasks": len(record["tasks"]),
    }
    settings = flatten(record["config"])
    for name in MAIN_PARAMS:
        if settings.get(name) not in (None, [], "", "None"):
            params[name] = settings[name]
    return params


def make_key_tag(stage: Mapping[str, Any]) -> str:
    """Return the name of the tag with the key of a recorded stage.

    The run of a task has at most one stage of each step, so the step identifies the stage. Stages
    that all methods share have no label, and are identified by their id.
    """
    return f"stage.{stage['step']}" if stage["label"] else f"stage.{stage['id']}"


def make_key_tags(record: RunRecord, label: str) -> dict[str, str]:
    """Return the keys of the stages of a method as tags, for the run of the method.

    Ingest stages are left out, because their tag marks them as recorded, see `RunWriter.stage`. The
    report is left out, too.

    Args:
        record: Record of the run.
        label: Label of the method. "": the stages that all methods share.
    """
    tags = {}
    for stage in record["stages"]:
        is_of_label = (stage["label"] or "") == label
        if is_of_label and stage["step"] not in ("ingest", "report"):
            tags[f"stage.{stage['id'].removeprefix(f'{label}/')}"] = stage["key"]
    return tags


def make_tags(record: RunRecord) -> dict[str, str]:
    """Return the tags of all runs of a graph, which users sort and filter by."""
    config = record["config"]
    provenance = record.get("provenance") or {}
    methods = dict.fromkeys(s["method"] or s["label"] for s in record["stages"] if s["label"])
    commit = str(provenance.get("git_commit", ""))
    tags = {
        "methods": ", ".join(methods)[:MAX_TAG],
        "run": record["name"],
        "stream": ", ".join(task["name"] for task in record["tasks"])[:MAX_TAG],
        "scenario": str(config.get("stream", {}).get("scenario", "task")),
        "backbone": str(config.get("backbone", {}).get("name", "")),
        "seed": str(config.get("seed", "")),
        "git_commit": commit,
        "mlflow.source.git.commit": commit,
        "version.python": str(provenance.get("python", "")),
    }
    for name, version in (provenance.get("packages") or {}).items():
        tags[f"version.{name}"] = str(version)
    return tags


def format_run_note(record: RunRecord, label: str, task: str) -> str:
    """Return the description that MLflow shows for a run (Markdown)."""
    if task:
        owner = f"method **{label}**" if label else "all methods"
        return (
            f"Task **{task}** of run **{record['name']}**, as learned by {owner}. "
            "Model metrics are curves over epochs. Artifacts are masks, learned tokens, "
            "the confusion matrix and the state of the task, as far as the method has them."
        )
    if label:
        return (
            f"Method **{label}** of run **{record['name']}**. Look first at the model metrics "
            "`average_accuracy` and `forgetting`, then at the matrix: in the artifact "
            "`accuracy_matrix.png`, a row is the model after learning one more task, and a column "
            "is the accuracy on one task. The step of a model metric is the number of tasks "
            "learned before. There is one child run per task."
        )
    return (
        f"Run **{record['name']}**. The artifact `report.html` is the whole report, "
        "`graph.svg` the graph of stages with their states and times, `config.yaml` all settings. "
        "Look at `average_accuracy` and `forgetting` of the methods first. "
        "There is one child run per method, and below each "
        "method one run per task. To compare methods, select their runs and press Compare."
    )


def get_warnings_file(step: str) -> str:
    """Return the name of the artifact with the warnings of a step.

    The name depends on the step because the steps of a task share a run.
    """
    if step == "train":
        return "warnings.txt"
    return f"warnings-{step}.txt"
