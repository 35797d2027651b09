"""Tables and figures of a comparison for papers. Start with `paper_files`.

Tables are LaTeX (booktabs), Markdown, CSV and Parquet. Figures are PDF and SVG, as wide as a column
of a two-column paper. The pages of reports show the same tables as HTML.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from markupsafe import Markup, escape
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from pipeline.report import comparison_page, files, plots
from pipeline.report.comparison import ComparedMethod, Comparison, Spread
from pipeline.report.files import Row
from pipeline.report.html_parts import NO_VALUE, format_interval, format_spread, format_value
from pipeline.results.answers import ACCURACY_ON
from pipeline.results.intervals import Interval
from pipeline.results.training import TrainingBudget

HtmlRows = list[list[tuple[str, str]]]  # rows of cells (content, CSS class)
COLUMN_INCHES = 3.3  # width of a figure
FIGURE_INCHES = 2.5  # height of a figure
# special character -> its escaped form
LATEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    **{letter: f"\\{letter}" for letter in "&%$#_{}"},
}
MARKDOWN = {letter: f"\\{letter}" for letter in "\\|*_`<>"}


class Column(NamedTuple):
    """A column of the table. `metric` and `pick_best` are arguments of `Comparison.winner`."""

    title: str
    metric: str
    pick_best: Callable[..., float]


class Cell(NamedTuple):
    """A number of a table.

    Attributes:
        spread: Mean and standard deviation over replicas.
        interval: 95 % interval of the mean.
        is_best: Whether the method is the winner of the column (see `Comparison.winner`).
    """

    spread: Spread
    interval: Interval
    is_best: bool


@dataclass(frozen=True)
class AccuracyTable:
    """A table with a row per method: accuracy on each task, average accuracy and forgetting.

    Attributes:
        heading: Headings of all columns except the first, which names the method.
        rows: Method -> cells.
        average: Index in `heading` of the average, the only column that also shows intervals.
    """

    heading: Sequence[str]
    rows: Mapping[str, Sequence[Cell]]
    average: int


def accuracy_table(comparison: Comparison) -> AccuracyTable:
    """Build the table of final accuracies on each task, their average, and forgetting."""
    columns = []
    for position, task in enumerate(comparison.tasks):
        columns.append(Column(task, ACCURACY_ON.format(position), max))
    average = len(columns)
    columns.append(Column("average", "average_accuracy", max))
    columns.append(Column("forgetting", "forgetting", min))
    winners = {c.metric: comparison.winner(c.metric, c.pick_best) for c in columns}
    rows = {}
    for entry in comparison.entries:
        cells = []
        for column in columns:
            interval = comparison.interval(entry, column.metric)
            is_best = winners[column.metric] is entry
            cells.append(Cell(entry.spread(column.metric), interval, is_best))
        rows[entry.name] = cells
    return AccuracyTable([column.title for column in columns], rows, average)


# ---- the same table in each form -----------------------------------------------------------------
def as_latex(table: AccuracyTable, caption: Sequence[str]) -> str:
    """Return the table as a LaTeX `tabular` in the style of booktabs.

    Args:
        table: The table.
        caption: Sentences, which are written above the table as LaTeX comments.
    """
    rows = []
    for name, cells in table.rows.items():
        texts = [escape_latex(name)]
        for position, cell in enumerate(cells):
            texts.append(_latex_cell(cell, position == table.average))
        rows.append(texts)
    return _tabular(caption, ["method", *map(escape_latex, table.heading)], rows)


def _tabular(caption: Sequence[str], heading: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return cells, which are LaTeX already, as a `tabular` in the style of booktabs."""
    lines = [f"% {sentence}" for sentence in caption]
    lines += ["% \\usepackage{booktabs}", f"\\begin{{tabular}}{{l{'r' * (len(heading) - 1)}}}"]
    heading_line, *row_lines = [" & ".join(cells) + r" \\" for cells in (heading, *rows)]
    lines += ["\\toprule", heading_line, "\\midrule", *row_lines]
    return "\n".join([*lines, "\\bottomrule", "\\end{tabular}", ""])


def escape_latex(text: str) -> str:
    """Return text with LaTeX's special characters escaped."""
    return "".join(LATEX.get(letter, letter) for letter in text)


def _latex_cell(cell: Cell, with_interval: bool) -> str:
    if math.isnan(cell.spread.mean):
        return "--"
    text = percent(cell.spread.mean)
    if cell.is_best:
        text = f"\\mathbf{{{text}}}"
    if not math.isnan(cell.spread.deviation):
        text += f" \\pm {percent(cell.spread.deviation)}"
    interval = ""
    if with_interval and not math.isnan(cell.interval.low):
        ends = f"[{percent(cell.interval.low)}, {percent(cell.interval.high)}]"
        interval = f" {{\\scriptsize ${ends}$}}"
    return f"${text}${interval}"


