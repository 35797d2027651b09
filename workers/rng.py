"""Random numbers per sample: a pure function of (seed, epoch, step, position in the global batch).

Every rank draws for the whole global batch, and uses the rows of its own samples. Therefore a
sample gets the same augmentation and the same Gumbel noise for any number of ranks. A resumed run
draws the same numbers as an uninterrupted run, without saved generator state.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


def derive_seed(*parts: object) -> int:
    """Return a 63-bit seed from any printable parts, the same on every machine and process."""
    text = "\x1f".join(f"{type(p).__name__}:{p}" for p in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


@dataclass(frozen=True)
class StepRng:
    """The random numbers of one optimizer step.

    Attributes:
        seed: Seed of the feed (the data loader of the stage).
        epoch: The epoch.
        step: The step within the epoch.
        positions: Positions in the global batch of the samples of this rank (and micro-batch),
            (b,).
        size: Number of samples in the global batch.
        device: Device of the rank.
        batch_size: Size of a full global batch. None: `size`. The last batch of an epoch can be
            smaller.
    """

    seed: int
    epoch: int
    step: int
    positions: Tensor
    size: int
    device: torch.device
    batch_size: int | None = None

    @property
    def is_full(self) -> bool:
        """Whether the global batch has its full size."""
        return self.batch_size in (None, self.size)

    @cached_property
    def positions_on_device(self) -> Tensor:
        """`positions` on the device, copied once."""
        return self.positions.to(self.device)

    def note_copy(self, positions_on_device: Tensor) -> None:
        """Use an existing copy of `positions` on the device, instead of copying again.

        The copy belongs only to this object: `dataclasses.replace` creates objects without it,
        because their positions can differ.
        """
        self.__dict__["positions_on_device"] = positions_on_device

    def generator(self, tag: str, device: torch.device | None = None) -> torch.Generator:
        """Return a generator for one purpose `tag`, the same on all ranks and micro-batches."""
        device = device or self.device
        return torch.Generator(device).manual_seed(
            derive_seed(self.seed, self.epoch, self.step, tag)
        )

    def per_sample(self, tag: str, *shape: int, device: torch.device | None = None) -> Tensor:
        """Draw uniform [0, 1) numbers (b, *shape). A sample's numbers do not depend on its rank."""
        device = device or self.device
        full = torch.rand((self.size, *shape), generator=self.generator(tag, device), device=device)
        if device == self.device:
            return full[self.positions_on_device]
        return full[self.positions.to(device)]

    def every_sample(self, tag: str, *shape: int) -> Tensor:
        """Draw uniform [0, 1) numbers (size, *shape): the rows of `per_sample` of all ranks."""
        return torch.rand((self.size, *shape), generator=self.generator(tag), device=self.device)

    def shared(self, tag: str, *shape: int) -> Tensor:
        """Draw uniform [0, 1) numbers of `shape`, the same on all ranks and micro-batches."""
        return torch.rand(shape, generator=self.generator(tag), device=self.device)
