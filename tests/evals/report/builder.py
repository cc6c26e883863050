"""Comparisons as the statistics make them, written down by hand: every outcome, no computation."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from quantkit_evals.comparison import (
    Comparison,
    Flips,
    GateResult,
    Interval,
    MetricComparison,
    NonInferiority,
    RuleResult,
    Score,
    Verdict,
)
from quantkit_evals.configuration import Configuration
from quantkit_evals.report.report import Judged, Report
from quantkit_evals.run import CurvePoint, Item, Metric, Run, Skipped, Task

ACC = Metric("acc", "accuracy", True, "%")
PPL = Metric("perplexity", "perplexity", False)
KL = Metric("kl", "mean", False, "nats/token", is_of_pair=True)
AGREE = Metric("top1_agreement", "share", True, "%", is_of_pair=True)
PAIR_ID = "ab" * 32
HOSTILE = "</svg>\x00\x1b[31m]]>\"'|`<script>\r\n::error::\u202e\ud800\uffff & 100 %"


def configuration(label: str) -> Configuration:
    weights, _, kv = label.partition("+")
    return Configuration(weights, "fp8" if kv else "bf16")  # type: ignore[arg-type]


def candidate(label: str, **more: Any) -> dict[str, Any]:
    return {
        "label": label, "kind": "engine", "configuration": configuration(label).to_json(), "model": "tiny-glm",
        "scored_tokens": {"cloze": {"tokens": 12, "decoded": 9}, "fidelity": {"tokens": 500, "decoded": 500}},
        "pair_id": PAIR_ID, "digests": {"prefill": "11" * 32, "decode": "22" * 32}, **more,
    }  # fmt: skip


def points(level: float) -> tuple[CurvePoint, ...]:
    return tuple(CurvePoint(64 * n, 64 * (n + 1), level * (1 + n / 4), level / 10) for n in range(4))


def run(label: str, **more: Any) -> Run:
    """A few items of two tasks; ``kl`` only where it is no baseline."""
    is_baseline = label == "fp8"
    pair = () if is_baseline else (KL, AGREE)
    curves = {} if is_baseline else {"kl by position": points(6e-4), "kl by context length": points(7e-4)}
    tasks = (
        Task("cloze", "c1" * 32, "decode", (ACC,), skipped=(Skipped("p9", "longer than the context: 300 > 256"),)),
        Task("fidelity", "f1" * 32, "decode", (PPL, *pair), curves=curves),
    )
    items = [Item("cloze", f"p{n}", f"doc{n // 2}", f"{n:064x}", {"acc": float(n % 3 > 0)}) for n in range(6)]
    kinds = {"perplexity": 2.5, **({} if is_baseline else {"kl": 6e-4, "top1_agreement": 0.98})}
    items += [Item("fidelity", f"b{n}", f"b{n}", f"{n + 99:064x}", kinds) for n in range(4)]
    settings = {"seed": 0, "limit": None, "versions": {"quantkit": "0.1.0", "lm_eval": "0.4.13"}}
    return Run(candidate(label, **more), settings, tasks, tuple(items))


def accuracy(difference: float = -0.002, half: float = 0.004, verdict: Verdict = Verdict.PASS) -> MetricComparison:
    needed = 5200 if verdict is Verdict.UNDECIDED else None
    return MetricComparison(
        "cloze", ACC, "decode", 2500, 400, Score(0.6124, 0.0097), Score(0.6124 + difference, 0.0098),
        Score(difference, half / 1.96), Interval(difference - half, difference + half), 0.31, 0.62,
        1 + difference / 0.6124, None, None, Flips(31, 26, 0.596, 0.512),
        NonInferiority(0.008, 0.95, verdict, needed), Interval(0.99, 1.003),
    )  # fmt: skip


def perplexity() -> MetricComparison:
    return MetricComparison(
        "fidelity", PPL, "decode", 64, 64, Score(12.3456, 0.12), Score(12.36, 0.12), Score(0.00117, 0.0003),
        Interval(0.0006, 0.0018), 0.0004, 0.0008, 0.99883, 1.00117, Interval(1.0006, 1.0018), None, None,
    )  # fmt: skip


def kl(value: float = 7.1e-4) -> MetricComparison:
    return MetricComparison(
        "fidelity", KL, "decode", 64, 64, None, Score(value, 2e-5), None, Interval(value - 4e-5, value + 4e-5),
        None, None, None, None, None, None, None,
    )  # fmt: skip


def agreement() -> MetricComparison:
    return MetricComparison(
        "fidelity", AGREE, "decode", 64, 64, None, Score(0.9812, 0.001), None, Interval(0.979, 0.983),
        None, None, None, None, None, None, None,
    )  # fmt: skip


def comparison(label: str = "dual+fp8", *metrics: MetricComparison, left_out: tuple[str, ...] = ()) -> Comparison:
    found = metrics or (accuracy(), perplexity(), kl(), agreement())
    return Comparison(run("fp8"), run(label), 0.95, found, left_out)


def kl_rule(verdict: Verdict = Verdict.PASS, *, is_required: bool = True) -> RuleResult:
    limit = {Verdict.PASS: 2e-3, Verdict.FAIL: 5e-4, Verdict.UNDECIDED: 7.3e-4}[verdict]
    advice = (
        "about 40 more items would decide it if the value stays what it is" if verdict is Verdict.UNDECIDED else ""
    )
    return RuleResult(
        f"fidelity.kl at most {limit:g}", "fidelity.kl", 7.1e-4, Interval(6.7e-4, 7.5e-4), limit, "nats/token",
        verdict, limit - 7.1e-4, advice, is_required, "Half above what FP8 pages and INT4 cost together.",
    )  # fmt: skip


def points_rule(verdict: Verdict = Verdict.UNDECIDED, *, is_required: bool = False) -> RuleResult:
    advice = "about 2,700 more items would decide it if the value stays what it is"
    return RuleResult(
        "cloze.acc at most 0.8 points worse", "cloze.acc", -0.6, Interval(-1.4, 0.2), -0.8, "points", verdict, 0.2,
        advice if verdict is Verdict.UNDECIDED else "", is_required,
    )  # fmt: skip


def gate(*rules: RuleResult) -> GateResult:
    return GateResult("default", "9a" * 32, rules or (kl_rule(), points_rule()))


def passed() -> Report:
    return Report.of(comparison(), gate())


def failed() -> Report:
    return Report.of(comparison(), gate(kl_rule(Verdict.FAIL), points_rule()))


def undecided(policy: Any = "fail") -> Report:
    metrics = (accuracy(-0.006, 0.008, Verdict.UNDECIDED), perplexity(), kl(), agreement())
    rules = gate(kl_rule(), points_rule(is_required=True))
    return Report.of(comparison("dual+fp8", *metrics), rules, undecided=policy)


def measured() -> Report:
    return Report.of(comparison())


def measured_undecided() -> Report:
    return Report.of(comparison("dual", accuracy(-0.006, 0.008, Verdict.UNDECIDED)))


def several() -> Report:
    first = Judged(comparison("int4"), gate(kl_rule(Verdict.FAIL), points_rule()))
    return Report((first, Judged(comparison("dual"), gate()), Judged(comparison("fp8+fp8", accuracy(), kl(3e-5)))))


def unknown() -> Report:
    """One independent item: no errors, no intervals, a value that is not finite."""
    nan = Interval(math.nan, math.nan)
    one = replace(accuracy(), num_clusters=1, difference=Score(-0.002, math.nan), interval=nan, p_value=math.nan,
                  p_adjusted=None, recovery=math.inf)  # fmt: skip
    other = replace(kl(), candidate=Score(math.nan, math.nan), interval=nan)
    rule = replace(kl_rule(Verdict.UNDECIDED), found=math.nan, interval=nan, by=math.nan)
    return Report.of(comparison("dual", one, other), gate(rule))


def hostile() -> Report:
    """Strangers' names in every place that takes text."""
    long = "x" * 10_000
    tasks = tuple(
        replace(task, name=HOSTILE + task.name, curves={HOSTILE: points(1.0)}, skipped=(Skipped(HOSTILE, long),))
        for task in run("dual").tasks
    )
    base, found = run("fp8"), run("dual", **{HOSTILE: HOSTILE, "notes": [HOSTILE, long]})
    found = replace(found, tasks=tasks, candidate={**found.candidate, "label": HOSTILE + long})
    metrics = tuple(replace(m, task=HOSTILE + m.task) for m in (accuracy(), perplexity(), kl()))
    rule = replace(
        kl_rule(Verdict.FAIL),
        rule=HOSTILE,
        name=metrics[2].name,
        advice=HOSTILE,
        reason=HOSTILE,
        unit="nats | `<b>`",
    )
    stray = replace(points_rule(Verdict.FAIL, is_required=True), name="", rule="")
    compared = Comparison(base, found, 0.95, metrics, (HOSTILE,))
    return Report.of(compared, GateResult(HOSTILE, "00" * 32, (rule, stray)))


REPORTS = {
    "passed": passed, "failed": failed, "undecided": undecided, "measured": measured, "several": several,
    "unknown": unknown, "hostile": hostile,
}  # fmt: skip
