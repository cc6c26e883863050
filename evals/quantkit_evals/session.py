"""One evaluation: a baseline and candidates asked the same, compared item by item, judged by a gate.

All that can be refused is refused before a model is loaded: tasks, the gate's rules against what will be measured,
configurations that a model doesn't have, an artifact that can't take the results.

What is kept while it runs is every answer (``harness.cache``), so the same evaluation again goes on where it was
killed; fidelity, which needs all models at once and takes a minute or two, starts over.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from quantkit.errors import UsageError

from .comparison import Comparison
from .run import Metric, Run

if TYPE_CHECKING:
    from .candidates.candidate import Candidate, OnProgress
    from .candidates.fidelity_task import FidelityText
    from .gate import Gate
    from .report.report import Report, Undecided
    from .tasks import TaskSource

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Settings:
    """What is asked, and how it is judged.

    Attributes:
        tasks: what every candidate is asked, besides fidelity.
        fidelity: text on which candidates of our engine are compared with the baseline token by token; None: not.
        is_fidelity_optional: it is left out, and the report says so, where the baseline or a candidate can't give
            it: a suite has it, nobody named it. A gate that judges it needs it.
        gate: None: nothing is judged.
        margin: of non-inferiority, a fraction.
        confidence: of intervals; a gate judges by its own.
        undecided: whether an undecided required rule fails.
        limit: items of each task at most.
        seed: of few-shot examples, sampled answers and the bootstrap.
        is_chat: prompts are put into the model's chat template.
        cache: folder of kept answers; None keeps none.
    """

    tasks: tuple[TaskSource, ...]
    fidelity: FidelityText | None = None
    is_fidelity_optional: bool = False
    gate: Gate | None = None
    margin: float = 0.008
    confidence: float = 0.95
    undecided: Undecided = "fail"
    limit: int | None = None
    seed: int = 0
    is_chat: bool = False
    cache: Path | None = None


@dataclass(frozen=True, slots=True)
class Planned:
    """A task before it has run, as a gate's early check wants it."""

    name: str
    path: str
    metrics: tuple[Metric, ...]


def evaluate(
    baseline: Candidate | Run, candidates: Sequence[Candidate], settings: Settings, *,
    on_progress: OnProgress = lambda _: None, say: Say = lambda _: None,
) -> Report:  # fmt: skip
    """Run what is not a ``Run`` already, compare, judge.

    Args:
        baseline: the publisher's weights, or what they have scored already.
        candidates: at least one; labels differ.

    Raises:
        UsageError: tasks, gate and candidates don't fit together, or the runs can't be compared.
        ArtifactError, SourceError, UnsupportedError: a model.
        EnvironmentProblem: memory, a package, an endpoint.
    """
    from .compare import compare
    from .gate import judge, margins_of
    from .harness.cache import check_cache
    from .report.report import Judged, Report

    settings, left_out = fitting(baseline, candidates, settings)
    check(baseline, candidates, settings)
    check_cache(settings.cache if settings.tasks else None)
    for line in left_out:
        say(line)
    first, runs = _run_all(baseline, candidates, settings, on_progress, say)
    confidence = settings.gate.confidence if settings.gate else settings.confidence
    judged = []
    for run in runs:
        found: Comparison = compare(
            first, run, margin=settings.margin, confidence=confidence, seed=settings.seed,
            margins=margins_of(settings.gate, run.tasks),
            allow_left_out=True,  # no room in one of them, not asked of a kept run: the report says it
        )  # fmt: skip
        found = replace(found, left_out=found.left_out + left_out)
        judged.append(Judged(found, judge(settings.gate, found) if settings.gate else None))
    return Report(tuple(judged), settings.undecided)


