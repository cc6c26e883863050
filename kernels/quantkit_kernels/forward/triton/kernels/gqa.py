"""Grouped-query attention over pages: decode by parts of the context, prefill by tiles of queries."""

import triton
import triton.language as tl

from .attention import soften
from .common import dot, float_to_bf16, fp8_to_bf16, request_of

NEVER = tl.constexpr(2147483647)  # a position that no token has


@triton.jit
def load_paged(part, part_page, part_head, scales, scales_page, scales_head, page, offset, head,
               column, columns, is_used, FP8: tl.constexpr):  # fmt: skip
    """bf16 codes [T, D] of tokens and their scales [T] (1 in BF16); zeros where not used.

    A page holds codes [heads, S, D] and scales [heads, S].
    """
    place = part + page[:, None] * part_page + head * part_head + offset[:, None] * columns + column[None, :]
    mask = is_used[:, None] & (column < columns)[None, :]
    if FP8:
        value = fp8_to_bf16(tl.load(place, mask=mask, other=0))
        where = scales + page * scales_page + head * scales_head + offset
        scale = tl.load(where, mask=is_used, other=0.0)
    else:
        value = tl.load(place, mask=mask, other=0.0)
        scale = tl.where(is_used, 1.0, 0.0)
    return value, scale


@triton.jit
def gqa_decode_kernel(query, query_row, query_head, query_column, key, value, part_page, part_head,
                      key_scale, value_scale, scale_page, scale_head, table, table_stride, lengths,
                      parts, largests, totals, factor, heads, group, columns, page_size,
                      parts_per_row, CHUNK: tl.constexpr, FP8: tl.constexpr, BLOCK_H: tl.constexpr,
                      BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    """Numerators times values of one part of a request's context, for the query heads of one key-value head."""
    row, head, part = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.program_id(2)
    length = tl.load(lengths + row)
    start = part * CHUNK
    if start >= length:
        return
    lane = tl.arange(0, BLOCK_H)
    column = tl.arange(0, BLOCK_D)
    mask = (lane < group)[:, None] & (column < columns)[None, :]
    q_head = head * group + lane
    q = tl.load(query + row * query_row + q_head[:, None] * query_head + column[None, :] * query_column, mask=mask,
                other=0.0)  # fmt: skip
    largest = tl.full((BLOCK_H,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_H,), tl.float32)
    acc = tl.zeros((BLOCK_H, BLOCK_D), tl.float32)
    for first in range(start, tl.minimum(start + CHUNK, length), BLOCK_T):
        position = first + tl.arange(0, BLOCK_T)
        is_used = position < length
        page = tl.load(table + row * table_stride + position // page_size, mask=is_used, other=0).to(tl.int64)
        offset = position % page_size
        k, k_scale = load_paged(key, part_page, part_head, key_scale, scale_page, scale_head, page, offset, head,
                                column, columns, is_used, FP8)  # fmt: skip
        scores = dot(q, tl.trans(k), tl.zeros((BLOCK_H, BLOCK_T), tl.float32)) * (k_scale * factor)[None, :]
        scores = tl.where(is_used[None, :], scores, float("-inf"))
        p, largest, total, decay = soften(scores, largest, total)
        v, v_scale = load_paged(value, part_page, part_head, value_scale, scale_page, scale_head, page, offset,
                                head, column, columns, is_used, FP8)  # fmt: skip
        p = tl.where(is_used[None, :], p * v_scale[None, :], 0.0)
        acc = dot(float_to_bf16(p), v, acc * decay[:, None])
    place = (row * heads + q_head) * parts_per_row + part
    tl.store(parts + place[:, None] * columns + column[None, :], acc, mask=mask)
    tl.store(largests + place, largest, mask=lane < group)
    tl.store(totals + place, total, mask=lane < group)


@triton.jit
def first_of(is_such, token, at):
    """[D]: the first position so far whose value in a column is such (is_such [T, D], token [T])."""
    return tl.minimum(at, tl.min(tl.where(is_such, token[:, None], NEVER), 0))


@triton.jit
def attend(q, k, k_scale, v, v_scale, token, position, is_used, factor, largest, total, acc, nan_at, up_at,
           down_at, BLOCK_M: tl.constexpr, BLOCK_T: tl.constexpr):  # fmt: skip
    """One tile of keys and values, at the positions token [T], for queries that see up to position [M].

    On tensor cores a numerator of zero would meet a NaN that its query does not see. So values that are not finite
    are left out of the product, and the first position of each kind is kept for every column: a query sees all
    positions up to its own.
    """
    is_seen = (token[None, :] <= position[:, None]) & is_used[None, :]
    scores = dot(q, tl.trans(k), tl.zeros((BLOCK_M, BLOCK_T), tl.float32)) * (k_scale * factor)[None, :]
    p, largest, total, decay = soften(tl.where(is_seen, scores, float("-inf")), largest, total)
    p = tl.where(is_seen, p * v_scale[None, :], 0.0)
    bits = v.to(tl.uint16, bitcast=True)
    is_bad = (bits & 0x7F80) == 0x7F80
    acc = dot(float_to_bf16(p), tl.where(is_bad, tl.zeros_like(v), v), acc * decay[:, None])
    if tl.max(is_bad.to(tl.int32)) > 0:
        nan_at = first_of((bits & 0x7FFF) > 0x7F80, token, nan_at)
        up_at = first_of(bits == 0x7F80, token, up_at)
        down_at = first_of(bits == 0xFF80, token, down_at)
    return largest, total, acc, nan_at, up_at, down_at


@triton.jit
def gqa_prefill_kernel(query, query_token, query_head, query_column, key, value, part_page,
                       part_head, key_scale, value_scale, scale_page, scale_head, table,
                       table_stride, starts, lengths, fresh_key, key_token, key_head, key_column,
                       fresh_value, value_token, value_head, value_column, out, factor, heads,
                       requests, group, columns, page_size, FP8: tl.constexpr, FRESH: tl.constexpr,
                       BLOCK_M: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    """A tile of one request's queries, one head: history from pages, the chunk from pages or fresh, causal."""
    tile, q_head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    request = request_of(starts, requests, tile, BLOCK_M)
    start, end = tl.load(starts + request), tl.load(starts + request + 1)
    first_query = start + (tile - start // BLOCK_M - request) * BLOCK_M
    if first_query >= end:
        return
    head = q_head // group
    length = tl.load(lengths + request)
    history = length - (end - start)
    i = first_query + tl.arange(0, BLOCK_M)
    column = tl.arange(0, BLOCK_D)
    is_query = i < end
    mask = is_query[:, None] & (column < columns)[None, :]
    places = i.to(tl.int64)[:, None] * query_token + q_head * query_head + column[None, :] * query_column
    q = tl.load(query + places, mask=mask, other=0.0)
    position = history + i - start  # of each query
    paged = tl.minimum(length, history + first_query - start + BLOCK_M)
    if FRESH:
        paged = history
    largest = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    nan_at = tl.full((BLOCK_D,), NEVER, tl.int32)
    up_at = tl.full((BLOCK_D,), NEVER, tl.int32)
    down_at = tl.full((BLOCK_D,), NEVER, tl.int32)
    for first in range(0, paged, BLOCK_T):
        token = first + tl.arange(0, BLOCK_T)
        is_used = token < paged
        page = tl.load(table + request * table_stride + token // page_size, mask=is_used, other=0).to(tl.int64)
        offset = token % page_size
        k, k_scale = load_paged(key, part_page, part_head, key_scale, scale_page, scale_head, page, offset, head,
                                column, columns, is_used, FP8)  # fmt: skip
        v, v_scale = load_paged(value, part_page, part_head, value_scale, scale_page, scale_head, page, offset,
                                head, column, columns, is_used, FP8)  # fmt: skip
        largest, total, acc, nan_at, up_at, down_at = attend(
            q, k, k_scale, v, v_scale, token, position, is_used, factor, largest, total, acc, nan_at, up_at,
            down_at, BLOCK_M, BLOCK_T,
        )  # fmt: skip
    if FRESH:
        for first in range(0, tl.minimum(end - start, first_query - start + BLOCK_M), BLOCK_T):
            token = start + first + tl.arange(0, BLOCK_T)
            is_used = token < end
            which = is_used[:, None] & (column < columns)[None, :]
            k = tl.load(fresh_key + token.to(tl.int64)[:, None] * key_token + head * key_head
                        + column[None, :] * key_column, mask=which, other=0.0)  # fmt: skip
            v = tl.load(fresh_value + token.to(tl.int64)[:, None] * value_token + head * value_head
                        + column[None, :] * value_column, mask=which, other=0.0)  # fmt: skip
            ones = tl.full((BLOCK_T,), 1.0, tl.float32)
            largest, total, acc, nan_at, up_at, down_at = attend(
                q, k, ones, v, ones, token - start + history, position, is_used, factor, largest, total, acc,
                nan_at, up_at, down_at, BLOCK_M, BLOCK_T,
            )  # fmt: skip
    result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    result += tl.where(up_at[None, :] <= position[:, None], float("inf"), 0.0)
    result += tl.where(down_at[None, :] <= position[:, None], float("-inf"), 0.0)
    result += tl.where(nan_at[None, :] <= position[:, None], float("nan"), 0.0)
    place = (i.to(tl.int64)[:, None] * heads + q_head) * columns + column[None, :]
    tl.store(out + place, float_to_bf16(result), mask=mask)