def as_markdown(table: AccuracyTable, caption: Sequence[str]) -> str:
    """Return the table as Markdown, with the sentences of `caption` below."""
    lines = ["| method | " + " | ".join(map(escape_markdown, table.heading)) + " |"]
    lines.append("|---|" + "---:|" * len(table.heading))
    for name, cells in table.rows.items():
        texts = [escape_markdown(name)]
        for position, cell in enumerate(cells):
            texts.append(_plain_cell(cell, position == table.average, "**", "**", "-"))
        lines.append(f"| {' | '.join(texts)} |")
    return "\n".join([*lines, "", *map(escape_markdown, caption), ""])


def escape_markdown(text: str) -> str:
    """Return text with Markdown's special characters escaped."""
    return "".join(MARKDOWN.get(letter, letter) for letter in text)


def html_rows(table: AccuracyTable) -> HtmlRows:
    """Return the rows of the table for the template macro `method_table`."""
    rows: HtmlRows = []
    for name, cells in table.rows.items():
        row: list[tuple[str, str]] = [_method_cell(name)]
        for position, cell in enumerate(cells):
            text = escape(_plain_cell(cell, False, "", "", NO_VALUE))
            if position == table.average:
                text += format_interval(cell.interval)
            row.append((text, "best" if cell.is_best else ""))
        rows.append(row)
    return rows


def _method_cell(name: str) -> tuple[str, str]:
    return Markup("<b>{}</b>").format(name), "left"


def _plain_cell(cell: Cell, with_interval: bool, start: str, end: str, nothing: str) -> str:
    """Return a cell as text such as `92.1 ± 0.4 [91.0, 93.2]`.

    Args:
        cell: The cell.
        with_interval: Whether to write the interval.
        start: Text before the mean if the cell is best.
        end: Text after the mean if the cell is best.
        nothing: Text of a cell without a value.
    """
    if math.isnan(cell.spread.mean):
        return nothing
    text = percent(cell.spread.mean)
    if cell.is_best:
        text = f"{start}{text}{end}"
    if not math.isnan(cell.spread.deviation):
        text += f" ± {percent(cell.spread.deviation)}"
    if with_interval and not math.isnan(cell.interval.low):
        text += f" [{percent(cell.interval.low)}, {percent(cell.interval.high)}]"
    return text


def percent(value: float) -> str:
    """Format a rate such as 0.9214 in per cent: `92.1`."""
    return f"{100 * value:z.1f}"


def table_rows(table: AccuracyTable) -> list[Row]:
    """Return the table in long format, with rates as fractions, not in per cent."""
    rows = []
    for name, cells in table.rows.items():
        for title, cell in zip(table.heading, cells, strict=True):
            rows.append(
                {
                    "method": name,
                    "column": title,
                    "n": cell.spread.n,
                    "mean": cell.spread.mean,
                    "deviation": cell.spread.deviation,
                    "low": cell.interval.low,
                    "high": cell.interval.high,
                    "best": cell.is_best,
                }
            )
    return rows


def format_caption(comparison: Comparison) -> list[str]:
    """Return sentences that explain the numbers of the table."""
    counts = [len(group.runs) for group in comparison.groups]
    names = {", ".join(map(str, group.runs)) for group in comparison.groups}
    sentences = ["Accuracy in per cent on each task after the last one."]
    if max(counts, default=0) > 1:
        is_equal = min(counts) == max(counts)
        replicas = f"{counts[0] if is_equal else f'{min(counts)} to {max(counts)}'} replicas"
        if len(names) == 1:
            replicas += f" ({names.pop()})"
        sentences.append(f"Mean and sample standard deviation of {replicas}.")
    else:
        sentences.append("One seed: differences between methods may be chance.")
    if comparison.draws:
        sentences.append("In brackets: 95 % bootstrap intervals over test images and replicas.")
    sentences.append(
        "Bold: best of its column by more than the noise (paired, 95 %), not by better conditions."
    )
    return [*sentences, *comparison.fairness_notes()]


# ---- budgets -------------------------------------------------------------------------------------
BUDGET_COLUMNS = {  # field of `TrainingBudget` -> (heading, unit for `format_value`)
    "epochs": ("epochs a task", "count"),
    "images": ("images trained on", "count"),
    "device_s": ("device-seconds", "seconds"),
    "stored_bytes": ("bytes stored", "bytes"),
}


def budgets(comparison: Comparison) -> dict[str, TrainingBudget]:
    """Return the training budget of each entry by name, averaged over replicas."""
    means = {}
    for entry in comparison.entries:
        by_run = [run.budget(entry.label) for run in entry.group.runs.values()]
        means[entry.name] = TrainingBudget(*map(statistics.fmean, zip(*by_run, strict=True)))
    return means


