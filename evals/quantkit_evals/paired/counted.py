"""Shares of right counted in independent items: how much the items of two candidates, or of one, are worth.

Items of a cluster, and the tokens of a block, depend on each other: counts are divided by the design effect, the
factor by which that inflates a variance (Korn and Graubard 1998, for proportions). It can't be read from what is
hardly there. One flip alone looks independent and none looks like nothing, so that a candidate without a flip
would be surer or less sure than one that lost an item, by the size of the clusters. So where few items are of a
kind, something steadier takes its place:

    changes      as dependent as the answers of either candidate are, if these depend more; of less than ten
                 flips also up to half as dependent as they could be (a cluster changes as a whole)
    one score    between what was seen and the worst (a cluster counts once), by how many are of the rarer kind

What that takes for granted: flips stick together no more than answers do. Where they do, more than ten of few
clusters may pass a gate more often than it says (``bench/eval/calibration.py`` has how often).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .clusters import FEW_CHANGED, cluster_sums, design_effect, ratio
from .few import CHANGED, Changes, Right

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]


def changes(candidate: Floats, baseline: Floats, weights: Floats, clusters: Sequence[str]) -> Changes:
    """What changed between values ``[items]`` from 0 to their weight."""
    change = candidate - baseline
    found = _changes(change, weights, design_effect(change, weights, clusters))
    if found.changed >= CHANGED:
        return found
    flips = int((change != 0).sum())
    steadier = max(_effect(values, weights, clusters) for values in (candidate, baseline))
    half_of_worst = 1 + (len(change) / len(set(clusters)) - 1) / 2
    unseen = 1 + (half_of_worst - 1) * max(0.0, 1 - (flips / FEW_CHANGED) ** 2)
    return _changes(change, weights, max(steadier, unseen, found.effect if flips else 1.0))


def right(values: Floats, weights: Floats, clusters: Sequence[str]) -> Right:
    """One score of values ``[items]`` from 0 to their weight; of tokens where weights count these."""
    effect = _effect(values, weights, clusters)
    return Right(float(values.sum()) / effect, float(weights.sum()) / effect)


def _changes(change: Floats, weights: Floats, effect: float) -> Changes:
    unit = effect * float(weights.mean())
    return Changes(
        lost=float(-change[change < 0].sum()) / unit,
        gained=float(change[change > 0].sum()) / unit,
        changed=float((change != 0).sum()) / effect,
        items=len(change) / effect,
        effect=effect,
    )


def _effect(values: Floats, weights: Floats, clusters: Sequence[str]) -> float:
    """Variance of a share over that of independent weights (tokens, items), at least 1."""
    import numpy as np

    sums = cluster_sums(clusters, np.stack([values, weights], axis=1))
    total, hits = float(weights.sum()), float(values.sum())
    rarer = min(hits, total - hits)
    worst = max(1.0, total / len(sums))
    if rarer <= 1e-9 * total:
        return worst
    seen = max(1.0, ratio(sums[:, 0], sums[:, 1]).stderr ** 2 * total**3 / (hits * (total - hits)))
    return seen + max(0.0, worst - seen) * max(0.0, 1 - rarer / CHANGED)
