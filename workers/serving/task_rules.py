"""Rules that choose the task of an image if the method cannot infer the task.

- `refuse`: no task is chosen; the request is an error.
- `confident`: the task with the most probable class.
- `entropy`: the task whose probabilities have the lowest entropy, relative to the maximal entropy
  for its number of classes.
- `nearest`: the task with the nearest class mean, in the features of each task. A distance is
  relative to the median distance of the task's test images (`TaskReference.distances`).
- `ranpac`: the task of the class with the highest score of a ridge regression on random features
  of the frozen backbone (`router.py`). This rule needs one forward pass to choose the task and one
  to classify the image, for any number of tasks. The other rules usually need one or more per task.
- `recommended`: the rule with the highest accuracy when the model was written.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, get_args

import torch
from torch import Tensor

from workers.errors import UserError
from workers.serving.model_file import ChoosingRule, Rule
from workers.serving.reference import NO_ROUTER, Reference

RULES: tuple[str, ...] = get_args(Rule)
CHOOSING: tuple[ChoosingRule, ...] = get_args(ChoosingRule)


def score_by_logits(rule: str, logits: Tensor) -> Tensor:
    """Compute the score of a task for images from its logits, (b,); larger is better.

    Args:
        rule: `confident` or `entropy`.
        logits: Logits of the task, (b, K).
    """
    probabilities = logits.float().softmax(1)
    if rule == "confident":
        return probabilities.amax(1)
    entropy: Tensor = torch.special.entr(probabilities).sum(1)
    # the maximal entropy is log K; of a task with one class it is 0, so log 2 avoids 0 / 0
    return -entropy / math.log(max(logits.shape[1], 2))


def find_recommended(body: Mapping[str, Any]) -> str:
    """Return the rule with the highest accuracy when a model was written.

    Args:
        body: Content of `model.json`.

    Raises:
        UserError: If the rules were not measured, or the tasks have changed since.
    """
    measured = body.get("rules")
    names = [task["name"] for task in body["tasks"]]
    if measured is None or measured["tasks"] != names:
        reason = "the model has none" if measured is None else "its tasks have changed since"
        raise UserError(
            f"rule is 'recommended', and none was measured for these tasks ({reason}); write the "
            f"model again with `accrete bundle`, or give one of {', '.join(CHOOSING)}"
        )
    return str(measured["recommended"])


def check_measured(rule: str, reference: Reference) -> None:
    """Check that a model has the measurements that a rule needs, for each task.

    Args:
        rule: `nearest` or `ranpac`.
        reference: Measurements of the model.

    Raises:
        UserError: If the measurements of a task are missing.
    """
    needed = {"nearest": "class means", "ranpac": "router weights"}[rule]
    missing = dict(reference.missing)
    if rule == "ranpac":
        unrouted = [name for name, task in reference.tasks.items() if task.router is None]
        missing |= dict.fromkeys(unrouted, NO_ROUTER)
    for name, reason in missing.items():
        raise UserError(
            f"rule {rule!r} needs {needed} of each task, and {name!r} has none ({reason}); "
            "give rule=confident or rule=entropy"
        )


def recommend(accuracies: Mapping[ChoosingRule, float]) -> ChoosingRule:
    """Return the rule with the highest accuracy; if several are equal, the first in `CHOOSING`."""
    measured = [rule for rule in CHOOSING if rule in accuracies]
    return max(measured, key=lambda rule: accuracies[rule])
