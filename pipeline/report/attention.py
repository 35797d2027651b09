"""Figures of attention, heads and robustness: one line per method, faint lines for its tasks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from pipeline.report.files import Row
from pipeline.report.plots import (
    FAINT,
    INK,
    method_style,
    nested_line_style,
    new_figure,
    style_axes,
)


def draw_attention(rows: Sequence[Row]) -> Figure:
    """Draw entropy and distance by block, means over heads and images, and scales of context."""
    names = _names(rows)
    has_scale = any(row["scale"] is not None for row in rows)
    width, columns = (10.4, 3) if has_scale else (8.6, 2)
    figure, axes = new_figure(width, 3.9, 1, columns)
    panels = (
        ("entropy", "Entropy of attention", "nats"),
        ("distance", "Distance of attention", "relative to uniform"),
        ("scale", "Scale of context", "mean |Λ|"),
    )
    for ax, (value, title, y) in zip(axes, panels, strict=False):
        style_axes(ax, title, "block", y)
        _lines(
            ax,
            names,
            [row for row in rows if row[value] is not None],
            lambda row: row["block"],
            value,
        )
        ax.xaxis.set_major_locator(MaxNLocator(12, integer=True))
    for ax, top in ((axes[0], float(np.log(max(row["tokens"] for row in rows)))), (axes[1], 1.0)):
        ax.axhline(top, color=FAINT, linewidth=1, linestyle="--")
        ax.text(
            1,
            top,
            "uniform ",
            transform=ax.get_yaxis_transform(),
            fontsize=8,
            color=INK,
            ha="right",
            va="bottom",
        )
        ax.set_ylim(0, max(1.12 * top, ax.get_ylim()[1]))
    _legend(figure, axes[0])
    return figure


def draw_robustness(rows: Sequence[Row]) -> Figure:
    """Draw accuracy by hidden share of the image, by strength of the attack, and on other cards.

    Kinds without rows are left out.
    """
    measured_kinds = {row["kind"] for row in rows}
    kinds = [kind for kind in ("occlusion", "fgsm", "shifted") if kind in measured_kinds]
    figure, axes = new_figure(max(4.3 * len(kinds), 5.4), 3.9, 1, len(kinds))
    for ax, kind in zip(axes, kinds, strict=True):
        kind_rows = [row for row in rows if row["kind"] == kind]
        title, x = {
            "occlusion": ("Hidden centre", "share of the image"),
            "fgsm": ("FGSM", "epsilon, in 255ths"),
            "shifted": ("Other images", ""),
        }[kind]
        style_axes(ax, title, x, "accuracy" if ax is axes[0] else "")
        if kind == "shifted":
            _bars(ax, _names(rows), kind_rows)
        else:
            _lines(ax, _names(rows), kind_rows, lambda row: row["level"], "accuracy")
        ax.set_ylim(0, 1.02)
        ax.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        if kind == "occlusion":
            ax.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    _legend(figure, axes[0])
    return figure


def level_text(row: Row) -> str:
    """Return the level of a robustness row in words: a strength, or the images of a card."""
    if row["kind"] != "shifted":
        return f"{row['level']:g}"
    if row["images"] == row["card"]:
        return str(row["images"])
    return f"own ({row['card']})"


def draw_heads(rows: Sequence[Row]) -> Figure:
    """Draw accuracy by number of heads: a point per run, a line through the means of a family."""
    figure, (axes,) = new_figure(5.4, 3.9)
    style_axes(axes, "Heads against accuracy", "heads", "average accuracy")
    families = list(dict.fromkeys(row["family"] for row in rows))
    for index, family in enumerate(families):
        style = method_style(index)
        members = [row for row in rows if row["family"] == family]
        axes.scatter(
            [row["heads"] for row in members],
            [row["accuracy"] for row in members],
            s=14,
            color=style["color"],
            alpha=0.5,
            linewidths=0,
        )
        axes.plot(
            *_means(members, lambda row: row["heads"], "accuracy"),
            label=family,
            linewidth=1.8,
            markersize=6,
            **style,
        )
    axes.set_xticks(sorted({row["heads"] for row in rows}))
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=1))
    _legend(figure, axes)
    return figure


def _bars(axes: Axes, names: Sequence[str], rows: Sequence[Row]) -> None:
    """Draw a group of bars per set of images, with one bar per method."""
    levels = list(dict.fromkeys(map(level_text, rows)))
    width = 0.8 / len(names)
    for index, name in enumerate(names):
        xs = []
        heights = []
        for x, level in enumerate(levels):
            members = [row for row in rows if row["name"] == name and level_text(row) == level]
            values = [row["accuracy"] for row in members]
            if values:
                xs.append(x + (index - (len(names) - 1) / 2) * width)
                heights.append(float(np.mean(values)))
        axes.bar(xs, heights, width=0.9 * width, color=method_style(index)["color"], label=name)
    axes.set_xticks(range(len(levels)), levels)


def _names(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row["name"] for row in rows))


def _lines(
    axes: Axes, names: Sequence[str], rows: Sequence[Row], x: Callable[[Row], float], value: str
) -> None:
    """Draw the mean of `value` by `x`; a name has the same colour in all panels."""
    for index, name in enumerate(names):
        style = nested_line_style(index)
        method_rows = [row for row in rows if row["name"] == name]
        tasks = list(dict.fromkeys(row["task"] for row in method_rows))
        if len(tasks) > 1:
            for task in tasks:
                task_rows = [row for row in method_rows if row["task"] == task]
                xs, means = _means(task_rows, x, value)
                axes.plot(xs, means, color=style["color"], linewidth=0.8, alpha=0.3)
        xs, means = _means(method_rows, x, value)
        axes.plot(xs, means, label=name, **style)


def _means(
    rows: Sequence[Row], x: Callable[[Row], float], value: str
) -> tuple[list[float], list[float]]:
    """Return the values of `x` in order, and the mean of `value` at each."""
    values: dict[float, list[float]] = {}
    for row in rows:
        values.setdefault(x(row), []).append(row[value])
    xs = sorted(values)
    return xs, [float(np.mean(values[position])) for position in xs]


def _legend(figure: Figure, axes: Axes) -> None:
    handles, names = axes.get_legend_handles_labels()
    figure.legend(
        handles,
        names,
        loc="outside lower center",
        ncols=min(len(names), 5),
        fontsize=9,
        frameon=False,
    )
