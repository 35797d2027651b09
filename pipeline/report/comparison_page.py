"""The page of `compare`: runs side by side, one self-contained HTML file."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from itertools import chain
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
from numpy.typing import NDArray

from pipeline.report import plots
from pipeline.report.comparison import Comparison, Entry, Spread, environment
from pipeline.report.figures import Picture
from pipeline.report.files import Row
from pipeline.report.html_parts import (
    NO_VALUE,
    format_value,
    plural,
    render_document,
    render_links,
    render_picture,
    render_pictures,
    render_table,
)
from pipeline.results.answers import ACCURACY_AFTER, FORGETTING_AFTER
from pipeline.results.intervals import Interval
from pipeline.results.metrics import Metric, metrics_for

ABOUT_INTERVALS = (
    "The grey range is a 95 % interval of the mean: a percentile bootstrap over test images, the "
    "same ones for all methods, and over the runs. Of few runs it is too narrow: three cannot say "
    "how far off a fourth would be. A mean is bold where it is the best, and its lead over "
    "every other one is beyond the noise: the interval of the paired difference excludes 0, and so "
    "does Student's t interval over the runs. One run says nothing of that, so nothing is bold."
)
SIDE_BY_SIDE = 4  # matrices in one row of a picture
LINKS = (
    ("summary", "Summary"),
    ("differences", "Differences"),
    ("tasks", "Over the tasks"),
    ("matrices", "Matrices"),
    ("settings", "Settings"),
    ("provenance", "Environment"),
    ("stages", "Shared stages"),
)


def render_page(comparison: Comparison) -> str:
    """Return the page as HTML."""
    notes = "".join(f"<li>{escape(note)}</li>" for note in comparison.notes)
    sections = [render_head(comparison)]
    if notes:
        sections.append(f'<div class="note"><ul>{notes}</ul></div>')
    sections.append(render_summary(comparison))
    sections.append(render_differences(comparison))
    sections.append('<h2 id="tasks">Over the tasks</h2>')
    sections.append(render_picture(curves_picture(comparison)))
    sections.append('<h2 id="matrices">Accuracy matrices</h2>')
    sections.append(render_pictures(matrix_pictures(comparison)))
    sections.append(render_settings(comparison))
    sections.append(render_provenance(comparison))
    sections.append(render_stages(comparison))
    title = escape(" ~ ".join(group.name for group in comparison.groups))
    return render_document(title, sections)


def render_head(comparison: Comparison) -> str:
    """Return title, introduction, the table of groups, and links."""
    body = []
    for group in comparison.groups:
        run_names = ", ".join(str(run.record["name"]) for run in group.runs.values())
        body.append(
            [
                f"<b>{escape(group.name)}</b>",
                escape(run_names),
                escape(", ".join(map(str, group.runs))),
                escape(", ".join(group.first.labels)),
            ]
        )
    introduction = "Each run is one line below."
    if any(len(group.runs) > 1 for group in comparison.groups):
        introduction = (
            "Runs that differ only in seed and name are one line below; "
            "their numbers are mean ± standard deviation."
        )
    table = render_table(["settings of", "runs", "seeds", "methods"], body, 4, is_html=True)
    return (
        f"<h1>Comparison of {len(comparison.runs)} runs</h1>"
        f"<div class=soft>{len(comparison.groups)} different settings · "
        f"{len(comparison.tasks)} common tasks: {escape(', '.join(comparison.tasks))}</div>"
        f"<p style='margin-top:14px'>{introduction} All numbers are read from stored results; "
        f"nothing was trained for this page.</p>{table}{render_links(LINKS)}"
    )


# ---- numbers -------------------------------------------------------------------------------------
def column_head(metric: Metric) -> str:
    """Return the head of a column, one word per line."""
    text = metric.title.replace(" per ", " per_").replace(" ", "<br>").replace("_", " ")
    return f'<th title="{escape(metric.meaning)}">{text}</th>'


def format_spread(spread: Spread, kind: str, is_difference: bool = False) -> str:
    """Return `61.2 ± 0.4 %` as HTML; a difference has a sign, of accuracies in points (pp)."""
    if math.isnan(spread.mean):
        return NO_VALUE
    sign = "+" if is_difference and spread.mean >= 0 else ""
    if kind != "rate":
        text = f"{sign}{format_value(spread.mean, kind)}"
        if math.isnan(spread.deviation) or spread.deviation == 0:
            return text
        return f"{text} ± {format_value(spread.deviation, kind)}"
    text = f"{sign}{100 * spread.mean:.1f}"
    if not math.isnan(spread.deviation):
        text += f" ± {100 * spread.deviation:.1f}"
    text += " pp" if is_difference else " %"
    return text.replace("+-0.0", "+0.0").replace("-0.0 ", "0.0 ")


def known_metrics(entries: Sequence[Entry]) -> list[Metric]:
    """Return the metrics that at least one entry has."""
    return [metric for metric in metrics_for("comparison") if _has_mean(entries, metric.name)]


def _has_mean(entries: Sequence[Entry], metric: str) -> bool:
    return any(not math.isnan(entry.spread(metric).mean) for entry in entries)


def render_summary(comparison: Comparison) -> str:
    """Return the table of means and deviations."""
    metrics = known_metrics(comparison.entries)
    winners = {metric.name: comparison.winner(metric.name, metric.better) for metric in metrics}
    body = ""
    for entry in comparison.entries:
        body += f"<tr><td class=left><b>{escape(entry.name)}</b></td>"
        body += f"<td>{len(entry.group.runs)}</td>"
        for metric in metrics:
            spread = entry.spread(metric.name)
            start = "<td class=best>" if winners[metric.name] is entry else "<td>"
            interval = format_interval(comparison.interval(entry, metric.name))
            body += f"{start}{format_spread(spread, metric.unit)}{interval}</td>"
        body += "</tr>"
    titles = "".join(map(column_head, metrics))
    meanings = [f"<b>{metric.title}</b>: {metric.meaning}" for metric in metrics]
    return (
        '<h2 id="summary">Summary</h2><p>n is the number of runs with different seeds. The number '
        f"after ± is their sample standard deviation; one run has none. {ABOUT_INTERVALS}</p>"
        '<div class="scroll"><table class="summary">'
        f"<tr><th class=left>run</th><th>n</th>{titles}</tr>{body}</table></div>"
        f"<details><summary>What the columns mean</summary><p>{'; '.join(meanings)}.</p></details>"
    )


def format_interval(interval: Interval) -> str:
    """Return the 95 % interval of an accuracy as HTML, on a line of its own; empty for none."""
    if math.isnan(interval.low):
        return ""
    return f"<br><span class=soft>{100 * interval.low:z.1f} to {100 * interval.high:z.1f}</span>"


def render_differences(comparison: Comparison) -> str:
    """Return the table of differences from the first group."""
    pairs = []
    for entry in comparison.entries:
        base = comparison.base(entry)
        if base is not None:
            pairs.append((entry, base))
    if not pairs:
        reason = "All runs differ only in their seed"
        if len(comparison.groups) > 1:
            reason = "The first run has several methods, and the other runs have none of them"
        return (
            '<h2 id="differences">Differences</h2>'
            f"<p>{reason}, so there is nothing to subtract.</p>"
        )
    metrics = known_metrics(list(chain.from_iterable(pairs)))
    body = ""
    for entry, base in pairs:
        body += (
            f"<tr><td class=left><b>{escape(entry.name)}</b><br>"
            f"<span class=soft>minus {escape(base.name)}</span></td>"
        )
        accuracy = entry.difference(base, "average_accuracy")
        how = f"{accuracy.n} pair{plural(accuracy.n)}" if accuracy.paired else "means"
        body += f"<td>{how}</td>"
        for metric in metrics:
            spread = entry.difference(base, metric.name)
            body += f"<td>{format_spread(spread, metric.unit, is_difference=True)}</td>"
        body += "</tr>"
    titles = "".join(map(column_head, metrics))
    first = escape(comparison.groups[0].name)
    return (
        f'<h2 id="differences">Differences from {first}</h2><p>Each number minus that of '
        f"<b>{first}</b>, for accuracies in percentage points (pp). <b>pairs</b>: runs with the "
        "same seed were subtracted from each other, and ± is the standard deviation of these "
        "differences. <b>means</b>: the runs have no common seed, so their means were subtracted. "
        "A difference that is not clearly larger than its ± may be chance.</p>"
        '<div class="scroll"><table class="summary">'
        f"<tr><th class=left>run</th><th>how</th>{titles}</tr>{body}</table></div>"
    )


# ---- pictures ------------------------------------------------------------------------------------
def curves_picture(comparison: Comparison) -> Picture:
    """Return the averages after each task, one line per entry."""
    bands = "from the lowest to the highest run"
    if comparison.draws:
        bands = "95 % intervals of the mean"
    caption = (
        f"Lines: means over the seeds. Bands: {bands}. On the left, "
        "a falling line means that new tasks are harder or earlier ones are forgotten. "
        "On the right, a rising line means forgetting."
    )
    figure = draw_curves(comparison)
    return Picture("curves.png", "Averages after each task", caption, plots.to_png(figure))


def draw_curves(comparison: Comparison) -> Figure:
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
    plots.add_legend(figure, plots.handles_of(left), columns=3)
    return figure


def draw_curve(
    axes: Axes, comparison: Comparison, entry: Entry, metric: str, index: int, scale: float = 1.0
) -> None:
    """Draw the mean of a metric over the seeds after each task, and its band.

    The band is the 95 % interval of the mean, or, without one, from the lowest to the highest run.
    metric: average_accuracy or forgetting. scale: of line and markers.
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


