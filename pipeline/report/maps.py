"""Draw maps over test images: attention of the class token, and patches selected by feedback.

A look is one pass of an image through the network. A method with top-down feedback (TOAST) has two:
the first look selects patches, and the selection steers the second look. The data are
`workers.analysis.Maps`. There are two kinds of maps: `looks` (attention) and `selected` (the
selection).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import ListedColormap, Normalize
from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch.nn import functional as F

from pipeline.report.mask_plots import spaced_indices
from pipeline.report.plots import DPI, INK
from workers.analysis import Maps

# Maximum number of tasks in a picture. Of longer streams, the first, the last and evenly spaced
# tasks are shown.
MAX_TASKS = 8
# lengths in pixels
CELL = 144  # side of an image
GAP = 6  # gap between images
SIDE = 160  # width of the captions to the left of a row
TITLE = 44  # height of the title of the picture
HEAD = 62  # height of the headings of a task
FOOT = 96  # height of the colour bars below the last task
TASK_GAP = 20  # horizontal gap between tasks
WIDEST = 1700  # maximum width of the picture, unless a single task is wider
OPACITY_RANGE = (0.35, 0.8)  # opacity of the lowest and of the highest value of a map
SELECTED = "selected"
SCALES = {"looks": "viridis", SELECTED: "magma"}  # colour map of each kind of map
CAPTIONS = {
    "looks": "attention of the class token, 1 is uniform",
    SELECTED: "selected: clamp(cos(x, ξ), 0, 1)",
}  # caption of the colour bar of each kind of map


def draw_maps(name: str, entries: Sequence[tuple[str, Maps]]) -> Figure:
    """Draw one row per image: the image, followed by each map blended over the image.

    Maps of the same kind share a colour scale.

    Args:
        name: Title of the picture.
        entries: Pairs of a task's name and its maps.
    """
    entries = [entries[i] for i in spaced_indices(len(entries), MAX_TASKS)]
    titles = _titles(entries)
    looks: list[torch.Tensor] = []
    selections: list[torch.Tensor] = []
    for _, maps in entries:
        looks += maps.looks.values()
        if maps.selected is not None:
            selections.append(maps.selected)
    tops = {"looks": _top(looks), SELECTED: _top(selections)}
    task_width = SIDE + (1 + len(titles)) * (CELL + GAP) + TASK_GAP
    columns = max(1, min(len(entries), WIDEST // task_width))
    bands = []  # tasks side by side
    heights = []
    for start in range(0, len(entries), columns):
        band = entries[start : start + columns]
        rows = max(len(maps.images) for _, maps in band)
        bands.append(band)
        heights.append(HEAD + rows * (CELL + GAP))
    sheet = Sheet(columns * task_width, TITLE + sum(heights) + FOOT)
    sheet.write(8, 18, name, fontsize=10, fontweight="bold")
    top = TITLE
    for band, height in zip(bands, heights, strict=True):
        for column, (task, maps) in enumerate(band):
            _draw_task(sheet, column * task_width, top, task, maps, titles, tops)
        top += height
    kinds = []
    if any(title != SELECTED for title in titles):
        kinds.append("looks")
    if SELECTED in titles:
        kinds.append(SELECTED)
    for index, kind in enumerate(kinds):
        _draw_scale(sheet, SIDE + index * 2 * (CELL + GAP), top + 40, kind, tops[kind])
    return sheet.finish()


class Sheet:
    """A figure with square images and text. Positions are pixels from the top left corner."""

    def __init__(self, width: int, height: int):
        self.figure = Figure(figsize=(width / DPI, height / DPI))
        self.canvas = np.ones((height, width, 3), np.float32)

    def put(self, x: int, y: int, image: NDArray[np.float32]) -> None:
        """Place an image (CELL, CELL, 3) with its top left corner at (x, y)."""
        self.canvas[y : y + CELL, x : x + CELL] = image

    def write(self, x: float, y: float, text: str, color: str = INK, **style: Any) -> None:
        """Write text that starts at x. A single line is centred at y, several lines start at y."""
        height, width = self.canvas.shape[:2]
        alignment = "center"
        if "\n" in text:
            alignment = "top"
        self.figure.text(
            x / width, 1 - y / height, text, color=color, va=alignment, ha="left", **style
        )

    def axes(self, x: float, y: float, width: float, height: float) -> Axes:
        """Add axes with their top left corner at (x, y)."""
        sheet_height, sheet_width = self.canvas.shape[:2]
        left = x / sheet_width
        bottom = 1 - (y + height) / sheet_height
        return self.figure.add_axes((left, bottom, width / sheet_width, height / sheet_height))

    def finish(self) -> Figure:
        """Add the placed images behind text and axes, and return the figure."""
        background = self.figure.add_axes((0, 0, 1, 1), zorder=-1)
        background.imshow(self.canvas, interpolation="nearest", aspect="auto")
        background.set_axis_off()
        return self.figure


def _titles(entries: Sequence[tuple[str, Maps]]) -> list[str]:
    """Return the titles of all maps, in the order of the columns.

    The order with feedback is: first look, selection, second look, other blocks.
    """
    distinct: dict[str, None] = {}
    for _, maps in entries:
        distinct |= dict.fromkeys(maps.looks)
    titles = sorted(distinct, key=lambda title: "look" not in title)
    if any(maps.selected is not None for _, maps in entries):
        titles.insert(min(1, len(titles)), SELECTED)
    return titles


def _top(maps: Sequence[torch.Tensor]) -> float:
    """Return the end of a colour scale: the 99.5th percentile, so that outliers have no effect."""
    if not maps:
        return 1.0
    values = torch.cat([values.flatten() for values in maps])
    return max(float(values.quantile(0.995)), 1e-6)


def _draw_task(
    sheet: Sheet,
    left: int,
    top: int,
    task: str,
    maps: Maps,
    titles: Sequence[str],
    tops: dict[str, float],
) -> None:
    """Draw the rows of a task.

    Args:
        sheet: Figure to draw on.
        left: Left edge in pixels.
        top: Upper edge in pixels.
        task: Name of the task.
        maps: Images of the task with their maps.
        titles: Titles of all columns with maps.
        tops: Kind of map -> end of the colour scale.
    """
    sheet.write(left + 8, top + 16, task, fontsize=8.5, fontweight="bold")
    image_x = left + SIDE
    xs = [image_x + column * (CELL + GAP) for column in range(1, 1 + len(titles))]
    sheet.write(image_x, top + HEAD - 20, "image", fontsize=6.5)
    for x, title in zip(xs, titles, strict=True):
        sheet.write(x, top + HEAD - 20, title, fontsize=6.5)
    for row in range(len(maps.images)):
        y = top + HEAD + row * (CELL + GAP)
        image = _resize(maps.images[row].permute(2, 0, 1))
        sheet.put(image_x, y, image)
        for x, title in zip(xs, titles, strict=True):
            kind = "looks"
            values = maps.looks.get(title)
            if title == SELECTED:
                kind = SELECTED
                values = maps.selected
            if values is not None:
                sheet.put(x, y, blend_map(image, values[row], SCALES[kind], tops[kind]))
        _write_answer(sheet, left + 8, y + CELL / 2, maps.right[row], maps.answered[row])


def _write_answer(sheet: Sheet, x: float, y: float, right: str, answered: str) -> None:
    """Write the true class of an image, and the prediction of the model below."""
    sheet.write(x, y - 22, _shorten(right), fontsize=6.8)
    if right == answered:
        sheet.write(x, y + 4, "answered right", fontsize=6.5, color="#1a7f37")
    else:
        sheet.write(x, y - 4, f"answered\n{_shorten(answered)}", fontsize=6.5, color="#b3261e")


def blend_map(
    image: NDArray[np.float32], values: torch.Tensor, cmap: str, top: float
) -> NDArray[np.float32]:
    """Blend a map over an image. Low values of the map are more transparent.

    Args:
        image: Image (CELL, CELL, 3), which is shown in grey.
        values: Map (h, w), which is resized to the image.
        cmap: Name of the colour map.
        top: Value at the end of the colour scale.
    """
    levels = (_resize(values[None].float())[..., 0] / top).clip(0, 1)
    lowest, highest = OPACITY_RANGE
    opacity = (lowest + (highest - lowest) * levels)[..., None]
    grey = image.mean(-1, keepdims=True)
    colours = matplotlib.colormaps[cmap](levels)[..., :3]
    blended: NDArray[np.float32] = ((1 - opacity) * grey + opacity * colours).clip(0, 1)
    return blended


def _resize(values: torch.Tensor) -> NDArray[np.float32]:
    """Resize an array (c, h, w) to (CELL, CELL, c) by bilinear interpolation."""
    resized = F.interpolate(
        values[None].float(), (CELL, CELL), mode="bilinear", align_corners=False
    )
    array: NDArray[np.float32] = resized[0].permute(1, 2, 0).numpy()
    return array


def _draw_scale(sheet: Sheet, x: float, y: float, kind: str, top: float) -> None:
    """Draw the colour bar of a kind of map, with its caption. `top` is the end of the scale."""
    colours = matplotlib.colormaps[SCALES[kind]](np.linspace(0, 1, 256))
    opacity = np.linspace(*OPACITY_RANGE, 256)[:, None]
    colours[:, :3] = (1 - opacity) * 0.5 + opacity * colours[:, :3]  # as over medium grey
    axes = sheet.axes(x, y, 1.6 * CELL, 14)
    bar = sheet.figure.colorbar(
        ScalarMappable(Normalize(0, top), ListedColormap(colours)),
        cax=axes,
        orientation="horizontal",
        extend="max",
    )
    bar.outline.set_visible(False)
    axes.tick_params(labelsize=6.5, length=2, colors=INK)
    sheet.write(x, y - 12, CAPTIONS[kind], fontsize=6.5)


def _shorten(name: str) -> str:
    if len(name) <= 18:
        return name
    return f"{name[:17]}…"
