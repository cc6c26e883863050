"""What a report says, as sections of text and tables: one source for Markdown, the terminal and the HTML page.

The order is that of a reader who has to decide: the verdict in one line, what failed and by how much, what is
undecided and what would settle it, the figures, what was compared, what was not measured. Cells are plain text
that each form escapes itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..comparison import MetricComparison, RuleResult, Verdict
from . import identity, wording
from .gaps import gaps
from .report import Judged, Outcome, Report
from .wording import DASH, plural

_WORD = {
    Outcome.PASS: "PASSED", Outcome.FAIL: "FAILED", Outcome.UNDECIDED: "UNDECIDED", Outcome.MEASURED: "MEASURED",
}  # fmt: skip
_LOSSES = (
    "metric", ">recovery (interval)", ">ratio (interval)", ">lost / gained", ">p adjusted", "non-inferiority",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Table:
    """Columns (``>`` in front: to the right) and rows of plain text."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Section:
    """A title, then a table, then lines.

    Attributes:
        key: fixed name, for forms that place something of their own there.
        label: of the candidate that the section is about; None: of all.
    """

    key: str
    title: str
    table: Table | None = None
    lines: tuple[str, ...] = ()
    label: str | None = None


def title(report: Report) -> str:
    runs = [judged.comparison.candidate for judged in report.judged]
    named = [run.candidate["model"] for run in runs if isinstance(run.candidate.get("model"), str)]
    of = f" of {named[0]}" if named and named.count(named[0]) == len(runs) else ""
    baseline = report.judged[0].comparison.baseline.label
    return f"quantkit eval{of}: {', '.join(run.label for run in runs)} against {baseline}"


def verdict_line(report: Report) -> str:
    """The outcome in one line."""
    word = _WORD[report.outcome]
    if report.outcome is Outcome.UNDECIDED and report.undecided == "pass":
        word = "PASSED, THOUGH UNDECIDED (--undecided pass)"
    return f"{word}: {'; '.join(_said(judged) for judged in report.judged)}"


def content(report: Report) -> Iterator[Section]:
    """All sections, without the verdict line."""
    several = len(report.judged) > 1
    if several:
        yield _overview(report)
    for judged in report.judged:
        yield from _rules(judged, report)
        yield from _undecided(judged)
    for judged in report.judged:
        yield from _figures(judged)
    yield _compared(report)
    yield _settings(report)
    yield _tasks(report)
    missing = tuple(gaps(report)) or ("Every task, item and metric that was asked for was compared and judged.",)
    yield Section("gaps", "Not measured, and what these figures do not say", lines=missing)
    yield Section("reading", "How to read this", lines=tuple(_reading(report)))


def _said(judged: Judged) -> str:
    label = judged.label
    if judged.gate is None:
        compared = plural(len(judged.comparison.metrics), "metric")
        return f"{label}: no gate was asked for, {compared} compared{_not_covered(judged)}"
    line = f"{label}: gate {judged.gate.gate}, {wording.percent(judged.comparison.confidence)} confidence: "
    line += "required rules: "
    line += _counts([rule.verdict for rule in judged.gate.rules if rule.is_required]) or "none"
    reported = _counts([rule.verdict for rule in judged.gate.rules if not rule.is_required])
    return (f"{line} (reported only: {reported})" if reported else line) + _not_covered(judged)


def _not_covered(judged: Judged) -> str:
    """What the verdict is not about, in the same line as it."""
    tasks, metrics = len(judged.left_out()), len(judged.only_reported()) + len(judged.unjudged())
    said = [
        f"{plural(tasks, 'task')} left out" if tasks else "",
        f"{plural(metrics, 'metric')} only reported" if judged.gate is not None and metrics else "",
        f"limited to {plural(judged.limit, 'item')} of each task" if judged.limit is not None else "",
    ]
    return "".join(f"; {one}" for one in said if one)


def _counts(verdicts: Sequence[Verdict]) -> str:
    """``1 failed, 2 passed``."""
    words = ((Verdict.FAIL, "failed"), (Verdict.UNDECIDED, "undecided"), (Verdict.PASS, "passed"))
    return ", ".join(f"{verdicts.count(verdict):,} {word}" for verdict, word in words if verdict in verdicts)


