"""Warn about tasks whose test accuracy does not exceed chance.

`describe_chance` returns the warnings. An accuracy exceeds chance if it is above the confidence
interval of guessing.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95
# With fewer optimizer steps, the first advice is to train for longer. Equal to
# `TrainDefaults.min_steps`, which cannot be imported here because that would import torch.
FEW_STEPS = 300


@functools.lru_cache(maxsize=1024)
def max_correct_by_chance(num_images: int, num_classes: int) -> int:
    """Compute the largest number of correct answers in the confidence interval of guessing.

    This is the smallest k with P(X <= k) >= 97.5 %, where X is binomial with probability
    1 / num_classes.

    Args:
        num_images: Number of test images.
        num_classes: Number of classes to choose from. With one class or none, every guess is right.
    """
    if num_classes <= 1:
        return num_images
    log_right, log_wrong = -math.log(num_classes), math.log1p(-1 / num_classes)
    limit = (1 + CONFIDENCE) / 2
    cumulative = 0.0
    for count in range(num_images + 1):
        log_choices = (
            math.lgamma(num_images + 1)
            - math.lgamma(count + 1)
            - math.lgamma(num_images - count + 1)
        )
        cumulative += math.exp(log_choices + count * log_right + (num_images - count) * log_wrong)
        if cumulative >= limit:
            return count
    return num_images


@dataclass(frozen=True)
class LearnedTask:
    """The test result of a task right after the task was learned.

    Attributes:
        label: Label of the method.
        method: Name of the method.
        task: Name of the task.
        correct: Number of correct predictions.
        total: Number of test images.
        num_classes: Number of classes that a prediction is chosen from.
        has_rate: Whether the config sets the learning rate.
        steps: Number of optimizer steps of the training; 0 if unknown.
        is_trained: Whether a step of the method may have trained parameters for the task.
        is_pretrained: Whether the backbone's weights know the task already (`role: pretrained`).
    """

    label: str
    method: str
    task: str
    correct: int
    total: int
    num_classes: int
    has_rate: bool = False
    steps: int = 0
    is_trained: bool = True
    is_pretrained: bool = False

    def sentence(self) -> str:
        """Return a warning if the accuracy does not exceed chance, else "".

        The warning ends with advice: more test images, another order of the classes, another
        backbone, the default learning rate of the method, or longer training.
        """
        if self.num_classes <= 1 or not self.total:
            return ""
        limit = max_correct_by_chance(self.total, self.num_classes)
        if self.correct > limit:
            return ""
        fact = (
            f"task {self.task!r}: {self.correct} of {self.total} test images are right after "
            f"{self.label!r} learned it, and guessing among {self.num_classes} classes gets up to "
            f"{limit} ({CONFIDENCE:.0%} interval): it has not learned the task"
        )
        section = f"methods.{self.label}.train"
        if limit > 0.75 * self.total:
            return f"{fact}, or the images are too few to tell; give the task more test images"
        if self.is_pretrained:
            return (
                f"{fact}; backbone.weights should know it (role: pretrained): list its classes in "
                "the order of the classifier's outputs (`classes` of the task or of its card), or "
                "name the weights that were trained on these classes"
            )
        if not self.is_trained:
            return (
                f"{fact}; {self.method} trained nothing for it, and the backbone's features do not "
                "separate its classes: choose a backbone pretrained on more similar images, or "
                "a method that trains"
            )
        default_rate = (
            f"leave the learning rate out of the config, so that {self.method}'s own is used"
        )
        is_short = 0 < self.steps < FEW_STEPS
        if self.has_rate and not is_short:
            return f"{fact}; {default_rate}"
        steps = max(2 * self.steps, 1000)
        longer = f"train for longer, for example --set {section}.min_steps={steps}"
        if self.has_rate:
            return (
                f"{fact} in {self.steps} optimizer steps; first {longer}; if that does not help, "
                f"{default_rate}"
            )
        return f"{fact}; {longer}"


def describe_chance(learned: Sequence[LearnedTask]) -> list[str]:
    """Return one warning per task whose accuracy does not exceed chance."""
    return [sentence for sentence in (task.sentence() for task in learned) if sentence]
