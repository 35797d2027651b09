"""Figures of accuracies, sizes and training, and the common style of all figures.

The colours suit colour-blind readers. Figures do not use the global state of pyplot.
"""

from __future__ import annotations

import io
import math
import threading
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.patheffects import withStroke
from matplotlib.ticker import FuncFormatter, MaxNLocator, PercentFormatter
from numpy.typing import NDArray

from pipeline.config.text import format_bytes
from pipeline.results.metrics import metrics_for
from pipeline.results.tables import Matrix, Row

# Palette of Okabe and Ito without yellow, which is too pale on white. Markers and dashes carry the
# same information as the colours.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#333333")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
DASHES = ("-", "--", "-.", ":")
INK = "#222222"
FAINT = "#9aa0a6"
EMPTY = "#f1f3f4"
SEQUENTIAL = "YlGnBu"
DPI = 150
MAX_SLANTED = 12  # maximum number of horizontal or slanted x labels; more labels are vertical
MAX_SPANS = 12  # maximum number of labels of `mark_spans`; of more spans, every n-th has one
MAX_GAPS = 30  # maximum rows and columns of a heat map with gaps between cells
MAX_MARKERS = 12  # per line
MAX_DOTTED = 60  # maximum number of epochs for which curves have a dot per epoch
LETTER_INCHES = 0.065  # approximate width of a letter at 7.5 points
# Lock around drawing: matplotlib is not thread-safe, and MLflow recording and the report draw in
# separate threads.
DRAWING = threading.Lock()


def to_png(figure: Figure) -> bytes:
    """Return the figure as PNG. Equal figures give equal bytes.

    `Figure.savefig` is not used because it would draw the figure twice, once for the layout.
    """
    canvas: Any = FigureCanvasAgg(figure)
    sink = io.BytesIO()
    with DRAWING:
        figure.set_dpi(DPI)
        figure.set_facecolor("white")
        layout = figure.get_layout_engine()
        if layout is not None:
            layout.execute(figure)
            figure.set_layout_engine("none")
        canvas.print_png(sink, metadata={"Software": None})
    return sink.getvalue()


def to_vector(figure: Figure, kind: str) -> bytes:
    """Return the figure as `pdf` or `svg`. Equal figures give equal bytes.

    Text is stored with embedded TrueType fonts in PDF, and as outlines in SVG.
    """
    FigureCanvasAgg(figure)
    sink = io.BytesIO()
    metadata = {"Date": None} if kind == "svg" else {"CreationDate": None}
    with DRAWING, matplotlib.rc_context({"pdf.fonttype": 42, "svg.hashsalt": "accrete"}):
        figure.savefig(sink, format=kind, metadata=metadata)
    return sink.getvalue()


def new_figure(
    width: float, height: float, rows: int = 1, columns: int = 1, **options: Any
) -> tuple[Figure, list[Axes]]:
    """Create a figure of `width` x `height` inches. Return it with its axes, row by row."""
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, **options)
    return figure, list(axes.reshape(-1))


