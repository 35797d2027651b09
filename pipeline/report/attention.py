"""Figures of attention, of heads and of robustness: one line per method of a run, faint ones for
its tasks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from pipeline.report.files import Row
from pipeline.report.plots import FAINT, INK, method_style, new_figure, style_axes


def draw_attention(rows: Sequence[Row]) -> Figure:
    """Per block, over heads and images: entropy, distance, and the scales of context where there
    are any."""
    scaled, names = any(row["scale"] is not None for row in rows), _names(rows)
    figure, axes = new_figure(10.4 if scaled else 8.6, 3.9, 1, 3 if scaled else 2)
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
    """Accuracy against the hidden share of the image, against the strength of the attack, and on
    images of other cards; what there is."""
    kinds = [
        kind
        for kind in ("occlusion", "fgsm", "shifted")
        if any(row["kind"] == kind for row in rows)
    ]
    figure, axes = new_figure(max(4.3 * len(kinds), 5.4), 3.9, 1, len(kinds))
    for ax, kind in zip(axes, kinds, strict=True):
        own = [row for row in rows if row["kind"] == kind]
        title, x = {
            "occlusion": ("Hidden centre", "share of the image"),
            "fgsm": ("FGSM", "epsilon, in 255ths"),
            "shifted": ("Other images", ""),
        }[kind]
        style_axes(ax, title, x, "accuracy" if ax is axes[0] else "")
        if kind == "shifted":
            _bars(ax, _names(rows), own)
        else:
            _lines(ax, _names(rows), own, lambda row: row["level"], "accuracy")
        ax.set_ylim(0, 1.02)
        ax.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        if kind == "occlusion":
            ax.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    _legend(figure, axes[0])
    return figure


def level_text(row: Row) -> str:
    """What a row of robustness was measured at, in words."""
    if row["kind"] != "shifted":
        return f"{row['level']:g}"
    return row["images"] if row["images"] == row["card"] else f"own ({row['card']})"


def draw_heads(rows: Sequence[Row]) -> Figure:
    """Accuracy against the number of heads: a point for each run, a line through the means of a
    family."""
    figure, (axes,) = new_figure(5.4, 3.9)
    style_axes(axes, "Heads against accuracy", "heads", "average accuracy")
    families = list(dict.fromkeys(row["family"] for row in rows))
    for index, family in enumerate(families):
        own, style = [row for row in rows if row["family"] == family], method_style(index)
        axes.scatter(
            [row["heads"] for row in own],
            [row["accuracy"] for row in own],
            s=14,
            color=style["color"],
            alpha=0.5,
            linewidths=0,
        )
        axes.plot(
            *_means(own, lambda row: row["heads"], "accuracy"),
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
    """A group for each set of images, in it a bar for each method."""
    places = list(dict.fromkeys(map(level_text, rows)))
    wide = 0.8 / len(names)
    for index, name in enumerate(names):
        own = [
            [row["accuracy"] for row in rows if row["name"] == name and level_text(row) == place]
            for place in places
        ]
        at = [
            place + (index - (len(names) - 1) / 2) * wide
            for place, found in enumerate(own)
            if found
        ]
        axes.bar(
            at,
            [float(np.mean(found)) for found in own if found],
            width=0.9 * wide,
            color=method_style(index)["color"],
            label=name,
        )
    axes.set_xticks(range(len(places)), places)


def _names(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row["name"] for row in rows))


def _lines(
    axes: Axes, names: Sequence[str], rows: Sequence[Row], x: Callable[[Row], float], value: str
) -> None:
    """A name has the same colour in all panels, also where some have nothing to show."""
    for index, name in enumerate(names):
        own, style = [row for row in rows if row["name"] == name], method_style(index)
        tasks = list(dict.fromkeys(row["task"] for row in own))
        for task in tasks if len(tasks) > 1 else ():
            axes.plot(
                *_means([row for row in own if row["task"] == task], x, value),
                color=style["color"],
                linewidth=0.8,
                alpha=0.3,
            )
        # Thinner from line to line, so that one that lies under another can still be seen.
        axes.plot(
            *_means(own, x, value),
            label=name,
            linewidth=max(1.3, 3.2 - 0.5 * index),
            markersize=max(4.5, 8.5 - index),
            **style,
        )


def _means(
    rows: Sequence[Row], x: Callable[[Row], float], value: str
) -> tuple[list[float], list[float]]:
    """The mean value at each place."""
    places = sorted({x(row) for row in rows})
    return places, [
        float(np.mean([row[value] for row in rows if x(row) == place])) for place in places
    ]


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
