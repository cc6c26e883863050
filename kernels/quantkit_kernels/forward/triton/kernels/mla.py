"""Multi-head latent attention, absorbed: a row is one query token, its heads are the long side of the product.

The latent of a token is key and value of all heads. Its 512 columns are four blocks, each with a scale of its own
in FP8: scores add up the blocks' products times their scales, the output has an accumulator per block. Dense rows
see the positions below their length, sparse rows those of a list. Tokens of the row's own chunk may come from a
fresh BF16 tensor, all others from pages.
"""

import triton
import triton.language as tl

from .attention import soften
from .common import dot, float_to_bf16, fp8_to_bf16, request_of

BLOCK = tl.constexpr(128)  # columns of the latent under one scale
ROPE = tl.constexpr(64)


@triton.jit
def load_block(latent, scales, fresh, in_page, in_scales, in_fresh, is_paged, is_fresh,
               b: tl.constexpr, FP8: tl.constexpr, FRESH: tl.constexpr):  # fmt: skip
    """bf16 [T, 128] of block b and its scales [T] (1 in BF16 and fresh); zeros where there is no token."""
    column = tl.arange(0, BLOCK) + b * BLOCK
    if FP8:
        code = tl.load(latent + in_page[:, None] + column[None, :], mask=is_paged[:, None], other=0)
        value = fp8_to_bf16(code)
        scale = tl.load(scales + in_scales + b, mask=is_paged, other=1.0)
    else:
        value = tl.load(latent + in_page[:, None] + column[None, :], mask=is_paged[:, None], other=0.0)
        scale = tl.where(is_paged, 1.0, 1.0)
    if FRESH:
        new = tl.load(fresh + in_fresh[:, None] + column[None, :], mask=is_fresh[:, None], other=0.0)
        value = tl.where(is_fresh[:, None], new, value)
    return value, scale


@triton.jit
def weigh(acc, p, scale, decay, value):
    return dot(float_to_bf16(p * scale[None, :]), value, acc * decay[:, None])


@triton.jit
def load_query(query, q_row, head, query_head, query_column, b: tl.constexpr, is_head):
    column = tl.arange(0, BLOCK) + b * BLOCK
    place = query + q_row + head[:, None] * query_head + column[None, :] * query_column
    return tl.load(place, mask=is_head[:, None], other=0.0)


@triton.jit
def store_block(out, place, acc, b: tl.constexpr, is_head, PARTS: tl.constexpr):
    column = tl.arange(0, BLOCK) + b * BLOCK
    target = out + place[:, None] * (4 * BLOCK) + column[None, :]
    if PARTS:
        tl.store(target, acc, mask=is_head[:, None])
    else:
        tl.store(target, float_to_bf16(acc), mask=is_head[:, None])


