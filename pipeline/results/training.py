"""Training settings of the steps of a run: the config's settings over the methods' defaults."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from workers.job import TrainSettings, with_neutral

Length = Mapping[str, int]  # images, batch_size, epochs, steps; replayed images, if there are any


@dataclass
class StepTraining:
    """One step of one method, with the same settings for all tasks that are listed.

    lengths: task -> how long its training is, or will be; without tasks whose images are not
    counted yet.
    """

    label: str
    step: str
    train: TrainSettings
    tasks: list[str] = field(default_factory=list)
    lengths: dict[str, Length] = field(default_factory=dict)

    def optimizer_text(self) -> str:
        """Return for example `adamw, lr 0.002, weight decay 0.05`."""
        train = self.train
        text = f"{train.optimizer}, lr {train.lr:g}, weight decay {train.weight_decay:g}"
        if train.clip:
            text += f", clip {train.clip:g}"
        return text

    def length_text(self) -> str:
        """Return steps, epochs and batch size: of the tasks that are counted, else the rule."""
        if self.lengths:
            steps = _range(length["steps"] for length in self.lengths.values())
            epochs = _range(length["epochs"] for length in self.lengths.values())
            batch = _range(length["batch_size"] for length in self.lengths.values())
            return f"{steps} steps a task: {epochs} epochs, batch size {batch}"
        train = self.train
        text = f"{train.epochs} epochs, batch size {train.batch_size}"
        if not train.min_steps:
            return text
        smallest = min(train.min_batch_size or train.batch_size, train.batch_size)
        limit = "any number of" if train.max_epochs is None else f"up to {train.max_epochs}"
        return (
            f"{text}; where that is less than {train.min_steps} steps, batches down to {smallest} "
            f"and {limit} epochs"
        )


class TrainingBudget(NamedTuple):
    """The training budget of a method, and the bytes that it stores.

    epochs: of a task, on average. images: that training steps read, over all tasks and epochs.
    device_s: seconds of training times the ranks that it ran on. stored_bytes: at the end, with the
    backbone. NaN where stages are not finished.
    """

    epochs: float
    images: float
    device_s: float
    stored_bytes: float


def sum_budget(
    stages: Iterable[Mapping[str, Any] | None], tasks: int, stored_bytes: float
) -> TrainingBudget:
    """Return the budget of a method. stages: manifests of the training stages; tasks: trained."""
    epochs = 0.0
    images = 0.0
    device_s = 0.0
    for manifest in stages:
        if manifest is None:
            return TrainingBudget(math.nan, math.nan, math.nan, math.nan)
        length = manifest.get("length") or {}
        epochs += length.get("epochs", 0)
        images += length.get("epochs", 0) * length.get("images", 0) + length.get("replayed", 0)
        device_s += (manifest.get("wall_s") or 0.0) * (manifest.get("workers") or 1)
    return TrainingBudget(epochs / tasks if tasks else 0.0, images, device_s, stored_bytes)


def _range(numbers: Iterable[int]) -> str:
    """Return `5`, or `5 to 8`."""
    values = sorted(set(numbers))
    if len(values) == 1:
        return str(values[0])
    return f"{values[0]} to {values[-1]}"


class TrainedStage(NamedTuple):
    """A stage of a run. inputs: of the key. length: of the training, where it is known."""

    label: str
    step: str
    task: str
    inputs: Mapping[str, Any]
    length: Length | None


def group_steps(stages: Iterable[TrainedStage]) -> list[StepTraining]:
    """Return the training of each step, tasks of equal settings together, in order.

    Stages that do not train are left out.
    """
    groups: dict[tuple[str, str, str], StepTraining] = {}
    for stage in stages:
        configured = stage.inputs.get("train")
        if not configured:
            continue
        train = TrainSettings.model_validate(with_neutral(TrainSettings, configured))
        key = (stage.label, stage.step, train.model_dump_json())
        group = groups.setdefault(key, StepTraining(stage.label, stage.step, train))
        group.tasks.append(stage.task)
        if stage.length:
            group.lengths[stage.task] = stage.length
    return list(groups.values())
