"""The native backend: C++17 in ``kernels/csrc`` behind a C ABI, loaded through ctypes.

Why ctypes and not nanobind or pybind11: the operations take pointers, strides and sizes, nothing else. A C ABI
needs no Python and no torch headers to build, one binary serves every Python version, ctypes releases the GIL for
the whole call by itself, and a package without the binary still imports. What a binding generator would check,
``arrays.py`` checks once for all backends.

The library holds portable, AVX2 and AVX-512 code; the best level that the processor has is used, or the one that
``QUANTKIT_CPU_ISA=portable|avx2|avx512`` names. All levels give the same bits.
"""

from __future__ import annotations

import ctypes
import os
from ctypes import POINTER, byref, c_int, c_int32, c_int64, c_void_p
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import numpy as np
from numpy.typing import NDArray

from .errors import NanCodeError, NonFiniteError
from .search import Method
from .types import F32, I32, U8, U16, Int4Weight, empty_int4

ENV_ISA = "QUANTKIT_CPU_ISA"
ISA_LEVELS = ("portable", "avx2", "avx512")  # the numbers of quantkit_kernels.h
ABI_VERSION = 3
LIBRARY_PATTERN = "libquantkit_kernels*"
_NAN_CODE, _NON_FINITE = 1, 2


class NativeMissing(Exception):
    """The native library cannot be used; the message says why."""


class _Fp8(ctypes.Structure):
    _fields_: ClassVar[Any] = [
        ("codes", c_void_p), ("stride", c_int64), ("scales", c_void_p), ("scale_stride", c_int64),
        ("rows", c_int64), ("columns", c_int64),
        ("block_rows", c_int64), ("block_columns", c_int64), ("row_offset", c_int64),
    ]  # fmt: skip


class _Plain(ctypes.Structure):
    _fields_: ClassVar[Any] = [
        ("data", c_void_p), ("stride", c_int64), ("rows", c_int64), ("columns", c_int64), ("is_bf16", c_int32),
    ]  # fmt: skip


class _Int4(ctypes.Structure):
    _fields_: ClassVar[Any] = [
        ("packed", c_void_p), ("stride", c_int64), ("scale", c_void_p), ("scale_stride", c_int64),
        ("rows", c_int64), ("columns", c_int64), ("group_size", c_int64),
    ]  # fmt: skip


class _Int4Out(ctypes.Structure):
    _fields_: ClassVar[Any] = [
        ("packed", c_void_p), ("scale", c_void_p), ("error", c_void_p), ("energy", c_void_p),
        ("group_size", c_int64), ("factors", c_void_p), ("num_factors", c_int64),
        ("is_unbiased", c_int32), ("importance", c_void_p),
    ]  # fmt: skip


_WHERE = POINTER(c_int64)
_SIGNATURES: dict[str, list[Any]] = {
    "qk_fp8_to_float32": [POINTER(_Fp8), c_void_p, _WHERE],
    "qk_fp8_to_bf16": [POINTER(_Fp8), c_void_p, _WHERE],
    "qk_fp8_to_int4": [POINTER(_Fp8), POINTER(_Int4Out), _WHERE],
    "qk_plain_to_int4": [POINTER(_Plain), POINTER(_Int4Out), _WHERE],
    "qk_int4_to_float32": [POINTER(_Int4), c_void_p],
    "qk_int4_to_bf16": [POINTER(_Int4), c_void_p],
    "qk_plain_to_fp8": [POINTER(_Plain), c_int64, c_int64, c_void_p, c_void_p, _WHERE],
    "qk_bf16_to_float32": [c_void_p, c_int64, c_void_p],
    "qk_float32_to_bf16": [c_void_p, c_int64, c_void_p],
}