def _rules(judged: Judged, report: Report) -> Iterator[Section]:
    gate = judged.gate
    if gate is None:
        return
    order = (Verdict.FAIL, Verdict.UNDECIDED, Verdict.PASS)
    ranked = sorted(gate.rules, key=lambda rule: (not rule.is_required, order.index(rule.verdict)))
    rows = tuple(
        (
            rule_word(rule), rule.rule, wording.rule_found(rule), wording.rule_limit(rule), wording.rule_by(rule),
            "required" if rule.is_required else "reported only",
        )
        for rule in ranked
    )  # fmt: skip
    columns = ("", "rule", ">found (interval)", ">limit", ">how far", "")
    lines = [f"Gate {gate.gate}, SHA-256 {gate.sha256}. Undecided rules {_policy(report)}."]
    lines += [f"Why {rule.rule}: {rule.reason}" for rule in ranked if rule.reason]
    yield Section("rules", f"Rules: {judged.label}", Table(columns, rows), tuple(lines), judged.label)


def _policy(report: Report) -> str:
    return "let the command fail" if report.undecided == "fail" else "let the command pass (--undecided pass)"


def rule_word(rule: RuleResult) -> str:
    return {Verdict.PASS: "passed", Verdict.FAIL: "FAILED", Verdict.UNDECIDED: "UNDECIDED"}[rule.verdict]


def _undecided(judged: Judged) -> Iterator[Section]:
    """What is undecided, and what would settle it: rules, then margins that no rule names."""
    rules = [] if judged.gate is None else [r for r in judged.gate.rules if r.verdict is Verdict.UNDECIDED]
    lines = [wording.rule_line(rule) for rule in rules]
    named = set() if judged.gate is None else {rule.name for rule in judged.gate.rules}
    for metric in judged.comparison.metrics:
        found = metric.non_inferiority
        if found is None or found.verdict is not Verdict.UNDECIDED or metric.name in named:
            continue
        lines.append(
            f"{metric.name} at most {wording.points(found.margin, sign=False)} points worse (no rule): "
            f"{wording.needed(metric)}"
        )
    if lines:
        yield Section("undecided", f"Undecided: {judged.label}", lines=tuple(lines), label=judged.label)


def _figures(judged: Judged) -> Iterator[Section]:
    """The scores, then what follows from them: two tables, since one would be too wide for any screen."""
    comparison, label = judged.comparison, judged.label
    against = f"{label} against {comparison.baseline.label}"
    if not comparison.metrics:
        yield Section("figures", f"Figures: {against}", lines=("No metric was compared.",), label=label)
        return
    columns = (
        "metric", ">items (clusters)", ">baseline", ">candidate", ">difference",
        f">{wording.percent(comparison.confidence)} interval", "path",
    )  # fmt: skip
    rows = tuple(_score_row(judged, metric) for metric in comparison.metrics)
    yield Section("figures", f"Figures: {against}", Table(columns, rows), (), label)
    named = [metric for metric in comparison.metrics if any(cell != DASH for cell in _loss_row(metric)[1:])]
    if named:
        yield Section(
            "losses", f"Recovery, flips and margins: {against}",
            Table(_LOSSES, tuple(_loss_row(metric) for metric in named)), (), label,
        )  # fmt: skip


def _score_row(judged: Judged, found: MetricComparison) -> tuple[str, ...]:
    metric, clusters = found.metric, found.num_clusters
    items = f"{found.num_items:,}" + (f" ({clusters:,})" if clusters < found.num_items else "")
    return (
        found.name, items, wording.score(metric, found.baseline, clusters),
        wording.score(metric, found.candidate, clusters), wording.difference(found), wording.interval(found),
        identity.path(judged.comparison.candidate, found.task, found.path),
    )  # fmt: skip


def _loss_row(found: MetricComparison) -> tuple[str, ...]:
    margin = found.non_inferiority
    within = wording.non_inferiority(found)
    if margin is not None:
        within = f"margin {wording.points(margin.margin, sign=False)} points: {within}"
    return (
        found.name, wording.recovery(found), wording.ratio(found), wording.flips(found.flips),
        wording.p_value(found.p_adjusted), within,
    )  # fmt: skip


