"""Sums per cluster and what follows from them: scores, differences, standard errors, a test of no difference.

A score is a ratio of sums, ``sum(values) / sum(weights)``. Its error is that of the linearized ratio estimator of
survey sampling: residuals ``value - score * weight`` are summed within each cluster, and the squares of these
sums, times ``G / (G - 1)``, give the variance. For clusters of one item with equal weights that is the usual
standard error of a mean, for a difference the paired one. Nothing can be said of one cluster: NaN.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..comparison import Score

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]


FEW_CHANGED = 10  # changed clusters, below which the t test of a rare change takes its variance for known


def cluster_sums(clusters: Sequence[str], columns: Floats) -> Floats:
    """Sums ``[clusters, columns]`` of ``columns [items, columns]``, clusters in the order of their names."""
    import numpy as np

    _, index = np.unique(np.asarray(clusters, dtype=object).astype(str), return_inverse=True)
    return np.stack([np.bincount(index, weights=column) for column in columns.T], axis=1)


def ratio(values: Floats, weights: Floats) -> Score:
    """``sum(values) / sum(weights)`` with its cluster-robust standard error.

    Args:
        values: ``[clusters]`` sums, of one candidate or of a difference.
        weights: ``[clusters]`` sums, positive.
    """
    import numpy as np

    total, count = float(weights.sum()), len(weights)
    value = float(values.sum()) / total
    if count < 2:
        return Score(value, math.nan)
    residuals = values - value * weights
    return Score(value, math.sqrt(float(np.square(residuals).sum()) * count / (count - 1)) / total)


def design_effect(values: Floats, weights: Floats, clusters: Sequence[str]) -> float:
    """By which factor clusters inflate the variance of a ratio of ``[items]``, at least 1.

    Where nothing varies, dependence can't be seen: then the worst is taken, items per cluster.
    """
    import numpy as np

    sums = cluster_sums(clusters, np.stack([values, weights], axis=1))
    alone, together = ratio(values, weights).stderr, ratio(sums[:, 0], sums[:, 1]).stderr
    if not alone > 0 or not math.isfinite(together):
        return len(values) / len(sums)
    return max(1.0, (together / alone) ** 2)


def sign_p_value(sums: Floats) -> float:
    """Two-sided sign test of ``[clusters]`` sums of differences: do as many change to one side as to the other?"""
    from ..extras import require

    lost, gained = int((sums < 0).sum()), int((sums > 0).sum())
    return min(1.0, 2 * float(require("scipy.stats").binom.cdf(min(lost, gained), lost + gained, 0.5)))


def p_value(difference: Score, num_clusters: int) -> float:
    """Two-sided p value of no difference: t with ``clusters - 1`` degrees of freedom.

    Where all clusters differ by the same amount the variance says nothing, and the sign test over clusters takes
    its place; 1 for a single cluster.
    """
    from ..extras import require

    if difference.value == 0 or num_clusters < 2:
        return 1.0
    if difference.stderr <= 1e-9 * abs(difference.value):  # rounding aside, all the same
        return 2 * 0.5**num_clusters
    t = abs(difference.value) / difference.stderr
    return float(2 * require("scipy.stats").t.sf(t, num_clusters - 1))
