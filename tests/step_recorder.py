"""A stand-in for CUDA graphs on the CPU: record the operators of a step, and replay them.

Like a CUDA graph, it replays operators on the memory of the recorded step, without the Python code
of the step. Recording has no lasting effect: afterwards, all written memory is restored, and all
new tensors contain NaN or the largest integer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from workers.capture import Terms
from workers.data.torch_internals import DispatchMode

# Operators whose results or amount of work depend on values that the host must read.
HOST_READS = {"_local_scalar_dense", "nonzero", "masked_select", "item", "is_nonzero", "unique"}


class HostRead(AssertionError):
    """A step reads a value on the host, which a CUDA graph does not allow."""


class OperatorRecorder(DispatchMode):
    """Record the operators dispatched inside the context.

    Attributes:
        calls: (operator, args, kwargs, result) of each call.
        before: (tensor, copy of the values) from before each write to a tensor.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[Any, Any, Any, Any]] = []
        self.before: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket.__name__ in HOST_READS:
            raise HostRead(f"a step reads a value on the host: {func}")
        for tensor in list_written(func, args, kwargs):
            self.before.append((tensor, tensor.detach().clone()))
        result = func(*args, **kwargs)
        self.calls.append((func, args, kwargs, result))
        return result


def list_written(func: Any, args: Any, kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the arguments that an operator writes to."""
    written: list[Any] = []
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        if index < len(args):
            written += tree_leaves(args[index])
        elif argument.name in kwargs:
            written += tree_leaves(kwargs[argument.name])
    return [value for value in written if isinstance(value, Tensor)]


def is_view(func: Any) -> bool:
    """Return whether the results of an operator share memory with its arguments."""
    return any(result.alias_info is not None for result in func._schema.returns)


class StepRecorder:
    """A `workers.capture.Backend` for the CPU.

    Attributes:
        replays: Number of replayed steps, over all instances.
    """

    replays = 0

    def warm_up(self, function: Callable[[], Terms]) -> Terms:
        return function()

    def capture(self, function: Callable[[], Terms]) -> tuple[Callable[[], None], Terms]:
        recorder = OperatorRecorder()
        generator = torch.default_generator.get_state()
        with recorder:
            terms = function()
        torch.default_generator.set_state(generator)
        with torch.no_grad():
            for func, _, _, result in recorder.calls:
                if not is_view(func):
                    poison(result)
            for tensor, values in reversed(recorder.before):
                tensor.detach().copy_(values)

        @torch.no_grad()
        def replay() -> None:
            type(self).replays += 1
            for func, args, kwargs, result in recorder.calls:
                if list_written(func, args, kwargs):
                    func(*args, **kwargs)
                elif not is_view(func):
                    overwrite(result, func(*args, **kwargs))

        return replay, terms


def poison(result: Any) -> None:
    """Overwrite tensors with NaN, or with the largest integer."""
    for tensor in tree_leaves(result):
        if isinstance(tensor, Tensor) and tensor.numel():
            if tensor.is_floating_point():
                tensor.detach().fill_(torch.nan)
            elif tensor.dtype != torch.bool:
                tensor.detach().fill_(torch.iinfo(tensor.dtype).max)


def overwrite(result: Any, values: Any) -> None:
    """Copy tensors to the memory of the recorded results."""
    for target, value in zip(tree_leaves(result), tree_leaves(values), strict=True):
        if isinstance(target, Tensor):
            target.detach().copy_(value)
