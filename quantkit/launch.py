"""Which process of a run this is, as its launcher says in the environment.

torchrun and ``accelerate launch`` set RANK and WORLD_SIZE; ``accelerate launch --cpu --mpirun_hostfile`` leaves
both to MPI, whose variables accelerate reads as well. MPI's count only beside MASTER_ADDR, which accelerate sets:
a SLURM step of independent commands has them too.
"""

from __future__ import annotations

import os

from .errors import UsageError

_RANKS = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK")
_SIZES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")


def process_of_run() -> tuple[int, int]:
    """(number of this process, number of processes); (0, 1) when it was started alone.

    Raises:
        UsageError: the variables are no such numbers.
    """
    env = os.environ
    if "RANK" in env and "WORLD_SIZE" in env:
        rank, size = _number("RANK"), _number("WORLD_SIZE")
    elif "MASTER_ADDR" in env:
        rank = next((_number(name) for name in _RANKS if name in env), 0)
        size = next((_number(name) for name in _SIZES if name in env), 1)
    else:
        return 0, 1
    if not 0 <= rank < max(size, 1):
        raise UsageError(f"process {rank} of {size}", where="RANK, WORLD_SIZE", accepted="0 to one less than size")
    return rank, max(size, 1)


def _number(name: str) -> int:
    text = os.environ[name]
    if not text.isdecimal():
        raise UsageError(f"{text!r}", where=f"environment variable {name}", accepted="a whole number")
    return int(text)
