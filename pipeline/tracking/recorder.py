"""Record a run in MLflow during the run, in a separate thread.

Only the driver writes. No error of MLflow stops a run. While MLflow does not answer, the actions
that write the record wait in a queue (`Outbox`). Any other error drops one action and becomes one
sentence in `Recorder.warnings`.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from pipeline.config.invocation import this_command
from pipeline.config.text import format_count
from pipeline.graph.run_record import RunRecord
from pipeline.graph.walk import Decision, Event, EventKind, Walk
from pipeline.shell.console import print_to_stderr
from pipeline.tracking.mlflow_client import (
    MlflowClientAdapter,
    SystemMetrics,
    describe_login_refusal,
    transient,
)
from pipeline.tracking.outbox import Outbox
from pipeline.tracking.run_writer import RunIdentity, RunWriter
from pipeline.tracking.ui import format_record_line, get_server_url, make_accuracies_link
from workers import preemption
from workers.errors import UserError, require_package
from workers.storage.artifact import Artifact, Manifest, join

if TYPE_CHECKING:
    from pipeline.config.settings import TrackingSettings
    from pipeline.graph.stage import Graph, Stage
    from pipeline.tracking.mlflow_client import Point

STOPPED_PATIENCE_S = 5.0  # upper limit of `tracking.patience_s` if this process must stop
SEND_S = 30.0  # seconds between two calls with samples of the workers' machines
MAX_SAMPLES = 20_000  # maximal number of queued samples; the oldest are dropped
Log = Callable[[str], None]
WriteBundle = Callable[[str, str], None]  # writes a bundle: (label of a method, folder)


class Recorder:
    """Records one run: call `start`, `stage` for each finished stage, then `finish`.

    A recorder is also a `Watcher` of a run, and then calls `stage` itself. Only `finish` waits for
    MLflow. `start` also records the stages that finished earlier, so a run without missing stages
    has a complete record. Without tracking (`settings.enabled`), all methods do nothing.

    Args:
        settings: Settings of tracking.
        storage: Folder or URI of the storage.
        log: Function that prints a message if MLflow stops answering, and when it answers again.
        remedy: Command that writes the record again, for messages; "": `report CONFIG`.
        identity: Tags and parameters of the runs in MLflow. None: those of a plain run.
    """

    def __init__(
        self,
        settings: TrackingSettings,
        storage: str,
        log: Log = print_to_stderr,
        remedy: str = "",
        identity: RunIdentity | None = None,
    ):
        if settings.enabled:
            require_package("mlflow", "the record of a run", "set tracking=off")
        self.settings = settings
        self.storage = storage
        self.remedy = remedy or f"{this_command()} report CONFIG"
        self.writer = RunWriter(settings, storage, identity or RunIdentity())
        self.outbox = Outbox(
            "MLflow", self._answers, self.writer.forget, transient, log, describe_login_refusal
        )
        self.system_metrics: SystemMetrics | None = None
        # (Unix time in seconds, sample of a worker's machine)
        self.samples: deque[tuple[float, Mapping[str, Any]]] = deque(maxlen=MAX_SAMPLES)
        self.samples_sent_at = 0.0  # on the monotonic clock

    @property
    def warnings(self) -> list[str]:
        """Messages about missing parts of the record."""
        return self.outbox.warnings

    def start(self, record: RunRecord, graph_svg: str = "", watch: bool = False) -> None:
        """Find or create the runs of this graph in MLflow, and record the finished stages.

        Args:
            record: The run record.
            graph_svg: Picture of the graph as SVG; "": none.
            watch: Whether the run is executed now. Then `tracking.system_metrics` samples this
                machine.
        """
        if self.settings.enabled:
            self._start(record, graph_svg, watch)

    def _start(self, record: RunRecord, graph_svg: str, watch: bool) -> None:
        self.writer.begin(record, graph_svg)
        self._put(self.writer.ready)
        if watch and self.settings.system_metrics:
            self._put(self._start_sampling)
        for stage in record["stages"]:
            if stage["step"] != "report":
                self._put(partial(self.writer.stage, stage["id"]))

    def stage(self, stage: Stage, manifest: Mapping[str, Any] | None = None) -> None:
        """Record a stage that has just finished.

        Args:
            stage: The stage.
            manifest: Manifest of the result. If it is missing or has no `attempt`, the manifest is
                read from the store.
        """
        if self.writer.record and stage.step != "report":
            self._stage(stage, manifest)

    def _stage(self, stage: Stage, manifest: Mapping[str, Any] | None) -> None:
        if manifest and "attempt" in manifest:
            root = join(self.storage, "stages")
            fields = cast(Manifest, dict(manifest))
            self.writer.artifacts[stage.id] = Artifact(root, stage.key, fields)
        self._put(partial(self.writer.stage, stage.id))

    def analysed(self, files: Mapping[str, bytes], points: Mapping[str, Iterable[Point]]) -> None:
        """Add the measurements of the command `analyse`.

        Args:
            files: Name -> content of files for the run of the graph, in the folder `analysis/`.
            points: Label of a method -> points for the run of the method.
        """
        if self.writer.record:
            self._put(partial(self.writer.record_analysis, files, points))

    def models(self, graph: Graph, write_bundle: WriteBundle) -> None:
        """Log each method of a finished run as a model that serves all tasks (`tracking.models`).

        The model is registered with the name RUN, or RUN-LABEL if there are several methods.

        Args:
            graph: Graph of the run.
            write_bundle: Function that writes the bundle of the method with a label into a folder.
        """
        if not self.settings.models or not self.writer.record:
            return
        evaluations = [stage for stage in graph if stage.step == "evaluate"]
        writer = self.make_writer(graph.name)
        for label in dict.fromkeys(stage.method for stage in evaluations if stage.method):
            self._put(partial(self._log_model, writer, graph.name, label, write_bundle))

    def make_writer(self, run_name: str) -> RunWriter:
        """Return the writer of the run with this name. A run with replicas has several writers."""
        return self.writer

    def _log_model(
        self, writer: RunWriter, run_name: str, label: str, write_bundle: WriteBundle
    ) -> None:
        from pipeline.tracking import publish

        client = writer.ready()
        methods = writer.methods
        name = f"{run_name}-{label}" if len(methods) > 1 else run_name
        with tempfile.TemporaryDirectory(prefix="accrete-") as folder:
            bundle = join(folder, "bundle")
            write_bundle(label, bundle)
            published = publish.log(client.uri, methods[label], bundle, name)
        if published.warning:
            self.outbox.warn(published.warning)

    def finish(self, files: Mapping[str, bytes], status: str = "FINISHED") -> None:
        """Add the files of the report, close the runs and wait until everything is written.

        If the server does not answer, the wait is at most `tracking.patience_s` seconds.

        Args:
            files: Name -> content of the files of the report.
            status: MLflow's status of the runs: FINISHED, FAILED or KILLED.
        """
        if self.writer.record:
            self._finish(files, status)

    def _finish(self, files: Mapping[str, bytes], status: str) -> None:
        self._put(self._stop_sampling)
        if self.samples:
            self._put(self._send_samples)
        self._put(partial(self.writer.finish, files, status))
        content = f"the record of run {self.writer.record['name']!r}"
        close(self.outbox, self.settings.patience_s, content, self.remedy)

    def sample(self, sample: Mapping[str, Any]) -> None:
        """Record a `MachineSample` of a worker's machine, if `tracking.system_metrics` is set.

        Samples are sent together every SEND_S seconds. While MLflow does not answer, the last
        MAX_SAMPLES samples are kept.
        """
        if not self.settings.enabled or not self.settings.system_metrics or not self.writer.record:
            return
        self.samples.append((time.time(), sample))
        if time.monotonic() - self.samples_sent_at >= SEND_S:
            self.samples_sent_at = time.monotonic()
            self._put(self._send_samples)

    def _send_samples(self) -> None:
        from pipeline.tracking.points import machine_points  # imports torch and matplotlib

        client = self.writer.ready()
        parent = self.writer.parent
        samples = [*self.samples]
        client.log_points(parent, machine_points(samples, parent.info.start_time / 1000))
        for _ in samples:
            self.samples.popleft()

    # ---- events of the run -----------------------------------------------------------------------
    def on_event(self, walk: Walk, event: Event) -> None:
        """Record a finished stage. This does not wait for MLflow."""
        if event.kind is EventKind.DONE:
            self.stage(walk.graph[event.stage], event.body)

    def on_decision(self, walk: Walk, decision: Decision) -> None:
        """Do nothing: only results are recorded, not decisions."""

    def progress(self, event: Event) -> None:
        """Record a sample of a worker's machine. Other events are ignored."""
        if event.kind is EventKind.SAMPLE:
            self.sample(event.body)

    # ---- location and state of the record --------------------------------------------------------
    def describe_rest(self) -> str:
        """Describe the unwritten part of the record briefly."""
        return f"recording in MLflow, {format_count(len(self.outbox.waiting), 'part')} left"

    @property
    def run_ids(self) -> list[str]:
        """Ids of the runs in MLflow of the graph and of the methods; empty before they exist."""
        location = self.writer.location
        return [] if location is None else [location.run, *location.methods]

    def links(self, base: str = "") -> list[str]:
        """Return lines with the location of the record, to print for the user.

        Args:
            base: URL of the pages of MLflow's server; "": derived from the tracking URI. Without a
                server, a line has the command that starts one.
        """
        location = self.writer.location
        if location is None:
            return []
        base = base or get_server_url(location.uri)
        lines = [format_record_line(base, location.experiment, location.run, self.storage)]
        if base and len(location.methods) > 1:
            link = make_accuracies_link(base, location.experiment, location.methods)
            lines.append(f"methods side by side: {link}")
        return lines

    def _put(self, action: Callable[[], object]) -> None:
        def act() -> None:
            action()
            metrics = self.system_metrics
            # MLflow's thread ends if MLflow does not answer, so start it again
            if metrics and not metrics.alive and action != self._stop_sampling:
                self._start_sampling()

        self.outbox.put(act)

    def _answers(self) -> bool:
        return is_answering(self.settings, self.storage)

    # ---- system metrics of this machine ----------------------------------------------------------
    def _start_sampling(self) -> None:
        client = self.writer.ready()
        if self.writer.parent.info.status != "RUNNING":
            return
        try:
            self.system_metrics = SystemMetrics(self.writer.parent, client.uri)
        except UserError as error:
            self.outbox.warn(str(error))

    def _stop_sampling(self) -> None:
        metrics = self.system_metrics
        self.system_metrics = None
        if metrics:
            metrics.end()


def is_answering(settings: TrackingSettings, storage: str) -> bool:
    """Return whether MLflow answers, even if it refuses the request."""
    try:
        MlflowClientAdapter(storage, settings)
    except Exception as error:
        return not transient(error)
    return True


def close(outbox: Outbox, patience_s: float, content: str, remedy: str) -> None:
    """Wait for an outbox, and warn if some content was not written.

    Args:
        outbox: The outbox.
        patience_s: Maximum wait in seconds for a server that does not answer. It is reduced to
            STOPPED_PATIENCE_S if this process was interrupted or preempted, because it must end
            soon.
        content: Description of the content, for the warning.
        remedy: Command that writes the content again, for the warning.
    """
    if isinstance(sys.exception(), (preemption.Preempted, KeyboardInterrupt)):
        patience_s = min(patience_s, STOPPED_PATIENCE_S)
    if outbox.close(patience_s):
        outbox.warn(
            f"MLflow did not answer for {patience_s:.0f} s at the end: {content} is incomplete; "
            f"when MLflow is back, {remedy} writes it"
        )
