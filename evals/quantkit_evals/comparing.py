"""One metric of one task in two runs: its numbers as columns, and everything that is computed from them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from .comparison import Flips, Interval, MetricComparison, NonInferiority, Score, Verdict
from .matching import Matched
from .paired.bootstrap import bca, resampled
from .paired.clusters import FEW_CHANGED, cluster_sums, p_value, ratio, sign_p_value
from .paired.counted import changes, right
from .paired.decision import items_to_decide, verdict
from .paired.few import Changes, Right, hull, widened
from .paired.mcnemar import flips
from .paired.skewed import log_t
from .run import Item, Metric

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from .paired.bootstrap import Statistic

    Floats = NDArray[np.float64]


class Comparing:
    """One metric: its numbers as columns, and everything that is computed from them."""

    def __init__(
        self, matched: Matched, metric: Metric, margin: float, confidence: float, seed: int, resamples: int
    ) -> None:
        import numpy as np

        self.matched, self.metric, self.margin, self.confidence = matched, metric, margin, confidence
        self.clusters = [item.cluster for item in matched.candidate]
        self.values = _column(matched.candidate, metric)
        self.weights = np.array([item.weight(metric.name) for item in matched.candidate])
        self.theirs = np.zeros_like(self.values) if metric.is_of_pair else _column(matched.baseline, metric)
        columns = np.stack([self.values - self.theirs, self.theirs, self.weights], axis=1)
        self.sums = cluster_sums(self.clusters, columns)  # difference, baseline, weight
        self.draws = resampled(self.sums, seed=seed, resamples=resamples)
        self.num_items, self.num_clusters = len(self.values), len(self.sums)
        self.is_accuracy = metric.kind == "accuracy"
        self.seed, self.is_widened = seed, False
        self.narrow = Interval(-math.inf, math.inf)  # of the difference, of the bootstrap alone

    def result(self) -> MetricComparison:
        """All of it; for a metric of the pair "difference" below is its own mean."""
        is_pair = self.metric.is_of_pair
        candidate = ratio(self.sums[:, 0] + self.sums[:, 1], self.sums[:, 2])
        baseline = ratio(self.sums[:, 1], self.sums[:, 2])
        difference = ratio(self.sums[:, 0], self.sums[:, 2])
        interval = self._interval(difference)
        changed = None if is_pair or not self.is_accuracy else self._flips()
        ratios = None if is_pair or self.metric.kind != "perplexity" else _exp(interval)
        recovery, recovery_interval = self._recovery(baseline, candidate, interval)
        is_judged = self.metric.is_percent and not is_pair
        if is_pair and self.metric.kind == "perplexity":
            interval = _exp(interval)
        return MetricComparison(
            task=self.matched.task.name,
            metric=self.metric,
            path=self.matched.task.path,
            num_items=self.num_items,
            num_clusters=self.num_clusters,
            baseline=None if is_pair else self._score(baseline),
            candidate=self._score(candidate),
            difference=None if is_pair else difference,
            interval=interval,
            p_value=None if is_pair else self._p_value(difference, changed),
            p_adjusted=None,
            recovery=recovery,
            ratio=None if ratios is None else _power_of_e(difference.value),
            ratio_interval=ratios,
            flips=changed,
            non_inferiority=self._non_inferiority(difference, interval) if is_judged else None,
            recovery_interval=recovery_interval,
            score_interval=interval if is_pair else self._score_interval(candidate),
        )

    def _bca(self, statistic: Statistic) -> Interval:
        return bca(self.sums, self.draws, statistic, self.confidence)

    def _score(self, score: Score) -> Score:
        """In the metric's own unit: of a perplexity the exponential, its error by the delta method."""
        if self.metric.kind != "perplexity":
            return score
        value = _power_of_e(score.value)
        return Score(value, value * score.stderr)

    def _interval(self, difference: Score) -> Interval:
        """Of the difference, or of the own score of a metric of the pair."""
        self.narrow = self._bca(lambda s: s[..., 0] / s[..., 2])
        if self.metric.is_of_pair and self.metric.kind == "mean" and bool((self.values >= 0).all()):
            self.narrow = self._skewed() or self.narrow
        seen: Changes | Right | None = None
        if self.num_clusters >= 2:
            seen = self._right() if self.metric.is_of_pair else self._changes()
        interval = widened(self.narrow, difference, self.num_clusters, self.confidence, seen)
        self.is_widened = interval != self.narrow
        return interval

    def _skewed(self) -> Interval | None:
        return log_t(
            self.sums[:, 0], self.sums[:, 2], seed=self.seed, resamples=len(self.draws), confidence=self.confidence
        )

    def _score_interval(self, candidate: Score) -> Interval:
        """Of the candidate's own score."""
        narrow = self._bca(lambda s: (s[..., 0] + s[..., 1]) / s[..., 2])
        seen = self._right() if self.num_clusters >= 2 else None
        interval = widened(narrow, candidate, self.num_clusters, self.confidence, seen)
        return _exp(interval) if self.metric.kind == "perplexity" else interval

    def _changes(self) -> Changes | None:
        """None where values are not shares of right."""
        is_share = self.metric.is_percent or bool((self.weights == 1).all())
        if not (is_share and _are_shares(self.values, self.weights) and _are_shares(self.theirs, self.weights)):
            return None
        return changes(self.values, self.theirs, self.weights, self.clusters)

    def _right(self) -> Right | None:
        if not (self.metric.is_percent and _are_shares(self.values, self.weights)):
            return None
        return right(self.values, self.weights, self.clusters)

    def _flips(self) -> Flips:
        change = self.values - self.theirs
        return flips(int((change < 0).sum()), int((change > 0).sum()))

    def _p_value(self, difference: Score, changed: Flips | None) -> float:
        if changed is not None and self.num_clusters == self.num_items:
            return changed.p_mid
        found = p_value(difference, self.num_clusters)
        sums = self.sums[:, 0]
        if self.metric.is_percent and (sums != 0).sum() < FEW_CHANGED:
            return max(found, sign_p_value(sums))
        return found

    def _recovery(
        self, baseline: Score, candidate: Score, interval: Interval
    ) -> tuple[float | None, Interval | None]:
        """Candidate / baseline where more is better and the baseline has any; of perplexities the inverse."""
        if self.metric.is_of_pair:
            return None, None
        if self.metric.kind == "perplexity":
            inverse = _exp(Interval(-interval.high, -interval.low))
            return _power_of_e(baseline.value - candidate.value), inverse
        if not self.metric.is_higher_better or baseline.value <= 0:
            return None, None
        found = self._bca(lambda s: (s[..., 0] + s[..., 1]) / s[..., 1])
        if self.is_widened:
            found = hull(found, Interval(1 + interval.low / baseline.value, 1 + interval.high / baseline.value))
        return candidate.value / baseline.value, found

    def _non_inferiority(self, difference: Score, interval: Interval) -> NonInferiority:
        limit = -self.margin if self.metric.is_higher_better else self.margin
        if self.metric.is_higher_better:
            outcome = verdict(interval, low=limit)
        else:
            outcome = verdict(interval, high=limit)
        needed = None
        if outcome is Verdict.UNDECIDED:
            needed = items_to_decide(
                difference.value, interval, limit, self.num_items, self.confidence, self._grown(difference)
            )
        return NonInferiority(self.margin, self.confidence, outcome, needed)

    def _grown(self, difference: Score) -> Callable[[float], Interval]:
        """The interval with so many times the items, if they did as these."""
        seen, value = self._changes(), difference.value

        def grown(factor: float) -> Interval:
            less = 1 / math.sqrt(factor)
            narrow = Interval(value - less * (value - self.narrow.low), value + less * (self.narrow.high - value))
            return widened(
                narrow, Score(value, less * difference.stderr), int(factor * self.num_clusters), self.confidence,
                seen.times(factor) if seen else None,
            )  # fmt: skip

        return grown


def _column(items: tuple[Item, ...], metric: Metric) -> Floats:
    import numpy as np

    return np.array([item.values[metric.name] for item in items], dtype=np.float64)


def _are_shares(values: Floats, weights: Floats) -> bool:
    return bool(((values >= 0) & (values <= weights * (1 + 1e-6))).all())


def _exp(interval: Interval) -> Interval:
    return Interval(_power_of_e(interval.low), _power_of_e(interval.high))


def _power_of_e(value: float) -> float:
    """Infinite where it is too large for a number: a model that broke altogether should be told, not crash."""
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf
