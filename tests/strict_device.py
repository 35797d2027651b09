"""A simulated accelerator that finds device errors on a machine without a GPU.

Tensors store their values on the host, but report the device `strict`. Errors that otherwise only a
GPU would reveal are raised: an operation on tensors of two devices, a generator of another device,
`.numpy()`, a write from the host. Operations that slow down a GPU are counted (`Counts`). The
results are those of CPU kernels.

Streams and events are simulated. It is an error to use a tensor that another stream may still
write, or to free memory that another stream may still use. A device without an index is refused.

Autocast casts the same operations as on CUDA (`tests/strict_autocast.py`).

Not simulated: speed; rounding and summation order of GPU kernels; out-of-memory errors; host memory
that changes while it is copied; collectives; `torch.compile`; several devices.

The device is PyTorch's `PrivateUse1`, and only this module implements its operations. Registration
changes the process permanently, and must happen before the first backward pass. Therefore use the
device in a separate process.
"""

from __future__ import annotations

import contextlib
import operator
import threading
from collections.abc import Iterator
from dataclasses import astuple, dataclass, replace
from typing import Any, ClassVar
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing

from tests import strict_autocast

NAME = "strict"
CPU = torch.device("cpu")
aten: Any = torch.ops.aten

COPIES = {aten._to_copy.default, aten.copy_.default}
INDEXED = {
    aten.index.Tensor,
    aten.index_put.default,
    aten.index_put_.default,
    aten._index_put_impl_.default,
    aten._unsafe_index.Tensor,
}
# The host waits for the device after these operations: it needs the size or value of the result.
READS = {
    aten._local_scalar_dense.default,
    aten.equal.default,
    aten.is_nonzero.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten.bincount.default,
    aten._unique.default,
    aten._unique2.default,
    aten.unique_dim.default,
    aten.unique_consecutive.default,
}
CONCERNED = {
    "device",
    "generator",
}  # arguments that place an operation on the device without a device tensor
TAKES_HOST_SCALARS = {
    aten.fill_.Tensor,
    aten.masked_fill.Tensor,
    aten.masked_fill_.Tensor,
    aten.where.self,
    aten._fused_adamw_.default,
}


@dataclass(frozen=True)
class Counts:
    """Counts of device operations.

    ops: kernels launched, without views and copies. copies: copies from pageable host memory (the
    host waits). reads: values that the host reads (it waits for the device). uploads: copies from
    host memory, pageable or pinned.
    """

    ops: int = 0
    copies: int = 0
    reads: int = 0
    uploads: int = 0

    def __sub__(self, other: Counts) -> Counts:
        differences = map(operator.sub, astuple(self), astuple(other))
        return Counts(*differences)


class DeviceError(RuntimeError):
    """An operation that CUDA would refuse."""


class StrictTensor(torch.Tensor):
    """A tensor on the device; `values` are its numbers on the host."""

    values: Tensor  # type: ignore[assignment]  # a method of sparse tensors in torch.Tensor
    block: Block  # memory, shared by views
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls: Any, values: Tensor) -> StrictTensor:
        wrapper: StrictTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            values.shape,
            strides=values.stride(),
            storage_offset=values.storage_offset(),
            dtype=values.dtype,
            device=torch.device(NAME, 0),
        )
        wrapper.values = values
        wrapper.block = Block(current_stream(), current().errors)
        return wrapper

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares it without `cls`
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return current().execute(func, args, kwargs or {})

    def numpy(self, *arguments: Any, **options: Any) -> Any:
        raise TypeError(
            f"can't convert {self.device} device type tensor to numpy. Use Tensor.cpu() to copy "
            "the tensor to host memory first."
        )

    def __array__(self, *arguments: Any, **options: Any) -> Any:
        return self.numpy()

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def record_stream(self, stream: Any) -> None:
        self.block.recorded.add(stream)

    def untyped_storage(self) -> Any:
        return self.values.untyped_storage()

    def data_ptr(self) -> int:
        return self.values.data_ptr()

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, other: Tensor) -> None:
        if not isinstance(other, StrictTensor):
            raise DeviceError(
                f"attempted to set the data of a tensor on {self.device} to a tensor on "
                f"{other.device}"
            )
        torch.Tensor.data.__set__(self, other)  # type: ignore[attr-defined]
        self.values = other.values
        self.block = other.block

    def __deepcopy__(self, memo: dict[int, Any]) -> StrictTensor:
        if id(self) not in memo:
            copied = self.detach().clone()
            made: Any = nn.Parameter(copied) if isinstance(self, nn.Parameter) else copied
            made.requires_grad_(self.requires_grad)
            if self.grad is not None:
                made.grad = self.grad.detach().clone()
            memo[id(self)] = made
        copy: StrictTensor = memo[id(self)]
        return copy

    def __repr__(self, **options: Any) -> str:  # type: ignore[override]
        return f"StrictTensor({self.values})"


