"""Figures of masks and learned tokens: over test images, per layer, and across tasks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter
from numpy.typing import NDArray

from pipeline.report.plots import (
    COLOURS,
    FAINT,
    INK,
    SEQUENTIAL,
    add_legend,
    draw_cells,
    label_tasks,
    labelled_positions,
    list_handles,
    measure_room,
    new_figure,
    style_axes,
    task_colours,
    text_size,
    write_in_cell,
)
from pipeline.results.masks import (
    MaskView,
    capacity,
    kinds,
    mask_block,
    mask_kind,
    overlap,
    similarity,
)

MAX_KINDS = 5  # maximum number of kinds of masks, each of which has a panel
MAX_NAMED = 10  # maximum number of tasks in a legend; longer lists are thinned out evenly
# colours of kept and dropped patches, if there is no image to draw them on
KEPT = "#56B4E9"
DROPPED = "#22303c"
SHARES = PercentFormatter(1, decimals=0)


class TokenMasks(NamedTuple):
    """The token masks of a task.

    Attributes:
        task: Name of the task.
        masks: Kept patches per block, (blocks, patches).
        image: A test image of the task, (H, W, 3), or None.
    """

    task: str
    masks: NDArray[np.bool_]
    image: NDArray[np.uint8] | None


def spaced_indices(count: int, most: int) -> list[int]:
    """Return at most `most` evenly spaced indices below `count`, with the first and the last."""
    if count == 0:
        return []
    spaced = np.linspace(0, count - 1, min(count, most))
    return sorted(set(map(round, spaced)))


def darken_patches(image: NDArray[np.uint8], kept_patches: NDArray[np.bool_]) -> NDArray[np.uint8]:
    """Darken the dropped patches of an image.

    Args:
        image: Image (H, W, 3). H and W need not be multiples of the size of the grid.
        kept_patches: Grid of patches (rows, columns), True for kept patches.
    """
    height, width = image.shape[:2]
    grid_height, grid_width = kept_patches.shape
    rows = np.arange(height) * grid_height // height  # (H,), row of patches of each row of pixels
    columns = np.arange(width) * grid_width // width  # (W,)
    kept_pixels = kept_patches[np.ix_(rows, columns)]  # (H, W)
    factor = np.where(kept_pixels, 1.0, 0.18)
    return (image * factor[..., None]).astype(np.uint8)


def draw_token_masks(entries: Sequence[TokenMasks], most_blocks: int = 6) -> Figure:
    """Draw one line of panels per task: a test image, and the patches that each block attends to.

    A single task is drawn in several lines of at most six panels.

    Args:
        entries: The tasks.
        most_blocks: Maximum number of blocks; of more blocks, evenly spaced ones are drawn.
    """
    blocks = spaced_indices(max(len(entry.masks) for entry in entries), most_blocks)
    panels = 1 + len(blocks)
    columns = panels
    if len(entries) == 1:
        columns = min(panels, 6)
    lines = -(-panels // columns)
    rows = len(entries) * lines
    figure, axes = new_figure(1.5 * columns + 0.4, 1.72 * rows + 0.2, rows, columns)
    for panel in axes:
        panel.set_axis_off()
    for row, entry in enumerate(entries):
        start = row * lines * columns
        _draw_image(axes[start], entry)
        for panel, block in zip(axes[start + 1 :], blocks, strict=False):
            _draw_token_mask(panel, entry, block)
    return figure


def _draw_image(axes: Axes, entry: TokenMasks) -> None:
    if entry.image is not None:
        axes.imshow(entry.image)
    else:
        style: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 8, "color": FAINT}
        axes.text(0.5, 0.4, "no test\nimage", transform=axes.transAxes, **style)
    axes.set_title(entry.task, fontsize=9, color=INK, fontweight="bold", y=1.0)


def _draw_token_mask(axes: Axes, entry: TokenMasks, block: int) -> None:
    """Draw the mask of a block.

    Draw nothing if the task has no mask of this block, or if its patches are not a square grid.
    """
    side = math.isqrt(entry.masks.shape[1])
    if block >= len(entry.masks) or side * side != entry.masks.shape[1]:
        return
    mask = entry.masks[block].reshape(side, side)
    if entry.image is None:
        colours = ListedColormap([DROPPED, KEPT])
        axes.imshow(mask, cmap=colours, vmin=0, vmax=1, interpolation="nearest")
    else:
        axes.imshow(darken_patches(entry.image, mask), interpolation="nearest")
    axes.set_title(f"block {block}: {100 * mask.mean():.0f} % kept", fontsize=8, color=INK, y=1.0)


class DensityLine(NamedTuple):
    """Kept shares of the masks of one kind and one task, with the block of each mask."""

    blocks: list[int]
    shares: list[float]


def _density_lines(views: Sequence[MaskView]) -> dict[str, list[DensityLine]]:
    """Return kind of mask -> one line per view, in order.

    A task without masks of a kind has a line without points.
    """
    lines_by_kind: dict[str, list[DensityLine]] = {}
    for index, view in enumerate(views):
        for row in view.rows():
            if row["block"] is None:
                continue
            kind = row["kind"]
            if kind not in lines_by_kind:
                lines_by_kind[kind] = [DensityLine([], []) for _ in views]
            line = lines_by_kind[kind][index]
            line.blocks.append(row["block"])
            line.shares.append(row["share"])
    return lines_by_kind


def draw_density(views: Sequence[MaskView]) -> Figure | None:
    """Draw the kept share of masks by depth, with one panel per kind and one line per task.

    Return None if no mask belongs to a block.
    """
    lines_by_kind = _density_lines(views)
    panel_kinds = list(lines_by_kind)[:MAX_KINDS]
    if not panel_kinds:
        return None
    width = max(2.9 * len(panel_kinds), 4.2) + 1.6
    figure, axes = new_figure(width, 3.0, 1, len(panel_kinds), sharey=True)
    colours = task_colours(len(views))
    handles: list[Any] = []
    for panel, kind in zip(axes, panel_kinds, strict=True):
        y_label = "kept" if panel is axes[0] else ""
        style_axes(panel, kind, "block", y_label)
        style: dict[str, Any] = {"marker": ".", "linewidth": 1.6}
        for view, colour, line in zip(views, colours, lines_by_kind[kind], strict=True):
            if line.blocks:
                panel.plot(line.blocks, line.shares, label=view.task, color=colour, **style)
        panel.yaxis.set_major_formatter(SHARES)
        panel.set_ylim(0, 1.03)
        panel.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        # The legend has the tasks of the panel with the most lines.
        panel_handles = panel.get_legend_handles_labels()[0]
        if len(panel_handles) > len(handles):
            handles = panel_handles
    named = [handles[i] for i in spaced_indices(len(handles), MAX_NAMED)]
    title = "task" if len(named) == len(handles) else f"{len(named)} of {len(handles)} tasks"
    style = {"fontsize": 8.5, "title_fontsize": 8.5, "frameon": False}
    figure.legend(handles=named, loc="outside right upper", title=title, **style)
    return figure


def draw_layers(view: MaskView) -> Figure | None:
    """Draw the kept share of each output unit, with one panel per kind and one row per mask.

    Rows are in the order of the blocks. Adjacent units of wide layers are averaged.
    Return None if no mask belongs to a block.
    """
    profiles: dict[str, list[tuple[int, NDArray[np.float32]]]] = {}
    for kind in kinds([view]):
        for name, profile in view.profile.items():
            block = mask_block(name)
            if mask_kind(name) == kind and block is not None:
                profiles.setdefault(kind, []).append((block, profile))
    panel_kinds = list(profiles)[:MAX_KINDS]
    if not panel_kinds:
        return None
    height = 0.55 + 1.55 * len(panel_kinds)
    figure, axes = new_figure(10.4, height, len(panel_kinds), 1)
    images: list[Any] = []
    lowest = 1.0
    for panel, kind in zip(axes, panel_kinds, strict=True):
        profiles[kind].sort(key=lambda pair: pair[0])
        lines = [profile for _, profile in profiles[kind]]
        widest = max(map(len, lines))
        values = np.full((len(lines), widest), np.nan)
        for row, line in zip(values, lines, strict=True):
            row[: len(line)] = line
        lowest = min(lowest, float(np.nanmin(values)))
        masked = np.ma.masked_invalid(values)
        style: dict[str, Any] = {"aspect": "auto", "interpolation": "nearest"}
        images.append(panel.imshow(masked, cmap=SEQUENTIAL, vmax=1, **style))
        x_label = "unit" if panel is axes[-1] else ""
        style_axes(panel, kind, x_label, "block", grid=None)
        panel.yaxis.set_major_locator(MaxNLocator(5, integer=True))
        panel.set_xticks([])
    # The scale starts just below the lowest share, because masks that keep almost everything would
    # otherwise be uniformly dark.
    scale_start = min(math.floor(10 * lowest) / 10, 0.9)
    for image in images:
        image.set_clim(scale_start, 1)
    bar = figure.colorbar(images[0], ax=axes, fraction=0.02, pad=0.01, format=SHARES)
    bar.outline.set_visible(False)
    bar.ax.tick_params(labelsize=8)
    return figure


def draw_capacity(views: Sequence[MaskView]) -> Figure | None:
    """Draw the shares of entries that each task reuses, uses first, and that are used so far.

    There is one panel per kind of mask. Return None without masks.
    """
    panel_kinds = kinds(list(views))[:MAX_KINDS]
    if not panel_kinds:
        return None
    width = max(2.5 * len(panel_kinds), 4.2) + 1.2
    figure, axes = new_figure(width, 3.1, 1, len(panel_kinds), sharey=True)
    for panel, kind in zip(axes, panel_kinds, strict=True):
        rows = capacity(list(views), kind)
        tasks = [row["task"] for row in rows]
        xs = np.arange(len(rows))
        again = _shares_of_entries(rows, "again")
        fresh = _shares_of_entries(rows, "fresh")
        total = _shares_of_entries(rows, "used")
        panel.bar(xs, again, color=COLOURS[4], width=0.7, label="used again")
        first_use: dict[str, Any] = {"color": COLOURS[0], "label": "used for the first time"}
        panel.bar(xs, fresh, bottom=again, width=0.7, **first_use)
        any_use: dict[str, Any] = {"color": COLOURS[1], "label": "used by any task so far"}
        panel.plot(xs, total, marker=".", linewidth=1.6, **any_use)
        y_label = "share of entries" if panel is axes[0] else ""
        style_axes(panel, kind, "", y_label)
        panel.yaxis.set_major_formatter(SHARES)
        panel.set_ylim(0, 1.03)
        label_tasks(panel, tasks, "x")
    add_legend(figure, list_handles(axes[0]), columns=3, above=True, fontsize=8.5)
    return figure


def _shares_of_entries(rows: Sequence[dict[str, Any]], column: str) -> NDArray[np.float64]:
    """Return a column of counts as shares of the size of the mask, (tasks,)."""
    counts = np.array([row[column] for row in rows])
    sizes = np.array([row["size"] for row in rows])
    shares: NDArray[np.float64] = counts / sizes
    return shares


def draw_overlaps(views: Sequence[MaskView]) -> Figure | None:
    """Draw the Jaccard index between the masks of each pair of tasks.

    There is one panel per kind of mask. Return None without masks or with fewer than two tasks.
    """
    panel_kinds = kinds(list(views))[:MAX_KINDS]
    if not panel_kinds or len(views) < 2:
        return None
    side = min(max(2.3, 0.42 * len(views)), 5.0)
    width = (side + 1.0) * len(panel_kinds) + 0.6
    figure, axes = new_figure(width, side + 0.9, 1, len(panel_kinds))
    for panel, kind in zip(axes, panel_kinds, strict=True):
        values = overlap(list(views), kind)
        image = draw_cells(panel, values)
        for i, j in np.ndindex(values.shape):
            jaccard = float(values[i, j])
            if len(views) <= 12 and not math.isnan(jaccard):
                size = text_size(len(views)) - 1
                write_in_cell(panel, i, j, f"{jaccard:.2f}", jaccard > 0.55, fontsize=size)
        style_axes(panel, kind, grid=None)
        panel.spines[:].set_visible(False)
        label_tasks(panel, [view.task for view in views])
    bar = figure.colorbar(image, ax=axes, fraction=0.03, pad=0.01)
    bar.outline.set_visible(False)
    bar.ax.tick_params(labelsize=8)
    return figure


def draw_prompts(views: Sequence[MaskView]) -> Figure | None:
    """Draw the learned tokens of the last task, and cosine similarities of the tokens of all tasks.

    If the last task has learned tokens under several names, the first two are drawn. Return None if
    it has none.
    """
    if not views or not views[-1].prompts:
        return None
    names = list(views[-1].prompts)[:2]
    figure, axes = new_figure(10.4, 3.6 * len(names), len(names), 2)
    for left, right, name in zip(axes[::2], axes[1::2], names, strict=True):
        values = views[-1].prompts[name]
        limit = float(np.abs(values).max()) or 1.0
        style: dict[str, Any] = {"cmap": "RdBu", "interpolation": "nearest"}
        image = left.imshow(values, vmin=-limit, vmax=limit, aspect="auto", **style)
        title = f"{name}: values of task {views[-1].task}"
        style_axes(left, title, "dimension", "token", grid=None)
        left.yaxis.set_major_locator(MaxNLocator(6, integer=True, min_n_ticks=1))
        figure.colorbar(image, ax=left, fraction=0.04, pad=0.02).ax.tick_params(labelsize=8)
        cosine, row_tasks = similarity(list(views), name)
        image = right.imshow(cosine, vmin=-1, vmax=1, **style)
        style_axes(right, f"{name}: cosine similarity", grid=None)
        _separate_tasks(right, row_tasks)
        figure.colorbar(image, ax=right, fraction=0.04, pad=0.02).ax.tick_params(labelsize=8)
    return figure


def _separate_tasks(axes: Axes, row_tasks: Sequence[str]) -> None:
    """Draw lines between tasks, and label each task at the middle of the rows."""
    starts = []
    for row, task in enumerate(row_tasks):
        if row == 0 or row_tasks[row - 1] != task:
            starts.append(row)
    ends = [*starts[1:], len(row_tasks)]
    middles = [(start + end - 1) / 2 for start, end in zip(starts, ends, strict=True)]
    size = 8.5
    named = labelled_positions(len(starts), measure_room(axes).height, size)
    names = [row_tasks[starts[i]] for i in named]
    axes.set_yticks([middles[i] for i in named], names, fontsize=size)
    axes.set_xticks([])
    for start in starts[1:]:
        axes.axhline(start - 0.5, color="white", linewidth=1.2)
        axes.axvline(start - 0.5, color="white", linewidth=1.2)
