"""A gate as a closed, versioned schema: rules, each with one limit of one metric.

Unknown keys are errors: a misspelt limit that is ignored would let everything pass. A gate that could pass without
a decision (no rules, or none that is required) is not one.

What is left out: what runs (tasks, limits, candidates). A gate judges what was measured, and refuses what was not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, PrivateAttr, model_validator

MOST_CONFIDENCE = 0.999  # 5 of 10,000 resamples beyond an end
LIMITS = ("max", "min", "max_ratio", "min_recovery", "non_inferiority")
Positive = Annotated[FiniteFloat, Field(gt=0)]


class Closed(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=False)


class Rule(Closed):
    """One limit. Percentages and points for accuracies, else the metric's own unit."""

    metric: str = Field(
        pattern=r"^(.+\..+|.*\*.*)$",
        description="task.metric, such as cloze.acc. With * it holds for every metric that it fits (*.acc), and "
        "may fit none as long as another required rule applies, which the report says; without, the metric must "
        "have been measured.",
    )
    max: FiniteFloat | None = Field(default=None, description="Largest score of the candidate.")
    min: FiniteFloat | None = Field(default=None, description="Smallest score of the candidate.")
    max_ratio: Positive | None = Field(
        default=None, description="Perplexities: largest ratio, candidate / baseline."
    )
    min_recovery: Positive | None = Field(
        default=None, description="Smallest recovery in percent, candidate / baseline."
    )
    non_inferiority: Positive | None = Field(
        default=None, description="At most so much worse than the baseline: points for accuracies."
    )
    required: bool = Field(default=True, description="false: reported, and never decides.")
    reason: str = Field(default="", description="Why this limit.")

    @model_validator(mode="after")
    def _has_one_limit(self) -> Self:
        given = [name for name in LIMITS if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"one limit is needed, {len(given)} are given; accepted: one of {', '.join(LIMITS)}")
        return self

    @property
    def kind(self) -> str:
        """Which of ``LIMITS``."""
        return next(name for name in LIMITS if getattr(self, name) is not None)

    @property
    def limit(self) -> float:
        return float(getattr(self, self.kind))

    @property
    def words(self) -> str:
        """As its file has it: ``*.acc (non_inferiority 0.8)``."""
        return f"{self.metric} ({self.kind} {self.limit:.12g})"

    @property
    def is_pattern(self) -> bool:
        return "*" in self.metric


class Gate(Closed):
    """Rules, and the confidence at which they are judged."""

    schema_version: Literal[1] = Field(description="Version of this schema.")
    name: str = Field(min_length=1, description="Short name.")
    description: str = Field(default="", description="One sentence for people.")
    confidence: float = Field(
        default=0.95, ge=0.5, le=MOST_CONFIDENCE,
        description="Of the two-sided intervals; more than 0.999 the resamples can't resolve.",
    )  # fmt: skip
    rules: tuple[Rule, ...] = Field(description="What must hold.")
    _sha256: str = PrivateAttr(default="")

    @model_validator(mode="after")
    def _decides(self) -> Self:
        if not self.rules:
            raise ValueError("it has no rules, so that nothing could ever fail")
        if not any(rule.required for rule in self.rules):
            raise ValueError("no rule is required, so that nothing could ever fail")
        seen = set()
        for rule in self.rules:
            if (rule.metric, rule.kind) in seen:
                raise ValueError(f"two rules give {rule.kind} of {rule.metric}")
            seen.add((rule.metric, rule.kind))
        return self

    @property
    def sha256(self) -> str:
        """Of the file it was read from; of its content if it was made otherwise."""
        from hashlib import sha256

        return self._sha256 or sha256(self.model_dump_json().encode()).hexdigest()

    def with_digest(self, digest: str) -> Self:
        self._sha256 = digest
        return self

    def applied(self, names: Iterable[str]) -> Iterator[tuple[Rule, str]]:
        """Every rule with every ``task.metric`` of ``names`` that it holds for, in the order of the rules."""
        from fnmatch import fnmatchcase

        names = list(names)
        for rule in self.rules:
            for name in names:
                if fnmatchcase(name, rule.metric) if rule.is_pattern else name == rule.metric:
                    yield rule, name
