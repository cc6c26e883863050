"""Values from 0 to 1 that are no right or wrong (probabilities, matched fields, tokens that agree): told in
percent, judged in points, and never surer than what was seen allows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import scipy.stats

from quantkit.errors import ArtifactError
from quantkit_evals.compare import compare
from quantkit_evals.comparison import RuleResult, Verdict
from quantkit_evals.gate import Gate, find_gate, judge
from quantkit_evals.report.wording import difference, score
from quantkit_evals.run import Metric, Run
from quantkit_evals.run_file import read_run, write_run
from quantkit_evals.tasks.source import METRIC
from tests.evals.runs import ACC, PERPLEXITY, items, run, task

SHARE = Metric("acc", "share", True, "%")
AGREE = Metric("top1_agreement", "share", True, "%", is_of_pair=True)


def pair(first: object, second: object, metric: Metric = SHARE) -> tuple[Run, Run]:
    made = [
        run(label, [task("mc2", metric)], items("mc2", {metric.name: np.asarray(v, float)}))
        for label, v in (("base", first), ("cand", second))
    ]
    return made[0], made[1]


def rule(runs: tuple[Run, Run], **limit: object) -> RuleResult:
    gate = Gate.model_validate({"schema_version": 1, "name": "g", "rules": [limit]})
    (found,) = judge(gate, compare(*runs)).rules
    return found


def test_points_of_a_share_are_points() -> None:
    """0.8 is 0.8 points, not 80: a probability that fell by 0.35 is 35 points worse."""
    first = np.random.default_rng(0).uniform(0.4, 0.9, 817)
    found = compare(*pair(first, first - 0.35))
    assert judge(find_gate("accuracy"), found).verdict is Verdict.FAIL
    result = rule(pair(first, first - 0.35), metric="mc2.acc", non_inferiority=0.8)
    assert (result.unit, result.limit, result.verdict) == ("points", -0.8, Verdict.FAIL)
    assert result.found == pytest.approx(-35)
    (metric,) = found.metrics
    assert metric.flips is None and metric.non_inferiority.verdict is Verdict.FAIL
    assert difference(metric).endswith(" points") and score(SHARE, metric.candidate, 817).endswith(" %")
    assert METRIC["field_match"].is_percent


def test_a_share_is_between_nothing_and_its_weight(tmp_path: Path) -> None:
    write_run(pair([0.5, 1.0000001], [0, 1])[0], tmp_path)
    assert read_run(tmp_path).items[1].values["acc"] == 1.0000001  # a sum of probabilities
    with pytest.raises(ArtifactError, match=r"'acc' is a share, of value 0 to its weight \(seen: 35.0\)"):
        write_run(pair([0.5, 35.0], [0, 1])[0], tmp_path)


@pytest.mark.parametrize("count", [2, 5, 20, 60])
def test_all_right_is_no_proof_of_much(count: int) -> None:
    runs = pair([1] * count, [1] * count, ACC)
    result = rule(runs, metric="mc2.acc", min=95)
    assert result.verdict is Verdict.UNDECIDED
    expected = scipy.stats.binomtest(count, count).proportion_ci(method="wilson")
    assert result.interval.low == pytest.approx(100 * expected.low)
    assert rule(pair([1] * 400, [1] * 400, ACC), metric="mc2.acc", min=95).verdict is Verdict.PASS


def test_a_score_near_its_end_passes_no_more_often_than_promised() -> None:
    """Every table of 100 items that are right with probability 0.95, by its own probability."""
    passes = [right for right in range(97, 101) if rule(
        pair([1] * 100, [1] * right + [0] * (100 - right), ACC), metric="mc2.acc", min=95
    ).verdict is Verdict.PASS]  # fmt: skip
    assert scipy.stats.binom.pmf(passes, 100, 0.95).sum() <= 0.025


def test_the_own_score_of_a_perplexity_has_an_interval_of_its_own() -> None:
    nats = np.random.default_rng(0).normal(3, 0.5, 80)
    (found,) = compare(*pair(nats, nats, PERPLEXITY)).metrics
    theirs = scipy.stats.bootstrap((nats,), np.mean, rng=np.random.default_rng(0)).confidence_interval
    assert found.score_interval.low == pytest.approx(np.exp(theirs.low), rel=0.01)
    assert found.score_interval.high == pytest.approx(np.exp(theirs.high), rel=0.01)


@pytest.mark.parametrize("blocks", [2, 4, 64])
def test_agreement_of_all_tokens_leaves_room(blocks: int) -> None:
    """A block counts once where nothing says how much its tokens depend on each other."""
    tokens = [255.0] * blocks
    made = run("cand", [task("f", AGREE)], items("f", {AGREE.name: tokens}, weights={AGREE.name: tokens}))
    (found,) = compare(run("base", [], []), made).metrics
    expected = scipy.stats.binomtest(blocks, blocks).proportion_ci(method="wilson")
    assert found.interval.low == pytest.approx(expected.low)
    assert found.interval == found.score_interval


def test_tokens_count_as_tokens_once_enough_disagree() -> None:
    wrong = np.random.default_rng(0).binomial(255, 0.02, 64)
    made = run(
        "cand", [task("f", AGREE)], items("f", {AGREE.name: 255.0 - wrong}, weights={AGREE.name: [255.0] * 64})
    )
    (found,) = compare(run("base", [], []), made).metrics
    half = 1.96 * np.sqrt(0.02 * 0.98 / (64 * 255))
    assert found.interval.high - found.interval.low == pytest.approx(2 * half, rel=0.3)
