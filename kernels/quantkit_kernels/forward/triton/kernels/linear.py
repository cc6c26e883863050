"""Tiles of y^T = W x^T: the weight's rows are the long side of the tensor cores' product, tokens the short one.

So a decoded weight stays in registers (it is the left operand) and few tokens waste little: eight columns are the
least that the hardware multiplies. Scales are applied in float32 after the product of their group or block, as the
twin's exact weight asks. Sums of a row of y have one order, whatever the number of tokens and however the columns
are split over programs.
"""

import triton
import triton.language as tl

from .common import bf16_to_float, dot, float_to_bf16, fp8_to_bf16, nibble_to_bf16


@triton.jit
def int4_group(acc, x, packed, scales, is_row, is_token, group, groups, ALIGNED: tl.constexpr,
               GROUP: tl.constexpr):  # fmt: skip
    """acc [N, M] + W x^T over one group of columns.

    x: pointers [M] to rows of tokens, in every group first the even columns, then the odd ones; packed: pointers
    [N] to the bytes of the weight's rows, two columns each; scales: pointers [N]. Low nibbles meet even columns,
    high ones odd columns: two products and a shift by a constant, no byte changes its place.
    """
    BYTES: tl.constexpr = GROUP // 2
    k = tl.arange(0, BYTES)
    is_inside = group < groups
    places = packed[:, None] + group * BYTES + k[None, :]
    if ALIGNED:
        places = tl.multiple_of(places, [16, 16])
    byte = tl.load(places, mask=is_row[:, None] & is_inside, other=0)
    part = tl.zeros_like(acc)
    for half in tl.static_range(2):
        weight = nibble_to_bf16((byte >> (4 * half)) & 15)
        columns = x[None, :] + (group * GROUP + half * BYTES + k)[:, None]
        token = tl.load(columns, mask=is_token[None, :] & is_inside, other=0.0)
        part = dot(weight, token, part)
    scale = bf16_to_float(tl.load(scales + group, mask=is_row & is_inside, other=0.0))
    return tl.fma(part, tl.broadcast_to(scale[:, None], part.shape), acc)


@triton.jit
def fp8_step(acc, x, codes, scales, is_row, is_token, column, columns, block_columns,
             ALIGNED: tl.constexpr, BLOCK_K: tl.constexpr):  # fmt: skip
    """acc [N, M] + W x^T over BLOCK_K columns under one column of scales."""
    k = column + tl.arange(0, BLOCK_K)
    is_column = k < columns
    places = codes[:, None] + k[None, :]
    if ALIGNED:
        places = tl.multiple_of(places, [16, 16])
    weight = fp8_to_bf16(tl.load(places, mask=is_row[:, None] & is_column[None, :], other=0))
    token = tl.load(x[None, :] + k[:, None], mask=is_token[None, :] & is_column[:, None], other=0.0)
    part = dot(weight, token, tl.zeros_like(acc))
    scale = tl.load(scales + column // block_columns, mask=is_row, other=0.0)
    return tl.fma(part, tl.broadcast_to(scale[:, None], part.shape), acc)


@triton.jit
def store_rows(total, out, outputs, n, m, is_row, is_token, split, tokens, PARTIAL: tl.constexpr):
    """total [N, M] to rows of y: bf16, or float32 of one split of the columns."""
    places = m[None, :].to(tl.int64) * outputs + n[:, None]
    mask = is_row[:, None] & is_token[None, :]
    if PARTIAL:
        tl.store(out + split.to(tl.int64) * tokens * outputs + places, total, mask=mask)
    else:
        tl.store(out + places, float_to_bf16(total), mask=mask)


@triton.jit
def int4_linear_kernel(x, x_stride, packed, packed_stride, scale, scale_stride, out, tokens,
                       outputs, groups, span, splits, GROUP: tl.constexpr, PARTIAL: tl.constexpr,
                       BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr):  # fmt: skip
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    is_row, is_token = n < outputs, m < tokens
    rows, words = x + m.to(tl.int64) * x_stride, packed + n.to(tl.int64) * packed_stride
    scales = scale + n.to(tl.int64) * scale_stride
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    first = tl.program_id(2)
    last = splits
    if PARTIAL:
        last = first + 1
    for split in range(first, last):
        acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        for group in range(split * span, tl.minimum(split * span + span, groups), 128 // GROUP):
            for step in tl.static_range(128 // GROUP):
                acc = int4_group(acc, rows, words, scales, is_row, is_token, group + step, groups, False, GROUP)
        total += acc
    store_rows(total, out, outputs, n, m, is_row, is_token, first, tokens, PARTIAL)


@triton.jit
def fp8_linear_kernel(x, x_stride, codes, codes_stride, scale, scale_stride, out, tokens, outputs,
                      columns, span, splits, block_rows, block_columns, PARTIAL: tl.constexpr,
                      BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr):  # fmt: skip
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    is_row, is_token = n < outputs, m < tokens
    rows, weights = x + m.to(tl.int64) * x_stride, codes + n.to(tl.int64) * codes_stride
    scales = scale + (n // block_rows).to(tl.int64) * scale_stride
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    first = tl.program_id(2)
    last = splits
    if PARTIAL:
        last = first + 1
    for split in range(first, last):
        acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        for column in range(split * span, tl.minimum(split * span + span, columns), BLOCK_K):
            acc = fp8_step(acc, rows, weights, scales, is_row, is_token, column, columns, block_columns, False,
                           BLOCK_K)  # fmt: skip
        total += acc
    store_rows(total, out, outputs, n, m, is_row, is_token, first, tokens, PARTIAL)


@triton.jit
def sum_splits_kernel(partial, out, size, splits, BLOCK: tl.constexpr):
    """out = bf16 of the splits' sums, added in their order."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for _ in range(splits):
        total += tl.load(partial + i, mask=i < size, other=0.0)
        partial += size
    tl.store(out + i, float_to_bf16(total), mask=i < size)
