"""The library's surface: everything the command line does, as functions.

Ten names are the promise (``quantkit.__all__``): open, plan, convert, verify, inspect, diff, Artifact, Checkpoint,
Plan, Recipe; ``errors`` is the module of what they raise. The command line uses this module and nothing below it,
except to show results. Functions import what they need when called, because the command line imports this module
to complete a name in the shell.

What a source may be called: see ``quantkit.naming``.
"""

from __future__ import annotations

import builtins
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import EnvironmentProblem, UsageError
from .naming import Resolved as Resolved
from .naming import default_output as default_output
from .naming import recipe_names as recipe_names
from .naming import resolve as resolve
from .naming import source_names as source_names

if TYPE_CHECKING:
    from .artifact import Artifact as Artifact
    from .artifact import VerifyReport
    from .artifact.folds import Folds
    from .artifact.progress import OnProgress
    from .calibration.ranks import Ranks
    from .calibration.samples import CalibrationSet
    from .checkpoint import Checkpoint as Checkpoint
    from .inspection.conversions import Comparison
    from .inspection.diff import Difference
    from .inspection.diff import OnProgress as OnDiffProgress
    from .inspection.inspect import Inspection
    from .inspection.stats import TensorStatistics
    from .plan import Plan as Plan
    from .recipe import Recipe as Recipe

PathLike = str | os.PathLike[str]
_HOME = {"Artifact": "artifact", "Checkpoint": "checkpoint", "Plan": "plan", "Recipe": "recipe"}


def open(source: PathLike, *, revision: str | None = None) -> Checkpoint:
    """Open a checkpoint; index and headers are read, no data.

    Args:
        source: see ``quantkit.naming``.
        revision: branch, tag or commit of a Hub repository.

    Raises:
        UsageError: there is nothing of this name.
        SourceError: the checkpoint is incomplete, corrupt or of a kind that cannot be read.
        EnvironmentProblem: disk, permissions or network.
    """
    from .checkpoint import open_checkpoint

    found = resolve(source, revision=revision)
    return open_checkpoint(found.source, revision=found.revision)


def plan(
    source: PathLike | Checkpoint,
    *,
    recipe: PathLike | Recipe | None = None,
    revision: str | None = None,
    **options: Any,
) -> Plan:
    """Decide everything about a conversion and do nothing yet.

    Args:
        source: a checkpoint, or what ``open`` takes.
        recipe: a recipe, its bundled name or a YAML file; None chooses the one written for the source, else the
            default (routed experts to INT4 in groups of 32).
        options: fields of the recipe to set, by their own name: ``group_size=64``, ``method="rtn"``,
            ``rest="bf16"``.

    Raises:
        RecipeError: unknown recipe, unknown option, or a recipe that does not fit the model.
        SourceError, UnsupportedError: the source cannot be read, or not be converted as asked.
    """
    from .plan import build_plan
    from .recipe import default_recipe, find_recipe, load_recipe

    if isinstance(source, (str, os.PathLike)):
        found = resolve(source, revision=revision)
        with open(found.source, revision=found.revision) as checkpoint:
            return plan(checkpoint, recipe=recipe if recipe is not None else found.recipe, **options)
    if recipe is None:
        recipe = find_recipe(source.label) or default_recipe()
    elif isinstance(recipe, (str, os.PathLike)):
        recipe = load_recipe(recipe if isinstance(recipe, str) else Path(recipe))
    return build_plan(source, recipe.with_options(**options))


def save_plan(plan: Plan, path: PathLike) -> None:
    """Write a plan down for ``load_plan``; EnvironmentProblem when the file cannot be written."""
    from .plan import write_plan

    write_plan(plan, Path(path))


def load_plan(path: PathLike, *, checkpoint: Checkpoint | None = None) -> tuple[Plan, Checkpoint]:
    """Read a plan that ``save_plan`` wrote, with its source opened (the caller closes it) or given.

    Raises:
        RecipeError: not a plan, its source has changed, or planning it again gives another plan.
        SourceError, EnvironmentProblem: its source cannot be opened.
    """
    from .plan import load_plan as load

    return load(Path(path), checkpoint=checkpoint)


def plan_document(
    plan: Plan,
    checkpoint: Checkpoint,
    *,
    gpu: str | None = None,
    gpu_memory: int | None = None,
    gpus: int | None = None,
    memory_fraction: float | None = None,
    output: PathLike | None = None,
    jobs: int | None = None,
    max_memory: int | None = None,
) -> dict[str, Any]:
    """Everything that can be said of a plan before any work, JSON-ready: see ``quantkit.plan.summary``.

    Raises:
        UsageError: an option that cannot work.
        EnvironmentProblem: ``max_memory`` is not enough, or the kernels that were asked for are not there.
    """
    from .plan.capacity import DEFAULT_FRACTION
    from .plan.summary import summarise

    if gpu is None and gpu_memory is None and (gpus is not None or memory_fraction is not None):
        given = "--gpus" if gpus is not None else "--memory-fraction"
        raise UsageError("there is no GPU to count with", where=given, hint="Add --gpu or --gpu-memory.")
    check_kernels()
    return summarise(
        plan, checkpoint, gpu=gpu, gpu_memory=gpu_memory, gpus=gpus,
        memory_fraction=DEFAULT_FRACTION if memory_fraction is None else memory_fraction,
        out_dir=output, jobs=jobs, max_memory=max_memory,
    )  # fmt: skip


