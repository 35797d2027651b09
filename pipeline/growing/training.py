"""Describe which tasks each method of a run trains, and how long the training may take."""

from __future__ import annotations

import math

from pipeline.app.prepared import RunPlan
from pipeline.graph.stage import Graph
from pipeline.launch import cost
from workers.methods import METHODS


def describe_training(plan: RunPlan) -> list[str]:
    """Return a line for each method that trains: its tasks, and how they depend on each other.

    A line about the backbone comes first if it is trained on images of the base task. In a star,
    each task is trained independently. In a chain, and for methods that train on the data of all
    tasks so far, later tasks are trained again, too. Before ingest, it is unknown which tasks have
    changed images, so the result is one line that says so.
    """
    run, todo = plan.run, plan.stages_to_run
    if any(run.graph[stage].is_provisional for stage in todo):
        return [
            "which tasks train again follows from their images: `accrete ingest CONFIG` finds out"
        ]
    lines: list[str] = []
    has_base_task = any(task.role == "base" for task in run.config.stream.tasks)
    if "backbone" in todo and has_base_task:
        lines.append("  the backbone, which is trained on images of the base task")
    for label, entry in run.config.methods.items():
        tasks = _find_tasks(run.graph, label, todo)
        if not tasks:
            continue
        method = METHODS[entry.method]
        reason = "each by itself"
        if method.carries:
            reason = "a chain: each task continues from the previous one"
        elif method.trains_on == "seen":
            reason = "each on the images of all tasks so far"
        lines.append(f"  {label} trains {', '.join(tasks)} ({reason})")
    return lines


def describe_cost(plan: RunPlan) -> str:
    """Describe the expected wall time of a run, or return "" without an estimate."""
    forecast = plan.forecast()
    if not forecast.costs:
        return ""
    row = cost.make_label_row(forecast, "together")
    if math.isnan(row["wall_hours"]):
        return ""
    return f"forecast of the training: {cost.format_range(row, 'wall_hours')}"


def _find_tasks(graph: Graph, label: str, todo: set[str]) -> list[str]:
    """Return the names of the tasks that a method will train, in order."""
    stages = [stage for stage in graph if stage.id in todo and stage.method == label]
    return list(dict.fromkeys(s.task for s in stages if s.task and s.step != "evaluate"))
