"""Compute how many workers fit into the cluster, and the share of this driver.

All Ray jobs on a cluster get equal shares. The trials of a search divide the share of their job.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from pipeline.config.settings import ClusterSettings
from pipeline.launch.cluster import ClusterState, Node, is_search_actor, parse_job
from workers.errors import UserError

SLACK = 1e-9  # tolerance for rounding errors: ten tenths of a GPU are one GPU


def resources_per_worker(cluster: ClusterSettings) -> dict[str, float]:
    """Return the resources of one worker: Ray's name of a resource -> amount (memory: bytes).

    Resources of which a worker needs nothing are left out.
    """
    amounts = {
        "CPU": cluster.cpus_per_worker,
        "GPU": cluster.gpus_per_worker,
        "memory": cluster.memory_gb_per_worker * 2**30,
        **cluster.resources,
    }
    return {name: amount for name, amount in amounts.items() if amount}


def min_group_size(cluster: ClusterSettings) -> int:
    """Return the smallest number of workers of a group: all of them, unless it is elastic."""
    return cluster.min_workers or cluster.workers


def count_slots(state: ClusterState, cluster: ClusterSettings) -> int:
    """Return the number of workers that fit onto the nodes that are alive and not draining.

    Other work on the nodes is ignored. The result is 0 if `cluster.placement` makes a group
    impossible.
    """
    usable = [node for node in state.nodes.values() if node.alive and not node.leaves]
    slots = [count_node_slots(node, cluster) for node in usable]
    group_size = min_group_size(cluster)
    if cluster.placement == "STRICT_PACK":  # a group must be on one node
        slots = [count for count in slots if count >= group_size]
    if cluster.placement == "STRICT_SPREAD":  # each worker of a group needs its own node
        nodes_with_room = [count for count in slots if count]
        if len(nodes_with_room) < group_size:
            return 0
    return sum(slots)


def count_node_slots(node: Node, cluster: ClusterSettings) -> int:
    """Return the number of workers that fit onto a node, as if it had no other work."""
    counts = []
    for name, amount in resources_per_worker(cluster).items():
        available = node.resources.get(name, 0.0)
        count = int(available / amount + SLACK)
        if name == "GPU" and amount < 1:  # a worker cannot combine fractions of several GPUs
            cards = int(available + SLACK)
            rest = available - cards
            count = cards * compute_ranks_per_gpu(amount) + int(rest / amount + SLACK)
        counts.append(count)
    return min(counts)


def compute_ranks_per_gpu(gpus_per_worker: float) -> int:
    """Return the number of ranks that share a GPU; 1 for ranks with whole GPUs or without GPUs."""
    if not 0 < gpus_per_worker < 1:
        return 1
    return int(1 / gpus_per_worker + SLACK)


def compute_fair_share(total: int, name: str, names: Iterable[str]) -> int:
    """Return the part of `total` that `name` gets among `names`.

    All parts are equal, except that the first names in alphabetical order get the remainder.

    Args:
        total: The number to divide.
        name: The name whose part is returned.
        names: All names. `name` is added if it is missing.

    Example:
        >>> compute_fair_share(7, "b", ["a", "b", "c"])
        2
    """
    ordered = sorted({*names, name})
    share, left_over = divmod(total, len(ordered))
    if ordered.index(name) < left_over:
        share += 1
    return share


def compute_group_sizes(
    state: ClusterState, cluster: ClusterSettings, name: str, width: int
) -> list[int]:
    """Return the number of workers of each group that this driver can have now.

    All groups have the same size. A driver always has at least one group. If its share of the
    cluster is smaller than a group, the group waits for resources.

    Args:
        state: State of the cluster.
        cluster: Settings with the resources of a worker.
        name: Name of the actor that registers this driver.
        width: Number of stages that can run in parallel.
    """
    job = parse_job(name)
    of_job = compute_fair_share(count_slots(state, cluster), job, state.drivers)
    trials = [actor for actor in state.drivers.get(job, ()) if not is_search_actor(actor)]
    share = compute_fair_share(of_job, name, trials)
    group_size = min_group_size(cluster)
    num_groups = max(1, min(width, cluster.groups or width, share // group_size))
    workers = max(group_size, min(cluster.workers, share // num_groups))
    return [workers] * num_groups


def check_fits(state: ClusterState, cluster: ClusterSettings, steps: Sequence[str] = ()) -> None:
    """Check that the cluster has room for one group.

    If `cluster.groups` is set, nothing is checked, because an autoscaler may add nodes.

    Args:
        state: State of the cluster.
        cluster: Settings with the resources of a worker.
        steps: Kinds of stages with these resources in `cluster.stages`, for the message; empty for
            kinds with the resources of `cluster` itself.

    Raises:
        UserError: If a group does not fit.
    """
    group_size = min_group_size(cluster)
    if cluster.groups or count_slots(state, cluster) >= group_size:
        return
    per_worker = resources_per_worker(cluster)
    alive = [node for node in state.nodes.values() if node.alive]
    total: dict[str, float] = {}
    if alive:
        for name in per_worker:
            total[name] = sum(node.resources.get(name, 0.0) for node in alive)
    users = "1 worker" if group_size == 1 else f"{group_size} workers"
    if steps:
        users += f" for stages of kind {', '.join(steps)}"
    setting = f" (cluster.stages.{steps[0]})" if steps else ""
    raise UserError(
        f"this cluster ({format_resources(total) or 'no node'}) has no room for {users} with "
        f"{format_resources(per_worker)} each; lower cluster.workers or the resources of each"
        f"{setting}, add nodes, "
        "or set cluster.groups if nodes are started on demand"
    )


def format_resources(resources: Mapping[str, float]) -> str:
    """Format resources as text.

    Example:
        >>> format_resources({"CPU": 2, "GPU": 1, "memory": 4 * 2**30})
        '2 CPUs, 1 GPU, 4 GB of memory'
    """
    parts = []
    for name, amount in resources.items():
        match name:
            case "CPU" | "GPU":
                parts.append(f"{amount:g} {name}" if amount == 1 else f"{amount:g} {name}s")
            case "memory":
                parts.append(f"{amount / 2**30:.3g} GB of memory")
            case _:
                parts.append(f"{amount:g} x {name}")
    return ", ".join(parts)
