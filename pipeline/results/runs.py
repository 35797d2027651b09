"""The runs of a storage and their progress, from records, results and the drivers' status files."""

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
MAX_NAMES = 8  # runs that an error names


class MethodAccuracy(NamedTuple):
    """The average accuracy of a method after its last finished task; None before the first.

    Of a run of several seeds or class orders it is the mean over them.
    """

    label: str
    average_accuracy: float | None


@dataclass(frozen=True)
class RunOverview:
    """A run in a list.

    started: ISO 8601, of the last start. done: stages with a result, of `total`, without the
    report. `unfinished` is a run of which no driver has left word; of a `damaged` one the record
    cannot be read.
    """

    name: str
    state: State
    started: str
    done: int
    total: int
    methods: tuple[MethodAccuracy, ...]


@dataclass(frozen=True)
class StageStatus:
    """A stage of a run.

    since_s: seconds in this state; None if unknown. wall_s: seconds that it took, or None. where:
    the process that runs it or ran it. is_saved: no process runs it, and the next run resumes from
    its checkpoint.
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
    """The process that runs a run, or ran it last.

    age_s: seconds since it started. quiet_s: seconds since it was last heard of. message: why the
    run failed. command: the command that resumes the run.
    """

    host: str
    pid: int
    age_s: float
    quiet_s: float
    message: str
    command: str


@dataclass(frozen=True)
class RunStatus:
    """How far a run is.

    driver: None where none has left word. left_s: seconds until its end, about, or None.
    left_without: stages that `left_s` leaves out, because nothing comparable was measured. gpu_use:
    how busy each GPU was while stages trained; empty without GPUs.
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
    """Return the runs of a storage, the latest first.

    Raises:
        UserError: If the storage does not exist.
    """
    check_readable(storage)
    store = Store(storage)
    has_result = _key_finder(storage, "stages", MANIFEST)
    overviews = []
    for name in store.run_names():
        if not re.fullmatch(NAME, name):  # no run can have it
            continue
        overview = _make_overview(store, name, has_result)
        if overview is not None:
            overviews.append(overview)
    return sorted(overviews, key=lambda overview: overview.started, reverse=True)


def _make_overview(
    store: Store, name: str, has_result: Callable[[str], bool]
) -> RunOverview | None:
    """Return a run in a list; None for a folder without a record.

    A record on a disk that is not a readable file counts as damaged and does not stop the list.
    """
    try:
        record = store.record(name)
        if record is not None and can_be_shown(record):
            return _overview(store, record, has_result)
        if not exists(store.record_path(name)):
            return None
    except OSError:
        if not is_local(store.storage):
            raise
    return RunOverview(name, "damaged", "", 0, 0, ())


def _key_finder(storage: str, area: str, file: str) -> Callable[[str], bool]:
    """Return a function that says whether a key has a file in an area. A bucket is listed once."""
    root = join(storage, area)
    if is_local(storage):
        return lambda key: exists(join(root, key, file))
    files = list_files(root)
    return lambda key: f"{key}/{file}" in files


def _overview(store: Store, record: RunRecord, has_result: Callable[[str], bool]) -> RunOverview:
    stages = _computed(record)
    num_done = sum(1 for stage in stages if has_result(stage["key"]))
    live = read_status(store.storage, record["name"])
    state = _state(store.storage, live, num_done == len(stages))
    runs = [
        RunTables.load(store.storage, _evaluations(replica))
        for replica in store.records(record).values()
        if can_be_shown(replica)
    ]
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


def _computed(record: RunRecord) -> list[StageRecord]:
    """Return the stages of a run without its report, which is made again at no cost."""
    return [stage for stage in record["stages"] if stage["step"] != "report"]


def _evaluations(record: RunRecord) -> RunRecord:
    """Return a record with the evaluations alone, which hold the accuracies."""
    evaluations = [stage for stage in record["stages"] if stage["step"] == "evaluate"]
    return {**record, "stages": evaluations}


def _mean_accuracy(runs: Sequence[RunTables], label: str) -> float | None:
    """Return the average accuracy of a method, the mean over replicas; None before all have one."""
    values = [_average_accuracy(tables, label) for tables in runs]
    known = [value for value in values if value is not None]
    if not known or len(known) < len(values):
        return None
    return sum(known) / len(known)


def _average_accuracy(tables: RunTables, label: str) -> float | None:
    try:
        value = tables.matrix(label).final.get("average_accuracy", math.nan)
    # a record or a result of another version, or damaged
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, UserError):
        return None
    return None if math.isnan(value) else value


def _state(storage: str, live: LiveStatus | None, is_whole: bool) -> State:
    """Return the state of a run. is_whole: all its results stand."""
    if live is not None and is_alive(storage, live):
        return "running"
    if is_whole:
        return "finished"
    if live is None or live["state"] == "finished":  # results were deleted, or the config changed
        return "unfinished"
    if live["state"] == "running":
        return "killed"
    return live["state"]


# ---- one run -------------------------------------------------------------------------------------
def run_status(storage: str, name: str) -> RunStatus:
    """Return how far a run is. Raise `UserError` for an unknown one."""
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
        _state(storage, live, is_whole),
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
    """Return the status of a stage: as the driver sees it while it lives, else by its result."""
    state: str = live.get("state", "waiting")
    is_saved = False
    if not is_alive:
        stands = has_result(stage["key"])
        if stands and state not in ("done", "reused"):
            state = "done"
        elif not stands:
            is_saved = has_checkpoint(stage["key"])
            if state not in ("failed", "blocked"):
                state = "interrupted" if is_saved else "missing"
    since = live.get("since")
    shows_time = is_alive and since is not None
    return StageStatus(
        stage["id"],
        stage["step"],
        stage["label"],
        stage["task"],
        stage["key"],
        state,
        where=live.get("where", ""),
        since_s=max(0.0, now - since) if shows_time and since is not None else None,
        wall_s=live.get("wall_s"),
        tries=int(live.get("tries", 0)),
        message=live.get("message", ""),
        progress=dict(live.get("progress", {})) if is_alive else {},
        is_saved=is_saved,
    )


def named_run(run: str, storage: str) -> tuple[str, str]:
    """Return name and storage of a run, given by its name or by the path of the config.

    The storage of a config replaces `storage`.
    """
    if run.endswith((".yaml", ".yml")) or os.path.isfile(run):
        settings = config.load(run, with_methods=False)
        return settings.name, absolute(settings.storage)
    return run, absolute(storage)


def find_record(store: Store, name: str) -> RunRecord:
    """Return the record of a run. Raise `UserError` where there is none, with names of others."""
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
        f"{_remedy(name, store.run_names())}"
    )


def _remedy(name: str, others: Iterable[str]) -> str:
    names = [other for other in others if other != name]
    if not names:
        return "name its storage with --storage, or run it first"
    more = ", ..." if len(names) > MAX_NAMES else ""
    return did_you_mean(name, names, f"there are: {', '.join(names[:MAX_NAMES])}{more}")
