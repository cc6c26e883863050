"""``convert``: the checks before any work, the execution, the finish."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from ..artifact.artifact import Artifact
from ..artifact.attachments import write_first_attachments
from ..artifact.durable import disk_errors
from ..artifact.layout import DECODE, PREFILL
from ..calibration.device import CPU, label_of, open_device
from ..calibration.ranks import ALONE, Ranks
from ..errors import Interrupted, UsageError
from ..plan.memory import choose_budget, widest_row_block
from .calibrated import Calibration
from .calibrated_jobs import is_calibrated
from .calibration_state import FOLDER
from .executor import Executor
from .finish import Finisher
from .foreign import ForeignCalibration
from .progress import OnProgress
from .quality import QualityBudget
from .sources import SourceFiles
from .target import (
    ENGINE,
    Target,
    check_place,
    check_space,
    finished_artifact,
    open_target,
    refuse_overlap,
    tool_version,
)

if TYPE_CHECKING:
    from ..calibration.samples import CalibrationSet
    from ..checkpoint import Checkpoint
    from ..plan import Plan
    from ..plan.fate import Shard

_SLACK = 16 << 20  # manifest, records, reports


def convert(
    plan: Plan,
    checkpoint: Checkpoint,
    out_dir: str | os.PathLike[str],
    *,
    jobs: int | None = None,
    max_memory: int | None = None,
    consume: bool = False,
    calibration: CalibrationSet | None = None,
    on_progress: OnProgress | None = None,
    ranks: Ranks = ALONE,
    device: str = CPU,
) -> Artifact:
    """Execute a plan; continues what an interrupted run of the same plan left in ``<out_dir>.partial/``.

    Args:
        plan: what to do; made from this very checkpoint.
        checkpoint: the source.
        out_dir: a new or empty directory, or one that holds the finished result of the same plan (then nothing is
            done and ``artifact.was_complete`` is True).
        jobs: worker threads; None for one per core, at most 8. Changes no byte.
        max_memory: upper bound in bytes of resident memory; fewer workers and smaller tiles. Changes no byte.
        consume: delete a Hub source's files from the cache when they are placed and no longer needed.
        calibration: what a calibrated method learns from; None for what the recipe names.
        on_progress: called from worker threads, one call at a time.
        ranks: the processes that calibrate together, of which this is number 0; the others ``assist``.
        device: where calibration computes: ``cpu``, ``cuda`` or ``cuda:N``; see ``calibration/device.py``.

    Raises:
        UsageError: the target can't be used, or options that exclude one another.
        UnsupportedError: a calibrated method, and transformers does not know the model.
        SourceError: NaN codes or scales in the source; it changed while being read; activations that overflow.
        ArtifactError: an unfinished conversion of another plan is in the way.
        EnvironmentProblem: disk, memory or permissions; a run after it resumes.
        GateFailed: a weight is over the recipe's quality budget and may not be kept; a run after it fails at once.
        Interrupted: Ctrl-C; resumable.
    """
    out = Path.cwd() / out_dir
    with disk_errors(out):
        if out.is_symlink() and out.exists():  # the working directory must lie beside the real place to be renamed
            out = out.resolve()
    mode = plan.recipe.prefill.place
    _check_options(plan, checkpoint, mode, consume)
    if not check_place(out, plan):  # before anything that takes seconds
        refuse_overlap(out, checkpoint)
    engine = _engine(plan)
    samples = _samples(plan, checkpoint, calibration)
    digest = None if samples is None else samples.digest
    device, label = _device(device, engine, samples)
    if ranks.size > 1:
        ranks.agree(_facts(plan, digest, label))
    finished = finished_artifact(out, plan, digest, engine)
    if finished is not None:
        return finished
    if samples is not None:
        _check_model(checkpoint)
    budget = choose_budget(jobs, max_memory, _widest_block(plan, checkpoint), _backend())
    target = open_target(out, plan, checkpoint, digest, engine, label)
    try:
        quality = QualityBudget(plan, checkpoint, target.journal)
        shards: tuple[Shard, ...] = (*plan.prefill, *quality.plan.decode, *quality.plan.folds)
        view = PREFILL if plan.prefill_is_source else DECODE if plan.decode_is_source else None
        sources = SourceFiles(
            checkpoint, shards, target.journal,
            view_dir=target.work / view if view else None, mode=mode, consume=consume,
        )  # fmt: skip
        calibrated: Calibration | ForeignCalibration | None = None
        if samples is not None and engine != ENGINE:
            calibrated = ForeignCalibration(plan, checkpoint, target, samples, max_memory)
        elif samples is not None:
            calibrated = Calibration(
                plan, checkpoint, target, samples, budget.workers, max_memory, ranks, device,
            )  # fmt: skip
        executor = Executor(shards, checkpoint, target, sources, budget, quality, calibrated)
        executor.restore()
        needed = _space_needed(quality.plan, checkpoint, sources)
        needed += calibrated.space_needed() if calibrated else 0
        check_space(target.work, needed, besides=sources.placed_paths())
        executor.run(on_progress)
        shutil.rmtree(target.work / FOLDER, ignore_errors=True)
        sources.check_unchanged()
        return _finish(plan, executor, target, engine, label or CPU)
    except KeyboardInterrupt:
        raise Interrupted(
            "stopped by the user", where=str(target.work),
            hint="Run the same command again: it resumes where it stopped",
        ) from None  # fmt: skip
    finally:
        target.close()


def assist(
    plan: Plan, checkpoint: Checkpoint, ranks: Ranks, *, jobs: int | None = None, max_memory: int | None = None,
    calibration: CalibrationSet | None = None, device: str = CPU,
) -> None:  # fmt: skip
    """Help process 0, which runs ``convert`` with the same plan, to calibrate; returns when it needs no more help.

    Args:
        ranks: of this process.
        device: of this process; the same kind as process 0's.

    Raises:
        UsageError: another plan, calibration set or kind of machine than process 0's.
        SourceError, EnvironmentProblem: as of ``convert``.
    """
    samples = _samples(plan, checkpoint, calibration)
    engine = _engine(plan)
    device, label = _device(device, engine, samples)
    ranks.agree(_facts(plan, None if samples is None else samples.digest, label))
    if samples is None or engine != ENGINE:
        return
    budget = choose_budget(jobs, max_memory, _widest_block(plan, checkpoint), _backend())
    calibrated = Calibration(plan, checkpoint, None, samples, budget.workers, max_memory, ranks, device)
    if ranks.called():
        calibrated.assist()


def _device(name: str, engine: str, samples: CalibrationSet | None) -> tuple[str, str | None]:
    """The device of this process and its label, refused where nothing would run on it."""
    if name != CPU and (samples is None or engine != ENGINE):
        what = "nothing is calibrated here" if samples is None else f"{engine} chooses its device itself"
        raise UsageError(f"{what}; only calibration computes on a device", where=f"--device {name}",
                         accepted="cpu", hint="Omit the option")  # fmt: skip
    device = open_device(name)
    return device, label_of(device)


def _facts(plan: Plan, calibration_sha256: str | None, device: str | None) -> dict[str, object]:
    """What all processes must have in common for the result to be that of one."""
    facts: dict[str, object] = {"quantkit": tool_version(), "plan": plan.plan_id}
    if calibration_sha256 is not None:
        import torch

        facts |= {"calibration": calibration_sha256, "device": device or CPU, "torch": torch.__version__}
        facts["CPU"] = torch.backends.cpu.get_cpu_capability()
    return facts


def _finish(plan: Plan, executor: Executor, target: Target, engine: str, device: str) -> Artifact:
    manifest = Finisher(executor, engine).run()
    write_first_attachments(
        target.work, manifest, executor.checkpoint, plan_id=plan.plan_id, recipe_repo=plan.recipe.source.repo,
        device=device,
    )  # fmt: skip
    artifact = target.publish()
    if plan.recipe.prefill.place == "link" and executor.sources.view_dir is not None:
        artifact.warnings = (
            "the publisher's files are hard links: an edit of the source in place would change the artifact "
            "(verify finds it)",
        )
    return artifact


def _engine(plan: Plan) -> str:
    """What quantizes, as manifest and journal state it; told first where it is not installed."""
    if plan.recipe.engine == ENGINE:
        return ENGINE
    from .llmcompressor import engine_label

    return engine_label(plan.recipe.decode.method)


def _samples(plan: Plan, checkpoint: Checkpoint, given: CalibrationSet | None) -> CalibrationSet | None:
    """The calibration set of a plan with calibrated jobs; its digest is part of what the result is known by."""
    section = plan.recipe.calibration
    if section is None or not any(is_calibrated(job) for job in plan.jobs("decode")):
        return None
    if given is not None:
        return given
    from ..calibration.samples import calibration_set

    return calibration_set(section, checkpoint)


def _check_model(checkpoint: Checkpoint) -> None:
    from ..calibration.model import check_model

    check_model(checkpoint)


def _check_options(plan: Plan, checkpoint: Checkpoint, mode: str, consume: bool) -> None:
    if plan.source.fingerprint != checkpoint.fingerprint:
        raise UsageError(
            f"the plan was made from another checkpoint than {checkpoint.label}", where="plan",
            hint="Make the plan anew from this source",
        )  # fmt: skip
    if not consume:
        return
    if checkpoint.kind != "hub":
        raise UsageError("only downloads from a hub are deleted", where="--consume",
                         hint=f"{checkpoint.label} is a {checkpoint.kind} source: omit the option")  # fmt: skip
    if mode == "reference":
        raise UsageError("would delete the only copy that the artifact refers to", where="--consume",
                         accepted="--prefill auto, link or copy")  # fmt: skip
    if plan.recipe.calibration is not None:
        raise UsageError("a calibrated method reads the source's files until the end", where="--consume",
                         accepted="--method mse or rtn", hint="Omit one of the two")  # fmt: skip


def _widest_block(plan: Plan, checkpoint: Checkpoint) -> int:
    weights = {weight.weight.name: weight for weight in checkpoint.weights().values()}
    return widest_row_block((job for shard in plan.shards for job in shard.jobs), weights)


def _backend() -> str:
    import quantkit_kernels as kernels

    return kernels.backend().name


def _space_needed(plan: Plan, checkpoint: Checkpoint, sources: SourceFiles) -> int:
    # Everything at its final size; what the working directory holds already is deducted by check_space.
    shards = sum(shard.file_nbytes for shard in plan.shards)
    side = 2 * sum(side.nbytes for side in checkpoint.side_files)
    return shards + side + _SLACK + sources.space_needed()