def budget_rows(comparison: Comparison) -> list[Row]:
    """Return the training budgets, with one row per entry."""
    return [{"method": name, **budget._asdict()} for name, budget in budgets(comparison).items()]


def budget_html_rows(comparison: Comparison) -> HtmlRows:
    """Return the rows of the table of budgets for the template macro `method_table`."""
    rows: HtmlRows = []
    for name, budget in budgets(comparison).items():
        values = [
            format_value(getattr(budget, field), kind)
            for field, (_, kind) in BUDGET_COLUMNS.items()
        ]
        rows.append([_method_cell(name), *((value, "") for value in values)])
    return rows


def budgets_latex(comparison: Comparison) -> str:
    """Return the table of budgets as a LaTeX `tabular` in the style of booktabs."""
    caption = (
        "Training budget of each method, without the training of the backbone; the bytes include "
        "the backbone; mean over replicas."
    )
    heading = ["method", *(title for title, _ in BUDGET_COLUMNS.values())]
    rows = []
    for name, budget in budgets(comparison).items():
        rows.append([escape_latex(name), *map(_latex_number, budget)])
    return _tabular([caption], heading, rows)


def _latex_number(value: float) -> str:
    return "--" if math.isnan(value) else f"{value:,.1f}".removesuffix(".0")


# ---- figures -------------------------------------------------------------------------------------
def curve_figure(comparison: Comparison, metric: str, title: str) -> Figure:
    """Draw a metric after each task, with one curve and band per entry."""
    figure, (axes,) = plots.new_figure(COLUMN_INCHES, FIGURE_INCHES)
    plots.style_axes(axes, "", "tasks learned", title)
    for index, entry in enumerate(comparison.entries):
        comparison_page.draw_curve(axes, comparison, entry, metric, index, scale=0.5)
    count = len(comparison.tasks)
    step = max(1, count // 10)
    axes.set_xticks(range(0, count, step), [str(t + 1) for t in range(0, count, step)])
    axes.tick_params(labelsize=7)
    axes.xaxis.label.set_fontsize(8)
    axes.yaxis.label.set_fontsize(8)
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    plots.add_legend(figure, plots.list_handles(axes), columns=3, above=True, fontsize=7)
    return figure


def paper_files(comparison: Comparison) -> dict[str, bytes]:
    """Return file name -> content of the tables and figures of a comparison."""
    table = accuracy_table(comparison)
    caption = format_caption(comparison)
    contents = {
        "table.tex": as_latex(table, caption).encode(),
        "table.md": as_markdown(table, caption).encode(),
        "budget.tex": budgets_latex(comparison).encode(),
    }
    rows = {"table": table_rows(table), "budget": budget_rows(comparison)}
    contents |= files.csv_and_parquet(rows)
    figures = (("average_accuracy", "average accuracy so far"), ("forgetting", "forgetting so far"))
    for metric, title in figures:
        for kind in ("pdf", "svg"):
            figure = curve_figure(comparison, metric, title)
            contents[f"{metric}.{kind}"] = plots.to_vector(figure, kind)
    return contents


# ---- differences ---------------------------------------------------------------------------------
def difference_html_rows(comparison: Comparison) -> HtmlRows:
    """Return the rows of the differences from the most accurate method, for `method_table`."""
    first, *others = rank_by_accuracy(comparison.entries)
    metric = "average_accuracy"
    rows: HtmlRows = []
    for entry in others:
        is_beyond = comparison.differ(entry, first, metric)
        rows.append(
            [
                (Markup("<b>{}</b> minus {}").format(entry.name, first.name), "left"),
                (format_spread(entry.difference(first, metric), "rate", is_difference=True), ""),
                (_points(comparison.difference_interval(entry, first, metric)), ""),
                (_points(comparison.t_interval(entry, first)), ""),
                ("beyond the noise" if is_beyond else "within the noise", "left"),
            ]
        )
    return rows


def _points(interval: Interval) -> str:
    """Return an interval in percentage points."""
    if math.isnan(interval.low):
        return NO_VALUE
    return f"{100 * interval.low:+z.1f} to {100 * interval.high:+z.1f} pp"


def rank_by_accuracy(entries: Sequence[ComparedMethod]) -> list[ComparedMethod]:
    """Sort entries by average accuracy, highest first. Entries without a value come last."""

    def accuracy(entry: ComparedMethod) -> float:
        mean = entry.spread("average_accuracy").mean
        return -math.inf if math.isnan(mean) else mean

    return sorted(entries, key=accuracy, reverse=True)
