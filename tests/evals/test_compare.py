"""What is computed from two runs, against other people's formulas; and the runs that may not be compared."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
import statsmodels.api as sm

from quantkit.errors import UsageError
from quantkit_evals.compare import compare
from quantkit_evals.comparison import Comparison, Interval, MetricComparison, Verdict
from quantkit_evals.gate import Gate, judge
from quantkit_evals.report.gaps import gaps
from quantkit_evals.report.report import Report
from quantkit_evals.run import Metric, Run, Skipped
from tests.evals.runs import ACC, KL, PERPLEXITY, items, run, task

ROOT = Path(__file__).resolve().parents[2]


def accuracies(first: object, second: object, *, per_cluster: int = 1) -> tuple[Run, Run]:
    made = [
        run(label, [task("cloze")], items("cloze", {"acc": np.asarray(values, float)}, per_cluster=per_cluster))
        for label, values in (("base", first), ("cand", second))
    ]
    return made[0], made[1]


def only(found: Comparison) -> MetricComparison:
    (metric,) = found.metrics
    return metric


def with_flips(right: int, wrong: int, lost: int, gained: int) -> tuple[list[int], list[int]]:
    first = [1] * right + [0] * wrong + [1] * lost + [0] * gained
    return first, [1] * right + [0] * wrong + [0] * lost + [1] * gained


def test_accuracy_of_independent_items() -> None:
    first, second = with_flips(600, 300, 60, 40)
    found = only(compare(*accuracies(first, second)))
    assert (found.num_items, found.num_clusters, found.path) == (1000, 1000, "decode")
    assert (found.baseline.value, found.candidate.value) == (0.66, 0.64)
    assert found.baseline.stderr == pytest.approx(scipy.stats.sem(first))
    difference = np.subtract(second, first)
    assert found.difference.value == pytest.approx(-0.02)
    assert found.difference.stderr == pytest.approx(scipy.stats.sem(difference))
    theirs = scipy.stats.bootstrap((difference,), np.mean, rng=np.random.default_rng(0)).confidence_interval
    assert found.interval.low == pytest.approx(theirs.low, abs=0.0012)
    assert found.interval.high == pytest.approx(theirs.high, abs=0.0012)
    assert (found.flips.lost, found.flips.gained) == (60, 40)
    assert found.p_value == found.flips.p_mid == found.p_adjusted
    assert found.recovery == pytest.approx(0.64 / 0.66)
    assert found.recovery_interval.low < found.recovery < found.recovery_interval.high
    assert found.ratio is None is found.ratio_interval
    assert found.non_inferiority.verdict is Verdict.UNDECIDED
    assert found.non_inferiority.needed_items > 1000


def test_clustered_accuracy_uses_the_clustered_test() -> None:
    """Passages flip together: McNemar would see far too much, statsmodels' clustered regression says how much."""
    rng = np.random.default_rng(3)
    first = rng.integers(0, 2, 600)
    flipped = np.repeat(rng.random(60) < 0.3, 10)
    second = np.where(flipped, np.repeat(rng.random(60) < 0.35, 10), first).astype(int)
    found = only(compare(*accuracies(first, second, per_cluster=10)))
    fit = sm.OLS(second - first, np.ones(600)).fit(
        cov_type="cluster", cov_kwds={"groups": np.repeat(np.arange(60), 10)}, use_t=True
    )
    assert found.num_clusters == 60
    assert found.difference.stderr == pytest.approx(fit.bse[0])
    assert found.p_value == pytest.approx(fit.pvalues[0])
    assert found.p_value > 2 * found.flips.p_mid
    wide = found.interval.high - found.interval.low
    assert wide == pytest.approx(2 * 1.96 * fit.bse[0], rel=0.1)


