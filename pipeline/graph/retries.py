"""Number of retries of failed work. This is the only place that reads `cluster.retries`.

A stage starts each try from its last checkpoint. A loss that is not the fault of the work, such as
a preempted node, does not count as a try.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipeline.config.settings import ClusterSettings  # start-up time: imports pydantic

# A stage that loses more nodes may be the cause: each further loss counts as a try.
MAX_MOVES = 20


@dataclass(frozen=True)
class RetryPolicy:
    """Numbers of tries after the first one.

    Attributes:
        stage: Of a stage that failed or lost its workers.
        group: Of a worker group that ended before its workers came up.
        trial: Of a search trial after its process died.
    """

    stage: int
    group: int
    trial: int

    @classmethod
    def of(cls, cluster: ClusterSettings) -> RetryPolicy:
        """Return the policy of a config."""
        return cls(cluster.retries, cluster.retries, cluster.retries)
