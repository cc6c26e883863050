"""One call of the native library with its status read: a failure is never taken for a result.

All functions of the forward pass take (level, address of a call, threads), so that calls can be noted by a
recorder (``forward/recorder.py``) and made again. Between two calls the processor's caches lose everything but
weights, so that a line of Python costs ten times what it does in a loop: what belongs to a function is worked out
once.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from ctypes import Array, Structure, addressof, c_int, c_int64, c_void_p
from functools import cache
from typing import Any, NoReturn

import torch

from quantkit_kernels.forward import choice
from quantkit_kernels.forward.recorder import Call, recorder, refuse
from quantkit_kernels.library import Library

NO_MEMORY = 4  # QK_NO_MEMORY of csrc/matmul.h and csrc/attention.h


def status_of(function: str, call: Array[c_int64] | Structure, *owners: object) -> int:
    """Runs ``function`` on what ``call`` says, with torch's number of threads; its status.

    Args:
        owners: tensors, or what holds them: of all memory that ``call`` points to.
    """
    library, threads = choice.library(), torch.get_num_threads()
    native = entry(library, function)
    status = native(library.level, addressof(call), threads)
    running = recorder()
    if running is not None:
        running.note_call(Call(native, library.level, threads, call, owners))
    return status


def make(function: str, call: Array[c_int64] | Structure, *owners: object) -> None:
    """The same.

    Raises:
        MemoryError, RuntimeError: as ``fail``.
    """
    status = status_of(function, call, *owners)
    if status:
        fail(function, status)


@cache
def entry(library: Library, function: str) -> Callable[..., int]:
    """A function of the library as ctypes has it."""
    library.declare({function: (c_void_p, c_int)})
    native: Callable[..., int] = getattr(library.handle, function)
    return native


@cache
def bits(number: float) -> int:
    """Of a double, as an integer for a call of integers."""
    found: int = struct.unpack("<q", struct.pack("<d", number))[0]
    return found


def run(signatures: Mapping[str, Sequence[Any]], function: str, *arguments: Any) -> None:
    """Runs ``function``, one of ``signatures`` (as in ``Library.declare``), which can't be recorded.

    Raises:
        MemoryError, RuntimeError: as ``fail``.
    """
    refuse(function)
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
