"""Make the device of a process, and call torch's functions for it.

No other module compares the type of a device with anything but `cpu`. So tests can set `TYPE` to a
simulated device, and every branch for a GPU runs without one.
"""

from __future__ import annotations

import os
import platform
from typing import Any, Literal

import torch
from torch import nn

TYPE = "cuda"  # type of the accelerator's devices
CPU = torch.device("cpu")
DeviceName = Literal["cpu", "cuda"]  # as users write it


def functions() -> Any:
    """Return torch's functions for the accelerator: `torch.cuda`."""
    return torch.get_device_module(TYPE)


def is_available() -> bool:
    """Return whether this machine has an accelerator that torch can use."""
    return bool(functions().is_available())


def make_device(gpus: float) -> torch.device:
    """Return the device of a process that takes so many GPUs, or a fraction of one; 0: the CPU.

    It has an index: functions of torch refuse a device without.
    """
    return torch.device(TYPE, functions().current_device()) if gpus else CPU


def named_device(name: DeviceName) -> torch.device:
    """Return the device that users call `cpu` or `cuda`."""
    return make_device(float(name != CPU.type))


def is_accelerator(device: torch.device) -> bool:
    """Return whether a device is a GPU and not the CPU."""
    return device.type != CPU.type


def describe(device: torch.device) -> str:
    """Return the name of the GPU, or the architecture and number of cores of the CPU."""
    if is_accelerator(device):
        return str(functions().get_device_name(device))
    return f"cpu ({platform.machine()}, {os.cpu_count()} cores)"


def seed_generators(seed: int, device: torch.device) -> None:
    """Seed the generators with which this process draws on the CPU and on its GPU.

    `torch.manual_seed` also formats a stack trace for each backend that torch has not initialized,
    which takes 1 ms on a machine without a GPU: too long for each training step.
    """
    torch.default_generator.manual_seed(seed)
    if is_accelerator(device):
        functions().manual_seed_all(seed)


def use_fp32(tf32: bool = False) -> None:
    """Set how this process computes products and convolutions of fp32 on a GPU.

    By itself torch computes convolutions in TF32. A CPU has no TF32. In every precision cuDNN takes
    deterministic algorithms, and chooses them by the shapes and not by trials.

    Args:
        tf32: whether both are computed in TF32, with 10 bits of mantissa.
    """
    torch.backends.cuda.matmul.allow_tf32 = tf32
    torch.backends.cudnn.allow_tf32 = tf32
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False


def choose_memory_format(
    network: nn.Module, device: torch.device, precision: str
) -> torch.memory_format:
    """Choose the memory format of training images.

    CNNs on a GPU use channels last, the format in which Tensor Cores convolve, unless they compute
    in fp32. A convolution computes in the format of its input and returns the same format.
    Therefore the images determine the format of the whole network, or up to its first group norm,
    which returns a contiguous tensor on CUDA. Weights stay contiguous, because methods, optimizers
    and checkpoints read them. A network with at most one convolution is not a CNN: a ViT cuts
    patches with it.

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
    """Let this process allocate its part of a GPU's memory and no more.

    More than that raises torch's OutOfMemoryError here, and in no other process that shares the
    GPU.

    Args:
        device: of this process; nothing is done for a CPU.
        gpus: number of GPUs that the process takes; if it is less than one, the part.
    """
    if is_accelerator(device):
        functions().set_per_process_memory_fraction(min(1.0, gpus), device)


def free_bytes(device: torch.device) -> int:
    """Return how many bytes this process may still allocate on an accelerator.

    Memory that torch keeps for later allocations counts as free.
    """
    free, total = functions().mem_get_info(device)
    allocated = functions().memory_allocated(device)
    cached = functions().memory_reserved(device) - allocated
    allowed = functions().get_per_process_memory_fraction(device) * total - allocated
    return max(0, int(min(free + cached, allowed)))


def release_memory(device: torch.device) -> None:
    """Return memory that torch caches to the GPU, for processes that share it."""
    if is_accelerator(device):
        functions().empty_cache()
