"""Status of a run, `<storage>/runs/NAME/status.json`. Its driver writes it, others read it.

A live driver holds the lock `run-NAME`. The system releases the lock when the driver ends in any
way. A bucket has no locks: there the time of the last write shows that the driver lives.
"""

from __future__ import annotations

import json
import os
import platform
import time
from contextlib import suppress
from typing import Any, Literal, NotRequired, Required, TypedDict, TypeGuard, get_args

from workers.errors import UserError
from workers.storage.artifact import (
    is_local,
    join,
    make_dirs,
    read_json,
    resolve,
    share_file,
    temporary_name,
    write_bytes,
)
from workers.storage.filesystem import access_remedy
from workers.storage.lock import is_locked

FILE = "status.json"
HEARTBEAT_S = 10.0  # maximum time between two writes on a disk
BUCKET_HEARTBEAT_S = 60.0
MISSED = 4  # a driver counts as dead after this number of missed heartbeats
MAX_NUMBER = 1e15  # in a status or an event
MAX_TEXT = 10_000  # characters of a text in a status

StageState = Literal["waiting", "queued", "running", "reused", "done", "failed", "blocked"]
STAGE_STATES: tuple[StageState, ...] = get_args(StageState)
RunState = Literal["running", "finished", "stopped", "failed", "interrupted", "preempted"]
RUN_STATES: tuple[RunState, ...] = get_args(RunState)


class LiveStage(TypedDict, total=False):
    """A stage of a run in progress.

    Attributes:
        state: Its state.
        since: Time of the last change of `state`, in seconds since the epoch.
        tries: Number of failed tries.
        where: Place that runs it.
        wall_s: Duration in seconds.
        progress: Last progress report of the worker.
        message: Why it failed or waits again.
    """

    state: StageState
    since: float
    tries: int
    where: str
    wall_s: float
    progress: dict[str, Any]
    message: str


class GpuSample(TypedDict, total=False):
    """Use of a GPU by all processes.

    Attributes:
        memory_bytes: Used memory.
        total_bytes: Size of the memory.
        utilization: Share of the time in which it computed.
        reason: Why `utilization` is unknown.
    """

    memory_bytes: int
    total_bytes: int
    utilization: float
    reason: str


class MachineSample(TypedDict, total=False):
    """Use of a machine.

    Attributes:
        node: Name of the machine.
        cpu: Used share of all its cores since the last sample; absent without psutil.
        memory_bytes: Memory used by all processes; absent without psutil.
        gpus: Number of the worker's GPU on its machine -> use of the GPU.
    """

    node: str
    cpu: float
    memory_bytes: int
    gpus: dict[str, GpuSample]


class GpuFigure(TypedDict, total=False):
    """How busy a GPU was while stages trained.

    Attributes:
        node: Name of the machine.
        gpu: Its number on that machine.
        busy: Share of the time in which it computed; absent if it could not be measured.
        reason: Why it could not be measured.
        advice: A setting that would use it more; empty if there is none.
        ranks: Average number of ranks that trained on it at a time.
        sampled_at: Time of the last sample, in seconds since the epoch.
    """

    node: Required[str]
    gpu: Required[str]
    busy: float
    reason: str
    advice: str
    ranks: float
    sampled_at: float


class LiveStatus(TypedDict):
    """A run as its driver sees it.

    Attributes:
        name: Name of the run.
        state: Its state.
        host: Machine of the driver.
        pid: Process id of the driver.
        started: Seconds since the epoch.
        updated: Seconds since the epoch.
        command: Command that resumes the run.
        message: Why the run failed.
        left_s: Estimated seconds until its end; None if nothing comparable was measured, or a stage
            is late by more than that.
        left_without: Number of stages that `left_s` leaves out, because nothing comparable was
            measured.
        stages: Status of each stage, by id.
        machines: Node -> the last sample.
        groups: Number of worker groups that are `up`, and `starting` (waiting for room or
            processes).
        gpu_use: How busy each GPU was while stages trained, since the last start with training.
    """

    name: str
    state: RunState
    host: str
    pid: int
    started: float
    updated: float
    command: str
    message: NotRequired[str]
    left_s: float | None
    left_without: int
    stages: dict[str, LiveStage]
    machines: NotRequired[dict[str, MachineSample]]
    groups: NotRequired[dict[str, int]]
    gpu_use: NotRequired[list[GpuFigure]]


def lock_key(name: str) -> str:
    """Return the key of the lock that the driver of a run holds."""
    return f"run-{name}"


