"""Intervals where a bootstrap is too sure: few clusters, or few items that changed.

A bootstrap knows only what it saw. Five items without a change would give an interval of no width, and pass every
margin; few clusters vary less among each other than the population they stand for. There the interval is widened
to hold one that does not rely on what was seen alone:

    few clusters       t with G - 1 degrees of freedom
    few changed items  Bonett and Price (2012), adjusted Wald: one more lost and one more gained item of two more
    few of a kind      for a score alone (right or wrong, or a share), Wilson's interval

Counts are of independent items (``counted``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..comparison import Interval, Score
from ..extras import require

CLUSTERS = 50  # below this, clusters are few
CHANGED = 30  # below this, changed items are


@dataclass(frozen=True, slots=True)
class Changes:
    """What changed between candidates whose items score 0 to 1, in numbers of independent items.

    Attributes:
        lost, gained: sums of what items lost and gained; for accuracies, items.
        changed: items that did either.
        items: all of them.
        effect: design effect that items were divided by.
    """

    lost: float
    gained: float
    changed: float
    items: float
    effect: float = 1.0

    def times(self, factor: float) -> Changes:
        """If there were so many times the items, and they changed as these did."""
        return Changes(
            factor * self.lost, factor * self.gained, factor * self.changed, factor * self.items, self.effect
        )


@dataclass(frozen=True, slots=True)
class Right:
    """How many of how many independent items are right, for one candidate alone."""

    right: float
    items: float


def widened(
    interval: Interval, score: Score, num_clusters: int, confidence: float, seen: Changes | Right | None
) -> Interval:
    """A bootstrap interval, wider where it would be too sure.

    Args:
        score: what it is the interval of, with its clustered error.
        seen: None for values without bounds, where only clusters count.
    """
    if num_clusters < CLUSTERS:
        interval = hull(interval, t_interval(score, num_clusters, confidence))
    if isinstance(seen, Changes) and seen.changed < CHANGED:
        return hull(interval, bonett_price(seen.lost, seen.gained, seen.items, confidence))
    if isinstance(seen, Right) and min(seen.right, seen.items - seen.right) < CHANGED:
        return hull(interval, wilson(seen.right, seen.items, confidence))
    return interval


def hull(first: Interval, second: Interval) -> Interval:
    return Interval(min(first.low, second.low), max(first.high, second.high))


def t_interval(score: Score, num_clusters: int, confidence: float) -> Interval:
    """Around a score with ``num_clusters - 1`` degrees of freedom; unbounded for one cluster."""
    if num_clusters < 2:
        return Interval(-math.inf, math.inf)
    half = float(require("scipy.stats").t.ppf((1 + confidence) / 2, num_clusters - 1)) * score.stderr
    return Interval(score.value - half, score.value + half)


def bonett_price(lost: float, gained: float, items: float, confidence: float) -> Interval:
    """Of ``(gained - lost) / items``, paired; numbers may be fractional after division by a design effect."""
    a, b = (lost + 1) / (items + 2), (gained + 1) / (items + 2)
    z = float(require("scipy.stats").norm.ppf((1 + confidence) / 2))
    half = z * math.sqrt((a + b - (a - b) ** 2) / (items + 2))
    return Interval(max(-1.0, b - a - half), min(1.0, b - a + half))


def wilson(right: float, items: float, confidence: float) -> Interval:
    """Of a proportion; numbers may be fractional."""
    low, high = require("statsmodels.stats.proportion").proportion_confint(
        right, items, alpha=1 - confidence, method="wilson"
    )
    return Interval(float(low), float(high))
