"""Rules that choose the task of an image where a method needs to be told it.

- `refuse`: none is chosen; the request is an error.
- `confident`: the task with the most probable class.
- `entropy`: the task whose probabilities have the least entropy, relative to that of equal ones.
- `nearest`: the task with the nearest class mean, in the features of each task. A distance is
  relative to that of the task's test images (`TaskReference.distances`).
- `ranpac`: the task of the class that a ridge regression on random features of the frozen backbone
  prefers (`router.py`). It needs two forward passes for any number of tasks; the other rules need
  one for each task.
- `recommended`: of these, the rule that was right most often when the model was written.
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
    """Return how well a task fits images by its logits, (b,); larger is better.

    Args:
        rule: `confident` or `entropy`.
        logits: Logits of the task, (b, K).
    """
    probabilities = logits.float().softmax(1)
    if rule == "confident":
        return probabilities.amax(1)
    entropy: Tensor = torch.special.entr(probabilities).sum(1)
    return -entropy / math.log(max(logits.shape[1], 2))


def find_recommended(body: Mapping[str, Any]) -> str:
    """Return the rule that was right most often when a model was written.

    Args:
        body: Content of `model.json`.

    Raises:
        UserError: If none was measured for the tasks of the model.
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
    """Check that a model has the measurements of each task that a rule needs.

    Args:
        rule: `nearest` or `ranpac`.
        reference: Measurements of the model.

    Raises:
        UserError: If there is nothing of a task.
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
    """Return the rule with the best accuracy, the first of equal ones in `CHOOSING`."""
    measured = [rule for rule in CHOOSING if rule in accuracies]
    return max(measured, key=lambda rule: accuracies[rule])