def status_uri(storage: str, name: str) -> str:
    """Return where the status of a run is."""
    return join(storage, "runs", name, FILE)


def write_status(storage: str, status: LiveStatus) -> None:
    """Write the status of a run as a whole.

    On a disk the file is not forced down: after a crash of the machine nobody needs it. Raise
    `OSError` or `UserError` when it cannot be written.
    """
    uri = status_uri(storage, status["name"])
    data = json.dumps(status).encode()
    if not is_local(storage):
        write_bytes(uri, data)
        return
    path = resolve(uri)[1]
    make_dirs(os.path.dirname(path))
    part = f"{path}.{temporary_name()}.part"
    try:
        with open(part, "wb") as stream:
            stream.write(data)
        share_file(part)
        os.rename(part, path)
    except BaseException:
        with suppress(FileNotFoundError):
            os.remove(part)
        raise


def read_status(storage: str, name: str) -> LiveStatus | None:
    """Return the last status of a run; None where there is none that can be read."""
    try:
        status = read_json(status_uri(storage, name))
    except (FileNotFoundError, ValueError):
        return None
    except OSError:  # on a disk: it is not a file, or may not be read
        if not is_local(storage):
            raise
        return None
    return status if _is_status(status, name) else None


def is_amount(value: Any) -> TypeGuard[float]:
    """Return whether a JSON value is a number that can be shown: finite, of reasonable size."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and -MAX_NUMBER < value < MAX_NUMBER


def is_text(value: Any) -> bool:
    """Return whether a value is a text that can be shown, with a reasonable length."""
    return isinstance(value, str) and len(value) <= MAX_TEXT


def _is_status(value: Any, name: str) -> bool:
    """Return whether a JSON value has the form of a status: the storage can be a stranger's."""
    if not isinstance(value, dict) or value.get("name") != name:
        return False
    texts = ("host", "command")
    numbers = ("pid", "started", "updated", "left_without")
    stages = value.get("stages")
    left_s = value.get("left_s")
    figures = value.get("gpu_use", [])
    return (
        value.get("state") in RUN_STATES
        and all(is_text(value.get(key)) for key in texts)
        and all(is_amount(value.get(key)) for key in numbers)
        and is_text(value.get("message", ""))
        and "left_s" in value
        and (left_s is None or is_amount(left_s))
        and isinstance(stages, dict)
        and all(_is_stage(stage) for stage in stages.values())
        and isinstance(figures, list)
        and all(_is_gpu_figure(figure) for figure in figures)
    )


def _is_stage(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and value.get("state") in STAGE_STATES
        and all(is_text(value.get(key, "")) for key in ("where", "message"))
        and all(is_amount(value.get(key, 0)) for key in ("since", "tries", "wall_s"))
        and isinstance(value.get("progress", {}), dict)
    )


def _is_gpu_figure(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and all(is_text(value.get(key)) for key in ("node", "gpu"))
        and all(is_text(value.get(key, "")) for key in ("reason", "advice"))
        and all(is_amount(value.get(key, 0)) for key in ("busy", "ranks", "sampled_at"))
    )


def is_alive(storage: str, status: LiveStatus) -> bool:
    """Return whether the driver that wrote a status is still alive.

    On the driver's machine its lock decides. The lock of a driver on another machine may be
    invisible here, so its heartbeat decides.

    Args:
        storage: URI of the storage.
        status: Status of the run.
    """
    if status["state"] != "running":
        return False
    locked = is_locked(join(storage, "stages"), lock_key(status["name"]))
    if locked:
        return True
    if locked is False and status["host"] == platform.node():
        return False
    heartbeat_s = HEARTBEAT_S if is_local(storage) else BUCKET_HEARTBEAT_S
    return abs(time.time() - status["updated"]) < MISSED * heartbeat_s


def check_readable(storage: str) -> None:
    """Raise `UserError` if a storage is not a folder that can be listed."""
    if not is_local(storage):
        return
    folder = resolve(storage)[1]
    remedy = "give the folder that holds the runs with --storage"
    if not os.path.exists(folder):
        raise UserError(f"storage {storage!r} does not exist; {remedy}")
    if not os.path.isdir(folder):
        raise UserError(f"storage {storage!r} is not a folder; {remedy}")
    if not os.access(folder, os.R_OK | os.X_OK):
        raise UserError(f"storage {storage!r} cannot be listed; {access_remedy(storage)}")
