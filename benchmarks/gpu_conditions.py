"""Under what conditions `benchmarks.gpu` runs stages: recorded, interrupted, with equal random
numbers, deterministically."""

from __future__ import annotations

import contextlib
import re
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional

from pipeline.config import ClusterSettings
from pipeline.graph.stage import Stage
from pipeline.graph.store import Store
from pipeline.launch.executor import LocalExecutor
from workers import loop, preemption
from workers.dist import Group
from workers.job import StageJob
from workers.rng import StepRng

CPU = torch.device("cpu")
NO_DETERMINISTIC_FORM = re.compile(
    r"(\S+) does not have a deterministic implementation|"
    r"(Memory Efficient attention) defaults to a non-deterministic algorithm"
)


@dataclass(frozen=True)
class Step:
    """What one optimizer step saw, and its loss."""

    loss: float
    labels: Tensor  # (b,)
    tasks: Tensor  # (b,)
    images: Tensor  # (b, 3, H, W), or what the feed holds in their place


@contextlib.contextmanager
def host_draws() -> Iterator[None]:
    """A step's random numbers come from the CPU's generator, whatever the device: two devices get
    the same."""

    def on_host(method: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def draw(
            self: StepRng, tag: str, *shape: int, device: torch.device | None = None
        ) -> Tensor:
            return method(replace(self, device=CPU), tag, *shape).to(device or self.device)

        return draw

    with (
        mock.patch.object(StepRng, "per_sample", on_host(StepRng.per_sample)),
        mock.patch.object(StepRng, "shared", on_host(StepRng.shared)),
    ):
        yield


def another_rounding(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Where the device is the CPU too, linear layers are computed in double precision: what
    rounding does can be rehearsed."""
    if device.type != "cpu":
        return contextlib.nullcontext()
    linear = functional.linear

    def in_double(images: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        out = linear(images.double(), weight.double(), None if bias is None else bias.double())
        return out.to(images.dtype)

    return mock.patch.object(functional, "linear", in_double)


@contextlib.contextmanager
def deterministic(exceptions: set[str]) -> Iterator[None]:
    """PyTorch takes the deterministic form of every operation that has one; names of those that
    have none go to `exceptions`."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.set_warn_always(True)  # in every case, not in the first one of a process
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_warn_always(False)
        for warning in caught:
            if match := NO_DETERMINISTIC_FORM.match(str(warning.message)):
                exceptions.add(match[1] or match[2])


@contextlib.contextmanager
def recorded_steps() -> Iterator[defaultdict[str, list[Step]]]:
    """Stage id -> its steps of the train loop, as they are taken."""
    steps: defaultdict[str, list[Step]] = defaultdict(list)
    train_step = loop.train_step

    def record(
        method: Any, optimizer: Any, batches: Any, progress: Any, job: StageJob, group: Group
    ) -> Any:
        columns = [
            torch.cat([getattr(batch, name) for batch in batches]).cpu()
            for name in ("labels", "tasks", "images")
        ]
        terms = train_step(method, optimizer, batches, progress, job, group)
        steps[job.id].append(Step(float(terms["loss"]), *columns))
        return terms

    with mock.patch.object(loop, "train_step", record):
        yield steps


@dataclass
class Interruptions:
    """By stage id: the steps that were taken over all tries, and how many there are; which stages
    were told to leave."""

    taken: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))
    total: dict[str, int] = field(default_factory=dict)
    interrupted: set[str] = field(default_factory=set)


@contextlib.contextmanager
def interrupted_steps() -> Iterator[Interruptions]:
    """Tells every training stage once to leave, as SIGTERM does, in the middle of its steps."""
    steps = Interruptions()
    train_step = loop.train_step

    def interrupt(
        method: Any, optimizer: Any, batches: Any, progress: Any, job: StageJob, group: Group
    ) -> Any:
        terms = train_step(method, optimizer, batches, progress, job, group)
        steps.taken[job.id] += 1
        steps.total[job.id] = progress.total
        if progress.global_step == progress.total // 2 and job.id not in steps.interrupted:
            steps.interrupted.add(job.id)
            preemption.requested.set()
        return terms

    with mock.patch.object(loop, "train_step", interrupt):
        yield steps


class WatchedExecutor(LocalExecutor):
    """The executor of `cluster.workers: 0`, which tells what it begins and keeps what was raised.
    The report is left out."""

    def __init__(
        self,
        store: Store,
        cluster: ClusterSettings,
        enter: Callable[[str], None],
        errors: dict[str, Exception],
    ) -> None:
        super().__init__(store, cluster, lambda stage: {}, lambda event: None)
        self.enter = enter
        self.errors = errors

    def _run(self, stage: Stage) -> dict[str, Any]:
        self.enter(stage.id)
        try:
            return super()._run(stage)
        except preemption.Preempted:
            raise
        except Exception as error:
            self.errors[stage.id] = error
            raise
