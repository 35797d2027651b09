"""The executor for `cluster.workers: 0`: all stages run in this process, without Ray."""

from __future__ import annotations

import platform
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch

from pipeline.config.settings import ClusterSettings
from pipeline.graph.live_status import MachineSample
from pipeline.graph.run import Executor
from pipeline.graph.stage import IngestJob, Stage
from pipeline.graph.store import Store
from pipeline.graph.walk import Event, EventKind
from pipeline.launch.attempt import (
    Manifest,
    Progress,
    RunOnDriver,
    attempt_stage,
    progress_event,
    run_ingest,
)
from pipeline.launch.limits import Deadline
from pipeline.launch.machine import find_gpu_number, sampling
from pipeline.launch.queue import ReadyQueue, ReadyStage
from workers import dist, preemption
from workers.data import accelerator
from workers.errors import UserError
from workers.loop import run_stage


class LocalExecutor(Executor):
    """Runs one stage in each call of `poll`, and returns when the stage has ended.

    Evaluations run first, so that an accuracy is known as soon as its task is trained. Of the other
    stages, the one with the longest path of descendants runs first.

    Args:
        store: Store of the results.
        cluster: Cluster settings of the config.
        run_on_driver: Runs a stage without a job (the report).
        progress: Called with events that do not change the state of a stage.
        clock: Returns the time in seconds, from an arbitrary start; for time limits.
        sample_s: Seconds between two samples of the use of this machine (0: none).
    """

    def __init__(
        self,
        store: Store,
        cluster: ClusterSettings,
        run_on_driver: RunOnDriver,
        progress: Progress,
        clock: Callable[[], float] = time.monotonic,
        sample_s: float = 0.0,
    ):
        self.store = store
        self.run_on_driver = run_on_driver
        self.progress = progress
        check_local_gpus(cluster)
        self.stop_listening = preemption.listen()
        self.waiting = ReadyQueue()
        self.cluster = cluster
        self.clock = clock
        self.sampling = ExitStack()
        device = accelerator.make_device(cluster.of_any_step().gpus_per_worker)
        self.sampling.enter_context(sampling(device, self._post_sample, sample_s))

    def _post_sample(self, sample: MachineSample) -> None:
        self.progress(Event(EventKind.SAMPLE, "", body=dict(sample)))

    def submit(self, stage: Stage, depth: int) -> None:
        """Queue a stage."""
        # One process runs all stages, so the order does not change the time of the run.
        is_evaluation = stage.step == "evaluate"
        self.waiting.append(ReadyStage(sys.maxsize if is_evaluation else depth, stage))

    def poll(self) -> list[Event]:
        """Run one stage and return the event with its outcome; [] if no stage waits.

        Raises:
            Preempted: If this process was preempted before the stage.
        """
        if preemption.requested.is_set():
            raise preemption.Preempted
        stage = self.waiting.take()
        if stage is None:
            return []
        self.progress(Event(EventKind.STARTED, stage.id, body=self._describe_place(stage)))
        return [attempt_stage(stage, lambda: self.run(stage), self.store.storage)]

    def _describe_place(self, stage: Stage) -> dict[str, Any]:
        """Return the place where a stage runs, as the body of an event."""
        node = platform.node()
        where = f"this process, {node}"
        gpus = []
        share = self.cluster.of_step(stage.step).gpus_per_worker
        if share and stage.job is not None:
            gpus = [find_gpu_number(accelerator.make_device(share))]
            where += f" (GPU {gpus[0]})"
        return {"where": where, "nodes": [node], "gpus": gpus}

    def run(self, stage: Stage) -> Manifest:
        """Run a stage and return its manifest.

        Raises:
            StageTimeout: If the stage reports its progress after its time limit.
        """
        deadline = Deadline(self.cluster, stage.step, self.clock)
        if isinstance(stage.job, IngestJob):
            return run_ingest(self.store, stage, map, self.progress, deadline)
        if stage.job is None:
            return self.run_on_driver(stage)

        def report(body: dict[str, Any]) -> None:
            deadline.check()
            self.progress(progress_event(stage.id, body))

        settings = self.cluster.of_step(stage.step)
        torch.set_num_threads(settings.cpus_per_worker)
        device = accelerator.make_device(settings.gpus_per_worker)
        accelerator.limit_memory(device, settings.gpus_per_worker)
        return run_stage(stage.job, dist.Group(0, 1, device), report)

    def close(self) -> None:
        """Stop sampling and listening for signals."""
        self.sampling.close()
        self.stop_listening()


def check_local_gpus(cluster: ClusterSettings) -> None:
    """Raise `UserError` if stages are configured for a GPU and this machine has none."""
    if accelerator.is_available():
        return
    settings: dict[str, float | None] = {"gpus_per_worker": cluster.gpus_per_worker}
    settings |= {f"stages.{step}.gpus": limits.gpus for step, limits in cluster.stages.items()}
    for name, gpus in settings.items():
        if gpus:
            raise UserError(
                f"cluster.{name} is {gpus}, but this machine has no GPU that torch can use; set it "
                "to 0, or use a machine with a GPU"
            )
