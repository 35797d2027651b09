"""Create the `torch.device` of a process, and call torch's functions for the accelerator.

Other modules compare the type of a device only with `cpu`. Therefore tests can set `TYPE` to a
simulated device and run every branch for a GPU on a machine without a GPU.
"""

from __future__ import annotations

import os
import platform
from typing import Any, Literal

import torch
from torch import nn

TYPE = "cuda"  # `torch.device.type` of the accelerator
CPU = torch.device("cpu")
DeviceName = Literal["cpu", "cuda"]  # name of a device in commands and settings


def functions() -> Any:
    """Return torch's module for the accelerator, for example `torch.cuda`."""
    return torch.get_device_module(TYPE)


def is_available() -> bool:
    """Return whether this machine has an accelerator that torch can use."""
    return bool(functions().is_available())


def make_device(gpus: float) -> torch.device:
    """Return the device of a process that uses this number of GPUs, or fraction of a GPU.

    0 GPUs select the CPU; any other number selects the current GPU of the process. A GPU device has
    an index because some functions of torch require one.
    """
    return torch.device(TYPE, functions().current_device()) if gpus else CPU


def make_named_device(name: DeviceName) -> torch.device:
    """Return the device for the name that a user gives, `cpu` or `cuda`."""
    return make_device(float(name != CPU.type))


def is_accelerator(device: torch.device) -> bool:
    """Return whether a device is the accelerator (any device other than the CPU)."""
    return device.type != CPU.type


def describe_device(device: torch.device) -> str:
    """Return the name of the GPU, or the architecture and number of cores of the CPU."""
    if is_accelerator(device):
        return str(functions().get_device_name(device))
    return f"cpu ({platform.machine()}, {os.cpu_count()} cores)"


def seed_generators(seed: int, device: torch.device) -> None:
    """Seed torch's default random generators of this process, on the CPU and on the GPU.

    `torch.manual_seed` is not used: it also formats a stack trace for each uninitialized backend.
    On a machine without a GPU this takes 1 ms, which is too long for a training step.
    """
    torch.default_generator.manual_seed(seed)
    if is_accelerator(device):
        functions().manual_seed_all(seed)


def use_fp32(tf32: bool = False) -> None:
    """Set how this process computes matrix products and convolutions of fp32 tensors on a GPU.

    By default torch computes convolutions in TF32. A CPU has no TF32. In every precision, cuDNN
    uses deterministic algorithms and selects them by the shapes, not by benchmarks.

    Args:
        tf32: Whether matrix products and convolutions use TF32, which has 10 bits of mantissa.
    """
    torch.backends.cuda.matmul.allow_tf32 = tf32
    torch.backends.cudnn.allow_tf32 = tf32
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False


def choose_memory_format(
    network: nn.Module, device: torch.device, precision: str
) -> torch.memory_format:
    """Choose the memory format of training images.

    CNNs on a GPU use channels last, the format in which Tensor Cores compute convolutions, unless
    the precision is fp32. A convolution computes in its input's format and returns the same format.
    Therefore the images determine the format of the whole network, or of the layers up to the first
    group norm, which returns a contiguous tensor on CUDA. Weights stay contiguous, because methods,
    optimizers and checkpoints read them. A network with at most one convolution does not count as a
    CNN, because a ViT has one convolution, in its patch embedding.

    Args:
        network: The backbone.
        device: Device of the training.
        precision: Precision of the training, as in `train.precision`.
    """
    if precision == "fp32" or not is_accelerator(device):
        return torch.contiguous_format
    convolutions = [module for module in network.modules() if isinstance(module, nn.Conv2d)]
    return torch.channels_last if len(convolutions) > 1 else torch.contiguous_format


# ---- memory --------------------------------------------------------------------------------------
def limit_memory(device: torch.device, gpus: float) -> None:
    """Limit the memory that this process can allocate on its GPU.

    An allocation above the limit raises torch's OutOfMemoryError in this process, and not in other
    processes that share the GPU.

    Args:
        device: Device of this process. Nothing is done for a CPU.
        gpus: Number of GPUs of the process. A number below 1 is the allowed fraction of the memory.
    """
    if is_accelerator(device):
        functions().set_per_process_memory_fraction(min(1.0, gpus), device)


def count_free_bytes(device: torch.device) -> int:
    """Return the number of bytes that this process can still allocate on an accelerator.

    Unused memory in torch's caching allocator counts as free.
    """
    free, total = functions().mem_get_info(device)
    allocated = functions().memory_allocated(device)
    cached = functions().memory_reserved(device) - allocated
    allowed = functions().get_per_process_memory_fraction(device) * total - allocated
    return max(0, int(min(free + cached, allowed)))


def release_memory(device: torch.device) -> None:
    """Free the cached memory of torch's allocator, for other processes that share the GPU."""
    if is_accelerator(device):
        functions().empty_cache()
