"""What the replicas of a server are: how many, and what each takes of the cluster."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from workers.errors import UserError

COUNT = re.compile(r"(?P<least>\d{1,4})(?::(?P<most>\d{1,4}))?")


@dataclass(frozen=True)
class ReplicaSettings:
    """least, most: replicas; their number follows the load where the two differ.

    cpus, gpus: of each replica. GPUs are a fraction of one, or a whole number of them.
    """

    least: int = 1
    most: int = 1
    cpus: int = 1
    gpus: float = 0.0

    @classmethod
    def of(cls, count: str, cpus: int = 1, gpus: float = 0.0) -> ReplicaSettings:
        """Return the settings of the options of `serve`. count: `N` or `MIN:MAX`.

        Raise `UserError` when they mean nothing.
        """
        parts = COUNT.fullmatch(count)
        least = most = 0
        if parts is not None:
            least = int(parts["least"])
            most = int(parts["most"] or least)
        if not 1 <= least <= most:
            raise UserError(
                f"--replicas is {count!r}; give a number from 1 on, or MIN:MAX, such as 1:4"
            )
        if cpus < 1:
            raise UserError(f"--cpus is {cpus}; give the CPU cores of a replica, at least 1")
        if not 0 <= gpus <= 64 or (gpus > 1 and gpus != int(gpus)):
            raise UserError(
                f"--gpus is {gpus:g}; give a fraction of a GPU for each replica, or a whole number"
            )
        return cls(least, most, cpus, gpus)

    @property
    def is_scaled(self) -> bool:
        """Whether the number of replicas follows the load."""
        return self.least < self.most

    @property
    def device(self) -> Literal["cpu", "cuda"]:
        """The device that a replica computes on."""
        return "cuda" if self.gpus else "cpu"
