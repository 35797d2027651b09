"""Simulate the wall time of a graph whose stages run in parallel worker groups.

The simulation uses the scheduler and the queue of a real run (`Walk`, `ReadyQueue`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush

from pipeline.graph.stage import Graph
from pipeline.graph.walk import Event, EventKind, Walk
from pipeline.launch.queue import ReadyQueue, ReadyStage
from pipeline.launch.sharing import NOT_SHARED, Sharing


@dataclass
class Clock:
    """Simulated clock of parallel stages that run at the same speed.

    It counts seconds of work, not of wall time: stages that share a GPU do less than one second of
    work per second.

    Attributes:
        now: Seconds of work that a stage could have done since the start of the simulation.
        ends: Heap of (value of `now` at which a stage ends, stage id).
        stretch: Seconds of wall time per second of work.
    """

    now: float = 0.0
    ends: list[tuple[float, str]] = field(default_factory=list)
    stretch: float = 1.0

    def start(self, stage_id: str, work_s: float) -> None:
        """Start a stage."""
        heappush(self.ends, (self.now + work_s, stage_id))

    def left_s(self) -> float:
        """Return the wall time in seconds until the next stage ends; infinite if no stage runs."""
        if not self.ends:
            return math.inf
        return max(0.0, self.ends[0][0] - self.now) * self.stretch


def wall_time(
    graph: Graph,
    todo: set[str],
    seconds: Mapping[str, float],
    groups: int,
    sharing: Sharing = NOT_SHARED,
) -> float:
    """Return the seconds until the last stage ends, if groups take stages in the order of a run.

    Args:
        graph: The graph of the run.
        todo: Ids of the stages to run.
        seconds: Stage id -> seconds of the stage if its ranks do not share a GPU. Missing stages
            take no time.
        groups: Number of stages that can run at a time.
        sharing: The stages that share GPUs, and their slowdown.
    """
    walk = Walk.over(graph, [stage.id for stage in graph if stage.id not in todo], retries=0)
    ready = ReadyQueue()
    # one clock for stages with their own GPUs, one for stages that share GPUs
    alone, shared = Clock(), Clock()
    now = 0.0
    while not walk.ended:
        for decision in walk.decide():
            walk.record(decision)
            ready.append(ReadyStage(decision.depth, graph[decision.stage]))
        while len(alone.ends) + len(shared.ends) < groups:
            stage = ready.take()
            if stage is None:
                break
            clock = shared if stage.id in sharing.stages else alone
            clock.start(stage.id, seconds.get(stage.id, 0.0))
        shared.stretch = sharing.stretch(len(shared.ends))
        first = min(alone, shared, key=Clock.left_s)
        passed_s = first.left_s()
        for clock in (alone, shared):
            clock.now += passed_s / clock.stretch
        now += passed_s
        walk.apply(Event(EventKind.DONE, heappop(first.ends)[1]))
    return now
