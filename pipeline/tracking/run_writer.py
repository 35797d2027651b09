"""What the record of a graph is: a run for the graph, below it one per method, below that one per
task; each part written once.

A run is found again by its tags, so that a command that is given twice, or goes on after an
interruption, writes into the same runs and adds nothing twice. Whatever fails here may be called
again.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pipeline.config import flatten
from pipeline.tracking.mlflow_client import Data, MlflowClientAdapter
from workers.storage.artifact import Artifact, join

if TYPE_CHECKING:
    from mlflow.entities import Run

    from pipeline.config import TrackingSettings
    from pipeline.results.masks import MaskView
    from pipeline.results.tables import RunTables
    from pipeline.tracking.points import Point

STATE_BYTES = 32 << 20  # a larger task state stays in the store, its address in a tag
CACHE_BYTES = 256 << 20  # masks kept in memory for the overlap with later tasks
OPENED = "accrete.opened"  # a run with this tag has all that it is created with


@dataclass(frozen=True)
class RunIdentity:
    """Where the runs of a graph stand, and what its own run is.

    kind: `run`, or `trial`, whose methods and tasks are of kind `trial-method` and `trial-task`, so
    that they are not mixed up with tested ones. identity: what the run is found by; by default the
    graph's name and keys. parent: id of the run above it. tags: more tags of all of its runs.
    params: those of the graph's run; by default its config. note: what is said of it; by default
    what a run is. data: what its evaluations read, `test` or `validation`. pictures: also pictures,
    tables, states and report files.
    """

    kind: str = "run"
    identity: str = ""
    parent: str = ""
    tags: Mapping[str, str] = field(default_factory=dict)
    params: Mapping[str, Any] | None = None
    note: str = ""
    data: str = "test"
    pictures: bool = True


def identity(record: Mapping[str, Any]) -> str:
    """What makes two runs the same run: the name and the keys of all stages."""
    keys = "\n".join(sorted(s["key"] for s in record["stages"]))
    return f"{record['name']}-{hashlib.sha256(keys.encode()).hexdigest()[:16]}"


class RunWriter:
    """Writes the record of one graph, whenever it is asked to. Its methods raise what MLflow
    raises; after that, `forget`."""

    def __init__(self, settings: TrackingSettings, storage: str, place: RunIdentity):
        self.settings, self.storage, self.place = settings, storage, place
        self.record: Mapping[str, Any] = {}
        self.stages: dict[str, Mapping[str, Any]] = {}
        self.graph_svg = ""
        self.calls: MlflowClientAdapter | None = None
        self.known: dict[str, Artifact] = {}
        self.views: OrderedDict[tuple[str, str], MaskView | None] = OrderedDict()
        # tracking URI, experiment, id of the graph's run, those of its methods
        self.where: tuple[str, str, str, list[str]] | None = None
        self.fresh: set[str] = set()  # methods of which an evaluation was recorded, until `finish`
        self.forget()

    def begin(self, record: Mapping[str, Any], graph_svg: str = "") -> None:
        self.record, self.graph_svg = record, graph_svg
        self.stages = {s["id"]: s for s in record["stages"]}

    def forget(self) -> None:
        """Nothing that was learned from MLflow is believed any more."""
        self.calls = None
        self.runs: dict[
            tuple[str, str], Run
        ] = {}  # (label, task); ("", "") is the graph, (label, "") a method
        self.logged: set[tuple[str, ...]] = set()
        self.recorded: set[str] = set()

    @property
    def parent(self) -> Run:
        """The run of the graph."""
        return self.runs["", ""]

    @property
    def methods(self) -> dict[str, str]:
        """Ids of the runs of its methods, by label."""
        return {
            label: run.info.run_id for (label, task), run in self.runs.items() if label and not task
        }

    # ---- runs ------------------------------------------------------------------------------------
    def ready(self) -> MlflowClientAdapter:
        """Opens the runs of this graph and its methods, or finds them."""
        if self.calls and self.runs:
            return self.calls
        calls = self.calls = self.calls or MlflowClientAdapter(self.storage, self.settings)
        found = {
            (r.data.tags.get("label", ""), r.data.tags.get("task", "")): r
            for r in calls.find({"accrete.run": self._identity()})
        }
        parent = found.get(("", "")) or self._create("", "", self.place.parent)
        if parent.info.status not in (
            "RUNNING",
            "FINISHED",
        ):  # it had failed or was stopped, and goes on now
            calls.open(parent)
        self.runs = found | {("", ""): parent}
        for run in [run for run in self.runs.values() if OPENED not in run.data.tags]:
            self._fill(run)
        for label in self._tables().labels:
            self._run(label, "")
        self.where = (
            calls.uri,
            calls.experiment,
            parent.info.run_id,
            [self.methods[label] for label in self._tables().labels],
        )
        return calls

    def _identity(self) -> str:
        return self.place.identity or identity(self.record)

    def _run(self, label: str, task: str) -> Run:
        """The run of a method, or of a task below it; created when it is first needed."""
        if (label, task) not in self.runs:
            above = self.parent if not task or not label else self._run(label, "")
            self.runs[label, task] = self._create(label, task, above.info.run_id)
            self._fill(self.runs[label, task])
        return self.runs[label, task]

    def _create(self, label: str, task: str, above: str) -> Run:
        assert self.calls
        kind = "task" if task else "method" if label else "run"
        record, method = self.record, self._tables().method(label) if label else ""
        tags = (
            tags_of(record)
            | {"protocol": self.place.data, "mlflow.source.name": "python -m pipeline run"}
            | dict(self.place.tags)
        )
        tags |= {"methods": method} if label else {}
        tags |= {
            "accrete.run": self._identity(),
            "accrete.kind": self.place.kind
            if kind == "run"
            else kind
            if self.place.kind == "run"
            else f"trial-{kind}",
            "label": label,
            "task": task,
            "method": method,
            "mlflow.parentRunId": above,
            "mlflow.note.content": (self.place.note if kind == "run" else "")
            or note_of(record, label, task),
        }
        return self.calls.create(
            task or label or record["name"],
            tags | (keys_of(record, label) if kind != "task" else {}),
        )

    def _fill(self, run: Run) -> None:
        """What a run is created with, besides its tags; then the tag that says so."""
        assert self.calls
        label, task = run.data.tags.get("label", ""), run.data.tags.get("task", "")
        values: Mapping[str, Any] = {}
        if not label and not task:
            values = self.record["config"] if self.place.params is None else self.place.params
            self.calls.files(
                run,
                {"graph.svg": self.graph_svg.encode()}
                if self.graph_svg and self.place.pictures
                else {},
            )
        elif not task:
            own = (
                s["inputs"]
                for s in self.record["stages"]
                if s["label"] == label and s["step"] not in ("evaluate", "report")
            )
            inputs: Mapping[str, Any] = next(own, {})
            values = {k: v for k, v in inputs.items() if k != "seen"}
        self.calls.params(run, flatten(values) if values else {})
        self.calls.tag(run, {OPENED: "true"})

    # ---- one stage -------------------------------------------------------------------------------
    def stage(self, stage_id: str) -> None:
        """Records a stage, if it is finished and was not recorded before."""
        self.ready()
        stage = self.stages[stage_id]
        artifact = self._artifact(stage)
        if artifact is None or stage_id in self.recorded:
            return
        label, task = stage["label"] or "", stage["task"] or ""
        if stage["step"] == "ingest":
            run = self.parent
        else:
            run = self._run(label, task if label else "backbone")
        if run.data.tags.get(tag_of(stage)) != stage["key"]:
            {"evaluate": self._evaluated, "ingest": self._ingested}.get(
                stage["step"], self._trained
            )(run, stage, artifact)
        self.recorded.add(stage_id)

    def _artifact(self, stage: Mapping[str, Any]) -> Artifact | None:
        found = self.known.get(stage["id"]) or Artifact.open(
            join(self.storage, "stages"), stage["key"]
        )
        if found is not None:
            self.known[stage["id"]] = found
        return found

    def _mark(
        self,
        run: Run,
        stage: Mapping[str, Any],
        points: Iterable[Point],
        tags: Mapping[str, str] | None = None,
    ) -> None:
        """Points and the tag that says they are there, in one call; the tag comes last."""
        self.ready().points(run, points, {**(tags or {}), tag_of(stage): stage["key"]})

    def _data(self, stage_id: str, context: str) -> Data:
        stage = self.stages[stage_id]
        artifact = self._artifact(stage)
        content = str(artifact.manifest.get("content", stage["key"]) if artifact else stage["key"])[
            :24
        ]
        return Data(
            stage_id.removeprefix("data/"),
            f"{content}-{context}"[:36],
            join(self.storage, "stages", stage["key"]),
            context,
        )

    def inputs(self, run: Run, stage_ids: Iterable[str], context: str) -> None:
        """Says of a run which of these stages, those that are data, it has read; once."""
        data = [
            self._data(stage_id, context) for stage_id in stage_ids if stage_id.startswith("data/")
        ]
        new = [d for d in data if (run.info.run_id, d.name, d.context) not in self.logged]
        self.ready().inputs(run, new)
        self.logged |= {(run.info.run_id, d.name, d.context) for d in new}

    def _ingested(self, run: Run, stage: Mapping[str, Any], artifact: Artifact) -> None:
        self.inputs(run, [stage["id"]], "stream")
        self._mark(run, stage, [])

    def _trained(self, run: Run, stage: Mapping[str, Any], artifact: Artifact) -> None:
        from pipeline.tracking import points as entries

        tables, manifest, label = self._tables(), artifact.manifest, stage["label"] or ""
        points = entries.history_points(tables.history(stage["id"]), stage["step"])
        points += [
            entries.Point(f"size/{kind}", float(size), 0, 0)
            for kind, size in (manifest.get("sizes") or {}).items()
        ]
        points += [
            entries.Point(name, float(manifest[name]), 0, 0)
            for name in ("trained_parameters", "flops_share", "wall_s")
            if manifest.get(name) is not None
        ]
        if self.place.pictures:
            points += self._left_behind(run, stage, artifact, tables)
        for reader in (run, self._run(label, "")) if label else (run,):
            self.inputs(reader, stage["parents"], "train")
        self._mark(run, stage, points, {"store": artifact.uri("")})
        if not label:
            self._close(run)

    def _left_behind(
        self, run: Run, stage: Mapping[str, Any], artifact: Artifact, tables: RunTables
    ) -> list[Point]:
        """Pictures, tables and the state that a stage left; and what its masks keep."""
        from pipeline.tracking import points as entries

        label, task, manifest = stage["label"] or "", stage["task"] or "", artifact.manifest
        found: dict[str, bytes] = {}
        views: list[MaskView | None] = []
        if label:
            views = self._views(tables, label, task)
            found = entries.task_files(tables, label, task, [v for v in views if v is not None])
            if (
                manifest["files"].get("task.safetensors", {"bytes": STATE_BYTES + 1})["bytes"]
                <= STATE_BYTES
            ):
                found["task.safetensors"] = artifact.read("task.safetensors")
        if manifest.get("warnings"):
            found["warnings.txt"] = "\n".join(manifest["warnings"]).encode()
        self.ready().files(run, found)
        return entries.keep_points(views[-1] if views else None)

    def _views(self, tables: RunTables, label: str, task: str) -> list[MaskView | None]:
        """Masks of the tasks up to `task` that are finished, from memory or from the store."""
        from pipeline.report.figures import load_mask_view

        tasks = tables.tasks(label)
        found = []
        for name in tasks[: tasks.index(task) + 1]:
            if tables.state_stage(label, name) is None:
                continue
            if (label, name) not in self.views or name == task:
                self.views[label, name] = load_mask_view(tables, label, name)
            found.append(self.views[label, name])
        while (
            sum(b.nbytes for v in self.views.values() if v for b in v.bits.values()) > CACHE_BYTES
        ):
            self.views.popitem(last=False)
        return found

    def _evaluated(self, run: Run, stage: Mapping[str, Any], artifact: Artifact) -> None:
        from pipeline.tracking import points as entries

        label, task, tables = stage["label"] or "", stage["task"] or "", self._tables()
        calls, matrix = self.ready(), tables.matrix(label)
        self.fresh.add(label)
        self._measured(label, tables)
        if self.place.pictures:
            calls.files(run, entries.confusion_files(tables, label, task))
        for reader in (run, self._run(label, "")):
            self.inputs(reader, stage["parents"], self.place.data)
        index = matrix.tasks.index(task)
        own = (
            [entries.Point("accuracy", float(matrix.rates[index, index]), 0, 0)]
            if matrix.source[index, index] == "measured"
            else []
        )
        self._mark(run, stage, own)
        self._close(run)

    def _measured(self, label: str, tables: RunTables, again: bool = False) -> None:
        """Matrix, averages and sizes of a method, as far as it is; points that were written before
        only `again`."""
        from pipeline.tracking import points as entries

        calls, method, matrix = self.ready(), self._run(label, ""), tables.matrix(label)
        points = (
            entries.matrix_points(matrix)
            + entries.size_points(tables.sizes(label))
            + entries.pick_points(tables.picks(label))
        )
        new = [p for p in points if again or (label, p.name, str(p.step)) not in self.logged]
        if self.place.pictures:
            calls.files(method, entries.method_files(tables, label))
        calls.points(method, new)
        calls.points(
            self.parent,
            [
                p._replace(name=entries.key_name(f"{p.name}/{label}"))
                for p in new
                if p.name in ("average_accuracy", "forgetting")
            ],
        )
        self.logged |= {(label, p.name, str(p.step)) for p in new}

    # ---- the end ---------------------------------------------------------------------------------
    def analysed(self, files: Mapping[str, bytes], points: Mapping[str, Iterable[Point]]) -> None:
        """Files to the run of the graph, below `analysis/`, and points by label to the runs of its
        methods."""
        calls = self.ready()
        calls.files(self.parent, {f"analysis/{name}": data for name, data in files.items()})
        for label, some in points.items():
            calls.points(self._run(label, ""), some)

    def finish(self, report: Mapping[str, bytes], status: str) -> None:
        """Adds the report and closes the runs."""
        from pipeline.report import files
        from pipeline.tracking import points as entries

        calls, parent = self.ready(), self.parent
        if status == "FINISHED" and any(
            s["step"] == "evaluate" and self._artifact(s) is None for s in self.record["stages"]
        ):
            status = "KILLED"  # the report of a run that was stopped half-way
        tables = self._tables()
        digest = hashlib.sha256(
            b"".join(hashlib.sha256(report[name]).digest() for name in sorted(report))
        ).hexdigest()[:32]
        if (
            parent.info.status == status
            and parent.data.tags.get("accrete.report") == digest
            and not self.fresh
        ):
            return
        for (
            label
        ) in self.fresh:  # what stood before was not looked at when its evaluations were recorded
            self._measured(label, tables, again=True)
        if self.place.pictures:
            environment = [
                {"name": name, "value": ", ".join(values)}
                for name, values in tables.environment().items()
            ]
            extra = {
                "environment.json": json.dumps(tables.environment(), indent=1).encode(),
                "environment.csv": files.as_csv(environment),
            }
            calls.files(parent, {**entries.of_run(report), **(extra if environment else {})})
            for label in tables.labels:
                calls.files(self._run(label, ""), entries.of_label(report, label))
        for (label, task), run in self.runs.items():
            if (label or task) and (not task or run.info.status not in ("FINISHED", status)):
                self._close(run, status)
        calls.tag(parent, {"accrete.report": digest})
        self._close(parent, status)
        self.fresh.clear()

    def _close(self, run: Run, status: str = "FINISHED") -> None:
        self.ready().close(run, status)

    def _tables(self) -> RunTables:
        from pipeline.results.tables import RunTables

        return RunTables(self.storage, self.record, dict(self.known))


# ---- tags and words ------------------------------------------------------------------------------
def tag_of(stage: Mapping[str, Any]) -> str:
    """The tag whose value is the key of a recorded stage."""
    return f"stage.{stage['step']}" if stage["label"] else f"stage.{stage['id']}"


def keys_of(record: Mapping[str, Any], label: str) -> dict[str, str]:
    """Keys of the stages of a method as tags; of the whole graph, those that its methods share, but
    data, which has its tag once it is recorded."""
    own = [
        s
        for s in record["stages"]
        if (s["label"] or "") == label and s["step"] not in ("ingest", "report")
    ]
    return {f"stage.{s['id'].removeprefix(f'{label}/')}": s["key"] for s in own}


def tags_of(record: Mapping[str, Any]) -> dict[str, str]:
    """What all runs of a graph are sorted and filtered by."""
    config, provenance = record["config"], record.get("provenance") or {}
    methods = dict.fromkeys(s["method"] or s["label"] for s in record["stages"] if s["label"])
    commit = str(provenance.get("git_commit", ""))
    return {
        "methods": ", ".join(methods)[:4000],
        "stream": ", ".join(t["name"] for t in record["tasks"])[:4000],
        "scenario": str(config.get("stream", {}).get("scenario", "task")),
        "backbone": str(config.get("backbone", {}).get("name", "")),
        "seed": str(config.get("seed", "")),
        "git_commit": commit,
        "mlflow.source.git.commit": commit,
        **{
            f"version.{name}": str(version)
            for name, version in (provenance.get("packages") or {}).items()
        },
        "version.python": str(provenance.get("python", "")),
    }


def note_of(record: Mapping[str, Any], label: str, task: str) -> str:
    """What MLflow shows as the description of a run (Markdown)."""
    if task:
        owner = f"method **{label}**" if label else "all methods"
        return (
            f"Task **{task}** of run **{record['name']}**, as learned by {owner}. Model "
            "metrics: curves over epochs. Artifacts: what the task left behind "
            "(masks, tokens, confusion matrix, task state)."
        )
    if label:
        return (
            f"Method **{label}** of run **{record['name']}**. `accuracy_matrix.png` among the "
            "artifacts: row = after learning a task, column = accuracy on "
            "a task. Model metrics have step = number of tasks learned before. One child run "
            "per task."
        )
    return (
        f"Run **{record['name']}**. Open `report.html` among the artifacts for the whole story, "
        "`graph.svg` for the stages. One child run per method, "
        "and below each one run per task. To compare methods, select their runs and press Compare."
    )
