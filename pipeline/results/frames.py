"""Results of a run as pandas data frames, and its models. `pipeline.load` returns them."""

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

COLUMNS = ("replica", "seed", "label")  # of every table, in front


@dataclass(frozen=True)
class Results:
    """The stored results of a run; an unfinished run has the results so far.

    Each table is read from the store at the time of the call. Its first columns are
    `replica` (empty for a run of one seed and class order, else as `seed-1`), `seed`, and `label`,
    the method's name in the config. Rates are between 0 and 1.

    name: of the run. tables: the results of each replica. open_model: returns the model of a
    replica and a label. report: path or URI of the report's page.
    """

    name: str
    tables: Mapping[str, RunTables] = field(repr=False)
    open_model: Callable[[str, str], Model] = field(repr=False)
    report: str

    @property
    def labels(self) -> list[str]:
        """The methods of the run, as its config calls them."""
        return self._first.labels

    @property
    def tasks(self) -> list[str]:
        """All tasks of the run, in stream order; a method may leave out the base task."""
        return [task["name"] for task in self._first.record["tasks"]]

    @property
    def summary(self) -> pd.DataFrame:
        """A row for each method: its metrics after the last finished task, its sizes, its time."""
        return self._frame(lambda tables, label: [tables.summary_row(label)])

    @property
    def matrix(self) -> pd.DataFrame:
        """A row for each entry of the accuracy matrices, after each task on each task so far.

        `rate` is the accuracy, NaN where `source` is `missing`; `chance` is that of guessing.
        """
        return self._frame(lambda tables, label: matrix_rows(tables.matrix(label)))

    @property
    def metrics(self) -> pd.DataFrame:
        """A row for each method and finished task with all metrics so far."""
        return self._frame(lambda tables, label: average_rows(tables.matrix(label)))

    @property
    def sizes(self) -> pd.DataFrame:
        """A row for each method and finished task: all bytes to keep so far, and the task's."""
        return self._frame(lambda tables, label: tables.sizes(label))

    def accuracy_matrix(self, label: str | None = None, replica: str = "") -> pd.DataFrame:
        """Return the matrix R of one method: after each task (rows), on each task (columns).

        Entries are accuracies; NaN ahead of the diagonal, and where they are missing. label: may be
        left out for a run of one method; so may replica for a run of one seed and class order.
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
        """Return a row for each mask of a task, and each block of token masks.

        `kept` of `size` entries are in use, their `share`. label: None for the methods that have
        masks. Raise `UserError` for an unknown task.
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
        """Return the masks of a task under one method, by name; empty without masks.

        They have the shapes of what they mask; True where the task uses an entry.
        """
        from pipeline.results.masks import load_masks  # start-up time: imports torch

        self._check_task(task)
        label = self._label(label)
        return load_masks(self._tables(replica), label, task)

    def model(self, label: str | None = None, replica: str = "") -> Model:
        """Return the model of one method, which serves all its tasks.

        label and replica: as for `accuracy_matrix`. Raise `UserError` where the run is unfinished.
        """
        label = self._label(label)
        self._tables(replica)
        return self.open_model(replica, label)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write all results as one JSON file, which `compare` reads on any machine.

        It is the file of `accrete report --json`. Raise `UserError` where it cannot be written.
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
        """Return the rows of all replicas and methods. labels: None for all methods."""
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
    """Return the label of a method of a run; the only one may be left out.

    word: what a person chooses it with. Raise `UserError` when it is unknown, or is needed.
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
    from pipeline.results.masks import load_mask_view  # start-up time: imports torch

    return load_mask_view(tables, label, task)
