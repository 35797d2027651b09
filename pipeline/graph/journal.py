"""Record the progress of a run in two files: the event log, and the status.

The event log is the history of the run, without samples and with only some of the progress events.
The status file holds the current state, and other processes read it (see `live_status`).
"""

from __future__ import annotations

import os
import platform
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from copy import deepcopy
from typing import Any, NamedTuple, cast

from pipeline.graph.event_log import EventLog
from pipeline.graph.gpu_use import read_gpu_use
from pipeline.graph.live_status import (
    BUCKET_HEARTBEAT_S,
    HEARTBEAT_S,
    GpuFigure,
    LiveStage,
    LiveStatus,
    MachineSample,
    RunState,
    StageState,
    get_run_lock_key,
    write_status,
)
from pipeline.graph.stage import Graph
from pipeline.graph.store import Lookup, Store
from pipeline.graph.walk import Decision, DecisionKind, Event, EventKind, Walk
from workers import preemption
from workers.errors import UserError
from workers.storage.artifact import is_local
from workers.storage.lock import stage_lock
from workers.storage.secrets import redact

WRITE_S = 1.0  # minimum number of seconds between two writes of the status on a disk
BUCKET_WRITE_S = 20.0  # minimum number of seconds between two writes of the status in a bucket
# Maximum share of the time spent on writing the status. For large graphs, whose status is large, it
# makes the pauses between two writes longer.
MAX_LOAD = 0.02
PROGRESS_S = 30.0  # minimum number of seconds between two progress events of one stage
MAX_MESSAGE = 2000  # characters of a message in the status
# Kinds of events that `on_event` passes to `progress`, because they do not change the state of a
# stage in the walk. Samples and numbers of groups reach `progress` without `on_event`.
REPORTS = (EventKind.NOTE, EventKind.STARTED, EventKind.PROGRESS, EventKind.CHECKPOINT)


class TimeLeft(NamedTuple):
    """The remaining time of a run.

    Attributes:
        seconds: Estimated seconds until the run ends. None if no remaining stage can be estimated,
            or if a stage is late by more than the estimate.
        without: Number of stages that the estimate leaves out, because no stage of their kind has
            finished yet.
    """

    seconds: float | None
    without: int


EstimateTimeLeft = Callable[[Mapping[str, LiveStage]], TimeLeft]


