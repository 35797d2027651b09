"""Pictures of a graph: as text for the terminal, as SVG for pages."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

from pipeline.graph.stage import Graph, Stage

COLOURS = {"hit": "#cfe8d5", "miss": "#fde3c8", "failed": "#f6c6c6", "done": "#cfe0f5"}
# pixels
BOX_W = 128
BOX_H = 36
GAP_X = 46
GAP_Y = 10
MARGIN = 12
MOST_LETTERS = 20  # that fit into a box


def to_text(graph: Graph, status: Mapping[str, str]) -> str:
    """Return one line per method: its tasks, and `*` beside each stage that will run.

    `->` joins a task to the next when the next waits for it (a chain), `|` when it does not (a
    star).
    """
    lines = []
    shared = [s for s in graph if s.method is None and s.step != "report"]
    lines.append("shared   " + "  ".join(f"{s.id}{_star(s, status)}" for s in shared))
    labels = list(dict.fromkeys(s.method for s in graph if s.method))
    width = max((len(label) for label in labels), default=0)
    for label in labels:
        steps = [s for s in graph if s.method == label and s.step != "evaluate"]
        text, before = "", None
        for stage in steps:
            name = stage.task if stage.step == "train" else f"{stage.task}/{stage.step}"
            joint = "" if before is None else (" -> " if before.id in stage.parents else " | ")
            text += f"{joint}{name}{_star(stage, status)}"
            before = stage
        evaluated = [s for s in graph if s.method == label and s.step == "evaluate"]
        to_run = sum(status.get(s.id) == "miss" for s in evaluated)
        lines.append(
            f"{label:<{width}}   {text}   + {len(evaluated)} evaluate"
            + (f" ({to_run} to run)" if to_run else "")
        )
    return "\n".join(lines)


def _star(stage: Stage, status: Mapping[str, str]) -> str:
    return "*" if status.get(stage.id) == "miss" else ""


def to_svg(graph: Graph, status: Mapping[str, str]) -> str:
    """Return an SVG with a column per depth and a box per stage: green stands, orange will run."""
    depth: dict[str, int] = {}
    for stage in graph:
        depth[stage.id] = max((depth[p] + 1 for p in stage.parents), default=0)
    rows = _rows(graph, depth)
    corners: dict[str, tuple[int, int]] = {}  # stage -> x, y of the upper left corner of its box
    for stage_id, column in depth.items():
        x = MARGIN + column * (BOX_W + GAP_X)
        y = MARGIN + rows[stage_id] * (BOX_H + GAP_Y)
        corners[stage_id] = (x, y)
    width = max(x for x, _ in corners.values()) + BOX_W + MARGIN
    height = max(y for _, y in corners.values()) + BOX_H + MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" '
        'font-family="system-ui, sans-serif" font-size="11">'
    ]
    for stage in graph:
        x2, y2 = corners[stage.id]
        implied: set[str] = set()  # an arrow that follows from two others is left out
        for parent in stage.parents:
            implied.update(graph[parent].parents)
        for parent in stage.parents:
            if parent in implied:
                continue
            left, upper_edge = corners[parent]
            x1 = left + BOX_W
            y1 = upper_edge + BOX_H / 2
            mid = (x1 + x2) / 2
            parts.append(
                f'<path d="M{x1} {y1} C{mid} {y1} {mid} {y2 + BOX_H / 2} {x2} {y2 + BOX_H / 2}" '
                'fill="none" stroke="#b8b8b8"/>'
            )
    for stage in graph:
        x, y = corners[stage.id]
        colour = COLOURS.get(status.get(stage.id, ""), "#eeeeee")
        upper = _short(stage.task or stage.id.removeprefix("data/"))
        lower = _short(f"{stage.method} · {stage.step}" if stage.method else stage.step)
        parts.append(
            f"<g><title>{escape(stage.id)} {stage.key[:12]} "
            f"{escape(status.get(stage.id, ''))}</title>"
            f'<rect x="{x}" y="{y}" width="{BOX_W}" height="{BOX_H}" rx="5" fill="{colour}" '
            'stroke="#888"/>'
            f'<text x="{x + BOX_W / 2}" y="{y + 15}" text-anchor="middle">{escape(upper)}</text>'
            f'<text x="{x + BOX_W / 2}" y="{y + 29}" text-anchor="middle" '
            f'fill="#555">{escape(lower)}</text></g>'
        )
    return "".join(parts) + "</svg>"


def _short(text: str) -> str:
    if len(text) <= MOST_LETTERS:
        return text
    half = MOST_LETTERS // 2
    return text[:half] + "…" + text[1 - half :]


def _rows(graph: Graph, depth: Mapping[str, int]) -> dict[str, int]:
    """A box keeps its row free in its column: methods below each other, tasks below each other
    inside a method."""
    rows: dict[str, int] = {}
    top = 0
    groups: dict[str | None, list[Stage]] = {}
    for stage in graph:
        groups.setdefault(stage.method, []).append(stage)
    for group, members in groups.items():
        used: dict[int, int] = {}
        for stage in members:
            column = depth[stage.id]
            rows[stage.id] = top + used.get(column, 0)
            used[column] = used.get(column, 0) + 1
        top += max(used.values()) if group is not None else 0
    return rows
