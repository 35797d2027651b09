"""What is known of workers that died: they can tell nothing themselves."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.graph import failures
from pipeline.graph.stage import Stage
from pipeline.launch import ray_internals

ANSWER_S = 20.0  # for the end of a log on another node
PROCESS = re.compile(r"^\s*pid: (\d+)$", re.MULTILINE)
ADDRESS = re.compile(r"^\s*ip: (\S+)$", re.MULTILINE)


class DeadWorker(NamedTuple):
    """A worker of a group that died. address: of its node. report: what Ray says of it."""

    rank: int
    address: str
    process: int
    report: str


class LogEnd(NamedTuple):
    """The log of a process on its node, and its last lines."""

    path: str
    text: str


def list_dead_workers(error: Exception) -> list[DeadWorker]:
    """Return the workers whose death ended a worker group with this error, by rank."""
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
    """Return a sentence on the workers of a group that died.

    What is known of each is written among the failed tries of the stage that it ran, below
    `storage`, with the end of its log. nodes: ids of the nodes of all ranks. stage: None where the
    group ran none.
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
        "crashed, often because the machine has no more memory"
    )
    return f"{text} (see {paths[0]})" if paths else text


def fetch_log(ray: Any, node: str, process: int) -> LogEnd:
    """Return the log of a process of a node, which may be dead; empty where it cannot be had."""
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
    """Return the log of a process of this node. Runs inside a Ray task, whose log is beside it."""
    folder = os.path.dirname(failures.log_path())
    if not folder:
        return LogEnd("", "")
    paths = sorted(Path(folder).glob(f"worker-*-{process}.err"))
    if not paths:
        return LogEnd("", "")
    path = str(paths[-1])
    return LogEnd(path, failures.end_of_log(path))
