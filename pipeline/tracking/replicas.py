"""Record a run with several seeds or class orders in MLflow.

A replica is the run for one seed and class order. The parent run has the report and the means. Each
replica is a child run with the record of a separate run, except for the config and the report.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from pipeline.graph.run_record import RunRecord
from pipeline.results.metrics import metrics_for
from pipeline.shell.console import print_to_stderr
from pipeline.tracking.mlflow_client import Point, describe_login_refusal, key_name, transient
from pipeline.tracking.outbox import Outbox
from pipeline.tracking.recorder import Log, Recorder
from pipeline.tracking.run_writer import RunIdentity, RunWriter, run_key
from workers.storage.artifact import Artifact, Manifest, join

if TYPE_CHECKING:
    from pipeline.config.settings import TrackingSettings
    from pipeline.graph.stage import Stage


class ReplicatedRecorder(Recorder):
    """Records a run with replicas. One thread (`outbox`) writes the records of all replicas.

    The parent run has the config, the report, and mean and deviation of each method. The record of
    a replica has the same key as that of a separate run, so a later separate run continues it.

    Args:
        settings: See `Recorder`.
        storage: See `Recorder`.
        records: Replica -> run record of the replica.
        log: See `Recorder`.
        remedy: See `Recorder`.
    """

    def __init__(
        self,
        settings: TrackingSettings,
        storage: str,
        records: Mapping[str, RunRecord],
        log: Log = print_to_stderr,
        remedy: str = "",
    ):
        super().__init__(settings, storage, log, remedy)
        self.records = records
        self.writers = {
            record["name"]: RunWriter(settings, storage, RunIdentity())
            for record in records.values()
        }
        self.stages_by_key: dict[str, list[tuple[str, str]]] = {}  # key -> (run, id of the stage)
        for record in records.values():
            for stage in record["stages"]:
                stages = self.stages_by_key.setdefault(stage["key"], [])
                stages.append((record["name"], stage["id"]))
        self.outbox = Outbox(
            "MLflow", self._answers, self._forget, transient, log, describe_login_refusal
        )

    def _start(self, record: RunRecord, graph_svg: str, watch: bool) -> None:
        self.writer.identity = _make_identity(record)
        shared = [stage for stage in record["stages"] if stage["step"] == "ingest"]
        super()._start({**record, "stages": shared}, graph_svg, watch)
        for replica in self.records.values():
            name = replica["name"]
            self.writers[name].begin(replica)
            self._put(partial(self._open, name))
            for stage in replica["stages"]:
                if stage["step"] != "report":
                    self._put(partial(self._record_stage, name, stage["id"]))

    def _stage(self, stage: Stage, manifest: Mapping[str, Any] | None) -> None:
        """Record a finished stage in each replica that contains the stage."""
        for name, stage_id in self.stages_by_key.get(stage.key, []):
            if manifest and "attempt" in manifest:
                root = join(self.storage, "stages")
                fields = cast(Manifest, dict(manifest))
                self.writers[name].artifacts[stage_id] = Artifact(root, stage.key, fields)
            self._put(partial(self._record_stage, name, stage_id))
        if stage.id in self.writer.stages:
            super()._stage(stage, manifest)

    def _finish(self, files: Mapping[str, bytes], status: str) -> None:
        """Add the report and the means, close the runs and wait until everything is written."""
        for name in self.writers:
            self._put(partial(self._finish_replica, name, status))
        self._put(self._summarise)
        super()._finish(files, status)

    def make_writer(self, run_name: str) -> RunWriter:
        return self.writers.get(run_name, self.writer)

    @property
    def run_ids(self) -> list[str]:
        ids = super().run_ids
        for writer in self.writers.values():
            if writer.location is not None:
                ids += [writer.location.run, *writer.location.methods]
        return ids

    # ---- called by the outbox's thread -----------------------------------------------------------
    def _forget(self) -> None:
        self.writer.forget()
        for writer in self.writers.values():
            writer.forget()

    def _open(self, name: str) -> RunWriter:
        """Return the writer of a replica. Its runs are children of the parent run."""
        writer = self.writers[name]
        writer.client = self.writer.ready()
        writer.identity = replace(writer.identity, parent=self.writer.parent.info.run_id)
        writer.ready()
        return writer

    def _record_stage(self, name: str, stage_id: str) -> None:
        self._open(name).stage(stage_id)

    def _finish_replica(self, name: str, status: str) -> None:
        self._open(name).finish({}, status)

    def _summarise(self) -> None:
        """Log mean and standard deviation over the replicas to the parent run."""
        from pipeline.report.replicas import compare_replicas  # imports torch and matplotlib
        from pipeline.results.tables import RunTables

        tables = RunTables.load_all(self.storage, self.records)
        points = []
        for entry in compare_replicas(self.writer.record["name"], tables).entries:
            for metric in metrics_for("mlflow_replicas"):
                spread = entry.spread(metric.name)
                for kind, value in (("mean", spread.mean), ("sd", spread.deviation)):
                    if value == value:  # NaN for an unfinished run
                        name = key_name(f"{metric.name}_{kind}/{entry.label}")
                        points.append(Point(name, value, 0, 0))
        self.writer.ready().log_points(self.writer.parent, points)


def _make_identity(record: RunRecord) -> RunIdentity:
    """Return the key, the tags and the description of the parent run."""
    methods = dict.fromkeys(s["method"] or s["label"] for s in record["stages"] if s["label"])
    replicas = record.get("replicas", {})
    seeds = record["config"].get("seeds") or [record["config"].get("seed", "")]
    note = (
        f"Run **{record['name']}**: {len(replicas)} replicas, {', '.join(replicas)}. The artifact "
        "`report.html` has means, deviations and intervals over them. There is one child run per "
        "replica, below each one run per method, and then one per task."
    )
    tags = {
        "methods": ", ".join(map(str, methods)),
        "seed": ", ".join(map(str, seeds)),
        "replicas": ", ".join(replicas),
    }
    return RunIdentity(key=run_key(record), tags=tags, note=note)
