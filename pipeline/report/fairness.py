"""Compare the conditions under which the methods of a table were trained.

A method can lead because it had better weights, more exemplars or longer training. The caption of
each table lists these conditions. The best accuracy is not set in bold if the conditions may
explain the lead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from pipeline.results.tables import RunTables

# The best value of a column of accuracies is bold only if its method equals every other method in
# the conditions SAME, and exceeds none in the conditions NO_MORE. Other conditions are only listed.
SAME = ("backbone", "weights", "order", "validation", "seeds")
NO_MORE = ("exemplars", "images")
TOLERANCE = 1.01  # for NO_MORE: up to 1 % more is allowed, because numbers of steps are rounded
TITLES = {
    "backbone": "backbone",
    "weights": "weights",
    "order": "class order",
    "validation": "share of images for validation",
    "seeds": "seeds",
    "exemplars": "exemplars",
    "epochs": "epochs a task",
    "images": "images trained on",
    "parameters": "trained parameters",
}
MAX_VALUES = 3  # maximum number of distinct values of a condition that a sentence lists as texts


@dataclass(frozen=True)
class Conditions:
    """The training conditions of a method. None means unknown.

    Attributes:
        backbone: Name, image size and other settings of the backbone.
        weights: Initial weights of the backbone.
        order: The tasks that all compared runs share, in stream order, with their classes.
        validation: Share of the training images that are held out for validation.
        seeds: Seeds, or other names of replicas.
        exemplars: Maximum number of stored images of earlier tasks.
        epochs: Mean number of epochs per task.
        images: Number of images that training steps read, over all tasks and epochs.
        parameters: Number of trained parameters of the task with the most.
    """

    backbone: str | None
    weights: str | None
    order: tuple[Any, ...]
    validation: float | None
    seeds: tuple[str, ...]
    exemplars: int | None
    epochs: float | None
    images: float | None
    parameters: float | None


def count_exemplars(run: RunTables, label: str) -> int | None:
    """Return the maximum number of exemplars of a method.

    This is the setting `per_class` times the number of classes, or the setting `memory`. The result
    is 0 for a method without exemplars, and None if the settings are unknown.
    """
    stages = [stage for stage in run.record["stages"] if stage["label"] == label]
    inputs = [stage["inputs"] for stage in stages if stage.get("inputs")]
    if not inputs:
        return None
    settings: dict[str, Any] = {}
    for values in inputs:
        settings |= values.get("settings") or {}
    if settings.get("per_class"):
        classes = {name for task in run.record["tasks"] for name in task["classes"]}
        return int(settings["per_class"]) * len(classes)
    return int(settings.get("memory", 0))


def find_advantages(best: Conditions, other: Conditions) -> list[str]:
    """Return the titles of the conditions in which `best` may have had an advantage over `other`.

    A condition in SAME is an advantage if it differs. A condition in NO_MORE is an advantage if
    `best` had more. A condition that is unknown for one of the methods counts as an advantage, too.
    """

    def is_fair(name: str) -> bool:
        ours, theirs = getattr(best, name), getattr(other, name)
        if ours is None or theirs is None:
            return False
        return bool(ours == theirs if name in SAME else ours <= TOLERANCE * theirs)

    return [TITLES[name] for name in (*SAME, *NO_MORE) if not is_fair(name)]


def describe_conditions(conditions: Sequence[Conditions]) -> list[str]:
    """Return sentences that list the equal, the unequal and the unknown conditions."""
    equal: list[str] = []
    unequal: list[str] = []
    unknown: list[str] = []
    for field in fields(Conditions):
        title = TITLES[field.name]
        values = [getattr(each, field.name) for each in conditions]
        if any(value is None for value in values):
            unknown.append(title)
        elif len(set(values)) == 1:
            equal.append(f"{title}{_text_in_brackets(field.name, values)}")
        else:
            unequal.append(f"{title}{_text_in_brackets(field.name, values)}")
    sentences = []
    for start, titles in (
        ("Equal for all", equal),
        ("Not equal", unequal),
        ("Not known for some", unknown),
    ):
        if titles:
            sentences.append(f"{start}: {', '.join(titles)}.")
    return sentences


def _text_in_brackets(name: str, values: Sequence[Any]) -> str:
    """Return the values of a condition in brackets, after a space; "" for class orders.

    Numbers are given as a range. More than MAX_VALUES distinct texts are only counted.
    """
    if name == "order":
        return ""
    distinct = list(dict.fromkeys(values))
    if name == "seeds":
        texts = [", ".join(seeds) for seeds in distinct]
    elif name == "validation":
        texts = [f"{100 * value:g} %" for value in distinct]
    elif isinstance(distinct[0], str):
        texts = distinct
    else:
        low, high = (_format_number(value) for value in (min(values), max(values)))
        return f" ({low})" if low == high else f" ({low} to {high})"
    if len(texts) > MAX_VALUES:
        return f" ({len(texts)} different)"
    return f" ({' / '.join(texts)})"


def _format_number(value: float) -> str:
    return f"{value:,.1f}".removesuffix(".0")


def describe_backbone(settings: Mapping[str, Any]) -> str | None:
    """Return name, image size, options and `backbone.context` settings of a backbone as text.

    The result is None if the settings of the backbone are unknown.
    """
    name = settings.get("backbone.name")
    if name is None:
        return None
    size = settings.get("backbone.img_size")
    options = [
        f"{key.removeprefix('backbone.').removeprefix('options.')} {value}"
        for key, value in sorted(settings.items())
        if key.startswith(("backbone.options.", "backbone.context.")) and value is not None
    ]
    return ", ".join([f"{name} at {size} px", *options])
