"""Verdicts by the interval: every kind of limit, on both sides and across it."""

from __future__ import annotations

import math
from dataclasses import replace
from datetime import UTC, datetime

import numpy as np
import pytest

from quantkit.errors import UsageError
from quantkit_evals.compare import compare
from quantkit_evals.comparison import Comparison, Interval, RuleResult, Verdict
from quantkit_evals.gate import Gate, judge, margins_of
from quantkit_evals.report.content import verdict_line
from quantkit_evals.report.document import document
from quantkit_evals.report.figures import figures
from quantkit_evals.report.gaps import gaps
from quantkit_evals.report.junit import junit_xml
from quantkit_evals.report.markdown import markdown
from quantkit_evals.report.report import Report
from quantkit_evals.run import Metric
from tests.evals.runs import ACC, KL, PERPLEXITY, items, run, task

COST = Metric("cost", "mean", False, "cents")


@pytest.fixture(scope="module")
def found() -> Comparison:
    """900 items of which 60 are lost and 6 gained; perplexity 1 % up; KL 0.1; a mean that rose by 1."""
    rng = np.random.default_rng(0)
    first = np.r_[np.ones(600), np.zeros(300)]
    second = first.copy()
    second[:60], second[600:606] = 0, 1
    tokens = np.full(120, 50.0)
    nats = tokens * rng.normal(3, 0.1, 120)
    worse = nats + tokens * rng.normal(0.01, 0.005, 120)
    kl = tokens * rng.exponential(0.1, 120)
    cost = rng.normal(10, 1, 120)
    tasks = ("cloze", ACC), ("text", PERPLEXITY), ("bill", COST)
    base = run(
        "base",
        [task(name, metric) for name, metric in tasks],
        [
            *items("cloze", {"acc": first}),
            *items("text", {"perplexity": nats}, weights={"perplexity": tokens}),
            *items("bill", {"cost": cost}),
        ],
    )
    cand = run(
        "cand",
        [*(task(name, metric) for name, metric in tasks), task("fidelity", KL)],
        [
            *items("cloze", {"acc": second}),
            *items("text", {"perplexity": worse}, weights={"perplexity": tokens}),
            *items("bill", {"cost": cost + rng.normal(1, 0.1, 120)}),
            *items("fidelity", {"kl": kl}, weights={"kl": tokens}),
        ],
    )
    return compare(base, cand, margin=0.062)


def gate(*rules: dict[str, object], **fields: object) -> Gate:
    return Gate.model_validate({"schema_version": 1, "name": "mine", "rules": list(rules), **fields})


def one(found: Comparison, **rule: object) -> RuleResult:
    (result,) = judge(gate(rule), found).rules
    return result


@pytest.mark.parametrize(
    ("rule", "limits", "unit", "value"),
    [
        ({"metric": "cloze.acc", "non_inferiority": None}, (9, 6.2, 3), "points", -6.0),
        ({"metric": "cloze.acc", "min_recovery": None}, (85, 91.2, 96), "%", 91.0),
        ({"metric": "cloze.acc", "min": None}, (55, 61, 75), "%", 100 * 546 / 900),
        ({"metric": "text.perplexity", "max_ratio": None}, (1.02, 1.01, 1.001), "", 1.01),
        ({"metric": "text.perplexity", "min_recovery": None}, (98, 99, 99.9), "%", 99.0),
        ({"metric": "text.perplexity", "max": None}, (30, 20.4, 15), "", 20.4),
        ({"metric": "fidelity.kl", "max": None}, (0.2, 0.112, 0.05), "nats/token", 0.112),
        ({"metric": "bill.cost", "non_inferiority": None}, (1.1, 1.0, 0.9), "cents", 1.0),
        ({"metric": "bill.cost", "max": None}, (12, 11, 10), "cents", 11.0),
    ],
)
def test_every_limit(
    found: Comparison, rule: dict[str, object], limits: tuple[float, ...], unit: str, value: float
) -> None:
    kind = next(key for key, value in rule.items() if value is None)
    for limit, expected in zip(limits, (Verdict.PASS, Verdict.UNDECIDED, Verdict.FAIL), strict=True):
        result = one(found, **{**rule, kind: limit})
        assert result.verdict is expected, result
        assert result.unit == unit
        assert result.found == pytest.approx(value, rel=0.1)
        assert result.interval.low < result.found < result.interval.high
        assert abs(result.limit) == limit
        assert (result.by < 0) is (expected is Verdict.FAIL) or expected is Verdict.UNDECIDED
        assert abs(result.by) == pytest.approx(abs(result.found - result.limit))
        assert bool(result.advice) is (expected is Verdict.UNDECIDED)
        assert result.rule.startswith(f"{rule['metric']} ")


