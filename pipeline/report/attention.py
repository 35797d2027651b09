"""Figures for `accrete analyse`: attention, heads and robustness.

A card describes a data set. Here it is the source of images: `shifted` robustness is the accuracy
on images of the same classes from another card.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from pipeline.report.files import Row
from pipeline.report.plots import (
    FAINT,
    INK,
    add_legend,
    list_handles,
    method_style,
    nested_line_style,
    new_figure,
    style_axes,
)

ROBUSTNESS_TITLES = {  # kind of measurement -> title of the panel, label of the x axis
    "occlusion": ("Occluded centre", "share of the image"),
    "fgsm": ("FGSM", "epsilon (1/255)"),
    "shifted": ("Images of another card", ""),
}


def draw_attention(rows: Sequence[Row]) -> Figure:
    """Draw entropy and distance of attention against the block, averaged over heads and images.

    The distance is the mean distance between a patch and the patches that it attends to, relative
    to uniform attention. If a row has a Context Broadcasting scale, a third panel shows the scale.
    Each method has a bold line, the mean over its tasks, and a faint line per task.

    Args:
        rows: Rows of `workers.analysis.attention_rows`, with the columns `name` (of the method) and
            `task`.
    """
    names = _list_row_names(rows)
    has_scale = any(row["scale"] is not None for row in rows)
    if has_scale:
        figure, axes = new_figure(10.4, 3.9, 1, 3)
    else:
        figure, axes = new_figure(8.6, 3.9, 1, 2)
    panels = (
        ("entropy", "Entropy of attention", "nats"),
        ("distance", "Distance of attention", "relative to uniform"),
        ("scale", "Context Broadcasting scale", "mean |Λ|"),
    )
    for ax, (value, title, y_label) in zip(axes, panels, strict=False):
        style_axes(ax, title, "block", y_label)
        measured_rows = [row for row in rows if row[value] is not None]
        _draw_lines(ax, names, measured_rows, "block", value)
        ax.xaxis.set_major_locator(MaxNLocator(12, integer=True))
    # Uniform attention to n tokens has entropy ln n. The line is at the largest n of all methods.
    max_tokens = max(row["tokens"] for row in rows)
    _mark_uniform(axes[0], float(np.log(max_tokens)))
    _mark_uniform(axes[1], 1.0)
    add_legend(figure, list_handles(axes[0]), columns=5)
    return figure


def _mark_uniform(axes: Axes, value: float) -> None:
    """Draw a dashed line at the value of uniform attention."""
    axes.axhline(value, color=FAINT, linewidth=1, linestyle="--")
    axes.text(
        1,
        value,
        "uniform ",
        transform=axes.get_yaxis_transform(),
        fontsize=8,
        color=INK,
        ha="right",
        va="bottom",
    )
    _, top = axes.get_ylim()
    axes.set_ylim(0, max(1.12 * value, top))


def draw_robustness(rows: Sequence[Row]) -> Figure:
    """Draw accuracy against occluded share of the image, FGSM strength, and source of the images.

    There is one panel per kind of measurement. Kinds without rows are omitted.

    Args:
        rows: Rows of `workers.analysis.measure_robustness` and `measure_shifted_accuracy`, with the
            columns `name` (of the method) and `task`.
    """
    names = _list_row_names(rows)
    measured_kinds = {row["kind"] for row in rows}
    kinds = [kind for kind in ROBUSTNESS_TITLES if kind in measured_kinds]
    figure, axes = new_figure(max(4.3 * len(kinds), 5.4), 3.9, 1, len(kinds))
    for ax, kind in zip(axes, kinds, strict=True):
        kind_rows = [row for row in rows if row["kind"] == kind]
        title, x_label = ROBUSTNESS_TITLES[kind]
        y_label = "accuracy" if ax is axes[0] else ""
        style_axes(ax, title, x_label, y_label)
        if kind == "shifted":
            _draw_bars(ax, names, kind_rows)
        else:
            _draw_lines(ax, names, kind_rows, "level", "accuracy")
        ax.set_ylim(0, 1.02)
        ax.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        if kind == "occlusion":
            ax.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    add_legend(figure, list_handles(axes[0]), columns=5)
    return figure


def describe_level(row: Row) -> str:
    """Return a label for the level of a robustness row.

    For `occlusion` and `fgsm` the label is a number. For `shifted` the label is the name of the
    other card, or `own (CARD)` for the comparison: the task's own images of the classes of CARD.
    """
    if row["kind"] != "shifted":
        return f"{row['level']:g}"
    if row["images"] == row["card"]:
        return str(row["images"])
    return f"own ({row['card']})"


def draw_heads(rows: Sequence[Row]) -> Figure:
    """Draw accuracy against the number of heads.

    Each method of a run is a point. Each family (methods with the same label and the same
    `backbone.context.kind`) has a line through its means.

    Args:
        rows: Rows of `pipeline.report.analyse.make_heads_rows`.
    """
    figure, (axes,) = new_figure(5.4, 3.9)
    style_axes(axes, "Accuracy against number of heads", "heads", "average accuracy")
    families = list(dict.fromkeys(row["family"] for row in rows))
    for index, family in enumerate(families):
        style = method_style(index)
        members = [row for row in rows if row["family"] == family]
        heads = [row["heads"] for row in members]
        accuracies = [row["accuracy"] for row in members]
        axes.scatter(heads, accuracies, s=14, color=style["color"], alpha=0.5, linewidths=0)
        xs, means = _compute_means(members, "heads", "accuracy")
        axes.plot(xs, means, label=family, linewidth=1.8, markersize=6, **style)
    axes.set_xticks(sorted({row["heads"] for row in rows}))
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=1))
    add_legend(figure, list_handles(axes), columns=5)
    return figure


def _draw_bars(axes: Axes, names: Sequence[str], rows: Sequence[Row]) -> None:
    """Draw one group of bars per set of images (see `describe_level`), with one bar per method."""
    levels = list(dict.fromkeys(map(describe_level, rows)))
    width = 0.8 / len(names)
    for index, name in enumerate(names):
        accuracies: dict[str, list[float]] = {}
        for row in rows:
            if row["name"] == name:
                accuracies.setdefault(describe_level(row), []).append(row["accuracy"])
        offset = (index - (len(names) - 1) / 2) * width
        xs = []
        heights = []
        for x, level in enumerate(levels):
            if level in accuracies:
                xs.append(x + offset)
                heights.append(float(np.mean(accuracies[level])))
        axes.bar(xs, heights, width=0.9 * width, color=method_style(index)["color"], label=name)
    axes.set_xticks(range(len(levels)), levels)


def _list_row_names(rows: Sequence[Row]) -> list[str]:
    """Return the distinct names of the rows, in order of appearance."""
    return list(dict.fromkeys(row["name"] for row in rows))


def _draw_lines(axes: Axes, names: Sequence[str], rows: Sequence[Row], x: str, value: str) -> None:
    """Draw the mean of the column `value` against the column `x`, for each method and its tasks.

    Args:
        axes: Axes to draw on.
        names: All methods, in the order of their colours.
        rows: Rows with the columns `name`, `task`, `x` and `value`.
        x: Column of the x axis.
        value: Column of the y axis.
    """
    for index, name in enumerate(names):
        style = nested_line_style(index)
        method_rows = [row for row in rows if row["name"] == name]
        rows_by_task: dict[str, list[Row]] = {}
        for row in method_rows:
            rows_by_task.setdefault(row["task"], []).append(row)
        if len(rows_by_task) > 1:
            for task_rows in rows_by_task.values():
                xs, means = _compute_means(task_rows, x, value)
                axes.plot(xs, means, color=style["color"], linewidth=0.8, alpha=0.3)
        xs, means = _compute_means(method_rows, x, value)
        axes.plot(xs, means, label=name, **style)


def _compute_means(rows: Sequence[Row], x: str, value: str) -> tuple[list[float], list[float]]:
    """Return the sorted distinct values of column `x`, and the mean of column `value` for each."""
    values: dict[float, list[float]] = {}
    for row in rows:
        values.setdefault(row[x], []).append(row[value])
    xs = sorted(values)
    return xs, [float(np.mean(values[position])) for position in xs]
