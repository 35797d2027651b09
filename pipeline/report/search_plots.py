"""Figures of a search: parallel coordinates, importance, progress, and accuracy against size.

`standing` is the score of a trial, comparable across phases: see `SearchRecord.standing`. A chosen
trial is the winner of its phase, or the best trial so far.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Collection, Mapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LinearSegmentedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import (
    FuncFormatter,
    Locator,
    LogLocator,
    MaxNLocator,
    NullFormatter,
    PercentFormatter,
)

from pipeline.config.text import format_bytes
from pipeline.report.parameters import Parameter
from pipeline.report.plots import (
    COLOURS,
    FAINT,
    INK,
    SEQUENTIAL,
    add_legend,
    label_tasks,
    mark_spans,
    new_figure,
    style_axes,
    task_colours,
)
from pipeline.results.trials import SearchRecord, Trial, as_number, has_score, pareto, score, size

trial_number = itemgetter("number")
WINNER = COLOURS[1]
FINISHED = COLOURS[0]
STOPPED = "#7a8087"
# position on a parallel axis of trials without the parameter; other positions are from 0 to 1
ABSENT = -0.16
# colour map of accuracies, without the palest colours, which are hard to see on white
DARK = LinearSegmentedColormap.from_list(
    "dark", matplotlib.colormaps[SEQUENTIAL](np.linspace(0.3, 1, 64))
)
PER_CENT = FuncFormatter(lambda share, _: f"{100 * share:.4g}%")
Style = dict[str, Any]
STATUS_STYLES: dict[str, Style] = {  # status of a trial -> style of the point
    "finished": {"marker": "o", "color": FINISHED, "markersize": 6, "label": "finished"},
    "stopped": {
        "marker": "o",
        "color": STOPPED,
        "markerfacecolor": "white",
        "markersize": 5.5,
        "label": "stopped early",
    },
    "running": {
        "marker": "D",
        "color": COLOURS[5],
        "markerfacecolor": "white",
        "markersize": 5.5,
        "label": "running",
    },
    "failed": {"marker": "x", "color": INK, "markersize": 6, "label": "failed"},
}
STAR: Style = {
    "marker": "*",
    "color": WINNER,
    "markeredgecolor": "white",
    "markersize": 16,
    "zorder": 6,
}


def legend_entry(label: str, **style: Any) -> Line2D:
    """Return an entry of a legend. The entry is a point unless `style` contains `linestyle`."""
    return Line2D([], [], label=label, **{"linestyle": "none", **style})


class StyledTrials(NamedTuple):
    """Trials whose points have the same style."""

    style: Style
    trials: list[Trial]


def group_by_style(trials: Sequence[Trial], chosen: Collection[int]) -> list[StyledTrials]:
    """Group trials by the style of their points. Chosen trials come last, so they are on top."""
    by_status: dict[str, list[Trial]] = {}
    chosen_trials = []
    for trial in trials:
        if trial["number"] in chosen:
            chosen_trials.append(trial)
        else:
            by_status.setdefault(trial["status"], []).append(trial)
    groups = []
    for status, style in STATUS_STYLES.items():
        if status in by_status:
            groups.append(StyledTrials(style, by_status[status]))
    if chosen_trials:
        groups.append(StyledTrials(STAR, chosen_trials))
    return groups


def draw_points(axes: Axes, x: Any, y: Any, style: Mapping[str, Any]) -> None:
    """Draw points with the same style."""
    point_style = {"zorder": 4, **style}
    point_style.pop("label", None)
    axes.plot(x, y, linestyle="none", clip_on=False, **point_style)


def chosen_label(search: SearchRecord) -> str:
    """Return the name of the highlighted trials in legends: `chosen`, `winner` or `leading`."""
    if len(search.phases) > 1:
        return "chosen"
    if search.winner:
        return "winner"
    return "leading"


def legend_entries(search: SearchRecord, trials: Sequence[Trial]) -> list[Line2D]:
    """Return legend entries: one per status of the trials, and one for the chosen trials."""
    statuses = {trial["status"] for trial in trials}
    entries = []
    for status, style in STATUS_STYLES.items():
        if status in statuses:
            entries.append(legend_entry(**style))
    if search.chosen():
        entries.append(legend_entry(chosen_label(search), **STAR))
    return entries


def format_accuracy_axis(axes: Axes, search: SearchRecord) -> str:
    """Format a y axis of scores (see `SearchRecord.standing`).

    Scores are accuracies in per cent. With several phases they are differences from the best of the
    phase, in percentage points.

    Returns:
        Label of the axis.
    """
    if len(search.phases) > 1:
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.3g}"))
        return "points behind the best of the task"
    axes.yaxis.set_major_formatter(PER_CENT)
    return "validation accuracy"


# ---- parameters ----------------------------------------------------------------------------------
def spread_positions(parameter: Parameter, trials: Sequence[Trial], width: float) -> list[float]:
    """Return the positions of trials on the axis of a parameter.

    Trials with the same category are spread over `width` around it, so that they do not overlap.
    """
    positions = [parameter.position(trial) for trial in trials]
    if not parameter.categories:
        return positions
    indices_by_position: dict[float, list[int]] = {}
    for index, position in enumerate(positions):
        indices_by_position.setdefault(position, []).append(index)
    for indices in indices_by_position.values():
        if len(indices) == 1:
            continue
        for order, index in enumerate(indices):
            share = order / (len(indices) - 1)  # from 0 to 1
            positions[index] += width * (share - 0.5)
    return positions


def axis_ticks(parameter: Parameter) -> list[tuple[float, str]]:
    """Return (position, label) of the ticks of an axis.

    Ticks are the categories, or, for numbers, both ends and round values between them.
    """
    if parameter.categories:
        return list(enumerate(map(_short_category, parameter.categories)))
    low = parameter.low
    high = parameter.high
    locator: Locator = MaxNLocator(4)
    if parameter.log:
        locator = LogLocator(numticks=6)
    candidates = map(float, locator.tick_values(low, high))
    inner = [value for value in candidates if low < value < high]
    # Labels closer to an end would overlap the label of the end.
    values = [value for value in inner if 0.09 < parameter.axis_share(value) < 0.91]
    values += [low, high]
    return [(value, f"{value:.3g}") for value in sorted(values)]


def _short_category(name: str) -> str:
    if len(name) <= 14:
        return name
    return f"{name[:13]}…"


def wrap_name(name: str, width: int) -> str:
    """Wrap a dotted name after dots and underscores into lines of about `width` characters."""
    lines = textwrap.wrap(name.replace(".", ". ").replace("_", "_ "), width)
    return "\n".join(line.replace(". ", ".").replace("_ ", "_") for line in lines)


def draw_parallel(search: SearchRecord, varied: Sequence[Parameter]) -> Figure:
    """Draw parallel coordinates: one line per trial, through its settings to its accuracy.

    Chosen trials are on top.
    """
    standing = search.standing()
    chosen = set(search.chosen().values())

    def drawing_order(trial: Trial) -> tuple[bool, bool, float, int]:
        trial_id = trial["number"]
        return trial_id in standing, trial_id in chosen, standing.get(trial_id, 0), trial_id

    trials = sorted(search.trials, key=drawing_order)
    scale = _accuracy_scale(trials, standing)
    low = min([*standing.values(), scale.vmin or 0.0])
    high = max([*standing.values(), scale.vmax or 0.0])
    # The accuracy is drawn as the last axis, like the axis of a parameter. The lines of trials
    # without an accuracy end before this axis.
    accuracy = Parameter("", "accuracy", "", "", (), low=low, high=high)
    figure, (axes,) = new_figure(10.4, 4.6)
    lines = _line_heights(varied, trials)
    for trial, heights in zip(trials, lines, strict=True):
        style = _line_style(trial, standing, chosen, scale, len(trials))
        if trial["number"] in standing:
            heights.append(accuracy.axis_share(standing[trial["number"]]))
        axes.plot(range(len(heights)), heights, solid_capstyle="round", **style)
    lowest = 0.0
    for x, parameter in enumerate(varied):
        is_absent = any(parameter.key not in trial["params"] for trial in trials)
        if is_absent:
            lowest = ABSENT
        _draw_axis(axes, x, axis_ticks(parameter), parameter, is_absent)
    axes.set_xlim(-0.15, len(varied) + 0.45)
    axes.set_ylim(lowest - 0.06, 1.06)
    names = [parameter.name for parameter in varied]
    if len(search.phases) > 1:
        unit = ""
        names.append("behind the best")
    else:
        unit = " %"
        names.append("accuracy")
    ticks = [(value, f"{100 * value:.3g}{unit}") for value, _ in axis_ticks(accuracy)]
    _draw_axis(axes, len(varied), ticks, accuracy, is_absent=False)
    _name_axes(axes, names)
    bar = figure.colorbar(ScalarMappable(scale, DARK), ax=axes, fraction=0.03, pad=0.02)
    bar.outline.set_visible(False)
    bar.ax.tick_params(labelsize=8)
    bar.set_label(format_accuracy_axis(bar.ax, search), fontsize=8.5)
    add_legend(figure, _line_legend(search, standing))
    return figure


def _name_axes(axes: Axes, names: Sequence[str]) -> None:
    """Write the names above the parallel axes, and hide the frame."""
    columns = 15
    font_size = 9.0
    if len(names) > 8:
        columns = 11
        font_size = 7.5
    wrapped_names = [wrap_name(name, columns) for name in names]
    axes.set_xticks(range(len(names)), wrapped_names, fontsize=font_size)
    axes.xaxis.tick_top()
    axes.tick_params(length=0)
    axes.set_yticks([])
    axes.spines[:].set_visible(False)


def _accuracy_scale(trials: Sequence[Trial], standing: Mapping[int, float]) -> Normalize:
    """Return the colour scale of accuracies.

    The scale covers the finished trials, or all trials if none is finished.
    """
    numbers = [trial["number"] for trial in trials if trial["status"] == "finished"]
    finished = [standing[number] for number in numbers if number in standing]
    accuracies = finished or list(standing.values()) or [0.0]
    low = min(accuracies)
    return Normalize(low, max(max(accuracies), low + 0.01), clip=True)


def _line_heights(varied: Sequence[Parameter], trials: Sequence[Trial]) -> list[list[float]]:
    """Return for each trial its heights on the parallel axes, in the order of the parameters."""
    lines: list[list[float]] = [[] for _ in trials]
    for parameter in varied:
        positions = spread_positions(parameter, trials, 0.5)
        for heights, position in zip(lines, positions, strict=True):
            if math.isnan(position):
                heights.append(ABSENT)
            else:
                heights.append(parameter.axis_share(position))
    return lines


def _line_style(
    trial: Trial,
    standing: Mapping[int, float],
    chosen: Collection[int],
    scale: Normalize,
    num_trials: int,
) -> Style:
    """Return the style of a trial's line. Lines are fainter if there are many trials."""
    if trial["number"] not in standing:
        return {"color": FAINT, "linewidth": 0.9, "linestyle": ":", "alpha": 0.8}
    style: Style = {
        "color": DARK(scale(standing[trial["number"]])),
        "linewidth": 1.5,
        "linestyle": "-",
        "alpha": 0.85,
    }
    if num_trials > 150:
        style["alpha"] = 0.3
    elif num_trials > 50:
        style["alpha"] = 0.5
    if trial["status"] != "finished":
        style |= {"linewidth": 1.0, "linestyle": "--"}
    if trial["number"] in chosen:
        style |= {"color": WINNER, "linewidth": 3.2, "alpha": 1, "zorder": 4}
    return style