def test_words_and_advice(found: Comparison) -> None:
    result = one(found, metric="cloze.acc", non_inferiority=6.2)
    assert result.rule == "cloze.acc at most 6.2 points worse"
    assert result.limit == -6.2
    assert result.by == pytest.approx(0.2)
    assert "more items would decide it" in result.advice and result.reason == ""
    assert one(found, metric="cloze.acc", non_inferiority=6.2, reason="A promise.").reason == "A promise."
    assert one(found, metric="fidelity.kl", max=0.5).rule == "fidelity.kl at most 0.5 nats/token"
    assert one(found, metric="text.perplexity", max_ratio=1.5).rule == (
        "text.perplexity at most 1.5 times the baseline's"
    )


def test_a_rule_agrees_with_the_comparison_of_the_same_margin(found: Comparison) -> None:
    metric = found.metrics[0]
    result = one(found, metric="cloze.acc", non_inferiority=6.2)
    assert result.verdict is metric.non_inferiority.verdict
    assert result.interval == Interval(100 * metric.interval.low, 100 * metric.interval.high)
    more = int(result.advice.split()[1].replace(",", ""))
    assert more == pytest.approx(metric.non_inferiority.needed_items - metric.num_items, rel=0.1)


def test_the_gate_as_a_whole(found: Comparison) -> None:
    good = {"metric": "fidelity.kl", "max": 0.5}
    bad = {"metric": "text.perplexity", "max_ratio": 1.001}
    open_ = {"metric": "cloze.acc", "non_inferiority": 6.2}
    assert judge(gate(good), found).verdict is Verdict.PASS
    assert judge(gate(good, open_), found).verdict is Verdict.UNDECIDED
    assert judge(gate(good, open_, bad), found).verdict is Verdict.FAIL
    result = judge(gate(good, {**open_, "required": False}, {**bad, "required": False}), found)
    assert result.verdict is Verdict.PASS
    assert [r.is_required for r in result.rules] == [True, False, False]
    assert result.gate == "mine"
    assert len(result.sha256) == 64


def test_a_pattern_judges_every_metric_that_it_fits(found: Comparison) -> None:
    result = judge(gate({"metric": "*", "min_recovery": 90}), found)
    assert [rule.name for rule in result.rules] == ["cloze.acc", "text.perplexity"]


def test_what_was_not_compared_is_refused(found: Comparison) -> None:
    with pytest.raises(UsageError, match=r"mmlu\.acc is not measured"):
        judge(gate({"metric": "mmlu.acc", "min": 1}), found)
    with pytest.raises(UsageError, match="no required rule applies"):
        judge(gate({"metric": "*.f1", "min": 1}), found)


def test_another_confidence_is_refused(found: Comparison) -> None:
    with pytest.raises(UsageError, match=r"confidence of 0\.99, the comparison was made at 0\.95"):
        judge(gate({"metric": "fidelity.kl", "max": 1}, confidence=0.99), found)


def test_prefill_figures_of_a_dual_run_are_refused_from_its_record(found: Comparison) -> None:
    dual = {"label": "d", "kind": "engine", "configuration": {"weights": "dual", "kv_dtype": "bf16", "path": "x"}}
    as_prefill = replace(
        found,
        candidate=replace(found.candidate, candidate=dual),
        metrics=tuple(replace(m, path="prefill") for m in found.metrics),
    )
    with pytest.raises(UsageError, match="never enters decode"):
        judge(gate({"metric": "cloze.acc", "non_inferiority": 9}), as_prefill)
    as_decode = replace(as_prefill, metrics=found.metrics)
    assert judge(gate({"metric": "cloze.acc", "non_inferiority": 9}), as_decode).verdict is Verdict.PASS


def test_one_cluster_never_decides() -> None:
    made = [run(n, [task("cloze")], items("cloze", {"acc": [1, 1, 0]}, per_cluster=3)) for n in "ab"]
    for rule in ({"non_inferiority": 50}, {"min_recovery": 1}, {"min": 1}):
        (result,) = judge(gate({"metric": "cloze.acc", **rule}), compare(*made)).rules
        assert result.verdict is Verdict.UNDECIDED
        assert "one independent item" in result.advice
        assert math.isinf(result.interval.low)


