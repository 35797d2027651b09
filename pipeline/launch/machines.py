"""Machine types of clouds, and the choice of the smallest type for the nodes of a run."""

from __future__ import annotations

import math
from typing import NamedTuple

from pipeline.launch.sizes import Size
from workers.errors import UserError


class Machine(NamedTuple):
    """A machine type.

    Attributes:
        name: Name of the type.
        cpus: Number of CPUs.
        memory_gb: Memory in GB.
        gpus: Number of GPUs.
        accelerator: Type of the GPUs, on a cloud where they are attached to a machine type that has
            none. Empty elsewhere.
    """

    name: str
    cpus: int
    memory_gb: int
    gpus: int = 0
    accelerator: str = ""


T4 = "nvidia-tesla-t4"
RAY_SHARE = 0.7  # fraction of a machine's memory that Ray's launcher lets ranks reserve
# Cloud -> machine types, from small to large; first the types without GPUs.
MACHINES = {
    "aws": (
        Machine("m6i.large", 2, 8),
        Machine("m6i.xlarge", 4, 16),
        Machine("m6i.2xlarge", 8, 32),
        Machine("m6i.4xlarge", 16, 64),
        Machine("m6i.8xlarge", 32, 128),
        Machine("m6i.16xlarge", 64, 256),
        Machine("g5.xlarge", 4, 16, 1),
        Machine("g5.2xlarge", 8, 32, 1),
        Machine("g5.4xlarge", 16, 64, 1),
        Machine("g5.8xlarge", 32, 128, 1),
        Machine("g5.12xlarge", 48, 192, 4),
        Machine("g5.48xlarge", 192, 768, 8),
    ),
    "gcp": (
        Machine("n1-standard-4", 4, 15),
        Machine("n1-standard-8", 8, 30),
        Machine("n1-standard-16", 16, 60),
        Machine("n1-standard-32", 32, 120),
        Machine("n1-standard-64", 64, 240),
        Machine("n1-standard-4", 4, 15, 1, T4),
        Machine("n1-standard-8", 8, 30, 1, T4),
        Machine("n1-standard-16", 16, 60, 2, T4),
        Machine("n1-standard-32", 32, 120, 4, T4),
    ),
}


def choose_machine(cloud: str, size: Size) -> Machine:
    """Return the smallest machine type for a node. A node without GPUs gets a machine without GPUs.

    Args:
        cloud: `aws` or `gcp`.
        size: Size of the node.

    Raises:
        UserError: If no known machine is large enough.
    """
    memory_gb = max(size.memory_gb, math.ceil(size.reserved_gb / RAY_SHARE))
    for machine in MACHINES[cloud]:
        has_gpus = machine.gpus >= size.gpus and bool(machine.gpus) == bool(size.gpus)
        if has_gpus and machine.cpus >= size.cpus and machine.memory_gb >= memory_gb:
            return machine
    raise UserError(
        f"no known machine of {cloud} has {size.cpus} CPUs, {size.gpus} GPUs and "
        f"{memory_gb} GB; lower --ranks-per-node or the resources of a rank"
    )
