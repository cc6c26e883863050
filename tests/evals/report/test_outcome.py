"""The outcome of a report, and how numbers are worded."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from quantkit_evals.comparison import Interval, NonInferiority, Score, Verdict
from quantkit_evals.report import wording
from quantkit_evals.report.content import content, title, verdict_line
from quantkit_evals.report.figures import figures
from quantkit_evals.report.gaps import gaps
from quantkit_evals.report.report import Judged, Outcome, Report
from quantkit_evals.run import Metric, Skipped, Task
from tests.evals.report import builder
from tests.evals.report.builder import gate, kl_rule, points_rule


@pytest.mark.parametrize(
    "name, outcome, success",
    [("passed", "pass", True), ("failed", "fail", False), ("undecided", "undecided", False),
     ("measured", "measured", True), ("several", "fail", False), ("unknown", "undecided", False)],
)  # fmt: skip
def test_outcome(name: str, outcome: str, success: bool) -> None:
    report = builder.REPORTS[name]()
    assert (report.outcome, report.is_success) == (Outcome(outcome), success)


def test_undecided_may_pass_and_stays_undecided() -> None:
    report = builder.undecided("pass")
    assert report.outcome is Outcome.UNDECIDED and report.is_success
    assert verdict_line(report).startswith("PASSED, THOUGH UNDECIDED (--undecided pass): ")
    failing = Report.of(builder.comparison(), gate(kl_rule(Verdict.FAIL)), undecided="pass")
    assert not failing.is_success


def test_rules_that_are_only_reported_stop_nothing() -> None:
    report = Report.of(builder.comparison(), gate(kl_rule(), points_rule(Verdict.FAIL, is_required=False)))
    assert report.outcome is Outcome.PASS and report.is_success
    assert not any(report.stops(rule) for rule in report.judged[0].gate.rules)  # type: ignore[union-attr]


def test_refuses_what_is_no_report() -> None:
    with pytest.raises(ValueError, match="a candidate"):
        Report(())
    with pytest.raises(ValueError, match="maybe"):
        builder.undecided("maybe")
    first = builder.comparison()
    other = replace(first, baseline=builder.run("int4"))
    with pytest.raises(ValueError, match="another baseline"):
        Report((Judged(first), Judged(other)))


@pytest.mark.parametrize(
    "value, form, expected",
    [(0.00071, ".3g", "0.00071"), (2e-5, ".2g", "0.00002"), (-1.2e-5, "+.3g", "-0.000012"), (1e-12, "+.3g", "0"),
     (3e-5, "+.3g", "+0.00003"), (-0.0001, "+.2f", "0.00"), (0.004, "+.2f", "0.00"), (-0.006, "+.2f", "-0.01"),
     (math.nan, ".2f", "unknown"), (math.inf, ".2f", "unknown")],
)  # fmt: skip
def test_figures(value: float, form: str, expected: str) -> None:
    assert wording.figure(value, form) == expected


def test_units() -> None:
    accuracy, perplexity, kl = builder.accuracy(-0.0123), builder.perplexity(), builder.kl()
    assert wording.score(accuracy.metric, accuracy.baseline, 400) == "61.24 ± 0.97 %"
    assert wording.difference(accuracy) == "-1.23 ± 0.20 points"
    assert wording.interval(accuracy) == "(-1.63 to -0.83)"
    assert wording.difference(perplexity) == "+0.00117 ± 0.0003 nats/token"
    words = replace(perplexity, metric=Metric("word_perplexity", "perplexity", False, "nats/word"))
    assert wording.difference(words) == "+0.00117 ± 0.0003 nats/word"  # what a word costs, not a token
    assert wording.ratio(perplexity) == "1.0012 (1.0006 to 1.0018)"
    assert wording.recovery(perplexity) == "99.88 %"  # that has no interval
    assert wording.recovery(accuracy) == "97.99 % (99.00 to 100.30)"
    assert wording.score(kl.metric, kl.candidate, 64) == "0.00071 ± 0.00002 nats/token"
    assert wording.difference(kl) == wording.score(kl.metric, None, 64) == wording.DASH
    seconds = Metric("time", "mean", False, "s")
    assert wording.score(seconds, Score(1.25, 0.1), 9) == "1.25 ± 0.1 s"
    assert [wording.p_value(p) for p in (0.0004, 0.0312, None, math.nan)] == ["< 0.001", "0.031", "–", "unknown"]


def test_undecided_says_how_many_items() -> None:
    found = builder.accuracy(-0.006, 0.008, Verdict.UNDECIDED)
    assert wording.non_inferiority(found) == "undecided, about 5,200 items would settle it (now 2,500)"
    odd = replace(found, non_inferiority=NonInferiority(0.008, 0.95, Verdict.UNDECIDED, 10_136))
    assert "about 11,000 items would settle it" in wording.non_inferiority(odd)  # no false precision
    never = replace(found, non_inferiority=NonInferiority(0.008, 0.95, Verdict.UNDECIDED, None))
    assert "no number of items" in wording.non_inferiority(never)
    unknown = replace(never, interval=Interval(-math.inf, math.inf))
    assert wording.non_inferiority(unknown) == "undecided, since nothing is known of its error"
    (section,) = [s for s in content(builder.measured_undecided()) if s.key == "undecided"]
    assert section.lines == (
        "cloze.acc at most 0.80 points worse (no rule): about 5,200 items would settle it (now 2,500)",
    )


def test_rules_say_by_how_much() -> None:
    line = wording.rule_line(kl_rule(Verdict.FAIL))
    assert line == (
        "fidelity.kl at most 0.0005: found 0.00071 nats/token (0.00067 to 0.00075) at 95 % confidence, "
        "limit 0.0005 nats/token, 0.00021 nats/token beyond the limit"
    )
    line = wording.rule_line(points_rule())
    assert (
        "found -0.60 points (-1.40 to +0.20) at 95 % confidence, limit -0.80 points, 0.20 points inside the limit"
        in line
    )
    assert line.endswith(
        "reaches across the limit; about 2,700 more items would decide it if the value stays what it is"
    )
    assert "its interval is not known" in wording.rule_line(
        replace(points_rule(), interval=Interval(math.nan, 0.2))
    )  # fmt: skip


def test_the_verdict_counts_what_is_only_reported() -> None:
    assert verdict_line(builder.passed()) == (
        "PASSED: dual+fp8: gate default, 95 % confidence: required rules: 1 passed (reported only: 1 undecided); "
        "3 metrics only reported"
    )


def test_tokens_that_decode_did_not_score_are_told() -> None:
    report = builder.passed()
    assert [line for line in gaps(report) if "scored tokens" in line] == [
        "dual+fp8: cloze: 9 of 12 scored tokens come from decode, the others from prefill, which dilutes what "
        "decode costs"
    ]
    (tasks,) = [section.table for section in content(report) if section.key == "tasks"]
    assert tasks is not None and [row[5] for row in tasks.rows] == ["12 (9)", "500 (500)"]
    stray = replace(report.judged[0].comparison.candidate, candidate={"label": "x", "scored_tokens": {"cloze": 1}})
    assert not any("scored tokens" in line for line in gaps(Report.of(
        replace(report.judged[0].comparison, candidate=stray)
    )))  # fmt: skip


def test_gaps_say_what_was_asked_otherwise() -> None:
    found = builder.comparison("dual")
    other = replace(found, candidate=replace(found.candidate, settings={**found.candidate.settings, "seed": 5}))
    assert "dual: another seed than the baseline's: 5, 0" in list(gaps(Report.of(other)))
    assert not any("than the baseline's" in line for line in gaps(Report.of(found)))


def test_a_title_says_of_which_model() -> None:
    found = builder.comparison("dual")
    assert title(Report.of(found)) == "quantkit eval of tiny-glm: dual against fp8"
    unnamed = replace(found, candidate=replace(found.candidate, candidate={"label": "x", "model": ["tiny-glm"]}))
    assert title(Report.of(unnamed)) == "quantkit eval: x against fp8"
    several = Report.of(unnamed, None, Judged(found, None))
    assert title(several) == "quantkit eval: x, dual against fp8"


def test_settings_name_the_baseline_once() -> None:
    found = builder.comparison("dual")
    settings = {**found.candidate.settings, "baseline": dict(found.baseline.candidate)}
    report = Report.of(replace(found, candidate=replace(found.candidate, settings=settings)))
    (section,) = [section for section in content(report) if section.key == "settings"]
    assert section.table is not None and {row[0] for row in section.table.rows} >= {"seed", "limit"}
    assert not any(row[0].startswith("baseline") for row in section.table.rows)


def test_gaps_say_what_a_server_does_not_prove() -> None:
    run = builder.comparison("dual").candidate
    server = replace(run, candidate={"label": "m at http://far/v1", "kind": "endpoint"})
    compared = replace(builder.comparison("dual"), candidate=server)
    assert any("which weights a server has is not known" in line for line in gaps(Report.of(compared)))
    assert not any("server" in line for line in gaps(Report.of(builder.comparison("dual"))))


def test_gaps_name_items_and_reasons() -> None:
    tasks = (
        Task("a", "v", "decode", (builder.ACC,), tuple(Skipped(f"i{n}", "too long") for n in range(7))),
        Task("b", "v", "prefill", (builder.ACC,), tuple(Skipped(f"i{n}", f"reason {n:02}") for n in range(12))),
    )
    compared = builder.comparison("dual", left_out=("task c: only in the baseline",))
    compared = replace(compared, candidate=replace(compared.candidate, tasks=tasks))
    lines = list(gaps(Report.of(compared, gate())))
    assert "dual: left out: task c: only in the baseline" in lines
    assert "dual: a: 7 items not scored (i0, i1, i2, i3, i4 and 2 more): too long" in lines
    assert "dual: b: 2 items not scored for 2 further reasons" in lines
    assert any(
        line.startswith("dual: b was scored by prefill alone: it says nothing about decode") for line in lines
    )
    assert not any("dual: a was scored by prefill" in line for line in lines)
    assert any("no rule of gate default judges fidelity.perplexity" in line for line in lines)


@pytest.mark.parametrize(
    ("found", "interval", "limit", "unit", "said"),
    [
        (1.01003, Interval(1.010021, 1.01004), 1.01, "",
         "found 1.01003 (1.01002 to 1.01004) at 95 % confidence, limit 1.01000, 0.00003 beyond"),
        (99.99, Interval(99.98, 99.992), 99.995, "%",
         "found 99.990 % (99.980 to 99.992) at 95 % confidence, limit 99.995 %, 0.005 % beyond"),
        (1.2, Interval(1.1, 1.3), 1.23456, "", "limit 1.23456, 0.03456 inside"),
    ],
)  # fmt: skip
def test_rounding_hides_no_difference(
    found: float, interval: Interval, limit: float, unit: str, said: str
) -> None:
    is_upper = unit == ""
    by = limit - found if is_upper else found - limit
    rule = replace(
        kl_rule(Verdict.FAIL), found=found, interval=interval, limit=limit, unit=unit, verdict=Verdict.FAIL, by=by
    )
    assert said in wording.rule_line(rule)


def test_flips_of_clustered_items_show_no_test_of_independent_ones() -> None:
    (clustered,) = [f for f in figures(builder.measured()) if f.title.startswith("Flips")]
    assert clustered.table.rows[0][-2:] == (wording.DASH, wording.DASH)
    alone = replace(builder.accuracy(), num_clusters=2500)
    (single,) = [f for f in figures(Report.of(builder.comparison("dual", alone))) if f.title.startswith("Flips")]
    assert single.table.rows[0][-2:] == ("0.596", "0.512")


def test_the_words_of_a_margin_are_no_gates() -> None:
    (losses,) = [s for s in content(builder.measured()) if s.key == "losses"]
    assert losses.table is not None and losses.table.rows[0][-1] == "margin 0.80 points: within"
