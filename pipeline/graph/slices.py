"""Divide the images of each class among several tasks, for streams in which classes recur.

This is the setting `slices` of an entry of a stream. All tasks have the same classes and share one
output space (scenario `domain`), but a task can have images of only some of the classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from pipeline.config.settings import Slices
from workers.errors import UserError
from workers.rng import derive_seed

# class -> part [start, stop) of the images, as fractions in [0, 1] (see `Task.parts`)
Parts = dict[str, tuple[float, float]]


def cut_slices(slices: Slices, classes: Sequence[str], name: str) -> list[Parts]:
    """Return one dictionary per task: class -> part of the class's images that the task has.

    A task has no images of the classes that its dictionary lacks. Each image is in exactly one
    task. The same seed results in the same parts.

    Args:
        slices: Settings of the division.
        classes: The classes.
        name: Name of the entry of the stream, for messages.

    Raises:
        UserError: If the number of classes does not fit the settings.
    """
    generator = Random(derive_seed(slices.seed, "slices", slices.kind))
    # sort first, so that the result does not depend on the order of the classes on the card
    names = sorted(classes)
    generator.shuffle(names)
    if slices.kind == "blurry":
        return _cut_blurry(slices, names, generator, name)
    return _cut_repeating(slices, names, generator, name)


def _cut_blurry(slices: Slices, names: list[str], generator: Random, entry: str) -> list[Parts]:
    """Divide the images as in i-Blurry (Koh et al., ICLR 2022).

    Of the classes, the share `disjoint` have all their images in one task. Each other class has a
    main task, and the share `blur` of its images is divided equally among the other tasks.
    """
    if len(names) < slices.tasks:
        raise UserError(
            f"stream.tasks: {entry!r} has {len(names)} classes for slices.tasks = {slices.tasks}; "
            "with `kind: blurry` each task is the main task of a class: give fewer tasks"
        )
    num_disjoint = round(slices.disjoint * len(names))
    tasks: list[Parts] = [{} for _ in range(slices.tasks)]
    for position, name in enumerate(names):
        main = position % slices.tasks
        if position < num_disjoint or not slices.blur:
            tasks[main][name] = (0.0, 1.0)
            continue
        others = [index for index in range(slices.tasks) if index != main]
        generator.shuffle(others)
        bounds = [1 - slices.blur * (1 - i / len(others)) for i in range(len(others) + 1)]
        tasks[main][name] = (0.0, bounds[0])
        for index, start, stop in zip(others, bounds[:-1], bounds[1:], strict=True):
            tasks[index][name] = (start, stop)
    return tasks


def _cut_repeating(slices: Slices, names: list[str], generator: Random, entry: str) -> list[Parts]:
    """Divide the images as the slots of CIR (Hemati et al., CoLLAs 2023).

    Each task has images of `slices.classes` classes. All classes are in the same number of tasks,
    up to a difference of one. The images of a class are divided equally among its tasks.
    """
    num_slots = slices.tasks * slices.classes
    if not slices.classes <= len(names) <= num_slots:
        raise UserError(
            f"stream.tasks: slices of {entry!r} have {slices.tasks} tasks with {slices.classes} "
            f"classes each, for {len(names)} classes; with `kind: repeating` slices.classes is at "
            f"most {len(names)}, and slices.tasks * slices.classes at least {len(names)}"
        )
    times = {
        name: num_slots // len(names) + (position < num_slots % len(names))
        for position, name in enumerate(names)
    }
    left = dict(times)
    tasks: list[Parts] = []
    for tasks_left in range(slices.tasks, 0, -1):
        # these classes must be in each of the remaining tasks
        chosen = [name for name in names if left[name] == tasks_left]
        rest = [name for name in names if 0 < left[name] < tasks_left]
        chosen += generator.sample(rest, slices.classes - len(chosen))
        tasks.append({})
        for name in sorted(chosen):
            number = times[name] - left[name]
            tasks[-1][name] = (number / times[name], (number + 1) / times[name])
            left[name] -= 1
    return tasks
