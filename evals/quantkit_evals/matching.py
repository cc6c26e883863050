"""Which items of two runs can be compared: the same question, asked in the same words.

Everything that would make a difference mean something else is refused: other versions of a task, other prompts,
other token counts, metrics of another kind, another path or arithmetic of our engine, a KL divergence that was
measured against another baseline. What only one run has is refused too, unless leaving it out was allowed, and
then it is said.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from quantkit.errors import UsageError

from .configuration import Configuration
from .run import Item, Metric, Run, Task

PATHS = "scored by different paths"  # where nothing was left out, and differences may speak of something else


@dataclass(frozen=True, slots=True)
class Matched:
    """One task in both runs.

    Attributes:
        task: as the candidate has it.
        metrics: that can be compared.
        baseline: items, in the order of ``candidate``; empty if the task has metrics of the pair only.
        candidate: items, sorted by id.
    """

    task: Task
    metrics: tuple[Metric, ...]
    baseline: tuple[Item, ...]
    candidate: tuple[Item, ...]


@dataclass(frozen=True, slots=True)
class Match:
    """All that two runs share, and what was left out, as sentences; ``notes`` needed no permission."""

    tasks: tuple[Matched, ...]
    left_out: tuple[str, ...]
    notes: tuple[str, ...]


def match(baseline: Run, candidate: Run) -> Match:
    """Pair the items of two runs.

    Raises:
        UsageError: they share no task or a shared task can't be compared, with the reason.
    """
    matcher = _Matcher(baseline, candidate)
    if why := other_arithmetic(baseline, Configuration.of_json(candidate.candidate.get("configuration"))):
        raise UsageError(why, where=f"{baseline.label}, {candidate.label}", hint="Run both alike.")
    tasks = tuple(matcher.tasks())
    if not tasks and not any(baseline.task(task.name) for task in candidate.tasks):
        raise UsageError(
            "the runs share no task: nothing can be compared",
            where=f"{baseline.label}, {candidate.label}",
            hint=f"The baseline has {_names(baseline)}, the candidate has {_names(candidate)}.",
        )
    return Match(tasks, tuple(matcher.left_out), tuple(matcher.notes))


def other_arithmetic(baseline: Run, configuration: Configuration | None) -> str | None:
    """In what our engine ran otherwise for the baseline, of which differences would speak; None if alike."""
    stated = Configuration.of_json(baseline.candidate.get("configuration"))
    if stated is None or configuration is None:
        return None
    names = {"path": "path", "compute": "dtype", "fp8_activations": "fp8-activations"}
    differ = [
        f"--{said} ({getattr(stated, name)}, {getattr(configuration, name)})"
        for name, said in names.items()
        if getattr(stated, name) != getattr(configuration, name)
    ]
    return f"baseline and candidate ran differently: {', '.join(differ)}" if differ else None


class _Matcher:
    def __init__(self, baseline: Run, candidate: Run) -> None:
        self.baseline, self.candidate = baseline, candidate
        self.left_out: list[str] = []
        self.notes: list[str] = []

    def tasks(self) -> Iterator[Matched]:
        for task in self.baseline.tasks:
            if self.candidate.task(task.name) is None:
                self.left_out.append(f"task {task.name}: only the baseline has it")
        for task in self.candidate.tasks:
            theirs = self.baseline.task(task.name)
            matched = self._pair_only(task) if theirs is None else self._both(theirs, task)
            if matched is not None:
                yield matched

    def _pair_only(self, task: Task) -> Matched | None:
        """A task that the baseline lacks: its metrics of the pair need none."""
        metrics = tuple(metric for metric in task.metrics if metric.is_of_pair)
        if not metrics:
            self.left_out.append(f"task {task.name}: only the candidate has it")
            return None
        for metric in task.metrics:
            if not metric.is_of_pair:
                self.left_out.append(f"{task.name}.{metric.name}: the baseline has no figures of this task")
        self._check_baseline_of(task)
        items = sorted(self.candidate.items_of(task.name), key=lambda item: item.item)
        if not items:
            self._leave_out_whole(task, task)
            return None
        return Matched(task, metrics, (), tuple(items))

    def _both(self, theirs: Task, task: Task) -> Matched | None:
        where = f"task {task.name}"
        if theirs.version != task.version:
            raise UsageError(
                f"the runs used different versions of it ({theirs.version[:12]}, {task.version[:12]})",
                where=where, hint="Run both with the same version of the task.",
            )  # fmt: skip
        _check_metrics(theirs, task)
        if not any(not metric.is_of_pair for metric in task.metrics):
            return self._pair_only(task)
        self._check_baseline_of(task)
        first = {item.item: item for item in self.baseline.items_of(task.name)}
        second = {item.item: item for item in self.candidate.items_of(task.name)}
        shared = sorted(first.keys() & second.keys())
        if not shared:
            self._leave_out_whole(theirs, task)
            return None
        self._check_path(theirs, task)
        for item in shared:
            self._check_item(task, first[item], second[item])
        self._say_missing(task, theirs, first.keys() - second.keys(), second.keys() - first.keys())
        return Matched(
            task, task.metrics, tuple(first[item] for item in shared), tuple(second[item] for item in shared)
        )

    def _leave_out_whole(self, theirs: Task, task: Task) -> None:
        """No item was scored by both, for lack of room: whatever else was measured stands."""
        skipped = (*task.skipped, *theirs.skipped)
        if not skipped:
            raise UsageError(f"the runs share no item of it{self._why()}", where=f"task {task.name}")
        self.left_out.append(f"task {task.name}: no item was scored in both runs ({skipped[0].reason})")

    def _check_path(self, theirs: Task, task: Task) -> None:
        """Of our engine it must be one; what others do can't be chosen, and is said."""
        if theirs.path == task.path:
            return
        if all(run.candidate.get("kind") == "engine" for run in (self.baseline, self.candidate)):
            raise UsageError(
                f"the runs scored it by different paths ({theirs.path}, {task.path})", where=f"task {task.name}",
                hint="Run both with the same --path: else a difference is of the paths as well.",
            )  # fmt: skip
        self.notes.append(
            f"task {task.name}: {PATHS} ({theirs.path} by the baseline, {task.path} by the "
            "candidate), so that a difference may be theirs"
        )

    def _check_item(self, task: Task, first: Item, second: Item) -> None:
        where = f"task {task.name}, item {first.item}"
        if first.prompt_sha256 != second.prompt_sha256:
            raise UsageError(
                f"the runs asked different prompts (SHA-256 {first.prompt_sha256[:12]} and "
                f"{second.prompt_sha256[:12]}){self._why()}",
                where=where, hint="Only answers to the same prompts compare: run both with the same settings.",
            )  # fmt: skip
        if first.cluster != second.cluster:
            raise UsageError(f"in different clusters ({first.cluster}, {second.cluster})", where=where)
        for metric in task.metrics:
            a, b = first.weight(metric.name), second.weight(metric.name)
            if not metric.is_of_pair and a != b:
                raise UsageError(
                    f"different weights of {metric.name} ({a:g} and {b:g}): the runs count tokens differently",
                    where=where, hint="Figures per token of different tokenizers can't be compared.",
                )  # fmt: skip

    def _say_missing(self, task: Task, theirs: Task, lost: set[str], new: set[str]) -> None:
        skipped = {s.item: s.reason for s in (*theirs.skipped, *task.skipped)}
        both = {s.item for s in theirs.skipped} & {s.item for s in task.skipped}
        if both:
            one = min(both)
            self.notes.append(f"task {task.name}: {_count(both)} skipped in both runs ({one}: {skipped[one]})")
        for items, who in ((lost, "baseline"), (new, "candidate")):
            if items:
                one = min(items)
                why = f"; {one} was skipped in the other: {skipped[one]}" if one in skipped else self._why()
                self.left_out.append(f"task {task.name}: {_count(items)} only in the {who}'s run{why}")

    def _check_baseline_of(self, task: Task) -> None:
        """Metrics of the pair must have been measured against this very baseline, where the run says."""
        stated = self.candidate.settings.get("baseline")
        if stated is None or not any(metric.is_of_pair for metric in task.metrics):
            return
        if _identity(stated) != _identity(self.baseline.candidate):
            label = stated.get("label") if isinstance(stated, dict) else stated
            raise UsageError(
                f"it was measured against another baseline ({label}) than the one it is compared with "
                f"({self.baseline.label})",
                where=f"task {task.name}",
            )

    def _why(self) -> str:
        """The settings that differ, which is usually the reason."""
        a, b = self.baseline.settings, self.candidate.settings
        names = sorted((a.keys() | b.keys()) - {"versions", "baseline"})
        differ = [f"{name} ({a.get(name)!r}, {b.get(name)!r})" for name in names if a.get(name) != b.get(name)]
        return f"; the runs differ in {', '.join(differ)}" if differ else ""


def _check_metrics(theirs: Task, task: Task) -> None:
    first, second = (
        {m.name: (m.kind, m.is_higher_better) for m in t.metrics if not m.is_of_pair} for t in (theirs, task)
    )
    if first == second:
        return
    odd = sorted(name for name in first.keys() | second.keys() if first.get(name) != second.get(name))
    raise UsageError(f"the runs have different metrics of it: {', '.join(odd)}", where=f"task {task.name}")


def _identity(candidate: Any) -> Any:
    """What a candidate is, without what its tasks took."""
    if isinstance(candidate, Mapping):
        return {key: value for key, value in candidate.items() if key != "scored_tokens"}
    return candidate


def _count(items: set[str]) -> str:
    return f"{len(items):,} item{'' if len(items) == 1 else 's'}"


def _names(run: Run) -> str:
    return ", ".join(task.name for task in run.tasks) or "no tasks"
