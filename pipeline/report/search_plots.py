"""Figures of a search: trials as lines over all parameters, what matters, how it went, accuracy
against size, against tasks, against each parameter."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LinearSegmentedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import (
    FuncFormatter,
    LogLocator,
    MaxNLocator,
    NullFormatter,
    PercentFormatter,
)

from pipeline.report.parameters import Parameter
from pipeline.report.plots import (
    COLOURS,
    FAINT,
    INK,
    SEQUENTIAL,
    format_bytes,
    label_tasks,
    mark_spans,
    new_figure,
    style_axes,
    task_colours,
)
from pipeline.results.trials import Search, Trial, as_number, pareto, score, size

WINNER, FINISHED, STOPPED = COLOURS[1], COLOURS[0], "#7a8087"
# where an axis shows trials that do not have its parameter; its values lie from 0 to 1
ABSENT = -0.16
# pale lines would be lost on white
DARK = LinearSegmentedColormap.from_list(
    "dark", matplotlib.colormaps[SEQUENTIAL](np.linspace(0.3, 1, 64))
)
PER_CENT = FuncFormatter(lambda share, _: f"{100 * share:.4g}%")
LOOKS: dict[str, dict[str, Any]] = {  # of a point, by status
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
STAR: dict[str, Any] = {
    "marker": "*",
    "color": WINNER,
    "markeredgecolor": "white",
    "markersize": 16,
    "zorder": 6,
}


def add_legend(figure: Figure, handles: Sequence[Any], columns: int = 6) -> None:
    if handles:
        figure.legend(
            handles=list(handles),
            loc="outside lower center",
            ncols=min(len(handles), columns),
            fontsize=9,
            frameon=False,
        )


def legend_entry(label: str, **style: Any) -> Line2D:
    """An entry of a legend."""
    return Line2D([], [], linestyle=style.pop("linestyle", "none"), label=label, **style)


def group_by_style(
    trials: Sequence[Trial], chosen: Collection[int]
) -> list[tuple[dict[str, Any], list[Trial]]]:
    """(look of their points, trials) by status, of those that there are; trials that stand out come
    last, on top."""
    found = [
        (look, [t for t in trials if t["status"] == status and t["number"] not in chosen])
        for status, look in LOOKS.items()
    ]
    return [
        (look, members)
        for look, members in [*found, (STAR, [t for t in trials if t["number"] in chosen])]
        if members
    ]


def draw_points(axes: Axes, x: Any, y: Any, look: Mapping[str, Any]) -> None:
    """A point, or several that look the same."""
    axes.plot(
        x,
        y,
        linestyle="none",
        clip_on=False,
        **{"zorder": 4, **{k: v for k, v in look.items() if k != "label"}},
    )


def chosen_label(search: Search) -> str:
    """What the trials are that stand out."""
    return "chosen" if len(search.phases) > 1 else "winner" if search.winner else "leading"


def legend_entries(search: Search, trials: Sequence[Trial]) -> list[Line2D]:
    met = {t["status"] for t in trials}
    found = [legend_entry(**look) for status, look in LOOKS.items() if status in met]
    return found + ([legend_entry(chosen_label(search), **STAR)] if search.chosen() else [])


def format_accuracy_axis(axes: Axes, search: Search, which: str = "y") -> str:
    """Writes shares as per cent, or where trials stand in their phase as points. Returns what the
    axis shows."""
    axis = axes.yaxis if which == "y" else axes.xaxis
    if len(search.phases) > 1:
        axis.set_major_formatter(FuncFormatter(lambda v, _: f"{100 * v:.3g}"))
        return "points behind the best of the task"
    axis.set_major_formatter(PER_CENT)
    return "validation accuracy"


# ---- parameters ----------------------------------------------------------------------------------
def axis_share(p: Parameter, place: float) -> float:
    """A place on the axis of a parameter as a share of its length."""
    if p.categories:
        return (place + 0.5) / len(p.categories)
    low, high, at = (math.log(v) if p.log else v for v in (p.low, p.high, place))
    return (at - low) / (high - low)


def spread_positions(p: Parameter, trials: Sequence[Trial], width: float) -> list[float]:
    """Places of trials. Those of one category are spread over `width` around it in the given order,
    so that none hides another."""
    places = [p.place(t) for t in trials]
    if not p.categories:
        return places
    members: dict[float, list[int]] = {}
    for i, place in enumerate(places):
        members.setdefault(place, []).append(i)
    for together in members.values():
        for order, i in enumerate(together):
            places[i] += (
                width * (order / max(len(together) - 1, 1) - 0.5) if len(together) > 1 else 0
            )
    return places


def axis_ticks(p: Parameter) -> list[tuple[float, str]]:
    """(place, label) along the axis of a parameter: the categories, or both ends and round numbers
    between them."""
    if p.categories:
        return [(i, c if len(c) <= 14 else c[:13] + "…") for i, c in enumerate(p.categories)]
    inner = (
        LogLocator(numticks=6).tick_values(p.low, p.high)
        if p.log
        else MaxNLocator(4).tick_values(p.low, p.high)
    )
    found = [p.low, p.high]
    found += [
        v
        for v in map(float, inner)
        if p.low < v < p.high
        and all(abs(axis_share(p, v) - axis_share(p, end)) > 0.09 for end in (p.low, p.high))
    ]
    return [(v, f"{v:.3g}") for v in sorted(found)]


def wrap_name(name: str, width: int) -> str:
    """A dotted name on several lines, broken behind dots and underlines."""
    return "\n".join(
        line.replace(". ", ".").replace("_ ", "_")
        for line in textwrap.wrap(name.replace(".", ". ").replace("_", "_ "), width)
    )


def draw_parallel(search: Search, varied: Sequence[Parameter]) -> Figure:
    """One line per trial through its settings to its accuracy, dark where that is high; the chosen
    ones in the winner's colour on top."""
    standing, chosen = search.standing(), set(search.chosen().values())
    trials = sorted(
        search.trials,
        key=lambda t: (
            t["number"] in standing,
            t["number"] in chosen,
            standing.get(t["number"], 0),
            t["number"],
        ),
    )
    done = (
        [
            standing[t["number"]]
            for t in trials
            if t["status"] == "finished" and t["number"] in standing
        ]
        or list(standing.values())
        or [0.0]
    )
    low, high = min(done), max(max(done), min(done) + 0.01)
    scale = Normalize(low, high, clip=True)
    last = Parameter(
        "",
        "accuracy",
        "",
        "",
        (),
        low=min([*standing.values(), low]),
        high=max([*standing.values(), high]),
    )
    absent = any(p.key not in t["params"] for p in varied for t in trials)
    figure, (axes,) = new_figure(10.4, 4.6)
    heights = [
        [
            ABSENT if math.isnan(place) else axis_share(p, place)
            for place in spread_positions(p, trials, 0.5)
        ]
        for p in varied
    ]
    faded = 0.85 if len(trials) <= 50 else 0.5 if len(trials) <= 150 else 0.3
    for index, t in enumerate(trials):
        line = [h[index] for h in heights]
        style: dict[str, Any] = {"color": FAINT, "linewidth": 0.9, "linestyle": ":", "alpha": 0.8}
        if t["number"] in standing:
            line.append(axis_share(last, standing[t["number"]]))
            style = {
                "color": DARK(scale(standing[t["number"]])),
                "linewidth": 1.5,
                "linestyle": "-",
                "alpha": faded,
            }
            if t["status"] != "finished":
                style |= {"linewidth": 1.0, "linestyle": "--"}
            if t["number"] in chosen:
                style |= {"color": WINNER, "linewidth": 3.2, "alpha": 1, "zorder": 4}
        axes.plot(range(len(line)), line, solid_capstyle="round", **style)
    for x, p in enumerate([*varied, last]):
        draw_axis(
            axes,
            x,
            p,
            absent and any(p.key and p.key not in t["params"] for t in trials),
            len(search.phases) > 1,
        )
    axes.set_xlim(-0.15, len(varied) + 0.45)
    axes.set_ylim((ABSENT if absent else 0) - 0.06, 1.06)
    names = ["behind the best" if len(search.phases) > 1 else "accuracy"]  # of the last axis
    axes.set_xticks(
        range(len(varied) + 1),
        [
            wrap_name(name, 15 if len(varied) < 8 else 11)
            for name in [*(p.name for p in varied), *names]
        ],
        fontsize=9 if len(varied) < 8 else 7.5,
    )
    axes.xaxis.tick_top()
    axes.tick_params(length=0)
    axes.set_yticks([])
    axes.spines[:].set_visible(False)
    bar = figure.colorbar(ScalarMappable(scale, DARK), ax=axes, fraction=0.03, pad=0.02)
    bar.outline.set_visible(False)
    bar.ax.tick_params(labelsize=8)
    bar.set_label(format_accuracy_axis(bar.ax, search), fontsize=8.5)
    met = {t["status"] for t in trials if t["number"] in standing}
    add_legend(
        figure,
        [
            *(
                [legend_entry(chosen_label(search), color=WINNER, linewidth=3.2, linestyle="-")]
                if chosen
                else []
            ),
            *(
                [legend_entry("finished", color=DARK(0.7), linewidth=1.5, linestyle="-")]
                if "finished" in met
                else []
            ),
            *(
                [legend_entry("not all tasks", color=DARK(0.7), linewidth=1.0, linestyle="--")]
                if met - {"finished"}
                else []
            ),
            *(
                [legend_entry("failed, or no accuracy", color=FAINT, linewidth=0.9, linestyle=":")]
                if len(standing) < len(trials)
                else []
            ),
        ],
    )
    return figure


