"""The samples that one rank trains on or measures at once."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from workers.rng import StepRng


@dataclass
class Batch:
    """One rank's samples of one global batch, or of one micro-batch of it.

    images: float (b, 3, H, W), augmented and normalised; or (b, ...), what the feed has cached in
        their place.
    labels: (b,) indices into the class list of each sample's task.
    tasks: (b,) indices into the tasks that the step trains on.
    draw: random numbers of this step, one row per sample.
    targets: soft targets under mixup, cutmix or label smoothing, else None. (b, num_classes) over
        the classes of the one task that all samples belong to. In scenario `class` with several
        tasks: over the classes of all tasks so far.
    keys: the samples' keys in their splits; None while training.
    weight: share of the global batch, b / global batch size. The loop multiplies the loss by it and
        sums gradients over micro-batches and ranks. It is 0 where a rank holds a stand-in sample,
        because a ragged last batch had none left for it.
    counts: number of samples of each task in the whole global batch, for means over some of them.
    """

    images: Tensor
    labels: Tensor
    tasks: Tensor
    draw: StepRng
    targets: Tensor | None = None
    keys: list[str] | None = None
    weight: float = 1.0
    counts: tuple[int, ...] | None = None

    def __len__(self) -> int:
        return self.images.shape[0]

    def device_tensors(self) -> list[Tensor]:
        """Return the tensors that are on the device."""
        tensors = [self.images, self.labels, self.tasks, self.draw.positions_on_device]
        if self.targets is not None:
            tensors.append(self.targets)
        return tensors
