"""Forecast the memory of a training step by a dry run on tensors without values.

The method, its optimizer and its step are the ones that train. Only the operators are replaced: in
the dry run they compute shapes, so a step of a large backbone takes seconds and almost no memory.
The sizes of all live tensors are added up.

Start reading at `forecast_memory`; `format_memory` prints its result.
"""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from pipeline.config.text import format_bytes, table_text
from pipeline.graph.stage import Graph
from workers import dist, loop, optim
from workers.data import accelerator, torch_internals
from workers.data.batch import Batch
from workers.job import StageJob, Task
from workers.methods.base import OptimPlan, Progress, StepContext, StepData
from workers.methods.registration import load_method
from workers.model import vit
from workers.model.recompute import recompute_blocks
from workers.restore import load_settings
from workers.rng import StepRng

STEPS = 100  # assumed number of optimizer steps of a stage
NEEDS_IMAGES = "it reads images before its first step, and a dry run has none"
NEEDS_TASKS = "it runs from the second task on, and needs the results of the first"
MAX_READS = 10_000  # of values by the host in a dry run, which may otherwise repeat a loop forever
SAMPLES = 20  # assumed number of images of each class, if a method asks for their keys


class StepMemory(NamedTuple):
    """Memory and work of a training step of one rank.

    Attributes:
        label: Label of the method; `backbone` for the training of the backbone on a base task.
        step: Name of the step.
        task: Name of the task: of those with the largest batch, the first.
        batch_size: Number of images in a micro-batch of one rank.
        trained_parameters: Number of parameters that the optimizer changes.
        weight_bytes: Bytes of the backbone and of all tensors of the method before its first step.
            NaN if the dry run failed.
        peak_bytes: Largest number of bytes of live tensors in the second step, in which the
            optimizer has its state. NaN if the dry run failed.
        flops: Floating-point operations of a step, all micro-batches together. NaN if the dry run
            failed.
        reason: Why the dry run failed; empty otherwise.
    """

    label: str
    step: str
    task: str
    batch_size: int
    trained_parameters: int = 0
    weight_bytes: float = math.nan
    peak_bytes: float = math.nan
    flops: float = math.nan
    reason: str = ""


class LiveBytes(torch_internals.DispatchMode):
    """Context that adds up the sizes of live tensors.

    Attributes:
        converter: The surrounding context from `shapes_only`; None in a step with values. It
            converts tensors with values to tensors without. These are not counted a second time.
        live: Bytes of the tensors that are alive.
        peak: Largest value of `live` so far.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.converter: Any = None
        self.num_reads = 0
        self.live = 0
        self.peak = 0
        self.sizes: dict[int, int] = {}  # address of a storage -> its bytes

    def add(self, tensor: Tensor, is_counted: bool = True) -> None:
        """Count the storage of a tensor until it is freed, unless it is known already."""
        storage = tensor.untyped_storage()
        if id(storage) in self.sizes:
            return
        self.sizes[id(storage)] = storage.nbytes() if is_counted else 0
        self.live += self.sizes[id(storage)]
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._remove, id(storage))

    def _remove(self, storage_id: int) -> None:
        self.live -= self.sizes.pop(storage_id)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        converted_inputs = []  # keeps them alive during the operation
        if self.converter is not None:
            if func.overloadpacket.__name__ == "_local_scalar_dense":  # the host reads a value
                self.num_reads += 1
                if self.num_reads > MAX_READS:
                    raise RuntimeError(f"the host reads more than {MAX_READS} values in a step")
                return _make_value(args[0].dtype)
            for tensor in list_tensors([args, kwargs]):
                converted = self.converter.from_tensor(tensor)
                if converted is not tensor:
                    self.add(converted, is_counted=False)
                    converted_inputs.append(converted)
        result = func(*args, **kwargs)
        for tensor in list_tensors(result):
            self.add(tensor)
        return result


def _make_value(dtype: torch.dtype) -> float:
    """Return a value for the host to read: False ends loops whose condition is a tensor."""
    return False if dtype == torch.bool else 1


def list_tensors(value: object) -> list[Tensor]:
    """Return the tensors in nested lists, tuples and dicts."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in list_tensors(item)]
    return []