def matrix_pictures(comparison: Comparison) -> list[Picture]:
    """Return heat maps of entries with the same base, and below them the differences from it."""
    families: dict[str, list[Entry]] = {}
    for entry in comparison.entries:
        base = comparison.base(entry) or entry
        families.setdefault(base.name, []).append(entry)
    pictures: list[Picture] = []
    for base, *compared in families.values():
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
            pictures.append(Picture(f"matrices-{len(pictures)}.png", title, caption, png))
    return pictures


class HeatScale(NamedTuple):
    """Colours of a heat map, the ends of their scale, and the format of numbers in cells."""

    cmap: str
    low: float
    high: float
    text: str


ACCURACY_SCALE = HeatScale(plots.SEQUENTIAL, 0.0, 1.0, "{:.0f}")


def draw_matrices(entries: Sequence[Entry], tasks: Sequence[str]) -> Figure:
    """Draw the matrices of all entries, and below them their differences from the first."""
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
        # Red: worse than the first. Blue: better.
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


# ---- settings, environment, stages ---------------------------------------------------------------
def render_settings(comparison: Comparison) -> str:
    """Return the table of settings that differ."""
    rows = comparison.setting_rows()
    text = "All settings are the same."
    unknown = [group.name for group in comparison.groups if not group.settings]
    if unknown:
        text = f"The settings of {escape(', '.join(unknown))} are not known."
    elif rows:
        text = (
            "Settings that are the same in all runs are left out. "
            "So are seed and name, which are listed above, "
            "and storage, cluster and tracking, which change results at most in their rounding."
        )
    return f'<h2 id="settings">Settings that differ</h2><p>{text}</p>{_render_differing(rows)}'


