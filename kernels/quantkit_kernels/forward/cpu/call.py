"""One call of the native library with its status read: a failure is never taken for a result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from quantkit_kernels.forward import choice

NO_MEMORY = 4  # QK_NO_MEMORY of csrc/matmul.h and csrc/attention.h


def run(signatures: Mapping[str, Sequence[Any]], function: str, *arguments: Any) -> None:
    """Runs ``function``, one of ``signatures`` (as in ``Library.declare``).

    Raises:
        MemoryError, RuntimeError: as ``fail``.
    """
    library = choice.library()
    library.declare(signatures)
    status = library.call(function, *arguments)
    if status:
        fail(function, status)


def fail(function: str, status: int) -> NoReturn:
    """What a status other than 0 means.

    Raises:
        MemoryError: no memory for scratch. RuntimeError: anything else, which the checks should have prevented.
    """
    if status == NO_MEMORY:
        raise MemoryError(f"{function}: no memory for scratch")
    raise RuntimeError(f"{function} returned {status}: a bug in quantkit_kernels, please report it")
