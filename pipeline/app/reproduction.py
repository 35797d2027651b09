"""Reproduce tables of papers: run the missing stages, and compare our values with the paper's.

Start reading at `reproduce`. The tables are in `configs/papers`, see `config.paper_tables`.
"""

from __future__ import annotations

import itertools
import math
import os
import shlex
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.app import measuring
from pipeline.app import runs as app
from pipeline.app.prepared import PreparedRun, read_run_tables
from pipeline.app.screen import OpenScreen
from pipeline.config import invocation
from pipeline.config import settings as configs
from pipeline.config.paper_tables import (
    TASK,
    PaperTable,
    PartRun,
    Scale,
    TableRow,
    TableScale,
    find_paper_table,
    list_runs,
    read_paper_table,
)
from pipeline.config.text import table_text
from pipeline.config.yaml_files import format_override
from pipeline.data import placeholders
from pipeline.results.metrics import METRICS
from pipeline.results.tables import Row, RunTables
from workers.errors import UserError
from workers.storage.artifact import join, write_bytes


class Cell(NamedTuple):
    """A cell of a table. `value` and `paper` are in %, or NaN."""

    part: str
    row: str
    column: str
    value: float
    paper: float


class TableKey(NamedTuple):
    """Key of a run: a part of a table, and the name of the run in the table's file."""

    part: str
    run: str


@dataclass(frozen=True)
class Reproduction:
    """The values of a table at one scale.

    Attributes:
        name: Name of the table.
        scale: The scale.
        table: The table.
        cells: All cells: part by part, row by row. A value is NaN if its run is not finished.
        storage: Folder or URI of the storage.
    """

    name: str
    scale: Scale
    table: PaperTable
    cells: Sequence[Cell]
    storage: str

    def part_cells(self, part: str) -> list[Cell]:
        """Return the cells of a part."""
        return [cell for cell in self.cells if cell.part == part]


def prepare_table(
    name: str, scale: Scale, overrides: Sequence[str] = (), **options: Any
) -> tuple[PaperTable, dict[TableKey, PreparedRun]]:
    """Read a table and prepare its runs at a scale.

    Args:
        name: Name of a table, or path of a table file.
        scale: The scale.
        overrides: Overrides of all runs in the form of `--set`.
        **options: See `runs.prepare`.

    Returns:
        The table, and its prepared runs.

    Raises:
        UserError: If there is no such table or scale, or a run cannot be prepared.
    """
    table, runs = _list_runs(name, scale)
    prepared = {}
    for run in runs:
        texts = [*run.overrides, *overrides]
        key = TableKey(run.part, run.run)
        prepared[key] = app.prepare(
            os.path.relpath(run.config), texts, allow_replicas=True, **options
        )
    return table, prepared


def _list_runs(name: str, scale: Scale) -> tuple[PaperTable, list[PartRun]]:
    """Read a table. Return it and its runs at a scale."""
    file = find_paper_table(name)
    table = read_paper_table(file)
    if scale not in table.scales:
        raise UserError(f"table {name!r} has no scale {scale}; it has {', '.join(table.scales)}")
    return table, list_runs(file, table, scale)


def read_table(name: str, scale: Scale, overrides: Sequence[str] = ()) -> Reproduction:
    """Return a table with the values that are in the storage; nothing runs.

    See `prepare_table` for the arguments and errors.
    """
    table, prepared = prepare_table(name, scale, overrides)
    results = {key: read_run_tables(run) for key, run in prepared.items()}
    return collect_values(name, scale, table, results)


