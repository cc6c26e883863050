"""What every form of report is made from: comparisons with one baseline, their gates, and the outcome.

Undecided is an outcome of its own. Whether it stops a pipeline is the user's choice (``--undecided``), made here
and in one place, so that exit code, JUnit and annotations can't disagree.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Literal

from ..comparison import Comparison, GateResult, MetricComparison, RuleResult, Verdict

Undecided = Literal["fail", "pass"]


class Outcome(Enum):
    """Of a whole report."""

    PASS = "pass"
    FAIL = "fail"
    UNDECIDED = "undecided"
    MEASURED = "measured"  # no gate was asked for


@dataclass(frozen=True, slots=True)
class Judged:
    """One candidate: how it compares with the baseline, and what its gate says (None: no gate was asked for)."""

    comparison: Comparison
    gate: GateResult | None = None

    @property
    def label(self) -> str:
        return self.comparison.candidate.label

    @property
    def outcome(self) -> Outcome:
        return Outcome.MEASURED if self.gate is None else Outcome(self.gate.verdict.value)

    def rules(self, name: str) -> list[RuleResult]:
        """Rules about one metric (``task.metric``)."""
        return [] if self.gate is None else [rule for rule in self.gate.rules if rule.name == name]

    def unjudged(self) -> list[MetricComparison]:
        """Metrics that no rule names."""
        return [metric for metric in self.comparison.metrics if not self.rules(metric.name)]

    def only_reported(self) -> list[MetricComparison]:
        """Metrics whose rules never decide."""
        rules = {metric.name: self.rules(metric.name) for metric in self.comparison.metrics}
        return [
            metric for metric in self.comparison.metrics
            if rules[metric.name] and not any(rule.is_required for rule in rules[metric.name])
        ]  # fmt: skip

    def left_out(self) -> list[str]:
        """Tasks of either run that were not compared."""
        compared = {metric.task for metric in self.comparison.metrics}
        runs = (self.comparison.baseline, self.comparison.candidate)
        return list(dict.fromkeys(task.name for run in runs for task in run.tasks if task.name not in compared))

    @property
    def limit(self) -> int | None:
        """Items of each task that were asked at most, in a trial run."""
        limit = self.comparison.candidate.settings.get("limit")
        return limit if isinstance(limit, int) else None


@dataclass(frozen=True, slots=True)
class Report:
    """Candidates against one baseline.

    Attributes:
        judged: in the order in which they are shown; at least one.
        undecided: whether an undecided required rule fails (``fail``) or not (``pass``).

    Raises:
        ValueError: no candidate, or different baselines.
    """

    judged: tuple[Judged, ...]
    undecided: Undecided = "fail"

    def __post_init__(self) -> None:
        if not self.judged:
            raise ValueError("a report needs a candidate")
        if self.undecided not in ("fail", "pass"):
            raise ValueError(f"undecided is {self.undecided!r}, neither fail nor pass")
        first = self.judged[0].comparison.baseline
        for other in self.judged[1:]:
            found = other.comparison.baseline
            if found is not first and (found.candidate, found.settings) != (first.candidate, first.settings):
                raise ValueError(f"{other.label} was compared with another baseline than {self.judged[0].label}")

    @staticmethod
    def of(
        comparison: Comparison, gate: GateResult | None = None, *others: Judged, undecided: Undecided = "fail"
    ) -> Report:
        """A report of one candidate, and further ones beside it."""
        return Report((Judged(comparison, gate), *others), undecided)

    @property
    def outcome(self) -> Outcome:
        """FAIL if any candidate fails, else UNDECIDED if any is, else PASS; MEASURED if none has a gate."""
        found = {judged.outcome for judged in self.judged}
        worst = (Outcome.FAIL, Outcome.UNDECIDED, Outcome.PASS)
        return next((outcome for outcome in worst if outcome in found), Outcome.MEASURED)

    @property
    def is_success(self) -> bool:
        """Whether the command exits with 0."""
        if self.outcome is Outcome.UNDECIDED:
            return self.undecided == "pass"
        return self.outcome is not Outcome.FAIL

    def stops(self, rule: RuleResult) -> bool:
        """Whether this rule alone makes the command exit with 1."""
        if not rule.is_required:
            return False
        return rule.verdict is Verdict.FAIL or (rule.verdict is Verdict.UNDECIDED and self.undecided == "fail")