def test_a_recovery_that_is_only_reported_stops_no_verdict() -> None:
    made = [run(n, [task("cloze")], items("cloze", {"acc": [0] * 9})) for n in "ab"]
    rules = ({"metric": "cloze.acc", "min": 50}, {"metric": "*.acc", "min_recovery": 99, "required": False})
    (result,) = judge(gate(*rules), compare(*made)).rules
    assert result.rule.startswith("cloze.acc at least 50")


def test_a_baseline_at_zero_cannot_be_recovered() -> None:
    made = [run(n, [task("cloze")], items("cloze", {"acc": [0] * 60})) for n in "ab"]
    with pytest.raises(UsageError, match="the baseline scores 0"):
        judge(gate({"metric": "cloze.acc", "min_recovery": 99}), compare(*made))


def test_required_patterns_that_fit_nothing_are_told(found: Comparison) -> None:
    rules = ({"metric": "fidelity.kl", "max": 1}, {"metric": "*.exact_match", "non_inferiority": 1})
    result = judge(gate(*rules), found)
    assert result.verdict is Verdict.PASS and result.unused == ("*.exact_match (non_inferiority 1)",)
    report = Report.of(found, result)
    assert any("that nothing measured fits: *.exact_match (non_inferiority 1)" in line for line in gaps(report))
    assert document(report)["candidates"][0]["gate"]["unused"] == ["*.exact_match (non_inferiority 1)"]


def test_what_is_only_reported_is_told(found: Comparison) -> None:
    rules = ({"metric": "fidelity.kl", "max": 1}, {"metric": "*", "min_recovery": 1, "required": False})
    report = Report.of(found, judge(gate(*rules), found))
    assert "mine, 95 % confidence" in verdict_line(report) and "; 3 metrics only reported" in verdict_line(report)
    assert any("never decided: cloze.acc, text.perplexity" in line for line in gaps(report))


def test_a_rule_and_the_margin_of_the_comparison_say_the_same() -> None:
    """The tightest required rule's margin, in every form of the report, whatever --margin is."""
    first = np.r_[np.ones(12000), np.zeros(8000)]
    second = first.copy()
    second[:100], second[12000:12040] = 0, 1
    runs = [run(n, [task("cloze")], items("cloze", {"acc": v})) for n, v in (("b", first), ("c", second))]
    rules = gate(
        {"metric": "cloze.acc", "non_inferiority": 0.1}, {"metric": "*.acc", "non_inferiority": 3},
        {"metric": "*", "non_inferiority": 0.01, "required": False},
    )  # fmt: skip
    own = margins_of(rules, runs[1].tasks)
    assert own == {"cloze.acc": 0.001}
    compared = compare(*runs, margins=own)
    report = Report.of(compared, judge(rules, compared))
    (metric,) = compared.metrics
    assert metric.non_inferiority.verdict is Verdict.FAIL is report.judged[0].gate.rules[0].verdict
    text = markdown(report)
    assert "margin 0.10 points: beyond" in text and "0.80" not in text and "no rule" not in text
    (row,) = next(figure for figure in figures(report) if figure.title.startswith("Differences")).table.rows
    assert row[3] == "does not hold"
    assert "cloze.acc.non-inferiority" in (xml := junit_xml(report, made=datetime.now(UTC)).decode())
    assert 'value="beyond"' in xml


def test_an_error_that_is_not_known_is_no_value_at_the_limit() -> None:
    first = np.zeros(300)
    first[:3] = 1
    second = first.copy()
    second[0] = 0
    runs = [run(n, [task("cloze")], items("cloze", {"acc": v})) for n, v in (("b", first), ("c", second))]
    (result,) = judge(gate({"metric": "cloze.acc", "min_recovery": 99}), compare(*runs)).rules
    assert "at the limit" not in result.advice and "how sure it is can't be told" in result.advice


def test_few_flips_of_a_rule_take_as_many_items_as_the_comparison_says() -> None:
    runs = [run(n, [task("cloze")], items("cloze", {"acc": [1, 0] * 50})) for n in "ab"]
    rules = gate({"metric": "cloze.acc", "non_inferiority": 0.8})
    compared = compare(*runs, margins=margins_of(rules, runs[1].tasks))
    (result,) = judge(rules, compared).rules
    assert int(result.advice.split()[1].replace(",", "")) < 700