class Stream(torch.Stream):
    """A queue of operations. Data written on another stream may be used only after `wait_event`.

    time: number of launched operations. seen: for each stream, the time up to which this stream has
    waited for it.
    """

    def __new__(cls, device: Any = None) -> Any:
        return super().__new__(cls, device=indexed(device))

    def __init__(self, device: Any = None) -> None:
        self.time = 0
        self.seen: dict[Stream, int] = {}

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other

    def record_event(self, event: Any = None) -> Any:
        return {**self.seen, self: self.time}

    def wait_event(self, event: Any) -> None:
        for stream, time in event.items():
            self.seen[stream] = max(time, self.seen.get(stream, 0))

    def wait_stream(self, stream: Any) -> None:
        self.wait_event(stream.record_event())


class CurrentStream(threading.local):
    """The current stream of each thread. None: the default stream, shared by all threads."""

    stream: Stream | None = None


class Block:
    """The memory of a tensor and its views.

    stream: the stream of the allocation, which reuses the memory after it is freed. written: stream
    and time of the last write. used: time of the last use on each other stream. recorded: streams
    passed to `record_stream`. errors: list for errors found when the memory is freed.
    """

    def __init__(self, stream: Stream, errors: list[str]) -> None:
        self.stream = stream
        self.errors = errors
        self.written = (stream, stream.time)
        self.used: dict[Stream, tuple[int, Any]] = {}
        self.recorded: set[Any] = set()

    def use(self, func: Any) -> None:
        """Record a use by the current stream. Raise DeviceError if it may not use this memory."""
        stream = current_stream()
        writer, time = self.written
        if writer is not stream and stream.seen.get(writer, 0) < time:
            raise DeviceError(
                f"{func}: another stream may still be writing this tensor; wait for its event"
            )
        if stream is not self.stream:
            self.used[stream] = (stream.time + 1, func)

    def __del__(self) -> None:
        for stream, (time, func) in self.used.items():
            if stream not in self.recorded and self.stream.seen.get(stream, 0) < time:
                self.errors.append(
                    f"{func}: memory was freed, and may be used again, before a stream that uses "
                    "it was done; call record_stream, or wait for that stream"
                )


class Generator(torch._C.Generator):
    """`torch.Generator` that accepts the strict device and draws the numbers of a CPU generator."""

    _cdata: int  # address of the generator
    # keyed by address: operations receive a different Python object of the same generator
    by_address: ClassVar[dict[int, torch.device]] = {}

    def __new__(cls, device: Any = CPU) -> Any:
        device = torch.device(device)
        generator: Any = torch._C.Generator(device) if device.type != NAME else super().__new__(cls)
        cls.by_address[generator._cdata] = device
        return generator

    def __init__(self, device: Any = CPU) -> None:
        super().__init__()

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self.by_address[self._cdata]


