"""Plans: made, kept, read back and described."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UsageError
from ..naming import resolve
from .kernels import check_kernels
from .sources import PathLike, open

if TYPE_CHECKING:
    from ..checkpoint import Checkpoint
    from ..plan import Plan
    from ..recipe import Recipe


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
    from ..plan import build_plan
    from ..recipe import default_recipe, find_recipe, load_recipe

    if isinstance(source, (str, os.PathLike)):
        found = resolve(source, revision=revision)
        with open(found.source, revision=found.revision) as checkpoint:
            return plan(checkpoint, recipe=recipe if recipe is not None else found.recipe, **options)
    if recipe is None:
        recipe = find_recipe(source.label) or default_recipe()
    elif isinstance(recipe, (str, os.PathLike)):
        recipe = load_recipe(recipe if isinstance(recipe, str) else Path(recipe))
    return build_plan(source, recipe.with_options(**options))


def plan_source(source: PathLike) -> Plan:
    """``plan`` with the recipe that goes with the source; for ``convert``, whose argument hides that name."""
    return plan(source)


def save_plan(plan: Plan, path: PathLike) -> None:
    """Write a plan down for ``load_plan``; EnvironmentProblem when the file cannot be written."""
    from ..plan import write_plan

    write_plan(plan, Path(path))


def load_plan(path: PathLike, *, checkpoint: Checkpoint | None = None) -> tuple[Plan, Checkpoint]:
    """Read a plan that ``save_plan`` wrote, with its source opened (the caller closes it) or given.

    Raises:
        RecipeError: not a plan, its source has changed, or planning it again gives another plan.
        SourceError, EnvironmentProblem: its source cannot be opened.
    """
    from ..plan import load_plan as load

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
    from ..plan.capacity import DEFAULT_FRACTION
    from ..plan.summary import summarise

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
    from ..plan.summary import unloadable as judge

    return judge(plan, checkpoint)
