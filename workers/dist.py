"""The ranks of one worker group: who am I, sum over all, wait for all. One rank needs no process
group."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

BUCKET_BYTES = 32 << 20


@dataclass(frozen=True)
class Group:
    """rank of world processes, each with one device. world == 1 never touches torch.distributed."""

    rank: int = 0
    world: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum over ranks, in place."""
        if self.world > 1:
            dist.all_reduce(tensor)
        return tensor

    def sum_gradients(self, parameters: list[Tensor]) -> int:
        """Sums the gradients of `parameters` over ranks in a few flat buckets; a missing gradient
        counts as zero. Returns the bytes that were synchronised per rank."""
        for p in parameters:
            if (
                p.grad is None
                # on one rank too: what the optimizer does with it must not depend on the number of
                # ranks
            ):
                p.grad = torch.zeros_like(p)
        if self.world == 1:
            return 0
        total, bucket, size = 0, [], 0
        for p in parameters:
            assert p.grad is not None
            bucket.append(p.grad)
            size += p.grad.numel() * p.grad.element_size()
            if size >= BUCKET_BYTES:
                total += self._sum_bucket(bucket)
                bucket, size = [], 0
        return total + (self._sum_bucket(bucket) if bucket else 0)

    @staticmethod
    def _sum_bucket(bucket: list[Tensor]) -> int:
        flat = torch._utils._flatten_dense_tensors(bucket)
        dist.all_reduce(flat)
        for grad, summed in zip(
            bucket, torch._utils._unflatten_dense_tensors(flat, bucket), strict=True
        ):
            grad.copy_(summed)
        return flat.numel() * flat.element_size()

    def share(self, value: Any) -> Any:
        """Rank 0's value (plain Python), on every rank."""
        if self.world == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value (plain Python), in rank order, on every rank."""
        if self.world == 1:
            return [value]
        box: list[Any] = [None] * self.world
        dist.all_gather_object(box, value)
        return box


def interleave(shares: list[list[Any]]) -> list[Any]:
    """Every rank's share of what went round the ranks in turn, as one list in the order that it
    had."""
    return [shares[i % len(shares)][i // len(shares)] for i in range(sum(map(len, shares)))]
