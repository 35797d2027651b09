"""Counts of the inputs of a model folder by day and task, and shifts away from the test images.

Inputs are the images that `predict` and `serve` classified with the model. A class mean is the mean
feature of the training images of a class. Distances are from the feature of an image to the nearest
class mean of the task. Start with `read_inputs`.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from workers.errors import UserError
from workers.serving.input_counts import (
    CONFIDENCE_BINS,
    DISTANCE_WIDTH,
    INPUTS,
    TaskCounts,
    read_counts,
    sum_days,
)
from workers.serving.model_file import read_model
from workers.storage.artifact import is_local, resolve
from workers.storage.regular_file import write_named_file

MIN_INPUTS = 50  # minimum number of measured inputs of a task and day to report a shift
# expected shares of inputs beyond a distance, if the inputs are like the test images
EXPECTED_FAR = 0.05  # beyond the 95 % quantile of the distances of the test images
EXPECTED_BEYOND_MEDIAN = 0.5  # beyond the median of the distances of the test images
# first bin of the histogram beyond the median; distances are in units of the median
MEDIAN_BIN = round(1 / DISTANCE_WIDTH)
Z = 3.090232  # 99.9 % quantile of the standard normal distribution, for one-sided bounds


@dataclass(frozen=True)
class InputRow:
    """The inputs that one task of one model answered on one day.

    Attributes:
        day: Day in UTC, such as 2026-11-27.
        model: sha256 of the model.
        task: Name of the task; "" for inputs that the method assigned to no task.
        inputs: Number of images.
        share: Share of this task in the inputs of all tasks on that day and model.
        picked: Share of `inputs` whose request did not name the task.
        confidence: Mean probability of the predicted class.
        unsure: Share of `inputs` whose predicted class has a probability below 0.5.
        classes: Number of images by predicted class.
        measured: Number of images whose distance to the nearest class mean was measured.
        far: Number of measured images with a larger distance than 95 % of the test images.
        beyond_median: Number of measured images with a larger distance than half of the test
            images.
        distance: Median distance divided by the median distance of the test images; None if
            `measured` is 0.
        finding: Sentence on how the inputs differ from the test images; "" if they do not differ.
    """

    day: str
    model: str
    task: str
    inputs: int
    share: float
    picked: float
    confidence: float
    unsure: float
    classes: dict[str, int]
    measured: int
    far: int
    beyond_median: int
    distance: float | None
    finding: str


@dataclass(frozen=True)
class InputReport:
    """The inputs of a model folder.

    Attributes:
        model: sha256 of the current model of the folder.
        rows: Rows by day, model and task.
        findings: The findings of all rows.
        notes: Sentences on unknown values, with the reason.
    """

    model: str
    rows: list[InputRow]
    findings: list[str]
    notes: list[str]


def exceeds(expected: float, count: int, measured: int, test_images: int) -> bool:
    """Return whether more inputs are beyond a distance than chance explains.

    The result is True if the lower Wilson bound of the share of these inputs (Wilson 1927, equation
    2) exceeds an upper bound of the expected share. The expected share has a bound, too, because
    the distance was estimated on few test images. Both bounds are one-sided at 99.9 %.

    Args:
        expected: Share of test images beyond the distance.
        count: Number of inputs beyond the distance.
        measured: Number of measured inputs. Below MIN_INPUTS the result is False.
        test_images: Number of test images. The distance is a quantile of their distances.
    """
    if measured < MIN_INPUTS or not test_images:
        return False
    share, z2 = count / measured, Z * Z / measured
    spread = Z * math.sqrt(share * (1 - share) / measured + z2 / (4 * measured))
    low = (share + z2 / 2 - spread) / (1 + z2)
    return low > expected + Z * math.sqrt(expected * (1 - expected) / test_images)


def find_median(histogram: list[int], width: float) -> float | None:
    """Return the median of a histogram that starts at 0; None if the histogram is empty.

    The median is interpolated within its bin. The last bin has no upper end: if the median is in
    this bin, the result is the lower end of the bin.

    Args:
        histogram: Count of each bin.
        width: Width of a bin.
    """
    half = sum(histogram) / 2
    if not half:
        return None
    before = 0
    for index, count in enumerate(histogram[:-1]):
        if before + count >= half:
            return width * (index + (half - before) / count)
        before += count
    return width * (len(histogram) - 1)


def read_inputs(folder: str) -> InputReport:
    """Read the counts of the inputs of a model folder.

    Args:
        folder: Path of the folder.

    Raises:
        UserError: If the folder is not a model folder on a disk.
    """
    body = read_model(folder)
    if not is_local(folder):
        raise UserError(
            f"{folder} is not on a disk, and inputs are counted on disks only; serve a copy of the "
            "folder on a disk, and name that one"
        )
    files, damaged = read_counts(os.path.join(resolve(folder)[1], INPUTS))
    rows: list[InputRow] = []
    for counts in sum_days(files.values()):
        for model, tasks in sorted(counts.models.items()):
            total = sum(task.inputs for task in tasks.values())
            for name, task in sorted(tasks.items()):
                rows.append(_make_row(counts.day.isoformat(), model, name, task, total))
    notes = []
    if damaged:
        notes.append(f"not counted, because they cannot be read: {', '.join(damaged)[:200]}")
    if not rows:
        notes.append(
            f"no inputs were counted in {folder}; `accrete predict` and `accrete serve` count them "
            "unless --no-record is given"
        )
    notes += _explain_unmeasured(folder, rows)
    findings = [row.finding for row in rows if row.finding]
    return InputReport(str(body["sha256"]), rows, findings, notes)


def _make_row(day: str, model: str, name: str, task: TaskCounts, total: int) -> InputRow:
    """Return the row of a task. `total` counts the inputs of all tasks of the model on that day."""
    inputs = max(task.inputs, 1)  # a file may contain distances without inputs
    beyond_median = sum(task.distances[MEDIAN_BIN:])
    return InputRow(
        day=day,
        model=model,
        task=name,
        inputs=task.inputs,
        share=task.inputs / max(total, 1),
        picked=task.picked / inputs,
        confidence=task.confidence_sum / inputs,
        unsure=sum(task.confidence[: CONFIDENCE_BINS // 2]) / inputs,
        classes=dict(sorted(task.classes.items())),
        measured=task.measured,
        far=task.far,
        beyond_median=beyond_median,
        distance=find_median(task.distances, DISTANCE_WIDTH),
        finding=_describe_shift(day, name, task, beyond_median),
    )


def _explain_unmeasured(folder: str, rows: list[InputRow]) -> list[str]:
    """Return sentences on the tasks without measured distances, with the reasons."""
    measured = {row.task for row in rows if row.measured}
    unmeasured = [name for name in {row.task: None for row in rows} if name not in measured]
    if not unmeasured:
        return []
    from workers.serving.bundle import Bundle  # imports torch
    from workers.serving.reference import load_reference

    try:
        missing: Mapping[str, str] = load_reference(Bundle.open(folder)).missing
    except UserError as error:
        missing = dict.fromkeys(unmeasured, str(error))
    names_by_reason: dict[str, list[str]] = {}
    for name in unmeasured:
        reason = missing.get(name, "none was measured yet")
        names_by_reason.setdefault(reason, []).append(name or "(none)")
    sentences = []
    for reason, names in names_by_reason.items():
        noun = "task" if len(names) == 1 else "tasks"
        sentences.append(f"distances of {noun} {', '.join(names)} are unknown: {reason}")
    return sentences


def _describe_shift(day: str, name: str, task: TaskCounts, beyond_median: int) -> str:
    """Return a sentence on how inputs differ from the test images, or "" if they do not differ."""
    for expected, count, limit in (
        (EXPECTED_FAR, task.far, "95 %"),
        (EXPECTED_BEYOND_MEDIAN, beyond_median, "half"),
    ):
        if exceeds(expected, count, task.measured, task.test_images):
            return (
                f"task {name}: {100 * count / task.measured:.0f} % of {task.measured} inputs on "
                f"{day} lie farther from every class than {limit} of its test images "
                f"({100 * expected:.0f} % expected); look at them, and add images like them: "
                "`accrete add CONFIG DATA`"
            )
    return ""


def write_report(report: InputReport, file: str) -> None:
    """Write the report as JSON. Raise `UserError` if the file cannot be written."""
    write_named_file("--json", file, json.dumps(asdict(report), indent=1).encode())
