"""JUnit XML against a schema that both common ones contain, and its counts against the rules."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from lxml import etree

from quantkit_evals.comparison import Verdict
from quantkit_evals.report.junit import junit_xml
from quantkit_evals.report.report import Report
from tests.evals.report import builder
from tests.evals.report.builder import gate, kl_rule, points_rule

MADE = datetime(2026, 3, 4, 5, 6, 7, tzinfo=UTC)
SCHEMA = etree.XMLSchema(etree.parse(str(Path(__file__).with_name("junit.xsd"))))


def parsed(report: Report, made: datetime = MADE) -> Any:
    root = etree.fromstring(junit_xml(report, made=made))
    SCHEMA.assertValid(root)
    for suite in root:
        for kind, path in {
            "tests": "testcase",
            "failures": "testcase/failure",
            "skipped": "testcase/skipped",
        }.items():
            assert int(suite.get(kind)) == len(suite.findall(path))
        assert suite.get("errors") == "0"
    return root


def results(report: Report) -> dict[str, str]:
    """Case -> the outcome, with its type."""
    cases = parsed(report).iter("testcase")
    return {case.get("name"): " ".join(f"{e.tag}:{e.get('type', '')}" for e in case) for case in cases}


@pytest.mark.parametrize("make", builder.REPORTS.values(), ids=list(builder.REPORTS))
def test_valid_and_the_same_twice(make: Callable[[], Report]) -> None:
    parsed(make())
    assert junit_xml(make(), made=MADE) == junit_xml(make(), made=MADE)


def test_the_schema_refuses() -> None:
    good = junit_xml(builder.failed(), made=MADE)
    for old, new in [(b' id="0"', b""), (b"<system-err />", b""), (b"failure type=", b"failure kind="),
                     (b"2026-03-04T", b"yesterday "), (b"<testsuites>", b'<testsuites name="x">')]:  # fmt: skip
        assert old in good
        assert not SCHEMA.validate(etree.fromstring(good.replace(old, new))), old


def test_a_case_per_rule_and_per_metric_without_one() -> None:
    report = Report.of(builder.comparison(), gate(kl_rule(Verdict.FAIL), points_rule()))
    assert results(report) == {
        "cloze.acc at most 0.8 points worse": "skipped:", "fidelity.kl at most 0.0005": "failure:fail",
        "fidelity.perplexity (no rule)": "", "fidelity.top1_agreement (no rule)": "",
    }  # fmt: skip
    root = parsed(report)
    failure = root.find(".//failure")
    assert "0.00021 nats/token beyond the limit" in failure.get("message") and failure.text == failure.get(
        "message"
    )
    assert root.find(".//skipped").get("message").startswith("undecided, reported only: cloze.acc")


def test_undecided_fails_or_is_skipped() -> None:
    rule = "cloze.acc at most 0.8 points worse"
    assert results(builder.undecided())[rule] == "failure:undecided"
    assert results(builder.undecided("pass"))[rule] == "skipped:"


def test_a_suite_per_task_with_its_figures_and_skipped_items() -> None:
    suites = {suite.get("name"): suite for suite in parsed(builder.passed())}
    assert list(suites) == ["cloze", "fidelity"]
    properties = {p.get("name"): p.get("value") for p in suites["cloze"].find("properties")}
    assert properties["cloze.acc.difference"] == "-0.20 ± 0.20 points"
    assert (
        properties["candidate.pair_id"] == builder.PAIR_ID
        and properties["candidate.configuration.weights"] == "dual"
    )
    assert properties["candidate.settings.versions.lm_eval"] == "0.4.13"
    assert "candidate: p9 skipped: longer than the context: 300 > 256" in suites["cloze"].findtext("system-out")
    assert not suites["fidelity"].findtext("system-out")


def test_candidates_have_suites_of_their_own() -> None:
    suites = [(suite.get("package"), suite.get("name"), suite.get("id")) for suite in parsed(builder.several())]
    assert suites[:3] == [("int4", "cloze", "0"), ("int4", "fidelity", "1"), ("dual", "cloze", "2")]


def test_hostile_names_stay_whole() -> None:
    text = junit_xml(builder.hostile(), made=MADE).decode()
    assert "\x1b" not in text and "\\x1b[31m]]&gt;" in text and "x" * 10_000 in text
    root = parsed(builder.hostile())
    assert {e.tag for e in root.iter()} <= {
        "testsuites", "testsuite", "properties", "property", "testcase", "failure", "skipped", "system-out",
        "system-err",
    }  # fmt: skip


def test_time_is_utc() -> None:
    there = MADE.astimezone(timezone(timedelta(hours=5)))
    assert parsed(builder.passed(), there)[0].get("timestamp") == "2026-03-04T05:06:07"