def style_axes(
    axes: Axes, title: str = "", x: str = "", y: str = "", grid: str | None = "y"
) -> None:
    """Apply the common style.

    Args:
        axes: The axes.
        title: Title of the axes.
        x: Label of the x axis.
        y: Label of the y axis.
        grid: `x`, `y`, `both` or None for no grid lines.
    """
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
    """Return colour, marker and dashes of the index-th method."""
    return {
        "color": COLOURS[index % len(COLOURS)],
        "marker": MARKERS[index % len(MARKERS)],
        "linestyle": DASHES[index // len(COLOURS) % len(DASHES)],
    }


def task_colours(count: int) -> NDArray[np.float64]:
    """Return one RGBA colour per task, from dark to light in stream order, (count, 4)."""
    return matplotlib.colormaps["viridis"](np.linspace(0, 0.85, count))


def text_size(cells: int) -> float:
    """Return the font size, in points, of numbers in a heat map with `cells` rows."""
    if cells <= 6:
        return 9.5
    if cells <= 12:
        return 8.5
    return 7.5


def label_tasks(
    axes: Axes, tasks: Sequence[str], which: str = "xy", facts: Sequence[str] = ()
) -> None:
    """Label ticks with task names. If there is not enough space, only every n-th task is named.

    Args:
        axes: The axes.
        tasks: Names of the tasks, one per tick.
        which: Axes to label: `x`, `y` or `xy`.
        facts: Text below each name, or after it if there are many tasks; empty for no texts.
    """
    is_short = len(tasks) <= MAX_SLANTED
    size = 9 if is_short else 7.5
    names = list(map(_short_task, tasks))
    if facts:
        separator = "\n" if is_short else ", "
        names = [f"{name}{separator}{fact}" for name, fact in zip(names, facts, strict=True)]
    if "x" in which:
        lines = "\n".join(names).split("\n")
        angle = 0
        if not is_short:
            angle = 90
        elif len(tasks) > 6 or max(map(len, lines), default=0) > 9:
            angle = 40
        rotate_x_ticks(axes, names, angle, fontsize=size)
    if "y" in which:
        positions = labelled_positions(len(tasks), measure_room(axes).height, size)
        axes.set_yticks(positions, [names[i] for i in positions], fontsize=size)


def _short_task(task: str) -> str:
    if len(task) <= 18:
        return task
    return f"{task[:16]}…"


class Room(NamedTuple):
    """Width and height of axes in inches."""

    width: float
    height: float


def measure_room(axes: Axes) -> Room:
    """Return the approximate size of axes, before the layout reserves space for labels."""
    position = axes.get_position()
    width, height = axes.get_figure(root=True).get_size_inches()  # type: ignore[union-attr]
    return Room(position.width * width, position.height * height)


def labelled_positions(count: int, inches: float, size: float) -> list[int]:
    """Return the positions of the ticks that have space for a label of one line.

    The first tick always has a label.

    Args:
        count: Number of ticks.
        inches: Length of the axis.
        size: Font size in points.
    """
    line_height = 1.2 * size / 72
    step = max(1, math.ceil(count * line_height / inches))
    return list(range(0, count, step))


def rotate_x_ticks(axes: Axes, names: Sequence[str], angle: float, **style: Any) -> None:
    """Label the ticks of the x axis with `names`, rotated by `angle` degrees.

    Rotated labels end at their tick. Vertical labels (90 degrees) need `fontsize` in `style`. Those
    that would overlap are omitted.
    """
    style = {"rotation": angle, "rotation_mode": "anchor", "ha": "right", **style}
    positions = list(range(len(names)))
    if angle == 0:
        style["ha"] = "center"
    elif angle == 90:
        style["va"] = "center"
        positions = labelled_positions(len(names), measure_room(axes).width, style["fontsize"])
    axes.set_xticks(positions, [names[i] for i in positions], **style)


def draw_cells(
    axes: Axes,
    values: NDArray[np.float64],
    cmap: str = SEQUENTIAL,
    low: float = 0.0,
    high: float = 1.0,
) -> Any:
    """Draw a heat map and return its image. NaN cells are blank.

    Up to MAX_GAPS rows and columns, there are white gaps between cells.
    """
    image = axes.imshow(
        np.ma.masked_invalid(values),
        cmap=cmap,
        vmin=low,
        vmax=high,
        aspect="equal",
        interpolation="nearest",
    )
    axes.spines[:].set_visible(False)
    rows, columns = values.shape
    if max(rows, columns) <= MAX_GAPS:
        axes.set_xticks(np.arange(-0.5, columns), minor=True)
        axes.set_yticks(np.arange(-0.5, rows), minor=True)
        axes.grid(which="minor", color="white", linewidth=1.5)
        axes.tick_params(which="minor", length=0)
    return image


def add_share_bar(figure: Figure, image: Any, axes: Axes) -> None:
    """Add the colour bar of a heat map of shares."""
    percent = PercentFormatter(1, decimals=0)
    bar = figure.colorbar(image, ax=axes, fraction=0.046, pad=0.02, format=percent)
    bar.outline.set_visible(False)
    bar.ax.tick_params(labelsize=8)


def write_in_cell(
    axes: Axes, row: int, column: int, text: str, is_dark: bool, **style: Any
) -> None:
    """Write text into a cell of a heat map: white if the cell is dark, else in the colour INK."""
    color = "white" if is_dark else INK
    text_of_cell = axes.text(column, row, text, ha="center", va="center", color=color, **style)
    # The text is inside the axes. Including thousands of texts in the layout would take seconds.
    text_of_cell.set_in_layout(False)


# ---- accuracy ------------------------------------------------------------------------------------
def draw_matrix(matrix: Matrix) -> Figure:
    """Draw an accuracy matrix. Bold numbers were measured, hatched cells are not finished."""
    count = max(len(matrix.tasks), 1)
    side = min(max(2.2, 0.62 * count), 9.5)
    figure, (axes,) = new_figure(side + 2.6, side + 1.2)
    image = draw_cells(axes, np.where(matrix.source == "ahead", np.nan, matrix.rates))
    image.set_cmap(image.cmap.with_extremes(bad=EMPTY))
    for t, i in zip(*np.nonzero(matrix.source != "ahead"), strict=True):
        _fill_matrix_cell(axes, matrix, t, i)
    title = f"{matrix.label}: accuracy in %"
    style_axes(axes, title, "accuracy on task", "after learning", grid=None)
    axes.spines[:].set_visible(False)
    label_tasks(axes, matrix.tasks, "y")
    label_tasks(axes, matrix.tasks, "x", _test_facts(matrix))
    add_share_bar(figure, image, axes)
    return figure


def _test_facts(matrix: Matrix) -> list[str]:
    """Return a text per task with its chance level in per cent and its number of test images."""
    facts = []
    last_chance = matrix.chance[-1] if matrix.chance.size else np.full(len(matrix.tasks), np.nan)
    for chance, images in zip(last_chance, matrix.test_images, strict=True):
        level = "" if math.isnan(chance) else f"chance {100 * chance:.3g}"
        count = "" if images is None else f"n {images}"
        facts.append(", ".join(filter(None, (level, count))))
    return facts


def _fill_matrix_cell(axes: Axes, matrix: Matrix, t: int, i: int) -> None:
    """Write an accuracy into a cell, or hatch the cell if the accuracy is missing."""
    source = matrix.source[t, i]
    rate = float(matrix.rates[t, i])
    if math.isnan(rate):
        style: dict[str, Any] = {"facecolor": "white", "edgecolor": FAINT}
        if source == "missing":
            style["hatch"] = "////"
        axes.add_patch(Rectangle((i - 0.5, t - 0.5), 1, 1, linewidth=0, **style))
    else:
        style = {"fontweight": "bold", "alpha": 1.0}
        if source != "measured":
            style = {"fontweight": "normal", "alpha": 0.8}
        count = len(matrix.tasks)
        decimals = 1 if count <= 12 else 0
        text = f"{100 * rate:.{decimals}f}"
        write_in_cell(axes, t, i, text, rate > 0.55, fontsize=text_size(count), **style)


def draw_averages(matrices: Sequence[Matrix]) -> Figure:
    """Draw average accuracy and forgetting so far after each task, one line per method."""
    figure, (left, right) = new_figure(10.4, 3.7, 1, 2)
    tasks = max((matrix.tasks for matrix in matrices), key=len, default=())
    panels = (
        (left, "average_accuracy", "Average accuracy so far"),
        (right, "forgetting", "Forgetting so far"),
    )
    for axes, metric, title in panels:
        style_axes(axes, title, "after learning")
        for index, matrix in enumerate(matrices):
            values = [row[metric] for row in matrix.over_time[: matrix.finished]]
            positions = []
            for position, task in enumerate(matrix.tasks[: matrix.finished]):
                # Some methods are not evaluated on the base task (on which the backbone was
                # trained), so the position of a task can differ between methods.
                if task in tasks:
                    position = tasks.index(task)
                positions.append(position)
            style = nested_line_style(index)
            style["markevery"] = marker_step(len(positions))
            axes.plot(positions, values, label=matrix.label, **style)
        if metric == "average_accuracy":
            _draw_chance(axes, matrices)
        axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        axes.set_xlim(-0.25, max(len(tasks) - 0.75, 0.25))
        label_tasks(axes, tasks, "x")
    left.set_ylim(0, 1.02)
    highest = 0.1
    for matrix in matrices:
        for row in matrix.over_time[: matrix.finished]:
            if row["forgetting"] > highest:  # False for NaN
                highest = row["forgetting"]
    right.set_ylim(min(-0.01, right.get_ylim()[0]), 1.1 * highest)
    if len(matrices) > 1:
        add_legend(figure, list_handles(left))
    return figure


def _draw_chance(axes: Axes, matrices: Sequence[Matrix]) -> None:
    """Draw the average chance level so far, for the method with the most tasks."""
    longest = max(matrices, key=lambda matrix: len(matrix.tasks), default=None)
    if longest is None or not longest.chance.size:
        return
    chance = longest.chance_so_far
    positions = [-0.25, *range(len(chance))]
    levels = [chance[0], *chance]
    axes.plot(positions, levels, color=FAINT, linestyle=":", linewidth=1.8, zorder=1)
    axes.text(-0.24, chance[0] + 0.012, "chance", color="#5f6368", fontsize=8.5)


def marker_step(count: int) -> int:
    """Return the step between the points with markers, for a line of `count` points."""
    return max(1, math.ceil(count / MAX_MARKERS))


def nested_line_style(index: int) -> dict[str, Any]:
    """Return the style of the index-th line.

    Each line is thinner than the line before, so that both are visible where they coincide.
    """
    style = method_style(index)
    style["linewidth"] = max(1.3, 3.2 - 0.5 * index)
    style["markersize"] = max(4.5, 8.5 - index)
    return style


def add_legend(
    figure: Figure,
    handles: Sequence[Any],
    columns: int = 6,
    fontsize: float = 9,
    above: bool = False,
) -> None:
    """Add a legend below the figure, or above it if `above`. Without handles, add nothing."""
    side: Literal["outside upper center", "outside lower center"] = "outside lower center"
    if above:
        side = "outside upper center"
    if handles:
        figure.legend(
            handles=list(handles),
            loc=side,
            ncols=min(len(handles), columns),
            fontsize=fontsize,
            frameon=False,
        )


def list_handles(axes: Axes) -> list[Any]:
    """Return the labelled artists of axes, for a legend."""
    return list(axes.get_legend_handles_labels()[0])


def draw_comparison(summary: Sequence[Row]) -> Figure:
    """Draw final metrics as bars, with the method with the best average accuracy on top."""

    def accuracy_rank(row: Row) -> tuple[bool, float]:
        accuracy = row["average_accuracy"]
        return not math.isnan(accuracy), accuracy

    rows = sorted(summary, key=accuracy_rank)
    labels = [row["label"] for row in summary]
    colours = [COLOURS[labels.index(row["label"]) % len(COLOURS)] for row in rows]
    panels = metrics_for("bars")
    figure, all_axes = new_figure(10.4, 1.1 + 0.38 * max(len(rows), 2), 1, len(panels), sharey=True)
    for axes, metric in zip(all_axes, panels, strict=True):
        hint = "lower is better" if metric.better is min else "higher is better"
        if metric.name == "average_accuracy" and _chance_levels(rows):
            hint += "; dotted: chance"
        style_axes(axes, metric.title.capitalize(), hint, grid="x")
        values = [row[metric.name] for row in rows]
        axes.barh(range(len(rows)), np.nan_to_num(values), height=0.62, color=colours)
        for y, value in enumerate(values):
            _write_bar_value(axes, y, value)
        if metric.name == "average_accuracy":
            for level in sorted(_chance_levels(rows)):
                axes.axvline(level, color=FAINT, linestyle=":", linewidth=1.8)
        finished = [value for value in values if not math.isnan(value)]
        axes.set_xlim(min([0, *finished]), 1.18 * max([0.05, *finished]))
        axes.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        axes.xaxis.set_major_locator(MaxNLocator(4))
        axes.set_yticks(range(len(rows)), list(map(method_label, rows)), fontsize=9.5)
        axes.tick_params(axis="y", length=0)
    return figure


def _chance_levels(rows: Sequence[Row]) -> set[float]:
    """Return the distinct chance levels of the methods. They depend on the finished tasks."""
    return {row["chance"] for row in rows if not math.isnan(row.get("chance", math.nan))}


def _write_bar_value(axes: Axes, y: int, value: float) -> None:
    """Write a share in per cent to the right of the bar."""
    style: dict[str, Any] = {"va": "center", "fontsize": 9}
    style["path_effects"] = [withStroke(linewidth=2.5, foreground="white")]
    if math.isnan(value):
        axes.text(0, y, " not finished", color=FAINT, **style)
    else:
        axes.text(max(value, 0), y, f" {100 * value:.1f}", color=INK, **style)


def method_label(row: Row) -> str:
    """Return the label of a method, with its progress if it has not finished all tasks."""
    label: str = row["label"]
    if row["tasks_finished"] == row["tasks"]:
        return label
    return f"{label}\n({row['tasks_finished']} of {row['tasks']} tasks)"


class LabelledPoint(NamedTuple):
    """A labelled point in a scatter plot, for one method."""

    x: float
    y: float
    method_index: int
    label: str


def draw_size_accuracy(summary: Sequence[Row]) -> Figure:
    """Draw average accuracy against the bytes stored besides the backbone, for each method."""
    figure, (axes,) = new_figure(7.2, 4.2)
    style_axes(
        axes,
        "Size against accuracy",
        "bytes stored besides the shared backbone, all tasks (log scale)",
        "average accuracy",
        grid="both",
    )
    points = []
    for index, row in enumerate(summary):
        if row["growth"] and not math.isnan(row["average_accuracy"]):
            # total bytes without the backbone, because growth = total / backbone
            added_bytes = max(row["total_bytes"] * (1 - 1 / row["growth"]), 1)
            points.append(LabelledPoint(added_bytes, row["average_accuracy"], index, row["label"]))
    axes.set_xscale("log")
    for point in points:
        style = method_style(point.method_index)
        axes.scatter(
            point.x,
            point.y,
            s=70,
            color=style["color"],
            marker=style["marker"],
            zorder=3,
            label=point.label,
        )
    if points:
        xs = [point.x for point in points]
        ys = [point.y for point in points]
        axes.set_xlim(min(xs) / 3, max(xs) * 6)
        margin = 0.25 * max(max(ys) - min(ys), 0.1)
        axes.set_ylim(max(min(ys) - margin, 0), min(max(ys) + margin, 1.02))
        _label_points(axes, points)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: format_bytes(value)))
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    return figure


