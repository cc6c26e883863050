"""How many workers and how large tiles fit into the memory that the user allows, and the peak that follows.

::

    peak = resident now + workers * (2 * READ_BYTES + scratch * tile)

*Resident now* is interpreter, libraries, headers and plan: measured, because it depends on the number of tensors
and on the kernel backend. Every worker reads a file through a buffer of ``READ_BYTES`` and keeps as much again in
writing it; converting, it holds one tile of source bytes, the result and what the kernel needs between them. No
term grows with the size of a tensor or shard. Only resident memory counts; page cache is the kernel's to reclaim
and is dropped as files finish. The tile never shows in the bytes that are written, so workers and tile may be
chosen freely.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ..checkpoint.tensor import StoredWeight
from ..errors import EnvironmentProblem, UsageError
from ..units import format_bytes
from .fate import Job, Op

READ_BYTES = 8 << 20
DEFAULT_TILE = 1 << 20  # source bytes: with what comes of them they stay in a core's cache
SMALLEST_TILE = 256 << 10
MAX_DEFAULT_WORKERS = 8
# Peak scratch of one worker per byte of tile: the widest path is INT4 -> FP8 with its float32 copies, the usual
# one (FP8 -> INT4) needs three; the torch twin holds some sixteen float32 copies of a tile.
_SCRATCH_PER_BYTE = {"cpu": 10, "torch": 64}
_FP8_BLOCK_ROWS = 128


@dataclass(frozen=True, slots=True)
class Budget:
    """Threads, source bytes per tile, and the resident memory that this is expected to peak at."""

    workers: int
    tile_bytes: int
    peak_bytes: int


def choose_budget(workers: int | None, max_memory: int | None, widest_row_block: int, backend: str) -> Budget:
    """Fit workers and tile into ``max_memory`` bytes (None: no limit).

    Args:
        workers: wanted threads; None for as many as cores, at most 8.
        widest_row_block: source bytes of the widest unit that can't be cut (``widest_row_block``).
        backend: name of the kernel backend.

    Raises:
        UsageError: ``workers`` is not positive.
        EnvironmentProblem: not even one worker fits; the least that does is stated.
    """
    if workers is not None and workers < 1:
        raise UsageError(f"{workers} workers", where="-j", accepted="1 or more")
    wanted = workers or min(len(os.sched_getaffinity(0)), MAX_DEFAULT_WORKERS)
    base = resident_bytes()
    smallest = max(SMALLEST_TILE, widest_row_block)
    tile = max(DEFAULT_TILE, widest_row_block)
    if max_memory is None:
        return Budget(wanted, tile, base + wanted * worker_bytes(tile, backend))
    least = base + worker_bytes(smallest, backend)
    if max_memory < least:
        raise EnvironmentProblem(
            f"{format_bytes(max_memory)} of memory are not enough: one worker needs {format_bytes(least)}",
            where="--max-memory", hint="Allow more",
        )  # fmt: skip
    while base + wanted * worker_bytes(tile, backend) > max_memory:
        if tile > smallest:
            tile = max(tile // 2, smallest)
        else:
            wanted -= 1
    return Budget(wanted, tile, base + wanted * worker_bytes(tile, backend))


def worker_bytes(tile_bytes: int, backend: str) -> int:
    """Resident bytes of one worker at its peak."""
    return 2 * READ_BYTES + _SCRATCH_PER_BYTE.get(backend, 64) * tile_bytes


def widest_row_block(jobs: Iterable[Job], weights: Mapping[str, StoredWeight]) -> int:
    """Source bytes of the widest run of rows that an operation can't cut: 128 rows where FP8 blocks are derived.

    Args:
        weights: by the name of their first tensor.
    """
    widest = 0
    for job in jobs:
        if job.op is not Op.COPY:
            weight = weights[job.sources[0]]
            rows = _FP8_BLOCK_ROWS if job.op is Op.TO_FP8 else 1
            widest = max(widest, rows * (weight.weight.nbytes // max(weight.shape[0], 1)))
    return widest


def resident_bytes() -> int:
    """Resident memory of this process now: interpreter, libraries, plan."""
    with open("/proc/self/statm", "rb") as handle:
        return int(handle.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def available_bytes() -> int | None:
    """Memory that programs can still take, by the kernel's estimate; None where it gives none."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    kib = next((line.split()[1] for line in lines if line.startswith("MemAvailable:")), None)
    return int(kib) << 10 if kib is not None else None
