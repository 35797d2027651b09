"""Default training settings of a method: rates, optimizer, schedule and length."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# Defaults that are dropped if a config sets another optimizer.
OPTIMIZER_BOUND = ("lr", "weight_decay", "clip")


@dataclass(frozen=True)
class TrainDefaults:
    """Training settings of a method that apply if a config does not set them.

    The length is a number of epochs for tasks with many images, and a number of optimizer steps for
    tasks with few (`optim.fit_to_images`). If `epochs` epochs have fewer than `min_steps` steps,
    batches are reduced from `batch_size` to `min_batch_size`, and then the number of epochs is
    raised up to `max_epochs`. If a step of a task sets other `epochs` but no `min_steps`, its
    `min_steps` changes in proportion.

    Attributes that are not described here are those of `TrainSettings`.

    Attributes:
        lr: Peak learning rate on a pretrained backbone.
        source: Source of the numbers: the paper or our measurement.
        scratch_lr: Peak learning rate with `backbone.weights: none`. None: `lr`.
        steps: Step name -> fields that differ in this step. A step that changes `lr` keeps the
            method's `scratch_lr`, unless it changes `scratch_lr`, too.
    """

    lr: float
    source: str
    scratch_lr: float | None = None
    optimizer: str = "adamw"
    weight_decay: float = 0.05
    clip: float = 0.0
    schedule: str = "step"
    warmup: float = 0.1
    floor: float = 0.01
    epochs: int = 5
    batch_size: int = 64
    min_steps: int = 300
    min_batch_size: int = 16
    max_epochs: int = 100
    steps: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def of_step(self, step: str, from_scratch: bool) -> dict[str, Any]:
        """Return the defaults of a step, as fields of `TrainSettings`.

        Args:
            step: Name of the step.
            from_scratch: Whether the backbone starts from random weights.
        """
        values: dict[str, Any] = {
            "lr": self.lr,
            "optimizer": self.optimizer,
            "weight_decay": self.weight_decay,
            "clip": self.clip,
            "schedule": self.schedule,
            "warmup": self.warmup,
            "floor": self.floor,
            "epochs": self.epochs,
            "batch_size": self.batch_size,
            "min_batch_size": self.min_batch_size,
            "max_epochs": self.max_epochs,
        }
        values |= {"scratch_lr": self.scratch_lr, **self.steps.get(step, {})}
        values.setdefault("min_steps", round(self.min_steps * values["epochs"] / self.epochs))
        scratch_lr = values.pop("scratch_lr")
        if from_scratch and scratch_lr is not None:
            values["lr"] = scratch_lr
        return values

    def complete(
        self, configured: Mapping[str, Any], step: str, from_scratch: bool
    ) -> dict[str, Any]:
        """Return the `TrainSettings` fields of a step: the config's, completed by the defaults.

        `epochs` from the config are used unchanged, unless it also sets `min_steps` or
        `max_epochs`. A `batch_size` from the config is not reduced, unless it also sets
        `min_batch_size`. If the config sets another optimizer, the defaults in `OPTIMIZER_BOUND`
        are left out.

        Args:
            configured: Fields that the config sets.
            step: Name of the step.
            from_scratch: Whether the backbone starts from random weights.
        """
        values = self.of_step(step, from_scratch)
        if configured.get("optimizer", values["optimizer"]) != values["optimizer"]:
            for name in OPTIMIZER_BOUND:
                del values[name]
        if "batch_size" in configured:
            del values["min_batch_size"]
        if "epochs" in configured and "min_steps" not in configured:
            values["max_epochs"] = configured["epochs"]
            if "batch_size" in configured:  # the config determines the length completely
                del values["max_epochs"]
                del values["min_steps"]
        return {**values, **configured}
