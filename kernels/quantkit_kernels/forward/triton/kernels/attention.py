"""What the attentions share: one step of the online softmax, and the sum of the parts of a context.

Softmax is in base 2, with log2(e) in the scale of the scores. Numerators are rounded to bf16 where they meet the
values; sums are float32.
"""

import triton
import triton.language as tl

from .common import float_to_bf16


@triton.jit
def soften(scores, largest, total):
    """Numerators of scores [M, T] (-inf: not seen), the new largest score [M] and sum [M], and what that takes off
    earlier sums [M].
    """
    now = tl.maximum(largest, tl.max(scores, 1))
    floor = tl.where(now == float("-inf"), 0.0, now)  # nothing seen yet: no -inf minus -inf
    p = tl.exp2(scores - floor[:, None])
    decay = tl.exp2(largest - floor)
    return p, now, total * decay + tl.sum(p, 1), decay


@triton.jit
def combine_kernel(parts, largests, totals, lengths, out, heads, chunk, parts_per_row, columns,
                   BLOCK: tl.constexpr):  # fmt: skip
    """The outputs of a row and head from the parts of its context, in their order; zeros if nothing was seen.

    parts: float32 [rows, heads, parts, D], numerators times values; largests, totals: [rows, heads, parts].
    """
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    column = tl.arange(0, BLOCK)
    first = (row * heads + head) * parts_per_row
    used = tl.minimum((tl.load(lengths + row) + chunk - 1) // chunk, parts_per_row)
    largest = tl.full((1,), float("-inf"), tl.float32)
    total = tl.zeros((1,), tl.float32)
    acc = tl.zeros((BLOCK,), tl.float32)
    for part in range(used):
        here = tl.load(largests + first + part)
        now = tl.maximum(largest, here)
        floor = tl.where(now == float("-inf"), 0.0, now)
        old, new = tl.exp2(largest - floor), tl.exp2(here - floor)
        values = tl.load(parts + (first + part) * columns + column, mask=column < columns, other=0.0)
        acc = acc * old + values * new
        total = total * old + tl.load(totals + first + part) * new
        largest = now
    result = tl.where(total == 0.0, 0.0, acc / tl.where(total == 0.0, 1.0, total))
    tl.store(out + (row * heads + head) * columns + column, float_to_bf16(result), mask=column < columns)
