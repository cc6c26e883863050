"""``quantkit eval`` as a library: from a model and wishes to a report that is kept.

tasks_of        names and a suite -> what ``session.Settings`` needs of them
measure_model   choose candidates, evaluate; runs and report can be kept then
evaluate_model  the same, kept
compare_runs    two runs from disk
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit.errors import ArtifactError

from .choice import Choice, choose
from .configuration import Configuration
from .session import Say, Settings, check, evaluate, fitting

if TYPE_CHECKING:
    from quantkit.artifact import Artifact
    from quantkit_serve.start.servable import Servable

    from .candidates.candidate import OnProgress
    from .report.report import Report
    from .run import Run

SUITE = "quick"  # if nothing is named


def tasks_of(suite: str | None, names: Sequence[str]) -> dict[str, Any]:
    """What ``Settings`` needs of tasks; the suite ``quick`` if nothing is named, which has fidelity.

    Raises:
        UsageError, EnvironmentProblem: see ``tasks.find_tasks``.
    """
    from .candidates.fidelity_task import FidelityText
    from .tasks import find_tasks
    from .tasks.find import FIDELITY, has_fidelity

    if suite is None and not names:
        suite = SUITE
    others = [name for name in names if name != FIDELITY]
    is_named = len(others) < len(names) or (suite not in (None, SUITE) and has_fidelity(suite))
    found = find_tasks(others, suite=suite) if others or suite is not None else []
    return {
        "tasks": tuple(found), "fidelity": FidelityText() if is_named or suite == SUITE else None,
        "is_fidelity_optional": not is_named,
    }  # fmt: skip


@dataclass(frozen=True)
class Measured:
    """A verdict, and what is still to be kept of it.

    Attributes:
        report: all that was found.
        keeping: each writes something and says what, in lines; EnvironmentProblem if the disk refuses.
    """

    report: Report
    keeping: tuple[Callable[[], list[str]], ...]


def evaluate_model(
    model: Servable, choice: Choice, settings: Settings, *, output: str | Path | None = None,
    is_attached: bool = True, on_progress: OnProgress = lambda _: None, say: Say = lambda _: None,
) -> Report:  # fmt: skip
    """Evaluate a model's configurations, and keep what was found: ``measure_model``, kept at once."""
    found = measure_model(
        model, choice, settings, output=output, is_attached=is_attached, on_progress=on_progress, say=say
    )
    for keep in found.keeping:
        for line in keep():
            say(line)
    return found.report


def measure_model(
    model: Servable, choice: Choice, settings: Settings, *, output: str | Path | None = None,
    is_attached: bool = True, on_progress: OnProgress = lambda _: None, say: Say = lambda _: None,
) -> Measured:  # fmt: skip
    """Evaluate a model's configurations; keeping what was found is the caller's, who has the verdict by then.

    Args:
        output: directory for the runs and the report.
        is_attached: they go into the artifact's attachments, too, if they are figures of its own views.

    Raises:
        QuantkitError: see ``choose`` and ``evaluate``; EnvironmentProblem if results can't be kept, before
            anything is measured.
    """
    from .report.attach import check_attachable
    from .report.keep import check_folder

    baseline, candidates = choose(model, choice)
    check(baseline, candidates, fitting(baseline, candidates, settings)[0])
    artifact = _artifact(model) if is_attached else None
    if artifact is not None:
        strangers = [c.label for c in candidates if c.identity().get("pair_id") != artifact.manifest.pair_id]
        if strangers:
            say(f"nothing is attached to the artifact: {strangers[0]} is no view of it")
            artifact = None
        else:
            check_attachable(artifact, artifact.manifest.pair_id)
    if output is not None:
        check_folder(Path(output))
    report = evaluate(baseline, candidates, settings, on_progress=on_progress, say=say)
    return Measured(report, tuple(_keeping(report, None if output is None else Path(output), artifact)))


def _keeping(report: Report, output: Path | None, artifact: Artifact | None) -> Iterator[Callable[[], list[str]]]:
    from .report.attach import attach
    from .report.keep import keep

    if output is not None:
        yield lambda: [f"wrote {keep(report, output)}"]
    if artifact is not None:
        yield lambda: [f"attached {folder}" for folder in attach(artifact, report).candidates]


def compare_runs(a: str | Path, b: str | Path, settings: Settings, *, allow_left_out: bool = False) -> Report:
    """The run ``b`` against the run ``a``.

    Raises:
        ArtifactError: one can't be read.
        UsageError: they can't be compared, with the reason.
    """
    from .compare import compare
    from .gate import check_gate, judge, margins_of
    from .report.report import Judged, Report
    from .run_file import read_run

    baseline, candidate = read_run(Path(a)), read_run(Path(b))
    if settings.gate is not None:
        check_gate(settings.gate, candidate.tasks, configurations_of(candidate))
    confidence = settings.gate.confidence if settings.gate else settings.confidence
    found = compare(
        baseline, candidate, margin=settings.margin, confidence=confidence, seed=settings.seed,
        allow_left_out=allow_left_out, margins=margins_of(settings.gate, candidate.tasks),
    )  # fmt: skip
    return Report((Judged(found, judge(settings.gate, found) if settings.gate else None),), settings.undecided)


def configurations_of(run: Run) -> list[Configuration]:
    """Of a run of our engine, as it states it; none of another one.

    Raises:
        ArtifactError: what it states is no configuration.
    """
    said = run.candidate.get("configuration")
    if run.candidate.get("kind") != "engine" or said is None:
        return []
    found = Configuration.of_json(said)
    if found is None:
        raise ArtifactError("states no configuration of our engine that this version knows", where=run.label)
    return [found]


def _artifact(model: Servable) -> Artifact | None:
    from quantkit.artifact import Artifact
    from quantkit.artifact.layout import MANIFEST

    return Artifact.open(model.folder) if (model.folder / MANIFEST).is_file() else None
