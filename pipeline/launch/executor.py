"""A segment becomes StageJobs on Ray Train: warm worker groups pull stages from a small queue; or
all runs in this process."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch

from pipeline.config import ClusterSettings
from pipeline.data import ingest
from pipeline.graph import failures, raw_data
from pipeline.graph.retries import RetryPolicy
from pipeline.graph.run import Executor
from pipeline.graph.stage import Graph, IngestJob, Stage
from pipeline.graph.store import Store
from pipeline.graph.walk import Event, EventKind
from pipeline.launch.cluster import resources_per_worker, where_ray_writes
from pipeline.launch.queue import ReadyQueue, ReadyStage
from workers import dist, preemption
from workers.errors import DamagedArtifact, UserError
from workers.loop import run_stage
from workers.storage.artifact import Artifact, delete_dir, join, parent
from workers.storage.lock import stage_lock

QUEUE_POLL_S = 0.02  # how often an idle group asks for a stage
IDLE_S = 10.0  # how long the ranks of an idle group wait for each other at a time
NO_ROOM = "no room"
Local = Callable[[Stage], dict[str, Any]]  # stages that the driver runs itself (the report)


class LocalExecutor:
    """`cluster.workers: 0`: every stage runs here, one after the other, without Ray."""

    def __init__(
        self,
        store: Store,
        cluster: ClusterSettings,
        local: Local,
        progress: Callable[[Event], None],
    ):
        self.store, self.local, self.progress = store, local, progress
        self.listening = preemption.listen()
        self.waiting = ReadyQueue()
        self.events: list[Event] = []
        torch.set_num_threads(cluster.cpus_per_worker)
        if cluster.gpus_per_worker and not torch.cuda.is_available():
            raise UserError(
                f"cluster.gpus_per_worker is {cluster.gpus_per_worker}, but this machine has no "
                "GPU that torch can use; set it to 0 "
                "or run where there is one"
            )
        self.device = torch.device("cuda" if cluster.gpus_per_worker else "cpu")

    def submit(self, stage: Stage, depth: int) -> None:
        self.waiting.append(ReadyStage(depth, stage))

    def poll(self) -> list[Event]:
        stage = None if preemption.requested.is_set() else self.waiting.take()
        if stage is not None:
            self.events.append(attempt(stage, lambda: self._run(stage), self.store.storage))
        elif preemption.requested.is_set():
            raise preemption.Preempted
        events, self.events = self.events, []
        return events

    def _run(self, stage: Stage) -> dict[str, Any]:
        if isinstance(stage.job, IngestJob):
            return run_ingest(self.store, stage, map, self.progress)
        if stage.job is None:
            return self.local(stage)
        return run_stage(
            stage.job,
            dist.Group(0, 1, self.device),
            lambda body: self.progress(Event(EventKind.PROGRESS, stage.id, body=body)),
        )

    def close(self) -> None:
        self.listening()


def attempt(
    stage: Stage, run: Callable[[], dict[str, Any]], storage: str, group: dist.Group | None = None
) -> Event:
    """Runs a stage and turns whatever happens into an event. What nobody foresaw leaves its
    traceback in `storage`."""
    try:
        return Event(EventKind.DONE, stage.id, body=run())
    except preemption.Preempted:
        return Event(EventKind.MOVED, stage.id, "it is told to leave, its state is saved")
    except DamagedArtifact as error:
        return Event(EventKind.DAMAGED, stage.id, str(error), key=error.key)
    except UserError as error:
        return Event(EventKind.FAILED, stage.id, str(error), final=True)
    except Exception as error:
        if "/gloo/" in str(error) or isinstance(error, torch.distributed.DistError):
            # what the others hear of it
            return Event(EventKind.LOST, stage.id, "a worker of its group is gone")
        group = group or dist.Group()
        trace = failures.keep(storage, stage.id, stage.key, error, group.rank, group.world)
        return Event(EventKind.FAILED, stage.id, f"{failures.describe(error)}; traceback: {trace}")


def run_ingest(
    store: Store,
    stage: Stage,
    map_fn: Callable[..., Iterable[Any]],
    progress: Callable[[Event], None],
) -> dict[str, Any]:
    started = time.monotonic()
    extra = {"stage": stage.id, "step": "ingest"}
    with stage_lock(store.root, stage.key):
        if found := Artifact.open(store.root, stage.key):
            return {**found.manifest, "reused": True}
        manifest = ingest.ingest(
            stage.job.card,
            store.root,
            stage.key,
            map_fn,
            extra,
            lambda body: progress(Event(EventKind.PROGRESS, stage.id, body=body)),
        )
        raw_data.ingested(store, stage.job.card, stage.inputs["source"], manifest["raw_content"])
    return {**manifest, "wall_s": round(time.monotonic() - started, 3)}


def executor(
    store: Store,
    cluster: ClusterSettings,
    graph: Graph,
    todo: set[str],
    progress: Callable[[Event], None],
    local: Local,
) -> Executor:
    """What runs the stages `todo`: this process, or worker groups on Ray."""
    if cluster.workers == 0:
        return LocalExecutor(store, cluster, local, progress)
    from pipeline.launch.groups import RayExecutor

    return RayExecutor(store, cluster, local, progress, width_of(graph, todo))


def width_of(graph: Graph, todo: set[str]) -> int:
    """Most stages that may run side by side: the widest level of the stages to run."""
    depth: dict[str, int] = {}
    for stage in graph:
        if stage.id in todo:
            depth[stage.id] = max((depth[p] + 1 for p in stage.parents if p in depth), default=0)
    return max(Counter(depth.values()).values(), default=1)


# ---- Ray -----------------------------------------------------------------------------------------
def train_loop_per_worker(config: dict[str, Any]) -> None:
    """What every rank of a worker group runs: stages from the queue until it is closed, or the
    group is dismissed."""
    import ray
    import ray.train

    context = ray.train.get_context()
    rank, world = context.get_world_rank(), context.get_world_size()
    device = torch.device("cpu")
    if config["gpu"]:
        from ray.train.torch import get_device

        device = get_device()
    torch.set_num_threads(config["threads"])
    group, queue, index = dist.Group(rank, world, device), config["queue"], config["group"]
    places = group.gather(ray.get_runtime_context().get_node_id())
    if rank == 0:
        ray.get(queue.joined.remote(index, places, ray.util.get_current_placement_group()))
    while True:
        stage: Any = None
        until = time.monotonic() + IDLE_S
        while rank == 0 and stage is None and time.monotonic() < until:
            stage = ray.get(queue.next.remote(index))
            if stage is None:
                time.sleep(QUEUE_POLL_S)
        # None after IDLE_S: the other ranks wait in a collective, which has a timeout
        stage = group.share(stage)
        if stage is None:
            continue
        if stage == "stop":
            return
        event = attempt(
            stage,
            lambda stage=stage: run_stage(
                stage.job, group, ProgressReporter(ray, queue, index, stage)
            ),  # type: ignore[misc]
            parent(stage.job.root),
            group,
        )
        if rank == 0 or event.kind not in (EventKind.DONE, EventKind.MOVED):
            ray.get(queue.post.remote(index, event))
        if event.kind is EventKind.MOVED:
            return
        if event.kind is not EventKind.DONE and world > 1:
            # the other ranks may wait inside a collective: the group is started anew
            raise RuntimeError(event.message)


class ProgressReporter:
    """A stage's reports on their way to the queue. Whether the group is to leave comes back as the
    answer to the one before: nobody waits."""

    def __init__(self, ray: Any, queue: Any, index: int, stage: Stage):
        self.ray, self.queue, self.index, self.stage = ray, queue, index, stage
        self.answer: Any = None

    def __call__(self, body: dict[str, Any]) -> None:
        if (
            self.answer is not None
            and self.ray.wait([self.answer], timeout=0)[0]
            and self.ray.get(self.answer)
        ):
            preemption.requested.set()
        self.answer = self.queue.post.remote(
            self.index, Event(EventKind.PROGRESS, self.stage.id, body=body)
        )


def trainer_class() -> Any:
    """Ray's, without the actor that gives back what a killed controller had reserved: where the
    cluster has no dashboard it never hears of the end, and stays for ever. Our queue gives it back
    instead."""
    from ray.train.torch import TorchTrainer
    from ray.train.v2._internal.callbacks.placement_group_callback import (
        PlacementGroupCleanerCallback,
    )

    class Trainer(TorchTrainer):
        def _create_default_callbacks(self) -> list[Any]:
            callbacks = super()._create_default_callbacks()  # type: ignore[misc]
            return [c for c in callbacks if not isinstance(c, PlacementGroupCleanerCallback)]

    return Trainer


def run_segment(
    queue: Any, group: int, cluster: ClusterSettings, workers: int, storage: str, name: str
) -> str:
    """One worker group: a TorchTrainer that stays warm and runs stage after stage. Runs inside a
    Ray task. workers: its ranks; name: of the folder below `storage` where Ray keeps its own books.
    Returns NO_ROOM where a group that may have fewer ranks did not come up.

    A worker that dies while its group comes up leaves the group's resources reserved for as long as
    the trainer lives: Ray's own retries would wait for them for ever. So the first such failure
    ends the trainer, and another one is started. Waiting for resources that others have goes on. A
    group that may have fewer ranks is never restarted by Ray: the driver does it, with as many as
    there is room for.
    """
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig
    from ray.train.v2._internal.exceptions import WorkerGroupStartupTimeoutError  # type: ignore[import-not-found,unused-ignore]
    from ray.train.v2.api.config import LoggingConfig  # type: ignore[import-not-found,unused-ignore]
    from ray.train.v2.api.exceptions import ControllerError  # type: ignore[import-not-found,unused-ignore]

    gpu, shared = bool(cluster.gpus_per_worker), cluster.gpus_per_worker % 1 > 0
    while True:
        trainer = trainer_class()(
            train_loop_per_worker,
            train_loop_config={
                "queue": queue,
                "group": group,
                "gpu": gpu,
                "threads": cluster.cpus_per_worker,
            },
            torch_config=TorchConfig(backend="nccl" if gpu and not shared else "gloo"),
            scaling_config=ScalingConfig(
                num_workers=workers,
                use_gpu=gpu,
                resources_per_worker=resources_per_worker(cluster),
                placement_strategy=cluster.placement,
            ),
            run_config=RunConfig(
                name=name,
                **where_ray_writes(storage),
                failure_config=FailureConfig(
                    max_failures=RetryPolicy.of(cluster).restarts,
                    controller_failure_limit=0,
                ),  # type: ignore[call-arg]
                logging_config=LoggingConfig("ERROR"),
            ),
        )
        try:
            trainer.fit()
            return ""
        except ControllerError as error:
            if not isinstance(error.controller_failure, WorkerGroupStartupTimeoutError):
                raise
            if cluster.min_workers:
                return NO_ROOM
        finally:
            delete_dir(join(storage, name))  # Ray's own bookkeeping; what counts is in the store
