"""BCa against scipy's own, the two ways of drawing against each other, and the cases without an interval."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.stats

from quantkit_evals.comparison import Interval
from quantkit_evals.paired import bootstrap
from quantkit_evals.paired.bootstrap import UNBOUNDED, bca, resampled


def mean(sums):
    return sums[..., 0] / sums[..., 1]


def test_interval_is_that_of_scipy() -> None:
    """Skewed values of unequal weight; different random draws, hence the tolerance (ends are 0.4 apart)."""
    rng = np.random.default_rng(1)
    weights = rng.integers(5, 20, 60).astype(float)
    values = weights * rng.exponential(1.0, 60)
    sums = np.stack([values, weights], axis=1)
    found = bca(sums, resampled(sums, seed=0, resamples=40_000), mean, 0.95)
    theirs = scipy.stats.bootstrap(
        (values, weights), lambda v, w, axis: v.sum(axis) / w.sum(axis), paired=True, n_resamples=40_000,
        method="BCa", rng=np.random.default_rng(2),
    ).confidence_interval  # fmt: skip
    assert found.low == pytest.approx(theirs.low, abs=0.008)
    assert found.high == pytest.approx(theirs.high, abs=0.008)
    middle = values.sum() / weights.sum()
    assert found.high - middle > 1.1 * (middle - found.low)  # the skew is seen


def test_ties_are_counted_half_as_scipy_does() -> None:
    values = np.array([1.0] * 30 + [0.0] * 10)
    sums = np.stack([values, np.ones(40)], axis=1)
    found = bca(sums, resampled(sums, seed=0, resamples=40_000), mean, 0.9)
    theirs = scipy.stats.bootstrap(
        (values,), np.mean, n_resamples=40_000, confidence_level=0.9, method="BCa", rng=np.random.default_rng(3)
    ).confidence_interval
    assert (found.low, found.high) == (pytest.approx(theirs.low, abs=0.026), pytest.approx(theirs.high, abs=0.026))


def test_multinomial_counts_have_the_distribution_of_drawn_clusters(monkeypatch: pytest.MonkeyPatch) -> None:
    sums = np.repeat([[1.0, 0.0, 2.0], [-1.0, 1.0, 2.0], [0.0, 1.0, 3.0]], [10, 15, 75], axis=0)
    fast = resampled(sums, seed=0, resamples=20_000)
    monkeypatch.setattr(bootstrap, "_KINDS", 0)
    monkeypatch.setattr(bootstrap, "_CHUNK", 7_000)  # several parts, the last one short
    slow = resampled(sums, seed=1, resamples=20_000)
    assert fast.shape == slow.shape == (20_000, 3)
    np.testing.assert_allclose(fast.mean(axis=0), slow.mean(axis=0), atol=0.15)
    np.testing.assert_allclose(np.cov(fast.T), np.cov(slow.T), rtol=0.05, atol=0.3)
    assert scipy.stats.ks_2samp(fast[:, 0], slow[:, 0]).pvalue > 1e-3


def test_the_same_seed_gives_the_same_interval_whatever_the_order() -> None:
    rng = np.random.default_rng(1)
    sums = np.stack([rng.integers(-1, 2, 300).astype(float), np.ones(300)], axis=1)
    first = bca(sums, resampled(sums, seed=4), mean, 0.95)
    shuffled = sums[rng.permutation(300)]
    assert bca(shuffled, resampled(shuffled, seed=4), mean, 0.95) == first
    assert bca(sums, resampled(sums, seed=5), mean, 0.95) != first


def test_where_there_is_no_interval() -> None:
    same = np.stack([np.full(20, 2.0), np.full(20, 4.0)], axis=1)
    assert bca(same, resampled(same, seed=0), mean, 0.95) == Interval(0.5, 0.5)
    assert bca(same[:1], resampled(same[:1], seed=0), mean, 0.95) == UNBOUNDED
    rare = np.stack([np.ones(20), np.array([1.0] + [0.0] * 19)], axis=1)
    assert bca(rare, resampled(rare, seed=0), mean, 0.95) == UNBOUNDED  # some resamples divide by 0
    assert math.isinf(UNBOUNDED.high)
