"""Intervals of means that are never negative and skewed to the right: KL divergence, much of it in a few blocks.

There BCa's upper end is too low, and it is the end that lets a gate pass: it corrects for the skewness that was
seen, and of a heavy tail most was not. A studentized bootstrap (Efron and Tibshirani, An Introduction to the
Bootstrap, 12.5) of the logarithm of the mean learns from resamples that a low mean goes with a low error. It is
closer to its level on both sides, and not at it where tails are heavy (``bench/eval/calibration.py``).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ..comparison import Interval
from .bootstrap import resampled
from .clusters import ratio

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

FEWEST = 8  # clusters below which too many resamples are of one cluster alone


def log_t(values: Floats, weights: Floats, *, seed: int, resamples: int, confidence: float) -> Interval | None:
    """Two-sided interval of ``sum(values) / sum(weights)``.

    Args:
        values: ``[clusters]`` sums, not negative.
        weights: ``[clusters]`` sums, positive.

    Returns:
        None where there is none: few clusters, or nothing that varies.
    """
    import numpy as np

    found, count = ratio(values, weights), len(values)
    if count < FEWEST or not found.value > 0 or not found.stderr > 1e-9 * found.value:
        return None
    columns = np.stack([values, weights, values**2, values * weights, weights**2], axis=1)
    v, w, vv, vw, ww = resampled(columns, seed=seed, resamples=resamples).T
    mean = v / w
    squares = np.maximum(vv - 2 * mean * vw + mean**2 * ww, 0) * count / (count - 1)
    with np.errstate(divide="ignore", invalid="ignore"):
        t = np.log(mean / found.value) / (np.sqrt(squares) / v)
    if np.isnan(t).any():
        return None
    low, high = np.quantile(t, [(1 - confidence) / 2, (1 + confidence) / 2], method="inverted_cdf")
    if not (math.isfinite(low) and math.isfinite(high)):
        return None
    relative = found.stderr / found.value
    return Interval(found.value * math.exp(-high * relative), found.value * math.exp(-low * relative))
