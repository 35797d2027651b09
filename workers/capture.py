"""Capture optimizer steps as CUDA graphs, so that a GPU repeats them without Python.

This is `train.compile: step`. For small networks and batches the host is the bottleneck: it takes
longer to launch a kernel than to run it. A CUDA graph launches all kernels of a step at once:
forward pass, loss, backward pass, clipping and the optimizer.

A captured step reads and writes the memory of the step in which it was captured. The values that
change from step to step are copied to this memory first: the batch, its random numbers, the
learning rates, and the numbers that a method derives from the progress or the batch
(`Progress.number`, `Batch.number`). Python code of the method does not run again, so only methods
with `MethodPlan.has_constant_step` are captured.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, fields
from typing import Any, Protocol

import torch
from torch import Tensor

from workers.data import accelerator
from workers.data.batch import Batch
from workers.dist import Group
from workers.methods.base import Method, Progress
from workers.rng import StepRng

# The loss and its terms by name, as `loop.train_step` returns them.
Terms = dict[str, Tensor]
# Computes the gradients and updates the weights: maps (micro-batches, progress) to the terms.
Update = Callable[[list[Batch], Progress], Terms]
# A method of `StepRng`, such as `per_sample`, and its arguments: the tag and the shape.
Draw = tuple[str, str, tuple[int, ...]]
# Number of steps that run normally before one is captured. They allocate the optimizer's state.
WARM_UPS = 3


class Backend(Protocol):
    """Captures the work of a function on a device, to repeat it."""

    def warm_up(self, function: Callable[[], Terms]) -> Terms:
        """Run the function normally."""

    def capture(self, function: Callable[[], Terms]) -> tuple[Callable[[], None], Terms]:
        """Capture the work of the function without running it.

        Returns:
            A function that runs the work, and the result. The tensors of the result have values
            only after the work has run; each run overwrites them.
        """


class CudaGraphs:
    """Captures CUDA graphs. Warm-up steps run on the same stream as the captured step."""

    def __init__(self) -> None:
        self.stream = accelerator.functions().Stream()

    def warm_up(self, function: Callable[[], Terms]) -> Terms:
        cuda = accelerator.functions()
        current = cuda.current_stream()
        self.stream.wait_stream(current)
        with cuda.stream(self.stream):
            terms = function()
        current.wait_stream(self.stream)
        return terms

    def capture(self, function: Callable[[], Terms]) -> tuple[Callable[[], None], Terms]:
        cuda = accelerator.functions()
        graph = cuda.CUDAGraph()
        # "thread_local": threads of the feed may use the GPU during the capture.
        with cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"):
            terms = function()
        replay: Callable[[], None] = graph.replay
        return replay, terms


# Type of a device -> the backend that captures steps on it.
BACKENDS: dict[str, Callable[[], Backend]] = {"cuda": CudaGraphs}


def find_obstacle(method: Method, group: Group) -> str | None:
    """Return why the steps of a method cannot be captured, for a message; None if they can."""
    if group.device.type not in BACKENDS:
        return f"device {group.device.type!r} has no graphs of kernels"
    if group.world > 1:
        return f"{group.world} workers exchange gradients within a step"
    if not vars(type(method)).get("has_constant_step", False):
        return f"steps of method {method.name!r} differ from each other"
    return None


class Tape:
    """The random draws of a batch, each in a tensor that keeps its address.

    Attributes:
        draws: Draw -> its tensor.
        is_open: Whether further draws are added.
    """

    def __init__(self) -> None:
        self.draws: dict[Draw, Tensor] = {}
        self.is_open = True


@dataclass(frozen=True)
class TapedRng(StepRng):
    """Random numbers whose tensors are reused in every step.

    A number is drawn when a method first requests it. Before every later step, `FixedBatch.load`
    draws it again into the same tensor.

    Attributes:
        tape: The draws.
    """

    tape: Tape = field(default_factory=Tape)

    def _draw(self, name: str, tag: str, shape: tuple[int, ...]) -> Tensor:
        draws = self.tape.draws
        key = (name, tag, shape)
        if key not in draws:
            assert self.tape.is_open, f"a captured step draws {key}, which earlier steps did not"
            draws[key] = getattr(StepRng, name)(self, tag, *shape)
        return draws[key]

    def per_sample(self, tag: str, *shape: int, device: torch.device | None = None) -> Tensor:
        assert device in (None, self.device), "draws of a captured step are on its device"
        return self._draw("per_sample", tag, shape)

    def every_sample(self, tag: str, *shape: int) -> Tensor:
        return self._draw("every_sample", tag, shape)

    def shared(self, tag: str, *shape: int) -> Tensor:
        return self._draw("shared", tag, shape)


@dataclass(frozen=True)
class TapedProgress(Progress):
    """A progress whose derived numbers are scalar tensors, written before each step.

    Attributes:
        device: Device of the tensors.
        numbers: Name -> (function of the progress, tensor).
    """

    device: torch.device = accelerator.CPU
    numbers: dict[str, tuple[Callable[[Progress], float], Tensor]] = field(default_factory=dict)

    def number(self, name: str, compute: Callable[[Progress], float]) -> float | Tensor:
        if name not in self.numbers:
            value = torch.tensor(compute(self), device=self.device)
            self.numbers[name] = compute, value
        return self.numbers[name][1]


@dataclass
class TapedBatch(Batch):
    """A batch whose numbers are scalar tensors, written before each step.

    Attributes:
        source: The batch from the feed, from which `numbers` are computed.
        numbers: Name -> (function of the batch, tensor).
    """

    source: Batch | None = None
    numbers: dict[str, tuple[Callable[[Batch], float], Tensor]] = field(default_factory=dict)

    def number(self, name: str, compute: Callable[[Batch], float]) -> float | Tensor:
        assert self.source is not None
        if name not in self.numbers:
            value = torch.tensor(float(compute(self.source)), device=self.images.device)
            self.numbers[name] = compute, value
        return self.numbers[name][1]


class FixedBatch:
    """A batch in tensors that keep their addresses. `load` copies another batch to them.

    `keys` and `counts` of the batch are None: a captured step must not depend on values of the
    host.
    """

    def __init__(self, batch: Batch):
        self.replay: FixedBatch | None = None
        if batch.replay is not None:
            self.replay = FixedBatch(batch.replay)
        self.tape = Tape()
        values = {f.name: getattr(batch.draw, f.name) for f in fields(StepRng)}
        draw = TapedRng(**values, tape=self.tape)
        draw.note_copy(batch.draw.positions_on_device.clone())
        self.batch: TapedBatch = TapedBatch(
            source=batch,
            weight=batch.weight,
            images=batch.images.clone(),
            labels=batch.labels.clone(),
            tasks=batch.tasks.clone(),
            draw=draw,
            targets=None if batch.targets is None else batch.targets.clone(),
            slots=None if batch.slots is None else batch.slots.clone(),
            features=None if batch.features is None else batch.features.clone(),
            keys=None,
            counts=None,
            replay=None if self.replay is None else self.replay.batch,
        )

    def load(self, batch: Batch) -> None:
        """Copy a batch with the same layout (`describe_layout`), its numbers and random draws."""
        self.batch.source = batch
        for compute, number in self.batch.numbers.values():
            number.fill_(compute(batch))
        targets = self.batch.device_tensors()
        for target, source in zip(targets, batch.device_tensors(), strict=True):
            target.copy_(source)
        for (name, tag, shape), target in self.tape.draws.items():
            target.copy_(getattr(batch.draw, name)(tag, *shape))
        if self.replay is not None:
            assert batch.replay is not None
            self.replay.load(batch.replay)

    def close(self) -> None:
        """Allow no further draws."""
        self.tape.is_open = False
        if self.replay is not None:
            self.replay.close()


def describe_layout(batch: Batch) -> Hashable:
    """Return the properties of a batch that are the same in all steps of one program."""
    tensors = tuple((t.shape, t.stride(), t.dtype) for t in batch.device_tensors())
    optional = batch.targets, batch.slots, batch.features
    present = tuple(tensor is not None for tensor in optional)
    replay = None if batch.replay is None else describe_layout(batch.replay)
    return tensors, present, batch.weight, batch.draw.size, replay


class StepCapture:
    """Runs the updates (optimizer steps) of a stage, most of them as replays of a captured update.

    A program is a series of updates that run the same operators on batches of the same layout. A
    new program begins if `Method.program` or the layout changes. The first `WARM_UPS` updates of a
    program run normally, and so does the last batch of an epoch if it is smaller.

    Args:
        method: The method, with `has_constant_step`.
        optimizer: The optimizer. Its learning rates become tensors on the device.
        device: Device of the rank, one of `BACKENDS`.
    """

    def __init__(self, method: Method, optimizer: torch.optim.Optimizer, device: torch.device):
        self.method = method
        self.device = device
        self.backend = BACKENDS[device.type]()
        # The fused optimizers read the learning rate as fp32 on a GPU, and as fp64 on the CPU.
        dtype = torch.float32 if accelerator.is_accelerator(device) else torch.float64
        for group in optimizer.param_groups:
            group["lr"] = torch.tensor(group["lr"], dtype=dtype, device=device)
        self.program: Hashable = None
        self.batches: list[FixedBatch] = []
        self.numbers: dict[str, Any] = {}
        self.warm_ups = 0
        self.replay: Callable[[], None] | None = None
        self.terms: Terms = {}
        # The attributes that a captured step sets on the method. They are set again after each
        # replay, because a step that runs normally, or a validation, sets other values.
        self.attributes: dict[str, Any] = {}

    def run(self, update: Update, batches: list[Batch], progress: Progress) -> Terms:
        """Run an update.

        Args:
            update: The update; always the same function of its arguments.
            batches: The micro-batches of the step.
            progress: The position in the training.

        Returns:
            The terms. They are valid until the next call.
        """
        if not all(batch.draw.is_full for batch in batches):
            return update(batches, progress)
        program = (self.method.program(progress), *map(describe_layout, batches))
        if program != self.program:
            self._begin(program, batches)
        self._load(batches, progress)
        if self.replay is None:
            taped = TapedProgress(
                progress.epoch,
                progress.step,
                progress.epochs,
                progress.steps_per_epoch,
                self.device,
                self.numbers,
            )
            fixed: list[Batch] = [batch.batch for batch in self.batches]
            if self.warm_ups < WARM_UPS:
                self.warm_ups += 1
                return self.backend.warm_up(lambda: update(fixed, taped))
            for batch in self.batches:
                batch.close()
            before = dict(vars(self.method))
            self.replay, self.terms = self.backend.capture(lambda: update(fixed, taped))
            for name, value in vars(self.method).items():
                if name not in before or value is not before[name]:
                    self.attributes[name] = value
        self.replay()
        vars(self.method).update(self.attributes)
        return self.terms

    def _begin(self, program: Hashable, batches: list[Batch]) -> None:
        self.program = program
        self.batches = [FixedBatch(batch) for batch in batches]
        self.numbers = {}
        self.warm_ups = 0
        self.replay = None
        self.terms = {}
        self.attributes = {}

    def _load(self, batches: list[Batch], progress: Progress) -> None:
        for fixed, batch in zip(self.batches, batches, strict=True):
            fixed.load(batch)
        for compute, number in self.numbers.values():
            number.fill_(compute(progress))
