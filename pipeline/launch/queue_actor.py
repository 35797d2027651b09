"""The queue as a Ray actor.

This is a separate module so that the process of the actor does not import torch.
"""

from __future__ import annotations

from pipeline.launch import ray_internals
from pipeline.launch.cluster import DriverRegistration
from pipeline.launch.queue import Queue


class QueueActor(DriverRegistration, Queue):
    """The queue of a driver. The actor also makes its driver visible to other drivers."""

    def count_waiting_placement_groups(self) -> int:
        """Return the number of placement groups of this job that wait for resources."""
        return len(ray_internals.list_waiting_placement_groups())

    def release_orphans(self) -> None:
        """Remove the placement groups of worker groups whose Ray Train controller was killed."""
        from ray.util import remove_placement_group  # slow, but loaded in every actor

        for placement_group in ray_internals.list_orphaned_placement_groups():
            remove_placement_group(placement_group)
