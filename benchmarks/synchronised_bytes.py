"""Check that two ranks exchange exactly 4 bytes per trained parameter in a training step.

Command: `python -m benchmarks.synchronised_bytes`. Nothing is timed, so the load of the machine
does not matter. Two gloo processes train three steps of each method. The collectives of
torch.distributed are wrapped and their bytes are counted, independently of the train loop. The
output also shows the bytes that a data-parallel wrapper of the whole network would send.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed
from torch.multiprocessing.spawn import spawn

from benchmarks import stream
from benchmarks.harness import Report
from workers import dist, loop, optim, restore
from workers.data.feed import Feed
from workers.job import StageJob
from workers.methods import METHODS
from workers.methods.base import OptimPlan, Progress, StepContext

METHODS_COUNTED: dict[str, dict[str, Any]] = {
    "linear": {"method": "linear"},
    "MEAT, masks per weight": {"method": "meat"},
    "MEAT, masks per neuron": {"method": "meat", "ffn_masks": "neuron"},
    "fine-tuning": {"method": "finetune"},
}
STEPS, RANKS = 3, 2
COLLECTIVES = (
    "all_reduce",
    "broadcast",
    "reduce",
    "all_gather",
    "all_gather_into_tensor",
    "reduce_scatter_tensor",
    "all_to_all_single",
    "broadcast_object_list",
    "all_gather_object",
)


class Counts(NamedTuple):
    """Counts of one method on one rank."""

    sent_bytes: int  # bytes passed to collectives in STEPS steps
    trained: int  # number of trained parameters
    backbone: int  # number of parameters of the backbone


def counted(sent: list[int], real: Callable[..., Any]) -> Callable[..., Any]:
    """Return a wrapper of the collective `real` that appends the tensor's bytes to `sent`.

    A payload other than a single tensor is an error.
    """

    def call(tensor: Any, *args: Any, **named: Any) -> Any:
        assert isinstance(tensor, torch.Tensor), (
            f"{real.__name__} in a training step sends Python objects"
        )
        sent.append(tensor.numel() * tensor.element_size())
        return real(tensor, *args, **named)

    return call


def count(job: StageJob, group: dist.Group) -> Counts:
    """Train STEPS steps on this rank and count the bytes passed to collectives."""
    assert job.task is not None
    method = METHODS[job.method](restore.load_backbone(job), restore.load_settings(job), job.seed)
    plan = OptimPlan(job.train.lr, 0.0, job.train.batch_size, STEPS)
    groups = method.begin(StepContext(job.task, plan, training_tasks=(job.task,)))
    optimizer = optim.build_optimizer(groups, job.train)
    feed = Feed(job, (job.task,), "train", group, training=True)
    method.train()
    sent: list[int] = []
    with ExitStack() as stack:
        for name in COLLECTIVES:
            wrapper = counted(sent, getattr(torch.distributed, name))
            stack.enter_context(mock.patch.object(torch.distributed, name, wrapper))
        for step, batches in zip(range(STEPS), feed.epoch(0), strict=False):
            loop.train_step(method, optimizer, batches, Progress(0, step, 1, STEPS), job, group)
    trained = 0
    for parameter_group in groups:
        trained += sum(p.numel() for p in parameter_group["params"])
    backbone = sum(p.numel() for p in method.backbone.parameters())
    return Counts(sum(sent), trained, backbone)


def rank_main(rank: int, jobs: list[StageJob], rendezvous: str, out: str) -> None:
    """Count the bytes of all jobs as one rank. Rank 0 writes the counts to the file `out`."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=RANKS
    )
    group = dist.Group(rank, RANKS)
    counts = [count(job, group) for job in jobs]
    if rank == 0:
        Path(out).write_text(json.dumps(counts))
    torch.distributed.destroy_process_group()


def main() -> None:
    """Compare the bytes of each method with its number of trained parameters."""
    report = Report()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        card = stream.draw_images(folder, classes=4, train=8, test=1, sides=(32,))
        backbone = {
            "name": "vit_tiny_patch16_224",
            "img_size": 32,
            "crop_pct": 1.0,
            "options": {"depth": 2},
        }
        methods = {f"m{i}": settings for i, settings in enumerate(METHODS_COUNTED.values())}
        store, graph, _ = stream.plan(
            folder,
            card,
            1,
            backbone=backbone,
            methods=methods,
            data={"val_fraction": 0.0},
            train={"batch_size": 8},
            cluster={"loader_workers": 1},
        )
        stream.ingest(store, graph)
        loop.run_stage(stream.find_job(graph, "backbone"), dist.Group(), lambda event: None)
        jobs = [stream.find_job(graph, f"{label}/t-0/train") for label in methods]
        out = folder / "counts.json"
        spawn(rank_main, (jobs, str(folder / "rendezvous"), str(out)), nprocs=RANKS)
        for name, values in zip(METHODS_COUNTED, json.loads(out.read_text()), strict=True):
            counts = Counts(*values)
            report.equal(
                f"{name}, bytes of {STEPS} steps against 4 x {counts.trained:,} trained "
                "parameters each",
                torch.tensor(counts.sent_bytes),
                torch.tensor(STEPS * 4 * counts.trained),
                atol=0,
            )
            bytes_per_step = counts.sent_bytes // STEPS
            report.note(
                f"{name}, bytes per step",
                f"{bytes_per_step:,} (the whole backbone: {4 * counts.backbone:,})",
            )
    report.exit()


if __name__ == "__main__":
    main()
