"""Whether the statistics of evaluations keep what they promise: simulated pairs of runs, fixed seed.

    python bench/eval/calibration.py [--pairs N] [--json FILE]

Without a difference, a test at 5 % should reject in 5 %: more is a gate that fails good models, less is one that
needs more items than it says. Exact McNemar may only err to the low side. Clustered items are simulated as
passages whose items flip together; tests that ignore this reject too often, and the row says how often. Power is
computed over all tables and compared with the share of simulated pairs that reject.
"""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from few_changes import LEVEL, RESAMPLES, Floats, few_rows

from measure import Row, write_rows
from quantkit_evals.comparison import Interval, Verdict
from quantkit_evals.paired.bootstrap import bca, resampled
from quantkit_evals.paired.clusters import p_value, ratio
from quantkit_evals.paired.decision import verdict
from quantkit_evals.paired.few import Changes, widened
from quantkit_evals.paired.mcnemar import p_values, power
from quantkit_evals.paired.skewed import log_t

TOLERANCE = 0.015
SKEWED_SHARE = 5  # a fifth of the pairs: these resample clusters one by one


@dataclass(frozen=True)
class Rejections:
    """Shares of pairs in which each test rejects "no difference" at 5 %."""

    exact: float
    mid: float
    bootstrap: float
    clustered_t: float


def excludes_zero(interval: Interval) -> bool:
    return interval.low > 0 or interval.high < 0


def rejections(changes: NDArray[np.int64]) -> Rejections:
    """Of pairs given as ``[pairs, clusters, items]`` of -1 (lost), 0 and 1 (gained)."""
    pairs, clusters, items = changes.shape
    exact, mid = p_values((changes < 0).sum(axis=(1, 2)), (changes > 0).sum(axis=(1, 2)))
    differences = changes.sum(axis=2).astype(float)
    bootstrap = clustered = 0
    for number, values in enumerate(differences):
        sums = np.stack([values, np.full(clusters, float(items))], axis=1)
        draws = resampled(sums, seed=number, resamples=RESAMPLES)
        bootstrap += excludes_zero(bca(sums, draws, lambda s: s[..., 0] / s[..., 1], 1 - LEVEL))
        clustered += p_value(ratio(sums[:, 0], sums[:, 1]), clusters) <= LEVEL
    return Rejections(
        float((exact <= LEVEL).mean()), float((mid <= LEVEL).mean()), bootstrap / pairs, clustered / pairs
    )


def independent(pairs: int, items: int, p_lost: float, p_gained: float, seed: int) -> NDArray[np.int64]:
    """Changes ``[pairs, items, 1]``: every item its own cluster."""
    drawn = np.random.default_rng(seed).random((pairs, items, 1), dtype=np.float32)
    return (drawn > 1 - p_gained).astype(np.int8) - (drawn < p_lost).astype(np.int8)


def passages(
    pairs: int, clusters: int, items: int, p_changed: float, together: float, seed: int
) -> NDArray[np.int64]:
    """Changes ``[pairs, clusters, items]`` without a difference on average.

    Each passage leans to one side; its items that change go there with probability ``(1 + together) / 2``.
    """
    rng = np.random.default_rng(seed)
    side = rng.choice(np.array([-1, 1], np.int8), (pairs, clusters, 1))
    changed = rng.random((pairs, clusters, items), dtype=np.float32) < p_changed
    with_it = rng.random((pairs, clusters, items), dtype=np.float32) < (1 + together) / 2
    return np.where(changed, np.where(with_it, side, -side), 0).astype(np.int8)


@dataclass(frozen=True)
class Beside:
    """Shares of intervals of a skewed mean that lie below the true one (what lets a gate pass) and above it.

    Attributes:
        below, above: of the interval that comparisons have.
        bca, percentile: below it by these in its place.
    """

    below: float
    above: float
    bca: float
    percentile: float


def skewed(values: Floats, true: float) -> Beside:
    """Of means of blocks ``[runs, blocks]``, such as KL divergence."""
    runs, blocks = values.shape
    ones = np.ones(blocks)
    below = above = plain = percentile = 0
    for number, row in enumerate(values):
        sums = np.stack([row, ones], axis=1)
        draws = resampled(sums, seed=number, resamples=RESAMPLES)
        theirs = bca(sums, draws, lambda s: s[..., 0] / s[..., 1], 1 - LEVEL)
        found = log_t(row, ones, seed=number, resamples=RESAMPLES, confidence=1 - LEVEL) or theirs
        below += found.high < true
        above += found.low > true
        plain += theirs.high < true
        percentile += float(np.quantile(draws[:, 0] / draws[:, 1], 1 - LEVEL / 2)) < true
    return Beside(below / runs, above / runs, plain / runs, percentile / runs)


