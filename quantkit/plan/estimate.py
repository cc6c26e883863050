"""What a conversion costs: free disk at the target, and time.

Disk. Files that are written count fully. The publisher's files, which one view holds as they are, cost nothing
where they are hard-linked or only referenced: ``auto`` links out of the Hub cache on the same file system,
``link`` always; everything else is counted as a copy, also where the file system might share blocks (a clone),
because a promise of space must hold. Files of a Hub source that are not downloaded yet need room in the Hub cache.

Time. Every source file is read and hashed twice over (the file and each tensor), every output is hashed twice
(the tensor as it is written and the finished file), weights are converted; workers share that work, storage is
shared by all. So::

    seconds = max(cpu / workers, bytes read and written / read rate) ,  cpu = weights / rate + hashed / rate

and what a calibrated method adds (``calibration_time.py``), which comes after all of that. An estimate from rates
measured for a moment: writing is taken to be as fast as reading, a download is not included. Expect it to be right
within a factor of two.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import SourceError
from ..recipe.sections import CALIBRATED_METHODS
from ..units import format_bytes
from .calibration_time import calibration_seconds
from .fate import Op
from .probe import Rates

if TYPE_CHECKING:
    from ..checkpoint import Checkpoint
    from .plan import Plan


@dataclass(frozen=True, slots=True)
class DiskEstimate:
    """Free space needed and there.

    Attributes:
        target: the existing directory whose file system was asked.
        needed_bytes, free_bytes: at the target.
        placement: how the publisher's files are counted: ``hard link``, ``reference``, ``copy``, or ``none`` when
            both views are derived.
        placement_bytes: what they need.
        download_bytes: of a Hub source, not in the cache yet; included in ``needed_bytes`` when the cache is on
            the target's file system.
        problem: what is missing, or None.
    """

    target: str
    needed_bytes: int
    free_bytes: int
    placement: str
    placement_bytes: int
    download_bytes: int
    problem: str | None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class TimeEstimate:
    """Seconds by the formula in the module docstring; ``excludes`` says what is not in it.

    ``calibration_seconds`` is the part of ``seconds`` that a calibrated method adds, None without one.
    """

    seconds: float
    calibration_seconds: float | None
    cpu_seconds: float
    io_seconds: float | None
    workers: int
    excludes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"excludes": list(self.excludes), "is_estimate": True}


def estimate_disk(
    plan: Plan, checkpoint: Checkpoint, out_dir: str | os.PathLike[str] | None = None
) -> DiskEstimate:
    """Needed and free space for an output at ``out_dir`` (None: in the current directory); nothing is created."""
    target = _existing_parent(Path(out_dir) if out_dir is not None else Path.cwd())
    device = target.stat().st_dev
    on_disk: Mapping[str, Path | None] = {name: checkpoint.local_path(name) for name in checkpoint.files}
    missing = sum(checkpoint.files[name].nbytes for name, path in on_disk.items() if path is None)
    cache_device = _cache_device(checkpoint) if missing else None
    placement, placement_bytes = _placement(plan, checkpoint, on_disk, device, cache_device)
    needed = plan.disk.total(copies_source=False) + placement_bytes
    if missing and cache_device == device:
        needed += missing
    stats = os.statvfs(target)
    free = stats.f_bavail * stats.f_frsize
    problem = None
    if needed > free:
        problem = f"not enough disk space: {format_bytes(needed)} needed, {format_bytes(free)} free"
    return DiskEstimate(str(target), needed, free, placement, placement_bytes, missing, problem)


def estimate_time(plan: Plan, checkpoint: Checkpoint, rates: Rates, workers: int) -> TimeEstimate:
    """Seconds for a plan at measured rates; pure arithmetic."""
    source = sum(file.nbytes for file in checkpoint.files.values())
    written = sum(shard.nbytes for shard in plan.shards)
    weights = sum(
        prod(checkpoint.tensors[job.sources[0]].shape)
        * _weights_per_element(checkpoint.tensors[job.sources[0]].dtype)
        for shard in plan.shards
        for job in shard.jobs
        if job.op is not Op.COPY and job.method not in CALIBRATED_METHODS
    )
    cpu = weights / rates.weights_per_s + 2 * (source + written) / rates.hash_bytes_per_s
    copied = source if plan.recipe.prefill.place == "copy" else 0
    io = (source + written + copied) / rates.read_bytes_per_s if rates.read_bytes_per_s else None
    excludes = []
    if any(checkpoint.local_path(name) is None for name in checkpoint.files):
        excludes.append("download")
    if io is None:
        excludes.append("reading and writing")
    calibration = None
    if plan.recipe.calibration is not None:
        calibration = _calibration(plan, checkpoint, rates, workers)
        if calibration is None:
            excludes.append("calibration")
    seconds = max(cpu / workers, io or 0.0) + (calibration or 0.0)
    return TimeEstimate(seconds, calibration, cpu, io, workers, tuple(excludes))


def _calibration(plan: Plan, checkpoint: Checkpoint, rates: Rates, workers: int) -> float | None:
    try:
        return calibration_seconds(plan, checkpoint, rates, workers)
    except SourceError:  # a config without the numbers; the plan says so under "unknown"
        return None


def _weights_per_element(dtype: str) -> int:
    return 8 if dtype == "I32" else 1  # packed INT4


def _placement(
    plan: Plan, checkpoint: Checkpoint, on_disk: Mapping[str, Path | None], device: int, cache_device: int | None
) -> tuple[str, int]:
    publisher = plan.disk.publisher
    if not publisher:
        return "none", 0
    mode = plan.recipe.prefill.place
    if mode == "reference":
        return "reference", 0
    if mode == "copy" or (mode == "auto" and checkpoint.kind != "hub"):
        return "copy", publisher
    copied = 0
    for name, path in on_disk.items():
        where = path.resolve().stat().st_dev if path is not None else cache_device
        if where != device:
            copied += checkpoint.files[name].nbytes
    return ("copy" if copied == publisher else "hard link"), copied


def _cache_device(checkpoint: Checkpoint) -> int | None:
    """The file system that downloads go to."""
    if checkpoint.kind != "hub":
        return None
    from ..checkpoint.hub_settings import read_settings

    return _existing_parent(read_settings().cache_dir).stat().st_dev


def _existing_parent(path: Path) -> Path:
    """The path itself or its nearest ancestor that is a directory."""
    absolute = path.absolute()
    return next(p for p in (absolute, *absolute.parents) if p.is_dir())
