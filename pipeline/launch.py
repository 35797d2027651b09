"""A segment becomes StageJobs on Ray Train: warm worker groups pull stages from a small queue; or all runs in this process."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import torch

from pipeline import ingest
from pipeline.build import IngestJob
from pipeline.config import ClusterSettings
from pipeline.graph import Graph, Stage
from pipeline.offers import Offer, Offers, Queue
from pipeline.run import Event, Executor
from pipeline.store import Store
from workers import dist
from workers.artefact import Artefact, delete_dir, join
from workers.claim import claimed
from workers.errors import DamagedArtefact, UserError
from workers.loop import run_stage

ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "token", "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "30", "RAY_TRAIN_ENABLE_PRINT_PATCH": "0", "RAY_CHDIR_TO_TRIAL_DIR": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "RAY_AIR_NEW_OUTPUT": "0", "RAY_DEDUP_LOGS": "0", "TOKENIZERS_PARALLELISM": "false",
}
QUEUE_POLL_S = 0.02  # how often an idle group asks for a stage
IDLE_S = 10.0  # how long the ranks of an idle group wait for each other at a time
WAIT_S = 30.0  # after so long without a worker group, a person is told what is waited for
Local = Callable[[Stage], dict[str, Any]]  # stages that the driver runs itself (the report)


class InProcess:
    """`cluster.workers: 0`: every stage runs here, one after the other, without Ray."""

    def __init__(self, store: Store, cluster: ClusterSettings, local: Local, progress: Callable[[Event], None]):
        self.store, self.local, self.progress = store, local, progress
        self.waiting = Offers()
        self.events: list[Event] = []
        torch.set_num_threads(cluster.cpus_per_worker)
        if cluster.gpus_per_worker and not torch.cuda.is_available():
            raise UserError(f"cluster.gpus_per_worker is {cluster.gpus_per_worker}, but this machine has no GPU that torch can use; set it to 0 "
                            "or run where there is one")
        self.device = torch.device("cuda" if cluster.gpus_per_worker else "cpu")

    def submit(self, stage: Stage, depth: int) -> None:
        self.waiting.append(Offer(depth, stage))

    def poll(self) -> list[Event]:
        stage = self.waiting.take()
        if stage is not None:
            self.events.append(attempt(stage, lambda: self._run(stage)))
        events, self.events = self.events, []
        return events

    def _run(self, stage: Stage) -> dict[str, Any]:
        if isinstance(stage.job, IngestJob):
            return run_ingest(self.store, stage, map, self.progress)
        if stage.job is None:
            return self.local(stage)
        return run_stage(stage.job, dist.Group(0, 1, self.device), lambda body: self.progress(Event("progress", stage.id, body=body)))

    def close(self) -> None:
        """Nothing is kept open."""


def attempt(stage: Stage, run: Callable[[], dict[str, Any]]) -> Event:
    """Runs a stage and turns whatever happens into an event."""
    try:
        return Event("done", stage.id, body=run())
    except DamagedArtefact as error:
        return Event("damaged", stage.id, str(error), key=error.key)
    except UserError as error:
        return Event("failed", stage.id, str(error), final=True)
    except Exception as error:
        return Event("failed", stage.id, own_error(error))


def own_error(error: Exception) -> str:
    """The error as its raiser worded it, with the place in the code where it was raised."""
    last = traceback.extract_tb(error.__traceback__)[-1:]
    place = f" (at {os.path.basename(last[0].filename)}:{last[0].lineno})" if last else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:500]}{place}"


def run_ingest(store: Store, stage: Stage, map_fn: Callable[..., Iterable[Any]], progress: Callable[[Event], None]) -> dict[str, Any]:
    started = time.monotonic()
    extra = {"stage": stage.id, "step": "ingest"}
    with claimed(store.root, stage.key):
        if found := Artefact.open(store.root, stage.key):
            return {**found.manifest, "reused": True}
        manifest = ingest.ingest(stage.job.card, store.root, stage.key, map_fn, extra,
                                 lambda body: progress(Event("progress", stage.id, body=body)))
    return {**manifest, "wall_s": round(time.monotonic() - started, 3)}


def executor(store: Store, cluster: ClusterSettings, graph: Graph, todo: set[str], progress: Callable[[Event], None], local: Local) -> Executor:
    """What runs the stages `todo`: this process, or worker groups on Ray."""
    if cluster.workers == 0:
        return InProcess(store, cluster, local, progress)
    return OnRay(store, cluster, local, progress, width_of(graph, todo))


def width_of(graph: Graph, todo: set[str]) -> int:
    """Most stages that may run side by side: the widest level of the stages to run."""
    depth: dict[str, int] = {}
    for stage in graph:
        if stage.id in todo:
            depth[stage.id] = max((depth[p] + 1 for p in stage.parents if p in depth), default=0)
    return max(Counter(depth.values()).values(), default=1)


# ---- Ray ---------------------------------------------------------------------------------------------------------------
def connect(cluster: ClusterSettings) -> Any:
    """Joins the named Ray cluster, or starts a private local one: a forgotten cluster must not capture the run. Returns ray."""
    import logging

    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    import ray  # after the environment is set: it is read at import

    if ray.is_initialized():
        return ray
    address = cluster.address or os.environ.get("RAY_ADDRESS", "") or "local"
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address == "local":
        cpus = max(os.cpu_count() or 1, cluster.workers * cluster.cpus_per_worker)
        start_private(ray, cpus, quiet)
        return ray
    check_reachable(address)
    if "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ:  # submitted as a job: it has brought the code along
        ray.init(address=address, **quiet)
        return ray
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    code = {"working_dir": root, "excludes": [".venv", ".git", "storage", "tests"], "env_vars": ENVIRONMENT}
    ray.init(address=address, runtime_env=code, **quiet)
    return ray


def start_private(ray: Any, cpus: int, quiet: dict[str, Any]) -> None:
    """A local cluster of its own, in a second try too: on a very busy machine Ray's 30 s for its processes are not enough."""
    for tries_left in (1, 0):
        try:
            ray.init(address="local", num_cpus=cpus, include_dashboard=False, object_store_memory=200_000_000, **quiet)
            return
        except Exception as error:  # Ray raises bare ones
            ray.shutdown()
            if not tries_left:
                raise UserError(f"Ray did not start on this machine ({str(error).strip().splitlines()[0]}); run the same command again when it "
                                "is less busy, or without Ray by --set cluster.workers=0") from None


