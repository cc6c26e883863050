"""Simulations of what is rare: clusters that change now and then, scores near their end (``calibration.py``).

Flips that stick together more than answers do are shown without a target: what is taken for granted of them
(``paired/counted.py``) does not hold there.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from measure import Row
from quantkit_evals.comparison import Verdict
from quantkit_evals.paired.bootstrap import bca, resampled
from quantkit_evals.paired.clusters import FEW_CHANGED, p_value, ratio, sign_p_value
from quantkit_evals.paired.counted import changes, right
from quantkit_evals.paired.decision import verdict
from quantkit_evals.paired.few import widened

Floats = NDArray[np.float64]
LEVEL, RESAMPLES = 0.05, 2000


def shares(rng: np.random.Generator, clusters: int, mean: float, together: float) -> Floats:
    """Probabilities ``[clusters, 1]`` of a mean whose items have that correlation within clusters."""
    if together in (0, 1):
        return rng.random((clusters, 1)) < mean if together else np.full((clusters, 1), mean)
    size = (1 - together) / together
    return rng.beta(mean * size, (1 - mean) * size, (clusters, 1))


def clustered_margin(pairs: int, clusters: int, items: int, loss: float, flips: float, answers: float) -> float:
    """Share of PASS where the true loss is the margin, and flips and answers correlate within clusters."""
    rng = np.random.default_rng(7)
    names = [str(number // items) for number in range(clusters * items)]
    ones, passed = np.ones(clusters * items), 0
    for number in range(pairs):
        base = rng.random((clusters, items)) < shares(rng, clusters, 0.5, answers)
        is_lost = rng.random((clusters, items)) < shares(rng, clusters, loss if flips == 1 else 2 * loss, flips)
        if flips == 1:  # whole clusters, all of which were right
            base |= is_lost
        now = base & ~is_lost
        change = now.astype(float) - base
        sums = np.stack([change.sum(axis=1), np.full(clusters, float(items))], axis=1)
        draws = resampled(sums, seed=number, resamples=RESAMPLES)
        seen = changes(now.ravel().astype(float), base.ravel().astype(float), ones, names)
        narrow = bca(sums, draws, lambda s: s[..., 0] / s[..., 1], 1 - LEVEL)
        interval = widened(narrow, ratio(sums[:, 0], sums[:, 1]), clusters, 1 - LEVEL, seen)
        passed += verdict(interval, low=-loss) is Verdict.PASS
    return passed / pairs


def few_changed(pairs: int, clusters: int, expected: float) -> tuple[float, float]:
    """Shares in which the clustered p value is at most 5 % where so many clusters change by one item, and in which
    that of the t test alone is."""
    rng = np.random.default_rng(11)
    rejected = alone = 0
    for count in rng.poisson(expected, pairs):
        sums = np.zeros(clusters)
        sums[:count] = rng.choice([-1.0, 1.0], count)
        t = p_value(ratio(sums, np.full(clusters, 6.0)), clusters)
        alone += t <= LEVEL
        rejected += (max(t, sign_p_value(sums)) if count < FEW_CHANGED else t) <= LEVEL
    return rejected / pairs, alone / pairs


def at_the_score(pairs: int, items: int, true: float) -> float:
    """Share of PASS of a rule ``min`` whose limit is the true score."""
    passes: dict[int, bool] = {}
    rights = np.random.default_rng(5).binomial(items, true, pairs)
    names = [str(number) for number in range(items)]
    ones = np.ones(items)
    for count in map(int, np.unique(rights)):
        values = (np.arange(items) < count).astype(float)
        sums = np.stack([values, ones], axis=1)
        draws = resampled(sums, seed=count, resamples=RESAMPLES)
        narrow = bca(sums, draws, lambda s: s[..., 0] / s[..., 1], 1 - LEVEL)
        interval = widened(narrow, ratio(values, ones), items, 1 - LEVEL, right(values, ones, names))
        passes[count] = interval.low >= true
    return float(np.mean([passes[int(count)] for count in rights]))


def few_rows(pairs: int) -> list[Row]:
    """Where few clusters change, and where a score is near its end: at most what is promised."""
    rows = []
    for clusters, items, flips, answers in (
        (428, 6, 0.05, 0.05), (60, 40, 0.05, 0.05), (60, 40, 1, 0.1), (428, 6, 1, 0.1), (60, 40, 0.2, 0.05),
    ):  # fmt: skip
        passed = clustered_margin(pairs, clusters, items, 0.008, flips, answers)
        how = "whole passages flip" if flips == 1 else f"flips correlate by {flips:g}, answers by {answers:g}"
        name = f"{clusters} passages of {items}, truly 0.8 points worse, margin the same, {how}: "
        is_promised = flips <= answers
        rows.append(
            Row(name + "passes", 100 * passed, "%", target="<= 3.5 %", holds=passed <= 0.035) if is_promised
            else Row(name + "passes", 100 * passed, "%")
        )  # fmt: skip
    for expected in (4, 6, 12):
        share, alone = few_changed(pairs, 428, expected)
        title = f"428 passages, {expected} of which change, no difference: clustered p rejects"
        rows.append(Row(title, 100 * share, "%", "t alone", 100 * alone, "<= 5 %", share <= LEVEL))
    for items, true in ((20, 0.95), (100, 0.95), (500, 0.99)):
        share = at_the_score(pairs, items, true)
        title = f"{items} items, truly {100 * true:g} %, min the same: passes"
        rows.append(Row(title, 100 * share, "%", target="<= 3.5 %", holds=share <= 0.035))
    return rows