def test_perplexity_by_hand() -> None:
    """Nats and tokens: scores are exponentials, differences of logs, the ratio their exponential."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(50, 200, 120).astype(float)
    base = tokens * rng.normal(3.7, 0.2, 120)
    cand = base + tokens * rng.normal(0.002, 0.01, 120)
    made = [
        run(name, [task("text", PERPLEXITY)], items("text", {"perplexity": nats}, weights={"perplexity": tokens}))
        for name, nats in (("base", base), ("cand", cand))
    ]
    found = only(compare(made[0], made[1]))
    expected = (cand - base).sum() / tokens.sum()
    assert found.baseline.value == pytest.approx(math.exp(base.sum() / tokens.sum()))
    assert found.difference.value == pytest.approx(expected)
    assert found.ratio == pytest.approx(math.exp(expected)) == pytest.approx(1 / found.recovery)
    assert found.ratio_interval == Interval(math.exp(found.interval.low), math.exp(found.interval.high))
    assert found.recovery_interval.low == pytest.approx(1 / found.ratio_interval.high)
    fit = sm.WLS((cand - base) / tokens, np.ones(120), weights=tokens).fit(cov_type="HC0")
    assert found.difference.stderr == pytest.approx(fit.bse[0] * math.sqrt(120 / 119))
    assert found.baseline.stderr == pytest.approx(
        found.baseline.value
        * sm.WLS(base / tokens, np.ones(120), weights=tokens).fit(cov_type="HC0").bse[0]
        * math.sqrt(120 / 119)
    )
    assert found.flips is None is found.non_inferiority


def test_a_model_that_broke_altogether_is_told() -> None:
    """A perplexity beyond any number: infinite, never a crash, and any limit fails."""
    base, cand = (
        run(name, [task("text", PERPLEXITY)], items("text", {"perplexity": [nats + i for i in range(60)]}))
        for name, nats in (("base", 3.0), ("cand", 5000.0))
    )
    found = only(compare(base, cand))
    assert found.candidate.value == found.ratio == found.ratio_interval.low == math.inf
    assert found.recovery == found.recovery_interval.high == 0
    rule = {"metric": "text.perplexity", "max_ratio": 1.01}
    gate = Gate.model_validate({"schema_version": 1, "name": "g", "rules": [rule]})
    assert judge(gate, compare(base, cand)).verdict is Verdict.FAIL


def test_a_metric_of_the_pair_needs_no_figures_of_the_baseline() -> None:
    kl = np.random.default_rng(0).exponential(0.1, 200)
    tokens = np.full(200, 64.0)
    base = run("base", [task("cloze")], items("cloze", {"acc": [1, 0] * 50}))
    cand = run(
        "cand",
        [task("cloze"), task("fidelity", KL)],
        [
            *items("cloze", {"acc": [1, 0] * 50}),
            *items("fidelity", {"kl": kl}, weights={"kl": tokens}),
        ],
    )
    found = compare(base, cand)
    assert [m.name for m in found.metrics] == ["cloze.acc", "fidelity.kl"]
    pair = found.metrics[1]
    assert pair.baseline is pair.difference is pair.p_value is pair.p_adjusted is pair.recovery is None
    assert pair.candidate.value == pytest.approx(kl.mean() / 64)
    assert pair.interval.low < pair.candidate.value < pair.interval.high
    assert found.left_out == ()


def test_holm_counts_every_metric_with_a_p_value() -> None:
    first, second = with_flips(50, 50, 8, 1)
    pairs = {"a": (first, second), "b": (first, first)}
    base, cand = (
        run(label, [task(n) for n in pairs], [i for n in pairs for i in items(n, {"acc": pairs[n][side]})])
        for side, label in enumerate(("base", "cand"))
    )
    found = compare(base, cand)
    assert found.metrics[0].p_adjusted == pytest.approx(2 * found.metrics[0].p_value)
    assert found.metrics[1].p_value == found.metrics[1].p_adjusted == 1


def test_few_items_prove_little() -> None:
    """No flip in five items is no proof; none in five thousand is."""
    for count, expected in ((5, Verdict.UNDECIDED), (300, Verdict.UNDECIDED), (5000, Verdict.PASS)):
        found = only(compare(*accuracies([1, 0] * (count // 2), [1, 0] * (count // 2))))
        assert found.non_inferiority.verdict is expected, count
        assert found.interval.low < 0 < found.interval.high
        assert found.recovery_interval.low < 1 < found.recovery_interval.high


def test_few_clusters_widen_the_interval_by_t() -> None:
    first = [1.0] * 400
    second = np.ones(400)
    second[::10] = 0  # ten of each hundred items lost
    second[:30] = 0  # and more in the first cluster
    found = only(compare(*accuracies(first, second, per_cluster=100)))
    half = scipy.stats.t.ppf(0.975, 3) * found.difference.stderr
    assert found.interval.low <= found.difference.value - half + 1e-12
    assert found.interval.high >= found.difference.value + half - 1e-12


def test_of_one_cluster_nothing_is_known() -> None:
    found = only(compare(*accuracies([1, 1, 0], [1, 0, 0], per_cluster=3)))
    assert math.isnan(found.difference.stderr)
    assert found.interval == Interval(-math.inf, math.inf)
    assert found.non_inferiority.verdict is Verdict.UNDECIDED
    assert found.non_inferiority.needed_items is None
    assert found.p_value == 1


def test_decided_in_both_directions() -> None:
    worse = only(compare(*accuracies(*with_flips(500, 300, 190, 10))))
    assert worse.non_inferiority.verdict is Verdict.FAIL
    assert worse.non_inferiority.needed_items is None
    better = only(compare(*accuracies(*with_flips(500, 300, 10, 190))))
    assert better.non_inferiority.verdict is Verdict.PASS
    assert better.p_value < 1e-6
    wide = only(compare(*accuracies(*with_flips(500, 300, 60, 60)), margin=0.2))
    assert wide.non_inferiority.verdict is Verdict.PASS


def test_a_baseline_at_zero_has_no_recovery() -> None:
    found = only(compare(*accuracies([0] * 60, [1] * 10 + [0] * 50)))
    assert found.recovery is None is found.recovery_interval


def test_order_of_items_and_seed() -> None:
    first, second = with_flips(60, 60, 20, 10)
    base, cand = accuracies(first, second)
    found = compare(base, cand, seed=7)
    turned = replace(cand, items=cand.items[::-1])
    assert compare(base, turned, seed=7).metrics == found.metrics
    assert compare(base, cand, seed=8).metrics != found.metrics


def changed(**fields: object) -> Callable[[Run], Run]:
    """The run with the first item changed."""
    return lambda r: replace(r, items=(replace(r.items[0], **fields), *r.items[1:]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: replace(r, tasks=(replace(r.tasks[0], name="other"),), items=()), "share no task"),
        (lambda r: replace(r, tasks=(replace(r.tasks[0], version="2" * 64),)), "different versions"),
        (changed(prompt_sha256="f" * 64), r"task cloze, item i0: the runs asked different prompts"),
        (changed(cluster="other"), "different clusters"),
        (changed(item="other"), "1 item only in the baseline's run"),
        (changed(weights={"acc": 2.0}), "count tokens differently"),
        (lambda r: replace(r, items=()), "share no item"),
        (lambda r: replace(r, tasks=(replace(r.tasks[0], metrics=(KL,)),)), "different metrics of it: acc"),
        (
            lambda r: replace(r, tasks=(replace(r.tasks[0], metrics=(replace(ACC, kind="mean"),)),)),
            "different metrics of it: acc",
        ),
        (lambda r: replace(r, tasks=(*r.tasks, task("more"))), "task more: only the candidate has it"),
    ],
)
def test_runs_that_are_refused(change: Callable[[Run], Run], message: str) -> None:
    base, cand = accuracies([1, 0, 1, 0], [1, 1, 0, 0])
    with pytest.raises(UsageError, match=message) as caught:
        compare(base, change(cand))
    assert caught.value.exit_code == 2


def test_different_settings_are_named_as_the_reason() -> None:
    base, cand = accuracies([1, 0, 1, 0], [1, 1, 0, 0])
    other = {"seed": 1, "limit": 3, "versions": {"torch": "9"}}
    moved = changed(prompt_sha256="f" * 64)(replace(cand, settings=other))
    with pytest.raises(UsageError, match=r"the runs differ in limit \(None, 3\), seed \(0, 1\)"):
        compare(base, moved)
    with pytest.raises(UsageError, match=r"1 item only in the baseline's run; the runs differ in limit"):
        compare(base, replace(cand, settings=other, items=cand.items[1:]))
    assert compare(base, replace(cand, settings=other)).metrics  # the same items all the same


def test_what_only_one_run_has_is_left_out_if_allowed_and_said() -> None:
    base, cand = accuracies([1, 0, 1, 0] * 9, [1, 1, 0, 0] * 9)
    reason = "3,000 tokens are more than the context of 2,048"
    short = replace(
        cand, items=cand.items[1:], tasks=(replace(cand.tasks[0], skipped=(Skipped("i0", reason),)), task("more"))
    )
    found = compare(base, short, allow_left_out=True)
    assert only(found).num_items == 35
    assert sorted(found.left_out) == [
        f"task cloze: 1 item only in the baseline's run; i0 was skipped in the other: {reason}",
        "task more: only the candidate has it",
    ]


def test_items_that_both_skipped_are_said_without_permission() -> None:
    base, cand = accuracies([1, 0, 1, 0], [1, 1, 0, 0])
    base, cand = (
        replace(r, tasks=(replace(r.tasks[0], skipped=(Skipped("x", "too long"),)),)) for r in (base, cand)
    )
    assert compare(base, cand).left_out == ("task cloze: 1 item skipped in both runs (x: too long)",)


def test_kl_against_another_baseline_is_refused() -> None:
    base = run("base", [], [])
    cand = run("cand", [task("fidelity", KL)], items("fidelity", {"kl": [0.1] * 60}), baseline={"label": "third"})
    with pytest.raises(UsageError, match=r"measured against another baseline \(third\)"):
        compare(base, cand)
    assert compare(base, replace(cand, settings={"baseline": dict(base.candidate)})).metrics


@pytest.mark.parametrize("wrong", [{"margin": 0}, {"confidence": 1.0}, {"resamples": 100}])
def test_settings_out_of_range(wrong: dict[str, float]) -> None:
    with pytest.raises(UsageError, match="accepted: margin"):
        compare(*accuracies([1, 0], [1, 0]), **wrong)


def test_calibration_on_few_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """bench/eval/calibration.py, 500 pairs: the bounds are four standard errors of so few."""
    monkeypatch.syspath_prepend(str(ROOT / "bench" / "eval"))
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    import calibration

    monkeypatch.setattr(sys, "path", [*sys.path])
    found = calibration.rejections(calibration.independent(500, 500, 0.025, 0.025, seed=500))
    assert found.bootstrap == pytest.approx(0.05, abs=0.04)
    assert found.mid == pytest.approx(0.05, abs=0.04)
    assert found.exact <= found.mid
    grouped = calibration.rejections(calibration.passages(300, 60, 10, 0.3, 0.8, seed=1))
    assert grouped.bootstrap == pytest.approx(0.05, abs=0.05)
    assert grouped.clustered_t == pytest.approx(0.05, abs=0.05)
    assert grouped.mid > 0.15  # what ignoring the passages would do


def test_sparse_changes_of_a_mean_are_few_too() -> None:
    """Scores between 0 and 1 that hardly ever change prove as little as flips would."""
    shared = Metric("f1", "mean", True)
    base, cand = (run(n, [task("qa", shared)], items("qa", {"f1": [0.5, 0.25] * 100})) for n in ("base", "cand"))
    found = only(compare(base, cand))
    assert found.interval.low < -0.005
    assert found.flips is None
    free = Metric("cents", "mean", True)  # of values without bounds nothing of the kind is known
    base, cand = (run(n, [task("qa", free)], items("qa", {"cents": [5, 2.5] * 100})) for n in ("base", "cand"))
    assert only(compare(base, cand)).interval == Interval(0, 0)


def test_an_accuracy_of_the_pair_that_never_fails() -> None:
    """A share of 1 of 100 items still leaves room for some that fail: Wilson's interval."""
    agree = Metric("agree", "accuracy", True, "%", is_of_pair=True)
    cand = run("cand", [task("fidelity", agree)], items("fidelity", {"agree": [1] * 100}))
    found = only(compare(run("base", [], []), cand))
    assert found.interval.low == pytest.approx(0.963, abs=1e-3)
    assert found.interval.high == pytest.approx(1)


