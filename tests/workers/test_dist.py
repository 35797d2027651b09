"""A rank that does not arrive at a collective is named by the ranks that wait for it."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
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
    "gradients": (lambda group: group.sum_gradients([weight()]), "the sum of the gradients"),
}


def weight() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.ones(3))


def events_of_ranks(folder: Path, collective: str, missing: int) -> dict[int, tuple[str, str]]:
    """Run a stage whose collective one rank never calls, in processes that gloo connects.

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
            time.sleep(2 * LIMIT_S)  # it hangs
            return {}
        COLLECTIVES[collective][0](group)
        # Rank 0 sends its value and goes on.
        group.gather("after it")
        return {}

    stage = Stage("meat/a/train", "train", "k1", {}, ())
    event = attempt.attempt_stage(stage, run, folder, group)
    if rank != missing:
        Path(folder, f"rank-{rank}").write_text(f"{event.kind}\n{event.message}")
    time.sleep(LIMIT_S)  # a process that ends closes its connections


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("collective", "missing"), [("broadcast", 0), ("gather", 1), ("sum", 2), ("gradients", 2)]
)
def test_missing_rank_is_named(tmp_path: Path, collective: str, missing: int) -> None:
    events = events_of_ranks(tmp_path, collective, missing)
    assert events.keys() == set(range(WORLD)) - {missing}
    for kind, message in events.values():
        assert kind == "lost", "the stage is retried on other workers"
        # under load more seconds pass than the limit
        assert re.match(rf"rank {missing} of its group did not arrive within \d+ s, ", message)
    purposes = [COLLECTIVES[collective][1], "the values of all ranks"]
    waited_for = [f"waited for {purpose} (" for purpose in purposes]
    assert all(any(text in message for text in waited_for) for _, message in events.values())


def test_ranks_meet_on_the_host_before_a_sum_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(dist, "get_shared_store", mock.Mock)
    monkeypatch.setattr(torch.distributed, "all_gather_object", lambda *_: calls.append("host"))
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda tensor: calls.append("device"))
    dist.Group(0, 2).sum(torch.empty(1, device="meta"))
    dist.Group(0, 2).sum(torch.empty(1))
    assert calls == ["host", "device", "device"]


class SilentStore:
    """The store of a rank 0 that is gone: no request is answered."""

    def set(self, key: str, value: str) -> None:
        pass

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        raise torch.distributed.DistStoreError("wait timeout")


def test_rank_that_holds_the_store_is_missing_without_an_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def time_out(tensor: torch.Tensor) -> None:
        raise RuntimeError("[gloo/unbound_buffer.cc] Timed out waiting 600000ms for recv")

    monkeypatch.setattr(dist, "get_shared_store", SilentStore)
    monkeypatch.setattr(torch.distributed, "all_reduce", time_out)
    with pytest.raises(dist.MissingRanks, match="rank 0 of its group did not arrive"):
        dist.Group(1, 2).sum(torch.ones(1))


def test_sentence_about_several_ranks_and_about_none() -> None:
    assert dist.describe_missing_ranks([1, 3], "a sum", 600.2) == (
        "ranks 1, 3 of its group did not arrive within 600 s, while the others waited for a sum "
        "(restart the node of a rank that hangs)"
    )
    assert "check the network" in dist.describe_missing_ranks([], "a sum", 600.0)