class StrictDevice(TorchDispatchMode):
    """Executes and counts all operations that involve the device. Use `strict_device()`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts = Counts()
        self.lock = threading.Lock()
        self.pinned: set[int] = set()
        self.errors: list[str] = []  # stream errors

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if StrictTensor not in types and not kwargs.keys() & CONCERNED and func not in PINNING:
            return func(*args, **kwargs)  # host operation
        return self.execute(func, args, kwargs)

    def add(self, **changes: int) -> None:
        """Increase the named counts."""
        with self.lock:
            self.counts = replace(
                self.counts,
                **{name: getattr(self.counts, name) + count for name, count in changes.items()},
            )

    def execute(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Execute one operation of the dispatcher, and return its result.

        It runs on the device if an input tensor or the result is on the device.
        """
        if func in PINNING:
            return PINNING[func](self, args[0])
        tensors = [*tensors_in((*args, *kwargs.values()))]
        device_tensors = [t for t in tensors if isinstance(t, StrictTensor)]
        target = kwargs.get("device")
        target = (
            torch.device(target)
            if target is not None
            else torch.device(NAME if device_tensors else "cpu")
        )
        if not device_tensors and target.type != NAME:
            check_generator(func, kwargs, CPU)
            return func(*args, **kwargs)
        check_generator(func, kwargs, target)
        if func in COPIES:
            self.count_copy(tensors, kwargs)
        else:
            self.check_devices(func, args, kwargs, tensors, device_tensors)
            self.count_op(func, args, kwargs)
        for tensor in device_tensors:
            tensor.block.use(func)
        plain = {
            name: mapped(values_of, value) for name, value in kwargs.items() if name != "pin_memory"
        }
        if kwargs.get("device") is not None:
            plain["device"] = CPU
        result = func(*mapped(values_of, args), **plain)
        if target.type == NAME:
            result = mapped(StrictTensor, result)
            self.launched(func, args, kwargs, device_tensors, result)
        if func.is_view or func._schema.is_mutable:
            return return_and_correct_aliasing(func, args, kwargs, result)
        return result

    # ---- streams ---------------------------------------------------------------------------------
    def launched(
        self,
        func: Any,
        args: Any,
        kwargs: dict[str, Any],
        device_tensors: list[StrictTensor],
        result: Any,
    ) -> None:
        """Record the memory blocks that an operation wrote on the current stream."""
        results = [t for t in tensors_in((result,)) if isinstance(t, StrictTensor)]
        if func.is_view:
            for view in results:
                view.block = device_tensors[0].block
            return
        named = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
        written = [named.get(a.name) for a in func._schema.arguments if is_written(a)]
        stream = current_stream()
        stream.time += 1
        for tensor in (*results, *tensors_in(written)):
            if isinstance(tensor, StrictTensor):
                tensor.block.written = (stream, stream.time)

    # ---- device checks ---------------------------------------------------------------------------
    def check_devices(
        self,
        func: Any,
        args: Any,
        kwargs: dict[str, Any],
        tensors: list[Tensor],
        device_tensors: list[StrictTensor],
    ) -> None:
        """Raise DeviceError if CUDA would refuse the mix of host and device tensors."""
        strangers = [t for t in tensors if not isinstance(t, StrictTensor)]
        if not strangers or not device_tensors:
            return
        named = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
        written = [named.get(a.name) for a in func._schema.arguments if is_written(a)]
        device = device_tensors[0].device
        if any(isinstance(t, Tensor) and not isinstance(t, StrictTensor) for t in written):
            raise DeviceError(f"{func}: the output is on the CPU, and another tensor on {device}")
        if func in INDEXED and isinstance(args[0], StrictTensor):
            indices = [
                t for t in args[1] if isinstance(t, Tensor) and not isinstance(t, StrictTensor)
            ]
            pageable = sum(not self.is_pinned(t) for t in indices)
            self.add(copies=pageable, uploads=len(indices))
            strangers = [t for t in strangers if all(t is not index for index in indices)]
        if all(t.ndim == 0 for t in strangers) and (
            torch.Tag.pointwise in func.tags or func in TAKES_HOST_SCALARS | INDEXED
        ):
            return
        raise DeviceError(
            "Expected all tensors to be on the same device, but found at least two devices, "
            f"{device} and cpu! (in {func})"
        )

    # ---- counts ----------------------------------------------------------------------------------
    def count_copy(self, tensors: list[Tensor], kwargs: dict[str, Any]) -> None:
        """Count a copy: `_to_copy(source, device=)` or `copy_(target, source)`."""
        source = tensors[-1]
        to_device = (
            isinstance(tensors[0], StrictTensor)
            if len(tensors) == 2
            else kwargs.get("device") is None or torch.device(kwargs["device"]).type == NAME
        )
        if isinstance(source, StrictTensor):
            self.add(**{"ops" if to_device else "reads": 1})
        else:
            self.add(uploads=1, copies=int(not self.is_pinned(source)))

    def count_op(self, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
        """Count a kernel, and a read if the host waits for its result."""
        if not func.is_view:
            self.add(ops=1, reads=int(waits(func, args, kwargs)))

    # ---- pinned memory ---------------------------------------------------------------------------
    def pin(self, tensor: Tensor) -> Tensor:
        """Return a copy of a host tensor that is treated as pinned."""
        if isinstance(tensor, StrictTensor):
            raise DeviceError(
                "cannot pin a tensor that is on the device, only dense CPU tensors can be pinned"
            )
        pinned = tensor.clone()
        self.pinned.add(pinned.untyped_storage().data_ptr())
        return pinned

    def is_pinned(self, tensor: Tensor) -> bool:
        """Return whether a tensor's memory was pinned by `pin`."""
        return (
            not isinstance(tensor, StrictTensor)
            and tensor.untyped_storage().data_ptr() in self.pinned
        )


PINNING = {
    aten._pin_memory.default: StrictDevice.pin,
    aten.pin_memory.default: StrictDevice.pin,
    aten.is_pinned.default: StrictDevice.is_pinned,
}


def tensors_in(values: Any) -> Iterator[Tensor]:
    """Yield the tensors among the arguments of an operation, including those in lists."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(value)


def mapped(fn: Any, value: Any) -> Any:
    """Apply `fn` to each tensor in `value`, including those in lists and tuples."""
    if isinstance(value, Tensor):
        return fn(value)
    if isinstance(value, (list, tuple)):
        return type(value)(mapped(fn, item) for item in value)
    return value


def values_of(tensor: Tensor) -> Tensor:
    """Return the host values of a tensor on any device."""
    return tensor.values if isinstance(tensor, StrictTensor) else tensor


def is_written(argument: Any) -> bool:
    """Return whether an operation writes to this schema argument."""
    return argument.alias_info is not None and argument.alias_info.is_write


def waits(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Return whether the host must wait until the device has computed the result."""
    if func in READS:
        return True
    if func is aten.repeat_interleave.Tensor:
        return kwargs.get("output_size") is None
    if func not in INDEXED:
        return False
    masks = [
        t for t in args[1] if isinstance(t, StrictTensor) and t.dtype in (torch.bool, torch.uint8)
    ]
    # index_put of one value with one mask runs as masked_fill
    filled = len(args) > 2 and len(args[1]) == 1 and args[2].numel() == 1
    return bool(masks) and not filled


def check_generator(func: Any, kwargs: dict[str, Any], device: torch.device) -> None:
    """Raise DeviceError if an operation on `device` gets a generator of another device."""
    generator = kwargs.get("generator")
    if generator is None:
        return
    generator_device = Generator.by_address.get(generator._cdata, CPU)
    if generator_device.type != device.type:
        raise DeviceError(
            f"Expected a {device.type!r} device type for generator but found "
            f"{generator_device.type!r} (in {func})"
        )


def become(parameter: Tensor, other: Tensor) -> None:
    """Give `parameter` the class and contents of `other`, without creating a new Python object.

    All references to the parameter stay valid, as after `Module.to` with a real device.
    """
    for name in ("__class__", "__dict__"):
        parameter_value = getattr(parameter, name)
        other_value = getattr(other, name)
        setattr(parameter, name, other_value)
        setattr(other, name, parameter_value)
    torch._C._swap_tensor_impl(parameter, other)


def apply(module: nn.Module, fn: Any, recurse: bool = True) -> nn.Module:
    """Replacement of `Module._apply`, which `Module.to` uses.

    PyTorch's version refuses to swap a tensor that has a weak reference.
    """
    for child in module.children() if recurse else ():
        child._apply(fn)
    for parameter in module._parameters.values():
        if parameter is None:
            continue
        gradient, parameter.grad = parameter.grad, None
        with torch.no_grad():
            moved = fn(parameter)
        if moved is not parameter:
            become(parameter, nn.Parameter(moved, parameter.requires_grad))
        if gradient is not None:
            with torch.no_grad():
                parameter.grad = fn(gradient)
    for name, buffer in module._buffers.items():
        if buffer is not None:
            module._buffers[name] = fn(buffer)
    return module


class Backend:  # function names follow `torch.cuda`
    """The module `torch.strict`, with the functions that PyTorch expects of a backend."""

    _is_in_bad_fork = staticmethod(lambda: False)
    is_initialized = is_available = staticmethod(lambda: True)
    current_device = staticmethod(lambda: 0)
    device_count = staticmethod(lambda: 1)
    manual_seed_all = staticmethod(lambda seed: None)
    get_amp_supported_dtype = staticmethod(lambda: [torch.bfloat16])
    OutOfMemoryError = torch.OutOfMemoryError
    fraction = 1.0  # share of the memory that this process may allocate
    free = total = 1 << 40  # bytes
    reserved = allocated = 0
    emptied = 0  # number of `empty_cache` calls

    def get_device_name(self, device: Any) -> str:
        indexed(device)
        return "simulated device"

    def mem_get_info(self, device: Any) -> tuple[int, int]:
        indexed(device)
        return self.free, self.total

    def memory_reserved(self, device: Any) -> int:
        indexed(device)
        return self.reserved

    def memory_allocated(self, device: Any) -> int:
        indexed(device)
        return self.allocated

    def set_per_process_memory_fraction(self, fraction: float, device: Any) -> None:
        indexed(device)
        if not isinstance(fraction, float):
            raise TypeError("Invalid type for fraction argument, must be `float`")
        self.fraction = fraction

    def get_per_process_memory_fraction(self, device: Any) -> float:
        indexed(device)
        return self.fraction

    def empty_cache(self) -> None:
        self.emptied += 1

    def utilization(self, device: Any) -> int:
        indexed(device)
        return 50

    def synchronize(self, device: Any) -> None:
        indexed(device)

    def Stream(self, device: Any) -> Stream:
        return Stream(device)

    def current_stream(self, device: Any) -> torch.Stream:
        indexed(device)
        return current_stream()

    @contextlib.contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        before = streams.stream
        streams.stream = stream
        try:
            yield
        finally:
            streams.stream = before


def indexed(device: torch.device) -> torch.device:
    """Return the device. Raise the ValueError of CUDA functions if it has no index."""
    if device.index is None:
        raise ValueError(
            f"Expected a torch.device with a specified index or an integer, but got:{device}"
        )
    return device


streams = CurrentStream()
defaults: list[Stream] = []  # the default stream, once created


def current_stream() -> Stream:
    """Return the current stream of this thread."""
    if not defaults:
        defaults.append(Stream(torch.device(NAME, 0)))
    return streams.stream or defaults[0]


libraries: list[torch.library.Library] = []  # keep references: a freed library unregisters


def register() -> None:
    """Register the device in this process.

    Raises RuntimeError if another backend is registered as PrivateUse1.
    """
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    if not hasattr(torch, NAME):
        _setup_privateuseone_for_python_backend(NAME, Backend())
        libraries.extend(strict_autocast.register(NAME))


active: list[StrictDevice] = []


def current() -> StrictDevice:
    """Return the innermost active `strict_device()`, or raise DeviceError."""
    if not active:
        raise DeviceError("a tensor of the strict device is used outside of `strict_device()`")
    return active[-1]


@contextlib.contextmanager
def strict_device() -> Iterator[StrictDevice]:
    """Context manager that allows moving tensors and modules to `torch.device("strict")`, also in
    threads started inside."""
    register()
    mode = StrictDevice()
    run = threading.Thread.run

    def run_in_mode(thread: threading.Thread) -> None:
        with mode:
            run(thread)

    active.append(mode)
    # torch.tensor(data, device=...) then creates a CPU tensor and copies it with an operation
    torch._C._set_only_lift_cpu_tensors(True)
    try:
        with (
            mode,
            mock.patch.object(torch, "Generator", Generator),
            mock.patch.object(nn.Module, "_apply", apply),
            mock.patch.object(threading.Thread, "run", run_in_mode),
        ):
            yield mode
        if mode.errors:
            raise DeviceError(mode.errors[0])
    finally:
        torch._C._set_only_lift_cpu_tensors(False)
        active.pop()
        Generator.by_address.clear()
