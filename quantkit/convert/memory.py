"""How many workers and how large tiles fit into the memory that the user allows.

Only resident memory counts; page cache is the kernel's to reclaim and is dropped as files finish. The tile never
shows in the bytes written (``ops.py``), so both may be chosen freely.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from ..artifact.canonical import READ_BYTES
from ..errors import EnvironmentProblem, UsageError
from ..units import format_bytes

DEFAULT_TILE = 4 << 20  # source bytes
SMALLEST_TILE = 256 << 10
MAX_DEFAULT_WORKERS = 8
# Peak scratch of one worker per byte of tile: the widest path is INT4 -> FP8 with its float32 copies (ops.py
# divides the tile there), the usual one (FP8 -> INT4) needs three; the torch twin holds some sixteen float32
# copies of a tile.
_SCRATCH_PER_BYTE = {"cpu": 10, "torch": 64}


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
        widest_row_block: source bytes of the widest unit that can't be cut.
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


def resident_bytes() -> int:
    """Resident memory of this process now: interpreter, libraries, plan."""
    with open("/proc/self/statm", "rb") as handle:
        return int(handle.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
