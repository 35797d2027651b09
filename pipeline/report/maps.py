"""Maps over images: what the class token looks at, and what top-down feedback selects, laid over
what the model was shown."""

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

# in one picture; a longer stream shows some of them, the first and the last among them
MOST_TASKS = 8
CELL, GAP = 144, 6  # pixels
SIDE = 160  # of the captions beside a row
# of the whole; above the rows of a task; below the last one, for the scales
TITLE, HEAD, FOOT = (
    44,
    62,
    96,
)
APART, WIDEST = 20, 1700  # between tasks side by side, of which there are as many as fit
OPAQUE = (0.35, 0.8)  # of a map where it is lowest and highest
SELECTED = "selected"
SCALES = {"looks": "viridis", SELECTED: "magma"}  # two, as they say two things


def draw_maps(name: str, entries: Sequence[tuple[str, Maps]]) -> Figure:
    """One line per image, task after task: the image, and each map over it. Maps of a kind share a
    scale."""
    entries = [entries[i] for i in spaced_indices(len(entries), MOST_TASKS)]
    titles = _titles(entries)
    tops = {
        "looks": _top([look for _, found in entries for look in found.looks.values()]),
        SELECTED: _top([found.selected for _, found in entries if found.selected is not None]),
    }
    wide = SIDE + (1 + len(titles)) * (CELL + GAP) + APART
    columns = max(1, min(len(entries), WIDEST // wide))
    lines = [entries[start : start + columns] for start in range(0, len(entries), columns)]
    heights = [HEAD + max(len(found.images) for _, found in line) * (CELL + GAP) for line in lines]
    sheet = Sheet(columns * wide, TITLE + sum(heights) + FOOT)
    sheet.words(8, 18, name, fontsize=10, fontweight="bold")
    top = TITLE
    for line, tall in zip(lines, heights, strict=True):
        for place, (task, found) in enumerate(line):
            _task(sheet, place * wide, top, task, found, titles, tops)
        top += tall
    kinds = [
        kind
        for kind in SCALES
        if any((title == SELECTED) == (kind == SELECTED) for title in titles)
    ]
    for place, kind in enumerate(kinds):
        _scale(sheet, SIDE + place * 2 * (CELL + GAP), top + 40, kind, tops[kind])
    return sheet.finished()


class Sheet:
    """A figure in pixels, counted from the top left: pictures of one size and words."""

    def __init__(self, width: int, height: int):
        self.figure = Figure(figsize=(width / DPI, height / DPI))
        self.canvas = np.ones((height, width, 3), np.float32)

    def put(self, x: int, y: int, picture: NDArray[np.float32]) -> None:
        self.canvas[y : y + CELL, x : x + CELL] = picture

    def words(self, x: float, y: float, text: str, color: str = INK, **style: Any) -> None:
        height, width = self.canvas.shape[:2]
        self.figure.text(
            x / width,
            1 - y / height,
            text,
            color=color,
            va="center" if "\n" not in text else "top",
            ha="left",
            **style,
        )

    def axes(self, x: float, y: float, wide: float, tall: float) -> Axes:
        height, width = self.canvas.shape[:2]
        return self.figure.add_axes(
            (x / width, 1 - (y + tall) / height, wide / width, tall / height)
        )

    def finished(self) -> Figure:
        behind = self.figure.add_axes((0, 0, 1, 1), zorder=-1)
        behind.imshow(self.canvas, interpolation="nearest", aspect="auto")
        behind.set_axis_off()
        return self.figure


def _titles(entries: Sequence[tuple[str, Maps]]) -> list[str]:
    """Of all columns behind the image; what a first look selects stands before the second."""
    titles = list(dict.fromkeys(title for _, found in entries for title in found.looks))
    titles.sort(key=lambda title: ("look" not in title, 0))
    if any(found.selected is not None for _, found in entries):
        titles.insert(min(1, len(titles)), SELECTED)
    return titles


def _top(maps: Sequence[torch.Tensor]) -> float:
    """The end of a scale: few values are above it."""
    return max(float(torch.cat([m.flatten() for m in maps]).quantile(0.995)), 1e-6) if maps else 1.0


def _task(
    sheet: Sheet,
    left: int,
    top: int,
    task: str,
    found: Maps,
    titles: Sequence[str],
    tops: dict[str, float],
) -> None:
    sheet.words(left + 8, top + 16, task, fontsize=8.5, fontweight="bold")
    places = [left + SIDE + column * (CELL + GAP) for column in range(1 + len(titles))]
    for x, title in zip(places, ["image", *titles], strict=True):
        sheet.words(x, top + HEAD - 20, title, fontsize=6.5)
    for row in range(len(found.images)):
        y = top + HEAD + row * (CELL + GAP)
        image = _sized(found.images[row].permute(2, 0, 1))
        sheet.put(places[0], y, image)
        for x, title in zip(places[1:], titles, strict=True):
            kind, values = (
                (SELECTED, found.selected)
                if title == SELECTED
                else ("looks", found.looks.get(title))
            )
            if values is not None:
                sheet.put(x, y, blend_map(image, values[row], SCALES[kind], tops[kind]))
        right, answered = found.right[row], found.answered[row]
        sheet.words(left + 8, y + CELL / 2 - 22, _short(right), fontsize=6.8)
        said, colour = (
            ("answered right", "#1a7f37")
            if right == answered
            else (f"answered\n{_short(answered)}", "#b3261e")
        )
        sheet.words(
            left + 8,
            y + CELL / 2 + (4 if right == answered else -4),
            said,
            fontsize=6.5,
            color=colour,
        )


def blend_map(
    image: NDArray[np.float32], values: torch.Tensor, cmap: str, top: float
) -> NDArray[np.float32]:
    """Return the image (H, W, 3) in grey under a map (h, w), resized to the image.

    Low values are more transparent. top: the value at the end of the colour scale.
    """
    levels = (_sized(values[None].float())[..., 0] / top).clip(0, 1)
    opaque = (OPAQUE[0] + (OPAQUE[1] - OPAQUE[0]) * levels)[..., None]
    grey = image.mean(-1, keepdims=True)
    colours = matplotlib.colormaps[cmap](levels)[..., :3]
    blended: NDArray[np.float32] = ((1 - opaque) * grey + opaque * colours).clip(0, 1)
    return blended


def _sized(values: torch.Tensor) -> NDArray[np.float32]:
    """(c, h, w) -> (CELL, CELL, c), bilinear."""
    resized = F.interpolate(
        values[None].float(), (CELL, CELL), mode="bilinear", align_corners=False
    )
    array: NDArray[np.float32] = resized[0].permute(1, 2, 0).numpy()
    return array


def _scale(sheet: Sheet, x: float, y: float, kind: str, top: float) -> None:
    colours = matplotlib.colormaps[SCALES[kind]](np.linspace(0, 1, 256))
    opaque = np.linspace(*OPAQUE, 256)[:, None]
    colours[:, :3] = (1 - opaque) * 0.5 + opaque * colours[:, :3]  # as over a mean grey
    axes = sheet.axes(x, y, 1.6 * CELL, 14)
    bar = sheet.figure.colorbar(
        ScalarMappable(Normalize(0, top), ListedColormap(colours)),
        cax=axes,
        orientation="horizontal",
        extend="max",
    )
    bar.outline.set_visible(False)
    axes.tick_params(labelsize=6.5, length=2, colors=INK)
    words = {
        "looks": "attention of the class token, 1 is uniform",
        SELECTED: "selected: clamp(cos(x, ξ), 0, 1)",
    }[kind]
    sheet.words(x, y - 12, words, fontsize=6.5)


def _short(name: str) -> str:
    return name if len(name) <= 18 else f"{name[:17]}…"
