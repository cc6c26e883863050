"""Conversions of weights with the bits of torch_twin.py: IEEE divisions, nearest even, sums folded in its order.

Where a number must be refused, the smallest row-major position of a bad one is kept; the host raises.
"""

import triton
import triton.language as tl

from .common import float_to_bf16_bits, float_to_fp8, fp8_to_float, is_finite


@triton.jit
def divide(a, b):
    """IEEE a / b; b is spread to the shape of a."""
    return tl.div_rn(a, tl.broadcast_to(b, a.shape))


@triton.jit
def halve(x, ROWS: tl.constexpr, HALF: tl.constexpr):
    """[ROWS, HALF]: the upper half of [ROWS, 2 HALF] onto the lower."""
    low, high = tl.split(tl.permute(tl.reshape(x, (ROWS, 2, HALF)), (0, 2, 1)))
    return low + high


@triton.jit
def fold(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Sums [ROWS] of [ROWS, COLUMNS]: the upper half onto the lower half until one is left."""
    if COLUMNS == 128:
        x = halve(x, ROWS, 64)
    if COLUMNS >= 64:
        x = halve(x, ROWS, 32)
    x = halve(x, ROWS, 16)
    x = halve(x, ROWS, 8)
    x = halve(x, ROWS, 4)
    x = halve(x, ROWS, 2)
    return tl.reshape(halve(x, ROWS, 1), (ROWS,))


@triton.jit
def float_bits_to_bf16(x):
    """float32 rounded to a bf16, as float32."""
    return (float_to_bf16_bits(x).to(tl.uint32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def candidate(base, factor):
    s = float_bits_to_bf16(base * factor)
    return tl.where(s == 0.0, 0.0078125, s)  # INT4_ZERO_SCALE


@triton.jit
def codes_of(w, s):
    """q in [-8, 7]: adding 1.5 * 2^23 rounds to an integer, nearest even, as the twin's torch.round does."""
    t = tl.minimum(tl.maximum(divide(w, s[:, None]), -16.0), 16.0)
    q = (t + 12582912.0) - 12582912.0
    return tl.minimum(tl.maximum(q, -8.0), 7.0)


@triton.jit
def squared_error(w, s, q, counts, WEIGHTED: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr):
    d = w - s[:, None] * q
    square = d * d
    if WEIGHTED:
        square = square * counts
    return fold(square, ROWS, GROUP)


@triton.jit
def note_bad(bad, is_bad, place):
    """The smallest place [..] where is_bad."""
    tl.atomic_min(bad, tl.min(tl.where(is_bad, place.to(tl.int64), 0x7FFFFFFFFFFFFFFF)))


@triton.jit
def product(codes, stride, scales, scales_stride, row, column, mask, row_offset, block_rows, block_columns):
    """float32(code) * scale at (row, column) of a tile that starts at row_offset of the weight."""
    code = tl.load(codes + row * stride + column, mask=mask, other=0)
    place = (row + row_offset) // block_rows * scales_stride + column // block_columns
    return fp8_to_float(code) * tl.load(scales + place, mask=mask, other=0.0), code


@triton.jit
def fp8_to_plain_kernel(codes, stride, scales, scales_stride, out, bad, rows, columns, row_offset,
                        block_rows, block_columns, BF16: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row, column = i // columns, i % columns
    mask = row < rows
    value, code = product(codes, stride, scales, scales_stride, row, column, mask, row_offset, block_rows,
                          block_columns)  # fmt: skip
    note_bad(bad, (code & 0x7F) == 0x7F, i)
    if BF16:
        tl.store(out + i, float_to_bf16_bits(value), mask=mask)
    else:
        tl.store(out + i, value, mask=mask)


@triton.jit
def to_int4_kernel(source, stride, scales, scales_stride, factors, importance, packed, scale_out,
                   error_out, energy_out, bad, rows, columns, row_offset, block_rows, block_columns,
                   num_factors, KIND: tl.constexpr, UNBIASED: tl.constexpr, WEIGHTED: tl.constexpr,
                   GROUP: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """BLOCK groups of a weight (KIND fp8, bf16 or float32) to INT4 with its scale, error and energy."""
    group = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    groups = columns // GROUP
    is_group = group // groups < rows
    k = tl.arange(0, GROUP)
    row = (group // groups)[:, None]
    column = (group % groups * GROUP)[:, None] + k[None, :]
    mask = tl.broadcast_to(is_group[:, None], (BLOCK, GROUP))
    if KIND == "fp8":
        w, _ = product(
            source, stride, scales, scales_stride, row, column, mask, row_offset, block_rows, block_columns
        )
    elif KIND == "bf16":
        w = (tl.load(source + row * stride + column, mask=mask, other=0).to(tl.uint32) << 16).to(
            tl.float32, bitcast=True
        )
    else:
        w = tl.load(source + row * stride + column, mask=mask, other=0.0)
    note_bad(bad, is_finite(w) == 0, row * columns + column)
    w = tl.where(is_finite(w), w, 0.0)
    counts = w
    if WEIGHTED:
        counts = tl.load(importance + column, mask=mask, other=0.0)
    base = divide(tl.max(tl.abs(w), 1), tl.full((BLOCK,), 7.5, tl.float32))
    scale = candidate(base, tl.load(factors))
    error = squared_error(w, scale, codes_of(w, scale), counts, WEIGHTED, BLOCK, GROUP)
    first_error = error
    for i in range(1, num_factors):
        other = candidate(base, tl.load(factors + i))
        trial = squared_error(w, other, codes_of(w, other), counts, WEIGHTED, BLOCK, GROUP)
        is_better = trial < error
        scale, error = tl.where(is_better, other, scale), tl.where(is_better, trial, error)
    q = codes_of(w, scale)
    if WEIGHTED:
        error = squared_error(w, scale, q, counts, False, BLOCK, GROUP)
    elif UNBIASED:
        t = divide(w, scale[:, None])
        overlap = fold(q * t, BLOCK, GROUP)
        gain = divide(fold(t * t, BLOCK, GROUP), tl.where(overlap > 0.0, overlap, 1.0))
        unbiased = tl.where(overlap > 0.0, float_bits_to_bf16(scale * gain), scale)
        trial = squared_error(w, unbiased, q, counts, False, BLOCK, GROUP)
        is_kept = trial <= first_error
        scale, error = tl.where(is_kept, unbiased, scale), tl.where(is_kept, trial, error)
    nibbles = tl.reshape(q.to(tl.int32) + 8, (BLOCK, GROUP // 8, 8)) << (tl.arange(0, 8) * 4)[None, None, :]
    word = group[:, None] * (GROUP // 8) + tl.arange(0, GROUP // 8)[None, :]
    tl.store(packed + word, tl.sum(nibbles, 2), mask=is_group[:, None])
    tl.store(scale_out + group, float_to_bf16_bits(scale), mask=is_group)
    tl.store(error_out + group, error, mask=is_group)
    tl.store(energy_out + group, fold(w * w, BLOCK, GROUP), mask=is_group)


@triton.jit
def int4_to_plain_kernel(packed, stride, scale, scale_stride, out, rows, columns, group,
                         BF16: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row, column = i // columns, i % columns
    mask = row < rows
    word = tl.load(packed + row * stride + column // 8, mask=mask, other=0)
    q = ((word >> (column % 8 * 4).to(tl.int32)) & 15) - 8
    bits = tl.load(scale + row * scale_stride + column // group, mask=mask, other=0)
    value = q.to(tl.float32) * (bits.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    if BF16:
        tl.store(out + i, float_to_bf16_bits(value), mask=mask)
    else:
        tl.store(out + i, value, mask=mask)


@triton.jit
def load_plain(source, place, mask, BF16: tl.constexpr):
    if BF16:
        value = (tl.load(source + place, mask=mask, other=0).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        value = tl.load(source + place, mask=mask, other=0.0)
    return value


@triton.jit
def block_scales_kernel(source, stride, scales, bad, rows, columns, block_rows, block_columns,
                        BF16: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """One float32 scale per block, absmax / 448."""
    band, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first_row, first_column = band * block_rows, block * block_columns
    last_row, last_column = (
        tl.minimum(first_row + block_rows, rows),
        tl.minimum(first_column + block_columns, columns),
    )
    largest = tl.zeros((BLOCK,), tl.float32)
    for row in range(first_row, last_row):
        for start in range(first_column, last_column, BLOCK):
            column = start + tl.arange(0, BLOCK)
            mask = column < last_column
            value = load_plain(source, row * stride + column, mask, BF16)
            note_bad(bad, is_finite(value) == 0, row * columns + column)
            largest = tl.maximum(largest, tl.abs(value))
    scale = divide(tl.max(largest, 0), tl.max(largest, 0) * 0.0 + 448.0)
    tl.store(scales + band * tl.num_programs(1) + block, tl.where(scale == 0.0, 1.1920928955078125e-07, scale))


@triton.jit
def encode_kernel(source, stride, scales, scales_stride, codes, rows, columns, block_rows,
                  block_columns, BF16: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row, column = i // columns, i % columns
    mask = row < rows
    value = load_plain(source, row * stride + column, mask, BF16)
    scale = tl.load(scales + row // block_rows * scales_stride + column // block_columns, mask=mask, other=1.0)
    ratio = tl.minimum(tl.maximum(divide(value, scale), -448.0), 448.0)
    tl.store(codes + i, float_to_fp8(ratio), mask=mask)


@triton.jit
def widen_kernel(bits, out, size, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(bits + i, mask=i < size, other=0).to(tl.uint32) << 16
    tl.store(out + i, value.to(tl.float32, bitcast=True), mask=i < size)


@triton.jit
def narrow_kernel(values, out, size, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, float_to_bf16_bits(tl.load(values + i, mask=i < size, other=0.0)), mask=i < size)
