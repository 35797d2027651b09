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

# Gradients are summed in about NUM_BUCKETS all-reduces (buckets). The target size of a bucket
# is kept in the range BUCKET_BYTES, so a small network has fewer buckets and a large one has more.
BUCKET_BYTES = 1 << 20, 32 << 20
NUM_BUCKETS = 8
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
    # Numbers of the collectives. All ranks call the same collectives in the same order, so a number
    # means the same collective on all ranks.
    _numbers: Iterator[int] = field(
        default_factory=partial(count, 1), init=False, repr=False, compare=False
    )

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum over ranks, in place."""
        if self.world > 1:
            if tensor.device.type != "cpu":
                # The host reads the sum next, and would wait for missing ranks inside NCCL, whose
                # error does not name them. This gather waits for them in gloo, and raises
                # `MissingRanks`, which names them.
                self.gather(None)
            with self.arriving("a sum"):
                dist.all_reduce(tensor)
        return tensor

    def broadcast(self, value: Any) -> Any:
        """Return rank 0's value (a picklable object) on every rank."""
        if self.world == 1:
            return value
        box = [value]
        with self.arriving("a value of rank 0"):
            dist.broadcast_object_list(box, src=0)
        return box[0]

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's value (a picklable object), in rank order, on every rank."""
        if self.world == 1:
            return [value]
        box: list[Any] = [None] * self.world
        with self.arriving("the values of all ranks"):
            dist.all_gather_object(box, value)
        return box

    @contextmanager
    def arriving(self, purpose: str) -> Iterator[None]:
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


class GradientSum:
    """Sums the gradients of parameters over ranks, in flat buckets, in place.

    Inside `overlap` a bucket is sent as soon as it has all its gradients, while the backward pass
    computes others; `finish` sends the rest and waits for all. Buckets are sent in the same order
    on all ranks, whichever fills first: from the last parameter to the first, as backward passes
    compute them. When a bucket is sent has no effect on the sums. Use each object once.

    Example:
        sums = GradientSum(group, parameters)
        with sums.overlap():
            loss.backward()
        sums.finish()

    Args:
        group: The rank.
        parameters: The parameters, in the order of the network.
    """

    def __init__(self, group: Group, parameters: list[Tensor]):
        self.group = group
        self.parameters = parameters
        self.buckets = fill_buckets(parameters) if group.world > 1 else []
        self.sent: list[tuple[Tensor, Any]] = []  # flat gradients of a bucket, handle of the sum

    @contextmanager
    def overlap(self) -> Iterator[None]:
        """Send filled buckets inside the context, which is the last backward pass of a step."""
        unfilled = [len(bucket) for bucket in self.buckets]

        def note(index: int, _: Tensor) -> None:
            unfilled[index] -= 1
            while len(self.sent) < len(unfilled) and not unfilled[len(self.sent)]:
                self._send()

        hooks = [
            parameter.register_post_accumulate_grad_hook(partial(note, index))
            for index, bucket in enumerate(self.buckets)
            for parameter in bucket
            if parameter.requires_grad
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def finish(self) -> int:
        """Wait until the gradients are those of all ranks.

        A missing gradient becomes zero, also with one rank, because the effect on the optimizer
        must not depend on the number of ranks.

        Returns:
            The number of summed bytes per rank.
        """
        for parameter in self.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        if self.group.world == 1:
            return 0
        num_bytes = 0
        with self.group.arriving("the sum of the gradients"):
            while len(self.sent) < len(self.buckets):
                self._send()
            for bucket, (flat, handle) in zip(self.buckets, self.sent, strict=True):
                handle.wait()
                sums = flat.split([parameter.numel() for parameter in bucket])
                for parameter, summed in zip(bucket, sums, strict=True):
                    assert parameter.grad is not None
                    parameter.grad.copy_(summed.view_as(parameter))
                num_bytes += flat.numel() * flat.element_size()
        return num_bytes

    def _send(self) -> None:
        """Send the next bucket, without waiting for its sum."""
        bucket = self.buckets[len(self.sent)]
        flat = torch.cat([p.grad.flatten() for p in bucket if p.grad is not None])
        self.sent.append((flat, dist.all_reduce(flat, async_op=True)))


def fill_buckets(parameters: list[Tensor]) -> list[list[Tensor]]:
    """Divide parameters into buckets, from the last to the first."""
    sizes = {id(p): p.numel() * p.element_size() for p in parameters}
    least, most = BUCKET_BYTES
    limit = min(max(sum(sizes.values()) // NUM_BUCKETS, least), most)
    buckets: list[list[Tensor]] = []
    room = 0
    for parameter in reversed(parameters):
        if room <= 0:
            buckets.append([])
            room = limit
        buckets[-1].append(parameter)
        room -= sizes[id(parameter)]
    return buckets


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
