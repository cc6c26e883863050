"""Every rule of a gate against what was found: by the whole interval, never by the value alone.

All required rules must hold at once, so that passing needs no adjustment for their number: a gate of many rules is
harder to pass by luck than any of them.

Limits are given and results told in what people read: percent and points for accuracies, ratios as they are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from quantkit.errors import UsageError

from ..comparison import Comparison, GateResult, Interval, MetricComparison, RuleResult, Verdict
from ..configuration import Configuration
from ..paired.decision import items_to_decide, rounded, verdict
from .refusal import applicable, check_gate
from .schema import Gate, Rule

UNKNOWN = Interval(-math.inf, math.inf)


@dataclass(frozen=True, slots=True)
class _Asked:
    """A rule in numbers: ``found`` must lie on the good side of ``limit``."""

    words: str
    found: float
    interval: Interval
    limit: float
    unit: str
    is_upper: bool


def judge(gate: Gate, comparison: Comparison) -> GateResult:
    """The verdict of a gate.

    Raises:
        UsageError: the gate asks for what was not measured (``check_gate``), or for another confidence than that
            of the comparison.
    """
    if comparison.confidence != gate.confidence:
        raise UsageError(
            f"the gate judges at a confidence of {gate.confidence:g}, the comparison was made at "
            f"{comparison.confidence:g}",
            where=f"gate {gate.name}", hint="Compare with the confidence of the gate.",
        )  # fmt: skip
    compared = {found.name: found for found in comparison.metrics}
    check_gate(gate, _Compared.of(comparison), _configuration(comparison.candidate.candidate))
    metrics = {name: found.metric for name, found in compared.items()}
    rules = tuple(
        _result(rule, compared[name], gate)
        for rule, name in applicable(gate, metrics)
        if rule.required or rule.kind != "min_recovery" or compared[name].recovery is not None
    )  # what is only reported must not stop a verdict: the report names what no rule judged
    return GateResult(gate.name, gate.sha256, rules)


@dataclass(frozen=True, slots=True)
class _Compared:
    """A task with the metrics of it that were compared, as ``check_gate`` wants it."""

    name: str
    path: str
    metrics: tuple[Any, ...]

    @classmethod
    def of(cls, comparison: Comparison) -> list[_Compared]:
        return [cls(found.task, found.path, (found.metric,)) for found in comparison.metrics]


def _configuration(candidate: Any) -> list[Configuration]:
    """Of a run of our engine, as its record says; none for other candidates."""
    stated = candidate.get("configuration")
    if candidate.get("kind") != "engine" or not isinstance(stated, dict):
        return []
    found = Configuration.of_json({k: v for k, v in stated.items() if k in ("weights", "kv_dtype")})
    return [found or Configuration("dual")]  # one that this version does not know is judged as strictly as any


def _result(rule: Rule, found: MetricComparison, gate: Gate) -> RuleResult:
    asked = {
        "max": _score,
        "min": _score,
        "max_ratio": _ratio,
        "min_recovery": _recovery,
        "non_inferiority": _non_inferiority,
    }[rule.kind](rule, found, gate.confidence)
    side = "high" if asked.is_upper else "low"
    outcome = verdict(asked.interval, **{side: asked.limit})
    by = asked.limit - asked.found if asked.is_upper else asked.found - asked.limit
    advice = _advice(asked, found, gate.confidence) if outcome is Verdict.UNDECIDED else ""
    return RuleResult(
        rule=f"{found.name} {asked.words}",
        name=found.name,
        found=asked.found,
        interval=asked.interval,
        limit=asked.limit,
        unit=asked.unit,
        verdict=outcome,
        by=by,
        advice=advice,
        is_required=rule.required,
        reason=rule.reason,
    )


def _advice(asked: _Asked, found: MetricComparison, confidence: float) -> str:
    if found.num_clusters < 2:
        return "one independent item says nothing about its own error: score more of them"
    needed = items_to_decide(asked.found, asked.interval, asked.limit, found.num_items, confidence)
    if needed is None:
        return "the value is at the limit: no number of items would decide it if it stays there"
    return f"about {rounded(needed - found.num_items):,} more items would decide it if the value stays what it is"


def _score(rule: Rule, found: MetricComparison, confidence: float) -> _Asked:
    is_upper = rule.kind == "max"
    factor, unit = (100.0, "%") if found.metric.is_percent else (1.0, found.metric.unit)
    words = f"at {'most' if is_upper else 'least'} {_plain(rule.limit)}{f' {unit}' if unit else ''}"
    interval = _times(found.score_interval, factor)
    return _Asked(words, factor * found.candidate.value, interval, rule.limit, unit, is_upper)


def _ratio(rule: Rule, found: MetricComparison, confidence: float) -> _Asked:
    ratio, interval = found.ratio, found.ratio_interval
    if ratio is None or interval is None:
        raise UsageError("it has no ratio", where=found.name)
    words = f"at most {_plain(rule.limit)} times the baseline's"
    return _Asked(words, ratio, interval, rule.limit, "", is_upper=True)


def _recovery(rule: Rule, found: MetricComparison, confidence: float) -> _Asked:
    if found.recovery is None:
        raise UsageError(
            "the baseline scores 0, of which nothing can be recovered", where=found.name,
            hint="A task that the baseline can't do says nothing about quantization.",
        )  # fmt: skip
    words = f"recovers at least {_plain(rule.limit)} %"
    interval = _times(found.recovery_interval or UNKNOWN, 100.0)
    return _Asked(words, 100 * found.recovery, interval, rule.limit, "%", is_upper=False)


def _non_inferiority(rule: Rule, found: MetricComparison, confidence: float) -> _Asked:
    if found.difference is None:
        raise UsageError("it has no difference", where=found.name)
    factor, unit = (100.0, "points") if found.metric.is_percent else (1.0, found.metric.unit)
    is_upper = not found.metric.is_higher_better
    words = f"at most {_plain(rule.limit)}{f' {unit}' if unit else ''} worse"
    limit = rule.limit if is_upper else -rule.limit
    return _Asked(words, factor * found.difference.value, _times(found.interval, factor), limit, unit, is_upper)


def _times(interval: Interval, factor: float) -> Interval:
    return Interval(factor * interval.low, factor * interval.high)


def _plain(number: float) -> str:
    return f"{number:.12g}"
