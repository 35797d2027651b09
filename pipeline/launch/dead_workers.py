"""Explain worker deaths from Ray's own records: a dead worker cannot report anything."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.graph import failures
from pipeline.graph.stage import Stage
from pipeline.launch import ray_internals

ANSWER_S = 20.0  # wait for the end of a log on another node
PROCESS = re.compile(r"^\s*pid: (\d+)$", re.MULTILINE)
ADDRESS = re.compile(r"^\s*ip: (\S+)$", re.MULTILINE)


class DeadWorker(NamedTuple):
    """A worker of a group that died.

    Attributes:
        rank: Its rank in the group.
        address: Address of the node.
        process: Process id.
        report: Ray's report about it.
    """

    rank: int
    address: str
    process: int
    report: str


class LogEnd(NamedTuple):
    """The log of a process on its node, and its last lines."""

    path: str
    text: str


def list_dead_workers(error: Exception) -> list[DeadWorker]:
    """Return the workers that ended a worker group with this error by their death, by rank."""
    workers = []
    for rank, report in sorted(ray_internals.died_workers(error).items()):
        process = PROCESS.search(report)
        address = ADDRESS.search(report)
        if process and address:
            text = "\n".join(line.strip() for line in report.splitlines())
            workers.append(DeadWorker(rank, address[1], int(process[1]), text))
    return workers


def describe(
    ray: Any,
    workers: Sequence[DeadWorker],
    nodes: Sequence[str],
    stage: Stage | None,
    storage: str,
) -> str:
    """Return a sentence about the workers of a group that died.

    The facts about each worker and the end of the log are written below `storage`, among the failed
    tries of the stage.

    Args:
        ray: The module `ray`.
        workers: The dead workers; at least one.
        nodes: Ids of the nodes of all ranks.
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
            paths.append(failures.write(storage, origin, worker.report, log.text))
    first = workers[0]
    others = f", and {len(workers) - 1} more ranks" if len(workers) > 1 else ""
    text = (
        f"rank {first.rank} on {first.address} died{others}: process {first.process} was killed or "
        "crashed, often because the machine ran out of memory"
    )
    return f"{text} (see {paths[0]})" if paths else text


def fetch_log(ray: Any, node: str, process: int) -> LogEnd:
    """Return the log of a process, which may be dead; empty if the log cannot be fetched.

    Args:
        ray: The module `ray`.
        node: Id of the node of the process; empty if unknown.
        process: Process id.
    """
    if not node:
        return LogEnd("", "")
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    strategy = NodeAffinitySchedulingStrategy(node, soft=False)
    remote = ray.remote(num_cpus=0, max_retries=0, scheduling_strategy=strategy)(read_log_end)
    reference = remote.remote(process)
    try:
        end: LogEnd = ray.get(reference, timeout=ANSWER_S)
    except Exception:  # the node is gone, or has no room for a process
        ray.cancel(reference, force=True)
        return LogEnd("", "")
    return end


def read_log_end(process: int) -> LogEnd:
    """Return the log of a process of this node.

    It runs inside a Ray task, because the logs of all workers of a node are in one folder.
    """
    folder = os.path.dirname(failures.log_path())
    if not folder:
        return LogEnd("", "")
    paths = sorted(Path(folder).glob(f"worker-*-{process}.err"))
    if not paths:
        return LogEnd("", "")
    path = str(paths[-1])
    return LogEnd(path, failures.end_of_log(path))
