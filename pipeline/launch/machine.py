"""Sample the CPU, memory and GPU usage of a machine while a worker runs."""

from __future__ import annotations

import os
import platform
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import torch

from pipeline.graph.live_status import GpuSample, MachineSample
from workers.data.accelerator import functions, is_accelerator

SAMPLE_S = 10.0  # seconds between two samples


def sample_machine(device: torch.device) -> MachineSample:
    """Return the usage of this machine by all processes.

    Args:
        device: Device of the worker. Other GPUs are not measured. For a CPU, `gpus` is empty.
    """
    sample: MachineSample = {"node": platform.node(), "gpus": {}}
    with suppress(ImportError):
        import psutil  # optional dependency

        sample["cpu"] = psutil.cpu_percent() / 100
        sample["memory_bytes"] = psutil.virtual_memory().used
    if is_accelerator(device):
        sample["gpus"][find_gpu_number(device)] = sample_gpu(device)
    return sample


def sample_gpu(device: torch.device) -> GpuSample:
    """Return the usage of a GPU by all processes."""
    free, total = functions().mem_get_info(device)
    sample: GpuSample = {"memory_bytes": total - free, "total_bytes": total}
    try:
        sample["utilization"] = functions().utilization(device) / 100
    except ImportError:
        sample["reason"] = "nvidia-ml-py is not installed (`pip install nvidia-ml-py`)"
    except Exception as error:  # raised by nvidia-ml-py, e.g. for a part of a GPU (MIG)
        sample["reason"] = f"its driver says {error}"
    return sample


def find_gpu_number(device: torch.device) -> str:
    """Return the number of a GPU among all GPUs of the machine.

    It can differ from `device.index`, which counts only the GPUs of CUDA_VISIBLE_DEVICES. A
    non-numeric entry of that variable, such as a UUID, is returned unchanged.
    """
    index = device.index or 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return visible[index].strip() if index < len(visible) and visible[index] else str(index)


@contextmanager
def sampling(
    device: torch.device, post: Callable[[MachineSample], object], period_s: float
) -> Iterator[None]:
    """Context manager that calls `post` with a sample every `period_s` seconds (0: never).

    Args:
        device: Device of the worker.
        post: Called with each sample, from another thread.
        period_s: Seconds between two samples.
    """
    ended = threading.Event()

    def keep_sampling() -> None:
        sample_machine(device)  # psutil measures the CPU since its previous call
        while not ended.wait(period_s):
            post(sample_machine(device))

    thread = threading.Thread(target=keep_sampling, name="machine", daemon=True)
    if period_s:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        if period_s:
            thread.join()
