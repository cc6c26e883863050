"""The native backend of the conversions, ``cpu``; library.py says how the library is built and chosen.

All levels of instructions give the same bits.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, byref, c_int32, c_int64, c_void_p
from typing import Any, ClassVar, NoReturn

import numpy as np
from numpy.typing import NDArray

from .errors import NanCodeError, NonFiniteError
from .library import Library
from .search import Method
from .types import F32, I32, I64, U8, U16, Int4Weight, empty_int4

_NAN_CODE, _NON_FINITE = 1, 2


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
        ("is_unbiased", c_int32), ("importance", c_void_p), ("counts", c_void_p),
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

    def __init__(self, library: Library) -> None:
        library.declare(_SIGNATURES)
        self._library = library
        self.library, self.isa, self.isa_available = library.name, library.isa, library.isa_available

    @classmethod
    def load(cls, isa: str | None = None) -> Native:
        """See ``Library.load``."""
        return cls(Library.load(isa))

    def fp8_to_float32(self, codes: U8, scales: F32, block: tuple[int, int], row_offset: int) -> F32:
        out = np.empty(codes.shape, np.float32)
        self._call("qk_fp8_to_float32", row_offset, byref(_fp8(codes, scales, block, row_offset)), _at(out))
        return out

    def fp8_to_bf16(self, codes: U8, scales: F32, block: tuple[int, int], row_offset: int) -> U16:
        out = np.empty(codes.shape, np.uint16)
        self._call("qk_fp8_to_bf16", row_offset, byref(_fp8(codes, scales, block, row_offset)), _at(out))
        return out

    def fp8_to_int4(
        self,
        codes: U8,
        scales: F32,
        block: tuple[int, int],
        row_offset: int,
        group_size: int,
        method: Method,
        counts: I64 | None = None,
    ) -> Int4Weight:
        out = empty_int4(codes.shape[0], codes.shape[1], group_size)
        source, target = _fp8(codes, scales, block, row_offset), _int4_out(out, group_size, method, None, counts)
        self._call("qk_fp8_to_int4", row_offset, byref(source), byref(target))
        return out

    def float_to_int4(
        self,
        weight: F32 | U16,
        row_offset: int,
        group_size: int,
        method: Method,
        importance: F32 | None = None,
        counts: I64 | None = None,
    ) -> Int4Weight:
        out = empty_int4(weight.shape[0], weight.shape[1], group_size)
        source, target = _plain(weight), _int4_out(out, group_size, method, importance, counts)
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
        status = self._library.call(function, *args, *tail)
        if status:
            _refuse(function, status, (row_offset or 0) + where[0], where[1])


def _refuse(function: str, status: int, row: int, column: int) -> NoReturn:
    if status == _NAN_CODE:
        raise NanCodeError(row, column)
    if status == _NON_FINITE:
        raise NonFiniteError(row, column)
    raise RuntimeError(f"{function} returned {status}: a bug in quantkit_kernels, please report it")


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


def _int4_out(
    out: Int4Weight, group_size: int, method: Method, importance: F32 | None, counts: I64 | None
) -> _Int4Out:
    arrays = (_at(out.packed), _at(out.scale), _at(out.error), _at(out.energy))
    weights, places = (None if array is None else _at(array) for array in (importance, counts))
    is_unbiased = method.is_unbiased and importance is None
    return _Int4Out(*arrays, group_size, _at(method.factors), method.factors.size, is_unbiased, weights, places)
