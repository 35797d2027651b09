"""Compare the time that ranks wait for gradient sums sent during and after the backward pass.

Command: `python -m benchmarks.gradient_overlap`. Four gloo ranks fine-tune a ViT-Ti. Each rank
simulates a link that carries one bucket after the other. The bandwidth is chosen so that all
buckets together take half of the time of a backward pass. Both variants send the same buckets, and
their sums must be equal bit for bit.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import timm
import torch
import torch.distributed
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from benchmarks import harness
from workers import dist

RANKS, ROUNDS = 4, 12
LINK_SHARE = 0.5  # time of all buckets on the link, relative to the backward pass


class Handle:
    """Handle of a sum on the simulated link."""

    def __init__(self, future: Future[None]):
        self.wait = future.result


class Link:
    """A simulated link that carries one bucket at a time."""

    def __init__(self, bytes_per_s: float):
        self.bytes_per_s = bytes_per_s
        self.thread = ThreadPoolExecutor(1)

    def all_reduce(self, tensor: Tensor, async_op: bool) -> Handle:
        """Start the sum of a tensor over the ranks."""
        return Handle(self.thread.submit(self._carry, tensor))

    def _carry(self, tensor: Tensor) -> None:
        time.sleep(tensor.numel() * tensor.element_size() / self.bytes_per_s)
        torch.distributed.all_reduce(tensor)


class LinkedCollectives:
    """Replaces `torch.distributed` in `workers.dist`. Sums pass through the simulated link."""

    def __init__(self, link: Link):
        self.link = link

    def __getattr__(self, name: str) -> Any:
        return getattr(self.link if name == "all_reduce" else torch.distributed, name)


def measure(group: dist.Group) -> dict[str, Any]:
    """Measure one rank: seconds waiting for the sums, and in total with the backward pass."""
    torch.manual_seed(0)
    model: Any = timm.create_model("vit_tiny_patch16_224", img_size=96, num_classes=10)
    parameters = list(model.parameters())
    images = torch.randn(8, 3, 96, 96, generator=torch.Generator().manual_seed(group.rank))

    def step(overlaps: bool) -> tuple[float, float, list[Tensor]]:
        for parameter in parameters:
            parameter.grad = None
        loss = model(images).square().mean()
        sums = dist.GradientSum(group, parameters)
        torch.distributed.barrier()
        started = time.perf_counter()
        with sums.overlap() if overlaps else nullcontext():
            loss.backward()
        computed = time.perf_counter()
        sums.finish()
        ended = time.perf_counter()
        return computed - started, ended - computed, [p.grad for p in parameters]

    backward_s = statistics.median(step(False)[0] for _ in range(4))
    backward_s = max(group.gather(backward_s))
    num_bytes = sum(p.numel() * p.element_size() for p in parameters)
    link = Link(num_bytes / (LINK_SHARE * backward_s))
    dist.dist = LinkedCollectives(link)  # type: ignore[attr-defined, assignment]
    waited: dict[bool, list[float]] = {True: [], False: []}
    total: dict[bool, list[float]] = {True: [], False: []}
    is_equal = True
    for _ in range(ROUNDS):
        gradients = {}
        for overlaps in (True, False):
            computed_s, waited_s, gradients[overlaps] = step(overlaps)
            waited[overlaps].append(waited_s)
            total[overlaps].append(computed_s + waited_s)
        is_equal &= all(map(torch.equal, gradients[True], gradients[False]))
    return {
        "waited": [statistics.median(waited[key]) for key in (True, False)],
        "total": [statistics.median(total[key]) for key in (True, False)],
        "is_equal": is_equal,
        "buckets": len(dist.fill_buckets(parameters)),
    }


def run_rank(rank: int, folder: str) -> None:
    """Run the measurement of one rank. Rank 0 writes the results of all ranks to a file."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=RANKS
    )
    group = dist.Group(rank, RANKS)
    results = group.gather(measure(group))
    if rank == 0:
        Path(folder, "results.json").write_text(json.dumps(results))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def main() -> None:
    """Compare the waiting times of both variants."""
    harness.start()
    report = harness.Report()
    with tempfile.TemporaryDirectory() as folder:
        spawn(run_rank, (folder,), nprocs=RANKS)
        ranks = json.loads(Path(folder, "results.json").read_text())
    report.equal(
        "gradients sent during the backward pass against those sent after it, ranks that differ",
        torch.tensor(sum(not rank["is_equal"] for rank in ranks)),
        torch.tensor(0),
        atol=0,
    )
    waited = [statistics.median(rank["waited"][i] for rank in ranks) for i in range(2)]
    report.at_most("waiting for the sums, during against after", waited[0] / waited[1], 0.25)
    total = [statistics.median(rank["total"][i] for rank in ranks) for i in range(2)]
    report.note("backward pass and waiting, during against after", f"{total[0] / total[1]:.2f}")
    report.note("buckets", str(ranks[0]["buckets"]))
    report.exit()


if __name__ == "__main__":
    main()
