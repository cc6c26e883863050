"""Two runs side by side: scores, differences with intervals, tests and verdicts of every metric they share.

The p value that counts, and that Holm's adjustment gets: for accuracies of independent items McNemar's mid-p; for
everything else, accuracies of clustered items included, the t test of the clustered difference.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from quantkit.errors import UsageError

from .comparison import Comparison, Flips, Interval, MetricComparison, NonInferiority, Score, Verdict
from .matching import Matched, match
from .paired.bootstrap import RESAMPLES, bca, resampled
from .paired.clusters import cluster_sums, design_effect, p_value, ratio
from .paired.decision import items_to_decide, verdict
from .paired.few import Changes, Right, hull, widened
from .paired.holm import holm
from .paired.mcnemar import flips
from .run import Item, Metric, Run

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from .paired.bootstrap import Statistic

    Floats = NDArray[np.float64]


def compare(
    baseline: Run,
    candidate: Run,
    *,
    margin: float = 0.008,
    confidence: float = 0.95,
    seed: int = 0,
    resamples: int = RESAMPLES,
    allow_left_out: bool = False,
) -> Comparison:
    """Compare all that two runs share.

    Args:
        margin: of non-inferiority of accuracies, a fraction (0.008 for 0.8 points).
        confidence: of two-sided intervals.
        seed: of the bootstrap, the same for every metric.
        resamples: of the bootstrap, at least 2,000.
        allow_left_out: compare what both have although one of them has more; said in ``left_out``.

    Raises:
        UsageError: the runs can't be compared, with the reason.
    """
    if not (0 < margin < 1 and 0.5 <= confidence < 1 and resamples >= 2000):
        raise UsageError(
            f"margin {margin}, confidence {confidence}, {resamples} resamples",
            accepted="margin in (0, 1), confidence in [0.5, 1), at least 2,000 resamples",
        )
    found = match(baseline, candidate)
    if found.left_out and not allow_left_out:
        more = f" (and {len(found.left_out) - 1} more)" if len(found.left_out) > 1 else ""
        raise UsageError(
            f"the runs did not score the same: {found.left_out[0]}{more}",
            where=f"{baseline.label}, {candidate.label}",
            hint="What both have can be compared if leaving out the rest is allowed.",
        )
    metrics = [
        _Comparing(task, metric, margin, confidence, seed, resamples).result()
        for task in found.tasks
        for metric in task.metrics
    ]
    adjusted = holm([metric.p_value for metric in metrics])
    return Comparison(
        baseline,
        candidate,
        confidence,
        tuple(replace(metric, p_adjusted=p) for metric, p in zip(metrics, adjusted, strict=True)),
        found.left_out + found.notes,
    )


class _Comparing:
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
        self.is_widened = False

    def result(self) -> MetricComparison:
        """All of it; for a metric of the pair "difference" below is its own mean."""
        is_pair = self.metric.is_of_pair
        candidate = ratio(self.sums[:, 0] + self.sums[:, 1], self.sums[:, 2])
        baseline = ratio(self.sums[:, 1], self.sums[:, 2])
        difference = ratio(self.sums[:, 0], self.sums[:, 2])
        interval = self._widened(self._bca(lambda s: s[..., 0] / s[..., 2]), difference)
        changed = None if is_pair or not self.is_accuracy else self._flips()
        ratios = None if is_pair or self.metric.kind != "perplexity" else _exp(interval)
        recovery, recovery_interval = self._recovery(baseline, candidate, interval)
        return MetricComparison(
            task=self.matched.task.name,
            metric=self.metric,
            path=self.matched.task.path,
            num_items=self.num_items,
            num_clusters=self.num_clusters,
            baseline=None if is_pair else self._score(baseline),
            candidate=self._score(candidate),
            difference=None if is_pair else difference,
            interval=_exp(interval) if is_pair and self.metric.kind == "perplexity" else interval,
            p_value=None if is_pair else self._p_value(difference, changed),
            p_adjusted=None,
            recovery=recovery,
            ratio=None if ratios is None else _power_of_e(difference.value),
            ratio_interval=ratios,
            flips=changed,
            non_inferiority=None if changed is None else self._non_inferiority(difference.value, interval),
            recovery_interval=recovery_interval,
        )

    def _bca(self, statistic: Statistic) -> Interval:
        return bca(self.sums, self.draws, statistic, self.confidence)

    def _score(self, score: Score) -> Score:
        """In the metric's own unit: of a perplexity the exponential, its error by the delta method."""
        if self.metric.kind != "perplexity":
            return score
        value = _power_of_e(score.value)
        return Score(value, value * score.stderr)

    def _widened(self, narrow: Interval, difference: Score) -> Interval:
        interval = widened(narrow, difference, self.num_clusters, self.confidence, self._seen())
        self.is_widened = interval != narrow
        return interval

    def _seen(self) -> Changes | Right | None:
        """What changed, counted in independent items; None where values are not shares of right."""
        shares = bool((self.weights == 1).all()) and _are_shares(self.values) and _are_shares(self.theirs)
        if not shares or self.num_clusters < 2:
            return None
        change = self.values - self.theirs
        effect = design_effect(change, self.weights, self.clusters)
        if self.metric.is_of_pair:
            return Right(float(self.values.sum()) / effect, self.num_items / effect) if self.is_accuracy else None
        return Changes(
            lost=float(-change[change < 0].sum()) / effect,
            gained=float(change[change > 0].sum()) / effect,
            changed=float((change != 0).sum()) / effect,
            items=self.num_items / effect,
        )

    def _flips(self) -> Flips:
        change = self.values - self.theirs
        return flips(int((change < 0).sum()), int((change > 0).sum()))

    def _p_value(self, difference: Score, changed: Flips | None) -> float:
        if changed is not None and self.num_clusters == self.num_items:
            return changed.p_mid
        return p_value(difference, self.num_clusters)

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

    def _non_inferiority(self, difference: float, interval: Interval) -> NonInferiority:
        if self.metric.is_higher_better:
            limit = -self.margin
            outcome = verdict(interval, low=limit)
        else:
            limit = self.margin
            outcome = verdict(interval, high=limit)
        needed = None
        if outcome is Verdict.UNDECIDED:
            needed = items_to_decide(difference, interval, limit, self.num_items, self.confidence)
        return NonInferiority(self.margin, self.confidence, outcome, needed)


def _column(items: tuple[Item, ...], metric: Metric) -> Floats:
    import numpy as np

    return np.array([item.values[metric.name] for item in items], dtype=np.float64)


def _are_shares(values: Floats) -> bool:
    return bool(((values >= 0) & (values <= 1)).all())


def _exp(interval: Interval) -> Interval:
    return Interval(_power_of_e(interval.low), _power_of_e(interval.high))


def _power_of_e(value: float) -> float:
    """Infinite where it is too large for a number: a model that broke altogether should be told, not crash."""
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf
