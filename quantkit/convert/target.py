"""Where a conversion writes: refusals before any work, the working directory, the last rename.

Work happens in ``<out>.partial/`` beside the target; the target appears by one rename, complete, as the last
step. So a directory without the suffix is always a finished artifact or none of ours.
"""

from __future__ import annotations

import contextlib
import errno
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..artifact.artifact import Artifact
from ..artifact.canonical import parse_json
from ..artifact.durable import disk_errors, fsync_dir
from ..artifact.journal import Journal
from ..artifact.layout import (
    ATTACHMENTS,
    FOLDS,
    JOURNAL,
    MANIFEST,
    NUMERICS_VERSION,
    PARTIAL_SUFFIX,
    PROVENANCE,
    VIEWS,
    format_version,
)
from ..errors import ArtifactError, EnvironmentProblem, UsageError
from ..units import format_bytes

if TYPE_CHECKING:
    from ..checkpoint import Checkpoint
    from ..plan import Plan


ENGINE = "quantkit"


@dataclass(frozen=True, slots=True)
class Target:
    """An open working directory and the place it will be renamed to."""

    out: Path
    work: Path
    journal: Journal

    def close(self) -> None:
        """Give up the lock; a working directory in which nothing was done goes away."""
        if self.work.exists() and not self.journal.has_work:
            with contextlib.suppress(OSError):  # files begun stay for the next run, and so does the directory
                for folder in (*VIEWS, FOLDS):
                    if (self.work / folder).exists():
                        (self.work / folder).rmdir()
                (self.work / JOURNAL).unlink()
                self.work.rmdir()
        self.journal.close()

    def publish(self) -> Artifact:
        """Rename the working directory to its final name; everything in it is durable by now."""
        with disk_errors(self.out):
            fsync_dir(self.work)
            self.work.rename(self.out)
            fsync_dir(self.out.parent)
            # Deleted only now: a crash before the rename must find the journal, one after it does no harm.
            (self.out / JOURNAL).unlink(missing_ok=True)
        return Artifact.open(self.out)


def tool_version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("quantkit")
    except PackageNotFoundError:  # run from a source tree that was never installed
        return "0+unknown"


def check_place(out: Path, plan: Plan) -> bool:
    """Whether a finished artifact of this plan is there; what can be refused without a look at anything else.

    Raises:
        UsageError: something else is there.
        EnvironmentProblem: there can't be a directory.
    """
    if out.name.endswith(PARTIAL_SUFFIX):
        raise UsageError(
            f"ends in {PARTIAL_SUFFIX}, as unfinished conversions do", where=str(out),
            hint="Choose another output with -o",
        )  # fmt: skip
    with disk_errors(out):
        is_there = out.exists()
    if out.is_symlink() and not is_there:
        raise UsageError("is a symbolic link that leads nowhere", where=str(out))
    if not is_there:
        above = next((path for path in out.parents if path.exists()), None)
        if above is not None and not above.is_dir():
            raise EnvironmentProblem(f"cannot write here: {above} is a file, not a directory", where=str(out),
                                     hint="Choose another output with -o")  # fmt: skip
        return False
    if not out.is_dir():
        raise UsageError("is a file", where=str(out), accepted="a new or empty directory")
    with disk_errors(out):
        names = {entry.name for entry in out.iterdir()}
    if not names:
        if _is_current(out):
            raise UsageError(
                "is the current directory, which the finished artifact would replace under your feet",
                where=str(out), hint="Run it from the parent directory, with -o NAME",
            )  # fmt: skip
        return False
    if MANIFEST not in names:
        raise UsageError(
            "is not empty and holds no artifact", where=str(out), accepted="a new or empty directory",
            hint="Choose another output with -o",
        )  # fmt: skip
    if _plan_of(out) != plan.plan_id:
        raise UsageError(
            "holds a finished artifact of another plan", where=str(out), accepted="a new or empty directory",
            hint="Choose another output with -o, or delete it first",
        )  # fmt: skip
    return True


def finished_artifact(
    out: Path, plan: Plan, calibration_sha256: str | None = None, engine: str = ENGINE
) -> Artifact | None:
    """The artifact that this plan already made there, or None when the place is free.

    Args:
        calibration_sha256: of the calibration set that it must have been made with.
        engine: that must have made it.

    Raises:
        UsageError: something else is there.
    """
    if not check_place(out, plan):
        return None
    artifact = Artifact.open(out)
    if artifact.manifest.engine != engine:
        raise UsageError(
            f"holds a finished artifact made by {artifact.manifest.engine}, not {engine}", where=str(out),
            accepted="a new or empty directory", hint="Choose another output with -o, or delete it first",
        )  # fmt: skip
    if artifact.manifest.calibration_sha256 != calibration_sha256:
        raise UsageError(
            "holds a finished artifact made with other calibration data", where=str(out),
            accepted="a new or empty directory", hint="Choose another output with -o, or delete it first",
        )  # fmt: skip
    (out / JOURNAL).unlink(missing_ok=True)
    artifact.was_complete = True
    return artifact


def _is_current(directory: Path) -> bool:
    try:
        return directory.samefile(os.curdir)
    except OSError:  # the current directory was deleted
        return False


def _plan_of(directory: Path) -> str | None:
    """The plan id that an artifact's provenance states; None when it states none."""
    try:
        statement = parse_json((directory / ATTACHMENTS / PROVENANCE).read_bytes())
        plan_id = statement["predicate"]["buildDefinition"]["internalParameters"]["plan_id"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return plan_id if isinstance(plan_id, str) else None


def refuse_overlap(out: Path, checkpoint: Checkpoint) -> None:
    """Source and target must not contain one another.

    Raises:
        UsageError: naming both.
    """
    target = out.resolve()
    places = {path.resolve() for file in checkpoint.files if (path := checkpoint.local_path(file)) is not None}
    roots = {path for path in (_as_directory(checkpoint),) if path is not None}
    for place in sorted(places | roots):
        if place == target or target in place.parents:
            raise UsageError(f"the source {place} lies inside the target", where=str(out),
                             hint="Choose another output with -o")  # fmt: skip
    for root in roots:
        if root in target.parents:
            raise UsageError(f"the target lies inside the source {root}", where=str(out),
                             hint="Choose another output with -o")  # fmt: skip


def _as_directory(checkpoint: Checkpoint) -> Path | None:
    if checkpoint.kind != "local":
        return None
    path = Path(checkpoint.label).resolve()
    return path if path.is_dir() else None


def open_target(
    out: Path, plan: Plan, checkpoint: Checkpoint, calibration_sha256: str | None = None, engine: str = ENGINE,
    device: str | None = None,
) -> Target:  # fmt: skip
    """Create or continue the working directory and lock it.

    Raises:
        EnvironmentProblem: not writable, or another run is at work there.
        ArtifactError: the working directory belongs to another plan or source.
        UsageError: the working directory's name is taken by something else.
    """
    work = out.with_name(out.name + PARTIAL_SUFFIX)
    with disk_errors(work):
        is_taken, is_foreign = _state_of(work)
    if is_taken:
        raise UsageError("is a file; the working directory would be called so", where=str(work))
    if is_foreign:
        raise ArtifactError(
            "is not empty and holds no unfinished conversion", where=str(work),
            hint="Delete it, or choose another output with -o",
        )  # fmt: skip
    with disk_errors(work):
        work.parent.mkdir(parents=True, exist_ok=True)
        work.mkdir(exist_ok=True)
    journal = Journal(work / JOURNAL, fingerprint(plan, checkpoint, calibration_sha256, engine, device))
    with disk_errors(work):
        for folder in (*VIEWS, FOLDS) if plan.folds else VIEWS:
            (work / folder).mkdir(exist_ok=True)
    return Target(out, work, journal)


def _state_of(work: Path) -> tuple[bool, bool]:
    """Whether the working directory's name is taken by a file, and whether it holds something else's files."""
    if not work.is_dir():
        return work.exists(), False
    return False, not (work / JOURNAL).exists() and any(work.iterdir())


def fingerprint(
    plan: Plan, checkpoint: Checkpoint, calibration_sha256: str | None = None, engine: str = ENGINE,
    device: str | None = None,
) -> dict[str, object]:  # fmt: skip
    """First line of the journal: what must be the same for work to be continued.

    Args:
        device: that calibration computes on; None for the CPU.
    """
    calibration = {} if calibration_sha256 is None else {"calibration": calibration_sha256}
    return {
        **calibration, **({} if engine == ENGINE else {"engine": engine}),
        **({} if device is None else {"device": device}),
        "kind": "start", "plan_id": plan.plan_id, "checkpoint": checkpoint.fingerprint, "version": tool_version(),
        "format_version": format_version(has_folds=bool(plan.folds)), "numerics_version": NUMERICS_VERSION,
    }  # fmt: skip


def check_space(work: Path, needed_bytes: int, *, besides: frozenset[Path]) -> None:
    """``needed_bytes`` in all, of which what the working directory holds already is deducted.

    Args:
        besides: files there that ``needed_bytes`` does not count (placed source files).

    Raises:
        EnvironmentProblem: stating needed and available bytes.
    """
    present = sum(entry.stat().st_blocks * 512 for entry in work.rglob("*") if entry not in besides)
    missing = needed_bytes - present
    stats = os.statvfs(work)
    free = stats.f_bavail * stats.f_frsize
    if missing > free:
        raise EnvironmentProblem(
            f"not enough disk space: {format_bytes(missing)} needed, {format_bytes(free)} free",
            where=str(work), hint="Free space, or choose a place on another disk with -o",
        ) from OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # fmt: skip
