"""Measure what a stage costs the driver and the store in graphs of 100, 1,000 and 10,000 stages.

`python -m benchmarks.scale`; about four minutes. The graph is that of a real config: as many stars
(`linear`) as chains (`finetune`) over 25 tasks; more stages are more methods. The stages do not
run: the executor reports at once that each is done, so all CPU time is the driver's.

The number of tasks does not grow, because an evaluation of a chain measures all tasks so far. Its
job and its key hold T entries after T tasks, so a run holds T*T, as the accuracy matrix does. A
star of 5,000 tasks is noted as well.
"""

from __future__ import annotations

import gc
import io
import statistics
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import stream
from benchmarks.harness import Report, interleave, start
from pipeline.app.garbage import find_garbage
from pipeline.config.settings import Config
from pipeline.graph.build import build_graph
from pipeline.graph.event_log import FILE as EVENTS_FILE
from pipeline.graph.journal import keep_journal
from pipeline.graph.run import Watcher, look_up_all, run_graph
from pipeline.graph.run_log import FILE as LOG_FILE
from pipeline.graph.run_log import RunLog, driver_log
from pipeline.graph.run_record import make_record
from pipeline.graph.stage import Graph, Stage
from pipeline.graph.store import Store
from pipeline.graph.walk import Event, EventKind
from pipeline.launch.time_left import TimeLeftEstimator
from pipeline.shell.console import Console
from workers.storage.artifact import Attempt

TASKS = 25
METHODS = (1, 10, 100)  # stars, and as many chains
STAR_TASKS = 5_000
WATCHED = 0.001  # seconds of driver CPU per stage of a run that is printed, logged and recorded
DRIVER_DEMAND = 0.010  # seconds of driver CPU per stage, all parts together
GROWTH_DEMAND = 1.2  # most that a stage costs in a larger graph, relative to a smaller one
STORE_DEMAND = 1.5  # the same for look-ups of published results: folders of a disk grow too


