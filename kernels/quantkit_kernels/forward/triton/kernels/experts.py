"""Experts of a layer, grouped: pairs of token and choice are sorted by expert on the device, nothing waits for it.

``route`` counts the pairs of each expert and cuts them into tiles, ``assign`` lists the pairs by expert in their
order, ``gate_up`` and ``down`` multiply a tile of pairs with a tile of an expert's rows, ``combine`` sums the
choices of a token in the order in which it gives them. The host launches as many tiles as there can be; those that
are not needed end at once.
"""

import triton
import triton.language as tl

from .common import float_to_bf16
from .linear import fp8_step, int4_group

COLUMNS = tl.constexpr(6)  # of Experts.pointers and .strides: gate, its scale, up and its, down and its


@triton.jit
def route_kernel(ids, starts, tile_expert, tile_first, pairs, experts, tiles, EXPERTS: tl.constexpr,
                 BLOCK_M: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """starts [E+1]: where an expert's pairs begin in the list; per tile its expert (-1: none) and first pair."""
    expert = tl.arange(0, EXPERTS)
    counts = tl.zeros((EXPERTS,), tl.int32)
    for first in range(0, pairs, BLOCK):
        i = first + tl.arange(0, BLOCK)
        found = tl.load(ids + i, mask=i < pairs, other=-1).to(tl.int32)
        is_here = (found >= 0) & (found < experts)
        counts += tl.histogram(tl.where(is_here, found, 0), EXPERTS, mask=is_here)
    ends = tl.cumsum(counts, 0)
    tl.store(starts + expert, ends - counts, mask=expert < experts)
    tl.store(starts + experts, tl.sum(counts, 0))
    own = (counts + BLOCK_M - 1) // BLOCK_M
    first_tile = tl.cumsum(own, 0) - own
    for step in range(tl.max(own, 0)):
        tl.store(tile_expert + first_tile + step, expert, mask=step < own)
        tl.store(tile_first + first_tile + step, ends - counts + step * BLOCK_M, mask=step < own)
    for first in range(tl.sum(own, 0), tiles, BLOCK):
        i = first + tl.arange(0, BLOCK)
        tl.store(tile_expert + i, tl.full((BLOCK,), -1, tl.int32), mask=i < tiles)


@triton.jit
def assign_kernel(ids, starts, order, pairs, BLOCK: tl.constexpr):
    """order: the pairs of each expert, ascending."""
    expert = tl.program_id(0)
    place = tl.load(starts + expert)
    for first in range(0, pairs, BLOCK):
        i = first + tl.arange(0, BLOCK)
        is_own = tl.load(ids + i, mask=i < pairs, other=-1).to(tl.int32) == expert
        rank = tl.cumsum(is_own.to(tl.int32), 0)
        tl.store(order + place + rank - 1, i, mask=is_own)
        place += tl.sum(is_own.to(tl.int32), 0)


@triton.jit
def tile_pairs(tile_first, starts, order, expert, tile, BLOCK_M: tl.constexpr):
    """The pairs of a tile, int64 [M], and which of the M there are."""
    i = tl.load(tile_first + tile) + tl.arange(0, BLOCK_M)
    is_pair = i < tl.load(starts + expert + 1)
    return tl.load(order + i, mask=is_pair, other=0).to(tl.int64), is_pair


@triton.jit
def silu_product(gate, up):
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def store_hidden(h, out, pair, is_pair, n, place, inner):
    """h [N, M] of the outputs n to their places in rows of pairs."""
    mask = (n < inner)[:, None] & is_pair[None, :]
    tl.store(out + pair[None, :] * inner + place[:, None], float_to_bf16(h), mask=mask)


@triton.jit
def store_share(acc, out, topk_weights, pair, is_pair, n, hidden):
    """acc [N, M] times the pairs' weights, float32."""
    weight = tl.load(topk_weights + pair, mask=is_pair, other=0.0)
    mask = (n < hidden)[:, None] & is_pair[None, :]
    tl.store(out + pair[None, :] * hidden + n[:, None], acc * weight[None, :], mask=mask)


@triton.jit
def int4_rows(pointers, strides, expert, part, n):
    """Pointers to the rows n of an expert's part (0 gate, 2 up, 4 down), as bytes, and to their scales."""
    at = expert * COLUMNS + part
    packed = tl.load(pointers + at).to(tl.pointer_type(tl.uint8))
    scales = tl.load(pointers + at + 1).to(tl.pointer_type(tl.bfloat16))
    return packed + n * tl.load(strides + at) * 4, scales + n * tl.load(strides + at + 1)


@triton.jit
def fp8_rows(pointers, strides, expert, part, n, block_rows):
    at = expert * COLUMNS + part
    codes = tl.load(pointers + at).to(tl.pointer_type(tl.uint8))
    scales = tl.load(pointers + at + 1).to(tl.pointer_type(tl.float32))
    return codes + n * tl.load(strides + at), scales + n // block_rows * tl.load(strides + at + 1)


@triton.jit
def int4_gate_up_kernel(x, x_stride, pointers, strides, starts, tile_expert, tile_first, order, out,
                        choices, inner, groups, GROUP: tl.constexpr, ALIGNED: tl.constexpr,
                        BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr):  # fmt: skip
    """bf16(silu(gate) * up), one row per pair."""
    tile = tl.program_id(0)
    expert = tl.load(tile_expert + tile)
    if expert < 0:
        return
    pair, is_pair = tile_pairs(tile_first, starts, order, expert, tile, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N).to(tl.int64)
    is_row = n < inner
    rows = x + (pair // choices) * x_stride
    gate_packed, gate_scales = int4_rows(pointers, strides, expert, 0, n)
    up_packed, up_scales = int4_rows(pointers, strides, expert, 2, n)
    gate = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    up = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for group in range(0, groups, 128 // GROUP):
        for step in tl.static_range(128 // GROUP):
            gate = int4_group(
                gate, rows, gate_packed, gate_scales, is_row, is_pair, group + step, groups, ALIGNED, GROUP
            )
            up = int4_group(up, rows, up_packed, up_scales, is_row, is_pair, group + step, groups, ALIGNED, GROUP)
    within = n % GROUP  # the order of columns that int4_group wants of its tokens
    place = n - within + (within % 2) * (GROUP // 2) + within // 2
    store_hidden(silu_product(gate, up), out, pair, is_pair, n, place, inner)


@triton.jit
def int4_down_kernel(h, topk_weights, pointers, strides, starts, tile_expert, tile_first, order,
                     out, inner, hidden, groups, GROUP: tl.constexpr, ALIGNED: tl.constexpr,
                     BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr):  # fmt: skip
    """weight * (h down^T), float32, one row per pair."""
    tile = tl.program_id(0)
    expert = tl.load(tile_expert + tile)
    if expert < 0:
        return
    pair, is_pair = tile_pairs(tile_first, starts, order, expert, tile, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N).to(tl.int64)
    is_row = n < hidden
    packed, scales = int4_rows(pointers, strides, expert, 4, n)
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for group in range(0, groups, 128 // GROUP):
        for step in tl.static_range(128 // GROUP):
            acc = int4_group(
                acc, h + pair * inner, packed, scales, is_row, is_pair, group + step, groups, ALIGNED, GROUP
            )
    store_share(acc, out, topk_weights, pair, is_pair, n, hidden)


@triton.jit
def fp8_gate_up_kernel(x, x_stride, pointers, strides, starts, tile_expert, tile_first, order, out,
                       choices, inner, hidden, block_rows, block_columns, ALIGNED: tl.constexpr,
                       BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr):  # fmt: skip
    tile = tl.program_id(0)
    expert = tl.load(tile_expert + tile)
    if expert < 0:
        return
    pair, is_pair = tile_pairs(tile_first, starts, order, expert, tile, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N).to(tl.int64)
    is_row = n < inner
    rows = x + (pair // choices) * x_stride
    gate_codes, gate_scales = fp8_rows(pointers, strides, expert, 0, n, block_rows)
    up_codes, up_scales = fp8_rows(pointers, strides, expert, 2, n, block_rows)
    gate = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    up = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for column in range(0, hidden, BLOCK_K):
        gate = fp8_step(gate, rows, gate_codes, gate_scales, is_row, is_pair, column, hidden, block_columns,
                        ALIGNED, BLOCK_K)  # fmt: skip
        up = fp8_step(up, rows, up_codes, up_scales, is_row, is_pair, column, hidden, block_columns, ALIGNED,
                      BLOCK_K)  # fmt: skip
    store_hidden(silu_product(gate, up), out, pair, is_pair, n, n, inner)


@triton.jit
def fp8_down_kernel(h, topk_weights, pointers, strides, starts, tile_expert, tile_first, order, out,
                    inner, hidden, block_rows, block_columns, ALIGNED: tl.constexpr,
                    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr):  # fmt: skip
    tile = tl.program_id(0)
    expert = tl.load(tile_expert + tile)
    if expert < 0:
        return
    pair, is_pair = tile_pairs(tile_first, starts, order, expert, tile, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N).to(tl.int64)
    is_row = n < hidden
    codes, scales = fp8_rows(pointers, strides, expert, 4, n, block_rows)
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for column in range(0, inner, BLOCK_K):
        acc = fp8_step(acc, h + pair * inner, codes, scales, is_row, is_pair, column, inner, block_columns,
                       ALIGNED, BLOCK_K)  # fmt: skip
    store_share(acc, out, topk_weights, pair, is_pair, n, hidden)


@triton.jit
def combine_kernel(shares, ids, out, choices, experts, hidden, BLOCK: tl.constexpr):
    """A token's shares in the order of its choices, without those of experts that are not here."""
    token = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for choice in range(choices):
        pair = token * choices + choice
        expert = tl.load(ids + pair)
        is_here = (expert >= 0) & (expert < experts)
        total += tl.load(shares + pair * hidden + n, mask=(n < hidden) & is_here, other=0.0)
    tl.store(out + token * hidden + n, float_to_bf16(total), mask=n < hidden)
