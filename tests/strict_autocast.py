"""Autocast on the simulated device: it casts the same operations as CUDA's autocast.

The lists are read from PyTorch's header `ATen/autocast_mode.h`, from which the CUDA kernels are
made. One difference: here a weight is cast at each use; CUDA caches the cast weight until the
context ends.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

KEY = "AutocastPrivateUse1"
HEADER = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"
MACRO = re.compile(r"#define AT_FORALL_(\w+)\(_\)((?:.*\\\n)+.*\n)")
ENTRY = re.compile(r"_\((\w+)(?:, (\w+))?\)")
NORMS = ["norm.Scalar", "norm.ScalarOpt_dim"]  # the header writes these in another way
REFUSED = "binary_cross_entropy"
EXCLUDED = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, KEY))
Choose = Callable[[list[Tensor]], torch.dtype | None]


def read_lists() -> dict[str, list[str]]:
    """Return list name -> names of the operations that CUDA casts.

    LOWER_PRECISION_FP casts to bfloat16; FP32 and FP32_SET_OPT_DTYPE to float32, the latter only if
    the caller gives no dtype; PROMOTE to the widest type among the arguments.
    """
    lists = {}
    for name, body in MACRO.findall(HEADER.read_text()):
        entries = [".".join(filter(None, entry)) for entry in ENTRY.findall(body)]
        if entries:
            lists[name] = entries
    lists["FP32"] += NORMS
    return lists


def is_cast(value: Any, device: str) -> bool:
    """Return whether autocast may cast an argument."""
    return (
        isinstance(value, Tensor)
        and value.device.type == device
        and value.is_floating_point()
        and value.dtype != torch.float64
    )


def make_kernel(name: str, device: str, choose: Choose) -> Callable[..., Any]:
    """Return the kernel of an operation under autocast.

    Args:
        name: Name of the operation, with its overload.
        device: Type of the device.
        choose: Maps the tensors that may be cast to their new dtype; None leaves them unchanged.
    """
    packet, _, overload = name.partition(".")
    operation = getattr(getattr(torch.ops.aten, packet), overload or "default")

    def kernel(*args: Any, **kwargs: Any) -> Any:
        values = (*args, *kwargs.values())
        is_typed = any(isinstance(value, torch.dtype) for value in values)
        dtype = None if is_typed else choose([*find_cast(values, device)])

        def cast(value: Any) -> Any:
            if isinstance(value, (list, tuple)):
                return type(value)(map(cast, value))
            return value.to(dtype) if dtype and is_cast(value, device) else value

        with torch._C._ExcludeDispatchKeyGuard(EXCLUDED):
            return operation(*cast(args), **{key: cast(value) for key, value in kwargs.items()})

    return kernel


def find_cast(values: Any, device: str) -> Iterator[Tensor]:
    """Yield the arguments that autocast may cast, including those in lists."""
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from find_cast(value, device)
        elif is_cast(value, device):
            yield value


def refuse(*args: Any, **kwargs: Any) -> Any:
    """Raise CUDA's error for a loss that is unsafe in low precision."""
    raise RuntimeError(
        f"torch.nn.functional.{REFUSED} and torch.nn.BCELoss are unsafe to autocast; use "
        f"{REFUSED}_with_logits"
    )


def register(device: str) -> list[torch.library.Library]:
    """Register CUDA's autocast rules for the PrivateUse1 device type.

    Returns:
        The libraries. The registration lasts as long as they exist.
    """

    def choose_lower(tensors: list[Tensor]) -> torch.dtype:
        return torch.get_autocast_dtype(device)

    def choose_fp32(tensors: list[Tensor]) -> torch.dtype:
        return torch.float32

    def choose_widest(tensors: list[Tensor]) -> torch.dtype:
        is_wide = any(tensor.dtype == torch.float32 for tensor in tensors)
        return torch.float32 if is_wide else torch.get_autocast_dtype(device)

    policies: dict[str, Choose] = {
        "LOWER_PRECISION_FP": choose_lower,
        "FP32": choose_fp32,
        "FP32_SET_OPT_DTYPE": choose_fp32,
        "PROMOTE": choose_widest,
    }
    others = torch.library.Library("_", "IMPL", KEY)
    others.fallback(torch.library.fallthrough_kernel)
    library = torch.library.Library("aten", "IMPL", KEY)
    for list_name, names in read_lists().items():
        for name in names:
            library.impl(name, make_kernel(name, device, policies[list_name]), KEY)
    library.impl(REFUSED, refuse, KEY)
    return [others, library]