class AxesBox(NamedTuple):
    """A rectangle in axes coordinates, from 0 to 1."""

    left: float
    right: float
    bottom: float
    top: float

    def overlaps(self, other: AxesBox) -> bool:
        """Return whether the interiors of the rectangles intersect."""
        overlaps_in_x = self.left < other.right and other.left < self.right
        return overlaps_in_x and self.bottom < other.top and other.bottom < self.top


def _label_points(axes: Axes, points: Sequence[LabelledPoint]) -> None:
    """Write a name to the right of each point, the highest point first.

    A name that would cover a point or another name is moved up or down, and is joined to its point
    by a line.
    """
    left, right = np.log10(axes.get_xlim())
    low, high = axes.get_ylim()
    highest_first = sorted(points, key=lambda point: -point.y)
    positions = []
    for point in highest_first:
        x = (math.log10(point.x) - left) / (right - left)
        positions.append((x, (point.y - low) / (high - low)))
    taken = [AxesBox(x - 0.014, x + 0.014, y - 0.02, y + 0.02) for x, y in positions]
    for (x, y), point in zip(positions, highest_first, strict=True):
        box = _free_box(x, y, point.label, taken)
        taken.append(box)
        middle = (box.bottom + box.top) / 2
        if abs(middle - y) > 1e-9:
            line_style: dict[str, Any] = {"color": FAINT, "linewidth": 0.8, "zorder": 2}
            axes.plot([x, box.left - 0.003], [y, middle], transform=axes.transAxes, **line_style)
        text_style: dict[str, Any] = {"fontsize": 9, "va": "center", "color": INK}
        axes.text(box.left, middle, point.label, transform=axes.transAxes, **text_style)