def _line_legend(search: SearchRecord, standing: Mapping[int, float]) -> list[Line2D]:
    """Return the legend entries for the lines of `draw_parallel`."""
    statuses = {trial["status"] for trial in search.trials if trial["number"] in standing}
    dark = DARK(0.7)
    entries = []
    if search.chosen():
        label = chosen_label(search)
        entries.append(legend_entry(label, color=WINNER, linewidth=3.2, linestyle="-"))
    if "finished" in statuses:
        entries.append(legend_entry("finished", color=dark, linewidth=1.5, linestyle="-"))
    if statuses - {"finished"}:
        entries.append(legend_entry("not all tasks", color=dark, linewidth=1.0, linestyle="--"))
    if len(standing) < len(search.trials):
        label = "failed, or no accuracy"
        entries.append(legend_entry(label, color=FAINT, linewidth=0.9, linestyle=":"))
    return entries


def _draw_axis(
    axes: Axes,
    x: float,
    ticks: Sequence[tuple[float, str]],
    parameter: Parameter,
    is_absent: bool,
) -> None:
    """Draw a vertical axis with ticks.

    Args:
        axes: Axes to draw on.
        x: Horizontal position of the axis.
        ticks: Pairs of position and label.
        parameter: Parameter of the axis.
        is_absent: Whether a trial does not have the parameter.
    """
    axes.plot([x, x], [0, 1], color=INK, linewidth=0.9, zorder=3)
    box = {"boxstyle": "square,pad=0.12", "facecolor": "white", "edgecolor": "none", "alpha": 0.75}
    labels = [(parameter.axis_share(position), label) for position, label in ticks]
    if is_absent:
        labels.append((ABSENT, "- (none)"))
    for y, label in labels:
        axes.plot([x - 0.012, x + 0.012], [y, y], color=INK, linewidth=0.9, zorder=3)
        axes.text(x + 0.03, y, label, fontsize=8, va="center", color=INK, zorder=5, bbox=box)


