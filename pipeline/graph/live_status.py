"""Status of a run, `<storage>/runs/NAME/status.json`, for other processes.

The driver of the run writes it. A live driver holds the lock `run-NAME`. The operating system
releases the lock when the process ends for any reason. Buckets have no locks: there, a recent write
shows that the driver is alive.
"""

from __future__ import annotations

import json
import os
import platform
import time
from contextlib import suppress
from typing import Annotated, Any, Literal, NotRequired, Required, TypeGuard, get_args

from pydantic import Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict  # pydantic needs it before Python 3.12

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
HEARTBEAT_S = 10.0  # maximum number of seconds between two writes on a disk
BUCKET_HEARTBEAT_S = 60.0  # maximum number of seconds between two writes in a bucket
MISSED = 4  # number of missed heartbeats after which a driver counts as dead
MAX_NUMBER = 10**15  # largest accepted number in a status or an event
MAX_TEXT = 10_000  # characters per string in a status

StageState = Literal["waiting", "queued", "running", "reused", "done", "failed", "blocked"]
STAGE_STATES: tuple[StageState, ...] = get_args(StageState)
RunState = Literal["running", "finished", "stopped", "failed", "interrupted", "preempted"]
Whole = Annotated[int, Field(gt=-MAX_NUMBER, lt=MAX_NUMBER)]
Amount = Annotated[float, Field(gt=-MAX_NUMBER, lt=MAX_NUMBER)]
Text = Annotated[str, Field(max_length=MAX_TEXT)]


class LiveStage(TypedDict, total=False):
    """A stage of a run in progress.

    Attributes:
        state: State of the stage.
        since: Time of the last change of `state`, in seconds since the epoch.
        tries: Number of failed tries.
        where: Process or worker group, machine and GPU that run the stage, as text.
        wall_s: Duration in seconds.
        progress: Last progress report of the worker.
        message: Why the stage failed, is blocked, or waits again.
    """

    state: StageState
    since: Amount
    tries: Whole
    where: Text
    wall_s: Amount
    progress: dict[str, Any]
    message: Text


class GpuSample(TypedDict, total=False):
    """Use of a GPU by all processes.

    Attributes:
        memory_bytes: Used GPU memory.
        total_bytes: Size of the GPU memory.
        utilization: Share of the time in which the GPU computed, in [0, 1].
        reason: Why `utilization` is unknown.
    """

    memory_bytes: Whole
    total_bytes: Whole
    utilization: Amount
    reason: Text


class MachineSample(TypedDict, total=False):
    """Use of a machine.

    Attributes:
        node: Name of the machine.
        cpu: Used share of all CPU cores since the last sample; absent without psutil.
        memory_bytes: Main memory used by all processes; absent without psutil.
        gpus: Index of a worker's GPU on its machine -> use of the GPU.
    """

    node: Text
    cpu: Amount
    memory_bytes: Whole
    gpus: dict[str, GpuSample]


class GpuFigure(TypedDict, total=False):
    """Utilization of a GPU while stages trained.

    Attributes:
        node: Name of the machine.
        gpu: Index of the GPU on that machine.
        busy: Share of the time in which the GPU computed; absent if it could not be measured.
        reason: Why `busy` could not be measured.
        advice: Settings that would use the GPU better; may be empty.
        ranks: Average number of ranks that trained on the GPU at the same time.
        sampled_at: Time of the last sample, in seconds since the epoch.
    """

    node: Required[Text]
    gpu: Required[Text]
    busy: Amount
    reason: Text
    advice: Text
    ranks: Amount
    sampled_at: Amount


class LiveStatus(TypedDict):
    """The status of a run, as its driver writes it.

    Attributes:
        name: Name of the run.
        state: State of the run.
        host: Machine of the driver.
        pid: Process id of the driver.
        started: Start time, in seconds since the epoch.
        updated: Time of the last write, in seconds since the epoch.
        command: Command that resumes the run.
        message: Why the run failed.
        left_s: Estimated seconds until the run ends. None if no remaining stage can be estimated,
            or if a stage is late by more than the estimate.
        left_without: Number of stages that `left_s` leaves out, because no stage of their kind has
            finished yet.
        stages: Status of each stage, by id.
        machines: Name of a machine -> its last sample.
        groups: Number of worker groups in state `up`, and in state `starting` (waiting for
            resources or processes).
        gpu_use: Utilization of each GPU in the last start of the run that trained stages.
    """

    name: Text
    state: RunState
    host: Text
    pid: Whole
    started: Amount
    updated: Amount
    command: Text
    message: NotRequired[Text]
    left_s: Amount | None
    left_without: Whole
    stages: dict[str, LiveStage]
    machines: NotRequired[dict[str, MachineSample]]
    groups: NotRequired[dict[str, Whole]]
    gpu_use: NotRequired[list[GpuFigure]]


STATUS = TypeAdapter(LiveStatus)


def get_run_lock_key(name: str) -> str:
    """Return the key of the lock that the driver of a run holds."""
    return f"run-{name}"


def status_uri(storage: str, name: str) -> str:
    """Return the path or URI of the status file of a run."""
    return join(storage, "runs", name, FILE)


def write_status(storage: str, status: LiveStatus) -> None:
    """Write the status of a run atomically.

    On a disk, fsync is not called, because the status is not needed after a crash of the machine.

    Args:
        storage: URI of the storage.
        status: Status of the run.

    Raises:
        OSError: If the file cannot be written.
        UserError: If the storage cannot be used.
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
    """Return the last status of a run, or None if there is no valid status.

    Raises:
        OSError: If the storage is a bucket and cannot be read.
    """
    try:
        status = read_json(status_uri(storage, name))
    except (FileNotFoundError, ValueError):
        return None
    except OSError:  # on a disk: the path is not a file, or reading it is not permitted
        if not is_local(storage):
            raise
        return None
    return status if _is_status(status, name) else None


def is_amount(value: Any) -> TypeGuard[float]:
    """Return whether a JSON value is a finite number with an absolute value below MAX_NUMBER."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and -MAX_NUMBER < value < MAX_NUMBER


def _is_status(value: Any, name: str) -> bool:
    """Return whether a JSON value is a status of this run. The storage may be untrusted."""
    try:
        STATUS.validate_python(value, strict=True)
    except ValidationError:
        return False
    return bool(value["name"] == name)


def is_alive(storage: str, status: LiveStatus) -> bool:
    """Return whether the driver that wrote a status is still alive.

    If a process holds the lock of the run, the driver is alive. If no process holds it, a driver on
    this machine has ended. A driver on another machine can hold a lock that is not visible here. In
    that case, and on storages without locks, the time of the last write decides.

    Args:
        storage: URI of the storage.
        status: Status of the run.
    """
    if status["state"] != "running":
        return False
    locked = is_locked(join(storage, "stages"), get_run_lock_key(status["name"]))
    if locked:
        return True
    if locked is False and status["host"] == platform.node():
        return False
    heartbeat_s = HEARTBEAT_S if is_local(storage) else BUCKET_HEARTBEAT_S
    return abs(time.time() - status["updated"]) < MISSED * heartbeat_s


def check_readable(storage: str) -> None:
    """Raise `UserError` if a local storage is not a folder that can be listed.

    Other storages are not checked.
    """
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