def _free_box(x: float, y: float, label: str, taken: Sequence[AxesBox]) -> AxesBox:
    """Return the nearest free rectangle for the label of a point at (x, y) in axes coordinates.

    If no rectangle is free, return the one at the height of the point.
    """
    width = 0.0115 * len(label)  # approximate
    candidates = [AxesBox(x + 0.02, x + 0.022 + width, y - 0.022, y + 0.022)]
    for distance in range(1, 12):
        for shift in (-0.045 * distance, 0.045 * distance):
            bottom = y + shift - 0.022
            candidates.append(AxesBox(x + 0.05, x + 0.052 + width, bottom, bottom + 0.044))
    for box in candidates:
        is_inside = box.bottom >= 0 and box.top <= 1
        if is_inside and not any(box.overlaps(other) for other in taken):
            return box
    return candidates[0]


# ---- training ------------------------------------------------------------------------------------
# columns that all methods share; the other columns are loss terms and metrics of the method
FIXED_COLUMNS = {"epoch", "seconds", "images", "lr", "loss", "val_correct", "val_total"}
History = Sequence[tuple[str, Sequence[Row]]]  # (name of the stage, rows of the epochs), in order


def draw_training_curves(histories: History, title: str = "") -> Figure | None:
    """Draw loss, validation accuracy and the method's metrics over epochs.

    Return None without epochs.
    """
    histories = [(name, rows) for name, rows in histories if rows]
    if not histories:
        return None
    all_rows: list[Row] = []
    for _, rows in histories:
        all_rows += rows
    loss_terms, metrics = split_history_columns(all_rows)
    loss_columns = ["loss", *loss_terms] if len(loss_terms) > 1 else ["loss"]
    panels = [("Loss", loss_columns), ("Validation accuracy", ["val"])]
    if len(metrics) == 1:
        panels.append((metrics[0], metrics))
    elif metrics:
        panels.append(("Measures", metrics))
    figure, all_axes = new_figure(10.4, 3.1, 1, len(panels))
    for axes, (name, columns) in zip(all_axes, panels, strict=True):
        panel_title = f"{title}: {name}" if title else name
        style_axes(axes, panel_title, "epoch")
        _plot_columns(axes, histories, columns)
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        if columns == ["val"]:
            axes.set_ylim(0, 1.02)
            axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        if len(columns) > 1:
            axes.legend(
                fontsize=8,
                frameon=False,
                loc="upper center",
                bbox_to_anchor=(0.5, -0.2),
                ncols=min(len(columns), 4),
            )
    return figure


