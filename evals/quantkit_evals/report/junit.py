"""JUnit XML: a suite per candidate and task, a case per rule of the gate and per metric that no rule names.

A case fails where the rule lets the command fail. An undecided rule that does not (``--undecided pass``), and one
that is only reported, is a skipped case with the reason: a pipeline's view has no fourth colour. Figures, skipped
items and what was left out stand in the suite's properties and output.

There is no one schema of JUnit XML. This is the part that both of the common ones accept: Apache Ant's (Windy
Road, JUnit.xsd), which wants properties, output, package, id, time, host and a timestamp in every suite and knows
no attributes of testsuites, and the Jenkins xUnit plugin's (junit-10.xsd), which knows no properties of cases.
Durations are not known here, so they are 0, and the host is no business of a report.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal
from xml.etree import ElementTree as ET

from ..comparison import MetricComparison, RuleResult, Verdict
from . import identity, wording
from .report import Judged, Report
from .text import one_line


@dataclass(frozen=True, slots=True)
class _Case:
    name: str
    result: Literal["passed", "failure", "skipped"]
    kind: str = ""
    message: str = ""


def junit_xml(report: Report, *, made: datetime) -> bytes:
    """The document, UTF-8.

    Args:
        made: when it was measured; aware, or taken as UTC.
    """
    root = ET.Element("testsuites")
    stamp = (made if made.tzinfo is None else made.astimezone(UTC)).strftime("%Y-%m-%dT%H:%M:%S")
    for judged in report.judged:
        for task in _tasks(judged):
            _suite(root, judged, task, report, stamp)
    ET.indent(root)
    found: bytes = ET.tostring(root, encoding="utf-8", xml_declaration=True)
    return found + b"\n"


def _tasks(judged: Judged) -> list[str]:
    """Of the candidate, then any that only a rule or a metric names: no rule goes unreported."""
    names = [task.name for task in judged.comparison.candidate.tasks]
    names += [metric.task for metric in judged.comparison.metrics]
    names += [_task_of(judged, rule) for rule in (judged.gate.rules if judged.gate else ())]
    return list(dict.fromkeys(names))


def _task_of(judged: Judged, rule: RuleResult) -> str:
    known = next((m.task for m in judged.comparison.metrics if m.name == rule.name), None)
    return known or rule.name.rpartition(".")[0] or rule.name


def _suite(root: ET.Element, judged: Judged, task: str, report: Report, stamp: str) -> None:
    cases = list(_cases(judged, task, report))
    suite = ET.SubElement(
        root, "testsuite", name=_name(task), package=_name(judged.label), id=str(len(root)), timestamp=stamp,
        hostname="localhost", tests=str(len(cases)), failures=str(sum(c.result == "failure" for c in cases)),
        errors="0", skipped=str(sum(c.result == "skipped" for c in cases)), time="0",
    )  # fmt: skip
    properties = ET.SubElement(suite, "properties")
    for name, value in _properties(judged, task):
        ET.SubElement(properties, "property", name=_name(name), value=one_line(value))
    for case in cases:
        element = ET.SubElement(
            suite, "testcase", name=_name(case.name), classname=_name(f"{judged.label}.{task}"), time="0"
        )
        if case.result == "failure":
            ET.SubElement(element, "failure", type=case.kind, message=one_line(case.message)).text = one_line(
                case.message
            )
        elif case.result == "skipped":
            ET.SubElement(element, "skipped", message=one_line(case.message))
    ET.SubElement(suite, "system-out").text = "\n".join(one_line(line) for line in _output(judged, task))
    ET.SubElement(suite, "system-err")


def _cases(judged: Judged, task: str, report: Report) -> Iterator[_Case]:
    for rule in judged.gate.rules if judged.gate else ():
        if _task_of(judged, rule) == task:
            yield _rule_case(rule, report)
    for metric in judged.unjudged():
        if metric.task == task:
            yield _Case(f"{metric.name} (no rule)", "passed")


def _rule_case(rule: RuleResult, report: Report) -> _Case:
    line = wording.rule_line(rule)
    if report.stops(rule):
        return _Case(rule.rule, "failure", rule.verdict.value, line)
    if rule.verdict is Verdict.PASS:
        return _Case(rule.rule, "passed")
    why = "undecided (--undecided pass)" if rule.is_required else f"{rule.verdict.value}, reported only"
    return _Case(rule.rule, "skipped", rule.verdict.value, f"{why}: {line}")


def _properties(judged: Judged, task: str) -> Iterator[tuple[str, str]]:
    comparison = judged.comparison
    yield "outcome", judged.outcome.value
    if judged.gate is not None:
        yield "gate", judged.gate.gate
        yield "gate.sha256", judged.gate.sha256
    if (known := comparison.candidate.task(task)) is not None:
        yield "task.version", known.version
    for metric in comparison.metrics:
        if metric.task == task:
            yield from _figures(judged, metric)
    for side, run in (("baseline", comparison.baseline), ("candidate", comparison.candidate)):
        yield from ((f"{side}.{name}", value) for name, value in identity.facts(run).items())
        yield from ((f"{side}.settings.{name}", value) for name, value in identity.settings(run).items())


def _figures(judged: Judged, found: MetricComparison) -> Iterator[tuple[str, str]]:
    metric, clusters = found.metric, found.num_clusters
    yield f"{found.name}.path", identity.path(judged.comparison.candidate, found.task, found.path)
    yield f"{found.name}.items", f"{found.num_items}"
    yield f"{found.name}.candidate", wording.score(metric, found.candidate, clusters)
    figures = {
        "baseline": wording.score(metric, found.baseline, clusters), "difference": wording.difference(found),
        "interval": wording.interval(found), "recovery": wording.recovery(found), "ratio": wording.ratio(found),
        "lost / gained": wording.flips(found.flips), "p adjusted": wording.p_value(found.p_adjusted),
        "non-inferiority": wording.non_inferiority(found),
    }  # fmt: skip
    yield from ((f"{found.name}.{name}", text) for name, text in figures.items() if text != wording.DASH)


def _output(judged: Judged, task: str) -> Iterator[str]:
    """Every skipped item, and what the comparison left out."""
    comparison = judged.comparison
    for side, run in (("baseline", comparison.baseline), ("candidate", comparison.candidate)):
        known = run.task(task)
        yield from (f"{side}: {one.item} skipped: {one.reason}" for one in (known.skipped if known else ()))
    yield from (f"left out: {reason}" for reason in comparison.left_out)


def _name(text: str) -> str:
    """A name as both schemas want it: a token that is not empty."""
    return " ".join(one_line(text).split(" ")).strip() or "(no name)"
