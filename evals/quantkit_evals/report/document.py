"""The report as one JSON document: candidates exactly as the runs state them, figures unrounded, gates' verdicts.

``document.schema.json`` beside this module describes it (JSON Schema 2020-12) and is part of the contract: a key
is added under the same version, one that is renamed or means something else raises it. Fractions stay fractions
here, whatever the other forms show. A number that is not finite is null, and ``gaps`` says why where it is a
score, an error, a difference or its interval.

What is left out: the records of the items, which stand in the runs.
"""

from __future__ import annotations

import json
import math
from functools import cache
from pathlib import Path
from typing import Any

from ..comparison import (
    Comparison,
    Flips,
    GateResult,
    Interval,
    MetricComparison,
    NonInferiority,
    RuleResult,
    Score,
)
from ..run import CurvePoint, Metric, Run, Task
from . import identity
from .content import verdict_line
from .gaps import gaps
from .report import Judged, Report

FORMAT = "quantkit-eval-report"
VERSION = 1
SCHEMA = Path(__file__).with_name("document.schema.json")


def document(report: Report) -> dict[str, Any]:
    """The document, JSON-ready."""
    return {
        "format": FORMAT, "version": VERSION, "outcome": report.outcome.value, "success": report.is_success,
        "undecided": report.undecided, "verdict": verdict_line(report),
        "baseline": _run(report.judged[0].comparison.baseline),
        "candidates": [_judged(judged) for judged in report.judged], "gaps": list(gaps(report)),
    }  # fmt: skip


@cache
def schema() -> dict[str, Any]:
    """JSON Schema of the document."""
    found: dict[str, Any] = json.loads(SCHEMA.read_bytes())
    return found


def _judged(judged: Judged) -> dict[str, Any]:
    comparison: Comparison = judged.comparison
    return {
        **_run(comparison.candidate), "outcome": judged.outcome.value, "confidence": comparison.confidence,
        "gate": None if judged.gate is None else _gate(judged.gate),
        "metrics": [_metric(metric, judged) for metric in comparison.metrics],
        "left_out": list(comparison.left_out),
    }  # fmt: skip


def _run(run: Run) -> dict[str, Any]:
    return {
        "label": run.label, "candidate": dict(run.candidate), "activations": identity.activations(run),
        "settings": dict(run.settings), "tasks": [_task(run, task) for task in run.tasks],
    }  # fmt: skip


def _task(run: Run, task: Task) -> dict[str, Any]:
    return {
        "name": task.name, "version": task.version, "path": task.path, "items": len(run.items_of(task.name)),
        "metrics": [_metric_kind(metric) for metric in task.metrics],
        "skipped": [{"item": one.item, "reason": one.reason} for one in task.skipped],
        "curves": {name: [_point(point) for point in points] for name, points in task.curves.items()},
    }  # fmt: skip


def _metric_kind(metric: Metric) -> dict[str, Any]:
    return {
        "name": metric.name, "kind": metric.kind, "is_higher_better": metric.is_higher_better, "unit": metric.unit,
        "is_of_pair": metric.is_of_pair,
    }  # fmt: skip


def _metric(found: MetricComparison, judged: Judged) -> dict[str, Any]:
    return {
        "name": found.name, "task": found.task, "metric": _metric_kind(found.metric), "path": found.path,
        "activations": identity.activations(judged.comparison.candidate),
        "items": found.num_items, "clusters": found.num_clusters, "baseline": _score(found.baseline),
        "candidate": _score(found.candidate), "difference": _score(found.difference),
        "interval": _interval(found.interval), "p_value": _number(found.p_value),
        "p_adjusted": _number(found.p_adjusted), "recovery": _number(found.recovery),
        "recovery_interval": _interval(found.recovery_interval),
        "ratio": _number(found.ratio), "ratio_interval": _interval(found.ratio_interval),
        "flips": _flips(found.flips),
        "non_inferiority": _non_inferiority(found.non_inferiority),
        "score_interval": _interval(found.score_interval),
    }  # fmt: skip


def _gate(gate: GateResult) -> dict[str, Any]:
    return {
        "name": gate.gate, "sha256": gate.sha256, "verdict": gate.verdict.value,
        "rules": [_rule(rule) for rule in gate.rules], "unused": list(gate.unused),
    }  # fmt: skip


def _rule(rule: RuleResult) -> dict[str, Any]:
    return {
        "rule": rule.rule, "name": rule.name, "found": _number(rule.found), "interval": _interval(rule.interval),
        "limit": _number(rule.limit), "unit": rule.unit, "verdict": rule.verdict.value, "by": _number(rule.by),
        "advice": rule.advice, "is_required": rule.is_required, "reason": rule.reason,
    }  # fmt: skip


def _flips(flips: Flips | None) -> dict[str, Any] | None:
    if flips is None:
        return None
    return {
        "lost": flips.lost, "gained": flips.gained, "p_exact": _number(flips.p_exact),
        "p_mid": _number(flips.p_mid),
    }  # fmt: skip


def _non_inferiority(found: NonInferiority | None) -> dict[str, Any] | None:
    if found is None:
        return None
    return {
        "margin": found.margin, "confidence": found.confidence, "verdict": found.verdict.value,
        "needed_items": found.needed_items,
    }  # fmt: skip


def _score(score: Score | None) -> dict[str, Any] | None:
    return None if score is None else {"value": _number(score.value), "stderr": _number(score.stderr)}


def _interval(interval: Interval | None) -> dict[str, Any] | None:
    return None if interval is None else {"low": _number(interval.low), "high": _number(interval.high)}


def _point(point: CurvePoint) -> dict[str, Any]:
    return {
        "start": point.start, "stop": point.stop, "value": _number(point.value), "stderr": _number(point.stderr),
    }  # fmt: skip


def _number(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
