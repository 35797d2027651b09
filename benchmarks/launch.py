"""Measure the overhead of a stage in this process and on a Ray worker group, cold and warm.

Command: `python -m benchmarks.launch`. It takes about two minutes, mostly to start Ray.
`benchmarks.scale` measures the cost of a stage in the driver.

The stages are real but as small as possible: a star of `linear` over tasks of two classes with four
training and two test images, one epoch of one step, and a backbone of one block. The time is
therefore overhead: job, look-up, backbone, head, shards, history, result and events.

`on_ray` reports the start of a worker group separately. The time of further stages counts from the
end of the first training stage. `measure_overlap` runs a chain with tasks of several seconds on
one and on two groups. With two groups, the second evaluates a task while the first trains the next
one.
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
from benchmarks.harness import Report, start
from pipeline.config.settings import ClusterSettings, Config
from pipeline.graph.run import Executor, Outcome, Watcher, look_up_all, run_graph
from pipeline.graph.stage import Graph, Stage
from pipeline.graph.store import Store
from pipeline.graph.walk import Decision, Event, EventKind, Walk
from pipeline.launch.cluster import connect
from pipeline.launch.groups import RayExecutor, start_ray_executor
from pipeline.launch.local import LocalExecutor
from pipeline.shell.console import Console

RAY_TASKS = 10
LOCAL_DEMAND = 0.1  # CPU seconds per stage in this process
RAY_DEMAND = 0.2  # seconds between two stages on a warm group
CHAIN_TASKS = 5
# Minimum share of the evaluation time, without the last task, during which a later task trains.
BESIDE_DEMAND = 0.8


class Times:
    """A watcher that records the launch time, end time and work seconds of each stage."""

    def __init__(self) -> None:
        self.launched: dict[str, float] = {}
        self.done: dict[str, tuple[float, float]] = {}

    def on_event(self, walk: Walk, event: Event) -> None:
        if event.kind is EventKind.DONE:
            self.done[event.stage] = time.monotonic(), event.body.get("wall_s", 0.0)
        if event.kind is EventKind.FAILED:
            raise SystemExit(f"stage {event.stage} failed: {event.message}")

    def on_decision(self, walk: Walk, decision: Decision) -> None:
        self.launched[decision.stage] = time.monotonic()


def star(
    folder: Path, tasks: int, methods: dict[str, Any] | None = None, **cluster: Any
) -> tuple[Store, Graph, Config]:
    """Draw images into a folder and return the graph of a stream of small tasks over them."""
    card = stream.draw_images(folder, 2 * tasks, train=4, test=2, sides=(16,))
    return stream.plan(
        folder,
        card,
        tasks,
        backbone={**stream.tiny()},
        train={"epochs": 1},
        methods=methods or {"linear": {}},
        data={"val_fraction": 0.0},
        cluster={"loader_workers": 1, **cluster},
    )


def walk_graph(
    store: Store, graph: Graph, executor: Callable[[set[str]], Executor]
) -> tuple[Outcome, Times]:
    """Run a graph and return its outcome and stage times."""
    times = Times()
    lookups = look_up_all(graph, store, None)
    watchers: list[Watcher] = [times, Console(graph, lookups, io.StringIO())]
    return run_graph(graph, store, executor, 0, watchers, lookups), times


def nothing_to_report(stage: Stage) -> dict[str, Any]:
    """Return an empty result for the report stage, which runs in the driver."""
    return {}


# ---- stages in this process and on Ray -----------------------------------------------------------
def local(report: Report) -> None:
    """Measure the CPU time of stages in this process."""
    with tempfile.TemporaryDirectory() as folder:
        store, graph, config = star(Path(folder), RAY_TASKS)
        stages = [s for s in graph if s.method]
        cpu: dict[str, list[float]] = {}

        class Timed(LocalExecutor):
            def run(self, stage: Stage) -> dict[str, Any]:
                began = time.process_time()
                manifest = super().run(stage)
                cpu.setdefault(stage.step, []).append(time.process_time() - began)
                return manifest

        walk_graph(
            store,
            graph,
            lambda todo: Timed(store, config.cluster, nothing_to_report, lambda event: None),
        )
        for step in ("train", "evaluate"):
            report.note(
                f"in this process, CPU of a {step} stage",
                f"{statistics.median(cpu[step][1:]) * 1000:.0f} ms",
            )
        total = sum(statistics.median(cpu[s.step][1:]) for s in stages) / len(stages)
        report.below("in this process, CPU per stage", total, LOCAL_DEMAND)


def on_ray(report: Report, methods: dict[str, Any], name: str) -> None:
    """Measure the start of a group of one worker and the time between two stages.

    Times between stages are medians over the train and evaluate stages.
    """
    with tempfile.TemporaryDirectory() as folder:
        store, graph, config = star(Path(folder), RAY_TASKS, methods, workers=1, groups=1)
        cpu = time.process_time()
        cluster = config.cluster
        _, times = walk_graph(
            store,
            graph,
            lambda todo: start_ray_executor(
                store, cluster, nothing_to_report, lambda event: None, 1
            ),
        )
        cpu = time.process_time() - cpu
        # the first stage, which waits only for the start of the group
        first, inside = times.done["backbone"]
        report.note(
            f"cold start of a worker group, {name}, until its first stage begins",
            f"{first - inside - times.launched['backbone']:.1f} s",
        )
        order = sorted(
            (when, stage, inside)
            for stage, (when, inside) in times.done.items()
            if graph[stage].method
        )
        gaps = [(after[0] - before[0], after[2]) for before, after in pairwise(order)]
        gap, inside = (statistics.median(values) for values in zip(*gaps, strict=True))
        report.below(f"warm: a further stage, {name}", gap, RAY_DEMAND)
        report.note(f"{name}, of that inside the stage", f"{inside * 1000:.0f} ms")
        report.note(
            f"{name}, CPU of the driver per stage",
            f"{cpu / len(order) * 1000:.0f} ms, start included",
        )


def ray_executor(store: Store, cluster: ClusterSettings, todo: set[str]) -> RayExecutor:
    """Return an executor with at most two worker groups."""
    return start_ray_executor(store, cluster, nothing_to_report, lambda event: None, 2)


def measure_overlap(report: Report) -> None:
    """Measure the share of a chain's evaluation that overlaps with training of a later task.

    Each group has one thread. The gain in wall time needs two idle cores; the share does not.
    """
    wall: dict[int, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        for groups in (1, 2):
            group_folder = Path(folder) / str(groups)
            card = stream.draw_images(
                group_folder, 2 * CHAIN_TASKS, train=200, test=200, sides=(32,)
            )
            store, graph, config = stream.plan(
                group_folder,
                card,
                CHAIN_TASKS,
                methods={"finetune": {}},
                train={"epochs": 4, "batch_size": 20},
                data={"val_fraction": 0.0},
                backbone={
                    "img_size": 32,
                    "crop_pct": 1.0,
                    "options": {"patch_size": 4, "embed_dim": 64, "depth": 4, "num_heads": 2},
                },
                cluster={"loader_workers": 1, "workers": 1, "groups": groups},
            )
            cluster: ClusterSettings = config.cluster
            on_two_groups = partial(ray_executor, store, cluster)
            _, times = walk_graph(store, graph, on_two_groups)
            spans = {
                stage: (when - inside, when)
                for stage, (when, inside) in times.done.items()
                if graph[stage].method
            }
            first_begin = min(begin for begin, _ in spans.values())
            last_end = max(end for _, end in spans.values())
            wall[groups] = last_end - first_begin
            trains = [span for stage, span in spans.items() if graph[stage].step == "train"]
            evaluates = sorted(
                (span for stage, span in spans.items() if graph[stage].step == "evaluate"),
                key=lambda span: span[1],
            )[:-1]
            inside = 0.0
            for evaluation_begin, evaluation_end in evaluates:
                for train_begin, train_end in trains:
                    overlap = min(evaluation_end, train_end) - max(evaluation_begin, train_begin)
                    inside += max(0.0, overlap)
            whole = sum(end - begin for begin, end in evaluates)
            report.note(
                f"chain of {CHAIN_TASKS} tasks, {groups} group(s)",
                f"{wall[groups]:.1f} s, of that training {sum(b - a for a, b in trains):.1f} s",
            )
    report.at_least(
        "evaluation of all tasks but the last beside the training of a later one, share",
        inside / whole,
        BESIDE_DEMAND,
    )
    report.note("wall time of the chain, one group / two", f"{wall[1] / wall[2]:.2f}x")


def main() -> None:
    """Measure stages in this process, on one group and on two parallel groups."""
    start()
    report = Report()
    local(report)
    began = time.monotonic()
    ray = connect(ClusterSettings(workers=1))
    report.note("cold start of Ray itself", f"{time.monotonic() - began:.1f} s")
    on_ray(report, {"linear": {}}, "a star, the first group")
    on_ray(report, {"finetune": {}}, "a chain, a second group while Ray is up")
    measure_overlap(report)
    ray.shutdown()
    report.exit()


if __name__ == "__main__":
    main()
