"""Draw a graph of stages: as text for the terminal, and as SVG for pages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from typing import NamedTuple

from pipeline.graph.stage import Graph, Stage

# Colours of boxes, by the state of the stage. The states are those of several sources: `hit` and
# `miss` of a plan, `pending` and `done` of a report, and those of `results.runs.StageStatus` for a
# run, most of which are of type `live_status.StageState`.
COLOURS = {
    "hit": "#cfe8d5",
    "reused": "#cfe8d5",
    "done": "#cfe0f5",
    "running": "#fff2a8",
    "queued": "#fff9d9",
    "miss": "#fde3c8",
    "missing": "#fde3c8",
    "interrupted": "#fde3c8",
    "pending": "#eeeeee",
    "waiting": "#eeeeee",
    "failed": "#f6c6c6",
    "blocked": "#ead7ea",
}
OTHER_COLOUR = "#eeeeee"  # of a stage without a state
# all sizes are in pixels
BOX_W = 128
BOX_H = 36
TIME_H = 14  # extra height of a box with a duration
LEGEND_H = 24
LEGEND_W = 84  # width of one state in the legend
GAP_X = 46
GAP_Y = 10
MARGIN = 12
MAX_LETTERS = 20  # per line of a box
MAX_CLEAR = 120  # number of stages; the arrows of a larger graph are faint
FAINT = 0.4  # opacity of faint arrows


def to_text(graph: Graph, status: Mapping[str, str]) -> str:
    """Return a line for the shared stages and a line per method; `*` marks stages that will run.

    In the line of a method, the name of a task stands for its training stage, and `task/step` for
    another stage of the task. `->` means that the next stage waits for the previous one, as in a
    chain. `|` means that it does not, as in a star.

    Args:
        graph: The graph.
        status: State of each stage, by id.
    """
    shared = [stage for stage in graph if stage.method is None and stage.step != "report"]
    marked_ids = [f"{stage.id}{_star(stage, status)}" for stage in shared]
    rows: dict[str, list[Stage]] = {}
    for stage in graph:
        if stage.method:
            rows.setdefault(_make_row_label(stage), []).append(stage)
    width = max(map(len, ["shared", *rows]))
    lines = [f"{'shared'.ljust(width)}   {'  '.join(marked_ids)}"]
    for name, stages in rows.items():
        lines.append(f"{name.ljust(width)}   {_method_line(stages, status)}")
    return "\n".join(lines)


def _make_row_label(stage: Stage) -> str:
    """Return the label of a stage's method, with the replica of the stage in front."""
    return "/".join(filter(None, (stage.replica, stage.method)))


def _method_line(stages: Sequence[Stage], status: Mapping[str, str]) -> str:
    """Return the line of a method: its training stages in order, and its number of evaluations."""
    line = ""
    previous: Stage | None = None
    evaluations = 0
    to_run = 0
    for stage in stages:
        if stage.step == "evaluate":
            evaluations += 1
            if status.get(stage.id) == "miss":
                to_run += 1
            continue
        if previous is not None:
            line += " -> " if previous.id in stage.parents else " | "
        line += str(stage.task)
        if stage.step != "train":
            line += f"/{stage.step}"
        line += _star(stage, status)
        previous = stage
    line += f"   + {evaluations} evaluate"
    if to_run:
        line += f" ({to_run} to run)"
    return line


def _star(stage: Stage, status: Mapping[str, str]) -> str:
    return "*" if status.get(stage.id) == "miss" else ""


class Corner(NamedTuple):
    """The upper left corner of a box, in pixels."""

    x: int
    y: int


def to_svg(
    graph: Graph,
    status: Mapping[str, str],
    times: Mapping[str, str] | None = None,
    links: Mapping[str, str] | None = None,
) -> str:
    """Return an SVG with a box per stage, coloured by its state.

    The column of a stage is the length of the longest path to it.

    Args:
        graph: The graph.
        status: State of each stage, by id.
        times: Duration of stages as text, by id.
        links: URL that a click on the box of a stage opens, by id.
    """
    times = times or {}
    links = links or {}
    box_h = BOX_H + TIME_H if times else BOX_H
    states = [state for state in COLOURS if state in set(status.values())]
    top = MARGIN + LEGEND_H if states else MARGIN
    corners = _corners(graph, box_h, top)
    width = max((corner.x for corner in corners.values()), default=0) + BOX_W + MARGIN
    width = max(width, 2 * MARGIN + LEGEND_W * len(states))
    height = max((corner.y for corner in corners.values()), default=0) + box_h + MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" '
        'font-family="system-ui, sans-serif" font-size="11">'
    ]
    opacity = FAINT if len(graph) > MAX_CLEAR else 1
    parts.append(f'<g fill="none" stroke="#a8a8a8" stroke-opacity="{opacity}">')
    for stage in graph:
        # omit the arrow from a parent that is also a parent of another parent: the arrows via the
        # other parent imply it
        implied: set[str] = set()
        for parent in stage.parents:
            implied.update(graph[parent].parents)
        drawn_parents = [parent for parent in stage.parents if parent not in implied]
        end = corners[stage.id]
        parts += [_arrow_svg(corners[parent], end, box_h) for parent in drawn_parents]
    parts.append("</g>")
    for stage in graph:
        box = _box_svg(
            stage, corners[stage.id], status.get(stage.id, ""), times.get(stage.id), box_h
        )
        if stage.id in links:
            box = f'<a href="{escape(links[stage.id])}">{box}</a>'
        parts.append(box)
    parts += [_legend_svg(state, index) for index, state in enumerate(states)]
    parts.append("</svg>")
    return "".join(parts)


