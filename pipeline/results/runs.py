"""The runs of a storage and their progress, from run records, results and driver status files.

`list_runs` returns all runs of a storage, `run_status` returns one run with its stages. The driver
is the process that executes a run.
"""

from __future__ import annotations

import math
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from pipeline.config import settings as config
from pipeline.config.settings import NAME
from pipeline.config.yaml_files import absolute
from pipeline.graph.live_status import (
    GpuFigure,
    LiveStage,
    LiveStatus,
    check_readable,
    is_alive,
    read_status,
)
from pipeline.graph.run_record import RunRecord, StageRecord, can_be_shown
from pipeline.graph.store import Store
from pipeline.results.tables import RunTables
from workers.errors import UserError, did_you_mean
from workers.storage.artifact import (
    CHECKPOINTS,
    LATEST,
    MANIFEST,
    exists,
    is_local,
    join,
    list_files,
)

# State of a run, see `_find_run_state`. The driver wrote `failed`, `interrupted`, `preempted` and
# `stopped` into its status file before it ended. `killed`: it ended without writing a state.
State = Literal[
    "running",
    "finished",
    "failed",
    "killed",
    "interrupted",
    "preempted",
    "stopped",
    "unfinished",
    "damaged",
]
MAX_NAMES = 8  # maximum number of runs that an error message lists


class MethodAccuracy(NamedTuple):
    """The average accuracy of a method after its last finished task.

    For a run with several seeds or class orders, the accuracy is the mean over the replicas. It is
    None if a replica has no readable record, no finished task, or damaged results.
    """

    label: str
    average_accuracy: float | None


@dataclass(frozen=True)
class RunOverview:
    """An entry in the list of runs.

    Attributes:
        name: Name of the run.
        state: State of the run. `unfinished`: results are missing, but the driver left no status
            file, or a status file that says that the run finished. `damaged`: the record of the
            run cannot be read.
        started: Time of the last start, ISO 8601.
        done: Number of stages with a result, without the report.
        total: Number of stages, without the report.
        methods: Accuracy of each method.
    """

    name: str
    state: State
    started: str
    done: int
    total: int
    methods: tuple[MethodAccuracy, ...]


@dataclass(frozen=True)
class StageStatus:
    """The status of a stage of a run.

    Attributes:
        id: Id of the stage.
        step: Step of the stage.
        label: Label of the method, or None.
        task: Name of the task, or None.
        key: Key of the result.
        state: While the driver is alive, a `live_status.StageState`. Afterwards, a stage with a
            result is `done` or `reused`. A stage without a result is `failed` or `blocked` if the
            driver wrote so, else `interrupted` if it has a checkpoint, else `missing`.
        where: Process or worker group, machine and GPU that run or ran the stage, as text.
        since_s: Seconds in this state; None if unknown, or if the driver is not alive.
        wall_s: Duration in seconds; None if unknown.
        tries: Number of failed tries.
        message: Why the stage failed, is blocked, or waits for another try.
        progress: Progress report of a running stage.
        is_saved: Whether no process runs the stage and the next run resumes from its checkpoint.
    """

    id: str
    step: str
    label: str | None
    task: str | None
    key: str
    state: str
    where: str = ""
    since_s: float | None = None
    wall_s: float | None = None
    tries: int = 0
    message: str = ""
    progress: dict[str, object] = field(default_factory=dict)
    is_saved: bool = False


@dataclass(frozen=True)
class Driver:
    """The driver: the process that executes a run, or executed it last.

    Attributes:
        host: Name of the host.
        pid: Process id.
        age_s: Seconds since the start of the process.
        quiet_s: Seconds since the last update of the status file.
        message: Reason why the run failed.
        command: Command that resumes the run.
    """

    host: str
    pid: int
    age_s: float
    quiet_s: float
    message: str
    command: str


@dataclass(frozen=True)
class RunStatus:
    """The status of a run.

    Attributes:
        name: Name of the run.
        state: State of the run.
        started: Time of the last start, ISO 8601.
        stages: Status of the stages.
        driver: The driver; None without a status file.
        left_s: Estimated seconds until the end; None if unknown.
        left_without: Number of stages that `left_s` does not include, because the duration of
            comparable stages is unknown.
        gpu_use: Utilisation of each GPU while stages trained; empty without GPUs.
    """

    name: str
    state: State
    started: str
    stages: tuple[StageStatus, ...]
    driver: Driver | None = None
    left_s: float | None = None
    left_without: int = 0
    gpu_use: tuple[GpuFigure, ...] = ()

    @property
    def counts(self) -> Counter[str]:
        """Number of stages in each state."""
        return Counter(stage.state for stage in self.stages)


