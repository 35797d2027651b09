"""Figures of a run as PNG bytes: one look, colours that colour-blind people can tell apart, no
global state."""

from __future__ import annotations

import io
import math
import threading
from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter, MaxNLocator, PercentFormatter
from numpy.typing import NDArray

from pipeline.results.tables import Matrix, Row

# Okabe and Ito's palette without yellow, which is too pale on white; marker and dash repeat what
# the colour says.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#333333")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
DASHES = ("-", "--", "-.", ":")
INK, FAINT, EMPTY = "#222222", "#9aa0a6", "#f1f3f4"
SEQUENTIAL = "YlGnBu"
DPI = 150
# matplotlib draws in one thread at a time; the record and the report draw in two
DRAWING = threading.Lock()


def to_png(figure: Figure) -> bytes:
    """The figure as PNG; the same figure always gives the same bytes."""
    FigureCanvasAgg(figure)
    sink = io.BytesIO()
    with DRAWING:
        figure.savefig(sink, format="png", dpi=DPI, facecolor="white", metadata={"Software": None})
    return sink.getvalue()


def new_figure(
    width: float, height: float, rows: int = 1, columns: int = 1, **options: Any
) -> tuple[Figure, list[Axes]]:
    """A figure (inches) and its axes, row by row."""
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, **options)
    return figure, list(axes.reshape(-1))


def style_axes(
    axes: Axes, title: str = "", x: str = "", y: str = "", grid: str | None = "y"
) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(FAINT)
    axes.tick_params(labelsize=8.5, colors=INK, length=2.5)
    axes.set_title(title, fontsize=10.5, loc="left", color=INK, fontweight="bold")
    axes.set_xlabel(x, fontsize=9, color=INK)
    axes.set_ylabel(y, fontsize=9, color=INK)
    if grid:
        axes.grid(axis=grid, color="#e3e5e8", linewidth=0.7)  # type: ignore[arg-type]
        axes.set_axisbelow(True)