def render_provenance(comparison: Comparison) -> str:
    """Return the table of commits, versions and devices that differ."""
    rows = comparison.provenance_rows()
    text = "All results were made with the same git commit, package versions and kind of device."
    unknown = [group.name for group in comparison.groups if not environment(group)]
    if unknown:
        text = f"The versions of {escape(', '.join(unknown))} are not known."
    elif rows:
        text = (
            "Commit, versions and devices that differ between the runs. "
            "They may explain a difference in the numbers."
        )
    return f'<h2 id="provenance">Environment</h2><p>{text}</p>{_render_differing(rows)}'


def _render_differing(rows: Sequence[Row]) -> str:
    """Return a table with one column per group; empty without rows."""
    if not rows:
        return ""
    titles = [title for title in rows[0] if title != "name"]
    body = []
    for row in rows:
        cells = [f"<code>{escape(row['name'])}</code>"]
        for title in titles:
            is_absent = row[title] == "absent"
            cells.append(NO_VALUE if is_absent else escape(row[title][:120]))
        body.append(cells)
    return render_table(["", *titles], body, len(titles) + 1, is_html=True)


def render_stages(comparison: Comparison) -> str:
    """Return the table of stage results that several runs use."""
    rows = comparison.stage_rows()
    keys = set()
    for run in comparison.runs:
        keys |= {stage["key"] for stage in run.record["stages"] if stage["step"] != "report"}
    if not rows:
        return (
            f'<h2 id="stages">Shared stages</h2><p>None of the {len(keys)} stage results is used '
            "by more than one of these runs.</p>"
        )
    body = []
    for row in rows:
        stage = f"<code>{escape(row['stage'])}</code>"
        body.append([stage, f"<code>{row['key'][:12]}</code>", escape(row["runs"])])
    details = "<details open>" if len(rows) <= 12 else "<details>"
    return (
        f'<h2 id="stages">Shared stages</h2><p>{len(rows)} of the {len(keys)} stage results are '
        "used by more than one of these runs. They were computed once, so they cannot explain a "
        f"difference between the runs.</p>{details}<summary>{len(rows)} stages</summary>"
        f"{render_table(['stage', 'key', 'runs'], body, 3, is_html=True)}</details>"
    )