def list_runs(storage: str) -> list[RunOverview]:
    """Return the runs of a storage. The last started run comes first.

    Raises:
        UserError: If the storage is a local folder that does not exist or cannot be listed.
        OSError: If the storage is a bucket and cannot be read.
    """
    check_readable(storage)
    store = Store(storage)
    has_result = _key_finder(storage, "stages", MANIFEST)
    overviews = []
    for name in store.run_names():
        if not re.fullmatch(NAME, name):  # not a valid name of a run
            continue
        overview = _make_overview(store, name, has_result)
        if overview is not None:
            overviews.append(overview)
    return sorted(overviews, key=lambda overview: overview.started, reverse=True)


def _make_overview(
    store: Store, name: str, has_result: Callable[[str], bool]
) -> RunOverview | None:
    """Return the entry of a run in the list; None for a folder without a record.

    A run is `damaged` if its record is invalid, or cannot be read from a disk. If the record cannot
    be read from a bucket, the `OSError` is raised.
    """
    try:
        record = store.record(name)
        if record is not None and can_be_shown(record):
            return _summarize_record(store, record, has_result)
        if not exists(store.record_path(name)):
            return None
    except OSError:
        if not is_local(store.storage):
            raise
    return RunOverview(name, "damaged", "", 0, 0, ())


def _key_finder(storage: str, area: str, file: str) -> Callable[[str], bool]:
    """Return a function that tells whether a key has a file in an area of the storage.

    A bucket is listed only once, in advance.

    Args:
        storage: Folder or URI of the storage.
        area: Folder in the storage that contains one folder per key.
        file: Name of the file.
    """
    root = join(storage, area)
    if is_local(storage):
        return lambda key: exists(join(root, key, file))
    files = list_files(root)
    return lambda key: f"{key}/{file}" in files


def _summarize_record(
    store: Store, record: RunRecord, has_result: Callable[[str], bool]
) -> RunOverview:
    """Return the entry of a run with a valid record in the list."""
    stages = _list_computed_stages(record)
    num_done = sum(1 for stage in stages if has_result(stage["key"]))
    live = read_status(store.storage, record["name"])
    state = _find_run_state(store.storage, live, num_done == len(stages))
    runs = [
        RunTables.load(store.storage, _evaluations(replica))
        for replica in store.records(record).values()
        if can_be_shown(replica)
    ]
    names = record.get("replicas")
    if isinstance(names, dict) and len(runs) < len(names):
        runs = []  # a mean over fewer replicas would look like the mean over all
    labels = dict.fromkeys(stage["label"] for stage in record["stages"] if stage["label"])
    methods = [MethodAccuracy(label, _mean_accuracy(runs, label)) for label in labels]
    return RunOverview(
        record["name"],
        state,
        str(record.get("created", "")),
        num_done,
        len(stages),
        tuple(methods),
    )


def _list_computed_stages(record: RunRecord) -> list[StageRecord]:
    """Return the stages of a run without the report, which is cheap to build again."""
    return [stage for stage in record["stages"] if stage["step"] != "report"]


def _evaluations(record: RunRecord) -> RunRecord:
    """Return a record with only the evaluation stages, which have the accuracies."""
    evaluations = [stage for stage in record["stages"] if stage["step"] == "evaluate"]
    return {**record, "stages": evaluations}


def _mean_accuracy(runs: Sequence[RunTables], label: str) -> float | None:
    """Return the mean over replicas of the average accuracy; None if a replica has none."""
    values = [_read_average_accuracy(tables, label) for tables in runs]
    known = [value for value in values if value is not None]
    if not known or len(known) < len(values):
        return None
    return sum(known) / len(known)


def _read_average_accuracy(tables: RunTables, label: str) -> float | None:
    try:
        value = tables.matrix(label).final.get("average_accuracy", math.nan)
    # the record or a result is damaged, or was written by another version of Accrete
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, UserError):
        return None
    return None if math.isnan(value) else value


def _find_run_state(storage: str, live: LiveStatus | None, is_whole: bool) -> State:
    """Return the state of a run.

    Args:
        storage: Folder or URI of the storage.
        live: Status file of the driver, or None.
        is_whole: Whether all results of the run exist, except the report.
    """
    if live is not None and is_alive(storage, live):
        return "running"
    if is_whole:
        return "finished"
    # `finished` without all results: results were deleted, or the config was changed
    if live is None or live["state"] == "finished":
        return "unfinished"
    if live["state"] == "running":
        return "killed"
    return live["state"]


