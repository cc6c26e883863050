"""The margins that a gate's rules give, for comparisons to use: one margin of a metric in all of a report."""

from __future__ import annotations

from collections.abc import Iterable

from .refusal import Planned, applicable
from .schema import Gate, Rule


def margins_of(gate: Gate | None, tasks: Iterable[Planned]) -> dict[str, float]:
    """``task.metric`` -> fraction, of what people read in percent and a rule ``non_inferiority`` judges.

    Of several rules the one that decides: required before reported only, then the tightest.
    """
    if gate is None:
        return {}
    metrics = {f"{task.name}.{metric.name}": metric for task in tasks for metric in task.metrics}
    found: dict[str, Rule] = {}
    for rule, name in applicable(gate, metrics):
        if rule.kind == "non_inferiority" and metrics[name].is_percent:
            found[name] = min(found.get(name, rule), rule, key=lambda one: (not one.required, one.limit))
    return {name: rule.limit / 100 for name, rule in found.items()}
