"""Bootstrap intervals over whole clusters: bias-corrected and accelerated (BCa).

BCa (Efron 1987; Efron and Tibshirani, An Introduction to the Bootstrap, 14.3) rather than percentiles: KL
divergence is skewed to the right, where percentile ends lie too low, which would let a gate pass too easily.
The acceleration comes from leaving out one cluster at a time, which for ratios of sums is one subtraction.

A resample draws G of G clusters with replacement. Where few different clusters exist (independent right-or-wrong
items know four), how often each kind is drawn is multinomial, and that is drawn instead: the same distribution,
hundreds of times faster.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from ..comparison import Interval

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Statistic = Callable[[Floats], Floats]  # [..., columns] sums -> [...]

RESAMPLES = 10_000
UNBOUNDED = Interval(-math.inf, math.inf)
_KINDS = 256  # different clusters up to which multinomial counts are drawn
_CHUNK = 1 << 20  # drawn cluster numbers at a time


def resampled(sums: Floats, *, seed: int, resamples: int = RESAMPLES) -> Floats:
    """Total sums ``[resamples, columns]`` of resampled clusters ``[clusters, columns]``."""
    import numpy as np

    rng = np.random.default_rng(seed)
    count = len(sums)
    kinds, times = np.unique(sums, axis=0, return_counts=True)
    if len(kinds) <= _KINDS:
        return rng.multinomial(count, times / count, size=resamples) @ kinds
    parts = []
    step = max(1, _CHUNK // count)
    for start in range(0, resamples, step):
        drawn = rng.integers(0, count, (min(step, resamples - start), count))
        parts.append(np.stack([column[drawn].sum(axis=1) for column in sums.T], axis=1))
    return np.concatenate(parts)


def bca(sums: Floats, draws: Floats, statistic: Statistic, confidence: float) -> Interval:
    """Two-sided interval of a statistic of total sums.

    Args:
        sums: ``[clusters, columns]``; one cluster has the unbounded interval.
        draws: of ``resampled``.
        statistic: of sums, over the last axis. Where a resample has none (a division by 0), the interval is
            unbounded.
        confidence: 0.95 for 2.5 % on each side.
    """
    import numpy as np

    from ..extras import require

    normal = require("scipy.stats").norm
    with np.errstate(divide="ignore", invalid="ignore"):
        found, drawn = statistic(sums.sum(axis=0)), statistic(draws)
        left_out = statistic(sums.sum(axis=0) - sums)
    if len(sums) < 2 or not (np.isfinite(drawn).all() and np.isfinite(left_out).all()):
        return UNBOUNDED
    spread = float(drawn.std())
    if spread == 0:
        return Interval(float(found), float(found))
    ties = np.abs(drawn - found) <= 1e-9 * spread
    below = float(((drawn < found) & ~ties).mean() + ties.mean() / 2)
    if not 0 < below < 1:
        return Interval(float(drawn.min()), float(drawn.max()))
    bias = normal.ppf(below)
    z = bias + normal.ppf([(1 - confidence) / 2, (1 + confidence) / 2])
    shares = normal.cdf(bias + z / (1 - _acceleration(left_out) * z))
    low, high = np.quantile(drawn, shares)
    return Interval(float(low), float(high))


def _acceleration(left_out: Floats) -> float:
    """Sixth of the skewness of the statistic without each cluster."""
    import numpy as np

    deviation = left_out.mean() - left_out
    scale = float(np.square(deviation).sum()) ** 1.5
    return float((deviation**3).sum()) / (6 * scale) if scale > 0 else 0.0