def _plot_columns(axes: Axes, histories: History, columns: Sequence[str]) -> None:
    """Plot columns over the epochs of all histories, and mark the span of each history."""
    start = 0
    bands = []
    has_legend = len(columns) > 1
    num_epochs = sum(len(rows) for _, rows in histories)
    marker = "." if num_epochs <= MAX_DOTTED else None
    for name, rows in histories:
        epochs = np.arange(start, start + len(rows)) + 1
        is_labelled = has_legend and start == 0
        for index, column in enumerate(columns):
            values = [_history_value(row, column) for row in rows]
            style: dict[str, Any] = {"linewidth": 1.2, "marker": marker}
            if index == 0:
                style["linewidth"] = 1.8
            if is_labelled:
                style["label"] = column
            style["color"] = COLOURS[index % len(COLOURS)]
            style["linestyle"] = DASHES[index % len(DASHES)]
            axes.plot(epochs, values, **style)
        bands.append((start + 0.5, start + len(rows) + 0.5, name))
        start += len(rows)
    mark_spans(axes, bands)


def split_history_columns(rows: Sequence[Row]) -> tuple[list[str], list[str]]:
    """Split the columns of a history into loss terms and metrics of the method.

    Metrics are the columns after `images`, which the train loop writes after the loss terms. If
    `images` is not after the loss, metrics are the columns after `val_total`.
    """
    distinct: dict[str, None] = {}
    for row in rows:
        distinct |= dict.fromkeys(row)
    columns = list(distinct)
    end = len(columns)
    if "val_total" in columns:
        end = columns.index("val_total")
    if "images" in columns and "loss" in columns:
        images = columns.index("images")
        if images > columns.index("loss"):
            end = images
    loss_terms = [name for name in columns[:end] if name not in FIXED_COLUMNS]
    metrics = [name for name in columns[end:] if name not in FIXED_COLUMNS]
    return loss_terms, metrics