def method_style(index: int) -> dict[str, Any]:
    """Colour, marker and dash of the index-th method."""
    return {
        "color": COLOURS[index % len(COLOURS)],
        "marker": MARKERS[index % len(MARKERS)],
        "linestyle": DASHES[index // len(COLOURS) % len(DASHES)],
    }


def task_colours(count: int) -> NDArray[np.float64]:
    """One colour per task, dark to light in stream order, (count, 4)."""
    return matplotlib.colormaps["viridis"](np.linspace(0, 0.85, count))


def text_size(cells: int) -> float:
    return 9.5 if cells <= 6 else 8.5 if cells <= 12 else 7.5


def label_tasks(axes: Axes, tasks: Sequence[str], which: str = "xy") -> None:
    size = 9 if len(tasks) <= 12 else 7.5
    short = [t if len(t) <= 18 else t[:16] + "…" for t in tasks]
    if "x" in which:
        long = len(tasks) > 6 or max(map(len, short)) > 9
        axes.set_xticks(
            range(len(tasks)),
            short,
            fontsize=size,
            rotation=40 if long else 0,
            ha="right" if long else "center",
            rotation_mode="anchor",
        )
    if "y" in which:
        axes.set_yticks(range(len(tasks)), short, fontsize=size)


def draw_cells(
    axes: Axes,
    values: NDArray[np.float64],
    cmap: str = SEQUENTIAL,
    low: float = 0.0,
    high: float = 1.0,
) -> Any:
    """A heat map on white gaps; NaN is left blank."""
    image = axes.imshow(
        np.ma.masked_invalid(values),
        cmap=cmap,
        vmin=low,
        vmax=high,
        aspect="equal",
        interpolation="nearest",
    )
    axes.spines[:].set_visible(False)
    axes.set_xticks(np.arange(-0.5, values.shape[1]), minor=True)
    axes.set_yticks(np.arange(-0.5, values.shape[0]), minor=True)
    axes.grid(which="minor", color="white", linewidth=1.5 if max(values.shape) <= 30 else 0)
    axes.tick_params(which="minor", length=0)
    return image


# ---- accuracy ------------------------------------------------------------------------------------
def draw_matrix(m: Matrix) -> Figure:
    """Rows: after learning a task. Columns: accuracy on a task. Bold: measured. Hatched: not
    finished."""
    count = max(len(m.tasks), 1)
    side = min(max(2.2, 0.62 * count), 9.5)
    figure, (axes,) = new_figure(side + 2.6, side + 1.2)
    image = draw_cells(axes, np.where(m.source == "ahead", np.nan, m.rates))
    size = text_size(count)
    for t, i in np.ndindex(m.source.shape):
        if m.source[t, i] == "missing":
            axes.add_patch(
                Rectangle(
                    (i - 0.47, t - 0.47),
                    0.94,
                    0.94,
                    facecolor="white",
                    edgecolor=FAINT,
                    hatch="////",
                    linewidth=0,
                )
            )
        elif m.source[t, i] == "ahead":
            axes.add_patch(
                Rectangle((i - 0.47, t - 0.47), 0.94, 0.94, facecolor=EMPTY, linewidth=0)
            )
        elif not math.isnan(m.rates[t, i]):
            text = f"{100 * m.rates[t, i]:.1f}" if count <= 12 else f"{100 * m.rates[t, i]:.0f}"
            axes.text(
                i,
                t,
                text,
                ha="center",
                va="center",
                fontsize=size,
                color="white" if m.rates[t, i] > 0.55 else INK,
                fontweight="bold" if m.source[t, i] == "measured" else "normal",
                alpha=1 if m.source[t, i] == "measured" else 0.8,
            )
    style_axes(axes, f"{m.label}: accuracy in %", "accuracy on task", "after learning", grid=None)
    axes.spines[:].set_visible(False)
    label_tasks(axes, m.tasks)
    bar = figure.colorbar(
        image, ax=axes, fraction=0.046, pad=0.02, format=PercentFormatter(1, decimals=0)
    )
    bar.outline.set_visible(False)
    bar.ax.tick_params(labelsize=8)
    return figure


def draw_averages(matrices: Sequence[Matrix]) -> Figure:
    """Average accuracy over the tasks so far, and forgetting, after each task, one line per
    method."""
    figure, (left, right) = new_figure(10.4, 3.7, 1, 2)
    tasks = max((m.tasks for m in matrices), key=len, default=())
    for axes, name, title in (
        (left, "average_accuracy", "Average accuracy so far"),
        (right, "forgetting", "Forgetting so far"),
    ):
        style_axes(axes, title, "after learning")
        for index, m in enumerate(matrices):
            values = [row[name] for row in m.over_time[: m.finished]]
            at = [tasks.index(t) if t in tasks else k for k, t in enumerate(m.tasks)][: m.finished]
            # Thinner and smaller from line to line, so that one that lies under another can still
            # be seen.
            axes.plot(
                at,
                values,
                label=m.label,
                linewidth=max(1.3, 3.2 - 0.5 * index),
                markersize=max(4.5, 8.5 - index),
                **method_style(index),
            )
        axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        axes.set_xlim(-0.25, max(len(tasks) - 0.75, 0.25))
        label_tasks(axes, tasks, "x")
    left.set_ylim(0, 1.02)
    top = max(
        [
            0.1,
            *(
                row["forgetting"]
                for m in matrices
                for row in m.over_time[: m.finished]
                if not math.isnan(row["forgetting"])
            ),
        ]
    )
    right.set_ylim(min(-0.01, right.get_ylim()[0]), 1.1 * top)
    _legend(figure, left, len(matrices))
    return figure


def _legend(figure: Figure, axes: Axes, count: int) -> None:
    handles, names = axes.get_legend_handles_labels()
    if count > 1:
        figure.legend(
            handles,
            names,
            loc="outside lower center",
            ncols=min(count, 6),
            fontsize=9,
            frameon=False,
        )


def draw_comparison(summary: Sequence[Row]) -> Figure:
    """Bars: methods side by side, best average accuracy on top."""
    rows = sorted(
        summary, key=lambda r: (not math.isnan(r["average_accuracy"]), r["average_accuracy"])
    )
    panels = (
        ("average_accuracy", "Average accuracy", "higher is better"),
        ("average_incremental_accuracy", "Average incremental accuracy", "higher is better"),
        ("forgetting", "Forgetting", "lower is better"),
    )
    figure, all_axes = new_figure(10.4, 1.1 + 0.38 * max(len(rows), 2), 1, 3, sharey=True)
    order = {r["label"]: i for i, r in enumerate(summary)}
    for axes, (name, title, hint) in zip(all_axes, panels, strict=True):
        style_axes(axes, title, hint, grid="x")
        values = [r[name] for r in rows]
        axes.barh(
            range(len(rows)),
            np.nan_to_num(values),
            height=0.62,
            color=[COLOURS[order[r["label"]] % len(COLOURS)] for r in rows],
        )
        for y, value in enumerate(values):
            text = "not finished" if math.isnan(value) else f"{100 * value:.1f}"
            axes.text(
                max(0 if math.isnan(value) else value, 0),
                y,
                f" {text}",
                va="center",
                fontsize=9,
                color=FAINT if math.isnan(value) else INK,
            )
        high = max([0.05, *(v for v in values if not math.isnan(v))])
        axes.set_xlim(min([0, *(v for v in values if not math.isnan(v))]), 1.18 * high)
        axes.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        axes.xaxis.set_major_locator(MaxNLocator(4))
        axes.set_yticks(range(len(rows)), [method_label(r) for r in rows], fontsize=9.5)
        axes.tick_params(axis="y", length=0)
    return figure


def method_label(row: Row) -> str:
    """The method, and how far it is where it is not finished: its numbers then do not compare with
    the others'."""
    return (
        row["label"]
        if row["tasks_finished"] == row["tasks"]
        else f"{row['label']}\n({row['tasks_finished']} of {row['tasks']} tasks)"
    )


def format_bytes(count: float | None) -> str:
    """1234567 -> `1.23 MB`; powers of 1000."""
    if count is None or math.isnan(count):
        return "-"
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 999.5 or unit == "GB":
            return (
                f"{count:.0f} {unit}" if unit == "B" or abs(count) >= 100 else f"{count:.3g} {unit}"
            )
        count /= 1000
    raise AssertionError


def draw_size_accuracy(summary: Sequence[Row]) -> Figure:
    """What is kept beside the backbone (log scale) against average accuracy, one point per
    method."""
    figure, (axes,) = new_figure(7.2, 4.2)
    style_axes(
        axes,
        "Size against accuracy",
        "bytes kept beside the shared backbone, all tasks (log scale)",
        "average accuracy",
        grid="both",
    )
    points = [
        (max(r["total_bytes"] * (1 - 1 / r["growth"]), 1), r["average_accuracy"], i, r["label"])
        for i, r in enumerate(summary)
        if r["growth"] and not math.isnan(r["average_accuracy"])
    ]
    axes.set_xscale("log")
    for x, y, index, label in points:
        axes.scatter(
            x,
            y,
            s=70,
            color=method_style(index)["color"],
            marker=method_style(index)["marker"],
            zorder=3,
            label=label,
        )
    if points:
        xs, ys = [p[0] for p in points], [p[1] for p in points]
        axes.set_xlim(min(xs) / 3, max(xs) * 6)
        spread = max(max(ys) - min(ys), 0.1)
        axes.set_ylim(max(min(ys) - 0.25 * spread, 0), min(max(ys) + 0.25 * spread, 1.02))
        _labels(axes, points)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda v, _: format_bytes(v)))
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    return figure


