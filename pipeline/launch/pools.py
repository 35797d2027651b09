"""Pools of worker groups.

The setting `cluster.stages` can give kinds of stages other resources per rank. Kinds with the same
resources share a pool. The groups of a pool run only stages of these kinds. The number of a group
determines its pool (see `STRIDE`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from pipeline.config.settings import ClusterSettings
from pipeline.launch.cluster import ClusterState, Node
from pipeline.launch.queue import STRIDE, ReadyStage
from pipeline.launch.shares import (
    check_fits,
    compute_group_sizes,
    count_node_slots,
    count_slots,
    resources_per_worker,
)

NOT_IN_GROUPS = ("ingest", "report")  # kinds of stages that do not run in worker groups


@dataclass
class Pool:
    """A pool of worker groups that run the same kinds of stages.

    Attributes:
        cluster: Settings with the resources of a rank.
        steps: Kinds of stages of this pool. It is empty for the first pool, which runs all kinds
            that have no other pool.
    """

    cluster: ClusterSettings
    steps: list[str]


class Pools:
    """The pools of a config. The first pool has the resources of `cluster` itself.

    Args:
        cluster: Settings of the config.
    """

    def __init__(self, cluster: ClusterSettings):
        self.pools = [Pool(cluster, [])]
        self.by_step: dict[str, int] = {}
        for step in cluster.stages:
            if step not in NOT_IN_GROUPS:
                self.by_step[step] = self._find_pool(cluster.of_step(step), step)

    def _find_pool(self, cluster: ClusterSettings, step: str) -> int:
        """Return the index of the pool with the resources per rank of `cluster`.

        Without such a pool, add one for `step`.
        """
        amounts = resources_per_worker(cluster)
        for index, pool in enumerate(self.pools):
            if resources_per_worker(pool.cluster) == amounts:
                if index:
                    pool.steps.append(step)
                return index
        self.pools.append(Pool(cluster, [step]))
        return len(self.pools) - 1

    def of_step(self, step: str) -> int:
        """Return the index of the pool that runs one kind of stage."""
        return self.by_step.get(step, 0)

    def get_settings(self, group: int) -> ClusterSettings:
        """Return the settings of a group, with the resources of a rank."""
        return self.pools[group // STRIDE].cluster

    def describe_group(self, group: int) -> str:
        """Return the name of a group for messages."""
        text = f"group {group % STRIDE}"
        steps = self.pools[group // STRIDE].steps
        if steps:
            text += f" for {', '.join(steps)}"
        return text

    def check_fit(self, pool: int, state: ClusterState) -> None:
        """Raise `UserError` if the cluster has no room for one group of a pool."""
        check_fits(state, self.pools[pool].cluster, self.pools[pool].steps)

    def sizes(
        self,
        state: ClusterState,
        name: str,
        width: int,
        outstanding: Iterable[ReadyStage],
        groups: Mapping[int, int],
    ) -> dict[int, int]:
        """Return the groups that this driver can have now: group number -> number of workers.

        If there are several pools, the pools with the deepest stages (`ReadyStage.depth`) get room
        first. A pool gets at most as many groups as it has stages. A started group that is then
        left over is kept if there is room and no other driver exists.

        Args:
            state: State of the cluster.
            name: Name of the actor that registers this driver.
            width: Number of stages that can run in parallel.
            outstanding: Stages of all pools that wait for a group or run in one.
            groups: Number of a started group -> number of workers.
        """
        if len(self.pools) == 1:
            return dict(enumerate(compute_group_sizes(state, self.pools[0].cluster, name, width)))
        sizes: dict[int, int] = {}
        counts: dict[int, int] = {}
        for ready in sorted(outstanding, key=lambda ready: -ready.depth):
            counts[ready.pool] = counts.get(ready.pool, 0) + 1
        room = state
        for pool, count in counts.items():
            cluster = self.pools[pool].cluster
            for index, workers in enumerate(
                compute_group_sizes(room, cluster, name, min(width, count))
            ):
                sizes[pool * STRIDE + index] = workers
                room = subtract_workers(room, cluster, workers)
        if sum(map(len, state.drivers.values())) > 1:
            return sizes
        for group, workers in groups.items():
            cluster = self.get_settings(group)
            if group not in sizes and count_slots(room, cluster) >= workers:
                sizes[group] = workers
                room = subtract_workers(room, cluster, workers)
        return sizes


def subtract_workers(state: ClusterState, cluster: ClusterSettings, workers: int) -> ClusterState:
    """Return the cluster without the resources of some workers.

    If fewer workers fit into the cluster, only their resources are subtracted.

    Args:
        state: State of the cluster.
        cluster: Settings with the resources of a worker.
        workers: Number of workers.
    """
    left = workers
    nodes: dict[str, Node] = {}
    for node_id, node in state.nodes.items():
        count = 0
        if node.alive and not node.leaves:
            count = min(left, count_node_slots(node, cluster))
        left -= count
        resources = dict(node.resources)
        for name, amount in resources_per_worker(cluster).items():
            resources[name] = resources.get(name, 0.0) - count * amount
        nodes[node_id] = replace(node, resources=resources)
    return replace(state, nodes=nodes)