def _history_value(row: Row, column: str) -> float:
    """Return a value of an epoch; NaN if it is missing. The column `val` is validation accuracy."""
    if column == "val":
        total = row.get("val_total")
        if not total:
            return math.nan
        accuracy: float = row["val_correct"] / total
        return accuracy
    value = row.get(column)
    if value is None:
        return math.nan
    return float(value)


def mark_spans(axes: Axes, spans: Sequence[tuple[float, float, str]]) -> None:
    """Mark the spans of epochs or trials of each task by titles, and every second span in grey.

    The titles are the names of the tasks, or their positions if the names do not fit. A single
    span is not marked.

    Args:
        axes: The axes.
        spans: Triples of left end, right end and task.
    """
    if len(spans) < 2:
        return
    letters = sum(len(task) + 1 for _, _, task in spans)
    has_names = len(spans) <= 6 and letters * LETTER_INCHES < measure_room(axes).width
    step = math.ceil(len(spans) / MAX_SPANS)
    for index, (left, right, task) in enumerate(spans):
        if index % 2:
            axes.axvspan(left, right, color=EMPTY, zorder=0, linewidth=0)
        if index % step:
            continue
        text = task if has_names else str(index)
        axes.text(
            (left + right) / 2,
            0.99,
            text,
            transform=axes.get_xaxis_transform(),
            fontsize=7.5,
            color="#5f6368",
            ha="center",
            va="top",
        )
    axes.set_xlim(spans[0][0], spans[-1][1])