def check_reachable(address: str) -> None:
    """A dead address takes Ray two minutes to give up on; a plain connection tells in two seconds."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        if address == "auto":
            return
        raise UserError(f"cluster address {address!r} is not of the form host:port; mend cluster.address or RAY_ADDRESS, or set cluster.address=local")
    try:
        socket.create_connection((host, int(port)), timeout=2).close()
    except OSError as error:
        raise UserError(f"no Ray cluster answers at {address!r} ({error}); start it, mend cluster.address or RAY_ADDRESS, "
                        "or set cluster.address=local") from None


def train_loop_per_worker(config: dict[str, Any]) -> None:
    """What every rank of a worker group runs: stages from the queue until it is closed."""
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

    def post(event: Event) -> None:
        ray.get(queue.post.remote(index, event))

    while True:
        stage: Any = None
        until = time.monotonic() + IDLE_S
        while rank == 0 and stage is None and time.monotonic() < until:
            stage = ray.get(queue.next.remote(index))
            if stage is None:
                time.sleep(QUEUE_POLL_S)
        stage = group.share(stage)  # None after IDLE_S: the other ranks wait in a collective, which has a timeout
        if stage is None:
            continue
        if stage == "stop":
            return
        event = attempt(stage, lambda stage=stage: run_stage(  # type: ignore[misc]
            stage.job, group, lambda body: queue.post.remote(index, Event("progress", stage.id, body=body))))
        if event.kind != "done" or rank == 0:
            post(event)
        if event.kind != "done" and world > 1:
            raise RuntimeError(event.message)  # the other ranks may wait inside a collective: the group is started anew


def run_segment(queue: Any, group: int, cluster: ClusterSettings, storage: str) -> None:
    """One worker group: a TorchTrainer that stays warm and runs stage after stage. Runs inside a Ray task.

    A worker that dies while its group comes up leaves the group's resources reserved for as long as the trainer lives: Ray's own retries
    would wait for them for ever. So the first such failure ends the trainer, and the driver starts another one. Waiting for resources
    that others have goes on.
    """
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer
    from ray.train.v2._internal.exceptions import WorkerGroupStartupTimeoutError  # type: ignore[import-not-found,unused-ignore]
    from ray.train.v2.api.config import LoggingConfig  # type: ignore[import-not-found,unused-ignore]
    from ray.train.v2.api.exceptions import ControllerError  # type: ignore[import-not-found,unused-ignore]

    resources: dict[str, float] = {"CPU": cluster.cpus_per_worker}
    if cluster.gpus_per_worker:
        resources["GPU"] = cluster.gpus_per_worker
    while True:
        name = f"group-{os.getpid()}-{group}-{time.time_ns()}"
        trainer = TorchTrainer(
            train_loop_per_worker,
            train_loop_config={"queue": queue, "group": group, "gpu": bool(cluster.gpus_per_worker), "threads": cluster.cpus_per_worker},
            scaling_config=ScalingConfig(num_workers=cluster.workers, use_gpu=bool(cluster.gpus_per_worker), resources_per_worker=resources),
            run_config=RunConfig(name=name, storage_path=storage,
                                 failure_config=FailureConfig(max_failures=cluster.retries, controller_failure_limit=0),  # type: ignore[call-arg]
                                 logging_config=LoggingConfig("ERROR")),
        )
        try:
            trainer.fit()
            return
        except ControllerError as error:
            if not isinstance(error.controller_failure, WorkerGroupStartupTimeoutError):
                raise
        finally:
            delete_dir(join(storage, name))  # Ray's own bookkeeping; what counts is in the store


class OnRay:
    """`cluster.workers >= 1`: worker groups on a Ray cluster, ingest over Ray tasks, the report here."""

    def __init__(self, store: Store, cluster: ClusterSettings, local: Local, progress: Callable[[Event], None], width: int):
        self.joined = "ray" in sys.modules and sys.modules["ray"].is_initialized()  # inside a search: whoever started Ray ends it
        ray = connect(cluster)
        self.ray, self.store, self.cluster, self.local, self.progress = ray, store, cluster, local, progress
        self.width = width  # most stages that can run side by side
        self.queue: Any = ray.remote(num_cpus=0, scheduling_strategy="DEFAULT")(Queue).remote()
        self.groups: dict[int, Any] = {}
        self.starts: dict[int, int] = {}  # group -> how often it was started since its workers last came up
        self.waiting_since: float | None = None
        self.outbox: list[Offer] = []
        self.local_waiting: deque[Stage] = deque()
        self.map = RayMap(ray, max(1, int(ray.cluster_resources().get("CPU", 1))))
        self.threads = ThreadPoolExecutor(8, "ingest")  # they wait for Ray tasks, which do the work
        self.ingests: list[Future[Event]] = []

    def submit(self, stage: Stage, depth: int) -> None:
        if isinstance(stage.job, IngestJob):
            self.ingests.append(self.threads.submit(attempt, stage, lambda: run_ingest(self.store, stage, self.map, self.progress)))
        elif stage.job is None:
            self.local_waiting.append(stage)
        else:
            self.outbox.append(Offer(depth, stage))

    def poll(self) -> list[Event]:
        try:
            return self._poll()
        except self.ray.exceptions.RayError as error:
            raise UserError(f"Ray itself broke down ({str(error).strip().splitlines()[0]}); what finished is kept, run the same command again") from None

    def _poll(self) -> list[Event]:
        events = self._ingested()
        if self.outbox:
            self._start_groups()
        if self.groups:
            outbox, self.outbox = self.outbox, []
            news, asked = self.ray.get(self.queue.offer.remote(outbox))
            self._say_what_is_waited_for(asked)
            self._start_again(asked)
            events += news
        if self.local_waiting and not events:
            stage = self.local_waiting.popleft()
            events.append(attempt(stage, lambda: self.local(stage)))
        return events

    def _ingested(self) -> list[Event]:
        ready = [f for f in self.ingests if f.done()]
        self.ingests = [f for f in self.ingests if f not in ready]
        return [f.result() for f in ready]

    def _start_groups(self) -> None:
        """As many groups as there is room for, and no more than stages that could run side by side."""
        if self.groups:
            return
        total = self.ray.cluster_resources()
        room = int(total.get("CPU", 1) // (self.cluster.workers * self.cluster.cpus_per_worker))
        if self.cluster.gpus_per_worker:
            room = min(room, int(total.get("GPU", 0) // (self.cluster.workers * self.cluster.gpus_per_worker)))
        if room < 1:
            raise UserError(f"cluster.workers={self.cluster.workers} with {self.cluster.cpus_per_worker} CPUs and "
                            f"{self.cluster.gpus_per_worker} GPUs each do not fit into this cluster "
                            f"({total.get('CPU', 0):.0f} CPUs, {total.get('GPU', 0):.0f} GPUs); lower them or add nodes")
        self.waiting_since = time.monotonic()
        for index in range(min(room, self.width, self.cluster.groups or room)):
            self._start_group(index)

    def _start_group(self, index: int) -> None:
        fn = self.ray.remote(num_cpus=0, max_retries=0, scheduling_strategy="DEFAULT")(run_segment)  # not within what a trial of a search has reserved
        self.starts[index] = self.starts.get(index, 0) + 1
        self.groups[index] = fn.remote(self.queue, index, self.cluster, join(self.store.storage, "ray"))

    def _start_again(self, asked: list[int]) -> None:
        """Groups whose trainer ended before the queue was closed are started anew, and what they held is offered again.
        Raises UserError where a group's workers never come up."""
        self.starts.update(dict.fromkeys(asked, 0))
        done, _ = self.ray.wait(list(self.groups.values()), num_returns=len(self.groups), timeout=0)
        for ref in done:
            index = next(i for i, r in self.groups.items() if r == ref)
            try:
                self.ray.get(ref)
                message = "its worker group ended"
            except Exception as error:
                message = own_error(error)
            if self.starts[index] > self.cluster.retries:
                raise UserError(f"worker group {index} could not be started in {self.starts[index]} tries: {message}; mend what it says, "
                                "or use fewer workers with --set cluster.workers=N")
            self.ray.get(self.queue.abandon.remote(index, message))
            self._start_group(index)

    def _say_what_is_waited_for(self, asked: list[int]) -> None:
        if asked or self.waiting_since is None:
            self.waiting_since = None
        elif time.monotonic() - self.waiting_since > WAIT_S:
            self.waiting_since = None
            need = f"{self.cluster.workers} x {self.cluster.cpus_per_worker} CPUs"
            need += f" and {self.cluster.workers} x {self.cluster.gpus_per_worker} GPUs" if self.cluster.gpus_per_worker else ""
            print(f"waiting for a worker group: {need}, free now: {self.ray.available_resources().get('CPU', 0):.0f} CPUs, "
                  f"{self.ray.available_resources().get('GPU', 0):.0f} GPUs", file=sys.stderr, flush=True)

    def close(self) -> None:
        self.threads.shutdown(wait=False, cancel_futures=True)
        with suppress(self.ray.exceptions.RayError):  # whatever it is, closing does not hide why the run ended
            if self.groups:
                self.ray.get(self.queue.close.remote())
                self.ray.wait(list(self.groups.values()), num_returns=len(self.groups), timeout=10)
        if not self.joined:
            self.ray.shutdown()


class RayMap:
    """`map` over Ray tasks, results in order; all that share one RayMap have together at most `limit` tasks under way, so
    that many small data sets do not start a process each."""

    def __init__(self, ray: Any, limit: int):
        self.ray, self.free = ray, threading.BoundedSemaphore(limit)

    def __call__(self, fn: Callable[[Any], Any], items: Iterable[Any]) -> Iterable[Any]:
        remote = self.ray.remote(num_cpus=0, scheduling_strategy="SPREAD")(fn)
        under_way: deque[Any] = deque()
        try:
            for item in items:
                while not self.free.acquire(blocking=not under_way):
                    yield self._result(under_way)
                under_way.append(remote.remote(item))
            while under_way:
                yield self._result(under_way)
        finally:
            for _ in under_way:
                self.free.release()

    def _result(self, under_way: deque[Any]) -> Any:
        try:
            value = self.ray.get(under_way[0])
        except self.ray.exceptions.RayTaskError as error:
            raise error.cause from None  # what went wrong, without the remote traceback around it
        under_way.popleft()
        self.free.release()
        return value
