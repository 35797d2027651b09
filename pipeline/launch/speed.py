"""Estimate how fast a device trains a backbone: from the backbone's FLOPs, or by a calibration.

A calibration runs a few training steps on this machine.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn

from workers.data import accelerator
from workers.errors import UserError
from workers.job import BackboneSettings
from workers.model import vit
from workers.model.compact import count_multiply_adds

TRAINING_PASSES = 3  # cost of a training step in forward passes; the backward pass counts as two
READ_S = 1e-3  # assumed seconds to read, decode and augment one image
# Assumed FLOP/s in a training step: of one CPU core in fp32, and of a GPU by precision. Newer
# devices, and large batches, reach several times as many.
CORE_FLOPS = 3e10
GPU_FLOPS = {"fp32": 1.5e13, "tf32": 3e13, "bf16": 5e13}
MAX_BATCH = 16  # batch size of a calibration on a CPU
MAX_GPU_BATCH = 128  # batch size of a calibration on a GPU
CALIBRATION_S = 3.0  # minimum seconds to repeat training steps, and then forward passes
MIN_STEPS = 3  # minimum number of repetitions
CLASSES = 10  # number of outputs of the head in a calibration


class Speed(NamedTuple):
    """Device-seconds of one image.

    Attributes:
        train_s: Seconds in a training step, including the time to read the image.
        forward_s: Seconds in a forward pass without gradients, including the time to read the
            image.
        source: Origin of the numbers, as text for the user.
    """

    train_s: float
    forward_s: float
    source: str


def assume(settings: BackboneSettings, cores: int, gpus: float, precision: str) -> Speed:
    """Estimate the speed from the FLOPs of a backbone.

    Args:
        settings: Settings of the backbone.
        cores: Number of CPU cores of a worker. It matters only without a GPU.
        gpus: Number of GPUs of a worker; 0: it computes on the CPU. For a fraction of a GPU, the
            result is the speed of a worker with its own GPU.
        precision: `fp32`, `tf32` or `bf16`.
    """
    forward_flops = 2 * count_multiply_adds(
        vit.outline(settings), 3, settings.img_size, settings.img_size
    )
    if gpus:
        rate = GPU_FLOPS[precision]
        device = "GPU"
    else:
        rate = CORE_FLOPS * min(cores, os.cpu_count() or cores)
        device = f"CPU, {cores} {'core' if cores == 1 else 'cores'}"
    forward_s = forward_flops / rate
    return Speed(
        READ_S + TRAINING_PASSES * forward_s,
        READ_S + forward_s,
        f"{forward_flops / 1e9:.3g} GFLOP a forward pass and image, {TRAINING_PASSES} passes to "
        f"train, {rate / 1e9:.0f} GFLOP/s ({device}, {precision}), {1000 * READ_S:.0f} ms to read",
    )


def calibrate(settings: BackboneSettings, cores: int, gpus: float, precision: str) -> Speed:
    """Measure the speed of this machine with steps of full fine-tuning on random images.

    The measurement takes a few seconds, or longer if a step of the backbone is slow. See `assume`
    for the arguments.

    Raises:
        UserError: If the config trains on a GPU and this machine has none.
    """
    if gpus and not accelerator.is_available():
        raise UserError(
            "--calibrate measures this machine, which has no GPU, and the config trains on GPUs "
            "(cluster.gpus_per_worker); plan on a machine with such a GPU, or leave it out"
        )
    device = accelerator.make_device(gpus)
    threads = torch.get_num_threads()
    torch.set_num_threads(cores)
    try:
        train_s, forward_s = time_steps(settings, device, precision)
    finally:
        torch.set_num_threads(threads)
    source = f"{accelerator.describe_device(device)}, {1000 * READ_S:.0f} ms to read an image"
    return Speed(READ_S + train_s, READ_S + forward_s, source)


def time_steps(
    settings: BackboneSettings, device: torch.device, precision: str
) -> tuple[float, float]:
    """Return the seconds of one image in a training step, and in a forward pass."""
    batch_size = MAX_GPU_BATCH if accelerator.is_accelerator(device) else MAX_BATCH
    network = nn.Sequential(vit.build(settings), nn.LazyLinear(CLASSES)).to(device)
    network.eval()  # in training mode, stochastic depth needs random numbers for its batch
    images = torch.randn(batch_size, 3, settings.img_size, settings.img_size, device=device)
    images = images.contiguous(
        memory_format=accelerator.choose_memory_format(network, device, precision)
    )
    labels = torch.randint(CLASSES, (batch_size,), device=device)
    with torch.no_grad():
        network(images)  # initializes the lazy linear layer
    accelerator.use_fp32(tf32=precision == "tf32")
    optimizer = torch.optim.AdamW(network.parameters())

    def forward() -> torch.Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
            return nn.functional.cross_entropy(network(images), labels)

    def train() -> None:
        optimizer.zero_grad()
        forward().backward()
        optimizer.step()

    train_s = time_calls(train, device)
    with torch.no_grad():
        forward_s = time_calls(forward, device)
    return train_s / batch_size, forward_s / batch_size


def time_calls(call: Callable[[], object], device: torch.device) -> float:
    """Return the mean seconds of a call. A first call for warm-up is not counted."""
    start = 0.0
    calls = -1  # the call for warm-up makes it 0
    while calls < MIN_STEPS or time.perf_counter() - start < CALIBRATION_S:
        call()
        if accelerator.is_accelerator(device):
            accelerator.functions().synchronize(device)
        calls += 1
        if calls == 0:
            start = time.perf_counter()
    return (time.perf_counter() - start) / calls
