"""What was not measured, and what the figures can't say: a report that is silent about it would claim it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from ..matching import PATHS
from ..run import Run, Skipped
from . import identity
from .report import Judged, Report
from .wording import is_known, plural

REASONS = 10  # different reasons of one task that are shown; the document has every item
NAMED = 5  # items of a reason that are named


def gaps(report: Report) -> Iterator[str]:
    """One line each; none if all that was asked for was compared and judged."""
    baseline = report.judged[0].comparison.baseline
    yield from _skipped(baseline, f"{baseline.label} (baseline)")
    for judged in report.judged:
        for reason in judged.comparison.left_out:
            yield f"{judged.label}: {reason}" if PATHS in reason else f"{judged.label}: left out: {reason}"
        yield from _skipped(judged.comparison.candidate, judged.label)
        yield from _asked_otherwise(judged)
        yield from _few(judged)
        yield from _unproven(judged)
        yield from _blind(judged)
        yield from _unknown(judged)
        yield from _unjudged(judged)


def _skipped(run: Run, label: str) -> Iterator[str]:
    for task in run.tasks:
        reasons = Counter(skipped.reason for skipped in task.skipped)
        shown = reasons.most_common(REASONS)
        for reason, count in shown:
            named = _named(task.skipped, reason)
            yield f"{label}: {task.name}: {plural(count, 'item')} not scored ({named}): {reason}"
        if more := len(reasons) - len(shown):
            rest = plural(len(task.skipped) - sum(count for _, count in shown), "item")
            yield f"{label}: {task.name}: {rest} not scored for {plural(more, 'further reason')}"


def _named(skipped: Sequence[Skipped], reason: str) -> str:
    items = [one.item for one in skipped if one.reason == reason]
    more = f" and {len(items) - NAMED:,} more" if len(items) > NAMED else ""
    return ", ".join(items[:NAMED]) + more


def _asked_otherwise(judged: Judged) -> Iterator[str]:
    """The prompts are the same, or nothing would have been compared; what else decides answers may not be."""
    first, second = judged.comparison.baseline.settings, judged.comparison.candidate.settings
    for name in ("seed", "limit", "chat"):
        if name in first and name in second and first[name] != second[name]:
            yield f"{judged.label}: another {name} than the baseline's: {second[name]}, {first[name]}"


def _few(judged: Judged) -> Iterator[str]:
    """A trial run, which should not pass for the whole."""
    if judged.limit is not None:
        yield (
            f"{judged.label}: only {judged.limit} items of each task were asked at most (--limit), fidelity aside"
        )


def _unproven(judged: Judged) -> Iterator[str]:
    if judged.comparison.candidate.candidate.get("kind") == "endpoint":
        yield (
            f"{judged.label}: which weights a server has is not known here; answers that were kept of this URL "
            "and model before count as its own (--no-cache asks again)"
        )


def _blind(judged: Judged) -> Iterator[str]:
    run = judged.comparison.candidate
    found = identity.configuration(run)
    for task in run.tasks:
        if found is not None and identity.is_blind(run, task):
            yield (
                f"{judged.label}: {task.name} was scored by prefill alone: it says nothing about decode, so "
                f"nothing about {found.weights} weights in decode and {found.kv_dtype} KV pages that decode reads"
            )
        tokens = identity.scored_tokens(run, task.name)
        if found is not None and found.needs_decode and tokens is not None and 0 < tokens[1] < tokens[0]:
            yield (
                f"{judged.label}: {task.name}: {tokens[1]:,} of {tokens[0]:,} scored tokens come from decode, the "
                "others from prefill, which dilutes what decode costs"
            )


def _unknown(judged: Judged) -> Iterator[str]:
    """Figures that should be numbers and are not."""
    for metric in judged.comparison.metrics:
        difference = metric.difference
        values = {
            "score": [metric.candidate.value], "standard error": [metric.candidate.stderr],
            "difference": [] if difference is None else [difference.value],
            "standard error of the difference": [] if difference is None else [difference.stderr],
            "interval": [metric.interval.low, metric.interval.high],
            "p": [] if metric.p_value is None else [metric.p_value],
        }  # fmt: skip
        if missing := [name for name, found in values.items() if not all(map(is_known, found))]:
            why = "it has one independent item only" if metric.num_clusters < 2 else "not a finite number"
            yield f"{judged.label}: {metric.name}: {', '.join(missing)} unknown: {why}"


def _unjudged(judged: Judged) -> Iterator[str]:
    if judged.gate is None:
        yield f"{judged.label}: no gate was asked for, so nothing here was judged"
        return
    if names := [metric.name for metric in judged.unjudged()]:
        yield f"{judged.label}: no rule of gate {judged.gate.gate} judges {', '.join(names)}"
    if names := [metric.name for metric in judged.only_reported()]:
        yield f"{judged.label}: only reported by gate {judged.gate.gate}, never decided: {', '.join(names)}"
    if judged.gate.unused:
        unused = ", ".join(judged.gate.unused)
        yield f"{judged.label}: required rules of gate {judged.gate.gate} that nothing measured fits: {unused}"
