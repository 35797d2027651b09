"""Tests of confidence intervals: known answers, agreement with scipy (if installed), paired
differences, and the rule for a winner."""

from __future__ import annotations

import math

import numpy as np
import pytest

from pipeline.results import intervals
from pipeline.results.intervals import (
    Interval,
    differ,
    draw_counts,
    draw_replicas,
    mean_over_replicas,
    percentile_interval,
    t_interval,
    t_quantile,
)

VALUES = np.array([0.61, 0.64, 0.58, 0.66, 0.60, 0.63, 0.59, 0.65])
OTHERS = VALUES - np.array([0.02, 0.03, 0.01, 0.02, 0.03, 0.02, 0.01, 0.02])
DRAWS = 20_000


def generator() -> np.random.Generator:
    return np.random.default_rng(7)


def bootstrap(values: np.ndarray) -> np.ndarray:
    """Return draws of the mean over `values`, one per replica; all images of a replica agree."""
    picked = draw_replicas(len(values), generator(), DRAWS)
    return mean_over_replicas(np.tile(values[:, None], (1, DRAWS)), picked)


# ---- known answers -------------------------------------------------------------------------------
def test_t_quantiles_match_published_tables() -> None:
    assert [t_quantile(n) for n in (1, 2, 4, 9, 29)] == [12.7062, 4.3027, 2.7764, 2.2622, 2.0452]
    assert t_quantile(40) == pytest.approx(2.0211, abs=2e-4)
    assert t_quantile(120) == pytest.approx(1.9799, abs=2e-4)


def test_t_interval_of_three_values_matches_hand_computation() -> None:
    interval = t_interval([0.70, 0.72, 0.74])  # mean 0.72, deviation 0.02
    reach = 4.3027 * 0.02 / math.sqrt(3)
    assert interval == pytest.approx((0.72 - reach, 0.72 + reach))


def test_percentile_interval_covers_the_middle_95_percent() -> None:
    assert percentile_interval(np.arange(1001.0)) == pytest.approx((25.0, 975.0))


def test_interval_of_missing_or_single_values_is_nan() -> None:
    for interval in (percentile_interval([]), percentile_interval([1, math.nan]), t_interval([1])):
        assert math.isnan(interval.low)
        assert not interval.excludes_zero


def test_bootstrap_draw_has_the_size_of_the_sample() -> None:
    counts = draw_counts(50, generator(), 300)
    assert (counts.sum(0) == 50).all()
    assert counts.mean() == 1.0
    share_left_out = float((counts == 0).mean())
    assert share_left_out == pytest.approx((1 - 1 / 50) ** 50, abs=0.01)


def test_bootstrap_over_images_matches_the_binomial_interval() -> None:
    right = np.zeros(400)
    right[:300] = 1
    draws = right @ draw_counts(400, generator(), DRAWS) / 400
    reach = 1.96 * math.sqrt(0.75 * 0.25 / 400)
    assert percentile_interval(draws) == pytest.approx((0.75 - reach, 0.75 + reach), abs=2e-3)


def test_equal_seeds_give_equal_draws() -> None:
    assert (draw_counts(9, generator()) == draw_counts(9, generator())).all()
    assert draw_counts(9, generator()).shape == (9, intervals.DRAWS)


# ---- scipy ---------------------------------------------------------------------------------------
def test_bootstrap_over_replicas_matches_scipy() -> None:
    stats = pytest.importorskip("scipy.stats", reason="scipy is not installed")
    expected = stats.bootstrap(
        (VALUES,), np.mean, method="percentile", n_resamples=DRAWS, rng=generator()
    ).confidence_interval
    assert percentile_interval(bootstrap(VALUES)) == pytest.approx(
        (expected.low, expected.high), abs=1e-3
    )