class ReadsZeros(TorchFunctionMode):
    """Context in which `numpy` and `tolist` of a tensor without values return zeros."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in (Tensor.numpy, Tensor.tolist) and torch_internals.has_no_values(args[0]):
            zeros = np.zeros(tuple(args[0].shape), str(args[0].dtype).removeprefix("torch."))
            return zeros if func is Tensor.numpy else zeros.tolist()
        return func(*args, **(kwargs or {}))


def forecast_memory(graph: Graph, ranks: int, batch_sizes: Mapping[str, int]) -> list[StepMemory]:
    """Forecast the memory of a training step of each method, and of the backbone on a base task.

    Of the tasks, the first one with the largest batch is taken. A dry run takes about 4 s with a
    ViT-Ti, and 10 s with a ViT-L.

    Args:
        graph: The graph of a run, with jobs.
        ranks: Number of ranks that share a batch.
        batch_sizes: Stage id -> number of images in a global batch. Stages without an entry have
            the setting `train.batch_size`, which `train.min_steps` can lower.

    Returns:
        An entry for each training step of the methods. A method that trains nothing has no entry.
    """
    largest: dict[tuple[str, str], tuple[int, StageJob]] = {}
    for stage in graph:
        job = stage.job
        if not isinstance(job, StageJob) or not trains(job):
            continue
        batch_size = batch_sizes.get(stage.id, job.train.batch_size)
        images = math.ceil(batch_size / (ranks * job.train.accumulate))
        key = (stage.method or "backbone", stage.step)
        if key not in largest or images > largest[key][0]:
            largest[key] = (images, job)
    return [
        measure_step(job, images)._replace(label=label)
        for (label, _), (images, job) in largest.items()
    ]


def trains(job: StageJob) -> bool:
    """Return whether the stage has optimizer steps on images."""
    if job.task is None or job.features or not job.train.epochs or not job.method:
        return False
    if job.step == "backbone":
        return not job.task.has_own_head
    return any(step.name == job.step and step.trains for step in load_method(job).steps)


def measure_step(job: StageJob, batch_size: int, has_values: bool = False) -> StepMemory:
    """Measure the live tensors in a training step of one rank.

    The stage starts without carried state, so the step is that of a first task: it has no teacher
    and no replayed images.

    Args:
        job: The stage. Its results need not exist.
        batch_size: Number of images in a micro-batch.
        has_values: Whether to compute the step. False: a dry run.
    """
    assert job.task is not None
    result = StepMemory(job.method, job.step, job.task.name, batch_size)
    if any(step.name == job.step and step.later for step in load_method(job).steps):
        return result._replace(reason=NEEDS_TASKS)
    try:
        with torch.random.fork_rng(devices=[]):
            return _measure_step(job, result, has_values)
    except Exception as error:  # a method can do anything with tensors that have no values
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        if type(error) is LookupError:  # of `StepData`; subclasses are errors of the method
            reason = NEEDS_IMAGES
        return result._replace(reason=reason)


def _measure_step(job: StageJob, result: StepMemory, has_values: bool) -> StepMemory:
    """Return `result` with the numbers."""
    assert job.task is not None
    batch_size = result.batch_size
    torch.manual_seed(job.seed)
    memory = LiveBytes()
    with memory:
        method = load_method(job)(make_backbone(job), load_settings(job), job.seed)
        method.join_stream(job.scenario, job.tasks)
        train = job.train
        rates = OptimPlan(train.lr, train.weight_decay, train.batch_size, STEPS, train.optimizer)
        context = StepContext(
            task=job.task,
            optim=rates,
            step=job.step,
            scenario=job.scenario,
            stream=(job.task,),
            training_tasks=(job.task,),
            data=StepData(task_keys=_make_keys),
        )
        groups = method.begin(context)
        loop.freeze_others(method, groups)
        if train.recompute and method.can_recompute:
            recompute_blocks(vit.list_blocks(method.backbone))
        optimizer = optim.build_optimizer(groups, train)
        method.train()
    for tensor in [*method.parameters(), *method.buffers()]:
        memory.add(tensor)
    weight_bytes = memory.live
    inside: AbstractContextManager[Any] = nullcontext()
    if not has_values:
        inside = memory.converter = torch_internals.shapes_only()
    group = dist.Group()
    size = job.backbone_settings.img_size
    counter = FlopCounterMode(display=False)
    # From the second micro-batch on, gradients are alive in the forward pass.
    num_batches = min(train.accumulate, 2)
    with inside, ReadsZeros(), memory, loop.cast_frozen_layers(job, method):
        for number in range(2):
            memory.peak = memory.live
            indices = torch.arange(batch_size)
            batch = Batch(
                torch.zeros(batch_size, 3, size, size),
                torch.zeros_like(indices),
                torch.zeros_like(indices),
                StepRng(job.seed, 0, number, indices, batch_size, accelerator.CPU, batch_size),
                weight=1 / num_batches,
                counts=(batch_size,),
            )
            progress = Progress(0, number, train.epochs, STEPS)
            # The counter keeps activations alive, so the second step runs without it.
            with counter if number == 0 else nullcontext():
                loop.train_step(method, optimizer, [batch] * num_batches, progress, job, group)
            if number == 0:
                gc.collect()
    return result._replace(
        trained_parameters=sum(p.numel() for p in loop.list_parameters(optimizer)),
        weight_bytes=weight_bytes,
        peak_bytes=memory.peak,
        flops=counter.get_total_flops() * train.accumulate / num_batches,
    )


def make_backbone(job: StageJob) -> nn.Module:
    """Return the backbone of a stage with uniform random weights, which are fast to draw."""
    backbone = vit.outline(job.backbone_settings).to_empty(device="cpu")
    with torch.no_grad():
        for parameter in backbone.parameters():
            parameter.uniform_(-0.02, 0.02)
        for buffer in backbone.buffers():
            buffer.zero_()
    return backbone


def _make_keys(task: Task) -> dict[str, list[str]]:
    """Return assumed keys of images by class."""
    return {name: [f"{name}/{number}" for number in range(SAMPLES)] for name in task.classes}


def format_memory(steps: list[StepMemory]) -> str:
    """Return the table of `forecast_memory` as text, with notes."""
    if not steps:
        return "memory: no method trains"
    head = ["memory of a step", "images", "trained parameters", "weights", "peak", "GFLOP"]
    rows = []
    reasons = []
    for one in steps:
        label = one.label if one.step in ("train", "backbone") else f"{one.label}/{one.step}"
        numbers = [label, str(one.batch_size)]
        if one.reason:
            rows.append([*numbers, "-", "-", "not known", "-"])
            reasons.append(f"not known: {label}: {one.reason}")
            continue
        sizes = [format_bytes(one.weight_bytes), format_bytes(one.peak_bytes)]
        flops = f"{one.flops / 1e9:,.{0 if one.flops > 1e10 else 2}f}"
        rows.append([*numbers, f"{one.trained_parameters:,}", *sizes, flops])
    lines = [
        table_text(head, rows, left=["memory of a step"]),
        "",
        "peak: most bytes of live tensors in a step of one rank on a first task; later tasks can "
        "add a teacher, parts of a network and exemplars, and a GPU adds its own buffers",
        *reasons,
    ]
    return "\n".join(lines)
