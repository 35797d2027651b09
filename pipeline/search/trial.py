"""One trial of a search: a whole graph in the shared store, judged on validation images task by
task, with a record that outlives its process."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pipeline import config
from pipeline.graph import build
from pipeline.graph.run import Decision, Event, Executor, Walk, compared, look_up_each, run_graph
from pipeline.graph.stage import Graph
from pipeline.graph.store import Lookup, Store, record_of
from pipeline.launch import executor
from pipeline.results.tables import RunTables
from pipeline.search import space
from pipeline.search.population import lineage
from pipeline.search.space import Params
from pipeline.yaml_files import put
from workers.errors import UserError
from workers.storage.artifact import join, read_json, write_bytes

ENDED = ("finished", "stopped", "failed")
Report = Callable[[dict[str, Any]], None]


class TrialFailed(Exception):
    """A trial that cannot go on. Its sentence stands in its record, and the search does."""


@dataclass(frozen=True)
class Plan:
    """What every trial of a search is told; plain and picklable.

    body: the base config's plain values. tasks: those that a trial learns, in stream order. own:
    those of them that have steps of the method's own. only: it is judged after the last one of them
    alone. chosen_so_far: task -> what earlier phases of the search have chosen for it. phase: the task
    that is searched now. each: a task keeps the parameters that it was trained with when they
    change (population-based training). until: how many tasks trials learn now; None: all.
    """

    name: str
    storage: str
    body: Mapping[str, Any]
    provenance: Mapping[str, Any]
    tasks: tuple[str, ...]
    own: tuple[str, ...] = ()
    only: bool = False
    phase: str = ""
    chosen_so_far: Mapping[str, Params] = field(default_factory=dict)
    each: bool = False
    until: int | None = None

    @property
    def is_last(self) -> bool:
        """Whether a trial that has learned what is asked for has learned everything."""
        return self.until is None or self.until == len(self.tasks)

    def config(
        self, params: Mapping[str, Any], history: Mapping[str, Params], name: str
    ) -> config.Config:
        """The config of a point. history: task -> parameters that are its own."""
        body = with_history(self.body, params, {**self.chosen_so_far, **history})
        return config.check(
            {**body, "name": name, "storage": self.storage}, f"search {self.name!r}"
        )


def with_history(
    body: Mapping[str, Any], params: Mapping[str, Any], history: Mapping[str, Params]
) -> dict[str, Any]:
    """Plain values with those of a point in place: for tasks in `history` as theirs alone, and
    where there is one, common settings stay the body's."""
    found = space.with_params(
        body, {k: v for k, v in params.items() if k == space.METHOD} if history else params
    )
    for task, own in history.items():
        for key, value in own.items():
            if key != space.METHOD:
                _, label, rest = key.split(".", 2)
                alone = found["methods"][label] = found["methods"][label] or {}
                put(alone.setdefault("tasks", {}).setdefault(task, {}), rest, value, f"space.{key}")
    return found


# ---- records -------------------------------------------------------------------------------------
def folder(storage: str, name: str) -> str:
    return join(storage, "searches", name)


def record_path(storage: str, name: str, number: int) -> str:
    return join(folder(storage, name), "trials", f"{number:04d}.json")


def read_record(storage: str, name: str, number: int) -> dict[str, Any] | None:
    """What is known of a trial; None where it never began, or the file is damaged, which begins it
    anew."""
    try:
        record = read_json(record_path(storage, name, number))
    except (FileNotFoundError, ValueError):
        return None
    return (
        record
        if isinstance(record, dict) and record.get("number") == number and "status" in record
        else None
    )


def write_record(storage: str, name: str, record: Mapping[str, Any]) -> None:
    write_bytes(record_path(storage, name, record["number"]), json.dumps(record, indent=1).encode())


def now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")


# ---- running -------------------------------------------------------------------------------------
@dataclass
class Count:
    """Watches the walks of one trial: stages that it ran or found, and the seconds of those that it
    ran."""

    run: int = 0
    reused: int = 0
    seconds: float = 0.0

    @classmethod
    def after(cls, record: Mapping[str, Any] | None) -> Count:
        """Goes on from the record of a trial that was cut off: what it ran then it will find now,
        and that is no reuse."""
        return (
            cls(record["stages"]["run"], -record["stages"]["run"], record["device_s"])
            if record
            else cls()
        )

    def event(self, walk: Walk, event: Event) -> None:
        if event.kind == "done" and event.body.get("reused"):
            self.reused += 1  # another trial was faster
        elif event.kind == "done":
            self.run += 1
            self.seconds += float(event.body.get("wall_s") or 0.0) * int(
                event.body.get("workers") or 1
            )

    def decision(self, walk: Walk, decision: Decision) -> None:
        """Nothing to count."""


