"""The queue as an actor of the cluster.

It has its own module so that the process of the actor does not import torch.
"""

from __future__ import annotations

from pipeline.launch import ray_internals
from pipeline.launch.cluster import DriverRegistration
from pipeline.launch.queue import Queue


class QueueActor(DriverRegistration, Queue):
    """The queue. It also represents its driver to other drivers."""

    def count_waiting_placement_groups(self) -> int:
        """Return the number of placement groups of this job that wait for room."""
        return len(ray_internals.waiting_placement_groups())

    def release_orphans(self) -> None:
        """Release the resources of worker groups whose controllers were killed."""
        from ray.util import remove_placement_group  # heavy, but already loaded in an actor

        for placement_group in ray_internals.orphaned_placement_groups():
            remove_placement_group(placement_group)
