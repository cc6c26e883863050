"""What is refused before anything runs: a gate that could not judge, or would judge by figures of another path."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from quantkit.errors import UsageError
from quantkit.recipe.errors import nearest

from ..configuration import Configuration
from ..run import Metric
from .schema import Gate, Rule

DECODED = ("decode", "generate")


class Planned(Protocol):
    """What must be known of a task: ``run.Task`` is one."""

    @property
    def name(self) -> str: ...
    @property
    def path(self) -> str: ...
    @property
    def metrics(self) -> tuple[Metric, ...]: ...


def check_gate(gate: Gate, tasks: Iterable[Planned], candidates: Iterable[Configuration] = ()) -> None:
    """Refuse, before anything runs, what could not be judged afterwards.

    Args:
        tasks: that are going to run, with their metrics and the path by which they are scored.
        candidates: configurations of our engine that are going to be judged.

    Raises:
        UsageError: a rule names a metric that will not be measured or that has no such limit, no required rule
            applies, or figures of a prefill path would be taken for ``dual`` or for FP8 pages.
    """
    tasks = list(tasks)
    metrics = {f"{task.name}.{metric.name}": metric for task in tasks for metric in task.metrics}
    where = f"gate {gate.name}"
    _check_names(gate, metrics, where)
    rules = list(applicable(gate, metrics))
    if not any(rule.required for rule, _ in rules):
        raise UsageError(
            "no required rule applies to what is measured, so that nothing could fail",
            where=where, accepted=", ".join(sorted(metrics)) or "at least one task with a metric",
        )  # fmt: skip
    paths = {f"{task.name}.{metric.name}": task.path for task in tasks for metric in task.metrics}
    for candidate in candidates:
        _check_path(candidate, [name for _, name in rules if paths[name] not in DECODED], where)


def applicable(gate: Gate, metrics: dict[str, Metric]) -> Iterable[tuple[Rule, str]]:
    """Every rule with every metric that it judges; a pattern passes over metrics that can't have its limit."""
    for rule, name in gate.applied(metrics):
        if not (rule.is_pattern and misfit(rule, metrics[name])):
            yield rule, name


def misfit(rule: Rule, metric: Metric) -> str | None:
    """Why a metric can't have the limit of a rule; None if it can."""
    kind = rule.kind
    if kind == "max" and metric.is_higher_better:
        return "higher is better: give min"
    if kind == "min" and not metric.is_higher_better:
        return "lower is better: give max"
    if kind in ("max", "min"):
        return None
    if metric.is_of_pair:
        return f"it compares both candidates already: give {'min' if metric.is_higher_better else 'max'}"
    if kind == "max_ratio" and metric.kind != "perplexity":
        return "max_ratio is for perplexities: give non_inferiority or min_recovery"
    if kind == "non_inferiority" and metric.kind == "perplexity":
        return "it is a perplexity: give max_ratio"
    if kind == "min_recovery" and metric.kind != "perplexity" and not metric.is_higher_better:
        return "recovery is of metrics where higher is better: give non_inferiority"
    return None


def _check_names(gate: Gate, metrics: dict[str, Metric], where: str) -> None:
    problems = []
    for rule in gate.rules:
        if rule.is_pattern:
            continue
        metric = metrics.get(rule.metric)
        if metric is None:
            known = nearest(rule.metric, metrics).replace("Valid keys:", "Measured:")
            problems.append(f"{rule.metric} is not measured. {known if metrics else 'Nothing is.'}")
        elif why := misfit(rule, metric):
            problems.append(f"{rule.metric} can't have {rule.kind}: {why}")
    if problems:
        what = problems[0] if len(problems) == 1 else f"{len(problems)} problems: " + "; ".join(problems)
        raise UsageError(what, where=where)


def _check_path(candidate: Configuration, prefill_only: Sequence[str], where: str) -> None:
    if candidate.needs_decode and prefill_only:
        raise UsageError(
            f"{', '.join(dict.fromkeys(prefill_only))} would judge {candidate}, and never enters decode: such "
            "figures show neither the INT4 weights of dual nor FP8 pages",
            where=where, accepted="figures of the paths " + ", ".join(DECODED),
            hint="Score with the decode path, or take the rules of these tasks out of the gate.",
        )  # fmt: skip
