"""The public operations: check the arguments, call the chosen backend.

Legend: O rows (output features), I columns (input features), (bo, bi) rows and columns that share an FP8 scale,
G groups in a row. Arrays may have any row stride; outputs are new, contiguous arrays. A call runs in one thread
and holds the GIL only to check arguments and allocate: split a weight by rows and use threads.

To bound memory, pass a tile of rows as ``codes`` together with the scales of the whole weight and ``row_offset``,
the row at which the tile starts; positions in errors then count from the top of the whole weight. Without
``row_offset`` the scales must fit ``codes`` exactly.

Numerics (docs/format.md section 3; the torch twin is the specification, every backend gives the same bits):
W = float32(code) * float32(scale), rounded once to float32; per group s = bf16_rne(absmax / 7.5 * factor), with
INT4_ZERO_SCALE in place of an s that is zero (a group of zeros, or one so small that s underflows: all its
q are 0); q = clamp(rne(W / float32(s)), -8, 7) by IEEE division; ``mse`` then keeps q and stores a scale of
unbiased gain in place of s (``search.py``); sums over a group add the upper half to the lower half until one
number is left. Source: compressed-tensors 0.19 ``calculate_qparams`` and ``quantize``.
"""

from __future__ import annotations

import numpy as np

from . import arrays
from .registry import active
from .search import method_of
from .types import F32, I32, I64, U8, U16, Int4Weight


def fp8_to_float32(codes: U8, scales: F32, block: tuple[int, int], *, row_offset: int | None = None) -> F32:
    """FP8 e4m3 weight to float32: the product float32(code) * scale.

    Args:
        codes: uint8 ``[O, I]``.
        scales: float32 ``[ceil(O/bo), ceil(I/bi)]``, multiplied with the codes (the ``weight_scale_inv`` of
            DeepSeek-style checkpoints is such a factor in spite of its name). Not checked: NaN gives NaN.
        block: (bo, bi), for example (128, 128), (1, I) per channel, (O, I) per tensor; edge blocks may be partial.
        row_offset: see the module.

    Raises:
        NanCodeError: a code is NaN. TypeError, ValueError: an argument does not fit.
    """
    return active().fp8_to_float32(*arrays.fp8_weight(codes, scales, block, row_offset))


def fp8_to_bf16(codes: U8, scales: F32, block: tuple[int, int], *, row_offset: int | None = None) -> U16:
    """As ``fp8_to_float32``, rounded to nearest even bf16; uint16 bits ``[O, I]``."""
    return active().fp8_to_bf16(*arrays.fp8_weight(codes, scales, block, row_offset))


def fp8_to_int4(
    codes: U8,
    scales: F32,
    block: tuple[int, int],
    group_size: int,
    method: str = "mse",
    *,
    row_offset: int | None = None,
    counts: I64 | None = None,
) -> Int4Weight:
    """FP8 e4m3 weight to group INT4 in one pass, without a bf16 step between.

    Args:
        codes, scales, block, row_offset: as in ``fp8_to_float32``.
        group_size: 32, 64 or 128; must divide I. Groups need not line up with blocks.
        method: ``rtn`` or ``mse`` (``search.py``).
        counts: int64 ``[16]``, to which the number of weights of every code is added, stored code q + 8 first to
            last: a histogram in the same pass. After an error it holds no defined numbers.

    Raises:
        NanCodeError: a code is NaN.
        NonFiniteError: a product is NaN or infinite. The first bad position in row-major order is reported.
        TypeError, ValueError: an argument does not fit.
    """
    checked = arrays.fp8_weight(codes, scales, block, row_offset)
    arrays.check_group(checked[0].shape[1], group_size)
    return active().fp8_to_int4(*checked, group_size, method_of(method), arrays.counts(counts, *checked[:2]))


