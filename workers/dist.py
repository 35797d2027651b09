"""The ranks of one worker group: who am I, sum over all, wait for all. One rank needs no process group."""

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
        """Sums the gradients of `parameters` over ranks in a few flat buckets; a missing gradient counts as zero.
        Returns the bytes that were synchronised per rank."""
        if self.world == 1:
            return 0
        total, bucket, size = 0, [], 0
        for p in parameters:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
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
        for grad, summed in zip(bucket, torch._utils._unflatten_dense_tensors(flat, bucket), strict=True):
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


_CURRENT = Group()


def current() -> Group:
    """The group of this process, for terms of a loss that need a mean over the global batch."""
    return _CURRENT


def enter(group: Group) -> None:
    global _CURRENT
    _CURRENT = group


class _GlobalMean(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, weight: float) -> Tensor:
        return _CURRENT.sum(local.detach() * weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def global_mean(local_mean: Tensor, weight: float) -> Tensor:
    """Mean over the global batch of a per-rank mean. `weight` is the rank's share of the global batch (`Batch.weight`).

    The gradient reaches this rank's samples as if the loss had been computed on the whole batch: the train loop scales
    each rank's loss by its weight before it sums gradients over ranks, so none is applied here.
    """
    return local_mean if _CURRENT.world == 1 else _GlobalMean.apply(local_mean, weight)
