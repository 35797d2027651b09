"""Explain worker deaths from Ray's own reports, because a dead worker cannot report itself."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.graph import failures
from pipeline.graph.stage import Stage
from pipeline.launch import ray_internals

ANSWER_S = 20.0  # seconds to wait for the end of a log from another node
PROCESS = re.compile(r"^\s*pid: (\d+)$", re.MULTILINE)
ADDRESS = re.compile(r"^\s*ip: (\S+)$", re.MULTILINE)


class DeadWorker(NamedTuple):
    """A dead worker of a group.

    Attributes:
        rank: Rank of the worker in its group.
        address: Address of the node.
        process: Process id.
        report: Ray's report about the death.
    """

    rank: int
    address: str
    process: int
    report: str


class LogEnd(NamedTuple):
    """Path of the log of a process on its node, and the last lines of the log."""

    path: str
    text: str


def list_dead_workers(error: Exception) -> list[DeadWorker]:
    """Return the workers whose death ended a worker group with this error, sorted by rank.

    Workers on a lost node are left out, so the result is empty if only a node was lost.
    """
    workers = []
    for rank, report in sorted(ray_internals.find_died_workers(error).items()):
        process = PROCESS.search(report)
        address = ADDRESS.search(report)
        if process and address:
            text = "\n".join(line.strip() for line in report.splitlines())
            workers.append(DeadWorker(rank, address[1], int(process[1]), text))
    return workers


def describe_dead_workers(
    ray: Any,
    workers: Sequence[DeadWorker],
    nodes: Sequence[str],
    stage: Stage | None,
    storage: str,
) -> str:
    """Return a sentence about the dead workers of a group.

    If the stage is known, Ray's report about each worker and the end of each log are written to a
    file below `storage`, as for other failed attempts at the stage.

    Args:
        ray: The module `ray`.
        workers: The dead workers; at least one.
        nodes: Id of the node of each rank; empty if unknown.
        stage: The stage that the group ran, or None.
        storage: URI of the storage.
    """
    paths = []
    for worker in workers:
        node = nodes[worker.rank] if worker.rank < len(nodes) else ""
        log = fetch_log(ray, node, worker.process)
        if stage is not None:
            origin = failures.Origin(
                stage.id,
                stage.key,
                worker.address,
                worker.rank,
                max(len(nodes), worker.rank + 1),
                worker.process,
                log.path,
            )
            paths.append(failures.write_failure(storage, origin, worker.report, log.text))
    first = workers[0]
    others = f", and {len(workers) - 1} more ranks" if len(workers) > 1 else ""
    text = (
        f"rank {first.rank} on {first.address} died{others}: process {first.process} was killed or "
        "crashed, often because the machine ran out of memory"
    )
    return f"{text} (see {paths[0]})" if paths else text


def fetch_log(ray: Any, node: str, process: int) -> LogEnd:
    """Return the end of the log of a process, which may be dead.

    Args:
        ray: The module `ray`.
        node: Id of the node of the process; empty if unknown.
        process: Process id.

    Returns:
        The end of the log, with empty fields if the log cannot be fetched.
    """
    if not node:
        return LogEnd("", "")
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    strategy = NodeAffinitySchedulingStrategy(node, soft=False)
    remote = ray.remote(num_cpus=0, max_retries=0, scheduling_strategy=strategy)(read_log_end)
    reference = remote.remote(process)
    try:
        end: LogEnd = ray.get(reference, timeout=ANSWER_S)
    except Exception:  # the node is gone, or cannot start another process
        ray.cancel(reference, force=True)
        return LogEnd("", "")
    return end


def read_log_end(process: int) -> LogEnd:
    """Return the end of the log of a process of this node. Runs inside a Ray task.

    The logs of all workers of a node are in the folder of the log of this process.
    """
    folder = os.path.dirname(failures.log_path())
    if not folder:
        return LogEnd("", "")
    paths = sorted(Path(folder).glob(f"worker-*-{process}.err"))
    if not paths:
        return LogEnd("", "")
    path = str(paths[-1])
    return LogEnd(path, failures.read_last_log_lines(path))