def float_to_int4(
    weight: F32 | U16,
    group_size: int,
    method: str = "mse",
    *,
    row_offset: int = 0,
    importance: F32 | None = None,
    counts: I64 | None = None,
) -> Int4Weight:
    """Plain weight to group INT4.

    Args:
        weight: ``[O, I]``, float32, float16, or bf16 as uint16 bits.
        group_size, method: as in ``fp8_to_int4``.
        row_offset: only added to the row in errors.
        importance: float32 ``[I]``, not negative: the scale search minimises the sum of
            importance * (W - q * scale)^2, as calibration wants, and the best of the grid is stored as it is.
            ``error`` of the result stays the plain sum.
        counts: as in ``fp8_to_int4``.

    Raises:
        NonFiniteError: a weight is NaN or infinite. TypeError, ValueError: an argument does not fit.
    """
    weight = arrays.float_matrix("weight", weight)
    arrays.check_group(weight.shape[1], group_size)
    row_offset = arrays.integer("row_offset", row_offset, 0)
    if importance is not None:
        importance = arrays.importance(importance, weight.shape[1])
    tally = arrays.counts(counts, weight, *(() if importance is None else (importance,)))
    return active().float_to_int4(weight, row_offset, group_size, method_of(method), importance, tally)


def int4_to_float32(packed: I32, scale: U16, columns: int, *, group_size: int | None = None) -> F32:
    """Group INT4 to float32 ``[O, columns]``: q * float32(scale); exact unless it over- or underflows.

    Args:
        packed: int32 ``[O, ceil(columns/8)]``.
        scale: uint16 ``[O, G]``, bf16 bits; not checked, NaN gives NaN.
        columns: I; need not be a multiple of 8 (foreign tensors).
        group_size: any; default columns / G.

    Raises:
        TypeError, ValueError: an argument does not fit.
    """
    packed, scale, size = arrays.int4_weight(packed, scale, columns, group_size)
    return active().int4_to_float32(packed, scale, columns, size)


def int4_to_bf16(packed: I32, scale: U16, columns: int, *, group_size: int | None = None) -> U16:
    """As ``int4_to_float32``, rounded to nearest even bf16 (what compressed-tensors decompresses to)."""
    packed, scale, size = arrays.int4_weight(packed, scale, columns, group_size)
    return active().int4_to_bf16(packed, scale, columns, size)


def float_to_fp8(weight: F32 | U16, block: tuple[int, int] = (128, 128), *, row_offset: int = 0) -> tuple[U8, F32]:
    """Plain weight to FP8 e4m3 with one float32 scale per block.

    Returns codes ``[O, I]`` and scales ``[ceil(O/bo), ceil(I/bi)]``:
    scale = absmax / 448, FP8_ZERO_SCALE in place of a zero (compressed-tensors' rule for a float32 scale);
    code = e4m3_rne(W / scale), saturating at +-448, sign of zero kept. A tile of rows must start at a block row.

    Args:
        weight: ``[O, I]``, float32, float16, or bf16 as uint16 bits.
        block: (bo, bi).
        row_offset: only added to the row in errors.

    Raises:
        NonFiniteError: a weight is NaN or infinite. TypeError, ValueError: an argument does not fit.
    """
    weight = arrays.float_matrix("weight", weight)
    row_offset = arrays.integer("row_offset", row_offset, 0)
    return active().float_to_fp8(weight, row_offset, arrays.check_block(block))


def bf16_to_float32(bits: U16) -> F32:
    """bf16 bits (uint16, any shape) to float32, exactly."""
    bits = arrays.flat("bits", bits, np.uint16)
    return active().bf16_to_float32(bits.reshape(-1)).reshape(bits.shape)


def float32_to_bf16(values: F32) -> U16:
    """float32 (any shape) to bf16 bits, nearest even; a NaN stays a NaN (quiet, sign and upper payload kept)."""
    values = arrays.flat("values", values, np.float32)
    return active().float32_to_bf16(values.reshape(-1)).reshape(values.shape)
