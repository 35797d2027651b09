"""The ranks of a worker group, and their collectives. A single rank needs no process group."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

BUCKET_BYTES = 32 << 20  # approximate bytes of gradients in one all-reduce
WAIT_S = 600.0  # maximum seconds that a rank waits for other ranks in a collective
STORE_ANSWER_S = 10.0  # maximum seconds to wait for an answer of rank 0, which holds the store
TIMED_OUT = "Timed out waiting"  # text of gloo's error after WAIT_S


class MissingRanks(RuntimeError):
    """Some ranks did not arrive at a collective in which other ranks waited."""


@dataclass(frozen=True)
class Group:
    """One rank of `world` processes, each with one device.

    With `world == 1`, torch.distributed is never called. If a rank does not arrive at a collective
    of the gloo backend within its timeout, the waiting ranks raise `MissingRanks`.

    Attributes:
        rank: Index of this rank, from 0.
        world: Number of ranks.
        device: Device of this rank.
        cores: Number of cores of the node that the rank can use. None: all.
    """

    rank: int = 0
    world: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    cores: int | None = None
    # Numbers of the collectives. All ranks call the same collectives in the same order.
    _numbers: Iterator[int] = field(
        default_factory=partial(count, 1), init=False, repr=False, compare=False
    )

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum over ranks, in place."""
        if self.world > 1:
            if tensor.device.type != "cpu":
                # The host reads the sum next, and would wait for missing ranks inside NCCL, whose
                # error does not name them. This gather waits for them by gloo, whose error does.
                self.gather(None)
            with self._arriving("a sum"):
                dist.all_reduce(tensor)
        return tensor

    def sum_gradients(self, parameters: list[Tensor]) -> int:
        """Sum the gradients of `parameters` over ranks, in a few flat buckets.

        A missing gradient becomes zero, also with one rank, because the effect on the optimizer
        must not depend on the number of ranks.

        Returns:
            The number of summed bytes per rank.
        """
        for p in parameters:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        if self.world == 1:
            return 0
        with self._arriving("the sum of the gradients"):
            return self._sum_in_buckets([p.grad for p in parameters if p.grad is not None])

    def _sum_in_buckets(self, gradients: list[Tensor]) -> int:
        total = 0
        bucket: list[Tensor] = []
        bucket_bytes = 0
        for gradient in gradients:
            bucket.append(gradient)
            bucket_bytes += gradient.numel() * gradient.element_size()
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
        """Return rank 0's value (a picklable object) on every rank."""
        if self.world == 1:
            return value
        box = [value]
        with self._arriving("a value of rank 0"):
            dist.broadcast_object_list(box, src=0)
        return box[0]

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's value (a picklable object), in rank order, on every rank."""
        if self.world == 1:
            return [value]
        box: list[Any] = [None] * self.world
        with self._arriving("the values of all ranks"):
            dist.all_gather_object(box, value)
        return box

    @contextmanager
    def _arriving(self, purpose: str) -> Iterator[None]:
        """Context manager around a collective. It first records that this rank has arrived.

        The number of the collective is written to the store of torch.distributed, without waiting
        for an answer. After a timeout, the numbers of the other ranks tell which are missing.

        Args:
            purpose: Purpose of the collective, for the error message.

        Raises:
            MissingRanks: If the collective has timed out.
        """
        number = next(self._numbers)
        started = time.monotonic()
        get_shared_store().set(make_arrival_key(self.rank), str(number))
        try:
            yield
        except RuntimeError as error:
            if TIMED_OUT not in str(error):
                raise
            waited_s = time.monotonic() - started
            sentence = describe_missing_ranks(self._find_missing(number), purpose, waited_s)
            raise MissingRanks(sentence) from None

    def _find_missing(self, number: int) -> list[int]:
        """Return the ranks that have not arrived at collective number `number`."""
        store = get_shared_store()
        try:
            store.wait([make_arrival_key(self.rank)], timedelta(seconds=STORE_ANSWER_S))
            missing = []
            for rank in range(self.world):
                key = make_arrival_key(rank)
                if not store.check([key]) or int(store.get(key)) < number:
                    missing.append(rank)
            return missing
        except RuntimeError:  # rank 0 holds the store, and does not answer
            return [0]


def get_shared_store() -> Any:
    """Return the key-value store that the ranks of this process group share."""
    group = dist.group.WORLD
    assert group is not None, "there is no process group"
    return group.get_group_store()


def make_arrival_key(rank: int) -> str:
    """Return the store key for the number of a rank's last collective."""
    return f"arrivals/{rank}"


def describe_missing_ranks(ranks: list[int], purpose: str, waited_s: float) -> str:
    """Describe the ranks that did not arrive at a collective.

    Args:
        ranks: The missing ranks. Empty if all arrived; then the network between them is slow or
            broken.
        purpose: Purpose of the collective.
        waited_s: Time that this rank waited, in seconds.
    """
    if not ranks:
        return (
            f"all ranks arrived, but {purpose} did not come within {waited_s:.0f} s; check the "
            "network between the nodes of the group"
        )
    names = ", ".join(map(str, ranks))
    subject = f"rank {names}" if len(ranks) == 1 else f"ranks {names}"
    return (
        f"{subject} of its group did not arrive within {waited_s:.0f} s, while the others waited "
        f"for {purpose} (restart the node of a rank that hangs)"
    )


def interleave(shares: list[list[Any]]) -> list[Any]:
    """Undo a round-robin split over ranks: item i is item i // world of `shares[i % world]`."""
    world = len(shares)
    total = sum(len(share) for share in shares)
    return [shares[i % world][i // world] for i in range(total)]
