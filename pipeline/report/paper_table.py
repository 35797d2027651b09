"""The picture of a table of a paper: our values and the paper's."""

from __future__ import annotations

import math
from collections.abc import Sequence

from matplotlib.figure import Figure

from pipeline.report.plots import (
    INK,
    add_legend,
    list_handles,
    method_style,
    new_figure,
    rotate_x_ticks,
    style_axes,
)
from pipeline.results.tables import Row

COLUMN_INCHES = 0.9  # width of a column of the table
MIN_INCHES, MAX_INCHES = 6.0, 14.0  # width of the figure
PART_INCHES = 3.2  # height of the panel of a part
LEGEND_LINE_INCHES = 0.22
HOLLOW = "hollow: in the paper"


def draw_cells(title: str, cells: Sequence[Row], unit: str = "%") -> Figure:
    """Draw each cell of a table as a filled marker, our value, and a hollow one, the paper's value.

    Args:
        title: Title of the figure.
        cells: Rows with `part` (part of the table, which has its own panel), `row`, `column`, and
            `value` (ours) and `paper` in `unit`; NaN if unknown.
        unit: Label of the y axes.
    """
    parts = list(dict.fromkeys(str(cell["part"]) for cell in cells))
    columns = list(dict.fromkeys(str(cell["column"]) for cell in cells))
    names = list(dict.fromkeys(str(cell["row"]) for cell in cells))
    width = min(MAX_INCHES, max(MIN_INCHES, 2.5 + COLUMN_INCHES * len(columns)))
    # as many columns of the legend as fit, at 0.075 inches per letter and 0.6 inches per marker
    entry_inches = 0.6 + 0.075 * max(map(len, [*names, HOLLOW]))
    legend_columns = max(1, int(width / entry_inches))
    legend_lines = math.ceil((len(names) + 1) / legend_columns)
    height = PART_INCHES * len(parts) + 0.4 + LEGEND_LINE_INCHES * legend_lines
    figure, panels = new_figure(width, height, len(parts))
    figure.suptitle(title, fontsize=11, color=INK, x=0.01, ha="left", fontweight="bold")
    for axes, part in zip(panels, parts, strict=True):
        own = [cell for cell in cells if cell["part"] == part]
        for index, name in enumerate(names):
            style = {**method_style(index), "linestyle": "none"}
            shift = 0.6 * (index + 0.5) / len(names) - 0.3  # so that markers lie side by side
            row = [cell for cell in own if cell["row"] == name]
            places = [columns.index(str(cell["column"])) + shift for cell in row]
            axes.plot(places, [cell["value"] for cell in row], label=name, **style)
            hollow = {**style, "markerfacecolor": "none"}
            axes.plot(places, [cell["paper"] for cell in row], **hollow)
        rotate_x_ticks(axes, columns, 30)
        style_axes(axes, part, y=unit)
    if any(not math.isnan(cell["paper"]) for cell in cells):
        panels[0].plot([], [], "o", color=INK, markerfacecolor="none", label=HOLLOW)
    add_legend(figure, list_handles(panels[0]), columns=legend_columns)
    return figure
