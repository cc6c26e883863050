"""The DSA indexer: scores of all visible keys for a query token, and an exact selection of the best."""

import triton
import triton.language as tl

from .common import dot, fp8_to_bf16

DIM = tl.constexpr(128)
LOWEST = tl.constexpr(-2147483648)  # below every score's key: not visible


@triton.jit
def index_scores_kernel(query, query_row, query_head, query_column, weights, weights_row,
                        weights_head, key, key_page, scales, scales_page, table, table_stride, rows,
                        lengths, out, longest, heads, page_size, FP8: tl.constexpr,
                        BLOCK_H: tl.constexpr, BLOCK_T: tl.constexpr):  # fmt: skip
    """float32 scores of BLOCK_T positions of one token, -inf from its length on."""
    token = tl.program_id(0).to(tl.int64)
    position = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    is_seen = position < tl.load(lengths + token)
    row = tl.load(rows + token).to(tl.int64)
    page = tl.load(table + row * table_stride + position // page_size, mask=is_seen, other=0).to(tl.int64)
    offset = position % page_size
    column = tl.arange(0, DIM)
    place = key + page[:, None] * key_page + offset[:, None] * DIM + column[None, :]
    if FP8:
        k = fp8_to_bf16(tl.load(place, mask=is_seen[:, None], other=0))
        scale = tl.load(scales + page * scales_page + offset, mask=is_seen, other=0.0)
    else:
        k = tl.load(place, mask=is_seen[:, None], other=0.0)
        scale = tl.where(is_seen, 1.0, 0.0)
    score = tl.zeros((BLOCK_T,), tl.float32)
    for first in range(0, heads, BLOCK_H):
        head = first + tl.arange(0, BLOCK_H)
        is_head = head < heads
        q = tl.load(query + token * query_row + head.to(tl.int64)[:, None] * query_head
                    + column[None, :] * query_column, mask=is_head[:, None], other=0.0)  # fmt: skip
        weight = tl.load(weights + token * weights_row + head * weights_head, mask=is_head, other=0.0)
        product = dot(q, tl.trans(k), tl.zeros((BLOCK_H, BLOCK_T), tl.float32)) * scale[None, :]
        product = tl.maximum(product, 0.0, propagate_nan=tl.PropagateNan.ALL) * weight[:, None]
        score += tl.sum(tl.where(is_head[:, None], product, 0.0), 0)
    score = tl.where(is_seen, score, float("-inf"))
    tl.store(out + token * longest + position, score, mask=position < longest)


@triton.jit
def rank_keys_kernel(scores, scores_row, lengths, keys, columns, BLOCK: tl.constexpr):
    """Scores as int32 that sort as the ranks do: NaN above all, -0 as +0, hidden positions below all."""
    token = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    score = tl.load(scores + token * scores_row + i, mask=i < columns, other=0.0)
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    key = tl.where(score != score, 0x7FFFFFFF, key)
    key = tl.where(i < tl.load(lengths + token), key, LOWEST)
    tl.store(keys + token * columns + i, key, mask=i < columns)


@triton.jit
def select_kernel(keys, least, out, columns, k, BLOCK: tl.constexpr):
    """Positions of the k largest keys of a row, ascending: all above ``least``, the k-th largest, and of those
    equal to it the first; hidden ones never. The row was filled with -1.
    """
    token = tl.program_id(0).to(tl.int64)
    limit = tl.load(least + token)
    above = 0
    for first in range(0, columns, BLOCK):
        i = first + tl.arange(0, BLOCK)
        key = tl.load(keys + token * columns + i, mask=i < columns, other=LOWEST)
        above += tl.sum((key > limit).to(tl.int32), 0)
    equal, placed = 0, 0
    for first in range(0, columns, BLOCK):
        i = first + tl.arange(0, BLOCK)
        key = tl.load(keys + token * columns + i, mask=i < columns, other=LOWEST)
        is_equal = ((key == limit) & (key > LOWEST)).to(tl.int32)
        rank = equal + tl.cumsum(is_equal, 0)
        is_chosen = ((key > limit) | ((is_equal > 0) & (rank <= k - above))).to(tl.int32)
        place = placed + tl.cumsum(is_chosen, 0) - 1
        tl.store(out + token * k + place, i, mask=is_chosen > 0)
        equal += tl.sum(is_equal, 0)
        placed += tl.sum(is_chosen, 0)
