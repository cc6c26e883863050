"""Checks and normalisation of arguments, once for all backends.

A backend may rely on: native byte order, aligned data, columns contiguous, row stride >= 0 and a multiple of the
item size, shapes that fit together. An array that is laid out otherwise is copied here, explicitly, never by a
backend. Anything else that does not fit is a ``TypeError`` (dtype) or ``ValueError`` (shape) naming the argument.
"""

from __future__ import annotations

import operator
from typing import Any, SupportsIndex

import numpy as np
from numpy.typing import NDArray

from .types import F32, GROUP_SIZES, I32, I64, U8, U16

LARGEST = 2**62  # of an integer that native code computes with in 64 bits


def integer(name: str, value: SupportsIndex, least: int) -> int:
    """``value`` as an int in [least, 2^62]."""
    if isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name} must be an integer, got bool")
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {type(value).__name__}") from None
    if not least <= number <= LARGEST:
        raise ValueError(f"{name} must be at least {least} and at most 2^62, got {number}")
    return number


def plain(name: str, array: NDArray[Any], *dtypes: Any) -> NDArray[Any]:
    """``array``, if it is one of ``dtypes`` in any byte order and has no mask, which would be ignored."""
    accepted = " or ".join(np.dtype(d).name for d in dtypes)
    if not isinstance(array, np.ndarray):
        raise TypeError(f"{name} must be a numpy array of {accepted}, got {type(array).__name__}")
    if isinstance(array, np.ma.MaskedArray):
        raise TypeError(f"{name} must be a plain array, got a masked one")
    if array.dtype.newbyteorder("=") not in dtypes:
        raise TypeError(f"{name} must be a numpy array of {accepted}, got {array.dtype.name}")
    return np.asarray(array)


def matrix(name: str, array: NDArray[Any], *dtypes: Any) -> NDArray[Any]:
    """``array`` as a 2-D array of one of ``dtypes`` with contiguous rows (copied if it is not laid out so)."""
    array = plain(name, array, *dtypes)
    if array.ndim != 2:
        raise ValueError(f"{name} must have two dimensions, got shape {list(array.shape)}")
    row, column = array.strides
    is_tidy = array.flags.aligned and array.dtype.isnative and row >= 0 and row % array.itemsize == 0
    if is_tidy and (column == array.itemsize or array.shape[1] <= 1):
        return array
    return np.array(array, dtype=array.dtype.newbyteorder("="), order="C")  # asarray would keep it unaligned


def flat(name: str, array: NDArray[Any], dtype: Any) -> NDArray[Any]:
    """``array`` of any shape as a contiguous, aligned array of ``dtype``."""
    array = plain(name, array, dtype)
    return np.require(array, dtype=np.dtype(dtype), requirements=["C", "A"])


def float_matrix(name: str, array: NDArray[Any]) -> F32 | U16:
    """A plain weight: float32, or bf16 bits as uint16; float16 is widened (exactly) to float32."""
    array = plain(name, array, np.float32, np.uint16, np.float16)
    if array.dtype.newbyteorder("=") == np.float16:
        array = array.astype(np.float32)
    return matrix(name, array, np.float32, np.uint16)


def importance(array: F32, columns: int) -> F32:
    """What a squared error counts in each column: finite and not negative."""
    array = flat("importance", array, np.float32)
    if array.shape != (columns,):
        raise ValueError(f"importance must be of shape [{columns}], got {list(array.shape)}")
    if not (np.isfinite(array) & (array >= 0)).all():
        raise ValueError("importance must be finite and not negative")
    return array


def counts(array: I64 | None, *inputs: NDArray[Any]) -> I64 | None:
    """Where a histogram of the sixteen codes is added up; written in place, so nothing is copied."""
    if array is None:
        return None
    plain("counts", array, np.int64)
    if any(np.may_share_memory(array, other) for other in inputs):
        raise ValueError("counts shares memory with what is converted")
    if array.shape != (16,):
        raise ValueError(f"counts must be of shape [16], got {list(array.shape)}")
    if not (array.flags.c_contiguous and array.flags.aligned and array.flags.writeable and array.dtype.isnative):
        raise ValueError("counts must be contiguous, aligned, writeable and of native byte order")
    return array


def check_block(block: tuple[int, int]) -> tuple[int, int]:
    try:
        rows, columns = block
    except (TypeError, ValueError):
        raise TypeError(f"block must be two integers (rows, columns), got {block!r}") from None
    return integer("block", rows, 1), integer("block", columns, 1)


def check_group(columns: int, group_size: int) -> None:
    integer("group_size", group_size, 1)
    if group_size not in GROUP_SIZES:
        raise ValueError(f"group_size must be one of {', '.join(map(str, GROUP_SIZES))}, got {group_size}")
    if columns % group_size:
        fits = [g for g in GROUP_SIZES if columns % g == 0]
        say = f"group sizes that fit: {', '.join(map(str, fits))}" if fits else "no supported group size fits"
        raise ValueError(f"{columns} columns are not divisible by group_size {group_size} ({say})")


def fp8_weight(
    codes: U8, scales: F32, block: tuple[int, int], row_offset: int | None
) -> tuple[U8, F32, tuple[int, int], int]:
    """Checked codes, scales, block and offset of an FP8 weight or of a tile of its rows."""
    codes = matrix("codes", codes, np.uint8)
    scales = matrix("scales", scales, np.float32)
    rows, columns = check_block(block)
    start = 0 if row_offset is None else integer("row_offset", row_offset, 0)
    need = (-(-(start + codes.shape[0]) // rows), -(-codes.shape[1] // columns))
    enough_rows = scales.shape[0] == need[0] if row_offset is None else scales.shape[0] >= need[0]
    if not enough_rows or scales.shape[1] != need[1]:
        at = "" if row_offset is None else f" at row_offset {row_offset}"
        raise ValueError(
            f"scales of shape {list(scales.shape)} do not fit codes of shape {list(codes.shape)}{at} "
            f"in blocks of {rows} x {columns}, which need {list(need)}"
        )
    return codes, scales, (rows, columns), start


def int4_weight(packed: I32, scale: U16, columns: int, group_size: int | None) -> tuple[I32, U16, int]:
    """Checked packed words, scale bits and group size of an INT4 weight; any number of columns."""
    packed = matrix("packed", packed, np.int32)
    scale = matrix("scale", scale, np.uint16)
    columns = integer("columns", columns, 0)
    if packed.shape[1] != -(-columns // 8):
        raise ValueError(f"{columns} columns need {-(-columns // 8)} words in a row, packed has {packed.shape[1]}")
    if packed.shape[0] != scale.shape[0]:
        raise ValueError(f"packed has {packed.shape[0]} rows, scale has {scale.shape[0]}")
    groups = scale.shape[1]
    if group_size is None:
        if columns and (groups == 0 or columns % groups):
            raise ValueError(f"{columns} columns do not divide into {groups} groups; pass group_size")
        group_size = columns // groups if groups and columns else 1
    group_size = integer("group_size", group_size, 1)
    if groups != -(-columns // group_size):
        raise ValueError(f"scale has {groups} groups in a row, {columns} columns in groups of {group_size} do not")
    return packed, scale, group_size
