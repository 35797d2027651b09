"""Pools of worker groups. Kinds of stages whose ranks take the same resources share a pool, whose
groups run no other stages.

A group has a number; the pool follows from it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from pipeline.config.settings import ClusterSettings
from pipeline.launch.cluster import ClusterState, Node
from pipeline.launch.queue import STRIDE, ReadyStage
from pipeline.launch.shares import (
    check_fits,
    count_node_slots,
    count_slots,
    resources_per_worker,
    sizes_of_groups,
)

NOT_IN_GROUPS = ("ingest", "report")  # kinds of stages that no worker group runs


@dataclass
class Pool:
    """cluster: settings with the resources that its ranks take. steps: the kinds of stages that it
    runs; empty for all that no other pool runs."""

    cluster: ClusterSettings
    steps: list[str]


class Pools:
    """The pools that a config asks for; the first one has the resources that `cluster` itself
    names."""

    def __init__(self, cluster: ClusterSettings):
        self.pools = [Pool(cluster, [])]
        self.by_step: dict[str, int] = {}
        for step in cluster.stages:
            if step not in NOT_IN_GROUPS:
                self.by_step[step] = self._find_pool(cluster.of_step(step), step)

    def _find_pool(self, cluster: ClusterSettings, step: str) -> int:
        """Return the pool whose ranks take the same as those of `cluster`, a new one if need be."""
        amounts = resources_per_worker(cluster)
        for index, pool in enumerate(self.pools):
            if resources_per_worker(pool.cluster) == amounts:
                if index:
                    pool.steps.append(step)
                return index
        self.pools.append(Pool(cluster, [step]))
        return len(self.pools) - 1

    def of_step(self, step: str) -> int:
        """Return the pool that runs one kind of stage."""
        return self.by_step.get(step, 0)

    def get_settings(self, group: int) -> ClusterSettings:
        """Return the settings of a group, with the resources that its ranks take."""
        return self.pools[group // STRIDE].cluster

    def describe_group(self, group: int) -> str:
        """Return what a person reads of a group."""
        text = f"group {group % STRIDE}"
        steps = self.pools[group // STRIDE].steps
        if steps:
            text += f" for {', '.join(steps)}"
        return text

    def check_fit(self, pool: int, state: ClusterState) -> None:
        """Raise `UserError` when the cluster has no room for one group of a pool."""
        check_fits(state, self.pools[pool].cluster, self.pools[pool].steps)

    def sizes(
        self,
        state: ClusterState,
        name: str,
        width: int,
        outstanding: Iterable[ReadyStage],
        groups: Mapping[int, int],
    ) -> dict[int, int]:
        """Return the number of workers of each group that this driver may have now, by group.

        With several pools, those with the deepest stages get room first, no more groups than they
        have stages. Where room is left and no other driver may need it, groups without a stage go
        on. name, width: as for `sizes_of_groups`. outstanding: stages that wait or run. groups:
        number of workers of the groups that run.
        """
        if len(self.pools) == 1:
            return dict(enumerate(sizes_of_groups(state, self.pools[0].cluster, name, width)))
        sizes: dict[int, int] = {}
        counts: dict[int, int] = {}
        for ready in sorted(outstanding, key=lambda ready: -ready.depth):
            counts[ready.pool] = counts.get(ready.pool, 0) + 1
        room = state
        for pool, count in counts.items():
            cluster = self.pools[pool].cluster
            for index, workers in enumerate(
                sizes_of_groups(room, cluster, name, min(width, count))
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
    """Return a cluster without the resources that so many workers take, as far as it has them."""
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
