"""Number of retries after a failure. Only this module reads `cluster.retries`.

Each try of a stage starts from the last checkpoint. A loss that the stage has not caused, such as a
preempted node, does not count as a try.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipeline.config.settings import ClusterSettings  # importing pydantic takes time

# Number of lost nodes per stage that do not count as tries. Each further loss counts as a try,
# because the stage may cause the losses.
MAX_MOVES = 20


@dataclass(frozen=True)
class RetryPolicy:
    """Maximum numbers of retries: tries after the first one.

    Attributes:
        stage: Retries of a stage that failed or lost its workers.
        group: Retries of a worker group that ended before its workers had started.
        trial: Retries of a search trial after its process died.
    """

    stage: int
    group: int
    trial: int

    @classmethod
    def of(cls, cluster: ClusterSettings) -> RetryPolicy:
        """Return the policy of a config."""
        return cls(cluster.retries, cluster.retries, cluster.retries)
