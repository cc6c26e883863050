"""Which plots a report has, each with its numbers as a table: chosen by what was measured."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from ..comparison import MetricComparison, Verdict
from ..run import CurvePoint
from . import wording
from .content import Table
from .curves import Series, curves, say
from .plots import Change, Estimate, flips, forest
from .report import Judged, Report


@dataclass(frozen=True, slots=True)
class Figure:
    """A plot, what it shows in a sentence, and its numbers."""

    title: str
    note: str
    svg: str
    table: Table


def figures(report: Report) -> Iterator[Figure]:
    """In the order of the page; nothing where nothing of the kind was measured."""
    yield from _differences(report)
    yield from _ratios(report)
    yield from _pairs(report)
    yield from _curves(report)
    yield from _flips(report)


def _metrics(report: Report) -> Iterator[tuple[Judged, MetricComparison, str]]:
    """All metrics of all candidates with a label, by metric, so that candidates stand beside each other."""
    names = dict.fromkeys(metric.name for judged in report.judged for metric in judged.comparison.metrics)
    for name in names:
        for judged in report.judged:
            for metric in judged.comparison.metrics:
                if metric.name == name:
                    yield judged, metric, name if len(report.judged) == 1 else f"{name}: {judged.label}"


def _differences(report: Report) -> Iterator[Figure]:
    """Of accuracies together, of other metrics by unit; perplexities have their ratio."""
    by_unit: dict[tuple[bool, str], list[Estimate]] = {}
    for judged, found, label in _metrics(report):
        if found.difference is not None and found.metric.kind != "perplexity":
            key = found.metric.is_percent, wording.difference_unit(found.metric)
            by_unit.setdefault(key, []).append(_difference(judged, found, label))
    for number, ((_, unit), rows) in enumerate(by_unit.items()):
        title = "Differences of scores" + (f", {unit}" if unit else "")
        note = (
            "Candidate minus baseline, with the interval. Red dashes mark how much worse a score may be; a circle "
            "holds, a cross does not, a diamond is undecided."
        )
        axis = f"difference, {unit}" if unit else "difference"
        svg = forest(f"difference{number}", title, axis, rows, zero=0.0, sign=True)
        yield Figure(title, note, svg, _numbers(rows))


def _difference(judged: Judged, found: MetricComparison, label: str) -> Estimate:
    factor = 100.0 if found.metric.is_percent else 1.0
    value = factor * found.difference.value if found.difference else math.nan
    margin = found.non_inferiority
    limits, verdict = _limits(judged, found, value)
    if margin is not None and not limits:  # a gate's rule is what decides
        limit = factor * (-margin.margin if found.metric.is_higher_better else margin.margin)
        limits, verdict = (limit,), margin.verdict
    note = f"{wording.bare_difference(found)} {wording.interval(found)}"
    low, high = factor * found.interval.low, factor * found.interval.high
    return Estimate(label, value, low, high, limits, verdict, note)


def _ratios(report: Report) -> Iterator[Figure]:
    rows = []
    for judged, found, label in _metrics(report):
        if found.ratio is None:
            continue
        span = found.ratio_interval
        low, high = (math.nan, math.nan) if span is None else (span.low, span.high)
        limits, verdict = _limits(judged, found, found.ratio)
        rows.append(Estimate(label, found.ratio, low, high, limits, verdict, wording.ratio(found)))
    if rows:
        title = "Perplexity, ratio to the baseline"
        note = "1 is no change, above it is worse. Red dashes mark the limits of rules."
        svg = forest("ratio", title, "candidate / baseline", rows, zero=1.0, sign=False)
        yield Figure(title, note, svg, _numbers(rows))


def _pairs(report: Report) -> Iterator[Figure]:
    """Metrics measured between both (KL divergence), by unit."""
    by_unit: dict[tuple[str, bool], list[Estimate]] = {}
    for judged, found, label in _metrics(report):
        if found.metric.is_of_pair:
            key = wording.unit_of(found.metric), found.metric.is_higher_better
            by_unit.setdefault(key, []).append(_pair(judged, found, label))
    for number, ((unit, is_higher_better), rows) in enumerate(by_unit.items()):
        title = "Measured between baseline and candidate" + (f", {unit}" if unit else "")
        title += ", higher is better" if is_higher_better else ", lower is better"
        zero = None if is_higher_better else 0.0  # an agreement is read from its other end
        svg = forest(f"pair{number}", title, unit or "value", rows, zero=zero, sign=False)
        note = "Values with their intervals. Red dashes mark the limits of rules."
        yield Figure(title, note, svg, _numbers(rows))


def _pair(judged: Judged, found: MetricComparison, label: str) -> Estimate:
    factor = 100.0 if found.metric.is_percent else 1.0
    value = factor * found.candidate.value
    limits, verdict = _limits(judged, found, value)
    low, high = factor * found.interval.low, factor * found.interval.high
    note = f"{wording.bare_score(found.metric, found.candidate)} {wording.interval(found)}"
    return Estimate(label, value, low, high, limits, verdict, note)


def _limits(judged: Judged, found: MetricComparison, value: float) -> tuple[tuple[float, ...], Verdict | None]:
    """Limits of the rules that were held against this very value, and the worst of their verdicts."""
    rules = [r for r in judged.rules(found.name) if math.isclose(r.found, value, rel_tol=1e-6, abs_tol=1e-12)]
    verdicts = {rule.verdict for rule in rules}
    order = (Verdict.FAIL, Verdict.UNDECIDED, Verdict.PASS)
    return tuple(rule.limit for rule in rules), next((v for v in order if v in verdicts), None)


def _numbers(rows: list[Estimate]) -> Table:
    """What a forest plot shows."""
    columns = ("", ">found (interval)", ">limit", "verdict")
    return Table(columns, tuple(
        (row.label, row.note, ", ".join(f"{limit:g}" for limit in row.limits) or wording.DASH,
         wording.WORDS[row.verdict] if row.verdict else "not judged")
        for row in rows
    ))  # fmt: skip


def _curves(report: Report) -> Iterator[Figure]:
    """Every curve of every task, candidates in one plot; the baseline's too where it has one."""
    runs = [(judged.label, judged.comparison.candidate) for judged in report.judged]
    baseline = report.judged[0].comparison.baseline
    keys = dict.fromkeys((task.name, curve) for _, run in runs for task in run.tasks for curve in task.curves)
    for number, (task_name, curve) in enumerate(keys):
        found = []
        for label, run in [*runs, (f"{baseline.label} (baseline)", baseline)]:
            task = run.task(task_name)
            if task is not None and task.curves.get(curve):
                found.append(Series(label, task.curves[curve]))
        if not found:
            continue
        what, _, along = curve.partition(" by ")
        unit = "KL, nats/token" if what.lower() == "kl" else what
        axis = {"position": "position in the block, tokens", "context length": "context, tokens"}.get(along, along)
        title = f"{task_name}: {'KL divergence' if what.lower() == 'kl' else what} by {along or 'position'}"
        svg = curves(f"curve{number}", title, axis or "position", unit, found)
        yield Figure(title, f"{unit}; bars are one standard error.", svg, _curve_numbers(found))