def draw_confusion(
    counts: NDArray[np.int64],
    names: Sequence[str],
    title: str,
    columns: Sequence[str] | None = None,
    axis_titles: tuple[str, str] = ("prediction", "true class"),
) -> Figure:
    """Draw a confusion matrix: the share of each true class that was predicted as each class.

    Args:
        counts: Number of images, (true classes, predicted classes).
        names: Names of the rows.
        title: Title of the figure.
        columns: Names of the columns; None if they equal the names of the rows.
        axis_titles: Titles of the x and the y axis.
    """
    columns = names if columns is None else columns
    size = max(len(names), len(columns))
    side = min(max(2.6, 0.34 * size), 8.5)
    figure, (axes,) = new_figure(side + 2.2, side + 1.1)
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    image = draw_cells(axes, shares)
    if size <= 12:
        for row, column in zip(*np.nonzero(counts), strict=True):
            is_dark = bool(shares[row, column] > 0.55)
            number = str(counts[row, column])
            write_in_cell(axes, row, column, number, is_dark, fontsize=text_size(size))
    style_axes(axes, title, *axis_titles, grid=None)
    axes.spines[:].set_visible(False)
    if size <= 40:
        is_long = size > 4 or max(map(len, columns)) > 12
        angle = 60 if is_long else 0
        rotate_x_ticks(axes, columns, angle)
        axes.set_yticks(range(len(names)), names)
        label_size = 9 if size <= 20 else 7
        axes.tick_params(labelsize=label_size)
    add_share_bar(figure, image, axes)
    return figure
