"""A batch: the samples that one rank processes in one forward pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from workers.rng import StepRng


@dataclass
class Batch:
    """The samples of one rank in a global batch, or in one micro-batch of a global batch.

    Attributes:
        images: Float (b, 3, H, W), augmented and normalised. If the feed caches features, the
            features (b, ...) take the place of the images.
        labels: Indices into the class list of each sample's task, (b,).
        tasks: Indices into the tasks of the feed, (b,).
        draw: Source of the random numbers of this optimizer step, for the samples of this batch
            (see `StepRng`).
        targets: Soft targets (b, num_classes) with mixup, cutmix or label smoothing, else None. If
            the feed has one task, the classes are those of the task. If it has several tasks, they
            are the classes of all tasks so far. In scenario `task`, several tasks have no common
            output space, so the targets are None.
        keys: Keys of the samples in their splits. None in training.
        weight: Share of the global batch, b / global batch size. The loop multiplies the loss by
            the weight, and sums gradients over micro-batches and ranks. The weight is 0 for a
            placeholder sample, which a rank gets if a smaller last batch has too few samples.
        counts: Number of samples of each task in the whole global batch. Entry i is for the samples
            with index i in `tasks`.
        replay: Replayed samples for the same step, from a global batch of their own
            (`protocols.ReplaysSamples`). None without a replay memory.
        slots: In a replay batch: positions of the samples in the memory, (b,).
        features: Features (b, ...) that the feed keeps beside the images (`Feed.add_features`).
    """

    images: Tensor
    labels: Tensor
    tasks: Tensor
    draw: StepRng
    targets: Tensor | None = None
    keys: list[str] | None = None
    weight: float = 1.0
    counts: tuple[int, ...] | None = None
    replay: Batch | None = None
    slots: Tensor | None = None
    features: Tensor | None = None

    def __len__(self) -> int:
        return self.images.shape[0]

    def number(self, name: str, compute: Callable[[Batch], float]) -> float | Tensor:
        """Return a number that follows from values of the host, such as `counts`.

        In a captured step (`train.compile: step`) it is a scalar tensor that is written before each
        step.

        Args:
            name: Name of the number, unique in the method.
            compute: Function that returns the number for a batch.
        """
        return compute(self)

    def take(self, rows: Tensor, size: int) -> Batch:
        """Return some samples of this micro-batch, as part of a smaller global batch.

        `keys`, `counts` and `replay` of the result are None. If `rows` is empty, or this
        micro-batch is a placeholder, the first sample is returned with weight 0.

        Args:
            rows: Indices of the samples in this micro-batch, (k,), on the CPU.
            size: Number of samples of the smaller global batch.
        """
        weight = len(rows) / size
        if not len(rows) or not self.weight:
            rows, weight = torch.zeros(1, dtype=torch.int64), 0.0
        index = rows.to(self.images.device)
        draw = replace(self.draw, positions=self.draw.positions[rows])
        draw.note_copy(self.draw.positions_on_device[index])
        return Batch(
            self.images[index],
            self.labels[index],
            self.tasks[index],
            draw,
            None if self.targets is None else self.targets[index],
            weight=weight,
            slots=None if self.slots is None else self.slots[index],
            features=None if self.features is None else self.features[index],
        )

    def device_tensors(self) -> list[Tensor]:
        """Return the tensors of this batch that are on the device, without those of `replay`."""
        tensors = [self.images, self.labels, self.tasks, self.draw.positions_on_device]
        tensors += [t for t in (self.targets, self.slots, self.features) if t is not None]
        return tensors