def draw_importance(shares: Mapping[str, float], names: Mapping[str, str]) -> Figure:
    """Draw the importance of each parameter (see `measure_importance`), largest on top.

    Args:
        shares: Key of a parameter -> importance, largest first.
        names: Key of a parameter -> displayed name.
    """
    keys = list(shares)[::-1]
    figure, (axes,) = new_figure(7.2, 0.9 + 0.36 * max(len(keys), 2))
    title = "Importance of parameters"
    style_axes(axes, title, "variance in accuracy that it explains, of the sum over all", grid="x")
    axes.barh(range(len(keys)), [shares[key] for key in keys], height=0.62, color=FINISHED)
    for y, key in enumerate(keys):
        share = shares[key]
        axes.text(share, y, f" {100 * share:.0f} %", va="center", fontsize=9, color=INK)
    axes.set_xlim(0, 1.15 * max(shares.values()))
    axes.set_yticks(range(len(keys)), [names[key] for key in keys], fontsize=9.5)
    axes.tick_params(axis="y", length=0)
    axes.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    return figure


def draw_slices(search: SearchRecord, varied: Sequence[Parameter]) -> Figure:
    """Draw accuracy against each parameter, one panel per parameter."""
    standing = search.standing()
    trials = [trial for trial in search.trials if trial["number"] in standing]
    columns = min(3, len(varied))
    rows = -(-len(varied) // columns)
    width = max(4.6, 3.45 * columns)
    figure, panels = new_figure(width, 0.6 + 2.5 * rows, rows, columns, sharey=True)
    for index, (axes, parameter) in enumerate(zip(panels, varied, strict=False)):
        name = parameter.name
        if len(name) > 34:
            name = f"…{name[-33:]}"
        style_axes(axes, name, grid="both")
        y_label = format_accuracy_axis(axes, search)
        if index % columns == 0:
            axes.set_ylabel(y_label, fontsize=9, color=INK)
        _draw_slice(axes, parameter, search, trials)
        _scale_slice(axes, parameter)
    for axes in panels[len(varied) :]:
        axes.set_visible(False)
    add_legend(figure, legend_entries(search, trials))
    return figure


def _draw_slice(
    axes: Axes, parameter: Parameter, search: SearchRecord, trials: Sequence[Trial]
) -> None:
    """Draw the points of the trials that have the parameter."""
    standing = search.standing()
    positions = {}
    for trial, x in zip(trials, spread_positions(parameter, trials, 0.5), strict=True):
        if not math.isnan(x):
            positions[trial["number"]] = x
    members = [trial for trial in trials if trial["number"] in positions]
    for group in group_by_style(members, set(search.chosen().values())):
        numbers = list(map(trial_number, group.trials))
        xs = [positions[number] for number in numbers]
        ys = [standing[number] for number in numbers]
        draw_points(axes, xs, ys, group.style)


def _scale_slice(axes: Axes, parameter: Parameter) -> None:
    """Set limits and ticks of the x axis of a slice."""
    if parameter.categories:
        axes.set_xlim(-0.6, len(parameter.categories) - 0.4)
        label_tasks(axes, parameter.categories, "x")
        return
    if parameter.log:
        axes.set_xscale("log")
        axes.xaxis.set_minor_formatter(NullFormatter())
    ticks = axis_ticks(parameter)
    values, labels = zip(*ticks, strict=True)
    axes.set_xticks(values, labels)
    if parameter.log:
        factor = (parameter.high / parameter.low) ** 0.05
        axes.set_xlim(parameter.low / factor, parameter.high * factor)
    else:
        margin = 0.05 * (parameter.high - parameter.low)
        axes.set_xlim(parameter.low - margin, parameter.high + margin)


# ---- progress ------------------------------------------------------------------------------------
def draw_history(search: SearchRecord) -> Figure:
    """Draw accuracy by trial number, and the highest accuracy of finished trials so far.

    Failed trials and trials without an accuracy are at the bottom.
    """
    standing = search.standing()
    figure, (axes,) = new_figure(10.4, 3.6)
    style_axes(axes, "", "trial", "validation accuracy")
    scores = [score(trial) for trial in search.trials if trial["number"] in standing]
    scores = scores or [0.0, 1.0]
    highest = max(scores)
    floor = min(scores) - 0.12 * max(highest - min(scores), 0.02)
    spans = []
    for phase in search.phases:
        members = search.of(phase)
        _draw_highest(axes, members)
        if members:
            numbers = list(map(trial_number, members))
            spans.append((min(numbers) - 0.5, max(numbers) + 0.5, phase))
    for group in group_by_style(search.trials, set(search.chosen().values())):
        xs = list(map(trial_number, group.trials))
        ys = np.full(len(xs), floor)
        for index, trial in enumerate(group.trials):
            if trial["number"] in standing:
                ys[index] = score(trial)
        draw_points(axes, xs, ys, group.style)
    if len(spans) > 1:
        mark_spans(axes, spans)
    axes.set_ylim(floor, highest + 0.14 * max(highest - floor, 0.02))
    axes.set_xlim(search.trials[0]["number"] - 0.6, search.trials[-1]["number"] + 0.6)
    axes.xaxis.set_major_locator(MaxNLocator(12, integer=True))
    axes.yaxis.set_major_formatter(PER_CENT)
    line: Style = {"color": FINISHED, "linewidth": 1.6, "alpha": 0.6, "linestyle": "-"}
    entries = legend_entries(search, search.trials)
    add_legend(figure, [*entries, legend_entry("highest so far", **line)])
    return figure


def _draw_highest(axes: Axes, trials: Sequence[Trial]) -> None:
    """Draw the highest accuracy of finished trials so far. Draw nothing without finished trials."""
    finished = [trial for trial in trials if has_score(trial)]
    if finished:
        xs = list(map(trial_number, finished))
        highest = np.maximum.accumulate(list(map(score, finished)))
        xs.append(trials[-1]["number"])
        ys = [*highest, highest[-1]]
        axes.step(xs, ys, where="post", color=FINISHED, linewidth=1.6, alpha=0.6)


def draw_trial_curves(search: SearchRecord) -> Figure:
    """Draw average validation accuracy after each task, one line per trial."""
    chosen = set(search.chosen().values())
    names: dict[int, str] = {}
    for trial in search.trials:
        for result in trial["results"]:
            names[result["position"]] = str(result.get("task", result["position"]))
    positions = sorted(names)
    figure, (axes,) = new_figure(10.4, 3.9)
    style_axes(axes, "", "after learning", "average validation accuracy so far")
    trials = [trial for trial in search.trials if trial["results"]]
    trials.sort(key=lambda trial: (trial["number"] in chosen, trial["status"] == "finished"))
    alpha = 0.7 if len(trials) <= 50 else 0.3
    for trial in trials:
        xs = [positions.index(result["position"]) for result in trial["results"]]
        ys = [as_number(result.get("accuracy")) for result in trial["results"]]
        style = STATUS_STYLES[trial["status"]]
        if trial["number"] in chosen:
            axes.plot(xs, ys, color=WINNER, linewidth=3, zorder=5)
        else:
            axes.plot(xs, ys, color=style["color"], linewidth=1.3, alpha=alpha)
        if trial["status"] != "finished":
            draw_points(axes, xs[-1], ys[-1], style)
    axes.yaxis.set_major_formatter(PER_CENT)
    axes.set_xlim(-0.2, max(len(positions) - 0.8, 0.2))
    label_tasks(axes, [names[position] for position in positions], "x")
    statuses = {trial["status"] for trial in trials}
    entries = []
    for status, style in STATUS_STYLES.items():
        if status in statuses:
            marker = "" if status == "finished" else style["marker"]
            entries.append(legend_entry(**{**style, "marker": marker, "linestyle": "-"}))
    if chosen:
        label = chosen_label(search)
        entries.append(legend_entry(label, color=WINNER, linewidth=3, linestyle="-"))
    add_legend(figure, entries)
    return figure


# ---- size ----------------------------------------------------------------------------------------
def sizes_differ(search: SearchRecord) -> bool:
    """Return whether finished trials store different numbers of bytes."""
    sizes = set()
    for trial in search.trials:
        if has_score(trial) and not math.isnan(size(trial)):
            sizes.add(size(trial))
    return len(sizes) > 1


def draw_front(search: SearchRecord) -> Figure:
    """Draw accuracy against bytes (log scale) of finished trials, with the Pareto front.

    Each phase has a separate front.
    """
    figure, (axes,) = new_figure(7.2, 4.4)
    style_axes(axes, "", "bytes stored per task (log scale)", "validation accuracy", grid="both")
    axes.set_xscale("log")
    chosen = search.chosen()
    colours: Sequence[Any] = [FINISHED]
    has_phases = len(search.phases) > 1
    if has_phases:
        colours = list(task_colours(len(search.phases)))
    front: list[Trial] = []
    drawn: list[Trial] = []
    for phase, colour in zip(search.phases, colours, strict=True):
        trials = [t for t in search.of(phase) if has_score(t) and size(t) > 0]
        front_numbers = pareto(trials)
        phase_front = []
        dominated = []
        for trial in trials:
            if trial["number"] in front_numbers:
                phase_front.append(trial)
            else:
                dominated.append(trial)
        phase_front.sort(key=lambda trial: (size(trial), score(trial), trial["number"]))
        dominated_colour = colour if has_phases else FAINT
        _draw_dominated(axes, dominated, dominated_colour)
        _draw_phase_front(axes, phase_front, colour, phase)
        best_trial = search.trial(chosen.get(phase))
        if best_trial is not None and size(best_trial) > 0:
            draw_points(axes, size(best_trial), score(best_trial), STAR)
        front += phase_front
        drawn += trials
    if drawn:
        _fit_front(axes, drawn)
    if len(front) <= 15:
        for trial in front:
            _write_number(axes, trial)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: format_bytes(value)))
    left, right = axes.get_xlim()
    if right / left > 30:
        axes.xaxis.set_minor_formatter(NullFormatter())
    else:
        axes.xaxis.set_minor_formatter(FuncFormatter(_format_minor_bytes))
    axes.tick_params(which="minor", labelsize=8, colors=INK, length=2)
    axes.yaxis.set_major_formatter(PER_CENT)
    handles, _ = axes.get_legend_handles_labels()
    if chosen:
        handles.append(legend_entry(chosen_label(search), **STAR))
    add_legend(figure, handles, columns=4)
    return figure


