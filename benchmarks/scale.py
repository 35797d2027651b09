"""Measure the cost of a stage in the driver and the store, in graphs of 100, 1,000 and 10,000
stages.

Command: `python -m benchmarks.scale`. It takes about four minutes. The graphs are built from real
configs with equal numbers of stars (`linear`) and chains (`finetune`) over 25 tasks. Larger graphs
have more methods. The stages do not run: the executor reports each stage as done at once, so all
CPU time is spent by the driver.

The number of tasks is constant, because an evaluation in a chain covers all tasks so far. Its job
and its key have T entries after T tasks, so a run has T*T entries, like the accuracy matrix. A star
of 5,000 tasks is measured without a requirement.
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
METHODS = (1, 10, 100)  # number of stars, and of chains
STAR_TASKS = 5_000
WATCHED = 0.001  # seconds of driver CPU per stage of a run with console, log and journal
DRIVER_DEMAND = 0.010  # seconds of driver CPU per stage, all parts together
GROWTH_DEMAND = 1.2  # maximum cost of a stage in a larger graph, relative to a smaller graph
STORE_DEMAND = 1.5  # the same for look-ups of published results, because folders on disk grow too


class Instant:
    """An executor that reports every stage as done at once."""

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
    """Write images to a folder and return the graph of a stream over them."""
    card = stream.draw_images(folder, 2 * tasks, train=1, test=1, sides=(16,))
    return stream.plan(folder, card, tasks, backbone={**stream.tiny()}, methods=methods)


def pairs(count: int) -> dict[str, Any]:
    """Return the settings of `count` stars and `count` chains. No two stages share a key."""
    methods: dict[str, Any] = {}
    for method in ("linear", "finetune"):
        for i in range(count):
            methods[f"{method}-{i}"] = {"method": method, "train": {"lr": 1e-4 * (i + 1)}}
    return methods


def list_parts(store: Store, graph: Graph, config: Config) -> dict[str, Callable[[], object]]:
    """Return functions for the parts of the driver's work in a run with an empty store.

    A record of an earlier run with the same name exists.
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
    """Output and CPU time of a run.

    Attributes:
        screen: Lines on an output that is not a terminal.
        log: Lines in driver.log.
        events: Lines in events.jsonl.
        cpu_s: CPU seconds of the driver with its threads.
    """

    screen: int
    log: int
    events: int
    cpu_s: float


def observed_run(store: Store, graph: Graph) -> Observed:
    """Run stages that are done at once, with the watchers of a real run, and count their output.

    Args:
        store: A store without results of the stages.
        graph: The graph.
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
    """Report how many lines a run of a graph prints and logs, and check its CPU time per stage."""
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
    """Publish a result with one file of 1 KiB for every stage."""
    for stage in graph:
        attempt = Attempt(store.root, stage.key)
        attempt.write("task.safetensors", bytes(1024))
        attempt.commit({"kind": "train"})


def measure(
    runs: dict[int, dict[str, Callable[[], object]]], report: Report, what: str
) -> dict[int, float]:
    """Measure CPU seconds per stage, and report them by part.

    Args:
        runs: Number of stages -> function for each part.
        report: The report.
        what: Name of the measurement.

    Returns:
        Number of stages -> CPU seconds per stage of all parts together.
    """
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

    They include the graph with its jobs, the look-ups, the walk and the record.
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
    """Check that a stage of the largest graph costs little more than in each smaller graph."""
    few, some, many = costs
    report.at_most(f"{what}, {many} stages against {few}", costs[many] / costs[few], demand)
    report.at_most(f"{what}, {many} stages against {some}", costs[many] / costs[some], demand)


def main() -> None:
    """Measure CPU time and memory of the driver, and look-ups in the store."""
    start()
    report = Report()
    with tempfile.TemporaryDirectory() as name:
        folders = {methods: Path(name) / str(methods) for methods in METHODS}
        runs = {methods: plan(folder, TASKS, pairs(methods)) for methods, folder in folders.items()}
        cost = measure(
            {
                len(graph): list_parts(store, graph, config)
                for store, graph, config in runs.values()
            },
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
            {len(graph): list_parts(store, graph, config)},
            report,
            f"driver, a star of {STAR_TASKS} tasks",
        )
    report.exit()


if __name__ == "__main__":
    main()