class Journal:
    """Observes a run and records its progress. It is a `Watcher` of the run.

    A separate thread writes the status, so that the run does not wait for a write. If several
    drivers execute the same run, the driver that holds the lock of the run writes the status.

    Args:
        store: Store of the run.
        graph: The graph of the run.
        lookups: Look-up of each stage. The durations of reused results are taken from it.
        todo: Ids of the stages to run.
        command: Command that resumes the run.
        estimate: Estimates the remaining time.
    """

    def __init__(
        self,
        store: Store,
        graph: Graph,
        lookups: Mapping[str, Lookup],
        todo: set[str],
        command: str,
        estimate: EstimateTimeLeft,
    ):
        self.store = store
        self.estimate = estimate
        self.log = EventLog(store.storage, graph.name)
        now = time.time()
        stages: dict[str, LiveStage] = {}
        for stage in graph:
            stages[stage.id] = {"state": "waiting" if stage.id in todo else "reused"}
            wall_s = (lookups[stage.id].manifest or {}).get("wall_s")
            if stage.id not in todo and isinstance(wall_s, (int, float)):
                stages[stage.id]["wall_s"] = wall_s
        self.status: LiveStatus = {
            "name": graph.name,
            "state": "running",
            "host": platform.node(),
            "pid": os.getpid(),
            "started": now,
            "updated": now,
            "command": redact(command),
            "left_s": None,
            "left_without": 0,
            "stages": stages,
        }
        self.guard = threading.Lock()  # protects `status`: ingest stages report from threads
        self.writing = threading.Lock()  # allows one write at a time
        self.is_changed = True  # whether `status` has changed since the last write
        self.written_at = 0.0  # time of the last write, on the monotonic clock
        self.write_took_s = 0.0
        self.last_progress: dict[str, float] = {}  # time of the last progress event, by stage id
        self.ended = threading.Event()
        self.holding = ExitStack()  # releases the lock of the run
        self.has_lock = False
        self.thread = threading.Thread(target=self._keep_writing, name="status", daemon=True)
        with suppress(OSError, UserError):  # figures of an earlier start stay until a stage trains
            self.set_gpu_use(read_gpu_use(store.storage, graph.name))
        self.log.write(
            "run_started",
            run=graph.name,
            stages=len(graph),
            to_run=len(todo),
            host=platform.node(),
            pid=os.getpid(),
            command=command,
        )

    def take_up(self, lookups: Mapping[str, Lookup], todo: set[str]) -> None:
        """Update the waiting stages after ingest: stages that need not run become `reused`.

        Before ingest, the keys of stages that need the new data are unknown, so such stages wait
        even if they have results.

        Args:
            lookups: Look-up of each stage after ingest.
            todo: Ids of the stages to run.
        """
        with self.guard:
            for stage_id, stage in self.status["stages"].items():
                if stage["state"] == "waiting" and stage_id not in todo:
                    stage["state"] = "reused"
                    wall_s = (lookups[stage_id].manifest or {}).get("wall_s")
                    if isinstance(wall_s, (int, float)):
                        stage["wall_s"] = wall_s
            self.is_changed = True

    # ---- events ----------------------------------------------------------------------------------
    def progress(self, event: Event) -> None:
        """Record an event that does not change the state of a stage in the walk.

        The executor calls this method directly, also from threads.
        """
        match event.kind:
            case EventKind.NOTE:
                self.log.write("note", message=event.message)
            case EventKind.STARTED:
                where = str(event.body.get("where", ""))
                self._set(event.stage, "running", where=where)
                self.log.write(
                    "started",
                    stage=event.stage,
                    where=where,
                    nodes=event.body.get("nodes") or None,
                    gpus=event.body.get("gpus") or None,
                )
            case EventKind.PROGRESS:
                self._set_progress(event.stage, event.body)
            case EventKind.CHECKPOINT:
                self.log.write("checkpoint", stage=event.stage, **event.body)
            case EventKind.SAMPLE:
                self._add_sample(event.body)
            case EventKind.GROUPS:
                with self.guard:
                    self.status["groups"] = event.body
                    self.is_changed = True

    def on_event(self, walk: Walk, event: Event) -> None:
        """Record an event that the walk has applied."""
        if event.kind in REPORTS:
            self.progress(event)
        elif event.kind is EventKind.DONE:
            wall_s = float(event.body.get("wall_s") or 0.0)
            self._set(event.stage, "done", wall_s=wall_s)
            is_reused = bool(event.body.get("reused"))
            key = walk.graph[event.stage].key
            self.log.write(
                "done", stage=event.stage, key=key, wall_s=wall_s, reused=is_reused or None
            )
        else:
            origin = {name: event.body.get(name) for name in ("host", "rank", "log")}
            self.log.write(event.kind.value, stage=event.stage, message=event.message, **origin)

    def on_decision(self, walk: Walk, decision: Decision) -> None:
        """Record a decision about a stage."""
        reason = decision.reason
        match decision.kind:
            case DecisionKind.LAUNCH:
                self._set(decision.stage, "queued")
            case DecisionKind.FAIL:
                tries = walk.tries.get(decision.stage, 0)
                self._set(decision.stage, "failed", message=reason, tries=tries)
            case DecisionKind.BLOCK:
                self._set(decision.stage, "blocked", message=reason)
            case _:  # the stage will run again
                tries = walk.tries.get(decision.stage, 0)
                self._set(decision.stage, "waiting", message=reason, tries=tries)
        self.log.write(f"decision_{decision.kind.value}", stage=decision.stage, reason=reason)

    def _set(
        self,
        stage_id: str,
        state: StageState,
        where: str = "",
        message: str = "",
        wall_s: float | None = None,
        tries: int = 0,
    ) -> None:
        stage: LiveStage = {"state": state, "since": time.time()}
        if where:
            stage["where"] = where
        if message:
            stage["message"] = redact(message)[:MAX_MESSAGE]
        if wall_s is not None:
            stage["wall_s"] = wall_s
        with self.guard:
            before = self.status["stages"].get(stage_id, {})
            stage["tries"] = max(tries, before.get("tries", 0))
            self.status["stages"][stage_id] = stage
            self.is_changed = True

    @property
    def is_over(self) -> bool:
        """Whether no stage is waiting, queued or running."""
        with self.guard:
            states = {stage["state"] for stage in self.status["stages"].values()}
        return not states & {"waiting", "queued", "running"}

    def _set_progress(self, stage_id: str, body: dict[str, Any]) -> None:
        with self.guard:
            stage = self.status["stages"].get(stage_id)
            if stage is None or stage["state"] not in ("queued", "running"):
                return
            if stage["state"] == "queued":
                stage["state"] = "running"
                stage["since"] = time.time()
            stage["progress"] = body
            self.is_changed = True
        now = time.monotonic()
        if now - self.last_progress.get(stage_id, -PROGRESS_S) >= PROGRESS_S:
            self.last_progress[stage_id] = now
            self.log.write("progress", stage=stage_id, progress=body)

    def _add_sample(self, sample: dict[str, Any]) -> None:
        """Update the use of a machine.

        Each rank reports only its own GPU, so the GPUs of several samples are merged.
        """
        with self.guard:
            machines = self.status.setdefault("machines", {})
            before = machines.get(sample["node"], {"gpus": {}})
            gpus = {**before["gpus"], **sample["gpus"]}
            machines[sample["node"]] = cast(MachineSample, {**before, **sample, "gpus": gpus})
            self.is_changed = True

    def set_gpu_use(self, figures: list[GpuFigure]) -> None:
        """Set the GPU figures of the status. An empty list removes the entry."""
        with self.guard:
            if figures:
                self.status["gpu_use"] = figures
            else:
                self.status.pop("gpu_use", None)
            self.is_changed = True

    def snapshot(self) -> LiveStatus:
        """Return a copy of the current status."""
        with self.guard:
            return deepcopy(self.status)

    # ---- the status file -------------------------------------------------------------------------
    def start(self) -> None:
        """Write the first status, and start the thread that writes later ones."""
        self.save()
        self.thread.start()

    def end(self, state: RunState, message: str = "") -> None:
        """Write the last status, stop the thread, and release the lock of the run.

        Args:
            state: Final state of the run.
            message: Why the run failed.
        """
        self.ended.set()
        self.thread.join()
        with self.guard:
            self.status["state"] = state
            self.status["left_s"] = None
            if message:
                self.status["message"] = redact(message)[:MAX_MESSAGE]
        seconds = round(time.time() - self.status["started"], 3)
        self.log.write("run_ended", state=state, message=message, seconds=seconds)
        self.save()
        self.log.close()
        self.holding.close()

    def _keep_writing(self) -> None:
        on_disk = is_local(self.store.storage)
        write_s = WRITE_S if on_disk else BUCKET_WRITE_S
        heartbeat_s = HEARTBEAT_S if on_disk else BUCKET_HEARTBEAT_S
        while not self.ended.wait(max(write_s, self.write_took_s / MAX_LOAD)):
            is_due = time.monotonic() - self.written_at >= heartbeat_s
            if self.is_changed or is_due:
                self.save()

    def save(self) -> None:
        """Write the current status, if this driver holds the lock of the run, and the events.

        Errors while writing the status are ignored.
        """
        with self.writing:
            self._write()

    def _write(self) -> None:
        started = time.monotonic()
        self._take_lock()
        with self.guard:
            self.is_changed = False
            self.status["updated"] = time.time()
        status = self.snapshot()
        if status["state"] == "running":
            left = self.estimate(status["stages"])
            status["left_s"] = self.status["left_s"] = left.seconds
            status["left_without"] = self.status["left_without"] = left.without
        if self.has_lock:
            with suppress(OSError, UserError):
                write_status(self.store.storage, status)
        self.log.flush()
        self.written_at = time.monotonic()
        self.write_took_s = self.written_at - started

    def _take_lock(self) -> None:
        if self.has_lock:
            return
        key = get_run_lock_key(self.status["name"])
        with suppress(BlockingIOError, OSError):  # BlockingIOError: another driver holds the lock
            self.holding.enter_context(stage_lock(self.store.root, key, wait=False))
            self.has_lock = True


@contextmanager
def keep_journal(
    store: Store,
    graph: Graph,
    lookups: Mapping[str, Lookup],
    todo: set[str],
    command: str,
    estimate: EstimateTimeLeft,
) -> Iterator[Journal]:
    """Context manager that records a run and its final state. See `Journal` for the arguments."""
    journal = Journal(store, graph, lookups, todo, command, estimate)
    journal.start()
    try:
        yield journal
    except preemption.Preempted:
        journal.end("preempted")
        raise
    except KeyboardInterrupt:
        journal.end("interrupted")
        raise
    except BaseException as error:
        journal.end("failed", str(error) or type(error).__name__)
        raise
    stages = journal.status["stages"].values()
    is_whole = all(stage["state"] in ("done", "reused") for stage in stages)
    journal.end("finished" if is_whole else "stopped")
