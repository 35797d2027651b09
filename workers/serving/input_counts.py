"""Daily counts of the inputs of a model folder, stored in its subfolder `inputs/`.

A process writes one file per day (UTC), `DAY-ID.json`, and replaces it atomically. The files
contain counts, histograms and sums; no image can be reconstructed from them. This module does not
import torch.
"""

from __future__ import annotations

import json
import os
import re
import uuid
from collections import Counter, defaultdict
from collections.abc import Iterable
from contextlib import suppress
from datetime import UTC, date, datetime, timedelta
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, ValidationError

from workers.storage.artifact import is_leftover, is_local, make_dirs, resolve, write_bytes
from workers.storage.lock import file_lock
from workers.storage.regular_file import read_regular

INPUTS, LOCK = "inputs", ".lock"
FILE = re.compile(r"\d{4}-\d\d-\d\d-[0-9a-f]{8}\.json")
MAX_FILE_BYTES = 16 << 20
MAX_BYTES = 256 << 20  # total bytes of all read files; limited because a folder may be untrusted
# Number of days, today and yesterday, whose files are not merged yet: a process writes the file of
# a day until shortly after midnight.
OPEN_DAYS = 2
CONFIDENCE_BINS = 10  # bins of equal width in [0, 1]
DISTANCE_BINS = 41  # bins of width DISTANCE_WIDTH; the last bin contains all larger distances
DISTANCE_WIDTH = 0.1  # in units of the median distance of the test images

# without control characters, because names are printed to terminals
Name = Annotated[str, Field(pattern=r"^[^\pC]{0,200}$")]
FileName = Annotated[str, Field(pattern=rf"^{FILE.pattern}$")]
Digest = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
Confidences = Annotated[
    list[NonNegativeInt], Field(min_length=CONFIDENCE_BINS, max_length=CONFIDENCE_BINS)
]
Distances = Annotated[
    list[NonNegativeInt], Field(min_length=DISTANCE_BINS, max_length=DISTANCE_BINS)
]


