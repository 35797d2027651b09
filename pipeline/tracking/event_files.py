"""Writes the curves of a run as TensorBoard event files, in a thread of its own.

They are the points that MLflow gets, from the same `RunWriter`. Event files cannot be searched for
what they hold, so the files of a run are written anew each time that its record is.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from pipeline.config import TrackingSettings
from pipeline.graph.run_record import RunRecord
from pipeline.tracking.mlflow_client import InputData, Point
from pipeline.tracking.outbox import Outbox
from pipeline.tracking.run_writer import RunIdentity, RunWriter
from workers.errors import require_package
from workers.storage.artifact import join

if TYPE_CHECKING:
    from mlflow.entities import Run

FOLDER = "tensorboard"  # in the folder of a run
SUFFIX = "accrete"  # of the names of event files, so that no other program's are deleted
FILE_VERSION = "brain.Event:2"


@dataclass
class EventRunInfo:
    """What `RunWriter` reads of a run. run_id: the folder of its event files."""

    run_id: str
    status: str = "RUNNING"


@dataclass
class EventRunData:
    """The tags of a run, which are written nowhere."""

    tags: dict[str, str]
    params: dict[str, str] = field(default_factory=dict)


@dataclass
class EventRun:
    """A folder of event files: of the graph, of a method, or of a task."""

    info: EventRunInfo
    data: EventRunData


class EventFiles:
    """Writes the points of runs into folders: LABEL for a method, LABEL/TASK for a task.

    It has the methods of MLflow's client adapter that `RunWriter` calls. Parameters, data sets and
    files have no event files. Creating it deletes the event files of earlier records.
    """

    experiment = ""

    def __init__(self, folder: str):
        self.uri = folder
        self.start_s = time.time()
        self.files: dict[str, Any] = {}  # open ones, by folder
        self.file_count = 0
        self.written: set[tuple[str, str, int, float]] = set()  # (folder, metric, step, value)
        for path in Path(folder).rglob(f"events.out.tfevents.*.{SUFFIX}.*"):
            path.unlink()

    def find(self, tags: Mapping[str, str]) -> list[Run]:
        """Return no runs: all points are written anew."""
        return []

    def create(self, name: str, tags: Mapping[str, str]) -> Run:
        """Return the run for the tags `label` and `task`."""
        parts = [part for part in (tags.get("label"), tags.get("task")) if part]
        folder = os.path.join(self.uri, *parts)
        run = EventRun(EventRunInfo(folder), EventRunData(dict(tags)))
        return cast("Run", run)  # it has what `RunWriter` reads

    def reopen(self, run: Run) -> None:
        """Mark a run as running again."""
        run.info.status = "RUNNING"

    def close(self, run: Run, status: str) -> None:
        """End a run; a later point of it goes into another file."""
        run.info.status = status
        self._close_file(run.info.run_id)

    def tag(self, run: Run, tags: Mapping[str, str]) -> None:
        """Set tags."""
        run.data.tags.update(tags)

    def log_points(
        self, run: Run, points: Iterable[Point], tags: Mapping[str, str] | None = None
    ) -> None:
        """Write the points that were not written before, and set tags."""
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.proto.summary_pb2 import Summary

        folder = run.info.run_id
        new_points = []
        for point in points:
            entry = (folder, point.name, point.step, point.value)
            if entry not in self.written:
                self.written.add(entry)
                new_points.append(point)
        for point in new_points:
            value = Summary.Value(tag=point.name, simple_value=point.value)
            event = Event(
                wall_time=self.start_s + point.after_s,
                step=point.step,
                summary=Summary(value=[value]),
            )
            self._file(folder).write(event.SerializeToString())
        if new_points:
            self._file(folder).flush()
        run.data.tags.update(tags or {})

    def log_params(self, run: Run, values: Mapping[str, Any]) -> None:
        """Do nothing: event files get curves only."""

    def log_inputs(self, run: Run, inputs: Iterable[InputData]) -> None:
        """Do nothing: event files get curves only."""

    def log_files(self, run: Run, files: Mapping[str, bytes]) -> None:
        """Do nothing: event files get curves only."""

    def close_all(self) -> None:
        """Close all files."""
        for folder in list(self.files):
            self._close_file(folder)

    def _file(self, folder: str) -> Any:
        """Return the open event file of a folder, a new one when there is none."""
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.record_writer import RecordWriter

        if folder not in self.files:
            os.makedirs(folder, exist_ok=True)
            # TensorBoard reads the files of a folder in the order of their names
            name = f"events.out.tfevents.{int(self.start_s)}.{SUFFIX}.{self.file_count:06d}"
            self.file_count += 1
            self.files[folder] = RecordWriter(os.path.join(folder, name))
            version = Event(wall_time=self.start_s, file_version=FILE_VERSION)
            self.files[folder].write(version.SerializeToString())
        return self.files[folder]

    def _close_file(self, folder: str) -> None:
        file = self.files.pop(folder, None)
        if file is not None:
            file.close()


class EventRecorder:
    """Writes the event files of a run: call `start`, `stage` for each stage that finishes, then
    `finish`. Only `finish` waits, and no error stops a run."""

    def __init__(self, settings: TrackingSettings, storage: str):
        require_package("tensorboardX", "tracking.tensorboard", "set tracking.tensorboard to false")
        self.settings = settings
        self.storage = storage
        self.folder = ""  # of the event files; empty before `start`
        self.writers: list[RunWriter] = []
        self.writers_by_key: dict[str, list[tuple[RunWriter, str]]] = {}  # -> ids of its stages
        self.outbox = Outbox("TensorBoard", lambda: True, _forget_nothing, _is_final, _say_nothing)

    @property
    def warnings(self) -> list[str]:
        """Sentences on what is not in the event files."""
        return self.outbox.warnings

    def start(self, name: str, records: Mapping[str, RunRecord]) -> None:
        """Delete the event files of a run and write those of the stages that are finished.

        records: the run record by folder: "" for the run itself, or one for each of its replicas.
        """
        root = self.storage.removeprefix("file://")
        self.folder = join(root, "runs", name, FOLDER)
        for folder, record in records.items():
            open_files = partial(EventFiles, join(self.folder, folder).rstrip("/"))
            identity = RunIdentity(pictures=False)
            writer = RunWriter(self.settings, self.storage, identity, open_files)
            self.writers.append(writer)
            writer.begin(record)
            for stage in record["stages"]:
                if stage["step"] != "report":
                    self.writers_by_key.setdefault(stage["key"], []).append((writer, stage["id"]))
                    self.outbox.put(partial(writer.stage, stage["id"]))

    def stage(self, key: str) -> None:
        """Write the points of a stage that has just finished."""
        for writer, stage_id in self.writers_by_key.get(key, []):
            self.outbox.put(partial(writer.stage, stage_id))

    def finish(self) -> None:
        """Wait until everything is written, and close the files."""
        self.outbox.close(0)
        for writer in self.writers:
            if isinstance(writer.client, EventFiles):
                writer.client.close_all()


def _forget_nothing() -> None:
    """Nothing is known of a folder that a failed action could have made wrong."""


def _is_final(error: Exception) -> bool:
    """Return False: an error of a disk does not pass."""
    return False


def _say_nothing(text: str) -> None:
    """A folder never stops answering."""
