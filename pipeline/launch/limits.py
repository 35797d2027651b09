"""Time limit of one attempt at a stage: `cluster.stages.KIND.timeout_s`.

If a stage runs in other processes, the driver ends these processes. A stage in this process cannot
be interrupted: it raises `StageTimeout` when it reports progress after the limit.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from pipeline.config.settings import ClusterSettings


class StageTimeout(Exception):
    """An attempt at a stage took longer than its time limit. The stage can be tried again."""


def describe_timeout(step: str, limit_s: float) -> str:
    """Return a message about an attempt that took too long: kind of stage, limit, remedy.

    Args:
        step: Kind of the stage.
        limit_s: Time limit of an attempt, in seconds.
    """
    setting = f"cluster.stages.{step}.timeout_s"
    return (
        f"this attempt at a stage of kind {step!r} took longer than {limit_s:g} s ({setting}); "
        f"allow more with --set {setting}={2 * limit_s:g}, or set it to 0 for no limit"
    )


class Deadline:
    """Deadline of one attempt at a stage. The time starts when this object is created.

    Args:
        cluster: Settings with the time limits.
        step: Kind of the stage.
        clock: Returns the time in seconds, from an arbitrary start.
    """

    def __init__(
        self, cluster: ClusterSettings, step: str, clock: Callable[[], float] = time.monotonic
    ):
        self.step = step
        self.limit_s = cluster.time_limit(step)
        self._clock = clock
        self._started = clock()

    @property
    def left_s(self) -> float | None:
        """Remaining seconds, at least 0; None without a limit."""
        if self.limit_s is None:
            return None
        return max(0.0, self._started + self.limit_s - self._clock())

    def check(self) -> None:
        """Raise `StageTimeout` if no time is left."""
        if self.limit_s is not None and self.left_s == 0:
            raise StageTimeout(describe_timeout(self.step, self.limit_s))