def at_the_margin(pairs: int, items: int, p_lost: float, p_gained: float, seed: int) -> tuple[float, float]:
    """Shares of non-inferiority verdicts PASS and FAIL where the true difference is the margin itself."""
    changes = independent(pairs, items, p_lost, p_gained, seed)[:, :, 0].astype(float)
    margin = p_lost - p_gained
    outcomes = []
    for number, values in enumerate(changes):
        sums = np.stack([values, np.ones(items)], axis=1)
        draws = resampled(sums, seed=number, resamples=RESAMPLES)
        lost, gained = float((values < 0).sum()), float((values > 0).sum())
        interval = widened(
            bca(sums, draws, lambda s: s[..., 0] / s[..., 1], 1 - LEVEL), ratio(sums[:, 0], sums[:, 1]), items,
            1 - LEVEL, Changes(lost, gained, lost + gained, items),
        )  # fmt: skip
        outcomes.append(verdict(interval, low=-margin))
    return outcomes.count(Verdict.PASS) / pairs, outcomes.count(Verdict.FAIL) / pairs


def near(name: str, share: float) -> Row:
    """A row of a test that must reject in 5 % +- 1.5."""
    return Row(name, 100 * share, "%", target="5 +- 1.5 %", holds=abs(share - LEVEL) <= TOLERANCE)


def rows_of(pairs: int) -> list[Row]:
    rows: list[Row] = []
    for items, flip in ((500, 0.05), (2500, 0.02)):
        found = rejections(independent(pairs, items, flip / 2, flip / 2, seed=items))
        name = f"{items} items, {100 * flip:g} % flip, no difference: "
        rows += [
            near(name + "bootstrap rejects", found.bootstrap),
            near(name + "McNemar mid-p rejects", found.mid),
            Row(
                name + "McNemar exact rejects", 100 * found.exact, "%", target="<= 5 %", holds=found.exact <= LEVEL
            ),
            Row(name + "t test rejects", 100 * found.clustered_t, "%"),
        ]
    found = rejections(passages(pairs, 250, 10, 0.05, 0.8, seed=1))
    name = "250 passages of 10 items, 5 % flip, no difference: "
    rows += [
        near(name + "clustered bootstrap rejects", found.bootstrap),
        near(name + "clustered t test rejects", found.clustered_t),
        Row(name + "McNemar mid-p rejects, clusters ignored", 100 * found.mid, "%"),
    ]
    return [
        *rows,
        *margin_rows(pairs),
        *skewed_rows(max(1, pairs // SKEWED_SHARE)),
        *few_rows(max(1, pairs // SKEWED_SHARE)),
        *power_rows(pairs),
    ]


def margin_rows(pairs: int) -> list[Row]:
    """One side of a 95 % interval: 2.5 %, and less where few items flip and intervals are widened."""
    rows = []
    for items, lost, gained in ((2500, 0.014, 0.006), (300, 0.014, 0.006)):
        passed, failed = at_the_margin(pairs, items, lost, gained, seed=items + 2)
        name = f"{items} items, truly {100 * (lost - gained):g} points worse, margin the same: "
        rows += [
            Row(name + "passes", 100 * passed, "%", target="<= 3.5 %", holds=passed <= 0.035),
            Row(name + "fails", 100 * failed, "%", target="<= 3.5 %", holds=failed <= 0.035),
        ]
    return rows


def skewed_rows(runs: int) -> list[Row]:
    """2.5 % on each side: a heavy tail misses that on the side that lets a gate pass, by less than BCa does."""
    rng = np.random.default_rng(2)
    rows = []
    for name, values, true, limit in (
        ("exponential", rng.exponential(1.0, (runs, 100)), 1.0, 0.04),
        ("exponential", rng.exponential(1.0, (runs, 64)), 1.0, 0.04),
        ("log-normal, sigma 1,", rng.lognormal(0, 1.0, (runs, 64)), math.exp(0.5), None),
        ("log-normal, sigma 1.5,", rng.lognormal(0, 1.5, (runs, 64)), math.exp(1.125), None),
    ):
        found = skewed(values, true)
        title = f"mean of {values.shape[1]} {name} blocks ({runs} runs): interval lies "
        target = "<= BCa's (2.5 % is missed)" if limit is None else f"<= {100 * limit:g} %"
        rows += [
            Row(title + "below it", 100 * found.below, "%", "BCa", 100 * found.bca, target,
                found.below <= (found.bca if limit is None else limit)),
            Row(title + "below it, percentiles", 100 * found.percentile, "%"),
            Row(title + "above it", 100 * found.above, "%", target="<= 4 %", holds=found.above <= 0.04),
        ]  # fmt: skip
    return rows


def power_rows(pairs: int) -> list[Row]:
    rows = []
    for items, lost, gained in ((500, 0.05, 0.02), (2500, 0.02, 0.01)):
        changes = independent(pairs, items, lost, gained, seed=items + 1)
        p = p_values((changes < 0).sum(axis=(1, 2)), (changes > 0).sum(axis=(1, 2)))
        for is_mid, kind in enumerate(("exact", "mid-p")):
            computed = power(items, lost, gained, is_mid=bool(is_mid))
            seen = float((p[is_mid] <= LEVEL).mean())
            rows.append(
                Row(f"{items} items, {100 * lost:g} % lost, {100 * gained:g} % gained: power of {kind}, computed",
                    100 * computed, "%", "simulated", 100 * seen, "simulated +- 1.5 %",
                    abs(computed - seen) <= TOLERANCE)
            )  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=10_000)
    parser.add_argument("--json")
    args = parser.parse_args()
    write_rows(rows_of(args.pairs), args.json)


if __name__ == "__main__":
    main()
