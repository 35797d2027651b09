"""What a stage costs the driver, and the store, among 100, 1,000 and 10,000 of them.

`python -m benchmarks.scale`; about four minutes. The graph is that of a real config: as many stars
(`linear`) as chains (`finetune`) over 25 tasks; more stages are more methods. The stages are not
run: the executor says at once that each is done, so all CPU time is the driver's.

Why not more tasks? An evaluation of a chain measures all tasks so far: its job and its key hold T
entries after T tasks, and so T*T in all, as in the accuracy matrix itself. That is what the run is
for, and it is the same for any number of methods. A star of 5,000 tasks is noted beside.
"""

from __future__ import annotations

import gc
import io
import tempfile
import tracemalloc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import stream
from benchmarks.harness import Report, interleave, start
from pipeline import app
from pipeline.config import Config
from pipeline.console import Console
from pipeline.graph.build import graph_of
from pipeline.graph.run import look_up_all, run_graph
from pipeline.graph.stage import Graph, Stage
from pipeline.graph.store import Store, record_of
from pipeline.graph.walk import Event, EventKind
from workers.storage.artifact import Attempt

TASKS = 25
METHODS = (1, 10, 100)  # stars, and as many chains
STAR_TASKS = 5_000
DRIVER_DEMAND = 0.010  # seconds of driver CPU per stage: all parts
GROWTH_DEMAND = 1.2  # the same per stage among more of them, relative
STORE_DEMAND = 1.5  # the same of look-ups of what stands: folders of a disk grow too


class Instant:
    """An executor for which every stage is done at once."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def submit(self, stage: Stage, depth: int) -> None:
        body = {"kind": "train", "sizes": {}, "wall_s": 0.0}
        self.events += [
            Event(EventKind.PROGRESS, stage.id, body={"task": stage.task}),
            Event(EventKind.DONE, stage.id, body=body),
        ]

    def poll(self) -> list[Event]:
        events, self.events = self.events, []
        return events

    def close(self) -> None:
        pass


def drawn(folder: Path, tasks: int, methods: dict[str, Any]) -> tuple[Store, Graph, Config]:
    card = stream.draw_images(folder, 2 * tasks, train=1, test=1, sides=(16,))
    return stream.plan(folder, card, tasks, backbone={**stream.tiny()}, methods=methods)


def pairs(count: int) -> dict[str, Any]:
    """So many stars and chains; no two stages are the same work."""
    return {
        f"{method}-{i}": {"method": method, "train": {"lr": 1e-4 * (i + 1)}}
        for method in ("linear", "finetune")
        for i in range(count)
    }


def parts_of(store: Store, graph: Graph, config: Config) -> dict[str, Callable[[], object]]:
    """What the driver does for a run in which all is missing; a run of the same name stood in the
    record before."""
    record, empty = record_of(graph, config, [], {}), Store(f"{store.storage}-of-nothing")
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
        "graph": partial(graph_of, config, store),
        "look-up": partial(look_up_all, graph, empty, record),
        "walk, events, screen": walk,
        "record": lambda: store.save_record(record_of(graph, config, [], {})),
    }


def publish(store: Store, graph: Graph) -> None:
    """A result of one file of 1 KiB for every stage."""
    for stage in graph:
        attempt = Attempt(store.root, stage.key)
        attempt.write("task.safetensors", bytes(1024))
        attempt.commit({"kind": "train"})


def measure(
    runs: dict[int, dict[str, Callable[[], object]]], report: Report, what: str
) -> dict[int, float]:
    """CPU seconds per stage of all parts together, by number of stages; the parts are noted."""
    timing = interleave(
        {
            f"{part}, {stages}": call
            for stages, parts in runs.items()
            for part, call in parts.items()
        },
        rounds=3,
    )
    found = {}
    for stages, parts in runs.items():
        costs = {part: timing.median(f"{part}, {stages}") / stages for part in parts}
        found[stages] = sum(costs.values())
        report.note(
            f"{what}, {stages} stages, CPU per stage",
            ", ".join(f"{part} {cost * 1000:.3f} ms" for part, cost in costs.items()),
        )
    return found


def memory(folder: Path, methods: int) -> float:
    """Bytes per stage at the end of a run: the graph with its jobs, look-ups, the walk, the
    record."""
    gc.collect()
    tracemalloc.start()
    store, graph, config = stream.plan(
        folder, str(folder / "card.yaml"), TASKS, backbone={**stream.tiny()}, methods=pairs(methods)
    )
    lookups, record = (
        look_up_all(graph, Store(f"{store.storage}-of-nothing"), None),
        record_of(graph, config, [], {}),
    )
    outcome = run_graph(
        graph, store, lambda todo: Instant(), 0, [Console(graph, lookups, io.StringIO())], lookups
    )
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert outcome.ran == len(graph) == len(record["stages"])
    return held / len(graph)


def demand_flat(
    report: Report, what: str, found: dict[int, float], demand: float = GROWTH_DEMAND
) -> None:
    few, some, many = found
    report.at_most(f"{what}, {many} stages against {few}", found[many] / found[few], demand)
    report.at_most(f"{what}, {many} stages against {some}", found[many] / found[some], demand)


def main() -> None:
    start()
    report = Report()
    with tempfile.TemporaryDirectory() as name:
        places = {methods: Path(name) / str(methods) for methods in METHODS}
        runs = {methods: drawn(place, TASKS, pairs(methods)) for methods, place in places.items()}
        cost = measure(
            {len(graph): parts_of(store, graph, config) for store, graph, config in runs.values()},
            report,
            "driver",
        )
        report.below("driver, CPU per stage, most", max(cost.values()), DRIVER_DEMAND)
        demand_flat(report, "driver, CPU per stage", cost)
        for store, graph, _ in runs.values():
            publish(store, graph)
        cost = measure(
            {
                len(graph): {
                    "look-up of what stands, verified": partial(look_up_all, graph, store, None)
                }
                for store, graph, _ in runs.values()
            },
            report,
            "store on a disk",
        )
        demand_flat(report, "store on a disk, CPU of a look-up per stage", cost, STORE_DEMAND)
        measure(
            {
                len(graph): {"listing": partial(app.find_garbage, store)}
                for store, graph, _ in runs.values()
            },
            report,
            "store on a disk",
        )
        held = {len(runs[methods][1]): memory(place, methods) for methods, place in places.items()}
        for stages, some in held.items():
            report.note(f"driver, {stages} stages, memory per stage", f"{some / 1000:.1f} kB")
        demand_flat(report, "driver, memory per stage", held)
        store, graph, config = drawn(Path(name) / "star", STAR_TASKS, {"linear": {}})
        measure(
            {len(graph): parts_of(store, graph, config)},
            report,
            f"driver, a star of {STAR_TASKS} tasks",
        )
    report.exit()


if __name__ == "__main__":
    main()
