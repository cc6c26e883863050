"""From an interval to a verdict, and how many items would decide what is undecided.

Widths shrink with the square root of the items, so that the number needed follows from the interval that was
found, clusters and all. It is given for a chance of 80 %: at the number where the interval would just reach the
limit, the next run would be as likely to stay undecided as not.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from ..comparison import Interval, Verdict
from ..extras import require

CHANCE = 0.8
_ROUNDING = 1e-12
_STEP = 1.02  # between numbers of items that are tried


def verdict(interval: Interval, *, low: float = -math.inf, high: float = math.inf) -> Verdict:
    """Whether a value lies in ``[low, high]``, of which one end is given: PASS if its whole interval does."""
    if interval.low >= low - _ROUNDING and interval.high <= high + _ROUNDING:
        return Verdict.PASS
    if interval.high < low or interval.low > high:
        return Verdict.FAIL
    return Verdict.UNDECIDED


def items_to_decide(
    value: float,
    interval: Interval,
    limit: float,
    items: int,
    confidence: float,
    grown: Callable[[float], Interval] | None = None,
) -> int | None:
    """About how many items would decide on which side of ``limit`` a value is, if it stays what it is.

    Args:
        grown: the interval with so many times the items, where that is not one that shrinks with their square root
            (few changes: it shrinks faster).

    None when no number would: the value is at the limit, or nothing is known of its error.
    """
    gap = abs(value - limit)
    if gap <= _ROUNDING or not math.isfinite(_half(value, interval, limit)):
        return None
    wider = 1 + _normal(CHANCE) / _normal((1 + confidence) / 2)
    needed = items * (_half(value, interval, limit) * wider / gap) ** 2
    if grown is not None:
        most, factor = needed / items, 1.0
        while factor < most and _half(value, grown(factor), limit) * wider > gap:
            factor *= _STEP
        needed = items * min(factor, most)
    return max(items + 1, math.ceil(needed))


def _half(value: float, interval: Interval, limit: float) -> float:
    """From the value to the end of its interval on the side of the limit."""
    return value - interval.low if limit < value else interval.high - value


def rounded(count: int) -> int:
    """Up to two digits: the number is an estimate and should look like one."""
    step: int = 10 ** max(0, len(str(count)) - 2)
    return -(-count // step) * step


def planned_items(
    discordant: float,
    margin: float,
    *,
    confidence: float = 0.95,
    chance: float = CHANCE,
    design_effect: float = 1.0,
) -> int:
    """Items that show non-inferiority with probability ``chance`` if there is no difference (planning).

    Args:
        discordant: share of items that flip, in either direction.
        margin: fraction, 0.008 for 0.8 points.
        design_effect: by which clusters inflate the variance.
    """
    z = _normal((1 + confidence) / 2) + _normal(chance)
    return math.ceil(design_effect * discordant * (z / margin) ** 2)


def _normal(probability: float) -> float:
    return float(require("scipy.stats").norm.ppf(probability))
