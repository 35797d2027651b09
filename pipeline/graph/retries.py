"""How often failed work is tried again: the one place where `cluster.retries` becomes a number of
tries.

A stage starts each try from its last checkpoint. A loss that is no fault of the work, such as a
preempted node, counts as no try.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipeline.config.settings import ClusterSettings  # start-up time: imports pydantic

# A stage that loses more nodes than this is suspected of it: each further loss counts as a try.
MAX_MOVES = 20


@dataclass(frozen=True)
class RetryPolicy:
    """Tries after the first one.

    stage: of a stage that failed or lost its workers. group: of a worker group that ended before
    its workers came up. trial: of a search trial whose process died.
    """

    stage: int
    group: int
    trial: int

    @classmethod
    def of(cls, cluster: ClusterSettings) -> RetryPolicy:
        """Return the policy that a config asks for."""
        return cls(cluster.retries, cluster.retries, cluster.retries)
