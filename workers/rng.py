"""Random numbers that belong to a sample: a pure function of (seed, epoch, step, position in the
global batch).

Every rank draws for the whole global batch and keeps its own rows, so a sample meets the same
augmentation and the same Gumbel noise whatever the number of ranks, and a resumed run meets what
the uninterrupted one met, without saved state.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


def derive_seed(*parts: object) -> int:
    """A 63-bit seed from any printable parts; equal on every machine and in every process."""
    text = "\x1f".join(f"{type(p).__name__}:{p}" for p in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


@dataclass(frozen=True)
class StepRng:
    """The noise of one optimizer step.

    seed, epoch, step: where we are; step counts inside the epoch.
    positions: those in the global batch that this rank (and micro-batch) holds, shape (b,).
    size: number of samples in the global batch.
    """

    seed: int
    epoch: int
    step: int
    positions: Tensor
    size: int
    device: torch.device

    @cached_property
    def positions_on_device(self) -> Tensor:
        """`positions` on the device, copied once."""
        return self.positions.to(self.device)

    def generator(self, tag: str, device: torch.device | None = None) -> torch.Generator:
        device = device or self.device
        return torch.Generator(device).manual_seed(
            derive_seed(self.seed, self.epoch, self.step, tag)
        )

    def per_sample(self, tag: str, *shape: int, device: torch.device | None = None) -> Tensor:
        """Uniform [0, 1) numbers of shape (b, *shape), the same for a sample whatever rank holds
        it."""
        device = device or self.device
        full = torch.rand((self.size, *shape), generator=self.generator(tag, device), device=device)
        return full[
            self.positions_on_device if device == self.device else self.positions.to(device)
        ]

    def shared(self, tag: str, *shape: int) -> Tensor:
        """Uniform [0, 1) numbers of the given shape, equal on all ranks and micro-batches of the
        step."""
        return torch.rand(shape, generator=self.generator(tag), device=self.device)