def _curve_numbers(found: list[Series]) -> Table:
    at: dict[tuple[int, int], dict[int, CurvePoint]] = {}
    for number, one in enumerate(found):
        for point in one.points:
            at.setdefault((point.start, point.stop), {})[number] = point
    rows = tuple(
        (say(next(iter(points.values()))), *(_point(points.get(number)) for number in range(len(found))))
        for _, points in sorted(at.items())
    )
    return Table(("tokens", *(f">{one.label}" for one in found)), rows)


def _point(point: CurvePoint | None) -> str:
    if point is None:
        return "not measured"
    if not math.isfinite(point.value):
        return "unknown (not a finite number)"
    error = f" ± {point.stderr:.2g}" if math.isfinite(point.stderr) else " (standard error unknown)"
    return f"{point.value:.4g}{error}"


def _flips(report: Report) -> Iterator[Figure]:
    found = [(label, metric.flips, metric) for _, metric, label in _metrics(report) if metric.flips]
    if not found:
        return
    title = "Flips: items that changed"
    rows = [Change(label, change.lost, change.gained) for label, change, _ in found]
    columns = ("", ">lost", ">gained", ">of", ">p, exact", ">p, mid")
    numbers = tuple(
        (label, f"{change.lost:,}", f"{change.gained:,}", f"{metric.num_items:,}",
         *((wording.DASH,) * 2 if metric.num_clusters < metric.num_items else
           (wording.p_value(change.p_exact), wording.p_value(change.p_mid))))
        for label, change, metric in found
    )  # fmt: skip
    note = (
        "Lost: right with the baseline, wrong with the candidate. p: McNemar's test, of independent items only; "
        "that of clustered ones stands with the margins (p adjusted)."
    )
    yield Figure(title, note, flips("flips", title, rows), Table(columns, numbers))
