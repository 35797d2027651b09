"""Read a plain accuracy matrix from a file: CSV with task names, or JSON as a list of lists.

A row is the state after learning a task, a column is the tested task. Values are accuracies
from 0 to 1. An empty cell was not measured. Values above the diagonal, on tasks not learned yet,
are ignored because no metric uses them.
"""

from __future__ import annotations

import csv
import io
import math
import os
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from pipeline.results.imported import (
    MAX_TASKS,
    ImportedMethod,
    ImportedTables,
    imported_record,
)
from workers.errors import UserError

DELIMITERS = (",", ";", "\t")
MAX_NAME = 200  # maximum number of characters in a name
LAYOUT = "give a header with the names of the tasks, then a row for each task learned"
MISSING = ("", "nan", "-")


def matrix_from_csv(path: str, data: bytes) -> ImportedTables:
    """Read a CSV file as a run with one method.

    The first row contains the task names. Its first cell is ignored. Each other row starts with the
    last learned task.

    Args:
        path: Path of the file, for messages.
        data: Content of the file.

    Raises:
        UserError: If the file is not an accuracy matrix.
    """
    rows = _parse_csv_rows(path, data)
    if not rows or len(rows[0]) < 2:
        raise UserError(f"{path}: it holds no accuracy matrix; {LAYOUT}")
    names = [cell.strip() for cell in rows[0][1:]]
    if {"after_index", "task_index"} <= set(names):
        raise UserError(
            f"{path}: it is the long table of a report, which `compare` does not read; name the "
            "run, or the file that `accrete report CONFIG --json FILE` writes"
        )
    _check_task_names(path, names)
    values: list[list[Any]] = []
    for number, row in enumerate(rows[1:], start=2):
        after = row[0].strip()
        position = number - 2
        if position >= len(names) or after != names[position]:
            expected = repr(names[position]) if position < len(names) else "no further row"
            raise UserError(
                f"{path}: row {number} begins with {after!r:.80} where {expected} is due; the "
                "rows learn the tasks in the order of the header"
            )
        values.append([_cell_value(path, number, cell.strip()) for cell in row[1:]])
    return _make_matrix_tables(path, names, values, has_task_names=True)


def _parse_csv_rows(path: str, data: bytes) -> list[list[str]]:
    """Return the rows of a CSV file, without empty rows."""
    try:
        text = data.decode("utf-8-sig")
        first_line = text.partition("\n")[0]
        delimiter = max(DELIMITERS, key=first_line.count)
        reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)
        rows = [row for row in reader if any(cell.strip() for cell in row)]
    except (ValueError, csv.Error) as error:
        raise UserError(f"{path}: it cannot be read as CSV ({error}); {LAYOUT}") from None
    return rows


def _cell_value(path: str, number: int, cell: str) -> float | None:
    """Return the accuracy in a cell; None if it was not measured."""
    if cell.lower() in MISSING:
        return None
    try:
        return float(cell)
    except ValueError:
        raise UserError(
            f"{path}: row {number} holds {cell!r:.80}, which is not a number; write accuracies "
            "from 0 to 1, and nothing where none was measured"
        ) from None


def matrix_from_lists(path: str, rows: Sequence[Any]) -> ImportedTables:
    """Return a run with one method from a JSON list of lists. The tasks have no names.

    Row t, from 0, has at least t + 1 values, up to the diagonal, and at most as many as the matrix
    has rows.

    Args:
        path: Path of the file, for messages.
        rows: Rows of the matrix.

    Raises:
        UserError: If the rows are not an accuracy matrix.
    """
    for row in rows:
        if not isinstance(row, list):
            raise UserError(
                f"{path}: a row of its matrix is {row!r:.80}; write a list of numbers for each task"
            )
    names = [f"task {position + 1}" for position in range(len(rows))]
    _check_task_names(path, names)
    return _make_matrix_tables(path, names, rows, has_task_names=False)


def _check_task_names(path: str, names: Sequence[str]) -> None:
    """Raise `UserError` for zero tasks, too many tasks, or invalid or duplicate names."""
    if not names:
        raise UserError(f"{path}: it holds no accuracy matrix; {LAYOUT}")
    if len(names) > MAX_TASKS:
        raise UserError(f"{path}: it has {len(names)} tasks, more than {MAX_TASKS}; leave some out")
    for position, name in enumerate(names):
        is_plain = 0 < len(name) <= MAX_NAME and name.isprintable()
        if not is_plain or name in names[:position]:
            raise UserError(
                f"{path}: the header names a task {name!r:.80}; give each task a name of its own "
                f"of 1 to {MAX_NAME} printable characters"
            )


def _make_matrix_tables(
    path: str, names: Sequence[str], rows: Sequence[Sequence[Any]], has_task_names: bool
) -> ImportedTables:
    """Return a run with one method from a matrix of accuracies.

    If there are fewer rows than tasks, the run is not finished.
    """
    size = len(names)
    rates = np.full((size, size), np.nan)
    has_more = False
    for t, row in enumerate(rows):
        if not t < len(row) <= size:
            raise UserError(
                f"{path}: row {t + 1} of its matrix has {len(row)} values; give {size}, or "
                f"{t + 1} up to the diagonal"
            )
        for i, value in enumerate(row):
            if value is None:
                continue
            rate = check_rate(path, value)
            if i <= t:
                rates[t, i] = rate
            else:
                has_more = True
    stem = os.path.splitext(os.path.basename(path))[0]
    name = re.sub(r"[^A-Za-z0-9_.-]+", "_", stem).lstrip("_.-")[:MAX_NAME] or "matrix"
    # Files with different names get different seeds, so that runs are not subtracted in pairs.
    record = imported_record(name, {"seed": f"unknown ({name})"})
    record["tasks"] = [
        {"name": task, "card": "", "role": "task", "classes": [], "data": ""} for task in names
    ]
    total = np.where(np.isnan(rates), np.nan, 1.0)
    method = ImportedMethod(name, tuple(names), rates, total)
    tables = ImportedTables(path, record, {}, methods={name: method}, has_task_names=has_task_names)
    tables.notes.append(
        f"{name} is a matrix of accuracies without counts: in its average incremental accuracy "
        "all tasks weigh the same, and its classes and settings are not known."
    )
    if has_more:
        tables.notes.append(f"{name}: values on tasks before they are learned are left out.")
    return tables


def check_rate(path: str, value: Any) -> float:
    """Return a value as an accuracy. Raise `UserError` if it is not a number from 0 to 1."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value):
        raise UserError(
            f"{path}: its matrix holds {value!r:.80}; write accuracies from 0 to 1, and null "
            "where none was measured"
        )
    if not 0 <= value <= 1:
        raise UserError(
            f"{path}: its matrix holds {value!r:.80}, which is not an accuracy from 0 to 1; divide "
            "per cent by 100"
        )
    return float(value)
