"""Two runs side by side: for every metric both scores, the difference, and how sure it is. Types only.

``compare`` makes them; gates, reports and the command read them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from .run import Metric, Run


class Verdict(Enum):
    """Whether something holds, with confidence. Undecided is an outcome of its own: more items would settle it."""

    PASS = "pass"
    FAIL = "fail"
    UNDECIDED = "undecided"


@dataclass(frozen=True, slots=True)
class Interval:
    """A confidence interval, both ends included."""

    low: float
    high: float


UNBOUNDED = Interval(-math.inf, math.inf)  # nothing is known


@dataclass(frozen=True, slots=True)
class Score:
    """A score and its standard error, clustered where items share a document; in the metric's own unit."""

    value: float
    stderr: float


@dataclass(frozen=True, slots=True)
class Flips:
    """Items of an accuracy metric that changed: right to wrong, wrong to right; and McNemar's tests of them."""

    lost: int
    gained: int
    p_exact: float
    p_mid: float


@dataclass(frozen=True, slots=True)
class NonInferiority:
    """Whether the candidate is at most ``margin`` worse (points for what is in percent, else its own unit).

    Attributes:
        margin: positive; of accuracies a fraction.
        confidence: of the decision, two-sided interval (0.95).
        verdict: PASS if the whole interval lies above ``-margin``, FAIL if all of it lies below, else UNDECIDED.
        needed_items: about how many items would decide it, if the difference stays what it is; None when decided,
            or when no number would.
    """

    margin: float
    confidence: float
    verdict: Verdict
    needed_items: int | None


@dataclass(frozen=True, slots=True)
class MetricComparison:
    """One metric of one task in two runs.

    Differences are candidate minus baseline. Accuracies and shares (scores, differences, intervals) are fractions.

    Attributes:
        task, metric: which.
        path: by which the candidate's figure was made.
        num_items, num_clusters: compared.
        baseline: None for a metric of the pair (KL divergence).
        candidate: of the metric; for a metric of the pair its mean.
        difference: None for a metric of the pair. For a perplexity, of the log (nats per token, word or byte).
        interval: of the difference (of the candidate's score for a metric of the pair), clustered bootstrap.
        p_value: two-sided, of no difference; None for a metric of the pair.
        p_adjusted: Holm over all metrics of the comparison that have a p value.
        recovery: candidate / baseline, where higher is better; for a perplexity baseline / candidate; else None.
        ratio: for a perplexity candidate / baseline; else None.
        ratio_interval: of it.
        flips: of accuracies.
        non_inferiority: of accuracies and shares that are not of the pair.
        recovery_interval: of the recovery.
        score_interval: of the candidate's own score, in its unit; of the pair the same as ``interval``.

    Of one cluster alone nothing is known: its standard errors are NaN, its intervals infinite.
    """

    task: str
    metric: Metric
    path: str
    num_items: int
    num_clusters: int
    baseline: Score | None
    candidate: Score
    difference: Score | None
    interval: Interval
    p_value: float | None
    p_adjusted: float | None
    recovery: float | None
    ratio: float | None
    ratio_interval: Interval | None
    flips: Flips | None
    non_inferiority: NonInferiority | None
    recovery_interval: Interval | None = None
    score_interval: Interval = UNBOUNDED

    @property
    def name(self) -> str:
        return f"{self.task}.{self.metric.name}"


@dataclass(frozen=True, slots=True)
class Comparison:
    """All metrics of two runs.

    Attributes:
        left_out: items or tasks that were not compared, and why.
    """

    baseline: Run
    candidate: Run
    confidence: float
    metrics: tuple[MetricComparison, ...]
    left_out: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RuleResult:
    """What a gate's rule found.

    Attributes:
        rule: in words: ``cloze.acc at most 0.8 points worse``.
        name: ``task.metric``.
        found: value, with its interval.
        limit: that it was held against, in the unit of ``found``.
        verdict: PASS if the whole interval is on the good side of the limit, FAIL if all of it is on the bad side.
        by: how far the value is from the limit, negative on the bad side.
        advice: what would decide it; empty when decided.
        is_required: False for a rule that is only reported.
        reason: why this limit, as the gate's file says; empty if it does not.
        confidence: of the interval.

    Of a metric that was asked for and of which nothing was scored, ``found`` is NaN and the verdict UNDECIDED.
    """

    rule: str
    name: str
    found: float
    interval: Interval
    limit: float
    unit: str
    verdict: Verdict
    by: float
    advice: str = ""
    is_required: bool = True
    reason: str = ""
    confidence: float = 0.95


@dataclass(frozen=True, slots=True)
class GateResult:
    """A gate's verdict: FAIL if a required rule failed, else UNDECIDED if one is, else PASS.

    Attributes:
        gate: its name (file).
        sha256: of the file.
        unused: required patterns that fitted nothing that was measured, in words.
    """

    gate: str
    sha256: str
    rules: tuple[RuleResult, ...]
    unused: tuple[str, ...] = ()

    @property
    def verdict(self) -> Verdict:
        found = {rule.verdict for rule in self.rules if rule.is_required}
        return next((v for v in (Verdict.FAIL, Verdict.UNDECIDED) if v in found), Verdict.PASS)
