"""The page that lays runs side by side: one HTML file that needs nothing else."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
from numpy.typing import NDArray

from pipeline.report import plots
from pipeline.report.comparison import NUMBERS, Comparison, Entry, Spread
from pipeline.report.figures import Picture
from pipeline.report.page import SOFT, STYLE, format_value, render_picture, render_table

SIDE_BY_SIDE = 4  # matrices in one row of a picture
DIVERGING = "RdBu"  # red: worse than the first, blue: better


def render_page(found: Comparison) -> str:
    """The page as text."""
    names = escape(" ~ ".join(g.name for g in found.groups))
    notes = "".join(f"<li>{escape(note)}</li>" for note in found.notes)
    sections = [
        render_head(found),
        f'<div class="note"><ul>{notes}</ul></div>' if notes else "",
        render_summary(found),
        render_differences(found),
        '<h2 id="tasks">Over the tasks</h2>',
        render_picture(draw_curves(found)),
        '<h2 id="matrices">Accuracy matrices</h2>',
        *map(render_picture, matrix_pictures(found)),
        render_settings(found),
        render_provenance(found),
        render_stages(found),
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" '
        'content="width=device-width, initial-scale=1">'
        f"<title>{names} · "
        f"Accrete</title><style>{STYLE}</style></head><body><main>{''.join(sections)}</main></body></html>"
    )


def render_head(found: Comparison) -> str:
    runs = [run for g in found.groups for run in g.runs.values()]
    links = "".join(
        f'<a href="#{anchor}">{text}</a>'
        for anchor, text in (
            ("summary", "Summary"),
            ("differences", "Differences"),
            ("tasks", "Over the tasks"),
            ("matrices", "Matrices"),
            ("settings", "Settings"),
            ("provenance", "Made with"),
            ("stages", "Shared stages"),
        )
    )
    body = [
        [
            f"<b>{escape(g.name)}</b>",
            escape(", ".join(str(run.record["name"]) for run in g.runs.values())),
            escape(", ".join(map(str, g.runs))),
            escape(", ".join(g.first.labels)),
        ]
        for g in found.groups
    ]
    several = any(len(g.runs) > 1 for g in found.groups)
    says = (
        "Runs that differ in nothing but their seed (and name) are one line below, and their "
        "numbers are given as mean ± standard deviation."
        if several
        else "Each run is one line below."
    )
    return (
        f"<h1>Comparison of {len(runs)} runs</h1><div class=soft>{len(found.groups)} different "
        f"settings · {len(found.tasks)} common tasks: "
        f"{escape(', '.join(found.tasks))}</div><p style='margin-top:14px'>{says} Everything is "
        "read from the results in the store; nothing was trained "
        "for this "
        f"page.</p>{render_table(['settings of', 'runs', 'seeds', 'methods'], body, 4, safe=True)}<nav>{links}</nav>"
    )


# ---- numbers -------------------------------------------------------------------------------------
def number_title(name: str) -> str:
    return name.replace("_", " ")


def column_head(name: str) -> str:
    """The head of a column, a word to a line."""
    return (
        "<th "
        f'title="{escape(NUMBERS[name][0])}">{number_title(name).replace(" per ", " per_").replace(" ", "<br>").replace("_", " ")}</th>'
    )


def format_spread(spread: Spread, kind: str, sign: bool = False) -> str:
    """`61.2 ± 0.4 %` in HTML; with `sign`, a difference, of accuracies in points."""
    if math.isnan(spread.mean):
        return SOFT
    plus = "+" if sign and spread.mean >= 0 else ""
    if kind == "rate":
        spread_of = "" if math.isnan(spread.deviation) else f" ± {100 * spread.deviation:.1f}"
        return f"{plus}{100 * spread.mean:.1f}{spread_of} {'pp' if sign else '%'}".replace(
            "+-0.0", "+0.0"
        ).replace("-0.0 ", "0.0 ")
    text = f"{plus}{format_value(spread.mean, kind)}"
    return (
        text
        if math.isnan(spread.deviation) or spread.deviation == 0
        else f"{text} ± {format_value(spread.deviation, kind)}"
    )


def measured_numbers(entries: Sequence[Entry]) -> list[str]:
    return [name for name in NUMBERS if any(not math.isnan(e.spread(name).mean) for e in entries)]


def render_summary(found: Comparison) -> str:
    names = measured_numbers(found.entries)
    means = {name: [e.spread(name).mean for e in found.entries] for name in names}
    best = {
        name: pick([v for v in means[name] if not math.isnan(v)])
        for name in names
        if (pick := NUMBERS[name][2]) and len(found.entries) > 1
    }
    body = ""
    for e in found.entries:
        cells = "".join(
            f"<td{' class=best' if best.get(name) == e.spread(name).mean else ''}>{format_spread(e.spread(name), NUMBERS[name][1])}</td>"
            for name in names
        )
        body += (
            "<tr><td "
            f"class=left><b>{escape(e.name)}</b></td><td>{len(e.group.runs)}</td>{cells}</tr>"
        )
    titles = "".join(column_head(name) for name in names)
    words = "; ".join(f"<b>{number_title(name)}</b>: {NUMBERS[name][0]}" for name in names)
    return (
        '<h2 id="summary">Summary</h2><p>n: runs with different seeds. The number after ± is '
        "the sample standard deviation over them; where there is "
        "none, one run says nothing about the spread. The best mean of a column is bold, "
        'however small its lead.</p><div class="scroll">'
        '<table class="summary"><tr><th '
        f"class=left>run</th><th>n</th>{titles}</tr>{body}</table></div>"
        f"<details><summary>What the columns mean</summary><p>{words}.</p></details>"
    )


def render_differences(found: Comparison) -> str:
    pairs = [(e, base) for e in found.entries if (base := found.base(e))]
    if not pairs:
        what = (
            "All runs differ in their seed alone"
            if len(found.groups) == 1
            else "The first run has several methods, none of which the others have"
        )
        return (
            f'<h2 id="differences">Differences</h2><p>{what}, so there is nothing to subtract.</p>'
        )
    names = measured_numbers([e for pair in pairs for e in pair])
    body = []
    for e, base in pairs:
        spread = e.against(base, "average_accuracy")
        how = f"{spread.n} pair{'s' * (spread.n != 1)}" if spread.paired else "means"
        cells = [
            how,
            *(format_spread(e.against(base, name), NUMBERS[name][1], sign=True) for name in names),
        ]
        body.append(
            f"<tr><td class=left><b>{escape(e.name)}</b><br><span class=soft>minus "
            f"{escape(base.name)}</span></td>"
            + "".join(f"<td>{cell}</td>" for cell in cells)
            + "</tr>"
        )
    first = escape(found.groups[0].name)
    return (
        f'<h2 id="differences">Differences from {first}</h2><p>Each number minus that of '
        f"<b>{first}</b>, in percentage points (pp) for accuracies. "
        "<b>pairs</b>: runs with the same seed were subtracted from each other, and ± is the "
        "standard deviation of these differences. <b>means</b>: no "
        "seed is common, so the means were subtracted. A difference that is not clearly larger "
        "than its ± may be chance.</p>"
        '<div class="scroll"><table class="summary"><tr><th '
        f"class=left>run</th><th>how</th>{''.join(map(column_head, names))}</tr>{''.join(body)}"
        "</table></div>"
    )


# ---- pictures ------------------------------------------------------------------------------------
def draw_curves(found: Comparison) -> Picture:
    figure, (left, right) = plots.new_figure(10.4, 3.9, 1, 2)
    for axes, number, name in (
        (left, "average_accuracy", "Average accuracy so far"),
        (right, "forgetting", "Forgetting so far"),
    ):
        plots.style_axes(
            axes,
            name,
            "after learning" if found.one_order else "tasks learned, of those that are compared",
        )
        for index, e in enumerate(found.entries):
            steps = min(m.finished for m in e.matrices.values())
            values = np.array(
                [[m.over_time[t][number] for t in range(steps)] for m in e.matrices.values()]
            )
            if steps:
                axes.plot(
                    range(steps),
                    values.mean(0),
                    label=e.name,
                    linewidth=max(1.3, 3.2 - 0.5 * index),
                    markersize=max(4.5, 8 - index),
                    **plots.method_style(index),
                )
                axes.fill_between(
                    range(steps),
                    values.min(0),
                    values.max(0),
                    color=plots.method_style(index)["color"],
                    alpha=0.15,
                    linewidth=0,
                )
        axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        axes.set_xlim(-0.25, max(len(found.tasks) - 0.75, 0.25))
        plots.label_tasks(
            axes,
            found.tasks if found.one_order else [str(t + 1) for t in range(len(found.tasks))],
            "x",
        )
    left.set_ylim(0, 1.02)
    if right.get_ylim()[1] - right.get_ylim()[0] < 0.1:
        right.set_ylim(-0.01, 0.1)
    handles, names = left.get_legend_handles_labels()
    figure.legend(
        handles,
        names,
        loc="outside lower center",
        ncols=min(len(names), 3) or 1,
        fontsize=9,
        frameon=False,
    )
    return Picture(
        "curves.png",
        "Averages after each task",
        "Lines: means over the seeds. Bands: from the lowest to the highest run. A line that "
        "falls on the "
        "left means that new tasks are harder or old ones are lost; one that rises on the right "
        "means forgetting.",
        plots.to_png(figure),
    )


def matrix_pictures(found: Comparison) -> list[Picture]:
    """Heat maps of entries that are compared with the same one, and below them their differences
    from it."""
    families: dict[str, list[Entry]] = {}
    for e in found.entries:
        families.setdefault((found.base(e) or e).name, []).append(e)
    pictures: list[Picture] = []
    for some in families.values():
        base, rest = some[0], some[1:]
        for start in range(0, max(len(rest), 1), SIDE_BY_SIDE - 1):
            part = [base, *rest[start : start + SIDE_BY_SIDE - 1]]
            says = (
                "Row: after learning a task; column: accuracy on a task, in per cent, a mean "
                "over the seeds."
            )
            says += (
                f" Below: minus that of {base.name}, in percentage points; blue is better, red "
                "is worse." * (len(part) > 1)
            )
            names = " beside ".join(e.name for e in part)
            pictures.append(
                Picture(
                    f"matrices-{len(pictures)}.png",
                    names,
                    says,
                    plots.to_png(draw_matrices(part, found.tasks)),
                )
            )
    return pictures


def draw_matrices(entries: Sequence[Entry], tasks: Sequence[str]) -> Figure:
    rows = 1 if len(entries) == 1 else 2
    side = min(max(2.6, 0.5 * len(tasks)), 4.2 if len(entries) <= 2 else 3.2)
    figure, axes = plots.new_figure(
        side * len(entries) + 1.2, rows * (side + 0.9), rows, len(entries)
    )
    base = entries[0].rates(tasks)
    less = [e.rates(tasks) - base for e in entries[1:]]
    most = max([0.05, *(float(np.nanmax(np.abs(d))) for d in less if not np.isnan(d).all())])
    for index, e in enumerate(entries):
        draw_heat_map(
            axes[index], e.rates(tasks), tasks, e.name, plots.SEQUENTIAL, 0.0, 1.0, "{:.0f}"
        )
        if rows == 2 and index:
            draw_heat_map(
                axes[len(entries) + index],
                less[index - 1],
                tasks,
                "minus the first",
                DIVERGING,
                -most,
                most,
                "{:+.1f}",
            )
    if rows == 2:
        axes[len(entries)].set_visible(False)
    return figure


def draw_heat_map(
    axes: Any,
    values: NDArray[np.float64],
    tasks: Sequence[str],
    name: str,
    cmap: str,
    low: float,
    high: float,
    text: str,
) -> None:
    plots.draw_cells(axes, values, cmap, low, high)
    for t, i in np.ndindex(values.shape):
        if not math.isnan(values[t, i]) and len(tasks) <= 12:
            dark = abs(values[t, i]) > 0.65 * max(abs(low), abs(high))
            axes.text(
                i,
                t,
                text.format(100 * values[t, i]),
                ha="center",
                va="center",
                fontsize=plots.text_size(len(tasks)) - 1,
                color="white" if dark else plots.INK,
            )
    plots.style_axes(
        axes,
        name if len(name) <= 26 else name[:25] + "…",
        "accuracy on task",
        "after learning",
        grid=None,
    )
    axes.spines[:].set_visible(False)
    plots.label_tasks(axes, tasks)


# ---- what else differs ---------------------------------------------------------------------------
def render_settings(found: Comparison) -> str:
    return render_differing(
        "settings",
        "Settings that differ",
        found.setting_rows(),
        "Settings that are the same in all runs are left out, as are seed, name, "
        "storage, cluster and tracking, which are listed above or change no result but in its "
        "rounding.",
        "All settings are the same.",
    )


def render_provenance(found: Comparison) -> str:
    return render_differing(
        "provenance",
        "Made with",
        found.provenance_rows(),
        "What the results were made with, where it is not the same: a difference in "
        "the numbers may come from here.",
        "All results were made with the same git commit, package versions and kind of device.",
    )


def render_differing(
    anchor: str, about: str, rows: Sequence[dict[str, Any]], says: str, none: str
) -> str:
    if not rows:
        return f'<h2 id="{anchor}">{about}</h2><p>{none}</p>'
    titles = [name for name in rows[0] if name != "name"]
    body = [
        [
            f"<code>{escape(row['name'])}</code>",
            *(SOFT if row[t] == "absent" else escape(row[t][:120]) for t in titles),
        ]
        for row in rows
    ]
    return (
        "<h2 "
        f'id="{anchor}">{about}</h2><p>{says}</p>{render_table(["", *titles], body, len(titles) + 1, safe=True)}'
    )


def render_stages(found: Comparison) -> str:
    rows = found.stage_rows()
    total = len(
        {
            s["key"]
            for g in found.groups
            for run in g.runs.values()
            for s in run.record["stages"]
            if s["step"] != "report"
        }
    )
    if not rows:
        return (
            f'<h2 id="stages">Shared stages</h2><p>None of the {total} stage results is used by '
            "more than one of these runs.</p>"
        )
    body = [
        [
            f"<code>{escape(row['stage'])}</code>",
            f"<code>{row['key'][:12]}</code>",
            escape(row["runs"]),
        ]
        for row in rows
    ]
    return (
        f'<h2 id="stages">Shared stages</h2><p>{len(rows)} of the {total} stage results are '
        "used by more than one of these runs: they were computed once, "
        "and cannot be what makes the runs "
        f"differ.</p><details{' open' if len(rows) <= 12 else ''}><summary>{len(rows)} "
        "stages</summary>"
        f"{render_table(['stage', 'key', 'runs'], body, 3, safe=True)}</details>"
    )