def reproduce(
    name: str,
    scale: Scale,
    overrides: Sequence[str],
    open_screen: OpenScreen,
    command: str,
    to_record: bool = False,
) -> Reproduction:
    """Run the missing stages of all runs of a table, and return the table with its values.

    Args:
        name: Name of a table, or path of a table file.
        scale: The scale.
        overrides: Overrides of all runs in the form of `--set`.
        open_screen: Creates the screen that shows a run.
        command: Command that resumes after an interruption, for messages.
        to_record: Record each run in `configs/measured.csv`, see `measuring`.

    Raises:
        UserError: If a run cannot be prepared, or a stage fails.
    """
    if to_record:
        measuring.check_checkout()
    _, runs = _list_runs(name, scale)
    table, prepared = prepare_table(name, scale, overrides, to_run=True)
    # raises the errors of wrong columns and methods before the training
    collect_values(name, scale, table, {key: read_run_tables(run) for key, run in prepared.items()})
    results: dict[TableKey, Mapping[str, RunTables]] = {}
    for key, prepared_run in prepared.items():
        result = app.execute(prepared_run, open_screen, command, command)
        results[key] = result.replicas or {"": result.tables}
    if to_record:
        for run in runs:
            texts = [*run.overrides, *overrides]
            config = measuring.name_config(run.config)
            measuring.record(config, texts, results[TableKey(run.part, run.run)])
    return collect_values(name, scale, table, results)


def collect_values(
    name: str,
    scale: Scale,
    table: PaperTable,
    results: Mapping[TableKey, Mapping[str, RunTables]],
) -> Reproduction:
    """Return a table with the values of its runs.

    Args:
        name: Name of the table, or path of a table file.
        scale: The scale.
        table: The table.
        results: Run -> name of a replica -> results. Values are means over replicas.
    """
    one = table.scales[scale]
    cells = []
    for part, (row_name, row), column in itertools.product(
        one.parts, table.rows.items(), one.columns
    ):
        value = _find_value(one, part, row, column, results)
        if row.minus:
            value -= _find_value(one, part, table.rows[row.minus], column, results)
        paper = row.paper.get(part, {}).get(column, math.nan)
        cells.append(Cell(part, row_name, column, value, paper))
    storage = next(iter(next(iter(results.values())).values())).storage
    return Reproduction(find_paper_table(name).stem, scale, table, cells, storage)


def _find_value(
    scale: TableScale,
    part: str,
    row: TableRow,
    column: str,
    results: Mapping[TableKey, Mapping[str, RunTables]],
) -> float:
    """Return the value of a cell in %; NaN if a replica has none."""
    (run,) = scale.find_runs(row)
    return statistics.fmean(
        _read_value(tables, row.method, scale.columns[column])
        for tables in results[TableKey(part, run)].values()
    )


def _read_value(tables: RunTables, label: str, value: str) -> float:
    """Return a metric, or the accuracy on a task, after the last task, in %.

    The value is NaN if the run is not finished.

    Raises:
        UserError: If there is no such method, metric or task.
    """
    if label not in tables.labels:
        raise UserError(f"there is no method {label!r} in the run: {', '.join(tables.labels)}")
    matrix = tables.matrix(label)
    is_finished = matrix.finished == len(matrix.tasks)
    if value.startswith(TASK):
        task = value.removeprefix(TASK)
        if task not in matrix.tasks:
            raise UserError(f"there is no task {task!r} in this stream: {', '.join(matrix.tasks)}")
        rates = matrix.rates[-1]
        return 100 * float(rates[matrix.tasks.index(task)]) if is_finished else math.nan
    names = [metric.name for metric in METRICS.values() if metric.unit == "rate"]
    if value not in names:
        raise UserError(f"there is no metric {value!r}; there are: {', '.join(names)}")
    return 100 * matrix.final[value] if is_finished else math.nan


def count_orders(cells: Sequence[Cell]) -> tuple[int, int]:
    """Compare the order of the rows in each column with the paper's.

    Returns:
        The number of pairs of cells in the paper's order, and the number of pairs whose values are
        known and differ in the paper.
    """
    same = pairs = 0
    for one, two in itertools.combinations(cells, 2):
        product = (one.paper - two.paper) * (one.value - two.value)
        if one.column == two.column and one.paper != two.paper and not math.isnan(product):
            pairs += 1
            same += product > 0
    return same, pairs


