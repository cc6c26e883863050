"""Carrying out a plan, in one process or in several."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from .kernels import check_kernels
from .planning import plan_source
from .sources import PathLike, open

if TYPE_CHECKING:
    from ..artifact import Artifact
    from ..artifact.progress import OnProgress
    from ..calibration.ranks import Ranks
    from ..calibration.samples import CalibrationSet
    from ..checkpoint import Checkpoint
    from ..plan import Plan


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
    from ..convert import convert as run

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
    from ..calibration.together import together as join

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
    from ..convert import assist as run

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
