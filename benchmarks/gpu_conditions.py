"""Context managers of `benchmarks.gpu` that record, interrupt or control the steps of stages."""

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

from pipeline.config.settings import ClusterSettings
from pipeline.graph.stage import Stage
from pipeline.graph.store import Store
from pipeline.launch.local import LocalExecutor
from workers import loop, preemption
from workers.job import StageJob
from workers.rng import StepRng

CPU = torch.device("cpu")
NO_DETERMINISTIC_FORM = re.compile(
    r"(\S+) does not have a deterministic implementation|"
    r"(Memory Efficient attention) defaults to a non-deterministic algorithm"
)


@dataclass(frozen=True)
class Step:
    """Inputs and loss of one optimizer step."""

    loss: float
    labels: Tensor  # (b,)
    tasks: Tensor  # (b,)
    images: Tensor  # (b, 3, H, W), or the features that the feed yields instead


@contextlib.contextmanager
def host_draws() -> Iterator[None]:
    """Draw the random numbers of steps on the CPU, so that they are the same on all devices."""

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
    """Compute linear layers in double precision if the device is the CPU.

    A rehearsal then has different rounding on its two sides, as with a GPU.
    """
    if device.type != "cpu":
        return contextlib.nullcontext()
    linear = functional.linear

    def in_double(images: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if bias is not None:
            bias = bias.double()
        return linear(images.double(), weight.double(), bias).to(images.dtype)

    return mock.patch.object(functional, "linear", in_double)


@contextlib.contextmanager
def deterministic(exceptions: set[str]) -> Iterator[None]:
    """Use deterministic algorithms of PyTorch.

    The names of operations without a deterministic implementation are added to `exceptions`.
    """
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.set_warn_always(True)  # in every case, not only in the first one of a process
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
    """Yield a dictionary that records the steps of the train loop by stage id."""
    steps: defaultdict[str, list[Step]] = defaultdict(list)
    train_step = loop.train_step

    def record(
        method: Any, optimizer: Any, batches: Any, progress: Any, job: StageJob, *rest: Any
    ) -> Any:
        terms = train_step(method, optimizer, batches, progress, job, *rest)
        step = Step(
            float(terms["loss"]),
            labels=torch.cat([batch.labels for batch in batches]).cpu(),
            tasks=torch.cat([batch.tasks for batch in batches]).cpu(),
            images=torch.cat([batch.images for batch in batches]).cpu(),
        )
        steps[job.id].append(step)
        return terms

    with mock.patch.object(loop, "train_step", record):
        yield steps


@dataclass
class Interruptions:
    """Interruptions of training stages.

    Attributes:
        taken: Steps taken over all attempts, by stage id.
        total: Steps of a complete stage, by stage id.
        interrupted: Ids of the interrupted stages.
    """

    taken: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))
    total: dict[str, int] = field(default_factory=dict)
    interrupted: set[str] = field(default_factory=set)


@contextlib.contextmanager
def interrupted_steps() -> Iterator[Interruptions]:
    """Request preemption once per training stage, halfway through its steps, like SIGTERM."""
    steps = Interruptions()
    train_step = loop.train_step

    def interrupt(
        method: Any, optimizer: Any, batches: Any, progress: Any, job: StageJob, *rest: Any
    ) -> Any:
        terms = train_step(method, optimizer, batches, progress, job, *rest)
        steps.taken[job.id] += 1
        steps.total[job.id] = progress.total
        if progress.global_step == progress.total // 2 and job.id not in steps.interrupted:
            steps.interrupted.add(job.id)
            preemption.requested.set()
        return terms

    with mock.patch.object(loop, "train_step", interrupt):
        yield steps


class WatchedExecutor(LocalExecutor):
    """The executor of `cluster.workers: 0`, which also records started stages and exceptions.

    It does not write a report.
    """

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

    def run(self, stage: Stage) -> dict[str, Any]:
        self.enter(stage.id)
        try:
            return super().run(stage)
        except preemption.Preempted:
            raise
        except Exception as error:
            self.errors[stage.id] = error
            raise
