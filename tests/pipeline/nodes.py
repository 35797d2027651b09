"""A cluster as the driver sees it, made by hand."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from pipeline.launch.cluster import ClusterState, Node


def nodes_of(
    resources: Iterable[Mapping[str, float]],
    lost: Iterable[int] = (),
    leaving: Iterable[int] = (),
    drivers: Mapping[str, tuple[str, ...]] | None = None,
) -> ClusterState:
    """One node per entry of `resources`, with ids 0, 1, ...; drivers: names of actors by job."""
    lost_indices = set(lost)
    leaving_indices = set(leaving)
    nodes = {}
    for index, amounts in enumerate(resources):
        is_alive = index not in lost_indices
        leaves = index in leaving_indices
        node = Node(str(index), f"10.0.0.{index}", is_alive, "", leaves, amounts)
        nodes[node.id] = node
    return ClusterState(nodes, drivers or {})