def _overview(report: Report) -> Section:
    """All candidates beside each other: differences, or the value of a metric of the pair."""
    by_candidate = [{m.name: m for m in judged.comparison.metrics} for judged in report.judged]
    names = dict.fromkeys(name for found in by_candidate for name in found)
    said = ("no gate" if judged.gate is None else _WORD[judged.outcome].lower() for judged in report.judged)
    rows = [("outcome", *said)]
    rows += [(name, *(_short(found.get(name)) for found in by_candidate)) for name in names]
    columns = ("", *(f">{judged.label}" for judged in report.judged))
    line = "Differences from the baseline; for metrics of the pair (KL divergence) the value."
    return Section("overview", "All candidates", Table(columns, tuple(rows)), (line,))


def _short(found: MetricComparison | None) -> str:
    if found is None:
        return "not measured"
    if found.difference is None:
        return f"{wording.score(found.metric, found.candidate, found.num_clusters)} {wording.interval(found)}"
    return f"{wording.difference(found)} {wording.interval(found)}"


def _compared(report: Report) -> Section:
    runs = [report.judged[0].comparison.baseline, *(judged.comparison.candidate for judged in report.judged)]
    columns = ("", "baseline", *_numbered("candidate", len(report.judged)))
    rows = tuple(tuple(row) for row in identity.side_by_side([identity.facts(run) for run in runs]))
    return Section("compared", "What was compared", Table(columns, rows))


def _settings(report: Report) -> Section:
    runs = [report.judged[0].comparison.baseline, *(judged.comparison.candidate for judged in report.judged)]
    columns = ("", "baseline", *_numbered("candidate", len(report.judged)))
    # "baseline": what fidelity was measured against; the column of that name, or it would not have been compared
    stated = [
        {name: value for name, value in identity.settings(run).items() if not name.startswith("baseline.")}
        for run in runs
    ]
    rows = tuple(tuple(row) for row in identity.side_by_side(stated))
    return Section("settings", "Settings and versions", Table(columns, rows) if rows else None,
                   () if rows else ("The runs state none.",))  # fmt: skip


def _tasks(report: Report) -> Section:
    rows = []
    for judged in report.judged:
        for task in judged.comparison.candidate.tasks:
            other = judged.comparison.baseline.task(task.name)
            scored = len(judged.comparison.candidate.items_of(task.name))
            rows.append(
                (judged.label, task.name, task.version, f"{scored:,}", f"{len(task.skipped):,}",
                 _tokens(judged, task.name), DASH if other is None else other.path, task.path)
            )  # fmt: skip
    columns = (
        "candidate", "task", "version", ">items scored", ">skipped", ">tokens scored (in decode)",
        "baseline's path", "path",
    )  # fmt: skip
    return Section("tasks", "Tasks", Table(columns, tuple(rows)))


def _tokens(judged: Judged, task: str) -> str:
    found = identity.scored_tokens(judged.comparison.candidate, task)
    return identity.UNSTATED if found is None else f"{found[0]:,} ({found[1]:,})"


def _reading(report: Report) -> Iterator[str]:
    shares = sorted({judged.comparison.confidence for judged in report.judged})
    yield (
        f"± is one standard error; intervals are of {' or '.join(map(wording.percent, shares))} confidence. Both "
        "are clustered where items share a document."
    )
    yield (
        "Differences are candidate minus baseline: of accuracies in points (percent minus percent), of "
        "perplexities of the logarithm, in nats per what they are of. Recovery and ratio are candidate to "
        "baseline; of a perplexity, recovery is baseline to candidate."
    )
    yield "A rule holds or fails only if its whole interval is on that side of the limit; else it is undecided."
    yield (
        "Path: prefill scores a continuation in one pass and never enters decode; decode forces it through "
        "decode, token by token; generate is as served, both. Only what a path enters can be seen in "
        "its figures."
    )
    yield "p adjusted: of no difference, two-sided, corrected for all metrics of the comparison (Holm)."
    yield "lost / gained: items that the baseline had right and the candidate wrong, and the other way round."
    yield (
        f"{DASH}: the metric has no such figure. Metrics of the pair (KL divergence) are measured between both "
        "and have no baseline, difference or p; recovery is of accuracies and perplexities, lost / gained and "
        "non-inferiority (whether the whole interval is within a margin, beyond it, or undecided; the margin is "
        "that of the gate's rule, else --margin) of accuracies and shares, ratio of perplexities."
    )


def _numbered(name: str, count: int) -> Sequence[str]:
    return [name] if count == 1 else [f"{name} {number}" for number in range(1, count + 1)]
