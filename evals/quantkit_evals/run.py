"""The result of one candidate on some tasks, with a record of every item: what everything else is computed from.

A run is a directory: ``run.json`` (what was run, exactly, and the SHA-256 of the records) and ``items.jsonl``, one
record a line. Figures are not stored as truth: scores, differences and verdicts are computed from the records, so
that two runs can be compared later by any statistic. Numbers are numbers; a value that is not finite can't be
written.

A score of a metric is ``sum(values) / sum(weights)`` over the items of its task: accuracy has weight 1 per item, a
perplexity ``exp`` of negative log-likelihood per token, KL divergence the tokens as weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Kind = Literal["accuracy", "share", "perplexity", "mean"]


@dataclass(frozen=True, slots=True)
class Metric:
    """How values of items become a score.

    Attributes:
        name: unique in its task: ``acc``, ``perplexity``, ``kl``.
        kind: ``accuracy``: values 0 or 1, in reports a percentage, differences in points. ``share``: values from 0
            to their weight (a probability; tokens that agree, of as many), told as accuracies are.
            ``perplexity``: values are nats, weights are tokens, the score is ``exp(sum / tokens)``. ``mean``: as
            it is.
        is_higher_better: direction.
        unit: for reports: ``%``, ``nats/token``, empty.
        is_of_pair: the values were made against the baseline (KL divergence, flips), which has none itself.
    """

    name: str
    kind: Kind
    is_higher_better: bool
    unit: str = ""
    is_of_pair: bool = False

    @property
    def is_percent(self) -> bool:
        """Whether people read it as a percentage, and its differences in points."""
        return self.kind in ("accuracy", "share")


@dataclass(frozen=True, slots=True)
class Item:
    """One item of a task.

    Attributes:
        task: name.
        item: id, unique in its task and the same in every run of it.
        cluster: items of one cluster depend on each other (one document); the item's own id if independent.
        prompt_sha256: digest of all that was asked: contexts, continuations, generation settings, and the windows
            of a text that was longer than one. Runs are only compared where it is equal.
        values: metric -> value.
        weights: metric -> weight; a metric that is left out has 1.
        context_tokens: of the longest request of the item; None when the candidate does not say.
    """

    task: str
    item: str
    cluster: str
    prompt_sha256: str
    values: Mapping[str, float]
    weights: Mapping[str, float] = field(default_factory=dict)
    context_tokens: int | None = None

    def weight(self, metric: str) -> float:
        return self.weights.get(metric, 1.0)


@dataclass(frozen=True, slots=True)
class Skipped:
    """An item that could not be scored, and why; reported, never silent."""

    item: str
    reason: str


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """A mean over tokens at positions ``[start, stop)`` (of their block), or with so many tokens of context."""

    start: int
    stop: int
    value: float
    stderr: float


@dataclass(frozen=True, slots=True)
class Task:
    """What is known of a task besides its items.

    Attributes:
        name: unique in the run.
        version: SHA-256 of its definition and data.
        path: the path that its figures were made by: ``prefill``, ``decode``, or ``generate`` (both, as served).
        metrics: of its items; the first one is the main one.
        skipped: items left out, with reasons.
        curves: name (``kl by position``) -> points.
    """

    name: str
    version: str
    path: Literal["prefill", "decode", "generate", "unknown"]
    metrics: tuple[Metric, ...]
    skipped: tuple[Skipped, ...] = ()
    curves: Mapping[str, tuple[CurvePoint, ...]] = field(default_factory=dict)

    def metric(self, name: str) -> Metric | None:
        return next((metric for metric in self.metrics if metric.name == name), None)


@dataclass(frozen=True, slots=True)
class Run:
    """One candidate's results.

    Attributes:
        candidate: what was run, exactly, JSON-ready: ``label`` (for reports), ``kind`` (``engine``,
            ``transformers``, ``endpoint``), ``configuration`` (of our engine), ``model``, and identity:
            ``pair_id`` and digests.
        settings: what else decides the figures: seed, limits, chat template, versions of packages.
        tasks: in the order in which they ran.
        items: of all tasks.
    """

    candidate: Mapping[str, Any]
    settings: Mapping[str, Any]
    tasks: tuple[Task, ...]
    items: tuple[Item, ...]

    @property
    def label(self) -> str:
        return str(self.candidate["label"])

    def task(self, name: str) -> Task | None:
        return next((task for task in self.tasks if task.name == name), None)

    def items_of(self, task: str) -> list[Item]:
        return [item for item in self.items if item.task == task]
