"""A discrete-event simulation of a cluster with the real graph, walk and queue.

Each node has one worker group. Nothing sleeps and nothing is trained: each stage has a duration
drawn in advance, and `poll` moves a virtual clock to the next event.
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
from pipeline.launch.queue import Queue, Rank, ReadyStage
from workers.job import StageJob


class Span(NamedTuple):
    """One attempt of a stage. how: its outcome, `done`, `failed`, `final` or `lost`."""

    stage: str
    group: int
    begin: float
    end: float
    how: str


@dataclass(frozen=True)
class FailureModel:
    """The failures of a simulation.

    life_s: mean seconds until a node dies. away_s: seconds until it is back. failing: share of the
    attempts that raise an error. doomed: stages that fail permanently. slow: share of the nodes
    that run at half speed.
    """

    life_s: float = math.inf
    away_s: float = 60.0
    failing: float = 0.0
    doomed: frozenset[str] = frozenset()
    slow: float = 0.0


@dataclass
class Cluster:
    """An executor that simulates a cluster.

    seconds: duration of each stage on a node of full speed, by stage id. A retried stage
    continues from its last checkpoint.
    """

    nodes: int
    seconds: dict[str, float]
    seed: int = 0
    failures: FailureModel = field(default_factory=FailureModel)
    checkpoint_s: float = 10.0

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.queue = Queue()
        self.outbox: list[ReadyStage] = []
        self.driver_events: list[Event] = []  # events of stages that run in the driver
        self.now = 0.0  # seconds on the virtual clock
        self.serial = itertools.count()  # orders callbacks that are due at the same time
        self.callbacks: list[tuple[float, int, Callable[[], None]]] = []  # a heap, by time
        self.speed: list[float] = []
        for _ in range(self.nodes):
            is_slow = self.rng.random() < self.failures.slow
            self.speed.append(0.5 if is_slow else 1.0)
        # number of deaths of each node; callbacks from before a death have no effect
        self.lives = [0] * self.nodes
        # group -> stage, its start time, seconds of work from earlier attempts
        self.running: dict[int, tuple[Stage, float, float]] = {}
        self.saved: dict[str, float] = {}  # stage -> seconds of work in its checkpoint
        self.spans: list[Span] = []
        self.idle = list(range(self.nodes))
        for node in range(self.nodes):
            self._expect_death(node)

    # ---- the interface to the driver -------------------------------------------------------------
    def submit(self, stage: Stage, depth: int) -> None:
        """Queue a stage for a worker group; run ingest and report stages in the driver."""
        if isinstance(stage.job, StageJob):
            self.outbox.append(ReadyStage(depth, stage))
        else:
            self._at(
                self.seconds[stage.id],
                lambda: self._end_beside(stage, self.now - self.seconds[stage.id]),
            )

    def poll(self) -> list[Event]:
        """Move the clock until there are events, and return them; the driver never waits."""
        while True:
            outbox = self.outbox
            self.outbox = []
            events, _ = self.queue.offer(outbox)
            events = events + self.driver_events
            self.driver_events = []
            if outbox:
                self._wake()
            if events:
                return events
            self.now, _, callback = heapq.heappop(self.callbacks)
            callback()

    def close(self) -> None:
        """Close the queue."""
        self.queue.close()

    # ---- events on the nodes ---------------------------------------------------------------------
    def _at(self, after_s: float, callback: Callable[[], None]) -> None:
        heapq.heappush(self.callbacks, (self.now + after_s, next(self.serial), callback))

    def _wake(self) -> None:
        """Let idle groups ask for stages in random order until the queue is empty."""
        self.rng.shuffle(self.idle)
        asking = self.idle
        self.idle = []
        while asking and any(self.queue.ready.values()):
            group = asking.pop()
            if not self._ask(group):
                self.idle.append(group)
        self.idle += asking

    def _ask(self, group: int) -> bool:
        stage = self.queue.next_stage(group)
        if not isinstance(stage, Stage):
            return False
        saved = self.saved.get(stage.id, 0.0)
        life = self.lives[group]
        duration = (self.seconds[stage.id] - saved) / self.speed[group]
        if stage.id in self.failures.doomed:
            how = "final"
        elif self.rng.random() < self.failures.failing:
            how = "failed"
        else:
            how = "done"
        self.running[group] = stage, self.now, saved
        if how != "done":
            duration *= self.rng.random()
        self._at(duration, lambda: self._end(group, life, how))
        return True

    def _end(self, group: int, life: int, how: str) -> None:
        if self.lives[group] != life:
            return
        stage = self._stop(group, how)
        event = Event(EventKind.DONE, stage.id)
        if how != "done":
            event = Event(EventKind.FAILED, stage.id, "it broke", final=how == "final")
        self.queue.post(group, event)
        # a worker asks at once, before the driver reads that the stage has ended
        if not self._ask(group):
            self.idle.append(group)

    def _stop(self, group: int, how: str) -> Stage:
        stage, begin, saved = self.running.pop(group)
        worked = (self.now - begin) * self.speed[group]
        self.saved[stage.id] = saved + worked // self.checkpoint_s * self.checkpoint_s
        self.spans.append(Span(stage.id, group, begin, self.now, how))
        return stage

    def _end_beside(self, stage: Stage, begin: float) -> None:
        self.spans.append(Span(stage.id, -1, begin, self.now, "done"))
        self.driver_events.append(Event(EventKind.DONE, stage.id))

    def _expect_death(self, node: int) -> None:
        if self.failures.life_s < math.inf:
            self._at(self.rng.expovariate(1 / self.failures.life_s), lambda: self._die(node))

    def _die(self, node: int) -> None:
        self.lives[node] += 1
        if node in self.running:
            self._stop(node, "lost")
            # In half of the cases the trainer dies with its node. Otherwise it runs on another
            # node, and its new workers ask again.
            if self.rng.random() < 0.5:
                self.queue.abandon(node, "its node is gone")
        else:
            self.idle.remove(node)
        self._at(self.failures.away_s, lambda: self._return(node))

    def _return(self, node: int) -> None:
        self._expect_death(node)
        self.queue.join(node, [Rank(str(node))])
        if not self._ask(node):
            self.idle.append(node)


# ---- graphs and durations ------------------------------------------------------------------------
def graph(
    folder: Path, tasks: int, stars: int, chains: int, in_steps: int
) -> tuple[Store, Graph, Any]:
    """Return the store, the graph and the config of a stream of tasks with many methods.

    tasks: number of tasks. stars, chains: number of methods of this form. in_steps: number of
    chains with three steps per task.
    """
    card = stream.draw_images(folder, 2 * tasks, train=1, test=1, sides=(16,))
    kinds = ["linear"] * stars + ["finetune"] * chains + ["packnet"] * in_steps
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


def draw_durations(graph: Graph, seed: int, stragglers: float = 0.01) -> dict[str, float]:
    """Return the seconds of each stage, by stage id.

    Training takes 20 to 200 s, or five times as long for a straggler. An evaluation takes a quarter
    of that, and a stage without a method takes 5 s.
    """
    rng = random.Random(seed)
    seconds = {}
    for stage in graph:
        training_s = rng.uniform(20, 200)
        if rng.random() < stragglers:
            training_s *= 5
        if stage.step == "evaluate":
            seconds[stage.id] = training_s / 4
        else:
            seconds[stage.id] = training_s if stage.method else 5.0
    return seconds


def makespan_bound(graph: Graph, seconds: dict[str, float], nodes: int) -> float:
    """Return a lower bound of the makespan in seconds.

    It is the longest path through the graph, or all work divided by the number of nodes if that is
    longer.
    """
    end: dict[str, float] = {}
    for stage in graph:
        end[stage.id] = seconds[stage.id] + max((end[p] for p in stage.parents), default=0.0)
    work = sum(seconds[stage.id] for stage in graph if isinstance(stage.job, StageJob))
    return max(*end.values(), work / nodes)