class Native:
    """Backend ``cpu``. Arguments are checked by ``ops``; a call runs in the calling thread without the GIL."""

    name = "cpu"

    def __init__(self, library: ctypes.CDLL, path: Path, isa: str, isa_available: tuple[str, ...]) -> None:
        self.library, self.isa, self.isa_available = path.name, isa, isa_available
        self._lib, self._level = library, ISA_LEVELS.index(isa)

    @classmethod
    def load(cls, isa: str | None = None) -> Native:
        """The library in this package, at level ``isa`` (default: QUANTKIT_CPU_ISA, else the best there is).

        Raises:
            NativeMissing: not built, cannot be loaded, or of another version.
            ValueError: the level is unknown, or this processor or build does not have it.
        """
        path = _library_path()
        library = _open(path)
        states = {name: int(library.qk_isa_state(level)) for level, name in enumerate(ISA_LEVELS)}
        available = tuple(name for name, state in states.items() if state == 1)
        forced = isa or os.environ.get(ENV_ISA) or available[-1]
        if forced not in ISA_LEVELS:
            raise ValueError(f"{ENV_ISA}={forced!r} is not a level; accepted: {', '.join(ISA_LEVELS)}")
        if forced not in available:
            why = "this build does not hold it" if states[forced] < 0 else "this processor does not have it"
            raise ValueError(f"{ENV_ISA}={forced}: {why}; available: {', '.join(available)}")
        return cls(library, path, forced, available)

    def fp8_to_float32(self, codes: U8, scales: F32, block: tuple[int, int], row_offset: int) -> F32:
        out = np.empty(codes.shape, np.float32)
        self._call("qk_fp8_to_float32", row_offset, byref(_fp8(codes, scales, block, row_offset)), _at(out))
        return out

    def fp8_to_bf16(self, codes: U8, scales: F32, block: tuple[int, int], row_offset: int) -> U16:
        out = np.empty(codes.shape, np.uint16)
        self._call("qk_fp8_to_bf16", row_offset, byref(_fp8(codes, scales, block, row_offset)), _at(out))
        return out

    def fp8_to_int4(
        self, codes: U8, scales: F32, block: tuple[int, int], row_offset: int, group_size: int, method: Method
    ) -> Int4Weight:
        out = empty_int4(codes.shape[0], codes.shape[1], group_size)
        source = _fp8(codes, scales, block, row_offset)
        self._call("qk_fp8_to_int4", row_offset, byref(source), byref(_int4_out(out, group_size, method)))
        return out

    def float_to_int4(
        self, weight: F32 | U16, row_offset: int, group_size: int, method: Method, importance: F32 | None = None
    ) -> Int4Weight:
        out = empty_int4(weight.shape[0], weight.shape[1], group_size)
        source, target = _plain(weight), _int4_out(out, group_size, method, importance)
        self._call("qk_plain_to_int4", row_offset, byref(source), byref(target))
        return out

    def int4_to_float32(self, packed: I32, scale: U16, columns: int, group_size: int) -> F32:
        out = np.empty((packed.shape[0], columns), np.float32)
        self._call("qk_int4_to_float32", None, byref(_int4(packed, scale, columns, group_size)), _at(out))
        return out

    def int4_to_bf16(self, packed: I32, scale: U16, columns: int, group_size: int) -> U16:
        out = np.empty((packed.shape[0], columns), np.uint16)
        self._call("qk_int4_to_bf16", None, byref(_int4(packed, scale, columns, group_size)), _at(out))
        return out

    def float_to_fp8(self, weight: F32 | U16, row_offset: int, block: tuple[int, int]) -> tuple[U8, F32]:
        (o, i), (bo, bi) = weight.shape, block
        codes, scales = np.empty((o, i), np.uint8), np.empty((-(-o // bo), -(-i // bi)), np.float32)
        self._call("qk_plain_to_fp8", row_offset, byref(_plain(weight)), bo, bi, _at(codes), _at(scales))
        return codes, scales

    def bf16_to_float32(self, bits: U16) -> F32:
        out = np.empty(bits.shape, np.float32)
        self._call("qk_bf16_to_float32", None, _at(bits), bits.size, _at(out))
        return out

    def float32_to_bf16(self, values: F32) -> U16:
        out = np.empty(values.shape, np.uint16)
        self._call("qk_float32_to_bf16", None, _at(values), values.size, _at(out))
        return out

    def _call(self, function: str, row_offset: int | None, *args: Any) -> None:
        """Runs ``function``; ``row_offset`` None means that it cannot find a bad number."""
        where = (c_int64 * 2)()
        tail = () if row_offset is None else (where,)
        status = getattr(self._lib, function)(self._level, *args, *tail)
        if status:
            _refuse(function, status, (row_offset or 0) + where[0], where[1])


def _refuse(function: str, status: int, row: int, column: int) -> NoReturn:
    if status == _NAN_CODE:
        raise NanCodeError(row, column)
    if status == _NON_FINITE:
        raise NonFiniteError(row, column)
    raise RuntimeError(f"{function} returned {status}: a bug in quantkit_kernels, please report it")


def _library_path() -> Path:
    found = sorted(Path(__file__).parent.glob(LIBRARY_PATTERN))
    if not found:
        raise NativeMissing("the native library was not built (no C++ compiler when the package was installed?)")
    return found[0]


def _open(path: Path) -> ctypes.CDLL:
    """The library with its signatures set, checked to be of our version."""
    try:
        library = ctypes.CDLL(str(path))
        library.qk_abi_version.argtypes, library.qk_abi_version.restype = [], c_int
        version = library.qk_abi_version()
        if version != ABI_VERSION:
            raise NativeMissing(f"{path.name} is of ABI {version}, not {ABI_VERSION}; reinstall quantkit")
        library.qk_isa_state.argtypes, library.qk_isa_state.restype = [c_int], c_int
        for name, arguments in _SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes, function.restype = [c_int, *arguments], c_int
    except (OSError, AttributeError) as error:
        raise NativeMissing(f"{path.name} cannot be loaded ({error})") from error
    return library


def _at(array: NDArray[Any]) -> int:
    return int(array.ctypes.data)


def _stride(array: NDArray[Any]) -> int:
    """Row stride in elements."""
    return array.strides[0] // array.itemsize


def _fp8(codes: U8, scales: F32, block: tuple[int, int], row_offset: int) -> _Fp8:
    return _Fp8(_at(codes), _stride(codes), _at(scales), _stride(scales), *codes.shape, *block, row_offset)


def _plain(weight: F32 | U16) -> _Plain:
    return _Plain(_at(weight), _stride(weight), *weight.shape, int(weight.dtype == np.uint16))


def _int4(packed: I32, scale: U16, columns: int, group_size: int) -> _Int4:
    return _Int4(_at(packed), _stride(packed), _at(scale), _stride(scale), packed.shape[0], columns, group_size)


def _int4_out(out: Int4Weight, group_size: int, method: Method, importance: F32 | None = None) -> _Int4Out:
    arrays = (_at(out.packed), _at(out.scale), _at(out.error), _at(out.energy))
    weights = None if importance is None else _at(importance)
    is_unbiased = method.is_unbiased and importance is None
    return _Int4Out(*arrays, group_size, _at(method.factors), method.factors.size, is_unbiased, weights)