def run_trial(
    plan: Plan, number: int, params: Mapping[str, Any], report: Report, parent: int | None = None
) -> None:
    """Runs trial `number` as far as the plan goes, or tells again what it found when it has come
    there before. report: gets a result per task. parent: the trial whose first tasks this one goes
    on from (population-based training). Raises TrialFailed."""
    record = read_record(plan.storage, plan.name, number)
    if record is not None and (
        record["status"] in ENDED or len(record.get("rounds", ())) >= (plan.until or math.inf)
    ):
        for result in record["results"]:
            report({**result, "record": record})
        if record["status"] == "failed":
            raise TrialFailed(record["message"])
        return
    before = record if record is not None and record["status"] == "running" else None
    record = {
        "number": number,
        "phase": plan.phase,
        "params": dict(params),
        "status": "running",
        "message": "",
        "results": [],
        "stages": {"run": 0, "reused": 0},
        "device_s": 0.0,
        "wall_s": 0.0,
        "started": now(),
        "ended": None,
        "graph": None,
        "history": {},
        "rounds": [],
    }
    if before is not None:
        record |= {"stages": before["stages"], "device_s": before["device_s"]}
    if parent is not None:
        record |= _taken_over(plan, number, parent)
    write_record(plan.storage, plan.name, record)
    started = time.monotonic() - record["wall_s"]
    try:
        _learn(plan, record, params, report, started, Count.after(before))
    except UserError as error:
        record |= {
            "status": "failed",
            "message": " ".join(str(error).split()),
            "ended": now(),
            "wall_s": round(time.monotonic() - started, 3),
        }
        write_record(plan.storage, plan.name, record)
        raise TrialFailed(record["message"]) from None


def _taken_over(plan: Plan, number: int, parent: int) -> dict[str, Any]:
    """What a trial begins a round with: what `parent`, which may be itself, has learned before, and
    its own rounds. Raises TrialFailed."""
    before = plan.tasks[: (plan.until or len(plan.tasks)) - 1]
    source, own = (
        read_record(plan.storage, plan.name, parent),
        read_record(plan.storage, plan.name, number),
    )
    if source is None or own is None or len(source["results"]) < len(before):
        raise TrialFailed(
            f"the record of trial {parent}, which trial {number} goes on from, is gone or "
            "damaged; give the search another name"
        )
    return {
        **lineage(source, before),
        "rounds": own["rounds"],
        "wall_s": own["wall_s"],
        "started": own["started"],
    }


def _learn(
    plan: Plan,
    record: dict[str, Any],
    params: Mapping[str, Any],
    report: Report,
    started: float,
    count: Count,
) -> None:
    """Task after task, the ones that `record` has no result of. With `plan.each` the tasks to come
    get `params` as their own."""
    store = Store(plan.storage)
    done = len(record["results"])
    history = dict(record["history"])
    if plan.each:
        history |= {task: dict(params) for task in plan.tasks[done:] if task in plan.own}
    elif plan.phase:
        history |= {plan.phase: dict(params)}
    settings = plan.config(params, history, f"{plan.name}-{record['number']:04d}")
    graph, tasks = build.graph_of(settings, store, dict(plan.provenance), "val")
    label = next(iter(settings.methods))
    mine = set().union(*(ancestors(graph, f"{label}/{task}/evaluate") for task in plan.tasks))
    graph, tasks = (
        Graph.of(graph.name, [stage for stage in graph if stage.id in mine]),
        [task for task in tasks if task.name in plan.tasks],
    )
    record["graph"] = record_of(graph, settings, tasks, dict(plan.provenance))
    with store.claimed_by_gc():  # before it is looked up what stands
        write_record(plan.storage, plan.name, record)
    runner = Runner(store, settings, graph, count)
    try:
        for position, task in enumerate(plan.tasks[: plan.until]):
            if position < done:
                continue
            runner.run(f"{label}/{task}/evaluate")
            if plan.only and position < len(plan.tasks) - 1:
                continue
            result = result_of(store, record["graph"], label, task, position)
            record["history"] = (
                {name: history[name] for name in plan.tasks[: position + 1] if name in history}
                if plan.each
                else {}
            )
            record |= {
                "results": [*record["results"], result],
                "stages": {"run": count.run, "reused": max(0, count.reused)},
                "device_s": round(count.seconds, 3),
                "wall_s": round(time.monotonic() - started, 3),
            }
            if plan.each:
                record["rounds"] = [
                    *record["rounds"],
                    {"params": dict(params), "accuracy": result["accuracy"]},
                ]
            if (
                position == len(plan.tasks) - 1
            ):  # before anyone can stop it: what has learned all tasks is finished
                record |= {"status": "finished", "ended": now()}
            write_record(plan.storage, plan.name, record)
            report({**result, "record": record})
    finally:
        runner.close()


