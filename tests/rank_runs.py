"""Run stages on several processes connected by gloo."""

from __future__ import annotations

import contextlib
import os
import pickle
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import chain
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.multiprocessing.spawn import start_processes

from tests import small_run
from workers import loop
from workers.data.feed import Feed
from workers.dist import GradientSum, Group
from workers.job import StageJob
from workers.methods.base import Method


@dataclass
class Steps:
    """The record of one rank in one stage; each list has one entry per training step."""

    # Positions in the global batch of the samples that the rank trained on.
    rows: list[list[int]] = field(default_factory=list)
    # Sum of the micro-batch weights.
    weights: list[float] = field(default_factory=list)
    # Bytes of gradients summed over the ranks.
    synchronised: list[int] = field(default_factory=list)
    # Number of trainable parameters.
    trainable: int = 0


def on_ranks(
    jobs: list[StageJob], world: int, folder: Path, stop_after: dict[str, int] | None = None
) -> list[list[Steps]]:
    """Run stages on `world` processes connected by gloo.

    Args:
        stop_after: Stage key -> number of steps after which every rank stops the stage.

    Returns:
        The record of each rank in each stage: [rank][stage].
    """
    folder.mkdir()
    small_run.processes()
    start_processes(
        _rank, (world, jobs, str(folder), stop_after or {}), nprocs=world, start_method="forkserver"
    )
    return [pickle.loads((folder / f"rank-{rank}").read_bytes()) for rank in range(world)]


def _rank(
    rank: int, world: int, jobs: list[StageJob], folder: str, stop_after: dict[str, int]
) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", f"file://{folder}/meet", timeout=timedelta(seconds=120), rank=rank, world_size=world
    )
    steps_by_stage: list[Steps] = []
    train_step = loop.train_step
    finish = GradientSum.finish

    def recording_step(method: Method, optimizer: Any, batches: Any, *rest: Any) -> Any:
        steps = steps_by_stage[-1]
        if len(steps.rows) == stop_after.get(rest[1].key):
            raise InterruptedError
        rows = [batch.draw.positions.tolist() for batch in batches if batch.weight]
        steps.rows.append(list(chain(*rows)))
        steps.weights.append(sum(batch.weight for batch in batches))
        steps.trainable = sum(p.numel() for p in method.parameters() if p.requires_grad)
        return train_step(method, optimizer, batches, *rest)

    def recording_sum(sums: GradientSum) -> int:
        num_bytes = finish(sums)
        steps_by_stage[-1].synchronised.append(num_bytes)
        return num_bytes

    with (
        mock.patch.object(loop, "train_step", recording_step),
        mock.patch.object(GradientSum, "finish", recording_sum),
    ):
        group = Group(rank, world)
        for job in jobs:
            steps_by_stage.append(Steps())
            with contextlib.suppress(InterruptedError), small_batches():
                loop.run_stage(job, group, lambda event: None)
            torch.distributed.barrier()
    (Path(folder) / f"rank-{rank}").write_bytes(pickle.dumps(steps_by_stage))
    torch.distributed.destroy_process_group()


def small_batches() -> Any:
    """Return a context in which evaluation uses batches of 16 images.

    Even a tiny split then has several batches, so that every rank gets some.
    """
    return mock.patch.object(Feed.evaluate, "__defaults__", (16,))