def check(baseline: Candidate | Run, candidates: Sequence[Candidate], settings: Settings) -> None:
    """What ``evaluate`` refuses before it runs anything."""
    from .candidates.engine import EngineCandidate

    if not candidates:
        raise UsageError("there is nothing to evaluate but the baseline", where="--weights")
    if not settings.tasks and settings.fidelity is None:
        raise UsageError("there are no tasks", where="--task")
    labels = [baseline.label, *(one.label for one in candidates)]
    twice = next((label for label in labels if labels.count(label) > 1), None)
    if twice is not None:
        raise UsageError(f"{twice!r} is there twice", where="--weights", accepted="each configuration once")
    _check_names(settings)
    if isinstance(baseline, Run):
        _check_versions(baseline, settings)
        _check_alike(baseline, candidates, settings)
    if settings.fidelity is not None and (why := _no_fidelity(baseline, candidates)):
        raise UsageError(
            why, where="--task fidelity", accepted="a baseline and candidates of our own engine",
            hint="Name other tasks, and a gate that judges them.",
        )  # fmt: skip
    if settings.gate is not None:
        from .gate import check_gate

        for one in candidates:
            configuration = one.configuration if isinstance(one, EngineCandidate) else None
            tasks = planned(one, settings)
            if isinstance(baseline, Run):
                tasks = _had_by(baseline, tasks, settings.gate)
            check_gate(settings.gate, tasks, () if configuration is None else (configuration,))


def _had_by(baseline: Run, tasks: list[Planned], gate: Gate) -> list[Planned]:
    """Those that a kept run has; a required rule about another one could judge nothing in the end."""
    from .gate.refusal import applicable

    had = [task for task in tasks if baseline.task(task.name)]
    metrics = {
        f"{task.name}.{metric.name}": metric for task in tasks if task not in had for metric in task.metrics
    }
    lacking = [name for rule, name in applicable(gate, metrics) if rule.required]
    if lacking:
        raise UsageError(
            f"gate {gate.name} judges {', '.join(dict.fromkeys(lacking))}, which the baseline's run does not have",
            where="--baseline", accepted=", ".join(task.name for task in baseline.tasks) or "a run with tasks",
            hint="Evaluate the baseline again, or ask only what it was asked.",
        )  # fmt: skip
    return had


def _check_alike(baseline: Run, candidates: Sequence[Candidate], settings: Settings) -> None:
    """That a kept run was asked, and ran, as the candidates will: else its items would be refused in the end."""
    from .candidates.engine import EngineCandidate
    from .matching import other_arithmetic

    asked = {"seed": settings.seed, "chat": settings.is_chat} if settings.tasks else {}
    for name, now in asked.items():
        if name in baseline.settings and baseline.settings[name] != now:
            raise UsageError(
                f"the baseline's run has {name} {baseline.settings[name]}, this evaluation {now}",
                where="--baseline", hint=f"Give the same --{name}.",
            )  # fmt: skip
    for one in candidates:
        if isinstance(one, EngineCandidate) and (why := other_arithmetic(baseline, one.configuration)):
            raise UsageError(why, where=f"--baseline, {one.label}", hint="Evaluate with what the baseline had.")


def _check_names(settings: Settings) -> None:
    from .candidates.fidelity_task import TASK

    if settings.fidelity is not None and any(task.name == TASK for task in settings.tasks):
        raise UsageError(
            f"another task is called {TASK}, too", where="--task", hint="Give it another `name:` in its file."
        )


def _check_versions(baseline: Run, settings: Settings) -> None:
    """That what a kept run was asked is what will be asked; what else differs, its records show in the end."""
    for task in settings.tasks:
        theirs = baseline.task(task.name)
        if theirs is not None and theirs.version != task.version:
            raise UsageError(
                f"the baseline was asked another version of task {task.name} ({theirs.version[:12]}, now "
                f"{task.version[:12]})",
                where="--baseline", hint="Evaluate the baseline again.",
            )  # fmt: skip
    if settings.tasks and not any(baseline.task(task.name) for task in settings.tasks):
        raise UsageError(
            "the baseline has none of the tasks", where="--baseline",
            accepted=", ".join(task.name for task in baseline.tasks),
        )  # fmt: skip


