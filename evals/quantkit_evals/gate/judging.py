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

from ..comparison import UNBOUNDED, Comparison, GateResult, Interval, MetricComparison, RuleResult, Verdict
from ..configuration import Configuration
from ..paired.decision import items_to_decide, rounded, verdict
from ..run import Task
from .refusal import applicable, check_gate
from .schema import Gate, Rule


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
    unscored = _unscored(comparison)
    check_gate(gate, [*_Compared.of(comparison), *unscored], _configuration(comparison.candidate.candidate))
    metrics = {name: found.metric for name, found in compared.items()}
    metrics |= {f"{task.name}.{metric.name}": metric for task in unscored for metric in task.metrics}
    rules = []
    applied = list(applicable(gate, metrics))
    for rule, name in applied:
        found = compared.get(name)
        if found is None:
            rules.append(_of_nothing(rule, name, gate))
        elif rule.required or rule.kind != "min_recovery" or found.recovery is not None:
            rules.append(_result(rule, found, gate))  # what is only reported must not stop a verdict
    used = {id(rule) for rule, _ in applied}
    unused = tuple(rule.words for rule in gate.rules if rule.required and id(rule) not in used)
    return GateResult(gate.name, gate.sha256, tuple(rules), unused)


def _unscored(comparison: Comparison) -> list[Task]:
    """Tasks that both were asked and of which no item could be compared: a gate can't pass on them."""
    compared = {found.task for found in comparison.metrics}
    return [
        task
        for task in comparison.candidate.tasks
        if task.name not in compared and comparison.baseline.task(task.name) is not None
    ]


def _of_nothing(rule: Rule, name: str, gate: Gate) -> RuleResult:
    return RuleResult(
        rule=f"{name} {rule.kind} {_plain(rule.limit)}",
        name=name,
        found=math.nan,
        interval=UNBOUNDED,
        limit=rule.limit,
        unit="",
        verdict=Verdict.UNDECIDED,
        by=math.nan,
        advice="no item of the task was scored in both runs",
        is_required=rule.required,
        reason=rule.reason,
        confidence=gate.confidence,
    )


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
    advice = _advice(asked, found, rule.kind, gate.confidence) if outcome is Verdict.UNDECIDED else ""
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
        confidence=gate.confidence,
    )


def _advice(asked: _Asked, found: MetricComparison, kind: str, confidence: float) -> str:
    if found.num_clusters < 2:
        return "one independent item says nothing about its own error: score more of them"
    if not (math.isfinite(asked.interval.low) and math.isfinite(asked.interval.high)):
        return "how sure it is can't be told: in some of the resamples the baseline has none"
    own = found.non_inferiority
    if kind == "non_inferiority" and own is not None and math.isclose(100 * own.margin, abs(asked.limit)):
        needed = own.needed_items  # that knows of few changes
    else:
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
    interval = _times(found.recovery_interval or UNBOUNDED, 100.0)
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
