"""A cluster as the driver sees it, made by hand."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from pipeline.launch.cluster import ClusterState, Node


def nodes_of(
    resources: Iterable[Mapping[str, float]],
    lost: Iterable[int] = (),
    leaving: Iterable[int] = (),
    **drivers: tuple[str, ...],
) -> ClusterState:
    """One node per entry of `resources`, with ids 0, 1, ...; drivers: names by job."""
    lost, leaving = {*lost}, {*leaving}
    nodes = {
        str(i): Node(str(i), f"10.0.0.{i}", i not in lost, "", i in leaving, own)
        for i, own in enumerate(resources)
    }
    return ClusterState(nodes, drivers)
