"""What a stage costs beside its work: in the driver, in this process, and on a warm worker group of Ray.

`python -m benchmarks.launch`; about two minutes, most of it Ray's start. The stages are real but as small as they get: a
star of `linear` over tasks of two classes with four train and two test images, one epoch of one step, a backbone of one
block. What is left is the price of a stage: job, look-up, backbone, head, shards, history, result, events.

`driver` runs an executor that does nothing: its CPU time is all the driver's. `ray` counts from the first training stage
that is done, so that the start of Ray and of the worker group are left out; both are shown. `beside` runs a chain whose tasks take
seconds, with one group and with two: the second one evaluates while the first trains the next task.
"""

from __future__ import annotations

import io
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks import stream
from benchmarks.harness import Report, interleave, start
from pipeline import launch
from pipeline.build import graph_of
from pipeline.config import ClusterSettings, Config
from pipeline.console import Console
from pipeline.graph import Graph, Stage
from pipeline.groups import OnRay
from pipeline.run import Decision, Event, Executor, Outcome, Walk, Watcher, look_up_all, needed, run_graph
from pipeline.store import Store
from workers.artefact import Attempt

TASKS, MANY_TASKS = 50, 500  # of the driver's star
RAY_TASKS = 10
DRIVER_DEMAND = 0.010  # seconds of driver CPU per stage: graph, look-up, walk, events
GROWTH_DEMAND = 3.0  # the same per stage at ten times as many tasks, relative
LOCAL_DEMAND = 0.1  # seconds of CPU per stage in this process
RAY_DEMAND = 0.2  # seconds between two stages on a warm group
CHAIN_TASKS = 5
BESIDE_DEMAND = 0.8  # of the time that evaluating all tasks but the last takes, the share during which a later task trains


