"""A worker group on Ray Train: its trainer, and the loop on each rank.

The driver (groups.py) starts `run_worker_group` as a Ray task. The trainer in this task starts the
ranks. Each rank runs `train_loop_per_worker`, which takes stages from the queue actor.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import torch

from pipeline.config.settings import ClusterSettings
from pipeline.graph.live_status import MachineSample
from pipeline.graph.stage import Stage
from pipeline.graph.walk import Event, EventKind
from pipeline.launch import ray_internals
from pipeline.launch.attempt import attempt_stage, progress_event
from pipeline.launch.cluster import make_ray_storage_arguments
from pipeline.launch.machine import find_gpu_number, sampling
from pipeline.launch.queue import STOP, Rank
from pipeline.launch.shares import resources_per_worker
from workers import dist, preemption
from workers.data import accelerator, torch_internals
from workers.data.loaders import count_cores
from workers.loop import run_stage
from workers.storage.artifact import delete_dir, join, parent

QUEUE_POLL_S = 0.02  # seconds between two requests of an idle group
IDLE_S = 10.0  # maximum seconds that ranks of an idle group wait for rank 0 in one collective
NO_ROOM = "no room"  # result of `run_worker_group`


# ---- the trainer ---------------------------------------------------------------------------------
def run_worker_group(
    queue: Any,
    group: int,
    cluster: ClusterSettings,
    workers: int,
    storage: str,
    name: str,
    sample_s: float,
) -> str:
    """Run one worker group until the queue is closed or dismisses it. Runs inside a Ray task.

    Ray never restarts the workers of a group. Instead, the driver starts another group, because
    only the driver can explain the death of a worker, and knows how many ranks fit. If a worker
    dies while its group starts, the resources of the group stay reserved until the trainer ends.
    Therefore the start-up timeout ends the trainer. Then this function starts another trainer. If
    the group is elastic (`cluster.min_workers`), it returns instead, so that the driver can start a
    smaller group.

    Args:
        queue: Handle of the queue actor.
        group: Number of the group.
        cluster: Settings with the resources of a rank.
        workers: Number of ranks.
        storage: Folder or URI for Ray's own files.
        name: Name of this group's folder in `storage`.
        sample_s: Seconds between two samples of the use of the workers' machines (0: none).

    Returns:
        NO_ROOM if an elastic group did not start in time, else "".
    """
    while True:
        trainer = make_trainer(queue, group, cluster, workers, storage, name, sample_s)
        try:
            trainer.fit()
            return ""
        except Exception as error:
            if not ray_internals.is_startup_timeout(error):
                raise
            if cluster.min_workers:
                return NO_ROOM
        finally:
            delete_dir(join(storage, name))  # not needed: the results are in our store


def make_trainer(
    queue: Any,
    group: int,
    cluster: ClusterSettings,
    workers: int,
    storage: str,
    name: str,
    sample_s: float,
) -> Any:
    """Return the `TorchTrainer` of a worker group. See `run_worker_group` for the arguments."""
    from ray.train import ScalingConfig  # slow to import; needed only in this Ray task
    from ray.train.torch import TorchConfig

    return ray_internals.trainer_class()(
        train_loop_per_worker,
        train_loop_config={
            "queue": queue,
            "group": group,
            "gpus": cluster.gpus_per_worker,
            "threads": cluster.cpus_per_worker,
            "sample_s": sample_s,
        },
        torch_config=TorchConfig(backend=choose_collectives(cluster)),
        scaling_config=ScalingConfig(
            num_workers=workers,
            use_gpu=bool(cluster.gpus_per_worker),
            resources_per_worker=resources_per_worker(cluster),
            placement_strategy=cluster.placement,
        ),
        run_config=ray_internals.run_config(name, make_ray_storage_arguments(storage)),
    )


def choose_collectives(cluster: ClusterSettings) -> str:
    """Return the torch.distributed backend of a worker group.

    NCCL reduces tensors on GPUs if each rank has its own GPUs; it does not support two ranks on one
    GPU. Python objects are always sent by gloo, because ranks that wait in NCCL for the next stage
    would keep their GPUs busy.
    """
    has_whole_gpus = cluster.gpus_per_worker >= 1 and cluster.gpus_per_worker % 1 == 0
    return "cpu:gloo,cuda:nccl" if has_whole_gpus else "gloo"


# ---- each rank -----------------------------------------------------------------------------------
def train_loop_per_worker(config: dict[str, Any]) -> None:
    """Run stages from the queue until it is closed or dismisses the group. Runs on every rank.

    Args:
        config: `train_loop_config` of `make_trainer`.
    """
    import ray  # slow to import, but already loaded in a worker
    import ray.train

    context = ray.train.get_context()
    device = accelerator.CPU
    if config["gpus"]:
        from ray.train.torch import get_device

        device = get_device()
        accelerator.limit_memory(device, config["gpus"])
    torch.set_num_threads(config["threads"])
    cores = count_rank_cores(ray, config["gpus"], config["threads"])
    rank = dist.Group(context.get_world_rank(), context.get_world_size(), device, cores)
    if rank.world > 1:
        # Only for gloo. NCCL keeps Ray's longer timeout, because NCCL ends the process without a
        # message when its timeout expires.
        torch_internals.limit_host_waits(dist.WAIT_S)
    queue = config["queue"]
    group = config["group"]
    gpu = find_gpu_number(device) if accelerator.is_accelerator(device) else ""
    ranks = rank.gather(Rank(ray.get_runtime_context().get_node_id(), gpu))
    if rank.rank == 0:
        ray.get(queue.join.remote(group, ranks))

    def post_sample(sample: MachineSample) -> None:
        queue.post.remote(group, Event(EventKind.SAMPLE, "", body=dict(sample)))

    with sampling(device, post_sample, config["sample_s"]):
        run_stages(ray, queue, group, rank)


def count_rank_cores(ray: Any, gpus: float, cpus: int) -> int:
    """Return the cores of this node divided by the largest number of ranks that fit on the node.

    It can be larger than `cpus`, the number that the rank reserves.

    Args:
        ray: The module `ray`.
        gpus: Number of GPUs of a rank. If it is 0, CPUs limit the number of ranks.
        cpus: Number of CPUs of a rank.
    """
    here = ray.get_runtime_context().get_node_id()
    (resources,) = [node["Resources"] for node in ray.nodes() if node["NodeID"] == here]
    ranks = resources["GPU"] / gpus if gpus else resources.get("CPU", 1) / cpus
    return count_cores() // max(1, int(ranks))


def run_stages(ray: Any, queue: Any, group: int, rank: dist.Group) -> None:
    """Run stages from the queue until it is closed or dismisses the group.

    Args:
        ray: The module `ray`.
        queue: Handle of the queue actor.
        group: Number of the group.
        rank: This rank.
    """
    while True:
        stage = next_stage(ray, queue, group, rank)
        if stage is None:
            continue
        if stage == STOP:
            return
        progress = ProgressReporter(ray, queue, group, stage)
        run = partial(run_stage, stage.job, rank, progress)
        event = attempt_stage(stage, run, parent(stage.job.root), rank)
        # Rank 0 reports for all ranks. A rank that failed reports its own failure.
        if rank.rank == 0 or event.kind not in (EventKind.DONE, EventKind.MOVED):
            ray.get(queue.post.remote(group, event))
        if event.kind is EventKind.MOVED:  # the group was asked to leave; its state is saved
            return
        if event.kind is not EventKind.DONE and rank.world > 1:
            # The other ranks may wait in a collective, so the group must be restarted.
            raise RuntimeError(event.message)


def next_stage(ray: Any, queue: Any, group: int, rank: dist.Group) -> Any:
    """Return the next stage, STOP, or None after IDLE_S without a stage, the same on all ranks.

    Rank 0 asks the queue. The other ranks wait for rank 0 in a collective, which has a timeout;
    therefore the wait is limited to IDLE_S. See `run_stages` for the arguments.
    """
    stage: Any = None
    deadline = time.monotonic() + IDLE_S
    while rank.rank == 0 and stage is None and time.monotonic() < deadline:
        stage = ray.get(queue.next_stage.remote(group))
        if stage is None:
            time.sleep(QUEUE_POLL_S)
    return rank.broadcast(stage)


class ProgressReporter:
    """Posts the progress of a stage to the queue.

    The queue answers whether the group must save its state and end. The answer is read at the next
    report, so that training does not wait for it. If it is yes, this process is marked as preempted
    (`preemption.requested`), and the training loop saves a checkpoint.

    Args:
        ray: The module `ray`.
        queue: Handle of the queue actor.
        group: Number of the group.
        stage: The running stage.
    """

    def __init__(self, ray: Any, queue: Any, group: int, stage: Stage):
        self.ray = ray
        self.queue = queue
        self.group = group
        self.stage = stage
        self.answer: Any = None

    def __call__(self, body: dict[str, Any]) -> None:
        """Post a progress report of the stage."""
        if self._should_leave():
            preemption.requested.set()
        event = progress_event(self.stage.id, body)
        self.answer = self.queue.post.remote(self.group, event)

    def _should_leave(self) -> bool:
        if self.answer is None:
            return False
        ready, _ = self.ray.wait([self.answer], timeout=0)
        return bool(ready) and bool(self.ray.get(self.answer))
