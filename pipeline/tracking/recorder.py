"""The record of a run in MLflow, written beside the run by a thread of its own: one run per graph,
method and task, nested.

The driver is the only writer. Whatever goes wrong here never stops a run: while MLflow does not
answer, what it should hear of is kept, in order, and anything else becomes one sentence in
`Recorder.warnings`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from pipeline.tracking.mlflow_client import MlflowClientAdapter, SystemMetrics, transient
from pipeline.tracking.outbox import Outbox
from pipeline.tracking.run_writer import RunIdentity, RunWriter
from pipeline.tracking.ui import compare_link, page_base, run_link, this_python
from workers.errors import UserError, require_package
from workers.storage.artifact import Artifact, join

if TYPE_CHECKING:
    from pipeline.config import TrackingSettings
    from pipeline.graph.run import Decision, Event, Walk
    from pipeline.graph.stage import Graph, Stage
    from pipeline.tracking.points import Point

Log = Callable[[str], None]
WriteBundle = Callable[[str, str], None]  # (label of a method, folder to write into)


def log_to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class Recorder:
    """Writes the record of one run. `start` first, `stage` for each stage that finishes, `finish`
    at the end; only `finish` waits.

    Stages that stood before are recorded by `start`, so a run that has nothing to do still has its
    whole record. log: gets a line when MLflow goes away, and one when it is back. remedy: the
    command that writes the record anew, for people.
    """

    def __init__(
        self,
        settings: TrackingSettings,
        storage: str,
        log: Log = log_to_stderr,
        remedy: str = "",
        place: RunIdentity | None = None,
    ):
        self.settings, self.storage, self.remedy = (
            settings,
            storage,
            remedy or f"{this_python()} -m pipeline report CONFIG",
        )
        if settings.enabled:
            require_package("mlflow", "the record of a run", "set tracking=off")
        self.writer = RunWriter(settings, storage, place or RunIdentity())
        self.outbox = Outbox("MLflow", self._answers, self.writer.forget, transient, log)
        self.machine: SystemMetrics | None = None

    @property
    def warnings(self) -> list[str]:
        return self.outbox.warnings

    def start(self, record: Mapping[str, Any], graph_svg: str = "", watch: bool = False) -> None:
        """Opens the runs of this graph, or finds them, and records what stands already. watch: this
        machine is at work on it, and may be sampled."""
        if not self.settings.enabled:
            return
        self.writer.begin(record, graph_svg)
        self._put(self.writer.ready)
        if watch and self.settings.system_metrics:
            self._put(self._watch)
        for stage in record["stages"]:
            if stage["step"] != "report":
                self._put(partial(self.writer.stage, stage["id"]))

    def stage(self, stage: Stage, manifest: Mapping[str, Any] | None = None) -> None:
        """Records a stage that has just finished. `manifest` is read from the store where it is not
        complete."""
        if not self.writer.record or stage.step == "report":
            return
        if manifest and "attempt" in manifest:
            self.writer.known[stage.id] = Artifact(
                join(self.storage, "stages"), stage.key, dict(manifest)
            )
        self._put(partial(self.writer.stage, stage.id))

    def analysed(self, files: Mapping[str, bytes], points: Mapping[str, Iterable[Point]]) -> None:
        """Adds what `analyse` found: files to the run of the graph, below `analysis/`, and points
        by label to the runs of its methods."""
        if self.writer.record:
            self._put(partial(self.writer.analysed, files, points))

    def models(self, graph: Graph, write_bundle: WriteBundle) -> None:
        """Logs each method of a finished run as a model that serves all of its tasks, and registers
        it as RUN, or as RUN-LABEL where there are several.

        write_bundle: writes what serves the method of a label into a folder.
        """
        if self.settings.models and self.writer.record:
            for label in dict.fromkeys(
                stage.method for stage in graph if stage.step == "evaluate" and stage.method
            ):
                self._put(partial(self._model, graph, label, write_bundle))

    def _model(self, graph: Graph, label: str, write_bundle: WriteBundle) -> None:
        import tempfile

        from pipeline.tracking import publish

        calls, several = self.writer.ready(), len(self.writer.methods) > 1
        with tempfile.TemporaryDirectory(prefix="accrete-") as folder:
            place = join(folder, "bundle")
            write_bundle(label, place)
            found = publish.log(
                calls.uri,
                self.writer.methods[label],
                place,
                f"{graph.name}-{label}" if several else graph.name,
            )
        if found.warning:
            self.outbox.warn(found.warning)

    def finish(self, files: Mapping[str, bytes], status: str = "FINISHED") -> None:
        """Adds the report, closes the runs and waits until all is written; `status` is FINISHED,
        FAILED or KILLED. Of a server that is away it waits for `tracking.patience_s`."""
        if not self.writer.record:
            return
        self._put(self._end_watch)
        self._put(partial(self.writer.finish, files, status))
        close(
            self.outbox,
            self.settings.patience_s,
            f"the record of run {self.writer.record['name']!r}",
            self.remedy,
        )

    def links(self, base: str = "") -> list[str]:
        """Where to look at the record of this run; `base` is the address of a running `mlflow
        server`."""
        if self.writer.where is None:
            return []
        uri, experiment, parent, methods = self.writer.where
        base = base or (page_base(uri) if uri.startswith("http") else "")
        if not base:
            return [f"record: {this_python()} -m pipeline ui --storage {self.storage}"]
        return [
            f"record: {run_link(base, experiment, parent)}",
            *(
                [f"methods side by side: {compare_link(base, experiment, methods)}"]
                if len(methods) > 1
                else []
            ),
        ]

    def _put(self, action: Callable[[], object]) -> None:
        def act() -> None:
            action()
            if self.machine and not self.machine.alive and action != self._end_watch:
                self._watch()  # it had ended because MLflow was away

        self.outbox.put(act)

    def _answers(self) -> bool:
        return answers(self.settings, self.storage)

    # ---- this machine ----------------------------------------------------------------------------
    def _watch(self) -> None:
        calls = self.writer.ready()
        if self.writer.parent.info.status != "RUNNING":
            return
        try:
            self.machine = SystemMetrics(self.writer.parent, calls.uri)
        except UserError as error:
            self.outbox.warn(str(error))

    def _end_watch(self) -> None:
        machine, self.machine = self.machine, None
        if machine:
            machine.end()


def answers(settings: TrackingSettings, storage: str) -> bool:
    """Whether MLflow is there, even if it refuses what it is asked."""
    try:
        MlflowClientAdapter(storage, settings)
    except Exception as error:
        return not transient(error)
    return True


def close(outbox: Outbox, patience_s: float, what: str, remedy: str) -> None:
    """Waits for an outbox, and says what becomes of the rest."""
    if outbox.close(patience_s):
        outbox.warn(
            f"MLflow did not answer for {patience_s:.0f} s at the end: {what} is incomplete; "
            f"when MLflow is back, {remedy} writes it"
        )


class RecordingObserver:
    """Watches a walk and has finished stages recorded, so that no stage waits for MLflow."""

    def __init__(self, recorder: Recorder, graph: Graph, record: Mapping[str, Any], graph_svg: str):
        self.recorder, self.graph = recorder, graph
        recorder.start(record, graph_svg, watch=True)

    def event(self, walk: Walk, event: Event) -> None:
        if event.kind == "done":
            self.recorder.stage(self.graph[event.stage], event.body)

    def decision(self, walk: Walk, decision: Decision) -> None:
        """Nothing to record: MLflow hears of results only."""

    def finish(self, files: Mapping[str, bytes], status: str) -> Recorder:
        """Waits until everything is written."""
        self.recorder.finish(files, status)
        return self.recorder