def draw_axis(axes: Axes, x: float, p: Parameter, absent: bool, points: bool) -> None:
    """One upright axis with its ticks; `absent`: it also shows a place for trials without the
    parameter."""
    axes.plot([x, x], [0, 1], color=INK, linewidth=0.9, zorder=3)
    box = {"boxstyle": "square,pad=0.12", "facecolor": "white", "edgecolor": "none", "alpha": 0.75}
    places = [
        (axis_share(p, place), label if p.key else f"{100 * place:.3g}{'' if points else ' %'}")
        for place, label in axis_ticks(p)
    ]
    for y, label in [*places, *([(ABSENT, "- (none)")] if absent else [])]:
        axes.plot([x - 0.012, x + 0.012], [y, y], color=INK, linewidth=0.9, zorder=3)
        axes.text(x + 0.03, y, label, fontsize=8, va="center", color=INK, zorder=5, bbox=box)


def draw_importance(shares: Mapping[str, float], names: Mapping[str, str]) -> Figure:
    """Bars: what share of the differences in accuracy each parameter explains, the largest on
    top."""
    keys = list(shares)[::-1]
    figure, (axes,) = new_figure(7.2, 0.9 + 0.36 * max(len(keys), 2))
    style_axes(
        axes,
        "Importance of parameters",
        "share of the differences in accuracy that it explains",
        grid="x",
    )
    axes.barh(range(len(keys)), [shares[k] for k in keys], height=0.62, color=FINISHED)
    for y, key in enumerate(keys):
        axes.text(shares[key], y, f" {100 * shares[key]:.0f} %", va="center", fontsize=9, color=INK)
    axes.set_xlim(0, 1.15 * max(shares.values()))
    axes.set_yticks(range(len(keys)), [names[k] for k in keys], fontsize=9.5)
    axes.tick_params(axis="y", length=0)
    axes.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    return figure


