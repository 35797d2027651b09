"""A cluster on paper: nodes with a worker group each, on a virtual clock, around the real graph,
the real walk and the real queue.

Nothing sleeps and nothing is computed: a stage lasts as long as it was dealt, and `poll` moves the
clock to the next thing that happens.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import stream
from pipeline.graph.stage import Graph, Stage
from pipeline.graph.store import Store
from pipeline.graph.walk import Event, EventKind
from pipeline.launch.queue import Queue, ReadyStage
from workers.job import StageJob


class Span(NamedTuple):
    """One time that a stage ran. how: `done`, `failed` or `lost`."""

    stage: str
    group: int
    begin: float
    end: float
    how: str


@dataclass(frozen=True)
class Weather:
    """What goes wrong. life_s: how long a node lives on average, away_s: how long it is then gone.
    failing: share of the tries that raise an error. doomed: stages that fail for good. slow: share
    of the nodes that have half the speed."""

    life_s: float = math.inf
    away_s: float = 60.0
    failing: float = 0.0
    doomed: frozenset[str] = frozenset()
    slow: float = 0.0


@dataclass
class Cluster:
    """An executor. seconds: how long each stage takes on a node of full speed, by id; a stage that
    is tried again goes on from its last checkpoint."""

    nodes: int
    seconds: dict[str, float]
    seed: int = 0
    weather: Weather = field(default_factory=Weather)
    checkpoint_s: float = 10.0

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.queue, self.outbox, self.own = Queue(), list[ReadyStage](), list[Event]()
        self.now, self.serial = 0.0, itertools.count()
        self.happenings: list[tuple[float, int, Callable[[], None]]] = []
        self.speed = [
            0.5 if self.rng.random() < self.weather.slow else 1.0 for _ in range(self.nodes)
        ]
        # how often each node has died: what a dead node was about to do does not happen
        self.lives = [0] * self.nodes
        self.running: dict[
            int, tuple[Stage, float, float]
        ] = {}  # group -> stage, when it began, what of it was done before
        self.saved: dict[str, float] = {}  # stage -> seconds of work in its checkpoint
        self.spans: list[Span] = []
        self.idle = list(range(self.nodes))
        for node in range(self.nodes):
            self._expect_death(node)

    # ---- what the driver sees --------------------------------------------------------------------
    def submit(self, stage: Stage, depth: int) -> None:
        if isinstance(stage.job, StageJob):
            self.outbox.append(ReadyStage(depth, stage))
        else:  # ingest and the report need no group
            self._at(
                self.seconds[stage.id],
                lambda: self._end_beside(stage, self.now - self.seconds[stage.id]),
            )

    def poll(self) -> list[Event]:
        """The next events, at whatever time they happen: never none, so that the driver never
        waits."""
        while True:
            outbox, self.outbox = self.outbox, []
            events, _ = self.queue.offer(outbox)
            events, self.own = events + self.own, []
            if outbox:
                self._wake()
            if events:
                return events
            self.now, _, happen = heapq.heappop(self.happenings)
            happen()

    def close(self) -> None:
        self.queue.close()

    # ---- what happens on the nodes ---------------------------------------------------------------
    def _at(self, after_s: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self.happenings, (self.now + after_s, next(self.serial), happen))

    def _wake(self) -> None:
        """Idle groups ask, in any order, until there is nothing left."""
        self.rng.shuffle(self.idle)
        asking, self.idle = self.idle, []
        while asking and self.queue.ready:
            group = asking.pop()
            if not self._ask(group):
                self.idle.append(group)
        self.idle += asking

    def _ask(self, group: int) -> bool:
        stage = self.queue.next_stage(group)
        if not isinstance(stage, Stage):
            return False
        saved, life = self.saved.get(stage.id, 0.0), self.lives[group]
        left = (self.seconds[stage.id] - saved) / self.speed[group]
        how = (
            "final"
            if stage.id in self.weather.doomed
            else "failed"
            if self.rng.random() < self.weather.failing
            else "done"
        )
        self.running[group] = stage, self.now, saved
        self._at(
            left if how == "done" else left * self.rng.random(), lambda: self._end(group, life, how)
        )
        return True

    def _end(self, group: int, life: int, how: str) -> None:
        if self.lives[group] != life:
            return
        stage = self._stop(group, how)
        self.queue.post(
            group,
            Event(EventKind.DONE, stage.id)
            if how == "done"
            else Event(EventKind.FAILED, stage.id, "it broke", final=how == "final"),
        )
        if not self._ask(
            group
        ):  # at once, as a worker does: before the driver has heard of the end
            self.idle.append(group)

    def _stop(self, group: int, how: str) -> Stage:
        stage, begin, saved = self.running.pop(group)
        worked = (self.now - begin) * self.speed[group]
        self.saved[stage.id] = saved + worked // self.checkpoint_s * self.checkpoint_s
        self.spans.append(Span(stage.id, group, begin, self.now, how))
        return stage

    def _end_beside(self, stage: Stage, begin: float) -> None:
        self.spans.append(Span(stage.id, -1, begin, self.now, "done"))
        self.own.append(Event(EventKind.DONE, stage.id))

    def _expect_death(self, node: int) -> None:
        if self.weather.life_s < math.inf:
            self._at(self.rng.expovariate(1 / self.weather.life_s), lambda: self._die(node))

    def _die(self, node: int) -> None:
        self.lives[node] += 1
        if node in self.running:
            self._stop(node, "lost")
            if (
                self.rng.random() < 0.5
                # the trainer ends with its node; or it lives elsewhere, and its new workers ask
                # again
            ):
                self.queue.abandon(node, "its node is gone")
        else:
            self.idle.remove(node)
        self._at(self.weather.away_s, lambda: self._return(node))

    def _return(self, node: int) -> None:
        self._expect_death(node)
        self.queue.join(node, [str(node)])
        if not self._ask(node):
            self.idle.append(node)


# ---- graphs and what they take -------------------------------------------------------------------
def graph(
    folder: Path, tasks: int, stars: int, chains: int, in_steps: int
) -> tuple[Store, Graph, Any]:
    """The graph of a config with so many methods: stars, chains, and chains of three steps per
    task. Its config is returned too."""
    card = stream.draw_images(folder, 2 * tasks, train=1, test=1, sides=(16,))
    kinds = [*["linear"] * stars, *["finetune"] * chains, *["packnet"] * in_steps]
    methods = {
        f"{kind}-{i:03d}": {"method": kind, "train": {"lr": 1e-4 * (i + 1)}}
        for i, kind in enumerate(kinds)
    }
    return stream.plan(
        folder,
        card,
        tasks,
        backbone={**stream.tiny()},
        train={"epochs": 1},
        methods=methods,
        data={"val_fraction": 0.0},
    )


def deal(graph: Graph, seed: int, stragglers: float = 0.01) -> dict[str, float]:
    """Seconds by stage: 20 to 200, evaluation a quarter of it; a straggler takes five times as
    long."""
    rng, seconds = random.Random(seed), {}
    for stage in graph:
        long = rng.uniform(20, 200) * (5 if rng.random() < stragglers else 1)
        seconds[stage.id] = long / 4 if stage.step == "evaluate" else long if stage.method else 5.0
    return seconds


def least(graph: Graph, seconds: dict[str, float], nodes: int) -> float:
    """No schedule ends earlier: the longest way through the graph, and all work over all nodes."""
    end: dict[str, float] = {}
    for stage in graph:
        end[stage.id] = seconds[stage.id] + max((end[p] for p in stage.parents), default=0.0)
    return max(
        *end.values(), sum(seconds[s.id] for s in graph if isinstance(s.job, StageJob)) / nodes
    )