@pytest.mark.parametrize(
    ("clusters", "per_cluster", "confidence"), [(428, 6, 0.95), (428, 6, 0.99), (60, 40, 0.95)]
)
def test_no_flip_proves_no_less_than_one(clusters: int, per_cluster: int, confidence: float) -> None:
    rng = np.random.default_rng(0)
    first = (rng.random((clusters, per_cluster)) < rng.beta(6, 6, (clusters, 1))).astype(int).ravel()
    lows = []
    for lost in (0, 1, 2):
        second = first.copy()
        second[np.flatnonzero(first)[:: first.sum() // 6][:lost]] = 0
        lows.append(only(compare(*accuracies(first, second, per_cluster=per_cluster), confidence=confidence)))
    assert [m.flips.lost for m in lows] == [0, 1, 2]
    ends = [m.interval.low for m in lows]
    assert ends == sorted(ends, reverse=True)
    alone = only(compare(*accuracies(first, first), confidence=confidence))
    assert ends[0] < alone.interval.low  # clusters count for something
    if clusters == 428:
        assert lows[0].non_inferiority.verdict is Verdict.PASS


def test_few_flips_of_clustered_items_all_one_way() -> None:
    """Four passages that each lost an item: 2 / 16 by the sign test, where a t test is sure of its variance."""
    first = [1, 0] * 1300
    for lost, expected in ((4, 0.125), (5, 0.0625), (6, 0.03125)):
        second = list(first)
        for number in range(lost):
            second[60 * number] = 0
        found = only(compare(*accuracies(first, second, per_cluster=6)))
        assert found.p_value == pytest.approx(expected)
        assert found.p_value < 0.05 or found.interval.high > 0


def test_items_that_would_decide_where_few_changed() -> None:
    """Without a flip the interval shrinks with the number of items, not with its root."""
    found = only(compare(*accuracies([1, 0] * 50, [1, 0] * 50)))
    needed = found.non_inferiority.needed_items
    assert 200 < needed < 700
    enough = [1, 0] * (needed // 2 + 1)
    assert only(compare(*accuracies(enough, enough))).non_inferiority.verdict is Verdict.PASS


def test_another_path_or_arithmetic_of_our_engine_is_refused() -> None:
    base, cand = accuracies([1, 0] * 40, [1, 0] * 40)
    prefill = replace(base, tasks=(replace(base.tasks[0], path="prefill"),))
    with pytest.raises(UsageError, match=r"task cloze: the runs scored it by different paths \(prefill, decode\)"):
        compare(prefill, cand)
    other = replace(cand, candidate={**cand.candidate, "kind": "transformers"})
    assert "scored by different paths (prefill by the baseline, decode by the candidate)" in compare(
        prefill, other
    ).left_out[0]  # fmt: skip
    (line,) = [line for line in gaps(Report.of(compare(prefill, other))) if "different paths" in line]
    assert line.startswith("cand: task cloze: scored by")
    made = [
        replace(one, candidate={**one.candidate, "configuration": {"weights": "fp8", **stated}})
        for one, stated in ((base, {"fp8_activations": "none"}), (cand, {"fp8_activations": "dynamic128"}))
    ]
    with pytest.raises(UsageError, match=r"ran differently: --fp8-activations \(none, dynamic128\)"):
        compare(made[0], made[1])
