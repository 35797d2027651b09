"""The queue as an actor of the cluster, in a module of its own so that its process imports no
torch."""

from __future__ import annotations

from pipeline.launch import ray_internals
from pipeline.launch.cluster import DriverRegistration
from pipeline.launch.queue import Queue


class QueueActor(DriverRegistration, Queue):
    """The queue, which also stands for its driver."""

    def count_waiting_placement_groups(self) -> int:
        """Return how many placement groups of this job wait for room."""
        return len(ray_internals.waiting_placement_groups())

    def release_orphans(self) -> None:
        """Give back what worker groups reserved whose controllers were killed."""
        from ray.util import remove_placement_group  # heavy, and loaded already in an actor

        for placement_group in ray_internals.orphaned_placement_groups():
            remove_placement_group(placement_group)