def unloadable(plan: Plan, checkpoint: Checkpoint) -> tuple[str, ...]:
    """Warnings about views of a plan that no engine can load; ``verify`` finds the same in the artifact."""
    from .plan.summary import unloadable as judge

    return judge(plan, checkpoint)


def convert(
    plan: Plan | PathLike,
    output: PathLike,
    *,
    checkpoint: Checkpoint | None = None,
    jobs: int | None = None,
    max_memory: int | None = None,
    consume: bool = False,
    calibration: CalibrationSet | None = None,
    on_progress: OnProgress | None = None,
    ranks: Ranks | None = None,
    device: str = "cpu",
) -> Artifact:
    """Carry out a plan: write the artifact ``output``, or finish one that was interrupted.

    Args:
        plan: a plan, or a source (then planned with its recipe).
        checkpoint: the plan's source if it is open already; else it is opened by the label in the plan.
        jobs: worker threads; None: all usable cores.
        max_memory: bytes of memory for the work.
        consume: delete each downloaded shard of a Hub source once its output is verified; not with a calibrated
            method.
        calibration: what a calibrated method learns from instead of what the recipe names
            (``quantkit.calibration.samples``).
        on_progress: called with ``Progress`` events, from one thread at a time.
        ranks: what ``together`` gave to process 0 of several.
        device: where calibration computes: ``cpu``, ``cuda`` or ``cuda:N``.

    Raises:
        UsageError: ``output`` is something else's, or lies inside the source; the calibration text cannot be used.
        SourceError: the source is damaged or not the one that was planned; to be calibrated, and without a
            tokenizer or of a kind that transformers does not know.
        EnvironmentProblem: disk full, no permission, not enough memory, or no transformers to calibrate with.
        GateFailed: a weight is over the recipe's quality budget.
        KeyboardInterrupt: passed on; what is written so far can be resumed by the same call.
    """
    from .convert import convert as run

    check_kernels()
    made = plan_source(plan) if isinstance(plan, (str, os.PathLike)) else plan
    settings: dict[str, Any] = {
        "jobs": jobs, "max_memory": max_memory, "consume": consume, "calibration": calibration,
    }  # fmt: skip
    settings |= {"device": device} if ranks is None else {"device": device, "ranks": ranks}
    if checkpoint is not None:
        return run(made, checkpoint, output, on_progress=on_progress, **settings)
    with open(made.source.label, revision=made.source.revision) as opened:
        return run(made, opened, output, on_progress=on_progress, **settings)


def together() -> AbstractContextManager[Ranks]:
    """The processes that torchrun or ``accelerate launch`` started, for the length of a block: process 0
    converts, the others assist, an error in one ends all; see ``quantkit.calibration.together``.

    Raises:
        EnvironmentProblem: the others did not come, or one of them ended.
        SaidElsewhere: the run failed, and another process says why.
    """
    from .calibration.together import together as join

    return join()


def assist(
    plan: Plan, checkpoint: Checkpoint, ranks: Ranks, *, jobs: int | None = None, max_memory: int | None = None,
    device: str = "cpu",
) -> None:  # fmt: skip
    """Help process 0 of several, which runs ``convert`` with the same plan.

    Raises:
        UsageError: the processes were not given the same.
        SourceError, EnvironmentProblem: as of ``convert``.
    """
    from .convert import assist as run

    check_kernels()
    run(plan, checkpoint, ranks, jobs=jobs, max_memory=max_memory, device=device)


def describe_result(artifact: Artifact) -> dict[str, Any]:
    """What a conversion made, JSON-ready."""
    manifest = artifact.manifest
    return {
        "artifact": str(artifact.path),
        "was_complete": artifact.was_complete,
        "pair_id": manifest.pair_id,
        "source": manifest.source.model_dump(mode="json", exclude={"files"}),
        "views": {name: view.model_dump(mode="json") for name, view in manifest.views.items()},
        "plan_amendments": [amendment.to_json() for amendment in manifest.plan_amendments],
    }


def verify(
    path: PathLike,
    *,
    quick: bool = False,
    against: PathLike | Checkpoint | None = None,
    on_progress: OnProgress | None = None,
) -> VerifyReport:
    """Check an artifact; findings are in the report, not exceptions.

    Args:
        quick: headers and manifest only, no data.
        against: also compare with this source.

    Raises:
        ArtifactError: not an artifact at all.
    """
    from .artifact import verify_artifact

    check_kernels()
    if isinstance(against, (str, os.PathLike)):
        with open(against) as checkpoint:
            return verify_artifact(path, quick=quick, against=checkpoint, on_progress=on_progress)
    return verify_artifact(path, quick=quick, against=against, on_progress=on_progress)


