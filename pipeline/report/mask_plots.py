"""Pictures of masks and tokens: over a sample image, per layer, and between tasks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

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
    draw_cells,
    label_tasks,
    new_figure,
    style_axes,
    task_colours,
    text_size,
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

MOST_KINDS = 5  # panels side by side
KEPT, DROPPED = "#56B4E9", "#22303c"  # of a bare grid


def spaced_indices(count: int, most: int) -> list[int]:
    """At most `most` of `count` positions, the first and the last among them."""
    return sorted({round(i) for i in np.linspace(0, count - 1, min(count, most))}) if count else []


def darken_patches(image: NDArray[np.uint8], kept: NDArray[np.bool_]) -> NDArray[np.uint8]:
    """image (H, W, 3), kept (gh, gw) -> the image with dropped patches darkened; H and W need not
    divide by the grid."""
    rows = np.arange(image.shape[0]) * kept.shape[0] // image.shape[0]
    columns = np.arange(image.shape[1]) * kept.shape[1] // image.shape[1]
    factor = np.where(kept[np.ix_(rows, columns)], 1.0, 0.18)[..., None]
    return (image * factor).astype(np.uint8)


def draw_token_masks(
    entries: Sequence[tuple[str, NDArray[np.bool_], NDArray[np.uint8] | None]], most_blocks: int = 6
) -> Figure:
    """One line per (task, token masks (blocks, patches), image or None): the image, then what each
    block still sees. A single task has its blocks in lines of six."""
    blocks = spaced_indices(max(len(masks) for _, masks, _ in entries), most_blocks)
    panels = 1 + len(blocks)
    columns = panels if len(entries) > 1 else min(panels, 6)
    lines = -(-panels // columns)
    figure, axes = new_figure(
        1.5 * columns + 0.4, 1.72 * len(entries) * lines + 0.2, len(entries) * lines, columns
    )
    for ax in axes:
        ax.set_axis_off()
    for row, (task, masks, image) in enumerate(entries):
        first, *others = axes[row * lines * columns :]
        if image is None:
            first.text(
                0.5,
                0.4,
                "no sample\nimage here",
                ha="center",
                va="center",
                fontsize=8,
                color=FAINT,
                transform=first.transAxes,
            )
        else:
            first.imshow(image)
        first.set_title(task, fontsize=9, color=INK, fontweight="bold")
        for ax, block in zip(others, blocks, strict=False):
            _masked(ax, masks, block, image)
    return figure


def _masked(
    axes: Axes, masks: NDArray[np.bool_], block: int, image: NDArray[np.uint8] | None
) -> None:
    """What one block sees; nothing where the task has no such block or the patches form no
    square."""
    side = math.isqrt(masks.shape[1])
    if block >= len(masks) or side * side != masks.shape[1]:
        return
    kept = masks[block].reshape(side, side)
    if image is None:
        axes.imshow(
            kept, cmap=ListedColormap([DROPPED, KEPT]), vmin=0, vmax=1, interpolation="nearest"
        )
    else:
        axes.imshow(darken_patches(image, kept), interpolation="nearest")
    axes.set_title(f"block {block}: {100 * kept.mean():.0f} % kept", fontsize=8, color=INK)


def draw_density(views: Sequence[MaskView]) -> Figure | None:
    """Kept share of every mask over depth, one line per task, one panel per kind of mask."""
    rows = [row for view in views for row in view.rows() if row["block"] is not None]
    wanted = list(dict.fromkeys(row["kind"] for row in rows))[:MOST_KINDS]
    if not wanted:
        return None
    figure, axes = new_figure(max(2.9 * len(wanted), 4.2) + 1.6, 3.0, 1, len(wanted), sharey=True)
    colours = task_colours(len(views))
    for ax, kind in zip(axes, wanted, strict=True):
        style_axes(ax, kind, "block", "kept" if ax is axes[0] else "")
        for index, view in enumerate(views):
            line = [(r["block"], r["share"]) for r in view.rows() if r["kind"] == kind]
            if line:
                ax.plot(
                    *zip(*line, strict=True),
                    marker=".",
                    linewidth=1.6,
                    color=colours[index],
                    label=view.task,
                )
        ax.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        ax.set_ylim(0, 1.03)
        ax.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    handles, names = max(
        (ax.get_legend_handles_labels() for ax in axes), key=lambda pair: len(pair[1])
    )
    figure.legend(
        handles,
        names,
        loc="outside right upper",
        fontsize=8.5,
        frameon=False,
        title="task",
        ncols=1 + len(views) // 13,
    )
    return figure


def draw_layers(view: MaskView) -> Figure | None:
    """One panel per kind of mask: blocks downwards, output units to the right, coloured by the
    share of each unit's entries that the task keeps (units side by side share a pixel where there
    are many)."""
    wanted = [
        k
        for k in kinds([view])
        if any(mask_kind(n) == k and mask_block(n) is not None for n in view.profile)
    ][:MOST_KINDS]
    if not wanted:
        return None
    figure, axes = new_figure(10.4, 0.55 + 1.55 * len(wanted), len(wanted), 1)
    panels: list[Any] = []
    for ax, kind in zip(axes, wanted, strict=True):
        lines = [
            view.profile[n]
            for n in sorted(
                (n for n in view.profile if mask_kind(n) == kind), key=lambda n: mask_block(n) or 0
            )
        ]
        values = np.full((len(lines), max(map(len, lines))), np.nan)
        for row, line in zip(values, lines, strict=True):
            row[: len(line)] = line
        panels.append(
            ax.imshow(
                np.ma.masked_invalid(values),
                cmap=SEQUENTIAL,
                vmax=1,
                aspect="auto",
                interpolation="nearest",
            )
        )
        style_axes(ax, kind, "unit" if ax is axes[-1] else "", "block", grid=None)
        ax.yaxis.set_major_locator(MaxNLocator(5, integer=True))
        ax.set_xticks([])
    least = min(float(p.get_array().min()) for p in panels)
    for panel in panels:
        # masks that keep nearly all would else be one dark field
        panel.set_clim(min(math.floor(10 * least) / 10, 0.9), 1)
    bar = figure.colorbar(
        panels[0], ax=axes, fraction=0.02, pad=0.01, format=PercentFormatter(1, decimals=0)
    )
    bar.outline.set_visible(False)
    bar.ax.tick_params(labelsize=8)
    return figure


def draw_capacity(views: Sequence[MaskView]) -> Figure | None:
    """Capacity used, one panel per kind of mask: for each task what it uses anew and again, and the
    line of all that is used."""
    wanted = kinds(list(views))[:MOST_KINDS]
    if not wanted:
        return None
    figure, axes = new_figure(max(2.5 * len(wanted), 4.2) + 1.2, 3.1, 1, len(wanted), sharey=True)
    for ax, kind in zip(axes, wanted, strict=True):
        rows = capacity(list(views), kind)
        places = np.arange(len(rows))
        again, fresh, total = (
            np.array([r[name] / r["size"] for r in rows]) for name in ("again", "fresh", "used")
        )
        ax.bar(places, again, color=COLOURS[4], width=0.7, label="used again")
        ax.bar(
            places,
            fresh,
            bottom=again,
            color=COLOURS[0],
            width=0.7,
            label="used for the first time",
        )
        ax.plot(
            places,
            total,
            color=COLOURS[1],
            marker=".",
            linewidth=1.6,
            label="used by any task so far",
        )
        style_axes(ax, kind, "", "share of entries" if ax is axes[0] else "")
        ax.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        ax.set_ylim(0, 1.03)
        ax.set_xticks(places, [r["task"] for r in rows], rotation=55, ha="right", fontsize=8)
    figure.legend(
        *axes[0].get_legend_handles_labels(),
        loc="outside upper center",
        fontsize=8.5,
        frameon=False,
        ncols=3,
    )
    return figure


def draw_overlaps(views: Sequence[MaskView]) -> Figure | None:
    """Jaccard index between the masks of each pair of tasks, one panel per kind of mask."""
    wanted = kinds(list(views))[:MOST_KINDS]
    if not wanted or len(views) < 2:
        return None
    side = min(max(2.3, 0.42 * len(views)), 5.0)
    figure, axes = new_figure((side + 1.0) * len(wanted) + 0.6, side + 0.9, 1, len(wanted))
    for ax, kind in zip(axes, wanted, strict=True):
        values = overlap(list(views), kind)
        image = draw_cells(ax, values)
        if len(views) <= 12:
            for i, j in np.ndindex(values.shape):
                if not np.isnan(values[i, j]):
                    ax.text(
                        j,
                        i,
                        f"{values[i, j]:.2f}",
                        ha="center",
                        va="center",
                        fontsize=text_size(len(views)) - 1,
                        color="white" if values[i, j] > 0.55 else INK,
                    )
        style_axes(ax, kind, grid=None)
        ax.spines[:].set_visible(False)
        label_tasks(ax, [v.task for v in views])
    bar = figure.colorbar(image, ax=axes, fraction=0.03, pad=0.01)
    bar.outline.set_visible(False)
    bar.ax.tick_params(labelsize=8)
    return figure


def draw_prompts(views: Sequence[MaskView]) -> Figure | None:
    """Learned tokens of the last task, and the cosine similarity between the tokens of all
    tasks."""
    names = list(views[-1].prompts if views else {})[:2]
    if not names:
        return None
    figure, axes = new_figure(10.4, 3.6 * len(names), len(names), 2)
    for left, right, name in zip(axes[::2], axes[1::2], names, strict=True):
        values = views[-1].prompts[name]
        far = float(np.abs(values).max()) or 1.0
        image = left.imshow(
            values, cmap="RdBu", vmin=-far, vmax=far, aspect="auto", interpolation="nearest"
        )
        style_axes(
            left, f"{name}: values of task {views[-1].task}", "dimension", "token", grid=None
        )
        left.yaxis.set_major_locator(MaxNLocator(6, integer=True, min_n_ticks=1))
        figure.colorbar(image, ax=left, fraction=0.04, pad=0.02).ax.tick_params(labelsize=8)
        cosine, owners = similarity(list(views), name)
        image = right.imshow(cosine, cmap="RdBu", vmin=-1, vmax=1, interpolation="nearest")
        style_axes(right, f"{name}: cosine similarity", grid=None)
        starts = [i for i, o in enumerate(owners) if i == 0 or owners[i - 1] != o]
        middles = [(a + b - 1) / 2 for a, b in zip(starts, [*starts[1:], len(owners)], strict=True)]
        right.set_yticks(middles, [owners[s] for s in starts])
        right.set_xticks([])
        for start in starts[1:]:
            right.axhline(start - 0.5, color="white", linewidth=1.2)
            right.axvline(start - 0.5, color="white", linewidth=1.2)
        figure.colorbar(image, ax=right, fraction=0.04, pad=0.02).ax.tick_params(labelsize=8)
    return figure
