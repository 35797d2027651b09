"""Training settings, training lengths and training budgets of the steps of a run."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from workers.job import TrainSettings, add_neutral_values

# Length of a training. Keys: `images` (per epoch), `batch_size`, `epochs`, `steps` (of the
# optimizer), and, for a method with a memory, `replayed` (replayed images of all epochs together).
Length = Mapping[str, int]


@dataclass
class StepTraining:
    """One training step of one method, with the same settings for all `tasks`.

    Attributes:
        label: Label of the method. For stages without a method, it equals `step`.
        step: Name of the step, for example `train` or `finetune`.
        train: Training settings.
        tasks: Tasks trained with these settings.
        lengths: Task -> length of the training. Tasks with an unknown length are missing.
    """

    label: str
    step: str
    train: TrainSettings
    tasks: list[str] = field(default_factory=list)
    lengths: dict[str, Length] = field(default_factory=dict)

    def format_optimizer(self) -> str:
        """Return optimizer and rates as text, for example `adamw, lr 0.002, weight decay 0.05`."""
        train = self.train
        text = f"{train.optimizer}, lr {train.lr:g}, weight decay {train.weight_decay:g}"
        if train.clip:
            text += f", clip {train.clip:g}"
        return text

    def format_length(self) -> str:
        """Return steps, epochs and batch size as text.

        The values are those of the tasks with known lengths, or the settings if no length is known.
        """
        if self.lengths:
            steps = _format_number_range(length["steps"] for length in self.lengths.values())
            epochs = _format_number_range(length["epochs"] for length in self.lengths.values())
            batch = _format_number_range(length["batch_size"] for length in self.lengths.values())
            return f"{steps} optimizer steps per task: {epochs} epochs, batch size {batch}"
        train = self.train
        text = f"{train.epochs} epochs, batch size {train.batch_size}"
        if not train.min_steps:
            return text
        smallest = min(train.min_batch_size or train.batch_size, train.batch_size)
        limit = "any number of" if train.max_epochs is None else f"up to {train.max_epochs}"
        return (
            f"{text}; if that gives fewer than {train.min_steps} optimizer steps, batches down to "
            f"{smallest} and {limit} epochs"
        )


class TrainingBudget(NamedTuple):
    """The training budget of a method, and the bytes that it stores.

    If a stage is not finished, all fields are NaN.

    Attributes:
        epochs: Mean number of epochs per task.
        images: Number of images that training steps read, over all tasks and epochs.
        device_s: Wall time of each stage in seconds times its number of ranks, summed over stages.
        stored_bytes: Bytes at the end of the stream, including the backbone.
    """

    epochs: float
    images: float
    device_s: float
    stored_bytes: float


def sum_budget(
    manifests: Iterable[Mapping[str, Any] | None], num_tasks: int, stored_bytes: float
) -> TrainingBudget:
    """Return the budget of a method.

    Args:
        manifests: Manifest of each training stage; None for an unfinished stage.
        num_tasks: Number of trained tasks.
        stored_bytes: See `TrainingBudget`.
    """
    epochs = 0.0
    images = 0.0
    device_s = 0.0
    for manifest in manifests:
        if manifest is None:
            return TrainingBudget(math.nan, math.nan, math.nan, math.nan)
        length = manifest.get("length") or {}
        epochs += length.get("epochs", 0)
        images += length.get("epochs", 0) * length.get("images", 0) + length.get("replayed", 0)
        device_s += (manifest.get("wall_s") or 0.0) * (manifest.get("workers") or 1)
    return TrainingBudget(epochs / num_tasks if num_tasks else 0.0, images, device_s, stored_bytes)


def _format_number_range(numbers: Iterable[int]) -> str:
    """Return the range of numbers, for example `5` or `5 to 8`."""
    values = sorted(set(numbers))
    if len(values) == 1:
        return str(values[0])
    return f"{values[0]} to {values[-1]}"


class StageInfo(NamedTuple):
    """A stage of a run or a plan. Not all stages train.

    Attributes:
        label: Label of the method. For stages without a method, it equals `step`.
        step: Name of the step.
        task: Name of the task; "" for a stage without a task.
        inputs: Inputs of the stage's key. If the stage trains, `train` contains its settings.
        length: Length of the training, if it is known.
    """

    label: str
    step: str
    task: str
    inputs: Mapping[str, Any]
    length: Length | None


def group_steps(stages: Iterable[StageInfo]) -> list[StepTraining]:
    """Group the training stages by label, step and training settings, in order.

    Stages that do not train are skipped.
    """
    groups: dict[tuple[str, str, str], StepTraining] = {}
    for stage in stages:
        configured = stage.inputs.get("train")
        if not configured:
            continue
        # Settings that did not exist when the record was written get their neutral values, which
        # keep the behaviour of that time.
        train = TrainSettings.model_validate(add_neutral_values(TrainSettings, configured))
        key = (stage.label, stage.step, train.model_dump_json())
        group = groups.setdefault(key, StepTraining(stage.label, stage.step, train))
        group.tasks.append(stage.task)
        if stage.length:
            group.lengths[stage.task] = stage.length
    return list(groups.values())
