"""Propose a card and a config for data sets, as YAML for the user to read and edit.

`card_text` and `config_text` return the texts, which `starter` writes to files. Names from the data
are written by the YAML dumper, and escaped in comments.
"""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.config.text import format_count
from pipeline.config.yaml_files import dump_yaml
from pipeline.data.detection.data_set import TEST_FRACTION, DataSet
from pipeline.data.names import printable

MAX_BAD = 0.05  # tolerated share of corrupt images, in addition to those known to be bad
MAX_TASKS = 5  # tasks into which one data set is divided
MIN_CLASSES = 2  # classes of a task
BASE_SHARE = 0.4  # share of the classes of one data set in the base task
# Minimum number of train images per class to propose `hold_out: threshold`. With fewer images, a
# share of 1/5 could by chance select almost no image.
MIN_PER_CLASS = 30
MAX_THREADS = 4  # `cpus_per_worker` of the config
LINE_WIDTH = 96  # characters
COMMENT_COLUMN = 30  # column at which comments begin


class TaskPlan(NamedTuple):
    """A task of the proposed stream. `card` is the file of the card; `classes` None means all."""

    name: str
    card: str
    num_classes: int
    classes: tuple[str, ...] | None
    is_base: bool


class ProposedBackbone(NamedTuple):
    """A small vision transformer; sizes are in pixels."""

    img_size: int
    patch_size: int


def card_text(data_set: DataSet, name: str, path: str, command: str) -> str:
    """Return the card of a data set.

    Args:
        data_set: The data set.
        name: Name of the card.
        path: Path of the source in the card.
        command: Command that creates such a card.
    """
    source = {**data_set.source, "path": path}
    classes = _line("classes", list(data_set.classes))
    if data_set.are_folders:
        classes = _line("classes", "from_source", "the sorted names of the folders; or list them")
    held_out = ""
    if not data_set.has_test:
        held_out = _line("test_fraction", TEST_FRACTION, "share of each class")
    sizes = [number for (split, _), number in data_set.images.items() if split == "train"]
    is_any_held_out = not (data_set.has_test and data_set.counts.get("val"))
    if is_any_held_out and min(sizes, default=0) >= MIN_PER_CLASS:
        held_out += _line("hold_out", "threshold", "an image keeps its side when data grow")
    # + 0.005: round up to whole percent
    bad = min(round(MAX_BAD + data_set.bad_fraction + 0.005, 2), 1.0)
    text = (
        f"# {_comment(data_set.layout)}: {format_count(len(data_set.classes), 'class')}, "
        f"{_format_image_counts(data_set)}. Written by `{_comment(command)}`.\n"
        "# Edit it: all keys are in datasets/README.md. Paths start at the folder of this file.\n"
    )
    text += _line("name", name)
    text += "source:\n"
    for key, value in source.items():
        text += _line(key, value, indent=2)
    text += _line("licence", "unknown", "the terms of these images")
    text += classes
    text += _line("num_classes", len(data_set.classes), "another number is an error")
    text += held_out
    text += (
        "# More images that cannot be used are an error; rejected.csv lists each with its reason.\n"
    )
    return text + _line("max_bad_fraction", bad)


def _format_image_counts(data_set: DataSet) -> str:
    parts = [
        f"{format_count(number, f'{split} image', data_set.is_exact)}"
        for split, number in data_set.counts.items()
    ]
    if not data_set.has_test:
        parts = [format_count(data_set.counts["train"], "image", data_set.is_exact)]
    return ", ".join(parts)


def plan_tasks(data_sets: Sequence[DataSet], cards: Sequence[str], name: str) -> list[TaskPlan]:
    """Return the tasks of a stream, the base task (on which the backbone is trained) first.

    Several data sets are one task each. If all have the same classes (`are_domains`), none is the
    base task. One data set is divided by its classes (`task_sizes`).

    Args:
        data_sets: The data sets.
        cards: File of each card.
        name: Name of the run.
    """
    if len(data_sets) > 1:
        has_base = not are_domains(data_sets)
        return [
            TaskPlan(data_set.name, card, len(data_set.classes), None, has_base and index == 0)
            for index, (data_set, card) in enumerate(zip(data_sets, cards, strict=True))
        ]
    classes = data_sets[0].classes
    sizes = task_sizes(len(classes))
    if len(sizes) == 1:
        return [TaskPlan(name, cards[0], len(classes), None, True)]
    tasks: list[TaskPlan] = []
    start = 0
    for number, size in enumerate(sizes):
        part = classes[start : start + size]
        tasks.append(TaskPlan(f"{name}-{number}", cards[0], size, part, number == 0))
        start += size
    return tasks