class Instant:
    """An executor for which every stage is done at once."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def submit(self, stage: Stage, depth: int) -> None:
        body = {"kind": "train", "sizes": {}, "wall_s": 0.0}
        self.events += [Event("progress", stage.id, body={"task": stage.task}), Event("done", stage.id, body=body)]

    def poll(self) -> list[Event]:
        events, self.events = self.events, []
        return events

    def close(self) -> None:
        pass


class Times:
    """A watcher that notes when each stage was done, and how long its worker says that it took."""

    def __init__(self) -> None:
        self.done: dict[str, tuple[float, float]] = {}

    def event(self, walk: Walk, event: Event) -> None:
        if event.kind == "done":
            self.done[event.stage] = time.monotonic(), event.body.get("wall_s", 0.0)
        if event.kind == "failed":
            raise SystemExit(f"stage {event.stage} failed: {event.message}")

    def decision(self, walk: Walk, decision: Decision) -> None:
        pass


def star(folder: Path, tasks: int, methods: dict[str, Any] | None = None, **cluster: Any) -> tuple[Store, Graph, Config]:
    card = stream.draw_images(folder, 2 * tasks, train=4, test=2, sides=(16,))
    return stream.plan(folder, card, tasks, backbone={**stream.tiny()}, train={"epochs": 1}, methods=methods or {"linear": {}},
                       data={"val_fraction": 0.0}, cluster={"loader_workers": 1, **cluster})


def walk_over(store: Store, graph: Graph, executor: Callable[[set[str]], Executor]) -> tuple[Outcome, Times]:
    times, lookups = Times(), look_up_all(graph, store, None)
    watchers: list[Watcher] = [times, Console(graph, lookups, io.StringIO())]
    return run_graph(graph, store, executor, 0, watchers, lookups), times


def nothing_to_report(stage: Stage) -> dict[str, Any]:
    return {}


# ---- the driver alone ----------------------------------------------------------------------------------------------------
def driver(report: Report) -> None:
    few, many = (driver_cost(report, tasks) for tasks in (TASKS, MANY_TASKS))
    report.below(f"driver, star of {TASKS} tasks, CPU per stage", few, DRIVER_DEMAND)
    report.at_most(f"driver, CPU per stage at {MANY_TASKS} tasks against {TASKS}", many / few, GROWTH_DEMAND)


def driver_cost(report: Report, tasks: int) -> float:
    """CPU seconds of the driver per stage: a first run, in which all is missing, and the look-up of a second, in which
    every stage stands with one file of 1 KiB."""
    with tempfile.TemporaryDirectory() as folder:
        store, graph, config = star(Path(folder), tasks)

        def look_up_hits() -> None:
            assert not needed(graph, look_up_all(graph, store, None))

        steps: dict[str, Callable[[], object]] = {
            "graph": partial(graph_of, config, store), "look-up and walk": partial(walk_over, store, graph, lambda todo: Instant())}
        costs = {name: median / len(graph) for name, median in medians(steps).items()}
        for stage in graph:
            attempt = Attempt(store.root, stage.key)
            attempt.write("task.safetensors", bytes(1024))
            attempt.commit({"kind": "train"})
        costs["look-up of what stands"] = medians({"hits": look_up_hits})["hits"] / len(graph)
    parts = ", ".join(f"{name} {cost * 1000:.2f} ms" for name, cost in costs.items())
    report.note(f"driver, star of {tasks} tasks, {len(graph)} stages, CPU per stage", parts)
    return sum(costs.values())


def medians(steps: dict[str, Callable[[], object]]) -> dict[str, float]:
    timing = interleave(steps, rounds=3)
    return {name: timing.median(name) for name in steps}


# ---- stages in this process and on Ray -------------------------------------------------------------------------------------
def local(report: Report) -> None:
    with tempfile.TemporaryDirectory() as folder:
        store, graph, config = star(Path(folder), RAY_TASKS)
        stages = [s for s in graph if s.method]
        cpu: dict[str, list[float]] = {}

        class Timed(launch.InProcess):
            def _run(self, stage: Stage) -> dict[str, Any]:
                began = time.process_time()
                manifest = super()._run(stage)
                cpu.setdefault(stage.step, []).append(time.process_time() - began)
                return manifest

        walk_over(store, graph, lambda todo: Timed(store, config.cluster, nothing_to_report, lambda event: None))
        for step in ("train", "evaluate"):
            report.note(f"in this process, CPU of a {step} stage", f"{statistics.median(cpu[step][1:]) * 1000:.0f} ms")
        total = sum(statistics.median(cpu[s.step][1:]) for s in stages) / len(stages)
        report.below("in this process, CPU per stage", total, LOCAL_DEMAND)


def on_ray(report: Report, methods: dict[str, Any], name: str) -> None:
    """The time between two stages of one warm group of one worker: medians over the train and evaluate stages."""
    with tempfile.TemporaryDirectory() as folder:
        store, graph, config = star(Path(folder), RAY_TASKS, methods, workers=1, groups=1)
        began, cpu = time.monotonic(), time.process_time()
        cluster: ClusterSettings = config.cluster
        _, times = walk_over(store, graph, lambda todo: OnRay(store, cluster, nothing_to_report, lambda event: None, 1))
        wall, cpu = time.monotonic() - began, time.process_time() - cpu
        order = sorted((when, stage, inside) for stage, (when, inside) in times.done.items() if graph[stage].method)
        gaps = [(after[0] - before[0], after[2]) for before, after in pairwise(order)]
        gap, inside = (statistics.median(values) for values in zip(*gaps, strict=True))
        report.below(f"on a warm group of Ray, {name}, time per stage", gap, RAY_DEMAND)
        report.note(f"{name}, of that inside the stage", f"{inside * 1000:.0f} ms")
        report.note(f"{name}, start of Ray and its group, with ingest and backbone", f"{order[0][0] - began:.1f} s of {wall:.1f} s in all")
        report.note(f"{name}, CPU of the driver per stage", f"{cpu / len(order) * 1000:.0f} ms, start included")


def beside(report: Report) -> None:
    """Both groups have a thread each. The gain in wall time needs two idle cores, the share of evaluation beside training does not."""
    wall: dict[int, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        for groups in (1, 2):
            place = Path(folder) / str(groups)
            card = stream.draw_images(place, 2 * CHAIN_TASKS, train=200, test=200, sides=(32,))
            store, graph, config = stream.plan(
                place, card, CHAIN_TASKS, methods={"finetune": {}}, train={"epochs": 4, "batch_size": 20}, data={"val_fraction": 0.0},
                backbone={"img_size": 32, "crop_pct": 1.0, "options": {"patch_size": 4, "embed_dim": 64, "depth": 4, "num_heads": 2}},
                cluster={"loader_workers": 1, "workers": 1, "groups": groups})
            cluster: ClusterSettings = config.cluster
            _, times = walk_over(store, graph, lambda todo: OnRay(store, cluster, nothing_to_report, lambda event: None, 2))  # noqa: B023
            spans = {stage: (when - inside, when) for stage, (when, inside) in times.done.items() if graph[stage].method}
            wall[groups] = max(end for _, end in spans.values()) - min(begin for begin, _ in spans.values())
            trains = [span for stage, span in spans.items() if graph[stage].step == "train"]
            evaluates = sorted((span for stage, span in spans.items() if graph[stage].step == "evaluate"), key=lambda span: span[1])[:-1]
            inside = sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in evaluates for b in trains)
            whole = sum(end - begin for begin, end in evaluates)
            report.note(f"chain of {CHAIN_TASKS} tasks, {groups} group(s)", f"{wall[groups]:.1f} s, of that training {sum(b - a for a, b in trains):.1f} s")
    report.at_least("evaluation of all tasks but the last beside the training of a later one, share", inside / whole, BESIDE_DEMAND)
    report.note("wall time of the chain, one group / two", f"{wall[1] / wall[2]:.2f}x")


def main() -> None:
    start()
    report = Report()
    driver(report)
    local(report)
    on_ray(report, {"linear": {}}, "a star")
    on_ray(report, {"finetune": {}}, "a chain")
    beside(report)
    report.exit()


if __name__ == "__main__":
    main()
