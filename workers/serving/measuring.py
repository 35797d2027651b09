"""Measure a finished run for its bundle: class means of each task, and rules that choose a task."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import safetensors.torch
import torch
from numpy.typing import NDArray
from torch import Tensor

from workers.data import accelerator
from workers.data.rows import SampleTable, select
from workers.errors import UserError
from workers.job import Task
from workers.serving.bundle import Bundle
from workers.serving.images import Limits
from workers.serving.model_file import REFERENCE, ChoosingRule, sealed, state_file
from workers.serving.reference import (
    LEVELS,
    MEDIAN,
    METADATA,
    TaskReference,
    compute_nearest_distances,
)
from workers.serving.router import Router
from workers.serving.server import Answer, Predictor
from workers.serving.task_rules import CHOOSING, recommend
from workers.storage.artifact import file_info

MAX_CLASS_IMAGES = 32  # training images per class mean
MAX_TRAIN_IMAGES = 256  # per task; with more classes, one image per class
MAX_TEST_IMAGES = 256  # per task
IMAGES_AT_ONCE = 32  # images read at a time
MAX_RULE_IMAGES = 64  # per task, to measure the rules
# Maximum of 2 T^2 n for T tasks and n images per task. It limits n, because a rule can need a
# forward pass for each of the T n images with each of the T tasks.
MAX_RULE_PASSES = 4096


def with_measurements(bundle: Bundle) -> Bundle:
    """Add measurements to a bundle: references of tasks, and the accuracy of rules.

    The measurements use images of the run's storage. For the references, at most
    `MAX_TRAIN_IMAGES` (or one per class) and `MAX_TEST_IMAGES` images per task are read. If the
    images of a task cannot be read, the reference file contains the reason. If all images can be
    read, there are several tasks, and the method cannot infer the task of an image, the rules of
    `task_rules` are measured, too.

    Args:
        bundle: The bundle of a run. The bundle of a folder is returned unchanged, because its
            images are unknown.
    """
    if bundle.job is None:
        return bundle
    device = accelerator.make_device(float(accelerator.is_available()))  # a GPU if there is one
    predictor = Predictor(bundle, device=device)
    tensors: dict[str, Tensor] = {}
    about: dict[str, dict[str, Any]] = {}
    for task in bundle.tasks:
        state = bundle.body["files"][state_file(task.name)]["sha256"]
        try:
            measured = _measure_task(predictor, task.name)
        except (UserError, OSError) as error:
            about[task.name] = {"state": state, "missing": " ".join(str(error).split())[:500]}
            continue
        tensors[f"means/{task.name}"] = measured.means
        tensors[f"levels/{task.name}"] = measured.levels
        about[task.name] = {"state": state, "test_images": measured.test_images}
    has_router = True
    has_choice = len(bundle.tasks) > 1 and not predictor.infers_task
    is_incomplete = any("missing" in entry for entry in about.values())
    if has_choice and not is_incomplete:
        try:
            for name, weight in fit_router(predictor).items():
                tensors[f"router/{name}"] = weight
        except (UserError, OSError):  # the rules are measured without `ranpac`
            has_router = False
    data = safetensors.torch.save(tensors, {METADATA: json.dumps(about, sort_keys=True)})
    files = {**bundle.body["files"], REFERENCE: file_info(data)}

    def fetch(name: str) -> bytes:
        return data if name == REFERENCE else bundle.fetch(name)

    complete = replace(bundle, body=sealed({**bundle.body, "files": files}), fetch=fetch)
    if not has_choice or is_incomplete:
        return complete
    predictor.bundle = complete  # the rules need the class means and the router
    rules = measure_rules(predictor, [rule for rule in CHOOSING if rule != "ranpac" or has_router])
    return replace(complete, body=sealed({**complete.body, "rules": rules}))


def fit_router(predictor: Predictor) -> dict[str, Tensor]:
    """Compute the weights of the rule `ranpac` for each task: name -> tensor.

    The training images are those of the class means (see `choose_train_rows`).
    """
    job = predictor.bundle.job
    assert job is not None
    router = Router(predictor.bundle, predictor.device)
    tasks = {task.name: task for task in job.tasks}
    for name in predictor.classes:
        task = tasks[name]
        train = select(job.root, (task,), "train", job.data.val_fraction)
        rows = [*chain(*choose_train_rows(task, train))]
        parts = []
        for start in range(0, len(rows), MAX_CLASS_IMAGES):
            pixels = _read_row_pixels(predictor, train, rows[start : start + MAX_CLASS_IMAGES])
            parts.append(router.features(predictor.network_input(pixels)).cpu())
        labels = torch.from_numpy(train.labels[rows]).long()
        router.add(task, torch.cat(parts), labels, train.keys(np.array(rows)))
    return router.weights()


def choose_train_rows(task: Task, train: SampleTable) -> list[list[int]]:
    """Choose the training images to measure: a list of rows for each class with images."""
    per_class = min(max(1, MAX_TRAIN_IMAGES // task.num_classes), MAX_CLASS_IMAGES)
    rows_by_class = [
        np.flatnonzero(train.labels == label)[:per_class].tolist()
        for label in range(task.num_classes)
    ]
    return [rows for rows in rows_by_class if rows]


def measure_rules(predictor: Predictor, choosing: Sequence[ChoosingRule]) -> dict[str, Any]:
    """Measure the rules that choose the task of an image: accuracy of the class and of the task.

    The images are held-out validation images of each task. If any task has none, test images of
    all tasks are used. At most `MAX_RULE_IMAGES` images of a task are used.

    Args:
        predictor: The model, with its class means and router weights.
        choosing: The rules.

    Returns:
        `tasks`, `split`, `images` (number of images), `with_task` (accuracy if the task is given),
        `accuracy` and `task_accuracy` of each rule, and `recommended`.
    """
    job = predictor.bundle.job
    assert job is not None
    tasks = [task for task in job.tasks if task.name in predictor.classes]
    count = max(1, min(MAX_RULE_IMAGES, MAX_RULE_PASSES // (2 * len(tasks) ** 2)))
    val_fraction = job.data.val_fraction
    split = "val"
    try:
        tables = [select(job.root, (task,), "val", val_fraction) for task in tasks]
    except UserError:  # a task has no validation images
        split = "test"
        tables = [select(job.root, (task,), "test", val_fraction) for task in tasks]
    with_task = 0
    images = 0
    right_classes = dict.fromkeys(choosing, 0)
    right_tasks = dict.fromkeys(choosing, 0)
    for task, table in zip(tasks, tables, strict=True):
        rows = torch.linspace(0, len(table) - 1, min(count, len(table))).round().long().tolist()
        pixels = _read_row_pixels(predictor, table, rows)
        labels = [task.classes[label] for label in table.labels[rows].tolist()]
        images += len(rows)
        known = predictor.answers(pixels, [task.name] * len(rows))
        with_task += count_right(known, task, labels)
        for rule in choosing:
            chosen = predictor.answers(pixels, [None] * len(rows), rule)
            right_classes[rule] += count_right(chosen, task, labels)
            right_tasks[rule] += sum(answer.task == task.name for answer in chosen)
    accuracy = {rule: right / images for rule, right in right_classes.items()}
    return {
        "tasks": [task.name for task in predictor.tasks],
        "split": split,
        "images": images,
        "with_task": with_task / images,
        "accuracy": accuracy,
        "task_accuracy": {rule: right / images for rule, right in right_tasks.items()},
        "recommended": recommend(accuracy),
    }


def count_right(answers: Sequence[Answer], task: Task, labels: Sequence[str]) -> int:
    """Return the number of answers with the right class of the right task."""
    return sum(
        (answer.task, answer.class_) == (task.name, label)
        for answer, label in zip(answers, labels, strict=True)
    )


def _measure_task(predictor: Predictor, name: str) -> TaskReference:
    """Measure the reference of a task on its training and test images."""
    job = predictor.bundle.job
    assert job is not None
    task = next(task for task in job.tasks if task.name == name)
    val_fraction = job.data.val_fraction
    train = select(job.root, (task,), "train", val_fraction)
    means = [
        _read_features(predictor, train, rows, name).mean(0)
        for rows in choose_train_rows(task, train)
    ]
    test = select(job.root, (task,), "test", val_fraction)
    count = min(len(test), MAX_TEST_IMAGES)
    spread = torch.linspace(0, len(test) - 1, count).round().long()  # evenly over the table
    features = _read_features(predictor, test, spread.tolist(), name)
    distances = compute_nearest_distances(features, torch.stack(means))
    levels = torch.quantile(distances, torch.tensor(LEVELS))
    if not levels.isfinite().all() or levels[MEDIAN] <= 0:
        raise UserError(
            f"the features of the test images of task {name!r} are all equal, or not finite"
        )
    return TaskReference(torch.stack(means), levels, count)


def _read_features(predictor: Predictor, table: SampleTable, rows: list[int], task: str) -> Tensor:
    """Return the features of some rows of a table, float32 (rows, d)."""
    return predictor.features(_read_row_pixels(predictor, table, rows), task)


def _read_row_pixels(
    predictor: Predictor, table: SampleTable, rows: list[int]
) -> NDArray[np.uint8]:
    """Return the images of some rows of a table; see `Predictor.read_pixels`."""
    limits = Limits(
        predictor.bundle.body["max_pixels"],
        value_range=predictor.bundle.value_range,
        image_bytes=sys.maxsize,  # the limits of requests do not hold for stored images
        body_bytes=sys.maxsize,
    )
    parts = []
    for start in range(0, len(rows), IMAGES_AT_ONCE):
        images = [table.read_bytes(row) for row in rows[start : start + IMAGES_AT_ONCE]]
        parts.append(predictor.read_pixels(images, limits))
    return np.concatenate(parts)
