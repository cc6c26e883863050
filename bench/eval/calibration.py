"""Whether the statistics of evaluations keep what they promise: simulated pairs of runs, fixed seed.

    python bench/eval/calibration.py [--pairs N] [--json FILE]

Without a difference, a test at 5 % should reject in 5 %: more is a gate that fails good models, less is one that
needs more items than it says. Exact McNemar may only err to the low side. Clustered items are simulated as
passages whose items flip together; tests that ignore this reject too often, and the row says how often. Power is
computed over all tables and compared with the share of simulated pairs that reject.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from measure import Row, write_rows
from quantkit_evals.comparison import Interval, Verdict
from quantkit_evals.paired.bootstrap import bca, resampled
from quantkit_evals.paired.clusters import p_value, ratio
from quantkit_evals.paired.decision import verdict
from quantkit_evals.paired.few import Changes, widened
from quantkit_evals.paired.mcnemar import p_values, power

Floats = NDArray[np.float64]
LEVEL, TOLERANCE = 0.05, 0.015
RESAMPLES = 2000
SKEWED_SHARE = 5  # a fifth of the pairs: these resample blocks one by one


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


def skewed(pairs: int, blocks: int, seed: int) -> tuple[float, float, float]:
    """Mean of skewed blocks, such as KL divergence, whose true mean is 1.

    Returns:
        Shares of intervals that miss it on either side, that lie below it (what would let a gate pass), and that
        lie below it with plain percentiles in place of BCa.
    """
    values = np.random.default_rng(seed).exponential(1.0, (pairs, blocks))
    missed = below = plain = 0
    for number, row in enumerate(values):
        sums = np.stack([row, np.ones(blocks)], axis=1)
        draws = resampled(sums, seed=number, resamples=RESAMPLES)
        found = bca(sums, draws, lambda s: s[..., 0] / s[..., 1], 1 - LEVEL)
        missed += not found.low <= 1 <= found.high
        below += found.high < 1
        plain += float(np.quantile(draws[:, 0] / draws[:, 1], 1 - LEVEL / 2)) < 1
    return missed / pairs, below / pairs, plain / pairs


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
    return [*rows, *margin_rows(pairs), *skewed_rows(max(1, pairs // SKEWED_SHARE)), *power_rows(pairs)]


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


def skewed_rows(pairs: int) -> list[Row]:
    missed, below, plain = skewed(pairs, 100, seed=2)
    name = f"mean of 100 skewed blocks ({pairs} runs): "
    return [
        Row(name + "interval misses it", 100 * missed, "%"),
        Row(name + "interval lies below it", 100 * below, "%", "percentile", 100 * plain, "<= percentile",
            below <= plain),
    ]  # fmt: skip


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
