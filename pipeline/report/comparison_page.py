"""The page of `accrete compare`: a self-contained HTML file that compares runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
from numpy.typing import NDArray

from pipeline.report import plots
from pipeline.report.comparison import ComparedMethod, Comparison, collect_environment
from pipeline.report.figures import FigureFile
from pipeline.report.html_parts import render_markup
from pipeline.results.answers import ACCURACY_AFTER, FORGETTING_AFTER
from pipeline.results.metrics import Metric, metrics_for

SIDE_BY_SIDE = 4  # maximum number of accuracy matrices in one row of a picture


def render_comparison_page(comparison: Comparison) -> Markup:
    """Render the page."""
    group_cells = []
    for group in comparison.groups:
        names = ", ".join(str(run.record["name"]) for run in group.runs.values())
        seeds = ", ".join(map(str, group.runs))
        title = Markup("<b>{}</b>").format(group.name)
        group_cells.append([title, names, seeds, ", ".join(group.first.labels)])
    pairs = []
    for entry in comparison.entries:
        base = comparison.base(entry)
        if base is not None:
            pairs.append((entry, base))
    return render_markup(
        "comparison.html",
        title=" ~ ".join(group.name for group in comparison.groups),
        group_cells=group_cells,
        pairs=pairs,
        pair_metrics=select_known_metrics(list(chain.from_iterable(pairs))),
        curves=curves_picture(comparison),
        matrices=matrix_pictures(comparison),
        settings=comparison.setting_rows(),
        no_settings=[group.name for group in comparison.groups if not group.settings],
        versions=comparison.provenance_rows(),
        no_versions=[group.name for group in comparison.groups if not collect_environment(group)],
        **make_summary_values(comparison),
    )


def select_known_metrics(entries: Sequence[ComparedMethod]) -> list[Metric]:
    """Return the metrics known for at least one entry."""

    def is_known(metric: Metric) -> bool:
        return any(not math.isnan(entry.spread(metric.name).mean) for entry in entries)

    return list(filter(is_known, metrics_for("comparison")))


def make_summary_values(comparison: Comparison) -> dict[str, Any]:
    """Return the values of the templates `comparison_summary.html` and `shared_stages.html`."""
    metrics = select_known_metrics(comparison.entries)
    keys = set()
    for run in comparison.runs:
        keys |= {stage["key"] for stage in run.record["stages"] if stage["step"] != "report"}
    code = Markup("<code>{}</code>")
    shared = [
        [code.format(row["stage"]), code.format(row["key"][:12]), row["runs"]]
        for row in comparison.stage_rows()
    ]
    return {
        "comparison": comparison,
        "entries": comparison.entries,
        "metrics": metrics,
        "winners": {m.name: comparison.winner(m.name, m.better) for m in metrics},
        "shared": shared,
        "num_keys": len(keys),
    }


# ---- pictures ------------------------------------------------------------------------------------
def curves_picture(comparison: Comparison) -> FigureFile:
    """Return the picture of the averages after each task."""
    bands = "from the lowest to the highest run"
    if comparison.draws:
        bands = "95 % intervals of the mean"
    caption = (
        f"Lines: means over the seeds. Bands: {bands}. On the left, "
        "a falling line means that new tasks are harder or earlier ones are forgotten. "
        "On the right, a rising line means forgetting."
    )
    figure = draw_accuracy_curves(comparison)
    return FigureFile("curves.png", "Averages after each task", caption, plots.to_png(figure))


def draw_accuracy_curves(comparison: Comparison) -> Figure:
    """Draw average accuracy and forgetting after each task, one line per entry."""
    figure, (left, right) = plots.new_figure(10.4, 3.9, 1, 2)
    x_label = "after learning"
    ticks = list(comparison.tasks)
    if not comparison.has_one_order:
        x_label = "number of common tasks learned"
        ticks = [str(t + 1) for t in range(len(ticks))]
    panels = (
        (left, "average_accuracy", "Average accuracy so far"),
        (right, "forgetting", "Forgetting so far"),
    )
    for axes, metric, title in panels:
        plots.style_axes(axes, title, x_label)
        for index, entry in enumerate(comparison.entries):
            draw_curve(axes, comparison, entry, metric, index)
        axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        axes.set_xlim(-0.25, max(len(ticks) - 0.75, 0.25))
        plots.label_tasks(axes, ticks, "x")
    left.set_ylim(0, 1.02)
    low, high = right.get_ylim()
    if high - low < 0.1:
        right.set_ylim(-0.01, 0.1)
    plots.add_legend(figure, plots.list_handles(left), columns=3)
    return figure


def draw_curve(
    axes: Axes,
    comparison: Comparison,
    entry: ComparedMethod,
    metric: str,
    index: int,
    scale: float = 1.0,
) -> None:
    """Draw a metric after each task: the mean over the seeds as a line, and a band.

    The band is the 95 % interval of the mean. Without bootstrap draws the band reaches from the
    lowest to the highest run. The curve ends at the last task that all runs have finished.

    Args:
        axes: Axes to draw on.
        comparison: The comparison, for the intervals.
        entry: The entry.
        metric: `average_accuracy` or `forgetting`.
        index: Index of the entry, which determines its style.
        scale: Factor for the line width and the marker size.
    """
    num_steps = min(matrix.finished for matrix in entry.matrices.values())
    if num_steps == 0:
        return
    values = np.empty((len(entry.matrices), num_steps))
    for row, matrix in zip(values, entry.matrices.values(), strict=True):
        row[:] = [averages[metric] for averages in matrix.over_time[:num_steps]]
    style = plots.method_style(index)
    style["linewidth"] = scale * max(1.3, 3.2 - 0.5 * index)
    style["markersize"] = scale * max(4.5, 8 - index)
    style["markevery"] = plots.marker_step(num_steps)
    steps = range(num_steps)
    axes.plot(steps, values.mean(0), label=entry.name, **style)
    lows = values.min(0)
    highs = values.max(0)
    if comparison.draws:
        name = ACCURACY_AFTER if metric == "average_accuracy" else FORGETTING_AFTER
        intervals = [comparison.interval(entry, name.format(t)) for t in steps]
        lows = np.array([interval.low for interval in intervals])
        highs = np.array([interval.high for interval in intervals])
    band = {"color": style["color"], "alpha": 0.15, "linewidth": 0}
    axes.fill_between(steps, lows, highs, **band)


def matrix_pictures(comparison: Comparison) -> list[FigureFile]:
    """Return pictures of accuracy matrices.

    A picture shows a base (see `Comparison.base`) and up to SIDE_BY_SIDE - 1 entries compared with
    it. The differences from the base are below the matrices. An entry without a base is its own
    base.
    """
    families: dict[str, list[ComparedMethod]] = {}
    for entry in comparison.entries:
        base = comparison.base(entry) or entry
        families.setdefault(base.name, []).append(entry)
    pictures: list[FigureFile] = []
    for base, *compared in families.values():  # a base precedes its entries in the comparison
        for start in range(0, max(len(compared), 1), SIDE_BY_SIDE - 1):
            entries = [base, *compared[start : start + SIDE_BY_SIDE - 1]]
            caption = (
                "Row: after learning a task. Column: accuracy on a task in per cent, "
                "mean over the seeds."
            )
            if len(entries) > 1:
                caption += (
                    f" Below: the difference from {base.name} in percentage points; "
                    "blue is better, red is worse."
                )
            title = " beside ".join(entry.name for entry in entries)
            png = plots.to_png(draw_matrices(entries, comparison.tasks))
            pictures.append(FigureFile(f"matrices-{len(pictures)}.png", title, caption, png))
    return pictures


class HeatScale(NamedTuple):
    """Colour scale of a heat map.

    Attributes:
        cmap: Name of the colour map.
        low: Value at the start of the scale.
        high: Value at the end of the scale.
        text: Format of the numbers in the cells, which are the values times 100.
    """

    cmap: str
    low: float
    high: float
    text: str


ACCURACY_SCALE = HeatScale(plots.SEQUENTIAL, 0.0, 1.0, "{:.0f}")


def draw_matrices(entries: Sequence[ComparedMethod], tasks: Sequence[str]) -> Figure:
    """Draw the accuracy matrices of entries, and below them the differences from the first."""
    columns = len(entries)
    rows = 1 if columns == 1 else 2
    side = min(max(2.6, 0.5 * len(tasks)), 4.2 if columns <= 2 else 3.2)
    figure, axes = plots.new_figure(side * columns + 1.2, rows * (side + 0.9), rows, columns)
    base_rates = entries[0].rates(tasks)
    differences = [entry.rates(tasks) - base_rates for entry in entries[1:]]
    limit = 0.05
    for difference in differences:
        if not np.isnan(difference).all():
            limit = max(limit, float(np.nanmax(np.abs(difference))))
    for panel, entry in zip(axes, entries, strict=False):
        _draw_heat_map(panel, entry.rates(tasks), tasks, entry.name, ACCURACY_SCALE)
    if differences:
        # red is worse than the first entry, blue is better
        scale = HeatScale("RdBu", -limit, limit, "{:+.1f}")
        for panel, difference in zip(axes[columns + 1 :], differences, strict=True):
            _draw_heat_map(panel, difference, tasks, "minus the first", scale)
        axes[columns].set_visible(False)
    return figure


def _draw_heat_map(
    axes: Axes, values: NDArray[np.float64], tasks: Sequence[str], title: str, scale: HeatScale
) -> None:
    plots.draw_cells(axes, values, scale.cmap, scale.low, scale.high)
    most = max(abs(scale.low), abs(scale.high))
    size = plots.text_size(len(tasks)) - 1
    for t, i in np.ndindex(values.shape):
        value = float(values[t, i])
        if not math.isnan(value) and len(tasks) <= 12:
            text = scale.text.format(100 * value)
            plots.write_in_cell(axes, t, i, text, abs(value) > 0.65 * most, fontsize=size)
    short_title = title if len(title) <= 26 else title[:25] + "…"
    plots.style_axes(axes, short_title, "accuracy on task", "after learning", grid=None)
    axes.spines[:].set_visible(False)
    plots.label_tasks(axes, tasks)
