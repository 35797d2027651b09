"""The results of a run as a file holds them, in the form in which stored results are compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from pipeline.graph.run_record import KEY_VERSION, RunRecord
from pipeline.results.tables import Matrix, Row, RunTables

MAX_TASKS = 256
MAX_CELLS = 1 << 18  # of all matrices of a file together


@dataclass(frozen=True)
class ImportedMethod:
    """The results of one method.

    correct, total (T, T): counts, or accuracies and ones; NaN where missing. sizes: as
    `RunTables.sizes` returns them.
    """

    method: str
    tasks: tuple[str, ...]
    correct: NDArray[np.float64]
    total: NDArray[np.float64]
    sizes: Sequence[Row] = ()


@dataclass
class ImportedTables(RunTables):
    """The results of a run from a file. Metrics are derived from the matrices, as everywhere.

    storage: path of the file. has_task_names: False for a matrix whose tasks have positions alone.
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
        """`task` or `class`."""
        return self.stream_scenario

    def method(self, label: str) -> str:
        """Return the name of the method that `label` configures."""
        return self.methods[label].method

    def tasks(self, label: str) -> list[str]:
        """Return the tasks on which this method is evaluated, in stream order."""
        return list(self.methods[label].tasks)

    def matrix(self, label: str, correct: str = "correct") -> Matrix:
        """Return the accuracy matrix of one method. A file holds no other counts than `correct`."""
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
        """Return one row per finished task; empty where the file holds no sizes."""
        return list(self.methods[label].sizes)

    def image_digests(self) -> dict[str, str]:
        """Return the digest of each task's images, where the file names it."""
        return dict(self.digests)

    def environment(self) -> dict[str, list[str]]:
        """Return commit, device and package versions as the file names them."""
        return {name: list(values) for name, values in self.versions.items()}

    def rename_tasks(self, names: Sequence[str], classes: Mapping[str, Sequence[str]]) -> None:
        """Give names and classes to the tasks of a matrix that has none, in order."""
        methods = self.methods.items()
        self.methods = {label: replace(one, tasks=tuple(names)) for label, one in methods}
        self.record["tasks"] = [
            {"name": name, "card": "", "role": "task", "classes": list(classes[name]), "data": ""}
            for name in names
        ]
        self.has_task_names = True


def imported_record(name: str, config: Mapping[str, object], created: str = "") -> RunRecord:
    """Return the record of an imported run: without stages, and without tasks yet."""
    return {
        "name": name,
        "key_version": KEY_VERSION,
        "config": dict(config),
        "created": created,
        "stages": [],
        "tasks": [],
        "provenance": {},
    }
