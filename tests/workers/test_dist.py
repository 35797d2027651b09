"""Tests of collectives: the sum of gradients, and the naming of missing ranks."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.multiprocessing.spawn import start_processes

from pipeline.graph.stage import Stage
from pipeline.launch import attempt
from tests import small_run
from workers import dist
from workers.data import torch_internals

WORLD = 3
LIMIT_S = 1.0
COLLECTIVES: dict[str, tuple[Callable[[dist.Group], object], str]] = {
    "broadcast": (lambda group: group.broadcast("x"), "a value of rank 0"),
    "gather": (lambda group: group.gather("x"), "the values of all ranks"),
    "sum": (lambda group: group.sum(torch.ones(3)), "a sum"),
    "gradients": (lambda group: sum_weight(group), "the sum of the gradients"),
}


def sum_weight(group: dist.Group) -> None:
    dist.GradientSum(group, [torch.nn.Parameter(torch.ones(3))]).finish()


def events_of_ranks(folder: Path, collective: str, missing: int) -> dict[int, tuple[str, str]]:
    """Run a stage in gloo processes, in which rank `missing` never calls the collective.

    Returns:
        By rank, except the missing one: kind and message of the event.
    """
    small_run.processes()
    arguments = (str(folder), collective, missing)
    start_processes(_run_rank, arguments, nprocs=WORLD, start_method="forkserver")
    events = {}
    for path in folder.glob("rank-*"):
        kind, message = path.read_text().split("\n")
        events[int(path.name.removeprefix("rank-"))] = (kind, message)
    return events


def _run_rank(rank: int, folder: str, collective: str, missing: int) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.distributed.init_process_group(
        "gloo", f"file://{folder}/meet", timeout=timedelta(seconds=60), rank=rank, world_size=WORLD
    )
    torch_internals.limit_host_waits(LIMIT_S)
    group = dist.Group(rank, WORLD)

    def run() -> dict[str, Any]:
        assert group.gather(rank) == [0, 1, 2]
        if rank == missing:
            time.sleep(2 * LIMIT_S)  # this rank hangs
            return {}
        COLLECTIVES[collective][0](group)
        # Rank 0 may send its value without waiting, so it waits in this second collective.
        group.gather("after it")
        return {}

    stage = Stage("meat/a/train", "train", "k1", {}, ())
    event = attempt.attempt_stage(stage, run, folder, group)
    if rank != missing:
        Path(folder, f"rank-{rank}").write_text(f"{event.kind}\n{event.message}")
    time.sleep(LIMIT_S)  # do not exit yet: that would close the connections


class Layers(torch.nn.Module):
    """Six layers: the first is unused, the second is used twice, and the fourth only on rank 0."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(6))

    def forward(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        for index in (1, 1, 2, 3, 4, 5):
            if index != 3 or rank == 0:
                x = self.layers[index](x).tanh()
        return x.square().mean()


def sum_gradients(group: dist.Group, overlapped: bool) -> tuple[list[torch.Tensor], int, int]:
    """Return the gradient sums of two micro-batches, and the counts of early and of all buckets."""
    model = Layers()
    parameters: list[torch.Tensor] = list(model.parameters())
    images = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(group.rank))
    sums = dist.GradientSum(group, parameters)
    for index, image in enumerate(images):
        loss = model(image, group.rank)
        with sums.overlap() if overlapped and index == 1 else nullcontext():
            loss.backward()
        if index == 0:
            assert not sums.sent, "the first micro-batch is not the whole gradient"
    num_early = len(sums.sent)
    assert sums.finish() == (sum(p.numel() * 4 for p in parameters) if group.world > 1 else 0)
    return [p.grad for p in parameters if p.grad is not None], num_early, len(sums.buckets)


def _sum_on_rank(rank: int, folder: str, world: int) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.distributed.init_process_group(
        "gloo", f"file://{folder}/meet", timeout=timedelta(seconds=60), rank=rank, world_size=world
    )
    group = dist.Group(rank, world)
    with mock.patch.object(dist, "BUCKET_BYTES", (100, 100)):
        results = [sum_gradients(group, overlapped) for overlapped in (True, False, True)]
    torch.save(results, f"{folder}/rank-{rank}")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


@pytest.mark.few(2)
@pytest.mark.parametrize("world", [2, 4])
def test_gradients_summed_during_the_backward_pass_have_the_same_bits(
    tmp_path: Path, world: int
) -> None:
    small_run.processes()
    start_processes(_sum_on_rank, (str(tmp_path), world), nprocs=world, start_method="forkserver")
    ranks = [torch.load(tmp_path / f"rank-{rank}") for rank in range(world)]
    # Each layer fills a bucket. A bucket waits for the buckets of later layers.
    assert [overlapped[1:] for overlapped, _, _ in ranks] == [(5, 6)] + [(2, 6)] * (world - 1)
    sums = [gradients for runs in ranks for gradients, _, _ in runs]
    for parameter, gradients in enumerate(zip(*sums, strict=True)):
        assert all(torch.equal(gradients[0], other) for other in gradients)
        expected = sum(alone_on(rank)[parameter] for rank in range(world))
        torch.testing.assert_close(gradients[0], expected)


def alone_on(rank: int) -> list[torch.Tensor]:
    """Return the gradients of one rank."""
    return sum_gradients(dist.Group(rank), overlapped=False)[0]


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("collective", "missing"), [("broadcast", 0), ("gather", 1), ("sum", 2), ("gradients", 2)]
)
def test_missing_rank_is_named(tmp_path: Path, collective: str, missing: int) -> None:
    events = events_of_ranks(tmp_path, collective, missing)
    assert events.keys() == set(range(WORLD)) - {missing}
    for kind, message in events.values():
        assert kind == "lost", "the stage is retried on other workers"
        # under load, more time may pass than the limit
        assert re.match(rf"rank {missing} of its group did not arrive within \d+ s, ", message)
    purposes = [COLLECTIVES[collective][1], "the values of all ranks"]
    waited_for = [f"waited for {purpose} (" for purpose in purposes]
    assert all(any(text in message for text in waited_for) for _, message in events.values())


def test_ranks_synchronise_on_host_before_sum_on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(dist, "get_shared_store", mock.Mock)
    monkeypatch.setattr(torch.distributed, "all_gather_object", lambda *_: calls.append("host"))
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda tensor: calls.append("device"))
    dist.Group(0, 2).sum(torch.empty(1, device="meta"))
    dist.Group(0, 2).sum(torch.empty(1))
    assert calls == ["host", "device", "device"]


class SilentStore:
    """The store of a rank 0 that has ended: it answers no request."""

    def set(self, key: str, value: str) -> None:
        pass

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        raise torch.distributed.DistStoreError("wait timeout")


def test_rank_zero_is_reported_if_the_store_does_not_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def time_out(tensor: torch.Tensor) -> None:
        raise RuntimeError("[gloo/unbound_buffer.cc] Timed out waiting 600000ms for recv")

    monkeypatch.setattr(dist, "get_shared_store", SilentStore)
    monkeypatch.setattr(torch.distributed, "all_reduce", time_out)
    with pytest.raises(dist.MissingRanks, match="rank 0 of its group did not arrive"):
        dist.Group(1, 2).sum(torch.ones(1))


def test_message_for_several_or_no_missing_ranks() -> None:
    assert dist.describe_missing_ranks([1, 3], "a sum", 600.2) == (
        "ranks 1, 3 of its group did not arrive within 600 s, while the others waited for a sum "
        "(restart the node of a rank that hangs)"
    )
    assert "check the network" in dist.describe_missing_ranks([], "a sum", 600.0)