def inspect(source: PathLike | Checkpoint | Artifact, *, revision: str | None = None) -> Inspection:
    """Describe a checkpoint, view or artifact from its headers; see ``quantkit.inspection.inspect``."""
    from .artifact import Artifact
    from .inspection.inspect import describe_artifact, describe_checkpoint, is_artifact

    if isinstance(source, Artifact):
        return describe_artifact(source)
    if not isinstance(source, (str, os.PathLike)):
        return describe_checkpoint(source)
    if is_artifact(source):
        with Artifact.open(source) as artifact:
            return describe_artifact(artifact)
    with open(source, revision=revision) as checkpoint:
        return describe_checkpoint(checkpoint)


def tensor_statistics(source: PathLike, name: str, *, revision: str | None = None) -> TensorStatistics:
    """Statistics and histogram of one tensor, of an artifact: of its decode view; see ``inspection.stats``."""
    from .inspection.stats import tensor_statistics as statistics

    check_kernels()
    with open_view(source, revision=revision) as checkpoint:
        return statistics(checkpoint, name)


def diff(
    a: PathLike, b: PathLike, *, quick: bool = False, on_progress: OnDiffProgress | None = None
) -> Difference:
    """Compare two checkpoints or views tensor by tensor (an artifact stands for its decode view).

    Raises:
        UsageError, SourceError: one of them is not there or damaged.
    """
    from .inspection.diff import compare

    if not quick:
        check_kernels()
    with _open_side(a) as (first, first_folds), _open_side(b) as (second, second_folds):
        return compare(first, second, quick=quick, on_progress=on_progress, folds=(first_folds, second_folds))


def report(path: PathLike) -> dict[str, Any]:
    """Errors, and tokens of calibrated experts, of a conversion, JSON-ready: what its report.json holds.

    Raises:
        ArtifactError: not an artifact, or its records are damaged.
    """
    from .artifact import Artifact
    from .inspection.conversions import report_conversion

    with Artifact.open(path) as artifact:
        return report_conversion(artifact)


def compare(a: PathLike, b: PathLike) -> Comparison:
    """Compare the errors of two conversions of one source; see ``quantkit.inspection.conversions``.

    Raises:
        UsageError: they were made from different tensors.
        ArtifactError: one is not an artifact, or its records are damaged.
    """
    from .artifact import Artifact
    from .inspection.conversions import compare_conversions

    with Artifact.open(a) as first, Artifact.open(b) as second:
        return compare_conversions(first, second)


@contextmanager
def open_view(source: PathLike, *, revision: str | None = None) -> Iterator[Checkpoint]:
    """``open``, and an artifact's directory stands for its decode view."""
    from .artifact import Artifact
    from .inspection.inspect import is_artifact

    if is_artifact(source):
        with Artifact.open(source) as artifact:
            yield artifact.decode.tensors
        return
    with open(source, revision=revision) as checkpoint:
        yield checkpoint


@contextmanager
def _open_side(source: PathLike) -> Iterator[tuple[Checkpoint, Folds | None]]:
    """``open_view`` with the folds of a decode view, which the view itself does not hold."""
    from .artifact import Artifact
    from .artifact.layout import DECODE
    from .inspection.inspect import is_artifact

    path = Path(source)
    artifact_of = path if is_artifact(source) else path.parent if path.name == DECODE else None
    if artifact_of is not None and is_artifact(artifact_of):
        with Artifact.open(artifact_of) as artifact:
            yield artifact.decode.tensors, artifact.folds
        return
    with open(source) as checkpoint:
        yield checkpoint, None


def plan_source(source: PathLike) -> Plan:
    """``plan`` with the recipe that goes with the source; for ``convert``, whose argument hides that name."""
    return plan(source)


def load_recipe(name_or_path: str) -> Recipe:
    """A bundled recipe or a YAML file; RecipeError with all problems at once."""
    from .recipe import load_recipe as load

    return load(name_or_path)


def recipe_yaml(recipe: Recipe) -> str:
    """A recipe as YAML with every field written out; ``load_recipe`` reads it back to the same recipe."""
    import yaml

    text: str = yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
    return text.rstrip("\n")


def recipe_schema() -> dict[str, Any]:
    """JSON Schema of recipes."""
    from .recipe.load import json_schema

    return json_schema()


def check_kernels() -> None:
    """Choose the kernels now, so that a wrong setting is an error before any work.

    Raises:
        EnvironmentProblem: QUANTKIT_KERNELS or QUANTKIT_CPU_ISA asks for what does not exist.
    """
    import quantkit_kernels

    try:
        quantkit_kernels.backend()
    except ValueError as error:
        hint = "Unset the variable to let quantkit choose; `quantkit env` shows what there is."
        raise EnvironmentProblem(str(error), where="kernels", hint=hint) from error


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return builtins.getattr(import_module(f"quantkit.{_HOME[name]}"), name)