def _labels(axes: Axes, points: Sequence[tuple[float, float, int, str]]) -> None:
    """A name to the right of each point, moved up or down where it would touch a point or another
    name. Boxes are (left, right, bottom, top) in shares of the axes."""
    (left, right), (low, high) = np.log10(axes.get_xlim()), axes.get_ylim()
    at = [
        ((math.log10(x) - left) / (right - left), (y - low) / (high - low)) for x, y, _, _ in points
    ]
    taken = [(px - 0.014, px + 0.014, py - 0.02, py + 0.02) for px, py in at]
    for (px, py), (_, _, _, label) in zip(at, points, strict=True):
        for move in (0.0, 0.045, -0.045, 0.08, -0.08, 0.12, -0.12, 0.16, -0.16):
            box = (
                px + 0.02,
                px + 0.022 + 0.0115 * len(label),
                py + move - 0.022,
                py + move + 0.022,
            )
            if not any(
                box[0] < t[1] and t[0] < box[1] and box[2] < t[3] and t[2] < box[3] for t in taken
            ):
                break
        taken.append(box)
        axes.text(
            box[0],
            (box[2] + box[3]) / 2,
            label,
            fontsize=9,
            va="center",
            color=INK,
            transform=axes.transAxes,
        )


# ---- training ------------------------------------------------------------------------------------
FIXED = {"epoch", "seconds", "images", "lr", "loss", "val_correct", "val_total"}


