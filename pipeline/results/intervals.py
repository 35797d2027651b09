"""95 % intervals of means: percentile bootstrap over test images and replicas, and Student's t.

Test images and replicas are crossed: every replica is tested on the same images. Each bootstrap
draw resamples the images and the replicas with replacement. The drawn images are the same for all
replicas and methods. The drawn replicas are the same for all methods that have the same replicas.
The differences of such methods are therefore paired. The draws use a fixed seed.

A bootstrap over few replicas underestimates the noise between replicas. Two means are therefore
reported as different only if Student's t interval over the replicas, which is wide for few
replicas, also excludes zero.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]
CONFIDENCE = 0.95
DRAWS = 2000  # number of bootstrap draws
SEED = 0
# 97.5 % quantiles of Student's t for 1, 2, ... degrees of freedom
T_QUANTILES = (
    *(12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281),
    *(2.2010, 2.1788, 2.1604, 2.1448, 2.1314, 2.1199, 2.1098, 2.1009, 2.0930, 2.0860),
    *(2.0796, 2.0739, 2.0687, 2.0639, 2.0595, 2.0555, 2.0518, 2.0484, 2.0452, 2.0423),
)
NORMAL_QUANTILE = 1.959964


class Interval(NamedTuple):
    """Ends of a 95 % interval; NaN if there is none."""

    low: float
    high: float

    @property
    def excludes_zero(self) -> bool:
        """Whether zero is outside the interval; False for NO_INTERVAL."""
        return self.low > 0 or self.high < 0


NO_INTERVAL = Interval(math.nan, math.nan)


def percentile_interval(draws: ArrayLike) -> Interval:
    """Return the interval of the middle 95 % of draws (n,); NO_INTERVAL if a draw is NaN."""
    values = np.asarray(draws, float)
    if not values.size or np.isnan(values).any():
        return NO_INTERVAL
    tail = 50 * (1 - CONFIDENCE)
    low, high = np.percentile(values, [tail, 100 - tail])
    return Interval(float(low), float(high))


def t_interval(values: ArrayLike) -> Interval:
    """Return Student's t interval of the mean of values (n,).

    The result is NO_INTERVAL for fewer than two values, or if a value is NaN.
    """
    known = np.asarray(values, float)
    if known.size < 2 or np.isnan(known).any():
        return NO_INTERVAL
    mean = float(known.mean())
    reach = t_quantile(known.size - 1) * float(known.std(ddof=1)) / math.sqrt(known.size)
    return Interval(mean - reach, mean + reach)


def t_quantile(degrees: int) -> float:
    """Return the 97.5 % quantile of Student's t.

    Beyond the table, the quantile is computed by its asymptotic series in 1 / degrees.

    Args:
        degrees: Degrees of freedom, at least 1.
    """
    if degrees <= len(T_QUANTILES):
        return T_QUANTILES[degrees - 1]
    z = NORMAL_QUANTILE
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    return z + first / degrees + second / degrees**2


def draw_counts(size: int, rng: np.random.Generator, draws: int = DRAWS) -> NDArray[np.uint8]:
    """Return how often each of `size` items is in each draw, (size, draws).

    A draw takes `size` items with replacement.
    """
    picked = rng.integers(0, size, (size, draws))
    counts = np.zeros((size, draws), np.uint8)
    columns = np.broadcast_to(np.arange(draws), picked.shape)
    np.add.at(counts, (picked, columns), 1)
    return counts


def draw_replicas(count: int, rng: np.random.Generator, draws: int = DRAWS) -> NDArray[np.int64]:
    """Return indices of the replicas in each draw, (count, draws).

    A draw takes `count` of the `count` replicas with replacement.
    """
    return rng.integers(0, count, (count, draws))


def mean_over_replicas(values: Array, picked: NDArray[np.int64]) -> Array:
    """Return the mean over the drawn replicas in each draw, (draws,).

    Args:
        values: Value of each replica on the drawn images, (replicas, draws).
        picked: Indices of the drawn replicas, from `draw_replicas`.
    """
    drawn: Array = np.take_along_axis(values, picked, axis=0)
    mean: Array = drawn.mean(0)
    return mean


def differ(draws: Array, differences: Sequence[float]) -> bool:
    """Return whether a mean difference is larger than the noise.

    Args:
        draws: Bootstrap draws of the paired difference, (draws,).
        differences: Difference of each replica. With fewer than two replicas the result is False,
            because the noise between replicas is unknown.
    """
    if not percentile_interval(draws).excludes_zero:
        return False
    values = np.asarray(differences, float)
    if values.size < 2 or np.isnan(values).any():
        return False
    return t_interval(values).excludes_zero