class CountsBody(BaseModel):
    """Base class of the pydantic models of a file with counts. Unknown fields are rejected."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class TaskCounts(CountsBody):
    """Counts of the inputs that were answered with one task.

    Attributes:
        inputs: Number of images.
        picked: Number of images whose request did not name the task.
        classes: Predicted class -> number of images.
        confidence: Histogram of the probability of the predicted class.
        confidence_sum: Sum of these probabilities.
        measured: Number of images with a measured distance to the class means.
        far: Number of measured images farther from every class mean than 95 % of the test images.
        distances: Histogram of the distance, in units of the median distance of the test images.
        test_images: Number of test images in the reference; 0: no distance was measured.
    """

    inputs: NonNegativeInt = 0
    picked: NonNegativeInt = 0
    classes: dict[Name, NonNegativeInt] = Field(default_factory=dict)
    confidence: Confidences = Field(default_factory=lambda: [0] * CONFIDENCE_BINS)
    confidence_sum: float = Field(0.0, ge=0.0)
    measured: NonNegativeInt = 0
    far: NonNegativeInt = 0
    distances: Distances = Field(default_factory=lambda: [0] * DISTANCE_BINS)
    test_images: NonNegativeInt = 0

    def add_answer(self, class_: str, probability: float, is_picked: bool) -> None:
        """Count one image.

        Args:
            class_: The predicted class.
            probability: Probability of this class, in [0, 1].
            is_picked: Whether the request did not name the task.
        """
        self.inputs += 1
        self.picked += is_picked
        self.classes[class_] = self.classes.get(class_, 0) + 1
        self.confidence[min(int(probability * CONFIDENCE_BINS), CONFIDENCE_BINS - 1)] += 1
        self.confidence_sum += probability

    def add_distance(self, distance: float, is_far: bool) -> None:
        """Count one measured image.

        Args:
            distance: Distance in units of the median distance of the test images.
            is_far: Whether the distance exceeds that of 95 % of the test images.
        """
        self.measured += 1
        self.far += is_far
        self.distances[min(int(distance / DISTANCE_WIDTH), DISTANCE_BINS - 1)] += 1

    def add_counts(self, other: TaskCounts) -> None:
        """Add the counts of another file for the same task."""
        for name in ("inputs", "picked", "confidence_sum", "measured", "far"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.classes = dict(Counter(self.classes) + Counter(other.classes))
        for name in ("confidence", "distances"):
            pairs = zip(getattr(self, name), getattr(other, name), strict=True)
            setattr(self, name, [a + b for a, b in pairs])
        self.test_images = max(self.test_images, other.test_images)


class DayCounts(CountsBody):
    """The content of a file with the counts of a day.

    Attributes:
        format: Version of this schema.
        day: The day, in UTC.
        parts: Files that were merged into this file. They are ignored if they still exist.
        models: sha256 of the model -> task -> counts.
    """

    format: Literal[1] = 1
    day: date
    parts: list[FileName] = Field(default_factory=list)
    models: dict[Digest, dict[Name, TaskCounts]] = Field(default_factory=dict)

    def task(self, model: str, name: str) -> TaskCounts:
        """Return the counts of a task. Missing counts are created.

        Args:
            model: sha256 of the model.
            name: Name of the task.
        """
        return self.models.setdefault(model, {}).setdefault(name, TaskCounts())

    def add_counts(self, other: DayCounts) -> None:
        """Add the counts of another file of the same day."""
        for model, tasks in other.models.items():
            for name, counts in tasks.items():
                self.task(model, name).add_counts(counts)


def utc_day() -> date:
    """Return the current day in UTC."""
    return datetime.now(UTC).date()


def find_obstacle(model_uri: str) -> str:
    """Create `inputs/`; return why inputs cannot be counted, as part of a sentence, or ""."""
    if not is_local(model_uri):
        return f"{model_uri} is not on a disk"
    model = resolve(model_uri)[1]
    if not os.path.isdir(model):
        return f"this machine has no folder {model}"
    folder = os.path.join(model, INPUTS)
    if os.path.islink(folder):  # the model folder may be untrusted: do not write through its links
        return f"{folder} is a link"
    probe = os.path.join(folder, f".{uuid.uuid4().hex[:8]}.part")
    try:
        make_dirs(folder)
        with open(probe, "wb"):
            pass
        os.unlink(probe)
    except OSError as error:
        return f"{folder} cannot be written ({error.strerror or error})"
    return ""


def new_file(folder: str, day: date) -> str:
    """Return a new path for the counts of one process.

    Args:
        folder: `inputs/` of a model folder.
        day: The day, in UTC.
    """
    return os.path.join(folder, f"{day.isoformat()}-{uuid.uuid4().hex[:8]}.json")


def write_counts(path: str, counts: DayCounts) -> None:
    """Write a file atomically. Raise `OSError` if its folder is missing or not writable."""
    os.stat(os.path.dirname(path))
    write_bytes(path, json.dumps(counts.model_dump(mode="json"), sort_keys=True).encode())


def read_counts(folder: str) -> tuple[dict[str, DayCounts], list[str]]:
    """Read all counts of a model folder.

    Args:
        folder: `inputs/` of the model folder.

    Returns:
        Name of a valid file -> its content, without files that were merged into another file; and
        the names of damaged or too large files.
    """
    valid: dict[str, DayCounts] = {}
    damaged: list[str] = []
    bytes_left = MAX_BYTES
    for name in _list_count_files(folder):
        try:
            data = read_regular(os.path.join(folder, name), min(MAX_FILE_BYTES, bytes_left))
            bytes_left -= len(data)
            valid[name] = DayCounts.model_validate_json(data)
        except FileNotFoundError:  # another process has just merged the file
            continue
        except (OSError, ValueError, ValidationError):
            damaged.append(name)
    merged = {part for counts in valid.values() for part in counts.parts}
    return {name: counts for name, counts in valid.items() if name not in merged}, damaged


def sum_days(files: Iterable[DayCounts]) -> list[DayCounts]:
    """Sum the counts of each day; return one object per day, in the order of days."""
    days: dict[date, DayCounts] = {}
    for counts in files:
        days.setdefault(counts.day, DayCounts(day=counts.day)).add_counts(counts)
    return [days[day] for day in sorted(days)]


def merge_count_files(folder: str, today: date) -> None:
    """Merge the files of each past day into one file, so that restarts do not accumulate files.

    If the process is killed, no count is lost or counted twice: the merged file lists its parts,
    and readers ignore parts that still exist.

    Args:
        folder: `inputs/` of a model folder.
        today: The current day in UTC. Files of this day and of the previous day are not merged.

    Raises:
        OSError: If the folder cannot be written.
    """
    last_day = (today - timedelta(days=OPEN_DAYS)).isoformat()
    with file_lock(os.path.join(folder, LOCK)):
        for name in os.listdir(folder):
            if name.endswith(".part") and is_leftover(name):  # partial file of a killed process
                _delete(folder, [name])
        days = Counter(name[: len(last_day)] for name in _list_count_files(folder))
        if not any(day <= last_day and count > 1 for day, count in days.items()):
            return
        valid, _ = read_counts(folder)
        names_by_day: dict[date, list[str]] = defaultdict(list)
        for name, counts in valid.items():
            names_by_day[counts.day].append(name)
        superseded = {part for counts in valid.values() for part in counts.parts}
        for day, parts in names_by_day.items():
            if day.isoformat() <= last_day and len(parts) > 1:
                merged = sum_days(valid[name] for name in parts)[0]
                merged.parts = parts
                write_counts(new_file(folder, day), merged)
                superseded |= {*parts}
        _delete(folder, superseded)


def _list_count_files(folder: str) -> list[str]:
    """Return the sorted names of the files with counts; [] if the folder cannot be read."""
    try:
        return sorted(name for name in os.listdir(folder) if FILE.fullmatch(name))
    except OSError:
        return []


def _delete(folder: str, names: Iterable[str]) -> None:
    """Delete files of a folder. Missing files are ignored."""
    for name in names:
        with suppress(FileNotFoundError):
            os.unlink(os.path.join(folder, name))
