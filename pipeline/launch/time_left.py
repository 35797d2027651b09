"""Estimate the remaining time of a run from its finished stages.

The work of a stage is measured in epochs, and the work of an evaluation in tasks. The seconds per
epoch or task are the median of finished stages of the same method and step, or else of finished
stages of any method in the same step. If a stage is late by more than the remaining time of the
run, the estimate is useless and not returned.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

from pipeline.graph.journal import TimeLeft
from pipeline.graph.live_status import LiveStage
from pipeline.graph.stage import Graph, Stage
from pipeline.launch.wall_time import wall_time

FINISHED = ("done", "reused")  # states of `LiveStage`
ENDED = (*FINISHED, "failed", "blocked")
LEFT_OUT = ("report",)  # steps that take only seconds


class TimeLeftEstimator:
    """Estimates the remaining time of a run; see `estimate_time_left`.

    Args:
        graph: The graph of the run.
        groups: Number of parallel worker groups; 0: the largest number of stages that have run in
            parallel so far.
    """

    def __init__(self, graph: Graph, groups: int):
        self.graph = graph
        self.groups = groups
        self.most_running = 1

    def __call__(self, stages: Mapping[str, LiveStage]) -> TimeLeft:
        """Return the remaining time.

        Args:
            stages: Status of each stage, by id.
        """
        running = [stage for stage in stages.values() if stage["state"] == "running"]
        self.most_running = max(self.most_running, len(running))
        return estimate_time_left(self.graph, stages, self.groups or self.most_running)


def count_units(stage: Stage) -> int:
    """Return the work of a stage: tasks of an evaluation, epochs of a training, or 1."""
    if stage.step == "evaluate":
        return max(1, len(stage.inputs.get("seen") or ()))
    train = stage.inputs.get("train")
    epochs = train.get("epochs") if isinstance(train, Mapping) else None
    return max(1, int(epochs or 1))


def estimate_time_left(
    graph: Graph,
    stages: Mapping[str, LiveStage],
    slots: int,
    clock: Callable[[], float] = time.time,
) -> TimeLeft:
    """Return the remaining time of a run; see `TimeLeft` for when it is unknown.

    Args:
        graph: The graph of the run.
        stages: Status of each stage, by id.
        slots: Number of stages that can run in parallel.
        clock: Returns the time in seconds since 1970 (`time.time`).
    """
    unit_s = _measure_seconds_per_unit(graph, stages)
    todo: set[str] = set()
    seconds: dict[str, float] = {}
    latest_s = 0.0  # delay of the most overdue stage
    without = 0
    for stage in graph:
        live = stages[stage.id]
        if live["state"] in ENDED or stage.step in LEFT_OUT:
            continue
        todo.add(stage.id)
        left_s = _estimate_left(stage, live, unit_s, clock())
        if left_s is None:
            without += 1
        else:
            seconds[stage.id] = max(0.0, left_s)
            latest_s = max(latest_s, -left_s)
    if todo and not seconds:
        return TimeLeft(None, without)
    run_s = wall_time(graph, todo, seconds, max(1, slots))
    if latest_s > run_s:
        return TimeLeft(None, 0)
    return TimeLeft(run_s, without)


def _measure_seconds_per_unit(
    graph: Graph, stages: Mapping[str, LiveStage]
) -> dict[tuple[str | None, str], float]:
    """Return the median seconds per unit of work of finished stages, by (label, step).

    The label None stands for all methods.
    """
    measured: dict[tuple[str | None, str], list[float]] = {}
    for stage in graph:
        live = stages[stage.id]
        wall_s = live.get("wall_s")
        if live["state"] not in FINISHED or not wall_s:
            continue
        for label in {stage.method, None}:
            measured.setdefault((label, stage.step), []).append(wall_s / count_units(stage))
    return {kind: statistics.median(values) for kind, values in measured.items()}


def _estimate_left(
    stage: Stage, live: LiveStage, unit_s: Mapping[tuple[str | None, str], float], now: float
) -> float | None:
    """Return the remaining seconds of a stage; None if no stage of its kind has finished.

    The worker's own estimate (`left_s` in its progress) has priority. Without it, the result is
    negative if the stage already takes longer than expected.
    """
    reported = live.get("progress", {}).get("left_s")
    if live["state"] == "running" and isinstance(reported, (int, float)):
        return max(0.0, float(reported))
    per_unit = unit_s.get((stage.method, stage.step), unit_s.get((None, stage.step)))
    if per_unit is None:
        return None
    expected_s = per_unit * count_units(stage)
    if live["state"] == "running":
        return expected_s - (now - live.get("since", now))
    return expected_s
