"""Numbers as people read them: accuracies in percent and their differences in points, KL in nats per token.

``±`` is one standard error everywhere, intervals are written ``(low to high)``. A number that is not there is
never printed as one: a dash where the metric has none by definition (``DASH``; the tables say why), or
``unknown`` with the reason.
"""

from __future__ import annotations

import math
from decimal import Decimal

from ..comparison import Flips, Interval, MetricComparison, RuleResult, Score, Verdict
from ..paired.decision import rounded
from ..run import Metric

DASH = "–"
_SMALL = 1e-9  # shown as 0: rounding of the arithmetic, not a difference

WORDS = {Verdict.PASS: "holds", Verdict.FAIL: "does not hold", Verdict.UNDECIDED: "undecided"}
_MARGINS = {Verdict.PASS: "within", Verdict.FAIL: "beyond", Verdict.UNDECIDED: "undecided"}  # no gate's words
_MOST_DIGITS = 12


def is_known(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def figure(value: float, form: str, unit: str = "") -> str:
    """A number, with its unit; a value that is not finite is ``unknown``."""
    if not math.isfinite(value):
        return "unknown"
    value = 0.0 if abs(value) < _SMALL else value
    text = format(value, form)
    if "e-" in text:  # small ones are written out, so that they compare at a glance
        text = format(Decimal(text), "+f" if form.startswith("+") else "f")
    if text.startswith(("-0", "+0")) and not text.strip("+-0.e"):
        text = text[1:]  # no sign for what is rounded to nothing
    return f"{text} {unit}" if unit else text


def points(value: float, *, sign: bool = True) -> str:
    """A difference of fractions in points, two decimals."""
    return figure(100 * value, "+.2f" if sign else ".2f")


def unit_of(metric: Metric) -> str:
    """Of its scores."""
    return {"accuracy": "%", "share": "%", "perplexity": ""}.get(metric.kind, metric.unit)


def difference_unit(metric: Metric) -> str:
    if metric.is_percent:
        return "points"
    return metric.unit or "nats/token" if metric.kind == "perplexity" else metric.unit


def score(metric: Metric, found: Score | None, num_clusters: int) -> str:
    """``61.24 ± 0.97 %``."""
    if found is None:
        return DASH
    factor, form, error = _forms(metric)
    shown = figure(factor * found.value, form)
    return _with_error(shown, factor * found.stderr, error, unit_of(metric), num_clusters)


def difference(found: MetricComparison) -> str:
    """``-0.52 ± 0.30 points``; of a perplexity, of its log."""
    if found.difference is None:
        return DASH
    factor, form, error = _difference_forms(found.metric)
    shown = figure(factor * found.difference.value, form)
    stderr = factor * found.difference.stderr
    return _with_error(shown, stderr, error, difference_unit(found.metric), found.num_clusters)


def bare_score(metric: Metric, found: Score) -> str:
    """Without unit and error."""
    factor, form, _ = _forms(metric)
    return figure(factor * found.value, form)


def bare_difference(found: MetricComparison) -> str:
    if found.difference is None:
        return DASH
    factor, form, _ = _difference_forms(found.metric)
    return figure(factor * found.difference.value, form)


def interval(found: MetricComparison) -> str:
    """Of the difference, or of the score of a metric of the pair; in that unit."""
    if found.difference is None:
        factor, form, _ = _forms(found.metric)
    else:
        factor, form, _ = _difference_forms(found.metric)
    return span(found.interval, factor, form)


def span(found: Interval | None, factor: float = 1.0, form: str = ".4f") -> str:
    """``(-1.10 to +0.06)``."""
    if found is None:
        return DASH
    if not (math.isfinite(found.low) and math.isfinite(found.high)):
        return "(interval unknown)"
    return f"({figure(factor * found.low, form)} to {figure(factor * found.high, form)})"


def recovery(found: MetricComparison) -> str:
    """With its interval, where it has one."""
    if found.recovery is None:
        return DASH
    value = figure(100 * found.recovery, ".2f", "%")
    return value if found.recovery_interval is None else f"{value} {span(found.recovery_interval, 100.0, '.2f')}"


def ratio(found: MetricComparison) -> str:
    """Of a perplexity, with its interval."""
    if found.ratio is None:
        return DASH
    return f"{figure(found.ratio, '.4f')} {span(found.ratio_interval)}"


def p_value(value: float | None) -> str:
    if value is None:
        return DASH
    if not math.isfinite(value):
        return "unknown"
    return "< 0.001" if value < 0.001 else f"{value:.3f}"


def flips(found: Flips | None) -> str:
    """Lost and gained items."""
    return DASH if found is None else f"{found.lost:,} / {found.gained:,}"


def non_inferiority(found: MetricComparison) -> str:
    """``undecided, about 5,200 items (now 2,500)``."""
    own = found.non_inferiority
    if own is None:
        return DASH
    word = _MARGINS[own.verdict]
    return f"{word}, {needed(found)}" if own.verdict is Verdict.UNDECIDED else word


def needed(found: MetricComparison) -> str:
    """How many items would settle it."""
    if not (math.isfinite(found.interval.low) and math.isfinite(found.interval.high)):
        return "since nothing is known of its error"
    count = found.non_inferiority.needed_items if found.non_inferiority else None
    if count is None:
        return "and no number of items would settle it if the difference stays what it is"
    return f"about {rounded(count):,} items would settle it (now {found.num_items:,})"


def rule_found(rule: RuleResult) -> str:
    """``-1.42 points (-2.00 to -0.90)``."""
    form = f"{'+' if rule.unit == 'points' else ''}{rule_form(rule)}"
    return f"{figure(rule.found, form, rule.unit)} {span(rule.interval, 1.0, form)}"


def rule_limit(rule: RuleResult) -> str:
    """As it was written: rounded only where that changes nothing."""
    text = format(rule.limit, rule_form(rule))
    return figure(rule.limit, rule_form(rule) if float(text) == rule.limit else ".12g", rule.unit)


def rule_by(rule: RuleResult) -> str:
    """``0.62 points beyond the limit``; ``0.10 points inside``."""
    if not math.isfinite(rule.by):
        return "distance unknown"
    side = "beyond the limit" if rule.by < 0 else "inside the limit"
    return f"{figure(abs(rule.by), rule_form(rule), rule.unit)} {side}"


def rule_form(rule: RuleResult) -> str:
    """Digits for the numbers of a rule: two decimals of percent and points, else enough for the limit's size; and
    as many as tell the value and the ends of its interval from the limit."""
    numbers = [v for v in (rule.found, rule.interval.low, rule.interval.high) if math.isfinite(v)]
    if rule.unit in ("%", "points"):
        digits, kind = 2, "f"
    else:
        largest = max((abs(v) for v in (rule.found, rule.limit) if math.isfinite(v)), default=1.0)
        digits, kind = (4, "f") if largest >= 0.1 else (3, "g")
    if kind == "f":
        digits = max(digits, len(f"{rule.limit:.12g}".partition(".")[2]))  # those of the limit as it was written
    while digits < _MOST_DIGITS and any(_is_hidden(v, rule.limit, f".{digits}{kind}") for v in numbers):
        digits += 1
    return f".{digits}{kind}"


def _is_hidden(value: float, limit: float, form: str) -> bool:
    """Whether rounding makes a value the limit that it is not (rounding of the arithmetic aside)."""
    is_other = not math.isclose(value, limit, rel_tol=1e-9, abs_tol=_SMALL)
    return is_other and format(value, form) == format(limit, form)


def rule_line(rule: RuleResult) -> str:
    """One sentence: what was asked, found, and how far off that is."""
    if math.isnan(rule.found) and rule.advice:
        return f"{rule.rule}: nothing was found: {rule.advice}"
    line = (
        f"{rule.rule}: found {rule_found(rule)} at {percent(rule.confidence)} confidence, "
        f"limit {rule_limit(rule)}, {rule_by(rule)}"
    )
    if rule.verdict is Verdict.UNDECIDED:
        is_finite = math.isfinite(rule.interval.low) and math.isfinite(rule.interval.high)
        line += "; the interval reaches across the limit" if is_finite else "; its interval is not known"
    return f"{line}; {rule.advice}" if rule.advice else line


def percent(share: float) -> str:
    return f"{100 * share:g} %"


def plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def _forms(metric: Metric) -> tuple[float, str, str]:
    """Factor, form of the value, form of its standard error."""
    if metric.is_percent:
        return 100.0, ".2f", ".2f"
    if metric.kind == "perplexity":
        return 1.0, ".4f", ".2g"
    return 1.0, ".4g", ".2g"


def _difference_forms(metric: Metric) -> tuple[float, str, str]:
    if metric.is_percent:
        return 100.0, "+.2f", ".2f"
    return 1.0, "+.3g", ".2g"


def _with_error(shown: str, stderr: float, form: str, unit: str, num_clusters: int) -> str:
    if shown == "unknown":
        return "unknown (not a finite number)"
    unit = f" {unit}" if unit else ""
    if not math.isfinite(stderr):
        why = "one independent item only" if num_clusters < 2 else "not computed"
        return f"{shown}{unit} (standard error unknown: {why})"
    return f"{shown} ± {figure(stderr, form)}{unit}"