class Instant:
    """An executor for which every stage is done at once."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def submit(self, stage: Stage, depth: int) -> None:
        body = {"kind": "train", "sizes": {}, "wall_s": 0.0}
        self.events += [
            Event(EventKind.STARTED, stage.id, body={"where": "group 0 on 10.0.0.1"}),
            Event(EventKind.PROGRESS, stage.id, body={"task": stage.task}),
            Event(EventKind.DONE, stage.id, body=body),
        ]

    def poll(self) -> list[Event]:
        events, self.events = self.events, []
        return events

    def close(self) -> None:
        pass


def plan(folder: Path, tasks: int, methods: dict[str, Any]) -> tuple[Store, Graph, Config]:
    """Draw images into a folder and return the graph of a stream over them."""
    card = stream.draw_images(folder, 2 * tasks, train=1, test=1, sides=(16,))
    return stream.plan(folder, card, tasks, backbone={**stream.tiny()}, methods=methods)


def pairs(count: int) -> dict[str, Any]:
    """Return the settings of `count` stars and as many chains; no two stages share a key."""
    methods: dict[str, Any] = {}
    for method in ("linear", "finetune"):
        for i in range(count):
            methods[f"{method}-{i}"] = {"method": method, "train": {"lr": 1e-4 * (i + 1)}}
    return methods


def parts_of(store: Store, graph: Graph, config: Config) -> dict[str, Callable[[], object]]:
    """Return the driver's work for a run without any result in the store, by part.

    A record of an earlier run of the same name exists.
    """
    record = make_record(graph, config, [], {})
    empty = Store(f"{store.storage}-of-nothing")
    lookups = look_up_all(graph, empty, None)

    def walk() -> None:
        outcome = run_graph(
            graph,
            empty,
            lambda todo: Instant(),
            0,
            [Console(graph, lookups, io.StringIO())],
            lookups,
        )
        assert outcome.ran == len(graph)

    return {
        "graph": partial(build_graph, config, store),
        "look-up": partial(look_up_all, graph, empty, record),
        "walk, events, screen": walk,
        "record": lambda: store.save_record(make_record(graph, config, [], {})),
    }


class Observed(NamedTuple):
    """What a run leaves behind. screen, log, events: lines on an output that is not a terminal, in
    driver.log, and in events.jsonl. cpu_s: CPU time of the driver, with that of its threads."""

    screen: int
    log: int
    events: int
    cpu_s: float


def observed_run(store: Store, graph: Graph) -> Observed:
    """Run stages that are done at once, watched as a run is, and count what that leaves behind.

    store: has no result of any stage.
    """
    lookups = look_up_all(graph, store, None)
    output = io.StringIO()
    estimate = TimeLeftEstimator(graph, groups=1)
    began = time.process_time()
    with (
        driver_log(store.storage, graph.name),
        keep_journal(store, graph, lookups, set(graph.stages), "accrete run", estimate) as journal,
    ):
        observers: list[Watcher] = [Console(graph, lookups, output), RunLog(), journal]
        outcome = run_graph(graph, store, lambda todo: Instant(), 0, observers, lookups)
    cpu_s = time.process_time() - began
    assert outcome.ran == len(graph)
    folder = Path(store.storage) / "runs" / graph.name
    return Observed(
        len(output.getvalue().splitlines()),
        len((folder / LOG_FILE).read_text().splitlines()),
        len((folder / EVENTS_FILE).read_text().splitlines()),
        cpu_s,
    )


def note_observed(report: Report, graph: Graph) -> None:
    """Note what a run of a graph prints and logs, and demand that it costs little CPU time."""
    runs: list[Observed] = []
    for _ in range(3):
        with tempfile.TemporaryDirectory() as folder:
            runs.append(observed_run(Store(folder), graph))
    count = len(graph)
    first = runs[0]
    report.note(
        f"a run of {count} stages leaves",
        f"{first.screen} lines on the screen, {first.log} in driver.log, "
        f"{first.events} in events.jsonl",
    )
    cpu_s = statistics.median(run.cpu_s for run in runs) / count
    report.below(f"a run of {count} stages: walk, lines and events, CPU per stage", cpu_s, WATCHED)


def publish(store: Store, graph: Graph) -> None:
    """Publish a result of one file of 1 KiB for every stage."""
    for stage in graph:
        attempt = Attempt(store.root, stage.key)
        attempt.write("task.safetensors", bytes(1024))
        attempt.commit({"kind": "train"})


def measure(
    runs: dict[int, dict[str, Callable[[], object]]], report: Report, what: str
) -> dict[int, float]:
    """Return CPU seconds per stage of all parts together, by number of stages; note the parts."""
    variants: dict[str, Callable[[], object]] = {}
    for stages, parts in runs.items():
        for part, call in parts.items():
            variants[f"{part}, {stages}"] = call
    timing = interleave(variants, rounds=3)
    stage_costs: dict[int, float] = {}
    for stages, parts in runs.items():
        costs = {part: timing.median(f"{part}, {stages}") / stages for part in parts}
        stage_costs[stages] = sum(costs.values())
        report.note(
            f"{what}, {stages} stages, CPU per stage",
            ", ".join(f"{part} {cost * 1000:.3f} ms" for part, cost in costs.items()),
        )
    return stage_costs


def memory(folder: Path, methods: int) -> float:
    """Return bytes per stage at the end of a run.

    They hold the graph with its jobs, the look-ups, the walk and the record.
    """
    gc.collect()
    tracemalloc.start()
    store, graph, config = stream.plan(
        folder, str(folder / "card.yaml"), TASKS, backbone={**stream.tiny()}, methods=pairs(methods)
    )
    lookups = look_up_all(graph, Store(f"{store.storage}-of-nothing"), None)
    record = make_record(graph, config, [], {})
    outcome = run_graph(
        graph, store, lambda todo: Instant(), 0, [Console(graph, lookups, io.StringIO())], lookups
    )
    traced_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert outcome.ran == len(graph) == len(record["stages"])
    return traced_bytes / len(graph)


def demand_flat(
    report: Report, what: str, costs: dict[int, float], demand: float = GROWTH_DEMAND
) -> None:
    """Demand that a stage of the largest graph costs little more than one of the smaller ones."""
    few, some, many = costs
    report.at_most(f"{what}, {many} stages against {few}", costs[many] / costs[few], demand)
    report.at_most(f"{what}, {many} stages against {some}", costs[many] / costs[some], demand)


def main() -> None:
    """Measure CPU time and memory of the driver, and look-ups of the store."""
    start()
    report = Report()
    with tempfile.TemporaryDirectory() as name:
        folders = {methods: Path(name) / str(methods) for methods in METHODS}
        runs = {methods: plan(folder, TASKS, pairs(methods)) for methods, folder in folders.items()}
        cost = measure(
            {len(graph): parts_of(store, graph, config) for store, graph, config in runs.values()},
            report,
            "driver",
        )
        report.below("driver, CPU per stage, most", max(cost.values()), DRIVER_DEMAND)
        note_observed(report, runs[METHODS[1]][1])
        demand_flat(report, "driver, CPU per stage", cost)
        for store, graph, _ in runs.values():
            publish(store, graph)
        lookups: dict[int, dict[str, Callable[[], object]]] = {}
        for store, graph, _ in runs.values():
            look_up = partial(look_up_all, graph, store, None)
            lookups[len(graph)] = {"look-up of published results, verified": look_up}
        cost = measure(lookups, report, "store on a disk")
        demand_flat(report, "store on a disk, CPU of a look-up per stage", cost, STORE_DEMAND)
        measure(
            {
                len(graph): {"listing": partial(find_garbage, store)}
                for store, graph, _ in runs.values()
            },
            report,
            "store on a disk",
        )
        stage_bytes: dict[int, float] = {}
        for methods, folder in folders.items():
            _, graph, _ = runs[methods]
            stage_bytes[len(graph)] = memory(folder, methods)
        for stages, count in stage_bytes.items():
            report.note(f"driver, {stages} stages, memory per stage", f"{count / 1000:.1f} kB")
        demand_flat(report, "driver, memory per stage", stage_bytes)
        store, graph, config = plan(Path(name) / "star", STAR_TASKS, {"linear": {}})
        measure(
            {len(graph): parts_of(store, graph, config)},
            report,
            f"driver, a star of {STAR_TASKS} tasks",
        )
    report.exit()


if __name__ == "__main__":
    main()
