"""The executor of `cluster.workers: 0`: all stages run in this process, without Ray."""

from __future__ import annotations

import platform
from typing import Any

import torch

from pipeline.config import ClusterSettings
from pipeline.graph.run import Executor
from pipeline.graph.stage import IngestJob, Stage
from pipeline.graph.store import Store
from pipeline.graph.walk import Event, EventKind
from pipeline.launch.attempt import (
    Manifest,
    Progress,
    RunOnDriver,
    attempt_stage,
    run_ingest,
)
from pipeline.launch.queue import ReadyQueue, ReadyStage
from workers import dist, preemption
from workers.errors import UserError
from workers.loop import run_stage


class LocalExecutor(Executor):
    """Runs one stage at each poll, the one with the longest path behind it first."""

    def __init__(
        self, store: Store, cluster: ClusterSettings, run_on_driver: RunOnDriver, progress: Progress
    ):
        self.store = store
        self.run_on_driver = run_on_driver
        self.progress = progress
        self.stop_listening = preemption.listen()
        self.waiting = ReadyQueue()
        torch.set_num_threads(cluster.cpus_per_worker)
        if cluster.gpus_per_worker and not torch.cuda.is_available():
            raise UserError(
                f"cluster.gpus_per_worker is {cluster.gpus_per_worker}, but this machine "
                "has no GPU that torch can use; set it to 0 or run where there is one"
            )
        self.device = torch.device("cuda" if cluster.gpus_per_worker else "cpu")

    def submit(self, stage: Stage, depth: int) -> None:
        self.waiting.append(ReadyStage(depth, stage))

    def poll(self) -> list[Event]:
        """Run one stage. Raise `Preempted` when this process was told to leave."""
        if preemption.requested.is_set():
            raise preemption.Preempted
        stage = self.waiting.take()
        if stage is None:
            return []
        where = {"where": f"this process, {platform.node()}"}
        self.progress(Event(EventKind.STARTED, stage.id, body=where))
        return [attempt_stage(stage, lambda: self.run(stage), self.store.storage)]

    def run(self, stage: Stage) -> Manifest:
        """Run a stage and return its manifest."""
        if isinstance(stage.job, IngestJob):
            return run_ingest(self.store, stage, map, self.progress)
        if stage.job is None:
            return self.run_on_driver(stage)

        def report(body: dict[str, Any]) -> None:
            self.progress(Event(EventKind.PROGRESS, stage.id, body=body))

        return run_stage(stage.job, dist.Group(0, 1, self.device), report)

    def close(self) -> None:
        self.stop_listening()