# ---- files ---------------------------------------------------------------------------------------
def write_files(result: Reproduction) -> list[str]:
    """Write the table as CSV and as a picture into the storage, and return their paths."""
    from pipeline.report.files import as_csv
    from pipeline.report.paper_table import draw_cells  # imports matplotlib
    from pipeline.report.plots import to_png

    rows: list[Row] = [cell._asdict() for cell in result.cells]
    # Values and differences have no common scale: the picture shows the larger group.
    differences = [row for row in rows if result.table.rows[row["row"]].minus]
    values = [row for row in rows if not result.table.rows[row["row"]].minus]
    if len(differences) > len(values):
        figure = draw_cells(result.table.title, differences, unit="points")
    else:
        figure = draw_cells(result.table.title, values)
    folder = join(result.storage, "papers")
    files = {
        f"{result.name}-{result.scale}.csv": as_csv(rows),
        f"{result.name}-{result.scale}.png": to_png(figure),
    }
    paths = []
    for name, data in files.items():
        paths.append(join(folder, name))
        write_bytes(paths[-1], data)
    return paths


# ---- text ----------------------------------------------------------------------------------------
def describe_table(name: str, overrides: Sequence[str] = ()) -> str:
    """Return a table as text at each scale, with the values in the storage.

    A scale that cannot be read, for example because its data is missing, has the error instead.
    """
    table = read_paper_table(find_paper_table(name))
    parts = [f"{table.title} ({table.source})", *_format_paper(table)]
    for scale, one in table.scales.items():
        heading = f"scale {scale}: {one.about}"
        try:
            parts.append(f"{heading}\n{format_values(read_table(name, scale, overrides))}")
        except UserError as error:
            parts.append(f"{heading}\nnot measured yet; {error}")
    return "\n\n".join(parts)


def format_reproduction(result: Reproduction) -> str:
    """Return a table as text.

    At scale `paper`, the paper's values are beside ours. At other scales, they are listed below.
    """
    table = result.table
    parts = [
        f"{table.title} ({table.source})",
        f"scale {result.scale}: {table.scales[result.scale].about}\n{format_values(result)}",
    ]
    if result.scale != "paper":
        same, pairs = count_mean_orders(result)
        if pairs:
            parts.append(
                f"{same} of {pairs} pairs of rows, by their means, are in the order of the paper"
            )
        parts += _format_paper(table)
    if table.differs:
        parts.append(f"differs: {table.differs}")
    return "\n\n".join(parts)


def count_mean_orders(result: Reproduction) -> tuple[int, int]:
    """Compare the order of the rows, by their mean values, with the paper's.

    For a pair of rows, the paper's means cover the cells for which the paper has both rows.

    Returns:
        See `count_orders`.
    """
    same = pairs = 0
    for one, two in itertools.combinations(result.table.rows, 2):
        papers = [
            {
                (part, column): value
                for part, columns in result.table.rows[name].paper.items()
                for column, value in columns.items()
            }
            for name in (one, two)
        ]
        common = papers[0].keys() & papers[1].keys()
        if common:
            cells = [
                Cell(
                    "",
                    name,
                    "",
                    statistics.fmean(cell.value for cell in result.cells if cell.row == name),
                    statistics.fmean(paper[key] for key in common),
                )
                for name, paper in zip((one, two), papers, strict=True)
            ]
            counted = count_orders(cells)
            same, pairs = same + counted[0], pairs + counted[1]
    return same, pairs


def format_values(result: Reproduction) -> str:
    """Return our values as text, with the paper's values of the same columns beside them."""
    texts = []
    for part in result.table.scales[result.scale].parts:
        cells = result.part_cells(part)
        shared = {cell.column for cell in cells if not math.isnan(cell.paper)}
        heading = [part or "%"]
        for column in dict.fromkeys(cell.column for cell in cells):
            heading += [column, "paper"] if column in shared else [column]
        rows: dict[str, list[str]] = {}
        for cell in cells:
            row = rows.setdefault(cell.row, [cell.row])
            row.append(format_percent(cell.value))
            if cell.column in shared:
                row.append(format_percent(cell.paper, 2))
        texts.append(table_text(heading, list(rows.values())))
        same, pairs = count_orders(cells)
        if pairs:
            texts.append(f"{same} of {pairs} pairs of rows are in the order of the paper")
    if any(math.isnan(cell.value) for cell in result.cells):
        texts.append("- is not measured yet, or not known from the paper")
    return "\n".join(texts)


