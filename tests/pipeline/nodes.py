"""Build a `ClusterState` like the one that a driver reads from Ray."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from pipeline.launch.cluster import ClusterState, Node


def nodes_of(
    resources: Iterable[Mapping[str, float]],
    lost: Iterable[int] = (),
    leaving: Iterable[int] = (),
    drivers: Mapping[str, tuple[str, ...]] | None = None,
) -> ClusterState:
    """Return a cluster with one node per entry of `resources`, with ids 0, 1, ...

    lost: indices of dead nodes. leaving: indices of nodes that will be preempted. drivers: Ray job
    -> its actors' names.
    """
    lost_indices = set(lost)
    leaving_indices = set(leaving)
    nodes = {}
    for index, amounts in enumerate(resources):
        is_alive = index not in lost_indices
        leaves = index in leaving_indices
        node = Node(str(index), f"10.0.0.{index}", is_alive, "", leaves, amounts)
        nodes[node.id] = node
    return ClusterState(nodes, drivers or {})
