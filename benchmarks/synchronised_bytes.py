"""Bytes that two ranks exchange in a training step, counted: 4 times the trainable parameters and
nothing else.

`python -m benchmarks.synchronised_bytes`; no clock, so any load will do. Two gloo processes train
three steps of each method; every collective is counted from outside, whatever the train loop says
about itself. For scale: what a data-parallel wrapper of the whole network would send.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed
import torch.multiprocessing as mp

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


def counted(sent: list[int], real: Callable[..., Any]) -> Callable[..., Any]:
    """The collective `real`, with the bytes of its tensor noted; other payloads than one tensor
    count as an error."""

    def call(tensor: Any, *args: Any, **named: Any) -> Any:
        assert isinstance(tensor, torch.Tensor), (
            f"{real.__name__} in a training step sends Python objects"
        )
        sent.append(tensor.numel() * tensor.element_size())
        return real(tensor, *args, **named)

    return call


def count(job: StageJob, group: dist.Group) -> list[int]:
    """Bytes that this rank hands to collectives in STEPS steps; trained parameters; parameters of
    the backbone."""
    assert job.task is not None
    method = METHODS[job.method](restore.load_backbone(job), restore.settings_of(job), job.seed)
    plan = OptimPlan(job.train.lr, 0.0, job.train.batch_size, STEPS)
    groups = method.begin(StepContext(job.task, plan, training_tasks=(job.task,)))
    optimizer = optim.build(groups, job.train)
    feed = Feed(job, (job.task,), "train", group, training=True)
    method.train()
    sent: list[int] = []
    with ExitStack() as stack:
        for name in COLLECTIVES:
            stack.enter_context(
                mock.patch.object(
                    torch.distributed, name, counted(sent, getattr(torch.distributed, name))
                )
            )
        for step, batches in zip(range(STEPS), feed.epoch(0), strict=False):
            loop.train_step(method, optimizer, batches, Progress(0, step, 1, STEPS), job, group)
    return [
        sum(sent),
        sum(p.numel() for g in groups for p in g["params"]),
        sum(p.numel() for p in method.backbone.parameters()),
    ]


def rank_main(rank: int, jobs: list[StageJob], meeting: str, out: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=RANKS
    )
    group = dist.Group(rank, RANKS)
    counts = [count(job, group) for job in jobs]
    if rank == 0:
        Path(out).write_text(json.dumps(counts))
    torch.distributed.destroy_process_group()


def main() -> None:
    report = Report()
    with tempfile.TemporaryDirectory() as folder:
        card = stream.draw_images(Path(folder), classes=4, train=8, test=1, sides=(32,))
        backbone = {
            "name": "vit_tiny_patch16_224",
            "img_size": 32,
            "crop_pct": 1.0,
            "options": {"depth": 2},
        }
        methods = {f"m{i}": settings for i, settings in enumerate(METHODS_COUNTED.values())}
        store, graph, _ = stream.plan(
            Path(folder),
            card,
            1,
            backbone=backbone,
            methods=methods,
            data={"val_fraction": 0.0},
            train={"batch_size": 8},
            cluster={"loader_workers": 1},
        )
        stream.ingest(store, graph)
        loop.run_stage(stream.job_of(graph, "backbone"), dist.Group(), lambda event: None)
        jobs, out = (
            [stream.job_of(graph, f"{label}/t-0/train") for label in methods],
            Path(folder) / "counts.json",
        )
        mp.spawn(rank_main, (jobs, str(Path(folder) / "meeting"), str(out)), nprocs=RANKS)
        for name, (sent, trained, whole) in zip(
            METHODS_COUNTED, json.loads(out.read_text()), strict=True
        ):
            report.equal(
                f"{name}, bytes of {STEPS} steps against 4 x {trained:,} trained parameters each",
                torch.tensor(sent),
                torch.tensor(STEPS * 4 * trained),
                atol=0,
            )
            report.note(
                f"{name}, bytes per step", f"{sent // STEPS:,} (the whole backbone: {4 * whole:,})"
            )
    report.exit()


if __name__ == "__main__":
    main()