# ---- one run -------------------------------------------------------------------------------------
def run_status(storage: str, name: str) -> RunStatus:
    """Return the status of a run. Raise `UserError` if the run does not exist."""
    store = Store(storage)
    record = find_record(store, name)
    live = read_status(storage, name)
    alive = live is not None and is_alive(storage, live)
    has_result = _key_finder(storage, "stages", MANIFEST)
    has_checkpoint = _key_finder(storage, CHECKPOINTS, LATEST)
    now = time.time()
    stages = []
    for stage in record["stages"]:
        live_stage: LiveStage = {}
        if live is not None:
            live_stage = live["stages"].get(stage["id"], {})
        stages.append(_stage_status(stage, live_stage, alive, has_result, has_checkpoint, now))
    is_whole = all(s.state in ("done", "reused") for s in stages if s.step != "report")
    status = RunStatus(
        name,
        _find_run_state(storage, live, is_whole),
        str(record.get("created", "")),
        tuple(stages),
    )
    if live is None:
        return status
    driver = Driver(
        live["host"],
        int(live["pid"]),
        max(0.0, now - live["started"]),
        max(0.0, now - live["updated"]),
        live.get("message", ""),
        live["command"],
    )
    left_s = live["left_s"] if alive else None
    return replace(
        status,
        driver=driver,
        left_s=left_s,
        left_without=live["left_without"],
        gpu_use=tuple(live.get("gpu_use", ())),
    )


def _stage_status(
    stage: StageRecord,
    live: LiveStage,
    is_alive: bool,
    has_result: Callable[[str], bool],
    has_checkpoint: Callable[[str], bool],
    now: float,
) -> StageStatus:
    """Return the status of a stage.

    While the driver is alive, the state is taken from its status file. Otherwise results and
    checkpoints determine the state, and a stage without a result stays `failed` or `blocked`.

    Args:
        stage: The stage in the record of the run.
        live: The stage in the status file of the driver.
        is_alive: Whether the driver is alive.
        has_result: Returns whether a key has a result.
        has_checkpoint: Returns whether a key has a checkpoint.
        now: Current time, in seconds since the epoch.
    """
    state: str = live.get("state", "waiting")
    is_saved = False
    if not is_alive:
        is_done = has_result(stage["key"])
        if is_done and state not in ("done", "reused"):
            state = "done"
        elif not is_done:
            is_saved = has_checkpoint(stage["key"])
            if state not in ("failed", "blocked"):
                state = "interrupted" if is_saved else "missing"
    since = live.get("since")
    return StageStatus(
        stage["id"],
        stage["step"],
        stage["label"],
        stage["task"],
        stage["key"],
        state,
        where=live.get("where", ""),
        since_s=max(0.0, now - since) if is_alive and since is not None else None,
        wall_s=live.get("wall_s"),
        tries=int(live.get("tries", 0)),
        message=live.get("message", ""),
        progress=dict(live.get("progress", {})) if is_alive else {},
        is_saved=is_saved,
    )


def resolve_run(run: str, storage: str) -> tuple[str, str]:
    """Return name and storage of a run.

    Args:
        run: Name of the run, or path of the config.
        storage: Storage of the run. For a config, the storage in the config is used instead.
    """
    if run.endswith((".yaml", ".yml")) or os.path.isfile(run):
        settings = config.load(run, with_methods=False)
        return settings.name, absolute(settings.storage)
    return run, absolute(storage)


def find_record(store: Store, name: str) -> RunRecord:
    """Return the record of a run. Raise `UserError` if the run does not exist or is damaged."""
    check_readable(store.storage)
    is_name = re.fullmatch(NAME, name) is not None
    record = store.record(name) if is_name else None
    if record is not None and can_be_shown(record):
        return record
    if is_name and exists(store.record_path(name)):
        raise UserError(
            f"the record of run {name!r} in {store.storage!r} is damaged; start the run again"
        )
    raise UserError(
        f"storage {store.storage!r} has no record of a run {name!r:.80}; "
        f"{_suggest_run(name, store.run_names())}"
    )


def _suggest_run(name: str, others: Iterable[str]) -> str:
    names = [other for other in others if other != name]
    if not names:
        return "name its storage with --storage, or run it first"
    more = ", ..." if len(names) > MAX_NAMES else ""
    return did_you_mean(name, names, f"there are: {', '.join(names[:MAX_NAMES])}{more}")
