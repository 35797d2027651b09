"""Warnings that a trained step did not learn as intended, each with a remedy.

The signs are a diverged loss, a penalty without effect, too few optimizer steps, and empty masks.
The loop (`workers/loop.py`) calls these functions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from workers.job import StageJob
from workers.methods.base import Method
from workers.storage.taskstate import TaskState

# A training is too short if it has less than this share of the default `min_steps` of its method.
FEW_STEPS_SHARE = 0.25
# A loss has diverged if it exceeds the loss of guessing by more than this, in nats.
LOSS_MARGIN = 1.0
# A penalty counts as without effect if loss and cross-entropy differ by less than this share of
# the loss in every epoch.
PENALTY_SHARE = 0.01
CROSS_ENTROPY = "ce"  # name of the loss term whose value for guessing is known


def find_training_symptoms(
    job: StageJob,
    method: Method,
    history: Sequence[Mapping[str, Any]],
    length: Mapping[str, int],
) -> list[str]:
    """Return a warning for each sign that a trained step did not learn.

    Args:
        job: The stage.
        method: The method.
        history: Metrics of the epochs.
        length: Length of the training (`optim.describe_length`): `steps` is the number of optimizer
            steps. Empty for a step without training.
    """
    if not length or not history or job.task is None:
        return []
    label = _get_method_label(job)
    # The stage `backbone` trains with `finetune`; its settings are the config's section `train`.
    section = "train" if job.method == "finetune" and label == "backbone" else _section(label, job)
    sentences = []
    guessing = math.log(method.competing_outputs())
    if history[-1].get(CROSS_ENTROPY, 0.0) > guessing + LOSS_MARGIN:
        sentences.append(
            f"task {job.task.name!r}: the loss is {history[-1][CROSS_ENTROPY]:.3g} at the end of "
            f"{job.step!r}, and guessing gives {guessing:.3g}: training diverged; lower the rate, "
            f"for example --set {section}.lr={job.train.lr / 10:.3g}"
        )
    for term, setting in method.penalty_terms.items():
        shares = [_added_share(row) for row in history if row.get(term) is not None]
        if shares and max(shares) < PENALTY_SHARE:
            sentences.append(
                f"task {job.task.name!r}: the penalty {term!r} is at most {max(shares):.2%} of the "
                f"loss in every epoch of {job.step!r}, so that {method.name} trains as finetune "
                f"does; raise methods.{label}.{setting}"
            )
    own_steps = method.train_defaults.of_step(job.step, from_scratch=False)["min_steps"]
    if length["steps"] < FEW_STEPS_SHARE * own_steps:
        sentences.append(
            f"task {job.task.name!r}: {length['steps']} optimizer steps of {job.step!r} are few, "
            f"{method.name} takes {own_steps} by default; leave out train.epochs and "
            f"train.batch_size, or --set {section}.min_steps={own_steps}"
        )
    return sentences


def describe_divergence_remedy(job: StageJob, method: Method) -> str:
    """Return the settings to change if a loss has become NaN or infinite."""
    label = _get_method_label(job)
    section = _section(label, job) if job.task is not None and label != "backbone" else "train"
    remedies = [f"lower {section}.lr (now {job.train.lr:g})"]
    remedies += [f"lower methods.{label}.{name}" for name in method.penalty_terms.values()]
    if not job.train.clip:
        remedies.append(f"set {section}.clip=1")
    if job.train.precision != "fp32":
        remedies.append(f"use {section}.precision=fp32")
    return " or ".join(remedies)


def _added_share(row: Mapping[str, Any]) -> float:
    """Return the share of an epoch's loss that is not the cross-entropy."""
    return float(abs(row["loss"] - row[CROSS_ENTROPY]) / max(abs(row["loss"]), 1e-30))


def _get_method_label(job: StageJob) -> str:
    """Return the label of the job's method in the config, or `backbone`.

    A stage id is LABEL/TASK/STEP or `backbone`. In a run with several seeds the name of the replica
    comes first.
    """
    parts = job.id.split("/")
    return parts[-3] if len(parts) > 2 else parts[-1]


def _section(label: str, job: StageJob) -> str:
    """Return the path of this step's training settings in the config."""
    if job.step == "train":
        return f"methods.{label}.train"
    return f"methods.{label}.steps.{job.step}"


def find_mask_symptoms(state: TaskState) -> list[str]:
    """Return a warning if all masks of a task switch all entries off."""
    masks = list(state.masks.values())
    if not masks or any(bool(mask.any()) for mask in masks):
        return []
    return [
        f"task {state.task!r}: every entry of every mask is switched off, so the backbone is not "
        "used; lower the rate of masks (mask_lr, mask_travel), or the penalty for dense masks"
    ]
