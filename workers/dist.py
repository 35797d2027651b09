"""The ranks of one worker group and their collectives. A single rank needs no process group."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

BUCKET_BYTES = 32 << 20


@dataclass(frozen=True)
class Group:
    """One rank of `world` processes, each with one device. world == 1 never calls
    torch.distributed.

    cores: of its node that the rank may use; None: all.
    """

    rank: int = 0
    world: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    cores: int | None = None

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum over ranks, in place."""
        if self.world > 1:
            dist.all_reduce(tensor)
        return tensor

    def sum_gradients(self, parameters: list[Tensor]) -> int:
        """Sum the gradients of `parameters` over ranks, in a few flat buckets.

        A missing gradient becomes zero, on one rank too, because what the optimizer does with it
        must not depend on the number of ranks. Return the bytes that were synchronised per rank.
        """
        for p in parameters:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        if self.world == 1:
            return 0
        total = 0
        bucket: list[Tensor] = []
        bucket_bytes = 0
        for p in parameters:
            assert p.grad is not None
            bucket.append(p.grad)
            bucket_bytes += p.grad.numel() * p.grad.element_size()
            if bucket_bytes >= BUCKET_BYTES:
                total += self._sum_bucket(bucket)
                bucket = []
                bucket_bytes = 0
        if bucket:
            total += self._sum_bucket(bucket)
        return total

    @staticmethod
    def _sum_bucket(bucket: list[Tensor]) -> int:
        flat = torch.cat([grad.flatten() for grad in bucket])
        dist.all_reduce(flat)
        sums = flat.split([grad.numel() for grad in bucket])
        for grad, summed in zip(bucket, sums, strict=True):
            grad.copy_(summed.view_as(grad))
        return flat.numel() * flat.element_size()

    def broadcast(self, value: Any) -> Any:
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
    """Undo a round-robin split over ranks: item i of the result is item i // world of rank i %
    world."""
    world = len(shares)
    total = sum(len(share) for share in shares)
    return [shares[i % world][i // world] for i in range(total)]
