"""The native library: C++17 in ``kernels/csrc`` behind a C ABI, loaded through ctypes.

Why ctypes and not nanobind or pybind11: the operations take pointers, strides and sizes, nothing else. A C ABI
needs no Python and no torch headers to build, one binary serves every Python version, ctypes releases the GIL for
the whole call by itself, and a package without the binary still imports. What a binding generator would check,
``arrays.py`` and ``forward/check.py`` check once for all backends.

The library holds portable, AVX2, AVX-512 and AVX-512 BF16 code; the best level that the processor has is used, or
the one that ``QUANTKIT_CPU_ISA=portable|avx2|avx512|avx512_bf16`` names.
"""

from __future__ import annotations

import ctypes
import os
import struct
import threading
from collections.abc import Mapping, Sequence
from ctypes import c_int
from functools import cache
from pathlib import Path
from typing import Any

ENV_ISA = "QUANTKIT_CPU_ISA"
ISA_LEVELS = ("portable", "avx2", "avx512", "avx512_bf16")  # the numbers of quantkit_kernels.h
ABI_VERSION = 5
LIBRARY_NAME = "libquantkit_kernels.so"  # on every platform: setup.py names it
_declared: set[str] = set()
_declaring = threading.Lock()


class NativeMissing(Exception):
    """The native library cannot be used; the message says why."""


class Library:
    """The library at one level of instructions.

    Attributes:
        name: file name.
        isa: the level in use; ``level`` its number.
        isa_available: what this processor and this build can run.
    """

    def __init__(self, handle: ctypes.CDLL, name: str, isa: str, isa_available: tuple[str, ...]) -> None:
        self.handle, self.name, self.isa, self.isa_available = handle, name, isa, isa_available
        self.level = ISA_LEVELS.index(isa)

    @classmethod
    def load(cls, isa: str | None = None) -> Library:
        """The library in this package, at level ``isa`` (default: QUANTKIT_CPU_ISA, else the best there is).

        Raises:
            NativeMissing: not built, cannot be loaded, or of another version.
            ValueError: the level is unknown, or this processor or build does not have it.
        """
        handle, name = _open()
        states = {level: int(handle.qk_isa_state(number)) for number, level in enumerate(ISA_LEVELS)}
        available = tuple(level for level, state in states.items() if state == 1)
        if not available:
            raise NativeMissing(
                f"{name} holds no level of instructions that this processor has; reinstall quantkit"
            )
        forced = isa or os.environ.get(ENV_ISA) or available[-1]
        if forced not in ISA_LEVELS:
            raise ValueError(f"{ENV_ISA}={forced!r} is not a level; accepted: {', '.join(ISA_LEVELS)}")
        if forced not in available:
            why = "this build does not hold it" if states[forced] < 0 else "this processor does not have it"
            raise ValueError(f"{ENV_ISA}={forced}: {why}; available: {', '.join(available)}")
        return cls(handle, name, forced, available)

    def declare(self, signatures: Mapping[str, Sequence[Any]]) -> None:
        """Set the argument types of functions that return an int; the first argument is the level, left out here.

        Once for each function: ctypes must not see them change while another thread calls it.

        Raises:
            NativeMissing: the library lacks one of them.
        """
        if signatures.keys() <= _declared:
            return
        try:
            with _declaring:
                for name in signatures.keys() - _declared:
                    function = getattr(self.handle, name)
                    function.argtypes, function.restype = [c_int, *signatures[name]], c_int
                    _declared.add(name)
        except AttributeError as error:
            raise NativeMissing(f"{self.name} cannot be used ({error}); reinstall quantkit") from error

    def call(self, function: str, *args: Any) -> int:
        """Run ``function`` at this level, without the GIL; its status."""
        return int(getattr(self.handle, function)(self.level, *args))


@cache
def _open() -> tuple[ctypes.CDLL, str]:
    """The library, checked to be of our version."""
    path = Path(__file__).with_name(LIBRARY_NAME)
    if not path.exists():
        raise NativeMissing("the native library was not built (no C++ compiler when the package was installed?)")
    try:
        if _is_cut_off(path):
            raise NativeMissing(f"{path.name} is incomplete; reinstall quantkit")
        handle = ctypes.CDLL(str(path))
        handle.qk_abi_version.argtypes, handle.qk_abi_version.restype = [], c_int
        version = handle.qk_abi_version()
        if version != ABI_VERSION:
            raise NativeMissing(f"{path.name} is of ABI {version}, not {ABI_VERSION}; reinstall quantkit")
        handle.qk_isa_state.argtypes, handle.qk_isa_state.restype = [c_int], c_int
    except (OSError, AttributeError) as error:
        raise NativeMissing(f"{path.name} cannot be loaded ({error})") from error
    return handle, path.name


def _is_cut_off(path: Path) -> bool:
    """Whether an ELF file ends before what its header says: loading what is left of one kills the process."""
    with path.open("rb") as file:
        header = file.read(64)
        size = file.seek(0, os.SEEK_END)
    if (
        len(header) < 64 or header[:6] != b"\x7fELF\x02\x01"
    ):  # 64 bits, little endian; others are the loader's to judge
        return False
    (table,) = struct.unpack_from("<Q", header, 40)
    entry_bytes, entries = struct.unpack_from("<HH", header, 58)
    return bool(table + entry_bytes * entries > size)