def _legend_svg(state: str, index: int) -> str:
    """Return an item of the legend: a dot in the colour of a state, and the name of the state.

    Args:
        state: The state.
        index: Position of the item in the legend.
    """
    x = MARGIN + index * LEGEND_W
    y = MARGIN
    return (
        f'<circle cx="{x + 6}" cy="{y + 6}" r="6" fill="{COLOURS[state]}" stroke="#888"/>'
        f'<text class="key" x="{x + 17}" y="{y + 10}" fill="#777">{escape(state)}</text>'
    )


def _arrow_svg(start: Corner, end: Corner, box_h: int) -> str:
    """Return a curve from the right side of one box to the left side of another."""
    x1 = start.x + BOX_W
    y1 = start.y + box_h / 2
    x2 = end.x
    y2 = end.y + box_h / 2
    middle = (x1 + x2) / 2
    return f'<path d="M{x1} {y1} C{middle} {y1} {middle} {y2} {x2} {y2}"/>'


def _box_svg(stage: Stage, corner: Corner, state: str, time: str | None, box_h: int) -> str:
    """Return the box of a stage, with its task, its method and step, and its duration."""
    x, y = corner
    colour = COLOURS.get(state, OTHER_COLOUR)
    middle = x + BOX_W / 2
    upper = _shorten_middle(stage.task or stage.id.removeprefix("data/"))
    lower = _shorten_middle(stage.step)
    if stage.method:
        lower = _shorten_middle(f"{stage.method} · {stage.step}")
    title = " ".join(filter(None, (stage.id, stage.key[:12], state, time)))
    time_text = ""
    if time:
        time_text = (
            f'<text x="{middle}" y="{y + 43}" text-anchor="middle" fill="#555" font-size="10">'
            f"{escape(time)}</text>"
        )
    return (
        f"<g><title>{escape(title)}</title>"
        f'<rect x="{x}" y="{y}" width="{BOX_W}" height="{box_h}" rx="5" fill="{colour}" '
        'stroke="#888"/>'
        f'<text x="{middle}" y="{y + 15}" text-anchor="middle" fill="#111">{escape(upper)}</text>'
        f'<text x="{middle}" y="{y + 29}" text-anchor="middle" '
        f'fill="#555">{escape(lower)}</text>{time_text}</g>'
    )


def _shorten_middle(text: str) -> str:
    if len(text) <= MAX_LETTERS:
        return text
    half = MAX_LETTERS // 2
    return text[:half] + "…" + text[1 - half :]


def _corners(graph: Graph, box_h: int, margin_top: int) -> dict[str, Corner]:
    """Return the corner of each stage's box, by id.

    The column is the length of the longest path to the stage. The methods are drawn below each
    other. Stages of one method in the same column are drawn below each other, too.

    Args:
        graph: The graph.
        box_h: Height of a box in pixels.
        margin_top: Space above the first row in pixels.
    """
    depth: dict[str, int] = {}
    stages_by_row: dict[str, list[Stage]] = {}
    for stage in graph:
        depth[stage.id] = max((depth[parent] + 1 for parent in stage.parents), default=0)
        row_name = _make_row_label(stage) if stage.method else ""
        stages_by_row.setdefault(row_name, []).append(stage)
    method_columns = {depth[stage.id] for stage in graph if stage.method}
    corners: dict[str, Corner] = {}
    top = 0  # first row of the current method
    for stages in stages_by_row.values():
        used_rows: Counter[int] = Counter()  # number of rows that the method uses, by column
        for stage in stages:
            column = depth[stage.id]
            row = top + used_rows[column]
            used_rows[column] += 1
            x = MARGIN + column * (BOX_W + GAP_X)
            y = margin_top + row * (box_h + GAP_Y)
            corners[stage.id] = Corner(x, y)
        # shared stages in a column without method stages do not move the methods down
        if stages[0].method is None:
            used_rows = Counter({column: used_rows[column] for column in method_columns})
        top += max(used_rows.values(), default=0)
    return corners
