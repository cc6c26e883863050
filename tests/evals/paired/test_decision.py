"""Verdicts, sample sizes, few items and Holm's adjustment."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.stats

from quantkit_evals.comparison import Interval, Score, Verdict
from quantkit_evals.paired.decision import items_to_decide, planned_items, verdict
from quantkit_evals.paired.few import bonett_price, hull, t_interval, wilson
from quantkit_evals.paired.holm import holm


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (-0.007, 0.002, Verdict.PASS),
        (-0.008, 0.002, Verdict.PASS),  # at most 0.8 points worse includes 0.8
        (-0.0081, 0.002, Verdict.UNDECIDED),
        (-0.02, -0.008, Verdict.UNDECIDED),
        (-0.02, -0.0081, Verdict.FAIL),
        (-math.inf, math.inf, Verdict.UNDECIDED),
    ],
)
def test_verdict_by_the_whole_interval(low: float, high: float, expected: Verdict) -> None:
    assert verdict(Interval(low, high), low=-0.008) is expected
    assert verdict(Interval(-high, -low), high=0.008) is expected


def test_items_to_decide_by_hand() -> None:
    """A half width of 1 over a gap of 0.5: (1 + 0.8416 / 1.96)^2 * 4 = 8.17 times the items."""
    interval = Interval(-1.0, 1.2)
    assert items_to_decide(0.0, interval, -0.5, 1000, 0.95) == pytest.approx(8170, abs=5)
    assert items_to_decide(0.0, interval, 0.5, 1000, 0.95) == pytest.approx(8170 * 1.44, abs=10)
    assert items_to_decide(-0.5, interval, -0.5, 1000, 0.95) is None
    assert items_to_decide(0.0, Interval(-math.inf, math.inf), -0.5, 1, 0.95) is None


def test_that_many_items_decide_in_four_of_five_cases() -> None:
    """The promise, simulated: unit variance, difference 0.05 above the limit."""
    n, gap = 400, 0.05
    half = 1.96 / math.sqrt(n)
    needed = items_to_decide(0.0, Interval(-half, half), -gap, n, 0.95)
    means = np.random.default_rng(0).normal(0, 1 / math.sqrt(needed), 50_000)
    decided = (means - 1.96 / math.sqrt(needed) >= -gap).mean()
    assert decided == pytest.approx(0.8, abs=0.01)


def test_planned_items_are_the_usual_formula() -> None:
    """2 % and 5 % of discordant items for 0.8 points: the 2,000 to 6,000 of the documentation."""
    assert planned_items(0.02, 0.008) == 2453
    assert planned_items(0.05, 0.008) == 6132
    assert planned_items(0.02, 0.008, design_effect=2) == pytest.approx(2 * 2453, abs=1)
    assert planned_items(0.02, 0.008, confidence=0.99, chance=0.9) > 4000


def test_few_intervals_against_other_formulas() -> None:
    assert t_interval(Score(1.0, 0.5), 10, 0.95).high == pytest.approx(
        1 + 0.5 * scipy.stats.t.ppf(0.975, 9), abs=1e-12
    )
    assert t_interval(Score(1.0, math.nan), 1, 0.95) == Interval(-math.inf, math.inf)
    theirs = scipy.stats.binomtest(3, 40).proportion_ci(method="wilson")
    assert wilson(3, 40, 0.95).low == pytest.approx(theirs.low)
    assert wilson(3, 40, 0.95).high == pytest.approx(theirs.high)
    assert hull(Interval(0, 2), Interval(1, 3)) == Interval(0, 3)


def test_bonett_price_by_hand() -> None:
    """Ten lost, four gained of 98: a = 0.11, b = 0.05, half = 1.96 * sqrt((0.16 - 0.0036) / 100)."""
    found = bonett_price(10, 4, 98, 0.95)
    half = scipy.stats.norm.ppf(0.975) * math.sqrt((0.16 - 0.0036) / 100)
    assert (found.low, found.high) == (pytest.approx(-0.06 - half), pytest.approx(-0.06 + half))
    nothing = bonett_price(0, 0, 5, 0.95)
    assert nothing.low < -0.3  # five items without a change prove little
    assert bonett_price(5, 0, 5, 0.95).low == -1


def test_holm_by_hand_and_missing_ones() -> None:
    """0.01 * 3, 0.02 * 2, and the last one not below the one before it."""
    assert holm([0.02, None, 0.01, 0.03]) == [pytest.approx(0.04), None, pytest.approx(0.03), pytest.approx(0.04)]
    assert holm([None]) == [None]
    assert holm([]) == []
