"""Number and resources of the replicas of a server. A replica is a process with the whole model."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from workers.errors import UserError

COUNT = re.compile(r"(?P<minimum>\d{1,4})(?::(?P<maximum>\d{1,4}))?")


@dataclass(frozen=True)
class ReplicaSettings:
    """Number of replicas, and the resources of each.

    Args:
        minimum: Minimum number of replicas.
        maximum: Maximum number of replicas. If it is larger than `minimum`, the number of replicas
            depends on the load.
        cpus: CPU cores of each replica.
        gpus: GPUs of each replica: a fraction below 1, or a whole number.
    """

    minimum: int = 1
    maximum: int = 1
    cpus: int = 1
    gpus: float = 0.0

    @classmethod
    def parse(cls, count: str, cpus: int = 1, gpus: float = 0.0) -> ReplicaSettings:
        """Return the settings for the options of `serve`.

        Args:
            count: `N` or `MIN:MAX`.
            cpus: CPU cores of each replica.
            gpus: GPUs of each replica.

        Raises:
            UserError: If a value is invalid.

        Example:
            >>> ReplicaSettings.parse("1:4", cpus=2)
            ReplicaSettings(minimum=1, maximum=4, cpus=2, gpus=0.0)
        """
        parts = COUNT.fullmatch(count)
        minimum = maximum = 0
        if parts is not None:
            minimum = int(parts["minimum"])
            maximum = int(parts["maximum"] or minimum)
        if not 1 <= minimum <= maximum:
            raise UserError(
                f"--replicas is {count!r}; give a number of at least 1, or MIN:MAX, for example 1:4"
            )
        if cpus < 1:
            raise UserError(f"--cpus is {cpus}; give the CPU cores of a replica, at least 1")
        if not 0 <= gpus <= 64 or (gpus > 1 and gpus != int(gpus)):
            raise UserError(
                f"--gpus is {gpus:g}; give a fraction of a GPU for each replica, or a whole number"
            )
        return cls(minimum, maximum, cpus, gpus)

    @property
    def is_scaled(self) -> bool:
        """Whether the number of replicas depends on the load."""
        return self.minimum < self.maximum

    @property
    def device(self) -> Literal["cpu", "cuda"]:
        """The device of a replica."""
        return "cuda" if self.gpus else "cpu"