def fitting(
    baseline: Candidate | Run, candidates: Sequence[Candidate], settings: Settings
) -> tuple[Settings, tuple[str, ...]]:
    """The settings without fidelity where it is optional and can't be had, and what is left out, as a sentence."""
    if settings.fidelity is None or not settings.is_fidelity_optional or not settings.tasks:
        return settings, ()
    if settings.gate is not None and _judges_fidelity(settings.gate):
        return settings, ()
    why = _no_fidelity(baseline, candidates)
    return (replace(settings, fidelity=None), (f"task fidelity: {why}",)) if why else (settings, ())


def _judges_fidelity(gate: Gate) -> bool:
    """By name, or by a required pattern that fits."""
    from .candidates.fidelity_task import METRICS, TASK
    from .gate.refusal import applicable

    metrics = {f"{TASK}.{metric.name}": metric for metric in METRICS}
    return any(rule.required or not rule.is_pattern for rule, _ in applicable(gate, metrics))


def _no_fidelity(baseline: Candidate | Run, candidates: Sequence[Candidate]) -> str | None:
    """Why there can be none; None if there can."""
    from .candidates.engine import EngineCandidate

    for one in (baseline, *candidates):
        if not isinstance(one, EngineCandidate):
            return f"it needs the logits of every token, which {one.label} does not give"
    return None


def planned(candidate: Candidate, settings: Settings) -> list[Planned]:
    """The tasks of a candidate, each with the path that its figures will be made by."""
    found = [
        Planned(task.name, "generate" if task.paths == ("generate",) else candidate.path, task.metrics)
        for task in settings.tasks
    ]
    if settings.fidelity is not None:
        from .candidates.fidelity_task import METRICS, TASK

        found.append(Planned(TASK, candidate.path, METRICS))
    return found


def _run_all(
    baseline: Candidate | Run,
    candidates: Sequence[Candidate],
    settings: Settings,
    on_progress: OnProgress,
    say: Say,
) -> tuple[Run, list[Run]]:
    """Fidelity first: it takes least, and what is wrong with a model shows in it."""
    from .candidates.engine import EngineCandidate

    records = []
    if settings.fidelity is not None and isinstance(baseline, EngineCandidate):
        from .candidates.fidelity_task import fidelity_task

        own = [one for one in candidates if isinstance(one, EngineCandidate)]
        say("fidelity: every candidate beside the baseline, token by token")
        records = fidelity_task(baseline, own, text=settings.fidelity, on_progress=on_progress)
    window = _window((baseline, *candidates), settings)
    first = baseline if isinstance(baseline, Run) else _run(baseline, settings, window, on_progress, say)
    runs = [_run(one, settings, window, on_progress, say) for one in candidates]
    if records:
        runs = [found.added_to(run, first) for found, run in zip(records[1:], runs, strict=True)]
        first = records[0].added_to(first)
    return first, runs


def _window(everyone: Sequence[Candidate | Run], settings: Settings) -> int | None:
    """Tokens at a time of long texts: as many as all take, since figures of other windows don't compare. A kept
    run has had its own."""
    from .harness.run_tasks import is_windowed

    if not any(is_windowed(task.lm_eval_task()) for task in settings.tasks):
        return None
    taken = [one.settings.get("window") if isinstance(one, Run) else one.max_length for one in everyone]
    return min((tokens for tokens in taken if isinstance(tokens, int) and tokens > 1), default=None)


def _run(candidate: Candidate, settings: Settings, window: int | None, on_progress: OnProgress, say: Say) -> Run:
    from .harness.run_tasks import run_tasks

    if not settings.tasks:  # fidelity alone
        return Run(candidate.identity(), {"seed": settings.seed}, (), ())
    say(f"{candidate.label}: {', '.join(task.name for task in settings.tasks)}")
    return run_tasks(
        candidate, settings.tasks, limit=settings.limit, seed=settings.seed, cache=settings.cache,
        on_progress=on_progress, is_chat=settings.is_chat, window=window,
    )  # fmt: skip