def _draw_dominated(axes: Axes, trials: Sequence[Trial], colour: Any) -> None:
    """Draw the trials that are not on the Pareto front."""
    if trials:
        style: Style = {"marker": "o", "markersize": 5, "color": colour, "alpha": 0.45}
        sizes = list(map(size, trials))
        axes.plot(sizes, list(map(score, trials)), linestyle="none", **style)


def _draw_phase_front(axes: Axes, front: Sequence[Trial], colour: Any, phase: str) -> None:
    if front:
        style: Style = {"marker": "o", "markersize": 6.5, "color": colour, "linewidth": 1.6}
        style["drawstyle"] = "steps-post"
        style["label"] = phase or "front: nothing is better in both"
        axes.plot(list(map(size, front)), list(map(score, front)), **style)


def _fit_front(axes: Axes, trials: Sequence[Trial]) -> None:
    """Set the limits of both axes so that all trials are visible."""
    xs = list(map(size, trials))
    ys = list(map(score, trials))
    axes.set_xlim(min(xs) / 1.25, max(xs) * 1.35)
    margin = 0.12 * max(max(ys) - min(ys), 0.02)
    axes.set_ylim(min(ys) - margin, max(ys) + margin)


def _write_number(axes: Axes, trial: Trial) -> None:
    """Write a trial's number to the top left of the point, away from the line of the front."""
    axes.annotate(
        str(trial["number"]),
        (size(trial), score(trial)),
        (-5, 5),
        textcoords="offset points",
        ha="right",
        fontsize=9,
        color=INK,
    )


def _format_minor_bytes(value: float, _: int | None) -> str:
    """Return a label for minor ticks whose value starts with 2, 3 or 5; "" for other ticks."""
    first_digit = f"{value:.0e}"[0]
    if first_digit in "235":
        return format_bytes(value)
    return ""
