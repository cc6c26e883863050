"""What must hold inside a run, checked before it is written and after it is read: the same rules for both."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from .run import Item, Run, Task

_ROUNDING = 1e-6  # of sums of probabilities


def problem_of(run: Run) -> str | None:
    """The first thing that makes a run contradict itself, as a sentence; None if it is sound."""
    if not isinstance(run.candidate.get("label"), str) or not run.candidate["label"]:
        return "the candidate has no label"
    if twice := _twice(task.name for task in run.tasks):
        return f"two tasks are named {twice!r}"
    for task in run.tasks:
        if problem := _problem_of_task(task):
            return f"task {task.name!r}: {problem}"
    tasks = {task.name: task for task in run.tasks}
    seen: set[tuple[str, str]] = {(t.name, skipped.item) for t in run.tasks for skipped in t.skipped}
    for item in run.items:
        if item.task not in tasks:
            return f"item {item.item!r} belongs to the task {item.task!r}, which the run does not have"
        problem = _problem_of_item(item, tasks[item.task])
        if (item.task, item.item) in seen:
            problem = "its id occurs twice (among the items, or also among those skipped)"
        if problem:
            return f"task {item.task!r}, item {item.item!r}: {problem}"
        seen.add((item.task, item.item))
    return None


def _problem_of_task(task: Task) -> str | None:
    if not task.metrics:
        return "it has no metric"
    if twice := _twice(metric.name for metric in task.metrics):
        return f"two metrics are named {twice!r}"
    for name, points in task.curves.items():
        if any(not (math.isfinite(point.value) and math.isfinite(point.stderr)) for point in points):
            return f"the curve {name!r} has a point that is no finite number"
    return None


def _problem_of_item(item: Item, task: Task) -> str | None:
    metrics = {metric.name: metric for metric in task.metrics}
    if unknown := next((name for name in (*item.values, *item.weights) if name not in metrics), None):
        return f"a value of {unknown!r}, which is no metric of the task ({', '.join(metrics)})"
    if missing := next((name for name in metrics if name not in item.values), None):
        return f"no value of {missing!r}"
    if name := _not_finite(item.values) or _not_finite(item.weights):
        return f"{name!r} is no finite number"
    if name := next((name for name, weight in item.weights.items() if not weight > 0), None):
        return f"the weight of {name!r} is {item.weights[name]}; accepted: above 0"
    for name, metric in metrics.items():
        if metric.kind == "accuracy" and (item.values[name] not in (0, 1) or item.weight(name) != 1):
            return f"{name!r} is an accuracy, of value 0 or 1 and weight 1 (seen: {item.values[name]})"
        if metric.kind == "share" and not -_ROUNDING <= item.values[name] / item.weight(name) <= 1 + _ROUNDING:
            return f"{name!r} is a share, of value 0 to its weight (seen: {item.values[name]})"
    return None


def _not_finite(numbers: Mapping[str, float]) -> str | None:
    for name, number in numbers.items():
        if isinstance(number, bool) or not isinstance(number, (int, float)) or not math.isfinite(number):
            return name
    return None


def _twice(names: Iterable[str]) -> str | None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            return name
        seen.add(name)
    return None