def are_domains(data_sets: Sequence[DataSet]) -> bool:
    """Return whether there are several data sets, and all have the same classes.

    If all classes are numbers, the result is False, because a number can mean another class in each
    data set.
    """
    names = {frozenset(data_set.classes) for data_set in data_sets}
    has_words = not all(name.isdigit() for name in data_sets[0].classes)
    return len(data_sets) > 1 and len(names) == 1 and has_words


def task_sizes(num_classes: int) -> list[int]:
    """Divide the classes of one data set into tasks and return the number of classes per task.

    No task has more classes than the first one. For example, 10 classes become tasks of 4, 2, 2 and
    2 classes, and 3 classes become one task.
    """
    first = max(math.ceil(num_classes * BASE_SHARE), MIN_CLASSES)
    rest = num_classes - first
    num_parts = min(rest // MIN_CLASSES, MAX_TASKS - 1)
    if num_parts < 1:
        return [num_classes]
    size = min(rest // num_parts, first)
    return [num_classes - size * num_parts, *[size] * num_parts]


def choose_backbone(data_sets: Sequence[DataSet]) -> ProposedBackbone:
    """Choose a backbone with an input of 16, 32 or 64 pixels, from the median size of images."""
    sides = [min(size) for data_set in data_sets for size in data_set.sizes]
    side = statistics.median(sides) if sides else 64
    if side <= 20:
        return ProposedBackbone(16, 4)
    return ProposedBackbone(32, 4) if side <= 40 else ProposedBackbone(64, 8)


def config_text(
    name: str,
    tasks: Sequence[TaskPlan],
    data_sets: Sequence[DataSet],
    command: str,
    run_command: str,
    has_gpu: bool,
) -> str:
    """Return the config of a run on data sets.

    Args:
        name: Name of the run.
        tasks: Tasks of the stream.
        data_sets: The data sets.
        command: Command that creates such a config.
        run_command: Command that runs it.
        has_gpu: Whether this machine has a GPU that torch can use.
    """
    backbone = choose_backbone(data_sets)
    num_train = sum(data_set.counts["train"] for data_set in data_sets)
    in_domains = are_domains(data_sets)
    num_classes = sum(len(data_set.classes) for data_set in data_sets)
    if in_domains:
        num_classes = len(data_sets[0].classes)
    val_fraction = 0.1
    if num_train < 5 * sum(len(data_set.classes) for data_set in data_sets):
        val_fraction = 0.0  # too few images to hold some out
    held_out = "of the train images, held out to choose by"
    if any("val" in data_set.counts for data_set in data_sets):
        held_out += ", if a card has no validation images"
    text = (
        f"# {format_count(num_classes, 'class')} in {format_count(len(tasks), 'task')}. "
        f"Written by `{_comment(command)}`; edit it.\n"
        f"# Run it with  {_comment(run_command)}\n"
        "# After a change only the affected stages run again; an added task runs alone.\n"
    )
    text += _line("name", name)
    text += _line("seed", 0)
    text += _line("storage", "storage", "all results, below the folder that it is run in")
    text += "stream:\n"
    if in_domains:
        told = "the same classes in all; an image comes without its task"
        text += _line("scenario", "domain", told, 2)
        text += (
            "  # Tasks are learned in this order. If only the names of the classes are the same:\n"
            "  # `task`, and methods of that scenario, such as linear, finetune and meat.\n"
        )
    else:
        told = "an image comes with its task; class, domain: without it"
        text += _line("scenario", "task", told, 2)
        text += (
            "  # Tasks are learned in this order. The backbone is trained on the base task, and "
            "every\n"
            "  # method starts from it. Change classes, their order and the number of tasks.\n"
        )
    text += "  tasks:\n"
    for task in tasks:
        text += _task_text(task)
    text += (
        "# A small vision transformer that is trained on a CPU from random weights. With a GPU\n"
        "# and a network a pretrained one is better"
    )
    text += ".\n" if in_domains else "; no task needs `role: base` then.\n"
    text += (
        "# On it, `ranpac: {}` is a strong method for one pass over the images. Instead of this:\n"
        "#   backbone: {name: vit_small_patch16_224, weights: hub}\n"
        "backbone:\n"
    )
    text += _line("name", "vit_tiny_patch16_224", indent=2)
    text += _line("weights", "none", indent=2)
    text += _line("img_size", backbone.img_size, "pixels; more is slower, and often better", 2)
    text += _line("crop_pct", 1.0, indent=2)
    options = {"patch_size": backbone.patch_size, "embed_dim": 64, "depth": 4, "num_heads": 4}
    text += _line("options", options, indent=2)
    text += "data:\n"
    text += _line("val_fraction", val_fraction, held_out, 2)
    text += _line("flip", 0.0, "0.5: if a mirrored image has the same class", 2)
    text += _train_text(has_gpu)
    text += "# Trained side by side. docs/methods.md lists all methods.\nmethods:\n"
    if not in_domains:
        text += _line("linear", {}, "a frozen backbone, a head per task: forgets nothing", 2)
    text += _line("finetune", {}, "all weights keep learning: forgets", 2)
    if in_domains:
        text += _line("replay", {}, "learns with images of earlier tasks: forgets less", 2)
        text += _line("joint", {}, "learns all tasks together: an upper bound", 2)
    else:
        text += _line("meat", {}, "masks of a few kilobytes per task: forgets nothing", 2)
    told = "one pass over frozen features; {} for a pretrained backbone"
    text += _line("ranpac", {"projection": 0}, told, 2)
    text += "cluster:\n"
    text += _line("workers", 0, "0: in this process; 1 or more: worker groups of Ray", 2)
    threads = min(os.cpu_count() or 1, MAX_THREADS)
    text += _line("cpus_per_worker", threads, "threads", 2)
    return text + _line("gpus_per_worker", int(has_gpu), "1: on a GPU", 2)


def _task_text(task: TaskPlan) -> str:
    text = _line("- name", task.name, indent=4)
    text += _line("card", task.card, indent=6)
    if task.classes is not None:
        text += _line("classes", list(task.classes), indent=6)
    if task.is_base:
        text += _line("role", "base", indent=6)
    return text


def _train_text(has_gpu: bool) -> str:
    text = (
        "# Each method has its own learning rate and length: enough steps also for few images.\n"
        "# Settings here apply to all of them, e.g. epochs: 5.\n"
    )
    if has_gpu:
        return text + "train:\n" + _line("precision", "bf16", indent=2)
    return text + _line("train", {})


def _line(key: str, value: Any, comment: str = "", indent: int = 0) -> str:
    """Return `key: value` as YAML; a long list takes several lines.

    Args:
        key: The key.
        value: The value.
        comment: Comment after the value.
        indent: Spaces before the key.
    """
    if isinstance(value, str):  # a text is written on one line, without YAML's end mark
        text = dump_yaml([value], default_flow_style=True, width=float("inf")).strip()[1:-1]
    else:
        text = dump_yaml(value, default_flow_style=True, width=LINE_WIDTH - indent)
        text = text.removesuffix("\n").removesuffix("\n...")
    first, *rest = f"{key}: {text}".splitlines()
    first = " " * indent + first
    if comment:
        first = f"{first:<{COMMENT_COLUMN}}# {comment}"
    return "\n".join([first, *(" " * (indent + 2) + line.strip() for line in rest)]) + "\n"


def _comment(text: str) -> str:
    """Escape a text for a comment, so that it cannot end the comment."""
    return printable(text)


def make_relative(path: str, given: str) -> str:
    """Return a path as it is written to a card in the current folder.

    Args:
        path: The path. A URI, or a path with an environment variable, is returned unchanged.
        given: The user's path. If it is relative, the result is relative to the current folder.
    """
    if "://" in path or "${" in path or os.path.isabs(given):
        return path
    return Path(os.path.relpath(path)).as_posix()