def draw_curves(histories: Sequence[tuple[str, Sequence[Row]]], title: str = "") -> Figure | None:
    """Loss, validation accuracy and the method's own measures over epochs; `histories` are (task or
    step, rows) one after the other. None where there is nothing to draw."""
    histories = [(name, rows) for name, rows in histories if rows]
    if not histories:
        return None
    terms, measures = split_columns([row for _, rows in histories for row in rows])
    panels = [
        ("Loss", ["loss", *terms] if len(terms) > 1 else ["loss"]),
        ("Validation accuracy", ["val"]),
    ]
    if measures:
        panels.append((measures[0] if len(measures) == 1 else "Measures", measures))
    figure, axes = new_figure(10.4, 3.1, 1, len(panels))
    for ax, (name, wanted) in zip(axes, panels, strict=True):
        style_axes(ax, f"{title}: {name}" if title else name, "epoch")
        start, ends = 0, []
        for which, (task, rows) in enumerate(histories):
            epochs = np.arange(start, start + len(rows)) + 1
            for index, column in enumerate(wanted):
                values = [_value(row, column) for row in rows]
                ax.plot(
                    epochs,
                    values,
                    linewidth=1.8 if index == 0 else 1.2,
                    marker="." if len(rows) < 15 else None,
                    color=COLOURS[index % len(COLOURS)],
                    linestyle=DASHES[index % len(DASHES)],
                    label=column if which == 0 and len(wanted) > 1 else None,
                )
            start += len(rows)
            ends.append((start - len(rows) + 0.5, start + 0.5, task))
        mark_spans(ax, ends)
        ax.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        if wanted == ["val"]:
            ax.set_ylim(0, 1.02)
            ax.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        if len(wanted) > 1:
            ax.legend(
                fontsize=8,
                frameon=False,
                loc="upper center",
                bbox_to_anchor=(0.5, -0.2),
                ncols=min(len(wanted), 4),
            )
    return figure


def split_columns(rows: Sequence[Row]) -> tuple[list[str], list[str]]:
    """Which columns of a history are loss terms and which are the method's measures: measures stand
    after `images`, which the train loop writes behind the loss terms, or after `val_total`."""
    columns = list(dict.fromkeys(c for row in rows for c in row))
    if (
        "images" in columns
        and "loss" in columns
        and columns.index("images") > columns.index("loss")
    ):
        end = columns.index("images")
    else:
        end = columns.index("val_total") if "val_total" in columns else len(columns)
    return [c for c in columns[:end] if c not in FIXED], [
        c for c in columns[end:] if c not in FIXED
    ]


def _value(row: Row, column: str) -> float:
    if column == "val":
        total = row.get("val_total") or 0
        return row["val_correct"] / total if total else math.nan
    value = row.get(column)
    return math.nan if value is None else float(value)


def mark_spans(axes: Axes, parts: Sequence[tuple[float, float, str]]) -> None:
    """Grey bands that say which task the epochs, or the trials, belong to."""
    if len(parts) < 2:
        return
    for index, (left, right, task) in enumerate(parts):
        if index % 2:
            axes.axvspan(left, right, color=EMPTY, zorder=0, linewidth=0)
        axes.text(
            (left + right) / 2,
            0.99,
            task if len(parts) <= 6 else str(index),
            transform=axes.get_xaxis_transform(),
            fontsize=7.5,
            color="#5f6368",
            ha="center",
            va="top",
        )
    axes.set_xlim(parts[0][0], parts[-1][1])


def draw_confusion(
    counts: NDArray[np.int64],
    names: Sequence[str],
    title: str,
    answers: Sequence[str] | None = None,
    axes_say: tuple[str, str] = ("answer", "true class"),
) -> Figure:
    """Share of each true class (row) that was answered as each class (column). answers: names of
    the columns, where they are not those of the rows."""
    answers = names if answers is None else answers
    count = max(len(names), len(answers))
    side = min(max(2.6, 0.34 * count), 8.5)
    figure, (axes,) = new_figure(side + 2.2, side + 1.1)
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    image = draw_cells(axes, shares)
    if count <= 12:
        for t, p in zip(*np.nonzero(counts), strict=True):
            axes.text(
                p,
                t,
                str(counts[t, p]),
                ha="center",
                va="center",
                fontsize=text_size(count),
                color="white" if shares[t, p] > 0.55 else INK,
            )
    style_axes(axes, title, *axes_say, grid=None)
    axes.spines[:].set_visible(False)
    if count <= 40:
        long = count > 4 or max(map(len, answers)) > 12
        axes.set_xticks(
            range(len(answers)),
            answers,
            rotation=60 if long else 0,
            ha="right" if long else "center",
            rotation_mode="anchor",
        )
        axes.set_yticks(range(len(names)), names)
        axes.tick_params(labelsize=9 if count <= 20 else 7)
    bar = figure.colorbar(
        image, ax=axes, fraction=0.046, pad=0.02, format=PercentFormatter(1, decimals=0)
    )
    bar.outline.set_visible(False)
    bar.ax.tick_params(labelsize=8)
    return figure
