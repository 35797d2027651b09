"""Pictures of a graph: as text for the terminal, as SVG for pages."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

from pipeline.graph.stage import Graph, Stage

COLOURS = {"hit": "#cfe8d5", "miss": "#fde3c8", "failed": "#f6c6c6", "done": "#cfe0f5"}
BOX_W, BOX_H, GAP_X, GAP_Y = 128, 36, 46, 10
MOST_LETTERS = 20  # that fit into a box


def to_text(graph: Graph, status: Mapping[str, str]) -> str:
    """One line per method: its tasks joined by `->` where one waits for the other (a chain), by `|`
    where none does (a star). `*` marks a stage that will run."""
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
    """Columns by depth, a row of boxes for each method and task; green stands, orange will run."""
    depth: dict[str, int] = {}
    for stage in graph:
        depth[stage.id] = max((depth[p] + 1 for p in stage.parents), default=0)
    rows = _rows(graph, depth)
    place = {i: (12 + depth[i] * (BOX_W + GAP_X), 12 + rows[i] * (BOX_H + GAP_Y)) for i in depth}
    width = max(x for x, _ in place.values()) + BOX_W + 12
    height = max(y for _, y in place.values()) + BOX_H + 12
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" '
        'font-family="system-ui, sans-serif" font-size="11">'
    ]
    for stage in graph:
        x2, y2 = place[stage.id]
        implied = {
            above for parent in stage.parents for above in graph[parent].parents
        }  # an arrow that follows from two others is left out
        for parent in stage.parents:
            if parent in implied:
                continue
            x1, y1 = place[parent][0] + BOX_W, place[parent][1] + BOX_H / 2
            mid = (x1 + x2) / 2
            parts.append(
                f'<path d="M{x1} {y1} C{mid} {y1} {mid} {y2 + BOX_H / 2} {x2} {y2 + BOX_H / 2}" '
                'fill="none" stroke="#b8b8b8"/>'
            )
    for stage in graph:
        x, y = place[stage.id]
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
    return (
        text
        if len(text) <= MOST_LETTERS
        else text[: MOST_LETTERS // 2] + "…" + text[1 - MOST_LETTERS // 2 :]
    )


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