@triton.jit
def mla_kernel(query, query_row, query_head, query_column, query_rope, rope_row, rope_head,
               rope_column, latent, latent_page, latent_token, rope, rope_page, rope_token, scales,
               scales_page, scales_token, table, table_stride, starts, lengths, fresh_latent,
               fresh_latent_token, fresh_rope, fresh_rope_token, indices, indices_stride, chosen,
               out, largests, totals, factor, heads, requests, page_size, chunk, parts_per_row,
               FP8: tl.constexpr, PREFILL: tl.constexpr, FRESH: tl.constexpr, SPARSE: tl.constexpr,
               PARTS: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_T: tl.constexpr):  # fmt: skip
    """One row, BLOCK_H heads, ``chunk`` tokens of what it sees; into parts (float32) or, in one go, the output."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(2)
    request = row
    visible = tl.load(lengths + row * 0)
    history = visible * 0
    start = history
    if PREFILL:
        request = request_of(starts, requests, row.to(tl.int32), 1).to(tl.int64)
        start, end = tl.load(starts + request), tl.load(starts + request + 1)
        history = tl.load(lengths + request) - (end - start)
        visible = history + (row - start).to(tl.int32) + 1
    else:
        visible = tl.load(lengths + row)
    count = visible
    if SPARSE:
        count = chosen
    begin = part * chunk
    if PARTS and begin >= count:
        return
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H).to(tl.int64)
    is_head = head < heads
    q_row = row * query_row
    q0 = load_query(query, q_row, head, query_head, query_column, 0, is_head)
    q1 = load_query(query, q_row, head, query_head, query_column, 1, is_head)
    q2 = load_query(query, q_row, head, query_head, query_column, 2, is_head)
    q3 = load_query(query, q_row, head, query_head, query_column, 3, is_head)
    r = tl.arange(0, ROPE)
    q_rope = tl.load(query_rope + row * rope_row + head[:, None] * rope_head + r[None, :] * rope_column,
                     mask=is_head[:, None], other=0.0)  # fmt: skip
    largest = tl.full((BLOCK_H,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_H,), tl.float32)
    acc0 = tl.zeros((BLOCK_H, BLOCK), tl.float32)
    acc1 = tl.zeros((BLOCK_H, BLOCK), tl.float32)
    acc2 = tl.zeros((BLOCK_H, BLOCK), tl.float32)
    acc3 = tl.zeros((BLOCK_H, BLOCK), tl.float32)
    for first in range(begin, tl.minimum(begin + chunk, count), BLOCK_T):
        i = first + tl.arange(0, BLOCK_T)
        position = i
        is_used = i < count
        if SPARSE:
            position = tl.load(indices + row * indices_stride + i, mask=is_used, other=-1)
            is_used = position >= 0
        is_paged = is_used
        is_fresh = is_used
        if FRESH:
            is_paged = is_used & (position < history)
            is_fresh = is_used & (position >= history)
        page = tl.load(table + request * table_stride + position // page_size, mask=is_paged, other=0).to(tl.int64)
        offset = position % page_size
        in_page = page * latent_page + offset * latent_token
        in_scales = page * scales_page + offset * scales_token
        own = (start + position - history).to(tl.int64)  # of the chunk's rows
        in_fresh = own * fresh_latent_token
        k_rope = tl.load(rope + (page * rope_page + offset * rope_token)[:, None] + r[None, :],
                         mask=is_paged[:, None], other=0.0)  # fmt: skip
        if FRESH:
            new = tl.load(fresh_rope + (own * fresh_rope_token)[:, None] + r[None, :], mask=is_fresh[:, None],
                          other=0.0)  # fmt: skip
            k_rope = tl.where(is_fresh[:, None], new, k_rope)
        k0, s0 = load_block(latent, scales, fresh_latent, in_page, in_scales, in_fresh, is_paged, is_fresh, 0, FP8,
                            FRESH)  # fmt: skip
        k1, s1 = load_block(latent, scales, fresh_latent, in_page, in_scales, in_fresh, is_paged, is_fresh, 1, FP8,
                            FRESH)  # fmt: skip
        k2, s2 = load_block(latent, scales, fresh_latent, in_page, in_scales, in_fresh, is_paged, is_fresh, 2, FP8,
                            FRESH)  # fmt: skip
        k3, s3 = load_block(latent, scales, fresh_latent, in_page, in_scales, in_fresh, is_paged, is_fresh, 3, FP8,
                            FRESH)  # fmt: skip
        none = tl.zeros((BLOCK_H, BLOCK_T), tl.float32)
        scores = dot(q_rope, tl.trans(k_rope), none)
        if FP8:
            scores += dot(q0, tl.trans(k0), none) * s0[None, :]
            scores += dot(q1, tl.trans(k1), none) * s1[None, :]
            scores += dot(q2, tl.trans(k2), none) * s2[None, :]
            scores += dot(q3, tl.trans(k3), none) * s3[None, :]
        else:
            scores = dot(q0, tl.trans(k0), scores)
            scores = dot(q1, tl.trans(k1), scores)
            scores = dot(q2, tl.trans(k2), scores)
            scores = dot(q3, tl.trans(k3), scores)
        scores = tl.where(is_used[None, :], scores * factor, float("-inf"))
        p, largest, total, decay = soften(scores, largest, total)
        p = tl.where(is_used[None, :], p, 0.0)
        acc0 = weigh(acc0, p, s0, decay, k0)
        acc1 = weigh(acc1, p, s1, decay, k1)
        acc2 = weigh(acc2, p, s2, decay, k2)
        acc3 = weigh(acc3, p, s3, decay, k3)
    place = row * heads + head
    if PARTS:
        place = place * parts_per_row + part
        tl.store(largests + place, largest, mask=is_head)
        tl.store(totals + place, total, mask=is_head)
    else:
        inverse = 1.0 / tl.where(total == 0.0, 1.0, total)
        acc0 *= inverse[:, None]
        acc1 *= inverse[:, None]
        acc2 *= inverse[:, None]
        acc3 *= inverse[:, None]
    store_block(out, place, acc0, 0, is_head, PARTS)
    store_block(out, place, acc1, 1, is_head, PARTS)
    store_block(out, place, acc2, 2, is_head, PARTS)
    store_block(out, place, acc3, 3, is_head, PARTS)
