"""Results of a run from a file, with the same interface as results from the store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from pipeline.graph.run_record import KEY_VERSION, RunRecord
from pipeline.results.tables import Matrix, Row, RunTables

MAX_TASKS = 256  # maximum number of tasks of a run
MAX_CELLS = 1 << 18  # maximum number of cells in all matrices of a file together


@dataclass(frozen=True)
class ImportedMethod:
    """The results of one method.

    Attributes:
        method: Name of the method.
        tasks: Names of the tasks, in stream order.
        correct: Numbers of correct predictions (T, T), or accuracies; NaN if missing.
        total: Numbers of test images (T, T), or 1 for accuracies; NaN if missing.
        sizes: Rows like those of `RunTables.sizes`.
    """

    method: str
    tasks: tuple[str, ...]
    correct: NDArray[np.float64]
    total: NDArray[np.float64]
    sizes: Sequence[Row] = ()


@dataclass
class ImportedTables(RunTables):
    """The results of a run from a file. Metrics are computed from the matrices.

    `storage` is the path of the file, `artifacts` is empty, and the record has no stages.

    Attributes:
        methods: Label -> results of the method.
        stream_scenario: `task`, `class` or `domain`.
        versions: Environment of the run: commit, device or package -> its values.
        digests: Task -> digest of the images.
        has_task_names: Whether the file names the tasks. False if they only have positions.
    """

    methods: Mapping[str, ImportedMethod] = field(default_factory=dict)
    stream_scenario: str = "task"
    versions: Mapping[str, Sequence[str]] = field(default_factory=dict)
    digests: Mapping[str, str] = field(default_factory=dict)
    has_task_names: bool = True

    @property
    def source(self) -> str:
        """The path of the file."""
        return self.storage

    @property
    def labels(self) -> list[str]:
        """The labels of all methods, in order."""
        return list(self.methods)

    @property
    def scenario(self) -> str:
        """`task`, `class` or `domain`."""
        return self.stream_scenario

    def method(self, label: str) -> str:
        """Return the name of the method that `label` configures."""
        return self.methods[label].method

    def tasks(self, label: str) -> list[str]:
        """Return the tasks on which the method is evaluated, in stream order."""
        return list(self.methods[label].tasks)

    def matrix(self, label: str, correct: str = "correct") -> Matrix:
        """Return the accuracy matrix of one method.

        Args:
            label: Label of the method.
            correct: As in `RunTables.matrix`, but it affects only the chance level: the file has no
                other counts, so `Matrix.correct` is always the same.
        """
        method = self.methods[label]
        shape = method.correct.shape
        is_learned = np.tril(np.ones(shape, bool))
        source = np.where(is_learned, "missing", "ahead").astype("U8")
        source[is_learned & ~np.isnan(method.correct)] = "measured"
        chance = np.full(shape, np.nan)
        if all(self.task(name)["classes"] for name in method.tasks):
            chance = self._chance(method.tasks, correct)
        return Matrix(label, method.tasks, method.correct, method.total, source, chance=chance)

    def sizes(self, label: str) -> list[Row]:
        """Return one row per finished task; empty if the file contains no sizes."""
        return list(self.methods[label].sizes)

    def image_digests(self) -> dict[str, str]:
        """Return task -> digest of the images, for the tasks whose digest is in the file."""
        return dict(self.digests)

    def environment(self) -> dict[str, list[str]]:
        """Return commit, device and package versions from the file."""
        return {name: list(values) for name, values in self.versions.items()}

    def rename_tasks(self, names: Sequence[str], classes: Mapping[str, Sequence[str]]) -> None:
        """Name the tasks of a file without task names.

        Args:
            names: Names of the tasks, in stream order.
            classes: Name of a task -> its classes.
        """
        methods = self.methods.items()
        self.methods = {label: replace(one, tasks=tuple(names)) for label, one in methods}
        self.record["tasks"] = [
            {"name": name, "card": "", "role": "task", "classes": list(classes[name]), "data": ""}
            for name in names
        ]
        self.has_task_names = True


def imported_record(name: str, config: Mapping[str, object], created: str = "") -> RunRecord:
    """Return the record of an imported run, without stages and tasks. The caller adds the tasks."""
    return {
        "name": name,
        "key_version": KEY_VERSION,
        "config": dict(config),
        "created": created,
        "stages": [],
        "tasks": [],
        "provenance": {},
    }
