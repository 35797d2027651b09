"""Run one trial of a search: a graph of stages, evaluated on validation images after each task.

Start reading at `run_trial`, which `tune.trainable` calls in a process of Ray Tune. The results of
stages are in the shared store. The record of a trial is the file
`searches/NAME/trials/NNNN.json`, so a search can be resumed after the process of the trial has
ended.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from pipeline.config import settings as config
from pipeline.config.settings import ClusterSettings
from pipeline.config.yaml_files import put
from pipeline.graph import build
from pipeline.graph.retries import RetryPolicy
from pipeline.graph.run import Executor, look_up_each, mark_outdated, run_graph
from pipeline.graph.run_record import RunRecord, make_record
from pipeline.graph.stage import Graph, Stage
from pipeline.graph.store import Lookup, Store
from pipeline.graph.walk import Decision, Event, EventKind, Walk
from pipeline.launch import executor
from pipeline.results.tables import RunTables
from pipeline.results.trials import Trial, TrialResult, TrialRound, compute_trial_forgetting
from pipeline.search import space
from pipeline.search.population import lineage
from pipeline.search.space import Params
from workers.errors import UserError
from workers.job import Task
from workers.storage.artifact import join, read_json, write_bytes

ENDED = ("finished", "stopped", "failed")  # statuses of a trial that does not continue
# Events after which an attempt to run a stage has used time but has no result.
FAILED_TRIES = (EventKind.FAILED, EventKind.LOST, EventKind.MOVED, EventKind.DAMAGED)
Report = Callable[[TrialResult], None]


class TrialFailed(Exception):
    """A trial has failed. Its record contains the message. The search continues without it."""


@dataclass(frozen=True)
class PhasePlan:
    """Common data of the trials of a phase; plain and picklable.

    A search has one phase, except with protocol `per_task`: then it has a phase for each of
    `method_tasks`, which searches the settings of this task. Population-based training (`pbt`) runs
    its phase in rounds: in each round, every trial learns one more task.

    Attributes:
        name: Name of the search.
        storage: Folder or URI of the storage.
        body: Plain values of the base config, as in `Search.body`.
        provenance: Provenance of results: code and package versions.
        tasks: Names of the tasks that a trial learns, in stream order.
        method_tasks: The tasks for which the method has a stage besides `evaluate`.
        only: Whether a trial has a result only for the last task, instead of one for each task.
        phase: Name of the task of this phase; "" without protocol `per_task`.
        chosen_so_far: Task -> parameters chosen in its phase, for earlier phases.
        each: Whether each task keeps the parameters with which it was trained, because they can
            differ between tasks (population-based training).
        until: Number of tasks that trials have learned at the end of this round; None: all tasks,
            without rounds.
        max_forgetting: Average forgetting above which a trial is stopped; None: no limit.
    """

    name: str
    storage: str
    body: Mapping[str, Any]
    provenance: Mapping[str, Any]
    tasks: tuple[str, ...]
    method_tasks: tuple[str, ...] = ()
    only: bool = False
    phase: str = ""
    chosen_so_far: Mapping[str, Params] = field(default_factory=dict)
    each: bool = False
    until: int | None = None
    max_forgetting: float | None = None

    @property
    def is_last(self) -> bool:
        """Whether trials have learned all tasks after this round."""
        return self.until is None or self.until == len(self.tasks)

    def config(
        self, params: Mapping[str, Any], history: Mapping[str, Params], name: str
    ) -> config.Config:
        """Return the config of a trial.

        Args:
            params: Parameters of the trial.
            history: Task -> parameters that apply only to this task. `chosen_so_far` is added.
            name: Name of the config.
        """
        body = with_history(self.body, params, {**self.chosen_so_far, **history})
        return config.check(
            {**body, "name": name, "storage": self.storage}, f"search {self.name!r}"
        )


def with_history(
    body: Mapping[str, Any], params: Mapping[str, Any], history: Mapping[str, Params]
) -> dict[str, Any]:
    """Return the plain values of a config with the parameters of a point inserted.

    Args:
        body: Plain values of the base config.
        params: The point. If `history` is not empty, only the point's choice of the method is used.
        history: Task -> parameters that apply only to this task. The other tasks keep the settings
            of `body`. {}: the parameters of the point apply to all tasks.
    """
    shared = params
    if history:
        shared = {key: value for key, value in params.items() if key == space.METHOD}
    config_body = space.with_params(body, shared)
    for task, task_params in history.items():
        for key, value in task_params.items():
            if key != space.METHOD:
                _, label, setting = key.split(".", 2)
                method = config_body["methods"][label] or {}
                config_body["methods"][label] = method
                task_body = method.setdefault("tasks", {}).setdefault(task, {})
                put(task_body, setting, value, f"space.{key}")
    return config_body


# ---- records -------------------------------------------------------------------------------------
def folder(storage: str, name: str) -> str:
    """Return the folder of a search."""
    return join(storage, "searches", name)


def record_path(storage: str, name: str, number: int) -> str:
    """Return the path of the record of a trial."""
    return join(folder(storage, name), "trials", f"{number:04d}.json")


def read_trial_record(storage: str, name: str, number: int) -> Trial | None:
    """Read the record of a trial.

    Returns:
        The record; None if the trial has not been started, or the file is damaged. In both cases
        the trial starts from the beginning.
    """
    try:
        record = read_json(record_path(storage, name, number))
    except (FileNotFoundError, ValueError):
        return None
    if not isinstance(record, dict) or record.get("number") != number or "status" not in record:
        return None
    return cast(Trial, record)


def write_record(storage: str, name: str, record: Trial) -> None:
    """Write the record of a trial."""
    write_bytes(record_path(storage, name, record["number"]), json.dumps(record, indent=1).encode())


def now() -> str:
    """Return the local time with its offset from UTC, in ISO 8601 without a colon in the offset."""
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")


# ---- running -------------------------------------------------------------------------------------
@dataclass
class Count:
    """A `Watcher` of one trial. It counts executed and reused stages, and their time.

    Attributes:
        cluster: Settings with the number of workers, and their resources for each kind of stage.
        on_change: Called after a stage has finished or failed.
        run: Number of executed stages.
        reused: Number of stages with a result in the store.
        seconds: Total seconds of executed stages and failed attempts, times their workers.
        gpu_seconds: The same total, with each duration also multiplied by the GPUs per worker.
        began: Id of a running stage -> its start on the monotonic clock.
    """

    cluster: ClusterSettings
    on_change: Callable[[], None]
    run: int = 0
    reused: int = 0
    seconds: float = 0.0
    gpu_seconds: float = 0.0
    began: dict[str, float] = field(default_factory=dict)

    def resume_from(self, record: Trial) -> None:
        """Continue with the counts of an interrupted trial.

        The stages that the trial executed before have results now. They must not be counted as
        reused, so `reused` starts with a negative number.
        """
        self.run = record["stages"]["run"]
        self.reused = -self.run
        self.seconds = record["device_s"]
        self.gpu_seconds = record.get("gpu_s", 0.0)

    def on_progress(self, event: Event) -> None:
        """Remember the time at which a worker starts a stage. The executor calls this."""
        if event.kind is EventKind.STARTED:
            self.began[event.stage] = time.monotonic()

    def on_event(self, walk: Walk, event: Event) -> None:
        """Count a finished stage, or add the duration of a failed attempt."""
        if event.kind is EventKind.DONE:
            self.began.pop(event.stage, None)
            if event.body.get("reused"):  # another process computed the result meanwhile
                self.reused += 1
            else:
                self.run += 1
                workers = int(event.body.get("workers") or 1)
                wall_s = float(event.body.get("wall_s") or 0.0)
                self._add(walk.graph[event.stage], wall_s * workers)
        elif event.kind in FAILED_TRIES and event.stage in self.began:
            wall_s = time.monotonic() - self.began.pop(event.stage)
            self._add(walk.graph[event.stage], wall_s * max(1, self.cluster.workers))
        else:
            return
        self.on_change()

    def _add(self, stage: Stage, seconds: float) -> None:
        """Add the duration of a stage times its workers."""
        self.seconds += seconds
        self.gpu_seconds += seconds * self.cluster.of_step(stage.step).gpus_per_worker

    def on_decision(self, walk: Walk, decision: Decision) -> None:
        """Do nothing: decisions are not counted."""

    def write_into(self, record: Trial) -> None:
        """Write the counts into a record."""
        record["stages"] = {"run": self.run, "reused": max(0, self.reused)}
        record["device_s"] = round(self.seconds, 3)
        record["gpu_s"] = round(self.gpu_seconds, 3)


def run_trial(
    plan: PhasePlan,
    number: int,
    params: Mapping[str, Any],
    report: Report,
    parent: int | None = None,
) -> None:
    """Run a trial for the tasks of the plan.

    If the trial has ended, or has learned these tasks before, only report its stored results again.

    Args:
        plan: Common data of the trials.
        number: Number of the trial.
        params: Parameters of the trial.
        report: Called with the result after each task.
        parent: Number of the trial from which this trial continues (population-based training), or
            None.

    Raises:
        TrialFailed: If the trial has failed, now or in an earlier session, for example because a
            stage failed.
    """
    previous = read_trial_record(plan.storage, plan.name, number)
    if previous is not None and _is_round_complete(previous, plan):
        for result in comparable_results(previous):
            report(result)
        if previous["status"] == "failed":
            raise TrialFailed(previous["message"])
        return
    if previous is not None and previous["status"] != "running":
        previous = None
    record = _new_record(plan, number, params)
    if previous is not None:
        record["stages"] = previous["stages"]
        record["device_s"] = previous["device_s"]
        record["gpu_s"] = previous.get("gpu_s", 0.0)
        record["wall_s"] = previous.get("wall_s", 0.0)
        record["started"] = previous.get("started", record["started"])
    if parent is not None:
        _take_over(record, plan, parent)
    write_record(plan.storage, plan.name, record)
    started = time.monotonic() - record["wall_s"]
    try:
        _learn(plan, record, report, started, previous)
    except UserError as error:
        record["status"] = "failed"
        record["message"] = " ".join(str(error).split())
        record["ended"] = now()
        record["wall_s"] = round(time.monotonic() - started, 3)
        write_record(plan.storage, plan.name, record)
        raise TrialFailed(record["message"]) from None


def comparable_results(record: Trial) -> list[TrialResult]:
    """Return the results that a scheduler can compare with other trials.

    If a trial was stopped because it forgets too much, its last result is not included.
    """
    if record["status"] == "stopped" and record["message"]:
        return record["results"][:-1]
    return record["results"]


def _is_round_complete(record: Trial, plan: PhasePlan) -> bool:
    """Return whether a trial has ended, or has learned the tasks of this round."""
    if record["status"] in ENDED:
        return True
    return plan.until is not None and len(record.get("rounds", ())) >= plan.until


def _new_record(plan: PhasePlan, number: int, params: Mapping[str, Any]) -> Trial:
    return {
        "number": number,
        "phase": plan.phase,
        "params": dict(params),
        "status": "running",
        "message": "",
        "results": [],
        "stages": {"run": 0, "reused": 0},
        "device_s": 0.0,
        "gpu_s": 0.0,
        "wall_s": 0.0,
        "started": now(),
        "ended": None,
        "graph": None,
        "history": {},
        "rounds": [],
    }


def _take_over(record: Trial, plan: PhasePlan, parent: int) -> None:
    """Initialize the record of a trial in a round of population-based training.

    The results and the history are copied from `parent`, which can be the trial itself. The list
    of rounds remains the trial's own.

    Raises:
        TrialFailed: If a record is missing or damaged, or `parent` lacks results.
    """
    number = record["number"]
    tasks = plan.tasks[: (plan.until or len(plan.tasks)) - 1]
    source = read_trial_record(plan.storage, plan.name, parent)
    previous = read_trial_record(plan.storage, plan.name, number)
    if source is None or previous is None or len(source["results"]) < len(tasks):
        raise TrialFailed(
            f"the record of trial {parent}, which trial {number} continues, is missing or damaged; "
            "give the search another name"
        )
    inherited = lineage(source, tasks)
    record["results"] = inherited["results"]
    record["history"] = inherited["history"]
    record["rounds"] = previous["rounds"]
    record["wall_s"] = previous["wall_s"]
    record["started"] = previous["started"]


def _learn(
    plan: PhasePlan, record: Trial, report: Report, started: float, previous: Trial | None
) -> None:
    """Learn the tasks of the round that have no result in `record`, one after the other.

    With `plan.each`, the parameters of the record apply only to these tasks.

    Args:
        plan: Common data of the trials.
        record: Record of the trial, which is updated and stored after each change.
        report: Called with the result after each task.
        started: Start of the trial on the monotonic clock.
        previous: Record of the trial from an interrupted session, or None.
    """
    store = Store(plan.storage)
    params = record["params"]
    learned = len(record["results"])
    history = dict(record["history"])
    if plan.each:
        history |= {
            task: dict(params) for task in plan.tasks[learned:] if task in plan.method_tasks
        }
    elif plan.phase:
        history[plan.phase] = dict(params)
    settings = plan.config(params, history, f"{plan.name}-{record['number']:04d}")
    label = next(iter(settings.methods))

    def save_count() -> None:
        count.write_into(record)
        record["wall_s"] = round(time.monotonic() - started, 3)
        write_record(plan.storage, plan.name, record)

    count = Count(settings.cluster, save_count)
    if previous is not None:
        count.resume_from(previous)
    graph, tasks = _build_trial_graph(plan, settings, store)
    runner = Runner(store, settings, graph, count)
    try:
        # The search ingests the data before its trials start. Ingest it again if it was deleted.
        if any(stage.is_provisional for stage in graph):
            for stage in graph:
                if stage.step == "ingest":
                    runner.run(stage.id)
            runner.graph, tasks = _build_trial_graph(plan, settings, store)
        graph_record = make_record(runner.graph, settings, tasks, dict(plan.provenance))
        record["graph"] = graph_record
        with (
            store.hold_gc_lock()
        ):  # garbage collection must know the graph before stages are looked up
            write_record(plan.storage, plan.name, record)
        for position, task in enumerate(plan.tasks[: plan.until]):
            if position < learned:
                continue
            runner.run(f"{label}/{task}/evaluate")
            if plan.only and position < len(plan.tasks) - 1:
                continue
            result = compute_result(store, graph_record, label, task, position)
            record["results"] = [*record["results"], result]
            record["history"] = {}
            if plan.each:
                names = [name for name in plan.tasks[: position + 1] if name in history]
                record["history"] = {name: history[name] for name in names}
                finished_round: TrialRound = {
                    "params": dict(params),
                    "accuracy": result["accuracy"],
                }
                record["rounds"] = [*record["rounds"], finished_round]
            if position == len(plan.tasks) - 1:
                # Stored together with the last result: Tune may stop the trial after this result,
                # and a trial that has learned all tasks must not count as stopped.
                record["status"] = "finished"
                record["ended"] = now()
            message = _explain_forgetting(plan, record)
            if message:
                record["status"] = "stopped"
                record["message"] = message
                record["ended"] = now()
            save_count()
            if message:
                return  # without a report: the scheduler must not compare other trials with it
            report(result)
    finally:
        runner.close()


def _explain_forgetting(plan: PhasePlan, record: Trial) -> str:
    """Return a message if a trial forgets more than `max_forgetting` allows, else ""."""
    average = compute_trial_forgetting(record["results"])
    if plan.max_forgetting is None or not average > plan.max_forgetting:
        return ""
    count = len(record["results"])
    return (
        f"forgetting of {100 * average:.1f} % after {count} tasks is more than max_forgetting, "
        f"{100 * plan.max_forgetting:g} %"
    )


def _build_trial_graph(
    plan: PhasePlan, settings: config.Config, store: Store
) -> tuple[Graph, list[Task]]:
    """Build the part of the graph that a trial needs.

    Returns:
        The evaluations of the plan's tasks with all stages that they depend on, and the tasks.
    """
    graph, tasks = build.build_graph(settings, store, dict(plan.provenance), "val")
    label = next(iter(settings.methods))
    stage_ids: set[str] = set()
    for task in plan.tasks:
        stage_ids |= graph.with_ancestors([f"{label}/{task}/evaluate"])
    part = Graph.of(graph.name, [stage for stage in graph if stage.id in stage_ids])
    return part, [task for task in tasks if task.name in plan.tasks]


class Runner:
    """Runs parts of one graph, one after another, on one executor.

    Attributes:
        lookups: Look-ups of the stages of all parts so far. A stage is looked up only once.
    """

    def __init__(self, store: Store, settings: config.Config, graph: Graph, count: Count):
        self.store = store
        self.settings = settings
        self.graph = graph
        self.count = count
        self.lookups: dict[str, Lookup] = {}
        self.executor = executor.SharedExecutor(self._make_executor)

    def run(self, stage_id: str) -> None:
        """Run a stage and its ancestors, except those with results.

        Raises:
            UserError: If a stage fails.
        """
        stage_ids = self.graph.with_ancestors([stage_id])
        part = Graph.of(self.graph.name, [stage for stage in self.graph if stage.id in stage_ids])
        new = Graph(part.name, {s.id: s for s in part if s.id not in self.lookups})
        new_lookups = look_up_each(new, self.store, None, "nothing")
        self.lookups = mark_outdated(part, self.lookups | new_lookups)
        self.count.reused += sum(self.lookups[stage.id].hit for stage in new)
        outcome = run_graph(
            part,
            self.store,
            lambda todo: self.executor.lend(),
            RetryPolicy.of(self.settings.cluster).stage,
            [self.count],
            self.lookups,
        )
        for failed, message in outcome.failures.items():
            if not message.startswith("stage "):
                message = f"stage {failed} failed: {message}"
            raise UserError(message)
        for stage in part:
            manifest = dict(outcome.manifests.get(stage.id) or {})
            self.lookups[stage.id] = Lookup(True, "stands", manifest)

    def _make_executor(self) -> Executor:
        cluster = self.settings.cluster
        # Tune has reserved one worker's resources for this process (`tune.compute_resources`). So a
        # single worker needs no process of its own (0), and several workers form one group.
        workers = {"workers": 0} if cluster.workers == 1 else {"groups": 1}
        return executor.make_executor(
            self.store,
            cluster.model_copy(update=workers),
            self.graph,
            set(self.graph.stages),
            self.count.on_progress,
            lambda stage: {},
        )

    def close(self) -> None:
        """Close the executor."""
        self.executor.close()


def compute_result(
    store: Store, record: RunRecord, label: str, task: str, position: int
) -> TrialResult:
    """Return the validation accuracies after a task, and the stored bytes per learned task.

    The bytes are those of the task states and of the carried state (the state that a task hands to
    the next task), without the shared backbone. They are divided by the number of tasks so far. A
    base task, on which the backbone was trained, does not count.

    Args:
        store: The store.
        record: Run record of the trial's graph.
        label: Label of the method.
        task: Name of the task.
        position: Index of the task in the stream.

    Raises:
        UserError: If the accuracy after the task is missing.
    """
    tables = RunTables.load(store.storage, record)
    matrix = tables.matrix(label)
    sizes = tables.sizes(label)
    last = sizes[min(position, len(sizes) - 1)]
    learned = [row for row in sizes[: position + 1] if row["role"] != "base"]
    accuracy = float(matrix.over_time[position]["average_accuracy"])
    if math.isnan(accuracy):
        raise UserError(
            f"task {task!r} has no validation accuracy, so the trial cannot be judged; "
            "data of an earlier task may be gone"
        )
    rates = zip(matrix.tasks[: position + 1], matrix.rates[position].tolist(), strict=False)
    return {
        "task": task,
        "position": position,
        "accuracy": accuracy,
        "bytes": (last["total"] - last["backbone"]) / max(len(learned), 1),
        "per_task": {name: float(rate) for name, rate in rates},
    }
