"""Results of a run as pandas data frames, and its models, for the Python interface."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pipeline.results.data_frame import data_frame
from pipeline.results.tables import Row, RunTables, average_rows, matrix_rows
from workers.errors import UserError, did_you_mean

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd
    from numpy.typing import NDArray

    from pipeline.results.masks import MaskView
    from pipeline.results.model import Model

COLUMNS = ("replica", "seed", "label")  # first columns of all tables except `accuracy_matrix`


@dataclass(frozen=True)
class Results:
    """The stored results of a run. An unfinished run has the results so far.

    Tables are built at each call, from the stages that were finished when this object was created.
    A table, except `accuracy_matrix`, has the rows of all replicas. Its first columns are `replica`
    (empty for a run with one seed and class order, otherwise a name such as `seed-1`), `seed`, and
    `label` (the name of the method in the config). Rates are fractions, not in per cent.

    Attributes:
        name: Name of the run.
        tables: Name of the replica -> its results.
        open_model: Function that returns the model for a replica and a label.
        report: Path or URI of the report page.
    """

    name: str
    tables: Mapping[str, RunTables] = field(repr=False)
    open_model: Callable[[str, str], Model] = field(repr=False)
    report: str

    @property
    def labels(self) -> list[str]:
        """Labels of the methods: their names in the config."""
        return self._first.labels

    @property
    def tasks(self) -> list[str]:
        """All tasks of the run, in stream order.

        Some methods are not evaluated on the base task, on which the backbone was trained.
        """
        return [task["name"] for task in self._first.record["tasks"]]

    @property
    def summary(self) -> pd.DataFrame:
        """One row per method: metrics after the last finished task, sizes and wall time."""
        return self._frame(lambda tables, label: [tables.summary_row(label)])

    @property
    def matrix(self) -> pd.DataFrame:
        """One row per entry of the accuracy matrices: after each task, on each task so far.

        `rate` is the accuracy; it is NaN if `source` is `missing`. `chance` is the accuracy of
        guessing.
        """
        return self._frame(lambda tables, label: matrix_rows(tables.matrix(label)))

    @property
    def metrics(self) -> pd.DataFrame:
        """One row per method and finished task, with all metrics over the tasks so far."""
        return self._frame(lambda tables, label: average_rows(tables.matrix(label)))

    @property
    def classes(self) -> pd.DataFrame:
        """One row per method, task and class: test accuracy after the last finished task."""
        return self._frame(lambda tables, label: tables.class_rows(label))

    @property
    def sizes(self) -> pd.DataFrame:
        """One row per method and finished task: stored bytes so far, and bytes of the task."""
        return self._frame(lambda tables, label: tables.sizes(label))

    def accuracy_matrix(self, label: str | None = None, replica: str = "") -> pd.DataFrame:
        """Return the accuracy matrix of one method: after each task (rows), on each task (columns).

        Entries are NaN above the diagonal and if they are missing.

        Args:
            label: Label of the method. It is optional for a run with one method.
            replica: Name of the replica; "" for a run with one seed and class order.

        Raises:
            UserError: If the label or the replica is unknown, or needed but not given.
        """
        label = self._label(label)
        matrix = self._tables(replica).matrix(label)
        frame = data_frame(
            [dict(zip(matrix.tasks, rates, strict=True)) for rates in matrix.rates.tolist()]
        )
        frame.index = frame.columns.rename("after")
        frame.columns.name = "task"
        return frame

    def masks(self, task: str, label: str | None = None) -> pd.DataFrame:
        """Return one row per mask of a task, and one row per block of the token masks.

        A mask keeps `kept` of `size` entries; `share` is the ratio.

        Args:
            task: Name of the task.
            label: Label of the method; None for all methods.

        Raises:
            UserError: If the task or the label is unknown.
        """
        self._check_task(task)
        labels = self.labels if label is None else [self._label(label)]

        def rows_of(tables: RunTables, label: str) -> list[Row]:
            view = _mask_view(tables, label, task)
            return [] if view is None else view.rows()

        return self._frame(rows_of, labels)

    def mask_arrays(
        self, task: str, label: str | None = None, replica: str = ""
    ) -> dict[str, NDArray[np.bool_]]:
        """Return name -> mask of a task and method; empty without masks.

        A mask has the shape of the masked tensor, and is True for entries that the task uses.

        Args:
            task: Name of the task.
            label: See `accuracy_matrix`.
            replica: See `accuracy_matrix`.
        """
        from pipeline.results.masks import load_masks  # imported here for fast start-up: torch

        self._check_task(task)
        label = self._label(label)
        return load_masks(self._tables(replica), label, task)

    def model(self, label: str | None = None, replica: str = "") -> Model:
        """Return the model of one method, which serves all its tasks.

        Args:
            label: See `accuracy_matrix`.
            replica: See `accuracy_matrix`.

        Raises:
            UserError: If the run is not finished, or the label or the replica is unknown.
        """
        label = self._label(label)
        self._tables(replica)  # raises `UserError` for an unknown replica
        return self.open_model(replica, label)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write all results to one JSON file, which `compare` can read on any machine.

        `accrete report --json` writes the same file.

        Raises:
            UserError: If the file cannot be written.
        """
        from pipeline.results.results_file import write_results

        write_results("path", os.fspath(path), [*self.tables.values()])

    # ---- selection -------------------------------------------------------------------------------
    @property
    def _first(self) -> RunTables:
        return next(iter(self.tables.values()))

    def _frame(
        self,
        rows_of: Callable[[RunTables, str], list[Row]],
        labels: Iterable[str] | None = None,
    ) -> pd.DataFrame:
        """Return the rows of all replicas, for the given methods or for all methods if None."""
        rows: list[Row] = []
        for replica, tables in self.tables.items():
            seed = tables.record["config"].get("seed")
            for label in labels or tables.labels:
                head = dict(zip(COLUMNS, (replica, seed, label), strict=True))
                rows += [head | row for row in rows_of(tables, label)]
        return data_frame(rows, COLUMNS)

    def _tables(self, replica: str) -> RunTables:
        """Return the results of a replica. Raise `UserError` if no replica has that name."""
        if replica in self.tables:
            return self.tables[replica]
        names = ", ".join(name for name in self.tables if name)
        if not names:
            raise UserError(
                f"replica is {replica!r:.80}, and run {self.name!r} is of one seed and class order;"
                " leave it out"
            )
        raise UserError(
            f"run {self.name!r} has {len(self.tables)} replicas, and replica is {replica!r:.80}; "
            f"give one of {names}"
        )

    def _label(self, label: str | None) -> str:
        return choose_label(self.name, self.labels, label)

    def _check_task(self, task: str) -> None:
        if task not in self.tasks:
            remedy = did_you_mean(task, self.tasks, f"it has {', '.join(self.tasks)}")
            raise UserError(
                f"task is {task!r:.80}, which run {self.name!r} does not have; {remedy}"
            )


def choose_label(run: str, labels: Sequence[str], label: str | None, word: str = "label") -> str:
    """Return the label of a method of a run. If there is only one method, `label` may be None.

    Args:
        run: Name of the run.
        labels: Labels of all methods.
        label: The requested label, or None.
        word: Name of the argument in error messages.

    Raises:
        UserError: If the label is unknown, or is None although there are several methods.
    """
    if label is None and len(labels) > 1:
        raise UserError(
            f"run {run!r} has several methods; choose one with {word}: {', '.join(labels)}"
        )
    if label is not None and label not in labels:
        raise UserError(
            f"{word} is {label!r:.80}, which run {run!r} does not have; it has {', '.join(labels)}"
        )
    return labels[0] if label is None else label


def _mask_view(tables: RunTables, label: str, task: str) -> MaskView | None:
    from pipeline.results.masks import load_mask_view  # imported here for fast start-up: torch

    return load_mask_view(tables, label, task)