class Runner:
    """Walks parts of one graph, one after the other, on one executor."""

    def __init__(self, store: Store, settings: config.Config, graph: Graph, count: Count):
        self.store, self.settings, self.graph, self.count = store, settings, graph, count
        self.lookups: dict[str, Lookup] = {}
        self.executor: Executor | None = None

    def run(self, stage_id: str) -> None:
        """`stage_id` and all that it stands on. Raises UserError where a stage fails."""
        part = Graph.of(
            self.graph.name, [s for s in self.graph if s.id in ancestors(self.graph, stage_id)]
        )
        new = Graph(part.name, {s.id: s for s in part if s.id not in self.lookups})
        self.lookups = compared(
            part, self.lookups | look_up_each(new, self.store, None, verify=False)
        )
        self.count.reused += sum(self.lookups[s.id].hit for s in new)
        outcome = run_graph(
            part,
            self.store,
            self._executor,
            self.settings.cluster.retries,
            [self.count],
            self.lookups,
        )
        for failed, message in outcome.failures.items():
            raise UserError(
                message if message.startswith("stage ") else f"stage {failed} failed: {message}"
            )
        self.lookups |= {
            s.id: Lookup(True, "stands", dict(outcome.manifests.get(s.id) or {})) for s in part
        }

    def _executor(self, todo: set[str]) -> Executor:
        if self.executor is None:
            cluster = self.settings.cluster
            alone = (
                cluster.model_copy(update={"workers": 0})
                if cluster.workers == 1
                else cluster.model_copy(update={"groups": 1})
            )
            self.executor = executor.executor(
                self.store, alone, self.graph, todo, lambda event: None, lambda stage: {}
            )
        return KeptOpen(self.executor)

    def close(self) -> None:
        if self.executor is not None:
            self.executor.close()


@dataclass(frozen=True)
class KeptOpen:
    """An executor that the next walk uses too."""

    inner: Executor

    def submit(self, stage: Any, depth: int) -> None:
        self.inner.submit(stage, depth)

    def poll(self) -> list[Event]:
        return self.inner.poll()

    def close(self) -> None:
        """Whoever made it closes it."""


def ancestors(graph: Graph, stage_id: str) -> set[str]:
    """The stage itself and all that it stands on."""
    found: set[str] = set()
    waiting = [stage_id]
    while waiting:
        here = waiting.pop()
        if here not in found:
            found.add(here)
            waiting += graph[here].parents
    return found


def result_of(
    store: Store, record: Mapping[str, Any], label: str, task: str, position: int
) -> dict[str, Any]:
    """Average validation accuracy over the tasks so far, that of each, and bytes kept per task
    beyond the backbone, from the store."""
    tables = RunTables.load(store.storage, record)
    matrix, sizes = tables.matrix(label), tables.sizes(label)
    last = sizes[min(position, len(sizes) - 1)]
    learned = sum(row["role"] != "base" for row in sizes[: position + 1])
    accuracy = float(matrix.over_time[position]["average_accuracy"])
    if math.isnan(accuracy):
        raise UserError(
            f"task {task!r} has no validation accuracy, so the trial cannot be judged; data of "
            "an earlier task may be gone"
        )
    return {
        "task": task,
        "position": position,
        "accuracy": accuracy,
        "bytes": (last["total"] - last["backbone"]) / max(learned, 1),
        "per_task": {
            name: float(rate)
            for name, rate in zip(
                matrix.tasks[: position + 1], matrix.rates[position].tolist(), strict=False
            )
        },
    }