def draw_slices(search: Search, varied: Sequence[Parameter]) -> Figure:
    """Accuracy against each parameter by itself."""
    standing, chosen = search.standing(), set(search.chosen().values())
    trials = [t for t in search.trials if t["number"] in standing]
    columns = min(3, len(varied))
    rows = -(-len(varied) // columns)
    figure, panels = new_figure(
        max(4.6, 3.45 * columns), 0.6 + 2.5 * rows, rows, columns, sharey=True
    )
    for index, (axes, p) in enumerate(zip(panels, varied, strict=False)):
        style_axes(axes, p.name if len(p.name) <= 34 else "…" + p.name[-33:], grid="both")
        said = format_accuracy_axis(axes, search)
        axes.set_ylabel(said if index % columns == 0 else "", fontsize=9, color=INK)
        at = {
            t["number"]: x
            for x, t in zip(spread_positions(p, trials, 0.5), trials, strict=True)
            if not math.isnan(x)
        }
        for look, members in group_by_style([t for t in trials if t["number"] in at], chosen):
            draw_points(
                axes,
                [at[t["number"]] for t in members],
                [standing[t["number"]] for t in members],
                look,
            )
        if p.categories:
            axes.set_xlim(-0.6, len(p.categories) - 0.4)
            label_tasks(axes, p.categories, "x")
            continue
        if p.log:
            axes.set_xscale("log")
            axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_xticks([v for v, _ in axis_ticks(p)], [label for _, label in axis_ticks(p)])
        margin = (p.high / p.low) ** 0.05 if p.log else 0.05 * (p.high - p.low)
        axes.set_xlim(
            *((p.low / margin, p.high * margin) if p.log else (p.low - margin, p.high + margin))
        )
    for axes in panels[len(varied) :]:
        axes.set_visible(False)
    add_legend(figure, legend_entries(search, trials))
    return figure


# ---- the search over time ------------------------------------------------------------------------
def draw_history(search: Search) -> Figure:
    """Accuracy by number of the trial, the highest so far among finished ones; failed trials and
    those without accuracy at the bottom."""
    compared, chosen = search.standing(), set(search.chosen().values())
    figure, (axes,) = new_figure(10.4, 3.6)
    style_axes(axes, "", "trial", "validation accuracy")
    scores = [score(t) for t in search.trials if t["number"] in compared] or [0.0, 1.0]
    floor = min(scores) - 0.12 * max(max(scores) - min(scores), 0.02)
    for phase in search.phases:
        finished = [
            t for t in search.of(phase) if t["status"] == "finished" and not math.isnan(score(t))
        ]
        if finished:
            at = [*(t["number"] for t in finished), search.of(phase)[-1]["number"]]
            tops = np.maximum.accumulate([score(t) for t in finished])
            axes.step(at, [*tops, tops[-1]], where="post", color=FINISHED, linewidth=1.6, alpha=0.6)
    for look, members in group_by_style(search.trials, chosen):
        draw_points(
            axes,
            [t["number"] for t in members],
            [score(t) if t["number"] in compared else floor for t in members],
            look,
        )
    parts = [
        (min(numbers) - 0.5, max(numbers) + 0.5, phase)
        for phase in search.phases
        if (numbers := [t["number"] for t in search.of(phase)])
    ]
    if len(parts) > 1:
        mark_spans(axes, parts)
    axes.set_ylim(floor, max(scores) + 0.14 * max(max(scores) - floor, 0.02))
    axes.set_xlim(search.trials[0]["number"] - 0.6, search.trials[-1]["number"] + 0.6)
    axes.xaxis.set_major_locator(MaxNLocator(12, integer=True))
    axes.yaxis.set_major_formatter(PER_CENT)
    add_legend(
        figure,
        [
            *legend_entries(search, search.trials),
            legend_entry("highest so far", color=FINISHED, linewidth=1.6, alpha=0.6, linestyle="-"),
        ],
    )
    return figure


def draw_curves(search: Search) -> Figure:
    """Average validation accuracy after each task, one line per trial; those that were stopped end
    early."""
    chosen = set(search.chosen().values())
    names = {
        r["position"]: str(r.get("task", r["position"]))
        for t in search.trials
        for r in t["results"]
    }
    places = {position: x for x, position in enumerate(sorted(names))}
    figure, (axes,) = new_figure(10.4, 3.9)
    style_axes(axes, "", "after learning", "average validation accuracy so far")
    shown = [t for t in search.trials if t["results"]]
    faded = 0.7 if len(shown) <= 50 else 0.3
    for t in sorted(shown, key=lambda t: (t["number"] in chosen, t["status"] == "finished")):
        xs, ys = (
            [places[r["position"]] for r in t["results"]],
            [as_number(r.get("accuracy")) for r in t["results"]],
        )
        look = LOOKS[t["status"]]
        if t["number"] in chosen:
            axes.plot(xs, ys, color=WINNER, linewidth=3, zorder=5)
        else:
            axes.plot(xs, ys, color=look["color"], linewidth=1.3, alpha=faded)
        if t["status"] != "finished":
            draw_points(axes, xs[-1], ys[-1], look)
    axes.yaxis.set_major_formatter(PER_CENT)
    axes.set_xlim(-0.2, max(len(places) - 0.8, 0.2))
    label_tasks(axes, [names[position] for position in places], "x")
    met = {t["status"] for t in shown}
    handles = [
        legend_entry(
            **(
                look
                | ({"marker": "", "linestyle": "-"} if status == "finished" else {"linestyle": "-"})
            )
        )
        for status, look in LOOKS.items()
        if status in met
    ]
    add_legend(
        figure,
        handles
        + (
            [legend_entry(chosen_label(search), color=WINNER, linewidth=3, linestyle="-")]
            if chosen
            else []
        ),
    )
    return figure


def sizes_differ(search: Search) -> bool:
    """Whether finished trials keep different numbers of bytes."""
    return (
        len(
            {
                size(t)
                for t in search.trials
                if t["status"] == "finished" and not math.isnan(size(t) + score(t))
            }
        )
        > 1
    )


def draw_front(search: Search) -> Figure:
    """Accuracy against bytes of finished trials (log scale); those that nothing beats in both are
    joined, phase by phase."""
    figure, (axes,) = new_figure(7.2, 4.4)
    phases, chosen = search.phases, search.chosen()
    style_axes(axes, "", "bytes kept per task (log scale)", "validation accuracy", grid="both")
    axes.set_xscale("log")
    named, everything = [], []
    for phase, colour in zip(
        phases, task_colours(len(phases)) if len(phases) > 1 else [FINISHED], strict=True
    ):
        trials = [
            t
            for t in search.of(phase)
            if t["status"] == "finished" and not math.isnan(score(t)) and size(t) > 0
        ]
        on = set(pareto(trials))
        line = sorted((size(t), score(t), t["number"]) for t in trials if t["number"] in on)
        others = [(size(t), score(t)) for t in trials if t["number"] not in on]
        if others:
            axes.plot(
                *zip(*others, strict=True),
                linestyle="none",
                marker="o",
                markersize=5,
                color=colour if len(phases) > 1 else FAINT,
                alpha=0.45,
            )
        if line:
            axes.plot(
                [x for x, _, _ in line],
                [y for _, y, _ in line],
                marker="o",
                markersize=6.5,
                color=colour,
                linewidth=1.6,
                drawstyle="steps-post",
                label=phase or "front: nothing is better in both",
            )
        if (best := search.trial(chosen.get(phase))) is not None and size(best) > 0:
            draw_points(axes, size(best), score(best), STAR)
        named += line
        everything += [(x, y) for x, y, _ in line] + others
    if everything:
        xs, ys = zip(*everything, strict=True)
        axes.set_xlim(min(xs) / 1.25, max(xs) * 1.35)
        margin = 0.12 * max(max(ys) - min(ys), 0.02)
        axes.set_ylim(min(ys) - margin, max(ys) + margin)
    for x, y, which in (
        named if len(named) <= 15 else []
    ):  # top left of its point: the front passes below and to the right
        axes.annotate(
            str(which),
            (x, y),
            (-5, 5),
            textcoords="offset points",
            ha="right",
            fontsize=9,
            color=INK,
        )
    axes.xaxis.set_major_formatter(FuncFormatter(lambda v, _: format_bytes(v)))
    decades = axes.get_xlim()[1] / axes.get_xlim()[0] > 30
    axes.xaxis.set_minor_formatter(
        NullFormatter()
        if decades
        else FuncFormatter(lambda v, _: format_bytes(v) if f"{v:.0e}"[0] in "235" else "")
    )
    axes.tick_params(which="minor", labelsize=8, colors=INK, length=2)
    axes.yaxis.set_major_formatter(PER_CENT)
    handles, _ = axes.get_legend_handles_labels()
    add_legend(
        figure,
        handles + ([legend_entry(chosen_label(search), **STAR)] if chosen else []),
        columns=4,
    )
    return figure
