"""Intervals of skewed means against a plain loop, and against their level."""

from __future__ import annotations

import math

import numpy as np
import pytest

from quantkit_evals.paired.bootstrap import bca, resampled
from quantkit_evals.paired.skewed import log_t


def test_against_a_plain_loop() -> None:
    rng = np.random.default_rng(3)
    weights = rng.integers(50, 200, 40).astype(float)
    values = weights * rng.exponential(1, 40)
    found = log_t(values, weights, seed=0, resamples=10_000, confidence=0.9)
    assert found is not None

    def error(v: np.ndarray, w: np.ndarray) -> float:
        r = v.sum() / w.sum()
        return math.sqrt(np.square(v - r * w).sum() * len(v) / (len(v) - 1)) / w.sum() / r

    mean, own = values.sum() / weights.sum(), error(values, weights)
    t = []
    for _ in range(4000):
        drawn = rng.integers(0, 40, 40)
        v, w = values[drawn], weights[drawn]
        t.append(math.log(v.sum() / w.sum() / mean) / error(v, w))
    low, high = np.quantile(t, [0.05, 0.95])
    assert found.low == pytest.approx(mean * math.exp(-high * own), rel=0.02)
    assert found.high == pytest.approx(mean * math.exp(-low * own), rel=0.03)


def test_closer_to_its_level_than_bca_where_tails_are_heavy() -> None:
    """Log-normal blocks of sigma 1: how often the whole interval lies below the true mean, of 2.5 %."""
    values = np.random.default_rng(0).lognormal(0, 1, (120, 64))
    ones, true, below, theirs = np.ones(64), math.exp(0.5), 0, 0
    for number, row in enumerate(values):
        found = log_t(row, ones, seed=number, resamples=2000, confidence=0.95)
        assert found is not None
        below += found.high < true
        sums = np.stack([row, ones], axis=1)
        plain = bca(sums, resampled(sums, seed=number, resamples=2000), lambda s: s[..., 0] / s[..., 1], 0.95)
        theirs += plain.high < true
    assert below <= 9 and below < theirs  # of 120


def test_where_there_is_none() -> None:
    assert log_t(np.ones(20), np.ones(20), seed=0, resamples=2000, confidence=0.95) is None
    assert log_t(np.zeros(20), np.ones(20), seed=0, resamples=2000, confidence=0.95) is None
    assert log_t(np.arange(5.0), np.ones(5), seed=0, resamples=2000, confidence=0.95) is None
