"""Derive the number and size of the nodes of a run, and its time limit, from its config.

`accrete launch` writes them into the files for a cluster.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from pipeline.config.settings import ClusterSettings, Config
from pipeline.config.text import format_count
from pipeline.launch.cost import Estimate, Forecast, sum_device_seconds
from pipeline.launch.shares import compute_ranks_per_gpu
from workers.errors import UserError

MIN_CPUS = 2  # per node: Ray's own processes and the driver run in addition to the ranks
MIN_MEMORY_GB = 8  # smallest memory of a node
MEMORY_GB_PER_CPU = 4  # memory of a node whose ranks reserve no memory
RAY_MEMORY_GB = 2  # per node, in addition to the memory that ranks reserve
MARGIN = 2  # factor on the forecast, which leaves out ingest, report and the start of Ray
MIN_HOURS = 1  # smallest time limit
HOURS = 8  # time limit without a forecast


@dataclass(frozen=True)
class Size:
    """Number and size of the nodes of a run, and its time limit. All nodes have the same size.

    Attributes:
        nodes: Number of nodes.
        cpus: Number of CPUs of each node.
        gpus: Number of GPUs of each node.
        memory_gb: Memory of each node in GB.
        hours: Time limit of the run.
        why: Origin of the time limit, as text for the user.
        reserved_gb: Memory in GB that ranks reserve on each node.
    """

    nodes: int
    cpus: int
    gpus: int
    memory_gb: int
    hours: int
    why: str
    reserved_gb: float = 0.0

    def __str__(self) -> str:
        parts = [format_count(self.cpus, "CPU"), f"{self.memory_gb} GB of memory"]
        if self.gpus:
            parts.insert(1, format_count(self.gpus, "GPU"))
        nodes = format_count(self.nodes, "node")
        return f"{nodes} with {', '.join(parts)}; {self.hours} h ({self.why})"


def choose_size(
    config: Config, forecast: Forecast | None, ranks_per_node: int = 0, hours: int = 0
) -> Size:
    """Return the size of the nodes that run a config.

    Args:
        config: The config.
        forecast: Forecast of the run. None: there is none, so a default time limit is used.
        ranks_per_node: Number of ranks on each node; 0: as many ranks as share a GPU, or 1 if ranks
            do not share a GPU.
        hours: Time limit; 0: derive it from the forecast.

    Raises:
        UserError: If a number is negative.
    """
    for option, value in (("--ranks-per-node", ranks_per_node), ("--hours", hours)):
        if value < 0:
            raise UserError(f"{option} is {value}; give 1 or more, or leave it out")
    cluster = config.cluster.of_any_step()
    gpus_per_rank = cluster.gpus_per_worker
    if not ranks_per_node:
        ranks_per_node = compute_ranks_per_gpu(gpus_per_rank)
    ranks = max(1, cluster.workers) * max(1, cluster.groups)
    ranks_per_node = min(ranks, ranks_per_node)
    cpus = max(MIN_CPUS, ranks_per_node * cluster.cpus_per_worker)
    time_limit, why = hours, "as --hours says"
    if not hours:
        time_limit, why = choose_time_limit(forecast)
    return Size(
        math.ceil(ranks / ranks_per_node),
        cpus,
        count_gpus(gpus_per_rank, ranks_per_node),
        compute_memory_gb(cluster, ranks_per_node, cpus),
        time_limit,
        why,
        cluster.memory_gb_per_worker * ranks_per_node,
    )


def count_gpus(gpus_per_rank: float, ranks: int) -> int:
    """Return the number of GPUs that some ranks need. A rank with less than a GPU is on one GPU."""
    if gpus_per_rank < 1:
        return math.ceil(ranks / compute_ranks_per_gpu(gpus_per_rank)) if gpus_per_rank else 0
    return math.ceil(ranks * gpus_per_rank)


def compute_memory_gb(cluster: ClusterSettings, ranks: int, cpus: int) -> int:
    """Return the memory of a node in GB.

    Args:
        cluster: Settings with the resources of a rank.
        ranks: Number of ranks on the node.
        cpus: Number of CPUs of the node.
    """
    reserved = cluster.memory_gb_per_worker * ranks
    if reserved:
        return max(MIN_MEMORY_GB, math.ceil(reserved) + RAY_MEMORY_GB)
    return max(MIN_MEMORY_GB, cpus * MEMORY_GB_PER_CPU)


def choose_time_limit(forecast: Forecast | None) -> tuple[int, str]:
    """Return a time limit in whole hours, and its origin as text for the user."""
    if forecast is None:
        return HOURS, "not forecast"
    unknown = [cost for cost in forecast.costs.values() if cost.device_s is None]
    if unknown:
        return (
            HOURS,
            f"the cost of {format_count(len(unknown), 'stage')} is unknown: see `plan --cost`",
        )
    if not forecast.costs:
        return MIN_HOURS, "nothing is to run"
    wall = forecast.walls["together"]
    if not forecast.groups:  # as many groups as fit into the cluster: assume one group
        share = forecast.sharing.stretch(1) / forecast.workers  # wall time per device-second
        wall = Estimate(*(s * share for s in sum_device_seconds(forecast.costs.values())))
    limit_h = max(wall.expected * MARGIN, wall.high) / 3600
    why = f"{MARGIN} times the {wall.expected / 3600:.2g} h of `plan --cost`"
    if wall.high > wall.expected * MARGIN:
        why = f"the upper end of the {wall.expected / 3600:.2g} h of `plan --cost`"
    return max(MIN_HOURS, math.ceil(limit_h)), f"{why}, in whole hours"