def _format_paper(table: PaperTable) -> list[str]:
    """Return the values in the paper as text, part by part."""
    parts = dict.fromkeys(part for row in table.rows.values() for part in row.paper)
    texts = []
    for part in parts:
        values = {name: row.paper.get(part, {}) for name, row in table.rows.items()}
        columns = list(dict.fromkeys(column for cells in values.values() for column in cells))
        rows = [
            [name, *(format_percent(cells.get(column, math.nan), 2) for column in columns)]
            for name, cells in values.items()
        ]
        texts.append(f"in the paper, {part}:\n{table_text(['%', *columns], rows)}")
    return texts


def format_percent(value: float, digits: int = 1) -> str:
    """Return a value in %, or `-` if it is NaN."""
    return "-" if math.isnan(value) else f"{value:z.{digits}f}"


# ---- cost ----------------------------------------------------------------------------------------
def describe_plan(name: str, scale: Scale, overrides: Sequence[str] = ()) -> str:
    """Return the cost of the missing stages of a table at a scale, run by run.

    Data sets that are not on this machine are named. Their cost follows from the numbers of images
    on their cards.

    Raises:
        UserError: If there is no such table or scale, or a run cannot be prepared.
    """
    table, runs = _list_runs(name, scale)
    missing: dict[str, str] = {}
    texts = [f"{table.title}, scale {scale}"]
    with tempfile.TemporaryDirectory(prefix="accrete-plan-") as folder:
        texts += [_describe_cost(_prepare_plan(run, overrides, missing, folder)) for run in runs]
    if missing:
        program = invocation.this_command()
        texts.append(
            "not on this machine, and counted by the numbers on their cards:\n"
            + "\n".join(f"{card}: {program} data list {shlex.quote(card)}" for card in missing)
        )
    return "\n\n".join(texts)


def _describe_cost(prepared: PreparedRun) -> str:
    """Return the number of stages of a run and their cost."""
    from pipeline.launch.cost import format_forecast  # imports torch

    plan = app.plan(prepared)
    count = len(plan.stages_to_run)
    return (
        f"run {prepared.config.name}: {len(prepared.graph) - count} stages up to date, {count} to "
        f"run\n{format_forecast(plan.forecast())}"
    )


def _prepare_plan(
    run: PartRun, overrides: Sequence[str], missing: dict[str, str], folder: str
) -> PreparedRun:
    """Prepare a run for a forecast, with placeholders for missing data.

    None is needed if all data is in the storage, or at sources that answer.

    Args:
        run: The run.
        overrides: Overrides of all runs.
        missing: Card of missing data -> placeholder. Cards are added.
        folder: Temporary folder for placeholders, and for the storage of a run with one.
    """
    config = os.path.relpath(run.config)
    texts = [*run.overrides, *overrides]
    loaded = configs.load(config, texts)
    tasks = loaded.stream.tasks
    if not any(task.card in missing for task in tasks):
        try:
            return app.prepare(config, texts, with_jobs=True, allow_replicas=True)
        except UserError:
            has_all_data = not any(placeholders.is_missing(task.card) for task in tasks)
            if has_all_data and loaded.backbone.weights == "none":
                raise
    for index, task in enumerate(tasks):
        if placeholders.is_missing(task.card):
            if task.card not in missing:
                place = Path(folder, f"card-{len(missing)}")
                missing[task.card] = str(placeholders.write_placeholder(task.card, place))
            texts.append(format_override(f"stream.tasks.{index}.card", missing[task.card]))
    if loaded.backbone.weights != "none":
        # weights do not change the cost, and may be missing too
        weights = Path(folder, "weights.safetensors")
        weights.touch()
        texts.append(format_override("backbone.weights", str(weights)))
    texts.append(format_override("storage", str(Path(folder, "storage"))))
    return app.prepare(config, texts, with_jobs=True, allow_replicas=True)
