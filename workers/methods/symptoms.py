"""Signs after training that a step did not learn, each a sentence with a remedy.

They are too few steps, a diverged loss, and empty masks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from workers.job import StageJob
from workers.methods.base import Method
from workers.storage.taskstate import TaskState

# A step with less than this share of the method's own number of steps has few.
FEW_STEPS_SHARE = 0.25
# A loss that exceeds that of guessing by more than this, in nats, has diverged.
LOSS_MARGIN = 1.0
# A penalty below this share of the loss in every epoch has no effect.
PENALTY_SHARE = 0.01
CROSS_ENTROPY = "ce"  # the term of a loss that guessing has a known value of


def symptoms_of_training(
    job: StageJob,
    method: Method,
    history: Sequence[Mapping[str, Any]],
    length: Mapping[str, int],
) -> list[str]:
    """Describe each sign that a trained step did not learn.

    Args:
        job: The stage.
        method: The method.
        history: Metrics of the epochs.
        length: Length of the training.
    """
    if not length or not history or job.task is None:
        return []
    label = _label(job)
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
            f"{method.name} takes {own_steps} where nothing is set; leave out train.epochs and "
            f"train.batch_size, or --set {section}.min_steps={own_steps}"
        )
    return sentences


def divergence_remedy(job: StageJob, method: Method) -> str:
    """Return the settings to change if a loss has become NaN or infinite."""
    label = _label(job)
    section = _section(label, job) if job.task is not None and label != "backbone" else "train"
    remedies = [f"lower {section}.lr (now {job.train.lr:g})"]
    remedies += [f"lower methods.{label}.{name}" for name in method.penalty_terms.values()]
    if not job.train.clip:
        remedies.append(f"set {section}.clip=1")
    if job.train.precision != "fp32":
        remedies.append(f"use {section}.precision=fp32")
    return " or ".join(remedies)


def _added_share(row: Mapping[str, Any]) -> float:
    """Return the share of an epoch's loss other than the cross-entropy."""
    return float(abs(row["loss"] - row[CROSS_ENTROPY]) / max(abs(row["loss"]), 1e-30))


def _label(job: StageJob) -> str:
    """Return the label of the job's method in the config, or `backbone`.

    An id is LABEL/TASK/STEP or `backbone`, in a run of several seeds after the name of a replica.
    """
    parts = job.id.split("/")
    return parts[-3] if len(parts) > 2 else parts[-1]


def _section(label: str, job: StageJob) -> str:
    """Return the path of the settings that only this step of a method reads."""
    if job.step == "train":
        return f"methods.{label}.train"
    return f"methods.{label}.steps.{job.step}"


def symptoms_of_masks(state: TaskState) -> list[str]:
    """Return a sentence where all masks of a task switch everything off."""
    masks = list(state.masks.values())
    if not masks or any(bool(mask.any()) for mask in masks):
        return []
    return [
        f"task {state.task!r}: every entry of every mask is switched off, so that nothing of the "
        "backbone is used; lower the rate of masks (mask_lr, mask_travel), or what asks for "
        "sparse masks"
    ]