def test_bootstrap_over_images_matches_scipy() -> None:
    stats = pytest.importorskip("scipy.stats", reason="scipy is not installed")
    right = (np.arange(150) % 7 < 5).astype(float)
    expected = stats.bootstrap(
        (right,), np.mean, method="percentile", n_resamples=DRAWS, rng=generator()
    ).confidence_interval
    draws = right @ draw_counts(150, generator(), DRAWS) / 150
    one_image = 1.01 / 150
    assert percentile_interval(draws) == pytest.approx((expected.low, expected.high), abs=one_image)


def test_bootstrap_of_paired_differences_matches_scipy() -> None:
    stats = pytest.importorskip("scipy.stats", reason="scipy is not installed")

    def mean_difference(one: np.ndarray, other: np.ndarray, axis: int = -1) -> np.ndarray:
        return np.asarray((one - other).mean(axis))

    expected = stats.bootstrap(
        (VALUES, OTHERS),
        mean_difference,
        paired=True,
        method="percentile",
        n_resamples=DRAWS,
        rng=generator(),
    ).confidence_interval
    draws = bootstrap(VALUES) - bootstrap(OTHERS)  # both draw the same replicas
    assert percentile_interval(draws) == pytest.approx((expected.low, expected.high), abs=5e-4)


def test_t_intervals_and_quantiles_match_scipy() -> None:
    stats = pytest.importorskip("scipy.stats", reason="scipy is not installed")
    for size in (2, 3, 5, 8):
        values = VALUES[:size]
        expected = stats.t.interval(
            0.95, size - 1, loc=values.mean(), scale=values.std(ddof=1) / math.sqrt(size)
        )
        assert t_interval(values) == pytest.approx(expected, rel=1e-4)
    for degrees in (*range(1, 40), 100, 1000):
        assert t_quantile(degrees) == pytest.approx(stats.t.ppf(0.975, degrees), rel=1e-4)


# ---- differences ---------------------------------------------------------------------------------
def test_paired_interval_is_narrower_than_independent_interval() -> None:
    paired = percentile_interval(bootstrap(VALUES) - bootstrap(OTHERS))
    picked = draw_replicas(len(OTHERS), np.random.default_rng(8), DRAWS)
    independent = mean_over_replicas(np.tile(OTHERS[:, None], (1, DRAWS)), picked)
    apart = percentile_interval(bootstrap(VALUES) - independent)
    assert paired.high - paired.low < 0.3 * (apart.high - apart.low)


def test_only_differences_beyond_the_noise_are_significant() -> None:
    assert differ(bootstrap(VALUES) - bootstrap(OTHERS), list(VALUES - OTHERS))
    assert not differ(bootstrap(VALUES) - bootstrap(VALUES[::-1]), list(VALUES - VALUES[::-1]))


def test_single_replica_shows_no_significant_difference() -> None:
    assert not differ(np.full(DRAWS, 0.3), [0.3])


def test_equal_methods_rarely_differ_with_three_replicas() -> None:
    """With three replicas, the bootstrap alone finds a winner in one of four cases, because the
    replicas agree by chance."""
    rng = generator()
    by_bootstrap = 0
    winners = 0
    for _ in range(300):
        differences = rng.normal(0, 1, 3)
        picked = draw_replicas(3, rng, 300)
        draws = mean_over_replicas(np.tile(differences[:, None], (1, 300)), picked)
        by_bootstrap += percentile_interval(draws).excludes_zero
        winners += differ(draws, list(differences))
    assert by_bootstrap / 300 > 0.2
    assert winners / 300 < 0.09


def test_t_interval_covers_the_mean_at_its_nominal_rate() -> None:
    rng = generator()
    values = rng.normal(0.5, 0.1, (2000, 3))
    covered = [interval.low <= 0.5 <= interval.high for interval in map(t_interval, values)]
    assert np.mean(covered) == pytest.approx(0.95, abs=0.015)


def test_interval_excludes_zero_on_either_side() -> None:
    assert Interval(0.1, 0.2).excludes_zero
    assert Interval(-0.2, -0.1).excludes_zero
    assert not Interval(-0.1, 0.1).excludes_zero
